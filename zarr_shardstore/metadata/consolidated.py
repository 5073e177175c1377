"""Consolidated metadata: copies of documents inside the document of a group.

==========  ===================  ==========================================================
format      document             array documents by name
==========  ===================  ==========================================================
v3          zarr.json of a       ``consolidated_metadata.metadata``: path below the group
            group
v2          .zmetadata           ``metadata``: key below the directory, ends with .zarray
==========  ===================  ==========================================================

Source: zarr-python 3, ``zarr.core.group.ConsolidatedMetadata``; zarr-python 2,
``zarr.convenience.consolidate_metadata``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarr_shardstore.metadata.documents import Node, node_of_document

_V2_KEY = ".zmetadata"


def directory_of_v2_consolidated(key: str) -> str | None:
    """Return the directory whose consolidated v2 metadata has this key; ``None`` for other keys."""
    path, _, name = key.rpartition("/")
    return path if name == _V2_KEY else None


def members(path: str, doc: Mapping[str, Any]) -> dict[str, tuple[Node, Mapping[str, Any]]]:
    """Return array documents by name in the consolidated metadata of the directory `path`."""
    found: dict[str, tuple[Node, Mapping[str, Any]]] = {}
    for name, member in all_members(doc).items():
        if not isinstance(member, Mapping):
            continue
        if "zarr_consolidated_format" in doc:
            node = node_of_document(_join(path, name))
            if node is not None and node.hierarchy == "v2":
                found[name] = node, member
        elif member.get("node_type") == "array":
            found[name] = Node("v3", _join(path, name)), member
    return found


def with_members(doc: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return `doc` with other array documents under some of its names."""
    return with_all_members(doc, {**all_members(doc), **changed})


def all_members(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return documents of every kind by name in the consolidated metadata of a document."""
    holder = doc if "zarr_consolidated_format" in doc else doc.get("consolidated_metadata")
    metadata = holder.get("metadata") if isinstance(holder, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}


def with_all_members(doc: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return `doc`, which has consolidated metadata, with other documents in it."""
    metadata = dict(metadata)
    if "zarr_consolidated_format" in doc:
        return {**doc, "metadata": metadata}
    return {**doc, "consolidated_metadata": {**doc["consolidated_metadata"], "metadata": metadata}}


def consolidated_v3(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the member ``consolidated_metadata`` of a v3 group, from documents by path below."""
    inner = {
        path: {**doc, "consolidated_metadata": _inline({})} if _is_group(doc) else dict(doc)
        for path, doc in sorted(metadata.items())
    }
    return _inline(inner)


def consolidated_v2(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document ``.zmetadata`` of a v2 group, from documents by key below it."""
    return {"zarr_consolidated_format": 1, "metadata": dict(sorted(metadata.items()))}


def _inline(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "inline", "must_understand": False, "metadata": metadata}


def _is_group(doc: Mapping[str, Any]) -> bool:
    return doc.get("node_type") == "group"


def _join(path: str, name: str) -> str:
    return f"{path}/{name}".strip("/")
