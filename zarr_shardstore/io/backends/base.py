"""Interface of a base store to a driver, and its options."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, get_args
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from zarr.core.sync import sync

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.arguments import check_choice
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.concurrency import gather_bounded, worker_pool
from zarr_shardstore.io.local import files
from zarr_shardstore.io.local.cached_files import OpenFiles as OpenFiles
from zarr_shardstore.io.local.fs import in_small_writes
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.append import MAX_DEAD_SHARE
from zarr_shardstore.shards.requests import Request
from zarr_shardstore.shards.shard_listing import VersionedKeys
from zarr_shardstore.synchronized import in_forked_child

Lock: TypeAlias = AbstractContextManager[None]
Parts: TypeAlias = Iterable[Sequence[Bytes]]

MAX_CONCURRENCY = 64  # requests of one batch, and of all calls of one event loop to a base store

ODD_KEY_ERRORS = (ValueError, TypeError, LookupError, NotImplementedError)
"""Errors by which a base store may refuse a key of another form."""


_METHODS = {
    kind: re.sub("(?!^)([A-Z])", r"_\1", kind.__name__).lower() for kind in get_args(Request)
}
"""Name of the method that performs a request: ``get_index`` for `GetIndex`."""


def refuse(_: object, request: Request, *_opened: object) -> NoReturn:
    """Stand in for the method of a request that a class of backends does not perform."""
    raise TypeError(f"a backend does not perform {type(request).__name__}")


class Backend(ABC):
    """Base store to which requests are sent in batches.

    A subclass defines `scope`, and a coroutine for each request. `RecordIndex` comes only with
    `has_lasting_versions`; `OpenShard`, `ChangeShard`, `SetWithGaps` and a `Get` with ``opened``
    only with `can_append`. The defaults are for a store without locks, versions and conditions.

    The driver adds a version to a `Found` without one. Errors of the base store pass through.
    """

    replies: dict[type, Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        cls.replies = {kind: getattr(cls, name, refuse) for kind, name in _METHODS.items()}

    mode: Literal["inline", "thread", "async"] = "async"
    """Place of the work for an async caller: the call itself, a worker thread, one hop for each
    batch, or the event loop, where blocking callers also wait for it."""
    needs_callers_loop = False
    """Whether an async client may use things of the event loop of its caller, as connections."""
    has_versions: bool = False
    """Whether each `Found` has the version of its object."""
    has_lasting_versions: bool = False
    """Whether any later process can compare versions: `RecordIndex` works."""
    can_append: bool = False
    """Whether shards can be changed in place."""
    locks_whole_writes: bool = False
    """True if `Set` and `Delete` cannot detect a concurrent update under the lock of another
    process. The driver then queues whole writes."""
    root: str | None = None
    """Directory of the local files that are the objects; it ends with a slash."""
    max_shards_at_once: Callable[[], int] | None = None
    """Returns the most shards that a read may touch in two rounds."""
    max_requests_at_once: int | None = None
    """Most concurrent requests of one batch behind a network; ``None``: no network."""

    @cached_property
    def lacks(self) -> set[str]:
        """Abilities that the base store lacks; each was tried once."""
        return set()

    @abstractmethod
    def scope(self, key: str) -> Hashable:
        """Return the identity of an object in this process, the same through every store."""

    def lock(self, key: str) -> Lock | None:  # noqa: ARG002
        """Return a lock, which waits, against other processes that update an object."""
        return None

    def optimistic(self) -> Backend | None:
        """Return a view for one update with conditional writes, if the store has such writes.

        They raise `ReplacedMeanwhileError` if another writer has replaced what the update read.
        """
        return None

    def refuse_links(self, key: str) -> None:
        """Raise `SpecError` if the directory of a key, or of a prefix, is reached by a link."""
        if self.root is not None:
            files.refuse_links(self.root, key)

    def state_of(self, key: str) -> object:  # noqa: ARG002
        """Return the state of the local file of a key, now; ``None``: there are no local files."""
        return None

    def linked_directory(self, prefix: str) -> str | None:
        """Return a link to a directory on the way to a directory, or below it, or ``None``."""
        if self.root is None:
            return None
        return files.link_on_way(self.root, prefix) or files.link_below(self.root + prefix)

    def perform(self, batch: list[Request], opened: OpenFiles | None = None) -> list[Any]:  # noqa: ARG002
        """Perform requests, blocking; return one reply for each, in order.

        Files stay open in `opened` for later batches of the flow; the caller closes them.
        """
        return sync(self.perform_async(batch))

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        """Perform requests concurrently; return one reply for each, in order."""
        if len(batch) == 1:
            return [await self._reply(batch[0])]
        return await gather_bounded([self._reply(r) for r in batch], MAX_CONCURRENCY)

    async def _reply(self, request: Request) -> Any:
        return await self.replies[type(request)](self, request)

    def ranges_of(self, keys: Sequence[str]) -> RangesOfKeys | None:  # noqa: ARG002
        """Return the ranges of other objects that are the values of keys, if there are such."""
        return None

    def upload(self, key: str, parts: Parts) -> None:
        """Store an object piece by piece, in one step, blocking; nothing if an error is raised."""
        # The base store takes whole objects only.
        request = requests.Set(key, b"".join([b"".join(pieces) for pieces in parts]))
        sync(self.perform_async([request]))

    def persist(self) -> None:  # noqa: B027
        """Wait until all that was written would survive a loss of power, blocking."""

    def tidy(self, directory: str) -> None:  # noqa: B027
        """Remove empty directories and temporary files below a directory without writers."""


class BlockingBackend(Backend):
    """Backend whose methods block; a subclass defines `perform`, which calls them."""

    mode: Literal["inline", "thread", "async"] = "thread"

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        """Perform requests in this call, or in one hop to a worker thread."""
        if self.mode == "inline":
            return self.perform(batch)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(worker_pool(), self.perform, batch)

    @abstractmethod
    def keys(self, prefix: str, *, shows_all: bool = False) -> Iterator[str]:
        """Return the keys in a directory, recursively; with side files if it shows all."""

    def list_page(self, request: requests.ListPage, _: object = None) -> VersionedKeys:
        cursor = request.cursor
        if not request.n_keys:  # the end of a listing, which may not have begun
            if cursor.pages is not None:
                cursor.pages.close()
            return VersionedKeys()
        cursor.pages = cursor.pages or Pages(self.keys(cursor.prefix, shows_all=cursor.shows_all))
        page: VersionedKeys = cursor.pages.next_page(request.n_keys)
        return page


class Pages:
    """Pages of an iterator of keys. Any thread may close it; it waits for a page under way."""

    def __init__(self, keys: Iterator[str]) -> None:
        self._keys = keys
        self._lock = threading.Lock()

    def next_page(self, n_keys: int) -> VersionedKeys:
        with self._lock:
            return VersionedKeys(islice(self._keys, n_keys))

    def close(self) -> None:
        with self._lock:
            if isinstance(self._keys, Generator):
                self._keys.close()


class RangesOfKeys(NamedTuple):
    """Byte ranges in objects, one for each of some keys."""

    names: list[str]
    """Keys of the objects."""
    which: npt.NDArray[np.int64]
    """Position in `names`; -1: there is no value."""
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


class UnreadableSourceError(UnsupportedError):
    """The library of a source of another format cannot read a value of one array."""


class ReplacedMeanwhileError(Exception):
    """Another writer has replaced an object that an update read; the argument is its key."""


Durability: TypeAlias = Literal["process", "power"]


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options of a base store."""

    locking: Locking = "os"
    """Mode of the locks of local files, see `zarr_shardstore.io.local.locks`."""
    durability: Durability = "process"
    """Event that a finished write survives: the end of its process, or a loss of power."""
    is_static: bool = False
    """Whether this process is the only writer."""
    max_dead_share: float = MAX_DEAD_SHARE
    """Share of the data of a shard file that may be dead when it is sealed."""

    def __post_init__(self) -> None:
        check_choice("locking", self.locking, Locking)
        check_choice("durability", self.durability, Durability)
        share = self.max_dead_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise SpecError(f"max_dead_share is a number from 0 to 1, got {share!r}")


