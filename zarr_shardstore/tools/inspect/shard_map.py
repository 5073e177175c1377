"""Maps of arrays: the fill of each shard; and their pictures.

A picture is text, or a PNG or SVG by matplotlib. It has a panel for each slice over the leading
dimensions of the map. If the map is larger than the picture, several shards share a place, which
shows the sum of their chunks.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import (
    BaseStoreHandle,
    box_grids,
    chunk_keys,
    metadata,
    open_base,
    resolve,
    walks,
)
from zarr_shardstore.errors import SpecError, UnfinishedConversionError, UnsupportedError
from zarr_shardstore.tools.inspect.conversions import unfinished_conversions
from zarr_shardstore.tools.inspect.find import arrays_at, find_arrays, quoted, read_array
from zarr_shardstore.tools.inspect.occupancy import rounds_of_objects

MAX_CELLS = 2**26
"""Most shards in a map: 256 MiB."""

_MISSING, _FULL, _UNREADABLE = 0, 4, 5
"""Levels of a place. Levels 1 to 3 are partial: a third, two thirds, and more of its chunks."""
_BLOCKS = "·░▒▓█!"
_FULL_SHARD = "■"
"""A full place that is one shard: unlike the block it has a border."""
_ASCII = ".-+*#!"
_COLORS = ("#e8e8e8", "#fbd9b0", "#f2a65a", "#c8702a", "#2a6f97", "#d00000")
"""Colors by level; they also differ in grey."""

_LEVELS = {
    "full": (_FULL,),
    "partial": (1, 2, 3),
    "missing": (_MISSING,),
    "unreadable": (_UNREADABLE,),
}

_MAX_BORDERS = 128
"""Most shards along a side of a panel that are drawn with borders."""

_GAP = 2
"""Characters between two panels in one line."""

_MAX_SIDE = 1024
"""Most places of a drawn picture in each direction."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """Fill of each shard of an array; of each chunk, if the array has no shards."""

    path: str
    is_sharded: bool
    fill: npt.NDArray[np.float32]
    """0 missing … 1 full for each shard, of its chunks inside the array; NaN if the shard could not
    be read."""
    grid_shape: chunk_keys.Coords
    chunks_per_shard: chunk_keys.Coords
    """1 along each dimension if there are no shards."""
    errors: tuple[str, ...] = ()
    """One for each shard that could not be read, or that an entry leaves."""
    sides: tuple[box_grids.Side, ...] | None = None
    """Chunks of each shard along each dimension, if shards differ; see `box_grids.BoxGrid`."""

    @property
    def shape(self) -> chunk_keys.Coords:
        return self.fill.shape

    def as_dict(self) -> dict[str, Any]:
        """Return the map as JSON; the fill of an unreadable shard is null."""
        names = ("path", "is_sharded", "shape", "grid_shape", "chunks_per_shard", "errors")
        report = {name: getattr(self, name) for name in names}
        fill = self.fill.astype(object)
        fill[np.isnan(self.fill)] = None
        return {**report, "counts": self.counts(), "fill": fill.tolist()}

    def counts(self) -> dict[str, int]:
        states = {
            "full": self.fill == 1,
            "partial": (self.fill > 0) & (self.fill < 1),
            "missing": self.fill == 0,
            "unreadable": np.isnan(self.fill),
        }
        return {state: int(cells.sum()) for state, cells in states.items()}


def shard_map(
    store: resolve.BaseStoreLike,
    path: str = "",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardMap:
    """Read the index of each shard of the array at `path`; of several formats v3 counts."""
    base = open_base(store, storage_options)
    found = arrays_at(base, path)
    if not found:
        raise SpecError(f"no array at {path!r} in {base.describe()}{_there(base, path)}")
    unfinished = [
        each.text
        for each in unfinished_conversions(base)
        if each.path == found[0].node.path and each.is_of_stored_array
    ]
    try:
        array = read_array(found[0])
    except UnfinishedConversionError as error:
        raise UnfinishedConversionError("; ".join([*unfinished, str(error)])) from None
    if array.document.geometry is None or array.grid_shape is None:
        raise UnsupportedError(f"the array {path!r}: {metadata.unknown_geometry(found[0].doc)}")
    grid = walks.ObjectGrid.of_array(array)
    is_sharded, spec = grid.is_sharded, grid.layout.spec
    if math.prod(grid.shape) > MAX_CELLS:
        raise UnsupportedError(
            f"the grid of {path!r} has {math.prod(grid.shape)} {_unit(is_sharded)} "
            f"{list(grid.shape)}, a map has at most {MAX_CELLS}"
        )
    fill = np.zeros(grid.shape, dtype=np.float32)
    errors = unfinished
    for _, cells in rounds_of_objects(base, grid):
        for cell in cells:
            errors += [cell.error] if cell.error else []
            n_chunks = math.nan if cell.n_chunks is None else cell.n_chunks
            fill[cell.coords] = n_chunks / grid.boxes.n_in_box(cell.coords, array.grid_shape)
    fill.flags.writeable = False
    shape, cps = array.grid_shape, spec.chunks_per_shard
    return ShardMap(array.node.path, is_sharded, fill, shape, cps, tuple(errors), spec.sides)


def _there(base: BaseStoreHandle, path: str) -> str:
    """Name the arrays below a path, or else all arrays, for an error message."""
    paths = [array.node.path for array in find_arrays(base)]
    below = [found for found in paths if found.startswith(f"{path.strip('/')}/")]
    where = f"below {path!r}" if below else "in it"
    return f"; the arrays {where}: {quoted(below or paths)}" if paths else ""


# ---------------------------------------------------------------- pictures


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Two dimensions of a map at fixed places of the others."""

    title: str
    """Position in the leading dimensions, as ``"[3, 4:8, :, :]"``; empty if there are none."""
    stored: npt.NDArray[np.float64]
    """Chunks that each place holds; NaN where a shard of the place could not be read."""
    possible: npt.NDArray[np.float64]
    """Chunks that each place can hold."""

    def levels(self) -> npt.NDArray[np.intp]:
        levels = 1 + np.minimum(2, np.floor(3 * self.stored / self.possible))
        levels[self.stored == 0] = _MISSING
        levels[self.stored >= self.possible] = _FULL
        levels[np.isnan(self.stored)] = _UNREADABLE
        return levels.astype(np.intp)


