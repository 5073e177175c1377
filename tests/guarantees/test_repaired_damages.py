"""Repairs of random damages: whole chunks stay, no others come, and the original comes back.

``ZARR_SHARDSTORE_ROUNDS`` multiplies the damages: 18 rounds are 1,000.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from tests.guarantees.test_seen_damages import (
    DamagedStore,
    chunks_of,
    damaged_stores,
    duplicate,
    splice,
    values_of,
)
from tests.support.checked_stores import CPS, GRID, KINDS
from tests.support.rounds import rounds
from tests.support.shard_bytes import places_in
from zarr_shardstore import CheckReport, check_store, repair_store, restore_quarantine

N_DAMAGES = rounds(3)
"""In each of the 19 stores."""

N = CPS[0] * CPS[1]
QUARANTINE = ".zarr_shardstore_quarantine/"

NOT_NATIVE = ("above", "below", "alone", "v2", "draft")
"""Parts of the names of stores that only this package reads."""


def objects_in(base: Any) -> dict[str, bytes]:
    if isinstance(base, Path):
        files = [path for path in base.rglob("*") if path.is_file()]
        base = {str(path.relative_to(base)): path.read_bytes() for path in files}
    return {key: bytes(v) for key, v in base.items() if not key.startswith(QUARANTINE)}


def places_of(shard: bytes) -> tuple[slice, list[tuple[int, int] | None]]:
    """The bytes of the index, and the places of the entries, in whichever form they are."""
    for checksum, location in product((True, False), ("end", "start")):
        try:
            places = places_in(shard, N, checksum=checksum, location=location)  # type: ignore[arg-type]
        except AssertionError:
            continue
        n = 16 * N + 4 * checksum
        ends = [sum(place) for place in places if place is not None]
        if ends and sum(n for _, n in filter(None, places)) + n == len(shard):
            return (slice(0, n) if location == "start" else slice(-n, None)), places
    raise AssertionError("no index is there")


def untouched(name: str, store: DamagedStore, damaged: bytes) -> list[bool]:
    """Whether each chunk has its bytes, and its place in the index, in the damaged object."""
    whole, rest = store.whole[store.key], store.key.replace("c", "/").replace(".", "/").split("/")
    place = int(rest[-2]), int(rest[-1])
    if "unsharded" in name or "alone" in name:
        return [at != place for at in product(*map(range, GRID))]
    if "below" in name:  # a checksum of the whole shard
        whole, damaged = whole[:-4], damaged[:-4]
    index, places = places_of(whole)
    found = []
    for i, j in product(*map(range, GRID)):
        is_whole = (i // CPS[0], j // CPS[1]) != place
        entry = places[(i % CPS[0]) * CPS[1] + j % CPS[1]]
        if not is_whole and damaged[index] == whole[index]:
            at = slice(0) if entry is None else slice(entry[0], sum(entry))
            is_whole = damaged[at] == whole[at]
        found.append(is_whole)
    return found


def read_natively(base: Any) -> list[list[bytes | None]]:
    """Read by zarr without this package, and files by tensorstore, too."""
    if isinstance(base, Path):
        ts = pytest.importorskip("tensorstore")
        spec = {"driver": "zarr3", "kvstore": f"file://{base / 'a'}/"}
        theirs = ts.open(spec, read=True).result().read().result()
        return [[*chunks_of(np.asarray(theirs))], [*chunks_of(zarr.open_array(base, path="a")[:])]]
    objects = {key: cpu.Buffer.from_bytes(value) for key, value in objects_in(base).items()}
    return [[*chunks_of(zarr.open_array(MemoryStore(objects), path="a")[:])]]  # type: ignore[arg-type]


def errors_in(report: CheckReport | None) -> set[str]:
    """Keys with damage that a repair should have put in order."""
    assert report is not None
    return {f.key for f in report.findings if f.severity == "error" and f.repairable}


@pytest.mark.parametrize("name", KINDS)
def test_whole_chunks_are_kept(name: str, tmp_path: Path) -> None:
    """A chunk that could be read before, or whose bytes and place are as they were, has its values.
    Where checksums cover chunks and places, others have these, or what a read gave, or are missing.
    Without a checksum of the index two chunks that claim the same bytes may both be lost, and the
    report names them.
    """
    kind = KINDS[name]
    before: list[bytes] = []
    for store in damaged_stores(name, tmp_path, N_DAMAGES):
        base, says = store.base, store.says
        before = before or chunks_of(values_of(kind, store.whole))
        damaged, seen = objects_in(base), kind.read(base)
        report = check_store(base, level="decode")
        repair_store(report)
        assert objects_in(base) == damaged, f"{says}: a dry run writes nothing"
        if report.is_clean:
            continue
        repaired = repair_store(report, dry_run=False)
        left = {action.key for action in repaired.actions if action.did == "left"}
        assert errors_in(repaired.check) == left, says
        assert not left or objects_in(base) == damaged, f"{says}: a shard that is left is as it was"
        reads = [kind.read(base)]
        if not left and not any(part in name for part in NOT_NATIVE):
            reads += read_natively(base)
        is_whole = untouched(name, store, damaged[store.key])
        is_covered = kind.has_checksum and kind.has_index_checksum and "below" not in name
        is_covered &= store.damage not in (splice, duplicate)  # of whole chunks and their entries
        named = {chunk for action in repaired.actions for chunk in action.lost if not left}
        for i, old in enumerate(before):
            for now in reads:
                is_doubtful = not kind.has_index_checksum and divmod(i, GRID[1]) in named
                if is_whole[i] or (seen[i] == old and not is_doubtful):
                    assert now[i] == old or store.key in left, f"{says}: chunk {i} was whole"
                elif is_covered:
                    assert now[i] in (old, seen[i], bytes(len(old))), f"{says}: chunk {i} is new"
        names = [repaired.quarantine]
        if left:
            dropped = repair_store(check_store(base, level="decode"), keep="drop", dry_run=False)
            assert not errors_in(dropped.check), says
            names = [dropped.quarantine, *filter(None, names)]
        for quarantine in names:
            restore_quarantine(base, quarantine)
        assert objects_in(base) == damaged, f"{says}: the original"
