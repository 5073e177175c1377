"""Floor 1, pure: keys, grid, shard index, shard, orders, sharding spec, metadata documents."""
