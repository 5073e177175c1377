"""icechunk sessions below a `ShardingStore`, and as sources of conversions.

A session takes documents of Zarr v3 and chunks only, lists groups and arrays only, and says of a
missing chunk that its size is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync

from tests.support.hierarchies import view
from zarr_shardstore import (
    ShardedCodecPipeline,
    ShardingMapping,
    ShardingStore,
    UnsupportedError,
    from_native,
    get_shard_info,
    is_sharded,
    reshard,
    shard_store,
    to_native,
    unshard_store,
)

icechunk = pytest.importorskip("icechunk")

PIPELINES = {
    "zarr": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "ours": f"{ShardedCodecPipeline.__module__}.{ShardedCodecPipeline.__name__}",
}


@pytest.fixture
def repository() -> Any:
    return icechunk.Repository.create(icechunk.in_memory_storage())


def sparse_values() -> Any:
    values = np.zeros((32, 6), dtype="<i4")
    values[:6], values[20, 3] = 1, 7
    return values


def create(store: Any, name: str = "g/a", **options: Any) -> Any:
    z = zarr.create_array(
        store, name=name, shape=(32, 6), chunks=(2, 3), dtype="<i4", fill_value=0, **options
    )
    z[:6] = 1
    z[20, 3] = 7
    return z


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_sparse_arrays(repository: Any, pipeline: str) -> None:
    """Missing shards read as the fill value; listings and figures are those of the same array in
    memory; native zarr reads what is committed."""
    session = repository.writable_session("main")
    store = ShardingStore(session.store, chunks_per_shard=4)
    memory: dict[str, bytes] = {}
    with zarr.config.set({"codec_pipeline.path": PIPELINES[pipeline]}):
        for base in (store, ShardingStore(memory, chunks_per_shard=4)):
            z = create(base)
            np.testing.assert_array_equal(z[:], sparse_values())
            with base.batch():
                z[7:9] = 3
            z[7:9] = 0
    assert set(view(session.store)) == set(view(memory))
    for directory in ("", "g", "g/a", "g/a/c", "g/a/c/1", "nothing", "g/nothing"):
        ours, same = (names(s, directory) for s in (store, ShardingStore(memory)))
        assert ours == same, directory
    for key in ("README", "g/x", "g/a/.zarray", "g/a/c/9/9", "g/a/c/0/0/0"):
        assert not sync(store.exists(key))
        assert key not in ShardingMapping(session.store)
    assert sync(store.chunks_initialized("g/a")).sum() == 7
    sync(store.compact())
    with pytest.raises(UnsupportedError, match="versions"):
        sync(store.consolidate_index())
    assert is_sharded(session.store)
    assert get_shard_info(session.store).n_chunks == 7
    session.commit("sharded")
    again: Any = zarr.open_array(repository.readonly_session("main").store, path="g/a", mode="r")
    assert again.shards == (8, 12)
    np.testing.assert_array_equal(again[:], sparse_values())


def names(store: ShardingStore, directory: str) -> set[str]:
    async def read() -> set[str]:
        return {name async for name in store.list_dir(directory)}

    return sync(read())


@pytest.mark.parametrize("has_sizes", [True, False])
def test_a_session_is_a_source(repository: Any, has_sizes: bool) -> None:
    """Of each conversion; also of chunks of no known size, where it tells 0 for missing ones."""
    session = repository.writable_session("main")
    if not has_sizes:
        with pytest.warns(zarr.errors.UnstableSpecificationWarning):
            z = zarr.create_array(
                session.store,
                name="g/a",
                shape=(40,),
                chunks=(2,),
                dtype=zarr.dtype.VariableLengthBytes(),
            )
        z[3:5] = np.array([b"one", b"three"], dtype=object)
    else:
        create(session.store)
    session.commit("plain")
    source = repository.readonly_session("main").store
    chunks = chunks_in(source)
    packed: dict[str, bytes] = {}
    assert shard_store(source, packed, chunks_per_shard=4).n_objects < len(chunks)
    values = zarr.open_array(source, path="g/a")[:]
    for base in (source, packed):
        to: dict[str, bytes] = {}
        reshard(base, 2, to)
        assert chunks_in(to) == chunks
    plain: dict[str, bytes] = {}
    unshard_store(packed, plain)
    assert chunks_in(plain) == chunks
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(packed), path="g/a")[:], values)


def chunks_in(base: Any) -> dict[str, bytes]:
    return {key: value for key, value in view(base).items() if "/c/" in key}


def test_a_session_is_no_destination(repository: Any) -> None:
    """Nor converted in place: refused before anything is written. Metadata is translated."""
    session = repository.writable_session("main")
    create(ShardingStore(session.store, chunks_per_shard=2))
    session.commit("sharded")
    session = repository.writable_session("main")
    conversions: list[Callable[[], Any]] = [
        lambda: shard_store(session.store, chunks_per_shard=4),
        lambda: unshard_store(session.store),
        lambda: shard_store(view(session.store), session.store, chunks_per_shard=4),
    ]
    for convert in conversions:
        with pytest.raises(UnsupportedError, match="create the arrays through a ShardingStore"):
            convert()
    assert not session.has_uncommitted_changes
    from_native(session.store)
    np.testing.assert_array_equal(
        zarr.open_array(ShardingStore(session.store), path="g/a")[:], sparse_values()
    )
    to_native(session.store)
    np.testing.assert_array_equal(zarr.open_array(session.store, path="g/a")[:], sparse_values())
