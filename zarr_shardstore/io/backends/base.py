"""What a driver needs of a base store.

How shards that are files are protected; options of stores that mean nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

from zarr_shardstore.errors import SpecError
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.io.uploads import Upload
from zarr_shardstore.shards.requests import Request
from zarr_shardstore.shards.shard_writer import ShardWriter

Mode: TypeAlias = Literal["inline", "thread", "async"]
"""Where an async caller lets the work be done: at once (memory), in a worker thread, with
one hop for each batch (blocking I/O), or in the event loop (the base store is async)."""


class Backend(Protocol):
    """A base store, spoken to in batches of requests.

    Replies are those of `zarr_shardstore.shards.requests`; a `Found` whose version is ``None``
    gets one from the driver. Errors of the base store pass through.
    """

    @property
    def mode(self) -> Mode:
        """How an async caller reaches it."""

    @property
    def can_block(self) -> bool:
        """Whether `perform` may be called."""

    @property
    def has_versions(self) -> bool:
        """Whether each `Found` has the version of its object: no driver has to find one."""

    @property
    def has_lasting_versions(self) -> bool:
        """Whether other processes, later, can tell by a version that an object is the same:
        `RecordIndex` works."""

    @property
    def can_append(self) -> bool:
        """Whether it changes shards in their place: `OpenShard` and those that go with it."""

    @property
    def max_shards_at_once(self) -> Callable[[], int] | None:
        """Says how many shards a read may touch in two rounds now; more are read one part after
        another. ``None``: any number."""

    @property
    def max_requests_at_once(self) -> int | None:
        """Requests of one batch that are under way at a time, where a network lies between: a
        round of them takes much longer than the bytes of a small shard do. ``None``: near by."""

    @property
    def replaces_at_once(self) -> bool:
        """Whether a reader beside a writer sees an object before or after the write. If not,
        a read waits for the writers of this process."""

    def scope(self, key: str) -> Hashable:
        """Identity of an object in this process, whichever store object it is reached by."""

    def lock(self, key: str) -> AbstractContextManager[None] | None:
        """What keeps other processes from updating an object meanwhile, blocking; ``None`` if
        there is nothing like that."""

    def try_lock(
        self, key: str, fits: Callable[[ShardWriter], bool]
    ) -> AbstractContextManager[None] | None:
        """As `lock`, already taken, if no other writer had to be waited for, the shard is open and
        unchanged since, and its writer fits; ``None`` otherwise."""

    def optimistic(self) -> Backend | None:
        """A view for one update, whose writes fail with `ReplacedMeanwhileError` if another
        writer has replaced what the update read; ``None`` if the base store has no such writes."""

    def refuse_links(self, key: str) -> None:
        """Raise `SpecError` if the directory of a key, or of a prefix, is reached by a link."""

    def linked_directory(self, prefix: str) -> str | None:
        """A link to a directory on the way to a directory, or below it; ``None``: no such link."""

    def session(self) -> Session:
        """Performs the requests of one flow, blocking."""

    def perform(self, batch: list[Request]) -> list[Any]:
        """Perform requests, blocking."""

    def upload(self, key: str) -> Upload:
        """Begin to store an object piece by piece, blocking; see `Upload`."""

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        """Perform requests concurrently."""


class ReplacedMeanwhileError(Exception):
    """What an update has read is not what is stored any more; its argument is the key."""


class Session(AbstractContextManager["Session"]):
    """Performs the requests of one flow, and may keep objects open from batch to batch. This one
    keeps nothing."""

    __slots__ = ("_backend",)

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def perform(self, batch: list[Request]) -> list[Any]:
        """As `Backend.perform`."""
        result: list[Any] = self._backend.perform(batch)
        return result

    def let_go(self) -> None:
        """Close what is kept open: after a commit its names may belong to other files."""

    def __exit__(self, *_: object) -> None:
        self.let_go()


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
