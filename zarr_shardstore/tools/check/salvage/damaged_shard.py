"""Bytes of a damaged shard, the frames in them, and the orders in which writers store chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import chunk_keys, layouts, shard_format, stacks
from zarr_shardstore.tools.check.objects import ArrayChecker
from zarr_shardstore.tools.check.salvage.frames import (
    FRAME_CODECS,
    can_search,
    frame_ends,
    next_frame,
)

_PROVING = FRAME_CODECS | {"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"}
"""Codecs that refuse nearly all bytes but those that they have encoded."""

_MAX_MISSES = 1 << 12
"""Places that look like the begin of a frame, and are none."""

ORDERS: tuple[shard_format.EntryOrder, ...] = ("morton", "C", "F")
"""Morton order of zarr-python and this package, C order of tensorstore and zarrs."""

Index: TypeAlias = shard_format.ShardIndex
Spec: TypeAlias = shard_format.ShardingSpec

Fields: TypeAlias = npt.NDArray[np.uint64]
"""Offset and size of entries, as in an index."""


def is_missing(fields: Fields) -> npt.NDArray[np.bool_]:
    missing: npt.NDArray[np.bool_] = (fields == shard_format.MISSING).all(axis=1)
    return missing


def orders_of(ids: npt.NDArray[np.intp], cps: chunk_keys.Coords) -> list[shard_format.EntryOrder]:
    """Return the orders that entries are in; `ids` are sorted by the place of their bytes."""
    ordered = {order: shard_format.order_entries(ids, cps, order) for order in ORDERS}
    return [order for order, expected in ordered.items() if np.array_equal(ids, expected)]


@dataclass(slots=True)
class Salvage:
    """Result for one shard."""

    entries: dict[int, memoryview] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Entries of an index whose chunk is damaged. Without a valid index all others of the grid."""
    text: str = "its index is valid"
    """Source of the entries."""
    older: list[int] = field(default_factory=list)
    """Entries that an older index names: their chunks may have been replaced since."""
    n_unnamed: int = 0
    """Chunks that seem whole, but may be any of the lost ones."""


