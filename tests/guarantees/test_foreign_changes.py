"""Another program changes a shard between any two system calls: see `tests.support.foreign`."""

from __future__ import annotations

import random

import pytest

from tests.support.foreign import KINDS, all_cases, run_some
from tests.support.small_shards import SEED, a_seed, in_memory

N_CASES, N_CALLS = 10, 4
"""Cases of each kind, and calls of each. ``python -m tests.support.foreign`` runs all there are."""


@pytest.mark.thorough(of=12)
@pytest.mark.parametrize("kind", KINDS)
def test_each_chunk_is_what_one_of_the_writers_says(kind: str) -> None:
    seed = a_seed()
    rng = random.Random(seed)
    cases = rng.sample([case for case in all_cases() if case.kind == kind], N_CASES)
    with in_memory() as directory:
        errors = [error for _, error in run_some(directory, cases, rng, N_CALLS) if error]
    assert not errors, f"{SEED}={seed}\n" + "\n\n".join(map(str, errors[:5]))
