"""Reports on what a store holds, from its documents and shard indexes."""
