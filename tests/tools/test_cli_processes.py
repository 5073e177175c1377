"""The command line as a process: exit codes, streams, terminals, interrupts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zarr_shardstore
from tests.support.cli_stores import enter_directory_with_stores


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a store of plain chunks and one of shards."""
    return enter_directory_with_stores(tmp_path, monkeypatch)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(zarr_shardstore.__file__).parents[1])}


def process(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        **{"capture_output": True, "text": True, "timeout": 120, "env": environment(), **options},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_as_a_module() -> None:
    """Exit codes and streams of a process."""
    module = ("-m", "zarr_shardstore")
    done = process(*module, "--version")
    assert (done.returncode, done.stdout) == (0, f"{zarr_shardstore.__version__}\n")
    done = process(*module, "info", "nope.zarr")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the store 'nope.zarr' does not exist\n"
    done = process(*module, "shard", "volume.zarr")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_that_has_no_blocks_gets_other_signs() -> None:
    """And no UnicodeEncodeError."""
    env = {**environment(), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = process("-m", "zarr_shardstore", "map", "packed.zarr", "raw", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2] == "###"
    done = process("-m", "zarr_shardstore", "info", "packed.zarr", env=env)
    assert done.returncode == 0, done.stderr
    assert "raw  uint16" in done.stdout


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_the_extra_one_sentence_says_what_to_install(name: str) -> None:
    """Exit code 1, no traceback."""
    code = f"import runpy, sys; sys.modules['{name}'] = None\n"
    code += "runpy.run_module('zarr_shardstore', run_name='__main__')"
    done = process("-c", code)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install 'zarr-shardstore[cli]'" in line


def test_chunks_go_into_shards_and_back(here: Path) -> None:
    """Into another store, in place to other shards, and to chunks again: each time all values."""
    expected = zarr.open_array("volume.zarr", path="raw")[:]
    module = ("-m", "zarr_shardstore")
    rule = ["--chunks-per-shard", "raw=2,4"]
    for args, shards in (
        (["shard", "volume.zarr", "new.zarr", *rule], (4, 12)),
        (["reshard", "new.zarr", "--chunks-per-shard", "4", "--yes"], (8, 12)),
        (["unshard", "new.zarr", "--yes"], None),
    ):
        done = process(*module, *args, "--processes", "--workers", "2")
        assert (done.returncode, done.stdout.splitlines()[-1][:9]) == (0, "40 chunks"), done.stderr
        found = zarr.open_array("new.zarr", path="raw", mode="r")
        assert found.shards == shards
        np.testing.assert_array_equal(found[:], expected)
    info = json.loads(process(*module, "info", "new.zarr", "--json").stdout)
    before = json.loads(process(*module, "info", "volume.zarr", "--json").stdout)
    assert info["arrays"] == before["arrays"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_a_terminal_sees_bars_and_a_pipe_does_not() -> None:
    """Bars on stderr, so that stdout can be kept."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    args = [sys.executable, "-m", "zarr_shardstore", "shard", "volume.zarr", "new.zarr", "--json"]
    env = {**environment(), "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env) as done:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65_536):
                shown += data
        except OSError:  # on Linux the end of a pseudo-terminal is an error
            pass
        assert done.stdout is not None
        assert json.loads(done.stdout.read())["n_chunks"] == 40
    os.close(ours)
    assert done.returncode == 0
    assert b"raw sharded" in shown
    assert b"\x1b[" in shown
    assert b"chunks/s" in shown
