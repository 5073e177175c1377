"""Listings: chunk keys, or a mask of the stored chunks, from the indexes of shards.

::

    base store ── page of base keys ──▶ catalog ── shards, others ──▶ those that may have
                                                                      keys with the prefix
                                                                          │ cut into rounds
                                                                          │ indexes
                          keys, shard by shard ◀── round ◀────────────────┘

Memory: one page of base keys and one round, for any number of keys.

Source: sharding storage transformer draft, "API implementation", list, list_prefix, list_dir.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from zarr_shardstore.arrays.catalog import Catalog, TransformedKey, flat_nodes, layouts_of
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import CorruptShardError, ShardStoreError
from zarr_shardstore.format.keys import check_prefix
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.operations.batch import Flusher
from zarr_shardstore.shards import stack
from zarr_shardstore.shards.index_reads import read_indexes, rounds_of, try_read_indexes
from zarr_shardstore.shards.requests import Flow, Found, Get, ListDir
from zarr_shardstore.shards.shard_listing import MAX_NAMES, GridDirectory, KeyPages, ListedKeys

_TRANSFORMED_KEY_NBYTES = 160
"""Memory of a key above a stack of transformers with its size, in bytes."""

Located: TypeAlias = tuple[str, object, ShardRef | TransformedKey | ShardStoreError | None]
"""A base key, its version as it was listed, and the shard or key that it names."""

Kind: TypeAlias = Literal["key", "prefix", "both"] | None
"""Kind of a name in a directory; ``None``: not known."""


class KeyStream:
    """All keys that start with a prefix, in rounds."""

    def __init__(self, catalog: Catalog, pages: KeyPages, prefix: str) -> None:
        self.prefix = prefix
        self.errors: list[ShardStoreError] = []
        """Shards and documents that could not be read so far, for `raise_first` at the end."""
        self._catalog = catalog
        self._pages = pages
        self._rounds: deque[list[Located]] = deque()

    @property
    def has_more(self) -> bool:
        return bool(self._rounds) or self._pages.has_more

    def next_round(self) -> Flow[ListedKeys]:
        """Return the keys of up to 64 more shards, whose indexes are read in one round."""
        if not self._rounds:
            self._rounds.extend(rounds_of((yield from self._next_page()), _nbytes_of))
        listed = ListedKeys(self.prefix)
        located = self._rounds.popleft() if self._rounds else []  # a page may have other keys only
        shards, listed.values = yield from self._resolve(located)
        refs, versions = [ref for ref, _ in shards], [version for _, version in shards]
        indexes = yield from try_read_indexes(refs, versions, cache=False)
        if any(isinstance(index, CorruptShardError) for index in indexes):
            yield from self._confirm(refs)  # or shards of another array
        for shard, index in zip(refs, indexes, strict=True):
            if isinstance(index, CorruptShardError):
                self.errors.append(index)
            elif index is not None:
                listed.shards.append((shard, index))
        return listed

    def all_located(self) -> Flow[list[Located]]:
        """Return all base keys that may hold keys with the prefix, instead of rounds."""
        located: list[Located] = []
        while self._pages.has_more:
            located += yield from self._next_page()
        return located

    def all_shards_and_keys(self) -> Flow[tuple[list[ShardRef], list[str]]]:
        """Return all shards that may hold keys with the prefix, and all other keys."""
        shards, values = yield from self._resolve((yield from self.all_located()))
        return [shard for shard, _ in shards], [key for key, _ in values]

    def close(self) -> Flow[None]:
        """Release what the base store has open for this stream."""
        yield from self._pages.close()

    def _resolve(
        self, located: Sequence[Located]
    ) -> Flow[tuple[list[tuple[ShardRef, object]], list[tuple[str, int | None]]]]:
        """Return shards with their versions, and other keys with sizes where these are known."""
        shards: list[tuple[ShardRef, object]] = []
        values: list[tuple[str, int | None]] = []
        transformed: dict[Node, tuple[StoredArray, list[str]]] = {}
        for base_key, version, found in located:
            match found:
                case None:
                    values.append((base_key, None))
                case TransformedKey(key, array):
                    transformed.setdefault(array.node, (array, []))[1].append(key)
                case ShardStoreError():
                    self.errors.append(found)
                case ShardRef():
                    shards.append((found, version))
        for array, keys in transformed.values():
            above = yield from self._keys_above(array, keys)
            values += [item for item in above if item[0].startswith(self.prefix)]
        return shards, values

    def _keys_above(
        self, array: StoredArray, keys: list[str]
    ) -> Flow[list[tuple[str, int | None]]]:
        """Return the keys of an array that are in objects; collect errors of damaged objects."""
        above: list[tuple[str, int | None]] = []
        try:
            above = yield from stack.keys_above(array.stack, keys)
        except ShardStoreError as error:
            if len(keys) == 1:
                self.errors.append(error)
                return []
            for key in keys:
                above += yield from self._keys_above(array, [key])
        return [item for item in above if not array.is_outside(item[0])]

    def _next_page(self) -> Flow[list[Located]]:
        page = yield from self._pages.next_page()
        names = yield from self._catalog.shards_of(page)
        if (yield from self._confirm(names)):
            names = yield from self._catalog.shards_of(page)
        try:
            if not self._pages.has_more:  # a conversion may have removed what was listed before
                yield from self._catalog.arrays.check_not_hidden(self.prefix)
        except ShardStoreError as error:
            self.errors.append(error)
        located = zip(page, page.versions, names, strict=True)
        return [item for item in located if _may_hold(item[0], item[2], self.prefix)]

    def _confirm(self, names: Sequence[object]) -> Flow[bool]:
        """Return whether a grid is another one now; collect errors: one hides no other array."""
        has_newer = False
        for document, layout in layouts_of(names).items():
            try:
                has_newer |= yield from self._catalog.arrays.confirm({document: layout})
            except ShardStoreError as error:
                self.errors.append(error)
        return has_newer


def raise_first(errors: Sequence[ShardStoreError]) -> None:
    """Raise the first error of a listing, if any, now that all else is listed."""
    if errors:
        if len(errors) > 1:
            errors[0].add_note(f"and {len(errors) - 1} more shards or keys could not be listed")
        raise errors[0]


class Listing:
    """Listing flows on one base store; each first flushes the buffered shards that it lists."""

    def __init__(self, flusher: Flusher) -> None:
        self._catalog = flusher.catalog
        self._flusher = flusher

    def stream(self, prefix: str, *, is_path: bool = False) -> Flow[KeyStream]:
        """Begin to list keys with a prefix; with `is_path` an array's path is its directory."""
        prefix = check_prefix(prefix)
        if is_path and prefix and not prefix.endswith("/"):
            arrays = yield from self._catalog.arrays.lookup(flat_nodes(prefix))
            prefix += "/" if any(array is not None for array in arrays.values()) else ""
        if self._flusher.buffer.is_active:
            yield from self._flusher.flush_below(prefix)
        directories = yield from self._base_directories(prefix)
        return KeyStream(self._catalog, KeyPages(directories), prefix)

    def list_all(self, prefix: str) -> Flow[list[str]]:
        """Return all keys that start with `prefix`."""
        keys: list[str] = []
        yield from self._for_each(prefix, keys.extend)
        return keys

    def list_dir(self, prefix: str, *, is_exact: bool = False) -> Flow[dict[str, Kind]]:
        """Return the names of the keys and directories directly in a directory, with their kinds.

        Keys are exact. A directory of chunks is listed if the shard that could hold its chunks
        exists, as the draft allows; with `is_exact`, if the index of a shard below has any.
        """
        prefix = as_directory(prefix)
        if self._flusher.buffer.is_active:
            yield from self._flusher.flush_below(prefix)
        directory = yield from self._catalog.directory_of(prefix, or_own=True, is_strict=False)
        if isinstance(directory, GridDirectory):
            listed = yield from _list_grid_directory(directory, prefix, is_exact)
            if listed is not None:
                return listed
        elif directory is None and not self._catalog.may_lack_metadata(prefix):
            (names,) = yield [ListDir(prefix)]
            return dict.fromkeys(names)
        kinds: dict[str, Kind] = {}

        def add(keys: list[str]) -> None:
            for key in keys:
                name, slash, _ = key[len(prefix) :].partition("/")
                kind: Kind = "prefix" if slash else "key"
                kinds[name] = kind if kinds.get(name, kind) == kind else "both"

        yield from self._for_each(prefix, add)
        return kinds

    def list_keys_and_prefixes(
        self, prefix: str, *, is_exact: bool = False
    ) -> Flow[tuple[list[str], list[str]]]:
        """Return the full keys directly in a directory, and full prefixes ending with ``/``.

        Cost: as `list_dir`, and one read for each name of unknown kind, in one round.
        """
        prefix = as_directory(prefix)
        kinds = yield from self.list_dir(prefix, is_exact=is_exact)
        unknown = [name for name, kind in kinds.items() if kind is None]
        if unknown:
            # A byte is read, because for fsspec directories also exist.
            replies: list[Found] = yield [Get(prefix + name, Range(0, 1)) for name in unknown]
            kinds |= dict.fromkeys(unknown, "prefix")
            found = [n for n, r in zip(unknown, replies, strict=True) if r.value is not None]
            if found:
                below = yield [ListDir(f"{prefix}{name}/") for name in found]
                for name, names in zip(found, below, strict=True):
                    others = {*names} - {name, prefix + name}  # fsspec may list a file in itself
                    kinds[name] = "both" if others else "key"
        keys = [prefix + name for name, kind in kinds.items() if kind != "prefix"]
        return keys, [f"{prefix}{name}/" for name, kind in kinds.items() if kind != "key"]

    def is_translated_without_metadata(self, prefix: str) -> bool:
        """Whether a directory may lie in the grid of an array that has no metadata."""
        is_widened = _array_directory_without_metadata(prefix) != prefix
        return is_widened and self._catalog.may_lack_metadata(prefix)

    def _for_each(self, prefix: str, take: Callable[[list[str]], None]) -> Flow[None]:
        stream = yield from self.stream(prefix)
        while stream.has_more:
            for keys in (yield from stream.next_round()).key_lists():
                take(keys)
        raise_first(stream.errors)

    def _base_directories(self, prefix: str) -> Flow[list[str]]:
        """Return the directories of the base store that keys with this prefix may come from."""
        directory = prefix[: prefix.rfind("/") + 1]
        in_grid = yield from self._catalog.directory_of(directory, is_strict=False)
        if isinstance(in_grid, StoredArray):
            directory, in_grid = in_grid.node.chunk_prefix, None
        elif in_grid is None and self._catalog.may_lack_metadata(directory):
            directory = _array_directory_without_metadata(directory)
        if in_grid is None or in_grid.base_directory == directory:
            return [directory]
        # Other keys are still listed where they are.
        return [directory, in_grid.base_directory]


