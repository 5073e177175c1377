"""Whole arrays, and batches of chunks, beside tensorstore.

    arrays   `z[...] = data`, then `z[...]`; zstd level 1, 4 shards or more. Also with
             ``view="shards"``, and by `read_array` and `write_array`
    batches  216 writes of one chunk each, in `batch()`; in one transaction of tensorstore

Both write arrays that this package has declared, and what was written is compared. Printed are
medians, and ratios to tensorstore of the medians and of the minima: the latter say more on a busy
machine. "zarr alone" has a pipeline that does nothing: so long takes zarr's own Python.

    python benchmarks/beside_tensorstore.py [--rounds 5] [--side 256] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import zarr
from measuring import Values, counting, flush, fresh_directory, row, smooth_data, timed, title
from zarr.codecs import ZstdCodec
from zarr.core.codec_pipeline import BatchedCodecPipeline

from zarr_shardstore import ShardingStore

Run = Callable[[], object]
Case = Callable[[Path], dict[str, float]]

CHUNKS_PER_SHARD = {16: 8, 32: 4}
"""By the side of a chunk: shards of 128³ elements."""

N_BATCH = 6
"""Chunks along each dimension that a batch writes, all into one shard."""


class NoPipeline(BatchedCodecPipeline):
    """A pipeline that neither stores nor reads anything."""

    async def read(self, batch_info: Iterable[Any], *_: Any, **__: Any) -> Any:
        return [{"status": "present"} for _ in batch_info]

    async def write(self, batch_info: Iterable[Any], *_: Any, **__: Any) -> None:
        list(batch_info)


def make(directory: Path, data: Values, side: int, chunks_per_shard: int) -> Any:
    store = ShardingStore(directory, chunks_per_shard=chunks_per_shard)
    options: Any = {"chunks": (side,) * 3, "compressors": [ZstdCodec(level=1)], "fill_value": 0}
    return zarr.create_array(store, shape=data.shape, dtype=data.dtype, **options)


def of_tensorstore(directory: Path) -> Any:
    kvstore = {"driver": "file", "path": str(directory)}
    return ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()


def without_pipeline(z: Any) -> Any:
    array = z.async_array
    codecs = list(array.codec_pipeline)
    object.__setattr__(array, "codec_pipeline", NoPipeline.from_codecs(codecs))
    return z


def array_cases(data: Values, side: int) -> dict[str, Case]:
    n = CHUNKS_PER_SHARD[side]
    n_shards = int(np.prod([-(-length // (side * n)) for length in data.shape]))

    def ours(directory: Path, way: str) -> dict[str, float]:
        z = make(directory, data, side, n)
        store = ShardingStore(directory, view="shards" if way == "view" else "chunks")
        z = zarr.open_array(store)
        read, write = partial(z.__getitem__, ...), partial(z.__setitem__, ..., data)
        if way == "direct":
            read = partial(store.read_array, "", ...)
            write = partial(store.write_array, "", ..., data)
        with counting() as counts:
            seconds = {"write": timed(write)}
        assert counts["replace"] == n_shards
        found: list[Any] = []
        seconds["read"] = timed(lambda: found.append(read()))
        time.sleep(0.05)  # files that are younger are read again
        read()
        n_requests = store.stats().requests
        seconds["read, warm"] = timed(lambda: found.append(read()))
        assert way == "direct" or store.stats().requests == n_requests
        assert all(np.array_equal(values, data) for values in found)
        return seconds

    def theirs(directory: Path) -> dict[str, float]:
        make(directory, data, side, n)
        array = of_tensorstore(directory)
        found: list[Any] = []
        seconds = {"write": timed(lambda: array[...].write(data).result())}
        seconds["read"] = timed(lambda: found.append(array[...].read().result()))
        array[...].read().result()
        seconds["read, warm"] = timed(lambda: found.append(array[...].read().result()))
        assert all(np.array_equal(values, data) for values in found)
        return seconds

    def alone(directory: Path) -> dict[str, float]:
        z = without_pipeline(make(directory, data, side, n))
        seconds = {"write": timed(lambda: z.__setitem__(..., data))}
        return {**seconds, "read": timed(lambda: z[...])}

    return {
        "tensorstore": theirs,
        "ours": partial(ours, way="z"),
        "ours, view='shards'": partial(ours, way="view"),
        "ours, read_array, write_array": partial(ours, way="direct"),
        "zarr alone": alone,
    }


def batch_cases(data: Values, side: int) -> dict[str, Case]:
    part = data[(slice(N_BATCH * side),) * 3]
    corners = product(range(0, N_BATCH * side, side), repeat=3)
    regions = [tuple(slice(at, at + side) for at in corner) for corner in corners]

    def write_all(array: Any) -> None:
        for region in regions:
            array[region] = part[region]

    def ours(directory: Path, way: str) -> dict[str, float]:
        z = make(directory, part, side, N_BATCH)
        time.sleep(0.05)  # documents that are younger are read again
        store: Any = z.store

        def write() -> None:
            with store.batch():
                if way == "z":
                    write_all(z)
                    return
                for region in regions:
                    store.write_array("", region, part[region])

        with counting() as counts:
            seconds = timed(write)
        assert counts["replace"] == 1
        flush(store)
        assert np.array_equal(z[...], part)
        return {"write": seconds}

    def theirs(directory: Path) -> dict[str, float]:
        make(directory, part, side, N_BATCH)
        array = of_tensorstore(directory)

        def write() -> None:
            with ts.Transaction() as transaction:
                write_all(array.with_transaction(transaction))

        seconds = timed(write)
        assert np.array_equal(array[...].read().result(), part)
        return {"write": seconds}

    def alone(directory: Path) -> dict[str, float]:
        z = without_pipeline(make(directory, part, side, N_BATCH))
        return {"write": timed(lambda: write_all(z))}

    return {
        "tensorstore": theirs,
        "ours": partial(ours, way="z"),
        "ours, write_array": partial(ours, way="direct"),
        "zarr alone": alone,
    }


def show(text: str, cases: dict[str, Case], n_rounds: int) -> None:
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for i in range(n_rounds):
        for name in list(cases)[:: -1 if i % 2 else 1]:
            with fresh_directory() as directory:
                for operation, s in cases[name](directory).items():
                    seconds[operation, name].append(s)
    title(text, "ms", "min", "medians / ts", "minima / ts")
    for (operation, name), values in sorted(seconds.items(), key=lambda item: item[0][0]):
        median, least = statistics.median(values), min(values)
        other = seconds[operation, "tensorstore"]
        ratios = median / statistics.median(other), least / min(other)
        row(f"{operation}: {name}", f"{1e3 * median:.0f}", f"{1e3 * least:.0f}", *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=256, help="of the array, in elements")
    parser.add_argument("--quick", action="store_true", help="small, once: do the counts hold?")
    options = parser.parse_args()
    side, n_rounds = (192, 1) if options.quick else (options.side, options.rounds)
    data = smooth_data((side,) * 3)
    print(f"zarr {zarr.__version__}, {os.cpu_count()} cores; medians of {n_rounds}")
    for chunk in CHUNKS_PER_SHARD:
        text = f"{side}³ uint16 in chunks of {chunk}³"
        show(text, array_cases(data, chunk), n_rounds)
    for chunk in CHUNKS_PER_SHARD:
        text = f"{N_BATCH**3} chunks of {chunk}³, one by one, in a batch"
        show(text, batch_cases(data, chunk), n_rounds)


if __name__ == "__main__":
    main()
