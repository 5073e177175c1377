"""Adoption: a shard index after its end makes a file of another format also a shard.

::

    c/0/0/0    ├── a.h5 as it was ──┤ mark ┤ shard index ┤      also by its own name, if linked

    mark       │ magic │ id │ nbytes of the file before │ nbytes of mark and index │ crc32c │

1. The document is the journal. It has the sizes of all files, and is synced under the name
   ``.zarr.json.adopting`` before anything is linked or written. It becomes ``zarr.json`` when
   all files have their index: until then there is no array.
2. A file is written after its end only, in order. So a cut at its noted size gives the original,
   byte for byte.
3. It is cut only if the mark, or its beginning, follows that size. Otherwise another program, or
   another adoption, has written there, and the file is left. The id is random; former versions
   wrote zeros, and noted none.
4. *Kill.* Before the document has its name, the next `adopt` into the same destination, or
   `undo_adoption`, takes all back. Afterwards the files are adopted. `undo_adoption` first takes
   the name of the document away, so the next call finishes an undo that was killed.
5. *Writers.* A file is written under HDF5's lock (``flock``), and only if it has the size and time
   of its read. One process adopts into a destination at a time.
6. An adopted shard only grows, see `zarr_shardstore.shards.append`.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import crc32c

from zarr_shardstore.access import (
    arguments,
    consolidated_index,
    declarations,
    file_keys,
    fs,
    locks,
    metadata,
    open_base,
    resolve,
    shard_format,
    transformer_list,
)
from zarr_shardstore.errors import ShardConflictError, ShardStoreError, SpecError
from zarr_shardstore.interop.adopt.file_arrays import FileArray, read_file_array, tiles_of
from zarr_shardstore.tools.inspect import readers

Link: TypeAlias = Literal["hard", "symbolic", "move", "copy"]
Path: TypeAlias = str | os.PathLike[str]

_DOCUMENT, _STAGED = "zarr.json", ".zarr.json.adopting"

_MAGIC = b"\x89ZSADOPT\r\n\x1a\n"
_ID_NBYTES = 4
_MIN_MAGIC = 4  # bytes of a cut magic at the end of a file that show a stopped adoption

_MARK = struct.Struct(f"<{len(_MAGIC)}s{_ID_NBYTES}sQQ")
_MARK_NBYTES = _MARK.size + 4
_MAX_END_NBYTES = shard_format.MAX_ENTRIES * shard_format.ENTRY_NBYTES + _MARK_NBYTES + 4


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """Result of an adoption.

    Parameters
    ----------
    store : str
        Path of the array.
    files : tuple of str
        The files, in the order of the shards.
    shape, chunk_shape : tuple of int
        Shapes of the array and its chunks, in elements.
    n_chunks : int
        Stored chunks in all files.
    added_nbytes : int
        Bytes after the end of each file.
    read_by : str
        Programs that read the array without this package.
    """

    store: str
    link: Link
    files: tuple[str, ...]
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    n_chunks: int
    added_nbytes: int
    read_by: str
    dry_run: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)


def adopt(
    files: Path | Sequence[Path],
    dest: Path,
    *,
    dataset: str | None = None,
    link: Link = "hard",
    dry_run: bool = False,
) -> AdoptionReport:
    """Make a sharded array of files of other formats, without copying their chunks.

    Each file becomes one shard: a shard index is appended to it. Its own readers still read it.
    Several files tile one array along its first dimension, in the given order.

    Parameters
    ----------
    files
        Local HDF5, NetCDF-4, tiled TIFF, ``.npy`` or raw WKW files, with equal chunk shape, data
        type, codecs and shape. The last may be shorter along the first dimension.
    dest
        Directory of the new Zarr v3 array, which must be empty or missing.
    dataset
        Path of the array in HDF5 files, or number of the series in TIFF files, if there is more
        than one.
    link
        Way of a file into `dest`. ``"hard"`` and ``"symbolic"``: the file itself gets the index.
        ``"move"``: it is also moved. ``"copy"``: only its copy gets the index.
    dry_run
        Report what would be done, and write nothing.

    Raises
    ------
    SpecError
        If the files are not of one array, cannot be linked or written, or were adopted before, or
        `dest` is not empty. Nothing is changed.
    UnsupportedError
        If readers of Zarr v3 cannot decode the chunks of a file; the message names the reason.

    Notes
    -----
    If the process is killed, the next `adopt` into the same `dest`, or `undo_adoption`, takes back
    what was begun.
    """
    arguments.check_choice("link", link, Link)
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    root = _local_directory(dest)
    if os.path.exists(os.path.join(root, _STAGED)):
        if dry_run:
            raise SpecError(f"an adoption into {root!r} was stopped: adopt again, or undo it")
        _undo(root, only_stopped=True)
    if os.path.lexists(root) and (not os.path.isdir(root) or _names_in(root)):
        raise SpecError(f"{root!r} is not empty: name another destination, or undo its adoption")
    arrays = tiles_of([read_file_array(path, dataset) for path in given])
    first = arrays[0]
    spec = shard_format.ShardingSpec(first.grid_shape, shard_format.ZEP2_INDEX)
    for array in arrays:
        _check_file(array, link)
    shape = (sum(array.shape[0] for array in arrays), *first.shape[1:])
    added_nbytes = _MARK_NBYTES + spec.index_nbytes
    note = {
        "must_understand": False,
        "id": os.urandom(_ID_NBYTES).hex(),
        "link": link,
        "destination": root,
        "added_nbytes": added_nbytes,
        "files": [_noted(array, spec) for array in arrays],
    }
    declared = declarations.Declared("codec", (transformer_list.sharding_transformer(spec),))
    doc = {
        **declarations.apply({**first.document, "shape": list(shape)}, declared),
        metadata.ADOPTED: note,
    }
    if not dry_run:
        try:
            _adopt(root, doc, arrays, spec, link)
        except BaseException:
            with suppress(OSError):
                os.rmdir(root)
            raise
    n_chunks = sum(len(shard_format.ShardIndex(array.ranges).present_ids()) for array in arrays)
    return AdoptionReport(
        store=root,
        link=link,
        files=tuple(array.path for array in arrays),
        shape=shape,
        chunk_shape=first.chunk_shape,
        n_chunks=n_chunks,
        added_nbytes=added_nbytes,
        read_by=readers.read_by([doc]),
        dry_run=dry_run,
    )


def undo_adoption(dest: Path, *, discard: bool = False, dry_run: bool = False) -> list[str]:
    """Give adopted files their old bytes back, and remove the array; return the paths of the files.

    Also takes back a stopped adoption, or finishes a stopped `undo_adoption`.

    Parameters
    ----------
    dest
        Directory of the array.
    discard
        Also remove what was written through a store since.

    Raises
    ------
    SpecError
        If there is no adoption in `dest`, or chunks were written since; then nothing is changed.
        Or a file is open in another program: close it, and call this again.
    ShardConflictError
        If another program has changed a file after its old end, or it is gone. Such files are
        left as they are; all others have their old bytes again.
    """
    return _undo(_local_directory(dest), discard=discard, dry_run=dry_run)


def _undo(
    root: str, *, discard: bool = False, dry_run: bool = False, only_stopped: bool = False
) -> list[str]:
    """Undo an adoption; with `only_stopped` a finished array stays."""
    staged, document = os.path.join(root, _STAGED), os.path.join(root, _DOCUMENT)
    if not (os.path.isfile(staged) or os.path.isfile(document)):
        if not os.path.isdir(root) or _names_in(root) or not os.listdir(root):
            raise SpecError(f"there is no adoption in {root!r}")
        _remove_empty(root)  # the adoption was stopped before its document
        return []
    with locks.locked(staged, "os"):
        is_whole = not os.path.isfile(staged)  # perhaps another process has just finished it
        if is_whole and (only_stopped or not os.path.isfile(document)):
            return []
        with open(document if is_whole else staged, "rb") as file:
            doc = metadata.parse_json(file.read())
        if doc is None:
            raise SpecError(f"{file.name!r} is no document of an array")
        noted = metadata.adopted_files(doc)
        if not noted:
            raise SpecError(f"the array in {root!r} was not adopted")
        open_base(root).seal()
        adoption = _Adoption(root, doc)
        if adoption.is_copied():
            first = doc[metadata.ADOPTED]["destination"]
            raise SpecError(f"{root!r} is a copy of {first!r}, which has the files: undo that one")
        written = adoption.written() if is_whole else []
        if written and not discard:
            raise SpecError(
                f"in {root!r} were written since: {', '.join(map(repr, written[:5]))}. Copy the "
                "array first, or discard that (discard=True, --yes); nothing was changed"
            )
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


def _adopt(
    root: str,
    doc: dict[str, Any],
    arrays: Sequence[FileArray],
    spec: shard_format.ShardingSpec,
    link: Link,
) -> None:
    staged = os.path.join(root, _STAGED)
    with locks.locked(staged, "os"):
        if _names_in(root):
            raise SpecError(f"another process has written into {root!r}: nothing was changed")
        adoption = _Adoption(root, doc)
        try:
            with fs.new_file(staged, os.path.dirname(root)) as fd:
                fs.write_at(fd, [metadata.dump_document(doc)], 0)
            for array, target in zip(arrays, adoption.targets, strict=True):
                adoption.bring(array.path, target)
            for array, target in zip(arrays, adoption.targets, strict=True):
                index = array.index(spec.chunks_per_shard).encode(spec.index)
                state = array.state if link != "copy" else fs.state_of(target)
                end = adoption.mark_of(array.state[1]) + index
                _append(os.path.realpath(target), array, state, end)
            fs.sync_directories(adoption.targets[0], root)
            fs.replace(staged, os.path.join(root, _DOCUMENT))
            fs.sync_directories(staged, os.path.dirname(root))
        except BaseException:
            if os.path.exists(staged):  # otherwise it is adopted
                with suppress(ShardStoreError, OSError):  # then the next call takes it back
                    adoption.take_back()
            raise


def _is_same(path: str, other: str) -> bool:
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _remove_empty(root: str) -> None:
    file_keys.tidy(root)
    with suppress(OSError):
        os.rmdir(root)


def _names_in(root: str) -> list[str]:
    """Return the names in a directory, without the temporary files of a killed process."""
    return [name for name in os.listdir(root) if not file_keys.is_side_file(name)]


class _Adoption:
    """The files of an adoption, and their way there and back."""

    def __init__(self, root: str, doc: dict[str, Any]) -> None:
        note = doc[metadata.ADOPTED]
        self.root, self.link, self.files = root, note["link"], note["files"]
        self.added_nbytes = int(note["added_nbytes"])
        self._note = note
        self._is_in_place = _is_same(root, note["destination"])
        self._id = bytes.fromhex(note.get("id", "00" * _ID_NBYTES))
        zeros = ["0"] * (len(doc["shape"]) - 1)
        self.targets = [os.path.join(root, "c", str(i), *zeros) for i in range(len(self.files))]
        """Path of the shard of each file."""

    def mark_of(self, nbytes: int) -> bytes:
        """Return the mark of a file that had so many bytes."""
        data = _MARK.pack(_MAGIC, self._id, nbytes, self.added_nbytes)
        return data + crc32c.crc32c(data).to_bytes(4, "little")

    def bring(self, path: str, target: str) -> None:
        """Give a file its place in the destination."""
        os.makedirs(os.path.dirname(target), exist_ok=True)
        bring: dict[str, Callable[[str, str], None]]
        bring = {"hard": os.link, "symbolic": os.symlink, "move": fs.replace, "copy": _copy}
        try:
            bring[self.link](path, target)
        except OSError as error:
            advice = "" if self.link == "copy" else ". Take link='copy' or 'symbolic'"
            raise SpecError(
                f"{path!r} cannot be brought to {target!r} by link={self.link!r}: "
                f"{error.strerror}; nothing was changed{advice}"
            ) from error

    def is_copied(self) -> bool:
        """Whether the noted destination is another directory that still has this adoption."""
        for name in () if self._is_in_place else (_DOCUMENT, _STAGED):
            path = os.path.join(self._note["destination"], name)
            with suppress(OSError), open(path, "rb") as file:
                doc = metadata.parse_json(file.read()) or {}
                return bool(doc.get(metadata.ADOPTED) == self._note)
        return False

    def written(self) -> list[str]:
        """Return the files in the destination that a store has written or changed."""
        ours = dict(zip(self.targets, self.files, strict=True))
        found = [path for path, file in ours.items() if self._differs(path, file)]
        known = {_DOCUMENT, _STAGED}
        for top, _, names in os.walk(self.root):
            paths = [os.path.join(top, name) for name in names if name not in known]
            found += [p for p in paths if p not in ours and not file_keys.is_hidden(p)]
        return [os.path.relpath(path, self.root) for path in found]

    def _differs(self, path: str, file: dict[str, Any]) -> bool:
        """Whether a store has changed the shard of a file."""
        if not os.path.lexists(path):
            return False
        if self.link == "symbolic":
            return not os.path.islink(path)
        if self.link == "hard":
            return os.path.isfile(file["path"]) and not os.path.samefile(path, file["path"])
        return self._index_of(path) not in (None, file["index_crc32c"])

    def _index_of(self, path: str) -> str | None:
        """Return the checksum of the index in which a file ends, if there is one."""
        n_entries = (self.added_nbytes - _MARK_NBYTES - 4) // shard_format.ENTRY_NBYTES
        spec = shard_format.ShardingSpec((n_entries,), shard_format.ZEP2_INDEX)
        with open(fs.open_to_read(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            index = bytes(fs.read_at(file.fileno(), max(0, size - spec.index_nbytes), size))
        try:
            shard_format.ShardIndex.decode(index, spec)
        except shard_format.IndexDamageError:
            return None
        return index[-4:].hex()

    def take_back(self) -> list[str]:
        """Cut the files and remove the destination; return sentences about files that are left."""
        left: list[str] = []
        is_stuck = False
        for file, target in zip(self.files, self.targets, strict=True):
            path = file["path"]
            is_there, is_home = os.path.lexists(target), os.path.lexists(path)
            if is_there and not is_home and not os.path.islink(target):
                # Moved there, or its first name was removed: it may be the only copy.
                left += self._cut(target, file)
                fs.replace(target, path)
            elif self.link == "move":
                if is_there:
                    left.append(f"{target!r} cannot go back: there is another file {path!r}")
                    is_stuck = True
                elif not is_home:
                    left.append(f"{path!r} is gone")
            else:
                is_same = is_there and is_home and os.path.samefile(target, path)
                if self.link != "copy" and (self._is_in_place or is_same):
                    left += self._cut(path, file)
                if is_there:
                    fs.unlink(target)
        if not is_stuck:
            for top in (os.path.join(self.root, name) for name in ("c", file_keys.QUARANTINE)):
                if os.path.isdir(top):
                    fs.remove_tree(top)
            with suppress(FileNotFoundError):
                fs.unlink(os.path.join(self.root, consolidated_index.CONSOLIDATED_INDEX_NAME))
            fs.unlink(os.path.join(self.root, _STAGED))
        return left

    def _cut(self, path: str, file: dict[str, Any]) -> list[str]:
        """Cut a file at its old size, if only the adoption and stores have written after it."""
        old = file["nbytes"]
        if not os.path.isfile(path) or not os.access(path, os.W_OK):
            return [f"{path!r} is gone, or cannot be written"]
        with open(fs.open_to_change(path), "r+b", buffering=0) as opened:
            fd = opened.fileno()
            size = os.fstat(fd).st_size
            if size == old:
                return []
            behind = bytes(fs.read_at(fd, old, old + _MARK_NBYTES))
            is_ours = size > old and self.mark_of(old).startswith(behind)
            if size > old + self.added_nbytes:
                is_ours = is_ours and self._index_of(path) is not None
            if not is_ours:
                return [f"{path!r}, which had {old} bytes, was changed by another program"]
            _check_unlocked(fd, path)
            fs.truncate(fd, old)
            fs.sync(fd)
            with suppress(PermissionError):
                os.utime(fd, ns=(file["time_ns"], file["time_ns"]))
        return []


def _append(path: str, array: FileArray, state: fs.FileState, end: bytes) -> None:
    # An interrupt also closes it.
    with open(fs.open_to_change(path), "r+b", buffering=0) as file:
        fd = file.fileno()
        _check_unlocked(fd, array.path)
        if state is None or fs.state_of(fd) != state:
            raise SpecError(f"{array.path!r} was changed since it was read: let its writer end")
        fs.write_at(fd, [end], state[1])
        fs.sync(fd)


def _noted(array: FileArray, spec: shard_format.ShardingSpec) -> dict[str, Any]:
    _, nbytes, time_ns = array.state
    checksum = array.index(spec.chunks_per_shard).encode(spec.index)[-4:].hex()
    return {"path": array.path, "nbytes": nbytes, "time_ns": time_ns, "index_crc32c": checksum}


def _check_unlocked(fd: int, path: str) -> None:
    if not fs.try_flock(fd):
        raise SpecError(f"{path!r} is open in a program: close it there first")


def _copy(path: str, target: str) -> None:
    with open(fs.open_to_read(path), "rb", buffering=0) as source, fs.new_file(target) as fd:
        fs.copy(source.fileno(), fd)
        if hasattr(os, "fchmod"):  # an index is appended, also to the copy of a read-only file
            os.fchmod(fd, os.fstat(fd).st_mode | stat.S_IWUSR)


def _check_file(array: FileArray, link: Link) -> None:
    """Refuse a file that cannot be written, or has an index already."""
    path = array.path
    if link != "copy" and not os.access(path, os.W_OK):
        raise SpecError(f"{path!r} cannot be written: take link='copy', or change its permissions")
    ends = array.ranges[shard_format.ShardIndex(array.ranges).present_ids()].sum(axis=1)
    with open(fs.open_to_read(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(int(ends.max(initial=0)), size - _MAX_END_NBYTES)
        end = bytes(fs.read_at(file.fileno(), start, size))
    cut = (end.endswith(_MAGIC[:n]) for n in range(_MIN_MAGIC, len(_MAGIC)))
    if _MAGIC in end or any(cut):
        text = f"{path!r} was adopted before, or that was stopped: undo that adoption first"
        if _MAGIC in end:
            text += f"; if the array is gone, cut the file to {start + end.index(_MAGIC)} bytes"
        raise SpecError(text)


def _local_directory(dest: Path) -> str:
    path = resolve.local_path(os.fspath(dest))
    if path is None:
        raise SpecError(f"files are adopted where they are, on local disks: {dest!r} is none")
    return resolve.absolute_path(path)
