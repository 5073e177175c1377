"""Order of the samples of an epoch: places, draws, shares of ranks, batches, groups; pure.

::

    samples ──draw──▶ one order ──cut──▶ share of each rank ──cut──▶ groups (what is read together)
                                                            └─cut──▶ batches

A *group* is a run of samples that memory holds at once. A loader decodes each chunk once for all
samples of a group. With ``shuffle="shards"`` a group consists of whole drawn shards, and its
samples are shuffled. So each chunk belongs to one group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng  # at once: an import hides interrupts

from zarr_shardstore.errors import SpecError

Ints: TypeAlias = npt.NDArray[np.int64]
Shuffle: TypeAlias = Literal[False, "shards", "full"]


class Samples(NamedTuple):
    """Places of all samples along the sampled axes."""

    tables: tuple[Ints, ...]
    """Starts along one axis each, or along all. A sample has a row of each table, in C order."""

    @classmethod
    def of(
        cls,
        extent: Sequence[int],
        lengths: Sequence[int],
        strides: Sequence[int],
        *,
        positions: Any = None,
        shifts: bool = False,
    ) -> Samples:
        """Return samples at `positions`, or at all places of a grid in an array of this extent.

        A window that would cross the end is left out; if it `shifts`, it ends at the end instead.
        """
        last = np.array(extent, np.int64) - np.array(lengths, np.int64)
        if any(length < 1 for length in (*lengths, *strides)):
            raise SpecError(f"windows and strides are at least 1, got {(*lengths, *strides)}")
        if positions is None:
            tables = []
            for end, stride in zip(last.tolist(), strides, strict=True):
                stop = end + (stride if shifts and end >= 0 else 1)
                tables.append(np.minimum(np.arange(0, stop, stride), end)[:, None])
            return cls(tuple(tables))
        given = np.asarray(positions)
        given = given.astype(np.int64) if not given.size else given  # an empty list has no type
        given = given.reshape(-1, 1) if given.ndim == 1 and len(last) == 1 else given
        if given.ndim != 2 or given.shape[1] != len(last) or given.dtype.kind not in "iu":
            given_as = f"{given.shape} of {given.dtype}"
            raise SpecError(f"positions are integers of the shape n x {len(last)}, got {given_as}")
        is_outside = ((given < 0) | (given > last)).any(axis=1)
        if is_outside.any():
            at = given[is_outside.argmax()].tolist()
            raise SpecError(f"the sample at {at} leaves the array of the extent {(*extent,)}")
        return cls((given.astype(np.int64),))

    @property
    def n(self) -> int:
        return math.prod(map(len, self.tables))

    def starts(self, numbers: Ints) -> Ints:
        """Return the starts of samples, n x axes."""
        if not self.tables:
            return np.zeros((len(numbers), 0), np.int64)
        rows = np.unravel_index(numbers, [*map(len, self.tables)])
        return np.hstack([table[row] for table, row in zip(self.tables, rows, strict=True)])


class Share(NamedTuple):
    """Samples of one rank, as a range of the order of all ranks."""

    start: int
    stop: int
    bounds: Ints
    """Begin of the first batch and end of each, relative to `start`, equally many in each rank. The
    last batches are shorter, and empty only where there are fewer samples than batches."""

    @classmethod
    def of(cls, n: int, size: int, rank: int, world_size: int, *, drops: bool) -> Share:
        """Return the share of a rank. If it `drops`, all batches have `size` samples."""
        whole = size * world_size
        each, more = divmod(n // whole * whole if drops else n, world_size)
        start, n = rank * each + min(rank, more), each + (rank < more)
        n_batches = -(-(each + (more > 0)) // size)
        number = np.arange(n_batches + 1, dtype=np.int64)
        leaves_one_each = n - (n_batches - number)
        bounds = np.minimum(number * size, np.maximum(leaves_one_each, np.minimum(number, n)))
        return cls(start, start + n, bounds)

    @property
    def n_batches(self) -> int:
        return len(self.bounds) - 1


class Draw(NamedTuple):
    shuffle: Shuffle
    seed: int
    pool_nbytes: int
    """Most bytes of a group, which has one sample at least."""

    def order(
        self, share: Share, epoch: int, shards: Ints, chunks: Ints, nbytes: Ints
    ) -> tuple[Ints, list[int]]:
        """Return the numbers of the samples of a rank in order, and the ends of their groups.

        Samples have a size, and numbers of the shard and of the chunk that they begin in. Groups
        end between shards, in a large shard between chunks, and in a large chunk anywhere.
        """
        random = default_rng([self.seed, epoch])
        if self.shuffle == "full":
            drawn = random.permutation(len(shards))
        elif self.shuffle == "shards":
            drawn = np.lexsort((_drawn(chunks, random), _drawn(shards, random)))
        else:
            drawn = np.arange(len(shards))
        drawn = drawn[share.start : share.stop]
        ends = cut(shards[drawn], chunks[drawn], nbytes[drawn], self.pool_nbytes)
        if self.shuffle == "shards":
            for i, (start, end) in enumerate(pairwise([0, *ends])):
                # The start in the order of all ranks is different in each rank.
                of_group = [self.seed, epoch, 1 + share.start + start, i]
                default_rng(of_group).shuffle(drawn[start:end])
        return drawn, ends


def _drawn(values: Ints, random: Generator) -> Ints:
    """Return a random rank for each value; equal values have equal ranks."""
    distinct, inverse = np.unique(values, return_inverse=True)
    ranks: Ints = random.permutation(len(distinct))[inverse]
    return ranks


def cut(shards: Ints, chunks: Ints, sizes: Ints, most: int) -> list[int]:
    """Return the ends of runs of at most this size, between shards or else chunks if possible.

    A run has one at least.
    """
    sums, ends = np.append(0, np.cumsum(sizes)), [0]
    most = min(most, int(sums[-1]))
    del sizes  # an epoch may have 10⁸ samples
    places = [
        np.concatenate([[0], np.flatnonzero(each[1:] != each[:-1]) + 1, [len(shards)]])
        for each in (shards, chunks)
    ]
    while (start := ends[-1]) < len(shards):
        end = max(start + 1, int(sums.searchsorted(sums[start] + most, side="right")) - 1)
        befores = [int(each[each.searchsorted(end, side="right") - 1]) for each in places]
        ends.append(next((before for before in befores if before > start), end))
    return ends[1:]
