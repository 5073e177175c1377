"""Frames that are not stored yet, and the thread that stores them when it is due."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Frames: TypeAlias = npt.NDArray[Any]


class FrameBuffer:
    """Appended frames behind the durable ones, in their order; a lock of the owner guards it."""

    def __init__(self, n_durable: int) -> None:
        self.n_durable = n_durable
        self._blocks: deque[tuple[int, Frames]] = deque()
        """Number of the first frame, and frames; those that are durable are no more buffered."""

    @property
    def end(self) -> int:
        """Number of durable and buffered frames."""
        return max(self.n_durable, _stop(*self._blocks[-1]) if self._blocks else 0)

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
        while self._blocks and _stop(*self._blocks[0]) <= stop:
            self._blocks.popleft()


def _stop(first: int, frames: Frames) -> int:
    return first + len(frames)


class FlushThread:
    """A thread that stores buffered frames: after some time, after some bytes, or when asked.

    No thread of a caller stores them: an interrupt of a caller would leave a write under way in
    zarr's event loop, which ends after the next one.
    """

    def __init__(
        self,
        buffer: FrameBuffer,
        append: Callable[[Frames, int], None],
        row_length: Callable[[], int],
        flush_s: float,
        flush_nbytes: int,
    ) -> None:
        self._buffer, self._append = buffer, append
        self._flush_s, self._flush_nbytes = flush_s, flush_nbytes
        self._row_length = row_length
        self.changed = threading.Condition()
        """Guards the buffer and all below; waits for no I/O."""
        self.error: BaseException | None = None
        self._is_closed = False
        self._flushed_at = 0.0
        self._wanted = 0  # so many frames are to be flushed now
        self._thread: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it stores nothing any more; a forked child has no thread of its parent."""
        return self._is_closed or (self._thread is not None and not self._thread.is_alive())

    def wait_for_room(self) -> None:
        """Wait until less than twice `flush_nbytes` are buffered; under `changed`."""
        self.changed.wait_for(
            lambda: self._buffer.nbytes < 2 * self._flush_nbytes or self.error is not None
        )
        if self.error is not None:
            self.flush()

    def wake(self) -> None:
        """Let the thread look at the buffer; under `changed`."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, daemon=True)
            thread.start()
            self._thread = thread  # one that is not alive has ended
        self.changed.notify_all()

    def flush(self) -> None:
        """Wait until all that is buffered now is stored; under `changed`."""
        wanted = self._wanted = self._buffer.end
        self.error = None
        self.changed.notify_all()
        self.changed.wait_for(lambda: self._buffer.n_durable >= wanted or self.error is not None)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Try once more to store what is buffered, and end the thread."""
        with self.changed:
            self._is_closed, self.error = True, None
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wait_s(self) -> float | None:
        """Return in which time a flush is due; ``None``: not before something changes."""
        buffer = self._buffer
        if buffer.end == buffer.n_durable or self.error is not None:
            return None
        is_full = buffer.nbytes >= self._flush_nbytes
        if self._is_closed or self._wanted > buffer.n_durable or is_full:
            return 0
        wait_s = self._flushed_at + self._flush_s - time.monotonic()
        return min(wait_s, threading.TIMEOUT_MAX)

    def _next_stop(self) -> int:
        """Return the number of frames after the next flush."""
        buffer = self._buffer
        n_at_once = max(1, self._flush_nbytes // (buffer.frame_nbytes or 1))
        stop = min(buffer.end, buffer.n_durable + n_at_once)
        row_length = self._row_length()
        rows_end = stop // row_length * row_length
        if buffer.nbytes >= self._flush_nbytes and rows_end > buffer.n_durable:
            return rows_end  # a shard with some frames would be stored twice
        return stop

    def _work(self) -> None:
        """Store frames when it is due."""
        buffer = self._buffer
        while True:
            with self.changed:
                while (wait_s := self._wait_s()) is None or wait_s > 0:
                    if self._is_closed:
                        return
                    self.changed.wait(wait_s)
                start, stop = buffer.n_durable, self._next_stop()
                parts = buffer.frames_up_to(stop)
            error: BaseException | None = None
            try:
                self._append(np.concatenate(parts), start)
            except BaseException as raised:
                error = raised
            with self.changed:
                self.error, self._flushed_at = error, time.monotonic()
                if error is None:
                    buffer.drop_up_to(stop)
                self.changed.notify_all()
