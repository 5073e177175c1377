"""What a shard's index says about keys: those of stored chunks in the array, and no others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.shard import DRAFT_INDEX, MISSING, ShardIndex, ShardingSpec
from zarr_shardstore.shards import shard_listing
from zarr_shardstore.shards.shard_listing import ListedKeys, VersionedKeys, locate_directory

ENCODINGS = [
    ChunkKeyEncoding("draft", "/"),
    ChunkKeyEncoding("draft", "."),
    ChunkKeyEncoding("default", "/"),
    ChunkKeyEncoding("default", "."),
    ChunkKeyEncoding("v2", "/"),
    ChunkKeyEncoding("v2", "."),
]


@given(st.data())
def test_keys_are_those_of_stored_chunks_in_the_grid(data: st.DataObject) -> None:
    """Law: in C order, with the sizes that the index tells, a few at a time, below a prefix."""
    cps = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    coords = tuple(data.draw(st.integers(0, 12)) for _ in cps)
    grid = tuple(c * n + data.draw(st.integers(0, n + 1)) for c, n in zip(coords, cps, strict=True))
    encoding = data.draw(st.sampled_from(ENCODINGS))
    known_grid = data.draw(st.sampled_from([grid, None]))
    layout = ArrayLayout("a", "a/", encoding, known_grid, ShardingSpec(cps, DRAFT_INDEX))
    sizes = data.draw(
        st.lists(
            st.none() | st.integers(0, 9),
            min_size=layout.spec.n_entries,
            max_size=layout.spec.n_entries,
        )
    )
    fields = np.array([(MISSING,) * 2 if s is None else (7, s) for s in sizes], np.uint64)
    shard, index = layout.shard(coords), ShardIndex(fields.reshape(-1, 2))
    box = [range(c * n, (c + 1) * n) for c, n in zip(coords, cps, strict=True)]
    expected = [
        ("a/" + encoding.encode(chunk), size)
        for chunk, size in zip(itertools.product(*box), sizes, strict=True)
        if size is not None and layout.has_chunk(chunk)
    ]
    assert list(ListedKeys("", [], [(shard, index)]).sizes()) == expected
    prefix = data.draw(st.sampled_from(["", "a/", "a/c", "a/c/1", "a/c1", "a/1", "b"]))
    expected = [(key, size) for key, size in expected if key.startswith(prefix)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_listing, "_KEYS_AT_ONCE", data.draw(st.integers(1, 40)))
        parts = list(ListedKeys(prefix, [], [(shard, index)]).key_lists())
        assert [key for keys in parts for key in keys] == [key for key, _ in expected]
        assert max(map(len, parts), default=0) <= shard_listing._KEYS_AT_ONCE
    assert list(ListedKeys(prefix, [], [(shard, index)]).sizes()) == expected


def directories_of(keys: list[str]) -> dict[str, set[str]]:
    """Names in each directory of keys."""
    found: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split("/")
        for n in range(1, len(parts)):
            found.setdefault("/".join(parts[:n]) + "/", set()).add(parts[n])
    return found


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("grid", [(7, 5, 4), None])
def test_directories_of_chunks_from_directories_of_shards(
    encoding: ChunkKeyEncoding, grid: tuple[int, ...] | None
) -> None:
    """Each directory of chunks has the names that its shards say; the base store is asked for one
    directory. What may be there is known from names of shard directories alone."""
    layout = ArrayLayout("a", "a/", encoding, grid, ShardingSpec((3, 2, 2), DRAFT_INDEX))
    chunks = [(0, 0, 0), (2, 1, 3), (3, 0, 0), (6, 4, 3), (5, 4, 2), (4, 3, 1)]
    shards: dict[ShardRef, Any] = {}
    for coords in chunks:
        ref = layout.chunk(coords)
        fields = shards.setdefault(ref.shard, np.full((12, 2), MISSING, np.uint64))
        fields[ref.entry_id] = 0, 1
    stored = directories_of([shard.key for shard in shards])
    everywhere = directories_of(
        [layout.chunk(c).key for c in itertools.product(*map(range, (7, 5, 4)))]
    )
    keys = [layout.chunk(c).key for c in chunks]
    for path, names in directories_of(keys).items():
        place = locate_directory(layout, path)
        assert place is not None
        assert path == layout.prefix + place.path
        in_it, possible = set(), set()
        for name in stored[place.base_directory]:
            shard = place.shard_of_name(name)
            if shard is not None:
                in_it |= set(place.names_of_entries(shard, ShardIndex(shards[shard])))
                assert place.expand_name(name) is None
            else:
                possible |= set(place.expand_name(name) or ())
        if path == "a/" and encoding.style == "default" and encoding.separator == "/":
            assert possible == {"c"}
            continue
        entries = {name for name in names if path + name in keys}
        assert in_it == entries
        below = names - entries
        if below and grid is not None:
            assert below <= possible <= everywhere[path]


@pytest.mark.parametrize("path", ["b/", "a/x/", "a/c/0/0/0/", "a/c/01/", "", "a/c/0"])
def test_directories_that_have_no_chunks(path: str) -> None:
    layout = ArrayLayout(
        "a", "a/", ChunkKeyEncoding("default", "/"), (4, 4), ShardingSpec((2, 2), DRAFT_INDEX)
    )
    place = locate_directory(layout, path)
    if path == "a/c/0":  # text in a name
        assert place is not None
    else:
        assert place is None
    inside = locate_directory(layout, "a/c/3/")
    assert inside is not None
    assert (inside.path, inside.leading, inside.base_directory) == ("c/3/", (3,), "a/c/1/")
    assert inside.expand_name("x") is None
    assert inside.shard_of_name("x") is None
    middle = locate_directory(layout, "a/c/")
    assert middle is not None
    assert middle.expand_name("1") == ["2", "3"]
    assert inside.expand_name("1") is None
    own = locate_directory(layout, "a/")
    assert own is not None
    assert (own.path, own.leading, own.base_directory) == ("", (), "a/")


def test_pages_of_keys_have_versions_or_none() -> None:
    assert VersionedKeys(["a", "b"]).versions == [None, None]
    assert VersionedKeys(["a", "b"], ["v", None]).versions == ["v", None]
    listed = ListedKeys("a", [("a/zarr.json", 5)])
    assert list(listed.key_lists()) == [["a/zarr.json"]]
    assert list(listed.sizes()) == [("a/zarr.json", 5)]


def test_names_that_are_listed_without_an_index_are_bounded() -> None:
    """One more than may be listed tells that there are more."""
    for n, n_listed in ((16_383, 16_383), (16_384, 16_384), (16_385, 16_385), (99_999, 16_385)):
        spec = ShardingSpec((n, 1), DRAFT_INDEX)
        layout = ArrayLayout("a", "a/", ChunkKeyEncoding("v2", "/"), (5 * n, 4), spec)
        place = locate_directory(layout, "a/")
        assert place is not None
        names = place.expand_name("2")
        assert names is not None
        assert (len(names), names[0], names[-1]) == (
            n_listed,
            str(2 * n),
            str(2 * n + n_listed - 1),
        )
