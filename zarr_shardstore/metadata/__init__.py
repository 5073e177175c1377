"""Metadata documents as JSON, pure: their keys, declarations of sharding, data types, codecs."""
