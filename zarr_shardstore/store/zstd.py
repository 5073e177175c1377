"""zstd with cached compressors and decompressors.

numcodecs makes a compressor and a decompressor for each chunk. Either takes about as long as the
work on 8 kB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numcodecs
import zstandard
from zarr.codecs import ZstdCodec

_MAX_LEVEL = 5
"""Highest level of a cached compressor, which takes up to 5 MiB; higher levels take far more, and
so much time that making the compressor does not count."""

_MAX_COMPRESSORS = 4
"""Cached compressors of a thread, each for one level."""


class _Cache(threading.local):
    """Compressors and decompressor of one thread: each call changes their state."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self.compressors: dict[tuple[int, bool], zstandard.ZstdCompressor] = {}


_cache = _Cache()
_numcodecs_zstd = numcodecs.Zstd()


def compress_of(codec: ZstdCodec) -> Callable[[Any], bytes]:
    """Return a function that compresses as a codec of zarr does; any thread may call it."""
    if codec.level > _MAX_LEVEL:
        of_zarr: Callable[[Any], bytes] = codec._zstd_codec.encode
        return of_zarr
    options = codec.level, codec.checksum

    def compress(data: Any) -> bytes:
        compressor = _cache.compressors.get(options)
        if compressor is None:
            if len(_cache.compressors) >= _MAX_COMPRESSORS:
                _cache.compressors.clear()
            level, checksum = options
            compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
            _cache.compressors[options] = compressor
        return compressor.compress(data)

    return compress


def decompress(value: Any) -> Any:
    """Return the bytes that were compressed; damage is a `RuntimeError` or a `ValueError`."""
    try:
        data = _cache.decompressor.decompress(value, allow_extra_data=False)
    except zstandard.ZstdError:  # a frame without its size, several frames, or damage
        data = b""
    return data or _numcodecs_zstd.decode(value)  # behind an empty frame there may be others
