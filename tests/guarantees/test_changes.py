"""What changes while something is under way: nothing stale is learned, nothing is misread later."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous as za
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from tests.support.async_calls import set_partial_values
from tests.support.kit import objects_of
from zarr_shardstore import (
    CorruptShardError,
    CorruptValueError,
    ShardingMapping,
    ShardingStore,
    UnsupportedError,
    ValueTransformer,
    register_storage_transformer,
)

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata")

PROTOTYPE = default_buffer_prototype()


def buffer(value: bytes) -> Any:
    return PROTOTYPE.buffer.from_bytes(value)


class Slow(MemoryStore):
    """Holds back the reply to one read, or the end of one change, that has taken effect."""

    held_read: str | None = None
    held_change: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.is_held = asyncio.Event()

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        value = await super().get(key, *args, **kwargs)
        if key == self.held_read:
            self.held_read = None
            self.is_held.set()
            await self.go_on.wait()
        return value

    async def _hold(self, key: str) -> None:
        if key == self.held_change:
            self.held_change = None
            self.is_held.set()
            await asyncio.sleep(3600)

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        await super().set(key, value, byte_range)
        await self._hold(key)

    async def delete(self, key: str) -> None:
        await super().delete(key)
        await self._hold(key)

    async def delete_dir(self, prefix: str) -> None:
        await super().delete_dir(prefix)
        await self._hold(prefix)

    def get_sync(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the tests are async")


async def create(store: Any, **options: Any) -> Any:
    options = {"shape": (8,), "chunks": (1,), "dtype": "u1", "compressors": None, **options}
    return await za.create_array(store, name="x", overwrite=True, **options)


async def read(store: Any) -> list[int]:
    z = await za.open_array(store=store, path="x")
    values: list[int] = np.asarray(await z.getitem(slice(None))).tolist()
    return values


@pytest.mark.parametrize("held", ["x/zarr.json", "x/c/0"])
@pytest.mark.parametrize("by_same_store", [True, False])
async def test_a_document_read_before_a_change_is_not_learned_after_it(
    held: str, by_same_store: bool
) -> None:
    """A read is under way while the array is made anew with other chunks."""
    base = Slow()
    z = await create(ShardingStore(base, chunks_per_shard=2))
    await z.setitem(slice(None), 1)
    store = ShardingStore(base)
    other = store if by_same_store else ShardingStore(base)
    base.held_read = held if held != "x/c/0" else "x/zarr.json"
    reading = asyncio.create_task(store.get(held, PROTOTYPE))
    await base.is_held.wait()
    z = await create(other, chunks=(2,))
    await z.setitem(slice(None), np.arange(8, dtype="u1"))
    base.go_on.set()
    await asyncio.gather(reading, return_exceptions=True)
    z = await za.open_array(store=store, path="x")
    await z.setitem(slice(0, 4), 99)
    expected = [99] * 4 + [4, 5, 6, 7]
    assert await read(store) == await read(ShardingStore(base)) == expected


async def test_refresh_holds_for_reads_under_way() -> None:
    """Another process re-declared the array; a read that began before learns nothing after."""
    base = Slow()
    z = await create(ShardingStore(base, chunks_per_shard=2))
    await z.setitem(slice(None), 1)
    elsewhere = MemoryStore()
    z = await create(ShardingStore(elsewhere, chunks_per_shard=4))
    await z.setitem(slice(None), 2)
    store = ShardingStore(base)
    base.held_read = "x/zarr.json"
    reading = asyncio.create_task(store.get("x/c/0", PROTOTYPE))
    await base.is_held.wait()
    base._store_dict.clear()
    base._store_dict.update(elsewhere._store_dict)
    store.refresh()
    base.go_on.set()
    await asyncio.gather(reading, return_exceptions=True)
    await store.set("x/c/2", buffer(b"\x09"))
    assert await read(ShardingStore(base)) == [2, 2, 9, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("change", ["delete_dir", "delete", "set"])
async def test_a_change_that_was_given_up_may_have_happened(change: str) -> None:
    """The caller's patience ended after it took effect: what is there is looked up again."""
    base = Slow()
    z = await create(ShardingStore(base, chunks_per_shard=2))
    await z.setitem(slice(None), 7)
    store = ShardingStore(base)
    assert await read(store) == [7] * 8
    base.held_change = "x" if change == "delete_dir" else "x/zarr.json"
    template = MemoryStore()
    await create(template)
    operation: Any = {
        "delete_dir": lambda: store.delete_dir("x"),
        "delete": lambda: store.delete("x/zarr.json"),
        "set": lambda: store.set("x/zarr.json", buffer(b"{}")),
    }[change]
    changing = asyncio.create_task(operation())
    await base.is_held.wait()
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    await store.set("x/c/0", buffer(b"hi"))
    assert objects_of(base)["x/c/0"] == b"hi", "no array says that it is a chunk"


