"""Engine of a loader: groups that are planned at a time."""

from __future__ import annotations

from typing import Any

import pytest
import zarr

from zarr_shardstore import ShardingStore, ShardLoader
from zarr_shardstore.interop.loader.engine import Task


def test_small_groups_are_planned_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `plan`, and in an epoch."""
    store = ShardingStore({}, chunks_per_shard=10)
    zarr.create_array(store, name="x", shape=10_000, chunks=(100,), dtype="i4")
    n_groups, plan = list[int](), Task.plan

    def counted(task: Task, numbers: Any, bounds: Any) -> Any:
        n_groups.append(len(bounds) - 1)
        return plan(task, numbers, bounds)

    monkeypatch.setattr(Task, "plan", counted)
    loader = ShardLoader(store, "x", batch_size=100, shuffle="full", pool_nbytes=0)
    for run in (loader.plan, lambda: list(loader)):
        run()
        assert len(n_groups) <= 5
        assert sum(n_groups) == 10_000
        n_groups.clear()
