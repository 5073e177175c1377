"""Other loaders on the same batches, side by side: insitubatch, annbatch, xbatcher, torch.

    python benchmarks/loader_peers.py [--mb 256] [--repeats 3] [--places local "30 ms"]

Each peer gets the array as this package has stored it, and the same array without shards. The
faster of both counts. Peers that are not installed are left out. The peak is the resident memory
beyond that before the first run; worker processes count.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import loader as ours
import numpy as np
import zarr
from measuring import fresh_directory, row, title

from zarr_shardstore import ShardingStore, ShardLoader

BATCH, SIDE = ours.BATCH, ours.SIDE
POOL_NBYTES = ours.POOL_NBYTES


def timed(batches: Callable[[], Iterable[Any]], n: int) -> float:
    """Return seconds until n samples have come."""
    start, seen = time.perf_counter(), 0
    for batch in batches():
        seen += batch
    assert seen == n, (seen, n)
    return time.perf_counter() - start


def resident_nbytes() -> int:
    """Return the resident memory of this process and of its worker processes."""
    total = 0
    for process in (os.getpid(), *[child.pid for child in multiprocessing.active_children()]):
        with suppress(OSError):
            pages = Path(f"/proc/{process}/statm").read_text().split()[1]
            total += int(pages) * os.sysconf("SC_PAGE_SIZE")
    return total


def peak_of(run: Callable[[], object]) -> int:
    """Return the most resident memory of a run beyond that before it, looked at each 2 ms."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before, most, has_ended = resident_nbytes(), [0], threading.Event()

    def look() -> None:
        while not has_ended.wait(0.002):
            most[0] = max(most[0], resident_nbytes() - before)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        run()
    finally:
        has_ended.set()
        watcher.join()
    return most[0]


def with_shardstore(store: Any, shuffle: Any, **options: Any) -> Iterable[int]:
    arrays = options.pop("arrays", "x")
    with ShardLoader(store, arrays, shuffle=shuffle, pool_nbytes=POOL_NBYTES, **options) as loader:
        for batch in loader:
            yield len(batch["y"] if isinstance(batch, dict) else batch)


def with_insitubatch(store: Any, files: Path, shuffle: bool, n_chunks: int) -> Iterable[int]:
    """Read batches; the geometry comes from the files, because nginx lists no keys."""
    from insitubatch import InSituDataset, open_geometries, split_by_chunk

    geometries = open_geometries(zarr.storage.LocalStore(files, read_only=True))
    manifest = split_by_chunk(next(iter(geometries.values())), fractions=(1.0, 0.0, 0.0))
    source = InSituDataset(
        store, manifest, geometries, batch_size=BATCH, block_chunks=n_chunks, shuffle=shuffle
    )
    for batch in source.train:
        yield len(batch.arrays["x"])


def with_xbatcher(store: Any) -> Iterable[int]:
    import xarray as xr
    import xbatcher

    lazy = xr.open_zarr(store, consolidated=False, chunks=None)
    sizes = {"n": BATCH, "i": SIDE, "j": SIDE}
    for batch in xbatcher.BatchGenerator(lazy, sizes):
        yield len(batch.x.values)


