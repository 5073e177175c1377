"""Re-packing chunk files into shards, beside tar, cp, and a copy that decodes and encodes.

It prints medians, and ratios to tar. The page cache is warm: no read waits for the disk.
`shard_store` reads back and compares the shards; the other methods do not.

    python benchmarks/convert.py [--chunk 32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import zarr

from zarr_shardstore import shard_store

GRID = 24
CPS = 8
ARRAY = "a"


def make_source(path: Path, chunk: int) -> None:
    """Write 24³ = 13,824 chunk files of noisy waves, uint16, zarr's default compression (zstd)."""
    rng = np.random.default_rng(0)
    n = GRID * chunk
    shape = (n, n, n)
    z = zarr.create_array(path, name=ARRAY, shape=shape, chunks=(chunk,) * 3, dtype="uint16")
    plane = (np.indices((n, n)).sum(0) % 977).astype("uint16")
    for i in range(0, n, chunk):
        noise = rng.integers(0, 16, (chunk, n, n), dtype="uint16")
        z[i : i + chunk] = plane[None] + noise


def decode_and_encode(source: Path, target: Path) -> None:
    """Copy as zarr-python users do: read the chunks of a shard, write them to a sharded array."""
    z = zarr.open_array(source, path=ARRAY, mode="r")
    shards = tuple(c * CPS for c in z.chunks)
    copy = zarr.create_array(
        target, name=ARRAY, shape=z.shape, chunks=z.chunks, shards=shards, dtype=z.dtype
    )
    for start in product(*(range(0, n, s) for n, s in zip(z.shape, shards, strict=True))):
        region = tuple(slice(i, i + s) for i, s in zip(start, shards, strict=True))
        copy[region] = z[region]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk", type=int, default=32, help="chunks have so many values cubed")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="convert-") as directory:
        run(Path(directory), options.chunk, options.rounds)


def run(directory: Path, chunk: int, rounds: int) -> None:
    source, target = directory / "source", directory / "target"
    make_source(source, chunk)
    files = [p for p in source.rglob("*") if p.is_file()]
    nbytes = sum(p.stat().st_size for p in files)
    print(f"{len(files) - 2} chunk files, {nbytes / 1e6:.0f} MB, {os.cpu_count()} cores; seconds")
    threads = ThreadPoolExecutor(4)
    processes = ProcessPoolExecutor(4, mp_context=get_context("spawn"))
    list(processes.map(_warm_up, range(16)))
    one = ThreadPoolExecutor(1)

    def shard(executor: Executor) -> Callable[[], object]:
        def convert() -> None:
            report = shard_store(source, target, chunks_per_shard=CPS, executor=executor)
            assert (report.n_chunks, report.n_objects) == (GRID**3, (GRID // CPS) ** 3)

        return convert

    cases: dict[str, Callable[[], object]] = {
        "tar cf": lambda: subprocess.run(
            ["tar", "cf", target, "-C", directory, "source"], check=True
        ),
        "cp -r": lambda: subprocess.run(["cp", "-r", source, target], check=True),
        "shard_store, 1 worker": shard(one),
        "shard_store, 4 threads": shard(threads),
        "shard_store, 4 processes": shard(processes),
        "zarr, decode and encode": lambda: decode_and_encode(source, target),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            _remove(target)
            os.sync()
            begun = time.perf_counter()
            cases[name]()
            seconds[name].append(time.perf_counter() - begun)
    check_same_values(source, directory / "checked")
    tar = seconds["tar cf"]
    print(f"{'':42} tar took so many times as long,")
    print(f"{'':26} median    min    max   by medians   by minima")
    for name, values in seconds.items():
        times = statistics.median(values), min(values), max(values)
        ratios = statistics.median(tar) / times[0], min(tar) / times[1]
        print(f"{name:26} {'{:6.3f} {:6.3f} {:6.3f}'.format(*times)}", end="   ")
        print("{:10.2f}  {:10.2f}".format(*ratios))
    slow = statistics.median(seconds["zarr, decode and encode"])
    fast = min(statistics.median(v) for n, v in seconds.items() if n.startswith("shard_store"))
    one_worker = statistics.median(seconds["shard_store, 1 worker"])
    print(f"decode and encode took {slow / one_worker:.1f} times as long as one worker, ", end="")
    print(f"{slow / fast:.1f} times as long as the fastest")


def check_same_values(source: Path, target: Path) -> None:
    """Check that zarr-python alone reads the same values from shards and chunks."""
    shard_store(source, target, chunks_per_shard=CPS)
    chunks = zarr.open_array(source, path=ARRAY, mode="r")
    shards = zarr.open_array(target, path=ARRAY, mode="r")
    assert shards.shards is not None
    assert np.array_equal(chunks[:40], shards[:40])


def _warm_up(_: int) -> None:
    """Import the package in a worker before the clock runs, as in a long conversion."""
    import zarr_shardstore.tools.convert.task  # noqa: F401

    time.sleep(0.2)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
