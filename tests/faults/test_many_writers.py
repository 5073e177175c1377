"""Several processes write chunks of the same shards: all of them are there in the end.

``ZARR_SHARDSTORE_ROUNDS`` is how often; each time in another order.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

from tests.faults.convert_once import open_store
from tests.faults.processes import azure_server, s3_server
from tests.faults.stops import files_in
from zarr_shardstore import ShardConflictError, ShardingMapping, ShardingStore
from zarr_shardstore.io import locks
from zarr_shardstore.io.locks import LOCK_SUFFIX, held

N_ROUNDS = int(os.environ.get("ZARR_SHARDSTORE_ROUNDS", "1"))
N_PROCESSES = 4
N_THREADS = 2
N_SHARDS, CPS = 2, 32
N_CHUNKS = N_SHARDS * CPS
LENGTH = 1000

Where = dict[str, Any]


def open_base(where: Where) -> Any:
    if where["kind"] == "fsspec local":
        options = {"auto_mkdir": True}
        return FsspecStore.from_url(f"file://{where['path']}", storage_options=options)
    return open_store(where)


def write_some(where: Where, options: dict[str, Any], rank: int, seed: int) -> None:
    """Write the chunks of one writer in any order, each by a call of its own; then some again."""
    store = ShardingStore(open_base(where), **options)
    z = zarr.open_array(store, path="z", mode="r+")
    mine = list(range(rank, N_CHUNKS, N_PROCESSES))
    random.Random(seed * 1000 + rank).shuffle(mine)

    def write(i: int) -> None:
        z[LENGTH * i : LENGTH * (i + 1)] = 0 if i % 7 == 3 else i + 1

    with ThreadPoolExecutor(N_THREADS) as threads:
        list(threads.map(write, mine))
        list(threads.map(write, mine[:3]))


def expected() -> Any:
    numbers = np.arange(N_CHUNKS)
    return np.repeat(np.where(numbers % 7 == 3, 0, numbers + 1), LENGTH)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(
        N_PROCESSES, mp_context=multiprocessing.get_context("spawn")
    ) as executor:
        # All of them, with the package imported: otherwise one is done before the next begins.
        list(executor.map(time.sleep, [0.5] * N_PROCESSES))
        where: Where = {"kind": "local", "path": str(tmp_path_factory.mktemp("first"))}
        check_round(executor, where, {}, 0)
        yield executor


def check_round(
    processes: ProcessPoolExecutor, where: Where, options: dict[str, Any], seed: int
) -> None:
    store = ShardingStore(open_base(where), chunks_per_shard=CPS)
    zarr.create_array(
        store, name="z", shape=(LENGTH * N_CHUNKS,), chunks=(LENGTH,), dtype="u2", overwrite=True
    )[:] = 1
    futures = [
        processes.submit(write_some, where, options, rank, seed) for rank in range(N_PROCESSES)
    ]
    for future in futures:
        future.result(timeout=240)
    found: Any = zarr.open_array(store, path="z", mode="r")[:]
    np.testing.assert_array_equal(found, expected())
    native: Any = zarr.open_array(open_base(where), path="z", mode="r")[:]
    np.testing.assert_array_equal(native, expected())


LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "LocalStore": ("local", {}),
    "LocalStore, lock files": ("local", {"locking": "lockfile"}),
    "obstore": ("obstore local", {}),
    "fsspec": ("fsspec local", {}),
}


@pytest.mark.parametrize("name", LOCAL)
def test_local_files(name: str, processes: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Locks keep the processes apart; none is left behind."""
    kind, options = LOCAL[name]
    for seed in range(N_ROUNDS):
        check_round(processes, {"kind": kind, "path": str(tmp_path)}, options, seed)
        assert not [key for key in files_in(tmp_path) if key.endswith(LOCK_SUFFIX)]


@pytest.mark.parametrize("server", [s3_server, azure_server])
def test_object_stores(server: Any, processes: ProcessPoolExecutor) -> None:
    """Conditional writes keep them apart, whatever hosts they run on."""
    with server() as where:
        for seed in range(N_ROUNDS):
            check_round(processes, where | {"prefix": f"round-{seed}"}, {}, seed)


# ------------------------------------------------------------------------- locks


def _hold(path: str, locking: Any, begun: Any) -> None:
    with held(path, locking):
        begun.set()
        time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A process that holds the lock of a shard and does not let go."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    path = str(tmp_path / "data/root/a/c0")
    process = context.Process(target=_hold, args=(path, request.param, begun))
    process.start()
    try:
        assert begun.wait(60)
        yield process
    finally:
        process.kill()
        process.join(60)


@pytest.mark.parametrize("holder", ["os"], indirect=True)
def test_a_lock_ends_with_its_process(holder: Any, tmp_path: Path) -> None:
    """Who waits for a process that hangs gets an error, and nothing is written; when it is
    killed, the next write works. Its lock is no key."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    with mock.patch.object(locks, "MAX_WAIT_S", 0.1), pytest.raises(ShardConflictError, match="c0"):
        m["data/root/a/c1"] = b"1"
    assert list(m) == []
    m["data/root/a/c7"] = b"7"  # another shard
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(60)
    m["data/root/a/c1"] = b"1"
    assert dict(m) == {"data/root/a/c1": b"1", "data/root/a/c7": b"7"}
    assert sorted(files_in(tmp_path)) == ["data/root/a/c0", "data/root/a/c1"]


@pytest.mark.parametrize("holder", ["lockfile"], indirect=True)
def test_a_lock_file_outlives_its_process(holder: Any, tmp_path: Path) -> None:
    """The error says which file to remove; then it goes on."""
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(60)
    m = ShardingMapping(tmp_path, chunks_per_shard=4, locking="lockfile")
    lock = tmp_path / f"data/root/a/c0{LOCK_SUFFIX}"
    with mock.patch.object(locks, "MAX_WAIT_S", 0.1):
        try:
            m["data/root/a/c1"] = b"1"
        except ShardConflictError as error:
            assert str(lock) in str(error)  # noqa: PT017
            assert "remove" in str(error)  # noqa: PT017
            lock.unlink()
            m["data/root/a/c1"] = b"1"
    assert dict(m) == {"data/root/a/c1": b"1"}


def test_an_erased_directory_does_not_stop_who_waits(tmp_path: Path) -> None:
    """The directory of the lock is made again."""
    fs = fsspec.filesystem("file")
    path = str(tmp_path / "a/b/c")
    for _ in range(20):
        with held(path, "os"):
            pass
        fs.rm(str(tmp_path / "a"), recursive=True)
