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
from zarr_shardstore.access import ShardingMapping, open_base
from zarr_shardstore.cli import output
from zarr_shardstore.cli.parameters import (
    EXECUTOR,
    PARAMETERS,
    confirm,
    executor_of,
    is_same,
    parse,
)
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.inspect.find import NO_ARRAY_HINT
from zarr_shardstore.tools.inspect.info import get_shard_info, sharded_paths
from zarr_shardstore.tools.inspect.readers import ONLY_HERE
from zarr_shardstore.tools.inspect.shard_map import (
    render_figure,
    render_html,
    render_text,
    shard_map,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and errors: the same in a pipe
    pretty_exceptions_enable=False,
    help="Sharding for Zarr: look at stores, and convert them. Chunks are moved, never decoded.",
)

_Function = Callable[..., None]
_CONVERSION = f"paths {EXECUTOR} source_options destination_options dry_run yes as_json"
_FORM = "declaration index_location order"
_TRANSLATION = "paths storage_options dry_run yes as_json"


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


def command(example: str, *parameters: str, failed: int = 1) -> Callable[[_Function], _Function]:
    """Register a function as the command of an example; it gets these parameters of the table. It
    ends with status `failed` if it cannot do its work."""

    def register(function: _Function) -> _Function:
        def run(*, debug: bool, **options: Any) -> None:
            resume = options.get("dry_run") is False or options.get("resume") is not None
            with output.failures_as_sentences(debug=debug, resume=resume, status=failed):
                function(**{name: parse(name, value) for name, value in options.items()})

        run.__doc__ = function.__doc__
        names = " ".join([*parameters, "debug"]).split()
        signature = Signature([PARAMETERS[name] for name in names])
        run.__signature__ = signature  # type: ignore[attr-defined]
        app.command(example.split()[0], epilog=f"Example: zarr-shardstore {example}")(run)
        return function

    return register


# -------------------------------------------------------------- conversions


@command(
    "shard volume.zarr packed.zarr --native",
    "source destination chunks_per_shard shard_nbytes native ome",
    _FORM,
    _CONVERSION,
)
def _shard(source: str, destination: str | None, **options: Any) -> None:
    """Pack the chunks of a store into shards.

    Arrays of Zarr v3 stay readable by every v3 reader. Those of Zarr v2 need --native, which makes
    them v3; add --ome for images in OME-Zarr 0.4.
    """
    _convert("shard_store", (source, destination), **options)


@command("unshard packed.zarr volume-again.zarr", "source destination", _CONVERSION)
def _unshard(source: str, destination: str | None, **options: Any) -> None:
    """Store each chunk as an object of its own again."""
    _convert("unshard_store", (source, destination), **options)


@command(
    "reshard packed.zarr --chunks-per-shard 4 --yes",
    "source destination chunks_per_shard shard_nbytes",
    _FORM,
    _CONVERSION,
)
def _reshard(source: str, destination: str | None, chunks_per_shard: Any, **options: Any) -> None:
    """Give a store shards of another size."""
    _convert("reshard", (source, chunks_per_shard, destination), **options)


