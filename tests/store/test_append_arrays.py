"""Slabs that writers append to several arrays: one place, and rows of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore, ZipStore

from tests.support.bases import ALL_BASES, OtherMapping
from tests.support.kit import CountingStore, objects_of
from zarr_shardstore import (
    ReadOnlyError,
    ShardConflictError,
    ShardingStore,
    SpecError,
    UnsupportedError,
    reshard,
)

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "codec": ({"chunks_per_shard": 2}, {}),
    "transformer": ({"chunks_per_shard": 2, "declaration": "storage_transformers"}, {}),
    "crc32c": ({"chunks_per_shard": 2, "storage_transformers": ["crc32c", "sharding"]}, {}),
    "v2": ({"chunks_per_shard": 2}, {"zarr_format": 2}),
    "view of shards": ({"chunks_per_shard": 2, "view": "shards"}, {}),
    "plain": ({"chunks_per_shard": None}, {}),
    "shards=": ({"chunks_per_shard": None}, {"shards": (8, 4)}),
    "left to zarr": (
        {"chunks_per_shard": None, "native": "passthrough"},
        {"shards": (8, 4)},
    ),
}
"""Options of the store, and of the array."""


def values(start: int, stop: int, width: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(start + 1, stop + 1)[:, None] * 100 + np.arange(width)


def stored(store: Any, path: str = "z") -> Any:
    return zarr.open_array(store, path=path, mode="r")[...]


def create(base: Any, kind: str = "codec", length: int = 0, **more: Any) -> ShardingStore:
    """A store with an array of `length` rows, in chunks of 4 rows."""
    options, of_array = KINDS[kind]
    store = ShardingStore(base, **options)
    of_array = {"shape": (0, 4), "chunks": (4, 2), "dtype": "i8", **of_array, **more}
    zarr.create_array(store, name="z", **of_array)
    if length:
        assert store.append_arrays({"z": values(0, length)}) == 0
    return store


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_local", [False, True])
def test_kinds_of_arrays(kind: str, is_local: bool, tmp_path: Path) -> None:
    """Slabs that end within a chunk or a shard, or at its end; and as zarr alone reads them."""
    base: Any = tmp_path if is_local else {}
    store = create(base, kind)
    start = 0
    for n in (1, 2, 4, 1, 8, 5, 3, 16):
        assert store.append_arrays({"z": values(start, start + n)}) == start
        start += n
        np.testing.assert_array_equal(stored(store), values(0, start))
    np.testing.assert_array_equal(store.read_array("z"), values(0, start))
    if kind not in ("v2", "transformer", "crc32c") and is_local:
        np.testing.assert_array_equal(stored(LocalStore(tmp_path)), values(0, start))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ALL_BASES)
@pytest.mark.thorough(of=3)
def test_threads_share_chunks(base: str, kind: str) -> None:
    """Some share a store, some have one of their own. Each row is there once."""
    of_all = ALL_BASES[base]()
    shared = create(of_all, kind)
    begin = threading.Barrier(6)

    def append(writer: int) -> None:
        store = shared if writer % 2 else ShardingStore(of_all, **KINDS[kind][0])
        begin.wait()
        for i in range(5):
            number = 10 * writer + i
            row = store.append_arrays({"z": values(number, number + 1)})
            if kind != "left to zarr":  # zarr reads such a shard in several requests
                assert (store.read_array("z", row) == values(number, number + 1)[0]).all()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(append, range(6)))
    found = stored(shared)
    numbers = [10 * writer + i for writer in range(6) for i in range(5)]
    assert sorted(map(tuple, found)) == [tuple(values(n, n + 1)[0]) for n in numbers]


class Late:
    """Values that look at something when they are asked for: after the documents were read."""

    def __init__(self, given: np.ndarray[Any, Any], look: Callable[[], object]) -> None:
        self.shape, self._given, self._look = given.shape, given, look

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        self._look()
        return self._given


def put_document(base: dict[str, bytes], key: str, **changed: Any) -> None:
    """Change a document as another process does."""
    base[key] = json.dumps(json.loads(base[key]) | changed).encode()


def test_a_document_that_changes_meanwhile() -> None:
    """Another writer has rows between the check and the reservation, or sets attributes: all of it
    is there."""
    base: dict[str, bytes] = {}
    store, other = create(base, length=5), ShardingStore(base)

    def look() -> None:
        assert other.append_arrays({"z": values(5, 7)}) == 5
        put_document(base, "z/zarr.json", attributes={"a": 1})

    assert store.append_arrays({"z": Late(values(7, 8), look)}) == 7
    np.testing.assert_array_equal(stored(store), values(0, 8))
    assert zarr.open_array(store, path="z").attrs["a"] == 1


def test_another_array_meanwhile() -> None:
    """It has another data type, or another length along another axis: nothing is changed."""
    for name, value in {"data_type": "float32", "shape": [5, 6]}.items():
        base: dict[str, bytes] = {}
        store = create(base, length=5)
        look = partial(put_document, base, "z/zarr.json", **{name: value})
        late = Late(values(5, 6), look)
        with pytest.raises(ShardConflictError, match="more than the length"):
            store.append_arrays({"z": late})
        assert json.loads(base["z/zarr.json"])["shape"][0] == 5


def test_several_arrays_have_the_same_rows() -> None:
    """An array that is shorter has fill values before the rows, a longer one is not cut."""
    store = create({}, length=3)
    zarr.create_array(store, name="time", shape=(0,), chunks=(8,), dtype="i4", fill_value=-1)
    zarr.create_array(store, name="long", shape=(9,), chunks=(8,), dtype="f4", fill_value=0.5)
    new: dict[str, Any] = {"z": values(3, 5), "time": [4, 5], "/long/": np.array([4.0, 5.0])}
    assert store.append_arrays(new) == 3
    assert stored(store, "time").tolist() == [-1, -1, -1, 4, 5]
    assert stored(store, "long").tolist() == [0.5] * 3 + [4, 5] + [0.5] * 4
    assert store.append_arrays({"time": [6], "z": values(5, 6)}) == 5
    np.testing.assert_array_equal(stored(store), values(0, 6))


@pytest.mark.parametrize("axis", [1, -1, "t"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_axes(axis: int | str, zarr_format: Any) -> None:
    """Another axis than the first, by number or name; by name also arrays of several dimensions."""
    store = ShardingStore({}, 2)
    names: dict[str, Any] = {"dimension_names": ("x", "t")} if zarr_format == 3 else {}
    shape = {"shape": (4, 0), "chunks": (2, 3), "dtype": "i8", "zarr_format": zarr_format}
    z = zarr.create_array(store, name="z", **shape, **names)
    if zarr_format == 2:
        z.attrs["_ARRAY_DIMENSIONS"] = ["x", "t"]
    for start, stop in [(0, 1), (1, 3), (3, 8)]:
        assert store.append_arrays({"z": values(start, stop).T}, axis) == start
    np.testing.assert_array_equal(stored(store), values(0, 8).T)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_consolidated_metadata(zarr_format: Any) -> None:
    """While rows are stored, a reader of consolidated metadata sees arrays of one length, and no
    row of fill values, and in the end all. Other documents there stay."""
    states: list[dict[str, bytes]] = []

    class Watched(OtherMapping):
        def __setitem__(self, key: str, value: bytes) -> None:
            super().__setitem__(key, value)
            states.append(dict(self.data))

    base = Watched()
    store = ShardingStore(base, 2)
    group = zarr.create_group(store, path="g", zarr_format=zarr_format)
    group.create_array("z", shape=(0, 4), chunks=(4, 2), dtype="i8")
    group.create_array("time", shape=(0,), chunks=(4,), dtype="i8")
    group.create_array("other", shape=(7,), chunks=(4,), dtype="i8")
    for path in ("g", ""):
        zarr.consolidate_metadata(store, path=path, zarr_format=zarr_format)
    states.clear()
    for i in range(5):
        assert store.append_arrays({"g/z": values(i, i + 1), "g/time": [i + 1]}) == i
    lengths = []
    for state in states:
        seen: Any = zarr.open_group(ShardingStore(state), mode="r", zarr_format=zarr_format)
        assert seen.metadata.consolidated_metadata is not None
        z, time = seen["g/z"][:], seen["g/time"][:]
        assert time.tolist() == [*range(1, len(time) + 1)]
        np.testing.assert_array_equal(z, values(0, len(time)))
        lengths.append(len(z))
    assert set(lengths) == {0, 1, 2, 3, 4, 5}
    for path, inner in (("g", ""), ("", "g/")):
        below: Any = zarr.open_group(store, path=path, mode="r", zarr_format=zarr_format)
        assert [below[inner + name].shape for name in ("z", "time", "other")] == [
            (5, 4),
            (5,),
            (7,),
        ]
    before = objects_of(base)
    zarr.consolidate_metadata(store, zarr_format=zarr_format)
    name = "zarr.json" if zarr_format == 3 else ".zmetadata"
    assert json.loads(before[name]) == json.loads(objects_of(base)[name])


def test_consolidated_metadata_that_changes_meanwhile() -> None:
    """An appender that is slower does not cut the copies, and keeps other changes."""

    class Racing(OtherMapping):
        is_armed = False

        def __getitem__(self, key: str) -> bytes:
            value = super().__getitem__(key)
            if key == "zarr.json" and self.is_armed:  # the reader has the state before
                self.is_armed = False
                doc = json.loads(value)
                doc["attributes"] = {"a": 1}
                doc["consolidated_metadata"]["metadata"]["z"]["shape"][0] = 9
                self.data[key] = json.dumps(doc).encode()
            return value

    base = Racing()
    store = create(base, length=2)
    zarr.create_array(store, name="time", shape=(2,), chunks=(4,), dtype="i8")
    zarr.consolidate_metadata(store)
    base.is_armed = True
    assert store.append_arrays({"z": values(2, 3), "time": [3]}) == 2
    assert not base.is_armed
    group: Any = zarr.open_group(ShardingStore(base), mode="r")
    assert group.metadata.consolidated_metadata is not None
    assert group.attrs["a"] == 1
    assert (group["z"].shape, group["time"].shape) == ((9, 4), (3,))
    assert stored(store).shape == (3, 4)


def test_xarray_sees_the_days(tmp_path: Path) -> None:
    """It opens consolidated metadata by default."""
    xarray = pytest.importorskip("xarray")
    days = np.arange("2026-01-01", "2026-01-03", dtype="datetime64[D]")
    data = xarray.Dataset(
        {"temperature": (("time", "x"), np.ones((2, 3)))}, {"time": days.astype("M8[ns]")}
    )
    store = ShardingStore(tmp_path, 2)
    data.to_zarr(store, encoding={"time": {"units": "days since 2026-01-01", "chunks": (8,)}})
    assert store.append_arrays({"temperature": np.full((1, 3), 3.0), "time": [2]}, "time") == 2
    found = xarray.open_zarr(store)
    assert found.time.values[-1] == np.datetime64("2026-01-03")
    assert found.temperature.sel(time="2026-01-03").values.tolist() == [3, 3, 3]


def test_values_are_cast() -> None:
    """As zarr casts them, also lists, nested lists, and strings of any length."""
    store = create({}, dtype="u1", length=1)
    assert store.append_arrays({"z": [[1, 2, 3, 4]]}) == 1
    assert store.append_arrays({"z": np.array([[1.5, 2, 300, 4]])}) == 2
    expected = np.array([[1.5, 2, 300, 4]]).astype("u1")[0].tolist()
    assert stored(store)[1:].tolist() == [[1, 2, 3, 4], expected]
    zarr.create_array(store, name="names", shape=(0,), chunks=(2,), dtype=str)
    for name in ("a", "long", ""):
        store.append_arrays({"names": [name]})
    assert stored(store, "names").tolist() == ["a", "long", ""]
    assert store.append_arrays({"z": np.empty((0, 4))}) == 3
    assert stored(store).shape == (3, 4)


@pytest.mark.parametrize(
    ("arrays", "axis", "message"),
    [
        ({}, 0, "mapping"),
        ([("z", [1])], 0, "mapping"),
        ({"z": values(0, 1), "no": [1]}, 0, "no array at 'no'"),
        ({"z": values(0, 1), "": [1]}, 0, "no array at ''"),
        ({"z": values(0, 1), "time": [1, 2]}, 0, "one length"),
        ({"z": values(0, 1), "/z": values(0, 1)}, 0, "twice"),
        ({"time": [1], "z": values(0, 1)[:, :3]}, 0, r"shape \(1, 4\)"),
        ({"time": [1], "z": values(0, 1)[0]}, 0, r"shape \(1, 4\)"),
        ({"z": values(0, 1), "time": [[1]]}, 0, r"shape \(1,\)"),
        ({"z": values(0, 1), "time": ["a"]}, 0, "int32"),
        ({"z": values(0, 1), "time": [2**40]}, 0, "int32"),
        ({"z": values(0, 1), "time": [1]}, 1, "no axis 1"),
        ({"z": values(0, 1)}, "time", "no axis 'time'"),
        ({"z": values(0, 1)}, 1.5, "no axis 1.5"),
        ({1: values(0, 1)}, 0, "path"),
    ],
)
def test_refused_unchanged(arrays: Any, axis: Any, message: str) -> None:
    base: dict[str, bytes] = {}
    store = create(base, length=1)
    zarr.create_array(store, name="time", shape=(1,), chunks=(8,), dtype="i4")
    before = dict(base)
    with pytest.raises(SpecError, match=message):
        store.append_arrays(arrays, axis)
    assert base == before


def test_stores_that_cannot(tmp_path: Path) -> None:
    store = create({})
    with pytest.raises(ReadOnlyError):
        store.with_read_only(True).append_arrays({"z": values(0, 1)})
    with ZipStore(tmp_path / "a.zip", mode="w") as base:
        archive = create(base)
        with pytest.raises(UnsupportedError, match="replaced"):
            archive.append_arrays({"z": values(0, 1)})


def test_arrays_of_the_draft_do_not_grow() -> None:
    base: dict[str, bytes] = {}
    store = create(base)
    draft = {"shape": [4], "data_type": "<i8", "chunk_memory_layout": "C", "fill_value": 0}
    draft["chunk_grid"] = {"type": "regular", "chunk_shape": [2], "separator": "/"}
    base["meta/root/d.array.json"] = json.dumps(draft | {"attributes": {}}).encode()
    before = dict(base)
    with pytest.raises(UnsupportedError, match="draft"):
        store.append_arrays({"z": values(0, 1), "d": values(0, 1)})
    assert base == before


@pytest.mark.skipif(
    "rectilinear_chunks" not in zarr.config.get("array"), reason="zarr before 3.2 has no lists"
)
@pytest.mark.parametrize("kind", ["chunks", "sharded chunks", "shards", "shards beyond the end"])
def test_arrays_of_several_lengths(kind: str) -> None:
    """The list gets a chunk of the rest, as in zarr; shards that are there already are filled."""
    base: dict[str, bytes] = {}
    with zarr.config.set({"array.rectilinear_chunks": True}):
        store = ShardingStore(base, None if kind == "chunks" else 2)
        group = zarr.create_group(store)
        grid: Any = {"chunks": [[3, 1, 2], [4]]}
        if kind.startswith("shards"):
            grid = {"chunks": (1, 2), "shards": [[3, 1, 2], [4]]}
        group.create_array("z", shape=(6, 4), dtype="i8", **grid)[:] = values(0, 6)
        if kind == "shards beyond the end":
            group["z"].resize((5, 4))  # type: ignore[union-attr]
        zarr.consolidate_metadata(store)
        start = int(zarr.open_array(store, path="z").shape[0])
        for n in (1, 3, 2, 1):
            assert store.append_arrays({"z": values(start, start + n)}) == start
            start += n
            for each in (store, ShardingStore(base)):
                np.testing.assert_array_equal(stored(each), values(0, start))
                group = zarr.open_consolidated(each)
                np.testing.assert_array_equal(group["z"][...], values(0, start))  # type: ignore[index]
        again: Any = zarr.open_array(ShardingStore(base), path="z")
        sizes = again.read_chunk_sizes
        if kind in ("chunks", "sharded chunks"):
            assert sizes[0] == (3, 1, 2, 1, 3, 2, 1)


@pytest.mark.skipif(
    "rectilinear_chunks" not in zarr.config.get("array"), reason="zarr before 3.2 has no lists"
)
@pytest.mark.parametrize("kind", ["equal chunks", "codec", "storage_transformers"])
def test_copies_that_were_left_behind_have_the_grid_of_their_array(kind: str) -> None:
    """`z.append` grows no copy, and gives the rows chunks and shards of another size."""
    base: dict[str, bytes] = {}
    lists: Any = [[4, 4, 4]]
    with zarr.config.set({"array.rectilinear_chunks": True}):
        group = zarr.create_group(ShardingStore(base))
        chunks = lists if kind == "equal chunks" else (1,)
        group.create_array("z", shape=(12,), chunks=chunks, dtype="i8")[:] = np.arange(12)
        if kind != "equal chunks":
            declared: Any = kind
            reshard(base, shards=[[6, 2, 4]], declaration=declared)
        zarr.consolidate_metadata(ShardingStore(base))
        z: Any = zarr.open_array(ShardingStore(base, view="shards"), path="z")
        z.append(np.arange(12, 21))
        ShardingStore(base).append_arrays({"z": np.arange(21, 30)})
        for view in ("chunks", "shards"):
            grown: Any = zarr.open_consolidated(ShardingStore(base, view=view))
            assert grown["z"][:].tolist() == [*range(30)]
    documents = objects_of(base)
    copies = json.loads(documents["zarr.json"])["consolidated_metadata"]["metadata"]
    assert copies["z"] == json.loads(documents["z/zarr.json"])


def test_an_error_names_the_rows() -> None:
    """The rows are reserved, and `write_array` fills them. Another append makes new ones."""

    class Failing(OtherMapping):
        part = "none"

        def __setitem__(self, key: str, value: bytes) -> None:
            if self.part in f"//{key}":
                raise OSError("the disk is full")
            super().__setitem__(key, value)

    base = Failing()
    store = create(base, length=3)
    base.part = "/c/"
    with pytest.raises(OSError, match="full") as caught:
        store.append_arrays({"z": values(3, 5)})
    assert caught.value.__notes__[0] == "the rows 3 to 4 of ['z'] were reserved"
    base.part = "none"
    assert store.append_arrays({"z": values(5, 6)}) == 5
    assert (stored(store)[3:5] == 0).all()
    store.write_array("z", slice(3, 5), values(3, 5))
    np.testing.assert_array_equal(stored(store), values(0, 6))
    zarr.consolidate_metadata(store)
    base.part = "//zarr.json"
    with pytest.raises(OSError, match="full") as caught:
        store.append_arrays({"z": values(6, 7)})
    assert "rows 6 to 6 of ['z'] were stored, and consolidated" in caught.value.__notes__[0]
    np.testing.assert_array_equal(stored(store), values(0, 7))


def test_all_stores_of_the_process_see_it(tmp_path: Path) -> None:
    """Also one that has read the array and its end, and one that has refused a key behind it."""
    store, other = create(tmp_path, length=3), ShardingStore(tmp_path)
    assert other.read_array("z").shape == (3, 4)
    with pytest.raises(IndexError):
        other.read_chunks("z", [(1, 0)])
    store.append_arrays({"z": values(3, 6)})
    assert other.read_chunks("z", [(1, 0)]).shape == (1, 4, 2)
    np.testing.assert_array_equal(other.read_array("z"), values(0, 6))
    assert stored(other).shape == (6, 4)


def test_async_and_batch() -> None:
    store = create({}, length=1)
    with store.batch():
        assert asyncio.run(store.append_arrays_async({"z": values(1, 2)})) == 1
        assert store.append_arrays({"z": values(2, 6)}) == 2
    np.testing.assert_array_equal(stored(store), values(0, 6))


@pytest.mark.parametrize("is_consolidated", [False, True])
def test_requests_of_an_append(is_consolidated: bool) -> None:
    """The document is read by the check and by the swap. The shard is read, because it has chunks
    of other rows. The group above is read, and swapped if it has a copy."""
    base = CountingStore()
    store = ShardingStore(base, 4)
    zarr.create_group(store)
    zarr.create_array(store, name="z", shape=(0, 4), chunks=(1, 4), dtype="i8")
    if is_consolidated:
        zarr.consolidate_metadata(store)
    for i in range(3):
        base.forget()
        store.append_arrays({"z": values(i, i + 1)})
    of_group = ["zarr.json"] * (2 if is_consolidated else 1)
    assert [key for key, _ in base.reads] == ["z/zarr.json", "z/zarr.json", "z/c/0/0", *of_group]
    assert [key for _, key in base.writes] == ["z/zarr.json", "z/c/0/0", *of_group[1:]]
