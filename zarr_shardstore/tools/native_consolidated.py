"""Consolidated metadata after nodes became those of another format, or are declared otherwise.

A group that becomes v3 keeps that it is consolidated, and so does one that becomes v2. In a group
that stays what it is, copies of documents that changed follow, and those of nodes that are now
of the other format are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zarr_shardstore.format.consolidated import (
    all_members,
    consolidated_v2,
    consolidated_v3,
    with_all_members,
)

__all__ = ["consolidate_again"]

Document = dict[str, Any]

_CONSOLIDATED = "consolidated_metadata"


def consolidate_again(
    before: Mapping[str, Document],
    after: dict[str, Document],
    selected: list[str],
    translate: Callable[[Mapping[str, Any]], Document],
) -> None:
    """Bring the copies of documents in `after` up to date, in place.

    Parameters
    ----------
    before, after
        Documents by key.
    selected
        Paths of the nodes that were looked at.
    translate
        What makes of a v3 document the one that is wanted: a copy for which it makes another
        one is old.
    """
    chosen = set(selected)
    own = {key: _without(doc) for key, doc in after.items()}
    for key in list(after):
        path, _, name = key.rpartition("/")
        if name == "zarr.json" and after[key].get("node_type") == "group":
            after[key] = _v3_group(path, before, own, after[key], chosen, translate)
        elif name == ".zmetadata" and all_members(after[key]):
            kept = {n: m for n, m in all_members(after[key]).items() if _join(path, n) in own}
            if path not in chosen and kept.keys() != all_members(after[key]).keys():
                after[key] = with_all_members(after[key], kept)
        elif name == ".zgroup" and _lost_copies(path, before, own):
            below = {k.removeprefix(_join(path, "")): d for k, d in own.items() if _is_v2(path, k)}
            after[_join(path, ".zmetadata")] = consolidated_v2(below)


def _v3_group(
    path: str,
    before: Mapping[str, Document],
    own: Mapping[str, Document],
    doc: Document,
    chosen: set[str],
    translate: Callable[[Mapping[str, Any]], Document],
) -> Document:
    v2_key = _join(path, ".zmetadata")
    if v2_key in before and v2_key not in own:
        prefix = _join(path, "")
        below = {
            k.removeprefix(prefix).removesuffix("/zarr.json"): d
            for k, d in own.items()
            if k.startswith(prefix) and k.endswith("/zarr.json")
        }
        return {**doc, _CONSOLIDATED: consolidated_v3(below)}
    copies = all_members(doc)
    kept: dict[str, Any] = {}
    for name, copy in copies.items():
        place = _join(_join(path, name), "zarr.json")
        is_old = _join(path, name) in chosen and isinstance(copy, Mapping)
        if is_old and place not in own:
            if place in before:
                continue  # it is of v2 now
        elif is_old and (own[place] != _without(before.get(place, {})) or translate(copy) != copy):
            extra = {_CONSOLIDATED: copy[_CONSOLIDATED]} if _CONSOLIDATED in copy else {}
            copy = {**own[place], **extra}
        kept[name] = copy
    return with_all_members(doc, kept) if kept != copies else doc


def _lost_copies(path: str, before: Mapping[str, Document], own: Mapping[str, Document]) -> bool:
    """Whether a v2 group was a consolidated v3 group, and is not consolidated itself."""
    v3, v2 = _join(path, "zarr.json"), _join(path, ".zmetadata")
    return v3 not in own and v2 not in own and bool(before.get(v3, {}).get(_CONSOLIDATED))


def _is_v2(path: str, key: str) -> bool:
    name = key.rpartition("/")[2]
    return key.startswith(_join(path, "")) and name in (".zgroup", ".zarray", ".zattrs")


def _without(doc: Mapping[str, Any]) -> Document:
    return {name: member for name, member in doc.items() if name != _CONSOLIDATED}


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
