"""ReferenceStore: chunks that lie in files of other formats, as a zarr ``Store`` that is only read.

Metadata documents are in memory. A *reference* tells the bytes of a chunk: these bytes themselves,
or a file, offset and size, as fsspec's ``ReferenceFileSystem`` has them, or `RECODED`: the chunk is
read by the library of its format, and encoded by the codecs in the document of its array.

A conversion asks for ranges of files, so that one request reads many chunks of a file. A local file
that is changed between two reads raises `ShardConflictError`.
"""

from __future__ import annotations

import asyncio
import gc
import io
import os
import re
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from zarr_shardstore.access import (
    RangesOfKeys,
    UnreadableSourceError,
    buffers,
    byte_ranges,
    fs,
    metadata,
    resolve,
)
from zarr_shardstore.errors import ShardConflictError, ShardStoreError, UnsupportedError

T = TypeVar("T")

RECODED = ("", -1, 1)
"""Reference of a chunk that is encoded again."""

Reference: TypeAlias = bytes | tuple[str, int, int]

_FILE = "//"
"""Begin of the names of files, with which no key of a zarr store begins."""

_DOCUMENTS = ("zarr.json", ".zarray", ".zattrs")

_FileState: TypeAlias = tuple[int, int, int]


def file_path(url: str) -> str | None:
    """Return the path of a local file; ``None`` for another URL."""
    return None if "://" in url and not url.startswith("file://") else str(resolve.local_path(url))


@contextmanager
def faults_named() -> Iterator[None]:
    """Raise `UnreadableSourceError` for what the library of a format raises about one array."""
    try:
        yield
    except ShardStoreError:
        raise
    except Exception as error:
        raise UnreadableSourceError(f"its library says {error!r}") from error