def _convert(
    tool: str,
    arguments: tuple[Any, ...],
    *,
    workers: int | None,
    processes: bool,
    dask: str | None,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    source, destination = arguments[0], arguments[-1]
    convert = getattr(import_module("zarr_shardstore.tools.convert.api"), tool)
    warnings, other_ways = [], []
    if destination is None or is_same(source, destination):
        warnings = [f"the stored objects of {source!r} are replaced, after they were verified"]
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
    with (
        executor_of(workers, processes, dask) as executor,
        output.progress_on_stderr() as progress,
    ):
        report = convert(*arguments, **options, executor=executor, progress=progress)
    _check_arrays(report.arrays, source)
    print_report(as_json, report.as_dict(), output.conversion_text(report))
    output.fail_if_left(report.n_left)


@command("to-native volume.zarr --dry-run", "store ome", _TRANSLATION)
def _to_native(**options: Any) -> None:
    """Let every Zarr v3 reader read the shards.

    Only metadata is written: the shards stay as they are.
    """
    _translate("to_native", **options)


@command("from-native packed.zarr --dry-run", "store zarr_format", _TRANSLATION)
def _from_native(**options: Any) -> None:
    """Declare native shards in the other ways.

    Only metadata is written: the shards stay as they are. No other program reads them then.
    """
    _translate("from_native", **options)


def _translate(tool: str, store: str, *, yes: bool, as_json: bool, **options: Any) -> None:
    warning = f"the metadata documents of {store!r} are replaced"
    if tool == "from_native":
        warning += f", and its shards are read {ONLY_HERE}"
    confirm(warning, "--dry-run to see which", is_confirmed=yes or options["dry_run"])
    report = getattr(import_module("zarr_shardstore.tools.native.bridge"), tool)(store, **options)
    _check_arrays(report.entries, store)
    print_report(as_json, report.as_dict(), output.native_text(report))


def _check_arrays(nodes: Any, store: str) -> None:
    if not nodes:
        raise SpecError(f"there is no array in {store!r}: {NO_ARRAY_HINT}")


def print_report(as_json: bool, report: dict[str, Any], text: str) -> None:
    typer.echo(json.dumps(report, indent=2) if as_json else text)


# ----------------------------------------------------- reports and upkeep


@command("info packed.zarr", "store paths storage_options as_json")
def _info(store: str, as_json: bool, **options: Any) -> None:
    """Show arrays, and what their shards hold.

    If something is damaged, it says so and ends with status 1.
    """
    found = get_shard_info(store, **options)
    _check_arrays(found.arrays, store)
    print_report(as_json, found.as_dict(), output.info_text(found))
    if any(array.n_errors for array in found.arrays):
        raise typer.Exit(1)
    output.fail_if_left(found.n_unknown)


@command(
    "fsck packed.zarr --decode",
    "store arrays level decode chunks missing region repair keep replica full_order restore",
    f"{EXECUTOR} resume yes storage_options as_json",
    failed=2,
)
def _fsck(
    store: str,
    arrays: list[str] | None,
    level: Any,
    decode: bool,
    chunks: bool,
    missing: bool,
    region: Any,
    repair: bool,
    keep: Any,
    replica: str | None,
    full_order: Any,
    restore: str | None,
    yes: bool,
    as_json: bool,
    workers: int | None,
    processes: bool,
    dask: str | None,
    resume: Path | None,
    storage_options: dict[str, Any] | None,
) -> None:
    """Check documents, indexes and chunks, or repair them.

    It ends with status 1 if it found damage or remains, and 2 if it could not check. With --chunks,
    --missing or both it lists chunks instead. --repair --yes repairs what it found, and names the
    quarantine of the originals; --restore puts these back.
    """
    if restore is not None:
        quarantine = import_module("zarr_shardstore.tools.check.quarantine")
        keys = quarantine.restore_quarantine(open_base(store, storage_options), restore)
        print_report(as_json, {"restored": keys}, "\n".join(f"restored: {key}" for key in keys))
        return
    if chunks or missing:
        counted = import_module("zarr_shardstore.tools.check.presence").presence
        found = counted(store, arrays, region=region, storage_options=storage_options)
        errors = output.print_presence(found, stored=chunks, missing=missing, as_json=as_json)
        output.fail_if_damaged(errors)
        return
    check_store = import_module("zarr_shardstore.tools.check.check_store").check_store
    with (
        executor_of(workers, processes, dask) as executor,
        output.progress_on_stderr() as progress,
    ):
        report = check_store(
            store,
            arrays,
            level="decode" if decode else level,
            executor=executor,
            progress=progress,
            notes=resume,
            storage_options=storage_options,
        )
    if repair and not report.is_clean:
        repair_store = import_module("zarr_shardstore.tools.check.repair").repair_store
        repaired = repair_store(
            report, keep=keep, source=replica, order=full_order, dry_run=not yes
        )
        print_report(as_json, repaired.as_dict(), output.repair_text(repaired, store))
        report = repaired.check or report
    else:
        print_report(as_json, report.as_dict(), output.check_text(report))
    kinds = {found.kind for found in report.findings if found.severity != "info"}
    if kinds:
        raise typer.Exit(2 if kinds == {"unreadable"} else 1)
    output.fail_if_left(sum(found.kind == "unchecked" for found in report.findings))


@command("compact packed.zarr", "store prefix storage_options dry_run as_json")
def _compact(store: str, as_json: bool, **options: Any) -> None:
    """Remove the dead bytes of shards.

    Erased and replaced chunks leave them. Leftovers of a killed writer are put in order, too.
    Other programs may continue to write.
    """
    compact_store = import_module("zarr_shardstore.tools.convert.api").compact_store
    report = compact_store(store, **options)
    print_report(as_json, report.as_dict(), output.compaction_text(report, store))
    output.fail_if_damaged(report.errors)


@command("consolidate packed.zarr raw", "store path storage_options dry_run as_json")
def _consolidate(
    store: str, path: str, storage_options: dict[str, Any] | None, dry_run: bool, as_json: bool
) -> None:
    """Store the indexes of all shards of an array in one object.

    A cold reader of the array then asks for that object instead of an index for each shard. A
    shard that changes later is read by its own index; run it again when many have changed.
    """
    mapping = ShardingMapping(store, storage_options=storage_options)
    if dry_run:
        mapping._engine.check_consolidation()
        paths = sharded_paths(mapping, path)
    else:
        paths = mapping.consolidate_index(path)
    if not paths:
        raise SpecError(f"there is no sharded array in {store}")
    verb = "would be" if dry_run else "are"
    text = f"the indexes of {output.count(len(paths), 'array')} in {store} {verb} consolidated"
    print_report(as_json, {"paths": paths, "dry_run": dry_run}, text)


@command("map packed.zarr raw --html map.html", "store path png html storage_options as_json")
def _draw_map(
    store: str, path: str, png: Path | None, html: Path | None, as_json: bool, **options: Any
) -> None:
    """Draw which shards there are, and how full.

    If some are damaged, it names them and ends with status 1.
    """
    shards = shard_map(store, path, **options)
    if png is not None:
        png.write_bytes(render_figure(shards, "png"))
    if html is not None:
        html.write_text(render_html(shards), encoding="utf-8")
    drawn = [file for file in (png, html) if file is not None]
    for file in drawn:
        typer.echo(f"drawn: {file}", err=as_json)
    if as_json:
        typer.echo(json.dumps(shards.as_dict()))
    elif not drawn:
        width, n_lines = get_terminal_size((80, 46))
        is_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
        text = render_text(shards, width=width, height=max(8, n_lines - 6), is_ascii=is_ascii)
        typer.echo(text, nl=False)
    output.fail_if_damaged(shards.errors)


from zarr_shardstore.cli import interop as interop  # noqa: E402  # registers its commands
