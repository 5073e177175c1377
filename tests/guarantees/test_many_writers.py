"""Threads, processes and dask workers write chunks of the same shards: all are there in the end.

``ZARR_SHARDSTORE_ROUNDS`` is how often, each time in another order, ``ZARR_SHARDSTORE_CHUNKS``
how many chunks the 8 shards have together: 20 and 4096 for the full thing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zarr
from zarr.storage import ObjectStore, StorePath

from tests.support.kit import lock_shard, tuned
from tests.support.processes import azure_server, s3_server
from tests.support.rounds import N_ROUNDS
from tests.support.shared_shards import (
    WAYS,
    WRITERS,
    Kind,
    SharedArray,
    Way,
    Writers,
    open_base,
)
from tests.support.side_files import LOCK_SUFFIX
from tests.support.stops import files_in
from zarr_shardstore import ShardConflictError, ShardingMapping

N_CHUNKS = int(os.environ.get("ZARR_SHARDSTORE_CHUNKS", "128"))
N_CHUNKS_ON_SERVERS = int(os.environ.get("ZARR_SHARDSTORE_CHUNKS", "32"))
"""moto performs about 100 requests a second."""

Started = Callable[[str], Any]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """Writers and servers by name, each started when a test first needs it."""
    servers = {"S3": s3_server, "Azure": azure_server}
    running: dict[str, Any] = {}
    with ExitStack() as stack:

        def start(name: str) -> Any:
            if name not in running:
                running[name] = stack.enter_context((WRITERS | servers)[name]())
            return running[name]

        yield start


def check_rounds(array: SharedArray, writers: Writers, way: Way) -> None:
    """Every element is there, as we read it and as zarr alone does, also in chunks that two
    writers have parts of."""
    array.create()
    for round_ in range(1, max(1, N_ROUNDS) + 1):
        seconds = writers.write(array, way, round_)
        readers = [array.open()]
        if array.kind != "v2":
            readers.append(zarr.open_array(open_base(array.where), path="z", mode="r"))
        for z in readers:
            survivors = array.survivors(z, way, round_)
            assert survivors.all(), f"round {round_}: {survivors.sum()} of {survivors.size}"
        print(f"round {round_}: {survivors.sum()} of {survivors.size}, {seconds:.1f} s")


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in WRITERS if "thread" in name])
@pytest.mark.parametrize("kind", ["memory", "fsspec memory"])
def test_memory(started: Started, kind: str, name: str, way: Way) -> None:
    """Writers of one process are kept apart: a commit in a `MemoryStore` is one step of zarr's
    event loop, that in fsspec's memory is many."""
    where = {"kind": kind, "path": f"{name}/{way}"}
    check_rounds(SharedArray(where=where, n_chunks=N_CHUNKS), started(name), way)


LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "LocalStore": ("local", {}),
    "LocalStore, lock files": ("local", {"locking": "lockfile"}),
    "LocalStore, no locks": ("local", {"locking": "none"}),
    "LocalStore, by shards": ("local", {"view": "shards"}),
    "obstore": ("obstore local", {}),
    "fsspec": ("fsspec local", {}),
}


LOCAL_CASES = [
    ("8 threads, one store", "LocalStore"),
    ("8 threads, one store", "LocalStore, no locks"),
    ("8 threads, one store", "LocalStore, by shards"),
    ("8 threads, a store each", "LocalStore"),
    ("8 threads, a store each", "LocalStore, no locks"),
    *(("8 processes", base) for base in LOCAL if base != "LocalStore, no locks"),
    ("4 dask workers", "LocalStore"),
]


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize(
    ("name", "base", "way"),
    [(*case, way) for case in LOCAL_CASES for way in WAYS],
)
def test_local_files(started: Started, name: str, base: str, way: Way, tmp_path: Path) -> None:
    """Locks keep the processes apart; when all shards are at rest none is left behind."""
    kind, options = LOCAL[base]
    where = {"kind": kind, "path": str(tmp_path)}
    array = SharedArray(where=where, n_chunks=N_CHUNKS, options=options)
    check_rounds(array, started(name), way)
    ShardingMapping(tmp_path).compact()
    assert not [key for key in files_in(tmp_path) if key.endswith(LOCK_SUFFIX)]


