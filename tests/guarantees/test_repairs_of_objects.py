"""Repairs on object stores: another host that writes in between loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import obstore
import pytest
from obstore.store import MemoryStore
from zarr.storage import ObjectStore

from tests.support.checked_stores import KINDS
from tests.support.processes import s3_server
from tests.support.shared_shards import open_base
from zarr_shardstore import ShardConflictError, check_store, repair_store, restore_quarantine

SHARD = "a/c/1/1"
THEIRS = b"stored by another host"


@pytest.fixture(scope="module")
def new_store() -> Iterator[Callable[[str, str], Any]]:
    """Empty stores by the kind of their server, which is started when it is first needed."""
    with ExitStack() as stack:
        servers: dict[str, Any] = {}

        def new(server: str, path: str) -> Any:
            if server == "memory":
                return ObjectStore(MemoryStore())
            if server not in servers:
                servers[server] = stack.enter_context(s3_server())
            return open_base({**servers[server], "prefix": path})

        yield new


def objects_in(client: Any) -> dict[str, bytes]:
    found = [meta["path"] for page in obstore.list(client) for meta in page]
    quarantine = ".zarr_shardstore_quarantine"
    return {
        key: obstore.get(client, key).bytes().to_bytes()
        for key in found
        if not key.startswith(quarantine)
    }


@contextmanager
def another_host(client: Any, stores: str, when: Callable[[str, Any], bool]) -> Iterator[None]:
    """It stores an object before a write for which `when` is true; chunks are never removed."""
    put, delete, left = obstore.put_async, obstore.delete_async, [stores]

    async def put_later(store: Any, key: str, value: Any, **options: Any) -> Any:
        if left and when(key, options.get("mode")):
            await put(client, left.pop(), THEIRS)
        return await put(store, key, value, **options)

    async def delete_no_chunk(store: Any, keys: Any) -> Any:
        assert "/c/" not in str(keys), "a removal has no condition"
        return await delete(store, keys)

    with (
        mock.patch.object(obstore, "put_async", put_later),
        mock.patch.object(obstore, "delete_async", delete_no_chunk),
    ):
        yield
    assert not left, "it came"


def is_conditional(key: str, mode: Any) -> bool:
    return mode is not None and key == SHARD


@pytest.mark.parametrize("server", ["memory", "S3"])
@pytest.mark.parametrize("keep", ["salvage", "drop"])
def test_a_writer_between_quarantine_and_repair(
    keep: Any, server: str, new_store: Callable[[str, str], Any]
) -> None:
    """Its object stays, whether the repair would keep chunks, or would keep none. Without it the
    shard is repaired, and restored; a shard without chunks is replaced, not removed."""
    base = new_store(server, keep)
    client = base.store
    KINDS["v3 zstd"].make(base)
    whole = objects_in(client)
    obstore.put(client, SHARD, whole[SHARD][:-1] + b"?")
    damaged = objects_in(client)
    report = check_store(base)
    with another_host(client, SHARD, is_conditional):
        repaired = repair_store(report, keep=keep, dry_run=False)
    assert [action.did for action in repaired.actions] == ["left"]
    assert objects_in(client) == {**damaged, SHARD: THEIRS}
    obstore.put(client, SHARD, damaged[SHARD])
    with mock.patch.object(obstore, "delete_async", side_effect=AssertionError):
        repaired = repair_store(report, keep=keep, dry_run=False)
    assert [action.did for action in repaired.actions] == ["rewritten"]
    assert repaired.check is not None
    assert repaired.check.findings == ()
    with (
        another_host(client, SHARD, is_conditional),
        pytest.raises(ShardConflictError, match=SHARD),
    ):
        restore_quarantine(base, repaired.quarantine)
    assert objects_in(client) == {**damaged, SHARD: THEIRS}
    obstore.delete(client, SHARD)
    restore_quarantine(base, repaired.quarantine)
    assert objects_in(client) == damaged


def test_objects_that_would_be_removed() -> None:
    """They stay, and the report says so, in a dry run as well: a removal has no condition."""
    client = MemoryStore()
    KINDS["unsharded v3"].make(ObjectStore(client))
    obstore.put(client, SHARD, b"damaged")
    obstore.put(client, "a/c/7/7", b"outside")
    obstore.put(client, f"a/c/1/.{'0' * 32}.partial", b"")
    damaged = objects_in(client)
    report = check_store(ObjectStore(client), level="decode")
    for dry_run in (True, False):
        repaired = repair_store(report, keep="drop", dry_run=dry_run)
        did = {action.key: (action.did, action.message) for action in repaired.actions}
        assert [did[key][0] for key in sorted(did)] == ["removed", "left", "left"]
        assert all("condition" in did[key][1] for key in (SHARD, "a/c/7/7"))
    assert {**objects_in(client), f"a/c/1/.{'0' * 32}.partial": b""} == damaged
