"""`GrowingArray`: the array that a writer of frames has, and its end in the document."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr import AsyncArray
from zarr.core.sync import sync
from zarr.errors import ContainsArrayError
from zarr.storage import StorePath

from zarr_shardstore.arrays.array_cache import invalidate_documents, read_documents
from zarr_shardstore.arrays.catalog import flat_nodes
from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.io.backends.base import growing
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.local.locks import FRAMES_LOCK, KeptLock
from zarr_shardstore.metadata import documents
from zarr_shardstore.metadata.documents import Node, parse_json
from zarr_shardstore.metadata.transformer_list import name_of
from zarr_shardstore.shards.requests import Modify, relay
from zarr_shardstore.store.engine import ShardingEngine
from zarr_shardstore.store.upkeep import Upkeep
from zarr_shardstore.synchronized import synchronized

_synchronized = synchronized()

_MAX_FRAMES = 2**48
"""Frames along the first dimension for the writer alone: more than any acquisition has."""


class GrowingArray:
    """An array that one writer has; other writers of frames are refused until it is released."""

    def __init__(self, store: Upkeep, path: str, create: Mapping[str, Any]) -> None:
        self.path = path
        self._store, self._create = store, create
        # With an engine of its own, the writer alone sees the array without an end. An open batch
        # of the store buffers no frames.
        self._engine = ShardingEngine(store.base, store._engine.options.with_view("chunks"))
        self._private = store._of(self._engine, False)
        self._buffer = store._engine.operations.buffer
        self.appends = self._engine.appends
        self._array: AsyncArray[Any] | None = None  # as it was opened or created
        self._has_tried = False  # to create it
        self.row_length = 1  # frames in a shard
        self.first = 0  # frames when it was opened
        self._tried: set[int] = set()  # frames after the attempts since the last success
        self._node = Node("v3", path)
        self._form: dict[str, Any] = {}
        self._lock: KeptLock | None = None
        store._check_can_grow()
        backend = self._engine.driver.backend
        self._scope = backend.scope(path)
        busy = f"frames are appended to {path!r} already: close that writer first"
        if not _is_first(self._scope, self):
            raise ShardConflictError(busy)
        try:
            if isinstance(backend, LocalBackend) and store._engine.options.locking == "os":
                lock = KeptLock(backend.root + self._node.chunk_prefix + FRAMES_LOCK)
                lock.acquire(0, busy)
                self._lock = lock
            self._end_buffering()
            self._find()
        except BaseException:
            self._release()
            raise

    def close(self, n_durable: int) -> bool:
        """Seal the shards, and let other writers append; false if that was done before."""
        if growing.get(self._scope) is not self:
            return False
        try:
            # A program that set attributes may have put an older end back.
            if self._array is not None and self._lock is not None:
                self._move_end(n_durable, n_durable)
            elif self._array is not None:
                self._check(n_durable)
            self._private.flush_sync()
        finally:
            self._release()
        return True

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.remove()
        for node in flat_nodes(self.path):
            self._buffer.growing.discard(node.chunk_prefix)
        growing.pop(self._scope, None)

    def _end_buffering(self) -> None:
        """Let a batch of the store buffer no updates of the array, and store those that it has."""
        engine = self._store._engine
        for node in flat_nodes(self.path):
            self._buffer.growing.add(node.chunk_prefix)
            engine.driver.run(engine.operations.flusher.flush_array(node))

    def _find(self) -> None:
        """Open the array, if there is one."""
        operations, run = self._engine.operations, self._engine.driver.run
        for node in flat_nodes(self.path):
            if (found := run(operations.documents.of_array(node))) is not None:
                break
        else:
            return
        stored, _, known = found
        form, geometry = _form_of(stored), known.document.geometry
        if geometry is None or not geometry.shape:
            raise SpecError(f"the array {self.path!r} has no first dimension that can grow")
        specs = [each.sharding for each in known.document.transformers]
        is_listed = name_of(form.get("chunk_grid")) == "rectilinear" or geometry.sides
        if is_listed or any(spec is not None and spec.sides for spec in specs):
            raise SpecError(
                f"the chunks or shards of {self.path!r} have several lengths: use append_arrays"
            )
        operations.arrays.reader.lengths[node] = _MAX_FRAMES
        self._node, self._form = node, form
        zarr_format: Any = 2 if node.hierarchy == "v2" else 3
        place = StorePath(self._private, self.path)
        array = sync(AsyncArray.open(place, zarr_format=zarr_format))
        self.first = array.shape[0]
        self.row_length = (self._private.shard_shape(self.path) or geometry.chunk_shape)[0]
        self._array = array

    def check_or_create(self, frames: npt.NDArray[Any]) -> None:
        """Refuse frames of another shape or data type; create the array for its first frames."""
        if self._array is None:
            shape = (0, *frames.shape[1:])
            options = {"chunks": (1, *shape[1:]), "dtype": frames.dtype, **self._create}
            if self._has_tried:
                sync(self._end_documents())
            try:
                zarr.create_array(self._store, name=self.path or None, shape=shape, **options)
            except ContainsArrayError:
                if not self._has_tried:
                    raise
                # An attempt that failed has stored its document, perhaps without the groups above.
                zarr_format: Any = self._create.get("zarr_format") or 3
                for above in map(str, PurePosixPath(self.path).parents):
                    group = "" if above == "." else above
                    zarr.open_group(self._store, path=group, mode="a", zarr_format=zarr_format)
            except BaseException:
                self._has_tried = True
                raise
            self._find()
            if self.first:
                self._array = None
                raise ShardConflictError(f"another program has created the array {self.path!r}")
        array = self._array
        assert array is not None
        kinds = frames.dtype.kind + array.dtype.kind
        casting: Any = "safe" if kinds == "UU" else "equiv"
        is_like = kinds == "UT" or np.can_cast(frames.dtype, array.dtype, casting)
        if frames.shape[1:] != array.shape[1:] or not is_like:
            raise SpecError(
                f"frames of {self.path!r} have the shape {array.shape[1:]} and are "
                f"{array.dtype}, got {frames.shape[1:]} and {frames.dtype}"
            )

    async def _end_documents(self) -> None:
        """Wait for documents of an attempt: zarr leaves them under way when one fails."""
        async with self._store._engine.turn(self.path):
            pass

    def append(self, frames: npt.NDArray[Any], n_durable: int) -> None:
        """Store frames after the end, and then move the end after them."""
        assert self._array is not None
        if self._engine.driver.backend.mode != "async":  # before frames of others are overwritten
            self._check(n_durable)
        stop = n_durable + len(frames)
        metadata = self._array.metadata.update_shape((stop, *frames.shape[1:]))
        grown = AsyncArray(metadata, self._array.store_path, self._array.config)
        sync(grown.setitem(slice(n_durable, stop), frames))
        self._move_end(stop, n_durable)

    def _move_end(self, n_frames: int, n_durable: int) -> None:
        # After an error it is unknown whether a compare-and-swap of this writer was done.
        self._tried |= {n_durable, n_frames}

        def change(stored: bytes | memoryview | None) -> bytes | memoryview | None:
            doc = self._check_end(stored, n_durable)
            if doc["shape"][0] == n_frames:
                return stored
            return documents.dump_document({**doc, "shape": [n_frames, *doc["shape"][1:]]})

        try:
            self._engine.driver.run(relay([Modify(documents.document_key(self._node), change)]))
        finally:
            invalidate_documents()
        self._tried = {n_frames}

    def _check(self, n_durable: int) -> None:
        key = documents.document_key(self._node)
        (found,) = self._engine.driver.run(read_documents([key]))
        self._check_end(found.value, n_durable)

    def _check_end(self, stored: bytes | memoryview | None, n_durable: int) -> Any:
        """Return the parsed document, or raise `ShardConflictError` if others have changed it."""
        doc = ({} if stored is None else parse_json(stored)) or {}
        n_there = doc.get("shape", [-1])[0]
        # The lock excludes other writers of frames, but a program that changes attributes may
        # store an older shape again.
        is_known = self._lock is not None and self.first <= n_there <= n_durable
        is_known = is_known or n_there in {n_durable, *self._tried}
        if not is_known or _form_of(stored) != self._form:
            raise ShardConflictError(
                f"another program has changed the array {self.path!r} since the last flush: its "
                f"document has {n_there} frames, {n_durable} were durable. Close this writer, and "
                "see that there is one"
            )
        return doc


def _form_of(document: bytes | memoryview | None) -> dict[str, Any]:
    """Return the members of a document that say what its chunks are."""
    doc = documents.without_notes(({} if document is None else parse_json(document)) or {})
    return {name: value for name, value in doc.items() if name not in ("shape", "attributes")}


@_synchronized
def _is_first(scope: Hashable, array: GrowingArray) -> bool:
    return growing.setdefault(scope, array) is array
