"""Reads of whole shards, each in one request: where it costs less, or where nothing else helps.

A read asks for an index, and then for the entries that it points to. Where most of a shard is
wanted the second round can be spared: the index comes along with the bytes. What is not wanted
costs time, too: 512 KiB take 10 ms of a connection with 50 MB/s, a round trip takes 20 to 100 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import IndexDamageError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import index_of_shard
from zarr_shardstore.plan.requests import Flow, Found, Get, GetSize

__all__ = [
    "MAX_UNWANTED_NBYTES_AT_ONCE",
    "are_worth_whole",
    "is_whole",
    "read_whole_shards",
]

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
        replies = yield [Get(shards[i].key, settled=True) for i in left]
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
