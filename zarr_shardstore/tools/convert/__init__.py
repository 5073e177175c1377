"""Conversions of whole stores: chunks into shards, back, and into other shards."""
