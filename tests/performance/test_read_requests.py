"""What reads cost in requests of an object store, and that what is kept of it is never stale.

The requests are those of obstore, counted by a server: documents of metadata, indexes and bytes
of chunks apart. One chunk: two requests at first, one after that, whose reply tells by its ETag
that the index still holds. A region of m shards: two rounds, m indexes and the coalesced spans;
or one, if the shards are small, or most of them is wanted.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import ObjectStore

from tests.support.counting_server import BUCKET, CountingServer, counting_server, resolve
from tests.support.pipeline_arrays import OURS
from zarr_shardstore import ShardingMapping, ShardingStore

pytest.importorskip("obstore")

PROTOTYPE = default_buffer_prototype()
PIPELINES = [
    f"zarr.core.codec_pipeline.{name}"
    for name in ("BatchedCodecPipeline", "FusedCodecPipeline")
    if hasattr(zarr.core.codec_pipeline, name)  # zarr 3.1 has no fused one
]

GRID, CHUNKS_PER_SHARD, NBYTES = (12, 32), (4, 16), 50
N_SHARDS = 6
INDEX_NBYTES = 4 * 16 * 16 + 4
LARGE = 16_384
"""Size of a chunk in shards so large that a part of them is not read by reading them whole."""

HOLD_S = 0.3
"""What is asked for at once comes within this time; a longer one only makes tests slower."""

Coords = tuple[int, int]
ALL = [(i, j) for i in range(GRID[0]) for j in range(GRID[1])]
FIRST_SHARD = [(i, j) for i in range(4) for j in range(16)]
REGION = [(i, j) for i in range(2, 10) for j in range(13, 20)]
"""Of chunks in all shards."""


def chunk_key(at: Coords) -> str:
    return f"z/c/{at[0]}/{at[1]}"


def shard_key(at: Coords) -> str:
    return f"z/c/{at[0] // CHUNKS_PER_SHARD[0]}/{at[1] // CHUNKS_PER_SHARD[1]}"


MISSING = [(1, 2), (11, 31)]
WITH_HOLES = tuple(at for at in ALL if at != MISSING[0] and shard_key(at) != shard_key(MISSING[1]))
"""One chunk is missing, and one shard."""


def value_of(at: Coords, text: str = "", nbytes: int = NBYTES) -> bytes:
    return hashlib.shake_128(f"{text}{at}".encode()).digest(nbytes)


@cache
def make_objects(
    text: str = "",
    *,
    coords: tuple[Coords, ...] = (),
    order: Any = "morton",
    nbytes: int = NBYTES,
    decoded_nbytes: int = NBYTES,
) -> dict[str, bytes]:
    """An array with these chunks (all), the others missing, as it is stored. Not to be changed.

    What is stored of a chunk has `nbytes`; by its metadata it has `decoded_nbytes`.

    To be called before a store reads: it makes an array of the same name in this process.
    """
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD, order=order)
    zarr.create_array(
        store,
        name="z",
        shape=(GRID[0], GRID[1] * decoded_nbytes),
        chunks=(1, decoded_nbytes),
        dtype="u1",
        compressors=None,
        fill_value=0,
    )
    values = [(chunk_key(at), 0, value_of(at, text, nbytes)) for at in coords or ALL]
    ShardingMapping(store).set_partial_values(values)
    return base


@pytest.fixture
def server() -> Iterator[CountingServer]:
    with counting_server(make_objects()) as running:
        yield running


@pytest.fixture(params=["S3Store", "HTTPStore"])
def client(request: pytest.FixtureRequest) -> Callable[..., ShardingStore]:
    """Opens a store that knows nothing yet, with options of `ShardingStore`."""
    from obstore.store import HTTPStore, S3Store

    def client_of(server: CountingServer, **options: Any) -> ShardingStore:
        http: Any = {"allow_http": True}
        objects: Any
        if request.param == "S3Store":
            objects = S3Store(
                BUCKET,
                endpoint=server.endpoint,
                skip_signature=True,
                client_options=http,
                virtual_hosted_style_request=False,
            )
        else:
            objects = HTTPStore(server.url, client_options=http)
        return ShardingStore(ObjectStore(objects, read_only=True), **options)

    return client_of


Client = Callable[..., ShardingStore]


def requests_of(server: CountingServer) -> Counter[str]:
    """How many of each kind; also forgets them.

    ``index``: whatever has a part of the index in it, so also whole shards.
    """
    counts: Counter[str] = Counter()
    for asked in server.asked:
        if asked.key.endswith("zarr.json"):
            counts["document"] += 1
        elif asked.method != "GET" or not asked.key.startswith("z/c/"):
            counts[f"{asked.method} {asked.key}"] += 1
        else:
            nbytes = len(server.objects.get(asked.key, b""))
            bounds = resolve(asked.byte_range or "0-", nbytes)
            is_index = bounds is None or bounds[1] > nbytes - INDEX_NBYTES
            counts["index" if is_index else "data"] += 1
    print(server.asked)  # seen if the test fails
    server.forget()
    return counts


def n_spans(objects: Any, coords: Sequence[Coords], max_gap_bytes: int) -> int:
    """Spans that cover these chunks, from the indexes as they are stored."""
    n = 0
    for key in {shard_key(at) for at in coords}:
        index = objects[key][-INDEX_NBYTES:]
        ids = [16 * (i % 4) + j % 16 for i, j in coords if shard_key((i, j)) == key]
        entries = sorted(struct.unpack_from("<QQ", index, 16 * id_) for id_ in ids)
        ends = [offset + nbytes for offset, nbytes in entries]
        n += 1 + sum(
            offset - end > max_gap_bytes
            for (offset, _), end in zip(entries[1:], ends[:-1], strict=True)
        )
    return n


async def values(store: ShardingStore, coords: Sequence[Coords]) -> list[bytes | None]:
    ranges = [(chunk_key(at), None) for at in coords]
    return [_bytes(value) for value in await store.get_partial_values(PROTOTYPE, ranges)]


def _bytes(value: Buffer | None) -> bytes | None:
    return None if value is None else value.to_bytes()


async def get(store: ShardingStore, at: Coords) -> bytes | None:
    return _bytes(await store.get(chunk_key(at), PROTOTYPE))


async def get_blocking(store: ShardingStore, at: Coords) -> bytes | None:
    return _bytes(store.get_sync(chunk_key(at), prototype=PROTOTYPE))


async def get_of_many(store: ShardingStore, at: Coords) -> bytes | None:
    return (await values(store, [at]))[0]


Get = Callable[[ShardingStore, Coords], Awaitable[bytes | None]]


@pytest.fixture(params=[get, get_blocking, get_of_many])
def read(request: pytest.FixtureRequest) -> Get:
    result: Get = request.param
    return result


async def read_document(store: ShardingStore) -> None:
    """Of the array, and nothing else."""
    assert not await store.exists(chunk_key((GRID[0], 0)))  # outside of its grid


# --------------------------------------------------------------- how many requests


async def test_one_chunk_is_two_requests_and_then_one(
    server: CountingServer, client: Client, read: Get
) -> None:
    """Cold: the index and the chunk. Warm: the chunk, also if it is another one of the shard."""
    store = client(server)
    assert await read(store, (0, 3)) == value_of((0, 3))
    assert requests_of(server) == {"document": 1, "index": 1, "data": 1}
    for at in [(0, 3), (0, 3), (3, 15), (2, 0)]:
        assert await read(store, at) == value_of(at)
        assert requests_of(server) == {"data": 1}


async def test_a_range_of_a_chunk_costs_the_same(server: CountingServer, client: Client) -> None:
    """And no byte more than the range."""
    store = client(server)
    whole = value_of((1, 1))
    for n_index, (start, stop) in zip((1, 0, 0), [(3, 5), (0, 50), (49, 50)], strict=True):
        byte_range = RangeByteRequest(start, stop)
        value = await store.get(chunk_key((1, 1)), PROTOTYPE, byte_range)
        assert _bytes(value) == whole[start:stop]
        asked = [a for a in server.asked if a.key == shard_key((1, 1))]
        first, last = (asked[-1].byte_range or "").split("-")
        assert int(last) + 1 - int(first) == stop - start
        counts = requests_of(server)
        assert (counts["index"], counts["data"]) == (n_index, 1)


async def test_an_index_is_never_read_twice(
    server: CountingServer, client: Client, read: Get
) -> None:
    """However many chunks of its shard are read, one after the other."""
    store = client(server)
    coords = [ALL[(i * 37) % len(ALL)] for i in range(40)]
    assert len({shard_key(at) for at in coords}) == N_SHARDS
    for at in coords:
        assert await read(store, at) == value_of(at)
    assert requests_of(server) == {"document": 1, "index": N_SHARDS, "data": len(coords)}


@pytest.mark.parametrize("max_gap_bytes", [0, NBYTES, None])
async def test_a_region_is_two_rounds_and_then_one(client: Client, max_gap_bytes: int) -> None:
    """Of as many index requests as there are shards, and the coalesced spans."""
    objects = make_objects(order="C", decoded_nbytes=LARGE)
    with counting_server(objects) as server:
        store = client(server, max_gap_bytes=max_gap_bytes)
        await read_document(store)
        server.forget()
        n = n_spans(server.objects, REGION, 4096 if max_gap_bytes is None else max_gap_bytes)
        for rounds in [(N_SHARDS, n), (n,)]:
            server.rounds.extend(rounds)
            assert await values(store, REGION) == [value_of(at) for at in REGION]
            assert not server.rounds
            assert requests_of(server) == Counter(index=sum(rounds) - n, data=n)


def test_the_arithmetic_of_spans() -> None:
    """In C order each row of chunks of a shard is one piece; a gap of 4 KiB spans a shard."""
    objects = make_objects(order="C")
    assert n_spans(objects, REGION, 0) == 8 * 2
    assert n_spans(objects, REGION, 4096) == N_SHARDS
    assert n_spans(objects, [(0, 0), (0, 2)], NBYTES - 1) == 2
    assert n_spans(objects, [(0, 0), (0, 2)], NBYTES) == 1
    assert len([key for key in objects if key.startswith("z/c/")]) == N_SHARDS


@pytest.mark.parametrize(
    ("decoded_nbytes", "coords"),
    [(NBYTES, REGION), (NBYTES, FIRST_SHARD[:4]), (LARGE, FIRST_SHARD[:33]), (LARGE, ALL)],
)
async def test_small_shards_and_most_of_large_ones_are_one_round(
    client: Client, decoded_nbytes: int, coords: Sequence[Coords]
) -> None:
    """Of as many requests as there are shards, whose replies tell the indexes, too."""
    objects = make_objects(order="C", decoded_nbytes=decoded_nbytes)
    n_shards = len({shard_key(at) for at in coords})
    with counting_server(objects) as server:
        store = client(server)
        await read_document(store)
        before = store.stats()
        server.forget()
        server.rounds.append(n_shards)
        assert await values(store, coords) == [value_of(at) for at in coords]
        assert not server.rounds
        assert {asked.byte_range for asked in server.asked} == {None}
        assert requests_of(server) == {"index": n_shards}
        stats = store.stats()
        assert stats.index_requests == stats.requests - before.requests == n_shards
        keys = {shard_key(at) for at in coords}
        n_read = stats.nbytes_read - before.nbytes_read
        assert n_read == sum(len(server.objects[key]) for key in keys)
        assert await values(store, coords) == [value_of(at) for at in coords]
        assert requests_of(server) == {"data": n_spans(objects, coords, 4096)}


def region_of_array(width: int) -> tuple[slice, slice]:
    return slice(2, 10), slice(13 * width, 20 * width)


def values_of_array(width: int) -> Any:
    rows = [[value_of((i, j), nbytes=width) for j in range(13, 20)] for i in range(2, 10)]
    return np.array([np.frombuffer(b"".join(row), "u1") for row in rows])


@pytest.mark.parametrize("width", [NBYTES, LARGE])
def test_a_region_of_an_array_is_two_rounds(client: Client, width: int) -> None:
    """Through the pipeline that hands over whole operations; of small shards it is one."""
    objects = make_objects(nbytes=width, decoded_nbytes=width)
    n = n_spans(objects, REGION, 4096)
    with counting_server(objects) as server:
        with zarr.config.set({"codec_pipeline.path": OURS}):
            z: Any = zarr.open_array(client(server), path="z", mode="r")
        for n_indexes, n_others in [(N_SHARDS, n if width == LARGE else 0), (0, n)]:
            server.forget()
            server.rounds.extend(size for size in (n_indexes, n_others) if size)
            np.testing.assert_array_equal(z[region_of_array(width)], values_of_array(width))
            assert not server.rounds
            assert requests_of(server) == Counter({"index": n_indexes, "data": n_others})


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_region_of_an_array_reads_each_index_once(
    server: CountingServer, client: Client, pipeline: str
) -> None:
    """Also through zarr's own pipelines, that ask for chunk by chunk."""
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        z: Any = zarr.open_array(client(server), path="z", mode="r")
    for n_indexes in (N_SHARDS, 0):
        server.forget()
        np.testing.assert_array_equal(z[region_of_array(NBYTES)], values_of_array(NBYTES))
        counts = requests_of(server)
        assert set(counts) <= {"index", "data"}
        assert counts["index"] == n_indexes
        assert counts["data"] <= len(REGION)


