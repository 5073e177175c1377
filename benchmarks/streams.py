"""Streams of slices, stored by ZEP 2's four techniques, here and in native sharded arrays.

`examples/slices.py` explains each technique and its use.

    python benchmarks/writes.py --parts streams

Source: ZEP 2, "Storing a stream of data slices".
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from measuring import (
    OUR_PIPELINE,
    ZARR_PIPELINES,
    Middle,
    PlainStore,
    Values,
    counting,
    create,
    flush,
    row,
    smooth_data,
    time_of_each,
    timed,
    title,
)

from zarr_shardstore import ShardingStore, get_shard_info
from zarr_shardstore.shards.stack import Strategy

CHUNK = 64

MAX_WRITTEN = 1.2
"""Bytes that may be written for a byte of chunks."""


@dataclass(frozen=True)
class Stream:
    """Writes of a stack of slices: their order, and their storage."""

    name: str
    slices_per_shard: int
    writes: Sequence[tuple[int, slice]]
    options: dict[str, Any]
    strategy: Strategy = "append"
    by_append: bool = False


def make_streams(n: int, per_shard: int, side: int) -> list[Stream]:
    all_rows = slice(None)
    in_order = [(i, all_rows) for i in range(n)]
    shuffled = random.sample(in_order, n)
    rows = [slice(y, y + CHUNK) for y in range(0, side, CHUNK)]
    strips = [(i, strip) for i in range(n) for strip in rows]
    random.shuffle(strips)
    raw = {"compressors": None}
    return [
        Stream("1. a shard for each slice", 1, in_order, {}),
        Stream("2. slices appended", per_shard, in_order, {}),
        Stream("2. slices appended by z.append()", per_shard, in_order, {}, by_append=True),
        Stream("3. one size, any order", per_shard, shuffled, raw),
        Stream("4. order of arrival", per_shard, strips, {}),
    ]


def show_streams(
    n_slices: int, slices_per_shard: int, side: int, repeats: int, middle: Middle
) -> None:
    """Print a row for each technique."""
    data = smooth_data((n_slices, side, side))
    columns = ("bytes written", "native wrote", "native / this", "files")
    title(f"{n_slices} slices of {(side // CHUNK) ** 2} chunks", *columns)
    for stream in make_streams(n_slices, slices_per_shard, side):
        show_stream(stream, data, repeats, middle)
    print("  (bytes: for a byte of chunks; native / this: time)")


def show_stream(stream: Stream, data: Values, repeats: int, middle: Middle) -> None:
    """Write a stream both ways, and print its row."""
    counts: Counter[str] = Counter()
    first_shape = (0 if stream.by_append else len(data), *data.shape[1:])
    chunk = (1, CHUNK, CHUNK)

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
        per_slice = -(-data.shape[1] // CHUNK)
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

    seconds = time_of_each({"native": native, "ours": ours}, repeats, middle)
    written = counts["ours"] / counts["chunks"]
    assert written <= MAX_WRITTEN
    assert counts["files"] == -(-len(data) // stream.slices_per_shard)
    row(
        stream.name,
        written,
        counts["native"] / counts["chunks"],
        seconds["native"] / seconds["ours"],
        str(counts["files"]),
    )
