"""The consolidated index: what it saves in requests, and that it is never believed when stale.

Counted as in `test_read_requests`. Cold, an array of any number of shards costs one request
for all indexes; after that each chunk is one request, whose reply tells by its ETag that the
recorded index holds.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

from tests.performance.test_read_requests import (
    ALL,
    CHUNKS_PER_SHARD,
    GRID,
    HOLD_S,
    MISSING,
    N_SHARDS,
    REGION,
    WITH_HOLES,
    chunk_key,
    get,
    make_objects,
    n_spans,
    read_document,
    requests_of,
    shard_key,
    value_of,
    values,
)
from tests.support.counting_server import BUCKET, CountingServer, counting_server
from tests.support.kit import forget
from zarr_shardstore import ShardingMapping, ShardingStore, set_index_cache_nbytes, shard_store
from zarr_shardstore.errors import ReadOnlyError, SpecError, UnsupportedError

obstore = pytest.importorskip("obstore")

COLLECTION = "z/__shards.index"
THE_COLLECTION = {f"GET {COLLECTION}": 1}

Client = Callable[..., ShardingStore]


def s3_store(server: CountingServer) -> Any:
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        endpoint=server.endpoint,
        skip_signature=True,
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )


def http_store(server: CountingServer) -> Any:
    from obstore.store import HTTPStore

    return HTTPStore(server.url, client_options={"allow_http": True})


@pytest.fixture(params=[s3_store, http_store])
def client(request: pytest.FixtureRequest) -> Client:
    """Opens a store that knows nothing yet, in a process that knows nothing yet."""

    def client_of(server: CountingServer, **options: Any) -> ShardingStore:
        forget()
        return ShardingStore(ObjectStore(request.param(server), read_only=True), **options)

    return client_of


def consolidate(server: CountingServer, path: str = "") -> None:
    store = ShardingMapping(ObjectStore(s3_store(server)))
    assert store.consolidate_index(path) == ["z"]
    forget()
    server.forget()


@pytest.fixture(params=[False, True], ids=["all", "with holes"])
def server(request: pytest.FixtureRequest) -> Iterator[CountingServer]:
    coords = WITH_HOLES if request.param else ()
    with counting_server(make_objects(coords=coords)) as running:
        consolidate(running)
        yield running


def expected(server: CountingServer, at: tuple[int, int]) -> bytes | None:
    has_holes = shard_key(MISSING[1]) not in server.objects
    return value_of(at) if not has_holes or at in WITH_HOLES else None


# --------------------------------------------------------------- how many requests


async def test_cold_reads_of_all_shards_need_one_request_for_indexes(
    server: CountingServer, client: Client
) -> None:
    """The first chunk: the collection and the chunk. Each other one, of any shard: the chunk."""
    store = client(server)
    coords = [ALL[(i * 37) % len(ALL)] for i in range(40)]
    coords = [at for at in coords if expected(server, at) is not None]
    assert await get(store, coords[0]) == value_of(coords[0])
    assert requests_of(server) == {"document": 1, "data": 1} | THE_COLLECTION
    stats = store.stats()
    assert (stats.requests, stats.index_requests, stats.index_hits) == (3, 1, 1)
    nbytes = sum(len(server.objects[key]) for key in ("z/zarr.json", COLLECTION))
    assert stats.nbytes_read == nbytes + len(value_of(coords[0]))
    for at in coords[1:]:
        assert await get(store, at) == value_of(at)
        assert requests_of(server) == {"data": 1}


async def test_a_missing_chunk_is_seen_to_be_missing(client: Client) -> None:
    """By a fresh look at its index; a missing shard is not in the collection."""
    with counting_server(make_objects(coords=WITH_HOLES)) as server:
        consolidate(server)
        store = client(server)
        assert await get(store, MISSING[0]) is None
        assert requests_of(server) == {"document": 1, "index": 1} | THE_COLLECTION
        assert await get(store, MISSING[1]) is None
        assert requests_of(server) == {"index": 1}


async def test_a_region_is_two_rounds(client: Client) -> None:
    """Of the collection, and of the spans of all shards."""
    with counting_server(make_objects(order="C")) as server:
        consolidate(server)
        store = client(server)
        await read_document(store)
        server.forget()
        n = n_spans(server.objects, REGION, 4096)
        server.rounds.extend([1, n])
        assert await values(store, REGION) == [value_of(at) for at in REGION]
        assert not server.rounds
        assert requests_of(server) == {"data": n} | THE_COLLECTION


@pytest.mark.parametrize("has_collection", [True, False])
async def test_a_listing_is_the_list_and_one_request(has_collection: bool) -> None:
    """Because the list tells the versions. Once known, an index is not asked for at all."""
    with counting_server(make_objects()) as server:
        if has_collection:
            consolidate(server)
        forget()
        store = ShardingStore(ObjectStore(s3_store(server), read_only=True))
        await read_document(store)
        server.forget()
        expected = {chunk_key(at) for at in ALL} | {"z/zarr.json"}
        assert {key async for key in store.list_prefix("z/")} == expected
        counts = requests_of(server)
        (listing,) = [kind for kind in counts if "list-type" in kind]
        cold = THE_COLLECTION if has_collection else {"index": N_SHARDS}
        assert counts == {listing: 1} | cold
        assert {key async for key in store.list_prefix("z/")} == expected
        assert requests_of(server) == {listing: 1}


async def test_chunks_initialized_is_the_list_and_one_request() -> None:
    """Of the directory of the shards, if the region has one."""
    with counting_server(make_objects(coords=WITH_HOLES)) as server:
        consolidate(server)
        store = ShardingStore(ObjectStore(s3_store(server), read_only=True))
        await read_document(store)
        server.forget()
        found = await store.chunks_initialized("z")
        assert {tuple(at) for at in np.argwhere(found).tolist()} == set(WITH_HOLES)
        assert sorted(requests_of(server).values()) == [1, 1]
        region = slice(5, 7), slice(10, 20)
        found = await store.chunks_initialized("z", region)
        np.testing.assert_array_equal(found, np.full((2, 10), True))
        (kind,) = requests_of(server)
        assert "prefix=z%2Fc%2F1%2F" in kind


@pytest.mark.thorough(of=2)
async def test_64_tasks_read_one_collection(client: Client) -> None:
    """All that want an index meanwhile wait for it."""
    import asyncio

    with counting_server(make_objects()) as server:
        consolidate(server)
        server.hold_s = HOLD_S
        store = client(server)
        await read_document(store)
        server.forget()
        some = ALL[::6]
        found = await asyncio.gather(*(get(store, at) for at in some))
        assert found == [value_of(at) for at in some]
        assert requests_of(server)[f"GET {COLLECTION}"] == 1


# -------------------------------------------------------------------------- staleness

NEW = {
    "another order": make_objects("new", order="F"),
    "another size": make_objects("new", nbytes=30),
    "the same places": make_objects("new"),
}


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("change", list(NEW))
async def test_a_shard_that_was_rewritten_is_read_by_its_own_index(
    client: Client, change: str, is_static: bool
) -> None:
    """Wherever its chunks are now; the collection still serves the others."""
    objects, new = make_objects(), NEW[change]
    changed = shard_key((5, 3))
    if change != "another size":
        assert len(new[changed]) == len(objects[changed])
    with counting_server(objects) as server:
        consolidate(server)
        server.objects = {**server.objects, changed: new[changed]}
        store = client(server, static=is_static)
        nbytes = 30 if change == "another size" else 50
        for at in ALL[::7]:
            is_new = shard_key(at) == changed
            wanted = value_of(at, "new", nbytes) if is_new else value_of(at)
            assert await get(store, at) == wanted
        counts = requests_of(server)
        assert counts[f"GET {COLLECTION}"] == 1
        assert counts["index"] == 1


async def test_a_shard_that_was_erased_is_missing(client: Client) -> None:
    """And one that is written after that is found."""
    with counting_server(make_objects()) as server:
        consolidate(server)
        key, shard = shard_key((5, 3)), make_objects("new")[shard_key((5, 3))]
        server.objects = {k: v for k, v in server.objects.items() if k != key}
        store = client(server)
        assert await get(store, (5, 3)) is None
        assert await get(store, (0, 0)) == value_of((0, 0))
        server.objects = {**server.objects, key: shard}
        assert await get(store, (5, 3)) == value_of((5, 3), "new")


@pytest.mark.parametrize("at", MISSING)
async def test_a_chunk_that_was_added_is_found(client: Client, at: tuple[int, int]) -> None:
    """In a shard of the collection, or in a new one."""
    with counting_server(make_objects(coords=WITH_HOLES)) as server:
        consolidate(server)
        collected = server.objects
        server.objects = {**collected, shard_key(at): make_objects()[shard_key(at)]}
        store = client(server)
        assert await get(store, at) == value_of(at)
        assert await get(store, (0, 0)) == value_of((0, 0))
        s3 = ShardingStore(ObjectStore(s3_store(server), read_only=True))
        forget()
        listed = {key async for key in s3.list_prefix("z/c/")}
        now = {*WITH_HOLES, *(a for a in ALL if shard_key(a) == shard_key(at))}
        assert listed == {chunk_key(a) for a in now}
        found = await s3.chunks_initialized("z")
        assert {tuple(a) for a in np.argwhere(found).tolist()} == now


async def test_a_chunk_that_was_erased_is_not_listed(client: Client) -> None:
    """Nor read."""
    with counting_server(make_objects()) as server:
        consolidate(server)
        holey = make_objects(coords=WITH_HOLES)
        server.objects = {**server.objects, shard_key(MISSING[0]): holey[shard_key(MISSING[0])]}
        assert await get(client(server), MISSING[0]) is None
        forget()
        s3 = ShardingStore(ObjectStore(s3_store(server), read_only=True))
        assert chunk_key(MISSING[0]) not in {key async for key in s3.list_prefix("z/c/")}


@pytest.mark.parametrize(
    "damage", ["gone", "forbidden", "cut off", "zeros", "not for us", "too large"]
)
async def test_a_collection_that_is_of_no_use_is_asked_for_once(
    client: Client,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Then indexes are read one by one, as without it."""
    with counting_server(make_objects()) as server:
        consolidate(server)
        objects = dict(server.objects)
        match damage:
            case "gone":
                del objects[COLLECTION]
            case "forbidden":
                monkeypatch.setattr(obstore, "get_async", forbid(COLLECTION))
            case "cut off":
                objects[COLLECTION] = objects[COLLECTION][:-1]
            case "zeros":
                objects[COLLECTION] = bytes(100)
            case "not for us":
                doc = json.loads(objects["z/zarr.json"])
                doc["codecs"][0]["configuration"]["index_codecs"].pop()
                with_shards = {
                    key: value[:-4] for key, value in objects.items() if key.startswith("z/c/")
                }
                objects |= with_shards | {"z/zarr.json": json.dumps(doc).encode()}
            case "too large":
                set_index_cache_nbytes(len(objects[COLLECTION]) - 1)
                request.addfinalizer(lambda: set_index_cache_nbytes(64 << 20))
        server.objects = objects
        store = client(server)
        for at in ALL[::17]:
            assert await get(store, at) == value_of(at)
        assert requests_of(server)[f"GET {COLLECTION}"] == (damage != "forbidden")


