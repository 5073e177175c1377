"""Codecs of a chunk: order, data type, filters and compressor of Zarr v2 and the draft, or v3's.

Decision 14 has a table of them, in the order of the v3 codecs. v3 itself names ``blosc``, ``gzip``,
``zstd``, and ``crc32c`` at the end. Every other codec is ``numcodecs.`` and its id. A first filter
``vlen-utf8`` or ``vlen-bytes`` makes bytes of objects; in v3 its codec replaces ``bytes``. The
draft has compressors only.

A *config* is the parsed JSON object of numcodecs: ``{"id": "gzip", "level": 1}``. In v3 every
option is spelled out, because other programs have other defaults.

Source: Zarr v2, "Metadata"; Zarr v3 core, "Codecs"; numcodecs, ``get_config`` of each codec;
zarr-python 3, ``zarr.codecs.numcodecs``; zarr-python 2.13 to 2.18, ``zarr/meta.py`` (the draft).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from zarr_shardstore.access import metadata, transformer_list
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.native import data_types

Config = dict[str, Any]
Order: TypeAlias = Literal["C", "F"]

_NUMCODECS = "numcodecs."

_COMPRESSORS: dict[Any, Config] = {
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    "bz2": {"level": 1},
    "gzip": {"level": 1},
    "lz4": {"acceleration": 1},
    "lzma": {"format": 1, "check": -1, "preset": None, "filters": None},
    "zlib": {"level": 1},
    "zstd": {"level": 0, "checksum": False},
}
_OF_BYTES: dict[Any, Config] = {
    "shuffle": {"elementsize": 4},
    "crc32": {"location": "start"},
    "crc32c": {"location": "end"},
    "adler32": {"location": "start"},
    "fletcher32": {},
    "jenkins_lookup3": {"initval": 0},
}
_OF_VALUES: dict[Any, Config] = {
    "delta": {},
    "fixedscaleoffset": {"offset": None, "scale": None},
    "quantize": {"digits": None},
    "astype": {},
    "bitround": {"keepbits": None},
    "packbits": {},
}
"""Options of compressors, filters of bytes and filters of values, with numcodecs' defaults; in
filters ``None`` means that there is no default."""

_DTYPES = dict.fromkeys(("delta", "fixedscaleoffset", "quantize"), ("dtype", "astype"))
_DTYPES["astype"] = ("decode_dtype", "encode_dtype")
"""Options with the data types of decoded and of encoded values."""

SERIALIZERS = {"vlen-utf8": "string", "vlen-bytes": "variable_length_bytes"}
"""Filters that make bytes of objects, and the data type of the array in v3."""

_NATIVE = ("blosc", "gzip", "zstd")
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""v3's words for numcodecs' numbers; -1 is the best one for the size of the values."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Codecs of a chunk as Zarr v2 has them; filters and compressor are configs."""

    data_type: data_types.DataType | None  # None for objects
    order: Order
    filters: Sequence[Config] = ()
    compressor: Config | None = None


def v3_array(
    geometry: metadata.Geometry, chain: Chain, fill_value: Any, attributes: Mapping[str, Any]
) -> Config:
    """Return the v3 document of an array, from its codecs in v2 or the draft."""
    if chain.data_type is not None:
        data_type = data_types.v3_data_type(chain.data_type)
        fill_value = data_types.fill_value_of_v2(fill_value, chain.data_type)
    else:
        data_type = SERIALIZERS[chain.filters[0]["id"]]
        fill_value = data_types.fill_value_of_object(fill_value, data_type)
    shape, chunk_shape, (style, separator), _ = geometry
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": style, "configuration": {"separator": separator}},
        "fill_value": fill_value,
        "codecs": codecs_of_chain(chain, len(shape)),
        "attributes": dict(attributes),
        "storage_transformers": [],
    }


def codecs_of_chain(chain: Chain, ndim: int) -> list[Config]:
    """Return the v3 codecs of the same bytes and values."""
    if chain.order not in ("C", "F"):
        raise UnsupportedError(f"the memory layout {chain.order!r} is not known")
    codecs: list[Config] = []
    if chain.order == "F" and ndim > 1:
        codecs.append({"name": "transpose", "configuration": {"order": [*range(ndim)][::-1]}})
    configs = [*chain.filters, *([] if chain.compressor is None else [chain.compressor])]
    stage = chain.data_type  # what the next codec takes; None for bytes
    if stage is None:
        codecs.append({"name": configs.pop(0)["id"]})
    for i, config in enumerate(configs):
        if config.get("id") in _OF_VALUES:
            codec, stage = _codec_of_values(config, stage, is_first=i == 0)
        else:
            if stage is not None:
                codecs.append(_bytes_codec(stage))
            codec = codec_of_bytes(config, 1 if stage is None else stage.itemsize)
            stage = None
        codecs.append(codec)
    return codecs if stage is None else [*codecs, _bytes_codec(stage)]


