"""What updates make of entries, so that nothing more depends on the stored values.

::

    update ──┬─ a whole value, an erasure ────────────────────────────────▶ final value
             └─ a piece, a change, a value only if there is none
                  └─ on what is held of the entry, else on what is stored ─▶ final value
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeAlias

from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.plan.entries import EntryUpdate, Erase, Modification, Patch, Put, apply_pieces

__all__ = ["Final", "is_final", "nbytes_of", "resolve_updates"]

Final: TypeAlias = Put | Erase
"""What an entry will be: nothing of its stored value matters."""

_ENTRY_NBYTES = 100
"""At least so much counts for an entry: the objects that hold an erased or an empty one."""


def is_final(update: EntryUpdate) -> bool:
    """Whether an update says by itself what the entry will be."""
    return isinstance(update, Erase) or (isinstance(update, Put) and not update.only_if_missing)


def nbytes_of(final: Final) -> int:
    """What a final value takes in memory, in bytes."""
    return max(len(final.value), _ENTRY_NBYTES) if isinstance(final, Put) else _ENTRY_NBYTES


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
        elif stored[i] is None or not isinstance(update, Put):
            old = stored[i]
            found = None if old is None else Put(i, old)
            new[i] = _resolved(shard, update, found)
    return new


def _resolved(shard: ShardRef, update: EntryUpdate, before: Final | None) -> Final:
    """What becomes of an entry; `before` is what it was, ``None``: missing in the base store."""
    i = update.entry_id
    old = before.value if isinstance(before, Put) else None
    match update:
        case Erase():
            return update
        case Put(only_if_missing=True) if isinstance(before, Put):
            return before
        case Put(_, value, only_if_missing):
            # It is still only filled if it is missing when it is published, for the sake of
            # other stores; but not if this batch erased it.
            return Put(i, _own(value), only_if_missing and before is None)
        case Patch():
            return Put(i, apply_pieces(shard.chunk_key(i), old, update.pieces))
        case Modification():
            return Put(i, _own(update.change(old)))


def _own(value: bytes | memoryview) -> bytes:
    """Bytes that the caller cannot change afterwards."""
    return value if isinstance(value, bytes) else bytes(value)
