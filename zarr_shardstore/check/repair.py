"""Repair of a store: of each damaged shard the whole chunks stay, and the original is put aside."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from zarr_shardstore.check.check_store import check_store
from zarr_shardstore.check.findings import CheckReport, Finding, Keep
from zarr_shardstore.check.quarantine import exchange, put_aside
from zarr_shardstore.check.remains import check_side_files
from zarr_shardstore.check.salvage import salvage
from zarr_shardstore.check.shards import ArrayChecker, CheckResult, coords_of_entry
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import Bytes, build_shard
from zarr_shardstore.inspect.find import find_contents
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.io.local.files import QUARANTINE
from zarr_shardstore.io.local.locks import LOCK_SUFFIX
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX
from zarr_shardstore.shards.requests import Delete, Get
from zarr_shardstore.shards.stack import Crc32cTransformer, ValueTransformer

Did: TypeAlias = Literal["rewritten", "removed", "left"]


@dataclass(frozen=True, slots=True)
class RepairAction:
    """Repair of one object.

    Parameters
    ----------
    did
        ``"left"``: the object was not changed; `message` has the reason.
    n_kept : int
        Chunks of the shard that are whole.
    lost : tuple of tuple of int
        Coordinates of the chunks that are missing from now on, where an index tells them.
    """

    key: str
    did: Did
    message: str
    n_kept: int = 0
    lost: tuple[Coords, ...] = ()


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Result of a repair.

    Parameters
    ----------
    quarantine : str
        Prefix of the originals in the base store; `restore_quarantine` puts them back.
    check : CheckReport, optional
        The check after the repair, at the level of the one before; ``None`` after a dry run.
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
    report: CheckReport, *, keep: Keep = "salvage", dry_run: bool = True
) -> RepairReport:
    """Repair the objects that a check has found damaged.

    Parameters
    ----------
    report
        Of `check_store`, in this process.
    keep
        ``"salvage"``: each chunk that decodes stays, also where the checksum of the index is wrong,
        as far as the index contradicts nothing. ``"drop"``: without a valid index all chunks of a
        shard become missing.
    dry_run
        Tell what would be done, and write nothing.

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
    object that was written since it was checked is left as it is. Memory: two copies of a shard.
    """
    if keep not in ("salvage", "drop"):
        raise SpecError(f"keep is 'salvage' or 'drop', got {keep!r}")
    if report.base is None:
        raise SpecError("the report has no store: take one that check_store has returned")
    base = report.base
    if not dry_run:
        base.check_writable()
        base.check_replaceable()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    run = _Repair(base, f"{QUARANTINE}/{stamp}-{uuid.uuid4().hex[:8]}/", keep, dry_run)
    by_key: dict[str, list[Finding]] = {}
    for found in report.findings:
        if found.severity != "info":
            by_key.setdefault(found.key, []).append(found)
    actions = tuple(run.repair(key, found) for key, found in by_key.items())
    check = None if dry_run else check_store(base, report.paths, level=report.level)  # type: ignore[arg-type]
    return RepairReport(report.store, run.prefix.rstrip("/"), actions, dry_run, check)


class _Repair:
    """One repair: its quarantine, and the checkers of the arrays."""

    def __init__(self, base: BaseStoreHandle, prefix: str, keep: Keep, dry_run: bool) -> None:
        self.base, self.prefix, self.keep, self.dry_run = base, prefix, keep, dry_run
        arrays = base.run(find_contents()).arrays
        self._docs = {(node.path, node): found.doc for node, found in arrays.items()}
        self._checkers: dict[str, list[ArrayChecker]] = {}

    def repair(self, key: str, found: Sequence[Finding]) -> RepairAction:
        """Repair one object, or tell why not."""
        kinds = {each.kind for each in found if each.repairable}
        try:
            if kinds & {"partial_file", "lock_file"}:
                return self._remove_side_file(key)
            if kinds == {"outside_grid"} and not self._checkers_of(key):
                return self._exchange(key, None, "it lies outside the grid of its array")
            is_chunk = kinds and kinds.isdisjoint(
                {"foreign_object", "consolidated_index", "outside_grid"}
            )
            if "journal" in kinds:
                key = key.removesuffix(JOURNAL_SUFFIX)
            if is_chunk:
                return self._repair_chunks(key)
        except (ShardStoreError, OSError) as error:
            return RepairAction(key, "left", f"{type(error).__name__}: {error}")
        return RepairAction(
            key,
            "left",
            "no repair is known for "
            + ", ".join(sorted({each.kind.replace("_", " ") for each in found})),
        )

    def _checkers_of(self, key: str) -> list[ArrayChecker]:
        found = []
        for (path, node), doc in self._docs.items():
            if key.startswith(node.chunk_prefix):
                if path not in self._checkers:
                    try:
                        self._checkers[path] = [ArrayChecker(node, doc, "decode")]
                    except ShardStoreError:
                        self._checkers[path] = []
                found += [c for c in self._checkers[path] if c.grid.coords_of(key) is not None]
        return found

    def _repair_chunks(self, key: str) -> RepairAction:
        checkers = self._checkers_of(key)
        if len(checkers) != 1:
            return RepairAction(key, "left", "its array is not known here")
        checker = checkers[0]
        if checker.grid.layout is None:
            old, result = self._read(key), CheckResult()  # in this order: a later write counts
            checker.check_values(self.base, [key], result)
            if old is None or not result.findings:
                return RepairAction(key, "left", "it is whole or missing now")
            return self._exchange(key, None, result.findings[0].message, old)
        shard = checker.grid.layout.shard_of_key(key)
        below = checker.grid.below
        if shard is None or not all(isinstance(each, ValueTransformer) for each in below):
            return RepairAction(key, "left", "a transformer gives its shard another key")
        if checker.unchecked:
            return RepairAction(key, "left", checker.unchecked)
        old = self._read(key)
        if old is None:
            return RepairAction(key, "left", "it is missing now")
        data: Bytes = old
        text = ""
        for each in reversed(below):
            try:
                data = each.decode(key, data)  # type: ignore[attr-defined]
            except ShardStoreError:
                if type(each) is not Crc32cTransformer:
                    raise
                data = memoryview(data)[:-4]
                text = "the checksum of the shard is wrong: chunks without their own may differ; "
        return self._rewrite(checker, shard, key, old, memoryview(data), text)

    def _rewrite(
        self,
        checker: ArrayChecker,
        shard: ShardRef,
        key: str,
        old: Bytes,
        data: memoryview,
        text: str,
    ) -> RepairAction:
        kept = salvage(checker, shard, data, guesses=self.keep == "salvage")
        new: Bytes | None = None
        if kept.entries:
            new = build_shard(kept.entries, shard.layout.spec, "morton")
            for each in checker.grid.below:
                new = each.encode(key, new)  # type: ignore[attr-defined]
        text += "its index is valid" if kept.has_index else "it has no valid index"
        lost = tuple(coords_of_entry(shard, i) for i in kept.lost)
        return self._exchange(key, new, text, old, n_kept=len(kept.entries), lost=lost)

    def _read(self, key: str) -> Bytes | None:
        value: Bytes | None = self.base.perform([Get(key, None, True)])[0].value
        return value

    def _exchange(
        self, key: str, new: Bytes | None, message: str, old: Bytes | None = None, **more: Any
    ) -> RepairAction:
        """Put an object into the quarantine, and then another in its place.

        A journal is put there with its shard: the writer that locks the shard undoes its change.
        """
        old = self._read(key) if old is None else old
        action = RepairAction(key, "removed" if new is None else "rewritten", message, **more)
        if self.dry_run or old is None:
            return action
        names = [key, key + JOURNAL_SUFFIX]
        raw, journal = self.base.values(names, check=False)
        if raw is None or (journal is None and raw != old):
            return RepairAction(key, "left", "it is being written: check again")
        put_aside(self.base, self.prefix, key, raw, new)
        if journal is not None:
            put_aside(self.base, self.prefix, names[1], journal, None)
        exchange(self.base, key, old, new)
        return action

    def _remove_side_file(self, key: str) -> RepairAction:
        """Move a file that no process uses to the quarantine."""
        (found,) = [*check_side_files(self.base, [key]), None][:1]
        if found is None or found.kind == "in_use":
            return RepairAction(key, "left", "a writer uses it, or has removed it")
        if not self.dry_run:
            (value,) = self.base.values([key], check=False)
            put_aside(self.base, self.prefix, key, value or b"", None)
            if key.endswith(LOCK_SUFFIX):  # only the process that has the lock removes it
                with self.base.backend.lock(key.removesuffix(LOCK_SUFFIX)):  # type: ignore[union-attr]
                    pass
            else:
                self.base.perform([Delete(key)])
        return RepairAction(key, "removed", found.message)
