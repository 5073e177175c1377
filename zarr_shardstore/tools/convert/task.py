"""Task of a conversion: one region is read, written, read back and compared.

Tasks are independent, small and picklable, and may be repeated. What an earlier run wrote is
compared with the source, and written again only if it differs.

Values are read in rounds of bounded size, in the order of the writes. A shard index gives the size
of each entry: rounds are cut by bytes, and a value larger than a round comes in pieces. Of plain
chunks only the size before compression is known, so a round has as many as fit then. Where that
size is unknown, or large, the sizes of the objects are requested first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

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
from zarr_shardstore.tools.convert.regions import (
    ArrayLocation,
    ArrayRegion,
    ReadRound,
    only_stored,
)

ROUND_NBYTES = 8 * 1024 * 1024
"""Bytes that one worker reads before it writes them."""

_MAX_ROUND = 4096
"""Most values in a round."""

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
    """The part that all tasks of one array share. Source and target are of the same values."""

    source: ArrayLocation
    target: ArrayLocation
    regions: shard_format.ShardingSpec
    """Cut of the grid into regions, as into shards."""
    order: shard_format.EntryOrder
    nominal_nbytes: int | None
    """Bytes of a value before compression, if they are known."""
    may_be_there: bool
    """True if an earlier run may have written values."""
    run: str
    """Unique text: dask returns an earlier result for an equal task."""
    document_key: str | None = None
    """Object of the source that a worker elsewhere must find. A worker that does not reach the
    store would take all values for missing."""
    only_compares: bool = False
    """True if the target has the array already: each difference is an error."""
    check_run: Callable[[], None] | None = None
    """Raises an error in a worker that has outlived its run."""


class TaskResult(NamedTuple):
    """Values of regions, the objects that hold them now, and their bytes."""

    n_chunks: int = 0
    n_objects: int = 0
    n_bytes: int = 0
    n_resumed: int = 0


class _Contents:
    """Entry ids and sizes of values in their order, and a crc32c of all bytes."""

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
        pairs = (self.ids, other.ids), (self.sizes, other.sizes)
        return self.crc == other.crc and all(np.array_equal(*pair) for pair in pairs)

    def result(self, *, n_resumed: int = 0) -> TaskResult:
        """Return the result of a task whose values are one shard."""
        return TaskResult(len(self.ids), 1, int(self.sizes.sum()), n_resumed)


def run_task(task: ArrayTask, coords: chunk_keys.Coords) -> TaskResult:
    """Convert one region, and verify what was written.

    Memory: about two times `ROUND_NBYTES`, the parts of an upload, and the indexes of the shards in
    the region; also a shard, if the base store takes whole objects only.
    """
    base = task.source.base
    if task.document_key is not None and not base.perform([requests.Exists(task.document_key)])[0]:
        raise errors.SpecError(
            f"a worker does not find {task.document_key!r} in {base.describe()}: take an executor "
            "whose workers reach the store; nothing was removed"
        )
    boxes = task.regions.boxes
    ids = boxes.ids_in(coords, boxes.box(coords, task.source.grid.grid_shape))
    ids = shard_format.order_entries(ids, boxes.lengths(coords), task.order)
    region = ArrayRegion(task.regions, coords, ids)
    values = _find_values(task.source, region, task.nominal_nbytes)
    if task.only_compares:
        return _compare(task, region, values)
    write = _write_shard if task.target.grid.is_sharded else _write_objects
    result = write(task, region, values)
    again = base.run(index_reads.read_indexes([shard for shard, _ in values.unversioned]))
    for (shard, index), now in zip(values.unversioned, again, strict=True):
        if now is None or not np.array_equal(now.fields, index.fields):
            raise _changed(shard.key)
    return result


def _find_in_target(task: ArrayTask, region: ArrayRegion) -> tuple[_Contents, Exception | None]:
    """Return the contents of the target; no contents and the error, if it is damaged."""
    try:
        values = _find_values(task.target, region, task.nominal_nbytes)
        return _Contents(values.rounds()), None
    except (errors.CorruptShardError, errors.ShardConflictError) as error:
        return _Contents(), error


def _compare(task: ArrayTask, region: ArrayRegion, values: StoredValues) -> TaskResult:
    """Raise `SpecError` if source and target have different values."""
    expected = _Contents(values.rounds())
    found, damage = _find_in_target(task, region)
    if found.is_same(expected) and damage is None:
        return TaskResult(n_resumed=1)
    box = region.regions.boxes.box(region.coords, task.source.grid.grid_shape)
    where = ", ".join(f"{start} to {stop - 1}" for start, stop in box)
    raise errors.SpecError(
        f"the destination has an array at {task.target.grid.prefix!r} already, of the same "
        "metadata, and not the chunks that the source has (of those of coordinates "
        f"{where}): one of the two was changed since. Nothing was written: remove the array from "
        "the destination and run the same again, or take another destination"
    ) from damage


def _rounds_of_run(task: ArrayTask, values: StoredValues) -> Iterator[ReadRound]:
    """Read the source. It is whole if the run goes on after the read: a later run removes it."""
    for found in chain(values.rounds(), [None]):
        if task.check_run is not None:
            task.check_run()
        if found is not None:
            yield found


# ------------------------------------------------------------------ to shards


def _write_shard(task: ArrayTask, region: ArrayRegion, values: StoredValues) -> TaskResult:
    base, shard = task.target.base, task.target.grid.layout.shard(region.coords)
    if task.may_be_there:
        there, _ = _find_in_target(task, region)
        if len(there.ids) and there.is_same(_Contents(values.rounds())):
            return there.result(n_resumed=1)
    spec, written = shard.spec, _Contents()
    is_index_first = spec.index.location == "start"
    if is_index_first and values.is_estimate:
        values = _with_sizes(values)
    rounds = _rounds_of_run(task, values)
    first = next(rounds, None)
    if first is None:  # there is no value, so no shard
        if task.may_be_there:
            base.perform([requests.Delete(shard.key)])
        return TaskResult()
    all_rounds = chain([first], rounds)

    def parts() -> Iterator[Sequence[bytes | memoryview]]:
        if is_index_first:
            yield [shard_format.packed_index(values.ids, values.stops - values.starts, spec)]
        for found in all_rounds:
            written.add(found)
            yield found.pieces
        if not is_index_first:
            yield [shard_format.packed_index(written.ids, written.sizes, spec)]

    base.backend.upload(shard.key, parts())
    read_back, damage = _find_in_target(task, region)
    if not read_back.is_same(written):
        raise errors.CorruptShardError(_NOT_THE_SAME, shard_key=shard.key) from damage
    return written.result()


# ------------------------------------------------- to objects of their own


def _write_objects(task: ArrayTask, region: ArrayRegion, values: StoredValues) -> TaskResult:
    base = task.target.base
    missing = dict(zip(region.ids.tolist(), region.keys(task.target), strict=True))
    n_chunks = n_there = nbytes = 0
    rounds = _rounds_of_run(task, values)
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
    return TaskResult(n_chunks, n_chunks, nbytes, n_resumed=0 < n_chunks == n_there)


def _write_values(
    base: BaseStoreHandle, keys: Sequence[str], values: Sequence[memoryview], may_be_there: bool
) -> int:
    """Write values and read them back; return how many were there already."""

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
    """Position in `keys` of each value."""
    starts: _Ints
    stops: _Ints
    ids: _Ints
    has_copies: bool = False
    """As in `ArrayLocation`."""
    is_estimate: bool = False
    """True if each value is a whole object, missing or of about this size."""
    versions: dict[str, object] | None = None
    """First version of each object: another one raises `ShardConflictError`. Write epochs, which
    are numbers, miss other processes, and do not count. ``None``: no version is compared."""
    unversioned: Sequence[tuple[layouts.ShardRef, shard_format.ShardIndex]] = ()
    """Indexes of shards of which no version counts, to compare them after the last read."""

    def rounds(self) -> Iterator[ReadRound]:
        """Read all values in order; a changed size raises `ShardConflictError`."""
        nbytes = self.stops - self.starts
        for start, stop in _cut(nbytes):
            part = slice(start, stop)
            if self.is_estimate:
                values = self.base.values(self.keys[part], consistent=self.has_copies)
                found = zip(self.ids[part].tolist(), values, strict=True)
                if there := {i: value for i, value in found if value is not None}:
                    yield _whole_values([*there], [*there.values()])
            elif nbytes[start] > ROUND_NBYTES:
                yield from _pieces_of_range(self, start)
            else:
                yield ReadRound(self.ids[part], nbytes[part], _read(self, start, stop))

    def read(self, asked: Sequence[tuple[str, int, int]]) -> list[memoryview]:
        """Read ranges; a truncated reply, or a changed object, raises `ShardConflictError`."""
        gets = [requests.Get(k, byte_ranges.Range(lo, hi), self.has_copies) for k, lo, hi in asked]
        pieces = []
        for (key, start, stop), found in zip(asked, self.base.perform(gets), strict=True):
            pieces.append(index_reads.check_whole(key, found.value, stop - start))
            if self.versions is not None:
                now = self.base.backend.state_of(key) or found.version
                seen = self.versions[key] = self.versions.get(key) or now
                if now != seen and not isinstance(seen, int | float):
                    raise _changed(key)
        return pieces


def _changed(key: str) -> errors.ShardConflictError:
    return errors.ShardConflictError(
        f"object {key!r} was changed while it was read; nothing was removed: let no other program "
        "write to the array, and run the same again"
    )


def _find_values(
    location: ArrayLocation, region: ArrayRegion, nominal_nbytes: int | None
) -> StoredValues:
    """Find the values of a region.

    Cost: size and index of each shard in the region; of plain chunks the sizes, if a chunk may be
    larger than a round.
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
    which, base = np.arange(len(keys)), location.base
    fields = which, 0 * which, np.full(len(keys), nominal_nbytes or 0, np.int64), region.ids
    values = StoredValues(base, keys, *fields, location.has_copies, is_estimate=True)
    is_small = nominal_nbytes is not None and nominal_nbytes <= ROUND_NBYTES
    return values if is_small else _with_sizes(values)


