"""The simulation finds bugs that the package had, when they are put back, and others like them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError

from tests.simulation.object_store_runs import ObjectStoreRuns
from tests.simulation.programs import ViolationError, run_all, run_seed, without_gc
from tests.simulation.test_object_store import SMALL
from zarr_shardstore.io.backends import base, obstore
from zarr_shardstore.io.backends.obstore import ObstoreBackend
from zarr_shardstore.io.backends.remote_indexes import ObjectVersion
from zarr_shardstore.shards.requests import Delete

N_SEEDS = 5000


@contextmanager
def no_condition() -> Iterator[None]:
    """A shard is stored whether or not another writer has replaced it."""

    async def put(self: ObstoreBackend, key: str, value: bytes, _: object) -> object:
        with self._indexes.changing(key):
            await self._put_with("overwrite", key, value, "")
        return None

    with mock.patch.object(ObstoreBackend, "put_if", put):
        yield


@contextmanager
def equal_bytes_are_ours() -> Iterator[None]:
    """A refused write whose bytes are there counts as stored: two writers count from 1 to 2."""

    async def put(self: ObstoreBackend, key: str, value: bytes, expected: Any) -> object:
        with self._indexes.changing(key):
            try:
                return await self._put(key, value, expected, "")
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                found = await self._read_back(key)
                if found.value == memoryview(value):
                    return found.version
                raise base.ReplacedMeanwhileError(key) from None

    with mock.patch.object(ObstoreBackend, "put_if", put):
        yield


@contextmanager
def cached_index_is_believed() -> Iterator[None]:
    """The bytes of an entry are not compared with the version of the index."""
    with mock.patch.object(ObjectVersion, "__eq__", mock.Mock(return_value=True)):
        yield


@contextmanager
def last_write_id_only() -> Iterator[None]:
    """A write whose reply was lost is not found behind a later writer: it is applied twice."""
    with mock.patch.object(obstore, "_WRITE_IDS_NBYTES", 32):
        yield


@contextmanager
def missing_object_is_removed() -> Iterator[None]:
    """A commit that found no shard, and has none to store, removes that of another writer."""
    reply = obstore._Optimistic._reply

    async def remove(self: Any, request: Any) -> Any:
        if isinstance(request, Delete) and not self._expected.get(request.key):
            self._expected.pop(request.key, None)
        return await reply(self, request)

    with mock.patch.object(obstore._Optimistic, "_reply", remove):
        yield


BUGS = {
    no_condition: "two writers",
    equal_bytes_are_ours: "two equal updates",
    cached_index_is_believed: "a reader with a cached index",
    last_write_id_only: "two writers of one chunk",
    missing_object_is_removed: "group commit that ends as it began",
}
"""Each with the small program that shows it."""
RARE = missing_object_is_removed
"""It takes two clients of one process, and one of another."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_an_enumeration_finds_it(bug: Any) -> None:
    """Of all schedules of a small program."""
    with bug(), pytest.raises(ViolationError, match="schedule"):
        run_all(ObjectStoreRuns(), SMALL[BUGS[bug]])


@pytest.mark.parametrize("bug", [b for b in BUGS if b is not RARE], ids=lambda b: b.__name__)
def test_a_seed_finds_it_again(bug: Any) -> None:
    """Among few random schedules; the seed that is printed leads to the same schedule."""
    runs = ObjectStoreRuns()

    def search() -> None:
        for seed in range(N_SEEDS):
            run_seed(runs, seed)

    with bug(), without_gc():
        with pytest.raises(ViolationError) as found:
            search()
        text = str(found.value)
        seed = int(text.split("\n")[0].split("=")[1])
        with pytest.raises(ViolationError) as again:
            run_seed(ObjectStoreRuns(), seed)
        assert str(again.value) == text
