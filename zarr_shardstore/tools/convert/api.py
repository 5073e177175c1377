"""Conversions of a whole store into shards, back and into other shards; and compaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias, TypedDict, Unpack

from zarr_shardstore.access import (
    BaseStoreHandle,
    ShardingMapping,
    StoreLike,
    arguments,
    open_base,
    policies,
    resolve,
    shard_format,
    shards_below,
    store_options,
    walks,
)
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.tools.convert.in_place import only_conversion
from zarr_shardstore.tools.convert.job import check_estimate, convert_store, finish_exchanges
from zarr_shardstore.tools.convert.report import CompactionReport, ConversionReport, OnProgress
from zarr_shardstore.tools.inspect.occupancy import cell_of
from zarr_shardstore.tools.native.bridge import DocumentChange
from zarr_shardstore.tools.native.preview import NativePreview, native_preview

Shape: TypeAlias = policies.ChunksPerShard | EllipsisType
Lengths: TypeAlias = (
    "Sequence[int | Iterable[int]] | Mapping[str | int, int | Iterable[int]] | None"
)


class ConversionArguments(TypedDict, total=False):
    """Keyword arguments of every conversion; `shard_store` documents them."""

    paths: Iterable[str] | str | None
    executor: Executor | None
    source_options: Mapping[str, Any] | None
    destination_options: Mapping[str, Any] | None
    dry_run: bool
    progress: OnProgress | None
    copy_rest: bool
    estimate: bool


def shard_store(
    source: StoreLike,
    destination: StoreLike | None = None,
    *,
    chunks_per_shard: Shape = ...,
    shard_nbytes: int | str | None = None,
    shards: Lengths = None,
    shards_at: Lengths = None,
    paths: Iterable[str] | str | None = None,
    declaration: policies.V3Declaration | None = None,
    index_codecs: store_options.IndexCodecs = None,
    index_location: store_options.IndexLocation = None,
    order: shard_format.EntryOrder = "morton",
    executor: Executor | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
    consolidate_index: bool = False,
    shard_shape: Shape = ...,
    native: bool = False,
    ome: bool = False,
    copy_rest: bool = False,
    estimate: bool = False,
) -> ConversionReport:
    """Pack the chunks of the arrays of a store into shards, in place or in another store.

    Bytes of chunks are moved, never decoded. Arrays that have such shards already stay as they
    are. Arrays with other shards are re-packed, except with ``"auto"``.

    Parameters
    ----------
    source
        Any store that `ShardingStore` wraps.
    destination
        Another store of any kind; ``None``: in place. All keys of the source are copied to it,
        arrays in their new form; with `paths` only those, and the documents of groups above.
        Directories of chunks are not listed: other objects in them (``z/c/notes.txt``) are not
        copied. An array that is there already is compared with the source, chunk by chunk. Close
        a `ZipStore` afterwards: only then its file is whole.
    chunks_per_shard : "auto", int, tuple of int, mapping
        As for `ShardingStore`. ``"auto"``, the default, looks at the sizes of stored chunks, and
        the report says why. A shard is no longer than the grid of the array. A name of no array
        and no dimension is an error.
    shard_nbytes
        As for `ShardingStore`, in place of `chunks_per_shard`: bytes before compression.
    shards : sequence or mapping, optional
        Lengths of the shards in elements, in place of `chunks_per_shard`: for each dimension one
        length, or a list with the length of each shard. A mapping has them by name or number of
        the dimension, ``{"time": [31, 28, 31]}``; along other dimensions a shard has one chunk.
        Lists reach the end of the array, or beyond it for shards to come. Each shard consists of
        whole chunks.
    shards_at
        As `shards`, with the places where shards begin, after the first, instead of lengths.
    paths
        Arrays, groups with all below them, or patterns of these (``"raw/*"``); ``None``: all.
    declaration, index_codecs, index_location, order
        As for `ShardingStore`.
    executor : concurrent.futures.Executor, optional
        Runs one task for each shard; ``None``: a few threads.
    source_options, destination_options
        For obstore or fsspec, if the stores are URLs.
    dry_run
        Report what would be done; write nothing.
    progress
        Called after each task, in this thread.
    consolidate_index
        Call `ShardingStore.consolidate_index` at the end, for all sharded arrays.
    shard_shape
        The name of `chunks_per_shard` in zarr-vectors, also in chunks.
    native
        Also call `to_native`, so that every Zarr v3 reader reads the result: Zarr v2 becomes v3.
        In place this comes first, so a killed conversion leaves a readable store. Without it,
        only this package reads the shards of Zarr v2 arrays.
    ome
        With `native`: turn OME-Zarr 0.4 metadata into 0.5. The way back: `unshard_store`, then
        ``from_native(store, zarr_format=2, ome=True)``.
    copy_rest
        With `paths` and a destination: also copy all other arrays and keys, as they are. With
        `native` they must be v3 already.
    estimate
        With `dry_run`: also count objects and bytes before and after, requests, their price and
        time. Cost: requests for up to 4,096 objects of each array, and a listing of sparse ones.

    Returns
    -------
    ConversionReport

    Raises
    ------
    SpecError, UnsupportedError
        If it is not possible as asked. Also if the destination has an array of the same path
        that differs, lies inside the source, or cannot take the result; and in place, if the
        store cannot remove objects. Nothing was written.
    CorruptShardError, CorruptValueError
        If a shard of the source is damaged, or a written object reads back as something else.
        Nothing was removed.
    ShardConflictError
        If the source is changed concurrently, or another conversion of it is running.
    UnfinishedConversionError
        If the source was left half converted in place, and there is a destination.

    Notes
    -----
    No other program may write to the arrays meanwhile. Each chunk is read back and compared
    before anything is deleted. In place, readers see the old array until all new shards are
    verified. Then they get an error that says so, until the new array is there. After a kill,
    run the same command again: it compares what was done, and continues.

    Memory: 64 MiB for each worker, at most 128 MiB on object stores, and the indexes of the
    shards at hand; shards may be larger. Base stores that take whole objects only (zarr stores
    that are neither local nor of fsspec or obstore) need a whole shard.

    Examples
    --------
    >>> import numpy, zarr
    >>> store = zarr.storage.MemoryStore()
    >>> z = zarr.create_array(store, name="z", shape=(6, 6), chunks=(1, 1), dtype="u1")
    >>> z[:] = 7
    >>> shard_store(store, chunks_per_shard=(3, 2)).n_objects
    6
    >>> zarr.open_array(store, path="z").shards
    (3, 2)
    """
    default: Shape = "auto" if shard_nbytes is None else None
    shape = _one_of(chunks_per_shard, shard_shape, shards, shards_at, default)
    sharding = store_options.ShardingOptions(
        chunks_per_shard=shape,
        shard_nbytes=shard_nbytes,
        declaration="codec" if native else declaration,
        index_codecs=index_codecs,
        index_location=index_location,
        order=order,
    )
    if native and declaration == "storage_transformers":
        raise SpecError("native=True declares arrays by the codec: leave declaration away")
    if ome and not native:
        raise SpecError("ome=True (--ome) goes with native=True (--native)")
    check_estimate(estimate, dry_run)  # before documents change
    mapping = None
    if consolidate_index:
        result = source if destination is None else destination
        result_options = source_options if destination is None else destination_options
        mapping = ShardingMapping(open_base(result, result_options).store)
        mapping._engine.check_consolidation()
    paths = None if paths is None else arguments.paths_of(paths)
    options = ConversionArguments(
        paths=paths, executor=executor, destination_options=destination_options, progress=progress
    )
    options |= {"copy_rest": copy_rest, "estimate": estimate}
    convert = partial(convert_store, sharding=sharding, **options)
    if native:
        base = open_base(source, source_options, needs_chunks=True)
        above = destination is not None and not copy_rest
        preview = partial(native_preview, base, paths, ome=ome, above=above)
        report = _convert_native(convert, base, preview, destination, dry_run=dry_run)
    else:
        report = convert(source, destination, source_options=source_options, dry_run=dry_run)
    if mapping is not None and not dry_run:
        mapping.consolidate_index()
    return report


def _convert_native(
    convert: Callable[..., ConversionReport],
    base: BaseStoreHandle,
    preview: Callable[[], tuple[NativePreview, DocumentChange]],
    destination: StoreLike | None,
    *,
    dry_run: bool,
) -> ConversionReport:
    """Convert a store and translate its documents; in place these come first."""
    notes: tuple[str, ...] = ()
    if destination is not None or dry_run:
        previewed, change = preview()
        report = convert(previewed, destination, dry_run=dry_run)
    else:
        base.check_replaceable()
        base.check_writable()
        with only_conversion(base):
            notes = finish_exchanges(base)
            previewed, change = preview()
            convert(previewed, None, dry_run=True)  # what would refuse the conversion does so here
            change.make(base, dry_run=False)
            report = convert(base, None, is_locked=True)
    notes += change.notes
    if destination is None and (n := len(change.of_v2)):
        notes += (f"{n} arrays of Zarr v2 become v3 in place; {change.way_back}",)
    return replace(report, notes=notes + report.notes)


def unshard_store(
    source: StoreLike, destination: StoreLike | None = None, **options: Unpack[ConversionArguments]
) -> ConversionReport:
    """Give each chunk of the sharded arrays of a store an object of its own.

    `shard_store` has the parameters, errors and guarantees.
    """
    return convert_store(
        source, destination, store_options.ShardingOptions(order="C"), to_plain=True, **options
    )


def reshard(
    source: StoreLike,
    chunks_per_shard: Shape = ...,
    destination: StoreLike | None = None,
    *,
    shard_nbytes: int | str | None = None,
    shards: Lengths = None,
    shards_at: Lengths = None,
    declaration: policies.V3Declaration | None = None,
    index_codecs: store_options.IndexCodecs = None,
    index_location: store_options.IndexLocation = None,
    order: shard_format.EntryOrder = "morton",
    shard_shape: Shape = ...,
    **options: Unpack[ConversionArguments],
) -> ConversionReport:
    """Give the arrays of a store shards of this size, whether they have shards now or not.

    Parameters
    ----------
    chunks_per_shard
        Shards of the arrays afterwards; ``None``: no shards, as `unshard_store`.

    `shard_store` has the other parameters, the errors and guarantees.
    """
    default: Shape = ... if shard_nbytes is None else None
    shape = _one_of(chunks_per_shard, shard_shape, shards, shards_at, default)
    if shape is ...:
        raise SpecError(
            "reshard needs the size of shards: chunks_per_shard, or another option for it"
        )
    sharding = store_options.ShardingOptions(
        chunks_per_shard=shape,
        shard_nbytes=shard_nbytes,
        declaration=declaration,
        index_codecs=index_codecs,
        index_location=index_location,
        order=order,
    )
    to_plain = shape is None and shard_nbytes is None
    return convert_store(source, destination, sharding, to_plain=to_plain, **options)


def _one_of(
    chunks_per_shard: Shape,
    shard_shape: Shape,
    shards: Lengths,
    shards_at: Lengths,
    default: Shape,
) -> Shape:
    """Return the option that says how large a shard is; the default if all were left out."""
    given: dict[str, Any] = {"chunks_per_shard": chunks_per_shard, "shard_shape": shard_shape}
    given |= {"shards": ... if shards is None else shards}
    given |= {"shards_at": ... if shards_at is None else shards_at}
    names = [name for name, value in given.items() if value is not ...]
    if len(names) > 1:
        raise SpecError(f"{' and '.join(names)} say the same in several ways: give one")
    if shards is not None or shards_at is not None:
        lengths = shards if shards_at is None else shards_at
        return policies.ShardLengths.parse(lengths, are_ends=shards_at is not None)
    shape = chunks_per_shard if shard_shape is ... else shard_shape
    return default if shape is ... else shape


def compact_store(
    store: resolve.BaseStoreLike,
    prefix: str = "",
    *,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> CompactionReport:
    """Call `ShardingMapping.compact`, and measure each shard before and after.

    With `dry_run` dead bytes are counted by the indexes alone. Cost: the compaction, and two
    requests for each shard.
    """
    mapping = ShardingMapping(store, storage_options=storage_options)
    base = open_base(mapping)
    base.check_replaceable()
    if not dry_run:
        base.check_writable()
    shards, errors = base.run(shards_below(mapping._engine.operations.listing, prefix))
    if prefix and not shards and not errors:
        raise SpecError(f"no chunk that is stored in a shard has a key that starts with {prefix!r}")
    removed: list[int] = []
    failures: list[str] = []
    if dry_run:
        failures += map(str, errors)
        for shard, below in shards:
            grid = walks.ObjectGrid(shard.layout, below=below)
            place = walks.Stored(shard.key, shard.coords, is_listed=False)
            for stored in base.run(walks.read_stored(grid, [place], sizes=True)):
                if shard.is_adopted:
                    removed.append(0)
                elif stored.damage is not None:
                    failures.append(str(stored.damage))
                else:
                    removed.append(cell_of(stored).dead_nbytes)
    else:
        keys = [shard.key for shard, _ in shards]
        before = base.sizes(keys)
        try:
            mapping.compact(prefix)
        except ShardStoreError as error:
            failures.append(str(error))
        pairs = zip(before, base.sizes(keys), strict=True)
        removed += [(was or 0) - (now or 0) for was, now in pairs]
    n_compacted = sum(n != 0 for n in removed)
    return CompactionReport(len(shards), n_compacted, sum(removed), tuple(failures), dry_run)
