"""Indexes of remote shards, and what comes along with them, when several tasks ask at a time."""

from __future__ import annotations

import asyncio

import numpy as np

from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.shard import ZEP2_INDEX, ShardingSpec, build_shard
from zarr_shardstore.io.remote_indexes import RemoteIndexes, Version
from zarr_shardstore.io.write_epochs import announced
from zarr_shardstore.shards.requests import Found, Get, GetIndex

LAYOUT = ArrayLayout(
    "a", "a/", ChunkKeyEncoding("default", "/"), (4, 4), ShardingSpec((2, 2), ZEP2_INDEX)
)
SHARD = LAYOUT.shard((0, 0))
OBJECT = build_shard({0: b"zero", 3: b"three"}, ShardingSpec((2, 2), ZEP2_INDEX))


class SlowBase:
    """Replies with what was there when the request came, and later."""

    def __init__(self) -> None:
        self.asked: list[Get] = []
        self.may_reply = asyncio.Event()

    async def read(self, request: Get, unless: Version | None = None) -> Found:
        assert unless is None, "nothing is known"
        self.asked.append(request)
        await self.may_reply.wait()
        value = OBJECT if request.byte_range is None else OBJECT[-LAYOUT.spec.index_nbytes :]
        return Found(memoryview(value), "v1", len(OBJECT))


async def test_only_who_asks_gets_the_whole_shard() -> None:
    """Who joins gets the index, to be compared with what is read then: the bytes may have left
    the server before the second task began."""
    base = SlowBase()
    scope = object()
    indexes = RemoteIndexes(base.read, lambda key: (scope, key), is_static=False)
    tasks = []
    for _ in range(2):
        tasks.append(
            asyncio.create_task(indexes.get(GetIndex(SHARD, revalidate=False, with_data=True)))
        )
        await asyncio.sleep(0.01)
    base.may_reply.set()
    first, second = await asyncio.gather(*tasks)
    assert base.asked == [Get(SHARD.key)]
    assert first.was_requested
    assert not first.is_unverified
    assert first.decoded is not None
    assert not np.shares_memory(first.decoded.fields, np.frombuffer(OBJECT, "u1"))
    assert first.value is not None
    assert bytes(first.value) == OBJECT
    assert second.is_unverified
    assert second.value is None
    assert second.decoded is not None
    assert second.decoded.entry(3) == (4, 5)


async def test_what_is_static_is_not_older_than_our_own_writes() -> None:
    """A request that is under way while this process writes is neither joined nor remembered."""
    base = SlowBase()
    scope = object()
    indexes = RemoteIndexes(base.read, lambda key: (scope, key), is_static=True)
    request = GetIndex(SHARD, revalidate=False)
    before = asyncio.create_task(indexes.get(request))
    await asyncio.sleep(0.01)
    with announced([(scope, SHARD.key)]):
        after = asyncio.create_task(indexes.get(request))
        await asyncio.sleep(0.01)
        assert len(base.asked) == 2
    base.may_reply.set()
    await asyncio.gather(before, after)
    for n_asked in (3, 3):
        await indexes.get(request)
        assert len(base.asked) == n_asked


async def test_a_whole_shard_is_welcome_where_the_index_comes_alone() -> None:
    """Who joins a request for the index alone reads what it needs in a second one."""
    base = SlowBase()
    scope = object()
    indexes = RemoteIndexes(base.read, lambda key: (scope, key), is_static=False)
    requests = [GetIndex(SHARD, revalidate=False, with_data=whole) for whole in (False, True)]
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(indexes.get(request)))
        await asyncio.sleep(0.01)
    base.may_reply.set()
    found = await asyncio.gather(*tasks)
    assert len(base.asked) == 1
    assert [f.value for f in found] == [None, None]
