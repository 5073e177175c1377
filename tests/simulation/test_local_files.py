"""Every promise of writers and readers of local files holds in every simulated schedule.

The clients are processes, which are killed before any system call and in the middle of any write.
Times tick coarsely, and numbers of inodes come back. A failure prints its seed, its programs and
its schedule; ``ZARR_SHARDSTORE_SEED`` runs it again, as the first of `test_random_schedules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.simulation.local_runs import LocalRuns
from tests.simulation.programs import Scenario, cases, local_scenario, run_all, run_seed, without_gc
from tests.simulation.test_object_store import ADD, ADD_TOO, ALL, ERASE, OLD, ONE, READ, TWO
from tests.support.rounds import rounds
from tests.support.shard_calls import Set
from tests.support.small_shards import a_seed

N_SCHEDULES = 12_000
"""Random ones, the same each time."""
N_PARTS = 12
"""Of them, for several workers."""

SMALL = {
    "two writers": Scenario([ONE, TWO], OLD, n_kills=1),
    "two writers, no shard": Scenario([ONE, TWO]),
    "a writer beside an eraser": Scenario([ONE, ERASE], Set(OLD.items[:1])),
    "a reader beside a writer": Scenario([ONE, READ], OLD, n_kills=1),
    "a reader with a cached index": Scenario([ONE, READ], OLD, is_warm=True),
    "a reader beside a whole write": Scenario([ALL, READ], OLD, is_warm=True),
    "two writers, both have appended": Scenario([ONE, TWO], OLD, n_kills=1, is_open=True),
    "two updates, both have appended": Scenario([ADD, ADD_TOO], OLD, is_open=True),
    "an eraser beside a writer, both have appended": Scenario(
        [ONE, ERASE], OLD, n_kills=1, is_open=True
    ),
    "a reader, both have appended": Scenario([ONE, READ], OLD, n_kills=1, is_open=True),
    "a cached index, both have appended": Scenario([ONE, READ], OLD, is_warm=True, is_open=True),
}
"""Programs all of whose schedules are run."""

LONG = {
    "two writers",
    "a reader beside a writer",
    "a reader with a cached index",
    "a reader, both have appended",
    "a cached index, both have appended",
}
"""Those with thousands of schedules, for thorough runs."""


@pytest.fixture(scope="module")
def runs() -> Iterator[LocalRuns]:
    with LocalRuns() as found:
        yield found


@pytest.mark.parametrize("scenario", cases(SMALL, LONG))
def test_every_schedule(scenario: Scenario, runs: LocalRuns) -> None:
    """Of small programs, with a kill at all places."""
    with without_gc():
        assert run_all(partial(runs, is_reduced=True), scenario) > 1


@pytest.mark.parametrize("part", range(N_PARTS))
def test_random_schedules(part: int, runs: LocalRuns) -> None:
    """Of random programs of two to four processes, some of which are killed."""
    n, at_once = rounds(N_SCHEDULES // N_PARTS), N_SCHEDULES // N_PARTS
    seed = a_seed(1) + part * n
    for first in range(seed, seed + n, at_once):
        with without_gc():
            for number in range(first, min(first + at_once, seed + n)):
                run_seed(runs, number, local_scenario)
