"""Commands that change stores: conversions, translations of documents, and upkeep."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from zarr_shardstore.access import ShardingMapping
from zarr_shardstore.cli import output
from zarr_shardstore.cli.arguments import Work, confirm, is_same
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.inspect.info import sharded_paths
from zarr_shardstore.tools.inspect.readers import ONLY_HERE


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
    with work() as workers:
        report = convert(*arguments, **options, **workers)
    output.check_arrays(report.arrays, source)
    output.print_report(as_json, report.as_dict(), output.conversion_text(report))
    output.fail_if_left(report.n_left)


shard = partial(_convert, "shard_store")
unshard = partial(_convert, "unshard_store")
reshard = partial(_convert, "reshard")


def _translate(tool: str, store: str, yes: bool, as_json: bool, **options: Any) -> None:
    warning = f"the metadata documents of {store!r} are replaced"
    if tool == "from_native":
        warning += f", and its shards are read {ONLY_HERE}"
    confirm(warning, "--dry-run to see which", is_confirmed=yes or options["dry_run"])
    report = getattr(import_module("zarr_shardstore.tools.native.bridge"), tool)(store, **options)
    output.check_arrays(report.entries, store)
    output.print_report(as_json, report.as_dict(), output.native_text(report))


to_native = partial(_translate, "to_native")
from_native = partial(_translate, "from_native")


def compact(store: str, as_json: bool, **options: Any) -> None:
    compact_store = import_module("zarr_shardstore.tools.convert.api").compact_store
    report = compact_store(store, **options)
    output.print_report(as_json, report.as_dict(), output.compaction_text(report, store))
    output.fail_if_damaged(report.errors)


def consolidate(
    store: str, path: str, storage_options: dict[str, Any] | None, dry_run: bool, as_json: bool
) -> None:
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
    output.print_report(as_json, {"paths": paths, "dry_run": dry_run}, text)
