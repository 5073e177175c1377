"""Consolidated index: the indexes of all shards of one array in one object.

::

    magic 8 bytes │ crc32c u32le of all that follows │ nbytes of the header u32le │ header │ blobs

The header is a JSON object, compressed by zlib. Its members are ``chunks_per_shard``, ``index``
(the form of the shard indexes) and ``written`` (whole seconds since 1970). Four columns have a
value for each shard: ``keys`` (the suffix after the prefix of the array), ``versions``, ``sizes``
(of the shard) and ``nbytes`` (of its blob). Blobs follow each other in that order. A blob is an
index, compressed by zlib: all offsets and then all sizes as uint64, first the lowest byte of each,
then the next.

A version is the ETag of an object, or the time of the last change of a file in whole seconds since
1970. A recorded index counts only for a shard of this version and this size.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from zarr_shardstore.format import checksum
from zarr_shardstore.format.box_grid import spell_side
from zarr_shardstore.format.shard import ShardIndex, ShardingSpec

CONSOLIDATED_INDEX_NAME = "__shards.index"
"""Follows the prefix of the chunk keys of the array."""

CONSOLIDATED_INDEX_MEMBER = "zarr_shardstore_index"
"""Member of the metadata document of an array that has a consolidated index."""

_MAGIC = b"ZSHIDX\x00\x01"
_HEAD_NBYTES = 16
_MAX_HEADER_NBYTES = 256 * 1024 * 1024
"""Three million shards. More are taken for an attack."""

_COLUMNS = ("keys", "versions", "sizes", "nbytes")
_LEVEL = 6
_ITEM_NBYTES = 400
"""Memory of a shard besides its blob."""

RecordedVersion: TypeAlias = str | int

_Doc: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IndexCopy:
    """Shard index, with the version of its shard and the size of the shard in bytes."""

    index: ShardIndex
    version: RecordedVersion
    size: int


class _Blob(NamedTuple):
    version: RecordedVersion
    size: int
    offset: int
    nbytes: int


class ConsolidatedIndexWriter:
    """Encoder of a consolidated index, which keeps the indexes compressed."""

    def __init__(self, spec: ShardingSpec) -> None:
        self._spec = spec
        self._rows: list[tuple[str, RecordedVersion, int, int]] = []
        self._blobs: list[bytes] = []

    def __len__(self) -> int:
        return len(self._blobs)

    def add(self, suffix: str, found: IndexCopy) -> None:
        """Add the index of the shard whose key ends with `suffix`."""
        columns = np.ascontiguousarray(found.index.fields.T.astype("<u8", copy=False))
        shuffled = columns.view(np.uint8).reshape(2, -1, 8).transpose(0, 2, 1)
        blob = zlib.compress(shuffled.tobytes(), _LEVEL)
        self._blobs.append(blob)
        self._rows.append((suffix, found.version, found.size, len(blob)))

    def encode(self, written_s: int) -> bytes:
        """Return the bytes of the object. The time of writing is in seconds since 1970."""
        columns = {name: [row[i] for row in self._rows] for i, name in enumerate(_COLUMNS)}
        header = {**_header_of(self._spec), "written": written_s, **columns}
        packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), _LEVEL)
        rest = b"".join([len(packed).to_bytes(4, "little"), packed, *self._blobs])
        return _MAGIC + checksum.crc32c(rest).to_bytes(4, "little") + rest


class ConsolidatedIndex:
    """Decoded object of encoded indexes. `written_s` is the time of writing by the clock of the
    writer, in seconds since 1970. The cache of indexes sets `was_used`."""

    def __init__(
        self, spec: ShardingSpec, written_s: int, blobs: dict[str, _Blob], data: memoryview
    ) -> None:
        self.spec = spec
        self.written_s = written_s
        self.was_used = False
        self._blobs = blobs
        self._data = data

    @classmethod
    def decode(cls, data: bytes | memoryview, spec: ShardingSpec) -> ConsolidatedIndex | None:
        """Decode an object; ``None`` if it is damaged or unknown, or has shards of another form."""
        data = memoryview(data)
        body = data[12:]
        if data[:8] != _MAGIC or len(data) < _HEAD_NBYTES:
            return None
        if checksum.crc32c(body) != int.from_bytes(data[8:12], "little"):
            return None
        first = _HEAD_NBYTES + int.from_bytes(data[12:16], "little")
        try:
            header = json.loads(_inflated(data[_HEAD_NBYTES:first], _MAX_HEADER_NBYTES))
            if {name: header[name] for name in _header_of(spec)} != _header_of(spec):
                return None
            written_s = _whole(header["written"])
            blobs = dict(_blobs(header, first, len(data)))
        except (ValueError, KeyError, TypeError, zlib.error, RecursionError):
            return None
        return cls(spec, written_s, blobs, data)

    def __len__(self) -> int:
        return len(self._blobs)

    @property
    def has_file_times(self) -> bool:
        """Whether shards are recorded with the time of their last change."""
        return any(isinstance(found.version, int) for found in self._blobs.values())

    @property
    def nbytes(self) -> int:
        """Memory of the consolidated index."""
        return len(self._data) + _ITEM_NBYTES * len(self._blobs)

    def find(self, suffix: str, n_entries: int) -> IndexCopy | None:
        """Return the index of a shard; ``None`` if it is not recorded or is damaged."""
        blob = self._blobs.get(suffix)
        if blob is None:
            return None
        nbytes = 16 * n_entries
        try:
            plain = _inflated(self._data[blob.offset : blob.offset + blob.nbytes], nbytes)
        except zlib.error:
            return None
        if len(plain) != nbytes:
            return None
        columns = np.frombuffer(plain, np.uint8).reshape(2, 8, -1).transpose(0, 2, 1)
        fields = np.ascontiguousarray(columns).view("<u8").reshape(2, -1).T
        index = ShardIndex(np.ascontiguousarray(fields).astype(np.uint64, copy=False))
        return IndexCopy(index, blob.version, blob.size)

    def drop(self, suffix: str) -> None:
        """Remove the index of a shard that has been replaced."""
        self._blobs.pop(suffix, None)


def is_consolidated_index_key(key: str) -> bool:
    """Whether a key, or the last segment of a key, names a consolidated index."""
    return f"/{key}".endswith(f"/{CONSOLIDATED_INDEX_NAME}")


def declares_consolidated_index(doc: _Doc) -> bool:
    """Whether the metadata document of an array declares a consolidated index."""
    return isinstance(doc.get(CONSOLIDATED_INDEX_MEMBER), Mapping)


def with_consolidated_index(doc: _Doc) -> dict[str, Any]:
    """Return a document that declares a consolidated index, which other readers may ignore."""
    return {**doc, CONSOLIDATED_INDEX_MEMBER: {"must_understand": False}}


def _header_of(spec: ShardingSpec) -> dict[str, Any]:
    form = spec.index
    index = {"checksum": form.checksum, "location": form.location, "endian": form.endian}
    sides = list(map(spell_side, spec.boxes.sides))
    return {"chunks_per_shard": sides, "index": index}


def _blobs(header: _Doc, first: int, end: int) -> Iterable[tuple[str, _Blob]]:
    columns = [header[name] for name in _COLUMNS]
    offset = first
    for key, version, size, nbytes in zip(*columns, strict=True):
        if not isinstance(key, str) or not isinstance(version, str | int):
            raise TypeError(key)
        yield key, _Blob(version, _whole(size), offset, _whole(nbytes))
        offset += nbytes
    if offset != end:
        raise ValueError(offset)


def _whole(number: Any) -> int:
    if not isinstance(number, int) or not 0 <= number < 2**63:
        raise ValueError(number)
    return number


def _inflated(data: memoryview, max_nbytes: int) -> bytes:
    """Decompress at most `max_nbytes` and one byte."""
    return zlib.decompressobj().decompress(data, max_nbytes + 1)
