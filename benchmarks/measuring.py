"""Counters of bytes and requests, clocks, and table rows for the benchmarks."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, MemoryStore

from tests.support.kit.process import SYSTEM_CALLS
from zarr_shardstore import ShardedCodecPipeline, ShardingMapping, ShardingStore
from zarr_shardstore.io.local import fs

Values: TypeAlias = npt.NDArray[np.uint16]
Middle: TypeAlias = Callable[[list[float]], float]

OUR_PIPELINE = f"{ShardedCodecPipeline.__module__}.{ShardedCodecPipeline.__name__}"
ZARR_PIPELINES = {
    name: f"zarr.core.codec_pipeline.{cls}"
    for name, cls in (("batched", "BatchedCodecPipeline"), ("fused", "FusedCodecPipeline"))
    if hasattr(zarr.core.codec_pipeline, cls)  # zarr 3.1 has no fused one
}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of each file function, and ``nbytes``, until the end of the block."""
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

    calls = {name: getattr(fs, name) for name in SYSTEM_CALLS}
    for name, call in calls.items():
        setattr(fs, name, counted(name, call))
    try:
        yield counts
    finally:
        for name, call in calls.items():
            setattr(fs, name, call)


class PlainStore(LocalStore):
    """Files as zarr writes them, with a count of bytes."""

    nbytes = 0

    async def set(self, key: str, value: Buffer) -> None:
        self.nbytes += len(value)
        await super().set(key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        self.nbytes += len(value)
        super().set_sync(key, value)


class ObjectStore(MemoryStore):
    """A simulated object store, with a count of requests for shards."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
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


@contextmanager
def fresh_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="zarr-shardstore-bench-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_of_each(
    cases: dict[str, Callable[[Path], float]], repeats: int, middle: Middle
) -> dict[str, float]:
    """Return seconds by case. Each repeat runs each case once, in another order and directory."""

    def in_fresh_directory(run: Callable[[Path], float]) -> float:
        with fresh_directory() as directory:
            return run(directory)

    runs = {name: partial(in_fresh_directory, run) for name, run in cases.items()}
    return time_of_each_run(runs, repeats, middle)


def time_of_each_run(
    cases: Mapping[str, Callable[[], float]], repeats: int, middle: Middle
) -> dict[str, float]:
    """Return seconds by case, for cases that need no directory of their own."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name in random.sample(list(cases), len(cases)):
            seconds[name].append(cases[name]())
    return {name: middle(seconds[name]) for name in cases}


def title(text: str, *columns: str) -> None:
    print(f"\n{text:56}" + "".join(f"{column:>17}" for column in columns), flush=True)


def row(name: str, *cells: float | str) -> None:
    texts = [cell if isinstance(cell, str) else f"{cell:.2f}" for cell in cells]
    print(f"  {name:54}" + "".join(f"{text:>17}" for text in texts), flush=True)


def flush(store: ShardingStore) -> None:
    ShardingMapping(store).flush()


def nbytes_of_files(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("c/**/*") if file.is_file())


def smooth_data(shape: tuple[int, ...]) -> Values:
    """Make data that compresses about as images do: a smooth field and a little noise."""
    rng = np.random.default_rng(0)
    axes = np.meshgrid(*(np.linspace(0, 9, n, dtype="f4") for n in shape), indexing="ij")
    waves = np.sum([np.sin(a) for a in axes], axis=0)
    data: Values = (waves * 1000 + 4000).astype("u2")
    data += rng.integers(0, 9, shape, dtype="u2")
    return data


def create(
    store: Any, shape: tuple[int, ...], chunk: tuple[int, ...], pipe: str, **options: Any
) -> Any:
    """Create an array that is written by a pipeline."""
    with zarr.config.set({"codec_pipeline.path": pipe}):
        return zarr.create_array(store, shape=shape, chunks=chunk, dtype="u2", **options)
