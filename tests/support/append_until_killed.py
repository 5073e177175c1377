"""Processes that append frames or slabs, and tell what is stored, until the tests kill them.

Run as ``python append_until_killed.py``: it imports everything once, then forks one writer for
each line of JSON that it reads, and prints its number; ``{"wait": number}`` prints how that one
ended. A writer tells in a file of its own, ``log``. It kills itself before its system call number
``stop_at`` that changes files, or in the middle if that writes bytes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from tests.support.convert_once import open_store
from tests.support.kit import system_calls
from zarr_shardstore import ShardingStore

SHAPE = (4, 6)
CHUNKS = (3, 4, 3)
CHUNKS_PER_SHARD = (2, 1, 2)


def frame(number: int) -> np.ndarray[Any, Any]:
    """A frame that tells its number in each element, none of which is the fill value."""
    return np.arange(SHAPE[0] * SHAPE[1], dtype="u4").reshape(SHAPE) + 1000 * (number + 1)


@contextmanager
def stopping(stop_at: int | None) -> Iterator[None]:
    numbers = count()

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if name not in ("open_to_read", "scan") and next(numbers) == stop_at:
                if name == "write_at":
                    fd, pieces, offset = args
                    data = b"".join(pieces)
                    call(fd, [data[: len(data) // 2]], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return run

    with system_calls(wrap):
        yield


def append(request: dict[str, Any]) -> None:
    """Append so many frames to what is there, some in each flush."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    store = ShardingStore(open_store(request["where"]), CHUNKS_PER_SHARD)
    told = 0
    with stopping(request.get("stop_at")):
        options = {"flush_s": request.get("flush_s", float("inf"))}
        with store.append_frames("g/run", chunks=CHUNKS, **options) as writer:
            for i in range(request["n_frames"]):
                writer.append(frame(writer.n_appended))
                if i % 5 in request.get("flushes", ()):
                    writer.flush()
                time.sleep(request.get("pause_s", 0))
                if writer.n_durable > told:
                    told = writer.n_durable
                    os.write(log, b"%d\n" % told)
        os.write(log, b"%d\n" % writer.n_durable)


def append_slabs(request: dict[str, Any]) -> None:
    """Append so many rows to two arrays, one by one; tell the place and the number of each."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    store = ShardingStore(open_store(request["where"]), **request.get("options", {}))
    with stopping(request.get("stop_at")):
        for i in range(request["n_slabs"]):
            number = 1000 * request["writer"] + i + 1
            values = np.full((1, *SHAPE), number, "u4")
            first = store.append_arrays({"g/run": values, "g/time": [number]})
            os.write(log, b"%d %d\n" % (first, number))
            time.sleep(request.get("pause_s", 0))


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        process = os.fork()
        if process:
            print(process, flush=True)
            continue
        try:
            append_slabs(request) if "n_slabs" in request else append(request)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


if __name__ == "__main__":
    main()
