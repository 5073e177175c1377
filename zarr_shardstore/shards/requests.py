"""Requests of flows, the replies to them, and the updates of values that a write asks for.

A *flow* is a generator: it yields a batch of independent requests, receives one reply for each, in
order, and returns its result. It does no I/O. A driver performs the batches, blocking or async. An
exception of a request is thrown into the flow.

Each change of one value is an `Update`: of a key, of an entry of a shard, and of what a batch
buffers. Storage transformers reply to `ValueRequest`. The driver commits `UpdateShard` by the
update queue. Backends perform all others, see `Backend`, but not `SetPartial` and `Modify`. Where
no reply is named it counts for nothing. An object that is written replaces any; removing one that
is missing is no error.

Source: sharding storage transformer draft, "API implementation", set_partial_values and
erase_values; zarr-python 2.18, ``StoreV3.set_partial_values`` (a start behind the end, a
negative start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
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
C = TypeVar("C", bound=type)

Piece: TypeAlias = "tuple[int, bytes | memoryview]"

Change: TypeAlias = Callable[[bytes | memoryview | None], bytes | memoryview | None]
"""Computes the new value of a value; ``None`` is a missing one."""


def distinct(kind: C) -> C:
    """Let a named tuple equal values of its own class only: other tuples mean something else."""

    def equals(one: tuple[Any, ...], other: object) -> bool:
        return type(one) is type(other) and tuple.__eq__(one, other)

    def differs(one: tuple[Any, ...], other: object) -> bool:
        return not equals(one, other)

    for name, method in (("__eq__", equals), ("__ne__", differs)):
        setattr(kind, name, method)
    return kind


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


@distinct
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
    """The bytes of the whole shard, if they were also read; they may be damaged."""


@distinct
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


@distinct
class RecordIndex(NamedTuple):
    """Read the index of a shard, and a version of the shard that any process can compare.

    Only for base stores with `has_lasting_versions`. Reply: `IndexCopy`; ``None`` if there is no
    shard, or it is damaged or being changed; ``"young"`` if it has changed so recently that its
    version proves nothing yet. With `waits` it is read when every earlier change is old enough.
    """

    shard: ShardRef
    waits: bool = False


Recorded: TypeAlias = "IndexCopy | Literal['young'] | None"


@distinct
class GetMany(NamedTuple):
    """Read whole objects, fast. Reply: a list of `Found`; a size in it is not taken from the
    value that came."""

    keys: Sequence[str]


@distinct
class Exists(NamedTuple):
    """Ask whether an object is there. Reply: bool."""

    key: str


@distinct
class GetSize(NamedTuple):
    """Ask for the size of an object. Reply: int, or ``None`` if there is no object."""

    key: str


@distinct
class Set(NamedTuple):
    """Store an object."""

    key: str
    value: Bytes


@distinct
class SetIfNotExists(NamedTuple):
    """Store an object unless there is one."""

    key: str
    value: Bytes


@distinct
class SetWithGaps(NamedTuple):
    """Store an object with holes, which take no room. Only for base stores that can append."""

    key: str
    parts: Sequence[tuple[int, Sequence[Bytes]]]
    """Ascending offsets, and the pieces that are written from each on."""


@distinct
class OpenShard(NamedTuple):
    """Open a shard to change it in its place, under its lock.

    Only for base stores that can append. Reply: `ShardWriter`, or ``None`` if there is no shard.
    Raises `IndexDamageError` if its index cannot be decoded. `data_end` is that of `ShardWriter`,
    if the caller has just stored the shard.
    """

    shard: ShardRef
    data_end: int | None = None


@distinct
class ChangeShard(NamedTuple):
    """Take steps with the files of an opened shard, one after the other.

    If it `closes` the shard, that will not be changed again soon.
    """

    key: str
    steps: Sequence[FileStep]
    closes: bool = False


@distinct
class SetPartial(NamedTuple):
    """Write pieces into a value; a missing one counts as empty. Only for transformers."""

    key: str
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


@distinct
class Modify(NamedTuple):
    """Replace a value by what `change` makes of it (``None``: missing). Only for transformers.

    `change` may be called several times. The last call counts, which got the stored value. If it
    returns the very object that it got, the value stays as it is. A value that is no entry of a
    shard takes the `placeholder` of a `Delete`. The write buffer of a batch takes the new value if
    it `may_wait`; otherwise it is committed immediately.
    """

    key: str
    change: Change
    placeholder: Callable[[], Bytes] | None = None
    may_wait: bool = False


@distinct
class Delete(NamedTuple):
    """Remove an object.

    `placeholder` makes a value that means the same as no object. It is for base stores whose
    conditions protect replacing an object, but not removing it.
    """

    key: str
    placeholder: Callable[[], Bytes] | None = None


@distinct
class Move(NamedTuple):
    """Give an object another key; no error if there is none."""

    key: str
    to: str


@distinct
class DeletePrefix(NamedTuple):
    """Remove all objects in a directory: a prefix that is empty or ends with ``/``."""

    prefix: str


@distinct
class ListPrefix(NamedTuple):
    """List the keys in a directory, recursively. Reply: list of full keys."""

    prefix: str


class KeyCursor:
    """Position in the listing of a directory; for one flow at a time.

    `pages` is what the backend has open from the first page on. It is closed after the last page,
    by `CloseListing`, or with the cursor. The listing `shows_all` keys, if it also has locks,
    journals, temporary files and consolidated indexes.
    """

    __slots__ = ("pages", "prefix", "shows_all")

    def __init__(self, prefix: str, shows_all: bool = False) -> None:
        self.prefix = prefix
        self.pages: Any = None
        self.shows_all = shows_all


@distinct
class ListPage(NamedTuple):
    """List the next full keys, recursively. Reply: `VersionedKeys`; a shorter page is the last."""

    cursor: KeyCursor
    n_keys: int


@distinct
class CloseListing(NamedTuple):
    """End a listing before its last page."""

    cursor: KeyCursor


@distinct
class ListDir(NamedTuple):
    """List a directory. Reply: list of the names of its keys and sub-directories."""

    prefix: str


@distinct
class PlainValue(NamedTuple):
    """An object that is no shard, as a shard of one: its value is entry 0."""

    key: str


@distinct
class UpdateShard(NamedTuple):
    """Commit updates of entries of one shard, together or not at all.

    The write strategy runs above the transformers `below`.
    """

    shard: ShardRef | PlainValue
    updates: tuple[EntryUpdate, ...]
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
            UpdateShard(PlainValue(r.key), ((0, r),))
            if isinstance(r, Set | SetPartial | Modify | Delete)
            else r
            for r in requests
        ]
    )


# ----------------------------------------------------------------------- updates


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


def replaces_value(update: Update) -> bool:
    """Whether the new value is independent of the stored one."""
    return isinstance(update, Set | Delete)


def replaced_first(updates: Iterable[EntryUpdate]) -> dict[int, bool]:
    """Return for each entry whether its first update is independent of its stored value."""
    replaced: dict[int, bool] = {}
    for entry_id, update in updates:
        replaced.setdefault(entry_id, replaces_value(update))
    return replaced


def nbytes_of(update: EntryUpdate) -> float:
    """Return the bytes of new values in an update; infinity if only the update knows."""
    match update[1]:
        case Set(_, value) | SetIfNotExists(_, value):
            return len(value)
        case SetPartial(_, pieces):
            return sum(len(piece) for _, piece in pieces)
        case Delete():
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
