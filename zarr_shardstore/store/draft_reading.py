"""Read values of a draft hierarchy by their Zarr v3 keys.

Documents are translated; everything else is where the draft has it, below ``data/root/``.

Source: sharding storage transformer draft, "API implementation", get and get_partial_values.
"""

from __future__ import annotations

from collections.abc import Sequence

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from zarr_shardstore.format.draft_keys import node_of_v3_key
from zarr_shardstore.io.byte_requests import range_of
from zarr_shardstore.plan.ranges import resolve_range
from zarr_shardstore.store.draft_nodes import DraftNodes

__all__ = ["exists", "get_partial_values", "get_size"]


async def get_partial_values(
    nodes: DraftNodes,
    prototype: BufferPrototype,
    requests: Sequence[tuple[str, ByteRequest | None]],
) -> list[Buffer | None]:
    """Values or ranges of values, ``None`` for missing keys."""
    values: list[Buffer | None] = [None] * len(requests)
    documents = [(i, node_of_v3_key(key)) for i, (key, _) in enumerate(requests)]
    paths = [(i, path) for i, path in documents if path is not None]
    if paths:
        shown = await nodes.read([path for _, path in paths])
        for (i, _), document in zip(paths, shown, strict=True):
            if document is not None:
                values[i] = _cut(prototype.buffer.from_bytes(document), requests[i][1])
    others = [i for i, path in documents if path is None]
    places = await nodes.base_keys([requests[i][0] for i in others])
    for alternative in range(2):
        # The second place is that of a 0-d chunk as the draft names it.
        wanted = [
            (i, at[alternative])
            for i, at in zip(others, places, strict=True)
            if alternative < len(at) and values[i] is None
        ]
        if wanted:
            ranges = [(place, requests[i][1]) for i, place in wanted]
            found = await nodes.store.get_partial_values(prototype, ranges)
            for (i, _), value in zip(wanted, found, strict=True):
                values[i] = value
    return values


async def exists(nodes: DraftNodes, key: str) -> bool:
    """Whether there is a value, or a document or an implicit group to show."""
    path = node_of_v3_key(key)
    if path is not None:
        (document,) = await nodes.read([path])
        return document is not None
    (places,) = await nodes.base_keys([key])
    for place in places:
        if await nodes.store.exists(place):
            return True
    return False


async def get_size(nodes: DraftNodes, key: str) -> int:
    """Size of a value in bytes; of a document, as it is shown.

    Raises
    ------
    FileNotFoundError
        If the key is missing.
    """
    path = node_of_v3_key(key)
    if path is not None:
        (document,) = await nodes.read([path])
        if document is not None:
            return len(document)
        raise FileNotFoundError(key)
    (places,) = await nodes.base_keys([key])
    for place in places:
        try:
            return await nodes.store.getsize(place)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(key)


def _cut(value: Buffer, byte_range: ByteRequest | None) -> Buffer:
    """A range of a value, as stores cut it."""
    start, stop = resolve_range(range_of(byte_range), len(value))
    return value[start:stop]
