"""Boxes of chunks: most array operations read or write all elements between two corners.

A box is planned shard by shard: which entries it has, and which elements of the array these are.
So no key, selection or object is made for a chunk. zarr has made these for its list of chunks;
`ArrayBox.of_batch` compares the whole list with the list that a box would give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.box_grid import Box, BoxGrid
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, ShardRef, is_inside

Array: TypeAlias = npt.NDArray[Any]

MIN_CHUNKS = 8
"""Fewer chunks are not worth the comparison."""


class ShardBox(NamedTuple):
    """Chunks of one shard."""

    shard: ShardRef
    chunks: Box
    """Coordinates in the grid of chunks."""

    def entry_ids(self) -> npt.NDArray[np.intp]:
        return self.shard.layout.spec.boxes.ids_in(self.shard.coords, self.chunks)


class ArrayBox(NamedTuple):
    """All elements of an array between two corners."""

    layout: ArrayLayout
    chunk_shape: Coords
    elements: Box
    int_axes: frozenset[int]
    """Axes of length 1 that the selection drops."""

    @classmethod
    def of_selection(
        cls, selection: Any, shape: Coords, chunk_shape: Coords, layout: ArrayLayout
    ) -> ArrayBox | None:
        """Return the box that integers and slices without a step select; ``None`` for all else."""
        items = selection if isinstance(selection, tuple) else (selection,)
        dots = [i for i, item in enumerate(items) if item is Ellipsis]
        at = dots[0] if dots else len(items)
        n_left = len(shape) - len(items) + len(dots)
        if len(dots) > 1 or n_left < 0:
            return None
        elements, int_axes = [], set()
        full = (*items[:at], *[slice(None)] * n_left, *items[at + len(dots) :])
        for axis, (item, n) in enumerate(zip(full, shape, strict=True)):
            if isinstance(item, slice) and item.step in (None, 1):
                start, stop, _ = item.indices(n)
            elif isinstance(item, int | np.integer) and not isinstance(item, bool):
                start = int(item) + (n if item < 0 else 0)
                stop = start + 1
                int_axes.add(axis)
            else:
                return None
            if not 0 <= start < stop <= n:
                return None
            elements.append((start, stop))
        return cls(layout, chunk_shape, tuple(elements), frozenset(int_axes))

    @classmethod
    def of_batch(
        cls,
        batch: Sequence[tuple[Any, ...]],
        layout: ArrayLayout,
        boxes: BoxGrid | None = None,
        unit: Coords = (),
    ) -> ArrayBox | None:
        """Return the box of the chunks that zarr lists, in C order; ``None`` if they are none.

        The chunks are boxes of units of so many elements; by default they have one shape.
        """
        if layout.grid_shape is None or not layout.spec.ndim:
            return None
        first, last = (layout.coords_of(batch[i][0].path) for i in (0, -1))
        if first is None or last is None or not is_inside(last, layout.grid_shape):
            return None
        numbers = [(start, stop + 1) for start, stop in zip(first, last, strict=True)]
        shape = [stop - start for start, stop in numbers]
        if min(shape) < 1 or math.prod(shape) != len(batch):
            return None
        boxes = BoxGrid(batch[0][1].shape) if boxes is None else boxes
        unit = unit or (1,) * len(shape)
        bounds = []
        for axis, (side, n) in enumerate(zip(numbers, unit, strict=True)):
            pairs = [boxes.bounds(axis, i) for i in range(*side)]
            bounds.append([(start * n, stop * n) for start, stop in pairs])
        if not _have_lengths(batch, bounds):
            return None
        largest = tuple([side * n for side, n in zip(boxes.largest, unit, strict=True)])
        found = cls._of_corners(batch, layout, largest, bounds)
        if found is None:
            return None
        keys = map(attrgetter("path"), map(itemgetter(0), batch))
        return found if list(keys) == layout.chunk_keys(tuple(numbers)) else None

    @classmethod
    def _of_corners(
        cls,
        batch: Sequence[tuple[Any, ...]],
        layout: ArrayLayout,
        chunk_shape: Coords,
        bounds: Sequence[Sequence[tuple[int, int]]],
    ) -> ArrayBox | None:
        """Return the box that selections in chunks and in the result make, or ``None``.

        `bounds` are the starts and stops of the chunks along each axis.
        """
        insides, outsides, elements, int_axes = [], [], [], set()
        stride = len(batch)
        for axis, chunks in enumerate(bounds):
            n, first = len(chunks), chunks[0][0]
            stride //= n
            row = batch[: n * stride : stride]
            parts = [inside[axis] for _, _, inside, *_ in row if isinstance(inside, tuple)]
            insides.append(parts)
            if n == 1 and len(parts) == 1 and isinstance(parts[0], int | np.integer):
                int_axes.add(axis)
                at = first + int(parts[0])
                elements.append((at, at + 1))
                continue
            at = axis - len(int_axes)
            there = [outside[at] for *_, outside, _ in row if isinstance(outside, tuple)]
            outsides.append(there)
            if not parts or {type(part) for part in (*parts, *there)} != {slice}:
                return None
            begin, end, step = first + parts[0].start, chunks[-1][0] + parts[-1].stop, parts[0].step
            clipped = [(max(start, begin), min(stop, end)) for start, stop in chunks]
            pairs = [*zip(clipped, chunks, strict=True)]
            if (
                step not in (None, 1)
                or parts != [slice(lo - start, hi - start, step) for (lo, hi), (start, _) in pairs]
                or there != [slice(lo - begin, hi - begin) for lo, hi in clipped]
            ):
                return None
            elements.append((begin, end))
        # The slices of a row are the same objects in all rows: this compares identities.
        if list(map(itemgetter(2), batch)) != list(product(*insides)):
            return None
        if list(map(itemgetter(3), batch)) != list(product(*outsides)):
            return None
        return cls(layout, chunk_shape, tuple(elements), frozenset(int_axes))

    @property
    def chunks(self) -> Box:
        """Coordinates in the grid of chunks."""
        sides = zip(self.elements, self.chunk_shape, strict=True)
        return tuple([(start // side, -(-stop // side)) for (start, stop), side in sides])

    @property
    def shape(self) -> Coords:
        """Shape of the values that are read, or written."""
        sides = enumerate(self.elements)
        return tuple([stop - start for i, (start, stop) in sides if i not in self.int_axes])

    def has_whole_chunks(self, shape: Coords) -> bool:
        """Whether each chunk lies in the box with all elements that an array of this shape has."""
        rows = zip(self.elements, self.chunk_shape, shape, strict=True)
        return all(
            start % side == 0 and (stop % side == 0 or stop == n) for (start, stop), side, n in rows
        )

    def no_chunks(self) -> npt.NDArray[np.bool_]:
        """Return an array of false for each chunk."""
        return np.zeros([stop - start for start, stop in self.chunks], bool)

    def with_all_axes(self, values: Array) -> Array:
        """Return a view of the values of the box with an axis for each dimension."""
        n = len(self.elements)
        return values[tuple([None if i in self.int_axes else slice(None) for i in range(n)])]

    def shards(self) -> Iterator[ShardBox]:
        """Yield the part of each shard, in C order."""
        layout, chunks = self.layout, self.chunks
        boxes = layout.spec.boxes
        for coords in product(*boxes.boxes_of(chunks)):
            pairs = zip(chunks, boxes.box(coords), strict=True)
            box = [(max(lo, first), min(hi, end)) for (lo, hi), (first, end) in pairs]
            yield ShardBox(layout.shard(coords), tuple(box))

    def slices_of(self, chunks: Box) -> tuple[slice, ...]:
        """Return the place of a box of chunks among `chunks`."""
        pairs = zip(chunks, self.chunks, strict=True)
        return tuple([slice(lo - first, hi - first) for (lo, hi), (first, _) in pairs])

    def place_of(self, chunks: Box) -> tuple[tuple[slice, ...], tuple[slice, ...], bool]:
        """Return the elements of a box of chunks: as slices of the values, and of the chunks.
        The last item says whether these are all elements of the chunks."""
        outside, inside, is_whole = [], [], True
        rows = zip(chunks, self.elements, self.chunk_shape, strict=True)
        for (lo, hi), (start, stop), side in rows:
            first, last = max(lo * side, start), min(hi * side, stop)
            outside.append(slice(first - start, last - start))
            inside.append(slice(first - lo * side, last - lo * side))
            is_whole = is_whole and last - first == (hi - lo) * side
        return tuple(outside), tuple(inside), is_whole


def _have_lengths(
    batch: Sequence[tuple[Any, ...]], bounds: Sequence[Sequence[tuple[int, int]]]
) -> bool:
    """Whether the chunks that zarr lists have the shapes of these."""
    lengths = [[stop - start for start, stop in row] for row in bounds]
    specs = [*map(itemgetter(1), batch)]
    if all(len({*row}) == 1 for row in lengths):
        different = dict(zip(map(id, specs), specs, strict=True))  # zarr 3.4 passes one
        return {spec.shape for spec in different.values()} == {tuple([row[0] for row in lengths])}
    return [spec.shape for spec in specs] == [*product(*lengths)]


def n_chunks_of(chunks: Box) -> int:
    return math.prod(stop - start for start, stop in chunks)


def cut(chunks: Box, max_chunks: int) -> Iterator[Box]:
    """Yield boxes of neighbouring chunks in C order, of at most so many each."""
    grid = [stop - start for start, stop in chunks]
    axis, n_inner = len(grid), 1
    while axis and n_inner * grid[axis - 1] <= max_chunks:
        axis -= 1
        n_inner *= grid[axis]
    if not axis:
        yield chunks
        return
    axis -= 1
    step = max(1, max_chunks // n_inner)
    first, last = chunks[axis]
    for leading in product(*[range(*side) for side in chunks[:axis]]):
        head = [(i, i + 1) for i in leading]
        for start in range(first, last, step):
            yield (*head, (start, min(start + step, last)), *chunks[axis + 1 :])


def blocks_of(values: Array, chunk_shape: Coords) -> Array:
    """Return a view of whole chunks, of the shape grid x chunk."""
    grid = [length // side for length, side in zip(values.shape, chunk_shape, strict=True)]
    split = values.reshape([n for pair in zip(grid, chunk_shape, strict=True) for n in pair])
    ndim = len(grid)
    return split.transpose([*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)])
