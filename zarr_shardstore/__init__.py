"""Sharding for Zarr, below the array: many chunks in one stored object.

Public names are resolved when they are first used, so that ``zarr_shardstore.format`` can be
imported without zarr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zarr_shardstore.arrays.registry import register_storage_transformer
    from zarr_shardstore.convert.api import reshard, shard_store, unshard_store
    from zarr_shardstore.convert.report import ArrayReport, ConversionReport, Progress
    from zarr_shardstore.draft.hierarchy_store import DraftHierarchyStore
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
    from zarr_shardstore.inspect.info import get_shard_info, is_sharded
    from zarr_shardstore.io.counters import Stats
    from zarr_shardstore.io.index_cache import set_index_cache_nbytes
    from zarr_shardstore.native.bridge import from_native, to_native
    from zarr_shardstore.shards.stack import ArrayContext, StorageTransformer, ValueTransformer
    from zarr_shardstore.store.pipeline import ShardedCodecPipeline
    from zarr_shardstore.store.sharding_mapping import ShardingMapping
    from zarr_shardstore.store.sharding_store import ShardingStore

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
    "ArrayContext": "zarr_shardstore.shards.stack",
    "ArrayReport": "zarr_shardstore.convert.report",
    "ConversionReport": "zarr_shardstore.convert.report",
    "Progress": "zarr_shardstore.convert.report",
    "reshard": "zarr_shardstore.convert.api",
    "shard_store": "zarr_shardstore.convert.api",
    "unshard_store": "zarr_shardstore.convert.api",
    "StorageTransformer": "zarr_shardstore.shards.stack",
    "ValueTransformer": "zarr_shardstore.shards.stack",
    "DraftHierarchyStore": "zarr_shardstore.draft.hierarchy_store",
    "ShardedCodecPipeline": "zarr_shardstore.store.pipeline",
    "ShardingMapping": "zarr_shardstore.store.sharding_mapping",
    "ShardingStore": "zarr_shardstore.store.sharding_store",
    "get_shard_info": "zarr_shardstore.inspect.info",
    "is_sharded": "zarr_shardstore.inspect.info",
    "from_native": "zarr_shardstore.native.bridge",
    "register_storage_transformer": "zarr_shardstore.arrays.registry",
    "to_native": "zarr_shardstore.native.bridge",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULES.get(name, "zarr_shardstore.errors"))
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
