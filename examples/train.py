"""Train a small network on windows of a volume in shards, with the loader, in numpy alone.

The network tells from a window of 16 x 16 x 16 voxels how much of it is tissue. `ShardLoader`
reads windows of the volume and of its mask side by side, shuffled by shards.

    python examples/train.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zarr
from rich.progress import track

from zarr_shardstore import ShardingStore, ShardLoader

Floats: TypeAlias = npt.NDArray[np.floating[Any]]

SHAPE = (128, 160, 128)
WINDOW = (16, 16, 16)
N_HIDDEN = 16
RATE = 0.2


def write_volume(path: Path) -> None:
    """Write an ellipsoid with waves and noise, and its mask."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE), indexing="ij", sparse=True)
    body = np.clip(1.2 - 1.6 * (x**2 + 0.8 * y**2 + z**2), 0, 1)
    noise = np.random.default_rng(0).normal(0, 10, SHAPE)
    image = np.clip(200 * body * (0.7 + 0.3 * np.cos(14 * x)) + noise, 0, 255)
    store = ShardingStore(path, chunks_per_shard=(2, 2, 2))
    for name, values in {"image": image.astype("u1"), "mask": (body > 0.3).astype("u1")}.items():
        stored = zarr.create_array(store, name=name, shape=SHAPE, chunks=(32, 32, 32), dtype="u1")
        stored[:] = values


class Network:
    """Two layers: the mean, the spread and the extremes of a window, to its share of tissue."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        self.w1 = random.normal(0, 0.5, (4, N_HIDDEN))
        self.w2 = random.normal(0, 0.5, N_HIDDEN)

    def step(self, features: Floats, share: Floats) -> float:
        """Descend along the gradient of a batch; return its mean squared error."""
        hidden = np.tanh(features @ self.w1)
        error = hidden @ self.w2 - share
        back = np.outer(error, self.w2) * (1 - hidden**2)
        self.w2 -= RATE * hidden.T @ error / len(error)
        self.w1 -= RATE * features.T @ back / len(error)
        return float((error**2).mean())


def prepared(batch: dict[str, Any]) -> tuple[Floats, Floats]:
    """Return features and targets of a batch; threads of the loader call it."""
    flat = batch["image"].reshape(len(batch["image"]), -1) / 255
    features = np.stack([flat.mean(1), flat.std(1), flat.min(1), flat.max(1)], axis=1)
    return features, batch["mask"].mean(axis=(1, 2, 3))


def main() -> Iterator[float]:
    """Yield the mean error of each epoch."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "volume.zarr"
        write_volume(path)
        arrays = {"image": "image", "mask": "mask"}
        with ShardLoader(
            path,
            arrays,
            batch_size=32,
            window=WINDOW,
            stride=(8, 8, 8),
            shuffle="shards",
            transform=prepared,
        ) as loader:
            network = Network()
            for epoch in range(4):
                steps = track(loader, f"epoch {epoch}", total=len(loader), transient=True)
                yield float(np.mean([network.step(*batch) for batch in steps]))
            print(f"{loader.stats().mb_per_s:.0f} MB/s, {loader.stats().waited_s:.2f} s waited")
            print(*loader.plan().advice, sep="\n")


if __name__ == "__main__":
    errors: list[float] = []
    for error in main():
        print(f"epoch {len(errors)}: mean squared error {error:.4f}")
        errors.append(error)
    print("learned: the error is less than half" if 2 * error < errors[0] else "did not learn")
