"""Ctrl-C inside the standard library, where a writer waits for another or passes the lead on."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import zarr

from zarr_shardstore import ShardConflictError, ShardingMapping, ShardingStore

LIBRARY = threading.__file__, os.path.dirname(concurrent.futures.__file__)
"""Locks that are written in Python."""


class SlowOnce(dict[str, bytes]):
    """A base store in which the first write of a shard takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = False

    def __setitem__(self, key: str, value: bytes) -> None:
        if key.startswith("z/c") and not self.has_begun:
            self.has_begun = True
            time.sleep(0.02)
        super().__setitem__(key, value)

    def wait(self) -> None:
        while not self.has_begun:
            time.sleep(0.001)


def interrupted_at(n: int, work: Any) -> bool:
    """Do some work; raise at the n-th event of these modules in it. Return whether there were so
    many."""
    left = n

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return trace
        if event in ("line", "return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


@pytest.mark.parametrize("leads", [False, True])
def test_later_writes_end(leads: bool) -> None:
    """The main thread waits for a commit of another thread; or others wait for its own."""
    n, were_so_many = -1, True  # first without an interrupt
    while were_so_many:
        n += 1
        base = SlowOnce()
        store = ShardingStore(base, chunks_per_shard=8)
        zarr.create_array(store, name="z", shape=(16,), chunks=(2,), dtype="u4")
        chunks = ShardingMapping(store)

        def write(i: int, chunks: Any = chunks, base: SlowOnce = base) -> None:
            if i:
                base.wait()
            with suppress(ShardConflictError):  # the leader was interrupted
                chunks[f"z/c/{i}"] = b"%d" % i

        def first(chunks: Any = chunks) -> None:
            chunks["z/c/7"] = b"7"

        others = [threading.Thread(target=write, args=(i,), daemon=True) for i in (1, 2)]
        if not leads:
            others.append(threading.Thread(target=first, daemon=True))
        for thread in others:
            thread.start()
        if not leads:
            base.wait()
        were_so_many = interrupted_at(n, lambda write=write: write(0))
        base.has_begun = True
        others.append(threading.Thread(target=write, args=(3,), daemon=True))
        others[-1].start()
        for thread in others:
            thread.join(60)
            assert not thread.is_alive(), f"after an interrupt at event {n}"
        assert chunks["z/c/3"] == b"3"


@pytest.mark.parametrize("how", ["daemon", "no thread"])
def test_a_lead_that_is_passed_on_is_not_lost(how: str) -> None:
    """The main thread ends while others wait for it, or no thread can be started any more."""
    code = f"""
import threading, time
import zarr
from zarr_shardstore import ShardingMapping, ShardingStore
class Slow(dict):
    def __setitem__(self, key, value):
        if key.startswith("z/c"):
            begun.append(key)
            time.sleep(0.2)
        super().__setitem__(key, value)
        if len(begun) == 2 and key.startswith("z/c"):
            print("stored", flush=True)
begun = []
store = ShardingStore(Slow(), chunks_per_shard=8)
zarr.create_array(store, name="z", shape=(16,), chunks=(2,), dtype="u4")
chunks = ShardingMapping(store)
def other():
    while not begun:
        time.sleep(0.001)
    chunks["z/c/1"] = b"1"
threading.Thread(target=other, daemon=True).start()
if {how!r} == "no thread":
    def start(_):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = start
chunks["z/c/0"] = b"0"
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "stored\n"), done.stderr
