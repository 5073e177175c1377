"""Change of a store's documents by `to_native` or `from_native`, planned before any I/O.

A store is the parsed documents of its nodes by key. Documents are written first, the deepest
node first and the root last; then documents are removed, the root first. So each array has a
whole document at every step. A reader that finds the new format at the root finds it below.

Consolidated metadata follows. A group that becomes v3 or v2 stays consolidated if it was. Other
groups get new copies of changed documents, and lose those of nodes that change their format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.inspect.find import select_paths
from zarr_shardstore.metadata.declaration import Document, find_declaration
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

Documents = Mapping[str, Document]

_CONSOLIDATED = "consolidated_metadata"
_NODES = (".zarray", ".zgroup")
_REMOVED = ("zarr.json", ".zmetadata", *_NODES, ".zattrs")
_WRITTEN = (".zattrs", ".zmetadata", *_NODES, "zarr.json")
"""Documents of one node, in order: no reader takes attributes alone for a node."""


@dataclass(frozen=True, slots=True)
class NativeEntry:
    """Outcome for one array or group."""

    path: str
    action: Literal["translated", "skipped"]
    reason: str


class DocumentChange:
    """Change of the documents of a store, as far as it is decided."""

    def __init__(self, docs: Documents, paths: Iterable[str] | None) -> None:
        self.docs = docs
        self.after: dict[str, Document] = dict(docs)
        self.selected = sorted(select_paths({key.rpartition("/")[0] for key in docs}, paths))
        self.reasons: dict[str, str] = {}

    def v3(self, path: str) -> Document | None:
        """Return the v3 document of a node after the change."""
        return self.after.get(_join(path, "zarr.json"))

    def set_v3(self, path: str, doc: Document) -> None:
        """Write a v3 document."""
        self.after[_join(path, "zarr.json")] = doc

    def v2(self, path: str) -> tuple[Document, Document] | None:
        """Return the v2 document of a node before the change, and its attributes."""
        found = [doc for name in _NODES if (doc := self.docs.get(_join(path, name))) is not None]
        if len(found) > 1:
            raise SpecError(f"{path!r} has both .zarray and .zgroup: remove one")
        return (found[0], self.docs.get(_join(path, ".zattrs"), {})) if found else None

    def remove(self, path: str, names: Iterable[str]) -> None:
        """Remove documents of a node."""
        for name in names:
            self.after.pop(_join(path, name), None)

    @property
    def writes(self) -> dict[str, Document]:
        """Documents to write, in order."""
        changed = [k for k, doc in self.after.items() if not is_same_json(doc, self.docs.get(k))]
        changed.sort(key=lambda k: (-k.count("/"), _WRITTEN.index(k.rpartition("/")[2])))
        return {key: self.after[key] for key in changed}

    @property
    def removals(self) -> list[str]:
        """Keys of documents to remove, in order."""
        gone = [key for key in self.docs if key not in self.after]
        return sorted(gone, key=lambda k: (k.count("/"), _REMOVED.index(k.rpartition("/")[2])))

    @property
    def entries(self) -> list[NativeEntry]:
        """One entry for each selected node."""
        changed = {key.rpartition("/")[0] for key in (*self.writes, *self.removals)}
        return [
            NativeEntry(path, "translated" if path in changed else "skipped", self.reasons[path])
            for path in self.selected
            if path in self.reasons
        ]


def plan_to_native(docs: Documents, paths: Iterable[str] | None, ome: bool) -> DocumentChange:
    """Make the selected nodes v3, and sharded by the codec."""
    change = DocumentChange(docs, paths)
    for path in change.selected:
        with _naming(path):
            _make_native(change, path, ome)
    if ome:
        for path in change.selected:
            with _naming(path):
                _name_dimensions(change, path)
    _update_consolidated(change, lambda doc: _native(doc, ome))
    return change


def plan_from_native(
    docs: Documents, paths: Iterable[str] | None, zarr_format: Literal[2, 3]
) -> DocumentChange:
    """Make the selected nodes ones that are sharded by a transformer."""
    change = DocumentChange(docs, paths)
    step = _make_v2 if zarr_format == 2 else _make_transformed
    for path in change.selected:
        with _naming(path):
            step(change, path)
    _update_consolidated(change, _transformed if zarr_format == 3 else dict)
    return change


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Let errors name the node that they are about."""
    try:
        yield
    except (SpecError, UnsupportedError) as error:
        raise type(error)(f"{path or '/'!r} cannot be translated: {error}") from error


# ------------------------------------------------------------------------- one node


def _make_native(change: DocumentChange, path: str, ome: bool) -> None:
    stored, v2 = change.v3(path), change.v2(path)
    left_over = change.docs.get(_join(path, ".zattrs"))
    if stored is not None:
        is_done = not _is_array(stored) or find_declaration(stored, "passthrough") is None
        change.reasons[path] = "native already" if is_done else "declared by the codec"
        stored = _native(stored, ome)
        change.set_v3(path, stored)
    if v2 is not None:
        made = _native(v3_of_v2(*v2), ome)
        if stored is not None:
            _check_same(stored, made)
        else:
            change.set_v3(path, made)
        change.reasons[path] = "v2 made v3"
        change.remove(path, _REMOVED[1:])
    elif stored is not None and left_over is not None and _has_all(stored, left_over, ome):
        # An interrupted call removed all documents of v2 but these attributes.
        change.reasons[path] = "v2 made v3"
        change.remove(path, [".zattrs"])


