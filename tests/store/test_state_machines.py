"""zarr's own state machines pass over `ShardingStore`: the store's, and the hierarchy's.

The machines compare with a MemoryStore, that they assume to be perfect, after each step: every
key, every value, every directory. Arrays are sharded here, so that it takes a `ShardingStore`.
zarr's hierarchy machine also makes arrays with ``shards=``; those are left to zarr, hence
``native="passthrough"``, or a store without ``chunks_per_shard``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, reject, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine

from tests.support.bases import temporary_directory
from tests.support.rounds import rounds
from zarr_shardstore import ShardingStore, SpecError

SHARDED = {"chunks_per_shard": 2, "native": "passthrough"}


def make_base(kind: str) -> Any:
    return MemoryStore() if kind == "memory" else LocalStore(temporary_directory())


def without_impossible_keys(set_value: Any) -> Any:
    """No file system holds both "a" and "a/b", and LocalStore fails as we do: draw other keys."""

    def set_or_reject(key: str, value: Any) -> None:
        try:
            set_value(key, value)
        except (IsADirectoryError, NotADirectoryError, FileExistsError):
            reject()

    return set_or_reject


def without_refused_keys(call: Any) -> Any:
    """Names such as ``.__shard``, which hypothesis takes from our source, are refused."""

    def call_or_reject(key: str, *args: Any, **options: Any) -> Any:
        try:
            return call(key, *args, **options)
        except SpecError as error:
            if "is refused" not in str(error):
                raise
            reject()

    return call_or_reject


@pytest.mark.parametrize("base", ["memory", "local"])
@pytest.mark.parametrize(
    ("machine", "options", "n_examples"),
    [
        (ZarrStoreStateMachine, SHARDED, 30),
        (ZarrHierarchyStateMachine, SHARDED, 20),
        (ZarrHierarchyStateMachine, {}, 5),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of zarr, about the arrays that the machine makes
def test_state_machine(base: str, machine: Any, options: dict[str, Any], n_examples: int) -> None:
    """Each example is a new store, and up to 50 steps."""

    def make() -> Any:
        store = ShardingStore(make_base(base), **options)
        sync(store._ensure_open())
        made = machine(store)
        if machine is ZarrStoreStateMachine:
            for name in ("set", "get", "exists", "delete"):
                setattr(made.store, name, without_refused_keys(getattr(made.store, name)))
            if base == "local":
                made.store.set = without_impossible_keys(made.store.set)
        return made

    factory: Any = make
    run_state_machine_as_test(
        factory,
        settings=settings(
            max_examples=rounds(n_examples),
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
