"""Requests for shard indexes: what bytes they are, and what these say.

Source: sharding storage transformer draft, "Binary shard format"; ZEP 2, "index_location".

Reads of whole shards, each in one request: where it costs less, or where nothing else helps.

A read asks for an index, and then for the entries that it points to. Where most of a shard is
wanted the second round can be spared: the index comes along with the bytes. What is not wanted
costs time, too: 512 KiB take 10 ms of a connection with 50 MB/s, a round trip takes 20 to 100 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import ByteRange, Range, Suffix
from zarr_shardstore.format.shard import index_of_shard
from zarr_shardstore.shards.requests import Flow, Found, FoundIndex, Get, GetIndex, GetSize, Request

_MAX_UNWANTED_NBYTES = 512 * 1024
"""Of a shard of which several chunks are wanted, but not most."""

MAX_UNWANTED_NBYTES_AT_ONCE = 4 * 1024 * 1024
"""Of all such shards of one read, or gaps: at 1 Gbit/s the time of a round trip."""

_MIN_WANTED = 1 / 16
"""Of the chunks of such a shard: whoever reads here and there pays for what is wanted."""

_N_ATTEMPTS_IN_ONE_PIECE = 2
"""To read a whole shard, if a reply is shorter than the shard."""


def are_worth_whole(wanted: Sequence[tuple[ShardRef, int]], max_nbytes: int) -> list[bool]:
    """Which shards to read whole, if their indexes are not known.

    Those of which most is wanted; and while it is little, those of which several chunks are.
    One chunk of many is read by itself.

    Parameters
    ----------
    wanted
        Shards, and how many of their chunks are wanted.
    max_nbytes
        Largest shard, before compression, that is read in one piece.
    """
    left = MAX_UNWANTED_NBYTES_AT_ONCE
    worth: list[bool] = []
    for shard, n_wanted in wanted:
        chunk_nbytes, spec = shard.layout.chunk_nbytes, shard.layout.spec
        # Of an array that has shrunk there may be entries that do not lie in it any more.
        if chunk_nbytes is None or spec.n_entries * chunk_nbytes > max_nbytes:
            worth.append(False)
            continue
        if not spec.index.checksum:  # a part of the shard could pass for all of it
            worth.append(False)
            continue
        n_entries = shard.n_grid_entries
        unwanted = (n_entries - n_wanted) * chunk_nbytes
        are_several = n_wanted > 1 and n_wanted >= _MIN_WANTED * n_entries
        is_little = are_several and unwanted <= min(_MAX_UNWANTED_NBYTES, left)
        is_most = 2 * n_wanted > n_entries
        if is_little and not is_most:
            left -= unwanted
        worth.append(is_little or is_most)
    return worth


def read_whole_shards(shards: Sequence[ShardRef]) -> Flow[list[Found]]:
    """Read whole shards, each in one request, and see that nothing is cut off.

    The last bytes of a reply that is too short are no index, but may pass for one: zeros say that
    all entries are empty, ``0xff`` that they are missing. A checksum finds that, and so do the
    entries if the index is at the start, or if the last one ends where the index begins, as in
    all shards that are not being appended to. For others a base store that does not tell the
    size with the reply is asked for it, in a second round.

    Raises
    ------
    CorruptShardError
        If a reply is shorter or longer than its shard, also when it is asked for again.
    """
    founds: list[Found] = [Found(None, None)] * len(shards)
    left: list[int] = list(range(len(shards)))
    for n_left in reversed(range(_N_ATTEMPTS_IN_ONE_PIECE)):
        replies = yield [Get(shards[i].key, consistent=True) for i in left]
        for i, found in zip(left, replies, strict=True):
            founds[i] = found
        unknown = [i for i in left if _may_be_cut_off(shards[i], founds[i])]
        if unknown:
            sizes: list[int | None] = yield [GetSize(shards[i].key) for i in unknown]
            for i, size in zip(unknown, sizes, strict=True):
                founds[i] = founds[i]._replace(size=size)
        left = [i for i in left if not is_whole(founds[i])]
        if not left:
            break
        if not n_left:
            value, size = founds[left[0]].value, founds[left[0]].size
            n_read = 0 if value is None else len(value)
            raise CorruptShardError(
                f"it has {size} bytes, and reading all of it gave {n_read}",
                shard_key=shards[left[0]].key,
            )
    return founds


def _may_be_cut_off(shard: ShardRef, found: Found) -> bool:
    """Whether only its size would tell that the bytes of a whole shard are all there."""
    spec = shard.layout.spec
    if found.value is None or found.size is not None:
        return False
    if spec.index.checksum or spec.index.location == "start":
        return False
    try:
        index = index_of_shard(found.value, spec.chunks_per_shard, spec.index)
    except IndexDamageError:
        return True
    offsets, nbytes = index.fields[index.present_ids()].T
    data_nbytes = len(found.value) - spec.index_nbytes
    # A sum may wrap: such an entry is found to leave the shard when it is used.
    # Zeros are an index of empty entries only, which end where there are no data.
    return not nbytes.any() or int((offsets + nbytes).max()) != data_nbytes


def is_whole(found: Found) -> bool:
    """Whether a reply is not known to be shorter or longer than its shard."""
    return found.value is None or found.size is None or found.size == len(found.value)


def get_of_index(request: GetIndex) -> Get:
    """The request for the bytes of an index, or for all bytes of its shard."""
    spec = request.shard.layout.spec
    nbytes = spec.index_nbytes
    byte_range: ByteRange | None = None
    if not request.with_data:
        byte_range = Range(0, nbytes) if spec.index.location == "start" else Suffix(nbytes)
    # Without a checksum an index cannot tell that it is half written.
    return Get(request.shard.key, byte_range, request.consistent or not spec.index.checksum)


def found_index(request: GetIndex, found: Found) -> FoundIndex:
    """What the bytes say that `get_of_index` asked for."""
    if found.value is None:
        return FoundIndex(None, found.version, found.size)
    spec = request.shard.layout.spec
    value = found.value if request.with_data else None
    try:
        if not request.with_data:
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
            GetIndex(shards[i], is_settled, version=seen[i], cache=keep) for i in left
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
