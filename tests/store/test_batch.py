"""Batches: each shard is published once, nothing that was acknowledged is dropped in silence."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore

from tests.support.bases import BASES, put
from tests.support.kit import objects_of
from zarr_shardstore import (
    CorruptShardError,
    DraftHierarchyStore,
    ReadOnlyError,
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnpublishedError,
)

CPS: Any = {"chunks_per_shard": 4}


SLOW = ZstdCodec(level=15)


class Failing(MemoryStore):
    """Counts what is set, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.sets: list[str] = []
        self.fails: set[str] = set()

    def _note(self, key: str) -> None:
        self.sets.append(key)
        if key in self.fails:
            raise OSError(f"no room for {key}")

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        self._note(key)
        await super().set(key, value, byte_range)

    def set_sync(self, key: str, value: Any) -> None:
        self._note(key)
        super().set_sync(key, value)


def shards_of(base: Any, path: str = "z") -> list[str]:
    return sorted(key for key in objects_of(base) if key.startswith(f"{path}/c/"))


def make(base: Any = None, name: str = "z", n: int = 8, **options: Any) -> tuple[Any, Any, Any]:
    """A base store, a store on it, and an array of one-byte chunks."""
    base = Failing() if base is None else base
    store = ShardingStore(base, **(CPS | options))
    z = zarr.create_array(
        store, name=name, shape=(n,), chunks=(1,), dtype="u1", compressors=None, fill_value=0
    )
    return base, store, z


def stored(base: Any, path: str = "z") -> list[int]:
    """What another store sees."""
    values: list[int] = np.asarray(zarr.open_array(ShardingStore(base), path=path)[:]).tolist()
    return values


# ------------------------------------------------------------------ each shard once


@pytest.mark.parametrize("kind", ["v2", "v3", "draft", "stack", "stack below"])
@pytest.mark.parametrize("n", [(8, 6), (7, 5)])
def test_chunk_by_chunk_is_one_put_a_shard(kind: str, n: tuple[int, int]) -> None:
    """Whole arrays, also with shards at the edge, of each kind."""
    base = Failing()
    stack = {"stack": ["crc32c", "sharding"], "stack below": ["sharding", "crc32c"]}.get(kind)
    sharded = ShardingStore(base, chunks_per_shard=(4, 3), storage_transformers=stack)
    store: Any = DraftHierarchyStore(sharded) if kind == "draft" else sharded
    z = zarr.create_array(
        store, name="z", shape=n, chunks=(1, 1), dtype="u1", zarr_format=2 if kind == "v2" else 3
    )
    base.sets.clear()
    expected = np.arange(1, 1 + n[0] * n[1], dtype="u1").reshape(n)
    with store.batch():
        for i in range(n[0]):
            for j in range(n[1]):
                z[i, j] = expected[i, j]
        assert len(base.sets) == 4, "the last chunk of a shard has published it"
        assert np.array_equal(z[:], expected)
    assert len(base.sets) == len(set(base.sets)) == 4
    other: Any = ShardingStore(base)
    other = DraftHierarchyStore(other) if kind == "draft" else other
    assert np.array_equal(zarr.open_array(other, path="z")[:], expected)


@pytest.mark.parametrize("base_name", list(BASES))
def test_slices_across_shards_are_one_put_a_shard(base_name: str) -> None:
    """Planes of a volume fill all shards side by side; chunks are written in parts."""
    base = BASES[base_name]()
    store = ShardingStore(base, chunks_per_shard=(4, 2))
    z = zarr.create_array(store, name="z", shape=(16, 8), chunks=(2, 2), dtype="i4")
    expected = np.arange(128, dtype="i4").reshape(16, 8) + 1
    with store.batch() as batch:
        for i in range(16):
            z[i] = expected[i]
            assert np.array_equal(z[: i + 1], expected[: i + 1])
        assert len(shards_of(base)) < 4 or batch.nbytes > 0
    assert len(shards_of(base)) == 4
    assert np.array_equal(zarr.open_array(ShardingStore(base), path="z")[:], expected)


async def test_async_with() -> None:
    """In an event loop, with tasks."""
    import asyncio

    base, store, _ = make()
    value = default_buffer_prototype().buffer.from_bytes(b"\x07")
    async with store.batch():
        await asyncio.gather(*(store.set(f"z/c/{i}", value) for i in range(7)))
        assert shards_of(base) == ["z/c/0"]
        got = await store.get("z/c/6", default_buffer_prototype())
        assert got.to_bytes() == b"\x07"
    assert base.sets.count("z/c/0") == base.sets.count("z/c/1") == 1
    assert stored(base) == [7] * 7 + [0]


