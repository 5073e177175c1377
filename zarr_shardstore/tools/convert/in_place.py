"""State machine of a conversion in place, and the directory that keeps its state.

Shard ``c/0/0`` has the key of chunk ``c/0/0``, so one of the two can be there. New objects are
staged and verified, and then exchanged for the old ones.

::

    .zarr_shardstore/lock                      one conversion at a time, on local disks
    .zarr_shardstore/DIGEST/manifest.json      state and new documents of one array
    .zarr_shardstore/DIGEST/values-RUN/c/0/0   a staged object

           1, 2           3              4                5, 6           7, 8, 9
    (none) ───► staging ────► replacing ────► removing ────────► moving ────────► (none)
                   ▲              │
                   └─ take back ──┘  no marker was written yet

1. The manifest is written, with state ``staging``. What an earlier run has staged for the same aim
   is moved to the directory of this run. Late tasks of that run write to theirs, which is not used.
2. Tasks stage all values, read them back and compare.
3. Staged values are made to survive a loss of power. On local files each directory of old objects
   must be one that this process may change. The manifest gets state ``replacing``.
4. Documents and their copies get a conversion marker: every reader refuses the array. The manifest
   gets state ``removing``.
5. All old objects are deleted, because a new object may have the key of any old one. Objects
   beyond the edge of the array are moved to the quarantine. The manifest gets state ``moving``.
6. Staged objects are moved to their keys.
7. A consolidated index and empty directories are removed.
8. The new documents are written, the copies in groups first.
9. The manifest is deleted, then the rest of the directory.

Decision 13 has what a kill in each state leaves, and what the next run does. In state ``replacing``
without a marker it returns to ``staging``, because values may be new. After step 8 it continues at
step 9. After a kill the array may also be removed, restored or made anew. Its document is missing
then, or has no marker in a later state (`_fate`). No run changes such an array. What is staged may
be the only copy: the next run moves it to the quarantine, documents first, and deletes the manifest
last.

Each step may be repeated. A conversion to another store has the state ``staging`` only, and writes
values to their own keys: no reader sees the array before its document is written at the end.
"""

from __future__ import annotations

import errno
import hashlib
import operator
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from zarr_shardstore.access import (
    STAGING,
    BaseStoreHandle,
    LocalBackend,
    chunk_keys,
    consolidated_index,
    file_keys,
    locks,
    metadata,
    requests,
    walks,
)
from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.tools.convert.other_keys import DocumentsByKey, in_rounds, with_copies

ExchangeState: TypeAlias = Literal["staging", "replacing", "removing", "moving"]
OnStep: TypeAlias = Callable[[Literal["old objects removed", "new objects moved"], int], None]

_VERSION = 1

_IS_DIGEST = re.compile("[0-9a-f]{16}")
"""Names that `directory_of` makes."""

_KEYS_A_ROUND = 1000


