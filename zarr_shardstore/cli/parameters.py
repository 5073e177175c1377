"""Parameters of the commands: names, help, and the parsing of their texts."""

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
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import typer

from zarr_shardstore.errors import SpecError

Rule: TypeAlias = "str | int | tuple[int, ...] | None"

_STORE = "A local path, or a URL that fsspec knows."
_CHUNKS_PER_SHARD = (
    "Chunks in a shard: 'auto', '8' for every dimension, '8,8,4', or 'none'. For some arrays, "
    "repeatedly: 'raw/*=8,8,4', 'labels=none'."
)


def _argument(name: str, help: str, default: Any = "") -> Parameter:
    kind = str if default is not None else str | None
    info = typer.Argument(default, help=help)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=info)


def _option(
    flag: str, kind: Any, help: str, default: Any = None, *, name: str = "", **more: Any
) -> Parameter:
    info = typer.Option(default, flag, help=help, **more)
    name = name or flag.removeprefix("--").replace("-", "_")
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=info)


def _storage_option(flag: str, name: str) -> Parameter:
    help = "fsspec option 'key=value' of the store; repeatable."
    return _option(flag, list[str] | None, help, name=name)


PARAMETERS = {
    "store": _argument("store", _STORE, ...),
    "source": _argument("source", f"The store to convert. {_STORE}", ...),
    "destination": _argument(
        "destination", "Where the result goes. Without it the store is converted in place.", None
    ),
    "array": _argument("path", "Of the array; the root, if left out."),
    "below": _argument("path", "Only arrays at or below it."),
    "prefix": _argument("prefix", "Only chunks whose keys start with it."),
    "chunks_per_shard": _option("--chunks-per-shard", list[str], _CHUNKS_PER_SHARD, ["auto"]),
    "new_chunks_per_shard": _option("--chunks-per-shard", list[str], _CHUNKS_PER_SHARD, ...),
    "paths": _option(
        "--path", list[str] | None, "Only this array, group or pattern; repeatable.", name="paths"
    ),
    "declaration": _option(
        "--declaration",
        Literal["codec", "storage_transformers"] | None,
        "How v3 metadata says that an array is sharded.",
    ),
    "index_location": _option(
        "--index-location", Literal["start", "end"] | None, "Where in a shard its index is."
    ),
    "order": _option(
        "--order",
        Literal["morton", "C", "F"],
        "In which order the chunks of a shard are written.",
        "morton",
    ),
    "workers": _option("--workers", int | None, "Threads, or processes, that work.", min=1),
    "processes": _option("--processes", bool, "Work in processes instead of threads.", False),
    "storage_options": _storage_option("--source-option", "storage_options"),
    "source_options": _storage_option("--source-option", "source_options"),
    "destination_options": _storage_option("--destination-option", "destination_options"),
    "ome": _option("--ome", bool, "Also bring OME-Zarr metadata to version 0.5.", False),
    "zarr_format": _option("--zarr-format", int, "Format of the new metadata.", 3, min=2, max=3),
    "png": _option("--png", Path | None, "Draw into this file, with matplotlib."),
    "html": _option("--html", Path | None, "Draw into a page, which loads nothing."),
    "dry_run": _option("--dry-run", bool, "Say what would be done, and change nothing.", False),
    "yes": _option("--yes", bool, "Replace what is stored without asking.", False),
    "as_json": _option("--json", bool, "Print the report as JSON.", False, name="as_json"),
    "debug": _option("--debug", bool, "Show tracebacks of errors.", False),
}
"""All parameters of the commands, as typer reads them from a signature."""


def parse(name: str, value: Any) -> Any:
    """Return the argument of the tools that the text of a parameter stands for."""
    match name:
        case "source" | "store":
            return check_source(value)
        case "chunks_per_shard":
            return parse_chunks_per_shard(value)
        case "storage_options" | "source_options" | "destination_options":
            return parse_storage_options(value)
        case "paths":
            return value or None
    return value


def parse_chunks_per_shard(values: Sequence[str]) -> Rule | dict[str, Rule]:
    """Parse the option ``--chunks-per-shard``, given once or once for each pattern.

    >>> parse_chunks_per_shard(["8,8,4"])
    (8, 8, 4)
    >>> parse_chunks_per_shard(["raw/*=8", "labels=none", "*=auto"])
    {'raw/*': 8, 'labels': None, '*': 'auto'}
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


def parse_storage_options(values: Sequence[str] | None) -> dict[str, Any] | None:
    """Parse storage options of fsspec; a value that is no JSON is text.

    >>> parse_storage_options(["anon=true", "profile=mine"])
    {'anon': True, 'profile': 'mine'}
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
    """Refuse a local store that does not exist: opening it would find an empty one."""
    path = _local_path(store)
    if path is not None and not path.is_dir() and not zipfile.is_zipfile(path):
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise SpecError(f"the store {store!r} {what}")
    return store


def _local_path(store: str) -> Path | None:
    """Return the path of a local store; ``None`` for the URL of another one."""
    if "://" in store and not store.startswith("file://"):
        return None
    return Path(store.removeprefix("file://"))


def confirm(warning: str, other_way: str, *, is_confirmed: bool) -> None:
    """Ask whether to continue, unless that is confirmed; without a terminal it is an error."""
    if is_confirmed:
        return
    if not _can_ask():
        raise typer.BadParameter(
            f"{warning}: say --yes to do that, or {other_way}", param_hint="'--yes'"
        )
    typer.confirm(f"{warning[0].upper()}{warning[1:]}. Go on?", abort=True, err=True)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def is_same(source: str, destination: str) -> bool:
    """Return whether two texts name one store."""
    one, other = _local_path(source), _local_path(destination)
    if one is not None and other is not None:
        return os.path.realpath(one) == os.path.realpath(other)
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
