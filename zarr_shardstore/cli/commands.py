"""Functions of the commands, with the parameters in `COMMANDS`. A call imports its tools."""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import typer

import zarr_shardstore
from zarr_shardstore.access import ShardingMapping, ShardingStore, open_base
from zarr_shardstore.cli import output
from zarr_shardstore.cli.arguments import Work, confirm, is_same
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.inspect import shard_map
from zarr_shardstore.tools.inspect.find import arrays_at
from zarr_shardstore.tools.inspect.readers import ONLY_HERE
from zarr_shardstore.tools.inspect.shard_map import printable

# ---------------------------------------------------------------- conversions


def _convert(
    tool: str,
    source: str,
    destination: str | None,
    work: Work,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    arguments: list[Any] = [source, destination]
    if tool == "reshard":
        arguments.insert(1, options.pop("chunks_per_shard"))
    convert = getattr(zarr_shardstore, tool)
    warnings, other_ways = [], []
    if destination is None or is_same(source, destination):
        warnings = [
            f"the stored objects of {source!r} are replaced, after they were verified; meanwhile, "
            "or if it is killed then, no program reads the array"
        ]
        other_ways = ["name a destination"]
    if not (yes or options["dry_run"] or tool == "unshard_store" or options.get("native")):
        planned = convert(*arguments, **{**options, "dry_run": True}).arrays
        if n := sum(array.loses_readers for array in planned):
            what = f"shards of Zarr v2 ({output.count(n, 'array')}) are read {ONLY_HERE}"
            warnings.append(f"{what}, by no viewer")
            other_ways.append("shard with --native, which makes them Zarr v3 for every v3 reader")
    if warnings:
        warning, other_way = "; ".join(warnings), ", or ".join(other_ways)
        confirm(warning, other_way, is_confirmed=yes or options["dry_run"])
    if destination is not None and options["paths"]:
        output.say_what_is_left(options["paths"], source, copies_rest=options["copy_rest"])
    with work() as workers:
        report = convert(*arguments, **options, **workers, estimate=options["dry_run"])
    output.check_arrays(report.arrays, source)
    output.print_report(as_json, report.as_dict(), output.conversion_text(report))
    output.fail_if_left(report.n_left)


run_shard = partial(_convert, "shard_store")
run_unshard = partial(_convert, "unshard_store")
run_reshard = partial(_convert, "reshard")


def _translate(tool: str, store: str, yes: bool, as_json: bool, **options: Any) -> None:
    warning = f"the metadata documents of {store!r} are replaced"
    if tool == "from_native":
        warning += f", and shards in it are read {ONLY_HERE}"
    confirm(warning, "--dry-run to see which", is_confirmed=yes or options["dry_run"])
    report = getattr(zarr_shardstore, tool)(store, **options)
    output.check_arrays(report.entries, store)
    output.print_report(as_json, report.as_dict(), output.native_text(report))


run_to_native = partial(_translate, "to_native")
run_from_native = partial(_translate, "from_native")


def run_import(imported: str, imported_to: str, work: Work, as_json: bool, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value is not ...}
    with work() as workers:
        report = zarr_shardstore.import_store(imported, imported_to, **workers, **given)
    output.print_report(as_json, report.as_dict(), output.conversion_text(report))
    output.fail_if_left(report.n_left)


# --------------------------------------------------------- reports, check, upkeep


def run_info(store: str, arrays: Any, paths: Any, as_json: bool, **options: Any) -> None:
    paths = [*(arrays or ()), *(paths or ())] or None
    found = zarr_shardstore.get_shard_info(store, paths=paths, **options)
    output.check_arrays(found.arrays, store)
    output.print_report(as_json, found.as_dict(), output.info_text(found))
    _fail_if_errors(found.arrays)
    output.fail_if_left(found.n_unknown)


def _fail_if_errors(arrays: Sequence[Any]) -> None:
    if any(array.n_errors for array in arrays):
        raise typer.Exit(1)


def run_map(
    store: str, path: str, png: Path | None, html: Path | None, as_json: bool, **options: Any
) -> None:
    info = None
    if not arrays_at(open_base(store, **options), path):
        with suppress(SpecError):  # the map names the arrays that there are
            info = zarr_shardstore.get_shard_info(store, paths=[path] if path else None, **options)
        if info is not None:
            output.check_arrays(info.arrays, store)
            path = max(info.arrays, key=lambda array: array.stored_nbytes).path
    shards = shard_map.shard_map(store, path, **options)
    if info is not None and not as_json:
        typer.echo(f"{output.info_text(info)}\n\nthe largest array:")
    if png is not None:
        png.write_bytes(shard_map.render_figure(shards, "png"))
    if html is not None:
        html.write_text(shard_map.render_html(shards), encoding="utf-8")
    drawn = [file for file in (png, html) if file is not None]
    for file in drawn:
        typer.echo(f"drawn: {file}", err=as_json)
    if as_json:
        arrays = {} if info is None else {"arrays": info.as_dict()["arrays"]}
        typer.echo(json.dumps({**shards.as_dict(), **arrays}))
    elif not drawn:
        width, n_lines = get_terminal_size((80, 46))
        is_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
        height = max(8, n_lines - 6)
        text = shard_map.render_text(shards, width=width, height=height, is_ascii=is_ascii)
        typer.echo(text, nl=False)
    output.fail_if_damaged(shards.errors)
    _fail_if_errors(info.arrays if info is not None else ())


_ONLY_WITH = (
    ("region", "--region", "--chunks", "--missing"),
    ("full_order", "--assume-order", "--repair"),
    ("keep", "--keep", "--repair"),
    ("yes", "--yes", "--repair", "--restore"),
)
"""Options of `run_fsck`: flag, and the flags one of which must be given with it."""


def run_fsck(store: str, arrays: Any, storage_options: Any, as_json: bool, **options: Any) -> None:
    for option, flag, *others in _ONLY_WITH:
        if options[option] not in (None, False, "salvage") and not any(
            options[other.strip("-")] for other in others
        ):
            raise SpecError(f"{flag} has a meaning only with {' or '.join(others)}")
    if options["restore"] is not None:
        base: Any = open_base(store, storage_options)
        keys = zarr_shardstore.restore_quarantine(
            base, options["restore"], dry_run=not options["yes"]
        )
        done = "restored" if options["yes"] else "would be restored, with --yes"
        text = "\n".join(f"{done}: {key}" for key in keys)
        output.print_report(as_json, {"restored": keys, "dry_run": not options["yes"]}, text)
    elif options["chunks"] or options["missing"]:
        from zarr_shardstore.tools.check.presence import presence

        given = {"source": options["replica"], "storage_options": storage_options}
        found = presence(store, arrays, region=options["region"], **given)
        states = {"stored": options["chunks"], "missing": options["missing"]}
        output.fail_if_damaged(output.print_presence(found, **states, as_json=as_json))
    else:
        _check(store, arrays, storage_options, as_json, **options)


def _check(
    store: str, arrays: Any, storage_options: Any, as_json: bool, work: Work, **options: Any
) -> None:
    given = {"notes": options["resume"], "storage_options": storage_options}
    level: Any = "decode" if options["decode"] else options["level"]
    with work() as workers:
        report = zarr_shardstore.check_store(store, arrays, level=level, **given, **workers)
    if options["replica"]:
        typer.echo("of chunks that are gone see --missing --source: they are no damage", err=True)
    if options["repair"] and not report.is_clean:
        how = {"keep": options["keep"], "order": options["full_order"]}
        how |= {"source": options["replica"], "dry_run": not options["yes"]}
        fixed = zarr_shardstore.repair_store(report, **how)
        output.print_report(as_json, fixed.as_dict(), output.repair_text(fixed, store))
        report = fixed.check or report
    else:
        output.print_report(as_json, report.as_dict(), output.check_text(report))
    kinds = {found.kind for found in report.findings if found.severity != "info"}
    if kinds:
        raise typer.Exit(2 if kinds == {"unreadable"} else 1)
    output.fail_if_left(sum(found.kind == "unchecked" for found in report.findings))


def run_compact(store: str, as_json: bool, **options: Any) -> None:
    from zarr_shardstore.tools.convert.api import compact_store

    report = compact_store(store, **options)
    output.print_report(as_json, report.as_dict(), output.compaction_text(report, store))
    output.fail_if_damaged(report.errors)


def run_consolidate(
    store: str, path: str, storage_options: dict[str, Any] | None, dry_run: bool, as_json: bool
) -> None:
    mapping = ShardingMapping(store, storage_options=storage_options)
    if dry_run:
        from zarr_shardstore.tools.inspect.info import consolidated_paths

        mapping._engine.check_consolidation()
        paths = consolidated_paths(mapping, path)
    else:
        paths = mapping.consolidate_index(path)
    if not paths:
        raise SpecError(f"there is no sharded array with a stored shard in {store}")
    verb = "would be" if dry_run else "are"
    text = f"the indexes of {output.count(len(paths), 'array')} in {store} {verb} consolidated"
    output.print_report(as_json, {"paths": paths, "dry_run": dry_run}, text)


# ------------------------------------------------------------------ ways in and out


def run_serve(
    store: str,
    shown_as: str | None,
    in_browser: bool,
    storage_options: Any,
    as_json: bool,
    **address: Any,
) -> None:
    from zarr_shardstore.interop.serve.server import serve_store

    def say(url: str) -> None:
        served = f"{printable(store)} is served at {url} until Ctrl-C"
        typer.echo(json.dumps({"store": store, "url": url}) if as_json else served)
        if in_browser:
            webbrowser.open(url)

    opened = ShardingStore(store, None, storage_options=storage_options, read_only=True)
    title = store.rstrip("/").rpartition("/")[2]
    formats: dict[str | None, Any] = {"v2": 2, "v3": 3, None: None}
    with suppress(KeyboardInterrupt):  # uvicorn may also return as if there had been none
        serve_store(opened, zarr_format=formats[shown_as], title=title, on_start=say, **address)
    typer.echo("the server has ended", err=True)


def run_adopt(
    files_and_store: list[str], undo: bool, yes: bool, dry_run: bool, as_json: bool, **options: Any
) -> None:
    *files, store = files_and_store
    if undo:
        if files:
            raise SpecError("--undo takes the array alone: it knows its files")
        paths = zarr_shardstore.undo_adoption(store, discard=yes, dry_run=dry_run)
        verb = "would have" if dry_run else "has"
        text = "\n".join(f"{printable(path)} {verb} its own bytes again" for path in paths)
        output.print_report(as_json, {"restored": paths, "dry_run": dry_run}, text)
        return
    report = zarr_shardstore.adopt(files, store, dry_run=dry_run, **options)
    output.print_report(as_json, report.as_dict(), output.adoption_text(report))


def run_references(
    store: str, out: str, documents_format: Any, stale: bool, as_json: bool, **options: Any
) -> None:
    if stale:
        given = {"storage_options": options["storage_options"]}
        keys = zarr_shardstore.stale_references(store, out, **given)
        text = "\n".join(f"changed: {printable(key)}" for key in keys) or "no shard has changed"
        output.print_report(as_json, {"stale": keys}, text)
        raise typer.Exit(1 if keys else 0)
    to = "kerchunk-parquet" if out.endswith((".parq", ".parquet")) else "kerchunk-json"
    reports: list[Any] = []
    options |= {"out": out, "to": to, "zarr_format": documents_format}
    zarr_shardstore.to_references(store, **options, on_report=reports.append)
    text = output.references_text(reports[0], out)
    output.print_report(as_json, {**reports[0], "out": out}, text)
