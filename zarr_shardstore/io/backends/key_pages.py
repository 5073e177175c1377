"""Keys of a base store, a page at a time, however many there are."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator, Iterator
from itertools import islice
from typing import TypeAlias

from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.files import (
    is_directory_entry,
    is_file_entry,
    is_hidden,
    raise_if_broken,
)
from zarr_shardstore.shards.shard_listing import VersionedKeys

_NAMES_AT_ONCE = 1024
"""Of one directory in memory. One that has fewer is read in one go: a file that is replaced
meanwhile is then not missed, and no directory stays open from page to page."""


_Part: TypeAlias = tuple[list[str], list[str]]


class KeyPages:
    """Cuts an iterator of keys into pages.

    Thread safety: methods may be called from any thread; `close` waits for a page that is
    being read.
    """

    def __init__(self, keys: Iterator[str]) -> None:
        self._keys = keys
        self._lock = threading.Lock()

    def next_page(self, n_keys: int) -> list[str]:
        """At most so many of the next keys; none if there are no more."""
        with self._lock:
            return list(islice(self._keys, n_keys))

    def close(self) -> None:
        """Close what the iterator has open; there are no more keys."""
        with self._lock:
            if isinstance(self._keys, Generator):
                self._keys.close()


async def next_page(keys: AsyncIterator[str], n_keys: int) -> list[str]:
    """At most so many of the next keys of a store; none if there are no more."""
    page: list[str] = []
    async for key in keys:
        if not is_hidden(key):
            page.append(key)
            if len(page) == n_keys:
                break
    return page


async def next_page_with_versions(
    keys: AsyncIterator[tuple[str, object]], n_keys: int
) -> VersionedKeys:
    """As `next_page`, of keys with the versions of their objects."""
    page: list[tuple[str, object]] = []
    async for key, version in keys:
        if not is_hidden(key):
            page.append((key, version))
            if len(page) == n_keys:
                break
    return VersionedKeys([key for key, _ in page], [version for _, version in page])


def keys_below(root: str, prefix: str) -> Iterator[str]:
    """Keys of the files in a directory, recursively; `root` ends with a separator.

    As ``os.walk`` does, links to directories are not followed and are no keys, and what cannot
    be listed is left out, unless the disk fails. What is no file, as a link that leads nowhere,
    is no key, either. It differs in what it holds: never all names of a large directory.
    """
    todo: list[str | Iterator[_Part]] = [prefix]
    while todo:
        top = todo.pop()
        parts = _parts_of(root, top) if isinstance(top, str) else top
        part = next(parts, None)
        if part is not None:
            files, directories = part
            yield from files
            todo.append(parts)
            todo += reversed(directories)


def _parts_of(root: str, prefix: str) -> Iterator[_Part]:
    """What is directly in a directory: keys of files, prefixes of directories."""
    try:
        entries = fs.scan(root + prefix)
    except OSError as error:
        raise_if_broken(error)
        return
    with entries:
        while True:
            try:
                part = list(islice(entries, _NAMES_AT_ONCE))
            except OSError as error:
                raise_if_broken(error)
                return
            files: list[str] = []
            directories: list[str] = []
            for entry in part:
                if not is_directory_entry(entry):
                    if not is_hidden(entry.name) and is_file_entry(entry):
                        files.append(prefix + entry.name)
                elif not entry.is_symlink():
                    directories.append(f"{prefix}{entry.name}/")
            yield files, directories
            if len(part) < _NAMES_AT_ONCE:
                return
