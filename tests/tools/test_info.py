"""What `get_shard_info` says of a store, against numbers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zarr

from tests.support.bases import BASES, put
from tests.support.shard_bytes import MISSING, index_of
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnsupportedError,
    get_shard_info,
    is_sharded,
)

GOLDEN = Path(__file__).parents[1] / "interop" / "golden" / "zarr218"

INDEX = 6 * 16 + 4
"""Bytes of the index of a shard of 2 × 3 chunks, with checksum."""


def make(store: Any, **options: Any) -> zarr.Array[Any]:
    """5 × 7 chunks of 2 bytes, so 3 × 3 shards of 2 × 3 chunks; 6 bytes for each chunk of 3."""
    return zarr.create_array(
        store,
        **{
            "name": "a",
            "shape": (5, 21),
            "chunks": (1, 3),
            "dtype": "uint16",
            "compressors": None,
            **options,
        },
    )


def info_of(base: Any, **options: Any) -> Any:
    (array,) = get_shard_info(base, **options).arrays
    return array


@pytest.mark.parametrize("kind", BASES)
def test_figures_of_a_v3_array(kind: str) -> None:
    """Shapes, grids, counts and bytes, through every kind of base store."""
    base = BASES[kind]()
    store = ShardingStore(base, chunks_per_shard=(2, 3))
    z = make(store)
    z[0, :] = 1  # 7 chunks in the 3 shards of the first row: 3, 3 and 1
    z[4, 20] = 1  # 1 chunk in the last shard
    ShardingMapping(store).flush()
    info = info_of(base)
    assert info == type(info)(
        path="a",
        hierarchy="v3",
        declaration="codec",
        read_by="every v3 reader",
        shape=(5, 21),
        dtype="uint16",
        chunk_shape=(1, 3),
        shard_shape=(2, 9),
        chunks_per_shard=(2, 3),
        chunk_grid_shape=(5, 7),
        shard_grid_shape=(3, 3),
        n_chunks=8,
        n_chunks_of_grid=35,
        n_objects=4,
        n_objects_of_grid=9,
        fill=8 / 35,
        stored_nbytes=8 * 6 + 4 * INDEX,
        chunk_nbytes=8 * 6,
        index_nbytes=4 * INDEX,
        dead_nbytes=0,
        smallest=6 + INDEX,
        mean=12.0 + INDEX,
        largest=18 + INDEX,
    )


def test_figures_of_a_v2_array() -> None:
    """The declaration is the marker in the filters; the data type is spelled as in the document."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base, chunks_per_shard=(2, 3)), zarr_format=2, dtype=">u2")
    z[0, :] = 1
    array = info_of(base)
    assert (array.hierarchy, array.declaration, array.dtype) == ("v2", "filters", ">u2")
    assert (array.chunk_shape, array.shard_shape) == ((1, 3), (2, 9))
    assert (array.n_chunks, array.n_objects, array.n_objects_of_grid) == (7, 3, 9)
    assert array.stored_nbytes == 7 * 6 + array.index_nbytes
    assert is_sharded(base, "a")


def test_figures_of_draft_arrays() -> None:
    """Written by zarr-python 2.18; a 0-d array has one shard with one entry."""
    arrays = {array.path: array for array in get_shard_info(GOLDEN).arrays}
    assert set(arrays) == {"a/cube", "a/edge", "holes", "line", "point"}
    files = {
        path: [f for f in (GOLDEN / "data" / "root" / path).rglob("*") if f.is_file()]
        for path in arrays
    }
    m = ShardingMapping(GOLDEN)
    for path, array in arrays.items():
        assert (array.hierarchy, array.declaration) == ("draft", "storage_transformers")
        assert array.n_objects == len(files[path]), path
        assert array.stored_nbytes == sum(f.stat().st_size for f in files[path])
        assert array.n_chunks == len(m.list_prefix(f"data/root/{path}/"))
        # zarr 2.18 packs without gaps, and without checksum.
        assert array.stored_nbytes == array.chunk_nbytes + array.index_nbytes
        assert not array.dead_nbytes
        assert not array.errors
    assert arrays["point"].shape == ()
    assert (arrays["point"].n_chunks, arrays["point"].n_objects_of_grid) == (1, 1)


