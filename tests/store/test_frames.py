"""Frames that are appended to an array: the array is as long as its frames are durable."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
from zarr.core.buffer import Buffer
from zarr.errors import ContainsArrayError
from zarr.storage import MemoryStore, ObjectStore

from tests.support.bases import OtherMapping
from tests.support.kit import objects_of
from zarr_shardstore import (
    ReadOnlyError,
    ShardConflictError,
    ShardingStore,
    SpecError,
    UnsupportedError,
)

SHAPE = (4, 6)
NEVER: dict[str, Any] = {"flush_s": float("inf")}


def frames(start: int, stop: int) -> np.ndarray[Any, Any]:
    """Frames that tell their numbers; none has the fill value."""
    values = np.arange(start + 1, stop + 1, dtype="u2")[:, None, None] * 100
    return values + np.arange(24, dtype="u2").reshape(SHAPE)


def stored(store: Any) -> Any:
    return zarr.open_array(store, path="g/run", mode="r")[:]


class Failing(OtherMapping):
    """A base store whose next changes of some keys fail."""

    fails: Callable[[str], bool] = staticmethod(lambda key: False)

    def __setitem__(self, key: str, value: bytes) -> None:
        if self.fails(key):
            raise OSError("the disk is full")
        super().__setitem__(key, value)


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("chunks_per_shard", [None, 2, "auto", (3, 1, 2)])
@pytest.mark.parametrize("create", [{}, {"chunks": (3, 2, 4)}, {"zarr_format": 2}])
@pytest.mark.parametrize("is_local", [True, False])
def test_all_frames_are_there(
    chunks_per_shard: Any, create: dict[str, Any], is_local: bool, tmp_path: Path
) -> None:
    """In an array that was made for them, however it is chunked and sharded, and continued by three
    writers, one by one and together, at the end of a chunk or within."""
    base: Any = tmp_path if is_local else {}
    store = ShardingStore(base, chunks_per_shard)
    for start, cuts in ((0, (1, 2, 7)), (7, (9, 12)), (12, (12, 31))):
        with store.append_frames("g/run", **NEVER, **create) as writer:
            for stop in cuts:
                writer.extend(frames(writer.n_appended, stop))
                writer.flush()
                assert writer.n_durable == stop
                np.testing.assert_array_equal(stored(store), frames(0, stop))
        assert (start, writer.n_appended) <= (stop, stop)
    if is_local and "zarr_format" not in create:
        np.testing.assert_array_equal(stored(str(tmp_path)), frames(0, 31))
    assert not [name for name in os.listdir(tmp_path) if "__" in name]


def test_an_array_of_others_is_continued(tmp_path: Path) -> None:
    """One that zarr has sharded itself; its attributes stay, and those that another program sets
    while frames come, although it puts back the shape that it knows."""
    z = zarr.create_array(
        str(tmp_path),
        name="g/run",
        shape=(5, *SHAPE),
        chunks=(1, 2, 3),
        shards=(4, 4, 6),
        dtype="u2",
    )
    z[:] = frames(0, 5)
    store = ShardingStore(tmp_path)
    with store.append_frames("g/run", frames(5, 9)) as writer:
        writer.flush()
        z.attrs["note"] = "look"
        writer.extend(frames(9, 12))
    array = zarr.open_array(str(tmp_path), path="g/run", mode="r")
    np.testing.assert_array_equal(array[:], frames(0, 12))
    assert (dict(array.attrs), array.shards) == ({"note": "look"}, (4, 4, 6))


@pytest.mark.filterwarnings("ignore:The data type")
@pytest.mark.parametrize("dtype", [str, "U3"])
def test_frames_that_are_texts(dtype: Any) -> None:
    """Shorter texts fit, and longer ones are refused where the array has a length."""
    store = ShardingStore({}, 2)
    with store.append_frames("run", dtype=dtype, **NEVER) as writer:
        writer.extend(["a", "bb"])
        writer.extend(["ccc"])
        if dtype == "U3":
            with pytest.raises(SpecError, match="<U4"):
                writer.extend(["dddd"])
        with pytest.raises(SpecError, match="int64"):
            writer.extend(np.arange(2))
    assert zarr.open_array(store, path="run")[:].tolist() == ["a", "bb", "ccc"]  # type: ignore[union-attr]


def test_frames_are_flushed_by_time() -> None:
    """Also the last one, after which none comes; and a copy of what the caller overwrites."""
    store = ShardingStore({}, 2)
    frame = frames(0, 1)[0]
    with store.append_frames("g/run", flush_s=0.01) as writer:
        writer.append(frame)
        frame[:] = 7
        limit = time.monotonic() + 30
        while writer.n_durable < 1:
            assert time.monotonic() < limit
            time.sleep(0.005)
        np.testing.assert_array_equal(stored(store), frames(0, 1))


def test_frames_are_flushed_by_bytes() -> None:
    """Whole shards only: each is stored once, and the rest at the end. The buffer is bounded."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, (4, 1, 1))
    n_bytes = frames(0, 10).nbytes
    with store.append_frames("g/run", **NEVER, flush_nbytes=n_bytes) as writer:
        for i in range(103):
            writer.append(frames(i, i + 1)[0])
            assert writer.n_durable % 4 == 0
            assert (writer.n_appended - writer.n_durable) * frames(0, 1).nbytes <= 2 * n_bytes
        assert writer.n_durable >= 80
        writer.extend(frames(103, 203))
    assert len([key for key in base if "/c/" in key]) == 51
    np.testing.assert_array_equal(stored(store), frames(0, 203))


