"""`ObspecStore`: keys and values of a store by the protocols of ``obspec``, over chunk keys.

Each operation is written once, as a generator of *steps*: key ranges to read, or a flow to run.
`_twins` makes the blocking and the async method of it.

Source: obspec 0.1. Where it leaves a choice, the operations do what obstore's ``MemoryStore`` does.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial, update_wrapper
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from zarr_shardstore.errors import AlreadyExistsError, SpecError, UnsupportedError
from zarr_shardstore.format.ranges import ByteRange, Range, StartFrom, Suffix
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.metadata.documents import is_document
from zarr_shardstore.operations.listing import raise_first
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.shard_listing import ListedKeys
from zarr_shardstore.store.engine import EngineStore, KeyRange, documented_like

if TYPE_CHECKING:
    from obspec import GetOptions, ListResult, ObjectMeta, PutResult

P = ParamSpec("P")
T = TypeVar("T")

_KEYS_PER_PAGE = 1000
"""Keys that a listing hands out together, as an object store does."""


Steps: TypeAlias = Generator[Any, Any, T]  # yields sequences of `KeyRange`, and flows
Sized: TypeAlias = tuple[str, int | None]  # a key, and the size of its value if it is known


@dataclass(frozen=True)
class GetResult:
    """A value, or a range of it, in memory: the reply to ``get``."""

    value: Bytes
    meta: ObjectMeta
    range: tuple[int, int]
    attributes: dict[Any, str] = field(default_factory=dict)

    def buffer(self) -> Bytes:
        """Return the bytes."""
        return self.value

    bytes = buffer  # obstore's name

    def __iter__(self) -> Iterator[Bytes]:
        yield self.value


class GetResultAsync(GetResult):
    """The reply to ``get_async``. Clients take an object with ``__aiter__`` for an async one."""

    async def buffer_async(self) -> Bytes:
        """Return the bytes."""
        return self.value

    bytes_async = buffer_async

    async def __aiter__(self) -> AsyncIterator[Bytes]:
        yield self.value


def _twins(
    steps: Callable[Concatenate[ObspecStore, P], Steps[T]],
) -> tuple[
    Callable[Concatenate[ObspecStore, P], T],
    Callable[Concatenate[ObspecStore, P], Coroutine[Any, Any, T]],
]:
    """Return the blocking and the async method that take these steps."""

    def method(self: ObspecStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        engine, running, reply = self.store._engine, steps(self, *args, **kwargs), None
        try:
            while True:
                step = running.send(reply)
                is_flow = isinstance(step, Generator)
                reply = engine.driver.run(step) if is_flow else engine.get_many_blocking(step)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def method_async(self: ObspecStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        running, reply = steps(self, *args, **kwargs), None
        try:
            while True:
                step = running.send(reply)
                is_flow = isinstance(step, Generator)
                reply = await (self.store._run(step) if is_flow else self._get_many(step))
        except StopIteration as stop:
            result: T = stop.value
            return result

    name = steps.__name__.removeprefix("_")
    update_wrapper(method, steps).__name__ = name
    documented_like(method, "async")(update_wrapper(method_async, steps)).__name__ = f"{name}_async"
    return method, method_async


@dataclass(frozen=True)
class ObspecStore:
    """The keys and values of a store by the protocols of ``obspec``; see `as_obspec`.

    A missing value raises `FileNotFoundError`. A range that is empty, or begins at the end of the
    value or later, raises `SpecError`. ETags and versions are ``None``.
    """

    store: EngineStore

    # -------------------------------------------------------------------- reads

    def _get(self, path: str, *, options: GetOptions | None = None) -> Steps[GetResult]:
        """Return a value, or the range of it in ``options["range"]``.

        Cost: a range also reads the size of the value, which costs a request if the value is
        neither a chunk nor metadata.
        """
        wanted = _range_option(options)
        is_whole = wanted is None or wanted == StartFrom(0)
        (found,) = yield [(path, None if is_whole else wanted)]
        value = _checked(path, wanted, found)
        n = len(value)
        size = n if is_whole else (yield from self._head(path))["size"]
        start = wanted.start if isinstance(wanted, Range | StartFrom) else max(0, size - n)
        return GetResult(value, _meta(path, size), (start, start + n))

    def _get_range(
        self, path: str, *, start: int, end: int | None = None, length: int | None = None
    ) -> Steps[Bytes]:
        """Return a range of a value, cut at its end."""
        ends, lengths = ([each] if each is not None else None for each in (end, length))
        values = yield from self._get_ranges(path, starts=[start], ends=ends, lengths=lengths)
        return values[0]

    def _get_ranges(
        self,
        path: str,
        *,
        starts: Sequence[int],
        ends: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Steps[Sequence[Bytes]]:
        """Return ranges of a value, cut at its end. They are read together and coalesced."""
        if (ends is None) == (lengths is None):
            raise SpecError("a range has a start, and either an end or a length")
        if lengths is not None:
            ends = [start + n for start, n in zip(starts, lengths, strict=True)]
        wanted = [_range(start, end) for start, end in zip(starts, ends or (), strict=True)]
        found = (yield [(path, byte_range) for byte_range in wanted]) if wanted else []
        return [_checked(path, *pair) for pair in zip(wanted, found, strict=True)]

    async def _get_many(self, key_ranges: Sequence[KeyRange]) -> Sequence[Bytes | None]:
        await self.store._ensure_open()
        if len(key_ranges) == 1:  # joins other reads of the same turn
            return [await self.store._engine.get(*key_ranges[0])]
        return await self.store._engine.get_many(key_ranges)

    def _head(self, path: str) -> Steps[ObjectMeta]:
        """Return the size of a value, for a chunk from the index."""
        (size,) = yield self.store._engine.operations.get_sizes([path])
        if size is None:
            raise FileNotFoundError(path)
        return _meta(path, size)

    get, _get_async = _twins(_get)
    get_range, get_range_async = _twins(_get_range)
    get_ranges, get_ranges_async = _twins(_get_ranges)
    head, head_async = _twins(_head)

    @documented_like(get, "async")
    async def get_async(self, path: str, *, options: GetOptions | None = None) -> GetResultAsync:
        return GetResultAsync(**vars(await self._get_async(path, options=options)))

    # ------------------------------------------------------------------- writes

    def _put(
        self,
        /,
        path: str,
        file: Any,
        *,
        attributes: Mapping[Any, str] | None = None,
        tags: Mapping[str, str] | None = None,
        mode: Any = None,
        **_: Any,  # options of uploads in parts, which have no effect
    ) -> Steps[PutResult]:
        """Store a value, which `file` is, names or yields. `mode` may be ``"create"``.

        A write of a chunk keeps the promises of the store: no update of another writer is lost.
        """
        self.store._check_writable()
        if attributes or tags or mode not in (None, "overwrite", "create"):
            raise UnsupportedError(
                f"put of {path}: a chunk of a shard has no attributes, tags, ETag or version of "
                "its own, so mode is 'create' or 'overwrite'; ShardingStore.update replaces values "
                "without losing another writer's update"
            )
        operations, value = self.store._engine.operations, _bytes_of(file)
        if mode != "create":
            yield operations.set_many([(path, value)])
        elif not is_document(path):
            yield operations.update([path], partial(_create, path, value))
        elif (yield operations.exists(path)):
            raise AlreadyExistsError(path)
        else:
            yield operations.set_many([(path, value)], only_if_missing=True)
        return {"e_tag": None, "version": None}

    put, _put_async = _twins(_put)

    @documented_like(put, "async")
    async def put_async(self, path: str, file: Any, **options: Any) -> PutResult:
        if hasattr(file, "__aiter__"):
            file = [part async for part in file]
        async with self.store._engine.turn(path):
            return await self._put_async(path, file, **options)

    def _delete(self, paths: str | Sequence[str]) -> Steps[None]:
        """Erase values. A missing value is no error."""
        self.store._check_writable()
        keys = [paths] if isinstance(paths, str) else paths
        yield self.store._engine.operations.set_many([(key, None) for key in keys])

    delete, _delete_async = _twins(_delete)

    @documented_like(delete, "async")
    async def delete_async(self, paths: str | Sequence[str]) -> None:
        documents = list(filter(is_document, [paths] if isinstance(paths, str) else paths))
        async with self.store._engine.turn(documents[0] if documents else ""):
            await self._delete_async(paths)

    # ------------------------------------------------------------------ listing

    def _list_with_delimiter(
        self, prefix: str | None = None
    ) -> Steps[ListResult[Sequence[ObjectMeta]]]:
        """Return the values and the directories that are directly in a directory."""
        listing = self.store._engine.operations.listing
        keys, prefixes = yield listing.list_keys_and_prefixes(_directory(prefix), is_exact=True)
        objects = yield self._metas([(key, None) for key in keys])
        return {"common_prefixes": [each[:-1] for each in prefixes], "objects": objects}

    list_with_delimiter, list_with_delimiter_async = _twins(_list_with_delimiter)

    def list(
        self, prefix: str | None = None, *, offset: str | None = None
    ) -> Iterator[Sequence[ObjectMeta]]:
        """Yield pages of all values in a directory, in bounded memory.

        With `offset`, keys that are not greater are left out. The keys are not sorted.
        """
        run = self.store._engine.driver.run
        stream = run(self.store._engine.operations.listing.stream(_directory(prefix)))
        try:
            while stream.has_more:
                for part in _pages(run(stream.next_round()), offset):
                    yield run(self._metas(part))
        finally:
            if stream.has_more:
                run(stream.close())
        raise_first(stream.errors)

    @documented_like(list, "async")
    async def list_async(
        self, prefix: str | None = None, *, offset: str | None = None
    ) -> AsyncIterator[Sequence[ObjectMeta]]:
        run = partial(self.store._run, only_reads=True)
        stream = await run(self.store._engine.operations.listing.stream(_directory(prefix)))
        try:
            while stream.has_more:
                for part in _pages(await run(stream.next_round()), offset):
                    yield await run(self._metas(part))
        finally:
            if stream.has_more:
                await run(stream.close())
        raise_first(stream.errors)

    def _metas(self, found: Sequence[Sized]) -> Flow[Sequence[ObjectMeta]]:
        """Return what is known of values; sizes that a listing lacks are read in one round."""
        unknown = [key for key, nbytes in found if nbytes is None]
        sizes = yield from self.store._engine.operations.get_sizes(unknown)
        known = dict(found) | dict(zip(unknown, sizes, strict=True))
        return [_meta(key, nbytes) for key, nbytes in known.items() if nbytes is not None]


def _meta(path: str, size: int) -> ObjectMeta:
    # A reader that compares times reads the value again: no later time is possible.
    now = datetime.now(UTC)
    return {"path": path, "last_modified": now, "size": size, "e_tag": None, "version": None}


def _checked(path: str, wanted: ByteRange | None, value: Bytes | None) -> Bytes:
    if value is None:
        raise FileNotFoundError(path)
    if not value and isinstance(wanted, Range | StartFrom):
        raise SpecError(f"{path}: {wanted} begins at the end of the value or later")
    return value


def _range_option(options: Mapping[str, Any] | None) -> ByteRange | None:
    given = {name: value for name, value in (options or {}).items() if value not in (None, False)}
    wanted = given.pop("range", None)
    if given:
        raise UnsupportedError(
            f"get cannot test {', '.join(given)}: a chunk of a shard has no ETag, time or version "
            "of its own; head returns the size"
        )
    match wanted:
        case None:
            return None
        case {"offset": int(start)}:
            return StartFrom(start)
        case {"suffix": int(nbytes)}:
            return Suffix(nbytes)
        case [int(start), int(stop)]:
            return _range(start, stop)
    raise SpecError(f"range is (start, end), an offset or a suffix, got {short(wanted)}")


def _range(start: int, stop: int) -> Range:
    if not 0 <= start < stop:
        raise SpecError(f"a range begins at 0 or later and is not empty, got [{start}, {stop})")
    return Range(start, stop)


def _bytes_of(file: Any) -> bytes:
    """Return the bytes that an argument of ``put`` is, names or yields."""
    if isinstance(file, Path):
        return file.read_bytes()
    if hasattr(file, "read"):
        content: bytes = file.read()
        return content
    try:
        return bytes(memoryview(file))
    except TypeError:
        return b"".join([bytes(memoryview(part)) for part in file])


def _create(path: str, value: bytes, stored: Sequence[bytes | None]) -> Sequence[bytes]:
    if stored[0] is not None:
        raise AlreadyExistsError(path)
    return [value]


def _directory(prefix: str | None) -> str:
    """Return a prefix as ``obspec`` means it: whole segments, with or without outer slashes."""
    path = (prefix or "").strip("/")
    return f"{path}/" if path else ""


def _pages(listed: ListedKeys, offset: str | None) -> Iterator[Sequence[Sized]]:
    """Yield the keys of a round with their sizes, a bounded number at a time."""
    found = (item for item in listed.sizes() if offset is None or item[0] > offset)
    while page := tuple(islice(found, _KEYS_PER_PAGE)):
        yield page