async def all_at_once(store: ShardingStore) -> list[bytes | None]:
    return await asyncio.gather(*(get(store, at) for at in FIRST_SHARD))


async def in_different_turns(store: ShardingStore) -> list[bytes | None]:
    tasks = []
    for i, at in enumerate(FIRST_SHARD):
        tasks.append(asyncio.create_task(get(store, at)))
        for _ in range(1 + i % 3):
            await asyncio.sleep(0)
    return await asyncio.gather(*tasks)


async def while_the_index_is_on_its_way(store: ShardingStore) -> list[bytes | None]:
    tasks = []
    for at in FIRST_SHARD:
        tasks.append(asyncio.create_task(get(store, at)))
        await asyncio.sleep(HOLD_S / 400)
    return await asyncio.gather(*tasks)


WAYS = [all_at_once, in_different_turns, while_the_index_is_on_its_way]


@pytest.mark.thorough(of=6)
@pytest.mark.parametrize("start", WAYS)
async def test_64_tasks_read_one_index(client: Client, start: Any) -> None:
    """Chunks of one shard, each in a task of its own."""
    with counting_server(make_objects(), hold_s=HOLD_S) as server:
        store = client(server)
        await read_document(store)
        server.forget()
        for n_indexes in (1, 0):
            assert await start(store) == [value_of(at) for at in FIRST_SHARD]
            counts = requests_of(server)
            assert set(counts) <= {"index", "data"}
            assert counts["index"] == n_indexes
            assert counts["data"] <= 64


