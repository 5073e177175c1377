"""Check of a store: one listing, a task for each few objects, and what the documents say."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

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
)
from zarr_shardstore.errors import (
    ShardStoreError,
    SpecError,
    UnfinishedConversionError,
    UnsupportedError,
)
from zarr_shardstore.tools.check.documents import check_documents
from zarr_shardstore.tools.check.findings import LEVELS, CheckReport, Level, finding
from zarr_shardstore.tools.check.notes import Notes
from zarr_shardstore.tools.check.remains import check_side_files, find_conversions
from zarr_shardstore.tools.check.shards import (
    ArrayCheck,
    CheckResult,
    check_objects,
    checked_array,
    checker_of,
)
from zarr_shardstore.tools.convert.job import run_all
from zarr_shardstore.tools.convert.report import OnProgress, Progress
from zarr_shardstore.tools.inspect import find
from zarr_shardstore.tools.inspect.conversions import is_locked
from zarr_shardstore.tools.inspect.occupancy import ObjectGrid
from zarr_shardstore.tools.native.draft_documents import node_of_meta_key

_OBJECTS_PER_TASK = 64
_NBYTES_PER_TASK = 16 * 1024 * 1024
_MAX_FINDINGS = 1000
"""Of one kind in one array that are found in the listing; the others are counted."""
_MAX_DIRECTORIES = 1 << 16
_N_THREADS = 4


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
        ``"index"``: all keys are listed, the documents and the index of each shard are read, and no
        chunk. ``"entries"``: chunks are read, too; their checksums and the headers of their frames
        are checked. ``"decode"``: each chunk is decoded.
    executor
        Runs the tasks: threads (``None``), processes, dask, MPI.
    progress
        Called with a `Progress` after each task.
    notes
        File outside the store for the results of tasks. If a check is interrupted, one with the
        same arguments continues; objects that were changed since are not checked again. The file
        is removed at the end.

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
    A byte of a chunk that no checksum covers may have changed unseen: raw chunks, ``blosc``,
    ``lz4`` and ``zstd`` without its checksum have none. ``gzip``, ``zlib``, ``bz2``, the codec and
    the transformer ``crc32c`` have one. A checksum covers bytes, not their place: whole chunks that
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
    if level not in LEVELS:
        raise SpecError(f"level is one of {', '.join(map(repr, LEVELS))}, got {level!r}")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise SpecError(f"executor is a concurrent.futures.Executor, got {executor!r}")
    begun = time.monotonic()
    base = open_base(store, storage_options)
    if executor is not None and not isinstance(executor, ThreadPoolExecutor) and base.is_in_memory:
        raise SpecError(
            f"the store {base.describe()} is in the memory of this process, where the workers of "
            "the executor do not reach it: take threads (executor=None)"
        )
    with ThreadPoolExecutor(min(_N_THREADS, os.cpu_count() or 1)) as threads:
        run = _Run(base, None if paths is None else arguments.paths_of(paths), level, progress)
        if notes is not None:
            head = {"store": base.describe(), "level": level, "paths": run.selected}
            run.notes = Notes(notes, base, head)
        is_done = False
        try:
            run.run(threads if executor is None else executor)
            is_done = True
        finally:
            checker_of.cache_clear()
            if run.notes is not None:
                run.notes.close(is_done=is_done)
    if not run.selected and all(found.severity == "info" for found in run.result.findings):
        raise SpecError(f"there is no array in {base.describe()}: {find.NO_ARRAY_HINT}")
    findings = sorted(run.result.findings, key=lambda found: (found.key, found.chunk or ()))
    names = ("n_objects", "n_chunks", "n_bytes", "n_omitted")
    return CheckReport(
        base.describe(),
        level,
        tuple(findings),
        len(run.selected),
        **{name: getattr(run.result, name) for name in names},
        seconds=time.monotonic() - begun,
        base=base,
        paths=None if paths is None else tuple(arguments.paths_of(paths)),
    )


class _Run:
    """One check: the arrays of the store, and what was found so far."""

    def __init__(
        self,
        base: BaseStoreHandle,
        paths: list[str] | None,
        level: Level,
        progress: OnProgress | None,
    ) -> None:
        self.base, self.level, self.progress = base, level, progress
        self.notes: Notes | None = None
        self.result = CheckResult()
        self._n_listed: Counter[tuple[str, str]] = Counter()
        self.is_whole = paths is None
        contents = base.run(find.find_contents())
        broken = {array.node: array for array in contents.broken}
        nodes = {**contents.arrays, **broken}
        selected = find.select_paths({node.path for node in nodes}, paths)
        self.contents = contents
        self.selected = sorted(selected)
        for node in broken:
            if node.path in selected:
                self._add(
                    "document", metadata.document_key(node), "it holds no JSON object", node.path
                )
        known = set(map(metadata.document_key, broken))
        contents.other_keys = [key for key in contents.other_keys if key not in known]
        self.tasks: dict[metadata.Node, ArrayCheck] = {}
        self.grids: dict[metadata.Node, ObjectGrid] = {}
        self.owners: dict[str, list[metadata.Node]] = {}
        """Arrays by the prefix of their keys."""
        self.n_objects: Counter[metadata.Node] = Counter()
        self.side_files: list[str] = []
        self._directories: dict[str, list[metadata.Node]] = {}
        self._number = uuid.uuid4().hex
        self._converted: list[str] = []
        self._broken = [node.chunk_prefix for node in broken]
        for node, found in contents.arrays.items():
            self.owners.setdefault(node.chunk_prefix, []).append(node)
            if node.path in selected:
                self._prepare(node, found)

    def _add(
        self, kind: Any, key: str, message: str, array: str | None = None, **more: Any
    ) -> None:
        """Add a finding of the listing, unless there are many of its kind in an array."""
        self._n_listed[kind, array or ""] += 1
        if self._n_listed[kind, array or ""] > _MAX_FINDINGS:
            self.result.n_omitted += 1
        else:
            self.result.findings.append(finding(kind, key, message, array=array, **more))

    def _prepare(self, node: metadata.Node, found: find.FoundArray) -> None:
        key = metadata.document_key(node)
        try:
            array = checked_array(found)
        except UnfinishedConversionError as error:
            is_running = is_locked(self.base, f"{STAGING}lock")
            kind, severity = (
                ("in_use", "info") if is_running else ("unfinished_conversion", "error")
            )
            self._add(kind, key, str(error), node.path, severity=severity)
            return
        except UnsupportedError as error:
            self._add("unchecked", key, str(error), node.path)
            return
        except ShardStoreError as error:
            self._add("document", key, str(error), node.path)
            return
        if array.document.geometry is None or array.grid_shape is None:
            text = f"{metadata.unknown_geometry(found.doc)}: no chunk is checked"
            self._add("unchecked", key, text, node.path)
            return
        index_key = None
        if consolidated_index.declares_consolidated_index(found.doc):
            index_key = node.chunk_prefix + consolidated_index.CONSOLIDATED_INDEX_NAME
        task = ArrayCheck(
            self.base, node, json.dumps(found.doc), self.level, self._number, index_key
        )
        self.tasks[node], self.grids[node] = task, task.checker.grid
        if task.checker.unchecked and self.level != "index":
            self._add("unchecked", key, task.checker.unchecked, node.path)

    # -------------------------------------------------------------------- run

    def run(self, executor: Executor) -> None:
        is_selected = None if self.is_whole else self.selected
        found, levels = check_documents(self.base, self.contents, is_selected)
        self.result.findings += found
        if self.is_whole:
            found, self._converted = find_conversions(self.base)
            self.result.findings += found
        n_tasks = 0
        with closing(run_all(executor, self._calls())) as results:
            for result in results:
                n_tasks += 1
                self.result.add(result)
                if self.notes is not None:
                    self.notes.add(result)
                if self.progress is not None:
                    counts = (n_tasks, n_tasks, self.result.n_chunks, self.result.n_bytes)
                    self.progress(Progress("", "checked", *counts))
        self.result.findings += check_side_files(self.base, self.side_files)
        for nodes in levels.values():
            self._check_levels(nodes)
        for node, task in self.tasks.items():
            if task.index_key is not None and self.n_objects[node]:
                self._check_consolidated_index(task, task.index_key)

    def _calls(self) -> Iterator[tuple[Any, ArrayCheck, list[str]]]:
        """List the store; yield the tasks of the objects, and note what is none."""
        waiting: dict[metadata.Node, list[str]] = {}
        for key in self._keys():
            node = self._node_of(key)
            if node is None:
                continue
            self.n_objects[node] += 1
            task = self.tasks[node]
            if self.grids[node].layout is None and self.level == "index":
                self.result.n_objects += 1
                self.result.n_chunks += 1
                continue
            waiting.setdefault(node, []).append(key)
            if len(waiting[node]) >= self._n_at_once(task):
                yield from self._unless_noted(task, waiting.pop(node))
        for node, keys in waiting.items():
            yield from self._unless_noted(self.tasks[node], keys)

    def _unless_noted(
        self, task: ArrayCheck, keys: list[str]
    ) -> Iterator[tuple[Any, ArrayCheck, list[str]]]:
        noted = None if self.notes is None else self.notes.take(task, keys)
        if noted is None:
            yield check_objects, task, keys
        else:
            self.result.add(noted)

    def _n_at_once(self, task: ArrayCheck) -> int:
        layout = task.checker.grid.layout
        nbytes = task.checker.nbytes or 1024 * 1024
        if layout is not None:
            if self.level != "index":
                return 1
            nbytes = layout.spec.index_nbytes
        return max(1, min(_OBJECTS_PER_TASK, _NBYTES_PER_TASK // max(1, nbytes)))

    def _keys(self) -> Iterator[str]:
        selected, backend = set(self.selected), self.base.backend
        prefixes: list[str] = []
        for prefix in sorted({n.chunk_prefix for n in self.contents.arrays if n.path in selected}):
            if not prefixes or not prefix.startswith(prefixes[-1]):
                prefixes.append(prefix)
        if self.is_whole:  # a listing does not follow links
            root = backend.path_of("") if isinstance(backend, LocalBackend) else None
            linked = [
                p for p in prefixes if p and root is not None and file_keys.link_on_way(root, p)
            ]
            prefixes = ["", *linked]
        for prefix in prefixes:
            yield from self.base.keys(prefix, shows_all=True)

    # ------------------------------------------------------------------- keys

    def _node_of(self, key: str) -> metadata.Node | None:
        """Return the array that a key is an object of; note a key that is none."""
        directory, slash, name = key.rpartition("/")
        nodes = self._directories.get(directory)
        if nodes is None:
            if len(self._directories) >= _MAX_DIRECTORIES:
                self._directories.clear()
            nodes = self._directories[directory] = self._owners_of(directory + slash)
        for node in nodes:
            grid = self.grids.get(node)
            coords = None if grid is None else grid.array.coords_of(key)
            if grid is None or coords is None:
                continue
            if layouts.is_inside(coords, grid.shape):
                return node
            text = f"it lies outside the grid {list(grid.shape)} of the array"
            self._add("outside_grid", key, text, node.path)
            return None
        self._note(key, name, nodes)
        return None

    def _owners_of(self, directory: str) -> list[metadata.Node]:
        """Return the arrays in whose directory a directory is, the v3 one first."""
        parts = directory.split("/")[:-1]
        for n in reversed(range(len(parts) + 1)):
            prefix = "".join(f"{part}/" for part in parts[:n])
            if prefix in self.owners:
                return sorted(self.owners[prefix], key=lambda node: node.hierarchy, reverse=True)
        return []

    def _note(self, key: str, name: str, nodes: list[metadata.Node]) -> None:
        if key.startswith(f"{file_keys.QUARANTINE}/"):
            pass
        elif file_keys.is_side_file(key) or name.endswith(".partial"):
            self.side_files.append(key)
        elif key.startswith(STAGING) or any(map(key.startswith, self._converted)):
            pass  # of a conversion, which has its own finding
        elif consolidated_index.is_consolidated_index_key(key):
            if not any(self.tasks[n].index_key == key for n in nodes if n in self.tasks):
                text = "no document declares this consolidated index: readers do not know of it"
                if self.is_whole or nodes:
                    self._add("consolidated_index", key, text)
        elif name in find.DOCUMENTS or node_of_meta_key(key) is not None:
            pass
        elif nodes and all(node in self.tasks for node in nodes):
            text = "it is in the directory of the array, and no chunk of it"
            self._add("foreign_object", key, text, nodes[0].path)
        elif nodes:
            pass  # of an array that has a finding, or is not selected
        elif chunk_keys.draft_candidate(key) or next(chunk_keys.v3_candidates(key), None):
            if not any(map(key.startswith, self._broken)):
                text = "it is named as a chunk, and there is no array: its document may be lost"
                self._add("foreign_object", key, text)
        else:
            self._add("unknown_key", key, "it belongs to no array and no group")

    def _check_consolidated_index(self, task: ArrayCheck, key: str) -> None:
        if task.checker.copies(self.base, key) is None:
            is_there = self.base.sizes([key]) != [None]
            text = "the document declares a consolidated index, and there is none"
            text += " that can be read" if is_there else ": consolidate again"
            self._add("consolidated_index", key, text, task.node.path, repairable=is_there)

    def _check_levels(self, nodes: list[metadata.Node]) -> None:
        """Find levels of an image without a chunk, where another level has some."""
        if any(self.n_objects[node] for node in nodes):
            for node in nodes:
                if not self.n_objects[node] and node in self.tasks:
                    text = "this level of the image has no chunk, and another level has some"
                    self._add("empty_level", metadata.document_key(node), text, node.path)
