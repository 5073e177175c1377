"""Locks, journals and temporary files: in use by a writer, or left by a killed one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from glob import iglob
from typing import Any

from zarr_shardstore.access import (
    BaseStoreHandle,
    LocalBackend,
    backends,
    file_keys,
    fs,
    journals,
    locks,
    metadata,
    open_shards,
    shard_format,
)
from zarr_shardstore.tools.check.findings import Finding, finding
from zarr_shardstore.tools.inspect.conversions import is_locked

_PAUSE_S = 0.1

_IN_USE = "a writer of this machine uses it"

_YOUNG_S = 60
"""Time from the first chunk of a flush of frames to the shape."""


def frames_lock(path: str) -> str:
    return metadata.Node("v3", path).chunk_prefix + locks.FRAMES_LOCK


def is_growing(base: BaseStoreHandle, path: str) -> bool:
    """Whether a writer of this machine appends frames to an array: chunks come before the shape."""
    return base.backend.scope(path) in backends.growing or is_locked(base, frames_lock(path))


def is_young(base: BaseStoreHandle, key: str) -> bool:
    """Whether a writer without a lock may have stored a local file, and the shape not yet."""
    backend = base.backend
    state = fs.state_of(backend.path_of(key)) if isinstance(backend, LocalBackend) else None
    return state is not None and time.time() - state[2] / 1e9 < _YOUNG_S


def check_side_files(base: BaseStoreHandle, keys: Sequence[str]) -> Iterator[Finding]:
    """Distinguish side files that a writer uses now from side files of killed writers.

    A file is unused if no process of this machine has it open. It must also stay the same during
    the look at all open files.
    """
    before = [_state(base, key) for key in keys]
    there = {key: state for key, state in zip(keys, before, strict=True) if state is not None}
    opened = _open_files() if there else set()
    found = {key: _of_side_file(base, key, opened) for key in there}
    if any(each.kind != "in_use" for each in found.values()):
        time.sleep(_PAUSE_S)  # a temporary file is renamed after it was closed
    for key, each in found.items():
        now = _state(base, key)
        if now == there[key]:
            yield each
        elif now is not None:
            yield finding("in_use", key, _IN_USE)


def _state(base: BaseStoreHandle, key: str) -> Any:
    if not isinstance(base.backend, LocalBackend):
        return base.sizes([key])[0]
    try:
        status = os.stat(base.backend.path_of(key))
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _of_side_file(base: BaseStoreHandle, key: str, opened: Set[str]) -> Finding:
    shard = key.removesuffix(locks.LOCK_SUFFIX).removesuffix(file_keys.JOURNAL_SUFFIX)
    if _is_used(base, key, shard, opened):
        return finding("in_use", key, _IN_USE)
    if key.endswith(locks.LOCK_SUFFIX):
        writer = "append_frames" if key.endswith(locks.FRAMES_LOCK) else "writer"
        text = f"a lock that no process of this machine has; the next {writer} takes it"
        if base.options.locking == "lockfile":
            text = "a lock; remove it if its writer was killed, on whatever machine"
        return finding("lock_file", key, text)
    if not key.endswith(file_keys.JOURNAL_SUFFIX):
        text = "a temporary file that no process of this machine has open"
        return finding("partial_file", key, text)
    (value,) = base.values([key], check=False)
    journal = None if value is None else journals.decode_journal(bytes(value))
    text = "its writer was killed; the shard is whole, and the next write or compact seals it"
    if journal is not None and journal.record is not None:
        text = "a change was cut off: readers of this package undo it, others may see half"
    return finding("journal", key, text)


def _is_used(base: BaseStoreHandle, key: str, shard: str, opened: Set[str]) -> bool:
    backend = base.backend
    if not isinstance(backend, LocalBackend):
        return False
    path = backend.root + shard
    if path in open_shards.files or path in open_shards.replaced:
        return True
    is_open = os.path.realpath(backend.path_of(key)) in opened
    if is_open or is_locked(base, shard + locks.LOCK_SUFFIX):
        return True
    # A writer of many shards closes the files of the oldest, and keeps their journals. A temporary
    # file is closed under the lock of its shard, which is in the same directory.
    suffix, above = file_keys.JOURNAL_SUFFIX, backend.root
    if key == shard:
        suffix, above = locks.LOCK_SUFFIX, os.path.dirname(path) + os.sep
    return any(name.endswith(suffix) and name.startswith(above) for name in opened)


def _open_files() -> set[str]:
    """Return the paths of files that processes of this user have open, if the system has them."""
    found: set[str] = set()
    for descriptor in iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(os.readlink(descriptor))
    return found


def without_cut_change(
    data: shard_format.Bytes, stored: shard_format.Bytes | None
) -> shard_format.Bytes:
    """Undo a change of a shard that was copied together with its journal."""
    journal = None if stored is None else journals.decode_journal(bytes(stored))
    found = journals.find_repair(journal, len(data), lambda at, n: bytes(data[at : at + n]))
    if found is None:
        return data
    whole = bytearray(data)
    for offset, piece in found.writes:
        whole[offset : offset + len(piece)] = piece
    return bytes(whole[: found.size])
