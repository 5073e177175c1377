"""Plan of an epoch: the parts of chunks that each sample consists of, and units of reads; pure.

A sample is a box of an array. A *part* is what one chunk contributes to one sample. A *unit* is a
number of chunks that are read together: shard by shard, of at most `UNIT_NBYTES` decoded bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zarr_shardstore.access import box_grids
from zarr_shardstore.interop.loader.order import Ints

UNIT_NBYTES = 4 * 1024 * 1024
"""Decoded size of the chunks of one read: 64 of them at a time fill a connection of 10 Gbit/s."""

RUN_NBYTES = 1024 * 1024
"""Decoded size of the chunks that one thread decodes at a time."""

PART_NBYTES = 100
"""Memory of the plan for one part."""

_MOST_SPANS = 64
"""Spans of a read from which on a store reads gaps along."""


class Parts(NamedTuple):
    """Parts of the samples of one group in one array, ordered by the chunks that have them."""

    chunks: Ints
    """Coordinates of the chunks, n x ndim, each once."""
    shards: Ints
    """Coordinates of their shards."""
    bounds: Ints
    """The parts of chunk ``i`` are ``bounds[i]`` to ``bounds[i + 1]``."""
    batches: Ints
    """Batch of the sample of each part."""
    slots: Ints
    """Position of the sample in its batch."""
    offsets: Ints
    """Start of the sample relative to the start of the chunk, parts x ndim."""


@dataclass(eq=False)
class Unit:
    """Chunks that are read together."""

    array: int
    parts: Parts
    cuts: list[int]
    """Chunks ``cuts[i]`` to ``cuts[i + 1]`` are of one shard."""
    reserved: int
    """Bound of the encoded bytes in memory; the bytes themselves when they are read."""
    batches: list[int] = field(init=False)
    """Ascending numbers of the batches that have parts of the chunks."""
    reads_here: bool = True
    """Whether a thread of the loader reads it, not an event loop."""
    n_runs: int = 0
    """Runs of chunks that are not decoded."""
    future: Future[Any] | None = None
    """Result of a read in an event loop."""

    def __post_init__(self) -> None:
        self.batches = np.unique(self.parts.batches[slice(*self.bounds)]).tolist()

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last part."""
        return int(self.parts.bounds[self.cuts[0]]), int(self.parts.bounds[self.cuts[-1]])

    def reads(self) -> list[tuple[tuple[int, ...], Ints]]:
        """Return the coordinates of each shard, and of its chunks."""
        parts, pairs = self.parts, zip(self.cuts, self.cuts[1:], strict=False)
        return [(tuple(parts.shards[lo].tolist()), parts.chunks[lo:hi]) for lo, hi in pairs]


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
    shards: box_grids.BoxGrid | None
    """Cut of the grid of chunks into shards; ``None``: each chunk counts as one."""

    @property
    def chunk_nbytes(self) -> int:
        return max(1, math.prod(self.chunk_shape) * self.itemsize)

    @property
    def sample_nbytes(self) -> int:
        return math.prod(self.lengths) * self.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        return tuple([-(-n // side) if side else 0 for n, side in pairs])

    @property
    def n_parts(self) -> int:
        """Number of chunks that a sample may touch."""
        sides = zip(self.lengths, self.chunk_shape, self.grid, strict=True)
        return math.prod(min(n, (length + side - 2) // side + 1) for length, side, n in sides if n)

    @property
    def are_rows(self) -> bool:
        """Whether samples are rows of chunks that have whole rows."""
        others = range(1, len(self.shape))
        is_first = self.axes == (0,) and self.lengths[0] == 1
        return is_first and all(self.grid[d] == 1 for d in others)

    def shard_numbers(self, axis: int, chunks: Ints) -> Ints:
        """Return the numbers of the shards of chunks along one axis."""
        if self.shards is None:
            return chunks
        side = self.shards.sides[axis]
        if isinstance(side, int):
            return chunks // side
        distinct, inverse = np.unique(chunks, return_inverse=True)
        numbers = [self.shards.number(axis, at) for at in distinct.tolist()]
        return np.array(numbers, np.int64)[inverse]

    def cells(self, starts: Ints, axes: Sequence[int]) -> tuple[Ints, Ints]:
        """Return a number of the shard, and of the chunk, in which each sample starts.

        Only the positions along some of the sampled axes count.
        """
        cells = pieces = np.zeros(len(starts), np.int64)
        for i in axes:
            axis = self.axes[i]
            chunks = starts[:, i] // self.chunk_shape[axis]
            cells = cells * (self.grid[axis] + 1) + self.shard_numbers(axis, chunks)
            pieces = pieces * (self.grid[axis] + 1) + chunks
        return cells, pieces

    def parts(self, starts: Ints, batches: Ints, slots: Ints, block: int) -> Parts:
        """Return the parts of samples at these starts, n x sampled axes.

        Chunks come shard by shard; first those that the next `block` samples need.
        """
        ndim, n = len(self.shape), len(starts)
        full = np.zeros((n, ndim), np.int64)
        full[:, list(self.axes)] = starts
        sides, lengths = np.array(self.chunk_shape, np.int64), np.array(self.lengths, np.int64)
        if not n or self.sample_nbytes == 0:
            none = np.zeros((0, ndim), np.int64)
            return Parts(none, none, np.zeros(1, np.int64), batches[:0], slots[:0], none)
        first, last = full // sides, (full + lengths - 1) // sides
        spans = (last - first).max(axis=0) + 1
        steps = np.array([*np.ndindex(*spans)], np.int64).reshape(math.prod(spans.tolist()), ndim)
        sample_of = np.repeat(np.arange(n), len(steps))
        chunks = first[sample_of] + np.tile(steps, (n, 1))
        is_there = (chunks <= last[sample_of]).all(axis=1)
        chunks, sample_of = chunks[is_there], sample_of[is_there]
        shards = np.empty_like(chunks)
        for axis in range(ndim):
            shards[:, axis] = self.shard_numbers(axis, chunks[:, axis])
        flat, shard = (_flat(each, self.grid) for each in (chunks, shards))
        distinct, inverse = np.unique(flat, return_inverse=True)
        soonest = np.full(len(distinct), n, np.int64)
        np.minimum.at(soonest, inverse, sample_of // max(1, block))
        order = np.lexsort((sample_of, flat, shard, soonest[inverse]))
        is_new = np.diff(flat[order], prepend=-1) != 0
        firsts = order[is_new]
        bounds = np.append(np.flatnonzero(is_new), len(order))
        sample_of = sample_of[order]
        offsets = full[sample_of] - chunks[order] * sides
        of_parts = (batches[sample_of], slots[sample_of], offsets)
        return Parts(chunks[firsts], shards[firsts], bounds, *of_parts)

    def units(self, array: int, parts: Parts, unit_nbytes: int) -> Iterator[Unit]:
        """Cut the chunks of a group into units. A small shard is in one of them."""
        n, size = len(parts.chunks), self.chunk_nbytes
        is_end = (parts.shards[1:] != parts.shards[:-1]).any(axis=1)
        ends = [*(np.flatnonzero(is_end) + 1).tolist(), n] if n else []
        most = max(1, unit_nbytes // size)
        cuts = [0]
        for end in ends:
            n_units = -(-(end - cuts[-1]) // most)
            if end - cuts[0] > most and len(cuts) > 1:
                yield self._unit(array, parts, cuts)
                cuts = cuts[-1:]
            # Of two parts of a shard one would be most of it, for which a store may read all of it.
            length = -(-(end - cuts[-1]) // (3 if n_units == 2 else n_units))
            while end - cuts[-1] > length:
                yield self._unit(array, parts, [*cuts, cuts[-1] + length])
                cuts = [cuts[-1] + length]
            cuts.append(end)
        if len(cuts) > 1:
            yield self._unit(array, parts, cuts)

    def _unit(self, array: int, parts: Parts, cuts: list[int]) -> Unit:
        n = cuts[-1] - cuts[0]
        nbytes = n * self.chunk_nbytes
        gaps_nbytes = UNIT_NBYTES if n > _MOST_SPANS else nbytes  # as `ReadOptions` limits them
        return Unit(array, parts, cuts, nbytes + gaps_nbytes + 1024 * n)


def _flat(coords: Ints, grid: Sequence[int]) -> Ints:
    """Return C-order numbers of coordinates."""
    numbers = np.zeros(len(coords), np.int64)
    for column, n in zip(coords.T, grid, strict=True):
        numbers = numbers * n + column
    return numbers


class LoaderPlan(NamedTuple):
    """Figures of one epoch of one rank, before it is read.

    Parameters
    ----------
    n_samples, n_batches, n_shards, n_chunks : int
        Samples and batches, and shards and chunks that are read. A chunk that is read again counts
        again. Without shards each chunk counts as one.
    n_requests : int
        Reads of parts of shards. Indexes that are not cached come on top, one for each shard.
    nbytes_read, nbytes_delivered : int
        Encoded bytes of the chunks, and bytes of the batches.
    peak_nbytes : int
        Bound of the memory: for what is under way, and for two batches that you have.
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


_GOOD_CHUNK_NBYTES = 1024 * 1024
_GOOD_CHUNKS = range(64 * 1024, 16 * 1024 * 1024)
_GOOD_SHARD_NBYTES = 8 * 1024 * 1024
"""Smaller shards take more time for each request than for its bytes."""
_GOOD_POOL_SHARDS = 16


def shard_nbytes_of(geometries: Sequence[Geometry]) -> int:
    """Return the decoded size of a shard of each array together."""
    shapes = [(1,) if g.shards is None else g.shards.largest for g in geometries]
    return sum(g.chunk_nbytes * math.prod(s) for g, s in zip(geometries, shapes, strict=True))


def advice_of(
    first: Geometry, amplification: float, pool_nbytes: int, shard_nbytes: int
) -> list[str]:
    """Return advice on chunks and shards of an array, as sentences with numbers."""
    better, found = list(first.chunk_shape), []
    if amplification > 1.25:
        better = [*map(min, first.chunk_shape, map(max, first.lengths, [1] * len(better)))]
    elif (
        first.axes and not _GOOD_CHUNK_NBYTES // 16 <= first.chunk_nbytes <= 16 * _GOOD_CHUNK_NBYTES
    ):
        axis = first.axes[0]
        side = better[axis] * _GOOD_CHUNK_NBYTES // first.chunk_nbytes
        better[axis] = max(1, min(first.shape[axis], side))
    if tuple(better) != first.chunk_shape:
        found.append(
            f"chunks of {tuple(better)} in place of {first.chunk_shape}: {amplification:.1f} bytes "
            f"are decoded for each byte of a batch, from chunks of {first.chunk_nbytes:,} bytes"
        )
    most = max(1, pool_nbytes // _GOOD_POOL_SHARDS)
    if not min(_GOOD_SHARD_NBYTES, most) <= shard_nbytes <= most or first.shards is None:
        n = max(1, min(_GOOD_SHARD_NBYTES, most) // max(1, math.prod(better) * first.itemsize))
        found.append(
            f"shards of about {n} chunks: now the pool has {pool_nbytes / shard_nbytes:.1f} "
            f"shards of {shard_nbytes:,} bytes"
        )
    return found
