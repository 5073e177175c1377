"""CPU of an import of the package after zarr, and of the command line, in new processes.

Each figure is the least of several runs.

    python benchmarks/start.py [--rounds 11] [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from measuring import row, title

CLOCKED = """
import time
{before}
start = time.process_time()
{code}
print(1000 * (time.process_time() - start))
"""

CODES = {
    "import zarr": ("", "import zarr"),
    "from zarr_shardstore import ShardingStore, after zarr": (
        "import zarr",
        "from zarr_shardstore import ShardingStore",
    ),
}

COMMANDS = {
    f"zarr-shardstore {argument}": (
        "import contextlib, io, sys",
        f"sys.argv[1:] = [{argument!r}]\n"
        "from zarr_shardstore.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main()",
    )
    for argument in ("--version", "--help")
}


def least_ms(before: str, code: str, rounds: int) -> float:
    command = [sys.executable, "-c", CLOCKED.format(before=before, code=code)]
    return min(
        float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        for _ in range(rounds + 1)  # the first one may write byte code
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="once")
    arguments = parser.parse_args()
    title("start of a process", "CPU in ms")
    for name, (before, code) in (CODES | COMMANDS).items():
        row(name, least_ms(before, code, 1 if arguments.quick else arguments.rounds))


if __name__ == "__main__":
    main()