def _with_sizes(values: StoredValues) -> StoredValues:
    """Request the sizes of objects, each of which is a value."""
    base, keys = values.base, values.keys
    versions = {key: base.backend.state_of(key) for key in keys}
    found = base.sizes(keys, consistent=values.has_copies)
    sizes = np.array([-1 if size is None else size for size in found], np.int64)
    which = np.flatnonzero(sizes >= 0)
    fields = which, 0 * which, sizes[which], values.ids[which]
    return StoredValues(base, keys, *fields, values.has_copies, versions=versions)


def _values_in_shards(location: ArrayLocation, region: ArrayRegion) -> StoredValues:
    """Find the values of a region in the indexes of its shards."""
    layout, boxes = location.grid.layout, location.grid.boxes
    box = region.regions.boxes.box(region.coords, location.grid.grid_shape)
    numbers, shape = boxes.boxes_of(box), region.regions.boxes.lengths(region.coords)
    inside = np.unravel_index(region.ids, shape) if shape else ()
    entry_ids = np.zeros(len(region.ids), np.intp)
    shard_coords = np.zeros((len(region.ids), len(shape)), np.intp)
    # Counted from the first shard on: coordinates may be larger than the integers of numpy.
    for dim, ((first, _), column) in enumerate(zip(box, inside, strict=True)):
        bounds = [boxes.bounds(dim, number) for number in numbers[dim]]
        starts = np.array([start - first for start, _ in bounds], np.intp)
        lengths = np.array([stop - start for start, stop in bounds], np.intp)
        at = np.searchsorted(starts, column, side="right") - 1
        shard_coords[:, dim] = at
        entry_ids = entry_ids * lengths[at] + column - starts[at]
    corners, which = np.unique(shard_coords, axis=0, return_inverse=True)
    which = which.reshape(-1)
    shards = [
        layout.shard(tuple(side[i] for side, i in zip(numbers, corner, strict=True)))
        for corner in corners.tolist()
    ]
    found = list(_read_indexes(location.base, shards))
    versions = {shards[i].key: version for i, _, version in found}
    unversioned = [(shards[i], index) for i, index, seen in found if isinstance(seen, int | float)]
    fields = np.full((len(entry_ids), 2), shard_format.MISSING, dtype=np.uint64)
    for i, index, _ in found:
        members = which == i
        fields[members] = index.fields[entry_ids[members]]
    present = np.flatnonzero((fields != shard_format.MISSING).any(axis=1))
    offsets, nbytes = fields[present].astype(np.int64).T
    of, ids = (each[present].astype(np.int64) for each in (which, region.ids))
    ranges = [shard.key for shard in shards], of, offsets, offsets + nbytes, ids
    return StoredValues(location.base, *ranges, versions=versions, unversioned=unversioned)


