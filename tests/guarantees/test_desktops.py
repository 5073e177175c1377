"""Local files as on Windows and macOS: processes that lose the calls which these systems lack.

The tests of the second part run there only, and so does a part of the other tests. All tests of
local files run there by ``python -m tests.support.desktops windows`` (or ``macos``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.desktops import DESKTOP, main
from tests.support.kit import lock_shard, system_calls, tuned
from zarr_shardstore import ShardConflictError, ShardingMapping, ShardingStore, SpecError

HERE = "tests/guarantees/test_desktops.py"

SMALL = (
    HERE,
    "tests/guarantees/test_many_writers.py::test_local_files[8 processes-LocalStore-regions]",
    "tests/guarantees/test_concurrency.py::test_readers_see_old_or_new_never_a_mix[local-blocking]",
)
"""A part of the tests of local files."""

THERE = os.environ.get(DESKTOP)

on_windows = pytest.mark.skipif(THERE != "windows", reason="runs as on Windows")
on_macos = pytest.mark.skipif(THERE != "macos", reason="runs as on macOS")


@pytest.mark.thorough
@pytest.mark.skipif(THERE is not None, reason="starts the others")
@pytest.mark.parametrize("desktop", ["windows", "macos"])
def test_as_on(desktop: str, tmp_path: Path) -> None:
    """A part of the tests of local files passes."""
    assert main(desktop, ["-q", "-x", "--tb=short", f"--basetemp={tmp_path}/t", *SMALL]) == 0


# ------------------------------------------------------------------ as on Windows


def write_elsewhere(root: Path, how_it_ends: str) -> None:
    """Append to a shard in a process on Linux, which is killed."""
    script = f"""
import os, sys, numpy, zarr
from zarr_shardstore import ShardingStore
from tests.support.kit import system_calls
z = zarr.create_array(ShardingStore(sys.argv[1], chunks_per_shard=64, strategy="append"),
                      shape=64 * 4, chunks=4, dtype="i4", compressors=None, fill_value=-1)
for i in range(20):
    z[4 * i : 4 * i + 4] = i
{how_it_ends}
os._exit(0)
"""
    environment = {**os.environ, DESKTOP: "linux"}
    subprocess.run([sys.executable, "-c", script, str(root)], env=environment, check=True)


IN_THE_MIDDLE = """
journaled = []
def torn(name, call):
    def run(fd, pieces, offset):
        if "journal" in os.readlink(f"/proc/self/fd/{fd}"):
            journaled.append(fd)
        elif journaled:  # the index
            call(fd, [b"".join(pieces)[:9]], offset)
            os._exit(0)
        call(fd, pieces, offset)
    return run if name == "write_at" else call
with system_calls(torn):
    z[0:8] = 77
