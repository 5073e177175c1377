"""Entry points as the project declares them, also where the package is not installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import fsspec


def declared(group: str) -> dict[str, str]:
    """Objects by name."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    entry_points: dict[str, str] = project["entry-points"][group]
    return entry_points


def register_shard() -> None:
    """As fsspec does by the entry point."""
    name = declared("fsspec.specs")["shard"]
    fsspec.register_implementation("shard", name.replace(":", "."), clobber=True)
