"""One conversion of a store: its arrays one after another, the tasks of each side by side.

Running tasks by an executor: threads, processes, dask, MPI. No scheduler of our own.

Tasks are handed over a few hundred at a time, so that a plan of millions takes no memory, and
each is submitted with what it needs: no worker remembers anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from zarr_shardstore.arrays.policy import NewArrays
from zarr_shardstore.convert.in_place import (
    Manifest,
    directory_of,
    keys_of_values,
    read_manifests,
    replace_values,
)
from zarr_shardstore.convert.other_keys import check_other_keys, copy_other_keys
from zarr_shardstore.convert.plan import ArrayPlan
from zarr_shardstore.convert.regions import ArrayLocation, n_regions, regions_to_visit
from zarr_shardstore.convert.report import ArrayReport, OnProgress, Progress
from zarr_shardstore.convert.task import ArrayTask, TaskResult, run_task
from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.format.consolidated_index import (
    CONSOLIDATED_INDEX_NAME,
    declares_consolidated_index,
    without_consolidated_index,
)
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.metadata.documents import document_key, dump_document, parse_json
from zarr_shardstore.shards.requests import Delete, DeleteMany, DeletePrefix, Get, Set

_MAX_SUBMITTED = 256

_N_THREADS = 4
"""More hardly help on local disks, where Python steps are what is left; on object stores each
thread has up to 64 requests under way."""


@contextmanager
def executor_or_threads(executor: Executor | None) -> Iterator[Executor]:
    """The executor of the user, or threads for as long as the block runs.

    Raises
    ------
    SpecError
        If it is no executor.
    """
    if executor is None:
        with ThreadPoolExecutor(min(_N_THREADS, os.cpu_count() or 1)) as threads:
            yield threads
    elif callable(getattr(executor, "submit", None)):
        yield executor
    else:
        raise SpecError(
            f"executor is a concurrent.futures.Executor, got {type(executor).__name__}; of dask "
            "take client.get_executor()"
        )


def run_tasks(
    executor: Executor,
    task: ArrayTask,
    regions: Iterator[Coords],
    on_result: Callable[[TaskResult], None],
) -> None:
    """Run the tasks of all regions; results come in any order.

    Raises
    ------
    Exception
        The first error of a task, when all that were begun have ended; no other is begun.
    """
    pending: set[Future[TaskResult]] = set()
    try:
        for coords in regions:
            pending.add(executor.submit(run_task, task, coords))
            if len(pending) >= _MAX_SUBMITTED:
                pending = _collect(pending, on_result)
        while pending:
            pending = _collect(pending, on_result)
    except BaseException:
        for future in pending:
            future.cancel()
        wait([future for future in pending if not future.cancelled()])
        raise


def _collect(
    pending: set[Future[TaskResult]], on_result: Callable[[TaskResult], None]
) -> set[Future[TaskResult]]:
    done, rest = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        on_result(future.result())
    return rest


Documents = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be done, and with what."""

    source: BaseStoreHandle
    target: BaseStoreHandle
    in_place: bool
    plans: Sequence[ArrayPlan]
    other_keys: Sequence[str]
    new_arrays: NewArrays
    keeps_declaration: bool
    order: EntryOrder
    executor: Executor
    progress: OnProgress | None

    def planned(self) -> tuple[tuple[ArrayReport, ...], int]:
        """What would be done, and how many other keys would be copied."""
        if self.in_place:
            return tuple(map(_report_of, self.plans)), 0
        return tuple(_report_of(self._copied(plan)) for plan in self.plans), len(self.other_keys)

    def run(self) -> tuple[tuple[ArrayReport, ...], int]:
        """Convert; return what was done, and how many other keys were copied."""
        if self.in_place:
            return tuple(map(self._convert_in_place, self.plans)), 0
        documents: dict[str, Mapping[str, Any]] = {}
        for plan in self.plans:
            documents |= self._documents(plan)
        check_other_keys(self.source, self.target, self.other_keys, documents)
        plans = [self._copied(plan) for plan in self.plans]
        for plan in plans:
            self._check_empty(plan)
        for plan in plans:
            self._check_same(plan)
        reports = tuple(map(self._convert_to_destination, plans))
        copy_other_keys(self.source, self.target, self.other_keys, documents)
        return reports, len(self.other_keys)

    # ------------------------------------------------------------- in place

    def _convert_in_place(self, plan: ArrayPlan) -> ArrayReport:
        if plan.action == "skipped":
            if plan.is_chosen:
                self._forget(plan)
            return _report_of(plan)
        manifest = self._manifest(plan, is_staged=True)
        may_be_there = self._begin(manifest)
        task = plan.task(
            self.source,
            self.target,
            manifest.values_prefix,
            self.order,
            may_be_there=may_be_there,
        )
        report = self._run_tasks(plan, task)
        self._check_unchanged(plan)
        replace_values(self.target, manifest)
        if any(map(declares_consolidated_index, plan.state.documents.values())):
            self.target.perform([Delete(plan.state.node.chunk_prefix + CONSOLIDATED_INDEX_NAME)])
        return report

    def _check_unchanged(self, plan: ArrayPlan) -> None:
        """Refuse to go on if documents are not those that were planned with.

        Raises
        ------
        ShardConflictError
            What was staged is kept for the next run.
        """
        now = self._documents_now(plan)
        if now != list(plan.state.documents.values()):
            raise ShardConflictError(
                f"the metadata of the array {plan.state.path!r} was changed while it was "
                "converted; the array is as it was: run the same again"
            )

    def _documents_now(self, plan: ArrayPlan) -> list[Any]:
        keys = [document_key(node) for node in plan.state.documents]
        found = self.source.perform([Get(key) for key in keys])
        return [None if f.value is None else parse_json(f.value) for f in found]

    # ------------------------------------------------------- to a destination

    def _copied(self, plan: ArrayPlan) -> ArrayPlan:
        """What is left as it is must be copied."""
        return replace(plan, action="copied") if plan.action == "skipped" else plan

    def _check_empty(self, plan: ArrayPlan) -> None:
        """Refuse to write where there are objects that no conversion of ours has left.

        Raises
        ------
        SpecError
            Nothing was written.
        """
        if plan.state.geometry is None or self._has(self._documents(plan)):
            return
        manifest = self._manifest(plan, is_staged=False)
        if self._began_before(manifest) is None and self._any_values(manifest):
            raise SpecError(
                f"the destination has objects below {manifest.prefix!r} already, and no array; "
                "nothing was written: take an empty destination, or remove what is there"
            )

    def _check_same(self, plan: ArrayPlan) -> None:
        """Compare an array that is there already with the source, chunk by chunk.

        Raises
        ------
        SpecError
            If they differ. Nothing was written: who has changed which of them is not known.
        """
        if plan.state.geometry is None or not self._has(self._documents(plan)):
            return
        prefix = plan.state.node.chunk_prefix
        task = plan.task(self.source, self.target, prefix, self.order, may_be_there=False)
        self._run_tasks(replace(plan, action="skipped"), replace(task, only_compares=True))

    def _any_values(self, manifest: Manifest) -> bool:
        found = keys_of_values(self.target, manifest.prefix, manifest.encoding, manifest.ndim)
        return any(True for keys in found if keys)

    def _convert_to_destination(self, plan: ArrayPlan) -> ArrayReport:
        documents = self._documents(plan)
        if plan.state.geometry is None:
            # Its chunks are among the other keys: which keys are chunks is not known.
            self.target.perform([Set(key, dump_document(doc)) for key, doc in documents.items()])
            return _report_of(plan)
        if self._has(documents):
            self._forget(plan)
            reason = "the destination has it already"
            return _report_of(replace(plan, action="skipped", reason=reason))
        manifest = self._manifest(plan, is_staged=False)
        may_be_there = self._begin(manifest)
        task = plan.task(
            self.source,
            self.target,
            plan.state.node.chunk_prefix,
            self.order,
            may_be_there=may_be_there,
        )
        report = self._run_tasks(plan, task)
        self._check_unchanged(plan)
        if may_be_there:
            self.target.backend.tidy(manifest.prefix)
        # Last: who sees the array sees all of it.
        self.target.perform([Set(key, dump_document(doc)) for key, doc in documents.items()])
        if self.target.supports_deletes:
            manifest.remove(self.target)
        return report

    def _has(self, documents: Documents) -> bool:
        found = self.target.perform([Get(key) for key in documents])
        docs = [None if f.value is None else parse_json(f.value) for f in found]
        return [doc and without_consolidated_index(doc) for doc in docs] == list(documents.values())

    # ---------------------------------------------------------------- both

    def _documents(self, plan: ArrayPlan) -> dict[str, Mapping[str, Any]]:
        if plan.action in ("copied", "skipped"):
            # Consolidated indexes are of the shards of the source: they are not copied.
            return {
                document_key(node): doc if self.in_place else without_consolidated_index(doc)
                for node, doc in plan.state.documents.items()
            }
        return dict(
            plan.state.documents_for(
                plan.form, self.new_arrays, keeps_declaration=self.keeps_declaration
            )
        )

    def _manifest(self, plan: ArrayPlan, *, is_staged: bool) -> Manifest:
        state = plan.state
        assert state.geometry is not None
        encoding = state.geometry.encoding
        return Manifest(
            state.node.hierarchy,
            state.path,
            "staging",
            state.node.chunk_prefix,
            encoding.style,
            encoding.separator,
            len(state.geometry.shape),
            self._documents(plan),
            is_staged,
        )

    def _began_before(self, manifest: Manifest) -> Manifest | None:
        """The manifest that an earlier run has left for this array."""
        left = read_manifests(self.target)
        return next((m for m in left if m.directory == manifest.directory), None)

    def _forget(self, plan: ArrayPlan) -> None:
        """Remove what an earlier run has left of an array for which there is nothing to do."""
        if not self.target.supports_deletes:
            return
        directory = directory_of(plan.state.node)
        for manifest in read_manifests(self.target):
            if manifest.directory == directory:
                manifest.remove(self.target)

    def _begin(self, manifest: Manifest) -> bool:
        """Store the manifest; whether an earlier run may have written values for it.

        Where nothing can be removed there is none: no run goes on where another one stopped.
        """
        if not self.target.supports_deletes:
            return False
        earlier = self._began_before(manifest)
        if earlier is not None and earlier.wants_the_same(manifest):
            return True
        if earlier is not None and not earlier.is_staged:
            for keys in keys_of_values(self.target, earlier.prefix, earlier.encoding, earlier.ndim):
                self.target.perform([DeleteMany(keys)])
            self.target.backend.tidy(earlier.prefix)
        self.target.perform([DeletePrefix(manifest.directory)])
        manifest.write(self.target)
        return False

    def _run_tasks(self, plan: ArrayPlan, task: ArrayTask) -> ArrayReport:
        begun = time.monotonic()
        is_elsewhere = not isinstance(self.executor, ThreadPoolExecutor)
        if is_elsewhere:
            task = replace(task, document_key=document_key(plan.state.node))
        # Where an earlier run may have written, what it wrote is looked at, too.
        is_compared = task.may_be_there or task.only_compares
        places = [task.source, task.target] if is_compared else [task.source]
        regions = regions_to_visit(places, task.region_shape)
        n_tasks = len(regions)
        results = TaskResult(0, 0, 0)
        n_done = n_resumed = 0

        def add(result: TaskResult) -> None:
            nonlocal results, n_done, n_resumed
            results = TaskResult(
                results.n_chunks + result.n_chunks,
                results.n_objects + result.n_objects,
                results.n_bytes + result.n_bytes,
            )
            n_done += 1
            n_resumed += result.was_there
            if self.progress is not None:
                counts = (n_tasks, n_done, results.n_chunks, results.n_bytes)
                self.progress(Progress(plan.state.path, plan.action, *counts))

        run_tasks(self.executor, task, iter(regions), add)
        if is_elsewhere and not task.only_compares:
            _check_objects(task.target, results.n_objects)
        return replace(
            _report_of(plan),
            n_chunks=results.n_chunks,
            n_objects=results.n_objects,
            n_bytes=results.n_bytes,
            n_tasks=n_tasks,
            n_resumed=n_resumed,
            seconds=time.monotonic() - begun,
        )


def _check_objects(target: ArrayLocation, n_objects: int) -> None:
    """Refuse to go on if workers have written objects that are not to be seen here.

    Raises
    ------
    SpecError
        Nothing of the source was removed.
    """
    found = keys_of_values(target.base, target.prefix, target.encoding, len(target.grid_shape))
    n_found = sum(map(len, found))
    if n_found != n_objects:
        raise SpecError(
            f"the workers of the executor have written {n_objects} objects, and {n_found} are in "
            f"{target.base.describe()}: take workers that reach the store; nothing was removed"
        )


def _report_of(plan: ArrayPlan) -> ArrayReport:
    n_tasks = 0
    if plan.action != "skipped" and plan.state.geometry is not None:
        n_tasks = n_regions(plan.source_grid_shape, plan.region_shape)
    node = plan.state.node
    cps = plan.form.chunks_per_shard
    return ArrayReport(node.path, node.hierarchy, plan.action, cps, plan.reason, n_tasks=n_tasks)
