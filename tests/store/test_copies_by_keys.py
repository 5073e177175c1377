"""Programs that copy an array key by key, with its document and its chunks concurrently."""

from __future__ import annotations

import asyncio
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

from tests.support.entry_points import register_shard
from zarr_shardstore import ShardingStore

VALUES = np.arange(1, 257, dtype="u2").reshape(16, 16)
ignore_unsharded = pytest.mark.filterwarnings("ignore:.*stays unsharded")


@pytest.fixture(autouse=True)
def registered() -> None:
    register_shard()


@pytest.fixture(params=[2, 3])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store with the unsharded array ``a`` of 256 chunks."""
    path = tmp_path / "source"
    options: Any = {"shape": (16, 16), "chunks": (1, 1), "dtype": "u2", "compressors": None}
    zarr.create_array(path, name="a", zarr_format=request.param, **options)[:] = VALUES
    return path


def items_of(source: Path, seed: int) -> list[tuple[str, bytes]]:
    """Keys and values in an order by chance."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    items = [(path.relative_to(source).as_posix(), path.read_bytes()) for path in files]
    random.Random(seed).shuffle(items)
    return items


def check(path: Path, name: str = "a", *, is_sharded: bool | None = None) -> None:
    """All values are there. A sharded array has 16 shards instead of 256 chunks."""
    z: Any = zarr.open_array(ShardingStore(path), path=name, mode="r")
    np.testing.assert_array_equal(z[:], VALUES)
    n_files = sum(file.is_file() and ".z" not in file.name for file in (path / name).rglob("*"))
    if is_sharded is not None:
        assert (n_files < 20) is is_sharded


@pytest.mark.parametrize("batch_size", [None, 1, 7])
@pytest.mark.parametrize("how", ["put", "pipe", "copy", "mv", "mv pattern", "mv list"])
def test_many_files_by_fsspec(how: str, batch_size: int | None, source: Path) -> None:
    """One call stores the documents first, so a new array is sharded."""
    target = source if how[:2] in ("co", "mv") else source.parent / "target"
    fs = fsspec.filesystem("shard", fo=str(target), chunks_per_shard=4)
    options: Any = {} if batch_size is None else {"batch_size": batch_size}
    if how == "put":
        fs.put(f"{source}/a/", "new/", recursive=True, **options)
    elif how == "copy":
        fs.copy("a/", "new/", recursive=True, **options)
    elif how.startswith("mv"):
        names: Any = {"mv": "a/", "mv pattern": "a/*", "mv list": fs.glob("a/*")}[how]
        fs.mv(names, "new/", recursive=True, **options)
        assert not fs.exists("a")
    else:
        fs.pipe({f"new{key[1:]}": value for key, value in items_of(source, 0)}, **options)
    check(target, "new", is_sharded=True)


def test_progress_of_a_copy(source: Path) -> None:
    """It ends at the size that it has named."""
    seen = fsspec.callbacks.Callback()
    fs = fsspec.filesystem("shard", fo=str(source.parent / "target"), chunks_per_shard=4)
    fs.put(f"{source}/a/", "new/", recursive=True, callback=seen)
    assert seen.value == seen.size >= 256


@ignore_unsharded
@pytest.mark.parametrize("seed", range(3))
def test_single_files_by_threads(seed: int, source: Path) -> None:
    """Each is a call of its own. Chunks before the document make the array unsharded."""
    target = source.parent / "target"
    fs = fsspec.filesystem("shard", fo=str(target), chunks_per_shard=4)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: fs.pipe_file(*item), items_of(source, seed)))
    check(target)


@ignore_unsharded
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interface", ["zarr", "zarr_new", "obspec"])
async def test_tasks_of_one_event_loop(interface: str, seed: int, source: Path) -> None:
    """All values are there, whatever the order in which the tasks begin."""
    target = source.parent / "target"
    store = ShardingStore(target, chunks_per_shard=4)
    method: Any = store.set_if_not_exists if interface == "zarr_new" else store.set

    async def put(key: str, value: bytes) -> None:
        if interface == "obspec":
            await store.as_obspec().put_async(key, value)
        else:
            await method(key, cpu.Buffer.from_bytes(value))

    await asyncio.gather(*[put(*item) for item in items_of(source, seed)])
    await asyncio.to_thread(check, target)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_document_beside_its_chunks(source: Path, *, is_first: bool) -> None:
    """It begins first, and the array is sharded; or last, and a warning says why it is not."""
    target = source.parent / "target"
    store = ShardingStore(target, chunks_per_shard=4)
    is_chunk = re.compile(r"a/(c/)?\d+[./]\d+").fullmatch
    items = sorted(items_of(source, 0), key=lambda item: (is_chunk(item[0]) is None) != is_first)
    tasks = [store.set(key, cpu.Buffer.from_bytes(value)) for key, value in items]
    if is_first:
        await asyncio.gather(*tasks)
    else:
        with pytest.warns(UserWarning, match="stays unsharded; .* write its metadata before"):
            await asyncio.gather(*tasks)
    await asyncio.to_thread(check, target, is_sharded=is_first)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interface", ["zarr", "obspec", "fsspec"])
def test_an_array_is_erased_key_by_key(interface: str, seed: int, tmp_path: Path) -> None:
    """The document may go first: its chunks are erased, and no other process is blamed."""
    store = ShardingStore(tmp_path, chunks_per_shard=4)
    z: Any = zarr.create_array(store, name="a", shape=(16,), chunks=(1,), dtype="u1")
    z[:] = 7
    keys = ["a/zarr.json", *(f"a/c/{i}" for i in range(16))]
    random.Random(seed).shuffle(keys)

    async def erase() -> None:
        method: Any = store.delete if interface == "zarr" else store.as_obspec().delete_async
        await asyncio.gather(*map(method, keys))

    if interface == "fsspec":
        fsspec.filesystem("shard", fo=str(tmp_path)).rm(keys)
    else:
        asyncio.run(erase())
    assert not (tmp_path / "a/zarr.json").exists()
    assert not any(path.is_file() for path in (tmp_path / "a").rglob("*"))
