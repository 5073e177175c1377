"""Fuzzing for as long as told: ``python -m tests.fuzz [--minutes 10] [--failures DIR] [TARGET …]``.

Each target has a process of its own, two at a time. atheris guides it by coverage, if it is
installed; otherwise mutations are drawn at random. New failures are stored below the folder, each
with its traceback. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.rounds import rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engine", choices=["atheris", "random"], default=None)
    parser.add_argument("--short", action="store_true", help="a few seconds, all in one process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    engine = args.engine or ("atheris" if has_atheris() else "random")
    seed = random.randrange(2**31) if args.seed is None else args.seed
    if args.child:
        return run_child(args.targets[0], engine, 60 * args.minutes, seed, args.failures)

    if args.short:
        return max(run_short(name, seed, args.failures) for name in args.targets or all_targets())
    names = args.targets or all_targets()
    minutes = 2 * args.minutes / len(names) if len(names) > 2 else args.minutes

    def run(name: str) -> int:
        command = [sys.executable, "-m", "tests.fuzz", "--child", name, "--engine", engine]
        command += ["--minutes", str(minutes), "--seed", str(seed)]
        return subprocess.run([*command, "--failures", str(args.failures)], check=False).returncode

    print(f"{engine}, seed {seed}, {minutes:.1f} minutes for each of {len(names)} targets")
    with ThreadPoolExecutor(2) as pool:
        return int(any(pool.map(run, names)))


def all_targets() -> list[str]:
    from tests.fuzz.targets import TARGETS

    return list(TARGETS)


def run_short(name: str, seed: int, failures: Path) -> int:
    """Try the seeds, the corpus and some mutations of one target."""
    from tests.fuzz.engine import Run, bounded

    run = Run(name, failures)
    begun = time.monotonic()
    with bounded(run.target):
        run.by_chance(seed, n_inputs=rounds(run.target.short))
    return report(run, begun)


def has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def run_child(name: str, engine: str, seconds: float, seed: int, failures: Path) -> int:
    """Fuzz one target in this process, and print one line."""
    if engine == "atheris":
        run_atheris(name, seconds, seed, failures)
    from tests.fuzz.engine import Run, bounded

    run = Run(name, failures)
    begun = time.monotonic()
    with bounded(run.target):
        run.by_chance(seed, seconds=seconds)
    return report(run, begun)


def report(run: Any, begun: float) -> int:
    print(f"{run.name}: {run.n_inputs} inputs in {time.monotonic() - begun:.0f} s", flush=True)
    for what in run.failures:
        print(f"{run.name}: FAILED: {what}", flush=True)
    return 1 if run.failures else 0


def run_atheris(name: str, seconds: float, seed: int, failures: Path) -> None:
    """Fuzz one target, guided by the coverage of the package; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["zarr_shardstore"]):
        from tests.fuzz.engine import Run, bounded
    run = Run(name, failures)
    begun = time.monotonic()

    def one(data: bytes) -> None:
        run.take(data, is_traced=run.n_inputs % 100 == 0)
        if time.monotonic() - begun > seconds:
            status = report(run, begun)
            shutil.rmtree(corpus)
            os._exit(status)  # nothing else ends the fuzzer

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(data, max_size))
        return run.target.mutate(data, rng)[:max_size]

    with tempfile.TemporaryDirectory() as corpus, bounded(run.target):
        for number, data in enumerate(run.seeds()):
            (Path(corpus) / f"{number}").write_bytes(data)
        options = [
            "-timeout=0",
            "-rss_limit_mb=0",
            "-verbosity=0",
            "-max_len=8192",
            "-len_control=0",
        ]
        atheris.Setup([name, corpus, f"-seed={seed}", *options], one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
