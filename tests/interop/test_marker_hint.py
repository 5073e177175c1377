"""Readers that meet the v2 marker below the store, where this package is installed.

numcodecs finds the codec by an entry point. So that no test depends on how this tree is installed,
a distribution is made of what `pyproject.toml` says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_shardstore
from zarr_shardstore import ShardingStore

ROOT = Path(zarr_shardstore.__file__).parents[1]
OLD_PYTHON = os.environ.get("ZARR_SHARDSTORE_ZARR218")

READ = """
import json, sys, zarr
path, outcomes = sys.argv[1], {}
ways = {
    "array": lambda: zarr.open_array(path, path="z", mode="r+"),
    "any": lambda: zarr.open(path, path="z", mode="r+"),
    "group": lambda: zarr.open_group(path, mode="r+")["z"],
    "consolidated": lambda: zarr.open_consolidated(path, mode="r+")["z"],
}
for name, open_ in ways.items():
    try:
        z = open_()
        z[:2] = 0
        outcomes[name] = "written"
    except Exception as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
own = [name for name in sys.modules if name.startswith("zarr_shardstore.")]
print(json.dumps([outcomes, own]))
"""


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A ``PYTHONPATH`` with this tree, and a distribution with its entry points."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    made = tmp_path / "site" / "of_this_tree-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: of-this-tree\nVersion: 0\n")
    lines: list[str] = []
    for group, names in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in names.items())]
    (made / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join([str(made.parent), str(ROOT)])


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A store with a sharded v2 array `z`, which is as it was at the end."""
    store = ShardingStore(tmp_path / "base.zarr", chunks_per_shard=2)
    root = zarr.open_group(store, mode="w", zarr_format=2)
    root.create_array("z", shape=(8,), chunks=(2,), dtype="u1")[:] = np.arange(8)
    zarr.consolidate_metadata(store, zarr_format=2)
    yield tmp_path / "base.zarr"
    z: Any = zarr.open_array(store, path="z", mode="r")
    np.testing.assert_array_equal(z[:], np.arange(8))


@pytest.mark.parametrize("python", [sys.executable, OLD_PYTHON])
def test_zarr_names_the_ways_to_read_it(
    python: str | None, base: Path, installed: str, tmp_path: Path
) -> None:
    """In each way to open it, before a write, without an import; zarr-python 2.18.7, too."""
    if python is None:
        pytest.skip("ZARR_SHARDSTORE_ZARR218 names no Python")
    environment = {**os.environ, "PYTHONPATH": installed}
    command = [python, "-W", "ignore", "-c", READ, str(base)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    outcomes, modules = json.loads(done.stdout)
    for way, outcome in outcomes.items():
        for words in ("SpecError", "`ShardingStore`", "`zarr-shardstore to-native`"):
            assert words in outcome, (way, outcome)
    light = {"errors", "metadata", "metadata.marker_codec"}
    assert set(modules) == {f"zarr_shardstore.{name}" for name in light}
