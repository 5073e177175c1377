"""What `get_shard_info` says of a store, against numbers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.bases import BASES, put
from tests.support.rounds import N_ROUNDS
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError, UnsupportedError
from zarr_shardstore.format.ranges import Suffix
from zarr_shardstore.format.shard import MISSING, ZEP2_INDEX, ShardIndex
from zarr_shardstore.inspect import occupancy
from zarr_shardstore.inspect.find import arrays_at, read_array
from zarr_shardstore.inspect.info import ArrayInfo, get_shard_info, is_sharded
from zarr_shardstore.inspect.open_base import open_base
from zarr_shardstore.inspect.shard_map import cut_into_panels, shard_map
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.metadata.declaration import declare_native
from zarr_shardstore.metadata.documents import dump_document
from zarr_shardstore.shards import index_reads
from zarr_shardstore.shards.index_reads import found_index
from zarr_shardstore.shards.requests import Found, FoundIndex, Get, GetIndex, GetSize

GOLDEN = Path(__file__).parents[1] / "interop" / "golden" / "zarr218"

INDEX = 6 * 16 + 4
"""Bytes of the index of a shard of 2 × 3 chunks, with checksum."""


def make(store: Any, **options: Any) -> zarr.Array[Any]:
    """5 × 7 chunks of 2 bytes, so 3 × 3 shards of 2 × 3 chunks; 6 bytes for each chunk of 3."""
    return zarr.create_array(
        store,
        **{
            "name": "a",
            "shape": (5, 21),
            "chunks": (1, 3),
            "dtype": "uint16",
            "compressors": None,
            **options,
        },
    )


def info_of(base: Any, **options: Any) -> ArrayInfo:
    (array,) = get_shard_info(base, **options).arrays
    return array


@pytest.mark.parametrize("kind", BASES)
def test_figures_of_a_v3_array(kind: str) -> None:
    """Shapes, grids, counts and bytes, through every kind of base store."""
    base = BASES[kind]()
    store = ShardingStore(base, chunks_per_shard=(2, 3))
    z = make(store)
    z[0, :] = 1  # 7 chunks in the 3 shards of the first row: 3, 3 and 1
    z[4, 20] = 1  # 1 chunk in the last shard
    ShardingMapping(store).flush()
    assert info_of(base) == ArrayInfo(
        path="a",
        hierarchy="v3",
        declaration="codec",
        shape=(5, 21),
        dtype="uint16",
        chunk_shape=(1, 3),
        shard_shape=(2, 9),
        chunks_per_shard=(2, 3),
        chunk_grid_shape=(5, 7),
        shard_grid_shape=(3, 3),
        n_chunks=8,
        n_chunks_of_grid=35,
        n_objects=4,
        n_objects_of_grid=9,
        fill=8 / 35,
        stored_nbytes=8 * 6 + 4 * INDEX,
        chunk_nbytes=8 * 6,
        index_nbytes=4 * INDEX,
        dead_nbytes=0,
        smallest=6 + INDEX,
        mean=12.0 + INDEX,
        largest=18 + INDEX,
    )


def test_figures_of_a_v2_array() -> None:
    """The declaration is the marker in the filters; the data type is spelled as in the document."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base, chunks_per_shard=(2, 3)), zarr_format=2, dtype=">u2")
    z[0, :] = 1
    array = info_of(base)
    assert (array.hierarchy, array.declaration, array.dtype) == ("v2", "filters", ">u2")
    assert (array.chunk_shape, array.shard_shape) == ((1, 3), (2, 9))
    assert (array.n_chunks, array.n_objects, array.n_objects_of_grid) == (7, 3, 9)
    assert array.stored_nbytes == 7 * 6 + array.index_nbytes
    assert is_sharded(base, "a")


