"""Files and directories as keys: which there are, their values, and their removal.

A disk that fails, or a directory that may not be listed, raises an error. Its files are never taken
for missing.

Links below the root: an operation on one key follows them, an operation on many keys does not.
``spec_notes/guarantees.md`` has the rule.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any, TypeVar

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.consolidated_index import is_consolidated_index_key
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.fs import NO_FILE, opening
from zarr_shardstore.io.local.locks import LOCK_SUFFIX
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX as JOURNAL_SUFFIX
from zarr_shardstore.metadata.documents import ADOPTED, adopted_files, parse_json

T = TypeVar("T")

# Temporary files, as LocalStore names them, locks, and journals. A killed writer leaves them.
_SIDE_FILE = re.compile(
    rf"\.[0-9a-f]{{32}}\.partial$|(?<=[^/])({re.escape(LOCK_SUFFIX)}|{re.escape(JOURNAL_SUFFIX)})$"
)

QUARANTINE = ".zarr_shardstore_quarantine"
"""Directory in the root of a store for the originals of repaired objects. No tool shows it."""


def is_side_file(name: str) -> bool:
    """Whether a file is no object, by its name or its key."""
    return _SIDE_FILE.search(name) is not None


def is_hidden(name: str) -> bool:
    """Whether a file is not to be listed, by its name or its key."""
    is_private = _SIDE_FILE.search(name) is not None or is_consolidated_index_key(name)
    return is_private or name.startswith(QUARANTINE)


def tidy(top: str) -> None:
    """Remove side files, and directories that are empty without them; `top` itself stays."""
    for directory, _, names in os.walk(top, topdown=False):
        for name in filter(is_side_file, names):
            with suppress(OSError):
                os.unlink(os.path.join(directory, name))
        if directory.rstrip(os.sep) != top.rstrip(os.sep):
            with suppress(OSError):
                os.rmdir(directory)


def names_in(root: str, prefix: str) -> list[str]:
    """Return the names in a directory that are part of a key.

    Left out: directories without files, links to nothing, and links to a directory above them,
    which a recursive listing would follow for ever.
    """
    try:
        with fs.scan(root + prefix) as entries:
            return [
                entry.name
                for entry in entries
                if not is_hidden(entry.name) and _has_keys(entry, root, prefix)
            ]
    except NO_FILE:
        return []


def _has_keys(entry: os.DirEntry[str], root: str, prefix: str) -> bool:
    try:
        if not _look(entry.is_dir):
            return bool(_look(entry.is_file))
        leads_back = entry.is_symlink() and _leads_back(entry.path, root, prefix)
        return not leads_back and holds_a_file(entry.path)
    except NO_FILE:  # it was removed meanwhile
        return False
    except PermissionError:  # it may have keys, and each read says what is forbidden
        return True


def _leads_back(link: str, root: str, prefix: str) -> bool:
    """Whether a link in a directory leads to that directory, or to one above it."""
    target = os.path.join(os.path.realpath(link), "")
    names = prefix.split("/")[:-1]
    above = (os.path.join(root, *names[:n]) for n in range(len(names) + 1))
    return any(os.path.join(os.path.realpath(path), "").startswith(target) for path in above)


def _look(call: Callable[..., T], *args: Any) -> T | None:
    """Return what a call finds at a path; ``None`` for nothing, and for a link to nothing."""
    # Not ``os.path.isfile`` and such: to them a file is missing if the disk fails.
    try:
        return call(*args)
    except NO_FILE:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def link_on_way(root: str, key: str) -> str | None:
    """Return the first directory of a key or a prefix, up to its last slash, that is a link."""
    path = root
    for name in key.split("/")[:-1]:
        path = os.path.join(path, name)
        if _is_link(path):
            return path
    return None


def link_below(directory: str) -> str | None:
    """Return the path of a link to a directory, however deep in a directory."""
    for top, names, _ in os.walk(directory, onerror=_raise_if_broken):
        for name in names:
            if _is_link(path := os.path.join(top, name)):
                return path
    return None


def refuse_links(root: str, key: str) -> None:
    """Raise `SpecError` if the way to many keys, which would be removed, leads through a link."""
    link = link_on_way(root, key)
    if link is not None:
        raise SpecError(
            f"{key!r} leads through the link {link!r}: what it leads to is not removed at once. "
            f"Remove the link, or open {os.path.realpath(link)!r} as a store of its own"
        )


def refuse_adopted(root: str, prefix: str) -> None:
    """Raise `UnsupportedError` if an array with keys that start with a prefix has adopted files."""
    names = prefix.split("/")[:-1]
    above = (os.path.join(root, *names[:n]) for n in range(len(names)))
    below = os.walk(root + prefix)
    for top, directories, _ in chain(((path, [], []) for path in above), below):
        try:
            with open(fs.open_to_read(os.path.join(top, "zarr.json")), "rb") as file:
                doc = parse_json(file.read()) or {}
        except OSError:
            continue
        if doc.get("node_type") == "array":
            directories.clear()  # they have chunks
        if adopted_files(doc) and doc[ADOPTED].get("link") != "copy":
            raise UnsupportedError(
                f"the array in {top!r} has adopted files of other formats: undo the adoption "
                "before you remove it (undo_adoption, zarr-shardstore adopt --undo)"
            )


def remove_directory(root: str, prefix: str) -> None:
    """Remove all files whose keys begin with a prefix, which is empty or ends with a slash.

    Of a link, the prefix itself or below it, only the link is removed. Checked by `refuse_links`.
    """
    path = root + prefix.removesuffix("/")
    refuse_links(root, prefix.removesuffix("/"))
    if not is_directory(path):
        return
    refuse_adopted(root, prefix)
    for found in [path] if prefix else [os.path.join(root, name) for name in os.listdir(root)]:
        if os.path.isdir(found) and not _is_link(found):
            fs.remove_tree(found)
        else:
            fs.unlink(found)


def holds_a_file(directory: str) -> bool:
    """Whether there is a file that is no side file, or a link to a directory, however deep."""
    return opening(
        lambda: any(
            any(not is_hidden(name) for name in names)
            or any(_is_link(os.path.join(top, name)) for name in directories)
            for top, directories, names in os.walk(directory, onerror=_raise_if_broken)
        )
    )


def size_of_file(path: str) -> int | None:
    """Return the size of a file in bytes; ``None`` if there is none."""
    status = _look(os.stat, path)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def _is_link(path: str) -> bool:
    status = _look(os.lstat, path)
    return status is not None and stat.S_ISLNK(status.st_mode)


def is_directory(path: str) -> bool:
    status = _look(os.stat, path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _raise_if_broken(error: OSError) -> None:
    if not isinstance(error, NO_FILE):
        raise error


_NAMES_AT_ONCE = 1024
"""Names of one directory in memory. A smaller directory is read completely before its keys are
listed: a file that is replaced concurrently is not missed, and the directory does not stay open."""


def keys_below(root: str, prefix: str, shows_all: bool = False) -> Iterator[str]:
    """Yield the keys of the files in a directory, recursively; `root` ends with a separator.

    As in ``os.walk``, links to directories are not followed. A link to nothing is no key. The names
    of a large directory are never all in memory.
    """
    todo = [_parts_of(root, prefix, shows_all)]
    while todo:
        part = next(todo[-1], None)
        if part is None:
            todo.pop()
            continue
        files, directories = part
        yield from files
        todo += [_parts_of(root, directory, shows_all) for directory in reversed(directories)]


def _parts_of(root: str, prefix: str, shows_all: bool) -> Iterator[tuple[list[str], list[str]]]:
    """Yield what is directly in a directory: keys of files, prefixes of directories."""
    with suppress(*NO_FILE), fs.scan(root + prefix) as entries:
        while part := list(islice(entries, _NAMES_AT_ONCE)):
            files: list[str] = []
            directories: list[str] = []
            for entry in part:
                if not _look(entry.is_dir):
                    if (shows_all or not is_hidden(entry.name)) and _look(entry.is_file):
                        files.append(prefix + entry.name)
                elif not entry.is_symlink() and (shows_all or entry.name != QUARANTINE):
                    directories.append(f"{prefix}{entry.name}/")
            yield files, directories
