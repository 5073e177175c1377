"""Each kind of finding that is called repairable has a repair, in memory and in local files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checked_stores import KINDS
from tests.tools.test_fsck import SHARD, SHARDS, STORES, group_with
from zarr_shardstore import ShardingMapping, check_store, repair_store, restore_quarantine
from zarr_shardstore.tools.check.findings import _REPAIRABLE, Keep

QUARANTINE = ".zarr_shardstore_quarantine/"

Objects = dict[str, bytes]


def of_a_shard(kind: str) -> tuple[str, Objects]:
    level, name, damage, _ = SHARDS[kind]
    base: Objects = {}
    KINDS[name].make(base)
    base[SHARD] = damage(base[SHARD])
    return level, base


def of_a_store(kind: str) -> tuple[str, Objects]:
    _, nearly, damage = STORES[kind]
    base: Objects = {}
    nearly(base)
    damage(base)
    return "index", base


MAKERS: dict[str, Callable[[str], tuple[str, Objects]]] = {
    **dict.fromkeys(SHARDS, of_a_shard),
    **dict.fromkeys(STORES, of_a_store),
}


def store_at(path: Path, objects: Objects) -> Path:
    for key, value in objects.items():
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_bytes(value)
        os.utime(path / key, ns=(0, 10**18))  # the last writer is gone
    return path


def objects_in(base: Any) -> Objects:
    if isinstance(base, Path):
        files = [path for path in base.rglob("*") if path.is_file()]
        base = {str(path.relative_to(base)): path.read_bytes() for path in files}
    return {key: bytes(v) for key, v in base.items() if not key.startswith(QUARANTINE)}


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("is_local", [False, True], ids=["memory", "local"])
@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind in _REPAIRABLE])
def test_each_kind(kind: str, is_local: bool, tmp_path: Path) -> None:
    """A dry run says what the repair does; nothing of it is found again, and all comes back."""
    level, damaged = MAKERS[kind](kind)
    base: Any = store_at(tmp_path, damaged) if is_local else dict(damaged)
    report = check_store(base, level=level)  # type: ignore[arg-type]
    assert [f.kind for f in report.findings if f.repairable] == [kind] * len(report.findings)
    keep: Keep = "salvage"
    if kind in ("torn_index", "chunk_size"):  # of these shards nothing can be recovered
        assert [action.did for action in repair_store(report, dry_run=False).actions] == ["left"]
        keep = "drop"
    planned = repair_store(report, keep=keep)
    assert objects_in(base) == damaged
    repaired = repair_store(report, keep=keep, dry_run=False)
    assert [(a.key, a.did) for a in repaired.actions] == [(a.key, a.did) for a in planned.actions]
    assert all(action.did != "left" for action in repaired.actions), repaired.actions
    assert repaired.check is not None
    assert repaired.check.findings == ()
    restore_quarantine(base, repaired.quarantine)
    assert objects_in(base) == damaged


@pytest.mark.parametrize("damage", ["stale", "cut", "undeclared", "with a shard"])
def test_consolidated_indexes(damage: str, tmp_path: Path) -> None:
    """They are made anew, after the shards; one that no document declares is removed."""
    group_with(tmp_path)
    mapping = ShardingMapping(tmp_path)
    mapping.flush()
    for path in tmp_path.rglob("c/*/*"):  # times of the last seconds prove nothing
        os.utime(path, ns=(0, 9 * 10**17))
    mapping.consolidate_index("0")
    index, shard = tmp_path / "0/__shards.index", tmp_path / "0/c/1/1"
    if damage == "stale":
        shard.write_bytes(shard.read_bytes())
        os.utime(shard, ns=(0, 10**18))
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:-1])
    elif damage == "undeclared":
        store_at(tmp_path, {"1/__shards.index": index.read_bytes()})
    else:
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    damaged = objects_in(tmp_path)
    report = check_store(tmp_path)
    kinds = {found.kind for found in report.findings}
    if damage != "with a shard":
        assert kinds == {"consolidated_index"}
    repaired = repair_store(report, dry_run=False)
    assert repaired.check is not None
    assert repaired.check.findings == ()
    did = [(action.key, action.did) for action in repaired.actions]
    made = ("1/__shards.index", "removed"), ("0/__shards.index", "rewritten")
    assert did[-1] == made[damage != "undeclared"]
    restore_quarantine(tmp_path, repaired.quarantine)
    assert objects_in(tmp_path) == damaged


def test_every_kind_is_in_a_table() -> None:
    assert MAKERS.keys() | {"consolidated_index"} >= _REPAIRABLE
