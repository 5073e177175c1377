"""Processes that convert are killed, at many moments: the next run finishes, nothing is lost.

``ZARR_SHARDSTORE_KILLS`` is the number of kills on local files; there are fewer on S3.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from tests.support import convert_once
from tests.support.bases import put
from tests.support.kit import objects_of
from tests.support.processes import MAX_SECONDS, child, s3_server
from tests.support.rounds import rounds
from tests.support.stops import empty_directories, files_in, write_files
from zarr_shardstore import ShardConflictError, ShardingStore, UnfinishedConversionError

N_KILLS = int(os.environ.get("ZARR_SHARDSTORE_KILLS", rounds(24)))
N_KILLS_ON_S3 = max(2, N_KILLS * 2 // 7)

Objects = dict[str, bytes]
PATH = "g/z"
COMMANDS = ("shard", "unshard", "reshard")
MOMENTS = ("any", "staging", "removing", "moving")


def _options(command: str, cps: tuple[int, int]) -> dict[str, Any]:
    if command == "unshard":
        return {}
    return {"chunks_per_shard": cps if command == "shard" else cps[::-1]}


# ---------------------------------------------------------------------- processes


def seconds_of(request: dict[str, Any]) -> float:
    """How long a whole conversion takes."""
    with child(request) as process:
        begun = time.monotonic()
        out, err = process.communicate(timeout=MAX_SECONDS)
        assert out.startswith("done"), err
        return time.monotonic() - begun


def kill_at(
    process: subprocess.Popen[str], moment: str, state: Callable[[], str], delay: float
) -> str:
    """Kill a process, some time after it has begun, or after it came to a state; where it was."""
    limit = time.monotonic() + MAX_SECONDS
    while moment != "any" and process.poll() is None and state() != moment:
        assert time.monotonic() < limit
        time.sleep(0.0005)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait(MAX_SECONDS)
    if process.returncode == 0:
        return "done"
    assert process.returncode == -signal.SIGKILL, process.communicate()[1]
    return state()


# -------------------------------------------------------------------------- checks


def create(base: Any, shape: tuple[int, int]) -> Any:
    """An array of chunks of 1 to 400 bytes, a third of them missing, and its values."""
    rng = np.random.default_rng(1)
    values = rng.integers(1, 5, shape).astype("u1")
    zarr.create_group(base)
    z = zarr.create_array(
        base, name=PATH, shape=shape, chunks=(7, 9), dtype="u1", fill_value=0, compressors=None
    )
    for i in range(0, shape[0], 7):
        for j in range(0, shape[1], 9):
            if rng.random() < 1 / 3:
                values[i : i + 7, j : j + 9] = 0
    z[:] = values
    return values


def check_readers(base: Any, values: Any) -> None:
    """Right values, or an error that says why not."""
    for store in (base, ShardingStore(base)):
        try:
            found = zarr.open_array(store, path=PATH, mode="r")[:]
        except UnfinishedConversionError:
            continue
        except Exception as error:
            assert store is base
            assert "zarr_shardstore" in str(error)  # noqa: PT017
            continue
        np.testing.assert_array_equal(found, values)


def state_in(manifests: list[bytes]) -> str:
    """What the manifest says, if there is one that is whole."""
    try:
        return str(json.loads(manifests[0])["state"])
    except (IndexError, ValueError):
        return "no manifest"


# --------------------------------------------------------------------------- local


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Objects before each command, after it, and how long it takes."""
    root = tmp_path_factory.mktemp("killed")
    values = create(LocalStore(root), (210, 225))
    plain = files_in(root)
    shards = _after(root, "shard")
    before = {"shard": plain, "unshard": shards, "reshard": shards}
    cases = {}
    for command in COMMANDS:
        _write(root, before[command])
        after = _after(root, command)
        _write(root, before[command])
        cases[command] = before[command], after, seconds_of(_local_request(root, command))
        assert files_in(root) == after
    yield root, values, cases
    shutil.rmtree(root, ignore_errors=True)


def _write(root: Path, objects: Objects) -> None:
    shutil.rmtree(root, ignore_errors=True)
    write_files(root, objects)


def _local_request(root: Path, command: str) -> dict[str, Any]:
    return {
        "base": {"kind": "local", "path": str(root)},
        "command": command,
        "options": _options(command, (4, 5)),
    }


def _after(root: Path, command: str) -> Objects:
    convert_once.convert(command, LocalStore(root), **_options(command, (4, 5)))
    return files_in(root)


