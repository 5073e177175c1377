"""`check_store` beside writers: a live one is never accused, and a killed one leaves findings."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
from zarr.storage import ObjectStore

import zarr_shardstore
from tests.support.kit import CountingStore, tuned
from zarr_shardstore import (
    Progress,
    ShardingMapping,
    ShardingStore,
    SpecError,
    check_store,
    repair_store,
    reshard,
)

_WRITER = """
import sys, time, numpy as np, zarr
from zarr_shardstore import ShardingStore
path, strategy, is_busy = sys.argv[1:]
store = ShardingStore(path, chunks_per_shard=(4, 4), strategy=strategy)
z = zarr.open_array(store, path="a", mode="r+")
rng = np.random.default_rng()
z[0, 0] = 1
print("ready", flush=True)
while True:
    if is_busy == "busy":
        i, j = rng.integers(0, 8, 2)
        z[8 * i : 8 * i + 8, 8 * j : 8 * j + 8] = rng.integers(0, 99, (8, 8))
    else:
        time.sleep(1)
"""


def make(base: Any, **options: Any) -> Any:
    store = ShardingStore(base, chunks_per_shard=(4, 4), **options)
    array = zarr.create_array(store, name="a", shape=(64, 64), chunks=(8, 8), dtype="u2")
    array[:] = np.arange(64 * 64).reshape(64, 64)
    ShardingMapping(base).flush()
    return array


@contextmanager
def writer(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    root = str(Path(zarr_shardstore.__file__).parents[1])
    command = [sys.executable, "-c", _WRITER, str(path), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": root}
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("strategy", ["append", "rewrite"])
def test_a_writer_of_another_process_is_never_accused(strategy: str, tmp_path: Path) -> None:
    """While it writes, at every level."""
    make(tmp_path)
    with writer(tmp_path, strategy, "busy"):
        deadline = time.monotonic() + 2
        n_used = 0
        while time.monotonic() < deadline:
            for level in ("index", "entries", "decode"):
                report = check_store(tmp_path, level=level)
                assert {found.kind for found in report.findings} <= {"in_use"}
                n_used += len(report.findings)
                assert report.n_chunks == 64
    assert n_used or strategy == "rewrite", "journals were there"


def replace_arrays(path: Path, how: str) -> None:
    """What another program does to all arrays."""
    if how == "reshard":
        reshard(path, 4)
        return
    options: Any = {"compressors": None} if how == "other codecs" else {}
    for i in range(N_ARRAYS):
        if how == "removed":
            shutil.rmtree(path / f"{i}/a")
            continue
        chunks_per_shard = 4 if how in ("other shards", "unknown") else 2
        store = ShardingStore(path, chunks_per_shard)
        options |= {"shape": (32,), "chunks": (1,), "dtype": "u2", "overwrite": True}
        zarr.create_array(store, name=f"{i}/a", **options)[:] = 3
        if how == "unknown":
            (path / f"{i}/a/zarr.json").write_text('{"node_type": "array", "zarr_format": 3}')


N_ARRAYS = 20


@pytest.mark.parametrize(
    "how", ["same", "other shards", "other codecs", "reshard", "removed", "unknown"]
)
def test_a_program_that_replaces_arrays_is_never_accused(how: str, tmp_path: Path) -> None:
    """The check has read their documents before."""
    store = ShardingStore(tmp_path, 2)
    for i in range(N_ARRAYS):
        options: Any = {"shape": (64,), "chunks": (1,), "dtype": "u2"}
        zarr.create_array(store, name=f"{i}/a", **options)[:] = 7
    store.close()
    done: list[Progress] = []

    def step(progress: Progress) -> None:
        if not done:
            replace_arrays(tmp_path, how)
        done.append(progress)

    report = check_store(tmp_path, level="decode", progress=step)
    assert {found.kind for found in report.findings} == ({"in_use"} if how == "unknown" else set())
    assert len(done) > 1


def test_a_killed_writer_leaves_findings(tmp_path: Path) -> None:
    """While it rests with an open journal, that is in use; after a kill it is a remain."""
    make(tmp_path)
    with writer(tmp_path, "append", "resting") as process:
        report = check_store(tmp_path)
        assert report.is_clean
        assert {found.key for found in report.findings} == {
            "a/c/0/0.__journal",
            "a/c/0/0.__lock",
        }
        process.send_signal(signal.SIGKILL)
        process.wait()
        report = check_store(tmp_path)
    assert [(found.kind, found.severity) for found in report.findings] == [
        ("journal", "warning"),
        ("lock_file", "warning"),
    ]
    ShardingMapping(tmp_path).compact()
    assert check_store(tmp_path).findings == ()


def test_objects_in_a_cloud() -> None:
    """The same findings, by versions and sizes that come with the bytes."""
    base = ObjectStore(obstore.store.MemoryStore())
    make(base)
    ShardingMapping(base).consolidate_index("a")
    assert check_store(base, level="decode").findings == ()
    data = bytes(base.store.get("a/c/1/1").bytes())
    base.store.put("a/c/1/1", data[:-1])
    found = [(f.kind, f.key) for f in check_store(base).findings]
    assert found == [("index_checksum", "a/c/1/1")]
    base.store.put("a/c/1/1", b"\x00" + data[1:])
    kinds = {found.kind for found in check_store(base, level="decode").findings}
    assert kinds == {"consolidated_index", "chunk_undecodable"}


def test_processes_find_the_same(tmp_path: Path) -> None:
    """Tasks are picklable; a store in memory is refused."""
    make(tmp_path)
    path = tmp_path / "a/c/1/0"
    path.write_bytes(path.read_bytes()[:-1])
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        reports = [check_store(tmp_path, level="decode", executor=e) for e in (None, executor)]
        with pytest.raises(SpecError, match="in the memory of this process"):
            check_store({}, executor=executor)
    assert reports[0].findings == reports[1].findings
    assert [report.n_chunks for report in reports] == [48, 48]
    assert json.dumps(reports[0].as_dict())


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    """It comes from the progress; no task is left behind, and nothing was written."""
    make(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_store(tmp_path, level="decode", progress=stop)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert check_store(tmp_path, level="decode").findings == ()


def test_an_interrupted_check_continues(tmp_path: Path) -> None:
    """With notes: what was read is not read again, what was found is found; a torn line is none."""
    base = CountingStore()
    make(base)
    for key in ("a/c/0/0", "a/c/1/1"):
        base._store_dict[key] = base._store_dict[key][:-1]
    whole = check_store(base, level="decode")
    notes = tmp_path / "notes"

    def stop(step: Progress) -> None:
        if step.n_tasks_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_store(base, level="decode", progress=stop, notes=notes)
    with notes.open("ab") as file:
        file.write(b'{"task": "torn')
    base.forget()
    report = check_store(base, level="decode", notes=notes)
    assert report.findings == whole.findings
    assert (report.n_chunks, report.n_bytes) == (whole.n_chunks, whole.n_bytes)
    assert len({key for key, _ in base.reads if key.startswith("a/c/")}) <= 1
    assert not notes.exists()
    notes.write_text("{}\n")
    with pytest.raises(SpecError, match="of another check"):
        check_store(base, level="decode", notes=notes)
    make(tmp_path / "s")
    with pytest.raises(SpecError, match="lie in the store"):
        check_store(tmp_path / "s", notes=tmp_path / "s/notes")


def test_a_repair_takes_the_locks_of_the_store(tmp_path: Path) -> None:
    """A lock of the system excludes no writer with lock files: the repair waits for its file."""
    make(tmp_path, locking="lockfile")
    store = ShardingStore(tmp_path, locking="lockfile")
    path = tmp_path / "a/c/0/0"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = check_store(store)
    (tmp_path / "a/c/0/0.__lock").write_bytes(b"")
    with tuned(lock_wait_s=0.3):
        for checked in (report, check_store(store), pickle.loads(pickle.dumps(report))):
            actions = repair_store(checked, dry_run=False).actions
            assert {action.did for action in actions} == {"left"}
    assert sorted(action.key for action in actions) == ["a/c/0/0"]
    (tmp_path / "a/c/0/0.__lock").unlink()
    assert [a.did for a in repair_store(report, dry_run=False).actions] == ["rewritten"]


# ------------------------------------------------------------------------ writers of frames

_STREAM = """
import sys, time, numpy as np
from zarr_shardstore import ShardingStore
store = ShardingStore(sys.argv[1], chunks_per_shard=(1, 1), durability=sys.argv[2])
with store.append_frames("a", flush_s=0.003, chunks=(1, 8), dtype="u4") as frames:
    n, end = 0, time.monotonic() + 3
    while time.monotonic() < end:
        n += 1
        frames.append(np.full(8, n, "u4"))
        time.sleep(0.01)
