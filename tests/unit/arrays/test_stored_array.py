"""The transformers of an array, made from its document."""

from __future__ import annotations

from zarr_shardstore.arrays.stored_array import ArrayReader
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.shard import DRAFT_INDEX, ShardingSpec
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.stack import Crc32cTransformer, ShardingTransformer

DOCUMENT = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [10, 8],
    "data_type": "float64",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    "codecs": [{"name": "bytes"}],
    "zarr_shardstore_index": {"must_understand": False},
}


def test_sharding_is_made_alike_alone_and_below_others() -> None:
    sharding = {"name": "sharding", "configuration": {"chunks_per_shard": [2, 3]}}
    reading = ReadOptions(max_gap_bytes=7)
    spec = ShardingSpec((2, 3), DRAFT_INDEX)
    layout = ArrayLayout("a", "a/", ChunkKeyEncoding("default", "."), (5, 4), spec)
    for above in ([], [{"name": "crc32c"}]):
        doc = {**DOCUMENT, "storage_transformers": [*above, sharding]}
        array = ArrayReader("flat", reading).read(Node("v3", "a"), doc)
        assert array is not None
        *others, made = array.stack
        assert others == [Crc32cTransformer() for _ in above]
        assert isinstance(made, ShardingTransformer)
        assert (made.layout, made.reading) == (layout, reading)
        assert (made.layout.index_key, made.layout.chunk_nbytes) == ("a/__shards.index", 32)
        assert made.layout.document is array.document
        assert made.layout.document_key == "a/zarr.json"
