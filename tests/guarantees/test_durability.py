"""``durability="power"``: in which order files and directories are synced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from obstore.store import MemoryStore as ObstoreMemory
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, WrapperStore

from tests.support.checked_stores import KINDS
from zarr_shardstore import (
    ShardingMapping,
    SpecError,
    adopt,
    check_store,
    repair_store,
    restore_quarantine,
    undo_adoption,
)

KEYS = [f"data/root/a/b/c{i}" for i in range(4)]
SHARD = "data/root/a/b/c0"


@contextmanager
def recorded(root: Path) -> Iterator[list[str]]:
    """What is done to files and directories that matters when the power fails."""
    steps: list[str] = []

    def name(path: Any) -> str:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        relative = os.path.relpath(path, root)
        return "temporary" if relative.endswith(".partial") else relative

    def wrapped(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **options: Any) -> Any:
            if not str(args[0]).endswith("__lock"):
                steps.append(" ".join([what, *map(name, args)]))
            return call(*args, **options)

        return record

    calls: dict[str, Any] = {
        what: wrapped(what, getattr(os, what)) for what in ("fsync", "replace", "unlink")
    }
    with mock.patch.multiple(os, **calls):
        yield steps


DIRECTORIES = [f"fsync {d}" for d in ("data/root/a/b", "data/root/a", "data/root", "data", ".")]


def test_a_shard_is_synced_before_its_name_and_its_directories_after(tmp_path: Path) -> None:
    """Also directories that are new; when the write returns all of it survives."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4, durability="power", strategy="rewrite")
    for i, key in enumerate(KEYS[:2]):  # a new shard, and an update
        with recorded(tmp_path) as steps:
            m[key] = b"1"
        first = ["fsync temporary", f"replace temporary {SHARD}", *DIRECTORIES]
        assert steps[:7] == first
        assert all("fsync .." in step for step in steps[7:])
        assert bool(steps[7:]) == (i == 0), "the root itself, once"


def test_a_new_root_is_synced_with_the_directories_above_it(tmp_path: Path) -> None:
    m = ShardingMapping(tmp_path / "a" / "b", durability="power")
    with recorded(tmp_path) as steps:
        m["x"] = b"1"
    assert steps[-1] == f"fsync {os.path.relpath('/', tmp_path)}"
    assert {"fsync a/b", "fsync a", "fsync .", "fsync .."} <= set(steps)


@pytest.mark.parametrize("prefix", ["data/root/a/", ""])
def test_an_erased_prefix_stays_erased(prefix: str, tmp_path: Path) -> None:
    m = ShardingMapping(tmp_path, chunks_per_shard=4, durability="power")
    m[KEYS[0]] = b"1"
    with recorded(tmp_path) as steps:
        m.erase_prefix(prefix)
    assert steps[-1] == "fsync ."
    assert ("fsync data/root" in steps) == bool(prefix)
    m.erase_prefix("missing/")


def test_an_erased_shard_stays_erased(tmp_path: Path) -> None:
    """The directory is synced after it."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4, durability="power", strategy="rewrite")
    m[KEYS[0]] = b"1"
    with recorded(tmp_path) as steps:
        del m[KEYS[0]]
    assert steps == [f"unlink {SHARD}", *DIRECTORIES]


def test_documents_are_synced_too(tmp_path: Path) -> None:
    """What says which shards there are must not be lost before them."""
    m = ShardingMapping(tmp_path, durability="power")
    m["y"] = b"{}"
    with recorded(tmp_path) as steps:
        m["a/x"] = b"{}"
    assert steps == ["fsync temporary", "replace temporary a/x", "fsync a", "fsync ."]


def test_an_adoption_syncs_each_directory_that_it_changes(tmp_path: Path) -> None:
    """Also new ones above it, and those that files leave or come back to. What moved away is synced
    in its new place first."""
    (tmp_path / "from").mkdir()
    paths = [tmp_path / "from" / f"{i}.npy" for i in range(2)]
    for path in paths:
        np.save(path, np.zeros((2, 2)))
    with recorded(tmp_path) as steps:
        adopt(paths, tmp_path / "a" / "b", link="move")
    named = steps.index("replace a/b/.zarr.json.adopting a/b/zarr.json")
    synced = steps[steps.index("replace from/1.npy a/b/c/1/0") : named]
    for name in ("a/b/c/0", "a/b/c/1", "a/b/c", "a/b"):
        assert synced.index(f"fsync {name}") < synced.index("fsync from")
    assert steps[named + 1 :] == ["fsync a/b"]
    assert {"fsync a", "fsync ."} <= set(steps[:named])
    (tmp_path / "from").rmdir()
    with recorded(tmp_path) as steps:
        undo_adoption(tmp_path / "a" / "b")
    back = steps.index("replace a/b/c/1/0 from/1.npy")
    assert steps[back + 1] == "fsync from"
    assert "fsync ." in steps[:back]


def test_by_default_nothing_waits_for_the_disk(tmp_path: Path) -> None:
    """A write survives its process, and takes the time of no disk."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    with recorded(tmp_path) as steps:
        m[KEYS[0]] = b"1"
    assert steps == [f"replace temporary {SHARD}"]


def local_fsspec(path: Path) -> Any:
    return FsspecStore.from_url(f"file://{path}", storage_options={"auto_mkdir": True})


REFUSED: dict[str, Callable[[Path], Any]] = {
    "dict": lambda _: {},
    "memory": lambda _: MemoryStore(),
    "obstore in memory": lambda _: ObjectStore(ObstoreMemory()),
    "a wrapper": lambda path: WrapperStore(LocalStore(path)),
    "a wrapper of fsspec": lambda path: WrapperStore(local_fsspec(path)),
    "a subclass": lambda path: type("Other", (LocalStore,), {})(path),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stores_that_do_not_say_when(name: str, tmp_path: Path) -> None:
    """A clear error where nobody can promise it."""
    with pytest.raises(SpecError, match="loss of power"):
        ShardingMapping(REFUSED[name](tmp_path), durability="power")


@pytest.mark.parametrize("options", [{"durability": "disk"}, {"locking": "fcntl"}])
def test_options_that_cannot_be(options: Any) -> None:
    """The error names what can."""
    with pytest.raises(SpecError, match=r"'process'|'lockfile'"):
        ShardingMapping({}, **options)


def test_a_repair_syncs_the_original_before_it_changes_its_object(tmp_path: Path) -> None:
    """So does a restoration with its object; after a loss of power no bytes are gone."""
    KINDS["v3 zstd"].make(tmp_path)
    ShardingMapping(tmp_path).flush()
    path = tmp_path / "a/c/1/1"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with recorded(tmp_path) as steps:
        repaired = repair_store(check_store(tmp_path), dry_run=False)
    original = f"{repaired.quarantine}/a/c/1/1.original"
    changed = steps.index("replace temporary a/c/1/1")
    stored = steps.index(f"replace temporary {original}")
    assert steps[stored - 1] == "fsync temporary"
    assert {f"fsync {os.path.dirname(original)}", "fsync ."} <= set(steps[stored:changed])
    assert steps[changed - 1] == "fsync temporary"
    with recorded(tmp_path) as steps:
        restore_quarantine(tmp_path, repaired.quarantine)
    assert steps[:3] == ["fsync temporary", "replace temporary a/c/1/1", "fsync a/c/1"]