# ------------------------------------------------------------------ base keys


def _may_hold(
    base_key: str, found: ShardRef | TransformedKey | ShardStoreError | None, prefix: str
) -> bool:
    """Whether a base key may hold a key with this prefix; each key of a damaged array may."""
    match found:
        case None:
            return base_key.startswith(prefix)
        case ShardRef():
            # A shard outside a grid that has shrunk also counts, if the prefix has the array.
            return found.layout.prefix.startswith(prefix) or bool(found.boxes_with(prefix))
        case TransformedKey(key, array):
            keeping_keys = stack.ValueTransformer | stack.ShardingTransformer
            if not all(isinstance(transformer, keeping_keys) for transformer in array.stack):
                return True
            layout, _ = array.sharding
            shard = None if layout is None else layout.shard_of_key(key)
            return _may_hold(key, shard, prefix)
    return True


def _nbytes_of(located: Located) -> int:
    """Return the memory of a shard that is read; 0 for a value that passes through."""
    match located[2]:
        case ShardRef() as shard:
            return shard.spec.index_nbytes
        case TransformedKey(_, array):
            layout, _ = array.sharding
            return _TRANSFORMED_KEY_NBYTES * (1 if layout is None else layout.spec.n_entries)
    return 0


# ---------------------------------------------------------------- directories