def test_beyond_the_limit_the_largest_go_first() -> None:
    """And what was written by a shard's second publication joins the first."""
    base, store, _ = make(n=16)
    m = ShardingMapping(store)
    with m.batch(max_nbytes=5000):
        m["z/c/0"] = b"a" * 1000
        m["z/c/4"] = b"b" * 3000
        m["z/c/8"] = b"c" * 900
        assert shards_of(base) == []
        m["z/c/1"] = b"d" * 1000
        assert shards_of(base) == ["z/c/1"]
        m["z/c/5"] = b"e"
    with ShardingMapping(ShardingStore(base)).batch() as batch:
        assert batch.max_nbytes == 256 * 2**20
    other = ShardingMapping(ShardingStore(base))
    assert [len(other[f"z/c/{i}"]) for i in (0, 1, 4, 5, 8)] == [1000, 1000, 3000, 1, 900]
    assert base.sets.count("z/c/1") == 2
    assert base.sets.count("z/c/0") == base.sets.count("z/c/2") == 1


def test_erasures_count_too() -> None:
    """They take memory, though they have no bytes."""
    _, store, _ = make(n=4000)
    with store.batch(max_nbytes=10_000) as batch:
        for i in range(0, 4000, 4):
            store.delete_sync(f"z/c/{i}")
            assert batch.nbytes <= 10_000


def test_others_do_not_see_what_is_held() -> None:
    """Another store on the same base, and a copy by pickling, which has no batch."""
    base = {}  # type: ignore[var-annotated]
    _, store, z = make(base)
    local = ShardingStore(MemoryStore(), **CPS)
    with store.batch(), local.batch():
        z[0] = 1
        assert stored(base) == [0] * 8
        copy = pickle.loads(pickle.dumps(local))
        assert not copy._engine.operations.buffer.is_active
        assert zarr.open_array(store, path="z", mode="r")[0] == 1, "read-only, but the same"
        assert ShardingMapping(store)["z/c/0"] == b"\x01"


def test_other_stores_keep_their_writes() -> None:
    """Two stores write other chunks of one shard, one of them in a batch."""
    base, store, z = make()
    other = zarr.open_array(ShardingStore(base), path="z")
    with store.batch():
        z[0] = 1
        other[1] = 2
        store._engine.driver.run(
            store._engine.operations.set_many([("z/c/2", b"\x03")], only_if_missing=True)
        )
        assert z[2] == 3
        other[2] = 9
    assert stored(base) == [1, 2, 9, 0, 0, 0, 0, 0]


# ---------------------------------------------------------------- exceptions and failures


def test_an_exception_drops_the_rest() -> None:
    """What was published early stays."""
    base, store, z = make()
    z[5] = 9

    def block() -> None:
        with store.batch():
            z[:6] = 1
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        block()
    assert stored(base) == [1, 1, 1, 1, 0, 9, 0, 0]
    assert z[:].tolist() == stored(base)


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_cannot_be_published_is_named(is_async: bool) -> None:
    """Others are published; the error holds those of the base store, and pickles."""
    base, store, _ = make(n=16)
    base.fails = {"z/c/0", "z/c/2"}
    value = default_buffer_prototype().buffer.from_bytes(b"\x01")

    async def leave() -> None:
        if is_async:
            async with store.batch():
                for i in (0, 1, 5, 9, 13):
                    await store.set(f"z/c/{i}", value)
        else:
            m = ShardingMapping(store)
            with store.batch():
                for i in (0, 1, 5, 9, 13):
                    m[f"z/c/{i}"] = b"\x01"

    with pytest.raises(
        UnpublishedError, match=r"z/c/0 \(2 chunks: z/c/0, z/c/1\); z/c/2"
    ) as caught:
        await leave()
    error = caught.value
    assert error.chunk_keys == {"z/c/0": ("z/c/0", "z/c/1"), "z/c/2": ("z/c/9",)}
    assert [str(e) for e in error.exceptions] == ["no room for z/c/0", "no room for z/c/2"]
    assert all(isinstance(e, OSError) for e in error.exceptions)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.chunk_keys) == (str(error), error.chunk_keys)
    part = error.subgroup(lambda e: isinstance(e, OSError) and "c/2" in str(e))
    assert isinstance(part, UnpublishedError)
    assert part.chunk_keys == {"z/c/2": ("z/c/9",)}
    base.fails = set()
    assert [key for key in objects_of(base) if "/c/" in key] == ["z/c/1", "z/c/3"]
    assert not store._engine.operations.buffer.is_active
    with store.batch():  # the next one is not the worse for it
        ShardingMapping(store)["z/c/0"] = b"\x02"
    assert ShardingMapping(store)["z/c/0"] == b"\x02"


