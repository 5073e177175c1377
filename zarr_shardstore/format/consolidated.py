"""Consolidated metadata: array documents that are kept inside another document.

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

from zarr_shardstore.format.documents import Node, node_of_document

__all__ = ["directory_of_v2_consolidated", "members", "with_members"]

_V2_KEY = ".zmetadata"


def directory_of_v2_consolidated(key: str) -> str | None:
    """Path of the directory whose consolidated v2 metadata has this key; ``None`` for any other."""
    path, _, name = key.rpartition("/")
    return path if name == _V2_KEY else None


def members(path: str, doc: Mapping[str, Any]) -> dict[str, tuple[Node, Mapping[str, Any]]]:
    """Array documents by name in the consolidated metadata of the directory `path`."""
    found: dict[str, tuple[Node, Mapping[str, Any]]] = {}
    for name, member in _metadata(doc).items():
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
    """`doc` with other array documents under some of its names."""
    metadata = {**_metadata(doc), **changed}
    if "zarr_consolidated_format" in doc:
        return {**doc, "metadata": metadata}
    return {**doc, "consolidated_metadata": {**doc["consolidated_metadata"], "metadata": metadata}}


def _metadata(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    holder = doc if "zarr_consolidated_format" in doc else doc.get("consolidated_metadata")
    metadata = holder.get("metadata") if isinstance(holder, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}


def _join(path: str, name: str) -> str:
    return f"{path}/{name}".strip("/")
