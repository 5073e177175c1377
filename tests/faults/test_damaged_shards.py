"""Any operation on a damaged shard, then any other, then every read: see `tests.faults.damages`."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.damages import DAMAGES, Case, all_cases
from tests.faults.small_shards import SEED, a_seed

N_CASES = 8
"""Of each damage. ``python -m tests.faults.damages`` runs all there are."""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, if there is such a file system."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_stays_visible_and_takes_nothing_along(damage: str, memory: Path) -> None:
    seed = a_seed()
    cases = [case for case in all_cases(seed) if case.damage == damage]
    for number, case in enumerate(random.Random(seed).sample(cases, N_CASES)):
        run(case, memory / str(number))


def run(case: Case, root: Path) -> None:
    try:
        case.run(root)
    except Exception as error:
        raise AssertionError(f"{SEED}={case.seed}: {case}\n{error}") from error