def test_a_passthrough_store_tells_flat_ones_what_it_changed() -> None:
    """The shards keep their shape, the chunks in them do not: only a flat store sees that."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2)
    options: dict[str, Any] = {"shape": (8,), "chunks": (2,), "dtype": "u1", "compressors": None}
    zarr.create_array(store, name="x", **options)[:] = 3
    flat, other = ShardingMapping(base), ShardingMapping(base, native="passthrough")
    assert flat["x/c/0"] == b"\3\3"
    document = json.loads(other["x/zarr.json"])
    document["codecs"][0]["configuration"]["chunk_shape"] = [1]
    other.erase_prefix("x/c/")
    other["x/zarr.json"] = json.dumps(document).encode()
    flat.update({f"x/c/{i}": bytes([i]) for i in range(4)})
    z = zarr.open_array(ShardingStore(base), path="x")
    assert z[:].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("way", ["pop", "delete", "erase_values"])
def test_an_array_may_be_erased_key_by_key_in_any_order(zarr_format: Any, way: str) -> None:
    """Metadata first, or in the middle: no shard is left for the next array of that name."""
    for first in range(4):
        base: dict[str, bytes] = {}
        store = ShardingStore(base, chunks_per_shard=2)
        options: dict[str, Any] = {"shape": (6,), "chunks": (1,), "dtype": "u1"}
        options |= {"name": "x", "zarr_format": zarr_format}
        zarr.create_array(store, **options)[3:] = 1
        m = ShardingMapping(store)
        keys = sorted(m.list_prefix("x/"), key=lambda k: not k.endswith((".zarray", "zarr.json")))
        keys.insert(first, keys.pop(0))
        if way == "erase_values":
            m.erase_values(keys)
        for key in keys if way != "erase_values" else ():
            assert m.pop(key) if way == "pop" else not m.erase(key)  # type: ignore[func-returns-value]
        assert not [k for k in base if k.startswith("x/")]
        zarr.create_array(store, **options)
        np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="x")[:], 0)


# ----------------------------------------------------------------- copies and bad documents


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("stack", [None, ["crc32c"], ["crc32c", "sharding"]], ids=str)
def test_consolidated_metadata_may_come_before_its_arrays(zarr_format: Any, stack: Any) -> None:
    """In the order of keys ``.zmetadata`` comes first: its members are declared nevertheless."""
    source = MemoryStore()
    options: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "."}}
    z = zarr.create_array(
        source,
        name="x",
        shape=(4, 4),
        chunks=(1, 1),
        dtype="i4",
        zarr_format=zarr_format,
        **options,
    )
    z[:] = 1
    zarr.consolidate_metadata(source)
    base: dict[str, bytes] = {}
    target = ShardingMapping(base, chunks_per_shard=2, storage_transformers=stack)
    objects = objects_of(source)
    for key in sorted(objects, key=lambda k: (k.rpartition("/")[2] != ".zarray", k)):
        if not key.endswith(("zarr.json", ".zmetadata", ".zgroup")):
            continue
        target[key] = objects[key]
    for key in sorted(objects):
        target[key] = objects[key]
    again = ShardingMapping(base)
    assert {k: again[k] for k in again if "json" not in k and "/.z" not in k and k[0] != "."} == {
        k: v for k, v in objects.items() if "json" not in k and "/.z" not in k and k[0] != "."
    }
    key = "zarr.json" if zarr_format == 3 else ".zmetadata"
    own = "x/zarr.json" if zarr_format == 3 else "x/.zarray"
    holder = json.loads(base[key])
    member = (
        holder["consolidated_metadata"]["metadata"]["x"]
        if zarr_format == 3
        else holder["metadata"]["x/.zarray"]
    )
    stored = json.loads(base[own])
    names = ("codecs", "storage_transformers", "filters", "chunks", "chunk_grid")
    assert {n: member.get(n) or None for n in names} == {n: stored.get(n) or None for n in names}


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("stack", [None, ["crc32c"], ["sharding"]], ids=str)
def test_raw_consolidated_metadata_is_not_declared_twice(zarr_format: Any, stack: Any) -> None:
    """Copied from the base store by hand, it is what it is."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=1, storage_transformers=stack)
    z = zarr.create_array(
        store, name="x", shape=(4,), chunks=(1,), dtype="i4", zarr_format=zarr_format
    )
    z[:] = 3
    zarr.consolidate_metadata(store)
    key = "zarr.json" if zarr_format == 3 else ".zmetadata"
    raw = base[key]
    ShardingMapping(store)[key] = raw
    assert json.loads(base[key]) == json.loads(raw)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("declaration", ["codec", "storage_transformers"])