@contextmanager
def only_conversion(base: BaseStoreHandle) -> Iterator[None]:
    """Lock the conversions of a store on a local disk; other stores are not locked.

    The lock ends with the process that holds it, but not with ``locking="lockfile"``.
    """
    backend = base.backend
    if not isinstance(backend, LocalBackend):
        yield
        return
    path = backend.path_of(STAGING)
    if os.path.islink(path.rstrip("/")):
        raise SpecError(f"{path!r} is a link, which nothing of ours is: remove it")
    message = f"a conversion of {base.describe()} goes on already: wait until it has ended"
    # The command line, which takes no lock files, looks at those of the system.
    kind = locks.lock_kind(base.options.locking, is_shown=True)
    lock = kind(os.path.join(path, "lock"))
    try:
        lock.acquire(0, message)
        yield
        # Killed conversions leave directories, and files that are no object yet.
        backend.tidy(STAGING)
    finally:
        lock.remove()
        with suppress(OSError):
            os.rmdir(path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """State and aim of the conversion of one array; the stored object has the same fields."""

    hierarchy: metadata.Hierarchy
    path: str
    state: ExchangeState
    prefix: str
    """Prefix of the keys of values; style, separator and ndim spell the rest."""
    style: Literal["draft", "default", "v2"]
    separator: str
    ndim: int
    documents: DocumentsByKey
    """New documents by key."""
    is_staged: bool
    """True if the conversion is in place."""
    grid: Sequence[int] | None = None
    """Number of old objects along each dimension."""
    runs: Sequence[str] = ("values",)
    """Names of the directories of staged values, one for each run; this run's is the last."""

    @property
    def node(self) -> metadata.Node:
        return metadata.Node(self.hierarchy, self.path)

    @property
    def directory(self) -> str:
        return directory_of(self.node)

    @property
    def values_prefix(self) -> str:
        """Prefix of the keys that tasks write."""
        return f"{self.directory}{self.runs[-1]}/" if self.is_staged else self.prefix

    def at_state(self, base: BaseStoreHandle, state: ExchangeState) -> Manifest:
        """Store and return the manifest with this state."""
        manifest = replace(self, state=state)
        key = f"{self.directory}manifest.json"
        base.write_documents({key: {"version": _VERSION, **asdict(manifest)}})
        return manifest

    def remove(self, base: BaseStoreHandle) -> None:
        """Delete the manifest first, so that no run repeats the end of the conversion."""
        base.perform([requests.Delete(f"{self.directory}manifest.json")])
        base.perform([requests.DeletePrefix(self.directory)])

    def is_beyond(self, key: str) -> bool:
        """Whether a key spells an object beyond the edge of the old array."""
        encoding = chunk_keys.ChunkKeyEncoding(self.style, self.separator)
        coords = encoding.decode(key[len(self.prefix) :], self.ndim)
        return self.grid is not None and any(map(operator.ge, coords or (), self.grid))

    def keys_below(self, base: BaseStoreHandle, prefix: str) -> Iterator[Sequence[str]]:
        """List the keys of objects, or of staged objects, in rounds."""
        encoding = chunk_keys.ChunkKeyEncoding(self.style, self.separator)
        top = walks.ObjectGrid.of_keys(prefix, encoding, (1,) * self.ndim, None).directory
        names = base.names(top)
        listed: Iterable[Sequence[str]] = [[top + name for name in names]]
        if self.separator == "/" and self.ndim > 1:
            # Each directory is listed before its objects are removed: no name is missed.
            listed = (
                base.perform([requests.ListPage(requests.KeyCursor(f"{top}{name}/"))])[0]
                for name in sorted(names)
                if encoding.decode_start(f"{top}{name}/"[len(prefix) :], self.ndim) is not None
            )
        for keys in listed:
            spelled = [k for k in keys if encoding.decode(k[len(prefix) :], self.ndim) is not None]
            yield from in_rounds(spelled, _KEYS_A_ROUND)

    def discard(self, base: BaseStoreHandle) -> None:
        """Delete the values that a conversion to another store has written."""
        for keys in self.keys_below(base, self.prefix):
            base.perform([requests.Delete(key) for key in keys])
        base.backend.tidy(self.prefix)


def directory_of(node: metadata.Node) -> str:
    name = f"{node.hierarchy}:{node.path}".encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(name).hexdigest()[:16]
    return f"{STAGING}{digest}/"


# ---------------------------------------------------------- earlier runs


def read_manifests(base: BaseStoreHandle) -> list[Manifest]:
    """Read the manifests of unfinished conversions; remove directories after a kill in step 9."""
    names = [name for name in sorted(base.names(STAGING)) if _IS_DIGEST.fullmatch(name)]
    keys = [f"{STAGING}{name}/manifest.json" for name in names]
    found = dict(zip(keys, base.values(keys), strict=True))
    without = [key.removesuffix("manifest.json") for key, value in found.items() if value is None]
    base.perform([requests.DeletePrefix(directory) for directory in without])
    return [_parse(key, value) for key, value in found.items() if value is not None]


def find_manifest(base: BaseStoreHandle, node: metadata.Node) -> Manifest | None:
    key = f"{directory_of(node)}manifest.json"
    (value,) = base.values([key])
    return None if value is None else _parse(key, value)


def begin(
    base: BaseStoreHandle, manifest: Manifest
) -> Literal["began", "continued", "discarded another"]:
    """Take step 1; return what became of the values that an earlier run may have written.

    A store without deletes gets no manifest: no run continues another one there.
    """
    if not base.supports_deletes:
        return "began"
    earlier = find_manifest(base, manifest.node)
    if earlier is not None and replace(earlier, state="staging", runs=manifest.runs) == manifest:
        replace(manifest, runs=[*earlier.runs, *manifest.runs]).at_state(base, "staging")
        for run in earlier.runs if manifest.is_staged else ():
            _move_values(base, replace(manifest, runs=[run]), manifest.values_prefix)
        return "continued"
    if earlier is not None and not earlier.is_staged:
        if manifest.is_staged:  # the values of an array that is there are its own
            earlier = None
        else:
            earlier.discard(base)
    base.perform([requests.DeletePrefix(manifest.directory)])
    manifest.at_state(base, "staging")
    return "began" if earlier is None else "discarded another"


def check_run(base: BaseStoreHandle, node: metadata.Node, run: str) -> None:
    """Raise an error unless this run still stages the values of an array.

    Tasks outlive a killed command. A later run then removes the objects that they read.
    """
    found = find_manifest(base, node)
    if found is None:
        raise SpecError(
            f"{base.describe()} has no notes on the conversion of {node.path!r}: another run has "
            "ended it, or take workers that reach the store; nothing was removed"
        )
    if (found.state, found.runs[-1]) != ("staging", run):
        why = "another run continues it: run the same again when that one has ended"
        raise ShardConflictError(f"the conversion of {node.path!r} was taken over: {why}")


def forget(base: BaseStoreHandle, node: metadata.Node) -> None:
    """Remove what an earlier run has left for an array that is not converted now."""
    if base.supports_deletes and (manifest := find_manifest(base, node)) is not None:
        manifest.remove(base)


def _parse(key: str, value: bytes | memoryview) -> Manifest:
    try:
        members = dict(metadata.parse_json(value) or {})
        version = members.pop("version")
        if version != _VERSION:
            raise ValueError(f"version {version!r}")
        if "runs" not in members and members["state"] == "replacing":
            members["state"] = "removing"  # of former versions, which had one name for both
        return Manifest(**members)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"the manifest {key!r} of an unfinished conversion cannot be read ({error}); it was "
            "written by another version of zarr-shardstore: finish it with that one"
        ) from error


