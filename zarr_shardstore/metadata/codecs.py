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

Compressors: numcodecs configurations, as the draft and Zarr v2 have them, and v3 codecs.

=========  ==========================================================  ================
id         draft: ``codec`` is this URI                                v3
=========  ==========================================================  ================
``gzip``   ``https://purl.org/zarr/spec/codec/gzip/1.0``               ``gzip``
``blosc``  and so on                                                   ``blosc``
``zstd``                                                               ``zstd``
``zlib``                                                               ``numcodecs.zlib``
``bz2``, ``lz4``, ``lzma``                                             the same
=========  ==========================================================  ================

A *config* is the parsed JSON object of numcodecs: ``{"id": "gzip", "level": 1}``.

Source: Zarr v3 core, "Codecs"; the draft as zarr-python 2.13 to 2.18 write it,
``zarr/meta.py``; numcodecs, ``get_config`` of each codec.

Filters of Zarr v2: numcodecs configurations, and the v3 codecs that decode the same.

===================================================  ===================  =========================
id                                                   works on             v3
===================================================  ===================  =========================
``delta``, ``fixedscaleoffset``, ``quantize``,       values               ``numcodecs.`` and the id
``astype``, ``bitround``, ``packbits``
``vlen-utf8``, ``vlen-bytes``                        objects              the same, as serializer
``shuffle``, ``crc32``, ``adler32``,                 bytes                ``numcodecs.`` and the id
``fletcher32``, ``jenkins_lookup3``
``crc32c``, at the end                               bytes                ``crc32c``
a compressor                                         bytes                see `codec_names`
===================================================  ===================  =========================

Every option is spelled out: v3 codecs of other programs have other defaults.

Source: numcodecs, ``get_config`` of each codec; zarr-python 3, ``zarr.codecs.numcodecs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.metadata.data_types import DataType, Endian, parse_numpy, parse_v3
from zarr_shardstore.metadata.transformer_list import name_of

_URI = "https://purl.org/zarr/spec/codec/"
_NUMCODECS = "numcodecs."

_DEFAULTS: dict[str, Config] = {
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    "bz2": {"level": 1},
    "gzip": {"level": 1},
    "lz4": {"acceleration": 1},
    "lzma": {"format": 1, "check": -1, "preset": None, "filters": None},
    "zlib": {"level": 1},
    "zstd": {"level": 0, "checksum": False},
}
"""What numcodecs takes for options that a configuration leaves out."""

_NATIVE = ("blosc", "gzip", "zstd")
"""Codecs that v3 itself names."""

