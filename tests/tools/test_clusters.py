"""Commands on a dask cluster of two processes, whose workers are killed meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_shardstore
from tests.support.processes import s3_server
from tests.support.stops import files_in
from zarr_shardstore import ShardingStore, ShardStoreError, check_store, import_store, shard_store

distributed: Any = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:distributed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

DATA = np.arange(1, 60 * 64 * 64 + 1, dtype="<u4").reshape(60, 64, 64)
SHARD = ["--chunks-per-shard", "2,4,4"]
N_SHARDS = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        host="127.0.0.1",
        protocol="tcp",
        dashboard_address="127.0.0.1:0",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield where


def kill_a_worker(cluster: Any) -> None:
    """Kill a worker process; its nanny starts another one."""

    def pids() -> list[int]:
        processes = [nanny.process for nanny in cluster.workers.values()]
        return [process.pid for process in processes if process and process.pid]

    wait_until(pids)
    os.kill(pids()[0], signal.SIGKILL)


def command(*args: str, meanwhile: Callable[[], object] = lambda: None) -> str:
    """Run a command, which ends well; return what it prints."""
    root = str(Path(zarr_shardstore.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-m", "zarr_shardstore", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        try:
            meanwhile()
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return out


def wait_until(is_true: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def create(store: Any) -> None:
    z = zarr.create_array(store, shape=DATA.shape, chunks=(1, 16, 16), dtype=DATA.dtype)
    z[:] = DATA


def test_local_files(cluster: Any, tmp_path: Path) -> None:
    """A worker is killed while the shards are made: they are those that threads make, and no
    temporary file is left. fsck, with the same workers, finds all of them whole."""
    source, target = tmp_path / "a.zarr", tmp_path / "b.zarr"
    create(str(source))
    shard_store(source, tmp_path / "c.zarr", chunks_per_shard=(2, 4, 4))

    def kill_one() -> None:
        wait_until(lambda: target.exists() and len(files_in(target)) > 2)
        kill_a_worker(cluster)
        left = target / "c/0/0" / f"9.{'0' * 32}.partial"  # as by a kill within a write
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"some")

    address = ["--dask", cluster.scheduler_address]
    command("shard", str(source), str(target), *SHARD, *address, meanwhile=kill_one)
    assert files_in(target) == files_in(tmp_path / "c.zarr")
    out = command("fsck", str(target), "--decode", *address)
    assert f"{60 * 16:,} chunks" in out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("raw", data=DATA, chunks=(1, 16, 16))
    return tmp_path / "a.h5"


def test_an_import(cluster: Any, source: Path, tmp_path: Path) -> None:
    """Chunks of an HDF5 file, read by the workers, one of which is killed. Until all are there, no
    array is visible."""
    before, target = source.read_bytes(), tmp_path / "b.zarr"
    was_visible = []

    def kill_one() -> None:
        wait_until(lambda: target.exists() and len(files_in(target)) > 2)
        was_visible.append((target / "raw/zarr.json").exists())
        kill_a_worker(cluster)

    address = ["--dask", cluster.scheduler_address]
    command("import", str(source), str(target), *SHARD, *address, meanwhile=kill_one)
    found: Any = zarr.open_array(target, path="raw", mode="r")
    assert found.shards == (2, 64, 64)
    np.testing.assert_array_equal(found[:], DATA)
    assert was_visible == [False]
    assert source.read_bytes() == before
    assert not list(tmp_path.rglob("*.partial"))


def end_of_a_worker(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["dask", "processes"])
def test_a_task_whose_workers_are_killed_again_and_again(
    kind: str, cluster: Any, source: Path, tmp_path: Path
) -> None:
    """The error says that memory was short, and that the same call continues."""
    with ExitStack() as stack:
        if kind == "dask":
            cluster.scheduler.allowed_failures = 0
            stack.callback(setattr, cluster.scheduler, "allowed_failures", 3)
            client = stack.enter_context(distributed.Client(cluster, set_as_default=False))
            executor = client.get_executor(pure=False)
        else:
            executor = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        submit, fatal = executor.submit, [end_of_a_worker]
        executor.submit = lambda call, *args: submit(fatal.pop() if fatal else call, *args)
        with pytest.raises(ShardStoreError, match=r"memory.*same again.*(KilledWorker|Broken)"):
            import_store(source, tmp_path / "b.zarr", executor=executor)
    assert not (tmp_path / "b.zarr" / "raw" / "zarr.json").exists()
    import_store(source, tmp_path / "b.zarr")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "b.zarr/raw", mode="r")[:], DATA)


@pytest.mark.thorough
def test_object_store(cluster: Any, s3: dict[str, Any]) -> None:
    """The same on S3, with the options of the store on the command line; in place, too."""
    options = {
        "endpoint": s3["endpoint"],
        "access_key_id": "a",
        "secret_access_key": "b",
        "region": "us-east-1",
    }
    flags = [f"--source-option={key}={value}" for key, value in options.items()]
    url = f"s3://{s3['bucket']}/a.zarr"
    store = ShardingStore(url, None, storage_options=options)
    create(store)

    def kill_one() -> None:
        base: Any = store.base
        wait_until(lambda: len(base.store.list(".zarr_shardstore").collect()) > 2)
        kill_a_worker(cluster)

    address = ["--dask", cluster.scheduler_address]
    command("shard", url, *SHARD, "--yes", *flags, *address, meanwhile=kill_one)
    report = check_store(url, level="entries", storage_options=options)
    assert (report.is_clean, report.n_objects, report.n_chunks) == (True, N_SHARDS, 60 * 16)
    sharded = ShardingStore(url, storage_options=options)
    np.testing.assert_array_equal(zarr.open_array(sharded, mode="r")[:], DATA)


def test_an_equal_task_of_an_earlier_run_is_run_again(cluster: Any, tmp_path: Path) -> None:
    """dask remembers results as long as a client has their futures."""
    create(str(tmp_path / "a.zarr"))
    with distributed.Client(cluster, set_as_default=False) as client:
        submit, futures = client.submit, []

        def submit_and_keep(*args: Any, **more: Any) -> Any:
            futures.append(submit(*args, **more))
            return futures[-1]

        client.submit = submit_and_keep
        for _ in range(2):
            shutil.rmtree(tmp_path / "b.zarr", ignore_errors=True)
            report = shard_store(
                *(tmp_path / "a.zarr", tmp_path / "b.zarr"),
                chunks_per_shard=(2, 4, 4),
                executor=client.get_executor(),
            )
            assert report.n_chunks == 60 * 16
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "b.zarr"), mode="r")[:], DATA)
