"""Repair of a store: the whole chunks of each damaged shard stay, the original is in quarantine."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal, TypeAlias

from zarr_shardstore.access import (
    BaseStoreHandle,
    LocalBackend,
    ShardingMapping,
    StoreLike,
    arguments,
    chunk_keys,
    file_keys,
    index_reads,
    layouts,
    locks,
    requests,
    shard_format,
    stacks,
)
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.tools.check import side_files
from zarr_shardstore.tools.check.check_store import check_store
from zarr_shardstore.tools.check.findings import CheckReport, CheckResult, Finding, Keep
from zarr_shardstore.tools.check.objects import (
    ArrayChecker,
    coords_of_entry,
    index_key_of,
    is_version_of,
)
from zarr_shardstore.tools.check.quarantine import put_aside
from zarr_shardstore.tools.check.replica import Replica
from zarr_shardstore.tools.check.salvage.damaged_shard import Salvage
from zarr_shardstore.tools.check.salvage.salvage import advice, order_of_others, salvage
from zarr_shardstore.tools.check.tasks import checker_of, renew_documents
from zarr_shardstore.tools.inspect.find import arrays_at, find_contents

_Bytes: TypeAlias = shard_format.Bytes


@dataclass(frozen=True, slots=True)
class RepairAction:
    """Repair of one object.

    Parameters
    ----------
    did
        ``"left"``: the object was not changed; `message` has the reason.
    n_kept, n_fetched : int
        Whole chunks of the shard, and chunks from the replica.
    lost : tuple of tuple of int
        Coordinates of the chunks that cannot be recovered. Without a valid index these are all
        other chunks of the shard, stored or not.
    n_unnamed : int
        Chunks that seem whole, but may be any of the lost ones.
    array, order : str, optional
        Path of the array with unnamed chunks, and the order of all its other shards. As `order` of
        `repair_store` it names them; the names are right if the shard was full and in this order.
    """

    key: str
    did: Literal["rewritten", "removed", "left"]
    message: str
    n_kept: int = 0
    n_fetched: int = 0
    lost: tuple[chunk_keys.Coords, ...] = ()
    n_unnamed: int = 0
    array: str | None = None
    order: shard_format.EntryOrder | None = None


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Result of a repair.

    Parameters
    ----------
    quarantine : str
        Prefix of the originals in the base store, empty if no object was changed.
        `restore_quarantine` puts them back.
    check : CheckReport, optional
        The check after the repair, at the level of the one before; ``None`` after a dry run, or if
        it failed, which an action says.
    """

    store: str
    quarantine: str
    actions: tuple[RepairAction, ...]
    dry_run: bool
    check: CheckReport | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        names = ("store", "quarantine", "dry_run")
        report = {name: getattr(self, name) for name in names}
        check = None if self.check is None else self.check.as_dict()
        return {**report, "actions": [asdict(each) for each in self.actions], "check": check}


