"""`ShardingStore` is a zarr store: zarr's own ``StoreTests`` pass in full, over each base.

The kit's keys have no metadata, so they pass through; each class also runs with an option
that shards new arrays, which must change nothing for such keys.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore
from zarr.testing.store import StoreTests

from zarr_shardstore import ShardingMapping, ShardingStore, SpecError

OPTIONS = [{}, {"chunks_per_shard": 4}, {"chunks_per_shard": {"raw/*": 2, "bar": (2, 2)}}]


class ShardingStoreTests(StoreTests[ShardingStore, cpu.Buffer]):
    """The kit, with a base store that the subclass makes."""

    store_cls = ShardingStore
    buffer_cls = cpu.Buffer
    base_name: str

    def make_base(self, tmp_path: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture(params=OPTIONS, ids=["plain", "int", "mapping"])
    def store_kwargs(self, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
        return {"store": self.make_base(tmp_path), **request.param}

    async def set(self, store: ShardingStore, key: str, value: Buffer) -> None:
        assert isinstance(store.base, Store)
        await store.base.set(key, value)

    async def get(self, store: ShardingStore, key: str) -> Buffer:
        assert isinstance(store.base, Store)
        value = await store.base.get(key, default_buffer_prototype())
        assert value is not None
        return value

    def test_store_repr(self, store: ShardingStore) -> None:
        assert repr(store).startswith("ShardingStore(")
        assert self.base_name in repr(store)

    def test_store_supports_writes(self, store: ShardingStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: ShardingStore) -> None:
        assert store.supports_listing


class TestOverMemory(ShardingStoreTests):
    base_name = "MemoryStore"

    def make_base(self, tmp_path: Path) -> Store:
        return MemoryStore()


class TestOverLocal(ShardingStoreTests):
    base_name = "LocalStore"

    def make_base(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "base")


class UnknownLocalStore(LocalStore):
    """A subclass, whose methods may differ: it is spoken to as any zarr store."""


@pytest.mark.thorough
class TestOverLocalSubclass(ShardingStoreTests):
    base_name = "LocalStore"

    def make_base(self, tmp_path: Path) -> Store:
        return UnknownLocalStore(tmp_path / "base")


class TestOverFsspecMemory(ShardingStoreTests):
    base_name = "FsspecStore"

    def make_base(self, tmp_path: Path) -> Store:
        fs = AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=True)
        return FsspecStore(fs, path=f"/conformance-{uuid.uuid4().hex}")


@pytest.mark.thorough
class TestOverFsspecLocal(ShardingStoreTests):
    base_name = "FsspecStore"

    def make_base(self, tmp_path: Path) -> Store:
        fs = AsyncFileSystemWrapper(fsspec.filesystem("file", auto_mkdir=True), asynchronous=True)
        return FsspecStore(fs, path=str(tmp_path / "base"))


class TestOverObstoreLocal(ShardingStoreTests):
    base_name = "ObjectStore"

    def make_base(self, tmp_path: Path) -> Store:
        obstore = pytest.importorskip("obstore.store")
        return ObjectStore(obstore.LocalStore(tmp_path / "base", mkdir=True))


async def test_a_subclass_is_not_read_behind_its_back(tmp_path: Path) -> None:
    """Only a plain ``LocalStore`` is read as files; a subclass is asked."""
    asked = []

    class Asked(UnknownLocalStore):
        async def get(self, key: str, *args: Any) -> Any:
            asked.append(key)
            return await super().get(key, *args)

        def get_sync(self, key: str, **options: Any) -> Any:
            asked.append(key)
            return super().get_sync(key, **options)

    (tmp_path / "key").write_bytes(b"value")
    value = await ShardingStore(Asked(tmp_path)).get("key", default_buffer_prototype())
    assert value is not None
    assert value.to_bytes() == b"value"
    assert asked == ["key"]


async def list_all(store: ShardingStore) -> None:
    assert [key async for key in store.list()] == []


READS: dict[str, Callable[[ShardingStore], object]] = {
    "open an array": lambda store: zarr.open_array(store, mode="r"),
    "open a group": lambda store: zarr.open_group(store, mode="r"),
    "get": lambda store: sync(store.get("z/zarr.json", default_buffer_prototype())),
    "get_sync": lambda store: store.get_sync("z/c/0"),
    "read_chunks": lambda store: store.read_chunks("z", [(0,)]),
    "exists": lambda store: sync(store.exists("z/c/0")),
    "list": lambda store: sync(list_all(store)),
    "is_empty": lambda store: sync(store.is_empty("")),
    "flush": lambda store: store.flush_sync(),
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_path_that_is_not_there_makes_nothing(
    name: str, read_only: bool, tmp_path: Path
) -> None:
    """The first write makes the directory."""
    store = ShardingStore(tmp_path / "no/such", chunks_per_shard=2, read_only=read_only)
    with suppress(FileNotFoundError, ValueError):
        READS[name](store)
    assert list(tmp_path.iterdir()) == []
    z = zarr.create_array(store.with_read_only(False), shape=(4,), chunks=(1,), dtype="u1")
    z[:] = 1
    assert (tmp_path / "no/such/c/0").exists()


@pytest.mark.parametrize("key", ["x" * 255, "a/" + "ü" * 127, "y" * 100 + "." + "z" * 150, "b/c."])
def test_a_key_of_any_length_is_set_if_it_does_not_exist(key: str, tmp_path: Path) -> None:
    store = ShardingStore(tmp_path)
    for value in (b"1", b"2"):
        sync(store.set_if_not_exists(key, cpu.Buffer.from_bytes(value)))
    assert sync(store.get(key)) == cpu.Buffer.from_bytes(b"1")
    assert not list(tmp_path.rglob("*.partial"))


def test_a_link_to_nothing_is_no_place_for_a_value(tmp_path: Path) -> None:
    """The caller learns that nothing was stored; `set` replaces the link."""
    store, value = ShardingStore(tmp_path), cpu.Buffer.from_bytes(b"1")
    (tmp_path / "a").symlink_to("missing")
    with pytest.raises(SpecError, match="a link to nothing"):
        sync(store.set_if_not_exists("a", value))
    sync(store.set("a", value))
    assert sync(store.get("a")) == value


@pytest.mark.parametrize("separator", [".", "/"])
def test_arrays_whose_names_begin_with_the_separator(separator: Any) -> None:
    """The tables of chunk keys of one array take no key of another one."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=4)
    names = ("old/x", f"{separator.strip('/')}old/x", "x")
    arrays: dict[str, tuple[Any, int]] = {}
    options: Any = {"zarr_format": 2, "shape": (8,), "chunks": (1,), "dtype": "u1"}
    for i, name in enumerate(dict.fromkeys(names)):
        encoding: Any = {"name": "v2", "separator": separator}
        z = zarr.create_array(store, name=name, chunk_key_encoding=encoding, **options)
        z[:] = i + 1
        arrays[name] = (z, i + 1)
    for z, value in arrays.values():
        assert (z[:] == value).all()
        z[3] = value + 10
    for z, value in arrays.values():
        assert z[:].tolist() == [value] * 3 + [value + 10] + [value] * 4
    store = ShardingStore({}, 4)
    zarr.create_array(store, **options)[:] = 1
    with pytest.raises(SpecError):
        sync(store.set("/3", cpu.Buffer.from_bytes(b"9")))