def test_figures_of_draft_arrays() -> None:
    """Written by zarr-python 2.18; a 0-d array has one shard with one entry."""
    arrays = {array.path: array for array in get_shard_info(GOLDEN).arrays}
    assert set(arrays) == {"a/cube", "a/edge", "holes", "line", "point"}
    files = {
        path: [f for f in (GOLDEN / "data" / "root" / path).rglob("*") if f.is_file()]
        for path in arrays
    }
    m = ShardingMapping(GOLDEN)
    for path, array in arrays.items():
        assert (array.hierarchy, array.declaration) == ("draft", "storage_transformers")
        assert array.n_objects == len(files[path]), path
        assert array.stored_nbytes == sum(f.stat().st_size for f in files[path])
        assert array.n_chunks == len(m.list_prefix(f"data/root/{path}/"))
        # zarr 2.18 packs without gaps, and without checksum.
        assert array.stored_nbytes == array.chunk_nbytes + array.index_nbytes
        assert not array.dead_nbytes
        assert not array.errors
    assert arrays["point"].shape == ()
    assert (arrays["point"].n_chunks, arrays["point"].n_objects_of_grid) == (1, 1)


def test_figures_of_an_array_that_zarr_sharded(tmp_path: Path) -> None:
    """Native shards, the index at the start: its inner chunks are the chunks."""
    shards: Any = {"shape": (4,), "index_location": "start"}
    z = zarr.create_array(
        tmp_path, shape=(8,), chunks=(2,), shards=shards, dtype="u1", compressors=None
    )
    z[:6] = 1
    array = info_of(tmp_path)
    assert (array.path, array.declaration, array.chunks_per_shard) == ("", "codec", (2,))
    assert (array.n_chunks, array.n_objects, array.fill) == (3, 2, 0.75)
    assert array.stored_nbytes == 3 * 2 + 2 * (2 * 16 + 4)
    assert array.dead_nbytes == 0
    fields = np.array([[36, 2], [30, 8]], dtype=np.uint64)  # the second begins in the index
    (tmp_path / "c/0").write_bytes(ShardIndex(fields).encode(ZEP2_INDEX) + b"data")
    array = info_of(tmp_path)
    assert (array.n_errors, array.n_chunks, array.chunk_nbytes) == (1, 3, 2 + 2)
    assert array.dead_nbytes == 2


def test_figures_of_an_array_without_shards() -> None:
    """Objects are chunks."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base), chunk_key_encoding={"name": "v2", "separator": "."})
    z[0, :4] = 1
    array = info_of(base)
    assert (array.declaration, array.shard_shape, array.chunks_per_shard) == (None, None, None)
    assert (array.n_chunks, array.n_objects, array.n_objects_of_grid) == (2, 2, 35)
    assert (array.stored_nbytes, array.chunk_nbytes, array.index_nbytes) == (12, 12, 0)
    assert not is_sharded(base)
    assert not is_sharded(base, "a")


def shard_of(entries: dict[int, tuple[int, int]], n_data: int) -> bytes:
    """A shard of 6 entries made by hand: (offset, nbytes) by entry id, after `n_data` bytes."""
    fields = np.full((6, 2), MISSING, dtype=np.uint64)
    for entry_id, pair in entries.items():
        fields[entry_id] = pair
    return b"x" * n_data + ShardIndex(fields).encode(ZEP2_INDEX)


@pytest.mark.parametrize(
    ("entries", "n_data", "dead"),
    [
        ({0: (10, 6), 5: (30, 6)}, 50, 50 - 12),
        ({0: (0, 20), 1: (10, 20), 2: (12, 5)}, 40, 10),  # overlapping: bytes count once
        ({0: (0, 20), 1: (0, 20)}, 20, 0),  # two chunks of the same bytes
        ({}, 7, 7),
        ({3: (4, 0)}, 4, 4),  # an empty chunk
    ],
)
def test_dead_bytes_are_in_no_entry_and_not_in_the_index(
    entries: dict[int, tuple[int, int]], n_data: int, dead: int
) -> None:
    """Each byte counts once, so there are never fewer than none."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    base["a/c/1/1"] = shard_of(entries, n_data)
    array = info_of(base)
    assert array.dead_nbytes == dead
    assert array.n_chunks == len(entries)
    assert array.chunk_nbytes == sum(nbytes for _, nbytes in entries.values())
    assert not array.errors


