"""What a driver needs of a base store.

How shards that are files are protected; options of stores that mean nothing elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

from zarr.core.sync import sync

from zarr_shardstore.errors import SpecError
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.io.uploads import Upload
from zarr_shardstore.shards.requests import Request
from zarr_shardstore.shards.shard_writer import ShardWriter

Mode: TypeAlias = Literal["inline", "thread", "async"]
"""Where an async caller lets the work be done: at once (memory), in a worker thread, with
one hop for each batch (blocking I/O), or in the event loop (the base store is async)."""


class Session(Protocol):
    """Performs the requests of one flow, blocking; it may keep files open between two batches."""

    def perform(self, batch: list[Request]) -> list[Any]:
        """Perform requests; return one reply for each, in order."""

    def let_go(self) -> None:
        """Close what is kept open: after a commit its names may belong to other files."""


class Backend(ABC):
    """A base store, spoken to in batches of requests.

    Replies are those of `zarr_shardstore.shards.requests`; a `Found` whose version is ``None``
    gets one from the driver. Errors of the base store pass through. The defaults are those of a
    store in memory, which only this process has.
    """

    mode: Mode = "async"
    """How an async caller reaches it."""
    can_block: bool = True
    """Whether `perform` may be called."""
    has_versions: bool = False
    """Whether each `Found` has the version of its object: no driver has to find one."""
    has_lasting_versions: bool = False
    """Whether other processes, later, can tell by a version that an object is the same:
    `RecordIndex` works."""
    can_append: bool = False
    """Whether it changes shards in their place: `OpenShard` and the requests that go with it."""
    replaces_at_once: bool = True
    """Whether a reader beside a writer sees an object before or after the write. If not, a read
    waits for the writers of this process."""
    max_shards_at_once: Callable[[], int] | None = None
    """Tells how many shards a read may touch in two rounds now; more are read one part after
    another. ``None``: any number."""
    max_requests_at_once: int | None = None
    """Requests of one batch that are under way at a time, where a network lies between: a round of
    them takes much longer than the bytes of a small shard do. ``None``: near by."""

    @abstractmethod
    def scope(self, key: str) -> Hashable:
        """Return the identity of an object in this process, however its store is reached."""

    def lock(self, key: str) -> AbstractContextManager[None] | None:  # noqa: ARG002
        """Return a blocking lock that keeps other processes from updating an object concurrently;
        ``None`` if there is none."""
        return None

    def try_lock(
        self,
        key: str,  # noqa: ARG002
        fits: Callable[[ShardWriter], bool],  # noqa: ARG002
    ) -> AbstractContextManager[None] | None:
        """As `lock`, already taken, if no other writer had to be waited for, the shard is open and
        unchanged since, and its writer fits; ``None`` otherwise."""
        return None

    def optimistic(self) -> Backend | None:
        """Return a view for one update, whose writes fail with `ReplacedMeanwhileError` if another
        writer has replaced what the update read; ``None`` if the store has no such writes."""
        return None

    def refuse_links(self, key: str) -> None:  # noqa: B027
        """Raise `SpecError` if the directory of a key, or of a prefix, is reached by a link."""

    def linked_directory(self, prefix: str) -> str | None:  # noqa: ARG002
        """Return a link to a directory on the way to a directory, or below it, or ``None``."""
        return None

    def session(self) -> Session:
        """Return what performs the requests of one flow; the caller lets it go at the end."""
        return self

    def let_go(self) -> None:  # noqa: B027
        """Close nothing: between two batches of `perform` nothing is open."""

    def perform(self, batch: list[Request]) -> list[Any]:
        """Perform requests, blocking; return one reply for each, in order."""
        return sync(self.perform_async(batch))

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        """Perform requests concurrently."""
        return self.perform(batch)

    @abstractmethod
    def upload(self, key: str) -> Upload:
        """Begin to store an object piece by piece, blocking; see `Upload`."""

    def persist(self) -> None:  # noqa: B027
        """Wait until all that was written would survive a loss of power, blocking."""

    def tidy(self, directory: str) -> None:  # noqa: B027
        """Remove what is no object below a directory in which nothing writes, blocking: directories
        without files, temporary files of killed writers."""


class ReplacedMeanwhileError(Exception):
    """What an update has read is not what is stored any more; its argument is the key."""


Durability: TypeAlias = Literal["process", "power"]


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Options of writing files.

    Parameters
    ----------
    locking
        Lock files keep other processes from updating the shard: `zarr_shardstore.io.local.locks`.
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
