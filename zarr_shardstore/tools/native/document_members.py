"""Members of the documents that are translated: which are known, and how they are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from zarr_shardstore.errors import SpecError, UnsupportedError

_V3_MEMBERS = frozenset({"zarr_format", "node_type", "attributes"})
_OF_CHUNKS = {"shape", "chunk_grid", "chunk_key_encoding", "data_type", "fill_value", "codecs"}
V3_ARRAY_MEMBERS = _V3_MEMBERS | _OF_CHUNKS | {"dimension_names", "storage_transformers"}
V3_GROUP_MEMBERS = _V3_MEMBERS | {"consolidated_metadata"}
"""Members of v3 documents that are known here."""


def is_same_json(one: Any, other: Any) -> bool:
    """Return whether both are the same JSON; Python takes ``1``, ``1.0`` and ``true`` for equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def attributes_of(doc: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes in a document of v3 or of the draft."""
    attributes = doc.get("attributes") or {}
    if not isinstance(attributes, Mapping):
        raise SpecError(f"attributes are an object, got {attributes!r}")
    return dict(attributes)


def check_members(doc: Mapping[str, Any], known: Set[str], target: str) -> None:
    """Refuse a document with members that the target of its translation has not."""
    unknown = sorted(doc.keys() - known)
    if unknown:
        raise UnsupportedError(
            f"{target} has no place for the members {unknown}: remove them if they are not needed"
        )


@contextmanager
def complete_document() -> Iterator[None]:
    """Raise `SpecError` where an array document lacks a member, or has one of another type."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"the array document is not complete: {error!r}") from error


def consolidated_v3(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the member ``consolidated_metadata`` of a v3 group, from documents by path below."""
    empty = {"kind": "inline", "must_understand": False, "metadata": {}}
    copies = {
        path: {**doc, "consolidated_metadata": empty} if doc.get("node_type") == "group" else doc
        for path, doc in sorted(metadata.items())
    }
    return {**empty, "metadata": copies}
