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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from zarr_shardstore.access import (
    arguments,
    declarations,
    fs,
    locks,
    metadata,
    resolve,
    shard_format,
    transformer_list,
)
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.interop.adopt.file_arrays import FileArray, read_file_array, tiles_of
from zarr_shardstore.interop.adopt.undo import (
    DOCUMENT,
    ID_NBYTES,
    MAGIC,
    MARK_NBYTES,
    MIN_MAGIC,
    STAGED,
    Adoption,
    check_unlocked,
    existing_above,
    names_in,
    undo,
)
from zarr_shardstore.tools.inspect import readers

Link: TypeAlias = Literal["hard", "symbolic", "move", "copy"]
Path: TypeAlias = str | os.PathLike[str]

_MAX_END_NBYTES = shard_format.MAX_ENTRIES * shard_format.ENTRY_NBYTES + MARK_NBYTES + 4


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
    if os.path.exists(os.path.join(root, STAGED)):
        if dry_run:
            raise SpecError(f"an adoption into {root!r} was stopped: adopt again, or undo it")
        undo(root, only_stopped=True)
    if os.path.lexists(root) and (not os.path.isdir(root) or names_in(root)):
        raise SpecError(f"{root!r} is not empty: name another destination, or undo its adoption")
    arrays = tiles_of([read_file_array(path, dataset) for path in given])
    first = arrays[0]
    spec = shard_format.ShardingSpec(first.grid_shape, shard_format.ZEP2_INDEX)
    for array in arrays:
        _check_file(array, link)
    shape = (sum(array.shape[0] for array in arrays), *first.shape[1:])
    added_nbytes = MARK_NBYTES + spec.index_nbytes
    note = {
        "must_understand": False,
        "id": os.urandom(ID_NBYTES).hex(),
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
        If there is no adoption in `dest`, or only a copy of one; or chunks were written since; or
        another file has the name of the last copy of one. Then nothing is changed.
        Or a file is open in another program: close it, and call this again.
    ShardConflictError
        If another program has changed a file after its old end, it is gone, or it is no shard of
        a `dest` that was moved. Such files are left; all others have their old bytes again.
    """
    return undo(_local_directory(dest), discard=discard, dry_run=dry_run)


def _adopt(
    root: str,
    doc: dict[str, Any],
    arrays: Sequence[FileArray],
    spec: shard_format.ShardingSpec,
    link: Link,
) -> None:
    staged, top = os.path.join(root, STAGED), existing_above(root)
    with locks.locked(staged, "os"):
        if names_in(root):
            raise SpecError(f"another process has written into {root!r}: nothing was changed")
        adoption = Adoption(root, doc)
        try:
            with fs.new_file(staged, top) as fd:
                fs.write_at(fd, [metadata.dump_document(doc)], 0)
            for array, target in zip(arrays, adoption.targets, strict=True):
                _bring(array.path, target, link)
                if link == "copy":
                    _check_unchanged(array.path, array)
            for array, target in zip(arrays, adoption.targets, strict=True):
                index = array.index(spec.chunks_per_shard).encode(spec.index)
                _append(target, array, adoption.mark_of(array.state[1]) + index, link)
            for target in adoption.targets:
                fs.sync_directories(target, root)
            for array in arrays if link == "move" else []:  # last, or a file may have no name
                fs.sync_directories(array.path, os.path.dirname(array.path))
            fs.replace(staged, os.path.join(root, DOCUMENT))
            fs.sync_directories(staged, root)
        except BaseException:
            if os.path.exists(staged):  # otherwise it is adopted
                with suppress(ShardStoreError, OSError):  # then the next call takes it back
                    adoption.take_back()
            raise


def _bring(path: str, target: str, link: Link) -> None:
    """Give a file its place in the destination."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    bring: dict[str, Callable[[str, str], None]]
    bring = {"hard": os.link, "symbolic": os.symlink, "move": fs.replace, "copy": _copy}
    try:
        bring[link](path, target)
    except OSError as error:
        advice = "" if link == "copy" else ". Take link='copy' or 'symbolic'"
        raise SpecError(
            f"{path!r} cannot be brought to {target!r} by link={link!r}: "
            f"{error.strerror}; nothing was changed{advice}"
        ) from error


def _append(target: str, array: FileArray, end: bytes, link: Link) -> None:
    # An interrupt also closes it.
    with open(fs.open_to_change(os.path.realpath(target)), "r+b", buffering=0) as file:
        fd = file.fileno()
        check_unlocked(fd, array.path)
        if link != "copy":
            _check_unchanged(fd, array)
        fs.write_at(fd, [end], array.state[1])
        fs.sync(fd)


def _check_unchanged(file: str | int, array: FileArray) -> None:
    if fs.state_of(file) != array.state:
        raise SpecError(f"{array.path!r} was changed since it was read: let its writer end")


def _noted(array: FileArray, spec: shard_format.ShardingSpec) -> dict[str, Any]:
    _, nbytes, time_ns = array.state
    checksum = array.index(spec.chunks_per_shard).encode(spec.index)[-4:].hex()
    return {"path": array.path, "nbytes": nbytes, "time_ns": time_ns, "index_crc32c": checksum}


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
    cut = (end.endswith(MAGIC[:n]) for n in range(MIN_MAGIC, len(MAGIC)))
    if MAGIC in end or any(cut):
        text = f"{path!r} was adopted before, or that was stopped: undo that adoption first"
        if MAGIC in end:
            text += f"; if the array is gone, cut the file to {start + end.index(MAGIC)} bytes"
        raise SpecError(text)


def _local_directory(dest: Path) -> str:
    path = resolve.local_path(os.fspath(dest))
    if path is None:
        raise SpecError(f"files are adopted where they are, on local disks: {dest!r} is none")
    return resolve.absolute_path(path)
