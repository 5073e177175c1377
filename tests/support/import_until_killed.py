"""Imports that the tests kill: processes that read a file of another format.

Run as ``python import_until_killed.py``: it imports everything once, then forks a process for each
line that it reads, waits for it, and prints how it ended.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import nullcontext
from threading import Thread
from typing import Any

from tests.support.processes import fork_for_each_line
from tests.support.write_until_killed import stop_at
from zarr_shardstore import import_store


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(seconds: float) -> None:
    time.sleep(seconds)
    kill()


def run(request: dict[str, Any]) -> None:
    n = request.get("n")
    if "seconds" in request:
        Thread(target=kill_after, args=(request["seconds"],), daemon=True).start()
    with nullcontext() if n is None else stop_at(n, False, kill, random.Random(n)):
        import_store(request["source"], request["destination"], **request["options"])


if __name__ == "__main__":
    import h5py  # noqa: F401  # once, before the forks

    fork_for_each_line(run)
