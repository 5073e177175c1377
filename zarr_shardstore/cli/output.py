"""Output of the commands: reports on stdout; progress and failures on stderr.

Reports are the same for each width of a terminal. Names in them are printable.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from zarr_shardstore.errors import ShardConflictError, ShardStoreError, SpecError
from zarr_shardstore.tools.inspect.find import NO_ARRAY_HINT
from zarr_shardstore.tools.inspect.shard_map import by, printable

if TYPE_CHECKING:
    from zarr_shardstore import AdoptionReport, CheckReport, ConversionReport, RepairReport
    from zarr_shardstore.tools.check.presence import ArrayPresence
    from zarr_shardstore.tools.convert.report import (
        CompactionReport,
        Estimate,
        OnProgress,
        Progress,
    )
    from zarr_shardstore.tools.inspect.info import ArrayInfo, StoreInfo
    from zarr_shardstore.tools.native.bridge import NativeReport

_LEFT = 3
_INTERRUPTED = 130  # as in shells: 128 and the number of SIGINT
_MAX_ERRORS = 20  # damaged shards that a command names
_MAX_BARS = 8  # arrays with a bar; bars of finished ones go first
_PAUSE_S = 1.0  # between two lines, without a terminal


@contextmanager
def failures_as_sentences(
    *, debug: bool, resume: bool = False, status: int = 1, is_partial: bool = False
) -> Iterator[None]:
    """Turn exceptions into a sentence and an exit code; with `resume` it tells how to resume.

    If the work `is_partial`, a conflict leaves a part of it done: the status is 1.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        hint = ": run the same command again to resume" if resume else ""
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))  # of a repair
        typer.echo(printable(f"interrupted{hint}{notes}"), err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        hint = "; when that is mended, run the same command again to resume"
        is_about_files = resume and isinstance(error, OSError)
        typer.echo(f"error: {_sentence(error)}{hint if is_about_files else ''}", err=True)
        is_conflict = is_partial and isinstance(error, ShardConflictError)
        raise typer.Exit(1 if is_conflict else status) from None


def _sentence(error: Exception) -> str:
    text = printable(" ".join(str(error).split()))
    if isinstance(error, ShardStoreError):
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
    name = type(error).__name__
    if notes := getattr(error, "__notes__", []):
        return f"{printable(notes[0])} (--debug shows all)"
    return f"{name}: {text} (--debug shows where)" if text else f"{name} (--debug shows where)"


def check_arrays(nodes: Any, store: str) -> None:
    if not nodes:
        raise SpecError(f"there is no array in {store!r}: {NO_ARRAY_HINT}")


def fail_if_left(n_left: int) -> None:
    if n_left:
        raise typer.Exit(_LEFT)


def fail_if_damaged(errors: Sequence[str]) -> None:
    for error in errors[:_MAX_ERRORS]:
        typer.echo(f"! {printable(error)}", err=True)
    if len(errors) > _MAX_ERRORS:
        typer.echo(f"! and {len(errors) - _MAX_ERRORS:,} more", err=True)
    if errors:
        raise typer.Exit(1)


class ProgressBars(Bars):
    """Progress bars of arrays, a context. Call it with each step."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )

    def __call__(self, step: Progress) -> None:
        name = f"{path_text(step.path)} {step.action}"
        found = [task for task in self.tasks if task.fields["path"] == step.path]
        if not found:
            finished = [task.id for task in self.tasks if task.finished]
            for bar in finished[: max(0, len(self.tasks) + 1 - _MAX_BARS)]:
                self.remove_task(bar)
            self.add_task(name, path=step.path, rates="")
            found = self.tasks[-1:]
        rates = f"{step.n_objects:,}" if step.n_objects else _rates(step, found[0].elapsed or 0.0)
        bar, total, done = found[0].id, step.n_tasks, step.n_tasks_done
        self.update(bar, description=name, total=total, completed=done, rates=rates)


@contextmanager
def progress_lines(
    write: Callable[[str], object], clock: Callable[[], float] = time.monotonic
) -> Iterator[OnProgress]:
    """Write plain lines: at most one a second, and the last."""
    started: dict[str, float] = {}
    written_at, unwritten = clock(), ""

    def show(step: Progress) -> None:
        nonlocal written_at, unwritten
        now = clock()
        rates = _rates(step, now - started.setdefault(step.path, now))
        counts = (
            f"{step.n_tasks_done:,} of {step.n_tasks:,} tasks, {step.n_chunks:,} chunks, "
            f"{decimal(step.n_bytes)}{rates and f', {rates}'}"
        )
        counts = f"{step.n_objects:,}" if step.n_objects else counts
        unwritten = f"{path_text(step.path)} {step.action}: {counts}"
        if now - written_at >= _PAUSE_S:
            write(unwritten)
            written_at, unwritten = now, ""

    try:
        yield show
    finally:
        if unwritten:
            write(unwritten)


def progress_on_stderr() -> AbstractContextManager[OnProgress]:
    console = Console(stderr=True)
    if console.is_terminal:
        return ProgressBars(console)
    return progress_lines(lambda line: typer.echo(line, err=True))


def _rates(step: Progress, elapsed: float) -> str:
    if elapsed <= 0:
        return ""
    return f"{step.n_chunks / elapsed:,.0f} chunks/s, {decimal(int(step.n_bytes / elapsed))}/s"


# ---------------------------------------------------------------- reports


def print_report(as_json: bool, report: dict[str, Any], text: str) -> None:
    typer.echo(json.dumps(report, indent=2) if as_json else text)


def path_text(path: str) -> str:
    return printable(path or "/")


def say_what_is_left(paths: Sequence[str], source: str, *, copies_rest: bool) -> None:
    """Say, before anything is copied, what becomes of the rest of a store."""
    what, store = ", ".join(map(path_text, paths)), printable(source)
    rest = f"only {what} goes there: --all copies the rest of {store}, too"
    if copies_rest:
        rest = f"{what} is converted, and the rest of {store} is copied as it is"
    typer.echo(rest, err=True)


def info_text(info: StoreInfo) -> str:
    """Show the figures of one array, or a table of several."""
    is_table = len(info.arrays) > 1
    rows = [[] if is_table else _figures(array) for array in info.arrays]
    table = iter(_table([row for some in rows for row in some], right=(2, 3, 4)))
    heads = [f"{path_text(array.path)}  {_head(array)}" for array in info.arrays]
    if is_table:
        title, *heads = _table([_TITLES, *map(_line, info.arrays)], right=(4, 5, 6))
    lines = [printable(info.store), title] if is_table else [printable(info.store)]
    for array, head, some in zip(info.arrays, heads, rows, strict=True):
        lines.append(head)
        lines += [f"  {next(table)}" for _ in some]
        if array.shares_objects:
            lines.append("  the objects are those of the v3 array: totals count them once")
        if array.read_by != info.read_by:
            lines.append(f"  read by: {printable(array.read_by)}")
        lines += [f"  {printable(note)}" for note in array.notes]
        lines += [f"  ! {printable(error)}" for error in array.errors]
        if array.n_errors > len(array.errors):
            lines.append(f"  ! and {array.n_errors - len(array.errors):,} more")
    total = (
        f"{count(len(info.arrays), 'array')}, {info.n_sharded:,} sharded; "
        f"{count(info.n_chunks, 'chunk')} in {count(info.n_objects, 'object')}; "
        f"{decimal(info.stored_nbytes)}, of which indexes {decimal(info.index_nbytes)}, "
        f"dead {decimal(info.dead_nbytes)}"
    )
    errors = f"; {count(info.n_errors, 'error')}" if info.n_errors else ""
    return "\n".join([*lines, f"read by: {printable(info.read_by)}", total + errors])


_TITLES = ("array", "shape", "chunks", "shards", "objects", "fill", "size", "")


def _line(array: ArrayInfo) -> Sequence[str]:
    """Return the row of an array in a table of several."""
    shapes = (array.shape, array.chunk_shape, array.shard_shape)
    chunks, *_ = _figures(array) or [[""] * 5]
    kind = printable(f"{array.dtype or 'unknown type'}, {array.hierarchy}")
    size = decimal(array.stored_nbytes) if array.chunk_shape else ""
    n = f"{array.n_objects:,}" if array.chunk_shape else ""
    return path_text(array.path), *(by(s or ()) for s in shapes), n, chunks[3], size, kind


def _head(array: ArrayInfo) -> str:
    shape = "unknown shape" if array.shape is None else by(array.shape) or "0-d"
    how = f", {array.declaration}" if array.declaration else ", not sharded"
    if array.chunk_shape is None:
        how = ""
    return printable(f"{array.dtype or 'unknown type'}  {shape}  {array.hierarchy}{how}")


def _figures(array: ArrayInfo) -> list[list[str]]:
    """Return title, shape, count, fraction and size of the chunks and of the shards."""
    if array.chunk_shape is None:
        return []
    is_almost = 0 < array.fill < 0.01 or 0.99 < array.fill < 1
    n_chunks = f"{array.n_chunks:,} of {array.n_chunks_of_grid:,}"
    fill = f"{100 * array.fill:.{2 if is_almost else 0}f} %"
    chunks = ["chunks", by(array.chunk_shape), n_chunks, fill, decimal(array.chunk_nbytes)]
    if array.shard_shape is None:
        return [chunks]
    n_objects = f"{array.n_objects:,} of {array.n_objects_of_grid:,}"
    sizes = [int(n) for n in (array.smallest, array.mean, array.largest) if n is not None]
    rows = [
        chunks,
        ["shards", by(array.shard_shape), n_objects, "", decimal(array.stored_nbytes)],
        ["each", " … ".join(map(decimal, sizes)), "", "", ""],
        ["index", "", "", "", decimal(array.index_nbytes)],
        ["dead", "", "", "", decimal(array.dead_nbytes)],
    ]
    return [row for row in rows if any(row[1:])]


def conversion_text(report: ConversionReport) -> str:
    """List the result, or with a dry run the plan, for each array and in sum."""
    would_be = "would be " if report.dry_run else ""
    is_counted = not report.dry_run or report.estimate is not None
    rows = [["array", "", "", "per shard", *(_COUNTED if is_counted else _UNCOUNTED), ""]]
    for array in report.arrays:
        is_left = array.action == "skipped" and (would_be or array.is_left)
        action = "left" if is_left else array.action
        counts = list(_UNCOUNTED)
        if array.action != "skipped" and is_counted:
            before = f"{array.n_objects_before:,} → " if report.dry_run else ""
            objects = f"{before}{array.n_objects:,}"
            counts = [f"{array.n_chunks:,}", objects, decimal(array.n_bytes)]
        first = [path_text(array.path), array.hierarchy, would_be + action]
        cps = by(array.chunks_per_shard or ())
        rows.append([*first, cps, *counts, printable(array.reason)])
    total = ["nothing was changed: a dry run"]
    if not report.dry_run:
        total = [f"{count(report.n_chunks, 'chunk')} in {count(report.n_objects, 'object')}"]
        if n_resumed := sum(array.n_resumed for array in report.arrays):
            total.append(f"{count(n_resumed, 'task')} done by an earlier run")
    if report.n_copied_keys:
        total.append(f"{count(report.n_copied_keys, 'other key')} {would_be}copied")
    if not report.dry_run:
        total.append(f"{report.seconds:.1f} s")
    notes = [f"note: {printable(note)}" for note in report.notes]
    readers = f"{would_be}read by: {printable(report.read_by)}"
    estimate = [] if report.estimate is None else _estimate_lines(report.estimate)
    lines = [*_table(rows, right=(4, 5, 6)), *notes, readers, *estimate]
    return "\n".join([*lines, "; ".join(total)])


_COUNTED = ("chunks", "objects", "bytes")
_UNCOUNTED = ("", "", "")


def _estimate_lines(found: Estimate) -> list[str]:
    from zarr_shardstore.tools.convert.report import PRICES_OF

    about = "" if found.is_exact else "about "
    sizes = f"{decimal(found.n_bytes_before)} become {decimal(found.n_bytes_after)}"
    n_before, n_after = f"{found.n_objects_before:,}", count(found.n_objects_after, "object")
    asked = f"{count(found.n_reads, 'read')}, {count(found.n_writes, 'write')}"
    costs = ", ".join(f"{cloud} {_dollars(usd)}" for cloud, usd in found.cost_usd.items())
    took = f"{found.seconds:.0f} s" if found.seconds >= 1 else "1 s"
    took = took if found.seconds < 100 else f"{found.seconds / 60:,.0f} min"
    return [
        f"objects: {about}{n_before} become {n_after}; bytes: {about}{sizes}",
        f"room: {about}{decimal(found.n_bytes_more)} more at the peak",
        f"requests: about {asked}, {count(found.n_deletes, 'delete')}",
        f"price of these requests in a cloud: {costs} (list prices of {PRICES_OF})",
        f"time: {took} or more: as if writes were as fast as the reads that were timed now",
    ]


def _dollars(usd: float) -> str:
    return "below $0.01" if usd < 0.01 else f"${usd:,.2f}"


def check_text(report: CheckReport) -> str:
    rows = []
    for found in report.findings:
        place = f"chunk {list(found.chunk)}" if found.chunk is not None else ""
        place += f" [{found.byte_range[0]}, {found.byte_range[1]})" if found.byte_range else ""
        kind = found.kind.replace("_", " ")
        rows.append([found.severity, kind, printable(found.key), place, printable(found.message)])
    counts = [count(n, name) for name, n in report.counts.items() if n and name != "info"]
    more = f", and {report.n_omitted:,} findings more" if report.n_omitted else ""
    checked = (
        f"{count(report.n_arrays, 'array')}, {count(report.n_objects, 'object')}, "
        f"{count(report.n_chunks, 'chunk')}; {decimal(report.n_bytes)} read; "
        f"{report.seconds:.1f} s; level {report.level}"
    )
    lines = [*_table(rows), f"{', '.join(counts) or 'clean'}{more}: {checked}"]
    if report.n_without_checksum and report.level != "index":
        n = count(report.n_without_checksum, "chunk")
        lines.append(f"{n} without a checksum: no check sees each changed byte of these")
    return "\n".join(lines)


def repair_text(report: RepairReport, store: str) -> str:
    rows = []
    for action in report.actions:
        chunks = f"{count(action.n_kept, 'chunk')} kept" if action.n_kept else ""
        chunks += f" {count(action.n_fetched, 'chunk')} of the source" if action.n_fetched else ""
        text = printable(action.message)  # at the end, because it is long
        if action.lost:
            text += f"  lost: {' '.join(str(list(chunk)) for chunk in action.lost)}"
        rows.append([action.did, printable(action.key), chunks, text])
    texts = _table(rows)
    if report.dry_run:
        texts.append("nothing was changed: --yes does it")
    elif report.quarantine:
        texts.append(f"originals: fsck --restore {report.quarantine} --yes puts them back")
    else:
        texts.append("nothing was changed")
    texts += _orders_to_assume(report, store)
    return "\n".join(texts if report.check is None else [*texts, check_text(report.check)])


def _orders_to_assume(report: RepairReport, store: str) -> list[str]:
    """Return the commands that give chunks their keys by an assumed order."""
    unnamed = [action for action in report.actions if action.n_unnamed]
    command = f"zarr-shardstore fsck {shlex.quote(store)}"
    texts = []
    if report.quarantine and any(action.did == "rewritten" for action in unnamed):
        texts.append(f"before the next: {command} --restore {report.quarantine} --yes")
    for array, order in sorted({(action.array or "", action.order or "") for action in unnamed}):
        path = f" {shlex.quote(array)}" if array else ""
        how = f"{command}{path} --repair --assume-order {order or 'ORDER'} --yes"
        texts.append(f"if its shards were full, and written as the others: {how}")
        if not order:
            known = "ORDER is morton for zarr-python and this package, C for tensorstore and zarrs"
            texts[-1] = f"if its shards were full: {how}; {known}"
    return texts


def print_presence(
    arrays: Iterable[ArrayPresence], *, stored: bool, missing: bool, as_json: bool
) -> list[str]:
    """Print the stored or missing chunks of arrays, or both; return errors of shards."""
    errors: list[str] = []
    states = [name for name, is_asked in (("stored", stored), ("missing", missing)) if is_asked]
    report: list[dict[str, Any]] = []
    for array in arrays:
        errors += array.errors
        listed = {name: array.chunks(stored=name == "stored") for name in states}
        if as_json:
            chunks = {name: list(map(list, some)) for name, some in listed.items()}
            report.append({"path": array.path, "hierarchy": array.hierarchy, **chunks})
            continue
        for name, some in listed.items():
            for coords in some:
                typer.echo(f"{path_text(array.path)}  {','.join(map(str, coords))}  {name}")
        n, size = int(array.is_stored.sum()), array.is_stored.size
        typer.echo(f"{path_text(array.path)}: {n:,} of {count(size, 'chunk')} stored", err=True)
    if as_json:
        typer.echo(json.dumps(report))
    return errors


def compaction_text(report: CompactionReport, store: str) -> str:
    if not report.n_compacted:
        return f"no shard in {printable(store)} has dead bytes"
    would_be = "would be " if report.dry_run else ""
    return (
        f"{report.n_compacted:,} of {count(report.n_shards, 'shard')} in {printable(store)} "
        f"{would_be}compacted, {count(report.removed_nbytes, 'byte')} {would_be}removed"
    )


def adoption_text(report: AdoptionReport) -> str:
    verb = "would be" if report.dry_run else "is"
    files = count(len(report.files), "file")
    rows = [
        f"{printable(report.store)} {verb} an array of shape {report.shape}, in chunks of "
        f"{report.chunk_shape}: {count(report.n_chunks, 'chunk')} in {files}",
        f"read by: {report.read_by}",
    ]
    if report.link == "copy":
        return "\n".join([*rows, "the files themselves stay as they are: these are copies"])
    what = f"{count(report.added_nbytes, 'byte')} behind the end of each file"
    rows.append(f"WRITTEN INTO THE FILES THEMSELVES: {what} {verb} the index of its shard")
    return "\n".join([*rows, "--undo cuts them off again"])


def native_text(report: NativeReport) -> str:
    did = {"translated": "would be translated"} if report.dry_run else {}
    rows = [
        [path_text(each.path), did.get(each.action, each.action), printable(each.reason)]
        for each in report.entries
    ]
    notes = [f"note: {printable(note)}" for note in report.notes]
    return "\n".join([*_table(rows), *notes, *map(printable, str(report).splitlines())])


def references_text(report: dict[str, Any], out: str) -> str:
    rows = [
        [path_text(a["path"]), count(a["n_chunks"], "chunk"), count(a["n_objects"], "object")]
        for a in report["arrays"]
    ]
    notes = {f"note: {path_text(a['path'])}: {a['note']}" for a in report["arrays"] if a["note"]}
    made = f"{printable(out)}, zarr_format {report['zarr_format']}: bytes below {report['url']}"
    return "\n".join([*_table(rows, right=(1, 2)), *sorted(notes), made])


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Align the cells of rows; columns in `right` to the right."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([f"{cell:{'>' if i in right else '<'}{width}}" for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
