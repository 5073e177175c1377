"""Data types: how numpy, the draft hierarchy, Zarr v2 and Zarr v3 spell the same one.

======================  ============================================  ===============
v2, numpy               draft                                         v3, and endian
======================  ============================================  ===============
``|b1``                 ``bool``                                      ``bool``
``>i4``                 ``>i4``                                       ``int32``, big
``<c8``                 an extension whose ``type`` is ``<c8``        ``complex64``
``<M8[ns]``, ``|S5``,   the same                                      an object with
``<U5``, ``|V4``                                                      a configuration
======================  ============================================  ===============

Structured types are not expressed: v3 has one byte order for all fields, and the versions of
zarr-python 3 name the type differently.

Source: Zarr v3 core and zarr-extensions, "Data types"; Zarr v2, "Data type encoding"; the
draft as zarr-python 2.13 to 2.18 write it, ``zarr/meta.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zarr_shardstore.errors import SpecError, UnsupportedError

Endian = Literal["little", "big"]

_SIZES = {
    "b": (1,),
    "i": (1, 2, 4, 8),
    "u": (1, 2, 4, 8),
    "f": (2, 4, 8),
    "c": (8, 16),
    "m": (8,),
    "M": (8,),
}
"""Bytes that a value may have, by numpy's letter of the kind; the other kinds take any size."""

_V3_WORDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_V3_KINDS = {word: kind for kind, word in _V3_WORDS.items()}
_V3_TIMES = {"M": "numpy.datetime64", "m": "numpy.timedelta64"}
_V3_BYTES = {"S": "null_terminated_bytes", "U": "fixed_length_utf32", "V": "raw_bytes"}

_NUMPY = re.compile(r"([<>|=]?)([biufcmMSUV])([1-9][0-9]*)(?:\[([0-9]*)(\w+)\])?")
_V3_NUMBER = re.compile(r"(int|uint|float|complex)([1-9][0-9]*)")
_V3_RAW = re.compile(r"r([1-9][0-9]*)")

_UTF32 = 4
"""Bytes of a character in numpy's fixed-length texts."""

_EXTENSIONS = {
    "c": "https://zarr-specs.readthedocs.io/en/core-protocol-v3.0-dev/protocol/extensions/"
    "complex-dtypes/v1.0.html",
    "S": "TODO: bytestring array protocol URL",
    "U": "TODO: unicode array protocol URL",
    "V": "TODO: structured array protocol URL",
}
_TIME_EXTENSION = (
    "https://zarr-specs.readthedocs.io/en/latest/extensions/data-types/datetime/v1.0.html"
)
"""What zarr-python 2.18 writes as the extension of a type, "TODO" included."""


@dataclass(frozen=True, slots=True)
class DataType:
    """A data type with its byte order.

    Parameters
    ----------
    kind : str
        numpy's letter: one of ``b i u f c m M S U V``.
    itemsize : int
        Bytes of a value.
    endian : {"little", "big"}, optional
        ``None`` where bytes have no order.
    unit : str
        Of times: ``"ns"``, ``"generic"``; else empty.
    scale : int
        Of times: how many units a step is.
    """

    kind: str
    itemsize: int
    endian: Endian | None
    unit: str = ""
    scale: int = 1

    @property
    def numpy_name(self) -> str:
        """As numpy and Zarr v2 spell it.

        >>> DataType("M", 8, "big", "us", 10).numpy_name
        '>M8[10us]'
        """
        order = {None: "|", "little": "<", "big": ">"}[self.endian]
        size = self.itemsize // _UTF32 if self.kind == "U" else self.itemsize
        step = "" if self.scale == 1 else str(self.scale)
        unit = f"[{step}{self.unit}]" if self.unit not in ("", "generic") else ""
        return f"{order}{self.kind}{size}{unit}"

    @property
    def v3(self) -> str | dict[str, Any]:
        """As Zarr v3 spells it; the byte order goes to the ``bytes`` codec.

        >>> DataType("f", 2, "big").v3
        'float16'
        """
        if self.kind == "b":
            return "bool"
        if self.kind in _V3_TIMES:
            configuration = {"unit": self.unit, "scale_factor": self.scale}
            return {"name": _V3_TIMES[self.kind], "configuration": configuration}
        if self.kind in _V3_BYTES:
            length = {"length_bytes": self.itemsize}
            return {"name": _V3_BYTES[self.kind], "configuration": length}
        return f"{_V3_WORDS[self.kind]}{8 * self.itemsize}"


