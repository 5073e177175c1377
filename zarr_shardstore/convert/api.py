"""Re-packing whole stores: chunks into shards, shards into chunks, shards into other shards.

Bytes of chunks are moved and never decoded. Each region of an array is one task; what a task
wrote is read back before anything of the source is removed.

One process at a time, where the base store lets us: files on a local disk.

The lock is the operating system's, so it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.arrays.policy import ChunksPerShard, NewArrays, ShardingPolicy, V3Declaration
from zarr_shardstore.convert.array_state import array_states
from zarr_shardstore.convert.in_place import (
    finish,
    keeps_out_readers,
    read_manifests,
    remove_leftovers,
    take_back,
)
from zarr_shardstore.convert.job import Conversion, executor_or_threads
from zarr_shardstore.convert.plan import (
    ArrayPlan,
    Choose,
    check_rules,
    matching,
    plan_array,
    to_plain,
    to_shards,
)
from zarr_shardstore.convert.report import ConversionReport, OnProgress
from zarr_shardstore.draft.hierarchy_store import DraftHierarchyStore
from zarr_shardstore.errors import SpecError, UnfinishedConversionError
from zarr_shardstore.format.shard import EntryOrder, check_order
from zarr_shardstore.inspect.find import find_contents
from zarr_shardstore.inspect.open_base import STAGING, BaseStoreHandle, open_base
from zarr_shardstore.io.backends.base import Backend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.resolve import BaseStoreLike
from zarr_shardstore.io.local.files import holds_a_file
from zarr_shardstore.io.local.locks import lock_file
from zarr_shardstore.metadata.documents import Node, has_conversion_marker
from zarr_shardstore.shards.requests import ListDir
from zarr_shardstore.store.options import ShardingOptions
from zarr_shardstore.store.sharding_mapping import ShardingMapping
from zarr_shardstore.store.sharding_store import ShardingStore


@contextmanager
def exclusive(backend: Backend, directory: str, what: str) -> Iterator[None]:
    """Hold a lock on a directory of a base store; on other than local ones, nothing is held.

    Parameters
    ----------
    directory
        Where the file of the lock is made; removed at the end if it is empty.
    what
        What goes on, for the message.

    Raises
    ------
    ShardConflictError
        If another process, or another caller of this one, holds it.
    SpecError
        If the directory is a link.
    """
    if not isinstance(backend, LocalBackend):
        yield
        return
    path = backend.path_of(directory)
    if os.path.islink(path.rstrip("/")):
        raise SpecError(f"{path!r} is a link, which nothing of ours is: remove it")
    message = f"{what} goes on already: wait until it has ended"
    try:
        with lock_file(os.path.join(path, "lock"), "os", 0, message):
            yield
            _remove_what_holds_no_file(path)
    finally:
        with suppress(OSError):
            os.rmdir(path)


def _remove_what_holds_no_file(path: str) -> None:
    """Remove directories, and files that were begun, of those who held the lock and were killed."""
    with os.scandir(path) as entries:
        directories = [entry.path for entry in entries if entry.is_dir()]
    for directory in directories:
        if not holds_a_file(directory):
            shutil.rmtree(directory, ignore_errors=True)


StoreLike: TypeAlias = "BaseStoreLike | ShardingStore | ShardingMapping | DraftHierarchyStore"
Paths: TypeAlias = "Iterable[str] | str | None"


class _NotGiven(Enum):
    """An argument that was left out, where ``None`` says something."""

    TOKEN = "left out"


_NOT_GIVEN = _NotGiven.TOKEN


def shard_store(
    source: StoreLike,
    destination: StoreLike | None = None,
    *,
    chunks_per_shard: ChunksPerShard | _NotGiven = _NOT_GIVEN,
    paths: Paths = None,
    declaration: V3Declaration | None = None,
    index_codecs: Sequence[str | Mapping[str, Any]] | None = None,
    index_location: Literal["start", "end"] | None = None,
    order: EntryOrder = "morton",
    executor: Executor | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
    consolidate_index: bool = False,
    shard_shape: ChunksPerShard | _NotGiven = _NOT_GIVEN,
) -> ConversionReport:
    """Pack the chunks of the arrays of a store into shards, in place or in another store.

    Arrays that have such shards already are left as they are; those that have others are
    re-packed (but for ``"auto"``).

    Parameters
    ----------
    source
        Whatever `ShardingStore` wraps.
    destination
        Another store, also of another kind. All keys of the source are copied to it, arrays in
        their new form; but not what is no chunk in a directory of chunks (``z/c/notes.txt``),
        which nobody lists. An array that is there already is compared with the source, chunk by
        chunk. Close a `ZipStore` afterwards: only then its file is whole. ``None``: in place.
    chunks_per_shard : "auto", int, tuple of int, mapping
        As for `ShardingStore`; ``"auto"``, the default, looks at the sizes of stored chunks, and
        the report says why. A shard has no more chunks along a dimension than the array has now:
        its index would be full of missing ones.
    paths
        Arrays, groups, or patterns (``"raw/*"``): only these are converted. ``None``: all.
    declaration, index_codecs, index_location, order
        As for `ShardingStore`.
    executor : concurrent.futures.Executor, optional
        Runs the tasks: one for each shard. ``None``: a few threads.
    source_options, destination_options
        For fsspec, if the stores are URLs.
    dry_run
        Only say what would be done.
    progress
        Called after each task, in this thread.
    consolidate_index
        At the end do what `ShardingStore.consolidate_index` does, for all sharded arrays.
    shard_shape
        Another name of `chunks_per_shard`, that of zarr-vectors; in chunks, too.

    Returns
    -------
    ConversionReport

    Raises
    ------
    SpecError, UnsupportedError
        If it is not possible as asked; nothing was written. So also if the destination has an
        array of the same path that differs, lies inside the source, or cannot take the result;
        and in place, if the store cannot remove objects.
    CorruptShardError, CorruptValueError
        If a shard of the source is damaged, or if what was written reads back as something
        else. Nothing was removed.
    ShardConflictError
        If the source is changed meanwhile, or another conversion of it goes on.
    UnfinishedConversionError
        If the source was left half converted in place, and there is a destination.

    Notes
    -----
    Nobody may write to the arrays meanwhile. Readers of a conversion in place see the old array
    until all new shards are verified, then for a moment an error that says so, then the new one.
    Whoever is killed runs the same command again: nothing is lost, and what was done is compared
    and not written again.

    Memory: 64 MiB for each worker, at most 128 MiB on object stores, and the indexes of the
    shards at hand; shards may be larger. Base stores that take whole objects only (zarr stores
    that are neither local nor of fsspec or obstore) need a whole shard.

    Examples
    --------
    >>> import numpy, zarr
    >>> store = zarr.storage.MemoryStore()
    >>> z = zarr.create_array(store, name="z", shape=(6, 6), chunks=(1, 1), dtype="u1")
    >>> z[:] = 7
    >>> shard_store(store, chunks_per_shard=(3, 2)).n_objects
    6
    >>> zarr.open_array(store, path="z").shards
    (3, 2)
    """
    given = _given(chunks_per_shard, shard_shape)
    new_arrays = ShardingOptions(
        chunks_per_shard="auto" if given is _NOT_GIVEN else given,
        declaration=declaration,
        index_codecs=index_codecs,
        index_location=index_location,
    ).new_arrays
    choose = to_shards(new_arrays)
    request = _Request(choose, new_arrays, declaration is None, order, paths, dry_run, progress)
    if not consolidate_index:
        return _convert(request, source, destination, executor, source_options, destination_options)
    is_in_place = destination is None
    target = open_base(
        source if destination is None else destination,
        source_options if is_in_place else destination_options,
    )
    store = ShardingMapping(target.store)
    store._sharding.check_consolidation()
    report = _convert(request, source, destination, executor, source_options, destination_options)
    if not dry_run:
        store.consolidate_index()
    return report


def unshard_store(
    source: StoreLike,
    destination: StoreLike | None = None,
    *,
    paths: Paths = None,
    executor: Executor | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> ConversionReport:
    """Give each chunk of the sharded arrays of a store an object of its own.

    Parameters, errors and guarantees are those of `shard_store`.
    """
    new_arrays = NewArrays(ShardingPolicy())
    request = _Request(to_plain, new_arrays, True, "C", paths, dry_run, progress)
    return _convert(request, source, destination, executor, source_options, destination_options)


def reshard(
    source: StoreLike,
    chunks_per_shard: ChunksPerShard | _NotGiven = _NOT_GIVEN,
    destination: StoreLike | None = None,
    *,
    paths: Paths = None,
    declaration: V3Declaration | None = None,
    index_codecs: Sequence[str | Mapping[str, Any]] | None = None,
    index_location: Literal["start", "end"] | None = None,
    order: EntryOrder = "morton",
    executor: Executor | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
    shard_shape: ChunksPerShard | _NotGiven = _NOT_GIVEN,
) -> ConversionReport:
    """Give the arrays of a store shards of this size, whether they have shards now or not.

    Parameters
    ----------
    chunks_per_shard
        What a shard has afterwards; ``None``: no shards, as `unshard_store`.

    The other parameters, errors and guarantees are those of `shard_store`.
    """
    given = _given(chunks_per_shard, shard_shape)
    if given is _NOT_GIVEN:
        raise SpecError("reshard needs chunks_per_shard: what a shard has afterwards")
    new_arrays = ShardingOptions(
        chunks_per_shard=given,
        declaration=declaration,
        index_codecs=index_codecs,
        index_location=index_location,
    ).new_arrays
    choose = to_plain if given is None else to_shards(new_arrays)
    request = _Request(choose, new_arrays, declaration is None, order, paths, dry_run, progress)
    return _convert(request, source, destination, executor, source_options, destination_options)


def _given(
    chunks_per_shard: ChunksPerShard | _NotGiven, shard_shape: ChunksPerShard | _NotGiven
) -> ChunksPerShard | _NotGiven:
    """What was given under one of two names."""
    if shard_shape is _NOT_GIVEN:
        return chunks_per_shard
    if chunks_per_shard is not _NOT_GIVEN:
        raise SpecError("chunks_per_shard and shard_shape are two names of one thing: give one")
    return shard_shape


@dataclass(frozen=True, slots=True)
class _Request:
    """What the caller asked for."""

    choose: Choose
    new_arrays: NewArrays
    keeps_declaration: bool
    order: EntryOrder
    paths: Paths
    dry_run: bool
    progress: OnProgress | None


def _convert(
    request: _Request,
    source: StoreLike,
    destination: StoreLike | None,
    executor: Executor | None,
    source_options: Mapping[str, Any] | None,
    destination_options: Mapping[str, Any] | None,
) -> ConversionReport:
    check_order(request.order)
    if request.progress is not None and not callable(request.progress):
        raise SpecError(f"progress is a function of a Progress, got {request.progress!r}")
    with executor_or_threads(executor) as workers:
        return _convert_by(
            workers, request, source, destination, source_options, destination_options
        )


def _convert_by(
    workers: Executor,
    request: _Request,
    source: StoreLike,
    destination: StoreLike | None,
    source_options: Mapping[str, Any] | None,
    destination_options: Mapping[str, Any] | None,
) -> ConversionReport:
    begun = time.monotonic()
    if destination is None and destination_options:
        raise SpecError("destination_options without a destination: pass source_options")
    base = open_base(source, source_options)
    target = base if destination is None else open_base(destination, destination_options)
    in_place = destination is None
    _check_executor(workers, base, target)
    if not in_place and target.is_same(base):
        raise SpecError("source and destination are the same: leave the destination away")
    if not in_place and target.overlaps(base):
        raise SpecError(
            f"one of {base.describe()} and {target.describe()} lies inside the other, and would "
            "be converted with it; nothing was written: take a destination elsewhere"
        )
    if not base.perform([ListDir("")])[0]:
        raise SpecError(f"there is nothing in {base.describe()}")
    if in_place:
        target.check_replaceable()
    target.check_takes_any_key()
    if not request.dry_run:
        target.check_writable()
    notes: tuple[str, ...] = ()
    if request.dry_run:
        conversion, notes = _prepared(request, base, target, in_place, workers)
        arrays, others = conversion.planned()
        return ConversionReport(arrays, others, notes, time.monotonic() - begun, dry_run=True)
    base.seal()  # a shard that is sealed later would be one that was changed meanwhile
    # Where nothing is finished first, what is refused leaves no trace, not even a lock.
    prepared = None if in_place else _prepared(request, base, target, in_place, workers)
    with exclusive(target.backend, STAGING, f"a conversion of {target.describe()}"):
        remove_leftovers(target)
        try:
            if prepared is None:
                notes = _finish_what_was_begun(base)
                prepared = _prepared(request, base, target, in_place, workers)
            conversion, more_notes = prepared
            arrays, n_copied = conversion.run()
        finally:
            invalidate_documents()
    seconds = time.monotonic() - begun
    return ConversionReport(arrays, n_copied, notes + more_notes, seconds)


def _prepared(
    request: _Request,
    base: BaseStoreHandle,
    target: BaseStoreHandle,
    in_place: bool,
    workers: Executor,
) -> tuple[Conversion, tuple[str, ...]]:
    contents = base.run(find_contents())
    states = array_states(contents.arrays.values())
    if not states:
        raise SpecError(f"there is no Zarr array in {base.describe()}")
    if not in_place:
        # Copied as they are, they would be half of an array that nobody can finish.
        for state in states:
            if any(map(has_conversion_marker, state.documents.values())):
                raise UnfinishedConversionError(
                    f"a conversion in place of the array {state.path!r} of the source was "
                    "interrupted: run that again, without a destination, which finishes it; "
                    "nothing is lost"
                )
    chosen = matching(states, request.paths)
    check_rules(request.new_arrays.policy, states)
    plans = [
        plan_array(base, state, request.choose if state.node in chosen else None)
        for state in states
    ]
    if in_place:
        _refuse_links(base, plans)
    conversion = Conversion(
        base,
        target,
        in_place,
        plans,
        contents.other_keys,
        request.new_arrays,
        request.keeps_declaration,
        request.order,
        workers,
        request.progress,
    )
    if in_place:
        return conversion, ()
    return conversion, tuple(map(_note_of_unlisted, contents.unlisted))


def _refuse_links(base: BaseStoreHandle, plans: Sequence[ArrayPlan]) -> None:
    """Refuse arrays whose objects are elsewhere: listings do not follow links, and files cannot
    be renamed to another disk.

    Raises
    ------
    SpecError
        Nothing was changed.
    """
    for plan in plans:
        prefix = plan.state.node.chunk_prefix
        link = None if plan.action == "skipped" else base.backend.linked_directory(prefix)
        if link is not None:
            raise SpecError(
                f"objects of the array {plan.state.path!r} lie behind the link {link!r}: in "
                "place that cannot be converted; convert the directory that it leads to, or "
                "convert to another store"
            )


def _note_of_unlisted(node: Node) -> str:
    return (
        f"the directory of the array {node.path!r} was not listed, it has too many chunks: if it "
        "holds keys that are neither chunks nor documents, they were not copied"
    )


def _finish_what_was_begun(base: BaseStoreHandle) -> tuple[str, ...]:
    """Finish conversions in place that keep readers out: there is no way back."""
    notes = []
    for manifest in read_manifests(base):
        if not manifest.is_staged or manifest.state == "staging":
            continue
        if manifest.state == "replacing" and not keeps_out_readers(base, manifest):
            take_back(base, manifest)
        else:
            finish(base, manifest)
            notes.append(f"finished what an earlier run had begun with {manifest.path!r}")
    return tuple(notes)


def _check_executor(executor: Executor, base: BaseStoreHandle, target: BaseStoreHandle) -> None:
    """Processes have no part in what is in the memory of this one, or in a file that it writes."""
    if isinstance(executor, ThreadPoolExecutor):
        return
    if not target.supports_deletes:
        raise SpecError(
            f"only one process writes to {target.describe()}: take threads (executor=None)"
        )
    for side in (base, target):
        if side.is_in_memory:
            raise SpecError(
                f"the store {side.describe()} is in the memory of this process, where the workers "
                "of the executor do not reach it: take threads (executor=None)"
            )
