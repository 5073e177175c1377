"""Bad input gets a typed error that says what to do, and nothing is lost."""

from __future__ import annotations

import collections
import json
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, StorePath

import zarr_shardstore
from tests.support.async_calls import set_partial_values
from tests.support.bases import BASES, put
from tests.support.kit import objects_of
from tests.support.shard_bytes import MISSING, index_nbytes, index_of, places_in
from zarr_shardstore import (
    CorruptShardError,
    ReadOnlyError,
    ShardingMapping,
    ShardingStore,
    ShardStoreError,
    SpecError,
    UnsupportedError,
    get_shard_info,
)

PROTOTYPE = default_buffer_prototype()


def buffer(value: bytes) -> Any:
    return cpu.Buffer.from_bytes(value)


@pytest.fixture(params=list(BASES))
def base(request: pytest.FixtureRequest) -> Any:
    return BASES[request.param]()


@pytest.fixture
def store(base: Any) -> ShardingStore:
    """An array ``z`` of 4 x 4 chunks in 4 shards, all ones."""
    store = ShardingStore(base, chunks_per_shard=2)
    z = zarr.create_array(
        store, name="z", shape=(8, 8), chunks=(2, 2), dtype="u1", compressors=None
    )
    z[:] = 1
    return store


def edit_entry(shard: bytes, entry_id: int, offset: int, nbytes: int) -> bytes:
    """A native shard (2 x 2, crc32c at the end) with one entry of its index replaced."""
    places = [place or (MISSING, MISSING) for place in places_in(shard, 4)]
    places[entry_id] = (offset, nbytes)
    return shard[: -index_nbytes(4)] + index_of(places)


@pytest.mark.parametrize("n", [0, 3, 67, 71])
def test_a_truncated_shard(base: Any, store: ShardingStore, n: int) -> None:
    """Named in the error; not rewritten; the other shards are not harmed."""
    put(base, "z/c/0/0", objects_of(base)["z/c/0/0"][:n])
    before = objects_of(base)
    with pytest.raises(CorruptShardError, match="shard 'z/c/0/0'") as info:
        sync(store.get("z/c/0/1", PROTOTYPE))
    assert info.value.shard_key == "z/c/0/0"
    with pytest.raises(CorruptShardError, match="nothing was written"):
        sync(store.set("z/c/0/1", buffer(b"abcd")))
    assert objects_of(base) == before
    z = zarr.open_array(store, path="z")
    np.testing.assert_array_equal(z[4:, :], 1)
    z[4:, :] = 2
    with pytest.raises(CorruptShardError):
        z[0, 0]


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(10**6, 4), (4, 10**7), (2**63, 2**63), (2**64 - 1, 2), (14, 4)]
)
def test_an_entry_outside_the_shard(
    base: Any, store: ShardingStore, offset: int, nbytes: int
) -> None:
    """Names shard, chunk and bytes; other chunks are read; no memory is asked for by it."""
    put(base, "z/c/0/0", edit_entry(objects_of(base)["z/c/0/0"], 1, offset, nbytes))
    before = objects_of(base)
    tells_no_size = not isinstance(base, LocalStore | dict) and isinstance(base, Store)
    if not (tells_no_size and offset == 14):  # two bytes into the index, and no size to tell it
        with pytest.raises(CorruptShardError) as info:
            sync(store.get("z/c/0/1", PROTOTYPE))
        assert info.value.chunk_key == "z/c/0/1"
        assert info.value.byte_range == (offset, offset + nbytes)
    other = sync(store.get("z/c/0/0", PROTOTYPE))
    assert other is not None
    assert other.to_bytes() == b"\1" * 4
    rewriting = ShardingStore(base, strategy="rewrite")
    with pytest.raises(CorruptShardError, match="erase or overwrite this chunk first"):
        sync(rewriting.set("z/c/1/1", buffer(b"abcd")))
    assert objects_of(base) == before
    sync(store.set("z/c/0/1", buffer(b"good")))
    np.testing.assert_array_equal(zarr.open_array(store, path="z")[2:4, 2:4], 1)


