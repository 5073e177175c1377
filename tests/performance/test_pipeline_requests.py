"""What `ShardedCodecPipeline` asks of the base store, and what it does when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
from zarr.core.buffer import Buffer, cpu
from zarr.core.sync import sync
from zarr.storage import MemoryStore, ObjectStore

from tests.support.kit import CountingStore, tuned
from tests.support.pipeline_arrays import (
    CHUNKS_PER_SHARD,
    KINDS,
    OURS,
    SHAPE,
    SHARDS,
    make_array,
    make_store,
)
from zarr_shardstore import ShardingStore


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    with zarr.config.set({"codec_pipeline.path": OURS}):
        yield


def shards_written(base: CountingStore) -> list[tuple[str, str]]:
    return sorted((what, key) for what, key in base.writes if not key.endswith(".json"))


@pytest.mark.parametrize("nbytes", [1, 200, 2**30])
def test_an_array_is_written_with_one_set_for_each_shard(nbytes: int) -> None:
    base = CountingStore()
    z = make_array(make_store("v3", base))
    base.forget()
    # Group commit cannot help.
    with tuned(pipeline_write_nbytes=nbytes, pipeline_group_nbytes=1):
        z[...] = 1
    assert shards_written(base) == [("set", key) for key in SHARDS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_is_written_with_one_set_for_each_object(kind: str) -> None:
    base = CountingStore()
    z = make_array(make_store(kind, base), kind)
    base.forget()
    with tuned(pipeline_write_nbytes=1, pipeline_group_nbytes=1):
        z[...] = 1
    keys = [key for what, key in base.writes if what == "set"]
    assert len(base.writes) == len(set(keys)) == (18 if kind == "plain chunks" else 4)


@pytest.mark.parametrize("way", ["pipeline", "batch", "batch by chunks"])
def test_an_object_store_gets_one_put_for_each_shard(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[str] = []
    real = obstore.put_async

    async def put(store: Any, key: str, *args: Any, **options: Any) -> Any:
        puts.append(key)
        return await real(store, key, *args, **options)

    monkeypatch.setattr(obstore, "put_async", put)
    store = make_store("v3", ObjectStore(obstore.store.MemoryStore()))
    z = make_array(store)
    puts.clear()
    data = np.arange(1, 1 + z.size, dtype="i2").reshape(z.shape)
    with store.batch() if way.startswith("batch") else nullcontext():
        if way == "batch by chunks":
            for i in range(0, z.shape[0], z.chunks[0]):
                for j in range(0, z.shape[1], z.chunks[1]):
                    z[i : i + z.chunks[0], j : j + z.chunks[1]] = data[
                        i : i + z.chunks[0], j : j + z.chunks[1]
                    ]
        else:
            z[...] = data
        np.testing.assert_array_equal(z[...], data)
    assert sorted(puts) == SHARDS
    np.testing.assert_array_equal(z[...], data)


def test_sets_and_erasures_of_a_shard_are_one_commit() -> None:
    base = CountingStore()
    z = make_array(make_store("v3", base))
    z[...] = 1
    base.forget()
    data = np.zeros(SHAPE, "i2")
    data[0, 0] = data[7, 0] = 1  # of the left shards one chunk is left, of the right ones none
    z[...] = data
    written = shards_written(base)
    assert [key for what, key in written if what == "delete"] == [SHARDS[1], SHARDS[3]]
    assert [key for what, key in written if what == "set"] == [SHARDS[0], SHARDS[2]]
    np.testing.assert_array_equal(z[...], data)


def test_a_region_across_chunks_is_written_with_one_set_for_each_shard() -> None:
    base = CountingStore()
    z = make_array(make_store("v3", base))
    z[...] = 1
    base.forget()
    z[1:10, 1:7] = 2
    assert shards_written(base) == [("set", key) for key in SHARDS]


def test_an_array_is_read_in_two_rounds() -> None:
    base = CountingStore()
    z = make_array(make_store("v3", base), shape=(64, 64), chunks=(1, 64))
    z[...] = 1
    base.forget()
    assert (z[...] == 1).all()
    assert base.rounds == 2


@pytest.mark.parametrize("method", ["_set_blocks", "_set_or_erase"])
def test_chunks_under_way_stay_within_the_limit(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the limit is encoded and not yet stored, and nothing is split."""
    sizes: list[int] = []
    under_way: list[int] = []
    original = getattr(ShardingStore, method)
    is_box = method == "_set_blocks"

    async def watched(self: ShardingStore, items: Iterable[Any], *more: Any) -> None:
        items = list(items)
        n_chunks = sum(map(len, items)) if is_box else len(items)
        under_way.append(n_chunks)
        sizes.append(sum(under_way))
        await asyncio.sleep(0.01)
        await original(self, items, *more)
        under_way.remove(n_chunks)

    monkeypatch.setattr(ShardingStore, method, watched)
    base = CountingStore()
    z = make_array(
        ShardingStore(base, chunks_per_shard=4), shape=(160,), chunks=(5,), compressors=None
    )
    base.forget()
    n_least = 8 if is_box else 10**9
    with tuned(pipeline_write_nbytes=100, pipeline_group_nbytes=200, pipeline_box_chunks=n_least):
        z[:] = 1
    n_chunks_at_once = 200 // 10
    assert max(sizes) <= n_chunks_at_once
    assert max(sizes) > 100 // 10, "one unit is encoded while another is stored"
    assert len(base.writes) == 8


