"""The commands, and the options that they take."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zarr_shardstore import __version__
from zarr_shardstore.cli.arguments import (
    ChunksPerShard,
    Debug,
    DeclarationOption,
    Destination,
    DestinationOptions,
    DryRun,
    IndexLocationOption,
    Json,
    Order,
    OrderOption,
    Paths,
    Processes,
    Source,
    SourceOptions,
    Store,
    Workers,
    Yes,
)
from zarr_shardstore.cli.failures import failures_as_sentences
from zarr_shardstore.cli.options import (
    NotPossibleError,
    check_source,
    chunks_per_shard_of,
    confirm_in_place,
    executor_of,
    storage_options_of,
)
from zarr_shardstore.cli.printing import conversion_text, info_tree, native_text, totals_text
from zarr_shardstore.cli.progress import progress_on
from zarr_shardstore.tools.info import get_shard_info
from zarr_shardstore.tools.pictures import render_html, render_png, render_text
from zarr_shardstore.tools.shard_map import shard_map

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and errors: the same in a pipe
    pretty_exceptions_enable=False,
    help="Sharding for Zarr: look at stores, and convert them. Chunks are moved, never decoded.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _all_commands(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which it is."),
    ] = False,
) -> None: ...


@app.command(epilog="Example: zarr-shardstore shard volume.zarr packed.zarr")
def shard(
    source: Source,
    destination: Destination = None,
    chunks_per_shard: ChunksPerShard = ["auto"],  # noqa: B006 - typer copies it
    path: Paths = None,
    declaration: DeclarationOption = None,
    index_location: IndexLocationOption = None,
    order: OrderOption = Order.morton,
    workers: Workers = None,
    processes: Processes = False,
    source_option: SourceOptions = None,
    destination_option: DestinationOptions = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pack the chunks of a store into shards."""
    rule = chunks_per_shard_of(chunks_per_shard)
    _convert(
        lambda **options: _tools("convert").shard_store(
            source,
            destination,
            chunks_per_shard=rule,
            declaration=declaration and declaration.value,
            index_location=index_location and index_location.value,
            order=order.value,
            **options,
        ),
        source,
        destination,
        paths=path,
        workers=workers,
        processes=processes,
        source_option=source_option,
        destination_option=destination_option,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
        debug=debug,
    )


