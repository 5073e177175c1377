"""One node for readers of a format, with plain chunks: its documents, and their chunk keys.

Nothing is written: servers and references show a stored node in this form. The bytes of its chunks
are the same. A v3 array with the chunk keys ``c/0/1`` has the keys ``0/1`` in v2; in all other
cases the keys are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from zarr_shardstore.access import chunk_keys, declarations, metadata
from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.tools.native.translate import v2_of_v3, v3_of_v2

ZarrFormat = Literal[2, 3]


def documents_in(
    zarr_format: ZarrFormat | None, doc: Mapping[str, Any], attributes: Mapping[str, Any]
) -> dict[str, declarations.Document]:
    """Return the documents of an array or a group in a format, by name; ``None``: in its own.

    `doc` is ``zarr.json``, ``.zarray`` or ``.zgroup``, as it is stored or as users see it, and
    `attributes` is ``.zattrs``. Raises `UnsupportedError` if the format cannot say what it says.
    """
    is_v3 = declarations.format_of(doc) == "v3"
    is_array = doc.get("node_type") == "array" if is_v3 else "shape" in doc
    plain = _without_shards(doc) if is_array else dict(doc)
    if (zarr_format or (3 if is_v3 else 2)) == 3:
        return {"zarr.json": plain if is_v3 else v3_of_v2(plain, attributes)}
    if is_v3:
        plain, attributes = _v2_of_v3(plain)
    name = ".zarray" if is_array else ".zgroup"
    return {name: plain} | ({".zattrs": dict(attributes)} if attributes else {})


def encoding_in(
    zarr_format: ZarrFormat | None, encoding: chunk_keys.ChunkKeyEncoding
) -> chunk_keys.ChunkKeyEncoding:
    """Return the spelling of the chunk keys of a stored array in a format."""
    return chunk_keys.ChunkKeyEncoding("v2", encoding.separator) if zarr_format == 2 else encoding


def _without_shards(doc: Mapping[str, Any]) -> declarations.Document:
    declared = declarations.find_declaration(doc)
    plain = doc if declared is None else declarations.strip(doc, declared.how)
    return dict(declarations.without_mark(metadata.without_notes(plain)))


def _v2_of_v3(doc: declarations.Document) -> tuple[declarations.Document, declarations.Document]:
    if declarations.has_sharding_codec(doc):
        raise UnsupportedError("its chunks are shards themselves, which v2 has not: take v3")
    geometry = metadata.plain_geometry("v3", doc)
    if geometry is not None:
        separator = geometry.encoding.separator
        encoding = {"name": "v2", "configuration": {"separator": separator}}
        doc = {**doc, "chunk_key_encoding": encoding}
    translated, attributes = v2_of_v3(doc)
    if translated.get("fill_value") is None and "dimension_names" in doc:
        # A null stands for zero, but zarr 2 leaves missing chunks as they happen to be in memory.
        unnamed = {name: value for name, value in doc.items() if name != "dimension_names"}
        translated["fill_value"] = v2_of_v3(unnamed)[0]["fill_value"]
    return translated, attributes
