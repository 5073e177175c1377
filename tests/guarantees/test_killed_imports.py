"""Imports are killed, at many moments: what is visible is whole, and the next run finishes.

``ZARR_SHARDSTORE_KILLS`` is the number of kills.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support import import_until_killed
from tests.support.processes import forks_of
from tests.support.rounds import rounds
from tests.support.stops import empty_directories

h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")

N_KILLS = int(os.environ.get("ZARR_SHARDSTORE_KILLS", rounds(40)))
MAX_SECONDS, MOST_CALLS = 1.0, 400
"""An undisturbed import takes about as long, and changes files as often."""
VALUES = np.arange(40 * 30, dtype="i4").reshape(40, 30)


def make(path: Path) -> None:
    """Chunks to copy, with filters and without, missing ones, and some to encode again."""
    with h5py.File(path, "w") as file:
        file.create_dataset("gzip", data=VALUES, chunks=(4, 5), compression=1, shuffle=True)
        file.create_dataset("a/raw", data=VALUES, chunks=(4, 5))
        file.create_dataset("a/lzf", data=VALUES, chunks=(8, 10), compression="lzf")
        file.create_dataset("sparse", (40, 30), "f4", chunks=(4, 5))[9:20, 7:20] = 1
        file["texts"] = ["ä", "b"]
        file["scalar"] = 1.5


def files_in(root: Path) -> dict[str, bytes]:
    """All files, temporary ones of arrays, too; a kill may leave one beside that of a group."""
    groups = (root, root / "a")
    files = [path for path in root.rglob("*") if path.is_file()]
    kept = [path for path in files if path.parent not in groups or path.suffix != ".partial"]
    return {str(path.relative_to(root)): path.read_bytes() for path in kept}


def values_of(file: Any, name: str) -> Any:
    dataset = file[name]
    return (dataset.asstr() if dataset.dtype.kind == "O" else dataset)[()]


def check_visible(path: Path, out: Path) -> int:
    """Each array that plain zarr opens has all its values; return the number of those."""
    n_visible = 0
    with h5py.File(path) as file:
        for name in ("gzip", "a/raw", "a/lzf", "sparse", "texts", "scalar"):
            if (out / name / "zarr.json").exists():
                found: Any = zarr.open_array(out / name, mode="r")
                np.testing.assert_array_equal(found[()], values_of(file, name), err_msg=name)
                n_visible += 1
    return n_visible


def test_an_array_is_visible_when_it_is_whole_and_the_next_run_finishes(tmp_path: Path) -> None:
    """Killed once or several times in a row; at the end the files are those of one run."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    source = tmp_path / "in.h5"
    make(source)
    before = source.read_bytes(), source.stat().st_mtime_ns
    options = {"chunks_per_shard": 3, "recode": True}
    n_visible: Counter[int] = Counter()
    with forks_of(import_until_killed.__file__) as start:
        request = {"source": str(source), "options": options}
        assert start({**request, "destination": str(tmp_path / "whole")}) == 0
        whole = files_in(tmp_path / "whole")
        for n in range(N_KILLS):
            out = tmp_path / str(n)
            status = -9
            while status == -9:
                how: dict[str, Any] = {"n": rng.randint(1, MOST_CALLS)}
                if rng.random() < 0.3:
                    how = {"seconds": rng.uniform(0, MAX_SECONDS)}
                status = start({**request, **how, "destination": str(out)})
                if status == -9:
                    n_visible[check_visible(source, out)] += 1
                assert status in (0, -9), (seed, n, how)
            assert files_in(out) == whole, (seed, n)
            assert empty_directories(out) == empty_directories(tmp_path / "whole"), (seed, n)
    assert (source.read_bytes(), source.stat().st_mtime_ns) == before
    assert len(n_visible) > 1 or N_KILLS < 10, n_visible  # some came early, some late
