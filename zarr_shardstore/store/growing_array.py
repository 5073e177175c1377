"""`GrowingArray`: an array that one writer of frames makes longer, while others read it.

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

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr import AsyncArray
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import StorePath

from zarr_shardstore.arrays.array_cache import invalidate_documents, read_documents
from zarr_shardstore.errors import ShardConflictError, SpecError, UnsupportedError
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
from zarr_shardstore.store.upkeep import Upkeep

_MAX_FRAMES = 2**48
"""Frames along the first dimension for the writer alone: more than any acquisition has."""

_open: dict[Hashable, GrowingArray] = {}
"""The arrays that writers of this process have open."""


class GrowingArray:
    """An array that one writer has; other writers of frames are refused until it is released."""

    def __init__(self, store: Upkeep, path: str, create: Mapping[str, Any]) -> None:
        self.path = path
        self._store, self._create = store, create
        # An engine of its own: others of this process see the array with its end, and an open
        # batch of the store buffers no frames.
        self._engine = ShardingEngine(store.base, store._engine.options)
        self._private = store._of(self._engine, False)
        self.appends = self._engine.appends
        self._array: AsyncArray[Any] | None = None  # as it was opened, or created
        self.row_length = 1  # frames in a shard
        self.first = self._target = 0  # frames when it was opened, and after the last attempt
        self._node = Node("v3", path)
        self._form: dict[str, Any] = {}
        self._lock: KeptLock | None = None
        if isinstance(store.base, Store) and not store.base.supports_deletes:
            raise UnsupportedError(
                f"in {store.base} nothing can be replaced, so no array can grow: append to another "
                "store, and copy it"
            )
        backend = self._engine.driver.backend
        self._scope = backend.scope(path)
        busy = f"frames are appended to {path!r} already: close that writer first"
        if _open.setdefault(self._scope, self) is not self:
            raise ShardConflictError(busy)
        try:
            if isinstance(backend, LocalBackend) and store._engine.options.locking == "os":
                name = f"{self._node.chunk_prefix}frames{LOCK_SUFFIX}"
                lock = KeptLock(backend.real_root + name)
                lock.acquire(0, busy)
                self._lock = lock
            self._find()
        except BaseException:
            self._release()
            raise

    def close(self) -> bool:
        """Seal the shards, and let other writers append; false if that was done before."""
        if _open.get(self._scope) is not self:
            return False
        try:
            self._private.flush_sync()
        finally:
            self._release()
        return True

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.remove()
        _open.pop(self._scope, None)

    def _find(self) -> None:
        """Open the array, if there is one."""
        engine = self._engine
        arrays, run = engine.operations.arrays, engine.driver.run
        for node in (Node("v3", self.path), Node("v2", self.path)):
            (reply,) = run(read_documents([document_key(node)]))
            found = arrays.read(node, reply.value)
            if found is not None and reply.value is not None:
                break
        else:
            return
        geometry = found.document.geometry
        if geometry is None or not geometry.shape:
            raise SpecError(f"the array {self.path!r} has no first dimension that can grow")
        arrays.reader.lengths[node] = _MAX_FRAMES
        self._node, self._form = node, _form_of(reply.value)
        zarr_format: Any = 2 if node.hierarchy == "v2" else 3
        place = StorePath(self._private, self.path)
        array = sync(AsyncArray.open(place, zarr_format=zarr_format))
        self.first = self._target = array.shape[0]
        self.row_length = (self._private.shard_shape(self.path) or geometry.chunk_shape)[0]
        self._array = array

    def check_or_create(self, frames: npt.NDArray[Any]) -> None:
        """Refuse frames of another shape or data type; create the array for its first frames."""
        if self._array is None:
            shape = (0, *frames.shape[1:])
            options = {"chunks": (1, *shape[1:]), "dtype": frames.dtype, **self._create}
            zarr.create_array(self._store, name=self.path or None, shape=shape, **options)
            self._find()
        array = self._array
        assert array is not None
        is_like = np.can_cast(frames.dtype, array.dtype, "equiv")
        if frames.shape[1:] != array.shape[1:] or not is_like:
            raise SpecError(
                f"frames of {self.path!r} have the shape {array.shape[1:]} and are "
                f"{array.dtype}, got {frames.shape[1:]} and {frames.dtype}"
            )

    def append(self, frames: npt.NDArray[Any], n_durable: int) -> None:
        """Store frames behind the end, and then move the end behind them."""
        assert self._array is not None
        stop = n_durable + len(frames)
        metadata = self._array.metadata.update_shape((stop, *frames.shape[1:]))
        grown = AsyncArray(metadata, self._array.store_path, self._array.config)
        sync(grown.setitem(slice(n_durable, stop), frames))
        self._move_end(stop, n_durable)

    def _move_end(self, n_frames: int, n_durable: int) -> None:
        # After an error this writer does not know whether its last compare and swap was done.
        expected = {n_durable, self._target, n_frames}
        self._target = n_frames

        def change(stored: bytes | memoryview | None) -> bytes:
            doc = ({} if stored is None else parse_json(stored)) or {}
            n_there = doc.get("shape", [-1])[0]
            # Under the lock there is no other writer: a program that changes attributes may put
            # back the shape that it knows.
            is_known = self._lock is not None and self.first <= n_there <= n_frames
            if not (is_known or n_there in expected) or _form_of(stored) != self._form:
                raise ShardConflictError(
                    f"another program has changed the array {self.path!r} since the last flush: "
                    f"its document has {n_there} frames, {n_durable} were durable. Close this "
                    "writer, and see that there is one"
                )
            return dump_document({**doc, "shape": [n_frames, *doc["shape"][1:]]})

        try:
            self._engine.driver.run(relay([Modify(document_key(self._node), change)]))
        finally:
            invalidate_documents()


def _form_of(document: bytes | memoryview | None) -> dict[str, Any]:
    """Return the members of a document that say what its chunks are."""
    doc = without_notes(({} if document is None else parse_json(document)) or {})
    return {name: value for name, value in doc.items() if name not in ("shape", "attributes")}
