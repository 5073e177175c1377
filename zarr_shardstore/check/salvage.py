"""Chunks of a damaged shard that are whole, and the entries that they belong to.

A chunk that decodes does not say which one it is: some writers store chunks in the order in which
they come. Under a wrong key it would be worse than missing. So each chunk needs a proof:

1. *An index with a right checksum*, in the declared form or in another one, is believed. So is an
   index without a checksum, if it begins where the data end.
2. *The checksum of a damaged index*: it is right again after one bit was flipped, two entries were
   exchanged, or damaged entries were given frames that no other entry names. At most 2¹⁶ changes
   are tried, so that a wrong one passes with a probability of 2⁻¹⁶.
3. *Entries of a damaged or cut index*, one by one, if the index begins where the data end, no two
   name the same bytes, and a codec refuses other bytes (`_PROVING`). If the frame is not the only
   one of its size, the shard must have no dead frames, all entries must be in an order of writers,
   and those next to it must be whole.
   Raw chunks prove nothing: all entries must fill the data, in an order of writers.
4. *An older index*, which a writer has left in the file when it moved the index behind new chunks.
   Bytes of an entry are never written again, so these are older values of the same chunks.
5. *The user*, who says that the shard was full, and in which order it was written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, islice, permutations, product
from typing import Any, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt

from zarr_shardstore.check.shards import ArrayChecker
from zarr_shardstore.format.frames import FRAME_CODECS, frame_ends, next_frame
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import (
    CHECKSUM_NBYTES,
    ENTRY_NBYTES,
    MISSING,
    EntryOrder,
    IndexDamageError,
    IndexFormat,
    ShardIndex,
    ShardingSpec,
    index_of_shard,
    order_entries,
)
from zarr_shardstore.shards.stack import Crc32cTransformer

_PROVING = FRAME_CODECS | {"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"}
"""Codecs that refuse other bytes than those that they have encoded, nearly always."""

_ORDERS: tuple[EntryOrder, ...] = ("C", "F", "morton")

_POLYNOMIAL = 0x82F63B78
"""Of crc32c, in reversed order of bits."""

_MAX_BITS = 1 << 23
"""Of an index in which a flipped bit is looked for: half a second."""

_MAX_CHANGES = 1 << 16
_MAX_CHECKED_NBYTES = 1 << 31
"""Of indexes whose checksum is computed to find the right one: a second."""

_MAX_CHOICES = 1 << 13
"""Up to so many ways to give free frames to damaged entries are tried; otherwise three orders."""

_MAX_OLDER = 16
"""Older indexes of one shard; each is in front of more data than all before it."""

_STEP_NBYTES = 1 << 18
"""Offsets that are compared at a time."""

_Fields: TypeAlias = npt.NDArray[np.uint64]
_Place: TypeAlias = tuple[int, int]
"""Half-open byte range in the shard."""

_Named: TypeAlias = tuple[dict[int, memoryview], set[int]]
"""Whole chunks, and entries that say that there is no chunk."""

_MAX_LOST = 1 << 16
"""Entries of a shard that is shorter than one byte for each: all of these may be named as lost."""

_MAX_MISSES = 1 << 12
"""Places that look like the begin of a frame, and are none."""


@dataclass(slots=True)
class Salvage:
    """Result for one shard."""

    entries: dict[int, memoryview] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Entries that an index names, and whose chunk is not whole. Without a valid index also those
    of which nothing says whether there were chunks."""
    has_index: bool = True
    """Whether a valid index says which chunks there were."""
    text: str = "its index is valid"
    """Where the entries come from."""


def salvage(
    checker: ArrayChecker,
    shard: ShardRef,
    data: memoryview,
    *,
    guesses: bool,
    order: EntryOrder | None = None,
) -> Salvage:
    """Return the whole chunks of a shard: with `guesses` also without a valid index.

    With an `order` a shard without a valid index counts as one that was full, in this order.
    """
    n_entries = shard.layout.spec.n_entries
    if n_entries > max(_MAX_LOST, len(data)):  # a document of a few bytes may declare millions
        text = f"of its index of {n_entries} entries hardly anything is there"
        return Salvage({}, [], False, text)
    damaged = _DamagedShard(checker, shard, data)
    for index, spec in _valid_indexes(shard.layout.spec, data):
        if spec.index.checksum or spec != shard.layout.spec or damaged.is_in_place(index.fields):
            return damaged.through(index, spec)
    if not guesses:
        return Salvage({}, shard.entries_of().tolist(), False, "it has no valid index")
    right = damaged.corrected_index()
    if right is not None:
        found = damaged.through(right, shard.layout.spec)
        found.text = "its index was damaged, and is put right by its checksum"
        return found
    return damaged.without_index(order)


