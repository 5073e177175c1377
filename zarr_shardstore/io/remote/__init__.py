"""Shards in object stores: indexes, ETags, calls that zarr's ``Store`` lacks."""