def test_entries_outside_the_array_are_no_chunks_and_their_bytes_are_not_dead() -> None:
    """The last shard hangs over the edge; shards outside the grid are not looked at."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    base["a/c/2/2"] = shard_of({0: (0, 5), 1: (5, 6), 3: (11, 7)}, 20)
    base["a/c/3/0"] = base["a/c/0/3"] = b"outside"
    base["a/c/0/00"] = base["a/c/0/0/0"] = base["a/c/x"] = b"no shard"
    array = info_of(base)
    assert (array.n_chunks, array.chunk_nbytes) == (1, 5)
    assert array.dead_nbytes == 2
    assert array.n_objects == 1
    assert array.errors == ()


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (b"short", "takes 100 bytes"),
        (bytes(120), "checksum"),
        (shard_of({0: (0, 6), 1: (3, 2**63)}, 6), r"chunk 'a/c/2/4', bytes \[3, "),
        (shard_of({1: (2**64 - 2, 5)}, 6), "leaves the data"),
    ],
)
def test_a_damaged_shard_is_reported_and_blocks_no_other(shard: bytes, says: str) -> None:
    """Its size counts, as do its entries, as in a listing; nothing gets negative."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base, chunks_per_shard=(2, 3)))
    z[0, :] = 1
    base["a/c/1/1"] = shard
    array = info_of(base)
    (error,) = array.errors
    assert "a/c/1/1" in error
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(error)
    assert array.n_errors == 1
    assert array.n_objects == 4
    assert array.stored_nbytes == 7 * 6 + 3 * INDEX + len(shard)
    assert array.n_chunks >= 7
    assert 0 <= array.dead_nbytes <= len(shard)
    assert array.chunk_nbytes == (7 + says.startswith("chunk")) * 6, "damaged entries have no size"


def test_a_few_errors_are_kept_and_all_are_counted() -> None:
    """A store with thousands of damaged shards has a report that can be read."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base, chunks_per_shard=(1, 1)))
    z[:] = 1
    for key in [key for key in base if key.startswith("a/c/")]:
        base[key] = b"damaged"
    array = info_of(base)
    assert (array.n_errors, len(array.errors), array.n_chunks) == (35, 20, 0)


class FailingBackend(LocalBackend):
    """Refuses to read some files."""

    refused: tuple[str, ...] = ()

    def _perform_one(self, request: Any, files: Any) -> Any:
        if isinstance(request, Get | GetIndex) and request.key.endswith(self.refused):
            raise PermissionError(13, "Permission denied", request.key)
        return super()._perform_one(request, files)


def test_a_shard_that_the_base_store_refuses_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it refuses all of a round, its error is raised: then it is no matter of shards."""
    z = make(ShardingStore(tmp_path, chunks_per_shard=(2, 3)))
    z[0, :] = 1
    monkeypatch.setattr("zarr_shardstore.io.backends.resolve.LocalBackend", FailingBackend)
    monkeypatch.setattr(FailingBackend, "refused", ("c/0/1",))
    array = info_of(tmp_path)
    assert array.n_errors == 1
    assert "Permission denied" in array.errors[0]
    assert array.n_chunks == 4
    assert np.isnan(shard_map(tmp_path, "a").fill[0, 1])
    monkeypatch.setattr(FailingBackend, "refused", ("c/0/0", "c/0/1", "c/0/2"))
    with pytest.raises(PermissionError):
        get_shard_info(tmp_path)


