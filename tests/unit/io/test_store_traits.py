"""Identity of stores, and causes that are read in the errors of obstore."""

from __future__ import annotations

from typing import Any

import fsspec
import obstore.store
import pytest
from zarr.experimental.cache_store import CacheStore
from zarr.storage import FsspecStore, LoggingStore, MemoryStore, ObjectStore
from zarr.testing.store import LatencyStore

from zarr_shardstore.io.backends import store_traits
from zarr_shardstore.io.backends.store_traits import (
    may_belong_to_loop,
    note_cause,
    scope_of_store,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PUT http://169.254.169.254/latest/api/token in 1ms - 403 Forbidden", "no credentials"),
        (
            "GET http://h/b?X-Amz-Signature=abc - <Code>SignatureDoesNotMatch</Code>",
            "refuses these",
        ),
        ("GET http://h/c - <Code>AuthenticationFailed</Code>", "refuses these"),
        ("GET http://h/c - ContainerNotFound", "no such bucket"),
        ("GET http://h/c - dns error: no such host", "no server answers"),
        ("GET http://h/c - source: HttpError { kind: Interrupted, source: }", "was cut off"),
        ("GET http://h/c - 500 Internal Server Error", None),
    ],
)
def test_what_came_back(text: str, expected: str | None) -> None:
    """A query, which may be a signature, is left out; of another failure nothing is claimed."""
    error: Any = OSError(f"Generic S3 error: {text} Debug source: Generic {{ store }}")
    note_cause(error)
    note_cause(error)
    notes = getattr(error, "__notes__", [])
    assert len(notes) == (expected is not None)
    assert all(expected is not None and expected in note and "abc" not in note for note in notes)
    plain = OSError("GET http://h/c - dns error")
    note_cause(plain)
    assert not hasattr(plain, "__notes__")


def test_the_next_store_in_memory_is_another_one() -> None:
    """Also if it lies where the last one was: an `id` is given again."""
    obstore = pytest.importorskip("obstore")
    seen, before = set(), set(store_traits._tokens)
    for _ in range(50):
        client = obstore.store.MemoryStore()
        first, second = ObjectStore(client), ObjectStore(client)
        assert scope_of_store(first) == scope_of_store(second)
        seen.add(scope_of_store(first))
        del client, first, second
    assert len(seen) == 50
    assert not store_traits._tokens.keys() - before, "a token goes with its last store"


def test_stores_that_may_belong_to_an_event_loop() -> None:
    """Only stores are left out that are known to have nothing of one loop, not even a lock."""
    memory = MemoryStore()
    web = FsspecStore(fsspec.filesystem("http", asynchronous=True), path="http://localhost")
    remote = obstore.store.S3Store("b", credential_provider=lambda: None)  # type: ignore[arg-type]
    known: list[Any] = [memory, LoggingStore(memory), LatencyStore(memory)]
    known += [ObjectStore(obstore.store.S3Store("b")), FsspecStore.from_url("memory://x")]
    unknown: list[Any] = [CacheStore(memory, cache_store=MemoryStore()), web, ObjectStore(remote)]
    unknown.append(type("Own", (MemoryStore,), {})())
    assert not any(map(may_belong_to_loop, known))
    assert all(map(may_belong_to_loop, unknown))
