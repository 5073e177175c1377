"""How often a store of this process changed what a document says about keys.

Whoever keeps what documents say compares the count, and reads them again when it moved.
"""

from __future__ import annotations

import threading

__all__ = ["count_change", "n_changes"]

_lock = threading.Lock()
_n = 0


def n_changes() -> int:
    """Changes so far."""
    return _n


def count_change(seen: int) -> int:
    """Count a change; return what its maker, who had seen `seen` changes, has seen now.

    That is the new count, unless somebody else made a change that it has not noticed.
    """
    global _n
    with _lock:
        is_current = seen == _n
        _n += 1
        return _n if is_current else seen
