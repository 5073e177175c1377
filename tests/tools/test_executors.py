"""Tasks run in threads, processes, dask and MPI, and make the same of a store everywhere."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore, MemoryStore, ObjectStore, WrapperStore

from tests.support.bases import OtherMapping, fsspec_memory
from tests.support.kit import objects_of
from tests.support.stops import InCaller, empty_directories, files_in
from zarr_shardstore import ShardingStore, SpecError, reshard, shard_store, unshard_store

DATA = np.arange(1, 36, dtype="<i2").reshape(5, 7)


@contextmanager
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@contextmanager
def dask_cluster() -> Iterator[Executor]:
    distributed: Any = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


@contextmanager
def mpi() -> Iterator[Executor]:
    pytest.importorskip("mpi4py")
    try:
        futures: Any = importlib.import_module("mpi4py.futures")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no MPI library: {error}".splitlines()[0])
    if shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec to start workers")
    with futures.MPIPoolExecutor(2) as executor:
        yield executor


@contextmanager
def nothing() -> Iterator[None]:
    yield None


EXECUTORS: dict[str, Callable[[], Any]] = {
    "default": nothing,
    "one thread": lambda: ThreadPoolExecutor(1),
    "8 threads": lambda: ThreadPoolExecutor(8),
    "caller": InCaller,
    "processes": processes,
    "dask": dask_cluster,
    "mpi": mpi,
}


def create(store: Any) -> Any:
    z = zarr.create_array(
        store,
        name="g/z",
        shape=DATA.shape,
        chunks=(1, 2),
        dtype=DATA.dtype,
        fill_value=0,
        compressors=None,
    )
    z[:] = DATA
    return store


def convert_all(root: Path, executor: Any) -> list[dict[str, bytes]]:
    """Files after each of three conversions in place, and of one to a destination."""
    store = LocalStore(root)
    states = []
    shard_store(store, chunks_per_shard=2, executor=executor)
    states.append(files_in(root))
    reshard(store, (1, 3), executor=executor)
    states.append(files_in(root))
    other = root.with_name(root.name + "-unsharded")
    unshard_store(store, LocalStore(other), executor=executor)
    states.append(files_in(other))
    unshard_store(store, executor=executor)
    states.append(files_in(root))
    assert empty_directories(root) == empty_directories(other) == []
    return states


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:distributed")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_same_everywhere(name: str, tmp_path: Path) -> None:
    """Every executor makes the same objects, byte by byte; so the last are those of the first."""
    create(str(tmp_path / "a"))
    create(str(tmp_path / "b"))
    before = files_in(tmp_path / "a")
    expected = convert_all(tmp_path / "a", InCaller())
    with EXECUTORS[name]() as executor:
        found = convert_all(tmp_path / "b", executor)
    assert found == expected
    assert {k: v for k, v in found[-1].items() if "/c/" in k} == {
        k: v for k, v in before.items() if "/c/" in k
    }
    assert found[2].keys() == before.keys()


class FailsOnce(InCaller):
    """One task of all fails."""

    def __init__(self, n: int) -> None:
        self.n_left = n

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.n_left -= 1
        if self.n_left == 0:
            future: Future[Any] = Future()
            future.set_exception(OSError("the worker was out of luck"))
            return future
        return super().submit(fn, *args, **kwargs)


@pytest.mark.parametrize("n", range(1, 7))
def test_one_task_fails(n: int, tmp_path: Path) -> None:
    """The caller gets the error, the source is as it was; the same command again finishes, and
    writes nothing that was written."""
    store = create(LocalStore(tmp_path))
    before = files_in(tmp_path)
    with pytest.raises(OSError, match="out of luck"):
        shard_store(store, chunks_per_shard=(2, 2), executor=FailsOnce(n))
    assert {k: v for k, v in files_in(tmp_path).items() if k in before} == before
    report = shard_store(store, chunks_per_shard=(2, 2))
    assert report.arrays[0].n_resumed == 5  # of 6: the one that failed was not there
    assert report.n_chunks == 20
    np.testing.assert_array_equal(zarr.open_array(store, path="g/z", mode="r")[:], DATA)
    assert empty_directories(tmp_path) == []


class Weighs(InCaller):
    """What is sent to a worker is pickled, and weighed."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        message = pickle.dumps((fn, args, kwargs))
        self.nbytes.append(len(message))
        fn, args, kwargs = pickle.loads(message)
        future = super().submit(fn, *args, **kwargs)
        pickle.dumps(future.result())
        return future


