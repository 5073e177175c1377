"""Commands of ways in and out: they are registered when this module is imported."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from importlib import import_module
from typing import Any

import typer

from zarr_shardstore.access import ShardingStore
from zarr_shardstore.cli import output
from zarr_shardstore.cli.app import command, print_report
from zarr_shardstore.cli.parameters import EXECUTOR, executor_of
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.inspect.shard_map import printable


@command("serve packed.zarr --as v2 --open", "store shown_as host port in_browser storage_options")
def _serve(
    store: str, shown_as: str | None, in_browser: bool, storage_options: Any, **address: Any
) -> None:
    """Serve chunks over HTTP, and a page with slices.

    Browsers and other readers open it without this package. Nothing is written.
    Ctrl-C ends it.
    """

    def say(url: str) -> None:
        typer.echo(f"{printable(store)} is served at {url} until Ctrl-C")
        if in_browser:
            webbrowser.open(url)

    opened = ShardingStore(store, None, storage_options=storage_options, read_only=True)
    serve_store = import_module("zarr_shardstore.interop.serve.server").serve_store
    title = store.rstrip("/").rpartition("/")[2]
    formats = {"v2": 2, "v3": 3, None: None}
    with suppress(KeyboardInterrupt):  # uvicorn may also return as if there had been none
        serve_store(opened, zarr_format=formats[shown_as], title=title, on_start=say, **address)
    typer.echo("the server has ended", err=True)


@command("adopt a.h5 b.h5 mosaic.zarr", "files_and_store dataset link undo dry_run yes as_json")
def _adopt(
    files_and_store: list[str], undo: bool, yes: bool, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Make shards of HDF5, TIFF and .npy files, without a copy.

    An index is appended to each file, which is still that file for its own readers. Several files
    tile one array along its first dimension. --undo cuts the indexes off again; with --yes also if
    chunks were written since.
    """
    door = import_module("zarr_shardstore.interop.adopt.adopt")
    *files, store = files_and_store
    if undo:
        if files:
            raise SpecError("--undo takes the array alone: it knows its files")
        paths = door.undo_adoption(store, discard=yes, dry_run=dry_run)
        verb = "would have" if dry_run else "has"
        text = "\n".join(f"{printable(path)} {verb} its own bytes again" for path in paths)
        print_report(as_json, {"restored": paths, "dry_run": dry_run}, text)
        return
    report = door.adopt(files, store, dry_run=dry_run, **options)
    print_report(as_json, report.as_dict(), output.adoption_text(report))


@command(
    "references packed.zarr refs.json --zarr-format 2",
    "store out paths documents_format url group stale storage_options as_json",
)
def _references(
    store: str, out: str, documents_format: Any, stale: bool, as_json: bool, **options: Any
) -> None:
    """Refer to each chunk as bytes of a stored object.

    Programs that know kerchunk's references read the chunks then, and nothing is copied. OUT is
    JSON, or Parquet if its name ends with .parq or .parquet. With --stale it names the shards that
    changed after OUT was made, and ends with status 1 if there are any.
    """
    door = import_module("zarr_shardstore.interop.references.references")
    if stale:
        keys = door.stale_references(store, out, storage_options=options["storage_options"])
        text = "\n".join(f"changed: {printable(key)}" for key in keys) or "no shard has changed"
        print_report(as_json, {"stale": keys}, text)
        raise typer.Exit(1 if keys else 0)
    to = "kerchunk-parquet" if out.endswith((".parq", ".parquet")) else "kerchunk-json"
    reports: list[Any] = []
    options |= {"out": out, "to": to, "zarr_format": documents_format}
    door.to_references(store, **options, on_report=reports.append)
    print_report(as_json, {**reports[0], "out": out}, output.references_text(reports[0], out))


@command(
    "import in.h5 out.zarr",
    "foreign imported chunks_per_shard shard_nbytes recode paths",
    EXECUTOR,
    "source_options destination_options dry_run as_json",
)
def _import(
    foreign: str,
    imported: str,
    workers: int | None,
    processes: bool,
    dask: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Copy the chunks of HDF5, TIFF or references into shards.

    NetCDF-4, references of kerchunk, zip and icechunk, too. Chunks are not decoded, and missing
    ones stay missing. If it is killed, run it again: it continues.
    """
    import_store = import_module("zarr_shardstore.interop.importing.importing").import_store
    given = {name: value for name, value in options.items() if value is not ...}
    with (
        executor_of(workers, processes, dask) as executor,
        output.progress_on_stderr() as progress,
    ):
        report = import_store(foreign, imported, executor=executor, progress=progress, **given)
    print_report(as_json, report.as_dict(), output.conversion_text(report))
    output.fail_if_left(report.n_left)
