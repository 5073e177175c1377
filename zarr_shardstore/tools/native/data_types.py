"""Data types as numpy, the draft hierarchy, Zarr v2 and Zarr v3 spell them.

A data type is a numpy ``dtype`` with its byte order.

======================  ============================================  ===============
v2, numpy               draft                                         v3, and endian
======================  ============================================  ===============
``|b1``                 ``bool``                                      ``bool``
``>i4``                 ``>i4``                                       ``int32``, big
``<c8``                 an extension whose ``type`` is ``<c8``        ``complex64``
``<M8[ns]``, ``|S5``,   the same                                      an object with
``<U5``, ``|V4``                                                      a configuration
======================  ============================================  ===============

Structured and unknown types raise `UnsupportedError`: v3 has one byte order for all fields, and
the versions of zarr-python 3 name structured types differently.

Source: Zarr v3 core, "Data types"; zarr-extensions, "Data types"; Zarr v2, "Data type encoding";
zarr-python 2.13 to 2.18, ``zarr/meta.py`` (the draft).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import numpy as np

from zarr_shardstore.errors import SpecError, UnsupportedError

DataType: TypeAlias = "np.dtype[Any]"
Endian = Literal["little", "big"]

_NUMBERS = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
_V3_NUMBERS = {np.dtype(text).name: text for text in _NUMBERS}
V3_NAMES = {
    "M": "numpy.datetime64",
    "m": "numpy.timedelta64",
    "S": "null_terminated_bytes",
    "U": "fixed_length_utf32",
    "V": "raw_bytes",
}
"""Types with a configuration, by numpy's letter of the kind."""

_V3_KINDS = {name: kind for kind, name in V3_NAMES.items()}

_NUMPY = re.compile(
    rf"([<>|=]?)({'|'.join(_NUMBERS)}|[SUV][1-9][0-9]*|[mM]8(?:\[[0-9]*[^\W\d_]+\])?)"
)
_RAW = re.compile(r"r([1-9][0-9]*)")

UTF32_NBYTES = 4
"""Bytes of a character in a text of fixed length."""


def endian_of(data_type: DataType) -> Endian | None:
    """Return the byte order; ``None`` for types of single bytes."""
    orders: dict[str, Endian] = {"<": "little", ">": "big"}
    return orders.get(data_type.str[0])


def parse_numpy(text: Any, source: Any = None) -> DataType:
    """Parse numpy's and Zarr v2's spelling of a data type. An error names a given `source`."""
    match = _NUMPY.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        with suppress(TypeError, ValueError):
            return np.dtype((">" if match[1] == ">" else "<") + match[2])
    raise UnsupportedError(
        f"the data type {source or text!r} cannot be translated: only bool, numbers, times and "
        "values of fixed length can, not structured ones, objects or types of variable length"
    )


def parse_v3(data_type: Any, endian: Endian | None) -> DataType:
    """Parse Zarr v3's spelling of a data type, with the byte order of its ``bytes`` codec."""
    given = data_type if isinstance(data_type, Mapping) else {"name": data_type}
    name, options = given.get("name"), given.get("configuration") or {}
    kind, text = None, None
    if isinstance(name, str):
        kind, text = _V3_KINDS.get(name), _V3_NUMBERS.get(name) or _numpy_of_raw(name)
    if kind in ("m", "M"):
        unit, scale = options.get("unit"), options.get("scale_factor", 1)
        text = f"{kind}8" if unit == "generic" else f"{kind}8[{scale}{unit}]"
    elif kind is not None:
        nbytes, rest = options.get("length_bytes"), 0
        if kind == "U" and isinstance(nbytes, int):
            nbytes, rest = divmod(nbytes, UTF32_NBYTES)
        text = None if rest else f"{kind}{nbytes}"
    parsed = parse_numpy(f"{'>' if endian == 'big' else '<'}{text}", source=data_type)
    if endian is None and endian_of(parsed) is not None:
        raise SpecError(f"the codec 'bytes' of data type {name!r} has no endian")
    return parsed


def parse_draft(data_type: Any) -> DataType:
    """Parse the draft's spelling of a data type: a text, or an extension object."""
    text = data_type.get("type") if isinstance(data_type, Mapping) else data_type
    if text == "bool":
        text = "|b1"
    elif isinstance(text, str):
        text = _numpy_of_raw(text) or text
    elif isinstance(text, list) and len(text) == 1 and text[0][:1] == [""] and len(text[0]) == 2:
        text = text[0][1]  # plain bytes of zarr-python 2.18
    return parse_numpy(text)


def _numpy_of_raw(name: str) -> str | None:
    """Translate raw bytes: ``r24`` of v3 core is ``V3`` of numpy."""
    match = _RAW.fullmatch(name)
    if match is None or len(match[1]) > 10 or int(match[1]) % 8:
        return None
    return f"V{int(match[1]) // 8}"
