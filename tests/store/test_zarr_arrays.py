"""zarr arrays on a `ShardingStore`: everything that zarr offers works, and stays sharded."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.abc.store import Store
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from tests.support.async_calls import erase_prefix
from tests.support.bases import ALL_BASES
from tests.support.kit import objects_of
from tests.support.rounds import rounds
from zarr_shardstore import (
    ShardedCodecPipeline,
    ShardingMapping,
    ShardingStore,
    SpecError,
    check_store,
    get_shard_info,
)

RNG = np.random.default_rng(7)
PIPELINES = ["zarr.core.codec_pipeline.BatchedCodecPipeline"]
if hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
    PIPELINES.append("zarr.core.codec_pipeline.FusedCodecPipeline")
PIPELINES.append(f"{ShardedCodecPipeline.__module__}.{ShardedCodecPipeline.__name__}")


@pytest.fixture(params=PIPELINES, ids=lambda p: p.rsplit(".", 1)[1])
def pipeline(request: pytest.FixtureRequest) -> Any:
    """Each codec pipeline that this zarr has."""
    with zarr.config.set({"codec_pipeline.path": request.param}):
        yield request.param


@pytest.fixture(params=list(ALL_BASES))
def base(request: pytest.FixtureRequest) -> Any:
    return ALL_BASES[request.param]()


def plain(base: Any) -> Any:
    """The base store as plain zarr opens it."""
    if isinstance(base, Store):
        return base
    return MemoryStore({k: cpu.Buffer.from_bytes(v) for k, v in base.items()})


def make_array(store: ShardingStore, data: np.ndarray, **options: Any) -> zarr.Array[Any]:
    options = {"name": "g/z", "chunks": (2,) * data.ndim, "fill_value": 9, **options}
    z = zarr.create_array(store, shape=data.shape, dtype=data.dtype, **options)
    z[...] = data
    return z


def member(group: zarr.Group, name: str) -> zarr.Array[Any]:
    z = group[name]
    assert isinstance(z, zarr.Array)
    return z


@pytest.mark.usefixtures("pipeline")
class TestSelections:
    """Reads and writes of every kind of selection, with chunks that hang over the edge."""

    data = RNG.integers(0, 1000, (11, 7), dtype=np.int32)

    def array(self, base: Any) -> zarr.Array[Any]:
        return make_array(ShardingStore(base, chunks_per_shard=(3, 2)), self.data)

    @pytest.mark.parametrize(
        "selection",
        [
            np.s_[:],
            np.s_[3:9, 1:6],
            np.s_[::3, 2],
            np.s_[-1],
            np.s_[10, 6],
            np.s_[4:4, :],
        ],
    )
    def test_basic(self, base: Any, selection: Any) -> None:
        z = self.array(base)
        expected = self.data.copy()
        np.testing.assert_array_equal(z[selection], expected[selection])
        expected[selection] += 1
        z[selection] = expected[selection]
        np.testing.assert_array_equal(z[:], expected)

    def test_orthogonal(self, base: Any) -> None:
        z = self.array(base)
        expected = self.data.copy()
        rows: Any = [0, 5, 10]  # lists work as arrays do, though zarr's types name arrays only
        columns: Any = [True, False, True, False, False, True, True]
        index = np.ix_(rows, np.flatnonzero(columns))
        np.testing.assert_array_equal(z.oindex[rows, columns], expected[index])
        expected[index] = -1
        z.oindex[rows, columns] = -1
        np.testing.assert_array_equal(z[:], expected)

    def test_coordinates(self, base: Any) -> None:
        z = self.array(base)
        expected = self.data.copy()
        points = ([0, 10, 4, 4], [6, 0, 3, 2])
        np.testing.assert_array_equal(z.vindex[points], expected[points])
        expected[points] = [1, 2, 3, 4]
        z.vindex[points] = [1, 2, 3, 4]
        np.testing.assert_array_equal(z[:], expected)

    def test_blocks(self, base: Any) -> None:
        z = self.array(base)
        np.testing.assert_array_equal(z.blocks[1:3, 2], self.data[2:6, 4:6])
        z.blocks[5, 3] = 77
        assert z[10, 6] == 77

    def test_mask(self, base: Any) -> None:
        z = self.array(base)
        mask = self.data % 3 == 0
        np.testing.assert_array_equal(z.vindex[mask], self.data[mask])
        z.vindex[mask] = 0
        np.testing.assert_array_equal(z[:], np.where(mask, 0, self.data))


@pytest.mark.usefixtures("pipeline")
def test_sharded_below_and_plain_above(base: Any) -> None:
    """The view shows chunks; the base store holds shards that plain zarr opens."""
    data = RNG.integers(0, 1000, (9, 5, 4), dtype=np.uint16)
    store = ShardingStore(base, chunks_per_shard=(2, 3, 1))
    z = make_array(store, data)
    assert (z.chunks, z.shards) == ((2, 2, 2), None)
    shard_keys = {k for k in objects_of(base) if k.startswith("g/z/c/")}
    assert shard_keys == {f"g/z/c/{i}/0/{k}" for i in range(3) for k in range(2)}
    native = zarr.open_array(plain(base), path="g/z", mode="r")
    assert (native.chunks, native.shards) == ((2, 2, 2), (4, 6, 2))
    np.testing.assert_array_equal(native[:], data)


def test_what_plain_zarr_writes_is_read_through_the_store(tmp_path: Path) -> None:
    """Both may write the same shards, one after the other."""
    data = RNG.random((8, 8))
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    z = make_array(store, data)
    native = zarr.open_array(LocalStore(tmp_path), path="g/z", mode="r+")
    native[1:3, 1:3] = 5
    data[1:3, 1:3] = 5
    np.testing.assert_array_equal(z[:], data)


@pytest.mark.usefixtures("pipeline")
def test_fill_values_and_erased_chunks(base: Any) -> None:
    """Chunks of fill value only are not stored; a shard of nothing else is removed."""
    store = ShardingStore(base, chunks_per_shard=2)
    z = make_array(store, np.full((8, 8), 9, dtype=np.int16))
    assert not [k for k in objects_of(base) if "/c/" in k]
    z[0, 0] = 1
    z[7, 7] = 1
    assert sum("/c/" in k for k in objects_of(base)) == 2
    z[0, 0] = 9
    assert [k for k in objects_of(base) if "/c/" in k] == ["g/z/c/1/1"]
    np.testing.assert_array_equal(z[:7, :7], 9)


@pytest.mark.usefixtures("pipeline")
def test_resize_append_and_attributes_keep_the_declaration(base: Any) -> None:
    """The document below stays that of a native sharded array."""
    data = RNG.integers(0, 99, (6, 4), dtype=np.int64)
    store = ShardingStore(base, chunks_per_shard=(2, 2))
    z = make_array(store, data)
    z.append(data + 1)
    z.attrs["unit"] = "mm"
    np.testing.assert_array_equal(z[:], np.vstack([data, data + 1]))
    z.resize((5, 4))
    np.testing.assert_array_equal(z[:], data[:5])
    z.resize((7, 4))
    np.testing.assert_array_equal(z[5:], [[data[5, i] for i in range(4)], [9] * 4])
    native = zarr.open_array(plain(base), path="g/z", mode="r")
    assert native.shards == (4, 4)
    assert dict(native.attrs) == {"unit": "mm"}
    np.testing.assert_array_equal(native[:5], data[:5])


def test_reopened_without_options(base: Any) -> None:
    """Metadata alone says that an array is sharded; the option is for new arrays."""
    data = RNG.integers(0, 99, (6, 4), dtype=np.int64)
    make_array(ShardingStore(base, chunks_per_shard=2), data)
    z = zarr.open_array(ShardingStore(base, chunks_per_shard=3), path="g/z")
    z[0, 0] = -5
    z.attrs["a"] = 1
    native = zarr.open_array(plain(base), path="g/z", mode="r")
    assert native.shards == (4, 4)
    assert native[0, 0] == -5


def test_overwrite_makes_a_new_array(base: Any) -> None:
    """overwrite=True removes the old shards, and the new option counts."""
    make_array(ShardingStore(base, chunks_per_shard=2), np.ones((8, 8)))
    new = ShardingStore(base, chunks_per_shard=4)
    z = make_array(new, np.zeros((8, 8, 2)), overwrite=True, fill_value=1)
    np.testing.assert_array_equal(z[:], 0)
    assert zarr.open_array(plain(base), path="g/z", mode="r").shards == (8, 8, 8)


@pytest.mark.thorough(of=5)
@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("encoding", ["default", "v2"])
@pytest.mark.parametrize("declaration", ["codec", "storage_transformers"])
@pytest.mark.parametrize("shape", [(), (7,), (5, 1, 4), (3, 2, 4, 1, 5)])
def test_each_declaration_encoding_and_dimension(
    shape: tuple[int, ...], declaration: Any, encoding: Any, separator: Any
) -> None:
    """0-d to 5-d; each reads back, also by a store that knows nothing."""
    data = RNG.integers(1, 99, shape, dtype=np.int16)
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2, declaration=declaration)
    make_array(
        store, data, chunk_key_encoding={"name": encoding, "separator": separator}, fill_value=0
    )
    fresh = ShardingStore(base)
    np.testing.assert_array_equal(zarr.open_array(fresh, path="g/z")[...], data)
    if shape:
        stored = json.loads(base["g/z/zarr.json"])
        is_codec = stored["codecs"][0]["name"] == "sharding_indexed"
        assert is_codec == (declaration == "codec")
        assert bool(stored.get("storage_transformers")) != is_codec


def test_arrays_without_elements() -> None:
    """Dimensions of length 0; zarr 3.1 also makes chunks of length 0, which hold nothing."""
    store = ShardingStore({}, chunks_per_shard=2)
    z = make_array(store, np.empty((0, 5), "i4"), name="z", chunks=(2, 2))
    z.append(np.ones((3, 5), "i4"))
    np.testing.assert_array_equal(z[:], np.ones((3, 5)))
    doc = z.metadata.to_dict()
    doc["shape"], doc["attributes"] = [0, 5], {}
    doc["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [0, 2]}}
    m = ShardingMapping(store)
    data = json.dumps(doc, default=str).encode()
    m["empty/zarr.json"] = data
    assert m["empty/zarr.json"] == data


def test_groups_and_members(base: Any) -> None:
    """Hierarchies are listed as they are, with the keys of chunks inside arrays."""
    store = ShardingStore(base, chunks_per_shard=2)
    root = zarr.create_group(store)
    root.create_group("a/b").create_array("x", shape=(4,), chunks=(1,), dtype="i1")[:] = 1
    root.create_array("c", shape=(4,), chunks=(1,), dtype="i1")[:] = 2
    root.create_group("0")
    members = {name for name, _ in root.members(max_depth=None)}
    assert members == {"a", "a/b", "a/b/x", "c", "0"}
    assert sum(np.asarray(member(root, "c")[:])) == 8
    del root["a"]
    assert {name for name, _ in root.members(max_depth=None)} == {"c", "0"}
    keys = ShardingMapping(store).list_prefix("c/")
    assert sorted(keys) == ["c/c/0", "c/c/1", "c/c/2", "c/c/3", "c/zarr.json"]


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_consolidated_metadata(base: Any) -> None:
    """Consolidated documents show chunks above, and declare shards below."""
    store = ShardingStore(base, chunks_per_shard=2)
    data = RNG.integers(0, 99, (6, 4), dtype=np.int64)
    make_array(store, data)
    zarr.consolidate_metadata(store)
    above = member(zarr.open_consolidated(store, mode="r"), "g/z")
    assert (above.chunks, above.shards) == ((2, 2), None)
    np.testing.assert_array_equal(above[:], data)
    below = member(zarr.open_consolidated(plain(base), mode="r"), "g/z")
    assert (below.chunks, below.shards) == ((2, 2), (4, 4))
    np.testing.assert_array_equal(below[:], data)
    # A store that has never seen the array's own document.
    fresh = member(zarr.open_consolidated(ShardingStore(base), mode="r"), "g/z")
    np.testing.assert_array_equal(fresh[:], data)


def test_names_that_look_like_chunk_keys(base: Any) -> None:
    """Groups and arrays named c, 0, 0.0, and an array below a group with a chunk-like name."""
    store = ShardingStore(base, chunks_per_shard=2)
    names = ["c/c", "0/0", "foo/c/0/1", "foo/0.0", "c0/c", "data/root/c1/x"]
    for i, name in enumerate(names):
        for encoding in ("default", "v2"):
            path = f"{encoding}/{name}"
            z = zarr.create_array(
                store,
                name=path,
                shape=(3, 3),
                chunks=(1, 1),
                dtype="i2",
                chunk_key_encoding={"name": encoding, "separator": "/"},
            )
            z[:] = i + 1
    fresh = ShardingStore(base)
    for i, name in enumerate(names):
        for encoding in ("default", "v2"):
            z = zarr.open_array(fresh, path=f"{encoding}/{name}")
            np.testing.assert_array_equal(z[:], i + 1)
    chunks = [k for k in ShardingMapping(fresh) if not k.endswith("json")]
    assert len(chunks) == 9 * 2 * len(names)


@pytest.mark.parametrize("name", ["local", "fsspec"])
def test_an_array_beside_one_whose_name_starts_alike(name: str) -> None:
    """zarr lists the chunks of an array by its bare path, and means its directory."""
    store = ShardingStore(ALL_BASES[name](), chunks_per_shard=2)
    z = make_array(store, np.ones((4, 4)), name="z")
    make_array(store, np.ones((4, 4)), name="zz")
    assert z.nchunks_initialized == 4
    assert len(ShardingMapping(store).list_prefix("z/")) == 5


def test_nbytes_stored_counts_chunks(base: Any) -> None:
    """getsize_prefix adds the sizes of values, as seen above."""
    store = ShardingStore(base, chunks_per_shard=2)
    z = make_array(store, np.ones((4, 4), dtype=np.float64), compressors=None)
    m = ShardingMapping(store)
    expected = sum(len(m[k]) for k in m.list_prefix("g/z/"))
    assert z.nbytes_stored() == expected > 4 * 4 * 8


def test_a_v2_array_that_is_not_sharded_stays_so(tmp_path: Path) -> None:
    """Through a resize and an attribute update, beside new ones that are sharded."""
    zarr.create_array(
        LocalStore(tmp_path), name="old", shape=(4,), chunks=(1,), dtype="i1", zarr_format=2
    )
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    old = zarr.open_array(store, path="old")
    old[:] = 1
    old.resize((6,))
    old.attrs["x"] = 1
    old[:] = 2
    assert (tmp_path / "old" / "5").stat().st_size
    new = zarr.create_array(store, name="new", shape=(4,), chunks=(1,), dtype="i1", zarr_format=2)
    new[:] = 3
    assert sorted(os.listdir(tmp_path / "new")) == [".zarray", ".zattrs", "0", "1"]


def test_a_policy_that_does_not_fit_the_array(base: Any) -> None:
    """A tuple is for arrays of its length, and must fit an array that is named; a mapping leaves
    arrays out."""
    store = ShardingStore(base, chunks_per_shard={"z": (2, 2), "*": (2, 2)})
    options: Any = {"shape": (4, 4, 4), "chunks": (1, 1, 1), "dtype": "i1"}
    with pytest.raises(SpecError, match="has 2 dimensions, the array 'z' has 3"):
        zarr.create_array(store, name="z", **options)
    with pytest.warns(UserWarning, match="stays unsharded: it has 3 dimensions"):
        zarr.create_array(store, name="other", **options)
    zarr.create_array(store, name="coordinate", shape=(4,), chunks=(1,), dtype="i1")[:] = 1
    for path in ("other", "coordinate"):
        assert zarr.open_array(plain(base), path=path, mode="r").shards is None
    store = ShardingStore(base, chunks_per_shard={"raw/*": 2, "raw/no": None, "x": (3,)})
    for name, shards in [("raw/a", (2,)), ("raw/no", None), ("x", (3,)), ("y", None)]:
        zarr.create_array(store, name=name, shape=(8,), chunks=(1,), dtype="i1")[:] = 1
        assert zarr.open_array(plain(base), path=name, mode="r").shards == shards


def test_unsharded_arrays_pass_through(tmp_path: Path) -> None:
    """A store that exists is wrapped as it is; its arrays keep their chunks."""
    data = RNG.integers(0, 9, (6, 6))
    old = zarr.create_array(
        LocalStore(tmp_path), name="old", shape=(6, 6), chunks=(2, 2), dtype="i8"
    )
    old[:] = data
    before = objects_of(LocalStore(tmp_path))
    z = zarr.open_array(ShardingStore(tmp_path, chunks_per_shard=2), path="old")
    np.testing.assert_array_equal(z[:], data)
    z.attrs["seen"] = True
    z[0, 0] = 42
    after = objects_of(LocalStore(tmp_path))
    assert before.keys() == after.keys()
    assert zarr.open_array(LocalStore(tmp_path), path="old", mode="r").shards is None


@pytest.mark.parametrize("write", [3, 0], ids=["values", "fill value"])
def test_chunks_that_another_store_appended_survive(base: Any, write: int) -> None:
    """A store that knows only the smaller array fills all that it knows of the shard."""
    a = make_array(ShardingStore(base, chunks_per_shard=8), np.ones(2, "u1"), name="z", chunks=(1,))
    zarr.open_array(ShardingStore(base), path="z").append(np.array([7, 8], "u1"))
    a[:] = write
    expected = [write, write, 7, 8]
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="z")[:], expected)


def test_an_existing_v2_array_that_the_option_names(base: Any) -> None:
    """It has a document, of format 2: its chunks are chunks, and pass through."""
    old = zarr.create_array(
        plain(base) if isinstance(base, Store) else ShardingStore(base),
        name="foo",
        shape=(4, 4),
        chunks=(1, 1),
        dtype="u1",
        zarr_format=2,
    )
    old[:] = np.arange(16).reshape(4, 4)
    before = objects_of(base).keys()
    z = zarr.open_array(ShardingStore(base, chunks_per_shard={"foo": (2, 2)}), path="foo")
    np.testing.assert_array_equal(z[:], np.arange(16).reshape(4, 4))
    z[:] = 5
    assert objects_of(base).keys() == before | {"foo/0.0"}


def test_erasing_what_is_no_chunk_erases_no_shards(base: Any) -> None:
    """On a local base "z/c/0" is a directory of shards, not of the chunks z/c/0/*."""
    store = ShardingStore(base, chunks_per_shard=4)
    z = make_array(store, np.ones((8, 8), "u1"), name="z", chunks=(1, 1))
    for key in ("z/c/0", "z/c", "z/c/0/0/0"):
        sync(store.delete(key))
    np.testing.assert_array_equal(z[:], np.ones((8, 8)))


def test_erasing_a_name_that_is_no_value_erases_nothing(base: Any) -> None:
    """ "g/z" is an array, not a key; LocalStore would remove its directory."""
    store = ShardingStore(base, chunks_per_shard=4)
    z = make_array(store, np.ones((8, 8), "u1"), chunks=(1, 1))
    if not isinstance(base, FsspecStore):
        sync(store.delete("g/z"))
        sync(store.delete("g"))
    np.testing.assert_array_equal(z[:], np.ones((8, 8)))


def test_arrays_come_and_go(base: Any) -> None:
    """What this store erases and creates it knows at once."""
    store = ShardingStore(base, chunks_per_shard=2)
    erasures: list[Callable[[], Coroutine[Any, Any, None]]] = [
        lambda: store.delete_dir("g/z"),
        lambda: erase_prefix(store, "g/"),
        lambda: store.clear(),
        lambda: store._set_or_erase(
            [(key, None) for key in [*(f"g/z/c/{i}" for i in range(4)), "g/z/zarr.json"]]
        ),
    ]
    for erase in erasures:
        make_array(store, np.ones(8, "u1"))
        sync(erase())
        sync(store.set("g/z/c/0", cpu.Buffer.from_bytes(b"no array, no chunk")))
        assert objects_of(base)["g/z/c/0"] == b"no array, no chunk"
        sync(store.clear())


def test_a_document_that_is_read_is_learned(base: Any) -> None:
    """Another store re-declares the array; reading its document is enough to know."""
    make_array(ShardingStore(base, chunks_per_shard=2), np.ones(8, "u1"))
    store = ShardingStore(base)
    np.testing.assert_array_equal(zarr.open_array(store, path="g/z")[:], np.ones(8))
    other = ShardingStore(base, chunks_per_shard=4)
    make_array(other, np.full(8, 2, "u1"), overwrite=True, chunks=(1,))
    np.testing.assert_array_equal(zarr.open_array(store, path="g/z")[:], np.full(8, 2))


def test_refresh(base: Any) -> None:
    """Forgets what is known, so that chunk keys are looked at anew."""
    store = ShardingStore(base)
    m = ShardingMapping(store)
    assert m.get("g/z/c/0") is None  # now it is known that there is no array
    make_array(ShardingStore(base, chunks_per_shard=2), np.full(8, 3, "u1"), compressors=None)
    store.refresh()
    assert m["g/z/c/3"] == b"\3\3"


def test_listing_is_clipped_to_the_grid(base: Any) -> None:
    """Entries outside the array are in the shard, and are no keys."""
    store = ShardingStore(base, chunks_per_shard=4)
    z = make_array(store, np.ones((6, 6), "u1"), name="z", chunks=(1, 1), fill_value=0)
    asyncio.run(z._async_array.resize((2, 3), delete_outside_chunks=False))
    m = ShardingMapping(store)
    assert sorted(m.list_prefix("z/c/")) == [f"z/c/{i}/{j}" for i in range(2) for j in range(3)]
    assert sorted(m.list_dir("z/c/")[1]) == ["z/c/0/", "z/c/1/"]
    assert sorted(m.list_dir("z/c/1/")[0]) == ["z/c/1/0", "z/c/1/1", "z/c/1/2"]
    z.resize((6, 6))
    np.testing.assert_array_equal(zarr.open_array(store, path="z")[:4, :4], np.ones((4, 4)))


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """One call over 700 shards, with 256 files allowed."""
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    z = make_array(store, np.arange(1400, dtype="u2"), name="z", chunks=(1,), compressors=None)
    assert z.nchunks_initialized == 1399
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from zarr_shardstore import ShardingMapping\n"
        "m = ShardingMapping(sys.argv[1]); keys = [f'z/c/{i}' for i in range(1400)]\n"
        "values = m.get_partial_values([(k, (0, None)) for k in keys])\n"
        "assert [int.from_bytes(v or b'\\t\\0', 'little') for v in values] == list(range(1400))\n"
        "assert len(m.list()) == 1399 + 2\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is resolved once: for reads, writes, tools and other processes alike."""
    monkeypatch.chdir(tmp_path)
    store = ShardingStore("rel", chunks_per_shard=2)
    z = make_array(store, np.ones(4, "u1"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    z[:] = 2
    pickle.loads(pickle.dumps(z))[3] = 3
    np.testing.assert_array_equal(z[:], [2, 2, 2, 3])
    assert get_shard_info(store).n_chunks == 2
    assert list((tmp_path / "other").iterdir()) == []


def test_a_path_with_two_dots_after_a_link(tmp_path: Path) -> None:
    """It means the directory above the link's target, to the operating system and to zarr."""
    (tmp_path / "disk" / "project").mkdir(parents=True)
    (tmp_path / "project").symlink_to("disk/project")
    path = tmp_path / "project" / ".." / "x.zarr"
    z = make_array(ShardingStore(path, chunks_per_shard=2), np.ones(4, "u1"), name="z")
    z[3] = 7
    np.testing.assert_array_equal(z[:], [1, 1, 1, 7])
    np.testing.assert_array_equal(zarr.open_array(path, path="z")[:], [1, 1, 1, 7])
    assert (tmp_path / "disk" / "x.zarr").exists()
    assert check_store(LocalStore(path)).n_chunks == 2


def test_a_link_to_a_store_may_be_pointed_elsewhere(tmp_path: Path) -> None:
    """An open store keeps the files that it has opened."""
    for name, value in (("first", 1), ("second", 2)):
        make_array(
            ShardingStore(tmp_path / name, chunks_per_shard=2), np.full(4, value, "u1"), name="z"
        )
    link = tmp_path / "latest"
    link.symlink_to("first")
    z = zarr.open_array(ShardingStore(link), path="z")
    link.unlink()
    link.symlink_to("second")
    z[1] = 7
    np.testing.assert_array_equal(z[:], [1, 7, 1, 1])
    np.testing.assert_array_equal(zarr.open_array(link, path="z")[:], [2, 2, 2, 2])


def test_temporary_files_of_a_killed_writer_are_no_keys(tmp_path: Path) -> None:
    """zarr's LocalStore leaves foo.<uuid>.partial behind; it is not listed."""
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    make_array(store, np.ones((4, 4)), name="z")
    (tmp_path / "z" / "c" / "0" / f"0.{'a1' * 16}.partial").write_bytes(b"half")
    m = ShardingMapping(store)
    assert not [k for k in m if "partial" in k]
    assert m.list_dir("z/c/0/")[0] == ["z/c/0/0", "z/c/0/1"]


def test_moved_to_another_shape_by_another_process(tmp_path: Path) -> None:
    """A chunk outside the grid that is known makes the store look again before it refuses."""
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    make_array(store, np.zeros((4, 4)), name="z")
    other = zarr.open_array(ShardingStore(tmp_path), path="z")
    other.resize((40, 4))
    other[39, 3] = 1
    assert sync(store.exists("z/c/19/1"))


@settings(max_examples=rounds(30))
@given(data=st.data())
def test_like_a_numpy_array(data: st.DataObject) -> None:
    """Law: random regions written and read give what numpy gives, above and below."""
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(1, 9)) for _ in range(ndim))
    chunks = tuple(data.draw(st.integers(1, 4)) for _ in range(ndim))
    cps = tuple(data.draw(st.integers(1, 3)) for _ in range(ndim))
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=cps)
    z = zarr.create_array(store, name="z", shape=shape, chunks=chunks, dtype="i4", fill_value=-1)
    expected = np.full(shape, -1, dtype="i4")
    for value in range(data.draw(st.integers(1, 5))):
        region = tuple(
            slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
            for n in shape
        )
        z[region] = value
        expected[region] = value
        np.testing.assert_array_equal(z[...], expected)
    np.testing.assert_array_equal(zarr.open_array(plain(base), path="z")[...], expected)
