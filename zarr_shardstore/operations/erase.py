"""Erasures: of single keys, of all keys with a prefix, of parts of a chunk grid.

Source: sharding storage transformer draft, "API implementation", erase_values, erase_prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from zarr_shardstore.arrays.catalog import InvalidChunkKey, TransformedKey
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.arguments import items_of
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.metadata.documents import Node, node_of_document
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
"""Erasures of entries in memory: about 25 MB."""


class Eraser:
    """Flows that erase values of one store."""

    def __init__(
        self, router: Router, listing: Listing, refuse_links: Callable[[str], None]
    ) -> None:
        self._router = router
        self._catalog = router.catalog
        self._arrays = router.arrays
        self._listing = listing
        self._refuse_links = refuse_links

    def erase_values(self, keys: Iterable[str]) -> Flow[None]:
        """Erase values; those of one shard together. A missing key is no error."""
        requests, owners = yield from self.erasures(keys)
        nodes = [node for request in requests if (node := node_of_document(request.key))]
        arrays = yield from self._arrays.lookup(nodes)
        try:
            if nodes and self._router.buffer.is_active:
                # An array is flushed while its document still says where its chunks are.
                others = [i for i, request in enumerate(requests) if not is_document(request.key)]
                yield from self._router.perform(
                    [requests[i] for i in others], [owners[i] for i in others]
                )
                for node in nodes:
                    yield from self._router.flusher.flush_array(node)
                requests = [request for request in requests if is_document(request.key)]
                owners = [None] * len(requests)
            yield from self._router.perform(requests, owners)
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
            return
        yield from self._router.flusher.flush_orphans(prefix)
        try:
            yield [DeletePrefix(prefix)]
            self._router.buffer.drop(prefix)
        finally:
            if directory is None:  # otherwise there are no documents below
                self._arrays.documents_changed(below=prefix)

    def erasures(self, keys: Iterable[str]) -> Flow[tuple[list[Delete], list[Owner]]]:
        """Return the requests that erase values, and the owners of their keys."""
        keys = items_of("keys", keys)
        for key in keys:
            check_key(key)
        keys = list(dict.fromkeys(keys))
        owners = yield from self._router.owners(keys)
        invalid = [
            key
            for key, owner in zip(keys, owners, strict=True)
            if isinstance(owner, InvalidChunkKey) and not owner.is_outside
        ]
        objects: set[str] = set()
        if invalid:
            # LocalStore erases a whole directory if a key names one. Here that would be a
            # directory of shards, which are not the chunks below the key. Only objects can be read.
            founds: list[Found] = yield [Get(key, Range(0, 1)) for key in invalid]
            objects = {k for k, f in zip(invalid, founds, strict=True) if f.value is not None}
        requests: list[Delete] = []
        owners_of_requests: list[Owner] = []
        for key, owner in zip(keys, owners, strict=True):
            if not isinstance(owner, InvalidChunkKey):
                requests.append(Delete(key))
                owners_of_requests.append(owner)
            elif key in objects:
                requests.append(Delete(key))
                owners_of_requests.append(None)
        return requests, owners_of_requests

    def _erase_listed(self, prefix: str) -> Flow[None]:
        """Erase below a prefix that cuts directories or shards.

        Cost: a listing. The indexes of arrays with other transformers are read, of others none.
        """
        self._refuse_links(prefix)
        stream = yield from self._listing.stream(prefix)
        shards: list[ShardRef] = []
        keys: list[str] = []
        transformed: dict[Node, tuple[StoredArray, list[str]]] = {}
        for base_key, _, found in (yield from stream.all_located()):
            match found:
                case ShardRef():
                    shards.append(found)
                case TransformedKey(key, array):
                    transformed.setdefault(array.node, (array, []))[1].append(key)
                case ShardStoreError():
                    stream.errors.append(found)
                case None:
                    keys.append(base_key)
        for array, below in transformed.values():
            above = yield from stream.keys_above(array, below)
            keys += [key for key, _ in above if key.startswith(prefix)]
        raise_first(stream.errors)  # so far nothing was erased
        yield from _erase_in_shards(shards, prefix)
        yield from self.erase_values(keys)


def _erase_in_shards(shards: Sequence[ShardRef], prefix: str) -> Flow[None]:
    """Erase the chunks whose keys start with `prefix`; each shard is written once."""
    updates: list[Request] = []
    n_erasures = 0
    for shard in shards:
        erasures = tuple(map(DeleteEntry, shard.entries_with(prefix).tolist()))
        if erasures:
            updates.append(UpdateShard(shard, erasures))
            n_erasures += len(erasures)
        if n_erasures > _ERASURES_AT_ONCE:
            yield updates
            updates, n_erasures = [], 0
    if updates:
        yield updates