def test_numbers_of_numpy_in_byte_requests() -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    value = np.arange(60000, dtype="u2").tobytes()
    z = zarr.create_array(
        store, name="z", shape=(120000,), chunks=(60000,), dtype="u2", compressors=None
    )
    z[:60000] = np.zeros(60000)
    z[60000:] = np.arange(60000)
    start, stop = np.uint16(60000), np.uint16(60004)
    request = RangeByteRequest(start, stop)  # type: ignore[arg-type]
    found = sync(store.get("z/c/1", default_buffer_prototype(), request))
    assert found is not None
    assert found.to_bytes() == value[60000:60004]


@pytest.mark.parametrize("base", [dict, MemoryStore, Path])
def test_values_that_blocking_calls_take_are_copied(base: Any, tmp_path: Path) -> None:
    """A buffer with gaps fails no other caller, and a buffer may be used again."""
    m = ShardingMapping(ShardingStore(tmp_path if base is Path else base(), chunks_per_shard=2))
    z = zarr.create_array(
        ShardingStore(m.base), name="z", shape=(4,), chunks=(2,), dtype="u1", compressors=None
    )
    wide = bytearray(b"1-2-")
    m["z/c/0"] = memoryview(wide)[::2]
    m["other"] = memoryview(wide)[::2]
    wide[:] = b"9999"
    assert (m["z/c/0"], m["other"]) == (b"12", b"12")
    assert z[0] == ord("1")
