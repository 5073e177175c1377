"""Requests of flows, the replies to them, and the updates of values that a write asks for.

A *flow* is a generator: it yields a batch of independent requests, receives one reply for each, in
order, and returns its result. It does no I/O. A driver performs the batches, blocking or async. It
throws an exception of a request into the flow.

Each change of one value is an `Update`: of a key, of an entry of a shard, and of what a batch
buffers. Storage transformers reply to `ValueRequest`. The driver commits `UpdateShard` by the
update queue. Backends perform all others, see `Backend`, but not `SetPartial` and `Modify`. Only
replies that are named here count. A written object replaces any. Removing a missing object is no
error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from zarr_shardstore.format.consolidated_index import IndexCopy
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.format.shard import Bytes, IndexDamageError, ShardIndex
from zarr_shardstore.shards.shard_writer import FileStep

T = TypeVar("T")

Piece: TypeAlias = "tuple[int, bytes | memoryview]"

Change: TypeAlias = Callable[[bytes | memoryview | None], bytes | memoryview | None]
"""Computes the new value of a value; ``None`` is a missing one."""


class Found(NamedTuple):
    """Reply to `Get`.

    Two replies of one key with equal versions were read from one state of the object. A version
    that equals no other shows that the object was being written.
    """

    value: memoryview | None
    """The requested bytes, fewer where the object ends; ``None`` if there is no object."""
    version: object
    """State of the object that was read."""
    size: int | None = None
    """Size of the whole object in bytes, if it came with the reply."""
    state: object = None
    """State of a local file that was read whole, as `Backend.state_of` returns it."""


class Get(NamedTuple):
    """Read an object or a range of it. Reply: `Found`."""

    key: str
    byte_range: ByteRange | None = None
    consistent: bool = False
    """Wait for a change of the object in its place, and see no change that was cut off."""
    together: Hashable | None = None
    """One reply may answer all concurrent requests that are equal here."""
    opened: bool = False
    """Read the file that `OpenShard` has opened, even if another file has its name now."""


class FoundIndex(NamedTuple):
    """Reply to `GetIndex`."""

    decoded: ShardIndex | None
    """``None`` if there is no shard, or its index cannot be decoded."""
    version: object
    size: int | None = None
    """As in `Found`, like the version."""
    damage: IndexDamageError | None = None
    """Why the index cannot be decoded."""
    was_requested: bool = True
    """Whether this request read the index. Otherwise it came from a cache."""
    is_unverified: bool = False
    """Whether the index is valid only if bytes of the shard that are read now have its version."""
    consolidated_nbytes: int | None = None
    """Size of the consolidated index that this request read, if any."""
    value: memoryview | None = None
    """The bytes of the whole shard, if they were also read; they may be damaged."""


class GetIndex(NamedTuple):
    """Read the index of a shard. Reply: `FoundIndex`."""

    shard: ShardRef
    consistent: bool = False
    """As in `Get`."""
    revalidate: bool = True
    """Read the index now, or check that a cached one is still valid."""
    version: object = None
    """The version of the shard, if the caller has just seen it in a listing."""
    cache: bool = True
    """If false, the index is cached only where reading it again would take a round trip."""
    with_data: bool = False
    """Read all bytes of the shard along with an index that is not cached."""

    @property
    def key(self) -> str:
        return self.shard.key


class RecordIndex(NamedTuple):
    """Read the index of a shard, and a version of the shard that any process can compare.

    Only for base stores with `has_lasting_versions`. Reply: `IndexCopy`; ``None`` if there is no
    shard, or it is damaged or being changed; ``"young"`` if it has changed so recently that its
    version proves nothing yet. With `waits` it is read when every earlier change is old enough.
    """

    shard: ShardRef
    waits: bool = False


Recorded: TypeAlias = "IndexCopy | Literal['young'] | None"


class Exists(NamedTuple):
    """Ask whether an object is there. Reply: bool."""

    key: str


class GetSize(NamedTuple):
    """Ask for the size of an object. Reply: int, or ``None`` if there is no object."""

    key: str


class Set(NamedTuple):
    """Store an object."""

    key: str
    value: Bytes


class SetIfNotExists(NamedTuple):
    """Store an object unless there is one."""

    key: str
    value: Bytes


class SetWithGaps(NamedTuple):
    """Store an object with holes, which take no room. Only for base stores that can append."""

    key: str
    parts: Sequence[tuple[int, Sequence[Bytes]]]
    """Ascending offsets, and the pieces that are written from each on."""


class OpenShard(NamedTuple):
    """Open a shard to change it in its place, under its lock.

    Only for base stores that can append. Reply: `ShardWriter`, or ``None`` if there is no shard.
    Raises `IndexDamageError` if its index cannot be decoded. A caller that has just stored the
    shard gives the `data_end` of the writer.
    """

    shard: ShardRef
    data_end: int | None = None
    to_seal: bool = False
    """Leave an adopted file that is a link, and so unchanged, unopened: the reply is ``None``."""


class ChangeShard(NamedTuple):
    """Take steps with the files of an opened shard; with `closes` no change follows soon."""

    key: str
    steps: Sequence[FileStep]
    closes: bool = False


class SetPartial(NamedTuple):
    """Write pieces into a value; a missing one counts as empty. Only for transformers."""

    key: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes_from_start(self) -> int | None:
        """Bytes that the pieces cover from 0 without a gap; ``None`` if there is a gap."""
        end = 0
        for start, value in sorted(self.pieces, key=start_and_nbytes):
            if start != end:
                return None
            end += len(value)
        return end


def start_and_nbytes(piece: Piece) -> tuple[int, int]:
    return piece[0], len(piece[1])


class Modify(NamedTuple):
    """Replace a value by what `change` makes of it (``None``: missing). Only for transformers.

    `change` may be called several times. The last call counts, which got the stored value. If it
    returns the very object that it got, the value stays. A value that is no entry of a
    shard takes the `placeholder` of a `Delete`. The write buffer of a batch takes the new value if
    it `may_wait`; otherwise it is committed immediately.
    """

    key: str
    change: Change
    placeholder: Callable[[], Bytes] | None = None
    may_wait: bool = False


class Delete(NamedTuple):
    """Remove an object.

    `placeholder` makes a value that means the same as no object. It is for base stores whose
    conditions protect replacing an object, but not removing it.
    """

    key: str
    placeholder: Callable[[], Bytes] | None = None


class Move(NamedTuple):
    """Give an object another key; no error if there is none."""

    key: str
    to: str


class DeletePrefix(NamedTuple):
    """Remove all objects in a directory: a prefix that is empty or ends with ``/``."""

    prefix: str


@dataclass(slots=True, eq=False)
class KeyCursor:
    """Position in the listing of a directory, for one flow at a time."""

    prefix: str
    shows_all: bool = False
    """Whether locks, journals, temporary files and consolidated indexes are also listed."""
    pages: Any = None
    """What the backend has open. It is closed after the last page, or with the cursor."""


class ListPage(NamedTuple):
    """List the next full keys, recursively. Reply: `VersionedKeys`; a shorter page is the last.

    A page of 0 keys ends the listing early.
    """

    cursor: KeyCursor
    n_keys: int = sys.maxsize


class ListDir(NamedTuple):
    """List a directory. Reply: list of the names of its keys and sub-directories."""

    prefix: str


class PlainValue(NamedTuple):
    """An object that is no shard, as a shard of one: its value is entry 0."""

    key: str


class UpdateShard(NamedTuple):
    """Commit all updates of entries of one shard, or none, above the transformers `below`."""

    shard: ShardRef | PlainValue
    updates: Sequence[EntryUpdate]
    below: tuple[Any, ...] = ()

    def as_whole_write(self) -> Set | Delete | None:
        """Return the request that stores or removes a plain value, whatever is stored."""
        match self:
            case UpdateShard(PlainValue(), ((_, Set() as write),)):
                return write
            case UpdateShard(PlainValue(key), ((_, Delete()),)):
                return Delete(key)
        return None


Update: TypeAlias = Set | SetIfNotExists | SetPartial | Modify | Delete
"""A change of one value. Its key is the key of the value, also where an entry id says the place."""

EntryUpdate: TypeAlias = tuple[int, Update]
"""An entry id, and the update of the entry."""

ValueRequest: TypeAlias = Get | Exists | GetSize | Update
"""A request for one value, to which storage transformers reply."""

Request: TypeAlias = (
    ValueRequest
    | GetIndex
    | RecordIndex
    | SetWithGaps
    | OpenShard
    | ChangeShard
    | DeletePrefix
    | Move
    | ListPage
    | ListDir
    | UpdateShard
)

Flow: TypeAlias = Generator[list[Request], list[Any], T]


def _equals(one: tuple[Any, ...], other: object) -> bool:
    return type(one) is type(other) and tuple.__eq__(one, other)


def _differs(one: tuple[Any, ...], other: object) -> bool:
    return not _equals(one, other)


for _kind in (*get_args(Request), PlainValue):  # otherwise they equal other tuples
    _kind.__eq__, _kind.__ne__ = _equals, _differs


def ask(requests: Sequence[Request]) -> Flow[list[Any]]:
    """Ask for one round."""
    return (yield list(requests))


def relay(requests: Sequence[Request]) -> Flow[list[Any]]:
    """Relay requests to the base store, where each write updates a shard of one."""
    return (
        yield [
            UpdateShard(PlainValue(r.key), ((0, r),))
            if isinstance(r, Set | SetPartial | Modify | Delete)
            else r
            for r in requests
        ]
    )


def swap(
    key: str,
    seen: bytes | None,
    new: bytes | None,
    otherwise: Change,
    placeholder: Callable[[], Bytes] | None = None,
) -> Modify:
    """Return a compare-and-swap: a value that still is as it was `seen` becomes `new`, another one
    what `otherwise` makes of it. ``None`` is a missing value."""

    def change(stored: bytes | memoryview | None) -> bytes | memoryview | None:
        now = None if stored is None else bytes(stored)
        return new if now == seen else otherwise(stored)

    return Modify(key, change, placeholder)
