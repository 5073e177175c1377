"""How often a store of this process changed what a document says about keys.

Whoever keeps what documents say compares the count, and reads them again when it moved.
"""

from __future__ import annotations

import os

from zarr_shardstore.io.safe_lock import SafeLock

__all__ = ["count_change", "n_changes"]

_lock = SafeLock()
_n = 0


def n_changes() -> int:
    """Changes so far."""
    return _n


def count_change(seen: int) -> tuple[int, bool]:
    """Count a change; return the new count, and whether its maker had seen all others."""
    global _n
    with _lock.held():
        is_alone = seen == _n
        _n += 1
        return _n, is_alone


def _reset_after_fork() -> None:
    """Another thread of the parent may have held it."""
    global _lock
    _lock = SafeLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
