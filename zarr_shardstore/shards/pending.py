"""Values of entries that a batch holds until their shard is published.

::

    write ──▶ held ── the next commit of the shard takes them along ──▶ taken ──▶ base store
               ▲                                                          │
               └──────────────────── it failed: put back ─────────────────┘

Readers see both, the held ones first. Whoever commits a shard takes what is held of it, and
one commit of a shard runs at a time: so older values never come after newer ones.

One shard of which values are held back: what is held of it, and what its commit has taken.

What updates make of entries, so that nothing more depends on the stored values.

::

    update ──┬─ a whole value, an erasure ────────────────────────────────▶ final value
             └─ a piece, a change, a value only if there is none
                  └─ on what is held of the entry, else on what is stored ─▶ final value
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.shards.stack import Stack
from zarr_shardstore.shards.updates import (
    DeleteEntry,
    EntryUpdate,
    MapEntry,
    PatchEntry,
    SetEntry,
    apply_pieces,
)

Final: TypeAlias = SetEntry | DeleteEntry
"""What an entry will be: nothing of its stored value matters."""

_ENTRY_NBYTES = 100
"""At least so much counts for an entry: the objects that hold an erased or an empty one."""


def is_final(update: EntryUpdate) -> bool:
    """Whether an update says by itself what the entry will be."""
    return isinstance(update, DeleteEntry) or (
        isinstance(update, SetEntry) and not update.only_if_missing
    )


def nbytes_of(final: Final) -> int:
    """What a final value takes in memory, in bytes."""
    return max(len(final.value), _ENTRY_NBYTES) if isinstance(final, SetEntry) else _ENTRY_NBYTES


def resolve_updates(
    shard: ShardRef,
    updates: Sequence[EntryUpdate],
    find_held: Callable[[int], Final | None],
    stored: Mapping[int, bytes | memoryview | None],
    outdated: Container[int],
) -> dict[int, Final] | None:
    """What updates of one shard, one after another, make of its entries.

    Parameters
    ----------
    find_held
        What is held of an entry; ``None``: nothing.
    stored
        Values of entries in the base store.
    outdated
        Ids of entries whose value in `stored` may be an old one.

    Returns
    -------
    dict, optional
        Final values by entry ids, without those that stay as they are stored; ``None`` if a
        stored value is needed that is not given, or is outdated.

    Raises
    ------
    SpecError
        If a piece starts outside its value.
    """
    new: dict[int, Final] = {}
    for update in updates:
        i = update.entry_id
        before = new.get(i) or find_held(i)
        if before is not None or is_final(update):
            new[i] = _resolved(shard, update, before)
        elif i not in stored or i in outdated:
            return None
        elif stored[i] is None or not isinstance(update, SetEntry):
            old = stored[i]
            found = None if old is None else SetEntry(i, old)
            new[i] = _resolved(shard, update, found)
    return new


def _resolved(shard: ShardRef, update: EntryUpdate, before: Final | None) -> Final:
    """What becomes of an entry; `before` is what it was, ``None``: missing in the base store."""
    i = update.entry_id
    old = before.value if isinstance(before, SetEntry) else None
    match update:
        case DeleteEntry():
            return update
        case SetEntry(only_if_missing=True) if isinstance(before, SetEntry):
            return before
        case SetEntry(_, value, only_if_missing):
            # It is still only filled if it is missing when it is published, for the sake of
            # other stores; but not if this batch erased it.
            return SetEntry(i, _own(value), only_if_missing and before is None)
        case PatchEntry():
            return SetEntry(i, apply_pieces(shard.chunk_key(i), old, update.pieces))
        case MapEntry():
            return SetEntry(i, _own(update.change(old)))


def _own(value: bytes | memoryview) -> bytes:
    """Bytes that the caller cannot change afterwards."""
    return value if isinstance(value, bytes) else bytes(value)


class Pending(NamedTuple):
    """What waits for the publication of one shard, at one moment."""

    shard: ShardRef
    below: Stack
    entries: Mapping[int, Final]

    @property
    def has_values(self) -> bool:
        """Whether the shard will hold anything for certain."""
        return any(isinstance(final, SetEntry) for final in self.entries.values())


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


class PendingShards:
    """The shards of which one store holds values back.

    Thread safety: none; `zarr_shardstore.operations.batch.SharedShards` lets one thread at a time
    call these methods, none of which waits for anything.
    """

    def __init__(self) -> None:
        self.max_nbytes: int | None = None
        """How much may be held; ``None``: there is no batch, and nothing more is held."""
        self._shards: dict[str, Taken] = {}
        self._full: dict[str, None] = {}
        self._watches: list[Watch] = []
        self._nbytes = 0

    def __bool__(self) -> bool:
        return self.max_nbytes is not None or bool(self._shards)  # each warm read asks this

    @property
    def is_open(self) -> bool:
        """Whether new values are held."""
        return self.max_nbytes is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are held, without those that are being published."""
        return self._nbytes

    # -------------------------------------------------------------- reading

    def find(self, shard: ShardRef, entry_id: int) -> Final | None:
        """What an entry will be; ``None``: what it is in the base store."""
        if not self._shards:
            return None
        known = self._of(shard)
        return None if known is None else known.find(entry_id)

    def entries(self, shard: ShardRef) -> dict[int, Final]:
        """What entries of a shard will be, by their ids."""
        known = self._of(shard)
        return {} if known is None else known.entries

    def pending(self, directory: str = "") -> list[Pending]:
        """All that waits in shards whose keys start with `directory`."""
        return [p.pending() for key, p in self._shards.items() if key.startswith(directory)]

    def get(self, shard_key: str) -> Pending | None:
        """All that waits in one shard."""
        p = self._shards.get(shard_key)
        return None if p is None else p.pending()

    def keys_of_array(self, prefix: str) -> list[str]:
        """Keys of the shards of the array whose chunk keys have this prefix."""
        return [key for key, p in self._shards.items() if p.shard.layout.prefix == prefix]

    # -------------------------------------------------------------- holding

    @contextmanager
    def watching(self, shard_key: str) -> Iterator[Watch]:
        """Note which entries of a shard are held while the block runs."""
        watch = Watch(shard_key)
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    def to_read(self, shard: ShardRef, updates: Sequence[EntryUpdate]) -> list[int]:
        """Ids of the entries whose stored value decides what the updates make of them."""
        first: dict[int, EntryUpdate] = {}
        for update in updates:
            first.setdefault(update.entry_id, update)
        return [
            i for i, update in first.items() if not is_final(update) and self.find(shard, i) is None
        ]

    def hold(
        self,
        shard: ShardRef,
        below: Stack,
        updates: Sequence[EntryUpdate],
        stored: Mapping[int, bytes | memoryview | None],
        watch: Watch,
    ) -> Literal["held", "again", "closed"]:
        """Hold updates of one shard, all or none.

        Parameters
        ----------
        stored
            Values of entries in the base store, read since `watch` began.

        Returns
        -------
        str
            ``"again"``: a value was held and published since it was looked for, so that the
            caller has to read it. ``"closed"``: the batch has ended, nothing was held.

        Raises
        ------
        SpecError
            If a piece starts outside its value; nothing was held.
        ShardConflictError
            If values of another layout are held under the key of this shard.
        """
        if not self.is_open:
            return "closed"
        known = self._shards.get(shard.key)
        if known is not None and not has_same_entries(known.shard.layout, shard.layout):
            raise ShardConflictError(
                f"shard {shard.key!r}: the array was declared anew by another store while a "
                "batch held values of it; end the batch, then write again"
            )
        known = known or Taken(shard, below)
        new = resolve_updates(shard, updates, known.find, stored, watch.held_since)
        if new is None:
            return "again"
        if not new:
            return "held"
        self._shards[shard.key] = known
        known.shard, known.below = shard, below
        self._add(known, new)
        for other in self._watches:
            if other.shard_key == shard.key:
                other.held_since |= new.keys()
        return "held"

    # ----------------------------------------------------------- publishing

    def due(self) -> list[str]:
        """Keys of the shards to publish now: full ones, and the largest beyond the limit.

        Each is named to one caller, who publishes it, or else must `release` it.
        """
        if self.max_nbytes is None:
            return []
        due = [self._shards[key] for key in self._full]
        for p in due:
            self._set_due(p)
        if self._nbytes > self.max_nbytes:
            others = [p for p in self._shards.values() if p.held and not p.is_due]
            others.sort(key=_nbytes, reverse=True)
            for p in others:
                if self._nbytes <= self.max_nbytes:
                    break
                self._set_due(p)
                due.append(p)
        return [p.shard.key for p in due]

    def release(self, shard_keys: Sequence[str]) -> None:
        """Count what is still held of these shards, because nobody publishes it now."""
        for key in shard_keys:
            p = self._shards.get(key)
            if p is not None and p.is_due:
                p.is_due = False
                self._nbytes += p.nbytes

    def take(self, shard: ShardRef) -> Taken | None:
        """Take all that is held of a shard, to commit it; ``None`` if nothing is.

        The caller must hold the shard, and say in the end `committed` or `put_back`.
        """
        p = self._of(shard)
        if p is None:
            return None
        self._uncount(p)
        # What is taken already belongs to a commit that was cut off: it is done again.
        p.taken, p.held, p.nbytes = p.taken | p.held, {}, 0
        p.is_taken_promised |= p.is_held_promised
        p.is_held_promised = p.is_taken_discarded = False
        return p

    def committed(self, taken: Taken) -> None:
        """What was taken is in the base store."""
        taken.error = None
        self._forget_taken(taken)

    def put_back(self, taken: Taken, error: BaseException) -> None:
        """What was taken may not be in the base store: it is held again."""
        taken.error = error if isinstance(error, Exception) else None
        if self._is_listed(taken) and not taken.is_taken_discarded:
            self._uncount(taken)
            new, taken.held, taken.nbytes = taken.taken | taken.held, {}, 0
            self._add(taken, new)
            taken.is_held_promised |= taken.is_taken_promised
        self._forget_taken(taken)

    def forget_errors(self, shard_keys: Sequence[str]) -> None:
        """Before another attempt to publish these shards."""
        for key in shard_keys:
            if key in self._shards:
                self._shards[key].error = None

    def error_of(self, shard_key: str) -> Exception | None:
        """Why the last attempt to publish a shard failed, if it did."""
        p = self._shards.get(shard_key)
        return None if p is None else p.error

    # --------------------------------------------------------------- ending

    def promise(self) -> list[str]:
        """Exempt what waits now from `discard`; return the keys of all shards."""
        for p in self._shards.values():
            p.is_held_promised, p.is_taken_promised = bool(p.held), bool(p.taken)
        return list(self._shards)

    def unpromise(self, shard_keys: Sequence[str]) -> None:
        """Whoever promised these was told that they are not published."""
        for key in shard_keys:
            if key in self._shards:
                self._shards[key].is_held_promised = False

    def discard(self) -> None:
        """Drop what was not promised; what is in a commit already stays seen until it ends."""
        for key, p in list(self._shards.items()):
            p.is_taken_discarded = not p.is_taken_promised
            if not p.is_held_promised:
                self._uncount(p)
                p.held, p.nbytes = {}, 0
            if not p.held and not p.taken:
                del self._shards[key]

    def drop(self, shard_keys: Sequence[str]) -> None:
        """Drop all that is held of these shards."""
        for key in shard_keys:
            p = self._shards.pop(key, None)
            if p is not None:
                self._uncount(p)

    def drop_below(self, directory: str) -> None:
        """Drop all that is held of shards whose keys start with `directory`."""
        self.drop([key for key in self._shards if key.startswith(directory)])

    def clear(self) -> None:
        """Drop everything, and hold nothing more."""
        self.max_nbytes = None
        self.drop(list(self._shards))

    # -------------------------------------------------------------- details

    def _of(self, shard: ShardRef) -> Taken | None:
        p = self._shards.get(shard.key)
        return p if p and has_same_entries(p.shard.layout, shard.layout) else None

    def _is_listed(self, p: Taken) -> bool:
        return self._shards.get(p.shard.key) is p

    def _add(self, p: Taken, new: Mapping[int, Final]) -> None:
        added = p.hold(new)
        if not p.is_due:
            self._nbytes += added
            if p.is_full:
                self._full[p.shard.key] = None

    def _uncount(self, p: Taken) -> None:
        if not p.is_due:
            self._nbytes -= p.nbytes
        p.is_due = False
        self._full.pop(p.shard.key, None)

    def _set_due(self, p: Taken) -> None:
        self._nbytes -= p.nbytes
        p.is_due = True
        self._full.pop(p.shard.key, None)

    def _forget_taken(self, p: Taken) -> None:
        p.taken = {}
        p.is_taken_promised = p.is_taken_discarded = False
        if not p.held and self._is_listed(p):
            del self._shards[p.shard.key]


def _nbytes(p: Taken) -> int:
    return p.nbytes
