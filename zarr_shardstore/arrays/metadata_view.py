"""View of the metadata: users see plain chunks; the base store has the declarations.

`MetadataView` strips the declaration from documents that are read, and reapplies it to documents
that are written, also in consolidated metadata. So zarr-python works unchanged. Resizes and updates
of attributes keep the declaration. With ``view="shards"`` zarr gets the document of an array that
addresses shards, see ``zarr_hooks/shards_argument.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from zarr_shardstore.arrays.array_cache import CachedArray, read_documents
from zarr_shardstore.arrays.found_chunks import find_chunk, is_shard
from zarr_shardstore.arrays.policy import Dimensions, ShardingPolicy
from zarr_shardstore.arrays.stored_array import ArrayReader, StoredArray
from zarr_shardstore.errors import ShardStoreError, SpecError, UnshardedWarning, UnsupportedError
from zarr_shardstore.format.keys import draft_candidate
from zarr_shardstore.format.shard import CHECKSUM_NBYTES, Bytes, is_empty_index
from zarr_shardstore.metadata import declaration, documents
from zarr_shardstore.metadata.declaration import Declared, View
from zarr_shardstore.metadata.documents import Geometry, Node, document_key, node_of_document
from zarr_shardstore.metadata.transformer_list import name_of, sharding_transformer
from zarr_shardstore.shards.requests import Flow, ListDir
from zarr_shardstore.telemetry import warn

Document: TypeAlias = Mapping[str, Any]

_N_LOOKS = 64
"""Most directories that are listed at once."""

_GRID_MEMBERS = ("chunk_grid", "chunk_key_encoding", "chunks", "dimension_separator")


class _Stored(NamedTuple):
    """Stored array document and its array, which is missing if the document is bad."""

    doc: Document | None
    array: StoredArray | None
    erased: StoredArray | None = None
    """Array whose document this store has just erased alone."""


class MetadataView:
    """Translation of documents between users and the base store."""

    def __init__(self, policy: ShardingPolicy, reader: ArrayReader, view: View = "chunks") -> None:
        self._policy = policy
        self._reader = reader
        self._view = view
        self._warns = policy.is_left_out
        self.created: dict[str, Dimensions] = {}
        """Names of the dimensions of arrays that were created through this store, by path."""
        self._has_warned = False

    # -------------------------------------------------------------- to user

    def to_user(
        self, key: str, data: memoryview, view: View | None = None
    ) -> tuple[memoryview, CachedArray]:
        """Return the bytes of a stored document as users see it, and its array."""
        node, view = node_of_document(key), view or self._view
        doc = documents.parse_json(data) if node is None else documents.parse_document(node, data)
        if doc is None:
            return data, None
        try:
            array = None if node is None else self._reader.read(node, doc)
        except (SpecError, UnsupportedError) as error:
            return data, error  # zarr may know the document
        if array is None:
            shown = self._members_to_user(key.rpartition("/")[0], doc)
        else:
            shown = self._document_to_user(doc, array, view)
        return memoryview(_dumped(shown, doc, data)), array

    def _document_to_user(self, doc: Document, array: StoredArray, view: View) -> Document:
        doc, how = documents.without_notes(doc), array.document.declaration
        if how is None:
            return doc  # perhaps with a mark, which `ShardedCodecPipeline` looks for
        doc = declaration.strip(doc, how)
        if declaration.has_sharding_codec(doc):  # nested
            return declaration.marked(doc, "passthrough")
        geometry = array.document.geometry
        is_even = geometry is not None and geometry.sides is None
        if view == "chunks" or array.layout is None or array.node.hierarchy != "v3" or not is_even:
            return doc
        return declaration.shown_by_shards(doc, Declared(how, array.document.transformers))

    def _members_to_user(self, path: str, doc: Document) -> Document:
        changed: dict[str, Document] = {}
        for name, (node, member) in documents.members(path, doc).items():
            try:
                array = self._reader.read(node, member)
            except ShardStoreError:
                continue  # one damaged document does not close the group
            shown = member if array is None else self._document_to_user(member, array, self._view)
            if shown is not member:
                changed[name] = shown
        return documents.with_members(doc, changed) if changed else doc

    # ------------------------------------------------------------- to store

    def to_store(
        self,
        key: str,
        data: memoryview,
        stored: memoryview | None,
        erased: StoredArray | None = None,
    ) -> Flow[tuple[Bytes, StoredArray | None, bool]]:
        """Return the document to store for `data`, which replaces `stored`, its array, and whether
        keys have changed their meaning. An array with the same chunks as before stays as it is
        declared. Any other array follows the policy."""
        node = node_of_document(key)
        old = _Stored(None, None) if node is None else self._parsed(node, stored)
        old = old._replace(erased=erased)
        doc = documents.parse_json(data)
        if doc is None:
            return data, None, old.doc is not None
        if node is None or not documents.is_array_document(node, doc):
            new: Document = yield from self._members_to_store(key.rpartition("/")[0], doc)
            return _dumped(new, doc, data), None, old.array is not None
        new = yield from self._stored_array(node, doc, old)
        array = self._reader.read(node, new)
        is_raw = declaration.mark_of(doc) != "flat" and _is_declared(doc)
        if old.array and array and not (is_raw or _keeps_chunks(old.array, array)):
            raise UnsupportedError(
                f"the array {node.path!r} is another one than this document describes, because "
                "another writer has converted it or made it anew: open the array again, or "
                "erase it first"
            )
        is_changed = old.doc is None or _keys_of(node, old.doc) != _keys_of(node, new)
        return _dumped(new, doc, data), array, is_changed

    def _members_to_store(self, path: str, doc: Document) -> Flow[Document]:
        """Declare arrays in consolidated metadata as they are stored, or will be."""
        found = {
            name: member
            for name, member in documents.members(path, doc).items()
            if declaration.mark_of(member[1]) == "flat"
            or not (declaration.has_sharding_codec(member[1]) or _is_declared(member[1]))
        }
        if not found:
            return doc
        replies = yield from read_documents([document_key(node) for node, _ in found.values()])
        changed: dict[str, Document] = {}
        for (name, (node, member)), reply in zip(found.items(), replies, strict=True):
            try:
                old = self._parsed(node, reply.value)
            except ShardStoreError:
                continue
            if old.doc is not None and not declaration.has_sharding_codec(member):
                declared = self._as_update(node, member, old)
            else:  # the array comes later, as when a store is copied in the order of keys
                declared = yield from self._stored_array(node, member, old)
            array = self._reader.read(node, declared or member) if old.array else None
            if old.array and array and not _keeps_chunks(old.array, array):
                declared = old.doc
            if declared is not None and declared is not member:
                changed[name] = declared
        return documents.with_members(doc, changed) if changed else doc

    def _stored_array(self, node: Node, doc: Document, old: _Stored) -> Flow[Document]:
        """Return the document to store."""
        if declaration.has_sharding_codec(doc):
            return self._stored_native(node, doc, old)
        if _is_declared(doc):
            self._reader.read(node, doc)  # raises if the declaration is not valid
            return doc
        kept = self._as_update(node, doc, old)
        if kept is not None:
            return kept
        dims: Dimensions = ()
        if self._policy.names_dimensions:
            dims = yield from read_dimension_names({node: doc})
        geometry = documents.plain_geometry(node.hierarchy, doc)
        if geometry is None:
            has_rule = self._policy.rule_of(node.path, dims) is not None
            if has_rule and not documents.has_empty_chunks(doc):
                _warn_of_unsharded(node, documents.unknown_geometry(doc))
            return doc
        self._refuse_draft_name(node, geometry)
        other = yield from self._in_other_format(node, geometry)
        if other is not None:
            declared = self._policy.declare(node, other.document.transformers, geometry)
        else:
            declared = yield from self._declared_as_new(node, doc, geometry, dims, old.erased)
            if declared is None and self._warns:
                self._warns = False
                if not (yield from _holds_arrays(node)):
                    text = UnshardedWarning.WITHOUT_OPTION.format(node.path or "/")
                    warn(text, UnshardedWarning, stacklevel=2)
        return doc if declared is None else declaration.apply(doc, declared)

    def _as_update(self, node: Node, doc: Document, old: _Stored) -> Document | None:
        """Return `doc` declared as the stored array; ``None`` if it is another array."""
        if old.doc is None or old.array is None:
            return None
        before, geometry = old.array.document, documents.plain_geometry(node.hierarchy, doc)
        if geometry is None or before.geometry is None:
            if any(old.doc.get(name) != doc.get(name) for name in _GRID_MEMBERS):
                return None
        elif declaration.mark_of(old.doc) == "passthrough":
            if declaration.sharding_shapes(old.doc) != declaration.sharding_shapes(doc):
                return None
            doc = declaration.marked(doc, "passthrough")
        elif not geometry.has_same_chunks(before.geometry, but_last=True):
            return None
        elif before.declaration is not None:
            new = declaration.reapply(doc, old.doc, before.declaration)
            if before.declaration == "codec" and not _has_chunks(node, new, geometry):
                listed = declaration.Declared("storage_transformers", before.transformers)
                new = declaration.apply(doc, listed)  # the shards are the same
            doc = new
        notes = documents.notes_of(old.doc)
        return {**doc, **notes} if notes else doc

    def _stored_native(self, node: Node, doc: Document, old: _Stored) -> Document:
        """Return what to store for a document with a sharding codec. `ShardedCodecPipeline` marks
        arrays that are addressed by inner chunks. Other writers address shards."""
        notes: Document = {}
        if old.doc is not None and old.array is not None:
            notes = documents.notes_of(old.doc)
            if declaration.mark_of(doc) == "flat" and old.array.layout is not None:
                plain = declaration.without_mark(doc)
                new = self._reader.read(node, plain)
                if new and new.layout and old.array.layout.has_same_entries(new.layout):
                    plain = declaration.strip(plain, "codec")
                    how, spec = old.array.document.declaration, new.layout.spec
                    before, grid_shape = old.array.layout.spec.boxes, new.layout.grid_shape or ()
                    # zarr has added shards. A list may also spell out lengths that repeat.
                    if how is not None and not spec.boxes.has_same_boxes(before, grid_shape):
                        declared = Declared(how, (sharding_transformer(spec),))
                        return {**declaration.apply(plain, declared), **notes}
                    kept = self._as_update(node, plain, old)
                    if kept is not None:
                        return kept
            # The shapes alone: zarr spells out defaults that other writers leave out.
            shown = declaration.sharding_shapes(
                self._document_to_user(old.doc, old.array, "chunks")
            )
            kept = self._as_update(node, declaration.without_mark(doc), old)
            if kept is not None and shown == declaration.sharding_shapes(doc):
                return kept
        was_flat = old.array is not None and old.array.document.declaration is not None
        match self._reader.native, declaration.mark_of(doc), was_flat:
            case "passthrough", "flat", _ if old.array is None:
                raise UnsupportedError(
                    f"the document of {node.path!r} comes from a store with view='shards', whose "
                    "keys are those of chunks, and here they would be shards: copy from a store "
                    "with view='chunks'"
                )
            case "passthrough", "flat", _:
                return declaration.without_mark(doc)
            case "passthrough", _, _:
                return doc
            case _, "flat", _:
                doc = declaration.without_mark(doc)
                self._reader.read(node, doc)  # raises if this is no sharding that is known here
                return {**doc, **notes}
            case _, _, True:
                raise UnsupportedError(
                    f"the array {node.path!r} is addressed by its inner chunks, and this document "
                    "would make their keys those of shards: open the array again, or erase it first"
                )
        array = self._reader.read(node, doc)
        if array is None or not array.unknown:
            return declaration.marked(doc, "passthrough")  # for each later store
        if self._policy.rule_of(node.path, documents.dimension_names(doc)) is not None:
            _warn_of_unsharded(node, array.unknown)
        return doc

    def takes_shards(self, document: memoryview) -> bool:
        """Whether an array whose document has a sharding codec is addressed by its inner chunks."""
        doc = documents.parse_json(document)
        if doc is None or len(declaration.sharding_shapes(doc)) != 1:
            return False
        plain = declaration.without_mark(doc) if declaration.mark_of(doc) == "flat" else doc
        try:
            array = self._reader.read(Node("v3", ""), plain)
        except (SpecError, UnsupportedError):
            return False
        return array is not None and array.document.declaration == "codec"

    def _refuse_draft_name(self, node: Node, geometry: Geometry) -> None:
        if node.hierarchy == "draft":
            return
        key = node.chunk_prefix + geometry.encoding.encode((0,) * len(geometry.shape))
        draft = draft_candidate(key)
        if draft is not None and self._policy.needs_no_metadata("draft", draft[0]):
            raise UnsupportedError(
                f"the chunk keys of the array {node.path!r}, like {key!r}, are also those of the "
                f"array {draft[0]!r} of the draft hierarchy, which chunks_per_shard makes shards "
                "of: give it another name, or leave that one out of chunks_per_shard"
            )

    def _in_other_format(self, node: Node, geometry: Geometry) -> Flow[StoredArray | None]:
        """Return the array of the same chunks in the other format, as after a migration."""
        other = node.other_format
        if other is None or geometry.encoding.style != "v2":
            return None
        (found,) = yield from read_documents([document_key(other)])
        array = self._parsed(other, found.value).array
        has_same = array is not None and geometry.has_same_chunks(array.document.geometry)
        return array if has_same else None

    def _declared_as_new(
        self,
        node: Node,
        doc: Document,
        geometry: Geometry,
        dims: Dimensions,
        erased: StoredArray | None,
    ) -> Flow[Declared | None]:
        policy, ndim = self._policy, len(geometry.shape)
        dims = dims if len(dims) == ndim else ()
        declared, by_rule = policy.declaration_of(node, doc, geometry, dims), None
        self._note_created(node, geometry, dims)
        is_usual = geometry.encoding.separator in ("/", ".")
        if is_usual and policy.needs_no_metadata(node.hierarchy, node.path):
            by_rule = policy.declaration_without_metadata(node, ndim)
        is_decided = declared is None or declared == by_rule
        if erased is None and is_decided:
            return declared

        def keeps(found: memoryview) -> bool:  # by a rule writers may store chunks before it
            return by_rule is not None or _may_be_chunk(found, doc, geometry)

        found = yield from find_chunk(node, geometry, keeps)
        before = None if erased is None else erased.document
        if found is not None and before is not None and geometry.has_same_chunks(before.geometry):
            return policy.declare(node, before.transformers, geometry)  # its document comes back
        if found is None or declared is None or is_decided:
            return declared
        fits = is_shard(found, declared.transformers, ndim)  # its document was erased elsewhere
        if by_rule is not None and not (len(declared.transformers) == 1 and fits):
            # Chunks that were written before their document are in shards.
            return declared if is_empty_index(found) else by_rule
        if fits:
            return declared
        warn(
            f"the array {node.path!r} has chunks in this store already, each an object of its own, "
            "so it stays unsharded; to write an array through this store, write its metadata "
            "before its chunks",
            stacklevel=2,
        )
        return None

    def _note_created(self, node: Node, geometry: Geometry, dims: Dimensions) -> None:
        """Note a new array for `warn_of_names`. Warn if the option is probably meant for it and
        leaves it out. Coordinates have fewer dimensions."""
        policy, ndim = self._policy, len(geometry.shape)
        if isinstance(policy.rules, tuple | dict):
            self.created[node.path] = dims or (None,) * ndim
        reason = policy.reason_to_leave(node.path, ndim, dims)
        rule = policy.rule_of(node.path, dims)
        has_no_names = node.hierarchy == "v2" and policy.names_dimensions and not dims
        if has_no_names and (rule is None or isinstance(rule, dict)):
            reason = "Zarr v2 names the dimensions of an array after the array: give the rule by "
            reason += "position, or call shard_store afterwards"
        is_smaller = ndim < (len(rule) if isinstance(rule, tuple) else 2)
        if reason and not is_smaller and not self._has_warned:
            self._has_warned = True
            _warn_of_unsharded(node, reason)

    def warn_of_names(self) -> None:
        """Warn, once, of names in the option that no array has that was created here."""
        names = self._policy.names_without_array(self.created) if self.created else []
        if names and not self._has_warned:
            self._has_warned = True
            warn(
                f"chunks_per_shard has a rule for {', '.join(map(repr, names))}, and no array that "
                f"was created through this store has such a path or dimension: {[*self.created]}",
                UnshardedWarning,
                stacklevel=3,
            )

    def _parsed(self, node: Node, data: Bytes | None) -> _Stored:
        """Parse a stored document, whose array is missing if the document is not valid.
        `UnsupportedError` for a declaration that another program may know."""
        doc = documents.parse_json(data)
        try:
            return _Stored(doc, None if doc is None else self._reader.read(node, doc))
        except SpecError:
            return _Stored(doc, None)


def read_dimension_names(documents_: Mapping[Node, Document]) -> Flow[Dimensions]:
    """Return the names of dimensions from the documents of an array, its v2 attributes or the
    groups above it; else ``()``. Cost: at most one round for each document."""
    for doc in documents_.values():
        if names := documents.dimension_names(doc):
            return names
    for node in documents_:
        keys = documents.keys_of_dimension_names(node)
        replies = (yield from read_documents(list(keys))) if keys else []
        for path, reply in zip(keys.values(), replies, strict=True):
            doc = documents.parse_json(reply.value) or {}
            found = documents.axes_of_ome(doc, path) if path else documents.dimension_names(doc)
            if found:
                return found
    return ()


def _warn_of_unsharded(node: Node, reason: str) -> None:
    warn(
        f"the array {node.path or '/'!r} stays unsharded: {reason}", UnshardedWarning, stacklevel=3
    )


def _dumped(new: Document, doc: Document, data: memoryview) -> Bytes:
    return data if new is doc else documents.dump_document(new)


def _is_declared(doc: Document) -> bool:
    """Whether the writer declares transformers itself, in a known form or not."""
    try:
        return declaration.find_declaration(doc, "passthrough") is not None
    except ShardStoreError:
        return True


def _keeps_chunks(old: StoredArray, new: StoredArray) -> bool:
    """Whether chunks stay where they are, and numbers of one type, if one array is sharded.

    Codecs and other data types are not compared: writers spell them in several ways.
    """
    before, after = old.document, new.document
    if not (old.stack or new.stack) or before.geometry is None or after.geometry is None:
        return True
    mine, theirs = _number_type(before), _number_type(after)
    if mine and theirs and mine != theirs:
        return False
    if not after.geometry.has_same_chunks(before.geometry, but_last=True):
        return False
    if old.layout is None or new.layout is None:
        return bool(old.stack) == bool(new.stack)
    spec, others = old.layout.spec, new.layout.spec
    both = [*map(min, old.grid_shape or (), new.grid_shape or ())]
    return spec.index == others.index and spec.boxes.has_same_boxes(others.boxes, both)


def _number_type(document: documents.ArrayDocument) -> tuple[str, int] | None:
    """Return kind and size of a data type of numbers, which each writer spells as numpy knows."""
    given = name_of(document.members.get("data_type", document.members.get("dtype")))
    try:
        dtype = np.dtype(given) if isinstance(given, str) else np.dtype(object)
    except (TypeError, ValueError):
        return None
    return (dtype.kind, dtype.itemsize) if dtype.kind in "biufc" else None


def _may_be_chunk(found: memoryview, doc: Document, geometry: Geometry) -> bool:
    """Whether an object like a shard without entries may be a chunk of ones, and its checksum."""
    nbytes, size = documents.chunk_nbytes(doc, geometry.chunk_shape), len(found) - CHECKSUM_NBYTES
    if nbytes is None or "crc32c" not in str((doc.get("codecs"), doc.get("filters"))):
        return False
    return size == nbytes or (geometry.sides is not None and size < nbytes)


def _has_chunks(node: Node, doc: Document, geometry: Geometry) -> bool:
    """Whether a stored document has all chunks of a geometry."""
    array = documents.parse_array(node, doc)
    return array is not None and geometry.has_same_chunks(array.geometry)


def _keys_of(node: Node, doc: Document) -> documents.ArrayDocument | Document | None:
    """Return the part of a document that decides about keys."""
    try:
        return documents.parse_array(node, doc)
    except ShardStoreError:
        return doc


def _holds_arrays(new: Node) -> Flow[bool]:
    """Whether a store has other arrays, or many directories. Cost: a walk to the first array."""
    level = [""]
    while 0 < len(level) <= _N_LOOKS:
        try:
            listings: list[list[str]] = yield [ListDir(directory) for directory in level]
        except Exception:  # the base store does not list
            return True
        keys = [f"{d}{name}" for d, names in zip(level, listings, strict=True) for name in names]
        nodes = {key: node for key in keys if (node := node_of_document(key))}
        replies = yield from read_documents([*nodes])
        for node, reply in zip(nodes.values(), replies, strict=True):
            doc = documents.parse_json(reply.value)
            if doc is not None and documents.is_array_document(node, doc):
                return True
        keys = [key for key in keys if key not in nodes and key != new.path]
        level = [f"{key}/" for key in keys if "/.z" not in f"/{key}"]
    return bool(level)
