"""Shards change while their indexes are remembered: no read ever gives a wrong byte.

Each change is made behind the back of the store that reads, as by another process; some keep the
size, and set the time of the last change back. What is read is the value before or after it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from zarr.core.buffer import default_buffer_prototype

from tests.support.kit import forget, tuned
from tests.support.shard_bytes import build_shard
from zarr_shardstore import ShardingMapping, ShardingStore, set_index_cache_nbytes

PROTOTYPE = default_buffer_prototype()
N = 8
SHARD = "data/root/a/c0"
Values = Mapping[int, bytes]


def key(i: int) -> str:
    return f"data/root/a/c{i}"


OLD: Values = {i: b"%d old" % i for i in range(N)}
NEW: Values = {i: b"%d new" % i for i in range(N)}


def shard_of(values: Values) -> bytes:
    return build_shard(values, N, checksum=False)


def shuffled(values: Values) -> bytes:
    """The same size as `shard_of`, every entry in another place."""
    whole = bytearray()
    fields = b""
    places = {}
    for i in reversed(range(N)):
        places[i] = (len(whole), len(values[i]))
        whole += values[i]
    for i in range(N):
        offset, nbytes = places[i]
        fields += offset.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
    return bytes(whole) + fields


def replace(path: Path, data: bytes) -> None:
    """Another file takes the name, as every writer of zarr does it."""
    other = path.with_name("other.tmp")
    other.write_bytes(data)
    other.replace(path)


def replace_with_old_time(path: Path, data: bytes) -> None:
    status = path.stat()
    other = path.with_name("other.tmp")
    other.write_bytes(data)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def overwrite(path: Path, data: bytes) -> None:
    """Into the same file, which is not atomic; here nobody reads it meanwhile."""
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, 0)
    os.close(fd)


def overwrite_with_old_time(path: Path, data: bytes) -> None:
    status = path.stat()
    overwrite(path, data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def move_directory(path: Path, data: bytes) -> None:
    """The file that is open stays as it is, its directory has another name."""
    directory = path.parent
    other = directory.with_name("b")
    shutil.copytree(directory, other)
    (other / path.name).write_bytes(data)
    directory.rename(directory.with_name("gone"))
    other.rename(directory)


Change = Callable[[Path, bytes], None]
CHANGES: dict[str, Change] = {
    f.__name__: f
    for f in (
        replace,
        replace_with_old_time,
        overwrite,
        overwrite_with_old_time,
        move_directory,
    )
}


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    forget()
    yield
    forget()


def make(tmp_path: Path, data: bytes) -> Path:
    """A shard that is old enough to be remembered."""
    path = tmp_path / SHARD
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    time.sleep(0.03)
    return path


def blocking(store: ShardingStore, i: int) -> bytes | None:
    value = store.get_sync(key(i), prototype=PROTOTYPE)
    return None if value is None else value.to_bytes()


def in_a_task(store: ShardingStore, i: int) -> bytes | None:
    value = asyncio.run(store.get(key(i), PROTOTYPE))
    return None if value is None else value.to_bytes()


def of_many(store: ShardingStore, i: int) -> bytes | None:
    return ShardingMapping(store).get_partial_values([(key(i), (0, None))])[0]


Read = Callable[[ShardingStore, int], "bytes | None"]
READS: list[Read] = [blocking, in_a_task, of_many]


def warm_store(tmp_path: Path, read: Read) -> ShardingStore:
    """A store that answers from what it remembers; seen by its counts."""
    store = ShardingStore(tmp_path, chunks_per_shard=N)
    read(store, 0)
    before = store.stats()
    read(store, 1)
    assert store.stats().warm_reads == before.warm_reads + 1
    assert store.stats().index_requests == before.index_requests
    return store


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_between_reads(tmp_path: Path, change: Change, read: Read) -> None:
    """The same size, every entry elsewhere."""
    path = make(tmp_path, shard_of(OLD))
    store = warm_store(tmp_path, read)
    change(path, shuffled(NEW))
    assert {i: read(store, i) for i in range(N)} == NEW


@pytest.mark.parametrize("read", READS)
def test_that_would_be_wrong_without_a_look_at_the_file(tmp_path: Path, read: Read) -> None:
    """The checks of this file can fail: without validation they do."""
    path = make(tmp_path, shard_of(OLD))
    store = warm_store(tmp_path, read)
    seen: dict[Any, os.stat_result] = {}

    def stood_still(function: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def call(file: Any, *args: Any, **options: Any) -> os.stat_result:
            return seen.get(file) or seen.setdefault(file, function(file, *args, **options))

        return call

    with (
        mock.patch.object(os, "stat", stood_still(os.stat)),
        mock.patch.object(os, "fstat", stood_still(os.fstat)),
    ):
        assert {i: read(store, i) for i in range(N)} == OLD
        overwrite(path, shuffled(NEW))
        assert {i: read(store, i) for i in range(N)} != NEW


@pytest.mark.parametrize("at", ["before the bytes are read", "after the bytes are read"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("read", READS)
def test_changed_during_a_read(tmp_path: Path, change: Change, at: str, read: Read) -> None:
    """Between the look at what is known and the look at the file."""
    path = make(tmp_path, shard_of(OLD))
    store = warm_store(tmp_path, read)
    calls: dict[str, Callable[..., Any]] = {"pread": os.pread, "preadv": os.preadv}
    changed: list[None] = []

    def reading(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if changed:
                return calls[name](*args)
            changed.append(None)
            if at.startswith("before"):
                change(path, shuffled(NEW))
                return calls[name](*args)
            found = calls[name](*args)
            change(path, shuffled(NEW))
            return found

        return call

    with (
        mock.patch.object(os, "pread", reading("pread")),
        mock.patch.object(os, "preadv", reading("preadv")),
    ):
        value = read(store, 3)
    assert changed
    assert value in (OLD[3], NEW[3])
    assert {i: read(store, i) for i in range(N)} == NEW


@pytest.fixture(params=[10_000_000, 1_000_000_000, 2_000_000_000])
def coarse_clock(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file system whose clock ticks every 10 ms, as most did until 2025. Or every second, as HFS+
    and ext4 with inodes of 128 bytes; or every other one, as FAT."""

    def coarse(function: Callable[..., os.stat_result]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            status = function(*args, **options)
            names = [name for name in dir(status) if name.startswith("st_")]
            fields = {name: getattr(status, name) for name in names}
            for name in ("st_mtime_ns", "st_ctime_ns"):
                fields[name] -= fields[name] % request.param
            return SimpleNamespace(**fields)

        return call

    with (
        mock.patch.object(os, "stat", coarse(os.stat)),
        mock.patch.object(os, "fstat", coarse(os.fstat)),
    ):
        yield


def change_often(path: Path, store: ShardingStore, change: Change) -> tuple[int, int]:
    """Number of changes after which a wrong value was read, and of those in one tick."""
    n_wrong = n_same = 0
    for n in range(300):
        before = os.stat(path)
        values = {i: b"%d %03d" % (i, n) for i in range(N)}
        change(path, shuffled(values) if n % 2 else shard_of(values))
        n_same += before.st_mtime_ns == os.stat(path).st_mtime_ns
        n_wrong += {i: blocking(store, i) for i in range(N)} != values
    return n_wrong, n_same


@pytest.mark.usefixtures("coarse_clock")
@pytest.mark.parametrize("change", [replace, overwrite], ids=["replaced", "overwritten"])
def test_again_and_again_within_a_tick(tmp_path: Path, change: Change) -> None:
    """A file whose time is younger than the clock of the file system is fine."""
    path = make(tmp_path, shard_of(OLD))
    store = ShardingStore(tmp_path, chunks_per_shard=N)
    n_wrong, n_same = change_often(path, store, change)
    assert n_same
    assert not n_wrong


@pytest.mark.usefixtures("coarse_clock")
@pytest.mark.parametrize("coarse_clock", [10_000_000], indirect=True)
def test_a_young_file_would_be_taken_for_an_old_one(tmp_path: Path) -> None:
    """The check above can fail: if young files are remembered it does."""
    path = make(tmp_path, shard_of(OLD))
    store = ShardingStore(tmp_path, chunks_per_shard=N)
    with tuned(min_file_age_ns=-(10**18)):
        n_wrong, n_same = change_often(path, store, overwrite)
    assert n_same
    assert n_wrong


@pytest.mark.parametrize("read", READS)
def test_a_look_at_a_remembered_file_fails(tmp_path: Path, read: Read) -> None:
    """Then it is read as if nothing were known of it."""
    path = make(tmp_path, shard_of(OLD))
    store = warm_store(tmp_path, read)
    stat = os.stat
    failed: list[Any] = []

    def fail_once(of: Any, **options: Any) -> os.stat_result:
        if of == str(path) and not failed:
            failed.append(of)
            raise OSError(errno.EIO, "the disk fails")
        return stat(of, **options)

    with mock.patch.object(os, "stat", fail_once):
        assert read(store, 2) == OLD[2]
    assert failed


def test_deleted_and_written_anew(tmp_path: Path) -> None:
    """A shard that is gone holds nothing; its file is not kept from being removed."""
    path = make(tmp_path, shard_of(OLD))
    store = warm_store(tmp_path, blocking)
    path.unlink()
    assert blocking(store, 1) is None
    path.write_bytes(shuffled(NEW))
    assert blocking(store, 1) == NEW[1]
    shutil.rmtree(tmp_path / "data")
    assert blocking(store, 1) is None


SCRIPT = """
import sys
from zarr_shardstore import ShardingMapping
m = ShardingMapping(sys.argv[1], chunks_per_shard=8, strategy=sys.argv[2])
for line in sys.stdin:
    op, i, text = line.rstrip("\\n").split(",")
    if op == "set": m["data/root/a/c" + i] = text.encode()
    if op == "erase": m.erase("data/root/a/c" + i)
    if op == "flush": m.flush()
    if op == "compact": m.compact()
    print("done", flush=True)
"""


@pytest.mark.parametrize("strategy", ["append", "rewrite"])
def test_another_process_writes(tmp_path: Path, strategy: str) -> None:
    """It appends, overwrites, erases, seals and compacts; each value is seen at once."""
    m = ShardingMapping(tmp_path, chunks_per_shard=N)
    model: dict[str, bytes] = {}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), strategy],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def tell(op: str, i: int = 0, text: str = "") -> None:
            assert writer.stdin is not None
            assert writer.stdout is not None
            print(op, i, text, sep=",", file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "done\n"
            if op == "set":
                model[key(i)] = text.encode()
            if op == "erase":
                model.pop(key(i), None)
            for _ in range(2):
                assert {key(j): m.get(key(j)) for j in range(N)} == {
                    key(j): model.get(key(j)) for j in range(N)
                }

        for n in range(30):
            tell("set", n * 3 % N, f"{n:04}")
            if n % 5 == 4:
                tell("erase", n % N)
            if n % 7 == 6:
                time.sleep(0.03)  # now it may be remembered
                assert dict(m) == model
                tell("set", n % N, f"{n:04}")
            if n % 11 == 10:
                tell("flush")
                tell("compact")
        writer.stdin.close()


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    """In bytes, and in files that are open; what was let go of is read again."""
    n_shards = 300
    directory = tmp_path / "data/root/a"
    directory.mkdir(parents=True)
    for n in range(n_shards):
        values = {i: b"%05d" % (N * n + i) for i in range(N)}
        (directory / f"c{n}").write_bytes(shard_of(values))
    time.sleep(0.03)
    store = ShardingStore(tmp_path, chunks_per_shard=N)
    try:
        for _ in range(2):
            for i in range(N * n_shards):
                assert blocking(store, i) == b"%05d" % i
            open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in _open_fds()]
            assert sum(path.startswith(str(directory)) for path in open_files) <= 128
        assert n_remembered(store, n_shards) == n_shards
        set_index_cache_nbytes(100_000)
        assert 0 < n_remembered(store, n_shards) < n_shards
        assert blocking(store, 0) == b"00000"
        set_index_cache_nbytes(0)
        assert n_remembered(store, n_shards) == 0
        assert blocking(store, 1) == b"00001"
        assert n_remembered(store, n_shards) == 0
    finally:
        set_index_cache_nbytes(64 * 1024 * 1024)


