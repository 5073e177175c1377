"""Fill values: as Zarr v3 documents spell them, and as v2 and draft documents do.

===========  ==========================================  ===============================
kind         v2, draft                                   v3
===========  ==========================================  ===============================
none         ``null``                                    the zero of the type
float        number, ``NaN``, ``Infinity``, ``-Infinity``  also bits: ``0x7fc00000``
complex      pair of floats                              pair of floats
time         int64                                       also ``NaT``
bytes        base64                                      base64, or a list of numbers
text         text                                        text
===========  ==========================================  ===============================

Source: Zarr v3 core, "Fill value"; zarr-extensions, "Data types"; Zarr v2, "Fill value
encoding".
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.metadata.data_types import DataType

_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAT = -(2**63)


def fill_value_of_v2(value: Any, data_type: DataType) -> Any:
    """A v3 fill value, from that of a v2 or a draft document.

    Raises
    ------
    SpecError
        If it is no value of the data type.

    Examples
    --------
    >>> fill_value_of_v2(None, DataType("c", 8, "little"))
    [0.0, 0.0]
    """
    return _zero(data_type) if value is None else _normal(value, data_type)


def fill_value_of_v3(value: Any, data_type: DataType) -> Any:
    """A fill value for a v2 or a draft document, from that of a v3 document.

    Raises
    ------
    SpecError
        If it is no value of the data type.
    UnsupportedError
        If it is a NaN other than the usual one, which only v3 can spell.

    Examples
    --------
    >>> fill_value_of_v3("0x7fc00000", DataType("f", 4, "little"))
    'NaN'
    """
    kind = data_type.kind
    if kind == "f":
        value = _without_bits(value, data_type.itemsize)
    elif kind == "c" and isinstance(value, list | tuple):
        value = [_without_bits(part, data_type.itemsize // 2) for part in value]
    elif kind in "mM" and value == "NaT":
        value = _NAT
    elif kind == "V" and isinstance(value, list):
        try:
            value = _base64(bytes(value))
        except (TypeError, ValueError):
            raise _no_value(value, data_type) from None
    return _normal(value, data_type)


def _zero(data_type: DataType) -> Any:
    match data_type.kind:
        case "b":
            return False
        case "f":
            return 0.0
        case "c":
            return [0.0, 0.0]
        case "S" | "U":
            return ""
        case "V":
            return _base64(bytes(data_type.itemsize))
    return 0


def _normal(value: Any, data_type: DataType) -> Any:
    """The one spelling, of those that both v2 and v3 read, of a fill value."""
    kind, itemsize = data_type.kind, data_type.itemsize
    if kind == "b" and isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    if kind in "iumM" and isinstance(value, int | float) and value == value // 1:
        info = np.iinfo(np.dtype(f"{'u' if kind == 'u' else 'i'}{itemsize}"))
        if info.min <= value <= info.max:
            return int(value)
    if kind == "f":
        return _normal_float(value, data_type, itemsize)
    if kind == "c" and isinstance(value, list | tuple) and len(value) == 2:
        return [_normal_float(part, data_type, itemsize // 2) for part in value]
    if kind == "U" and isinstance(value, str) and len(value) <= itemsize // 4:
        return value
    if kind in "SV" and isinstance(value, str):
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise _no_value(value, data_type) from None
        if len(raw) == itemsize or (kind == "S" and len(raw) < itemsize):
            # numpy's bytes end before their trailing zeros, and only those that are there
            return _base64(raw.rstrip(b"\0") if kind == "S" else raw)
    raise _no_value(value, data_type)


def _normal_float(value: Any, data_type: DataType, nbytes: int) -> float | str:
    if isinstance(value, str) and value in _NAMED:
        return value
    if not isinstance(value, int | float):
        raise _no_value(value, data_type)
    with np.errstate(over="ignore"):
        rounded = float(np.dtype(f"f{nbytes}").type(value))
    if math.isnan(rounded):
        return "NaN"
    if math.isinf(rounded):
        return "Infinity" if rounded > 0 else "-Infinity"
    return rounded


def _without_bits(value: Any, nbytes: int) -> Any:
    """A float that may be spelled as its bits, ``0x`` and big-endian hex digits."""
    if not isinstance(value, str) or not value.startswith("0x"):
        return value
    try:
        raw = bytes.fromhex(value[2:])
    except ValueError:
        raw = b""
    if len(raw) != nbytes:
        raise SpecError(f"the fill value {value!r} does not spell {nbytes} bytes")
    dtype = np.dtype(f">f{nbytes}")
    number = float(np.frombuffer(raw, dtype)[0])
    if math.isnan(number) and raw != np.array(math.nan, dtype).tobytes():
        raise UnsupportedError(
            f"the fill value {value!r} is a NaN that only a v3 document can spell: take 'NaN'"
        )
    return number


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _no_value(value: Any, data_type: DataType) -> SpecError:
    return SpecError(f"{value!r} is no fill value of data type {data_type.numpy_name!r}")
