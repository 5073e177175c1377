"""How often tests that draw at random draw.

A run of the suite draws few examples. ``ZARR_SHARDSTORE_ROUNDS`` multiplies them, and the rounds
of tests with many processes, for a longer run.
"""

from __future__ import annotations

import os

N_ROUNDS = int(os.environ.get("ZARR_SHARDSTORE_ROUNDS", "1"))
