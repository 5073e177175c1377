"""`FrameWriter`: appends frames to an array that others read while it grows.

::

    append ──▶ buffer ──▶ 1. chunks after the end ──▶ 2. shape in the document ──▶ n_durable

Two rules, in this order, make a flush safe at any line:

1. The writer stores the chunks of new frames after the end of the array, where no reader looks.
   Only the writer sees an array without an end, see `ArrayReader.lengths`. A chunk that the end
   cuts keeps its older frames: its new bytes replace the old bytes in one step.
2. Then one compare-and-swap gives the document the new shape. The frames below the shape are the
   durable frames, for every reader, in each program.

A kill before step 2 leaves chunks after the end. The next writer begins at the shape, and
overwrites them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Self, TypeAlias
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import array_path, whole_number
from zarr_shardstore.store.growing.growing_array import GrowingArray
from zarr_shardstore.store.upkeep import Upkeep
from zarr_shardstore.telemetry import warn

Frames: TypeAlias = npt.NDArray[Any]

DEFAULT_FLUSH_NBYTES = 128 * 1024 * 1024
"""More than a shard of ``chunks_per_shard="auto"``, so that most shards are stored once."""


class FrameWriter:
    """A writer that appends frames to an array; `ShardingStore.append_frames` makes it.

    Use it with ``with``. The end of the block, also by an exception, stores the buffered frames.
    Without ``with``, call `close`: the end of the program stores no frames, it only warns.

    A thread of the writer stores buffered frames after some time, after some bytes, or by `flush`.
    Each flush stores the chunks, and then the new shape of the array. So the array has `n_durable`
    frames for every reader. A reader opens the array again to see more.

    Notes
    -----
    Thread safety: any thread may call any method. The frames of one call stay together.

    Cost of a flush: one update of each shard with new frames, a read and a write of the document.

    If a flush fails, the frames stay buffered, and the next call tries again. If that fails too,
    the call raises the error and takes no frames. `close` tries once more.
    """

    def __init__(
        self,
        store: Upkeep,
        path: str,
        flush_s: float | None,
        flush_nbytes: int,
        create: Mapping[str, Any],
    ) -> None:
        self._flush_nbytes = whole_number("flush_nbytes", flush_nbytes, 1)
        given_s = None if flush_s is None else float(flush_s)
        self._array = array = GrowingArray(store, array_path(path), dict(create))
        usual_s = 1.0 if array.appends else 10.0
        self._flush_s = usual_s if given_s is None else given_s
        self._buffer = FrameBuffer(array.first)
        self._lock = threading.RLock()
        """Guards the buffer and all below; waits for no I/O. To enter it by a `Condition` is Python
        code, where an interrupt would leave it locked."""
        self._changed = threading.Condition(self._lock)
        self._error: BaseException | None = None
        self._is_closed = False
        self._flushed_at = time.monotonic()
        self._wanted = 0  # frames to be flushed now
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        _writers().add(self)

    @property
    def n_durable(self) -> int:
        """Number of frames that are stored, and in the array for every reader.

        They survive a kill of this process. They also survive a loss of power if the store has
        ``durability="power"`` or is an object store.
        """
        return self._buffer.n_durable

    @property
    def n_appended(self) -> int:
        """Number of frames in the array and in the buffer."""
        with self._lock:
            return self._buffer.end

    def append(self, frame: npt.ArrayLike) -> None:
        """Append one frame, an array of the shape of a frame; see `extend`."""
        self.extend(np.asarray(frame)[np.newaxis])

    def extend(self, frames: npt.ArrayLike) -> None:
        """Append a copy of frames, an array of the shape n x shape of a frame.

        The call waits only if twice `flush_nbytes` are buffered.

        Raises
        ------
        SpecError
            If the array has another shape or data type, or the writer is closed.
        ShardConflictError
            If another writer has changed the array.
        """
        new = np.array(frames)
        if new.ndim == 0:
            raise SpecError("frames have a first dimension, that of their number")
        self._check_open()
        with self._lock:
            self._array.check_or_create(new)
            self._changed.wait_for(
                lambda: self._buffer.nbytes < 2 * self._flush_nbytes or self._error is not None
            )
            if self._error is not None:
                self._flush()
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._is_closed = True  # it may run: then it ends, and `close` sees none
                    raise
            self._buffer.add(new)
            self._changed.notify_all()

    def flush(self) -> None:
        """Store all buffered frames, and the new shape; raises the errors of `extend`."""
        self._check_open()
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._check_open()  # the thread of a closed writer has ended
        wanted = self._wanted = self._buffer.end
        self._error = None
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._buffer.n_durable >= wanted or self._error is not None)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Flush, seal the shards, and let other writers append.

        Neither a second call nor a call in a forked child has an effect.
        """
        if os.getpid() != self._pid:  # a fork has copied it, perhaps with its lock taken
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed, self._error = True, None  # so the thread tries once more
            self._changed.notify_all()
        if self._thread is not None:
            with suppress(RuntimeError):  # an interrupt cut its start off, and it has no frames
                self._thread.join()
        n_durable, error = self._buffer.n_durable, self._error
        try:
            if not self._array.close(n_durable):
                return
        except Exception as found:
            error = error or found
        if error is not None:
            n_lost = self._buffer.end - n_durable
            if n_lost:
                error.add_note(f"{n_lost} frames after the first {n_durable} are lost")
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        # The thread of a parent has ended in a forked child.
        if self._is_closed or (self._thread is not None and os.getpid() != self._pid):
            raise SpecError(f"the writer of frames of {self._array.path!r} is closed")

    def _warn_of_lost_frames(self) -> None:
        """Warn of frames that no flush has stored."""
        n_lost = self._buffer.end - self._buffer.n_durable
        if n_lost and not self._is_closed and os.getpid() == self._pid:
            warn(
                f"the last {n_lost} frames of {self._array.path!r} were never stored: use the "
                "writer of frames in a `with` block, or call its close()"
            )

    def _wait_s(self) -> float | None:
        """Return the time until a flush is due; ``None``: wait for a change."""
        buffer = self._buffer
        if buffer.end == buffer.n_durable or self._error is not None:
            return None
        is_full = buffer.nbytes >= self._flush_nbytes
        if self._is_closed or self._wanted > buffer.n_durable or is_full:
            return 0
        return min(self._flushed_at + self._flush_s - time.monotonic(), threading.TIMEOUT_MAX)

    def _next_stop(self) -> int:
        """Return the number of frames after the next flush."""
        buffer, row_length = self._buffer, self._array.row_length
        n_at_once = max(1, self._flush_nbytes // (buffer.frame_nbytes or 1))
        stop = min(buffer.end, buffer.n_durable + n_at_once)
        rows_end = stop // row_length * row_length
        if buffer.nbytes >= self._flush_nbytes and rows_end > buffer.n_durable:
            return rows_end  # so that no shard is stored twice
        return stop

    def _work(self) -> None:
        """Store buffered frames, in the thread: after some time or bytes, or when asked.

        An interrupt of a caller's thread would leave a write under way in zarr's event loop. This
        write could end after the next one. So no caller stores frames itself.
        """
        buffer = self._buffer
        while True:
            error: BaseException | None = None
            is_last = False
            try:
                with self._lock:
                    while (wait_s := self._wait_s()) is None or wait_s > 0:
                        if self._is_closed:
                            return
                        self._changed.wait(wait_s)
                    is_last = self._is_closed
                    start, stop = buffer.n_durable, self._next_stop()
                    parts = buffer.frames_up_to(stop)
                self._array.append(np.concatenate(parts), start)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._flushed_at = time.monotonic()
                self._error = error if is_last or not self._is_closed else None
                if error is None:
                    buffer.drop_up_to(stop)
                self._changed.notify_all()


class FrameBuffer:
    """Appended frames after the durable ones, in their order; a lock of the owner guards it."""

    def __init__(self, n_durable: int) -> None:
        self.n_durable = n_durable
        self._blocks: deque[tuple[int, Frames]] = deque()
        """Number of the first frame, and frames. Durable frames are no longer buffered."""

    @property
    def end(self) -> int:
        if not self._blocks:
            return self.n_durable
        first, frames = self._blocks[-1]
        return max(self.n_durable, first + len(frames))

    @property
    def frame_nbytes(self) -> int:
        return self._blocks[-1][1][:1].nbytes if self.end > self.n_durable else 0

    @property
    def nbytes(self) -> int:
        return (self.end - self.n_durable) * self.frame_nbytes

    def add(self, frames: Frames) -> None:
        if len(frames):
            self._blocks.append((self.end, frames))

    def frames_up_to(self, stop: int) -> list[Frames]:
        """Return the buffered frames before `stop`."""
        start = self.n_durable
        return [f[max(0, start - i) : stop - i] for i, f in self._blocks if i < stop]

    def drop_up_to(self, stop: int) -> None:
        """Count frames as durable."""
        self.n_durable = stop
        while self._blocks and self._blocks[0][0] + len(self._blocks[0][1]) <= stop:
            self._blocks.popleft()


@cache
def _writers() -> WeakSet[FrameWriter]:
    """Return all writers. The end of the program looks for frames in them; an import does not."""
    writers = WeakSet[FrameWriter]()

    def end() -> None:
        for writer in writers:
            writer._warn_of_lost_frames()

    atexit.register(end)
    return writers
