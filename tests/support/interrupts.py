"""An exception at any line of the package, during one operation; then others go on.

Each case has processes of its own, so that a hang or a lock that stays held shows, too:

1. A *writer* stores some chunks, and begins an operation. At the n-th line that is executed inside
   the package an exception is raised (Ctrl-C, no memory), or the task is cancelled.
2. The same store then writes other chunks, and reads all.
3. A *second process* reads all, writes one more chunk, and ends as if it was killed.
4. The writer reads all again, flushes, and compacts. A strict reader, which is not ours, reads the
   files.

Nothing that was acknowledged may be lost, a change is whole in each shard or not there, no call
hangs or fails for good, and all readers agree.

``python -m tests.support.interrupts --help`` runs many cases, or the one that a test named.
"""

from __future__ import annotations

import argparse
import asyncio
import dis
import faulthandler
import gc
import importlib
import itertools
import json
import os
import pkgutil
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, TypeAlias

import numpy as np
import zarr
import zarr.api.asynchronous
from zarr.core.buffer import default_buffer_prototype

import zarr_shardstore
from tests.support.small_shards import (
    CHUNK_SHAPE,
    FORMS,
    GRID,
    N_CHUNKS,
    Form,
    Found,
    Model,
    create,
    described,
    in_memory,
    open_mapping,
    open_store,
    read_all,
    read_files,
    shape_of,
    shard_and_entry,
    value_of,
)
from zarr_shardstore import CorruptShardError, ShardingMapping, ShardingStore

PACKAGE = os.path.dirname(zarr_shardstore.__file__) + os.sep

Mode: TypeAlias = Literal["blocking", "async"]
Raised: TypeAlias = Literal["KeyboardInterrupt", "MemoryError", "cancel"]


# ---------------------------------------------------------------------------- operations

LOCKS_OF_DOCUMENTS = ("zarr.json.__lock", ".zarray.__lock", ".array.json.__lock")


