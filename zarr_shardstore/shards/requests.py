"""Requests of flows, the replies to them, and the updates of entries that a write asks for.

A *flow* is a generator: it yields a batch of independent requests, receives one reply for each, in
order, and returns its result. It does no I/O. A driver performs the batches, blocking or async. An
exception of a request is thrown into the flow.

Storage transformers reply to `ValueRequest`. The driver commits `UpdateShard` by the update queue.
Backends perform all others, see `Backend`, but not `SetPartial` and `Modify`. Where no reply is
named it counts for nothing. An object that is written replaces any; removing one that is missing
is no error.

Source: sharding storage transformer draft, "API implementation", set_partial_values and
erase_values; zarr-python 2.18, ``StoreV3.set_partial_values`` (a start behind the end, a
negative start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from zarr_shardstore.errors import SpecError
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
    that equals nothing tells that the object was being written.
    """

    value: memoryview | None
    """The requested bytes, fewer where the object ends; ``None`` if there is no object."""
    version: object
    """State of the object that was read."""
    size: int | None = None
    """Size of the whole object in bytes, where the base store tells without a request."""


class Get(NamedTuple):
    """Read an object or a range of it. Reply: `Found`."""

    key: str
    byte_range: ByteRange | None = None
    consistent: bool = False
    """The reply waits for a change of the object in its place, and does not see a change that was
    cut off."""
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
    """The bytes of the whole shard, if they were read, too; they may be damaged."""


@dataclass(frozen=True, slots=True)
class GetIndex:
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


@dataclass(frozen=True, slots=True)
class RecordIndex:
    """Read the index of a shard, and a version of the shard that any process can compare.

    Only for base stores with `has_lasting_versions`. Reply: `IndexCopy`; ``None`` if there is no
    shard, or it is damaged or being changed; ``"young"`` if it has changed so recently that its
    version proves nothing yet. With `waits` it is read when every earlier change is old enough.
    """

    shard: ShardRef
    waits: bool = False


Recorded: TypeAlias = "IndexCopy | Literal['young'] | None"


@dataclass(frozen=True, slots=True)
class GetMany:
    """Read whole objects, fast. Reply: a list of `Found`; a size in it is not taken from the
    value that came."""

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
    """Store an object."""

    key: str
    value: Bytes


@dataclass(frozen=True, slots=True)
class SetIfNotExists:
    """Store an object unless there is one."""

    key: str
    value: Bytes


@dataclass(frozen=True, slots=True)
class SetWithGaps:
    """Store an object with holes, which take no room. Only for base stores that can append."""

    key: str
    parts: Sequence[tuple[int, Sequence[Bytes]]]
    """Ascending offsets, and the pieces that are written from each on."""


@dataclass(frozen=True, slots=True)
class OpenShard:
    """Open a shard to change it in its place, under its lock.

    Only for base stores that can append. Reply: `ShardWriter`, or ``None`` if there is no shard.
    Raises `IndexDamageError` if its index cannot be decoded. `data_end` is that of `ShardWriter`,
    if the caller has just stored the shard.
    """

    shard: ShardRef
    data_end: int | None = None


@dataclass(frozen=True, slots=True)
class ChangeShard:
    """Take steps with the files of an opened shard, one after the other.

    If it `closes` the shard, that will not be changed again soon.
    """

    key: str
    steps: Sequence[FileStep] = field(repr=False)
    closes: bool = False


