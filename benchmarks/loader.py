"""Batches for training: the loader beside the raw client with the same ranges, and other loaders.

    python benchmarks/loader.py [raw] [peers] [--mb 256] [--repeats 3]

The last column is of a consumer that computes as long as the raw client takes: the time until the
first batch, and the part of the time that it then waits.

The raw client reads the same byte ranges and decodes them in as many threads. Once it throws each
chunk away, once it copies the samples into arrays of the size of a batch, in the order stored.
Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zarr
import zstandard
from latency_proxy import latency_proxy
from measuring import fresh_directory, row, smooth_data, title
from servers import file_server, objects_of
from zarr.codecs import ZstdCodec

from zarr_shardstore import ShardingStore, ShardLoader
from zarr_shardstore.access import EntryReader, requests

SIDE = 128
BATCH = 64
N_THREADS = 2
N_REQUESTS = 64
PLACES = ("local", "30 ms")
POOL_NBYTES = 16 * 2**20


def make(path: Path, n: int, in_chunk: int, codec: str, in_shard: int = 256) -> None:
    """Write n samples of 32 KB, so many in a chunk."""
    store = ShardingStore(str(path), chunks_per_shard=(in_shard // in_chunk, 1, 1))
    compressors = [ZstdCodec(level=1)] if codec == "zstd" else None
    z = zarr.create_array(
        store,
        name="x",
        shape=(n, SIDE, SIDE),
        chunks=(in_chunk, SIDE, SIDE),
        dtype="u2",
        compressors=compressors,
    )
    block = smooth_data((512, SIDE, SIDE))
    for start in range(0, n, 512):
        z[start : start + 512] = block[: n - start] + np.uint16(start)


def ranges_of(store: ShardingStore) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return key and ranges of the entries of each shard, neighbours joined."""
    reader = EntryReader.of(store, "x")
    layout = reader.layout
    assert layout is not None
    found = []
    grid = layout.spec.boxes.shape(reader.chunks.grid_shape)
    for i in range(grid[0]):
        shard = layout.shard((i, 0, 0))
        index = reader.engine.driver.run(requests.ask([requests.GetIndex(shard)]))[0].decoded
        fields = index.fields[index.present_ids()].astype(int)
        found.append((shard.key, [(a, a + n) for a, n in fields[fields[:, 0].argsort()].tolist()]))
    return found


