"""Sharding for Zarr, below the array: many chunks in one stored object.

Public names are resolved when they are first used, so that ``zarr_shardstore.format`` can be
imported without zarr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zarr_shardstore.errors import (
        CorruptShardError,
        CorruptValueError,
        ReadOnlyError,
        ShardConflictError,
        ShardStoreError,
        SpecError,
        UnfinishedConversionError,
        UnpublishedError,
        UnsupportedError,
    )
    from zarr_shardstore.io.counters import Stats
    from zarr_shardstore.io.index_cache import set_index_cache_nbytes
    from zarr_shardstore.plan.stack import ArrayContext, StorageTransformer, ValueTransformer
    from zarr_shardstore.store.draft_hierarchy import DraftHierarchyStore
    from zarr_shardstore.store.pipeline import ShardedCodecPipeline
    from zarr_shardstore.store.registry import register_storage_transformer
    from zarr_shardstore.store.sharding_mapping import ShardingMapping
    from zarr_shardstore.store.sharding_store import ShardingStore
    from zarr_shardstore.tools.convert import reshard, shard_store, unshard_store
    from zarr_shardstore.tools.info import get_shard_info, is_sharded
    from zarr_shardstore.tools.native import from_native, to_native
    from zarr_shardstore.tools.report import ArrayReport, ConversionReport, Progress

__version__ = "0.1.0"

__all__ = [
    "ArrayContext",
    "ArrayReport",
    "ConversionReport",
    "CorruptShardError",
    "CorruptValueError",
    "DraftHierarchyStore",
    "Progress",
    "ReadOnlyError",
    "ShardConflictError",
    "ShardStoreError",
    "ShardedCodecPipeline",
    "ShardingMapping",
    "ShardingStore",
    "SpecError",
    "Stats",
    "StorageTransformer",
    "UnfinishedConversionError",
    "UnpublishedError",
    "UnsupportedError",
    "ValueTransformer",
    "__version__",
    "from_native",
    "get_shard_info",
    "is_sharded",
    "register_storage_transformer",
    "reshard",
    "set_index_cache_nbytes",
    "shard_store",
    "to_native",
    "unshard_store",
]

_MODULES = {
    "Stats": "zarr_shardstore.io.counters",
    "set_index_cache_nbytes": "zarr_shardstore.io.index_cache",
    "ArrayContext": "zarr_shardstore.plan.stack",
    "ArrayReport": "zarr_shardstore.tools.report",
    "ConversionReport": "zarr_shardstore.tools.report",
    "Progress": "zarr_shardstore.tools.report",
    "reshard": "zarr_shardstore.tools.convert",
    "shard_store": "zarr_shardstore.tools.convert",
    "unshard_store": "zarr_shardstore.tools.convert",
    "StorageTransformer": "zarr_shardstore.plan.stack",
    "ValueTransformer": "zarr_shardstore.plan.stack",
    "DraftHierarchyStore": "zarr_shardstore.store.draft_hierarchy",
    "ShardedCodecPipeline": "zarr_shardstore.store.pipeline",
    "ShardingMapping": "zarr_shardstore.store.sharding_mapping",
    "ShardingStore": "zarr_shardstore.store.sharding_store",
    "get_shard_info": "zarr_shardstore.tools.info",
    "is_sharded": "zarr_shardstore.tools.info",
    "from_native": "zarr_shardstore.tools.native",
    "register_storage_transformer": "zarr_shardstore.store.registry",
    "to_native": "zarr_shardstore.tools.native",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULES.get(name, "zarr_shardstore.errors"))
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