class Client:
    """One store, reached by the blocking interface, or in an event loop."""

    def __init__(self, root: Path, form: Form, mode: Mode, strategy: Any) -> None:
        self.root, self.form, self.mode = root, form, mode
        self.store: ShardingStore = open_store(root, form, strategy=strategy)
        self.m = ShardingMapping(self.store)
        self.task: asyncio.Task[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def do(self, name: str, *args: Any) -> Any:
        """An operation that both interfaces have."""
        if self.mode == "blocking":
            return getattr(self.m, name)(*args)
        name = {"erase": "delete", "erase_prefix": "delete_dir"}.get(name, name)
        return self.run(getattr(self.store, name)(*args))

    def run(self, coro: Any) -> Any:
        """In an event loop of its own, as an application does."""

        async def task() -> Any:
            self.task, self.loop = asyncio.current_task(), asyncio.get_running_loop()
            return await coro

        with asyncio.Runner() as runner:
            return runner.run(task())

    def put(self, chunk: int, value: bytes) -> None:
        self.do("set", self.form.key(chunk), value)

    def put_many(self, values: Model) -> None:
        items = {self.form.key(chunk): value for chunk, value in values.items()}
        if self.mode == "blocking":
            self.m.update(items)
        else:
            self.run(self.store._set_or_erase(items.items()))

    def put_together(self, values: Model) -> None:
        """Each chunk by a task or a thread of its own."""
        if self.mode == "async":

            async def put_all() -> None:
                async with asyncio.TaskGroup() as tasks:
                    for chunk, value in values.items():
                        tasks.create_task(self.store.set(self.form.key(chunk), value))

            self.run(put_all())
            return

        errors: list[BaseException] = []

        def put(chunk: int, value: bytes) -> None:
            try:
                self.m.set(self.form.key(chunk), value)
            except BaseException as error:
                errors.append(error)

        first, *others = values.items()
        threads = [threading.Thread(target=put, args=item, daemon=True) for item in others]
        for thread in threads:
            thread.start()
        try:
            self.m.set(self.form.key(first[0]), first[1])
        finally:
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def read(self, chunks: Sequence[int]) -> Any:
        keys = [self.form.key(chunk) for chunk in chunks]
        if self.mode == "blocking":
            return self.m.get_partial_values([(key, (0, None)) for key in keys])
        prototype = default_buffer_prototype()
        return self.run(self.store.get_partial_values(prototype, [(key, None) for key in keys]))

    def put_in_batch(self, values: Model) -> None:
        if self.mode == "blocking":
            with self.m.batch():
                for chunk, value in values.items():
                    self.m.set(self.form.key(chunk), value)
            return

        async def put_all() -> None:
            async with self.store.batch():
                for chunk, value in values.items():
                    await self.store.set(self.form.key(chunk), value)

        self.run(put_all())

    def list_keys(self) -> Any:
        if self.mode == "blocking":
            return self.m.list_prefix(self.form.directory)

        async def keys() -> list[str]:
            return [key async for key in self.store.list_prefix(self.form.directory)]

        return self.run(keys())

    def resize(self, n_rows: int) -> None:
        shape = (n_rows * CHUNK_SHAPE[0], GRID[1] * CHUNK_SHAPE[1])
        if self.mode == "blocking":
            zarr.open_array(self.store, path="z", mode="r+").resize(shape)
            return

        async def resized() -> None:
            z = await zarr.api.asynchronous.open_array(store=self.store, path="z", mode="r+")
            await z.resize(shape)

        self.run(resized())

    def append(self, rows: Any) -> None:
        if self.mode == "blocking":
            zarr.open_array(self.store, path="z", mode="r+").append(rows)
            return

        async def appended() -> None:
            z = await zarr.api.asynchronous.open_array(store=self.store, path="z", mode="r+")
            await z.append(rows)

        self.run(appended())


@dataclass(frozen=True)
class Operation:
    """What is interrupted, and what it makes of the chunks.

    Parameters
    ----------
    is_loose
        It is made of several calls: each chunk by itself is old or new.
    """

    run: Callable[[Client], Any]
    after: Callable[[Model], Model] = lambda model: model
    is_loose: bool = False
    for_arrays: bool = False


def putting(call: Callable[[Client, Model], Any], values: Model, *, loose: bool = False) -> Any:
    return Operation(lambda c: call(c, values), lambda model: model | values, loose)


def erasing(call: Callable[[Client], Any], gone: Callable[[int], bool]) -> Operation:
    return Operation(call, lambda model: {i: v for i, v in model.items() if not gone(i)})


BEFORE: Model = {i: value_of(i, 1) for i in (0, 1, 5, 3, 8, 10, 11)}
"""Shard 0: three of six. Shard 1: two of four. Shard 2: two of three. Shard 3: none."""
FREE: Model = {i: value_of(i, 3) for i in (7, 9, 12, 14)}
"""What the same store writes afterwards, to each shard."""
SECOND: Model = {2: value_of(2, 4)}
"""What a second process writes."""

NEW = {6: value_of(6, 2)}
_APPENDED = np.arange(1, 2 * 80 + 1, dtype="u4").reshape(2, 80)


def _appended(model: Model) -> Model:
    columns = range(GRID[1])
    rows = {N_CHUNKS + i: _APPENDED[:, 16 * i : 16 * i + 16].tobytes() for i in columns}
    return model | rows


_PATCHES = [(0, 3, b"patched"), (1, 40, b"patched"), (3, 0, b"!"), (10, 5, b"also patched")]


def _patch(client: Client) -> None:
    client.do("set_partial_values", [(client.form.key(i), at, new) for i, at, new in _PATCHES])


def _patched(model: Model) -> Model:
    new = dict(model)
    for i, at, piece in _PATCHES:
        new[i] = new[i][:at] + piece + new[i][at + len(piece) :]
    return new


MANY = {i: value_of(i, 2) for i in (0, 6, 3, 10, 13)}

OPERATIONS: dict[str, Operation] = {
    "set": putting(lambda c, v: c.put(6, v[6]), NEW),
    "overwrite": putting(lambda c, v: c.put(1, v[1]), {1: value_of(1, 2)}),
    "set longer": putting(lambda c, v: c.put(1, v[1]), {1: value_of(1, 2, 30_000)}),
    "create": putting(lambda c, v: c.put(13, v[13]), {13: value_of(13, 2)}),
    "complete": putting(lambda c, v: c.put(12, v[12]), {12: value_of(12, 2)}),
    "update": putting(Client.put_many, MANY),
    "fill": putting(Client.put_many, {i: value_of(i, 2) for i in (10, 11, 12)}),
    "together": putting(Client.put_together, MANY | NEW | {1: value_of(1, 2)}, loose=True),
    "set_partial_values": Operation(_patch, _patched),
    "erase": erasing(lambda c: c.do("erase", c.form.key(1)), lambda i: i == 1),
    "erase_values": erasing(
        lambda c: c.do("erase_values", [c.form.key(i) for i in (0, 3, 8)]),
        lambda i: i in (0, 3, 8),  # of shard 1 nothing is left
    ),
    "erase_prefix": erasing(lambda c: c.do("erase_prefix", c.form.row(0)), lambda i: i < 5),
    "erase array": erasing(
        # Of v2 the metadata is in the same directory.
        lambda c: c.do(
            "erase_prefix", c.form.directory if c.form.hierarchy != "v2" else c.form.row(1)
        ),
        lambda i: True,
    ),
    "get": Operation(lambda c: c.do("get", c.form.key(1))),
    "get_partial_values": Operation(lambda c: c.read(range(N_CHUNKS))),
    "list_prefix": Operation(Client.list_keys),
    "flush": Operation(lambda c: c.do("flush")),
    "compact": Operation(lambda c: c.do("compact", "")),
    "batch": putting(Client.put_in_batch, MANY | {11: value_of(11, 2), 12: value_of(12, 2)}),
    "consolidate_index": Operation(lambda c: c.do("consolidate_index", "z")),
    "close": Operation(lambda c: c.store.close()),
    "append": Operation(lambda c: c.append(_APPENDED), _appended, is_loose=True, for_arrays=True),
    "resize": Operation(
        lambda c: c.resize(2),
        lambda model: {i: v for i, v in model.items() if i < 10},
        is_loose=True,
        for_arrays=True,
    ),
}


# --------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """Which operation, how, and at which of its lines what happens; 0: nothing."""

    operation: str
    mode: Mode = "blocking"
    strategy: str = "append"
    form: str = "v3-crc32c-end"
    warm: bool = True
    """The writer has the shards open; otherwise they were sealed, and are opened anew."""
    raised: Raised = "KeyboardInterrupt"
    line: int = 0

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def after(self, model: Model) -> Model:
        """What the operation makes of chunks, if it is whole."""
        if self.operation == "erase array" and FORMS[self.form].hierarchy == "v2":
            return {i: v for i, v in model.items() if not 5 <= i < 10}
        return OPERATIONS[self.operation].after(model)


def configurations() -> list[Case]:
    """All of them, without lines."""
    cases: list[Case] = []
    for operation, mode, strategy, form, warm in itertools.product(
        OPERATIONS, ("blocking", "async"), ("append", "rewrite"), FORMS, (True, False)
    ):
        hierarchy = FORMS[form].hierarchy
        if mode == "async" and (
            # zarr's stores have no such operation, or only for directories.
            operation in ("set_partial_values", "erase_values")
            or (operation in ("erase_prefix", "erase array") and hierarchy == "v2")
        ):
            continue
        if (OPERATIONS[operation].for_arrays and hierarchy == "draft") or (
            # Files that have just changed are waited for, two seconds.
            operation == "consolidate_index" and (warm or hierarchy != "v3")
        ):
            continue
        kinds: tuple[Raised, ...] = ("KeyboardInterrupt", "MemoryError")
        cases += [
            Case(operation, mode, strategy, form, warm, raised)  # type: ignore[arg-type]
            for raised in ((*kinds, "cancel") if mode == "async" else kinds)
        ]
    return cases


@dataclass
class Outcome:
    """What was seen of one case."""

    where: str = ""
    """The line at which it was raised; empty: there are fewer lines."""
    positions: tuple[str, ...] = ()
    """All lines, in the order in which they were executed, if nothing was raised."""
    result: str = "returned"
    failures: tuple[str, ...] = ()
    stack: str = ""
    """Of the writer, if it hangs."""


class Tracer:
    """Counts the lines that are executed inside the package, in all threads."""

    def __init__(self, case: Case, client: Client, parent: Connection) -> None:
        self._case, self.client, self._parent = case, client, parent
        self._is_on = False
        self._numbers = itertools.count(1)
        self._main = threading.get_ident()
        self.positions: list[str] = []

    def install(self) -> None:
        """Before any thread is started."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def start(self) -> None:
        self._is_on = True

    def stop(self) -> None:
        self._is_on = False

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._is_on and frame.f_code.co_filename.startswith(PACKAGE):
            # An interrupt is raised in the main thread only.
            is_main = threading.get_ident() == self._main
            return self._line if is_main or self._case.raised == "MemoryError" else None
        return None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or not self._is_on or frame.f_lasti in _ends_of_with(frame.f_code):
            return self._line
        if self._case.raised == "MemoryError" and frame.f_code.co_code[frame.f_lasti] == _NOP:
            return self._line  # a line with only ``try:`` allocates nothing
        number = next(self._numbers)
        if not self._case.line:
            self.positions.append(_place(frame))
        elif number == self._case.line:
            _say(self._parent, "raised", _place(frame))
            match self._case.raised:
                case "KeyboardInterrupt":
                    raise KeyboardInterrupt
                case "MemoryError":
                    raise MemoryError
                case "cancel":
                    task, loop = self.client.task, self.client.loop
                    if task is not None and loop is not None and not loop.is_closed():
                        loop.call_soon_threadsafe(task.cancel)
        return self._line


_NOP = dis.opmap["NOP"]


@cache
def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Where ``with`` calls ``__exit__`` after its block. There no signal is handled, and nothing is
    allocated: an exception is raised before, or within ``__exit__`` if that is Python."""
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("PRECALL", "CACHE")]
    ends = set()
    for n in range(1, len(steps) - 3):
        loads = steps[n : n + 3]
        if steps[n + 3].opname == "CALL" and all(
            step.opname == "LOAD_CONST" and step.argval is None for step in loads
        ):
            ends.add(steps[n].offset)
            if steps[n - 1].opname == "SWAP":  # below the value that is returned
                ends.add(steps[n - 1].offset)
    return frozenset(ends)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    path = code.co_filename.removeprefix(PACKAGE)
    thread = "" if threading.current_thread() is threading.main_thread() else " (thread)"
    return f"{path}:{frame.f_lineno} {code.co_qualname}{thread}"


