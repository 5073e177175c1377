"""Updates of values: their pieces and sizes, and what they make of stored values.

Source: sharding storage transformer draft, "API implementation", set_partial_values and
erase_values; zarr-python 2.18, ``StoreV3.set_partial_values`` (a start after the end, a
negative start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any, TypeVar

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.box_grid import Box
from zarr_shardstore.format.layout import ChunkRef, ShardRef
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import Delete, EntryUpdate, Flow, Piece, Set, Update

T = TypeVar("T", bound=Mapping[int, Bytes | None])


def shard_updates(pairs: Iterable[tuple[Any, ChunkRef]]) -> list[requests.Request]:
    """Return one `UpdateShard` for each shard that requests for its chunks change."""
    updates: dict[ShardRef, list[EntryUpdate]] = {}
    shard: ShardRef | None = None
    for request, chunk in pairs:
        if chunk.shard is not shard:  # a hash for each run of chunks
            shard = chunk.shard
            parts = updates.setdefault(shard, [])
        parts.append((chunk.entry_id, request))
    return [requests.UpdateShard(shard, tuple(parts)) for shard, parts in updates.items()]


class EntryBlock(Sequence[EntryUpdate]):
    """New values of a box of entries of one shard, ``None`` to erase: updates made when read.

    The box has coordinates in the grid of chunks. A whole shard is stored without the updates.
    """

    def __init__(self, shard: ShardRef, box: Box, values: Sequence[Bytes | None]) -> None:
        self.shard = shard
        self._box = box
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, i: Any) -> Any:
        return list(self)[i]

    def __iter__(self) -> Iterator[EntryUpdate]:
        keys = self.shard.layout.chunk_keys(self._box)
        for (entry_id, value), key in zip(self.new_values().items(), keys, strict=True):
            yield entry_id, Delete(key) if value is None else Set(key, value)

    def new_values(self) -> dict[int, Bytes | None]:
        """Return the values by entry id."""
        ids = self.shard.layout.spec.boxes.ids_in(self.shard.coords, self._box)
        return dict(zip(ids.tolist(), self._values, strict=True))


def replaces_value(update: Update) -> bool:
    """Whether the new value is independent of the stored one."""
    return isinstance(update, Set | Delete)


def replaced_first(updates: Iterable[EntryUpdate]) -> dict[int, bool]:
    """Return for each entry whether its first update is independent of its stored value."""
    replaced: dict[int, bool] = {}
    for entry_id, update in updates:
        replaced.setdefault(entry_id, replaces_value(update))
    return replaced


def replaced_entries(shard: ShardRef, updates: Sequence[EntryUpdate]) -> dict[int, float] | None:
    """Return the entries that get new values, if these are all in the array and depend on no
    stored value; else ``None``.

    Each entry comes with the largest size of a stored value that does not matter: infinity, or
    the number of bytes that pieces write from 0 on.
    """
    if len(updates) < shard.n_grid_entries:  # a number: sets of all entries are large
        return None
    replaced: dict[int, float] = {}
    if isinstance(updates, EntryBlock):
        replaced, updates = dict.fromkeys(updates.new_values(), math.inf), ()
    for i, update in updates:
        match update:
            case Set() | Delete():
                replaced[i] = math.inf
            case _ if replaced.get(i) == math.inf:
                pass  # the value before this update is known
            case requests.SetPartial() if (nbytes := update.nbytes_from_start) is not None:
                replaced[i] = max(nbytes, replaced.get(i, 0))
            case _:
                return None
    return replaced if replaced.keys() >= set(shard.entries_of().tolist()) else None


def apply_groups(
    groups: Sequence[Sequence[EntryUpdate]],
    read: Callable[[Sequence[EntryUpdate]], Flow[T | None]],
) -> Flow[tuple[list[Exception | None], T | None, dict[int, Bytes | None]]]:
    """Return for each group ``None`` or its error, the stored values, and the new ones by entry id.

    `read` returns the stored values for updates. If a group fails, also by a transformer, it fails
    alone. A stored value that it replaces was perhaps not read, so the values are read again.
    """
    outcomes: list[Exception | None] = [None] * len(groups)
    left = list(range(len(groups)))
    while left:
        of_one = groups[left[0]] if len(left) == 1 else None
        old = yield from read(of_one or [update for i in left for update in groups[i]])
        stored: Mapping[int, Bytes | None] = old or {}
        new: dict[int, Bytes | None] = {}
        for i in left:
            group = groups[i]
            if isinstance(group, EntryBlock):
                new |= group.new_values()
                continue
            try:
                for entry_id, update in group:
                    before = new[entry_id] if entry_id in new else stored.get(entry_id)
                    after = new_value(update, before)
                    # A value that is replaced is not read, so it may be stored.
                    if after is not before or replaces_value(update):
                        new[entry_id] = after
            except Exception as error:
                outcomes[i] = error
                left.remove(i)
                break
        else:
            return outcomes, old, new
    return outcomes, None, {}


def new_value(update: Update, old: Bytes | None) -> Bytes | None:
    """Return what an update makes of a value; the very object if it leaves the value."""
    match update:
        case Set(_, value):
            return value
        case requests.SetIfNotExists(_, value):
            return value if old is None else old
        case requests.SetPartial(key, pieces):
            return apply_pieces(key, old, pieces)
        case requests.Modify(_, change):
            return change(old)
    return None


# ------------------------------------------------------------------------ pieces


def check_pieces(key: str, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the pieces of one value in order; refuse overlaps, and mixed negative starts."""
    try:
        # Of two at one place the empty one comes first: it covers no byte of the other.
        ordered = tuple(
            sorted(((index(start), v) for start, v in pieces), key=requests.start_and_nbytes)
        )
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


def apply_pieces(key: str, old: Bytes | None, pieces: Iterable[Piece]) -> bytes:
    """Return `old` with the pieces written over it; a missing value counts as empty.

    A piece may start after the end only where others fill the gap. A negative start counts
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
