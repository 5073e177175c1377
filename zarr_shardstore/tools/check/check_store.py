"""Check of a store: one listing, a task for each few objects, and what the documents say."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from zarr_shardstore.access import (
    STAGING,
    BaseStoreHandle,
    LocalBackend,
    StoreLike,
    arguments,
    chunk_keys,
    consolidated_index,
    file_keys,
    layouts,
    metadata,
    open_base,
    shard_format,
)
from zarr_shardstore.errors import (
    ShardStoreError,
    SpecError,
    UnfinishedConversionError,
    UnsupportedError,
)
from zarr_shardstore.tools.check.documents import check_documents
from zarr_shardstore.tools.check.findings import (
    COUNTS,
    MAX_FINDINGS,
    CheckReport,
    CheckResult,
    Finding,
    Kind,
    Level,
    finding,
)
from zarr_shardstore.tools.check.objects import ArrayChecker
from zarr_shardstore.tools.check.side_files import check_side_files, is_growing, is_young
from zarr_shardstore.tools.check.tasks import check_objects, checker_of
from zarr_shardstore.tools.convert.job import check_callables, check_reach, own_threads, run_all
from zarr_shardstore.tools.convert.report import OnProgress, Progress
from zarr_shardstore.tools.inspect import find
from zarr_shardstore.tools.inspect.conversions import is_locked, unfinished_conversions
from zarr_shardstore.tools.native.draft_documents import node_of_meta_key

_REQUIRED: dict[str, set[str]] = {
    "v3": {"data_type", "fill_value", "codecs"},
    "v2": {"dtype", "fill_value", "order"},
}
"""Members without which zarr opens no array; those of its geometry are parsed anyway."""

_OBJECTS_PER_TASK = 64
_NBYTES_PER_TASK = 16 * 1024 * 1024


def check_store(
    store: StoreLike,
    paths: Iterable[str] | str | None = None,
    *,
    level: Level = "index",
    executor: Executor | None = None,
    progress: OnProgress | None = None,
    notes: str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckReport:
    """Check what a store holds, and change nothing.

    Parameters
    ----------
    store
        Anything that `ShardingStore` wraps, or a sharding store.
    paths
        Paths of arrays and groups, or patterns as ``"raw/*"``; ``None``: the whole store.
    level
        ``"index"``: list all keys, read the documents and the index of each shard, and no chunk.
        ``"entries"``: also read chunks; check their checksums and the headers of their frames.
        ``"decode"``: also decode each chunk.
    executor
        Runs the tasks: threads (``None``), processes, dask, MPI.
    progress
        Called with a `Progress` after each task.
    notes
        File outside the store for the results of tasks, removed at the end. An interrupted check
        continues with the same arguments; objects that were changed since are not checked again.

    Returns
    -------
    CheckReport

    Raises
    ------
    SpecError
        If an argument is not valid, there is no array, or `paths` names none.
    OSError
        If the store cannot be listed.

    Notes
    -----
    A changed byte is seen only if a checksum covers it. Raw chunks, ``blosc``, ``lz4``, and
    ``zstd`` without its checksum have none; ``gzip``, ``zlib``, ``bz2``, the codec and the
    transformer ``crc32c`` have one. A checksum covers bytes, not their place: whole chunks that
    were exchanged look right, unless an index with a checksum places them.

    Memory: some MiB for each worker, or a chunk if that is larger, and the findings.

    Examples
    --------
    >>> import zarr
    >>> from zarr_shardstore import ShardingStore
    >>> base = {}
    >>> z = zarr.create_array(
    ...     ShardingStore(base, chunks_per_shard=4), shape=(10,), chunks=(1,), dtype="u1"
    ... )
    >>> z[:] = 1
    >>> base["c/1"] = base["c/1"][:-1]  # a cut copy
    >>> [(found.kind, found.shard) for found in check_store(base).findings]
    [('index_checksum', (1,))]
    """
    arguments.check_choice("level", level, Level)
    check_callables(executor, progress)
    begun = time.monotonic()
    base = open_base(store, storage_options)
    if executor is not None:
        check_reach(base, executor)
    names = None if paths is None else arguments.paths_of(paths)
    check = _Check(base, level, base.run(find.find_contents()), names)
    result, selected = check.result, sorted(check.selected)
    with ExitStack() as stack:
        workers = stack.enter_context(own_threads()) if executor is None else executor
        head = {"store": base.describe(), "level": level, "paths": selected}
        kept = None if notes is None else stack.enter_context(_Notes(notes, base, head))
        result.findings += check.documents()
        check.chunks(workers, progress, kept)
        result.findings += check.side_files()
    unique = dict.fromkeys(result.findings)
    found = tuple(sorted(unique, key=lambda found: (found.key, found.chunk or ())))
    if not selected and all(each.severity == "info" for each in found):
        raise SpecError(f"there is no array in {base.describe()}: {find.NO_ARRAY_HINT}")
    return CheckReport(
        base.describe(),
        level,
        found,
        len(selected),
        **{name: getattr(result, name) for name in COUNTS},
        seconds=time.monotonic() - begun,
        base=base,
        paths=None if names is None else tuple(names),
    )


_Call: TypeAlias = tuple[Any, ArrayChecker, list[str]]


class _Check:
    """One check: `documents`, `objects` and `side_files` yield findings; `chunks` runs tasks."""

    def __init__(
        self, base: BaseStoreHandle, level: Level, contents: find.StoreContents, paths: Any
    ) -> None:
        self.base, self.level, self.contents, self.is_whole = base, level, contents, paths is None
        stored = [*contents.arrays.values(), *contents.broken]
        self.selected = find.select_paths({array.node.path for array in stored}, paths)
        self.result = CheckResult()
        self.checkers: dict[metadata.Node, ArrayChecker] = {}
        self.n_objects: Counter[metadata.Node] = Counter()
        self._owners: dict[str, list[metadata.Node]] = {}
        """Arrays by the prefix of their keys, the v3 one first."""
        for node in sorted(contents.arrays, key=lambda node: node.hierarchy, reverse=True):
            self._owners.setdefault(node.chunk_prefix, []).append(node)
        self._levels: dict[metadata.Node, list[metadata.Node]] = {}
        self._converted: tuple[str, ...] = (STAGING,)
        """Prefixes of keys of conversions, which have findings of their own."""
        self._side_files: list[str] = []
        self._outside: dict[metadata.Node, list[str]] = {}
        """Keys that lie outside of the grid that the array had when the check began."""
        self._growing: dict[metadata.Node, bool] = {}
        """Whether each of these arrays has a writer of frames."""

    # -------------------------------------------------------------- documents

    def documents(self) -> Iterator[Finding]:
        """Check documents and unfinished conversions; make the task of each array."""
        contents, selected = self.contents, self.selected
        broken = {metadata.document_key(array.node): array.node.path for array in contents.broken}
        contents.other_keys = [key for key in contents.other_keys if key not in broken]
        for key, path in broken.items():
            if path in selected:
                yield finding("document", key, "it holds no JSON object", array=path)
        for node, found in contents.arrays.items():
            if node.path in selected:
                yield from self._prepare(node, found)
        is_selected = None if self.is_whole else selected
        yield from check_documents(self.base, contents, is_selected, self._levels)
        for each in unfinished_conversions(self.base) if self.is_whole else ():
            if each.prefix is not None:
                self._converted += (each.prefix,)
            more: dict[str, Any] = {"array": each.path} if each.state else {}
            kind: Kind = "in_use" if each.state and each.is_running else "unfinished_conversion"
            if kind != "in_use" and each.state not in ("", "staging"):
                more["severity"] = "error"
            yield finding(kind, each.key, each.text, **more)

    def _prepare(self, node: metadata.Node, found: find.FoundArray) -> Iterator[Finding]:
        key, more = metadata.document_key(node), {"array": node.path}
        try:
            checker = ArrayChecker(self.base, node, found.doc, self.level)
        except ShardStoreError as error:
            kind: Kind = "unchecked" if isinstance(error, UnsupportedError) else "document"
            if isinstance(error, UnfinishedConversionError):
                is_running = is_locked(self.base, f"{STAGING}lock")
                kind = "in_use" if is_running else "unfinished_conversion"
                more |= {} if is_running else {"severity": "error"}
            yield finding(kind, key, str(error), **more)
            return
        self.checkers[node] = checker
        missing = sorted(_REQUIRED.get(node.hierarchy, set()) - found.doc.keys())
        if missing:
            yield finding("document", key, f"Zarr requires {', '.join(missing)}", **more)
        if checker.unchecked and self.level != "index":
            yield finding("unchecked", key, checker.unchecked, **more)

    # ----------------------------------------------------------------- chunks

    def chunks(self, executor: Executor, progress: OnProgress | None, notes: _Notes | None) -> None:
        """Run the tasks of all objects; add their results, and the findings of the listing."""
        n_found: Counter[tuple[str, str | None]] = Counter()

        def calls() -> Iterator[_Call]:
            for item in self.objects():
                if isinstance(item, Finding):
                    n_found[item.kind, item.array] += 1
                    if n_found[item.kind, item.array] > MAX_FINDINGS:
                        self.result.n_omitted += 1
                    else:
                        self.result.findings.append(item)
                elif notes is not None and (noted := notes.take(*item[1:])) is not None:
                    self.result.add(noted)
                else:
                    yield item

        with closing(run_all(executor, calls())) as results:
            for n_tasks, result in enumerate(results, 1):
                self.result.add(result)
                if notes is not None:
                    notes.add(result)
                if progress is not None:
                    counts = (n_tasks, n_tasks, self.result.n_chunks, self.result.n_bytes)
                    progress(Progress("", "checked", *counts))

    def objects(self) -> Iterator[Finding | _Call]:
        """List the store; yield the tasks of objects, and findings on all other keys."""
        waiting: dict[metadata.Node, list[str]] = {}
        for key in chain(self._keys(), self._keys_outside()):
            node = self._node_of(key)
            if isinstance(node, Finding):
                yield node
            if not isinstance(node, metadata.Node):
                continue
            self.n_objects[node] += 1
            if not self.checkers[node].grid.is_sharded and self.level == "index":
                self.result.n_objects += 1
                self.result.n_chunks += 1
                continue
            waiting.setdefault(node, []).append(key)
            if len(waiting[node]) >= self._n_at_once(node):
                yield check_objects, self.checkers[node], waiting.pop(node)
        for node, keys in waiting.items():
            yield check_objects, self.checkers[node], keys

    def _n_at_once(self, node: metadata.Node) -> int:
        checker = self.checkers[node]
        if not checker.grid.is_sharded:
            nbytes = checker.nbytes or 1024 * 1024
        elif self.level != "index":
            return 1
        else:
            nbytes = checker.grid.layout.spec.index_nbytes
        return max(1, min(_OBJECTS_PER_TASK, _NBYTES_PER_TASK // max(1, nbytes)))

    def _keys(self) -> Iterator[str]:
        backend, nodes = self.base.backend, self.contents.arrays
        prefixes: list[str] = []
        for prefix in sorted({n.chunk_prefix for n in nodes if n.path in self.selected}):
            if not prefixes or not prefix.startswith(prefixes[-1]):
                prefixes.append(prefix)
        if self.is_whole:  # a listing does not follow links
            root = backend.path_of("") if isinstance(backend, LocalBackend) else None
            linked = [p for p in prefixes if root is not None and file_keys.link_on_way(root, p)]
            prefixes = ["", *linked]
        for prefix in prefixes:
            yield from self.base.keys(prefix, shows_all=True)

    def _keys_outside(self) -> Iterator[str]:
        """Read the documents of arrays with objects outside of their grid again, and then yield
        these. In this order: chunk, lock and document, as a writer stores and releases them."""
        for node in self._outside:
            self._growing[node] = is_growing(self.base, node.path)
            for found in find.arrays_at(self.base, node.path):
                checker = checker_of(self.base, node, found.doc, self.level)
                if found.node == node and checker is not None:
                    self.checkers[node] = checker
        for keys in self._outside.values():
            yield from keys

    # ------------------------------------------------------------------- keys

    def _node_of(self, key: str) -> metadata.Node | Finding | None:
        """Return the array of an object, or a finding on another key, if any."""
        prefix = key[: key.rfind("/") + 1]
        while prefix and prefix not in self._owners:
            prefix = prefix[: prefix.rfind("/", 0, -1) + 1]
        nodes = self._owners.get(prefix, [])
        for node in nodes:
            checker = self.checkers.get(node)
            if checker is None or (coords := checker.grid.layout.coords_of(key)) is None:
                continue
            if layouts.is_inside(coords, checker.grid.shape):
                return node
            return self._outside_of(node, checker, key)
        return self._other_key(key, nodes)

    def _outside_of(self, node: metadata.Node, checker: ArrayChecker, key: str) -> Finding | None:
        if node not in self._growing:  # until the store is listed
            self._outside.setdefault(node, []).append(key)
            return None
        text = f"it lies outside the grid {list(checker.grid.shape)} of the array"
        if self._growing[node] or is_young(self.base, key):
            text += ", and a writer may append it"
            return finding("in_use", key, text, array=node.path)
        severity = None
        if checker.grid.is_sharded and self._is_empty(key, checker.grid.layout.spec):
            text, severity = f"{text}, and has no chunk", "info"
        return finding("outside_grid", key, text, array=node.path, severity=severity)

    def _is_empty(self, key: str, spec: shard_format.ShardingSpec) -> bool:
        """Whether a shard has no chunk, as it stays where removals have no condition."""
        (nbytes,) = self.base.sizes([key])
        if spec.sides is None or nbytes is None or nbytes > spec.index_nbytes:
            return bool(nbytes == spec.index_nbytes)
        (value,) = self.base.values([key])
        return value is not None and shard_format.is_empty_index(value)

    def _other_key(self, key: str, nodes: list[metadata.Node]) -> Finding | None:
        name = key.rpartition("/")[2]
        if key.startswith(f"{file_keys.QUARANTINE}/"):
            return None
        if file_keys.is_side_file(key) or name.endswith(".partial"):
            self._side_files.append(key)
            return None
        if key.startswith(self._converted):
            return None
        if consolidated_index.is_consolidated_index_key(key):
            checkers = (self.checkers.get(node) for node in nodes)
            is_declared = any(each is not None and each.index_key == key for each in checkers)
            if is_declared or not (self.is_whole or nodes):
                return None
            text = "no document declares this consolidated index: readers do not know of it"
            return finding("consolidated_index", key, text)
        if name in find.DOCUMENTS or node_of_meta_key(key) is not None:
            return None
        if nodes and all(node in self.checkers for node in nodes):
            text = "it is in the directory of the array, and no chunk of it"
            return finding("foreign_object", key, text, array=nodes[0].path)
        if nodes:
            return None  # the array has a finding, or is not selected
        if chunk_keys.draft_candidate(key) or next(chunk_keys.v3_candidates(key), None):
            if any(key.startswith(array.node.chunk_prefix) for array in self.contents.broken):
                return None
            text = "it is named as a chunk, and there is no array: its document may be lost"
            return finding("foreign_object", key, text)
        return finding("unknown_key", key, "it belongs to no array and no group")

    # ------------------------------------------------------------- side files

    def side_files(self) -> Iterator[Finding]:
        """Check side files, levels of an image without a chunk, and consolidated indexes."""
        yield from check_side_files(self.base, self._side_files)
        for nodes in self._levels.values():
            for node in nodes if any(self.n_objects[node] for node in nodes) else ():
                if not self.n_objects[node] and node in self.checkers:
                    text = "this level of the image has no chunk, and another level has some"
                    key = metadata.document_key(node)
                    yield finding("empty_level", key, text, array=node.path)
        for node, checker in self.checkers.items():
            index_key = checker.index_key
            if index_key is None or not self.n_objects[node] or checker.consolidated is not None:
                continue
            is_there = self.base.sizes([index_key]) != [None]
            text = "the document declares a consolidated index, and there is none"
            text += " that can be read" if is_there else ": consolidate again"
            more = {"array": node.path, "repairable": is_there}
            yield finding("consolidated_index", index_key, text, **more)


class _Notes(AbstractContextManager["_Notes"]):
    """A file with a line for each task that is done. A cut line counts as none."""

    def __init__(self, path: str | Path, base: BaseStoreHandle, head: dict[str, Any]) -> None:
        self._path = Path(path)
        real = os.path.realpath(path)
        if isinstance(base.backend, LocalBackend) and real.startswith(base.backend.root):
            raise SpecError(f"the notes {str(path)!r} lie in the store, where nothing is written")
        first = json.dumps(head).encode()
        raw = self._path.read_bytes() if self._path.exists() else b""
        lines = raw.split(b"\n")[:-1]
        try:
            known = [json.loads(line) for line in lines]
            if not first.startswith(raw) and known[:1] != [head]:
                raise ValueError("it is of another check")
            self._left = {line["task"]: _result_of(line) for line in known[1:]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SpecError(f"the notes {str(path)!r} cannot be used: {error}") from error
        self._file = self._path.open("wb")
        self._write(*(lines or [first]))

    def take(self, checker: ArrayChecker, keys: Sequence[str]) -> CheckResult | None:
        """Return the result of a task that an earlier run has done."""
        return self._left.pop(checker.task_name(keys), None)

    def add(self, result: CheckResult) -> None:
        self._write(json.dumps(asdict(result)).encode())

    def _write(self, *lines: bytes) -> None:
        self._file.write(b"".join(line + b"\n" for line in lines))
        self._file.flush()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if error is None:
            self._path.unlink(missing_ok=True)


def _result_of(line: dict[str, Any]) -> CheckResult:
    findings: list[dict[str, Any]] = line.pop("findings")
    for found in findings:
        found.update({k: tuple(v) for k, v in found.items() if isinstance(v, list)})
    return CheckResult([Finding(**found) for found in findings], **line)
