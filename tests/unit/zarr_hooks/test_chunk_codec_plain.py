"""Chunks that are decoded without zarr's buffers are what zarr's codecs make of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, ZstdCodec
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype

from tests.support.rounds import rounds
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec, PlainCodec

N = 100


def spec_of() -> ArraySpec:
    dtype = zarr.create_array({}, shape=(1,), dtype="<u2").metadata.dtype
    config = ArrayConfig(order="C", write_empty_chunks=True)
    return ArraySpec((N,), dtype, 0, config, default_buffer_prototype())


def plain_zstd() -> PlainCodec:
    codec = ChunkCodec.of([BytesCodec(), ZstdCodec()])
    assert codec is not None
    plain = codec.plain(spec_of())
    assert plain is not None
    return plain


def compressed(**options: Any) -> Callable[[bytes], bytes]:
    return lambda data: zstandard.ZstdCompressor(**options).compress(data)


def streamed(data: bytes) -> bytes:
    """A frame that does not say how long its content is."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


def in_two_frames(data: bytes) -> bytes:
    return b"".join(map(zstandard.ZstdCompressor().compress, (data[:50], data[50:])))


FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "numcodecs": numcodecs.Zstd(level=3).encode,
    "checksum": compressed(write_checksum=True),
    "no size": compressed(write_content_size=False),
    "streamed": streamed,
    "two frames": in_two_frames,
    "cut": lambda data: compressed()(data)[:-3],
    "damaged": lambda data: compressed(write_checksum=True)(data)[:-1] + b"?",
    "more behind": lambda data: compressed()(data) + b"more",
    "something else": lambda _: b"no zstd",
    "nothing": lambda _: b"",
    "an empty frame before": lambda data: compressed()(b"") + compressed()(data),
    "more behind an empty frame": lambda _: compressed()(b"") + b"more",
    "another size": lambda data: compressed()(data + b"xx"),
}


@pytest.mark.parametrize("kind", FRAMES)
@settings(max_examples=rounds(10))
@given(values=st.lists(st.integers(0, 2**16 - 1), min_size=N, max_size=N))
def test_zstd_is_that_of_numcodecs(kind: str, values: list[int]) -> None:
    """Whoever wrote it: the same values, or an error where numcodecs has one."""
    array = np.array(values, "<u2")
    value = memoryview(FRAMES[kind](array.tobytes()))
    try:
        expected = np.frombuffer(numcodecs.Zstd().decode(value), "<u2").reshape(N)
    except Exception:
        with pytest.raises((RuntimeError, ValueError)):
            plain_zstd().decode(value, (N,))
        return
    np.testing.assert_array_equal(plain_zstd().decode(value, (N,)), expected)
    if kind in ("numcodecs", "checksum"):
        np.testing.assert_array_equal(expected, array)


def test_zstd_in_many_threads() -> None:
    """One decoder of chunks serves all threads of an operation."""
    plain, rng = plain_zstd(), np.random.default_rng(0)
    arrays = [rng.integers(0, 100, 5000).astype("<u2") for _ in range(64)]
    values = [numcodecs.Zstd().encode(array) for array in arrays]
    with ThreadPoolExecutor(8) as executor:
        for _ in range(5):
            decoded = executor.map(lambda value: plain.decode(value, (5000,)), values)
            for array, chunk in zip(arrays, decoded, strict=True):
                np.testing.assert_array_equal(chunk, array)