def chain_of_codecs(codecs: Any, data_type: Any, ndim: int) -> Chain:
    """Return the chain of v2 for the same bytes and values as v3 codecs."""
    order, rest = split_layout(codecs, ndim)
    names = [transformer_list.name_and_options(codec)[0] for codec in rest]
    serializers = [i for i, name in enumerate(names) if name == "bytes" or name in SERIALIZERS]
    if len(serializers) != 1:
        raise UnsupportedError(
            f"v2 has one codec that makes bytes of values, 'bytes' or 'vlen-…'; got {names}"
        )
    (at,) = serializers
    filters = [_filter_of_codec(codec) for codec in (*rest[:at], *rest[at + 1 :])]
    if [config["id"] in _OF_VALUES for config in filters] != [i < at for i in range(len(filters))]:
        raise UnsupportedError(f"v2 has no codecs in the order {names}")
    is_last_compressor = len(filters) > at and filters[-1]["id"] in _COMPRESSORS
    compressor = filters.pop() if is_last_compressor else None
    if names[at] in SERIALIZERS:
        if at or data_type != SERIALIZERS[names[at]]:
            raise UnsupportedError(f"v2 has no codecs {names} for the data type {data_type!r}")
        return Chain(None, order, [{"id": names[at]}, *filters], compressor)
    endian = bytes_endian(rest[at])
    error: Exception | None = None
    # Filters name the byte order before them, `bytes` the one after them.
    guesses: list[data_types.Endian] = ["little", "big"]
    for guess in guesses[::-1] if endian == "big" else guesses:
        try:
            chain = Chain(data_types.parse_v3(data_type, guess), order, filters, compressor)
            again = [c for c in codecs_of_chain(chain, ndim) if c["name"] == "bytes"]
        except UnsupportedError as failed:
            error = error or failed
            continue
        if bytes_endian(again[0]) in (endian, None):
            return chain
    raise error or UnsupportedError(f"v2 has no codecs {names} in these byte orders")


def codec_of_bytes(config: Mapping[str, Any], itemsize: int) -> Config:
    """Return the v3 codec of a compressor or filter of bytes; values have `itemsize` bytes."""
    known = {**_COMPRESSORS, **_OF_BYTES}
    name: Any = config.get("id")
    if name not in known:
        raise UnsupportedError(
            f"the compressor or filter {name!r} has no v3 codec that is known to read the same: "
            f"only {', '.join(known)} have"
        )
    ignored = ("id", "typesize") if name == "blosc" else ("id",)
    options = _complete(name, {k: v for k, v in config.items() if k not in ignored}, known[name])
    if name == "crc32c" and options["location"] == "end":
        return {"name": "crc32c"}
    if name == "blosc":
        shuffle = options["shuffle"]
        if shuffle == -1:
            shuffle = 2 if itemsize == 1 else 1
        if shuffle not in range(len(_SHUFFLES)):
            raise SpecError(f"Blosc has no shuffle {shuffle!r}")
        typesize = itemsize if itemsize <= 255 else 1  # larger values are single bytes for Blosc
        options = {"typesize": typesize, **options, "shuffle": _SHUFFLES[shuffle]}
    v3_name = name if name in _NATIVE else f"{_NUMCODECS}{name}"
    return {"name": v3_name, "configuration": options}


def compressor_of_codec(codec: Any) -> Config:
    """Return the config of a v3 codec that compresses."""
    v3_name, options = transformer_list.name_and_options(codec)
    name = v3_name.removeprefix(_NUMCODECS)
    if name not in _COMPRESSORS or (v3_name == name and name not in _NATIVE):
        raise UnsupportedError(
            f"the codec {v3_name!r} cannot be translated: take one of {', '.join(_COMPRESSORS)}"
        )
    if name == "blosc":
        options.pop("typesize", None)
        if options.get("shuffle") in _SHUFFLES:
            options["shuffle"] = _SHUFFLES.index(options["shuffle"])
        elif v3_name == name:
            raise SpecError(f"the codec 'blosc' has no shuffle {options.get('shuffle')!r}")
    return {"id": name, **_complete(name, options, _COMPRESSORS[name])}


