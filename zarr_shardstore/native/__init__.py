"""Sharded arrays for readers of the ``sharding_indexed`` codec, by a change of metadata."""
