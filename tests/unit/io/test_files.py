"""Local files: shares of the limit of open files, and reads of many of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarr_shardstore.io.local import files, fs


@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "/dev/null"])
def test_links_to_what_is_no_file(tmp_path: Path, what: str) -> None:
    """No value: nobody waits for a pipe, or reads a device for ever."""
    if what == "pipe":
        os.mkfifo(tmp_path / what)
    (tmp_path / "link").symlink_to(tmp_path / what)
    assert [f.value for f in files.read_files(f"{tmp_path}/", ["link"])] == [None]


@pytest.mark.parametrize("limit", [20, 64, 256, 1024, 4096, 1 << 20])
def test_what_is_kept_and_used_leaves_room(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Law: all shares together are less than the limit, for reads of many threads, too."""
    monkeypatch.setattr(fs, "_limit", lambda: limit)
    for n_threads in (1, 4, limit // 16 + 1):
        monkeypatch.setattr("threading.active_count", lambda n=n_threads: n)
        used = fs.max_cached_files() + 3 * fs.max_shards_of_writers()
        used += n_threads * fs.max_files_of_a_read()
        used += 3 * fs.max_shards_of_a_write()
        assert used < limit
        assert 1 <= fs.max_shards_of_a_read() < fs.max_files_of_a_read()
