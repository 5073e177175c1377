"""Writes: chunk by chunk, of whole arrays, to an object store, and of streams of slices.

Bytes and PUTs are counted and asserted. Bytes are those of entries, indexes and journals, from the
creation of a shard to the flush at the end.

    chunks   random order, one shard with few entries and one with many; beside chunk files
    updates  single chunks of a stored array, 512 chunks a shard; beside native sharding
    arrays   `z[...] = data`; beside native sharding
    puts     an object store: one PUT for each shard
    streams  slices as they come, by ZEP 2's four techniques (`examples/slices.py` tells more)

    python benchmarks/writes.py [--parts chunks updates ...] [--repeats 5] [--minima] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import zarr
from measuring import (
    OUR_PIPELINE,
    ZARR_PIPELINES,
    Middle,
    ObjectStore,
    PlainStore,
    Values,
    counting,
    create,
    flush,
    fresh_directory,
    nbytes_of_files,
    row,
    smooth_data,
    time_of_each,
    timed,
    title,
)
from streams import show_streams
from zarr.core.buffer import cpu
from zarr.storage import LocalStore

from zarr_shardstore import ShardingMapping, ShardingStore

CHUNK = 16
CHUNKS_PER_SHARD = 8
SHARD = CHUNK * CHUNKS_PER_SHARD
INDEX_NBYTES = CHUNKS_PER_SHARD**3 * 16 + 4

MAX_WRITTEN = {4096: 1.1, 1024: 1.2}
"""Bytes that may be written for a byte of chunks, by the size of a chunk."""


PAGE_NBYTES = 4096


@dataclass(frozen=True)
class Sizes:
    """Amounts of data that are written."""

    repeats: int = 5
    middle: Middle = statistics.median
    entries: tuple[int, int] = (512, 32_768)
    n_sample: int = 2_000
    n_updates: int = 50
    shape: tuple[int, int, int] = (256, 256, 128)
    n_slices: int = 32
    slices_per_shard: int = 16
    side: int = 512


QUICK = Sizes(
    repeats=1,
    entries=(64, 512),
    n_sample=60,
    n_updates=5,
    shape=(64, 128, 256),
    n_slices=6,
    slices_per_shard=4,
    side=128,
)


# ----------------------------------------------------- (a) chunk by chunk


def make_chunks(directory: Path, n_entries: int, nbytes: int, n_shards: int = 1) -> ShardingStore:
    """Make a store with an array whose shards are not stored yet."""
    store = ShardingStore(directory, chunks_per_shard=n_entries)
    shape = (n_shards * n_entries * nbytes,)
    zarr.create_array(store, shape=shape, chunks=(nbytes,), dtype="u1", compressors=None)
    return store


def write_blocking(store: ShardingStore, ids: Sequence[int], value: bytes) -> float:
    mapping = ShardingMapping(store)
    start = perf_counter()
    for i in ids:
        mapping[f"c/{i}"] = value
    return perf_counter() - start


def write_async(store: ShardingStore | LocalStore, ids: Sequence[int], value: bytes) -> float:
    async def write() -> float:
        buffer = cpu.Buffer.from_bytes(value)
        start = perf_counter()
        for i in ids:
            await store.set(f"c/{i}", buffer)
        return perf_counter() - start

    return asyncio.run(write())


def write_files_blocking(store: LocalStore, ids: Sequence[int], value: bytes) -> float:
    buffer = cpu.Buffer.from_bytes(value)
    start = perf_counter()
    for i in ids:
        store.set_sync(f"c/{i}", buffer)
    return perf_counter() - start


INTERFACES: dict[str, Callable[[Any, Sequence[int], bytes], float]] = {
    "blocking": write_blocking,
    "async": write_async,
}


def chunks(sizes: Sizes) -> None:
    title("chunk by chunk, a whole shard in random order", "bytes written", "at most")
    for nbytes, n in product(MAX_WRITTEN, sizes.entries):
        for name, write in INTERFACES.items():
            with fresh_directory() as directory, counting() as counts:
                store = make_chunks(directory, n, nbytes)
                counts.clear()
                write(store, random.sample(range(n), n), os.urandom(nbytes))
                flush(store)
                written = counts["nbytes"] / (n * nbytes)
                index_nbytes = n * 16 + 4
                # One write covers an index of up to a page, from the entry to its checksum.
                in_page = index_nbytes if index_nbytes <= PAGE_NBYTES else 0
                at_most = MAX_WRITTEN[nbytes] + in_page / nbytes
                row(f"{n} entries of {nbytes} bytes, {name}", written, at_most)
                assert 1 < written <= at_most
                z: Any = zarr.open_array(directory, mode="r")
                assert (np.diff(z[:].reshape(n, nbytes), axis=0) == 0).all()
                # No journal, no gap; but a shard of more than 64 MiB has grown once: it has an old
                # index, and perhaps a gap that is too small to be trimmed.
                n_left = nbytes_of_files(directory) - n * nbytes - index_nbytes
                assert 0 <= n_left <= (2 * index_nbytes if n * nbytes > 64 * 1024**2 else 0)
    for nbytes in MAX_WRITTEN:
        times_of_chunks(sizes, nbytes)


def times_of_chunks(sizes: Sizes, nbytes: int) -> None:
    """Time writes into shards that are half full, none of which becomes full."""
    value = os.urandom(nbytes)

    def into_half(n_entries: int, write: Callable[..., float]) -> Callable[[Path], float]:
        n_each = min(n_entries // 2 - 1, sizes.n_sample)
        n_shards = -(-sizes.n_sample // n_each)

        def run(directory: Path) -> float:
            store = make_chunks(directory, n_entries, nbytes, n_shards)
            rest: list[int] = []
            for shard in range(n_shards):
                ids = [shard * n_entries + i for i in range(n_entries)]
                random.shuffle(ids)
                half = ids[: n_entries // 2]
                ShardingMapping(store).set_partial_values([(f"c/{i}", 0, value) for i in half])
                rest += ids[n_entries // 2 :][:n_each]
            return write(store, rest[: sizes.n_sample], value)

        return run

    few, many = sizes.entries
    cases = {
        f"{n} entries, {name}": into_half(n, write)
        for n in sizes.entries
        for name, write in INTERFACES.items()
    }
    ids = random.sample(range(many), sizes.n_sample)
    cases["chunk files, blocking"] = lambda d: write_files_blocking(LocalStore(d), ids, value)
    cases["chunk files, async"] = lambda d: write_async(LocalStore(d), ids, value)
    seconds = time_of_each(cases, sizes.repeats, sizes.middle)
    columns = ("µs a chunk", f"to {few} entries", "to files")
    title(f"{nbytes} bytes into a half full shard, time", *columns)
    for name, s in seconds.items():
        kind = name.split(", ")[1]
        ratios = (s / seconds[f"{other}, {kind}"] for other in (f"{few} entries", "chunk files"))
        row(name, f"{1e6 * s / sizes.n_sample:.0f}", *ratios)
    print("  (goal: the many entries take at most 1.5 times as long as the few)")


# --------------------------------------- (b) updates and (c) whole arrays


def random_corners(data: Values) -> list[tuple[int, ...]]:
    """Return the corners of all chunks in random order."""
    corners = list(product(*(range(0, n, CHUNK) for n in data.shape)))
    random.shuffle(corners)
    return corners


def region_at(corner: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(c, c + CHUNK) for c in corner)


def nbytes_of_chunks(directory: Path, corners: Sequence[Sequence[int]]) -> int:
    """Return the sizes of stored chunks, also in shards of native zarr."""
    mapping = ShardingMapping(directory)
    return sum(len(mapping["c/" + "/".join(str(c // CHUNK) for c in at)]) for at in corners)


def updates(sizes: Sizes) -> None:
    data = smooth_data(sizes.shape)
    written: dict[str, list[float]] = defaultdict(list)

    def update(name: str, pipe: str, **options: Any) -> Callable[[Path], float]:
        is_ours = name.startswith("ours")

        def run(directory: Path) -> float:
            store: Any = PlainStore(directory)
            if is_ours:
                store = ShardingStore(directory, chunks_per_shard=CHUNKS_PER_SHARD)
            # Shards are stored as a whole first, whatever updates them.
            bulk_pipe = OUR_PIPELINE if is_ours else pipe
            create(store, data.shape, (CHUNK,) * 3, bulk_pipe, **options)[...] = data
            with zarr.config.set({"codec_pipeline.path": pipe}):
                z: Any = zarr.open_array(store, mode="r+")
            corners = random_corners(data)[: sizes.n_updates]
            new = [(region_at(corner), data[region_at(corner)] + 1) for corner in corners]

            def write() -> None:
                for region, values in new:
                    z[region] = values
                if is_ours:
                    flush(store)

            n_before = 0 if is_ours else store.nbytes
            with counting() as counts:
                seconds = timed(write)
            n_written = counts["nbytes"] if is_ours else store.nbytes - n_before
            nbytes = nbytes_of_chunks(directory, corners)
            written[name].append(n_written / nbytes)
            if is_ours:
                # The index moves when a full shard begins to grow, now and then, and at the end.
                n_shards = len({tuple(c // SHARD for c in corner) for corner in corners})
                assert nbytes < n_written < 1.2 * nbytes + 3 * n_shards * INDEX_NBYTES
            plain: Any = zarr.open_array(directory, mode="r")
            assert all(np.array_equal(plain[region], values) for region, values in new[:5])
            return seconds

        return run

    cases = {}
    for name, pipe in ZARR_PIPELINES.items():
        cases[f"native, {name}"] = update("native", pipe, shards=(SHARD,) * 3)
        cases[f"chunk files, {name}"] = update("chunk files", pipe)
        cases[f"ours, {name}"] = update("ours", pipe)
    cases["ours, ShardedCodecPipeline"] = update("ours, own pipeline", OUR_PIPELINE)
    seconds = time_of_each(cases, sizes.repeats, sizes.middle)
    columns = [f"{name} / this" for name in ZARR_PIPELINES]
    text = f"{sizes.n_updates} updates of a chunk, {CHUNKS_PER_SHARD**3} chunks a shard"
    title(text, "ms an update", *columns)
    for case, s in seconds.items():
        ratios = [seconds[f"native, {name}"] / s for name in ZARR_PIPELINES]
        row(case, f"{1e3 * s / sizes.n_updates:.2f}", *ratios)
    for kind, ratios in written.items():
        row(f"bytes written for a byte of chunks: {kind}", statistics.median(ratios))
    print("  (goal: native takes at least 10 times as long)")


def arrays(sizes: Sizes) -> None:
    data = smooth_data(sizes.shape)

    def write(is_ours: bool, pipe: str) -> Callable[[Path], float]:
        def run(directory: Path) -> float:
            store: Any = LocalStore(directory)
            if is_ours:
                store = ShardingStore(directory, chunks_per_shard=CHUNKS_PER_SHARD)
            options = {} if is_ours else {"shards": (SHARD,) * 3}
            z = create(store, data.shape, (CHUNK,) * 3, pipe, **options)
            with counting() as counts:
                seconds = timed(lambda: z.__setitem__(..., data))
            if is_ours:
                flush(store)
            if pipe == OUR_PIPELINE:  # each shard once, as one file
                n_shards = int(np.prod([-(-n // SHARD) for n in data.shape]))
                assert counts["replace"] == n_shards
                assert counts["nbytes"] == nbytes_of_files(directory)
            plain: Any = zarr.open_array(directory, mode="r")
            assert np.array_equal(plain[...], data)
            return seconds

        return run

    cases = {f"native, {name}": write(False, pipe) for name, pipe in ZARR_PIPELINES.items()}
    cases |= {f"ours, {name}": write(True, pipe) for name, pipe in ZARR_PIPELINES.items()}
    cases["ours, ShardedCodecPipeline"] = write(True, OUR_PIPELINE)
    seconds = time_of_each(cases, sizes.repeats, sizes.middle)
    columns = [f"this / {name}" for name in ZARR_PIPELINES]
    title(f"z[...] = data, {data.shape} uint16, {CHUNKS_PER_SHARD}³ chunks a shard", "ms", *columns)
    for case, s in seconds.items():
        row(case, f"{1e3 * s:.0f}", *(s / seconds[f"native, {name}"] for name in ZARR_PIPELINES))
    print("  (goal: ShardedCodecPipeline takes at most 1.2 times as long as native)")


# ------------------------------------------------------- (d) an object store


def puts(sizes: Sizes) -> None:
    data = smooth_data(sizes.shape)
    n_shards = int(np.prod([-(-n // SHARD) for n in data.shape]))
    batched = ZARR_PIPELINES["batched"]
    title("an object store: requests for shards", "shards", "PUTs", "GETs")

    def show(name: str, objects: ObjectStore) -> tuple[list[int], int]:
        shard_puts = [n for key, n in objects.puts.items() if key.startswith("c/")]
        n_gets = sum(n for key, n in objects.gets.items() if key.startswith("c/"))
        row(name, *map(str, (len(shard_puts), sum(shard_puts), n_gets)))
        return shard_puts, n_gets

    def check(name: str, objects: ObjectStore) -> None:
        assert show(name, objects) == ([1] * n_shards, 0)
        plain: Any = zarr.open_array(objects, mode="r")
        assert np.array_equal(plain[...], data)

    objects = ObjectStore()
    store = ShardingStore(objects, chunks_per_shard=CHUNKS_PER_SHARD)
    z = create(store, data.shape, (CHUNK,) * 3, batched)
    with store.batch(max_nbytes=2 * data.nbytes):
        for corner in random_corners(data):
            z[region_at(corner)] = data[region_at(corner)]
    check("chunk by chunk in random order, in a batch", objects)

    objects = ObjectStore()
    store = ShardingStore(objects, chunks_per_shard=CHUNKS_PER_SHARD)
    create(store, data.shape, (CHUNK,) * 3, OUR_PIPELINE)[...] = data
    check("z[...] = data, ShardedCodecPipeline", objects)

    objects = ObjectStore()
    z = create(objects, data.shape, (CHUNK,) * 3, batched, shards=(SHARD,) * 3)
    for corner in random_corners(data)[: sizes.n_updates]:
        z[region_at(corner)] = data[region_at(corner)]
    show(f"native sharding, {sizes.n_updates} chunks one by one", objects)


def streams(sizes: Sizes) -> None:
    show_streams(sizes.n_slices, sizes.slices_per_shard, sizes.side, sizes.repeats, sizes.middle)


PARTS: dict[str, Callable[[Sizes], None]] = {
    part.__name__: part for part in (chunks, updates, arrays, puts, streams)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, help="of what is timed")
    parser.add_argument("--quick", action="store_true", help="small, once: do the counts hold?")
    parser.add_argument(
        "--minima", action="store_true", help="instead of medians, on a busy machine"
    )
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.repeats is not None:
        sizes = replace(sizes, repeats=options.repeats)
    if options.minima:
        sizes = replace(sizes, middle=min)
    kind = "minima" if options.minima else "medians"
    print(f"zarr {zarr.__version__}, {os.cpu_count()} cores; {kind} of {sizes.repeats}")
    for name in options.parts:
        PARTS[name](sizes)


if __name__ == "__main__":
    main()