@pytest.mark.parametrize("stack", [["crc32c", "sharding"], ["sharding", "crc32c"], ["crc32c"]])
def test_stacks_of_transformers(stack: list[str]) -> None:
    """Shards are looked into also through the transformers below them."""
    base: dict[str, bytes] = {}
    is_whole = stack[-1] == "crc32c"
    z = make(ShardingStore(base, chunks_per_shard=(2, 3), storage_transformers=stack))
    z[0, :] = 1
    array = info_of(base)
    objects = [value for key, value in base.items() if key.startswith("a/c/")]
    assert array.declaration == "storage_transformers"
    assert array.n_chunks == 7
    assert array.n_objects == len(objects)
    assert array.stored_nbytes == sum(map(len, objects))
    assert array.is_sharded == ("sharding" in stack) == is_sharded(base)
    assert array.dead_nbytes == 0
    assert "crc32c" in array.notes[0]
    if array.is_sharded and is_whole:
        assert array.stored_nbytes == array.chunk_nbytes + array.index_nbytes + 4 * len(objects)
    if array.is_sharded:
        base["a/c/0/0"] = b"damage" + base["a/c/0/0"][6:]
        damaged = info_of(base)
        assert damaged.n_errors == (1 if is_whole else 0), "only the whole is checked"
        assert damaged.n_chunks == (4 if is_whole else 7)


def test_bad_documents_are_reported_and_block_nothing() -> None:
    """No JSON, a declaration that contradicts itself, a transformer that is not known."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2)
    make(store, name="good")[:] = 1
    for name in ("grid", "stack", "v2"):
        make(ShardingStore(base), name=name, zarr_format=2 if name == "v2" else 3)
    doc = json.loads(base["good/zarr.json"])
    doc["codecs"][0]["configuration"]["chunk_shape"] = [5, 5]
    base["bad/zarr.json"] = json.dumps(doc).encode()
    doc = json.loads(base["stack/zarr.json"])
    base["stack/zarr.json"] = json.dumps({**doc, "storage_transformers": [{"name": "x"}]}).encode()
    doc = json.loads(base["grid/zarr.json"])
    base["grid/zarr.json"] = json.dumps({**doc, "chunk_grid": {"name": "odd"}}).encode()
    base["v2/.zarray"] = b"{no json"
    base["torn/zarr.json"] = b'{"node_type'
    base["meta/root/old.array.json"] = b"[]"
    info = get_shard_info(base)
    errors = {array.path: array.errors for array in info.arrays}
    assert errors["good"] == ()
    assert "cannot be cut" in errors["bad"][0]
    assert "'x' is not known" in errors["stack"][0]
    for path in ("v2", "torn", "old"):
        assert "no JSON" in errors[path][0]
    (odd,) = [array for array in info.arrays if array.path == "grid"]
    assert (odd.shape, odd.n_errors) == ((5, 21), 0)
    assert "not known" in odd.notes[0]
    assert info.n_errors == 5
    with pytest.raises(SpecError, match="no JSON"):
        is_sharded(base, "torn")
    with pytest.raises(UnsupportedError, match="'x' is not known"):
        is_sharded(base, "stack")


def test_native_shards_that_are_left_to_zarr_are_sharded() -> None:
    """Their shards are counted, not their chunks; the note says so."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))[0] = 1
    assert info_of(base).notes == ()
    base["a/zarr.json"] = dump_document(declare_native(json.loads(base["a/zarr.json"])))
    array = info_of(base)
    assert is_sharded(base, "a")
    assert (array.declaration, array.chunk_shape, array.n_chunks) == (None, (2, 9), 3)
    assert "left to zarr" in array.notes[0]