def test_a_wrong_checksum(base: Any, store: ShardingStore) -> None:
    """One flipped bit of the index; other shards are read."""
    shard = bytearray(objects_of(base)["z/c/1/1"])
    shard[-20] ^= 1
    put(base, "z/c/1/1", bytes(shard))
    z = zarr.open_array(store, path="z")
    with pytest.raises(CorruptShardError, match="checksum"):
        z[7, 7]
    np.testing.assert_array_equal(z[:4], 1)
    with pytest.raises(CorruptShardError, match="z/c/1/1"):
        ShardingMapping(store).list()


@pytest.mark.parametrize("key", ["z/c/1", "z/c/0/0/0", "z/c.0.0", "z/0/0", "z/c"])
def test_a_key_of_other_dimensions(base: Any, store: ShardingStore, key: str) -> None:
    """Refused on writing; on reading it is simply not there."""
    before = objects_of(base)
    with pytest.raises(SpecError, match="no chunk key of the array 'z', which has 2 dimensions"):
        sync(store.set(key, buffer(b"x")))
    assert objects_of(base) == before
    assert sync(store.get(key, PROTOTYPE)) is None


@pytest.mark.parametrize("key", ["z/c/4/0", "z/c/0/4", "z/c/99999999999/0"])
def test_a_chunk_outside_the_grid(base: Any, store: ShardingStore, key: str) -> None:
    """Refused on writing, alone or in a batch of which nothing is then written."""
    before = objects_of(base)
    with pytest.raises(SpecError, match=r"outside the array 'z', which has \(4, 4\) chunks"):
        sync(store.set(key, buffer(b"x")))
    with pytest.raises(SpecError):
        sync(store._set_or_erase([("z/c/0/0", buffer(b"lost")), (key, buffer(b"x"))]))
    with pytest.raises(SpecError):
        sync(set_partial_values(store, [("z/c/0/0", 0, b"lost"), (key, 0, b"x")]))
    assert objects_of(base) == before
    assert sync(store.get(key, PROTOTYPE)) is None
    assert not sync(store.exists(key))
    sync(store.delete(key))


def test_another_number_of_dimensions_without_metadata() -> None:
    """The option has two dimensions, the keys one or three: a pattern leaves their arrays alone,
    the path of their array does not."""
    keys = ["data/root/foo/c1", "data/root/foo/c1/2/3"]
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, chunks_per_shard=(2, 2))
    named = ShardingMapping({}, chunks_per_shard={"foo": (2, 2)})
    for key in keys:
        m[key] = b"x"
        with pytest.raises(SpecError, match="has 2 dimensions"):
            named[key] = b"x"
    assert list(m) == list(base) == keys
    assert list(named) == []


@pytest.mark.parametrize(
    "key", ["../x", "z/../../x", "/etc/x", "z//c/0/0", "z/./c/0/0", "a\0b", ""]
)
def test_keys_that_escape(base: Any, store: ShardingStore, key: str) -> None:
    """In every operation, before the base store hears of them."""
    m = ShardingMapping(store)
    before = objects_of(base)
    for operation in (
        lambda: m.get(key),
        lambda: m.set(key, b"x"),
        lambda: m.erase(key),
        lambda: m.get_partial_values([("z/c/0/0", (0, 1)), (key, (0, 1))]),
        lambda: m.set_partial_values([("z/c/0/0", 0, b"x"), (key, 0, b"x")]),
        lambda: m.erase_values(["z/c/0/0", key]),
        lambda: key in m,
        lambda: m.update({"z/c/0/0": b"x", key: b"y"}),
        lambda: m.setdefault(key, b"x"),
        lambda: sync(store.getsize(key)),
    ):
        with pytest.raises(SpecError):
            operation()
    assert objects_of(base) == before


