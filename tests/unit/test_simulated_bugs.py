"""The simulation finds bugs that the package had, when they are put back, and others like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError

from tests.simulation.local_runs import LocalRuns
from tests.simulation.object_store_runs import ObjectStoreRuns
from tests.simulation.programs import ViolationError, local_scenario, run_all, run_seed, without_gc
from tests.simulation.test_object_store import SMALL
from zarr_shardstore.io.backends import base, obstore
from zarr_shardstore.io.backends.obstore import ObstoreBackend
from zarr_shardstore.io.remote_indexes import Version
from zarr_shardstore.shards.requests import Delete

N_SEEDS = 20_000
"""At most."""


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
                found = await self._get_once(key, None)
                if found.value == memoryview(value):
                    return found.version
                raise base.ReplacedMeanwhileError(key) from None

    with mock.patch.object(ObstoreBackend, "put_if", put):
        yield


@contextmanager
def cached_index_is_believed() -> Iterator[None]:
    """The bytes of an entry are not compared with the version of the index."""
    with mock.patch.object(Version, "__eq__", mock.Mock(return_value=True)):
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


@pytest.mark.thorough(of=4)
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


# --------------------------------------------------------------------------- local files


def owner_is_not_compared() -> None:
    """A writer goes on with what it knows of the shard, though another process has appended."""
    from zarr_shardstore.io.local.shard_files import ShardFile

    def is_ours(self: ShardFile) -> bool:
        return self._writer is not None and self._journal is not None

    ShardFile._is_ours = is_ours  # type: ignore[method-assign]
    ShardFile._is_as_left = lambda *_: True  # type: ignore[method-assign]


def cached_file_is_believed() -> None:
    """The state of a file is not compared with that from before its index was read."""
    from zarr_shardstore.io.local.cached_files import CachedShardFile

    CachedShardFile.is_current = lambda *_: True  # type: ignore[method-assign]


def lock_of_a_removed_file_counts() -> None:
    """A lock counts although its file has lost its name: two writers have one each."""
    from zarr_shardstore.io.local import locks

    locks._has_name = lambda *_: True


def journal_is_not_read() -> None:
    """What a killed writer left is not repaired."""
    from zarr_shardstore.io.local import shard_files

    shard_files.find_repair_of = lambda *_: None


LOCAL_BUGS = [
    owner_is_not_compared,
    cached_file_is_believed,
    lock_of_a_removed_file_counts,
    journal_is_not_read,
]


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("bug", LOCAL_BUGS, ids=lambda bug: bug.__name__)
def test_a_seed_finds_it_on_local_files(bug: Callable[[], None]) -> None:
    """Among few random schedules, each process with the bug."""

    def search(runs: LocalRuns) -> None:
        for seed in range(N_SEEDS):
            run_seed(runs, seed, local_scenario)

    with (
        LocalRuns(prepare=bug) as runs,
        without_gc(),
        pytest.raises(ViolationError, match="schedule"),
    ):
        search(runs)
