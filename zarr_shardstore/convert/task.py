"""Converting one region: read its values, write them, read them back and compare.

A task is independent of all others, small, picklable, and may be repeated: what was written
before is compared, and written again only if it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import crc32c
import numpy as np

from zarr_shardstore.convert.regions import ArrayLocation, Region
from zarr_shardstore.convert.transfer import (
    BATCH_NBYTES,
    Batch,
    Values,
    Wanted,
    check_entries,
    read_wanted,
    values_of,
)
from zarr_shardstore.errors import (
    CorruptShardError,
    CorruptValueError,
    ShardConflictError,
    SpecError,
)
from zarr_shardstore.format.index import MISSING, ShardIndex
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.io.uploads import Upload
from zarr_shardstore.shards.index_reads import read_indexes
from zarr_shardstore.shards.requests import Delete, DeleteMany, Exists, GetMany, GetSize, Set

_crc = crc32c.crc32c


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """What the tasks of one array have in common.

    Parameters
    ----------
    source, target : Place
        Of the same values. At least one of them has shards, or values are copied.
    region_shape : tuple of int
        Values in a region along each dimension.
    order
        In which order the entries of a shard are written.
    nominal_nbytes : int, optional
        Bytes of a value before compression.
    may_be_there : bool
        An earlier run may have written something.
    document_key : str, optional
        An object of the source that workers elsewhere must find: who does not reach the store
        would take all values for missing.
    only_compares : bool
        Nothing is written: the target has the array already, and a difference is an error.
    """

    source: ArrayLocation
    target: ArrayLocation
    region_shape: Coords
    order: EntryOrder
    nominal_nbytes: int | None
    may_be_there: bool
    document_key: str | None = None
    only_compares: bool = False


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What became of a region: its values, their bytes, the objects that hold them now."""

    n_chunks: int
    n_objects: int
    n_bytes: int
    was_there: bool = False


@dataclass(slots=True)
class _Checksums:
    """Size and crc32c of values, by entry id, in the order in which they were met."""

    ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        if batch.continues:
            (piece,) = batch.values
            self.sizes[-1] += len(piece)
            self.crcs[-1] = _crc(piece, self.crcs[-1])
            return
        self.ids += batch.ids
        self.sizes += map(len, batch.values)
        self.crcs += map(_crc, batch.values)

    def by_id(self) -> dict[int, tuple[int, int]]:
        return dict(zip(self.ids, zip(self.sizes, self.crcs, strict=True), strict=True))


def run_task(task: ArrayTask, coords: Coords) -> TaskResult:
    """Convert one region, and verify what was written.

    Raises
    ------
    CorruptShardError, CorruptValueError
        If what was written reads back as something else; or if a shard of the source is
        damaged.
    ShardConflictError
        If the source was changed meanwhile.
    SpecError
        If the store is not to be reached from here.

    Memory: about two times `BATCH_NBYTES`, the parts of an upload, and the indexes of the
    shards that the region touches. Base stores that take whole objects only (zarr stores that
    are neither local, nor of fsspec or obstore) need a whole shard more.
    """
    if task.document_key is not None:
        (is_there,) = task.source.base.perform([Exists(task.document_key)])
        if not is_there:
            raise SpecError(
                f"a worker does not find {task.document_key!r} in {task.source.base.describe()}: "
                "take an executor whose workers reach the store; nothing was removed"
            )
    region = Region.of(coords, task.region_shape, task.source.grid_shape, task.order)
    values = values_of(task.source, region, task.nominal_nbytes)
    if task.only_compares:
        return _compare(task, region, values)
    if task.target.spec is None:
        return _write_values(task, region, values)
    return _write_shard(task, task.target.layout.shard(coords), values)


def _compare(task: ArrayTask, region: Region, values: Values) -> TaskResult:
    expected, there = _Checksums(), _Checksums()
    for batch in values.batches():
        expected.add(batch)
    damage: Exception | None = None
    try:
        for batch in values_of(task.target, region, task.nominal_nbytes).batches():
            there.add(batch)
    except (CorruptShardError, ShardConflictError) as error:
        damage = error
    if damage is None and there.by_id() == expected.by_id():
        return TaskResult(0, 0, 0, was_there=True)
    where = ", ".join(f"{start} to {stop - 1}" for start, stop in region.box)
    raise SpecError(
        f"the destination has an array at {task.target.prefix!r} already, of the same metadata, "
        f"and not the chunks that the source has (of those of coordinates {where}): one of the "
        "two was changed since. Nothing was written: remove the array from the destination and "
        "run the same again, or take another destination"
    ) from damage


# ------------------------------------------------------------------ to shards


def _write_shard(task: ArrayTask, shard: ShardRef, values: Values) -> TaskResult:
    base = task.target.base
    if task.may_be_there:
        there = _try_checksums_of_shard(task.target, shard)
        expected = _Checksums()
        if there is not None:
            for batch in values.batches():
                expected.add(batch)
            if there == expected.by_id():
                return _result(expected, 1, was_there=True)
    written = _upload_shard(task, shard, values)
    if not written.ids:
        if task.may_be_there:
            base.perform([Delete(shard.key)])
        return TaskResult(0, 0, 0)
    try:
        read_back = _checksums_of_shard(task.target, shard)
    except (CorruptShardError, ShardConflictError) as error:
        raise CorruptShardError(_NOT_THE_SAME, shard_key=shard.key) from error
    if read_back != written.by_id():
        raise CorruptShardError(_NOT_THE_SAME, shard_key=shard.key)
    return _result(written, 1)


_NOT_THE_SAME = (
    "what was written reads back as something else; nothing was removed. Check the disk or the "
    "store, and run the same again"
)