# ----------------------------------------------------------------------------- processes


def _writer(case: Case, root: Path, parent: Connection) -> None:
    form = FORMS[case.form]
    create(root, form)
    client = Client(root, form, case.mode, case.strategy)
    tracer = Tracer(case, client, parent)
    tracer.install()
    client.put_many(BEFORE | {1: value_of(1, 0)})
    client.put(1, BEFORE[1])
    if not case.warm:
        client.do("flush")
        _make_old(root)
        client.store.close()
        client = tracer.client = Client(root, form, case.mode, case.strategy)
    _say(parent, "operation")
    result = "returned"
    tracer.start()
    try:
        OPERATIONS[case.operation].run(client)
    except BaseException as error:
        tracer.stop()
        result = f"raised {type(error).__name__}"
        if not _is_expected(error):
            result = f"failed: {error!r}"
    tracer.stop()
    sys.settrace(None)
    threading.settrace(None)
    client.task = None
    gc.collect()  # of the exception, which may keep a batch open
    _say(parent, "done", tuple(tracer.positions), result)
    for chunk, value in FREE.items():
        if chunk // GRID[1] >= shape_of(root, form)[0] // CHUNK_SHAPE[0]:
            continue
        _say(parent, "write")
        try:
            client.put(chunk, value)
        except BaseException as error:
            _say(parent, "failed", f"a later write of chunk {chunk}: {error!r}")
        else:
            _say(parent, "stored", chunk, value)
    _say(parent, "read")
    n = shape_of(root, form)[0] // CHUNK_SHAPE[0] * GRID[1]
    _say(parent, "found", "the same store", _read(client, n))
    _say(
        parent,
        "found",
        "another store of the process",
        read_all(open_mapping(root, form), form, range(n)),
    )
    _say(parent, "pause")
    parent.recv()
    _say(parent, "read again")
    _say(parent, "found again", "the same store", _read(client, n))
    for name, *arguments in (("flush",), ("compact", "")):
        _say(parent, name)
        try:
            client.do(name, *arguments)
        except Exception as error:
            _say(parent, "failed", f"{name}: {error!r}")
        _say(parent, "found again", f"the same store, after {name}", _read(client, n))
    _say(parent, "end")


