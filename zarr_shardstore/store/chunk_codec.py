"""Codecs of one array, called chunk by chunk in the thread of the caller.

`ChunkCodec` runs any chain of codecs. zarr 3.1 has only async codecs, most of which do their work
in ``asyncio.to_thread``, about 150 µs a chunk and codec. `ChunkCodec` calls the same functions
directly.

`PlainChunks` decodes chunks of numbers whose chain is ``bytes`` and at most one compressor, as
most arrays have. It makes no buffer object for each step, which saves 12 µs a chunk. The
compressors are those of numcodecs, as in zarr, except zstd.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Literal, TypeAlias, cast

import numcodecs
import numpy as np
import numpy.typing as npt
from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec, BytesBytesCodec, Codec
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer

from zarr_shardstore.store import zstd

_Step: TypeAlias = Callable[[Any, ArraySpec], Any]

_AWAIT_ONLY_THREADS = ("zarr.codecs._v2", "zarr.codecs.numcodecs._codecs")
"""Modules of zarr 3.1 whose codecs have no blocking methods, and await only threads."""


class ChunkCodec:
    """Blocking encoder and decoder of single chunks.

    Thread safety: may be used from any thread.
    """

    def __init__(self, codecs: Iterable[Codec], steps: list[tuple[_Step, _Step]]) -> None:
        self._codecs = tuple(codecs)
        self._steps = steps
        self._specs: tuple[ArraySpec, list[ArraySpec]] | None = None

    @classmethod
    def of(
        cls,
        array_array: Iterable[ArrayArrayCodec],
        array_bytes: ArrayBytesCodec,
        bytes_bytes: Iterable[BytesBytesCodec],
    ) -> ChunkCodec | None:
        """Return the chain of these codecs; ``None`` if one of them can only be awaited."""
        codecs: list[Codec] = [*array_array, array_bytes, *bytes_bytes]
        steps = []
        for codec in codecs:
            step = _blocking_steps(codec)
            if step is None:
                return None
            steps.append(step)
        return cls(codecs, steps)

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
    if type(codec) is ZstdCodec:
        return _on_buffers(zstd.compress_of(codec)), _on_buffers(zstd.decompress)
    encode, decode = getattr(codec, "_encode_sync", None), getattr(codec, "_decode_sync", None)
    if encode is not None and decode is not None:
        # zarr 3.4's sharding codec can block only if the codecs inside it can.
        return (encode, decode) if getattr(codec, "_sync_capable", True) else None
    if any(cls.__module__ in _AWAIT_ONLY_THREADS for cls in type(codec).__mro__):
        return _in_this_thread(codec._encode_single), _in_this_thread(codec._decode_single)
    return None


def _on_buffers(work: Callable[[Any], bytes]) -> _Step:

    def run(data: Buffer, spec: ArraySpec) -> Buffer:
        return spec.prototype.buffer.from_bytes(work(data.as_numpy_array()))

    return run


def _in_this_thread(method: Callable[[Any, ArraySpec], Coroutine[Any, Any, Any]]) -> _Step:
    """Return a blocking function for a method that awaits nothing but work in threads."""

    def run(data: Any, spec: ArraySpec) -> Any:
        coroutine = method(data, spec)
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(_THIS_THREAD)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        finally:
            asyncio._set_running_loop(outer)
            coroutine.close()
        raise RuntimeError(f"{method.__qualname__} waits for something else than a thread")

    return run


class _ThisThread:
    """Stand-in for the event loop that runs work for other threads in the calling thread."""

    def run_in_executor(self, _: object, func: Callable[..., Any], *args: Any) -> _Done:
        return _Done(func(*args))


class _Done:
    """An awaitable that never waits."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, Any]:
        return self._value
        yield  # what makes this a generator


_THIS_THREAD = cast(asyncio.AbstractEventLoop, _ThisThread())

_Decompress = Callable[[Any], Any]

_KINDS = "biufc"
"""Kinds of data types whose elements are plain bytes: booleans, numbers."""


class PlainChunks:
    """Decoder of the chunks of one array of numbers.

    Thread safety: may be used from any thread.
    """

    def __init__(self, decompress: _Decompress | None, endian: str | None) -> None:
        self._decompress = decompress
        self._byte_order: Literal["=", "<", ">"] = "="
        if endian is not None:
            self._byte_order = "<" if endian == "little" else ">"
        self._dtypes: tuple[ArraySpec | None, Any] = None, None

    @classmethod
    def of(
        cls,
        array_array: Sequence[ArrayArrayCodec],
        array_bytes: ArrayBytesCodec,
        bytes_bytes: Sequence[BytesBytesCodec],
        spec: ArraySpec,
    ) -> PlainChunks | None:
        """Return the decoder of a chain of codecs; ``None`` if the chain is another one."""
        if array_array or type(array_bytes) is not BytesCodec or len(bytes_bytes) > 1:
            return None
        dtype = spec.dtype.to_native_dtype()
        if dtype.kind not in _KINDS or (array_bytes.endian is None and dtype.itemsize > 1):
            return None
        decompress = None
        if bytes_bytes:
            decompress = _decompress_of(bytes_bytes[0])
            if decompress is None:
                return None
        endian = array_bytes.endian
        return cls(decompress, None if endian is None else str(getattr(endian, "value", endian)))

    def decode(self, value: bytes | memoryview, spec: ArraySpec) -> npt.NDArray[Any]:
        """Return the chunk that bytes encode, in the byte order in which it is stored.

        Raises
        ------
        ValueError
            If there are too few bytes or too many.
        """
        of, dtype = self._dtypes  # one tuple: another thread sees the old pair or the new one
        if of is not spec:
            dtype = spec.dtype.to_native_dtype().newbyteorder(self._byte_order)
            self._dtypes = spec, dtype
        data = value if self._decompress is None else self._decompress(value)
        return np.frombuffer(data, dtype).reshape(spec.shape)


def _decompress_of(codec: BytesBytesCodec) -> _Decompress | None:
    kind = type(codec)  # a subclass may do something else
    if kind is ZstdCodec:
        return zstd.decompress
    if kind is GzipCodec:
        gzip: _Decompress = numcodecs.GZip().decode
        return gzip
    if kind is BloscCodec:
        blosc: _Decompress = numcodecs.Blosc().decode
        return blosc
    return None
