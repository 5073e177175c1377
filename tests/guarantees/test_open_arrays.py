"""An array stays open while another process converts it, replaces it, or changes its length.

The open array gives no fill value for a chunk that is stored, and loses no write: it raises an
error until it is opened again. On local files.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import LocalStore

from zarr_shardstore import (
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    ShardLoader,
    ShardStoreError,
    UnsupportedError,
    reshard,
    shard_store,
    to_native,
    unshard_store,
)

VALUES = np.arange(1, 257, dtype="u2").reshape(16, 16)
CHUNKS = [np.s_[i : i + 2, j : j + 2] for i in range(0, 16, 2) for j in range(0, 16, 2)]
NEW = 999


def make(path: Path, chunks_per_shard: Any, zarr_format: Any = 3, **others: Any) -> None:
    store = ShardingStore(path, chunks_per_shard)
    options: Any = {"shape": (16, 16), "chunks": (2, 2), "dtype": "u2", "fill_value": 0}
    options |= {"compressors": None, **others}
    zarr.create_array(store, name="a", zarr_format=zarr_format, **options)[...] = VALUES


def replace(path: Path, chunks_per_shard: Any = 8, **others: Any) -> None:
    shutil.rmtree(path / "a")
    make(path, chunks_per_shard, **others)


def replace_chunks(path: Path) -> None:
    """Keep chunks per shard, and the bytes of a chunk."""
    replace(path, 2, chunks=(4, 1))


def replace_small_chunks(path: Path) -> None:
    replace(path, 2, chunks=(1, 1))


def replace_cut(path: Path) -> None:
    replace(path, (4, 1))


def replace_type(path: Path) -> None:
    replace(path, 2, dtype="f2")


def replace_codecs(path: Path) -> None:
    replace(path, 2, compressors="auto")


def replace_format(path: Path) -> None:
    replace(path, 2, zarr_format=2)


def set_attributes(path: Path) -> None:
    zarr.open_array(ShardingStore(path), path="a").attrs["unit"] = "m"


def grow(path: Path) -> None:
    zarr.open_array(ShardingStore(path), path="a").resize((40, 16))


def shrink_and_grow(path: Path) -> None:
    z: Any = zarr.open_array(ShardingStore(path), path="a")
    z.resize((16, 8))
    z.resize((16, 16))
    z[:, 8:] = VALUES[:, 8:]


def append(path: Path) -> None:
    ShardingStore(path).append_arrays({"a": VALUES})


def append_shards(path: Path) -> None:
    with zarr.config.set({"array.rectilinear_chunks": True}):
        z: Any = zarr.open_array(ShardingStore(path, view="shards"), path="a")
        z.append(VALUES)


def compact(path: Path) -> None:
    ShardingStore(path).compact_sync()


def reshard_to_8(path: Path) -> None:
    reshard(path, 8)


def reshard_to_rows(path: Path) -> None:
    """Make shards with as many entries as before."""
    reshard(path, (1, 4))


def reshard_to_columns(path: Path) -> None:
    reshard(path, (4, 1))


def shard(path: Path) -> None:
    shard_store(path, chunks_per_shard=4)


OTHER_ARRAYS: list[tuple[int | None, Callable[[Path], Any]]] = [
    (2, reshard_to_8),
    (2, reshard_to_rows),
    (2, unshard_store),
    (2, to_native),
    (2, replace),
    (2, replace_chunks),
    (2, replace_small_chunks),
    (2, replace_type),
    (2, replace_codecs),
    (2, replace_format),
    (None, shard),
    (None, replace),
]
SAME_ARRAYS = [set_attributes, grow, shrink_and_grow, append, compact]


@pytest.fixture(scope="module")
def other() -> Iterator[Executor]:
    """Another process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize("way", ["array", "batch", "write_array"])
