"""Repairs beside errors and writers: nothing more is lost, and the report has what was done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore, WrapperStore

from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    check_store,
    repair_store,
    restore_quarantine,
)
from zarr_shardstore.io.local import fs
from zarr_shardstore.tools.check import repair
from zarr_shardstore.tools.check.check_store import _Check
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec


class CutReplies(WrapperStore[MemoryStore]):
    """A store whose replies for whole shards are cut, as by a proxy; parts and sizes are right."""

    limit: int | None = None

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        reply = await super().get(key, prototype, byte_range)
        if reply is None or byte_range is not None or "c/" not in key:
            return reply
        return reply[: self.limit]

    async def getsize(self, key: str) -> int:
        return await self._store.getsize(key)


def array_in(base: Any, **options: Any) -> Any:
    store = ShardingStore(base, chunks_per_shard=4, **options)
    z = zarr.create_array(
        store, shape=(16,), chunks=(1,), dtype="u2", compressors=[Crc32cCodec()], overwrite=True
    )
    for i in (2, 0, 1, 3):
        z[i] = i + 1
    z[4:] = np.arange(5, 17)
    return z


def flip(data: bytes, at: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_cut_reply_replaces_no_shard() -> None:
    """The chunks after the cut would be lost, and the original in the quarantine would be cut."""
    memory = MemoryStore()
    base = CutReplies(memory)
    array_in(base, index_location="start")
    objects = memory._store_dict
    objects["c/0"] = cpu.Buffer.from_bytes(flip(objects["c/0"].to_bytes(), 70))
    before = {key: value.to_bytes() for key, value in objects.items()}
    report = check_store(base, level="decode")
    assert [(f.kind, f.chunk) for f in report.findings] == [("chunk_checksum", (0,))]
    base.limit = 80
    repaired = repair_store(report, dry_run=False)
    ((did, message),) = [(action.did, action.message) for action in repaired.actions]
    assert (did, "gave 80 of" in message) == ("left", True)
    assert {key: value.to_bytes() for key, value in objects.items()} == before


@contextmanager
def no_room_for(end: str) -> Iterator[None]:
    """The disk is full when a file with such a name is stored."""
    replace = fs.replace

    def full(old: str, new: str) -> None:
        if new.endswith(end):
            raise OSError(28, "No space left on device", new)
        replace(old, new)

    with mock.patch.object(fs, "replace", full):
        yield


def consolidated(path: Path) -> None:
    array_in(path)
    ShardingMapping(path).flush()
    for shard in path.glob("c/*"):  # times of the last seconds prove nothing
        os.utime(shard, ns=(0, 9 * 10**17))
    ShardingMapping(path).consolidate_index()


class LostReplies(WrapperStore[MemoryStore]):
    """A store whose reply to the write of a shard is lost."""

    is_lost = False

    async def set(self, key: str, value: Any) -> None:
        await super().set(key, value)
        if self.is_lost and key == "c/0":
            raise ConnectionError("reset")


def test_a_repair_whose_reply_is_lost_names_what_may_be_gone() -> None:
    memory = MemoryStore()
    base = LostReplies(memory)
    array_in(base)
    objects = memory._store_dict
    objects["c/0"] = cpu.Buffer.from_bytes(flip(objects["c/0"].to_bytes()))
    report = check_store(base, level="decode")
    base.is_lost = True
    repaired = repair_store(report, dry_run=False)
    (action,) = repaired.actions
    assert (action.did, len(action.lost)) == ("rewritten", 1)
    assert "check again (ConnectionError: reset)" in action.message
    assert restore_quarantine(base, repaired.quarantine, dry_run=True) == ["c/0"]


def test_a_full_disk_at_the_end_loses_no_report(tmp_path: Path) -> None:
    """The shard is repaired then. The lost chunk and the quarantine are named."""
    consolidated(tmp_path)
    path = tmp_path / "c/0"
    damaged = flip(path.read_bytes())
    path.write_bytes(damaged)
    report = check_store(tmp_path, level="decode")
    with no_room_for("__shards.index.original"):
        repaired = repair_store(report, dry_run=False)
    shard, index = repaired.actions
    assert (shard.did, shard.lost) == ("rewritten", ((2,),))
    assert (index.key, index.did) == ("__shards.index", "left")
    assert "No space left" in index.message
    restore_quarantine(tmp_path, repaired.quarantine)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("error", [OSError("no listing"), KeyboardInterrupt()], ids=repr)
def test_an_error_of_the_last_check_loses_no_report(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a line of the report; an interrupt names the lost chunks and the quarantine."""
    base: dict[str, bytes] = {}
    array_in(base)
    base["c/0"] = flip(base["c/0"])
    report = check_store(base, level="decode")
    monkeypatch.setattr(repair, "check_store", mock.Mock(side_effect=error))
    if isinstance(error, Exception):
        repaired = repair_store(report, dry_run=False)
        assert [action.did for action in repaired.actions] == ["rewritten", "left"]
        assert "no listing" in repaired.actions[1].message
        assert repaired.quarantine
        return
    with pytest.raises(KeyboardInterrupt) as raised:
        repair_store(report, dry_run=False)
    (note,) = raised.value.__notes__
    assert "'c/0' rewritten, lost: [(0,)]" in note
    assert ".zarr_shardstore_quarantine/" in note


