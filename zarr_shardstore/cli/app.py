"""The commands: parameters, calls of the tools, and their reports on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Signature
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from zarr_shardstore import __version__
from zarr_shardstore.cli.arguments import (
    PARAMETERS,
    check_source,
    chunks_per_shard_of,
    confirm,
    confirm_in_place,
    executor_of,
    storage_options_of,
)
from zarr_shardstore.cli.messages import (
    NotPossibleError,
    fail_if_damaged,
    failures_as_sentences,
    progress_on_stderr,
)
from zarr_shardstore.cli.reports import compaction_text, conversion_text, info_text, native_text
from zarr_shardstore.convert.compact import compact_store
from zarr_shardstore.errors import SpecError
from zarr_shardstore.inspect.info import get_shard_info, sharded_paths
from zarr_shardstore.inspect.shard_map import render_figure, render_html, render_text, shard_map
from zarr_shardstore.store.sharding_mapping import ShardingMapping

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and errors: the same in a pipe
    pretty_exceptions_enable=False,
    help="Sharding for Zarr: look at stores, and convert them. Chunks are moved, never decoded.",
)

_Function = Callable[..., None]
_CONVERSION = (
    *("workers", "processes", "source_option", "destination_option"),
    *("dry_run", "yes", "as_json"),
)
_FORM = ("declaration", "index_location", "order")
_TRANSLATION = ("source_option", "dry_run", "yes", "as_json")


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


def _command(name: str, example: str, *parameters: str) -> Callable[[_Function], _Function]:
    """Register a function as a command; it gets these parameters of the table by name.

    A failure is printed as one sentence, unless ``--debug`` is given.
    """

    def register(function: _Function) -> _Function:
        def run(*, debug: bool, **options: Any) -> None:
            with failures_as_sentences(debug=debug, resume=options.get("dry_run") is False):
                function(**options)

        run.__doc__ = function.__doc__
        signature = Signature([PARAMETERS[key] for key in (*parameters, "debug")])
        run.__signature__ = signature  # type: ignore[attr-defined]
        app.command(name, epilog=f"Example: zarr-shardstore {name} {example}")(run)
        return function

    return register


# -------------------------------------------------------------- conversions


@_command(
    *("shard", "volume.zarr packed.zarr"),
    *("source", "destination", "chunks_per_shard", "path", *_FORM, *_CONVERSION),
)
def _shard(
    source: str, destination: str | None, chunks_per_shard: list[str], **options: Any
) -> None:
    """Pack the chunks of a store into shards."""
    options["chunks_per_shard"] = chunks_per_shard_of(chunks_per_shard)
    _convert("shard_store", (source, destination), source, destination, **options)


@_command(
    *("unshard", "packed.zarr volume-again.zarr"),
    *("source", "destination", "path", *_CONVERSION),
)
def _unshard(source: str, destination: str | None, **options: Any) -> None:
    """Store each chunk as an object of its own again."""
    _convert("unshard_store", (source, destination), source, destination, **options)


@_command(
    *("reshard", "packed.zarr --chunks-per-shard 4 --yes"),
    *("source", "destination", "new_chunks_per_shard", "path", *_FORM, *_CONVERSION),
)
def _reshard(
    source: str, destination: str | None, chunks_per_shard: list[str], **options: Any
) -> None:
    """Give a store shards of another size."""
    rule = chunks_per_shard_of(chunks_per_shard)
    _convert("reshard", (source, rule, destination), source, destination, **options)


def _convert(
    tool: str,
    arguments: tuple[Any, ...],
    source: str,
    destination: str | None,
    *,
    path: list[str] | None,
    workers: int | None,
    processes: bool,
    source_option: list[str] | None,
    destination_option: list[str] | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **form: Any,
) -> None:
    options = {
        "paths": path or None,
        "source_options": storage_options_of(source_option),
        "destination_options": storage_options_of(destination_option),
        "dry_run": dry_run,
        **form,
    }
    check_source(source)
    confirm_in_place(source, destination, is_confirmed=yes or dry_run)
    convert = getattr(_tools("convert.api"), tool)
    with (
        executor_of(workers, is_processes=processes) as executor,
        progress_on_stderr() as progress,
    ):
        report = convert(*arguments, **options, executor=executor, progress=progress)
    _check_arrays(report.arrays, source)
    _print(report, as_json, conversion_text)


@_command("to-native", "volume.zarr --dry-run", "store", "path", "ome", *_TRANSLATION)
def _to_native(store: str, **options: Any) -> None:
    """Let every Zarr v3 reader read the shards.

    Only metadata is written: the shards stay as they are.
    """
    _translate("to_native", store, **options)


@_command("from-native", "packed.zarr --dry-run", "store", "path", "zarr_format", *_TRANSLATION)
def _from_native(store: str, **options: Any) -> None:
    """Declare native shards in the other ways.

    Only metadata is written: the shards stay as they are.
    """
    _translate("from_native", store, **options)


def _translate(
    tool: str,
    store: str,
    *,
    path: list[str] | None,
    source_option: list[str] | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **form: Any,
) -> None:
    options = storage_options_of(source_option)
    warning = f"the metadata documents of {check_source(store)!r} are replaced"
    confirm(warning, "--dry-run to see which", is_confirmed=yes or dry_run)
    translate = getattr(_tools("native.bridge"), tool)
    report = translate(store, paths=path or None, storage_options=options, dry_run=dry_run, **form)
    _check_arrays(report.entries, store)
    _print(report, as_json, native_text)


def _tools(name: str) -> Any:
    """Import a module of the tools when it is used."""
    return import_module(f"zarr_shardstore.{name}")


def _check_arrays(nodes: Any, store: str) -> None:
    if not nodes:
        raise NotPossibleError(f"there is no array in {store!r}")


def _print(report: Any, as_json: bool, text_of: Callable[[Any], str]) -> None:
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else text_of(report))


# ----------------------------------------------------- reports and upkeep


@_command("info", "packed.zarr", "store", "path", "source_option", "as_json")
def _info(
    store: str, path: list[str] | None, source_option: list[str] | None, as_json: bool
) -> None:
    """Show arrays, and what their shards hold.

    If something is damaged, it says so and ends with status 1.
    """
    options = storage_options_of(source_option)
    found = get_shard_info(check_source(store), paths=path or None, storage_options=options)
    _check_arrays(found.arrays, store)
    _print(found, as_json, info_text)
    if any(array.n_errors for array in found.arrays):
        raise typer.Exit(1)


@_command("compact", "packed.zarr", "store", "prefix", "source_option", "dry_run", "as_json")
def _compact(
    store: str, prefix: str, source_option: list[str] | None, dry_run: bool, as_json: bool
) -> None:
    """Remove the dead bytes of shards.

    Erased and replaced chunks leave them. Leftovers of a killed writer are put in order, too.
    Other programs may continue to write.
    """
    options = storage_options_of(source_option)
    report = compact_store(check_source(store), prefix, storage_options=options, dry_run=dry_run)
    _print(report, as_json, lambda report: compaction_text(report, store))
    fail_if_damaged(report.errors)


@_command("consolidate", "packed.zarr raw", "store", "below", "source_option", "dry_run", "as_json")
def _consolidate(
    store: str, path: str, source_option: list[str] | None, dry_run: bool, as_json: bool
) -> None:
    """Store the indexes of all shards of an array in one object.

    A cold reader of the array then asks for that object instead of an index for each shard. A
    shard that changes later is read by its own index; run it again when many have changed.
    """
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


@_command(
    *("map", "packed.zarr raw --html map.html"),
    *("store", "array", "png", "html", "source_option", "as_json"),
)
def _draw_map(
    store: str,
    path: str,
    png: Path | None,
    html: Path | None,
    source_option: list[str] | None,
    as_json: bool,
) -> None:
    """Draw which shards there are, and how full.

    If some are damaged, it names them and ends with status 1.
    """
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
