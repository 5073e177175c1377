"""Strategies that change shard files in their place: what is written, and what is left behind."""

from __future__ import annotations

import asyncio
import errno
import itertools
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, ShardingCodec
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from tests.faults.any_size import INDEX_CODECS, Location, declare
from tests.faults.stops import files_in
from tests.store.bases import forget_open_shards, temporary_directory
from zarr_shardstore import CorruptShardError, ShardingMapping, ShardingStore, SpecError, reshard
from zarr_shardstore.io import file_calls, locks
from zarr_shardstore.io import open_shards as open_shards_module
from zarr_shardstore.io.shard_files import FIXED
from zarr_shardstore.plan.strategies import WriteStrategy

ROOT = "data/root/a/c"
STRATEGIES_IN_PLACE: list[WriteStrategy] = ["in_place", "in_place", "append", "rewrite"]
INDEX_NBYTES = 8 * 16


def mapping(path: Path, strategy: Any = "append", n: int = 8) -> ShardingMapping:
    return ShardingMapping(path, chunks_per_shard=n, strategy=strategy)


def shard_of(path: Path) -> Path:
    return path / "data/root/a/c0"


def chunks(values: dict[int, bytes]) -> dict[str, bytes]:
    return {f"{ROOT}{i}": value for i, value in values.items()}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each write of a file."""
    sizes: list[int] = []
    write_at = file_calls.write_at

    def count(fd: int, pieces: Any, offset: int) -> None:
        sizes.append(sum(map(len, pieces)))
        write_at(fd, pieces, offset)

    with mock.patch.object(file_calls, "write_at", count):
        yield sizes


# ------------------------------------------------------------------ append


@pytest.mark.parametrize("n", [512, 32_768])
def test_a_write_costs_its_chunk(n: int, tmp_path: Path) -> None:
    """And some 80 bytes, at any size of the shard."""
    m = mapping(tmp_path, n=n)
    m[f"{ROOT}0"] = bytes(1000)
    with counted() as sizes:
        for i in range(1, 101):
            m[f"{ROOT}{i}"] = bytes(1000)
    assert sum(sizes) < 100 * 1100
    with counted() as sizes:
        m.erase(f"{ROOT}3")
    assert sum(sizes) < 100


def test_a_shard_is_sealed_when_it_is_full(tmp_path: Path) -> None:
    """Without a gap, a journal, a lock."""
    m = mapping(tmp_path)
    for i in range(8):
        assert bool(list(shard_of(tmp_path).parent.glob("*.__journal"))) == (i > 0)
        m[f"{ROOT}{i}"] = bytes([i]) * 1000
    assert list(files_in(tmp_path)) == ["data/root/a/c0"]
    assert shard_of(tmp_path).stat().st_size == 8 * 1000 + INDEX_NBYTES


def close(m: ShardingMapping) -> None:
    ShardingStore(m.base).close()


def flush_async(m: ShardingMapping) -> None:
    asyncio.run(ShardingStore(m.base).flush())


@pytest.mark.parametrize("seal", [ShardingMapping.flush, close, flush_async])
def test_flush_and_close_trim(seal: Any, tmp_path: Path) -> None:
    """Nothing is left beside the shard, and no gap in it."""
    m = mapping(tmp_path)
    m.update(chunks({1: b"1" * 1000}))
    m.update(chunks({2: b"2" * 1000}))
    assert len(files_in(tmp_path)) == 3
    seal(m)
    assert list(files_in(tmp_path)) == ["data/root/a/c0"]
    assert shard_of(tmp_path).stat().st_size == 2 * 1000 + INDEX_NBYTES
    m.update(chunks({3: b"3"}))
    assert dict(m) == chunks({1: b"1" * 1000, 2: b"2" * 1000, 3: b"3"})


CHILD = """
import sys, multiprocessing
from zarr_shardstore import ShardingMapping

def write(path):
    ShardingMapping(path, chunks_per_shard=8)["data/root/a/c1"] = b"1"

if __name__ == "__main__":
    if sys.argv[2] == "itself":
        write(sys.argv[1])
    else:
        child = multiprocessing.get_context(sys.argv[2]).Process(target=write, args=sys.argv[1:2])
        child.start()
        child.join(60)
"""


@pytest.mark.parametrize("how", ["itself", "fork", "spawn"])
def test_the_end_of_a_process_seals(how: str, tmp_path: Path) -> None:
    """Also that of a child of multiprocessing, which ends in another way."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    subprocess.run([sys.executable, script, tmp_path / "store", how], check=True, timeout=120)
    assert list(files_in(tmp_path / "store")) == ["data/root/a/c0"]


