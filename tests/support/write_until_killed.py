"""Writers that the tests kill: processes that write chunks, and say what they do, without end.

Run as ``python write_until_killed.py``: it imports everything once, then forks one writer for
each line ``{"fork": …}`` that it reads, and prints its number; ``{"wait": number}`` prints how
that one ended. What a writer is about to do, and that it was acknowledged, are lines of its log,
a file: what was written into it is there whatever becomes of the process.

A value of a chunk is known by its *layers*, each a start, a version and a size in bytes: the
first is the whole value, the others patches of it. Its bytes say everywhere which chunk and
which version they are of.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from zarr.core.buffer import cpu

from tests.support.any_size import HEADER, encode
from tests.support.kit import system_calls
from tests.support.side_files import is_side_file
from zarr_shardstore import ShardingMapping, ShardingStore

Layers: TypeAlias = list[list[int]]
State: TypeAlias = dict[int, Layers]

SIZES = (0, 1, 16, 40, 40, 300, 300, 5000)
MAX_LAYERS = 4


def content(i: int, layers: Layers) -> bytes:
    """The element that the chunk holds."""
    data = b""
    for start, version, nbytes in layers:
        text = b"<%d:%d>" % (i, version)
        piece = (text * (nbytes // len(text) + 1))[:nbytes]
        data = data[:start] + piece + data[start + nbytes :]
    return data


def stored(i: int, layers: Layers) -> bytes:
    """The bytes of the chunk."""
    return encode(content(i, layers))


def key_of(i: int) -> str:
    return f"z/c/{i}"


class Writer:
    """Makes random changes of its own chunks, one after the other.

    Parameters
    ----------
    m
        Where.
    store
        The same, async: it commits small changes in the event loop.
    mine
        Which chunks nobody else writes.
    state
        Layers of those that are there.
    version
        Greater than any before.
    """

    def __init__(
        self,
        m: ShardingMapping,
        store: ShardingStore,
        mine: list[int],
        state: State,
        version: int,
        rng: random.Random,
    ) -> None:
        self.m = m
        self.store = store
        self.mine = mine
        self.state = state
        self.version = version
        self.rng = rng

    def next_change(self) -> tuple[str, dict[int, Layers | None], Callable[[], None]]:
        """Name of an operation, what becomes of which chunks, and what does it."""
        rng, m = self.rng, self.m
        self.version += 1
        kinds = ("set", "set async", "update", "erase", "erase many", "erase all", "patch", "flush")
        (kind,) = rng.choices((*kinds, "map"), (6, 6, 4, 2, 1, 0.1, 4, 0.5, 4))
        some = rng.sample(self.mine, rng.randint(1, rng.choice((4, len(self.mine)))))
        new: dict[int, Layers | None] = {}
        if kind == "set":
            i = some[0]
            layers = self._new_layers()
            return kind, {i: layers}, lambda: m.set(key_of(i), stored(i, layers))
        if kind == "set async":
            i = some[0]
            layers = self._new_layers()
            value = cpu.Buffer.from_bytes(stored(i, layers))
            return kind, {i: layers}, lambda: asyncio.run(self.store.set(key_of(i), value))
        if kind == "update":
            several = {i: self._new_layers() for i in some}
            values = {key_of(i): stored(i, layers) for i, layers in several.items()}
            return kind, dict(several), lambda: m.update(values)
        if kind == "map":
            mapped = {i: self._new_layers() if rng.random() < 0.8 else None for i in some}
            changed = [
                None if layers is None else stored(i, layers) for i, layers in mapped.items()
            ]
            old = [stored(i, self.state[i]) if i in self.state else None for i in some]

            def change(found: list[bytes | None]) -> list[bytes | None]:
                assert found == old, "nobody else writes these chunks"
                return changed

            keys = [key_of(i) for i in some]
            return kind, mapped, lambda: m.update_values(keys, change)
        if kind == "patch":
            pieces = []
            for i in some[:4]:
                before = self.state.get(i, [])
                size = len(content(i, before))
                if not size or len(before) >= MAX_LAYERS:
                    continue
                start = rng.randrange(size)
                layer = [start, self.version, rng.randint(1, size - start)]
                after = content(i, [*before, layer])
                piece = after[start : start + layer[2]]
                new[i] = [*before, layer]
                pieces.append((key_of(i), HEADER.size + start, piece))
            return kind, new, lambda: m.set_partial_values(pieces)
        if kind == "flush":
            return kind, {}, m.flush
        if kind == "erase":
            some = some[:1]
        elif kind == "erase all":
            some = self.mine
        keys = [key_of(i) for i in some]
        return kind, dict.fromkeys(some), lambda: m.erase_values(keys)

    def _new_layers(self) -> Layers:
        return [[0, self.version, self.rng.choice(SIZES)]]


def applied(state: State, new: Mapping[int, Layers | None]) -> State:
    """The state after a change."""
    after = {**state, **new}
    return {i: layers for i, layers in after.items() if layers is not None}


# ------------------------------------------------------------------- the process


def stop_at(
    n: int, only_shards: bool, stop: Callable[[], None], rng: random.Random
) -> AbstractContextManager[None]:
    """Call `stop` before the n-th call that changes a file; writes are made in two halves, so
    that it may be in the middle of one. With `only_shards` only those count that change a shard
    in its place."""
    paths: dict[int, str] = {}

    def count(fd_or_path: int | str) -> None:
        nonlocal n
        path = paths.get(fd_or_path, "") if isinstance(fd_or_path, int) else ""
        if not only_shards or (path and not is_side_file(path)):
            n -= 1
            if n == 0:
                stop()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_call(first: Any, *args: Any, **options: Any) -> Any:
            count(first)
            found = call(first, *args, **options)
            if isinstance(found, int):
                paths[found] = first
            return found

        return count_and_call

    def in_halves(write_half: Callable[..., Any]) -> Callable[..., Any]:
        def write_at(fd: int, pieces: list[bytes], offset: int) -> None:
            data = b"".join(pieces)
            middle = rng.randint(0, len(data))
            write_half(fd, [data[:middle]], offset)
            write_half(fd, [data[middle:]], offset + middle)

        return write_at

    return system_calls(
        lambda name, call: in_halves(counted(call)) if name == "write_at" else counted(call)
    )


def wait_here(log: int) -> None:
    """Say so, and wait to be killed."""
    os.write(log, b'["here", {}]\n')
    time.sleep(600)


def write(request: dict[str, Any]) -> None:
    """Change chunks until killed; until the operation under way has ended if asked to end."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    try:
        rng = random.Random(request["seed"])
        if request["stop_at"]:
            n, only_shards = request["stop_at"]
            stopping = stop_at(n, only_shards, lambda: wait_here(log), rng)
            stopping.__enter__()  # for good, as long as it is referred to
        state = {int(i): layers for i, layers in request["state"].items()}
        m = ShardingMapping(request["path"], **request["options"])
        store = ShardingStore(request["path"], **request["options"])
        writer = Writer(m, store, request["mine"], state, request["version"], rng)
        while not ending:
            kind, new, change = writer.next_change()
            os.write(log, json.dumps([kind, new]).encode() + b"\n")
            change()
            os.write(log, b'["done", {}]\n')
            writer.state = applied(writer.state, new)
    except BaseException:
        os.write(log, json.dumps(["error", traceback.format_exc()]).encode() + b"\n")
        os._exit(1)
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "fork" in request:
            pid = os.fork()
            if pid == 0:
                write(request["fork"])
            print(pid, flush=True)
        else:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
