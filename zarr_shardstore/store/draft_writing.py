"""Store and erase values of a draft hierarchy by their Zarr v3 keys.

Documents are translated; everything else goes where the draft has it, below ``data/root/``.

Source: sharding storage transformer draft, "API implementation", set, erase_values, erase_prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from zarr.core.buffer import Buffer

from zarr_shardstore.format.draft_keys import (
    DRAFT_META_ROOT,
    directory_of,
    draft_candidate_of,
    node_of_v3_key,
    v3_grid_candidate,
)
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT
from zarr_shardstore.store import draft_listing, draft_reading
from zarr_shardstore.store.draft_nodes import DraftNodes

__all__ = ["erase", "erase_directory", "set_if_not_exists", "set_many", "set_or_erase"]


async def set_many(nodes: DraftNodes, items: Sequence[tuple[str, Buffer]]) -> None:
    """Store whole values; documents first, which say which of the other keys are chunks."""
    for key, value in items:
        path = node_of_v3_key(key)
        if path is not None:
            await nodes.write(path, value.to_bytes())
    others = [(key, value) for key, value in items if node_of_v3_key(key) is None]
    places = await nodes.places_to_write([key for key, _ in others])
    placed = [(place, value) for place, (_, value) in zip(places, others, strict=True)]
    if len(placed) == 1:
        await nodes.store.set(*placed[0])
    elif placed:
        await nodes.store._set_many(placed)


async def set_if_not_exists(nodes: DraftNodes, key: str, value: Buffer) -> None:
    """Store a value if there is none; an implicit group becomes one with a document."""
    path = node_of_v3_key(key)
    if path is not None:
        await nodes.write(path, value.to_bytes(), only_if_missing=True)
        return
    (place,) = await nodes.places_to_write([key])
    if not await draft_reading.exists(nodes, key):
        await nodes.store.set_if_not_exists(place, value)


async def set_or_erase(nodes: DraftNodes, items: Sequence[tuple[str, Buffer | None]]) -> None:
    """Store values that are no documents, and erase those that are ``None``, in one operation."""
    sets = [(key, value) for key, value in items if value is not None]
    places = await nodes.places_to_write([key for key, _ in sets])
    placed: list[tuple[str, Buffer | None]] = [
        (place, value) for place, (_, value) in zip(places, sets, strict=True)
    ]
    for at in await nodes.base_keys([key for key, value in items if value is None]):
        placed += [(place, None) for place in at]
    await nodes.store._set_or_erase(placed)


async def erase(nodes: DraftNodes, key: str) -> None:
    """Erase a value, or the document of a node."""
    path = node_of_v3_key(key)
    if path is not None:
        await nodes.erase(path)
        return
    (places,) = await nodes.base_keys([key])
    await nodes.store._erase_values(places)


async def erase_directory(nodes: DraftNodes, path: str) -> None:
    """Erase a node with all below it, or the values in a directory of chunks."""
    if path == "":
        await nodes.check_entry_point()
    directory = directory_of(path)
    # Documents last: if this is cut short, what is left is still an array.
    if await _is_in_grid(nodes, path):
        keys = [key async for key in draft_listing.list_prefix(nodes, directory)]
        others = [key for key in keys if node_of_v3_key(key) is None]
        places = await nodes.base_keys(others)
        await nodes.store._erase_values(place for at in places for place in at)
    else:
        await nodes.store.delete_dir(DRAFT_DATA_ROOT + directory)
    await nodes.store.delete_dir(DRAFT_META_ROOT + directory)
    nodes.forget_below(directory)
    await nodes.erase(path)


async def _is_in_grid(nodes: DraftNodes, path: str) -> bool:
    """Whether a directory here or below may hold chunks of an array around it."""
    candidates = (v3_grid_candidate(path), draft_candidate_of(path))
    arrays = [candidate[0] for candidate in candidates if path and candidate is not None]
    return bool(await nodes.spellings(arrays))
