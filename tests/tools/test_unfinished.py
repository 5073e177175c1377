"""A conversion in place that was killed: reports say its state and the command that ends it."""

from __future__ import annotations

import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zarr

from zarr_shardstore import (
    Progress,
    ShardingStore,
    UnfinishedConversionError,
    check_store,
    from_native,
    get_shard_info,
    shard_store,
    to_native,
    unshard_store,
)

GOLDEN = Path(__file__).parents[1] / "golden/v0.1"
KILLED = sorted(path.name for path in GOLDEN.glob("half_converted-*"))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, which is ten times as fast."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["zarr-shardstore", *words]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_module("zarr_shardstore", run_name="__main__")
    status = int(ended.value.code or 0)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def command_in(text: str) -> list[str]:
    """The words of the command that a report names, as a shell would read them."""
    (found,) = set(re.findall(r"this finishes it: (zarr-shardstore .* --yes)", text))
    name, *words = shlex.split(found)
    assert name == "zarr-shardstore"
    return words


@pytest.mark.parametrize("name", KILLED)
def test_the_command_that_is_named_finishes_it(name: str, tmp_path: Path) -> None:
    """Pasted as it is printed, by `info`, `map` and `fsck`; nothing is left of the state then."""
    state = name.rpartition("-")[2]
    root = str(shutil.copytree(GOLDEN / name, tmp_path / "a store"))
    path = "g/z"
    info = run("info", root)
    assert info.returncode == 1
    assert f"(state {state!r})" in info.stdout
    words = command_in(info.stdout)
    fsck = run("fsck", root)
    assert fsck.returncode == 1
    assert command_in(fsck.stdout) == words
    drawn = run("map", root, path)
    assert drawn.returncode == 1
    assert command_in(drawn.stderr) == words
    if state != "staging":
        key = f"meta/root/{path}.array.json" if "draft" in name else None
        with pytest.raises(UnfinishedConversionError, match="`zarr-shardstore info` of the store"):
            open_it(root, path, key)
        if key is None:
            before = {file: file.read_bytes() for file in Path(root).rglob("*") if file.is_file()}
            for translate in (to_native, from_native, partial(from_native, zarr_format=2)):
                with pytest.raises(UnfinishedConversionError, match="run it again first"):
                    translate(root)
            after = {file: file.read_bytes() for file in Path(root).rglob("*") if file.is_file()}
            assert after == before
    done = run(*words)
    assert done.returncode == 0, done.stderr
    (array,) = get_shard_info(root).arrays
    assert (array.n_errors, array.is_sharded) == (0, words[0] == "shard")
    assert check_store(root).is_clean
    assert not (Path(root) / ".zarr_shardstore").exists()


@pytest.mark.parametrize("action", ["old objects removed", "new objects moved"])
def test_no_consolidated_index_of_the_old_shards_is_left(action: str, tmp_path: Path) -> None:
    """The run that finishes the exchange sees a document that declares none."""
    store = ShardingStore(tmp_path, chunks_per_shard=4)
    z: Any = zarr.create_array(store, name="a", shape=(32,), chunks=(2,), dtype="u2")
    z[:] = range(32)
    store.consolidate_index_sync("a")

    def end(progress: Progress) -> None:
        if progress.action == action:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unshard_store(tmp_path, progress=end)
    (note,) = unshard_store(tmp_path).notes
    assert "finished what an earlier run had begun" in note
    assert check_store(tmp_path).is_clean
    np.testing.assert_array_equal(zarr.open_array(tmp_path, path="a")[:], range(32))
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"zarr.json", "c"}


def open_it(root: str, path: str, key: str | None) -> None:
    from zarr_shardstore import ShardingMapping

    if key is None:
        zarr.open_array(ShardingStore(root), path=path, mode="r")
    else:
        ShardingMapping(root)[key]


def test_a_conversion_that_goes_on_is_no_damage(tmp_path: Path) -> None:
    """Its lock is held: `info` says that the array is being converted."""
    root = shutil.copytree(GOLDEN / "half_converted-shard_v3-staging", tmp_path / "v")
    code = (
        "import fcntl, sys\n"
        f"file = open({str(root / '.zarr_shardstore/lock')!r}, 'a+')\n"
        "fcntl.fcntl(file, 37, __import__('struct').pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        (array,) = get_shard_info(str(root)).arrays
        other.communicate()
    assert array.n_errors == 0
    assert "is being converted" in array.notes[-1]


def test_a_manifest_of_another_version_names_no_command(tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "half_converted-shard_v3-staging", tmp_path / "v")
    (manifest,) = root.glob(".zarr_shardstore/*/manifest.json")
    odd: Any
    for odd in ("{}", "[]", '{"state": 7, "path": [], "is_staged": 1}', '{"state": "staging"}'):
        manifest.write_text(odd)
        info = get_shard_info(str(root))
        assert np.prod(info.arrays[0].shape or ()) > 0
        check_store(str(root))


def test_the_command_that_is_named_has_the_options_of_the_run(tmp_path: Path) -> None:
    z: Any = zarr.create_array(tmp_path, name="a", shape=(32,), chunks=(2,), dtype="u2")
    z[:] = range(32)

    def end(progress: Progress) -> None:
        raise KeyboardInterrupt

    options: Any = {"index_location": "start", "declaration": "storage_transformers"}
    with pytest.raises(KeyboardInterrupt):
        shard_store(tmp_path, chunks_per_shard=4, **options, progress=end)
    assert run(*command_in(run("info", str(tmp_path)).stdout)).returncode == 0
    (transformer,) = json.loads((tmp_path / "a/zarr.json").read_text())["storage_transformers"]
    assert transformer["configuration"]["index_location"] == "start"
    assert transformer["configuration"]["chunks_per_shard"] == [4]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_with_other_options_says_what_it_discards(elsewhere: bool) -> None:
    """The values that a killed run with other shards had written."""
    start: dict[str, bytes] = {}
    plain = ShardingStore(start, None)
    z: Any = zarr.create_array(plain, name="z", shape=(64,), chunks=(1,), dtype="u1")
    z[:] = 7

    class KilledError(BaseException):
        pass

    class Killing(dict[str, bytes]):
        n_left = 10**9

        def __setitem__(self, key: str, value: bytes) -> None:
            self.n_left -= "/c/" in key
            if self.n_left < 0:
                raise KilledError
            super().__setitem__(key, value)

    base = Killing() if elsewhere else Killing(start)
    stores = (start, base) if elsewhere else (base,)
    base.n_left = 3
    with pytest.raises(KilledError):
        shard_store(*stores, chunks_per_shard=4)
    base.n_left = 10**9
    (array,) = shard_store(*stores, chunks_per_shard=8).arrays
    assert "with other options had written was discarded" in array.reason
    z = zarr.open_array(ShardingStore(base), path="z")
    assert (z[:] == 7).all()
    assert check_store(base).is_clean
