"""Random chunks of one shard on a local disk, by `read_chunks`, tensorstore and zarrista.

All are read in one call or one batch, where there is one. Every contestant has the index of the
shard, and returns decoded arrays that are compared before anything is timed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import tensorstore as ts
import zarr
from measuring import fresh_directory, row, smooth_data, time_of_each_run, timed, title
from remote_reads import broken_promises

from zarr_shardstore import ShardingStore

OURS = "ours, read_chunks"
OTHERS = ("tensorstore, ts.Batch", "zarrista")


def show_direct(side: int, n_chunks: int, repeats: int) -> None:
    """Print times and ratios of reads of chunks of `side` x `side` x `side` uint16, by zstd."""
    n_side = 16 if side <= 16 else 8
    data = smooth_data((side * n_side,) * 3)
    coords = np.random.default_rng(0).integers(0, n_side, (n_chunks, 3))
    regions = [tuple(slice(i * side, (i + 1) * side) for i in at) for at in coords.tolist()]
    expected = np.stack([data[region] for region in regions])
    with fresh_directory() as directory:
        with_writer = ShardingStore(directory, chunks_per_shard=n_side)
        shape, chunks = data.shape, (side,) * 3
        zarr.create_array(with_writer, shape=shape, chunks=chunks, dtype="u2")[...] = data
        with_writer.close()
        os.utime(directory / "c/0/0/0", (time() - 10,) * 2)  # of a new file no index is cached
        store = ShardingStore(directory)
        cases = readers(directory, store, coords, regions)
        for name, read in cases.items():
            if name != "ours, encoded only":
                assert np.array_equal(np.stack(read()), expected), name
        before = store.stats()
        store.read_chunks("", coords)
        after = store.stats()
        if (after.requests, after.warm_reads) != (before.requests, before.warm_reads + n_chunks):
            broken_promises.append(f"{n_chunks} chunks of a cached shard: {before}, then {after}")
        runs = {name: partial(timed, read) for name, read in cases.items()}
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(repeats):  # one after another, in another order each time
            for name, s in time_of_each_run(runs, 1, min).items():
                seconds[name].append(s)
    names = [name for name in OTHERS if name in cases]
    text = f"{n_chunks} random chunks of {side}³, one shard of {n_side}³"
    title(text, "ms, median", "ms, minimum", *(f"{name.split(', ')[-1]} / this" for name in names))
    for name, each in seconds.items():
        ratios = [statistics.median(seconds[n]) / statistics.median(each) for n in names]
        row(name, 1e3 * statistics.median(each), 1e3 * min(each), *ratios)


def readers(
    directory: Path, store: ShardingStore, coords: Any, regions: Sequence[Any]
) -> dict[str, Callable[[], Any]]:
    """Return functions that read all of the chunks, by name."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(directory)}}
    theirs, z = ts.open(spec).result(), zarr.open_array(store, mode="r")

    def read_batch() -> list[Any]:
        batch = ts.Batch()
        parts = [theirs[region].read(batch=batch) for region in regions]
        batch.submit()
        return [part.result() for part in parts]

    cases: dict[str, Callable[[], Any]] = {
        OURS: lambda: store.read_chunks("", coords),
        "ours, encoded only": lambda: store.read_encoded("", coords),
        "ours, z[region] chunk by chunk": lambda: [z[region] for region in regions],
        OTHERS[0]: read_batch,
    }
    try:
        import zarrista
    except ImportError:  # optional
        return cases
    array: Any = zarrista.Array.open(zarrista.store.FilesystemStore(str(directory)))
    cache, ids = array.shard_cache(), coords.tolist()
    cases[OTHERS[1]] = lambda: [
        array.retrieve_subchunk(at, shard_cache=cache).to_numpy() for at in ids
    ]
    return cases