def forbid(forbidden: str) -> Any:
    """obstore's function that reads, with one key that is refused."""
    get_async = obstore.get_async

    async def run(store: Any, key: str, *args: Any, **options: Any) -> Any:
        if key == forbidden:
            raise PermissionError("AccessDenied")
        return await get_async(store, key, *args, **options)

    return run


async def test_weak_or_no_etags_are_never_enough(client: Client) -> None:
    """A server that sends none: the collection is read, and not used."""
    with counting_server(make_objects()) as server:
        consolidate(server)
        server.sends_etags = False
        store = client(server)
        assert await get(store, (5, 3)) == value_of((5, 3))
        server.objects = {**server.objects, **NEW["another order"], "z/zarr.json": b""}
        assert await get(store, (5, 3)) == value_of((5, 3), "new")


async def test_changes_by_this_process_are_seen() -> None:
    """Through the same store that consolidated, and through others."""
    from obstore.store import MemoryStore as Objects

    objects = Objects()
    store = ShardingStore(ObjectStore(objects), chunks_per_shard=CHUNKS_PER_SHARD)
    z = zarr.create_array(store, name="z", shape=(12, 32), chunks=(1, 1), dtype="u2")
    data = np.arange(1, 12 * 32 + 1, dtype="u2").reshape(12, 32)
    z[:] = data
    assert await store.consolidate_index("z") == ["z"]
    for i in range(6):
        forget()
        z[i * 2, 3 * i : 3 * i + 4] = data[i * 2, 3 * i : 3 * i + 4] = 1000 + i
        other = ShardingStore(ObjectStore(objects))
        np.testing.assert_array_equal(zarr.open_array(other, path="z", mode="r")[:], data)
        np.testing.assert_array_equal(z[:], data)
        if i == 3:
            await other.consolidate_index()
    z[:4, :16] = data[:4, :16] = 0  # erases a shard
    np.testing.assert_array_equal(zarr.open_array(other, path="z", mode="r")[:], data)
    assert (await other.chunks_initialized("z")).sum() == 12 * 32 - 64