def test_a_document_that_is_erased_and_comes_back(zarr_format: Any, declaration: Any) -> None:
    """What lies under its chunk keys are shards, which the form of their index shows."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2, declaration=declaration)
    z = zarr.create_array(
        store, name="x", shape=(4,), chunks=(1,), dtype="i4", zarr_format=zarr_format
    )
    z[:] = 3
    m = ShardingMapping(store)
    key = "x/zarr.json" if zarr_format == 3 else "x/.zarray"
    document = m[key]
    del m[key]
    m[key] = document
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="x")[:], 3)


def test_an_update_does_not_remove_what_is_not_known() -> None:
    """The array is open; meanwhile its document names a transformer of another package."""
    base: dict[str, bytes] = {}
    z = zarr.create_array(
        ShardingStore(base, chunks_per_shard=2), name="x", shape=(4,), chunks=(1,), dtype="i4"
    )
    document = json.loads(base["x/zarr.json"])
    document["storage_transformers"] = [{"name": "https://example.org/unknown"}]
    base["x/zarr.json"] = json.dumps(document).encode()
    with pytest.raises(UnsupportedError, match="unknown"):
        z.attrs["a"] = 1
    assert json.loads(base["x/zarr.json"]) == document
    with pytest.raises(UnsupportedError, match="unknown"):
        ShardingMapping(base).erase_prefix("x/c/1/")


# ---------------------------------------------------------------------------- stacks


STACKS = [["crc32c"], ["crc32c", "sharding"], ["sharding", "crc32c"]]


@pytest.mark.parametrize("stack", [None, *STACKS], ids=str)
def test_chunks_behind_the_edge_are_erased_with_their_directory(stack: Any) -> None:
    """The array was cut by metadata alone, its chunks erased, the array grows again: fill value."""
    base: dict[str, bytes] = {}
    cps = 2 if stack is None or "sharding" in stack else None
    m = ShardingMapping(base, chunks_per_shard=cps, storage_transformers=stack)
    z = zarr.create_array(
        ShardingStore(base, chunks_per_shard=cps, storage_transformers=stack),
        name="x",
        shape=(8,),
        chunks=(1,),
        dtype="i4",
    )
    z[:] = 1

    def resize(n: int) -> None:
        document = json.loads(m["x/zarr.json"])
        document["shape"] = [n]
        m["x/zarr.json"] = json.dumps(document).encode()

    resize(2)
    assert [k for k in m if k not in m] == []
    m.erase_prefix("x/c/")
    resize(8)
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="x")[:], 0)


@pytest.mark.parametrize("stack", [None, *STACKS[1:]], ids=str)
def test_a_damaged_shard_blocks_no_other_and_can_be_erased(stack: Any) -> None:
    """Also where the checksum of the shard lies below the sharding."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2, storage_transformers=stack)
    zarr.create_array(store, name="x", shape=(5,), chunks=(1,), dtype="i4")[:] = 1
    base["x/c/2"] = b"torn"
    m = ShardingMapping(base)
    keys, listed = iter(m), list[str]()
    with pytest.raises((CorruptShardError, CorruptValueError)):
        listed += keys
    assert {k for k in listed if "/c/" in k} == {f"x/c/{i}" for i in range(4)}
    m["x/c/4"] = m["x/c/0"]
    assert sorted(k for k in m if "/c/" in k) == [f"x/c/{i}" for i in range(5)]
    base["x/c/2"] = b"torn"
    m.erase("x/c/4")
    assert "x/c/2" not in base
    base["x/c/2"] = b"torn"
    m.erase_prefix("x/c/")
    assert not [k for k in base if "/c/" in k]


class Zipped(ValueTransformer):
    def encode(self, key: str, value: Any) -> bytes:
        return zlib.compress(bytes(value))

    def decode(self, key: str, stored: Any) -> bytes:
        return zlib.decompress(stored)


async def test_an_error_of_a_transformer_fails_its_own_update_only() -> None:
    """Three updates are committed together, one of a chunk that it cannot decode."""
    register_storage_transformer("tests.example/zipped", lambda configuration, array: Zipped())
    base = MemoryStore()
    stack = ["tests.example/zipped", "sharding"]
    store = ShardingStore(base, chunks_per_shard=4, storage_transformers=stack)
    z = await create(store, shape=(4,))
    await z.setitem(slice(None), 3)
    shard = bytearray(objects_of(base)["x/c/0"])
    shard[:4] = b"\0\0\0\0"
    await base.set("x/c/0", buffer(bytes(shard)))
    outcomes = await asyncio.gather(
        set_partial_values(store, [("x/c/0", 0, b"a")]),
        store.set("x/c/1", buffer(b"\x09")),
        store.set("x/c/2", buffer(b"\x09")),
        return_exceptions=True,
    )
    assert [type(o) for o in outcomes] == [zlib.error, type(None), type(None)]
    assert ShardingMapping(store)["x/c/1"] == b"\x09"
