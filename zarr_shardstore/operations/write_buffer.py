"""Write buffer of a store: the new values of chunks that a batch holds; replies and commits.

::

    write ──▶ updates ── a commit of the shard, under its lock ──▶ snapshot ──▶ base store
                 ▲                                                    │
                 └───────────── the commit failed: merged back ───────┘

Theory of operation:

1. A read looks for an entry in `updates`, then in the snapshot, then in the base store. So it finds
   a value that is flushed in between.
2. The queue of a shard (`zarr_shardstore.io.update_queue`) runs one commit at a time, first in,
   first out. Each commit takes all buffered updates of its shard, and stores them before its own.
   So an older value never lands after a newer one.
3. To flush a shard is to commit no update of it.

`zarr_shardstore.operations.batch` flushes the buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.shards import requests, stack
from zarr_shardstore.shards.read import ReadOptions, read_entries
from zarr_shardstore.shards.requests import Delete, EntryUpdate, Flow, Set
from zarr_shardstore.shards.stack import Stack
from zarr_shardstore.shards.updates import new_value, replaces_value
from zarr_shardstore.synchronized import in_forked_child, synchronized

if TYPE_CHECKING:
    from zarr_shardstore.operations.batch import Batch

NewState: TypeAlias = Set | Delete
"""The new state of an entry, independent of its stored value."""

_ENTRY_NBYTES = 100
"""Memory of an erased or an empty entry, in bytes: the objects that represent it."""


_synchronized = synchronized()
_buffers: weakref.WeakSet[WriteBuffer] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class BufferedShard:
    """Buffered updates of one shard, by entry id."""

    shard: ShardRef
    updates: dict[int, NewState] = field(default_factory=dict)
    """Updates that no commit has taken yet."""
    snapshot: dict[int, NewState] = field(default_factory=dict)
    """Updates that a commit is storing; they are read until it has ended."""
    joined: frozenset[int] = frozenset()
    """Entries that other updates in that commit change after the snapshot."""
    nbytes: int = 0
    """Memory of `updates`, in bytes."""
    error: Exception | None = None
    """Why the last commit of a snapshot failed."""

    def find(self, entry_id: int) -> NewState | None:
        return self.updates.get(entry_id) or self.snapshot.get(entry_id)

    @property
    def is_full(self) -> bool:
        """Whether every entry of the array in this shard has an update."""
        return len(self.updates) >= self.shard.n_grid_entries and self.updates.keys() >= set(
            self.shard.entries_of().tolist()
        )

    def new_states(
        self, updates: Sequence[EntryUpdate], stored: Mapping[int, Bytes | None]
    ) -> dict[int, NewState] | None:
        """Return the states after updates; ``None`` if one depends on a value not in `stored`."""
        new: dict[int, NewState] = {}
        for i, update in updates:
            old: Bytes | None = None
            if not replaces_value(update):
                before = new.get(i) or self.updates.get(i)
                if before is None and i in self.joined:
                    return None
                before = before or self.snapshot.get(i)
                if before is None and i not in stored:
                    return None
                old = stored[i] if before is None else getattr(before, "value", None)
            after = new_value(update, old)
            # `bytes`: the caller cannot change these.
            new[i] = Delete(update.key) if after is None else Set(update.key, bytes(after))
        return new


class WriteBuffer:
    """Buffered updates of one store, by shard, and the blocks that are open on it.

    Blocks are referenced weakly: one that is dropped before its end has failed.

    Thread safety: any thread may call any method; none of them waits for I/O.
    """

    def __init__(self) -> None:
        self.is_active = False
        """A block is open, or updates are buffered. Reads and writes outside of a batch look at
        this alone."""
        self.nbytes = 0
        """Memory of the buffered updates, in bytes, without snapshots."""
        self._max_nbytes: int | None = None
        """Smallest limit of the open blocks; ``None``: new updates are not buffered."""
        self.growing: set[str] = set()
        """Chunk prefixes of arrays to which this store appends frames. Their updates are stored at
        once: at the end of a block they would come over frames that are durable."""
        self._shards: dict[str, BufferedShard] = {}
        self._full: dict[str, None] = {}
        self._blocks: list[weakref.ref[Batch]] = []
        _buffers.add(self)

    @_synchronized
    def find(self, shard: ShardRef, entry_id: int) -> NewState | None:
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

    @_synchronized
    def put(
        self,
        shard: ShardRef,
        updates: Sequence[EntryUpdate],
        stored: Mapping[int, Bytes | None] | None = None,
    ) -> bool:
        """Buffer all updates; false if no block is open, the array is growing, or an update needs a
        value that is not given."""
        if self._max_nbytes is None or shard.layout.prefix in self.growing:
            return False
        buffered = self._shards.get(shard.key) or BufferedShard(shard)
        if not buffered.shard.layout.has_same_entries(shard.layout):
            raise ShardConflictError(
                f"shard {shard.key!r}: another store declared the array again while a batch "
                "buffered values of it; end the batch, then write again"
            )
        new = buffered.new_states(updates, stored or {})
        if new is None:
            return False
        self._shards[shard.key] = buffered
        buffered.shard = shard
        self._add(buffered, new)
        if self._max_nbytes is None:  # the garbage collector ended the last block just now: so the
            # updates are dropped, and their sums with them, before the caller stores them itself
            self._shards[shard.key] = buffered
            self.drop("")
            return False
        return True

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
    def take(
        self, shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]] = ()
    ) -> BufferedShard | None:
        """Make a snapshot of the updates of a locked shard, for a commit, which calls `end_commit`.

        The commit stores groups of other updates after it. The snapshot includes the snapshot of a
        commit that was cut off.
        """
        buffered = self._shard_like(shard)
        if buffered is None:
            return None
        buffered.snapshot = buffered.snapshot | buffered.updates
        buffered.joined = frozenset(i for group in groups for i, _ in group)
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
        buffered.joined = frozenset()
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
    def enter(self, block: Batch) -> None:
        """Buffer updates from now on."""
        self.is_active = True
        self._blocks.append(weakref.ref(block, lambda _: self.end(None)))
        self._set_state()

    @_synchronized
    def leave(self, block: Batch) -> list[str]:
        """Stop buffering for a block; return the keys of the shards that it must flush."""
        if not self.has_open(block):
            return []  # a child process: the parent has the block
        block.is_leaving = True
        self._set_state()
        return list(self._shards)

    @_synchronized
    def end(self, block: Batch | None) -> None:
        """Remove a block, and those that exist no more; with the last one, drop what is buffered.

        A commit that has begun continues.
        """
        self._blocks = [ref for ref in self._blocks if ref() not in (None, block)]
        if not self._blocks:
            self.drop("")
        self._set_state()

    def has_open(self, block: Batch) -> bool:
        """Whether a block is open and not about to end."""
        return not block.is_leaving and any(ref() is block for ref in self._blocks)

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

    def _add(self, buffered: BufferedShard, new: Mapping[int, NewState]) -> None:
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


def _nbytes_of(state: NewState) -> int:
    return max(len(state.value), _ENTRY_NBYTES) if isinstance(state, Set) else _ENTRY_NBYTES


@in_forked_child
def _reset() -> None:
    """Drop everything: the parent stores what it has buffered."""
    for buffer in list(_buffers):
        buffer._blocks = []
        buffer.end(None)


# ------------------------------------------------------------------------ flows


def perform_buffered(
    pairs: stack.ChunkRequests, reading: ReadOptions, buffer: WriteBuffer
) -> Flow[list[Any]]:
    """Reply to requests for chunks as `perform_on_chunks`; buffer the updates among them.

    Updates of a shard that depend on a stored value are committed. Cost: none for buffered chunks
    and for whole new values.
    """
    replies: list[Any] = [None] * len(pairs)
    left: list[int] = []
    writes: dict[ShardRef, list[int]] = {}
    for i, (request, chunk) in enumerate(pairs):
        if not isinstance(request, requests.Get | requests.GetSize | requests.Exists):
            writes.setdefault(chunk.shard, []).append(i)
        elif (state := buffer.find(chunk.shard, chunk.entry_id)) is not None:
            value = memoryview(state.value) if isinstance(state, Set) else None
            replies[i] = stack.reply_of(request, value, None)
        else:
            left.append(i)
    for shard, positions in writes.items():
        if not buffer.put(shard, [(pairs[i][1].entry_id, pairs[i][0]) for i in positions]):
            left += positions
    if left:
        found = yield from stack.perform_on_chunks([pairs[i] for i in left], reading)
        for i, reply in zip(left, found, strict=True):
            replies[i] = reply
    return replies


def commit_with_buffered(
    shard: ShardRef,
    groups: Sequence[Sequence[EntryUpdate]],
    commit: Callable[[ShardRef, Sequence[Sequence[EntryUpdate]]], Flow[list[Exception | None]]],
    buffer: WriteBuffer,
) -> Flow[Sequence[Exception | None]]:
    """Commit the buffered updates of a locked shard, then groups of updates, in one write.

    Groups that may wait are buffered: no other commit comes between the read and the buffer. While
    the last batch ends they are not, and join the commit of what is buffered.
    """
    waiting: list[Exception | None] = []
    if buffer.is_active and groups and all(map(_may_wait, groups)):
        waiting = yield from _buffer_groups(shard, groups, buffer)
        groups = groups[len(waiting) :]
        if not groups:
            return waiting
    buffered = buffer.take(shard, groups) if buffer.is_active else None
    if buffered is None:
        done = (yield from commit(shard, groups)) if any(groups) else [None] * len(groups)
        return [*waiting, *done]
    try:
        error, *outcomes = yield from commit(shard, [[*buffered.snapshot.items()], *groups])
        if error is not None:
            raise error
    except BaseException as error:
        buffer.end_commit(buffered, error)
        raise
    buffer.end_commit(buffered)
    return [*waiting, *outcomes]


def _may_wait(group: Sequence[EntryUpdate]) -> bool:
    return any(isinstance(update, requests.Modify) for _, update in group) and all(
        update.may_wait if isinstance(update, requests.Modify) else replaces_value(update)
        for _, update in group
    )


def _buffer_groups(
    shard: ShardRef, groups: Sequence[Sequence[EntryUpdate]], buffer: WriteBuffer
) -> Flow[list[Exception | None]]:
    """Buffer groups of updates; return the outcomes of the first ones, until a batch has ended."""
    ids = {i for group in groups for i, u in group if isinstance(u, requests.Modify)}
    left = [i for i in sorted(ids) if buffer.find(shard, i) is None]
    chunks = [ChunkRef(shard.chunk_key(i), shard, i) for i in left]
    stored = dict(zip(left, (yield from read_entries(chunks, ReadOptions())), strict=True))
    outcomes: list[Exception | None] = []
    for group in groups:
        try:
            if not buffer.put(shard, group, stored):
                break
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)
    return outcomes


def with_buffer(plain: Stack, buffer: WriteBuffer) -> Stack:
    """Return a stack whose sharding is buffered; the same one if it has no sharding, or if a
    transformer below may give shards other keys."""
    found = stack.split_at_sharding(plain)
    if found is None:
        return plain
    sharding, below = found
    if not all(isinstance(transformer, stack.ValueTransformer) for transformer in below):
        return plain
    above = plain[: len(plain) - len(below) - 1]
    on_chunks = partial(perform_buffered, buffer=buffer)
    return (*above, replace(sharding, on_chunks=on_chunks), *below)
