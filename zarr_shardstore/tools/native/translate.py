"""One array or group document in the other format: v2 and v3, sharded by transformer or codec.

Decisions 14 and 25 say what becomes what. A document that the other format cannot express is
refused. The bytes of chunks and shards, and their keys, are the same in both formats.

xarray takes the fill value of a v2 array for missing data; in v3, the attribute ``_FillValue``,
which it cannot decode for texts: they get none.

OME-Zarr metadata of version 0.4 is in the attributes of v2 groups. Version 0.5 has the same members
in the attribute ``ome`` of v3 groups, with one ``"version": "0.5"`` for all. The names of axes of
its multiscales also become ``dimension_names`` of the arrays.

Source: Zarr v2, "Metadata"; Zarr v3 core, "Array metadata"; ZEP 2, "Configuration"; sharding
storage transformer draft, "Configuration"; xarray, "Zarr encoding specification" and its
``FillValueCoder``; OME-NGFF 0.4 and 0.5.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from zarr_shardstore.access import chunk_keys, declarations, metadata, transformer_list
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.native import data_types, document_members
from zarr_shardstore.tools.native.codecs import SERIALIZERS, Chain, chain_of_codecs, v3_array

Document: TypeAlias = declarations.Document
ZarrFormat = Literal[2, 3]

_OF_CHUNKS = {"shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters"}
_V2_MEMBERS = {"zarr_format", "dimension_separator"} | _OF_CHUNKS
_OBJECT = "|O"
NAMES = "_ARRAY_DIMENSIONS"
_MASKED = "_FillValue"

_OME_IMAGES = ("multiscales", "omero", "labels", "image-label", "bioformats2raw.layout", "series")
_OME_GROUPS = ("multiscales", "plate", "well", "bioformats2raw.layout")
_OME_MEMBERS = (*_OME_IMAGES, "plate", "well")


def redeclare(doc: Mapping[str, Any], how: Literal["codec", "storage_transformers"]) -> Document:
    """Return a v3 array document with this declaration in place of another."""
    declared = declarations.find_declaration(doc, "passthrough" if how == "codec" else "flat")
    if declared is None or declared.how == how:
        return dict(doc)
    plain = declarations.strip(doc, declared.how)
    _geometry(plain)
    if how == "codec" and declarations.has_sharding_codec(doc):
        raise UnsupportedError(
            "its chunks are shards of the codec themselves, and shards of shards are not written: "
            "rewrite the array"
        )
    return _declare(plain, declared, how)


def v3_of_v2(doc: Mapping[str, Any], attributes: Mapping[str, Any]) -> Document:
    """Return the native v3 document of a v2 array, sharded or not, or of a v2 group."""
    if "shape" not in doc:
        document_members.check_members(doc, {"zarr_format"}, "v3")
        return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    notes, doc = metadata.notes_of(doc), metadata.without_notes(doc)
    document_members.check_members(doc, _V2_MEMBERS, "v3")
    with document_members.complete_document():
        declared, plain = declarations.split(doc)
        geometry, fill_value = _geometry(plain), plain["fill_value"]
        filters = list(plain.get("filters") or ())
        is_object = plain["dtype"] == _OBJECT and bool(filters)
        data_type = None if is_object else data_types.parse_numpy(plain["dtype"])
        if is_object and filters[0].get("id") not in SERIALIZERS:
            raise UnsupportedError(f"objects encoded by {filters[0]!r} have no v3 data type")
        chain = Chain(data_type, plain.get("order", "C"), filters, plain.get("compressor"))
        ndim = len(geometry.shape)
        attributes, names = to_dimension_names(attributes, ndim, fill_value, data_type)
        translated = v3_array(geometry, chain, fill_value, attributes)
    if names is not None:
        translated["dimension_names"] = names
    if declared is not None:
        translated = _declare(translated, declared, "codec")
    return {**translated, **notes}


def v2_of_v3(doc: Mapping[str, Any]) -> tuple[Document, Document]:
    """Return v2 document and attributes of a v3 group, or of an array, marked if sharded."""
    if doc.get("node_type") == "group":
        document_members.check_members(doc, document_members.V3_GROUP_MEMBERS, "v2")
        return {"zarr_format": 2}, document_members.attributes_of(doc)
    notes, doc = metadata.notes_of(doc), metadata.without_notes(doc)
    with document_members.complete_document():
        declared, plain = declarations.split(doc)
        document_members.check_members(plain, document_members.V3_ARRAY_MEMBERS, "v2")
        if declarations.has_sharding_codec(plain):
            raise UnsupportedError("its sharding codec has a form that the marker of v2 has not")
        geometry = _geometry(plain)
        chain = chain_of_codecs(plain["codecs"], plain["data_type"], len(geometry.shape))
        fill_value = plain["fill_value"]
    if geometry.encoding.style != "v2":
        raise UnsupportedError(
            f"its chunk keys are of the encoding {geometry.encoding.style!r}, so v2 readers would "
            "not find them: that takes a conversion, not a change of metadata"
        )
    data_type = chain.data_type
    if data_type is not None:
        fill_value = data_types.fill_value_of_v3(fill_value, data_type)
    attributes, fill_value = to_attributes(
        document_members.attributes_of(plain), plain.get("dimension_names"), fill_value, data_type
    )
    translated: Document = {
        "zarr_format": 2,
        "shape": list(geometry.shape),
        "chunks": list(geometry.chunk_shape),
        "dtype": _OBJECT if data_type is None else data_type.str,
        "compressor": chain.compressor,
        "fill_value": fill_value,
        "order": chain.order,
        "filters": list(chain.filters) or None,
        "dimension_separator": geometry.encoding.separator,
    }
    if declared is not None:
        marker = declarations.Declared("filters", declared.transformers)
        translated = declarations.apply(translated, marker)
    return {**translated, **notes}, attributes


def documents_in(
    zarr_format: ZarrFormat | None, doc: Mapping[str, Any], attributes: Mapping[str, Any]
) -> dict[str, Document]:
    """Return the documents, by name, of a node with plain chunks for readers of a format.

    `doc` is ``zarr.json``, ``.zarray`` or ``.zgroup``, as stored or as users see it; `attributes`
    is ``.zattrs``. Without a format the documents stay in their own. `encoding_in` spells the keys
    of chunks. Raises `UnsupportedError` if the format cannot express the document.
    """
    is_v3 = declarations.format_of(doc) == "v3"
    is_array = doc.get("node_type") == "array" if is_v3 else "shape" in doc
    plain = dict(doc)
    if is_array:
        _, plain = declarations.split(doc)
        plain = dict(declarations.without_mark(metadata.without_notes(plain)))
    if (zarr_format or (3 if is_v3 else 2)) == 3:
        return {"zarr.json": plain if is_v3 else v3_of_v2(plain, attributes)}
    if is_v3:
        plain, attributes = _plain_v2_of_v3(plain)
    name = ".zarray" if is_array else ".zgroup"
    return {name: plain} | ({".zattrs": dict(attributes)} if attributes else {})


def encoding_in(
    zarr_format: ZarrFormat | None, encoding: chunk_keys.ChunkKeyEncoding
) -> chunk_keys.ChunkKeyEncoding:
    """Return the chunk key encoding of `documents_in`: in v2 the key ``c/0/1`` becomes ``0/1``."""
    return chunk_keys.ChunkKeyEncoding("v2", encoding.separator) if zarr_format == 2 else encoding


def _plain_v2_of_v3(doc: Document) -> tuple[Document, Document]:
    """Return v2 document and attributes of a v3 node without shards, of any chunk keys."""
    if declarations.has_sharding_codec(doc):
        raise UnsupportedError("its chunks are shards themselves, which v2 has not: take v3")
    if geometry := metadata.plain_geometry("v3", doc):
        separator = geometry.encoding.separator
        encoding = {"name": "v2", "configuration": {"separator": separator}}
        doc = {**doc, "chunk_key_encoding": encoding}
    if doc.get("shape") == []:  # xarray leaves out a list of no names in v3, but v2 needs it
        doc = {"dimension_names": [], **doc}
    translated, attributes = v2_of_v3(doc)
    if translated.get("fill_value") is None and "dimension_names" in doc:
        # A null stands for zero, but zarr 2 leaves missing chunks as they happen to be in memory.
        unnamed = {name: value for name, value in doc.items() if name != "dimension_names"}
        translated["fill_value"] = v2_of_v3(unnamed)[0]["fill_value"]
    return translated, attributes


def to_dimension_names(
    attributes: Mapping[str, Any], ndim: int, fill_value: Any, data_type: data_types.DataType | None
) -> tuple[Document, list[str] | None]:
    """Return attributes and dimension names of a v3 array, from the attributes of v2.

    xarray masks the fill value of a v2 array, if it has one, whatever its ``_FillValue`` is.
    """
    names = attributes.get(NAMES)
    if names is None or not _are_names(names) or len(names) != ndim:
        return dict(attributes), None
    changed = {k: v for k, v in attributes.items() if k != NAMES}
    if _is_text(data_type):
        if _MASKED in changed:  # xarray reads no such member of v3
            changed.setdefault("missing_value", changed.pop(_MASKED))
        return changed, list(names)
    masked = _masked(fill_value, data_type)
    if masked is None and not isinstance(changed.get(_MASKED), str):
        with suppress(SpecError, OverflowError):  # no value of the type: it stays as it is
            masked = _masked(changed.get(_MASKED), data_type)
    if masked is not None:
        changed[_MASKED] = masked
    return changed, list(names)


def to_attributes(
    attributes: Mapping[str, Any],
    names: Any,
    fill_value: Any,
    data_type: data_types.DataType | None,
) -> tuple[Document, Any]:
    """Return attributes and fill value of a v2 array, from v3 attributes and dimension names.

    Where xarray masks no data, a zero that ``null`` also stands for becomes ``null``. Other zeros
    stay as they are: those of times and texts, and -0.0.
    """
    if names is None or (names and isinstance(names, list) and all(n is None for n in names)):
        return dict(attributes), fill_value
    if not _are_names(names) or attributes.get(NAMES, names) != names:
        raise UnsupportedError(
            f"the dimension names {names!r} cannot be an attribute of v2: name all dimensions or "
            "none, or stay with v3"
        )
    changed = {**attributes, NAMES: list(names)}
    if _MASKED in changed:
        if changed.pop(_MASKED) != _masked(fill_value, data_type):
            raise UnsupportedError(
                f"its {_MASKED!r} is another value than its fill value, and v2 has one for both"
            )
    elif data_type is not None and not _is_text(data_type):
        null = data_types.fill_value_of_v2(None, data_type)
        fill_value = None if document_members.is_same_json(fill_value, null) else fill_value
    return changed, fill_value


def masks_as_v2(doc: Document, v2: Document, attributes: Document) -> bool:
    """Return whether xarray masks values of the v2 array, and none of the v3 array `doc`."""
    shows_all = v2.get("fill_value") in (None, "NaN") or v2["dtype"][1] in "mM"
    is_masked = _MASKED in document_members.attributes_of(doc)
    return NAMES in attributes and not (shows_all or is_masked)


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_text(data_type: data_types.DataType | None) -> bool:
    return data_type is not None and data_type.kind in "SU"


def _masked(fill_value: Any, data_type: data_types.DataType | None) -> Any:
    """Return the ``_FillValue`` of v3 for a fill value of v2, or ``None``."""
    if fill_value is None or data_type is None:
        return None
    value = data_types.fill_value_of_v2(fill_value, data_type)
    if data_type.kind == "f":
        return _float64(value)
    if data_type.kind == "c":
        return [_float64(part) for part in value]
    return value if data_type.kind in "biuSU" else None


def _float64(value: float | str) -> str:
    return base64.b64encode(struct.pack("<d", float(value))).decode()


def _declare(
    plain: Document, declared: declarations.Declared, how: declarations.Declaration
) -> Document:
    if not declared.transformers:
        return plain
    names = [transformer.name for transformer in declared.transformers]
    if names != [transformer_list.SHARDING]:
        raise UnsupportedError(
            f"it has the storage transformers {names}, and only one sharding can be declared by "
            "the codec: copy the array into a store without them"
        )
    return declarations.apply(plain, declarations.Declared(how, declared.transformers))


def _geometry(doc: Mapping[str, Any]) -> metadata.Geometry:
    """Return the geometry of an array; refuse unknown chunk grids and chunk keys."""
    geometry = metadata.plain_geometry("v2" if declarations.format_of(doc) == "v2" else "v3", doc)
    if geometry is None:
        raise UnsupportedError("its chunk grid or chunk keys have a form that is not known")
    if geometry.sides:
        raise UnsupportedError(
            "its chunks have several lengths, which neither Zarr v2 nor native shards have"
        )
    return geometry


def is_ome_04(attributes: Mapping[str, Any]) -> bool:
    """Return whether a group with these attributes is an image or a plate of OME-Zarr 0.4."""
    return "ome" not in attributes and any(name in attributes for name in _OME_GROUPS)


def to_ome_05(attributes: Mapping[str, Any]) -> Document:
    """Return the attributes of a group, with OME-Zarr 0.4 made 0.5."""
    members = {name: attributes[name] for name in _OME_MEMBERS if name in attributes}
    if not members:
        return dict(attributes)
    if "ome" in attributes:
        raise UnsupportedError(
            f"it has OME-Zarr attributes of two versions, 'ome' and {sorted(members)}: remove one"
        )
    moved = {name: _without_ome_version(name, member) for name, member in members.items()}
    rest = {name: value for name, value in attributes.items() if name not in members}
    return {**rest, "ome": {"version": "0.5", **moved}}


def to_ome_04(attributes: Mapping[str, Any]) -> Document:
    """Return the attributes of a group, with OME-Zarr 0.5 made 0.4."""
    ome = attributes.get("ome")
    if not isinstance(ome, Mapping) or ome.get("version") != "0.5":
        return dict(attributes)
    rest = {name: value for name, value in attributes.items() if name != "ome"}
    members = {name: value for name, value in ome.items() if name != "version"}
    dated = {k: _with_ome_version(v) for k, v in members.items() if k != "omero"}
    return {**rest, **members, **dated}


def _with_ome_version(member: Any) -> Any:
    if isinstance(member, list):
        return [_with_ome_version(item) for item in member]
    return {**member, "version": "0.4"} if isinstance(member, Mapping) else member


def images_of(attributes: Any) -> list[Any]:
    """Return the images of an OME-Zarr group, unchecked."""
    ome = attributes.get("ome", attributes) if isinstance(attributes, Mapping) else None
    images = ome.get("multiscales") if isinstance(ome, Mapping) else None
    return images if isinstance(images, list) else []


def dimension_names_of_levels(attributes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of axes by path of an array below an OME-Zarr group."""
    found: dict[str, list[str]] = {}
    for multiscale in images_of(attributes):
        try:
            names = [axis["name"] for axis in multiscale["axes"]]
            paths = [dataset["path"] for dataset in multiscale["datasets"]]
        except (KeyError, TypeError):
            raise UnsupportedError("its 'multiscales' lack axes or paths of datasets") from None
        found |= dict.fromkeys(paths, names)
    return found


def _without_ome_version(name: str, member: Any) -> Any:
    if isinstance(member, list):
        return [_without_ome_version(name, item) for item in member]
    if not isinstance(member, Mapping):
        return member
    version = member.get("version", "0.4")
    if version != "0.4":
        raise UnsupportedError(
            f"its {name!r} is of OME-Zarr version {version!r}, and only 0.4 is made 0.5"
        )
    return {key: value for key, value in member.items() if key != "version"}
