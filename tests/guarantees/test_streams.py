"""Frames that are appended by one process, and read by another while that goes on.

The writer is killed, and another one continues.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from tests.support import append_until_killed
from tests.support.append_until_killed import frame
from tests.support.convert_once import open_store
from tests.support.file_layer import path_of
from tests.support.kit import system_calls
from tests.support.processes import forks_of, s3_server
from tests.support.rounds import rounds
from zarr_shardstore import ShardConflictError, ShardingStore, check_store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")

MAX_SECONDS = 180


class Writers:
    """Writers in processes of their own, each with a log of what it told."""

    def __init__(self, ask: Callable[[dict[str, Any]], int], log: Path) -> None:
        self._ask, self.log = ask, log

    def start(self, where: dict[str, Any], n_frames: int, **more: Any) -> int:
        return self._ask({"where": where, "n_frames": n_frames, "log": str(self.log), **more})

    def wait(self, number: int) -> int:
        return self._ask({"wait": number})

    def kill(self, number: int) -> None:
        os.kill(number, signal.SIGKILL)
        assert self.wait(number) == -signal.SIGKILL

    def told(self) -> int:
        """So many frames have been told to be durable, by all writers."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return max(map(int, lines), default=0)


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    with forks_of(append_until_killed.__file__) as ask:
        yield Writers(ask, tmp_path / "log")


def check_frames(store: Any, start: int = 0) -> int:
    """All frames of the array from one on are those that were appended; return their number."""
    try:
        z: Any = zarr.open_array(store, path="g/run", mode="r")
    except FileNotFoundError:
        return 0
    n = z.shape[0]
    if n > start:
        expected = np.stack([frame(i) for i in range(start, n)])
        np.testing.assert_array_equal(z[start:n], expected)
    return int(n)


def test_a_kill_at_any_system_call(writers: Writers, tmp_path: Path) -> None:
    """All frames that were told durable are there, no other is torn; the next writer continues, and
    in the end zarr alone reads every frame, and nothing is damaged or left behind."""
    flushes: dict[str, Any] = {"flushes": [1, 2], "n_frames": 17}
    killed = 0
    rng = random.Random(5)
    positions = sorted(rng.sample(range(120), rounds(15)))
    for n_calls in positions:
        where = {"kind": "local", "path": str(tmp_path / f"{n_calls}.zarr")}
        writers.log.unlink(missing_ok=True)
        ended = writers.wait(writers.start(where, stop_at=n_calls, **flushes))
        assert ended in (0, -signal.SIGKILL)
        killed += ended != 0
        told = writers.told()
        store = ShardingStore(where["path"])
        n = check_frames(store)
        assert told <= n <= 17
        assert writers.wait(writers.start(where, **flushes)) == 0
        assert check_frames(LocalStore(where["path"])) == n + 17
        found = check_store(where["path"], level="decode").findings
        assert [f for f in found if f.severity == "error"] == []
        if ended == 0:
            break
    assert killed > len(positions) // 3


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield {**where, "prefix": "streams"}


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("kind", ["local", "s3"])
def test_another_process_follows(
    kind: str, writers: Writers, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It opens the array again and again, and sees no wrong and no missing frame, and never fewer
    than before, or than were told durable; the writer is killed, and another one continues."""
    where = {"kind": "local", "path": str(tmp_path / "a.zarr")}
    if kind == "s3":
        where = request.getfixturevalue("s3")
    store = ShardingStore(open_store(where))
    n = 0
    limit = time.monotonic() + MAX_SECONDS
    for round_ in range(3):
        writer = writers.start(where, 10**6, flush_s=0.02, pause_s=0.002)
        goal = n + 60
        n_grown = 0
        while n < goal or n_grown < 3:
            assert time.monotonic() < limit
            told = writers.told()
            found = check_frames(store, max(0, n - 20))
            assert found >= max(n, told)
            n_grown += found > n
            n = found
        writers.kill(writer)
        n = check_frames(store)
        assert n >= writers.told(), round_
    assert check_frames(open_store(where)) == check_frames(store)


def test_a_second_writer_is_refused(writers: Writers, tmp_path: Path) -> None:
    """Of another process, as long as the first one lives; its frames are not disturbed."""
    where = {"kind": "local", "path": str(tmp_path / "a.zarr")}
    writer = writers.start(where, 10**6, flush_s=0.02, pause_s=0.01)
    limit = time.monotonic() + MAX_SECONDS
    while not writers.told():
        assert time.monotonic() < limit
        time.sleep(0.01)
    store = ShardingStore(where["path"])
    with pytest.raises(ShardConflictError, match="are appended to 'g/run' already"):
        store.append_frames("g/run")
    writers.kill(writer)
    with store.append_frames("g/run") as continued:
        n = continued.n_durable
        continued.append(frame(n))
    assert check_frames(store) == n + 1
    assert continued.n_durable == n + 1


def test_frames_survive_a_loss_of_power(tmp_path: Path) -> None:
    """With ``durability="power"`` all that was written is synced before the document gets its name:
    no document is longer than what a loss of power leaves."""
    unsynced: set[str] = set()
    documents: list[set[str]] = []

    def wrap(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            if name == "write_at" and not path_of(args[0]).endswith("__journal"):
                unsynced.add(path_of(args[0]))
            elif name == "sync":
                unsynced.discard(path_of(args[0]))
            elif name == "replace" and str(args[1]).endswith("zarr.json"):
                documents.append(set(unsynced))
            return call(*args, **options)

        return run

    store = ShardingStore(tmp_path, (2, 1, 2), durability="power")
    with system_calls(wrap), store.append_frames("g/run", chunks=(3, 4, 3)) as writer:
        for i in range(9):
            writer.append(frame(i))
            writer.flush()
    assert len(documents) >= 9
    assert set().union(*documents) == set()
    assert check_frames(store) == 9
