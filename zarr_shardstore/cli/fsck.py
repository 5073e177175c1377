"""The command fsck: check a store, list its chunks, repair it, or put the originals back."""

from __future__ import annotations

from typing import Any

import typer

from zarr_shardstore.access import open_base
from zarr_shardstore.cli import output
from zarr_shardstore.cli.arguments import Work
from zarr_shardstore.tools.check.check_store import check_store
from zarr_shardstore.tools.check.presence import presence
from zarr_shardstore.tools.check.quarantine import restore_quarantine
from zarr_shardstore.tools.check.repair import repair_store


def fsck(store: str, arrays: Any, storage_options: Any, as_json: bool, **options: Any) -> None:
    if options["restore"] is not None:
        base: Any = open_base(store, storage_options)
        keys = restore_quarantine(base, options["restore"])
        text = "\n".join(f"restored: {key}" for key in keys)
        output.print_report(as_json, {"restored": keys}, text)
    elif options["chunks"] or options["missing"]:
        found = presence(store, arrays, region=options["region"], storage_options=storage_options)
        states = {"stored": options["chunks"], "missing": options["missing"]}
        output.fail_if_damaged(output.print_presence(found, **states, as_json=as_json))
    else:
        _check(store, arrays, storage_options, as_json, **options)


def _check(
    store: str, arrays: Any, storage_options: Any, as_json: bool, work: Work, **options: Any
) -> None:
    """Check a store, and repair it if that is asked for."""
    given = {"notes": options["resume"], "storage_options": storage_options}
    level: Any = "decode" if options["decode"] else options["level"]
    with work() as workers:
        report = check_store(store, arrays, level=level, **given, **workers)
    if options["repair"] and not report.is_clean:
        how = {"keep": options["keep"], "order": options["full_order"]}
        fixed = repair_store(report, **how, source=options["replica"], dry_run=not options["yes"])
        output.print_report(as_json, fixed.as_dict(), output.repair_text(fixed, store))
        report = fixed.check or report
    else:
        output.print_report(as_json, report.as_dict(), output.check_text(report))
    kinds = {found.kind for found in report.findings if found.severity != "info"}
    if kinds:
        raise typer.Exit(2 if kinds == {"unreadable"} else 1)
    output.fail_if_left(sum(found.kind == "unchecked" for found in report.findings))
