"""``view="shards"``: opened arrays have the shape of their shards, and all else stays as it is."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from zarr import Array, AsyncArray
from zarr.codecs import ShardingCodec
from zarr.core.sync import sync
from zarr.storage import LoggingStore, MemoryStore

from tests.store.test_shards_argument import (
    PIPELINES,
    arrays_and_steps,
    selection_for,
    selection_of,
    write_by_threads,
)
from tests.support.kit import CountingStore, objects_of
from tests.support.pipeline_arrays import THEIRS
from tests.support.rounds import rounds
from zarr_shardstore import DraftHierarchyStore, ShardingMapping, ShardingStore
from zarr_shardstore.errors import SpecError, UnsupportedError

NUMBERS = np.arange(1, 257, dtype="u2").reshape(16, 16)
SHOWN = (2, 2), (8, 4)
REFUSAL = r"view='chunks'|may be those of shards"


def create(store: Any, **options: Any) -> Any:
    defaults = {"name": "a", "shape": (16, 16), "chunks": (2, 2), "dtype": "u2"}
    return zarr.create_array(store, **{**defaults, **options})


def filled(base: Any, **options: Any) -> ShardingStore:
    """A store whose array `a` was made and filled through it, by its chunks."""
    store = ShardingStore(base, **{"chunks_per_shard": (4, 2), "view": "shards", **options})
    create(store)[:] = NUMBERS
    return store


def opened(store: Any, path: str = "a") -> Any:
    return zarr.open_array(store, path=path)


def document(base: Any, key: str = "a/zarr.json") -> Any:
    return json.loads(objects_of(base)[key])


DECLARED: dict[str, dict[str, Any]] = {
    "codec": {},
    "index at the start": {"index_location": "start", "index_codecs": ["bytes"]},
    "transformer": {"declaration": "storage_transformers"},
    "draft's index": {"storage_transformers": ["sharding"]},
}


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("how", DECLARED)
def test_what_zarr_writes_keeps_the_stored_declaration(how: str) -> None:
    """Attributes, sizes and consolidated metadata."""
    base = MemoryStore()
    store = filled(base, **DECLARED[how])
    stored, z = document(base), opened(store)
    assert ((z.chunks, z.shards), opened(ShardingStore(base)).shards) == (SHOWN, None)
    z.attrs["name"] = "x"
    z.append(np.full((3, 16), 7, "u2"))
    z.resize((17, 14))
    assert document(base) == {**stored, "shape": [17, 14], "attributes": {"name": "x"}}
    zarr.consolidate_metadata(store)
    group = document(base, "zarr.json")
    assert group["consolidated_metadata"]["metadata"]["a"] == document(base)
    for view in ("shards", "chunks"):
        found: Any = zarr.open_consolidated(ShardingStore(base, view=view))["a"]
        assert (found.chunks, found.shards) == (SHOWN if view == "shards" else (SHOWN[0], None))
        assert_array_equal(found[:], np.vstack([NUMBERS, np.full((1, 16), 7)])[:, :14])
    found.attrs["y"] = 1
    zarr.open_group(store).attrs["z"] = 1
    assert document(base)["codecs"] == stored["codecs"]


def test_new_arrays(tmp_path: Path) -> None:
    """With `shards=`, and in the place of another array."""
    store = filled(tmp_path)
    z = create(store, name="b", shards=(4, 4))
    assert (z.shards, opened(store, "b").shards) == ((4, 4), (4, 4))
    z[:] = NUMBERS
    opened(store, "b")[3:5] = 0
    assert_array_equal(z[3:5], 0)
    created = create(store, shards=(16, 8), overwrite=True)
    created[:] = NUMBERS
    for where in (store, tmp_path):
        assert (opened(where).shards, opened(where)[5, 5]) == ((16, 8), NUMBERS[5, 5])
    create(store, overwrite=True)
    assert (opened(store).shards, int(opened(store)[:].sum())) == ((8, 4), 0)


@pytest.mark.filterwarnings("ignore:Combining a")
def test_what_has_no_sharding_codec_alone_shows_its_chunks() -> None:
    kinds: dict[str, dict[str, Any]] = {
        "v2": {"zarr_format": 2},
        "stack": {},
        "unsharded": {},
        "nested": {"chunks": (8, 8), "serializer": ShardingCodec(
            chunk_shape=(4, 4), codecs=[ShardingCodec(chunk_shape=(2, 2))])},
    }  # fmt: skip
    for kind, options in kinds.items():
        given: dict[str, Any] = {"stack": {"storage_transformers": ["crc32c", "sharding"]}}
        cps = None if kind in ("unsharded", "nested") else 2
        base = MemoryStore()
        store = ShardingStore(base, cps, view="shards", **given.get(kind, {}))
        if kind == "nested":
            options["compressors"] = None
        create(store, **options)[:] = NUMBERS
        z, by_chunks = opened(store), opened(ShardingStore(base))
        z.attrs["x"] = 1
        z.resize((8, 16))
        assert (z.chunks, z.shards) == (by_chunks.chunks, by_chunks.shards), kind
        assert_array_equal(opened(ShardingStore(base))[:], NUMBERS[:8])
    draft = DraftHierarchyStore({}, chunks_per_shard=2, view="shards")
    create(draft)[:] = NUMBERS
    assert (opened(draft).shards, opened(draft)[3, 3]) == (None, NUMBERS[3, 3])


# ------------------------------------------------------------------------- operations


@settings(max_examples=rounds(60))
@given(given_=arrays_and_steps(), how=st.sampled_from(sorted(DECLARED)))
def test_both_views_have_the_same_values(given_: Any, how: str) -> None:
    """Any shape, shard and selection, written by one view and read by both; the stored bytes are
    equal to what the other view stores."""
    shape, chunks, per_shard, steps = given_
    bases: dict[Any, MemoryStore] = {"shards": MemoryStore(), "chunks": MemoryStore()}
    stores = {
        view: ShardingStore(base, per_shard, view=view, strategy="rewrite", **DECLARED[how])
        for view, base in bases.items()
    }
    arrays: dict[str, Any] = {}
    for view, store in stores.items():
        create(store, shape=shape, chunks=chunks, dtype="i4", fill_value=3)
        arrays[view] = opened(store)
    shards = tuple(c * n for c, n in zip(chunks, per_shard, strict=True))
    assert (arrays["shards"].shards, arrays["chunks"].shards) == (shards, None)
    for number, ((way, selection), what) in enumerate(steps):
        value: Any = {"fill": 3}.get(what, number)
        for z in arrays.values():
            at, _ = selection_of(z, way, selection)
            chosen = selection_for(z, way, selection)
            if what == "values" and way != "points":  # of two values for one element any may count
                n = at[chosen].size
                value = np.arange(n, dtype="i4").reshape(at[chosen].shape) + 10 * number
            if what != "read":
                at[chosen] = value
        z, other = arrays["shards"], arrays["chunks"]
        for each in (z, opened(ShardingStore(bases["shards"]))):
            assert_array_equal(selection_of(each, way, selection)[0][chosen], at[chosen])
        assert_array_equal(z[...], other[...])
    assert objects_of(bases["shards"]) == objects_of(bases["chunks"])


def _attributes(z: Any) -> Any:
    z.attrs.update({"a": 1})
    z.update_attributes({"b": 2})
    return opened(z.store).attrs.asdict()


def _facts(z: Any) -> Any:
    return (
        (z.shape, z.chunks, z.shards, z.cdata_shape, z.nchunks, z.nbytes),
        (z.nchunks_initialized, z._nshards, z._nshards_initialized),
        [line for line in str(z.info_complete()).splitlines() if "nitialized" in line],
    )


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda z: z.__setitem__(slice(None), NUMBERS + 1),
    "cuts": lambda z: z.__setitem__((slice(1, 15), slice(3, 7)), 5),
    "step": lambda z: (z.__setitem__((slice(None, None, 3), 2), 9), z[1::4, ::5]),
    "orthogonal": lambda z: (z.oindex.__setitem__(([1, 9, 14], slice(2, 5)), 4), z.oindex[[3], :]),
    "points": lambda z: (z.vindex.__setitem__(([1, 9], [2, 15]), [4, 5]), z.vindex[[1, 9], [2, 1]]),
    "mask": lambda z: (z.vindex.__setitem__(NUMBERS % 7 == 2, 0), z.vindex[NUMBERS % 3 == 1]),
    "blocks": lambda z: (z.blocks.__setitem__((1, 2), 3), z.blocks[1, 2]),
    "fill value": lambda z: z.__setitem__((slice(0, 8), slice(0, 4)), 0),
    "smaller": lambda z: z.resize((7, 9)),
    "smaller, larger": lambda z: (z.resize((8, 9)), z.resize((20, 20))),
    "smaller twice, larger": lambda z: [z.resize(n) for n in ((16, 14), (16, 12), (16, 16))][-1],
    "a mask of one value": lambda z: z.__setitem__(NUMBERS < 3, np.array([9], "u2")),
    "append": lambda z: (z.append(NUMBERS[:5]), z.append(np.ones((21, 2), "u2"), axis=1)),
    "attributes": _attributes,
    "all erased": lambda z: z.__setitem__(..., 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_as_native_sharding(name: str) -> None:
    """The same values, results and counts as an array that zarr shards itself."""
    native: Any = create(MemoryStore(), shards=(8, 4))
    native[:8] = NUMBERS[:8]
    base = MemoryStore()
    store = ShardingStore(base, (4, 2), view="shards")
    create(store)[:8] = NUMBERS[:8]
    z = opened(store)
    assert _facts(z) == _facts(native)
    result, expected = OPERATIONS[name](z), OPERATIONS[name](native)
    assert_array_equal(result[-1], expected[-1]) if isinstance(result, tuple) else None
    assert isinstance(result, tuple) or result == expected
    assert _facts(z) == _facts(native)
    for each in (z, opened(store), opened(base), opened(ShardingStore(base))):
        assert_array_equal(each[...], native[...])


@pytest.mark.filterwarnings("ignore:The data type")
def test_one_value_for_chunks_of_one_text() -> None:
    """numcodecs encodes no array that is read-only."""
    dtype: Any = zarr.dtype.VariableLengthBytes()
    store = ShardingStore({}, 2, view="shards")
    create(store, shape=(6,), chunks=(1,), dtype=dtype, fill_value=b"")
    z = opened(store)
    z[...] = b"q"
    z[0:2] = b"r"
    assert z[...].tolist() == [b"r", b"r", *[b"q"] * 4]


def test_deletion_and_copies(tmp_path: Path) -> None:
    """A copy of all keys is the array where another `ShardingStore` takes it."""
    store = filled(tmp_path)
    source = dict(ShardingMapping(store))
    assert {key for key in source if key.startswith("a/c")} == {
        f"a/c/{i}/{j}" for i in range(8) for j in range(8)
    }
    for view in ("chunks", "shards"):
        base = MemoryStore()
        for key in sorted(source, reverse=True):
            ShardingMapping(base, view=view)[key] = source[key]
        assert document(base) == json.loads((tmp_path / "a/zarr.json").read_text())
        assert_array_equal(opened(ShardingStore(base, view="shards"))[:], NUMBERS)
    del zarr.open_group(store)["a"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "zarr.json"]


def test_costs() -> None:
    """A whole write stores each shard once and reads none; a part reads and stores its shard."""
    base = CountingStore()
    z = opened(filled(base))
    base.forget()
    z[:] = NUMBERS + 1
    shards = [f"a/c/{i}/{j}" for i in range(2) for j in range(4)]
    assert (sorted(key for _, key in base.writes), base.reads) == (shards, [])
    base.forget()
    z[3:6, 1:3] = 0
    assert [key for _, key in base.writes] == ["a/c/0/0"]
    z = opened(ShardingStore(base, view="shards"))
    z[0, 0]
    base.forget()
    assert_array_equal(z[:8], np.vstack([NUMBERS[:3] + 1, z[3:6], NUMBERS[6:8] + 1]))
    assert {key for key, _ in base.reads} <= {*shards[:4]}


def test_parts_by_threads() -> None:
    """Two chunks a shard and four elements a chunk: each element is a call of its own."""
    store = ShardingStore({}, (8, 8), view="shards")
    create(store)
    write_by_threads(opened(store), 8)
    assert_array_equal(opened(store)[:], NUMBERS)


def test_a_batch_and_async_calls(tmp_path: Path) -> None:
    store = filled(tmp_path)
    z = opened(store)
    before = (tmp_path / "a/c/0/0").read_bytes()
    with store.batch():
        for i in range(5):
            z[i, :4] = i
        assert (tmp_path / "a/c/0/0").read_bytes() == before
        assert_array_equal(z[:5, 0], range(5))
    assert_array_equal(opened(tmp_path)[:8, 0], [*range(5), *NUMBERS[5:8, 0]])

    async def run() -> Any:
        array: Any = await AsyncArray.open(zarr.storage.StorePath(store, "a"))
        await array.setitem((slice(1, 3), slice(None)), 9)
        await array.resize((12, 16))
        return array.shards, await array.getitem((slice(0, 4), 5))

    shards, values = asyncio.run(run())
    assert shards == (8, 4)
    assert_array_equal(values, [NUMBERS[0, 5], 9, 9, NUMBERS[3, 5]])


@pytest.mark.parametrize("view", ["chunks", "shards"])
def test_the_other_methods_go_by_chunks(tmp_path: Path, view: Any) -> None:
    store = filled(tmp_path, view=view)
    assert store.shard_shape("a") == (8, 4)
    assert_array_equal(store.read_chunks("a", [(1, 2)])[0], NUMBERS[2:4, 4:6])
    store.write_array("a", (slice(0, 8), slice(0, 4)), NUMBERS[:8, :4] * 2)
    store.write_array("a", (slice(1, 8, 3), 9), 1)
    assert_array_equal(store.read_array("a", (slice(0, 5), 2)), NUMBERS[:5, 2] * 2)
    assert_array_equal(store.read_array("a", (slice(1, 8, 3), slice(9, 11)))[:, 0], 1)
    assert sync(store.chunks_initialized("a")).shape == (8, 8)
    with store.append_frames("f", chunks=(1, 4), dtype="u2") as writer:
        writer.extend(np.arange(48, dtype="u2").reshape(12, 4))
    assert_array_equal(opened(store, "f")[:].ravel(), range(48))
    assert opened(store, "f").shards == (None if view == "chunks" else (4, 8))


# ----------------------------------------------------------------------------- safety


def attempts(z: Any) -> list[Callable[[], Any]]:
    return [
        lambda: z[0, 0],
        lambda: z[:],
        lambda: z.__setitem__((0, 0), 1),
        lambda: z.__setitem__(slice(None), 1),
        lambda: z.resize((8, 8)),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("pipeline", [*PIPELINES, "zarrs.ZarrsCodecPipeline"])
def test_other_pipelines_are_refused(pipeline: str) -> None:
    """They would take chunks for shards: neither is read, nor written, nor erased."""
    if pipeline.startswith("zarrs"):
        pytest.importorskip("zarrs")
    base = MemoryStore()
    store = filled(base)
    before = objects_of(base)
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        other = opened(store)
        for attempt in attempts(other):
            with pytest.raises(SpecError, match="view='chunks'"):
                attempt()
        assert {key: objects_of(base)[key] for key in before if "/c/" in key} == {
            key: value for key, value in before.items() if "/c/" in key
        }
        assert_array_equal(opened(ShardingStore(base))[3], NUMBERS[3])
    z = opened(store)
    with zarr.config.set({"codec_pipeline.path": THEIRS}):
        taken_over: Any = Array(AsyncArray(metadata=z.metadata, store_path=z.store_path))
    for attempt in attempts(taken_over)[:-1]:
        with pytest.raises(SpecError, match="open the array again"):
            attempt()


@pytest.mark.parametrize("pipeline", [None, THEIRS])
def test_documents_outside_the_store_are_refused(pipeline: str | None) -> None:
    """In a wrapper, and as copies: with chunks under their keys, nothing is taken for shards."""
    store = filled({})
    values = dict(ShardingMapping(store))
    copy: Any = MemoryStore(
        {k: zarr.core.buffer.cpu.Buffer.from_bytes(v) for k, v in values.items()}
    )
    wrapped = LoggingStore(store, log_level="ERROR")
    with zarr.config.set({"codec_pipeline.path": pipeline} if pipeline else {}):
        for where in (copy, wrapped, ShardingStore(copy), ShardingStore(copy, view="shards")):
            with pytest.raises((SpecError, UnsupportedError), match=REFUSAL):
                opened(where)[0, 0]
    with pytest.raises(UnsupportedError, match="view='chunks'"):
        ShardingMapping({}, native="passthrough")["a/zarr.json"] = values["a/zarr.json"]
    by_list = MemoryStore()
    filled(by_list, declaration="storage_transformers")
    with pytest.raises(ValueError, match=r"zarr_shardstore|view='chunks'"):
        _ = zarr.open_group(by_list, mode="r")["a"]
    with pytest.raises(SpecError, match="view='chunks'"):
        Array(AsyncArray(metadata=opened(store).metadata, store_path=zarr.storage.StorePath(copy)))


def test_other_processes(tmp_path: Path) -> None:
    """zarr knows the document where a store was made or unpickled with the option, only there."""
    store = filled(tmp_path)
    z = opened(store)
    code = (
        "import pickle, sys, zarr, zarr_shardstore as s\n"
        "from zarr.registry import get_chunk_key_encoding_class as get\n"
        f"s.ShardingStore({str(tmp_path)!r})\n"
        "try:\n    get('zarr_shardstore')\n"
        "except KeyError:\n    pass\n"
        "else:\n    raise SystemExit(7)\n"
        "z, store = pickle.load(sys.stdin.buffer)\n"
        "assert z.shards == zarr.open_array(store, path='a').shards == (8, 4)\n"
        "z[3, 3] = 7\nz.resize((8, 16))\n"
    )
    given = pickle.dumps((z, store))
    assert subprocess.run([sys.executable, "-c", code], input=given, check=False).returncode == 0
    expected = NUMBERS[:8].copy()
    expected[3, 3] = 7
    assert_array_equal(opened(store)[:], expected)


# ---------------------------------------------------------------------------- options


def test_the_option() -> None:
    base = MemoryStore()
    store = ShardingStore(base, view="shards")
    assert repr(store) == f"ShardingStore({base!r}, view='shards')"
    assert repr(ShardingMapping(store)) == f"ShardingMapping({base!r}, view='shards')"
    assert store == ShardingStore(base, view="shards") != ShardingStore(base)
    create(ShardingStore(base, 2))
    for other in (pickle.loads(pickle.dumps(store)), store.with_read_only(True)):
        assert repr(other).count("view='shards'") == 1
    assert opened(store.with_read_only(True)).shards == (4, 4)
    old = pickle.loads(pickle.dumps(ShardingStore(base)))
    del vars(old._engine.options)["view"]
    assert opened(pickle.loads(pickle.dumps(old))).shards is None
    for bad in ("shard", None, ["shards"]):
        with pytest.raises(SpecError, match="view is 'chunks' or 'shards'"):
            ShardingStore(base, view=bad)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="leave native away"):
        ShardingStore(base, view="shards", native="passthrough")


@pytest.mark.parametrize("view", ["chunks", "shards"])
def test_urls(tmp_path: Path, view: Any) -> None:
    filled(tmp_path)
    z: Any = zarr.open_array(f"shard://?view={view}::file://{tmp_path}", path="a", mode="r+")
    assert z.shards == (None if view == "chunks" else (8, 4))
    z[3:9, 3:9] = 0
    z.resize((7, 12))
    z.attrs["x"] = 1
    expected = NUMBERS[:7, :12].copy()
    expected[3:9, 3:9] = 0
    for each in (z, opened(tmp_path), opened(ShardingStore(tmp_path))):
        assert_array_equal(each[:], expected)


# --------------------------------------------------------------------------- packages


def test_dask(tmp_path: Path) -> None:
    """Tasks for 8 shards of 8 chunks, as of an array that zarr shards itself."""
    da = pytest.importorskip("dask.array")
    z, native = opened(filled(tmp_path)), opened(tmp_path)
    for array in (z, native):
        by_shard = da.from_zarr(array, chunks=array.shards)
        assert (by_shard.numblocks, da.from_zarr(array).npartitions) == ((2, 4), 64)
        with pytest.importorskip("dask").config.set({"array.chunk-size": "64 B"}):
            assert da.from_array(array).chunks == by_shard.chunks
    assert_array_equal(by_shard.compute(scheduler="threads"), NUMBERS)
    da.store(by_shard + 1, z, lock=False)
    assert_array_equal(native[:], NUMBERS + 1)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_xarray(tmp_path: Path) -> None:
    xr = pytest.importorskip("xarray")
    store = ShardingStore(tmp_path, (4, 2), view="shards")
    written = xr.Dataset({"v": (("y", "x"), NUMBERS)})
    written.to_zarr(store, encoding={"v": {"chunks": (2, 2)}}, zarr_format=3)
    ds = xr.open_zarr(store, chunks=None)
    assert ds.v.encoding["shards"] == (8, 4)
    by_shard = ds.chunk(dict(zip(ds.v.dims, ds.v.encoding["shards"], strict=True)))
    assert by_shard.v.data.numblocks == (2, 4)
    by_shard.isel(y=slice(0, 8)).to_zarr(store, region={"y": slice(0, 8), "x": slice(None)})
    by_shard.to_zarr(tmp_path / "copy.zarr", zarr_format=3, consolidated=False)
    copy = opened(tmp_path / "copy.zarr", "v")
    assert (copy.chunks, copy.shards) == SHOWN
    assert_array_equal(copy[:], NUMBERS)
