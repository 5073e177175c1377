"""Updates of entries: the changes that a write asks for, before a strategy decides how.

Source: sharding storage transformer draft, "API implementation", set_partial_values and
erase_values; zarr-python 2.18, ``StoreV3.set_partial_values`` (a start behind the end, a
negative start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import TypeAlias

from zarr_shardstore.errors import SpecError

Piece: TypeAlias = "tuple[int, bytes | memoryview]"


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
    """Replace the value of an entry by what `change` makes of it (``None``: missing)."""

    entry_id: int
    change: Callable[[bytes | memoryview | None], bytes | memoryview]


EntryUpdate: TypeAlias = SetEntry | DeleteEntry | PatchEntry | MapEntry


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