@pytest.mark.parametrize("change", [reshard_to_8, reshard_to_columns, unshard_store, replace_cut])
def test_a_write_over_shards_of_an_array_that_was_replaced_changes_nothing(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any], way: str
) -> None:
    """Some of the shards would become empty; what is at their keys is something else now."""
    make(tmp_path, (1, 4))
    store = ShardingStore(tmp_path)
    z: Any = zarr.open_array(store, path="a")
    z[6:12, 4:10] = VALUES[6:12, 4:10]
    other.submit(change, tmp_path).result()
    files = {path: path.read_bytes() for path in tmp_path.glob("a/c/**/*") if path.is_file()}
    with suppress(ShardStoreError), store.batch() if way == "batch" else nullcontext():
        if way == "write_array":
            store.write_array("a", np.s_[6:, 6:], np.zeros((10, 10), "u2"))
        else:
            z[6:, 6:] = 0
    if way != "write_array":  # it may open the array again
        assert {p: p.read_bytes() for p in tmp_path.glob("a/c/**/*") if p.is_file()} == files
    found: Any = zarr.open_array(ShardingStore(tmp_path), path="a")[...]
    assert np.array_equal(found[:6], VALUES[:6])
    assert np.array_equal(found[:, :6], VALUES[:, :6])


@pytest.mark.parametrize("state", ["used", "forgets", "unused", "pickled"])
@pytest.mark.parametrize("view", ["chunks", "shards"])
@pytest.mark.parametrize(("before", "change"), OTHER_ARRAYS)
def test_an_open_array_that_became_another_one_is_refused(
    tmp_path: Path,
    other: Executor,
    before: int | None,
    change: Callable[[Path], Any],
    view: Any,
    state: str,
) -> None:
    """Also if the process reads all documents again, as after each change of one of them; or if it
    has the array by a pickle, or uses it after the change only, beside the new one."""
    if change is replace_format and state in ("unused", "pickled"):
        pytest.skip("the document of this format is gone: the array counts as never written")
    make(tmp_path, before)
    store = ShardingStore(tmp_path, view=view)
    z: Any = zarr.open_array(store, path="a")
    assert state not in ("used", "forgets") or (z[:2] == VALUES[:2]).all()
    pickled = pickle.dumps(z)
    other.submit(change, tmp_path).result()
    forgets = state == "forgets"
    if state == "unused":
        store.read_array("a", 0)
    if state == "pickled":
        z = pickle.loads(pickled)

    for chunk in CHUNKS:
        if forgets:
            zarr.create_group(store, path="other", overwrite=True)
        try:
            found = z[chunk]
        except ShardStoreError:
            continue
        assert (found == VALUES[chunk]).all()
    expected = VALUES.copy()
    for chunk, value in zip(CHUNKS, [NEW, 0] * 32, strict=True):  # zeros erase chunks
        if forgets:
            zarr.create_group(store, path="other", overwrite=True)
        with suppress(ShardStoreError):
            z[chunk] = value
            expected[chunk] = value
    again: Any = zarr.open_array(ShardingStore(tmp_path), path="a")
    assert (again[...] == expected).all()
    assert np.array_equal(zarr.open_array(store, path="a")[...], expected)


