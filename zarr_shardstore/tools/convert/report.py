"""Results and progress of conversions and compactions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
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

    @property
    def loses_readers(self) -> bool:
        """True if it is a v2 array that other programs read before, and none afterwards."""
        return self.hierarchy == "v2" and self.was_read_by != self.read_by == ONLY_HERE


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Result for a store; of a dry run, the expected result.

    The arrays are in the order of their paths. `n_copied_keys` counts keys that belong to no array,
    `notes` are warnings for the user, and `seconds` are wall time.
    """

    arrays: tuple[ArrayReport, ...]
    n_copied_keys: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    dry_run: bool = False

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
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

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
    """Counts so far of the conversion of one array."""

    path: str
    action: Action
    n_tasks: int
    n_tasks_done: int
    n_chunks: int
    n_bytes: int


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
