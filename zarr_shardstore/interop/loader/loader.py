"""`ShardLoader`: batches for training from arrays of a store."""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.interop.loader.copies import PIECE_NBYTES, Array, Memory, Source
from zarr_shardstore.interop.loader.engine import LoaderStats, Run, Task
from zarr_shardstore.interop.loader.frameworks import (
    Converter,
    Framework,
    arrays_of_dataset,
    converter_of,
    torch_dataset,
)
from zarr_shardstore.interop.loader.order import Draw, Ints, Samples, Share, Shuffle
from zarr_shardstore.interop.loader.plan import (
    BATCH_NBYTES,
    GAPS_NBYTES,
    LOCAL_UNIT_NBYTES,
    PART_NBYTES,
    UNIT_NBYTES,
    LoaderPlan,
    advice_of,
)
from zarr_shardstore.interop.loader.sources import (
    Column,
    check,
    columns_of,
    nbytes_of,
    store_of,
)

_UNITS_AT_ONCE = 32
"""Ratio of the limit of bytes and a unit: so many units are under way at least."""


class ShardLoader:
    """Batches of samples from arrays of a store, read ahead and decoded in threads.

    Parameters
    ----------
    store
        A `ShardingStore`, or all that it takes. A URL may begin with ``shard::``.
    arrays : str, mapping of str to str
        Path of an array, or of a sparse matrix of AnnData, whose rows are the samples; or paths
        by name, for batches that are dicts of aligned arrays.
    batch_size
        Samples of a batch.
    window : sequence of int, optional
        Shape of a sample along the sampled axes; along all others it has the whole array. By
        default samples are rows: single places along one axis, which the sample lacks.
    stride, positions : sequence of int, n x axes integers, optional
        Distances between the windows of a regular grid, by default their lengths; or the starts
        of all samples, for rows a list of their numbers.
    axes : int, sequence of int, mapping of these by name, optional
        Sampled axes of each array. By default the first ones.
    edges : {"drop", "shift"}
        Whether a window that would cross the end of the array is left out, or ends there.
    shuffle : {False, "shards", "full"}
        Order of the samples: as they are; random shards, and random samples of a pool of shards;
        or random samples of all, which reads a chunk several times. See `plan` for the price.
    seed
        Together with the epoch and `world_size` it gives the order.
    pool_nbytes, prefetch_nbytes
        Decoded size of the samples that are shuffled, or share chunks, at a time, by default a
        third of the rest, at least 2 MiB and a chunk; and the limit of the memory for encoded and
        decoded bytes, without the batches that you have.
    rank, world_size
        Number of this process, and number of all that share an epoch. Each gets equally many
        batches, and each sample is in one of them.
    drop_last
        Leave out samples that do not fill a batch in each rank. Otherwise the last batches are
        smaller, and empty if there are fewer samples than batches.
    transform : callable, optional
        Called in a thread with each batch; you get what it returns.
    to : {"numpy", "torch", "jax"}
        Arrays of the batches. They share the memory that was decoded into, by DLPack. Sparse rows
        become a ``csr_array`` of scipy, a sparse CSR tensor, or a ``BCSR``.
    n_threads : int, optional
        Threads that read and decode, by default one for each core. Fewer if the memory has no room.

    Raises
    ------
    SpecError
        If an argument is not valid, arrays are not aligned, or `prefetch_nbytes` is too small.
    UnsupportedError
        If the chunks of an array differ in shape, or a sparse matrix has no rows one by one.

    Notes
    -----
    Each ``iter(loader)`` ends the current epoch, and begins the next one if a batch was delivered;
    its first batch begins the reads. A failed read ends the epoch with the error of the store, and
    a note names shard and samples. Batches mix old and new chunks of arrays that change meanwhile.

    Thread safety: one thread at a time may use a loader. Use it in the process that iterates: an
    iterator that a fork has copied raises `UnsupportedError`.

    Examples
    --------
    >>> import zarr
    >>> from zarr_shardstore import ShardingStore, ShardLoader
    >>> store = ShardingStore({}, chunks_per_shard=(2, 1))
    >>> z = zarr.create_array(store, name="x", shape=(10, 3), chunks=(2, 3), dtype="u1")
    >>> z[:] = [[i, i, i] for i in range(10)]
    >>> with ShardLoader(store, "x", batch_size=4, shuffle="shards") as loader:
    ...     [batch.shape for batch in loader]
    [(4, 3), (4, 3), (2, 3)]
    """

    def __init__(
        self,
        store: Any,
        arrays: str | Mapping[str, str],
        *,
        batch_size: int,
        window: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        positions: npt.ArrayLike | None = None,
        axes: int | Sequence[int] | Mapping[str, int | Sequence[int]] | None = None,
        edges: Literal["drop", "shift"] = "drop",
        shuffle: Shuffle = False,
        seed: int = 0,
        pool_nbytes: int | None = None,
        prefetch_nbytes: int = 2**30,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
        to: Framework = "numpy",
        n_threads: int | None = None,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("prefetch_nbytes", prefetch_nbytes, 0),
            ("pool_nbytes", pool_nbytes or 0, 0),
            ("n_threads", n_threads or 1, 1),
            ("rank", rank, 0),
            ("world_size", world_size, 1),
        ):
            is_valid = isinstance(value, Integral) and value >= least
            check(is_valid, f"{name} is a whole number of at least {least}", value)
        batch_size, seed, world_size = int(batch_size), int(seed), int(world_size)  # for JSON
        prefetch_nbytes, drop_last = int(prefetch_nbytes), bool(drop_last)
        pool_nbytes = None if pool_nbytes is None else int(pool_nbytes)
        check(0 <= rank < world_size, "rank is in range(world_size)", (rank, world_size))
        check(shuffle in (False, "shards", "full"), "shuffle is False, 'shards', 'full'", shuffle)
        shuffle = shuffle or False
        check(edges in ("drop", "shift"), "edges is 'drop' or 'shift'", edges)
        window, stride = _numbers("window", window), _numbers("stride", stride)
        paths = {"": arrays} if isinstance(arrays, str) else dict(arrays)
        check(bool(paths), "arrays are at least one", arrays)
        self._store = store_of(store)
        columns = columns_of(self._store, paths, window, axes)
        sources = [source for column in columns.values() for source in column.sources]
        first = sources[0]
        lengths = [first.lengths[axis] for axis in first.axes]
        strides = lengths if stride is None else stride
        check(len(strides) == len(lengths), "stride has a number for each axis", stride)
        shifts = edges == "shift"
        samples = Samples.of(first.extent, lengths, strides, positions=positions, shifts=shifts)
        sizes = np.sort(nbytes_of(sources, samples, np.arange(samples.n)))
        batch_nbytes = int(sizes[-batch_size:].sum()) + BATCH_NBYTES * len(sources)
        n_threads = n_threads or os.cpu_count() or 1
        parts = (sources, batch_nbytes, n_threads, prefetch_nbytes, pool_nbytes)
        n_threads, limit, pool = _limits(*parts)
        is_local = all(source.entries.can_block for source in sources)
        unit = LOCAL_UNIT_NBYTES if is_local else UNIT_NBYTES
        are_sparse = any(source.indptr is not None for source in sources)
        dtypes = {source.entries.chunks.node.path: source.dtype for source in sources}
        convert = converter_of(to, dtypes, are_sparse)
        self._task = Task(
            sources=sources,
            samples=samples,
            share=Share.of(samples.n, batch_size, rank, world_size, drops=drop_last),
            draw=Draw(shuffle, seed, pool),
            batch_nbytes=batch_nbytes,
            limit_nbytes=limit,
            unit_nbytes=min(unit, limit // _UNITS_AT_ONCE),
            n_threads=n_threads,
            finish=partial(_finish, columns, isinstance(arrays, str), convert, transform),
            convert=convert,
            memory=Memory(convert.allocate, len(sources), limit // 16 // batch_nbytes),
        )
        of_batches = {"batch_size": batch_size, "world_size": world_size, "drop_last": drop_last}
        self._order_id = _order_id(self._task, **of_batches)
        self._peak_nbytes = prefetch_nbytes + 2 * batch_nbytes
        self._epoch = self._batch = 0
        self._is_fresh = True
        self._run: Run | None = None
        self._before = self._store.stats()

    @classmethod
    def from_xarray(cls, ds: Any, *, dims: str | Mapping[str, int], **options: Any) -> ShardLoader:
        """Return a loader of the variables of a dataset; batches are dicts by their names.

        Parameters
        ----------
        ds : xarray.Dataset
            Opened by ``xarray.open_zarr(ShardingStore(…), chunks=None)``, with all its elements.
        dims : str, mapping of str to int
            A dimension whose places are the samples, or the length of a sample along dimensions.
        **options
            Options of `ShardLoader`; `stride` and `positions` go by the order of `dims`.

        Raises
        ------
        UnsupportedError
            If a variable is not the whole stored array, or xarray computes its values.
        SpecError
            If a variable lacks one of the dimensions.
        """
        store, paths, names = arrays_of_dataset(ds)
        wanted = [dims] if isinstance(dims, str) else [*dims]
        for name, of_variable in names.items():
            check(set(wanted) <= {*of_variable}, f"{name!r} has all of these dimensions", wanted)
        axes = {name: [of.index(dim) for dim in wanted] for name, of in names.items()}
        window = None if isinstance(dims, str) else [*dims.values()]
        loader = cls(store, paths, window=window, axes=axes, **options)
        for source, (name, variable) in zip(
            loader._task.sources, ds.data_vars.items(), strict=True
        ):
            if source.shape != variable.shape:
                raise UnsupportedError(
                    f"{name!r} has the shape {variable.shape} in the dataset, and is stored with "
                    f"{source.shape} now: open the dataset again"
                )
        return loader

    # ----------------------------------------------------------------- iteration

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._task.share.n_batches

    def __iter__(self) -> Iterator[Any]:
        self.close()
        run = self._run
        if run is not None and not self._is_fresh and run.delivered > self._batch:
            self._epoch, self._batch = self._epoch + 1, 0
        for source in self._task.sources:
            now = source.entries.shape_now()
            fits = len(now) == len(source.shape) and all(map(operator.ge, now, source.shape))
            path = source.entries.chunks.node.path
            check(fits, f"{path!r} has the shape of the loader, {source.shape}, or more", now)
        self._is_fresh = False
        self._before = self._store.stats()
        self._run = Run(self._task, self._epoch, self._batch)
        return iter(self._run)

    def close(self) -> None:
        """End the threads and requests of the current epoch, if any."""
        if self._run is not None:
            self._run.stop(waits=True)

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch, as samplers of torch do."""
        epoch = operator.index(epoch)
        check(epoch >= 0, "an epoch is not negative", epoch)
        self._epoch, self._batch, self._is_fresh = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch, for `load_state_dict` in any rank."""
        batch = self._batch if self._is_fresh or self._run is None else self._run.delivered
        ends = int(0 < len(self) <= batch)
        batch = 0 if ends else batch
        return {"epoch": self._epoch + ends, "batch": batch, "order": {**self._order_id}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue at the batch after those that were delivered.

        Raises
        ------
        SpecError
            If the state is of other samples, or of options that give another order.
        """
        epoch, batch = state.get("epoch", -1), state.get("batch", -1)
        is_valid = {type(epoch), type(batch)} == {int} and min(epoch, batch) >= 0
        is_valid = is_valid and batch <= len(self) and isinstance(state.get("order"), Mapping)
        check(is_valid, "a state is a result of state_dict() of such a loader", state)
        other = dict(state["order"])
        for name, mine in self._order_id.items():
            if mine != other.get(name):
                raise SpecError(
                    f"the state is of a loader with another order: {name} was {other.get(name)!r}, "
                    f"and is {mine!r}"
                )
        self.close()
        self._epoch, self._batch, self._is_fresh = state["epoch"], state["batch"], True

    def torch(self) -> Any:
        """Return the loader as a ``torch.utils.data.IterableDataset`` whose items are batches.

        Pass it to ``DataLoader(…, batch_size=None, num_workers=0)``, or to `StatefulDataLoader` of
        torchdata, which finds `state_dict`. Worker processes raise `UnsupportedError`.
        """
        return torch_dataset(self)

    # ------------------------------------------------------------------- figures

    def plan(self) -> LoaderPlan:
        """Return what the current epoch reads, and advice. Reads all shard indexes, no chunk.

        Without shards the size of chunks is not known: then bytes count as decoded.
        """
        task, sources, shards = self._task, self._task.sources, set[Any]()
        counts = np.zeros(4, np.int64)
        numbers, ends = task.order(self._epoch)
        for _, units in task.plans(numbers, ends):
            for unit in units:
                source, reads = sources[unit.array], unit.reads
                shards.update((unit.array, shard) for shard, _ in reads)
                decoded, is_known = unit.n_chunks * source.chunk_nbytes, source.entries.layout
                n_each, encoded = unit.n_chunks, decoded
                if is_known:
                    n_each, encoded = source.entries.price(reads)
                counts += (unit.n_chunks, n_each, encoded, decoded)
        n_chunks, n_requests, nbytes_read, nbytes_decoded = counts.tolist()
        delivered = int(nbytes_of(sources, task.samples, numbers).sum())
        shard_nbytes = sum(source.shard_nbytes for source in sources)
        amplification = nbytes_decoded / delivered if delivered else 1.0
        of_pool = task.pool_samples * delivered / max(1, len(numbers)) / shard_nbytes
        pool_shards = min(of_pool, len(shards) / len(sources))
        advice = advice_of(sources[0], amplification, task.draw, shard_nbytes)
        read = (len(shards), n_chunks, n_requests, nbytes_read, delivered)
        price = (self._peak_nbytes, amplification, pool_shards, advice)
        return LoaderPlan(len(numbers), len(self), *read, *price)

    def stats(self) -> LoaderStats:
        """Return counts of the current epoch, or of the last one."""
        now, before = self._store.stats(), self._before
        stats = LoaderStats() if self._run is None else self._run.stats
        return replace(
            stats,
            index_requests=now.index_requests - before.index_requests,
            index_hits=now.index_hits - before.index_hits,
        )


def _numbers(name: str, given: Any) -> list[int] | None:
    """Return whole numbers, one for each sampled axis."""
    try:
        return None if given is None else [*map(operator.index, given)]
    except TypeError:
        raise SpecError(f"{name} is a sequence of whole numbers, got {given!r}") from None


def _limits(
    sources: Sequence[Source], batch_nbytes: int, n_threads: int, prefetch: int, pool: int | None
) -> tuple[int, int, int]:
    """Divide the memory: decoders, units under way, batches at the ends of a group, pool.

    Return the threads that have room, the limit of all but the decoders, and the pool.
    """
    chunk_nbytes = max(source.chunk_nbytes for source in sources)
    decoder = 2 * max(PIECE_NBYTES, chunk_nbytes)
    shared = 2 * (3 * GAPS_NBYTES + 2 * chunk_nbytes) + 2 * batch_nbytes
    if pool is None:  # threads do not change it, and no chunk is read for each of its samples
        pool = min((prefetch - shared) // 3, prefetch - shared - decoder)
        of_chunk = min(_samples_nbytes(sources), 3 * chunk_nbytes)
        pool = max(pool, LOCAL_UNIT_NBYTES, chunk_nbytes, of_chunk)
    left = prefetch - shared - pool
    rule = "prefetch_nbytes is at least {} for these batches, chunks and pool"
    check(left >= decoder, rule.format(prefetch - left + decoder), prefetch)
    n_threads = min(n_threads, left // decoder)
    return n_threads, prefetch - n_threads * decoder, pool


def _samples_nbytes(sources: Sequence[Source]) -> int:
    """Return the size of all rows of a chunk of the first array, in all arrays."""
    if not all(source.are_rows and source.indptr is None for source in sources):
        return 0
    each = sum(source.row_nbytes + PART_NBYTES * source.n_parts for source in sources)
    return sources[0].chunk_shape[0] * each


def _order_id(task: Task, **of_batches: object) -> dict[str, Any]:
    """Return what the samples and their order depend on, as JSON has it."""
    first, draw = task.sources[0], task.draw
    tables = [zlib.crc32(np.ascontiguousarray(each).data) for each in task.samples.tables]
    sides = [(first.chunk_shape[axis], first.shards.sides[axis]) for axis in first.axes]
    rows = [zlib.crc32(s.indptr.data) for s in task.sources if s.indptr is not None]
    return {
        **of_batches,
        "number of samples": task.samples.n,
        "axes and shape of samples": [[[*map(int, s.axes)], [*s.lengths]] for s in task.sources],
        "checksum of positions": tables,
        "checksum of chunks and shards": draw.shuffle == "shards"
        and zlib.crc32(repr(sides).encode()),
        "shuffle": draw.shuffle,
        "seed": draw.seed,
        "samples in pool_nbytes": task.pool_samples,
        **({"checksum of sparse rows": zlib.crc32(repr(rows).encode())} if rows else {}),
        **({"pool_nbytes": draw.pool_nbytes} if rows and draw.shuffle == "shards" else {}),
    }


def _finish(
    columns: Mapping[str, Column],
    is_single: bool,
    convert: Converter,
    transform: Callable[[Any], Any] | None,
    arrays: Sequence[Array],
    starts: Ints,
) -> Any:
    """Return a batch, in a thread. It knows no loader, so a loader can be dropped."""
    left = iter(arrays)
    batch: Any = {name: each.value(left, starts, convert) for name, each in columns.items()}
    batch = batch[""] if is_single else batch
    return batch if transform is None else transform(batch)
