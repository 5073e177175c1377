"""What is in a store, found without looking at what is below the chunk directories of arrays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from tests.support.bases import put
from tests.support.hierarchies import (
    BASES,
    DRAFT,
    KINDS,
    V2,
    V3,
    ArrayOf,
    Chunks,
    Kind,
    grid_coords,
)
from tests.support.rounds import rounds
from zarr_shardstore import ShardingStore, SpecError, shard_store
from zarr_shardstore.format import keys
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.shards.requests import Get, ListDir, ListPage
from zarr_shardstore.store.base_handle import open_base
from zarr_shardstore.tools.inspect import find as find_module
from zarr_shardstore.tools.inspect.find import find_contents


def find(objects: dict[str, bytes]) -> tuple[Any, list[Any]]:
    """The hierarchy of a dict, and the requests of each round."""
    backend = MappingBackend(dict(objects))
    flow = find_contents()
    rounds: list[Any] = []
    replies: Any = None
    while True:
        try:
            requests = flow.send(replies)
        except StopIteration as stop:
            return stop.value, rounds
        rounds.append(requests)
        replies = backend.perform(requests)


def listings(rounds: list[Any]) -> list[str]:
    requests = [request for some in rounds for request in some]
    assert all(isinstance(r, ListDir | ListPage | Get) for r in requests)
    return [
        r.cursor.prefix if isinstance(r, ListPage) else r.prefix
        for r in requests
        if isinstance(r, ListDir | ListPage)
    ]


def full(kind: Kind, path: str, grid: tuple[int, ...] = (3, 1, 2)) -> ArrayOf:
    ones, zeros = (1,) * len(grid), (0,) * len(grid)
    return ArrayOf(kind, path, grid, ones, zeros, dict.fromkeys(grid_coords(grid), b"chunk"))


OTHERS = {
    "README": b"",
    "g/zarr.json": b'{"zarr_format": 3, "node_type": "group"}',
    "g/.zgroup": b'{"zarr_format": 2}',
    "g/.zattrs": b"{}",
    "g/empty/.zgroup": b'{"zarr_format": 2}',
    "g/deep/down/there": b"x",
    "not/an/array/zarr.json": b"no JSON",
    "not/an/array/c/0/0/0": b"no chunk",
    "c/0/0/0": b"no chunk",
    "0/0": b"no chunk",
    ".zmetadata": b"{}",
    "name with spaces/ü/\U0001f600": b"x",
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("path", ["a", "g/c", "g/0", "g/a b/ü"])
def test_arrays_and_exactly_the_other_keys(name: str, path: str) -> None:
    """Neither documents of arrays nor chunks; each other key once, wherever it is."""
    kind = KINDS[name]
    array = full(kind, path)
    directory = ("data/root/" if kind.hierarchy == "draft" else "") + path
    strays = {
        f"{directory}/notes": b"",
        f"{directory}/.zattrs": b"{}",
        f"{directory}/sub/dir/file": b"x",
        f"{directory}/c.x": b"x",
        f"{directory}/00": b"x",
        f"{directory}/-1": b"x",
    }
    documents = array.objects().keys() - array.chunk_objects().keys()
    objects = {**array.objects(), **OTHERS, **strays}
    found, _ = find(objects)
    assert list(found.arrays) == [Node(kind.hierarchy, path)]  # type: ignore[arg-type]
    (there,) = found.arrays.values()
    assert there.doc == array.document
    expected = (documents | OTHERS.keys() | strays.keys()) - {kind.document_key(path)}
    assert Counter(found.other_keys) == Counter(expected)


@pytest.mark.parametrize("where", BASES)
def test_every_base_store_finds_the_same(where: str) -> None:
    """Also keys of no bytes, and keys beside directories."""
    base = BASES[where]()
    objects = {**full(V3, "a").objects(), **OTHERS, "a/notes": b"", "top": b"x"}
    for key, value in objects.items():
        put(base, key, value)
    found = open_base(base).run(find_contents())
    assert [node.path for node in found.arrays] == ["a"]
    assert Counter(found.other_keys) == Counter([*OTHERS, "a/notes", "top"])


@pytest.mark.parametrize("name", KINDS)
def test_the_array_is_the_root(name: str) -> None:
    """Its directory is that of the whole store."""
    kind = KINDS[name]
    array = full(kind, "")
    others = {"notes": b"", "more/notes": b""}
    found, _ = find({**array.objects(), **others})
    entry = {"zarr.json"} if kind.hierarchy == "draft" else set()
    assert list(found.arrays) == [Node(kind.hierarchy, "")]  # type: ignore[arg-type]
    assert Counter(found.other_keys) == Counter(others.keys() | entry)


@settings(max_examples=rounds(60))
@given(
    arrays=st.lists(
        st.tuples(
            st.sampled_from(["a", "b/c", "b/0", "b/c0", "b/d/e", "c.0", "meta", "data/x", "10"]),
            st.sampled_from(sorted(KINDS)),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        unique_by=lambda row: row[0],
    )
)
def test_many_arrays(arrays: list[tuple[str, str, list[int]]]) -> None:
    """Arrays of all hierarchies in one store; everything is found once."""
    objects: dict[str, bytes] = {}
    expected = set()
    chunks: set[str] = set()
    for path, name, grid in arrays:
        array = full(KINDS[name], path, tuple(grid))
        objects |= {k: v for k, v in array.objects().items() if k != ".zmetadata"}
        chunks |= array.chunk_objects().keys()
        expected.add((array.kind.hierarchy, path, array.kind.document_key(path)))
    found, _ = find(objects)
    assert {(node.hierarchy, node.path) for node in found.arrays} == {row[:2] for row in expected}
    assert [node.path for node in found.arrays] == sorted(row[0] for row in arrays)
    documents = {row[2] for row in expected}
    assert Counter(found.other_keys) == Counter(objects.keys() - chunks - documents)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("path", ["g/a", ""])
def test_nothing_is_listed_below_chunks(name: str, path: str) -> None:
    """The directory of the array is, those of its chunks are not: millions may be there."""
    kind = KINDS[name]
    array = full(kind, path, (20, 2, 2))
    _, rounds = find(array.objects())
    root = "data/root/" if kind.hierarchy == "draft" else ""
    own = f"{root}{path}/" if path else root
    deeper = [prefix for prefix in listings(rounds) if prefix.startswith(own) and prefix != own]
    assert deeper == ([] if own else ["meta/"])
    assert listings(rounds).count(own) == 1
    n_requests = sum(map(len, rounds))
    _, rounds = find(full(kind, path, (2, 2, 2)).objects())
    assert sum(map(len, rounds)) == n_requests, "as many as for a small array"


@pytest.mark.parametrize("name", ["v3 .", "v2 .", "v3 v2-keys .", "draft ."])
@pytest.mark.parametrize("path", ["g/a", ""])
def test_a_directory_of_too_many_chunks_is_not_listed(name: str, path: str) -> None:
    """With the separator "." each chunk is a name there; documents are found without a listing."""
    kind = KINDS[name]
    chunks: Chunks = {(5, 6, 7): b"chunk"}
    array = ArrayOf(kind, path, (1000, 1000, 1000), (1, 1, 1), (0, 0, 0), chunks)
    root = "data/root/" if kind.hierarchy == "draft" else ""
    own = f"{root}{path}/" if path else root
    attributes = {f"{own}.zattrs": b"{}"} if kind.hierarchy == "v2" else {}
    found, rounds = find({**array.objects(), **attributes})
    assert own not in listings(rounds)
    assert list(found.arrays) == found.unlisted
    documents = array.objects().keys() - array.chunk_objects().keys() - {kind.document_key(path)}
    assert Counter(found.other_keys) == Counter(documents | attributes.keys())


def test_a_group_named_meta_is_no_draft_hierarchy() -> None:
    """Its arrays are not listed with all their chunks."""
    objects = full(V3, "meta/a").objects() | full(V3, "meta/root2/b").objects()
    found, rounds = find(objects)
    assert [node.path for node in found.arrays] == ["meta/a", "meta/root2/b"]
    assert not any(isinstance(r, ListPage) for some in rounds for r in some)


def test_rounds_are_as_many_as_directories_are_deep() -> None:
    """All directories of one depth are looked at together."""
    objects: dict[str, bytes] = {}
    for n in range(100):
        objects |= full(V3, f"g/h/a{n}", (1,)).objects()
    _, rounds = find(objects)
    assert len(rounds) <= 1 + 2 * 4
    assert len(listings(rounds)) <= 2 + 3 + 100


def test_what_is_staged_is_no_part() -> None:
    """At the root only; elsewhere the name means nothing."""
    objects = full(V2, "a").objects()
    staged = {f".zarr_shardstore/1234/values/{key}": b"x" for key in objects}
    elsewhere = {"g/.zarr_shardstore/x": b"x"}
    found, rounds = find({**objects, **staged, **elsewhere})
    assert [node.path for node in found.arrays] == ["a"]
    assert Counter(found.other_keys) == Counter([".zgroup", ".zmetadata", "a/.zattrs", *elsewhere])
    assert ".zarr_shardstore/" not in listings(rounds)


def test_an_unknown_chunk_grid_makes_all_keys_other_ones() -> None:
    """Which of them are chunks is not known, so each is one to copy."""
    array = full(V3, "a")
    doc = {**array.document, "chunk_grid": {"name": "rectangular", "configuration": {}}}
    objects = {**array.objects(), "a/zarr.json": json.dumps(doc).encode()}
    found, _ = find(objects)
    (there,) = found.arrays.values()
    assert there.geometry is None
    assert Counter(found.other_keys) == Counter(array.chunk_objects().keys())


def test_twins_are_found_both() -> None:
    """Documents of v2 and v3 at one path, and the chunks of both are none of the other keys."""
    v3_with_v2_keys = Kind("v3", "v2", ".")
    objects = full(V2, "a").objects() | full(v3_with_v2_keys, "a").objects()
    objects |= full(DRAFT, "a").objects()
    found, _ = find(objects)
    assert {node.hierarchy for node in found.arrays} == {"v2", "v3", "draft"}
    assert Counter(found.other_keys) == Counter([".zgroup", ".zmetadata", "a/.zattrs", "zarr.json"])


def test_many_directories_in_rounds_of_bounded_size() -> None:
    """A round holds requests for so many names, not for all of them."""
    objects = {f"d{n}/key": b"x" for n in range(50)}
    with mock.patch.object(find_module, "_DIRECTORIES_AT_ONCE", 8):
        found, rounds = find(objects)
    assert sorted(found.other_keys) == sorted(objects)
    assert max(map(len, rounds)) <= 3 * 8


class Looping(MemoryStore):
    """Each directory has three, as links on a web server may lead."""

    n_listings = 0

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        self.n_listings += 1
        for name in ("a", "b", "c"):
            yield name


def test_directories_that_are_listed_in_each_other() -> None:
    store = Looping()
    with mock.patch.object(keys, "_MAX_REPEATED", 64), pytest.raises(SpecError, match="in itself"):
        open_base(store).run(find_contents())
    assert store.n_listings < 3**6


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_part_of_which_a_group_above_has_copies_is_not_converted_in_place(
    tmp_path: Path, zarr_format: Any, kind: str
) -> None:
    """zarr would read the copies, and look for the former chunks."""
    top = str(tmp_path) if kind == "local" else f"memory:/{tmp_path}"
    options: Any = {"shape": (8,), "chunks": (1,), "dtype": "i4", "zarr_format": zarr_format}
    for name in ("g/b", "other"):
        zarr.create_array(top, name=name, **options)[:] = 1
    zarr.consolidate_metadata(top, zarr_format=zarr_format)
    parts: list[Any] = [f"{top}/g/b", zarr.open_group(top)["g"]]
    for part in parts:
        with pytest.raises(SpecError, match="would keep the former documents"):
            shard_store(part, chunks_per_shard=2)
    plain: Any = zarr.open_group(top)
    assert np.array_equal(plain["g/b"][:], [1] * 8)
    shard_store(top, chunks_per_shard=2, paths="g/b")
    ours: Any = zarr.open_group(ShardingStore(top))
    assert np.array_equal(ours["g/b"][:], [1] * 8)
    (array,) = shard_store(f"{top}/g/b", chunks_per_shard=2).arrays
    assert array.action == "skipped"  # nothing would change
