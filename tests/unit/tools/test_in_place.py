"""What conversions do with what a killed one has left, after the array was changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import (
    ConversionReport,
    Progress,
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    ShardStoreError,
    UnsupportedError,
    check_store,
    reshard,
    shard_store,
    to_native,
    unshard_store,
)
from zarr_shardstore.io.local import locks
from zarr_shardstore.operations import values as values_module
from zarr_shardstore.shards import requests
from zarr_shardstore.tools.convert import in_place

VALUES = np.arange(1, 17, dtype="i4")


class Killed(BaseException):
    """Ends a conversion as a kill does, at a place that a test chooses."""


def make(path: Path, zarr_format: Any = 3, chunks_per_shard: int | None = None) -> None:
    store = ShardingStore(path, chunks_per_shard)
    for name in ("a", "b"):
        options: Any = {"shape": (16,), "chunks": (2,), "dtype": "i4", "zarr_format": zarr_format}
        zarr.create_array(store, name=name, **options)[:] = VALUES
    store.close()


def values(path: Path, name: str = "a") -> Any:
    return zarr.open_array(ShardingStore(path), path=name, mode="r")[:]


def kill(*_: object) -> None:
    raise Killed


def begin_and_stop(*args: Any, begin: Any = in_place.begin) -> None:
    begin(*args)
    raise Killed


def killed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, instead: Any, *args: Any, **options: Any
) -> None:
    """Convert, and stop where a function is called."""
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, instead)
        with pytest.raises(Killed):
            shard_store(*args, chunks_per_shard=2, **options)


IN_PLACE: list[Callable[[Path], Any]] = [
    lambda path: reshard(path, 4),
    unshard_store,
    lambda path: shard_store(path, chunks_per_shard=4),
]


@pytest.mark.parametrize("arrives", ["by the killed conversion", "by a copy"])
@pytest.mark.parametrize("convert", IN_PLACE)
def test_an_array_of_a_killed_conversion_into_the_store_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convert: Callable[[Path], Any], arrives: str
) -> None:
    """Its manifest says that a conversion writes the values, and the array is there."""
    source, target = tmp_path / "in", tmp_path / "out"
    make(source)
    if arrives == "by a copy":
        killed(monkeypatch, in_place, "begin", begin_and_stop, source, target)
        shutil.copytree(source / "a", target / "a")
    else:
        killed(monkeypatch, in_place.Manifest, "remove", kill, source, target)
    assert np.array_equal(values(target), VALUES)
    report = convert(target)
    assert np.array_equal(values(target), VALUES)
    assert report.arrays[0].n_chunks in (8, 0)  # 0: it has such chunks already
    assert "discarded" not in report.arrays[0].reason


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("change", ["made anew", "restored", "removed"])
def test_an_array_that_was_changed_after_the_kill_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, zarr_format: Any
) -> None:
    """What the killed conversion had staged is not moved over it. It becomes a store."""
    path, backup = tmp_path / "a.zarr", tmp_path / "backup"
    make(path, zarr_format)
    shutil.copytree(path / "a", backup)
    killed(monkeypatch, requests, "Move", kill, path, paths="a")
    pattern = ".zarr_shardstore/*/values-*/**/*"
    staged = {p: p.read_bytes() for p in path.glob(pattern) if p.is_file()}
    assert len(staged) == 4
    for paths in (None, "a"):
        dry = shard_store(path, chunks_per_shard=2, paths=paths, dry_run=True, estimate=True)
        assert "finishes that one first" in dry.arrays[0].reason
        assert not dry.n_left
    shutil.rmtree(path / "a")
    if change == "restored":
        shutil.copytree(backup, path / "a")
    elif change == "made anew":
        options: Any = {"shape": (16,), "chunks": (2,), "dtype": "i4", "zarr_format": zarr_format}
        zarr.create_array(path, name="a", **options)[:] = -VALUES

    report = shard_store(path, paths="b", chunks_per_shard=2)
    assert np.array_equal(values(kept_by(report, path)), VALUES)
    assert not (path / ".zarr_shardstore").exists()
    if change == "removed":
        assert not (path / "a").exists()
        return
    expected = -VALUES if change == "made anew" else VALUES
    assert np.array_equal(values(path), expected)
    shard_store(path, paths="a", chunks_per_shard=2)
    assert np.array_equal(values(path), expected)
    assert not check_store(path, level="decode").findings


def kept_by(report: ConversionReport, path: Path) -> Path:
    """Return the store of values that a note of a report names."""
    (note,) = [note for note in report.notes if "had staged is now in" in note]
    return path / note.split("'")[3]


AGAIN: dict[str, Callable[[Path], ConversionReport]] = {
    "the same command": lambda path: shard_store(path, chunks_per_shard=2),
    "unshard": unshard_store,
    "native": lambda path: shard_store(path, chunks_per_shard=2, native=True),
    "from another store": lambda path: shard_store(path.parent / "other", path, chunks_per_shard=2),
}


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("is_restored", [True, False])
def test_staged_values_are_the_only_copy_after_the_old_objects_are_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    zarr_format: Any,
    again: str,
    is_restored: bool,
) -> None:
    """No conversion removes them if the document is restored alone, or removed."""
    path = tmp_path / "a.zarr"
    make(path, zarr_format)
    other: Any = {"shape": (2,), "chunks": (1,), "dtype": "i4", "zarr_format": zarr_format}
    zarr.create_array(tmp_path / "other", name="c", **other)
    document = path / "a" / (".zarray" if zarr_format == 2 else "zarr.json")
    before = document.read_bytes()
    killed(monkeypatch, requests, "Move", kill, path, paths="a")
    if is_restored:
        document.write_bytes(before)
    else:
        document.unlink()
    report = AGAIN[again](path)
    assert np.array_equal(values(kept_by(report, path)), VALUES)


KILLED = """
import os, sys
from zarr_shardstore import reshard
from zarr_shardstore.shards import requests
requests.Move = lambda *_: os._exit(9)
reshard(sys.argv[1], 4, paths="a")
"""


def test_an_array_that_a_conversion_hides_has_no_listing(tmp_path: Path) -> None:
    """Its old objects are gone, and no new one is there: an empty listing would count as filled."""
    make(tmp_path, chunks_per_shard=2)
    known = ShardingStore(tmp_path)
    assert zarr.open_array(known, path="a").nchunks_initialized == 8
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False).returncode == 9
    for store, prefixes in ((known, ("a/", "a/c/", "")), (ShardingStore(tmp_path), ("a/c/",))):
        for prefix in prefixes:
            with pytest.raises(ShardStoreError, match="is being converted"):
                ShardingMapping(store).list_prefix(prefix)


def test_a_chunk_that_a_conversion_has_moved_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read of a store: the old document is read before, and the shard after the end."""
    make(tmp_path, chunks_per_shard=2)
    read_entries: Any = vars(values_module)["read_entries"]

    def read_late(*args: Any) -> Any:
        monkeypatch.setattr(values_module, "read_entries", read_entries)
        reshard(tmp_path, 4, paths="a")
        return read_entries(*args)

    monkeypatch.setattr(values_module, "read_entries", read_late)
    mapping = ShardingMapping(tmp_path)
    with pytest.raises(ShardConflictError):
        mapping["a/c/5"]
    assert ShardingMapping(tmp_path)["a/c/5"]