@pytest.mark.parametrize("kind", ["full", "limit"])
def test_a_failure_inside_raises_and_keeps_the_values(kind: str) -> None:
    """The write that made the shard due raises; the end tries again."""
    base, store, _ = make()
    m = ShardingMapping(store)
    base.fails = {"z/c/0"}
    with store.batch(max_nbytes=None if kind == "full" else 350):
        for i in range(3):
            m[f"z/c/{i}"] = b"x"
        with pytest.raises(OSError, match="no room") as caught:
            m["z/c/3"] = b"x"
        assert "z/c/0" in caught.value.__notes__[0]
        assert "still buffered" in caught.value.__notes__[0]
        assert [m[f"z/c/{i}"] for i in range(4)] == [b"x"] * 4
        base.fails = set()
    assert [ShardingMapping(ShardingStore(base))[f"z/c/{i}"] for i in range(4)] == [b"x"] * 4


def test_a_damaged_shard_blocks_no_other() -> None:
    """It is not rewritten, and named."""
    base, store, z = make()
    z[:] = 1
    put(base, "z/c/1", b"no index")

    def block() -> None:
        with store.batch():
            z[1] = 2
            ShardingMapping(store)["z/c/5"] = b"\x02"

    with pytest.raises(UnpublishedError, match="z/c/1") as caught:
        block()
    assert isinstance(caught.value.exceptions[0], CorruptShardError)
    assert objects_of(base)["z/c/1"] == b"no index"
    assert z[:4].tolist() == [1, 2, 1, 1]


def test_a_piece_outside_its_value_is_refused_at_once() -> None:
    """The error comes from the call, and nothing of it is held."""
    base, store, z = make()
    z[0] = 1
    m = ShardingMapping(store)
    with store.batch():
        m.set_partial_values([("z/c/0", 1, b"bc"), ("z/c/1", 0, b"de")])
        with pytest.raises(SpecError, match="lies outside the value, which has 3 bytes"):
            m.set_partial_values([("z/c/0", 4, b"!"), ("z/c/2", 0, b"!")])
        assert "z/c/2" not in m
        m.set_partial_values([("z/c/0", -1, b"!")])
        assert m["z/c/0"] == b"\x01b!"
    assert ShardingMapping(ShardingStore(base))["z/c/0"] == b"\x01b!"


def test_values_are_copied() -> None:
    """Whoever reuses a buffer does not change what is held."""
    _, store, _ = make()
    m = ShardingMapping(store)
    buffer = bytearray(b"old")
    with m.batch():
        m["z/c/0"] = buffer
        buffer[:] = b"new"
        assert m["z/c/0"] == b"old"


@pytest.mark.parametrize(
    ("length", "codec"), [(100_000, SLOW), (9, ZstdCodec(level=1)), (40_000, None)]
)
def test_a_batch_of_an_array(length: int, codec: Any) -> None:
    """Every read sees them, their writer may reuse its values, and the newest value is stored."""
    base = Failing()
    store = ShardingStore(base, **CPS)
    n = 10
    options: Any = {"shape": (n * length,), "chunks": (length,), "dtype": "u2"}
    options["compressors"] = codec
    z: Any = zarr.create_array(store, name="z", **options)
    noise, values = np.random.default_rng(0).integers(0, 9, length), np.empty(length, "u2")
    order = [*range(n), 3, 8, 9, 3]
    with store.batch() as batch:
        for number, i in enumerate(order):
            values[:] = 10 * (number + 1) + noise
            z[i * length : (i + 1) * length] = values
            if number % 3 == 0:
                assert (z[i * length : (i + 1) * length] == values).all()
        ShardingMapping(store).erase_values(["z/c/8"])
        assert not z[8 * length : 9 * length].any()
    assert batch.nbytes == 0
    last = [max(at + 1 for at, j in enumerate(order) if j == i) for i in range(n)]
    expected = np.array([10 * at + noise for at in last])
    expected[8] = 0
    again: Any = zarr.open_array(ShardingStore(base), path="z", mode="r+")
    np.testing.assert_array_equal(again[:].reshape(n, length), expected)
    assert (base.sets.count("z/c/0"), base.sets.count("z/c/1")) == (2, 1)  # 3 was written again


