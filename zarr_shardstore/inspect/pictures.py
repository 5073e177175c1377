"""Pictures of shard maps: text for a terminal; PNG, and SVG in a page, drawn by matplotlib.

A picture has flat panels: slices over the leading dimensions of the map. If the map is larger
than the picture, several shards share a place, which shows the sum of their chunks.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.inspect.shard_map import ShardMap

_MISSING, _FULL, _UNREADABLE = 0, 4, 5
"""Levels of a place. Levels 1 to 3 are partial: a third, two thirds, and more of its chunks."""
_BLOCKS = "·░▒▓█!"
_ASCII = ".-+*#!"
_COLORS = ("#e8e8e8", "#fbd9b0", "#f2a65a", "#c8702a", "#2a6f97", "#d00000")
"""By level; they also differ in grey."""

_LEVELS = {
    "full": (_FULL,),
    "partial": (1, 2, 3),
    "missing": (_MISSING,),
    "unreadable": (_UNREADABLE,),
}

_GAP = 2
"""Characters between two panels in one line."""

_MAX_SIDE = 1024
"""Most places of a drawn picture in each direction."""


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Two dimensions of a map at fixed places of the others.

    Parameters
    ----------
    title : str
        Position in the leading dimensions, as ``"[3, 4:8, :, :]"``; empty if there are none.
    stored, possible : ndarray
        Chunks that each place holds, and can hold; float64, rows and columns. `stored` is NaN
        where a shard of the place could not be read.
    """

    title: str
    stored: npt.NDArray[np.float64]
    possible: npt.NDArray[np.float64]

    def levels(self) -> npt.NDArray[np.intp]:
        """Return the level of each place."""
        levels = 1 + np.minimum(2, np.floor(3 * self.stored / self.possible))
        levels[self.stored == 0] = _MISSING
        levels[self.stored >= self.possible] = _FULL
        levels[np.isnan(self.stored)] = _UNREADABLE
        return levels.astype(np.intp)


def cut_into_panels(
    shards: ShardMap, max_rows: int, max_columns: int, max_panels: Callable[[int, int], int]
) -> tuple[list[Panel], Coords]:
    """Cut a map into panels that fit; the last two dimensions are rows and columns.

    A map of one dimension is one row. A grid without shards has no panel.

    Parameters
    ----------
    max_rows, max_columns : int
        Most rows and columns of a panel.
    max_panels
        Returns the most panels of so many rows and columns.

    Returns
    -------
    panels : list of Panel
        All of one size.
    factors : tuple of int
        Shards along each dimension that share a place.
    """
    shape = shards.shape
    if 0 in shape:
        return [], (1,) * len(shape)
    factors = _factors(shape, max_rows, max_columns, max_panels)
    stored: npt.NDArray[Any] = shards.fill
    possible = np.ones((), dtype=np.float64)
    for axis, (n, factor) in enumerate(zip(shape, factors, strict=True)):
        cps, n_chunks = shards.chunks_per_shard[axis], shards.grid_shape[axis]
        extents = np.minimum(cps, n_chunks - cps * np.arange(n))  # fewer chunks at the edge
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
    shape: Coords, max_rows: int, max_columns: int, max_panels: Callable[[int, int], int]
) -> Coords:
    """Return how many shards share a place along each dimension."""
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


def _title(at: Coords, factors: Coords, shape: Coords) -> str:
    if not at:
        return ""
    parts = []
    for p, f, n in zip(at, factors[: len(at)], shape[: len(at)], strict=True):
        start, stop = p * f, min((p + 1) * f, n)
        parts.append(str(start) if stop - start == 1 else f"{start}:{stop}")
    return f"[{', '.join([*parts, ':', ':'])}]"


def render_text(
    shards: ShardMap, *, width: int = 80, height: int = 40, is_ascii: bool = False
) -> str:
    """Draw a map with one character for each place.

    Parameters
    ----------
    width, height
        Characters and lines of the picture; legend and titles come on top.
    is_ascii
        Draw with characters that every terminal has.
    """
    signs = _ASCII if is_ascii else _BLOCKS
    title_width = 0
    if len(shards.shape) > 2:
        title_width = len(f"[{', '.join(f'{n}:{n}' for n in shards.shape[:-2])}, :, :]")

    def n_across(columns: int) -> int:
        return max(1, (width + _GAP) // (columns + _GAP))

    title_height = 2 if title_width else 0  # with the empty line above it
    panels, factors = cut_into_panels(
        shards,
        max(1, height - title_height),
        width,
        lambda rows, columns: height // (rows + title_height) * n_across(max(columns, title_width)),
    )
    blocks = [[panel.title] * bool(panel.title) + _lines(panel, signs) for panel in panels]
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


def _lines(panel: Panel, signs: str) -> list[str]:
    return ["".join(signs[level] for level in row) for row in panel.levels()]


def render_html(shards: ShardMap) -> str:
    """Draw a map into a page that loads nothing.

    Raises
    ------
    SpecError
        If matplotlib is not installed.
    """
    svg = render_figure(shards, "svg").decode()
    errors = "".join(f"<li>{html.escape(error)}</li>" for error in shards.errors)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{html.escape(_headline(shards))}</title>\n"
        f"{svg[svg.index('<svg') :]}<ul>{errors}</ul>\n</html>\n"
    )


def render_figure(shards: ShardMap, file_format: Literal["png", "svg"]) -> bytes:
    """Draw a map with matplotlib.

    Raises
    ------
    SpecError
        If matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise SpecError(
            "pictures are drawn with matplotlib: pip install 'zarr-shardstore[examples]'"
        ) from error
    panels, factors = cut_into_panels(
        shards,
        _MAX_SIDE,
        _MAX_SIDE,
        lambda rows, columns: min(64, _MAX_SIDE**2 // (rows * columns)),
    )
    across = math.ceil(math.sqrt(max(1, len(panels))))
    down = max(1, -(-len(panels) // across))
    figure = Figure(figsize=(max(6, 2.2 * across), max(4, 2.2 * down + 1)), layout="constrained")
    title = "\n".join([_headline(shards), *_scale("place", shards, factors)])
    figure.suptitle(title, fontsize=10, parse_math=False)
    colors, norm = ListedColormap(_COLORS), BoundaryNorm(range(7), 6)
    all_axes = figure.subplots(down, across, squeeze=False).flat
    for axes, panel in zip(all_axes, panels, strict=False):
        axes.imshow(panel.levels(), cmap=colors, norm=norm, interpolation="nearest", aspect="auto")
        axes.set_title(panel.title, fontsize=8)
        axes.set(xticks=(), yticks=())
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    legend = [
        Patch(facecolor=_COLORS[_LEVELS[state][-1]], edgecolor="grey", label=f"{state} {n:,}")
        for state, n in shards.counts().items()
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4)
    picture = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(picture, format=file_format, dpi=120)
    return picture.getvalue()


def _headline(shards: ShardMap) -> str:
    of = f", {_by(shards.chunks_per_shard)} chunks each" if shards.is_sharded else ""
    path = "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in shards.path
    )
    return f"/{path}: {_by(shards.shape)} {_unit(shards)}{of}"


def _scale(place: str, shards: ShardMap, factors: Coords) -> list[str]:
    """Return a line that says how many shards share a place, if several do."""
    if math.prod(factors) == 1:
        return []
    return [f"One {place} stands for {_by(factors)} {_unit(shards)}."]


def _unit(shards: ShardMap) -> str:
    return "shards" if shards.is_sharded else "chunks"


def _by(numbers: Iterable[int]) -> str:
    return " × ".join(f"{n:,}" for n in numbers) or "1"