def test_an_array_that_became_v3_after_the_kill_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when the manifest says that values are replaced, before a marker says so."""
    make(tmp_path, 2)
    killed(monkeypatch, in_place, "_write_documents", kill, tmp_path, paths="a")
    to_native(tmp_path)
    z: Any = zarr.open_array(tmp_path, path="a")
    z[:] = -VALUES
    report = shard_store(tmp_path, chunks_per_shard=2)
    assert np.array_equal(values(kept_by(report, tmp_path)), VALUES)
    assert np.array_equal(values(tmp_path), -VALUES)
    assert not (tmp_path / "a/.zarray").exists()


@pytest.mark.parametrize("before", [None, 3])
@pytest.mark.parametrize("convert", IN_PLACE)
def test_objects_beyond_the_edge_go_to_the_quarantine(
    tmp_path: Path, before: int | None, convert: Callable[[Path], Any]
) -> None:
    """As after an append whose new length was lost: the shape may be put right again."""
    make(tmp_path, chunks_per_shard=before)
    document = tmp_path / "a/zarr.json"
    length = 6 if before else 10
    document.write_text(json.dumps(json.loads(document.read_text()) | {"shape": [length]}))
    beyond = {key: (tmp_path / key).read_bytes() for key in ("a/c/1", "a/c/2")}
    if before is None:
        beyond = {f"a/c/{i}": (tmp_path / f"a/c/{i}").read_bytes() for i in (5, 6, 7)}
    report = convert(tmp_path)
    assert np.array_equal(values(tmp_path), VALUES[:length])
    kept = {
        str(p.relative_to(q)): p.read_bytes()
        for q in tmp_path.glob(".zarr_shardstore_quarantine/*")
        for p in q.glob("**/*")
        if p.is_file()
    }
    if report.arrays[0].action == "skipped":  # it has such chunks already
        assert all((tmp_path / key).read_bytes() == value for key, value in beyond.items())
    else:
        assert kept == beyond
        assert f"objects beyond the edge of the array, {len(beyond)}, " in report.arrays[0].reason


def test_a_directory_that_may_not_be_changed_leaves_the_array_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found before any object is removed, and the next run continues."""
    z: Any = zarr.create_array(
        ShardingStore(tmp_path, 2), name="a", shape=(4, 4), chunks=(1, 1), dtype="i4"
    )
    z[...] = VALUES.reshape(4, 4)
    forbidden = str(tmp_path / "a/c/1")
    real = os.access

    def access(path: Any, mode: int) -> bool:
        return os.fspath(path) != forbidden and real(path, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "access", access)
        with pytest.raises(PermissionError, match="permit it, and run this again"):
            reshard(tmp_path, 4)
        assert (values(tmp_path) == VALUES.reshape(4, 4)).all()
    reshard(tmp_path, 4)
    assert (values(tmp_path) == VALUES.reshape(4, 4)).all()
    assert check_store(tmp_path).findings == ()


