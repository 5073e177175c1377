"""A process that may open few files: what is kept open gives way, whatever is read and written.

256 is the limit of macOS unless one raises it.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import zarr_shardstore
from tests.support import few_files
from tests.support.failing import open_files
from zarr_shardstore import ShardingMapping

pytest.importorskip("resource")


def run(*args: Any) -> dict[str, int]:
    roots = Path(zarr_shardstore.__file__).parents[1], Path(few_files.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, few_files.__file__, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, int] = json.loads(done.stdout)
    return report


@pytest.mark.thorough(of=6)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
@pytest.mark.parametrize(
    ("what", "limit"),
    [("reads", 64), ("writes", 64), ("both", 64), ("arrays", 64), ("both", 256)],
)
def test_a_process_that_may_open_few_files(tmp_path: Path, what: str, limit: int) -> None:
    """1,000 shards, eight threads: no call fails, and half of the limit is left for the user."""
    report = run(tmp_path, limit, what, "append")
    assert report["n_open"] <= limit // 2


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("n_failures", [1, 2])
def test_who_can_open_no_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, n_failures: int
) -> None:
    """Closes those that are kept, and tries once more. It may be others who have too many open:
    then the error comes out, and nothing is lost."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    keys = [f"data/root/c{i}" for i in (0, 4, 8)]
    m.update(dict.fromkeys(keys, b"a"))
    assert {path.removeprefix(f"{tmp_path}/") for path in open_files(tmp_path)} >= {
        f"data/root/c{i}" for i in range(3)
    }
    left = n_failures
    real = os.open

    def failing(path: Any, *args: Any, **options: Any) -> int:
        nonlocal left
        if left and str(path).endswith("note"):
            left -= 1
            raise OSError(code, os.strerror(code))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        if n_failures == 1:
            assert m.get("note") is None
        else:
            with pytest.raises(OSError, match=os.strerror(code)):
                m.get("note")
    assert open_files(tmp_path) == []
    m.update(dict.fromkeys(keys, b"b"))
    assert dict(m) == dict.fromkeys(keys, b"b")


def test_stores_with_lock_files_keep_no_file_open(tmp_path: Path) -> None:
    """A client of a network file system learns of writes of others when it opens a file."""
    for locking, n_open in (("lockfile", 0), ("os", 1)):
        m = ShardingMapping(tmp_path / locking, chunks_per_shard=4, locking=locking)
        m["data/root/c0"] = b"a"
        time.sleep(0.1)  # younger files are not cached
        assert [m["data/root/c0"] for _ in range(2)] == [b"a"] * 2
        assert len(open_files(tmp_path / locking)) >= n_open
        assert n_open or not open_files(tmp_path / locking)