def cut_into_panels(
    shards: ShardMap, max_rows: int, max_columns: int, max_panels: Callable[[int, int], int]
) -> tuple[list[Panel], chunk_keys.Coords]:
    """Cut a map into panels of one size; the last two dimensions are rows and columns.

    `max_panels` returns the most panels for a number of rows and columns. Also return the number of
    shards along each dimension that share a place.
    """
    shape = shards.shape
    if 0 in shape:
        return [], (1,) * len(shape)
    factors = _factors(shape, max_rows, max_columns, max_panels)
    stored: npt.NDArray[Any] = shards.fill
    possible = np.ones((), dtype=np.float64)
    boxes = box_grids.BoxGrid(shards.sides or shards.chunks_per_shard)
    for axis, (n, factor) in enumerate(zip(shape, factors, strict=True)):
        side, numbers = boxes.sides[axis], np.arange(n + 1)
        if isinstance(side, int):
            starts = side * numbers
        else:
            starts = np.array([boxes.bounds(axis, i)[0] for i in numbers.tolist()])
        extents = np.diff(np.minimum(starts, shards.grid_shape[axis]))  # fewer at the edge
        # float32 holds each count of chunks of a shard; sums over places need float64.
        stored = stored * extents.astype(np.float32).reshape(-1, *(1,) * (len(shape) - 1 - axis))
        if factor > 1:
            starts = np.arange(0, n, factor)
            stored = np.add.reduceat(stored, starts, axis=axis, dtype=np.float64)
            extents = np.add.reduceat(extents, starts)
        possible = np.multiply.outer(possible, extents.astype(np.float64))
    flat = (1,) * (2 - len(shape)) + stored.shape
    stored = np.rint(stored.reshape(flat).astype(np.float64))
    possible = possible.reshape(flat)
    panels = [
        Panel(_title(at, factors, shape), stored[at], possible[at])
        for at in product(*map(range, flat[:-2]))
    ]
    return panels, factors


