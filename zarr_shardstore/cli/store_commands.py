"""The commands that show what a store holds, and keep its shards in order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from zarr_shardstore.cli.arguments import (
    Debug,
    DryRun,
    Json,
    Paths,
    SourceOptions,
    Store,
    check_source,
    storage_options_of,
)
from zarr_shardstore.cli.messages import (
    NotPossibleError,
    fail_if_damaged,
    failures_as_sentences,
)
from zarr_shardstore.cli.reports import compaction_text, info_text
from zarr_shardstore.convert.compact import compact_store
from zarr_shardstore.errors import SpecError
from zarr_shardstore.inspect.info import get_shard_info, sharded_paths
from zarr_shardstore.inspect.pictures import render_figure, render_html, render_text
from zarr_shardstore.inspect.shard_map import shard_map
from zarr_shardstore.store.sharding_mapping import ShardingMapping


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
            storage_options=storage_options_of(source_option),
        )
        if not found.arrays:
            raise NotPossibleError(f"there is no array in {store!r}")
        typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else info_text(found))
        if any(array.n_errors for array in found.arrays):
            raise typer.Exit(1)


def draw_map(
    store: Store,
    path: Annotated[str, typer.Argument(help="Of the array; the root, if left out.")] = "",
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw into this file, with matplotlib.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Draw into a page, which loads nothing.")
    ] = None,
    source_option: SourceOptions = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw which shards there are, and how full.

    If some are damaged, it names them and ends with status 1.
    """
    with failures_as_sentences(debug=debug):
        options = storage_options_of(source_option)
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
            width, height = 80, 40
            if sys.stdout.isatty():
                size = get_terminal_size()
                width, height = size.columns, max(8, size.lines - 6)
            text = render_text(shards, width=width, height=height, is_ascii=not _can_show_blocks())
            typer.echo(text, nl=False)
        fail_if_damaged(shards.errors)


def _can_show_blocks() -> bool:
    try:
        "·░▒▓█×".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def compact(
    store: Store,
    prefix: Annotated[str, typer.Argument(help="Only chunks whose keys start with it.")] = "",
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove the dead bytes of shards.

    Erased and replaced chunks leave them. Leftovers of a killed writer are put in order, too.
    Other programs may continue to write.
    """
    with failures_as_sentences(debug=debug):
        options = storage_options_of(source_option)
        report = compact_store(
            check_source(store), prefix, storage_options=options, dry_run=dry_run
        )
        document = json.dumps(report.as_dict(), indent=2)
        typer.echo(document if as_json else compaction_text(report, store))
        fail_if_damaged(report.errors)


def consolidate(
    store: Store,
    path: Annotated[str, typer.Argument(help="Only arrays at or below it.")] = "",
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Store the indexes of all shards of an array in one object.

    A cold reader of the array then asks for that object instead of an index for each shard. A
    shard that changes later is read by its own index; run it again when many have changed.
    """
    with failures_as_sentences(debug=debug):
        options = storage_options_of(source_option)
        mapping = ShardingMapping(check_source(store), storage_options=options)
        if dry_run:
            mapping._engine.check_consolidation()
            paths = sharded_paths(mapping, path)
        else:
            paths = mapping.consolidate_index(path)
        if not paths:
            raise SpecError(f"there is no sharded array in {store}")
        if as_json:
            typer.echo(json.dumps({"paths": paths, "dry_run": dry_run}, indent=2))
            return
        n_arrays = "1 array" if len(paths) == 1 else f"{len(paths)} arrays"
        verb = "would be" if dry_run else "are"
        typer.echo(f"the indexes of {n_arrays} in {store} {verb} consolidated")
