"""Engine of both public stores: a base store, the operations on it, and their driver.

A read first asks the caches alone: array, shard index and open file of a chunk. A hit is the value
that the flow would return. On a miss, or while a batch buffers writes, the driver runs the flow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from inspect import getdoc, isfunction
from typing import Any, Self, TypeAlias, TypeVar

from zarr.abc.store import Store
from zarr.core.buffer import Buffer, cpu
from zarr.storage import LocalStore

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ReadOnlyError, SpecError, UnsupportedError
from zarr_shardstore.format.ranges import ByteRange, column_of_ranges, resolve_range
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.backends.fsspec_store import FsspecBackend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.resolve import BaseStore, backend_of
from zarr_shardstore.io.backends.zarr_store import ZarrBackend
from zarr_shardstore.io.concurrency import CallBatcher, PerLoop, Turns, worker_pool
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.cached_files import MISS, CachedValue, find_file
from zarr_shardstore.io.local.fs import warn_of_rewrites
from zarr_shardstore.metadata.documents import is_document
from zarr_shardstore.operations.upkeep import commit_compaction, compact_below, consolidate_below
from zarr_shardstore.operations.values import Operations
from zarr_shardstore.shards.read import ShardReads
from zarr_shardstore.shards.requests import Flow, Modify
from zarr_shardstore.store.options import ShardingOptions
from zarr_shardstore.zarr_hooks.pipeline import make_default
from zarr_shardstore.zarr_hooks.shards_argument import register_shard_keys

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Value: TypeAlias = Buffer | bytes | bytearray | memoryview
KeyRange: TypeAlias = tuple[str, ByteRange | None]


class ShardingEngine:
    """A base store with sharding: operations and driver, for any thread and any event loop.

    A pickle leaves out the cached array metadata.
    """

    def __init__(self, base: BaseStore, options: ShardingOptions) -> None:
        self.base = base
        self.options = options
        if options.view == "shards":
            register_shard_keys()
        backend = backend_of(base, options.backend)
        if options.strategy == "append" and not backend.can_append:
            if not isinstance(backend, LocalBackend) or options.locking != "os":
                raise SpecError(
                    "strategy='append' changes files in their place: it is for local files, with "
                    f"locking='os', got {backend!r}; leave it away, or take 'rewrite'"
                )
            warn_of_rewrites()
        self.appends = backend.can_append and options.strategy != "rewrite"
        self.operations = operations = Operations(
            options.policy,
            native=options.native,
            view=options.view,
            reading=replace(
                options.reading,
                max_shards_at_once=backend.max_shards_at_once,
                max_requests_at_once=backend.max_requests_at_once,
            ),
            order=options.order,
            strategy="append" if self.appends else "rewrite",
            max_dead_nbytes=options.max_dead_bytes,
            max_dead_share=options.max_dead_share,
            refuse_links=backend.refuse_links,
            state_of=backend.state_of,
        )
        self.driver = Driver(backend, operations.update_shard)
        self._buffer, self._arrays = operations.buffer, operations.arrays
        self._count_hit = self.driver.counters.count_fast_read
        self.root: str | None = None
        """Path of the base store, if the cache of open shard files may have hits."""
        if isinstance(backend, LocalBackend) and backend.keeps_handles:
            self.root = backend.path_of("")
        self._call_batcher = CallBatcher(self.get_many)
        self._turns = PerLoop(Turns)
        self._views: dict[type[Buffer], ShardingEngine] = {}
        self.chunk_readers: dict[str, tuple[StoredArray, Any]] = {}
        """Readers by path, each with the array that it was made for."""

    def of(self, cls: type[Buffer]) -> ShardingEngine:
        """Return this engine with a driver that hands buffers of a class to the base store."""
        backend = self.driver.backend
        if cls is cpu.Buffer or type(backend) not in (ZarrBackend, FsspecBackend):
            return self
        assert isinstance(backend, ZarrBackend)
        if cls not in self._views:
            view, old = object.__new__(ShardingEngine), self.driver
            vars(view).update(vars(self))  # `copy` would leave out the open batch
            handing_on = backend.with_buffers(cls)
            view.driver = Driver(handing_on, old.update_flow, old.counters)
            view._call_batcher = CallBatcher(view.get_many)
            self._views[cls] = view
        return self._views[cls]

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardingEngine, (self.base, self.options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingEngine) and self.__reduce__() == other.__reduce__()

    __hash__ = None  # type: ignore[assignment]

    # -------------------------------------------------------------------- reads

    async def get(self, key: str, byte_range: ByteRange | None) -> Bytes | None:
        """Return one value, or a range of it; ``None`` if the key is missing."""
        value = self._get_cached(key, byte_range, may_wait=False)
        if value is MISS:
            value = await self._call_batcher.answer((key, byte_range))
        return value

    def get_blocking(self, key: str, byte_range: ByteRange | None) -> Bytes | None:
        """As `get`."""
        value = self._get_cached(key, byte_range, may_wait=True)
        if value is MISS:
            (value,) = self.driver.run(self.operations.get_many([(key, byte_range)]))
        return value

    async def get_many(self, key_ranges: Sequence[KeyRange]) -> Sequence[Bytes | None]:
        """Return values, or ranges of them; ``None`` for a missing key."""
        if self.root is not None:  # one hop to a thread, hits or not
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker_pool(), self.get_many_blocking, key_ranges)
        flow = self.operations.get_many(key_ranges)
        return await self.driver.run_async(flow, only_reads=True)

    def get_many_blocking(self, key_ranges: Sequence[KeyRange]) -> Sequence[Bytes | None]:
        """As `get_many`."""
        if self.root is None or self._buffer.is_active:
            return self.driver.run(self.operations.get_many(key_ranges))
        if len(key_ranges) == 1:
            return [self.get_blocking(*key_ranges[0])]
        values: list[Any] = [MISS] * len(key_ranges)
        keys = [key for key, _ in key_ranges]
        byte_ranges = column_of_ranges([byte_range for _, byte_range in key_ranges])
        groups = self._arrays.current().reads_by_shard(keys, byte_ranges)
        for reads, found in zip(groups, self.get_groups_cached(groups), strict=True):
            if found is not None:
                for i, value in zip(reads.positions, found, strict=True):
                    values[i] = value
                    self._count_hit()
        left = [i for i, value in enumerate(values) if value is MISS]
        if left:
            read = self.driver.run(self.operations.get_many([key_ranges[i] for i in left]))
            for i, value in zip(left, read, strict=True):
                values[i] = value
        return values

    def _get_cached(self, key: str, byte_range: ByteRange | None, *, may_wait: bool) -> CachedValue:
        """Return a value from the caches, or `MISS`; a slow disk is a miss unless it `may_wait`."""
        if self.root is None or self._buffer.is_active:
            return MISS
        if byte_range is not None:
            resolve_range(byte_range, 0)  # raises for an invalid range, hit or miss
        for table in self._arrays.current().key_tables:
            if (place := table.translate(key)) is not None:
                path = self.root + place[0]
                file, spec = find_file(path), table.spec or table.shard(place[0]).spec
                document = table.layout.document
                if file is None or (
                    (file.spec is not spec or file.document is not document)
                    and not file.is_of(spec, document)
                ):
                    return MISS
                value = file.read(path, place[1], byte_range, may_wait=may_wait)
                if value is not MISS:
                    self._count_hit()
                return value
        return MISS

    def get_groups_cached(
        self, groups: Sequence[ShardReads], pread: Any = None
    ) -> list[Sequence[Bytes | None] | None]:
        """Return the values of each group, which come from one snapshot; ``None`` for a miss."""
        assert self.root is not None
        found: list[Sequence[Bytes | None] | None] = []
        for reads in groups:
            shard, path = reads.shard, self.root + reads.shard.key
            file = find_file(path)
            if file is None or not file.is_of(shard.spec, shard.layout.document):
                found.append(None)
            else:
                found.append(file.read_many(path, reads.entry_ids, reads.byte_ranges(), pread))
        return found

    async def get_groups(self, groups: Sequence[ShardReads]) -> Sequence[Sequence[Bytes | None]]:
        """Return the values of groups of reads, whose positions do not matter."""
        if self.root is not None:  # one hop to a thread, hits or not
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker_pool(), self.get_groups_blocking, groups)
        return await self.driver.run_async(self.operations.get_groups(groups), only_reads=True)

    def get_groups_blocking(self, groups: Sequence[ShardReads]) -> Sequence[Sequence[Bytes | None]]:
        """As `get_groups`."""
        if self.root is None:
            return self.driver.run(self.operations.get_groups(groups))
        found = self.get_groups_cached(groups)
        left = [reads for reads, values in zip(groups, found, strict=True) if values is None]
        read = iter(self.driver.run(self.operations.get_groups(left)) if left else ())
        return [next(read) if values is None else values for values in found]

    def turn(self, key: str) -> AbstractAsyncContextManager[None]:
        """Return the turn of a task that stores or erases a value.

        A document of a new array must not miss chunks that are under way. Chunks must not miss a
        document that is being erased.
        """
        return self._turns.here().taken(is_document(str(key)))

    # ------------------------------------------------------------------- upkeep

    def compaction(self, prefix: str) -> tuple[Driver, Flow[None]]:
        """Return the flow that compacts the shards below a prefix, and its driver."""
        if isinstance(self.base, Store) and not self.base.supports_deletes:
            raise UnsupportedError(
                f"in {self.base} nothing can be removed or replaced, so no byte would become free: "
                "convert it into another store"
            )
        invalidate_documents()  # another process may have converted an array
        backend, order = self.driver.backend, self.options.order
        compact = partial(
            commit_compaction,
            arrays=self.operations.arrays,
            order=order,
            can_append=backend.can_append,
        )
        flow = compact_below(self.operations.listing, prefix)
        return Driver(backend, compact, self.driver.counters), flow

    def consolidation(self, path: str) -> Flow[list[str]]:
        """Return the flow that consolidates the indexes of the arrays at or below a path."""
        self.check_consolidation()
        invalidate_documents()
        return consolidate_below(self.operations.listing, self.operations.arrays, path)

    def check_consolidation(self) -> None:
        """Raise `UnsupportedError` if the base store has no versions of its objects."""
        if not self.driver.backend.has_lasting_versions:
            raise UnsupportedError(
                f"{self.driver.backend!r} tells no versions of its objects, so no reader could "
                "see that a consolidated index still holds: open the store by its path, or through "
                "obstore"
            )


def documented_like(method: Callable[..., Any], how: str) -> Callable[[F], F]:
    """Make a decorator that copies the docstring of a method, with a note on the difference."""
    first, _, rest = (getdoc(method) or "").partition("\n")

    def decorate(other: F) -> F:
        note = f"Same as `{method.__name__}`, but {how}."
        other.__doc__ = f"{first}\n\n{note}\n{rest}"
        return other

    return decorate


def _as_base(name: str) -> property:
    """Delegate a capability flag to the base store; mappings have all."""
    return property(lambda self: getattr(self.base, name, True))


def whole(cls: type[C]) -> type[C]:
    """Make the methods of the parts of a store methods of the class that users know: help, pickles
    of methods, and warnings about missing awaits then name this class."""
    parts = [part for part in cls.__mro__[1:] if issubclass(part, EngineStore)]
    for name, member in [item for part in parts for item in vars(part).items()]:
        if isfunction(member) and name not in vars(cls):
            member.__module__, member.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
            setattr(cls, name, member)
    return cls


class EngineStore(Store):
    """A zarr store that runs flows on an engine. Its subclasses have the operations."""

    _engine: ShardingEngine

    @classmethod
    def _of(cls, engine: ShardingEngine, read_only: bool) -> Self:
        """Return a store, not open, on the engine of another one."""
        self = cls.__new__(cls)
        Store.__init__(self, read_only=read_only)
        self._engine = engine
        make_default()
        return self

    def _by_chunks(self) -> Self:
        """Return the store with the view of chunks, for programs that read keys of chunks."""
        options = self._engine.options
        if options.view == "chunks":
            return self
        engine = ShardingEngine(self.base, options.with_view("chunks"))
        return self._of(engine, self.read_only)

    @property
    def base(self) -> BaseStore:
        """The zarr store or the mapping that has the shards."""
        return self._engine.base

    # ----------------------------------------------------- open and capabilities

    async def _open(self) -> None:
        if self._is_open:
            raise ValueError("store is already open")
        await self._ensure_open()

    async def _ensure_open(self) -> None:
        if not self._is_open:
            base = self.base
            # The method of a writable LocalStore makes the directory, even for a read.
            if isinstance(base, Store) and (base.read_only or type(base) is not LocalStore):
                try:
                    await base._ensure_open()
                except ValueError:
                    # "already open": a thread with another event loop was faster.
                    if not base._is_open:
                        raise
            self._is_open = True

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyError

    def _check_can_grow(self) -> None:
        if not self.supports_deletes:
            raise UnsupportedError(
                f"in {self.base} nothing can be replaced, so no array can grow: append to another "
                "store, and copy it"
            )

    supports_writes = _as_base("supports_writes")
    supports_deletes = _as_base("supports_deletes")
    supports_listing = _as_base("supports_listing")
    supports_consolidated_metadata = _as_base("supports_consolidated_metadata")

    @property
    def _supports_sync_io(self) -> bool:
        # zarr's fused pipeline asks this. It writes chunk by chunk, which is cheap where a chunk is
        # appended to its shard.
        return self._engine.appends

    # -------------------------------------------------------------------- flows

    def _engine_for(self, value: Value | Modify | None) -> ShardingEngine:
        is_own = isinstance(value, Buffer) and type(value) is not cpu.Buffer
        return self._engine.of(type(value)) if is_own else self._engine  # type: ignore[arg-type]

    async def _run(self, flow: Flow[T], *, only_reads: bool = False) -> T:
        await self._ensure_open()
        # In a batch a read may flush. A commit must not wait for another commit in the worker pool.
        only_reads = only_reads and not self._engine.operations.buffer.is_active
        return await self._engine.driver.run_async(flow, only_reads=only_reads)

    async def _write(
        self, flow: Flow[None], engine: ShardingEngine | None = None, key: str | None = None
    ) -> None:
        """Run a flow that writes; one that stores the value of a key takes its turn."""
        self._check_writable()
        await self._ensure_open()
        engine = engine or self._engine
        if key is None or engine._arrays.current().chunks_of([key])[0] is not None:
            await engine.driver.run_async(flow)
            return
        async with engine.turn(key):
            await engine.driver.run_async(flow)
