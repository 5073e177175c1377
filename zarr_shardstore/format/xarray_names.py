"""xarray's conventions of v2 that v3 has members for: names of dimensions, and what is masked.

In v2, the names are the attribute ``_ARRAY_DIMENSIONS``, and xarray takes the fill value of an
array for the value of missing data. In v3, the names are ``dimension_names``, and missing data
is what the attribute ``_FillValue`` says.

Source: xarray, "Zarr encoding specification"; its ``FillValueCoder``.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import Any

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.format.data_types import DataType
from zarr_shardstore.format.fill_values import fill_value_of_v2

__all__ = ["to_attributes", "to_dimension_names"]

Attributes = dict[str, Any]

_NAMES = "_ARRAY_DIMENSIONS"
_MASKED = "_FillValue"


def to_dimension_names(
    attributes: Mapping[str, Any], ndim: int, fill_value: Any, data_type: DataType | None
) -> tuple[Attributes, list[str] | None]:
    """Attributes of a v3 array, and the names of its dimensions, from the attributes of v2."""
    names = attributes.get(_NAMES)
    if names is None or not _are_names(names) or len(names) != ndim:
        return dict(attributes), None
    changed = {k: v for k, v in attributes.items() if k != _NAMES}
    masked = _masked(fill_value, data_type)
    if masked is not None and _MASKED not in changed:
        changed[_MASKED] = masked
    return changed, list(names)


def to_attributes(
    attributes: Mapping[str, Any], names: Any, fill_value: Any, data_type: DataType | None
) -> tuple[Attributes, Any]:
    """Attributes and fill value of a v2 array, from those of v3 and the names of its dimensions.

    Where xarray masks nothing, a fill value of zero becomes ``null``, which stands for zero too.

    Raises
    ------
    UnsupportedError
        If some dimensions have names and others have not, or the attribute has others, or
        another value is masked than the fill value.
    """
    if names is None or (isinstance(names, list) and all(name is None for name in names)):
        return dict(attributes), fill_value
    if not _are_names(names) or attributes.get(_NAMES, names) != names:
        raise UnsupportedError(f"the dimension names {names!r} cannot be an attribute of v2")
    changed = {**attributes, _NAMES: list(names)}
    if _MASKED in changed:
        if changed.pop(_MASKED) != _masked(fill_value, data_type):
            raise UnsupportedError(
                f"its {_MASKED!r} is another value than its fill value, and v2 has one for both"
            )
    elif data_type is not None and fill_value == fill_value_of_v2(None, data_type):
        fill_value = None
    return changed, fill_value


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _masked(fill_value: Any, data_type: DataType | None) -> Any:
    """The attribute that says in v3 what a fill value says in v2; ``None``: nothing."""
    if fill_value is None or data_type is None:
        return None
    value = fill_value_of_v2(fill_value, data_type)
    match data_type.kind:
        case "b" | "i" | "u" | "S" | "U":
            return value
        case "f":
            return _float64(value)
        case "c":
            return [_float64(part) for part in value]
    return None


def _float64(value: float | str) -> str:
    return base64.b64encode(struct.pack("<d", float(value))).decode()
