"""Copies of keys that belong to no array, as they are; groups get new copies of documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import crc32c

from zarr_shardstore.access import BaseStoreHandle, metadata
from zarr_shardstore.errors import CorruptValueError, SpecError
from zarr_shardstore.tools.convert.task import read_object

DocumentsByKey: TypeAlias = Mapping[str, Mapping[str, Any]]

_NODES = frozenset({"zarr.json", ".zarray", ".zgroup"})

_KEYS_A_ROUND = 64


def with_copies(doc: Mapping[str, Any], path: str, new: DocumentsByKey) -> Mapping[str, Any]:
    """Return the document of the group `path` with the documents `new` in place of its copies."""
    changed = {
        name: new[key]
        for name, (node, _) in metadata.members(path, doc).items()
        if (key := metadata.document_key(node)) in new
    }
    return metadata.with_members(doc, changed) if changed else doc


def check_other_keys(
    source: BaseStoreHandle, target: BaseStoreHandle, keys: Sequence[str], documents: DocumentsByKey
) -> set[str]:
    """Refuse a target with other values under these keys; return the documents that it has."""
    _check_nodes(target, [*documents, *keys])
    there: set[str] = set()
    for some in in_rounds(list(documents)):
        for key, value in zip(some, target.values(some), strict=True):
            if value is None:
                continue
            doc = metadata.parse_json(value)
            # A consolidated index of the target is no difference.
            wanted = metadata.without_notes(documents[key])
            if doc is None or metadata.without_notes(doc) != wanted:
                raise _another(key)
            there.add(key)
    parse = metadata.parse_json
    for key in _stored(target, keys):
        found = b"".join(_pieces(target, key, {}))
        new = b"".join(_pieces(source, key, documents))
        if found != new and (parse(found) or found) != (parse(new) or new):
            raise _another(key)
    return there


def _stored(base: BaseStoreHandle, keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys under which something is stored."""
    for some in in_rounds(keys):
        sizes = zip(some, base.sizes(some), strict=True)
        yield from [key for key, size in sizes if size is not None]


def _another(key: str) -> SpecError:
    return SpecError(
        f"the destination has another {key!r} than the source would give it; nothing was "
        "written: take an empty destination, or remove what is there"
    )


def _check_nodes(target: BaseStoreHandle, keys: Sequence[str]) -> None:
    """Refuse a target with a document of another kind beside one of these: readers find both."""
    own = set(keys)
    others: dict[str, str] = {}
    for key in keys:
        directory, slash, name = key.rpartition("/")
        if name in _NODES:
            others |= {f"{directory}{slash}{other}": key for other in _NODES}
    for key in _stored(target, [key for key in others if key not in own]):
        raise SpecError(
            f"the destination has {key!r}, and would have {others[key]!r} of the source, too: "
            "readers would find two arrays or groups in one place. Nothing was written: take an "
            "empty destination, or remove what is there"
        )


def copy_other_keys(
    source: BaseStoreHandle, target: BaseStoreHandle, keys: Sequence[str], documents: DocumentsByKey
) -> None:
    """Copy keys and read them back, the deepest first: a group is visible after its members."""
    for key in sorted(keys, key=lambda key: (-key.count("/"), key)):
        if not target.supports_deletes and any(_stored(target, [key])):
            continue  # `check_other_keys` compared it; a zip would have it twice
        written = 0

        def parts(key: str = key) -> Iterator[Sequence[bytes | memoryview]]:
            nonlocal written
            for piece in _pieces(source, key, documents):
                written = crc32c.crc32c(piece, written)
                yield [piece]

        target.backend.upload(key, parts())
        found = 0
        for piece in _pieces(target, key, {}):
            found = crc32c.crc32c(piece, found)
        if found != written:
            raise CorruptValueError("it was written, and reads back as another", key=key)


def _pieces(
    base: BaseStoreHandle, key: str, documents: DocumentsByKey
) -> Iterator[bytes | memoryview]:
    """Read the value of a key; a group gets `documents` in place of its copies."""
    pieces = (piece for found in read_object(base, key) for piece in found.pieces)
    node, path = metadata.node_of_document(key), metadata.directory_of_v2_consolidated(key)
    if not documents or (path is None and (node is None or node.hierarchy != "v3")):
        yield from pieces
        return
    value = b"".join(pieces)
    doc = metadata.parse_json(value)
    if doc is not None:
        new = with_copies(doc, key.rpartition("/")[0] if path is None else path, documents)
        value = value if new is doc else metadata.dump_document(new)
    yield value


def in_rounds(keys: Sequence[str], n: int = _KEYS_A_ROUND) -> Iterator[Sequence[str]]:
    """Split keys into slices of at most `n`."""
    return (keys[i : i + n] for i in range(0, len(keys), n))
