"""Entries of a damaged or cut index, one by one.

They count if the index begins where the data end, no two name the same bytes, and a codec refuses
other bytes. If the frame is not the only one of its size, the shard must have no dead frames, all
entries must be in an order of writers, and those next to it must be whole. Raw chunks prove
nothing: all entries must fill the data, in an order of writers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from zarr_shardstore.access import shard_format
from zarr_shardstore.tools.check.salvage.damaged_shard import DamagedShard, Fields
from zarr_shardstore.tools.check.salvage.frames import FRAME_CODECS
from zarr_shardstore.tools.check.salvage.orders import orders_of

Named: TypeAlias = tuple[dict[int, memoryview], set[int]]
"""Whole chunks, and entries that say that there is no chunk."""


def named_by(
    shard: DamagedShard, start: int, fields: Fields, *, is_cut: bool = False
) -> Named | None:
    """Return the whole chunks that the entries of an index at `start` name, and the entries of
    missing chunks; ``None`` if an entry may be that of another chunk."""
    cps = shard.spec.chunks_per_shard
    stop = start if shard.at_end else len(shard.data)
    missing = (fields == shard_format.MISSING).all(axis=1)
    possible = shard.is_possible(fields, stop)
    ids = np.flatnonzero(possible)
    ids = ids[np.argsort(fields[ids, 0], kind="stable")]
    if not (shard.is_proving or is_cut):
        is_filled = len(ids) * (shard.exact or -1) == stop - shard.first
        if not is_filled or not (possible | missing).all() or not orders_of(ids, cps):
            return None
    whole: dict[int, memoryview] = {}
    reached = shard.first
    for i, (offset, nbytes) in zip(ids.tolist(), fields[ids].tolist(), strict=True):
        has_end = shard.codec in FRAME_CODECS and shard.codec != "lz4"
        if has_end and offset + nbytes not in shard.ends(offset):
            continue  # zlib ignores bytes behind a frame
        if shard.is_whole("", offset, nbytes):
            if offset < reached:
                return None
            whole[i], reached = shard.data[offset : offset + nbytes], offset + nbytes
    if shard.is_proving and not is_cut:
        # A damaged offset may be that of another frame of the same size.
        is_known = np.pad(missing, 1, constant_values=True)
        is_known[np.fromiter(whole, np.intp, len(whole)) + 1] = True
        is_ordered = len(shard.frames) <= np.count_nonzero(possible)
        is_ordered &= bool(orders_of(np.fromiter(whole, np.intp, len(whole)), cps))
        sizes = Counter(end - begin for begin, end in shard.frames)
        has_all = shard.has_all_frames(stop)
        for i in list(whole):
            is_sure = is_ordered and is_known[i] and is_known[i + 2]
            if not has_all or (sizes[len(whole[i])] != 1 and not is_sure):
                del whole[i]
    return whole, set(np.flatnonzero(missing).tolist())


def named_by_cut_index(shard: DamagedShard) -> Named | None:
    """Return the same for an index at the end of which the first entries are left."""
    size, spec = len(shard.data), shard.spec
    if not shard.at_end:
        return None
    lowest = max(0, shard.index_start + 1)
    starts: Sequence[int] = []
    if shard.is_proving and shard.frames:
        end = shard.frames[-1][1]
        after = np.flatnonzero(np.frombuffer(shard.data[end:], np.uint8))
        first = end + int(after[0]) if len(after) else end
        starts = [end] if first - end < shard_format.ENTRY_NBYTES else range(first - 15, first + 1)
    elif shard.exact and not shard.is_proving:
        starts = range(-(-lowest // shard.exact) * shard.exact, size, shard.exact)
    found = []
    for start in starts:
        n = min(shard.n, (size - start) // shard_format.ENTRY_NBYTES)
        if start < lowest or not n:
            continue
        fields = shard.fields_at(start, n)
        missing = (fields == shard_format.MISSING).all(axis=1)
        possible = shard.is_possible(fields, start)
        if shard.is_proving:
            is_named = shard.frames_of(fields) >= 0
        else:
            is_named = possible = possible & (fields[:, 0] % (shard.exact or 1) == 0)
            before = shard.fields_at(max(0, start - shard_format.ENTRY_NBYTES), 1)
            if (before == shard_format.MISSING).all() or shard.is_possible(before, size)[0]:
                continue  # the index begins further in front
        is_first = missing[0] or is_named[0]
        if is_first and is_named.any() and (possible | missing).all():
            found.append((start, fields))
    # If bytes in the middle are gone, later entries follow, and the checksum at the end.
    tail_nbytes = shard_format.CHECKSUM_NBYTES * spec.index.checksum
    if len(found) != 1 or (size - found[0][0]) % shard_format.ENTRY_NBYTES == tail_nbytes:
        return None
    return named_by(shard, *found[0], is_cut=True)
