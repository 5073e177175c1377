"""Reads: chunk by chunk and of whole arrays from local files, and of a region over a network.

Requests are counted. If this store makes more requests than it promises, the script says so at its
end and fails.

    chunks    single chunks in random order from local files, the index is known; beside chunk
              files and tensorstore
    direct    random chunks of one shard, all in one call; beside tensorstore and zarrista
    arrays    random chunks and `z[:]` from local files; beside native sharding and chunk files
    remote    a region of 8 shards, small ones and such as are too large to be read whole, 30 ms
              a request (`latency_proxy.py`, `servers.py`); beside native sharding and tensorstore
    gaps      scattered chunks of a shard, 30 ms a request: the gain of reading gaps along
    requests  indexes and spans that single reads, a region and 64 tasks request

    python benchmarks/reads.py [--parts chunks arrays ...] [--repeats 5] [--minima] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import tensorstore as ts
import zarr
from direct_reads import show_direct
from measuring import (
    OUR_PIPELINE,
    ZARR_PIPELINES,
    Middle,
    create,
    flush,
    fresh_directory,
    row,
    smooth_data,
    time_of_each_run,
    timed,
    title,
)
from remote_gaps import show_gaps
from remote_reads import broken_promises, show_remote, show_requests
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.storage import LocalStore

from zarr_shardstore import ShardingMapping, ShardingStore

CHUNK = 16
CHUNKS_PER_SHARD = 8
SHARD = CHUNK * CHUNKS_PER_SHARD

PROTOTYPE = default_buffer_prototype()
INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclass(frozen=True)
class Sizes:
    """Amounts of data that are read."""

    repeats: int = 5
    middle: Middle = statistics.median
    entries: tuple[int, ...] = (512, 32_768)
    nbytes: int = 4096
    n_sample: int = 2_000
    direct_sides: tuple[int, ...] = (16, 32)
    n_direct: int = 500
    shape: tuple[int, int, int] = (256, 256, 128)
    n_random: int = 500
    remote_sides: tuple[int, ...] = (64, 128, 256)
    gap_nbytes: tuple[int, ...] = (1024, 4096, 16_384)
    gap_chunks: tuple[int, ...] = (512, 128, 32)
    latency_s: float = 0.03


QUICK = Sizes(
    repeats=1,
    entries=(64, 512),
    n_sample=60,
    direct_sides=(16,),
    n_direct=200,
    shape=(64, 128, 256),
    n_random=20,
    remote_sides=(64,),
    gap_nbytes=(1024,),
    gap_chunks=(128,),
    latency_s=0.005,
)


# -------------------------------------------------------------- (a) chunk by chunk


def read_blocking(store: Any, ids: Sequence[int]) -> float:
    start = perf_counter()
    for i in ids:
        store.get_sync(f"c/{i}", prototype=PROTOTYPE)
    return perf_counter() - start


def read_async(store: Any, ids: Sequence[int]) -> float:
    async def read() -> float:
        start = perf_counter()
        for i in ids:
            await store.get(f"c/{i}", PROTOTYPE)
        return perf_counter() - start

    return asyncio.run(read())


def read_tensorstore(shards: Sequence[Any], n_entries: int, ids: Sequence[int]) -> float:
    keys = [(i // n_entries, (i % n_entries).to_bytes(4, "big")) for i in ids]
    start = perf_counter()
    for shard, key in keys:
        shards[shard].read(key).result()
    return perf_counter() - start


def tensorstore_shards(directory: Path, n_shards: int, n_entries: int) -> list[Any]:
    """Open a key-value store for each shard; these keep indexes."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": 100_000_000}})
    return [
        ts.KvStore.open(
            {
                "driver": "zarr3_sharding_indexed",
                "base": {"driver": "file", "path": str(directory / "c" / str(i))},
                "grid_shape": [n_entries],
                "index_codecs": INDEX_CODECS,
            },
            context=context,
        ).result()
        for i in range(n_shards)
    ]


