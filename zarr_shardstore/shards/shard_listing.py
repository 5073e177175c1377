"""Chunk keys from shard keys: of a directory, of a shard, and the pages that list shard keys.

Source: sharding storage transformer draft, "API implementation", list_prefix, list_dir and
erase_prefix: a prefix that contains a part of the chunk-grid key is translated to the shards
that it touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.index import ShardIndex
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import (
    ArrayLayout,
    ShardRef,
    coords_of_entries,
    grid_box,
    shard_coords_of,
)
from zarr_shardstore.shards.requests import CloseListing, Flow, KeyCursor, ListPage

_KEYS_AT_ONCE = 16_384
"""Keys of one shard that are spelled together: about 1.5 MB."""


@dataclass(frozen=True, slots=True)
class GridDirectory:
    """A directory of chunk keys: an array's own, or one inside its grid."""

    layout: ArrayLayout
    n_components: int
    """Number of components of a chunk key's suffix that the path has."""
    leading: Coords
    """Chunk coordinates of the outermost dimensions that these components spell."""

    @property
    def shard_leading(self) -> Coords:
        """Shard coordinates of the base directory."""
        cps = self.layout.spec.chunks_per_shard[: len(self.leading)]
        return shard_coords_of(self.leading, cps)

    @property
    def base_directory(self) -> str:
        """The directory of the base store with the shards of this directory."""
        encode = self.layout.encoding.encode_component
        components = [
            encode(i, tuple(self.shard_leading[d] for d in dims))
            for i, dims in enumerate(self._dims[: self.n_components])
        ]
        return self.layout.prefix + "".join(f"{c}/" for c in components)

    def shard_of_name(self, name: str) -> ShardRef | None:
        """Return the shard with this name in the base directory; ``None`` if none can have it."""
        part = self._decode(name)
        if part is None or not self._is_last:
            return None
        if self.layout.ndim == 0:
            return ShardRef(self.layout, (), self.layout.prefix + name)
        return self.layout.shard(self.shard_leading + part)

    def expand_name(self, name: str) -> list[str] | None:
        """Return the names of the chunk directories that a shard directory stands for.

        These are all that are possible in the grid. Only the indexes of the shards below tell
        which of them have chunks. ``None`` if `name` is no shard directory.
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
        """Return the names of the directories in this one that have chunks of a shard below it."""
        ids = entries_present(shard, index, self.leading)
        dim, cps = len(self.leading), self.layout.spec.chunks_per_shard
        first = shard.coords[dim] * cps[dim]
        encode = self.layout.encoding.encode_component
        numbers = np.unique(np.unravel_index(ids, cps)[dim])
        return [encode(self.n_components, (first + c,)) for c in numbers.tolist()]

    def names_of_entries(self, shard: ShardRef, index: ShardIndex) -> list[str]:
        """Return the names in this directory of the chunks of one of its shards."""
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
    """Return the place of a directory (ending with ``/``, or empty) in an array's chunk keys.

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
    """Return the ascending ids of the stored entries in the array whose coordinates start so."""
    present = index.present_ids()
    in_grid = shard.entries_of(leading)
    if len(in_grid) == len(index.fields):
        return present
    is_present = np.zeros(len(index.fields), np.bool_)
    is_present[present] = True
    return in_grid[is_present[in_grid]]


def chunks_present(shard: ShardRef, index: ShardIndex) -> list[tuple[str, int]]:
    """Return the keys of the stored chunks of a shard in the array, with their sizes in bytes."""
    ids = entries_present(shard, index)
    return list(zip(shard.chunk_keys(ids), index.fields[ids, 1].tolist(), strict=True))


@dataclass(slots=True)
class ListedKeys:
    """A part of a listing: keys that start with a prefix, spelled when they are asked for."""

    prefix: str
    values: list[tuple[str, int | None]] = field(default_factory=list)
    """Keys, with their sizes in bytes where these are known."""
    shards: list[tuple[ShardRef, ShardIndex]] = field(default_factory=list)
    """Shards of which some chunk keys start with the prefix, with their indexes."""

    def key_lists(self) -> Iterator[list[str]]:
        """Yield the keys, a bounded number at a time."""
        if self.values:
            yield [key for key, _ in self.values]
        for shard, index in self.shards:
            ids = self._entries(shard, index)
            for first in range(0, len(ids), _KEYS_AT_ONCE):
                yield shard.chunk_keys(ids[first : first + _KEYS_AT_ONCE])

    def sizes(self) -> Iterator[tuple[str, int | None]]:
        """Yield the keys with their sizes."""
        yield from self.values
        for shard, index in self.shards:
            ids = self._entries(shard, index)
            yield from zip(shard.chunk_keys(ids), index.fields[ids, 1].tolist(), strict=True)

    def _entries(self, shard: ShardRef, index: ShardIndex) -> npt.NDArray[np.intp]:
        present = entries_present(shard, index)
        if shard.layout.prefix.startswith(self.prefix):
            return present
        return np.intersect1d(present, shard.entries_with(self.prefix), assume_unique=True)


# ------------------------------------------------------------ keys of the base store

KEYS_PER_PAGE = 1024
"""Keys of the base store that are listed together: about as many as an object store returns."""


class VersionedKeys(list[str]):
    """A page of keys, with the versions that their objects had when they were listed.

    A version is ``None`` if the base store does not tell it.
    """

    def __init__(self, keys: Iterable[str] = (), versions: Sequence[object] = ()) -> None:
        super().__init__(keys)
        self.versions = versions or [None] * len(self)


class KeyPages:
    """Keys of the base store in directories, none inside another one, page by page."""

    def __init__(self, directories: Iterable[str]) -> None:
        self._cursors = [KeyCursor(directory) for directory in directories]

    @property
    def has_more(self) -> bool:
        """Whether another page is to be asked for."""
        return bool(self._cursors)

    def next_page(self) -> Flow[VersionedKeys]:
        """Return the next keys; there may be none."""
        page: VersionedKeys
        (page,) = yield [ListPage(self._cursors[0], KEYS_PER_PAGE)]
        if len(page) < KEYS_PER_PAGE:
            del self._cursors[0]
        return page

    def close(self) -> Flow[None]:
        """Release what the base store has open for these pages."""
        if self._cursors:
            yield [CloseListing(cursor) for cursor in self._cursors]
