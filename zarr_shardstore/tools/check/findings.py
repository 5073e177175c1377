"""Findings of a check, and the report that has them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from zarr_shardstore.access import BaseStoreHandle, chunk_keys

Level: TypeAlias = Literal["index", "entries", "decode"]

MAX_FINDINGS = 1000
"""Findings of one kind in one object, or in the listing of one array; the others are counted."""

Keep: TypeAlias = Literal["salvage", "drop"]
"""Chunks of a damaged shard that a repair keeps."""

Severity: TypeAlias = Literal["error", "warning", "info"]

_OfIndex: TypeAlias = Literal["torn_index", "index_checksum", "index_form"]
_OfEntry: TypeAlias = Literal["entry_out_of_bounds", "entry_overlap", "entry_length"]
_OfChunk: TypeAlias = Literal["chunk_checksum", "chunk_undecodable", "chunk_size"]
_OfSideFile: TypeAlias = Literal["partial_file", "lock_file", "journal", "consolidated_index"]
_OfDocument: TypeAlias = Literal["consolidated_metadata", "twin_documents", "empty_level"]
_OfKey: TypeAlias = Literal["outside_grid", "foreign_object", "unfinished_conversion"]
_Fact: TypeAlias = Literal["unknown_key", "in_use", "unchecked"]

Kind: TypeAlias = Literal[
    _OfIndex, _OfEntry, _OfChunk, "unreadable", "document", _OfDocument, _OfSideFile, _OfKey, _Fact
]

_SEVERITIES: dict[Kind, Severity] = {
    **dict.fromkeys(get_args(Literal[_OfDocument, _OfSideFile, _OfKey]), "warning"),
    **dict.fromkeys(get_args(_Fact), "info"),
}
"""Severity of the kinds that are no errors."""

_REPAIRABLE: frozenset[Kind] = frozenset(
    {*get_args(Literal[_OfIndex, _OfEntry, _OfChunk, _OfSideFile]), "outside_grid"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One contradiction in a store, or one fact that a check reports.

    Parameters
    ----------
    kind, severity
        Errors are damages: a read fails or gives wrong values. Warnings are side files and
        contradictions that harm some readers, or none yet. ``"info"`` is no damage.
    key : str
        Key of the object in the base store.
    message : str
        The contradiction, with both numbers.
    array : str, optional
        Path of the array.
    shard : tuple of int, optional
        Coordinates of the shard in the grid of shards.
    chunk : tuple of int, optional
        Coordinates of the chunk in the grid of chunks.
    byte_range : tuple of int, optional
        Half-open byte range in the object.
    repairable : bool
        Whether a repair can put the object in order, perhaps without the chunk.
    """

    kind: Kind
    key: str
    message: str
    severity: Severity
    array: str | None = None
    shard: chunk_keys.Coords | None = None
    chunk: chunk_keys.Coords | None = None
    byte_range: tuple[int, int] | None = None
    repairable: bool = False


def finding(kind: Kind, key: str, message: str, **more: Any) -> Finding:
    """Return a finding with the severity of its kind, unless that is given."""
    severity = more.pop("severity", None) or _SEVERITIES.get(kind, "error")
    more = {"repairable": severity != "info" and kind in _REPAIRABLE, **more}
    return Finding(kind=kind, key=key, message=message, severity=severity, **more)


COUNTS = ("n_objects", "n_chunks", "n_bytes", "n_omitted", "n_without_checksum")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check.

    Parameters
    ----------
    store : str
        The base store, in words.
    findings
        Sorted by key; of each object at most 1,000, the others are in `n_omitted`.
    n_arrays, n_objects, n_chunks, n_bytes : int
        Arrays, their objects and chunks that were checked, and the bytes that were read of them.
    n_without_checksum : int
        Checked chunks whose codecs have no checksum: a changed byte of them may not be seen.
    seconds : float
        Wall time.
    """

    store: str
    level: Level
    findings: tuple[Finding, ...]
    n_arrays: int = 0
    n_objects: int = 0
    n_chunks: int = 0
    n_bytes: int = 0
    n_omitted: int = 0
    n_without_checksum: int = 0
    seconds: float = 0.0
    base: BaseStoreHandle | None = field(default=None, repr=False, compare=False)
    """The base store, for a repair."""
    paths: tuple[str, ...] | None = field(default=None, repr=False)
    """The argument `paths` of the check."""

    @property
    def is_clean(self) -> bool:
        """True if there is no error and no warning."""
        return all(found.severity == "info" for found in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings of each severity."""
        counted = Counter(found.severity for found in self.findings)
        return {severity: counted[severity] for severity in get_args(Severity)}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        names = ("store", "level", "n_arrays", *COUNTS, "seconds", "is_clean", "counts")
        report = {name: getattr(self, name) for name in names}
        return {**report, "findings": [asdict(found) for found in self.findings]}


@dataclass(slots=True)
class CheckResult:
    """Result of one task, or of several."""

    findings: list[Finding] = field(default_factory=list)
    n_objects: int = 0
    n_chunks: int = 0
    n_bytes: int = 0
    n_omitted: int = 0
    n_without_checksum: int = 0
    task: str = ""
    """Name of the task, for the notes of a check."""

    def add(self, other: CheckResult) -> None:
        self.findings += other.findings
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
