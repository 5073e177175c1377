"""`AppendArrays`: slabs that any number of writers append to the same arrays.

::

    check all ──▶ reserve rows ──▶ other arrays ──▶ values ──▶ consolidated metadata

The notes of `append_arrays` have the steps. Each change of a document is one compare-and-swap.
Another slab may have rows of the same chunk, and the end of the array may move at any time. So no
chunk that this slab covers in part counts as complete: its write is a compare-and-swap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from zarr.core.sync import sync

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.arrays.metadata_view import read_dimension_names
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import array_path
from zarr_shardstore.io.concurrency import to_the_end
from zarr_shardstore.metadata.declaration import with_length
from zarr_shardstore.metadata.documents import Node, dump_document, parse_json, plain_geometry
from zarr_shardstore.shards.stack import in_shared_rounds
from zarr_shardstore.store.direct_reads import ChunkReader, DirectReads
from zarr_shardstore.store.engine import ShardingEngine, documented_like


class _Slab(NamedTuple):
    """Values to append to one array."""

    reader: ChunkReader
    """As the array was when it was checked."""
    axis: int
    values: npt.NDArray[Any]

    @property
    def length(self) -> int:
        length: int = self.values.shape[self.axis]
        return length


class AppendArrays(DirectReads):
    """Appends that many writers may do at the same time."""

    def append_arrays(self, arrays: Mapping[str, npt.ArrayLike], axis: int | str = 0) -> int:
        """Append values to arrays, at the same rows of each, beside other writers that append.

        Rows are the positions along `axis`. Each call gets rows of its own, in any process. zarr's
        ``z.append`` gives two processes the same rows.

        Parameters
        ----------
        arrays
            Values by the path of the array. They have the shape of the array except along `axis`,
            where all have one length. They are cast as ``z[...] = values`` does. All writers must
            name the same array first: it reserves the rows.
        axis : int or str
            The axis that grows, by number or by the name of the dimension.

        Returns
        -------
        int
            The first of the rows.

        Raises
        ------
        SpecError
            If there is no such array or axis, or the values do not fit. Nothing is changed then.
        ShardConflictError
            If another writer has changed more of an array than its length.
        UnsupportedError
            If the base store cannot replace objects, or it is an array of the draft.

        Notes
        -----
        1. The first array grows, and this reserves the rows. Then the other arrays grow, to the
           end of the rows at least.
        2. The values are stored in the order of `arrays`. Until then the rows have fill values.
           With coordinates last, a row whose coordinate is there has all of its values.
        3. Consolidated metadata of the groups above grows in one step. So xarray, which opens it
           by default, sees arrays of one length, and a row only when it is stored.

        A kill or an error after the first step leaves rows of fill values, and no other row
        changes. The error has a note with the rows, and says if they are stored: `write_array`
        fills them, another append makes new ones.

        Other processes may append where they may write the same shards. The arrays must not have
        other writers that change their shape, attributes or last rows, as ``z.append``,
        ``z.attrs`` and `append_frames` do.

        Cost: for each array two reads and one write of its document and an update of each shard of
        the rows; one read of each group above, and one update if it has consolidated metadata.

        Examples
        --------
        >>> import numpy as np, zarr
        >>> store = ShardingStore({}, chunks_per_shard=(4, 1, 1))
        >>> for name, shape in {"temperature": (0, 6, 8), "time": (0,)}.items():
        ...     chunks = (1, *shape[1:])
        ...     z = zarr.create_array(store, name=name, shape=shape, chunks=chunks, dtype="f8")
        >>> day = {"temperature": np.ones((1, 6, 8)), "time": [20_000.0]}
        >>> store.append_arrays(day), store.append_arrays(day)
        (0, 1)
        >>> zarr.open_array(store, path="temperature").shape
        (2, 6, 8)
        """
        self._check_writable()
        if not self._is_open:
            sync(self._ensure_open())
        self._check_can_grow()
        first, *others = slabs = self._slabs(arrays, axis)
        run, documents = self._engine.driver.run, self._engine.operations.documents

        def grow(slab: _Slab, new_length: Any) -> Any:
            reader = slab.reader
            return documents.grow(reader.node, reader.stored_document, slab.axis, new_length)

        reserved: tuple[int, Mapping[str, Any], Mapping[str, Any]] = run(
            grow(first, lambda n: n + first.length)
        )
        start = reserved[0]
        stop, state = start + first.length, "reserved"
        try:
            flows = [grow(slab, lambda n: max(n, stop)) for slab in others]
            found = [reserved, *run(in_shared_rounds(flows))]
            store = self._without_batch([slab.reader.node for slab in slabs])
            for slab, (_, document, _) in zip(slabs, found, strict=True):
                store._write_rows(slab, document, start)
            state = "stored, and consolidated metadata of groups lacks them"
            ends: dict[Any, Any] = {}
            for slab, (_, _, stored) in zip(slabs, found, strict=True):
                shape = [*stored["shape"]]
                shape[slab.axis] = stop  # of rows that are stored; lists may be longer
                ends[slab.reader.node] = slab.axis, {**stored, "shape": shape}
            run(documents.grow_copies(ends))
        except BaseException as error:
            error.add_note(f"the rows {start} to {stop - 1} of {list(arrays)} were {state}")
            raise
        return start

    @documented_like(append_arrays, "in a thread; a call that is cancelled waits for its end")
    async def append_arrays_async(
        self, arrays: Mapping[str, npt.ArrayLike], axis: int | str = 0
    ) -> int:
        return await to_the_end(self.append_arrays, arrays, axis)

    def _without_batch(self, nodes: Iterable[Node]) -> Any:
        """Return a store that a batch of this one does not buffer: rows are stored when the call
        returns, and merged with the rows of other writers."""
        engine = self._engine
        if not engine.operations.buffer.is_active:
            return self
        for node in nodes:
            engine.driver.run(engine.operations.flusher.flush_array(node))
        itself: Any = self
        return itself._of(ShardingEngine(self.base, engine.options), read_only=False)

    def _write_rows(self, slab: _Slab, document: Mapping[str, Any], start: int) -> None:
        """Write the values, as into an array whose end is the end of their last chunk or later."""
        node, axis, stop = slab.reader.node, slab.axis, start + slab.length
        if stop == start:
            return
        geometry, end = plain_geometry(node.hierarchy, document), document["shape"][axis]
        if geometry is not None:
            number = geometry.chunks.number(axis, stop - 1)
            end = max(end, geometry.chunks.bounds(axis, number)[1])
        padded = with_length(document, axis, end)
        rows = (*[slice(None)] * axis, slice(start, stop), ...)
        self._write_box(ChunkReader(self, node, dump_document(padded)), rows, slab.values)

    def _slabs(self, arrays: Mapping[str, npt.ArrayLike], axis: int | str) -> list[_Slab]:
        if not isinstance(arrays, Mapping) or not arrays:
            raise SpecError(f"arrays is a mapping from paths to values, got {short(arrays)}")
        slabs = [self._slab(array_path(path), given, axis) for path, given in arrays.items()]
        lengths = {slab.reader.array.path: slab.length for slab in slabs}
        if len(lengths) < len(slabs):
            raise SpecError(f"arrays has one array twice: {list(arrays)}")
        if len(set(lengths.values())) > 1:
            raise SpecError(f"all values have one length along the axis {axis!r}, got {lengths}")
        return slabs

    def _slab(self, path: str, given: Any, axis: int | str) -> _Slab:
        try:
            reader = self._new_reader_of(path)
        except SpecError:  # another process may have made it since
            invalidate_documents()
            reader = self._new_reader_of(path)
        shape, at = reader.array.shape, self._axis_of(reader, axis)
        try:
            # As zarr's ``z[...] = given``.
            values = given if hasattr(given, "shape") else np.asarray(given, reader.dtype)
            values = np.asarray(values)
            if values.dtype.name != reader.dtype.name:
                values = values.astype(reader.dtype, order="A")
        except (TypeError, ValueError, OverflowError) as error:
            raise SpecError(f"values for {path!r} are {reader.dtype}: {error}") from error
        wanted = (*shape[:at], *values.shape[at : at + 1], *shape[at + 1 :])
        if values.shape != wanted:
            raise SpecError(
                f"values for {path!r} have the shape {shape}, except along the axis {at}; got "
                f"{values.shape}"
            )
        return _Slab(reader, at, values)

    def _axis_of(self, reader: ChunkReader, axis: Any) -> int:
        ndim = len(reader.array.shape)
        names: Sequence[str | None] = ()
        if isinstance(axis, str):
            flow = read_dimension_names({reader.node: parse_json(reader.stored_document) or {}})
            names = self._engine.driver.run(flow)
        number = names.index(axis) if axis in names else axis
        if not isinstance(number, int | np.integer) or not -ndim <= number < ndim:
            of = f"the dimensions {names}" if names else f"{ndim} dimensions"
            raise SpecError(f"the array {reader.array.path!r} has {of}, and no axis {axis!r}")
        return int(number) % ndim
