"""Pages of the keys of a base store, of bounded size."""

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
"""Names of one directory in memory. A directory with fewer names is read completely before its
keys are listed: a file that is replaced concurrently is not missed, and no directory stays open
from page to page."""


_Part: TypeAlias = tuple[list[str], list[str]]


class IteratorPages:
    """Pages of an iterator of keys.

    Thread safety: any thread may call any method; `close` waits for a page that is being read.
    """

    def __init__(self, keys: Iterator[str]) -> None:
        self._keys = keys
        self._lock = threading.Lock()

    def next_page(self, n_keys: int) -> VersionedKeys:
        """Return at most so many of the next keys; none if there are no more."""
        with self._lock:
            return VersionedKeys(islice(self._keys, n_keys))

    def close(self) -> None:
        """Close what the iterator has open; there are no more keys."""
        with self._lock:
            if isinstance(self._keys, Generator):
                self._keys.close()


async def next_page(
    listed: AsyncIterator[str] | AsyncIterator[tuple[str, object]], n_keys: int
) -> VersionedKeys:
    """Return at most so many of the next keys of a store; none if there are no more."""
    keys: list[str] = []
    versions: list[object] = []
    async for item in listed:
        key, version = (item, None) if isinstance(item, str) else item
        if not is_hidden(key):
            keys.append(key)
            versions.append(version)
            if len(keys) == n_keys:
                break
    return VersionedKeys(keys, versions)


def keys_below(root: str, prefix: str) -> Iterator[str]:
    """Yield the keys of the files in a directory, recursively; `root` ends with a separator.

    As in ``os.walk``, links to directories are not followed and are no keys, and directories that
    cannot be listed are left out, unless the disk fails. A link to nothing is no key, either.
    Unlike in ``os.walk``, the names of a large directory are never all in memory.
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
    """Yield what is directly in a directory: keys of files, prefixes of directories."""
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
