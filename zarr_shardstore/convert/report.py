"""What a conversion did, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from zarr_shardstore.format.keys import Coords
from zarr_shardstore.metadata.documents import Hierarchy

Action: TypeAlias = Literal["sharded", "unsharded", "resharded", "copied", "skipped"]


@dataclass(frozen=True, slots=True)
class ArrayReport:
    """What became of one array.

    Parameters
    ----------
    path, hierarchy
        Which array.
    action
        What was done; in a dry run, what would be.
    chunks_per_shard : tuple of int, optional
        What a shard has now; ``None`` if there are none.
    reason : str
        Why this, and not something else.
    n_chunks, n_bytes : int
        Values that were written and verified, and their bytes.
    n_objects : int
        Objects that hold them now.
    n_tasks : int
        Regions that were visited; of a plan, the most that may be.
    n_resumed : int
        Tasks whose work an earlier run had done; it was compared with the source.
    seconds : float
        Wall time.
    """

    path: str
    hierarchy: Hierarchy
    action: Action
    chunks_per_shard: Coords | None
    reason: str = ""
    n_chunks: int = 0
    n_objects: int = 0
    n_bytes: int = 0
    n_tasks: int = 0
    n_resumed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion of a store did.

    Parameters
    ----------
    arrays
        In the order of their paths.
    n_copied_keys : int
        Keys that belong to no array and were copied.
    notes
        What the user should know.
    seconds : float
        Wall time.
    dry_run : bool
        Nothing was written.
    """

    arrays: tuple[ArrayReport, ...]
    n_copied_keys: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    dry_run: bool = False

    @property
    def n_chunks(self) -> int:
        """Values of all arrays that were written and verified."""
        return sum(array.n_chunks for array in self.arrays)

    @property
    def n_objects(self) -> int:
        """Objects that hold them now."""
        return sum(array.n_objects for array in self.arrays)

    @property
    def n_bytes(self) -> int:
        """Their bytes."""
        return sum(array.n_bytes for array in self.arrays)

    @property
    def n_skipped(self) -> int:
        """Arrays that were left as they are."""
        return sum(array.action == "skipped" for array in self.arrays)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        totals = {name: getattr(self, name) for name in ("n_chunks", "n_objects", "n_bytes")}
        return {**asdict(self), **totals, "n_skipped": self.n_skipped}

    def __str__(self) -> str:
        verb = "to convert" if self.dry_run else "converted"
        n_done = len(self.arrays) - self.n_skipped
        return (
            f"{n_done} arrays {verb}, {self.n_skipped} left as they are; {self.n_chunks} chunks "
            f"({self.n_bytes} bytes) in {self.n_objects} objects, {self.seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the conversion of one array is; counts are those of the array so far."""

    path: str
    action: Action
    n_tasks: int
    n_tasks_done: int
    n_chunks: int
    n_bytes: int


OnProgress: TypeAlias = Callable[[Progress], None]
