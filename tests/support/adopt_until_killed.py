"""Adoptions that the tests kill or interrupt: processes that adopt files, or take that back.

Run as ``python adopt_until_killed.py``: it imports everything once, then forks a process for each
line that it reads, waits for it, and prints how it ended.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any

from tests.support.processes import fork_for_each_line
from tests.support.write_until_killed import stop_at
from zarr_shardstore import adopt, undo_adoption

MODULES = tuple(os.path.join("interop", "adopt", name) for name in ("adopt.py", "undo.py"))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def stop_at_line(n: int, stop: Any) -> None:
    """Kill the process, or raise Ctrl-C, before the n-th line of the modules of adoptions."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n
        if not frame.f_code.co_filename.endswith(MODULES):
            return None
        if event == "line":
            n -= 1
            if n == 0:
                sys.settrace(None)
                stop()
        return trace

    sys.settrace(trace)


def run(request: dict[str, Any]) -> None:
    n, how = request["n"], request["how"]
    stopping: Any = nullcontext()
    if how == "call":
        stopping = stop_at(n, False, kill, random.Random(n))
    with stopping:
        if how in ("line", "interrupt"):
            stop_at_line(n, kill if how == "line" else interrupt)
        if request["undo"]:
            undo_adoption(request["dest"])
        else:
            adopt(request["files"], request["dest"], link=request["link"])


if __name__ == "__main__":
    import h5py  # noqa: F401  # once, before the forks

    fork_for_each_line(run)
