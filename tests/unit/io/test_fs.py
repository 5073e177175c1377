"""Files: replaced in one step, and read in pieces of any size."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from zarr.storage import LocalStore, WrapperStore

from zarr_shardstore.io.backends.wrapped_files import WrappedFilesBackend
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.fs import new_file, read_at, write_at
from zarr_shardstore.shards.requests import Get


def test_a_file_that_cannot_be_renamed_is_closed_once(tmp_path: Path) -> None:
    """Its number is soon another file's; nothing is left of it."""
    target = tmp_path / "a"
    target.mkdir()
    (target / "b").write_bytes(b"")
    with pytest.raises(OSError, match="a"), new_file(str(target)) as fd:
        write_at(fd, [b"1"], 0)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_read_has_fewer_bytes_where_the_file_ends(tmp_path: Path, start: int, more: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(stored := os.urandom(10))
    with path.open("rb") as file:
        found = read_at(file.fileno(), start, 10 + more)
    assert found == stored[start : 10 + more]
    assert found.readonly


@pytest.mark.parametrize(("call", "open_one"), [("open", fs.open_to_read), ("scandir", fs.scan)])
def test_a_link_to_itself_is_missing_also_after_files_were_closed(
    call: str, open_one: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try, after too many files were open, gives the same error as the first."""
    errors = [errno.EMFILE, errno.ELOOP]

    def refuse(path: str, *_: int) -> int:
        raise OSError(errors.pop(0), "refused", path)

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(FileNotFoundError):
        open_one("p")
    assert not errors


@pytest.mark.parametrize(
    ("fraction_ns", "age_s", "is_version"),
    [(0, 1.9, False), (0, 2.2, True), (500, 0.01, False), (500, 0.1, True), (500, 1.9, True)],
)
async def test_times_of_whole_seconds_are_of_a_slow_clock(
    tmp_path: Path, fraction_ns: int, age_s: float, *, is_version: bool
) -> None:
    """A file of such a time may change within the next two seconds and keep it."""
    time_ns = 1_700_000_000 * 10**9 + fraction_ns
    path = tmp_path / "a"
    path.write_bytes(b"1")
    os.utime(path, ns=(time_ns, time_ns))
    wrapped = WrappedFilesBackend(WrapperStore(LocalStore(tmp_path)))
    with mock.patch.object(time, "time_ns", return_value=time_ns + int(age_s * 1e9)):
        first, second = [await wrapped.get(Get("a")) for _ in range(2)]
        assert (first.version == second.version) is is_version
