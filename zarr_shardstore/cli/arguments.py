"""Arguments and options of the commands: names, help, and how their texts are parsed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from zarr_shardstore.cli.messages import NotPossibleError

Rule: TypeAlias = "str | int | tuple[int, ...] | None"


_STORE = "A local path, or a URL that fsspec knows."
Store: TypeAlias = Annotated[str, typer.Argument(help=_STORE)]
Source: TypeAlias = Annotated[str, typer.Argument(help=f"The store to convert. {_STORE}")]
Destination: TypeAlias = Annotated[
    str | None,
    typer.Argument(help="Where the result goes. Without it the store is converted in place."),
]
ChunksPerShard: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--chunks-per-shard",
        help="Chunks in a shard: 'auto', '8' for every dimension, '8,8,4', or 'none'. For some "
        "arrays, repeatedly: 'raw/*=8,8,4', 'labels=none'.",
    ),
]
Paths: TypeAlias = Annotated[
    list[str] | None, typer.Option("--path", help="Only this array, group or pattern; repeatable.")
]
Declaration: TypeAlias = Annotated[
    Literal["codec", "storage_transformers"] | None,
    typer.Option("--declaration", help="How v3 metadata says that an array is sharded."),
]
IndexLocation: TypeAlias = Annotated[
    Literal["start", "end"] | None,
    typer.Option("--index-location", help="Where in a shard its index is."),
]
Order: TypeAlias = Annotated[
    Literal["morton", "C", "F"],
    typer.Option("--order", help="In which order the chunks of a shard are written."),
]
Workers: TypeAlias = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads, or processes, that work.")
]
Processes: TypeAlias = Annotated[
    bool, typer.Option("--processes", help="Work in processes instead of threads.")
]
SourceOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--source-option", help="fsspec option 'key=value' of the store; repeatable."),
]
DestinationOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--destination-option", help="The same of the destination; repeatable."),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")
]
Yes: TypeAlias = Annotated[
    bool, typer.Option("--yes", help="Replace what is stored without asking.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


def chunks_per_shard_of(values: Sequence[str]) -> Rule | dict[str, Rule]:
    """Parse the option ``--chunks-per-shard``, given once or once for each pattern.

    >>> chunks_per_shard_of(["8,8,4"])
    (8, 8, 4)
    >>> chunks_per_shard_of(["raw/*=8", "labels=none", "*=auto"])
    {'raw/*': 8, 'labels': None, '*': 'auto'}

    Raises
    ------
    typer.BadParameter
        If a value has another form.
    """
    rules: dict[str, Rule] = {}
    for value in values:
        pattern, sign, rule = value.rpartition("=")
        if not sign and len(values) > 1:
            raise typer.BadParameter(
                f"{value!r} is for all arrays, and so cannot be one of several: write '*={value}'",
                param_hint="'--chunks-per-shard'",
            )
        if not sign:
            return _rule_of(rule)
        rules[pattern] = _rule_of(rule)
    return rules


def _rule_of(text: str) -> Rule:
    if text == "auto":
        return "auto"
    if text == "none":
        return None
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise typer.BadParameter(
            f"{text!r} is no number of chunks: write 'auto', 'none', '8' for every dimension, "
            "or '8,8,4', or these for a pattern of paths: 'raw/*=8,8,4'",
            param_hint="'--chunks-per-shard'",
        )
    return numbers[0] if len(numbers) == 1 else numbers


def storage_options_of(values: Sequence[str] | None) -> dict[str, Any] | None:
    """Parse storage options of fsspec; a value that is no JSON is text.

    >>> storage_options_of(["anon=true", "profile=mine"])
    {'anon': True, 'profile': 'mine'}

    Raises
    ------
    typer.BadParameter
        If a value has no ``=``.
    """
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


def check_source(store: str) -> str:
    """Refuse a local store that does not exist: opening it would find an empty one.

    Raises
    ------
    NotPossibleError
        If it is no directory, and no zip.
    """
    path = _local_path(store)
    if path is not None and not path.is_dir() and not zipfile.is_zipfile(path):
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise NotPossibleError(f"the store {store!r} {what}")
    return store


def _local_path(store: str) -> Path | None:
    """Return the path of a local store; ``None`` for the URL of another one."""
    if "://" in store and not store.startswith("file://"):
        return None
    return Path(store.removeprefix("file://"))


def confirm_in_place(source: str, destination: str | None, *, is_confirmed: bool) -> None:
    """Ask before the objects of `source` are replaced, unless that is confirmed.

    Raises
    ------
    typer.BadParameter, typer.Abort
        As `confirm`.
    """
    if destination is not None and not _is_same(source, destination):
        return
    warning = f"the stored objects of {source!r} are replaced, after they were verified"
    confirm(warning, "name a destination", is_confirmed=is_confirmed)


def confirm(warning: str, other_way: str, *, is_confirmed: bool) -> None:
    """Ask whether to continue, unless that is confirmed.

    Raises
    ------
    typer.BadParameter
        If there is no terminal to ask on.
    typer.Abort
        If the answer is no.
    """
    if is_confirmed:
        return
    if not _can_ask():
        raise typer.BadParameter(
            f"{warning}: say --yes to do that, or {other_way}", param_hint="'--yes'"
        )
    typer.confirm(f"{warning[0].upper()}{warning[1:]}. Go on?", abort=True, err=True)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _is_same(source: str, destination: str) -> bool:
    paths = _local_path(source), _local_path(destination)
    if paths[0] is not None and paths[1] is not None:
        return os.path.realpath(paths[0]) == os.path.realpath(paths[1])
    return source.rstrip("/") == destination.rstrip("/")


@contextmanager
def executor_of(n_workers: int | None, *, is_processes: bool) -> Iterator[Executor | None]:
    """Make the executor of a command; ``None``: that of the tools.

    Processes are spawned, not forked: threads of this one may hold locks.
    """
    if n_workers is None and not is_processes:
        yield None
        return
    executor: Executor
    if is_processes:
        # An interrupt from the terminal reaches all processes; this one alone reacts to it.
        executor = ProcessPoolExecutor(
            n_workers,
            multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )
    else:
        executor = ThreadPoolExecutor(n_workers)
    try:
        yield executor
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()
