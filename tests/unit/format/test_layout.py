"""Key translation: every example of the draft, and the laws that make it one."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.keys import ChunkKeyEncoding, Style
from zarr_shardstore.format.layout import (
    ArrayLayout,
    chunk_grid_shape,
    is_inside,
)
from zarr_shardstore.format.shard import DRAFT_INDEX, ShardingSpec

Separator = Literal["/", "."]


def make_layout(
    cps: tuple[int, ...],
    encoding: ChunkKeyEncoding,
    prefix: str = "data/root/foo/baz/",
    grid: tuple[int, ...] | None = None,
) -> ArrayLayout:
    return ArrayLayout("foo/baz", prefix, encoding, grid, ShardingSpec(cps, DRAFT_INDEX))


DRAFT = make_layout((32, 2), ChunkKeyEncoding("draft", "/"))


def test_first_example_of_the_draft() -> None:
    """[96, 18] with chunks_per_shard=[32, 2] is in shard [3, 9], key data/root/foo/baz/c3/9."""
    chunk = DRAFT.chunk((96, 18))
    assert chunk.key == "data/root/foo/baz/c96/18"
    assert chunk.shard.coords == (3, 9)
    assert chunk.shard.key == "data/root/foo/baz/c3/9"
    assert chunk.entry_id == 0


@pytest.mark.parametrize("coords", list(itertools.product(range(96, 128), (18, 19))))
def test_all_positions_of_the_example_share_the_shard(coords: tuple[int, int]) -> None:
    """[96, 19], [97, 18], …, up to [127, 19] have the shard position [3, 9] too."""
    chunk = DRAFT.chunk(coords)
    assert chunk.shard.key == "data/root/foo/baz/c3/9"
    assert chunk.entry_id == (coords[0] - 96) * 2 + coords[1] - 18


@pytest.mark.parametrize("coords", [(95, 18), (128, 18), (96, 17), (96, 20), (0, 0)])
def test_neighbours_of_the_example_do_not(coords: tuple[int, int]) -> None:
    """One step outside is another shard."""
    assert DRAFT.chunk(coords).shard.key != "data/root/foo/baz/c3/9"


@pytest.mark.parametrize("start", [(0, 0), (32, 2), (32, 4), (64, 2), (96, 18)])
def test_valid_starting_positions_of_the_draft(start: tuple[int, int]) -> None:
    """The draft's starting positions of shards are entry 0 of their shard."""
    assert DRAFT.chunk(start).entry_id == 0


@pytest.mark.parametrize(
    ("style", "separator", "chunk_key", "shard_key"),
    [
        ("draft", ".", "a/c96.18", "a/c3.9"),
        ("draft", "/", "a/c96/18", "a/c3/9"),
        ("default", "/", "a/c/96/18", "a/c/3/9"),
        ("default", ".", "a/c.96.18", "a/c.3.9"),
        ("v2", ".", "a/96.18", "a/3.9"),
        ("v2", "/", "a/96/18", "a/3/9"),
    ],
)
def test_the_separator_of_the_array_is_honoured(
    style: Style, separator: Separator, chunk_key: str, shard_key: str
) -> None:
    """The shard key is spelled as the chunk key is."""
    layout = make_layout((32, 2), ChunkKeyEncoding(style, separator), "a/")
    chunk = layout.chunk((96, 18))
    assert (chunk.key, chunk.shard.key) == (chunk_key, shard_key)


def test_root_array() -> None:
    """An array at the root has no directory of its own."""
    draft = make_layout((2, 2), ChunkKeyEncoding("draft", "/"), "data/root/")
    assert draft.chunk((2, 3)).shard.key == "data/root/c1/1"
    v3 = make_layout((2, 2), ChunkKeyEncoding("default", "/"), "")
    assert v3.chunk((2, 3)).shard.key == "c/1/1"


def test_zero_dim_array_has_one_shard_of_one_entry_under_its_own_key() -> None:
    """The draft's 0-d key is c; zarr-python 2.18 writes c0, which must stay c0."""
    layout = make_layout((), ChunkKeyEncoding("draft", "/"))
    assert layout.chunk(()).shard.key == "data/root/foo/baz/c"
    assert layout.chunk(()).shard == layout.shard_of_key("data/root/foo/baz/c")
    aliased = layout.chunk((), key="data/root/foo/baz/c0")
    assert aliased.shard.key == "data/root/foo/baz/c0"
    assert aliased.shard.chunk_key(0) == "data/root/foo/baz/c0"


