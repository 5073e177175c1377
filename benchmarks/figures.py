"""What a benchmark hands to the page of the site beside its text: a plot, and slower rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OURS_COLOR = "#ef6c00"
COLORS = ("#5c6bc0", "#26a69a", "#8d6e63", "#78909c", "#ab47bc", "#9ccc65", "#29b6f6")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--svg", type=Path, help="store a plot there, if matplotlib is installed")
    parser.add_argument("--slower", type=Path, help="store rows in which a peer is faster, as JSON")


def store_slower(path: Path | None, rows: Sequence[Mapping[str, str]]) -> None:
    """Store the rows of a table of figures in which a peer is faster."""
    if path is not None:
        path.write_text(json.dumps(list(rows)), encoding="utf-8")


@contextmanager
def drawing(path: Path, n_rows: int, n_columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Give a grid of axes; store them as an SVG file without a date.

    Raises
    ------
    ImportError
        Without matplotlib.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    options: Any = {"svg.hashsalt": path.stem, "font.size": 9, "font.family": "DejaVu Sans"}
    with mpl.rc_context(options):
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        yield figure.subplots(n_rows, n_columns, squeeze=False)
        figure.savefig(path, metadata={"Date": None})


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each contestant: shades of one color for this package."""
    peers = iter(COLORS * 3)
    mine = iter((OURS_COLOR, "#ffb74d", "#bf360c"))
    return {name: next(mine if name.startswith("ours") else peers) for name in names}