def test_the_consolidated_index_stays_for_the_next_repair(tmp_path: Path) -> None:
    """It alone names the chunks of a shard for whose original there was no room."""
    consolidated(tmp_path)
    path, other = tmp_path / "c/0", tmp_path / "c/1"
    size, status = path.stat().st_size, path.stat()
    path.write_bytes(path.read_bytes()[: size - 68] + bytes(68))  # bits rot: the time stays
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.write_bytes(flip(other.read_bytes()))
    with no_room_for("c/0.original"):
        repaired = repair_store(check_store(tmp_path, level="decode"), dry_run=False)
    did = {action.key: action.did for action in repaired.actions}
    assert did == {"c/0": "left", "c/1": "rewritten", "__shards.index": "left"}
    repaired = repair_store(check_store(tmp_path, level="decode"), dry_run=False)
    did = {action.key: action.did for action in repaired.actions}
    assert did == {"c/0": "rewritten", "__shards.index": "rewritten"}
    assert repaired.check is not None
    assert repaired.check.findings == ()
    values: Any = zarr.open_array(ShardingStore(tmp_path), mode="r")[:4]
    assert values.tolist() == [1, 2, 3, 4]


def test_an_array_that_grows_while_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document is read again after the objects; they are checked as the others."""
    base: dict[str, bytes] = {}
    array_in(base)
    document = base["zarr.json"]
    base["zarr.json"] = json.dumps({**json.loads(document), "shape": [12]}).encode()
    assert [found.kind for found in check_store(base).findings] == ["outside_grid"]
    listed = _Check._keys

    def grow_after(check: _Check) -> Iterator[str]:
        yield from listed(check)
        base["zarr.json"] = document

    monkeypatch.setattr(_Check, "_keys", grow_after)
    report = check_store(base)
    assert (report.findings, report.n_chunks) == ((), 16)


def test_a_repair_beside_a_program_that_replaces_arrays(tmp_path: Path) -> None:
    """Shards of the new array are whole, also if they are damaged by the document of the old."""
    store = ShardingStore(tmp_path, 2)
    options: Any = {"shape": (64,), "chunks": (1,), "dtype": "u2", "compressors": None}
    for name in ("a", "b"):
        zarr.create_array(store, name=name, **options)[:] = 7
        (damaged := tmp_path / f"{name}/c/1").write_bytes(damaged.read_bytes()[:-1])
    store.close()
    report = check_store(tmp_path)
    real, new = repair._Repair.repair, np.arange(64, dtype="u2")

    def replace_then_repair(self: Any, key: str, found: Any) -> Any:
        if key.startswith("b/"):
            code = (
                "import sys, numpy as np, zarr; from zarr_shardstore import ShardingStore as S;"
                "z = zarr.create_array(S(sys.argv[1], 4), name='b', shape=(64,), chunks=(1,), "
                "dtype='u2', compressors=None, overwrite=True); z[:] = np.arange(64)"
            )
            subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
        return real(self, key, found)

    with mock.patch.object(repair._Repair, "repair", replace_then_repair):
        actions = repair_store(report, keep="drop", dry_run=False).actions
    assert [(a.key, a.did) for a in actions] == [("a/c/1", "removed"), ("b/c/1", "left")]
    assert "whole now" in actions[1].message
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(tmp_path), path="b")[:], new)


def test_a_repair_removes_what_a_killed_writer_of_frames_left(tmp_path: Path) -> None:
    """A shard after the end, with the journal and the lock of its writer."""
    code = """
import os, signal, sys, numpy as np
from zarr_shardstore import ShardingStore
from zarr_shardstore.store.growing.growing_array import GrowingArray
move_end = GrowingArray._move_end
def killed(self, n, durable):
    if n > 8:
        os.kill(os.getpid(), signal.SIGKILL)
    move_end(self, n, durable)
GrowingArray._move_end = killed
with ShardingStore(sys.argv[1], 4).append_frames("f") as writer:
    for n in (8, 1):
        writer.extend(np.ones((n, 3, 3), "u2"))
        writer.flush()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    for path in [each for each in tmp_path.rglob("*") if each.is_file()]:
        os.utime(path, (time.time() - 3600,) * 2)
    report = check_store(tmp_path)
    assert {"outside_grid", "journal", "lock_file"} <= {found.kind for found in report.findings}
    after = repair_store(report, dry_run=False).check
    assert after is not None
    assert after.findings == ()
    found = zarr.open_array(ShardingStore(tmp_path), path="f")[:]
    np.testing.assert_array_equal(found, np.ones((8, 3, 3)))


def test_an_array_that_becomes_a_group_during_a_repair(tmp_path: Path) -> None:
    """Its shards are left, and the report has the others."""
    for name in ("a", "b"):
        z = zarr.create_array(
            ShardingStore(tmp_path, 2), name=name, shape=(4,), dtype="u2", chunks=(1,)
        )
        z[:] = 1
        (damaged := tmp_path / f"{name}/c/1").write_bytes(damaged.read_bytes()[:-1])
    report, real = check_store(tmp_path), repair._Repair.repair

    def replace_then_repair(self: Any, key: str, found: Any) -> Any:
        (tmp_path / "b/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
        return real(self, key, found)

    with mock.patch.object(repair._Repair, "repair", replace_then_repair):
        actions = repair_store(report, keep="drop", dry_run=False).actions
    assert [(a.key, a.did) for a in actions] == [("a/c/1", "removed"), ("b/c/1", "left")]
    assert "not known here" in actions[1].message


def test_too_little_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that another machine decodes stays."""

    def decompress(_: Any) -> Any:
        raise MemoryError

    base: dict[str, bytes] = {}
    zarr.create_array(ShardingStore(base, 4), name="z", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    before = dict(base)
    with monkeypatch.context() as patched:
        codec = SimpleNamespace(plain=lambda _: SimpleNamespace(decompress=decompress))
        patched.setattr(ChunkCodec, "of", lambda *_: codec)
        report = check_store(base, level="decode")
        assert [each.kind for each in report.findings] == ["unreadable"]
        repair_store(report, dry_run=False)
    assert base == before
