"""Values of a store for clients of a server, by the key in a URL.

A key is refused if it could leave the store, or names a side file: a lock, a journal, an index
beside shards, and each name that begins with a dot and is no document. On local files a link out of
the store is followed for chunks and JSON documents only: adopted shards may be links.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from time import monotonic

from zarr.core.buffer import default_buffer_prototype

from zarr_shardstore.access import (
    LocalBackend,
    ShardingStore,
    chunk_keys,
    declarations,
    file_keys,
    gather_bounded,
    metadata,
    open_base,
)
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.tools.inspect.find import DOCUMENTS, find_contents
from zarr_shardstore.tools.native import document_members
from zarr_shardstore.tools.native.translate import ZarrFormat, documents_in, encoding_in

_MAX_KEY_NBYTES = 1024  # as in S3
_NODES_AT_ONCE = 16
_FRESH_S = 2  # then the document of an array is read again before its next chunk


class ServedStore:
    """Values of a store by key, only read. Errors of the store pass.

    All documents are shown in one format; ``None``: each as it is stored.
    """

    def __init__(self, store: ShardingStore, zarr_format: ZarrFormat | None = None) -> None:
        self.store, self._format = store._by_chunks(), zarr_format
        engine = self.store._engine
        self.read, self._run = engine.get, engine.driver.run_async
        self._catalog = engine.operations.catalog
        backend = engine.driver.backend
        self._root = backend.root if isinstance(backend, LocalBackend) else None
        self._refreshed = monotonic()

    async def find(self, key: str) -> bytes | str | None:
        """Return the document of a key, or the key in the store of another value, which may be
        missing; ``None`` for a key that is refused, or that the format lacks."""
        directory, _, name = key.rpartition("/")
        if not is_public(key):
            return None
        if monotonic() > self._refreshed + _FRESH_S:
            self._refreshed = monotonic()
            self.store.refresh()  # another process may have replaced an array
        if name in DOCUMENTS:
            return await self._document(directory, name)
        for path, suffix in chunk_keys.v3_candidates(key):
            nodes = [metadata.Node("v3", path), metadata.Node("v2", path)]
            arrays = await self._run(self._catalog.arrays.lookup(nodes))
            array = arrays[nodes[0]] or arrays[nodes[1]]
            if isinstance(array, ShardStoreError):
                raise array
            if array is not None and (geometry := array.document.geometry) is not None:
                shown = encoding_in(self._format, geometry.encoding)
                coords = shown.decode(suffix, len(geometry.shape))
                prefix = array.node.chunk_prefix
                return None if coords is None else prefix + geometry.encoding.encode(coords)
        root = self._root
        leads_out = root and not os.path.realpath(root + key).startswith(root)
        return None if leads_out else key

    async def _document(self, path: str, name: str) -> bytes | None:
        if self._format is None:
            (value,) = await self._values(path, [name])
            doc = metadata.parse_json(value)
            return None if doc is None or value is None else _with_public_members(doc, value)
        shown = await self._node(path)
        if not path and name == ".zmetadata" and self._format == 2 and shown:
            members = [(p, *item) for p, docs in await self._nodes() for item in docs.items()]
            shown = {f"{p}/{name}".lstrip("/"): doc for p, name, doc in members}
            return metadata.dump_document({"zarr_consolidated_format": 1, "metadata": shown})
        doc = shown.get(name)
        is_root = not path and doc and doc.get("node_type") == "group"
        if doc and is_root and not doc.get("consolidated_metadata"):
            below = {p: docs["zarr.json"] for p, docs in await self._nodes() if p}
            doc = {**doc, "consolidated_metadata": document_members.consolidated_v3(below)}
        return metadata.dump_document(doc) if doc else None

    async def _node(self, path: str) -> dict[str, declarations.Document]:
        """Return the documents of a node in the format, by name."""
        values = await self._values(path, DOCUMENTS[:4])
        found = zip(DOCUMENTS, values, strict=False)
        docs = {name: metadata.parse_json(v) or {} for name, v in found if v is not None}
        v2 = docs.get(".zarray") or docs.get(".zgroup")
        doc = docs.get("zarr.json")
        if v2 and (doc is None or self._format == 2):
            return documents_in(self._format, v2, docs.get(".zattrs", {}))
        return documents_in(self._format, doc, {}) if doc else {}

    async def _nodes(self) -> list[tuple[str, dict[str, declarations.Document]]]:
        """Return all nodes of the store that can be shown, with their documents."""
        contents = await asyncio.to_thread(open_base(self.store).run, find_contents())
        groups = (key.rpartition("/") for key in contents.other_keys)
        paths = {path for path, _, name in groups if name in ("zarr.json", ".zgroup")}
        paths |= {node.path for node in contents.arrays if node.hierarchy != "draft"}
        paths = {path for path in paths if is_public(f"{path}/zarr.json".lstrip("/"))}

        async def documents_of(path: str) -> tuple[str, dict[str, declarations.Document]]:
            try:
                return path, await self._node(path)
            except ShardStoreError:
                return path, {}

        nodes = await gather_bounded(list(map(documents_of, sorted(paths))), _NODES_AT_ONCE)
        return [(path, docs) for path, docs in nodes if docs]

    async def _values(self, path: str, names: Sequence[str]) -> list[bytes | None]:
        asked = [(f"{path}/{name}".lstrip("/"), None) for name in names]
        found = await self.store.get_partial_values(default_buffer_prototype(), asked)
        return [None if value is None else value.to_bytes() for value in found]


def _with_public_members(doc: declarations.Document, value: bytes) -> bytes:
    """Return a document, its consolidated metadata without nodes whose chunks are not served."""
    name = "" if "zarr_consolidated_format" in doc else "/zarr.json"
    hidden = {each: None for each in metadata.all_members(doc) if not is_public(each + name)}
    return metadata.dump_document(metadata.with_members(doc, hidden)) if hidden else value


def is_public(key: str) -> bool:
    """Whether the spelling of a key is permitted."""
    try:
        chunk_keys.check_key(key)
    except SpecError:
        return False
    *above, name = key.split("/")
    return (
        key.isprintable()
        and "\\" not in key
        and len(key.encode()) <= _MAX_KEY_NBYTES
        and not any(segment.startswith(".") or file_keys.is_hidden(segment) for segment in above)
        and not (name.startswith(".") and name not in DOCUMENTS)
        and not file_keys.is_hidden(key)
    )
