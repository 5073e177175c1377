"""Import of an HDF5 file with many chunks, beside a tar of the same file.

The chunks are raw, so nothing is decoded by either. The import finds 16,384 chunks, writes them
into shards, reads each back and compares it. The page cache is warm.

    python benchmarks/imports.py [--nbytes 1073741824] [--rounds 5] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import h5py
import numpy as np
from measuring import row, time_of_each, timed, title

from zarr_shardstore import import_store

CHUNK_NBYTES = 64 * 1024


def make_file(path: Path, n_chunks: int) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        shape, chunk = (n_chunks, CHUNK_NBYTES), (1, CHUNK_NBYTES)
        values = file.create_dataset("values", shape, "u1", chunks=chunk)
        for i in range(0, n_chunks, 256):
            n = min(256, n_chunks - i)
            values[i : i + n] = rng.integers(0, 255, (n, CHUNK_NBYTES), "u1")


def clocked(run: Callable[[Path], None]) -> Callable[[Path], float]:
    def seconds(target: Path) -> float:
        os.sync()  # what earlier rounds have written
        return timed(partial(run, target))

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small and once")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.nbytes, arguments.rounds = 1 << 24, 1
    n_chunks = arguments.nbytes // CHUNK_NBYTES
    with TemporaryDirectory(prefix="zarr-shardstore-bench-") as directory:
        source = Path(directory, "in.h5")
        make_file(source, n_chunks)

        def imported(target: Path) -> None:
            assert import_store(source, target / "out.zarr").n_chunks == n_chunks

        def packed(target: Path) -> None:
            subprocess.run(
                ["tar", "cf", target / "out.tar", source.name], cwd=directory, check=True
            )

        found = time_of_each(
            {"import_store": clocked(imported), "tar cf": clocked(packed)},
            arguments.rounds,
            statistics.median,
        )
    title(f"{n_chunks} chunks of 64 KiB", "seconds", "tar took so long")
    for name, seconds in found.items():
        row(name, seconds, found["tar cf"] / seconds)


if __name__ == "__main__":
    main()