@pytest.mark.parametrize("what", ["zarr.json", "/c/"])
def test_a_failing_store_loses_nothing(what: str) -> None:
    """Each call repeats the flush and raises its error, and its frame is not taken; the array keeps
    its length. When the store works again, everything is stored."""
    base = Failing()
    store = ShardingStore(base, 2)
    with store.append_frames("g/run", frames(0, 3), **NEVER) as writer:
        writer.flush()
        base.fails = lambda key: what in key
        writer.extend(frames(3, 5))
        with pytest.raises(OSError, match="disk is full"):
            writer.flush()
        for _ in range(2):
            with pytest.raises(OSError, match="disk is full"):
                writer.append(frames(5, 6)[0])
            assert (writer.n_durable, writer.n_appended) == (3, 5)
            np.testing.assert_array_equal(stored(store), frames(0, 3))
        base.fails = lambda key: False
        writer.append(frames(5, 6)[0])
        assert writer.n_durable >= 5
    np.testing.assert_array_equal(stored(store), frames(0, 6))


@pytest.mark.parametrize("what", ["zarr.json", "g/zarr.json", "g/run/zarr.json"])
def test_a_creation_that_fails_is_repeated(what: str) -> None:
    """By the next call, also if the document of the array was stored; never over one of others."""
    base = Failing()
    store = ShardingStore(base, 2)
    with store.append_frames("g/run", chunks=(1, *SHAPE), **NEVER) as writer:
        base.fails = lambda key: key == what
        for _ in range(2):
            with pytest.raises(OSError, match="disk is full"):
                writer.append(frames(0, 1)[0])
        base.fails = lambda key: False
        writer.extend(frames(0, 3))
    np.testing.assert_array_equal(stored(store), frames(0, 3))

    empty = Failing()
    writer = ShardingStore(empty, 2).append_frames("g/run", chunks=(1, *SHAPE), **NEVER)
    zarr.create_array(ShardingStore(empty, 2), name="g/run", shape=(0, *SHAPE), dtype="u2")
    for _ in range(2):
        with pytest.raises(ContainsArrayError):
            writer.append(frames(0, 1)[0])
    writer.close()

    other = Failing()
    writer = ShardingStore(other, 2).append_frames("g/run", chunks=(1, *SHAPE), **NEVER)
    other.fails = lambda key: key == "g/run/zarr.json"
    with pytest.raises(OSError, match="disk is full"):
        writer.append(frames(0, 1)[0])
    other.fails = lambda key: False
    other.update(base)
    for _ in range(2):
        with pytest.raises(ShardConflictError, match="another program"):
            writer.append(frames(3, 4)[0])
    writer.close()
    np.testing.assert_array_equal(stored(ShardingStore(other, 2)), frames(0, 3))


