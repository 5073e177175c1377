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
        options = {"shape": np.shape(values), "chunks": (1,), **options}
        zarr.create_array(store, name="a", **options)[:] = values


def fsck(path: Path, *args: str) -> Any:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "zarr_shardstore", "fsck", *args]
    return subprocess.run(command, cwd=path, capture_output=True, text=True)


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
    for name in ("here", "source"):
        filled(tmp_path / name, np.ones(16), 4, dtype="u1")
    (tmp_path / "here/a/c/1").unlink()
    with (tmp_path / "source/a/c/1").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"xxx")
    found = fsck(tmp_path, "here", "--missing", "--source", "source")
    assert found.returncode == 1
    assert "in the source, shard 'a/c/1'" in found.stdout + found.stderr


def test_chunks_of_a_replica(tmp_path: Path) -> None:
    """Stored are those here, missing those that only the replica has."""
    zeros = np.zeros(4)
    for name, chunk in (("here", 0), ("replica", 1)):
        filled(tmp_path / name, zeros, 2, dtype="u1")
        zarr.open_array(ShardingStore(tmp_path / name), path="a")[chunk] = 1
    for flag, listed in ("--chunks", "a  0  stored\n"), ("--missing", "a  1  missing\n"):
        found = fsck(tmp_path, "here", flag, "--source", "replica")
        assert found.stdout == listed
        assert "1 of 4 chunks stored" in found.stderr


@pytest.mark.parametrize("options", [{"chunks": (4,)}, {"shape": (12,)}, {"chunks": (1,)}])
def test_a_replica_with_other_chunks(tmp_path: Path, options: Any) -> None:
    """The same numbers of chunks, or a region that both have, do not make them comparable."""
    filled(tmp_path / "here", 1, 2, **{"dtype": "u1", "shape": (11,), "chunks": (5,)})
    filled(tmp_path / "there", 1, 2, **{"dtype": "u1", "shape": (11,), "chunks": (5,), **options})
    found = fsck(tmp_path, "here", "--missing", "--region", "0:3", "--source", "there")
    assert (found.returncode, found.stdout) == (2, "")
    assert "no array 'a' with the same chunks" in found.stderr


def test_names_that_are_no_text(tmp_path: Path) -> None:
    filled(tmp_path / "s", np.arange(1, 9), 1, dtype="u1")
    os.rename(tmp_path / "s/a", os.fsencode(tmp_path / "s") + b"/caf\xe9")
    shard_store(tmp_path / "s", tmp_path / "t", chunks_per_shard=4)
    shard_store(tmp_path / "s", chunks_per_shard=4)
    for name in ("s", "t"):
        assert check_store(tmp_path / name, level="decode").n_chunks == 8
