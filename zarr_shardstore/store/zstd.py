"""zstd, whose state is kept from chunk to chunk.

numcodecs makes a compressor and a decompressor for each chunk. The first takes 15 to 50 µs, more
than it takes to compress 8 kB; the second 11 µs, as long as 8 kB take to be decompressed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numcodecs
import zstandard
from zarr.codecs import ZstdCodec

_MAX_LEVEL = 5
"""Of a compressor that is kept: it holds up to 5 MiB, those of higher levels far more. They take so
long that making them is nothing beside it."""

_MAX_KEPT = 4
"""Compressors of a thread, each for one level."""


class _Kept(threading.local):
    """One for each thread: they change with each call."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self.compressors: dict[tuple[int, bool], zstandard.ZstdCompressor] = {}


_kept = _Kept()
_numcodecs_zstd = numcodecs.Zstd()


def compress_of(codec: ZstdCodec) -> Callable[[Any], bytes]:
    """What compresses bytes as a codec of zarr does; it may be called in any thread."""
    if codec.level > _MAX_LEVEL:
        of_zarr: Callable[[Any], bytes] = codec._zstd_codec.encode
        return of_zarr
    options = codec.level, codec.checksum

    def compress(data: Any) -> bytes:
        compressor = _kept.compressors.get(options)
        if compressor is None:
            if len(_kept.compressors) >= _MAX_KEPT:
                _kept.compressors.clear()
            level, checksum = options
            compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
            _kept.compressors[options] = compressor
        return compressor.compress(data)

    return compress


def decompress(value: Any) -> Any:
    """The bytes that were compressed.

    Raises
    ------
    RuntimeError, ValueError
        If the value is damaged.
    """
    try:
        data = _kept.decompressor.decompress(value, allow_extra_data=False)
    except zstandard.ZstdError:  # frames whose size nobody knew, or several of them, or damage
        data = b""
    return data or _numcodecs_zstd.decode(value)  # behind an empty frame there may be others
