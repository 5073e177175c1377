"""Write buffer of a store: the new values of chunks that a batch holds, by shard.

::

    write ──▶ updates ── a commit of the shard, under its lock ──▶ snapshot ──▶ base store
                 ▲                                                    │
                 └───────────── the commit failed: merged back ───────┘

A read looks for an entry in `updates`, then in the snapshot, then in the base store. The queue of
a shard (`zarr_shardstore.io.update_queue`) runs one commit at a time, first in, first out. Each
commit takes all buffered updates of its shard, and stores them before its own. So an older value
never lands after a newer one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, TypeAlias

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.shards.requests import Delete, EntryUpdate, Set
from zarr_shardstore.shards.updates import new_value, replaces_value
from zarr_shardstore.synchronized import in_forked_child, synchronized

BufferedUpdate: TypeAlias = Set | Delete
"""The new state of an entry, independent of its stored value."""

_ENTRY_NBYTES = 100
"""Memory of an erased or an empty entry, in bytes: the objects that represent it."""


class Block(Protocol):
    """A `Batch` as its buffer sees it."""

    max_nbytes: int
    is_leaving: bool


_synchronized = synchronized()
_buffers: weakref.WeakSet[WriteBuffer] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class BufferedShard:
    """Buffered updates of one shard, by entry id."""

    shard: ShardRef
    updates: dict[int, BufferedUpdate] = field(default_factory=dict)
    """Updates that no commit has taken yet."""
    snapshot: dict[int, BufferedUpdate] = field(default_factory=dict)
    """Updates that a commit is storing; they are read until it has ended."""
    nbytes: int = 0
    """Memory of `updates`, in bytes."""
    error: Exception | None = None
    """Why the last commit of a snapshot failed."""

    def find(self, entry_id: int) -> Set | Delete | None:
        return self.updates.get(entry_id) or self.snapshot.get(entry_id)

    @property
    def has_values(self) -> bool:
        """Whether there is more than deletions."""
        updates = [*self.snapshot.values(), *self.updates.values()]
        return any(isinstance(update, Set) for update in updates)

    @property
    def is_full(self) -> bool:
        """Whether every entry of the array in this shard has an update."""
        return len(self.updates) >= self.shard.n_grid_entries and self.updates.keys() >= set(
            self.shard.entries_of().tolist()
        )


class WriteBuffer:
    """Buffered updates of one store, by shard, and the blocks that are open on it.

    Blocks are referenced weakly. A block that is dropped without having ended, because an
    exception came just before its end, has failed.

    Thread safety: any thread may call any method; none of them waits for I/O.
    """

    def __init__(self) -> None:
        self.is_active = False
        """A block is open, or updates are buffered. Each read and write looks at this alone if
        there is no batch."""
        self.nbytes = 0
        """Memory of the buffered updates, in bytes, without snapshots."""
        self._max_nbytes: int | None = None
        """Smallest limit of the open blocks; ``None``: new updates are not buffered."""
        self._shards: dict[str, BufferedShard] = {}
        self._full: dict[str, None] = {}
        self._blocks: list[weakref.ref[Block]] = []
        _buffers.add(self)

    @_synchronized
    def find(self, shard: ShardRef, entry_id: int) -> Set | Delete | None:
        """Return the newest update of an entry; ``None``: its value is the stored one."""
        buffered = self._shard_like(shard)
        return None if buffered is None else buffered.find(entry_id)

    @_synchronized
    def get(self, shard_key: str) -> BufferedShard | None:
        """Return the buffered updates of a shard, if there are any."""
        return self._shards.get(shard_key)

    @_synchronized
    def layouts(self) -> dict[str, ArrayLayout]:
        """Return the layouts of the shards that have buffered updates, by shard keys."""
        return {key: buffered.shard.layout for key, buffered in self._shards.items()}

    @_synchronized
    def chunk_keys(self, shard_keys: Iterable[str]) -> dict[str, list[str]]:
        """Return the keys of the chunks that are buffered in these shards."""
        chunk_keys = {}
        for key in shard_keys:
            if (buffered := self._shards.get(key)) is not None:
                entry_ids = sorted(buffered.snapshot.keys() | buffered.updates.keys())
                chunk_keys[key] = list(map(buffered.shard.chunk_key, entry_ids))
        return chunk_keys

    # ------------------------------------------------------------ buffering

    @_synchronized
    def put(
        self,
        shard: ShardRef,
        updates: Sequence[EntryUpdate],
        stored: Mapping[int, Bytes | None] | None = None,
    ) -> bool:
        """Buffer updates, all or none; false if no block is open, or one needs a stored value that
        is not given."""
        if self._max_nbytes is None:
            return False
        buffered = self._shards.get(shard.key) or BufferedShard(shard)
        if not buffered.shard.layout.has_same_entries(shard.layout):
            raise ShardConflictError(
                f"shard {shard.key!r}: another store declared the array again while a batch "
                "buffered values of it; end the batch, then write again"
            )
        new = _new_states(updates, buffered, stored or {})
        if new is None:
            return False
        self._shards[shard.key] = buffered
        buffered.shard = shard
        self._add(buffered, new)
        return True

    @property
    def is_due(self) -> bool:
        """Whether a shard is full, or the limit exceeded."""
        limit = self._max_nbytes
        return bool(self._full) or (limit is not None and self.nbytes > limit)

    @_synchronized
    def due(self) -> list[str]:
        """Return the keys of the shards to flush now: full ones, the largest beyond the limit."""
        due = list(self._full)
        self._full = {}
        nbytes_left = self.nbytes - sum(self._shards[key].nbytes for key in due)
        if self._max_nbytes is not None and nbytes_left > self._max_nbytes:
            for buffered in sorted(self._shards.values(), key=attrgetter("nbytes"), reverse=True):
                if nbytes_left > self._max_nbytes and buffered.shard.key not in due:
                    due.append(buffered.shard.key)
                    nbytes_left -= buffered.nbytes
        return due

    # -------------------------------------------------------------- commits

    @_synchronized
    def take(self, shard: ShardRef) -> BufferedShard | None:
        """Make a snapshot of the updates of a shard, for a commit that has locked the shard.

        The commit must call `end_commit`. If an earlier commit was cut off and did not, its
        snapshot is a part of this one.
        """
        buffered = self._shard_like(shard)
        if buffered is None:
            return None
        buffered.snapshot = buffered.snapshot | buffered.updates
        self._clear_updates(buffered)
        return buffered

    @_synchronized
    def end_commit(self, buffered: BufferedShard, error: BaseException | None = None) -> None:
        """Forget a snapshot that is stored; after an error merge it back below newer updates."""
        buffered.error = error if isinstance(error, Exception) else None
        is_buffered = self._shards.get(buffered.shard.key) is buffered  # otherwise it was dropped
        if error is not None and is_buffered:
            older = {i: u for i, u in buffered.snapshot.items() if i not in buffered.updates}
            self._add(buffered, older)
        buffered.snapshot = {}  # last: an interrupt before loses no value
        if is_buffered and not buffered.updates:
            del self._shards[buffered.shard.key]
            self._set_state()

    @_synchronized
    def forget(self, buffered: BufferedShard) -> None:
        """Drop the updates of one shard."""
        self._clear_updates(buffered)
        self.end_commit(buffered)

    @_synchronized
    def drop(self, directory: str) -> None:
        """Drop the updates of all shards whose keys start with `directory`."""
        for key in [key for key in self._shards if key.startswith(directory)]:
            self._clear_updates(self._shards.pop(key))
        self._set_state()

    # --------------------------------------------------------------- blocks

    @_synchronized
    def enter(self, block: Block) -> None:
        """Buffer updates from now on."""
        self.is_active = True
        self._blocks.append(weakref.ref(block, lambda _: self.end(None)))
        self._set_state()

    @_synchronized
    def leave(self, block: Block) -> list[str]:
        """Stop buffering for a block; return the keys of the shards that it must flush."""
        if not self.has_open(block):
            return []  # a child process: the parent has the block
        block.is_leaving = True
        self._set_state()
        return list(self._shards)

    @_synchronized
    def end(self, block: Block | None) -> None:
        """Remove a block, and those that exist no more.

        With the last one, drop what could not be stored, or belongs to a block that failed. A
        commit that has begun is not stopped.
        """
        self._blocks = [ref for ref in self._blocks if ref() not in (None, block)]
        if not self._blocks:
            self.drop("")
        self._set_state()

    def has_open(self, block: Block) -> bool:
        """Whether a block is open and not about to end."""
        return not block.is_leaving and any(ref() is block for ref in self._blocks)

    # -------------------------------------------------------------- details

    def _set_state(self) -> None:
        blocks = [block for ref in self._blocks if (block := ref()) is not None]
        limits = [block.max_nbytes for block in blocks if not block.is_leaving]
        self._max_nbytes = min(limits, default=None)
        self.is_active = bool(self._blocks or self._shards)

    def _shard_like(self, shard: ShardRef) -> BufferedShard | None:
        buffered = self._shards.get(shard.key)
        if buffered is None or not buffered.shard.layout.has_same_entries(shard.layout):
            return None
        return buffered

    def _add(self, buffered: BufferedShard, new: Mapping[int, BufferedUpdate]) -> None:
        old = [buffered.updates[i] for i in new if i in buffered.updates]
        added = sum(map(_nbytes_of, new.values())) - sum(map(_nbytes_of, old))
        buffered.updates |= new
        buffered.nbytes += added
        self.nbytes += added
        if buffered.shard.key not in self._full and buffered.is_full:
            self._full[buffered.shard.key] = None

    def _clear_updates(self, buffered: BufferedShard) -> None:
        self.nbytes -= buffered.nbytes
        buffered.updates, buffered.nbytes = {}, 0
        self._full.pop(buffered.shard.key, None)


def _nbytes_of(update: BufferedUpdate) -> int:
    return max(len(update.value), _ENTRY_NBYTES) if isinstance(update, Set) else _ENTRY_NBYTES


def _new_states(
    updates: Sequence[EntryUpdate],
    buffered: BufferedShard,
    stored: Mapping[int, Bytes | None],
) -> dict[int, Set | Delete] | None:
    """Return the new states of entries after updates; ``None``: one depends on a stored value that
    is not given."""
    new: dict[int, Set | Delete] = {}
    for i, update in updates:
        is_whole = replaces_value(update)
        before = None if is_whole else new.get(i) or buffered.find(i)
        old = before.value if isinstance(before, Set) else None
        if before is None and not is_whole:
            if i not in stored:
                return None
            old = stored[i]
        after = new_value(update, old)
        new[i] = Delete(update.key) if after is None else Set(update.key, _own(after))
    return new


def _own(value: bytes | memoryview) -> bytes:
    """Return bytes that the caller cannot change afterwards."""
    return value if isinstance(value, bytes) else bytes(value)


@in_forked_child
def _reset() -> None:
    """Drop everything: the parent stores what it has buffered."""
    for buffer in list(_buffers):
        buffer._blocks = []
        buffer.end(None)
