"""Files that replace others in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarr_shardstore.io.local.fs import new_file, write_at


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
