"""Listing operations: chunk keys from shards, and everything else as it is.

Source: sharding storage transformer draft, "API implementation", list, list_prefix, list_dir.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, TypeGuard

from zarr_shardstore.errors import CorruptShardError, ShardStoreError
from zarr_shardstore.format.documents import Node
from zarr_shardstore.format.index import ShardIndex
from zarr_shardstore.format.keys import check_prefix
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.plan.holding import (
    list_keys,
    list_names,
    read_indexes_with_held,
    with_held,
)
from zarr_shardstore.plan.listing import GridDirectory, chunks_present
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.ranges import Range
from zarr_shardstore.plan.requests import Flow, Found, Get
from zarr_shardstore.plan.stack import keys_above
from zarr_shardstore.store.arrays import StoredArray
from zarr_shardstore.store.catalog import Catalog, StackedKey

__all__ = ["Kind", "Listing", "raise_first"]

_SHARDS_PER_LISTING_ROUND = 64

Kind: TypeAlias = Literal["key", "prefix", "both"] | None
"""What a listed name is; ``None``: the base store does not tell."""


class Listing:
    """The listing operations on one base store, and on what is held back, as flows."""

    def __init__(self, catalog: Catalog, pending: PendingShards) -> None:
        self.catalog = catalog
        self._pending = pending

    def list_all(self, prefix: str) -> Flow[list[str]]:
        """All keys that start with `prefix`."""
        base_keys = yield from self.list_base(prefix)
        keys: list[str] = []
        errors: list[ShardStoreError] = []
        for part in self.listing_rounds(base_keys):
            keys += yield from self.list_some(part, prefix, errors)
        raise_first(errors)
        return keys

    def directory_of_array(self, prefix: str) -> Flow[str]:
        """`prefix` with a slash, if it is the path of an array; else as it is."""
        prefix = check_prefix(prefix)
        if not prefix or prefix.endswith("/"):
            return prefix
        is_array = yield from self.catalog.has_array(prefix)
        return f"{prefix}/" if is_array else prefix

    def list_base(self, prefix: str) -> Flow[list[str]]:
        """Keys of the base store that keys starting with `prefix` may come from."""
        prefix = check_prefix(prefix)
        directory = prefix[: prefix.rfind("/") + 1]
        in_grid = yield from self.catalog.directory_of(directory, is_strict=False)
        if isinstance(in_grid, StoredArray):
            directory, in_grid = in_grid.node.chunk_prefix, None
        elif in_grid is None and self.catalog.may_lack_metadata(directory):
            directory = _array_directory_without_metadata(directory)
        directories = [directory]
        if in_grid is not None and in_grid.base_directory != directory:
            # What passes through is still listed where it was.
            directories.append(in_grid.base_directory)
        return (yield from list_keys(directories, self._pending))

    def listing_rounds(self, base_keys: list[str]) -> Iterable[list[str]]:
        """Cut base keys into parts whose shard indexes are read in one round each."""
        n = _SHARDS_PER_LISTING_ROUND
        return (base_keys[i : i + n] for i in range(0, len(base_keys), n))

    def list_some(
        self, base_keys: Sequence[str], prefix: str, errors: list[ShardStoreError]
    ) -> Flow[list[str]]:
        """Keys that start with `prefix` and are stored in these objects of the base store.

        Shards and documents that cannot be read go to `errors`, and block nothing else.
        """
        sizes = yield from self.list_sizes(base_keys, prefix, errors)
        return [key for key, _ in sizes]

    def list_sizes(
        self, base_keys: Sequence[str], prefix: str, errors: list[ShardStoreError]
    ) -> Flow[list[tuple[str, int | None]]]:
        """As `list_some`, each key with its size in bytes where the index tells it."""
        prefix = check_prefix(prefix)
        shards = yield from self.catalog.shards_of(base_keys)
        known = [s for s in shards if _is_shard(s)]
        indexes = iter((yield from read_indexes_with_held(known, self._pending)))
        listed: list[tuple[str, int | None]] = []
        stacked: dict[Node, tuple[StoredArray, list[str]]] = {}
        for base_key, shard in zip(base_keys, shards, strict=True):
            match shard:
                case None:
                    listed.append((base_key, None))
                case StackedKey(key, array):
                    stacked.setdefault(array.node, (array, []))[1].append(key)
                case ShardStoreError():
                    errors.append(shard)
                case ShardRef():
                    index = next(indexes)
                    if isinstance(index, CorruptShardError):
                        errors.append(index)
                    elif index is not None:
                        listed += chunks_present(shard, index)
        for array, keys in stacked.values():
            listed += yield from self._keys_above(array, keys, errors)
        return [item for item in listed if item[0].startswith(prefix)]

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
        for key in (yield from self.list_all(prefix)):
            name, slash, _ = key[len(prefix) :].partition("/")
            kind: Kind = "prefix" if slash else "key"
            kinds[name] = kind if kinds.get(name, kind) == kind else "both"
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

    def _keys_above(
        self, array: StoredArray, keys: list[str], errors: list[ShardStoreError]
    ) -> Flow[list[tuple[str, int | None]]]:
        """Keys in the array of the values that objects hold; a damaged one blocks no other."""
        try:
            above = yield from keys_above(with_held(array.stack, self._pending), keys)
        except ShardStoreError as error:
            if len(keys) == 1:
                errors.append(error)
                return []
            above = []
            for key in keys:
                above += yield from self._keys_above(array, [key], errors)
        return [item for item in above if not array.is_outside(item[0])]


def raise_first(errors: Sequence[ShardStoreError]) -> None:
    """Raise the first of the errors that a listing met, if any, now that all else is listed."""
    if errors:
        if len(errors) > 1:
            errors[0].add_note(f"and {len(errors) - 1} more shards or keys could not be listed")
        raise errors[0]


def _is_shard(found: object) -> TypeGuard[ShardRef]:
    return isinstance(found, ShardRef)


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
