"""A process that is done ends with its own exit status, also where a client has threads of Rust."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import _thread, time
from zarr.storage import MemoryStore
from zarr_shardstore import ShardingStore

store = ShardingStore(MemoryStore(), 2)

def leave_late():  # as a thread of obstore does, between its reply and the end of its call
    begun.release()
    time.sleep(0.3)
    print("left", flush=True)

begun = _thread.allocate_lock()
begun.acquire()
_thread.start_new_thread(leave_late, ())
begun.acquire()
"""


def test_a_thread_that_python_does_not_know_leaves_before_the_end() -> None:
    """Before Python 3.14 the process aborts if such a thread comes back to an ended interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "left\n")


def test_a_thread_that_never_leaves_is_not_waited_for_without_end() -> None:
    forever = SCRIPT.replace("time.sleep(0.3)", "time.sleep(1000)")
    done = subprocess.run([sys.executable, "-c", forever], capture_output=True, timeout=120)
    assert done.returncode == 0


FORK = """
import os, signal
import obstore, zarr
from zarr.storage import ObjectStore
from zarr_shardstore import ShardingStore, UnsupportedError

base = ObjectStore(obstore.store.MemoryStore())
z = zarr.create_array(ShardingStore(base, 2), shape=(8,), chunks=(1,), dtype="u1")
z[:] = 1
child = os.fork()
if not child:
    signal.alarm(60)
    writes = [lambda: z.__setitem__(0, 2), lambda: z.__setitem__(slice(2, 4), 1)]
    for use in (lambda: z[:], *writes, lambda: zarr.open(ShardingStore(base))):
        try:
            use()
        except UnsupportedError as error:
            print(error)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_does_not_wait_for_a_client_of_its_parent() -> None:
    """A fork copies none of its threads, so no reply would come."""
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.count("start processes by 'spawn'") == 4


FRAMES = """
import sys
import numpy as np
from zarr.storage import MemoryStore
from zarr_shardstore import ShardingStore

writer = ShardingStore(MemoryStore(), 2).append_frames("run", flush_s=1000)
writer.append(np.zeros((4, 4), "u1"))
if sys.argv[1] == "closed":
    writer.close()
"""


@pytest.mark.parametrize("end", ["open", "closed"])
def test_a_program_that_leaves_a_writer_of_frames_open_is_warned(end: str) -> None:
    """No thread may be started then, so the frames cannot be stored."""
    command = [sys.executable, "-c", FRAMES, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert ("the last 1 frames of 'run' were never stored" in done.stderr) is (end == "open")
