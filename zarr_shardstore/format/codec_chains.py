"""The way of a chunk from values to bytes: order, data type, filters and compressor, or v3 codecs.

===================  ======================================================
v2, draft            v3
===================  ======================================================
order ``F``          a ``transpose`` codec that reverses the dimensions
filters of values    the same, in this order
byte order           the endian of the ``bytes`` codec
filters of bytes     the same, in this order
compressor           the last codec
===================  ======================================================

Source: Zarr v2, "Metadata"; Zarr v3 core, "Codecs".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.codec_names import codec_of_compressor, is_compressor, name_and_options
from zarr_shardstore.format.data_types import DataType, Endian, parse_v3
from zarr_shardstore.format.filters import (
    SERIALIZERS,
    codec_of_filter,
    filter_of_codec,
    is_filter_of_values,
)

__all__ = [
    "Chain",
    "Order",
    "bytes_codec",
    "bytes_endian",
    "chain_of_codecs",
    "codecs_of_chain",
    "layout_codecs",
    "split_layout",
]

Config = dict[str, Any]
Order: TypeAlias = Literal["C", "F"]


@dataclass(frozen=True, slots=True)
class Chain:
    """What Zarr v2 says about the bytes of a chunk.

    Parameters
    ----------
    data_type : DataType, optional
        ``None`` for objects, which the first filter makes bytes of.
    order : {"C", "F"}
    filters, compressor
        numcodecs configurations.
    """

    data_type: DataType | None
    order: Order
    filters: Sequence[Config] = ()
    compressor: Config | None = None


def codecs_of_chain(chain: Chain, ndim: int) -> list[Config]:
    """The v3 codecs that decode the same bytes to the same values.

    Raises
    ------
    UnsupportedError
        If there are none.

    Examples
    --------
    >>> [c["name"] for c in codecs_of_chain(Chain(None, "C", [{"id": "vlen-utf8"}]), 1)]
    ['vlen-utf8']
    """
    codecs = layout_codecs(chain.order, ndim)
    filters = list(chain.filters)
    stage = chain.data_type
    if stage is None:
        codecs.append({"name": filters.pop(0)["id"]})
    for i, config in enumerate(filters):
        codec, encoded = codec_of_filter(config, stage, is_first=i == 0)
        if stage is not None and encoded is None:
            codecs.append(bytes_codec(stage))
        codecs.append(codec)
        stage = encoded
    if stage is not None:
        codecs.append(bytes_codec(stage))
    if chain.compressor is not None:
        codecs.append(codec_of_compressor(chain.compressor, 1 if stage is None else stage.itemsize))
    return codecs


def chain_of_codecs(codecs: Any, data_type: Any, ndim: int) -> Chain:
    """What v2 says about bytes that v3 codecs decode.

    Parameters
    ----------
    data_type
        As v3 spells it.

    Raises
    ------
    SpecError
        If there is no codec that makes bytes of values.
    UnsupportedError
        If v2 cannot express the codecs.
    """
    order, rest = split_layout(codecs, ndim)
    names = [name_and_options(codec)[0] for codec in rest]
    serializers = [i for i, name in enumerate(names) if name == "bytes" or name in SERIALIZERS]
    if len(serializers) != 1:
        raise UnsupportedError(
            f"v2 has one codec that makes bytes of values, 'bytes' or 'vlen-…'; got {names}"
        )
    (at,) = serializers
    filters = [filter_of_codec(codec) for codec in (*rest[:at], *rest[at + 1 :])]
    if [is_filter_of_values(config) for config in filters] != [i < at for i in range(len(filters))]:
        raise UnsupportedError(f"v2 has no codecs in the order {names}")
    compressor = filters.pop() if len(filters) > at and is_compressor(filters[-1]["id"]) else None
    if names[at] in SERIALIZERS:
        if at or data_type != SERIALIZERS[names[at]]:
            raise UnsupportedError(f"v2 has no codecs {names} for the data type {data_type!r}")
        return Chain(None, order, [filter_of_codec(rest[at]), *filters], compressor)
    endian = bytes_endian(rest[at])
    error: Exception | None = None
    # Filters name the byte order of the values they take, `bytes` of those that come out.
    guesses: tuple[Endian, Endian] = ("big", "little") if endian == "big" else ("little", "big")
    for guess in guesses:
        try:
            chain = Chain(parse_v3(data_type, guess), order, filters, compressor)
            again = [c for c in codecs_of_chain(chain, ndim) if c["name"] == "bytes"]
        except UnsupportedError as failed:
            error = error or failed
            continue
        if bytes_endian(again[0]) in (endian, None):
            return chain
    raise error or UnsupportedError(f"v2 has no codecs {names} in these byte orders")


def layout_codecs(order: str, ndim: int) -> list[Config]:
    """The codecs, none or one, that put values into an order."""
    if order not in ("C", "F"):
        raise UnsupportedError(f"the memory layout {order!r} is not known")
    if order == "C" or ndim < 2:
        return []
    reverse = list(range(ndim))[::-1]
    return [{"name": "transpose", "configuration": {"order": reverse}}]


def split_layout(codecs: Any, ndim: int) -> tuple[Order, list[Any]]:
    """The order of values that codecs begin with, and the codecs after that.

    Raises
    ------
    UnsupportedError
        If it is another one than C and F.
    """
    rest = list(codecs)
    if not rest or name_and_options(rest[0])[0] != "transpose":
        return "C", rest
    order = name_and_options(rest[0])[1].get("order")
    same = list(range(ndim))
    if order == "C" or order == same:
        return "C", rest[1:]
    if order == "F" or order == same[::-1]:
        return "F", rest[1:]
    raise UnsupportedError(
        f"only the memory layouts C and F can be expressed, not a transpose by {order!r}"
    )


def bytes_codec(data_type: DataType) -> Config:
    """The codec that makes bytes of values."""
    if data_type.endian is None:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": data_type.endian}}


def bytes_endian(codec: Any) -> Endian | None:
    """The byte order of a ``bytes`` codec.

    Raises
    ------
    SpecError
        If there is no such order.
    """
    endian = name_and_options(codec)[1].get("endian")
    if endian not in ("little", "big", None):
        raise SpecError(f"the codec 'bytes' has no endian {endian!r}")
    return endian