DEFAULT_OPTIONS = BackendOptions()

growing: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
"""Writers of frames of this process, by the scope of their array. A dropped one is forgotten."""
in_forked_child(growing.clear)

MIN_AGE_ON_WEB_SERVERS_S = 2.1
"""Age at which the second of the last change, of which some servers make ETags, is a version. Some
file systems know times to two seconds."""

PART_NBYTES = 8 * 1024 * 1024
"""Size of a part of an upload; S3 takes 10,000 of them, 80 GB."""


def check_no_fork(backend: object, user: Any) -> None:
    """Raise `UnsupportedError` in a child of the process in which `user` first used its client: a
    request would wait for ever."""
    user.process = user.process or os.getpid()
    if os.getpid() != user.process:
        raise UnsupportedError(
            f"the client of {backend!r} was used before this process was forked, and a fork copies "
            "none of its threads: start processes by 'spawn' or 'forkserver'"
        )


def write_stream(stream: Any, discard: Callable[[], object], parts: Parts) -> None:
    """Store an object by a file-like object of a client, which publishes it when it is closed.

    After an error `discard` gives the stream up, as far as the client can.
    """
    try:
        for pieces in parts:
            for some in in_small_writes(pieces, PART_NBYTES):
                stream.write(b"".join(some))
        stream.close()
    except BaseException:
        with suppress(Exception):
            discard()
        raise