@pytest.mark.parametrize("view", ["chunks", "shards"])
@pytest.mark.parametrize(
    "change", [*(each for _, each in OTHER_ARRAYS[:8]), set_attributes, compact]
)
@pytest.mark.parametrize(
    "use",
    [
        lambda z: z.attrs.update(unit="m"),
        lambda z: z.append(VALUES),
        lambda z: z.resize((40, 16)),
        lambda z: zarr.open_group(z.store_path.store).attrs.update(x=1),
    ],
    ids=["attributes", "append", "resize", "consolidated"],
)
def test_a_document_of_an_array_that_became_another_one_is_not_stored(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any], use: Any, view: Any
) -> None:
    """Each reader would take shards for chunks, or bytes for another type."""
    store = ShardingStore(tmp_path, view=view)
    zarr.create_group(store)
    make(tmp_path, 2)
    consolidated(tmp_path, lambda _: None)
    z: Any = zarr.open_array(store, path="a")
    group = zarr.open_group(store)
    other.submit(change, tmp_path).result()
    expected = np.asarray(zarr.open_array(ShardingStore(tmp_path), path="a")[...])
    refused = (ShardConflictError, UnsupportedError)
    with suppress(*refused):
        use(z)
    group.attrs["y"] = 2
    opened: list[Any] = [
        zarr.open_array(ShardingStore(tmp_path), path="a"),
        from_consolidated(ShardingStore(tmp_path)),
    ]
    opened.append(zarr.open_array(LocalStore(tmp_path), path="a"))
    for each in opened:
        assert np.array_equal(each[:16, :16], expected)


RECORD = [("x", "i4"), ("y", "f4")]
FIELDS = [{"name": "x", "data_type": "int32"}, {"name": "y", "data_type": "float32"}]
PAIRS = [["x", "int32"], ["y", "float32"]]
STRUCT = {"name": "struct", "configuration": {"fields": FIELDS}}
STRUCTURED = {"name": "structured", "configuration": {"fields": PAIRS}}
ENDIAN = [{"name": "endian", "configuration": {"endian": "little"}}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", ["chunks", "shards"])
@pytest.mark.parametrize(
    ("zarr_format", "dtype", "spelling"),
    [
        (3, "variable_length_bytes", {"data_type": "bytes"}),
        (3, RECORD, {"data_type": STRUCT, "fill_value": {"x": 0, "y": 0.0}}),
        (3, RECORD, {"data_type": STRUCTURED, "fill_value": "AAAAAAAAAAA="}),
        (3, "u2", {"codecs": ENDIAN}),
        (2, "u1", {"dtype": "<u1"}),
        (2, "i1", {"dtype": ">i1"}),
        (2, ">i4", {"dtype": ">i4"}),
    ],
)
def test_what_a_writer_spelled_in_another_way_is_no_other_array(
    zarr_format: Any, dtype: Any, spelling: dict[str, Any], view: Any, tmp_path: Path
) -> None:
    """zarr spells it in its own way when it stores the document again."""
    store, name = ShardingStore(tmp_path, 2, view=view), "zarr.json"
    options: Any = {"shape": (8,), "chunks": (2,), "zarr_format": zarr_format}
    zarr.create_array(store, name="a", dtype=dtype, compressors=None, **options)
    if zarr_format == 2:
        name = ".zarray"
    doc = json.loads((tmp_path / "a" / name).read_text())
    codec = doc["codecs"][0]["configuration"] if "codecs" in doc else {}
    if "codecs" in spelling and "codecs" in codec:
        spelling = {"codecs": [{"name": "sharding_indexed", "configuration": codec | spelling}]}
    (tmp_path / "a" / name).write_text(json.dumps(doc | spelling))
    try:
        z: Any = zarr.open_array(ShardingStore(tmp_path, view=view), path="a")
    except ValueError:
        pytest.skip("this zarr does not know the spelling")
    one = b"x" if z.dtype == object else 1
    rows = np.full(4, one, z.dtype)
    z[:4] = rows
    z.attrs["unit"] = "m"
    z.append(np.full(8, one, z.dtype))
    z[:4] = rows
    z.resize((20,))
    again: Any = zarr.open_array(ShardingStore(tmp_path), path="a")
    assert (dict(again.attrs), again.shape) == ({"unit": "m"}, (20,))
    assert np.array_equal(z[:4], rows)
    assert np.array_equal(again[:], z[:])


@pytest.mark.parametrize("change", [reshard_to_rows, reshard_to_columns, replace_type])
def test_a_read_across_the_former_edge_has_one_layout(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any]
) -> None:
    """Chunks inside the edge are not looked for in the former shards."""
    make(tmp_path, (2, 2))
    mapping = ShardingMapping(tmp_path)
    ranges: Any = [(f"a/c/{i}/0", (0, None)) for i in range(16)]
    assert mapping.get_partial_values(ranges)[8] is None
    for each in (change, append):
        other.submit(each, tmp_path).result()
    expected: list[Any] = ShardingMapping(tmp_path).get_partial_values(ranges)
    for _ in range(2):
        with suppress(ShardConflictError):
            assert mapping.get_partial_values(ranges) == expected


