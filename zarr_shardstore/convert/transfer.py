"""Values of a region, read in batches of bounded size, in the order in which they are written.

Where sizes are known (shards: from their indexes) a batch is cut by bytes, and a value larger
than one comes in pieces. Of objects of their own only the size before compression is known, so
as many are read at once as fit then; where that is not known, or large, sizes are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from zarr_shardstore.convert.regions import ArrayLocation, Region
from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.format.index import MISSING, IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import Range, plan_spans
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.shards.index_reads import corrupt, read_indexes
from zarr_shardstore.shards.requests import Get, GetMany, GetSize, Request

BATCH_NBYTES = 8 * 1024 * 1024
"""Bytes that one worker reads before it writes them."""

_MAX_BATCH = 4096
"""Values that are read at once, however small they are."""

_MAX_GAP_NBYTES = 64 * 1024
"""Unwanted bytes of a shard that are read along; here the next request wants them, as a rule."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some values, or a piece of one.

    Parameters
    ----------
    ids : list of int
        Entry ids in the region.
    values
        Bytes of each.
    continues, goes_on : bool
        This is a piece of one value: not its first, not its last.
    """

    ids: list[int]
    values: Sequence[bytes | memoryview]
    continues: bool = False
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Byte ranges of objects: what is read, in order.

    Parameters
    ----------
    keys : list of str
        Of the objects.
    which : ndarray
        Which object each range is in.
    starts, stops : ndarray
        Half-open ranges.
    ids : ndarray
        What each range is the value of.
    """

    keys: list[str]
    which: Ints
    starts: Ints
    stops: Ints
    ids: Ints


