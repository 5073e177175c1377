"""Repairs that the tests kill or interrupt: processes that repair a store, or restore it.

Run as ``python repair_until_killed.py``: it imports everything once, then forks a process for each
line that it reads, waits for it, and prints how it ended.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import zarr_shardstore
from tests.support.processes import fork_for_each_line
from tests.support.write_until_killed import stop_at
from zarr_shardstore import check_store, repair_store, restore_quarantine

PACKAGE = os.path.dirname(zarr_shardstore.__file__) + os.sep


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_at(n: int) -> None:
    """Raise Ctrl-C before the n-th line of the package in this thread."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if frame.f_code.co_name == "check_store":  # the check after the repair
            sys.settrace(None)
            return None
        if event == "line":
            n -= 1
            if n == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)


def run(request: dict[str, Any]) -> None:
    path, n, quarantine = Path(request["path"]), request["n"], request["quarantine"]
    report = None if quarantine else check_store(path, level="decode")
    stopping: Any = nullcontext()
    if request["how"] == "kill":
        stopping = stop_at(n, False, kill, random.Random(n))
    with stopping:
        if request["how"] == "interrupt":
            interrupt_at(n)
        if report is None:
            restore_quarantine(path, quarantine)
        else:
            repair_store(report, dry_run=False)


if __name__ == "__main__":
    fork_for_each_line(run)
