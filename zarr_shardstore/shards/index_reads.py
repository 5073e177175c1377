"""Reads of shard indexes and of whole shards: the bytes to ask for, and their checks.

A base store reads bytes: `index_get` makes a `Get` of a `GetIndex`, and `found_index` a
`FoundIndex` of its reply. Backends that cache indexes do this only on a miss.

Source: sharding storage transformer draft, "Binary shard format"; ZEP 2, "index_location".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from zarr_shardstore.errors import CorruptShardError, CorruptValueError, ShardConflictError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import ByteRange, Range, Suffix
from zarr_shardstore.format.shard import IndexDamageError, ShardIndex, index_of_shard
from zarr_shardstore.shards.requests import Flow, Found, FoundIndex, Get, GetIndex, GetSize

T = TypeVar("T")

_SHARDS_PER_ROUND = 64  # of a walk over many shards
_NBYTES_PER_ROUND = 16 * 1024 * 1024  # of memory


def index_get(request: GetIndex) -> Get:
    """Return the request for the bytes of an index, or for all bytes of its shard."""
    spec = request.shard.spec
    nbytes = spec.index_nbytes
    byte_range: ByteRange | None = None
    if not request.with_data:
        byte_range = Range(0, nbytes) if spec.index.location == "start" else Suffix(nbytes)
    # Without a checksum a half-written index passes for a whole one.
    return Get(request.shard.key, byte_range, request.consistent or not spec.index.checksum)


def found_index(request: GetIndex, found: Found) -> FoundIndex:
    """Decode the reply to `index_get`."""
    if found.value is None:
        return FoundIndex(None, found.version, found.size)
    spec = request.shard.spec
    value = found.value if request.with_data else None
    try:
        if not request.with_data:
            index = ShardIndex.decode(found.value, spec)
        elif not _is_truncated(found):
            index = index_of_shard(found.value, spec)
            index = index.without(())  # a cached index must not keep the shard
        else:
            raise IndexDamageError(f"the shard has {found.size} bytes, {len(found.value)} came")
    except IndexDamageError as damage:
        return FoundIndex(None, found.version, found.size, damage, value=value)
    return FoundIndex(index, found.version, found.size, value=value)


def rounds_of(items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut items into rounds whose replies fit in memory; an item of 0 bytes takes no request."""
    part: list[T] = []
    n_shards = nbytes = 0
    for item in items:
        added = nbytes_of(item)
        if n_shards and (n_shards == _SHARDS_PER_ROUND or nbytes + added > _NBYTES_PER_ROUND):
            yield part
            part, n_shards, nbytes = [], 0, 0
        part.append(item)
        n_shards += added > 0
        nbytes += added
    if part:
        yield part


def corrupt(shard: ShardRef, damage: IndexDamageError, hint: str = "") -> CorruptShardError:
    """Return the error that names the shard, the chunk and the bytes of a damage."""
    return CorruptShardError(
        damage.message + hint,
        shard_key=shard.key,
        chunk_key=None if damage.entry_id is None else shard.chunk_key(damage.entry_id),
        byte_range=damage.byte_range,
    )


def read_indexes(
    shards: Sequence[ShardRef], *, cache: bool = True
) -> Flow[list[ShardIndex | None]]:
    """Read the indexes of shards in one round; `CorruptShardError` if one cannot be decoded."""
    indexes = yield from try_read_indexes(shards, cache=cache)
    for index in indexes:
        if isinstance(index, CorruptShardError):
            raise index
    return indexes  # type: ignore[return-value]


def try_read_indexes(
    shards: Sequence[ShardRef], versions: Sequence[object] | None = None, *, cache: bool = True
) -> Flow[list[ShardIndex | CorruptShardError | None]]:
    """Read indexes as `read_indexes`; return an error in the place of a damaged one.

    A listing has just shown the `versions` of the shards.
    """
    if not shards:
        return []
    indexes: list[ShardIndex | CorruptShardError | None] = [None] * len(shards)
    left = list(range(len(shards)))
    seen = versions or [None] * len(shards)
    for consistent in (False, True):  # a writer may be changing the index during the first round
        replies: list[FoundIndex] = yield [
            GetIndex(shards[i], consistent, version=seen[i], cache=cache) for i in left
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


def read_whole_shards(shards: Sequence[ShardRef]) -> Flow[list[Found]]:
    """Read whole shards, each in one request, and refuse truncated replies.

    The last bytes of a truncated reply may pass for an index: zeros say that all entries are empty,
    ``0xff`` that they are missing. A checksum finds that. So do the entries, if the index is at the
    start, or if the last entry ends where the index begins. Otherwise there may be the gap of an
    append: a second round reads the size, unless it came with the reply. A reply that is truncated
    twice is a `CorruptShardError`.
    """
    founds: list[Found] = [Found(None, None)] * len(shards)
    left: list[int] = list(range(len(shards)))
    for is_last in (False, True):
        replies = yield [Get(shards[i].key, consistent=True) for i in left]
        for i, found in zip(left, replies, strict=True):
            founds[i] = found
        unknown = [i for i in left if _may_be_truncated(shards[i], founds[i])]
        if unknown:
            sizes: list[int | None] = yield [GetSize(shards[i].key) for i in unknown]
            for i, size in zip(unknown, sizes, strict=True):
                founds[i] = founds[i]._replace(size=size)
        left = [i for i in left if _is_truncated(founds[i])]
        if not left:
            break
        if is_last:
            value, size = founds[left[0]].value, founds[left[0]].size
            raise CorruptShardError(
                f"it has {size} bytes, and reading all of it gave {len(value or b'')}",
                shard_key=shards[left[0]].key,
            )
    return founds


def read_whole_value(key: str) -> Flow[Found]:
    """Read an object that is no shard; a reply that is truncated twice is a `CorruptValueError`."""
    found: Found
    for _ in range(2):
        (found,) = yield [Get(key, consistent=True)]
        if not _is_truncated(found):
            return found
    n_read = len(found.value or b"")
    raise CorruptValueError(f"it has {found.size} bytes, and reading it gave {n_read}", key=key)


def check_whole(key: str, value: memoryview | None, nbytes: int | None) -> memoryview:
    """Return what came of an object; raise `ShardConflictError` unless it has `nbytes`."""
    if value is not None and len(value) == nbytes:
        return value
    found = "is gone" if value is None else f"gave {len(value)} of {nbytes or 0} bytes"
    raise ShardConflictError(
        f"object {key!r} {found}: the reply was cut off, or the object was changed; let no other "
        "program write to the array, and run the same again"
    )


def _may_be_truncated(shard: ShardRef, found: Found) -> bool:
    """Whether only the size of a shard shows that all of its bytes came."""
    spec = shard.spec
    if found.value is None or found.size is not None:
        return False
    if spec.index.checksum or spec.index.location == "start":
        return False
    try:
        index = index_of_shard(found.value, spec)
    except IndexDamageError:
        return True
    offsets, nbytes = index.fields[index.present_ids()].T
    data_nbytes = len(found.value) - spec.index_nbytes
    # A sum may wrap; the entry is then found to leave the shard when it is used.
    # Zeros are an index of empty entries only, which end where there are no data.
    return not nbytes.any() or int((offsets + nbytes).max()) != data_nbytes


def _is_truncated(found: Found) -> bool:
    """Whether a reply is known to be shorter or longer than its shard."""
    return found.value is not None and found.size not in (None, len(found.value))
