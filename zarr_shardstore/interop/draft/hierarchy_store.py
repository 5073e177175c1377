"""`DraftHierarchyStore`: the draft hierarchy of 2022 as a zarr ``Store`` of Zarr v3 keys.

Source: sharding storage transformer draft, "API implementation".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from zarr_shardstore.access import (
    Batch,
    ShardingStore,
    buffers,
    byte_ranges,
    chunk_keys,
    requests,
    resolve,
)
from zarr_shardstore.errors import SpecError
from zarr_shardstore.interop.draft.draft_nodes import DraftNodes
from zarr_shardstore.tools.native import draft_documents as draft


class DraftHierarchyStore(Store):
    """Zarr store that shows a hierarchy of the 2022 draft as one of Zarr v3.

    Documents, in ``meta/root/``, and keys of chunks, in ``data/root/``, are translated both ways.
    zarr-python 2.18 reads the arrays with ``ZARR_V3_EXPERIMENTAL_API=1 ZARR_V3_SHARDING=1``. Bytes
    of chunks never change.

    Parameters
    ----------
    store
        A `ShardingStore`, which shards new arrays by its ``chunks_per_shard``; or a base store and
        the options of `ShardingStore`.
    read_only : bool
        Refuse writes.

    Notes
    -----
    A document that cannot be translated raises `UnsupportedError` before anything is written:
    structured data types and types of variable length, codecs other than a compressor of
    numcodecs, filters, irregular chunk grids, chunk keys of v2, ``shards=`` and consolidated
    metadata. A key that the draft would take for a chunk raises `SpecError`.

    Members that v3 lacks, such as extensions, stay in the stored document if attributes or the
    shape change. Keys outside ``meta/root``, ``data/root`` and the entry point are never shown or
    changed.

    Thread safety: as `ShardingStore` for chunks. Of two writers of one document the later wins.

    Cost: as `ShardingStore` for chunks; one round for a document, and a listing if it is missing.
    Listing a directory takes one more request, and one for each directory without a document.

    Examples
    --------
    >>> import zarr
    >>> base = {}
    >>> store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=(2, 2)))
    >>> z = zarr.create_array(store, name="foo", shape=(4, 4), chunks=(1, 1), dtype="u1")
    >>> z[:] = 1
    >>> sorted(key for key in base if "foo" in key)[:3]
    ['data/root/foo/c0/0', 'data/root/foo/c0/1', 'data/root/foo/c1/0']
    >>> sorted(base)[-3:]
    ['meta/root.group.json', 'meta/root/foo.array.json', 'zarr.json']
    """

    def __init__(
        self, store: resolve.BaseStoreLike, *, read_only: bool = False, **options: Any
    ) -> None:
        if not isinstance(store, ShardingStore):
            store = ShardingStore(store, read_only=read_only, **options)
        elif options:
            raise SpecError("the ShardingStore has its options: pass them to it")
        elif read_only and not store.read_only:
            store = store.with_read_only(True)
        super().__init__(read_only=store.read_only)
        self._store = store
        self._nodes = DraftNodes(store)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._store,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftHierarchyStore) and self._store == other._store

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"draft+{self._store}"

    def __repr__(self) -> str:
        mode = ", read_only=True" if self.read_only else ""
        return f"DraftHierarchyStore({self._store!r}{mode})"

    @property
    def store(self) -> ShardingStore:
        """Store below, with the keys of the draft."""
        return self._store

    def with_read_only(self, read_only: bool = False) -> DraftHierarchyStore:
        """Return the same store, not open, that takes writes or refuses them."""
        return type(self)(self._store.with_read_only(read_only))

    def refresh(self) -> None:
        """Drop cached metadata, after another process has created, removed or replaced arrays."""
        self._store.refresh()

    # ----------------------------------------------------- open and capabilities

    async def _ensure_open(self) -> None:
        # The store below opens itself. `_open` refuses a store that another thread opened first.
        self._is_open = True

    def close(self) -> None:
        """Close this store and the one below."""
        self._store.close()
        super().close()

    def _check_writable(self) -> None:
        self._store._check_writable()

    supports_writes = property(attrgetter("_store.supports_writes"))
    supports_deletes = property(attrgetter("_store.supports_deletes"))
    supports_listing = property(attrgetter("_store.supports_listing"))
    supports_consolidated_metadata = False

    # -------------------------------------------------------------------- reads

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        prototype = prototype or default_buffer_prototype()
        (value,) = await self.get_partial_values(prototype, [(key, byte_range)])
        return value

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return values or ranges of values, ``None`` for missing keys."""
        asked = list(key_ranges)
        values: list[Buffer | None] = [None] * len(asked)
        paths = [_path_of_document(key) for key, _ in asked]
        documents = {i: path for i, path in enumerate(paths) if path is not None}
        shown = await self._nodes.read(list(documents.values())) if documents else []
        for i, document in zip(documents, shown, strict=True):
            if document is not None:
                wanted = buffers.range_of(asked[i][1])
                start, stop = byte_ranges.resolve_range(wanted, len(document))
                values[i] = prototype.buffer.from_bytes(document)[start:stop]
        others = [i for i, path in enumerate(paths) if path is None]
        places = await self._nodes.places([asked[i][0] for i in others])
        left = dict(zip(others, places, strict=True))
        while left := {i: at for i, at in left.items() if at and values[i] is None}:
            ranges = [(at[0], asked[i][1]) for i, at in left.items()]
            found = await self._store.get_partial_values(prototype, ranges)
            for i, value in zip(left, found, strict=True):
                values[i] = value
            left = {i: at[1:] for i, at in left.items()}  # the second place of a 0-d chunk
        return values

    async def exists(self, key: str) -> bool:
        document, places = await self._find(key)
        if document is not None:
            return True
        for place in places:
            if await self._store.exists(place):
                return True
        return False

    async def getsize(self, key: str) -> int:
        """Return the size of a value, or of a translated document, in bytes."""
        document, places = await self._find(key)
        if document is not None:
            return len(document)
        for place in places:
            try:
                return await self._store.getsize(place)
            except FileNotFoundError:
                continue
        raise FileNotFoundError(key)

    async def _find(self, key: str) -> tuple[bytes | None, tuple[str, ...]]:
        """Return the document of a key, or the keys below of another value."""
        path = _path_of_document(key)
        if path is not None:
            return (await self._nodes.read([path]))[0], ()
        return None, (await self._nodes.places([key]))[0]

    # ------------------------------------------------------------------- writes

    def batch(self, *, max_nbytes: int | None = None) -> Batch:
        """Return a batch of the store below, as `ShardingStore.batch`."""
        self._check_writable()
        return self._store.batch(max_nbytes=max_nbytes)

    async def set(self, key: str, value: Buffer) -> None:
        await self._set(key, value, only_if_missing=False)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Store a value if there is none; an implicit group becomes one with a document."""
        await self._set(key, value, only_if_missing=True)

    async def _set(self, key: str, value: Buffer, *, only_if_missing: bool) -> None:
        self._check_writable()
        path = _path_of_document(key)
        if path is not None:
            await self._nodes.write(path, buffers.as_view(value), only_if_missing=only_if_missing)
            return
        (places,) = await self._nodes.places([key])
        place = draft.place_to_write(key, places)
        if not only_if_missing:
            await self._store.set(place, value)
        elif not await self.exists(key):
            await self._store.set_if_not_exists(place, value)

    async def delete(self, key: str) -> None:
        self._check_writable()
        path = _path_of_document(key)
        if path is not None:
            await self._nodes.erase(path)
            return
        (places,) = await self._nodes.places([key])
        await self._store._set_or_erase([(place, None) for place in places])

    async def delete_dir(self, prefix: str) -> None:
        """Erase a node and all below it, or the values in a directory of chunks."""
        self._check_writable()
        path = chunk_keys.check_prefix(prefix).removesuffix("/")
        if path == "":
            await self._nodes.stored([])
        directory = draft.directory_of(path)
        candidates = (draft.v3_candidate(path), draft.draft_candidate_of(path))
        paths = [candidate[0] for candidate in candidates if path and candidate is not None]
        # Documents last: an interrupted removal leaves an array.
        if await self._nodes.arrays(paths):  # chunks of an array around the directory
            keys = [key async for key in self._nodes.list_prefix(directory)]
            others = [key for key in keys if draft.node_of_v3_key(key) is None]
            places = await self._nodes.places(others)
            await self._store._set_or_erase([(place, None) for at in places for place in at])
        else:
            await self._store.delete_dir(chunk_keys.DRAFT_DATA_ROOT + directory)
        await self._store.delete_dir(draft.DRAFT_META_ROOT + directory)
        await self._nodes.erase(path)

    async def clear(self) -> None:
        """Erase the whole hierarchy and its entry point."""
        await self.delete_dir("")

    # --------------------------------------------------- for `ShardedCodecPipeline`

    async def _shard_ids(self, keys: Sequence[str]) -> Sequence[Hashable]:
        places = await self._nodes.places(keys)
        firsts = [at[0] if at else key for at, key in zip(places, keys, strict=True)]
        return await self._store._shard_ids(firsts)

    async def _get_values(
        self, keys: Sequence[str], _: BufferPrototype | None = None
    ) -> Sequence[memoryview | None]:
        ranges = [(key, None) for key in keys]
        values = await self.get_partial_values(default_buffer_prototype(), ranges)
        return [None if value is None else buffers.as_view(value) for value in values]

    async def _set_or_erase(
        self,
        items: Iterable[tuple[str, Buffer | requests.Modify | None]],
        prototype: BufferPrototype | None = None,
    ) -> None:
        """Store values that are no documents in one call; ``None`` erases a value."""
        self._check_writable()
        items = list(items)
        for key, _ in items:
            if _path_of_document(key) is not None:
                raise SpecError(f"key {key!r} is a document: store or erase it by itself")
        placed: list[tuple[str, Buffer | requests.Modify | None]] = []
        found = await self._nodes.places([key for key, _ in items])
        for (key, value), places in zip(items, found, strict=True):
            at = places if value is None else (draft.place_to_write(key, places),)
            placed += [(place, value) for place in at]
        await self._store._set_or_erase(placed, prototype)

    # ------------------------------------------------------------------ listing

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List the keys that start with `prefix`; the path of an array means its directory."""
        return self._nodes.list_prefix(prefix)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        return self._nodes.list_dir(prefix)


def _path_of_document(key: str) -> str | None:
    """Check a key, and return the path of the node whose document it names."""
    chunk_keys.check_key(key)
    return draft.node_of_v3_key(key)
