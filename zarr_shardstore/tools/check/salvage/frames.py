"""Ends of compressed frames that carry their length.

::

    zstd                    header, blocks of known size, checksum
    gzip, zlib, bz2, lzma   the stream has a mark at its end
    blosc                   the header has the size
    lz4                     header, bytes up to the next header or the end of the data: the caller
                            tries each

Source: RFC 8878 (3.1.1), RFC 1952, c-blosc "README_CHUNK_FORMAT", `numcodecs.lz4`.
"""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

_STREAMS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "zlib": zlib.decompressobj,
    "bz2": bz2.BZ2Decompressor,
    "lzma": lzma.LZMADecompressor,
}

MAGIC = {
    "zstd": b"\x28\xb5\x2f\xfd",
    "gzip": b"\x1f\x8b\x08",
    "bz2": b"BZh",
    "lzma": b"\xfd7zXZ\0",
}

FRAME_CODECS = frozenset({*_STREAMS, *MAGIC, "blosc", "lz4"})
"""Names of codecs without the prefix ``numcodecs.``."""

_PIECE_NBYTES = 4096
"""Bytes of a stream that are decompressed at a time."""

_MAX_ENDS = 8
"""Headers after a frame of lz4 that may be the next one."""


def frame_ends(
    name: str, data: memoryview, start: int, nbytes: int | None, tail_nbytes: int
) -> Iterator[int]:
    """Yield the offsets at which a frame from `start` may end: usually one.

    A frame is `nbytes` when it is decoded, if that is known, and has a tail of checksums.
    """
    try:
        for end in _ends(name, data, start, nbytes):
            stop = end if name == "lz4" else end + tail_nbytes
            if start < stop <= len(data):
                yield stop
    except (zstandard.ZstdError, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError):
        return


def can_search(name: str, nbytes: int | None) -> bool:
    """Return whether `next_frame` finds every frame of the codec."""
    return name in MAGIC or (name in ("blosc", "lz4") and nbytes is not None)


def next_frame(name: str, data: memoryview, start: int, nbytes: int | None) -> int | None:
    """Return the next offset from `start` on at which a frame may begin, if there is one."""
    magic, before = MAGIC.get(name), 0
    if magic is None and can_search(name, nbytes) and nbytes is not None:
        magic, before = nbytes.to_bytes(4, "little"), 4 if name == "blosc" else 0
    found = magic and re.compile(re.escape(magic)).search(data, start + before)
    return found.start() - before if found else None


def _ends(name: str, data: memoryview, start: int, nbytes: int | None) -> Iterator[int]:
    if name == "zstd":
        at = start + zstandard.frame_header_size(data[start : start + 18])
        is_last = False
        while not is_last and at + 3 <= len(data):
            block = int.from_bytes(data[at : at + 3], "little")
            at += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
            is_last = bool(block & 1)
        if is_last:
            yield at + (data[start + 4] & 4)  # the flag of a checksum has the value of its size
    elif name == "blosc":
        size, stored = (int.from_bytes(data[start + i : start + i + 4], "little") for i in (4, 12))
        if nbytes in (None, size):
            yield start + stored
    elif name == "lz4":
        at = start
        for _ in range(_MAX_ENDS):
            new = next_frame(name, data, at + 4, nbytes)
            if new is None:
                break
            yield new
            at = new
        yield len(data)
    else:
        stream = _STREAMS[name]()
        for at in range(start, len(data), _PIECE_NBYTES):
            piece = data[at : at + _PIECE_NBYTES]
            stream.decompress(piece)
            if stream.eof:
                yield at + len(piece) - len(stream.unused_data)
                return
