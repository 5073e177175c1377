"""One warning in a process if a pipeline of zarr's own writes a part of a chunk."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import zarr
from zarr.codecs import BytesCodec, GzipCodec, ShardingCodec
from zarr.storage import LoggingStore

from zarr_shardstore import ShardingStore
from zarr_shardstore.store import sharding_store
from zarr_shardstore.store.pipeline import ShardedCodecPipeline

OURS = f"{ShardedCodecPipeline.__module__}.{ShardedCodecPipeline.__name__}"
BATCHED = "zarr.core.codec_pipeline.BatchedCodecPipeline"
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"


@pytest.mark.parametrize("pipeline", [OURS, BATCHED, FUSED])
@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("chunks_per_shard", [None, 2])
def test_a_part_by_a_pipeline_of_zarr(
    pipeline: str, is_local: bool, chunks_per_shard: int | None, tmp_path: Any
) -> None:
    """Neither whole chunks nor reads warn."""
    if not hasattr(zarr.core.codec_pipeline, pipeline.rpartition(".")[2]) and pipeline != OURS:
        pytest.skip("this zarr has no such pipeline")
    if pipeline == FUSED and not is_local:
        pytest.skip("through a store that only awaits it reads as it does for reads")
    sharding_store.warn_of_parts.cache_clear()
    with zarr.config.set({"codec_pipeline.path": pipeline}), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="ShardingStore was opened")
        store = ShardingStore(tmp_path if is_local else {}, chunks_per_shard=chunks_per_shard)
        z = zarr.create_array(store, name="a", shape=(10,), chunks=(4,), dtype="u1")
        z[:] = 1
        z[4:8] = 2
        assert z[0] == 1
        if pipeline == OURS:
            z[1:3] = 3
            return
        with pytest.warns(UserWarning, match="part of a chunk"):
            z[1:3] = 3
        z[1:3] = 3  # a second time it is silent


@pytest.mark.parametrize("pipeline", [OURS, BATCHED, FUSED])
@pytest.mark.parametrize("kind", ["in a LoggingStore", "passthrough"])
def test_a_part_where_ours_is_not_asked(pipeline: str, kind: str, tmp_path: Any) -> None:
    """A wrapper above, and shards left to zarr by choice, are seen, too."""
    if not hasattr(zarr.core.codec_pipeline, pipeline.rpartition(".")[2]) and pipeline != OURS:
        pytest.skip("this zarr has no such pipeline")
    if kind == "passthrough" and not sharding_store._HAS_WHOLE_SHARDS:
        pytest.skip("this zarr reads also the shards that it writes whole")
    sharding_store.warn_of_parts.cache_clear()
    with zarr.config.set({"codec_pipeline.path": pipeline}), warnings.catch_warnings():
        warnings.simplefilter("error")
        shards: Any = None
        store: Any = ShardingStore(tmp_path, chunks_per_shard=2)
        if kind == "passthrough":
            store, shards = ShardingStore(tmp_path, 2, native="passthrough"), (4,)
        else:
            store = LoggingStore(store, log_level="ERROR")
        z: Any = zarr.create_array(
            store, name="a", shape=(12,), chunks=(2,), shards=shards, dtype="u1"
        )
        z[:] = 1
        z[4:8] = 2
        assert z[0] == 1
        assert z[5:11].sum() == 9
        if kind == "passthrough" and pipeline == OURS:  # compares and swaps it
            z[1:4] = 3
            return
        with pytest.warns(UserWarning, match="part of a chunk"):
            z[1:4] = 3
        z[1:3] = 3


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed`")
def test_a_part_of_a_shard_under_another_codec() -> None:
    """Ours compares and swaps it: no warning."""
    sharding_store.warn_of_parts.cache_clear()
    z: Any = zarr.create_array(
        ShardingStore({}),
        name="a",
        shape=(8,),
        chunks=(8,),
        dtype="u1",
        serializer=ShardingCodec(chunk_shape=(2,), codecs=[BytesCodec()]),
        compressors=[GzipCodec()],
    )
    with warnings.catch_warnings(record=True) as caught:
        z[1:3] = 3
    assert caught == []
    assert z[:4].tolist() == [0, 3, 3, 0]