@pytest.mark.thorough(of=10)
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "4 dask workers, threads"])
@pytest.mark.parametrize(("server", "way"), [("S3", "regions"), ("Azure", "chunks")])
def test_object_stores(started: Started, server: str, name: str, way: Way) -> None:
    """Conditional writes keep them apart, whatever hosts they run on."""
    where = started(server) | {"prefix": f"{name}/{way}".replace(" ", "-").replace(",", "")}
    check_rounds(SharedArray(where=where, n_chunks=N_CHUNKS_ON_SERVERS), started(name), way)


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("kind", ["v2", "unsharded", "shards="])
@pytest.mark.parametrize("place", ["memory", "LocalStore", "LocalStore, lock files", "S3", "Azure"])
def test_parts_of_chunks(started: Started, place: str, kind: Kind, tmp_path: Path) -> None:
    """Regions that cut chunks, in arrays of other kinds: a chunk that is no entry is a shard of
    one."""
    n_chunks, name = N_CHUNKS, "8 processes"
    options: dict[str, Any] = {}
    if place == "memory":
        where, name = {"kind": "memory", "path": f"parts/{kind}"}, "8 threads, a store each"
    elif place in LOCAL:
        base, options = LOCAL[place]
        where = {"kind": base, "path": str(tmp_path)}
    else:
        where, n_chunks = started(place) | {"prefix": f"parts/{kind}"}, N_CHUNKS_ON_SERVERS
    array = SharedArray(where=where, n_chunks=n_chunks, options=options, kind=kind)
    check_rounds(array, started(name), "regions")


def test_a_url_of_s3_has_conditional_writes(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes through obstore, with the options of s3fs, with obstore's own, and those of the
    environment. Below a group its shards are those of the whole store."""
    where = started("S3")
    keys = {"key": "k", "secret": "s", "endpoint_url": where["endpoint"]}
    url = f"s3://{where['bucket']}/by-url"
    one = ShardingMapping(url, {"g/z": 4}, storage_options=keys)
    one["g/z/c/1"] = b"one"
    own: dict[str, Any] = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    own |= {"endpoint": where["endpoint"], "client_options": {"allow_http": True}}
    other = ShardingMapping(url, {"g/z": 4}, storage_options=own)
    other["g/z/c/2"] = b"other"
    for name, value in [("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("ALLOW_HTTP", "true")]:
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT", where["endpoint"])
    whole = ShardingMapping(url, {"g/z": 4})
    part = ShardingMapping(StorePath(whole.base, "g"), {"z": 4})  # type: ignore[arg-type]
    part["z/c/3"] = b"part"
    for mapping in (one, other, whole):
        assert type(mapping.base) is ObjectStore
        found = [mapping[f"g/z/c/{i}"] for i in (1, 2, 3)]
        assert found == [b"one", b"other", b"part"]
        assert mapping.locate(["g/z/c/1", "g/z/c/0"]) == [("g/z/c/0", 0, 3), None]


# ------------------------------------------------------------------------- locks


def _hold(path: str, locking: Any, begun: Any) -> None:
    with lock_shard(path, locking):
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
    with tuned(lock_wait_s=0.1), pytest.raises(ShardConflictError, match="c0"):
        m["data/root/a/c1"] = b"1"
    assert list(m) == []
    m["data/root/a/c7"] = b"7"  # another shard
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(60)
    m["data/root/a/c1"] = b"1"
    assert dict(m) == {"data/root/a/c1": b"1", "data/root/a/c7": b"7"}
    m.flush()
    assert sorted(files_in(tmp_path)) == ["data/root/a/c0", "data/root/a/c1"]


@pytest.mark.parametrize("holder", ["lockfile"], indirect=True)
def test_a_lock_file_outlives_its_process(holder: Any, tmp_path: Path) -> None:
    """The error says which file to remove; then it goes on."""
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(60)
    m = ShardingMapping(tmp_path, chunks_per_shard=4, locking="lockfile")
    lock = tmp_path / f"data/root/a/c0{LOCK_SUFFIX}"
    with (
        tuned(lock_wait_s=0.1),
        pytest.raises(ShardConflictError, match="remove") as caught,
    ):
        m["data/root/a/c1"] = b"1"
    assert str(lock) in str(caught.value)
    lock.unlink()
    m["data/root/a/c1"] = b"1"
    assert dict(m) == {"data/root/a/c1": b"1"}


def test_an_erased_directory_does_not_stop_who_waits(tmp_path: Path) -> None:
    """The directory of the lock is made again."""
    fs = fsspec.filesystem("file")
    path = str(tmp_path / "a/b/c")
    for _ in range(20):
        with lock_shard(path, "os"):
            pass
        fs.rm(str(tmp_path / "a"), recursive=True)
