"""Stores behind URLs that begin with ``shard``."""
