"""Walk over the stored objects of one array: their keys, sizes and indexes.

::

    places of a small box ──┐
                            ├──▶ objects in the grid ──▶ rounds ──▶ indexes, sizes
    pages of a listing ─────┘

Memory: one page of keys and one round, for any number of objects. A listing does not follow
links to directories.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from posixpath import commonpath, dirname
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.box_grid import Box, BoxGrid
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import ArrayLayout, ShardRef, is_inside
from zarr_shardstore.format.shard import (
    MISSING,
    ZEP2_INDEX,
    IndexDamageError,
    ShardIndex,
    ShardingSpec,
)
from zarr_shardstore.shards import requests
from zarr_shardstore.shards import stack as stacks
from zarr_shardstore.shards.index_reads import corrupt, rounds_of
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.shard_listing import KeyPages, VersionedKeys, entries_present

Run: TypeAlias = Callable[[Flow[Any]], Any]
"""Runs a flow, as a base store does for the tools."""

_PLACES_AT_ONCE = 1024


@dataclass(frozen=True)
class ObjectGrid:
    """The grid of the objects that an array may have: of its shards, or of its chunks."""

    layout: ArrayLayout
    """Keys of the objects. Each plain chunk is a shard of one chunk here."""
    is_sharded: bool = True
    below: stacks.Stack = ()
    """Transformers between shards, or plain chunks, and the base store."""

    @cached_property
    def shape(self) -> Coords:
        """Number of objects along each dimension."""
        grid_shape = self.layout.grid_shape
        return () if grid_shape is None else self.boxes.shape(grid_shape)

    @classmethod
    def of_array(cls, array: StoredArray) -> ObjectGrid:
        for i, transformer in enumerate(array.stack):
            if isinstance(transformer, stacks.ShardingTransformer):
                return cls(transformer.layout, below=array.stack[i + 1 :])
        geometry, grid_shape = array.document.geometry, array.grid_shape
        assert geometry is not None
        assert grid_shape is not None
        plain = cls.of_keys(array.node.chunk_prefix, geometry.encoding, grid_shape, None)
        return replace(plain, below=array.stack)

    @classmethod
    def of_keys(
        cls, prefix: str, encoding: ChunkKeyEncoding, grid_shape: Coords, spec: ShardingSpec | None
    ) -> ObjectGrid:
        """Return the grid of shards, or without `spec` of chunks, below any prefix."""
        one = ShardingSpec((1,) * len(grid_shape), ZEP2_INDEX)
        return cls(ArrayLayout("", prefix, encoding, grid_shape, spec or one), spec is not None)

    @property
    def prefix(self) -> str:
        return self.layout.prefix

    @property
    def boxes(self) -> BoxGrid:
        """Cut of the grid of chunks into objects."""
        return self.layout.spec.boxes

    @property
    def grid_shape(self) -> Coords:
        """Number of chunks along each dimension."""
        assert self.layout.grid_shape is not None
        return self.layout.grid_shape

    @property
    def directory(self) -> str:
        """Directory of all objects: below the "c" of the default encoding, if that is one."""
        has_c = self.shape and self.layout.encoding.marker == "c/"
        return f"{self.prefix}c/" if has_c else self.prefix

    def key(self, coords: Coords) -> str:
        return self.layout.shard(coords).key

    def coords_inside(self, key: str) -> Coords | None:
        """Return the coordinates of a key; ``None`` if it spells none of the grid."""
        coords = self.layout.coords_of(key)
        return coords if coords is not None and is_inside(coords, self.shape) else None


class Stored(NamedTuple):
    """One object of an array, as far as a walk has looked at it."""

    key: str
    coords: Coords
    version: object = None
    """As it was listed; ``None``: not known."""
    is_listed: bool = True
    """Whether a listing has shown it. Otherwise it is a place that may have an object."""
    nbytes: int | None = None
    shard: ShardRef | None = None
    decoded: ShardIndex | None = None
    """Its index."""
    damage: Exception | None = None
    """Why it cannot be read; or an entry that leaves the object, if its size is known."""

    @property
    def ids(self) -> npt.NDArray[np.intp]:
        """Ascending ids of the stored entries in the array."""
        assert self.shard is not None
        assert self.decoded is not None
        return entries_present(self.shard, self.decoded)

    def check(self) -> None:
        """Raise the damage, if any."""
        if self.damage is not None:
            raise self.damage

    def mark(self, out: npt.NDArray[np.bool_], box: Box) -> None:
        """Set the elements of `out`, which has the shape of the box, for the chunks in it."""
        if self.shard is None:
            out[tuple(c - start for c, (start, _) in zip(self.coords, box, strict=True))] = True
            return
        index, layout = self.decoded, self.shard.layout
        covered = layout.spec.boxes.box(self.coords, layout.grid_shape)
        assert index is not None
        cps = self.shard.spec.chunks_per_shard
        present = (index.fields != MISSING).any(axis=1).reshape(cps)
        pairs = list(zip(box, covered, strict=True))
        both = [(max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in pairs]
        there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, covered, strict=True))
        here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, box, strict=True))
        out[here] = present[there]


class Walk:
    """The objects of one array, or those with chunks in a box, round by round.

    A box is asked for place by place if it has at most `max_asked` objects, or if transformers
    change keys. Otherwise the smallest directory with all of it is listed.
    """

    def __init__(self, grid: ObjectGrid, box: Box | None = None, *, max_asked: int = 0) -> None:
        self.grid = grid
        self._ranges = [range(n) for n in grid.shape] if box is None else grid.boxes.boxes_of(box)
        self._nbytes = grid.layout.spec.index_nbytes if grid.is_sharded else 0
        self._rounds: deque[list[Stored]] = deque()
        n_places = math.prod(r.stop - r.start for r in self._ranges)  # ``len`` ends at 2⁶³
        keeps_keys = all(isinstance(each, stacks.ValueTransformer) for each in grid.below)
        self._asks = box is not None and (n_places <= max_asked or not keeps_keys)
        """Whether there are more places to ask for."""
        self._places = product(*self._ranges if self._asks else ())
        self._pages = KeyPages([] if self._asks else [self._smallest_directory()])

    @property
    def has_more(self) -> bool:
        """Whether another round is to be asked for."""
        return bool(self._rounds) or self._asks or self._pages.has_more

    def next_round(self) -> Flow[list[Stored]]:
        """Return the next objects, perhaps none. They are listed; `read_stored` reads them."""
        found: list[Stored] = []
        if not self._rounds and self._asks:
            some = list(islice(self._places, _PLACES_AT_ONCE))
            self._asks = len(some) == _PLACES_AT_ONCE
            found = [Stored(self.grid.key(coords), coords, is_listed=False) for coords in some]
        elif not self._rounds and self._pages.has_more:
            found = self._inside((yield from self._pages.next_page()))
        self._rounds.extend(rounds_of(found, lambda _: self._nbytes))
        return self._rounds.popleft() if self._rounds else []

    def close(self) -> Flow[None]:
        """Release what the base store has open for a listing."""
        yield from self._pages.close()

    def _inside(self, page: VersionedKeys) -> list[Stored]:
        found = [
            Stored(key, coords, version, nbytes=nbytes)
            for key, version, nbytes in zip(page, page.versions, page.sizes, strict=True)
            if (coords := self.grid.layout.coords_of(key)) is not None
            and all(c in r for c, r in zip(coords, self._ranges, strict=True))
        ]
        found.sort(key=lambda stored: stored.key)
        # zarr 2.18 spells the only key of a 0-d draft array "c0", and prefers it.
        return found if self._ranges else found[-1:]

    def _smallest_directory(self) -> str:
        if not self._ranges or not all(self._ranges):
            return self.grid.directory
        corners = [self.grid.key(tuple(r[i] for r in self._ranges)) for i in (0, -1)]
        common = commonpath([dirname(key) for key in corners])
        return f"{common}/" if common else ""


def read_stored(
    grid: ObjectGrid, listed: Sequence[Stored], *, sizes: bool = False, consistent: bool = False
) -> Flow[list[Stored]]:
    """Return these objects with their indexes, and perhaps `sizes`; leave out those that are gone.

    Keys are those above the transformers. Only unknown sizes are requested. A damaged index is
    read again, because a writer may have changed it meanwhile.
    """
    is_listed = bool(listed) and listed[0].is_listed
    if not grid.is_sharded:
        return (yield from _read_chunks(grid, listed, is_listed, sizes))
    if grid.below and is_listed:
        named = yield from stacks.keys_above(grid.below, [each.key for each in listed])
        listed = [Stored(key, ()) for key, _ in named]
    shards = [
        each._replace(shard=shard, coords=shard.coords)
        for each in listed
        if (shard := grid.layout.shard_of_key(each.key)) is not None
    ]
    attempts = (True,) if consistent else (False, True)
    flow = _read_indexes(shards, attempts, sizes)
    return (yield from stacks.run_through(grid.below, flow)) if grid.below else (yield from flow)


def _read_chunks(
    grid: ObjectGrid, listed: Sequence[Stored], is_listed: bool, has_sizes: bool
) -> Flow[list[Stored]]:
    if not is_listed:
        exist = yield from stacks.ask_through(grid.below, [requests.Exists(s.key) for s in listed])
        return [each for each, is_there in zip(listed, exist, strict=True) if is_there]
    if has_sizes:
        sized = yield from sizes_of([each.key for each in listed if each.nbytes is None])
        listed = [each._replace(nbytes=sized.get(each.key, each.nbytes)) for each in listed]
        listed = [each for each in listed if each.nbytes is not None]
    if not grid.below:
        return [*listed]
    sizes = {each.key: each.nbytes for each in listed}
    named = yield from stacks.keys_above(grid.below, [*sizes])
    return [
        Stored(key, coords, nbytes=sizes.get(key, nbytes or 0))
        for key, nbytes in named
        if (coords := grid.coords_inside(key)) is not None
    ]


def _read_indexes(
    shards: Sequence[Stored], attempts: Sequence[bool], has_sizes: bool
) -> Flow[list[Stored]]:
    read = {each.key: each for each in shards}
    left = list(shards)
    for consistent in attempts:
        gets = [
            requests.GetIndex(each.shard, consistent, version=each.version, cache=False)
            for each in left
            if each.shard is not None
        ]
        unsized = [each.key for each in left if has_sizes and each.nbytes is None]
        replies, sized = yield from stacks.in_shared_rounds([requests.ask(gets), sizes_of(unsized)])
        for each, found in zip(left, replies, strict=True):
            listed = each.nbytes if found.size is None else found.size  # a listing may be older
            nbytes = sized.get(each.key, listed if each.nbytes is not None else None)
            if nbytes is not None or not has_sizes:  # otherwise it was removed meanwhile
                read[each.key] = _with_index(each, found, nbytes)
        left = [each for each in left if read[each.key].damage is not None]
        if not left:
            break
    return [each for each in read.values() if each.decoded is not None or each.damage is not None]


def sizes_of(keys: Sequence[str]) -> Flow[dict[str, int | None]]:
    """Return the sizes of objects; ``None`` for each that is missing."""
    sizes = (yield [requests.GetSize(key) for key in keys]) if keys else []
    return dict(zip(keys, sizes, strict=True))


def _with_index(stored: Stored, found: requests.FoundIndex, nbytes: int | None) -> Stored:
    shard, damage = stored.shard, found.damage
    assert shard is not None
    # A size that came with the index is of the same state.
    size = nbytes if found.size is None else found.size
    if found.decoded is not None and nbytes is not None and size is not None:
        try:
            found.decoded.check_entries(size, shard.spec)
        except IndexDamageError as error:
            damage = error
    why = None if damage is None else corrupt(shard, damage)
    return stored._replace(decoded=found.decoded, damage=why, nbytes=nbytes)


def walk(
    run: Run, grid: ObjectGrid, box: Box | None = None, *, max_asked: int = 0
) -> Generator[list[Stored], None, None]:
    """Yield the rounds of a `Walk`."""
    steps = Walk(grid, box, max_asked=max_asked)
    try:
        while steps.has_more:
            yield run(steps.next_round())
    finally:
        run(steps.close())


def try_read(
    run: Run, grid: ObjectGrid, listed: Sequence[Stored], *, sizes: bool = False
) -> list[Stored]:
    """Read one round; if that fails, read each object alone, and return its error as damage.

    Raise an `OSError` if no object can be read.
    """
    with suppress(OSError, ShardStoreError):
        found: list[Stored] = run(read_stored(grid, listed, sizes=sizes))
        return found
    found = []
    for stored in listed:
        try:
            found += run(read_stored(grid, [stored], sizes=sizes))
        except (OSError, ShardStoreError) as error:
            found.append(stored._replace(damage=error))
    errors = [each.damage for each in found if isinstance(each.damage, OSError)]
    if listed and len(errors) == len(listed):
        raise errors[0]
    return found
