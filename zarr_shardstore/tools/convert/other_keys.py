"""Copies of keys that belong to no array, as they are; groups get new copies of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn, TypeAlias

import crc32c

from zarr_shardstore.access import BaseStoreHandle, index_reads, metadata, policies, requests
from zarr_shardstore.errors import CorruptValueError, SpecError
from zarr_shardstore.tools.convert.task import read_object
from zarr_shardstore.tools.inspect import find

DocumentsByKey: TypeAlias = Mapping[str, Mapping[str, Any]]

_NODES = frozenset({"zarr.json", ".zarray", ".zgroup"})
_GROUP = ".group.json"
"""End of the name of a draft group's document."""

_KEYS_A_ROUND = 64
_SMALL_NBYTES = 128 * 1024
"""Values up to this size are copied by one round of requests for all of them."""

_CONSOLIDATED = "consolidated_metadata"


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a store that goes to the destination: chosen paths, and the groups above them.

    These groups go without consolidated metadata, which would name nodes that stay out.
    """

    patterns: tuple[str, ...]
    above: frozenset[str]
    """Paths of the groups above."""
    is_draft: bool
    """Whether it has arrays of a draft hierarchy, whose documents lie apart from their data."""

    @classmethod
    def of(cls, patterns: Iterable[str], arrays: Sequence[metadata.Node]) -> Part:
        above = {path for array in arrays for path in find.lineage(array.path)[:-1]}
        is_draft = any(array.hierarchy == "draft" for array in arrays)
        return cls(tuple(patterns), frozenset(above), is_draft)

    def has(self, key: str) -> bool:
        is_document = key.endswith(_GROUP) or key.rpartition("/")[2] in find.DOCUMENTS[:-1]
        return self._is_chosen(key) or (is_document and self.is_above(key))

    def is_above(self, key: str) -> bool:
        """Return whether a key lies in a group above the chosen paths, and not below one."""
        return self._path_of(key) in self.above and not self._is_chosen(key)

    def _is_chosen(self, key: str) -> bool:
        paths = find.lineage(self._path_of(key))
        return any(policies.matches(at, pattern) for at in paths for pattern in self.patterns)

    def _path_of(self, key: str) -> str:
        """Return the path of the node that a document describes, or of the node that has a key."""
        if (node := metadata.node_of_document(key)) is not None:
            return node.path
        directory = key.rpartition("/")[0]
        at = key.removesuffix(_GROUP) if key.endswith(_GROUP) else directory
        is_draft = self.is_draft and f"{at}/".startswith(("meta/root/", "data/root/"))
        return at[len("meta/root/") :] if is_draft else directory


def with_copies(doc: Mapping[str, Any], path: str, new: DocumentsByKey) -> Mapping[str, Any]:
    """Return the document of the group `path` with the documents `new` in place of its copies."""
    changed = {
        name: new[key]
        for name, (node, _) in metadata.members(path, doc).items()
        if (key := metadata.document_key(node)) in new
    }
    return metadata.with_members(doc, changed) if changed else doc


@dataclass(frozen=True, slots=True)
class OtherKeys:
    """The keys of a source that belong to no array, on their way to a target."""

    source: BaseStoreHandle
    target: BaseStoreHandle
    keys: Sequence[str]
    documents: DocumentsByKey
    """New documents of arrays by key, of which groups get copies."""
    part: Part | None

    def check(self) -> set[str]:
        """Refuse a target with other values under these keys; return those that it has."""
        _check_nodes(self.target, [*self.documents, *self.keys])
        there: set[str] = set()
        for some in in_rounds(list(self.documents)):
            for key, value in zip(some, self.target.values(some), strict=True):
                if value is None:
                    continue
                doc = metadata.parse_json(value)
                # A consolidated index of the target is no difference.
                wanted = metadata.without_notes(self.documents[key])
                if doc is None or metadata.without_notes(doc) != wanted:
                    raise _another(key)
                there.add(key)
        for key in _stored(self.target, self.keys):
            found, new = _pieces(self.target, key), self._new_pieces(key)
            if key.rpartition("/")[2] in find.DOCUMENTS:  # or another copy of the same meaning
                is_same = _is_same(b"".join(found), b"".join(new), self._is_above(key))
            else:
                is_same = _digest(found) == _digest(new)
            if not is_same:
                raise _another(key)
            there.add(key)
        return there

    def copy(self, keys: Sequence[str], known: Set[str]) -> None:
        """Copy some keys and read them back, the deepest first: a group comes after its members.

        Small values share rounds of requests. Groups above a part of a store that are there stay.
        The target had the `known` keys before: a bad copy of another one is removed.
        """

        def order(key: str) -> tuple[int, bool]:
            return -key.count("/"), key.rpartition("/")[2] in _NODES  # attributes before their node

        for _, same in groupby(sorted(keys, key=lambda key: (order(key), key)), key=order):
            for some in in_rounds(list(same)):
                # `check` compared what is there; a zip would have it twice.
                is_once = not self.target.supports_deletes
                there = _stored(self.target, some) if is_once or self.part is not None else ()
                stays = {key for key in there if is_once or self._is_above(key)}
                sizes = zip(some, self.source.sizes(some), strict=True)
                left = {key: size or 0 for key, size in sizes if key not in stays}
                for key, size in left.items():
                    if size > _SMALL_NBYTES:
                        self._copy_large(key, size, known)
                self._copy_small({k: n for k, n in left.items() if n <= _SMALL_NBYTES}, known)

    def _copy_small(self, sizes: Mapping[str, int], known: Set[str]) -> None:
        new = {}
        for (key, size), value in zip(sizes.items(), self.source.values([*sizes]), strict=True):
            new[key] = bytes(self._edited(key, index_reads.check_whole(key, value, size)))
        self.target.perform([requests.Set(key, memoryview(value)) for key, value in new.items()])
        for key, found in zip(new, self.target.values([*new]), strict=True):
            if found is None or bytes(found) != new[key]:
                self._refuse_copy(key, known)

    def _copy_large(self, key: str, size: int, known: Set[str]) -> None:
        written = 0

        def parts() -> Iterator[Sequence[bytes | memoryview]]:
            nonlocal written
            for piece in self._new_pieces(key, size):
                written = crc32c.crc32c(piece, written)
                yield [piece]

        self.target.backend.upload(key, parts())
        if _digest(_pieces(self.target, key))[1] != written:
            self._refuse_copy(key, known)

    def _refuse_copy(self, key: str, known: Set[str]) -> NoReturn:
        """Raise for a copy that reads back as another. A new one is removed, and copied later."""
        text = "it was written, and reads back as another; nothing was removed of the source"
        if self.target.supports_deletes and key not in known:
            with suppress(Exception):
                self.target.perform([requests.Delete(key)])
                text += ", and the copy was removed"
        raise CorruptValueError(text, key=key)

    def _new_pieces(self, key: str, size: int | None = None) -> Iterable[bytes | memoryview]:
        """Return the value of a key in the target."""
        pieces = _pieces(self.source, key, size)
        return [self._edited(key, b"".join(pieces))] if self._is_edited(key) else pieces

    def _is_edited(self, key: str) -> bool:
        is_group = key.rpartition("/")[2] in ("zarr.json", ".zmetadata")
        return is_group and bool(self.documents or self.part)

    def _edited(self, key: str, value: bytes | memoryview) -> bytes | memoryview:
        """Return the value of a key; a group gets the new documents in place of its copies."""
        doc = metadata.parse_json(value) if self._is_edited(key) else None
        if doc is None:
            return value
        new = with_copies(doc, key.rpartition("/")[0], self.documents)
        if self._is_above(key) and _CONSOLIDATED in new:
            new = _unconsolidated(new)
        return value if new is doc else metadata.dump_document(new)

    def _is_above(self, key: str) -> bool:
        return self.part is not None and self.part.is_above(key)


def _digest(pieces: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Return the size and the crc32c of a value that may be larger than memory."""
    nbytes = checksum = 0
    for piece in pieces:
        nbytes, checksum = nbytes + len(piece), crc32c.crc32c(piece, checksum)
    return nbytes, checksum


