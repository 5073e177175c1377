"""Stores of every kind that a check must know, with an array ``a`` of 4 × 6 chunks of 2 × 4 values.

Shards have 2 × 3 chunks. One row of chunks is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from zarr_shardstore import DraftHierarchyStore, ShardingStore

GRID, CPS, CHUNK = (4, 6), (2, 3), (2, 4)
SHAPE = (8, 24)
VALUES = np.random.default_rng(0).integers(0, 50, SHAPE).astype("u2")


@dataclass(frozen=True)
class Kind:
    """How the store of an array is opened, and its chunks are encoded."""

    options: dict[str, Any]
    create: dict[str, Any]
    has_checksum: bool
    """Whether a checksum covers each chunk."""
    has_index_checksum: bool = True
    """Whether one covers the place of each chunk, too."""
    open: Callable[..., Any] = ShardingStore

    def make(self, base: Any) -> None:
        store = self.open(base, **self.options)
        array = zarr.create_array(
            store, name="a", shape=SHAPE, chunks=CHUNK, dtype="u2", **self.create
        )
        array[2:] = VALUES[2:]

    def read(self, base: Any) -> list[bytes | None]:
        """Return the values of each chunk; ``None`` where a read raises."""
        found: list[bytes | None] = []
        try:
            options = {k: v for k, v in self.options.items() if k == "native"}
            array = zarr.open_array(self.open(base, **options), path="a", mode="r")
        except Exception:
            return [None] * (GRID[0] * GRID[1])
        for i in range(0, SHAPE[0], CHUNK[0]):
            for j in range(0, SHAPE[1], CHUNK[1]):
                try:
                    value = array[i : i + CHUNK[0], j : j + CHUNK[1]]
                    found.append(np.asarray(value).tobytes())
                except Exception:
                    found.append(None)
        return found


def _draft(base: Any, **options: Any) -> DraftHierarchyStore:
    return DraftHierarchyStore(ShardingStore(base, **options))


def _plain(base: Any) -> Any:
    return str(base) if isinstance(base, Path) else ShardingStore(base)


_CPS = {"chunks_per_shard": CPS}
_ZSTD = {"compressors": ZstdCodec(checksum=True)}
_GZIP = {"compressors": GzipCodec()}
_RAW = {"compressors": None}
_V2 = {"zarr_format": 2}
_NO_CHECKSUM = {"index_codecs": ["bytes"]}

KINDS: dict[str, Kind] = {
    "v3 zstd": Kind(_CPS, {}, False),
    "v3 zstd with checksum": Kind(_CPS, _ZSTD, True),
    "v3 zstd and crc32c": Kind(_CPS, {"compressors": [ZstdCodec(), Crc32cCodec()]}, True),
    "v3 gzip, index first": Kind({**_CPS, "index_location": "start"}, _GZIP, True),
    "v3 blosc": Kind(_CPS, {"compressors": BloscCodec()}, False),
    "v3 raw": Kind(_CPS, _RAW, False),
    "v3 crc32c": Kind(_CPS, {"compressors": [Crc32cCodec()]}, True),
    "v3 gzip, plain index": Kind({**_CPS, **_NO_CHECKSUM}, _GZIP, True, False),
    "v3 checksum above": Kind(
        {**_CPS, "storage_transformers": ["crc32c", "sharding"]}, _RAW, True, False
    ),
    "v3 checksum below": Kind({**_CPS, "storage_transformers": ["sharding", "crc32c"]}, {}, True),
    "v3 checksum alone": Kind({"storage_transformers": ["crc32c"]}, {}, True),
    "v2 zlib": Kind(_CPS, {**_V2, "compressors": {"id": "zlib"}}, True, False),
    "v2 raw": Kind(_CPS, {**_V2, **_RAW}, False, False),
    "v2 crc32c above": Kind(
        {**_CPS, "storage_transformers": ["crc32c", "sharding"]}, {**_V2, **_RAW}, True, False
    ),
    "draft gzip": Kind(_CPS, _GZIP, True, False, _draft),
    "draft raw": Kind(_CPS, _RAW, False, False, _draft),
    "left to zarr": Kind(
        {"native": "passthrough"}, {"shards": (4, 12), "compressors": GzipCodec()}, True
    ),
    "unsharded v3": Kind({"chunks_per_shard": None}, _GZIP, True),
    "unsharded v2": Kind({"chunks_per_shard": None}, {**_V2, "compressors": {"id": "lz4"}}, False),
}
