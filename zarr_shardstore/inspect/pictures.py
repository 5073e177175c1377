"""Pictures of a shard map: text for a terminal, PNG, and HTML that needs nothing else."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.grid import Box
from zarr_shardstore.inspect.shard_map import Panel, Panels, ShardMap, cut_into_panels

_BLOCKS = {"missing": "·", "partial": "░▒▓", "full": "█", "unreadable": "!"}
_ASCII = {"missing": ".", "partial": "-+*", "full": "#", "unreadable": "!"}

_COLORS = {"missing": "#e8e8e8", "partial": "#f2a65a", "full": "#2a6f97", "unreadable": "#d00000"}
_PARTIAL = ("#fbd9b0", "#f2a65a", "#c8702a")
"""Up to a third, up to two thirds, and more of the chunks; told apart in grey, too."""

_MAX_PLACES_OF_SVG = 20_000
"""Rectangles with tooltips in a page of about 3 MB, which browsers still scroll through."""

_MAX_PLACES_OF_PNG = 2_000_000
_GAP = 2
"""Places between two panels that stand side by side."""


def render_text(
    shards: ShardMap, *, width: int = 80, height: int = 40, is_ascii: bool = False
) -> str:
    """Draw a map with one character for each shard, or for as many as must share one.

    Parameters
    ----------
    width, height
        Characters and lines of the picture; legend and titles come on top.
    is_ascii
        Draw with signs that every terminal has.
    """
    signs = _ASCII if is_ascii else _BLOCKS

    def fits(n: int, rows: int, columns: int) -> bool:
        per_band = max(1, (width + _GAP) // (max(columns, _title_width(shards)) + _GAP))
        bands = -(-n // per_band)
        return columns <= width and bands * (rows + (2 if n > 1 else 0)) <= height

    panels = cut_into_panels(shards, fits)
    lines = [_headline(shards), ""]
    cell = max([panels.n_columns, *(len(panel.title) for panel in panels.panels)])
    per_band = max(1, (width + _GAP) // (cell + _GAP))
    for i in range(0, len(panels.panels), per_band):
        band = panels.panels[i : i + per_band]
        if band[0].title:
            lines.append((" " * _GAP).join(panel.title.ljust(cell) for panel in band))
        drawn = [_draw(panel, signs) for panel in band]
        lines += [
            (" " * _GAP).join(row.ljust(cell) for row in rows) for rows in zip(*drawn, strict=True)
        ]
        lines.append("")
    lines.append(_legend(shards, signs))
    if math.prod(panels.factors) > 1:
        lines.append(f"One sign stands for {_by(panels.factors)} {_unit(shards)}.")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _draw(panel: Panel, signs: dict[str, str]) -> list[str]:
    def sign(row: int, column: int) -> str:
        state, third = _state(panel, row, column)
        return signs[state][third if state == "partial" else 0]

    rows, columns = panel.stored.shape
    return ["".join(sign(row, column) for column in range(columns)) for row in range(rows)]


def _state(panel: Panel, row: int, column: int) -> tuple[str, int]:
    """What a place shows; of a partial one also which third of its chunks is stored."""
    stored, possible = panel.stored[row, column], panel.possible[row, column]
    if panel.unreadable[row, column]:
        return "unreadable", 0
    if stored == 0:
        return "missing", 0
    if stored >= possible:
        return "full", 0
    return "partial", min(2, int(3 * stored / possible))


def render_png(shards: ShardMap) -> bytes:
    """Draw a map as PNG, with matplotlib.

    Raises
    ------
    SpecError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise SpecError(
            "a PNG is drawn with matplotlib: pip install 'zarr-shardstore[examples]'"
        ) from error
    panels = cut_into_panels(
        shards, lambda n, rows, columns: n <= 64 and n * rows * columns <= _MAX_PLACES_OF_PNG
    )
    n = max(1, len(panels.panels))
    across = math.ceil(math.sqrt(n))
    down = -(-n // across)
    figure = Figure(figsize=(max(6, 2.2 * across), max(4, 2.2 * down + 1)), layout="constrained")
    figure.suptitle(_headline(shards).replace("$", r"\$"), fontsize=10)
    colors = ListedColormap([_COLORS["missing"], *_PARTIAL, _COLORS["full"], _COLORS["unreadable"]])
    norm = BoundaryNorm(range(7), 6)
    for axes, panel in zip(
        figure.subplots(down, across, squeeze=False).flat, panels.panels, strict=False
    ):
        axes.imshow(_levels(panel), cmap=colors, norm=norm, interpolation="nearest", aspect="auto")
        axes.set_title(panel.title, fontsize=8)
        axes.set(xticks=(), yticks=())
    for axes in list(figure.axes)[len(panels.panels) :]:
        axes.set_axis_off()
    handles = [Patch(facecolor=_COLORS[state], edgecolor="grey") for state in _COLORS]
    labels = [f"{state} {n:,}" for state, n in shards.counts().items()]
    order = ["full", "partial", "missing", "unreadable"]
    by_state = dict(zip(_COLORS, handles, strict=True))
    figure.legend([by_state[s] for s in order], labels, loc="outside lower center", ncols=4)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _levels(panel: Panel) -> list[list[int]]:
    """Number of the colour of each place."""
    base = {"missing": 0, "partial": 1, "full": 4, "unreadable": 5}
    rows, columns = panel.stored.shape
    return [
        [base[state] + third for state, third in (_state(panel, r, c) for c in range(columns))]
        for r in range(rows)
    ]


def render_html(shards: ShardMap) -> str:
    """Draw a map as a page that loads nothing; each place says what it holds."""
    panels = cut_into_panels(
        shards, lambda n, rows, columns: n * rows * columns <= _MAX_PLACES_OF_SVG
    )
    headline = html.escape(_headline(shards))
    body = "\n".join(_svg(shards, panels, panel) for panel in panels.panels)
    legend = " ".join(
        f'<span><i style="background:{_COLORS[state]}"></i>{state} {n:,}</span>'
        for state, n in shards.counts().items()
    )
    shared = ""
    if math.prod(panels.factors) > 1:
        shared = f"<p>One rectangle stands for {_by(panels.factors)} {_unit(shards)}.</p>"
    errors = "".join(f"<li>{html.escape(error)}</li>" for error in shards.errors)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{headline}</title>
<style>
body {{ font: 14px sans-serif; margin: 2em; }}
figure {{ display: inline-block; margin: 0 1em 1em 0; }}
span {{ margin-right: 1.5em; }}
i {{ display: inline-block; width: 1em; height: 1em; margin-right: .4em; border: 1px solid #888; }}
rect:hover {{ stroke: #000; }}
</style>
</head>
<body>
<h1>{headline}</h1>
<p>{legend}</p>
{shared}
{body}
{f"<ul>{errors}</ul>" if errors else ""}
</body>
</html>
"""


def _svg(shards: ShardMap, panels: Panels, panel: Panel) -> str:
    rows, columns = panel.stored.shape
    side = max(3, min(16, 900 // max(columns, 1)))
    rectangles = "\n".join(
        f'<rect x="{column * side}" y="{row * side}" width="{side - 1}" height="{side - 1}" '
        f'fill="{color}"><title>{html.escape(text)}</title></rect>'
        for row, column, color, text in _places(shards, panels, panel)
    )
    caption = f"<figcaption>{html.escape(panel.title)}</figcaption>" if panel.title else ""
    return (
        f'<figure>{caption}<svg xmlns="http://www.w3.org/2000/svg" width="{columns * side}" '
        f'height="{rows * side}">\n{rectangles}\n</svg></figure>'
    )


def _places(shards: ShardMap, panels: Panels, panel: Panel) -> Iterator[tuple[int, int, str, str]]:
    """Row, column, colour and text of each place."""
    rows, columns = panel.stored.shape
    for row in range(rows):
        for column in range(columns):
            state, third = _state(panel, row, column)
            color = _PARTIAL[third] if state == "partial" else _COLORS[state]
            text = _describe(shards, panels.box(panel, row, column))
            known = f"{panel.stored[row, column]:,.0f}" if state != "unreadable" else "unknown"
            yield (
                row,
                column,
                color,
                f"{text}: {known} of {panel.possible[row, column]:,.0f} chunks",
            )


def _describe(shards: ShardMap, box: Box) -> str:
    """Key and coordinates of a shard, or the coordinates of several."""
    unit = _unit(shards)
    if all(stop - start == 1 for start, stop in box):
        coords = tuple(start for start, _ in box)
        return f"{shards.key_of(coords)} ({unit.removesuffix('s')} {list(coords)})"
    return f"{unit} [{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _unit(shards: ShardMap) -> str:
    return "shards" if shards.is_sharded else "chunks"


def _by(numbers: tuple[int, ...]) -> str:
    return " × ".join(f"{n:,}" for n in numbers) or "1"


def _title_width(shards: ShardMap) -> int:
    """Characters of the longest title that a panel may have."""
    if len(shards.shape) < 3:
        return 0
    return len(f"[{', '.join(f'{n}:{n}' for n in shards.shape[:-2])}, :, :]")


def _headline(shards: ShardMap) -> str:
    of = f", {_by(shards.chunks_per_shard)} chunks each" if shards.is_sharded else ""
    path = "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in shards.path
    )
    return f"/{path}: {_by(shards.shape)} {_unit(shards)}{of}"


def _legend(shards: ShardMap, signs: dict[str, str]) -> str:
    parts = [
        f"{signs[state]} {state} {n:,}"
        for state, n in shards.counts().items()
        if n or state != "unreadable"
    ]
    return "   ".join(parts)