def test_tasks_are_small(tmp_path: Path) -> None:
    """A task is pickled in a few kB, however many chunks it converts; results too."""
    z = zarr.create_array(
        str(tmp_path), shape=(300, 300), chunks=(1, 1), dtype="u1", compressors=None
    )
    z[7, :] = 3
    executor = Weighs()
    shard_store(tmp_path, chunks_per_shard=(100, 100), executor=executor)
    assert len(executor.nbytes) == 3  # the others hold nothing
    assert max(executor.nbytes) < 4_000
    expected = np.zeros((300, 300), dtype="u1")
    expected[7, :] = 3
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path), mode="r")[:], expected)


def obstore_memory() -> ObjectStore[Any]:
    obstore_store: Any = pytest.importorskip("obstore.store")
    return ObjectStore(obstore_store.MemoryStore())


IN_MEMORY: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "mapping": OtherMapping,
    "memory": MemoryStore,
    "wrapped memory": lambda: WrapperStore(MemoryStore()),
    "fsspec memory": fsspec_memory,
    "obstore memory": obstore_memory,
}


@pytest.mark.parametrize("name", IN_MEMORY)
@pytest.mark.parametrize("is_source", [True, False])
def test_stores_in_memory_are_refused(name: str, is_source: bool, tmp_path: Path) -> None:
    """Workers elsewhere would find nothing in a store that is in memory: nothing is written."""
    base = IN_MEMORY[name]()
    here = create(LocalStore(tmp_path))
    files = files_in(tmp_path)
    if is_source:
        create(base if isinstance(base, ObjectStore | MemoryStore) else ShardingStore(base))
    before = objects_of(base)
    with pytest.raises(SpecError, match="in the memory of this process"):
        shard_store(*((base,) if is_source else (here, base)), executor=InCaller())
    assert objects_of(base) == before
    assert files_in(tmp_path) == files


class Elsewhere(LocalStore):
    """A path that is another directory on the machines of the workers."""

    def __init__(self, root: Any, worker_root: Any = None, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self.worker_root = worker_root

    def __reduce__(self) -> Any:
        return LocalStore, (self.worker_root,)


@pytest.mark.parametrize("has_copy", [False, True])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_workers_that_do_not_reach_the_store(
    has_copy: bool, is_in_place: bool, tmp_path: Path
) -> None:
    """Workers on machines where the path is another directory, empty or with a copy of the store:
    an error, and the source is as it was."""
    root, there = tmp_path / "here", tmp_path / "there"
    create(LocalStore(root))
    if has_copy:
        create(LocalStore(there))
    before = files_in(root)
    target = () if is_in_place else (Elsewhere(tmp_path / "a", tmp_path / "b"),)
    with pytest.raises(SpecError, match="nothing was removed"):
        shard_store(Elsewhere(root, there), *target, chunks_per_shard=2, executor=Weighs())
    assert {k: v for k, v in files_in(root).items() if k in before} == before
    shard_store(LocalStore(root), chunks_per_shard=2)
    np.testing.assert_array_equal(zarr.open_array(str(root), path="g/z", mode="r")[:], DATA)


def test_what_is_no_executor(tmp_path: Path) -> None:
    """A clear error, before anything is read."""
    with pytest.raises(SpecError, match=r"concurrent\.futures"):
        shard_store(tmp_path, executor=threading.Thread())  # type: ignore[arg-type]
