"""Engine of a loader: reads units ahead, decodes them in threads, and hands out batches.

1. `Run` is the state that all threads share, under one lock. A job is a call without arguments.
   Threads take jobs: plan a group, read a unit, decode a run of its chunks, finish a batch.
2. Units begin in the order of the plan, as long as the limit of bytes has room for them and for
   the batches that they open. A unit keeps its room until all of its chunks are decoded, a batch
   until the consumer has it.
3. A batch is complete when no part of its samples is left. A group has all parts of its samples,
   so every batch is complete when all units before it are decoded. A unit may exceed the limit
   only if no other is under way and the next batch is not complete: so a run never stands still.
4. The first error ends the run: it clears all jobs, cancels requests, and wakes the consumer.
5. Threads know the `Run` only. When its `Batches` are closed or dropped, threads end after the
   run of chunks that they decode.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.interop.loader.order import Ints, Order, Samples
from zarr_shardstore.interop.loader.plan import RUN_NBYTES, Geometry, Parts, Unit

_ALIGNMENT = 64
"""Alignment of buffers in bytes: jax shares aligned memory only."""

PLAIN_KINDS = "biufcmMSUV"
"""Kinds of data types whose elements are plain bytes."""

_JOINED_NBYTES = 128 * 1024
_COPIED_NBYTES = 8 * 1024
"""Decoded size of chunks from which on each is decoded and copied alone."""


class Source(NamedTuple):
    """One array of the samples."""

    name: str
    entries: Any
    """`EntryReader` of the array."""
    geometry: Geometry
    dtype: np.dtype[Any]
    squeezes: bool
    """Whether samples lack the sampled axis: rows."""

    def decode(self, values: Sequence[Any], coords: Ints) -> Sequence[npt.NDArray[Any]]:
        """Return chunks: small ones as one array, large ones without a copy."""
        reader, shape, nbytes = self.entries.chunks, self.geometry.chunk_shape, self.geometry.chunk_nbytes
        slabs = reader.slabs
        if slabs is not None and None not in values and nbytes >= _COPIED_NBYTES:
            with suppress(Exception):  # below, the error gets the name of its chunk
                plain = slabs.plain
                if nbytes <= _JOINED_NBYTES and plain is not None and plain.decompress is not None:
                    joined = plain.decode_all(values, shape)
                    if joined is not None:
                        return joined
                return [*map(slabs.decode_one, values)]
        chunks = np.empty((len(values), *shape), self.dtype)
        reader.decode_run(lambda i: reader.keys(coords[i : i + 1])[0], values, chunks)
        return chunks

    def buffer(self, n: int, make: Callable[[int], Any]) -> npt.NDArray[Any]:
        """Return an uninitialized array for `n` samples, with all axes."""
        shape = (n, *self.geometry.lengths)
        if self.dtype.kind not in PLAIN_KINDS:
            return np.empty(shape, self.dtype)
        return make(math.prod(shape) * self.dtype.itemsize).view(self.dtype).reshape(shape)

    def of_user(self, buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the samples without the axis of rows."""
        return buffer.squeeze(1 + self.geometry.axes[0]) if self.squeezes else buffer