# ------------------------------------------------------- documents, listings, erasures


def objects_with_array(**options: Any) -> tuple[Any, ShardingStore, Any]:
    from obstore.store import MemoryStore as Objects

    objects = Objects()
    store = ShardingStore(ObjectStore(objects), chunks_per_shard=(2, 2))
    zarr.create_group(store, zarr_format=options.get("zarr_format", 3))
    z = zarr.create_array(store, name="z", shape=(8, 8), chunks=(2, 2), dtype="u1", **options)
    z[:] = np.arange(64).reshape(8, 8) + 1
    assert ShardingMapping(store).consolidate_index("z") == ["z"]
    return objects, store, z


def stored(objects: Any, key: str) -> Any:
    import obstore

    return json.loads(bytes(obstore.get(objects, key).bytes()))


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize(("zarr_format", "name"), [(3, "zarr.json"), (2, ".zarray")])
async def test_updates_of_metadata_keep_the_word(zarr_format: Any, name: str) -> None:
    """A user sees nothing of it; attributes, resizes and consolidated metadata keep it."""
    objects, store, z = objects_with_array(zarr_format=zarr_format)
    member = {"zarr_shardstore_index": {"must_understand": False}}
    document = f"z/{name}"

    def check() -> None:
        assert stored(objects, document).items() >= member.items()
        assert b"_index" not in ShardingMapping(store)[document]

    check()
    z.attrs["a"] = 1
    check()
    z.resize((10, 8))
    check()
    zarr.consolidate_metadata(store, zarr_format=zarr_format)
    check()
    group = ".zmetadata" if zarr_format == 2 else "zarr.json"
    assert "_index" in json.dumps(stored(objects, group))
    assert b"_index" not in ShardingMapping(store)[group]
    other = ShardingStore(ObjectStore(objects))
    values: Any = zarr.open_group(other, mode="r", zarr_format=zarr_format)["z"]
    np.testing.assert_array_equal(values[:8], np.arange(64).reshape(8, 8) + 1)
    zarr.create_array(
        store, name="z", shape=(8, 8), chunks=(4, 4), dtype="u1", overwrite=True,
        zarr_format=zarr_format,
    )  # fmt: skip
    assert "zarr_shardstore_index" not in stored(objects, document)