class Sink:
    """Arrays of the size of a batch, used in turn, for a raw client that keeps what it decodes."""

    def __init__(self, n_arrays: int = 32) -> None:
        self.arrays = [np.empty((BATCH, SIDE, SIDE), "u2") for _ in range(n_arrays)]
        self.n = 0

    def add(self, chunk: Any) -> None:
        for sample in chunk:
            at, self.n = self.n, self.n + 1
            self.arrays[at // BATCH % len(self.arrays)][at % BATCH] = sample


def raw_local(path: Path, shards: Any, codec: str, shape: Any, keeps: bool) -> Callable[[], float]:
    """Read ranges by pread and decode them, in threads that each take a shard."""

    def run() -> float:
        left = iter(shards)
        lock = threading.Lock()

        def work() -> None:
            decompress, sink = zstandard.ZstdDecompressor().decompress, Sink(16)
            while True:
                with lock:
                    item = next(left, None)
                if item is None:
                    return
                fd = os.open(path / item[0], os.O_RDONLY)
                try:
                    for start, stop in item[1]:
                        data = os.pread(fd, stop - start, start)
                        if codec == "zstd":
                            data = decompress(data)
                        chunk = np.frombuffer(data, "u2").reshape(shape)
                        if keeps:
                            sink.add(chunk)
                finally:
                    os.close(fd)

        return in_threads(work)

    return run


def in_threads(work: Callable[[], None]) -> float:
    threads = [threading.Thread(target=work) for _ in range(N_THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def raw_remote(
    client: Any, shards: Any, codec: str, shape: Any, keeps: bool
) -> Callable[[], float]:
    """Read ranges by obstore's ``get_ranges``, many shards at a time, and decode in threads."""
    import obstore

    def run() -> float:
        decoding, sink = threading.Semaphore(N_THREADS), Sink()

        def work(item: Any) -> None:
            starts, ends = zip(*item[1], strict=True)
            values = obstore.get_ranges(client, item[0], starts=starts, ends=ends)
            with decoding:
                decompress = zstandard.ZstdDecompressor().decompress
                for value in values:
                    data: Any = value
                    if codec == "zstd":
                        data = decompress(memoryview(value))
                    chunk = np.frombuffer(data, "u2").reshape(shape)
                    if keeps:
                        sink.add(chunk)

        start = time.perf_counter()
        with ThreadPoolExecutor(N_REQUESTS) as pool:
            list(pool.map(work, shards))
        return time.perf_counter() - start

    return run


def ours(store: Any, shuffle: Any, compute_s: float = 0, **options: Any) -> Callable[[], Any]:
    loader = ShardLoader(
        store, "x", batch_size=BATCH, shuffle=shuffle, n_threads=N_THREADS, **options
    )

    def run() -> float:
        start = time.perf_counter()
        for i, _ in enumerate(loader):
            if not i:
                run.first_s = loader.stats().waited_s  # type: ignore[attr-defined]
            if compute_s:
                time.sleep(compute_s / len(loader))
        elapsed = time.perf_counter() - start
        run.stats = loader.stats()  # type: ignore[attr-defined]
        return elapsed

    return run


def measure(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for _ in range(repeats):
        for name in random.sample(list(cases), len(cases)):
            seconds[name].append(cases[name]())
    return seconds


def against_raw(n: int, repeats: int) -> None:
    title(
        "MB/s of decoded samples",
        "raw",
        "raw, kept",
        "in order",
        "shards",
        "shards / kept",
        "spread",
        "first batch, waits",
    )
    for place in PLACES:
        for codec in ("zstd", "none"):
            for in_chunk in (1, 8, 32):
                with fresh_directory() as path, place_of(path, place) as client:
                    make(path, n, in_chunk, codec)
                    shape = (in_chunk, SIDE, SIDE)
                    store = ShardingStore(str(path) if client is None else client)
                    shards = ranges_of(store)
                    raw: Any = partial(raw_local, path)
                    if client is not None:
                        raw = partial(raw_remote, client.store)
                    cases = {
                        "raw": raw(shards, codec, shape, False),
                        "kept": raw(shards, codec, shape, True),
                        "in order": ours(store, False),
                        "shards": ours(store, "shards", pool_nbytes=POOL_NBYTES),
                    }
                    seconds = measure(cases, repeats)
                    mb = n * SIDE * SIDE * 2 / 1e6
                    speeds = {name: mb / median(each) for name, each in seconds.items()}
                    ratios = [
                        a / b for a, b in zip(seconds["kept"], seconds["shards"], strict=True)
                    ]
                    busy: Any = ours(
                        store, "shards", median(seconds["raw"]), pool_nbytes=POOL_NBYTES
                    )
                    busy()
                    busy()
                    waited = (busy.stats.waited_s - busy.first_s) / busy.stats.seconds
                    row(
                        f"{place}, {codec}, {in_chunk} in a chunk",
                        *(f"{speeds[name]:.0f}" for name in cases),
                        f"{speeds['shards'] / speeds['kept']:.2f}",
                        f"{min(ratios):.2f}–{max(ratios):.2f}",
                        f"{busy.first_s * 1e3:.0f} ms, {waited:.0%}",
                    )


@contextmanager
def place_of(path: Path, place: str) -> Iterator[Any]:
    if place == "local":
        yield None
        return
    with ExitStack() as stack:
        server = stack.enter_context(file_server(path))
        proxy = stack.enter_context(latency_proxy(server.port))
        yield objects_of(proxy.port)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["raw"])
    parser.add_argument("--places", nargs="*", default=PLACES)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    n_samples = args.mb * 1_000_000 // (SIDE * SIDE * 2) // 256 * 256
    PLACES = args.places
    if "raw" in args.parts:
        against_raw(n_samples, args.repeats)