@pytest.mark.parametrize(
    "key", [5, None, b"z/c/0/0", "z/c/0/../0", "z/c/0/0/", "z/c//0", "z/c/0/\0"]
)
@pytest.mark.parametrize("on_files", [True, False])
def test_keys_beside_those_of_an_array_that_is_known(
    tmp_path: Path, key: Any, on_files: bool
) -> None:
    """As `test_keys_that_escape`, where the keys of an array are not looked at any more."""
    store = ShardingStore(tmp_path if on_files else {}, chunks_per_shard=2)
    zarr.create_array(store, name="z", shape=(8, 8), chunks=(2, 2), dtype="u1", compressors=None)
    m = ShardingMapping(store)
    m["z/c/0/0"] = b"1234"
    time.sleep(0.03)  # indexes of younger files are not remembered
    for _ in range(2):
        assert m["z/c/0/0"] == b"1234"
    for operation in (
        lambda: m[key],
        lambda: store.get_sync(key),
        lambda: sync(store.get(key, PROTOTYPE)),
        lambda: sync(store.get_partial_values(PROTOTYPE, [("z/c/0/0", None), (key, None)])),
    ):
        with pytest.raises(SpecError):
            operation()


@pytest.mark.parametrize("prefix", ["../", "/etc/", "z//", "a\0"])
def test_prefixes_that_escape(store: ShardingStore, prefix: str) -> None:
    """In listing and erasing."""
    m = ShardingMapping(store)
    for operation in (m.list_prefix, m.list_dir, m.erase_prefix):
        with pytest.raises(SpecError):
            operation(prefix)


@pytest.mark.parametrize(
    "cps", [0, -1, (2, 0), (2**31, 2**31), 1.5, "4", (2, None), {"a": 0}, {"a": (2**40,)}]
)
def test_impossible_options(cps: Any) -> None:
    """When the store is made, not when it first writes."""
    with pytest.raises(SpecError):
        ShardingStore({}, chunks_per_shard=cps)


@pytest.mark.parametrize(
    "options", [{"order": "hilbert"}, {"declaration": "attribute"}, {"max_gap_bytes": -1}]
)
def test_misspelled_options(options: dict[str, Any]) -> None:
    """The message names what is allowed."""
    with pytest.raises(SpecError):
        ShardingStore({}, **options)


@pytest.mark.parametrize("what", [5, None, ["a"], object()])
def test_what_is_no_base_store(what: Any) -> None:
    """The message lists what is."""
    with pytest.raises(TypeError, match="a base store is"):
        ShardingStore(what)


def test_wrapping_twice_and_wrapping_a_path_in_a_store() -> None:
    """Both are mistakes with a clear way out."""
    with pytest.raises(SpecError, match="wrap its base store"):
        ShardingStore(ShardingStore({}))
    with pytest.raises(SpecError, match="pass the path to zarr"):
        ShardingStore(StorePath(MemoryStore(), "a/b"))
    with pytest.raises(SpecError, match="storage_options"):
        ShardingStore({}, storage_options={"anon": True})


def draft_document(transformers: Any, shape: tuple[int, ...] = (8, 8)) -> bytes:
    grid = {"type": "regular", "chunk_shape": [2] * len(shape), "separator": "/"}
    doc = {"shape": shape, "chunk_grid": grid, "storage_transformers": transformers}
    return json.dumps(doc).encode()


URI = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"


@pytest.mark.parametrize(
    "transformer",
    [
        {"name": "sharding", "configuration": {"chunks_per_shard": [2, 2]}},
        {
            "storage_transformer": URI,
            "configuration": {"format": "indexed", "chunks_per_shard": [2, 2]},
        },
        {"extension": URI, "type": "indexed", "configuration": {"chunks_per_shard": [2, 2]}},
    ],
)
def test_the_three_spellings_of_the_draft(transformer: dict[str, Any]) -> None:
    """All are read; chunks go into shards of 2 x 2."""
    base = {"meta/root/a.array.json": draft_document([transformer])}
    m = ShardingMapping(base)
    m.update({f"data/root/a/c{i}/{j}": b"x" for i in range(4) for j in range(4)})
    assert sum(k.startswith("data/") for k in base) == 4
    assert json.loads(m["meta/root/a.array.json"])["storage_transformers"] == []


