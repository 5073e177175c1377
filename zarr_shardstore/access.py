"""The gate between the core and its users: tools, command line, ways in and out.

Of the core they import these names, the public names of the package and its errors. A change of
any other name ends in the core. The formats (keys, bytes, documents, requests) are modules here:
their words are the words of the specifications.
"""

from __future__ import annotations

from zarr_shardstore.arrays import policy as policies
from zarr_shardstore.arrays import stored_array as stored_arrays
from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.arrays.metadata_view import read_dimension_names
from zarr_shardstore.format import arguments, consolidated_index
from zarr_shardstore.format import box_grid as box_grids
from zarr_shardstore.format import journal as journals
from zarr_shardstore.format import keys as chunk_keys
from zarr_shardstore.format import layout as layouts
from zarr_shardstore.format import ranges as byte_ranges
from zarr_shardstore.format import shard as shard_format
from zarr_shardstore.io import buffers
from zarr_shardstore.io.backends import base as backends
from zarr_shardstore.io.backends import resolve
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.concurrency import gather_bounded, zarrs_loop
from zarr_shardstore.io.local import files as file_keys
from zarr_shardstore.io.local import fs, locks
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.metadata import declaration as declarations
from zarr_shardstore.metadata import documents as metadata
from zarr_shardstore.metadata import transformer_list
from zarr_shardstore.operations import walk as walks
from zarr_shardstore.operations.batch import Batch
from zarr_shardstore.operations.upkeep import shards_below
from zarr_shardstore.shards import index_reads, requests
from zarr_shardstore.shards import stack as stacks
from zarr_shardstore.store import options as store_options
from zarr_shardstore.store.base_handle import (
    STAGING,
    BaseStoreHandle,
    StoreLike,
    open_base,
)
from zarr_shardstore.store.entry_reader import EntryReader
from zarr_shardstore.store.sharding_mapping import ShardingMapping
from zarr_shardstore.store.sharding_store import ShardingStore
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec

# keys and bytes, pure
__all__ = ["arguments", "box_grids", "byte_ranges", "chunk_keys", "consolidated_index", "journals"]
__all__ += ["layouts", "shard_format"]
# documents, pure
__all__ += ["declarations", "metadata", "transformer_list"]
# arrays and shards, as flows
__all__ += ["index_reads", "invalidate_documents", "policies", "read_dimension_names", "requests"]
__all__ += ["shards_below", "stacks", "stored_arrays", "walks"]
# base stores
__all__ += ["STAGING", "BaseStoreHandle", "LocalBackend"]
__all__ += ["StoreLike", "backends", "buffers", "gather_bounded", "open_base"]
__all__ += ["resolve", "zarrs_loop"]
# local files
__all__ += ["file_keys", "fs", "locks", "open_shards"]
# stores
__all__ += [
    "Batch",
    "ChunkCodec",
    "EntryReader",
    "ShardingMapping",
    "ShardingStore",
    "store_options",
]
