"""Codecs of one array, called chunk by chunk in the thread of the caller.

zarr 3.1 runs most codecs in ``asyncio.to_thread``, about 150 µs a chunk and codec. `ChunkCodec`
calls numcodecs directly. For zstd each thread caches a compressor and a decompressor: making them
for each chunk, as numcodecs does, takes as long as the work on 8 kB.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numcodecs
import numpy as np
import numpy.typing as npt
import zstandard
from numcodecs.compat import ensure_bytes, ensure_ndarray_like
from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec, Codec
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer

ChunkValues: TypeAlias = NDBuffer | npt.NDArray[Any]
_Step: TypeAlias = Callable[[Any, ArraySpec], Any]

_OF_NUMCODECS = ("zarr.codecs._v2", "zarr.codecs.numcodecs._codecs")
"""Modules of zarr 3.1 with codecs that only await calls of numcodecs in threads."""

_MAX_LEVEL = 5
"""Highest level of a cached compressor, which takes up to 5 MiB. Compressors of higher levels take
far more memory, and making them is a small part of their time."""

_BLOSC_HEADER_NBYTES = 16


class _Zstd(threading.local):
    """Compressor and decompressor of one thread: each call changes their state."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self.compressors: dict[tuple[int, bool], zstandard.ZstdCompressor] = {}


_zstd = _Zstd()
_numcodecs_zstd = numcodecs.Zstd()
_numcodecs_blosc = numcodecs.Blosc()


def zstd_compress_of(codec: ZstdCodec) -> Callable[[Any], bytes]:
    """Return a function that compresses like a codec of zarr, for any thread."""
    level, checksum = codec.level, codec.checksum
    if level > _MAX_LEVEL:
        of_zarr: Callable[[Any], bytes] = codec._zstd_codec.encode
        return of_zarr

    def compress(data: Any) -> bytes:
        if (level, checksum) not in _zstd.compressors:
            compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
            _zstd.compressors = {(level, checksum): compressor}
        return _zstd.compressors[level, checksum].compress(data)

    return compress


def zstd_decompress(value: Any) -> Any:
    """Return the bytes that were compressed; damage is a `RuntimeError` or a `ValueError`."""
    try:
        data = _zstd.decompressor.decompress(value, allow_extra_data=False)
    except zstandard.ZstdError:  # a frame without its size, several frames, or damage
        data = b""
    return data or _numcodecs_zstd.decode(value)  # frames may follow an empty one


def _check_blosc(value: Any) -> None:
    """Refuse Blosc data that end before their header says.

    Blosc reads beyond such data, so the process may crash (numcodecs, issue 228).
    """
    nbytes = int.from_bytes(bytes(value[12:_BLOSC_HEADER_NBYTES]), "little")
    if not _BLOSC_HEADER_NBYTES <= nbytes <= len(value):
        raise RuntimeError(f"damaged Blosc data: {len(value)} bytes, of which it needs {nbytes}")


def _blosc_decompress(value: Any) -> Any:
    _check_blosc(value)
    return _numcodecs_blosc.decode(value)


_DECOMPRESS: dict[type[Codec], Callable[[Any], Any]] = {  # a subclass may do something else
    ZstdCodec: zstd_decompress,
    GzipCodec: numcodecs.GZip().decode,
    BloscCodec: _blosc_decompress,
}

_KINDS = "biufc"
"""Kinds of data types with elements of plain bytes: booleans, numbers."""


