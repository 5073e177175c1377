"""One shard of which values are held back: what is held of it, and what its commit has taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.plan.entries import Put
from zarr_shardstore.plan.finals import Final, nbytes_of
from zarr_shardstore.plan.stack import Stack

__all__ = ["Pending", "Taken", "Watch", "has_same_entries"]


class Pending(NamedTuple):
    """What waits for the publication of one shard, at one moment."""

    shard: ShardRef
    below: Stack
    entries: Mapping[int, Final]

    @property
    def has_values(self) -> bool:
        """Whether the shard will hold anything for certain."""
        return any(isinstance(final, Put) for final in self.entries.values())


@dataclass(slots=True, eq=False)
class Taken:
    """One shard of the table; whoever commits it holds this meanwhile."""

    shard: ShardRef
    below: Stack
    held: dict[int, Final] = field(default_factory=dict)
    taken: dict[int, Final] = field(default_factory=dict)
    nbytes: int = 0
    """Of what is held; what is taken is about to leave memory."""
    is_due: bool = False
    """Somebody is about to publish it, so that it counts no more."""
    is_held_promised: bool = False
    """A block that held it has ended well: it is not discarded."""
    is_taken_promised: bool = False
    is_taken_discarded: bool = False
    """If its commit fails, what was taken is not put back."""
    error: Exception | None = None
    """For which it was put back."""

    def find(self, entry_id: int) -> Final | None:
        final = self.held.get(entry_id)
        return self.taken.get(entry_id) if final is None else final

    def hold(self, new: Mapping[int, Final]) -> int:
        """Hold values, in place of older ones of the same entries; return the bytes added."""
        added = sum(map(nbytes_of, new.values()))
        added -= sum(nbytes_of(self.held[i]) for i in new if i in self.held)
        self.held |= new
        self.nbytes += added
        return added

    @property
    def updates(self) -> tuple[Final, ...]:
        """What a commit has to do."""
        return tuple(self.taken.values())

    @property
    def entries(self) -> dict[int, Final]:
        """What entries will be, by their ids."""
        return self.taken | self.held

    @property
    def is_full(self) -> bool:
        """Whether every entry of the array in this shard has a new value."""
        return len(self.held) >= self.shard.n_grid_entries and self.held.keys() >= set(
            self.shard.grid_entries().tolist()
        )

    def pending(self) -> Pending:
        """What waits now."""
        return Pending(self.shard, self.below, self.entries)


@dataclass(slots=True, eq=False)
class Watch:
    """Which entries of a shard were held since somebody began to read stored values."""

    shard_key: str
    held_since: set[int] = field(default_factory=set)


def has_same_entries(a: ArrayLayout, b: ArrayLayout) -> bool:
    """Whether two layouts put each chunk into the same entry: the grid may have grown."""
    return a is b or (a.prefix, a.encoding, a.spec) == (b.prefix, b.encoding, b.spec)
