"""Which documents `to_native` and `from_native` write and remove: decided before either.

Nothing here does I/O. A store is the parsed documents of its nodes by key. What is written comes
first, the deepest node first and the root last; then what is removed, the root first. So at
every step each array has a whole document, and who finds the new format at the root finds it
everywhere below.

Consolidated metadata after nodes became those of another format, or are declared otherwise.

A group that becomes v3 keeps that it is consolidated, and so does one that becomes v2. In a group
that stays what it is, copies of documents that changed follow, and those of nodes that are now
of the other format are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.inspect.find import select_paths
from zarr_shardstore.metadata.consolidated import (
    all_members,
    consolidated_v2,
    consolidated_v3,
    with_all_members,
)
from zarr_shardstore.metadata.declaration import find_declaration
from zarr_shardstore.native.ome import dimension_names_of_levels, to_ome_05
from zarr_shardstore.native.translate import (
    array_of_v2,
    array_to_v2,
    attributes_of,
    declared_by_codec,
    declared_by_transformers,
    group_of_v2,
    group_to_v2,
)

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


Document = dict[str, Any]
Documents = Mapping[str, Document]

_NODES = (".zarray", ".zgroup")
_REMOVED = ("zarr.json", ".zmetadata", *_NODES, ".zattrs")
_WRITTEN = (".zattrs", ".zmetadata", *_NODES, "zarr.json")
"""Documents of one node, in order: attributes alone are found by nobody."""


@dataclass(frozen=True, slots=True)
class NativeEntry:
    """What is done about one array or group."""

    path: str
    action: Literal["translated", "skipped"]
    reason: str


class DocumentChange:
    """A change of the documents of a store, as far as it is decided."""

    def __init__(self, docs: Documents, paths: Iterable[str] | None) -> None:
        self.docs = docs
        self.after: dict[str, Document] = dict(docs)
        self.nodes = sorted({key.rpartition("/")[0] for key in docs})
        self.selected = sorted(select_paths(self.nodes, paths))
        self.reasons: dict[str, str] = {}

    def v3(self, path: str) -> Document | None:
        """The v3 document of a node as it will be."""
        return self.after.get(_key(path, "zarr.json"))

    def set_v3(self, path: str, doc: Document) -> None:
        """Write a v3 document."""
        self.after[_key(path, "zarr.json")] = doc

    def v2(self, path: str) -> tuple[Document, Document] | None:
        """The v2 document of a node as it is stored, and its attributes."""
        found = [doc for name in _NODES if (doc := self.docs.get(_key(path, name))) is not None]
        if len(found) > 1:
            raise SpecError(f"{path!r} has both .zarray and .zgroup: remove one")
        return (found[0], self.docs.get(_key(path, ".zattrs"), {})) if found else None

    def remove(self, path: str, names: Iterable[str]) -> None:
        """Remove documents of a node."""
        for name in names:
            self.after.pop(_key(path, name), None)

    @property
    def writes(self) -> dict[str, Document]:
        """Documents to write, in order."""
        changed = [k for k, doc in self.after.items() if not _is_same(doc, self.docs.get(k))]
        changed.sort(key=lambda k: (-_depth(k), _WRITTEN.index(k.rpartition("/")[2])))
        return {key: self.after[key] for key in changed}

    @property
    def removals(self) -> list[str]:
        """Keys of documents to remove, in order."""
        gone = [key for key in self.docs if key not in self.after]
        return sorted(gone, key=lambda k: (_depth(k), _REMOVED.index(k.rpartition("/")[2])))

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
    """What makes the selected nodes v3, and sharded by the codec.

    Raises
    ------
    SpecError, UnsupportedError
        If a document is not valid, or v3 cannot express it; the message names the node.
    """
    change = DocumentChange(docs, paths)
    for path in change.selected:
        with _naming(path):
            _make_native(change, path, ome)
    if ome:
        for path in change.selected:
            with _naming(path):
                _name_dimensions(change, path)
    consolidate_again(change.docs, change.after, change.selected, lambda d: _native(d, ome))
    return change


def plan_from_native(
    docs: Documents, paths: Iterable[str] | None, zarr_format: Literal[2, 3]
) -> DocumentChange:
    """What makes the selected nodes ones that are sharded by a transformer.

    Raises
    ------
    SpecError, UnsupportedError
        If a document is not valid, or the format cannot express it; the message names the node.
    """
    change = DocumentChange(docs, paths)
    step = _make_v2 if zarr_format == 2 else _make_transformed
    for path in change.selected:
        with _naming(path):
            step(change, path)
    again = declared_by_transformers if zarr_format == 3 else dict
    consolidate_again(change.docs, change.after, change.selected, again)
    return change


def _make_native(change: DocumentChange, path: str, ome: bool) -> None:
    stored, v2 = change.v3(path), change.v2(path)
    left_over = change.docs.get(_key(path, ".zattrs"))
    if stored is not None:
        is_done = not _is_array(stored) or find_declaration(stored, "passthrough") is None
        change.reasons[path] = "native already" if is_done else "declared by the codec"
        stored = _native(stored, ome)
        change.set_v3(path, stored)
    if v2 is not None:
        made = _native(_of_v2(*v2), ome)
        if stored is not None:
            _check_same(stored, made)
        else:
            change.set_v3(path, made)
        change.reasons[path] = "v2 made v3"
        change.remove(path, _REMOVED[1:])
    elif stored is not None and left_over is not None and _says(stored, left_over, ome):
        change.reasons[path] = "v2 made v3"  # all but these attributes, before
        change.remove(path, [".zattrs"])


def _make_transformed(change: DocumentChange, path: str) -> None:
    stored = change.v3(path)
    if stored is None:
        change.reasons[path] = "no v3 node"
    elif _is_array(stored):
        made = declared_by_transformers(stored)
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
        is_array = _is_array(stored)
        doc, attributes = array_to_v2(stored) if is_array else group_to_v2(stored)
        change.after[_key(path, ".zarray" if is_array else ".zgroup")] = doc
        if attributes or _key(path, ".zattrs") in change.docs:
            change.after[_key(path, ".zattrs")] = attributes
    else:
        _check_same(_native(stored, False), _native(_of_v2(*v2), False))
    change.reasons[path] = "v3 made v2"
    change.remove(path, _REMOVED[:1])


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Let errors name the node that they are about."""
    try:
        yield
    except (SpecError, UnsupportedError) as error:
        raise type(error)(f"{path or '/'!r} cannot be translated: {error}") from error


