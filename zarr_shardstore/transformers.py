"""Public names for writing a storage transformer.

A transformer that keeps keys derives from `ValueTransformer`. One that changes keys has the two
methods of `StorageTransformer`. Both are *flows*: generators that yield batches of requests for
keys below, receive one reply for each, and return replies for keys above. They do no I/O, so they
run under the blocking and the async driver. A transformer yields a request for a foreign key
unchanged.

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

__all__ = [
    "ArrayContext",
    "ByteRange",
    "Delete",
    "Exists",
    "Flow",
    "Found",
    "Get",
    "GetSize",
    "Modify",
    "Piece",
    "Range",
    "Request",
    "Set",
    "SetIfNotExists",
    "SetPartial",
    "StartFrom",
    "StorageTransformer",
    "Suffix",
    "TransformerFactory",
    "ValueTransformer",
    "apply_pieces",
    "register_storage_transformer",
    "resolve_range",
]
