"""Orders in which the entries of a shard can be written.

Readers accept every order; the order is a runtime choice and never part of metadata.

Source: sharding storage transformer draft, "Binary shard format", "Fixed order".
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import Coords

__all__ = ["EntryOrder", "check_order", "order_entries"]

EntryOrder = Literal["C", "F", "morton"]


def check_order(order: str) -> None:
    """Raise `SpecError` if `order` is not one of C, F and morton."""
    if order not in ("C", "F", "morton"):
        raise SpecError(f"order is 'C', 'F' or 'morton', got {order!r}")


def order_entries(
    entry_ids: npt.NDArray[np.intp], chunks_per_shard: Coords, order: EntryOrder
) -> npt.NDArray[np.intp]:
    """Return `entry_ids` in the order in which their bytes are written.

    Morton order interleaves the bits of the coordinates, dimension 0 lowest, and drops the
    bits that a short dimension does not have, as zarr-python does.
    """
    if order == "C" or len(chunks_per_shard) < 2:
        return np.sort(entry_ids)
    coords = np.unravel_index(entry_ids, chunks_per_shard)
    if order == "F":
        rank = np.ravel_multi_index(coords[::-1], chunks_per_shard[::-1])
    else:
        rank = np.zeros(len(entry_ids), dtype=np.intp)
        n_bits = [(n - 1).bit_length() for n in chunks_per_shard]
        position = 0
        for bit in range(max(n_bits)):
            for dim, available in zip(coords, n_bits, strict=True):
                if bit < available:
                    rank |= ((dim >> bit) & 1) << position
                    position += 1
    return entry_ids[np.argsort(rank, kind="stable")]