def test_figures_of_an_array_that_zarr_sharded(tmp_path: Path) -> None:
    """Native shards, the index at the start: its inner chunks are the chunks."""
    shards: Any = {"shape": (4,), "index_location": "start"}
    z = zarr.create_array(
        tmp_path, shape=(8,), chunks=(2,), shards=shards, dtype="u1", compressors=None
    )
    z[:6] = 1
    array = info_of(tmp_path)
    assert (array.path, array.declaration, array.chunks_per_shard) == ("", "codec", (2,))
    assert (array.n_chunks, array.n_objects, array.fill) == (3, 2, 0.75)
    assert array.stored_nbytes == 3 * 2 + 2 * (2 * 16 + 4)
    assert array.dead_nbytes == 0
    places = [(36, 2), (30, 8)]  # the second begins in the index
    (tmp_path / "c/0").write_bytes(index_of(places) + b"data")
    array = info_of(tmp_path)
    assert (array.n_errors, array.n_chunks, array.chunk_nbytes) == (1, 3, 2 + 2)
    assert array.dead_nbytes == 2


def test_figures_of_an_array_without_shards() -> None:
    """Objects are chunks."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base), chunk_key_encoding={"name": "v2", "separator": "."})
    z[0, :4] = 1
    array = info_of(base)
    assert (array.declaration, array.shard_shape, array.chunks_per_shard) == (None, None, None)
    assert (array.n_chunks, array.n_objects, array.n_objects_of_grid) == (2, 2, 35)
    assert (array.stored_nbytes, array.chunk_nbytes, array.index_nbytes) == (12, 12, 0)
    assert not is_sharded(base)
    assert not is_sharded(base, "a")


def shard_of(entries: dict[int, tuple[int, int]], n_data: int) -> bytes:
    """A shard of 6 entries made by hand: (offset, nbytes) by entry id, after `n_data` bytes."""
    return b"x" * n_data + index_of(entries.get(i, (MISSING, MISSING)) for i in range(6))


@pytest.mark.parametrize(
    ("entries", "n_data", "dead"),
    [
        ({0: (10, 6), 5: (30, 6)}, 50, 50 - 12),
        ({0: (0, 20), 1: (10, 20), 2: (12, 5)}, 40, 10),  # overlapping: bytes count once
        ({0: (0, 20), 1: (0, 20)}, 20, 0),  # two chunks of the same bytes
        ({}, 7, 7),
        ({3: (4, 0)}, 4, 4),  # an empty chunk
    ],
)
def test_dead_bytes_are_in_no_entry_and_not_in_the_index(
    entries: dict[int, tuple[int, int]], n_data: int, dead: int
) -> None:
    """Each byte counts once, so there are never fewer than none."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    base["a/c/1/1"] = shard_of(entries, n_data)
    array = info_of(base)
    assert array.dead_nbytes == dead
    assert array.n_chunks == len(entries)
    assert array.chunk_nbytes == sum(nbytes for _, nbytes in entries.values())
    assert not array.errors


def test_entries_outside_the_array_are_no_chunks_and_their_bytes_are_not_dead() -> None:
    """The last shard hangs over the edge; shards outside the grid are not looked at."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    base["a/c/2/2"] = shard_of({0: (0, 5), 1: (5, 6), 3: (11, 7)}, 20)
    base["a/c/3/0"] = base["a/c/0/3"] = b"outside"
    base["a/c/0/00"] = base["a/c/0/0/0"] = base["a/c/x"] = b"no shard"
    array = info_of(base)
    assert (array.n_chunks, array.chunk_nbytes) == (1, 5)
    assert array.dead_nbytes == 2
    assert array.n_objects == 1
    assert array.errors == ()


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (b"short", "takes 100 bytes"),
        (bytes(120), "checksum"),
        (shard_of({0: (0, 6), 1: (3, 2**63)}, 6), r"chunk 'a/c/2/4', bytes \[3, "),
        (shard_of({1: (2**64 - 2, 5)}, 6), "leaves the data"),
    ],
)
def test_a_damaged_shard_is_reported_and_blocks_no_other(shard: bytes, says: str) -> None:
    """Its size counts, as do its entries, as in a listing; nothing gets negative."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base, chunks_per_shard=(2, 3)))
    z[0, :] = 1
    base["a/c/1/1"] = shard
    array = info_of(base)
    (error,) = array.errors
    assert "a/c/1/1" in error
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(error)
    assert array.n_errors == 1
    assert array.n_objects == 4
    assert array.stored_nbytes == 7 * 6 + 3 * INDEX + len(shard)
    assert array.n_chunks >= 7
    assert 0 <= array.dead_nbytes <= len(shard)
    assert array.chunk_nbytes == (7 + says.startswith("chunk")) * 6, "damaged entries have no size"