def _make_transformed(change: DocumentChange, path: str) -> None:
    stored = change.v3(path)
    if stored is None:
        change.reasons[path] = "no v3 node"
    elif _is_array(stored):
        made = _transformed(stored)
        change.set_v3(path, made)
        is_changed = made != stored
        change.reasons[path] = "declared by a transformer" if is_changed else "no sharding codec"
    else:
        change.reasons[path] = "a group"


def _make_v2(change: DocumentChange, path: str) -> None:
    stored, v2 = change.v3(path), change.v2(path)
    if stored is None:
        change.reasons[path] = "v2 already"
        return
    if v2 is None:
        doc, attributes = v2_of_v3(stored)
        change.after[_join(path, ".zarray" if _is_array(stored) else ".zgroup")] = doc
        if attributes or _join(path, ".zattrs") in change.docs:
            change.after[_join(path, ".zattrs")] = attributes
    else:
        _check_same(_native(stored, ome=False), _native(v3_of_v2(*v2), ome=False))
    change.reasons[path] = "v3 made v2"
    change.remove(path, _REMOVED[:1])


def _transformed(doc: Mapping[str, Any]) -> Document:
    return redeclare(doc, "storage_transformers")


def _native(doc: Mapping[str, Any], ome: bool) -> Document:
    if _is_array(doc):
        return redeclare(doc, "codec")
    return {**doc, "attributes": to_ome_05(attributes_of(doc))} if ome else dict(doc)


def _name_dimensions(change: DocumentChange, path: str) -> None:
    """Give the arrays of an OME-Zarr group the names of its axes."""
    group = change.v3(path)
    if group is None or _is_array(group):
        return
    for level, names in dimension_names_of_levels(attributes_of(group)).items():
        below = f"{path}/{level}".strip("/")
        array = change.v3(below)
        if array is None or below not in change.selected or not _is_array(array):
            continue
        if len(names) != len(array["shape"]) or array.get("dimension_names", names) != names:
            raise UnsupportedError(
                f"the axes {names} of its multiscales are not the dimensions of {below!r}"
            )
        change.set_v3(below, {**array, "dimension_names": names})


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


def _has_all(stored: Document, left_over: Document, ome: bool) -> bool:
    """Return whether a v3 document has all attributes of the `.zattrs` of the same node."""
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
    before, after = change.docs, change.after
    own = {key: _without_copies(doc) for key, doc in after.items()}
    selected = set(change.selected)
    for key, doc in list(after.items()):
        path, _, name = key.rpartition("/")
        v3_key, v2_key = _join(path, "zarr.json"), _join(path, ".zmetadata")
        if name == "zarr.json" and doc.get("node_type") == "group":
            if v2_key in before and v2_key not in own:
                docs = _below(path, own, ("zarr.json",))
                copies = {k.removesuffix("/zarr.json"): d for k, d in docs.items() if "/" in k}
                after[key] = {**doc, _CONSOLIDATED: consolidated_v3(copies)}
            else:
                after[key] = _updated_v3(path, change, own, selected, translate)
        elif name == ".zmetadata" and path not in selected:
            kept = {n: m for n, m in all_members(doc).items() if _join(path, n) in own}
            if kept.keys() != all_members(doc).keys():
                after[key] = with_all_members(doc, kept)
        elif name == ".zgroup" and {v3_key, v2_key}.isdisjoint(own):
            was_consolidated = bool(before.get(v3_key, {}).get(_CONSOLIDATED))
            if was_consolidated:
                copies = _below(path, own, (".zgroup", ".zarray", ".zattrs"))
                after[v2_key] = consolidated_v2(copies)


def _updated_v3(
    path: str,
    change: DocumentChange,
    own: Documents,
    selected: set[str],
    translate: Callable[[Mapping[str, Any]], Document],
) -> Document:
    """Return the document of a v3 group with copies that are up to date."""
    doc = change.after[_join(path, "zarr.json")]
    copies = all_members(doc)
    kept: dict[str, Any] = {}
    for name, copy in copies.items():
        node = _join(path, name)
        key = _join(node, "zarr.json")
        before = change.docs.get(key)
        if node in selected and isinstance(copy, Mapping):
            if key not in own:
                if before is not None:
                    continue  # it is of v2 now
            elif own[key] != _without_copies(before or {}) or translate(copy) != copy:
                extra = {_CONSOLIDATED: copy[_CONSOLIDATED]} if _CONSOLIDATED in copy else {}
                copy = {**own[key], **extra}
        kept[name] = copy
    return with_all_members(doc, kept) if kept != copies else doc


def _below(path: str, docs: Documents, names: tuple[str, ...]) -> dict[str, Document]:
    """Return the documents of these names in a directory and below it, by key there."""
    prefix = _join(path, "")
    return {
        key.removeprefix(prefix): doc
        for key, doc in docs.items()
        if key.startswith(prefix) and key.rpartition("/")[2] in names
    }


def _without_copies(doc: Mapping[str, Any]) -> Document:
    return {name: member for name, member in doc.items() if name != _CONSOLIDATED}


def _is_array(doc: Mapping[str, Any]) -> bool:
    return doc.get("node_type") == "array"


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
