"""Requests for shard indexes: what bytes they are, and what these say.

Source: sharding storage transformer draft, "Binary shard format"; ZEP 2, "index_location".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import index_of_shard
from zarr_shardstore.plan.ranges import ByteRange, Range, Suffix
from zarr_shardstore.plan.requests import Flow, Found, FoundIndex, Get, GetIndex, Request
from zarr_shardstore.plan.whole_shards import is_whole

__all__ = [
    "as_gets",
    "corrupt",
    "found_index",
    "get_of_index",
    "read_indexes",
    "try_read_indexes",
    "with_indexes",
]


def get_of_index(request: GetIndex) -> Get:
    """The request for the bytes of an index, or for all bytes of its shard."""
    spec = request.shard.layout.spec
    nbytes = spec.index_nbytes
    byte_range: ByteRange | None = None
    if not request.whole:
        byte_range = Range(0, nbytes) if spec.index.location == "start" else Suffix(nbytes)
    # Without a checksum an index cannot tell that it is half written.
    return Get(request.shard.key, byte_range, request.settled or not spec.index.checksum)


def found_index(request: GetIndex, found: Found) -> FoundIndex:
    """What the bytes say that `get_of_index` asked for."""
    if found.value is None:
        return FoundIndex(None, found.version, found.size)
    spec = request.shard.layout.spec
    value = found.value if request.whole else None
    try:
        if not request.whole:
            index = ShardIndex.decode(found.value, spec.n_entries, spec.index)
        elif is_whole(found):
            index = index_of_shard(found.value, spec.chunks_per_shard, spec.index)
            index = ShardIndex(index.fields.copy())  # it may be kept, and the shard shall not
        else:
            raise IndexDamageError(f"the shard has {found.size} bytes, {len(found.value)} came")
    except IndexDamageError as damage:
        return FoundIndex(None, found.version, found.size, damage, value=value)
    return FoundIndex(index, found.version, found.size, value=value)


def as_gets(batch: Sequence[Request]) -> list[Request]:
    """Requests for bytes in the place of those for indexes, for whoever knows only bytes."""
    return [get_of_index(r) if isinstance(r, GetIndex) else r for r in batch]


def with_indexes(batch: Sequence[Request], replies: Sequence[Any]) -> list[Any]:
    """Replies to a batch, from the replies to `as_gets` of it."""
    return [
        found_index(request, reply) if isinstance(request, GetIndex) else reply
        for request, reply in zip(batch, replies, strict=True)
    ]


def corrupt(shard: ShardRef, damage: IndexDamageError, hint: str = "") -> CorruptShardError:
    """The error that names the shard, the chunk and the bytes that `damage` is about."""
    return CorruptShardError(
        damage.message + hint,
        shard_key=shard.key,
        chunk_key=None if damage.entry_id is None else shard.chunk_key(damage.entry_id),
        byte_range=damage.byte_range,
    )


def read_indexes(shards: Sequence[ShardRef]) -> Flow[list[ShardIndex | None]]:
    """Read the indexes of shards in one round; ``None`` where there is no shard.

    Raises
    ------
    CorruptShardError
        If an index cannot be decoded.
    """
    indexes: list[ShardIndex | None] = []
    for index in (yield from try_read_indexes(shards)):
        if isinstance(index, CorruptShardError):
            raise index
        indexes.append(index)
    return indexes


def try_read_indexes(
    shards: Sequence[ShardRef], versions: Sequence[object] | None = None, *, keep: bool = True
) -> Flow[list[ShardIndex | CorruptShardError | None]]:
    """As `read_indexes`, with the error in the place of an index that cannot be decoded.

    Parameters
    ----------
    versions
        Of the shards, where they have just been seen in a listing.
    keep
        As of `GetIndex`.
    """
    if not shards:
        return []
    indexes: list[ShardIndex | CorruptShardError | None] = [None] * len(shards)
    left = list(range(len(shards)))
    seen = versions or [None] * len(shards)
    for is_settled in (False, True):  # at first it may be that a writer is changing the index
        replies: list[FoundIndex] = yield [
            GetIndex(shards[i], is_settled, version=seen[i], keep=keep) for i in left
        ]
        damaged = []
        for i, found in zip(left, replies, strict=True):
            indexes[i] = found.decoded
            if found.damage is not None:
                indexes[i] = corrupt(shards[i], found.damage)
                damaged.append(i)
        left = damaged
        if not left:
            break
    return indexes
