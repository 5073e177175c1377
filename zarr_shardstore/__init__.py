"""Sharding for Zarr, below the array: many chunks in one stored object.

A **shard** is one object of the *base store* that holds many chunks of an array. Each chunk is an
*entry*, the opaque bytes that zarr has encoded. The *shard index* has offset and size of each
entry::

    shard   ├── entry ── entry ── … ──┤ index: (offset, nbytes) of each entry [crc32c] ┤

A `ShardingStore` stands between zarr and the base store. zarr asks it for chunk keys such as
``foo/c/96/18``; the base store has shard keys such as ``foo/c/3/9``. The metadata document of the
array *declares* how many chunks a shard has. zarr sees a *view* of the document with plain chunks.

**A read** takes one request if the index of the shard is cached and still valid. Otherwise one
request reads the index and another the bytes. Reads of many chunks take the same two rounds:
ranges of one shard are coalesced.

**A write** becomes an update of its shard. The *update queue* lets one writer change a shard at a
time, and commits all waiting updates as a group. The *strategy* ``append`` writes into a gap of a
local file, protected by a *journal*; ``rewrite`` stores the whole shard again. A *batch* buffers
writes, so that each shard is stored once.

Each operation is a *flow*: a generator that yields requests and does no I/O. A *driver*, blocking
or async, runs the flow on a *backend*, which speaks to one kind of base store.
``spec_notes/architecture.md`` has the folders.

Public names are imported when they are first used. So ``zarr_shardstore.format`` can be imported
without zarr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `X as X`: type checkers take these for public names
    from zarr_shardstore.arrays.stored_array import (
        register_storage_transformer as register_storage_transformer,
    )
    from zarr_shardstore.errors import AlreadyExistsError as AlreadyExistsError
    from zarr_shardstore.errors import CorruptShardError as CorruptShardError
    from zarr_shardstore.errors import CorruptValueError as CorruptValueError
    from zarr_shardstore.errors import ReadOnlyError as ReadOnlyError
    from zarr_shardstore.errors import ShardConflictError as ShardConflictError
    from zarr_shardstore.errors import ShardStoreError as ShardStoreError
    from zarr_shardstore.errors import SpecError as SpecError
    from zarr_shardstore.errors import UnfinishedConversionError as UnfinishedConversionError
    from zarr_shardstore.errors import UnpublishedError as UnpublishedError
    from zarr_shardstore.errors import UnshardedWarning as UnshardedWarning
    from zarr_shardstore.errors import UnsupportedError as UnsupportedError
    from zarr_shardstore.interop.adopt.adopt import AdoptionReport as AdoptionReport
    from zarr_shardstore.interop.adopt.adopt import adopt as adopt
    from zarr_shardstore.interop.adopt.adopt import undo_adoption as undo_adoption
    from zarr_shardstore.interop.draft.hierarchy_store import (
        DraftHierarchyStore as DraftHierarchyStore,
    )
    from zarr_shardstore.interop.importing.importing import import_store as import_store
    from zarr_shardstore.interop.loader.engine import LoaderStats as LoaderStats
    from zarr_shardstore.interop.loader.loader import ShardLoader as ShardLoader
    from zarr_shardstore.interop.loader.plan import LoaderPlan as LoaderPlan
    from zarr_shardstore.interop.references.references import stale_references as stale_references
    from zarr_shardstore.interop.references.references import to_references as to_references
    from zarr_shardstore.io.driver import Stats as Stats
    from zarr_shardstore.io.local.cached_files import (
        set_index_cache_nbytes as set_index_cache_nbytes,
    )
    from zarr_shardstore.shards.stack import ArrayContext as ArrayContext
    from zarr_shardstore.shards.stack import StorageTransformer as StorageTransformer
    from zarr_shardstore.shards.stack import ValueTransformer as ValueTransformer
    from zarr_shardstore.store.sharding_mapping import ShardingMapping as ShardingMapping
    from zarr_shardstore.store.sharding_store import ShardingStore as ShardingStore
    from zarr_shardstore.tools.check.check_store import check_store as check_store
    from zarr_shardstore.tools.check.findings import CheckReport as CheckReport
    from zarr_shardstore.tools.check.findings import Finding as Finding
    from zarr_shardstore.tools.check.quarantine import restore_quarantine as restore_quarantine
    from zarr_shardstore.tools.check.repair import RepairAction as RepairAction
    from zarr_shardstore.tools.check.repair import RepairReport as RepairReport
    from zarr_shardstore.tools.check.repair import repair_store as repair_store
    from zarr_shardstore.tools.convert.api import reshard as reshard
    from zarr_shardstore.tools.convert.api import shard_store as shard_store
    from zarr_shardstore.tools.convert.api import unshard_store as unshard_store
    from zarr_shardstore.tools.convert.report import ArrayReport as ArrayReport
    from zarr_shardstore.tools.convert.report import ConversionReport as ConversionReport
    from zarr_shardstore.tools.convert.report import Progress as Progress
    from zarr_shardstore.tools.inspect.info import get_shard_info as get_shard_info
    from zarr_shardstore.tools.inspect.info import is_sharded as is_sharded
    from zarr_shardstore.tools.native.bridge import from_native as from_native
    from zarr_shardstore.tools.native.bridge import to_native as to_native
    from zarr_shardstore.zarr_hooks.pipeline import ShardedCodecPipeline as ShardedCodecPipeline

__version__ = "0.2.0"

_MODULES = {
    name: f"zarr_shardstore.{module}"
    for module, names in {
        "arrays.stored_array": "register_storage_transformer",
        "tools.check.check_store": "check_store",
        "tools.check.findings": "CheckReport Finding",
        "tools.check.quarantine": "restore_quarantine",
        "tools.check.repair": "RepairAction RepairReport repair_store",
        "tools.convert.api": "reshard shard_store unshard_store",
        "tools.convert.report": "ArrayReport ConversionReport Progress",
        "interop.adopt.adopt": "AdoptionReport adopt undo_adoption",
        "interop.references.references": "stale_references to_references",
        "interop.importing.importing": "import_store",
        "interop.loader.engine": "LoaderStats",
        "interop.loader.loader": "ShardLoader",
        "interop.loader.plan": "LoaderPlan",
        "interop.draft.hierarchy_store": "DraftHierarchyStore",
        "errors": "AlreadyExistsError CorruptShardError CorruptValueError ReadOnlyError "
        "ShardConflictError ShardStoreError SpecError UnfinishedConversionError UnpublishedError "
        "UnshardedWarning UnsupportedError",
        "tools.inspect.info": "get_shard_info is_sharded",
        "io.driver": "Stats",
        "io.local.cached_files": "set_index_cache_nbytes",
        "tools.native.bridge": "from_native to_native",
        "shards.stack": "ArrayContext StorageTransformer ValueTransformer",
        "zarr_hooks.pipeline": "ShardedCodecPipeline",
        "store.sharding_mapping": "ShardingMapping",
        "store.sharding_store": "ShardingStore",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_MODULES, "__version__"])
