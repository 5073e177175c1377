"""Task of a conversion: one region is read, written, read back and compared.

A task is independent of all others, small and picklable, and may be repeated. What an earlier run
wrote is compared with the source, and written again only if it differs.

Values are read in rounds of bounded size, in the order in which they are written. The index of a
shard tells the size of each entry. There a round is cut by bytes, and a value that is larger than a
round comes in pieces. Of an object of its own only the size before compression is known: a round
reads as many objects as fit then. Where that size is unknown, or large, the sizes of the objects
are requested first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import add
from typing import TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt

from zarr_shardstore import errors
from zarr_shardstore.access import (
    BaseStoreHandle,
    byte_ranges,
    chunk_keys,
    index_reads,
    layouts,
    requests,
    shard_format,
)
from zarr_shardstore.tools.convert.regions import ArrayLocation, ArrayRegion, only_stored

ROUND_NBYTES = 8 * 1024 * 1024
"""Bytes that one worker reads before it writes them."""

_MAX_ROUND = 4096
"""Values that are read in one round, however small they are."""

_MAX_GAP_NBYTES = 64 * 1024
"""Unwanted bytes of a shard that are read along: usually the next request wants them."""

_NOT_THE_SAME = (
    "what was written reads back as something else; nothing was removed. Check the disk or the "
    "store, and run the same again"
)

_Ints: TypeAlias = npt.NDArray[np.int64]
_NONE: _Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """The part that all tasks of one array share.

    Source and target are of the same values. At least one has shards, or values are copied.
    """

    source: ArrayLocation
    target: ArrayLocation
    region_shape: chunk_keys.Coords
    order: shard_format.EntryOrder
    nominal_nbytes: int | None
    """Bytes of a value before compression, if they are known."""
    may_be_there: bool
    """An earlier run may have written something."""
    run: str
    """Unique: dask takes equal tasks for one, and would return the result of an earlier run."""
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


@dataclass(frozen=True, slots=True)
class ReadRound:
    """Some values; or one piece of a large value, not its first, or not its last."""

    ids: _Ints
    """Entry ids."""
    sizes: _Ints
    """Bytes of each value, or of the piece."""
    pieces: Sequence[memoryview]
    """One for each value, or one in which they lie one behind the other."""
    continues: bool = False
    has_more: bool = False

    def values(self) -> Sequence[memoryview]:
        if len(self.pieces) == len(self.ids):
            return self.pieces
        (data,) = self.pieces
        return [data[lo:hi] for lo, hi in pairwise([0, *np.cumsum(self.sizes).tolist()])]


class _Contents:
    """Entry ids and sizes of values, in the order in which they were met, and a crc32c of all."""

    def __init__(self, rounds: Iterable[ReadRound] = ()) -> None:
        self._ids, self._sizes = [_NONE], [_NONE]
        self.crc = 0
        for found in rounds:
            self.add(found)

    def add(self, found: ReadRound) -> None:
        for piece in found.pieces:
            self.crc = crc32c.crc32c(piece, self.crc)
        if found.continues:
            self._sizes[-1] += found.sizes  # of this piece alone
        else:
            self._ids.append(found.ids)
            self._sizes.append(found.sizes)

    @property
    def ids(self) -> _Ints:
        return np.concatenate(self._ids)

    @property
    def sizes(self) -> _Ints:
        return np.concatenate(self._sizes)

    def is_same(self, other: _Contents) -> bool:
        return (
            self.crc == other.crc
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.sizes, other.sizes)
        )

    def result(self, n_objects: int, *, was_there: bool = False) -> TaskResult:
        return TaskResult(len(self.ids), n_objects, int(self.sizes.sum()), was_there)


def run_task(task: ArrayTask, coords: chunk_keys.Coords) -> TaskResult:
    """Convert one region, and verify what was written.

    Memory: about two times `ROUND_NBYTES`, the parts of an upload, and the indexes of the
    shards that the region touches. A base store that takes whole objects only needs a shard more.
    """
    base = task.source.base
    if task.document_key is not None and not base.perform([requests.Exists(task.document_key)])[0]:
        raise errors.SpecError(
            f"a worker does not find {task.document_key!r} in {base.describe()}: take an executor "
            "whose workers reach the store; nothing was removed"
        )
    region = ArrayRegion.of(task.region_shape, coords, task.source.grid.grid_shape, task.order)
    values = _find_values(task.source, region, task.nominal_nbytes)
    if task.only_compares:
        return _compare(task, region, values)
    if not task.target.grid.is_sharded:
        return _write_objects(task, region, values)
    return _write_shard(task, region, values)


def _find_in_target(task: ArrayTask, region: ArrayRegion) -> tuple[_Contents, Exception | None]:
    """Return the contents of the target; empty ones, and the error, if it is not whole."""
    try:
        values = _find_values(task.target, region, task.nominal_nbytes)
        return _Contents(values.rounds()), None
    except (errors.CorruptShardError, errors.ShardConflictError) as error:
        return _Contents(), error


def _compare(task: ArrayTask, region: ArrayRegion, values: StoredValues) -> TaskResult:
    """Raise `SpecError` if the values of the target are not those of the source."""
    expected = _Contents(values.rounds())
    found, damage = _find_in_target(task, region)
    if found.is_same(expected) and damage is None:
        return TaskResult(0, 0, 0, was_there=True)
    box = layouts.grid_box(region.coords, region.shape, task.source.grid.grid_shape)
    where = ", ".join(f"{start} to {stop - 1}" for start, stop in box)
    raise errors.SpecError(
        f"the destination has an array at {task.target.grid.prefix!r} already, of the same "
        "metadata, and not the chunks that the source has (of those of coordinates "
        f"{where}): one of the two was changed since. Nothing was written: remove the array from "
        "the destination and run the same again, or take another destination"
    ) from damage


# ------------------------------------------------------------------ to shards


def _write_shard(task: ArrayTask, region: ArrayRegion, values: StoredValues) -> TaskResult:
    base, shard = task.target.base, task.target.grid.layout.shard(region.coords)
    if task.may_be_there:
        there, _ = _find_in_target(task, region)
        if len(there.ids):
            expected = _Contents(values.rounds())
            if there.is_same(expected):
                return expected.result(1, was_there=True)
    written = _upload_shard(base, shard, values)
    if not len(written.ids):
        if task.may_be_there:
            base.perform([requests.Delete(shard.key)])
        return TaskResult(0, 0, 0)
    found, damage = _find_in_target(task, region)
    if not found.is_same(written):
        raise errors.CorruptShardError(_NOT_THE_SAME, shard_key=shard.key) from damage
    return written.result(1)


def _upload_shard(
    base: BaseStoreHandle, shard: layouts.ShardRef, values: StoredValues
) -> _Contents:
    """Store the values as a shard; no shard if there are no values."""
    written = _Contents()
    spec = shard.layout.spec
    is_index_first = spec.index.location == "start"
    if is_index_first and values.is_estimate:
        values = _whole_objects(values.base, values.keys, values.ids)
    rounds = values.rounds()
    first = next(rounds, None)
    if first is None:
        return written

    def parts() -> Iterator[Sequence[bytes | memoryview]]:
        if is_index_first:
            yield [shard_format.packed_index(values.ids, values.stops - values.starts, spec)]
        for found in chain([first], rounds):
            written.add(found)
            yield found.pieces
        if not is_index_first:
            yield [shard_format.packed_index(written.ids, written.sizes, spec)]

    base.backend.upload(shard.key, parts())
    return written


# ------------------------------------------------- to objects of their own


def _write_objects(task: ArrayTask, region: ArrayRegion, values: StoredValues) -> TaskResult:
    base = task.target.base
    missing = dict(zip(region.ids.tolist(), region.keys(task.target), strict=True))
    n_chunks = n_there = nbytes = 0
    rounds = values.rounds()
    for found in rounds:
        keys = [missing.pop(i) for i in found.ids.tolist()]
        n_chunks += len(keys)
        if found.has_more:
            written = _Contents()
            base.backend.upload(keys[0], _pieces_of_value(found, rounds, written))
            read_back = _Contents(read_object(base, keys[0], int(found.ids[0])))
            if not read_back.is_same(written):
                raise errors.CorruptValueError(_NOT_THE_SAME, key=keys[0])
            nbytes += int(written.sizes[0])
        else:
            n_there += _write_values(base, keys, found.values(), task.may_be_there)
            nbytes += int(found.sizes.sum())
    if task.may_be_there:
        base.perform([requests.Delete(key) for key in missing.values()])
    return TaskResult(n_chunks, n_chunks, nbytes, was_there=0 < n_chunks == n_there)


def _write_values(
    base: BaseStoreHandle, keys: Sequence[str], values: Sequence[memoryview], may_be_there: bool
) -> int:
    """Write values and read them back; return the number of those that were there already."""

    def other_values() -> list[tuple[str, memoryview]]:
        stored = base.values(keys, check=False)
        found = zip(keys, values, stored, strict=True)
        # Python compares views item by item, which takes ten times as long.
        return [(k, v) for k, v, there in found if there is None or not np.array_equal(v, there)]

    to_write = other_values() if may_be_there else list(zip(keys, values, strict=True))
    base.perform([requests.Set(key, value) for key, value in to_write])
    for key, _ in other_values():
        raise errors.CorruptValueError(_NOT_THE_SAME, key=key)
    return len(keys) - len(to_write)


def _pieces_of_value(
    first: ReadRound, rounds: Iterator[ReadRound], written: _Contents
) -> Iterator[Sequence[memoryview]]:
    for found in chain([first], rounds):
        written.add(found)
        yield found.pieces
        if not found.has_more:
            return


# ----------------------------------------------------------------------- reads


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Values as byte ranges of objects, in the order in which they are read."""

    base: BaseStoreHandle
    keys: list[str]
    which: _Ints
    """The position in `keys` of each value."""
    starts: _Ints
    stops: _Ints
    ids: _Ints
    is_estimate: bool = False
    """Each value is a whole object, of about this size or missing."""

    def rounds(self) -> Iterator[ReadRound]:
        """Read all stored values in order; a changed size raises `ShardConflictError`."""
        if self.is_estimate:
            return _read_objects(self.base, self.keys, self.ids.tolist(), self.stops)
        return _read_ranges(self)