@pytest.mark.parametrize(
    ("before", "change"), [each for each in OTHER_ARRAYS if to_native not in each]
)
def test_sizes_of_an_open_array_that_became_another_one_are_refused(
    tmp_path: Path, other: Executor, before: int | None, change: Callable[[Path], Any]
) -> None:
    """No index of another array is taken for a damaged one, and no shard for a chunk."""
    make(tmp_path, before)
    store = ShardingStore(tmp_path)
    assert sync(store.getsize("a/c/3/3")) == 8
    other.submit(change, tmp_path).result()
    for call in (store.exists, store.getsize):
        with pytest.raises(ShardConflictError, match="open it again"):
            sync(call("a/c/3/3"))


@pytest.mark.parametrize("change", [each for cps, each in OTHER_ARRAYS[:3] if cps])
@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.locate(["a/c/1/2"]),
        lambda m: m.chunks_initialized("a"),
        list,
        lambda m: m.list_dir("a/c/1/"),
        lambda m: m.list_prefix("a/c/1"),
        lambda m: m.erase_prefix("a/c/1/"),
        lambda m: m.erase_prefix("a/c/1/2"),
    ],
)
def test_places_and_listings_of_an_array_that_became_another_one_are_refused(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any], call: Any
) -> None:
    make(tmp_path, 2)
    mapping = ShardingMapping(tmp_path)
    assert len(mapping.list_prefix("a/c/")) == 64
    other.submit(change, tmp_path).result()
    with pytest.raises(ShardConflictError, match="open it again"):
        call(mapping)
    again: Any = zarr.open_array(ShardingStore(tmp_path), path="a")
    assert (again[...] == VALUES).all()
    mapping.refresh()
    assert len(mapping.list_prefix("a/c/")) == 64


@pytest.mark.parametrize("lengths", [None, [[4, 12], [10, 6]]])
@pytest.mark.parametrize("change", [append, append_shards, grow, shrink_and_grow])
def test_listings_follow_an_array_that_another_process_has_made_longer(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any], lengths: Any
) -> None:
    make(tmp_path, (2, 2))
    if lengths:
        if change is append_shards and "rectilinear_chunks" not in zarr.config.get("array"):
            pytest.skip("zarr before 3.2 has no lists")
        reshard(tmp_path, shards=lengths)
    calls: list[Callable[[ShardingMapping], Any]] = [
        lambda m: set(m.list_prefix("a/c/")),
        lambda m: set(m.list_prefix("a/c/1")),
        lambda m: [*map(sorted, m.list_dir("a/c/"))],
        lambda m: [*map(sorted, m.list_dir("a/c/11/"))],
        lambda m: m.chunks_initialized("a").tolist(),
        lambda m: m.erase_prefix("a/c/1"),
    ]
    open_ones = [ShardingMapping(tmp_path) for _ in calls]
    for mapping in open_ones:
        assert len(mapping.list_prefix("a/c/")) == 64
    other.submit(change, tmp_path).result()
    for call, mapping in zip(calls, open_ones, strict=True):
        assert call(mapping) == call(ShardingMapping(tmp_path))
    assert not [*ShardingMapping(tmp_path).list_prefix("a/c/1")]


