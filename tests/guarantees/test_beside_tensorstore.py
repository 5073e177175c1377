"""tensorstore writes chunks of the same shards: each keeps the other out, and nothing is lost.

``ZARR_SHARDSTORE_ROUNDS`` is how often.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pytest
import zarr

from tests.support.kit import lock_shard, system_calls
from tests.support.rounds import N_ROUNDS
from zarr_shardstore import ShardingMapping, ShardingStore

ts = pytest.importorskip("tensorstore")

N_WRITES = 100
"""Of each process in a round."""

Locking: TypeAlias = Literal["os", "lockfile"]
LOCKINGS: tuple[Locking, ...] = get_args(Locking)


def kvstore(path: Path, locking: Locking = "os") -> dict[str, Any]:
    """Not synced: then tensorstore writes as often as we do."""
    context = {"file_io_locking": {"mode": locking}, "file_io_sync": False}
    return {"driver": "file", "path": f"{path}/", "context": context}


# ------------------------------------------------------------------------- processes


def open_ours(path: Path, options: dict[str, Any]) -> Callable[[int], None]:
    z = zarr.open_array(ShardingStore(path, **options), mode="r+")

    def write(i: int) -> None:
        z[i] = i + 1

    return write


def open_theirs(path: Path, options: dict[str, Any]) -> Callable[[int], None]:
    locking = options.get("locking", "os")
    z = ts.open({"driver": "zarr3", "kvstore": kvstore(path, locking)}).result()

    def write(i: int) -> None:
        while True:
            try:
                z[i : i + 1].write([i + 1]).result()
            except ValueError as error:  # it has read the index while we were writing it
                if options.get("strategy") != "append" or "DATA_LOSS" not in str(error):
                    raise
            else:
                return

    return write


OPEN = {"ours": open_ours, "tensorstore": open_theirs}


def write_all(
    kind: str, path: Path, options: dict[str, Any], numbers: range, begun: Any, go: Any
) -> None:
    """Write the chunks with these numbers: the first one at once."""
    write = OPEN[kind](path, options)
    write(numbers[0])
    begun.set()
    assert go.wait(60)
    for i in numbers[1:]:
        write(i)


class Processes:
    """Each writes every n-th chunk of an array with one shard."""

    def __init__(self, path: Path, n: int, **options: Any) -> None:
        self.path, self.options, self.n = path, options, n
        self.context = multiprocessing.get_context("spawn")
        self.go = self.context.Event()
        self.running: list[Any] = []
        store = ShardingStore(path, chunks_per_shard=n * N_WRITES, **options)
        shape = (n * N_WRITES,)
        zarr.create_array(
            store, shape=shape, chunks=(1,), dtype="u4", compressors=None, fill_value=0
        )

    def begin(self, *kinds: str) -> None:
        """Start processes, and let each write its first chunk."""
        events = []
        for kind in kinds:
            events.append(self.context.Event())
            numbers = range(len(self.running), self.n * N_WRITES, self.n)
            args = (kind, self.path, self.options, numbers, events[-1], self.go)
            self.running.append(self.context.Process(target=write_all, args=args))
            self.running[-1].start()
        assert all(event.wait(60) for event in events)

    def lost(self) -> list[int]:
        """Let all write all the others; which are not there then."""
        self.go.set()
        for process in self.running:
            process.join(120)
            process.kill()
        assert [process.exitcode for process in self.running] == [0] * len(self.running)
        got: Any = zarr.open_array(ShardingStore(self.path), mode="r")[:]
        missing: list[int] = np.flatnonzero(got != np.arange(1, len(got) + 1)).tolist()
        return [i for i in missing if i % self.n < len(self.running)]


@pytest.mark.thorough(of=6)
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "rewrite"},
        {"strategy": "append"},
        {"strategy": "append", "index_location": "start"},
        {"locking": "lockfile"},
    ],
    ids=["rewrite", "append", "append, index at the start", "lock files"],
)
def test_nothing_is_lost(options: dict[str, Any], tmp_path: Path) -> None:
    """Two processes of ours and two of tensorstore write one shard."""
    for round_ in range(max(1, N_ROUNDS)):
        processes = Processes(tmp_path / str(round_), 4, **options)
        processes.begin("ours", "tensorstore", "ours", "tensorstore")
        assert processes.lost() == []


def test_ours_exclude_each_other_after_theirs(tmp_path: Path) -> None:
    """The first one has the shard open, and its lock, when tensorstore writes."""
    processes = Processes(tmp_path, 3, strategy="append")
    processes.begin("ours")
    open_theirs(tmp_path, {})(2)
    processes.begin("ours")
    assert processes.lost() == []


@pytest.mark.parametrize("offset_s", [-3600, 3600])
@pytest.mark.parametrize("strategy", ["rewrite", "append"])
def test_each_version_of_a_shard_has_its_own_time(
    strategy: Any, offset_s: int, tmp_path: Path
) -> None:
    """By which tensorstore sees that what it has read is not what it would replace; also where
    the clock of the file system stands still, and a new file gets an old inode."""
    stopped_ns = time.time_ns() + offset_s * 10**9

    def with_stopped_clock(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(fd: int, *args: Any) -> None:
            call(fd, *args)
            os.utime(fd, ns=(stopped_ns, stopped_ns))

        return run if name in ("write_at", "truncate") else call

    m = ShardingMapping(tmp_path, chunks_per_shard=16, strategy=strategy)
    times = []
    with system_calls(with_stopped_clock):
        for i in range(32):
            m[f"data/root/a/c{i % 16}"] = bytes([i]) * 100 * (i + 1)
            times.append(os.stat(tmp_path / "data/root/a/c0").st_mtime_ns)
    assert len(set(times)) == 32
    m.flush()


# ----------------------------------------------------------------------------- locks


@pytest.mark.parametrize("locking", LOCKINGS)
def test_tensorstore_waits_for_our_lock(locking: Locking, tmp_path: Path) -> None:
    store = ts.KvStore.open(kvstore(tmp_path, locking)).result()
    path = tmp_path / "a"
    with lock_shard(path, locking):
        writing = store.write("a", b"theirs")
        time.sleep(0.2)  # without a lock it is done then
        assert not writing.done()
        assert not path.exists()
        path.write_bytes(b"ours")
    writing.result()
    assert path.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["a"]