def test_a_killed_conversion_of_a_part_is_finished_for_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notes lie in the part: a conversion of the whole store leaves the array, and says so."""
    make(tmp_path / "g")
    killed(monkeypatch, requests, "Move", kill, tmp_path / "g", paths="a")
    report = shard_store(tmp_path, chunks_per_shard=2)
    assert report.n_left == 1
    assert "for a part of the store" in report.arrays[0].reason
    shard_store(tmp_path / "g", chunks_per_shard=2)
    assert np.array_equal(values(tmp_path, "g/a"), VALUES)


def test_lock_files_are_the_locks_of_conversions_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems that need them have no others. A killed conversion leaves its own."""

    def refuse(*_: object) -> bool:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    make(tmp_path)
    monkeypatch.setattr(locks, "_set_lock", refuse)
    with pytest.raises(UnsupportedError, match="locking='lockfile'"):
        shard_store(tmp_path, chunks_per_shard=4)
    with ShardingStore(tmp_path, locking="lockfile") as store:
        shard_store(store, chunks_per_shard=4)
        lock = tmp_path / ".zarr_shardstore/lock"
        lock.parent.mkdir()
        lock.touch()
        with pytest.raises(ShardConflictError, match=f"was killed: then remove '{lock}'"):
            reshard(store, chunks_per_shard=2)
        lock.unlink()
        reshard(store, chunks_per_shard=2)
    assert not lock.exists()
    assert np.array_equal(values(tmp_path), VALUES)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_conversion_with_a_lock_file_is_seen(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has locks, also by stores that ask the system, as the command line does."""

    def refuse(*_: object) -> bool:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    make(tmp_path)
    if not has_locks:
        monkeypatch.setattr(locks, "_set_lock", refuse)
    store = ShardingStore(tmp_path, locking="lockfile")
    looks: list[Any] = [store, tmp_path] if has_locks else [store]
    n_looks = 0

    def look(progress: Progress) -> None:
        nonlocal n_looks
        n_looks += 1
        for each in looks:
            assert {found.kind for found in check_store(each).findings} == {"in_use"}
            with pytest.raises(ShardConflictError, match="goes on already"):
                shard_store(each, chunks_per_shard=4)

    shard_store(store, chunks_per_shard=4, progress=look)
    assert n_looks
    assert check_store(store).is_clean
    assert np.array_equal(values(tmp_path), VALUES)
