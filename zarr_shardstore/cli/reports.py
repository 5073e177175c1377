"""Commands that only read a store: info and map."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import typer

from zarr_shardstore.cli import output
from zarr_shardstore.tools.inspect.info import get_shard_info
from zarr_shardstore.tools.inspect.shard_map import (
    render_figure,
    render_html,
    render_text,
    shard_map,
)


def info(store: str, as_json: bool, **options: Any) -> None:
    found = get_shard_info(store, **options)
    output.check_arrays(found.arrays, store)
    output.print_report(as_json, found.as_dict(), output.info_text(found))
    if any(array.n_errors for array in found.arrays):
        raise typer.Exit(1)
    output.fail_if_left(found.n_unknown)


def draw_map(
    store: str, path: str, png: Path | None, html: Path | None, as_json: bool, **options: Any
) -> None:
    shards = shard_map(store, path, **options)
    if png is not None:
        png.write_bytes(render_figure(shards, "png"))
    if html is not None:
        html.write_text(render_html(shards), encoding="utf-8")
    drawn = [file for file in (png, html) if file is not None]
    for file in drawn:
        typer.echo(f"drawn: {file}", err=as_json)
    if as_json:
        typer.echo(json.dumps(shards.as_dict()))
    elif not drawn:
        width, n_lines = get_terminal_size((80, 46))
        is_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
        text = render_text(shards, width=width, height=max(8, n_lines - 6), is_ascii=is_ascii)
        typer.echo(text, nl=False)
    output.fail_if_damaged(shards.errors)