def n_remembered(store: ShardingStore, n_shards: int) -> int:
    """How many of the shards that were read last are read without a request for the index."""
    for n in range(n_shards):
        before = store.stats().index_requests
        blocking(store, N * (n_shards - 1 - n))
        if store.stats().index_requests > before:
            return n
    return n_shards


def _open_fds() -> list[str]:
    try:
        return os.listdir("/proc/self/fd")
    except OSError:
        pytest.skip("this system does not tell which files are open")


def test_damage_is_found_by_the_whole_procedure(tmp_path: Path) -> None:
    """An entry that leaves its shard is no warm read; the error names it, others are read."""
    data = bytearray(shard_of(OLD))
    at = len(data) - 16 * N + 16 * 2
    data[at : at + 8] = (10**9).to_bytes(8, "little")
    make(tmp_path, bytes(data))
    store = warm_store(tmp_path, blocking)
    n_warm = store.stats().warm_reads
    with pytest.raises(Exception, match="c2"):
        blocking(store, 2)
    assert store.stats().warm_reads == n_warm
    assert blocking(store, 3) == OLD[3]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("n_reads", range(1, 4))
def test_one_call_reads_one_state(tmp_path: Path, change: Change, n_reads: int) -> None:
    """All chunks of a shard that one call asks for, wholes and parts, were there together."""
    path = make(tmp_path, shard_of(OLD))
    store = warm_store(tmp_path, blocking)
    m = ShardingMapping(store)
    n_left = [n_reads]
    pread = os.pread

    def read(*args: Any) -> bytes:
        n_left[0] -= 1
        if n_left[0] == 0:
            change(path, shuffled(NEW))
        return pread(*args)

    with mock.patch.object(os, "pread", read):
        values = m.get_partial_values(
            [(key(0), (0, None)), (key(5), (0, None)), (key(2), (1, None)), (key(7), (0, 3))]
        )
    before, after = ([which[0], which[5], which[2][1:], which[7][:3]] for which in (OLD, NEW))
    assert values in (before, after)
    assert n_left[0] <= 0


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_shard_that_is_read_at_one_go_is_of_one_state(tmp_path: Path, change: Change) -> None:
    """Most chunks of a shard come by one read, and are those before or after a change."""
    path = make(tmp_path, shard_of(OLD))
    store = warm_store(tmp_path, blocking)
    pread, n_reads = os.pread, 0

    def read(*args: Any) -> bytes:
        nonlocal n_reads
        n_reads += 1
        data = pread(*args)
        if n_reads == 2:
            change(path, shuffled(NEW))
        return data

    async def chunks() -> list[bytes]:
        values = await store.get_partial_values(PROTOTYPE, [(key(i), None) for i in range(1, N)])
        return [value.to_bytes() for value in values if value is not None]

    with mock.patch.object(os, "pread", read):
        assert asyncio.run(chunks()) == [OLD[i] for i in range(1, N)]
        assert n_reads == 1
        assert asyncio.run(chunks()) == [NEW[i] for i in range(1, N)]
