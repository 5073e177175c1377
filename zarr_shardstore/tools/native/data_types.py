"""Data types and fill values as numpy, the draft hierarchy, Zarr v2 and Zarr v3 spell them.

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

Structured types are refused: v3 has one byte order for all fields, and the versions of zarr-python
3 name structured types differently.

A fill value is a number, a pair of numbers, a text or base64. Floats may be ``NaN``, ``Infinity``
or ``-Infinity``, and times ``NaT``. ``null`` of v2 is the zero of the type, for times ``NaT``, as
zarr-python 3 reads it. v3 also spells floats by bits (``0x7fc00000``), and bytes as numbers.

`UnsupportedError`: the other format lacks the type or value. `SpecError`: the value does not fit
its type.

Source: Zarr v3 core, "Data types", "Fill value"; zarr-extensions, "Data types"; Zarr v2, "Data type
encoding", "Fill value encoding"; zarr-python 2.13 to 2.18, ``zarr/meta.py`` (the draft).
"""

from __future__ import annotations

import base64
import math
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
_V3_NAMES = {
    "M": "numpy.datetime64",
    "m": "numpy.timedelta64",
    "S": "null_terminated_bytes",
    "U": "fixed_length_utf32",
    "V": "raw_bytes",
}
"""Types with a configuration, by numpy's letter of the kind."""

_V3_KINDS = {name: kind for kind, name in _V3_NAMES.items()}

_NUMPY = re.compile(
    rf"([<>|=]?)({'|'.join(_NUMBERS)}|[SUV][1-9][0-9]*|[mM]8(?:\[[0-9]*[^\W\d_]+\])?)"
)
_RAW = re.compile(r"r([1-9][0-9]*)")

_UTF32_NBYTES = 4
"""Bytes of a character in a text of fixed length."""

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
"""Extensions that zarr-python 2.18 writes with types, "TODO" included."""


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
            nbytes, rest = divmod(nbytes, _UTF32_NBYTES)
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


def v3_data_type(data_type: DataType) -> str | dict[str, Any]:
    """Return Zarr v3's spelling; the ``bytes`` codec has the byte order."""
    if data_type.kind not in _V3_NAMES:
        return data_type.name
    options: dict[str, Any] = {"length_bytes": data_type.itemsize}
    if data_type.kind in "mM":
        unit, scale = np.datetime_data(data_type)
        options = {"unit": unit, "scale_factor": scale}
    return {"name": _V3_NAMES[data_type.kind], "configuration": options}


def draft_data_type(data_type: DataType) -> str | dict[str, Any]:
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


# ------------------------------------------------------------------------ fill values


def fill_value_of_v2(value: Any, data_type: DataType) -> Any:
    """Return the v3 fill value for a fill value of v2 or the draft."""
    if value is None:
        nulls = {"c": [0, 0], "S": "", "U": "", "V": _base64(bytes(data_type.itemsize))}
        value = {**nulls, "m": "NaT", "M": "NaT"}.get(data_type.kind, 0)
    return _normal(value, data_type)


def fill_value_of_object(value: Any, data_type: str) -> str:
    """Return the v3 fill value of a ``string`` or of ``variable_length_bytes``."""
    if data_type == "string" and isinstance(value, int | float):
        return str(value)  # zarr-python 3 reads '0' for 0
    # zarr-python 2 wrote 0 for bytes by default, and zarr-python 3 refuses it.
    value = "" if value is None or (value == 0 and type(value) is int) else value
    with suppress(ValueError):
        if isinstance(value, str):
            if data_type != "string":
                base64.b64decode(value, validate=True)
            return value
    raise SpecError(f"{value!r} is no fill value of data type {data_type!r}")


def fill_value_of_v3(value: Any, data_type: DataType) -> Any:
    """Return the fill value in v2 or the draft for a fill value of v3."""
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


def _normal(value: Any, data_type: DataType) -> Any:
    """Return the spelling of a fill value that both v2 and v3 read."""
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
        case "U", str() if len(value) <= itemsize // _UTF32_NBYTES:
            return value
        case "S" | "V" as kind, str():
            with suppress(ValueError):
                raw = base64.b64decode(value, validate=True)
                if len(raw) == itemsize or (kind == "S" and len(raw) < itemsize):
                    # numpy's bytes end before their trailing zeros
                    return _base64(raw.rstrip(b"\0") if kind == "S" else raw)
    raise _no_value(value, data_type)


def _normal_float(value: Any, data_type: DataType, nbytes: int) -> float | str:
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
    """Return the number that ``0x`` and big-endian hex digits spell; other values as is."""
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
    return SpecError(f"{value!r} is no fill value of data type {data_type.str!r}")
