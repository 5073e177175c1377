"""Rows that several processes append to the same arrays: each is there, once.

Chunks have 8 rows, so the processes also share chunks.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support import append_until_killed
from tests.support.append_until_killed import SHAPE
from tests.support.convert_once import open_store
from tests.support.processes import forks_of, s3_server
from tests.support.rounds import rounds
from zarr_shardstore import ShardingStore, check_store

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]


class Writers:
    """Writers in processes of their own, which tell each row in one log."""

    def __init__(self, ask: Callable[[dict[str, Any]], int], log: Path) -> None:
        self._ask, self.log = ask, log

    def start(self, where: dict[str, Any], writer: int, n_slabs: int, **more: Any) -> int:
        request = {"where": where, "writer": writer, "n_slabs": n_slabs, "log": str(self.log)}
        return self._ask(request | more)

    def wait(self, number: int) -> int:
        return self._ask({"wait": number})

    def told(self) -> dict[int, int]:
        """The number of each row whose append has returned."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        rows = {int(row): int(number) for row, number in map(str.split, lines)}
        assert len(rows) == len(lines), "two appends have returned one row"
        return rows


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    with forks_of(append_until_killed.__file__) as ask:
        yield Writers(ask, tmp_path / "log")


def create(where: dict[str, Any], zarr_format: Any = 3) -> ShardingStore:
    """Two empty arrays, in a group with consolidated metadata."""
    store = ShardingStore(open_store(where), {"g/run": (2, 1, 1), "g/time": None})
    group = zarr.create_group(store, path="g", zarr_format=zarr_format)
    group.create_array("run", shape=(0, *SHAPE), chunks=(8, *SHAPE), dtype="u4")
    group.create_array("time", shape=(0,), chunks=(8,), dtype="u4")
    zarr.consolidate_metadata(store, zarr_format=zarr_format)
    return store


def check_rows(where: dict[str, Any], told: dict[int, int], zarr_format: Any = 3) -> list[int]:
    """Each row that was told is there, and every row of a known time has all of its values. Return
    the numbers of the rows."""
    store = ShardingStore(open_store(where))
    lengths = []
    for use_consolidated in (True, False):
        group: Any = zarr.open_group(
            store, mode="r", zarr_format=zarr_format, use_consolidated=use_consolidated
        )
        run, time = group["g/run"][:], group["g/time"][:]
        lengths.append((len(run), len(time)))
        for row, number in told.items():
            assert time[row] == number
        has_time = time != 0
        np.testing.assert_array_equal(run[: len(time)][has_time], values_of(time[has_time]))
    numbers = [int(number) for number in time if number]
    assert len(numbers) == len(set(numbers)), "a row is there twice"
    assert lengths[0] == (len(time), len(time)), "consolidated metadata has another length"
    return numbers


def values_of(numbers: Any) -> Any:
    return np.broadcast_to(numbers[:, None, None], (len(numbers), *SHAPE))


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield where


@pytest.mark.parametrize("zarr_format", [3, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("local", {}),
        ("local", {"strategy": "rewrite"}),
        ("local", {"locking": "lockfile"}),
        ("obstore local", {}),
        ("s3", {}),
    ],
)
def test_six_processes(
    kind: str,
    options: dict[str, Any],
    zarr_format: int,
    writers: Writers,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """All rows of all are there, each once, and the documents are valid."""
    where = {"kind": kind, "path": str(tmp_path / "a.zarr")}
    if kind == "s3":
        where = request.getfixturevalue("s3") | {"prefix": f"append/{zarr_format}"}
    n_slabs = 8 if kind == "s3" else 20
    create(where, zarr_format)
    started = [writers.start(where, k, n_slabs, options=options) for k in range(6)]
    assert [writers.wait(number) for number in started] == [0] * 6
    told = writers.told()
    assert sorted(told) == list(range(6 * n_slabs))
    numbers = check_rows(where, told, zarr_format)
    assert numbers == [told[row] for row in range(6 * n_slabs)]
    assert sorted(numbers) == sorted(1000 * k + i + 1 for k in range(6) for i in range(n_slabs))
    found = check_store(open_store(where), level="decode").findings
    assert [f for f in found if f.severity == "error"] == []


def test_a_kill_at_any_system_call(writers: Writers, tmp_path: Path) -> None:
    """Rows of fill values may be left. No other writer, beside or after the kill, loses a row."""
    rng = random.Random(5)
    killed = 0
    positions = sorted(rng.sample(range(90), min(90, rounds(64))))
    for n_calls in positions:
        where = {"kind": "local", "path": str(tmp_path / f"{n_calls}.zarr")}
        writers.log.unlink(missing_ok=True)
        create(where)
        started = [
            writers.start(where, 0, 6, stop_at=n_calls),
            writers.start(where, 1, 6),
        ]
        ended, other = map(writers.wait, started)
        assert ended in (0, -signal.SIGKILL)
        assert other == 0
        killed += ended != 0
        assert writers.wait(writers.start(where, 2, 3)) == 0
        told = writers.told()
        numbers = check_rows(where, told)
        assert {n for n in numbers if n > 1000} == {*range(1001, 1007), *range(2001, 2004)}
        of_killed = [n for n in numbers if n < 1000]
        assert of_killed == list(range(1, len(of_killed) + 1))
        assert len(of_killed) - sum(n < 1000 for n in told.values()) in (0, 1)
        found = check_store(where["path"], level="decode").findings
        assert [f for f in found if f.severity == "error"] == []
    assert killed > len(positions) // 3
