"""Task of a conversion: one region is read, written, read back and compared.

A task is independent of all others, small and picklable, and may be repeated. What an earlier run
wrote is compared with the source, and written again only if it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import crc32c
import numpy as np

from zarr_shardstore.convert.regions import ArrayLocation, ArrayRegion
from zarr_shardstore.convert.transfer import ReadRound, RegionValues, read_objects
from zarr_shardstore.errors import (
    CorruptShardError,
    CorruptValueError,
    ShardConflictError,
    SpecError,
)
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ShardRef, grid_box
from zarr_shardstore.format.shard import EntryOrder, packed_index
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.shards.requests import Delete, Exists, Set

_NOT_THE_SAME = (
    "what was written reads back as something else; nothing was removed. Check the disk or the "
    "store, and run the same again"
)


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """The part that all tasks of one array share.

    Source and target are of the same values. At least one has shards, or values are copied.
    """

    source: ArrayLocation
    target: ArrayLocation
    region_shape: Coords
    order: EntryOrder
    nominal_nbytes: int | None
    """Bytes of a value before compression, if they are known."""
    may_be_there: bool
    """An earlier run may have written something."""
    document_key: str | None = None
    """An object of the source that a worker elsewhere must find. A worker that does not reach the
    store would take all values for missing."""
    only_compares: bool = False
    """Nothing is written: the target has the array already, and a difference is an error."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Values of a region, their bytes, and the objects that hold them now."""

    n_chunks: int
    n_objects: int
    n_bytes: int
    was_there: bool = False


@dataclass(slots=True)
class _Checksums:
    """Sizes and crc32c of values, in the order in which the values were met."""

    ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Iterable[ReadRound]) -> _Checksums:
        checksums = cls()
        for found in rounds:
            checksums.add(found)
        return checksums

    def add(self, found: ReadRound) -> None:
        if found.continues:
            (piece,) = found.values
            self.sizes[-1] += len(piece)
            self.crcs[-1] = crc32c.crc32c(piece, self.crcs[-1])
            return
        self.ids += found.ids
        self.sizes += map(len, found.values)
        self.crcs += map(crc32c.crc32c, found.values)

    def by_id(self) -> dict[int, tuple[int, int]]:
        return dict(zip(self.ids, zip(self.sizes, self.crcs, strict=True), strict=True))

    def result(self, n_objects: int, *, was_there: bool = False) -> TaskResult:
        return TaskResult(len(self.ids), n_objects, sum(self.sizes), was_there)


def run_task(task: ArrayTask, coords: Coords) -> TaskResult:
    """Convert one region, and verify what was written.

    Memory: about two times `ROUND_NBYTES`, the parts of an upload, and the indexes of the
    shards that the region touches. Base stores that take whole objects only need a whole shard
    more: zarr stores that are neither local, nor of fsspec or obstore.
    """
    base = task.source.base
    if task.document_key is not None and not base.perform([Exists(task.document_key)])[0]:
        raise SpecError(
            f"a worker does not find {task.document_key!r} in {base.describe()}: take an executor "
            "whose workers reach the store; nothing was removed"
        )
    region = ArrayRegion.of(task.region_shape, coords, task.source.grid_shape, task.order)
    values = RegionValues(task.source, region, task.nominal_nbytes)
    if task.only_compares:
        return _compare(task, region, values)
    if task.target.spec is None:
        return _write_objects(task, region, values)
    return _write_shard(task, region, values)


def _checksums_in_target(task: ArrayTask, region: ArrayRegion) -> dict[int, tuple[int, int]]:
    values = RegionValues(task.target, region, task.nominal_nbytes)
    return _Checksums.of(values.rounds()).by_id()


def _compare(task: ArrayTask, region: ArrayRegion, values: RegionValues) -> TaskResult:
    """Raise `SpecError` if the values of the target are not those of the source."""
    expected = _Checksums.of(values.rounds()).by_id()
    damage: Exception | None = None
    try:
        if _checksums_in_target(task, region) == expected:
            return TaskResult(0, 0, 0, was_there=True)
    except (CorruptShardError, ShardConflictError) as error:
        damage = error
    box = grid_box(region.coords, region.shape, task.source.grid_shape)
    where = ", ".join(f"{start} to {stop - 1}" for start, stop in box)
    raise SpecError(
        f"the destination has an array at {task.target.prefix!r} already, of the same metadata, "
        f"and not the chunks that the source has (of those of coordinates {where}): one of the "
        "two was changed since. Nothing was written: remove the array from the destination and "
        "run the same again, or take another destination"
    ) from damage


