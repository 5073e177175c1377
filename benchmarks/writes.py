"""Writes: chunk by chunk, of whole arrays, to an object store, and of streams of slices.

Bytes and PUTs are counted and asserted; times are medians of several repeats, all in one run, and
mean something only as ratios. Bytes are all that goes into files of shards and what is beside them:
entries, indexes, journals, from the creation of a shard to the flush at the end.

    chunks   random order, one shard with few entries and one with many; beside chunk files
    updates  single chunks of a stored array, 512 chunks a shard; beside native sharding
    arrays   `z[...] = data`; beside native sharding
    puts     an object store: one PUT for each shard
    streams  slices as they come, by ZEP 2's four techniques (`examples/slices.py` tells more)

    python benchmarks/writes.py [--parts chunks updates ...] [--repeats 5] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.buffer import Buffer, cpu
from zarr.storage import LocalStore, MemoryStore

from zarr_shardstore import ShardedCodecPipeline, ShardingMapping, ShardingStore, get_shard_info
from zarr_shardstore.io import file_calls
from zarr_shardstore.plan.strategies import Strategy

CHUNK = 16
CHUNKS_PER_SHARD = 8
SHARD = CHUNK * CHUNKS_PER_SHARD
INDEX_NBYTES = CHUNKS_PER_SHARD**3 * 16 + 4
SLICE_CHUNK = 64

MAX_WRITTEN = {4096: 1.1, 1024: 1.2}
"""Bytes that may be written for a byte of chunks, by the size of a chunk."""

MAX_WRITTEN_OF_STREAM = 1.2

KNOWN_LAYOUT_STRATEGY: Strategy = "append"

OUR_PIPELINE = f"{ShardedCodecPipeline.__module__}.{ShardedCodecPipeline.__name__}"
ZARR_PIPELINES = {
    name: f"zarr.core.codec_pipeline.{cls}"
    for name, cls in (("batched", "BatchedCodecPipeline"), ("fused", "FusedCodecPipeline"))
    if hasattr(zarr.core.codec_pipeline, cls)  # zarr 3.1 has no fused one
}

Values = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Sizes:
    """How much is written."""

    repeats: int = 5
    entries: tuple[int, int] = (512, 32_768)
    n_sample: int = 2_000
    n_updates: int = 50
    shape: tuple[int, int, int] = (256, 256, 128)
    n_slices: int = 32
    slices_per_shard: int = 16
    side: int = 512


QUICK = Sizes(1, (64, 512), 60, 5, (128, 128, 256), 6, 4, 128)


# ------------------------------------------------------------------ counting


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Calls of each function of `file_calls`, and ``nbytes``, for as long as the block runs."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(*args: Any, **options: Any) -> Any:
            with lock:
                counts[name] += 1
                if name == "write_at":
                    counts["nbytes"] += sum(map(len, args[1]))
            return call(*args, **options)

        return counted_call

    calls = {name: getattr(file_calls, name) for name in file_calls.__all__}
    for name, call in calls.items():
        setattr(file_calls, name, counted(name, call))
    try:
        yield counts
    finally:
        for name, call in calls.items():
            setattr(file_calls, name, call)


class PlainStore(LocalStore):
    """Files as zarr writes them; counts bytes."""

    nbytes = 0

    async def set(self, key: str, value: Buffer) -> None:
        self.nbytes += len(value)
        await super().set(key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        self.nbytes += len(value)
        super().set_sync(key, value)


class ObjectStore(MemoryStore):
    """Stands for an object store; counts requests for shards."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: Counter[str] = Counter()
        self.gets: Counter[str] = Counter()

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        self.puts[key] += 1
        await super().set(key, value, byte_range)

    def set_sync(self, key: str, value: Buffer) -> None:
        self.puts[key] += 1
        super().set_sync(key, value)

    async def get(self, key: str, *args: Any, **options: Any) -> Buffer | None:
        self.gets[key] += 1
        return await super().get(key, *args, **options)

    def get_sync(self, key: str, *args: Any, **options: Any) -> Buffer | None:
        self.gets[key] += 1
        return super().get_sync(key, *args, **options)


# -------------------------------------------------------- timing and printing


