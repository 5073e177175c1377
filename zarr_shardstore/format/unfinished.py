"""The document of an array whose stored objects are being replaced: every reader refuses it.

==========  ==============================================================================
hierarchy   what no reader knows, and names in its error
==========  ==============================================================================
v3          the only codec
v2          the last filter
draft       the only storage transformer
==========  ==============================================================================

Source: Zarr v3 core, "Extension points"; Zarr v2, "Metadata" (filters); readers.md has what
each reader does with a codec that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarr_shardstore.errors import UnfinishedConversionError

__all__ = ["check_finished", "is_unfinished", "unfinished"]

_NAME = "zarr_shardstore.unfinished_conversion"
_MESSAGE = "the array is being converted: run the same command again to finish it"


def unfinished(doc: Mapping[str, Any]) -> dict[str, Any]:
    """The document of an array while its objects are neither the old nor the new ones."""
    if doc.get("zarr_format") == 2:
        filters = [*(doc.get("filters") or ()), {"id": _NAME, "message": _MESSAGE}]
        return {**doc, "filters": filters}
    mark = {"name": _NAME, "configuration": {"message": _MESSAGE}}
    if "node_type" in doc:
        return {**doc, "codecs": [mark], "storage_transformers": []}
    mark |= {"extension": _NAME, "type": "unfinished"}  # as zarr-python 2.18 spells one
    return {**doc, "storage_transformers": [mark]}


def is_unfinished(doc: Mapping[str, Any]) -> bool:
    """Whether `unfinished` made the document."""
    lists = (doc.get("filters"), doc.get("codecs"), doc.get("storage_transformers"))
    return any(
        isinstance(item, Mapping) and _NAME in (item.get("name"), item.get("id"))
        for items in lists
        if isinstance(items, list)
        for item in items
    )


def check_finished(path: str, doc: Mapping[str, Any]) -> None:
    """Refuse an array whose objects are being replaced.

    Raises
    ------
    UnfinishedConversionError
        With what to do.
    """
    if is_unfinished(doc):
        raise UnfinishedConversionError(
            f"the array {path!r} is being converted, or a conversion was interrupted: wait for it, "
            "or run that command again, which finishes it; nothing is lost"
        )