# ------------------------------------------------------------------------- errors


class Failing(CountingStore):
    """Refuses to store one key."""

    refused = ""

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        await asyncio.sleep(0.001)
        if key == self.refused:
            raise ConnectionError(key)
        await super().set(key, value, byte_range)


@pytest.mark.parametrize("nbytes", [1, 2**30])
def test_an_error_of_the_base_store_reaches_the_caller_and_loses_nothing(
    nbytes: int,
) -> None:
    base = Failing()
    z = make_array(make_store("v3", base))
    with tuned(pipeline_write_nbytes=nbytes):
        z[...] = 1
        base.refused = SHARDS[0]
        with pytest.raises(ConnectionError, match=SHARDS[0]):
            z[...] = 2
    found = z[...]
    assert (found[:6, :6] == 1).all(), "the shard that was refused is as before"
    assert set(np.unique(found)) == {1, 2}
    n_writes = len(base.writes)
    assert (z[...] == found).all()
    assert len(base.writes) == n_writes, "nothing runs on after the error"
    base.refused = ""
    z[...] = 3
    assert (z[...] == 3).all()


def test_a_chunk_that_cannot_be_decoded_is_an_error() -> None:
    store = make_store("v3", {})
    z = make_array(store)
    z[...] = 1
    sync(store._set_or_erase([("a/c/0/0", b"no zstd")]))
    with pytest.raises(Exception, match=r"(?i)zstd|decompress|frame|magic"):
        z[...]
    with pytest.raises(Exception, match=r"(?i)zstd|decompress|frame|magic"):
        z[0, 0] = 1
    assert (z[2:] == 1).all()


def test_a_read_only_store_refuses() -> None:
    base = MemoryStore()
    make_array(make_store("v3", base))
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD, read_only=True)
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_array(store, path="a")[...] = 1


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("erased_first", [False, True])
def test_erasures_come_last(is_known: bool, erased_first: bool) -> None:
    """Of one key, whatever the order, and whether or not its array was met before."""
    store = ShardingStore({}, chunks_per_shard=4)
    if is_known:
        store.set_sync("data/root/a/c2", cpu.Buffer.from_bytes(b"old"))
    items: list[Any] = [("data/root/a/c1", b"new"), ("data/root/a/c1", None)]
    sync(store._set_or_erase(reversed(items) if erased_first else items))
    assert store.get_sync("data/root/a/c1") is None
