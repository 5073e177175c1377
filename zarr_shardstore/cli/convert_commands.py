"""The commands that convert stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer

from zarr_shardstore.cli.arguments import (
    ChunksPerShard,
    Debug,
    Declaration,
    Destination,
    DestinationOptions,
    DryRun,
    IndexLocation,
    Json,
    Order,
    Paths,
    Processes,
    Source,
    SourceOptions,
    Store,
    Workers,
    Yes,
    check_source,
    chunks_per_shard_of,
    confirm,
    confirm_in_place,
    executor_of,
    storage_options_of,
)
from zarr_shardstore.cli.messages import (
    NotPossibleError,
    failures_as_sentences,
    progress_on_stderr,
)
from zarr_shardstore.cli.reports import conversion_text, native_text


def shard(
    source: Source,
    destination: Destination = None,
    chunks_per_shard: ChunksPerShard = ["auto"],  # noqa: B006 - typer copies it
    path: Paths = None,
    declaration: Declaration = None,
    index_location: IndexLocation = None,
    order: Order = "morton",
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
    run = _Run(path, source_option, dry_run, yes, as_json, debug)
    run.convert(
        lambda **options: _tools("convert.api").shard_store(
            source,
            destination,
            chunks_per_shard=rule,
            declaration=declaration,
            index_location=index_location,
            order=order,
            **options,
        ),
        source,
        destination,
        destination_option,
        workers=workers,
        processes=processes,
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
    run = _Run(path, source_option, dry_run, yes, as_json, debug)
    run.convert(
        lambda **options: _tools("convert.api").unshard_store(source, destination, **options),
        source,
        destination,
        destination_option,
        workers=workers,
        processes=processes,
    )


def reshard(
    source: Source,
    destination: Destination = None,
    *,
    chunks_per_shard: ChunksPerShard,
    path: Paths = None,
    declaration: Declaration = None,
    index_location: IndexLocation = None,
    order: Order = "morton",
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
    run = _Run(path, source_option, dry_run, yes, as_json, debug)
    run.convert(
        lambda **options: _tools("convert.api").reshard(
            source,
            rule,
            destination,
            declaration=declaration,
            index_location=index_location,
            order=order,
            **options,
        ),
        source,
        destination,
        destination_option,
        workers=workers,
        processes=processes,
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
    run = _Run(path, source_option, dry_run, yes, as_json, debug)
    run.translate("to_native", store, ome=ome)


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
    run = _Run(path, source_option, dry_run, yes, as_json, debug)
    run.translate("from_native", store, zarr_format=zarr_format)


@dataclass(frozen=True, slots=True)
class _Run:
    """The options of all these commands."""

    paths: list[str] | None
    source_option: list[str] | None
    dry_run: bool
    yes: bool
    as_json: bool
    debug: bool

    def convert(
        self,
        tool: Callable[..., Any],
        source: str,
        destination: str | None,
        destination_option: list[str] | None,
        *,
        workers: int | None,
        processes: bool,
    ) -> None:
        """Run a tool that converts stores, and print its report."""
        with failures_as_sentences(debug=self.debug, resume=not self.dry_run):
            options = {
                "paths": self.paths or None,
                "source_options": storage_options_of(self.source_option),
                "destination_options": storage_options_of(destination_option),
                "dry_run": self.dry_run,
            }
            check_source(source)
            confirm_in_place(source, destination, is_confirmed=self.yes or self.dry_run)
            with (
                executor_of(workers, is_processes=processes) as executor,
                progress_on_stderr() as progress,
            ):
                report = tool(**options, executor=executor, progress=progress)
            self._print(report, report.arrays, conversion_text, source)

    def translate(self, tool: str, store: str, **options: Any) -> None:
        """Run a tool that translates metadata, and print its report."""
        with failures_as_sentences(debug=self.debug, resume=True):
            options |= {
                "paths": self.paths or None,
                "storage_options": storage_options_of(self.source_option),
                "dry_run": self.dry_run,
            }
            warning = f"the metadata documents of {check_source(store)!r} are replaced"
            confirm(warning, "--dry-run to see which", is_confirmed=self.yes or self.dry_run)
            report = getattr(_tools("native.bridge"), tool)(store, **options)
            self._print(report, report.entries, native_text, store)

    def _print(self, report: Any, nodes: Any, text_of: Callable[[Any], str], store: str) -> None:
        if not nodes:
            raise NotPossibleError(f"there is no array in {store!r}")
        typer.echo(json.dumps(report.as_dict(), indent=2) if self.as_json else text_of(report))


def _tools(name: str) -> Any:
    """Import a module of the tools when it is used."""
    return import_module(f"zarr_shardstore.{name}")
