"""Older indexes, which a writer has left in the file when it moved the index behind new chunks."""

from __future__ import annotations

from collections.abc import Iterator

import crc32c
import numpy as np

from zarr_shardstore.access import shard_format
from zarr_shardstore.tools.check.salvage.corrected import MAX_CHANGES, MAX_CHECKED_NBYTES
from zarr_shardstore.tools.check.salvage.damaged_shard import DamagedShard
from zarr_shardstore.tools.check.salvage.entries import named_by

_STEP_NBYTES = 1 << 18
"""Offsets that are compared at a time."""


def older_indexes(shard: DamagedShard) -> Iterator[shard_format.ShardIndex]:
    """Yield whole indexes in the data, the last one first."""
    spec, size, n = shard.spec, len(shard.data), shard.n
    n_starts = size - spec.index_nbytes + 1
    if not shard.at_end or n_starts <= 0:
        return
    order = spec.index.byte_order
    words = np.ndarray((size - 7,), f"{order}u8", shard.data, strides=(1,))
    tops = np.frombuffer(shard.data, np.uint8)[15 if order == "<" else 8 :]
    n_left = min(MAX_CHANGES, MAX_CHECKED_NBYTES // spec.index_nbytes)
    for high in range(n_starts, 0, -_STEP_NBYTES):
        low = max(0, high - _STEP_NBYTES)
        # The first byte of a size is 0, or 255 of a missing entry.
        starts = low + np.flatnonzero(tops[low:high] + np.uint8(1) <= 1)
        for slot in sorted({0, n // 3, 2 * n // 3, n - 1}):
            nbytes = words[starts + (slot * shard_format.ENTRY_NBYTES + 8)]
            after = nbytes + np.uint64(1)  # 0: missing
            if shard.exact is not None:
                starts = starts[(after == 0) | (after == shard.exact + 1)]
            else:
                starts = starts[(after <= size) & (after != 1)]
        for start in starts[::-1].tolist():
            n_left -= 1
            if n_left < 0:
                return
            index = _index_at(shard, start)
            if index is not None:
                yield index


def _index_at(shard: DamagedShard, start: int) -> shard_format.ShardIndex | None:
    if shard.spec.index.checksum:
        stop = start + shard.n * shard_format.ENTRY_NBYTES
        stored = int.from_bytes(shard.data[stop : stop + shard_format.CHECKSUM_NBYTES], "little")
        if crc32c.crc32c(shard.data[start:stop]) != stored:
            return None
    fields = shard.fields_at(start, shard.n)
    present = (fields != shard_format.MISSING).any(axis=1)
    if not present.any() or not shard.is_possible(fields[present], start).all():
        return None
    if not shard.spec.index.checksum:
        if not shard.is_proving:
            return None
        named = named_by(shard, start, fields) if shard.begins_at(start, fields) else None
        if named is None or len(named[0]) < np.count_nonzero(present):
            return None
    return shard_format.ShardIndex(fields)
