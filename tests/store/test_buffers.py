"""Buffers of the caller's class: what the base store is given and asked for, and what it gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.core.buffer import BufferPrototype, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore
from zarr.testing.buffer import (
    NDBufferUsingTestNDArrayLike,
    StoreExpectingTestBuffer,
    TestBuffer,
    TestNDArrayLike,
)

from zarr_shardstore import ShardingStore

PROTOTYPE = BufferPrototype(TestBuffer, NDBufferUsingTestNDArrayLike)
MANY_CODECS: dict[str, Any] = {
    "compressors": [BloscCodec(), Crc32cCodec(), GzipCodec(), ZstdCodec()],
    "filters": [TransposeCodec(order=(1, 0))],
}


@pytest.mark.parametrize("chunks_per_shard", [2, None])
@pytest.mark.parametrize("codecs", [{}, MANY_CODECS], ids=["default", "many"])
async def test_arrays(codecs: dict[str, Any], chunks_per_shard: int | None) -> None:
    """A base store that refuses buffers of other classes, except for documents."""
    store = ShardingStore(StoreExpectingTestBuffer(), chunks_per_shard)
    z = await zarr.api.asynchronous.create_array(
        store, name="z", shape=(10, 10), chunks=(5, 5), dtype="u2", fill_value=0, **codecs
    )
    expected = np.zeros((10, 10), "u2")
    for region in ((slice(1, 4), slice(3, 7)), (slice(0, 10), slice(0, 10))):
        expected[region] = values = np.arange(100).reshape(10, 10)[region] + 1
        await z.setitem(region, values, prototype=PROTOTYPE)
        found = await z.getitem((slice(0, 10), slice(0, 10)), prototype=PROTOTYPE)
        assert isinstance(found, TestNDArrayLike)
        np.testing.assert_array_equal(found, expected)


class Recording(MemoryStore):
    """Records the classes of the buffers that it is given and asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, type] = {}
        self.asked: dict[str, type] = {}

    async def set(self, key: str, value: Any, *args: Any) -> None:
        self.given[key] = type(value)
        await super().set(key, value, *args)

    def set_sync(self, key: str, value: Any) -> None:
        self.given[key] = type(value)
        super().set_sync(key, value)

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        self.asked[key] = prototype.buffer
        return await super().get(key, prototype, byte_range)

    def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Any:
        self.asked[key] = prototype.buffer
        return super().get_sync(key, prototype=prototype, byte_range=byte_range)


@pytest.mark.parametrize("key", ["note", "z/c/3"], ids=["passes", "chunk"])
@pytest.mark.parametrize("blocking", [False, True])
def test_values(key: str, *, blocking: bool) -> None:
    """Async and blocking; the value is the store's own afterwards."""
    base = Recording()
    store = ShardingStore(base, 4)
    zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="u1")
    if blocking and not hasattr(MemoryStore, "get_sync"):
        pytest.skip("this zarr has no blocking stores")
    memory = np.frombuffer(b"abcd", "B").copy()
    value = TestBuffer(memory)
    stored = key if key == "note" else "z/c/0"
    if blocking:
        store.set_sync(key, value)
        found = store.get_sync(key, prototype=PROTOTYPE)
    else:
        sync(store.set(key, value))
        memory[:] = 0
        found = sync(store.get(key, PROTOTYPE))
    assert type(found) is TestBuffer
    assert found.to_bytes() == b"abcd"
    assert base.given[stored] is TestBuffer
    assert base.asked[stored] is TestBuffer
    assert base.asked["z/zarr.json"] is base.given["z/zarr.json"] is cpu.Buffer
    found = sync(store.get(key, default_buffer_prototype()))
    assert type(found) is base.asked[stored] is cpu.Buffer
    (part,) = sync(store.get_partial_values(PROTOTYPE, [(key, None)]))
    assert type(part) is base.asked[stored] is TestBuffer


async def test_many_keys() -> None:
    """By one batch, in two rounds; a key of no array takes one more for documents."""
    store = ShardingStore(MemoryStore(), 4)
    z = await zarr.api.asynchronous.create_array(
        store, name="z", shape=(64,), chunks=(1,), dtype="u1", compressors=None
    )
    await z.setitem(slice(0, 60), np.arange(60))
    await store.set("note", cpu.Buffer.from_bytes(b"abcde"))
    byte_range = RangeByteRequest(1, 3)
    asked: list[Any] = [f"z/c/{i}" for i in range(64)]
    asked += ["note", ("note", byte_range), ("note", None), "none"]
    expected: list[bytes | None] = [bytes([i]) if 0 < i < 60 else None for i in range(64)]
    expected += [b"abcde", b"bc", b"abcde", None]
    await store.get("z/c/0", PROTOTYPE)  # the document is cached now
    before = store.stats()
    async for _ in store.get_many(asked[:64], prototype=PROTOTYPE):
        pass
    after = store.stats()
    assert after.rounds - before.rounds == 2
    assert after.requests - before.requests <= 2 * 16
    found: dict[int, Any] = {}
    async for batch in store.get_many(asked, prototype=PROTOTYPE):
        for position, value in batch:
            assert position not in found
            found[position] = value
    values = [None if found[i] is None else found[i].to_bytes() for i in range(len(asked))]
    assert values == expected
    assert {type(value) for value in found.values()} == {TestBuffer, type(None)}
    assert [batch async for batch in store.get_many([], prototype=PROTOTYPE)] == []


def test_what_a_batch_buffers_is_seen_by_every_class() -> None:
    """The values of a batch are those of the store, whatever buffers a caller asks for."""
    store = ShardingStore(MemoryStore(), 4)
    zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="u1")
    with store.batch():
        sync(store.set("z/c/1", cpu.Buffer.from_bytes(b"cpu")))
        sync(store.set("z/c/2", TestBuffer(np.frombuffer(b"own", "B"))))
        for key, value in (("z/c/1", b"cpu"), ("z/c/2", b"own")):
            for prototype in (PROTOTYPE, cpu.buffer_prototype):
                found = sync(store.get(key, prototype))
                assert found is not None
                assert (type(found), found.to_bytes()) == (prototype.buffer, value)
