"""Metadata documents as JSON, pure: how arrays declare their sharding, data types and codecs."""
