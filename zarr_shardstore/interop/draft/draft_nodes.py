"""Nodes of a draft hierarchy: documents, chunk keys and listings, as those of Zarr v3.

The document of an array defines the keys of its chunks. The `ShardingStore` below caches it.

Listings take keys of documents, and the groups that they imply, from ``meta/root/``, and all other
keys from ``data/root/``.

Source: Zarr v3 draft of 2022, "Storage keys" and "Metadata", implicit groups; sharding storage
transformer draft, "API implementation", list, list_prefix, list_dir.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeAlias

from zarr_shardstore.access import ShardingStore, chunk_keys, declarations, metadata
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.native import draft_documents as draft
from zarr_shardstore.tools.native.draft_documents import (
    DRAFT_META_ROOT,
    array_key,
    group_key,
    v3_key,
)

Stored: TypeAlias = bytes | memoryview | None

_KEYS_PER_ROUND = 1000


class DraftNodes:
    """Documents and keys of the draft hierarchy in a `ShardingStore`."""

    def __init__(self, store: ShardingStore) -> None:
        self.store = store

    # --------------------------------------------------------------- documents

    async def stored(self, paths: Sequence[str]) -> tuple[list[tuple[Stored, Stored]], bool]:
        """Return the array and group document of nodes, and whether a valid entry point exists."""
        keys = [key for path in paths for key in (array_key(path), group_key(path))]
        *values, entry_point = await self.store._get_values([*keys, draft.ENTRY_POINT_KEY])
        if entry_point is not None:
            draft.check_entry_point(metadata.parse_json(entry_point))
        return list(zip(values[::2], values[1::2], strict=True)), entry_point is not None

    async def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return the v3 documents of nodes; ``None``: missing.

        Cost: one round for all, and a listing for each missing document.
        """
        stored, has_entry_point = await self.stored(paths)
        shown: list[bytes | None] = [None] * len(paths)
        for i, (path, (array, group)) in enumerate(zip(paths, stored, strict=True)):
            if array is not None:
                shown[i] = _translated(array_key(path), array, draft.array_of_draft)
            elif group is not None:
                shown[i] = _translated(group_key(path), group, draft.group_of_draft)
            elif (path == "" and has_entry_point) or await self.has_nodes_below(path):
                shown[i] = metadata.dump_document(draft.group_of_draft({}))
        return shown

    async def has_nodes_below(self, path: str) -> bool:
        """Whether a document below a path makes it a group.

        Cost: one listing of a directory; more only if it has directories and no documents.
        """
        directory = draft.directory_of(path)
        below = [directory + n async for n in self.store.list_dir(DRAFT_META_ROOT + directory)]
        if any(draft.node_of_meta_key(DRAFT_META_ROOT + name) is not None for name in below):
            return True
        for name in below:
            if await self.has_nodes_below(name):
                return True
        return False

    async def write(
        self, path: str, value: bytes | memoryview, *, only_if_missing: bool = False
    ) -> None:
        """Store the v3 document of a node as one of the draft, unless the draft cannot express it.

        The document of the other kind is removed; a missing entry point is written.
        """
        key = v3_key(path)
        kind = _parse(key, value).get("node_type")
        if kind not in ("array", "group"):
            raise SpecError(f"{key!r}: a Zarr v3 document has the node_type 'array' or 'group'")
        (documents,), has_entry_point = await self.stored([path])
        if only_if_missing:
            is_there = documents != (None, None)
            if is_there or (kind == "array" and await self.has_nodes_below(path)):
                return
        array = (array_key(path), documents[0], draft.array_to_draft)
        group = (group_key(path), documents[1], draft.group_to_draft)
        own, other = (array, group) if kind == "array" else (group, array)
        own_key, before, translate = own
        await self.store.set(
            own_key, _translated(key, value, translate, metadata.parse_json(before))
        )
        if other[1] is not None:
            await self.store.delete(other[0])
        if not has_entry_point:
            entry_point = metadata.dump_document(draft.ENTRY_POINT)
            await self.store.set_if_not_exists(draft.ENTRY_POINT_KEY, entry_point)

    async def erase(self, path: str) -> None:
        """Remove the documents of a node; after the last node also the entry point."""
        if path == "":
            await self.stored([])
        await self.store._set_or_erase([(array_key(path), None), (group_key(path), None)])
        if path == "" and not await self.has_nodes_below(""):
            await self.store.delete(draft.ENTRY_POINT_KEY)

    # -------------------------------------------------------------------- keys

    async def arrays(self, paths: Iterable[str]) -> dict[str, metadata.Geometry]:
        """Return the geometries of arrays by path; paths of no array are left out.

        Cost: one round for all paths that the store below has not cached.
        """
        cached = self.store._engine.operations.arrays.current().arrays
        arrays = {path: cached.get(metadata.Node("draft", path)) for path in dict.fromkeys(paths)}
        found = {path: a.document.geometry for path, a in arrays.items() if a is not None}
        misses = [path for path in arrays if path not in found]
        keys = [array_key(path) for path in misses]
        values = await self.store._get_values(keys) if keys else []
        for path, value in zip(misses, values, strict=True):
            doc = metadata.parse_json(value)
            found[path] = None if doc is None else metadata.plain_geometry("draft", doc)
        return {path: geometry for path, geometry in found.items() if geometry is not None}

    async def places(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the keys in the store below for v3 keys of values; the first is for writing.

        The tuple is empty for a key that the draft would take for a chunk. It is also empty for the
        key of a Zarr v2 document, which zarr-python requests last.
        """
        return [
            at
            or (() if chunk or draft.is_v2_document(key) else (chunk_keys.DRAFT_DATA_ROOT + key,))
            for key, (at, chunk) in zip(keys, await self._chunks(keys), strict=True)
        ]

    async def v3_keys(self, base_keys: Sequence[str], *, leading: bool = False) -> list[str | None]:
        """Return the v3 keys of values below ``data/root/``; ``None``: v3 has no such key.

        With `leading` also the keys of directories of chunks.
        """
        rests = [key.removeprefix(chunk_keys.DRAFT_DATA_ROOT) for key in base_keys]
        keys: list[str | None] = []
        for rest, (at, chunk) in zip(rests, await self._chunks(rests, leading), strict=True):
            is_document = draft.node_of_v3_key(rest) is not None or draft.is_v2_document(rest)
            keys.append(chunk or (None if at or is_document else rest))
        return keys

    async def _chunks(
        self, keys: Sequence[str], leading: bool = False
    ) -> list[tuple[tuple[str, ...], str | None]]:
        """Return the keys below of each key as a v3 chunk, and its v3 key as a draft chunk."""
        as_v3 = [draft.v3_candidate(key) for key in keys]
        as_draft = [draft.draft_candidate_of(key) for key in keys]
        known = await self.arrays(found[0] for found in (*as_v3, *as_draft) if found is not None)
        return [
            (draft.chunk_places(known, v3), draft.v3_chunk_key(known, other, leading=leading))
            for v3, other in zip(as_v3, as_draft, strict=True)
        ]

    # ----------------------------------------------------------------- listing

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List the v3 keys that start with `prefix`; the path of an array means its directory."""
        prefix = chunk_keys.check_prefix(prefix)
        if prefix and not prefix.endswith("/") and await self.arrays([prefix]):
            prefix += "/"
        directory = prefix[: prefix.rfind("/") + 1]
        own = directory.removesuffix("/")
        (document,) = await self.read([own])
        seen = {own}
        if document is not None and v3_key(own).startswith(prefix):
            yield v3_key(own)
        async for key in self.store.list_prefix(DRAFT_META_ROOT + directory):
            path = draft.node_of_meta_key(key)
            while path is not None and path not in seen:  # otherwise its parents are listed
                seen.add(path)
                if v3_key(path).startswith(prefix):
                    yield v3_key(path)
                path = path.rpartition("/")[0]
        listed: set[str] = set()  # the chunk of a 0-d array may have two places
        for base_prefix in await self._data_prefixes(directory):
            async for part in _in_parts(self.store.list_prefix(base_prefix)):
                for shown in await self.v3_keys(part):
                    if shown is not None and shown.startswith(prefix) and shown not in listed:
                        listed.add(shown)
                        yield shown

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List the names of the v3 keys and directories directly in a directory."""
        path = chunk_keys.check_prefix(prefix).removesuffix("/")
        directory = draft.directory_of(path)
        (document,) = await self.read([path])
        names = set() if document is None else {v3_key("")}
        below = DRAFT_META_ROOT + directory
        nodes = {n: draft.node_of_meta_key(below + n) async for n in self.store.list_dir(below)}
        for name, node in nodes.items():
            # A node may have the name of a document, ``foo.array.json``, and its own document.
            is_node = not nodes.keys().isdisjoint([f"{name}.array.json", f"{name}.group.json"])
            if node is not None and (not is_node or (await self.read([node]))[0] is not None):
                names.add(node.removeprefix(directory))
        for name, node in nodes.items():
            # Local files keep empty directories after deletions.
            if node is None and name not in names and await self.has_nodes_below(directory + name):
                names.add(name)
        for base_directory in await self._data_prefixes(directory):
            found = [base_directory + name async for name in self.store.list_dir(base_directory)]
            for at, key in zip(found, await self.v3_keys(found, leading=True), strict=True):
                if key is None and [name async for name in self.store.list_dir(at)]:
                    key = at.removeprefix(chunk_keys.DRAFT_DATA_ROOT)  # a directory
                if key is not None and key.startswith(directory):
                    names.add(key.removeprefix(directory).partition("/")[0])
        for name in sorted(names):
            yield name

    async def _data_prefixes(self, directory: str) -> list[str]:
        """Return the prefixes of the stored values whose v3 keys are in a directory."""
        prefixes = [chunk_keys.DRAFT_DATA_ROOT + directory]
        path, suffix = draft.v3_candidate(directory.removesuffix("/")) or ("", "")
        geometry = (await self.arrays([path])).get(path) if suffix else None
        if geometry is None or geometry.encoding.separator != "/":
            return prefixes
        marker, *numbers = suffix.split("/")
        if marker == "c" and len(numbers) < len(geometry.shape):
            in_array = f"c{'/'.join(numbers)}/" if numbers else ""
            prefixes.append(metadata.Node("draft", path).chunk_prefix + in_array)
        return prefixes


async def _in_parts(keys: AsyncIterator[str]) -> AsyncIterator[list[str]]:
    part: list[str] = []
    async for key in keys:
        part.append(key)
        if len(part) == _KEYS_PER_ROUND:
            yield part
            part = []
    yield part


def _parse(key: str, value: bytes | memoryview) -> declarations.Document:
    doc = metadata.parse_json(value)
    if doc is None:
        raise SpecError(f"{key!r} is no JSON object")
    return doc


def _translated(
    key: str,
    value: bytes | memoryview,
    translate: Callable[..., declarations.Document],
    *stored: declarations.Document | None,
) -> bytes:
    """Return the bytes of a translated document; an error names its key."""
    doc = _parse(key, value)
    try:
        return metadata.dump_document(translate(doc, *stored))
    except (SpecError, UnsupportedError) as error:
        raise type(error)(f"{key!r}: {error}") from error
