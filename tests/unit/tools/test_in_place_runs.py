"""Runs of one conversion: tasks that outlive the first, and what the next one may change."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore, WrapperStore

from zarr_shardstore import (
    Progress,
    ShardConflictError,
    ShardingStore,
    ShardStoreError,
    check_store,
    shard_store,
    unshard_store,
)
from zarr_shardstore.tools.convert import in_place

VALUES = np.arange(1, 33, dtype="i4")


class Killed(BaseException):
    """Ends a conversion as a kill does, at a place that a test chooses."""


class Late(Executor):
    """Workers that outlive the command: it is killed after some tasks, and others are run later.

    A task that `has_asked` whether its run goes on, has done so just before the kill.
    """

    def __init__(self, n_done: int, has_asked: bool) -> None:
        self.n_done, self.has_asked = n_done, has_asked
        self.late: list[Callable[[], Any]] = []

    def submit(self, function: Any, /, task: Any, coords: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        if self.n_done:
            self.n_done -= 1
            future.set_result(function(task, coords))
        elif len(self.late) == 6:
            raise Killed
        task = replace(task, check_run=None) if self.has_asked else task
        self.late.append(partial(function, task, coords))
        return future

    def run_late(self) -> list[ShardStoreError]:
        """Run all tasks, also those that were done; return their errors."""
        errors = []
        for run in self.late:
            try:
                run()
            except ShardStoreError as error:
                errors.append(error)
        return errors


def make(path: Path) -> None:
    zarr.create_array(path, name="a", shape=(32,), chunks=(1,), dtype="i4")[:] = VALUES


def values(path: Path) -> Any:
    return zarr.open_array(ShardingStore(path), path="a", mode="r")[:]


def without_locks(path: Path) -> Any:
    """A store that moves objects as copies."""
    return WrapperStore(LocalStore(path))


@pytest.mark.parametrize("convert", [partial(shard_store, chunks_per_shard=2), unshard_store])
@pytest.mark.parametrize("store_of", [Path, without_locks])
@pytest.mark.parametrize("has_asked", [False, True])
def test_no_task_of_an_earlier_run_changes_what_a_later_one_stages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_asked: bool,
    store_of: Callable[[Path], Any],
    convert: Callable[..., Any],
) -> None:
    """They run when a part of their source is removed, moved, or all is done. The later run has
    what they had staged before."""
    monkeypatch.setattr(in_place, "_KEYS_A_ROUND", 3)
    make(tmp_path)
    if convert is unshard_store:
        shard_store(tmp_path, chunks_per_shard=2)
    workers = Late(4, has_asked), Late(2, has_asked)
    for executor in workers:
        with pytest.raises(Killed):
            convert(store_of(tmp_path), executor=executor)

    def late(progress: Progress | None = None) -> None:
        if progress is None or progress.n_objects:
            errors = [error for executor in workers for error in executor.run_late()]
            assert has_asked or len(errors) == 12

    report = convert(store_of(tmp_path), progress=late)
    assert report.arrays[0].n_resumed == 4
    late()
    assert np.array_equal(values(tmp_path), VALUES)
    shard_store(tmp_path, chunks_per_shard=4)
    assert np.array_equal(values(tmp_path), VALUES)
    assert check_store(tmp_path).findings == ()


def test_no_task_of_an_earlier_run_changes_what_users_write_to_the_destination(
    tmp_path: Path,
) -> None:
    make(tmp_path / "in")
    executor = Late(4, has_asked=False)
    with pytest.raises(Killed):
        shard_store(tmp_path / "in", tmp_path / "out", chunks_per_shard=2, executor=executor)
    report = shard_store(tmp_path / "in", tmp_path / "out", chunks_per_shard=2)
    assert report.arrays[0].n_resumed == 4
    zarr.open_array(ShardingStore(tmp_path / "out"), path="a")[:] = -VALUES
    assert len(executor.run_late()) == 6
    assert np.array_equal(values(tmp_path / "out"), -VALUES)


def test_a_run_that_another_one_took_over_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lock keeps a second command out, it has taken what the first one had staged."""
    make(tmp_path)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    def take_over(progress: Progress) -> None:
        if progress.n_tasks_done == progress.n_tasks:
            with monkeypatch.context() as patched, suppress(Killed):
                patched.setattr(in_place, "replace_values", kill)
                shard_store(without_locks(tmp_path), chunks_per_shard=2)

    with pytest.raises(ShardConflictError, match="was taken over"):
        shard_store(without_locks(tmp_path), chunks_per_shard=2, progress=take_over)
    assert np.array_equal(values(tmp_path), VALUES)
    assert shard_store(tmp_path, chunks_per_shard=2).arrays[0].n_resumed == 16
    assert np.array_equal(values(tmp_path), VALUES)


@pytest.mark.parametrize("version", ["this", "former"])
def test_a_document_that_is_put_back_between_the_removals_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Some old objects are gone, and staged ones are the only copy of their values. Former versions
    had one state for this and for the time before."""
    monkeypatch.setattr(in_place, "_KEYS_A_ROUND", 3)
    make(tmp_path)
    with pytest.warns(ZarrUserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(tmp_path)
    before = (tmp_path / "a/zarr.json").read_bytes()

    def kill(progress: Progress) -> None:
        if progress.n_objects == 6:
            raise Killed

    with pytest.raises(Killed):
        shard_store(tmp_path, chunks_per_shard=2, progress=kill)
    (manifest,) = tmp_path.glob(".zarr_shardstore/*/manifest.json")
    members = json.loads(manifest.read_text())
    assert members["state"] == "removing"
    if version == "former":
        (run,) = members.pop("runs")
        (manifest.parent / run).rename(manifest.parent / "values")
        manifest.write_text(json.dumps(members | {"state": "replacing"}))
    (tmp_path / "a/zarr.json").write_bytes(before)

    (note,) = unshard_store(tmp_path).notes
    assert np.array_equal(values(tmp_path / note.split("'")[3]), VALUES)
    group: Any = zarr.open_group(tmp_path, mode="r", use_consolidated=True)
    assert np.count_nonzero(group["a"][:] == VALUES) == 32 - 6