print(n)
"""


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_live_stream_is_never_accused(durability: str, tmp_path: Path) -> None:
    """Its frames come before the shape. A repair of each check leaves every frame."""
    root = str(Path(zarr_shardstore.__file__).parents[1])
    command = [sys.executable, "-c", _STREAM, str(tmp_path), durability]
    stream = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": root})
    with stream as process:
        while not (tmp_path / "a/c").exists():
            assert process.poll() is None or (tmp_path / "a/c").exists()
            time.sleep(0.01)
        while process.poll() is None:
            report = check_store(tmp_path)
            assert {found.kind for found in report.findings} <= {"in_use"}
            assert repair_store(report, dry_run=False).quarantine == ""
        assert process.stdout is not None
        n = int(process.stdout.read())
    values: Any = zarr.open_array(ShardingStore(tmp_path), path="a", mode="r")[:, 0]
    assert values.tolist() == list(range(1, n + 1))


OUTSIDE = "a/c/5/0"


def frames_of(base: Any, n: int) -> None:
    """An array that ends after `n` frames, and a frame after its end that was stored long ago."""
    store = ShardingStore(base, chunks_per_shard=(1, 1))
    array = zarr.create_array(store, name="a", shape=(6, 8), chunks=(1, 8), dtype="u4")
    array[:] = 7
    store.close()
    documents = set_length(base, n)
    assert documents["shape"] == [n, 8]
    if isinstance(base, Path):
        os.utime(base / OUTSIDE, ns=(0, 10**18))


def set_length(base: Any, n: int) -> Any:
    key = "a/zarr.json"
    doc = json.loads((base / key).read_bytes() if isinstance(base, Path) else base[key])
    data = json.dumps({**doc, "shape": [n, 8]}).encode()
    if isinstance(base, Path):
        (base / key).write_bytes(data)
    else:
        base[key] = data
    return json.loads(data)


class GrowsMeanwhile(dict[str, bytes]):
    """A store with an array that grows while a repair stores an original."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key.endswith(f"{OUTSIDE}.original"):
            set_length(self, 6)