def test_a_child_does_not_seal_what_its_parent_writes(tmp_path: Path) -> None:
    """Neither does its end give up the parent's locks."""
    m = mapping(tmp_path)
    m.update(chunks({1: b"1"}))
    child = multiprocessing.get_context("fork").Process(target=list, args=(m,))
    child.start()
    child.join(60)
    assert len(files_in(tmp_path)) == 3
    m.update(chunks({2: b"2"}))
    assert dict(m) == chunks({1: b"1", 2: b"2"})


def test_dead_bytes_stay_bounded(tmp_path: Path) -> None:
    """A chunk that is overwritten again and again: the shard is compacted instead of growing."""
    m = mapping(tmp_path)
    m.update(chunks({i: bytes([i]) * 1000 for i in range(8)}))
    largest = 0
    for n in range(200):
        value = os.urandom(1000 + n)
        m[f"{ROOT}3"] = value
        largest = max(largest, shard_of(tmp_path).stat().st_blocks * 512)
    assert largest < 40_000
    assert m[f"{ROOT}3"] == value
    m.flush()
    assert shard_of(tmp_path).stat().st_size < 2 * 8200 + 2 * INDEX_NBYTES


def test_compact_leaves_no_dead_byte(tmp_path: Path) -> None:
    """And puts the entries in order."""
    m = mapping(tmp_path)
    for i in (5, 2, 7, 2):
        m[f"{ROOT}{i}"] = bytes([i]) * 10
    m.compact()
    parts = [bytes([i]) * 10 for i in (2, 5, 7)]
    assert shard_of(tmp_path).read_bytes()[:30] == b"".join(parts)
    assert shard_of(tmp_path).stat().st_size == 30 + INDEX_NBYTES


@pytest.mark.parametrize("base", [dict, MemoryStore])
def test_compact_on_other_base_stores(base: Any) -> None:
    """Shards with dead bytes that somebody else has made; a damaged one stops no other."""
    m = ShardingMapping(base(), chunks_per_shard=2)
    m.update(chunks({0: b"0", 2: b"22", 4: b"444"}))
    raw = ShardingMapping(m.base)
    compact = raw["data/root/a/c1"]
    raw["data/root/a/c0"] = b"x"
    raw["data/root/a/c1"] = compact[:2] + b"dead bytes" + compact[2:]
    raw["data/root/a/c2"] = b"yyy" + raw["data/root/a/c2"][3:]
    with pytest.raises(CorruptShardError, match="c0"):
        m.compact()
    assert raw["data/root/a/c1"] == compact
    assert m[f"{ROOT}4"] == b"yyy"


def test_many_shards_do_not_exhaust_files(tmp_path: Path) -> None:
    """Files are closed, and opened again; sealing finds all."""
    m = mapping(tmp_path, n=4)
    values = {i: bytes([i % 251]) for i in range(0, 4 * 400, 2)}
    order = list(values)
    random.Random(1).shuffle(order)
    before = len(os.listdir("/proc/self/fd"))
    for i in order:
        m[f"{ROOT}{i}"] = values[i]
        assert len(os.listdir("/proc/self/fd")) < before + 300
    assert dict(m) == chunks(values)
    m.flush()
    assert len(files_in(tmp_path)) == 400


