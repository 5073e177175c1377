"""Engine of a loader: reads units ahead, decodes them in threads, and hands out batches.

1. All threads share a `Run`, under one lock. They take *jobs*, which are calls without arguments:
   plan a group, read a unit, decode a run of its chunks, finish a batch.
2. Units begin in the order of the plan. The limit of bytes must have room for a unit, and for the
   batches that it opens. A unit keeps its room until its chunks are decoded, a batch until the
   consumer has it.
3. A batch is complete when all parts of its samples are copied. Units hold all parts of a group,
   so a batch never waits for a later group. A unit may exceed the limit only if no other unit is
   under way and the next batch is not complete: so a run never stands still.
4. The first error ends the run: it clears all jobs, cancels requests, and wakes the consumer.
5. Threads know the `Run` only. When its `Batches` are closed or dropped, each thread ends after
   the chunks that it decodes.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.interop.loader.copies import Array, Memory, Source
from zarr_shardstore.interop.loader.order import Ints, Order, Samples
from zarr_shardstore.interop.loader.plan import RUN_NBYTES, Parts, Unit

_MOST_KEPT = 16
"""Delivered batches whose memory may be used again."""


@dataclass
class LoaderStats:
    """Counts of the current epoch of a loader, or of the last one.

    Parameters
    ----------
    n_batches, n_samples : int
        What the consumer has got.
    n_chunks, n_reads : int
        Chunks that were read and decoded, and the reads, each of one or more requests.
    nbytes_read, nbytes_delivered : int
        Encoded bytes of the chunks, and bytes of the batches.
    most_nbytes : int
        Most bytes that were reserved at a time, encoded and decoded.
    seconds, waited_s : float
        Time from the begin of the epoch to its last batch; and the part that the consumer waited.
    index_requests, index_hits : int
        Shard indexes that were requested, and that were cached.
    """

    n_batches: int = 0
    n_samples: int = 0
    n_chunks: int = 0
    n_reads: int = 0
    nbytes_read: int = 0
    nbytes_delivered: int = 0
    most_nbytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    index_requests: int = 0
    index_hits: int = 0

    @property
    def mb_per_s(self) -> float:
        """Megabytes of batches in each second."""
        return self.nbytes_delivered / 1e6 / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class _Batch:
    n: int
    nbytes: int
    n_left: int
    """Parts that are not copied, and samples that are not planned, in each array."""
    buffers: list[Array] | None = None
    result: Any = None
    is_done: bool = False


class Task(NamedTuple):
    """All that a run does: arrays, samples in order, and limits in bytes."""

    sources: Sequence[Source]
    samples: Samples
    order: Order
    batch_ends: Ints
    first_batch: int
    block: int | None
    """Samples whose chunks are read first; ``None``: all of a group."""
    limit_nbytes: int
    unit_nbytes: int
    n_threads: int
    finish: Callable[[Sequence[Array]], Any]
    make_memory: Callable[[int], npt.NDArray[np.uint8]]

    @property
    def start(self) -> int:
        """Position of the first sample that is delivered."""
        return int(self.batch_ends[self.first_batch - 1]) if self.first_batch else 0

    def plan(self, group: int) -> tuple[Ints, list[Parts]]:
        """Return the batch of each sample of a group, and for each array the parts."""
        ends = self.order.group_ends
        first = max(self.start, ends[group - 1] if group else 0)
        positions = np.arange(first, ends[group])
        batches = np.searchsorted(self.batch_ends, positions, side="right")
        slots = positions - np.append(0, self.batch_ends)[batches]
        starts = self.samples.starts(self.order.numbers[positions])
        block = self.block or len(positions)
        return batches, [s.geometry.parts(starts, batches, slots, block) for s in self.sources]


class Run:
    """State of one epoch, shared by the consumer, the threads and the event loop."""

    def __init__(self, task: Task) -> None:
        self.task, self.stats, self._pid = task, LoaderStats(), os.getpid()
        self.next = task.first_batch
        self._lock = threading.RLock()
        self._has_job, self._has_batch = (threading.Condition(self._lock) for _ in range(2))
        self._jobs: deque[Callable[[], None]] = deque()
        self._units: deque[Unit] = deque()
        self._under_way: set[Unit] = set()
        self._used = self._n_of_group = 0
        self._is_planning = self._is_stopped = False
        self._error: BaseException | None = None
        n_arrays, each = len(task.sources), sum(s.geometry.sample_nbytes for s in task.sources)
        sizes = np.diff(task.batch_ends, prepend=0).tolist()
        batches = [_Batch(n, n * each, n * n_arrays) for n in sizes]
        self._batches = {i: b for i, b in enumerate(batches) if i >= self.next}
        n_kept = min(
            _MOST_KEPT, task.limit_nbytes // 16 // max(1, each, each * max(sizes, default=1))
        )
        self._memory = Memory(task.make_memory, max(2, n_kept) * n_arrays)
        self._group = sum(end <= task.start for end in task.order.group_ends)
        self._threads = [
            threading.Thread(target=_work, args=(self,), name=f"shard-loader-{i}", daemon=True)
            for i in range(task.n_threads)
        ]

    def begin(self) -> None:
        self._began = time.perf_counter()
        with self._lock:
            for batch in self._batches.values():
                if not batch.n:
                    self._count(batch, 0)
            self._pump()
        for thread in self._threads:
            thread.start()

    def take(self) -> Callable[[], None] | None:
        """Return the next job; ``None`` when the run is over."""
        with self._lock:
            while not self._jobs and not self._is_stopped:
                self._has_job.wait()
            return self._jobs.popleft() if self._jobs else None

    def stop(self, error: BaseException | None = None, *, waits: bool = False) -> None:
        """End all threads and requests. It may be called twice, and in a garbage collection."""
        if os.getpid() != self._pid:
            return  # a forked child has none of them
        with self._lock:
            self._error = self._error or (None if self._is_stopped else error)
            self._is_stopped = True
            futures = [unit.future for unit in self._under_way if unit.future is not None]
            for each in (self._jobs, self._units, self._under_way, self._batches):
                each.clear()
            self._has_job.notify_all()
            self._has_batch.notify_all()
        for future in futures:
            future.cancel()
        for thread in self._threads if waits else ():
            thread.join()

    def next_batch(self) -> Any:
        """Return the next batch when it is complete."""
        if os.getpid() != self._pid:
            raise UnsupportedError(
                "a fork has copied this iterator, but none of its threads: iterate over the "
                "loader in the process that uses the batches"
            )
        began, stats = time.perf_counter(), self.stats
        with self._lock:
            while (batch := self._batches.get(self.next)) is not None and not batch.is_done:
                self._has_batch.wait()
            if self._error is not None:
                raise self._error
            if batch is None:
                raise StopIteration
            for buffer in batch.buffers or ():
                self._memory.give_back(buffer)
            del self._batches[self.next]
            self.next += 1
            self._used -= batch.nbytes
            self._pump()
            stats.n_batches += 1
            stats.n_samples += batch.n
            stats.nbytes_delivered += batch.nbytes
            stats.seconds = time.perf_counter() - self._began
            stats.waited_s += time.perf_counter() - began
        return batch.result

    # --------------------------------------------------------- under the lock

    def _pump(self) -> None:
        """Begin units while there is room, and plan the next group before they run out."""
        task = self.task
        while self._units:
            unit = self._units[0]
            opened = [b for i in unit.batches if (b := self._batches[i]).buffers is None]
            nbytes = unit.reserved + sum(batch.nbytes for batch in opened)
            is_idle = not self._under_way and self._batches[self.next].n_left
            if self._used + nbytes > task.limit_nbytes and not is_idle:
                break
            if unit.reads_here and len(self._under_way) >= 2 * task.n_threads:
                break  # no thread is free; batches that are opened late use memory again
            self._units.popleft()
            self._under_way.add(unit)
            self._used += unit.reserved
            for batch in opened:
                self._open(batch)
            self.stats.most_nbytes = max(self.stats.most_nbytes, self._used)
            self._begin(unit)
        is_short = 2 * len(self._units) <= self._n_of_group
        has_more = self._group < len(task.order.group_ends)
        if is_short and has_more and not self._is_planning and not self._is_stopped:
            self._is_planning = True
            self._add_job(self._plan)

    def _add_job(self, job: Callable[[], None], *, first: bool = True) -> None:
        (self._jobs.appendleft if first else self._jobs.append)(job)
        self._has_job.notify()

    def _open(self, batch: _Batch) -> None:
        self._used += batch.nbytes
        batch.buffers = [
            self._memory.take((batch.n, *source.geometry.lengths), source.dtype)
            for source in self.task.sources
        ]

    def _count(self, batch: _Batch, n: int) -> None:
        """Count parts that are copied, and finish a batch that lacks none."""
        batch.n_left -= n
        if not batch.n_left:
            if batch.buffers is None:  # samples without elements
                self._open(batch)
            self._add_job(partial(self._finish, batch))

    # ------------------------------------------------------------------- jobs

    def _plan(self) -> None:
        task = self.task
        batches, parts_of = task.plan(self._group)
        units = [
            unit
            for i, (source, parts) in enumerate(zip(task.sources, parts_of, strict=True))
            for unit in source.geometry.units(i, parts, task.unit_nbytes)
        ]
        for unit in units:
            unit.reads_here = task.sources[unit.array].entries.can_block
        if task.block is not None:  # side by side: a batch needs all arrays
            units.sort(key=lambda unit: unit.batches[0])
        with self._lock:
            if self._is_stopped:
                return
            for parts in parts_of:
                for number, n in _counted(parts.batches):
                    self._batches[number].n_left += n
            for number, n in _counted(batches):
                self._count(self._batches[number], n * len(task.sources))
            self._units.extend(units)
            self._n_of_group, self._is_planning = len(units), False
            self._group += 1
            self._pump()

    def _begin(self, unit: Unit) -> None:
        entries, reads = self.task.sources[unit.array].entries, unit.reads()
        if unit.reads_here:
            self._add_job(partial(self._receive, unit, partial(entries.read, reads)), first=False)
            return
        unit.future = entries.begin(reads)
        unit.future.add_done_callback(partial(self._has_ended, unit))

    def _has_ended(self, unit: Unit, future: Future[Any]) -> None:
        if not future.cancelled():
            self._receive(unit, future.result)

    def _receive(self, unit: Unit, read: Callable[[], Sequence[Any]]) -> None:
        """Make jobs of the chunks of a unit. A thread that has read them decodes the first."""
        try:
            values = read()
        except Exception as error:
            self._blame(unit, error)
            return
        length = max(1, RUN_NBYTES // self.task.sources[unit.array].geometry.chunk_nbytes)
        first, stop = unit.cuts[0], unit.cuts[-1]
        there = [value for value in values if value is not None]
        objects = {id(o): o for o in [v.obj if isinstance(v, memoryview) else v for v in there]}
        # Values of a mapping are in memory anyway.
        nbytes = min(unit.reserved, sum(memoryview(each).nbytes for each in objects.values()))
        jobs = [
            partial(self._decode, unit, values[lo - first : lo - first + length], lo)
            for lo in range(first, stop, length)
        ]
        with self._lock:
            if self._is_stopped:
                return
            self._used += nbytes - unit.reserved
            unit.reserved, unit.n_runs = nbytes, len(jobs)
            self.stats.nbytes_read += sum(map(len, there))
            self.stats.n_reads += 1
            self.stats.n_chunks += stop - first
            for job in reversed(jobs[unit.reads_here :]):
                self._add_job(job)
            self._pump()
        if unit.reads_here:
            jobs[0]()

    def _decode(self, unit: Unit, values: Sequence[Any], lo: int) -> None:
        parts, source, hi = unit.parts, self.task.sources[unit.array], lo + len(values)
        counted = _counted(parts.batches[parts.bounds[lo] : parts.bounds[hi]])
        with self._lock:
            if self._is_stopped:
                return
            batches = {number: self._batches[number] for number, _ in counted}
        try:
            chunks = source.decode(values, parts.chunks[lo:hi])
            buffers = {
                i: batch.buffers[unit.array] for i, batch in batches.items() if batch.buffers
            }
            source.copy_parts(chunks, parts, lo, hi, buffers)
        except Exception as error:
            self._blame(unit, error)
            return
        with self._lock:
            if self._is_stopped:
                return
            unit.n_runs -= 1
            if not unit.n_runs:
                self._under_way.discard(unit)
                self._used -= unit.reserved
            for number, n in counted:
                self._count(batches[number], n)
            self._pump()

    def _finish(self, batch: _Batch) -> None:
        assert batch.buffers is not None
        arrays = [
            buffer.squeeze(1 + source.geometry.axes[0]) if source.squeezes else buffer
            for source, buffer in zip(self.task.sources, batch.buffers, strict=True)
        ]
        result = self.task.finish(arrays)
        with self._lock:
            batch.result, batch.is_done = result, True
            self._has_batch.notify()

    def _blame(self, unit: Unit, error: BaseException) -> None:
        """End the run by an error that names shards and samples."""
        task, parts, some = self.task, unit.parts, slice(*unit.bounds)
        begins = np.append(0, task.batch_ends)[parts.batches[some]]
        numbers = np.unique(task.order.numbers[begins + parts.slots[some]]).tolist()
        reads, entries = unit.reads(), task.sources[unit.array].entries
        if entries.layout is None:
            keys = entries.chunks.keys(parts.chunks[unit.cuts[0] : unit.cuts[-1]][:3])
        else:
            keys = [entries.layout.shard(shard).key for shard, _ in reads[:3]]
        error.add_note(
            f"in {len(reads)} shards, {keys} first, with parts of {len(numbers)} samples, "
            f"{numbers[:8]} first"
        )
        self.stop(error)


def _counted(batches: Ints) -> list[tuple[int, int]]:
    """Return the batches that have parts, and their numbers of parts."""
    if not len(batches):
        return []
    first = int(batches.min())
    counts = np.bincount(batches - first)
    there = np.flatnonzero(counts)
    return [*zip((there + first).tolist(), counts[there].tolist(), strict=True)]


def _work(run: Run) -> None:
    while (job := run.take()) is not None:
        try:
            job()
        except BaseException as error:
            run.stop(error)
        del job


class Batches:
    """Iterator over the batches of one epoch. Close it, or drop it, to end its threads."""

    def __init__(self, task: Task) -> None:
        self.run = Run(task)
        self._finalizer = weakref.finalize(self, self.run.stop)
        self.run.begin()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        try:
            return self.run.next_batch()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all threads and requests of this iterator at once."""
        self.run.stop(waits=True)
        self._finalizer.detach()
