"""Engine of a loader: reads units ahead, decodes them in threads, and hands out batches.

1. All threads share a `Run`, under one lock. They take *jobs* from one queue, which are calls
   without arguments: plan a group, read and decode a unit, finish a batch.
2. Units begin in the order of the plan. The limit of bytes must have room for a unit, and for the
   batches that it opens. A unit keeps its room until its chunks are decoded, a batch until the
   consumer has it.
3. A batch is complete when all of its samples are planned, and all units with parts of them
   decoded. Units hold all parts of a group, so a batch never waits for a later group. A unit may
   exceed the limit only if no other unit is under way and the next batch is not complete: so a run
   never stands still.
4. The first error ends the run: no job does anything any more, requests are cancelled, and the
   consumer wakes.
5. Threads know the `Run` only. When the iterator over its batches is closed or dropped, each
   thread ends after the unit that it decodes.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from zarr_shardstore.access import zarrs_loop
from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.interop.loader.copies import Array, Memory, Source
from zarr_shardstore.interop.loader.frameworks import Converter
from zarr_shardstore.interop.loader.order import Draw, Ints, Samples, Share
from zarr_shardstore.interop.loader.plan import BATCH_NBYTES, PART_NBYTES, PlannedSamples, Unit
from zarr_shardstore.interop.loader.sources import nbytes_of

_LOOK_S = 1.0
"""Longest wait of the consumer before it looks whether the event loop still runs."""

_FEW_REQUESTS = 16
"""Units that may be requested at a time, however small the limit of the memory."""

_FEW_UNITS = 64
"""Units that are left when the next groups are planned."""

_PLANNED_PARTS = 4096
"""Parts of samples of small groups that are planned at a time."""

_MOST_PARTS = 16 * _PLANNED_PARTS
"""Parts in units that wait; with more, no further group is planned."""


@dataclass
class LoaderStats:
    """Counts of the current epoch of a loader, or of the last one.

    Parameters
    ----------
    n_batches, n_samples, nbytes_delivered : int
        What the consumer has got.
    n_chunks, n_reads, nbytes_read : int
        Chunks that were read and decoded, the reads, each of one or more requests, and the encoded
        bytes of the chunks.
    most_nbytes : int
        Most bytes that were reserved at a time, encoded and decoded.
    seconds, waited_s : float
        Time from the begin of the epoch to its last batch, and the part that the consumer waited.
    index_requests, index_hits : int
        Shard indexes that were requested, and that were cached.
    """

    n_batches: int = 0
    n_samples: int = 0
    nbytes_delivered: int = 0
    n_chunks: int = 0
    n_reads: int = 0
    nbytes_read: int = 0
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
    starts: Ints
    """Starts of its samples."""
    nbytes: int
    reserved: int
    """Bytes of its elements, and with all beside them."""
    n_rows: list[int]
    """Length of the array of each source."""
    n_left: int
    """Samples that are not planned, and units that are not decoded."""
    buffers: list[Array] | None = None
    """An array of each source; ``None``: the batch is not open."""
    result: list[Any] = field(default_factory=list)
    """What the consumer gets, when it is done."""


class Task(NamedTuple):
    """Arrays, samples and limits in bytes that all epochs of a loader share."""

    sources: Sequence[Source]
    samples: Samples
    share: Share
    draw: Draw
    batch_nbytes: int
    """Size of the largest batch."""
    limit_nbytes: int
    unit_nbytes: int
    n_threads: int
    finish: Callable[[Sequence[Array], Ints], Any]
    """Makes a batch of an array of each source, and of the starts of its samples."""
    convert: Converter
    memory: Memory
    """Of batches; the next epoch uses it again."""

    def order(self, epoch: int) -> tuple[Ints, list[int]]:
        """Return the numbers of the samples of an epoch, and the ends of their groups."""
        first, n_axes = self.sources[0], None if self.draw.shuffle else 1
        axes = first.axes[:n_axes]
        starts = self.samples.starts(np.arange(self.samples.n))
        chunks = first.elements(starts)[:, :n_axes]
        chunks = chunks // np.array([first.chunk_shape[axis] for axis in axes], np.int64)
        return self.draw.order(self.share, epoch, *first.places(chunks, axes)[1:], self._sizes())

    @property
    def pool_samples(self) -> int:
        """Samples of a pool, by their average size."""
        each = int(self._sizes().sum()) // max(1, self.samples.n)
        return max(1, self.draw.pool_nbytes // max(1, each))

    def most_under_way(self, source: Source) -> int:
        """Return the most units of an array that are read and decoded at a time.

        More local ones would wait for a thread. More requests would share the rate of a network, so
        the first batch would come later.
        """
        if source.entries.can_block:
            return 2 * self.n_threads
        return max(_FEW_REQUESTS, self.limit_nbytes // (4 * self.unit_nbytes))

    def _sizes(self) -> Ints:
        """Return the size of samples and of their parts in the plan."""
        n_parts = sum(source.n_parts for source in self.sources)
        numbers = np.arange(self.samples.n)
        return nbytes_of(self.sources, self.samples, numbers, PART_NBYTES * n_parts)

    def plans(
        self, numbers: Ints, ends: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Ints, list[Unit]]]:
        """Yield the batch of each sample, and units in order, of a few groups at a time."""
        bounds = [start, *[end for end in ends if end > start]]
        n_samples = _PLANNED_PARTS // sum(source.n_parts for source in self.sources)
        i = 0
        while i < len(bounds) - 1:
            j = max(i + 1, bisect_right(bounds, bounds[i] + n_samples) - 1)
            yield self._plan(numbers, bounds[i : j + 1])
            i = j

    def _plan(self, numbers: Ints, bounds: Sequence[int]) -> tuple[Ints, list[Unit]]:
        positions, begins = np.arange(bounds[0], bounds[-1]), self.share.bounds
        groups = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        batches = np.searchsorted(begins[1:], positions, side="right")
        turns = np.zeros_like(batches) if self.draw.shuffle == "shards" else batches
        before = int(begins[batches[0]])  # of a batch that an earlier plan has begun
        starts, units = self.samples.starts(numbers[before : bounds[-1]]), list[Unit]()
        for i, source in enumerate(self.sources):
            sums = source.rows_before(starts)
            slots = sums[positions - before] - sums[begins[batches] - before]
            of_plan = (starts[bounds[0] - before :], positions, groups, batches, slots, turns)
            units += source.units(i, PlannedSamples(*of_plan), self.unit_nbytes)
        # Arrays side by side, because a batch needs all.
        units.sort(key=lambda unit: (unit.group, unit.numbers[0]))
        return batches, units


class Run:
    """State of one epoch, shared by the consumer, the threads and the event loop."""

    def __init__(self, task: Task, epoch: int, first_batch: int) -> None:
        self.task, self.stats, self._pid = task, LoaderStats(), os.getpid()
        self.next = self.delivered = first_batch  # an error may come between them
        self._numbers, ends = task.order(epoch)
        self._plans = task.plans(self._numbers, ends, int(task.share.bounds[first_batch]))
        self._lock = threading.RLock()  # entered in C: no interrupt leaves it taken
        self._changed = threading.Condition(self._lock)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._units: deque[Unit] = deque()
        self._requests: set[Future[Any]] = set()
        self._loop = zarrs_loop()
        self._used = self._n_under_way = 0
        self._is_planning = self._is_stopped = False
        self._error: BaseException | None = None
        self._batches: dict[int, _Batch] = {}

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. The threads end when the iterator does, or is dropped."""
        waits = True
        try:
            while found := self._next():
                self.delivered = self.next
                yield found.pop()
        except GeneratorExit:
            waits = False  # perhaps in a garbage collection
            raise
        finally:
            self.stop(waits=waits)

    def stop(self, error: BaseException | None = None, *, waits: bool = False) -> None:
        """End all threads and requests. It may be called twice, and in a garbage collection."""
        if os.getpid() != self._pid:
            return  # a forked child has none of them
        with self._lock:
            self._error = self._error or (None if self._is_stopped else error)
            self._is_stopped = True
            requests = [*self._requests]
            for each in (self._units, self._requests, self._batches):
                each.clear()
            self._changed.notify_all()
        for _ in self._threads:
            self._jobs.put(None)
        for request in requests:
            request.cancel()
        # A transform may close its loader: then no thread waits for another.
        waits = waits and threading.current_thread() not in self._threads
        for thread in self._threads if waits else ():
            _join(thread)

    # ------------------------------------------------------------------ consumer

    def _begin(self) -> None:
        self._began = time.perf_counter()
        with self._lock:
            for number in np.flatnonzero(np.diff(self.task.share.bounds) == 0).tolist():
                if number >= self.next:
                    self._count(self._batch(number), 0)
            self._pump()
        for i in range(self.task.n_threads):
            thread = threading.Thread(target=_work, args=(self._jobs, self.stop), daemon=True)
            thread.name = f"shard-loader-{i}"
            self._threads.append(thread)
            thread.start()

    def _next(self) -> list[Any]:
        """Return the next batch in a list, which is empty after the last one."""
        if os.getpid() != self._pid:
            raise UnsupportedError(
                "a fork has copied this iterator, but none of its threads: iterate over the "
                "loader in the process that uses the batches"
            )
        if not self._threads and not self._is_stopped:
            self._begin()
        began, stats = time.perf_counter(), self.stats
        with self._lock:
            while not self._is_stopped and self.next < self.task.share.n_batches:
                batch = self._batch(self.next)
                if batch.result:
                    break
                arrived = self._changed.wait(_LOOK_S)
                if not arrived and self._requests and not self._loop.is_running():
                    self.stop(RuntimeError("zarr's event loop has ended: iterate once more"))
            else:
                if self._error is not None:
                    raise self._error
                return []
            for buffer, source in zip(batch.buffers or (), self.task.sources, strict=True):
                if self.task.convert.reuses_memory and source.indptr is None:  # their sizes repeat
                    self.task.memory.give_back(buffer)
            del self._batches[self.next]
            self.next += 1
            self._used -= batch.reserved
            try:
                self._pump()
            except Exception as error:  # this batch is complete: the next one raises it
                self.stop(error)
            stats.n_batches += 1
            stats.n_samples += len(batch.starts)
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
            source = task.sources[unit.array]
            batches = [self._batch(number) for number in unit.numbers]
            opened = [batch for batch in batches if batch.buffers is None]
            reserved = source.reserved_nbytes(unit)
            nbytes = reserved + sum(batch.reserved for batch in opened)
            is_idle = not self._n_under_way and self._batch(self.next).n_left
            if self._used + nbytes > task.limit_nbytes and not is_idle:
                break
            if self._n_under_way >= task.most_under_way(source):
                break  # batches that are opened late use memory again
            self._units.popleft()
            self._n_under_way += 1
            self._used += reserved
            for batch in opened:
                self._open(batch)
            self.stats.most_nbytes = max(self.stats.most_nbytes, self._used)
            # It is read in a thread, or in zarr's event loop; a thread decodes it.
            if source.entries.can_block:
                read = partial(source.entries.read, unit.reads)
                self._jobs.put(partial(self._decode, unit, read))
                continue
            request = source.entries.begin(unit.reads, self._loop)
            self._requests.add(request)
            request.add_done_callback(partial(self._answered, unit))
        if not self._is_planning and len(self._units) <= _FEW_UNITS:
            self._is_planning = sum(len(unit.part_range) for unit in self._units) <= _MOST_PARTS
            if self._is_planning:
                self._jobs.put(self._plan)

    def _batch(self, number: int) -> _Batch:
        """Return a batch, made at its first use: an epoch may have millions."""
        if number not in self._batches:
            start, stop = self.task.share.bounds[number : number + 2].tolist()
            starts, sources = self.task.samples.starts(self._numbers[start:stop]), self.task.sources
            n = stop - start
            n_rows = [n if s.indptr is None else int(s.n_rows(starts).sum()) for s in sources]
            nbytes = sum(n * source.row_nbytes for n, source in zip(n_rows, sources, strict=True))
            reserved = nbytes + BATCH_NBYTES * len(sources)
            self._batches[number] = _Batch(starts, nbytes, reserved, n_rows, n)
        return self._batches[number]

    def _open(self, batch: _Batch) -> None:
        self._used += batch.reserved
        batch.buffers = [
            self.task.memory.take((n, *source.lengths), source.dtype)
            for n, source in zip(batch.n_rows, self.task.sources, strict=True)
        ]

    def _answered(self, unit: Unit, request: Future[Any]) -> None:
        self._requests.discard(request)
        self._jobs.put(partial(self._decode, unit, request.result))

    def _count(self, batch: _Batch, n: int) -> None:
        """Count samples or units that are done, and finish a batch that lacks none."""
        batch.n_left -= n
        if not batch.n_left:
            if batch.buffers is None:  # samples without elements
                self._open(batch)
            self._jobs.put(partial(self._finish, batch))

    # ------------------------------------------------------------------- jobs

    def _plan(self) -> None:
        if (planned := next(self._plans, None)) is None:
            return
        batches, units = planned
        counted = zip(*map(np.ndarray.tolist, np.unique(batches, return_counts=True)), strict=True)
        with self._lock:
            if self._is_stopped:
                return
            for number in chain.from_iterable(unit.numbers for unit in units):
                self._batch(number).n_left += 1
            for number, n in counted:
                self._count(self._batch(number), n)
            self._units.extend(units)
            self._is_planning = False
            self._pump()

    def _decode(self, unit: Unit, read: Callable[[], Sequence[Any]]) -> None:
        source = self.task.sources[unit.array]
        with self._lock:
            if self._is_stopped:
                return
            batches = {number: self._batch(number) for number in unit.numbers}
        try:
            buffers = {i: b.buffers[unit.array] for i, b in batches.items() if b.buffers}
            nbytes_read = source.fill(unit, read, buffers)
        except Exception as error:
            self._blame(unit, error)
            return
        with self._lock:
            if self._is_stopped:
                return
            self._n_under_way -= 1
            self._used -= source.reserved_nbytes(unit)
            self.stats.nbytes_read += nbytes_read
            self.stats.n_reads += 1
            self.stats.n_chunks += unit.n_chunks
            for batch in batches.values():
                self._count(batch, 1)
            self._pump()

    def _finish(self, batch: _Batch) -> None:
        if self._is_stopped:
            return
        pairs = zip(self.task.sources, batch.buffers or (), strict=True)
        arrays = [b.reshape(len(b), *source.sample_shape) for source, b in pairs]
        result = self.task.finish(arrays, batch.starts)
        with self._lock:
            batch.result.append(result)
            self._changed.notify()

    def _blame(self, unit: Unit, error: BaseException) -> None:
        """End the run by an error that names shards and samples."""
        entries, reads = self.task.sources[unit.array].entries, unit.reads
        numbers = np.unique(self._numbers[unit.parts.positions[[*unit.part_range]]]).tolist()
        keys = entries.chunks.keys(reads[0][1][:3])
        if entries.layout is not None:
            keys = [entries.layout.shard(shard).key for shard, _ in reads[:3]]
        error.add_note(
            f"in {len(reads)} shards, {keys} first, with parts of {len(numbers)} samples, "
            f"{numbers[:8]} first"
        )
        self.stop(error)


def _join(thread: threading.Thread) -> None:
    """Wait for the end of a thread, whose start an interrupt may have cut off."""
    for _ in range(100):
        try:
            thread.join()
            return
        except RuntimeError:  # it has not begun
            time.sleep(0.001)


def _work(jobs: SimpleQueue[Any], stop: Callable[[BaseException], None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:
            stop(error)
        del job
