"""Values of a region, read in rounds of bounded size, in the order in which they are written.

The index of a shard tells the size of each entry. There a round is cut by bytes, and a value that
is larger than a round comes in pieces. Of an object of its own only the size before compression is
known: a round reads as many objects as fit then. Where that size is unknown, or large, the
sizes of the objects are requested first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.convert.regions import ArrayLocation, ArrayRegion
from zarr_shardstore.format.ranges import Range, plan_spans
from zarr_shardstore.format.shard import MISSING, IndexDamageError
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.shards.index_reads import check_whole, corrupt, read_indexes
from zarr_shardstore.shards.requests import Get, Request

ROUND_NBYTES = 8 * 1024 * 1024
"""Bytes that one worker reads before it writes them."""

_MAX_ROUND = 4096
"""Values that are read in one round, however small they are."""

_MAX_GAP_NBYTES = 64 * 1024
"""Unwanted bytes of a shard that are read along: usually the next request wants them."""

_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadRound:
    """Some values by entry id; or one piece of a large value, not its first, or not its last."""

    ids: list[int]
    values: Sequence[bytes | memoryview]
    continues: bool = False
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class ValueRanges:
    """Byte ranges of values in the order in which they are read; `which` tells the key of each."""

    keys: list[str]
    which: _Ints
    starts: _Ints
    stops: _Ints
    ids: _Ints


class RegionValues:
    """The values of a region at one location; the nominal size is that before compression.

    Cost: one index request for each shard that the region touches, if there are shards; one
    request for each size, if values may be too large for memory.
    """

    def __init__(
        self, location: ArrayLocation, region: ArrayRegion, nominal_nbytes: int | None
    ) -> None:
        self._base = location.base
        self._ids = region.ids
        self._ranges: ValueRanges | None = None
        if location.spec is not None:
            self._ranges = _ranges_in_shards(location, region)
            return
        self._keys = region.keys(location)
        if nominal_nbytes is None or nominal_nbytes > ROUND_NBYTES:
            self.ranges()
        else:
            self._sizes = np.full(len(self._keys), nominal_nbytes, dtype=np.int64)

    def ranges(self) -> ValueRanges:
        """Return the ranges of the stored values; request the sizes of objects if necessary."""
        if self._ranges is None:
            sizes = self._base.sizes(self._keys)
            stored = [i for i, size in enumerate(sizes) if size is not None]
            self._ranges = ValueRanges(
                [self._keys[i] for i in stored],
                np.arange(len(stored)),
                np.zeros(len(stored), dtype=np.int64),
                np.array([sizes[i] for i in stored], dtype=np.int64),
                self._ids[stored].astype(np.int64),
            )
        return self._ranges

    def rounds(self) -> Iterator[ReadRound]:
        """Read all stored values in order; a changed size raises `ShardConflictError`."""
        if self._ranges is not None:
            return read_ranges(self._base, self._ranges)
        return read_objects(self._base, self._keys, self._ids.tolist(), self._sizes, check=True)


def read_objects(
    base: BaseStoreHandle, keys: Sequence[str], ids: Sequence[int], sizes: _Ints, *, check: bool
) -> Iterator[ReadRound]:
    """Read whole objects of about these sizes; missing ones are left out.

    With `check`, a truncated reply raises `ShardConflictError`.
    """
    for start, stop in _cut(sizes):
        if sizes[start] > ROUND_NBYTES:
            yield from read_object(base, keys[start], ids[start])
            continue
        values = base.values(keys[start:stop], check=check)
        there = [(i, v) for i, v in zip(ids[start:stop], values, strict=True) if v is not None]
        if there:
            yield ReadRound([i for i, _ in there], [v for _, v in there])


def read_object(base: BaseStoreHandle, key: str, entry_id: int = 0) -> Iterator[ReadRound]:
    """Read one object of any size; nothing if it is missing."""
    (size,) = base.sizes([key])
    if size is None:
        return
    if size > ROUND_NBYTES:
        zero = np.zeros(1, dtype=np.int64)
        yield from read_ranges(base, ValueRanges([key], zero, zero, zero + size, zero + entry_id))
        return
    (found,) = base.perform([Get(key)])
    yield ReadRound([entry_id], [_checked(key, found.value, size)])


def read_ranges(base: BaseStoreHandle, wanted: ValueRanges) -> Iterator[ReadRound]:
    """Read byte ranges in rounds; ranges that are near to each other share a request."""
    nbytes = wanted.stops - wanted.starts
    for start, stop in _cut(nbytes):
        if nbytes[start] > ROUND_NBYTES:
            yield from _pieces_of_range(base, wanted, start)
        else:
            yield ReadRound(wanted.ids[start:stop].tolist(), _read(base, wanted, start, stop))


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


def _pieces_of_range(base: BaseStoreHandle, wanted: ValueRanges, i: int) -> Iterator[ReadRound]:
    """Read one range that is larger than a round."""
    key, entry_id = wanted.keys[int(wanted.which[i])], int(wanted.ids[i])
    first, last = int(wanted.starts[i]), int(wanted.stops[i])
    for start in range(first, last, ROUND_NBYTES):
        stop = min(start + ROUND_NBYTES, last)
        (found,) = base.perform([Get(key, Range(start, stop))])
        piece = _checked(key, found.value, stop - start)
        yield ReadRound([entry_id], [piece], continues=start > first, has_more=stop < last)


def _read(base: BaseStoreHandle, wanted: ValueRanges, start: int, stop: int) -> list[memoryview]:
    """Read the ranges from position `start` to `stop`, which fit into one round."""
    first, last = int(wanted.starts[start]), int(wanted.stops[stop - 1])
    is_one_run = np.array_equal(wanted.starts[start + 1 : stop], wanted.stops[start : stop - 1])
    which = wanted.which[start:stop]
    if first < last and is_one_run and (which == which[0]).all():
        # Mostly shards are read as they were written: one request, and a slice for each value.
        key = wanted.keys[int(which[0])]
        (found,) = base.perform([Get(key, Range(first, last))])
        data = _checked(key, found.value, last - first)
        bounds = (wanted.stops[start:stop] - first).tolist()
        return [data[lo:hi] for lo, hi in pairwise([0, *bounds])]
    values: list[memoryview] = [memoryview(b"")] * (stop - start)
    requests: list[Request] = []
    members: list[list[tuple[int, int, int]]] = []
    starts, stops = wanted.starts[start:stop], wanted.stops[start:stop]
    for number in np.unique(which).tolist():
        positions = np.flatnonzero((which == number) & (stops > starts))
        ranges = list(zip(starts[positions].tolist(), stops[positions].tolist(), strict=True))
        for span in plan_spans(
            ranges, max_gap_bytes=_MAX_GAP_NBYTES, max_coalesced_bytes=ROUND_NBYTES
        ):
            requests.append(Get(wanted.keys[number], Range(span.start, span.stop)))
            members.append([(int(positions[m]), *ranges[m]) for m in span.members])
    for request, found, parts in zip(requests, base.perform(requests), members, strict=True):
        assert isinstance(request, Get)
        assert isinstance(request.byte_range, Range)
        first = request.byte_range.start
        data = _checked(request.key, found.value, request.byte_range.stop - first)
        for position, lo, hi in parts:
            values[position] = data[lo - first : hi - first]
    return values


def _checked(key: str, data: memoryview | None, nbytes: int) -> memoryview:
    check_whole(key, data, nbytes)
    assert data is not None
    return data


def _ranges_in_shards(location: ArrayLocation, region: ArrayRegion) -> ValueRanges:
    """Find the values of a region in the indexes of its shards."""
    spec, layout = location.spec, location.layout
    assert spec is not None
    cps = np.array(spec.chunks_per_shard, dtype=np.intp)
    inside = np.unravel_index(region.ids, region.shape) if region.shape else ()
    coords = np.array(inside, dtype=np.intp).reshape(len(cps), len(region.ids)).T
    coords += np.array(region.coords, np.intp) * np.array(region.shape, np.intp)
    shard_coords = coords // cps
    firsts, which = np.unique(shard_coords, axis=0, return_inverse=True)
    which = which.reshape(-1)
    shards = [layout.shard(tuple(c)) for c in firsts.tolist()]
    sizes = location.base.sizes([shard.key for shard in shards])
    local = coords - shard_coords * cps
    entry_ids = np.zeros(len(coords), dtype=np.intp)
    for dim, n in enumerate(spec.chunks_per_shard):
        entry_ids = entry_ids * n + local[:, dim]
    fields = np.full((len(coords), 2), MISSING, dtype=np.uint64)
    stored = [(i, size) for i, size in enumerate(sizes) if size is not None]
    indexes = location.base.run(read_indexes([shards[i] for i, _ in stored]))
    for (i, size), index in zip(stored, indexes, strict=True):
        if index is None:
            continue
        try:
            index.check_entries(size, shards[i].layout.spec)
        except IndexDamageError as damage:
            raise corrupt(shards[i], damage, "; nothing was removed") from damage
        members = which == i
        fields[members] = index.fields[entry_ids[members]]
    present = np.flatnonzero((fields != MISSING).any(axis=1))
    starts, nbytes = fields[present].astype(np.int64).T
    return ValueRanges(
        [shard.key for shard in shards],
        which[present].astype(np.int64),
        starts,
        starts + nbytes,
        region.ids[present].astype(np.int64),
    )
