"""Estimates of a dry run: objects and bytes before and after, requests, their price, and time.

A small grid is counted. Of a larger one up to 1,024 objects are looked at, and the rest is taken to
be like them; where few of these are stored, the objects are listed. No chunk is decoded. Some bytes
are read, and the time of these reads gives the time of the conversion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from zarr_shardstore.access import BaseStoreHandle, byte_ranges, requests, walks
from zarr_shardstore.tools.convert.plan import ArrayPlan
from zarr_shardstore.tools.convert.regions import ArrayLocation, add_regions, random_coords
from zarr_shardstore.tools.convert.report import ArrayReport, Estimate
from zarr_shardstore.tools.convert.task import ROUND_NBYTES
from zarr_shardstore.tools.inspect.occupancy import cell_of

_COUNTED = 4096
"""Most objects of a grid that are all looked at."""
_SAMPLED = 1024
_ENOUGH = 16
"""Sampled objects, and stored ones of these that suffice for an estimate."""
_MAX_LISTED = 2**16
"""Objects after which a listing is given up: the estimate is too low then, and says so."""

_KEYS_A_PAGE = 1000
"""Keys in a reply to a listing, in all three clouds."""

_TIMED = 64
_TIMED_NBYTES = 256 * 1024
"""Objects that are read for the time, and bytes of each at most: 16 MiB."""


class _Counts(NamedTuple):
    """Content of the objects of an array."""

    n_objects: int
    n_bytes: int
    n_chunks: int
    chunk_nbytes: int

    @classmethod
    def of(cls, looked_at: Sequence[walks.Stored], factor: float = 1.0) -> _Counts:
        """Count objects; `factor` is the number of objects of the grid for each of them."""
        n_bytes, cells = sum(stored.nbytes or 0 for stored in looked_at), [*map(cell_of, looked_at)]
        n_chunks = sum(cell.n_chunks or 0 for cell in cells)
        counts = len(cells), n_bytes, n_chunks, sum(cell.chunk_nbytes for cell in cells)
        return cls(*(round(factor * n) for n in counts))


def estimate_conversion(
    source: BaseStoreHandle,
    plans: Sequence[ArrayPlan],
    reports: Sequence[ArrayReport],
    in_place: bool,
) -> tuple[tuple[ArrayReport, ...], Estimate]:
    """Fill the reports of a dry run, and estimate its requests, price and time."""
    total, timed, found = Estimate(), list[tuple[str, int]](), []
    for plan, report in zip(plans, reports, strict=True):
        if plan.action == "skipped" or plan.geometry is None:
            found.append(report)
            continue
        keys = plan.geometry.encoding, plan.grid_shape
        grid = walks.ObjectGrid.of_keys(plan.node.chunk_prefix, *keys, plan.spec)
        counts, n_after, is_exact, some = _look(ArrayLocation(source, grid), plan)
        timed += islice(some, max(0, _TIMED - len(timed)))
        spec = None if plan.action == "copied" else plan.new_spec
        index = 0 if spec is None else spec.index_nbytes
        report = replace(
            report,
            n_chunks=counts.n_chunks,
            n_objects=n_after,
            n_bytes=counts.chunk_nbytes,
            n_objects_before=counts.n_objects,
            n_bytes_before=counts.n_bytes,
        )
        found.append(report)
        n_looks = 2 if source.backend.has_lasting_versions else 3
        total += _requests(plan, report, n_after * index, is_exact, in_place, n_looks)
    seconds = _seconds(source, timed, total)
    n_bytes_more = total.n_bytes_more if in_place else total.n_bytes_after
    return tuple(found), replace(total, n_bytes_more=n_bytes_more, seconds=seconds)


def _look(
    location: ArrayLocation, plan: ArrayPlan
) -> tuple[_Counts, int, bool, list[tuple[str, int]]]:
    """Count objects; return also how many there are after it, whether both numbers are exact, and
    keys with their sizes."""
    grid, n_grid = location.grid, math.prod(location.grid.shape)
    boxes = plan.regions.boxes
    n_regions = math.prod(boxes.shape(grid.grid_shape))
    is_plain = plan.new_spec is None or plan.action == "copied"
    regions = set[tuple[int, ...]]()
    places, there, is_exact = list[walks.Stored](), list[walks.Stored](), True
    if n_grid > _COUNTED:
        coords = set(random_coords(map(range, grid.shape), _SAMPLED))
        places = [walks.Stored(grid.key(c), c) for c in coords]
        there = _read(location, places)
    if len(there) >= _ENOUGH:
        counts, is_exact = _Counts.of(there, n_grid / len(places)), False
        # A region is empty if all its chunks are missing.
        share = counts.n_chunks / max(1, math.prod(grid.grid_shape))
        n_after = round(n_regions * (1 - (1 - min(1, share)) ** math.prod(boxes.largest)))
    else:
        there = []
        pages: Iterable[list[walks.Stored]] = walks.walk(location.base.run, grid)
        if location.base.backend.linked_directory(grid.prefix):  # a listing does not follow it
            is_exact = n_grid <= _COUNTED
            if is_exact:
                pages = [[walks.Stored(grid.key(c), c) for c in np.ndindex(*grid.shape)]]
        for page in pages:
            there += _read(location, page)
            if len(there) >= _MAX_LISTED:
                is_exact = False
                break
        counts = _Counts.of(there)
        if not is_plain:
            add_regions(location, there, boxes, regions)
        n_after = len(regions)
    some = [(stored.key, stored.nbytes or 0) for stored in there]
    return counts, counts.n_chunks if is_plain else n_after, is_exact, some


def _read(location: ArrayLocation, places: Sequence[walks.Stored]) -> list[walks.Stored]:
    run, found = location.base.run, list[walks.Stored]()
    for i in range(0, len(places), _SAMPLED):
        some = places[i : i + _SAMPLED]
        found += walks.try_read(run, location.grid, some, sizes=True)
    return [stored for stored in found if stored.nbytes is not None]


def _requests(
    plan: ArrayPlan,
    report: ArrayReport,
    index_nbytes: int,
    is_exact: bool,
    in_place: bool,
    n_looks: int,
) -> Estimate:
    """Count the requests of an array: its values are read, written and read back. In each region
    `n_looks` ask for size and index of a shard."""
    n_rounds = math.ceil(report.n_bytes / ROUND_NBYTES)
    nominal = plan.nominal_nbytes
    of_source = 2 * report.n_objects_before  # size and value
    if plan.spec is not None:  # about as many regions have a part of each shard
        n_regions, n_shards = (s.boxes.shape(plan.grid_shape) for s in (plan.regions, plan.spec))
        n_parts = math.prod(map(max, n_regions, n_shards))
        n_visits = report.n_objects_before * n_parts // max(1, math.prod(n_shards))
        of_source = n_looks * n_visits + max(n_visits, n_rounds)
    elif nominal is None or nominal > ROUND_NBYTES:
        of_source += n_rounds
    written, read_back = report.n_objects, report.n_objects
    if plan.new_spec is not None and plan.action != "copied":
        read_back = 2 * report.n_objects + max(report.n_objects, n_rounds)
        written += n_rounds if report.n_bytes > ROUND_NBYTES * report.n_objects else 0
    written, n_deleted = written + 2, 1  # document and manifest
    if in_place:  # staged objects are moved, and both are listed; four states, a marked document
        n_deleted += report.n_objects + report.n_objects_before
        pages = math.ceil(n_deleted / _KEYS_A_PAGE) + 2
        written += report.n_objects + pages + 4
    nbytes = report.n_bytes + index_nbytes
    objects = report.n_objects_before, report.n_objects
    sizes = report.n_bytes_before, nbytes
    return Estimate(*objects, *sizes, of_source + read_back, written, n_deleted, nbytes, is_exact)


def _seconds(base: BaseStoreHandle, keys: Sequence[tuple[str, int]], total: Estimate) -> float:
    """Return the time of all requests, if each takes as long as those that are timed here."""
    ranges = [(key, byte_ranges.Range(0, min(n, _TIMED_NBYTES))) for key, n in keys if n]
    if not ranges:
        return 0.0
    begun = time.perf_counter()
    base.perform([requests.Get(key, byte_range) for key, byte_range in ranges])
    seconds = time.perf_counter() - begun
    n_requests = total.n_reads + total.n_writes + total.n_deletes
    n_bytes = total.n_bytes_before + 2 * total.n_bytes_after
    n_timed = sum(byte_range.stop or 0 for _, byte_range in ranges)
    return seconds * max(n_requests / len(ranges), n_bytes / n_timed)
