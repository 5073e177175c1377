"""`KeyTable` says of any key what its array's layout says, whatever it has met before."""

from __future__ import annotations

import random
from itertools import product
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zarr_shardstore.format import layout as layout_module
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import ArrayLayout, KeyTable
from zarr_shardstore.format.shard import DRAFT_INDEX, ShardingSpec

PREFIXES = {"draft": ("data/root/a/", "data/root/a.b/c/"), "default": ("", "a/", "a.1/c/0/")}
ENCODINGS = [
    ChunkKeyEncoding(style, separator)
    for style in ("draft", "default", "v2")
    for separator in ("/", ".")
]


@st.composite
def layouts(draw: st.DrawFn) -> ArrayLayout:
    encoding = draw(st.sampled_from(ENCODINGS))
    prefix = draw(st.sampled_from(PREFIXES.get(encoding.style, PREFIXES["default"])))
    cps = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    grid = tuple(draw(st.integers(1, 12)) for _ in cps)
    return ArrayLayout("a", prefix, encoding, grid, ShardingSpec(cps, DRAFT_INDEX))


@st.composite
def layouts_and_keys(draw: st.DrawFn) -> tuple[ArrayLayout, list[str]]:
    """Keys of chunks inside and outside of the array, those with a blot, and others."""
    layout = draw(layouts())
    coords = st.tuples(*(st.integers(0, 13) for _ in range(layout.spec.ndim)))
    of_chunks = coords.map(lambda c: layout.prefix + layout.encoding.encode(c))
    blots = st.sampled_from(["", "0", "00", "-1", "/", ".", "c", "x", "٣", " ", "zarr.json"])
    blotted = st.tuples(of_chunks, st.integers(0, 30), blots).map(
        lambda t: t[0][: t[1]] + t[2] + t[0][t[1] :]
    )
    cut_off = st.tuples(of_chunks, st.integers(0, 30)).map(lambda t: t[0][t[1] :])
    keys = st.lists(st.one_of(of_chunks, blotted, cut_off), min_size=1, max_size=30)
    return layout, draw(keys)


def said_by_layout(layout: ArrayLayout, key: str) -> tuple[str, int] | None:
    if not key.startswith(layout.prefix):
        return None
    coords = layout.coords_of(key)
    if coords is None or not layout.has_chunk(coords):
        return None
    chunk = layout.chunk(coords, key)
    return chunk.shard.key, chunk.entry_id


@pytest.mark.parametrize("max_remembered", [layout_module._MAX_ITEMS, 2])
@given(layouts_and_keys())
@example(
    (
        ArrayLayout("a", "a/", ENCODINGS[-1], (9, 9), ShardingSpec((2, 2), DRAFT_INDEX)),
        ["a/1.2", "a/1.3", "a/8.2", "a/1", "a/1.2.3", "a/.2", "a/1.", "1.2", "b/1.2", "a/01.2"],
    )
)
def test_translations(max_remembered: int, case: tuple[ArrayLayout, list[str]]) -> None:
    layout, keys = case
    translate = KeyTable(layout).translate
    with mock.patch.object(layout_module, "_MAX_ITEMS", max_remembered):
        for key in keys + keys:
            assert translate(key) == said_by_layout(layout, key), key


@pytest.mark.parametrize("grid", [(7,), (7, 5), (5, 7, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_all_keys_of_a_grid_and_around(encoding: ChunkKeyEncoding, grid: Coords) -> None:
    """In any order: most rows and last coordinates are known from other keys."""
    cps = (3, 2, 4, 2)[: len(grid)]
    prefix = "data/root/a/" if encoding.style == "draft" else "a/"
    layout = ArrayLayout("a", prefix, encoding, grid, ShardingSpec(cps, DRAFT_INDEX))
    translate = KeyTable(layout).translate
    keys = [prefix + encoding.encode(c) for c in product(*(range(n + 2) for n in grid))]
    for key in random.Random(0).sample(keys, len(keys)):
        assert translate(key) == said_by_layout(layout, key), key


def test_what_is_remembered_is_bounded() -> None:
    layout = ArrayLayout("a", "a/", ENCODINGS[2], (40, 40), ShardingSpec((4, 4), DRAFT_INDEX))
    keys = KeyTable(layout)
    with mock.patch.object(layout_module, "_MAX_ITEMS", 8):
        for i in range(40):
            for j in range(40):
                assert keys.translate(f"a/c/{i}/{j}") == (
                    f"a/c/{i // 4}/{j // 4}",
                    i % 4 * 4 + j % 4,
                )
                assert max(len(keys._rows), len(keys._last)) <= 8


@pytest.mark.parametrize("grid", [(8, 6), None])
def test_no_number_is_parsed_twice(grid: tuple[int, ...] | None) -> None:
    """Keys that were translated are found; of a new row only its own number is parsed."""
    spec = ShardingSpec((2, 3), DRAFT_INDEX)
    layout = ArrayLayout("a", "a/", ChunkKeyEncoding("default", "/"), grid, spec)
    table = KeyTable(layout)
    parsed: list[str] = []
    decode = ChunkKeyEncoding.decode

    def counted(encoding: ChunkKeyEncoding, suffix: str, ndim: int) -> Any:
        parsed.append(suffix)
        return decode(encoding, suffix, ndim)

    chunks = [layout.chunk(coords) for coords in product(range(8), range(6))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkKeyEncoding, "decode", counted)
        for _ in range(2):
            for key, shard, entry_id in chunks:
                assert table.translate(key) == (shard.key, entry_id)
                assert table.shard(shard.key) == shard
    # 6 numbers of the first row, 8 rows; 8 shards
    assert len(parsed) <= 6 + 8 + 8
    assert table.shard(chunks[0].shard.key) is table.shard(chunks[1].shard.key)


def test_what_is_no_text_is_no_key() -> None:
    spec = ShardingSpec((2,), DRAFT_INDEX)
    table = KeyTable(ArrayLayout("a", "a/", ENCODINGS[0], (4,), spec))
    for odd in (None, 5, b"a/c0"):
        assert table.translate(odd) is None  # type: ignore[arg-type]
