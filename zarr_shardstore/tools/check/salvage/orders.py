"""Orders in which writers store the chunks of a shard, and what follows from one.

zarr-python and this package write Morton order, tensorstore and zarrs C order. But appends come in
any order, zarrs stores some shards as its threads are ready, and several programs may have written
one array. So only the user can say that a shard without an index is in an order; the other shards
of the array tell which one that may be.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import BaseStoreHandle, chunk_keys, shard_format, walks
from zarr_shardstore.tools.check.objects import ArrayChecker
from zarr_shardstore.tools.check.salvage.damaged_shard import DamagedShard

ORDERS: tuple[shard_format.EntryOrder, ...] = ("morton", "C", "F")

_MAX_OTHERS = 256
"""Shards of the array whose indexes are read."""


def orders_of(ids: npt.NDArray[np.intp], cps: chunk_keys.Coords) -> list[shard_format.EntryOrder]:
    """Return the orders that entries are in; ids follow each other as their bytes do."""
    return [
        order
        for order in ORDERS
        if np.array_equal(ids, shard_format.order_entries(ids, cps, order))
    ]


def named_by_order(shard: DamagedShard, order: shard_format.EntryOrder) -> dict[int, memoryview]:
    """Return the whole chunks of a shard that was full: those in front of the first gap. None, if
    the data of a shard that is not cut are more or fewer than its chunks."""
    in_grid: npt.NDArray[np.intp] = shard.shard.entries_of()
    ids, at, places, n = in_grid, shard.first, shard.frames, len(shard.frames)
    is_cut = not n or places[-1][1] != shard.data_stop
    if shard.exact and (is_cut or shard.is_proving):
        n = -(-(shard.data_stop - at) // shard.exact)
        places = [(at + i * shard.exact, at + (i + 1) * shard.exact) for i in range(shard.n)]
    if n == shard.n:  # some writers store chunks outside the grid, too
        ids = np.arange(n)
    elif n > len(ids) or (n < len(ids) and not is_cut):
        return {}
    inside = set(in_grid.tolist())
    whole: dict[int, memoryview] = {}
    ordered = shard_format.order_entries(ids, shard.spec.chunks_per_shard, order)
    for i, (start, stop) in zip(ordered.tolist(), places, strict=False):
        if start != at:
            break
        if i in inside and shard.is_whole("", start, stop - start):
            whole[i] = shard.data[start:stop]
        at = stop
    return whole


def order_of_others(
    base: BaseStoreHandle, checker: ArrayChecker
) -> tuple[int, shard_format.EntryOrder | None]:
    """Return the number of whole shards of an array with two chunks or more, of the first ones that
    are listed, and the order that all of them are in. It proves nothing for another shard."""
    orders, n_whole = list(ORDERS), 0
    listed = walks.walk(base.run, checker.grid, needs=("index",), reads=False)
    found = (s for some in listed for s in walks.try_read(base.run, checker.grid, some, ("index",)))
    with suppress(OSError):
        for index in (stored.decoded for stored in islice(found, _MAX_OTHERS)):
            if index is not None and len(ids := index.present_ids()) > 1:
                n_whole += 1
                ids = ids[np.argsort(index.fields[ids, 0], kind="stable")]
                these = orders_of(ids, checker.grid.chunks_per_shard)
                orders = [order for order in orders if order in these]
    return n_whole, orders[0] if n_whole and orders else None


def advice(n_unnamed: int, n_others: int, order: shard_format.EntryOrder | None) -> str:
    """Return what a user can do for chunks of which nothing says which ones they are."""
    text = f"{n_unnamed} entries seem whole, and nothing says which chunks they are: "
    if order is None:
        return f"{text}if the shard was full, tell the order in which it was written"
    text += "if the shard was full, and of the program that wrote "
    return f"{text}the {n_others} others of the array, they are in the order {order!r}"
