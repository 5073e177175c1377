"""Metadata bridge: sharded arrays for readers of the ``sharding_indexed`` codec, and back."""
