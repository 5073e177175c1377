"""Run of a conversion: arrays one after another, the tasks of each array concurrently.

Any `concurrent.futures.Executor` runs the tasks: threads, processes, dask, MPI. Each task has all
that it needs, so workers keep no state. Memory is bounded: a few hundred tasks are submitted.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent import futures
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from operator import add
from typing import Any, TypeVar

from zarr_shardstore.access import (
    BaseStoreHandle,
    StoreLike,
    arguments,
    backends,
    consolidated_index,
    invalidate_documents,
    metadata,
    open_base,
    shard_format,
    store_options,
    walks,
)
from zarr_shardstore.errors import ShardConflictError, ShardStoreError, SpecError
from zarr_shardstore.tools.convert import in_place
from zarr_shardstore.tools.convert.estimate import estimate_conversion
from zarr_shardstore.tools.convert.other_keys import OtherKeys, Part
from zarr_shardstore.tools.convert.plan import NOT_CHOSEN, ArrayPlan, plan_store
from zarr_shardstore.tools.convert.regions import ArrayLocation, regions_to_visit
from zarr_shardstore.tools.convert.report import ArrayReport, ConversionReport, OnProgress, Progress
from zarr_shardstore.tools.convert.task import ArrayTask, TaskResult, run_task
from zarr_shardstore.tools.inspect.find import StoreContents, check_copies_above, quoted
from zarr_shardstore.tools.inspect.readers import read_by

T = TypeVar("T")

_MAX_SUBMITTED = 256

_N_THREADS = 4
"""Most threads. More hardly help on local disks; on object stores each has up to 64 requests."""


def convert_store(
    source: StoreLike | BaseStoreHandle,
    destination: StoreLike | None,
    sharding: store_options.ShardingOptions,
    *,
    to_plain: bool = False,
    paths: Iterable[str] | str | None = None,
    executor: futures.Executor | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
    copy_rest: bool = False,
    estimate: bool = False,
    is_locked: bool = False,
) -> ConversionReport:
    """Convert a store, in place if there is no destination; `shard_store` has the errors. The
    caller has the lock of its conversions if it `is_locked`."""
    begun = time.monotonic()
    check_callables(executor, progress)
    patterns = None if paths is None else arguments.paths_of(paths)
    is_in_place = destination is None
    check_estimate(estimate, dry_run)
    if is_in_place and (copy_rest or destination_options):
        raise SpecError(
            "copy_rest=True (--all) and destination_options go with a destination: without one "
            "pass source_options, and the rest stays"
        )
    base = open_base(source, source_options, needs_chunks=True)
    target = base if destination is None else open_base(destination, destination_options)
    copies_all = copy_rest or patterns is None
    with own_threads() as threads:
        workers = threads if executor is None else executor
        _check_stores(base, target, workers)
        if not dry_run:
            target.check_writable()

        def plan() -> Conversion:
            given = {"to_plain": to_plain, "in_place": is_in_place, "copy_rest": copies_all}
            plans, contents = plan_store(base, sharding, patterns, **given)
            part = None
            if not copies_all and not is_in_place:  # all other keys stay out of the destination
                part = Part.of(patterns or (), [p.node for p in plans if p.is_chosen])
                contents.other_keys = [key for key in contents.other_keys if part.has(key)]
                contents.unlisted = [node for node in contents.unlisted if part.has(node.path)]
            means = sharding.order, workers, progress, part
            return Conversion(base, target, plans, contents, *means)

        notes: tuple[str, ...] = ()
        estimated = None
        if dry_run:
            conversion = plan()
            if is_in_place:
                conversion.check_place()
            else:
                conversion = conversion.without_run()
            arrays = tuple(map(_report_of, conversion.plans))
            if estimate:
                found = base, conversion.plans, arrays, is_in_place
                arrays, estimated = estimate_conversion(*found)
        else:
            base.seal()  # a shard that is sealed later would count as changed by another writer
            if not is_in_place:  # before the lock, so that a refusal leaves no trace
                conversion = plan()
            with nullcontext() if is_locked else in_place.only_conversion(target):
                manifests = in_place.read_manifests(target)
                try:
                    if target.supports_deletes:
                        notes = in_place.resume_exchanges(target, manifests)
                    if is_in_place:
                        conversion = plan()
                    arrays = conversion.run()
                finally:
                    invalidate_documents()
    contents = StoreContents() if is_in_place else conversion.contents
    notes += _notes(contents, arrays, conversion.part)
    n_copied, seconds = len(contents.other_keys), time.monotonic() - begun
    return ConversionReport(arrays, n_copied, notes, seconds, dry_run, estimated)


def check_callables(executor: Any, progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise SpecError(f"progress is a function of a Progress, got {progress!r}")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise SpecError(
            f"executor is a concurrent.futures.Executor, got {type(executor).__name__}; "
            "of dask take client.get_executor()"
        )


def check_estimate(estimate: bool, dry_run: bool) -> None:
    if estimate and not dry_run:
        raise SpecError("estimate=True goes with dry_run=True: a report of a conversion has counts")


def _notes(
    copied: StoreContents, arrays: Sequence[ArrayReport], part: Part | None
) -> tuple[str, ...]:
    notes = tuple(
        f"the directory of the array {node.path!r} was not listed, because it has too many "
        "chunks, or the store lists none: if it holds keys that are neither chunks nor "
        "documents, they were not copied"
        for node in copied.unlisted
    )
    if part is not None and (left := [a.path for a in arrays if a.reason == NOT_CHOSEN]):
        notes += (
            f"these arrays stay out of the destination: {quoted(left)}; groups above the others "
            "come without consolidated metadata; copy_rest=True (--all) copies all",
        )
    if lost := [array.path for array in arrays if array.loses_readers]:
        notes += (
            f"no other program reads the Zarr v2 arrays {quoted(lost)} in this form: to_native "
            "(zarr-shardstore to-native) makes them Zarr v3 arrays, which every v3 reader reads",
        )
    return notes


def own_threads() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(min(_N_THREADS, os.cpu_count() or 1))


def finish_exchanges(base: BaseStoreHandle) -> tuple[str, ...]:
    """Finish, under the lock, what a killed conversion in place has begun; return notes on it.

    Staged values of v2 arrays are removed, because the arrays become v3.
    """
    try:
        manifests = in_place.read_manifests(base)
        notes = in_place.resume_exchanges(base, manifests)
        for manifest in manifests:
            if manifest.hierarchy == "v2":
                in_place.forget(base, metadata.Node(manifest.hierarchy, manifest.path))
        return notes
    finally:
        invalidate_documents()


def check_reach(base: BaseStoreHandle, executor: futures.Executor) -> None:
    if base.is_in_memory and not isinstance(executor, futures.ThreadPoolExecutor):
        raise SpecError(
            f"the store {base.describe()} is in the memory of this process, where the workers of "
            "the executor do not reach it: take threads (executor=None)"
        )


def _check_stores(
    base: BaseStoreHandle, target: BaseStoreHandle, executor: futures.Executor
) -> None:
    """Refuse stores that cannot be converted, or not by these workers."""
    if not isinstance(executor, futures.ThreadPoolExecutor) and not target.supports_deletes:
        raise SpecError(
            f"only one process writes to {target.describe()}: take threads (executor=None)"
        )
    check_reach(base, executor)
    check_reach(target, executor)
    if target is base:
        target.check_replaceable()
    elif (overlap := target.overlap(base)) == "same":
        raise SpecError("source and destination are the same: leave the destination away")
    elif overlap == "inside":
        raise SpecError(
            f"one of {base.describe()} and {target.describe()} lies inside the other, and would "
            "be converted with it; nothing was written: take a destination elsewhere"
        )
    if not base.names(""):
        raise SpecError(f"there is nothing in {base.describe()}")
    target.check_takes_any_key()


@dataclass(frozen=True, slots=True)
class Conversion:
    """A plan for each array of a store, and the means to run it."""

    source: BaseStoreHandle
    target: BaseStoreHandle
    plans: Sequence[ArrayPlan]
    contents: StoreContents
    order: shard_format.EntryOrder
    executor: futures.Executor
    progress: OnProgress | None
    part: Part | None = None
    """What goes to the destination; ``None``: all."""

    def run(self) -> tuple[ArrayReport, ...]:
        if self.target is self.source:
            if self.check_place():
                self.target.try_to_remove()
                self.target.check_replaceable()
            return tuple(map(self._convert_in_place, self.plans))
        there = self.check_destination()
        self.target.try_to_remove()
        # A reader that sees an array of v2 sees its attributes.
        others = self._other_keys()
        attributes = {f"{plan.node.path}/.zattrs".lstrip("/") for plan in self.plans}
        others.copy([key for key in others.keys if key in attributes], there)
        reports = tuple([self._convert_to_destination(plan, there) for plan in self.plans])
        others.copy([key for key in others.keys if key not in attributes], there)
        return reports

    def check_place(self) -> bool:
        """Return whether a conversion in place changes anything; refuse a place where it cannot."""
        is_change = any(plan.action != "skipped" for plan in self.plans)
        if is_change:
            check_copies_above(self.target)
        return is_change

    def check_destination(self, *, compares_values: bool = True) -> set[str]:
        """Refuse a destination with other things than the source would give it. Return the keys of
        no values that it has already; values are equal if these are compared."""
        there = self._other_keys().check()
        for plan in self.plans:
            is_there = plan.new_documents.keys() <= there
            is_copied = plan.geometry is not None and plan.new_documents
            if is_copied and (compares_values or not is_there):
                self._check_array(plan, is_there=is_there)
        return there

    def without_run(self) -> Conversion:
        """Return the plans as a run to this destination would report them."""
        there = self.check_destination(compares_values=False)
        return replace(self, plans=[_skipped_if_there(plan, there) for plan in self.plans])

    def _other_keys(self) -> OtherKeys:
        documents: dict[str, Mapping[str, Any]] = {}
        for plan in self.plans:
            documents |= plan.new_documents
        keys = self.contents.other_keys
        return OtherKeys(self.source, self.target, keys, documents, self.part)

    def _convert_in_place(self, plan: ArrayPlan) -> ArrayReport:
        if plan.action == "skipped":
            if plan.is_chosen:
                in_place.forget(self.target, plan.node)
            report = _report_of(plan)
            if plan.is_hidden and plan.is_chosen:  # the store's own are finished by now
                why = "its conversion was begun for a part of the store: run it for that part again"
                return replace(report, reason=why, is_left=True)
            return report
        manifest = self._manifest(plan)
        report = self._convert_values(plan, manifest)
        n_objects = Counter[str]()

        def step(action: Any, n: int) -> None:
            n_objects[action] += n
            if self.progress is not None:
                counts = report.n_tasks, report.n_tasks, report.n_chunks, report.n_bytes
                self.progress(Progress(plan.node.path, action, *counts, n_objects[action]))

        old = plan.documents.values()
        has_index = any(map(consolidated_index.declares_consolidated_index, old))
        note = in_place.replace_values(self.target, manifest, step, has_index=has_index)
        return replace(report, reason=report.reason + note)

    def _convert_to_destination(self, plan: ArrayPlan, there: Set[str]) -> ArrayReport:
        if not plan.new_documents:  # it stays out
            return _report_of(plan)
        if plan.geometry is None:
            # Its chunks are not known, and are among the other keys.
            self.target.write_documents(plan.new_documents)
            return _report_of(plan)
        if (skipped := _skipped_if_there(plan, there)) is not plan:
            in_place.forget(self.target, plan.node)
            return _report_of(skipped)
        manifest = self._manifest(plan)
        try:
            report = self._convert_values(plan, manifest)
        except backends.UnreadableSourceError as error:
            if self.target.supports_deletes:
                manifest.discard(self.target)
                manifest.remove(self.target)
            report = _report_of(replace(plan, action="skipped", reason=str(error)))
            return replace(report, is_left=True)
        # Last: a reader that sees the array sees all of it.
        self.target.write_documents(plan.new_documents)
        if self.target.supports_deletes:
            manifest.remove(self.target)
        return report

    def _convert_values(self, plan: ArrayPlan, manifest: in_place.Manifest) -> ArrayReport:
        begun = in_place.begin(self.target, manifest)
        may_be_there = begun == "continued"
        task = self._task(plan, manifest.values_prefix, may_be_there=may_be_there)
        if self._is_elsewhere:
            check = partial(in_place.check_run, self.target, manifest.node, manifest.runs[-1])
            task = replace(task, check_run=check)
        report = self._run_tasks(plan, task)
        if begun == "discarded another":
            why = "; what a run with other options had written was discarded"
            report = replace(report, reason=report.reason + why)
        documents = plan.documents
        if self.source.documents(map(metadata.document_key, documents)) != list(documents.values()):
            # What was written is kept for the next run.
            raise ShardConflictError(
                f"the metadata of the array {plan.node.path!r} was changed while it was "
                "converted; the array is as it was: run the same again"
            )
        # A killed worker leaves temporary files, and another worker has run its task.
        if (may_be_there or self._is_elsewhere) and not manifest.is_staged:
            self.target.backend.tidy(manifest.prefix)
        return report

    def _check_array(self, plan: ArrayPlan, *, is_there: bool) -> None:
        """Refuse a destination with another array than the source, or with unknown objects."""
        prefix = plan.node.chunk_prefix
        if is_there:
            task = self._task(plan, prefix, may_be_there=False)
            self._run_tasks(replace(plan, action="skipped"), replace(task, only_compares=True))
        elif in_place.find_manifest(self.target, plan.node) is None and any(
            self._manifest(plan).keys_below(self.target, prefix)
        ):
            raise SpecError(
                f"the destination has objects below {prefix!r} already, and no array; "
                "nothing was written: take an empty destination, or remove what is there"
            )

    def _manifest(self, plan: ArrayPlan) -> in_place.Manifest:
        assert plan.geometry is not None
        shape, (style, separator) = plan.geometry.shape, plan.geometry.encoding
        prefix, documents = plan.node.chunk_prefix, plan.new_documents
        is_staged = self.target is self.source
        keys = plan.geometry.encoding, plan.grid_shape
        grid = [*walks.ObjectGrid.of_keys(prefix, *keys, plan.spec).shape]
        manifest = in_place.Manifest(
            *plan.node, "staging", prefix, style, separator, len(shape), documents, is_staged, grid
        )
        return replace(manifest, runs=[f"values-{uuid.uuid4().hex}"])

    def _task(self, plan: ArrayPlan, prefix: str, *, may_be_there: bool) -> ArrayTask:
        """Return the part that all tasks of an array share; `prefix` is of keys in the target."""
        assert plan.geometry is not None
        keys = plan.geometry.encoding, plan.grid_shape
        new_spec = None if plan.action == "copied" else plan.new_spec
        source = walks.ObjectGrid.of_keys(plan.node.chunk_prefix, *keys, plan.spec)
        target = walks.ObjectGrid.of_keys(prefix, *keys, new_spec)
        is_copy = plan.action == "copied"
        places = ArrayLocation(self.source, source, is_copy), ArrayLocation(self.target, target)
        nbytes, run = plan.nominal_nbytes, uuid.uuid4().hex
        return ArrayTask(*places, plan.regions, self.order, nbytes, may_be_there, run)

    @property
    def _is_elsewhere(self) -> bool:
        return not isinstance(self.executor, futures.ThreadPoolExecutor)

    def _run_tasks(self, plan: ArrayPlan, task: ArrayTask) -> ArrayReport:
        begun = time.monotonic()
        if self._is_elsewhere:
            key = self.source.stored_key(metadata.document_key(plan.node))
            task = replace(task, document_key=key)
        locations = [task.source]
        if task.may_be_there or task.only_compares:
            locations.append(task.target)  # also regions that an earlier run wrote are visited
        grid = task.regions.boxes.shape(task.source.grid.grid_shape)
        found = regions_to_visit(locations, task.regions.boxes)
        regions = product(*map(range, grid)) if found is None else iter(found)
        n_tasks = math.prod(grid) if found is None else len(found)
        calls = ((run_task, task, coords) for coords in regions)
        done = TaskResult()
        with closing(run_all(self.executor, calls)) as results:
            for n_done, result in enumerate(results, 1):
                done = TaskResult(*map(add, done, result))
                if self.progress is not None:
                    counts = (n_tasks, n_done, done.n_chunks, done.n_bytes)
                    self.progress(Progress(plan.node.path, plan.action, *counts))
        target = task.target
        if self._is_elsewhere and not task.only_compares:
            there = self._manifest(plan).keys_below(target.base, target.grid.prefix)
            if (n_there := sum(map(len, there))) != done.n_objects:
                raise SpecError(
                    f"the workers of the executor have written {done.n_objects} objects, and "
                    f"{n_there} are in {target.base.describe()}: take workers that reach the "
                    "store; nothing was removed"
                )
        n_chunks, n_objects, n_bytes, n_resumed = done
        report = replace(_report_of(plan), n_chunks=n_chunks, n_objects=n_objects, n_bytes=n_bytes)
        seconds = time.monotonic() - begun
        return replace(report, n_tasks=n_tasks, n_resumed=n_resumed, seconds=seconds)


def _skipped_if_there(plan: ArrayPlan, there: Set[str]) -> ArrayPlan:
    """Return the plan of an array; a destination that has it already keeps it."""
    if plan.geometry is None or not plan.new_documents or not plan.new_documents.keys() <= there:
        return plan
    return replace(plan, action="skipped", reason="the destination has it already")


def _report_of(plan: ArrayPlan) -> ArrayReport:
    node, cps = plan.node, None if plan.new_spec is None else plan.new_spec.chunks_per_shard
    n_tasks = 0
    if plan.action != "skipped" and plan.geometry is not None:
        n_tasks = math.prod(plan.regions.boxes.shape(plan.grid_shape))
    before = plan.documents.values()
    return ArrayReport(
        node.path,
        node.hierarchy,
        plan.action,
        cps,
        plan.reason,
        n_tasks=n_tasks,
        read_by=read_by(plan.new_documents.values() or before),
        was_read_by=read_by(before),
        is_left=plan.is_chosen and bool(plan.obstacle) and not plan.is_hidden,
    )


def run_all(
    executor: futures.Executor, calls: Iterator[tuple[Callable[..., T], *tuple[Any, ...]]]
) -> Generator[T, None, None]:
    """Call functions, each with its arguments; yield results in any order.

    The first error of a task stops the others: it is raised when all started ones have ended. It is
    a `ShardStoreError` where the executor gave a task up, because its processes were killed.
    """
    submitted: set[futures.Future[T]] = set()
    try:
        while True:
            for function, *arguments in islice(calls, _MAX_SUBMITTED - len(submitted)):
                submitted.add(executor.submit(function, *arguments))
            if not submitted:
                return
            done, submitted = futures.wait(submitted, return_when=futures.FIRST_COMPLETED)
            yield from map(_result, done)
    finally:
        for future in submitted:
            future.cancel()
        futures.wait([future for future in submitted if not future.cancelled()])


def _result(future: futures.Future[T]) -> T:
    try:
        return future.result()
    except Exception as error:
        # The error of dask is no `BrokenExecutor`, and dask may not be installed.
        if isinstance(error, futures.BrokenExecutor) or type(error).__name__ == "KilledWorker":
            raise ShardStoreError(
                "worker processes were killed while they ran a task, mostly because memory ran "
                "out: give each more memory or start fewer, and run the same again, which "
                f"continues ({type(error).__name__}: {error})"
            ) from error
        raise
