"""How much of what can be drawn at random, killed or combined a run of the tests tries.

A run takes minutes and tries few of each. ``make test-thorough`` sets ``ZARR_SHARDSTORE_ROUNDS``
to 1: all examples, kills and combinations. A larger number multiplies the examples.
"""

from __future__ import annotations

import os

N_ROUNDS = int(os.environ.get("ZARR_SHARDSTORE_ROUNDS", "0"))
"""0: a quick run."""
_QUICK = 16
"""So many times fewer examples."""


def rounds(n: int) -> int:
    """Return the number of examples to draw: `n` in a thorough run, a sixteenth in a quick one."""
    return n * N_ROUNDS or -(-n // _QUICK)
