"""Parameters of the commands: names, help, and the parsing of their texts."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
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

from zarr_shardstore.access import policies, resolve, shard_format
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.check.findings import Keep, Level

Rule: TypeAlias = "str | int | tuple[int, ...] | dict[str, int] | None"
_Texts = list[str] | None

EXECUTOR = "workers processes dask"
"""Parameters of each command that runs tasks; they are the arguments of `executor_of`."""

_DASK_WAIT_S = 10

_STORE = "A local path, or a URL that obstore or fsspec knows."
_CHUNKS_PER_SHARD = (
    "Chunks in a shard: 'auto', '8' for every dimension, '8,8,4', 'time=24,y=4' by dimension, or "
    "'none'. For some arrays, repeatedly: 'raw/*=8,8,4', 'raw/*=time=24,y=4', 'labels=none'."
)
_STORAGE_OPTION = "Option 'key=value' of obstore or fsspec for the store; repeatable."


def _argument(name: str, help: str, default: Any = "") -> Parameter:
    kind = str if default is not None else str | None
    info = typer.Argument(default, help=help)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=info)


def _option(
    name: str, kind: Any, help: str, default: Any = None, *, flag: str = "", **more: Any
) -> Parameter:
    info = typer.Option(default, flag or f"--{name.replace('_', '-')}", help=help, **more)
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=info)


_ALL = [
    _argument("store", _STORE, ...),
    _argument("source", f"The store to convert. {_STORE}", ...),
    _argument(
        "destination", "Where the result goes. Without it the store is converted in place.", None
    ),
    _argument("foreign", "HDF5, NetCDF-4 or TIFF, references, zip or icechunk: path or URL.", ...),
    _argument("imported", f"Where the shards go. {_STORE}", ...),
    _argument("path", "Of an array, or to consolidate of a group; the root, if left out."),
    Parameter(
        "arrays",
        Parameter.KEYWORD_ONLY,
        annotation=_Texts,
        default=typer.Argument(None, metavar="[PATHS]...", help="Only these arrays or groups."),
    ),
    Parameter(
        "files_and_store",
        Parameter.KEYWORD_ONLY,
        annotation=_Texts,
        default=typer.Argument(
            ..., metavar="FILES... STORE", help="The files in their order, and the new array."
        ),
    ),
    _argument("prefix", "Only chunks whose keys start with it."),
    _option("chunks_per_shard", _Texts, _CHUNKS_PER_SHARD),
    _option(
        "shard_nbytes", str | None, "Bytes of a shard before compression, as '64 MB', instead."
    ),
    _option("paths", _Texts, "Only this array, group or pattern; repeatable.", flag="--path"),
    _option("recode", bool, "Encode again what cannot be copied.", False),
    _option(
        "declaration",
        policies.V3Declaration | None,
        "How v3 metadata says that an array is sharded.",
    ),
    _option("index_location", Literal["start", "end"] | None, "Where in a shard its index is."),
    _option(
        "order",
        shard_format.EntryOrder,
        "In which order the chunks of a shard are written.",
        "morton",
    ),
    _option("workers", int | None, "Threads, or processes, that work.", min=1),
    _option("processes", bool, "Work in processes instead of threads.", False),
    _option(
        "dask", str | None, "Work on the dask cluster with this address of its scheduler, or file."
    ),
    _option("storage_options", _Texts, _STORAGE_OPTION, flag="--source-option"),
    _option("source_options", _Texts, _STORAGE_OPTION, flag="--source-option"),
    _option("destination_options", _Texts, _STORAGE_OPTION, flag="--destination-option"),
    _option("native", bool, "Also do what to-native does: every v3 reader reads it.", False),
    _option("ome", bool, "Also bring OME-Zarr 0.4 metadata to version 0.5.", False),
    _option("zarr_format", int, "Format of the new metadata.", 3, min=2, max=3),
    _option("level", Level, "Read indexes, all bytes of chunks too, or decode them.", "index"),
    _option("decode", bool, "The same as --level decode.", False),
    _option("chunks", bool, "List the stored chunks, and check nothing.", False),
    _option("missing", bool, "List the missing chunks, and check nothing.", False),
    _option("region", str | None, "List only these, in chunk coordinates, as '0:100,:'."),
    _option("repair", bool, "Say what a repair would do; with --yes do it.", False),
    _option(
        "keep", Keep, "Chunks of a damaged shard that stay: all whole ones, or fewer.", "salvage"
    ),
    _option(
        "full_order",
        shard_format.EntryOrder | None,
        "Shards without an index were full, in this order.",
        flag="--assume-order",
    ),
    _option("replica", str | None, "Fetch lost chunks from this store.", flag="--source"),
    _option("restore", str | None, "Put the originals in this quarantine of a repair back."),
    _option("resume", Path | None, "Note here what is checked; the next run continues there."),
    _option("dataset", str | None, "Of HDF5 files: its path; of TIFF files: number of the series."),
    _option(
        "link",
        Literal["hard", "symbolic", "move", "copy"],
        "How the files come into the array; 'copy' leaves them alone.",
        "hard",
    ),
    _option("undo", bool, "Give the files of this array their bytes back, and remove it.", False),
    _option("png", Path | None, "Draw into this file, with matplotlib."),
    _option("html", Path | None, "Draw into a page, which loads nothing."),
    _argument("out", "Path or URL of the references.", ...),
    _option("documents_format", int | None, "Format of their documents.", flag="--zarr-format"),
    _option("url", str | None, "Prefix by which readers reach the stored objects."),
    _option("group", str, "Group of the references to put everything into.", ""),
    _option("stale", bool, "Name the shards that changed after OUT was made.", False),
    _option("shown_as", Literal["v2", "v3"] | None, "Format to show it in.", flag="--as"),
    _option("host", str, "Address that it listens at.", "127.0.0.1"),
    _option("port", int, "0 takes any that is free.", 8000, min=0, max=65535),
    _option("in_browser", bool, "Open the page in a browser.", False, flag="--open"),
    _option("dry_run", bool, "Say what would be done, and change nothing.", False),
    _option("yes", bool, "Replace what is stored without asking.", False),
    _option("as_json", bool, "Print the report as JSON.", False, flag="--json"),
    _option("debug", bool, "Show tracebacks of errors.", False),
]
PARAMETERS = {parameter.name: parameter for parameter in _ALL}
"""All parameters of the commands, as typer reads them from a signature."""


def parse(name: str, value: Any) -> Any:
    match name:
        case "source" | "store" | "replica":
            return None if value is None else check_source(value)
        case "chunks_per_shard":
            return parse_chunks_per_shard(value) if value else ...
        case "storage_options" | "source_options" | "destination_options":
            return parse_storage_options(value)
        case "paths" | "arrays":
            return value or None
        case "region":
            return parse_region(value)
    return value


def parse_chunks_per_shard(values: Sequence[str]) -> Rule | dict[str, Rule]:
    """Parse the option ``--chunks-per-shard``, given once or once for each pattern."""
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
            raise typer.BadParameter(
                f"{value!r} is for all arrays, and so cannot be one of several: write '*={value}'",
                param_hint="'--chunks-per-shard'",
            )
    return {**rules, "*": rules.pop("*")} if "*" in rules else rules


def _rule_of(text: str) -> Rule:
    if text in ("auto", "none"):
        return "auto" if text == "auto" else None
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
            raise typer.BadParameter(
                f"{text!r} is no region: write a range for each dimension, as '0:100,:'",
                param_hint="'--region'",
            )
        start, stop, only = (None if not n else int(n) for n in part.groups())
        ranges.append(slice(start, stop) if only is None else slice(only, only + 1))
    return tuple(ranges)


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
    return resolve.local_path(store)


def confirm(warning: str, other_way: str, *, is_confirmed: bool) -> None:
    """Ask whether to continue, unless that is confirmed; without a terminal it is an error."""
    if is_confirmed:
        return
    if not _can_ask():
        raise typer.BadParameter(
            f"{warning}: say --yes to do that, or {other_way}", param_hint="'--yes'"
        )
    question = f"{warning[0].upper()}{warning[1:]} (or {other_way}). Go on?"
    typer.confirm(question, abort=True, err=True)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def is_same(source: str, destination: str) -> bool:
    one, other = _local_path(source), _local_path(destination)
    if one is not None and other is not None:
        return os.path.realpath(one) == os.path.realpath(other)
    return source.rstrip("/") == destination.rstrip("/")


@contextmanager
def executor_of(
    workers: int | None, processes: bool, dask: str | None = None
) -> Iterator[Executor | None]:
    """Make an executor of the options in `EXECUTOR`; ``None``: that of the tools."""
    if dask is not None:
        if workers is not None or processes:
            raise typer.BadParameter(
                "a dask cluster has workers of its own: leave --workers and --processes away",
                param_hint="'--dask'",
            )
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
            # An interrupt from the terminal reaches all processes; this one alone reacts to it.
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )
    try:
        yield executor
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()


def _dask_client(scheduler: str) -> Any:
    """Connect to a dask cluster, by the address of its scheduler or the file it has written."""
    try:
        from distributed import Client
    except ImportError as error:
        raise UnsupportedError(
            "--dask needs dask.distributed: pip install 'zarr-shardstore[dask]', in the "
            "environment of the workers, too"
        ) from error
    options = {"address": scheduler}
    try:
        if scheduler.endswith(".json"):
            os.stat(scheduler)  # the client would wait for the file
            options = {"scheduler_file": scheduler}
        return Client(**options, timeout=_DASK_WAIT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"no dask scheduler answers at {scheduler!r} ({error}): pass the address that "
            "`dask scheduler` prints, as tcp://10.0.0.1:8786, or its --scheduler-file"
        ) from error
