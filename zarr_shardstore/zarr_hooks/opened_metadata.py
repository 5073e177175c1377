"""Comparison of the metadata with which zarr has opened an array, and the stored document.

An array object may be old when it is first used: it was pickled, or kept in a variable. Meanwhile
another program may have made the array anew. Its data type, codecs or chunks are then other ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zarr.core.metadata import ArrayMetadata

from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.metadata.documents import ArrayDocument, Node, parse_array

_STABLE = "biufcmM"
"""Kinds of numpy's data types of which zarr has a stable spelling, and does not warn."""


def describes(metadata: ArrayMetadata, document: ArrayDocument) -> bool:
    """Whether metadata describes the chunks of a document, as far as both can be compared.

    Documents have several spellings of one thing. So members that differ are compared again, as
    zarr spells them.
    """
    node = document.node
    if document.geometry is None or node.hierarchy != f"v{metadata.zarr_format}":
        return True
    doc = _document_of(metadata)
    mine = _parsed(node, doc)
    if mine is None or mine.geometry is None or document.has_same_chunks(mine):
        return True
    if not mine.geometry.has_same_chunks(document.geometry):
        return False
    members = dict(document.members)
    if mine.declaration == "codec":
        (codec,) = doc["codecs"]
        inner = {**codec["configuration"], "codecs": members["codecs"]}
        members["codecs"] = [{**codec, "configuration": inner}]
    try:
        theirs = _document_of(type(metadata).from_dict({**doc, **members}))
    except Exception:  # zarr spells the fill value otherwise, and does not accept it
        return True
    other = _parsed(node, theirs)
    return other is None or mine.has_same_chunks(other)


def _document_of(metadata: Any) -> dict[str, Any]:
    """Return the members that say what the bytes of a chunk mean, as zarr spells them."""
    if metadata.zarr_format == 2:
        members = {**metadata.to_dict(), "attributes": {}}  # they may be large
    else:
        encoding, dtype = metadata.chunk_key_encoding, metadata.data_type
        members = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": metadata.shape,
            "chunk_grid": metadata.chunk_grid.to_dict(),
            "chunk_key_encoding": getattr(encoding, "above", encoding).to_dict(),
            "codecs": [codec.to_dict() for codec in metadata.codecs],
            "fill_value": dtype.to_json_scalar(metadata.fill_value, zarr_format=3),
        }
        if dtype.to_native_dtype().kind in _STABLE:
            members["data_type"] = dtype.to_json(zarr_format=3)
    document: dict[str, Any] = json.loads(json.dumps(members, default=_value_of))
    return document


def _parsed(node: Node, doc: Mapping[str, Any]) -> ArrayDocument | None:
    try:
        return parse_array(node, doc)
    except ShardStoreError:
        return None


def _value_of(member: Any) -> Any:
    return getattr(member, "value", None) or str(member)