def _make_old(root: Path) -> None:
    """Files that have just changed are waited for by some operations."""
    for directory, _, names in os.walk(root):
        for name in names:
            os.utime(os.path.join(directory, name), (1e9, 1e9))


def _is_expected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_expected, error.exceptions))
    return isinstance(
        error,
        KeyboardInterrupt
        | MemoryError
        | asyncio.CancelledError
        | zarr_shardstore.UnpublishedError
        | zarr_shardstore.ShardConflictError,
    )


def _read(client: Client, n: int) -> list[Found]:
    """All chunks by one call, which is another way than one by one."""
    try:
        values = client.read(range(n))
    except CorruptShardError:
        return read_all(client.m, client.form, range(n))
    return [None if v is None else v if isinstance(v, bytes) else v.to_bytes() for v in values]


def _second(case: Case, root: Path, parent: Connection) -> None:
    form = FORMS[case.form]
    m = open_mapping(root, form, strategy=case.strategy)
    n = shape_of(root, form)[0] // CHUNK_SHAPE[0] * GRID[1]
    _say(parent, "read by a second process")
    _say(parent, "found", "a second process", read_all(m, form, range(n)))
    for chunk, value in SECOND.items():
        _say(parent, "write by a second process")
        try:
            m.set(form.key(chunk), value)
        except BaseException as error:
            _say(parent, "failed", f"a write by a second process: {error!r}")
        else:
            _say(parent, "stored", chunk, value)
    _say(parent, "read by a second process")
    _say(parent, "found again", "a second process", read_all(m, form, range(n)))
    _say(parent, "end")


