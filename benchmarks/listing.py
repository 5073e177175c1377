"""Listing a million keys: chunk files, as zarr lists them, beside as many chunks in 64 shards.

It prints seconds, ratios and peak memory of Python objects; then the same for files that pass
through.

    python benchmarks/listing.py [--chunks 1000000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from measuring import fresh_directory, row, title
from zarr.storage import LocalStore

from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.format.shard import ZEP2_INDEX, ShardingSpec, build_shard

SHARDS_PER_SIDE = 8

Listing: TypeAlias = Callable[[], AsyncIterator[str] | Iterator[str]]


def document(side: int) -> bytes:
    """Return the metadata of an array of `side` times `side` chunks of one byte."""
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [side, side],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
            "attributes": {},
        }
    ).encode()


def make_files(directory: Path, side: int) -> None:
    """Write a file for each chunk."""
    for i in range(side):
        row_of = directory / "z" / "c" / str(i)
        row_of.mkdir(parents=True)
        for j in range(side):
            os.close(os.open(row_of / str(j), os.O_CREAT | os.O_WRONLY))
    (directory / "z" / "zarr.json").write_bytes(document(side))


def make_shards(directory: Path, side: int) -> None:
    """Write the same chunks in 64 shards."""
    cps = -(-side // SHARDS_PER_SIDE)
    ShardingMapping(directory, chunks_per_shard=cps)["z/zarr.json"] = document(side)
    values = dict.fromkeys(range(cps * cps), b"\0")
    shard = build_shard(values, ShardingSpec((cps, cps), ZEP2_INDEX))
    for i in range(SHARDS_PER_SIDE):
        row_of = directory / "z" / "c" / str(i)
        row_of.mkdir(parents=True)
        for j in range(SHARDS_PER_SIDE):
            (row_of / str(j)).write_bytes(shard)


async def count(listing: Listing) -> int:
    n = 0
    keys = listing()
    if isinstance(keys, Iterator):
        return sum(1 for _ in keys)
    async for _ in keys:
        n += 1
    return n


def measure(listing: Listing, n_keys: int, repeats: int) -> tuple[float, float]:
    """Return the least seconds of some listings, and the peak memory in MiB of one more."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        n = asyncio.run(count(listing))
        seconds.append(time.perf_counter() - start)
        assert n == n_keys, (n, n_keys)
    tracemalloc.start()
    try:
        asyncio.run(count(listing))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return min(seconds), peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    side = math.isqrt(options.chunks)
    with fresh_directory() as files, fresh_directory() as shards:
        make_shards(shards, side)
        print(f"making {side * side} files in {files}", flush=True)
        make_files(files, side)
        compare(files, shards, side * side, options.repeats)


def compare(files: Path, shards: Path, n_chunks: int, repeats: int) -> None:
    local, store, passing = LocalStore(files), ShardingStore(shards), ShardingStore(files)
    mapping = ShardingMapping(store)
    title(f"{n_chunks} chunks", "seconds", "times as fast", "peak MiB")
    cases: dict[str, tuple[Listing, int]] = {
        "files, LocalStore.list()": (local.list, n_chunks + 1),
        "64 shards, list()": (store.list, n_chunks + 1),
        "64 shards, iter(ShardingMapping)": (lambda: iter(mapping), n_chunks + 1),
        "files that pass through, list()": (passing.list, n_chunks + 1),
        "files, LocalStore.list_prefix()": (lambda: local.list_prefix("z/c"), n_chunks),
        "64 shards, list_prefix()": (lambda: store.list_prefix("z/c"), n_chunks),
        "64 shards, list_prefix() of a tenth": (lambda: store.list_prefix("z/c/1"), 0),
    }
    of_files = 0.0
    for name, (listing, n_keys) in cases.items():
        if not n_keys:
            n_keys = asyncio.run(count(listing))
        seconds, peak = measure(listing, n_keys, repeats)
        if "LocalStore" in name:
            of_files = seconds
        row(name, seconds, of_files / seconds, peak)


if __name__ == "__main__":
    main()