# ------------------------------------------------------------------ to shards


def _write_shard(task: ArrayTask, region: ArrayRegion, values: RegionValues) -> TaskResult:
    base, shard = task.target.base, task.target.layout.shard(region.coords)
    if task.may_be_there:
        there = {}
        with suppress(CorruptShardError, ShardConflictError):  # it may not be whole
            there = _checksums_in_target(task, region)
        if there:
            expected = _Checksums.of(values.rounds())
            if there == expected.by_id():
                return expected.result(1, was_there=True)
    written = _upload_shard(base, shard, values)
    if not written.ids:
        if task.may_be_there:
            base.perform([Delete(shard.key)])
        return TaskResult(0, 0, 0)
    try:
        is_same = _checksums_in_target(task, region) == written.by_id()
    except (CorruptShardError, ShardConflictError) as error:
        raise CorruptShardError(_NOT_THE_SAME, shard_key=shard.key) from error
    if not is_same:
        raise CorruptShardError(_NOT_THE_SAME, shard_key=shard.key)
    return written.result(1)


def _upload_shard(base: BaseStoreHandle, shard: ShardRef, values: RegionValues) -> _Checksums:
    """Store the values as a shard; no shard if there are no values."""
    written = _Checksums()
    spec = shard.layout.spec
    ranges = values.ranges() if spec.index.location == "start" else None
    rounds = values.rounds()
    first = next(rounds, None)
    if first is None:
        return written

    def parts() -> Iterator[Sequence[bytes | memoryview]]:
        if ranges is not None:
            sizes = ranges.stops - ranges.starts
            yield [packed_index(ranges.ids, sizes, spec)]
        for found in chain([first], rounds):
            written.add(found)
            yield found.values
        if ranges is None:
            yield [packed_index(written.ids, written.sizes, spec)]

    base.backend.upload(shard.key, parts())
    return written


# ------------------------------------------------- to objects of their own


def _write_objects(task: ArrayTask, region: ArrayRegion, values: RegionValues) -> TaskResult:
    base = task.target.base
    keys = dict(zip(region.ids.tolist(), region.keys(task.target), strict=True))
    written = _Checksums()
    n_there = 0
    rounds = values.rounds()
    for found in rounds:
        written.add(found)
        if found.has_more:
            base.backend.upload(keys[found.ids[0]], _pieces_of_value(found, rounds, written))
            continue
        to_write = list(zip(found.ids, found.values, strict=True))
        if task.may_be_there:
            there = base.values([keys[i] for i in found.ids], check=False)
            to_write = [(i, v) for (i, v), t in zip(to_write, there, strict=True) if v != t]
            n_there += len(found.ids) - len(to_write)
        base.perform([Set(keys[i], value) for i, value in to_write])
    _verify_objects(base, keys, written)
    if task.may_be_there:
        missing = keys.keys() - set(written.ids)
        base.perform([Delete(keys[i]) for i in missing])
    was_there = bool(written.ids) and n_there == len(written.ids)
    return written.result(len(written.ids), was_there=was_there)


def _pieces_of_value(
    first: ReadRound, rounds: Iterator[ReadRound], written: _Checksums
) -> Iterator[Sequence[bytes | memoryview]]:
    yield first.values
    for found in rounds:
        written.add(found)
        yield found.values
        if not found.has_more:
            return


def _verify_objects(base: BaseStoreHandle, keys: Mapping[int, str], written: _Checksums) -> None:
    """Read values back; raise `CorruptValueError` if one differs."""
    sizes = np.array(written.sizes, dtype=np.int64)
    stored = read_objects(base, [keys[i] for i in written.ids], written.ids, sizes, check=False)
    found = _Checksums.of(stored).by_id()
    for i, checksum in written.by_id().items():
        if found.get(i) != checksum:
            raise CorruptValueError(_NOT_THE_SAME, key=keys[i])