def keys_of(objects: Any) -> set[str]:
    import obstore

    return {meta["path"] for page in obstore.list(objects) for meta in page}


async def test_it_is_no_key_of_the_view() -> None:
    """It can be read and erased by name, and goes with its array."""
    objects, store, _ = objects_with_array()
    mapping = ShardingMapping(store)
    assert COLLECTION in keys_of(objects)
    assert COLLECTION not in mapping.list()
    assert "__shards.index" not in {name async for name in store.list_dir("z")}
    assert bytes(mapping[COLLECTION]).startswith(b"ZSHIDX")
    await store.delete_dir("z/c/0")
    assert COLLECTION in keys_of(objects)
    await store.delete_dir("z")
    assert not [key for key in keys_of(objects) if key.startswith("z/")]


def test_it_is_hidden_on_every_base_store(tmp_path: Path) -> None:
    """Also where it was copied to."""
    bases: list[Any] = [
        {},
        MemoryStore(),
        tmp_path / "files",
        FsspecStore.from_url("memory://consolidated", storage_options={}),
    ]
    for base in bases:
        mapping = ShardingMapping(base)
        mapping["z/a"] = b"1"
        mapping["z/__shards.index"] = mapping["y/__shards.index"] = b"2"
        assert mapping.list() == ["z/a"]
        assert list(mapping.list_dir("z/")[0]) == ["z/a"]
        if not isinstance(base, FsspecStore | MemoryStore):
            assert mapping.list_dir("")[1] == ["z/"]
        mapping.erase_prefix("z/")
        assert "z/__shards.index" not in mapping
        mapping.erase_prefix("")
        assert "y/__shards.index" not in mapping


