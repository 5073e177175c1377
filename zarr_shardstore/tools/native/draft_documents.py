"""Keys and documents of the draft hierarchy of 2022 in Zarr v3, and back.

==========================  ==================================================
v3                          draft
==========================  ==================================================
``foo/zarr.json``           ``meta/root/foo.array.json`` or ``.group.json``
``zarr.json``               ``meta/root.array.json`` or ``.group.json``
``foo/c/0/1``               ``data/root/foo/c0/1``, if ``foo`` is an array of 2 dims and ``/``
``foo/c.0.1``               ``data/root/foo/c0.1``, if ``foo`` is an array of 2 dims and ``.``;
                            ``c0-1``, if its separator is ``-``, which v3 has not
``foo/c``                   ``data/root/foo/c0``, or ``c``, if ``foo`` is an array of 0 dims
``foo/.zarray`` and such    nothing
every other key             the key after ``data/root/``
==========================  ==================================================

========================  =================================================================
draft                     v3
========================  =================================================================
data_type                 data_type, and the endian of the ``bytes`` codec
chunk_grid.separator      chunk_key_encoding ``default`` with this separator; with ``.`` for
                          one that v3 does not know
chunk_memory_layout ``F`` a ``transpose`` codec that reverses the dimensions
compressor                the last codec
fill_value ``null``       the zero of the data type, ``NaT`` for times
(dimension_names)         dimension_names; zarr-python 2.18 ignores it
other members             not shown; kept where the same array is written again
========================  =================================================================

The functions never change their argument.

Source: Zarr v3 draft of 2022, "Storage keys", "Metadata"; zarr-python 2.13 to 2.18,
``zarr/meta.py``, and ``_chunk_key`` in ``zarr/core.py``; Zarr v3 core, "Chunk key encoding", "Array
metadata", "Group metadata".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

from zarr_shardstore.access import chunk_keys, declarations, metadata, transformer_list
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.native import codecs, data_types, document_members

Document: TypeAlias = declarations.Document
DRAFT_META_ROOT = "meta/root/"
ENTRY_POINT_KEY = "zarr.json"

_V2_DOCUMENTS = (".zarray", ".zgroup", ".zattrs", ".zmetadata")
_ARRAY = ".array.json"
_GROUP = ".group.json"
_IS_ODD = re.compile(r"c[0-9].*[0-9]")
_COMPRESSORS = "https://purl.org/zarr/spec/codec/"
_CORE = "https://purl.org/zarr/spec/protocol/core/3.0"

ENTRY_POINT: Document = {
    "zarr_format": _CORE,
    "metadata_encoding": _CORE,
    "metadata_key_suffix": ".json",
    "extensions": [],
}
"""Document ``zarr.json`` of a hierarchy; zarr-python 2.18 takes only these members."""


def array_key(path: str) -> str:
    return metadata.document_key(metadata.Node("draft", path))


def group_key(path: str) -> str:
    return array_key(path).removesuffix(_ARRAY) + _GROUP


def node_of_meta_key(key: str) -> str | None:
    """Return the path of the node whose document has this key; ``None`` for other keys."""
    place = key.removesuffix(_ARRAY if key.endswith(_ARRAY) else _GROUP)
    if place == key:
        return None
    if place == DRAFT_META_ROOT.rstrip("/"):
        return ""
    path = place.removeprefix(DRAFT_META_ROOT)
    return path if path not in ("", place) and not path.endswith("/") else None


def v3_key(path: str) -> str:
    return metadata.document_key(metadata.Node("v3", path))


def node_of_v3_key(key: str) -> str | None:
    """Return the path of the node whose v3 document has this key; ``None`` for other keys."""
    path, _, name = key.rpartition("/")
    return path if name == "zarr.json" else None


def is_v2_document(key: str) -> bool:
    return key.rpartition("/")[2] in _V2_DOCUMENTS


def directory_of(path: str) -> str:
    """Return the prefix of keys below a path: with a slash, or ``""`` for the root."""
    return f"{path}/" if path else ""


def v3_candidate(key: str) -> tuple[str, str] | None:
    """Split a v3 key of the encoding ``default`` into array path and suffix, if possible."""
    return next((c for c in chunk_keys.v3_candidates(key) if c[1].startswith("c")), None)


def draft_candidate_of(key: str) -> tuple[str, str] | None:
    """Split a key below ``data/root/`` as `draft_candidate`, with any separator."""
    usual = chunk_keys.draft_candidate(chunk_keys.DRAFT_DATA_ROOT + key)
    path, _, name = key.rpartition("/")
    return (path, name) if usual is None and _IS_ODD.fullmatch(name) else usual


def v3_encoding(encoding: chunk_keys.ChunkKeyEncoding) -> chunk_keys.ChunkKeyEncoding:
    """Return the v3 chunk key encoding of an array of the draft."""
    return chunk_keys.ChunkKeyEncoding("default", "/" if encoding.separator == "/" else ".")


def chunk_places(
    arrays: Mapping[str, metadata.Geometry], candidate: tuple[str, str] | None
) -> tuple[str, ...]:
    """Return the draft's keys of a chunk of known `arrays`, the one for writing first.

    The chunk of a 0-d array is ``c`` in the draft and ``c0`` in zarr-python 2.18.
    """
    if candidate is None or candidate[0] not in arrays:
        return ()
    path, suffix = candidate
    encoding = arrays[path].encoding
    coords = v3_encoding(encoding).decode(suffix, len(arrays[path].shape))
    if coords is None:
        return ()
    prefix = metadata.Node("draft", path).chunk_prefix
    return (prefix + encoding.encode(coords),) if coords else (f"{prefix}c0", f"{prefix}c")


def v3_chunk_key(
    arrays: Mapping[str, metadata.Geometry],
    candidate: tuple[str, str] | None,
    *,
    leading: bool = False,
) -> str | None:
    """Return the v3 key of a chunk of known `arrays`, given the draft's key, or ``None``.

    With `leading` only leading components are given: ``a/c/3`` for ``("a", "c3")``.
    """
    if candidate is None or candidate[0] not in arrays:
        return None
    path, suffix = candidate
    encoding, ndim = arrays[path].encoding, len(arrays[path].shape)
    coords = encoding.decode_leading(suffix, ndim) if leading else encoding.decode(suffix, ndim)
    return None if coords is None else directory_of(path) + v3_encoding(encoding).encode(coords)


def place_to_write(key: str, places: Sequence[str]) -> str:
    """Return the place to write a value that is no v3 document."""
    if is_v2_document(key):
        raise UnsupportedError(
            f"{key!r} is a document of Zarr v2: through this store arrays and groups are created "
            "with zarr_format=3"
        )
    if not places:
        raise SpecError(
            f"{key!r} cannot be stored: {chunk_keys.DRAFT_DATA_ROOT + key!r} is the key of a chunk "
            "in the draft hierarchy"
        )
    return places[0]


def check_entry_point(doc: Mapping[str, Any] | None) -> None:
    """Refuse an entry point of another hierarchy than the draft."""
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
    _check_extensions(doc)
    attributes = document_members.attributes_of(doc)
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def group_to_draft(doc: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> Document:
    _check_members(doc, document_members.V3_GROUP_MEMBERS)
    if doc.get("consolidated_metadata") is not None:
        raise UnsupportedError(
            "the draft has no consolidated metadata: leave the group unconsolidated"
        )
    return {**(stored or {}), "attributes": document_members.attributes_of(doc)}


def array_of_draft(doc: Mapping[str, Any]) -> Document:
    _check_extensions(doc)
    if doc.get("storage_transformers"):
        raise UnsupportedError(
            f"the storage transformers {doc['storage_transformers']!r} are not known here"
        )
    attributes = document_members.attributes_of(doc)
    if attributes.get("filters"):
        # zarr-python 2.18 keeps the filters of an array there.
        raise UnsupportedError(
            f"the array has the filters {attributes['filters']!r} (in its attributes), which "
            "are not translated: read it by zarr-python 2"
        )
    with document_members.complete_document():
        data_type = data_types.parse_draft(doc["data_type"])
        grid = doc["chunk_grid"]
        shape, chunk_shape = tuple(doc["shape"]), tuple(grid["chunk_shape"])
        separator = grid.get("separator", "/")
        is_regular = grid["type"] == "regular" and len(shape) == len(chunk_shape)
        compressor = doc.get("compressor")
        if compressor is not None:
            name = str(compressor.get("codec"))
            if name.startswith(_COMPRESSORS):
                name = name.removeprefix(_COMPRESSORS).split("/")[0]
            compressor = {**(compressor.get("configuration") or {}), "id": name}
    is_known = is_regular and isinstance(separator, str)
    if not is_known or not chunk_keys.SEPARATORS["draft"].fullmatch(separator):
        raise UnsupportedError(f"the chunk grid {grid!r} is not known")
    chain = codecs.Chain(data_type, doc.get("chunk_memory_layout", "C"), compressor=compressor)
    encoding = v3_encoding(chunk_keys.ChunkKeyEncoding("draft", separator))
    geometry = metadata.Geometry(shape, chunk_shape, encoding)
    translated = codecs.v3_array(geometry, chain, doc.get("fill_value"), attributes)
    return {**translated, **_dimension_names(doc)}


def array_to_draft(doc: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> Document:
    """Translate a v3 document; members that did not change keep their stored spelling."""
    translated = _translated_array(doc)
    if stored is None:
        return translated
    try:
        before = _translated_array(array_of_draft(stored))
    except (SpecError, UnsupportedError):
        return translated  # an array that cannot be shown is another one
    names = {*before, *translated, "compressor"}
    same = {n for n in names if document_members.is_same_json(before.get(n), translated.get(n))}
    if not same.issuperset({"data_type", "chunk_grid", "chunk_memory_layout", "compressor"}):
        return translated  # an array with other chunks is another one
    kept = {n: member for n, member in stored.items() if n in same or n not in before}
    return {**kept, **{n: member for n, member in translated.items() if n not in same}}


def _translated_array(doc: Mapping[str, Any]) -> Document:
    _check_members(doc, document_members.V3_ARRAY_MEMBERS)
    if doc.get("storage_transformers"):
        raise UnsupportedError(
            "storage transformers are written by the ShardingStore below: pass chunks_per_shard="
        )
    with document_members.complete_document():
        shape = list(doc["shape"])
        grid_name, grid = transformer_list.name_and_options(doc["chunk_grid"])
        if grid_name != "regular":
            raise UnsupportedError(f"the draft has regular chunk grids only, got {grid_name!r}")
        chunk_shape = list(grid["chunk_shape"])
        encoding_name, encoding = transformer_list.name_and_options(doc["chunk_key_encoding"])
        separator = encoding.get("separator", "/")
        if encoding_name != "default" or separator not in ("/", "."):
            raise UnsupportedError(
                f"the chunk key encoding {encoding_name!r} is not the draft's: take 'default', "
                "with the separator '/' or '.'"
            )
        layout, endian, compressor = _parse_codecs(doc["codecs"], len(shape))
        data_type = data_types.parse_v3(doc["data_type"], endian)
        fill_value = data_types.fill_value_of_v3(doc["fill_value"], data_type)
    attributes = document_members.attributes_of(doc)
    if attributes.get("filters"):
        raise UnsupportedError(
            "the attribute 'filters' of an array means its filters to zarr-python 2: take "
            "another name"
        )
    translated = {
        "shape": shape,
        "data_type": data_types.draft_data_type(data_type),
        "chunk_grid": {"type": "regular", "chunk_shape": chunk_shape, "separator": separator},
        "chunk_memory_layout": layout,
        "fill_value": fill_value,
        "extensions": [],
        "attributes": attributes,
    }
    if compressor is not None:
        uri = f"{_COMPRESSORS}{compressor.pop('id')}/1.0"
        translated["compressor"] = {"codec": uri, "configuration": compressor}
    return {**translated, **_dimension_names(doc)}


def _parse_codecs(
    given: Any, ndim: int
) -> tuple[codecs.Order, data_types.Endian | None, Document | None]:
    """Return memory layout, byte order, and config of the compressor, if any."""
    names = [transformer_list.name_and_options(codec)[0] for codec in given]
    if "sharding_indexed" in names:
        raise UnsupportedError(
            "this store does the sharding: leave shards= away and pass chunks_per_shard= to the "
            "ShardingStore below"
        )
    layout, rest = codecs.split_layout(given, ndim)
    if [transformer_list.name_of(codec) for codec in rest[:1]] != ["bytes"] or len(rest) > 2:
        raise UnsupportedError(
            "the draft has a memory layout, a byte order and one compressor, which are the codecs "
            f"'transpose', 'bytes' and a compressor; got {names}"
        )
    compressor = codecs.compressor_of_codec(rest[1]) if len(rest) > 1 else None
    return layout, codecs.bytes_endian(rest[0]), compressor


def _dimension_names(doc: Mapping[str, Any]) -> Document:
    """Return the names, if any; in the draft the member may have another meaning."""
    names = doc.get("dimension_names")
    if not isinstance(names, list | tuple) or len(names) != len(doc["shape"]):
        return {}
    are_names = all(isinstance(name, str | None) for name in names)
    return {"dimension_names": list(names)} if are_names else {}


def _check_members(doc: Mapping[str, Any], known: Set[str]) -> None:
    document_members.check_members(doc, known, "the draft")
    if doc.get("zarr_format") != 3:
        raise UnsupportedError(
            f"only documents of zarr_format 3 are translated, got {doc.get('zarr_format')!r}"
        )


def _check_extensions(doc: Mapping[str, Any]) -> None:
    for extension in doc.get("extensions") or ():
        if isinstance(extension, Mapping) and extension.get("must_understand", False):
            raise UnsupportedError(f"the extension {extension!r} is not known")