def with_annbatch(
    z: Any, shuffle: bool, in_chunk: int, batch_size: int, obs: Any = None, row_nbytes: int = 0
) -> Any:
    from annbatch import Loader

    row_nbytes = row_nbytes or int(np.prod(z.shape[1:])) * z.dtype.itemsize
    n_loaded = max(1, POOL_NBYTES // (in_chunk * row_nbytes))
    while (n_loaded * in_chunk) % batch_size:
        n_loaded += 1
    peer = Loader(
        batch_size=batch_size,
        chunk_size=in_chunk,
        preload_nchunks=n_loaded,
        shuffle=shuffle,
        to=None,
    )
    peer.add_dataset(z, obs)
    for batch in peer:
        yield batch["X"].shape[0]


class Rows:
    """Map-style dataset of torch; workers get the samples of a batch at once."""

    def __init__(self, store: Any) -> None:
        self.z: Any = zarr.open_array(store, path="x", mode="r")

    def __len__(self) -> int:
        return int(self.z.shape[0])

    def __getitems__(self, rows: list[int]) -> Any:
        is_run = rows == [*range(rows[0], rows[0] + len(rows))]
        values: Any = self.z[rows[0] : rows[-1] + 1] if is_run else self.z.oindex[np.array(rows)]
        return np.asarray(values)


def torch_loader(store: Any, shuffle: bool) -> Any:
    """Make a loader whose workers live on after an epoch: their start is not measured."""
    from torch.utils.data import DataLoader

    rows: Any = Rows(store)
    return DataLoader(
        rows,
        batch_size=BATCH,
        shuffle=shuffle,
        num_workers=2,
        collate_fn=as_tensor,
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )


def as_tensor(values: Any) -> Any:
    import torch

    return torch.from_numpy(values)


def images(n: int, repeats: int, place: str, in_chunk: int) -> None:
    """Images of 32 KB, zstd."""
    with fresh_directory() as path:
        sharded, flat = path / "sharded", path / "flat"
        ours.make(sharded, n, in_chunk, "zstd")
        z: Any = zarr.open_array(str(sharded), path="x", mode="r")
        z_flat = zarr.create_array(
            str(flat), name="x", shape=z.shape, chunks=(in_chunk, SIDE, SIDE), dtype="u2",
            compressors=z.metadata.codecs[0].codecs[1:], dimension_names=("n", "i", "j"),
        )  # fmt: skip
        z_flat[:] = z[:]
        with ExitStack() as stack:
            names = ("sharded", "flat")
            places = {n: stack.enter_context(ours.place_of(path / n, place)) for n in names}
            client = places["flat"]

            def store_of(name: str) -> Any:
                if client is None:
                    return zarr.storage.LocalStore(path / name, read_only=True)
                return places[name]

            cases: dict[str, Callable[[], Iterable[int]]] = {}
            for shuffle in (False, True):
                order = "shuffled" if shuffle else "in order"
                store = ShardingStore(store_of("sharded"))
                cases[f"this, {order}"] = partial(
                    with_shardstore, store, "shards" if shuffle else False,
                    batch_size=BATCH, n_threads=2,
                )  # fmt: skip
                for name in ("sharded", "flat"):
                    base = store_of(name)
                    size = 256 if name == "sharded" else in_chunk
                    n_chunks = max(1, POOL_NBYTES // (size * SIDE * SIDE * 2))
                    if find_spec("insitubatch"):
                        cases[f"insitubatch, {name}, {order}"] = partial(
                            with_insitubatch, base, path / name, shuffle, n_chunks
                        )
                    if find_spec("annbatch") and (client is None or in_chunk > 1):
                        array = zarr.open_array(base, path="x", mode="r")
                        cases[f"annbatch, {name}, {order}"] = partial(
                            with_annbatch, array, shuffle, in_chunk, BATCH
                        )
                    if find_spec("torch") and client is None:
                        torch = torch_loader(base, shuffle)
                        cases[f"torch, {name}, {order}"] = partial(map, len, torch)
                    if find_spec("xbatcher") and not shuffle and name == "flat" and client is None:
                        cases[f"xbatcher, {name}, {order}"] = partial(with_xbatcher, base)
            report(f"{place}, {in_chunk} in a chunk", cases, n, n * SIDE * SIDE * 2, repeats)


def cases_of_cells(
    store: Any, x: Any, obs: Any, row_nbytes: int = 0
) -> dict[str, Callable[[], Iterable[int]]]:
    cases: dict[str, Callable[[], Iterable[int]]] = {}
    for shuffle in (False, True):
        order = "shuffled" if shuffle else "in order"
        cases[f"this, {order}"] = partial(
            with_shardstore, store, "shards" if shuffle else False, batch_size=512,
            arrays={"x": "X", "y": "obs/label"}, n_threads=2,
        )  # fmt: skip
        cases[f"annbatch, sharded, {order}"] = partial(
            with_annbatch, x, shuffle, 64, 512, obs, row_nbytes
        )
    return cases


def cells(repeats: int, n: int = 40_000, n_genes: int = 2_000) -> None:
    """AnnData: a dense X of float32, and a column of obs."""
    import anndata as ad
    import pandas as pd

    with fresh_directory() as path:
        rng = np.random.default_rng(0)
        x = rng.poisson(0.3, (n, n_genes)).astype("f4")
        obs = pd.DataFrame({"label": np.arange(n)}, index=[f"c{i}" for i in range(n)])
        store = ShardingStore(str(path), chunks_per_shard={"X": (32, 1)})
        root = zarr.open_group(store, mode="w")
        ad.io.write_elem(root, "obs", obs)
        z = zarr.create_array(store, name="X", shape=x.shape, chunks=(64, n_genes), dtype="f4")
        z[:] = x
        array = zarr.open_array(str(path), path="X", mode="r")
        column = ad.io.read_elem(zarr.open_group(str(path), mode="r")["obs"])
        cases = cases_of_cells(store, array, column)
        report("local, AnnData: dense X, a column of obs", cases, n, x.nbytes, repeats)


def sparse_cells(repeats: int, n: int = 30_000, n_genes: int = 20_000) -> None:
    """AnnData: a sparse X, 1,000 genes of each cell on average, and a column of obs."""
    import anndata as ad
    import pandas as pd
    from scipy.sparse import csr_matrix

    with fresh_directory() as path:
        rng = np.random.default_rng(0)
        ends = np.append(0, np.cumsum(rng.poisson(rng.gamma(2.0, 500.0, n))))
        genes = [rng.choice(n_genes, size, replace=False) for size in np.diff(ends)]
        data = rng.geometric(0.5, ends[-1]).astype("f4")
        x = csr_matrix((data, np.concatenate(genes).astype("i4"), ends), (n, n_genes))
        x.sort_indices()
        obs = pd.DataFrame({"label": np.arange(n)}, index=[f"c{i}" for i in range(n)])
        store = ShardingStore(str(path), chunks_per_shard={"X": 32, "": None})
        root = zarr.open_group(store, mode="w")
        ad.io.write_elem(root, "obs", obs)
        ad.io.write_elem(root, "X", x, dataset_kwargs={"chunks": (32_768,)})
        matrix = ad.io.sparse_dataset(zarr.open_group(str(path), path="X", mode="r"))
        column = ad.io.read_elem(zarr.open_group(str(path), mode="r")["obs"])
        cases = cases_of_cells(store, matrix, column, row_nbytes=8_000)
        nbytes = x.data.nbytes + x.indices.nbytes
        report("local, AnnData: sparse X, a column of obs", cases, n, nbytes, repeats)


def report(
    name: str, cases: dict[str, Callable[[], Iterable[int]]], n: int, nbytes: int, repeats: int
) -> None:
    failed: dict[str, str] = {}
    runs: dict[str, Callable[[], float]] = {}
    peaks: dict[str, int] = {}
    for case, batches in cases.items():
        try:
            runs[case] = partial(timed, batches, n)
            peaks[case] = peak_of(runs[case])
        except Exception as error:
            failed[case] = f"{type(error).__name__}: {str(error)[:80]}"
            del runs[case]
    seconds = ours.measure(runs, repeats)
    title(f"MB/s: {name}", "MB/s", "ratio to this", "spread", "peak MiB")
    for case, each in seconds.items():
        base = seconds[f"this, {case.rpartition(', ')[2]}"]
        ratios = [a / b for a, b in zip(base, each, strict=True)]
        row(
            case,
            f"{nbytes / 1e6 / median(each):.0f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
            f"{peaks[case] / 2**20:.0f}",
        )
    for case, why in failed.items():
        row(case, why)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--places", nargs="*", default=ours.PLACES)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pipeline", default=None)
    args = parser.parse_args()
    if args.pipeline:
        zarr.config.set({"codec_pipeline.path": args.pipeline})
    n = args.mb * 1_000_000 // (SIDE * SIDE * 2) // 256 * 256
    for place in args.places:
        for in_chunk in (1, 8, 32):
            images(n, args.repeats, place, in_chunk)
    if find_spec("annbatch") and "local" in args.places:
        cells(args.repeats)
        sparse_cells(args.repeats)


if __name__ == "__main__":
    main()
