"""Nodes of a draft hierarchy: documents, chunk keys and listings, as those of Zarr v3.

Only the document of an array says which keys are its chunks. The `ShardingStore` below caches
parsed documents, so chunks of known arrays cost no request here.

Listings take keys of documents from ``meta/root/``, with the groups that they imply, and keys of
chunks and of other values from ``data/root/``.

Source: Zarr v3 draft of 2022, "Storage keys" and "Metadata", implicit groups; sharding storage
transformer draft, "API implementation", list, list_prefix, list_dir.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.buffer.cpu import Buffer as CpuBuffer

from zarr_shardstore.draft.draft_translation import (
    DRAFT_META_ROOT,
    ENTRY_POINT,
    ENTRY_POINT_KEY,
    array_key,
    array_of_draft,
    array_to_draft,
    check_entry_point,
    chunk_places,
    directory_of,
    directory_to_draft,
    draft_candidate_of,
    group_key,
    group_of_draft,
    group_to_draft,
    is_v2_document,
    node_of_meta_key,
    node_of_v3_key,
    v3_candidate,
    v3_chunk_key,
    v3_key,
)
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT, check_prefix
from zarr_shardstore.metadata.documents import (
    Geometry,
    Node,
    dump_document,
    parse_json,
    plain_geometry,
)
from zarr_shardstore.store.sharding_store import ShardingStore

_KEYS_PER_ROUND = 1000


class DraftNodes:
    """Documents and keys of the draft hierarchy in a `ShardingStore`.

    Thread safety: that of the store below.
    """

    def __init__(self, store: ShardingStore) -> None:
        self.store = store

    # --------------------------------------------------------------- documents

    async def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return v3 documents of nodes, ``None`` where there is none.

        Cost: one round for all, and a listing for each that has no document.
        """
        keys = [key for path in paths for key in (array_key(path), group_key(path))]
        *stored, entry_point = await self._get([*keys, ENTRY_POINT_KEY])
        shown: list[bytes | None] = []
        for path, array, group in zip(paths, stored[::2], stored[1::2], strict=True):
            if path == "" and entry_point is not None:
                check_entry_point(parse_json(entry_point))
            if array is not None:
                key = array_key(path)
                shown.append(_translate(key, array_of_draft, _parse(key, array)))
            elif group is not None:
                key = group_key(path)
                shown.append(_translate(key, group_of_draft, _parse(key, group)))
            elif (path == "" and entry_point is not None) or await self.has_nodes_below(path):
                shown.append(dump_document(group_of_draft({})))
            else:
                shown.append(None)
        return shown

    async def has_nodes_below(self, path: str) -> bool:
        """Return whether there is a document below a path, which makes it a group.

        Cost: one listing of a directory; more only where it has directories and no documents.
        """
        names = [n async for n in self.store.list_dir(DRAFT_META_ROOT + directory_of(path))]
        below = [f"{directory_of(path)}{name}" for name in names]
        if any(node_of_meta_key(DRAFT_META_ROOT + name) is not None for name in below):
            return True
        for name in below:
            if await self.has_nodes_below(name):
                return True
        return False

    async def write(self, path: str, value: bytes, *, only_if_missing: bool = False) -> None:
        """Store the v3 document of a node as one of the draft.

        The document of the other kind is removed; a missing entry point is written. Nothing is
        written if the draft cannot express the document.
        """
        key = v3_key(path)
        doc = _parse(key, value)
        kind = doc.get("node_type")
        if kind not in ("array", "group"):
            raise SpecError(f"{key!r}: a Zarr v3 document has the node_type 'array' or 'group'")
        keys = {"array": array_key(path), "group": group_key(path)}
        *documents, entry_point = await self._get([*keys.values(), ENTRY_POINT_KEY])
        stored = {k: d for k, d in zip(keys, documents, strict=True) if d is not None}
        if entry_point is not None:
            check_entry_point(parse_json(entry_point))
        if only_if_missing and (stored or (kind == "array" and await self.has_nodes_below(path))):
            return
        translate = array_to_draft if kind == "array" else group_to_draft
        before = parse_json(stored[kind]) if kind in stored else None
        translated = _translate(key, translate, doc, before)
        await self.store.set(keys[kind], CpuBuffer.from_bytes(translated))
        other = "group" if kind == "array" else "array"
        if other in stored:
            await self.store.delete(keys[other])
        if entry_point is None:
            entry = CpuBuffer.from_bytes(dump_document(ENTRY_POINT))
            await self.store.set_if_not_exists(ENTRY_POINT_KEY, entry)

    async def erase(self, path: str) -> None:
        """Remove the documents of a node; also the entry point, if there is nothing else."""
        if path == "":
            await self.check_entry_point()
        await self.store._erase_values([array_key(path), group_key(path)])
        if path == "" and not await self.has_nodes_below(""):
            await self.store.delete(ENTRY_POINT_KEY)

    async def check_entry_point(self) -> None:
        """Refuse a base store that holds another hierarchy than one of the draft."""
        (entry_point,) = await self._get([ENTRY_POINT_KEY])
        if entry_point is not None:
            check_entry_point(parse_json(entry_point))

    async def _get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, in one round."""
        prototype = default_buffer_prototype()
        values = await self.store.get_partial_values(prototype, [(key, None) for key in keys])
        return [None if value is None else value.to_bytes() for value in values]

    # -------------------------------------------------------------------- keys

    async def arrays(self, paths: Iterable[str]) -> dict[str, Geometry]:
        """Return the geometries of arrays by path; paths of no array are left out.

        Cost: one round for all that the store below has not cached.
        """
        cached = self.store._engine.operations.arrays.current().arrays
        found = {}
        misses = []
        for path in dict.fromkeys(paths):
            array = cached.get(Node("draft", path))
            if array is None:
                misses.append(path)
            elif array.document.geometry is not None:
                found[path] = array.document.geometry
        documents = await self._get([array_key(path) for path in misses]) if misses else []
        for path, document in zip(misses, documents, strict=True):
            doc = None if document is None else parse_json(document)
            geometry = None if doc is None else plain_geometry("draft", doc)
            if geometry is not None:
                found[path] = geometry
        return found

    async def base_keys(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the places of v3 keys that are no documents: keys below, the first for writing.

        The tuple is empty for two kinds of keys: those that the draft would take for chunks, and
        those of Zarr v2 documents, which zarr-python asks for last.
        """
        as_v3 = [v3_candidate(key) for key in keys]
        as_draft = [draft_candidate_of(key) for key in keys]
        known = await self.arrays(c[0] for c in (*as_v3, *as_draft) if c is not None)
        places = []
        for key, v3, draft in zip(keys, as_v3, as_draft, strict=True):
            chunk = chunk_places(known, v3)
            if not chunk and not is_v2_document(key) and v3_chunk_key(known, draft) is None:
                chunk = (DRAFT_DATA_ROOT + key,)
            places.append(chunk)
        return places

    async def places_to_write(self, keys: Sequence[str]) -> list[str]:
        """Return the places at which values of v3 keys, which are no documents, are written."""
        for key in keys:
            if is_v2_document(key):
                raise UnsupportedError(
                    f"{key!r} is a document of Zarr v2: through this store arrays and groups are "
                    "created with zarr_format=3"
                )
        found = []
        for key, places in zip(keys, await self.base_keys(keys), strict=True):
            if not places:
                raise SpecError(
                    f"{key!r} cannot be stored: in the draft hierarchy "
                    f"{DRAFT_DATA_ROOT + key!r} is the key of a chunk"
                )
            found.append(places[0])
        return found

    async def v3_keys(self, base_keys: Sequence[str]) -> list[str | None]:
        """Return the v3 keys of values below ``data/root/``; ``None`` where v3 has no key."""
        rests = [key.removeprefix(DRAFT_DATA_ROOT) for key in base_keys]
        as_draft = [draft_candidate_of(rest) for rest in rests]
        as_v3 = [v3_candidate(rest) for rest in rests]
        known = await self.arrays(c[0] for c in (*as_draft, *as_v3) if c is not None)
        keys: list[str | None] = []
        for rest, draft, v3 in zip(rests, as_draft, as_v3, strict=True):
            chunk = v3_chunk_key(known, draft)
            is_hidden = chunk is None and (
                chunk_places(known, v3) or node_of_v3_key(rest) is not None or is_v2_document(rest)
            )
            keys.append(None if is_hidden else chunk or rest)
        return keys

    # ----------------------------------------------------------------- listing

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List the v3 keys that start with `prefix`; the path of an array means its directory."""
        prefix = check_prefix(prefix)
        if prefix and not prefix.endswith("/") and await self.arrays([prefix]):
            prefix += "/"
        directory = prefix[: prefix.rfind("/") + 1]
        async for key in self._list_documents(directory):
            if key.startswith(prefix):
                yield key
        listed: set[str] = set()  # the chunk of a 0-d array may have two places
        part: list[str] = []
        for base_prefix in await self._data_prefixes(directory):
            async for base_key in self.store.list_prefix(base_prefix):
                part.append(base_key)
                if len(part) == _KEYS_PER_ROUND:
                    for key in await self._translated(part, prefix, listed):
                        yield key
                    part.clear()
        for key in await self._translated(part, prefix, listed):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List the names of the v3 keys and directories directly in a directory."""
        path = check_prefix(prefix).removesuffix("/")
        directory = directory_of(path)
        (document,) = await self.read([path])
        names: dict[str, None] = {}
        if document is not None:
            names[v3_key("")] = None
        below = [name async for name in self.store.list_dir(DRAFT_META_ROOT + directory)]
        directories = await self._directories_among(directory, below)
        for name in below:
            node = node_of_meta_key(f"{DRAFT_META_ROOT}{directory}{name}")
            if node is not None and name not in directories:
                names[node.removeprefix(directory)] = None
        for name in directories:
            # Local files keep empty directories after deletions.
            if name not in names and await self.has_nodes_below(directory + name):
                names[name] = None
        for base_directory in await self._data_prefixes(directory):
            found = [n async for n in self.store.list_dir(base_directory)]
            for name in await self._shown_names(base_directory, directory, found):
                names[name] = None
        for name in names:
            yield name

    async def _directories_among(self, directory: str, below: list[str]) -> list[str]:
        """Return the names in a directory below ``meta/root/`` that are directories.

        A node may be named as a document is, ``foo.array.json``. If it has a document of its own,
        the store is asked for a value under that name; if not, the name is the document of
        ``foo``.
        """
        all_below = set(below)
        # fsspec says of directories, too, that they exist; only a value has a first byte.
        prototype, first = default_buffer_prototype(), RangeByteRequest(0, 1)
        directories = []
        for name in below:
            key = f"{DRAFT_META_ROOT}{directory}{name}"
            if node_of_meta_key(key) is not None:
                own = {f"{name}.array.json", f"{name}.group.json"}
                if not own & all_below or await self.store.get(key, prototype, first) is not None:
                    continue
            directories.append(name)
        return directories

    async def _list_documents(self, directory: str) -> AsyncIterator[str]:
        """List the v3 keys of the documents in a directory, that of its own node first."""
        own = directory.removesuffix("/")
        (document,) = await self.read([own])
        seen = {own}
        if document is not None:
            yield v3_key(own)
        async for key in self.store.list_prefix(DRAFT_META_ROOT + directory):
            path = node_of_meta_key(key)
            while path is not None and path not in seen:  # else its parents are listed, too
                seen.add(path)
                yield v3_key(path)
                path = path.rpartition("/")[0]

    async def _data_prefixes(self, directory: str) -> list[str]:
        """Return the prefixes below which values are stored whose v3 keys are in a directory."""
        prefixes = [DRAFT_DATA_ROOT + directory]
        candidate = v3_candidate(directory.removesuffix("/"))
        if candidate is not None:
            path, suffix = candidate
            for geometry in (await self.arrays([path])).values():
                in_array = directory_to_draft(geometry, suffix)
                if in_array is not None:
                    prefixes.append(DRAFT_DATA_ROOT + directory_of(path) + in_array)
        return prefixes

    async def _translated(self, base_keys: list[str], prefix: str, listed: set[str]) -> list[str]:
        """Return the v3 keys that start with `prefix` and were not listed yet."""
        shown = []
        for key in await self.v3_keys(base_keys):
            if key is not None and key.startswith(prefix) and key not in listed:
                listed.add(key)
                shown.append(key)
        return shown

    async def _shown_names(
        self, base_directory: str, directory: str, names: list[str]
    ) -> list[str]:
        """Return the names in a v3 directory for those in a directory below ``data/root/``."""
        rests = [base_directory.removeprefix(DRAFT_DATA_ROOT) + name for name in names]
        as_draft = [draft_candidate_of(rest) for rest in rests]
        known = await self.arrays(c[0] for c in as_draft if c is not None)
        shown = []
        others = []
        for rest, draft in zip(rests, as_draft, strict=True):
            key = v3_chunk_key(known, draft, leading=True)
            if key is not None:
                shown.append(key)
            else:
                others.append(DRAFT_DATA_ROOT + rest)
        for other, key in zip(others, await self.v3_keys(others), strict=True):
            if key is not None:
                shown.append(key)
            elif [name async for name in self.store.list_dir(other)]:
                # A key of this name has no v3 key, but this is a directory.
                shown.append(other.removeprefix(DRAFT_DATA_ROOT))
        inside = [key.removeprefix(directory) for key in shown if key.startswith(directory)]
        return [name.partition("/")[0] for name in inside]


def _parse(key: str, value: bytes) -> dict[str, Any]:
    doc = parse_json(value)
    if doc is None:
        raise SpecError(f"{key!r} is no JSON object")
    return doc


def _translate(key: str, function: Any, *arguments: Any) -> bytes:
    """Return the bytes of a translated document; an error names its key."""
    try:
        return dump_document(function(*arguments))
    except (SpecError, UnsupportedError) as error:
        raise type(error)(f"{key!r}: {error}") from error