def _local_state(root: Path) -> str:
    paths = root.glob(".zarr_shardstore/*/manifest.json")
    return state_in([path.read_bytes() for path in paths if path.exists()])


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_local_files(command: str, local: Any) -> None:
    """Killed anywhere, also twice, also while values are removed or moved: readers see no wrong
    value, and the next run makes, byte by byte, what an uninterrupted one makes."""
    root, values, cases = local
    before, after, seconds = cases[command]
    rng = random.Random(command)
    states: Counter[str] = Counter()
    n_kills = max(len(MOMENTS), N_KILLS // len(COMMANDS))
    while states.total() - states["done"] < n_kills:
        _write(root, before)
        for _ in range(rng.choice((1, 1, 2))):
            moment = MOMENTS[states.total() % len(MOMENTS)]
            request = _local_request(root, command)
            # Slow, so that this process sees what state it is in.
            request["slow"] = 0.0 if moment == "any" else 0.0005
            delay = rng.uniform(0, seconds if moment == "any" else 0.03)
            with child(request) as process:
                states[kill_at(process, moment, lambda: _local_state(root), delay)] += 1
            check_readers(LocalStore(root), values)
        assert _after(root, command) == after
        assert empty_directories(root) == []
    print(command, dict(states))
    assert states["staging"]
    assert states["removing"]
    assert states["moving"]


def test_a_second_conversion_is_refused(local: Any) -> None:
    """While one process converts a store in place another is refused, and changes nothing; the
    lock ends with the process."""
    root, values, cases = local
    before, after, _ = cases["shard"]
    _write(root, before)
    with child(_local_request(root, "shard") | {"slow": 0.02}) as process:
        while _local_state(root) == "no manifest":
            assert process.poll() is None
        for command in COMMANDS:
            with pytest.raises(ShardConflictError, match="goes on already"):
                _after(root, command)
        process.send_signal(signal.SIGSTOP)  # nothing but the second one may change files now
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # a thread may end a call of the system yet
        files = files_in(root)
        with pytest.raises(ShardConflictError, match="goes on already"):
            _after(root, "shard")
        assert files_in(root) == files
        process.kill()
        process.wait(MAX_SECONDS)
    check_readers(LocalStore(root), values)
    assert _after(root, "shard") == after
    assert empty_directories(root) == []


# ------------------------------------------------------------------------------ S3


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield where


@pytest.mark.thorough
def test_s3(s3: dict[str, Any]) -> None:
    """The same on an object store, where nothing is moved at once and nothing is locked."""
    rng = random.Random("s3")
    states: Counter[str] = Counter()
    cases: dict[str, tuple[Objects, Objects, float]] = {}
    shape = (42, 54)
    prefixes = iter(range(10_000))

    def fresh(objects: Objects) -> tuple[dict[str, Any], Any]:
        where = s3 | {"prefix": f"{next(prefixes)}"}
        base = convert_once.open_store(where)
        for key, value in objects.items():
            put(base, key, value)
        return where, base

    def request_for(where: dict[str, Any], command: str) -> dict[str, Any]:
        return {"base": where, "command": command, "options": _options(command, (2, 3))}

    where, base = fresh({})
    values = create(base, shape)
    plain = objects_of(base)
    convert_once.convert("shard", base, **_options("shard", (2, 3)))
    shards = objects_of(base)
    for command in COMMANDS:
        before = plain if command == "shard" else shards
        where, base = fresh(before)
        seconds = seconds_of(request_for(where, command))
        cases[command] = before, objects_of(base), seconds
    assert cases["unshard"][1].keys() == plain.keys()

    while states.total() - states["done"] < N_KILLS_ON_S3:
        command = COMMANDS[states.total() // len(MOMENTS) % len(COMMANDS)]
        before, after, seconds = cases[command]
        where, base = fresh(before)
        store = base

        def state(store: Any = store) -> str:
            found = objects_below(store, ".zarr_shardstore/", "/manifest.json")
            return state_in(list(found.values()))

        moment = MOMENTS[states.total() % len(MOMENTS)]
        delay = rng.uniform(0, seconds if moment == "any" else 0.05)
        with child(request_for(where, command)) as process:
            states[kill_at(process, moment, state, delay)] += 1
        check_readers(base, values)
        convert_once.convert(command, base, **_options(command, (2, 3)))
        assert objects_of(base) == after
    print(dict(states))


def objects_below(base: Any, prefix: str, suffix: str) -> Objects:
    """Objects with keys that begin and end so."""
    import obstore

    found = {}
    for batch in obstore.list(base.store, prefix):
        for meta in batch:
            if meta["path"].endswith(suffix):
                try:
                    found[meta["path"]] = obstore.get(base.store, meta["path"]).bytes().to_bytes()
                except FileNotFoundError:
                    continue
    return found
