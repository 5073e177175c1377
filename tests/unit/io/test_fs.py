"""Files: replaced in one step, and read in pieces of any size."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.fs import new_file, read_at, write_at


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