def _factors(
    shape: chunk_keys.Coords, max_rows: int, max_columns: int, max_panels: Callable[[int, int], int]
) -> chunk_keys.Coords:
    """Return the number of shards along each dimension that share a place."""
    *leading, n_rows, n_columns = (1, 1, *shape)
    flat = -(-n_rows // max_rows), -(-n_columns // max_columns)
    most = max(1, max_panels(-(-n_rows // flat[0]), -(-n_columns // flat[1])))
    factors = [1] * len(leading)
    sizes = leading
    while math.prod(sizes) > most:
        axis = sizes.index(max(sizes))
        factors[axis] += max(1, factors[axis] // 8)  # few steps also for millions of shards
        sizes = [-(-n // factor) for n, factor in zip(leading, factors, strict=True)]
    return (*factors, *flat)[2:]


def _title(at: chunk_keys.Coords, factors: chunk_keys.Coords, shape: chunk_keys.Coords) -> str:
    ranges = [
        (place * factor, min((place + 1) * factor, size))
        for place, factor, size in zip(at, factors, shape, strict=False)
    ]
    parts = [str(start) if stop - start == 1 else f"{start}:{stop}" for start, stop in ranges]
    return f"[{', '.join([*parts, ':', ':'])}]" if parts else ""


def render_text(
    shards: ShardMap, *, width: int = 80, height: int = 40, is_ascii: bool = False
) -> str:
    """Draw a map with one character for each place. Legend and titles need more room."""
    title_width = title_height = 0
    if len(shards.shape) > 2:
        title_width = len(f"[{', '.join(f'{n}:{n}' for n in shards.shape[:-2])}, :, :]")
        title_height = 2  # with the empty line above it

    def n_across(columns: int) -> int:
        return max(1, (width + _GAP) // (columns + _GAP))

    def max_panels(rows: int, columns: int) -> int:
        return height // (rows + title_height) * n_across(max(columns, title_width))

    panels, factors = cut_into_panels(shards, max(1, height - title_height), width, max_panels)
    signs = _ASCII if is_ascii else _BLOCKS
    if shards.is_sharded and not is_ascii and math.prod(factors) == 1:
        signs = signs.replace(_BLOCKS[_FULL], _FULL_SHARD)
    blocks = [
        [panel.title] * bool(panel.title)
        + ["".join(signs[level] for level in row) for row in panel.levels()]
        for panel in panels
    ]
    cell = max((len(line) for block in blocks for line in block), default=0)
    lines = [_headline(shards), ""]
    for i in range(0, len(blocks), n_across(cell)):
        rows = zip(*blocks[i : i + n_across(cell)], strict=True)
        lines += [(" " * _GAP).join(line.ljust(cell) for line in row) for row in rows]
        lines.append("")
    legend = [
        f"{''.join(signs[level] for level in _LEVELS[state])} {state} {n:,}"
        for state, n in shards.counts().items()
        if n or state != "unreadable"
    ]
    lines += ["   ".join(legend), *_scale("sign", shards, factors)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def render_html(shards: ShardMap) -> str:
    """Draw a map into a page that loads no other file."""
    svg = render_figure(shards, "svg").decode()
    errors = "".join(f"<li>{html.escape(error)}</li>" for error in shards.errors)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{html.escape(_headline(shards))}</title>\n"
        f"{svg[svg.index('<svg') :]}<ul>{errors}</ul>\n</html>\n"
    )


def render_figure(shards: ShardMap, file_format: Literal["png", "svg"]) -> bytes:
    try:
        from matplotlib import rc_context
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise SpecError(
            "pictures are drawn with matplotlib: pip install 'zarr-shardstore[examples]'"
        ) from error

    def max_panels(rows: int, columns: int) -> int:
        return min(64, _MAX_SIDE**2 // (rows * columns))

    panels, factors = cut_into_panels(shards, _MAX_SIDE, _MAX_SIDE, max_panels)
    across = math.ceil(math.sqrt(max(1, len(panels))))
    down = max(1, -(-len(panels) // across))
    figure = Figure(figsize=(max(6, 2.2 * across), max(4, 2.2 * down + 1)), layout="constrained")
    title = "\n".join([_headline(shards), *_scale("place", shards, factors)])
    figure.suptitle(title, fontsize=10, parse_math=False)
    colors, norm = ListedColormap(_COLORS), BoundaryNorm(range(7), 6)
    for axes in figure.subplots(down, across, squeeze=False).flat:
        axes.set_axis_off()
    for axes, panel in zip(figure.axes, panels, strict=False):
        axes.imshow(panel.levels(), cmap=colors, norm=norm, interpolation="nearest", aspect="auto")
        axes.set_title(panel.title, fontsize=8)
        if shards.is_sharded and math.prod(factors) == 1:
            _draw_borders(axes, panel.stored.shape)
    legend = [
        Patch(facecolor=_COLORS[_LEVELS[state][-1]], edgecolor="grey", label=f"{state} {n:,}")
        for state, n in shards.counts().items()
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4)
    picture = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(picture, format=file_format, dpi=120)
    return picture.getvalue()


def _draw_borders(axes: Any, shape: tuple[int, ...]) -> None:
    """Draw white lines between shards, thinner where there are more of them."""
    n_rows, n_columns = shape
    if max(shape) > _MAX_BORDERS:
        return
    style = {"colors": "white", "linewidth": min(1.0, 30 / max(shape))}
    axes.hlines([i - 0.5 for i in range(1, n_rows)], -0.5, n_columns - 0.5, **style)
    axes.vlines([i - 0.5 for i in range(1, n_columns)], -0.5, n_rows - 0.5, **style)


def _headline(shards: ShardMap) -> str:
    most = "up to " if shards.sides else ""
    of = f", {most}{by(shards.chunks_per_shard or (1,))} chunks each" if shards.is_sharded else ""
    return f"/{printable(shards.path)}: {by(shards.shape or (1,))} {_unit(shards.is_sharded)}{of}"


def _scale(place: str, shards: ShardMap, factors: chunk_keys.Coords) -> list[str]:
    if math.prod(factors) == 1:
        return []
    return [f"One {place} stands for {by(factors)} {_unit(shards.is_sharded)}."]


def _unit(is_sharded: bool) -> str:
    return "shards" if is_sharded else "chunks"


def by(numbers: Iterable[int]) -> str:
    return " × ".join(f"{n:,}" for n in numbers)


def printable(text: str) -> str:
    """Escape characters that a terminal would obey, or that end a line.

    >>> printable("a" + chr(27) + "[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(s if s.isprintable() else s.encode("unicode_escape").decode() for s in text)