@pytest.mark.parametrize("n_gone", [0, 64])
def test_shards_that_are_never_full_are_sealed_in_time(
    n_gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were opened first, so that not each keeps two more files beside it; one with
    each write, if only to see that it is gone."""
    forget_open_shards()  # those of other tests
    gone = mapping(tmp_path / "gone", n=4)
    gone.update({f"{ROOT}{i}": b"1" for i in range(0, 4 * n_gone, 4)})
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    monkeypatch.setattr(open_shards_module, "_MAX_UNSEALED", 8)
    m = mapping(tmp_path, n=4)
    n = 60 + n_gone
    values = {i: bytes([i % 256]) for i in range(0, 4 * n, 4)}
    for i, value in values.items():
        m[f"{ROOT}{i}"] = value
    n_left = 20 + n_gone
    deadline = time.monotonic() + 20
    while len(list(tmp_path.rglob("*.__journal"))) > n_left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(tmp_path.rglob("*.__journal"))) <= n_left
    assert dict(m) == chunks(values)
    m.flush()
    assert len(files_in(tmp_path)) == n


def test_a_damaged_chunk_blocks_no_other(tmp_path: Path) -> None:
    """What is written beside it is stored; compaction leaves the shard as it is."""
    m = mapping(tmp_path, "rewrite")
    m.update(chunks({0: b"0", 1: b"1"}))
    shard = shard_of(tmp_path)
    data = bytearray(shard.read_bytes())
    data[-INDEX_NBYTES : -INDEX_NBYTES + 8] = (2**40).to_bytes(8, "little")
    shard.write_bytes(data)
    m = mapping(tmp_path)
    for i in range(2, 6):
        m[f"{ROOT}{i}"] = bytes([i]) * 500
    m.flush()
    assert [m[f"{ROOT}{i}"] for i in range(1, 6)] == [
        b"1",
        *(bytes([i]) * 500 for i in range(2, 6)),
    ]
    with pytest.raises(CorruptShardError):
        m[f"{ROOT}0"]
    m[f"{ROOT}0"] = b"again"
    m.compact()
    assert m[f"{ROOT}0"] == b"again"


def test_conversions_of_shards_that_are_open(tmp_path: Path) -> None:
    """They are sealed first; what this process had open is then another file."""
    store = ShardingStore(tmp_path, chunks_per_shard=(8,))
    z = zarr.create_array(store, shape=(32,), chunks=(2,), dtype="u2")
    z[:11] = np.arange(1, 12)
    assert [key for key in files_in(tmp_path) if key.endswith("__journal")]
    reshard(tmp_path, chunks_per_shard=4)
    assert sorted(files_in(tmp_path)) == ["c/0", "c/1", "zarr.json"]
    z = zarr.open_array(ShardingStore(tmp_path), mode="r+")
    z[11] = 12
    ShardingMapping(tmp_path).flush()
    np.testing.assert_array_equal(z[:13], [*range(1, 13), 0])
    native: Any = zarr.open_array(LocalStore(tmp_path), mode="r")[:13]
    np.testing.assert_array_equal(native, [*range(1, 13), 0])


def test_a_deleted_directory_is_not_made_again(tmp_path: Path) -> None:
    """Neither by flush nor by the end of the process."""
    m = mapping(tmp_path)
    m.update(chunks({1: b"1"}))
    m.erase_prefix("data/")
    m.flush()
    assert not (tmp_path / "data").exists()


def test_a_directory_that_others_made_anew_is_theirs(tmp_path: Path) -> None:
    """What this process has open is the files that were there before."""
    m = mapping(tmp_path / "here")
    m.update(chunks({0: b"old", 1: b"old"}))
    shutil.rmtree(tmp_path / "here/data")
    other = mapping(tmp_path / "there")
    other.update(chunks({0: b"new"}))
    other.flush()
    shutil.copytree(tmp_path / "there/data", tmp_path / "here/data")
    m[f"{ROOT}2"] = b"mine"
    assert dict(m) == chunks({0: b"new", 2: b"mine"})


@pytest.mark.parametrize("nth", range(1, 5))
def test_flush_seals_also_after_a_write_that_failed(nth: int, tmp_path: Path) -> None:
    """It was taken back, or finished, which changed the file once more."""
    declare(tmp_path, "z", 4, 4, checksum="crc32c")
    m = ShardingMapping(tmp_path)
    m.update({"z/c/0": b"0" * 30, "z/c/1": b"1" * 30})
    m["z/c/0"] = b"new" * 11
    write_at, n_calls = file_calls.write_at, itertools.count(1)

    def fail(fd: int, pieces: Any, offset: int) -> None:
        n = next(n_calls)
        if n == nth:
            raise OSError(errno.ENOSPC, "no room")
        write_at(fd, pieces, offset)

    with mock.patch.object(file_calls, "write_at", fail), pytest.raises(OSError, match="no room"):
        m["z/c/2"] = b"2" * 30
    m.flush()
    assert sorted(files_in(tmp_path)) == ["z/c/0", "z/zarr.json"]
    assert (m["z/c/0"], m["z/c/1"]) == (b"new" * 11, b"1" * 30)
    assert m.get("z/c/2") in (None, b"2" * 30)


def test_flush_leaves_an_array_alone_that_others_made_anew(tmp_path: Path) -> None:
    """It has other shards, and without a checksum nothing in them says so."""
    store = ShardingStore(tmp_path, chunks_per_shard=2, index_codecs=["bytes"])
    z = zarr.create_array(store, shape=(6,), chunks=(1,), dtype="u1", compressors=None)
    z[0] = 1
    codec = ShardingCodec(
        chunk_shape=(1,), codecs=[BytesCodec()], index_codecs=[BytesCodec(endian="little")]
    )
    new: Any = zarr.create_array(
        tmp_path,
        shape=(9,),
        chunks=(8,),
        dtype="u1",
        compressors=None,
        serializer=codec,
        overwrite=True,
    )
    data = np.arange(1, 10, dtype="u1")
    new[:] = data
    for _ in range(2):
        ShardingMapping(store).flush()
        np.testing.assert_array_equal(zarr.open_array(tmp_path, mode="r")[:], data)


# ---------------------------------------------------------------- in place


def test_entries_of_one_size_have_slots(tmp_path: Path) -> None:
    """Where a chunk will be is known before it is written, and writing it moves nothing."""
    m = mapping(tmp_path, "in_place")
    for i in (6, 1):
        m[f"{ROOT}{i}"] = bytes([i]) * 1000
    shard = shard_of(tmp_path)
    size = shard.stat().st_size
    assert size == 8 * 1000 + INDEX_NBYTES
    assert shard.read_bytes()[6000:7000] == bytes([6]) * 1000
    inode = shard.stat().st_ino
    for value in (b"x" * 1000, b"y" * 400, b"z" * 1000):
        m[f"{ROOT}1"] = value
        assert shard.read_bytes()[1000 : 1000 + len(value)] == value
    m.erase(f"{ROOT}6")
    m[f"{ROOT}7"] = b"7" * 1000
    m.flush()
    assert (shard.stat().st_size, shard.stat().st_ino) == (size, inode)
    assert dict(m) == chunks({1: b"z" * 1000, 7: b"7" * 1000})
    assert list(files_in(tmp_path)) == ["data/root/a/c0"]


def test_larger_entries_are_appended_and_dead_bytes_bounded(tmp_path: Path) -> None:
    """Entries of any size may be written, too."""
    m = mapping(tmp_path, "in_place")
    model = {}
    rng = random.Random(3)
    for _ in range(300):
        i = rng.randrange(8)
        model[i] = rng.randbytes(rng.choice([0, 10, 1000, 3000]))
        m[f"{ROOT}{i}"] = model[i]
        assert shard_of(tmp_path).stat().st_blocks * 512 < 100_000
    assert dict(m) == chunks(model)


@settings(deadline=None, max_examples=300)
@given(
    location=st.sampled_from(["end", "start"]),
    checksum=st.sampled_from(list(INDEX_CODECS)),
    changes=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, 12) | st.sampled_from([200, 5000, None, "flush", "compact"]),
            st.sampled_from(STRATEGIES_IN_PLACE),
            st.booleans(),
        ),
        max_size=12,
    ),
)
@example(
    "end",
    "no checksum",
    [(0, 0, "in_place", False), (1, 1, "in_place", False), (0, 5000, "in_place", False)],
)
@example(
    "end",
    "no checksum",
    [(0, 0, "in_place", False), (1, 0, "in_place", False), (2, 0, "append", False)],
)
@example("start", "crc32c", [(0, 7, "in_place", False), (1, 0, "in_place", False)])
def test_entries_of_any_size_survive_each_other(
    location: Location,
    checksum: str,
    changes: list[tuple[int, int | str | None, WriteStrategy, bool]],
) -> None:
    """Where an entry finds its place depends on the sizes of all that were there before, and on
    whether the shard has slots, or only looks as if it had."""
    path = temporary_directory()
    declare(path, "z", 5, 3, checksum=checksum, location=location)
    stores = {name: ShardingMapping(path, strategy=name) for name in STRATEGIES_IN_PLACE}
    model: dict[str, bytes] = {}
    for number, (i, nbytes, strategy, is_elsewhere) in enumerate(changes, start=1):
        if is_elsewhere:
            forget_open_shards(path)  # as if by another process
        m, key = stores[strategy], f"z/c/{i}"
        match nbytes:
            case "flush":
                m.flush()
            case "compact":
                m.compact()
            case int():
                m[key] = model[key] = bytes([number]) * nbytes
            case _:
                model.pop(key, None)
                m.erase(key)
        found = dict(stores["append"])
        del found["z/zarr.json"]
        assert found == model
    forget_open_shards(path)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from("CF"), st.integers(0, 1), st.integers(0, 2), st.booleans()),
        max_size=10,
    )
)
@example([("C", 0, 1, True), ("C", 1, 1, True), ("F", 1, 0, True)])
def test_slots_of_one_order_are_none_of_another(
    changes: list[tuple[Any, int, int, bool]],
) -> None:
    """Stores that lay entries out in different orders take turns."""
    path = temporary_directory()
    model: dict[str, bytes] = {}
    for number, (order, i, j, is_set) in enumerate(changes):
        m = ShardingMapping(path, chunks_per_shard=(2, 3), strategy="in_place", order=order)
        key = f"{ROOT}{i}/{j}"
        if is_set:
            m[key] = model[key] = bytes([number] * 4)
        else:
            m.erase(key)
            model.pop(key, None)
        assert dict(m) == model


def test_a_shard_of_another_strategy_is_taken_over(tmp_path: Path) -> None:
    """Its file is replaced once, so that nobody reads it without a lock."""
    mapping(tmp_path, "append").update(chunks({1: b"1" * 10, 2: b"2" * 10}))
    assert not shard_of(tmp_path).stat().st_mode & FIXED
    m = mapping(tmp_path, "in_place")
    m[f"{ROOT}3"] = b"3" * 10
    assert shard_of(tmp_path).stat().st_mode & FIXED
    assert dict(m) == chunks({i: str(i).encode() * 10 for i in (1, 2, 3)})


def erase_part_of_a_name(m: ShardingMapping) -> None:
    m.erase_prefix(f"{ROOT}1")


def publish_what_was_read(m: ShardingMapping) -> None:
    with m.batch(max_nbytes=1):
        m.set_partial_values([(f"{ROOT}1", 1, b"!")])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (erase_part_of_a_name, {2: b"22"}),
        (publish_what_was_read, {1: b"1!", 2: b"22", 11: b"11"}),
    ],
)
def test_who_reads_and_then_writes_does_not_wait_for_itself(
    change: Any, expected: dict[int, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call reads entries that may be overwritten, and then changes the shard."""
    monkeypatch.setattr(locks, "MAX_WAIT_S", 5.0)
    m = mapping(tmp_path, "in_place", n=16)
    m.update(chunks({1: b"11", 2: b"22", 11: b"11"}))
    m.flush()
    change(m)
    assert dict(m) == chunks(expected)


def test_uncompressed_arrays_have_a_known_layout(tmp_path: Path) -> None:
    """Slices of an array, written one after the other, lie in the file as in memory, and native
    zarr reads them at any time."""
    store = ShardingStore(tmp_path, chunks_per_shard=(6, 1, 1), strategy="in_place", order="C")
    z = zarr.create_array(
        store, shape=(6, 4, 5), chunks=(1, 4, 5), dtype="u2", compressors=None, filters=None
    )
    data = np.arange(1, 121, dtype="u2").reshape(6, 4, 5)
    for i in (0, 1, 5, 2, 3, 4):
        z[i] = data[i]
        native: Any = zarr.open_array(LocalStore(tmp_path), mode="r")[i]
        np.testing.assert_array_equal(native, data[i])
    stored = np.memmap(tmp_path / "c/0/0/0", dtype="<u2", mode="r", shape=data.shape)
    np.testing.assert_array_equal(stored, data)


# ----------------------------------------------------------------- options


def fsspec_local(path: Path) -> Any:
    return FsspecStore.from_url(f"file://{path}", storage_options={"auto_mkdir": True})


@pytest.mark.parametrize("strategy", ["append", "in_place"])
@pytest.mark.parametrize("base", [lambda _: {}, lambda _: MemoryStore(), fsspec_local])
def test_base_stores_that_cannot(base: Any, strategy: Any, tmp_path: Path) -> None:
    """An error that says what can."""
    with pytest.raises(SpecError, match="rewrite"):
        ShardingStore(base(tmp_path), strategy=strategy)


@pytest.mark.parametrize("locking", ["none", "lockfile"])
def test_without_locks_of_the_system_shards_are_rewritten(locking: Any, tmp_path: Path) -> None:
    """There, what is written and what is read cannot be kept apart."""
    with pytest.raises(SpecError, match="locking='os'"):
        ShardingStore(tmp_path, strategy="append", locking=locking)
    m = ShardingMapping(tmp_path, chunks_per_shard=8, locking=locking)
    m.update(chunks({1: b"1"}))
    m.update(chunks({2: b"2"}))
    assert shard_of(tmp_path).stat().st_size == 2 + INDEX_NBYTES


def test_no_such_strategy(tmp_path: Path) -> None:
    """The error names those that there are."""
    with pytest.raises(SpecError, match="in_place"):
        ShardingStore(tmp_path, strategy="inplace")  # type: ignore[arg-type]
