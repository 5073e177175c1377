"""How shards that are files are protected; options of stores that mean nothing elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from zarr_shardstore.errors import SpecError
from zarr_shardstore.io.locks import Locking

__all__ = ["DEFAULT_FILE_OPTIONS", "Durability", "FileOptions"]

Durability: TypeAlias = Literal["process", "power"]


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Options of writing files.

    Parameters
    ----------
    locking
        What keeps other processes from updating a shard meanwhile, see `zarr_shardstore.io.locks`.
    durability
        What a finished write survives: the end of its process, or a loss of power.

    Raises
    ------
    SpecError
        If one of them is something else.
    """

    locking: Locking = "os"
    durability: Durability = "process"

    def __post_init__(self) -> None:
        if self.locking not in get_args(Locking):
            raise SpecError(f"locking is 'os', 'lockfile' or 'none', got {self.locking!r}")
        if self.durability not in get_args(Durability):
            raise SpecError(f"durability is 'process' or 'power', got {self.durability!r}")


DEFAULT_FILE_OPTIONS = FileOptions()