def resume_exchanges(base: BaseStoreHandle, manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """Finish each exchange that an earlier run began, or take it back; return notes on it."""
    notes = []
    for manifest in filter(operator.attrgetter("is_staged"), manifests):
        fate = _fate(base, manifest)
        if fate in ("take back", "keep"):  # copies of documents may have markers
            found = zip(manifest.documents, base.documents(manifest.documents), strict=True)
            _write_copies(base, {key: doc for key, doc in found if doc is not None})
        match fate:
            case "take back":  # no object was deleted yet
                manifest.at_state(base, "staging")
            case "finish":
                note = _finish(base, manifest)
                notes.append(f"finished what an earlier run had begun with {manifest.path!r}{note}")
            case "remove":
                manifest.remove(base)
            case "keep":
                notes.append(
                    f"the array {manifest.path!r} was removed, restored or made anew after a "
                    "conversion was killed: what that had staged is now in "
                    f"{_keep(base, manifest)!r}, with its documents; remove it if the array is as "
                    "it should be"
                )
    return tuple(notes)


def _keep(base: BaseStoreHandle, manifest: Manifest) -> str:
    """Move staged objects to the quarantine, below the new documents; return its prefix."""
    aside = _quarantine("staged")
    base.write_documents({aside + key: doc for key, doc in manifest.documents.items()})
    _move_values(base, manifest, aside + manifest.prefix)
    base.backend.persist()
    manifest.remove(base)
    return aside


def _quarantine(why: str) -> str:
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())  # as the quarantines of repairs
    return f"{file_keys.QUARANTINE}/{now}-{uuid4().hex[:8]}-{why}/"


def _move_values(
    base: BaseStoreHandle, manifest: Manifest, prefix: str, step: OnStep = lambda *_: None
) -> None:
    cut = len(manifest.values_prefix)
    for keys in manifest.keys_below(base, manifest.values_prefix):
        base.perform([requests.Move(key, prefix + key[cut:]) for key in keys])
        step("new objects moved", len(keys))