@pytest.mark.thorough(of=6)
@pytest.mark.parametrize("start", WAYS)
async def test_64_tasks_read_the_document_once(client: Client, start: Any) -> None:
    """Of an array that their store has not met."""
    with counting_server(make_objects(), hold_s=HOLD_S) as server:
        assert await start(client(server)) == [value_of(at) for at in FIRST_SHARD]
        assert requests_of(server)["document"] == 1


@pytest.mark.thorough(of=2)
async def test_a_task_that_is_cancelled_takes_no_other_with_it(client: Client) -> None:
    """The one that asked first for the index."""
    with counting_server(make_objects(), hold_s=HOLD_S) as server:
        store = client(server)
        await read_document(store)
        first = asyncio.create_task(get(store, (0, 0)))
        await asyncio.sleep(HOLD_S / 3)
        others = [asyncio.create_task(get(store, at)) for at in FIRST_SHARD[1:9]]
        await asyncio.sleep(HOLD_S / 3)
        first.cancel()
        assert await asyncio.gather(*others) == [value_of(at) for at in FIRST_SHARD[1:9]]
        assert await get(store, (0, 0)) == value_of((0, 0))


async def test_missing_chunks_cost_one_request(client: Client, read: Get) -> None:
    """That the index still says so must be seen; there is no chunk whose reply would tell."""
    with counting_server(make_objects(coords=WITH_HOLES)) as server:
        store = client(server)
        assert await read(store, (1, 3)) == value_of((1, 3))
        requests_of(server)
        for missing in MISSING:
            for _ in range(2):
                assert await read(store, missing) is None
                assert requests_of(server).total() == 1