def test_paths_and_patterns() -> None:
    """Paths, patterns and the root; what names no array is an error."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard={"x/*": 2})
    for name in ("x/a", "x/b", "y"):
        make(store, name=name)

    def of(*paths: str) -> list[str]:
        return [array.path for array in get_shard_info(base, paths=paths).arrays]

    assert of("/y/", "x/a") == ["x/a", "y"]
    assert of("x/*", "x/a") == of("x") == of("x/") == ["x/a", "x/b"]
    assert of("") == of("x", "y") == ["x/a", "x/b", "y"]
    assert is_sharded(base, "x/a")
    assert not is_sharded(base, "y")
    assert is_sharded(ShardingStore(base))
    for path in ("z", "z*", "x/c"):
        with pytest.raises(SpecError, match="no array has the path"):
            of(path)
    with pytest.raises(SpecError, match="no array at 'z'"):
        is_sharded(base, "z")
    assert info_of(base, paths="x/a").path == "x/a"
    assert get_shard_info({}).arrays == ()
    assert not is_sharded({})


def test_the_chunks_of_a_migrated_array_are_counted_once() -> None:
    """A v2 and a v3 document at one path, of the same keys."""
    base: dict[str, bytes] = {}
    options: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "."}}
    make(ShardingStore(base), zarr_format=2, **options)[0] = 1
    v3: dict[str, bytes] = {}
    make(ShardingStore(v3), **options)
    base["a/zarr.json"] = v3["a/zarr.json"]
    info = get_shard_info(base)
    assert [(a.hierarchy, a.n_chunks, a.shares_objects) for a in info.arrays] == [
        ("v2", 7, True),
        ("v3", 7, False),
    ]
    assert info.n_chunks == info.n_objects == 7


def test_totals_and_json() -> None:
    """The totals are the sums; `as_dict` is what JSON gives back."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard={"b": 2})
    for name in ("a", "b"):
        make(store, name=name)[0] = 1
    info = get_shard_info(base)
    found = info.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["totals"]["n_sharded"] == info.n_sharded == 1
    for name, total in found["totals"].items():
        if name != "n_sharded":
            assert total == sum(array[name] for array in found["arrays"]), name
    assert found["arrays"][1]["shard_shape"] == [2, 6]


def test_indexes_alone_are_read_and_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many shards: no request for a chunk, and so many at once at most."""
    z = make(ShardingStore(tmp_path, chunks_per_shard=(2, 3)))
    z[:] = 1
    expected = info_of(tmp_path)
    asked: list[Any] = []
    rounds: list[int] = []

    class Recording(LocalBackend):
        def _perform_one(self, request: Any, files: Any) -> Any:
            asked.append(request)
            return super()._perform_one(request, files)

    read_round = occupancy._read_round

    def counted(base: Any, grid: Any, keys: Any) -> Any:
        rounds.append(len(keys))
        return read_round(base, grid, keys)

    monkeypatch.setattr("zarr_shardstore.io.backends.resolve.LocalBackend", Recording)
    monkeypatch.setattr(occupancy, "_read_round", counted)
    monkeypatch.setattr(index_reads, "_SHARDS_PER_ROUND", 4)
    assert info_of(tmp_path) == expected
    assert rounds == [4, 4, 1]
    gets = [r for r in asked if isinstance(r, Get) and r.key.startswith("a/c/")]
    assert [get.byte_range for get in gets] == [Suffix(INDEX)] * 9
    rounds.clear()
    monkeypatch.setattr(index_reads, "_NBYTES_PER_ROUND", 2 * INDEX)
    assert info_of(tmp_path) == expected
    assert rounds == [2, 2, 2, 2, 1], "fewer where indexes are large"


def test_a_shard_that_is_replaced_meanwhile_is_asked_again() -> None:
    """The index of one state and the size of another look like damage; the second look is true."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    grid = occupancy.ObjectGrid(read_array(arrays_at(open_base(base), "a")[0]))
    shard = shard_of({0: (0, 50)}, 50)
    assert grid.layout is not None
    ref = grid.layout.shard_of_key("a/c/0/0")
    assert ref is not None
    index, size = GetIndex(ref, cache=False), GetSize("a/c/0/0")
    flow = occupancy._read_objects(grid, ["a/c/0/0"])
    assert next(flow) == [size, index, size]
    found = found_index(index, Found(memoryview(shard)[-INDEX:], None))
    assert flow.send([len(shard), found, INDEX]) == [index, size]
    with pytest.raises(StopIteration) as done:
        flow.send([found, len(shard)])
    part = done.value.value
    assert part.errors() == []
    assert [(cell.n_chunks, cell.dead_nbytes) for cell in part.cells] == [(1, 0)]


