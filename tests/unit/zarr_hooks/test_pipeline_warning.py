"""One warning in a process if another codec pipeline than ours writes a sharded array."""

from __future__ import annotations

import asyncio
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.codecs import BytesCodec, GzipCodec, ShardingCodec
from zarr.storage import LoggingStore

from tests.support.pipeline_arrays import OURS, THEIRS
from zarr_shardstore import ShardingStore
from zarr_shardstore.zarr_hooks import pipeline as pipelines

FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"
PIPELINES = [OURS, THEIRS, FUSED]
WARNING = "another codec pipeline writes a sharded array: zarr.core"


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configured pipeline; nothing has warned of it, and all other warnings are errors."""
    name = request.param.rpartition(".")[2]
    if request.param != OURS and not hasattr(zarr.core.codec_pipeline, name):
        pytest.skip("this zarr has no such pipeline")
    monkeypatch.setattr(pipelines, "_warning", threading.Lock())
    chosen = zarr.config.set({"codec_pipeline.path": request.param})
    with chosen, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="ShardingStore was opened|Combining a")
        yield request.param


def write(z: Any, is_warned: bool) -> None:
    """Write and read regions; the first write warns, or none does."""
    if is_warned:
        with pytest.warns(UserWarning, match=WARNING) as caught:
            z[:] = 1
        assert len(caught) == 1
    z[:] = 1
    z[1:3] = 2
    assert z[:5].tolist() == [1, 2, 2, 1, 1]


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("options", [{}, {"storage_transformers": ["crc32c", "sharding"]}], ids=str)
def test_the_first_write_of_a_sharded_array(
    pipeline: str, is_local: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    store = ShardingStore(tmp_path if is_local else {}, chunks_per_shard=2, **options)
    z = zarr.create_array(store, name="a", shape=(10,), chunks=(4,), dtype="u1")
    assert z[0] == 0
    write(z, is_warned=pipeline != OURS)


def test_an_array_without_shards_is_written_without_a_word(pipeline: str) -> None:
    write(zarr.create_array(ShardingStore({}), shape=(10,), chunks=(4,), dtype="u1"), False)


def test_in_a_wrapper_the_configured_pipeline_counts(pipeline: str) -> None:
    """With ours, which is not asked there, nothing shows that zarr's own writes."""
    store = LoggingStore(ShardingStore({}, chunks_per_shard=2), log_level="ERROR")
    z = zarr.create_array(store, name="a", shape=(10,), chunks=(4,), dtype="u1")
    write(z, is_warned=pipeline != OURS)


def test_an_array_that_was_made_with_shards(pipeline: str) -> None:
    z = zarr.create_array(ShardingStore({}), shape=(12,), chunks=(2,), shards=(4,), dtype="u1")
    write(z, is_warned=pipeline != OURS)


def test_shards_that_are_left_to_zarr_by_the_user(pipeline: str) -> None:
    store = ShardingStore({}, native="passthrough")
    write(zarr.create_array(store, shape=(12,), chunks=(2,), shards=(4,), dtype="u1"), False)


def test_shards_under_another_codec(pipeline: str) -> None:
    serializer = ShardingCodec(chunk_shape=(2,), codecs=[BytesCodec()])
    options: Any = {"serializer": serializer, "compressors": [GzipCodec()]}
    z = zarr.create_array(ShardingStore({}), shape=(8,), chunks=(8,), dtype="u1", **options)
    write(z, is_warned=pipeline != OURS)


def test_code_that_writes_chunks_itself(pipeline: str) -> None:
    """By the blocking and the async method; not with the default configuration."""
    store = ShardingStore({}, chunks_per_shard=2)
    zarr.create_array(store, shape=(4,), chunks=(1,), dtype="u1")

    def write_key(key: str, is_async: bool) -> None:
        value = b"x"
        asyncio.run(store.set(key, value)) if is_async else store.set_sync(key, value)

    for is_async in (False, True):
        write_key("some/other/key", is_async)
        if pipeline == OURS:
            write_key("c/0", is_async)
            continue
        with pytest.warns(UserWarning, match=WARNING):
            write_key("c/0", is_async)
        write_key("c/1", is_async)
        pipelines._warning.release()