def _of_v2(doc: Document, attributes: Document) -> Document:
    translate = array_of_v2 if "shape" in doc else group_of_v2
    return translate(doc, attributes)


def _native(doc: Mapping[str, Any], ome: bool) -> Document:
    if _is_array(doc):
        return declared_by_codec(doc)
    return {**doc, "attributes": to_ome_05(attributes_of(doc))} if ome else dict(doc)


def _name_dimensions(change: DocumentChange, path: str) -> None:
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
    if not _is_same(_essence(stored), _essence(made)):
        raise UnsupportedError(
            "it has documents of v2 and of v3 that say different things: remove those that are "
            "wrong, or repeat the call that was interrupted with its options"
        )


def _essence(doc: Document) -> Document:
    """A v3 document without what may be left out, or be added to it."""
    essence = {k: v for k, v in doc.items() if v not in ([], {}, None)}
    essence.pop("consolidated_metadata", None)
    essence.pop("dimension_names", None)
    return essence


def _says(stored: Document, left_over: Document, ome: bool) -> bool:
    """Whether a v3 document has all attributes that stand in a `.zattrs` beside it."""
    attributes = attributes_of(stored)
    if not _is_array(stored):
        left_over = to_ome_05(left_over) if ome else left_over
    elif "_ARRAY_DIMENSIONS" in left_over and stored.get("dimension_names") is not None:
        left_over = {k: v for k, v in left_over.items() if k != "_ARRAY_DIMENSIONS"}
    return all(k in attributes and _is_same(v, attributes[k]) for k, v in left_over.items())


def _is_array(doc: Mapping[str, Any]) -> bool:
    return doc.get("node_type") == "array"


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are the same JSON; Python holds ``1``, ``1.0`` and ``true`` for equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _key(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _depth(key: str) -> int:
    return key.count("/")