class Values:
    """The values of a region on the source side.

    Parameters
    ----------
    base : BaseStoreHandle
        Holds them.
    region : Region
        Which, and in which order.
    keys
        Keys of the values in order, where each has its own and sizes are not known.
    wanted
        Where they are, if that is known.
    nominal_nbytes
        What a value has before compression, so about the most that it has.
    """

    def __init__(
        self,
        base: BaseStoreHandle,
        region: Region,
        keys: list[str] | None,
        wanted: Wanted | None,
        nominal_nbytes: int = 0,
    ) -> None:
        self._base = base
        self._region = region
        self._keys = keys
        self._wanted = wanted
        self._nominal_nbytes = nominal_nbytes

    def sizes(self) -> Wanted:
        """Where the values that there are lie; asks for the sizes of objects."""
        if self._wanted is None:
            assert self._keys is not None
            self._wanted = _whole_objects(self._base, self._keys, self._region)
        return self._wanted

    def batches(self) -> Iterator[Batch]:
        """All values that there are, in order.

        Raises
        ------
        ShardConflictError
            If a value has another size than it had.
        """
        if self._wanted is not None:
            return read_wanted(self._base, self._wanted)
        return self._batches_of_objects()

    def _batches_of_objects(self) -> Iterator[Batch]:
        assert self._keys is not None
        ids = self._region.ids.tolist()
        n = min(max(1, BATCH_NBYTES // max(self._nominal_nbytes, 1)), _MAX_BATCH)
        for start in range(0, len(ids), n):
            some = ids[start : start + n]
            (values,) = self._base.perform([GetMany(self._keys[start : start + n])])
            found = [v for v in values if v is not None]
            if found:
                if len(found) < len(values):
                    some = [i for i, v in zip(some, values, strict=True) if v is not None]
                yield Batch(some, found)


def values_of(place: ArrayLocation, region: Region, nominal_nbytes: int | None) -> Values:
    """The values of a region.

    Parameters
    ----------
    nominal_nbytes
        Bytes of a value before compression; ``None`` if that is not known.

    Cost: one index request for each shard that the region touches, if there are shards; one
    request for each size, if values may be too large for memory.
    """
    if place.spec is not None:
        return Values(place.base, region, None, _entries(place, region))
    keys = region.keys(place)
    if nominal_nbytes is not None and nominal_nbytes <= BATCH_NBYTES:
        return Values(place.base, region, keys, None, nominal_nbytes)
    return Values(place.base, region, None, _whole_objects(place.base, keys, region))


def read_wanted(base: BaseStoreHandle, wanted: Wanted) -> Iterator[Batch]:
    """Read byte ranges in batches; those near to each other by one request.

    Raises
    ------
    ShardConflictError
        If an object is shorter than its ranges, or gone.
    """
    nbytes = wanted.stops - wanted.starts
    ends = np.cumsum(nbytes)
    start = 0
    while start < len(ends):
        limit = int(ends[start] - nbytes[start]) + BATCH_NBYTES
        stop = min(int(np.searchsorted(ends, limit, side="right")), start + _MAX_BATCH)
        if stop <= start:
            yield from _pieces(base, wanted, start)
            stop = start + 1
        else:
            yield Batch(wanted.ids[start:stop].tolist(), _read_ranges(base, wanted, start, stop))
        start = stop


def _pieces(base: BaseStoreHandle, wanted: Wanted, i: int) -> Iterator[Batch]:
    """One range that is larger than a batch."""
    key, entry_id = wanted.keys[int(wanted.which[i])], int(wanted.ids[i])
    first, last = int(wanted.starts[i]), int(wanted.stops[i])
    for start in range(first, last, BATCH_NBYTES):
        stop = min(start + BATCH_NBYTES, last)
        (found,) = base.perform([Get(key, Range(start, stop))])
        piece = _checked(key, found.value, stop - start)
        yield Batch([entry_id], [piece], continues=start > first, goes_on=stop < last)


def _read_ranges(base: BaseStoreHandle, wanted: Wanted, start: int, stop: int) -> list[memoryview]:
    first, last = int(wanted.starts[start]), int(wanted.stops[stop - 1])
    is_one_run = np.array_equal(wanted.starts[start + 1 : stop], wanted.stops[start : stop - 1])
    if first < last and is_one_run and (wanted.which[start:stop] == wanted.which[start]).all():
        # As it was written, mostly: one request, and little more than a slice for each value.
        key = wanted.keys[int(wanted.which[start])]
        (found,) = base.perform([Get(key, Range(first, last))])
        data = _checked(key, found.value, last - first)
        bounds = (wanted.stops[start:stop] - first).tolist()
        return [data[lo:hi] for lo, hi in pairwise([0, *bounds])]
    values: list[memoryview] = [memoryview(b"")] * (stop - start)
    requests: list[Request] = []
    members: list[list[tuple[int, int, int]]] = []
    which = wanted.which[start:stop]
    for number in np.unique(which).tolist():
        positions = [
            p
            for p in np.flatnonzero(which == number).tolist()
            if wanted.stops[start + p] > wanted.starts[start + p]
        ]
        ranges = [(int(wanted.starts[start + p]), int(wanted.stops[start + p])) for p in positions]
        for span in plan_spans(
            ranges, max_gap_bytes=_MAX_GAP_NBYTES, max_coalesced_bytes=BATCH_NBYTES
        ):
            requests.append(Get(wanted.keys[number], Range(span.start, span.stop)))
            members.append([(positions[m], *ranges[m]) for m in span.members])
    for request, found, parts in zip(requests, base.perform(requests), members, strict=True):
        assert isinstance(request, Get)
        assert isinstance(request.byte_range, Range)
        first = request.byte_range.start
        data = _checked(request.key, found.value, request.byte_range.stop - first)
        for position, lo, hi in parts:
            values[position] = data[lo - first : hi - first]
    return values


def _checked(key: str, data: memoryview | None, nbytes: int) -> memoryview:
    if data is None or len(data) != nbytes:
        found = "is gone" if data is None else f"gave {len(data)} of {nbytes} bytes"
        raise ShardConflictError(
            f"object {key!r} {found}: it was changed while it was converted; let nobody write "
            "to the array, and run the same again"
        )
    return data


def _entries(place: ArrayLocation, region: Region) -> Wanted:
    """Where the values of a region lie in shards."""
    spec, layout = place.spec, place.layout
    assert spec is not None
    coords = region.value_coords()
    cps = np.array(spec.chunks_per_shard, dtype=np.intp)
    shard_coords = coords // cps
    firsts, which = np.unique(shard_coords, axis=0, return_inverse=True)
    shards = [layout.shard(tuple(c)) for c in firsts.tolist()]
    sizes = place.base.perform([GetSize(shard.key) for shard in shards])
    local = coords - shard_coords * cps
    entry_ids = np.zeros(len(coords), dtype=np.intp)
    for dim, n in enumerate(spec.chunks_per_shard):
        entry_ids = entry_ids * n + local[:, dim]
    fields = np.full((len(coords), 2), MISSING, dtype=np.uint64)
    there = [i for i, size in enumerate(sizes) if size is not None]
    indexes = place.base.run(read_indexes([shards[i] for i in there]))
    for i, index in zip(there, indexes, strict=True):
        if index is None:
            continue
        check_entries(shards[i], index, sizes[i])
        members = which.reshape(-1) == i
        fields[members] = index.fields[entry_ids[members]]
    present = np.flatnonzero((fields != MISSING).any(axis=1))
    starts, nbytes = fields[present].astype(np.int64).T
    return Wanted(
        [shard.key for shard in shards],
        which.reshape(-1)[present].astype(np.int64),
        starts,
        starts + nbytes,
        region.ids[present].astype(np.int64),
    )


def check_entries(shard: ShardRef, index: ShardIndex, size: int) -> None:
    """Raise `CorruptShardError` if an entry leaves the data of its shard."""
    try:
        index.check_entries(size, shard.layout.spec.index)
    except IndexDamageError as damage:
        raise corrupt(shard, damage, "; nothing was removed") from damage


def _whole_objects(base: BaseStoreHandle, keys: list[str], region: Region) -> Wanted:
    sizes: list[int | None] = base.perform([GetSize(key) for key in keys])
    there = [i for i, size in enumerate(sizes) if size is not None]
    nbytes = np.array([sizes[i] for i in there], dtype=np.int64)
    return Wanted(
        [keys[i] for i in there],
        np.arange(len(there), dtype=np.int64),
        np.zeros(len(there), dtype=np.int64),
        nbytes,
        region.ids[there].astype(np.int64),
    )
