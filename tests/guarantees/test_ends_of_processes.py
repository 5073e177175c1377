"""A process that is done ends with its own exit status, also where a client has threads of Rust."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import _thread, time
from zarr.storage import MemoryStore
from zarr_shardstore import ShardingStore

store = ShardingStore(MemoryStore(), 2)

def leave_late():  # as a thread of obstore does, between its reply and the end of its call
    time.sleep(0.3)
    print("left", flush=True)

_thread.start_new_thread(leave_late, ())
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