def parse_numpy(text: Any) -> DataType:
    """Read numpy's and Zarr v2's spelling of a data type.

    Raises
    ------
    UnsupportedError
        If the data type has no place here: structured, object, or of another size.

    Examples
    --------
    >>> parse_numpy(">U3")
    DataType(kind='U', itemsize=12, endian='big', unit='', scale=1)
    """
    match = _NUMPY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise _unsupported(text)
    order, kind, size, step, unit = match.groups()
    itemsize = int(size) * (_UTF32 if kind == "U" else 1)
    if (unit is not None) and kind not in _V3_TIMES:
        raise _unsupported(text)
    if kind in _V3_TIMES:
        unit = "us" if unit == "μs" else unit or "generic"
    return _data_type(kind, itemsize, "big" if order == ">" else "little", unit, step, text)


def parse_v3(data_type: Any, endian: Endian | None) -> DataType:
    """Read Zarr v3's spelling of a data type, with the byte order of its ``bytes`` codec.

    Raises
    ------
    UnsupportedError
        As `parse_numpy`; so are types of variable length.
    SpecError
        If values of several bytes have no byte order.
    """
    name: Any = data_type
    options: Mapping[str, Any] = {}
    if isinstance(data_type, Mapping):
        name, options = data_type.get("name"), data_type.get("configuration") or {}
    if not isinstance(name, str):
        raise _unsupported(data_type)
    kind, unit, step = "", "", 1
    itemsize: Any = 0
    if match := _V3_NUMBER.fullmatch(name):
        kind, itemsize = _V3_KINDS[match[1]], int(match[2]) // 8
    elif match := _V3_RAW.fullmatch(name):
        kind, itemsize = "V", int(match[1]) // 8
    elif name == "bool":
        kind, itemsize = "b", 1
    for letter, time in _V3_TIMES.items():
        if name == time:
            unit, step = options.get("unit", ""), options.get("scale_factor", 1)
            kind, itemsize, unit = letter, 8, "us" if unit == "μs" else unit
    for letter, word in _V3_BYTES.items():
        if name == word:
            kind, itemsize = letter, options.get("length_bytes")
    parsed = _data_type(kind, itemsize, endian or "little", unit, step, data_type)
    if parsed.endian is not None and endian is None:
        raise SpecError(f"the codec 'bytes' of data type {name!r} has no endian")
    return parsed


def parse_draft(data_type: Any) -> DataType:
    """Read the draft's spelling of a data type: a text, or an extension object.

    Raises
    ------
    UnsupportedError
        As `parse_numpy`.
    """
    text = data_type.get("type") if isinstance(data_type, Mapping) else data_type
    if text == "bool":
        text = "|b1"
    if isinstance(text, str) and (raw := _V3_RAW.fullmatch(text)):
        text = f"|V{int(raw[1]) // 8}"
    if isinstance(text, list) and len(text) == 1 and text[0][:1] == [""] and len(text[0]) == 2:
        text = text[0][1]  # how zarr-python 2.18 spells plain bytes
    return parse_numpy(text)


def draft_data_type(data_type: DataType) -> str | dict[str, Any]:
    """The draft's spelling, as zarr-python 2.18 writes and reads it.

    Raises
    ------
    UnsupportedError
        If it is a time whose unit zarr-python 2.18 does not take.

    Examples
    --------
    >>> draft_data_type(DataType("i", 1, None)), draft_data_type(DataType("i", 2, "big"))
    ('i1', '>i2')
    """
    name = data_type.numpy_name
    if data_type.kind in _V3_TIMES:
        if data_type.scale != 1 or data_type.unit == "generic":
            raise UnsupportedError(
                f"the draft has no data type {name!r}: take a unit such as 'ns', in steps of 1"
            )
        return {"extension": _TIME_EXTENSION, "type": name, "fallback": None}
    if data_type.kind in _EXTENSIONS:
        return {"extension": _EXTENSIONS[data_type.kind], "type": name, "fallback": None}
    return "bool" if data_type.kind == "b" else name.removeprefix("|")


def _data_type(
    kind: str, itemsize: Any, endian: Endian, unit: Any, step: Any, source: Any
) -> DataType:
    """A data type, checked; `source` is for the message."""
    scale = int(step or 1)
    is_known = kind in _SIZES or kind in _V3_BYTES
    if not is_known or not isinstance(itemsize, int) or itemsize < 1:
        raise _unsupported(source)
    if itemsize not in _SIZES.get(kind, (itemsize,)) or (kind == "U" and itemsize % _UTF32):
        raise _unsupported(source)
    if kind in _V3_TIMES and not (isinstance(unit, str) and unit.isalpha()):
        raise _unsupported(source)
    has_order = kind == "U" or (kind not in "bSV" and itemsize > 1)
    return DataType(kind, itemsize, endian if has_order else None, unit or "", scale)


def _unsupported(source: Any) -> UnsupportedError:
    return UnsupportedError(
        f"the data type {source!r} cannot be translated: only bool, numbers, times and values of "
        "fixed length can, not structured ones, objects or types of variable length"
    )
