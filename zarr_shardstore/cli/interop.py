"""Commands of ways in and out: serve, adopt, references and import."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from importlib import import_module
from typing import Any

import typer

from zarr_shardstore.access import ShardingStore
from zarr_shardstore.cli import output
from zarr_shardstore.cli.arguments import Work
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.inspect.shard_map import printable


def serve(
    store: str, shown_as: str | None, in_browser: bool, storage_options: Any, **address: Any
) -> None:
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


def adopt_files(
    files_and_store: list[str], undo: bool, yes: bool, dry_run: bool, as_json: bool, **options: Any
) -> None:
    tool = import_module("zarr_shardstore.interop.adopt.adopt")
    *files, store = files_and_store
    if undo:
        if files:
            raise SpecError("--undo takes the array alone: it knows its files")
        paths = tool.undo_adoption(store, discard=yes, dry_run=dry_run)
        verb = "would have" if dry_run else "has"
        text = "\n".join(f"{printable(path)} {verb} its own bytes again" for path in paths)
        output.print_report(as_json, {"restored": paths, "dry_run": dry_run}, text)
        return
    report = tool.adopt(files, store, dry_run=dry_run, **options)
    output.print_report(as_json, report.as_dict(), output.adoption_text(report))


def references(
    store: str, out: str, documents_format: Any, stale: bool, as_json: bool, **options: Any
) -> None:
    tool = import_module("zarr_shardstore.interop.references.references")
    if stale:
        keys = tool.stale_references(store, out, storage_options=options["storage_options"])
        text = "\n".join(f"changed: {printable(key)}" for key in keys) or "no shard has changed"
        output.print_report(as_json, {"stale": keys}, text)
        raise typer.Exit(1 if keys else 0)
    to = "kerchunk-parquet" if out.endswith((".parq", ".parquet")) else "kerchunk-json"
    reports: list[Any] = []
    options |= {"out": out, "to": to, "zarr_format": documents_format}
    tool.to_references(store, **options, on_report=reports.append)
    text = output.references_text(reports[0], out)
    output.print_report(as_json, {**reports[0], "out": out}, text)


def import_files(foreign: str, imported: str, work: Work, as_json: bool, **options: Any) -> None:
    import_store = import_module("zarr_shardstore.interop.importing.importing").import_store
    given = {name: value for name, value in options.items() if value is not ...}
    with work() as workers:
        report = import_store(foreign, imported, **workers, **given)
    output.print_report(as_json, report.as_dict(), output.conversion_text(report))
    output.fail_if_left(report.n_left)
