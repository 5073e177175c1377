"""Reports as text. Nothing depends on the width of a terminal; no name can move its cursor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.filesize import decimal
from rich.text import Text
from rich.tree import Tree

from zarr_shardstore.convert.compact import CompactionReport
from zarr_shardstore.convert.report import ArrayReport, ConversionReport
from zarr_shardstore.inspect.info import ArrayInfo, StoreInfo


def printable(text: str) -> str:
    """`text` with signs that a terminal would obey, or end a line, written as escapes.

    >>> printable("a" + chr(27) + "[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(s if s.isprintable() else s.encode("unicode_escape").decode() for s in text)


def name_of(path: str) -> str:
    """A path for readers: the root has a name."""
    return path or "/"


def info_tree(info: StoreInfo) -> Tree:
    """The groups and arrays of a store, with figures; sizes under each other."""
    depth = max((array.path.count("/") for array in info.arrays), default=0)
    rows = {id(array): _rows(array) for array in info.arrays}
    widths = _widths(row for some in rows.values() for row in some)
    tree = Tree(Text(printable(info.store)), highlight=False)
    groups: dict[str, Tree] = {"": tree}
    for array in info.arrays:
        group, _, name = array.path.rpartition("/")
        branch = _branch(groups, group)
        spare = 4 * (depth - array.path.count("/"))
        label = Text(printable(name_of(name)), style="bold")
        label.append(f"  {_head(array)}", style="not bold")
        for title, *cells in rows[id(array)]:
            padded = [cells[0].ljust(widths[1] + spare), *_right(cells[1:], widths[2:])]
            label.append(f"\n{title.ljust(widths[0])}  {'  '.join(padded)}".rstrip(), "not bold")
        if array.shares_objects:
            label.append(
                "\nthe objects are those of the v3 array: totals count them once", "not bold"
            )
        for note in array.notes:
            label.append(f"\n{printable(note)}", style="not bold")
        for error in array.errors:
            label.append(f"\n! {printable(error)}", style="red not bold")
        if array.n_errors > len(array.errors):
            label.append(f"\n! and {array.n_errors - len(array.errors):,} more", "red not bold")
        branch.add(label)
    return tree


def totals_text(info: StoreInfo) -> str:
    """The last line of `info_tree`."""
    text = (
        f"{_count(len(info.arrays), 'array')}, {info.n_sharded:,} sharded; "
        f"{_count(info.n_chunks, 'chunk')} in {_count(info.n_objects, 'object')}; "
        f"{decimal(info.stored_nbytes)}, of which indexes {decimal(info.index_nbytes)}, "
        f"dead {decimal(info.dead_nbytes)}"
    )
    return f"{text}; {_count(info.n_errors, 'error')}" if info.n_errors else text


def _branch(groups: dict[str, Tree], path: str) -> Tree:
    if path not in groups:
        above, _, name = path.rpartition("/")
        groups[path] = _branch(groups, above).add(Text(f"{printable(name)}/"))
    return groups[path]


def _head(array: ArrayInfo) -> str:
    shape = "unknown shape" if array.shape is None else by(array.shape) or "0-d"
    how = f", {array.declaration}" if array.declaration else ", not sharded"
    if array.chunk_shape is None:
        how = ""
    return printable(f"{array.dtype or 'unknown type'}  {shape}  {array.hierarchy}{how}")


def _rows(array: ArrayInfo) -> list[list[str]]:
    """Title, shape, count, fraction and size of the chunks, and of the shards."""
    if array.chunk_shape is None:
        return []
    fill = f"{100 * array.fill:.0f} %"
    if 0 < array.fill < 0.01 or 0.99 < array.fill < 1:
        fill = f"{100 * array.fill:.2f} %"
    chunks = [
        "chunks",
        by(array.chunk_shape),
        f"{array.n_chunks:,} of {array.n_chunks_of_grid:,}",
        fill,
        decimal(array.chunk_nbytes),
    ]
    if array.shard_shape is None:
        return [chunks]
    shards = [
        "shards",
        by(array.shard_shape),
        f"{array.n_objects:,} of {array.n_objects_of_grid:,}",
        "",
        decimal(array.stored_nbytes),
    ]
    rows = [chunks, shards]
    if array.smallest is not None and array.mean is not None and array.largest is not None:
        each = " … ".join(decimal(int(n)) for n in (array.smallest, array.mean, array.largest))
        rows.append(["each", each, "", "", ""])
    rows.append(["index", "", "", "", decimal(array.index_nbytes)])
    rows.append(["dead", "", "", "", decimal(array.dead_nbytes)])
    return rows


def conversion_text(report: ConversionReport) -> str:
    """What became of each array, and the sum; of a dry run, what would."""
    if report.dry_run:
        header = ["array", "", "", "per shard", ""]
        rows = [_plan_row(array) for array in report.arrays]
        total = "nothing was changed: a dry run"
        if report.n_copied_keys:
            total += f"; {_count(report.n_copied_keys, 'other key')} would be copied"
    else:
        header = ["array", "", "", "per shard", "chunks", "objects", "bytes", ""]
        rows = [_done_row(array) for array in report.arrays]
        total = f"{_count(report.n_chunks, 'chunk')} in {_count(report.n_objects, 'object')}"
        if n_resumed := sum(array.n_resumed for array in report.arrays):
            total += f"; {_count(n_resumed, 'task')} done by an earlier run"
        if report.n_copied_keys:
            total += f"; {_count(report.n_copied_keys, 'other key')} copied"
        total += f"; {report.seconds:.1f} s"
    notes = [f"note: {printable(note)}" for note in report.notes]
    table = _table([header, *rows], right=() if report.dry_run else (4, 5, 6))
    return "\n".join([*table, *notes, total])


def _plan_row(array: ArrayReport) -> list[str]:
    action = "would be left" if array.action == "skipped" else f"would be {array.action}"
    cps = by(array.chunks_per_shard or ())
    name, reason = printable(name_of(array.path)), printable(array.reason)
    return [name, array.hierarchy, action, cps, reason]


def _done_row(array: ArrayReport) -> list[str]:
    cps = by(array.chunks_per_shard or ())
    name, reason = printable(name_of(array.path)), printable(array.reason)
    if array.action == "skipped":
        return [name, array.hierarchy, array.action, cps, "", "", "", reason]
    counts = [f"{array.n_chunks:,}", f"{array.n_objects:,}", decimal(array.n_bytes)]
    return [name, array.hierarchy, array.action, cps, *counts, reason]


def compaction_text(report: CompactionReport, store: str) -> str:
    """What a compaction removed, or would remove."""
    if not report.n_compacted:
        return f"no shard in {printable(store)} has dead bytes"
    would_be = "would be " if report.dry_run else ""
    return (
        f"{report.n_compacted:,} of {_count(report.n_shards, 'shard')} in {printable(store)} "
        f"{would_be}compacted, {_count(report.removed_nbytes, 'byte')} {would_be}removed"
    )


def native_text(report: Any) -> str:
    """What becomes of the documents of each array and group, and the sum."""
    rows = [
        [printable(name_of(entry.path)), entry.action, printable(entry.reason)]
        for entry in report.entries
    ]
    return "\n".join([*_table(rows), str(report)])


def by(numbers: Iterable[int]) -> str:
    """A shape: ``8 × 8 × 4``."""
    return " × ".join(f"{n:,}" for n in numbers)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _widths(rows: Iterable[Sequence[str]]) -> list[int]:
    columns = list(zip(*rows, strict=True)) or [()] * 5
    return [max(map(len, column), default=0) for column in columns]


def _right(cells: Iterable[str], widths: Iterable[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows with their cells under each other."""
    widths = _widths(rows) if rows else []
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
