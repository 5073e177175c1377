"""Objects of a store that are no chunks and no documents: remains, what is in use, and the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from zarr_shardstore.check.findings import Finding, finding
from zarr_shardstore.errors import ShardConflictError, UnsupportedError
from zarr_shardstore.format.journal import decode_journal
from zarr_shardstore.inspect.open_base import STAGING, BaseStoreHandle
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, KeptLock
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX
from zarr_shardstore.metadata.documents import parse_json

_PROCESSES = "/proc"


def find_conversions(base: BaseStoreHandle) -> tuple[list[Finding], list[str]]:
    """Find unfinished conversions; also return the prefixes of values without an array yet."""
    names = base.names(STAGING)
    manifests = [f"{STAGING}{name}/manifest.json" for name in sorted(names) if name != "lock"]
    found: list[Finding] = []
    prefixes: list[str] = []
    is_running = is_locked(base, f"{STAGING}lock")
    for key, value in zip(manifests, base.values(manifests, check=False), strict=True):
        doc = None if value is None else parse_json(value)
        if doc is None:
            text = "remains of a conversion: any conversion in place removes them"
            found.append(finding("unfinished_conversion", key, text))
            continue
        state, path = doc.get("state"), str(doc.get("path", ""))
        if not doc.get("is_staged"):
            prefixes.append(str(doc.get("prefix")))
        text = f"a conversion of {path!r} was not finished (state {state!r}): run it again"
        if is_running:
            text = f"the array {path!r} is being converted"
            found.append(finding("in_use", key, text, array=path))
        else:
            severity = "warning" if state == "staging" else "error"
            more = {"array": path, "severity": severity}
            found.append(finding("unfinished_conversion", key, text, **more))
    return found, prefixes


def is_locked(base: BaseStoreHandle, key: str) -> bool:
    """Return whether a process has the lock with that key; no file is made."""
    if not isinstance(base.backend, LocalBackend):
        return False
    lock = KeptLock(base.backend.path_of(key), is_shared=True)
    try:
        lock.acquire(0, "it is locked")
    except ShardConflictError:
        return True
    except (OSError, UnsupportedError):
        return False
    finally:
        lock.close()
    return False


class SideFiles:
    """Temporary files, locks and journals; told apart from those that a writer uses now."""

    def __init__(self, base: BaseStoreHandle) -> None:
        self._base = base

    def check(self, keys: Sequence[str]) -> Iterator[Finding]:
        # A writer may have ended since they were listed, and removed its own.
        sizes = self._base.sizes(keys)
        for key, size in zip(keys, sizes, strict=True):
            if size is not None:
                yield self._finding(key)

    def _finding(self, key: str) -> Finding:
        shard = key
        for suffix in (LOCK_SUFFIX, JOURNAL_SUFFIX):
            shard = shard.removesuffix(suffix)
        if self._is_used(key, shard):
            return finding("in_use", key, "a writer of this machine has it open")
        if key.endswith(LOCK_SUFFIX):
            text = "a lock that no process of this machine has: a writer was killed"
            return finding("lock_file", key, text)
        if not key.endswith(JOURNAL_SUFFIX):
            text = "a temporary file that no process of this machine has open"
            return finding("partial_file", key, text)
        (value,) = self._base.values([key], check=False)
        journal = None if value is None else decode_journal(bytes(value))
        text = "its writer was killed; the shard is whole, and the next write or compact seals it"
        if journal is not None and journal.record is not None:
            text = "a change was cut off: readers of this package undo it, others may see half"
        return finding("journal", key, text)

    def _is_used(self, key: str, shard: str) -> bool:
        backend = self._base.backend
        if not isinstance(backend, LocalBackend):
            return False
        paths = [backend.real_root + each for each in (key, shard)]
        if paths[1] in open_shards.files or paths[1] in open_shards.replaced:
            return True
        if is_locked(self._base, shard + LOCK_SUFFIX):
            return True
        if os.path.realpath(paths[0]) in self._open_files:
            return True
        # A writer of many shards closes the files of the oldest, and keeps their journals.
        return key != shard and any(
            path.startswith(backend.real_root) and path.endswith(JOURNAL_SUFFIX)
            for path in self._open_files
        )

    @cached_property
    def _open_files(self) -> set[str]:
        """Paths of the files that processes of this user have open, where the system tells."""
        found: set[str] = set()
        with suppress(OSError):
            for process in filter(str.isdigit, os.listdir(_PROCESSES)):
                with suppress(OSError):
                    directory = f"{_PROCESSES}/{process}/fd"
                    for fd in os.listdir(directory):
                        with suppress(OSError):
                            found.add(os.readlink(f"{directory}/{fd}"))
        return found
