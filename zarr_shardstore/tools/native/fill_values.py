"""Fill values as Zarr v2, Zarr v3 and the draft spell them, and data types as they are written.

A fill value is a number, a pair of numbers, a text or base64. Floats may be ``NaN``, ``Infinity``
or ``-Infinity``, and times ``NaT``. ``null`` of v2 is the zero of the type, for times ``NaT``:
zarr-python 3 reads these values. v3 also spells floats by their bits (``0x7fc00000``), and bytes as
a list of numbers.

`UnsupportedError`: a type or value that the other format has not. `SpecError`: a value that is none
of its type.

Source: Zarr v3 core, "Fill value"; Zarr v2, "Fill value encoding"; zarr-python 2.13 to 2.18,
``zarr/meta.py`` (the draft).
"""

from __future__ import annotations

import base64
import math
from contextlib import suppress
from typing import Any

import numpy as np

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.native import data_types

_EXTENSIONS = {
    "c": "https://zarr-specs.readthedocs.io/en/core-protocol-v3.0-dev/protocol/extensions/"
    "complex-dtypes/v1.0.html",
    "S": "TODO: bytestring array protocol URL",
    "U": "TODO: unicode array protocol URL",
    "V": "TODO: structured array protocol URL",
    **dict.fromkeys(
        "mM", "https://zarr-specs.readthedocs.io/en/latest/extensions/data-types/datetime/v1.0.html"
    ),
}
"""The extension that zarr-python 2.18 writes with a type, "TODO" included."""


def v3_data_type(data_type: data_types.DataType) -> str | dict[str, Any]:
    """Return Zarr v3's spelling, without the byte order, which the ``bytes`` codec has."""
    if data_type.kind not in data_types.V3_NAMES:
        return data_type.name
    options: dict[str, Any] = {"length_bytes": data_type.itemsize}
    if data_type.kind in "mM":
        unit, scale = np.datetime_data(data_type)
        options = {"unit": unit, "scale_factor": scale}
    return {"name": data_types.V3_NAMES[data_type.kind], "configuration": options}


def draft_data_type(data_type: data_types.DataType) -> str | dict[str, Any]:
    """Return the draft's spelling, as zarr-python 2.18 writes and reads it."""
    name, kind = data_type.str, data_type.kind
    if kind in "mM":
        unit, scale = np.datetime_data(data_type)
        if scale != 1 or unit == "generic":
            raise UnsupportedError(
                f"the draft has no data type {name!r}: take a unit such as 'ns', in steps of 1"
            )
    if kind in _EXTENSIONS:
        return {"extension": _EXTENSIONS[kind], "type": name, "fallback": None}
    return "bool" if kind == "b" else name.removeprefix("|")


def fill_value_of_v2(value: Any, data_type: data_types.DataType) -> Any:
    """Return the v3 fill value for that of a v2 or a draft document."""
    if value is None:
        nulls = {"c": [0, 0], "S": "", "U": "", "V": _base64(bytes(data_type.itemsize))}
        value = {**nulls, "m": "NaT", "M": "NaT"}.get(data_type.kind, 0)
    return _normal(value, data_type)


def fill_value_of_object(value: Any, data_type: str) -> str:
    """Return the v3 fill value of a ``string`` or of ``variable_length_bytes`` for that of v2."""
    if data_type == "string" and isinstance(value, int | float):
        return str(value)  # zarr-python 3 reads '0' for 0
    # zarr-python 2 wrote 0 for bytes where none was chosen, and zarr-python 3 refuses it.
    value = "" if value is None or (value == 0 and type(value) is int) else value
    if isinstance(value, str) and (data_type == "string" or _is_base64(value)):
        return value
    raise SpecError(f"{value!r} is no fill value of data type {data_type!r}")


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


def fill_value_of_v3(value: Any, data_type: data_types.DataType) -> Any:
    """Return the fill value for a v2 or a draft document, from that of a v3 document."""
    kind = data_type.kind
    if kind == "f":
        value = _without_bits(value, data_type.itemsize)
    elif kind == "c" and isinstance(value, list | tuple):
        value = [_without_bits(part, data_type.itemsize // 2) for part in value]
    elif kind == "V" and isinstance(value, list):
        try:
            value = _base64(bytes(value))
        except (TypeError, ValueError):
            raise _no_value(value, data_type) from None
    return _normal(value, data_type)


def _normal(value: Any, data_type: data_types.DataType) -> Any:
    """Return the one spelling, of those that both v2 and v3 read, of a fill value."""
    itemsize = data_type.itemsize
    match data_type.kind, value:
        case "b", bool() | int() | float() if value in (0, 1):
            return bool(value)
        case "m" | "M", _ if np.datetime_data(data_type)[0] == "generic":
            if value in ("NaT", -(2**63)):
                return "NaT"
            raise UnsupportedError(
                f"the fill value {value!r} of times without a unit is not the same in all versions "
                "of zarr-python 3: take NaT or null"
            )
        case "m" | "M", "NaT":
            return -(2**63)
        case "i" | "u" | "m" | "M" as kind, int() | float() if value == value // 1:
            info = np.iinfo(f"{'u' if kind == 'u' else 'i'}{itemsize}")
            if info.min <= value <= info.max:
                return int(value)
        case "f", _:
            return _normal_float(value, data_type, itemsize)
        case "c", [_, _]:
            return [_normal_float(part, data_type, itemsize // 2) for part in value]
        case "U", str() if len(value) <= itemsize // data_types.UTF32_NBYTES:
            return value
        case "S" | "V" as kind, str():
            with suppress(ValueError):
                raw = base64.b64decode(value, validate=True)
                if len(raw) == itemsize or (kind == "S" and len(raw) < itemsize):
                    # numpy's bytes end before their trailing zeros
                    return _base64(raw.rstrip(b"\0") if kind == "S" else raw)
    raise _no_value(value, data_type)


def _normal_float(value: Any, data_type: data_types.DataType, nbytes: int) -> float | str:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
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
    """Return the number that bits spell, ``0x`` and big-endian hex digits; other values as is."""
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


def _no_value(value: Any, data_type: data_types.DataType) -> SpecError:
    return SpecError(f"{value!r} is no fill value of data type {data_type.str!r}")
