"""The write strategies: how a shard is changed. An option of a store, never of its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from zarr_shardstore.plan.append import append_to_shard
from zarr_shardstore.plan.requests import Flow
from zarr_shardstore.plan.write import update_shard

__all__ = ["WRITE_FLOWS", "Strategy", "WriteStrategy"]

WriteStrategy: TypeAlias = Literal["rewrite", "append"]

Strategy: TypeAlias = Literal["auto", "rewrite", "append"]
"""What users choose: ``"auto"`` is ``"append"`` where the base store can do it."""

WRITE_FLOWS: dict[WriteStrategy, Callable[..., Flow[list[Exception | None]]]] = {
    "rewrite": update_shard,
    "append": append_to_shard,
}
"""By strategy: the flow that commits updates of one shard. All take the same arguments."""
