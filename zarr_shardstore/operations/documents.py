"""Reads, writes and erasures of metadata documents, as users see them.

The cache of arrays and the write buffer follow each change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from zarr_shardstore.arrays.array_cache import ArrayCache, Generation, read_documents
from zarr_shardstore.arrays.metadata_view import MetadataView
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardConflictError, ShardStoreError
from zarr_shardstore.format.ranges import ByteRange, resolve_range
from zarr_shardstore.metadata.declaration import with_length
from zarr_shardstore.metadata.documents import (
    Node,
    document_key,
    dump_document,
    keys_of_groups,
    members,
    node_of_document,
    parse_json,
    with_members,
)
from zarr_shardstore.metadata.transformer_list import name_of
from zarr_shardstore.operations.batch import Flusher
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import Flow

_MAX_ATTEMPTS = 1000
"""Attempts of a compare-and-swap; each one fails because another writer was faster."""


class Documents:
    """Documents of one store."""

    def __init__(self, arrays: ArrayCache, view: MetadataView, flusher: Flusher) -> None:
        self._arrays = arrays
        self._view = view
        self._flusher = flusher

    def to_user(
        self,
        key: str,
        found: requests.Found,
        byte_range: ByteRange | None,
        generation: Generation,
    ) -> memoryview | None:
        """Return a stored document as users see it, and cache its array."""
        node, data = node_of_document(key), found.value
        if data is None:
            if node is not None:
                generation.drop(node)
                generation.refused.discard(node)
            return None
        value, array = self._view.to_user(key, data)
        if b"consolidated" in bytes(data):  # its members are opened without their documents
            generation.forget_doubts()
            copies = members(key.rpartition("/")[0], parse_json(data) or {})
            for copied_node, doc in copies.values():
                self._forget_unlike(copied_node, doc, generation)
        if node is not None and not isinstance(array, ShardStoreError):
            generation.put(node, array, found.state)
        elif node is not None:
            generation.drop(node)  # values raise the error
        start, stop = resolve_range(byte_range, len(value))
        return value[start:stop]

    def _forget_unlike(self, node: Node, doc: Mapping[str, Any], generation: Generation) -> None:
        """Read the document of a cached array again, if its copy has other chunks or shards."""
        cached = generation.arrays.get(node)
        if cached is not None:
            with suppress(ShardStoreError):
                if cached.has_same_chunks(self._arrays.reader.read(node, doc)):
                    return
            generation.drop(node)

    def set(self, key: str, data: memoryview, *, only_if_missing: bool = False) -> Flow[None]:
        (found,) = yield from read_documents([key])
        if only_if_missing and found.value is not None:
            return
        request = requests.SetIfNotExists if only_if_missing else requests.Set
        node = node_of_document(key)
        if node is not None and found.value is None:
            yield from self._flusher.flush_array(node)  # the view looks for stored chunks
        erased = None if node is None else self._arrays.erased.get(node)
        stored, array, is_changed = yield from self._view.to_store(key, data, found.value, erased)
        if node is None:
            yield [request(key, stored)]
            return
        if is_changed:
            yield from self._flusher.flush_array(node, None if array is None else array.layout)
        is_certain = False
        try:
            yield [request(key, stored)]
            is_certain = not only_if_missing  # otherwise another writer may have been first
        finally:
            if is_changed or not is_certain:
                self._arrays.documents_changed(node, array if is_certain else None)
            else:
                self._arrays.current().put(node, array)

    def erase(self, keys: Sequence[str]) -> Flow[None]:
        """Erase documents, after the buffered chunks of their arrays were flushed."""
        nodes = [node for key in keys if (node := node_of_document(key)) is not None]
        arrays = yield from self._arrays.lookup(nodes)
        for node in nodes:
            yield from self._flusher.flush_array(node)
        self._arrays.under_erasure.update(nodes)
        try:
            if keys:
                yield [requests.Delete(key) for key in keys]
        finally:
            for node in nodes:
                self._arrays.document_erased(node, arrays[node])
            self._arrays.under_erasure.difference_update(nodes)

    def of_array(self, node: Node) -> Flow[tuple[bytes, memoryview, StoredArray] | None]:
        """Return the document of an array as it is stored and by its chunks, and the array, which
        is cached now."""
        generation, key = self._arrays.current(), document_key(node)
        (found,) = yield from read_documents([key])
        if found.value is None:
            generation.drop(node)
            return None
        document, array = self._view.to_user(key, found.value, "chunks")
        if isinstance(array, ShardStoreError):
            raise array
        generation.put(node, array, found.state)
        return None if array is None else (bytes(found.value), document, array)

    # -------------------------------------------------------- compare-and-swap

    def grow(
        self, node: Node, seen: bytes, axis: int, new_length: Callable[[int], int]
    ) -> Flow[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
        """Grow the array of the stored document `seen`; return its length before, and its new
        document by its chunks and as stored. If another writer has changed it, it is read again.

        Raises `ShardConflictError` if it has become another array.
        """
        key, fixed = document_key(node), None
        for _ in range(_MAX_ATTEMPTS):
            value, array = self._view.to_user(key, memoryview(seen), "chunks")
            if isinstance(array, ShardStoreError):
                raise array
            doc = parse_json(value)
            now = None if doc is None or array is None else _fixed(doc, axis)
            if doc is None or now is None or now != (fixed or now):
                raise ShardConflictError(
                    f"another writer has changed more than the length of the array {node.path!r}"
                )
            fixed = now
            before: int = doc["shape"][axis]
            after = new_length(before)
            if after == before:
                return before, doc, parse_json(seen) or {}
            new = with_length(doc, axis, after)
            data = memoryview(dump_document(new))
            stored, array, _ = yield from self._view.to_store(key, data, memoryview(seen))
            yield from self._flusher.flush_array(node, None if array is None else array.layout)
            is_swapped = False
            try:
                (is_swapped,) = yield from _swap({key: (seen, bytes(stored))})
            finally:
                self._arrays.documents_changed(node, array if is_swapped else None)
            if is_swapped:
                return before, new, parse_json(stored) or {}
            (found,) = yield from read_documents([key])
            seen = bytes(found.value or b"")
        raise ShardConflictError(
            f"other writers have changed {key!r} {_MAX_ATTEMPTS} times before it could grow"
        )

    def grow_copies(self, ends: Mapping[Node, tuple[int, Mapping[str, Any]]]) -> Flow[None]:
        """Put stored documents of arrays into the consolidated metadata of the groups above them,
        where these are longer along an axis. No array shrinks there."""
        keys = list(dict.fromkeys(key for node in ends for key in keys_of_groups(node)))
        while keys:
            swaps: dict[str, tuple[bytes, bytes]] = {}
            for key, reply in zip(keys, (yield from read_documents(keys)), strict=True):
                doc = parse_json(reply.value) or {}
                new = _with_lengths(key.rpartition("/")[0], doc, ends)
                if new is not doc:
                    swaps[key] = bytes(reply.value or b""), dump_document(new)
            done = yield from _swap(swaps)
            keys = [key for key, is_done in zip(swaps, done, strict=True) if not is_done]


def _fixed(doc: Mapping[str, Any], axis: int) -> dict[str, Any]:
    """Return what stays in the document of an array that grows along an axis."""
    shape, grid = doc["shape"], doc.get("chunk_grid")
    fixed = {**doc, "attributes": None, "shape": [*shape[:axis], *shape[axis + 1 :]]}
    if grid is not None and name_of(grid) == "rectilinear":
        sides = grid["configuration"]["chunk_shapes"]
        fixed["chunk_grid"] = [*sides[:axis], *sides[axis + 1 :]]
    return fixed


def _with_lengths(
    path: str, doc: Mapping[str, Any], ends: Mapping[Node, tuple[int, Mapping[str, Any]]]
) -> Mapping[str, Any]:
    """Return `doc` with these documents in the place of copies that are shorter along an axis."""
    changed: dict[str, Mapping[str, Any] | None] = {}
    for name, (node, copy) in members(path, doc).items():
        axis, longer = ends.get(node, (0, None))
        with suppress(LookupError, TypeError):  # the copy is damaged
            if longer is not None and copy["shape"][axis] < longer["shape"][axis]:
                changed[name] = longer
    return with_members(doc, changed) if changed else doc


def _swap(values: Mapping[str, tuple[bytes, bytes]]) -> Flow[list[bool]]:
    """Replace each first value by the second, if it is stored; return whether it was."""
    are_swapped = dict.fromkeys(values, False)

    def change_of(key: str) -> requests.Change:
        def change(stored: bytes | memoryview | None) -> bytes | memoryview | None:
            # The last call counts: after a refusal of the store it sees another value.
            are_swapped[key] = stored is not None and bytes(stored) == values[key][0]
            return values[key][1] if are_swapped[key] else stored

        return change

    if values:
        yield from requests.relay([requests.Modify(key, change_of(key)) for key in values])
    return list(are_swapped.values())