@st.composite
def geometries(draw: st.DrawFn, max_length: int = 5) -> tuple[ArrayLayout, tuple[int, ...]]:
    """A layout, its grid known or not, and the coordinates of one shard of it."""
    cps = tuple(draw(st.lists(st.integers(1, max_length), min_size=0, max_size=4)))
    if math.prod(cps) > 20_000:
        cps = cps[:2]
    style: Style = draw(st.sampled_from(get_args(Style)))
    separator: Separator = draw(st.sampled_from(get_args(Separator)))
    shard = tuple(draw(st.integers(0, 50)) for _ in cps)
    grid = None
    if draw(st.booleans()):
        grid = tuple(s * n + draw(st.integers(0, n + 1)) for s, n in zip(shard, cps, strict=True))
    return make_layout(cps, ChunkKeyEncoding(style, separator), "p/", grid), shard


@given(geometries())
def test_chunks_of_a_shard_and_no_other_map_to_it(
    geometry: tuple[ArrayLayout, tuple[int, ...]],
) -> None:
    """Law: the entries of a shard are a bijection to the chunks that translate to its key."""
    layout, coords = geometry
    shard = layout.shard(coords)
    ids = np.arange(layout.spec.n_entries)
    keys = shard.chunk_keys(ids)
    assert len(set(keys)) == math.prod(layout.spec.chunks_per_shard)
    for entry_id, key in enumerate(keys):
        decoded = layout.encoding.decode(key.removeprefix("p/"), layout.spec.ndim)
        assert decoded is not None
        chunk = layout.chunk(decoded)
        assert chunk.shard.key == shard.key
        assert chunk.entry_id == entry_id
    for dim, n in enumerate(layout.spec.chunks_per_shard):
        outside = [s * m for s, m in zip(coords, layout.spec.chunks_per_shard, strict=True)]
        outside[dim] += n
        assert layout.chunk(tuple(outside)).shard.key != shard.key


@given(geometries(), st.data())
def test_entries_in_the_grid(
    geometry: tuple[ArrayLayout, tuple[int, ...]], data: st.DataObject
) -> None:
    """Law: the entries of a shard that are in the array are those whose coordinates are."""
    layout, coords = geometry
    shard = layout.shard(coords)
    leading: tuple[int, ...] = ()
    if len(coords) > 0 and data.draw(st.booleans()):
        n = layout.spec.chunks_per_shard[0]
        leading = (coords[0] * n + data.draw(st.integers(0, n - 1)),)
    expected = []
    for i, key in enumerate(shard.chunk_keys(np.arange(layout.spec.n_entries))):
        c = layout.encoding.decode(key.removeprefix("p/"), layout.spec.ndim)
        assert c is not None
        if layout.has_chunk(c) and c[: len(leading)] == leading:
            expected.append(i)
    assert shard.entries_of(leading).tolist() == expected
    assert shard.n_grid_entries == len(shard.entries_of())


@given(geometries(max_length=100), st.data())
def test_keys_spelled_together_are_those_spelled_one_by_one(
    geometry: tuple[ArrayLayout, tuple[int, ...]], data: st.DataObject
) -> None:
    """Law: however many, in whatever order, with whatever gaps."""
    layout, coords = geometry
    shard, cps = layout.shard(coords), layout.spec.chunks_per_shard
    n_entries = layout.spec.n_entries
    ids = np.arange(n_entries)
    match data.draw(st.sampled_from(["all", "a slice", "gaps", "any order"])):
        case "a slice":
            low, high = sorted(data.draw(st.integers(0, n_entries)) for _ in range(2))
            ids = ids[low:high]
        case "gaps":
            step = data.draw(st.integers(1, 7))
            ids = np.delete(ids, slice(data.draw(st.integers(0, 9)), None, step))
        case "any order":
            ids[1:-1] = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(ids[1:-1])
    encode = layout.encoding.encode
    starts = [s * n for s, n in zip(coords, cps, strict=True)]
    inside = list(itertools.product(*(range(s, s + n) for s, n in zip(starts, cps, strict=True))))
    expected = [layout.prefix + encode(inside[i]) for i in ids.tolist()]
    assert shard.chunk_keys(ids) == expected


