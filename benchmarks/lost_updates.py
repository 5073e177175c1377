"""Chunks that survive when several writers share shards: here, and in zarr's native sharding.

Threads, processes or dask workers write 4,096 chunks of 8 shards in random order. Each round counts
the chunks afterwards: written chunk by chunk (`z[i:j] = ...`), and as regions that begin and end
within chunks. Of the latter only chunks that lie in one region count.

``S3`` is moto, ``Azure`` is Azurite: their seconds say little about real ones.

    python -m benchmarks.lost_updates [--rounds 3] [--base memory local] [--writers "8 processes"]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import zarr

from tests.support.processes import azure_server, s3_server
from tests.support.shared_shards import WAYS, WRITERS, SharedArray, Way, Writers, open_base

BASES = ("memory", "local", "S3", "Azure")


@contextmanager
def base_store(name: str) -> Iterator[dict[str, Any]]:
    """Make a base store of that kind."""
    match name:
        case "memory":
            yield {"kind": "memory", "path": str(time.monotonic())}
        case "local":
            with tempfile.TemporaryDirectory(prefix="lost-") as directory:
                yield {"kind": "local", "path": directory}
        case _:
            with {"S3": s3_server, "Azure": azure_server}[name]() as where:
                yield where | {"prefix": "lost"}


def survivors_of(array: SharedArray, writers: Writers, way: Way, n_rounds: int) -> str:
    """Return the least and the most chunks that zarr reads after a round, and the seconds."""
    array.create()
    percent, seconds = [], []
    for round_ in range(1, n_rounds + 1):
        try:
            seconds.append(writers.write(array, way, round_))
        except Exception as error:  # native sharding on object stores: also torn reads
            return f"{type(error).__name__} in round {round_}"
        z = zarr.open_array(open_base(array.where), path="z", mode="r")
        percent.append(100 * array.survivors(z, way, round_).mean())
    return f"{min(percent):5.1f} to {max(percent):5.1f} %, {sum(seconds) / n_rounds:5.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=4096)
    parser.add_argument("--base", nargs="+", choices=BASES, default=["memory", "local"])
    parser.add_argument("--writers", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--options", type=json.loads, default={}, help="of the store, as JSON")
    options = parser.parse_args()
    columns = [(way, is_native) for way in options.way for is_native in (True, False)]
    print(f"zarr {zarr.__version__}, {options.rounds} rounds of {options.chunks} chunks")
    heads = [f"{way}, {'native' if is_native else 'here'}" for way, is_native in columns]
    print(" | ".join([f"{'':32}", *(f"{head:26}" for head in heads)]))
    for name in options.writers:
        for base in options.base:
            if base == "memory" and "thread" not in name:
                continue  # other processes do not see it
            print(f"{f'{name}, {base}':32}", end="", flush=True)
            with ExitStack() as stack:
                where = stack.enter_context(base_store(base))
                writers = stack.enter_context(WRITERS[name]())
                for way, is_native in columns:
                    array = SharedArray(
                        where=where,
                        n_chunks=options.chunks,
                        options={} if is_native else options.options,
                        is_native=is_native,
                    )
                    cell = survivors_of(array, writers, way, options.rounds)
                    print(f" | {cell:26}", end="", flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
