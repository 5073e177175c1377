"""Re-pack a brain volume of 728 chunk files into 8 shards, then hand it to every v3 reader.

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
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import tensorstore
import zarr
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from zarr_shardstore import ShardingStore, shard_store, to_native

SHAPE = (197, 233, 189)
CHUNK = 16
CHUNKS_PER_SHARD = 8
SHARD = CHUNK * CHUNKS_PER_SHARD


def load_brain(cache: Path) -> npt.NDArray[np.uint8]:
    """Load the MNI volume from nilearn's wheel; download it if `cache` does not have it."""
    if not any(cache.glob("nilearn-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command = [*pip, "--dest", str(cache), "nilearn"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(cache.glob("nilearn-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if "/mni_icbm152_t1_" in name)
        image = nibabel.Nifti1Image.from_bytes(gzip.decompress(wheel.read(name)))
    return np.asarray(image.dataobj, dtype=np.uint8)


def make_volume() -> npt.NDArray[np.uint8]:
    """Make a smooth ellipsoid with waves inside, zero outside."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE), indexing="ij", sparse=True)
    body = np.clip(1.2 - 1.6 * (x**2 + 0.8 * y**2 + z**2), 0, 1)
    waves = 0.7 + 0.3 * np.cos(14 * x) * np.cos(11 * y + 1) * np.cos(9 * z + 2)
    return (255 * body * waves).astype(np.uint8)


def write_plain_chunks(volume: npt.NDArray[np.uint8], path: Path) -> zarr.Array[Any]:
    """Write a Zarr v2 array: one file for each chunk that is not empty."""
    array = zarr.create_array(
        path,
        shape=volume.shape,
        chunks=(CHUNK,) * 3,
        dtype=volume.dtype,
        zarr_format=2,
        chunk_key_encoding={"name": "v2", "separator": "/"},
        attributes={"space": "MNI152"},
        overwrite=True,
    )
    array[:] = volume
    return array


def chunk_files(path: Path) -> list[Path]:
    """Return the files that are no metadata."""
    return [
        file
        for file in path.rglob("*")
        if file.is_file() and file.name not in (".zarray", ".zattrs", "zarr.json")
    ]


def draw(array: zarr.Array[Any], file: Path) -> None:
    """Draw the middle slices of `array`, with lines between shards."""
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
    table = Table("", "files", "bytes", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"

    def add_row(name: str, seconds: float) -> None:
        files = chunk_files(path)
        nbytes = sum(file.stat().st_size for file in files)
        table.add_row(name, f"{len(files):,}", f"{nbytes:,}", f"{seconds:.2f}")

    start = time.perf_counter()
    array = write_plain_chunks(volume, path)
    add_row("1. plain chunks, as zarr writes them", time.perf_counter() - start)

    report = shard_store(path, chunks_per_shard=CHUNKS_PER_SHARD)
    add_row("2. shard: the same bytes, re-packed in place", report.seconds)
    store = ShardingStore(path)
    array = zarr.open_array(store, mode="r")
    np.testing.assert_array_equal(np.asarray(array[:]), volume)

    start = time.perf_counter()
    to_native(path)
    add_row("3. to-native: other metadata, no data moved", time.perf_counter() - start)
    Console().print(table)
    print(f"After 2., through ShardingStore: {array}; all values equal.")

    native = zarr.open_array(path, mode="r")
    assert native.shards == (SHARD,) * 3
    np.testing.assert_array_equal(np.asarray(native[:]), volume)
    print(
        f"After 3., plain zarr: chunks {native.chunks}, shards {native.shards}; all values equal."
    )

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    values = tensorstore.open(spec, read=True).result().read().result()
    np.testing.assert_array_equal(values, volume)
    print("After 3., tensorstore: all values equal.")

    draw(native, options.output / "brain.png")
    print(f"Slices, read by plain zarr: {options.output / 'brain.png'}")


if __name__ == "__main__":
    main()