@pytest.mark.parametrize(
    ("transformers", "error"),
    [
        ([{"name": "encryption"}], UnsupportedError),
        (
            [{"name": "sharding", "configuration": {"chunks_per_shard": [2, 2]}}] * 2,
            UnsupportedError,
        ),
        ([{"extension": URI, "type": "tree", "configuration": {}}], UnsupportedError),
        (
            [{"extension": URI, "type": "tree", "configuration": {"chunks_per_shard": [2, 2]}}],
            UnsupportedError,
        ),
        ([{"name": "sharding", "configuration": {}}], SpecError),
        ([{"name": "sharding", "configuration": {"chunks_per_shard": [2]}}], SpecError),
        ([{"name": "sharding", "configuration": {"chunks_per_shard": [0, 2]}}], SpecError),
        ([{"name": "sharding", "configuration": {"chunks_per_shard": [2**31, 2**31]}}], SpecError),
        ([{"name": "sharding", "configuration": {"chunks_per_shard": "22"}}], SpecError),
        ("sharding", SpecError),
    ],
)
def test_declarations_that_are_not_valid_or_not_known(
    transformers: Any, error: type[Exception]
) -> None:
    """A clear error on reading and writing the chunks, never a misread. The document is shown as it
    is stored."""
    base = {
        "meta/root/a.array.json": draft_document(transformers),
        "data/root/a/c0/0": b"what a misreading store would return",
    }
    before = dict(base)
    m = ShardingMapping(base, chunks_per_shard=(2, 2))
    assert m["meta/root/a.array.json"] == base["meta/root/a.array.json"]
    for operation in (
        lambda: m["data/root/a/c0/0"],
        lambda: m.set("data/root/a/c0/0", b"x"),
        lambda: m.set("data/root/a/c1/1", b"x"),
    ):
        with pytest.raises(error):
            operation()
    assert base == before


def test_a_document_nested_by_the_thousand() -> None:
    """It is no array, and no reason to stop."""
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    m = ShardingMapping({"z/zarr.json": deep, "z/c/0": b"x"})
    assert m["z/zarr.json"] == deep
    assert m["z/c/0"] == b"x"


