"""Erase values: of single keys, of all with a prefix, of parts of a chunk grid.

Source: sharding storage transformer draft, "API implementation", erase_values, erase_prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zarr_shardstore.format.documents import node_of_document
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.plan.entries import Erase
from zarr_shardstore.plan.holding import hold_updates
from zarr_shardstore.plan.listing import GridDirectory
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.ranges import Range
from zarr_shardstore.plan.requests import (
    Delete,
    DeletePrefix,
    Flow,
    Found,
    Get,
    Request,
    UpdateShard,
)
from zarr_shardstore.store.arrays import StoredArray
from zarr_shardstore.store.catalog import Catalog, Misfit
from zarr_shardstore.store.known_arrays import KnownArrays
from zarr_shardstore.store.listing import Listing
from zarr_shardstore.store.publishing import Publisher
from zarr_shardstore.store.routing import Owner, Router, is_document

__all__ = ["Eraser"]


class Eraser:
    """Flows that erase values of one store; what is held back is erased, too."""

    def __init__(
        self,
        router: Router,
        catalog: Catalog,
        known: KnownArrays,
        listing: Listing,
        publisher: Publisher,
        pending: PendingShards,
        refuse_links: Callable[[str], None],
    ) -> None:
        self._router = router
        self._catalog = catalog
        self._known = known
        self._listing = listing
        self._publisher = publisher
        self._pending = pending
        self._refuse_links = refuse_links

    def erase_values(self, keys: Iterable[str]) -> Flow[None]:
        """Erase values; those of one shard together. A missing key is no error."""
        requests, kept = yield from self.erasures(keys)
        nodes = [node for request in requests if (node := node_of_document(request.key))]
        arrays = yield from self._known.know(nodes, self._known.now())
        try:
            if nodes and self._pending:
                # What is held of an array is published while its document still says where.
                of_chunks = [i for i, r in enumerate(requests) if not is_document(r.key)]
                yield from self._router.perform(
                    [requests[i] for i in of_chunks], [kept[i] for i in of_chunks]
                )
                for node in nodes:
                    yield from self._publisher.publish_array(node)
                requests = [r for r in requests if is_document(r.key)]
                kept = [None] * len(requests)
            yield from self._router.perform(requests, kept)
        finally:
            for node in nodes:
                array = arrays[node]
                self._known.erased(node, array if isinstance(array, StoredArray) else None)

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
        if isinstance(directory, GridDirectory) and directory.leading:
            yield from self._erase_grid_directory(directory, prefix)
        elif (
            directory.is_inside_grid(prefix)
            if isinstance(directory, StoredArray)
            else directory is None and self._listing.is_translated_without_metadata(prefix)
        ):
            yield from self._erase_listed(prefix)
        else:
            yield from self._publisher.publish_orphans(prefix)
            try:
                yield [DeletePrefix(prefix)]
                self._pending.drop_below(prefix)
            finally:
                if directory is None:  # otherwise there are no documents below
                    self._known.changed(below=prefix)

    def erasures(self, keys: Iterable[str]) -> Flow[tuple[list[Delete], list[Owner]]]:
        """What erases values, and what their keys name."""
        keys = list(dict.fromkeys(keys))
        for key in keys:
            check_key(key)
        owners = yield from self._router.owners(keys)
        misfits = [
            key
            for key, owner in zip(keys, owners, strict=True)
            if isinstance(owner, Misfit) and not owner.is_outside
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
            is_misfit = isinstance(owner, Misfit)
            if not is_misfit or key in objects:
                requests.append(Delete(key))
                kept.append(None if is_misfit else owner)
        return requests, kept

    # ------------------------------------------------------------- details

    def _erase_listed(self, prefix: str) -> Flow[None]:
        self._refuse_links(prefix)
        keys = yield from self._listing.list_all(prefix)
        yield from self.erase_values(keys)

    def _erase_grid_directory(self, directory: GridDirectory, prefix: str) -> Flow[None]:
        """Erase the chunks under a prefix that reaches into the grid of an array."""
        self._refuse_links(prefix)
        base_keys = yield from self._listing.list_base(prefix)
        shards = yield from self._catalog.shards_of(base_keys)
        batch: list[Request] = []
        for base_key, shard in zip(base_keys, shards, strict=True):
            if isinstance(shard, ShardRef):
                erasures = tuple(map(Erase, shard.entries_of(directory.leading).tolist()))
                if erasures and self._pending.is_open:
                    yield from hold_updates(shard, erasures, self._router.reading, self._pending)
                elif erasures:
                    batch.append(UpdateShard(shard, erasures))
            elif base_key.startswith(prefix):
                batch.append(Delete(base_key))
        if batch:
            yield batch
        yield from self._publisher.publish_due()