def test_the_limit_counts_bytes_as_they_are_stored() -> None:
    base = Failing()
    store = ShardingStore(base, chunks_per_shard=50)
    options: Any = {"shape": (50_000,), "chunks": (1000,), "dtype": "u2", "compressors": SLOW}
    z: Any = zarr.create_array(store, **options)
    with store.batch(max_nbytes=10_000):
        base.sets.clear()
        for i in range(40):
            z[i * 1000 : (i + 1) * 1000] = np.full(1000, i, "u2")
        assert not base.sets
    assert len(base.sets) == 1


@pytest.mark.parametrize("dtype", ["bool", ">u2", "complex128"])
@pytest.mark.parametrize("codec", [ZstdCodec(level=1, checksum=True), SLOW, None])
def test_a_batch_stores_the_bytes_that_are_stored_without_it(dtype: str, codec: Any) -> None:
    """Also from several arrays in turn, from values in another order, and of an empty chunk."""
    values = np.random.default_rng(0).integers(0, 2, (9, 12, 6)).astype(dtype).T
    values[2:4, :3, 3:6] = 0
    corners = list(product(range(0, 6, 2), range(0, 12, 3), range(0, 9, 3)))
    regions = [tuple(map(slice, at, np.add(at, (2, 3, 3)))) for at in corners]

    def written(in_batch: bool) -> dict[str, bytes]:
        base = MemoryStore()
        store = ShardingStore(base, chunks_per_shard=(2, 2, 2))
        options: Any = {"chunks": (2, 3, 3), "dtype": dtype, "compressors": codec, "fill_value": 0}
        arrays: Any = [
            zarr.create_array(store, name=name, shape=(6, 12, 9), **options) for name in "xy"
        ]
        with store.batch(max_nbytes=500) if in_batch else nullcontext():
            for region in regions:
                for z in arrays:
                    z[region] = values[region]
                    assert (z[region] == values[region]).all()
        assert all((z[...] == values).all() for z in arrays)
        return objects_of(base)

    assert written(True) == written(False)


# ----------------------------------------------------------------- metadata and directories


def test_a_resize_keeps_what_is_held() -> None:
    """Appending in a batch is one put a shard; a shard that was full may grow again."""
    base, store, z = make(n=2)
    base.sets.clear()
    with store.batch():
        for i in range(2, 11):
            z.resize((i + 1,))
            z[i] = i
        z.attrs["title"] = "held"
        assert z[:].tolist() == [0, 0, *range(2, 11)]
        z.resize((9,))
    assert stored(base) == [0, 0, *range(2, 9)]
    assert {base.sets.count(f"z/c/{i}") for i in (0, 1)} <= {1, 2}


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_array_made_anew_gets_nothing_of_the_old_one(zarr_format: int) -> None:
    """``overwrite=True`` with other shards, while values are held."""
    base, store, _ = make(name="other")
    options: Any = {"name": "z", "dtype": "u1", "zarr_format": zarr_format, "overwrite": True}
    z: Any = zarr.create_array(store, shape=(8,), chunks=(1,), **options)
    with store.batch():
        z[:3] = 1
        z = zarr.create_array(store, shape=(8,), chunks=(2,), **options)
        z[4] = 5
        assert z[:].tolist() == [0, 0, 0, 0, 5, 0, 0, 0]
    assert stored(base) == [0, 0, 0, 0, 5, 0, 0, 0]


def test_a_document_that_changes_what_keys_mean_comes_after_what_is_held() -> None:
    """Values go where they belonged when they were written, as without a batch."""
    base, store, z = make()
    put_document = ShardingMapping(store)
    document = put_document["z/zarr.json"]
    with store.batch():
        z[0] = 1
        base.sets.clear()
        put_document["z/zarr.json"] = document
        assert base.sets == ["z/zarr.json"], "nothing changed"
        z[1] = 1
        del put_document["z/zarr.json"]
        assert base.sets == ["z/zarr.json", "z/c/0"]
        put_document["z/zarr.json"] = document
    assert stored(base)[:2] == [1, 1]


def test_a_document_with_other_shards_comes_after_what_is_held() -> None:
    """Old values go into old shards, as without a batch."""
    base, store, z = make(declaration="storage_transformers")
    document = objects_of(base)["z/zarr.json"]
    changed = json.loads(document)
    changed["storage_transformers"][0]["configuration"]["chunks_per_shard"] = [2]
    base.sets.clear()
    with store.batch():
        z[0] = 1
        ShardingMapping(store)["z/zarr.json"] = json.dumps(changed).encode()
        assert base.sets == ["z/c/0", "z/zarr.json"]


