"""Plan of an epoch: the parts of chunks that each sample consists of, and units of reads; pure.

A sample is a box of an array, or of a sparse matrix a row, which is a run of elements. A *part* is
what one chunk contributes to one sample. A *unit* is a number of chunks that are read and decoded
together, with the parts that samples need of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import box_grids
from zarr_shardstore.interop.loader.order import Draw, Ints, cut

UNIT_NBYTES = 8 * 1024 * 1024
"""Decoded size of a unit over a network: 32 at a time fill a connection of 10 Gbit/s."""

GAPS_NBYTES = 4 * 1024 * 1024
"""Memory for the bytes between the chunks of a unit, which a read takes along."""

LOCAL_UNIT_NBYTES = 2 * 1024 * 1024
"""Decoded size of a unit of local files: it is decoded while it is in the cache of the core."""

PART_NBYTES = 100
"""Memory of the plan for one part."""

BATCH_NBYTES = 1024
"""Memory for each array of a batch, on top of its elements."""

_LEAST_NBYTES = 64 * 1024
"""Chunks that are smaller cost more requests and steps than they save."""

SMALL_NBYTES = 8 * 1024
"""Smaller rows are copied many at a time."""

_ENTRY_NBYTES = 512
"""Memory for a chunk that is read, on top of its decoded size."""


class PlannedSamples(NamedTuple):
    """Samples in the order of an epoch, of one or more groups."""

    starts: Ints
    """Starts of the samples, n x sampled axes."""
    positions: Ints
    groups: Ints
    batches: Ints
    slots: Ints
    """Place of each sample in the order, its group and batch, and its first row in the batch."""
    turns: Ints
    """Ascending numbers in a group: chunks come by the first turn of their samples."""


class Parts(NamedTuple):
    """Parts of samples, ordered by chunk."""

    batches: Ints
    slots: Ints
    """Batch of each part, and the first row of its sample in the batch."""
    pieces: Ints
    """Ascending numbers of the pieces: chunks that are decoded at a time."""
    places: Ints
    """Place of the chunk of each part in its piece."""
    positions: Ints
    """Place of the sample of each part in the order."""
    offsets: Ints
    """Start of each sample relative to that of the chunk, n x ndim."""
    n_rows: Ints
    """Rows of each sample in the batch."""


class Unit(NamedTuple):
    """Chunks of one array, and the parts that samples need of them."""

    array: int
    group: int
    numbers: list[int]
    """Ascending numbers of the batches of these samples."""
    reads: list[tuple[tuple[int, ...], Ints]]
    """Coordinates of each shard, and of its chunks, n x ndim, each once."""
    n_chunks: int
    parts: Parts
    """All parts of the plan."""
    part_range: range
    """The parts of this unit."""
    copies: list[Ints]
    """Columns of the copies of the parts, see `Geometry.copies`."""


@dataclass(frozen=True)
class Geometry:
    """Shape of an array, of its chunks and of its samples."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    itemsize: int
    axes: tuple[int, ...]
    """The sampled axes."""
    lengths: tuple[int, ...]
    """Shape of a sample, with all axes."""
    shards: box_grids.BoxGrid
    """Cut of the grid of chunks into shards. Without shards each chunk counts as one."""
    n_in_piece: int
    """Chunks of a unit that are decoded at a time."""
    joins_rows: bool = field(default=True, kw_only=True)
    """False: numpy would store texts that are copied many at a time twice."""
    indptr: Ints | None = field(default=None, kw_only=True)
    """Of a sparse matrix: the first element of each row, and the end of the last row."""

    @property
    def extent(self) -> tuple[int, ...]:
        """Size along the sampled axes."""
        if self.indptr is not None:
            return (len(self.indptr) - 1,)
        return tuple([self.shape[axis] for axis in self.axes])

    def elements(self, starts: Ints) -> Ints:
        """Return the first element of each sample along the sampled axes."""
        return starts if self.indptr is None else self.indptr[starts]

    def n_rows(self, starts: Ints) -> Ints:
        """Return the rows of each sample in the array of a batch: one, or its elements."""
        if self.indptr is None:
            return np.ones(len(starts), np.int64)
        return self.indptr[starts[:, 0] + 1] - self.indptr[starts[:, 0]]

    def rows_before(self, starts: Ints) -> Ints:
        """Return the rows of all samples before each, and of all."""
        return np.append(0, np.cumsum(self.n_rows(starts)))

    @property
    def chunk_nbytes(self) -> int:
        return max(1, math.prod(self.chunk_shape) * self.itemsize)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a sample, or of an element of a sparse matrix."""
        return math.prod(self.lengths) * self.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Decoded size of the largest shard."""
        return self.chunk_nbytes * math.prod(self.shards.largest)

    @property
    def grid(self) -> tuple[int, ...]:
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        return tuple([-(-n // side) if side else 0 for n, side in pairs])

    @property
    def n_parts(self) -> int:
        """Number of chunks that a sample may touch; a row of a sparse matrix seldom more."""
        if self.indptr is not None:
            return 2
        sides = zip(self.lengths, self.chunk_shape, self.grid, strict=True)
        return math.prod(min(n, (length + side - 2) // side + 1) for length, side, n in sides if n)

    @property
    def are_rows(self) -> bool:
        """Whether samples are rows of chunks that have whole rows."""
        return self.axes == (0,) and self.lengths[0] == 1 and not any(n > 1 for n in self.grid[1:])

    def places(self, chunks: Ints, axes: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Return coordinates of the shards of chunks along some axes, and C-order numbers of the
        shards and of the chunks."""
        shards, numbers = np.empty_like(chunks), np.zeros((2, len(chunks)), np.int64)
        for i, axis in enumerate(axes):
            distinct, inverse = np.unique(chunks[:, i], return_inverse=True)
            of_axis = [self.shards.number(axis, at) for at in distinct.tolist()]
            shards[:, i] = np.array(of_axis, np.int64)[inverse]
            numbers = numbers * self.grid[axis] + (shards[:, i], chunks[:, i])
        return shards, *numbers

    def units(self, array: int, samples: PlannedSamples, unit_nbytes: int) -> Iterator[Unit]:
        """Yield units with all parts of samples.

        Chunks come group by group, by their first turn, and then shard by shard. A small shard is
        in one unit.
        """
        if not self.row_nbytes:
            return
        n_rows = self.n_rows(samples.starts)
        chunks, sample_of, offsets = self._parts_of(self.elements(samples.starts), n_rows)
        if not len(chunks):
            return
        shards, shard, chunk = self.places(chunks, range(len(self.shape)))
        group, turn = samples.groups[sample_of], samples.turns[sample_of]
        if turn.any():
            key = group * (chunk.max() + 1) + chunk
            _, first_of, inverse = np.unique(key, return_index=True, return_inverse=True)
            turn = turn[first_of][inverse]
        order = np.lexsort((chunk, shard, turn, group))
        sample_of = sample_of[order]
        is_new = np.diff(group[order], prepend=-1) != 0
        is_chunk = is_new | (np.diff(chunk[order], prepend=-1) != 0)
        is_shard = (is_new | (np.diff(shard[order], prepend=-1) != 0))[is_chunk]
        chunks, shards = chunks[order[is_chunk]], shards[order[is_chunk]]

        numbers, bounds = np.arange(len(chunks)), np.append(np.flatnonzero(is_chunk), len(order))
        at_groups = np.flatnonzero(is_new[is_chunk])
        begins = np.union1d(at_groups, self._cut(is_shard, unit_nbytes))
        at = numbers - np.repeat(begins[:-1], np.diff(begins))
        pieces = np.cumsum(at % self.n_in_piece == 0)
        chunk_of = np.repeat(numbers, np.diff(bounds))
        parts, copies = self.copies(
            Parts(
                batches=samples.batches[sample_of],
                slots=samples.slots[sample_of],
                pieces=pieces[chunk_of],
                places=(at % self.n_in_piece)[chunk_of],
                positions=samples.positions[sample_of],
                offsets=offsets[order],
                n_rows=n_rows[sample_of],
            )
        )

        is_shard[begins[:-1]] = True
        ends = np.append(np.flatnonzero(is_shard), len(chunks))
        at_shards = zip(shards[is_shard].tolist(), pairwise(ends.tolist()), strict=True)
        reads = [(tuple(shard), chunks[a:b]) for shard, (a, b) in at_shards]
        of_units = (begins, ends.searchsorted(begins), copies[0].searchsorted(bounds[begins]))
        groups = iter(group[order[is_chunk]][begins[:-1]].tolist())
        for i, j, k in zip(*[pairwise(each.tolist()) for each in of_units], strict=True):
            some, of_parts = [each[slice(*k)] for each in copies], range(*bounds[[*i]].tolist())
            batches, n = sorted({*some[2].tolist()}), i[1] - i[0]
            yield Unit(array, next(groups), batches, reads[slice(*j)], n, parts, of_parts, some)

    def _parts_of(self, starts: Ints, n_rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Return for each part of samples: its chunk, its sample, and the start of the sample
        relative to that of the chunk."""
        ndim, n = len(self.shape), len(starts)
        sides, lengths = np.array(self.chunk_shape, np.int64), np.array(self.lengths, np.int64)
        full = np.zeros((n, ndim), np.int64)
        full[:, list(self.axes)] = starts
        if self.indptr is not None:
            lengths = n_rows[:, None]
        first = full // sides
        counts = np.where(lengths, (full + lengths - 1) // sides - first + 1, 0)
        n_each = counts.prod(axis=1)
        sample_of = np.repeat(np.arange(n), n_each)
        chunks, steps = first[sample_of], np.arange(len(sample_of))
        steps -= np.repeat(np.cumsum(n_each) - n_each, n_each)
        for axis in reversed(range(ndim)):
            steps, more = np.divmod(steps, counts[sample_of, axis])
            chunks[:, axis] += more
        return chunks, sample_of, full[sample_of] - chunks * sides

    def _cut(self, is_shard: npt.NDArray[np.bool_], unit_nbytes: int) -> list[int]:
        """Return the ends of units of chunks, of which some begin a shard."""
        numbers = np.arange(len(is_shard))
        most = max(1, unit_nbytes // max(self.chunk_nbytes, 2 * _ENTRY_NBYTES))
        n = math.prod(self.shards.largest)
        # A store that is asked for more than half of a shard may read all of it.
        most = max(1, min(most, n // 2)) if n > most else most
        return cut(np.cumsum(is_shard), numbers, np.ones_like(numbers), most)

    def copies(self, parts: Parts) -> tuple[Parts, list[Ints]]:
        """Return parts in the order of their copies, and columns with a row for each copy.

        Each copy has its first part, a piece, a batch and the first slot. Rows that follow each
        other, or are small, are copied together: the first row in the piece, the number of rows,
        and whether they follow each other. Boxes: the chunk in the piece, and the offset.
        """
        numbers = np.arange(len(parts.slots))
        if not self.are_rows:
            return parts, [numbers, *(parts[i] for i in (2, 0, 1, 3, 5))]
        side, offsets = self.chunk_shape[0], parts.offsets[:, 0]
        starts, stops = np.maximum(offsets, 0), np.minimum(offsets + parts.n_rows, side)
        parts = parts._replace(
            places=parts.places * side + starts,
            slots=parts.slots + starts - offsets,
            n_rows=stops - starts,
        )
        joins = self.joins_rows and self.indptr is None
        are_small = joins and self.row_nbytes < SMALL_NBYTES
        if are_small:  # a stable order: rows of one batch keep theirs
            order = np.lexsort((parts.batches, parts.pieces))
            parts = Parts(*[each[order] for each in parts])
        steps = [np.diff(each, prepend=-1) for each in parts[:4]]
        is_first = (steps[0] != 0) | (steps[2] != 0)
        befores = np.append(0, parts.n_rows[:-1])
        is_jump = is_first | (steps[1] != befores) | (steps[3] != befores)
        if not are_small:
            is_first = is_jump
        jumps, firsts = np.cumsum(is_jump), np.flatnonzero(is_first)
        n_each = np.add.reduceat(parts.n_rows, firsts)
        are_runs = np.diff(jumps[firsts], append=jumps[-1] + 1) == 1
        found = [each[firsts] for each in (parts.pieces, parts.batches, parts.slots, parts.places)]
        return parts, [firsts, *found, n_each, are_runs]

    def corners(self, offsets: Ints) -> tuple[Ints, Ints]:
        """Return the first and the last corner of parts: in their chunks, and in their samples."""
        ends = np.minimum(offsets + np.array(self.lengths, np.int64), self.chunk_shape)
        in_chunks = np.stack([np.maximum(offsets, 0), ends], axis=1)
        return in_chunks, in_chunks - offsets[:, None]

    def reserved_nbytes(self, unit: Unit) -> int:
        """Return a bound of the encoded bytes of a unit, with the gaps that are read along."""
        nbytes = unit.n_chunks * (self.chunk_nbytes + _ENTRY_NBYTES)
        return nbytes + max(nbytes, GAPS_NBYTES)


class LoaderPlan(NamedTuple):
    """Figures of one epoch of one rank, before it is read.

    Parameters
    ----------
    n_samples, n_batches, n_shards, n_chunks, n_requests : int
        Samples, batches, and what is read: shards, chunks (one that is read again counts again),
        and requests to an object store. An index that is not cached is one request more.
    nbytes_read, nbytes_delivered, peak_nbytes : int
        Encoded bytes of the chunks, bytes of the batches, and the bound of the memory, with two
        batches that you have.
    read_amplification : float
        Decoded bytes of the chunks for each byte of a batch: 1 if no element is decoded in vain.
    pool_shards : float
        Shards that are shuffled together with ``shuffle="shards"``, k in the formula for mixing.
    advice : list of str
        Sizes of chunks and shards that would be better, in elements along each axis.
    """

    n_samples: int
    n_batches: int
    n_shards: int
    n_chunks: int
    n_requests: int
    nbytes_read: int
    nbytes_delivered: int
    peak_nbytes: int
    read_amplification: float
    pool_shards: float
    advice: list[str]


def advice_of(first: Geometry, amplification: float, draw: Draw, shard_nbytes: int) -> list[str]:
    """Return advice as sentences with numbers.

    Chunks have about 1 MiB, and 64 KiB at least, shards 8 MiB, and the pool 16 to 64 shards. An
    array that fits in the pool needs none of this.
    """
    better, nbytes, found = list(first.chunk_shape), first.chunk_nbytes, []
    lengths, pool_nbytes = first.lengths, draw.pool_nbytes
    if first.indptr is not None:
        lengths = (first.shape[0] // max(1, len(first.indptr) - 1),)
    if amplification > 1.25:
        better = [max(1, min(pair)) for pair in zip(better, lengths, strict=True)]
        n = math.prod(better) * first.itemsize
        if n < _LEAST_NBYTES and first.axes:
            axis = first.axes[0]
            better[axis] = min(first.chunk_shape[axis], -(-better[axis] * _LEAST_NBYTES // n))
        if tuple(better) == first.chunk_shape and draw.shuffle != "shards":
            found.append(
                f"{amplification:.1f} bytes are decoded for each byte of a batch: "
                'shuffle="shards" decodes each chunk of the first array once'
            )
    elif math.prod(first.shape) * first.itemsize <= pool_nbytes:
        return []
    elif first.axes and not _LEAST_NBYTES <= nbytes <= 2**24:
        axis = first.axes[0]
        better[axis] = max(1, min(first.shape[axis], better[axis] * 2**20 // nbytes))
    if tuple(better) != first.chunk_shape:
        found.append(
            f"chunks of {tuple(better)} in place of {first.chunk_shape}, which have {nbytes:,} "
            f"bytes; {amplification:.1f} bytes are decoded for each byte of a batch"
        )
    most = max(1, pool_nbytes // 16)
    if not min(2**23, most // 4) <= shard_nbytes <= most or math.prod(first.shards.largest) == 1:
        n = max(1, min(2**23, most) // max(1, math.prod(better) * first.itemsize))
        found.append(
            f"shards of about {n} chunks: now the pool has {pool_nbytes / shard_nbytes:.1f} "
            f"shards of {shard_nbytes:,} bytes"
        )
    return found
