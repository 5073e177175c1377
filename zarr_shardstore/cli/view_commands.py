"""The commands that only look."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zarr_shardstore.cli.arguments import (
    Debug,
    Json,
    Paths,
    SourceOptions,
    Store,
)
from zarr_shardstore.cli.failures import failures_as_sentences
from zarr_shardstore.cli.parsing import (
    NotPossibleError,
    check_source,
    storage_options_of,
)
from zarr_shardstore.cli.printing import info_tree, totals_text
from zarr_shardstore.inspect.info import get_shard_info
from zarr_shardstore.inspect.pictures import render_figure, render_html, render_text
from zarr_shardstore.inspect.shard_map import shard_map

_ENDLESS = 100_000
"""Characters in a line of what is no terminal."""

_MAX_ERRORS = 20
"""Damaged shards that `map` names."""


def info(
    store: Store,
    path: Paths = None,
    source_option: SourceOptions = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show arrays, and what their shards hold.

    If something is damaged, it says so and ends with status 1.
    """
    with failures_as_sentences(debug=debug):
        found = get_shard_info(
            check_source(store),
            paths=path or None,
            storage_options=storage_options_of(source_option or ()),
        )
        if not found.arrays:
            raise NotPossibleError(f"there is no array in {store!r}")
        if as_json:
            typer.echo(json.dumps(found.as_dict(), indent=2))
        else:
            console = Console()
            if not console.is_terminal:
                console = Console(width=_ENDLESS)
            console.print(info_tree(found), highlight=False)
            console.print(totals_text(found), highlight=False, markup=False)
        if any(array.n_errors for array in found.arrays):
            raise typer.Exit(1)


def draw_map(
    store: Store,
    path: Annotated[str, typer.Argument(help="Of the array; the root, if left out.")] = "",
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw into this file, with matplotlib.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Draw into this page, which loads nothing.")
    ] = None,
    source_option: SourceOptions = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw which shards there are, and how full.

    If some are damaged, it names them and ends with status 1.
    """
    with failures_as_sentences(debug=debug):
        options = storage_options_of(source_option or ())
        shards = shard_map(check_source(store), path, storage_options=options)
        if png is not None:
            png.write_bytes(render_figure(shards, "png"))
        if html is not None:
            html.write_text(render_html(shards), encoding="utf-8")
        for file in (png, html):
            if file is not None:
                typer.echo(f"drawn: {file}", err=as_json)
        if as_json:
            typer.echo(json.dumps(shards.as_dict()))
        elif png is None and html is None:
            size = Console().size if sys.stdout.isatty() else None
            typer.echo(
                render_text(
                    shards,
                    width=80 if size is None else size.width,
                    height=40 if size is None else max(8, size.height - 6),
                    is_ascii=not _can_show_blocks(),
                ),
                nl=False,
            )
        for error in shards.errors[:_MAX_ERRORS]:
            typer.echo(f"! {error}", err=True)
        if len(shards.errors) > _MAX_ERRORS:
            typer.echo(f"! and {len(shards.errors) - _MAX_ERRORS:,} more", err=True)
        if shards.errors:
            raise typer.Exit(1)


def _can_show_blocks() -> bool:
    try:
        "·░▒▓█×".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
