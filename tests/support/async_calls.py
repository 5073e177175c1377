"""Operations of the draft in an event loop, on a `ShardingStore`; a mapping has them blocking."""

from __future__ import annotations

from collections.abc import Iterable

from zarr_shardstore import ShardingStore


async def set_partial_values(
    store: ShardingStore, key_start_values: Iterable[tuple[str, int, bytes]]
) -> None:
    """As `ShardingMapping.set_partial_values`."""
    await store._write(store._engine.operations.set_partial_values(key_start_values))


async def erase_prefix(store: ShardingStore, prefix: str) -> None:
    """As `ShardingMapping.erase_prefix`."""
    await store._write(store._engine.operations.erase_prefix(prefix))