def _say(parent: Connection, what: str, *details: Any) -> None:
    parent.send((what, details))


class HangError(Exception):
    """A process has not answered for long."""


class _Child:
    """A forked process; it ends as if it was killed."""

    def __init__(self, run: Callable[..., None], case: Case, root: Path, timeout: float) -> None:
        self._connection, theirs = Pipe()
        self._timeout = timeout
        self._stack = root.parent / "stack"
        self.stage = "begin"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with open(self._stack, "w") as stack, open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), 2)
                    faulthandler.dump_traceback_later(timeout * 0.8, file=stack)
                    run(case, root, theirs)
            except BaseException:
                with suppress(OSError):
                    theirs.send(("died", (traceback.format_exc(),)))
            finally:
                os._exit(0)
        theirs.close()

    def replies(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """All that it says up to a pause, or its end."""
        end = time.monotonic() + self._timeout
        while True:
            if not self._connection.poll(max(0.0, end - time.monotonic())):
                raise HangError
            try:
                what, details = self._connection.recv()
            except EOFError:
                return
            if details:
                yield what, details
            else:
                self.stage = what
            if what == "pause":
                return

    def go_on(self) -> None:
        self._connection.send(None)

    def stack(self) -> str:
        return self._stack.read_text()

    def end(self) -> None:
        self._connection.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class _Check:
    """Compares what readers find with what was stored."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.old: Model = dict(BEFORE)
        self.new: Model = case.after(BEFORE)
        self.first: dict[int, Found] = {}
        """What was found first of each chunk that may be old or new."""
        self.later: Model = {}
        self.failures: list[str] = []

    def done(self, result: str) -> None:
        if result == "returned":
            self.old = self.new
        elif result.startswith("failed"):
            self.failures.append(f"the operation {result}")

    def found(self, who: str, values: Sequence[Found]) -> None:
        by_shard: dict[int, list[int]] = defaultdict(list)
        for chunk, value in enumerate(values):
            if chunk in self.later:
                self._compare(who, chunk, value, [self.later[chunk]])
            elif chunk in self.first:
                self._compare(who, chunk, value, [self.first[chunk]])
            else:
                allowed = [self.old.get(chunk), self.new.get(chunk)]
                if self._compare(who, chunk, value, allowed):
                    self.first[chunk] = value
                    if self.old.get(chunk) != self.new.get(chunk):
                        shard = -1 - chunk if chunk >= N_CHUNKS else shard_and_entry(chunk)[0]
                        by_shard[shard].append(chunk)
        if OPERATIONS[self.case.operation].is_loose:
            return
        for shard, chunks in by_shard.items():
            is_new = {values[chunk] == self.new.get(chunk) for chunk in chunks}
            if len(is_new) > 1:
                self.failures.append(f"{who}: half of the change in shard {shard}: {chunks}")

    def _compare(self, who: str, chunk: int, value: Found, allowed: list[Any]) -> bool:
        if value in allowed:
            return True
        wanted = " or ".join(dict.fromkeys(map(described, allowed)))
        self.failures.append(f"{who}: chunk {chunk} is {described(value)}, not {wanted}")
        return False


def run_case(case: Case, timeout: float = 30) -> Outcome:
    """Run one case in processes that are forked from this one, which must have no threads."""
    outcome = Outcome()
    check = _Check(case)
    form = FORMS[case.form]
    with in_memory() as directory:
        root = directory / "root"
        root.mkdir()
        writer = second = None

        def hear(child: _Child) -> None:
            for what, details in child.replies():
                match what:
                    case "raised":
                        (outcome.where,) = details
                    case "done":
                        outcome.positions, outcome.result = details
                        check.done(outcome.result)
                    case "stored":
                        check.later[details[0]] = details[1]
                    case "found" | "found again":
                        check.found(*details)
                    case "failed" | "died":
                        check.failures.append(details[0])

        try:
            child = writer = _Child(_writer, case, root, timeout)
            hear(writer)
            child = second = _Child(_second, case, root, timeout)
            hear(second)
            second.end()
            second = None
            writer.go_on()
            child = writer
            hear(writer)
        except HangError:
            check.failures.append(f"hangs: {child.stage}")
            outcome.stack = child.stack()
        except BrokenPipeError:
            check.failures.append("the writer has ended")
        else:
            check.found("a strict reader", read_files(root, form))
            left = [str(path.relative_to(root)) for path in root.rglob("*.__*")]
            # The next change of a document removes its lock, as `compact` does those of shards.
            left = [name for name in left if not name.endswith(LOCKS_OF_DOCUMENTS)]
            if left:
                check.failures.append(f"left after compact: {sorted(left)}")
        finally:
            for child_ in (writer, second):
                if child_ is not None:
                    child_.end()
    outcome.failures = tuple(check.failures)
    return outcome


def import_all() -> None:
    """What is imported late must not be imported while an exception is raised."""
    for module in pkgutil.walk_packages(zarr_shardstore.__path__, "zarr_shardstore."):
        if not module.name.endswith("__main__") and ".cli" not in module.name:
            with suppress(ImportError):
                importlib.import_module(module.name)


def lines_of(case: Case, timeout: float = 30) -> tuple[dict[str, list[int]], Outcome]:
    """Numbers of each line that an operation executes."""
    outcome = run_case(replace(case, line=0), timeout)
    lines: dict[str, list[int]] = defaultdict(list)
    for number, position in enumerate(outcome.positions, 1):
        lines[position].append(number)
    return lines, outcome


def sample(
    seed: int, n_configurations: int, n_lines: int, timeout: float = 30, **only: Any
) -> Iterator[tuple[Case, Outcome]]:
    """Some lines of some operations; first each operation as it is."""
    rng = random.Random(seed)
    by_operation: dict[str, list[Case]] = defaultdict(list)
    for case in configurations():
        if all(getattr(case, name) == value for name, value in only.items()):
            by_operation[case.operation].append(case)
    order = list(by_operation)
    rng.shuffle(order)
    for operation, _ in zip(itertools.cycle(order), range(n_configurations), strict=False):
        case = rng.choice(by_operation[operation])
        lines, outcome = lines_of(case, timeout)
        yield case, outcome
        some = rng.sample(sorted(lines), min(n_lines, len(lines)))
        for position in some:
            at = replace(case, line=rng.choice(lines[position]))
            yield at, run_case(at, timeout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", help="run one, as a failure names it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--lines", type=int, default=8, help="of each configuration")
    parser.add_argument("--all", action="store_true", help="each line of each configuration")
    parser.add_argument("--times", type=int, default=10**9, help="so often each line, with --all")
    parser.add_argument("--only", default="{}", help='JSON, e.g. {"strategy": "append"}')
    parser.add_argument("--timeout", type=float, default=30)
    parser.add_argument("--max-failures", type=int, default=10**9)
    parser.add_argument("--json", action="store_true", help="print each failure as a line of JSON")
    options = parser.parse_args()
    import_all()
    only = json.loads(options.only)
    if options.case:
        outcome = run_case(Case(**json.loads(options.case)), options.timeout)
        print(
            "\n".join([f"at {outcome.where}: {outcome.result}", *outcome.failures, outcome.stack])
        )
        sys.exit(bool(outcome.failures))
    found = (
        every_line(only, options.times, options.timeout)
        if options.all
        else sample(options.seed, options.configurations, options.lines, options.timeout, **only)
    )
    n, n_failed = 0, 0
    for case, outcome in found:
        n += 1
        if outcome.failures:
            n_failed += 1
            record = {
                "case": asdict(case), "where": outcome.where, "result": outcome.result,
                "failures": outcome.failures, "stack": outcome.stack,
            }  # fmt: skip
            print(
                json.dumps(record)
                if options.json
                else f"{case}\n  at {outcome.where}: {outcome.result}\n    "
                + "\n    ".join(outcome.failures),
                flush=True,
            )
            if n_failed >= options.max_failures:
                break
    print(
        json.dumps({"n": n, "n_failed": n_failed})
        if options.json
        else f"{n_failed} of {n} cases failed"
    )
    sys.exit(bool(n_failed))


def every_line(only: Any, times: int, timeout: float) -> Iterator[tuple[Case, Outcome]]:
    """Where each operation executes a line first, and where it does so last.

    Parameters
    ----------
    times
        At most so often the same line in one mode and strategy.
    """
    n_done: Counter[tuple[str, ...]] = Counter()
    for case in configurations():
        if not all(getattr(case, name) == value for name, value in only.items()):
            continue
        lines, outcome = lines_of(case, timeout)
        yield case, outcome
        print(f"# {case}: {len(lines)} lines", file=sys.stderr, flush=True)
        for position, numbers in lines.items():
            key = case.mode, case.strategy, case.raised, position
            for number in sorted({numbers[0], numbers[-1]}):
                if n_done[key] < times:
                    n_done[key] += 1
                    at = replace(case, line=number)
                    yield at, run_case(at, timeout)


if __name__ == "__main__":
    main()