def split_layout(codecs: Any, ndim: int) -> tuple[Order, list[Any]]:
    """Split codecs into the order of values and the codecs after a transpose."""
    rest = list(codecs)
    name, options = transformer_list.name_and_options(rest[0]) if rest else ("", {})
    if name != "transpose":
        return "C", rest
    order, same = options.get("order"), list(range(ndim))
    if order in ("C", same):
        return "C", rest[1:]
    if order in ("F", same[::-1]):
        return "F", rest[1:]
    raise UnsupportedError(
        f"only the memory layouts C and F can be expressed, not a transpose by {order!r}"
    )


def bytes_endian(codec: Any) -> data_types.Endian | None:
    endian = transformer_list.name_and_options(codec)[1].get("endian")
    if endian not in ("little", "big", None):
        raise SpecError(f"the codec 'bytes' has no endian {endian!r}")
    return endian


def _bytes_codec(data_type: data_types.DataType) -> Config:
    endian = data_types.endian_of(data_type)
    return {"name": "bytes", **({"configuration": {"endian": endian}} if endian else {})}


def _codec_of_values(
    config: Mapping[str, Any], data_type: data_types.DataType | None, *, is_first: bool
) -> tuple[Config, data_types.DataType]:
    """Return the v3 codec of a filter of values, and the data type of its result.

    `data_type` is of its input, ``None`` for bytes. Values before the first filter are
    little-endian in v3 readers.
    """
    if data_type is None:
        raise UnsupportedError(
            f"the filter {config['id']!r} works on values, and comes after one that makes bytes of "
            "them"
        )
    given, dtypes, encoded = dict(config), Config(), data_type
    name: Any = given.pop("id")
    if name in _DTYPES:
        decoded_name, encoded_name = _DTYPES[name]
        decoded = _dtype(name, given.pop(decoded_name, None))
        encoded = _dtype(name, given.pop(encoded_name, None) or decoded.str)
        if decoded != data_type:
            raise UnsupportedError(
                f"the filter {name!r} takes {decoded.str!r} and is given {data_type.str!r}"
            )
        decoded = decoded.newbyteorder("<") if is_first else decoded
        dtypes = {decoded_name: decoded.str, encoded_name: encoded.str}
    if name == "quantize" and (encoded != data_type or data_types.endian_of(data_type) == "big"):
        # zarr-python gives its v3 codec values in the byte order of the machine.
        raise UnsupportedError("the filter 'quantize' has a v3 codec for '<f4' and '<f8' only")
    if name == "packbits":
        if data_type.kind != "b":
            raise UnsupportedError("the filter 'packbits' takes bool")
        encoded = data_types.parse_numpy("|u1")
    options = _complete(name, given, _OF_VALUES[name])
    return {"name": f"{_NUMCODECS}{name}", "configuration": {**options, **dtypes}}, encoded


def _filter_of_codec(codec: Any) -> Config:
    v3_name, options = transformer_list.name_and_options(codec)
    if v3_name == "crc32c":
        return {"id": "crc32c", "location": "end"}
    name = v3_name.removeprefix(_NUMCODECS)
    if name != v3_name and (name in _OF_BYTES or name in _OF_VALUES):
        return {"id": name, **options}
    return compressor_of_codec(codec)


def _dtype(filter_name: str, text: Any) -> data_types.DataType:
    try:
        return data_types.parse_numpy(np.dtype(text).str if text is not None else None)
    except TypeError:
        raise SpecError(f"the filter {filter_name!r} has no data type {text!r}") from None


def _complete(name: str, given: Config, defaults: Config) -> Config:
    """Add defaults, in their order."""
    is_filter = name not in _COMPRESSORS
    if is_filter:
        # numcodecs writes null for options that are not used: "prefix" of jenkins_lookup3.
        given = {k: v for k, v in given.items() if v is not None or k in defaults}
    if unknown := sorted(given.keys() - defaults.keys()):
        raise UnsupportedError(f"the codec {name!r} has unknown options {unknown}")
    options = {**defaults, **given}
    if is_filter and (missing := sorted(k for k, v in options.items() if v is None)):
        raise SpecError(f"the codec {name!r} lacks {missing}")
    return options
