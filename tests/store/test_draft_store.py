"""`DraftHierarchyStore` is a zarr store: zarr's own ``StoreTests`` pass, over memory and files.

The kit's keys have no metadata, so they lie behind ``data/root/``. Its ``zarr.json`` holds
bytes that are no document, which this store refuses: the tests see it under another name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore
from zarr.testing.store import StoreTests

from zarr_shardstore import DraftHierarchyStore, ShardingStore


def below(key: str) -> str:
    """The key that the store below the kit sees."""
    return key.replace("zarr.json", "other.json")


def above(key: str) -> str:
    """The key that the kit sees."""
    return key.replace("other.json", "zarr.json")


class Renamed(DraftHierarchyStore):
    """A store whose ``zarr.json`` is no document."""

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        return await super().get(below(key), prototype, byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        renamed = [(below(key), byte_range) for key, byte_range in key_ranges]
        return await super().get_partial_values(prototype, renamed)

    async def exists(self, key: str) -> bool:
        return await super().exists(below(key))

    async def getsize(self, key: str) -> int:
        return await super().getsize(below(key))

    async def set(self, key: str, value: Buffer) -> None:
        await super().set(below(key), value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await super().set_if_not_exists(below(key), value)

    async def delete(self, key: str) -> None:
        await super().delete(below(key))

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in super().list_prefix(below(prefix)):
            yield above(key)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async for name in super().list_dir(below(prefix)):
            yield above(name)


class DraftStoreTests(StoreTests[DraftHierarchyStore, cpu.Buffer]):
    """The kit, with a base store that the subclass makes."""

    store_cls = Renamed
    buffer_cls = cpu.Buffer
    base_name: str

    def make_base(self, tmp_path: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"store": ShardingStore(self.make_base(tmp_path))}

    async def set(self, store: DraftHierarchyStore, key: str, value: Buffer) -> None:
        assert isinstance(store.store.base, Store)
        await store.store.base.set(f"data/root/{below(key)}", value)

    async def get(self, store: DraftHierarchyStore, key: str) -> Buffer:
        assert isinstance(store.store.base, Store)
        value = await store.store.base.get(f"data/root/{below(key)}", default_buffer_prototype())
        assert value is not None
        return value

    def test_store_repr(self, store: DraftHierarchyStore) -> None:
        assert repr(store).startswith("DraftHierarchyStore(ShardingStore(")
        assert self.base_name in repr(store)

    def test_store_supports_writes(self, store: DraftHierarchyStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: DraftHierarchyStore) -> None:
        assert store.supports_listing


class TestOverMemory(DraftStoreTests):
    base_name = "MemoryStore"

    def make_base(self, tmp_path: Path) -> Store:
        return MemoryStore()


@pytest.mark.thorough
class TestOverLocal(DraftStoreTests):
    base_name = "LocalStore"

    def make_base(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "base")
