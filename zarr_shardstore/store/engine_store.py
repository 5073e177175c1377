"""`EngineStore`: a zarr ``Store`` on an engine, opened and closed, with no operation yet."""

from __future__ import annotations

from inspect import isfunction
from typing import Self, TypeAlias, TypeVar

from zarr.abc.store import Store
from zarr.core.buffer import Buffer, cpu
from zarr.storage import LocalStore

from zarr_shardstore.errors import ReadOnlyError
from zarr_shardstore.io.backends.resolve import BaseStore
from zarr_shardstore.shards.requests import Flow, PartWrite
from zarr_shardstore.store.engine import ShardingEngine
from zarr_shardstore.zarr_hooks.pipeline import make_default

C = TypeVar("C")
T = TypeVar("T")
Value: TypeAlias = Buffer | bytes | bytearray | memoryview


def _as_base(name: str) -> property:
    """Delegate a capability flag to the base store; mappings have all."""
    return property(lambda self: getattr(self.base, name, True))


def part_of_sharding_store(cls: type[C]) -> type[C]:
    """Name the methods of a class as those of `ShardingStore`, the class that users know: in their
    pickles, and in warnings of coroutines that are not awaited."""
    for name, member in vars(cls).items():
        if isfunction(member):
            member.__module__ = "zarr_shardstore.store.sharding_store"
            member.__qualname__ = f"ShardingStore.{name}"
    return cls


@part_of_sharding_store
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
            # That of a LocalStore to be written to makes its directory, even for a read.
            if isinstance(base, Store) and (base.read_only or type(base) is not LocalStore):
                try:
                    await base._ensure_open()
                except ValueError:
                    # "already open": another thread, in a loop of its own, was faster.
                    if not base._is_open:
                        raise
            self._is_open = True

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyError

    supports_writes = _as_base("supports_writes")
    supports_deletes = _as_base("supports_deletes")
    supports_listing = _as_base("supports_listing")
    supports_consolidated_metadata = _as_base("supports_consolidated_metadata")

    @property
    def _supports_sync_io(self) -> bool:
        # zarr's fused pipeline asks this. It writes one chunk a thread at a time: cheap where a
        # chunk is appended to its shard, a rewrite of the shard elsewhere.
        return self._engine.appends

    # -------------------------------------------------------------------- flows

    def _engine_for(self, value: Value | PartWrite | None) -> ShardingEngine:
        is_own = isinstance(value, Buffer) and type(value) is not cpu.Buffer
        return self._engine.of(type(value)) if is_own else self._engine  # type: ignore[arg-type]

    async def _run(self, flow: Flow[T], *, only_reads: bool = False) -> T:
        await self._ensure_open()
        # In a batch a read may flush. A commit must not wait for another one in the worker pool.
        only_reads = only_reads and not self._engine.operations.buffer.is_active
        return await self._engine.driver.run_async(flow, only_reads=only_reads)

    async def _write(self, flow: Flow[None], engine: ShardingEngine | None = None) -> None:
        self._check_writable()
        await self._ensure_open()
        await (engine or self._engine).driver.run_async(flow)
