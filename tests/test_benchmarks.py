"""What the benchmarks assert of bytes and requests holds, also where nobody looks at times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WRITES = Path(__file__).parents[1] / "benchmarks" / "writes.py"


def test_writes(tmp_path: Path) -> None:
    """Each part runs and prints its table."""
    command = [sys.executable, "-W", "error", str(WRITES), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for telling in ("chunk by chunk", "updates", "z[...] = data", "object store", "slices of"):
        assert telling in done.stdout
