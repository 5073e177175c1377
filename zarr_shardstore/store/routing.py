"""Requests for keys of whatever arrays: what each key names, and who answers it.

::

    key ──▶ owner ──┬─ a chunk of a sharding ──────── held values, then its shard
                    ├─ a key above a stack ────────── the transformers of its array
                    ├─ a chunk outside the grid ───── nobody: it is missing
                    └─ anything else ──────────────── the base store
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.consolidated import directory_of_v2_consolidated
from zarr_shardstore.format.documents import Node, node_of_document
from zarr_shardstore.format.layout import ChunkRef
from zarr_shardstore.plan.holding import perform_or_hold, with_held
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.read import ReadOptions
from zarr_shardstore.plan.requests import Exists, Flow, Get, GetSize, Request, relay
from zarr_shardstore.plan.stack import Stack, perform, together
from zarr_shardstore.store.catalog import Catalog, Misfit, StackedKey
from zarr_shardstore.store.known_arrays import KnownArrays
from zarr_shardstore.store.publishing import Publisher

__all__ = ["Owner", "Router", "is_document"]

Owner: TypeAlias = "ChunkRef | StackedKey | Misfit | None"
"""What a key names; ``None``: it passes through."""


class Router:
    """Finds what keys name, and hands requests for them to whoever answers."""

    def __init__(
        self,
        catalog: Catalog,
        known: KnownArrays,
        publisher: Publisher,
        pending: PendingShards,
        reading: ReadOptions,
    ) -> None:
        self.reading = reading
        self._catalog = catalog
        self._known = known
        self._publisher = publisher
        self._pending = pending

    def owners(self, keys: Sequence[str]) -> Flow[list[Owner]]:
        """What keys name; also chunks of an array whose document this store has just erased."""
        owners = yield from self._catalog.chunks_of(keys)
        if self._known.has_erased:
            for i, key in enumerate(keys):
                if owners[i] is None:
                    owners[i] = self._catalog.chunk_without_document(key)
        return owners

    def writable(self, keys: Sequence[str]) -> Flow[list[Owner]]:
        """What keys name whose values are about to be stored.

        Raises
        ------
        SpecError
            If a key in an array is no chunk key of it.
        """
        owners = yield from self._catalog.chunks_of(keys)
        for owner in owners:
            if isinstance(owner, Misfit):
                raise SpecError(owner.message)
        return owners

    def perform(self, requests: Sequence[Request], owners: Sequence[Owner]) -> Flow[list[Any]]:
        """Reply to requests for keys, of whatever array, side by side. Misfits get ``None``."""
        stacks: dict[Node, tuple[Stack, list[int]]] = {}
        chunks: list[int] = []
        others: list[int] = []
        for i, owner in enumerate(owners):
            if isinstance(owner, ChunkRef):
                chunks.append(i)
            elif isinstance(owner, StackedKey):
                array = owner.array
                stacks.setdefault(array.node, (array.stack, []))[1].append(i)
            elif not _is_outside(owner):
                others.append(i)
        parts: list[tuple[list[int], Flow[list[Any]]]] = []
        if chunks:
            refs = [owner for owner in owners if isinstance(owner, ChunkRef)]
            of_chunks = [requests[i] for i in chunks]
            parts.append((chunks, perform_or_hold(of_chunks, refs, self.reading, self._pending)))
        if others:
            parts.append((others, relay([requests[i] for i in others])))
        for whole_stack, positions in stacks.values():
            stack = with_held(whole_stack, self._pending)
            parts.append((positions, perform(stack, [requests[i] for i in positions])))
        replies: list[Any] = [None] * len(requests)
        results = yield from together([flow for _, flow in parts])
        for (positions, _), result in zip(parts, results, strict=True):
            for i, reply in zip(positions, result, strict=True):
                replies[i] = reply
        if not all(isinstance(request, Get | GetSize | Exists) for request in requests):
            yield from self._publisher.publish_due()
        return replies


def is_document(key: str) -> bool:
    """Whether the view shows something else than what is stored."""
    return node_of_document(key) is not None or directory_of_v2_consolidated(key) is not None


def _is_outside(owner: Owner) -> bool:
    """Whether the key is one of a chunk outside the array: it is missing, whatever is stored."""
    return isinstance(owner, Misfit) and owner.is_outside
