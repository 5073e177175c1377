"""A shard map cut into flat panels: slices over the leading dimensions, sampled down to fit.

Where several shards share one place of a panel, it says how many chunks all of them hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.grid import Box
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.tools.shard_map import ShardMap

__all__ = ["Panel", "Panels", "cut_into_panels"]

Fits = Callable[[int, int, int], bool]
"""Whether so many panels of so many rows and columns fit."""


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Two dimensions of a map, the others at fixed places.

    Parameters
    ----------
    title : str
        Where it lies in the leading dimensions, as ``"[3, 4:8, :, :]"``; empty if there are none.
    stored, possible : ndarray
        Chunks that each place holds, and can hold; float64, rows and columns.
    unreadable : ndarray
        Whether any shard of the place could not be read; bool.
    """

    title: str
    stored: npt.NDArray[np.float64]
    possible: npt.NDArray[np.float64]
    unreadable: npt.NDArray[np.bool_]
    leading: Coords

    @property
    def fraction(self) -> npt.NDArray[np.float64]:
        """Fraction of the chunks that are stored; NaN where it is not known."""
        known = np.where(self.unreadable, np.nan, self.stored)
        return np.divide(known, self.possible, out=np.zeros_like(known), where=self.possible > 0)


@dataclass(frozen=True, slots=True)
class Panels:
    """All panels of a map.

    Parameters
    ----------
    factors : tuple of int
        Shards along each dimension that share one place.
    """

    panels: list[Panel]
    factors: Coords
    shard_shape: Coords

    @property
    def n_rows(self) -> int:
        """Places of a panel from top to bottom."""
        return int(self.panels[0].stored.shape[0]) if self.panels else 0

    @property
    def n_columns(self) -> int:
        """Places of a panel from left to right."""
        return int(self.panels[0].stored.shape[1]) if self.panels else 0

    def box(self, panel: Panel, row: int, column: int) -> Box:
        """Shard coordinates that share a place, half-open."""
        n_flat = min(2, len(self.factors))
        place = (*panel.leading, *(row, column)[2 - n_flat :])
        return tuple(
            (p * f, min((p + 1) * f, n))
            for p, f, n in zip(place, self.factors, self.shard_shape, strict=True)
        )


def cut_into_panels(shards: ShardMap, fits: Fits) -> Panels:
    """Cut a map into panels that fit; the last two dimensions are rows and columns.

    A map of one dimension is one row. No panel for a grid without shards.
    """
    shape = shards.shape
    factors = _factors(shape, fits)
    if 0 in shape:
        return Panels([], factors, shape)
    unreadable: npt.NDArray[Any] = np.isnan(shards.fill)
    stored: npt.NDArray[Any] = np.where(unreadable, np.float32(0), shards.fill)
    possible = np.ones((), dtype=np.float64)
    for axis, (n, factor) in enumerate(zip(shape, factors, strict=True)):
        cps, n_chunks = shards.chunks_per_shard[axis], shards.grid_shape[axis]
        extents = np.minimum(cps, n_chunks - cps * np.arange(n))  # fewer chunks at the edge
        # In float32, which holds each count of chunks of a shard, until places are few.
        stored = stored * extents.astype(np.float32).reshape(-1, *(1,) * (len(shape) - 1 - axis))
        if factor > 1:
            starts = np.arange(0, n, factor)
            stored = np.add.reduceat(stored, starts, axis=axis, dtype=np.float64)
            unreadable = np.logical_or.reduceat(unreadable, starts, axis=axis)
            extents = np.add.reduceat(extents, starts)
        possible = np.multiply.outer(possible, extents.astype(np.float64))
    flat = (1,) * (2 - len(shape)) + stored.shape
    stored = np.rint(stored.reshape(flat).astype(np.float64))
    possible, unreadable = possible.reshape(flat), unreadable.reshape(flat)
    panels = [
        Panel(_title(at, factors, shape), stored[at], possible[at], unreadable[at], at)
        for at in product(*map(range, flat[:-2]))
    ]
    return Panels(panels, factors, shape)


def _factors(shape: Coords, fits: Fits) -> Coords:
    """Shards that share a place, along each dimension: about as few as fit."""
    factors = [1] * len(shape)
    while True:
        sizes = [-(-n // factor) for n, factor in zip(shape, factors, strict=True)]
        rows, columns = (1, 1, *sizes)[-2:]
        if fits(math.prod(sizes[:-2]), rows, columns) or max(sizes, default=1) <= 1:
            return tuple(factors)
        last, leading = len(shape) - 1, range(len(shape) - 2)
        if not fits(1, 1, columns):
            axes = [last]
        elif not fits(1, rows, 1):
            axes = [last - 1]
        elif not fits(1, rows, columns):
            axes = [last - 1, last]
        else:  # one panel fits, so there are too many
            axes = list(leading)
        candidates = [axis for axis in axes if axis >= 0 and sizes[axis] > 1] or [
            axis for axis, size in enumerate(sizes) if size > 1
        ]
        axis = max(candidates, key=lambda axis: sizes[axis])
        factors[axis] += max(1, factors[axis] // 8)  # few steps also for millions of shards


def _title(at: Coords, factors: Coords, shape: Coords) -> str:
    if not at:
        return ""
    parts = []
    for p, f, n in zip(at, factors[: len(at)], shape[: len(at)], strict=True):
        start, stop = p * f, min((p + 1) * f, n)
        parts.append(str(start) if stop - start == 1 else f"{start}:{stop}")
    return f"[{', '.join([*parts, ':', ':'])}]"
