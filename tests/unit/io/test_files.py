"""Local files: shares of the limit of open files, and reads of many of them."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from zarr.storage import LocalStore

from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.local import fs
from zarr_shardstore.shards.requests import Found, Get


@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "/dev/null"])
def test_links_to_what_is_no_file(tmp_path: Path, what: str) -> None:
    """No value: nobody waits for a pipe, or reads a device for ever."""
    if what == "pipe":
        os.mkfifo(tmp_path / what)
    (tmp_path / "link").symlink_to(tmp_path / what)
    backend = LocalBackend(LocalStore(tmp_path))
    assert backend.perform([Get("link")]) == [Found(None, None)]


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


@pytest.mark.parametrize("call", [fs.open_to_read, fs.scan])
def test_a_missing_file_leaves_no_cycle(tmp_path: Path, call: Callable[[str], object]) -> None:
    """Otherwise the files that the caller had open would be closed by the collector, much later."""

    class Open:
        """A file of the caller."""

    def read() -> weakref.ref[Open]:
        file = Open()
        with suppress(FileNotFoundError):
            call(str(tmp_path / "missing"))
        return weakref.ref(file)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()
