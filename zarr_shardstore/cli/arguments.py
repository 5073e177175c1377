"""Arguments of the commands: parsers of texts, questions to the user, and executors."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import typer

from zarr_shardstore.access import resolve
from zarr_shardstore.cli import output
from zarr_shardstore.cli.parameters import EXECUTOR
from zarr_shardstore.errors import SpecError, UnsupportedError

Rule: TypeAlias = "str | int | tuple[int, ...] | dict[str, int] | None"

Work: TypeAlias = Callable[[], AbstractContextManager[dict[str, Any]]]

_DASK_WAIT_S = 10


def parse_all(options: dict[str, Any]) -> dict[str, Any]:
    """Parse the options of a command; `work` replaces the three options of `EXECUTOR`."""
    options = {name: _parse(name, value) for name, value in options.items()}
    if "workers" in options:
        options["work"] = partial(working, *[options.pop(name) for name in EXECUTOR.split()])
    return options


def _parse(name: str, value: Any) -> Any:
    match name:
        case "source" | "store" | "replica":
            return None if value is None else check_source(value)
        case "chunks_per_shard":
            return parse_chunks_per_shard(value) if value else ...
        case "shards_at":
            return parse_shards_at(value) if value else None
        case "storage_options" | "source_options" | "destination_options":
            return parse_storage_options(value)
        case "paths" | "arrays":
            return value or None
        case "region":
            return parse_region(value)
    return value


def parse_chunks_per_shard(values: Sequence[str]) -> Rule | dict[str, Rule]:
    """Parse the option ``--chunks-per-shard``, one value or one for each pattern."""
    if len(values) == 1 and "=" not in values[0]:
        return _rule_of(values[0])
    rules: dict[str, Rule] = {}
    for value in values:
        by_dimension = re.fullmatch(r"(?:([^=]*)=)?([^=,/]+=[0-9]+(?:,[^=,/]+=[0-9]+)*)", value)
        pattern, sign, rule = value.rpartition("=")
        if by_dimension and ("," in by_dimension[2] or by_dimension[1] is not None):
            pairs = (pair.split("=") for pair in by_dimension[2].split(","))
            pattern = "*" if by_dimension[1] is None else by_dimension[1]
            rules[pattern] = {name.strip(): int(n) for name, n in pairs}
        elif sign:
            rules[pattern] = _rule_of(rule)
        else:
            why = f"{value!r} is for all arrays, and so cannot be one of several: write '*={value}'"
            raise _bad("--chunks-per-shard", why)
    return {**rules, "*": rules.pop("*")} if "*" in rules else rules


def _rule_of(text: str) -> Rule:
    if text in ("auto", "none"):
        return "auto" if text == "auto" else None
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise _bad(
            "--chunks-per-shard",
            f"{text!r} is no number of chunks: write 'auto', 'none', '8' for every dimension, "
            "or '8,8,4', or these for a pattern of paths: 'raw/*=8,8,4'",
        )
    return numbers[0] if len(numbers) == 1 else numbers


def _bad(option: str, why: str) -> typer.BadParameter:
    return typer.BadParameter(why, param_hint=f"'{option}'")


def parse_shards_at(values: Sequence[str]) -> dict[str | int, list[int]]:
    """Parse the option ``--shards-at``: the dimension, by name or number, and the places."""
    places: dict[str | int, list[int]] = {}
    for value in values:
        found = re.fullmatch(r"([^=]+)=([0-9]+(?:,[0-9]+)*)", value)
        if found is None:
            why = f"{value!r} is no list of places: write 'time=31,59,90', or '0=31,59,90'"
            raise _bad("--shards-at", why)
        dim = found[1].strip()
        places[int(dim) if dim.isdecimal() else dim] = [int(n) for n in found[2].split(",")]
    return places


def parse_storage_options(values: Sequence[str] | None) -> dict[str, Any] | None:
    options: dict[str, Any] = {}
    for value in values or ():
        key, sign, text = value.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"{value!r} is no 'key=value'")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options or None


def parse_region(text: str | None) -> tuple[slice, ...] | None:
    if text is None:
        return None
    parts = [re.fullmatch(r"\s*(?:([0-9]*):([0-9]*)|([0-9]+))\s*", p) for p in text.split(",")]
    ranges = []
    for part in parts:
        if part is None:
            why = f"{text!r} is no region: write a range for each dimension, as '0:100,:'"
            raise _bad("--region", why)
        start, stop, only = (None if not n else int(n) for n in part.groups())
        ranges.append(slice(start, stop) if only is None else slice(only, only + 1))
    return tuple(ranges)


def check_source(store: str) -> str:
    """Refuse a missing local store, which would open as an empty one."""
    path = resolve.local_path(store)
    if path is not None and not path.is_dir() and not zipfile.is_zipfile(path):
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise SpecError(f"the store {store!r} {what}")
    return store


def confirm(warning: str, other_way: str, *, is_confirmed: bool) -> None:
    """Ask before the command continues, unless confirmed; without a terminal say what to do."""
    if is_confirmed:
        return
    if not _can_ask():
        typer.echo(f"nothing was done: {warning}; say --yes to do that, or {other_way}", err=True)
        raise typer.Exit(2)
    question = f"{warning[0].upper()}{warning[1:]} (or {other_way}). Go on?"
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if not is_sure:
        typer.echo("nothing was done", err=True)
        raise typer.Exit(1)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def is_same(source: str, destination: str) -> bool:
    one, other = resolve.local_path(source), resolve.local_path(destination)
    if one is not None and other is not None:
        return os.path.realpath(one) == os.path.realpath(other)
    return source.rstrip("/") == destination.rstrip("/")


@contextmanager
def working(workers: int | None, processes: bool, dask: str | None) -> Iterator[dict[str, Any]]:
    """Make the arguments of a tool that runs tasks: an executor, and a display of progress."""
    with executor_of(workers, processes, dask) as executor, output.progress_on_stderr() as progress:
        yield {"executor": executor, "progress": progress}


@contextmanager
def executor_of(
    workers: int | None, processes: bool, dask: str | None = None
) -> Iterator[Executor | None]:
    """Make the executor that three options select; ``None``: the tools make their own."""
    if dask is not None:
        if workers is not None or processes:
            why = "a dask cluster has workers of its own: leave --workers and --processes away"
            raise _bad("--dask", why)
        with _dask_client(dask) as client:
            yield client.get_executor(pure=False)
        return
    if workers is None and not processes:
        yield None
        return
    executor: Executor = ThreadPoolExecutor(workers)
    if processes:
        executor = ProcessPoolExecutor(
            workers,
            # Spawned, not forked: threads of this process may hold locks.
            multiprocessing.get_context("spawn"),
            initializer=_start_worker,
        )
    try:
        yield executor
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()


def _start_worker() -> None:
    """Ignore interrupts, to which the command reacts, and end with the command if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_command, daemon=True).start()


