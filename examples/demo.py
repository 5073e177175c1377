"""Store a brain volume of 2,340 chunks in 8 files, read it back, read it with plain zarr-python.

The volume is the MNI ICBM152 T1 template out of the nilearn package, which pip downloads once.
Needs the extra "examples".
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import time
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import zarr
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zarr_shardstore import ShardingMapping, ShardingStore

SHAPE = (197, 233, 189)
CHUNK = 16
CHUNKS_PER_SHARD = 8
SHARD = CHUNK * CHUNKS_PER_SHARD


def load_brain(cache: Path) -> npt.NDArray[np.uint8]:
    """The MNI volume out of nilearn's wheel, downloaded if `cache` does not hold it."""
    if not any(cache.glob("nilearn-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command = [*pip, "--dest", str(cache), "nilearn"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(cache.glob("nilearn-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if "/mni_icbm152_t1_" in name)
        image = nibabel.Nifti1Image.from_bytes(gzip.decompress(wheel.read(name)))
    return np.asarray(image.dataobj, dtype=np.uint8)


def make_volume() -> npt.NDArray[np.uint8]:
    """A smooth ellipsoid with waves inside, zero outside."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE), indexing="ij", sparse=True)
    body = np.clip(1.2 - 1.6 * (x**2 + 0.8 * y**2 + z**2), 0, 1)
    waves = 0.7 + 0.3 * np.cos(14 * x) * np.cos(11 * y + 1) * np.cos(9 * z + 2)
    return (255 * body * waves).astype(np.uint8)


def write(volume: npt.NDArray[np.uint8], array: zarr.Array[Any]) -> None:
    """Write shard by shard."""
    starts_of_shards = list(product(*(range(0, n, SHARD) for n in volume.shape)))
    # zarr has 10 chunk writes under way by default. With all chunks of a shard under way the
    # store commits them together and not 10 by 10: about half the time.
    with zarr.config.set({"async.concurrency": CHUNKS_PER_SHARD**3}):
        for starts in track(starts_of_shards, "writing shards"):
            region = tuple(slice(start, start + SHARD) for start in starts)
            array[region] = volume[region]


def draw(array: zarr.Array[Any], file: Path) -> None:
    """Middle slices, read from `array`, with lines where one shard ends and the next begins."""
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    # The axes of the volume go to the right, to the front and up.
    names = ("from the right", "from behind", "from above")
    for axis, (name, panel) in enumerate(zip(names, figure.subplots(1, 3), strict=True)):
        middle = tuple(n // 2 if i == axis else slice(None) for i, n in enumerate(array.shape))
        panel.imshow(np.asarray(array[middle]).T, cmap="gray", origin="lower")
        panel.set(title=name, xticks=(0, SHARD), yticks=(0, SHARD))
        panel.grid(color="tab:orange")
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--made-data", action="store_true", help="download nothing")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    volume = make_volume()
    try:
        if not options.made_data:
            volume = load_brain(options.output / "download")
            print("Data: the MNI ICBM152 T1 brain template.")
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, StopIteration) as error:
        print(f"The brain volume cannot be had ({type(error).__name__}): using a made one.")

    path = options.output / "brain.zarr"
    store = ShardingStore(path, chunks_per_shard=CHUNKS_PER_SHARD)
    array = zarr.create_array(
        store, shape=volume.shape, chunks=(CHUNK,) * 3, dtype=volume.dtype, overwrite=True
    )
    start = time.perf_counter()
    write(volume, array)
    print(f"Written in {time.perf_counter() - start:.2f} s.")

    chunk_keys = ShardingMapping(store).list_prefix("c/")
    shards = [file for file in (path / "c").rglob("*") if file.is_file()]
    table = Table("", path.name)
    table.columns[1].justify = "right"
    for name, number in (
        ("chunks", array.nchunks),
        ("chunks that are not all zero: files without sharding", len(chunk_keys)),
        ("shards: files with sharding", len(shards)),
        ("bytes of data", volume.nbytes),
        ("bytes stored", sum(file.stat().st_size for file in shards)),
    ):
        table.add_row(name, f"{number:,}")
    Console().print(table)

    # A random box around the middle, so that it has more than background.
    random = np.random.default_rng(seed=1)
    region = tuple(slice(random.integers(n // 2), random.integers(n // 2, n)) for n in array.shape)
    np.testing.assert_array_equal(np.asarray(array[region]), volume[region])
    named = ", ".join(f"{part.start}:{part.stop}" for part in region)
    print(f"Read [{named}] through the store: equal to the source.")

    native = zarr.open_array(path, mode="r")
    assert native.shards == (SHARD,) * 3
    np.testing.assert_array_equal(np.asarray(native[:]), volume)
    print(f"Plain zarr: chunks {native.chunks}, shards {native.shards}; all values equal.")

    draw(array, options.output / "brain.png")
    print(f"Slices, read through the store: {options.output / 'brain.png'}")


if __name__ == "__main__":
    main()
