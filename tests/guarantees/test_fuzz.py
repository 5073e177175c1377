"""Damaged bytes, documents and replies give right bytes or a typed error, in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")
pytest.importorskip("tensorstore")
pytest.importorskip("aiohttp")
pytest.importorskip("obstore")


def test_a_short_run_of_each_target(tmp_path: Path) -> None:
    """Made inputs, those that once failed, and mutations, the same in each run.

    In a process of its own, whose memory is bounded. ``make fuzz`` runs longer, and draws others.
    """
    command = [sys.executable, "-m", "tests.fuzz", "--short", "--failures", str(tmp_path)]
    seed = os.environ.get("ZARR_SHARDSTORE_SEED", "0")
    done = subprocess.run(
        [*command, "--seed", seed],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    traces = [path.read_text() for path in tmp_path.rglob("*.txt")]
    assert done.returncode == 0, "\n".join([f"seed {seed}", done.stdout, done.stderr, *traces])