"""


@on_windows
@pytest.mark.parametrize("how_it_ends", ["", IN_THE_MIDDLE], ids=["open", "in a change"])
def test_shards_that_were_appended_to_elsewhere(how_it_ends: str, tmp_path: Path) -> None:
    """A shard with a gap and a journal is read as it is, and is whole after the next write."""
    write_elsewhere(tmp_path, how_it_ends)
    journal = tmp_path / "c/0.__journal"
    assert journal.exists()
    expected = np.full(256, -1, "i4")
    expected[:80] = np.repeat(np.arange(20), 4)
    z = zarr.open_array(ShardingStore(tmp_path, chunks_per_shard=64))
    for _ in range(2):
        np.testing.assert_array_equal(z[:], expected)
    assert journal.exists()  # reading changes nothing
    z[100:104] = expected[100:104] = 5
    np.testing.assert_array_equal(z[:], expected)
    np.testing.assert_array_equal(zarr.open_array(tmp_path, mode="r")[:], expected)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["0"]


@on_windows
def test_no_file_stays_open(tmp_path: Path) -> None:
    """Another process may replace every file between two calls."""
    z = zarr.create_array(
        ShardingStore(tmp_path, chunks_per_shard=4), shape=(16, 16), chunks=(1, 1), dtype="u1"
    )
    z[:] = 1
    time.sleep(2.2)  # indexes of younger files are not cached
    for _ in range(3):
        assert z[3, 3] == 1
        assert np.all(z[:] == 1)
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [name for name in names if name.startswith(str(tmp_path))] == []


def mapping_of_one_shard(root: Path, **options: Any) -> ShardingMapping:
    z = zarr.create_array(
        ShardingStore(root, chunks_per_shard=4), shape=(4,), chunks=(1,), dtype="u1"
    )
    z[:] = 1
    return ShardingMapping(root, chunks_per_shard=4, **options)


@on_windows
def test_a_write_waits_for_a_reader_of_its_file(tmp_path: Path) -> None:
    """Another program has the shard open for a moment."""
    m = mapping_of_one_shard(tmp_path)
    with open(tmp_path / "c/0", "rb") as file:
        closing = threading.Timer(0.3, file.close)
        closing.start()
        m["c/1"] = b"new"
        assert file.closed
    assert m["c/1"] == b"new"


@on_windows
def test_a_file_that_stays_open_fails_the_write_alone(tmp_path: Path) -> None:
    """The error names the file; the old value is there, and the next write works."""
    m = mapping_of_one_shard(tmp_path)
    old = m["c/1"]
    with open(tmp_path / "c/0", "rb"), tuned(busy_wait_s=0.1):
        with pytest.raises(PermissionError, match="open in a program") as caught:
            m["c/1"] = b"new"
        assert str(tmp_path / "c/0") in str(caught.value)
        with pytest.raises(PermissionError, match="open in a program"):
            m.erase_prefix("c/")
        assert m["c/1"] == old
    m["c/1"] = b"new"
    assert m["c/1"] == b"new"
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["0"]


@on_windows
def test_append_falls_back_and_says_so_once(tmp_path: Path) -> None:
    """Later stores of the process are silent; other reasons against it are errors as before."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name in "ab":
            store = ShardingStore(tmp_path / name, chunks_per_shard=4, strategy="append")
            z = zarr.create_array(store, shape=(8,), chunks=(1,), dtype="u1")
            z[2] = 3
            assert (z[2], z[3]) == (3, 0)
    assert len([w for w in said if "strategy='append'" in str(w.message)]) <= 1
    with pytest.raises(SpecError, match="append"):
        ShardingStore(tmp_path, chunks_per_shard=4, strategy="append", locking="lockfile")


@on_windows
@pytest.mark.parametrize("name", ["nul", "a/COM1.x", "a:b", "a.", "a /b", "a\\b", "what?"])
def test_names_of_devices_and_of_other_files(name: str, tmp_path: Path) -> None:
    """Windows would drop the bytes, or store them under another name."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    with pytest.raises(SpecError, match="Windows"):
        m[f"{name}/zarr.json"] = b"{}"
    assert m.get(f"{name}/zarr.json") is None
    m["nullable/com/zarr.json.bak"] = b"{}"
    assert [*m.list_prefix("nul")] == [*m] == ["nullable/com/zarr.json.bak"]


# -------------------------------------------------------------------- as on macOS


@on_macos
def test_commits_take_flock(tmp_path: Path) -> None:
    """The lock of another process, as tensorstore takes it there, keeps a commit out."""
    import fcntl

    m = mapping_of_one_shard(tmp_path)
    with open(tmp_path / "c/0.__lock", "wb") as file, tuned(lock_wait_s=0.1):
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ShardConflictError):
            m["c/1"] = b"new"
    m["c/1"] = b"new"
    with (
        lock_shard(tmp_path / "c/0"),
        open(tmp_path / "c/0.__lock", "rb") as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@on_macos
def test_power_means_the_cache_of_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sync of a durable write is a full one."""
    import fcntl

    commands: list[int] = []
    n_syncs = 0
    call = fcntl.fcntl

    def recorded(fd: int, command: int, *rest: Any) -> Any:
        commands.append(command)
        return call(fd, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", recorded)

    def counted(name: str, real: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal n_syncs
            n_syncs += name == "sync"
            return real(*args, **options)

        return run

    m = mapping_of_one_shard(tmp_path, durability="power")
    with system_calls(counted):
        m["c/1"] = b"new"
    full_sync: int = fcntl.F_FULLFSYNC  # type: ignore[attr-defined]
    assert commands.count(full_sync) == n_syncs > 1