def _list_grid_directory(
    directory: GridDirectory, prefix: str, is_exact: bool
) -> Flow[dict[str, Kind] | None]:
    """Return the names, or ``None`` if only the indexes of all shards below have them."""
    directories = dict.fromkeys([directory.base_directory, prefix])
    listings: list[list[str]] = yield [ListDir(each) for each in directories]
    translated, relayed = listings[0], listings[-1]
    kinds: dict[str, Kind] = {}
    shards: list[ShardRef] = []
    for name in translated:
        shard = directory.shard_of_name(name)
        if shard is not None:
            shards.append(shard)
        possible = directory.expand_name(name) or []
        if len(possible) > MAX_NAMES or (is_exact and possible not in ([], [name])):
            return None
        kinds |= dict.fromkeys(possible, "prefix")
    indexes = yield from read_indexes(shards, cache=False)
    for shard, index in zip(shards, indexes, strict=True):
        if index is not None:
            kinds |= dict.fromkeys(directory.names_of_entries(shard, index), "key")
    for name in relayed:
        if directory.expand_name(name) is None and directory.shard_of_name(name) is None:
            kinds.setdefault(name, None)
    return kinds


def as_directory(prefix: str) -> str:
    """Return a prefix as zarr means it: a directory, with or without its slash."""
    prefix = check_prefix(prefix)
    return prefix if not prefix or prefix.endswith("/") else f"{prefix}/"


def _array_directory_without_metadata(directory: str) -> str:
    """Return the start of a directory, up to the first segment that may be a chunk coordinate."""
    segments = directory.split("/")
    for i, segment in enumerate(segments):
        if re.fullmatch(r"c|c?\.?[0-9.]+", segment):
            return "".join(f"{s}/" for s in segments[:i])
    return directory
