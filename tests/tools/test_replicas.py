"""Checks and repairs that ask a replica, and copies of shards that a killed writer was changing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import (
    ShardingStore,
    check_store,
    repair_store,
    shard_store,
)


def filled(path: Path, values: Any, n: int, **options: Any) -> None:
    with ShardingStore(path, chunks_per_shard=n) as store:
        options = {"shape": (len(values),), "chunks": (1,), **options}
        zarr.create_array(store, name="a", **options)[:] = values


def test_a_shard_of_many_entries_comes_from_the_replica(tmp_path: Path) -> None:
    """Most of its index is cut off."""
    values = np.arange(300) % 250
    for name in ("bad", "replica"):
        filled(tmp_path / name, values, 70000, dtype="u1", compressors=None)
    os.truncate(tmp_path / "bad/a/c/0", 290)
    repair_store(check_store(tmp_path / "bad"), source=tmp_path / "replica", dry_run=False)
    assert np.array_equal(zarr.open_array(tmp_path / "bad/a")[:], values)


def test_a_replica_of_strings_with_other_codecs(tmp_path: Path) -> None:
    values = np.array(["a", "bé", "cc", "d"], dtype=object)
    filled(tmp_path / "bad", values, 4, dtype=str)
    filled(tmp_path / "replica", values, 2, dtype=str, compressors=None)
    shard = tmp_path / "bad/a/c/0"
    os.truncate(shard, shard.stat().st_size - 30)
    repair_store(check_store(tmp_path / "bad"), source=tmp_path / "replica", dry_run=False)
    assert zarr.open_array(tmp_path / "bad/a")[:].tolist() == values.tolist()  # type: ignore[union-attr]


def test_damage_of_the_source_is_named(tmp_path: Path) -> None:
    """Otherwise its chunks count as not missing."""
    pytest.importorskip("typer")
    for name in ("here", "source"):
        filled(tmp_path / name, np.ones(16), 4, dtype="u1")
    (tmp_path / "here/a/c/1").unlink()
    with (tmp_path / "source/a/c/1").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"xxx")
    command = [sys.executable, "-m", "zarr_shardstore", "fsck", "here", "--missing"]
    found = subprocess.run([*command, "--source", "source"], cwd=tmp_path, capture_output=True)
    assert found.returncode == 1
    assert b"in the source, shard 'a/c/1'" in found.stdout + found.stderr


def test_names_that_are_no_text(tmp_path: Path) -> None:
    filled(tmp_path / "s", np.arange(1, 9), 1, dtype="u1")
    os.rename(tmp_path / "s/a", os.fsencode(tmp_path / "s") + b"/caf\xe9")
    shard_store(tmp_path / "s", tmp_path / "t", chunks_per_shard=4)
    shard_store(tmp_path / "s", chunks_per_shard=4)
    for name in ("s", "t"):
        assert check_store(tmp_path / name, level="decode").n_chunks == 8
