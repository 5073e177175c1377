"""Indexes that a damaged shard still has: put right by its checksum, entry by entry, or older.

A damaged index counts if one change makes its checksum right: a flipped bit, two exchanged entries,
or damaged entries that get the frames without an entry. At most 2¹⁶ changes are tried: a wrong one
passes with a probability of 2⁻¹⁶.

Single entries count if the index begins where the data end, and no two have the same bytes. A codec
must also refuse other bytes. A frame whose size is not unique needs more: a shard without dead
frames, an order of writers, and whole entries beside it. Raw chunks are no proof: all entries must
fill the data, in an order of writers. After an index at the start, frames may have moved with it.

The entries that a cut index has left count from two on. All of them name a frame, or none is there.
The numbers of two entries that are read at a wrong place, by 8 bytes, name no two frames.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice, permutations
from typing import Any, TypeAlias

import crc32c
import numpy as np

from zarr_shardstore.access import shard_format
from zarr_shardstore.tools.check.salvage.damaged_shard import (
    ORDERS,
    DamagedShard,
    Fields,
    Index,
    is_missing,
    orders_of,
)
from zarr_shardstore.tools.check.salvage.frames import FRAME_CODECS

_ENTRY_NBYTES = shard_format.ENTRY_NBYTES

_POLYNOMIAL = 0x82F63B78
"""Reversed polynomial of crc32c."""

_MAX_BITS = 1 << 23
"""Bits of an index that are tried: half a second."""

_MAX_CHANGES = 1 << 16
_MAX_CHECKED_NBYTES = 1 << 31
"""Bytes of indexes whose checksum is computed: a second."""

_MAX_CHOICES = 1 << 13
"""Permutations of free frames that are tried; above that only the orders of writers."""

_STEP_NBYTES = 1 << 18
"""Offsets that are compared at a time."""

Named: TypeAlias = tuple[dict[int, memoryview], set[int]]
"""Whole chunks, and ids of missing entries."""


# --------------------------------------------------------------------- by the checksum


def corrected_index(shard: DamagedShard) -> Index | None:
    """Return the index that has the stored checksum after a small change, if there is one."""
    spec, start, n_body = shard.spec, shard.index_start, shard.n * _ENTRY_NBYTES
    if not spec.index.checksum or len(shard.data) < spec.index_nbytes:
        return None
    body = bytes(shard.data[start : start + n_body])
    checksum = bytes(shard.data[start + n_body : start + n_body + shard_format.CHECKSUM_NBYTES])
    stored = int.from_bytes(checksum, "little")
    wrong = stored ^ crc32c.crc32c(body)
    if wrong.bit_count() == 1:  # the checksum itself: no single bit of the entries has this effect
        return Index(shard.fields_at(start, shard.n))
    at_most = min(_MAX_CHANGES, _MAX_CHECKED_NBYTES // n_body)
    for changed in islice(_changes(shard, body, wrong), at_most):
        if crc32c.crc32c(changed) == stored:
            index = Index.decode(changed + checksum, spec)
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
        yield Index(filled).encode(shard.spec.index)[: len(body)]
    parts = [body[i : i + _ENTRY_NBYTES] for i in range(0, len(body), _ENTRY_NBYTES)]
    for i, j in combinations(range(shard.n), 2):
        if parts[i] != parts[j]:
            parts[i], parts[j] = parts[j], parts[i]
            yield b"".join(parts)
            parts[i], parts[j] = parts[j], parts[i]


def _flipped_bit(wrong: int, n_bits: int) -> int | None:
    """Return the bit of a message whose flip changes its crc32c by `wrong`, if there is one."""
    effect = _POLYNOMIAL  # of the last bit
    for bit in range(n_bits - 1, max(-1, n_bits - 1 - _MAX_BITS), -1):
        if effect == wrong:
            return bit
        effect = effect >> 1 ^ (_POLYNOMIAL if effect & 1 else 0)
    return None


def _filled(shard: DamagedShard, fields: Fields) -> Iterator[Fields]:
    """Yield indexes in which the entries that name no frame get the unnamed frames."""
    frames = shard.frames_of(fields)
    numbers, counts = np.unique(frames, return_counts=True)
    named = np.flatnonzero(np.isin(frames, numbers[(counts == 1) & (numbers >= 0)]))
    missing = np.flatnonzero(is_missing(fields))
    places = np.array(shard.frames, dtype=np.uint64).reshape(-1, 2)
    places[:, 1] -= places[:, 0]
    everywhere, in_grid = np.arange(shard.n), shard.shard.entries_of()
    cps = shard.spec.chunks_per_shard
    is_one = len(named) + len(missing) == shard.n  # then an entry may name the wrong frame
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


# --------------------------------------------------------------------- entry by entry


def named_by(
    shard: DamagedShard, start: int, fields: Fields, *, is_cut: bool = False
) -> Named | None:
    """Return the chunks that the entries of an index at `start` name, and the missing entries.
    ``None`` if an entry may belong to another chunk."""
    cps = shard.spec.chunks_per_shard
    missing = is_missing(fields)
    possible = shard.is_possible(fields, start)
    ids = np.flatnonzero(possible)
    ids = ids[np.argsort(fields[ids, 0], kind="stable")]
    if not (shard.is_proving or is_cut):
        is_filled = len(ids) * (shard.exact or -1) == start - shard.first
        if not is_filled or not (possible | missing).all() or not orders_of(ids, cps):
            return None
    whole: dict[int, memoryview] = {}
    reached = shard.first
    for i, (offset, nbytes) in zip(ids.tolist(), fields[ids].tolist(), strict=True):
        has_end = shard.codec in FRAME_CODECS and shard.codec != "lz4"
        if has_end and offset + nbytes not in shard.ends(offset):
            continue  # zlib ignores bytes after a frame
        if shard.is_whole("", offset, nbytes):
            if offset < reached:
                return None
            whole[i], reached = shard.data[offset : offset + nbytes], offset + nbytes
    if shard.is_proving and not is_cut:
        # A damaged offset may point to another frame of the same size.
        is_known = np.pad(missing, 1, constant_values=True)
        is_known[np.fromiter(whole, np.intp, len(whole)) + 1] = True
        is_ordered = len(shard.frames) <= np.count_nonzero(possible)
        is_ordered &= bool(orders_of(np.fromiter(whole, np.intp, len(whole)), cps))
        sizes = Counter(end - begin for begin, end in shard.frames)
        has_all = shard.has_all_frames(start)
        is_last_whole = bool(shard.frames) and shard.is_blank(shard.frames[-1][1], start)
        for i in list(whole):
            is_sure = is_ordered and is_known[i] and is_known[i + 2]
            is_unique = sizes[len(whole[i])] == 1 and is_last_whole
            if not (has_all and (is_unique or is_sure)):
                del whole[i]
    return whole, set(np.flatnonzero(missing).tolist())


def named_by_cut_index(shard: DamagedShard) -> Named | None:
    """Return the same as `named_by` for an index of which the first entries are left."""
    size, spec = len(shard.data), shard.spec
    if not shard.at_end:
        return None
    lowest = max(0, shard.index_start + 1)
    starts: Sequence[int] = []
    if shard.is_proving and shard.frames:
        end = shard.frames[-1][1]
        after = np.flatnonzero(np.frombuffer(shard.data[end:], np.uint8))
        first = end + int(after[0]) if len(after) else end
        starts = [end] if first - end < _ENTRY_NBYTES else range(first - 15, first + 1)
    elif shard.exact and not shard.is_proving:
        starts = range(-(-lowest // shard.exact) * shard.exact, size, shard.exact)
    found = []
    for start in starts:
        n = min(shard.n, (size - start) // _ENTRY_NBYTES)
        if start < lowest or n < 2:
            continue
        fields = shard.fields_at(start, n)
        missing, possible = is_missing(fields), shard.is_possible(fields, start)
        if shard.is_proving:
            is_named = shard.frames_of(fields) >= 0
        else:
            is_named = possible = possible & (fields[:, 0] % (shard.exact or 1) == 0)
            before = shard.fields_at(max(0, start - _ENTRY_NBYTES), 1)
            if is_missing(before).all() or shard.is_possible(before, size)[0]:
                continue  # the index begins earlier
        if is_named.any() and (is_named | missing).all():
            found.append((start, fields))
    # If numbers in the middle are gone, later ones follow, and the checksum at the end.
    tail_nbytes = shard_format.CHECKSUM_NBYTES * spec.index.checksum
    if len(found) != 1 or (size - found[0][0]) % (_ENTRY_NBYTES // 2) == tail_nbytes:
        return None
    return named_by(shard, *found[0], is_cut=True)


# --------------------------------------------------------------------- older indexes


def older_indexes(shard: DamagedShard) -> Iterator[Index]:
    """Yield the whole indexes that appends have left in the data, the last one first."""
    spec, size, n = shard.spec, len(shard.data), shard.n
    n_starts = size - spec.index_nbytes + 1
    if not shard.at_end or n_starts <= 0:
        return
    order = shard_format.BYTE_ORDERS[spec.index.endian]
    words = np.ndarray((size - 7,), f"{order}u8", shard.data, strides=(1,))
    tops = np.frombuffer(shard.data, np.uint8)[15 if order == "<" else 8 :]
    n_left = min(_MAX_CHANGES, _MAX_CHECKED_NBYTES // spec.index_nbytes)
    for high in range(n_starts, 0, -_STEP_NBYTES):
        low = max(0, high - _STEP_NBYTES)
        # The first byte of a size is 0, or 255 of a missing entry.
        starts = low + np.flatnonzero(tops[low:high] + np.uint8(1) <= 1)
        for slot in sorted({0, n // 3, 2 * n // 3, n - 1}):
            nbytes = words[starts + (slot * _ENTRY_NBYTES + 8)]
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


def _index_at(shard: DamagedShard, start: int) -> Index | None:
    has_checksum = shard.spec.index.checksum
    if has_checksum:
        stop = start + shard.n * _ENTRY_NBYTES
        stored = int.from_bytes(shard.data[stop : stop + shard_format.CHECKSUM_NBYTES], "little")
        if crc32c.crc32c(shard.data[start:stop]) != stored:
            return None
    fields = shard.fields_at(start, shard.n)
    present = ~is_missing(fields)
    if not present.any() or not shard.is_possible(fields[present], start).all():
        return None
    if not has_checksum:
        if not shard.is_proving or not shard.begins_at(start, fields):
            return None
        named = named_by(shard, start, fields)
        if named is None or len(named[0]) < np.count_nonzero(present):
            return None
    return Index(fields)
