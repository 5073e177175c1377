"""Plan of an epoch: the parts of chunks that each sample consists of, and units of reads; pure.

A sample is a box of an array. A *part* is what one chunk contributes to one sample. A *unit* is a
number of chunks that are read together: shard by shard, of at most `UNIT_NBYTES` decoded bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zarr_shardstore.access import box_grids
from zarr_shardstore.interop.loader.order import Ints, Samples

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
    slots: Ints
    """Position of the sample of each part in the order of the rank."""
    offsets: Ints
    """Start of each sample relative to the start of the chunk, parts x ndim."""


class Unit(NamedTuple):
    """Chunks that are read together."""

    parts: Parts
    cuts: list[int]
    """Chunks ``cuts[i]`` to ``cuts[i + 1]`` are of one shard."""
    nbytes: int
    """Decoded size of the chunks."""
    most_nbytes: int
    """Bound of the encoded bytes that are in memory at a time."""

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
        """Return, for each sample, a number of the shard and of the chunk in which it starts, as
        far as some of the sampled axes tell them."""
        cells = pieces = np.zeros(len(starts), np.int64)
        for i in axes:
            axis = self.axes[i]
            chunks = starts[:, i] // self.chunk_shape[axis]
            cells = cells * (self.grid[axis] + 1) + self.shard_numbers(axis, chunks)
            pieces = pieces * (self.grid[axis] + 1) + chunks
        return cells, pieces

    def parts(self, starts: Ints, slots: Ints, block: int) -> Parts:
        """Return the parts of samples at these starts, n x sampled axes.

        Chunks come shard by shard; first those that the next `block` samples need.
        """
        ndim, n = len(self.shape), len(starts)
        full = np.zeros((n, ndim), np.int64)
        full[:, list(self.axes)] = starts
        sides, lengths = np.array(self.chunk_shape, np.int64), np.array(self.lengths, np.int64)
        if not n or self.sample_nbytes == 0:
            none = np.zeros((0, ndim), np.int64)
            return Parts(none, none, np.zeros(1, np.int64), none.reshape(-1)[:0], none)
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
        soonest = np.full(len(distinct), len(slots), np.int64)
        np.minimum.at(soonest, inverse, sample_of // max(1, block))
        order = np.lexsort((sample_of, flat, shard, soonest[inverse]))
        is_new = np.diff(flat[order], prepend=-1) != 0
        firsts = order[is_new]
        bounds = np.append(np.flatnonzero(is_new), len(order))
        sample_of = sample_of[order]
        offsets = full[sample_of] - chunks[order] * sides
        return Parts(chunks[firsts], shards[firsts], bounds, slots[sample_of], offsets)

    def units(self, parts: Parts, unit_nbytes: int) -> Iterator[Unit]:
        """Cut the chunks of a group into units. A small shard is in one of them."""
        n, size = len(parts.chunks), self.chunk_nbytes
        is_end = (parts.shards[1:] != parts.shards[:-1]).any(axis=1)
        ends = [*(np.flatnonzero(is_end) + 1).tolist(), n] if n else []
        most = max(1, unit_nbytes // size)
        cuts, most_nbytes = [0], 0
        for end in ends:
            n_units = -(-(end - cuts[-1]) // most)
            if end - cuts[0] > most and len(cuts) > 1:
                yield self._unit(parts, cuts)
                cuts = cuts[-1:]
            # Of two parts of a shard one would be most of it, for which a store may read all of it.
            length = -(-(end - cuts[-1]) // (3 if n_units == 2 else n_units))
            while end - cuts[-1] > length:
                yield self._unit(parts, [*cuts, cuts[-1] + length])
                cuts = [cuts[-1] + length]
            cuts.append(end)
        if len(cuts) > 1:
            yield self._unit(parts, cuts)

    def _unit(self, parts: Parts, cuts: list[int]) -> Unit:
        n = cuts[-1] - cuts[0]
        nbytes = n * self.chunk_nbytes
        gaps_nbytes = UNIT_NBYTES if n > _MOST_SPANS else nbytes  # as `ReadOptions` limits them
        return Unit(parts, cuts, nbytes, nbytes + gaps_nbytes + 1024 * n)


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


_GOOD_AMPLIFICATION = 1.25
_GOOD_CHUNK_NBYTES = (64 * 1024, 16 * 1024 * 1024)
"""Smaller chunks take more time for each than for its bytes; few larger ones fit into memory."""
_GOOD_SHARD_NBYTES = 8 * 1024 * 1024
_GOOD_POOL_SHARDS = 16


def shard_nbytes_of(geometries: Sequence[Geometry]) -> int:
    """Return the decoded size of a shard of each array together."""
    shapes = [(1,) if g.shards is None else g.shards.largest for g in geometries]
    return sum(g.chunk_nbytes * math.prod(s) for g, s in zip(geometries, shapes, strict=True))


def advice_of(
    geometries: Sequence[Geometry], pool_nbytes: int, decoded: int, delivered: int, n_chunks: int
) -> list[str]:
    """Return advice on the shapes of the first array, as sentences with numbers."""
    first, found = geometries[0], []
    smallest, largest = _GOOD_CHUNK_NBYTES
    better = list(first.chunk_shape)
    if delivered and decoded > _GOOD_AMPLIFICATION * delivered:
        for axis, side in enumerate(first.chunk_shape):
            better[axis] = max(1, min(side, first.lengths[axis]))
    elif first.axes and first.chunk_nbytes < smallest and n_chunks > 1:
        axis = first.axes[0]
        better[axis] = min(first.shape[axis], better[axis] * -(-smallest // first.chunk_nbytes))
    elif first.axes and first.chunk_nbytes > largest:
        axis = first.axes[0]
        better[axis] = max(1, better[axis] * largest // first.chunk_nbytes)
    if tuple(better) != first.chunk_shape:
        found.append(
            f"chunks of {tuple(better)} in place of {first.chunk_shape}: now "
            f"{decoded / max(1, delivered):.1f} bytes are decoded for each byte of a batch, from "
            f"chunks of {first.chunk_nbytes:,} bytes"
        )
    nbytes = shard_nbytes_of(geometries)
    chunk_nbytes = max(1, math.prod(better) * first.itemsize)
    most = max(1, pool_nbytes // _GOOD_POOL_SHARDS)
    if first.shards is None or nbytes < min(_GOOD_SHARD_NBYTES, most):
        wanted = max(1, min(_GOOD_SHARD_NBYTES, most) // chunk_nbytes)
        found.append(f"shards of about {wanted} chunks in place of {nbytes:,} bytes a shard")
    elif nbytes > most:
        wanted = max(1, most // chunk_nbytes)
        found.append(
            f"shards of about {wanted} chunks, or pool_nbytes={_GOOD_POOL_SHARDS * nbytes}: now "
            f"the pool has {pool_nbytes / nbytes:.1f} shards"
        )
    return found