@pytest.mark.parametrize("where", ["local", "dict"])
def test_an_array_that_has_grown_since_its_check(where: str, tmp_path: Path) -> None:
    """Before the repair, or while it stores the original: it removes no object of the array."""
    base: Any = tmp_path if where == "local" else GrowsMeanwhile()
    frames_of(base, 5)
    report = check_store(base)
    assert [found.kind for found in report.findings] == ["outside_grid"]
    set_length(base, 6)
    assert [a.did for a in repair_store(report, dry_run=False).actions] == ["left"]
    set_length(base, 5)
    actions = repair_store(report, dry_run=False).actions
    assert [a.did for a in actions] == ["removed" if where == "local" else "left"]
    values: Any = zarr.open_array(ShardingStore(base), path="a", mode="r")[:]
    assert (values == 7).all()


@pytest.mark.parametrize("where", ["local", "dict"])
def test_a_writer_of_frames_stops_an_accusation(where: str, tmp_path: Path) -> None:
    """Also one that has begun since the check, and stores the same bytes."""
    base: Any = tmp_path if where == "local" else {}
    frames_of(base, 5)
    report = check_store(base)
    assert [found.kind for found in report.findings] == ["outside_grid"]
    with ShardingStore(base).append_frames("a"):
        assert [f.kind for f in check_store(base).findings if f.key == OUTSIDE] == ["in_use"]
        assert [a.did for a in repair_store(report, dry_run=False).actions] == ["left"]
    assert [a.did for a in repair_store(report, dry_run=False).actions] == ["removed"]


def test_a_young_file_is_not_accused(tmp_path: Path) -> None:
    """A writer without a lock may have stored it, and the shape not yet."""
    frames_of(tmp_path, 5)
    report = check_store(tmp_path)
    os.utime(tmp_path / OUTSIDE)
    assert [found.kind for found in check_store(tmp_path).findings] == ["in_use"]
    assert [a.did for a in repair_store(report, dry_run=False).actions] == ["left"]
