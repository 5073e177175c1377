"""What each operation costs in requests of the base store: exact lists, not impressions.

The base store counts calls of its public methods, as an object store would bill them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from unittest import mock

import obstore
import pytest
import zarr
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.storage import ObjectStore

from tests.support.async_calls import erase_prefix, set_partial_values
from tests.support.kit import CountingStore
from zarr_shardstore import ShardingMapping, ShardingStore, shard_store

PROTOTYPE = default_buffer_prototype()


def buffer(value: bytes) -> Buffer:
    return cpu.Buffer.from_bytes(value)


def key(*coords: int) -> str:
    return "data/root/a/c" + "/".join(map(str, coords))


@pytest.fixture
def base() -> CountingStore:
    return CountingStore()


def make_store(base: CountingStore, **options: Any) -> ShardingStore:
    return ShardingStore(base, **{"chunks_per_shard": (4, 4), **options})


async def fill(base: CountingStore, n: int = 8, nbytes: int = 10) -> None:
    """n x n chunks in (n / 4)² shards."""
    store = make_store(base)
    await store._set_or_erase(
        (key(i, j), buffer(bytes(nbytes))) for i in range(n) for j in range(n)
    )
    base.forget()


async def test_reading_chunks_of_several_shards_cold_takes_two_rounds(base: CountingStore) -> None:
    """k chunks of m shards: m index requests, then the spans; nothing else is read."""
    await fill(base)
    store = make_store(base, max_gap_bytes=0)
    coords = [(0, 0), (0, 1), (3, 3), (4, 4), (7, 0), (5, 5)]
    values = await store.get_partial_values(PROTOTYPE, [(key(*c), None) for c in coords])
    assert all(v is not None and len(v) == 10 for v in values)
    assert base.rounds == 2
    index_reads = [k for k, r in base.reads if isinstance(r, SuffixByteRequest)]
    assert sorted(index_reads) == [key(0, 0), key(1, 0), key(1, 1)]
    spans = [(k, r) for k, r in base.reads if isinstance(r, RangeByteRequest)]
    assert len(index_reads) + len(spans) == len(base.reads)
    assert len(spans) <= len(coords)
    assert sum(r.end - r.start for _, r in spans) == 10 * len(coords)


@pytest.mark.parametrize(("max_gap_bytes", "n_spans"), [(0, 2), (10, 1), (9, 2)])
async def test_spans_are_what_coalescing_allows(
    base: CountingStore, max_gap_bytes: int, n_spans: int
) -> None:
    """Two chunks with one of 10 bytes between them."""
    await fill(base)
    store = make_store(base, order="C", max_gap_bytes=max_gap_bytes)
    await store._set_or_erase([(key(0, j), buffer(bytes(10))) for j in range(4)])
    base.forget()
    await store.get_partial_values(PROTOTYPE, [(key(0, 0), None), (key(0, 2), None)])
    assert len([r for _, r in base.reads if isinstance(r, RangeByteRequest)]) == n_spans


async def test_one_chunk_is_two_requests(base: CountingStore) -> None:
    """Its index and its bytes; a missing one is known from the index."""
    await fill(base)
    store = make_store(base)
    await store.get(key(2, 3), PROTOTYPE)
    assert [type(r) for _, r in base.reads] == [SuffixByteRequest, RangeByteRequest]
    base.forget()
    assert await store.exists(key(2, 3))
    assert await store.getsize(key(2, 3)) == 10
    assert [type(r) for _, r in base.reads] == [SuffixByteRequest, SuffixByteRequest]


async def test_a_whole_shard_is_one_set_and_no_read() -> None:
    """In each way to write it; the first set of the store included."""
    shard_keys = [key(i, j) for i in range(4) for j in range(4)]
    ways: dict[str, Callable[[ShardingStore], Awaitable[object]]] = {
        "set_partial_values": lambda s: set_partial_values(s, [(k, 0, b"abc") for k in shard_keys]),
        "_set_or_erase": lambda s: s._set_or_erase([(k, buffer(b"abc")) for k in shard_keys]),
        "gather": lambda s: asyncio.gather(*(s.set(k, buffer(b"abc")) for k in shard_keys)),
    }
    for name, write in ways.items():
        new_base = CountingStore()
        await write(make_store(new_base))
        assert new_base.writes == [("set", key(0, 0))], name
        assert new_base.reads == [], name


async def test_replacing_a_whole_shard_is_one_set_and_no_read(base: CountingStore) -> None:
    """What is stored does not matter."""
    await fill(base)
    store = make_store(base)
    await store._set_or_erase([(key(i, j), buffer(b"new")) for i in range(4) for j in range(4)])
    assert base.writes == [("set", key(0, 0))]
    assert base.reads == []


@pytest.mark.parametrize("has_destination", [False, True])
@pytest.mark.parametrize("name", ["zarr store", "obstore"])
def test_a_conversion_asks_for_the_size_of_each_chunk_once(
    name: str, has_destination: bool
) -> None:
    """A zarr store has one request for it; obstore states it with the value. Each is read once."""
    reads, sizes = Counter[str](), Counter[str]()

    class Sized(CountingStore):
        async def getsize(self, key: str) -> int:
            sizes[key] += 1
            return len(self._store_dict[key])

    def counted(counter: Counter[str], real: Any) -> Any:
        async def call(store: Any, key: str, *args: Any, **options: Any) -> Any:
            counter[key] += 1
            return await real(store, key, *args, **options)

        return call

    base: Any = Sized() if name == "zarr store" else ObjectStore(obstore.store.MemoryStore())
    z = zarr.create_array(base, name="z", shape=(6, 6), chunks=(1, 1), dtype="u1", fill_value=0)
    z[:4] = 7
    reads.clear()
    if isinstance(base, Sized):
        base.forget()
    calls = {
        "get_async": counted(reads, obstore.get_async),
        "head_async": counted(sizes, obstore.head_async),
    }
    with mock.patch.multiple(obstore, **calls):
        shard_store(base, {} if has_destination else None, chunks_per_shard=(3, 2))
    if isinstance(base, Sized):
        reads.update(k for k, _ in base.reads)
    chunks = {f"z/c/{i}/{j}" for i in range(6) for j in range(6)}
    read_later = {f"z/c/{i}/{j}" for i in range(2) for j in range(3)}  # keys of shards, then
    for counter, n_stored, n_missing in [(reads, 1, 1), (sizes, int(name == "zarr store"), 0)]:
        for k in chunks - read_later:
            assert counter[k] == (n_stored if int(k.split("/")[2]) < 4 else n_missing), k


def test_the_mapping_too() -> None:
    """Blocking, through a mapping that counts."""

    class CountingDict(dict[str, bytes]):
        n_reads = n_writes = 0

        def __getitem__(self, k: str) -> bytes:
            self.n_reads += 1
            return super().__getitem__(k)

        def __setitem__(self, k: str, v: bytes) -> None:
            self.n_writes += 1
            super().__setitem__(k, v)

    base = CountingDict()
    m = ShardingMapping(base, chunks_per_shard=(2, 2))
    m.set_partial_values([(key(i, j), 0, b"x") for i in range(2) for j in range(2)])
    assert (base.n_reads, base.n_writes) == (0, 1)
    m.update({key(i, j): b"y" for i in range(2) for j in range(2)})
    assert (base.n_reads, base.n_writes) == (0, 2)


async def test_erasing_a_whole_shard_is_one_delete_and_no_read(base: CountingStore) -> None:
    """By keys, and by a prefix in the grid."""
    await fill(base)
    store = make_store(base)
    await store._set_or_erase([(key(i, j), None) for i in range(4) for j in range(4, 8)])
    assert base.writes == [("delete", key(0, 1))]
    assert base.reads == []


async def test_a_part_of_a_shard_is_one_read_and_one_set(base: CountingStore) -> None:
    """However many chunks of the shard, set one by one at the same time."""
    await fill(base)
    store = make_store(base)
    await asyncio.gather(*(store.set(key(0, j), buffer(b"new")) for j in range(4)))
    assert base.reads == [(key(0, 0), None)]
    assert base.writes == [("set", key(0, 0))]


async def test_erase_prefix_inside_the_grid_of_a_zarr_array(base: CountingStore) -> None:
    """Shards that are erased whole are deleted unread, others are rewritten once."""
    store = make_store(base, chunks_per_shard=4)
    z = await zarr.api.asynchronous.create_array(
        store, name="z", shape=(8, 6), chunks=(1, 1), dtype="u1", fill_value=0
    )
    await z.setitem(slice(None), 1)
    base.forget()
    await erase_prefix(store, "z/c/5/")
    assert sorted(base.writes) == [("set", "z/c/1/0"), ("set", "z/c/1/1")]
    base.forget()
    await erase_prefix(store, "z/c/")
    assert base.reads == []
    assert not [k for k in base._store_dict if k.startswith("z/c/")]


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize(
    ("separator", "prefix", "n_shards"),
    [
        ("/", "z/c/4", 20),  # row 4; there are no rows 40 to 49
        ("/", "z/c/4/", 20),
        ("/", "z/c/3", 120),  # rows 3 and 30 to 39
        ("/", "z/c/39/3", 6),  # columns 3 and 30 to 39
        ("/", "z/c/39/39", 1),
        ("/", "z/c/7/40", 0),
        (".", "z/c.4", 20),
        (".", "z/c.39.3", 6),
        (".", "z/c.39.39", 1),
        (".", "z/c", 400),
    ],
)
async def test_a_prefix_reads_the_shards_that_can_match(
    base: CountingStore, separator: Literal["/", "."], prefix: str, n_shards: int
) -> None:
    """Listing reads the index of each, erasing only those that keep something; no other shard."""
    store = make_store(base, chunks_per_shard=2)
    z = await zarr.api.asynchronous.create_array(
        store,
        name="z",
        shape=(40, 40),
        chunks=(1, 1),
        dtype="u1",
        chunk_key_encoding={"name": "default", "separator": separator},
    )
    await z.setitem(slice(None), 1)
    keys = {k async for k in store.list()}
    expected = {k for k in keys if k.startswith(prefix)}
    base.forget()
    assert {k async for k in store.list_prefix(prefix)} == expected
    shards_read = [k for k, _ in base.reads if not k.endswith(("zarr.json", ".zarray"))]
    assert len(set(shards_read)) == len(shards_read) == n_shards
    base.forget()
    await erase_prefix(store, prefix)
    written = [k for _, k in base.writes]
    assert len(set(written)) == len(written) == n_shards
    assert {k for k, _ in base.reads if not k.endswith(("zarr.json", ".zarray"))} <= set(written)
    assert {k async for k in store.list()} == keys - expected


@pytest.mark.parametrize("transformers", [["crc32c", "sharding"], ["sharding", "crc32c"]])
async def test_a_prefix_in_a_stack_reads_the_shards_that_can_match(
    base: CountingStore, transformers: list[str]
) -> None:
    """Transformers that keep keys hide no shard."""
    store = make_store(base, chunks_per_shard=2, storage_transformers=transformers)
    z = await zarr.api.asynchronous.create_array(
        store, name="z", shape=(40,), chunks=(1,), dtype="u1"
    )
    await z.setitem(slice(None), 1)
    base.forget()
    listed = {k async for k in store.list_prefix("z/c/3")}
    assert listed == {f"z/c/{i}" for i in (3, *range(30, 40))}
    shards_read = {k for k, _ in base.reads if not k.endswith(("zarr.json", ".zarray"))}
    assert shards_read == {f"z/c/{i}" for i in (1, *range(15, 20))}


async def test_compact_reads_the_shards_that_can_match(base: CountingStore) -> None:
    """As a listing does; here the prefix ends within the number of a row."""
    await fill(base)
    store = make_store(base)
    await store.compact("data/root/a/c7")
    assert {k for k, _ in base.reads} == {key(1, 0), key(1, 1)}


async def test_the_document_of_an_array_is_read_once(base: CountingStore) -> None:
    """One request when the array is first met, none after."""
    store = make_store(base, chunks_per_shard=4)
    await zarr.api.asynchronous.create_array(
        store, name="z", shape=(8, 8), chunks=(1, 1), dtype="u1", fill_value=0
    )
    base.forget()
    fresh = make_store(base)
    for i in range(3):
        await fresh.get(f"z/c/{i}/0", PROTOTYPE)
    assert [k for k, _ in base.reads].count("z/zarr.json") == 1
    assert len(base.reads) == 1 + 3


async def test_listing_reads_one_index_a_shard(base: CountingStore) -> None:
    """And no chunk."""
    await fill(base)
    store = make_store(base)
    assert len([k async for k in store.list()]) == 64
    assert sorted(k for k, _ in base.reads) == [key(0, 0), key(0, 1), key(1, 0), key(1, 1)]
    assert base.rounds == 1
