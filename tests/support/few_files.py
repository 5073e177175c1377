"""One process that may open few files; says what went wrong, and how many it had open."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from zarr_shardstore import ShardingMapping, ShardingStore

N_SHARDS, N_THREADS = 1000, 8
KEYS = [f"z/c/{i}" for i in range(2 * N_SHARDS)]


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def new_store(root: str, strategy: Any, n_written: int) -> ShardingMapping:
    """The first chunk of each of so many shards is there."""
    store = ShardingStore(root, chunks_per_shard=2, strategy=strategy)
    shape = (2 * N_SHARDS,)
    options: dict[str, Any] = {"dtype": "u1", "compressors": None, "fill_value": 0}
    zarr.create_array(store, name="z", shape=shape, chunks=(1,), **options)
    mapping = ShardingMapping(store)
    mapping.update(dict.fromkeys(KEYS[: 2 * n_written : 2], b"a"))
    return mapping


def by_threads(work: Callable[[Sequence[str]], None], keys: Sequence[str]) -> None:
    with ThreadPoolExecutor(N_THREADS) as threads:
        list(threads.map(work, [keys[i::N_THREADS] for i in range(N_THREADS)]))


def reads(m: ShardingMapping) -> None:
    def one_by_one(keys: Sequence[str]) -> None:
        for key in keys:
            assert m[key] == b"a"

    def together(keys: Sequence[str]) -> None:
        assert m.get_partial_values([(key, (0, None)) for key in keys]) == [b"a"] * len(keys)

    for work in (one_by_one, together, together, one_by_one):
        by_threads(work, KEYS[::2])


def writes(m: ShardingMapping) -> None:
    keys = KEYS[:N_SHARDS:2]

    def one_by_one(keys: Sequence[str]) -> None:
        for key in keys:
            m[key] = b"b"

    def together(keys: Sequence[str]) -> None:
        m.update(dict.fromkeys(keys, b"c"))

    for work, value in ((one_by_one, b"b"), (together, b"c"), (one_by_one, b"b")):
        by_threads(work, keys)
        assert [m[key] for key in keys] == [value] * len(keys)


def both(m: ShardingMapping) -> None:
    def work(keys: Sequence[str]) -> None:
        for key in keys:
            m[key] = b"b"
            assert m[key] == b"b"
            assert m.get(KEYS[KEYS.index(key) + 1]) is None
        assert m.get_partial_values([(key, (0, None)) for key in keys]) == [b"b"] * len(keys)

    by_threads(work, KEYS[::2])
    assert len(m.list_prefix("z/c/")) == N_SHARDS
    m.flush()
    m.compact()


def arrays(m: ShardingMapping) -> None:
    store = ShardingStore(m.base)
    z = zarr.open_array(store, path="z")
    z[:] = values = np.arange(2 * N_SHARDS) % 251
    np.testing.assert_array_equal(z[:], values)
    z[::2] = values[::2] = 252
    np.testing.assert_array_equal(z[:], values)
    asyncio.run(store.flush())


def main() -> None:
    root, limit, what, strategy = sys.argv[1:]
    mapping = new_store(root, strategy, N_SHARDS)
    if what != "writes":
        mapping.flush()
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    {"reads": reads, "writes": writes, "both": both, "arrays": arrays}[what](mapping)
    print(json.dumps({"n_open": n_open(), "n_files": sum(1 for _ in Path(root).rglob("*"))}))


if __name__ == "__main__":
    main()