@dataclass(frozen=True, slots=True)
class SetPartial:
    """Write pieces into a value; a missing one counts as empty. Only for transformers."""

    key: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Modify:
    """Replace a value by what `change` makes of it (``None``: missing). Only for transformers.

    `change` may be called several times. The last call counts, which got the stored value. A value
    that is no entry of a shard takes the `placeholder` of a `Delete`. The write buffer of a batch
    takes the new value if it `may_wait`; otherwise it is committed immediately.
    """

    key: str
    change: Change
    placeholder: Callable[[], Bytes] | None = field(default=None, compare=False)
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove an object.

    `placeholder` makes a value that means the same as no object. It is for base stores whose
    conditions protect replacing an object, but not removing it.
    """

    key: str
    placeholder: Callable[[], Bytes] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Move:
    """Give an object another key; no error if there is none."""

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
    """Position in the listing of a directory; for one flow at a time.

    `pages` is what the backend has open from the first page on. It is closed after the last page,
    by `CloseListing`, or with the cursor.
    """

    prefix: str
    pages: Any = field(default=None, repr=False)
    shows_all: bool = False
    """Also locks, journals, temporary files and consolidated indexes."""


@dataclass(frozen=True, slots=True)
class ListPage:
    """List the next full keys, recursively. Reply: `VersionedKeys`; a shorter page is the last."""

    cursor: KeyCursor
    n_keys: int


@dataclass(frozen=True, slots=True)
class CloseListing:
    """End a listing before its last page."""

    cursor: KeyCursor


@dataclass(frozen=True, slots=True)
class ListDir:
    """List a directory. Reply: list of the names of its keys and sub-directories."""

    prefix: str


@dataclass(frozen=True, slots=True)
class PlainValue:
    """An object that is no shard, as a shard of one: its value is entry 0."""

    key: str

    def chunk_key(self, _: int) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class UpdateShard:
    """Commit updates of entries of one shard, together or not at all.

    The write strategy runs above the transformers `below`.
    """

    shard: ShardRef | PlainValue
    updates: tuple[EntryUpdate, ...]
    below: tuple[Any, ...] = ()

    def as_whole_write(self) -> Set | Delete | None:
        """Return the request that stores or removes a plain value, whatever is stored."""
        match self:
            case UpdateShard(PlainValue(key), (SetEntry(_, value, only_if_missing=False),)):
                return Set(key, value)
            case UpdateShard(PlainValue(key), (DeleteEntry(),)):
                return Delete(key)
        return None


ValueRequest: TypeAlias = (
    Get | Exists | GetSize | Set | SetIfNotExists | SetPartial | Modify | Delete
)
"""A request for one value, to which storage transformers reply."""

Request: TypeAlias = (
    ValueRequest
    | GetIndex
    | RecordIndex
    | GetMany
    | SetWithGaps
    | OpenShard
    | ChangeShard
    | DeletePrefix
    | Move
    | ListPrefix
    | ListPage
    | CloseListing
    | ListDir
    | UpdateShard
)

Flow: TypeAlias = Generator[list[Request], list[Any], T]


def ask(requests: Sequence[Request]) -> Flow[list[Any]]:
    """Ask for one round."""
    return (yield list(requests))


def relay(requests: Sequence[Request]) -> Flow[list[Any]]:
    """Relay requests to the base store, where each write updates a shard of one."""
    return (
        yield [
            UpdateShard(PlainValue(r.key), (entry_update(r, 0),))
            if isinstance(r, Set | SetPartial | Modify | Delete)
            else r
            for r in requests
        ]
    )


# ------------------------------------------------------------- updates of entries


@dataclass(frozen=True, slots=True)
class SetEntry:
    """Replace the whole value of an entry, or only fill it if it is missing."""

    entry_id: int
    value: bytes | memoryview
    only_if_missing: bool = False


@dataclass(frozen=True, slots=True)
class DeleteEntry:
    """Make an entry missing."""

    entry_id: int


@dataclass(frozen=True, slots=True)
class PatchEntry:
    """Write pieces into the value of an entry; the bytes around them stay."""

    entry_id: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes_from_start(self) -> int | None:
        """Bytes that the pieces cover from 0 without a gap; ``None`` if there is a gap."""
        end = 0
        for start, value in sorted(self.pieces, key=_start_and_nbytes):
            if start != end:
                return None
            end += len(value)
        return end


@dataclass(frozen=True, slots=True)
class MapEntry:
    """Replace the value of an entry by what `change` makes of it (``None``: missing).

    If `change` returns the very object that it got, the entry stays as it is.
    """

    entry_id: int
    change: Change
    placeholder: Callable[[], Bytes] | None = field(default=None, compare=False)
    may_wait: bool = False
    """As in `Modify`, like the placeholder."""


EntryUpdate: TypeAlias = SetEntry | DeleteEntry | PatchEntry | MapEntry


def entry_update(request: Request, entry_id: int) -> EntryUpdate:
    """Return the update of an entry that a request for its value asks for."""
    match request:
        case Set(_, value):
            return SetEntry(entry_id, value)
        case SetIfNotExists(_, value):
            return SetEntry(entry_id, value, only_if_missing=True)
        case SetPartial(_, pieces):
            return PatchEntry(entry_id, pieces)
        case Modify(_, change, placeholder, may_wait):
            return MapEntry(entry_id, change, placeholder, may_wait)
        case Delete():
            return DeleteEntry(entry_id)
    raise TypeError(f"a transformer does not perform {request!r}")


@dataclass(frozen=True, slots=True)
class PartWrite:
    """Write of a part of a value, in the place of a whole value; the fields are as in `Modify`."""

    change: Change
    placeholder: Callable[[], Bytes] | None = None


def replaces_value(update: EntryUpdate) -> bool:
    """Whether the new state of the entry is independent of its stored value."""
    return isinstance(update, DeleteEntry) or (
        isinstance(update, SetEntry) and not update.only_if_missing
    )


def replaced_first(updates: Iterable[EntryUpdate]) -> dict[int, bool]:
    """Return for each entry whether its first update is independent of its stored value."""
    replaced: dict[int, bool] = {}
    for update in updates:
        replaced.setdefault(update.entry_id, replaces_value(update))
    return replaced


def nbytes_of(update: EntryUpdate) -> float:
    """Return the bytes of new values in an update; infinity if only the update knows."""
    match update:
        case SetEntry(_, value):
            return len(value)
        case PatchEntry(_, pieces):
            return sum(len(piece) for _, piece in pieces)
        case DeleteEntry():
            return 0
    return math.inf


def check_pieces(key: str, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the pieces of one value in ascending order. Refuse pieces that overlap, and a negative
    start beside another piece."""
    try:
        # Of two at one place the empty one comes first: it covers nothing of the other.
        ordered = tuple(sorted(((index(start), v) for start, v in pieces), key=_start_and_nbytes))
    except TypeError as error:
        raise SpecError(f"key {key!r}: each start is a whole number ({error})") from error
    if ordered[0][0] < 0 and len(ordered) > 1:
        raise SpecError(
            f"key {key!r}: start {ordered[0][0]} counts from the end, so no other piece of the "
            "same value can come with it"
        )
    for (start, value), (next_start, _) in pairwise(ordered):
        if next_start < start + len(value):
            raise SpecError(
                f"key {key!r}: the values at {start} (of {len(value)} bytes) and at "
                f"{next_start} overlap"
            )
    return ordered


def apply_pieces(key: str, old: bytes | memoryview | None, pieces: Iterable[Piece]) -> bytes:
    """Return `old` with the pieces written over it; a missing value counts as empty.

    A piece may start behind the end only where others fill the gap. A negative start counts
    from the end, and the value then ends with the piece.

    Raises
    ------
    SpecError
        If a piece starts outside the value.
    """
    buffer = bytearray(old or b"")
    for start, value in pieces:
        if start > len(buffer) or -start > len(buffer):
            raise SpecError(
                f"key {key!r}: start {start} lies outside the value, which has {len(buffer)} bytes"
            )
        stop = start + len(value) if start >= 0 else len(buffer)
        buffer[start:stop] = value
    return bytes(buffer)


def _start_and_nbytes(piece: Piece) -> tuple[int, int]:
    return piece[0], len(piece[1])
