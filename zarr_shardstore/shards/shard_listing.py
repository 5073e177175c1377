"""Chunk keys from shard keys: of a directory, of a shard, and the pages that list shard keys.

Source: sharding storage transformer draft, "API implementation", list_prefix, list_dir,
erase_prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.shard import ShardIndex
from zarr_shardstore.shards.requests import Flow, KeyCursor, ListPage

_KEYS_AT_ONCE = 16_384
"""Keys of one shard that are spelled together: about 1.5 MB."""

MAX_NAMES = 16_384
"""Names of directories that are listed without a look into indexes."""


class GridDirectory(NamedTuple):
    """A directory of chunk keys: an array's own, or one inside its grid."""

    layout: ArrayLayout
    path: str
    """Directory below the prefix of the array: empty, or it ends with ``/``."""
    leading: Coords
    """Chunk coordinates of the outermost dimensions that the path spells."""

    @property
    def base_directory(self) -> str:
        """The directory of the base store with the shards of this directory."""
        if not self.leading:
            return self.layout.prefix + self.path
        number = self.layout.spec.boxes.number
        coords = "".join(f"{number(dim, c)}/" for dim, c in enumerate(self.leading))
        return self.layout.prefix + self.layout.encoding.marker + coords

    def shard_of_name(self, name: str) -> ShardRef | None:
        """Return the shard with this name in the base directory; ``None`` if none can have it."""
        return self.layout.shard_of_key(self.base_directory + name)

    def expand_name(self, name: str) -> list[str] | None:
        """Return the names of the chunk directories that a shard directory may have in the grid:
        at most ``MAX_NAMES + 1``; ``None`` if `name` is no shard directory."""
        layout, dim = self.layout, len(self.leading)
        path = f"{self.base_directory}{name}/"[len(layout.prefix) :]
        start = layout.encoding.decode_start(path, layout.spec.ndim)
        if start is None:
            return None
        part = start[0][dim:]
        if not part:
            return [name]  # the "c" of the default encoding
        first, stop = layout.spec.boxes.bounds(dim, part[0])
        if layout.grid_shape is not None:
            stop = min(stop, layout.grid_shape[dim])
        marker = "" if self.leading else layout.encoding.marker.rpartition("/")[2]
        return [f"{marker}{number}" for number in range(first, min(stop, first + MAX_NAMES + 1))]

    def names_of_entries(self, shard: ShardRef, index: ShardIndex) -> list[str]:
        """Return the names in this directory of the chunks of one of its shards."""
        ids = entries_present(shard, index, self.leading)
        return [key.rpartition("/")[2] for key in shard.chunk_keys(ids)]


def locate_directory(layout: ArrayLayout, directory: str) -> GridDirectory | None:
    """Return a directory (ending with ``/``, or empty) as one of an array's chunk keys; ``None``
    if it is not the array's own and no chunk key starts with it."""
    if directory == layout.prefix:
        return GridDirectory(layout, "", ())
    path = directory.removeprefix(layout.prefix)
    is_below = directory.startswith(layout.prefix)
    start = layout.encoding.decode_start(path, layout.spec.ndim) if is_below else None
    return None if start is None else GridDirectory(layout, path, start[0])


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
    """A page of keys, with versions and sizes of the listed objects; ``None``: not known."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        versions: Sequence[object] = (),
        sizes: Sequence[int | None] = (),
    ) -> None:
        super().__init__(keys)
        unknown = [None] * len(self)  # one list for both
        self.versions: Sequence[object] = versions or unknown
        self.sizes: Sequence[int | None] = sizes or unknown


class KeyPages:
    """Keys of the base store in directories, none inside another one, page by page."""

    def __init__(self, directories: Iterable[str]) -> None:
        self._cursors = [KeyCursor(directory) for directory in directories]

    @property
    def has_more(self) -> bool:
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
            yield [ListPage(cursor, 0) for cursor in self._cursors]
