"""What the benchmarks assert of bytes and requests holds, also where nobody looks at times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def output_of(script: str, tmp_path: Path) -> str:
    """What a benchmark prints, small and once."""
    command = [sys.executable, "-W", "error", str(BENCHMARKS / script), "--quick"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)},  # some share code with the tests
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
def test_writes(tmp_path: Path) -> None:
    """Each part runs and prints its table."""
    printed = output_of("writes.py", tmp_path)
    for telling in ("chunk by chunk", "updates", "z[...] = data", "object store", "slices of"):
        assert telling in printed


@pytest.mark.thorough
def test_reads(tmp_path: Path) -> None:
    """Each part runs, prints its table, and asks for no more than is promised."""
    printed = output_of("reads.py", tmp_path)
    tables = ("bytes from shards", "read_chunks", "random chunks", "z[:]", "cold", "requests: ")
    for telling in tables:
        assert telling in printed


@pytest.mark.thorough
def test_beside_tensorstore(tmp_path: Path) -> None:
    """Each part runs, prints its table, and stores each shard once."""
    printed = output_of("beside_tensorstore.py", tmp_path)
    for telling in ("chunks of 16³", "chunks of 32³", "read, warm: ours", "in a batch"):
        assert telling in printed


@pytest.mark.thorough
def test_whole_arrays(tmp_path: Path) -> None:
    """Each contestant reads the values that it wrote; this package stores each shard once."""
    printed = output_of("whole_arrays.py", tmp_path)
    tables = ("chunks of 32³", "warm read: ours, direct", "2 threads: ours", "round trip: ours")
    for telling in tables:
        assert telling in printed


@pytest.mark.thorough
def test_uncoordinated_writers(tmp_path: Path) -> None:
    """All writes are acknowledged, and this package loses none."""
    pytest.importorskip("moto.server")
    printed = output_of("uncoordinated_writers.py", tmp_path)
    for telling in ("4 writers", "lost", "tensorstore"):
        assert telling in printed
    assert re.search(r"^  ours +8/8 ", printed, re.M)


@pytest.mark.thorough
def test_imports(tmp_path: Path) -> None:
    """Both methods run."""
    printed = output_of("imports.py", tmp_path)
    for telling in ("256 chunks of 64 KiB", "import_store", "tar cf"):
        assert telling in printed


def test_fsck(tmp_path: Path) -> None:
    """Each level runs; each shard is opened once."""
    printed = output_of("fsck.py", tmp_path)
    for telling in ("listed twice", "ratio", "decode", "peak memory", "files opened"):
        assert telling in printed


def test_start(tmp_path: Path) -> None:
    """Imports and the command line are clocked."""
    printed = output_of("start.py", tmp_path)
    for telling in ("import zarr", "import ShardingStore, after zarr", "--version", "--help"):
        assert telling in printed


@pytest.mark.thorough
def test_threads(tmp_path: Path) -> None:
    assert "os.stat" in output_of("threads.py", tmp_path)