def test_metadata_that_comes_after_held_chunks_describes_their_shards() -> None:
    """Without metadata the option alone makes shards; a new array would have a stack."""
    base: dict[str, bytes] = {}
    stack = ["crc32c", "sharding"]
    m = ShardingMapping(base, chunks_per_shard=4, storage_transformers=stack)
    grid = {"type": "regular", "chunk_shape": [2], "separator": "/"}
    with m.batch():
        m["data/root/g/a/c1"] = b"x"
        m["meta/root/g/a.array.json"] = json.dumps({"shape": [8], "chunk_grid": grid}).encode()
        assert m["data/root/g/a/c1"] == b"x"
        m["data/root/g/a/c2"] = b"y"
        m.erase_prefix("meta/root/g/")
        assert ShardingMapping(base, chunks_per_shard=4)["data/root/g/a/c2"] == b"y"
    assert ShardingMapping(base, chunks_per_shard=4)["data/root/g/a/c1"] == b"x"


def test_erasures_of_an_array_that_somebody_else_removed_are_no_error() -> None:
    """It is what was wanted."""
    _, store, z = make(base := MemoryStore())
    z[:] = 1
    with store.batch():
        ShardingMapping(store).erase("z/c/0")
        ShardingMapping(ShardingStore(base)).erase_prefix("z/")
    assert shards_of(base) == []


def test_what_cannot_be_published_now_counts_again() -> None:
    """The limit is passed by an array that another store made anew."""
    base, store, _ = make()
    zarr.create_array(store, name="y", shape=(8,), chunks=(1,), dtype="u1")
    m = ShardingMapping(store)

    def block() -> None:
        with store.batch(max_nbytes=1000) as batch:
            m["z/c/0"] = b"z" * 900
            ShardingMapping(ShardingStore(base)).erase_prefix("z/")
            with pytest.raises(ShardConflictError, match="removed"):
                m["y/c/0"] = b"y" * 200
            assert batch.nbytes == 1100

    with pytest.raises(UnpublishedError, match="z/c/0"):
        block()
    assert ShardingMapping(ShardingStore(base))["y/c/0"] == b"y" * 200


def test_draft_hierarchies_list_what_is_held() -> None:
    """Inside the batch as after it."""
    from zarr.core.sync import sync

    store = DraftHierarchyStore(ShardingStore(MemoryStore(), chunks_per_shard=4))
    z = zarr.create_array(store, name="g/z", shape=(8, 2), chunks=(1, 1), dtype="u1")

    async def listed() -> tuple[list[str], list[str]]:
        keys = [key async for key in store.list()]
        return sorted(keys), sorted([name async for name in store.list_dir("g/z/c")])

    with store.batch():
        z[1:6] = 1
        z[3] = 0
        inside = sync(listed())
    assert inside == sync(listed())
    assert inside[1] == ["1", "2", "4", "5"]


