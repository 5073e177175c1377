"""Ends of compressed frames: where each codec's frame stops, among other bytes."""

from __future__ import annotations

from collections.abc import Callable

import numcodecs
import numpy as np
import pytest

from zarr_shardstore.tools.check.salvage.frames import FRAME_CODECS, frame_ends, next_frame

NBYTES = 20_000
PLAIN = np.random.default_rng(0).integers(0, 200, NBYTES, np.uint8).tobytes()
CODECS: dict[str, Callable[[], numcodecs.abc.Codec]] = {
    "zstd": numcodecs.Zstd,
    "zstd with a checksum": lambda: numcodecs.Zstd(checksum=True),
    "gzip": numcodecs.GZip,
    "zlib": numcodecs.Zlib,
    "bz2": numcodecs.BZ2,
    "lzma": numcodecs.LZMA,
    "blosc": numcodecs.Blosc,
    "lz4": numcodecs.LZ4,
}


def frame_of(codec: str, plain: bytes = PLAIN) -> bytes:
    return bytes(CODECS[codec]().encode(plain))


def ends(
    codec: str, data: bytes, start: int, tail: int = 0, nbytes: int | None = NBYTES
) -> list[int]:
    return list(frame_ends(codec.partition(" ")[0], memoryview(data), start, nbytes, tail))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("plain", [PLAIN, bytes(NBYTES)], ids=["noise", "zeros"])
def test_a_frame_ends_where_its_codec_says(codec: str, plain: bytes) -> None:
    """Behind any bytes, and before another frame; with a tail of checksums or without."""
    frame = frame_of(codec, plain)
    data = b"before" + frame + b"tail" + frame
    end = 6 + len(frame)
    is_lz4 = codec == "lz4"
    assert ends(codec, data, 6, 0) == ([end + 4, len(data)] if is_lz4 else [end])
    assert ends(codec, data, 6, 4) == ([end + 4, len(data)] if is_lz4 else [end + 4])
    assert ends(codec, data[: end + 4], 6, 4) == [end + 4]
    assert codec.partition(" ")[0] in FRAME_CODECS
    if codec != "zlib":  # its header is too short to be searched for
        name, view = codec.partition(" ")[0], memoryview(data)
        assert next_frame(name, view, 0, NBYTES) == 6
        assert next_frame(name, view, 6, NBYTES) == 6
        assert next_frame(name, view, end, NBYTES) == end + 4
        assert next_frame(name, view, end + 9, NBYTES) is None


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "lz4"])
def test_a_frame_that_is_cut_off_has_no_end(codec: str) -> None:
    frame = frame_of(codec)
    for n in (*range(20), len(frame) // 2, len(frame) - 1):
        assert ends(codec, frame[:n], 0) == []
    assert ends(codec, frame, 0, tail=1) == []
    assert ends(codec, b"?" * 300, 0) == []


def test_the_size_tells_frames_of_blosc_and_of_lz4() -> None:
    for codec in ("blosc", "lz4"):
        data = memoryview(b"...." + frame_of(codec))
        assert next_frame(codec, data, 0, None) is None
        assert next_frame(codec, data, 0, NBYTES + 1) is None
    assert ends("blosc", frame_of("blosc"), 0, nbytes=None) == [len(frame_of("blosc"))]
    assert ends("blosc", frame_of("blosc"), 0, nbytes=NBYTES + 1) == []
    assert next_frame("zlib", memoryview(frame_of("zlib")), 0, NBYTES) is None


def test_ends_of_a_frame_of_lz4_are_few() -> None:
    header = NBYTES.to_bytes(4, "little")
    data = header * 20
    assert ends("lz4", data, 0) == [*range(4, 36, 4), 80]
