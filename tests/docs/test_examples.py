"""Every example runs without an error or a warning, and says what it is about."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 300

TELLING_LINES = {
    "content_addressed.py": "256 chunks in 16 shards have 5 values",
    "draft_hierarchy.py": "refused: 'names/zarr.json'",
    "train.py": "learned: the error is less than half",
    "training_loop.py": "spawn: 8 batches of (32, 16, 32, 32), each sample once",
    "draft_operations.py": "get_partial_values: [b'BCD', b'DE', None]",
    "wrap_existing_store.py": "new, by plain zarr: chunks (2, 5), shards (8, 20)",
    "zarr_array_backend.py": "consolidated, by plain zarr: chunks (5, 3), shards (20, 6)",
}

SLICES_TECHNIQUES = [
    "1. A shard for each slice",
    "2. Slices appended to shards of many slices",
    "3. Chunks of one size, without compression",
    "4. Compressed chunks in the order of their arrival",
]


def run_example(name: str, *arguments: str, options: tuple[str, ...] = (), cwd: Path) -> str:
    """What the example prints, run by a Python with these options."""
    command = [sys.executable, *options, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TELLING_LINES)
def test_example(name: str, tmp_path: Path) -> None:
    """An example prints its telling line."""
    printed = run_example(name, options=("-W", "error"), cwd=tmp_path)
    assert TELLING_LINES[name] in printed.splitlines()


@pytest.mark.thorough
def test_slices(tmp_path: Path) -> None:
    """Each of ZEP 2's four writes about what the chunks take, whatever native sharding rewrites."""
    printed = run_example("slices.py", options=("-W", "error"), cwd=tmp_path)
    assert re.findall(r"^\d\. .*", printed, re.M) == SLICES_TECHNIQUES
    assert "  on an object store: 24 PUTs for 24 slices" in printed.splitlines()
    ours = [float(times) for times in re.findall(r"written: .* bytes, ([\d.]+) times", printed)]
    native = [float(times) for times in re.findall(r"native .* bytes, ([\d.]+) times", printed)]
    assert len(ours) == len(native) == 5
    assert max(ours) < 1.3
    assert native[0] == 1.0
    assert min(native[1:]) > 5


def test_demo(tmp_path: Path) -> None:
    """Made data as plain chunks, re-packed, handed over, read by all, drawn."""
    for package in ("nibabel", "matplotlib", "rich", "tensorstore"):
        pytest.importorskip(package)
    printed = run_example("demo.py", "--made-data", "--output", "out", cwd=tmp_path)
    line = "After 3., plain zarr: chunks (16, 16, 16), shards (128, 128, 128); all values equal."
    assert line in printed.splitlines()
    assert "After 3., tensorstore: all values equal." in printed.splitlines()
    assert (tmp_path / "out" / "brain.png").stat().st_size > 0


def test_no_example_is_forgotten() -> None:
    """Each script of the folder is run by a test."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"demo.py", "slices.py", *TELLING_LINES}
