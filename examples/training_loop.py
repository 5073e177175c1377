"""A training loop: shuffled batches of chunks, read by worker processes.

`Samples` has the methods of a map-style dataset of PyTorch: ``__len__``, ``__getitem__``, and
``__getitems__``, which its ``DataLoader`` calls with the indices of a whole batch. So this is all
that PyTorch needs::

    loader = DataLoader(Samples("volume.zarr"), batch_size=32, shuffle=True, num_workers=4)

Here a loader of a few lines takes its place, so that the script runs without PyTorch. Workers are
forked while the parent has the store in use, or spawned with a pickled one.

    python examples/training_loop.py
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from zarr_shardstore import ShardingStore

Sample = npt.NDArray[Any]


class Samples:
    """Dataset whose samples are the chunks of one array. It pickles, and works after a fork."""

    def __init__(self, url: str, path: str = "") -> None:
        self.store, self.path = ShardingStore(url, read_only=True), path
        z = zarr.open_array(self.store, path=path, mode="r")
        sizes = zip(z.shape, z.chunks, strict=True)
        self.grid = tuple(-(-size // side) for size, side in sizes)

    def __len__(self) -> int:
        return int(np.prod(self.grid))

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Read all samples of a batch in one call."""
        coords = np.stack(np.unravel_index(indices, self.grid), axis=1)
        return list(self.store.read_chunks(self.path, coords))


def batch_of(dataset: Samples, indices: list[int]) -> Sample:
    """As a worker of ``DataLoader``: fetch the samples of a batch and collate them."""
    return np.stack(dataset.__getitems__(indices))


def load(dataset: Samples, batch_size: int, n_workers: int, start_method: str) -> Iterator[Sample]:
    """Yield shuffled batches, as ``DataLoader`` does."""
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    with multiprocessing.get_context(start_method).Pool(n_workers) as workers:
        yield from workers.imap(partial(batch_of, dataset), batches)


def main() -> None:
    # Each chunk has its number, so that it can be seen that each is read once.
    shape, chunks = (64, 256, 256), (16, 32, 32)
    with tempfile.TemporaryDirectory() as directory:
        store = ShardingStore(directory, chunks_per_shard=(4, 4, 4))
        z = zarr.create_array(store, shape=shape, chunks=chunks, dtype="u2")
        numbers = np.arange(4 * 8 * 8, dtype="u2").reshape(4, 8, 8)
        z[:] = np.kron(numbers, np.ones(chunks, "u2"))
        store.close()

        dataset = Samples(directory)
        print(f"{len(dataset)} samples of {dataset[0].shape}, in 4 shards")
        for start_method in ("fork", "spawn"):
            if start_method not in multiprocessing.get_all_start_methods():
                continue
            with warnings.catch_warnings():
                # Python 3.12 warns of forks in a process with threads, such as zarr's.
                warnings.simplefilter("ignore", DeprecationWarning)
                loaded = list(load(dataset, 32, n_workers=2, start_method=start_method))
            seen = np.sort(np.concatenate(loaded)[:, 0, 0, 0])
            assert np.array_equal(seen, numbers.ravel())
            print(f"{start_method}: {len(loaded)} batches of {loaded[0].shape}, each sample once")

        indices = np.random.default_rng(1).integers(0, len(dataset), 200).tolist()
        start = perf_counter()
        dataset.__getitems__(indices)
        direct_s = perf_counter() - start
        z = zarr.open_array(dataset.store, mode="r")
        start = perf_counter()
        for index in indices:
            i, j, k = np.unravel_index(index, dataset.grid)
            z[16 * i : 16 * i + 16, 32 * j : 32 * j + 32, 32 * k : 32 * k + 32]
        array_s = perf_counter() - start
        print(f"200 samples at random take 1 / {array_s / direct_s:.0f} of the time of z[region]")


if __name__ == "__main__":
    main()
