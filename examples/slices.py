"""Store a stream of slices by the four techniques of ZEP 2, beside zarr's native sharding.

A scanner delivers slices of 4 × 4 chunks, one after the other. For each technique the script
counts the bytes that are written to files until the whole stream is stored: here, and by an array
of plain zarr with the same chunks and shards.

Source: ZEP 2, "Storing a stream of data slices".
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, MemoryStore

from zarr_shardstore import ShardedCodecPipeline, ShardingMapping, ShardingStore, get_shard_info
from zarr_shardstore.io.local import fs

N_SLICES = 24
SIDE, CHUNK = 256, 64
SLICES_PER_SHARD = 16
CHUNKS_PER_SLICE = SIDE // CHUNK
OUR_PIPELINE = f"{ShardedCodecPipeline.__module__}.{ShardedCodecPipeline.__name__}"

written: Counter[str] = Counter()


class PlainStore(LocalStore):
    """Local files as plain zarr writes them, with a count of bytes."""

    async def set(self, key: str, value: Buffer) -> None:
        written["native"] += len(value)
        await super().set(key, value)

    def set_sync(self, key: str, value: Buffer) -> None:  # what zarr 3.4's fused pipeline calls
        written["native"] += len(value)
        super().set_sync(key, value)


class ObjectStore(MemoryStore):
    """A simulated object store, with a count of PUTs of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: Counter[str] = Counter()

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        if key.startswith("c/"):
            self.puts[key] += 1
        await super().set(key, value, byte_range)


def count_bytes_of_shards() -> None:
    """Count what the package writes to files. Only this example needs that."""
    write_at = fs.write_at

    def counting(fd: int, pieces: Sequence[bytes | memoryview], offset: int) -> None:
        written["ours"] += sum(map(len, pieces))
        write_at(fd, pieces, offset)

    fs.write_at = counting


def make_slices() -> npt.NDArray[np.uint16]:
    """Make waves with noise: compressible by about a half, as images are."""
    rng = np.random.default_rng(0)
    z, y, x = np.meshgrid(
        *(np.linspace(0, 9, n) for n in (N_SLICES, SIDE, SIDE)), indexing="ij", sparse=True
    )
    waves = 4000 + 1000 * np.sin(z) * np.sin(y + 1) * np.cos(x)
    return (waves + rng.normal(0, 4, waves.shape)).astype("uint16")


SLICES = make_slices()


def create(store: ShardingStore, *, n_slices: int = N_SLICES, **options: Any) -> Any:
    """Create an array whose chunks the store packs; each operation reaches it in one piece."""
    with zarr.config.set({"codec_pipeline.path": OUR_PIPELINE}):
        return zarr.create_array(
            store,
            shape=(n_slices, SIDE, SIDE),
            chunks=(1, CHUNK, CHUNK),
            dtype=SLICES.dtype,
            **options,
        )


def create_native(path: Path, slices_per_shard: int, **options: Any) -> Any:
    """Create an array of the same chunks and shards with plain zarr."""
    z = zarr.create_array(
        PlainStore(path),
        shape=SLICES.shape,
        chunks=(1, CHUNK, CHUNK),
        shards=(slices_per_shard, SIDE, SIDE),
        dtype=SLICES.dtype,
        **options,
    )
    written.clear()
    return z


def flush(store: ShardingStore) -> None:
    """Seal all shards, as `close` and the end of the process do."""
    ShardingMapping(store).flush()


def check_native_reads(path: Path) -> None:
    """Check that plain zarr finds all values."""
    z = zarr.open_array(path, mode="r")
    assert z.shards is not None
    np.testing.assert_array_equal(np.asarray(z[:]), SLICES)


def files_of(path: Path) -> list[Path]:
    """Return the files of shards, locks and journals."""
    return [file for file in (path / "c").rglob("*") if file.is_file()]


def tell(of_chunks: int) -> None:
    """Print the bytes that were written for chunks of so many bytes."""
    ours, native = written["ours"], written["native"]
    print(f"  chunks of {of_chunks:,} bytes; written: {ours:,} bytes, {ours / of_chunks:.2f} times")
    print(f"  native sharding wrote {native:,} bytes, {native / of_chunks:.1f} times the chunks")


def stored_nbytes_of_chunks(path: Path) -> int:
    """Return the bytes of all chunks, compressed."""
    (array,) = get_shard_info(path).arrays
    return array.chunk_nbytes


def slice_shards(folder: Path) -> None:
    """Technique 1: each slice is a shard, written once, as one file or one object."""
    print("1. A shard for each slice")
    plain = create_native(folder / "native", 1)
    for i in range(N_SLICES):
        plain[i] = SLICES[i]

    path = folder / "ours"
    store = ShardingStore(path, chunks_per_shard=(1, CHUNKS_PER_SLICE, CHUNKS_PER_SLICE))
    z = create(store)
    written["ours"] = 0
    for i in range(N_SLICES):
        z[i] = SLICES[i]

    files = files_of(path)
    assert written["ours"] == sum(file.stat().st_size for file in files)  # none of them twice
    check_native_reads(path)
    print(f"  {N_SLICES} slices, {z.nchunks} chunks: {len(files)} files, each written once")
    tell(stored_nbytes_of_chunks(path))

    objects = ObjectStore()
    z = create(ShardingStore(objects, chunks_per_shard=(1, CHUNKS_PER_SLICE, CHUNKS_PER_SLICE)))
    for i in range(N_SLICES):
        z[i] = SLICES[i]
    assert set(objects.puts.values()) == {1}
    print(f"  on an object store: {objects.puts.total()} PUTs for {N_SLICES} slices")


