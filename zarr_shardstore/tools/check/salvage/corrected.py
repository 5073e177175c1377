"""A damaged index, put right by its checksum.

The checksum is right again after one bit was flipped, two entries were exchanged, or damaged
entries were given frames that no other entry names. At most 2¹⁶ changes are tried, so that a wrong
one passes with a probability of 2⁻¹⁶.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations, islice, permutations
from typing import Any

import crc32c
import numpy as np

from zarr_shardstore.access import shard_format
from zarr_shardstore.tools.check.salvage.damaged_shard import DamagedShard, Fields
from zarr_shardstore.tools.check.salvage.orders import ORDERS

_POLYNOMIAL = 0x82F63B78
"""Of crc32c, in reversed order of bits."""

_MAX_BITS = 1 << 23
"""Of an index in which a flipped bit is looked for: half a second."""

MAX_CHANGES = 1 << 16
MAX_CHECKED_NBYTES = 1 << 31
"""Of indexes whose checksum is computed to find the right one: a second."""

_MAX_CHOICES = 1 << 13
"""Up to so many ways to give free frames to damaged entries are tried; otherwise three orders."""


def corrected_index(shard: DamagedShard) -> shard_format.ShardIndex | None:
    """Return the index that has the stored checksum after a small change, if there is one."""
    spec, start, n_body = shard.spec, shard.index_start, shard.n * shard_format.ENTRY_NBYTES
    if not spec.index.checksum or len(shard.data) < spec.index_nbytes:
        return None
    body = bytes(shard.data[start : start + n_body])
    checksum = bytes(shard.data[start + n_body : start + n_body + shard_format.CHECKSUM_NBYTES])
    stored = int.from_bytes(checksum, "little")
    wrong = stored ^ crc32c.crc32c(body)
    if wrong.bit_count() == 1:  # the checksum itself: no one bit of the entries does that
        return shard_format.ShardIndex(shard.fields_at(start, shard.n))
    at_most = min(MAX_CHANGES, MAX_CHECKED_NBYTES // n_body)
    for changed in islice(_changes(shard, body, wrong), at_most):
        if crc32c.crc32c(changed) == stored:
            index = shard_format.ShardIndex.decode(changed + checksum, spec)
            if not len(index.damaged_ids(len(shard.data), spec)):
                return index
    return None


def _changes(shard: DamagedShard, body: bytes, wrong: int) -> Iterator[bytes]:
    bit = _flipped_bit(wrong, 8 * len(body))
    if bit is not None:
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    for filled in _filled(shard, shard.fields_at(shard.index_start, shard.n)):
        yield shard_format.ShardIndex(filled).encode(shard.spec.index)[: len(body)]
    parts = [
        body[i : i + shard_format.ENTRY_NBYTES]
        for i in range(0, len(body), shard_format.ENTRY_NBYTES)
    ]
    for i, j in combinations(range(shard.n), 2):
        if parts[i] != parts[j]:
            parts[i], parts[j] = parts[j], parts[i]
            yield b"".join(parts)
            parts[i], parts[j] = parts[j], parts[i]


def _flipped_bit(wrong: int, n_bits: int) -> int | None:
    """Return the bit of a message whose flip changes its crc32c by `wrong`; ``None``: none does."""
    effect = _POLYNOMIAL  # of the last bit
    for bit in range(n_bits - 1, max(-1, n_bits - 1 - _MAX_BITS), -1):
        if effect == wrong:
            return bit
        effect = effect >> 1 ^ (_POLYNOMIAL if effect & 1 else 0)
    return None


def _filled(shard: DamagedShard, fields: Fields) -> Iterator[Fields]:
    """Yield indexes in which entries that name no frame get those that no entry names."""
    frames = shard.frames_of(fields)
    numbers, counts = np.unique(frames, return_counts=True)
    named = np.flatnonzero(np.isin(frames, numbers[(counts == 1) & (numbers >= 0)]))
    missing = np.flatnonzero((fields == shard_format.MISSING).all(axis=1))
    places = np.array(shard.frames, dtype=np.uint64).reshape(-1, 2)
    places[:, 1] -= places[:, 0]
    everywhere, in_grid = np.arange(shard.n), shard.shard.entries_of()
    cps = shard.spec.chunks_per_shard
    is_one = len(named) + len(missing) == shard.n  # of these an entry may name the wrong frame
    for keep in (named, named[:0], *(named[named != i] for i in named[: shard.n * is_one])):
        free = np.delete(places, frames[keep], axis=0)
        start = np.full_like(fields, shard_format.MISSING)
        start[keep] = fields[keep]
        holes = np.setdiff1d(everywhere, np.union1d(keep, missing))
        for ids in (holes, np.setdiff1d(in_grid, keep)):
            choices: Iterable[Any] = []
            if math.perm(len(free) + len(ids), len(ids)) <= _MAX_CHOICES:
                rows = [*free.tolist(), *[[shard_format.MISSING, shard_format.MISSING]] * len(ids)]
                choices = permutations(rows, len(ids))
            elif len(ids) == len(free):
                orders = (shard_format.order_entries(ids, cps, order) for order in ORDERS)
                choices = [free[np.argsort(ordered)] for ordered in orders]
            for chosen in choices:
                filled = start.copy()
                filled[ids] = np.array(chosen, dtype=np.uint64).reshape(-1, 2)
                yield filled
