"""Change of a store's documents by `to_native` or `from_native`, planned before any I/O.

Documents are written first, the deepest node first and the root last; then documents are removed,
the root first. So each array has a whole document at every step. A reader that finds the new
format at the root finds it below.

Consolidated metadata follows. A group that becomes v3 or v2 stays consolidated if it was. Other
groups get new copies of changed documents, and lose those of nodes that change their format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.inspect.find import select_paths
from zarr_shardstore.metadata.declaration import Document
from zarr_shardstore.metadata.documents import (
    all_members,
    attributes_of,
    consolidated_v2,
    consolidated_v3,
    is_same_json,
    with_all_members,
)
from zarr_shardstore.native.translate import (
    dimension_names_of_levels,
    redeclare,
    to_ome_05,
    v2_of_v3,
    v3_of_v2,
)

_CONSOLIDATED = "consolidated_metadata"
_V2_NAMES = (".zmetadata", ".zarray", ".zgroup", ".zattrs")
_REMOVED = ("zarr.json", *_V2_NAMES)
_WRITTEN = (".zattrs", ".zmetadata", ".zarray", ".zgroup", "zarr.json")
"""Documents of one node, in order: no reader takes attributes alone for a node."""

Node = dict[str, Document]
"""Documents of one node by name."""


@dataclass(frozen=True, slots=True)
class NativeEntry:
    """Outcome for one array or group."""

    path: str
    action: Literal["translated", "skipped"]
    reason: str


class DocumentChange:
    """Change of the documents of a store, given by key, as far as it is decided."""

    def __init__(self, docs: Mapping[str, Document], paths: Iterable[str] | None) -> None:
        self.before: dict[str, Node] = {}
        for key, doc in docs.items():
            path, _, name = key.rpartition("/")
            self.before.setdefault(path, {})[name] = doc
        self.after = {path: dict(node) for path, node in self.before.items()}
        self.selected = dict.fromkeys(sorted(select_paths(set(self.before), paths)))
        self.reasons: dict[str, str] = {}

    def for_each(self, step: Callable[[str], str | None]) -> None:
        """Take a step, which returns its reason, for each selected node. Errors name the node."""
        for path in self.selected:
            try:
                reason = step(path)
            except (SpecError, UnsupportedError) as error:
                raise type(error)(f"{path or '/'!r} cannot be translated: {error}") from error
            if reason is not None:
                self.reasons[path] = reason

    def below(self, path: str, *names: str) -> dict[str, Document]:
        """Return the documents of these names, at and below a path, by key from there."""
        prefix = _join(path, "")
        return {
            key.removeprefix(prefix): doc
            for key, doc in _by_key(self.after).items()
            if key.startswith(prefix) and key.rpartition("/")[2] in names
        }

    @property
    def writes(self) -> dict[str, Document]:
        """Documents to write, in order."""
        before, after = _by_key(self.before), _by_key(self.after)
        changed = [key for key, doc in after.items() if not is_same_json(doc, before.get(key))]
        changed.sort(key=lambda k: (-k.count("/"), _WRITTEN.index(k.rpartition("/")[2])))
        return {key: after[key] for key in changed}

    @property
    def removals(self) -> list[str]:
        """Keys of documents to remove, in order."""
        gone = _by_key(self.before).keys() - _by_key(self.after).keys()
        return sorted(gone, key=lambda k: (k.count("/"), _REMOVED.index(k.rpartition("/")[2])))

    @property
    def entries(self) -> list[NativeEntry]:
        """One entry for each selected node."""
        changed = {key.rpartition("/")[0] for key in (*self.writes, *self.removals)}
        return [
            NativeEntry(path, "translated" if path in changed else "skipped", reason)
            for path, reason in sorted(self.reasons.items())
        ]


def plan_to_native(
    docs: Mapping[str, Document], paths: Iterable[str] | None, ome: bool
) -> DocumentChange:
    """Make the selected nodes v3, and sharded by the codec."""
    change = DocumentChange(docs, paths)
    change.for_each(lambda path: _make_native(change.before[path], change.after[path], ome))
    if ome:
        change.for_each(lambda path: _name_dimensions(change, path))
    _update_consolidated(change, lambda doc: _native(doc, ome))
    return change


def plan_from_native(
    docs: Mapping[str, Document], paths: Iterable[str] | None, zarr_format: Literal[2, 3]
) -> DocumentChange:
    """Make the selected nodes ones that are sharded by a transformer."""
    change = DocumentChange(docs, paths)
    step = _make_v2 if zarr_format == 2 else _make_transformed
    change.for_each(lambda path: step(change.before[path], change.after[path]))
    _update_consolidated(change, _transformed if zarr_format == 3 else dict)
    return change


# ------------------------------------------------------------------------- one node


def _make_native(before: Node, after: Node, ome: bool) -> str | None:
    reason = None
    stored, v2 = before.get("zarr.json"), _v2(before)
    if stored is not None:
        after["zarr.json"] = _native(stored, ome)
        is_changed = _is_array(stored) and after["zarr.json"] != stored
        reason = "declared by the codec" if is_changed else "native already"
    if v2 is not None:
        made = _native(v3_of_v2(*v2), ome)
        _check_same(after.setdefault("zarr.json", made), made)
    elif stored is None or not _has_all(after["zarr.json"], before.get(".zattrs"), ome):
        return reason
    # An interrupted call may have removed all documents of v2 but the attributes.
    for name in _V2_NAMES if v2 is not None else (".zattrs",):
        after.pop(name, None)
    return "v2 made v3"


def _make_transformed(before: Node, after: Node) -> str:
    stored = before.get("zarr.json")
    if stored is None:
        return "no v3 node"
    if not _is_array(stored):
        return "a group"
    after["zarr.json"] = _transformed(stored)
    is_changed = after["zarr.json"] != stored
    return "declared by a transformer" if is_changed else "no sharding codec"


def _make_v2(before: Node, after: Node) -> str:
    stored, v2 = before.get("zarr.json"), _v2(before)
    if stored is None:
        return "v2 already"
    if v2 is None:
        doc, attributes = v2_of_v3(stored)
        after[".zarray" if _is_array(stored) else ".zgroup"] = doc
        if attributes or ".zattrs" in before:
            after[".zattrs"] = attributes
    else:
        _check_same(_native(stored, ome=False), v3_of_v2(*v2))
    del after["zarr.json"]
    return "v3 made v2"


def _v2(node: Node) -> tuple[Document, Document] | None:
    """Return the v2 document of a node, and its attributes."""
    if ".zarray" in node and ".zgroup" in node:
        raise SpecError("it has both .zarray and .zgroup: remove one")
    doc = node.get(".zarray", node.get(".zgroup"))
    return None if doc is None else (doc, node.get(".zattrs", {}))


def _transformed(doc: Mapping[str, Any]) -> Document:
    return redeclare(doc, "storage_transformers")


def _native(doc: Mapping[str, Any], ome: bool) -> Document:
    if _is_array(doc):
        return redeclare(doc, "codec")
    return {**doc, "attributes": to_ome_05(attributes_of(doc))} if ome else dict(doc)


def _name_dimensions(change: DocumentChange, path: str) -> None:
    """Give the arrays of an OME-Zarr group the names of its axes."""
    group = change.after[path].get("zarr.json")
    if group is None or _is_array(group):
        return
    for level, names in dimension_names_of_levels(attributes_of(group)).items():
        below = f"{path}/{level}".strip("/")
        node = change.after[below] if below in change.selected else {}
        array = node.get("zarr.json")
        if array is None or not _is_array(array):
            continue
        if len(names) != len(array["shape"]) or array.get("dimension_names", names) != names:
            raise UnsupportedError(
                f"the axes {names} of its multiscales are not the dimensions of {below!r}"
            )
        node["zarr.json"] = {**array, "dimension_names": names}


def _check_same(stored: Document, made: Document) -> None:
    """Refuse documents of both formats unless one is the other, as an interrupted call leaves."""
    optional = (_CONSOLIDATED, "dimension_names")
    essences = [
        {k: v for k, v in doc.items() if v not in ([], {}, None) and k not in optional}
        for doc in (stored, made)
    ]
    if not is_same_json(*essences):
        raise UnsupportedError(
            "it has documents of v2 and of v3 that say different things: remove those that are "
            "wrong, or repeat the call that was interrupted with its options"
        )


def _has_all(stored: Document, left_over: Document | None, ome: bool) -> bool:
    """Return whether a v3 document has all attributes of a left-over `.zattrs` of its node."""
    if left_over is None:
        return False
    attributes = attributes_of(stored)
    if not _is_array(stored):
        left_over = to_ome_05(left_over) if ome else left_over
    elif "_ARRAY_DIMENSIONS" in left_over and stored.get("dimension_names") is not None:
        left_over = {k: v for k, v in left_over.items() if k != "_ARRAY_DIMENSIONS"}
    return all(k in attributes and is_same_json(v, attributes[k]) for k, v in left_over.items())


# ------------------------------------------------------------- consolidated metadata


def _update_consolidated(
    change: DocumentChange, translate: Callable[[Mapping[str, Any]], Document]
) -> None:
    """Bring copies of documents up to date; a copy that `translate` would change is old."""
    for path, after in change.after.items():
        before, v3 = change.before[path], after.get("zarr.json")
        if v3 is not None and v3.get("node_type") == "group":
            if ".zmetadata" in before and ".zmetadata" not in after:
                docs = change.below(path, "zarr.json")
                copies = {k.removesuffix("/zarr.json"): d for k, d in docs.items() if "/" in k}
                after["zarr.json"] = {**v3, _CONSOLIDATED: consolidated_v3(copies)}
            else:
                _update_copies(change, path, v3, translate)
        if ".zmetadata" in after and path not in change.selected:
            members = all_members(after[".zmetadata"])
            kept = {k: members[k] for k in members.keys() & change.below(path, *_V2_NAMES).keys()}
            if kept.keys() != members.keys():
                after[".zmetadata"] = with_all_members(after[".zmetadata"], kept)
        elif ".zgroup" in after and before.get("zarr.json", {}).get(_CONSOLIDATED) and v3 is None:
            copies = change.below(path, ".zgroup", ".zarray", ".zattrs")
            after[".zmetadata"] = consolidated_v2(copies)


def _update_copies(
    change: DocumentChange,
    path: str,
    group: Document,
    translate: Callable[[Mapping[str, Any]], Document],
) -> None:
    """Bring the copies in the document of a v3 group up to date."""
    copies = all_members(group)
    kept: dict[str, Any] = {}
    for name, copy in copies.items():
        node = _join(path, name)
        if node in change.selected and isinstance(copy, Mapping):
            before, after = (n[node].get("zarr.json") for n in (change.before, change.after))
            if before is not None and after is None:
                continue  # it is of v2 now
            if after is not None and (after != before or translate(copy) != copy):
                own = {k: member for k, member in after.items() if k != _CONSOLIDATED}
                copy = {**own, **{k: copy[k] for k in (_CONSOLIDATED,) if k in copy}}
        kept[name] = copy
    if kept != copies:
        change.after[path]["zarr.json"] = with_all_members(group, kept)


def _by_key(nodes: Mapping[str, Node]) -> Node:
    return {_join(path, name): doc for path, node in nodes.items() for name, doc in node.items()}


def _is_array(doc: Mapping[str, Any]) -> bool:
    return doc.get("node_type") == "array"


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
