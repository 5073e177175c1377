"""Arrays for tests of `ShardedCodecPipeline`: some of each kind, of 18 chunks in 4 shards."""

from __future__ import annotations

from typing import Any

import zarr
from zarr.codecs import BytesCodec, TransposeCodec
from zarr.core.sync import sync

from zarr_shardstore import DraftHierarchyStore, ShardedCodecPipeline, ShardingStore

OURS = f"{ShardedCodecPipeline.__module__}.{ShardedCodecPipeline.__name__}"
THEIRS = "zarr.core.codec_pipeline.BatchedCodecPipeline"
SHAPE, CHUNKS, CHUNKS_PER_SHARD = (11, 7), (2, 3), (3, 2)
SHARDS = [f"a/c/{i}/{j}" for i in range(2) for j in range(2)]

KINDS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3, no codec": {"compressors": None},
    "v3, transposed": {"filters": [TransposeCodec(order=(1, 0))]},
    "v3, big endian": {"dtype": ">i2", "serializer": BytesCodec(endian="big")},
    "v2": {"zarr_format": 2},
    "v2, nested, F": {
        "zarr_format": 2,
        "order": "F",
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
    },
    "transformers": {"store": {"storage_transformers": ["crc32c", "sharding"]}},
    "draft": {},
    "plain chunks": {"store": {"chunks_per_shard": None}},
}


def make_store(kind: str, base: Any) -> Any:
    options = {"chunks_per_shard": CHUNKS_PER_SHARD, **KINDS[kind].get("store", {})}
    store = ShardingStore(base, **options)
    return DraftHierarchyStore(store) if kind == "draft" else store


def make_array(store: Any, kind: str = "v3", **options: Any) -> Any:
    own = {key: value for key, value in KINDS[kind].items() if key != "store"}
    defaults = {"name": "a", "shape": SHAPE, "chunks": CHUNKS, "dtype": "i2", "fill_value": 0}
    return zarr.create_array(store, **{**defaults, **own, **options})


def chunk_keys(z: zarr.Array[Any]) -> set[str]:
    """Keys of the chunks that are stored."""

    async def run() -> set[str]:
        keys = [key async for key in z.store_path.store.list_prefix("a/")]
        return {key for key in keys if not key.endswith((".json", ".zarray", ".zattrs"))}

    return sync(run())