@contextmanager
def fresh_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="zarr-shardstore-writes-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(cases: dict[str, Callable[[Path], float]], repeats: int) -> dict[str, float]:
    """Seconds by case; each repeat runs each case once, in another order, in a fresh directory."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name in random.sample(list(cases), len(cases)):
            with fresh_directory() as directory:
                seconds[name].append(cases[name](directory))
    return {name: statistics.median(seconds[name]) for name in cases}


def title(text: str, *columns: str) -> None:
    print(f"\n{text:56}" + "".join(f"{column:>17}" for column in columns), flush=True)


def row(name: str, *cells: float | str) -> None:
    texts = [cell if isinstance(cell, str) else f"{cell:.2f}" for cell in cells]
    print(f"  {name:54}" + "".join(f"{text:>17}" for text in texts), flush=True)


def flush(store: ShardingStore) -> None:
    ShardingMapping(store).flush()


def nbytes_of_files(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("c/**/*") if file.is_file())


# ----------------------------------------------------- (a) chunk by chunk


def make_chunks(directory: Path, n_entries: int, nbytes: int, n_shards: int = 1) -> ShardingStore:
    """A store with an array of shards that are not there yet."""
    store = ShardingStore(directory, chunks_per_shard=n_entries)
    shape = (n_shards * n_entries * nbytes,)
    zarr.create_array(store, shape=shape, chunks=(nbytes,), dtype="u1", compressors=None)
    return store


def write_blocking(store: ShardingStore, ids: Sequence[int], value: bytes) -> float:
    mapping = ShardingMapping(store)
    start = time.perf_counter()
    for i in ids:
        mapping[f"c/{i}"] = value
    return time.perf_counter() - start


def write_async(store: ShardingStore | LocalStore, ids: Sequence[int], value: bytes) -> float:
    async def write() -> float:
        buffer = cpu.Buffer.from_bytes(value)
        start = time.perf_counter()
        for i in ids:
            await store.set(f"c/{i}", buffer)
        return time.perf_counter() - start

    return asyncio.run(write())


def write_files_blocking(store: Any, ids: Sequence[int], value: bytes) -> float:
    buffer = cpu.Buffer.from_bytes(value)
    start = time.perf_counter()
    for i in ids:
        store.set_sync(f"c/{i}", buffer)
    return time.perf_counter() - start


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
                row(f"{n} entries of {nbytes} bytes, {name}", written, MAX_WRITTEN[nbytes])
                assert 1 < written <= MAX_WRITTEN[nbytes]
                z: Any = zarr.open_array(directory, mode="r")
                assert (np.diff(z[:].reshape(n, nbytes), axis=0) == 0).all()
                assert nbytes_of_files(directory) == n * (nbytes + 16) + 4  # nothing is left over
    for nbytes in MAX_WRITTEN:
        times_of_chunks(sizes, nbytes)


def times_of_chunks(sizes: Sizes, nbytes: int) -> None:
    """Into shards that are half full, none of which becomes full."""
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
    if hasattr(LocalStore, "set_sync"):  # zarr 3.4
        cases["chunk files, blocking"] = lambda d: write_files_blocking(LocalStore(d), ids, value)
    cases["chunk files, async"] = lambda d: write_async(LocalStore(d), ids, value)
    seconds = medians(cases, sizes.repeats)
    title(
        f"{nbytes} bytes into a half full shard, time",
        "µs a chunk",
        f"to {few} entries",
        "to files",
    )
    for name, s in seconds.items():
        kind = name.split(", ")[1]
        files = seconds.get(f"chunk files, {kind}")
        row(
            name,
            f"{1e6 * s / sizes.n_sample:.0f}",
            s / seconds[f"{few} entries, {kind}"],
            "-" if files is None else s / files,
        )
    print("  (goal: the many entries take at most 1.5 times as long as the few)")


# --------------------------------------- (b) updates and (c) whole arrays


def smooth_data(shape: tuple[int, ...]) -> Values:
    """Something that compresses about as images do: a smooth field and a little noise."""
    rng = np.random.default_rng(0)
    axes = np.meshgrid(*(np.linspace(0, 9, n, dtype="f4") for n in shape), indexing="ij")
    data: Values = (sum(np.sin(a) for a in axes) * 1000 + 4000).astype("u2")
    return data + rng.integers(0, 9, shape, dtype="u2")


def create(
    store: Any, shape: Sequence[int], chunk: Sequence[int], pipe: str, **options: Any
) -> Any:
    """An array that is written by a pipeline."""
    with zarr.config.set({"codec_pipeline.path": pipe}):
        return zarr.create_array(store, shape=shape, chunks=chunk, dtype="u2", **options)


def random_corners(data: Values) -> list[tuple[int, ...]]:
    """Of all chunks, in random order."""
    corners = list(product(*(range(0, n, CHUNK) for n in data.shape)))
    random.shuffle(corners)
    return corners


def region_at(corner: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(c, c + CHUNK) for c in corner)


def nbytes_of_chunks(directory: Path, corners: Sequence[Sequence[int]]) -> int:
    """Of stored chunks, as they are stored, also in shards of native zarr."""
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
    seconds = medians(cases, sizes.repeats)
    columns = [f"native {name} / this" for name in ZARR_PIPELINES]
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
            store = (
                ShardingStore(directory, chunks_per_shard=CHUNKS_PER_SHARD)
                if is_ours
                else LocalStore(directory)
            )
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
    seconds = medians(cases, sizes.repeats)
    columns = [f"this / native {name}" for name in ZARR_PIPELINES]
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

    def show(name: str, objects: ObjectStore) -> tuple[Counter[str], int]:
        shard_puts = Counter({k: n for k, n in objects.puts.items() if k.startswith("c/")})
        n_gets = sum(n for key, n in objects.gets.items() if key.startswith("c/"))
        row(name, *map(str, (len(shard_puts), shard_puts.total(), n_gets)))
        plain: Any = zarr.open_array(objects, mode="r")
        assert np.array_equal(plain[...], data)
        return shard_puts, n_gets

    def check(name: str, objects: ObjectStore) -> None:
        shard_puts, n_gets = show(name, objects)
        assert len(shard_puts) == n_shards
        assert set(shard_puts.values()) == {1}
        assert n_gets == 0

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
    for corner in random_corners(data):
        z[region_at(corner)] = data[region_at(corner)]
    show("native sharding, chunk by chunk", objects)


# ----------------------------------------------------- (e) streams of slices


@dataclass(frozen=True)
class Stream:
    """Writes of a stack of slices: what is written one after the other, and how it is stored."""

    name: str
    slices_per_shard: int
    writes: Sequence[tuple[int, slice]]
    options: dict[str, Any]
    strategy: Strategy = "append"
    by_append: bool = False


def make_streams(sizes: Sizes) -> list[Stream]:
    n, per_shard, all_rows = sizes.n_slices, sizes.slices_per_shard, slice(None)
    in_order = [(i, all_rows) for i in range(n)]
    shuffled = random.sample(in_order, n)
    rows = [slice(y, y + SLICE_CHUNK) for y in range(0, sizes.side, SLICE_CHUNK)]
    strips = [(i, strip) for i in range(n) for strip in rows]
    random.shuffle(strips)
    raw = {"compressors": None}
    return [
        Stream("1. a shard for each slice", 1, in_order, {}),
        Stream("2. slices appended", per_shard, in_order, {}),
        Stream("2. slices appended by z.append()", per_shard, in_order, {}, by_append=True),
        Stream("3. known layout", per_shard, shuffled, raw, KNOWN_LAYOUT_STRATEGY),
        Stream("4. order of arrival", per_shard, strips, {}),
    ]


def streams(sizes: Sizes) -> None:
    data = smooth_data((sizes.n_slices, sizes.side, sizes.side))
    title(
        f"{sizes.n_slices} slices, {(sizes.side // SLICE_CHUNK) ** 2} chunks each",
        "written",
        "native wrote",
        "native / this",
        "files",
    )
    for stream in make_streams(sizes):
        one_stream(stream, data, sizes.repeats)
    print("  (written: bytes for a byte of chunks; native / this: time)")


def one_stream(stream: Stream, data: Values, repeats: int) -> None:
    """Write a stream both ways, and print its row."""
    counts: Counter[str] = Counter()
    first_shape = (0 if stream.by_append else len(data), *data.shape[1:])
    chunk = (1, SLICE_CHUNK, SLICE_CHUNK)

    def write(z: Any) -> None:
        for i, strip in stream.writes:
            if stream.by_append:
                z.append(data[i : i + 1])
            else:
                z[i, strip] = data[i, strip]

    def native(directory: Path) -> float:
        store = PlainStore(directory)
        shard = (stream.slices_per_shard, *data.shape[1:])
        pipe = ZARR_PIPELINES["batched"]
        z = create(store, first_shape, chunk, pipe, shards=shard, **stream.options)
        n_before = store.nbytes
        seconds = timed(lambda: write(z))
        counts["native"] = store.nbytes - n_before
        return seconds

    def ours(directory: Path) -> float:
        per_slice = -(-data.shape[1] // SLICE_CHUNK)
        cps = (stream.slices_per_shard, per_slice, per_slice)
        store = ShardingStore(directory, chunks_per_shard=cps, strategy=stream.strategy)
        z = create(store, first_shape, chunk, OUR_PIPELINE, **stream.options)

        def write_and_flush() -> None:
            write(z)
            flush(store)

        with counting() as calls:
            seconds = timed(write_and_flush)
        (array,) = get_shard_info(directory).arrays
        counts["ours"] = calls["nbytes"]
        counts["chunks"], counts["files"] = array.chunk_nbytes, array.n_objects
        plain: Any = zarr.open_array(directory, mode="r")
        assert np.array_equal(plain[...], data)
        return seconds

    seconds = medians({"native": native, "ours": ours}, repeats)
    written = counts["ours"] / counts["chunks"]
    assert written <= MAX_WRITTEN_OF_STREAM
    assert counts["files"] == -(-len(data) // stream.slices_per_shard)
    row(
        stream.name,
        written,
        counts["native"] / counts["chunks"],
        seconds["native"] / seconds["ours"],
        str(counts["files"]),
    )


PARTS: dict[str, Callable[[Sizes], None]] = {
    part.__name__: part for part in (chunks, updates, arrays, puts, streams)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, help="of what is timed")
    parser.add_argument("--quick", action="store_true", help="small, once: do the counts hold?")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.repeats is not None:
        sizes = replace(sizes, repeats=options.repeats)
    print(f"zarr {zarr.__version__}, {os.cpu_count()} cores; medians of {sizes.repeats}")
    for name in options.parts:
        PARTS[name](sizes)


if __name__ == "__main__":
    main()
