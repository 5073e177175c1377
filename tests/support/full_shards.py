"""An array of one-byte chunks, in shards that are full of them."""

from __future__ import annotations

import json
from typing import Any

from tests.support.bases import put
from tests.support.shard_bytes import build_shard
from zarr_shardstore import ShardingMapping


def shard_of(cps: int) -> bytes:
    """A shard that is full of chunks of one byte."""
    return build_shard(dict.fromkeys(range(cps), b"x"), cps)


def document(n_chunks: int) -> bytes:
    """Of an array with so many chunks."""
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [n_chunks],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
            "attributes": {},
        }
    ).encode()


def fill(base: Any, n_shards: int, cps: int) -> set[str]:
    """Store an array; return all keys."""
    ShardingMapping(base, chunks_per_shard=cps)["z/zarr.json"] = document(n_shards * cps)
    shard = shard_of(cps)
    for i in range(n_shards):
        put(base, f"z/c/{i}", shard)
    return {"z/zarr.json", *(f"z/c/{i}" for i in range(n_shards * cps))}