def _find_values(
    location: ArrayLocation, region: ArrayRegion, nominal_nbytes: int | None
) -> StoredValues:
    """Find the values of a region; the nominal size is that before compression.

    Cost: one index request for each shard that the region touches, if there are shards; one
    request for each size, if values may be too large for memory.
    """
    region = only_stored(location, region)
    if location.grid.is_sharded:
        return _values_in_shards(location, region)
    keys = region.keys(location)
    if (ranges := location.base.backend.ranges_of(keys)) is not None:
        names, which, starts, stops = ranges
        there = which >= 0
        fields = which[there], starts[there], stops[there], region.ids[there]
        return StoredValues(location.base, names, *fields)
    if nominal_nbytes is None or nominal_nbytes > ROUND_NBYTES:
        return _whole_objects(location.base, keys, region.ids)
    sizes = np.full(len(keys), nominal_nbytes, dtype=np.int64)
    which = np.arange(len(keys))
    return StoredValues(location.base, keys, which, 0 * which, sizes, region.ids, is_estimate=True)


def _whole_objects(base: BaseStoreHandle, keys: Sequence[str], ids: _Ints) -> StoredValues:
    """Request the sizes of objects, each of which is a value."""
    sizes = base.sizes(keys)
    stored = [i for i, size in enumerate(sizes) if size is not None]
    which = np.arange(len(stored))
    stops = np.array([sizes[i] for i in stored], dtype=np.int64)
    return StoredValues(base, [keys[i] for i in stored], which, 0 * which, stops, ids[stored])


