"""Adoption: an index behind its end makes a file of another format a shard, and it stays that file.

::

    c/0/0/0    ├── a.h5 as it was ──┤ mark ┤ shard index ┤      also by its own name, if linked

    mark       │ magic │ nbytes of the file before │ nbytes of mark and index │ crc32c │

1. The document is the journal. It names all files with their sizes and is synced, under the name
   ``.zarr.json.adopting``, before anything is linked or written. It becomes ``zarr.json`` when
   all files have their index: until then there is no array.
2. A file is written behind its end only, with all that is written there in order. So cutting it at
   its noted size gives the original, byte for byte.
3. It is cut only if the bytes behind that size are the mark, or its beginning. Otherwise another
   program has written there, and the file is left.
4. *Kill.* Before the document has its name, the next `adopt` into the same destination, or
   `undo_adoption`, takes all back. Afterwards the files are adopted. `undo_adoption` first takes
   the name of the document away, so the next call finishes what a kill has stopped.
5. *Writers.* A file is written under HDF5's lock (``flock``), and only if it has the size and time
   that it was read with. One process adopts into a destination at a time.
6. An adopted shard only grows, see `zarr_shardstore.shards.append`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import crc32c

from zarr_shardstore.access import (
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
from zarr_shardstore.interop.adopt.tiles import tiles_of
from zarr_shardstore.interop.importing.foreign import ForeignArray, read_foreign
from zarr_shardstore.tools.inspect import readers

Link: TypeAlias = Literal["hard", "symbolic", "move", "copy"]
Path: TypeAlias = str | os.PathLike[str]

_DOCUMENT, _STAGED = "zarr.json", ".zarr.json.adopting"

_MAGIC = b"\x89ZSADOPT\r\n\x1a\n\0\0\0\0"
_MIN_MAGIC = 4
"""Bytes of a cut magic at the end of a file that count as remains of an adoption."""

_MARK = struct.Struct(f"<{len(_MAGIC)}sQQ")
_MARK_NBYTES = _MARK.size + 4
_COPIED_NBYTES = 8 * 1024 * 1024
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
        Of the array, in elements.
    n_chunks : int
        Stored chunks in all files.
    added_nbytes : int
        Bytes behind the end of each file.
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

    Each file becomes one shard: a shard index is appended to it. Its own readers go on to read it.
    Several files tile one array along its first dimension, in the order given.

    Parameters
    ----------
    files
        Local HDF5, NetCDF-4, tiled TIFF, ``.npy`` or raw WKW files, with equal chunk shape, data
        type and codecs. All have the same shape; the last may be shorter along the first dimension.
    dest
        Directory of the new Zarr v3 array, which must be empty or missing.
    dataset
        Path of the array in HDF5 files, or number of the series in TIFF files, if there is more
        than one.
    link
        Way of a file into `dest`. ``"hard"`` and ``"symbolic"``: the file itself gets the index,
        and is the shard. ``"move"``: the same, and it is moved. ``"copy"``: the file stays as it
        is, and its copy gets the index.
    dry_run
        Tell what would be done, and write nothing.

    Raises
    ------
    SpecError
        If the files are not of one array, cannot be linked or written, or were adopted before, or
        `dest` is not empty. Nothing is changed.
    UnsupportedError
        If readers of Zarr v3 cannot decode the chunks of a file; the message names the reason.

    Notes
    -----
    If the process is killed, the next `adopt` into the same `dest` takes back what was begun, and
    so does `undo_adoption`. Memory: the index of one file.
    """
    if link not in get_args(Link):
        raise SpecError(f"link is 'hard', 'symbolic', 'move' or 'copy', got {link!r}")
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    root = _local_directory(dest)
    if os.path.exists(os.path.join(root, _STAGED)):
        if dry_run:
            raise SpecError(f"an adoption into {root!r} was stopped: adopt again, or undo it")
        _undo(root, only_stopped=True)
    if os.path.lexists(root) and (not os.path.isdir(root) or _names_in(root)):
        raise SpecError(f"{root!r} is not empty: name another destination, or undo its adoption")
    arrays = tiles_of([read_foreign(path, dataset) for path in given])
    first = arrays[0]
    spec = shard_format.ShardingSpec(first.grid_shape, shard_format.ZEP2_INDEX)
    for array in arrays:
        _check_file(array, link)
    shape = (sum(array.shape[0] for array in arrays), *first.shape[1:])
    added_nbytes = _MARK_NBYTES + spec.index_nbytes
    note = {
        "must_understand": False,
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
    n_chunks = sum(len(shard_format.ShardIndex(array.places).present_ids()) for array in arrays)
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
    """Give adopted files the bytes back that they had, and remove the array; return their paths.

    Also takes back an adoption that was stopped, or finishes an `undo_adoption` that was.

    Parameters
    ----------
    dest
        Directory of the array.
    discard
        Remove what was written through a store since, too.

    Raises
    ------
    SpecError
        If there is no adoption in `dest`, or chunks were written since; then nothing is changed.
        Or a file is open in another program: close it, and call this again.
    ShardConflictError
        If another program has changed a file behind its old end, or it is gone. Such files are
        left as they are, all others have their bytes again.
    """
    return _undo(_local_directory(dest), discard=discard, dry_run=dry_run)


def _undo(
    root: str, *, discard: bool = False, dry_run: bool = False, only_stopped: bool = False
) -> list[str]:
    """As `undo_adoption`; with `only_stopped` an array that is there by now stays."""
    names = [os.path.join(root, name) for name in (_STAGED, _DOCUMENT)]
    if not any(map(os.path.isfile, names)):
        if not os.path.isdir(root) or _names_in(root) or not os.listdir(root):
            raise SpecError(f"there is no adoption in {root!r}")
        _remove_empty(root)  # what was stopped had not begun
        return []
    with locks.locked(names[0], "os"):
        staged, document = names
        is_whole = not os.path.isfile(staged)  # perhaps another process has just finished it
        if is_whole and (only_stopped or not os.path.isfile(document)):
            return []
        doc = _document_at(document if is_whole else staged)
        noted = metadata.adopted_files(doc)
        if not noted:
            raise SpecError(f"the array in {root!r} was not adopted")
        open_base(root).seal()
        adoption = _Adoption(root, doc)
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
    arrays: Sequence[ForeignArray],
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
            for i, array in enumerate(arrays):
                adoption.bring(i, array.path)
            for i, array in enumerate(arrays):
                index = array.index(spec.chunks_per_shard).encode(spec.index)
                state = array.state if link != "copy" else fs.state_of(adoption.key_path(i))
                _append(os.path.realpath(adoption.key_path(i)), array, state, index)
            fs.sync_directories(adoption.key_path(0), root)
            fs.replace(staged, os.path.join(root, _DOCUMENT))
            fs.sync_directories(staged, os.path.dirname(root))
        except BaseException:
            if os.path.exists(staged):  # otherwise it is adopted
                with suppress(ShardStoreError, OSError):  # then the next call takes it back
                    adoption.take_back()
            raise


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
        self._ndim = len(doc["shape"])
        self._index_nbytes = self.added_nbytes - _MARK_NBYTES
        self._is_in_place = os.path.realpath(root) == os.path.realpath(note["destination"])

    def key_path(self, i: int) -> str:
        return os.path.join(self.root, "c", str(i), *["0"] * (self._ndim - 1))

    def bring(self, i: int, path: str) -> None:
        """Give a file its place in the destination."""
        target = self.key_path(i)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            match self.link:
                case "hard":
                    os.link(path, target)
                case "symbolic":
                    os.symlink(path, target)
                case "move":
                    fs.replace(path, target)
                case "copy":
                    _copy(path, target)
        except OSError as error:
            raise SpecError(
                f"{path!r} cannot be brought to {target!r} by link={self.link!r}: "
                f"{error.strerror}; nothing was changed. Take link='copy' or 'symbolic'"
            ) from error

    def written(self) -> list[str]:
        """Return the files in the destination that a store has written or changed."""
        ours = {self.key_path(i) for i in range(len(self.files))}
        found = [path for path in map(self.key_path, range(len(self.files))) if self._differs(path)]
        known = {_DOCUMENT, _STAGED}
        for top, _, names in os.walk(self.root):
            paths = [os.path.join(top, name) for name in names if name not in known]
            found += [p for p in paths if p not in ours and not file_keys.is_hidden(p)]
        return [os.path.relpath(path, self.root) for path in found]

    def _differs(self, path: str) -> bool:
        """Whether a store has changed the shard at a path of `key_path`."""
        file = self.files[[self.key_path(i) for i in range(len(self.files))].index(path)]
        if not os.path.lexists(path):
            return False
        if self.link == "symbolic":
            return not os.path.islink(path)
        if self.link == "hard":
            return os.path.isfile(file["path"]) and not os.path.samefile(path, file["path"])
        return self._index_of(path) not in (None, file["index_crc32c"])

    def _index_of(self, path: str) -> str | None:
        """Return the checksum of the index in which a file ends; ``None`` if it has none, because
        another program has written behind it."""
        n_entries = (self._index_nbytes - 4) // shard_format.ENTRY_NBYTES
        spec = shard_format.ShardingSpec((n_entries,), shard_format.ZEP2_INDEX)
        fd = fs.open_to_read(path)
        try:
            size = os.fstat(fd).st_size
            index = bytes(fs.read_at(fd, max(0, size - spec.index_nbytes), size))
            shard_format.ShardIndex.decode(index, spec)
        except shard_format.IndexDamageError:
            return None
        finally:
            os.close(fd)
        return index[-4:].hex()

    def take_back(self) -> list[str]:
        """Cut the files and remove the destination; return sentences about files that are left."""
        left: list[str] = []
        is_stuck = False
        for i, file in enumerate(self.files):
            path, target = file["path"], self.key_path(i)
            is_there, is_home = os.path.lexists(target), os.path.lexists(path)
            if is_there and not is_home and not os.path.islink(target):
                # Moved there, or its first name was removed: it may be the only copy.
                left += self._cut(target, file)
                fs.replace(target, path)
            elif self.link == "move":
                if is_there:
                    left.append(f"{target!r} cannot go back: there is another file {path!r}")
                    is_stuck = True
            else:
                is_same = is_there and is_home and os.path.samefile(target, path)
                if self.link != "copy" and (self._is_in_place or is_same):
                    left += self._cut(path, file)
                if is_there:
                    fs.unlink(target)
        if not is_stuck:
            top = os.path.join(self.root, "c")
            if os.path.isdir(top):
                fs.remove_tree(top)
            fs.unlink(os.path.join(self.root, _STAGED))
        return left

    def _cut(self, path: str, file: dict[str, Any]) -> list[str]:
        """Cut a file at its old size, if only the adoption and stores have written behind it."""
        old = file["nbytes"]
        if not os.path.isfile(path) or not os.access(path, os.W_OK):
            return [f"{path!r} is gone, or cannot be written"]
        with open(fs.open_to_change(path), "r+b", buffering=0) as opened:
            fd = opened.fileno()
            size = os.fstat(fd).st_size
            if size == old:
                return []
            mark = _mark(old, self.added_nbytes)
            behind = bytes(fs.read_at(fd, old, old + _MARK_NBYTES))
            is_ours = size > old and mark.startswith(behind)
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


# --------------------------------------------------------------------------- files


def _append(path: str, array: ForeignArray, state: fs.FileState, index: bytes) -> None:
    # Closed after an interrupt, too.
    with open(fs.open_to_change(path), "r+b", buffering=0) as file:
        fd = file.fileno()
        _check_unlocked(fd, array.path)
        if state is None or fs.state_of(fd) != state:
            raise SpecError(f"{array.path!r} was changed since it was read: let its writer end")
        mark = _mark(state[1], _MARK_NBYTES + len(index))
        fs.write_at(fd, [mark, index], state[1])
        fs.sync(fd)


def _noted(array: ForeignArray, spec: shard_format.ShardingSpec) -> dict[str, Any]:
    assert array.state is not None
    _, nbytes, time_ns = array.state
    checksum = array.index(spec.chunks_per_shard).encode(spec.index)[-4:].hex()
    return {"path": array.path, "nbytes": nbytes, "time_ns": time_ns, "index_crc32c": checksum}


def _mark(nbytes: int, added_nbytes: int) -> bytes:
    data = _MARK.pack(_MAGIC, nbytes, added_nbytes)
    return data + crc32c.crc32c(data).to_bytes(4, "little")


def _check_unlocked(fd: int, path: str) -> None:
    if not fs.try_flock(fd):
        raise SpecError(f"{path!r} is open in a program: close it there first")


def _copy(path: str, target: str) -> None:
    source = fs.open_to_read(path)
    try:
        with fs.new_file(target) as fd:
            fs.copy_mode(source, fd)
            offset = 0
            while data := fs.read_at(source, offset, offset + _COPIED_NBYTES):
                fs.write_at(fd, [data], offset)
                offset += len(data)
    finally:
        os.close(source)


def _check_file(array: ForeignArray, link: Link) -> None:
    """Refuse a file that cannot be written, or has an index already."""
    path = array.path
    if link != "copy" and not os.access(path, os.W_OK):
        raise SpecError(f"{path!r} cannot be written: take link='copy', or change its permissions")
    fd = fs.open_to_read(path)
    try:
        size = os.fstat(fd).st_size
        ends = array.places[shard_format.ShardIndex(array.places).present_ids()].sum(axis=1)
        start = max(int(ends.max(initial=0)), size - _MAX_END_NBYTES)
        end = bytes(fs.read_at(fd, start, size))
    finally:
        os.close(fd)
    cut = (end.endswith(_MAGIC[:n]) for n in range(_MIN_MAGIC, len(_MAGIC)))
    if _MAGIC in end or any(cut):
        raise SpecError(
            f"{path!r} was adopted before, or that was stopped: undo that adoption first"
        )


def _local_directory(dest: Path) -> str:
    text = os.fspath(dest)
    if "://" in text and not text.startswith("file://"):
        raise SpecError(f"files are adopted where they are, on local disks: {text!r} is none")
    return os.path.abspath(resolve.local_path(text))


def _document_at(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        doc = metadata.parse_json(file.read())
    if doc is None:
        raise SpecError(f"{path!r} is no document of an array")
    return doc
