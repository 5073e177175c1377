"""The example of ZEP 2, simulated: 25000 × 18000 × 6000 values, 10.3 million chunks, 351 shards.

The source is made up on request: one chunk in `--every` has its own key as its value, the others
are missing, and a listing of chunks is an error. The shards on disk are real. The script prints the
time of the plan and of the run, the peak memory, and the requests.

    python benchmarks/scale.py [--every 20] [--workers 1]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

from zarr_shardstore import Progress, ShardingMapping, shard_store

SHAPE = (25000, 18000, 6000)
CHUNK = (64, 64, 64)
CPS = 32
GRID = tuple(-(-n // c) for n, c in zip(SHAPE, CHUNK, strict=True))
N_CHUNKS = GRID[0] * GRID[1] * GRID[2]
DOCUMENT = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": SHAPE,
    "data_type": "uint8",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": CHUNK}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "fill_value": 0,
    "codecs": [{"name": "bytes"}],
    "attributes": {},
}


class MadeUp(MutableMapping[str, bytes]):
    """An array of 10.3 million chunks, most of them missing."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.counts: Counter[str] = Counter()

    def __getitem__(self, key: str) -> bytes:
        if key.startswith("c/"):
            self.counts["chunks asked for"] += 1
            if crc32(key.encode()) % self.every == 0:
                return key.encode()
            raise KeyError(key)
        if key == "zarr.json":
            return json.dumps(DOCUMENT).encode()
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        self.counts["listings of the root"] += 1
        return iter(["zarr.json", "c/0/0/0"])

    def __len__(self) -> int:
        return N_CHUNKS + 1

    def __setitem__(self, key: str, value: bytes) -> None:
        raise AssertionError("the source is not written")

    def __delitem__(self, key: str) -> None:
        raise AssertionError("the source is not written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=20, help="one chunk in so many is stored")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    source = MadeUp(options.every)
    with tempfile.TemporaryDirectory(prefix="scale-") as directory:
        run(source, Path(directory) / "target.zarr", options.workers)


def run(source: MadeUp, target: Path, n_workers: int) -> None:
    print(f"{N_CHUNKS} chunks in a grid of {GRID}")
    begun = time.perf_counter()
    plan = shard_store(source, target, chunks_per_shard=CPS, dry_run=True)
    (array,) = plan.arrays
    assert (array.n_tasks, source.counts["chunks asked for"]) == (13 * 9 * 3, 0)
    print(f"plan: {array.n_tasks} tasks, {time.perf_counter() - begun:.3f} s, no chunk asked for")
    begun = time.perf_counter()
    with ThreadPoolExecutor(n_workers) as executor:
        report = shard_store(source, target, chunks_per_shard=CPS, executor=executor, progress=_say)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"run: {report}")
    print(f"{N_CHUNKS / seconds:.0f} places a second, peak memory {peak:.0f} MiB")
    print(f"asked of the source: {dict(source.counts)}")
    check(source, target)


def _say(progress: Progress) -> None:
    if progress.n_tasks_done % 50 == 0:
        print(f"  {progress.n_tasks_done} of {progress.n_tasks} shards", flush=True)


def check(source: MadeUp, target: Path) -> None:
    """Check ten thousand chunks from all over: each has its value, or is missing."""
    shards = ShardingMapping(target)
    keys = ["c/" + "/".join(str(random.randrange(n)) for n in GRID) for _ in range(10_000)]
    values = shards.get_partial_values([(key, (0, None)) for key in keys])
    assert values == [source.get(key) for key in keys]
    print(
        f"{sum(v is not None for v in values)} of {len(keys)} random chunks are there, as made up"
    )


if __name__ == "__main__":
    main()
