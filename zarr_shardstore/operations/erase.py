"""Erase values: of single keys, of all with a prefix, of parts of a chunk grid.

Source: sharding storage transformer draft, "API implementation", erase_values, erase_prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from zarr_shardstore.arrays.array_cache import ArrayCache
from zarr_shardstore.arrays.catalog import Catalog, InvalidChunkKey, TransformedKey
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.arguments import items_of
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.metadata.documents import Node, node_of_document
from zarr_shardstore.operations.batch import WriteBuffer
from zarr_shardstore.operations.flush import Flusher
from zarr_shardstore.operations.listing import Listing, raise_first
from zarr_shardstore.operations.routing import Owner, Router, is_document
from zarr_shardstore.shards.requests import (
    Delete,
    DeletePrefix,
    Flow,
    Found,
    Get,
    Request,
    UpdateShard,
)
from zarr_shardstore.shards.shard_listing import GridDirectory
from zarr_shardstore.shards.updates import DeleteEntry

_ERASURES_AT_ONCE = 1 << 18
"""Of entries, in memory: about 25 MB."""


class Eraser:
    """Flows that erase values of one store."""

    def __init__(
        self,
        router: Router,
        catalog: Catalog,
        arrays: ArrayCache,
        listing: Listing,
        flusher: Flusher,
        buffer: WriteBuffer,
        refuse_links: Callable[[str], None],
    ) -> None:
        self._router = router
        self._catalog = catalog
        self._arrays = arrays
        self._listing = listing
        self._flusher = flusher
        self._buffer = buffer
        self._refuse_links = refuse_links

    def erase_values(self, keys: Iterable[str]) -> Flow[None]:
        """Erase values; those of one shard together. A missing key is no error."""
        requests, kept = yield from self.erasures(keys)
        nodes = [node for request in requests if (node := node_of_document(request.key))]
        arrays = yield from self._arrays.lookup(nodes)
        try:
            if nodes and self._buffer.is_active:
                # An array is flushed while its document still says where its chunks are.
                of_chunks = [i for i, r in enumerate(requests) if not is_document(r.key)]
                yield from self._router.perform(
                    [requests[i] for i in of_chunks], [kept[i] for i in of_chunks]
                )
                for node in nodes:
                    yield from self._flusher.flush_array(node)
                requests = [r for r in requests if is_document(r.key)]
                kept = [None] * len(requests)
            yield from self._router.perform(requests, kept)
        finally:
            for node in nodes:
                array = arrays[node]
                self._arrays.document_erased(
                    node, array if isinstance(array, StoredArray) else None
                )

    def erase_prefix(self, prefix: str) -> Flow[None]:
        """Erase all values whose key starts with `prefix`; whole directories are relayed.

        Raises
        ------
        SpecError
            If the prefix is not valid, or leads through a link of a local base store.
        """
        prefix = check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            yield from self._erase_listed(prefix)
            return
        self._refuse_links(prefix.removesuffix("/"))
        directory = yield from self._catalog.directory_of(prefix)
        match directory:
            case GridDirectory():
                is_inside_grid = bool(directory.leading)
            case StoredArray():
                is_inside_grid = directory.is_inside_grid(prefix)
            case None:
                is_inside_grid = self._listing.is_translated_without_metadata(prefix)
        if is_inside_grid:
            yield from self._erase_listed(prefix)
        else:
            yield from self._flusher.flush_orphans(prefix)
            try:
                yield [DeletePrefix(prefix)]
                self._buffer.drop(prefix)
            finally:
                if directory is None:  # otherwise there are no documents below
                    self._arrays.documents_changed(below=prefix)

    def erasures(self, keys: Iterable[str]) -> Flow[tuple[list[Delete], list[Owner]]]:
        """What erases values, and what their keys name."""
        keys = items_of("keys", keys)
        for key in keys:
            check_key(key)
        keys = list(dict.fromkeys(keys))
        owners = yield from self._router.owners(keys)
        misfits = [
            key
            for key, owner in zip(keys, owners, strict=True)
            if isinstance(owner, InvalidChunkKey) and not owner.is_outside
        ]
        objects: set[str] = set()
        if misfits:
            # LocalStore erases a whole directory if the key names one: here that would be one
            # of shards, which are not the chunks below the key. Only objects can be read.
            founds: list[Found] = yield [Get(key, Range(0, 1)) for key in misfits]
            found = zip(misfits, founds, strict=True)
            objects = {key for key, reply in found if reply.value is not None}
        requests: list[Delete] = []
        kept: list[Owner] = []
        for key, owner in zip(keys, owners, strict=True):
            is_misfit = isinstance(owner, InvalidChunkKey)
            if not is_misfit or key in objects:
                requests.append(Delete(key))
                kept.append(None if is_misfit else owner)
        return requests, kept

    # ------------------------------------------------------------- details

    def _erase_listed(self, prefix: str) -> Flow[None]:
        """Erase below a prefix that cuts directories or shards.

        Cost: a listing. The indexes of arrays with other transformers are read, of others none.
        """
        self._refuse_links(prefix)
        stream = yield from self._listing.stream(prefix)
        located = yield from stream.all_located()
        shards: list[ShardRef] = []
        keys: list[str] = []
        stacked: dict[Node, tuple[StoredArray, list[str]]] = {}
        for base_key, _, found in located:
            match found:
                case ShardRef():
                    shards.append(found)
                case TransformedKey(key, array):
                    stacked.setdefault(array.node, (array, []))[1].append(key)
                case ShardStoreError():
                    stream.errors.append(found)
                case None:
                    keys.append(base_key)
        for array, below in stacked.values():
            above = yield from stream.keys_above(array, below)
            keys += [key for key, _ in above if key.startswith(prefix)]
        raise_first(stream.errors)  # so far nothing was erased
        yield from self._erase_in_shards(shards, prefix)
        yield from self.erase_values(keys)

    def _erase_in_shards(self, shards: Sequence[ShardRef], prefix: str) -> Flow[None]:
        """Erase the chunks whose keys start with `prefix`; each shard is written once."""
        batch: list[Request] = []
        n_erasures = 0
        for shard in shards:
            erasures = tuple(map(DeleteEntry, shard.entries_with(prefix).tolist()))
            if erasures:
                batch.append(UpdateShard(shard, erasures))
                n_erasures += len(erasures)
            if n_erasures > _ERASURES_AT_ONCE:
                yield batch
                batch, n_erasures = [], 0
        if batch:
            yield batch
