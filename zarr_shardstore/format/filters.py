"""Filters of Zarr v2: numcodecs configurations, and the v3 codecs that decode the same.

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

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.codec_names import (
    codec_of_compressor,
    compressor_of_codec,
    is_compressor,
    name_and_options,
)
from zarr_shardstore.format.data_types import DataType, parse_numpy

__all__ = ["SERIALIZERS", "codec_of_filter", "filter_of_codec", "is_filter_of_values"]

Config = dict[str, Any]

_NUMCODECS = "numcodecs."

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
        options = _complete(name, given)
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
    options = {**_complete(name, given), **dtypes}
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


def _complete(name: str, given: Config) -> Config:
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