def _is_same(found: bytes, new: bytes, is_above: bool) -> bool:
    """Compare documents; a group that a part of a store was copied to has no consolidated
    metadata, or newer one."""
    if found == new:
        return True
    one, other = metadata.parse_json(found), metadata.parse_json(new)
    if one is None or other is None:
        return False
    if is_above or _CONSOLIDATED not in one:
        one, other = _unconsolidated(one), _unconsolidated(other)
    return one == other


def _unconsolidated(doc: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in doc.items() if name != _CONSOLIDATED}


def _stored(base: BaseStoreHandle, keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys under which something is stored."""
    for some in in_rounds(keys):
        sizes = zip(some, base.sizes(some), strict=True)
        yield from [key for key, size in sizes if size is not None]


def _another(key: str) -> SpecError:
    return SpecError(
        f"the destination has another {key!r} than the source would give it, perhaps of a "
        "conversion with other options; nothing was written: take an empty destination, or remove "
        "what is there"
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


def _pieces(
    base: BaseStoreHandle, key: str, size: int | None = None
) -> Iterator[bytes | memoryview]:
    """Read the value of a key, which has a size if it is given."""
    nbytes = 0
    for found in read_object(base, key):
        for piece in found.pieces:
            nbytes += len(piece)
            yield piece
    if size is not None and nbytes != size:
        index_reads.check_whole(key, None, size)


def in_rounds(keys: Sequence[str], n: int = _KEYS_A_ROUND) -> Iterator[Sequence[str]]:
    return (keys[i : i + n] for i in range(0, len(keys), n))