class HalfFailing(MemoryStore):
    """The document of the root fails at first, while that of a group takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.stored = True, list[str]()

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if self.fails and key == "zarr.json":
            raise OSError("the disk is full")
        if self.fails:
            await asyncio.sleep(0.2)
        await super().set_if_not_exists(key, value)
        self.stored.append(key)


def test_the_next_attempt_waits_for_documents_of_one_that_failed() -> None:
    """It would meet them half way, or they would go over what it stores."""
    base = HalfFailing()
    with ShardingStore(base, 2).append_frames("g/run", chunks=(1, *SHAPE), **NEVER) as writer:
        with pytest.raises(OSError, match="disk is full"):
            writer.append(frames(0, 1)[0])
        base.fails = False
        writer.extend(frames(0, 3))
        assert base.stored[0] == "g/zarr.json"
    np.testing.assert_array_equal(stored(ShardingStore(base)), frames(0, 3))


def test_attributes_that_put_an_older_end_back(tmp_path: Path) -> None:
    """On local files the end of the writer puts its own end there."""
    store = ShardingStore(tmp_path, 2)
    with store.append_frames("g/run", frames(0, 3), **NEVER) as writer:
        writer.flush()
        z = zarr.open_array(store, path="g/run")
        writer.extend(frames(3, 5))
        writer.flush()
        z.attrs["end"] = "12:00"
        assert len(stored(store)) == 3
    np.testing.assert_array_equal(stored(store), frames(0, 5))
    assert zarr.open_array(store, path="g/run").attrs["end"] == "12:00"


@pytest.mark.parametrize(
    "make", [dict, zarr.storage.MemoryStore, lambda: ObjectStore(obstore.store.MemoryStore())]
)
def test_an_older_end_that_no_lock_keeps_out_is_named(make: Callable[[], Any]) -> None:
    """The end of the writer raises. A resize brings the frames back, which are still stored."""
    store = ShardingStore(make(), 2)
    writer = store.append_frames("run", frames(0, 3), **NEVER)
    writer.flush()
    z = zarr.open_array(store, path="run")
    writer.extend(frames(3, 5))
    writer.flush()
    z.attrs["end"] = "12:00"
    with pytest.raises(ShardConflictError, match="has 3 frames, 5 were durable"):
        writer.close()
    z.resize((5, *SHAPE))
    np.testing.assert_array_equal(zarr.open_array(store, path="run")[:], frames(0, 5))


def test_the_end_tells_what_is_lost() -> None:
    """If the store does not take the rest; another writer continues after it."""
    base = Failing()
    store = ShardingStore(base, 2)
    writer = store.append_frames("g/run", frames(0, 3), **NEVER)
    writer.flush()
    writer.extend(frames(3, 5))
    base.fails = lambda key: True
    with pytest.raises(OSError, match="disk is full") as raised:
        writer.close()
    assert raised.value.__notes__ == ["2 frames after the first 3 are lost"]
    base.fails = lambda key: False
    writer.close()
    with store.append_frames("g/run") as continued:
        continued.extend(frames(continued.n_durable, 6))
    np.testing.assert_array_equal(stored(store), frames(0, 6))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_that_leaves_the_block_changes_nothing(tmp_path: Path) -> None:
    """The thread of the parent may have the lock at the fork: the child does not wait for it."""
    for _ in range(10):
        with ShardingStore(tmp_path, 4).append_frames("f", flush_s=0.0005) as writer:
            writer.append(np.ones((64, 64), "u2"))
            if not (child := os.fork()):
                signal.alarm(20)
                status = 1
                try:
                    writer.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    z: Any = zarr.open_array(ShardingStore(tmp_path), path="f")
    assert z.shape == (10, 64, 64)
    assert (z[:] == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_may_append_when_the_parent_has_ended(tmp_path: Path) -> None:
    def append(value: int) -> None:
        with ShardingStore(tmp_path, 4).append_frames("f") as writer:
            writer.append(np.full(2, value, "u1"))

    reader, end = os.pipe()
    with ShardingStore(tmp_path, 4).append_frames("f") as writer:
        writer.append(np.full(2, 1, "u1"))
        if not (child := os.fork()):
            signal.alarm(20)
            status = 1
            try:
                os.read(reader, 1)
                append(2)
                status = 0
            finally:
                os._exit(status)
    os.write(end, b"0")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    z: Any = zarr.open_array(ShardingStore(tmp_path), path="f")
    assert np.array_equal(z[:], [[1, 1], [2, 2]])


def test_threads_and_batches() -> None:
    """Frames of several threads are all there, those of a call together, and durable within an open
    batch of the store."""
    store = ShardingStore({}, 2)
    with store.batch(), store.append_frames("g/run", flush_s=0) as writer:
        blocks = [frames(i, i + 3) for i in range(0, 60, 3)]
        threads = [threading.Thread(target=writer.extend, args=(block,)) for block in blocks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.flush()
        found = stored(ShardingStore(store.base))
    order = np.argsort(found[::3, 0, 0])
    np.testing.assert_array_equal(found.reshape(20, 3, *SHAPE)[order], np.stack(blocks))


def test_another_writer_is_refused(tmp_path: Path) -> None:
    """Of the same process at the begin; of one that no lock keeps out when it comes later, and the
    array keeps what the first one told."""
    bases: tuple[Any, ...] = ({}, tmp_path)
    for base in bases:
        with (
            ShardingStore(base, 2).append_frames("g/run"),
            pytest.raises(ShardConflictError, match="already: close that writer"),
        ):
            ShardingStore(base, 2).append_frames("g/run")
        ShardingStore(base, 2).append_frames("g/run").close()
    base = OtherMapping()
    z = zarr.create_array(ShardingStore(base, 2), name="g/run", shape=(2, *SHAPE), dtype="u2")
    with (
        pytest.raises(ShardConflictError, match="has 9 frames, 2 were durable"),
        ShardingStore(base).append_frames("g/run", frames(2, 4), **NEVER),
    ):
        z.resize((9, *SHAPE))
    assert len(stored(ShardingStore(base))) == 9


def test_rows_that_others_append_are_not_overwritten(tmp_path: Path) -> None:
    """The next flush sees the end that another program has moved, before it stores a chunk."""
    bases: tuple[Any, ...] = ({}, tmp_path)
    for base in bases:
        writer = ShardingStore(base, 2).append_frames("g/run", **NEVER)
        writer.extend(frames(0, 3))
        writer.flush()
        assert ShardingStore(base).append_arrays({"g/run": frames(7, 9)}, axis=0) == 3
        writer.extend(frames(3, 8))
        with pytest.raises(ShardConflictError, match="has 5 frames, 3 were durable"):
            writer.flush()
        with pytest.raises(ShardConflictError, match="has 5 frames, 3 were durable"):
            writer.close()
        expected = np.concatenate([frames(0, 3), frames(7, 9)])
        np.testing.assert_array_equal(stored(ShardingStore(base)), expected)


def test_what_is_refused(tmp_path: Path) -> None:
    """Before anything is stored, with a sentence."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, 2)
    with pytest.raises(ReadOnlyError):
        store.with_read_only(True).append_frames("g/run")
    with pytest.raises(SpecError, match="flush_nbytes"):
        store.append_frames("g/run", flush_nbytes=0)
    with pytest.raises(SpecError, match="a first dimension, that of their number"):
        store.append_frames("g/run", 3)
    assert not base
    zarr.create_array(store, name="scalar", shape=(), dtype="u1")
    with pytest.raises(SpecError, match="no first dimension that can grow"):
        store.append_frames("scalar")
    with store.append_frames("g/run", frames(0, 2)) as writer:
        for bad in (frames(0, 1)[:, 1:], frames(0, 1).astype("f4"), frames(0, 1)[0]):
            with pytest.raises(SpecError, match=r"have the shape \(4, 6\) and are uint16"):
                writer.extend(bad)
    with pytest.raises(SpecError, match="is closed"):
        writer.append(frames(2, 3)[0])
    archive = ShardingStore(zarr.storage.ZipStore(tmp_path / "a.zip", mode="w"), 2)
    with pytest.raises(UnsupportedError, match="no array can grow"):
        archive.append_frames("g/run")
    assert objects_of(base)
    np.testing.assert_array_equal(stored(store), frames(0, 2))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_batch_around_stores_nothing_over_durable_frames(
    is_local: bool, is_first: bool, tmp_path: Path
) -> None:
    """What it has buffered of the array is stored before, and what comes meanwhile at once."""
    store = ShardingStore(tmp_path if is_local else {}, 4)
    z: Any = zarr.create_array(store, name="run", shape=(12, 2), chunks=(8, 2), dtype="i4")
    z[:] = 1
    with store.batch():
        if is_first:
            z[8] = 5
        with store.append_frames("run", **NEVER) as writer:
            if not is_first:
                z[8] = 5
                other: Any = zarr.open_array(ShardingStore(store.base), path="run")
                assert other[8, 0] == 5  # it is not buffered
            writer.extend(np.full((3, 2), 7, "i4"))
    assert writer.n_durable == 15
    again: Any = zarr.open_array(store, path="run")
    assert again[8:, 0].tolist() == [5, 1, 1, 1, 7, 7, 7]


def test_a_batch_that_shortens_an_array_erases_no_durable_frames() -> None:
    store = ShardingStore({}, 4)
    z: Any = zarr.create_array(store, name="run", shape=(4, 2), chunks=(1, 2), dtype="i4")
    z[:] = 1
    with store.batch():
        z.resize((2, 2))
        with store.append_frames("run", **NEVER) as writer:
            writer.extend(np.full((2, 2), 7, "i4"))
    again: Any = zarr.open_array(store, path="run")
    assert again[:, 0].tolist() == [1, 1, 7, 7]
