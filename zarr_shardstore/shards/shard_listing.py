"""Listing: what a directory of shard keys says about chunk keys.

Source: sharding storage transformer draft, "API implementation", list_prefix, list_dir and
erase_prefix: a prefix that contains a part of the chunk-grid key is translated to the shards
that it touches.

Keys of the base store, a page at a time: however many there are, few are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.grid import coords_of_entries, grid_box, shard_coords_of
from zarr_shardstore.format.index import ShardIndex
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.shards.requests import CloseListing, Flow, KeyCursor, ListPage

_KEYS_AT_ONCE = 16_384
"""Keys of one shard in memory: about 1.5 MB."""


@dataclass(frozen=True, slots=True)
class GridDirectory:
    """A directory of chunk keys: an array's own, or one inside its grid.

    Parameters
    ----------
    layout : ArrayLayout
        Of the array.
    n_components : int
        How many components of a suffix its path has.
    leading : tuple of int
        Chunk coordinates that they spell, of the outermost dimensions.
    """

    layout: ArrayLayout
    n_components: int
    leading: Coords

    @property
    def shard_leading(self) -> Coords:
        """Shard coordinates of the directory that holds its shards."""
        cps = self.layout.spec.chunks_per_shard[: len(self.leading)]
        return shard_coords_of(self.leading, cps)

    @property
    def base_directory(self) -> str:
        """The directory of the base store that holds its shards."""
        encoding = self.layout.encoding
        dims = encoding.dims_of_components(self.layout.ndim)[: self.n_components]
        components = [
            encoding.encode_component(i, tuple(self.shard_leading[d] for d in ds))
            for i, ds in enumerate(dims)
        ]
        return self.layout.prefix + "".join(f"{c}/" for c in components)

    def shard_of_name(self, name: str) -> ShardRef | None:
        """The shard that has this name in the base directory; ``None`` if none can have it."""
        part = self._decode(name)
        if part is None or not self._is_last:
            return None
        if self.layout.ndim == 0:
            return ShardRef(self.layout, (), self.layout.prefix + name)
        return self.layout.shard(self.shard_leading + part)

    def expand_name(self, name: str) -> list[str] | None:
        """Names of the chunk directories that a shard directory stands for.

        All that are possible in the grid; whether they hold chunks only the indexes of the
        shards below say. ``None`` if `name` is no shard directory.
        """
        part = self._decode(name)
        if part is None or self._is_last:
            return None
        if not part:
            return [name]  # the "c" of the default encoding
        cps, grid = self.layout.spec.chunks_per_shard, self.layout.grid_shape
        dim = len(self.leading)
        ((start, stop),) = grid_box(part, cps[dim : dim + 1], grid and grid[dim : dim + 1])
        encode = self.layout.encoding.encode_component
        return [encode(self.n_components, (c,)) for c in range(start, stop)]

    def names_of_directories(self, shard: ShardRef, index: ShardIndex) -> list[str]:
        """Names in this directory of the directories that hold chunks of a shard below it."""
        ids = entries_present(shard, index, self.leading)
        dim, cps = len(self.leading), self.layout.spec.chunks_per_shard
        first = shard.coords[dim] * cps[dim]
        encode = self.layout.encoding.encode_component
        numbers = np.unique(np.unravel_index(ids, cps)[dim])
        return [encode(self.n_components, (first + c,)) for c in numbers.tolist()]

    def names_of_entries(self, shard: ShardRef, index: ShardIndex) -> list[str]:
        """Names in this directory of the chunks that one of its shards holds."""
        if self.layout.ndim == 0:
            return [shard.key[len(self.layout.prefix) :]] if index.entry(0) is not None else []
        ids = entries_present(shard, index, self.leading)
        encode, first = self.layout.encoding.encode_component, len(self.leading)
        cps = self.layout.spec.chunks_per_shard
        return [
            encode(self.n_components, coords[first:])
            for coords in coords_of_entries(ids, shard.coords, cps)
        ]

    @property
    def _dims(self) -> list[tuple[int, ...]]:
        return self.layout.encoding.dims_of_components(self.layout.ndim)

    @property
    def _is_last(self) -> bool:
        return self.n_components == len(self._dims) - 1

    def _decode(self, name: str) -> Coords | None:
        n_dims = len(self._dims[self.n_components])
        return self.layout.encoding.decode_component(self.n_components, name, n_dims)


def locate_directory(layout: ArrayLayout, directory: str) -> GridDirectory | None:
    """Where a directory (ending with ``/``, or empty) lies in an array's chunk keys.

    ``None`` if it is not the array's own and no chunk key starts with it.
    """
    if not directory.startswith(layout.prefix):
        return None
    path = directory[len(layout.prefix) :].removesuffix("/")
    components = path.split("/") if path else []
    if len(components) >= len(layout.encoding.dims_of_components(layout.ndim)):
        return None
    leading = layout.encoding.decode_leading(components, layout.ndim)
    return None if leading is None else GridDirectory(layout, len(components), leading)


def entries_present(
    shard: ShardRef, index: ShardIndex, leading: Coords = ()
) -> npt.NDArray[np.intp]:
    """Ascending ids of the stored entries in the array whose coordinates start so."""
    present = index.present_ids()
    in_grid = shard.entries_of(leading)
    if len(in_grid) == len(index.fields):
        return present
    is_present = np.zeros(len(index.fields), np.bool_)
    is_present[present] = True
    return in_grid[is_present[in_grid]]


def chunks_present(shard: ShardRef, index: ShardIndex) -> list[tuple[str, int]]:
    """Keys of the stored chunks of a shard that lie in the array, with their sizes in bytes."""
    ids = entries_present(shard, index)
    return list(zip(shard.chunk_keys(ids), index.fields[ids, 1].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class ListedValues:
    """Keys that were listed, with their sizes in bytes where these are known."""

    sizes: list[tuple[str, int | None]]

    def keys_with(self, prefix: str) -> Iterator[list[str]]:
        """Keys that start with `prefix`."""
        yield [key for key, _ in self.sizes if key.startswith(prefix)]

    def sizes_with(self, prefix: str) -> Iterator[tuple[str, int | None]]:
        """Keys that start with `prefix`, with sizes."""
        return (item for item in self.sizes if item[0].startswith(prefix))


@dataclass(frozen=True, slots=True)
class ListedChunks:
    """A shard that was listed: its index is there, its keys are spelled when they are wanted."""

    shard: ShardRef
    index: ShardIndex

    def keys_with(self, prefix: str) -> Iterator[list[str]]:
        """Keys that start with `prefix`, a bounded number at a time."""
        ids = self._entries_with(prefix)
        for first in range(0, len(ids), _KEYS_AT_ONCE):
            yield self.shard.chunk_keys(ids[first : first + _KEYS_AT_ONCE])

    def sizes_with(self, prefix: str) -> Iterator[tuple[str, int | None]]:
        """Keys that start with `prefix`, with sizes."""
        ids = self._entries_with(prefix)
        sizes = self.index.fields[ids, 1].tolist()
        return zip(self.shard.chunk_keys(ids), sizes, strict=True)

    def _entries_with(self, prefix: str) -> npt.NDArray[np.intp]:
        present = entries_present(self.shard, self.index)
        if self.shard.layout.prefix.startswith(prefix):
            return present
        return np.intersect1d(present, self.shard.entries_with(prefix), assume_unique=True)


Listed: TypeAlias = ListedValues | ListedChunks
"""A part of a listing."""

KEYS_PER_PAGE = 1024
"""Keys of the base store that are listed at once. With fewer, the hop to a thread and back that
local files take, 150 µs, would tell; object stores reply with 1,000 at a time."""


class VersionedKeys(list[str]):
    """Keys with the versions that their objects had when they were listed, in the same order;
    ``None`` for one that is not known."""

    def __init__(self, keys: Sequence[str] = (), versions: Sequence[object] = ()) -> None:
        super().__init__(keys)
        self.versions = list(versions) or [None] * len(self)


class KeyPages:
    """Keys of the base store in directories, page by page.

    Parameters
    ----------
    directories
        None of them inside another one.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._cursors = [KeyCursor(directory) for directory in directories]

    @property
    def has_more(self) -> bool:
        """Whether another page is to be asked for."""
        return bool(self._cursors)

    def next_page(self) -> Flow[VersionedKeys]:
        """The next keys; there may be none."""
        page: list[str]
        (page,) = yield [ListPage(self._cursors[0], KEYS_PER_PAGE)]
        if len(page) < KEYS_PER_PAGE:
            del self._cursors[0]
        return page if isinstance(page, VersionedKeys) else VersionedKeys(page)

    def close(self) -> Flow[None]:
        """Let go of what the base store has open for this."""
        if self._cursors:
            yield [CloseListing(cursor) for cursor in self._cursors]


def list_keys(directories: Sequence[str]) -> Flow[list[str]]:
    """All keys that `KeyPages` has, as one list."""
    pages = KeyPages(directories)
    keys: list[str] = []
    while pages.has_more:
        keys += yield from pages.next_page()
    return keys
