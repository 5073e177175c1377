"""Bytes of a whole shard: entries in any order, and their index.

::

    index at the end     ├── entry bytes, any order, any gaps ──┤ index ┤
    index at the start   ├ index ┤── entry bytes, any order, any gaps ──┤

Readers accept every order of entries. The order is a runtime choice and never part of metadata.

Source: sharding storage transformer draft, "Binary shard format", "Fixed order"; ZEP 2,
"index_location".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.index import MISSING, ShardIndex, ShardingSpec
from zarr_shardstore.format.keys import Coords

EntryOrder = Literal["C", "F", "morton"]


def check_order(order: str) -> None:
    """Raise `SpecError` if `order` is not one of C, F and morton."""
    if order not in ("C", "F", "morton"):
        raise SpecError(f"order is 'C', 'F' or 'morton', got {order!r}")


def order_entries(
    entry_ids: npt.NDArray[np.intp], chunks_per_shard: Coords, order: EntryOrder
) -> npt.NDArray[np.intp]:
    """Sort entry ids into the order in which their bytes are written.

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


Bytes: TypeAlias = bytes | memoryview


def build_shard(entries: Mapping[int, Bytes], spec: ShardingSpec, order: EntryOrder = "C") -> bytes:
    """Assemble a shard without gaps from bytes by entry id; the other entries are missing."""
    return b"".join([piece for _, pieces in lay_out(entries, spec, order) for piece in pieces])


def lay_out(
    entries: Mapping[int, Bytes], spec: ShardingSpec, order: EntryOrder, gap_nbytes: int = 0
) -> list[tuple[int, Sequence[Bytes]]]:
    """As `build_shard`, in pieces with the offset of the first, as `SetWithGaps` takes them.

    A gap is between the entries and an index at the end.
    """
    ids = np.fromiter(entries, dtype=np.intp, count=len(entries))
    ids = order_entries(ids, spec.chunks_per_shard, order)
    values = [entries[i] for i in ids.tolist()]
    nbytes = np.fromiter(map(len, values), dtype=np.uint64, count=len(values))
    index = packed_index(ids, nbytes, spec)
    if spec.index.location == "start":
        return [(0, [index, *values])]
    return [(0, values), (int(nbytes.sum()) + gap_nbytes, [index])]


def packed_index(ids: npt.ArrayLike, nbytes: npt.ArrayLike, spec: ShardingSpec) -> bytes:
    """Encode the index of entries that are stored in this order, without gaps."""
    at, sizes = np.asarray(ids, dtype=np.intp), np.asarray(nbytes, dtype=np.uint64)
    start = spec.index_nbytes if spec.index.location == "start" else 0
    fields = np.full((spec.n_entries, 2), MISSING, dtype=np.uint64)
    fields[at, 0] = np.cumsum(sizes) - sizes + np.uint64(start)
    fields[at, 1] = sizes
    return ShardIndex(fields).encode(spec.index)


def index_of_shard(shard: Bytes, spec: ShardingSpec) -> ShardIndex:
    """Decode the index of a whole shard, as `ShardIndex.decode`; its entries are not checked."""
    view, nbytes = memoryview(shard), spec.index_nbytes
    is_at_start = spec.index.location == "start"
    return ShardIndex.decode(
        view[:nbytes] if is_at_start else view[max(0, len(view) - nbytes) :], spec
    )


def split_shard(
    shard: Bytes, spec: ShardingSpec, *, without: Collection[int] = ()
) -> dict[int, memoryview]:
    """Return the bytes of each entry of a whole shard by entry id, without a copy.

    The entries `without` are left out, and may be damaged. Raises `IndexDamageError` if the index
    cannot be decoded or another entry leaves the shard.
    """
    index = index_of_shard(shard, spec).without(without)
    index.check_entries(len(shard), spec)
    view = memoryview(shard)
    ids = index.present_ids()
    places = zip(ids.tolist(), index.fields[ids].tolist(), strict=True)
    return {i: view[offset : offset + nbytes] for i, (offset, nbytes) in places}
