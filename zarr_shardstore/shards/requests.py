"""The requests that flows make and the replies that they get.

A *flow* is a generator: it yields a batch of independent requests, receives one reply for
each, in order, and returns its result. It does no I/O; a driver of the floor above performs
the batches, blocking or async. An exception of a request is thrown into the flow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from zarr_shardstore.format.consolidated_index import IndexCopy
from zarr_shardstore.format.index import IndexDamageError, ShardIndex
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.shards.shard_writer import FileStep
from zarr_shardstore.shards.updates import EntryUpdate, Piece, apply_pieces

Bytes: TypeAlias = bytes | memoryview
T = TypeVar("T")


class Found(NamedTuple):
    """Reply to `Get`.

    Two replies of one key with equal versions were read from one state of the object. A
    version that equals nothing says that the object was being written.
    """

    value: memoryview | None
    """The bytes asked for, fewer where the object ends; ``None`` if there is no object."""
    version: object
    """State of the object that was read."""
    size: int | None = None
    """Size of the whole object in bytes, where the base store tells without a request."""


class Get(NamedTuple):
    """Read an object or a range of it. Reply: `Found`.

    `consistent` asks for bytes that no writer is about to change in their place: the reply waits
    for its change to end, and a change that was cut off is not seen. Where objects are never
    changed in their place it means nothing.

    `opened` asks for bytes of the file that `OpenShard` has opened, whatever has its name now.

    `together`: one reply may answer all requests that are under way and have the same here.
    """

    key: str
    byte_range: ByteRange | None = None
    consistent: bool = False
    together: Hashable | None = None
    opened: bool = False


class FoundIndex(NamedTuple):
    """Reply to `GetIndex`."""

    decoded: ShardIndex | None
    """``None`` if there is no shard, or its index cannot be decoded."""
    version: object
    """As of `Found`."""
    size: int | None = None
    """As of `Found`."""
    damage: IndexDamageError | None = None
    """Why the index cannot be decoded."""
    was_requested: bool = True
    """True if this request read the index. False if it came from a cache."""
    is_unverified: bool = False
    """It was read by an earlier request, or by one that had begun before: what it says is true
    if bytes of the shard that are read now have the same version."""
    consolidated_nbytes: int | None = None
    """Size of the consolidated index that this request read; ``None``: it read none."""
    value: memoryview | None = None
    """The bytes of the whole shard, if the index was read with them; perhaps damaged ones."""


@dataclass(frozen=True, slots=True)
class GetIndex:
    """Read the index of a shard. Reply: `FoundIndex`.

    `consistent` is that of `Get`. With `revalidate` the index is read now, or found to be the
    same as it was: also by its `version`, if the caller has just seen that in a listing. Without
    `cache` it is kept only if reading it again would take a round trip. `with_data` asks for all
    bytes of the shard along with an index that is not known.
    """

    shard: ShardRef
    consistent: bool = False
    revalidate: bool = True
    version: object = None
    cache: bool = True
    with_data: bool = False

    @property
    def key(self) -> str:
        """Of the shard."""
        return self.shard.key


@dataclass(frozen=True, slots=True)
class RecordIndex:
    """Read the index of a shard, and a version of the shard that any process can compare. Only
    for base stores with `has_lasting_versions`. Reply: `IndexCopy`; ``None`` if there is no
    shard, or it is damaged or being changed; ``"young"`` if it has changed just now, so that
    its version does not tell yet.

    With `waits` it is looked at when all that has changed before now is old enough.
    """

    shard: ShardRef
    waits: bool = False


Recorded: TypeAlias = "IndexCopy | Literal['young'] | None"


@dataclass(frozen=True, slots=True)
class GetMany:
    """Read many whole objects. Reply: a list with bytes, or ``None`` where there is no object.

    One request, so that what is done for each of them is little more than the system calls.
    """

    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Exists:
    """Ask whether an object is there. Reply: bool."""

    key: str


@dataclass(frozen=True, slots=True)
class GetSize:
    """Ask for the size of an object. Reply: int, or ``None`` if there is no object."""

    key: str


@dataclass(frozen=True, slots=True)
class Set:
    """Store an object, replacing any. Reply: ``None``."""

    key: str
    value: Bytes


@dataclass(frozen=True, slots=True)
class SetIfNotExists:
    """Store an object unless there is one. Reply: ``None``."""

    key: str
    value: Bytes


@dataclass(frozen=True, slots=True)
class SetWithGaps:
    """Store an object, replacing any. Only for base stores that can append. Reply: ``None``.

    Parameters
    ----------
    parts
        Ascending offsets, and the pieces that are written from each on. What lies between
        takes no room.
    """

    key: str
    parts: Sequence[tuple[int, Sequence[Bytes]]]


@dataclass(frozen=True, slots=True)
class OpenShard:
    """Open a shard to change it in its place; the caller holds it. Only for base stores that
    can append. Reply: `ShardWriter`, or ``None`` if there is no shard. Raises
    `IndexDamageError` if its index cannot be decoded.

    `data_end` is what `ShardWriter` calls so, for whoever has just stored the shard.
    """

    shard: ShardRef
    data_end: int | None = None


@dataclass(frozen=True, slots=True)
class ChangeShard:
    """Take steps with the files of an opened shard, one after the other. Reply: ``None``."""

    key: str
    steps: Sequence[FileStep] = field(repr=False)


@dataclass(frozen=True, slots=True)
class CloseShard:
    """A shard that was opened will not be changed again soon. Reply: ``None``."""

    key: str


@dataclass(frozen=True, slots=True)
class SetPartial:
    """Write pieces into a value; a missing one counts as empty. Only for transformers."""

    key: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Modify:
    """Replace a value by what `change` makes of it (``None``: missing). Only for transformers."""

    key: str
    change: Callable[[Bytes | None], Bytes]


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove an object; no error if there is none. Reply: ``None``.

    `placeholder` makes what means the same as no object: for base stores that can replace an
    object only if it is the one that was read, but remove whatever is there.
    """

    key: str
    placeholder: Callable[[], Bytes] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DeleteMany:
    """Remove objects; no error where there is none. Reply: ``None``."""

    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Move:
    """Give an object another key, replacing any; no error if there is none. Reply: ``None``."""

    key: str
    to: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Remove all objects in a directory: a prefix that is empty or ends with ``/``."""

    prefix: str


@dataclass(frozen=True, slots=True)
class ListPrefix:
    """List the keys in a directory, recursively. Reply: list of full keys."""

    prefix: str


@dataclass(slots=True, eq=False)
class KeyCursor:
    """How far the keys in a directory have been listed; for one flow at a time.

    What it holds of the base store it holds until its last page, or `CloseListing`, or until
    it is forgotten.
    """

    prefix: str
    pages: Any = field(default=None, repr=False)
    """What the base store needs for the next page; ``None`` before the first."""


@dataclass(frozen=True, slots=True)
class ListPage:
    """List the keys in a directory, recursively, some at a time. Reply: a list of the next
    `n_keys` full keys, as `VersionedKeys`; of fewer if these are the last,
    or there are none."""

    cursor: KeyCursor
    n_keys: int


@dataclass(frozen=True, slots=True)
class CloseListing:
    """No more pages are wanted. Reply: ``None``."""

    cursor: KeyCursor


@dataclass(frozen=True, slots=True)
class ListDir:
    """List a directory. Reply: list of names of its keys and its sub-directories."""

    prefix: str


@dataclass(frozen=True, slots=True)
class UpdateShard:
    """Commit updates of entries of one shard, together or not at all. Reply: ``None``.

    The driver holds the shard for one writer at a time, commits concurrent updates of one
    shard together, and runs `write.update_shard` for it, above the transformers `below`.
    """

    shard: ShardRef
    updates: tuple[EntryUpdate, ...]
    below: tuple[Any, ...] = ()


Request: TypeAlias = (
    Get
    | GetIndex
    | RecordIndex
    | GetMany
    | Exists
    | GetSize
    | Set
    | SetIfNotExists
    | SetWithGaps
    | OpenShard
    | ChangeShard
    | CloseShard
    | SetPartial
    | Modify
    | Delete
    | DeleteMany
    | DeletePrefix
    | Move
    | ListPrefix
    | ListPage
    | CloseListing
    | ListDir
    | UpdateShard
)

Flow: TypeAlias = Generator[list[Request], list[Any], T]


def relay(requests: Sequence[Request]) -> Flow[list[Any]]:
    """Ask the base store; a change of a value is a read and a write there, not one step."""
    changes = {i: r for i, r in enumerate(requests) if isinstance(r, SetPartial | Modify)}
    if not changes:
        return (yield list(requests))
    founds: list[Found] = yield [Get(request.key) for request in changes.values()]
    batch = list(requests)
    for (i, request), found in zip(changes.items(), founds, strict=True):
        if isinstance(request, Modify):
            new = request.change(found.value)
        else:
            new = apply_pieces(request.key, found.value, request.pieces)
        batch[i] = Set(request.key, new)
    return (yield batch)
