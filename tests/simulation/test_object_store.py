"""Every promise of writers and readers of an object store holds in every simulated schedule.

A failure prints its seed, its programs and its schedule. ``ZARR_SHARDSTORE_SEED`` with this seed
runs it again, as the first one of `test_random_schedules`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.object_store_runs import ObjectStoreRuns
from tests.simulation.programs import Scenario, Stranger, cases, run_all, run_seed, without_gc
from tests.simulation.scheduler import Replay
from tests.support.rounds import rounds
from tests.support.shard_calls import (
    SHARDS,
    Call,
    Compact,
    Erase,
    Exists,
    Patch,
    Read,
    Set,
    SetIfMissing,
    Update,
)
from tests.support.small_shards import a_seed

N_SCHEDULES = 72_500
"""Random ones, the same each time. With the enumerated ones the suite runs 100,000 schedules."""
N_PARTS = 10
"""Of them, for several workers."""

KEYS = SHARDS["inside"]
BARE = SHARDS["without checksum"]
ONE: Sequence[Call] = [Set(((KEYS[0], b"one"),))]
TWO: Sequence[Call] = [Set(((KEYS[1], b"second"),))]
ALL: Sequence[Call] = [Set(tuple((key, b"all") for key in KEYS))]
ADD: Sequence[Call] = [Update(KEYS[:1], 1)]
ADD_TOO: Sequence[Call] = [Update(KEYS[:1], 2)]
ERASE: Sequence[Call] = [Erase(KEYS[:1])]
ERASE_ALL: Sequence[Call] = [Erase(tuple(KEYS))]
FILL: Sequence[Call] = [SetIfMissing(KEYS[1], b"filled")]
PATCH: Sequence[Call] = [Patch(((KEYS[0], 1, b"patch"),))]
READ: Sequence[Call] = [Read(tuple((key, 0, 1000) for key in KEYS))]
OLD = Set(((KEYS[0], b"old"), (KEYS[2], b"stay")))

SMALL = {
    "two writers": Scenario([ONE, TWO], OLD, n_faults=1, n_kills=1),
    "two writers of one chunk": Scenario([ADD, ADD_TOO], OLD, n_faults=2),
    "two equal updates": Scenario([ADD, ADD], OLD, n_faults=1),
    "two writers, no shard": Scenario([ADD, TWO], n_faults=1, n_kills=1),
    "a reader beside a writer": Scenario([ADD, READ], OLD, n_faults=1, n_kills=1),
    "a reader with a cached index": Scenario([ALL, READ], OLD, is_warm=True, n_faults=2),
    "two reads beside a writer": Scenario([PATCH, [*READ, *READ]], OLD, is_warm=True, n_faults=1),
    "an eraser beside a writer": Scenario([ERASE, TWO], OLD, is_warm=True, n_faults=1),
    "two erasers, then nothing is left": Scenario([ERASE, ERASE], Set(OLD.items[:1]), n_faults=1),
    "a compaction beside an eraser and a writer": Scenario([[Compact()], [*ERASE_ALL, *TWO]], OLD),
    "group commit that ends as it began": Scenario([ONE, ERASE, TWO], processes=(0, 0, 1)),
    "one writer, bad network": Scenario([ADD], OLD, n_faults=3),
    "late requests": Scenario([ADD, TWO], OLD, n_faults=1, faults=["late"]),
    "another program": Scenario(
        [ADD, READ], OLD, strangers=[Stranger("inside", ((KEYS[1], b"theirs"),))]
    ),
    "two replacements while a failed read is repeated": Scenario(
        [[Exists(BARE[1])]],
        Set(((BARE[0], b"old"),)),
        n_faults=1,
        strangers=[
            Stranger("without checksum", ((BARE[0], b""),)),
            Stranger("without checksum", ((BARE[0], b"theirs"), (BARE[2], b"theirs"))),
        ],
    ),
    "three writers": Scenario([ADD, FILL, PATCH], OLD),
}
"""Programs all of whose schedules are run."""

LONG = {"two writers of one chunk", "two writers, no shard"}
"""Those with thousands of schedules, for thorough runs."""


@pytest.fixture(scope="module")
def runs() -> ObjectStoreRuns:
    return ObjectStoreRuns()


@pytest.mark.parametrize("scenario", cases(SMALL, LONG))
def test_every_schedule(scenario: Scenario, runs: ObjectStoreRuns) -> None:
    """Of small programs, with all faults and kills at all places."""
    with without_gc():
        assert run_all(runs, scenario) > 1


def test_a_state_that_comes_back_between_two_reads(runs: ObjectStoreRuns) -> None:
    """An update that has read two states of a shard is not committed upon the first."""
    first, second, third = SHARDS["without checksum"]
    old = Set(((first, b"old"),))
    eraser = [Erase((first, second))]
    scenario = Scenario([[Update((third,), 1)], eraser, [Update((third,), 5)]], old, is_warm=True)
    runs(scenario, Replay([0, 1, 2, 0, 0, 1, 0, 1, 0, 0, 0, 0]))


@pytest.mark.parametrize("part", range(N_PARTS))
def test_random_schedules(part: int, runs: ObjectStoreRuns) -> None:
    """Of random programs of two to four clients, with lost, cut and late replies, and kills."""
    n, at_once = rounds(N_SCHEDULES // N_PARTS), N_SCHEDULES // N_PARTS
    seed = a_seed(1) + part * n
    for first in range(seed, seed + n, at_once):
        with without_gc():
            for number in range(first, min(first + at_once, seed + n)):
                run_seed(runs, number)