def test_a_few_errors_are_kept_and_all_are_counted() -> None:
    """A store with thousands of damaged shards has a report that can be read."""
    base: dict[str, bytes] = {}
    z = make(ShardingStore(base, chunks_per_shard=(1, 1)))
    z[:] = 1
    for key in [key for key in base if key.startswith("a/c/")]:
        base[key] = b"damaged"
    array = info_of(base)
    assert (array.n_errors, len(array.errors), array.n_chunks) == (35, 20, 0)


@pytest.mark.parametrize("stack", [["crc32c", "sharding"], ["sharding", "crc32c"], ["crc32c"]])
def test_stacks_of_transformers(stack: list[str]) -> None:
    """Shards are looked into also through the transformers below them."""
    base: dict[str, bytes] = {}
    is_whole = stack[-1] == "crc32c"
    z = make(ShardingStore(base, chunks_per_shard=(2, 3), storage_transformers=stack))
    z[0, :] = 1
    array = info_of(base)
    objects = [value for key, value in base.items() if key.startswith("a/c/")]
    assert array.declaration == "storage_transformers"
    assert array.n_chunks == 7
    assert array.n_objects == len(objects)
    assert array.stored_nbytes == sum(map(len, objects))
    assert array.is_sharded == ("sharding" in stack) == is_sharded(base)
    assert array.dead_nbytes == 0
    assert "crc32c" in array.notes[0]
    if array.is_sharded and is_whole:
        assert array.stored_nbytes == array.chunk_nbytes + array.index_nbytes + 4 * len(objects)
    if array.is_sharded:
        base["a/c/0/0"] = b"damage" + base["a/c/0/0"][6:]
        damaged = info_of(base)
        assert damaged.n_errors == (1 if is_whole else 0), "only the whole is checked"
        assert damaged.n_chunks == (4 if is_whole else 7)


