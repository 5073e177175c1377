"""What lists of lengths do not go with: refused, or left alone, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from tests.support.kit import objects_of
from zarr_shardstore import (
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    ShardStoreError,
    SpecError,
    UnsupportedError,
    check_store,
    from_native,
    get_shard_info,
    reshard,
    shard_store,
    to_native,
    to_references,
)

needs_grids = pytest.mark.skipif(
    "rectilinear_chunks" not in zarr.config.get("array"), reason="zarr before 3.2 has no lists"
)
pytestmark = [needs_grids, pytest.mark.filterwarnings("ignore:.*stays unsharded")]
VALUES = np.arange(1, 25, dtype="i4")
LIST = {"name": "rectilinear"}


@pytest.fixture(autouse=True)
def _with_rectilinear_chunks() -> Iterator[None]:
    with zarr.config.set({"array.rectilinear_chunks": True}):
        yield


def make(base: Any, chunks: Any, **options: Any) -> Any:
    """An array of 24 elements with keys of v2, of which the second chunk is not stored."""
    z = zarr.create_array(
        ShardingStore(base, **options),
        name="a",
        shape=(24,),
        chunks=chunks,
        dtype="i4",
        chunk_key_encoding={"name": "v2", "separator": "."},
    )
    z[:10] = VALUES[:10]
    z[14:] = VALUES[14:]
    return z


def contents(base: MemoryStore) -> dict[str, bytes]:
    return {key: value.to_bytes() for key, value in base._store_dict.items()}


EXPECTED = np.concatenate([VALUES[:10], np.zeros(4, "i4"), VALUES[14:]])


TRANSLATIONS: list[Callable[[Any], Any]] = [
    lambda base: to_references(base, url="https://example.org/", zarr_format=2),
    lambda base: from_native(base, zarr_format=2),
    to_native,
    lambda base: shard_store(base, chunks_per_shard=3, native=True),
]


@pytest.mark.parametrize("cps", [None, 2])
@pytest.mark.parametrize(
    "translate", TRANSLATIONS, ids=["references", "from_native", "to_native", "shard native"]
)
def test_formats_of_one_chunk_shape(translate: Callable[[Any], Any], cps: Any) -> None:
    """A regular grid of the largest length would give other values for missing chunks."""
    base = MemoryStore()
    make(base, [[10, 4, 10]], chunks_per_shard=cps)
    before = contents(base)
    if cps is None and translate in TRANSLATIONS[2:]:
        translate(base)  # which leaves an array without shards alone
    else:
        with pytest.raises(UnsupportedError, match="several lengths"):
            translate(base)
    assert contents(base) == before
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="a")[:], EXPECTED)


@pytest.mark.parametrize("kind", ["chunks", "equal chunks", "shards", "listed shards"])
def test_frames(kind: str) -> None:
    base = MemoryStore()
    grids: dict[str, Any] = {
        "chunks": {"chunks": [[2, 4], [4]]},
        "equal chunks": {"chunks": [[2, 2, 2], [4]]},
        "shards": {"chunks": (1, 4), "shards": [[2, 4], [4]]},
        "listed shards": {"chunks": (1, 4)},
    }
    zarr.create_array(base, name="a", shape=(6, 4), dtype="i4", **grids[kind])[:] = 1
    if kind == "listed shards":
        shard_store(base, shards=[[2, 4], [4]], declaration="storage_transformers")
    before = contents(base)
    with pytest.raises(SpecError, match="append_arrays"):
        ShardingStore(base).append_frames("a")
    assert contents(base) == before


def test_two_array_objects_that_append_keep_the_shards() -> None:
    """The second one does not know the chunk of the first: as in zarr, its own takes the place."""
    base = MemoryStore()
    lists: Any = [[4, 4, 2]]
    store = ShardingStore(base, chunks_per_shard=2)
    z = zarr.create_array(store, name="a", shape=(10,), chunks=lists, dtype="i4")
    z[:] = VALUES[:10]
    first, second = (zarr.open_array(ShardingStore(base), path="a") for _ in range(2))
    first.append(np.full(5, 8, "i4"))
    second.append(np.full(2, 9, "i4"))
    second[0:4] = 100
    for each in (second, zarr.open_array(ShardingStore(base), path="a")):
        assert np.asarray(each[:10]).tolist() == [100] * 4 + VALUES[4:10].tolist()
    assert get_shard_info(base).n_sharded == 1


def test_equal_lengths_that_two_array_objects_change() -> None:
    base = MemoryStore()
    lists: Any = [[4, 4, 4]]
    store = ShardingStore(base, chunks_per_shard=2)
    made = zarr.create_array(store, name="a", shape=(12,), chunks=lists, dtype="i4")
    made[:] = VALUES[:12]
    again = zarr.open_array(ShardingStore(base), path="a")
    again.append(np.full(4, 8, "i4"))
    made.append(np.full(3, 9, "i4"))
    found = zarr.open_array(ShardingStore(base), path="a")
    assert np.asarray(found[:12]).tolist() == VALUES[:12].tolist()
    assert get_shard_info(base).n_sharded == 1


def test_other_lengths_are_refused() -> None:
    base = MemoryStore()
    make(base, [[10, 4, 10]], chunks_per_shard=2)
    before = contents(base)
    doc = json.loads(ShardingMapping(base)["a/zarr.json"])
    doc["chunk_grid"]["configuration"]["chunk_shapes"] = [[4, 10, 10]]
    with pytest.raises(UnsupportedError, match="open the array again, or erase it first"):
        ShardingMapping(base)["a/zarr.json"] = json.dumps(doc).encode()
    assert contents(base) == before
    ShardingMapping(base).erase_prefix("a/")
    ShardingMapping(base)["a/zarr.json"] = json.dumps(doc).encode()


def test_a_length_of_zero_keeps_the_shards() -> None:
    base = MemoryStore()
    z = make(base, [[10, 4, 10]], chunks_per_shard=2)
    z.resize((0,))
    z = zarr.open_array(ShardingStore(base), path="a")
    z.resize((30,))
    z[:] = 7
    assert get_shard_info(base).arrays[0].declaration == "storage_transformers"
    assert set(np.asarray(zarr.open_array(ShardingStore(base), path="a")[:]).tolist()) == {7}


def test_a_small_document_of_many_lengths_takes_no_memory() -> None:
    """Counts of 2¹⁸ in each of 16 dimensions, of chunks and of shards."""
    base: dict[str, bytes] = {}
    lists: Any = [[10, 4, 10]]
    store = ShardingStore(base, chunks_per_shard=2)
    zarr.create_array(store, name="a", shape=(24,), chunks=lists, dtype="i4")
    doc = json.loads(base["a/zarr.json"])
    sharding = doc["storage_transformers"][0]["configuration"]
    doc["shape"] = [4] * 16
    for long, text in (("chunk_shapes", "chunk grid"), ("chunks_per_shard", "short lists")):
        many = [[[1, 2**18 - 1], 2]] * 16
        doc["chunk_grid"]["configuration"]["chunk_shapes"] = [[2, 2]] * 16
        sharding["chunks_per_shard"] = [2] * 16
        holder = sharding if long == "chunks_per_shard" else doc["chunk_grid"]["configuration"]
        holder[long] = many
        base["b/zarr.json"] = json.dumps(doc).encode()
        with pytest.raises(ShardStoreError, match=text):
            ShardingMapping(base)["b/c/" + "/".join("0" * 16)]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": ["24"]},
        {"shape": None},
        {"shape": [[24]]},
        {"shape": {}},
        {"chunk_grid": {**LIST, "configuration": {"kind": "inline", "chunk_shapes": 12}}},
        {"chunk_grid": {"name": "rectilinear", "configuration": {"kind": "inline"}}},
        {"chunk_grid": {"name": "rectilinear", "configuration": None}},
        {"chunk_grid": {"name": "rectilinear"}},
        {"chunk_grid": "rectilinear"},
        {"chunk_grid": None},
    ],
)
def test_malformed_documents_harm_no_other_array(change: dict[str, Any]) -> None:
    base = MemoryStore()
    make(base, [[10, 4, 10]], chunks_per_shard=2)
    shards: Any = [[8, 4, 12]]
    zarr.create_array(
        ShardingStore(base), name="b", shape=(24,), chunks=(2,), shards=shards, dtype="i4"
    )
    bad = {**json.loads(contents(base)["b/zarr.json"]), **change}
    ShardingMapping(base, native="passthrough")["b/zarr.json"] = json.dumps(bad).encode()
    with suppress(ShardStoreError):
        ShardingMapping(base).get("b/c/0")
    assert get_shard_info(base).arrays[0].n_chunks == 2
    check_store(base)
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="a")[:], EXPECTED)


# ------------------------------------------------------------------------ listed shards


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": [[10, 5, 9]]}, "inside a chunk from 14 to 24"),
        ({"shards": [[10, 4]]}, "shards end at 14 along dimension 0, and the array at 24"),
        ({"shards": [[10, 4, 0]]}, "length in shards"),
        ({"shards": [[]]}, "empty"),
        ({"shards": [[10, 4.0, 10]]}, "length in shards"),
        ({"shards": [[10, True, 10]]}, "length in shards"),
        ({"shards": [[10, 14], [3]]}, "2 dimensions"),
        ({"shards": "24"}, "shards has for each dimension"),
        ({"shards": {}}, "shards has for each dimension"),
        ({"shards": {"time": [24]}}, "rule for 'time'"),
        ({"shards": {1: [24]}}, "rule for '1'"),
        ({"shards_at": [[14, 10]]}, "ascending"),
        ({"shards": [[24]], "shards_at": [[10]]}, "give one"),
        ({"shards": [[24]], "chunks_per_shard": 2}, "give one"),
        ({"shards": [7]}, "inside a chunk"),
    ],
)
def test_wrong_lists_change_nothing(arguments: dict[str, Any], message: str) -> None:
    base = MemoryStore()
    make(base, [[10, 4, 10]])
    before = contents(base)
    with pytest.raises(SpecError, match=message):
        shard_store(base, **arguments)
    assert contents(base) == before


def test_more_lengths_than_readers_take_are_refused() -> None:
    base = MemoryStore()
    zarr.create_array(base, name="a", shape=(2**40,), chunks=(2,), dtype="u1")
    for arguments in ({"shards": [3]}, {"shards": [[2] * (2**18 + 1)]}):
        with pytest.raises(SpecError, match="at most 262144"):
            shard_store(base, **arguments)


def test_a_dimension_that_is_named_twice() -> None:
    base = MemoryStore()
    zarr.create_array(base, name="a", shape=(8,), chunks=(2,), dtype="u1", dimension_names=["t"])
    with pytest.raises(SpecError, match="twice"):
        shard_store(base, shards={"t": [8], 0: [4, 4]})


def test_coordinates_of_one_chunk_are_left_alone() -> None:
    """A rule by names is for the arrays that it fits, unless the array is named."""
    base = MemoryStore()
    for name, chunks in (("data", (1, 4)), ("time", (90,))):
        zarr.create_array(
            base,
            name=name,
            shape=(90, 4)[: len(chunks)],
            chunks=chunks,
            dtype="u1",
            dimension_names=["time", "x"][: len(chunks)],
        )[:] = 1
    report = shard_store(base, shards={"time": [31, 28, 31]})
    assert [(a.path, a.action) for a in report.arrays] == [("data", "sharded"), ("time", "skipped")]
    assert "inside a chunk" in report.arrays[1].reason
    with pytest.raises(SpecError, match="the array 'time': a shard ends at 31"):
        reshard(base, shards={"time": [31, 28, 31]}, paths="time")
    assert reshard(base, shards={"time": [31, 28, 31]}).arrays[0].action == "skipped"


def test_lengths_by_name_that_fit_no_array() -> None:
    """A copy without shards would look like success."""
    base, new = MemoryStore(), MemoryStore()
    options: Any = {"chunks": (7, 4), "dtype": "u1", "dimension_names": ["time", "x"]}
    zarr.create_array(base, name="data", shape=(60, 4), **options)[:] = 1
    with pytest.raises(SpecError, match="fit no array; 'data': a shard ends at 31"):
        shard_store(base, new, shards={"time": [31, 29]})
    assert not objects_of(new)
    shard_store(base, chunks_per_shard=2)
    with pytest.raises(SpecError, match="fit no array; 'data': a shard ends at 31"):
        reshard(base, shards={"time": [31, 29]})


def test_one_place_alone() -> None:
    base = MemoryStore()
    zarr.create_array(base, name="a", shape=(10,), chunks=(2,), dtype="u1")[:] = 1
    shard_store(base, shards_at=[4])
    assert get_shard_info(base).arrays[0].shard_grid_shape == (2,)


@pytest.mark.parametrize("cps", [None, 2])
@pytest.mark.parametrize(
    ("lists", "others"), [([[10, 21]], [[10, 18]]), ([[4, 6], [4, 6]], [[4, 4], [4, 9]])]
)
def test_an_array_with_another_last_chunk_is_another(
    cps: int | None, lists: Any, others: Any, tmp_path: Any
) -> None:
    """An array object that is open refuses it: chunks of 6 × 6 are as long as those of 4 × 9."""

    def make_with(chunks: Any, value: int) -> None:
        store = ShardingStore(tmp_path, chunks_per_shard=cps)
        shape = tuple(map(sum, chunks))
        options: dict[str, Any] = {"shape": shape, "chunks": chunks, "dtype": "i4"}
        zarr.create_array(store, name="a", overwrite=True, **options)[...] = value

    make_with(lists, 1)
    z: Any = zarr.open_array(ShardingStore(tmp_path), path="a")
    assert z[...].min() == 1
    make_with(others, 2)
    at = tuple(slice(length, length + 4) for length, _ in lists)
    with pytest.raises(ShardConflictError, match="open it again"):
        z[at]
    with pytest.raises(ShardConflictError, match="open it again"):
        z[at] = 3
    assert np.asarray(zarr.open_array(ShardingStore(tmp_path), path="a")[...]).min() == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, [2, 4, 4, 4, 2]),
        ([4, 4, 8], [8, 4, 4]),
        ([2, 4, 4, 6], [4, 4, 4, 4]),
        ([6, 4, 6], [4, 6, 6]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_used", [True, False])
def test_an_object_is_refused_after_a_conversion_to_other_shards(
    before: Any, after: list[int], is_used: bool
) -> None:
    """Shards of an equal length may lie elsewhere: its elements would be other ones."""
    base = MemoryStore()
    store = ShardingStore(base, 2 if before == 2 else 1, view="shards")
    options: dict[str, Any] = {"shape": (16,), "chunks": (2,), "dtype": "i4"}
    zarr.create_array(store, name="a", **options)
    zarr.open_array(store, path="a")[:] = np.arange(16)
    if before != 2:
        reshard(store, shards=[before])
    z: Any = zarr.open_array(store, path="a")
    assert z[0] == 0 or not is_used
    reshard(store, shards=[after])
    attempts: list[Callable[[], Any]] = [lambda: z.append(np.ones(4, "i4"))]
    for part in (slice(4, 8), slice(8, 12), slice(None)):
        attempts += [partial(z.__getitem__, part), partial(z.__setitem__, part, 1)]
    for attempt in reversed(attempts):
        with pytest.raises((ShardConflictError, UnsupportedError), match=r"open .+ again"):
            attempt()
    now: Any = zarr.open_array(ShardingStore(base), path="a")
    np.testing.assert_array_equal(now[:], np.arange(16))
    with pytest.raises((ShardConflictError, UnsupportedError), match=r"open .+ again"):
        z.resize((4,))  # zarr erases shards first
    np.testing.assert_array_equal(now[:10], np.arange(10))


@pytest.mark.parametrize("declaration", ["codec", "storage_transformers"])
def test_an_object_of_shards_does_not_erase_others(declaration: Any) -> None:
    """After a conversion to larger shards, or to none, its second shard has other chunks."""
    for cps in (4, None):
        base = MemoryStore()
        store = ShardingStore(base, 2, declaration=declaration, view="shards")
        zarr.create_array(store, name="a", shape=(16,), chunks=(2,), dtype="i4")[:] = np.arange(16)
        z: Any = zarr.open_array(store, path="a")
        reshard(base, cps)
        with pytest.raises((ShardConflictError, UnsupportedError), match=r"open .+ again"):
            z.resize((4,))
        now: Any = zarr.open_array(ShardingStore(base), path="a")
        np.testing.assert_array_equal(now[:], np.arange(16))


def test_an_object_that_made_a_list_longer_is_refused_after_a_conversion() -> None:
    """It knows where the shards lie that it has appended."""
    base = MemoryStore()
    store = ShardingStore(base, 1, view="shards")
    zarr.create_array(store, name="a", shape=(16,), chunks=(1,), dtype="i4")[:] = np.arange(16)
    reshard(store, shards=[[4, 4, 8]])
    z: Any = zarr.open_array(store, path="a")
    for first in (16, 24):
        z.append(np.arange(first, first + 8, dtype="i4"))
    np.testing.assert_array_equal(z[:], np.arange(32))
    reshard(base, shards=[[4, 4, 8, 4, 8, 4]])
    attempts: list[Callable[[], Any]] = [
        lambda: z[24:32],
        lambda: z.__setitem__(slice(24, 32), 1),
        lambda: z.resize((24,)),
    ]
    for attempt in attempts:
        with pytest.raises(ShardConflictError, match="open it again"):
            attempt()
    now: Any = zarr.open_array(ShardingStore(base), path="a")
    np.testing.assert_array_equal(now[:], np.arange(32))
