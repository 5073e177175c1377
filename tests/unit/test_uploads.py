"""Files that are written piece by piece."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarr_shardstore.io.local.fs import LocalUpload


def test_giving_up_closes_no_file_of_others(tmp_path: Path) -> None:
    """A file that could not be renamed is closed once: its number is soon another file's."""
    target = tmp_path / "a"
    target.mkdir()
    (target / "b").write_bytes(b"")
    upload = LocalUpload(str(target))
    upload.write([b"1"])
    with pytest.raises(OSError, match="a"):
        upload.finish()
    others = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)  # gets the number
    upload.abort()
    assert os.write(others, b"2") == 1
    os.close(others)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other"]
