"""Ctrl-C, no memory, or a cancelled task, at any line of any operation: nothing is lost, no change
is half there, nothing hangs, and others go on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zarr_shardstore
from tests.support import interrupts
from tests.support.rounds import N_ROUNDS, rounds

ROOT = Path(zarr_shardstore.__file__).parents[1]

SEED = "ZARR_SHARDSTORE_SEED"
"""Environment variable: which lines are looked at. Each run takes others."""


def run(*options: str) -> list[dict[str, Any]]:
    """In a process that has no threads: each case is forked from it."""
    command = [sys.executable, "-m", interrupts.__name__, "--json", "--max-failures=3", *options]
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert process.returncode in (0, 1), process.stderr.decode()
    return [json.loads(line) for line in process.stdout.splitlines()]


def messages(records: list[dict[str, Any]]) -> str:
    """What failed, and how to see it again."""
    return "\n\n".join(
        f"python -m {interrupts.__name__} --case '{json.dumps(record['case'])}'\n"
        f"at {record['where']}: {record['result']}\n  " + "\n  ".join(record["failures"])
        for record in records
    )


def test_no_exception() -> None:
    """Each operation in each mode, without any: what the others are compared with."""
    *failed, total = run(f"--configurations={rounds(40)}", "--lines=0", "--seed=0")
    assert not failed, messages(failed)
    assert total["n"] == rounds(40)


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "MemoryError", "cancel"])
def test_exception_at_any_line(raised: str) -> None:
    seed = int(os.environ.get(SEED, random.randrange(2**32)))
    only = json.dumps({"raised": raised})
    *failed, total = run(
        f"--seed={seed}", f"--configurations={rounds(12)}", "--lines=3", f"--only={only}"
    )
    assert not failed, f"{SEED}={seed}, {raised}\n{messages(failed)}"
    assert total["n"] > 36 * N_ROUNDS
