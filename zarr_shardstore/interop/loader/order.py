"""Order of the samples of an epoch: draws, shares of ranks, groups and batches; pure.

::

    samples ──draw──▶ one order ──cut──▶ share of each rank ──cut──▶ groups (what is read together)
                                                            └─cut──▶ batches

A *group* is a run of samples that memory holds at once. A loader decodes each chunk once for all
samples of a group. With ``shuffle="shards"`` a group consists of whole drawn shards, and its
samples are shuffled. So each chunk belongs to one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError

Ints: TypeAlias = npt.NDArray[np.int64]
Shuffle: TypeAlias = Literal[False, "shards", "full"]


@dataclass(frozen=True)
class Samples:
    """Places of all samples, which have one shape, along the sampled axes."""

    lengths: tuple[int, ...]
    """Elements of a sample along each sampled axis."""
    grid: tuple[int, ...]
    """Number of places along each axis of a regular grid."""
    strides: tuple[int, ...]
    last: tuple[int, ...]
    """Largest start along each axis."""
    given: Ints | None = None
    """The starts, n x axes, in place of a regular grid."""

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
        """Return samples at all places of a grid, or at `positions`, in an array of this extent.

        A window that would cross the end is left out; if it `shifts`, it ends at the end instead.
        """
        last = tuple([n - length for n, length in zip(extent, lengths, strict=True)])
        if any(length < 1 for length in (*lengths, *strides)):
            raise SpecError(f"windows and strides are at least 1, got {(*lengths, *strides)}")
        if positions is not None:
            given = np.asarray(positions)
            given = given.reshape(-1, 1) if given.ndim == 1 and len(last) == 1 else given
            if given.ndim != 2 or given.shape[1] != len(last) or given.dtype.kind not in "iu":
                raise SpecError(
                    f"positions are integers of the shape n x {len(last)}, got {given.shape} of "
                    f"{given.dtype}"
                )
            given = given.astype(np.int64)
            is_outside = ((given < 0) | (given > np.array(last, np.int64))).any(axis=1)
            if is_outside.any():
                at = given[is_outside.argmax()].tolist()
                raise SpecError(f"the sample at {at} leaves the array of the extent {(*extent,)}")
            return cls((*lengths,), (), (*strides,), last, given)
        grid = [
            0 if end < 0 else (-(-end // stride) if shifts else end // stride) + 1
            for end, stride in zip(last, strides, strict=True)
        ]
        return cls((*lengths,), (*grid,), (*strides,), last)

    @property
    def n(self) -> int:
        if self.given is not None:
            return len(self.given)
        return int(np.prod(self.grid, dtype=np.int64))

    def starts(self, numbers: Ints) -> Ints:
        """Return the starts of samples, n x axes."""
        if self.given is not None:
            given: Ints = self.given[numbers]
            return given
        if not self.grid:
            return np.zeros((len(numbers), 0), np.int64)
        places = np.stack(np.unravel_index(numbers, self.grid), axis=1)
        starts: Ints = np.minimum(places * np.array(self.strides), np.array(self.last))
        return starts


class Share(NamedTuple):
    """Samples of one rank, as a range of the order of all ranks."""

    start: int
    stop: int
    n_batches: int
    """The same for each rank."""

    @classmethod
    def of(cls, n: int, size: int, rank: int, world_size: int, *, drops: bool) -> Share:
        """Return the share of a rank. If it `drops`, all batches have `size` samples."""
        if drops:
            n_batches = n // (size * world_size)
            return cls(rank * n_batches * size, (rank + 1) * n_batches * size, n_batches)
        each, more = divmod(n, world_size)
        start = rank * each + min(rank, more)
        n_batches = -(-(each + (more > 0)) // size)
        return cls(start, start + each + (rank < more), n_batches)

    def batch_ends(self, size: int) -> Ints:
        """Return the ends of the batches. The last ones are shorter, and empty only if they must
        be: where there are fewer samples than batches."""
        n, number = self.stop - self.start, np.arange(1, self.n_batches + 1, dtype=np.int64)
        leaves_one_each = n - (self.n_batches - number)
        return np.minimum(number * size, np.maximum(leaves_one_each, np.minimum(number, n)))


class Order(NamedTuple):
    """Samples of one rank in one epoch."""

    numbers: Ints
    """Numbers of the samples, in order."""
    group_ends: list[int]


@dataclass(frozen=True)
class Draw:
    """The way to draw an order."""

    shuffle: Shuffle
    seed: int
    group_length: int
    """Most samples of a group."""

    def order(self, n: int, share: Share, epoch: int, cells: Ints, pieces: Ints) -> Order:
        """Return the order of a rank.

        `cells` and `pieces` have a number for each sample: the shard and the chunk that it begins
        in. Groups end between cells, in a large cell between pieces, and in a large piece anywhere.
        """
        share_of = slice(share.start, share.stop)
        if self.shuffle == "full":
            numbers = self._random(epoch).permutation(n)[share_of]
            n_each = self.group_length
            return Order(
                numbers, [*range(n_each, len(numbers), n_each), *[len(numbers)][: len(numbers)]]
            )
        if self.shuffle == "shards":
            random = self._random(epoch)
            drawn = np.lexsort((_drawn(pieces, random), _drawn(cells, random)))[share_of]
        else:
            drawn = np.arange(share.start, share.stop)
        ends = cut(cells[drawn], pieces[drawn], self.group_length)
        if self.shuffle == "shards":
            for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                # The start in the order of all ranks is different in each rank.
                self._random(epoch, 1 + share.start + start, i).shuffle(drawn[start:end])
        return Order(drawn, ends)

    def _random(self, *of: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *of])


def _drawn(values: Ints, random: np.random.Generator) -> Ints:
    """Return a random rank for each value; equal values have equal ranks."""
    distinct, inverse = np.unique(values, return_inverse=True)
    ranks: Ints = random.permutation(len(distinct))[inverse]
    return ranks


def cut(cells: Ints, pieces: Ints, length: int) -> list[int]:
    """Return the ends of groups of at most so many samples, at the ends of cells if possible."""
    n, start = len(cells), 0
    places = [np.flatnonzero(each[1:] != each[:-1]) + 1 for each in (cells, pieces)]
    ends: list[int] = []
    while n - start > length:
        end = start + length
        for candidates in places:
            at = int(np.searchsorted(candidates, end, side="right")) - 1
            if at >= 0 and candidates[at] > start:
                end = int(candidates[at])
                break
        ends.append(end)
        start = end
    return [*ends, n] if n > start else ends