def test_draft_arrays_and_stacks() -> None:
    """Below `data/root`; with transformers above the shards, too, not with those below."""
    from obstore.store import MemoryStore as Objects

    for stack, is_possible in [
        (["crc32c", "sharding"], True),
        (["sharding", "crc32c"], False),
    ]:
        objects = Objects()
        store = ShardingStore(ObjectStore(objects), chunks_per_shard=2, storage_transformers=stack)
        z = zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="u1")
        z[:6] = np.arange(1, 7)
        mapping = ShardingMapping(store)
        assert mapping.chunks_initialized("z").tolist() == [True] * 6 + [False] * 2
        assert mapping.consolidate_index() == (["z"] if is_possible else [])
        other = ShardingStore(ObjectStore(objects))
        forget()
        assert ShardingMapping(other).chunks_initialized("z").tolist() == [True] * 6 + [False] * 2
        opened: Any = zarr.open_array(other, path="z", mode="r")
        assert opened[:].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    mapping = ShardingMapping(ObjectStore(Objects()), chunks_per_shard=2)
    mapping["data/root/a/c0"] = b"1"
    assert mapping.consolidate_index() == []  # no document to say so in
    with pytest.raises(SpecError, match="no sharded array"):
        mapping.consolidate_index("a")


# ------------------------------------------------------------------- base stores


@pytest.mark.parametrize("base", [{}, MemoryStore()])
def test_without_versions_it_is_refused(base: Any) -> None:
    """With what to do."""
    store = ShardingMapping(base, chunks_per_shard=2)
    with pytest.raises(UnsupportedError, match="through obstore"):
        store.consolidate_index()
    with pytest.raises(ReadOnlyError):
        ShardingMapping({}, read_only=True).consolidate_index()


def write_directory(path: Path) -> None:
    for key, value in make_objects().items():
        file = path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)
        os.utime(file, (1_700_000_000, 1_700_000_000))


async def read_all(store: ShardingStore, new: str = "", text: str = "") -> None:
    for at in ALL[::7]:
        assert await get(store, at) == value_of(at, text if shard_key(at) == new else "")


async def test_a_directory_that_is_served_later(tmp_path: Path, client: Client) -> None:
    """Shards are known by size and time; one that was changed since is read by its own index."""
    write_directory(tmp_path / "a")
    local = ShardingStore(tmp_path / "a")
    assert await local.consolidate_index() == ["z"]
    with counting_server(tmp_path / "a") as server:
        await read_all(client(server))
        assert requests_of(server) == {"document": 1, "data": len(ALL[::7])} | THE_COLLECTION
        changed = shard_key((5, 3))
        (tmp_path / "a" / changed).write_bytes(NEW["another order"][changed])
        os.utime(tmp_path / "a" / changed, (time.time() - 60,) * 2)
        await read_all(client(server), changed, "new")
        counts = requests_of(server)
        assert (counts["index"], counts[f"GET {COLLECTION}"]) == (1, 1)
    await read_all(ShardingStore(tmp_path / "a"), changed, "new")


async def test_a_copy_with_other_times_is_read_without_it(tmp_path: Path, client: Client) -> None:
    """No index of it would hold: the collection tells by its own time."""
    write_directory(tmp_path / "a")
    ShardingMapping(tmp_path / "a").consolidate_index()
    for file in (tmp_path / "a").rglob("*"):
        os.utime(file, (1_700_000_123, 1_700_000_123))
    with counting_server(tmp_path / "a") as server:
        await read_all(client(server))
        counts = requests_of(server)
        assert (counts["index"], counts["data"]) == (N_SHARDS, len(ALL[::7]))


@pytest.mark.thorough(of=2)
async def test_files_that_have_just_changed_are_waited_for(tmp_path: Path, client: Client) -> None:
    """So that what a conversion has written is in the collection, with all its shards."""
    base = tmp_path / "plain"
    z = zarr.create_array(LocalStore(base), name="z", shape=(12, 32), chunks=(1, 1), dtype="u1")
    z[:] = 7
    begun = time.monotonic()
    shard_store(base, tmp_path / "packed", chunks_per_shard=(4, 16), consolidate_index=True)
    assert time.monotonic() - begun > 2
    with counting_server(tmp_path / "packed") as server:
        opened: Any = zarr.open_array(client(server), path="z", mode="r")
        assert (opened[:] == 7).all()
        assert requests_of(server)["index"] == 0
        assert COLLECTION in server.objects
    shutil.rmtree(tmp_path / "plain")
    # A copy has other shards, and no word of a collection; and is done already.
    for _ in range(2):
        shard_store(tmp_path / "packed", tmp_path / "again", chunks_per_shard=(4, 16))
    assert not (tmp_path / "again" / COLLECTION).exists()
    assert b'_index"' not in (tmp_path / "again/z/zarr.json").read_bytes()
    assert shard_store(tmp_path / "packed", chunks_per_shard=(2, 2)).n_objects == 6 * 16
    assert not (tmp_path / "packed" / COLLECTION).exists()
    assert b'_index"' not in (tmp_path / "packed/z/zarr.json").read_bytes()


