"""Listing operations: chunk keys from shards, and everything else as it is.

Source: sharding storage transformer draft, "API implementation", list, list_prefix, list_dir.

A listing as a stream: what is listed comes in rounds, and only one of them is in memory.

::

    base store ── page of base keys ──▶ catalog ── shards, others ──▶ those that may hold
                                                                      keys with the prefix
                                                                          │ cut into rounds
                                                                          │ indexes
                  keys, shard by shard ◀── parts of a round ◀─────────────┘
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from zarr_shardstore.arrays.catalog import Catalog, TransformedKey
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import CorruptShardError, ShardStoreError
from zarr_shardstore.format.keys import check_prefix
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.operations.flush import Flusher
from zarr_shardstore.shards.index_reads import read_indexes, try_read_indexes
from zarr_shardstore.shards.requests import Flow, Found, Get, ListDir
from zarr_shardstore.shards.shard_listing import (
    GridDirectory,
    KeyPages,
    Listed,
    ListedChunks,
    ListedValues,
    list_keys,
)
from zarr_shardstore.shards.sharding import split_at_sharding
from zarr_shardstore.shards.stack import ValueTransformer, keys_above

"""Shards whose indexes are asked for at once."""

_NBYTES_PER_ROUND = 16 * 1024 * 1024
"""Of these indexes, and of the keys of stacked arrays: what a round may take in memory."""

_STACKED_NBYTES = 160
"""About what a key above a stack takes, with its size, in bytes."""

Located: TypeAlias = tuple[str, object, ShardRef | TransformedKey | ShardStoreError | None]
"""A base key, its version as it was listed, and what it names."""


class KeyStream:
    """What is listed below base keys, round by round.

    Parameters
    ----------
    prefix : str
        What the keys that are wanted start with; the parts of a round have others, too.
    pages : KeyPages
        The base keys.

    Attributes
    ----------
    prefix : str
        As given.
    errors : list of ShardStoreError
        What could not be listed so far: shards and documents that cannot be read block
        nothing else. For `raise_first`, after the last round.
    """

    def __init__(self, catalog: Catalog, pages: KeyPages, prefix: str) -> None:
        self.prefix = prefix
        self.errors: list[ShardStoreError] = []
        self._catalog = catalog
        self._pages = pages
        self._located: deque[Located] = deque()

    @property
    def has_more(self) -> bool:
        """Whether another round is to be asked for."""
        return bool(self._located) or self._pages.has_more

    def next_round(self) -> Flow[list[Listed]]:
        """The next parts of the listing.

        Cost: a page of base keys now and then; the indexes of up to 64 shards, side by side.
        """
        if not self._located:
            self._located.extend((yield from self._next_page()))
        located = self._take_round()
        shards = [found for *_, found in located if isinstance(found, ShardRef)]
        versions = [version for _, version, found in located if isinstance(found, ShardRef)]
        indexes = iter((yield from try_read_indexes(shards, versions, cache=False)))
        parts: list[Listed] = []
        stacked: dict[Node, tuple[StoredArray, list[str]]] = {}
        for base_key, _, found in located:
            match found:
                case None:
                    last = parts[-1] if parts else None
                    if not isinstance(last, ListedValues):
                        parts.append(last := ListedValues([]))
                    last.sizes.append((base_key, None))
                case TransformedKey(key, array):
                    stacked.setdefault(array.node, (array, []))[1].append(key)
                case ShardStoreError():
                    self.errors.append(found)
                case ShardRef():
                    index = next(indexes)
                    if isinstance(index, CorruptShardError):
                        self.errors.append(index)
                    elif index is not None:
                        parts.append(ListedChunks(found, index))
        for array, keys in stacked.values():
            parts.append(ListedValues((yield from self.keys_above(array, keys))))
        return parts

    def all_located(self) -> Flow[list[Located]]:
        """Instead of rounds: base keys that may hold keys that are wanted, and what they name.

        Cost: pages of base keys; no index is read.
        """
        located: list[Located] = []
        while self._pages.has_more:
            located += yield from self._next_page()
        return located

    def close(self) -> Flow[None]:
        """No more rounds are wanted."""
        yield from self._pages.close()

    def keys_of(self, parts: Sequence[Listed]) -> Iterator[list[str]]:
        """Those of the keys of a round that are wanted, a bounded number at a time."""
        for part in parts:
            yield from part.keys_with(self.prefix)

    def _next_page(self) -> Flow[list[Located]]:
        page = yield from self._pages.next_page()
        names = yield from self._catalog.shards_of(page)
        located = zip(page, page.versions, names, strict=True)
        return [item for item in located if _may_hold(item, self.prefix)]

    def _take_round(self) -> list[Located]:
        """Base keys whose shards are read together."""
        taken: list[Located] = []
        n_shards = nbytes = 0
        while self._located and n_shards < _SHARDS_PER_ROUND:
            added = _nbytes_of(self._located[0])
            if n_shards and nbytes + added > _NBYTES_PER_ROUND:
                break
            taken.append(self._located.popleft())
            n_shards += added > 0
            nbytes += added
        return taken

    def keys_above(self, array: StoredArray, keys: list[str]) -> Flow[list[tuple[str, int | None]]]:
        """Keys in the array of the values that objects hold; a damaged one blocks no other."""
        above: list[tuple[str, int | None]] = []
        try:
            above = yield from keys_above(array.stack, keys)
        except ShardStoreError as error:
            if len(keys) == 1:
                self.errors.append(error)
                return []
            for key in keys:
                above += yield from self.keys_above(array, [key])
        return [item for item in above if not array.is_outside(item[0])]


def raise_first(errors: Sequence[ShardStoreError]) -> None:
    """Raise the first of the errors that a listing met, if any, now that all else is listed."""
    if errors:
        if len(errors) > 1:
            errors[0].add_note(f"and {len(errors) - 1} more shards or keys could not be listed")
        raise errors[0]


def _may_hold(located: Located, prefix: str) -> bool:
    """Whether a base key may hold a key with this prefix; of damaged arrays nothing is known."""
    base_key, _, found = located
    match found:
        case None:
            return base_key.startswith(prefix)
        case ShardRef():
            # All shards of an array count: also one that lies outside a grid that has shrunk.
            return found.layout.prefix.startswith(prefix) or found.has_entries_with(prefix)
        case TransformedKey(key, array):
            split = split_at_sharding(array.stack)
            others = [t for t in array.stack if split is None or t is not split[0]]
            if not all(isinstance(transformer, ValueTransformer) for transformer in others):
                return True  # the others may change keys
            shard = None if split is None else split[0].layout.shard_of_key(key)
            if shard is None:
                return key.startswith(prefix)
            return _may_hold((base_key, None, shard), prefix)
    return True


def _nbytes_of(located: Located) -> int:
    """What reading a shard takes in memory; nothing for a value that passes through."""
    match located[2]:
        case ShardRef() as shard:
            return shard.layout.spec.index_nbytes
        case TransformedKey(_, array):
            found = split_at_sharding(array.stack)
            n_keys = found[0].layout.spec.n_entries if found else 1
            return n_keys * _STACKED_NBYTES
    return 0


_SHARDS_PER_ROUND = 64

Kind: TypeAlias = Literal["key", "prefix", "both"] | None
"""What a listed name is; ``None``: the base store does not tell."""


class Listing:
    """The listing operations on one base store, as flows.

    Each begins with a flush of what it could see of the write buffer.
    """

    def __init__(self, catalog: Catalog, flusher: Flusher) -> None:
        self.catalog = catalog
        self._flusher = flusher

    def stream(self, prefix: str, *, is_path: bool = False) -> Flow[KeyStream]:
        """Begin to list all keys that start with `prefix`.

        With `is_path` the path of an array means the directory of the array.
        """
        prefix = check_prefix(prefix)
        if is_path and prefix and not prefix.endswith("/"):
            prefix += "/" if (yield from self.catalog.has_array(prefix)) else ""
        yield from self._flusher.flush_below(prefix)
        directories = yield from self._base_directories(prefix)
        return KeyStream(self.catalog, KeyPages(directories), prefix)

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
        yield from self._flusher.flush_below(prefix)
        directory = yield from self.catalog.directory_of(prefix, or_own=True)
        if isinstance(directory, GridDirectory):
            return (yield from self._list_grid_directory(directory, prefix, is_exact))
        if directory is None and not self.catalog.may_lack_metadata(prefix):
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
                below = yield [ListDir(f"{prefix}{name}/") for name in found]
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
            (translated,) = yield [ListDir(prefix)]
            relayed = translated
        else:
            translated, relayed = yield [ListDir(base_directory), ListDir(prefix)]
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
        indexes = yield from read_indexes(shards, cache=False)
        for shard, index in zip(shards, indexes, strict=True):
            if index is not None:
                kinds |= dict.fromkeys(directory.names_of_entries(shard, index), "key")
        for name in relayed:
            if directory.expand_name(name) is None and directory.shard_of_name(name) is None:
                kinds.setdefault(name, None)
        return kinds

    def _directories_with_chunks(self, directory: GridDirectory) -> Flow[list[str]]:
        base_keys = yield from list_keys([directory.base_directory])
        names: dict[str, None] = {}
        for part in self.listing_rounds(base_keys):
            shards = [s for s in map(directory.layout.shard_of_key, part) if s is not None]
            indexes = yield from read_indexes(shards, cache=False)
            for shard, index in zip(shards, indexes, strict=True):
                if index is not None:
                    names |= dict.fromkeys(directory.names_of_directories(shard, index))
        return list(names)


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
