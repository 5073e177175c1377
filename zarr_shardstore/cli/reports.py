"""Reports of the tools as text.

Nothing depends on the width of a terminal, and no name can move its cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.filesize import decimal

from zarr_shardstore.convert.compact import CompactionReport
from zarr_shardstore.convert.report import ArrayReport, ConversionReport
from zarr_shardstore.inspect.info import ArrayInfo, StoreInfo
from zarr_shardstore.native.bridge import NativeReport


def printable(text: str) -> str:
    """Escape characters that a terminal would obey, or that end a line.

    >>> printable("a" + chr(27) + "[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(s if s.isprintable() else s.encode("unicode_escape").decode() for s in text)


def path_text(path: str) -> str:
    """Return a path to print; that of the root is ``/``."""
    return printable(path or "/")


def info_text(info: StoreInfo) -> str:
    """List the arrays of a store with their figures, then the totals."""
    rows = [_figures(array) for array in info.arrays]
    table = iter(_table([row for some in rows for row in some], right=(2, 3, 4)))
    lines = [printable(info.store)]
    for array, some in zip(info.arrays, rows, strict=True):
        lines.append(f"{path_text(array.path)}  {_head(array)}")
        lines += [f"  {next(table)}" for _ in some]
        if array.shares_objects:
            lines.append("  the objects are those of the v3 array: totals count them once")
        lines += [f"  {printable(note)}" for note in array.notes]
        lines += [f"  ! {printable(error)}" for error in array.errors]
        if array.n_errors > len(array.errors):
            lines.append(f"  ! and {array.n_errors - len(array.errors):,} more")
    total = (
        f"{_count(len(info.arrays), 'array')}, {info.n_sharded:,} sharded; "
        f"{_count(info.n_chunks, 'chunk')} in {_count(info.n_objects, 'object')}; "
        f"{decimal(info.stored_nbytes)}, of which indexes {decimal(info.index_nbytes)}, "
        f"dead {decimal(info.dead_nbytes)}"
    )
    errors = f"; {_count(info.n_errors, 'error')}" if info.n_errors else ""
    return "\n".join([*lines, total + errors])


def _head(array: ArrayInfo) -> str:
    shape = "unknown shape" if array.shape is None else _by(array.shape) or "0-d"
    how = f", {array.declaration}" if array.declaration else ", not sharded"
    if array.chunk_shape is None:
        how = ""
    return printable(f"{array.dtype or 'unknown type'}  {shape}  {array.hierarchy}{how}")


def _figures(array: ArrayInfo) -> list[list[str]]:
    """Return title, shape, count, fraction and size of the chunks, and of the shards."""
    if array.chunk_shape is None:
        return []
    is_almost = 0 < array.fill < 0.01 or 0.99 < array.fill < 1
    n_chunks = f"{array.n_chunks:,} of {array.n_chunks_of_grid:,}"
    fill = f"{100 * array.fill:.{2 if is_almost else 0}f} %"
    rows = [["chunks", _by(array.chunk_shape), n_chunks, fill, decimal(array.chunk_nbytes)]]
    if array.shard_shape is None:
        return rows
    n_objects = f"{array.n_objects:,} of {array.n_objects_of_grid:,}"
    rows.append(["shards", _by(array.shard_shape), n_objects, "", decimal(array.stored_nbytes)])
    if array.smallest is not None and array.mean is not None and array.largest is not None:
        sizes = (array.smallest, array.mean, array.largest)
        rows.append(["each", " … ".join(decimal(int(n)) for n in sizes), "", "", ""])
    rows.append(["index", "", "", "", decimal(array.index_nbytes)])
    rows.append(["dead", "", "", "", decimal(array.dead_nbytes)])
    return rows


def conversion_text(report: ConversionReport) -> str:
    """List what was done with each array, or in a dry run would be, then the sum."""
    if report.dry_run:
        rows = [["array", "", "", "per shard", ""], *map(_planned, report.arrays)]
        total = "nothing was changed: a dry run"
        if report.n_copied_keys:
            total += f"; {_count(report.n_copied_keys, 'other key')} would be copied"
    else:
        header = ["array", "", "", "per shard", "chunks", "objects", "bytes", ""]
        rows = [header, *map(_done, report.arrays)]
        total = f"{_count(report.n_chunks, 'chunk')} in {_count(report.n_objects, 'object')}"
        if n_resumed := sum(array.n_resumed for array in report.arrays):
            total += f"; {_count(n_resumed, 'task')} done by an earlier run"
        if report.n_copied_keys:
            total += f"; {_count(report.n_copied_keys, 'other key')} copied"
        total += f"; {report.seconds:.1f} s"
    notes = [f"note: {printable(note)}" for note in report.notes]
    return "\n".join([*_table(rows, right=() if report.dry_run else (4, 5, 6)), *notes, total])


def _planned(array: ArrayReport) -> list[str]:
    action = "would be left" if array.action == "skipped" else f"would be {array.action}"
    cps = _by(array.chunks_per_shard or ())
    return [path_text(array.path), array.hierarchy, action, cps, printable(array.reason)]


def _done(array: ArrayReport) -> list[str]:
    counts = ["", "", ""]
    if array.action != "skipped":
        counts = [f"{array.n_chunks:,}", f"{array.n_objects:,}", decimal(array.n_bytes)]
    first = [path_text(array.path), array.hierarchy, array.action]
    return [*first, _by(array.chunks_per_shard or ()), *counts, printable(array.reason)]


def compaction_text(report: CompactionReport, store: str) -> str:
    """Say how many bytes a compaction removed, or in a dry run would remove."""
    if not report.n_compacted:
        return f"no shard in {printable(store)} has dead bytes"
    would_be = "would be " if report.dry_run else ""
    return (
        f"{report.n_compacted:,} of {_count(report.n_shards, 'shard')} in {printable(store)} "
        f"{would_be}compacted, {_count(report.removed_nbytes, 'byte')} {would_be}removed"
    )


def native_text(report: NativeReport) -> str:
    """List what was done with the documents of each array and group, then the sum."""
    rows = [
        [path_text(entry.path), entry.action, printable(entry.reason)] for entry in report.entries
    ]
    return "\n".join([*_table(rows), str(report)])


def _by(numbers: Iterable[int]) -> str:
    return " × ".join(f"{n:,}" for n in numbers)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Align the cells of rows; columns in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
