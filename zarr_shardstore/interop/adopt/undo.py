"""Undo of an adoption: its files get their old bytes back, see `adopt`."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from typing import Any

import crc32c

from zarr_shardstore.access import (
    consolidated_index,
    file_keys,
    fs,
    locks,
    metadata,
    open_base,
    shard_format,
)
from zarr_shardstore.errors import ShardConflictError, SpecError

DOCUMENT, STAGED = "zarr.json", ".zarr.json.adopting"

MAGIC = b"\x89ZSADOPT\r\n\x1a\n"
ID_NBYTES = 4
MIN_MAGIC = 4  # bytes of a cut magic at the end of a file that show a stopped adoption

_MARK = struct.Struct(f"<{len(MAGIC)}s{ID_NBYTES}sQQ")
MARK_NBYTES = _MARK.size + 4


def undo(
    root: str, *, discard: bool = False, dry_run: bool = False, only_stopped: bool = False
) -> list[str]:
    """Undo an adoption; with `only_stopped` a finished array stays."""
    staged, document = os.path.join(root, STAGED), os.path.join(root, DOCUMENT)
    if not (os.path.isfile(staged) or os.path.isfile(document)):
        if not os.path.isdir(root) or names_in(root) or not os.listdir(root):
            raise SpecError(f"there is no adoption in {root!r}")
        _remove_empty(root)  # the adoption was stopped before its document
        return []
    with locks.locked(staged, "os"):
        is_whole = not os.path.isfile(staged)  # perhaps another process has just finished it
        if is_whole and (only_stopped or not os.path.isfile(document)):
            return []
        if not is_whole and os.path.isfile(document):
            raise SpecError(
                f"an array was made in {root!r} since an adoption into it was stopped: copy that "
                f"array first, and remove {document!r}"
            )
        with open(document if is_whole else staged, "rb") as file:
            doc = metadata.parse_json(file.read())
        if doc is None:
            raise SpecError(f"{file.name!r} is no document of an array")
        noted = metadata.adopted_files(doc)
        if not noted:
            raise SpecError(f"the array in {root!r} was not adopted")
        open_base(root).seal()
        adoption = Adoption(root, doc)
        if adoption.is_copied():
            first = doc[metadata.ADOPTED]["destination"]
            raise SpecError(f"{root!r} is a copy of {first!r}, which has the files: undo that one")
        written = adoption.written() if is_whole else []
        if written and not discard:
            raise SpecError(
                f"in {root!r} were written since: {', '.join(map(repr, written[:5]))}. Copy the "
                "array first, or discard that (discard=True, --yes); nothing was changed"
            )
        adoption.check_names()
        if not dry_run:
            if is_whole:
                fs.replace(document, staged)
                fs.sync_directories(staged, root)
            left = adoption.take_back()
    if not dry_run:
        _remove_empty(root)
        if left:
            raise ShardConflictError("; ".join(left) + ": left as it is")
    return [each["path"] for each in noted]


def _is_same(path: str, other: str) -> bool:
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _remove_empty(root: str) -> None:
    file_keys.tidy(root)
    with suppress(OSError):
        os.rmdir(root)


def names_in(root: str) -> list[str]:
    """Return the names in a directory, without the temporary files of a killed process."""
    return [name for name in os.listdir(root) if not file_keys.is_side_file(name)]


class Adoption:
    """The files of an adoption, and their way there and back."""

    def __init__(self, root: str, doc: dict[str, Any]) -> None:
        note = doc[metadata.ADOPTED]
        self.root, self.link, self.files = root, note["link"], note["files"]
        self.added_nbytes = int(note["added_nbytes"])
        self._note = note
        self._is_in_place = _is_same(root, note["destination"])
        self._id = bytes.fromhex(note.get("id", "00" * ID_NBYTES))
        zeros = ["0"] * (len(doc["shape"]) - 1)
        self.targets = [os.path.join(root, "c", str(i), *zeros) for i in range(len(self.files))]
        """Path of the shard of each file."""

    def mark_of(self, nbytes: int) -> bytes:
        """Return the mark of a file that had so many bytes."""
        data = _MARK.pack(MAGIC, self._id, nbytes, self.added_nbytes)
        return data + crc32c.crc32c(data).to_bytes(4, "little")

    def is_copied(self) -> bool:
        """Whether the noted destination is another directory that still has this adoption."""
        for name in () if self._is_in_place else (DOCUMENT, STAGED):
            path = os.path.join(self._note["destination"], name)
            with suppress(OSError), open(path, "rb") as file:
                doc = metadata.parse_json(file.read()) or {}
                return bool(doc.get(metadata.ADOPTED) == self._note)
        return False

    def written(self) -> list[str]:
        """Return the files in the destination that a store has written or changed."""
        ours = dict(zip(self.targets, self.files, strict=True))
        found = [path for path, file in ours.items() if self._differs(path, file)]
        known = {DOCUMENT, STAGED}
        for top, _, names in os.walk(self.root):
            paths = [os.path.join(top, name) for name in names if name not in known]
            found += [p for p in paths if p not in ours and not file_keys.is_hidden(p)]
        return [os.path.relpath(path, self.root) for path in found]

    def _differs(self, path: str, file: dict[str, Any]) -> bool:
        """Whether a store has changed the shard of a file."""
        index = self._index_of(path) if os.path.isfile(path) else file["index_crc32c"]
        if index is None:  # a writer of the format has cut it off, or the shard is another file
            return self.link != "move" and not _is_same(path, file["path"])
        return bool(index != file["index_crc32c"])

    def _index_of(self, path: str) -> str | None:
        """Return the checksum of the index in which a file ends, if there is one.

        Empty if the shard has a journal: a writer that was killed may have left half an index.
        """
        if os.path.exists(locks.beside(path, file_keys.JOURNAL_SUFFIX)):
            return ""
        n_entries = (self.added_nbytes - MARK_NBYTES - 4) // shard_format.ENTRY_NBYTES
        spec = shard_format.ShardingSpec((n_entries,), shard_format.ZEP2_INDEX)
        with open(fs.open_to_read(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            index = bytes(fs.read_at(file.fileno(), max(0, size - spec.index_nbytes), size))
        try:
            shard_format.ShardIndex.decode(index, spec)
        except shard_format.IndexDamageError:
            return None
        return index[-4:].hex()

    def check_names(self) -> None:
        """Raise `SpecError` if a file cannot go back: another one has its name."""
        for file, target in zip(self.files, self.targets, strict=True):
            self._check_name(file, target)

    def _check_name(self, file: dict[str, Any], target: str) -> None:
        path = file["path"]
        is_taken = os.path.lexists(path) and not _is_same(target, path)
        if not is_taken or os.path.islink(target) or not os.path.isfile(target):
            return
        is_original = self._is_original(target, file) and not self._is_original(path, file)
        if self.link == "move" or is_original:
            raise SpecError(
                f"{target!r} cannot go back: {path!r} is another file, or was changed. Give one "
                "of them another name"
            )

    def _is_original(self, path: str, file: dict[str, Any]) -> bool:
        """Whether a file has its old size and time, or the mark after its old size."""
        if not os.path.isfile(path):
            return False
        old = file["nbytes"]
        with open(fs.open_to_read(path), "rb", buffering=0) as opened:
            status = os.fstat(opened.fileno())
            state = (status.st_size, status.st_mtime_ns)
            return state == (old, file["time_ns"]) or self._is_marked(opened.fileno(), old)

    def _is_marked(self, fd: int, old: int) -> bool:
        """Whether the mark, or its beginning, follows the old size of a file."""
        behind = bytes(fs.read_at(fd, old, old + MARK_NBYTES))
        return behind != b"" and self.mark_of(old).startswith(behind)

    def take_back(self) -> list[str]:
        """Cut the files and remove the destination; return sentences about files that are left."""
        left: list[str] = []
        for file, target in zip(self.files, self.targets, strict=True):
            self._check_name(file, target)
            path = file["path"]
            is_there, is_home = os.path.lexists(target), os.path.lexists(path)
            if is_there and not is_home and not os.path.islink(target):
                # Moved there, or its first name was removed: it may be the only copy.
                left += self._cut(target, file, is_shard=True)
                top = existing_above(path)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                fs.replace(target, path)
                fs.sync_directories(path, top)
                continue
            if self.link != "copy":
                left += self._cut(path, file, is_shard=_is_same(target, path))
            if is_there:
                fs.unlink(target)
        for top in (os.path.join(self.root, name) for name in ("c", file_keys.QUARANTINE)):
            if os.path.isdir(top):
                fs.remove_tree(top)
        with suppress(FileNotFoundError):
            fs.unlink(os.path.join(self.root, consolidated_index.CONSOLIDATED_INDEX_NAME))
        fs.unlink(os.path.join(self.root, STAGED))
        return left

    def _cut(self, path: str, file: dict[str, Any], *, is_shard: bool) -> list[str]:
        """Cut a file at its old size, if only the adoption and stores have written after it."""
        old = file["nbytes"]
        if not os.path.isfile(path) or not os.access(path, os.W_OK):
            return [f"{path!r} is gone, or cannot be written"]
        with open(fs.open_to_change(os.path.realpath(path)), "r+b", buffering=0) as opened:
            fd = opened.fileno()
            size = os.fstat(fd).st_size
            if size == old:
                return []
            if not (is_shard or self._is_in_place):  # it may be a shard of what this is a copy of
                return [f"{path!r} may have its index after {old} bytes: {self.root!r} was moved"]
            is_ours = self._is_marked(fd, old)
            if size > old + self.added_nbytes:
                is_ours = is_ours and self._index_of(path) is not None
            if not is_ours:
                return [f"{path!r}, which had {old} bytes, was changed by another program"]
            check_unlocked(fd, path)
            fs.truncate(fd, old)
            fs.sync(fd)
            with suppress(PermissionError):
                os.utime(fd, ns=(file["time_ns"], file["time_ns"]))
        return []


def existing_above(path: str) -> str:
    """Return the last directory above a path that exists."""
    while not os.path.isdir(path := os.path.dirname(path)):
        pass
    return path


def check_unlocked(fd: int, path: str) -> None:
    if not fs.try_flock(fd):
        raise SpecError(f"{path!r} is open in a program: close it there first")