@given(
    st.sampled_from(get_args(Style)),
    st.sampled_from([*get_args(Separator), "-", "::"]),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 34)), max_size=3),
    st.booleans(),
    st.data(),
)
def test_entries_with_a_prefix_are_those_whose_keys_start_so(
    style: Style,
    separator: Any,
    dims: list[tuple[int, int]],
    has_grid: bool,
    data: st.DataObject,
) -> None:
    """Of any shard, for a prefix that ends anywhere: in a number, in the name of the array."""
    cps = tuple(n for n, _ in dims)
    grid = tuple(size for _, size in dims) if has_grid else None
    layout = make_layout(cps, ChunkKeyEncoding(style, separator), "a/", grid)
    shard = layout.shard(tuple(data.draw(st.integers(0, 34 // n)) for n in cps))
    other = layout.chunk(tuple(data.draw(st.integers(0, 340)) for _ in cps)).key
    keys = [shard.chunk_key(i) for i in range(math.prod(cps))]
    key = data.draw(st.sampled_from([*keys, other, "a/c/00", "a/c-1/", "a/c1//"]))
    prefix = key[: data.draw(st.integers(0, len(key)))] + data.draw(
        st.sampled_from(["", "1", separator[0], separator])
    )
    expected = [i for i in shard.entries_of().tolist() if keys[i].startswith(prefix)]
    assert shard.entries_with(prefix).tolist() == expected
    erased = [*range(len(keys))] if "a/".startswith(prefix) else expected  # beyond the edge, too
    assert [*shard.ids_to_erase(prefix)] == erased
    assert bool(shard.boxes_with(prefix)) == bool(expected)


def test_grids_by_hand() -> None:
    """Whole numbers of any size, rounded up for chunks and down for shards."""
    assert chunk_grid_shape((10, 9, 0, 10**30), (5, 5, 5, 1)) == (2, 2, 0, 10**30)
    shard = make_layout((5, 5, 1), ChunkKeyEncoding("v2", "/")).chunk((0, 9, 10**30)).shard
    assert shard.coords == (0, 1, 10**30)
    assert all(type(n) is int for n in (*chunk_grid_shape((9,), (5,)), *shard.coords))
    assert is_inside((1, 0), (2, 1))
    assert not is_inside((1, 1), (2, 1))


def test_a_key_is_that_of_a_chunk_as_it_is_spelled() -> None:
    chunk = DRAFT.chunk_of_key("data/root/foo/baz/c96/19")
    assert chunk is not None
    assert (chunk.key, chunk.shard, chunk.entry_id) == (
        "data/root/foo/baz/c96/19",
        DRAFT.shard((3, 9)),
        1,
    )
    aliased = make_layout((), ChunkKeyEncoding("draft", "/")).chunk_of_key("data/root/foo/baz/c0")
    assert aliased is not None
    assert aliased.key == "data/root/foo/baz/c0"
    assert DRAFT.shard_of_key("data/root/foo/baz/c3/9") == DRAFT.shard((3, 9))
    for key in ("data/root/foo/baz/c96", "data/root/foo/bar/c96/19"):
        assert DRAFT.chunk_of_key(key) is None
        assert DRAFT.shard_of_key(key) is None


def test_arrays_with_the_same_entries_may_differ_in_their_grid_only() -> None:
    draft = ChunkKeyEncoding("draft", "/")
    assert DRAFT.has_same_entries(make_layout((32, 2), draft, grid=(5, 5)))
    for other in (
        make_layout((32, 3), draft),
        make_layout((32, 2), ChunkKeyEncoding("draft", ".")),
        make_layout((32, 2), draft, "data/root/foo/bar/"),
    ):
        assert not DRAFT.has_same_entries(other)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("a/", [((95, 120), (0, 3))]),
        ("a/1", [((100, 120), (0, 3))]),
        ("a/9", [((95, 100), (0, 3))]),
        ("a/11", [((110, 120), (0, 3))]),
        ("a/95", [((95, 96), (0, 3))]),
        ("a/94", []),
        ("a/12", []),  # outside the grid
        ("a/0", []),
        ("a/100/", [((100, 101), (0, 3))]),
        ("a/100/1", [((100, 101), (1, 2))]),
        ("a/100/0", [((100, 101), (0, 1))]),
        ("a/100/3", []),
        ("b", []),
    ],
)
def test_boxes_of_a_prefix_that_ends_in_a_number(prefix: str, expected: Any) -> None:
    """The number itself, and those with more digits; none begins with a zero."""
    layout = make_layout((95, 10), ChunkKeyEncoding("v2", "/"), "a/", (120, 3))
    assert layout.shard((1, 0)).boxes_with(prefix) == expected


def test_boxes_of_numbers_with_more_digits_ascend() -> None:
    layout = make_layout((200,), ChunkKeyEncoding("v2", "/"), "a/", (150,))
    shard = layout.shard((0,))
    assert shard.boxes_with("a/1") == [((1, 2),), ((10, 20),), ((100, 150),)]
    assert shard.boxes_with("a/0") == [((0, 1),)]
    expected = [1, *range(10, 20), *range(100, 150)]
    assert shard.entries_with("a/1").tolist() == expected