@pytest.mark.parametrize(
    "new",
    [
        {"chunks_per_shard": 2, "shape": (8,)},
        {"chunks": (2,)},
        {"dtype": "i1"},
        {"compressors": None},
        {"zarr_format": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_local", [True, False])
def test_an_array_that_another_store_made_anew_is_not_damaged(
    tmp_path: Path, new: dict[str, Any], is_local: bool
) -> None:
    """What was buffered for the old one is not put into the new one, and an error names it."""
    base: Any = tmp_path if is_local else MemoryStore()
    options: dict[str, Any] = {"name": "z", "shape": (16,), "chunks": (1,), "dtype": "u1"}
    store = ShardingStore(base, chunks_per_shard=4)
    z = zarr.create_array(store, **options)
    options |= {"overwrite": True, **new}
    elsewhere = ShardingStore(base, chunks_per_shard=options.pop("chunks_per_shard", 4))

    def block() -> None:
        with store.batch():
            z[:3] = 1
            other: Any = zarr.create_array(elsewhere, **options)
            other[...] = 7

    with pytest.raises(UnpublishedError, match="z/c/0") as caught:
        block()
    assert isinstance(caught.value.exceptions[0], ShardConflictError)
    found: Any = zarr.open_array(ShardingStore(base), path="z", mode="r")
    assert found[...].tolist() == [7] * options["shape"][0]


def test_erased_directories_drop_what_is_held() -> None:
    """Of the array, of a part of its grid, and of everything."""
    base = MemoryStore()
    store = ShardingStore(base, chunks_per_shard=(2, 2))
    options: Any = {"shape": (4, 4), "chunks": (1, 1), "dtype": "u1"}
    a: Any = zarr.create_array(store, name="a", **options)
    b = zarr.create_array(store, name="b", **options)
    m = ShardingMapping(store)
    with store.batch():
        a[:3, :3] = 1
        b[:3, :3] = 1
        m.erase_prefix("a/c/2/")
        assert a[2].tolist() == [0] * 4
        assert m.list_dir("a/c/") == ([], ["a/c/0/", "a/c/1/"])
        m.erase_prefix("b/")
        assert [key for key in m if key.startswith("b")] == []
    assert ShardingMapping(ShardingStore(base)).list_prefix("b") == []
    assert (
        sum(map(sum, np.asarray(zarr.open_array(ShardingStore(base), path="a")[:]).tolist())) == 6
    )
    with store.batch():
        a[3, 3] = 1
        m.clear()
        assert list(m) == []
    assert objects_of(base) == {}


@pytest.mark.parametrize("base_name", ["dict", "memory"])
def test_directories_that_would_be_empty_are_not_listed(base_name: str) -> None:
    """Erasures are held, and the shards are still there."""
    base: Any = BASES[base_name]()
    m = ShardingMapping(base, chunks_per_shard=2)
    _, store, z = make(base, name="g/z")
    z[:] = 1
    m.update({"data/root/h/a/c0": b"a", "data/root/h/a/c1": b"b", "data/root/h/b/c5": b"c"})
    shards = dict(objects_of(base))
    with m.batch(), store.batch():
        m.erase_values(["data/root/h/a/c0", "data/root/i/c9"])
        assert sorted(m.list_dir("data/root/h/")[1]) == ["data/root/h/a/", "data/root/h/b/"]
        m.erase("data/root/h/b/c5")
        assert m.list_dir("data/root/h/")[1] == ["data/root/h/a/"]
        assert m.list_dir("data/root/")[1] == ["data/root/h/"]
        n = ShardingMapping(store)
        for i in range(0, 7):
            n.erase(f"g/z/c/{i}")
        assert n.list_dir("g/z/") == (["g/z/zarr.json"], ["g/z/c/"])
        assert n.list_dir("g/z/c/") == (["g/z/c/7"], [])
        n.set("g/z/c/7", b"longer")
        assert n.list_prefix("g/z/c/") == ["g/z/c/7"]
    assert shards.keys() - objects_of(base).keys() == {"data/root/h/b/c2", "g/z/c/0"}


def test_sizes_are_those_of_held_values() -> None:
    """``getsize`` and ``getsize_prefix``, with erased and with longer values."""
    from zarr.core.sync import sync

    _, store, z = make()
    z[:] = 1
    m = ShardingMapping(store)
    with store.batch():
        m["z/c/1"] = b"long"
        m.erase("z/c/2")
        assert sync(store.getsize("z/c/1")) == 4
        assert sync(store.getsize_prefix("z/c")) == 7 + 3 - 0
        with pytest.raises(FileNotFoundError):
            sync(store.getsize("z/c/2"))


def test_what_is_not_sharded_is_written_at_once(tmp_path: Any) -> None:
    """Documents, other keys, plain arrays."""
    base = LocalStore(tmp_path)
    store = ShardingStore(base, chunks_per_shard={"sharded": 4})
    plain = zarr.create_array(store, name="plain", shape=(4,), chunks=(1,), dtype="u1")
    with store.batch():
        plain[0] = 1
        ShardingMapping(store)["notes.txt"] = b"n"
        assert {"plain/c/0", "plain/zarr.json", "notes.txt"} <= objects_of(base).keys()


def test_bad_arguments() -> None:
    """A limit that is none, a store that takes no writes, a block that is open already."""
    store = ShardingStore({}, chunks_per_shard=2)
    for bad in (-1, "1 MB", 1.5):
        with pytest.raises(SpecError, match="max_nbytes"):
            store.batch(max_nbytes=bad)  # type: ignore[arg-type]
    with pytest.raises(ReadOnlyError):
        ShardingStore({}, read_only=True).batch()
    with pytest.raises(ReadOnlyError):
        ShardingMapping({}, read_only=True).batch()
    with pytest.raises(ReadOnlyError):
        DraftHierarchyStore({}, read_only=True).batch()
    with store.batch() as batch, pytest.raises(SpecError, match="open already"):
        batch.__enter__()
