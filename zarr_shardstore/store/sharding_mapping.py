"""`ShardingMapping`: blocking mapping with the names and arguments of the draft's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import wraps
from operator import index
from reprlib import repr as short
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from zarr_shardstore.arrays.policy import ChunksPerShard
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import items_of, whole_number
from zarr_shardstore.format.keys import check_key, check_prefix
from zarr_shardstore.format.ranges import ByteRange, Range, StartFrom, Suffix
from zarr_shardstore.io.backends.resolve import BaseStore, BaseStoreLike
from zarr_shardstore.io.buffers import own_bytes
from zarr_shardstore.operations.joint_update import Function
from zarr_shardstore.operations.listing import raise_first
from zarr_shardstore.operations.locate import Location, Region, chunks_initialized, locate
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.store.engine import documented_like
from zarr_shardstore.store.options import ShardingOptions
from zarr_shardstore.store.sharding_store import ShardingStore

P = ParamSpec("P")
T = TypeVar("T")
Value: TypeAlias = bytes | bytearray | memoryview
Keys: TypeAlias = list[str]


def _of_store(
    method: Callable[Concatenate[ShardingStore, P], T],
) -> Callable[Concatenate[ShardingMapping, P], T]:
    """Make a method of the mapping from a method of the store, with the same docstring."""
    name = method.__name__

    @wraps(method)
    def call(self: ShardingMapping, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = getattr(self._store, name)(*args, **kwargs)  # perhaps of a subclass
        return result

    call.__name__ = name.removesuffix("_sync")
    return call


class ShardingMapping(MutableMapping[str, bytes]):
    """Mapping from keys to bytes that packs many chunks into one value of the base store.

    It has the operations of the draft's abstract store interface, blocking, under their names.

    Parameters
    ----------
    store
        A `ShardingStore`, to share its cached metadata and its options; or a base store, with the
        options of `ShardingStore`.

    Notes
    -----
    Thread safety and cost: as `ShardingStore`. Async base stores run in zarr's event loop.

    Examples
    --------
    >>> base = {}
    >>> m = ShardingMapping(base, chunks_per_shard=(2, 2))
    >>> m["data/root/foo/c0/1"] = b"abc"
    >>> list(base), list(m)
    (['data/root/foo/c0/0'], ['data/root/foo/c0/1'])
    >>> m.get_partial_values([("data/root/foo/c0/1", (1, None)), ("data/root/foo/c0/0", (0, 1))])
    [b'bc', None]
    """

    def __init__(
        self,
        store: ShardingStore | BaseStoreLike,
        chunks_per_shard: ChunksPerShard = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(store, ShardingStore):
            store = ShardingStore(
                store,
                chunks_per_shard,
                storage_options=storage_options,
                read_only=read_only,
                **options,
            )
        else:
            given = ShardingOptions(chunks_per_shard=chunks_per_shard, **options)
            if given != ShardingOptions() or storage_options is not None:
                raise SpecError("the ShardingStore has its options: pass them to it")
            if read_only and not store.read_only:
                store = store.with_read_only(True)
        self._store = store
        self._engine = store._engine
        self.read_only = store.read_only

    def __repr__(self) -> str:
        return repr(self._store).replace("ShardingStore", "ShardingMapping", 1)

    @property
    def base(self) -> BaseStore:
        """The zarr store or the mapping that has the shards."""
        return self._store.base

    refresh = _of_store(ShardingStore.refresh)
    stats = _of_store(ShardingStore.stats)
    flush = _of_store(ShardingStore.flush_sync)
    compact = _of_store(ShardingStore.compact_sync)
    consolidate_index = _of_store(ShardingStore.consolidate_index_sync)
    shard_shape = _of_store(ShardingStore.shard_shape)
    batch = _of_store(ShardingStore.batch)

    @documented_like(ShardingStore.chunks_initialized, "blocking")
    def chunks_initialized(self, path: str, region: Region = None) -> npt.NDArray[np.bool_]:
        return self._run(chunks_initialized(self._engine.operations.flusher, path, region))

    def locate(self, keys: Iterable[str]) -> list[Location]:
        """Return where values are stored, from documents and indexes alone.

        A location is the key of an object in the base store, and offset and size of the value there
        in bytes; ``None`` if the value is missing. A key that passes through has its own key, 0 and
        the size of the object. A location is valid until the next write of its shard. An open batch
        first stores the shards of these keys.

        Cost: a round for documents that are not cached, and one for the indexes.

        Raises
        ------
        CorruptShardError
            If the index of a shard is damaged.
        UnsupportedError
            If storage transformers below sharding, or without it, change the stored bytes.

        Examples
        --------
        >>> m = ShardingMapping({}, chunks_per_shard=(2, 2))
        >>> m["data/root/foo/c0/1"] = b"abc"
        >>> m.locate(["data/root/foo/c0/1", "data/root/foo/c0/0"])
        [('data/root/foo/c0/0', 0, 3), None]
        """
        wanted = items_of("keys", keys)
        return self._run(locate(self._engine.operations.flusher, wanted))

    def _run(self, flow: Flow[T]) -> T:
        return self._engine.driver.run(flow)

    def _write(self, flow: Flow[None]) -> None:
        self._store._check_writable()
        self._engine.driver.run(flow)

    # ------------------------------------------------------------------ mapping

    def __getitem__(self, key: str) -> bytes:
        value = self._engine.get_blocking(key, None)
        if value is None:
            raise KeyError(key)
        return bytes(value)

    def __setitem__(self, key: str, value: Value) -> None:
        self._write(self._engine.operations.set_many([(key, own_bytes(value))]))

    def __delitem__(self, key: str) -> None:
        self._store._check_writable()
        if key not in self:
            raise KeyError(key)
        self.erase(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._run(self._engine.operations.exists(key))

    def __iter__(self) -> Iterator[str]:
        # A caller that stops early drops the stream: garbage collection must not wait for I/O.
        stream = self._run(self._engine.operations.listing.stream(""))
        while stream.has_more:
            for keys in self._run(stream.next_round()).key_lists():
                yield from keys
        raise_first(stream.errors)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Erase everything."""
        self.erase_prefix("")

    def setdefault(self, key: str, default: Value = b"") -> bytes:
        """Return the value of `key`, or store and return `default`."""
        while True:
            items = [(key, own_bytes(default))]
            self._write(self._engine.operations.set_many(items, only_if_missing=True))
            value = self._run(self._engine.operations.get(key))
            if value is not None:  # otherwise another writer has erased it meanwhile
                return bytes(value)

    def update(self, other: Any = (), /, **values: Value) -> None:
        """Store many values; each shard is written once."""
        try:
            given = dict(other, **values)
        except (TypeError, ValueError) as error:
            raise SpecError(f"other is a mapping, or pairs of key and value: {error}") from error
        items = [(key, own_bytes(value)) for key, value in given.items()]
        self._write(self._engine.operations.set_many(items))

    # ---------------------------------------------------- operations of the draft

    def get_partial_values(
        self, key_ranges: Iterable[tuple[str, tuple[int, int | None] | None]]
    ) -> list[bytes | None]:
        """Return ranges of values, ``None`` for missing keys, in at most two rounds.

        Each item is ``(key, (start, length))``, in bytes; any other form raises `SpecError`. A
        length of ``None`` reads to the end; a negative start counts from the end. Ranges are
        clipped to the value. ``(key, None)`` reads a whole value.
        """
        pairs = _tuples_of("key_ranges", key_ranges, 2, "(key, (start, length))")
        wanted = [(key, *_range_of(given)) for key, given in pairs]
        values = self._engine.get_many_blocking([(key, part) for key, part, _ in wanted])
        return [
            None if value is None else bytes(value[:length])
            for value, (*_, length) in zip(values, wanted, strict=True)
        ]

    def set(self, key: str, value: Value) -> None:
        """Store a whole value."""
        self[key] = value

    def set_partial_values(self, key_start_values: Iterable[tuple[str, int, Value]]) -> None:
        """Write pieces into values, each ``(key, start, value)``; each shard is written once.

        A missing value counts as empty. A negative start counts from the end. A start after the end
        of a value is valid only if other pieces fill the gap. Raises `SpecError` if pieces of one
        value overlap, or a piece starts outside its value.
        """
        given = _tuples_of("key_start_values", key_start_values, 3, "(key, start, value)")
        pieces = [(key, start, own_bytes(value)) for key, start, value in given]
        self._write(self._engine.operations.set_partial_values(pieces))

    def update_values(self, keys: Iterable[str], function: Function) -> None:
        """Replace values by the results of a function; see `ShardingStore.update`."""
        self._store.update_sync(items_of("keys", keys), function)

    def erase(self, key: str) -> None:
        """Erase a value; a missing one is no error."""
        self.erase_values([key])

    def delete(self, key: str) -> None:
        """Erase a value and all values in the directory of that name, as in the early draft.

        A missing value is no error. A trailing slash means the directory alone.
        """
        check_prefix(key)
        directory = f"{key.removesuffix('/')}/"
        check_key(directory[:-1])
        self.erase_prefix(directory)
        if not key.endswith("/"):
            self.erase(key)

    def erase_values(self, keys: Iterable[str]) -> None:
        """Erase values; each shard is written once, and removed if it is empty."""
        erased = [(key, None) for key in items_of("keys", keys)]
        self._write(self._engine.operations.set_many(erased))

    def erase_prefix(self, prefix: str) -> None:
        """Erase all values whose key starts with `prefix`; ``""`` and ``"/"`` mean all."""
        self._write(self._engine.operations.erase_prefix(prefix))

    def list(self) -> Keys:
        """Return all keys."""
        return self.list_prefix("")

    def list_prefix(self, prefix: str) -> Keys:
        """Return all keys that start with `prefix`; ``""`` and ``"/"`` mean all."""
        return self._run(self._engine.operations.listing.list_all(prefix))

    def list_dir(self, prefix: str) -> tuple[Keys, Keys]:
        """Return keys directly in a directory, and prefixes (ending with ``/``) of deeper keys.

        Keys are exact. A prefix of chunks is listed if their shard exists, even without the chunks.
        """
        return self._run(self._engine.operations.listing.list_keys_and_prefixes(prefix))


def _tuples_of(name: str, given: object, n_parts: int, form: str) -> list[Any]:
    items = items_of(name, given)
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != n_parts:
            raise SpecError(f"{name} has items {form}, got {short(item)}")
    return items


def _range_of(given: Any) -> tuple[ByteRange | None, int | None]:
    """Return a range of the draft as a `ByteRange`, and the number of bytes to keep, if limited."""
    if given is None:
        return None, None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise SpecError(
            "a range is (start, length), or None for the whole value, got "
            f"{short(given)}; value[start:stop] is (start, stop - start)"
        )
    start, length = given
    if length is not None:
        length = whole_number("the length of a range", length)
    try:
        start = index(start)
    except TypeError:
        raise SpecError(f"the start of a range is a whole number, got {short(start)}") from None
    if start < 0:
        return Suffix(-start), length
    return (StartFrom(start) if length is None else Range(start, start + length)), None
