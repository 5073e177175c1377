"""The view: metadata shows plain chunks; the declaration of sharding stays below.

It is taken out of a document on the way up and put back on the way down, also inside
consolidated metadata, so that zarr-python works unchanged and resizes and attribute updates
keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarr_shardstore.errors import ShardStoreError, UnsupportedError
from zarr_shardstore.format.declarations import (
    Declaration,
    declare,
    find_declaration,
    has_sharding_codec,
    index_of,
    sharding_shapes,
    take_out,
)
from zarr_shardstore.format.documents import (
    ArrayDocument,
    Geometry,
    Node,
    document_key,
    dump_document,
    has_empty_chunks,
    parse_array,
    parse_json,
    plain_geometry,
)
from zarr_shardstore.format.spec import ShardingSpec
from zarr_shardstore.plan.requests import Flow, Found, Get
from zarr_shardstore.store.policy import ShardingPolicy

__all__ = ["declared_document", "is_array_document", "presented"]

Document = Mapping[str, Any]


def presented(node: Node, data: memoryview) -> memoryview:
    """Bytes of a stored document as readers see it; `data` itself if nothing is sharded.

    Raises
    ------
    SpecError, UnsupportedError
        If the document declares a sharding that is not valid or not known.
    """
    doc = parse_json(data)
    if doc is None:
        return data
    if is_array_document(node, doc):
        array = parse_array(node, doc)
        if array is None or array.declaration is None:
            return data
        return memoryview(dump_document(take_out(doc, array.declaration)))
    members = _consolidated_members(doc)
    shown = {path: _presented_member(member) for path, member in members.items()}
    if shown == members:
        return data
    return memoryview(dump_document(_with_members(doc, shown)))


def declared_document(
    node: Node,
    data: memoryview,
    stored: memoryview | None,
    policy: ShardingPolicy,
    declaration: Declaration,
) -> Flow[tuple[bytes | memoryview, ArrayDocument | None]]:
    """Bytes to store for a document that a user writes, and the array that they describe.

    An array that is stored with the same chunks keeps what it is, sharded or not; any other
    is new, and sharded by `policy`.

    Parameters
    ----------
    data, stored
        The document as the user wrote it, and as it is stored now (``None``: it is not).
    declaration
        How new v3 arrays are declared; draft arrays always by ``storage_transformers``.

    Raises
    ------
    UnsupportedError
        If the array does sharding itself (``shards=``), or its chunk grid cannot be sharded.
    SpecError
        If the store's chunks_per_shard does not fit the array.
    """
    doc = parse_json(data)
    if doc is None:
        return data, None
    if not is_array_document(node, doc):
        return (yield from _declared_group(node, doc, data)), None
    new = _declared_array(node, doc, stored, policy, declaration)
    return (data if new is doc else dump_document(new)), parse_array(node, new)


def is_array_document(node: Node, doc: Document) -> bool:
    """Whether a document describes an array. Each document of the draft's form does."""
    return node.hierarchy == "draft" or doc.get("node_type") == "array"


def _declared_array(
    node: Node,
    doc: Document,
    stored: memoryview | None,
    policy: ShardingPolicy,
    declaration: Declaration,
) -> Document:
    stored_doc = None if stored is None else parse_json(stored)
    old = None if stored_doc is None else parse_array(node, stored_doc)
    geometry = plain_geometry(node.hierarchy, doc)
    if has_sharding_codec(doc):
        _refuse_new_sharding_codec(node, doc, stored_doc, old)
        if old is None or old.declaration is None:
            return doc
    elif doc.get("storage_transformers"):
        find_declaration(doc)  # declared by the writer, who is taken at its word, if valid
        return doc
    if old is not None and _is_same_array(geometry, old, doc, stored_doc):
        if old.declaration is None or old.spec is None:
            return doc
        return declare(doc, old.declaration, old.spec)
    if geometry is None:
        if policy.has_rule(node.path) and not has_empty_chunks(doc):
            raise UnsupportedError(
                f"the array {node.path!r} has a chunk grid or a chunk key encoding that cannot be "
                "sharded: create it through the base store, or leave it out of chunks_per_shard "
                "(a mapping from path, with None for this one)"
            )
        return doc
    cps = policy.for_array(node.path, len(geometry.shape))
    if cps is None:
        return doc
    if node.hierarchy == "draft":
        declaration = "storage_transformers"
    return declare(doc, declaration, ShardingSpec(cps, index_of(declaration)))


def _is_same_array(
    geometry: Geometry | None, old: ArrayDocument, doc: Document, stored_doc: Document | None
) -> bool:
    if geometry is None or old.geometry is None:
        # Not known here, so compare what decides about chunks as it is written.
        names = ("chunk_grid", "chunk_key_encoding")
        return stored_doc is not None and all(stored_doc.get(n) == doc.get(n) for n in names)
    return geometry.has_same_chunks(old.geometry)


def _refuse_new_sharding_codec(
    node: Node, doc: Document, stored_doc: Document | None, old: ArrayDocument | None
) -> None:
    """A sharding codec in a document is allowed only if the reader was shown it."""
    if stored_doc is not None and old is not None:
        shown = stored_doc if old.declaration is None else take_out(stored_doc, old.declaration)
        # Not the codecs as they are written: zarr spells out the defaults that others leave out.
        if sharding_shapes(shown) == sharding_shapes(doc):
            return
    raise UnsupportedError(
        f"the array {node.path!r} was created with shards= (a sharding_indexed codec), but this "
        "store does the sharding: leave shards= away and pass chunks_per_shard= to "
        "ShardingStore, or create the array through the base store"
    )


def _consolidated_members(doc: Document) -> dict[str, Any]:
    """Documents by path that a group document holds in its consolidated metadata."""
    consolidated = doc.get("consolidated_metadata")
    members = consolidated.get("metadata") if isinstance(consolidated, Mapping) else None
    return dict(members) if isinstance(members, Mapping) else {}


def _with_members(doc: Document, members: dict[str, Any]) -> Document:
    consolidated = {**doc["consolidated_metadata"], "metadata": members}
    return {**doc, "consolidated_metadata": consolidated}


def _presented_member(member: Any) -> Any:
    """A document of consolidated metadata; a damaged one must not close the whole group."""
    if not isinstance(member, Mapping) or member.get("node_type") != "array":
        return member
    if plain_geometry("v3", member) is None:
        return member
    try:
        found = find_declaration(member)
    except ShardStoreError:
        return member
    return member if found is None else take_out(member, found[0])


def _declared_group(node: Node, doc: Document, data: memoryview) -> Flow[bytes | memoryview]:
    """A group document; arrays in its consolidated metadata are declared as they are stored."""
    members = _consolidated_members(doc)
    nodes = {
        path: Node("v3", f"{node.path}/{path}".strip("/"))
        for path, member in members.items()
        if isinstance(member, Mapping) and member.get("node_type") == "array"
    }
    if not nodes:
        return data
    replies: list[Found] = yield [Get(document_key(n)) for n in nodes.values()]
    for (path, member_node), found in zip(nodes.items(), replies, strict=True):
        stored_doc = None if found.value is None else parse_json(found.value)
        old = None if stored_doc is None else parse_array(member_node, stored_doc)
        geometry = plain_geometry("v3", members[path])
        if (
            old is not None
            and old.declaration is not None
            and old.spec is not None
            and geometry is not None
            and geometry.has_same_chunks(old.geometry)
        ):
            members[path] = declare(members[path], old.declaration, old.spec)
    return dump_document(_with_members(doc, members))
