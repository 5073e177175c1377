"""Replacing the objects of an array by those of another form, under the same keys.

Shard ``c/0/0`` has the key of chunk ``c/0/0``. So the new objects are staged and verified first;
then the documents are made such that every reader refuses, the old objects are removed, the new
ones moved to their place, and the new documents written. Who is killed anywhere between runs
the same again: each step may be repeated, and the manifest says which is the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zarr_shardstore.format.documents import (
    dump_document,
    node_of_document,
    parse_json,
)
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.unfinished import is_unfinished, unfinished
from zarr_shardstore.plan.requests import (
    DeleteMany,
    Get,
    ListDir,
    ListPrefix,
    Move,
    Persist,
    Request,
    Set,
)
from zarr_shardstore.tools.hierarchy import parents_of
from zarr_shardstore.tools.manifest import Manifest
from zarr_shardstore.tools.open_base import OpenBase
from zarr_shardstore.tools.other_keys import with_copies

__all__ = ["finish", "keeps_out_readers", "keys_of_values", "replace_values", "take_back"]

_AT_ONCE = 1000
"""Objects that are moved or removed by one call."""


def replace_values(base: OpenBase, manifest: Manifest) -> None:
    """Put staged values, all of them verified, in the place of the old ones."""
    base.perform([Persist(manifest.directory)])
    finish(base, manifest.at_state(base, "replacing"))


def finish(base: OpenBase, manifest: Manifest) -> None:
    """Go on where a conversion of one array stopped, once all values are staged."""
    encoding, ndim = manifest.encoding, manifest.ndim
    if manifest.state == "replacing":
        barred = {key: unfinished(doc) for key, doc in manifest.documents.items()}
        _write_documents(base, barred)
        base.perform([Persist(manifest.directory)])
        for keys in keys_of_values(base, manifest.prefix, encoding, ndim):
            base.perform([DeleteMany(keys)])
        manifest = manifest.at_state(base, "moving")
    for keys in keys_of_values(base, manifest.values_prefix, encoding, ndim):
        cut = len(manifest.values_prefix)
        moves: list[Request] = [Move(key, manifest.prefix + key[cut:]) for key in keys]
        base.perform(moves)
    base.perform([Persist(manifest.prefix)])
    if keeps_out_readers(base, manifest):
        _write_documents(base, manifest.documents)
        base.perform([Persist(manifest.directory)])
    manifest.remove(base)


def keeps_out_readers(base: OpenBase, manifest: Manifest) -> bool:
    """Whether a document of the array is one that readers refuse, or cannot be read."""
    docs = _documents_now(base, manifest)
    return any(doc is None or is_unfinished(doc) for doc in docs.values())


def take_back(base: OpenBase, manifest: Manifest) -> None:
    """Return from ``replacing`` to ``staging`` while the array has its old documents.

    Nothing was removed yet, and values may have been written since: what is staged must be
    compared again. Only copies of documents may tell readers something else.
    """
    docs = {key: doc for key, doc in _documents_now(base, manifest).items() if doc is not None}
    _write_copies(base, docs)
    manifest.at_state(base, "staging")


def _documents_now(base: OpenBase, manifest: Manifest) -> dict[str, dict[str, Any] | None]:
    found = base.perform([Get(key) for key in manifest.documents])
    docs = [None if reply.value is None else parse_json(reply.value) for reply in found]
    return dict(zip(manifest.documents, docs, strict=True))


def _write_documents(base: OpenBase, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write documents of an array, and the copies that groups have of them.

    Copies are written first: through those of the group nobody shall see an array that its
    own document hides.
    """
    _write_copies(base, documents)
    base.perform([Set(key, dump_document(doc)) for key, doc in documents.items()])


def _write_copies(base: OpenBase, documents: Mapping[str, Mapping[str, Any]]) -> None:
    copies: list[Request] = []
    for key, path in _keys_of_copies(documents):
        (reply,) = base.perform([Get(key)])
        doc = None if reply.value is None else parse_json(reply.value)
        if doc is not None:
            new = with_copies(doc, path, documents)
            if new is not doc:
                copies.append(Set(key, dump_document(new)))
    base.perform(copies)


def _keys_of_copies(documents: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and paths of groups whose documents may hold copies of these."""
    keys: dict[str, str] = {}
    for key in documents:
        node = node_of_document(key)
        assert node is not None
        name = "zarr.json" if node.hierarchy == "v3" else ".zmetadata"
        for path in parents_of(node):
            keys[f"{path}/{name}".lstrip("/")] = path
    return list(keys.items())


def keys_of_values(
    base: OpenBase, prefix: str, encoding: ChunkKeyEncoding, ndim: int
) -> Iterator[Sequence[str]]:
    """Keys below a prefix that are spelled as those of values; some at a time.

    Cost: one listing for each number of the first dimension, where dimensions are directories.
    """
    first, *more = encoding.dims_of_components(ndim)
    (names,) = base.perform([ListDir(prefix)])
    names = [n for n in names if encoding.decode_component(0, n, len(first)) is not None]
    tops = [prefix + name for name in names]
    if not more:
        yield from _parts(tops)
        return
    if not first and len(more) > 1:  # the "c" of v3: the next names are those of a dimension
        tops = [f"{top}/{name}" for top in tops for name in base.perform([ListDir(f"{top}/")])[0]]
    for top in tops:
        (keys,) = base.perform([ListPrefix(f"{top}/")])
        yield from _parts([k for k in keys if encoding.decode(k[len(prefix) :], ndim) is not None])


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[i : i + _AT_ONCE] for i in range(0, len(keys), _AT_ONCE))
