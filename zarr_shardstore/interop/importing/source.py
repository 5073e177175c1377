"""Parsed sources: chunks in files of other formats, as a base store for a conversion.

A parser returns documents and references. A *reference* is the bytes of a chunk, or a file, offset
and size, as in fsspec's ``ReferenceFileSystem``, or `RECODED`: then the library of the format
decodes the chunk, and zarr encodes it by the codecs of its document.

A conversion asks for ranges of files, so one request reads many chunks. A local file that changes
between two reads raises `ShardConflictError`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import zarr
from fsspec.spec import AbstractBufferedFile
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from zarr_shardstore.access import (
    backends,
    byte_ranges,
    chunk_keys,
    file_keys,
    fs,
    gather_bounded,
    index_reads,
    metadata,
    requests,
    resolve,
)
from zarr_shardstore.errors import ShardConflictError, ShardStoreError, UnsupportedError
from zarr_shardstore.tools.inspect.find import lineage

RECODED = ("", -1, 1)  # reference to a chunk that is encoded again

FileRange: TypeAlias = tuple[str, int, int]
Reference: TypeAlias = bytes | FileRange
"""Bytes; or URL, offset and size."""


class References(Protocol):
    """References by chunk key. Its iterator yields the keys of stored chunks."""

    def get(self, key: str, /) -> Reference | None: ...
    def __iter__(self) -> Iterator[str]: ...


_HDF5 = b"\x89HDF\r\n\x1a\n"
_HEAD_NBYTES = 64 * 1024 + len(_HDF5)  # one request, for user blocks of up to 64 KiB
_SIGNATURES = {
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "tiff"),
    b"\x93NUMPY": "npy",
    b"WKW": "wkw",
    b"PK\3\4": "zarr",  # a zip
    b"{": "json",
}

_FILE = "//"
"""Prefix of the keys of files. No key of a zarr store begins with it."""

_BUFFER_NBYTES = 1 << 20
_CHUNK_KEY = re.compile(r"(.*?/)?c((?:/[0-9]+)*)", re.DOTALL)


def library(name: str, extra: str, user: str) -> Any:
    """Import a library of an extra; `user` is what needs it, for the error message."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{user} needs {error.name}: pip install 'zarr-shardstore[{extra}]'"
        ) from error


def format_of(read: Callable[[int, int], bytes | memoryview], size: int) -> str | None:
    """Return the format of a file of `size` bytes, which a function reads from start to stop."""
    head = bytes(read(0, min(_HEAD_NBYTES, size))) if size else b""
    blocks = [512 << i for i in range(55) if 512 << i < size]  # HDF5 may begin after a user block
    if any(head.startswith(_HDF5, block) for block in (0, *blocks)):
        return "hdf5"
    start = head.lstrip()
    found = next((name for sign, name in _SIGNATURES.items() if start.startswith(sign)), None)
    beyond = [block for block in blocks if block >= len(head)] if found is None else []
    is_beyond = any(bytes(read(at, min(at + 8, size))) == _HDF5 for at in beyond)
    return "hdf5" if is_beyond else found


def file_path(url: str) -> str | None:
    """Return the path of a local file; ``None`` for another URL."""
    path = resolve.local_path(url)
    return None if path is None else str(path)


