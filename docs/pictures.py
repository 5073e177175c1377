"""Draw the pictures of the site: ``python docs/pictures.py``.

They are stored with the pages, so that a build needs no matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

FOLDER = Path(__file__).parent / "pictures"
CHUNK, INDEX, DEAD, TEXT, LINE = "#5c6bc0", "#ef6c00", "#cfd8dc", "#263238", "#546e7a"


@contextmanager
def drawing(name: str, width: float, height: float) -> Iterator[Any]:
    """Give axes of so many units, without a frame; store them as SVG."""
    with mpl.rc_context({"svg.hashsalt": name, "font.size": 10, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(width, height), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
        axes.axis("off")
        yield axes
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def box(axes: Any, x: float, y: float, width: float, height: float, color: str, text: str = "",
        size: float = 9) -> None:  # fmt: skip
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white"))
    ink = TEXT if color == DEAD else "white"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, size=size)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: float = 0) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, color=LINE, connectionstyle=style
        )
    )


def packed() -> None:
    """728 chunk files become 8 shards."""
    with drawing("packed", 8, 2.6) as axes:
        points = {"lw": 3.6, "color": CHUNK, "dashes": (1.5, 0.5), "dash_capstyle": "butt"}
        for row in range(27):
            width = 2.7 if row < 26 else 2.6
            axes.plot([0.3, 0.3 + width], [2.15 - row * 0.0745] * 2, **points)
        axes.text(1.65, 2.4, "728 files, one for each chunk", ha="center", color=TEXT)
        arrow(axes, (3.35, 1.25), (4.65, 1.25))
        axes.text(4.0, 1.42, "shard_store", ha="center", color=TEXT, family="monospace", size=9)
        axes.text(4.0, 1.0, "no chunk is decoded", ha="center", color=LINE, size=8)
        for i in range(8):
            x, y = 5.0 + (i % 2) * 1.4, 1.72 - (i // 2) * 0.5
            box(axes, x, y, 1.05, 0.36, CHUNK)
            box(axes, x + 1.05, y, 0.15, 0.36, INDEX)
            for k in range(1, 14):
                axes.plot([x + k * 0.075] * 2, [y, y + 0.36], color="white", lw=0.5)
        axes.text(6.3, 2.4, "8 shards, each with its index", ha="center", color=TEXT)


def shard() -> None:
    """A shard: entries in any order, then the index."""
    with drawing("shard", 8, 1.9) as axes:
        names = ["c/0/1", "c/0/0", "", "c/1/1"]
        x = 0.3
        centers = {}
        for name, width in zip(names, (1.1, 1.5, 0.7, 1.2), strict=True):
            box(axes, x, 0.9, width, 0.5, CHUNK if name else DEAD, name or "dead")
            centers[name] = x + width / 2
            x += width
        rows = ["c/0/0", "c/0/1", "c/1/0", "c/1/1"]
        for i, name in enumerate(rows):
            text = ("110, 150", "0, 110", "missing", "330, 120")[i]
            box(axes, x + i * 0.72, 0.9, 0.72, 0.5, INDEX, text, 8)
            if name in centers:
                arrow(axes, (x + 0.36 + i * 0.72, 0.9), (centers[name], 0.9), -0.25)
        box(axes, x + 2.88, 0.9, 0.3, 0.5, LINE, "crc", 7)
        for middle, title in (
            (2.5, "entries: the bytes of chunks, as zarr encoded them"),
            (x + 1.6, "index: offset and size of each"),
        ):
            axes.text(middle, 1.55, title, ha="center", color=TEXT)


def two_rounds() -> None:
    """A read of many chunks: indexes, then spans."""
    with drawing("two_rounds", 8, 2.3) as axes:
        box(axes, 0.1, 0.55, 1.4, 1.2, LINE, "z[10:60, :]\n\n9 chunks\nof 3 shards")
        titles = ("round 1: indexes, 3 requests", "round 2: coalesced spans, 4 requests")
        for left, title in zip((2.1, 5.2), titles, strict=True):
            is_first = left < 3
            arrow(axes, (left - 0.5, 1.15), (left - 0.1, 1.15))
            axes.text(left + 1.3, 2.0, title, ha="center", color=TEXT)
            for i in range(3):
                y = 1.4 - i * 0.5
                box(axes, left, y, 2.1, 0.36, DEAD)
                box(axes, left + 2.1, y, 0.5, 0.36, INDEX if is_first else DEAD)
                spans = ((0.2, 0.6), (1.1, 0.3)) if i == 1 else ((0.3 + i * 0.2, 0.9),)
                for start, width in () if is_first else spans:
                    box(axes, left + start, y, width, 0.36, CHUNK)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    packed()
    shard()
    two_rounds()