class DamagedShard:
    """One shard and its bytes. Pure but for the decoding of chunks."""

    def __init__(self, checker: ArrayChecker, shard: layouts.ShardRef, data: memoryview) -> None:
        self.checker, self.shard, self.data = checker, shard, data
        self.spec, self.exact = shard.spec, checker.exact_nbytes
        self.n, self.at_end = self.spec.n_entries, self.spec.index.location == "end"
        self.first = 0 if self.at_end else self.spec.index_nbytes
        """Offset at which the data begin."""
        self.index_start = len(data) - self.spec.index_nbytes if self.at_end else 0
        """Offset of the index, unless bytes are gone; negative if the shard is shorter."""
        self.data_stop = self.index_start if self.at_end else len(data)
        """Offset at which the data end, with a gap, unless bytes are gone."""
        names = [name.removeprefix("numcodecs.") for name in checker.codecs or ()]
        above = [type(each) is stacks.Crc32cTransformer for each in checker.above]
        self.is_proving = not _PROVING.isdisjoint(names) or any(above)
        n_outer = len(above)
        while names and names[-1] == "crc32c":
            names.pop()
            n_outer += 1
        self._tail_nbytes = shard_format.CHECKSUM_NBYTES * n_outer if all(above) else None
        self.codec = names[-1] if names else ""
        self._header_nbytes = checker.nbytes if len(names) == 1 else None

    def is_whole(self, key: str, start: int, nbytes: int) -> bool:
        """Whether the bytes of a place are a chunk. Raw chunks show no damage."""
        if self.exact not in (None, nbytes) or not 0 <= start <= start + nbytes <= len(self.data):
            return False
        return self.checker.problem_of(key, self.data[start : start + nbytes]) is None

    def fields_at(self, start: int, n: int) -> Fields:
        body = self.data[start : start + n * shard_format.ENTRY_NBYTES]
        order = shard_format.BYTE_ORDERS[self.spec.index.endian]
        return np.frombuffer(body, f"{order}u8").reshape(-1, 2).astype(np.uint64)

    def is_possible(self, fields: Fields, data_stop: int) -> npt.NDArray[np.bool_]:
        """Whether each entry lies in the data, and has a length that chunks may have."""
        offsets, nbytes = fields.T
        stop = np.uint64(data_stop)
        found: npt.NDArray[np.bool_] = (nbytes <= stop) & (offsets >= self.first)
        found &= offsets <= stop - np.minimum(nbytes, stop)
        found &= nbytes == self.exact if self.exact is not None else nbytes > 0
        return found

    # --------------------------------------------------------------------------- frames

    @cached_property
    def frames(self) -> list[tuple[int, int]]:
        """Half-open ranges of the frames that decode; of raw chunks if these fill the data."""
        if self.exact and not self.is_proving:
            n_frames, rest = divmod(self.data_stop - self.first, self.exact)
            if rest or n_frames > self.n:
                return []
            starts = [self.first + i * self.exact for i in range(n_frames)]
            return [(start, start + self.exact) for start in starts]
        return self._frames_and_misses[0]

    def has_all_frames(self, stop: int) -> bool:
        """Whether `frames` has every frame before `stop`. If the codec has no magic number, a frame
        after other bytes is not found."""
        frames, misses = self._frames_and_misses
        if can_search(self.codec, self._header_nbytes):
            return misses < _MAX_MISSES
        end = frames[-1][1] if frames else self.first
        return self.is_blank(end, stop)

    def is_blank(self, start: int, stop: int) -> bool:
        return not np.frombuffer(self.data[start : max(start, stop)], np.uint8).any()

    @cached_property
    def _frames_and_misses(self) -> tuple[list[tuple[int, int]], int]:
        found: list[tuple[int, int]] = []
        misses, at = 0, self.first
        while 0 <= at < len(self.data) and misses < _MAX_MISSES:
            end = next((end for end in self.ends(at) if self.is_whole("", at, end - at)), None)
            if end is None:
                misses += 1
                new = next_frame(self.codec, self.data, at + 1, self._header_nbytes)
                at = -1 if new is None else new
            else:
                found.append((at, end))
                at = end
        return found, misses

    def ends(self, start: int) -> Iterator[int]:
        """Yield the offsets at which a frame from `start` may end."""
        if not self.is_proving or self._tail_nbytes is None:
            return
        if not self.codec and self.exact is not None:
            yield start + self.exact
        elif self.codec in FRAME_CODECS:
            tail = self._tail_nbytes
            yield from frame_ends(self.codec, self.data, start, self._header_nbytes, tail)
            if self.codec == "lz4" and self.at_end:
                yield self.index_start

    def frames_of(self, fields: Fields) -> npt.NDArray[np.intp]:
        """Return the number of the frame that each entry names; -1: none."""
        if not self.frames:
            return np.full(len(fields), -1)
        places = np.array(self.frames, dtype=np.uint64)
        at = np.searchsorted(places[:, 0], fields[:, 0]) % len(places)
        is_named = (places[at, 0] == fields[:, 0]) & (places[at, 1] - places[at, 0] == fields[:, 1])
        return np.where(is_named, at, -1)

    # ------------------------------------------------------------------- whole indexes

    def is_in_place(self, fields: Fields) -> bool:
        """Whether an index at the end of the file seems to begin where the data end.

        If bytes were taken out of an index, or put in, its entries describe other chunks.
        """
        size = self.data_stop
        is_possible = self.is_possible(fields, size) | is_missing(fields)
        if not self.at_end or (self.frames and self.frames[-1][1] > size):
            return not self.at_end
        if is_possible.all() and not self.spec.index.checksum:
            end = self.frames[-1][1] if self.frames else size + 1
            n = (size - end) // shard_format.ENTRY_NBYTES  # entries that may lie before these
            before = self.fields_at(end, max(0, n))
            is_possible = self.is_possible(before, size) | is_missing(before)
            if (size - end) % shard_format.ENTRY_NBYTES or not is_possible.all():
                return True
        n_present = np.count_nonzero(~is_missing(fields))
        return (self.exact or 0) * n_present == size or self.begins_at(size, fields)

    def begins_at(self, start: int, fields: Fields) -> bool:
        """Whether the chunks of an index at `start`, or frames, or a gap, end there."""
        possible = self.is_possible(fields, start)
        end = int(fields[possible].sum(axis=1).max(initial=0))
        is_first = bool(possible[0] or is_missing(fields[:1])[0])
        if self._is_moved(start) or not fields[0].any():  # the index was cut, after a gap
            return False
        if end == start or any(stop == start for _, stop in self.frames):
            # The end of the last frame of lz4 is not known: it may begin here.
            return bool(possible.any()) and (is_first or self.codec != "lz4")
        return start - end >= shard_format.ENTRY_NBYTES and self.is_blank(end, start) and is_first

    def _is_moved(self, start: int) -> bool:
        """Whether entries half an entry before or after an index name as many frames."""
        half = shard_format.ENTRY_NBYTES // 2
        n_before, n_here, n_after = (
            int((self.frames_of(self.fields_at(max(0, at), self.n - 1)) >= 0).sum())
            for at in (start - half, start, start + half)
        )
        return max(n_before, n_after) >= max(1, n_here)

    def through(self, index: Index, spec: Spec, *, without: Collection[int] = ()) -> Salvage:
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

    def add_moved(self, found: Salvage, index: Index, spec: Spec) -> None:
        """Add the chunks after bytes that were put in or taken out. The entries of a right index
        filled the data: these chunks have moved by the difference in length.

        An erased last chunk makes that difference wrong, and so does a gap. A missing entry may be
        an erased chunk, and in a gap there is no last chunk.
        """
        first = spec.index_nbytes if spec.index.location == "start" else 0
        places = {i: tuple(index.fields[i].tolist()) for i in index.present_ids().tolist()}
        end = max((start + nbytes for start, nbytes in places.values()), default=0)
        n_more = len(self.data) - (spec.index_nbytes - first) - end
        is_packed = first + sum(nbytes for _, nbytes in places.values()) == end
        sizes = {nbytes for _, nbytes in places.values()}
        is_other_frame = len(sizes) == 1 and n_more % sizes.pop() == 0
        is_full = is_packed and len(places) == spec.n_entries
        if not (n_more and self.is_proving and is_full) or is_other_frame:
            return
        reached = max((sum(places[i]) for i in found.entries), default=first)
        starts = {start for start, _ in places.values()}
        for i in sorted(found.lost, key=lambda i: places[i], reverse=True):
            start, nbytes = places[i][0] + n_more, places[i][1]
            is_free = start not in starts and (start >= reached or not found.entries)
            if not is_free or not self.is_whole(self.shard.chunk_key(i), start, nbytes):
                break
            found.entries[i] = self.data[start : start + nbytes]
            found.lost.remove(i)
            found.text = "its index is valid; bytes before some chunks were put in or taken out"