def repair_store(
    report: CheckReport,
    *,
    keep: Keep = "salvage",
    source: StoreLike | None = None,
    order: shard_format.EntryOrder | None = None,
    dry_run: bool = True,
) -> RepairReport:
    """Repair the objects that a check has found damaged.

    Parameters
    ----------
    report
        Of `check_store`, in this process.
    keep
        ``"salvage"``: keep each whole chunk with a proved key, and leave a shard without such a
        chunk. Proofs are a valid index, the checksum or single entries of a damaged one, and an
        older index, with older values. ``"drop"``: without a valid index all chunks become missing.
    source
        A replica, for lost chunks: any store that `ShardingStore` wraps, sharded or not. An array
        of the same path, shape, chunk shape and data type counts. Chunks of other codecs are
        encoded again. Each is decoded before it is stored.
    order
        A statement about the shards whose index is lost: each was full, and written in this order.
        If it is wrong it puts chunks under wrong keys: look at the values then. zarr-python,
        conversions and writes of whole shards take ``"morton"`` unless you chose another one,
        tensorstore and zarrs ``"C"``; actions have the order of the other shards.
    dry_run
        Report the actions without writing.

    Returns
    -------
    RepairReport

    Raises
    ------
    SpecError
        If an argument is not valid.
    ReadOnlyError
        If the store cannot be written.

    Notes
    -----
    Each original is in the quarantine, read back and compared, before its object is changed. An
    object that was written since the check is left as it is. Where removals have no condition, as
    on S3, each object but a shard is also left. Memory: some copies of the largest shard.
    """
    arguments.check_choice("keep", keep, Keep)
    if order is not None:
        arguments.check_choice("order", order, shard_format.EntryOrder)
    if not isinstance(report, CheckReport) or report.base is None:
        raise SpecError("repair_store takes the report that check_store has returned")
    base = report.base.synced()
    if not dry_run:
        base.check_writable()
        base.check_replaceable()
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{uuid.uuid4().hex[:8]}"
    replica = None if source is None else Replica(source)
    run = _Repair(base, f"{file_keys.QUARANTINE}/{name}/", keep, replica, order, dry_run)
    by_key: dict[str, list[Finding]] = {}
    for found in report.findings:
        if found.severity != "info" and found.kind != "consolidated_index":
            suffix = file_keys.JOURNAL_SUFFIX if found.kind == "journal" else ""
            by_key.setdefault(found.key.removesuffix(suffix), []).append(found)
    actions: list[RepairAction] = []
    check = None
    try:
        for key, some in by_key.items():
            actions.append(run.repair(key, some))
        actions += run.consolidate(report.findings, actions)
        check = None if dry_run else check_store(base, report.paths, level=report.level)  # type: ignore[arg-type]
    except Exception as error:
        actions.append(RepairAction("", "left", f"no check: {type(error).__name__}: {error}"))
    except BaseException as error:
        done = ", ".join(f"{a.key!r} {a.did}, lost: {list(a.lost)}" for a in actions)
        error.add_note(f"repaired so far: {done or None}; originals: {run.prefix}")
        raise
    is_changed = not dry_run and any(action.did != "left" for action in actions)
    quarantine = run.prefix.rstrip("/") if is_changed else ""
    return RepairReport(report.store, quarantine, tuple(actions), dry_run, check)