_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""v3's words for numcodecs' numbers."""

_AUTO_SHUFFLE = -1
_MAX_TYPESIZE = 255


def codec_of_compressor(config: Mapping[str, Any], itemsize: int) -> Config:
    """The v3 codec that decodes what a numcodecs compressor wrote.

    Parameters
    ----------
    config
        With its ``id``.
    itemsize
        Bytes of a value of the array; Blosc shuffles by it.

    Raises
    ------
    UnsupportedError
        If the compressor, or one of its options, is not known.

    Examples
    --------
    >>> codec_of_compressor({"id": "zlib", "level": 3}, itemsize=4)
    {'name': 'numcodecs.zlib', 'configuration': {'level': 3}}
    """
    name = config.get("id")
    options = {k: v for k, v in config.items() if k != "id"}
    if name == "blosc":
        options.pop("typesize", None)
    options = _complete(name, options)
    if name == "blosc":
        shuffle = options["shuffle"]
        if shuffle == _AUTO_SHUFFLE:
            shuffle = 2 if itemsize == 1 else 1
        if shuffle not in range(len(_SHUFFLES)):
            raise SpecError(f"Blosc has no shuffle {shuffle!r}")
        typesize = itemsize if itemsize <= _MAX_TYPESIZE else 1  # what Blosc itself makes of it
        options = {"typesize": typesize, **options, "shuffle": _SHUFFLES[shuffle]}
    v3_name = name if name in _NATIVE else f"{_NUMCODECS}{name}"
    return {"name": v3_name, "configuration": options}


def compressor_of_codec(codec: Any) -> Config:
    """The numcodecs configuration, with its ``id``, of a v3 codec that compresses.

    Raises
    ------
    UnsupportedError
        If the codec is none of those above.

    Examples
    --------
    >>> compressor_of_codec({"name": "zstd", "configuration": {"level": 3}})
    {'id': 'zstd', 'level': 3, 'checksum': False}
    """
    v3_name, options = name_and_options(codec)
    name = v3_name.removeprefix(_NUMCODECS)
    if name not in _DEFAULTS or (v3_name == name and name not in _NATIVE):
        raise UnsupportedError(
            f"the codec {v3_name!r} cannot be translated: take one of "
            f"{', '.join(sorted(_DEFAULTS))}"
        )
    if name == "blosc":
        options.pop("typesize", None)
        if options.get("shuffle") in _SHUFFLES:
            options["shuffle"] = _SHUFFLES.index(options["shuffle"])
        elif v3_name == name:
            raise SpecError(f"the codec 'blosc' has no shuffle {options.get('shuffle')!r}")
    return {"id": name, **_complete(name, options)}


def is_compressor(name: Any) -> bool:
    """Whether a numcodecs ``id`` is that of a compressor above."""
    return name in _DEFAULTS


def config_of_draft(compressor: Mapping[str, Any]) -> Config:
    """The numcodecs configuration of a draft document's compressor.

    Raises
    ------
    UnsupportedError
        If its URI is none of those above.
    """
    uri = compressor.get("codec")
    name = uri.removeprefix(_URI).split("/")[0] if isinstance(uri, str) else None
    if name not in _DEFAULTS or not str(uri).startswith(f"{_URI}{name}/"):
        raise UnsupportedError(f"the compressor {uri!r} is not known")
    return {**(compressor.get("configuration") or {}), "id": name}


def draft_compressor(config: Mapping[str, Any]) -> Config:
    """A draft document's compressor, from its numcodecs configuration.

    >>> draft_compressor({"id": "gzip", "level": 1})["codec"]
    'https://purl.org/zarr/spec/codec/gzip/1.0'
    """
    options = {k: v for k, v in config.items() if k != "id"}
    return {"codec": f"{_URI}{config['id']}/1.0", "configuration": options}


def name_and_options(codec: Any) -> tuple[str, Config]:
    """Name and configuration of a v3 codec, which may be spelled as a bare name.

    ``endian`` is another name of ``bytes``.

    Raises
    ------
    SpecError
        If it is no codec.
    """
    name = name_of(codec)
    configuration = codec.get("configuration") if isinstance(codec, Mapping) else None
    if isinstance(name, str) and isinstance(configuration, Mapping | None):
        return name, dict(configuration or {})
    raise SpecError(f"{codec!r} is no codec")


def _complete(name: Any, options: Config) -> Config:
    """Options with the defaults that were left out; the order is that of the defaults."""
    defaults = _DEFAULTS.get(name)
    if defaults is None:
        raise UnsupportedError(
            f"the compressor {name!r} cannot be translated: only {', '.join(sorted(_DEFAULTS))} can"
        )
    unknown = options.keys() - defaults.keys()
    if unknown:
        raise UnsupportedError(f"the compressor {name!r} has unknown options {sorted(unknown)}")
    return {**defaults, **options}


SERIALIZERS = {"vlen-utf8": "string", "vlen-bytes": "variable_length_bytes"}
"""Filters that make bytes of objects, and the data type that the array has in v3."""

_DTYPES = {
    "delta": ("dtype", "astype"),
    "fixedscaleoffset": ("dtype", "astype"),
    "quantize": ("dtype", "astype"),
    "astype": ("decode_dtype", "encode_dtype"),
    "bitround": None,
    "packbits": None,
}
"""Filters of values, and the options that name the data type of decoded and encoded values."""

_OPTIONS: dict[str, Config] = {
    "delta": {},
    "fixedscaleoffset": {"offset": None, "scale": None},
    "quantize": {"digits": None},
    "astype": {},
    "bitround": {"keepbits": None},
    "packbits": {},
    "shuffle": {"elementsize": 4},
    "crc32": {"location": "start"},
    "crc32c": {"location": "end"},
    "adler32": {"location": "start"},
    "fletcher32": {},
    "jenkins_lookup3": {"initval": 0},
}
"""The other options with numcodecs' defaults; ``None``: there is no default."""


