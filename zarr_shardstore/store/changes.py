"""How often a store of this process changed what a document says about keys.

Whoever keeps what documents say compares the count, and reads them again when it moved.
"""

from __future__ import annotations

from zarr_shardstore.io.synchronized import synchronized

__all__ = ["count_change", "n_changes"]

_synchronized = synchronized()
_n = 0


def n_changes() -> int:
    """Changes so far."""
    return _n


@_synchronized
def count_change(seen: int) -> tuple[int, bool]:
    """Count a change; return the new count, and whether its maker had seen all others."""
    global _n
    is_alone = seen == _n
    _n += 1
    return _n, is_alone
