"""Keys that belong to no array: groups, attributes, consolidated metadata, whatever else there is.

They are copied as they are, but that groups get new copies of the documents of arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import crc32c
import numpy as np

from zarr_shardstore.convert.transfer import BATCH_NBYTES, Wanted, read_wanted
from zarr_shardstore.errors import CorruptValueError, SpecError
from zarr_shardstore.format.consolidated_index import without_consolidated_index
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.metadata.consolidated import (
    directory_of_v2_consolidated,
    members,
    with_members,
)
from zarr_shardstore.metadata.documents import (
    document_key,
    dump_document,
    node_of_document,
    parse_json,
)
from zarr_shardstore.shards.requests import Get, GetSize, Set

Documents = Mapping[str, Mapping[str, Any]]
_AT_ONCE = 64


def with_copies(doc: Mapping[str, Any], path: str, new: Documents) -> Mapping[str, Any]:
    """A document of the group `path` with other copies of the documents `new`, by key."""
    changed = {
        name: new[key]
        for name, (node, _) in members(path, doc).items()
        if (key := document_key(node)) in new
    }
    return with_members(doc, changed) if changed else doc


def check_other_keys(
    source: BaseStoreHandle, target: BaseStoreHandle, keys: Sequence[str], documents: Documents
) -> None:
    """Refuse a target that has something else under one of the keys, or of the documents.

    Raises
    ------
    SpecError
        Nothing was written.
    """
    _check_nodes(target, [*documents, *keys])
    for some in _parts(list(documents)):
        for key, found in zip(some, target.perform([Get(key) for key in some]), strict=True):
            if found.value is None:
                continue
            doc = parse_json(found.value)
            # A consolidated index is no difference: the indexes may have been consolidated already.
            if doc is None or without_consolidated_index(doc) != without_consolidated_index(
                documents[key]
            ):
                raise _another(key)
    for some in _parts(keys):
        sizes = target.perform([GetSize(key) for key in some])
        for key in [key for key, size in zip(some, sizes, strict=True) if size is not None]:
            there = b"".join(_pieces(target, key))
            wanted = _translated(key, b"".join(_pieces(source, key)), documents)
            if there != wanted and (parse_json(there) or there) != (parse_json(wanted) or wanted):
                raise _another(key)


_NODES = frozenset({"zarr.json", ".zarray", ".zgroup"})
"""Names of the documents of which a directory has one, or one for each format."""


def _check_nodes(target: BaseStoreHandle, keys: Sequence[str]) -> None:
    """Refuse a target that has a document of another kind in the directory of one of these.

    Readers would find both: each format another array, or an array and a group.
    """
    own = set(keys)
    others: dict[str, str] = {}
    for key in keys:
        directory, slash, name = key.rpartition("/")
        if name in _NODES:
            others |= {f"{directory}{slash}{other}": key for other in _NODES}
    for some in _parts([key for key in others if key not in own]):
        for key, found in zip(some, target.perform([Get(key) for key in some]), strict=True):
            if found.value is not None:
                raise SpecError(
                    f"the destination has {key!r}, and would have {others[key]!r} of the source, "
                    "too: readers would find two arrays or groups in one place. Nothing was "
                    "written: take an empty destination, or remove what is there"
                )


def copy_other_keys(
    source: BaseStoreHandle, target: BaseStoreHandle, keys: Sequence[str], documents: Documents
) -> None:
    """Copy keys, deepest first: who sees a group sees what is in it. Read them back.

    Raises
    ------
    CorruptValueError
        If one reads back as another.
    """
    for key in sorted(keys, key=lambda key: (-key.count("/"), key)):
        if not target.supports_deletes and target.perform([GetSize(key)])[0] is not None:
            continue  # it was compared, and would be there twice
        written = 0
        if _is_document_of_group(key):
            value = _translated(key, b"".join(_pieces(source, key)), documents)
            target.perform([Set(key, value)])
            written = crc32c.crc32c(value)
        else:
            upload = target.upload(key)
            try:
                for piece in _pieces(source, key):
                    upload.write([piece])
                    written = crc32c.crc32c(piece, written)
                upload.finish()
            except BaseException:
                upload.abort()
                raise
        read = 0
        for piece in _pieces(target, key):
            read = crc32c.crc32c(piece, read)
        if read != written:
            raise CorruptValueError("it was written, and reads back as another", key=key)


def _translated(key: str, value: bytes, documents: Documents) -> bytes:
    """The value that a key shall have."""
    doc = parse_json(value) if _is_document_of_group(key) else None
    if doc is None:
        return value
    path = directory_of_v2_consolidated(key)
    new = with_copies(doc, key.rpartition("/")[0] if path is None else path, documents)
    return value if new is doc else dump_document(new)


def _is_document_of_group(key: str) -> bool:
    node = node_of_document(key)
    is_v3 = node is not None and node.hierarchy == "v3"
    return is_v3 or directory_of_v2_consolidated(key) is not None


def _pieces(base: BaseStoreHandle, key: str) -> Iterator[bytes | memoryview]:
    """The value of a key, in pieces."""
    (size,) = base.perform([GetSize(key)])
    if size is not None and size > BATCH_NBYTES:
        zero = np.zeros(1, dtype=np.int64)
        for batch in read_wanted(base, Wanted([key], zero, zero, zero + size, zero)):
            yield from batch.values
        return
    (found,) = base.perform([Get(key)])
    if found.value is not None:
        yield found.value


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[i : i + _AT_ONCE] for i in range(0, len(keys), _AT_ONCE))


def _another(key: str) -> SpecError:
    return SpecError(
        f"the destination has another {key!r} than the source would give it; nothing was "
        "written: take an empty destination, or remove what is there"
    )