def _fate(
    base: BaseStoreHandle, manifest: Manifest
) -> Literal["continue", "take back", "finish", "remove", "keep"]:
    """Decide about an exchange that an earlier run began, by the documents of its array."""
    stored = [value for value in base.values(list(manifest.documents)) if value is not None]
    docs = [metadata.parse_json(value) for value in stored]  # cut off: it was being written
    is_hidden = any(doc is None or metadata.has_conversion_marker(doc) for doc in docs)
    if manifest.state == "staging":
        return "continue" if docs else "remove"
    if is_hidden:
        return "finish"
    if docs and manifest.state == "replacing":
        return "take back"
    # In step 9 nothing is staged any more.
    has_staged = any(manifest.keys_below(base, manifest.values_prefix))
    return "keep" if has_staged else "remove"


# -------------------------------------------------------------- the exchange


def replace_values(
    base: BaseStoreHandle, manifest: Manifest, step: OnStep, *, has_index: bool
) -> str:
    """Exchange the objects of an array for the staged ones, which are all verified; call `step`
    with what was done, and the number of objects. Return a note for the report.

    `has_index` says that a consolidated index describes the old objects.
    """
    check_run(base, manifest.node, manifest.runs[-1])
    base.backend.persist()
    if isinstance(base.backend, LocalBackend):
        for keys in manifest.keys_below(base, manifest.prefix):
            for directory in map(base.backend.path_of, {key.rpartition("/")[0] for key in keys}):
                if not os.access(directory, os.W_OK | os.X_OK):
                    text = "it may not be changed, and nothing was: permit it, and run this again"
                    raise PermissionError(errno.EACCES, text, directory)
    return _finish(base, manifest.at_state(base, "replacing"), step, has_index=has_index)


def _finish(
    base: BaseStoreHandle,
    manifest: Manifest,
    step: OnStep = lambda *_: None,
    *,
    has_index: bool = True,
) -> str:
    """Take steps 4 to 9, or those that are left. Return a note for the report."""
    n_beyond, aside = 0, _quarantine("beyond-the-edge")
    if manifest.state != "moving":
        marked = {
            key: metadata.with_conversion_marker(doc) for key, doc in manifest.documents.items()
        }
        _write_documents(base, marked)
        manifest = manifest.at_state(base, "removing")
        base.backend.persist()
        for keys in manifest.keys_below(base, manifest.prefix):
            beyond = set(filter(manifest.is_beyond, keys))
            moves = [requests.Move(key, aside + key) for key in beyond]
            base.perform([*moves, *(requests.Delete(key) for key in keys if key not in beyond)])
            n_beyond += len(beyond)
            step("old objects removed", len(keys))
        manifest = manifest.at_state(base, "moving")
    base.backend.tidy(manifest.prefix)  # an empty directory may have the key of a shard
    _move_values(base, manifest, manifest.prefix, step)
    if has_index:
        base.perform(
            [requests.Delete(manifest.prefix + consolidated_index.CONSOLIDATED_INDEX_NAME)]
        )
    base.backend.tidy(manifest.prefix)
    base.backend.persist()
    _write_documents(base, manifest.documents)
    base.backend.persist()
    manifest.remove(base)
    if not n_beyond:
        return ""
    return f"; objects beyond the edge of the array, {n_beyond:,}, were moved to {aside!r}"


def _write_documents(base: BaseStoreHandle, documents: DocumentsByKey) -> None:
    """Write documents of an array, after their copies: no group may show a hidden array."""
    _write_copies(base, documents)
    base.write_documents(documents)


def _write_copies(base: BaseStoreHandle, documents: DocumentsByKey) -> None:
    keys: dict[str, None] = {}
    for node in map(metadata.node_of_document, documents):
        assert node is not None
        keys |= dict.fromkeys(reversed(metadata.keys_of_groups(node)))
    copies: dict[str, Mapping[str, Any]] = {}
    for key, doc in zip(keys, base.documents(keys), strict=True):
        path = key.rpartition("/")[0]
        if doc is not None and (new := with_copies(doc, path, documents)) is not doc:
            copies[key] = new
    base.write_documents(copies)