class SourceFiles:
    """Files that hold chunks: local ones, and objects that obstore or fsspec reads."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options
        given = dict(options or {})
        self._protocol = given.pop("remote_protocol", "")
        self.remote_options = given
        """Of obstore or fsspec, for files that are not local."""
        self.states: dict[str, _FileState] = {}
        """Of local files, when they were first met."""
        self._stores: dict[str, Store] = {}

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
        return name if path is None else os.path.abspath(path)

    def read(self, url: str, start: int, stop: int) -> bytes | memoryview:
        """Read a range, blocking; the reply is shorter if the file ends before `stop`."""
        path = file_path(url)
        if path is None:
            return sync(self.read_async(url, start, stop))
        with open(path, "rb", buffering=0) as file:
            data = fs.read_at(file.fileno(), start, stop)
            self._check(path, os.fstat(file.fileno()))  # after the read, so it is of these bytes
        return data

    async def read_async(self, url: str, start: int, stop: int) -> bytes | memoryview:
        """Read a range of an object."""
        if file_path(url) is not None or start == stop:
            return self.read(url, start, stop) if start < stop else b""
        store, name = self._object(url)
        wanted = RangeByteRequest(start, stop)
        found = await store.get(name, default_buffer_prototype(), wanted)
        if found is None:
            raise FileNotFoundError(url)
        return found.to_bytes()

    def size(self, url: str) -> int:
        """Return the size of a file, blocking."""
        path = file_path(url)
        if path is None:
            store, name = self._object(url)
            return sync(store.getsize(name))
        found = os.stat(path)
        self._check(path, found)
        return found.st_size

    def open(self, url: str) -> BinaryIO:
        """Open a file for a library that reads its format."""
        size = self.size(url)
        path = file_path(url)
        if path is not None:
            return open(path, "rb")
        return io.BufferedReader(_ObjectFile(self, url, size), _BUFFER_NBYTES)


_BUFFER_NBYTES = 1 << 20


class _ObjectFile(io.RawIOBase):
    """An object as a file that is only read."""

    def __init__(self, files: SourceFiles, url: str, size: int) -> None:
        self._files, self._size, self._at = files, size, 0
        self.name = url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = max(self._at, min(self._size, self._at + len(buffer)))
        # h5py calls this with its lock, and frees its objects with it. The thread that answers
        # would wait for ever if it met one among garbage. Source: h5py, "Python file-like objects".
        collects = gc.isenabled()
        try:
            gc.disable()
            data = self._files.read(self.name, self._at, stop)
        finally:
            if collects:
                gc.enable()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True)
class ParsedSource:
    """Result of the parser of a format."""

    documents: Mapping[str, Mapping[str, Any]]
    """Of groups and arrays, by key."""
    references: Mapping[str, Reference]
    """By chunk key."""
    open_arrays: Callable[[], Any]
    """Return a mapping from paths to arrays that their library decodes; it has a `close`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons by path of those arrays whose bytes cannot be taken."""
    recoded: Mapping[str, str] = field(default_factory=dict)
    """The same of arrays of which chunks are encoded again."""
    notes: Sequence[str] = ()
    is_local: bool = True


class OfOneFile(Mapping[str, Reference]):
    """References to ranges of one file, which are found in bulk."""

    url: str

    @abstractmethod
    def rows(self, keys: Sequence[str]) -> npt.NDArray[np.int64] | None:
        """Return offset and size of each, shape ``(n, 2)``; size 0: missing.

        The keys are of one array. ``None``: bytes of some are not in the file.
        """


class ReferenceStore(Store):
    """Documents and references of `ParsedSource` as a store. It pickles as `reopen` and arguments.

    Thread safety: any thread may call it.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True
    supports_partial_writes = False

    def __init__(
        self, parsed: ParsedSource, files: SourceFiles, reopen: Callable[[], tuple[Any, ...]]
    ) -> None:
        super().__init__(read_only=True)
        self.parsed, self._files, self._reopen = parsed, files, reopen
        self._documents = {
            key: metadata.dump_document(doc) for key, doc in parsed.documents.items()
        }
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self._arrays: Any = None
        self._recent: tuple[str, bytes] = ("", b"")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen()

    def close(self) -> None:
        if self._arrays is not None:
            self._arrays.close()
        self._thread.shutdown()
        super().close()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return f"<{type(self).__name__} of {len(self._documents)} documents>"

    @property
    def _supports_sync_io(self) -> bool:
        return self.parsed.is_local

    # -------------------------------------------------------------------- reads

    def ranges_in_files(self, keys: Sequence[str]) -> RangesOfKeys | None:
        """Return where values lie; ``None`` if the size of one that is encoded again is unknown."""
        names: dict[str, int] = {}
        found = np.full((len(keys), 3), -1, np.int64)
        references = self.parsed.references
        if isinstance(references, OfOneFile) and (at := references.rows(keys)) is not None:
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
        return RangesOfKeys(list(names), *found.T)

    def _reference(self, key: str) -> Reference | None:
        if key in self._documents:
            return self._documents[key]
        if key.startswith(_FILE):
            url = key.removeprefix(_FILE)
            return url, 0, self._files.size(url)
        return self.parsed.references.get(key)

    def _array_of(self, key: str) -> str:
        """Return the path of the array that a chunk key belongs to."""
        path = key
        while path:
            path = path.rpartition("/")[0]
            if any(f"{path}/{name}".lstrip("/") in self._documents for name in _DOCUMENTS[:2]):
                break
        return path

    def _part(
        self, key: str, byte_range: ByteRequest | None
    ) -> bytes | memoryview | tuple[str, int, int] | None:
        """Return the bytes, or where they lie in a file."""
        if key.startswith(_FILE) and isinstance(byte_range, RangeByteRequest):
            return key.removeprefix(_FILE), byte_range.start, byte_range.end
        reference = self._reference(key)
        if reference == RECODED:
            reference = self._recode(key)
        if reference is None:
            return None
        if isinstance(reference, bytes):
            bounds = byte_ranges.resolve_range(buffers.range_of(byte_range), len(reference))
            return memoryview(reference)[slice(*bounds)]
        url, offset, nbytes = reference
        start, stop = byte_ranges.resolve_range(buffers.range_of(byte_range), nbytes)
        return url, offset + start, offset + stop

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        part = self._part(key, byte_range)
        if isinstance(part, tuple):
            part = self._files.read(*part)
        return buffers.to_buffer_of(part, prototype)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        part = await self._in_thread(self._part, key, byte_range)
        if isinstance(part, tuple):
            part = await self._files.read_async(*part)
        return buffers.to_buffer_of(part, prototype)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that blocks: on a remote file that a library decodes, or a lock.

        It has a thread of its own. zarr's codecs need those of the loop, and `_recode` calls them.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return await self._in_thread(self._reference, key) is not None

    def getsize_sync(self, key: str) -> int:
        reference = self._reference(key)
        if reference == RECODED:
            reference = self._recode(key)
        if reference is None:
            raise FileNotFoundError(key)
        return len(reference) if isinstance(reference, bytes) else reference[2]

    async def getsize(self, key: str) -> int:
        return await self._in_thread(self.getsize_sync, key)

    def _recode(self, key: str) -> bytes:
        """Return a chunk that its library has decoded, encoded as its array declares."""
        with self._lock:  # HDF5 has one lock for all
            if self._recent[0] == key:
                return self._recent[1]
            self._arrays = self._arrays or self.parsed.open_arrays()
            path = self._array_of(key)
            prefix = f"{path}/" if path else ""
            own = {name: self._documents.get(prefix + name) for name in _DOCUMENTS}
            store = MemoryStore(
                {name: cpu.Buffer.from_bytes(doc) for name, doc in own.items() if doc}
            )
            with zarr.config.set({"array.write_empty_chunks": True}):
                array = zarr.open_array(store)
                coords = [*map(int, re.findall("[0-9]+", key[len(prefix) :]))][: array.ndim]
                bounds = zip(coords, array.chunks, array.shape, strict=True)
                box = tuple(slice(c * n, min((c + 1) * n, size)) for c, n, size in bounds)
                with faults_named():
                    values = self._arrays[path][box]  # of netCDF it may end before the array
                starts = zip(box, np.shape(values), strict=True)
                array[tuple(slice(b.start, b.start + n) for b, n in starts)] = values
            value = store._store_dict[key[len(prefix) :]].to_bytes()
            self._recent = (key, value)
            return value

    # ----------------------------------------------------------------- listings

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for keys in (self._documents, self.parsed.references):
            for key in keys:
                if key.startswith(prefix):
                    yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List groups, arrays and documents; chunks are found by `list_prefix` only."""
        start = f"{prefix.rstrip('/')}/".lstrip("/")
        keys = (key for key in self._documents if key.startswith(start))
        for name in dict.fromkeys(key[len(start) :].partition("/")[0] for key in keys):
            yield name

    # ------------------------------------------------------------------- writes

    def set_sync(self, key: str, value: Buffer) -> None:  # noqa: ARG002
        raise UnsupportedError(f"{key!r} lies in a file of another format: it is only read here")

    def delete_sync(self, key: str) -> None:
        raise UnsupportedError(f"{key!r} lies in a file of another format: it is only read here")

    async def set(self, key: str, value: Buffer) -> None:
        self.set_sync(key, value)

    async def delete(self, key: str) -> None:
        self.delete_sync(key)