def codec_of_filter(
    config: Mapping[str, Any], data_type: DataType | None, *, is_first: bool = False
) -> tuple[Config, DataType | None]:
    """The v3 codec that decodes what a v2 filter wrote.

    Parameters
    ----------
    config
        With its ``id``.
    data_type
        Of the values that the filter encodes; ``None`` for bytes.
    is_first : bool
        Whether these are the values of the array, which v3 readers have in little-endian order.

    Returns
    -------
    codec : dict
    encoded : DataType or None
        Data type of its result; ``None`` for bytes.

    Raises
    ------
    UnsupportedError
        If the filter, or one of its options, is not known, or works on other values than it says.

    Examples
    --------
    >>> codec_of_filter({"id": "shuffle"}, None)[0]
    {'name': 'numcodecs.shuffle', 'configuration': {'elementsize': 4}}
    """
    name = config.get("id")
    if is_compressor(name):
        itemsize = 1 if data_type is None else data_type.itemsize
        return codec_of_compressor(config, itemsize), None
    if name not in _OPTIONS:
        raise UnsupportedError(
            f"the filter {name!r} has no v3 codec that is known to read the same"
        )
    given = {k: v for k, v in config.items() if k != "id"}
    if name not in _DTYPES:
        options = _complete_filter(name, given)
        if name == "crc32c" and options["location"] == "end":
            return {"name": "crc32c"}, None
        return {"name": f"{_NUMCODECS}{name}", "configuration": options}, None
    if data_type is None:
        raise UnsupportedError(
            f"the filter {name!r} works on values, and comes after one that makes bytes of them"
        )
    encoded = data_type
    dtypes: Config = {}
    if names := _DTYPES[name]:
        decoded_name, encoded_name = names
        decoded = _dtype(name, given.pop(decoded_name, None))
        encoded = _dtype(name, given.pop(encoded_name, None) or decoded.numpy_name)
        if decoded != data_type:
            raise UnsupportedError(
                f"the filter {name!r} takes {decoded.numpy_name!r} and is given "
                f"{data_type.numpy_name!r}"
            )
        if is_first and decoded.endian == "big":
            decoded = replace(decoded, endian="little")
        dtypes = {decoded_name: decoded.numpy_name, encoded_name: encoded.numpy_name}
    if name == "quantize" and (encoded != data_type or data_type.endian == "big"):
        # zarr-python gives its v3 codec values in the byte order of the machine.
        raise UnsupportedError("the filter 'quantize' has a v3 codec for '<f4' and '<f8' only")
    if name == "packbits":
        if data_type.kind != "b":
            raise UnsupportedError("the filter 'packbits' takes bool")
        encoded = parse_numpy("|u1")
    options = {**_complete_filter(name, given), **dtypes}
    return {"name": f"{_NUMCODECS}{name}", "configuration": options}, encoded


def filter_of_codec(codec: Any) -> Config:
    """The v2 filter, a numcodecs configuration with its ``id``, of a v3 codec.

    Raises
    ------
    UnsupportedError
        If there is none.

    Examples
    --------
    >>> filter_of_codec({"name": "crc32c"})
    {'id': 'crc32c', 'location': 'end'}
    """
    v3_name, options = name_and_options(codec)
    if v3_name == "crc32c":
        return {"id": "crc32c", "location": "end"}
    name = v3_name.removeprefix(_NUMCODECS)
    if v3_name in SERIALIZERS:
        return {"id": v3_name}
    if name not in _OPTIONS or name == v3_name:
        return compressor_of_codec(codec)
    return {"id": name, **options}


def is_filter_of_values(config: Mapping[str, Any]) -> bool:
    """Whether a filter works on values, not on bytes."""
    return config.get("id") in _DTYPES


def _dtype(name: Any, text: Any) -> DataType:
    try:
        return parse_numpy(np.dtype(text).str if text is not None else None)
    except TypeError:
        raise SpecError(f"the filter {name!r} has no data type {text!r}") from None


def _complete_filter(name: str, given: Config) -> Config:
    """Options with the defaults that were left out."""
    defaults = _OPTIONS[name]
    unknown = {k for k in given.keys() - defaults.keys() if given[k] is not None}
    if unknown:
        raise UnsupportedError(f"the filter {name!r} has unknown options {sorted(unknown)}")
    options = {**defaults, **{k: v for k, v in given.items() if k in defaults}}
    missing = sorted(k for k, v in options.items() if v is None)
    if missing:
        raise SpecError(f"the filter {name!r} lacks {missing}")
    return options


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
