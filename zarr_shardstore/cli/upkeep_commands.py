"""The commands that keep a store in order."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from zarr_shardstore.cli.arguments import Debug, DryRun, Json, SourceOptions, Store
from zarr_shardstore.cli.failures import failures_as_sentences
from zarr_shardstore.cli.parsing import check_source, storage_options_of
from zarr_shardstore.cli.printing import compaction_text, printable
from zarr_shardstore.convert.compact import compact_store
from zarr_shardstore.errors import SpecError
from zarr_shardstore.inspect.info import sharded_paths
from zarr_shardstore.store.sharding_mapping import ShardingMapping


def compact(
    store: Store,
    prefix: Annotated[str, typer.Argument(help="Only chunks whose keys start with it.")] = "",
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove the dead bytes of shards.

    They are what erased and replaced chunks leave. Also what a killed writer has left is put in
    order. Others may go on writing.
    """
    with failures_as_sentences(debug=debug):
        options = storage_options_of(source_option or ())
        report = compact_store(
            check_source(store), prefix, storage_options=options, dry_run=dry_run
        )
        typer.echo(
            json.dumps(report.as_dict(), indent=2) if as_json else compaction_text(report, store)
        )
        for error in report.errors:
            typer.echo(f"! {printable(error)}", err=True)
        if report.errors:
            raise typer.Exit(1)


def consolidate(
    store: Store,
    path: Annotated[str, typer.Argument(help="Only arrays at or below it.")] = "",
    source_option: SourceOptions = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Store the indexes of all shards of an array in one object.

    Who reads the array cold then asks for that object instead of an index for each shard. A shard
    that changes later is read by its own index; run it again when many have changed.
    """
    with failures_as_sentences(debug=debug):
        options = storage_options_of(source_option or ())
        mapping = ShardingMapping(check_source(store), storage_options=options)
        if dry_run:
            mapping._sharding.check_consolidation()
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