def chunks(sizes: Sizes) -> None:
    for n_entries in sizes.entries:
        with fresh_directory() as directory:
            chunks_of_shards(sizes, n_entries, directory)


def chunks_of_shards(sizes: Sizes, n_entries: int, directory: Path) -> None:
    n_shards = max(1, 2 * sizes.n_sample // n_entries)
    n = n_shards * n_entries
    ids = random.sample(range(n), min(n, sizes.n_sample))
    value = os.urandom(2 * sizes.nbytes)

    def value_of(i: int) -> bytes:
        start = i % sizes.nbytes
        return value[start : start + sizes.nbytes]

    writer = ShardingStore(directory / "ours", chunks_per_shard=n_entries)
    shape = (n * sizes.nbytes,)
    zarr.create_array(writer, shape=shape, chunks=(sizes.nbytes,), dtype="u1", compressors=None)
    ShardingMapping(writer).set_partial_values([(f"c/{i}", 0, value_of(i)) for i in range(n)])
    flush(writer)
    files = LocalStore(directory / "files")
    for i in ids:
        zarr.core.sync.sync(files.set(f"c/{i}", cpu.Buffer.from_bytes(value_of(i))))
    ours = ShardingStore(directory / "ours")
    shards = tensorstore_shards(directory / "ours", n_shards, n_entries)
    for i in ids:  # they are right, and from here on indexes are known
        buffer = ours.get_sync(f"c/{i}")
        assert buffer is not None
        assert buffer.to_bytes() == value_of(i)
        shard, entry_id = divmod(i, n_entries)
        assert shards[shard].read(entry_id.to_bytes(4, "big")).result().value == value_of(i)

    cases: dict[str, Callable[[], float]] = {
        "ours, blocking": lambda: read_blocking(ours, ids),
        "chunk files, blocking": lambda: read_blocking(files, ids),
        "tensorstore, blocking": lambda: read_tensorstore(shards, n_entries, ids),
        "ours, async": lambda: read_async(ours, ids),
        "chunk files, async": lambda: read_async(files, ids),
    }
    if not hasattr(files, "get_sync"):  # zarr 3.1
        del cases["chunk files, blocking"]
    seconds = time_of_each_run(cases, sizes.repeats, sizes.middle)
    columns = ("µs a chunk", "files / this", "ts / this")
    title(f"{sizes.nbytes} bytes from shards of {n_entries}, warm, time", *columns)
    for name, s in seconds.items():
        of_files = seconds.get(f"chunk files, {name.split(', ')[1]}")
        of_tensorstore = seconds["tensorstore, blocking"] / s
        ratios = ["" if of_files is None else f"{of_files / s:.2f}", f"{of_tensorstore:.2f}"]
        row(name, f"{1e6 * s / len(ids):.0f}", *ratios)


def direct(sizes: Sizes) -> None:
    for side in sizes.direct_sides:
        show_direct(side, sizes.n_direct, 4 * sizes.repeats)


# -------------------------------------------------------------------- (b) arrays


def arrays(sizes: Sizes) -> None:
    data = smooth_data(sizes.shape)
    grid = [-(-n // CHUNK) for n in data.shape]
    corners = [[random.randrange(n) * CHUNK for n in grid] for _ in range(sizes.n_random)]
    regions = [tuple(slice(c, c + CHUNK) for c in corner) for corner in corners]

    with fresh_directory() as directory:

        def store_of(kind: str) -> Any:
            # Written in shards of one store, read in those of another: nothing is known.
            if kind == "ours":
                return ShardingStore(directory / kind, chunks_per_shard=CHUNKS_PER_SHARD)
            return LocalStore(directory / kind)

        for kind, pipe in (("ours", OUR_PIPELINE), ("native", ""), ("files", "")):
            options = {"shards": (SHARD,) * 3} if kind == "native" else {}
            store = store_of(kind)
            pipe = pipe or list(ZARR_PIPELINES.values())[-1]
            create(store, data.shape, (CHUNK,) * 3, pipe, **options)[...] = data
            if kind == "ours":
                flush(store)

        def opened(kind: str, pipe: str) -> Any:
            with zarr.config.set({"codec_pipeline.path": pipe}):
                return zarr.open_array(store_of(kind), mode="r")

        def read_random(kind: str, pipe: str) -> float:
            z = opened(kind, pipe)
            return timed(lambda: [z[region] for region in regions])

        def read_all(kind: str, pipe: str) -> float:
            z = opened(kind, pipe)
            return timed(lambda: z[...])

        pairs = {
            f"{kind}, {name}": (kind, pipe)
            for kind in ("native", "files", "ours")
            for name, pipe in ZARR_PIPELINES.items()
        }
        pairs["ours, ShardedCodecPipeline"] = ("ours", OUR_PIPELINE)
        for kind, pipe in pairs.values():
            assert np.array_equal(opened(kind, pipe)[...], data)
        for text, read in (
            (f"{len(regions)} random chunks of {CHUNK}³", read_random),
            (f"z[:], {data.shape} uint16", read_all),
        ):
            cases = {case: partial(read, *pair) for case, pair in pairs.items()}
            show_arrays(text, time_of_each_run(cases, sizes.repeats, sizes.middle))


def show_arrays(text: str, seconds: dict[str, float]) -> None:
    columns = [f"{name} / this" for name in ZARR_PIPELINES]
    title(f"{text}, {CHUNKS_PER_SHARD}³ chunks a shard", "ms", *columns, "files / this")
    fastest_files = min(seconds[f"files, {name}"] for name in ZARR_PIPELINES)
    for case, s in seconds.items():
        ratios = [seconds[f"native, {name}"] / s for name in ZARR_PIPELINES]
        of_files = seconds.get(f"files, {case.split(', ')[1]}", fastest_files)
        row(case, f"{1e3 * s:.0f}", *ratios, of_files / s)


# ------------------------------------------------------------ (c) and (d) remote


def remote(sizes: Sizes) -> None:
    for side in sizes.remote_sides:
        show_remote(side, sizes.latency_s, sizes.repeats, sizes.middle)


def gaps(sizes: Sizes) -> None:
    for nbytes in sizes.gap_nbytes:
        show_gaps(nbytes, sizes.gap_chunks, sizes.latency_s, sizes.repeats, sizes.middle)


def requests(sizes: Sizes) -> None:
    show_requests(sizes.remote_sides[:2][-1], sizes.latency_s)


PARTS: dict[str, Callable[[Sizes], None]] = {
    part.__name__: part for part in (chunks, direct, arrays, remote, gaps, requests)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, help="of what is timed")
    parser.add_argument("--shape", type=int, nargs=3, help="of local arrays")
    parser.add_argument("--entries", type=int, nargs="+", help="of the shards of single chunks")
    parser.add_argument("--nbytes", type=int, help="of single chunks")
    parser.add_argument("--latency", type=float, dest="latency_s", help="of a request, in seconds")
    parser.add_argument("--quick", action="store_true", help="small, once: do the counts hold?")
    parser.add_argument(
        "--minima", action="store_true", help="instead of medians, on a busy machine"
    )
    options = vars(parser.parse_args())
    parts, is_quick, has_minima = (options.pop(name) for name in ("parts", "quick", "minima"))
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if has_minima:
        given["middle"] = min
    sizes = replace(QUICK if is_quick else Sizes(), **given)
    kind = "minima" if has_minima else "medians"
    print(f"zarr {zarr.__version__}, {os.cpu_count()} cores; {kind} of {sizes.repeats}")
    for name in parts:
        PARTS[name](sizes)
    if broken_promises:
        raise SystemExit("\nmore requests than promised:\n  " + "\n  ".join(broken_promises))


if __name__ == "__main__":
    main()
