"""`FrameWriter`: appends frames to an array that others read while it grows.

::

    append ──▶ buffer ──▶ 1. chunks behind the end ──▶ 2. shape in the document ──▶ n_durable

`growing_array.py` has the rules that make a flush safe; `frame_buffer.py` has the thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import array_path, whole_number
from zarr_shardstore.store.frame_buffer import FlushThread, FrameBuffer
from zarr_shardstore.store.growing_array import GrowingArray
from zarr_shardstore.store.upkeep import Upkeep

DEFAULT_FLUSH_NBYTES = 128 * 1024 * 1024
"""More than a shard of ``chunks_per_shard="auto"``, so that most shards are stored once."""


class FrameWriter:
    """A writer that appends frames to an array; `ShardingStore.append_frames` makes it.

    Use it by ``with``: its end, also by an exception, stores what is buffered.

    Frames are buffered, and stored by a thread of the writer: some time or some bytes later, or by
    `flush`. Each flush stores the chunks, and then the new shape of the array. So `n_durable`
    frames, and no others, are in the array for every reader, who opens it again to see more.

    Notes
    -----
    Thread safety: any thread may call any method. Frames of concurrent calls are in any order, each
    call's together.

    Cost of a flush: one update of each shard with new frames, and a read and a write of the
    document.

    If a flush fails, the frames stay buffered. The next call repeats it, and raises the error if it
    fails again: the frames of that call are not taken then. `close` tries it once more.
    """

    def __init__(
        self,
        store: Upkeep,
        path: str,
        flush_s: float | None,
        flush_nbytes: int,
        create: Mapping[str, Any],
    ) -> None:
        flush_nbytes = whole_number("flush_nbytes", flush_nbytes, 1)
        given_s = None if flush_s is None else float(flush_s)
        self._array = array = GrowingArray(store, array_path(path), dict(create))
        usual_s = 1.0 if array.appends else 10.0
        self._buffer = FrameBuffer(array.first)
        self._thread = FlushThread(
            self._buffer,
            array.append,
            array.row_length,
            usual_s if given_s is None else given_s,
            flush_nbytes,
        )

    @property
    def n_durable(self) -> int:
        """Number of frames that are stored, and in the array for every reader.

        They survive a kill of this process; a loss of power, too, if the store has
        ``durability="power"`` or is an object store.
        """
        return self._buffer.n_durable

    @property
    def n_appended(self) -> int:
        """Number of frames of the array and in the buffer."""
        with self._thread.changed:
            return self._buffer.end

    def append(self, frame: npt.ArrayLike) -> None:
        """Append one frame, an array of the shape of a frame; see `extend`."""
        self.extend(np.asarray(frame)[np.newaxis])

    def extend(self, frames: npt.ArrayLike) -> None:
        """Append frames, an array of the shape n x shape of a frame, which is copied.

        The call waits only if twice `flush_nbytes` are buffered.

        Raises
        ------
        SpecError
            If the shape or the data type is not that of the array, or the writer is closed.
        ShardConflictError
            If another writer has changed the array.
        """
        new = np.array(frames)
        if new.ndim == 0:
            raise SpecError("frames have a first dimension, that of their number")
        self._check_open()
        with self._thread.changed:
            self._array.check_or_create(new)
        with self._thread.changed:
            self._thread.wait_for_room()
            self._check_open()
            self._buffer.add(new)
            self._thread.wake()

    def flush(self) -> None:
        """Store all frames that are buffered, and the new shape; errors as of `extend`."""
        self._check_open()
        with self._thread.changed:
            self._thread.flush()

    def close(self) -> None:
        """Flush, seal the shards, and let other writers append; once more is nothing."""
        self._thread.close()
        if not self._array.close():
            return
        if (error := self._thread.error) is not None:
            n_durable = self._buffer.n_durable
            n_lost = self._buffer.end - n_durable
            error.add_note(f"{n_lost} frames behind the first {n_durable} are lost")
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._thread.has_ended:
            raise SpecError(f"the writer of frames of {self._array.path!r} is closed")