@contextmanager
def faults_named(what: str = "") -> Iterator[None]:
    """Raise `UnreadableSourceError` for what the library of a format raises about `what`."""
    try:
        yield
    except (ShardStoreError, ImportError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        raise backends.UnreadableSourceError(f"{what}its library says {error!r}") from error


class SourceFiles:
    """Files that hold chunks: local ones, and objects that obstore or fsspec reads."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self.remote_options = dict(options or {})
        """Options of obstore or fsspec, for files that are not local."""
        self._protocol = self.remote_options.pop("remote_protocol", "")
        self.states: dict[str, tuple[int, int, int]] = {}
        """Size, time and inode of each local file at its first read."""
        self._stores: dict[str, Store] = {}
        self._slots = asyncio.Semaphore(backends.MAX_CONCURRENCY)  # of all threads, in zarr's loop

    def _object(self, url: str) -> tuple[Store, str]:
        directory, _, name = url.rpartition("/")
        if directory not in self._stores:
            store = resolve.base_store_of(directory, self.remote_options)
            assert isinstance(store, Store)
            self._stores[directory] = store
        return self._stores[directory], name

    def _check(self, path: str, found: os.stat_result) -> None:
        state = (found.st_size, found.st_mtime_ns, found.st_ino)
        if self.states.setdefault(path, state) != state:
            raise ShardConflictError(
                f"{path!r} was changed while it was imported; it is only read here, and no array "
                "that is not whole was made: run the same again"
            )

    def url_of(self, name: str) -> str:
        """Return the URL that a reference means."""
        if "://" not in name and self._protocol not in ("", "file"):
            return f"{self._protocol}://{name}"
        path = file_path(name)
        return name if path is None else resolve.absolute_path(path)

    def read(self, url: str, start: int, stop: int) -> bytes | memoryview:
        """Read a range; the reply is shorter if the file ends before `stop`."""
        path = file_path(url)
        if path is None:
            return self.read_all([(url, start, stop)])[0]
        with open(path, "rb", buffering=0) as file:
            data = fs.read_at(file.fileno(), start, stop)
            self._check(path, os.fstat(file.fileno()))  # after the read, so it is of these bytes
        return data

    def read_all(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | memoryview]:
        """Read ranges, each from start to stop; ranges of objects concurrently."""
        if all(file_path(url) is not None for url, *_ in ranges):
            return [self.read(*each) for each in ranges]
        replies = [self._read_object(*each) for each in ranges]
        return sync(gather_bounded(replies, backends.MAX_CONCURRENCY))

    async def _read_object(self, url: str, start: int, stop: int) -> bytes | memoryview:
        if start == stop:
            return b""
        if file_path(url) is not None:
            return self.read(url, start, stop)
        store, name = self._object(url)
        async with self._slots:
            wanted = RangeByteRequest(start, stop)
            found = await store.get(name, default_buffer_prototype(), wanted)
        if found is None:
            raise ShardConflictError(f"object {url!r} is gone: restore it, and run the same again")
        if len(found) > stop - start:
            if start == 0:  # as of a look at the format
                return found.to_bytes()[:stop]
            raise UnsupportedError(
                f"the server of {url!r} ignores byte ranges: copy the file to a disk, and import it"
            )
        return found.to_bytes()

    def size(self, url: str) -> int:
        """Return the size of a file, and note the state of a local one."""
        path = file_path(url)
        if path is None:
            store, name = self._object(url)
            return sync(store.getsize(name))
        found = os.stat(path)
        self._check(path, found)
        return found.st_size

    def note(self, url: str) -> None:
        """Note the state of a local file, if there is one; refuse it if it has changed since."""
        if url and file_path(url) is not None:
            self.size(url)

    def open(self, url: str) -> BinaryIO:
        """Open a file for a library that reads its format."""
        size = self.size(url)
        path = file_path(url)
        if path is not None:
            return open(path, "rb")
        file: BinaryIO = _ObjectFile(self, url, block_size=_BUFFER_NBYTES, size=size)
        return file


class _ObjectFile(AbstractBufferedFile):  # type: ignore[misc]
    """An object as a file, only read."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        # h5py calls this with its lock, and frees its objects with it. The thread that answers
        # would wait for ever if it met one among garbage. Source: h5py, "Python file-like objects".
        collects = gc.isenabled()
        try:
            gc.disable()
            return bytes(self.fs.read(self.path, start, min(end, self.size)))
        finally:
            if collects:
                gc.enable()


@dataclass(frozen=True, slots=True)
class ParsedSource:
    documents: Mapping[str, Mapping[str, Any]]
    """Documents of groups and arrays, by key."""
    references: References
    decoded: Callable[[], AbstractContextManager[Callable[[str], Any]]]
    """Opens the source with its library; the result returns the array at a path."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Paths of arrays whose bytes cannot be taken, and why."""
    recoded: Mapping[str, str] = field(default_factory=dict)
    """Paths of arrays of which chunks are encoded again, and why."""
    notes: Sequence[str] = ()
    is_local: bool = True
    opened: str = ""
    """The file that the library of the format opens by itself."""


class ChunkTable(NamedTuple):
    """Places of the chunks of a dataset, in C order."""

    grid_shape: chunk_keys.Coords
    ranges: npt.NDArray[np.int64]
    """Offset and size of each chunk, shape ``(n, 2)``; size 0: missing."""


class ChunkTables:
    """References to the chunks of one file, by key. Chunks of one array are found in bulk."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.tables: dict[str, ChunkTable] = {}
        """Tables by the directory of the array."""
        self.compact: dict[str, bytes] = {}

    def rows(self, keys: Sequence[str]) -> npt.NDArray[np.int64] | None:
        """Return offset and size of chunks of one array, shape ``(n, 2)``; size 0: missing.

        ``None``: the bytes of some are not in the file.
        """
        match = _CHUNK_KEY.fullmatch(keys[0]) if keys and keys[0] not in self.compact else None
        table = None if match is None else self.tables.get(match[1] or "")
        if match is None or table is None:
            return None
        if not table.grid_shape:
            return table.ranges
        numbers = "".join([key[match.start(2) :] for key in keys])[1:].split("/")
        coords = np.array(numbers, dtype=np.int64).reshape(len(keys), -1).T
        found: npt.NDArray[np.int64] = table.ranges[np.ravel_multi_index(coords, table.grid_shape)]
        return found

    def get(self, key: str, /) -> Reference | None:
        rows = None
        with suppress(ValueError):  # outside the grid
            rows = self.rows([key])
        if rows is None or not rows[0, 1]:
            return self.compact.get(key)
        offset, nbytes = rows[0].tolist()
        return RECODED if offset == RECODED[1] else (self.url, offset, nbytes)

    def __iter__(self) -> Iterator[str]:
        for prefix, table in self.tables.items():
            for at in np.flatnonzero(table.ranges[:, 1]).tolist():
                coords = np.unravel_index(at, table.grid_shape) if table.grid_shape else ()
                yield "/".join([f"{prefix}c", *map(str, coords)])


class SourceBackend(backends.BlockingBackend):
    """A parsed source as a base store, only read. It pickles as `reopen` and its arguments.

    Thread safety: any thread may call it.
    """

    def __init__(
        self, parsed: ParsedSource, files: SourceFiles, reopen: Callable[[], tuple[Any, ...]]
    ) -> None:
        self.parsed, self._files, self._reopen = parsed, files, reopen
        self._documents = {k: metadata.dump_document(doc) for k, doc in parsed.documents.items()}
        if not parsed.is_local:
            self.max_requests_at_once = backends.MAX_CONCURRENCY
        self.lacks.add("delete")
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._array_at: Callable[[str], Any] | None = None
        self._recent: tuple[str, bytes] = ("", b"")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._documents)} documents>"

    def close(self) -> None:
        self._opened.close()

    def scope(self, key: str) -> Hashable:
        return "source", id(self), key

    def ranges_of(self, keys: Sequence[str]) -> backends.RangesOfKeys | None:
        """Return the ranges of values; ``None`` if one is encoded again, to an unknown size."""
        names: dict[str, int] = {}
        found = np.full((len(keys), 3), -1, np.int64)
        references = self.parsed.references
        if isinstance(references, ChunkTables) and (at := references.rows(keys)) is not None:
            if (at[:, 0] == RECODED[1]).any():
                return None
            names[_FILE + references.url] = 0
            found[:, 0] = np.where(at[:, 1] > 0, 0, -1)
            found[:, 1:] = at.cumsum(axis=1)
        else:
            for i, key in enumerate(keys):
                reference = references.get(key)
                if reference == RECODED:
                    return None
                if isinstance(reference, bytes):
                    found[i] = names.setdefault(key, len(names)), 0, len(reference)
                elif reference is not None:
                    url, start, nbytes = reference
                    found[i] = names.setdefault(_FILE + url, len(names)), start, start + nbytes
        return backends.RangesOfKeys(list(names), *found.T)

    def perform(
        self, batch: list[requests.Request], _: backends.OpenFiles | None = None
    ) -> list[Any]:
        found = iter(self._read([each for each in batch if isinstance(each, requests.Get)]))
        return [
            next(found) if isinstance(each, requests.Get) else self.replies[type(each)](self, each)
            for each in batch
        ]

    def get_index(self, request: requests.GetIndex) -> requests.FoundIndex:
        (found,) = self._read([index_reads.index_get(request)])
        return index_reads.found_index(request, found)

    def exists(self, request: requests.Exists) -> bool:
        key = request.key
        return key in self._documents or self.parsed.references.get(key) is not None

    def get_size(self, request: requests.GetSize) -> int | None:
        reference = self._reference(request.key)
        return None if reference is None else _nbytes_of(reference)

    def keys(self, prefix: str, *, shows_all: bool = False) -> Iterator[str]:
        for keys in (self._documents, self.parsed.references):
            for key in keys:
                if key.startswith(prefix) and (shows_all or not file_keys.is_hidden(key)):
                    yield key

    def list_dir(self, request: requests.ListDir) -> list[str]:
        """List groups, arrays and documents; chunks are found by their prefix only."""
        start = len(request.prefix)
        keys = (key[start:] for key in self._documents if key.startswith(request.prefix))
        names = dict.fromkeys(key.partition("/")[0] for key in keys)
        return [name for name in names if not file_keys.is_hidden(name)]

    def _reference(self, key: str) -> Reference | None:
        """Return the bytes of a value, or their place; a chunk may be encoded first."""
        reference = self._documents.get(key) or self.parsed.references.get(key)
        return self._recode(key) if reference == RECODED else reference

    def _read(self, wanted: Iterable[requests.Get]) -> list[requests.Found]:
        parts = [self._part(get.key, get.byte_range) for get in wanted]
        data = iter(self._files.read_all([part for part, _ in parts if isinstance(part, tuple)]))
        values = [(next(data) if isinstance(p, tuple) else p, size) for p, size in parts]
        return [requests.Found(v if v is None else memoryview(v), None, n) for v, n in values]

    def _part(
        self, key: str, byte_range: byte_ranges.ByteRange | None
    ) -> tuple[bytes | tuple[str, int, int] | None, int | None]:
        """Return the bytes, or a file with start and stop; and the size of the value."""
        if key.startswith(_FILE):
            assert isinstance(byte_range, byte_ranges.Range), "only `ranges_of` names files"
            return (key.removeprefix(_FILE), byte_range.start, byte_range.stop), None
        reference = self._reference(key)
        if reference is None:
            return None, None
        nbytes = _nbytes_of(reference)
        start, stop = byte_ranges.resolve_range(byte_range, nbytes)
        if isinstance(reference, bytes):
            return reference[start:stop], nbytes
        url, offset, _ = reference
        return (url, offset + start, offset + stop), nbytes

    def _recode(self, key: str) -> bytes:
        """Return a chunk that its library has decoded, encoded as its array declares."""
        with self._lock:  # HDF5 has one lock for all
            if self._recent[0] == key:
                return self._recent[1]
            if self._array_at is None:
                self._array_at = self._opened.enter_context(self.parsed.decoded())
            names = {"zarr.json", ".zarray"}
            above = [f"{path}/".lstrip("/") for path in reversed(lineage(key))]
            prefix = next(p for p in above if any(p + name in self._documents for name in names))
            own = ((name, self._documents.get(prefix + name)) for name in {*names, ".zattrs"})
            # At the root: zarr spells some paths in another way.
            store = MemoryStore({name: cpu.Buffer.from_bytes(doc) for name, doc in own if doc})
            array = zarr.open_array(store).with_config({"write_empty_chunks": True})
            coords = [*map(int, re.findall("[0-9]+", key[len(prefix) :]))][: array.ndim]
            bounds = zip(coords, array.chunks, array.shape, strict=True)
            box = tuple(slice(c * n, min((c + 1) * n, size)) for c, n, size in bounds)
            with faults_named():  # a netCDF variable may end earlier
                values = self._array_at(prefix.rstrip("/"))[box]
            self._files.note(self.parsed.opened)
            self.parsed.references.get(key)  # which notes the file of the chunk, as before
            starts = zip(box, np.shape(values), strict=True)
            array[tuple(slice(b.start, b.start + n) for b, n in starts)] = values
            value = store._store_dict[key[len(prefix) :]].to_bytes()
            self._recent = (key, value)
            return value


def _nbytes_of(reference: Reference) -> int:
    return len(reference) if isinstance(reference, bytes) else reference[2]