class PlainCodec(NamedTuple):
    """Codec of chunks as numpy arrays, without a buffer object, for any thread."""

    dtype: np.dtype[Any]
    """Data type in the stored byte order."""
    compress: Callable[[npt.NDArray[Any]], bytes] | None
    """``None``: this codec only decodes."""
    decompress: Callable[[bytes | memoryview], Any] | None

    def decode(self, value: bytes | memoryview, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return the chunk that bytes encode, in the stored byte order."""
        data = value if self.decompress is None else self.decompress(value)
        return np.frombuffer(data, self.dtype).reshape(shape)

    def decode_all(
        self, values: Sequence[bytes | memoryview], shape: tuple[int, ...]
    ) -> npt.NDArray[Any] | None:
        """Return many chunks as one array; ``None`` if one has another size."""
        chunks = list(values if self.decompress is None else map(self.decompress, values))
        if set(map(len, chunks)) != {math.prod(shape) * self.dtype.itemsize}:
            return None
        return np.frombuffer(b"".join(chunks), self.dtype).reshape(-1, *shape)


class ChunkCodec:
    """Blocking encoder and decoder of the chunks of one array, for any thread."""

    def __init__(self, codecs: Sequence[Codec], steps: Sequence[tuple[_Step, _Step]]) -> None:
        self._codecs = codecs
        self._steps = steps
        self._specs: tuple[ArraySpec, list[ArraySpec]] | None = None

    @classmethod
    def of(cls, codecs: Sequence[Codec]) -> ChunkCodec | None:
        """Return the chain of these codecs; ``None`` if one of them can only be awaited."""
        steps = [step for codec in codecs if (step := _blocking_steps(codec)) is not None]
        return cls(codecs, steps) if len(steps) == len(codecs) else None

    def encode(self, chunk: NDBuffer, spec: ArraySpec) -> Buffer | None:
        """Return the bytes of a chunk; ``None`` if a codec leaves it out."""
        data: Any = chunk
        for (encode, _), spec_there in zip(self._steps, self._specs_along(spec), strict=True):
            data = encode(data, spec_there)
            if data is None:
                return None
        encoded: Buffer = data
        return encoded

    def decode(self, value: Buffer, spec: ArraySpec) -> NDBuffer:
        """Return the chunk that bytes encode."""
        data: Any = value
        steps = zip(reversed(self._steps), reversed(self._specs_along(spec)), strict=True)
        for (_, decode), spec_there in steps:
            data = decode(data, spec_there)
        chunk: NDBuffer = data
        return chunk

    def plain(self, spec: ArraySpec) -> PlainCodec | None:
        """Return the shorter way for numbers, ``bytes`` and at most one compressor of zarr."""
        first, *others = self._codecs
        dtype = spec.dtype.to_native_dtype()
        if (
            type(first) is not BytesCodec
            or (first.endian is None and dtype.itemsize > 1)
            or dtype.kind not in _KINDS
            or len(others) > 1
            or not all(type(codec) in _DECOMPRESS for codec in others)
        ):
            return None
        order: Any = "=" if first.endian is None else getattr(first.endian, "value", first.endian)
        stored = dtype.newbyteorder(order)
        if not others:
            return PlainCodec(stored, np.ndarray.tobytes, None)
        (codec,) = others
        compress = zstd_compress_of(codec) if isinstance(codec, ZstdCodec) else None
        return PlainCodec(stored, compress, _DECOMPRESS[type(codec)])

    def _specs_along(self, spec: ArraySpec) -> list[ArraySpec]:
        """Return the spec of the input of each codec when it encodes."""
        last = self._specs  # one tuple: another thread sees the old pair or the new one
        if last is not None and last[0] is spec:
            return last[1]
        specs = [spec]
        for codec in self._codecs[:-1]:
            specs.append(codec.resolve_metadata(specs[-1]))
        self._specs = (spec, specs)
        return specs


def _blocking_steps(codec: Codec) -> tuple[_Step, _Step] | None:
    steps = _unchecked_steps(codec)
    if steps is None or not _is_blosc(codec):
        return steps
    encode, decode_any = steps

    def decode(data: Buffer, spec: ArraySpec) -> Any:
        _check_blosc(data.as_numpy_array())
        return decode_any(data, spec)

    return encode, decode


def _is_blosc(codec: Any) -> bool:
    """Return whether Blosc decompresses what is stored."""
    is_of_v2 = isinstance(getattr(codec, "compressor", None), numcodecs.Blosc)
    is_of_v3 = isinstance(codec, BloscCodec)
    return is_of_v2 or is_of_v3 or getattr(codec, "codec_config", {}).get("id") == "blosc"


def _unchecked_steps(codec: Codec) -> tuple[_Step, _Step] | None:
    if type(codec) is ZstdCodec:
        return _on_buffers(zstd_compress_of(codec)), _on_buffers(zstd_decompress)
    encode, decode = getattr(codec, "_encode_sync", None), getattr(codec, "_decode_sync", None)
    if encode is not None and decode is not None:
        if any(_is_awaited(codec, *names) for names in _METHODS):
            return None
        # zarr 3.4's sharding codec can block only if the codecs inside it can.
        return (encode, decode) if getattr(codec, "_sync_capable", True) else None
    return _steps_of_numcodecs(codec)


_METHODS = (("_encode_sync", "_encode_single"), ("_decode_sync", "_decode_single"))


def _is_awaited(codec: Codec, blocking: str, awaited: str) -> bool:
    """Return whether a subclass redefines only the method of a codec that is awaited."""
    defining = next(vars(c) for c in type(codec).__mro__ if vars(c).keys() & {blocking, awaited})
    return blocking not in defining


def _on_buffers(work: Callable[[Any], bytes]) -> _Step:

    def run(data: Buffer, spec: ArraySpec) -> Buffer:
        return spec.prototype.buffer.from_bytes(work(data.as_numpy_array()))

    return run


def _steps_of_numcodecs(codec: Any) -> tuple[_Step, _Step] | None:
    """Return what a codec of zarr 3.1 does by numcodecs; ``None`` for any other codec."""
    methods = (codec._encode_single, codec._decode_single)
    if any(method.__module__ not in _OF_NUMCODECS for method in methods):
        return None
    is_v2 = not hasattr(codec, "codec_config")
    filters = (codec.filters or ()) if is_v2 else (numcodecs.get_codec(codec.codec_config),)
    compressors = (codec.compressor,) if is_v2 and codec.compressor else ()

    def encode(data: Any, spec: ArraySpec) -> Any:
        is_nd = isinstance(data, NDBuffer)
        array: Any = data.as_ndarray_like() if is_nd else data.as_numpy_array()
        if is_v2:
            array = array.astype(spec.dtype.to_native_dtype(), order=spec.order, copy=False)
        for step in filters:
            array = step.encode(array)
        if isinstance(codec, ArrayArrayCodec):
            return spec.prototype.nd_buffer.from_ndarray_like(array)
        if getattr(array, "dtype", np.dtype("u1")).kind == "O":
            raise RuntimeError("Python objects have no bytes: a filter must make some of them")
        for step in compressors:
            array = step.encode(array)
        return spec.prototype.buffer.from_bytes(ensure_bytes(array))

    def decode(data: Any, spec: ArraySpec) -> Any:
        is_nd = isinstance(data, NDBuffer)
        array: Any = data.as_ndarray_like() if is_nd else data.as_numpy_array()
        for step in reversed((*filters, *compressors)):
            array = step.decode(array)
        if isinstance(codec, BytesBytesCodec):
            return spec.prototype.buffer.from_bytes(array)
        array, order = ensure_ndarray_like(array), "C"
        if is_v2:
            array, order = _as_type(array, spec.dtype.to_native_dtype()), spec.order
            array = array.reshape(-1, order="A")
        return spec.prototype.nd_buffer.from_ndarray_like(array.reshape(spec.shape, order=order))

    return encode, decode


def _as_type(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return decoded elements as `dtype`: their bytes, or the objects that a filter has made."""
    if dtype.kind == "O" != array.dtype.kind:
        raise RuntimeError("the array has Python objects, and no filter makes these of bytes")
    is_copied = dtype.hasobject or array.dtype.hasobject
    return array.astype(dtype) if is_copied else array.view(dtype)


def fill_value_of(spec: ArraySpec) -> Any:
    """Return the value of missing elements; a document of Zarr v2 may leave it open."""
    return spec.dtype.default_scalar() if spec.fill_value is None else spec.fill_value


def is_empty(chunk: ChunkValues, spec: ArraySpec) -> bool:
    """Whether the array omits this chunk, because it has only fill values."""
    if spec.config.write_empty_chunks:
        return False
    fill = fill_value_of(spec) if spec.fill_value is None else spec.fill_value
    array: Any = chunk.as_ndarray_like() if isinstance(chunk, NDBuffer) else chunk
    if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.size:
        first = array[(0,) * array.ndim]  # most chunks differ here; all elements take 20 µs
        if first != fill and first == first:  # not NaN
            return False
    return spec.prototype.nd_buffer.from_ndarray_like(array).all_equal(fill)
