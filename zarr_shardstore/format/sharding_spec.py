"""Sharding of one array: the number of chunks in a shard, and the form of its index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.index import IndexFormat
from zarr_shardstore.format.keys import Coords

MAX_ENTRIES = 2**24
"""Most entries in a shard; their index is 256 MiB. A document that asks for more is a mistake
or an attack, and is refused before memory is allocated."""


def check_chunks_per_shard(value: Sequence[int]) -> Coords:
    """Return `value` as a tuple of ints.

    Raises
    ------
    SpecError
        If a number is not an int of at least 1, or if their product exceeds `MAX_ENTRIES`.
    """
    for n in value:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise SpecError(
                f"chunks_per_shard is a whole number of at least 1 for each dimension, got {n!r} "
                f"in {list(value)!r}"
            )
    if math.prod(value) > MAX_ENTRIES:
        raise SpecError(
            f"chunks_per_shard {list(value)!r} asks for {math.prod(value)} entries in "
            f"a shard, at most {MAX_ENTRIES} are supported"
        )
    return tuple(value)


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Parameters of the sharding of one array, in whatever form they were declared.

    Parameters
    ----------
    chunks_per_shard : tuple of int
        Entries along each dimension; ``()`` for a 0-d array.
    index : IndexFormat
        Form of the index of each shard.

    Raises
    ------
    SpecError
        As `check_chunks_per_shard`.
    """

    chunks_per_shard: Coords
    index: IndexFormat
    n_entries: int = field(init=False, compare=False, repr=False)
    """Number of entries in a shard; one for a 0-d array."""
    index_nbytes: int = field(init=False, compare=False, repr=False)
    """Size of the encoded index, in bytes."""

    def __post_init__(self) -> None:
        check_chunks_per_shard(self.chunks_per_shard)
        n_entries = math.prod(self.chunks_per_shard)
        object.__setattr__(self, "n_entries", n_entries)
        object.__setattr__(self, "index_nbytes", self.index.nbytes(n_entries))