def test_bad_documents_are_reported_and_block_nothing() -> None:
    """No JSON, a declaration that contradicts itself, an extension that is not known."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2)
    make(store, name="good")[:] = 1
    for name in ("grid", "stack", "member", "v2"):
        make(ShardingStore(base), name=name, zarr_format=2 if name == "v2" else 3)
    doc = json.loads(base["good/zarr.json"])
    doc["codecs"][0]["configuration"]["chunk_shape"] = [5, 5]
    base["bad/zarr.json"] = json.dumps(doc).encode()
    doc = json.loads(base["stack/zarr.json"])
    base["stack/zarr.json"] = json.dumps({**doc, "storage_transformers": [{"name": "x"}]}).encode()
    doc = json.loads(base["grid/zarr.json"])
    base["grid/zarr.json"] = json.dumps({**doc, "chunk_grid": {"name": "odd"}}).encode()
    doc = json.loads(base["member/zarr.json"])
    base["member/zarr.json"] = json.dumps({**doc, "y": {"must_understand": True}}).encode()
    base["v2/.zarray"] = b"{no json"
    base["torn/zarr.json"] = b'{"node_type'
    base["meta/root/old.array.json"] = b"[]"
    info = get_shard_info(base)
    errors = {array.path: array.errors for array in info.arrays}
    assert errors["good"] == ()
    assert "cannot be cut" in errors["bad"][0]
    arrays = {array.path: array for array in info.arrays}
    stack, odd, member = arrays["stack"], arrays["grid"], arrays["member"]
    assert "'x' is not known" in stack.notes[0]
    for path in ("v2", "torn", "old"):
        assert "no JSON" in errors[path][0]
    assert (odd.shape, odd.n_errors) == ((5, 21), 0)
    assert "'odd' is not known" in odd.notes[0]
    assert "member 'y' must be understood" in member.notes[0]
    assert member.read_by == "every v3 reader that knows y"
    assert (info.n_errors, info.n_unknown) == (4, 3)
    with pytest.raises(SpecError, match="no JSON"):
        is_sharded(base, "torn")
    with pytest.raises(UnsupportedError, match="'x' is not known"):
        is_sharded(base, "stack")


def test_native_shards_that_are_left_to_zarr_are_sharded() -> None:
    """Their shards are counted, not their chunks; the note says so."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))[0] = 1
    assert info_of(base).notes == ()
    doc = json.loads(base["a/zarr.json"])
    mark = {"must_understand": False, "native": "passthrough"}
    base["a/zarr.json"] = json.dumps({**doc, "zarr_shardstore": mark}).encode()
    array = info_of(base)
    assert is_sharded(base, "a")
    assert (array.declaration, array.chunk_shape, array.n_chunks) == (None, (2, 9), 3)
    assert "left to zarr" in array.notes[0]


def test_paths_and_patterns() -> None:
    """Paths, patterns and the root; what names no array is an error."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard={"x/*": 2})
    for name in ("x/a", "x/b", "y"):
        make(store, name=name)

    def of(*paths: str) -> list[str]:
        return [array.path for array in get_shard_info(base, paths=paths).arrays]

    assert of("/y/", "x/a") == ["x/a", "y"]
    assert of("x/*", "x/a") == of("x") == of("x/") == ["x/a", "x/b"]
    assert of("") == of("x", "y") == ["x/a", "x/b", "y"]
    assert is_sharded(base, "x/a")
    assert not is_sharded(base, "y")
    assert is_sharded(ShardingStore(base))
    for path in ("z", "z*", "x/c"):
        with pytest.raises(SpecError, match="no array has the path"):
            of(path)
    with pytest.raises(SpecError, match="no array at 'z'"):
        is_sharded(base, "z")
    assert info_of(base, paths="x/a").path == "x/a"
    assert get_shard_info({}).arrays == ()
    assert not is_sharded({})


def test_the_chunks_of_a_migrated_array_are_counted_once() -> None:
    """A v2 and a v3 document at one path, of the same keys."""
    base: dict[str, bytes] = {}
    options: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "."}}
    make(ShardingStore(base), zarr_format=2, **options)[0] = 1
    v3: dict[str, bytes] = {}
    make(ShardingStore(v3), **options)
    base["a/zarr.json"] = v3["a/zarr.json"]
    info = get_shard_info(base)
    assert [(a.hierarchy, a.n_chunks, a.shares_objects) for a in info.arrays] == [
        ("v2", 7, True),
        ("v3", 7, False),
    ]
    assert info.n_chunks == info.n_objects == 7


def test_totals_and_json() -> None:
    """The totals are the sums; `as_dict` is what JSON gives back."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard={"b": 2})
    for name in ("a", "b"):
        make(store, name=name)[0] = 1
    info = get_shard_info(base)
    found = info.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["totals"]["n_sharded"] == info.n_sharded == 1
    for name, total in found["totals"].items():
        if name != "n_sharded":
            assert total == sum(array[name] for array in found["arrays"]), name
    assert found["arrays"][1]["shard_shape"] == [2, 6]


def test_arrays_in_any_base_store_are_looked_at_as_stored() -> None:
    """A store that wraps is looked through; what lies beside the chunks does not disturb."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))[0] = 1
    put(base, "a/c/readme.txt", b"hello")
    put(base, "a/extra/0/0", b"hello")
    assert info_of(ShardingStore(base)) == info_of(base)
    assert info_of(ShardingMapping(base)).n_objects == 3
