"""An array whose chunks have any size: each is one element of bytes, in zarr's own shards."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["HEADER", "INDEX_CODECS", "Location", "declare", "encode"]

Location: TypeAlias = Literal["start", "end"]

INDEX_CODECS: dict[str, list[dict[str, Any]]] = {
    "no checksum": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "crc32c": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
}

HEADER = struct.Struct("<II")
"""Of a chunk of the vlen-bytes codec with one element: how many there are, its size."""


def encode(element: bytes) -> bytes:
    """The bytes of a chunk."""
    return HEADER.pack(1, len(element)) + element


def declare(
    root: Path, path: str, n_chunks: int, cps: int, *, checksum: str, location: Location = "end"
) -> None:
    """Store the metadata of an array, as zarr writes it for ``shards=(cps,)``."""
    sharding = {
        "chunk_shape": [1],
        "codecs": [{"name": "vlen-bytes", "configuration": {}}],
        "index_codecs": INDEX_CODECS[checksum],
        "index_location": location,
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [n_chunks],
        "data_type": "variable_length_bytes",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [cps]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "",
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
    }
    (root / path).mkdir(parents=True)
    (root / path / "zarr.json").write_text(json.dumps(document))
