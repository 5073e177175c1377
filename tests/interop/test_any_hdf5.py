"""Random HDF5 and NetCDF-4 files: imported, adopted, read by their own readers, and given back."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import any_hdf5
from tests.support.processes import forks_of
from tests.support.rounds import rounds


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[dict[str, Any]], int]]:
    with forks_of(any_hdf5.__file__) as ask:
        yield ask


@settings(max_examples=rounds(160), deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), recode=st.booleans())
def test_any_file(
    rng: random.Random, recode: bool, ask: Callable[[dict[str, Any]], int], tmp_path: Path
) -> None:
    """Import and adoption have the values of h5py or netCDF4, or name what they leave.

    h5py, netCDF4 and h5dump find in an adopted file what they found before, and none of them
    crashes; nor does this package. Undone, the file has its old bytes. A file may follow another
    of its name.
    """
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    recipes = [any_hdf5.a_recipe(rng) for _ in range(rng.choice((1, 2)))]
    request = {"recipes": recipes, "root": str(root), "recode": recode}
    assert ask(request) == 0, "its output says why; a negative number is a signal"


def test_a_reader_that_crashes_is_seen(tmp_path: Path) -> None:
    def crash(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert any_hdf5.FAILED in any_hdf5.in_a_fork(crash, tmp_path)
