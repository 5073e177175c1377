"""Ctrl-C where Python code of the standard library holds a lock: other threads go on.

`test_interrupts.py` interrupts the lines of this package, this file those of `threading`.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore, WrapperStore

from zarr_shardstore import ShardingStore


@contextmanager
def interrupted_at(n: int, event: str) -> Iterator[list[int]]:
    """Interrupt this thread at the n-th call, or return, of a lock's `__enter__` or `__exit__` in
    `threading`; yield a list that is as long as the calls that were seen."""
    seen: list[int] = []

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        code = frame.f_code
        is_lock = code.co_filename == threading.__file__ and code.co_name in (
            "__enter__", "__exit__", "__init__",
        )  # fmt: skip
        if not is_lock:
            return None
        if what == event:
            seen.append(len(seen))
            if len(seen) == n:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)


def ends(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Hanging(WrapperStore[MemoryStore]):
    """Replies when it is let. The first request that it holds is interrupted once."""

    is_held = has_interrupted = False

    async def get(self, *args: Any, **options: Any) -> Any:
        if self.is_held and not self.has_interrupted:
            self.has_interrupted = True
            main = threading.main_thread().ident, signal.SIGINT
            threading.Timer(0.1, signal.pthread_kill, main).start()
        while self.is_held:
            await asyncio.sleep(0.01)
        return await super().get(*args, **options)


@pytest.mark.skipif(sys.platform == "win32", reason="has no pthread_kill")
def test_a_base_store_that_does_not_reply_holds_nobody() -> None:
    """One interrupt ends a read of chunks. The next read has threads of its own."""
    base = Hanging(MemoryStore())
    store = ShardingStore(base, chunks_per_shard=8)
    options: Any = {"chunks": (64 << 10,), "dtype": "u1", "compressors": None}
    zarr.create_array(store, name="x", shape=(2 << 20,), **options)[:] = 7
    coords = [(i,) for i in range(32)]
    store.read_chunks("x", coords)
    base.is_held = True

    def release() -> None:
        base.is_held = False

    give_up = threading.Timer(60, release)
    give_up.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            store.read_chunks("x", coords)
    finally:
        signal.signal(signal.SIGINT, before)
    assert base.is_held, "it waited for the reply"
    give_up.cancel()
    release()
    assert (store.read_chunks("x", coords) == 7).all()


@pytest.mark.parametrize("event", ["call", "return"])
def test_reads_of_chunks(tmp_path: Path, event: str) -> None:
    """They share their threads with each other read of the process."""
    store = ShardingStore(tmp_path, chunks_per_shard=8)
    options: Any = {"chunks": (64 << 10,), "dtype": "u1", "compressors": None}
    z = zarr.create_array(store, name="x", shape=(2 << 20,), **options)
    z[:] = 7
    coords = [(i,) for i in range(32)] * 2
    n = 1
    while True:
        out = np.zeros((64, 64 << 10), "u1")
        with suppress(KeyboardInterrupt), interrupted_at(n, event) as seen:
            store.read_chunks("x", coords, out=out)
        left = out.copy()
        assert ends(lambda: store.read_chunks("x", coords))
        assert np.array_equal(out, left), "no thread writes into it after an interrupt"
        if len(seen) < n:
            assert (out == 7).all()
            break
        n += 1


@pytest.mark.parametrize("event", ["call", "return"])
def test_writers_of_frames(event: str) -> None:
    """The end of the block stores all frames of calls that returned; another writer may begin."""
    n = 1
    while True:
        store, n_kept = ShardingStore({}, chunks_per_shard=(2, 1)), 0
        zarr.create_array(store, name="run", shape=(0, 4), chunks=(1, 4), dtype="u2")
        with (
            store.append_frames("run", flush_s=60) as writer,
            suppress(KeyboardInterrupt, RuntimeError),
            interrupted_at(n, event) as seen,
        ):
            for _ in range(3):
                writer.append(np.ones(4, "u2"))
                n_kept += 1
        assert zarr.open_array(store, path="run").shape[0] >= n_kept
        if len(seen) < n:
            break
        n += 1


def test_a_writer_of_frames_that_is_not_made_locks_no_array() -> None:
    store = ShardingStore({}, chunks_per_shard=(2, 1))
    zarr.create_array(store, name="run", shape=(0, 4), chunks=(1, 4), dtype="u2")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(threading, "Condition", interrupt)
        store.append_frames("run")
    gc.collect()
    store.append_frames("run").close()
