"""Chunks of a damaged shard that are whole, and the entries that they belong to. Pure but for the
decoding of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from zarr_shardstore.check.shards import ArrayChecker
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import (
    IndexDamageError,
    IndexFormat,
    ShardIndex,
    ShardingSpec,
    index_of_shard,
    order_entries,
)


@dataclass(slots=True)
class Salvage:
    """Result for one shard."""

    entries: dict[int, memoryview] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Entries that an index names, and whose chunk is not whole. Without a valid index all others
    of the grid: nothing says whether there were chunks."""
    has_index: bool = True
    """Whether a valid index says which chunks there were."""
    text: str = "its index is valid"
    """Where the entries come from."""


def salvage(checker: ArrayChecker, shard: ShardRef, data: memoryview, *, guesses: bool) -> Salvage:
    """Return the whole chunks of a shard.

    With `guesses` an index of a wrong checksum counts, too, as far as it contradicts nothing: its
    entries with whole chunks are in the bounds, apart, and in an order in which writers store them.
    """
    indexes = list(_indexes(shard.layout.spec, data))
    if indexes:
        return _whole(checker, shard, data, *indexes[0])
    spec = shard.layout.spec
    if guesses and len(data) >= spec.index_nbytes:
        n = spec.index_nbytes
        body = data[:n] if spec.index.location == "start" else data[len(data) - n :]
        fields = np.frombuffer(body[: 16 * spec.n_entries], f"{spec.index.byte_order}u8")
        index = ShardIndex(fields.reshape(-1, 2).astype(np.uint64))
        found = _whole(checker, shard, data, index, spec)
        ids = sorted(found.entries, key=lambda i: int(index.fields[i, 0]))
        present = np.array(ids, dtype=np.intp)
        orders = [order_entries(present, spec.chunks_per_shard, o) for o in ("C", "F", "morton")]
        if len(ids) > 1 and any(np.array_equal(present, order) for order in orders):
            found.has_index, found.text = False, "its index has a wrong checksum"
            return found
    return Salvage({}, shard.entries_of().tolist(), False, "it has no valid index")


def _indexes(spec: ShardingSpec, data: memoryview) -> Iterator[tuple[ShardIndex, ShardingSpec]]:
    """Yield the indexes that can be decoded: those without a contradiction come first."""
    doubtful = []
    forms = product((True, False), ("end", "start"), ("little", "big"))
    others = [IndexFormat(*form) for form in forms]  # type: ignore[arg-type]
    for form in sorted(others, key=lambda form: form != spec.index):
        new = ShardingSpec(spec.chunks_per_shard, form)
        if len(data) < new.index_nbytes:
            continue
        try:
            index = index_of_shard(data, new)
        except IndexDamageError:
            continue
        ids = index.present_ids()
        is_sound = len(ids) > 0 and not len(index.damaged_ids(len(data), new))
        nbytes = new.index_nbytes + float(index.fields[ids, 1].sum(dtype=np.float64))
        if is_sound and (form.checksum or form == spec.index or nbytes == len(data)):
            yield index, new
        elif form == spec.index:
            doubtful.append((index, new))
    yield from doubtful


def _whole(
    checker: ArrayChecker, shard: ShardRef, data: memoryview, index: ShardIndex, spec: ShardingSpec
) -> Salvage:
    found, exact = Salvage(), checker.exact_nbytes
    bad = set(index.damaged_ids(len(data), spec).tolist())
    ids = index.present_ids()
    order = np.lexsort((ids, index.fields[ids, 0]))
    reached = 0
    keys = shard.chunk_keys(ids[order])
    for i, key in zip(ids[order].tolist(), keys, strict=True):
        start, nbytes = index.fields[i].tolist()
        value = data[:0] if i in bad else data[start : start + nbytes]
        is_whole = i not in bad and exact in (None, nbytes) and (nbytes == 0 or start >= reached)
        if is_whole and checker.problem_of(key, value) is None:
            found.entries[i], reached = value, start + nbytes
        else:
            found.lost.append(i)
    found.lost.sort()
    return found
