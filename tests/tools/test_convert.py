"""What `shard_store`, `unshard_store` and `reshard` promise, one example each."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.metadata.migrate_v3 import migrate_v2_to_v3
from zarr.storage import LocalStore, MemoryStore

from tests.support.bases import put, temporary_directory
from tests.support.hierarchies import (
    BASES,
    DRAFT,
    KINDS,
    V2,
    V3,
    ArrayOf,
    Coords,
    Counting,
    Kind,
    grid_coords,
    meaning,
    view,
)
from tests.support.kit import objects_of, tuned
from tests.support.pipeline_arrays import THEIRS
from zarr_shardstore import (
    DraftHierarchyStore,
    Progress,
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnsupportedError,
    get_shard_info,
    reshard,
    shard_store,
    unshard_store,
)
from zarr_shardstore.errors import ReadOnlyError, UnfinishedConversionError


def full(kind: Kind = V3, path: str = "a", grid: Coords = (3, 2)) -> ArrayOf:
    chunks = {c: f"{path}{c}".encode() for c in grid_coords(grid)}
    return ArrayOf(kind, path, grid, (1,) * len(grid), (0,) * len(grid), chunks)


def stored_document(base: Any, array: ArrayOf) -> dict[str, Any]:
    doc: dict[str, Any] = json.loads(objects_of(base)[array.kind.document_key(array.path)])
    return doc


def three() -> dict[str, bytes]:
    objects: dict[str, bytes] = {}
    for path in ("raw/a", "raw/b", "mask"):
        objects |= full(V3, path).objects()
    return objects | {"raw/zarr.json": b'{"zarr_format": 3, "node_type": "group"}'}


# ------------------------------------------------------------------------ reports


def test_the_report_counts_what_was_done() -> None:
    """Actions, chunks, objects, bytes and tasks of each array, and their sums."""
    sharded = full(V2, "b", (4, 4))
    base = {**full(V3, "a").objects(), **sharded.objects()}
    shard_store(base, paths="b", chunks_per_shard=4)
    report = shard_store(base, chunks_per_shard=(2, 2))
    a, b = report.arrays
    assert (a.path, a.hierarchy, a.action, a.chunks_per_shard) == ("a", "v3", "sharded", (2, 2))
    assert (a.n_chunks, a.n_objects, a.n_tasks, a.n_resumed) == (6, 2, 2, 0)
    assert a.n_bytes == sum(map(len, full().chunks.values()))
    assert (b.action, b.n_chunks, b.n_objects, b.n_tasks) == ("resharded", 16, 4, 4)
    assert (report.n_chunks, report.n_objects, report.n_skipped) == (22, 6, 0)
    assert (report.dry_run, report.notes, report.n_copied_keys) == (False, (), 0)
    as_dict = json.loads(json.dumps(report.as_dict()))
    assert (as_dict["n_chunks"], as_dict["arrays"][0]["chunks_per_shard"]) == (22, [2, 2])
    assert str(report).startswith("2 arrays converted, 0 left as they are; 22 chunks")
    report = unshard_store(base, paths="a")
    assert [(r.action, r.reason) for r in report.arrays] == [
        ("unsharded", "as asked"),
        ("skipped", "not among the paths"),
    ]
    assert report.arrays[0].chunks_per_shard is None
    assert report.n_skipped == 1


def test_progress_is_told_after_each_task() -> None:
    """With counts so far, the last of them those of the report."""
    told: list[Progress] = []
    report = shard_store(full(V3, "a", (5, 4)).objects(), chunks_per_shard=2, progress=told.append)
    tasks = [p for p in told if p.action == "sharded"]
    assert [p.n_tasks_done for p in tasks] == [1, 2, 3, 4, 5, 6]
    assert {(p.path, p.action, p.n_tasks) for p in tasks} == {("a", "sharded", 6)}
    n_objects = {p.action: p.n_objects for p in told}
    assert n_objects == {"sharded": 0, "old objects removed": 20, "new objects moved": 6}
    last = tasks[-1]
    assert (last.n_chunks, last.n_bytes) == (report.n_chunks, report.n_bytes) == (20, 20 * 7)


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize(
    "again",
    [
        lambda base: shard_store(base, chunks_per_shard=2),
        lambda base: shard_store(base),
        lambda base: reshard(base, (2, 2)),
        lambda base: reshard(base, "auto"),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_a_second_run_changes_nothing(name: str, again: Callable[[Any], Any]) -> None:
    """Everything is skipped, and no request writes or removes anything."""
    base = Counting(full(KINDS[name]).objects())
    shard_store(base, chunks_per_shard=2)
    base.writes.clear()
    report = again(base)
    assert (base.writes, report.n_skipped, report.n_chunks) == ([], 1, 0)
    unshard_store(base)
    base.writes.clear()
    for report in (unshard_store(base), reshard(base, None)):
        assert report.arrays[0].reason == "it has no shards"
    assert base.writes == []


def test_a_second_run_to_a_destination_converts_nothing() -> None:
    """Arrays that are there are skipped, and stay the same objects. A dry run says so."""
    source = three()
    target: dict[str, bytes] = {}
    shard_store(source, target, chunks_per_shard=2)
    before = dict(target)
    for is_dry in (True, False):
        report = shard_store(source, target, chunks_per_shard=2, dry_run=is_dry, estimate=is_dry)
        assert [r.reason for r in report.arrays] == ["the destination has it already"] * 3
        assert (target, report.n_skipped, report.n_chunks) == (before, 3, 0)


def test_a_second_run_takes_documents_of_the_same_meaning() -> None:
    """Another program has written them anew, with other spaces."""
    source: dict[str, Any] = {}
    group = zarr.open_group(ShardingStore(source), zarr_format=2, attributes={"x": 1})
    group.create_array("a", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    target: dict[str, bytes] = {}
    shard_store(source, target, chunks_per_shard=2)
    for key in (".zattrs", ".zgroup"):
        target[key] = json.dumps(json.loads(target[key]), indent=7).encode()
    assert shard_store(source, target, chunks_per_shard=2).n_skipped == 1


@pytest.mark.parametrize("has_destination", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_dry_run_predicts_and_writes_nothing(name: str, has_destination: bool) -> None:
    """The same arrays, actions, reasons and tasks as of the run that follows."""
    base = Counting(full(KINDS[name]).objects() | full(KINDS[name], "b", (9, 9)).objects())
    shard_store(base, paths="b", chunks_per_shard=3)
    base.writes.clear()
    target = Counting() if has_destination else None

    def run(dry_run: bool) -> Any:
        return shard_store(base, target, chunks_per_shard={"*": 4, "b": 3}, dry_run=dry_run)

    dry = run(dry_run=True)
    assert dry.dry_run
    assert base.writes == (target.writes if target is not None else []) == []
    wet = run(dry_run=False)

    def told(report: Any) -> list[Any]:
        return [
            (r.path, r.hierarchy, r.action, r.chunks_per_shard, r.reason, r.n_tasks)
            for r in report.arrays
        ]

    assert told(dry) == told(wet)
    assert dry.n_copied_keys == wet.n_copied_keys
    assert str(dry).startswith("2 arrays to" if has_destination else "1 arrays to")


# ------------------------------------------------------------------ what is converted


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (None, ["mask", "raw/a", "raw/b"]),
        ("mask", ["mask"]),
        ("/mask/", ["mask"]),
        (["raw"], ["raw/a", "raw/b"]),
        (["raw/*"], ["raw/a", "raw/b"]),
        (["*/b", "mask"], ["mask", "raw/b"]),
        ("", ["mask", "raw/a", "raw/b"]),
        ([], []),
    ],
)
def test_paths(paths: Any, expected: list[str]) -> None:
    """Arrays, groups or patterns; the others keep their bytes."""
    base = three()
    report = shard_store(base, chunks_per_shard=2, paths=paths)
    assert [r.path for r in report.arrays if r.action == "sharded"] == expected
    others = {p for p in ("mask", "raw/a", "raw/b") if p not in expected}
    for key, value in three().items():
        if key.rpartition("/c/")[0] in others or key.removesuffix("/zarr.json") in others:
            assert base[key] == value
    assert view(base).keys() == three().keys()


@pytest.mark.parametrize("path", ["ra", "raw/c", "Mask", "raw/a/c"])
def test_paths_that_name_nothing(path: str) -> None:
    """An error that names what there is; nothing was written."""
    base = Counting(three())
    with pytest.raises(SpecError, match=r"'mask', 'raw/a', 'raw/b'"):
        shard_store(base, chunks_per_shard=2, paths=["mask", path])
    assert base.writes == []


def test_chunks_per_shard_by_path() -> None:
    """A mapping names arrays and patterns; an array that it does not name stays."""
    base = three()
    report = shard_store(base, chunks_per_shard={"raw/a": (3, 1), "raw/*": 2})
    assert [(r.path, r.action, r.chunks_per_shard) for r in report.arrays] == [
        ("mask", "skipped", None),
        ("raw/a", "sharded", (3, 1)),
        ("raw/b", "sharded", (2, 2)),
    ]
    assert report.arrays[0].reason == "chunks_per_shard does not name it"
    assert shard_store(three(), chunks_per_shard=None).n_skipped == 3


def test_a_tuple_of_another_length() -> None:
    """Arrays of other dimensions stay, and the report says why. If none fits, it is an error."""
    base = Counting({**three(), **full(V3, "line", (4,)).objects()})
    with pytest.raises(SpecError, match=r"\(2, 2, 2\), and the arrays have \[1, 2\] dim"):
        shard_store(base, chunks_per_shard=(2, 2, 2))
    assert base.writes == []
    report = shard_store(base, chunks_per_shard=(2, 2))
    assert {r.path for r in report.arrays if r.action == "skipped"} == {"line"}
    assert "has 1 dimensions" in next(r.reason for r in report.arrays if r.path == "line")


def named(**dims: list[str]) -> dict[str, bytes]:
    """Arrays of v2 whose dimensions xarray names, 6 elements each, in chunks of one."""
    base: dict[str, bytes] = {}
    for path, names in dims.items():
        base |= full(V2, path, (6,) * len(names)).objects()
        base[f"{path}/.zattrs"] = json.dumps({"_ARRAY_DIMENSIONS": names}).encode()
    return base


@pytest.mark.parametrize("in_place", [True, False])
def test_chunks_per_shard_by_dimension(in_place: bool) -> None:
    """For the arrays that have one of the dimensions; a name of none is an error."""
    base = named(v=["time", "y", "x"], y=["y"], x=["x"])
    with pytest.raises(SpecError, match=r"'tiem', and no array .* dimensions .*'time', 'x', 'y'"):
        shard_store(base, chunks_per_shard={"tiem": 4, "y": 2})
    for rule in ({"time": 4, "y": 2}, {"*": {"time": 4, "y": 2}}):
        source = dict(base)
        report = shard_store(source, None if in_place else {}, chunks_per_shard=rule)
        shapes = {r.path: r.chunks_per_shard for r in report.arrays}
        assert shapes == {"v": (4, 2, 1), "y": (2,), "x": None}


def test_a_budget_in_bytes() -> None:
    """Before compression, of all arrays; instead of chunks_per_shard."""
    base = named(v=["time", "y", "x"], x=["x"])
    report = shard_store(base, shard_nbytes=f"{36 * nbytes_of_chunk(base)} B")
    shapes = {r.path: r.chunks_per_shard for r in report.arrays}
    assert shapes["x"] == (6,)
    assert math.prod(shapes["v"] or ()) in range(18, 37)
    again = reshard(base, None, shard_nbytes=2 * nbytes_of_chunk(base))
    assert {r.path: math.prod(r.chunks_per_shard or ()) for r in again.arrays} == {"v": 2, "x": 2}
    with pytest.raises(SpecError, match="give one"):
        shard_store(base, chunks_per_shard=2, shard_nbytes=1)


def nbytes_of_chunk(base: dict[str, bytes]) -> int:
    return int(np.dtype(json.loads(base["x/.zarray"])["dtype"]).itemsize)


@pytest.mark.parametrize(
    ("asked", "there", "expected"),
    [
        (8, None, (3, 2)),
        ((2, 8), None, (2, 2)),
        (8, (8, 8), (8, 8)),  # made by a store: it has them already
        (8, (3, 2), (3, 2)),
        (9, (8, 8), (3, 2)),
        ((2, 1), (8, 8), (2, 1)),
    ],
)
def test_no_shard_is_larger_than_the_grid(asked: Any, there: Any, expected: Any) -> None:
    """Its index would be full of missing entries. A second run finds the same."""
    base: dict[str, bytes] = {}
    array = full()
    store = ShardingMapping(base, chunks_per_shard=there)
    for key, value in array.objects().items():
        store[key] = value
    for n_done in (expected != there, 0):
        (report,) = shard_store(base, chunks_per_shard=asked).arrays
        assert (report.action != "skipped") == n_done
        assert report.chunks_per_shard == expected
    assert meaning(view(base)) == meaning(array.objects())
    assert get_shard_info(base).index_nbytes == get_shard_info(base).n_objects * (
        16 * int(np.prod(expected)) + 4
    )


def test_an_empty_array_gets_the_shards_that_are_asked_for() -> None:
    """It will grow; along the dimensions that it has, they are clipped."""
    base = full(grid=(0, 2)).objects()
    assert shard_store(base, chunks_per_shard=8).arrays[0].chunks_per_shard == (8, 2)


def test_new_arrays_are_not_clipped() -> None:
    """They are often made small, and grow."""
    base: dict[str, bytes] = {}
    z = zarr.create_array(
        ShardingStore(base, chunks_per_shard=8), shape=(3,), chunks=(1,), dtype="u1"
    )
    z.resize((64,))
    z[:] = 1
    assert get_shard_info(base).n_objects == 8


def test_reshard_makes_shards_of_plain_chunks() -> None:
    """And plain chunks of shards, if it is told none; by both names of the option."""
    base = three()
    for given, expected in (
        ({"chunks_per_shard": 2}, (2, 2)),
        ({"shard_shape": None}, None),
        ({"shard_shape": (3, 1)}, (3, 1)),
    ):
        report = reshard(base, **given)
        assert [r.chunks_per_shard for r in report.arrays] == [expected] * 3
        assert meaning(view(base)) == meaning(three())
    assert shard_store(base, shard_shape=2).arrays[0].chunks_per_shard == (2, 2)
    wrongs: list[Callable[[], Any]] = [
        lambda: reshard(base),
        lambda: reshard(base, 2, shard_shape=2),
        lambda: shard_store(base, chunks_per_shard=2, shard_shape=2),
    ]
    for wrong in wrongs:
        with pytest.raises(SpecError, match="chunks_per_shard"):
            wrong()


def test_a_rule_for_no_array() -> None:
    """An error that names what there is; a rule for arrays that are not chosen is none."""
    base = Counting(three())
    for convert in (shard_store, reshard):
        with pytest.raises(SpecError, match=r"rule for 'raw/x'.*'mask', 'raw/a', 'raw/b'"):
            convert(base, chunks_per_shard={"raw/x": 2, "*": 2})
    assert base.writes == []
    report = shard_store(base, chunks_per_shard={"mask": 2, "raw/*": 3}, paths="raw")
    assert report.arrays[0].action == "skipped"


@pytest.mark.thorough(of=7)
@pytest.mark.parametrize("path", ["", "c", "0", "c/0", "a b", "ü/\U0001f600", "[x]", "zarr", "1.2"])
@pytest.mark.parametrize("name", KINDS)
def test_odd_names(name: str, path: str) -> None:
    """Arrays at the root, or whose names look like those of chunks or patterns."""
    array = full(KINDS[name], path)
    base = array.objects()
    report = shard_store(base, paths=path, chunks_per_shard=2)
    assert [(r.path, r.action) for r in report.arrays] == [(path, "sharded")]
    assert base.keys() & array.chunk_objects().keys() == array.shard_keys((2, 2))
    assert meaning(view(base)) == meaning(array.objects())
    target: dict[str, bytes] = {}
    unshard_store(base, target)
    unshard_store(base)
    assert meaning(base) == meaning(target) == meaning(array.objects())


# --------------------------------------------------------------------- "auto"


class Sizes(MemoryStore):
    """Documents, and objects of which only the sizes exist."""

    def __init__(self, data: dict[str, bytes], size: Callable[[str], int | None]) -> None:
        requests: list[tuple[str, str]] = []

        class Values(dict[str, Any]):
            def __getitem__(self, key: str) -> Any:
                requests.append(("get", key))
                return super().__getitem__(key)

        values = Values((key, cpu.Buffer.from_bytes(value)) for key, value in data.items())
        super().__init__(values)
        self.data = data
        self.size = size
        self.requests = requests
        """Name and key of each."""

    def asked(self, name: str) -> list[str]:
        """The keys, or prefixes, of all requests of one name."""
        return [key for found, key in self.requests if found == name]

    async def getsize(self, key: str) -> int:
        self.requests.append(("getsize", key))
        found = len(self.data[key]) if key in self.data else self.size(key)
        if found is None:
            raise FileNotFoundError(key)
        return found

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        self.requests.append(("list_dir", prefix))
        async for name in super().list_dir(prefix):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        self.requests.append(("list_prefix", prefix))
        async for key in super().list_prefix(prefix):
            yield key

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        raise AssertionError(f"{key!r} is written")


def plan(base: Sizes, **options: Any) -> Any:
    (report,) = shard_store(base, dry_run=True, **options).arrays
    return report


def huge(shape: Coords, chunks: Coords, dtype: str = "u2", kind: Kind = V3) -> dict[str, bytes]:
    return {kind.document_key("a"): json.dumps(kind.document(shape, chunks, dtype)).encode()}


@pytest.mark.parametrize(
    ("shape", "chunks", "dtype", "ratio"),
    [
        ((300, 1, 2000, 30_000, 40_000), (1, 1, 64, 256, 256), "u2", 0.4),
        ((365 * 40, 721, 1440), (24, 100, 100), "f4", 0.25),
        ((25_000, 18_000, 6000), (64, 64, 64), "u2", 1.0),
        ((10**11,), (10_000,), "u1", 0.1),
    ],
)
def test_auto_makes_shards_of_10_to_100_mb(
    shape: Coords, chunks: Coords, dtype: str, ratio: float
) -> None:
    """By the sizes of stored chunks, with few requests, none of them a listing of chunks."""
    nominal = int(np.prod(chunks)) * int(dtype[1])
    base = Sizes(huge(shape, chunks, dtype), lambda key: int(nominal * ratio))
    report = plan(base)
    nbytes = np.prod(report.chunks_per_shard) * nominal * ratio
    assert 10e6 <= nbytes <= 100e6
    assert report.action == "sharded"
    assert "stored chunks have about" in report.reason
    assert "make shards of" in report.reason
    assert len(base.asked("getsize")) <= 128


def test_auto_looks_for_chunks_of_sparse_arrays() -> None:
    """One in a hundred is there: it looks at more of them, but not at many."""
    shape, chunks = (64_000, 64_000), (64, 64)
    base = Sizes(huge(shape, chunks), lambda key: 5000 if hash_of(key) % 100 == 0 else None)
    report = plan(base)
    assert report.reason.startswith("stored chunks have about 5 kB")
    assert 128 < len(base.asked("getsize")) <= 1024
    empty = Sizes(huge(shape, chunks), lambda key: None)
    report = plan(empty)
    assert report.reason.startswith("no stored chunk was found, so as before compression: ")
    assert "8.19 kB" in report.reason
    assert len(empty.asked("getsize")) == 1024


def hash_of(key: str) -> int:
    return sum((i + 1) * ord(letter) for i, letter in enumerate(key))


def test_auto_asks_the_same_chunks_each_time() -> None:
    """So a second dry run says the same."""
    requests = []
    for _ in range(2):
        base = Sizes(huge((64_000, 64_000), (64, 64)), hash_of)
        plan(base)
        requests.append(base.requests)
    assert requests[0] == requests[1]


def test_auto_leaves_or_packs_small_arrays() -> None:
    """All chunks in one shard; one chunk, no dimension, or shards: nothing to do."""
    base: dict[str, bytes] = {}
    for path, grid in {"small": (3, 2), "one": (1, 1), "none": (), "empty": (0, 3)}.items():
        base |= full(V3, path, grid).objects()
    base |= full(V3, "sharded", (4, 4)).objects()
    shard_store(base, paths="sharded", chunks_per_shard=2)
    report = shard_store(base)
    reasons = {r.path: (r.action, r.chunks_per_shard, r.reason) for r in report.arrays}
    assert reasons["small"][:2] == ("sharded", (3, 2))
    assert "one shard" in reasons["small"][2]
    assert reasons["one"] == ("skipped", None, "it has one chunk")
    assert reasons["none"] == ("skipped", None, "it has no dimensions, so one chunk")
    assert reasons["sharded"][:2] == ("skipped", (2, 2))
    assert "leaves them as they are" in reasons["sharded"][2]
    assert reasons["empty"][0] == "sharded"


def test_auto_leaves_chunks_that_are_large_enough() -> None:
    """No shard of one chunk each."""
    report = plan(Sizes(huge((8000, 80_000), (4000, 8000)), lambda key: 60_000_000))
    assert (report.action, report.n_tasks) == ("skipped", 0)
    assert "large enough for an object of its own" in report.reason


@pytest.mark.parametrize("length", [2**40, 2**63, 2**80])
def test_auto_with_shapes_that_cannot_be(length: int) -> None:
    """Metadata that lie cost a plan no more than others."""
    base = Sizes(huge((length, 3), (1, 1)), lambda key: None)
    assert plan(base).action == "sharded"


def test_the_example_of_zep_2_is_planned_without_a_listing() -> None:
    """391 × 282 × 94 chunks in shards of 32³: 351 tasks, and a request or two for documents."""
    base = Sizes(huge((25_000, 18_000, 6000), (64, 64, 64)), lambda key: 100_000)
    report = plan(base, chunks_per_shard=(32, 32, 32))
    assert report.n_tasks == 13 * 9 * 3 == 351
    listed = {prefix.rstrip("/") for prefix in base.asked("list_dir")}
    assert sorted(listed) == ["", "a", "meta"]
    assert {name for name, _ in base.requests} == {"get", "list_dir"}
    assert not [key for key in base.asked("get") if key.startswith("a/c/")]
    assert len(base.requests) <= 12
    auto = plan(Sizes(base.data, lambda key: 100_000))
    assert auto.chunks_per_shard == (10, 8, 8)


# ------------------------------------------------------------------- other keys


def consolidated() -> dict[str, bytes]:
    """Groups and arrays of v2 and v3 with consolidated metadata, and all kinds of other keys."""
    store = MemoryStore()
    zarr.create_group(store, attributes={"kept": True})
    groups: list[tuple[str, Any]] = [("three", 3), ("two", 2)]
    for name, zarr_format in groups:
        group = zarr.create_group(
            store, path=name, zarr_format=zarr_format, attributes={"title": "ü"}
        )
        for path in ("x", "deep/y"):
            z = group.create_array(path, shape=(7, 5), chunks=(2, 2), dtype="i2", fill_value=-1)
            z[...] = np.arange(35).reshape(7, 5)
            z.attrs["path"] = path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that v3 has no specification of it
            zarr.consolidate_metadata(store, path=name, zarr_format=zarr_format)
    return {
        **objects_of(store),
        "README.md": b"# hello",
        "three/x/notes.txt": b"stray",
        "three/x/sub/notes.txt": b"stray",
        "two/x/notes.txt": b"stray",
        "two/empty": b"",
        "three/deep/y/c0": b"stray",
    }


def memory_store(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, value in objects.items():
        put(store, key, value)
    return store


def without_arrays(objects: dict[str, bytes]) -> dict[str, bytes]:
    """What no conversion changes."""
    return {
        key: value
        for key, value in objects.items()
        if key.endswith((".txt", ".md", ".zattrs", ".zgroup", "empty", "/c0"))
        or key in ("zarr.json", "three/deep/zarr.json")
    }


@pytest.mark.parametrize("where", ["in place", "dict", "local"])
def test_other_keys_and_consolidated_metadata(where: str) -> None:
    """They are there byte by byte; copies of array documents say what the documents say."""
    source = consolidated()
    base: Any = dict(source)
    options: dict[str, Any] = {"chunks_per_shard": 2}
    if where != "in place":
        base = BASES[where]()
        options["destination"] = base
    report = shard_store(dict(source) if where != "in place" else base, **options)
    stored = objects_of(base)
    assert without_arrays(stored) == without_arrays(source)
    assert report.n_copied_keys == (0 if where == "in place" else len(without_arrays(source)) + 2)
    group = json.loads(stored["three/zarr.json"])
    for name in ("x", "deep/y"):
        member = group["consolidated_metadata"]["metadata"][name]
        assert member["codecs"][0]["name"] == "sharding_indexed"
        assert member == json.loads(stored[f"three/{name}/zarr.json"]), name
    metadata = json.loads(stored["two/.zmetadata"])["metadata"]
    for name in ("x/.zarray", "deep/y/.zarray"):
        assert metadata[name] == json.loads(stored[f"two/{name}"]), name
    assert "zarr_shardstore" in json.dumps(metadata["deep/y/.zarray"])
    assert meaning(view(base)) == meaning(source)
    expected = np.arange(35).reshape(7, 5)
    native = memory_store(stored)
    for path in ("x", "deep/y"):
        by_zarr: Any = zarr.open_consolidated(native, path="three")[path]
        assert by_zarr.shards == (4, 4)
        np.testing.assert_array_equal(by_zarr[...], expected)
        for name in ("three", "two"):
            z: Any = zarr.open_consolidated(ShardingStore(base), path=name)[path]
            np.testing.assert_array_equal(z[...], expected)
    unshard_store(base)
    assert meaning(objects_of(base)) == meaning(source)


def test_what_is_not_selected_is_copied_on_demand() -> None:
    """Plain and sharded arrays in the form they have, and arrays of an unknown chunk grid."""
    unknown = full(V3, "unknown")
    doc = {**unknown.document, "chunk_grid": {"name": "rectangular", "configuration": {}}}
    source = three() | unknown.objects() | {"unknown/zarr.json": json.dumps(doc).encode()}
    shard_store(source, paths="mask", chunks_per_shard=(3, 1))
    target: dict[str, bytes] = {}
    report = shard_store(source, target, paths="raw/a", chunks_per_shard=2, copy_rest=True)
    assert [(r.path, r.action) for r in report.arrays] == [
        ("mask", "copied"),
        ("raw/a", "sharded"),
        ("raw/b", "copied"),
        ("unknown", "copied"),
    ]
    assert report.arrays[0].chunks_per_shard == (3, 1)
    same = {k: v for k, v in source.items() if not k.startswith("raw/a/")}
    assert meaning({k: v for k, v in target.items() if not k.startswith("raw/a/")}) == meaning(same)
    assert view(target).keys() == view(source).keys()


def test_attributes_of_an_array_that_is_not_listed() -> None:
    """They are copied; that other keys are not, is said."""
    source = full(V2, "a").objects()
    target: dict[str, bytes] = {}
    with tuned(chunk_names=5):
        dry = shard_store(source, target, chunks_per_shard=2, dry_run=True)
        report = shard_store(source, target, chunks_per_shard=2)
        (note,) = shard_store(source, chunks_per_shard=2).notes
    assert "to-native" in note
    assert target["a/.zattrs"] == b'{"kept": true}'
    assert dry.notes == report.notes
    assert "'a' was not listed" in report.notes[0]
    assert meaning(target) == meaning(source)


# ------------------------------------------------------------- source and destination


@pytest.mark.parametrize(
    "there",
    [
        {"a/zarr.json": b'{"zarr_format": 3, "node_type": "array"}'},
        {"a/c/2/1": b"a chunk"},
        {"README": b"another"},
        {"zarr.json": b'{"zarr_format": 3, "node_type": "group", "attributes": {"x": 1}}'},
    ],
)
def test_a_destination_with_something_else(there: dict[str, bytes]) -> None:
    """An error, and nothing was written."""
    group = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
    source = {**full().objects(), "README": b"one", "zarr.json": group}
    target = Counting(there)
    with pytest.raises(SpecError, match="nothing was written"):
        shard_store(source, target, chunks_per_shard=2)
    assert (target.data, target.writes) == (there, [])


def test_a_destination_with_other_things_elsewhere() -> None:
    """They stay."""
    target = {"elsewhere/zarr.json": b"{}", **full(V2, "b").objects()}
    before = dict(target)
    shard_store(full().objects(), target, chunks_per_shard=2)
    assert before.items() <= target.items()


@pytest.mark.parametrize("make", [dict, MemoryStore, BASES["local"], BASES["fsspec"]])
def test_the_source_is_no_destination(make: Callable[[], Any]) -> None:
    """Nor is a store that wraps it, or that stands for the same objects."""
    base = make()
    others = [base, ShardingStore(base), ShardingMapping(base), DraftHierarchyStore(base)]
    if isinstance(base, LocalStore):
        others += [base.root, f"{base.root}/", str(base.root), LocalStore(base.root)]
    for other in others:
        with pytest.raises(SpecError, match="are the same"):
            shard_store(base, other)
        with pytest.raises(SpecError, match="are the same"):
            unshard_store(other, base)


@pytest.mark.parametrize("wrap", [ShardingStore, ShardingMapping, DraftHierarchyStore])
@pytest.mark.parametrize("kind", [V3, V2, DRAFT], ids=["v3", "v2", "draft"])
def test_stores_that_wrap_stand_for_their_base(wrap: Any, kind: Kind) -> None:
    """As the source and as the destination, in place and not."""
    base = full(kind).objects()
    shard_store(wrap(base), chunks_per_shard=2)
    assert len(base.keys() & full(kind).chunk_objects().keys()) == 2
    target: dict[str, bytes] = {}
    reshard(wrap(base), 3, wrap(target))
    assert len(target.keys() & full(kind).chunk_objects().keys()) == 1
    assert meaning(view(target)) == meaning(full(kind).objects())


@pytest.mark.parametrize("wrap", [ShardingStore, ShardingMapping, DraftHierarchyStore])
def test_stores_that_refuse_writes(wrap: Any) -> None:
    """An error before anything is written; as a source, and for a dry run, they will do."""
    base = Counting(full().objects())
    with pytest.raises(ReadOnlyError):
        shard_store(wrap(base, read_only=True), chunks_per_shard=2)
    with pytest.raises(ReadOnlyError):
        shard_store(full().objects(), wrap(base, read_only=True), chunks_per_shard=2)
    assert shard_store(wrap(base, read_only=True), chunks_per_shard=2, dry_run=True).dry_run
    target: dict[str, bytes] = {}
    shard_store(wrap(base, read_only=True), target, chunks_per_shard=2)
    assert base.writes == []
    assert meaning(view(target)) == meaning(full().objects())


class Interrupted(Counting):
    """Stops where chunks are to be removed, of which shards are staged."""

    is_interrupted = True

    def __delitem__(self, key: str) -> None:
        if self.is_interrupted and key in self.data:
            raise KeyboardInterrupt
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        if self.is_interrupted and key in self.data:
            raise KeyboardInterrupt
        return super().pop(key, *default)


def test_a_source_whose_conversion_was_interrupted() -> None:
    """It is not copied without what is staged; in place it is finished first."""
    base = Interrupted(full().objects())
    with pytest.raises(KeyboardInterrupt):
        shard_store(base, chunks_per_shard=2)
    base.is_interrupted = False
    target = Counting()
    with pytest.raises(UnfinishedConversionError, match="without a destination"):
        unshard_store(base, target)
    assert target.writes == []
    report = unshard_store(base)
    assert report.notes == ("finished what an earlier run had begun with 'a'",)
    assert meaning(base) == meaning(full().objects())


# --------------------------------------------------------------------- documents


@pytest.mark.parametrize("separator", ["/", "."])
def test_a_migrated_array_keeps_both_documents(tmp_path: Path, separator: str) -> None:
    """Documents of v2 and v3 for the same chunks: both change, or none."""
    data = np.arange(7 * 5, dtype="i4").reshape(7, 5)
    z = zarr.create_array(
        str(tmp_path),
        name="a",
        shape=(7, 5),
        chunks=(2, 2),
        dtype="i4",
        zarr_format=2,
        chunk_key_encoding={"name": "v2", "separator": separator},
    )
    z[...] = data
    migrate_v2_to_v3(input_store=LocalStore(tmp_path))
    source = objects_of(LocalStore(tmp_path))
    runs: list[Callable[[], Any]] = [
        lambda: shard_store(tmp_path, chunks_per_shard=2),
        lambda: reshard(tmp_path, (1, 3)),
        lambda: unshard_store(tmp_path),
    ]
    for run in runs:
        report = run()
        assert [(r.path, r.hierarchy) for r in report.arrays] == [("a", "v3")]
        assert report.n_chunks == 12
        for zarr_format in (2, 3):
            read: Any = zarr.open_array(
                ShardingStore(tmp_path),
                path="a",
                zarr_format=zarr_format,
            )
            np.testing.assert_array_equal(read[...], data)
    assert meaning(objects_of(LocalStore(tmp_path))) == meaning(source)


def twins(v3: ArrayOf, v2: ArrayOf) -> dict[str, bytes]:
    return {**v2.objects(), **v3.objects()}


V3_DOTS = Kind("v3", "v2", ".")
V2_SLASHES = Kind("v2", "v2", "/")
CONTRADICTIONS = {
    "shape": twins(full(V3_DOTS, grid=(3, 2)), full(V2, grid=(4, 2))),
    "chunks": twins(
        full(V3_DOTS), replace(full(V2), grid=(2, 2), chunk_shape=(2, 1), edge=(1, 0), chunks={})
    ),
    "dimensions": twins(full(V3_DOTS, grid=(3,)), full(V2_SLASHES, grid=(3, 1))),
    "separators of one dimension": twins(full(V3_DOTS, grid=(4,)), full(V2_SLASHES, grid=(4,))),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_documents_that_contradict_each_other(name: str) -> None:
    """Such an array is left alone; asked for by its path it is an error."""
    base = Counting(CONTRADICTIONS[name])
    (report,) = shard_store(base, chunks_per_shard=2).arrays
    assert report.action == "skipped"
    assert "contradict each other" in report.reason
    with pytest.raises(UnsupportedError, match="contradict each other"):
        shard_store(base, chunks_per_shard=2, paths="a")
    assert base.writes == []


def test_one_sharded_document_of_two() -> None:
    """The other takes shards for chunks: nothing here is safe to touch."""
    base = full(V2).objects()
    shard_store(base, chunks_per_shard=2)
    base |= {"a/zarr.json": json.dumps(full(V3_DOTS).document).encode()}
    before = dict(base)
    (report,) = unshard_store(base).arrays
    assert (report.action, base) == ("skipped", before)


def native(codecs: list[Any], chunks: list[int]) -> dict[str, bytes]:
    doc = full().document
    doc["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    doc["codecs"] = codecs
    return {"a/zarr.json": json.dumps(doc).encode(), "a/c/0/0": b"opaque", "a/c/1/0": b"too"}


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def sharding(chunks: list[int], codecs: list[Any], index: list[Any]) -> dict[str, Any]:
    configuration = {"chunk_shape": chunks, "codecs": codecs, "index_codecs": index}
    return {"name": "sharding_indexed", "configuration": configuration}


ODD = {
    "compressed": [sharding([1, 1], [LITTLE], [LITTLE]), {"name": "gzip", "configuration": {}}],
    "compressed index": [
        sharding([1, 1], [LITTLE], [LITTLE, {"name": "gzip", "configuration": {"level": 1}}])
    ],
    "shards that cannot be cut": [sharding([3, 2], [LITTLE], [LITTLE])],
    "not complete": [{"name": "sharding_indexed"}],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize(
    "function", [shard_store, unshard_store, lambda base, *to: reshard(base, 2, *to)]
)
def test_odd_native_sharding_is_left_alone(name: str, function: Any) -> None:
    """Skipped with the reason in place, copied to a destination, an error by its path."""
    source = native(ODD[name], [2, 2])
    base = Counting(source)
    (report,) = function(base).arrays
    assert (report.action, base.writes) == ("skipped", [])
    assert report.reason.startswith("it cannot be converted: ")
    target: dict[str, bytes] = {}
    (report,) = function(base, target).arrays
    assert (report.action, report.n_chunks) == ("copied", 2)
    assert meaning(target) == meaning(source)
    with pytest.raises(UnsupportedError, match="leave it out of paths"):
        unshard_store(base, paths="a")


def test_nested_native_sharding() -> None:
    """The outer shards are re-packed; the inner ones are values like others."""
    inner = sharding([1, 1], [LITTLE], [LITTLE])
    base = full(V3, "a", (4, 4)).objects()
    doc = full(V3, "a", (4, 4)).document | {"codecs": [inner]}
    doc["chunk_grid"]["configuration"]["chunk_shape"] = [2, 2]
    base = {"a/zarr.json": json.dumps(doc).encode()}
    z = zarr.open_array(memory_store(base), path="a")
    assert z.shards == (2, 2)
    outer = {**doc, "codecs": [sharding([2, 2], [inner], [LITTLE])]}
    outer["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [4, 4]}}
    store = memory_store({"a/zarr.json": json.dumps(outer).encode()})
    data = np.arange(16, dtype="u1").reshape(4, 4)
    zarr.open_array(store, path="a")[...] = data
    report = unshard_store(store)
    assert (report.n_chunks, report.n_objects) == (4, 4)
    np.testing.assert_array_equal(zarr.open_array(store, path="a")[...], data)
    assert objects_of(store).keys() == {"a/zarr.json", "a/c/0/0", "a/c/0/1", "a/c/1/0", "a/c/1/1"}


# ------------------------------------------------------- keys that are no chunks


@pytest.mark.parametrize("name", KINDS)
def test_stale_shards_do_not_become_chunks(name: str) -> None:
    """Of an array that was made smaller by others: what lies outside is not seen again."""
    kind = KINDS[name]
    array = full(kind, "a", (6, 4))
    base = array.objects()
    shard_store(base, chunks_per_shard=2)
    document = kind.document_key("a")
    doc = json.loads(base[document])
    doc["shape"] = [3, 1]
    base[document] = json.dumps(doc).encode()
    smaller = full(kind, "a", (3, 1))
    stores: list[dict[str, bytes]] = [{}, base]
    for target in stores:
        report = unshard_store(base, None if target is base else target)
        chunks = {k: v for k, v in target.items() if k in array.chunk_objects()}
        assert chunks == smaller.chunk_objects()
        assert report.n_chunks == 3


STRAYS = {
    "v3 /": ["a/c/x", "a/c/0/x", "a/c/0/0/0", "a/c/00/0", "a/c/0/-1", "a/d", "a/c.0.0", "a/c/0.0"],
    "v3 .": ["a/c.0", "a/c.0.0.0", "a/c.00.0", "a/c/0/0", "a/0.0"],
    "v2 .": ["a/0", "a/0.0.0", "a/00.0", "a/x", "a/0/0", "a/c/0/0"],
    "v2 / F": ["a/0/x", "a/0/0/0", "a/x/0", "a/00/0", "a/0.0"],
    "draft /": ["data/root/a/c0/x", "data/root/a/c/0/0", "data/root/a/c0/0/0", "data/root/a/0"],
}


@pytest.mark.parametrize("name", STRAYS)
def test_stray_keys_survive_in_place(name: str) -> None:
    """Keys that are spelled as no chunk of this array, among those that are."""
    array = full(KINDS[name])
    strays = {key: b"stray" for key in STRAYS[name] if key not in array.chunk_objects()}
    base = array.objects() | strays
    shard_store(base, chunks_per_shard=2)
    assert strays.items() <= base.items()
    reshard(base, 3)
    unshard_store(base)
    assert meaning(base) == meaning(array.objects() | strays)


@pytest.mark.parametrize(
    "convert",
    [
        lambda source, target: shard_store(source, target, chunks_per_shard=2),
        unshard_store,
        lambda source, target: reshard(source, 3, target),
    ],
)
def test_the_chunk_of_an_array_without_dimensions_is_copied(convert: Callable[..., Any]) -> None:
    """In a draft hierarchy it has one of two names, "c" or "c0"."""
    source: dict[str, bytes] = {}
    store = DraftHierarchyStore(ShardingStore(source, chunks_per_shard=2))
    zarr.create_array(store, name="a", shape=(), dtype="u2", compressors=None)[()] = 7
    zarr.create_array(store, name="b", shape=(4,), chunks=(1,), dtype="u2")[:] = 5
    assert "data/root/a/c0" in source
    for name in ("c0", "c"):
        moved = dict(source)
        moved[f"data/root/a/{name}"] = moved.pop("data/root/a/c0")
        target: dict[str, bytes] = {}
        convert(moved, target)
        found: Any = zarr.open_group(DraftHierarchyStore(target), mode="r")
        assert (found["a"][()], found["b"][:].tolist()) == (7, [5] * 4)


def test_the_same_command_again_where_indexes_were_collected() -> None:
    """Perhaps of some arrays only, and then somebody was killed."""
    target = LocalStore(temporary_directory())
    source = full(V3, "a").objects() | full(V3, "b").objects()
    for _ in range(2):
        shard_store(source, target, chunks_per_shard=2, consolidate_index=True)
    assert meaning(view(target)) == meaning(source)


# ------------------------------------------------------------------ declarations


def index_of(doc: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(doc)
    return {"start": '"start"' in text, "crc32c": '"crc32c"' in text}


def test_declarations_of_v3() -> None:
    """The codec unless asked otherwise; what an array has already, it keeps."""
    base = full().objects()
    shard_store(base, chunks_per_shard=2, declaration="storage_transformers")
    doc = stored_document(base, full())
    assert doc["storage_transformers"][0]["name"] == "sharding"
    assert doc["zarr_shardstore"] == {"must_understand": True}
    assert [codec["name"] for codec in doc["codecs"]] == ["bytes"]
    reshard(base, 3)
    doc = stored_document(base, full())
    assert doc["storage_transformers"][0]["configuration"]["chunks_per_shard"] == [3, 2]
    reshard(base, 2, declaration="codec")
    doc = stored_document(base, full())
    assert [codec["name"] for codec in doc["codecs"]] == ["sharding_indexed"]
    assert not doc.get("storage_transformers")
    assert "zarr_shardstore" not in doc
    reshard(base, 3)
    assert "storage_transformers" not in json.dumps(stored_document(base, full())["codecs"])
    assert meaning(view(base)) == meaning(full().objects())
    with pytest.raises(SpecError, match="declaration"):
        shard_store(base, declaration="filters")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [V3, V2, DRAFT], ids=["v3", "v2", "draft"])
def test_the_form_of_the_index_is_kept_or_as_asked(kind: Kind) -> None:
    """Where it is, and whether it has a checksum."""
    base = full(kind).objects()
    shard_store(base, chunks_per_shard=2, index_location="start", index_codecs=["bytes"])
    assert index_of(stored_document(base, full(kind))) == {"start": True, "crc32c": False}
    reshard(base, 3)
    assert index_of(stored_document(base, full(kind))) == {"start": True, "crc32c": False}
    assert reshard(base, 3).n_skipped == 1
    report = reshard(base, 3, index_codecs=["bytes", "crc32c"])
    assert report.n_skipped == 0, "the same shards with another index are others"
    assert index_of(stored_document(base, full(kind))) == {"start": False, "crc32c": True}
    assert meaning(view(base)) == meaning(full(kind).objects())


def test_v3_arrays_that_leave_sharding_to_zarr() -> None:
    """The mark that `ShardingStore` gave them is gone: their shards are ours now."""
    store = MemoryStore()
    data = np.arange(36, dtype="u1").reshape(6, 6)
    with zarr.config.set({"codec_pipeline.path": THEIRS}):
        z = zarr.create_array(
            ShardingStore(store), name="a", shape=(6, 6), chunks=(1, 1), shards=(3, 3), dtype="u1"
        )
    z[...] = data
    report = reshard(store, 2)
    assert report.n_chunks == 35, "zarr stores no chunk of nothing but the fill value"
    assert "zarr_shardstore" not in json.loads(objects_of(store)["a/zarr.json"])
    again = zarr.open_array(store, path="a")
    assert again.shards == (2, 2)
    np.testing.assert_array_equal(again[...], data)


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("where", ["dict", "memory", "local", "obstore", "fsspec"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_open_stores_see_the_new_layout(where: str, zarr_format: Any) -> None:
    """Stores of this process that have read and cached the old one, without a refresh."""
    base = BASES[where]()
    data = np.arange(1, 37, dtype="u2").reshape(6, 6)
    store, mapping = ShardingStore(base), ShardingMapping(base)
    z = zarr.create_array(
        store, name="a", shape=(6, 6), chunks=(1, 2), dtype="u2", zarr_format=zarr_format
    )
    z[...] = data
    expected = dict(mapping)
    runs: list[Callable[[], Any]] = [
        lambda: shard_store(base, chunks_per_shard=2),
        lambda: reshard(base, (3, 1)),
        lambda: reshard(base, (1, 3), index_location="start"),
        lambda: unshard_store(base),
    ]
    for run in runs:
        run()
        assert meaning(dict(mapping)) == meaning(expected)
        np.testing.assert_array_equal(z[...], data)
        data[2, 3] += 1
        z[2, 3] = data[2, 3]
        np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="a")[...], data)
        expected = dict(mapping)


@pytest.mark.parametrize(
    "bad", [{"order": "Z"}, {"executor": 4}, {"destination_options": {"a": 1}}]
)
def test_options_that_cannot_be(bad: dict[str, Any]) -> None:
    """An error before anything is written."""
    base = Counting(full().objects())
    with pytest.raises(SpecError):
        shard_store(base, chunks_per_shard=2, **bad)
    assert base.writes == []


def test_an_empty_directory_with_the_key_of_a_shard(tmp_path: Path) -> None:
    """obstore leaves such directories where it removes objects."""
    data = np.array([0, 0, 3, 4, 5, 6, 7, 8], "u1")
    z = zarr.create_array(tmp_path, name="a", shape=(8,), chunks=(1,), dtype="u1", fill_value=0)
    z[...] = data
    (tmp_path / "a/c/1/0").mkdir(parents=True)
    shard_store(tmp_path, chunks_per_shard=4)
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(tmp_path), path="a")[...], data)
    assert sorted(path.name for path in (tmp_path / "a/c").iterdir()) == ["0", "1"]