def _end_with_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _dask_client(scheduler: str) -> Any:
    """Connect to a dask cluster, by the address of its scheduler or its scheduler file."""
    try:
        from distributed import Client
    except ImportError as error:
        raise UnsupportedError(
            "--dask needs dask.distributed: pip install 'zarr-shardstore[dask]', in the "
            "environment of the workers, too"
        ) from error
    options = {"address": scheduler}
    connecting = Future[Any]()

    def connect() -> None:
        try:
            client = Client(**options, timeout=_DASK_WAIT_S, set_as_default=False)
            connecting.set_result(client)
        except Exception as error:
            connecting.set_exception(error)

    try:
        if scheduler.endswith(".json"):
            os.stat(scheduler)  # the client would wait for the file
            options = {"scheduler_file": scheduler}
        # The client waits without an end for a server that speaks another protocol.
        threading.Thread(target=connect, daemon=True).start()
        client = connecting.result(1.5 * _DASK_WAIT_S)
    except (OSError, ValueError, MemoryError) as error:
        reason = str(error) or "no answer"
        raise SpecError(
            f"no dask scheduler answers at {scheduler!r} ({reason}): pass the address that "
            "`dask scheduler` prints, as tcp://10.0.0.1:8786, or its --scheduler-file"
        ) from error
    if not client.scheduler_info()["workers"]:
        typer.echo("waiting for a worker: the dask cluster has none yet", err=True)
    return client
