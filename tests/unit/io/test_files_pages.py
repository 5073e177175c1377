"""Keys of local files, page by page: those that ``os.walk`` finds, and little is held."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bases import temporary_directory
from zarr_shardstore.io.backends.base import Pages
from zarr_shardstore.io.backends.zarr_store import next_page
from zarr_shardstore.io.local import files
from zarr_shardstore.io.local.files import is_side_file, keys_below

SEGMENTS = st.sampled_from(["a", "b", "c", "0", "1", "zarr.json", "x.__lock"])
PATHS = st.lists(st.lists(SEGMENTS, min_size=1, max_size=5).map("/".join), max_size=12)


def walked(root: Path, prefix: str) -> list[str]:
    """What `keys_below` must give."""
    keys = []
    for directory, _, names in os.walk(root / prefix):
        keys += [(Path(directory) / name).relative_to(root).as_posix() for name in names]
    return [key for key in keys if not is_side_file(key)]


@given(PATHS, st.sampled_from(["", "a/", "a/b/", "missing/"]), st.integers(1, 4))
def test_the_keys_are_those_of_a_walk(paths: list[str], prefix: str, n_at_once: int) -> None:
    """Law: however few names of a directory are looked at together."""
    root = temporary_directory()
    for path in paths:
        file = root / path
        if not any(parent.is_file() for parent in file.parents) and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_NAMES_AT_ONCE", n_at_once)
        keys = list(keys_below(os.path.join(root, ""), prefix))
    assert sorted(keys) == sorted(walked(root, prefix))
    assert list(keys_below(os.path.join(root, ""), prefix)) == walked(root, prefix)


def test_links_are_what_they_are_to_a_walk(tmp_path: Path) -> None:
    """To a file: a key. To a directory: none, also where it leads to itself. To nothing: it cannot
    be read, and is none."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").touch()
    for name, target in (("f", "d/file"), ("other", "d"), ("loop", "."), ("gone", "missing")):
        (tmp_path / name).symlink_to(tmp_path / target)
    keys = list(keys_below(f"{tmp_path}/", ""))
    assert sorted(keys) == ["d/file", "f"]
    assert set(walked(tmp_path, "")) - set(keys) == {"gone"}


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that was removed meanwhile is none."""

    def failing(_: str) -> None:
        raise error

    monkeypatch.setattr("os.scandir", failing)
    error: OSError = FileNotFoundError()
    assert list(keys_below(f"{tmp_path}/", "")) == []
    error = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        list(keys_below(f"{tmp_path}/", ""))


def test_a_deep_tree_needs_no_deep_stack(tmp_path: Path) -> None:
    """Nor a file descriptor for each level."""
    depth = min(sys.getrecursionlimit(), 1200)
    (tmp_path / "other").touch()  # so that the directory itself stays
    path = str(tmp_path)
    for _ in range(depth):
        path += "/d"
        os.mkdir(path)
    Path(path, "key").touch()
    try:
        assert sorted(keys_below(f"{tmp_path}/", "")) == ["d/" * depth + "key", "other"]
    finally:  # by ourselves: what removes old directories after tests cannot go so deep
        Path(path, "key").unlink()
        os.removedirs(path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
def test_closing_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a large directory; also if the pages are only forgotten."""
    monkeypatch.setattr(files, "_NAMES_AT_ONCE", 2)
    (tmp_path / "d").mkdir()
    for i in range(9):
        (tmp_path / "d" / str(i)).touch()
    before = len(os.listdir("/proc/self/fd"))
    pages = Pages(keys_below(f"{tmp_path}/", ""))
    assert len(pages.next_page(3)) == 3
    assert len(os.listdir("/proc/self/fd")) > before
    pages.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert pages.next_page(3) == []
    pages = Pages(keys_below(f"{tmp_path}/", ""))
    pages.next_page(3)
    del pages
    assert len(os.listdir("/proc/self/fd")) == before


async def test_pages_of_a_store() -> None:
    """Full ones, then fewer keys; side files are no keys."""

    async def keys() -> AsyncGenerator[tuple[str, object, int | None], None]:
        for i in range(7):
            yield f"k{i}", i, 9 * i
            yield f"k{i}.__lock", None, None

    listed = keys()
    pages = [await next_page(listed, 3) for _ in range(4)]
    assert pages == [["k0", "k1", "k2"], ["k3", "k4", "k5"], ["k6"], []]
    assert [[*page.versions] for page in pages] == [[0, 1, 2], [3, 4, 5], [6], []]
    assert [[*page.sizes] for page in pages] == [[0, 9, 18], [27, 36, 45], [54], []]
