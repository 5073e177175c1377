"""The command line: what it hands to the tools, what it prints, and how it ends."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import h5py
import numpy as np
import pytest
import typer
import zarr
from rich.console import Console
from typer.testing import CliRunner, Result

import zarr_shardstore
from tests.support.cli_stores import enter_directory_with_stores
from zarr_shardstore import (
    ArrayReport,
    ConversionReport,
    CorruptShardError,
    Progress,
    ShardingStore,
    SpecError,
    UnsupportedError,
    access,
)
from zarr_shardstore.cli import EXIT_CODES, arguments, parameters
from zarr_shardstore.cli.app import app
from zarr_shardstore.cli.output import ProgressBars, progress_lines
from zarr_shardstore.tools.check import findings
from zarr_shardstore.tools.convert import api as api  # before a stand-in is in its place
from zarr_shardstore.tools.convert.report import Estimate
from zarr_shardstore.tools.inspect.readers import ONLY_HERE
from zarr_shardstore.tools.inspect.shard_map import printable

ROOT = Path(__file__).parents[3]
COMMANDS = [
    *("shard", "unshard", "reshard", "to-native", "from-native"),
    *("info", "fsck", "compact", "consolidate", "map", "serve", "adopt", "references"),
    "import",
]
CONVERSIONS = ["shard", "unshard", "reshard"]


STEP = Progress("raw", "sharded", n_tasks=4, n_tasks_done=2, n_chunks=100, n_bytes=12_345)
RAW = ArrayReport(
    *("raw", "v3", "sharded", (8, 8), "as asked", 4_096, 64, 1_234_567, 64, 2, 1.5), read_by="all"
)
LABELS = ArrayReport("labels", "v2", "skipped", None, "not among the paths", read_by="this")
IMAGE = ArrayReport("0", "v2", "sharded", (8,), read_by=ONLY_HERE, was_read_by="every v2 reader")
REPORT = ConversionReport((RAW, LABELS), n_copied_keys=3, notes=("look\nhere",), seconds=1.5)


@dataclass(frozen=True)
class NativeReport:
    """As that of `zarr_shardstore.tools.native.bridge`."""

    entries: tuple[Any, ...] = (SimpleNamespace(path="raw", action="translated", reason="as is"),)
    dry_run: bool = False
    notes: tuple[str, ...] = ("look here",)

    def as_dict(self) -> dict[str, Any]:
        return {"entries": [vars(entry) for entry in self.entries], "read_by": "all"}

    def __str__(self) -> str:
        return "translated 1 of 1 nodes\nread by: every v3 reader"


class StandIn:
    """In the place of the tools that convert: records calls, and replies as it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.report = REPORT
        self.native_report = NativeReport()
        self.planned: tuple[ArrayReport, ...] = ()
        """What the command learns before it asks."""

    def module(self, *names: str) -> Any:
        return SimpleNamespace(**{name: self.function(name) for name in names})

    def function(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dry_run") and "native" not in name and "progress" not in kwargs:
                return ConversionReport(self.planned, dry_run=True)
            self.calls.append((name, args, kwargs))
            if (progress := kwargs.get("progress")) is not None:
                progress(STEP)
                progress(replace(STEP, n_tasks_done=4, n_chunks=200))
            if self.error is not None:
                raise self.error
            return self.native_report if "native" in name else self.report

        return call


def put_in_place(monkeypatch: pytest.MonkeyPatch, module: str, stand_in: Any) -> None:
    monkeypatch.setitem(sys.modules, f"zarr_shardstore.{module}", stand_in)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """In the place of the tools that translate metadata."""
    stand_in = StandIn()
    put_in_place(monkeypatch, "tools.native.bridge", stand_in.module("to_native", "from_native"))
    return stand_in


@pytest.fixture
def tools(native: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """In the place of all tools that change stores."""
    put_in_place(
        monkeypatch, "tools.convert.api", native.module("shard_store", "unshard_store", "reshard")
    )
    return native


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a store of plain chunks and one of shards."""
    return enter_directory_with_stores(tmp_path, monkeypatch)


def run(*args: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(args), **options)


def one_sentence(result: Result, *, says: str, status: int = 1) -> None:
    """It failed with one line on stderr, and nothing on stdout."""
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(says, line), line
    assert "Traceback" not in result.output


# ------------------------------------------------------------- what the tools are asked


def test_shard_hands_over_what_its_options_say(tools: StandIn) -> None:
    """Each option once."""
    result = run(
        *("shard", "volume.zarr", "new.zarr", "--chunks-per-shard", "8,8", "--path", "raw"),
        *("--path", "x/*", "--declaration", "storage_transformers", "--index-location", "start"),
        *("--native", "--ome", "--shards-at", "time=31,59", "--shards-at", "1=4"),
        *("--order", "C", "--destination-option", "anon=true", "--dry-run"),
        *("--source-option", "key=text", "--source-option", 'kw={"a": 1}'),
    )
    assert result.exit_code == 0, result.output
    ((name, args, kwargs),) = tools.calls
    assert (name, args) == ("shard_store", ("volume.zarr", "new.zarr"))
    assert kwargs.pop("progress") is not None
    assert kwargs == {
        "chunks_per_shard": (8, 8),
        "shard_nbytes": None,
        "shards_at": {"time": [31, 59], 1: [4]},
        "paths": ["raw", "x/*"],
        "declaration": "storage_transformers",
        "index_location": "start",
        "order": "C",
        "executor": None,
        "source_options": {"key": "text", "kw": {"a": 1}},
        "destination_options": {"anon": True},
        "dry_run": True,
        "native": True,
        "ome": True,
        "copy_rest": False,
        "estimate": True,
    }


def test_bytes_of_a_shard_are_handed_over(tools: StandIn) -> None:
    """Instead of chunks per shard, to both conversions that make shards."""
    for command in ("shard", "reshard"):
        run(command, "packed.zarr", "new.zarr", "--shard-nbytes", "64 MB", "--dry-run")
    assert [kwargs["shard_nbytes"] for _, _, kwargs in tools.calls] == ["64 MB"] * 2
    assert tools.calls[0][2]["chunks_per_shard"] is tools.calls[1][1][1] is ...


def test_what_is_not_said_is_left_to_the_tools(tools: StandIn) -> None:
    """The defaults of all three conversions."""
    for command in CONVERSIONS:
        more = ["--chunks-per-shard", "none"] if command == "reshard" else []
        assert run(command, "packed.zarr", "new.zarr", *more).exit_code == 0
    shard, unshard, reshard = tools.calls
    rest: dict[str, Any] = {"executor": None, "source_options": None, "destination_options": None}
    rest |= {"paths": None, "dry_run": False, "copy_rest": False, "estimate": False}
    spelled = {"declaration": None, "index_location": None, "order": "morton"}
    spelled |= {"shard_nbytes": None, "shards_at": None}
    for _, _, kwargs in tools.calls:
        del kwargs["progress"]
    own = {"chunks_per_shard": ..., "native": False, "ome": False}
    assert shard[2] == {**own, **spelled, **rest}
    assert unshard == ("unshard_store", ("packed.zarr", "new.zarr"), rest)
    assert reshard == ("reshard", ("packed.zarr", None, "new.zarr"), {**spelled, **rest})


@pytest.mark.parametrize("module", ["tools.convert.api", "tools.native.bridge"])
def test_what_is_handed_over_is_what_the_tools_take(module: str, tools: StandIn) -> None:
    """The names of the arguments, so that the stand-in does not hide a change."""
    file = Path(zarr_shardstore.__file__).parent / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        pytest.skip(f"there is no {file.name}")
    stand_ins = {
        name: sys.modules.pop(name)
        for name in ("zarr_shardstore.tools.convert.api", "zarr_shardstore.tools.native.bridge")
    }
    try:
        true = import_module(f"zarr_shardstore.{module}")
    finally:
        sys.modules.update(stand_ins)
    for command in CONVERSIONS if module == "tools.convert.api" else ["to-native", "from-native"]:
        more = ["--chunks-per-shard", "2"] if command == "reshard" else []
        assert run(command, "volume.zarr", *more, "--dry-run").exit_code == 0
        name, args, kwargs = tools.calls[-1]
        signature(getattr(true, name)).bind(*args, **kwargs)


def test_native_commands_hand_over_what_their_options_say(tools: StandIn) -> None:
    """And nothing else."""
    assert run("to-native", "volume.zarr", "--ome", "--path", "raw", "--yes").exit_code == 0
    assert run("from-native", "packed.zarr", "--zarr-format", "2", "--dry-run").exit_code == 0
    assert tools.calls == [
        (
            "to_native",
            ("volume.zarr",),
            {"paths": ["raw"], "ome": True, "storage_options": None, "dry_run": False},
        ),
        (
            "from_native",
            ("packed.zarr",),
            {
                "paths": None,
                "zarr_format": 2,
                "ome": False,
                "storage_options": None,
                "dry_run": True,
            },
        ),
    ]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["auto"], "auto"),
        (["8"], 8),
        (["8,8,4"], (8, 8, 4)),
        (["none"], None),
        (["raw/*=8,8,4", "labels=none"], {"raw/*": (8, 8, 4), "labels": None}),
        (["time=24"], {"time": 24}),
        (["time=24", "y=4"], {"time": 24, "y": 4}),
        (["time=24,y=4"], {"*": {"time": 24, "y": 4}}),
        (["time=24,y=4", "x=none"], {"x": None, "*": {"time": 24, "y": 4}}),
        (["raw/*=time=24,y=4"], {"raw/*": {"time": 24, "y": 4}}),
        (["raw/*=time=24"], {"raw/*": {"time": 24}}),
        (["year=2020/v=2"], {"year=2020/v": 2}),
    ],
)
def test_chunks_per_shard(values: list[str], rule: Any) -> None:
    """All forms."""
    assert arguments.parse_chunks_per_shard(values) == rule


@pytest.mark.parametrize("value", ["31,59", "time=", "time=a", "=31", "time=31,", "time=-1"])
def test_what_is_no_list_of_places(value: str) -> None:
    with pytest.raises(typer.BadParameter, match="no list of places"):
        arguments.parse_shards_at([value])


def test_choices_are_those_of_the_tools() -> None:
    """The table of parameters spells them, because the tools would import zarr."""
    for name in ("Level", "Keep"):
        assert get_args(getattr(parameters, name)) == get_args(getattr(findings, name))
    assert get_args(parameters.EntryOrder) == get_args(access.shard_format.EntryOrder)
    assert get_args(parameters.V3Declaration) == get_args(access.policies.V3Declaration)


def test_typer_takes_our_usage_errors() -> None:
    """They are typer's, so that it ends with 2."""
    with pytest.raises(typer.BadParameter):
        arguments.parse_storage_options(["x"])
    with pytest.raises(typer.BadParameter):
        arguments.parse_storage_options(["=x"])
    assert arguments.parse_storage_options([]) is None
    assert run("info", "packed.zarr", "--source-option", "x").exit_code == 2
    one_sentence(
        run("info", "packed.zarr", "--source-option", "x=1"),
        says="go with a URL",
    )


@pytest.mark.parametrize(
    "values", [["0"], ["8,"], ["x"], ["-1"], ["a=x"], ["8", "a=4"], [""], ["8x8"]]
)
def test_chunks_per_shard_that_say_nothing_are_wrong_usage(
    values: list[str], tools: StandIn
) -> None:
    """Exit code 2, before anything is done."""
    args = [arg for value in values for arg in ("--chunks-per-shard", value)]
    result = run("shard", "volume.zarr", "new.zarr", *args)
    assert result.exit_code == 2
    assert "--chunks-per-shard" in result.stderr
    assert not tools.calls


def test_workers_and_processes() -> None:
    """Threads if a number is said, processes if they are asked for; these are spawned."""
    with arguments.executor_of(None, processes=False) as executor:
        assert executor is None
    with arguments.executor_of(3, processes=False) as executor:
        assert isinstance(executor, ThreadPoolExecutor)
        assert executor._max_workers == 3
    with arguments.executor_of(1, processes=True) as executor:
        assert isinstance(executor, ProcessPoolExecutor)
        assert executor._mp_context is multiprocessing.get_context("spawn")
        assert executor.submit(pow, 3, 2).result() == 9


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dask_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor, whose tasks are run each time; with it nothing else says who works. Without
    dask, or without a scheduler, a sentence says what to do."""
    pytest.importorskip("distributed")
    monkeypatch.setattr(arguments, "_DASK_WAIT_S", 0.1)
    for number, processes in ((2, False), (None, True)):
        with (
            pytest.raises(typer.BadParameter, match="leave --workers and --processes away"),
            arguments.executor_of(number, processes, "tcp://127.0.0.1:1"),
        ):
            pass
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        of_other = f"127.0.0.1:{other.server_port}"  # the client waits for it without an end
        for scheduler in ("tcp://127.0.0.1:1", "nowhere://x", "no-such-file.json", of_other):
            with (
                pytest.raises(SpecError, match="no dask scheduler answers at"),
                arguments.executor_of(None, False, scheduler),
            ):
                pass
        other.shutdown()
    for thread in threading.enumerate():
        if "(connect)" in thread.name:
            thread.join(2)
    gc.collect()  # clients that got no answer close here; under load that takes too long for them
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(UnsupportedError, match=r"pip install 'zarr-shardstore\[dask\]'"),
        arguments.executor_of(None, False, "tcp://127.0.0.1:1"),
    ):
        pass


def test_an_error_ends_the_workers() -> None:
    """What has not begun is cancelled, what has begun ends first."""
    futures: list[Future[None]] = []

    def interrupted() -> None:
        with arguments.executor_of(1, processes=False) as executor:
            assert executor is not None
            futures.extend(executor.submit(time.sleep, 0.2) for _ in range(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [future.cancelled() for future in futures] == [False, True, True]
    assert futures[0].done()


# ------------------------------------------------------------- in place


@pytest.mark.parametrize(
    ("command", "destination"),
    [
        *((command, where) for command in CONVERSIONS for where in ([], ["./volume.zarr"])),
        ("to-native", []),
        ("from-native", []),
    ],
)
def test_without_a_terminal_objects_are_replaced_only_if_yes_is_said(
    command: str, destination: list[str], tools: StandIn
) -> None:
    """Exit code 2 says so; with --yes, and with --dry-run, it goes on."""
    args = [
        command,
        "volume.zarr",
        *destination,
        *(["--chunks-per-shard", "2"] * (command[0] == "r")),
    ]
    result = run(*args)
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert not tools.calls
    assert run(*args, "--dry-run").exit_code == 0
    assert run(*args, "--yes").exit_code == 0
    assert len(tools.calls) == 2


@pytest.mark.parametrize(
    ("command", "asks"),
    [
        ("shard", "no program reads the array (or name a destination). Go on?"),
        ("to-native", "The metadata documents of 'volume.zarr' are replaced (or --dry-run"),
        ("from-native", "and shards in it are read only through this package (or --dry-run"),
    ],
)
def test_on_a_terminal_it_asks(
    command: str, asks: str, tools: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No is an answer, and Ctrl-C at the question an interrupt."""
    monkeypatch.setattr(arguments, "_can_ask", lambda: True)
    result = run(command, "volume.zarr", input="n\n")
    assert result.exit_code == 1
    assert asks in result.stderr
    assert result.stderr.endswith("nothing was done\n")
    assert run(command, "volume.zarr", input="").exit_code == 130  # as Ctrl-C, for typer
    assert not tools.calls
    assert run(command, "volume.zarr", input="y\n").exit_code == 0
    assert len(tools.calls) == 1


@pytest.mark.parametrize("destination", [[], ["new.zarr"]])
@pytest.mark.parametrize("command", ["shard", "reshard"])
def test_no_reader_of_v2_arrays_is_lost_without_a_word(
    command: str, destination: list[str], tools: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks and names the remedy, or ends with 2; --yes and --native are answers."""
    tools.planned = (IMAGE, RAW)
    args = [
        command,
        "volume.zarr",
        *destination,
        *(["--chunks-per-shard", "2"] * (command[0] == "r")),
    ]
    result = run(*args)
    assert result.exit_code == 2
    words = " ".join(result.stderr.split())
    assert "Zarr v2 (1 array) are read only through this package" in words
    assert "--native" in words
    assert "say --yes" in words
    monkeypatch.setattr(arguments, "_can_ask", lambda: True)
    assert run(*args, input="n\n").exit_code == 1
    assert not tools.calls
    assert run(*args, input="y\n").exit_code == 0
    monkeypatch.setattr(arguments, "_can_ask", lambda: False)
    assert run(*args, "--yes").exit_code == run(*args, "--dry-run").exit_code == 0
    assert len(tools.calls) == 3
    if command == "shard" and destination:
        assert run(*args, "--native").exit_code == 0


# ------------------------------------------------------------- how it ends


def test_a_source_that_is_not_there_is_not_made(tools: StandIn, here: Path) -> None:
    """In every command; a file is no store either."""
    (here / "file").write_text("")
    for command in [name for name in COMMANDS if name not in ("adopt", "import")]:  # take files
        others = {"reshard": ["--chunks-per-shard", "2"], "references": ["refs.json"]}
        more = others.get(command, [])
        status = 2 if command == "fsck" else 1
        for name, says in (
            ("nope.zarr", "'nope.zarr' does not exist"),
            (f"file://{here}/nope.zarr", "does not exist"),
            ("file", "is a file, not a directory"),
        ):
            one_sentence(run(command, name, *more), says=says, status=status)
    assert not (here / "nope.zarr").exists()
    assert not tools.calls


def test_a_store_without_arrays_is_said(tools: StandIn, here: Path) -> None:
    """Exit code 1: most often it is a path that was mistyped."""
    (here / "empty").mkdir()
    tools.report, tools.native_report = ConversionReport(()), NativeReport(())
    for args in (["info"], ["to-native", "--yes"], ["from-native", "--yes"]):
        one_sentence(run(*args, "empty"), says="no array in 'empty': pass the directory")
    result = run("shard", "empty", "new.zarr")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: there is no array in 'empty': ")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SpecError("the call is\nwrong"), r"error: the call is wrong$"),
        (CorruptShardError("bad", shard_key="a/c/0"), "shard 'a/c/0': bad"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "No such file .*: 'a/b'"),
        (OSError(28, "No space left on device"), "error: No space.*run the same command again"),
        (OSError("disk is gone"), "OSError: disk is gone"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_failure_is_one_sentence(tools: StandIn, error: Exception, says: str) -> None:
    """And no traceback, which --debug shows."""
    tools.error = error
    result = run("shard", "volume.zarr", "new.zarr")
    assert result.exit_code == 1
    assert re.search(says, result.stderr.splitlines()[-1])
    assert "Traceback" not in result.output
    shown = run("shard", "volume.zarr", "new.zarr", "--debug")
    assert shown.exception is error


def test_an_interrupted_conversion_says_how_to_go_on(tools: StandIn) -> None:
    """With the exit code that shells have for it."""
    tools.error = KeyboardInterrupt()
    result = run("shard", "volume.zarr", "new.zarr")
    assert result.exit_code == 130
    says = "interrupted: run the same command again to resume"
    assert result.stderr.splitlines()[-1] == says
    tools.error.add_note("repaired so far: 'c/0'; originals: …")  # otherwise nobody says it
    result = run("shard", "volume.zarr", "new.zarr")
    assert result.stderr.splitlines()[-1] == f"{says}; repaired so far: 'c/0'; originals: …"


# ------------------------------------------------------------- what is printed


def test_conversions_print_what_became_of_each_array(tools: StandIn) -> None:
    """As a table, and as JSON; progress goes to stderr."""
    result = run("shard", "volume.zarr", "new.zarr")
    _, raw, labels, note, readers, total = result.stdout.splitlines()
    assert readers == "read by: all (1 of 2); this (1 of 2)"
    assert re.search(r"^raw +v3 +sharded +8 × 8 +4,096 +64 +1.2 MB +as asked$", raw)
    assert re.search(r"^labels +v2 +skipped +not among the paths$", labels)
    assert note == r"note: look\nhere"
    assert total == (
        "4,096 chunks in 64 objects; 2 tasks done by an earlier run; 3 other keys copied; 1.5 s"
    )
    assert "raw sharded: 4 of 4 tasks, 200 chunks" in result.stderr
    result = run("shard", "volume.zarr", "new.zarr", "--json")
    assert json.loads(result.stdout) == json.loads(json.dumps(REPORT.as_dict()))


def test_native_commands_print_what_became_of_each_node(tools: StandIn) -> None:
    """As a table, and as JSON."""
    for command in ("to-native", "from-native"):
        lines = run(command, "volume.zarr", "--yes").stdout.splitlines()
        assert lines == [
            *("raw  translated  as is", "note: look here"),
            *("translated 1 of 1 nodes", "read by: every v3 reader"),
        ]
        found = json.loads(run(command, "volume.zarr", "--json", "--yes").stdout)
        assert found == tools.native_report.as_dict()


def test_a_dry_run_says_that_it_was_one(tools: StandIn) -> None:
    """In words that cannot be taken for the other, and without counts of nothing."""
    tools.report = replace(REPORT, dry_run=True)
    lines = run("shard", "volume.zarr", "--dry-run").stdout.splitlines()
    _, raw, labels, _, readers, total = lines
    assert readers.startswith("would be read by: all")
    assert re.search(r"^raw +v3 +would be sharded +8 × 8 +as asked$", raw)
    assert "would be left" in labels
    assert total == "nothing was changed: a dry run; 3 other keys would be copied"


def test_info_shows_groups_arrays_and_figures() -> None:
    """The same in a pipe of any width, without escape codes."""
    result = run("info", "packed.zarr", env={"COLUMNS": "20"})
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for figure in (
        "raw uint16 20 × 30 v3, codec",
        "chunks 2 × 3 40 of 100 40 % 480 bytes",
        "shards 4 × 12 6 of 15 1.3 kB",
        "1 array, 1 sharded; 40 chunks in 6 objects; 1.3 kB",
        "read by: every v3 reader",
    ):
        assert figure in text, text
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 9, "nothing is wrapped"


def test_compact_removes_dead_bytes(here: Path) -> None:
    """And what a writer left that did not close its shards."""
    store = ShardingStore(here / "dead", chunks_per_shard=4)
    z = zarr.create_array(store, shape=(8,), chunks=(2,), dtype="u2", compressors=None)
    for value in (1, 2):
        z[:2] = value
    shard = here / "dead/c/0"
    nbytes = 4 + 4 * 16 + 4
    assert shard.stat().st_size > nbytes
    removed = shard.stat().st_size - nbytes
    dry = json.loads(run("compact", "dead", "--dry-run", "--json").output)
    expected = {"n_shards": 1, "n_compacted": 1, "removed_nbytes": removed, "errors": []}
    assert dry == {**expected, "dry_run": True}
    said = f"1 of 1 shard in dead compacted, {removed:,} bytes removed"
    assert run("compact", "dead").output.strip() == said
    assert "no shard" in run("compact", "dead").output
    assert "no shard" in run("compact", "dead", "--dry-run").output
    assert shard.read_bytes()[:4] == b"\2\0\2\0"
    assert shard.stat().st_size == nbytes
    assert [path.name for path in shard.parent.iterdir()] == ["0"]


def test_compact_names_damage(here: Path) -> None:
    """It fails, and the other shards are compacted; a dry run says so before."""
    store = ShardingStore(here / "dead", chunks_per_shard=4)
    z = zarr.create_array(store, shape=(16,), chunks=(2,), dtype="u2", compressors=None)
    for value in (1, 2):
        z[:2], z[8:10] = value, value
    store.close()
    (here / "dead/c/0").write_bytes(b"damaged")
    for more in (["--dry-run"], []):
        result = run("compact", "dead", *more)
        assert result.exit_code == 1
        assert "1 of 2 shards" in result.stdout
        assert "! shard 'c/0'" in result.stderr


def test_consolidate_collects_indexes(here: Path) -> None:
    """Of one array or of all; once more is no error, no array is."""
    would_be = run("consolidate", "packed.zarr", "raw", "--dry-run", "--json").output
    assert json.loads(would_be) == {"paths": ["raw"], "dry_run": True}
    assert "would be consolidated" in run("consolidate", "packed.zarr", "--dry-run").output
    one_sentence(run("consolidate", "packed.zarr", "x", "--dry-run"), says="no array has the path")
    assert not (here / "packed.zarr/raw/__shards.index").exists()
    assert "1 array in packed.zarr" in run("consolidate", "packed.zarr", "raw").output
    assert (here / "packed.zarr/raw/__shards.index").is_file()
    assert "1 array" in run("consolidate", "packed.zarr").output
    one_sentence(run("consolidate", "packed.zarr", "nothing"), says="no sharded array")


def test_a_dry_run_of_consolidate_promises_what_is_done(here: Path) -> None:
    """No array without a stored shard, with a transformer below its shards, or a bad document."""
    options: Any = {"shape": (8,), "chunks": (1,), "dtype": "u1"}
    stacks: dict[str, Any] = {"full": ["sharding"], "empty": ["sharding"]}
    for name, stack in {**stacks, "below": ["sharding", "crc32c"]}.items():
        store = ShardingStore(here / "some", chunks_per_shard=4, storage_transformers=stack)
        zarr.create_array(store, name=name, **options)[:] = int(name != "empty")
        store.close()
    store = ShardingStore(here / "some", chunks_per_shard=4)
    for name in ("cut", "outside"):
        zarr.create_array(store, name=name, **options)[:] = 1
    (here / "some/cut/zarr.json").write_text("{")
    document = here / "some/outside/zarr.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), "shape": [0]}))
    for more in (["--dry-run"], []):
        result = run("consolidate", "some", "--json", *more)
        assert json.loads(result.output)["paths"] == ["full", "outside"]
        for name in ("empty", "below"):
            one_sentence(run("consolidate", "some", name, *more), says="no sharded array")


def test_info_as_json() -> None:
    """The whole report, in lines that nothing wraps."""
    found = json.loads(run("info", "packed.zarr", "--json", "--path", "r*").stdout)
    assert found["arrays"][0]["n_chunks"] == found["totals"]["n_chunks"] == 40
    assert found["arrays"][0]["n_objects"] == 6
    one_sentence(run("info", "packed.zarr", "--path", "x"), says="no array has the path 'x'")


def test_info_shows_errors_and_notes_of_arrays(here: Path) -> None:
    """A damaged shard is not hidden, and fails nothing else."""
    assert run("map", "packed.zarr").exit_code == 0
    (here / "packed.zarr/bad").mkdir()
    (here / "packed.zarr/bad/.zarray").write_text("{")
    assert run("map", "packed.zarr").exit_code == 1, "it has the table of info"
    (here / "packed.zarr/raw/c/0/0").write_bytes(b"damaged")
    result = run("info", "packed.zarr")
    assert result.exit_code == run("info", "packed.zarr", "--json").exit_code == 1
    assert "! shard 'raw/c/0/0': the index of 8 entries" in result.stdout
    assert "! 'bad/.zarray' holds no JSON object" in result.stdout
    assert "2 errors" in result.stdout


def test_names_do_not_move_the_cursor(here: Path) -> None:
    """A path, and an error, with signs that a terminal obeys."""
    (here / "packed.zarr/a\x1b[2J").mkdir()
    (here / "packed.zarr/a\x1b[2J/.zarray").write_text("{")
    result = run("info", "packed.zarr")
    assert "\x1b" not in result.stdout
    assert r"a\x1b[2J" in result.stdout
    assert printable("a\nb\u202e[bold]") == r"a\nb\u202e[bold]"


def test_map_draws_into_the_terminal_and_into_files(here: Path) -> None:
    """Errors of shards on stderr."""
    result = run("map", "packed.zarr", "raw")
    assert result.stdout.splitlines()[2:7] == ["■■■", "■■■", "···", "···", "···"]
    result = run("map", "packed.zarr", "/raw/", "--png", "m.png", "--html", "m.html")
    assert result.stdout.splitlines() == ["drawn: m.png", "drawn: m.html"]
    assert (here / "m.png").read_bytes().startswith(b"\x89PNG")
    assert (here / "m.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    (here / "packed.zarr/raw/c/0/0").write_bytes(b"damaged")
    result = run("map", "packed.zarr", "raw")
    assert result.stdout.splitlines()[2] == "!■■"
    assert "raw/c/0/0" in result.stderr
    assert result.exit_code == 1
    one_sentence(run("map", "packed.zarr", "x"), says="no array at 'x'.* arrays in it: 'raw'")


def test_map_and_info_of_a_group(here: Path) -> None:
    """A table of its arrays; the map is of the largest."""
    group = zarr.open_group(ShardingStore("packed.zarr", chunks_per_shard=2), path="g")
    group.create_array("small", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    group.create_array("large", shape=(8, 8), chunks=(2, 2), dtype="u1")[:] = 1
    for where, n_arrays in ((["g"], 2), ([], 3)):
        result = run("info", "packed.zarr", *where)
        _, titles, *lines = result.stdout.splitlines()
        assert titles.split() == ["array", "shape", "chunks", "shards", "objects", "fill", "size"]
        assert re.search(
            r"^g/large +8 × 8 +2 × 2 +4 × 4 +4 +100 % +\S+ bytes +uint8, v3$", lines[0]
        )
        assert lines[-1].startswith(f"{n_arrays} arrays, {n_arrays} sharded")
    result = run("map", "packed.zarr", "g")
    assert result.exit_code == 0
    table, drawn = result.stdout.split("\nthe largest array:\n")
    assert "g/small" in table
    assert drawn.startswith("/g/large: 2 × 2 shards, 2 × 2 chunks each\n\n■■\n■■\n")
    found = json.loads(run("map", "packed.zarr", "g", "--json").stdout)
    assert [array["path"] for array in found["arrays"]] == ["g/large", "g/small"]
    assert found["path"] == "g/large"


def test_map_of_a_store_without_arrays(here: Path) -> None:
    zarr.create_group(here / "empty.zarr")
    one_sentence(run("map", "empty.zarr"), says="there is no array in 'empty.zarr'")


def test_map_as_json(here: Path) -> None:
    """How full each shard is; null where that is not known, and then status 1."""
    zarr.create_array(str(here / "packed.zarr"), name="g/deep/er", shape=(4,), dtype="u1")
    one_sentence(run("map", "packed.zarr", "h"), says="no array at 'h'.* 'g/deep/er', 'raw'$")
    (here / "packed.zarr/raw/c/0/1").write_bytes(b"damaged")
    result = run("map", "packed.zarr", "raw", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["fill"] == [[1, None, 1], [1, 1, 1], *[[0, 0, 0]] * 3]
    assert found["counts"] == {"full": 5, "partial": 0, "missing": 9, "unreadable": 1}
    assert (found["path"], found["chunks_per_shard"]) == ("raw", [2, 4])


def test_a_rule_for_an_array_that_is_not_there(here: Path) -> None:
    """It was meant for another one: an error, and nothing is done."""
    before = sorted(here.rglob("*"))
    rule = ["--chunks-per-shard", "S0=8", "--chunks-per-shard", "raw=2"]
    for more in (["--yes"], ["--dry-run"], ["new.zarr"]):
        result = run("shard", "volume.zarr", *rule, *more)
        one_sentence(result, says="a rule for 'S0', and no array has such a path, or such")
    assert before == sorted(here.rglob("*"))


def test_progress_lines_are_one_a_second_and_the_last() -> None:
    """However many tasks there are."""
    now, lines = 0.0, list[str]()
    with progress_lines(lines.append, lambda: now) as progress:
        for n in range(1, 101):
            now = n / 40
            progress(replace(STEP, n_tasks=100, n_tasks_done=n, n_chunks=8 * n, n_bytes=1000 * n))
    assert [line.split(",")[0] for line in lines] == [
        "raw sharded: 40 of 100 tasks",
        "raw sharded: 80 of 100 tasks",
        "raw sharded: 100 of 100 tasks",
    ]
    assert "chunks/s" in lines[-1]
    assert "kB/s" in lines[-1]
    with progress_lines(lines.append, lambda: now) as progress:
        progress(replace(STEP, action="old objects removed", n_objects=12_000))
    assert lines[-1] == "raw old objects removed: 12,000"


def test_progress_bars_show_a_few_arrays() -> None:
    """Rates and counts; arrays that ended make room, those under way stay."""
    console = Console(force_terminal=True, width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with ProgressBars(console) as progress:
        progress(replace(STEP, path="slow"))
        for n in range(20):
            progress(replace(STEP, path=f"a{n}\x1b", n_tasks_done=4))
        shown = [task.description for task in progress.tasks]
        assert len(shown) == 8
        assert shown[0] == "slow sharded"
        assert r"a19\x1b sharded" in shown
        progress(replace(STEP, path="slow", action="new objects moved", n_objects=7))
        assert progress.tasks[0].description == "slow new objects moved"
        assert progress.tasks[0].fields["rates"] == "7"
    console.file.close()


def test_a_dry_run_says_what_it_would_cost() -> None:
    """Objects and bytes before and after, requests, a price for each cloud, and time."""
    args = ("shard", "volume.zarr", "new.zarr", "--chunks-per-shard", "2,4", "--dry-run")
    text = run(*args).stdout
    assert re.search(r"raw +v3 +would be sharded +2 × 4 +40 +40 → 6 +480 bytes ", text)
    assert "\nobjects: 40 become 6 objects; bytes: 480 bytes become 1.3 kB\n" in text
    assert "\nroom: 1.3 kB more at the peak\n" in text
    assert "\nrequests: about 98 reads, 8 writes, 1 delete\n" in text
    assert "S3 below $0.01, GCS below $0.01, Azure below $0.01 (list prices of" in text
    assert re.search("^time: .*as if writes were as fast as the reads", text, re.M)
    found = json.loads(run(*args, "--json").stdout)["estimate"]
    assert found["cost_usd"].keys() == {"S3", "GCS", "Azure"}
    assert (found["n_objects_before"], found["n_objects_after"]) == (40, 6)


def test_prices_are_of_all_requests() -> None:
    """A million writes and reads in S3 have this list price."""
    found = Estimate(n_writes=10**6, n_reads=10**6)
    assert found.cost_usd["S3"] == pytest.approx(5.4)
    assert (found + Estimate(n_reads=5, is_exact=False)).n_reads == 10**6 + 5
    assert not (found + Estimate(is_exact=False)).is_exact


def test_what_becomes_of_the_rest_is_said_before_anything_is_copied(tools: StandIn) -> None:
    """Also if it fails afterwards; in place there is no rest to copy."""
    tools.error = SpecError("stopped")
    args = ("shard", "volume.zarr", "new.zarr", "--path", "raw")
    first, *_ = run(*args).stderr.splitlines()
    assert first == "only raw goes there: --all copies the rest of volume.zarr, too"
    first, *_ = run(*args, "--all").stderr.splitlines()
    assert first == "raw is converted, and the rest of volume.zarr is copied as it is"
    assert [call[2]["copy_rest"] for call in tools.calls] == [False, True]


def test_a_missing_yes_is_one_plain_sentence() -> None:
    """No usage, no box: the call was right."""
    (line,) = run("unshard", "packed.zarr").stderr.splitlines()
    assert line == (
        "nothing was done: the stored objects of 'packed.zarr' are replaced, after they were "
        "verified; meanwhile, or if it is killed then, no program reads the array; say --yes to do "
        "that, or name a destination"
    )


# ------------------------------------------------------------- help


def test_without_arguments_it_shows_five_commands(here: Path) -> None:
    """Each is there, takes these arguments, and has one line; the status is 0."""
    result = run()
    assert result.exit_code == 0
    shown = re.findall(r"^  zarr-shardstore (\S+) (\S.*?)  +[A-Z]", result.stdout, re.M)
    assert [name for name, _ in shown] == ["info", "shard", "map", "fsck", "import"]
    for name, options in shown:
        text = run(name, "--help").stdout
        assert all(f"{option} " in text for option in re.findall("--[a-z-]+", options))
        assert options.count(" NEW") <= text.count("estination") + text.count("DESTINATION")
    assert "zarr-shardstore --help" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 88


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell gets a script, and the script the commands."""
    variable = "_ZARR_SHARDSTORE_COMPLETE"
    options: dict[str, Any] = {"prog_name": "zarr-shardstore"}
    script = run(env={variable: f"source_{shell}"}, **options)
    assert variable in script.stdout
    words = {"COMP_WORDS": "zarr-shardstore un", "COMP_CWORD": "1"}
    words |= {
        "_TYPER_COMPLETE_ARGS": "zarr-shardstore un",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    found = run(env={variable: f"complete_{shell}", **words}, **options)
    assert "unshard" in found.stdout
    assert "reshard" not in found.stdout


def test_exit_codes_are_in_one_table() -> None:
    """The page, the help and the code say the same."""
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\d+)` \| (.*) \|$", page, re.M))
    assert rows == {str(n): text for n, text in EXIT_CODES.items()}
    listed = re.findall(r"^ +(\d+)  (.*)$", run("--help").stdout.split("Exit codes:")[1], re.M)
    assert dict(listed) == rows
    source = "".join(file.read_text() for file in (ROOT / "zarr_shardstore/cli").glob("*.py"))
    used = re.findall(r"typer.Exit\((\d+)|^_(?:LEFT|INTERRUPTED) = (\d+)", source, re.M)
    assert {int(a or b) for a, b in used} <= EXIT_CODES.keys()


def test_the_commands_are_these() -> None:
    """So that the tests above have none forgotten."""
    names = [command.name for command in app.registered_commands]
    assert names == COMMANDS
    listed = run("--help").stdout
    assert all(f"  {name} " in listed for name in names)
    assert "..." not in listed.split("Commands:")[1], "short help is cut"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example_which_runs(command: str, native: StandIn) -> None:
    """As it is written there; conversions with the true tools."""
    text = run(command, "--help").stdout
    (example,) = re.findall(r"Example: (.*)", text)
    program, *args = shlex.split(example)
    assert (program, args[0]) == ("zarr-shardstore", command)
    if command == "serve":
        return  # it never ends; the page of the server runs it
    if command in ("adopt", "import"):
        for name in ("a.h5", "b.h5", "in.h5"):
            with h5py.File(name, "w") as file:
                file["raw"] = np.zeros((4, 4))
    if command == "shard":  # the one that makes what the others take
        shutil.rmtree("packed.zarr")
    result = run(*args)
    assert result.exit_code == 0, result.output


def test_commands_on_pages_have_options_that_there_are() -> None:
    """In the README and on the site."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for line in re.findall(r"^\$? ?(zarr-shardstore .*)$", text, re.M):
        _, command, *args = shlex.split(line, comments=True)
        if command.startswith("--"):
            continue
        help_text = run(command, "--help").stdout
        for option in re.findall(r"--[a-z-]+", " ".join(args)):
            assert f"{option} " in help_text, line
