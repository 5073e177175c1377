"""A driver for tests: runs a flow against objects in a dict, and records its requests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.shards.index_reads import found_index, index_get
from zarr_shardstore.shards.requests import (
    Change,
    Delete,
    EntryUpdate,
    Flow,
    Found,
    GetIndex,
    Modify,
    Piece,
    PlainValue,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
)
from zarr_shardstore.shards.rewrite import rewrite_value

T = TypeVar("T")


def set_entry(entry_id: int, value: bytes, only_if_missing: bool = False) -> EntryUpdate:
    return entry_id, SetIfNotExists("k", value) if only_if_missing else Set("k", value)


def delete_entry(entry_id: int) -> EntryUpdate:
    return entry_id, Delete("k")


def patch_entry(entry_id: int, pieces: tuple[Piece, ...]) -> EntryUpdate:
    return entry_id, SetPartial("k", pieces)


def map_entry(
    entry_id: int, change: Change, placeholder: Callable[[], bytes] | None = None
) -> EntryUpdate:
    return entry_id, Modify("k", change, placeholder)


class Recorder:
    """Performs flows on `objects`.

    Parameters
    ----------
    between
        Called after each batch, to change the objects between the rounds of a flow.
    tells_size
        Whether replies tell the size of the object, as local files do.
    cut
        Numbers of batches, from 1 on, whose reads give half of the bytes.
    """

    def __init__(
        self,
        objects: dict[str, bytes],
        *,
        between: Callable[[int], None] = lambda _: None,
        tells_size: bool = True,
        cut: Collection[int] = (),
    ) -> None:
        self.objects = objects
        self.batches: list[list[Request]] = []
        self._between = between
        self._tells_size = tells_size
        self._cut = cut

    def run(self, flow: Flow[T]) -> T:
        backend = MappingBackend(self.objects)

        def perform(request: Request) -> Any:
            if isinstance(request, UpdateShard) and isinstance(request.shard, PlainValue):
                (error,) = Recorder(self.objects).run(
                    rewrite_value(request.shard, [request.updates])
                )
                return error
            return backend.perform([request])[0]

        try:
            batch = next(flow)
            while True:
                # An index is bytes here.
                gets: list[Request] = [
                    index_get(r) if isinstance(r, GetIndex) else r for r in batch
                ]
                self.batches.append(gets)
                replies: list[Any] = []
                for request, reply in zip(gets, map(perform, gets), strict=True):
                    if isinstance(reply, Found):
                        # The object itself is its version: equal bytes, equal state.
                        version = self.objects.get(getattr(request, "key", ""))
                        size = reply.size if self._tells_size else None
                        value = reply.value
                        if value is not None and len(self.batches) in self._cut:
                            value = value[: len(value) // 2]
                        reply = Found(value, version, size)
                    replies.append(reply)
                self._between(len(self.batches))
                for i, request in enumerate(batch):
                    if isinstance(request, GetIndex):
                        replies[i] = found_index(request, replies[i])
                batch = flow.send(replies)
        except StopIteration as stop:
            result: T = stop.value
            return result