@dataclass
class _Repair:
    """One repair: its quarantine, and the checkers of the arrays."""

    base: BaseStoreHandle
    prefix: str
    keep: Keep
    replica: Replica | None
    order: shard_format.EntryOrder | None
    dry_run: bool

    def __post_init__(self) -> None:
        self.has_conditions = self.base.backend.optimistic() is not None
        arrays = self.base.run(find_contents()).arrays.items()
        self._docs = {node: found.doc for node, found in arrays}
        self._documents: Mapping[str, _Bytes | None] = {}
        """Stored documents by which the object was judged, by their keys."""
        self._checker_of = cache(lambda node: checker_of(self.base, node, self._docs[node]))
        self._order_of_others = cache(order_of_others)

    def repair(self, key: str, found: Sequence[Finding]) -> RepairAction:
        """Repair one object, or return why not."""
        kinds = {each.kind for each in found if each.repairable}
        self._documents = {}
        try:
            if kinds & {"partial_file", "lock_file"}:
                return self._remove_side_file(key)
            self._documents, is_changed = renew_documents(self.base, self._docs, key)
            if is_changed:
                self._checker_of.cache_clear()
            checkers = self._checkers_of(key)
            if "outside_grid" in kinds <= {"outside_grid", "journal"}:
                return self._remove_outside(key, found[0].array or "", checkers)
            if kinds:
                return self._repair_chunks(key, checkers, has_journal="journal" in kinds)
        except Exception as error:  # of any client
            return RepairAction(key, "left", f"{type(error).__name__}: {error}")
        names = sorted({each.kind.replace("_", " ") for each in found})
        return RepairAction(key, "left", f"no repair is known for {', '.join(names)}")

    def _checkers_of(self, key: str) -> list[ArrayChecker]:
        """Return the checkers of the arrays of an object: one, or one for each of two formats."""
        near = [self._checker_of(node) for node in self._docs if key.startswith(node.chunk_prefix)]
        return [each for each in near if each and each.grid.coords_inside(key) is not None]

    def _remove_outside(self, key: str, path: str, checkers: Sequence[Any]) -> RepairAction:
        """Remove an object outside of the grid, unless its array grows or has grown."""
        base, backend = self.base, self.base.backend
        if side_files.is_growing(base, path) or side_files.is_young(base, key):
            return RepairAction(key, "left", "a writer may append it")
        with ExitStack() as stack:
            has_locks = base.options.locking == "os" and not self.dry_run
            if has_locks and isinstance(backend, LocalBackend):
                name = side_files.frames_lock(path)
                lock, is_there = locks.KeptLock(backend.root + name), base.sizes([name])[0]
                lock.acquire(0, "a writer appends frames")
                stack.callback(lock.remove if is_there is None else lock.close)
            now = [checker_of(base, a.node, a.doc) for a in arrays_at(base, path)]
            are_inside = [c is None or c.grid.coords_inside(key) is not None for c in now]
            if checkers or not now or any(are_inside):
                return RepairAction(key, "left", "it lies in the grid by now")
            return self._exchange(key, None, "it lies outside the grid of its array")

    def _repair_chunks(
        self, key: str, checkers: Sequence[ArrayChecker], *, has_journal: bool
    ) -> RepairAction:
        if not checkers:
            return RepairAction(key, "left", "its array is not known here")
        checker = checkers[0]
        if len({each.grid.layout if each.grid.is_sharded else None for each in checkers}) > 1:
            return RepairAction(key, "left", "the documents of its array contradict each other")
        if not checker.grid.is_sharded:
            old, result = self._read(key), CheckResult()  # in this order: a later write counts
            checker.check_values([key], result)
            if old is None or not result.findings:
                return RepairAction(key, "left", "it is whole or missing now")
            return self._replace_value(checker, key, old, result.findings[0].message)
        shard = checker.grid.layout.shard_of_key(key)
        if shard is None or not _keeps_keys(checker):
            return RepairAction(key, "left", "a transformer gives its shard another key")
        if checker.unchecked:
            return RepairAction(key, "left", checker.unchecked)
        if shard.is_adopted:
            text = "it is an adopted file: undo the adoption, and adopt it again"
            return RepairAction(key, "left", text)
        old = self._read(key)
        if old is None:
            return self._exchange(key, None, "its journal has no shard")
        now = CheckResult()
        checker.check_shards([key], now)
        is_whole = all(each.kind == "consolidated_index" for each in now.findings)
        if is_whole and not has_journal:
            return RepairAction(key, "left", "it is whole now")
        return self._rewrite(checker, shard, key, old)

    def _replace_value(
        self, checker: ArrayChecker, key: str, old: _Bytes, text: str
    ) -> RepairAction:
        """Replace a plain chunk by the chunk of the replica, or drop it."""
        coords, new = checker.grid.layout.coords_of(key), None
        if self.replica is not None and coords is not None and _keeps_keys(checker):
            new = self.replica.chunk(checker, key, coords)
        if new is not None:
            return self._exchange(key, _encoded(checker, key, new), text, old, n_fetched=1)
        lost = () if coords is None else (coords,)
        if self.keep == "salvage":
            return RepairAction(key, "left", f"{text}: no chunk can be recovered", lost=lost)
        return self._exchange(key, None, text, old, lost=lost)

    def _rewrite(
        self, checker: ArrayChecker, shard: layouts.ShardRef, key: str, old: _Bytes
    ) -> RepairAction:
        data: _Bytes = old
        if not isinstance(self.base.backend, LocalBackend):  # which has read it by the journal
            data = side_files.without_cut_change(
                old, *self.base.values([key + file_keys.JOURNAL_SUFFIX])
            )
        data, text = _decoded(checker.grid.below, key, data)
        kept = salvage(checker, shard, memoryview(data), **self._evidence(checker, shard))
        if text and not checker.has_checksum and (why := self._drop_unproved(checker, shard, kept)):
            lost = tuple(coords_of_entry(shard, i) for i in kept.lost)
            return RepairAction(key, "left", text + why, lost=lost)
        fetched = self._fetch(checker, shard, [*kept.lost, *kept.older])
        n_fetched, n_kept = len(fetched), len(kept.entries.keys() - fetched.keys())
        kept.entries |= fetched
        lost = tuple(coords_of_entry(shard, i) for i in kept.lost if i not in kept.entries)
        text += kept.text
        more: dict[str, Any] = {"n_kept": n_kept, "n_fetched": n_fetched, "lost": lost}
        is_left = not kept.entries and self.keep == "salvage"  # fill values would hide the damage
        text += ": no chunk can be recovered" * is_left
        if lost and kept.n_unnamed:
            n_others, order = self._order_of_others(checker)
            text += f"; {advice(kept.n_unnamed, n_others, order)}"
            more |= {"n_unnamed": kept.n_unnamed, "array": checker.path, "order": order}
        if is_left:
            return RepairAction(key, "left", text, **more)
        new: _Bytes | None = None
        if kept.entries or self.has_conditions:  # a shard without entries says the same as none
            new = shard_format.build_shard(kept.entries, shard.spec, "morton")
            new = _encoded(checker, key, new)
        return self._exchange(key, new, text, old, **more)

    def _drop_unproved(self, checker: ArrayChecker, shard: layouts.ShardRef, kept: Salvage) -> str:
        """Drop chunks to which the wrong checksum of the shard may be due, or say why it stays."""
        theirs = self._fetch(checker, shard, kept.entries)
        differ = [i for i, new in theirs.items() if new != kept.entries[i]]
        # Damage that a codec has found is taken for the reason.
        unproved = [] if differ or kept.lost else [i for i in kept.entries if i not in theirs]
        for i in differ + unproved:
            del kept.entries[i]
            kept.lost.append(i)
        if differ and self.keep == "salvage":
            return f"{len(differ)} differ from the replica, whose chunks keep='drop' takes"
        if unproved and self.keep == "salvage":
            return f"{len(unproved)} have none: a replica proves them, keep='drop' drops them"
        return ""

    def _fetch(
        self, checker: ArrayChecker, shard: layouts.ShardRef, ids: Iterable[int]
    ) -> dict[int, memoryview]:
        """Return chunks of the replica, if there is one, by entry id."""
        return {} if self.replica is None else self.replica.chunks(checker, shard, ids)

    def _evidence(self, checker: ArrayChecker, shard: layouts.ShardRef) -> dict[str, Any]:
        """Return the keyword arguments of `salvage`, also from the consolidated index."""
        evidence: dict[str, Any] = {"guesses": self.keep == "salvage", "order": self.order}
        copy = checker.copy_of(shard)
        if copy is not None:
            (found,) = checker.read_indexes([shard], consistent=True)
            if not isinstance(found, Exception):
                is_current = is_version_of(self.base, shard.key, copy, found) is True
                evidence |= {"copy": copy, "is_current": is_current and found.size == copy.size}
        return evidence

    def _read(self, key: str) -> _Bytes | None:
        found: requests.Found = self.base.perform([requests.Get(key, None, True)])[0]
        if found.value is None:
            return None
        size = self.base.sizes([key])[0] if found.size is None else found.size
        return index_reads.check_whole(key, found.value, size)

    def _exchange(
        self, key: str, new: _Bytes | None, message: str, old: _Bytes | None = None, **more: Any
    ) -> RepairAction:
        """Put an object with its journal into the quarantine, and then another in its place. The
        writer that locks the shard undoes the change in the journal."""
        names = [key, key + file_keys.JOURNAL_SUFFIX, key + locks.LOCK_SUFFIX]
        old = self._read(key) if old is None else old
        raw, journal, lock = self.base.values(names)
        if old is None and (raw is not None or journal is None):
            return RepairAction(key, "left", "it is missing now, or being written: check again")
        if new is None and old is not None and self.has_conditions:
            text = "this store removes nothing under a condition: remove it if no program writes it"
            return RepairAction(key, "left", f"{message}; {text}")
        action = RepairAction(key, "removed" if new is None else "rewritten", message, **more)
        if self.dry_run:
            return action
        if old is not None:
            if raw is None or (journal is None and raw != old):
                return RepairAction(key, "left", "it is being written: check again")
            put_aside(self.base, self.prefix, key, raw, new, old)
        for name, value in ((names[1], journal), (names[2], lock)):
            if value is not None:  # it goes with the shard
                put_aside(self.base, self.prefix, name, value)
        also = [] if journal is None else [requests.Delete(names[1])]
        try:
            self.base.swap(key, old, new, also, self._documents)
        except Exception as error:  # the reply may be lost
            is_left = isinstance(error, ShardStoreError)
            with suppress(Exception):
                is_left |= self.base.values([key]) == [raw]
            if is_left:
                raise
            text = f"{message}; perhaps, so check again ({type(error).__name__}: {error})"
            return replace(action, message=text)
        return action

    def _remove_side_file(self, key: str) -> RepairAction:
        """Move a file that no process uses to the quarantine."""
        (found,) = [*side_files.check_side_files(self.base, [key]), None][:1]
        if found is None or found.kind == "in_use":
            return RepairAction(key, "left", "a writer uses it, or has removed it")
        if not file_keys.is_side_file(key):  # of another program, which may store it again
            return self._exchange(key, None, found.message)
        shard = key.removesuffix(locks.LOCK_SUFFIX)
        if shard != key and self.base.options.locking == "lockfile":
            return RepairAction(key, "left", "a process of another host may have this lock")
        value, journal = self.base.values([key, shard + file_keys.JOURNAL_SUFFIX])
        if journal is not None and shard != key:
            return RepairAction(key, "left", "it goes with the journal of its shard")
        if not self.dry_run:
            put_aside(self.base, self.prefix, key, value or b"")
            lock = self.base.backend.lock(shard) if shard != key else None
            with nullcontext() if lock is None else lock:  # the last process removes its file
                if lock is None:
                    self.base.perform([requests.Delete(key)])
        return RepairAction(key, "removed", found.message)

    # ----------------------------------------------------------- consolidated indexes

    def consolidate(
        self, found: Sequence[Finding], done: Sequence[RepairAction]
    ) -> list[RepairAction]:
        """Consolidate stale indexes again, and the indexes of arrays with a changed shard. The next
        repair of a damaged shard that was left may need the old one."""
        stale = [each for each in found if each.kind == "consolidated_index" and each.repairable]
        keys = {each.key for each in stale} | {a.key for a in done if a.did != "left"}
        left = [a.key for a in done if a.did == "left" and self._checkers_of(a.key)]
        actions = []
        for node, doc in self._docs.items():
            key, prefix = index_key_of(node, doc), node.chunk_prefix
            if key is None or not any(each.startswith(prefix) for each in keys):
                continue
            if any(each.startswith(prefix) for each in left):
                text = "another repair may need it: a shard of its array was left"
                actions.append(RepairAction(key, "left", text))
            else:
                actions.append(self._consolidate(key, node.path))
        known = {action.key for action in actions}
        other = [f.key for f in stale if f.array is None and f.key not in known]
        return actions + [self._consolidate(key, None) for key in other]

    def _consolidate(self, key: str, path: str | None) -> RepairAction:
        try:
            return self._consolidate_or_remove(key, path)
        except Exception as error:  # of any client
            return RepairAction(key, "left", f"{type(error).__name__}: {error}")

    def _consolidate_or_remove(self, key: str, path: str | None) -> RepairAction:
        """Store a consolidated index again, or remove it. Readers take an index from it only for
        a shard that has not changed since: no write of another program is lost with it."""
        (raw,) = self.base.values([key])
        if raw is None:
            return RepairAction(key, "left", "there is none: consolidate again")
        made = path is not None
        if not self.dry_run:
            put_aside(self.base, self.prefix, key, raw)
            made = False
            if path is not None:
                mapping = ShardingMapping(self.base.store, locking=self.base.options.locking)
                with suppress(ShardStoreError):  # a store without versions, or no shard is left
                    made = path in mapping.consolidate_index(path)
            if not made:
                self.base.perform([requests.Delete(key)])
        text = "it is a copy of the indexes of the shards, and was stale"
        return RepairAction(key, "rewritten" if made else "removed", text)


def _keeps_keys(checker: ArrayChecker) -> bool:
    return all(isinstance(each, stacks.ValueTransformer) for each in checker.grid.below)


def _encoded(checker: ArrayChecker, key: str, value: _Bytes) -> _Bytes:
    """Return a shard, or a plain chunk, as the transformers below encode it."""
    for each in checker.grid.below:
        value = each.encode(key, value)  # type: ignore[attr-defined]
    return value


def _decoded(below: Sequence[Any], key: str, data: _Bytes) -> tuple[_Bytes, str]:
    """Return a shard as the transformers below decode it, and a text if its checksum is wrong."""
    text = ""
    for each in reversed(below):
        try:
            data = each.decode(key, data)
        except ShardStoreError:
            if type(each) is not stacks.Crc32cTransformer:
                raise
            data = memoryview(data)[:-4]
            text = "the checksum of the shard is wrong: chunks without their own may differ; "
    return data, text