def _values_in_shards(location: ArrayLocation, region: ArrayRegion) -> StoredValues:
    """Find the values of a region in the indexes of its shards."""
    layout, spec = location.grid.layout, location.grid.layout.spec
    cps = np.array(spec.chunks_per_shard, dtype=np.intp)
    inside = np.unravel_index(region.ids, region.shape) if region.shape else ()
    coords = np.array(inside, dtype=np.intp).reshape(len(cps), len(region.ids)).T
    # Counted from the first shard on: coordinates may be larger than the integers of numpy.
    starts = [i * n for i, n in zip(region.coords, region.shape, strict=True)]
    coords += np.array([i % n for i, n in zip(starts, spec.chunks_per_shard, strict=True)], np.intp)
    shard_coords = coords // cps
    corners, which = np.unique(shard_coords, axis=0, return_inverse=True)
    which = which.reshape(-1)
    first = [i // n for i, n in zip(starts, spec.chunks_per_shard, strict=True)]
    shards = [layout.shard(tuple(map(add, first, corner))) for corner in corners.tolist()]
    sizes = location.base.sizes([shard.key for shard in shards])
    strides = [math.prod(spec.chunks_per_shard[dim + 1 :]) for dim in range(len(cps))]
    entry_ids = (coords - shard_coords * cps) @ np.array(strides, dtype=np.intp)
    fields = np.full((len(coords), 2), shard_format.MISSING, dtype=np.uint64)
    stored = [(i, size) for i, size in enumerate(sizes) if size is not None]
    indexes = location.base.run(index_reads.read_indexes([shards[i] for i, _ in stored]))
    for (i, size), index in zip(stored, indexes, strict=True):
        if index is None:
            continue
        try:
            index.check_entries(size, spec)
        except shard_format.IndexDamageError as damage:
            raise index_reads.corrupt(shards[i], damage, "; nothing was removed") from damage
        members = which == i
        fields[members] = index.fields[entry_ids[members]]
    present = np.flatnonzero((fields != shard_format.MISSING).any(axis=1))
    offsets, nbytes = fields[present].astype(np.int64).T
    return StoredValues(
        location.base,
        [shard.key for shard in shards],
        which[present].astype(np.int64),
        offsets,
        offsets + nbytes,
        region.ids[present].astype(np.int64),
    )


def _cut(base: BaseStoreHandle, sizes: _Ints) -> Iterator[tuple[int, int]]:
    """Cut values into rounds; one that is larger than a round is alone."""
    # Where a request costs little, a quarter is 1.2 times as fast: the bytes are in the cache of
    # the processor when they are written, and their memory is not new.
    is_near = base.backend.can_block and base.backend.max_requests_at_once is None
    nbytes = ROUND_NBYTES // 4 if is_near else ROUND_NBYTES
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        limit = int(ends[start] - sizes[start]) + nbytes
        stop = min(int(np.searchsorted(ends, limit, side="right")), start + _MAX_ROUND)
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def _read_objects(
    base: BaseStoreHandle, keys: Sequence[str], ids: Sequence[int], sizes: _Ints
) -> Iterator[ReadRound]:
    """Read whole objects of about these sizes; missing ones are left out.

    A truncated reply raises `ShardConflictError`.
    """
    for start, stop in _cut(base, sizes):
        if sizes[start] > ROUND_NBYTES:
            yield from read_object(base, keys[start], ids[start])
            continue
        values = base.values(keys[start:stop])
        there = [(i, v) for i, v in zip(ids[start:stop], values, strict=True) if v is not None]
        if there:
            yield _whole_values([i for i, _ in there], [v for _, v in there])


def read_object(base: BaseStoreHandle, key: str, entry_id: int = 0) -> Iterator[ReadRound]:
    """Read one object of any size; nothing if it is missing."""
    (size,) = base.sizes([key])
    if size is None:
        return
    if size > ROUND_NBYTES:
        zero = np.zeros(1, dtype=np.int64)
        stops, ids = zero + size, zero + entry_id
        yield from _read_ranges(StoredValues(base, [key], zero, zero, stops, ids))
        return
    (found,) = base.perform([requests.Get(key)])
    yield _whole_values([entry_id], [index_reads.check_whole(key, found.value, size)])


def _whole_values(ids: Sequence[int], values: Sequence[memoryview]) -> ReadRound:
    return ReadRound(np.array(ids, np.int64), np.array([*map(len, values)], np.int64), values)


def _read_ranges(wanted: StoredValues) -> Iterator[ReadRound]:
    """Read byte ranges in rounds; ranges that are near to each other share a request."""
    nbytes = wanted.stops - wanted.starts
    for start, stop in _cut(wanted.base, nbytes):
        if nbytes[start] > ROUND_NBYTES:
            yield from _pieces_of_range(wanted, start)
        else:
            part = slice(start, stop)
            yield ReadRound(wanted.ids[part], nbytes[part], _read(wanted, start, stop))


def _pieces_of_range(wanted: StoredValues, i: int) -> Iterator[ReadRound]:
    """Read one range that is larger than a round."""
    key, ids = wanted.keys[int(wanted.which[i])], wanted.ids[i : i + 1]
    first, last = int(wanted.starts[i]), int(wanted.stops[i])
    for start in range(first, last, ROUND_NBYTES):
        stop = min(start + ROUND_NBYTES, last)
        (found,) = wanted.base.perform([requests.Get(key, byte_ranges.Range(start, stop))])
        piece = index_reads.check_whole(key, found.value, stop - start)
        size = np.array([len(piece)])
        yield ReadRound(ids, size, [piece], continues=start > first, has_more=stop < last)


def _read(wanted: StoredValues, start: int, stop: int) -> list[memoryview]:
    """Read the ranges from position `start` to `stop`, which fit into one round.

    Those that lie one behind the other come as one piece.
    """
    part = slice(start, stop)
    which, starts, stops = wanted.which[part], wanted.starts[part], wanted.stops[part]
    first, last = int(starts[0]), int(stops[-1])
    if first < last and np.array_equal(starts[1:], stops[:-1]) and (which == which[0]).all():
        # Mostly shards are read as they were written: one request.
        key = wanted.keys[int(which[0])]
        (found,) = wanted.base.perform([requests.Get(key, byte_ranges.Range(first, last))])
        return [index_reads.check_whole(key, found.value, last - first)]
    values: list[memoryview] = [memoryview(b"")] * (stop - start)
    batch: list[requests.Get] = []
    members: list[list[tuple[int, int, int]]] = []
    for number in np.unique(which).tolist():
        positions = np.flatnonzero((which == number) & (stops > starts))
        ranges = list(zip(starts[positions].tolist(), stops[positions].tolist(), strict=True))
        for span in byte_ranges.plan_spans(
            ranges, max_gap_bytes=_MAX_GAP_NBYTES, max_coalesced_bytes=ROUND_NBYTES
        ):
            at = byte_ranges.Range(span.start, span.stop)
            batch.append(requests.Get(wanted.keys[number], at))
            parts = [(int(positions[m]), *ranges[m]) for m in span.members]
            members.append([(i, lo - span.start, hi - span.start) for i, lo, hi in parts])
    for get, found, parts in zip(batch, wanted.base.perform(batch), members, strict=True):
        assert isinstance(get.byte_range, byte_ranges.Range)
        nbytes = get.byte_range.stop - get.byte_range.start
        data = index_reads.check_whole(get.key, found.value, nbytes)
        for i, lo, hi in parts:
            values[i] = data[lo:hi]
    return values
