"""`to_native`, `from_native`: sharded arrays for readers that know no wrapper, and back.

Only metadata documents are written and removed. The shards of the draft, of our v2 marker and
of the ``sharding_indexed`` codec are the same bytes under the same keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

from zarr.abc.store import Store

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.errors import ReadOnlyError, SpecError, UnsupportedError
from zarr_shardstore.inspect.find import find_contents
from zarr_shardstore.inspect.open_base import BaseStoreHandle, open_base
from zarr_shardstore.io.backends.resolve import BaseStoreLike
from zarr_shardstore.metadata.documents import document_key, dump_document, parse_json
from zarr_shardstore.native.native_plan import (
    DocumentChange,
    NativeEntry,
    plan_from_native,
    plan_to_native,
)
from zarr_shardstore.shards.requests import Delete, Flow, Found, Get, Set
from zarr_shardstore.store.sharding_mapping import ShardingMapping
from zarr_shardstore.store.sharding_store import ShardingStore

Document = dict[str, Any]
AnyStore: TypeAlias = "BaseStoreLike | ShardingStore | ShardingMapping"

_NAMES = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")


@dataclass(frozen=True, slots=True)
class NativeReport:
    """Changes that `to_native` or `from_native` made, or would make.

    Parameters
    ----------
    entries : tuple of NativeEntry
        One for each array and group that was asked for: its path, ``"translated"`` or
        ``"skipped"``, and the reason.
    n_documents_written, n_documents_removed : int
    dry_run : bool
        Whether nothing was changed.
    """

    entries: tuple[NativeEntry, ...]
    n_documents_written: int
    n_documents_removed: int
    dry_run: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return asdict(self)

    def __str__(self) -> str:
        n_translated = sum(entry.action == "translated" for entry in self.entries)
        return (
            f"{'would translate' if self.dry_run else 'translated'} {n_translated} of "
            f"{len(self.entries)} nodes: {self.n_documents_written} documents written, "
            f"{self.n_documents_removed} removed, no data touched"
        )


def to_native(
    store: AnyStore,
    *,
    paths: Iterable[str] | None = None,
    ome: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> NativeReport:
    """Make every Zarr v3 reader read a store, by its metadata documents alone.

    Arrays that are sharded by a storage transformer get the ``sharding_indexed`` codec. Groups
    and arrays of Zarr v2, sharded or not, get v3 documents in place of their own. All documents
    are translated before any is written: if one cannot be expressed, nothing is written. The
    same call finishes a call that was interrupted.

    Parameters
    ----------
    store
        A store, or an argument that `ShardingStore` takes for one.
    paths
        Paths of arrays and groups, or patterns of these (``"raw/*"``); a group stands for all
        below it. ``None``: everything.
    ome : bool
        Make OME-Zarr 0.4 attributes those of 0.5.
    storage_options
        For a URL.
    dry_run : bool
        Decide only.

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
    removed; the documents of one name and one depth in one round.

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
    >>> native = zarr.open_array(base, mode="r")
    >>> native.shards, native[:]
    ((2,), array([1, 2, 3, 4], dtype=uint8))
    """
    base = _open(store, storage_options, dry_run)
    change = plan_to_native(base.run(_read_documents()), paths, ome)
    return _apply(base, change, dry_run)


def from_native(
    store: AnyStore,
    *,
    paths: Iterable[str] | None = None,
    zarr_format: Literal[2, 3] = 3,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> NativeReport:
    """Declare natively sharded arrays by a storage transformer; the inverse of `to_native`.

    With ``zarr_format=3``, arrays of the ``sharding_indexed`` codec are declared by
    ``storage_transformers``, and every other reader refuses them. With ``zarr_format=2``, groups
    and arrays of v3 get the documents of v2, with our marker where they are sharded; their chunk
    keys must be v2's already. OME-Zarr attributes do not change.

    Parameters, errors and notes are those of `to_native`.
    """
    if zarr_format not in (2, 3):
        raise SpecError(f"zarr_format is 2 or 3, got {zarr_format!r}")
    base = _open(store, storage_options, dry_run)
    change = plan_from_native(base.run(_read_documents()), paths, zarr_format)
    return _apply(base, change, dry_run)


def _open(store: AnyStore, options: Mapping[str, Any] | None, dry_run: bool) -> BaseStoreHandle:
    base = open_base(store, options)
    if not dry_run:
        if isinstance(store, Store) and store.read_only:
            raise ReadOnlyError
        base.check_writable()
    return base


def _read_documents() -> Flow[dict[str, Document]]:
    """Return all documents of the nodes of a store, by key."""
    found = yield from find_contents()
    if any(node.hierarchy == "draft" for node in found.arrays):
        raise _draft_refusal()
    docs = {document_key(node): dict(array.doc) for node, array in found.arrays.items()}
    others = {key for key in found.other_keys if key.rpartition("/")[2] in _NAMES}
    # The directory of an array is not listed.
    others |= {key.rpartition("/")[0] + "/.zattrs" if "/" in key else ".zattrs" for key in docs}
    keys = sorted(others - docs.keys())
    replies: list[Found] = yield [Get(key) for key in keys]
    for key, reply in zip(keys, replies, strict=True):
        if reply.value is None:
            continue
        doc = parse_json(reply.value)
        if doc is None:
            raise SpecError(f"{key!r} is no document, because it is no JSON object")
        if str(doc.get("zarr_format", "")).startswith("https://"):
            raise _draft_refusal()
        docs[key] = doc
    return docs


def _round_of(key: str) -> tuple[int, str]:
    """Return depth and name: documents that have both in common are written in any order."""
    return key.count("/"), key.rpartition("/")[2]


def _draft_refusal() -> UnsupportedError:
    return UnsupportedError(
        "the store is a draft hierarchy of 2022, whose keys, such as 'data/root/foo/c0/0', are not "
        "those of Zarr v3: copy its arrays into a v3 store, reading it by DraftHierarchyStore"
    )


def _apply(base: BaseStoreHandle, change: DocumentChange, dry_run: bool) -> NativeReport:
    writes, removals = change.writes, change.removals
    report = NativeReport(tuple(change.entries), len(writes), len(removals), dry_run)
    if not dry_run and (writes or removals):
        base.check_replaceable()
        try:
            for _, keys in groupby(writes, key=_round_of):
                base.perform([Set(key, dump_document(writes[key])) for key in keys])
            for _, keys in groupby(removals, key=_round_of):
                base.perform([Delete(key) for key in keys])
        finally:
            invalidate_documents()  # other stores read documents again
    return report