# ------------------------------------------------------- nothing that is kept is stale

REPLACEMENTS: dict[str, dict[str, Any]] = {
    "other bytes, the same places": {},
    "other places, the same size": {"order": "F"},
    "shorter": {"nbytes": NBYTES // 2},
    "longer": {"nbytes": 2 * NBYTES},
    "fewer entries": {"coords": tuple(at for at in ALL if at[1] % 2)},
}


@pytest.mark.thorough(of=32)
@pytest.mark.parametrize("sends_etags", [True, False])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
async def test_a_shard_that_is_replaced(
    server: CountingServer, client: Client, read: Get, replacement: str, sends_etags: bool
) -> None:
    """Between two reads: each chunk is read as it is now."""
    server.sends_etags = sends_etags
    options = REPLACEMENTS[replacement]
    coords = options.get("coords", ALL)
    old, new = server.objects, make_objects("new", **options)
    for at in [(0, 0), (3, 15), (1, 7), (7, 16)]:
        server.objects = old
        store = client(server)
        for _ in range(2):
            assert await read(store, at) == value_of(at)
        key = shard_key(at)
        assert (len(new[key]) == len(old[key])) == ("same" in replacement)
        server.objects = {**old, key: new[key]}
        for _ in range(2):
            nbytes = options.get("nbytes", NBYTES)
            expected = value_of(at, "new", nbytes) if at in coords else None
            assert await read(store, at) == expected


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("replacement", REPLACEMENTS)
async def test_the_index_of_a_replaced_shard_is_read_once(
    server: CountingServer, client: Client, read: Get, replacement: str
) -> None:
    """A reply that fits no more, the new index, the chunk; then one request again."""
    new = make_objects("new", **REPLACEMENTS[replacement])
    store = client(server)
    await read(store, (0, 3))
    await read(store, (0, 3))
    server.objects = new
    requests_of(server)
    await read(store, (0, 3))
    assert server.asked[-1].status == 206
    counts = requests_of(server)
    assert counts.total() <= 3
    await read(store, (0, 3))
    await read(store, (1, 5))
    assert requests_of(server) == {"data": 2}


async def test_a_region_of_shards_some_of_which_are_replaced(
    server: CountingServer, client: Client
) -> None:
    """Only those are asked for their index again."""
    new = make_objects("new", order="F")
    store = client(server)
    assert await values(store, REGION) == [value_of(at) for at in REGION]
    replaced = {shard_key((2, 13)), shard_key((9, 19))}
    server.objects = {**server.objects, **{key: new[key] for key in replaced}}
    requests_of(server)
    assert await values(store, REGION) == [
        value_of(at, "new" if shard_key(at) in replaced else "") for at in REGION
    ]
    assert requests_of(server)["index"] == 2
    await values(store, REGION)
    assert requests_of(server)["index"] == 0


async def test_a_chunk_that_was_missing_is_written_by_others(client: Client, read: Get) -> None:
    """In a shard that was there, and with its shard."""
    with counting_server(make_objects(coords=WITH_HOLES)) as server:
        store = client(server)
        for missing in MISSING:
            assert await read(store, missing) is None
            assert await read(store, missing) is None
            assert not await store.exists(chunk_key(missing))
        assert await read(store, (1, 3)) == value_of((1, 3))
        server.objects = make_objects()
        for missing in MISSING:
            assert await store.exists(chunk_key(missing))
            assert await read(store, missing) == value_of(missing)
            assert await read(store, missing) == value_of(missing)


async def test_a_shard_that_is_deleted(server: CountingServer, client: Client, read: Get) -> None:
    """Its chunks are missing, those of others are not."""
    store = client(server)
    for at in [(0, 0), (0, 16)]:
        assert await read(store, at) == value_of(at)
    kept = server.objects
    server.objects = {key: v for key, v in kept.items() if key != shard_key((0, 0))}
    for at in [(0, 0), (3, 3)]:
        assert await read(store, at) is None
        assert not await store.exists(chunk_key(at))
    assert await read(store, (0, 16)) == value_of((0, 16))
    server.objects = kept
    assert await read(store, (0, 0)) == value_of((0, 0))


async def test_without_etags_nothing_is_kept(
    server: CountingServer, client: Client, read: Get
) -> None:
    """Each read asks for the index: no other reply would tell that it still holds."""
    server.sends_etags = False
    store = client(server)
    for _ in range(3):
        server.forget()
        assert await read(store, (0, 3)) == value_of((0, 3))
        counts = requests_of(server)
        assert (counts["index"], counts["data"]) == (1, 1)


async def test_what_others_have_read_is_not_shared_between_servers(
    server: CountingServer, client: Client
) -> None:
    """Two stores have the same keys, and even the same sizes."""
    with counting_server(make_objects("new", order="F")) as other:
        ours, theirs = client(server), client(other)
        for at in [(0, 1), (2, 2), (0, 1)]:
            assert await get(ours, at) == value_of(at)
            assert await get(theirs, at) == value_of(at, "new")


# ------------------------------------------------------------------------ the server


def test_the_server_serves_files(tmp_path: Path, client: Client) -> None:
    """Of a directory, but no other."""
    for key, value in make_objects().items():
        path = tmp_path / "served" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    (tmp_path / "secret").write_bytes(b"!")
    with counting_server(tmp_path / "served") as server:
        mapping = ShardingMapping(client(server))
        assert mapping[chunk_key((5, 6))] == value_of((5, 6))
        assert "../secret" not in server.objects
        assert "z" not in server.objects
        assert set(server.objects) == set(make_objects())


def test_the_server_answers_conditions_and_ranges(server: CountingServer) -> None:
    """As the standard says, and as obstore takes it."""
    import obstore
    from obstore.exceptions import GenericError, NotModifiedError, PreconditionError
    from obstore.store import HTTPStore

    objects = HTTPStore(server.url, client_options={"allow_http": True})
    key = shard_key((0, 0))
    value = server.objects[key]
    for byte_range, expected in [
        ((2, 5), value[2:5]),
        ({"offset": 7}, value[7:]),
        ({"suffix": 9}, value[-9:]),
        ((len(value) - 2, len(value) + 9), value[-2:]),
        ({"suffix": len(value) + 9}, value),
    ]:
        options: Any = {"range": byte_range}
        reply = obstore.get(objects, key, options=options)
        assert bytes(reply.bytes()) == expected
        assert reply.meta["size"] == len(value)
    with pytest.raises(GenericError, match="416"):
        obstore.get(objects, key, options={"range": (len(value), len(value) + 1)})
    etag = obstore.head(objects, key)["e_tag"]
    assert etag is not None
    assert bytes(obstore.get(objects, key, options={"if_match": etag}).bytes()) == value
    with pytest.raises(NotModifiedError):
        obstore.get(objects, key, options={"if_none_match": etag})
    server.objects = make_objects("new")
    with pytest.raises(PreconditionError):
        obstore.get(objects, key, options={"if_match": etag})
    assert [asked.status for asked in server.asked[-4:]] == [200, 200, 304, 412]
    assert server.asked[0] == ("GET", key, "2-4", 206)


def test_the_server_lists(server: CountingServer) -> None:
    """Keys, sizes and ETags, page by page; and directories."""
    import obstore
    from obstore.store import S3Store

    objects = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        skip_signature=True,
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )
    server.objects = {**server.objects, **{f"many/{i} & more": b"x" for i in range(2500)}}
    found = {meta["path"]: meta for page in obstore.list(objects) for meta in page}
    assert {key: meta["size"] for key, meta in found.items()} == {
        key: len(value) for key, value in server.objects.items()
    }
    key = shard_key((0, 0))
    assert found[key]["e_tag"] == obstore.head(objects, key)["e_tag"]
    assert [asked.status for asked in server.asked[:3]] == [200] * 3
    listed = obstore.list_with_delimiter(objects, "z")
    assert listed["common_prefixes"] == ["z/c"]
    assert [meta["path"] for meta in listed["objects"]] == ["z/zarr.json"]
