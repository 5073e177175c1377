"""Metadata documents of the draft hierarchy, translated to Zarr v3 documents and back.

========================  =================================================================
draft                     v3
========================  =================================================================
data_type                 data_type, and the endian of the ``bytes`` codec
chunk_grid.separator      chunk_key_encoding ``default`` with this separator; with ``.`` for
                          one that v3 does not know
chunk_memory_layout ``F`` a ``transpose`` codec that reverses the dimensions
compressor                the last codec
fill_value ``null``       the zero of the data type
(dimension_names)         dimension_names; zarr-python 2.18 ignores it
other members             not shown; kept where the same array is written again
========================  =================================================================

A document is the parsed JSON object. The functions never change their argument.

Source: Zarr v3 draft of 2022, "Metadata"; zarr-python 2.13 to 2.18, ``zarr/meta.py``; Zarr v3
core, "Array metadata", "Group metadata".
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from zarr_shardstore.draft.draft_keys import v3_separator
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding, is_separator
from zarr_shardstore.metadata.codecs import (
    Chain,
    Order,
    bytes_endian,
    compressor_of_codec,
    config_of_draft,
    draft_compressor,
    name_and_options,
    split_layout,
    v3_array,
)
from zarr_shardstore.metadata.data_types import (
    Endian,
    draft_data_type,
    fill_value_of_v3,
    parse_draft,
    parse_v3,
)
from zarr_shardstore.metadata.documents import (
    V3_ARRAY_MEMBERS,
    V3_GROUP_MEMBERS,
    Geometry,
    attributes_of,
    is_same_json,
)

Document = dict[str, Any]

_CORE = "https://purl.org/zarr/spec/protocol/core/3.0"

ENTRY_POINT: Document = {
    "zarr_format": _CORE,
    "metadata_encoding": _CORE,
    "metadata_key_suffix": ".json",
    "extensions": [],
}
"""Document ``zarr.json`` of a hierarchy; zarr-python 2.18 takes only these members."""

_CHUNK_MEMBERS = ("data_type", "chunk_grid", "chunk_memory_layout", "compressor")
"""Members that say how chunks are stored: another value means another array."""


def check_entry_point(doc: Mapping[str, Any] | None) -> None:
    """Refuse an entry point that is not that of a known draft hierarchy."""
    if doc is None or not str(doc.get("zarr_format", _CORE)).startswith("https://"):
        raise SpecError(
            "the base store has a zarr.json that is no entry point of a draft hierarchy; a Zarr "
            "v3 hierarchy is read and written through ShardingStore alone"
        )
    if doc.get("metadata_key_suffix", ".json") != ".json":
        suffix = doc["metadata_key_suffix"]
        raise UnsupportedError(f"the metadata key suffix {suffix!r} is not known, only '.json'")
    _check_extensions(doc)


def group_of_draft(doc: Mapping[str, Any]) -> Document:
    """Return the v3 document of a group, from its draft document."""
    _check_extensions(doc)
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes_of(doc)}


def group_to_draft(doc: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> Document:
    """Return the draft document of a group, from its v3 document."""
    _check_members(doc, V3_GROUP_MEMBERS)
    if doc.get("consolidated_metadata") is not None:
        raise UnsupportedError(
            "the draft has no consolidated metadata: leave the group unconsolidated"
        )
    return {**(stored or {}), "attributes": attributes_of(doc)}


def array_of_draft(doc: Mapping[str, Any]) -> Document:
    """Return the v3 document of an array, from its draft document."""
    _check_extensions(doc)
    if doc.get("storage_transformers"):
        raise UnsupportedError(
            f"the storage transformers {doc['storage_transformers']!r} are not known here"
        )
    attributes = attributes_of(doc)
    if attributes.get("filters"):
        # zarr-python 2.18 keeps the filters of an array there.
        raise UnsupportedError(
            f"the array has the filters {attributes['filters']!r} (in its attributes), which "
            "are not translated: read it by zarr-python 2"
        )
    try:
        data_type = parse_draft(doc["data_type"])
        grid = doc["chunk_grid"]
        shape, chunk_shape = list(doc["shape"]), list(grid["chunk_shape"])
        separator = grid.get("separator", "/")
        is_regular = grid["type"] == "regular" and len(shape) == len(chunk_shape)
        compressor = doc.get("compressor")
        config = None if compressor is None else config_of_draft(compressor)
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"the array document is not complete: {error!r}") from error
    if not is_regular or not is_separator("draft", separator):
        raise UnsupportedError(f"the chunk grid {grid!r} is not known")
    chain = Chain(data_type, doc.get("chunk_memory_layout", "C"), compressor=config)
    encoding = ChunkKeyEncoding("default", v3_separator(separator))
    geometry = Geometry(tuple(shape), tuple(chunk_shape), encoding)
    translated = v3_array(geometry, chain, doc.get("fill_value"), attributes)
    if (names := _dimension_names(doc, len(shape))) is not None:
        translated["dimension_names"] = names
    return translated


def array_to_draft(doc: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> Document:
    """Return the draft document of an array, from its v3 document.

    Members that did not change keep their stored spelling: a fill value ``null`` stays ``null``.
    """
    translated = _translated_array(doc)
    if stored is None:
        return translated
    try:
        before = _translated_array(array_of_draft(stored))
    except (SpecError, UnsupportedError):
        return translated  # the stored array cannot be shown, so this is another one
    if not all(is_same_json(before.get(name), translated.get(name)) for name in _CHUNK_MEMBERS):
        return translated
    kept = {name: member for name, member in stored.items() if name not in before}
    merged = {**kept, **translated}
    for name, member in translated.items():
        if name in before and is_same_json(before[name], member):
            if name in stored:
                merged[name] = stored[name]
            else:
                del merged[name]
    return merged


def _translated_array(doc: Mapping[str, Any]) -> Document:
    _check_members(doc, V3_ARRAY_MEMBERS)
    if doc.get("storage_transformers"):
        raise UnsupportedError(
            "storage transformers are written by the ShardingStore below: pass chunks_per_shard="
        )
    try:
        shape = list(doc["shape"])
        grid_name, grid = name_and_options(doc["chunk_grid"])
        if grid_name != "regular":
            raise UnsupportedError(f"the draft has regular chunk grids only, got {grid_name!r}")
        chunk_shape = list(grid["chunk_shape"])
        layout, endian, compressor = _parse_codecs(doc["codecs"], len(shape))
        data_type = parse_v3(doc["data_type"], endian)
        fill_value = fill_value_of_v3(doc["fill_value"], data_type)
        separator = _separator(doc["chunk_key_encoding"])
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"the array document is not complete: {error!r}") from error
    attributes = attributes_of(doc)
    if attributes.get("filters"):
        raise UnsupportedError(
            "the attribute 'filters' of an array means its filters to zarr-python 2: take "
            "another name"
        )
    translated = {
        "shape": shape,
        "data_type": draft_data_type(data_type),
        "chunk_grid": {"type": "regular", "chunk_shape": chunk_shape, "separator": separator},
        "chunk_memory_layout": layout,
        "fill_value": fill_value,
        "extensions": [],
        "attributes": attributes,
    }
    if compressor is not None:
        translated["compressor"] = draft_compressor(compressor)
    if (names := _dimension_names(doc, len(shape))) is not None:
        translated["dimension_names"] = names
    return translated


def _parse_codecs(codecs: Any, ndim: int) -> tuple[Order, Endian | None, Document | None]:
    """Return memory layout, byte order, and numcodecs configuration of the compressor, if any."""
    names = [name_and_options(codec)[0] for codec in codecs]
    if "sharding_indexed" in names:
        raise UnsupportedError(
            "this store does the sharding: leave shards= away and pass chunks_per_shard= to the "
            "ShardingStore below"
        )
    layout, rest = split_layout(codecs, ndim)
    if [name_and_options(codec)[0] for codec in rest[:1]] != ["bytes"] or len(rest) > 2:
        raise UnsupportedError(
            "the draft has a memory layout, a byte order and one compressor, which are the codecs "
            f"'transpose', 'bytes' and a compressor; got {names}"
        )
    endian = bytes_endian(rest[0])
    return layout, endian, compressor_of_codec(rest[1]) if len(rest) > 1 else None


def _separator(encoding: Any) -> str:
    name, options = name_and_options(encoding)
    separator = options.get("separator", "/")
    if name != "default" or separator not in ("/", "."):
        raise UnsupportedError(
            f"the chunk key encoding {name!r} is not the draft's: take 'default', with the "
            "separator '/' or '.'"
        )
    return str(separator)


def _dimension_names(doc: Mapping[str, Any], ndim: int) -> list[str | None] | None:
    """Return the names; a member of this name may hold something else in the draft."""
    names = doc.get("dimension_names")
    if not isinstance(names, list | tuple) or len(names) != ndim:
        return None
    return list(names) if all(isinstance(n, str | None) for n in names) else None


def _check_members(doc: Mapping[str, Any], known: Set[str]) -> None:
    unknown = sorted(doc.keys() - known)
    if unknown:
        raise UnsupportedError(f"the draft has no place for the members {unknown}")
    if doc.get("zarr_format") != 3:
        raise UnsupportedError(
            f"only documents of zarr_format 3 are translated, got {doc.get('zarr_format')!r}"
        )


def _check_extensions(doc: Mapping[str, Any]) -> None:
    for extension in doc.get("extensions") or ():
        if isinstance(extension, Mapping) and extension.get("must_understand", False):
            raise UnsupportedError(f"the extension {extension!r} is not known")
