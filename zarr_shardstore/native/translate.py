"""One array or group document in the other format: v2 and v3, sharded by transformer or codec.

==============================================  ================================================
stored here                                     native v3
==============================================  ================================================
v3, ``storage_transformers``: one sharding      ``sharding_indexed`` with the same index
v2, marker in ``filters``: one sharding         the same; ``order``, ``filters`` and
                                                ``compressor`` become the codecs in it
``chunks``, ``dimension_separator``             regular grid; chunk key encoding ``v2``
``dtype``                                       ``data_type``; byte order: the ``bytes`` codec
``|O`` with ``vlen-utf8``, ``vlen-bytes``       ``string``, ``variable_length_bytes``
``fill_value`` ``null``                         the zero of the data type
``.zattrs``                                     ``attributes``
its ``_ARRAY_DIMENSIONS``, of xarray            ``dimension_names``
a fill value, if it has ``_ARRAY_DIMENSIONS``   also the attribute ``_FillValue``
==============================================  ================================================

A document that says more than the other format can say is refused. The bytes of chunks and
shards are the same in both formats, and so are their keys.

xarray takes the fill value of a v2 array for the value of missing data; in v3, it takes the
attribute ``_FillValue``.

Source: Zarr v2, "Metadata"; Zarr v3 core, "Array metadata"; ZEP 2, "Configuration"; sharding
storage transformer draft, "Configuration"; xarray, "Zarr encoding specification" and its
``FillValueCoder``.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Set
from typing import Any

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.consolidated_index import (
    declares_consolidated_index,
    with_consolidated_index,
    without_consolidated_index,
)
from zarr_shardstore.metadata.codecs import (
    SERIALIZERS,
    Chain,
    chain_of_codecs,
    codecs_of_chain,
    name_and_options,
)
from zarr_shardstore.metadata.data_types import (
    DataType,
    fill_value_of_v2,
    fill_value_of_v3,
    parse_numpy,
    v3_data_type,
)
from zarr_shardstore.metadata.declaration import (
    Declaration,
    Declared,
    apply,
    find_declaration,
    format_of,
    has_sharding_codec,
    strip,
)
from zarr_shardstore.metadata.documents import (
    V3_ARRAY_MEMBERS,
    V3_GROUP_MEMBERS,
    attributes_of,
    plain_geometry,
)
from zarr_shardstore.metadata.transformer_list import SHARDING

Document = dict[str, Any]

_V2_MEMBERS = {
    "zarr_format",
    "shape",
    "chunks",
    "dtype",
    "compressor",
    "fill_value",
    "order",
    "filters",
    "dimension_separator",
}
_OBJECT = "|O"
_NAMES = "_ARRAY_DIMENSIONS"
_MASKED = "_FillValue"


def declared_by_codec(doc: Mapping[str, Any]) -> Document:
    """Return a v3 array document that every v3 reader reads; the same if it is that already."""
    declared = find_declaration(doc, "passthrough")
    if declared is None:
        return dict(doc)
    _check_geometry(doc)
    if has_sharding_codec(doc):
        raise UnsupportedError(
            "its chunks are shards of the codec themselves, and shards of shards are not written: "
            "rewrite the array"
        )
    return _redeclared(strip(doc, declared.how), declared, "codec")


def declared_by_transformers(doc: Mapping[str, Any]) -> Document:
    """Return a v3 array document with a storage transformer for its sharding codec, if any."""
    declared = find_declaration(doc)
    if declared is None or declared.how != "codec":
        return dict(doc)
    _check_geometry(doc)
    return _redeclared(strip(doc, "codec"), declared, "storage_transformers")


def array_of_v2(doc: Mapping[str, Any], attributes: Mapping[str, Any]) -> Document:
    """Return the native v3 document of a v2 array, sharded or not."""
    has_consolidated_index, doc = declares_consolidated_index(doc), without_consolidated_index(doc)
    _check_members(doc, _V2_MEMBERS)
    _check_geometry(doc)
    declared = find_declaration(doc)
    plain = dict(doc) if declared is None else strip(doc, "filters")
    try:
        shape, chunks, fill_value = list(plain["shape"]), plain["chunks"], plain["fill_value"]
        filters = list(plain.get("filters") or ())
        is_object = plain["dtype"] == _OBJECT and bool(filters)
        data_type = None if is_object else parse_numpy(plain["dtype"])
        if is_object and filters[0].get("id") not in SERIALIZERS:
            raise UnsupportedError(f"objects encoded by {filters[0]!r} have no v3 data type")
        chain = Chain(data_type, plain.get("order", "C"), filters, plain.get("compressor"))
        codecs = codecs_of_chain(chain, len(shape))
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"the array document is not complete: {error!r}") from error
    separator = plain.get("dimension_separator") or "."
    attributes, names = to_dimension_names(attributes, len(shape), fill_value, data_type)
    if data_type is not None:
        data_type_of_v3 = v3_data_type(data_type)
        fill_value = fill_value_of_v2(fill_value, data_type)
    else:
        data_type_of_v3 = SERIALIZERS[filters[0]["id"]]
        fill_value = "" if fill_value in (None, 0) else fill_value
        if not isinstance(fill_value, str):
            raise SpecError(f"{fill_value!r} is no fill value of a text")
    translated: Document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": data_type_of_v3,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": separator}},
        "fill_value": fill_value,
        "codecs": codecs,
        "attributes": attributes,
        "storage_transformers": [],
    }
    if names is not None:
        translated["dimension_names"] = names
    if declared is not None:
        translated = _redeclared(translated, declared, "codec")
    return with_consolidated_index(translated) if has_consolidated_index else translated


def array_to_v2(doc: Mapping[str, Any]) -> tuple[Document, Document]:
    """Return the v2 document of a v3 array, marked if it is sharded, and its attributes."""
    has_consolidated_index, doc = declares_consolidated_index(doc), without_consolidated_index(doc)
    _check_geometry(doc)
    declared = find_declaration(doc)
    plain = dict(doc) if declared is None else strip(doc, declared.how)
    _check_members(plain, V3_ARRAY_MEMBERS)
    if has_sharding_codec(plain):
        raise UnsupportedError("its sharding codec has a form that the marker of v2 has not")
    try:
        shape = list(plain["shape"])
        chunks = name_and_options(plain["chunk_grid"])[1]["chunk_shape"]
        encoding, options = name_and_options(plain["chunk_key_encoding"])
        chain = chain_of_codecs(plain["codecs"], plain["data_type"], len(shape))
        fill_value = plain["fill_value"]
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"the array document is not complete: {error!r}") from error
    if encoding != "v2":
        raise UnsupportedError(
            f"its chunk keys are of the encoding {encoding!r}, so v2 readers would not find them: "
            "that takes a conversion, not a change of metadata"
        )
    data_type = chain.data_type
    if data_type is not None:
        fill_value = fill_value_of_v3(fill_value, data_type)
    attributes, fill_value = to_attributes(
        attributes_of(plain), plain.get("dimension_names"), fill_value, data_type
    )
    translated: Document = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": list(chunks),
        "dtype": _OBJECT if data_type is None else data_type.str,
        "compressor": chain.compressor,
        "fill_value": fill_value,
        "order": chain.order,
        "filters": list(chain.filters) or None,
        "dimension_separator": options.get("separator", "."),
    }
    if declared is not None:
        translated = apply(translated, Declared("filters", declared.transformers))
    return with_consolidated_index(translated) if has_consolidated_index else translated, attributes


def group_of_v2(doc: Mapping[str, Any], attributes: Mapping[str, Any]) -> Document:
    """Return the v3 document of a v2 group."""
    _check_members(doc, {"zarr_format"})
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def group_to_v2(doc: Mapping[str, Any]) -> tuple[Document, Document]:
    """Return the v2 document of a v3 group, and its attributes."""
    _check_members(doc, V3_GROUP_MEMBERS)
    return {"zarr_format": 2}, attributes_of(doc)


def to_dimension_names(
    attributes: Mapping[str, Any], ndim: int, fill_value: Any, data_type: DataType | None
) -> tuple[Document, list[str] | None]:
    """Return attributes and dimension names of a v3 array, from the attributes of v2."""
    names = attributes.get(_NAMES)
    if names is None or not _are_names(names) or len(names) != ndim:
        return dict(attributes), None
    changed = {k: v for k, v in attributes.items() if k != _NAMES}
    masked = _masked(fill_value, data_type)
    if masked is not None:
        changed.setdefault(_MASKED, masked)
    return changed, list(names)


def to_attributes(
    attributes: Mapping[str, Any], names: Any, fill_value: Any, data_type: DataType | None
) -> tuple[Document, Any]:
    """Return attributes and fill value of a v2 array, from those of v3 and its dimension names.

    Where xarray masks nothing, a fill value of zero becomes ``null``, which stands for zero too.
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
    """Return the ``_FillValue`` that says in v3 what a fill value says in v2, or ``None``."""
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


def _redeclared(plain: Document, declared: Declared, how: Declaration) -> Document:
    if not declared.transformers:
        return plain
    names = [transformer.name for transformer in declared.transformers]
    if names != [SHARDING]:
        raise UnsupportedError(
            f"it has the storage transformers {names}, and only one sharding can be declared by "
            "the codec: copy the array into a store without them"
        )
    return apply(plain, Declared(how, declared.transformers))


def _check_geometry(doc: Mapping[str, Any]) -> None:
    """Refuse an array whose chunk keys are not known here."""
    if plain_geometry("v2" if format_of(doc) == "v2" else "v3", doc) is None:
        raise UnsupportedError("its chunk grid or chunk keys have a form that is not known")


def _check_members(doc: Mapping[str, Any], known: Set[str]) -> None:
    unknown = sorted(doc.keys() - known)
    if unknown:
        raise UnsupportedError(
            f"its document has the members {unknown}, which have no place in the other format: "
            "remove them if they are not needed"
        )
