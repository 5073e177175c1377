"""Bytes and keys, pure: the grammar of keys, the grid, the layout of shards and indexes."""
