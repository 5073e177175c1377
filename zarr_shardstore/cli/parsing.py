"""What users type, made into arguments of the tools."""

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
from typing import Any, TypeAlias

import typer

Rule: TypeAlias = "str | int | tuple[int, ...] | None"


class NotPossibleError(Exception):
    """What was asked for cannot be done; the message says why in one sentence."""


def chunks_per_shard_of(values: Sequence[str]) -> Rule | dict[str, Rule]:
    """The `chunks_per_shard` that the option says, given once or once for each pattern.

    >>> chunks_per_shard_of(["8,8,4"])
    (8, 8, 4)
    >>> chunks_per_shard_of(["raw/*=8", "labels=none", "*=auto"])
    {'raw/*': 8, 'labels': None, '*': 'auto'}

    Raises
    ------
    typer.BadParameter
        If a value is none of these.
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


def storage_options_of(values: Sequence[str]) -> dict[str, Any] | None:
    """Storage options of fsspec; values are JSON where they can be, else text.

    >>> storage_options_of(["anon=true", "profile=mine"])
    {'anon': True, 'profile': 'mine'}

    Raises
    ------
    typer.BadParameter
        If a value has no ``=``.
    """
    options: dict[str, Any] = {}
    for value in values:
        key, sign, text = value.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"{value!r} is no 'key=value'")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options or None


def check_source(store: str) -> str:
    """Refuse a local store that is not there: opening it would find an empty one.

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
    """The path of a local store; ``None`` for the URL of another one."""
    if "://" in store and not store.startswith("file://"):
        return None
    return Path(store.removeprefix("file://"))


def confirm_in_place(source: str, destination: str | None, *, is_confirmed: bool) -> None:
    """Ask whether the objects of `source` shall be replaced, if nothing else says so.

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
    """Ask whether to go on, if nothing else says so.

    Raises
    ------
    typer.BadParameter
        If nobody can be asked.
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
    """The executor that was asked for; ``None``: that of the tools.

    Processes are spawned, not forked: threads of this one may hold locks.
    """
    if n_workers is None and not is_processes:
        yield None
        return
    executor: Executor
    if is_processes:
        # An interrupt of the terminal reaches all of them; this process alone reacts to it.
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