@pytest.mark.parametrize("names", [["sharding", "crc32c"], ["crc32c", "sharding"]])
def test_listings_follow_a_longer_array_with_other_transformers(
    tmp_path: Path, other: Executor, names: list[str]
) -> None:
    store = ShardingStore(tmp_path, 2, storage_transformers=names)
    options: Any = {"shape": (16, 16), "chunks": (2, 2), "dtype": "u2", "fill_value": 0}
    zarr.create_array(store, name="a", **options)[...] = VALUES
    mapping = ShardingMapping(tmp_path)
    assert len(mapping.list_prefix("a/c/")) == 64
    other.submit(append, tmp_path).result()
    assert set(mapping.list_prefix("a/c/")) == set(ShardingMapping(tmp_path).list_prefix("a/c/"))


@pytest.mark.parametrize("change", [replace_type, replace_codecs, replace_chunks])
def test_an_index_that_another_store_of_the_process_has_cached_ends_no_refusal(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any]
) -> None:
    """Nor does one that a refused read has cached, however often a loader tries again."""
    make(tmp_path, 2)
    store = ShardingStore(tmp_path)
    z: Any = zarr.open_array(store, path="a")
    assert (z[...] == VALUES).all()
    loader = ShardLoader(ShardingStore(tmp_path), "a", batch_size=2)
    other.submit(change, tmp_path).result()
    time.sleep(0.2)  # a younger file is not cached
    for _ in range(2):
        assert zarr.open_array(ShardingStore(tmp_path), path="a")[...] is not None
    reads: list[Callable[[], Any]] = [lambda: z[...], lambda: z[:2, :2], lambda: list(loader)]
    for read in reads * 10:
        with pytest.raises(ShardConflictError, match="open it again"):
            read()


def consolidated(path: Path, change: Callable[[Path], Any]) -> None:
    change(path)
    with warnings.catch_warnings(action="ignore"):  # v3 does not specify it
        zarr.consolidate_metadata(LocalStore(path))


def from_consolidated(store: ShardingStore) -> Any:
    """Open the array by the copy of its document alone, as xarray does."""
    group: Any = zarr.open_group(store, mode="r", use_consolidated=True)
    return group["a"]


def test_an_array_that_was_replaced_is_opened_again_by_consolidated_metadata(
    tmp_path: Path, other: Executor
) -> None:
    zarr.create_group(LocalStore(tmp_path))
    consolidated(tmp_path, partial(make, chunks_per_shard=2))
    store = ShardingStore(tmp_path)
    z = from_consolidated(store)
    assert (z[:2] == VALUES[:2]).all()
    other.submit(consolidated, tmp_path, replace_type).result()
    with pytest.raises(ShardStoreError, match="open it again"):
        z[8:]
    again = from_consolidated(store)
    assert (again.dtype, again[...].tolist()) == ("f2", VALUES.tolist())


@pytest.mark.parametrize("view", ["chunks", "shards"])
@pytest.mark.parametrize("change", [reshard_to_8, unshard_store])
def test_an_array_that_was_converted_is_opened_again_by_consolidated_metadata(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any], view: Any
) -> None:
    """Its copy is read, not its document, and no error of the former object comes first."""
    zarr.create_group(LocalStore(tmp_path))
    consolidated(tmp_path, partial(make, chunks_per_shard=2))
    store = ShardingStore(tmp_path, view=view)
    assert (from_consolidated(store)[:2] == VALUES[:2]).all()
    other.submit(change, tmp_path).result()
    assert (from_consolidated(store)[...] == VALUES).all()


@pytest.mark.parametrize("change", [reshard_to_8, unshard_store])
def test_threads_that_read_an_array_that_was_converted_are_all_refused(
    tmp_path: Path, other: Executor, change: Callable[[Path], Any]
) -> None:
    """None takes the former shards for damaged ones."""
    for n in range(5):
        make(tmp_path / f"{n}", 2)
    opened: list[Any] = [
        zarr.open_array(ShardingStore(tmp_path / f"{n}"), path="a") for n in range(5)
    ]
    for n, z in enumerate(opened):
        assert z[0, 0] == VALUES[0, 0]
        other.submit(change, tmp_path / f"{n}").result()
        with ThreadPoolExecutor(8) as threads:
            done = [threads.submit(z.__getitem__, chunk) for chunk in CHUNKS[8:24]]
        assert {type(each.exception()) for each in done} == {ShardConflictError}


