"""`to_native`, `from_native`: sharded arrays for every v3 reader, and back.

Only metadata documents change (decision 14), all planned before any write. Documents are written
first, the deepest node first and the root last; then documents are removed, the root first. So each
array has a whole document at every step. A reader that finds the new format at the root finds it
below.

Consolidated metadata follows. A consolidated group that becomes v3 or v2 stays consolidated. Other
groups get new copies of changed documents, and lose copies of nodes that change their format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from posixpath import join
from typing import Any, Literal, TypeAlias

from zarr_shardstore.access import (
    BaseStoreHandle,
    StoreLike,
    declarations,
    invalidate_documents,
    metadata,
    open_base,
    requests,
)
from zarr_shardstore.errors import SpecError, UnfinishedConversionError, UnsupportedError
from zarr_shardstore.tools.inspect.find import (
    check_copies_above,
    find_contents,
    lineage,
    quoted,
    select_paths,
)
from zarr_shardstore.tools.inspect.readers import read_by, summarize
from zarr_shardstore.tools.native import document_members, translate

Document: TypeAlias = declarations.Document
Node: TypeAlias = dict[str, Document]
"""Documents of one node by name."""

_CONSOLIDATED = "consolidated_metadata"
_V2_NAMES = (".zmetadata", ".zarray", ".zgroup", ".zattrs")
_REMOVED = ("zarr.json", *_V2_NAMES)
_WRITTEN = (".zattrs", ".zmetadata", ".zarray", ".zgroup", "zarr.json")
"""Documents of one node, in order: no reader takes attributes alone for a node."""


@dataclass(frozen=True, slots=True)
class NativeEntry:
    """Outcome for one array or group; `read_by` names the programs that read an array now."""

    path: str
    action: Literal["translated", "skipped"]
    reason: str
    read_by: str = ""


@dataclass(frozen=True, slots=True)
class NativeReport:
    """Changes that `to_native` or `from_native` made; of a dry run, the expected changes.

    There is one entry for each array and group that was asked for. `notes` are hints for the user.
    """

    entries: tuple[NativeEntry, ...]
    n_documents_written: int
    n_documents_removed: int
    dry_run: bool
    notes: tuple[str, ...] = ()

    @property
    def read_by(self) -> str:
        """Programs that read the arrays; if they differ, with the number of arrays of each."""
        return summarize(entry.read_by for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return {**asdict(self), "read_by": self.read_by}

    def __str__(self) -> str:
        n_translated = sum(entry.action == "translated" for entry in self.entries)
        return (
            f"{'would translate' if self.dry_run else 'translated'} {n_translated} of "
            f"{len(self.entries)} nodes: {self.n_documents_written} documents written, "
            f"{self.n_documents_removed} removed, no data touched\nread by: {self.read_by}"
        )


def to_native(
    store: StoreLike,
    *,
    paths: Iterable[str] | None = None,
    ome: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> NativeReport:
    """Make every Zarr v3 reader read a store, by its metadata documents alone.

    Arrays that are sharded by a storage transformer get the ``sharding_indexed`` codec. Groups
    and arrays of Zarr v2, sharded or not, get v3 documents in place of their own. If one document
    cannot be translated, nothing is written. The same call finishes an interrupted call.

    Parameters
    ----------
    store
        Any store that `ShardingStore` wraps.
    paths
        Arrays, groups with all below them, or patterns of these (``"raw/*"``); ``None``: all.
    ome : bool
        Turn OME-Zarr 0.4 attributes into 0.5.
    storage_options
        For a URL.
    dry_run : bool
        Report what would be done; write nothing.

    Raises
    ------
    UnsupportedError
        If v3 cannot express an array; the message names it. Also for a draft hierarchy.
    SpecError
        If a document is not valid, or a path names nothing.
    ReadOnlyError
        If the store refuses writes.

    Notes
    -----
    No other program may change metadata during the call. Open arrays, and open stores of other
    processes, must be opened again after it.

    Cost: the requests that find the arrays, and one for each document that is read, written or
    removed. Documents of one name and depth share a round.

    Examples
    --------
    >>> import zarr
    >>> from zarr_shardstore import ShardingStore
    >>> base = zarr.storage.MemoryStore()
    >>> z = zarr.create_array(
    ...     ShardingStore(base, chunks_per_shard=2), shape=4, chunks=1, dtype="u1", zarr_format=2
    ... )
    >>> z[:] = [1, 2, 3, 4]
    >>> print(to_native(base))
    translated 1 of 1 nodes: 1 documents written, 2 removed, no data touched
    read by: every v3 reader
    >>> native = zarr.open_array(base, mode="r")
    >>> native.shards, native[:]
    ((2,), array([1, 2, 3, 4], dtype=uint8))
    """
    base = open_base(store, storage_options)
    if not dry_run:
        base.check_writable()
    return native_change(base, paths, ome=ome).make(base, dry_run=dry_run)


def native_change(
    base: BaseStoreHandle, paths: Iterable[str] | str | None, *, ome: bool, above: bool = False
) -> DocumentChange:
    """Plan `to_native`; groups above: all if `above`, else those of which no node stays v2."""
    change = DocumentChange(base.run(_read_documents()), paths)
    groups = {group for path in change.selected for group in lineage(path)} & change.before.keys()
    if not above:
        of_v2 = {path for path, node in change.before.items() if {*_V2_NAMES} & node.keys()}
        groups &= of_v2 - {group for path in of_v2 - groups for group in lineage(path)}
    change.selected |= dict.fromkeys(sorted(groups))
    change.for_each(lambda path: _make_native(change.before[path], change.after[path], ome))
    if ome:
        change.way_back += " and ome=True"
        change.for_each(partial(change.name_dimensions, names_them=True))
    elif found := [path or "/" for path in change.selected if _is_old_ome(change.after[path])]:
        change.notes += (
            f"OME-Zarr 0.4 metadata stays in {quoted(found)}, where OME readers of Zarr v3 do not "
            "look for it: ome=True (--ome), also of a later to_native, makes it 0.5",
        )
    change.update_consolidated()
    return change


def from_native(
    store: StoreLike,
    *,
    paths: Iterable[str] | None = None,
    zarr_format: Literal[2, 3] = 3,
    ome: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> NativeReport:
    """Declare natively sharded arrays by a storage transformer; the inverse of `to_native`.

    With ``zarr_format=3``, arrays of the ``sharding_indexed`` codec are declared by
    ``storage_transformers``, and every other reader refuses them. With ``zarr_format=2``, groups
    and arrays of v3 get v2 documents, with our marker where they are sharded; their chunk keys
    must be v2's already. With `ome` OME-Zarr 0.5 attributes become 0.4 there. Arrays then have no
    dimension names that are those of the axes, unless xarray wrote them. `to_native` has the
    parameters, errors and notes.
    """
    if zarr_format not in (2, 3):
        raise SpecError(f"zarr_format is 2 or 3, got {zarr_format!r}")
    if ome and zarr_format == 3:
        raise SpecError("ome=True (--ome) goes with zarr_format=2: OME-Zarr 0.4 is Zarr v2")
    step = partial(_make_v2, ome=ome) if zarr_format == 2 else _make_transformed
    base = open_base(store, storage_options)
    if not dry_run:
        base.check_writable()
    change = DocumentChange(base.run(_read_documents()), paths)
    if ome:
        change.for_each(partial(change.name_dimensions, names_them=False))
    change.for_each(lambda path: step(change.before[path], change.after[path]))
    if zarr_format == 2 and (
        found := [p or "/" for p in change.selected if "ome" in change.after[p].get(".zattrs", {})]
    ):
        change.notes += (
            f"OME-Zarr 0.5 metadata stays in {quoted(found)}, where OME readers of Zarr v2 do not "
            "look for it: ome=True (--ome) makes it 0.4",
        )
    change.update_consolidated()
    return change.make(base, dry_run=dry_run)


def _read_documents() -> requests.Flow[dict[str, Document]]:
    """Return all documents of the nodes of a store, by key."""
    found = yield from find_contents()
    docs = {metadata.document_key(node): dict(array.doc) for node, array in found.arrays.items()}
    others = {key for key in found.other_keys if key.rpartition("/")[2] in _REMOVED}
    # The directory of an array is not listed.
    others |= {join(key.rpartition("/")[0], ".zattrs") for key in docs}
    keys = sorted(others - docs.keys())
    replies: list[requests.Found] = yield [requests.Get(key) for key in keys]
    for key, reply in zip(keys, replies, strict=True):
        if reply.value is None:
            continue
        doc = metadata.parse_json(reply.value)
        if doc is None:
            raise SpecError(f"{key!r} is no document, because it is no JSON object")
        docs[key] = doc
    is_draft = any(node.hierarchy == "draft" for node in found.arrays)
    if is_draft or any(str(d.get("zarr_format", "")).startswith("https://") for d in docs.values()):
        raise UnsupportedError(
            "the store is a draft hierarchy of 2022, whose keys, such as 'data/root/foo/c0/0', are "
            "not those of Zarr v3: copy its arrays into a v3 store, reading it by "
            "DraftHierarchyStore"
        )
    return docs


def _round_of(key: str) -> tuple[int, str]:
    """Return depth and name: documents with the same ones are written in one round."""
    return key.count("/"), key.rpartition("/")[2]


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
        self.notes: tuple[str, ...] = ()
        self.way_back = (
            "the way back: unshard_store, then from_native (from-native) with zarr_format=2"
        )

    def make(self, base: BaseStoreHandle, *, dry_run: bool) -> NativeReport:
        """Write and remove documents, unless it is a dry run."""
        before, after = documents_by_key(self.before), documents_by_key(self.after)
        is_same = document_members.is_same_json
        writes = [key for key, doc in after.items() if not is_same(doc, before.get(key))]
        writes.sort(key=lambda key: (-key.count("/"), _WRITTEN.index(key.rpartition("/")[2])))
        removals = [key for key in before if key not in after]
        removals.sort(key=lambda key: (key.count("/"), _REMOVED.index(key.rpartition("/")[2])))
        changed = {key.rpartition("/")[0] for key in (*writes, *removals)}
        entries = [
            NativeEntry(
                path,
                "translated" if path in changed else "skipped",
                reason,
                read_by(doc for doc in self.after[path].values() if "shape" in doc),
            )
            for path, reason in self.reasons.items()
        ]
        if writes or removals:
            check_copies_above(base)
        if not dry_run and (writes or removals):
            if removals:
                base.try_to_remove()
            base.check_replaceable()
            try:
                for _, keys in groupby(writes, key=_round_of):
                    base.write_documents({key: after[key] for key in keys})
                for _, keys in groupby(removals, key=_round_of):
                    base.perform([requests.Delete(key) for key in keys])
            finally:
                invalidate_documents()  # other stores read documents again
        return NativeReport(tuple(entries), len(writes), len(removals), dry_run, self.notes)

    @property
    def of_v2(self) -> list[str]:
        """Paths of arrays of v2 that become v3."""
        stay = {path for path, node in self.after.items() if ".zarray" in node}
        return sorted({path for path, node in self.before.items() if ".zarray" in node} - stay)

    def for_each(self, step: Callable[[str], str | None]) -> None:
        """Take a step, which returns its reason, for each selected node; errors name the node."""
        for path in self.selected:
            if any(map(metadata.has_conversion_marker, self.before[path].values())):
                raise UnfinishedConversionError(
                    f"a conversion of {path or '/'!r} in place was interrupted; no document was "
                    "changed: run it again first, `zarr-shardstore info` names the command"
                )
            try:
                if reason := step(path):
                    self.reasons[path] = reason
            except (SpecError, UnsupportedError) as error:
                raise type(error)(f"{path or '/'!r} cannot be translated: {error}") from error

    def _below(self, path: str, *names: str) -> dict[str, Document]:
        """Return the documents of these names at and below a path, by key from there."""
        prefix = join(path, "")
        return {
            key.removeprefix(prefix): doc
            for key, doc in documents_by_key(self.after).items()
            if key.startswith(prefix) and key.rpartition("/")[2] in names
        }

    def name_dimensions(self, path: str, *, names_them: bool) -> None:
        """Give the arrays of an OME-Zarr group the names of its axes, or take these away."""
        at = self.after[path]  # its zarr.json may be gone after an interrupted call
        group = at.get("zarr.json", {"attributes": at.get(".zattrs")})
        if ".zarray" in at or _is_array(group):
            return
        levels = translate.dimension_names_of_levels(document_members.attributes_of(group))
        for level, names in levels.items():
            below = f"{path}/{level}".strip("/")
            node = self.after[below] if below in self.selected else {}
            array = node.get("zarr.json")
            if array is None or not _is_array(array):
                continue
            if not names_them:
                attributes = document_members.attributes_of(array)
                of_xarray = "_FillValue" in attributes or translate.NAMES in attributes
                if array.get("dimension_names") == names and not of_xarray:
                    node["zarr.json"] = {k: v for k, v in array.items() if k != "dimension_names"}
                continue
            if len(names) != len(array["shape"]) or array.get("dimension_names", names) != names:
                raise UnsupportedError(
                    f"the axes {names} of its multiscales are not the dimensions of {below!r}"
                )
            node["zarr.json"] = {**array, "dimension_names": names}

    def update_consolidated(self) -> None:
        """Update copies of documents."""
        for path, after in self.after.items():
            before, v3 = self.before[path], after.get("zarr.json")
            if v3 is not None and v3.get("node_type") == "group":
                if ".zmetadata" in before and ".zmetadata" not in after:
                    docs = self._below(path, "zarr.json")
                    copies = {k.removesuffix("/zarr.json"): d for k, d in docs.items() if "/" in k}
                    member = document_members.consolidated_v3(copies)
                    after["zarr.json"] = {**v3, _CONSOLIDATED: member}
                else:
                    after["zarr.json"] = self._with_copies(path, v3)
            if ".zmetadata" in after and path not in self.selected:
                members = metadata.all_members(after[".zmetadata"]).keys()
                gone = dict.fromkeys(members - self._below(path, *_V2_NAMES).keys())
                after[".zmetadata"] = metadata.with_members(after[".zmetadata"], gone)
            elif (
                ".zgroup" in after and v3 is None and before.get("zarr.json", {}).get(_CONSOLIDATED)
            ):
                copies = dict(sorted(self._below(path, ".zgroup", ".zarray", ".zattrs").items()))
                after[".zmetadata"] = {"zarr_consolidated_format": 1, "metadata": copies}

    def _with_copies(self, path: str, group: Document) -> Document:
        """Return the document of a v3 group with copies that are up to date."""
        changed: dict[str, Document | None] = {}
        for name, copy in metadata.all_members(group).items():
            node = join(path, name)
            if node in self.selected and isinstance(copy, Mapping):
                before, after = (n[node].get("zarr.json") for n in (self.before, self.after))
                if after is None and before is not None:
                    changed[name] = None  # it is of v2 now
                elif after is not None:
                    own = {k: member for k, member in after.items() if k != _CONSOLIDATED}
                    own |= {k: copy[k] for k in (_CONSOLIDATED,) if k in copy}
                    if not document_members.is_same_json(own, copy):
                        changed[name] = own
        return metadata.with_members(group, changed) if changed else group


def _is_old_ome(after: Node) -> bool:
    """Whether a node is one of v3 with the attributes of OME-Zarr 0.4."""
    return translate.is_ome_04(document_members.attributes_of(after.get("zarr.json", {})))


def _make_native(before: Node, after: Node, ome: bool) -> str | None:
    reason, stored, v2 = None, before.get("zarr.json"), _v2(before)
    if stored is not None:
        after["zarr.json"] = _native(stored, ome)
        is_changed = _is_array(stored) and after["zarr.json"] != stored
        reason = "declared by the codec" if is_changed else "native already"
    if v2 is not None:
        made = _native(translate.v3_of_v2(*v2), ome)
        if ome and _is_array(made) and translate.NAMES in v2[1]:  # the way back leaves attributes
            made["attributes"] = {**made["attributes"], translate.NAMES: v2[1][translate.NAMES]}
        _check_same(after.setdefault("zarr.json", made), made, "dimension_names")
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
    after["zarr.json"] = translate.redeclare(stored, "storage_transformers")
    if after["zarr.json"] != stored:
        return "declared by a transformer"
    return "declared already" if stored.get("storage_transformers") else "no sharding codec"


def _make_v2(before: Node, after: Node, ome: bool) -> str:
    stored, v2 = after.get("zarr.json"), _v2(before)
    if stored is None:
        return "v2 already"
    doc, attributes = translate.v2_of_v3(stored)
    attributes = translate.to_ome_04(attributes) if ome else attributes
    if v2 is None:
        after[".zarray" if _is_array(stored) else ".zgroup"] = doc
        if attributes or ".zattrs" in before:
            after[".zattrs"] = attributes
    elif not document_members.is_same_json(v2, (doc, attributes)):
        _check_same(_native(stored, ome), _native(translate.v3_of_v2(*v2), ome))
    del after["zarr.json"]
    if translate.masks_as_v2(stored, doc, attributes):
        return "v3 made v2; xarray takes its fill value for missing data now"
    return "v3 made v2"


def _v2(node: Node) -> tuple[Document, Document] | None:
    """Return the v2 document of a node, and its attributes."""
    if ".zarray" in node and ".zgroup" in node:
        raise SpecError("it has both .zarray and .zgroup: remove one")
    doc = node.get(".zarray", node.get(".zgroup"))
    return None if doc is None else (doc, node.get(".zattrs", {}))


def _native(doc: Mapping[str, Any], ome: bool) -> Document:
    if _is_array(doc):
        return translate.redeclare(doc, "codec")
    if not ome:
        return dict(doc)
    return {**doc, "attributes": translate.to_ome_05(document_members.attributes_of(doc))}


def _check_same(stored: Document, made: Document, *optional: str) -> None:
    """Refuse documents of both formats unless an interrupted call may have left them."""
    ignored = (_CONSOLIDATED, *optional)
    essences = [
        {k: v for k, v in doc.items() if v not in ([], {}, None) and k not in ignored}
        for doc in (stored, made)
    ]
    if not document_members.is_same_json(*essences):
        raise UnsupportedError(
            "it has documents of v2 and of v3 that say different things: remove those that are "
            "wrong, or repeat the call that was interrupted with its options"
        )


def _has_all(stored: Document, left_over: Document | None, ome: bool) -> bool:
    """Return whether a v3 document has all attributes of a `.zattrs` that is left over."""
    if left_over is None:
        return False
    attributes = document_members.attributes_of(stored)
    if not _is_array(stored):
        left_over = translate.to_ome_05(left_over) if ome else left_over
    elif "_ARRAY_DIMENSIONS" in left_over and stored.get("dimension_names") is not None:
        left_over = {k: v for k, v in left_over.items() if k != "_ARRAY_DIMENSIONS"}
    return all(
        k in attributes and document_members.is_same_json(v, attributes[k])
        for k, v in left_over.items()
    )


def documents_by_key(nodes: Mapping[str, Node]) -> Node:
    return {join(path, name): doc for path, node in nodes.items() for name, doc in node.items()}


def _is_array(doc: Mapping[str, Any]) -> bool:
    return doc.get("node_type") == "array"