def _valid_indexes(
    spec: ShardingSpec, data: memoryview
) -> Iterator[tuple[ShardIndex, ShardingSpec]]:
    """Yield indexes with a right checksum or without a contradiction, the declared form first. Last
    comes one of the declared form with entries out of the bounds."""
    doubtful = []
    forms = product((True, False), ("end", "start"), ("little", "big"))
    others = [IndexFormat(*form) for form in forms]  # type: ignore[arg-type]
    for form in sorted(others, key=lambda form: form != spec.index):
        new = ShardingSpec(spec.chunks_per_shard, form)
        if len(data) < new.index_nbytes:
            continue
        try:
            index = index_of_shard(data, new)
        except IndexDamageError:
            continue
        ids = index.present_ids()
        is_sound = len(ids) > 0 and not len(index.damaged_ids(len(data), new))
        nbytes = new.index_nbytes + float(index.fields[ids, 1].sum(dtype=np.float64))
        if is_sound and (form.checksum or form == spec.index or nbytes == len(data)):
            yield index, new
        elif form == spec.index:
            doubtful.append((index, new))
    yield from doubtful


class _DamagedShard:
    """One shard, its bytes, and all that is found in them. Pure but for the decoding of chunks."""

    def __init__(self, checker: ArrayChecker, shard: ShardRef, data: memoryview) -> None:
        self.checker, self.shard, self.data = checker, shard, data
        self.spec, self.exact = shard.layout.spec, checker.exact_nbytes
        self.n, self.at_end = self.spec.n_entries, self.spec.index.location == "end"
        names = [name.removeprefix("numcodecs.") for name in checker.codecs or ()]
        above = [type(each) is Crc32cTransformer for each in checker.above]
        self.is_proving = not _PROVING.isdisjoint(names) or any(above)
        n_outer = len(above)
        while names and names[-1] == "crc32c":
            names.pop()
            n_outer += 1
        self._tail_nbytes = CHECKSUM_NBYTES * n_outer if all(above) else None
        self._codec = names[-1] if names else ""
        self._header_nbytes = checker.nbytes if len(names) == 1 else None

    def is_whole(self, key: str, start: int, nbytes: int) -> bool:
        """Whether the bytes of a place are a chunk, or may be one if nothing shows damage."""
        if self.exact not in (None, nbytes) or not 0 <= start <= start + nbytes <= len(self.data):
            return False
        return self.checker.problem_of(key, self.data[start : start + nbytes]) is None

    def _fields_at(self, start: int, n: int) -> _Fields:
        body = self.data[start : start + n * ENTRY_NBYTES]
        fields = np.frombuffer(body, f"{self.spec.index.byte_order}u8").reshape(-1, 2)
        return fields.astype(np.uint64)

    def _is_possible(self, fields: _Fields, data_stop: int) -> npt.NDArray[np.bool_]:
        """Whether each entry lies in the data, and has a length that chunks may have."""
        offsets, nbytes = fields.T
        start, stop = 0 if self.at_end else self.spec.index_nbytes, np.uint64(data_stop)
        is_length = nbytes == self.exact if self.exact is not None else nbytes > 0
        in_data = (nbytes <= stop) & (offsets >= start)
        found: npt.NDArray[np.bool_] = (
            is_length & in_data & (offsets <= stop - np.minimum(nbytes, stop))
        )
        return found

    # ------------------------------------------------------------------- whole indexes

    def is_in_place(self, fields: _Fields) -> bool:
        """Whether an index at the end of the file begins where the data end, as far as it tells.

        If bytes were taken out of an index, or put in, its entries are those of other chunks.
        """
        size = len(self.data) - self.spec.index_nbytes
        is_possible = self._is_possible(fields, size) | (fields == MISSING).all(axis=1)
        if not self.at_end or (self.frames and self.frames[-1][1] > size):
            return not self.at_end
        if is_possible.all() and not self.spec.index.checksum:
            end = self.frames[-1][1] if self.frames else size + 1
            n = (size - end) // ENTRY_NBYTES  # entries that may have been in front of these
            before = self._fields_at(end, max(0, n))
            is_possible = self._is_possible(before, size) | (before == MISSING).all(axis=1)
            if (size - end) % ENTRY_NBYTES or not is_possible.all():
                return True
        n_present = np.count_nonzero((fields != MISSING).any(axis=1))
        return (self.exact or 0) * n_present == size or self._begins_at(size, fields)

    def _begins_at(self, start: int, fields: _Fields) -> bool:
        """Whether the chunks that an index at `start` names, or frames, or a gap, end there."""
        possible = self._is_possible(fields, start)
        end = int(fields[possible].sum(axis=1).max(initial=0))
        if end == start or any(stop == start for _, stop in self.frames):
            return bool(possible.any())
        is_gap = start - end >= ENTRY_NBYTES and not any(self.data[end:start])
        return bool(is_gap and (possible[0] or (fields[0] == MISSING).all()))

    def through(
        self, index: ShardIndex, spec: ShardingSpec, *, without: Collection[int] = ()
    ) -> Salvage:
        """Return the whole chunks that an index names. Without a checksum two entries with the same
        bytes are damaged."""
        found = Salvage()
        bad = set(index.damaged_ids(len(self.data), spec).tolist())
        ids = np.setdiff1d(index.present_ids(), list(without))
        ids = ids[np.lexsort((ids, index.fields[ids, 0]))]
        last = reached = -1
        for i, key in zip(ids.tolist(), self.shard.chunk_keys(ids), strict=True):
            start, nbytes = index.fields[i].tolist()
            if i in bad or not self.is_whole(key, start, nbytes):
                found.lost.append(i)
                continue
            if nbytes and start < reached and not spec.index.checksum:
                found.entries.pop(last, None)
                found.lost += [i, last]
            else:
                found.entries[i] = self.data[start : start + nbytes]
            if nbytes and start + nbytes >= reached:
                last, reached = i, start + nbytes
        found.lost = sorted(set(found.lost))
        return found

    # --------------------------------------------------------------------------- frames

    @cached_property
    def frames(self) -> list[_Place]:
        """Places of the frames that decode, ascending; of raw chunks if these fill the data."""
        start = 0 if self.at_end else self.spec.index_nbytes
        stop = len(self.data)
        if self.exact and not self.is_proving:
            stop -= self.spec.index_nbytes * self.at_end
            is_filled = stop > start and (stop - start) % self.exact == 0
            n_frames = (stop - start) // self.exact if is_filled else 0
            if n_frames > self.n:
                return []
            return [(start + i * self.exact, start + (i + 1) * self.exact) for i in range(n_frames)]
        found: list[_Place] = []
        misses, at = 0, start
        while 0 <= at < stop and misses < _MAX_MISSES:
            ends = self._ends(at)
            end = next((end for end in ends if self.is_whole("", at, end - at)), None)
            if end is None:
                misses += 1
                new = next_frame(self._codec, self.data, at + 1, self._header_nbytes)
                at = -1 if new is None else new
            else:
                found.append((at, end))
                at = end
        return found

    def _ends(self, start: int) -> Iterator[int]:
        if not self.is_proving or self._tail_nbytes is None:
            return
        if not self._codec and self.exact is not None:
            yield start + self.exact
        elif self._codec in FRAME_CODECS:
            tail = self._tail_nbytes
            yield from frame_ends(self._codec, self.data, start, self._header_nbytes, tail)
            if self._codec == "lz4" and self.at_end:
                yield len(self.data) - self.spec.index_nbytes

    # -------------------------------------------------------------- corrected by checksum

    def corrected_index(self) -> ShardIndex | None:
        """Return the index that has the stored checksum after a small change, if there is one."""
        spec, n_body = self.spec, self.n * ENTRY_NBYTES
        start = len(self.data) - spec.index_nbytes if self.at_end else 0
        if not spec.index.checksum or len(self.data) < spec.index_nbytes:
            return None
        body = bytes(self.data[start : start + n_body])
        checksum = bytes(self.data[start + n_body : start + n_body + CHECKSUM_NBYTES])
        stored = int.from_bytes(checksum, "little")
        wrong = stored ^ crc32c.crc32c(body)
        if wrong.bit_count() == 1:  # the checksum itself: no one bit of the entries does that
            return ShardIndex(self._fields_at(start, self.n))
        at_most = min(_MAX_CHANGES, _MAX_CHECKED_NBYTES // n_body)
        for changed in islice(self._changes(body, wrong, start), at_most):
            if crc32c.crc32c(changed) == stored:
                index = ShardIndex.decode(changed + checksum, spec)
                if not len(index.damaged_ids(len(self.data), spec)):
                    return index
        return None

    def _changes(self, body: bytes, wrong: int, start: int) -> Iterator[bytes]:
        bit = _flipped_bit(wrong, 8 * len(body))
        if bit is not None:
            flipped = bytearray(body)
            flipped[bit // 8] ^= 1 << bit % 8
            yield bytes(flipped)
        for filled in self._filled(self._fields_at(start, self.n)):
            yield ShardIndex(filled).encode(self.spec.index)[: len(body)]
        parts = [body[i : i + ENTRY_NBYTES] for i in range(0, len(body), ENTRY_NBYTES)]
        for i, j in combinations(range(self.n), 2):
            if parts[i] != parts[j]:
                parts[i], parts[j] = parts[j], parts[i]
                yield b"".join(parts)
                parts[i], parts[j] = parts[j], parts[i]

    def _filled(self, fields: _Fields) -> Iterator[_Fields]:
        """Yield indexes in which entries that name no frame get those that no entry names."""
        frames = self._frames_of(fields)
        numbers, counts = np.unique(frames, return_counts=True)
        named = np.flatnonzero(np.isin(frames, numbers[(counts == 1) & (numbers >= 0)]))
        missing = np.flatnonzero((fields == MISSING).all(axis=1))
        places = np.array(self.frames, dtype=np.uint64).reshape(-1, 2)
        places[:, 1] -= places[:, 0]
        everywhere, in_grid = np.arange(self.n), self.shard.entries_of()
        cps = self.spec.chunks_per_shard
        is_one = len(named) + len(missing) == self.n  # of these an entry may name the wrong frame
        for keep in (named, named[:0], *(named[named != i] for i in named[: self.n * is_one])):
            free = np.delete(places, frames[keep], axis=0)
            start = np.full_like(fields, MISSING)
            start[keep] = fields[keep]
            holes = np.setdiff1d(everywhere, np.union1d(keep, missing))
            for ids in (holes, np.setdiff1d(in_grid, keep)):
                choices: Iterable[Any] = []
                if math.perm(len(free) + len(ids), len(ids)) <= _MAX_CHOICES:
                    rows = [*free.tolist(), *[[MISSING, MISSING]] * len(ids)]
                    choices = permutations(rows, len(ids))
                elif len(ids) == len(free):
                    orders = (order_entries(ids, cps, order) for order in _ORDERS)
                    choices = [free[np.argsort(ordered)] for ordered in orders]
                for chosen in choices:
                    filled = start.copy()
                    filled[ids] = np.array(chosen, dtype=np.uint64).reshape(-1, 2)
                    yield filled

    def _frames_of(self, fields: _Fields) -> npt.NDArray[np.intp]:
        """Return the number of the frame that each entry names; -1: none."""
        if not self.frames:
            return np.full(len(fields), -1)
        places = np.array(self.frames, dtype=np.uint64)
        at = np.searchsorted(places[:, 0], fields[:, 0]) % len(places)
        is_named = (places[at, 0] == fields[:, 0]) & (places[at, 1] - places[at, 0] == fields[:, 1])
        return np.where(is_named, at, -1)

    # --------------------------------------------------- entries one by one, older indexes

    def without_index(self, order: EntryOrder | None) -> Salvage:
        """Return the chunks that single entries, older indexes and the order name."""
        found, texts = Salvage({}, [], False), []
        missing: set[int] = set()
        start = len(self.data) - self.spec.index_nbytes if self.at_end else 0
        named = None
        if len(self.data) >= self.spec.index_nbytes:
            fields = self._fields_at(start, self.n)
            if self.is_in_place(fields):
                named = self._named_by(start, fields)
        text = "its damaged index"
        if named is None and self.at_end:
            named = self._named_by_cut_index()
            text = "a cut index, perhaps an older index,"
        if named is not None:
            found.entries, missing = named
            texts.append(f"entries of {text} name {len(found.entries)} chunks")
        in_grid = set(self.shard.entries_of().tolist())
        known, n_older = found.entries.keys() | missing, 0
        for index in islice(self._older_indexes(), _MAX_OLDER):
            older = self.through(index, self.spec, without=known)
            n_older += len(older.entries)
            found.entries |= older.entries
            if older.entries:  # otherwise it may be one of another shard, inside a chunk
                known = set(range(self.n)).difference(older.lost)
            if in_grid <= known:
                break
        if n_older:
            text = f"an older index names {n_older} chunks: older values of some may be back"
            texts.append(text)
        if order is not None:
            ordered = self._named_by_order(order)
            if any(ordered.get(i, value) != value for i, value in found.entries.items()):
                texts.append(f"they are not in the order {order!r}")
            else:
                n_new = len(ordered.keys() - found.entries.keys())
                found.entries = {**ordered, **found.entries}
                texts.append(f"the order names {n_new} chunks")
        found.lost = sorted(
            in_grid - found.entries.keys()
        )  # the damage may look like a missing one
        n_others = len(self.frames) - len(found.entries) if self.is_proving else 0
        if found.lost and n_others > 0:
            text = f"{n_others} frames decode, but nothing says which chunks they are"
            texts.append(f"{text}, except order=, if the shard was full")
        found.text = "; ".join(["it has no valid index", *texts])
        return found

    def _named_by_order(self, order: EntryOrder) -> dict[int, memoryview]:
        """Return the whole chunks of a shard that was full: those in front of the first gap."""
        at = 0 if self.at_end else self.spec.index_nbytes
        ids = order_entries(self.shard.entries_of(), self.spec.chunks_per_shard, order)
        places = self.frames
        if self.exact:
            places = [(at + n * self.exact, at + (n + 1) * self.exact) for n in range(len(ids))]
        whole: dict[int, memoryview] = {}
        for i, (start, stop) in zip(ids.tolist(), places, strict=False):
            if start != at:
                break
            if self.is_whole("", start, stop - start):
                whole[i] = self.data[start:stop]
            at = stop
        return whole

    def _named_by(self, start: int, fields: _Fields, *, is_cut: bool = False) -> _Named | None:
        """Return the whole chunks that the entries of an index at `start` name, and the entries of
        missing chunks; ``None`` if an entry may be that of another chunk."""
        first, stop = (0, start) if self.at_end else (self.spec.index_nbytes, len(self.data))
        missing = (fields == MISSING).all(axis=1)
        possible = self._is_possible(fields, stop)
        ids = np.flatnonzero(possible)
        ids = ids[np.argsort(fields[ids, 0], kind="stable")]
        if not (self.is_proving or is_cut):
            is_filled = len(ids) * (self.exact or -1) == stop - first
            if not is_filled or not (possible | missing).all() or not self._is_in_order(ids):
                return None
        whole: dict[int, memoryview] = {}
        reached = first
        for i, (offset, nbytes) in zip(ids.tolist(), fields[ids].tolist(), strict=True):
            has_end = self._codec in FRAME_CODECS and self._codec != "lz4"
            if has_end and offset + nbytes not in self._ends(offset):
                continue  # zlib ignores bytes behind a frame
            if self.is_whole("", offset, nbytes):
                if offset < reached:
                    return None
                whole[i], reached = self.data[offset : offset + nbytes], offset + nbytes
        if self.is_proving and not is_cut:
            # A damaged offset may be that of another frame of the same size.
            is_known = np.pad(missing, 1, constant_values=True)
            is_known[np.fromiter(whole, np.intp, len(whole)) + 1] = True
            is_ordered = len(self.frames) <= np.count_nonzero(possible)
            is_ordered &= self._is_in_order(np.fromiter(whole, np.intp, len(whole)))
            sizes = Counter(stop - start for start, stop in self.frames)
            for i in list(whole):
                is_sure = is_ordered and is_known[i] and is_known[i + 2]
                if sizes[len(whole[i])] != 1 and not is_sure:
                    del whole[i]
        return whole, set(np.flatnonzero(missing).tolist())

    def _is_in_order(self, ids: npt.NDArray[np.intp]) -> bool:
        """Whether entries are in an order in which writers store them."""
        cps = self.spec.chunks_per_shard
        return any(np.array_equal(ids, order_entries(ids, cps, order)) for order in _ORDERS)

    def _named_by_cut_index(self) -> _Named | None:
        """Return the same for an index of which the first entries are left."""
        size, spec = len(self.data), self.spec
        lowest = max(0, size - spec.index_nbytes + 1)
        starts: Sequence[int] = []
        if self.is_proving and self.frames:
            end = self.frames[-1][1]
            after = np.flatnonzero(np.frombuffer(self.data[end:], np.uint8))
            first = end + int(after[0]) if len(after) else end
            starts = [end] if first - end < ENTRY_NBYTES else range(first - 15, first + 1)
        elif self.exact and not self.is_proving:
            starts = range(-(-lowest // self.exact) * self.exact, size, self.exact)
        found = []
        for start in starts:
            n = min(self.n, (size - start) // ENTRY_NBYTES)
            if start < lowest or not n:
                continue
            fields = self._fields_at(start, n)
            missing = (fields == MISSING).all(axis=1)
            possible = self._is_possible(fields, start)
            if self.is_proving:
                is_named = self._frames_of(fields) >= 0
            else:
                is_named = possible = possible & (fields[:, 0] % (self.exact or 1) == 0)
                before = self._fields_at(max(0, start - ENTRY_NBYTES), 1)
                if (before == MISSING).all() or self._is_possible(before, size)[0]:
                    continue  # the index begins further in front
            is_first = missing[0] or is_named[0]
            if is_first and is_named.any() and (possible | missing).all():
                found.append((start, fields))
        # If bytes in the middle are gone, later entries follow, and the checksum at the end.
        tail_nbytes = CHECKSUM_NBYTES * spec.index.checksum
        if len(found) != 1 or (size - found[0][0]) % ENTRY_NBYTES == tail_nbytes:
            return None
        return self._named_by(*found[0], is_cut=True)

    def _older_indexes(self) -> Iterator[ShardIndex]:
        """Yield whole indexes in the data, the last one first."""
        spec, size, n = self.spec, len(self.data), self.n
        n_starts = size - spec.index_nbytes + 1
        if not self.at_end or n_starts <= 0:
            return
        order = spec.index.byte_order
        words = np.ndarray((size - 7,), f"{order}u8", self.data, strides=(1,))
        tops = np.frombuffer(self.data, np.uint8)[15 if order == "<" else 8 :]
        n_left = min(_MAX_CHANGES, _MAX_CHECKED_NBYTES // spec.index_nbytes)
        for high in range(n_starts, 0, -_STEP_NBYTES):
            low = max(0, high - _STEP_NBYTES)
            # The first byte of a size is 0, or 255 of a missing entry.
            starts = low + np.flatnonzero(tops[low:high] + np.uint8(1) <= 1)
            for slot in sorted({0, n // 3, 2 * n // 3, n - 1}):
                after = words[starts + (slot * ENTRY_NBYTES + 8)] + np.uint64(1)  # 0: missing
                if self.exact is not None:
                    starts = starts[(after == 0) | (after == self.exact + 1)]
                else:
                    starts = starts[(after <= size) & (after != 1)]
            for start in starts[::-1].tolist():
                n_left -= 1
                if n_left < 0:
                    return
                index = self._index_at(start)
                if index is not None:
                    yield index

    def _index_at(self, start: int) -> ShardIndex | None:
        n_body = self.n * ENTRY_NBYTES
        if self.spec.index.checksum:
            stop = start + n_body
            stored = int.from_bytes(self.data[stop : stop + CHECKSUM_NBYTES], "little")
            if crc32c.crc32c(self.data[start:stop]) != stored:
                return None
        fields = self._fields_at(start, self.n)
        present = (fields != MISSING).any(axis=1)
        if not present.any() or not self._is_possible(fields[present], start).all():
            return None
        if not self.spec.index.checksum:
            if not self.is_proving:
                return None
            named = self._named_by(start, fields) if self._begins_at(start, fields) else None
            if named is None or len(named[0]) < np.count_nonzero(present):
                return None
        return ShardIndex(fields)


def _flipped_bit(wrong: int, n_bits: int) -> int | None:
    """Return the bit of a message whose flip changes its crc32c by `wrong`; ``None``: none does."""
    effect = _POLYNOMIAL  # of the last bit
    for bit in range(n_bits - 1, max(-1, n_bits - 1 - _MAX_BITS), -1):
        if effect == wrong:
            return bit
        effect = effect >> 1 ^ (_POLYNOMIAL if effect & 1 else 0)
    return None
