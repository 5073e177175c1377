"""What the kept compressors write is what zarr's codec writes: numcodecs reads it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numcodecs
import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import ZstdCodec

from zarr_shardstore.zarr_hooks.chunk_codec import (
    zstd_compress_of,
    zstd_decompress,
)

LEVELS = st.integers(-20, 12)
CHUNKS = st.binary(min_size=1, max_size=5000)  # numcodecs does not read a frame of nothing


@given(CHUNKS, CHUNKS, LEVELS, st.booleans())
def test_numcodecs_reads_it(data: bytes, another: bytes, level: int, checksum: bool) -> None:
    compress = zstd_compress_of(ZstdCodec(level=level, checksum=checksum))
    for content in (data, another, data * 20):  # one compressor, whatever came before
        frame = compress(np.frombuffer(content, "u1"))
        assert bytes(numcodecs.Zstd().decode(frame)) == content
        assert bytes(zstd_decompress(frame)) == content
        parameters = zstandard.get_frame_parameters(frame)
        assert parameters.has_checksum == checksum
        assert parameters.content_size == len(content), "readers need it to make room"


@given(st.binary(min_size=1), LEVELS)
def test_levels_are_those_of_zarr(data: bytes, level: int) -> None:
    """0 is the default; nothing is compressed better or worse than by zarr's codec, but for what
    another version of libzstd does."""
    text = data * 300
    codec = ZstdCodec(level=level)
    ours, of_zarr = zstd_compress_of(codec)(text), codec._zstd_codec.encode(text)
    assert abs(len(ours) - len(of_zarr)) <= 16 + len(of_zarr) // 20


def test_in_many_threads() -> None:
    compress = zstd_compress_of(ZstdCodec())
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 20, 50_000).astype("u1") for _ in range(64)]
    with ThreadPoolExecutor(8) as executor:
        for _ in range(5):
            for array, frame in zip(arrays, executor.map(compress, arrays), strict=True):
                np.testing.assert_array_equal(np.frombuffer(zstd_decompress(frame), "u1"), array)
