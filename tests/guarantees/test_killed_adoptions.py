"""Adoptions are killed and interrupted, at many moments: each file is as it was, or adopted.

``ZARR_SHARDSTORE_KILLS`` is the number of kills and interrupts of each link.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from tests.support import adopt_until_killed
from tests.support.processes import forks_of
from zarr_shardstore import SpecError, adopt, undo_adoption

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not")

N_KILLS = int(os.environ.get("ZARR_SHARDSTORE_KILLS", "16"))
VALUES = np.arange(2 * 12 * 10, dtype="i4").reshape(24, 10)
MOST = {"call": 40, "line": 260, "interrupt": 260}
"""Calls that open or change a file, and lines of the modules, of two files: adopted, or undone."""


@contextmanager
def adoptions() -> Iterator[Any]:
    with forks_of(adopt_until_killed.__file__) as ask:
        yield lambda **request: ask(request)


def files_in(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def check_foreign_readers(root: Path, link: str) -> None:
    """At each moment h5py opens each file, where it is now, and finds its values."""
    found = []
    for path in root.rglob("*"):
        if path.is_file() and path.read_bytes()[:4] == b"\x89HDF" and ".partial" not in path.name:
            with h5py.File(path) as file:
                found.append(int(file["x"][0, 0]))
    assert set(found) == {0, 120}, link


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("link", ["hard", "symbolic", "move", "copy"])
def test_each_file_is_as_it_was_or_adopted(link: str, tmp_path: Path) -> None:
    """Whatever is killed, also the way back: another call finishes, and all bytes come back."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    outcomes: Counter[Any] = Counter()
    with adoptions() as start:
        for n in range(N_KILLS):
            root = tmp_path / str(n)
            root.mkdir()
            for name, values in (("a.h5", VALUES[:12]), ("b.h5", VALUES[12:])):
                with h5py.File(root / name, "w") as file:
                    file.create_dataset("x", data=values, chunks=(4, 5), compression="gzip")
            paths, dest = [str(root / "a.h5"), str(root / "b.h5")], root / "m.zarr"
            before = files_in(root)
            request = {"files": paths, "dest": str(dest), "link": link}
            how = rng.choice(list(MOST))
            at = rng.randint(1, MOST[how])
            says = f"seed {seed}, {n}: {link}, {how} at {at}"
            outcomes["adopt", start(**request, undo=False, how=how, n=at)] += 1
            check_foreign_readers(root, says)
            if not (dest / "zarr.json").exists():
                if rng.random() < 0.5:
                    with suppress(SpecError):  # nothing was begun
                        undo_adoption(dest)
                    assert files_in(root) == before, says
                adopt(paths, dest, link=link)  # type: ignore[arg-type]
            assert np.array_equal(zarr.open_array(dest, mode="r")[:], VALUES), says
            how = rng.choice(list(MOST))
            at = rng.randint(1, MOST[how])
            says += f"; undo, {how} at {at}"
            outcomes["undo", start(**request, undo=True, how=how, n=at)] += 1
            check_foreign_readers(root, says)
            if (dest / "zarr.json").exists():  # it had not begun
                assert np.array_equal(zarr.open_array(dest, mode="r")[:], VALUES), says
            with suppress(SpecError):
                undo_adoption(dest)
            assert files_in(root) == before, says
    assert all(status in (0, 2, -9) for _, status in outcomes), outcomes
    print(link, dict(outcomes))