def appended_slices(folder: Path) -> None:
    """Technique 2: shards of many slices grow slice by slice, and can be read concurrently."""
    print("2. Slices appended to shards of many slices")
    plain = create_native(folder / "native", SLICES_PER_SHARD)
    for i in range(N_SLICES):
        plain[i] = SLICES[i]

    path = folder / "ours"
    chunks_per_shard = (SLICES_PER_SHARD, CHUNKS_PER_SLICE, CHUNKS_PER_SLICE)
    store = ShardingStore(path, chunks_per_shard=chunks_per_shard, strategy="append")
    # How long the stream will be is not known: an array that is too long is cut afterwards.
    z = create(store, n_slices=10 * N_SLICES)
    reader: Any = zarr.open_array(ShardingStore(path, read_only=True), mode="r")
    written["ours"] = 0
    for i in range(N_SLICES):
        z[i] = SLICES[i]
        np.testing.assert_array_equal(reader[i], SLICES[i])
        if i == 9:
            assert sum_in_another_process(path, i) == SLICES[i].sum()
            print("  another process reads slice 9 from a shard that has 10 of its 16 slices yet")
    flush(store)
    shard_nbytes = written["ours"]
    z.resize(SLICES.shape)

    check_native_reads(path)
    print(f"  {N_SLICES} slices, {z.nchunks} chunks: {len(files_of(path))} files")
    written["ours"] = shard_nbytes
    tell(stored_nbytes_of_chunks(path))

    # An array that ends where the stream does: each time its last shard is full, and is sealed.
    # That costs the index twice and the metadata a slice, and leaves the old index.
    path = folder / "ours_by_append"
    store = ShardingStore(path, chunks_per_shard=chunks_per_shard, strategy="append")
    z = create(store, n_slices=0)
    written["ours"] = 0
    for i in range(N_SLICES):
        z.append(SLICES[i : i + 1])
    flush(store)
    check_native_reads(path)
    print("  the same by z.append(), which makes the array longer for each slice:")
    tell(stored_nbytes_of_chunks(path))


def sum_in_another_process(path: Path, i: int) -> int:
    """Return the sum of a slice as another process reads it."""
    code = (
        "import sys, zarr; from zarr_shardstore import ShardingStore;"
        "z = zarr.open_array(ShardingStore(sys.argv[1], read_only=True), mode='r');"
        "print(z[int(sys.argv[2])].sum())"
    )
    command = [sys.executable, "-c", code, str(path), str(i)]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)


def known_layout(folder: Path) -> None:
    """Technique 3: uncompressed chunks have one size: slices in any order, some of them twice."""
    print("3. Chunks of one size, without compression")
    arrivals = random.Random(0).sample(range(N_SLICES), N_SLICES)
    arrivals += arrivals[:4]  # the scanner repeats some
    plain = create_native(folder / "native", SLICES_PER_SHARD, compressors=None)
    for i in arrivals:
        plain[i] = SLICES[i]

    path = folder / "ours"
    store = ShardingStore(
        path,
        chunks_per_shard=(SLICES_PER_SHARD, CHUNKS_PER_SLICE, CHUNKS_PER_SLICE),
        order="C",
        strategy="append",
    )
    z = create(store, compressors=None)
    written["ours"] = 0
    for i in arrivals:
        z[i] = SLICES[i]
    flush(store)

    check_native_reads(path)
    print(f"  {N_SLICES} slices in random order, 4 of them twice: {len(files_of(path))} files")
    tell(len(arrivals) * SLICES[0].nbytes)


def arrival_order(folder: Path) -> None:
    """Technique 4: compressed chunks lie in the order of arrival, and the index comes last."""
    print("4. Compressed chunks in the order of their arrival")
    strips = [(i, y) for i in range(N_SLICES) for y in range(0, SIDE, CHUNK)]
    random.Random(0).shuffle(strips)  # each is 4 chunks, which are one write
    plain = create_native(folder / "native", SLICES_PER_SHARD)
    for i, y in strips:
        plain[i, y : y + CHUNK] = SLICES[i, y : y + CHUNK]

    path = folder / "ours"
    chunks_per_shard = (SLICES_PER_SHARD, CHUNKS_PER_SLICE, CHUNKS_PER_SLICE)
    store = ShardingStore(path, chunks_per_shard=chunks_per_shard, strategy="append")
    z = create(store)
    written["ours"] = 0
    for i, y in strips:
        z[i, y : y + CHUNK] = SLICES[i, y : y + CHUNK]
    flush(store)

    check_native_reads(path)
    (array,) = get_shard_info(path).arrays
    assert array.dead_nbytes == 0
    print(
        f"  {len(strips)} writes of 4 chunks in random order: {len(files_of(path))} files, "
        f"{array.dead_nbytes} dead bytes; plain zarr reads them"
    )
    tell(array.chunk_nbytes)


def main() -> None:
    count_bytes_of_shards()
    with tempfile.TemporaryDirectory() as folder:
        for store_stream in (slice_shards, appended_slices, known_layout, arrival_order):
            store_stream(Path(folder) / store_stream.__name__)


if __name__ == "__main__":
    main()
