"""Which methods are zarr's, which are the draft's, and which of them block."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from zarr_shardstore import ReadOnlyError, ShardingMapping, ShardingStore


def written(base: Any, n: int = 8) -> ShardingStore:
    """A store on `base` with an array of `n` chunks in two shards, the first written twice."""
    store = ShardingStore(base, n // 2)
    z = zarr.create_array(
        store, name="z", shape=(n,), chunks=(1,), dtype="u1", compressors=None, overwrite=True
    )
    z[: n - 1] = 1
    z[0] = 2
    return store


def nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "z" / "c").iterdir())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("set_partial_values", ([("z/c/0", 0, b"x")],)),
        ("erase", ("z/c/0",)),
        ("erase_values", (["z/c/0"],)),
        ("erase_prefix", ("z/",)),
    ],
)
def test_operations_of_the_draft_are_those_of_the_mapping(
    name: str, arguments: tuple[Any, ...]
) -> None:
    """On the store, whose other methods are async, the call fails at once and names the mapping."""
    store = written({})
    with pytest.raises(AttributeError, match=rf"ShardingMapping\(store\)\.{name}\("):
        getattr(store, name)(*arguments)
    assert not hasattr(store, name)
    getattr(ShardingMapping(store), name)(*arguments)


def test_get_partial_values_is_that_of_zarr() -> None:
    """With the arguments of the draft it fails when it is called, not when it is awaited."""
    store = written({})
    with pytest.raises(TypeError, match=r"ShardingMapping\(store\)\.get_partial_values"):
        store.get_partial_values([("z/c/0", (0, 1))])  # type: ignore[arg-type, unused-coroutine]
    with pytest.raises(TypeError, match=r"Unexpected byte_range.*ShardingMapping"):
        sync(store.get_partial_values(default_buffer_prototype(), [("z/c/0", (0, 1))]))  # type: ignore[list-item]
    assert ShardingMapping(store).get_partial_values([("z/c/0", (0, 1))]) == [b"\x02"]


def test_other_names_are_missing_as_ever() -> None:
    """Nothing is said about the draft."""
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        ShardingStore({}).nothing  # type: ignore[attr-defined]  # noqa: B018


def blocking(store: ShardingStore) -> None:
    store.flush_sync()
    store.compact_sync()
    assert store.consolidate_index_sync() == ["z"]


async def in_a_running_loop(store: ShardingStore) -> None:
    blocking(store)


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("is_in_loop", [False, True])
def test_flush_compact_and_consolidate_have_blocking_twins(
    is_in_loop: bool, tmp_path: Path
) -> None:
    """They do what the async ones do, also in the thread of a running event loop."""
    blocked, awaited = (written(tmp_path / name) for name in ("blocked", "awaited"))
    if is_in_loop:
        asyncio.run(in_a_running_loop(blocked))
    else:
        blocking(blocked)

    async def awaiting() -> None:
        await awaited.flush()
        await awaited.compact()
        assert await awaited.consolidate_index() == ["z"]

    asyncio.run(awaiting())
    sizes = {nbytes(tmp_path / name) for name in ("blocked", "awaited")}
    assert sizes == {7 + 2 * (4 * 16 + 4) + nbytes_of_collection(tmp_path / "blocked")}
    np.testing.assert_array_equal(zarr.open_array(blocked, path="z")[:], [2] + [1] * 6 + [0])


def nbytes_of_collection(path: Path) -> int:
    return sum(f.stat().st_size for f in (path / "z" / "c").iterdir() if not f.name.isdigit())


@pytest.mark.parametrize("base", ["memory", "fsspec"])
def test_the_twins_reach_async_base_stores_from_a_running_loop(base: str) -> None:
    """zarr's event loop runs in another thread."""
    of = zarr.storage.MemoryStore() if base == "memory" else "memory://twins"
    store = written(of)

    async def blocking_here() -> None:
        store.flush_sync()
        store.compact_sync()

    asyncio.run(blocking_here())
    assert zarr.open_array(store, path="z")[0] == 2


def test_the_twins_refuse_writes_as_the_others() -> None:
    """`flush` writes nothing that is not stored."""
    store = ShardingStore({}, read_only=True)
    store.flush_sync()
    for method in (store.compact_sync, store.consolidate_index_sync):
        with pytest.raises(ReadOnlyError):
            method()


@pytest.mark.parametrize("name", ["flush", "compact", "consolidate_index"])
def test_a_forgotten_await_is_visible(name: str, tmp_path: Path) -> None:
    """Python warns, and names the method."""
    store = written(tmp_path)
    with pytest.warns(RuntimeWarning, match=rf"ShardingStore\.{name}' was never awaited"):
        getattr(store, name)()