@pytest.mark.parametrize("reader", ["zarr", "tensorstore", "zarrs"])
def test_native_readers_open_it(tmp_path: Path, reader: str) -> None:
    """The member is one that they must ignore."""
    write_directory(tmp_path)
    ShardingMapping(tmp_path).consolidate_index()
    assert "zarr_shardstore_index" in (tmp_path / "z/zarr.json").read_text()
    wanted = np.array(
        [np.concatenate([np.frombuffer(value_of((i, j)), "u1") for j in range(GRID[1])])
         for i in range(GRID[0])]
    )  # fmt: skip
    if reader == "tensorstore":
        ts = pytest.importorskip("tensorstore")
        kvstore = {"driver": "file", "path": str(tmp_path / "z")}
        found = ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
    else:
        path = "zarr.core.codec_pipeline.BatchedCodecPipeline"
        if reader == "zarrs":
            pytest.importorskip("zarrs")
            path = "zarrs.ZarrsCodecPipeline"
        with zarr.config.set({"codec_pipeline.path": path}):
            z: Any = zarr.open_array(LocalStore(tmp_path), path="z", mode="r")
            found = z[:]
    np.testing.assert_array_equal(found, wanted)


# -------------------------------------------------------------------- chunks_initialized


@pytest.mark.parametrize("is_object_store", [True, False])
def test_chunks_initialized_of_regions(is_object_store: bool) -> None:
    """As of the whole array, cut as Python cuts; batches are seen."""
    from obstore.store import MemoryStore as Objects

    base: Any = ObjectStore(Objects()) if is_object_store else {}
    mapping = ShardingMapping(base, chunks_per_shard=(3, 2, 1))
    store = ShardingStore(base, chunks_per_shard=(3, 2, 1))
    zarr.create_array(store, name="a", shape=(7, 5, 3), chunks=(1, 1, 1), dtype="u1")
    scalar = ShardingStore(base, chunks_per_shard=())
    zarr.create_array(scalar, name="s", shape=(), chunks=(), dtype="u1")
    random = np.random.default_rng(0)
    wanted = random.random((7, 5, 3)) < 0.3
    for at in np.argwhere(wanted).tolist():
        mapping["a/c/" + "/".join(map(str, at))] = b"x"
    regions: list[Any] = [
        None,
        (),
        (slice(2, 4),),
        (slice(None), slice(1, 2), slice(-1, None)),
        (slice(6, 100), slice(3, 1), slice(None)),
        (slice(4, 5), slice(2, 5), slice(1, 3)),
    ]
    for region in regions:
        found = mapping.chunks_initialized("a", region)
        np.testing.assert_array_equal(found, wanted[region or ()])
        assert found.dtype == bool
    assert not mapping.chunks_initialized("s")
    mapping["s/c"] = b"x"
    assert mapping.chunks_initialized("s").shape == ()
    assert mapping.chunks_initialized("s")
    with mapping.batch():
        mapping["a/c/6/4/2"] = b"x"
        assert mapping.chunks_initialized("a")[6, 4, 2]
    refused: list[tuple[str, Any, str]] = [
        ("b", None, "no array"),
        ("a", (slice(0, 1),) * 4, "3 dims"),
        ("a", (slice(None, None, 2),), "no steps"),
        ("a", (1,), "3 dims"),
    ]
    for path, region, says in refused:
        with pytest.raises(SpecError, match=says):
            mapping.chunks_initialized(path, region)
    zarr.create_array(ShardingStore(base), name="p", shape=(2,), chunks=(1,), dtype="u1")
    with pytest.raises(SpecError, match="not sharded"):
        mapping.chunks_initialized("p")


def test_a_grid_that_is_too_large_is_refused() -> None:
    """Before memory is asked for."""
    mapping = ShardingMapping({}, chunks_per_shard=(2, 2))
    zarr.create_array(
        ShardingStore(mapping.base, chunks_per_shard=(2, 2)),
        name="z",
        shape=(2**31, 2**31),
        chunks=(1, 1),
        dtype="u1",
    )
    with pytest.raises(SpecError, match="at most"):
        mapping.chunks_initialized("z")
    assert not mapping.chunks_initialized("z", (slice(5), slice(2**30, 2**30 + 3))).any()
