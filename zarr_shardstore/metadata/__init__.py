"""Metadata documents as JSON, pure: their keys, their geometry, and declarations of sharding."""
