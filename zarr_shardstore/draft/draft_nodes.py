"""Nodes of a draft hierarchy: their documents, as those of Zarr v3, and the keys of their values.

Only the document of an array says which keys are its chunks. The spelling of its chunk keys is
cached. It is replaced when the document is read or written again, and dropped when a store of
this process changes any document.

Source: Zarr v3 draft of 2022, "Storage keys" and "Metadata", implicit groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.buffer.cpu import Buffer as CpuBuffer

from zarr_shardstore.arrays.array_cache import n_document_changes
from zarr_shardstore.draft.draft_documents import (
    ENTRY_POINT,
    array_of_draft,
    array_to_draft,
    check_entry_point,
    group_of_draft,
    group_to_draft,
)
from zarr_shardstore.draft.draft_keys import (
    DRAFT_META_ROOT,
    ENTRY_POINT_KEY,
    ChunkSpelling,
    array_key,
    directory_of,
    draft_candidate_of,
    group_key,
    is_v2_document,
    node_of_meta_key,
    node_of_v3_key,
    v3_candidate,
    v3_key,
)
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT
from zarr_shardstore.metadata.documents import dump_document, parse_json
from zarr_shardstore.store.sharding_store import ShardingStore


class DraftNodes:
    """Documents and chunk keys of the draft hierarchy in a `ShardingStore`.

    Thread safety: that of the store below; the spellings of chunk keys are cached in a dict.
    """

    def __init__(self, store: ShardingStore) -> None:
        self.store = store
        self._spellings: dict[str, ChunkSpelling] = {}
        self._n_changes = 0  # replies to requests from before a change are not cached
        self._n_changes_of_process = n_document_changes()

    def forget(self) -> None:
        """Drop the cached spellings."""
        self._n_changes += 1
        self._spellings.clear()

    def forget_below(self, directory: str) -> None:
        """Drop the cached spellings of arrays in a directory, whose documents were removed."""
        self._n_changes += 1
        for path in [p for p in self._spellings if directory_of(p).startswith(directory)]:
            self._spellings.pop(path, None)

    def _put(self, path: str, spelling: ChunkSpelling | None) -> None:
        if spelling is None:
            self._spellings.pop(path, None)
        else:
            self._spellings[path] = spelling

    def _revalidate(self) -> int:
        """Drop the cache if a store of this process changed a document; return its generation."""
        n_changes = n_document_changes()
        if self._n_changes_of_process != n_changes:
            self._n_changes_of_process = n_changes
            self.forget()
        return self._n_changes

    # --------------------------------------------------------------- documents

    async def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return v3 documents of nodes, ``None`` where there is none.

        Cost: one round for all, and a listing for each that has no document.
        """
        keys = [key for path in paths for key in (array_key(path), group_key(path))]
        n_changes = self._revalidate()
        *stored, entry_point = await self._get([*keys, ENTRY_POINT_KEY])
        shown: list[bytes | None] = []
        for path, array, group in zip(paths, stored[::2], stored[1::2], strict=True):
            if path == "" and entry_point is not None:
                check_entry_point(parse_json(entry_point))
            if array is not None:
                doc = _parse(array_key(path), array)
                if n_changes == self._n_changes:
                    self._put(path, ChunkSpelling.of(doc))
                shown.append(_translate(array_key(path), array_of_draft, doc))
                continue
            self._put(path, None)
            if group is not None:
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

        The document of the other kind is removed; a missing entry point is written.
        """
        key = v3_key(path)
        doc = _parse(key, value)
        kind = doc.get("node_type")
        if kind not in ("array", "group"):
            raise SpecError(f"{key!r}: a Zarr v3 document has the node_type 'array' or 'group'")
        array, group, entry_point = await self._get(
            [array_key(path), group_key(path), ENTRY_POINT_KEY]
        )
        if entry_point is not None:
            check_entry_point(parse_json(entry_point))
        if only_if_missing and (array is not None or group is not None):
            return
        if kind == "array":
            if only_if_missing and await self.has_nodes_below(path):
                return
            own_key, stored, other_key, other = array_key(path), array, group_key(path), group
            translate = array_to_draft
        else:
            own_key, stored, other_key, other = group_key(path), group, array_key(path), array
            translate = group_to_draft
        before = None if stored is None else parse_json(stored)
        translated = _translate(key, translate, doc, before)
        await self.store.set(own_key, CpuBuffer.from_bytes(translated))
        self._n_changes += 1
        is_array = kind == "array"
        self._put(path, ChunkSpelling.of(parse_json(translated) or {}) if is_array else None)
        if other is not None:
            await self.store.delete(other_key)
        if entry_point is None:
            entry = CpuBuffer.from_bytes(dump_document(ENTRY_POINT))
            await self.store.set_if_not_exists(ENTRY_POINT_KEY, entry)

    async def erase(self, path: str) -> None:
        """Remove the documents of a node; also the entry point, if there is nothing else."""
        if path == "":
            await self.check_entry_point()
        self._n_changes += 1
        self._put(path, None)
        await self.store._erase_values([array_key(path), group_key(path)])
        if path == "" and not await self.has_nodes_below(""):
            await self.store.delete(ENTRY_POINT_KEY)

    async def check_entry_point(self) -> None:
        """Refuse a base store that holds another hierarchy than one of the draft."""
        (entry_point,) = await self._get([ENTRY_POINT_KEY])
        if entry_point is not None:
            check_entry_point(parse_json(entry_point))

    async def has_value(self, base_key: str) -> bool:
        """Return whether a key of the store below has a value; a directory has none."""
        first = RangeByteRequest(0, 1)  # fsspec says of directories too that they exist
        return await self.store.get(base_key, default_buffer_prototype(), first) is not None

    async def _get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, in one round."""
        prototype = default_buffer_prototype()
        values = await self.store.get_partial_values(prototype, [(key, None) for key in keys])
        return [None if value is None else value.to_bytes() for value in values]

    # -------------------------------------------------------------------- keys

    async def spellings(self, paths: Iterable[str]) -> dict[str, ChunkSpelling]:
        """Return the spellings of the chunk keys of arrays; paths of no array are left out.

        Cost: one round for all that are not cached.
        """
        n_changes = self._revalidate()
        wanted = dict.fromkeys(paths)
        misses = [path for path in wanted if path not in self._spellings]
        found: dict[str, ChunkSpelling] = {}
        if misses:
            documents = await self._get([array_key(path) for path in misses])
            for path, document in zip(misses, documents, strict=True):
                spelling = ChunkSpelling.of(parse_json(document) or {}) if document else None
                if spelling is not None:
                    found[path] = spelling
            if n_changes == self._n_changes:
                self._spellings.update(found)
        both = {path: found.get(path) or self._spellings.get(path) for path in wanted}
        return {path: spelling for path, spelling in both.items() if spelling is not None}

    async def base_keys(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the places of v3 keys that are no documents: keys below, the first for writing.

        The tuple is empty for two kinds of keys: those that the draft would take for chunks, and
        those of Zarr v2 documents, which zarr-python asks for last.
        """
        as_v3 = [v3_candidate(key) for key in keys]
        as_draft = [draft_candidate_of(key) for key in keys]
        known = await self.spellings(c[0] for c in (*as_v3, *as_draft) if c is not None)
        places = []
        for key, v3, draft in zip(keys, as_v3, as_draft, strict=True):
            suffixes = known[v3[0]].to_draft(v3[1]) if v3 and v3[0] in known else ()
            if v3 and suffixes:
                prefix = DRAFT_DATA_ROOT + directory_of(v3[0])
                places.append(tuple(prefix + suffix for suffix in suffixes))
            elif is_v2_document(key) or (
                draft and draft[0] in known and known[draft[0]].to_v3(draft[1]) is not None
            ):
                places.append(())
            else:
                places.append((DRAFT_DATA_ROOT + key,))
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
        known = await self.spellings(c[0] for c in (*as_draft, *as_v3) if c is not None)
        keys: list[str | None] = []
        for rest, draft, v3 in zip(rests, as_draft, as_v3, strict=True):
            suffix = known[draft[0]].to_v3(draft[1]) if draft and draft[0] in known else None
            if draft and suffix is not None:
                keys.append(directory_of(draft[0]) + suffix)
            elif (
                (v3 and v3[0] in known and known[v3[0]].to_draft(v3[1]))
                or node_of_v3_key(rest) is not None
                or is_v2_document(rest)
            ):
                keys.append(None)
            else:
                keys.append(rest)
        return keys


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
