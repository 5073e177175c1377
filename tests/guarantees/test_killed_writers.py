"""Processes that write chunks are killed, at many moments: what they were told is stored, is.

``ZARR_SHARDSTORE_KILLS`` is the number of kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import zarr

from tests.support import write_until_killed
from tests.support.any_size import INDEX_CODECS, Location, declare
from tests.support.kit import tuned
from tests.support.processes import MAX_SECONDS, forks_of
from tests.support.shard_bytes import places_in
from tests.support.side_files import is_side_file
from tests.support.write_until_killed import Layers, State, applied, content, key_of, stored
from zarr_shardstore import ShardingMapping

N_KILLS = int(os.environ.get("ZARR_SHARDSTORE_KILLS", "84"))

Change = dict[int, Layers | None]
WriteStrategy: TypeAlias = Literal["append", "rewrite"]
STRATEGIES: dict[str, tuple[WriteStrategy, ...]] = {
    "append": ("append",),
    "rewrite": ("rewrite",),
    "two that append": ("append", "append"),
    "one of each": ("append", "rewrite"),
}
LOCATIONS: tuple[Location, ...] = ("end", "start")
N_CASES = len(STRATEGIES) * len(INDEX_CODECS) * len(LOCATIONS)


class Writers:
    """Starts writers, by forks of a process that has imported everything."""

    def __init__(self, ask: Callable[[dict[str, Any]], int]) -> None:
        self._ask = ask

    def start(self, request: dict[str, Any]) -> int:
        """Number of the process."""
        return self._ask({"fork": request})

    def wait(self, pid: int) -> int:
        """How it ended."""
        return self._ask({"wait": pid})


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    with forks_of(write_until_killed.__file__) as ask:
        yield Writers(ask)


class Array:
    """An array in two and a half shards, which knows what it should hold.

    Parameters
    ----------
    root
        Directory of the store.
    cps
        Chunks per shard.
    checksum, location
        Of the index.
    """

    def __init__(self, root: Path, cps: int, checksum: str, location: Location) -> None:
        self.root = root
        self.cps = cps
        self.checksum = checksum
        self.location = location
        self.n_chunks = 5 * cps // 2
        self.state: State = {}
        self.version = 0
        declare(root, "z", self.n_chunks, cps, checksum=checksum, location=location)

    def side_files(self) -> list[str]:
        names = os.listdir(self.root / "z/c") if (self.root / "z/c").exists() else []
        return [name for name in names if is_side_file(name) and not name.endswith(".partial")]

    def repairs(self) -> list[str]:
        """What is wrong in the bytes of the shards that are not whole, and that are read."""
        reasons = []
        found = self.found()
        for shard in range(-(-self.n_chunks // self.cps)):
            path = self.root / key_of(shard)
            if path.exists():
                first = shard * self.cps
                ours = [found.get(i) for i in range(first, first + self.cps)]
                try:
                    if self._read_alone(path.read_bytes()) != ours:
                        reasons.append("entries")
                except AssertionError:
                    reasons.append("checksum")
        return reasons

    def _read_alone(self, data: bytes) -> list[bytes | None]:
        """The entries of a shard as its bytes say it, without a journal."""
        checksum = self.checksum == "crc32c"
        places = places_in(data, self.cps, checksum=checksum, location=self.location)
        return [None if place is None else data[place[0] : sum(place)] for place in places]

    # ------------------------------------------------------------------ checks

    def found(self) -> dict[int, bytes]:
        """What a store that was just opened says."""
        m = ShardingMapping(self.root, read_only=True)
        keys = [key_of(i) for i in range(self.n_chunks)]
        values = m.get_partial_values([(key, (0, None)) for key in keys])
        present = {i: value for i, value in enumerate(values) if value is not None}
        assert sorted(m.list_prefix("z/c/")) == sorted(map(key_of, present))
        return present

    def settle(self, in_flight: Change) -> list[str]:
        """Check what is stored after a kill, and keep it; what became of the call in flight in
        each shard."""
        found = self.found()
        outcomes = []
        shards: dict[int, Change] = {}
        for i, layers in in_flight.items():
            shards.setdefault(i // self.cps, {})[i] = layers
        for change in shards.values():
            after = applied(self.state, change)
            if all(found.get(i) == _stored(i, after) for i in change):
                is_new = any(found.get(i) != _stored(i, self.state) for i in change)
                outcomes.append("new" if is_new else "same")
                self.state = after
            else:
                outcomes.append("old")
        self._compare(found)
        return outcomes

    def check(self) -> None:
        """Check that nothing has changed."""
        self._compare(self.found())

    def _compare(self, found: dict[int, bytes]) -> None:
        assert sorted(found) == sorted(self.state)
        for i, value in found.items():
            assert value == stored(i, self.state[i]), (i, self.state[i])

    def check_natively(self) -> None:
        """Check what zarr reads by itself."""
        found: Any = zarr.open_array(self.root, path="z", mode="r")[:]
        for i in range(self.n_chunks):
            assert found[i] == content(i, self.state.get(i, [])), (i, self.state.get(i))

    def recover(self, strategy: WriteStrategy) -> None:
        """Go on where a writer was killed: one chunk of each shard, then bring all to rest."""
        m = ShardingMapping(self.root, strategy=strategy)
        for first in range(0, self.n_chunks, self.cps):
            self.version += 1
            self.state[first] = [[0, self.version, 20]]
            m[key_of(first)] = stored(first, self.state[first])
        self.check()
        m.flush()
        assert self.side_files() == []
        self.check()
        self.check_natively()


def _stored(i: int, state: State) -> bytes | None:
    return stored(i, state[i]) if i in state else None


def _lines(log: Path) -> list[tuple[str, Change]]:
    """What a writer has said. A line that is cut off is of a call that was not begun."""
    if not log.exists():
        return []
    lines = [json.loads(x) for x in log.read_text().splitlines(keepends=True) if x[-1] == "\n"]
    assert not lines or lines[-1][0] != "error", lines[-1][1]
    return [(kind, {int(i): layers for i, layers in new.items()}) for kind, new in lines]


def kill_one(
    writers: Writers, array: Array, strategies: tuple[str, ...], rng: random.Random
) -> tuple[str, list[str], list[str]]:
    """Let writers write, and kill one of them; what it was doing, what is to be repaired, and
    what became of it.

    If there is another one it goes on for a while, then ends after the operation under way.
    """
    durability = rng.choice(("process", "process", "power"))
    victim = rng.randrange(len(strategies))
    only_shards = strategies[victim] != "rewrite" and rng.random() < 0.7
    stop_at = rng.choice((None, (rng.randint(1, 20 if only_shards else 40), only_shards)))
    pids, logs = [], []
    array.version += 1_000_000
    for rank, strategy in enumerate(strategies):
        log = array.root / f"log-{rank}"
        log.unlink(missing_ok=True)
        mine = range(rank, array.n_chunks, len(strategies))
        request = {
            "path": str(array.root),
            "options": {"strategy": strategy, "durability": durability},
            "mine": list(mine),
            "state": {i: array.state[i] for i in mine if i in array.state},
            "version": array.version,
            "seed": rng.random(),
            "stop_at": stop_at if rank == victim else None,
            "log": str(log),
        }
        pids.append(writers.start(request))
        logs.append(log)
    begun = time.monotonic()
    n_lines = rng.choice((1, 2, 3, 6, 12))
    while not (
        all(_lines(log) for log in logs)
        and (
            len(_lines(logs[victim])) >= n_lines
            if stop_at is None
            else _lines(logs[victim])[-1][0] == "here"
        )
    ):
        assert time.monotonic() < begun + MAX_SECONDS
        time.sleep(0.0005)
    if stop_at is None:
        time.sleep(rng.uniform(0, 0.005))
    os.kill(pids[victim], signal.SIGKILL)
    ends = {victim: writers.wait(pids[victim])}
    if len(pids) > 1:
        time.sleep(rng.uniform(0, 0.02))
        os.kill(pids[1 - victim], signal.SIGTERM)
        ends[1 - victim] = writers.wait(pids[1 - victim])
    kind, in_flight = "nothing", Change()
    for rank, log in enumerate(logs):
        lines = _lines(log)
        changes = [line for line in lines if line[0] not in ("done", "here")]
        if lines[-1][0] != "done":
            assert rank == victim
            kind, in_flight = changes.pop()
        for _, change in changes:
            array.state = applied(array.state, change)
        assert ends[rank] == (-signal.SIGKILL if rank == victim else 0)
    repairs = array.repairs()
    return kind, repairs, array.settle(in_flight)


@pytest.mark.thorough(of=20)
@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("checksum", INDEX_CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_writers(
    strategy: str, checksum: str, location: Location, writers: Writers, tmp_path: Path
) -> None:
    """Every acknowledged value is there, of the call that was cut off all of a shard or nothing;
    reading finds that, writing goes on, and then zarr reads the same by itself."""
    rng = random.Random(f"{strategy} {checksum} {location}")
    kinds: Counter[str] = Counter()
    repairs: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    arrays = [
        Array(tmp_path / str(n), cps, checksum, location) for n, cps in enumerate((6, 6, 400))
    ]
    with tuned(lock_wait_s=10.0):
        # Until one was killed in the middle of a change, where nobody else goes on and repairs it.
        changes_files = STRATEGIES[strategy] == ("append",)
        while kinds.total() < N_KILLS // N_CASES or (changes_files and not repairs):
            array = rng.choice(arrays)
            kind, to_repair, outcome = kill_one(writers, array, STRATEGIES[strategy], rng)
            kinds[kind] += 1
            repairs.update(to_repair)
            outcomes.update(outcome)
            if rng.random() < 0.6:
                array.recover(rng.choice(STRATEGIES[strategy]))
    print(strategy, checksum, location, dict(kinds), dict(repairs), dict(outcomes))