def test_an_object_that_is_erased_meanwhile_is_not_counted() -> None:
    """It was listed, and is not there any more."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    grid = occupancy.ObjectGrid(read_array(arrays_at(open_base(base), "a")[0]))
    flow = occupancy._read_objects(grid, ["a/c/0/0"])
    next(flow)
    with pytest.raises(StopIteration) as done:
        flow.send([None, FoundIndex(None, None), None])
    assert (done.value.value.object_nbytes, done.value.value.cells) == ([], [])


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    ndim = draw(st.integers(0, 3))
    dims = st.lists(st.integers(1, 5), min_size=ndim, max_size=ndim).map(tuple)
    grid = draw(dims)
    zarr_format = draw(st.sampled_from([2, 3]))
    names = ["v2"] if zarr_format == 2 else ["v2", "default"]
    return {
        "shape": grid,
        "zarr_format": zarr_format,
        "chunk_key_encoding": {
            "name": draw(st.sampled_from(names)),
            "separator": draw(st.sampled_from("./")),
        },
        "chunks_per_shard": draw(st.none() | dims),
        "written": draw(
            st.lists(st.tuples(*(st.integers(0, n - 1) for n in grid)), max_size=12, unique=True)
        ),
        "name": draw(st.sampled_from(["", "g/c"])),
    }


@given(made=arrays(), by_directory=st.booleans())
@settings(max_examples=60 * N_ROUNDS)
def test_counts_and_fill_are_those_of_a_listing(made: dict[str, Any], by_directory: bool) -> None:
    """Law: what is counted is what a `ShardingStore` lists, however the objects are found."""
    base: dict[str, bytes] = {}
    cps, written, ndim = made.pop("chunks_per_shard"), made.pop("written"), len(made["shape"])
    store = ShardingStore(base, chunks_per_shard=cps)
    z = zarr.create_array(store, chunks=(1,) * ndim, dtype="u1", compressors=None, **made)
    for coords in written:
        z[coords] = 1
    path = made["name"]
    prefix = f"{path}/" if path else ""
    keys = [
        key
        for key in ShardingMapping(base).list_prefix(prefix)
        if not key.endswith((".zarray", ".zattrs", ".zgroup", "zarr.json"))
    ]
    with pytest.MonkeyPatch.context() as patch:
        if by_directory:
            patch.setattr(occupancy, "_KEYS_AT_ONCE", 0)
        array, shards = info_of(base), shard_map(base, path)
    assert array.n_chunks == len(keys) == len(written)
    assert array.chunk_nbytes == len(written)
    assert array.fill == len(written) / max(1, np.prod(made["shape"]))
    assert array.stored_nbytes == array.chunk_nbytes + array.index_nbytes + array.dead_nbytes
    assert array.n_objects == int((shards.fill > 0).sum())
    panels, _ = cut_into_panels(shards, 9, 9, lambda *_: 9)
    assert sum(panel.stored.sum() for panel in panels) == len(keys)


def test_listing_by_directory_finds_the_objects_of_draft_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their first component spells a coordinate: ``c0/1``."""
    expected = get_shard_info(GOLDEN)
    monkeypatch.setattr(occupancy, "_KEYS_AT_ONCE", 0)
    assert get_shard_info(GOLDEN) == expected


@pytest.mark.parametrize("name", ["default", "v2"])
@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_listing_by_directory_finds_the_objects_of_v3_arrays(
    name: str, separator: str, ndim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last component is directly below the array, or below its ``c``."""
    base: dict[str, bytes] = {}
    shape = (4, 3, 5)[:ndim]
    encoding = {"name": name, "separator": separator}
    options: dict[str, Any] = {"shape": shape, "chunks": (1,) * ndim}
    make(ShardingStore(base), **options, chunk_key_encoding=encoding)[...] = 1
    monkeypatch.setattr(occupancy, "_KEYS_AT_ONCE", 0)
    assert info_of(base).n_chunks == np.prod(shape)


def test_arrays_in_any_base_store_are_looked_at_as_stored() -> None:
    """A store that wraps is looked through; what lies beside the chunks does not disturb."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))[0] = 1
    put(base, "a/c/readme.txt", b"hello")
    put(base, "a/extra/0/0", b"hello")
    assert info_of(ShardingStore(base)) == info_of(base)
    assert info_of(ShardingMapping(base)).n_objects == 3
