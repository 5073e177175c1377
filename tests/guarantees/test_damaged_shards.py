"""Any operation on a damaged shard, then any other, then each read: `tests.support.damages`."""

from __future__ import annotations

import random

import pytest

from tests.support.damages import DAMAGES, all_cases
from tests.support.small_shards import SEED, a_seed, in_memory

N_CASES = 8
"""Of each damage. ``python -m tests.support.damages`` runs all there are."""


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_stays_visible_and_takes_nothing_along(damage: str) -> None:
    seed = a_seed()
    cases = [case for case in all_cases(seed) if case.damage == damage]
    with in_memory() as directory:
        for number, case in enumerate(random.Random(seed).sample(cases, N_CASES)):
            try:
                case.run(directory / str(number))
            except Exception as error:
                raise AssertionError(f"{SEED}={seed}: {case}\n{error}") from error
