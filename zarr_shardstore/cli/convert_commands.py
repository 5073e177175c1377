"""The commands that change stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console

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
from zarr_shardstore.cli.parsing import (
    NotPossibleError,
    check_source,
    chunks_per_shard_of,
    confirm,
    confirm_in_place,
    executor_of,
    storage_options_of,
)
from zarr_shardstore.cli.printing import conversion_text, native_text
from zarr_shardstore.cli.progress import progress_on


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
        lambda **options: _tools("convert.api").shard_store(
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
        lambda **options: _tools("convert.api").unshard_store(source, destination, **options),
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
        lambda **options: _tools("convert.api").reshard(
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


def to_native(
    store: Store,
    path: Paths = None,
    ome: Annotated[
        bool, typer.Option("--ome", help="Also bring OME-Zarr metadata to version 0.5.")
    ] = False,
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let every Zarr v3 reader read the shards.

    Only metadata is written: the shards stay as they are.
    """
    with failures_as_sentences(debug=debug, resume=True):
        options = storage_options_of(source_option or ())
        _confirm_metadata(check_source(store), is_confirmed=yes or dry_run)
        report = _tools("native.bridge").to_native(
            store,
            paths=path or None,
            ome=ome,
            storage_options=options,
            dry_run=dry_run,
        )
        _print_report(report, report.entries, native_text, store, as_json=as_json)


def from_native(
    store: Store,
    path: Paths = None,
    zarr_format: Annotated[
        int, typer.Option("--zarr-format", min=2, max=3, help="Format of the new metadata.")
    ] = 3,
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Declare native shards in the other ways.

    Only metadata is written: the shards stay as they are.
    """
    with failures_as_sentences(debug=debug, resume=True):
        options = storage_options_of(source_option or ())
        _confirm_metadata(check_source(store), is_confirmed=yes or dry_run)
        report = _tools("native.bridge").from_native(
            store,
            paths=path or None,
            zarr_format=zarr_format,
            storage_options=options,
            dry_run=dry_run,
        )
        _print_report(report, report.entries, native_text, store, as_json=as_json)


def _confirm_metadata(store: str, *, is_confirmed: bool) -> None:
    warning = f"the metadata documents of {store!r} are replaced"
    confirm(warning, "--dry-run to see which", is_confirmed=is_confirmed)


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
        _print_report(report, report.arrays, conversion_text, source, as_json=as_json)


def _print_report(
    report: Any, nodes: Sized, text_of: Callable[[Any], str], store: str, *, as_json: bool
) -> None:
    if not nodes:
        raise NotPossibleError(f"there is no array in {store!r}")
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else text_of(report))


def _tools(name: str) -> Any:
    """A module of the tools, which is imported when it is used."""
    return import_module(f"zarr_shardstore.{name}")
