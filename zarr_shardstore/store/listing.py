"""Listing operations: chunk keys from shards, and everything else as it is.

Source: sharding storage transformer draft, "API implementation", list, list_prefix, list_dir.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import ShardIndex
from zarr_shardstore.format.keys import check_prefix
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.plan.holding import list_names, read_indexes_with_held
from zarr_shardstore.plan.key_pages import KeyPages, list_keys
from zarr_shardstore.plan.listing import GridDirectory
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.ranges import Range
from zarr_shardstore.plan.requests import Flow, Found, Get
from zarr_shardstore.store.arrays import StoredArray
from zarr_shardstore.store.catalog import Catalog
from zarr_shardstore.store.key_stream import KeyStream, raise_first

__all__ = ["Kind", "Listing"]

_SHARDS_PER_ROUND = 64

Kind: TypeAlias = Literal["key", "prefix", "both"] | None
"""What a listed name is; ``None``: the base store does not tell."""


class Listing:
    """The listing operations on one base store, and on what is held back, as flows."""

    def __init__(self, catalog: Catalog, pending: PendingShards) -> None:
        self.catalog = catalog
        self._pending = pending

    def stream(self, prefix: str, *, is_path: bool = False) -> Flow[KeyStream]:
        """Begin to list all keys that start with `prefix`.

        With `is_path` the path of an array means the directory of the array.
        """
        prefix = check_prefix(prefix)
        if is_path and prefix and not prefix.endswith("/"):
            prefix += "/" if (yield from self.catalog.has_array(prefix)) else ""
        directories = yield from self._base_directories(prefix)
        pages = KeyPages(directories, self._pending)
        return KeyStream(self.catalog, self._pending, pages, prefix)

    def list_all(self, prefix: str) -> Flow[list[str]]:
        """All keys that start with `prefix`."""
        keys: list[str] = []
        yield from self._for_each(prefix, keys.extend)
        return keys

    def listing_rounds(self, base_keys: list[str]) -> Iterable[list[str]]:
        """Cut base keys into parts whose shards are worked on together."""
        n = _SHARDS_PER_ROUND
        return (base_keys[i : i + n] for i in range(0, len(base_keys), n))

    def list_dir(self, prefix: str, *, is_exact: bool = False) -> Flow[dict[str, Kind]]:
        """Names of the keys and directories directly in a directory, with what each is.

        Directories of chunks are listed if the shard that could hold their chunks exists, as
        the draft allows; with `is_exact`, only if they hold any, which the index of each shard
        below says. Keys are exact. A base store that lists names does not tell their kind.
        """
        prefix = _as_directory(prefix)
        directory = yield from self.catalog.directory_of(prefix, or_own=True)
        if isinstance(directory, GridDirectory):
            return (yield from self._list_grid_directory(directory, prefix, is_exact))
        if directory is None and not self.catalog.may_lack_metadata(prefix):
            (names,) = yield from list_names([prefix], self._pending)
            return dict.fromkeys(names)
        kinds: dict[str, Kind] = {}

        def add(keys: list[str]) -> None:
            for key in keys:
                name, slash, _ = key[len(prefix) :].partition("/")
                kind: Kind = "prefix" if slash else "key"
                kinds[name] = kind if kinds.get(name, kind) == kind else "both"

        yield from self._for_each(prefix, add)
        return kinds

    def list_keys_and_prefixes(self, prefix: str) -> Flow[tuple[list[str], list[str]]]:
        """What is directly in a directory: full keys, and full prefixes ending with ``/``.

        Cost: that of `list_dir`, and where the base store does not tell what a name is, one
        question for each name, in one round.
        """
        prefix = _as_directory(prefix)
        kinds = yield from self.list_dir(prefix)
        unknown = [name for name, kind in kinds.items() if kind is None]
        if unknown:
            # A byte, because fsspec says of directories too that they exist.
            replies: list[Found] = yield [Get(prefix + name, Range(0, 1)) for name in unknown]
            found = [
                n for n, reply in zip(unknown, replies, strict=True) if reply.value is not None
            ]
            kinds |= dict.fromkeys(unknown, "prefix")
            if found:
                directories = [f"{prefix}{name}/" for name in found]
                below = yield from list_names(directories, self._pending)
                for name, names in zip(found, below, strict=True):
                    kinds[name] = "both" if names else "key"
        keys = [prefix + name for name, kind in kinds.items() if kind != "prefix"]
        return keys, [f"{prefix}{name}/" for name, kind in kinds.items() if kind != "key"]

    def is_translated_without_metadata(self, prefix: str) -> bool:
        """Whether a directory may lie in the grid of an array that has no metadata."""
        is_widened = _array_directory_without_metadata(prefix) != prefix
        return is_widened and self.catalog.may_lack_metadata(prefix)

    def _for_each(self, prefix: str, take: Callable[[list[str]], None]) -> Flow[None]:
        """Hand over all keys that start with `prefix`, some at a time."""
        stream = yield from self.stream(prefix)
        while stream.has_more:
            for keys in stream.keys_of((yield from stream.next_round())):
                take(keys)
        raise_first(stream.errors)

    def _base_directories(self, prefix: str) -> Flow[list[str]]:
        """Directories of the base store that keys starting with `prefix` may come from."""
        directory = prefix[: prefix.rfind("/") + 1]
        in_grid = yield from self.catalog.directory_of(directory, is_strict=False)
        if isinstance(in_grid, StoredArray):
            directory, in_grid = in_grid.node.chunk_prefix, None
        elif in_grid is None and self.catalog.may_lack_metadata(directory):
            directory = _array_directory_without_metadata(directory)
        if in_grid is None or in_grid.base_directory == directory:
            return [directory]
        # What passes through is still listed where it was.
        return [directory, in_grid.base_directory]

    def _list_grid_directory(
        self, directory: GridDirectory, prefix: str, is_exact: bool
    ) -> Flow[dict[str, Kind]]:
        base_directory = directory.base_directory
        translated: list[str]
        relayed: list[str]
        if base_directory == prefix:
            (translated,) = yield from list_names([prefix], self._pending)
            relayed = translated
        else:
            both = [base_directory, prefix]
            translated, relayed = yield from list_names(both, self._pending)
        kinds: dict[str, Kind] = {}
        shards: list[ShardRef] = []
        is_vague = False
        for name in translated:
            shard = directory.shard_of_name(name)
            if shard is not None:
                shards.append(shard)
            possible = directory.expand_name(name) or []
            if is_exact and possible not in ([], [name]):
                is_vague = True
            else:
                kinds |= dict.fromkeys(possible, "prefix")
        if is_vague:
            names = yield from self._directories_with_chunks(directory)
            kinds |= dict.fromkeys(names, "prefix")
        indexes = yield from self._read_indexes(shards)
        for shard, index in zip(shards, indexes, strict=True):
            if index is not None:
                kinds |= dict.fromkeys(directory.names_of_entries(shard, index), "key")
        for name in relayed:
            if directory.expand_name(name) is None and directory.shard_of_name(name) is None:
                kinds.setdefault(name, None)
        return kinds

    def _directories_with_chunks(self, directory: GridDirectory) -> Flow[list[str]]:
        base_keys = yield from list_keys([directory.base_directory], self._pending)
        names: dict[str, None] = {}
        for part in self.listing_rounds(base_keys):
            shards = [s for s in map(directory.layout.shard_of_key, part) if s is not None]
            indexes = yield from self._read_indexes(shards)
            for shard, index in zip(shards, indexes, strict=True):
                if index is not None:
                    names |= dict.fromkeys(directory.names_of_directories(shard, index))
        return list(names)

    def _read_indexes(self, shards: Sequence[ShardRef]) -> Flow[list[ShardIndex | None]]:
        indexes: list[ShardIndex | None] = []
        for index in (yield from read_indexes_with_held(shards, self._pending)):
            if isinstance(index, CorruptShardError):
                raise index
            indexes.append(index)
        return indexes


def _as_directory(prefix: str) -> str:
    prefix = check_prefix(prefix)
    return prefix if not prefix or prefix.endswith("/") else f"{prefix}/"


def _array_directory_without_metadata(directory: str) -> str:
    """Where the shards may lie that chunk keys below `directory` come from.

    Without metadata the number of dimensions is not known, so a directory inside a grid is
    not translated: from the first segment on that may be a coordinate, all is listed.
    """
    segments = directory.split("/")
    for i, segment in enumerate(segments):
        if re.fullmatch(r"c|c?\.?[0-9.]+", segment):
            return "".join(f"{s}/" for s in segments[:i])
    return directory