def test_hostile_metadata_asks_for_no_memory() -> None:
    """A native document whose shards have 2⁶² entries."""
    store = ShardingStore({}, chunks_per_shard=2)
    zarr.create_array(store, name="z", shape=(4, 4), chunks=(1, 1), dtype="u1")
    assert isinstance(store.base, dict)
    doc = json.loads(store.base["z/zarr.json"])
    doc["chunk_grid"]["configuration"]["chunk_shape"] = [2**31, 2**31]
    base = {"z/zarr.json": json.dumps(doc).encode(), "z/c/0/0": b"x"}
    tracemalloc.start()
    with pytest.raises(SpecError, match="4611686018427387904 entries"):
        ShardingMapping(base)["z/c/0/0"]
    assert ShardingMapping(base)["z/zarr.json"] == base["z/zarr.json"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_read_only(base: Any, store: ShardingStore) -> None:
    """Every operation that writes is refused with zarr's message; reads work."""
    reader = store.with_read_only(True)
    m = ShardingMapping(reader)
    before = objects_of(base)
    for operation in (
        lambda: m.set("z/c/0/0", b"x"),
        lambda: m.update({"z/c/0/0": b"x"}),
        lambda: m.set_partial_values([("z/c/0/0", 0, b"x")]),
        lambda: m.erase("z/c/0/0"),
        lambda: m.erase_values(["z/c/0/0"]),
        lambda: m.erase_prefix("z/"),
        lambda: m.clear(),
        lambda: m.__delitem__("z/c/0/0"),
        lambda: m.setdefault("n", b"x"),
        lambda: sync(reader.set("n", buffer(b"x"))),
        lambda: sync(reader.set_if_not_exists("n", buffer(b"x"))),
        lambda: sync(reader._set_or_erase([("n", buffer(b"x"))])),
        lambda: sync(set_partial_values(reader, [("n", 0, b"x")])),
        lambda: sync(reader.delete("z/c/0/0")),
        lambda: sync(reader.delete_dir("z")),
        lambda: sync(reader.clear()),
        lambda: reader.set_sync("n", buffer(b"x")),
        lambda: reader.delete_sync("z/c/0/0"),
    ):
        with pytest.raises(ReadOnlyError, match="read-only mode and does not support writing"):
            operation()
    assert objects_of(base) == before
    np.testing.assert_array_equal(zarr.open_array(reader, path="z", mode="r")[:], 1)
    writer = reader.with_read_only(False)
    zarr.open_array(writer, path="z")[0, 0] = 3


def test_a_read_only_base(tmp_path: Path) -> None:
    """A store on a base that refuses writes refuses them itself."""
    zarr.create_array(ShardingStore(tmp_path, chunks_per_shard=2), name="z", shape=(4,), dtype="u1")
    reader = ShardingStore(LocalStore(tmp_path, read_only=True))
    assert reader.read_only
    with pytest.raises(ReadOnlyError):
        sync(reader.set("n", buffer(b"x")))
    sync(reader.with_read_only(False).set("n", buffer(b"x")))


@pytest.mark.parametrize(
    "pieces",
    [
        [("z/c/0/0", 0, b"ab"), ("z/c/0/0", 1, b"c")],
        [("z/c/0/0", 5, b"gap")],
        [("z/c/0/0", -9, b"before")],
        [("plain", 1, b"gap")],
    ],
)
def test_pieces_that_do_not_fit(base: Any, store: ShardingStore, pieces: Any) -> None:
    """Overlaps and gaps are refused, and nothing is written."""
    before = objects_of(base)
    with pytest.raises(SpecError):
        sync(set_partial_values(store, pieces))
    assert objects_of(base) == before


def test_numpy_integers_are_integers(base: Any, store: ShardingStore) -> None:
    """Starts and lengths often come out of arrays."""
    m = ShardingMapping(store)
    one: Any = np.int64(1)
    m.set_partial_values([("z/c/0/0", one, b"x")])
    got = m.get_partial_values([("z/c/0/0", (one - 1, one + 1))])
    assert got == [b"\1x"]
    with pytest.raises(SpecError, match="whole number"):
        m.set_partial_values([("z/c/0/0", 0.5, b"x")])  # type: ignore[list-item]


def test_a_defaultdict_makes_nothing_up() -> None:
    """Looking for a shard must not create it."""
    base: dict[str, bytes] = collections.defaultdict(bytes)
    m = ShardingMapping(base, chunks_per_shard=(2, 2))
    assert m.get("data/root/a/c0/0") is None
    assert dict(base) == {}


def test_options_beside_a_store_that_has_its_own() -> None:
    """They would have no effect."""
    for options in ({"chunks_per_shard": 2}, {"order": "F"}, {"max_gap_bytes": 0}):
        with pytest.raises(SpecError, match="has its options"):
            ShardingMapping(ShardingStore({}), **options)


def native_document(codecs: list[Any], shape: int = 8) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [shape],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": codecs,
        "attributes": {},
    }


