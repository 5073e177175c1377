"""Results and progress of conversions and compactions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from operator import add
from typing import Any, Literal, TypeAlias

from zarr_shardstore.access import chunk_keys, metadata
from zarr_shardstore.tools.inspect.readers import ONLY_HERE, summarize

Action: TypeAlias = Literal["sharded", "unsharded", "resharded", "copied", "skipped", "checked"]


@dataclass(frozen=True, slots=True)
class ArrayReport:
    """Result for one array; of a dry run, the expected result.

    Parameters
    ----------
    chunks_per_shard : tuple of int, optional
        Shards of the array now; ``None`` if there are none.
    reason : str
        Reason for the action.
    n_chunks, n_bytes : int
        Values that were written and verified, and their bytes.
    n_objects : int
        Objects that hold the values now.
    n_tasks : int
        Regions that were visited; in a dry run, the maximum.
    n_resumed : int
        Tasks that an earlier run had done; their work was compared with the source.
    seconds : float
        Wall time.
    read_by, was_read_by : str
        Programs that read the array afterwards and before, such as ``"every v3 reader"``.
    is_left : bool
        True if the array cannot be converted; `reason` says why.
    n_objects_before, n_bytes_before : int
        Objects that a dry run found, and their bytes; 0 otherwise.
    """

    path: str
    hierarchy: metadata.Hierarchy
    action: Action
    chunks_per_shard: chunk_keys.Coords | None
    reason: str = ""
    n_chunks: int = 0
    n_objects: int = 0
    n_bytes: int = 0
    n_tasks: int = 0
    n_resumed: int = 0
    seconds: float = 0.0
    read_by: str = ""
    was_read_by: str = ""
    is_left: bool = False
    n_objects_before: int = 0
    n_bytes_before: int = 0

    @property
    def loses_readers(self) -> bool:
        """True if it is a v2 array that other programs read before, and none afterwards."""
        return self.hierarchy == "v2" and self.was_read_by != self.read_by == ONLY_HERE


PRICES_USD = {"S3": (0.005, 0.0004), "GCS": (0.005, 0.0004), "Azure": (0.0065, 0.0005)}
"""Price of 1,000 writes, copies or listings, and of 1,000 reads; deletes are free. List prices of
standard (hot) storage in one region of the USA, before taxes. Transfer between regions is extra."""

PRICES_OF = "2025-06"
"""Month of these prices."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected cost of a conversion, by its dry run: totals of all arrays.

    `n_reads`, `n_writes` (with copies and listings) and `n_deletes` are requests, as clouds bill
    them. `n_bytes_more` is the room that the conversion needs at its peak, beside what is stored
    now. `seconds` holds if writes are as fast as the reads that the dry run timed. Without
    `is_exact`, objects were sampled.
    """

    n_objects_before: int = 0
    n_objects_after: int = 0
    n_bytes_before: int = 0
    n_bytes_after: int = 0
    n_reads: int = 0
    n_writes: int = 0
    n_deletes: int = 0
    n_bytes_more: int = 0
    is_exact: bool = True
    seconds: float = 0.0

    @property
    def cost_usd(self) -> dict[str, float]:
        """Price of the requests by cloud, if source and result are both there."""
        return {
            cloud: (self.n_writes * write + self.n_reads * read) / 1000
            for cloud, (write, read) in PRICES_USD.items()
        }

    def __add__(self, other: Estimate) -> Estimate:
        sums: list[Any] = list(map(add, astuple(self), astuple(other)))
        # In place the objects of an array are removed when all its new ones are stored.
        peak = self.n_bytes_after - self.n_bytes_before + other.n_bytes_more
        both = {"n_bytes_more": max(self.n_bytes_more, peak)}
        return replace(Estimate(*sums), **both, is_exact=self.is_exact and other.is_exact)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cost_usd": self.cost_usd, "prices_of": PRICES_OF}


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Result for a store; of a dry run, the expected result.

    The arrays are in the order of their paths. `n_copied_keys` counts keys that belong to no array.
    `notes` are warnings for the user, `seconds` are wall time. A dry run may have an `estimate`.
    """

    arrays: tuple[ArrayReport, ...]
    n_copied_keys: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    dry_run: bool = False
    estimate: Estimate | None = None

    @property
    def n_chunks(self) -> int:
        """Number of values that were written and verified."""
        return sum(array.n_chunks for array in self.arrays)

    @property
    def n_objects(self) -> int:
        """Number of objects that hold these values now."""
        return sum(array.n_objects for array in self.arrays)

    @property
    def n_bytes(self) -> int:
        """Number of bytes of these values."""
        return sum(array.n_bytes for array in self.arrays)

    @property
    def n_skipped(self) -> int:
        """Number of arrays that were left as they are."""
        return sum(array.action == "skipped" for array in self.arrays)

    @property
    def n_left(self) -> int:
        """Number of arrays that cannot be converted; the reason of each says why."""
        return sum(array.is_left for array in self.arrays)

    @property
    def read_by(self) -> str:
        """Programs that read the arrays; if they differ, with the number of arrays of each."""
        return summarize(array.read_by for array in self.arrays)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        names = ("n_chunks", "n_objects", "n_bytes", "n_skipped", "n_left", "read_by")
        estimate = None if self.estimate is None else self.estimate.as_dict()
        totals = {name: getattr(self, name) for name in names}
        return {**asdict(self), **totals, "estimate": estimate}

    def __str__(self) -> str:
        verb = "to convert" if self.dry_run else "converted"
        n_done = len(self.arrays) - self.n_skipped
        return (
            f"{n_done} arrays {verb}, {self.n_skipped} left as they are; {self.n_chunks} chunks "
            f"({self.n_bytes} bytes) in {self.n_objects} objects, {self.seconds:.1f} s\n"
            f"read by: {self.read_by}"
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts so far of the conversion of one array.

    After the tasks of a conversion in place the old objects are removed, then the new ones moved
    to their keys. `n_objects` counts them, and `action` says so.
    """

    path: str
    action: Action | Literal["old objects removed", "new objects moved"]
    n_tasks: int
    n_tasks_done: int
    n_chunks: int
    n_bytes: int
    n_objects: int = 0


OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """Result of a compaction; of a dry run, the expected result."""

    n_shards: int
    n_compacted: int
    removed_nbytes: int
    errors: tuple[str, ...] = ()
    """Damage of shards, which were left as they are."""
    dry_run: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