class Memory:
    """Memory of delivered batches, used again when the consumer has dropped them.

    The first write to new memory takes as long as half of the decoding. An array is free when the
    list alone refers to it: all views refer to the array that owns the memory.
    """

    def __init__(self, make: Callable[[int], npt.NDArray[np.uint8]], n_kept: int) -> None:
        self._make = make
        self._delivered: deque[npt.NDArray[np.uint8]] = deque(maxlen=n_kept)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return uninitialized memory, aligned as every framework can share it."""
        for _ in range(len(self._delivered)):
            owner = self._delivered.popleft()
            if sys.getrefcount(owner) > _FREE_REFERENCES:
                self._delivered.append(owner)
            elif owner.nbytes == nbytes + _ALIGNMENT:
                break
        else:
            owner = self._make(nbytes + _ALIGNMENT)
        start = -owner.ctypes.data % _ALIGNMENT
        return owner[start : start + nbytes]

    def give_back(self, view: npt.NDArray[Any]) -> None:
        """Note the memory of a batch that the consumer gets now."""
        if view.base is not None and view.dtype.kind in PLAIN_KINDS:
            self._delivered.append(view.base)


_FREE_REFERENCES = 2
"""References to an array that only a variable has, as `sys.getrefcount` counts them."""

_MOST_KEPT = 16


@dataclass
class Counts:
    """Counts of a run, for any thread to read."""

    n_batches: int = 0
    n_samples: int = 0
    n_chunks: int = 0
    n_reads: int = 0
    nbytes_read: int = 0
    nbytes_delivered: int = 0
    most_nbytes: int = 0
    waited_s: float = 0.0
    began: float = 0.0
    last: float = 0.0
    """Time at which the consumer got the last batch."""


@dataclass(eq=False)
class _Batch:
    start: int
    stop: int
    nbytes: int
    n_left: int
    """Parts that are not decoded, and samples that are not planned."""
    buffers: list[Any] | None = None
    result: Any = None
    is_done: bool = False


class _Reading:
    """A unit under way."""

    def __init__(self, array: int, unit: Unit, batches: Sequence[int]) -> None:
        self.array, self.unit, self.batches = array, unit, batches
        self.reserved = unit.most_nbytes
        self.n_runs = 1
        self.future: Future[Any] | None = None


class Task(NamedTuple):
    """All that a run does: arrays, samples in order, and limits in bytes."""

    sources: Sequence[Source]
    samples: Samples
    order: Order
    batch_ends: Ints
    first_batch: int
    block: int
    """Samples whose chunks are read first; 0 for an order that is shuffled in groups."""
    limit_nbytes: int
    unit_nbytes: int
    n_threads: int
    finish: Callable[[list[npt.NDArray[Any]]], Any]
    make_buffer: Callable[[int], Any]

    def plan(self, group: int, start: int) -> Iterator[tuple[int, Geometry, Parts]]:
        """Yield the parts of a group of samples, from a position on, for each array."""
        ends = self.order.group_ends
        first, stop = max(start, ends[group - 1] if group else 0), ends[group]
        slots = np.arange(first, stop, dtype=np.int64)
        starts = self.samples.starts(self.order.numbers[first:stop])
        block = self.block or len(slots)
        for i, source in enumerate(self.sources):
            yield i, source.geometry, source.geometry.parts(starts, slots, block)


class Run:
    """State of one epoch, shared by the consumer, the threads and the event loop."""

    def __init__(self, task: Task) -> None:
        self.task, self.counts, self.pid = task, Counts(), os.getpid()
        self._lock = threading.RLock()
        self._has_job, self._has_batch = (threading.Condition(self._lock) for _ in range(2))
        self._jobs: deque[Callable[[], None]] = deque()
        self._units: deque[_Reading] = deque()
        self._under_way: set[_Reading] = set()
        self._used = self._n_of_group = 0
        self._is_planning = self._is_stopped = False
        self._error: BaseException | None = None
        ends, sample_nbytes = task.batch_ends, [s.geometry.sample_nbytes for s in task.sources]
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        n_each = len(task.sources)
        pairs = zip(begins.tolist(), ends.tolist(), strict=False)
        self._batches = {
            i: _Batch(start, stop, (stop - start) * sum(sample_nbytes), (stop - start) * n_each)
            for i, (start, stop) in enumerate(pairs)
            if i >= task.first_batch
        }
        largest = max((batch.nbytes for batch in self._batches.values()), default=0)
        n_kept = min(_MOST_KEPT, task.limit_nbytes // 16 // max(1, largest))
        self._memory = Memory(task.make_buffer, max(2, n_kept) * n_each)
        self._next = task.first_batch
        self._start = self._batches[self._next].start if self._batches else 0
        group_ends = np.array(task.order.group_ends, np.int64)
        self._group = int(np.searchsorted(group_ends, self._start, side="right"))
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------ threads

    def begin(self) -> None:
        self.counts.began = self.counts.last = time.perf_counter()
        with self._lock:
            self._pump()
        for i in range(self.task.n_threads):
            name = f"zarr-shardstore-loader-{i}"
            thread = threading.Thread(target=_work, args=(self,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def take(self) -> Callable[[], None] | None:
        """Return the next job; ``None`` when the run is over."""
        with self._lock:
            while not self._jobs:
                if self._is_stopped:
                    return None
                self._has_job.wait()
            return self._jobs.popleft()

    def stop(self, *, waits: bool = True) -> None:
        """End all threads and requests. It may be called twice, and in a garbage collection."""
        if os.getpid() != self.pid:
            return  # a forked child has none of them
        with self._lock:
            self._is_stopped = True
            self._jobs.clear()
            self._units.clear()
            self._batches.clear()
            under_way = [each.future for each in self._under_way if each.future is not None]
            self._under_way.clear()
            self._has_job.notify_all()
            self._has_batch.notify_all()
        for future in under_way:
            future.cancel()
        for thread in self._threads if waits else ():
            if thread is not threading.current_thread():
                thread.join()

    def fail(self, error: BaseException) -> None:
        """End the run by an error that the consumer gets."""
        with self._lock:
            if self._is_stopped:
                return
            self._error = error
        self.stop(waits=False)

    # ----------------------------------------------------------------- consumer

    def next_batch(self) -> Any:
        """Return the next batch when it is complete."""
        if os.getpid() != self.pid:
            raise UnsupportedError(
                "a fork has copied this iterator, but none of its threads: iterate over the "
                "loader in the process that uses the batches"
            )
        began = time.perf_counter()
        with self._lock:
            if self._next >= len(self.task.batch_ends):
                raise StopIteration
            while (batch := self._batches.get(self._next)) is None or not batch.is_done:
                if self._error is not None:
                    raise self._error
                if self._is_stopped:
                    raise StopIteration
                if batch is not None and batch.start == batch.stop and batch.buffers is None:
                    self._open(batch)
                    self._complete(batch)
                self._has_batch.wait()
            for buffer in batch.buffers or ():
                self._memory.give_back(buffer)
            batch.buffers = None
            del self._batches[self._next]
            self._next += 1
            self._used -= batch.nbytes
            self._pump()
            self.counts.n_batches += 1
            self.counts.n_samples += batch.stop - batch.start
            self.counts.nbytes_delivered += batch.nbytes
            self.counts.last = time.perf_counter()
            self.counts.waited_s += self.counts.last - began
        return batch.result

    # --------------------------------------------------------- plan, under lock

    def _pump(self) -> None:
        """Begin units while there is room, and plan the next group before they run out."""
        task = self.task
        while self._units and not self._is_stopped:
            reading = self._units[0]
            opened = [b for i in reading.batches if (b := self._batches[i]).buffers is None]
            nbytes = reading.reserved + sum(batch.nbytes for batch in opened)
            is_idle = not self._under_way and not self._batches[self._next].is_done
            if self._used + nbytes > task.limit_nbytes and not is_idle:
                break
            self._units.popleft()
            self._used += reading.reserved
            for batch in opened:
                self._open(batch)
            self._under_way.add(reading)
            self.counts.most_nbytes = max(self.counts.most_nbytes, self._used)
            self._read(reading)
        is_short = 2 * len(self._units) <= self._n_of_group
        has_more = self._group < len(task.order.group_ends)
        if is_short and has_more and not self._is_planning and not self._is_stopped:
            self._is_planning = True
            self._jobs.appendleft(self._plan)
            self._has_job.notify()

    def _open(self, batch: _Batch) -> None:
        n, task = batch.stop - batch.start, self.task
        batch.buffers = [source.buffer(n, self._memory.take) for source in task.sources]
        self._used += batch.nbytes

    def _plan(self) -> None:
        task, group = self.task, self._group
        ends, readings = task.batch_ends, []
        counted = []
        for array, geometry, parts in task.plan(group, self._start):
            owners = np.searchsorted(ends, parts.slots, side="right")
            counted += [np.unique(owners, return_counts=True)]
            for unit in geometry.units(parts, task.unit_nbytes):
                lo, hi = parts.bounds[unit.cuts[0]], parts.bounds[unit.cuts[-1]]
                readings.append(_Reading(array, unit, np.unique(owners[lo:hi]).tolist()))
        if len(task.sources) > 1:  # side by side: a batch needs all arrays
            readings.sort(key=lambda reading: reading.batches[0] if task.block else 0)
        first = max(self._start, task.order.group_ends[group - 1] if group else 0)
        slots = np.arange(first, task.order.group_ends[group])
        of_samples = np.unique(np.searchsorted(ends, slots, side="right"), return_counts=True)
        with self._lock:
            if self._is_stopped:
                return
            for numbers, counts in counted:
                for number, n in zip(numbers.tolist(), counts.tolist(), strict=True):
                    self._batches[number].n_left += n
            for number, n in zip(*map(np.ndarray.tolist, of_samples), strict=True):
                self._count_parts(number, n * len(task.sources))
            self._units.extend(readings)
            self._n_of_group, self._group = len(readings), group + 1
            self._is_planning = False
            self._pump()

    def _count_parts(self, number: int, n: int) -> None:
        batch = self._batches[number]
        batch.n_left -= n
        if not batch.n_left:
            if batch.buffers is None:  # samples without elements
                self._open(batch)
            self._complete(batch)

    def _complete(self, batch: _Batch) -> None:
        def finish() -> None:
            assert batch.buffers is not None
            pairs = zip(self.task.sources, batch.buffers, strict=True)
            result = self.task.finish([source.of_user(buffer) for source, buffer in pairs])
            with self._lock:
                batch.result, batch.is_done = result, True
                self._has_batch.notify()

        self._jobs.appendleft(finish)
        self._has_job.notify()

    # ------------------------------------------------------------------- units

    def _read(self, reading: _Reading) -> None:
        entries = self.task.sources[reading.array].entries
        if entries.can_block:

            def read() -> None:
                try:
                    values = entries.read(reading.unit.reads())
                except Exception as error:
                    self._fail(reading, error)
                else:
                    self._decode_later(reading, values, decodes=True)

            self._jobs.append(read)
            self._has_job.notify()
        else:
            reading.future = entries.begin(reading.unit.reads())
            reading.future.add_done_callback(partial(self._has_read, reading))

    def _has_read(self, reading: _Reading, future: Future[Any]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._fail(reading, error)
        else:
            self._decode_later(reading, future.result())

    def _fail(self, reading: _Reading, error: BaseException) -> None:
        task, parts, cuts = self.task, reading.unit.parts, reading.unit.cuts
        source = task.sources[reading.array]
        lo, hi = parts.bounds[cuts[0]], parts.bounds[cuts[-1]]
        numbers = np.unique(task.order.numbers[parts.slots[lo:hi]]).tolist()
        shards = [source.entries.key(shard) for shard, _ in reading.unit.reads()[:3]]
        more = ", …" if len(cuts) > 4 else ""
        some = f"{len(numbers)} samples, the first of them {numbers[:8]}"
        error.add_note(f"in {', '.join(map(repr, shards))}{more}, with parts of {some}")
        self.fail(error)

    def _decode_later(
        self, reading: _Reading, values: Sequence[Any], *, decodes: bool = False
    ) -> None:
        source = self.task.sources[reading.array]
        first, stop = reading.unit.cuts[0], reading.unit.cuts[-1]
        length = max(1, RUN_NBYTES // source.geometry.chunk_nbytes)
        runs = [(lo, min(lo + length, stop)) for lo in range(first, stop, length)]
        objects = [v.obj if isinstance(v, memoryview) else v for v in values if v is not None]
        nbytes = sum(memoryview(v).nbytes for v in {id(v): v for v in objects}.values())
        nbytes = min(nbytes, reading.reserved)  # values of a mapping are in memory anyway
        with self._lock:
            if self._is_stopped:
                return
            self._used += nbytes - reading.reserved
            reading.reserved, reading.n_runs = nbytes, len(runs)
            self.counts.nbytes_read += sum(len(v) for v in values if v is not None)
            self.counts.n_reads += 1
            self.counts.n_chunks += stop - first
            jobs = [
                partial(self._decode, reading, values[lo - first : hi - first], lo, hi)
                for lo, hi in runs
            ]
            mine = jobs.pop(0) if decodes else None
            self._jobs.extendleft(reversed(jobs))
            self._has_job.notify(len(jobs))
            self._pump()
        if mine is not None:  # the bytes are in the cache of this core
            mine()

    def _decode(self, reading: _Reading, values: Sequence[Any], lo: int, hi: int) -> None:
        task, parts = self.task, reading.unit.parts
        source = task.sources[reading.array]
        slots = parts.slots[parts.bounds[lo] : parts.bounds[hi]]
        owners = np.searchsorted(task.batch_ends, slots, side="right")
        numbers, counts = np.unique(owners, return_counts=True)
        with self._lock:
            if self._is_stopped:
                return
            batches = {i: self._batches[i] for i in numbers.tolist()}
        buffers = {i: (b.start, b.buffers[reading.array]) for i, b in batches.items() if b.buffers}
        try:
            decode_parts(source, parts, values, lo, hi, owners, buffers)
        except Exception as error:
            self._fail(reading, error)
            return
        with self._lock:
            if self._is_stopped:
                return
            for number, n in zip(numbers.tolist(), counts.tolist(), strict=True):
                self._count_parts(number, n)
            reading.n_runs -= 1
            if not reading.n_runs:
                self._under_way.discard(reading)
                self._used -= reading.reserved
            self._pump()


def decode_parts(
    source: Source,
    parts: Parts,
    values: Sequence[Any],
    lo: int,
    hi: int,
    owners: Ints,
    buffers: dict[int, tuple[int, npt.NDArray[Any]]],
) -> None:
    """Decode chunks `lo` to `hi`, and copy their parts into the buffers of the batches."""
    geometry = source.geometry
    first, stop = int(parts.bounds[lo]), int(parts.bounds[hi])
    offsets, slots = parts.offsets[first:stop], parts.slots[first:stop]
    chunk_of = np.repeat(np.arange(hi - lo), np.diff(parts.bounds[lo : hi + 1]))
    chunks = source.decode(values, parts.chunks[lo:hi])
    if geometry.are_rows and isinstance(chunks, np.ndarray):
        rows = chunks.reshape(-1, 1, *geometry.chunk_shape[1:])
        rows = rows[(..., *map(slice, geometry.lengths[1:]))]
        places = chunk_of * geometry.chunk_shape[0] + offsets[:, 0]
        for owner, (start, buffer) in buffers.items():
            some = owners == owner
            _copy_rows(rows, places[some], buffer, slots[some] - start)
        return
    lengths, sides = np.array(geometry.lengths), np.array(geometry.chunk_shape)
    here, end = np.maximum(offsets, 0), np.minimum(offsets + lengths, sides)
    there = here - offsets
    columns = (chunk_of, here, end, there, there + end - here, slots, owners)
    for i, a, b, c, d, slot, owner in zip(*map(np.ndarray.tolist, columns), strict=True):
        start, buffer = buffers[owner]
        buffer[(slot - start, *map(slice, c, d))] = chunks[i][tuple(map(slice, a, b))]


def _copy_rows(
    rows: npt.NDArray[Any], places: Ints, buffer: npt.NDArray[Any], slots: Ints
) -> None:
    n = len(slots)
    if (np.diff(slots) == 1).all() and (np.diff(places) == 1).all():
        buffer[slots[0] : slots[0] + n] = rows[places[0] : places[0] + n]
    elif rows[:1].nbytes >= _COPIED_NBYTES:
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            buffer[slot] = rows[place]
    else:
        buffer[slots] = rows[places]


def _work(run: Run) -> None:
    while (job := run.take()) is not None:
        try:
            job()
        except BaseException as error:
            run.fail(error)
        del job


class Batches:
    """Iterator over the batches of one epoch. Close it, or drop it, to end its threads."""

    def __init__(self, task: Task, delivered: Callable[[], None]) -> None:
        self.run = Run(task)
        self._delivered = delivered
        self._finalizer = weakref.finalize(self, self.run.stop, waits=False)
        self.run.begin()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        try:
            batch = self.run.next_batch()
        except BaseException:
            self.close()
            raise
        self._delivered()
        return batch

    def close(self) -> None:
        """End all threads and requests of this iterator at once."""
        self.run.stop()
        self._finalizer.detach()
