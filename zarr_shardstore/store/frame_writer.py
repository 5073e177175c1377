"""`FrameWriter`: appends frames to an array that others read while it grows.

::

    append ──▶ buffer ──▶ 1. chunks behind the end ──▶ 2. shape in the document ──▶ n_durable

Two rules, in this order, make a flush safe at any line:

1. Chunks of new frames are stored behind the end of the array, where no reader looks. The writer
   alone takes the array for one without an end, see `ArrayReader.lengths`. A chunk that the end
   cuts keeps its older frames: its new bytes replace the old ones in one step.
2. Then the document gets the new shape, by one compare and swap. The frames below the shape are
   those that are durable, for every reader, in each program.

A kill before step 2 leaves chunks behind the end. The next writer begins at the shape, and writes
over them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import zarr
from zarr import AsyncArray
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import StorePath

from zarr_shardstore.arrays.array_cache import invalidate_documents, read_documents
from zarr_shardstore.errors import ShardConflictError, SpecError, UnsupportedError
from zarr_shardstore.format.arguments import array_path, whole_number
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, KeptLock
from zarr_shardstore.metadata.documents import (
    Node,
    document_key,
    dump_document,
    parse_json,
    without_notes,
)
from zarr_shardstore.shards.requests import Modify, relay
from zarr_shardstore.store.engine import ShardingEngine

if TYPE_CHECKING:
    from zarr_shardstore.store.sharding_store import ShardingStore

DEFAULT_FLUSH_NBYTES = 128 * 1024 * 1024
"""More than a shard of ``chunks_per_shard="auto"``, so that most shards are stored once."""

_writers: dict[Hashable, FrameWriter] = {}
"""Those of this process that are open."""


_MAX_FRAMES = 2**48
"""Frames along the first dimension for the writer alone: more than any acquisition has."""


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
        store: ShardingStore,
        path: str,
        flush_s: float | None,
        flush_nbytes: int,
        create: Mapping[str, Any],
    ) -> None:
        self._flush_nbytes = whole_number("flush_nbytes", flush_nbytes, 1)
        self._store, self._path, self._create = store, array_path(path), dict(create)
        # An engine of its own: others of this process see the array with its end, and an open
        # batch of the store buffers no frames.
        self._engine = ShardingEngine(store.base, store._engine.options)
        self._private = store._of(self._engine, False)
        if flush_s is None:
            flush_s = 1 if self._engine.appends else 10
        self._flush_s = float(flush_s)
        self._array: AsyncArray[Any] | None = None
        self._node = Node("v3", self._path)
        self._form: dict[str, Any] = {}
        self._row_length = 1  # frames in a shard
        self._n_durable = self._first = self._target = 0
        self._blocks: deque[tuple[int, npt.NDArray[Any]]] = deque()
        """Number of the first frame, and frames; those that are durable are no more buffered."""
        self._flushed_at = 0.0
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        """Guards the blocks; waits for no I/O."""
        self._wanted = 0  # so many frames are to be flushed now
        self._thread: threading.Thread | None = None
        self._lock: KeptLock | None = None
        if isinstance(store.base, Store) and not store.base.supports_deletes:
            raise UnsupportedError(
                f"in {store.base} nothing can be replaced, so no array can grow: append to another "
                "store, and copy it"
            )
        self._scope = self._engine.driver.backend.scope(self._path)
        if _writers.setdefault(self._scope, self) is not self:
            raise ShardConflictError(self._busy)
        try:
            backend = self._engine.driver.backend
            if isinstance(backend, LocalBackend) and store._engine.options.locking == "os":
                name = f"{self._node.chunk_prefix}frames{LOCK_SUFFIX}"
                lock = KeptLock(backend.real_root + name)
                lock.acquire(0, self._busy)
                self._lock = lock
            self._find()
        except BaseException:
            self._release()
            raise

    @property
    def _busy(self) -> str:
        return f"frames are appended to {self._path!r} already: close that writer first"

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.remove()
        _writers.pop(self._scope, None)

    # ------------------------------------------------------------------ the array

    def _find(self) -> None:
        """Open the array, if there is one."""
        engine = self._engine
        arrays, run = engine.operations.arrays, engine.driver.run
        for node in (Node("v3", self._path), Node("v2", self._path)):
            (reply,) = run(read_documents([document_key(node)]))
            found = arrays.read(node, reply.value)
            if found is not None and reply.value is not None:
                break
        else:
            return
        geometry = found.document.geometry
        if geometry is None or not geometry.shape:
            raise SpecError(f"the array {self._path!r} has no first dimension that can grow")
        arrays.reader.lengths[node] = _MAX_FRAMES
        self._node, self._form = node, _form_of(reply.value)
        zarr_format: Any = 2 if node.hierarchy == "v2" else 3
        place = StorePath(self._private, self._path)
        array = sync(AsyncArray.open(place, zarr_format=zarr_format))
        self._n_durable = self._first = self._target = array.shape[0]
        self._row_length = (self._private.shard_shape(self._path) or geometry.chunk_shape)[0]
        self._array = array

    def _create_for(self, frames: npt.NDArray[Any]) -> None:
        shape = (0, *frames.shape[1:])
        options = {"chunks": (1, *shape[1:]), "dtype": frames.dtype, **self._create}
        zarr.create_array(self._store, name=self._path or None, shape=shape, **options)
        self._find()

    def _write(self, frames: npt.NDArray[Any], start: int) -> None:
        """Store frames behind the end."""
        assert self._array is not None
        stop = start + len(frames)
        metadata = self._array.metadata.update_shape((stop, *frames.shape[1:]))
        grown = AsyncArray(metadata, self._array.store_path, self._array.config)
        sync(grown.setitem(slice(start, stop), frames))

    def _grow(self, n_frames: int) -> None:
        """Move the end of the array behind the frames that are stored."""
        # After an error this writer does not know whether its last compare and swap was done.
        expected = {self._n_durable, self._target, n_frames}
        self._target = n_frames

        def change(stored: bytes | memoryview | None) -> bytes:
            doc = ({} if stored is None else parse_json(stored)) or {}
            n_there = doc.get("shape", [-1])[0]
            # Under the lock there is no other writer: a program that changes attributes may put
            # back the shape that it knows.
            is_known = self._lock is not None and self._first <= n_there <= n_frames
            if not (is_known or n_there in expected) or _form_of(stored) != self._form:
                raise ShardConflictError(
                    f"another program has changed the array {self._path!r} since the last flush: "
                    f"its document has {n_there} frames, {self._n_durable} were durable. Close "
                    "this writer, and see that there is one"
                )
            return dump_document({**doc, "shape": [n_frames, *doc["shape"][1:]]})

        try:
            self._engine.driver.run(relay([Modify(document_key(self._node), change)]))
        finally:
            invalidate_documents()

    # ------------------------------------------------------------------ the buffer

    @property
    def n_durable(self) -> int:
        """Number of frames that are stored, and in the array for every reader.

        They survive a kill of this process; a loss of power, too, if the store has
        ``durability="power"`` or is an object store.
        """
        return self._n_durable

    @property
    def n_appended(self) -> int:
        """Number of frames of the array and in the buffer."""
        with self._changed:
            return self._end()

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
        with self._changed:
            if self._array is None:
                self._create_for(new)
        array = self._array
        assert array is not None
        if new.shape[1:] != array.shape[1:] or not np.can_cast(new.dtype, array.dtype, "equiv"):
            raise SpecError(
                f"frames of {self._path!r} have the shape {array.shape[1:]} and are "
                f"{array.dtype}, got {new.shape[1:]} and {new.dtype}"
            )
        with self._changed:
            self._changed.wait_for(
                lambda: self._nbytes() < 2 * self._flush_nbytes or self._error is not None
            )
            if self._error is not None:
                self._flush()
            self._check_open()
            if len(new):
                self._blocks.append((self._end(), new))
            if self._thread is None:
                thread = threading.Thread(target=self._work, daemon=True)
                thread.start()
                self._thread = thread  # one that is not alive has ended
            self._changed.notify_all()

    def flush(self) -> None:
        """Store all frames that are buffered, and the new shape; errors as of `extend`."""
        self._check_open()
        with self._changed:
            self._flush()

    def close(self) -> None:
        """Flush, seal the shards, and let other writers append; once more is nothing."""
        with self._changed:
            self._is_closed, self._error = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if _writers.get(self._scope) is not self:
            return
        try:
            self._private.flush_sync()
        finally:
            self._release()
        if self._error is not None:
            n_lost = self._end() - self._n_durable
            self._error.add_note(f"{n_lost} frames behind the first {self._n_durable} are lost")
            raise self._error

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
        # A forked child has no thread of the writer.
        if self._is_closed or (self._thread is not None and not self._thread.is_alive()):
            raise SpecError(f"the writer of frames of {self._path!r} is closed")

    # ------------------------------------------------------------------ under `_changed`

    def _end(self) -> int:
        return max(self._n_durable, _stop(*self._blocks[-1]) if self._blocks else 0)

    def _nbytes(self) -> int:
        """Return the size of the buffered frames."""
        n_frames = self._end() - self._n_durable
        return n_frames * (self._blocks[-1][1][:1].nbytes if n_frames else 0)

    def _flush(self) -> None:
        """Wait until the thread has stored all that is buffered now."""
        wanted = self._wanted = self._end()
        self._error = None
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._n_durable >= wanted or self._error is not None)
        if self._error is not None:
            raise self._error

    def _wait_s(self) -> float | None:
        """Return in which time a flush is due; ``None``: not before something changes."""
        end = self._end()
        if end == self._n_durable or self._error is not None:
            return None
        is_full = self._nbytes() >= self._flush_nbytes
        if self._is_closed or self._wanted > self._n_durable or is_full:
            return 0
        wait_s = self._flushed_at + self._flush_s - time.monotonic()
        return min(wait_s, threading.TIMEOUT_MAX)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        """Store frames when it is due. The thread of no caller does: an interrupt of a caller would
        leave a write under way in zarr's event loop, which ends after the next one."""
        while True:
            with self._changed:
                while (wait_s := self._wait_s()) is None or wait_s > 0:
                    if self._is_closed:
                        return
                    self._changed.wait(
                        None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX)
                    )
                start, blocks = self._n_durable, list(self._blocks)
                n_at_once = max(1, self._flush_nbytes // (blocks[0][1][:1].nbytes or 1))
                stop = min(self._end(), start + n_at_once)
                rows_end = stop // self._row_length * self._row_length
                if self._nbytes() >= self._flush_nbytes and rows_end > start:
                    stop = rows_end  # a shard with some frames would be stored twice
                parts = [f[max(0, start - i) : stop - i] for i, f in blocks if i < stop]
            error: BaseException | None = None
            try:
                self._write(np.concatenate(parts), start)
                self._grow(stop)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._error, self._flushed_at = error, time.monotonic()
                if error is None:
                    self._n_durable = stop
                    while self._blocks and _stop(*self._blocks[0]) <= stop:
                        self._blocks.popleft()
                self._changed.notify_all()


def _stop(first: int, frames: npt.NDArray[Any]) -> int:
    return first + len(frames)


def _form_of(document: bytes | memoryview | None) -> dict[str, Any]:
    """Return the members of a document that say what its chunks are."""
    doc = without_notes(({} if document is None else parse_json(document)) or {})
    return {name: value for name, value in doc.items() if name not in ("shape", "attributes")}