def _upload_shard(task: ArrayTask, shard: ShardRef, values: Values) -> _Checksums:
    spec = shard.layout.spec
    done = _Checksums()
    upload: Upload | None = None
    wanted: Wanted | None = None
    if spec.index.location == "start":
        wanted = values.sizes()
    try:
        for batch in values.batches():
            if upload is None:
                upload = task.target.base.upload(shard.key)
                if wanted is not None:
                    sizes = (wanted.stops - wanted.starts).tolist()
                    upload.write([_index_bytes(shard, wanted.ids.tolist(), sizes)])
            upload.write(batch.values)
            done.add(batch)
        if upload is not None:
            if wanted is None:
                upload.write([_index_bytes(shard, done.ids, done.sizes)])
            upload.finish()
    except BaseException:
        if upload is not None:
            upload.abort()
        raise
    return done


def _index_bytes(shard: ShardRef, ids: list[int], sizes: list[int]) -> bytes:
    """The index of entries that are written one behind the other."""
    spec = shard.layout.spec
    nbytes = np.array(sizes, dtype=np.uint64)
    fields = np.full((spec.n_entries, 2), MISSING, dtype=np.uint64)
    start = spec.index_nbytes if spec.index.location == "start" else 0
    fields[ids, 0] = np.cumsum(nbytes) - nbytes + np.uint64(start)
    fields[ids, 1] = nbytes
    return ShardIndex(fields).encode(spec.index)


def _try_checksums_of_shard(
    place: ArrayLocation, shard: ShardRef
) -> dict[int, tuple[int, int]] | None:
    """Those of a shard that may be there; ``None`` if it is not, or not whole."""
    try:
        return _checksums_of_shard(place, shard)
    except (CorruptShardError, ShardConflictError):
        return None


def _checksums_of_shard(place: ArrayLocation, shard: ShardRef) -> dict[int, tuple[int, int]]:
    """Size and crc32c of each entry of a stored shard, read from the store."""
    (size,) = place.base.perform([GetSize(shard.key)])
    (index,) = place.base.run(read_indexes([shard]))
    if index is None or size is None:
        raise ShardConflictError(f"shard {shard.key!r} is not there")
    wanted = _entries_by_offset(shard, index, size)
    read = _Checksums()
    for batch in read_wanted(place.base, wanted):
        read.add(batch)
    return read.by_id()


def _entries_by_offset(shard: ShardRef, index: ShardIndex, size: int) -> Wanted:
    check_entries(shard, index, size)
    ids = index.present_ids()
    starts, nbytes = index.fields[ids].astype(np.int64).T
    order = np.argsort(starts, kind="stable")
    return Wanted(
        [shard.key],
        np.zeros(len(ids), dtype=np.int64),
        starts[order],
        (starts + nbytes)[order],
        ids[order].astype(np.int64),
    )


# ------------------------------------------------- to keys of their own


def _write_values(task: ArrayTask, region: Region, values: Values) -> TaskResult:
    base = task.target.base
    keys = dict(zip(region.ids.tolist(), region.keys(task.target), strict=True))
    written = _Checksums()
    n_there = 0
    upload: Upload | None = None
    try:
        for batch in values.batches():
            written.add(batch)
            if batch.continues or batch.goes_on:
                upload = upload or base.upload(keys[batch.ids[0]])
                upload.write(batch.values)
                if not batch.goes_on:
                    upload.finish()
                    upload = None
                continue
            to_write = list(zip(batch.ids, batch.values, strict=True))
            if task.may_be_there:
                (there,) = base.perform([GetMany([keys[i] for i in batch.ids])])
                to_write = [(i, v) for (i, v), t in zip(to_write, there, strict=True) if v != t]
                n_there += len(batch.ids) - len(to_write)
            base.perform([Set(keys[i], value) for i, value in to_write])
    except BaseException:
        if upload is not None:
            upload.abort()
        raise
    _verify_values(base, keys, written)
    if task.may_be_there:
        missing = keys.keys() - set(written.ids)
        base.perform([DeleteMany([keys[i] for i in missing])])
    was_there = bool(written.ids) and n_there == len(written.ids)
    return _result(written, len(written.ids), was_there=was_there)


def _verify_values(base: BaseStoreHandle, keys: Mapping[int, str], written: _Checksums) -> None:
    """Read values back.

    Raises
    ------
    CorruptValueError
        If one is another.
    """
    start = 0
    ends = np.cumsum(written.sizes)
    while start < len(ends):
        limit = int(ends[start]) - written.sizes[start] + BATCH_NBYTES
        stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
        some = written.ids[start:stop]
        if written.sizes[start] > BATCH_NBYTES:
            read = _checksums_of_large(base, keys[some[0]], some[0])
        else:
            (values,) = base.perform([GetMany([keys[i] for i in some])])
            read = _Checksums()
            there = [(i, v) for i, v in zip(some, values, strict=True) if v is not None]
            read.add(Batch([i for i, _ in there], [v for _, v in there]))
        found = read.by_id()
        for i, size, crc in zip(
            some, written.sizes[start:stop], written.crcs[start:stop], strict=True
        ):
            if found.get(i) != (size, crc):
                raise CorruptValueError(_NOT_THE_SAME, key=keys[i])
        start = stop


def _checksums_of_large(base: BaseStoreHandle, key: str, entry_id: int) -> _Checksums:
    (size,) = base.perform([GetSize(key)])
    one = np.array([size or 0])
    zero = np.zeros(1, dtype=np.int64)
    read = _Checksums()
    for batch in read_wanted(base, Wanted([key], zero, zero, one, zero + entry_id)):
        read.add(batch)
    return read


def _result(checksums: _Checksums, n_objects: int, *, was_there: bool = False) -> TaskResult:
    n_bytes = sum(checksums.sizes)
    return TaskResult(len(checksums.ids), n_objects, n_bytes, was_there)