def _read_indexes(
    base: BaseStoreHandle, shards: Sequence[layouts.ShardRef]
) -> Iterator[tuple[int, shard_format.ShardIndex, object]]:
    """Yield position, index and version of each shard that is stored."""
    states = [base.backend.state_of(shard.key) for shard in shards]
    sizes = base.sizes([shard.key for shard in shards])
    stored = [(i, shards[i], size) for i, size in enumerate(sizes) if size is not None]
    founds = base.perform([requests.GetIndex(shard) for _, shard, _ in stored])
    for (i, shard, size), found in zip(stored, founds, strict=True):
        if found.damage is not None:  # a writer may have been changing it
            (found,) = base.perform([requests.GetIndex(shard, consistent=True)])
        try:
            if found.damage is not None:
                raise found.damage
            if found.decoded is not None:
                found.decoded.check_entries(size, shard.spec)
        except shard_format.IndexDamageError as damage:
            raise index_reads.corrupt(shard, damage, "; nothing was removed") from damage
        if found.decoded is not None:
            yield i, found.decoded, states[i] or found.version


def _cut(sizes: _Ints) -> Iterator[tuple[int, int]]:
    """Cut values into rounds; one that is larger than a round is alone."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        limit = int(ends[start] - sizes[start]) + ROUND_NBYTES
        stop = min(int(np.searchsorted(ends, limit, side="right")), start + _MAX_ROUND)
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def read_object(base: BaseStoreHandle, key: str, entry_id: int = 0) -> Iterator[ReadRound]:
    """Read one object of any size, if it is stored."""
    (size,) = base.sizes([key], consistent=True)
    if size is None:
        return
    if size > ROUND_NBYTES:
        zero = np.zeros(1, dtype=np.int64)
        stops, ids = zero + size, zero + entry_id
        one = StoredValues(base, [key], zero, zero, stops, ids, has_copies=True, versions={})
        yield from one.rounds()
        return
    (found,) = base.perform([requests.Get(key, consistent=True)])  # it may be a shard
    yield _whole_values([entry_id], [index_reads.check_whole(key, found.value, size)])


def _whole_values(ids: Sequence[int], values: Sequence[memoryview]) -> ReadRound:
    return ReadRound(np.array(ids, np.int64), np.array([*map(len, values)], np.int64), values)


def _pieces_of_range(wanted: StoredValues, i: int) -> Iterator[ReadRound]:
    """Read one range that is larger than a round."""
    key, ids = wanted.keys[int(wanted.which[i])], wanted.ids[i : i + 1]
    first, last = int(wanted.starts[i]), int(wanted.stops[i])
    for start in range(first, last, ROUND_NBYTES):
        stop = min(start + ROUND_NBYTES, last)
        size, pieces = np.array([stop - start]), wanted.read([(key, start, stop)])
        yield ReadRound(ids, size, pieces, continues=start > first, has_more=stop < last)


def _read(wanted: StoredValues, start: int, stop: int) -> list[memoryview]:
    """Read the ranges from position `start` to `stop`; near ranges share a request, and ranges
    without gaps are one piece."""
    part = slice(start, stop)
    which, starts, stops = wanted.which[part], wanted.starts[part], wanted.stops[part]
    first, last = int(starts[0]), int(stops[-1])
    if first < last and np.array_equal(starts[1:], stops[:-1]) and (which == which[0]).all():
        # Mostly shards are read as they were written: one request.
        return wanted.read([(wanted.keys[int(which[0])], first, last)])
    values: list[memoryview] = [memoryview(b"")] * (stop - start)
    ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
    spans: list[tuple[str, byte_ranges.Span, list[int]]] = []
    for number in np.unique(which).tolist():
        at = np.flatnonzero(which == number).tolist()
        planned = byte_ranges.plan_spans(
            [ranges[i] for i in at], max_gap_bytes=_MAX_GAP_NBYTES, max_coalesced_bytes=ROUND_NBYTES
        )
        spans += [(wanted.keys[number], span, [at[m] for m in span.members]) for span in planned]
    pieces = wanted.read([(key, span.start, span.stop) for key, span, _ in spans])
    for (_, span, at), data in zip(spans, pieces, strict=True):
        for i in at:
            values[i] = data[ranges[i][0] - span.start : ranges[i][1] - span.start]
    return values
