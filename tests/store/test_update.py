"""``update`` and ``update_values``: what the function gets, and what becomes of its results."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync

from tests.support.bases import ALL_BASES
from tests.support.kit import CountingStore
from tests.support.pipeline_arrays import KINDS, make_array, make_store
from zarr_shardstore import ReadOnlyError, ShardingMapping, ShardingStore, SpecError

Values = list[bytes | None]

KEYS = [f"data/root/a/c{i}" for i in range(8)]
"""Of two shards."""


def mapping(base: Any = None, **options: Any) -> ShardingMapping:
    return ShardingMapping({} if base is None else base, chunks_per_shard=4, **options)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("base_name", ALL_BASES)
def test_values_in_the_order_of_their_keys(base_name: str, is_async: bool) -> None:
    """Of several shards, and of one that is an object of its own; as bytes."""
    m = mapping(ALL_BASES[base_name]())
    m.update({KEYS[1]: b"1", KEYS[5]: b"5", "other": b"o"})
    seen: list[Values] = []

    def change(old: Values) -> Sequence[bytes | bytearray | memoryview | None]:
        seen.append(old)
        return [memoryview(b"five"), None, bytearray(b"new"), old[0], b""]

    keys = [KEYS[5], KEYS[1], "other", KEYS[0], KEYS[6]]
    if is_async:
        sync(ShardingStore(m.base, chunks_per_shard=4).update(keys, change))
    else:
        m.update_values(keys, change)
    assert dict(m) == {KEYS[5]: b"five", "other": b"new", KEYS[0]: b"5", KEYS[6]: b""}
    assert seen == [[b"5", b"1", b"o", None, None]]
    assert all(value is None or type(value) is bytes for value in seen[0])


def test_another_writer_comes_between() -> None:
    """The function gets what is stored now, and for keys of other shards what it saw before."""
    m = mapping()
    for key in KEYS:
        m[key] = b"old"
    seen: list[Values] = []

    def change(old: Values) -> Values:
        if not seen:
            m[KEYS[0]] = b"new"
            m[KEYS[5]] = b"new"
        seen.append(old)
        return [b"".join(value or b"" for value in old)] * 3

    m.update_values([KEYS[0], KEYS[1], KEYS[4]], change)
    assert seen == [[b"old"] * 3, [b"new", b"old", b"old"]]
    assert m[KEYS[0]] == m[KEYS[1]] == b"newoldold"
    assert m[KEYS[4]] == b"oldoldold"
    assert m[KEYS[5]] == b"new"


@pytest.mark.parametrize("key", [KEYS[0], "other"])
def test_an_exception_leaves_the_shard(key: str) -> None:
    """In the first call and in one inside the commit; another group of the commit is stored."""
    m = mapping()
    m[key] = b"old"
    calls: list[Values] = []

    def fail(old: Values) -> Values:
        calls.append(old)
        if len(calls) == 2:
            raise ZeroDivisionError
        m[key] = b"new"
        return old

    for _ in range(2):
        calls.clear()
        with pytest.raises(ZeroDivisionError):
            m.update_values([key], fail)
        assert m[key] == b"new"
        m[key] = b"old"


def test_what_is_refused() -> None:
    """And nothing is written."""
    m = mapping()
    m[KEYS[0]] = b"old"
    before = dict(m)
    wrong: list[Any] = [None, b"new", [], [b"1", b"2"], ["text"], [1], {}, iter([b"new"])]
    for new in wrong:
        result = new
        with pytest.raises(SpecError, match="the function returns"):
            m.update_values([KEYS[0]], lambda _: result)  # noqa: B023
    with pytest.raises(SpecError, match=r"sys\.exit\(no more\)"):  # it would end zarr's event loop
        m.update_values([KEYS[0]], lambda _: sys.exit("no more"))
    for keys in ([KEYS[0], KEYS[0]], ["zarr.json"], ["a/.zarray"], ["meta/root/a.array.json"]):
        with pytest.raises(SpecError):
            m.update_values(keys, lambda old: [b"new"] * len(old))
    with pytest.raises(ReadOnlyError):
        mapping(m.base, read_only=True).update_values([KEYS[0]], lambda _: [b"new"])
    store = ShardingStore({}, chunks_per_shard=4)
    zarr.create_array(store, name="z", shape=(4,), chunks=(1,), dtype="u1")
    with pytest.raises(SpecError, match="outside"):
        store.update_sync(["z/c/9"], lambda _: [b"new"])
    assert dict(m) == before


def test_what_does_not_change_is_not_written() -> None:
    base = CountingStore()
    m = mapping(base)
    m.update({KEYS[0]: b"0", "other": b"o"})
    base.forget()
    m.update_values([KEYS[0], KEYS[1], "other"], lambda old: [bytes(v) if v else v for v in old])
    assert base.writes == []


def test_pieces_of_an_object_that_is_no_shard() -> None:
    """``set_partial_values``, too, loses none."""
    m = mapping()
    m["other"] = bytes(64)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: m.set_partial_values([("other", i, b"1")]), range(64)))
    assert m["other"] == b"1" * 64


# ------------------------------------------------------------------------- batches


def test_in_a_batch_it_is_stored_immediately() -> None:
    """With what was buffered before."""
    base: dict[str, bytes] = {}
    m, other = mapping(base), mapping(base)
    with m.batch():
        m[KEYS[0]] = b"0"
        m.update_values([KEYS[0], KEYS[1]], lambda old: [old[1], old[0]])
        assert other.get(KEYS[1]) == b"0"
        assert other.get(KEYS[0]) is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain chunks"])
def test_parts_in_a_batch(kind: str) -> None:
    """Those of several threads are there, although none is stored before the batch ends."""
    base = CountingStore()
    store = make_store(kind, base)
    z = make_array(store, kind)
    data = np.arange(1, 1 + z.size).reshape(z.shape)
    z[...] = 1000
    base.forget()
    barrier = threading.Barrier(4)

    def write(i: int) -> None:
        barrier.wait(60)
        for row in range(i, z.shape[0], 4):
            z[row] = data[row]

    with store.batch() if hasattr(store, "batch") else store.store.batch():
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, range(4)))
        np.testing.assert_array_equal(z[...], data)
    shards = [key for _, key in base.writes if not key.endswith((".json", ".zarray"))]
    assert len(shards) <= 2 * 4  # a full one is stored at once
    np.testing.assert_array_equal(z[...], data)
