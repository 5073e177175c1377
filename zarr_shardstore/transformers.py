"""Public names for writing a storage transformer.

A transformer that keeps keys derives from `ValueTransformer`. A transformer that changes keys has
the two methods of `StorageTransformer`. Both methods are *flows*: generators that yield batches of
requests for keys below, receive one reply for each, and return replies for keys above. They do no
I/O, so both drivers can run them. A transformer yields a request for an unknown key unchanged.

Source: spec_notes/decisions/0009-stack.md.
"""

from __future__ import annotations

from zarr_shardstore.arrays.stored_array import TransformerFactory, register_storage_transformer
from zarr_shardstore.format.ranges import ByteRange, Range, StartFrom, Suffix, resolve_range
from zarr_shardstore.shards.requests import (
    Delete,
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    Modify,
    Piece,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
)
from zarr_shardstore.shards.stack import ArrayContext, StorageTransformer, ValueTransformer
from zarr_shardstore.shards.updates import apply_pieces

__all__ = ["ArrayContext", "StorageTransformer", "TransformerFactory", "ValueTransformer"]
__all__ += ["ByteRange", "Range", "StartFrom", "Suffix", "register_storage_transformer"]
__all__ += ["Delete", "Exists", "Flow", "Found", "Get", "GetSize", "Modify", "Piece", "Request"]
__all__ += ["Set", "SetIfNotExists", "SetPartial", "apply_pieces", "resolve_range"]