@pytest.mark.parametrize("declaration", ["codec", "storage_transformers"])
@pytest.mark.parametrize("chunks_per_shard", [1, 4, 8])
def test_a_compaction_takes_no_former_shards(
    tmp_path: Path, other: Executor, declaration: Any, chunks_per_shard: int
) -> None:
    """An index of the draft has no checksum."""
    store = ShardingStore(tmp_path, 2, declaration=declaration)
    options: Any = {"shape": (16, 16), "chunks": (2, 2), "dtype": "u2"}
    zarr.create_array(store, name="a", **options)[...] = VALUES
    other.submit(reshard, tmp_path, chunks_per_shard).result()
    store.compact_sync()
    again: Any = zarr.open_array(ShardingStore(tmp_path), path="a")
    assert (again[...] == VALUES).all()


def test_rows_that_are_appended_in_a_batch_are_stored_at_once(
    tmp_path: Path, other: Executor
) -> None:
    """Those of another process, which share their chunk, stay."""
    make(tmp_path, 2, shape=(16, 16), chunks=(4, 16))
    store = ShardingStore(tmp_path)
    rows = VALUES[:1]
    with store.batch():
        store.write_array("a", np.s_[12:], VALUES[12:])
        assert store.append_arrays({"a": rows}) == 16
        other.submit(append, tmp_path).result()
        z: Any = zarr.open_array(store, path="a")
        z[17] = z[17]
    found: Any = zarr.open_array(ShardingStore(tmp_path), path="a")[...]
    assert np.array_equal(found, np.concatenate([VALUES, rows, VALUES]))


def test_an_array_that_was_missing_is_opened_by_consolidated_metadata(
    tmp_path: Path, other: Executor
) -> None:
    zarr.create_group(LocalStore(tmp_path))
    store = ShardingStore(tmp_path)
    assert not sync(store.exists("a/c/0/0"))
    other.submit(consolidated, tmp_path, partial(make, chunks_per_shard=2)).result()
    assert (from_consolidated(store)[...] == VALUES).all()


def test_an_open_array_that_was_removed_is_no_array_of_fill_values(
    tmp_path: Path, other: Executor
) -> None:
    make(tmp_path, 2)
    z: Any = zarr.open_array(ShardingStore(tmp_path), path="a")
    assert (z[:2] == VALUES[:2]).all()
    other.submit(shutil.rmtree, tmp_path / "a").result()
    with pytest.raises(ShardStoreError, match="open it again"):
        z[8:]
    with pytest.raises(ShardStoreError, match="open it again"):
        z[8:] = VALUES[8:]
    assert not [path for path in tmp_path.glob("a/**/*") if path.is_file()]


def test_an_array_that_was_put_back_and_removed_is_refused(tmp_path: Path, other: Executor) -> None:
    """This store has erased its document before, alone."""
    make(tmp_path, 2)
    store, document = ShardingStore(tmp_path), (tmp_path / "a/zarr.json").read_bytes()
    assert store.read_array("a", 0).any()
    sync(store.delete("a/zarr.json"))
    (tmp_path / "a/zarr.json").write_bytes(document)
    store.refresh()
    z: Any = zarr.open_array(store, path="a")
    assert (z[:2] == VALUES[:2]).all()
    (tmp_path / "a/zarr.json").unlink()
    with pytest.raises(ShardConflictError):
        z[0] = 5


