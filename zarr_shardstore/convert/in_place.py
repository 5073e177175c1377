"""Replacing the objects of an array by those of another form, under the same keys.

Shard ``c/0/0`` has the key of chunk ``c/0/0``. So the new objects are staged and verified first;
then the documents are made such that every reader refuses, the old objects are removed, the new
ones moved to their place, and the new documents written. Who is killed anywhere between runs
the same again: each step may be repeated, and the manifest says which is the next.

The manifest of one array that is being converted: what is done, and what is to be done.

::

    .zarr_shardstore/DIGEST/manifest.json      this
    .zarr_shardstore/DIGEST/values/c/0/0       a shard that has not been moved to its place

====================  ==========================================  ===========================
state                 objects of the array                        who may go on
====================  ==========================================  ===========================
(no manifest)         old, or new                                 –
``staging``           old; the new ones are being made            who wants the same; others
                                                                  begin anew
``replacing``         the old ones are being removed; all new     everybody, and must, once
                      ones are staged and verified                readers are kept out
``moving``            no old ones; the new ones are being moved   everybody, and must
====================  ==========================================  ===========================

In the last two states the documents of the array have the conversion marker; a run that stopped
before it had written them is taken back to ``staging``. A conversion to
another store has the first state only, and no staged values: there is no document before it ends.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zarr_shardstore.convert.other_keys import with_copies
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.inspect.open_base import STAGING, BaseStoreHandle
from zarr_shardstore.metadata.documents import (
    Hierarchy,
    Node,
    dump_document,
    has_conversion_marker,
    node_of_document,
    parse_json,
    with_conversion_marker,
)
from zarr_shardstore.shards.requests import (
    Delete,
    DeleteMany,
    DeletePrefix,
    Get,
    ListDir,
    ListPrefix,
    Move,
    Request,
    Set,
)

State = Literal["staging", "replacing", "moving"]

_VERSION = 1

_IS_DIGEST = re.compile("[0-9a-f]{16}")
"""What `directory_of` makes; whatever else is there is not ours."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a conversion of one array does.

    Parameters
    ----------
    hierarchy, path
        Place of the array.
    state
        How far it is.
    prefix : str
        What comes before the suffix in the keys of its values.
    style, separator, ndim
        How suffixes are spelled.
    documents : dict
        Its new documents by key.
    is_staged : bool
        Values are staged: old ones have the same keys.
    """

    hierarchy: Hierarchy
    path: str
    state: State
    prefix: str
    style: Literal["draft", "default", "v2"]
    separator: str
    ndim: int
    documents: Mapping[str, Mapping[str, Any]]
    is_staged: bool

    @property
    def directory(self) -> str:
        """Everything that is kept for this conversion."""
        return directory_of(Node(self.hierarchy, self.path))

    @property
    def values_prefix(self) -> str:
        """What comes before the suffix in the keys of staged values."""
        return f"{self.directory}values/"

    @property
    def encoding(self) -> ChunkKeyEncoding:
        """How suffixes are spelled."""
        return ChunkKeyEncoding(self.style, self.separator)

    def wants_the_same(self, other: Manifest) -> bool:
        """Whether values that were staged for the one are those of the other."""
        return replace(self, state="staging") == replace(other, state="staging")

    def write(self, base: BaseStoreHandle) -> None:
        """Store it."""
        base.perform([Set(self._key, dump_document({"version": _VERSION, **asdict(self)}))])

    def at_state(self, base: BaseStoreHandle, state: State) -> Manifest:
        """Store that the conversion has come to another state; return it."""
        manifest = replace(self, state=state)
        manifest.write(base)
        return manifest

    def remove(self, base: BaseStoreHandle) -> None:
        """The conversion is over: the manifest goes first, so that nobody repeats its end."""
        base.perform([Delete(self._key)])
        base.perform([DeletePrefix(self.directory)])

    @property
    def _key(self) -> str:
        return f"{self.directory}manifest.json"


def directory_of(node: Node) -> str:
    """Where what is kept for the conversion of an array lies."""
    digest = hashlib.sha256(f"{node.hierarchy}:{node.path}".encode()).hexdigest()[:16]
    return f"{STAGING}{digest}/"


def read_manifests(base: BaseStoreHandle) -> list[Manifest]:
    """Those of all conversions that were begun and not finished.

    Raises
    ------
    SpecError
        If one was written by another version of this package, or is damaged.
    """
    (names,) = base.perform([ListDir(STAGING)])
    names = [name for name in sorted(names) if _IS_DIGEST.fullmatch(name)]
    keys = [f"{STAGING}{name}/manifest.json" for name in names]
    found = base.perform([Get(key) for key in keys])
    manifests = []
    for key, reply in zip(keys, found, strict=True):
        if reply.value is not None:
            manifests.append(_parse(key, parse_json(reply.value)))
    return manifests


def remove_leftovers(base: BaseStoreHandle) -> None:
    """Remove what conversions have left behind that removed their manifest, and stopped then."""
    (names,) = base.perform([ListDir(STAGING)])
    names = [name for name in names if _IS_DIGEST.fullmatch(name)]
    found = base.perform([Get(f"{STAGING}{name}/manifest.json") for name in names])
    without = [n for n, reply in zip(names, found, strict=True) if reply.value is None]
    base.perform([DeletePrefix(f"{STAGING}{name}/") for name in without])


def _parse(key: str, doc: dict[str, Any] | None) -> Manifest:
    try:
        members = dict(doc or {})
        if members.pop("version") != _VERSION:
            raise ValueError(f"version {(doc or {}).get('version')!r}")
        return Manifest(**members)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"the manifest {key!r} of an unfinished conversion cannot be read ({error}); it was "
            "written by another version of zarr-shardstore: finish it with that one"
        ) from error


_AT_ONCE = 1000
"""Objects that are moved or removed by one call."""


def replace_values(base: BaseStoreHandle, manifest: Manifest) -> None:
    """Put staged values, all of them verified, in the place of the old ones."""
    base.backend.persist()
    finish(base, manifest.at_state(base, "replacing"))


def finish(base: BaseStoreHandle, manifest: Manifest) -> None:
    """Go on where a conversion of one array stopped, once all values are staged."""
    encoding, ndim = manifest.encoding, manifest.ndim
    if manifest.state == "replacing":
        barred = {key: with_conversion_marker(doc) for key, doc in manifest.documents.items()}
        _write_documents(base, barred)
        base.backend.persist()
        for keys in keys_of_values(base, manifest.prefix, encoding, ndim):
            base.perform([DeleteMany(keys)])
        manifest = manifest.at_state(base, "moving")
    for keys in keys_of_values(base, manifest.values_prefix, encoding, ndim):
        cut = len(manifest.values_prefix)
        moves: list[Request] = [Move(key, manifest.prefix + key[cut:]) for key in keys]
        base.perform(moves)
    base.backend.tidy(manifest.prefix)
    base.backend.persist()
    if keeps_out_readers(base, manifest):
        _write_documents(base, manifest.documents)
        base.backend.persist()
    manifest.remove(base)


def keeps_out_readers(base: BaseStoreHandle, manifest: Manifest) -> bool:
    """Whether a document of the array is one that readers refuse, or cannot be read."""
    docs = _documents_now(base, manifest)
    return any(doc is None or has_conversion_marker(doc) for doc in docs.values())


def take_back(base: BaseStoreHandle, manifest: Manifest) -> None:
    """Return from ``replacing`` to ``staging`` while the array has its old documents.

    Nothing was removed yet, and values may have been written since: what is staged must be
    compared again. Only copies of documents may tell readers something else.
    """
    docs = {key: doc for key, doc in _documents_now(base, manifest).items() if doc is not None}
    _write_copies(base, docs)
    manifest.at_state(base, "staging")


def _documents_now(base: BaseStoreHandle, manifest: Manifest) -> dict[str, dict[str, Any] | None]:
    found = base.perform([Get(key) for key in manifest.documents])
    docs = [None if reply.value is None else parse_json(reply.value) for reply in found]
    return dict(zip(manifest.documents, docs, strict=True))


def _write_documents(base: BaseStoreHandle, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write documents of an array, and the copies that groups have of them.

    Copies are written first: through those of the group nobody shall see an array that its
    own document hides.
    """
    _write_copies(base, documents)
    base.perform([Set(key, dump_document(doc)) for key, doc in documents.items()])


def _write_copies(base: BaseStoreHandle, documents: Mapping[str, Mapping[str, Any]]) -> None:
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
        for path in _groups_above(node):
            keys[f"{path}/{name}".lstrip("/")] = path
    return list(keys.items())


def _groups_above(node: Node) -> list[str]:
    """Return the paths of the groups that may hold a copy of a document, the root last."""
    if not node.path or node.hierarchy == "draft":
        return []
    segments = node.path.split("/")
    return ["/".join(segments[:n]) for n in reversed(range(len(segments)))]


def keys_of_values(
    base: BaseStoreHandle, prefix: str, encoding: ChunkKeyEncoding, ndim: int
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
