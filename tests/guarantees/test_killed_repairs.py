"""Repairs are killed and interrupted, at many moments: no original byte is lost.

``ZARR_SHARDSTORE_KILLS`` is the number of kills and interrupts.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zarr

from tests.guarantees.test_killed_writers import Array, Writers, kill_one, writers  # noqa: F401
from tests.support import repair_until_killed
from tests.support.any_size import INDEX_CODECS
from tests.support.checked_stores import KINDS
from tests.support.processes import forks_of
from tests.support.side_files import is_side_file
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardingMapping,
    ShardingStore,
    check_store,
    repair_store,
    restore_quarantine,
)

N_KILLS = int(os.environ.get("ZARR_SHARDSTORE_KILLS", "12"))
QUARANTINE = ".zarr_shardstore_quarantine"
GOLDEN = Path(__file__).parents[1] / "golden" / "v0.1"

Objects = dict[str, bytes]


def damaged_store(root: Path) -> None:
    """Shards of which some chunks, all or none are whole, an object outside, and remains."""
    kind = KINDS["v3 zstd with checksum"]
    kind.make(root)
    ShardingMapping(root).flush()
    for name, at in (("0/0", 5), ("0/1", -1), ("1/0", 30), ("1/1", 70)):
        path = root / "a/c" / name
        data = bytearray(path.read_bytes())
        data[at] ^= 255
        path.write_bytes(data)
    (root / "a/c/7").mkdir()
    (root / "a/c/7/7").write_bytes(b"outside")
    os.utime(root / "a/c/7/7", ns=(0, 10**18))  # its writer is gone
    (root / f"a/c/1/.{'0' * 32}.partial").write_bytes(b"remains")
    (root / "a/c/1/0.__lock").write_bytes(b"")


def template(name: str, root: Path) -> Path:
    if name == "damaged":
        damaged_store(root)
    else:
        shutil.copytree(GOLDEN / name, root)
    return root


def objects_in(root: Path) -> Objects:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def without_quarantine(objects: Objects) -> Objects:
    return {key: value for key, value in objects.items() if not key.startswith(QUARANTINE)}


def quarantines(root: Path) -> list[str]:
    """Those with an original, the oldest first."""
    found = {key.split("/")[1] for key in objects_in(root) if key.endswith(".original")}
    return [f"{QUARANTINE}/{name}" for name in sorted(found)]


@contextmanager
def repairs() -> Iterator[Any]:
    with forks_of(repair_until_killed.__file__) as ask:

        def start(path: Path, how: str, n: int, quarantine: str = "") -> int:
            return ask({"path": str(path), "how": how, "n": n, "quarantine": quarantine})

        yield start


def check_originals(damaged: Objects, root: Path) -> None:
    """Each object is as it was, or its original is in a quarantine."""
    now = objects_in(root)
    for key, value in damaged.items():
        copies = [v for k, v in now.items() if k.endswith(f"/{key}.original")]
        assert now.get(key) == value or value in copies, key


MOST = {
    "damaged": {"kill": 370, "interrupt": 18_000},
    "stopped_change-end_crc": {"kill": 125, "interrupt": 5_700},
    "stopped_move-end": {"kill": 125, "interrupt": 5_700},
}
"""Calls that open or change a file, and lines of the package, of a whole repair."""


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("name", MOST)
def test_nothing_is_lost(name: str, tmp_path: Path) -> None:
    """A second repair finishes, and what both have put aside is the original, the latest first."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    root = template(name, tmp_path / "damaged")
    damaged = objects_in(root)
    outcomes: Counter[int] = Counter()
    with repairs() as start:
        for n in range(N_KILLS // 3):
            path = tmp_path / str(n)
            shutil.copytree(root, path)
            how = "kill" if n % 4 != 3 else "interrupt"
            at = rng.randint(1, MOST[name][how])
            says = f"seed {seed}, {name}, {n}: {how} at {at}"
            outcomes[start(path, how, at)] += 1
            check_originals(damaged, path)
            second = repair_store(check_store(path, level="decode"), dry_run=False)
            assert second.check is not None
            left = {action.key for action in second.actions if action.did == "left"}
            assert {f.key for f in second.check.findings} <= left, (says, second)
            check_originals(damaged, path)
            for quarantine in reversed(quarantines(path)):
                if n % 2:
                    outcomes[start(path, "kill", int(30 ** rng.random()), quarantine)] += 1
                    check_originals(damaged, path)
                restore_quarantine(path, quarantine)
            restored = without_quarantine(objects_in(path))
            more = {key: restored.pop(key) for key in restored.keys() - damaged.keys()}
            assert restored == damaged, says
            assert all(map(is_side_file, more)), (says, list(more))
            shutil.rmtree(path)
    assert not {1, 3} & outcomes.keys(), says
    print(name, dict(outcomes))


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("checksum", INDEX_CODECS)
def test_a_killed_append(checksum: str, writers: Writers, tmp_path: Path) -> None:  # noqa: F811
    """A shard with half a change is repaired by its journal: zarr alone reads every chunk that was
    acknowledged. The original, shard and journal, comes back."""
    rng = random.Random(checksum)
    for n in range(2):
        array = Array(tmp_path / str(n), 6, checksum, "end")
        while not kill_one(writers, array, ("append",), rng)[1]:
            array.recover("append")
        files = objects_in(array.root)
        report = check_store(array.root, level="decode")
        assert {found.kind for found in report.findings} >= {"journal"}
        repaired = repair_store(report, dry_run=False)
        assert repaired.check is not None
        assert repaired.check.is_clean, repaired
        assert array.side_files() == []
        array.check()
        array.check_natively()
        restore_quarantine(array.root, repaired.quarantine)
        assert without_quarantine(objects_in(array.root)) == files
        array.check()


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("stopped_[cm]*")))
def test_a_copy_of_a_killed_append(name: str) -> None:
    """Shards that were copied into a store without appends, with their journals, are whole, too."""
    base: dict[str, Any] = dict(objects_in(GOLDEN / name))

    def read(store: Any) -> Any:
        opened: Any = ShardingStore(store)
        opened = DraftHierarchyStore(opened) if "draft" in name else opened
        return zarr.open_array(opened, path="g/z", mode="r")[:]

    expected = read(GOLDEN / name)
    repaired = repair_store(check_store(base, level="decode"), dry_run=False)
    assert repaired.check is not None
    assert repaired.check.findings == ()
    assert (read(base) == expected).all()
    restore_quarantine(base, repaired.quarantine)
    assert without_quarantine(base) == objects_in(GOLDEN / name)
