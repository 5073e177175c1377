"""Compaction of a whole store: removes the dead bytes of its shards, and reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.inspect.occupancy import read_shards
from zarr_shardstore.inspect.open_base import open_base
from zarr_shardstore.io.backends.resolve import BaseStoreLike
from zarr_shardstore.operations.upkeep import shards_below
from zarr_shardstore.shards.stack import run_above
from zarr_shardstore.store.sharding_mapping import ShardingMapping


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """Result of a compaction; of a dry run, the expected result."""

    n_shards: int
    n_compacted: int
    removed_nbytes: int
    errors: tuple[str, ...] = ()
    """Damages: the shards were left as they are."""
    dry_run: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compact_store(
    store: BaseStoreLike,
    prefix: str = "",
    *,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> CompactionReport:
    """Call `ShardingMapping.compact`, and measure each shard before and after.

    With `dry_run` the dead bytes are counted from the indexes, and nothing is changed.

    Cost: that of the compaction, and two requests for each shard.
    """
    mapping = ShardingMapping(store, storage_options=storage_options)
    base = open_base(mapping)
    base.check_replaceable()
    if not dry_run:
        base.check_writable()
    shards, errors = base.run(shards_below(mapping._engine.operations.listing, prefix))
    removed: list[int] = []
    failures: list[str] = []
    if dry_run:
        failures += map(str, errors)
        for shard, below in shards:
            (cell,) = base.run(run_above(below, read_shards([shard])))
            if cell is not None and cell.error:
                failures.append(cell.error)
            elif cell is not None:
                removed.append(cell.dead_nbytes)
    else:
        keys = [shard.key for shard, _ in shards]
        before = base.sizes(keys)
        try:
            mapping.compact(prefix)
        except ShardStoreError as error:
            failures.append(str(error))
        pairs = zip(before, base.sizes(keys), strict=True)
        removed += [(was or 0) - (now or 0) for was, now in pairs]
    n_compacted = sum(n != 0 for n in removed)
    return CompactionReport(len(shards), n_compacted, sum(removed), tuple(failures), dry_run)
