"""Reads, writes and erasures of metadata documents, as users see them.

The cache of arrays and the write buffer follow each change.
"""

from __future__ import annotations

from collections.abc import Sequence

from zarr_shardstore.arrays.array_cache import ArrayCache, Generation, read_documents
from zarr_shardstore.arrays.metadata_view import MetadataView
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.ranges import ByteRange, resolve_range
from zarr_shardstore.metadata.documents import Node, document_key, node_of_document
from zarr_shardstore.operations.batch import Flusher
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import Flow


class Documents:
    """Documents of one store."""

    def __init__(self, arrays: ArrayCache, view: MetadataView, flusher: Flusher) -> None:
        self._arrays = arrays
        self._view = view
        self._flusher = flusher

    def to_user(
        self,
        key: str,
        data: memoryview | None,
        byte_range: ByteRange | None,
        generation: Generation,
    ) -> memoryview | None:
        """Return a stored document as users see it, and cache its array."""
        node = node_of_document(key)
        if data is None:
            if node is not None:
                generation.drop(node)
            return None
        value, array = self._view.to_user(key, data)
        if node is not None and not isinstance(array, ShardStoreError):
            generation.put(node, array)
        elif node is not None:
            generation.drop(node)  # values raise the error
        start, stop = resolve_range(byte_range, len(value))
        return value[start:stop]

    def set(self, key: str, data: memoryview, *, only_if_missing: bool = False) -> Flow[None]:
        (found,) = yield from read_documents([key])
        if only_if_missing and found.value is not None:
            return
        request = requests.SetIfNotExists if only_if_missing else requests.Set
        node = node_of_document(key)
        if node is not None and found.value is None:
            yield from self._flusher.flush_array(node)  # the view looks for stored chunks
        stored, array, is_changed = yield from self._view.to_store(key, data, found.value)
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
        try:
            if keys:
                yield [requests.Delete(key) for key in keys]
        finally:
            for node in nodes:
                array = arrays[node]
                layout = array.layout if isinstance(array, StoredArray) else None
                self._arrays.document_erased(node, layout)

    def of_array(self, node: Node) -> Flow[tuple[memoryview, StoredArray] | None]:
        """Return the document of an array by its chunks, and the array, which is cached now."""
        generation, key = self._arrays.current(), document_key(node)
        ((data, _, _),) = yield from read_documents([key])
        if data is None:
            generation.drop(node)
            return None
        document, array = self._view.to_user(key, data, "chunks")
        if isinstance(array, ShardStoreError):
            raise array
        generation.put(node, array)
        return None if array is None else (document, array)
