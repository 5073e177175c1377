"""Array reads and writes on local disk: this store, zarr's native sharding, plain chunks.

    native   zarr's own sharding
    plain    a file for each chunk
    ours     `ShardingStore`, with the pipeline that is named
    sharded  `ShardingStore`, with `ShardedCodecPipeline`

It prints medians, their spread, and ratios to the native figure of the same pipeline.

    python benchmarks/arrays.py [--rounds 5] [--shape 256 256 128]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from measuring import OUR_PIPELINE, ZARR_PIPELINES, Values, fresh_directory, smooth_data, timed
from zarr.storage import LocalStore

from zarr_shardstore import ShardingStore

CHUNK = 16
CHUNKS_PER_SHARD = 8
N_RANDOM = 500


def stores(directory: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Yield name, store and options of `create_array`; ``sharded`` uses our pipeline."""
    shard = (CHUNK * CHUNKS_PER_SHARD,) * 3
    return {
        "native": (LocalStore(directory / "native"), {"shards": shard}),
        "plain": (LocalStore(directory / "plain"), {}),
        "ours": (ShardingStore(directory / "ours", chunks_per_shard=CHUNKS_PER_SHARD), {}),
        "sharded": (ShardingStore(directory / "sharded", chunks_per_shard=CHUNKS_PER_SHARD), {}),
    }


def one_round(
    directory: Path,
    data: Values,
    seed: int,
    only: list[str] | None = None,
) -> dict[tuple[str, str], float]:
    """Return seconds by (operation, store)."""
    seconds: dict[tuple[str, str], float] = {}
    rng = np.random.default_rng(seed)
    grid = [-(-n // CHUNK) for n in data.shape]
    corners = [tuple(int(rng.integers(n)) * CHUNK for n in grid) for _ in range(N_RANDOM)]
    for name, (store, options) in stores(directory).items():
        if only is not None and name not in only:
            continue
        with zarr.config.set({"codec_pipeline.path": OUR_PIPELINE} if name == "sharded" else {}):
            z = zarr.create_array(
                store, shape=data.shape, chunks=(CHUNK,) * 3, dtype=data.dtype, **options
            )

        def write(z: zarr.Array[Any] = z) -> None:
            z[...] = data

        def read(z: zarr.Array[Any] = z) -> None:
            z[...]

        def read_chunks(z: zarr.Array[Any] = z) -> None:
            for corner in corners:
                z[tuple(slice(c, c + CHUNK) for c in corner)]

        def write_chunks(z: zarr.Array[Any] = z) -> None:
            for corner in corners[:50]:
                region = tuple(slice(c, c + CHUNK) for c in corner)
                z[region] = data[region]

        seconds["bulk write", name] = timed(write)
        seconds["bulk read", name] = timed(read)
        seconds[f"{N_RANDOM} random chunks", name] = timed(read_chunks)
        seconds["50 chunk updates", name] = timed(write_chunks)
        if not np.array_equal(z[...], data):
            raise SystemExit(f"{name} does not hold what was written")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", type=int, nargs=3, default=(256, 256, 128))
    parser.add_argument("--only", nargs="+", help="names of stores: native plain ours sharded")
    arguments = parser.parse_args()
    data = smooth_data(tuple(arguments.shape))
    n_chunks = int(np.prod([-(-n // CHUNK) for n in data.shape]))
    print(
        f"zarr {zarr.__version__}; {data.shape} uint16, {n_chunks} chunks of {CHUNK}³, "
        f"{CHUNKS_PER_SHARD}³ chunks a shard; medians of {arguments.rounds} (min to max)"
    )
    pipelines = {"no configuration:": None, **ZARR_PIPELINES}
    for pipeline, path in pipelines.items():
        for concurrency in (10, 512) if path else (10,):
            rounds = []
            settings: dict[str, Any] = {"async.concurrency": concurrency}
            settings |= {"codec_pipeline.path": path} if path else {}
            with zarr.config.set(settings):
                for i in range(arguments.rounds):
                    with fresh_directory() as directory:
                        rounds.append(one_round(directory, data, i, arguments.only))
            print(f"\n{pipeline} pipeline, async.concurrency={concurrency}")
            for key in rounds[0]:
                operation, name = key
                values = [r[key] * 1000 for r in rounds]
                median = statistics.median(values)
                native = statistics.median(r[operation, "native"] * 1000 for r in rounds)
                print(
                    f"  {operation:18} {name:7} {median:8.0f} ms ({min(values):.0f} to "
                    f"{max(values):.0f})   native / {name} = {native / median:.2f}"
                )


if __name__ == "__main__":
    main()
