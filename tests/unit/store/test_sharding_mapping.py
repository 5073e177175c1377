"""A mapping on a store of the user's own class."""

from __future__ import annotations

from zarr_shardstore import ShardingMapping, ShardingStore


def test_methods_of_a_subclass_are_called() -> None:
    class Own(ShardingStore):
        n_flushes = 0

        def flush_sync(self) -> None:
            Own.n_flushes += 1
            super().flush_sync()

    ShardingMapping(Own({}, 2)).flush()
    assert Own.n_flushes == 1