def test_keys_beside_the_chunks_of_a_removed_array_can_be_removed(tmp_path: Path) -> None:
    """As zarr does when it migrates an array: it removes the documents at the same time."""
    make(tmp_path, 2, zarr_format=2)
    store = ShardingStore(tmp_path)
    z: Any = zarr.open_array(store, path="a")
    assert (z[:2] == VALUES[:2]).all()
    (tmp_path / "a/.zarray").unlink()
    sync(store.delete("a/.zattrs"))
    assert not (tmp_path / "a/.zattrs").exists()


@pytest.mark.parametrize("change", SAME_ARRAYS)
@pytest.mark.parametrize("before", [2, None])
def test_an_open_array_that_is_the_same_is_used_as_before(
    tmp_path: Path, other: Executor, before: int | None, change: Callable[[Path], Any]
) -> None:
    make(tmp_path, before)
    z: Any = zarr.open_array(ShardingStore(tmp_path), path="a")
    z[...] = 0  # each chunk but one is missing
    z[0, 0] = 1
    assert z[...].sum() == 1
    other.submit(change, tmp_path).result()
    z[...] = VALUES
    assert (z[...] == VALUES).all()
    assert np.array_equal(zarr.open_array(ShardingStore(tmp_path), path="a")[:16], VALUES)


def test_listings_go_on_after_another_process_has_removed_arrays(tmp_path: Path) -> None:
    """Of what is gone nothing is listed, so that no error is needed."""
    store = ShardingStore(tmp_path, 2)
    options: Any = {"shape": (4,), "chunks": (1,), "dtype": "u1"}
    for name in "abcd":
        z: Any = zarr.create_array(store, name=name, **options)
        z[:] = 1
    for name in "abc":
        shutil.rmtree(tmp_path / name)
    zarr.create_array(tmp_path, name="b", **options | {"chunks": (2,)})
    expected = ["b/zarr.json", *(f"d/c/{i}" for i in range(4)), "d/zarr.json", "zarr.json"]
    assert sorted(ShardingMapping(store).list()) == expected


def test_an_array_that_was_replaced_during_a_listing_hides_no_other(tmp_path: Path) -> None:
    """Its shards seem to be damaged when their indexes are read; the error comes at the end."""
    store = ShardingStore(tmp_path, 2)
    for name in "abc":
        z: Any = zarr.create_array(store, name=name, shape=(300,), chunks=(1,), dtype="u1")
        z[:] = 1

    def replace_other(key: str) -> None:
        name = "b" if key.startswith("a") else "a"
        shutil.rmtree(tmp_path / name)
        options: Any = {"chunks": (2,), "dtype": "u1", "compressors": None}
        z: Any = zarr.create_array(tmp_path, name=name, shape=(300,), **options)
        z[:] = 1

    async def take(keys: list[str]) -> None:
        async for key in store.list_prefix(""):
            if not keys:
                await asyncio.to_thread(replace_other, key)
            keys.append(key)

    keys: list[str] = []
    with pytest.raises(ShardConflictError, match="open it again"):
        sync(take(keys))
    counts = [sum(f"{name}/c/{i}" in keys for i in range(300)) for name in "abc"]
    assert sorted(counts)[1:] == [300] * 2


def test_an_array_that_another_process_migrated_to_v3_is_read_by_its_path(
    tmp_path: Path, other: Executor
) -> None:
    """Nothing is open, so the v2 document that this store knew is no reason to refuse."""
    for cps in (2, None):
        path = tmp_path / str(cps)
        store = ShardingStore(path, cps)
        options: Any = {"shape": (8,), "chunks": (2,), "dtype": "u1", "fill_value": 1}
        zarr.create_array(store, name="a", zarr_format=2, **options)
        other.submit(to_native, path).result()
        assert (store.read_array("a", ...) == 1).all()
        store.write_array("a", ..., np.arange(8, dtype="u1"))
        again: Any = zarr.open_array(path, path="a", mode="r", zarr_format=3)
        assert again[:].tolist() == list(range(8))