@app.command(epilog="Example: zarr-shardstore unshard packed.zarr volume-again.zarr")
def unshard(
    source: Source,
    destination: Destination = None,
    path: Paths = None,
    workers: Workers = None,
    processes: Processes = False,
    source_option: SourceOptions = None,
    destination_option: DestinationOptions = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Store each chunk as an object of its own again."""
    _convert(
        lambda **options: _tools("convert").unshard_store(source, destination, **options),
        source,
        destination,
        paths=path,
        workers=workers,
        processes=processes,
        source_option=source_option,
        destination_option=destination_option,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
        debug=debug,
    )


@app.command(epilog="Example: zarr-shardstore reshard packed.zarr --chunks-per-shard 4 --yes")
def reshard(
    source: Source,
    destination: Destination = None,
    *,
    chunks_per_shard: ChunksPerShard,
    path: Paths = None,
    declaration: DeclarationOption = None,
    index_location: IndexLocationOption = None,
    order: OrderOption = Order.morton,
    workers: Workers = None,
    processes: Processes = False,
    source_option: SourceOptions = None,
    destination_option: DestinationOptions = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Give a store shards of another size."""
    rule = chunks_per_shard_of(chunks_per_shard)
    _convert(
        lambda **options: _tools("convert").reshard(
            source,
            rule,
            destination,
            declaration=declaration and declaration.value,
            index_location=index_location and index_location.value,
            order=order.value,
            **options,
        ),
        source,
        destination,
        paths=path,
        workers=workers,
        processes=processes,
        source_option=source_option,
        destination_option=destination_option,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
        debug=debug,
    )


@app.command("to-native", epilog="Example: zarr-shardstore to-native volume.zarr --dry-run")
def to_native(
    store: Store,
    path: Paths = None,
    ome: Annotated[
        bool, typer.Option("--ome", help="Also bring OME-Zarr metadata to version 0.5.")
    ] = False,
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let every Zarr v3 reader read the shards.

    Only metadata is written: the shards stay as they are.
    """
    with failures_as_sentences(debug=debug, resume=True):
        options = storage_options_of(source_option or ())
        report = _tools("native").to_native(
            check_source(store),
            paths=path or None,
            ome=ome,
            storage_options=options,
            dry_run=dry_run,
        )
        _print_report(report, native_text, store, as_json=as_json)


@app.command("from-native", epilog="Example: zarr-shardstore from-native packed.zarr --dry-run")
def from_native(
    store: Store,
    path: Paths = None,
    zarr_format: Annotated[
        int, typer.Option("--zarr-format", min=2, max=3, help="Format of the new metadata.")
    ] = 3,
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Declare native shards in the other ways.

    Only metadata is written: the shards stay as they are.
    """
    with failures_as_sentences(debug=debug, resume=True):
        options = storage_options_of(source_option or ())
        report = _tools("native").from_native(
            check_source(store),
            paths=path or None,
            zarr_format=zarr_format,
            storage_options=options,
            dry_run=dry_run,
        )
        _print_report(report, native_text, store, as_json=as_json)


@app.command(epilog="Example: zarr-shardstore info packed.zarr")
def info(
    store: Store,
    path: Paths = None,
    source_option: SourceOptions = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show arrays, and what their shards hold."""
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
            return
        console = Console()
        if not console.is_terminal:
            console = Console(width=_ENDLESS)
        console.print(info_tree(found), highlight=False)
        console.print(totals_text(found), highlight=False, markup=False)


@app.command("map", epilog="Example: zarr-shardstore map packed.zarr raw --html map.html")
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
    debug: Debug = False,
) -> None:
    """Draw which shards there are, and how full."""
    with failures_as_sentences(debug=debug):
        options = storage_options_of(source_option or ())
        shards = shard_map(check_source(store), path, storage_options=options)
        if png is not None:
            png.write_bytes(render_png(shards))
        if html is not None:
            html.write_text(render_html(shards), encoding="utf-8")
        for file in (png, html):
            if file is not None:
                typer.echo(f"drawn: {file}")
        if png is None and html is None:
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


_ENDLESS = 100_000
"""Characters in a line of what is no terminal."""

_MAX_ERRORS = 20
"""Damaged shards that `map` names."""


def _convert(
    run: Callable[..., Any],
    source: str,
    destination: str | None,
    *,
    paths: list[str] | None,
    workers: int | None,
    processes: bool,
    source_option: list[str] | None,
    destination_option: list[str] | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """What all conversions have in common; `run` takes the rest of the options."""
    with failures_as_sentences(debug=debug, resume=not dry_run):
        source_options = storage_options_of(source_option or ())
        destination_options = storage_options_of(destination_option or ())
        check_source(source)
        confirm_in_place(source, destination, is_confirmed=yes or dry_run)
        with (
            executor_of(workers, is_processes=processes) as executor,
            progress_on(Console(stderr=True)) as progress,
        ):
            report = run(
                paths=paths or None,
                executor=executor,
                source_options=source_options,
                destination_options=destination_options,
                dry_run=dry_run,
                progress=progress,
            )
        _print_report(report, conversion_text, source, as_json=as_json)


def _print_report(report: Any, text_of: Callable[[Any], str], store: str, *, as_json: bool) -> None:
    if not report.arrays:
        raise NotPossibleError(f"there is no array in {store!r}")
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else text_of(report))


def _tools(name: str) -> Any:
    """A module of the tools, which is imported when it is used."""
    return import_module(f"zarr_shardstore.tools.{name}")


def _can_show_blocks() -> bool:
    try:
        "·░▒▓█×".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