def sharding_codec(inner: list[Any], chunk: int, index_codecs: list[Any] | None = None) -> Any:
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    configuration = {"chunk_shape": [chunk], "codecs": inner, "index_codecs": index_codecs or index}
    return {"name": "sharding_indexed", "configuration": configuration}


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize(
    ("codecs", "native"),
    [
        ([sharding_codec([sharding_codec([{"name": "bytes"}], 2)], 4)], "flat"),
        (
            [
                {"name": "transpose", "configuration": {"order": [0]}},
                sharding_codec([{"name": "bytes"}], 2),
            ],
            "passthrough",
        ),
    ],
    ids=["nested", "behind a transpose"],
)
def test_a_sharding_codec_that_the_reader_was_shown_may_be_written_back(
    codecs: Any, native: Any
) -> None:
    """zarr spells out defaults; attributes and shape are updated all the same."""
    base = {"a/zarr.json": json.dumps(native_document(codecs)).encode()}
    store = ShardingStore(base, native=native)
    z = zarr.open_array(store, path="a")
    z.attrs["x"] = 1
    z.resize((16,))
    z[:] = 3
    again = zarr.open_array(store, path="a")
    assert dict(again.attrs) == {"x": 1}
    np.testing.assert_array_equal(again[:], np.full(16, 3))


@pytest.mark.parametrize("index_codecs", [["bytes"], [{"name": "bytes"}], [{"name": "zstd"}]])
def test_index_codecs_that_cannot_be_expressed(index_codecs: Any) -> None:
    """Left to zarr, whether the caller asks for it or not."""
    doc = native_document([sharding_codec([{"name": "bytes"}], 2, index_codecs)])
    base = {"a/zarr.json": json.dumps(doc).encode()}
    base["a/c/0"] = b"a shard"
    for mapping in (ShardingMapping(base), ShardingMapping(base, native="passthrough")):
        assert dict(mapping) == base
    (info,) = get_shard_info(base).arrays
    assert "index of the shards" in info.notes[0]


def test_a_damaged_member_does_not_close_the_group() -> None:
    """Consolidated metadata with one document that is not complete."""
    member = native_document([sharding_codec([{"name": "bytes"}], 2)])
    del member["shape"]
    group = {
        "zarr_format": 3,
        "node_type": "group",
        "consolidated_metadata": {"kind": "inline", "metadata": {"bad": member}},
    }
    data = json.dumps(group).encode()
    assert ShardingMapping({"zarr.json": data})["zarr.json"] == data


def test_a_failing_read_of_a_damaged_entry_is_blamed_on_the_entry() -> None:
    """A base store that refuses the range, or runs out of memory: the shard is at fault."""

    class Refusing(MemoryStore):
        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            if isinstance(byte_range, RangeByteRequest) and byte_range.end > 10**6:
                raise MemoryError
            return await super().get(key, prototype, byte_range)

    base = Refusing()
    store = ShardingStore(base, chunks_per_shard=2)
    zarr.create_array(store, name="z", shape=(8, 8), chunks=(2, 2), dtype="u1")[:] = 1
    put(base, "z/c/0/0", edit_entry(objects_of(base)["z/c/0/0"], 1, 10, 10**9))
    with pytest.raises(CorruptShardError, match="z/c/0/1"):
        sync(store.get("z/c/0/1", PROTOTYPE))


def test_values_that_are_no_bytes(base: Any, store: ShardingStore) -> None:
    """A TypeError, as zarr's stores raise."""
    before = objects_of(base)
    for value in ("text", 5, None, np.zeros(3)):
        with pytest.raises(TypeError, match="must be a Buffer instance or bytes"):
            sync(store.set("z/c/0/0", value))  # type: ignore[arg-type]
    assert objects_of(base) == before


@pytest.mark.parametrize(
    "error",
    [
        SpecError("a"),
        ReadOnlyError(),
        UnsupportedError("c"),
        zarr_shardstore.ShardConflictError("d"),
        CorruptShardError("e", shard_key="s", chunk_key="c", byte_range=(1, 2)),
    ],
)
def test_errors_pickle(error: ShardStoreError) -> None:
    """They cross process borders with all they say."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
