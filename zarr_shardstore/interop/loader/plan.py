"""Plan of an epoch: the parts of chunks that each sample consists of, and units of reads; pure.

A sample is a box of an array. A *part* is what one chunk contributes to one sample. A *unit* is a
number of chunks that are read and decoded together, with the parts that samples need of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zarr_shardstore.access import box_grids
from zarr_shardstore.interop.loader.order import Ints, cut

UNIT_NBYTES = 4 * 1024 * 1024
"""Decoded size of a unit over a network: 64 at a time fill a connection of 10 Gbit/s."""

LOCAL_UNIT_NBYTES = 2 * 1024 * 1024
"""Decoded size of a unit of local files: it is decoded while it is in the cache of the core."""

PART_NBYTES = 100
"""Memory of the plan for one part."""

_ENTRY_NBYTES = 512
"""Memory for a chunk that is read, on top of its decoded size."""


class Unit(NamedTuple):
    """Chunks of one array, and the parts that samples need of them, ordered by chunk.

    The parts of chunk ``i`` are ``bounds[i]`` to ``bounds[i + 1]``. Each part has batch and slot
    of its sample, and the start of the sample relative to that of the chunk.
    """

    array: int
    numbers: list[int]
    """Ascending numbers of the batches of these samples."""
    chunks: Ints
    """Coordinates of the chunks, n x ndim, each once."""
    shards: Ints
    """Coordinates of their shards."""
    bounds: Ints
    batches: Ints
    slots: Ints
    offsets: Ints

    def reads(self) -> list[tuple[tuple[int, ...], Ints]]:
        """Return the coordinates of each shard, and of its chunks."""
        is_end = (np.diff(self.shards, axis=0) != 0).any(axis=1)
        cuts = [0, *(np.flatnonzero(is_end) + 1).tolist(), len(self.chunks)]
        return [(tuple(self.shards[a].tolist()), self.chunks[a:b]) for a, b in pairwise(cuts)]


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

    @property
    def chunk_nbytes(self) -> int:
        return max(1, math.prod(self.chunk_shape) * self.itemsize)

    @property
    def sample_nbytes(self) -> int:
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
        """Number of chunks that a sample may touch."""
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

    def parts(self, array: int, starts: Ints, batches: Ints, slots: Ints, turns: Ints) -> Unit:
        """Return all parts of samples at these starts, n x sampled axes.

        Chunks come by the first turn of their samples, and then shard by shard.
        """
        ndim, n = len(self.shape), len(starts) if self.sample_nbytes else 0
        sides, lengths = np.array(self.chunk_shape, np.int64), np.array(self.lengths, np.int64)
        if not n:
            none = np.zeros((0, ndim), np.int64)
            return Unit(array, [], none, none, np.zeros(1, np.int64), batches[:0], slots[:0], none)
        full = np.zeros((n, ndim), np.int64)
        full[:, list(self.axes)] = starts
        first, last = full // sides, (full + lengths - 1) // sides
        steps = (
            np.indices(((last - first).max(axis=0) + 1).tolist()).reshape(ndim, -1 if ndim else 1).T
        )
        chunks = np.repeat(first, len(steps), axis=0) + np.tile(steps, (n, 1))
        sample_of = np.repeat(np.arange(n), len(steps))
        is_there = (chunks <= last[sample_of]).all(axis=1)
        chunks, sample_of = chunks[is_there], sample_of[is_there]
        shards, shard, chunk = self.places(chunks, range(ndim))
        _, first_of, inverse = np.unique(chunk, return_index=True, return_inverse=True)
        turn = turns[sample_of][first_of][inverse]  # turns ascend, so the first one is the soonest
        order = np.lexsort((sample_of, chunk, shard, turn))
        chunks, sample_of = chunks[order], sample_of[order]
        firsts = np.flatnonzero(np.diff(chunk[order], prepend=-1))
        bounds, offsets = np.append(firsts, len(order)), full[sample_of] - chunks * sides
        of_parts = (bounds, batches[sample_of], slots[sample_of], offsets)
        return Unit(array, [], chunks[firsts], shards[order[firsts]], *of_parts)

    def units(self, parts: Unit, unit_nbytes: int) -> Iterator[Unit]:
        """Cut the chunks of a group into units. A small shard is in one of them."""
        most = max(1, unit_nbytes // max(self.chunk_nbytes, 2 * _ENTRY_NBYTES))
        n = math.prod(self.shards.largest)
        if n > most:  # a store that is asked for more than half of a shard may read all of it
            most = max(1, min(most, n // 2))
        shards = np.cumsum((np.diff(parts.shards, axis=0, prepend=-1) != 0).any(axis=1))
        ends = cut(shards, np.arange(len(shards)), most)
        for lo, hi in pairwise([0, *ends]):
            of_parts = slice(parts.bounds[lo], parts.bounds[hi])
            yield Unit(
                parts.array,
                np.unique(parts.batches[of_parts]).tolist(),
                parts.chunks[lo:hi],
                parts.shards[lo:hi],
                parts.bounds[lo : hi + 1] - parts.bounds[lo],
                *(each[of_parts] for each in parts[5:]),
            )

    def reserved_nbytes(self, unit: Unit) -> int:
        """Return a bound of the encoded bytes of a unit, with the gaps that are read along."""
        nbytes = len(unit.chunks) * (self.chunk_nbytes + _ENTRY_NBYTES)
        return nbytes + max(nbytes, UNIT_NBYTES)


class LoaderPlan(NamedTuple):
    """Figures of one epoch of one rank, before it is read.

    Parameters
    ----------
    n_samples, n_batches, n_shards, n_chunks, n_requests : int
        Samples, batches, and what is read: shards, chunks (one that is read again counts again),
        and parts of shards. An index that is not cached is one request more for each shard.
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


def advice_of(
    first: Geometry, amplification: float, pool_nbytes: int, shard_nbytes: int
) -> list[str]:
    """Return advice as sentences with numbers.

    Chunks have about 1 MiB, shards 8 MiB, and the pool 16 shards. An array that fits in the pool
    needs none of this.
    """
    better, nbytes, found = list(first.chunk_shape), first.chunk_nbytes, []
    if amplification > 1.25:
        better = [max(1, min(pair)) for pair in zip(better, first.lengths, strict=True)]
    elif math.prod(first.shape) * first.itemsize <= pool_nbytes:
        return []
    elif first.axes and not 2**16 <= nbytes <= 2**24:
        axis = first.axes[0]
        better[axis] = max(1, min(first.shape[axis], better[axis] * 2**20 // nbytes))
    if tuple(better) != first.chunk_shape:
        found.append(
            f"chunks of {tuple(better)} in place of {first.chunk_shape}, which have {nbytes:,} "
            f"bytes; {amplification:.1f} bytes are decoded for each byte of a batch"
        )
    most = max(1, pool_nbytes // 16)
    least = min(2**23, most)
    if not least <= shard_nbytes <= most or math.prod(first.shards.largest) == 1:
        n = max(1, least // max(1, math.prod(better) * first.itemsize))
        found.append(
            f"shards of about {n} chunks: now the pool has {pool_nbytes / shard_nbytes:.1f} "
            f"shards of {shard_nbytes:,} bytes"
        )
    return found
