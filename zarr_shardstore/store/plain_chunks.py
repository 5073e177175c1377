"""Chunks of plain numbers, from bytes straight into the array that is read.

For the chains that most arrays have, ``bytes`` and at most one compressor, this does what zarr's
codecs do, without a buffer object for each step: they take 12 µs a chunk more. The compressors
are those of numcodecs, as in zarr, but for zstd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numcodecs
import numpy as np
import numpy.typing as npt
from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec, BytesBytesCodec
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec
from zarr.core.array_spec import ArraySpec

from zarr_shardstore.store import kept_zstd

__all__ = ["PlainChunks"]

_Decompress = Callable[[Any], Any]

_KINDS = "biufc"
"""Of data types whose elements are what the bytes say: booleans, numbers."""


class PlainChunks:
    """Decodes the chunks of one array.

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
        """What decodes these codecs' chunks; ``None`` if the chain is another one."""
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
        """The chunk that bytes hold, in the byte order in which it is stored.

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
    decompress: _Decompress | None = None
    if type(codec) is ZstdCodec:
        decompress = kept_zstd.decompress
    elif type(codec) is GzipCodec:
        decompress = numcodecs.GZip().decode
    elif type(codec) is BloscCodec:
        decompress = numcodecs.Blosc().decode
    return decompress
