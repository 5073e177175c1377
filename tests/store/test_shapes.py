"""Shapes of new shards: by the names of dimensions, clipped to the grid, and by bytes."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer.cpu import Buffer
from zarr.core.sync import sync

from tests.support.kit import objects_of
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnshardedWarning,
    shard_store,
)

BY_NAME = {"time": 24, "y": 4}


def create(store: Any, name: str, dims: Any, n: int = 48, zarr_format: Any = 3) -> Any:
    """Create an array of chunks of one element. v2 has its names in attributes, which are there
    before the array: zarr stores them after it."""
    attributes = {"_ARRAY_DIMENSIONS": list(dims)}
    options: dict[str, Any] = {"dimension_names": dims}
    if zarr_format == 2:
        options = {"attributes": attributes}
        sync(store.set(f"{name}/.zattrs", Buffer.from_bytes(json.dumps(attributes).encode())))
    return zarr.create_array(
        store,
        name=name,
        shape=(n,) * len(dims),
        chunks=(1,) * len(dims),
        dtype="u1",
        zarr_format=zarr_format,
        **options,
    )


@pytest.fixture(params=[2, 3])
def zarr_format(request: pytest.FixtureRequest) -> Any:
    return request.param


# ------------------------------------------------------------------ by dimension


@pytest.mark.parametrize("rule", [BY_NAME, {"*": BY_NAME}, {"g/*": BY_NAME, "*": BY_NAME}])
def test_arrays_that_have_the_dimensions(rule: Any, zarr_format: Any) -> None:
    """One chunk along dimensions without a name; arrays with none of them have no shards."""
    store = ShardingStore({}, chunks_per_shard=rule)
    cases: dict[str, tuple[Any, Any]] = {
        "g/v": (("time", "y", "x"), (24, 4, 1)),
        "turned": (("x", "y", "time"), (1, 4, 24)),
        "flat": (("y", "x"), (4, 1)),
        "time": (("time",), (24,)),
        "y": (("y",), (4,)),
        "x": (("x",), None),
    }
    for path, (dims, expected) in cases.items():
        z = create(store, path, dims, zarr_format=zarr_format)
        assert store.shard_shape(path) == expected
        last = (-1,) * len(dims)
        z[last] = 7
        assert z[last] == zarr.open_array(store, path=path)[last] == 7
    assert ShardingStore(store.base).shard_shape("g/v") == (24, 4, 1)


def test_a_path_comes_before_a_dimension() -> None:
    """Uses by path stay as they are: exact paths and patterns, also beside dimensions."""
    rule: Any = {"time": 2, "raw/*": 3, "labels": None, "auto": "auto"}
    store = ShardingStore({}, chunks_per_shard=rule)
    cases: dict[str, tuple[Any, Any]] = {
        "time": (("time",), (2,)),
        "raw/a": (("time", "x"), (3, 3)),
        "labels": (("time", "x"), None),
        "auto": (("time", "x"), (48, 48)),
        "v": (("x", "time"), (1, 2)),
        "other": (("x", "y"), None),
    }
    for path, (dims, expected) in cases.items():
        create(store, path, dims)
        assert store.shard_shape(path) == expected


def test_a_path_that_is_another_dimension_is_an_error() -> None:
    """An array `y` of (time, x): the path says 4 × 4, the dimensions 24 × 1."""
    with pytest.raises(SpecError, match=r"write \{'y': \(4, 4\)\} for the array, or \{'\*': "):
        create(ShardingStore({}, chunks_per_shard=BY_NAME), "y", ("time", "x"))
    store = ShardingStore({}, chunks_per_shard={**BY_NAME, "y": (4, 4)})
    create(store, "y", ("time", "x"))
    assert store.shard_shape("y") == (4, 4)


def test_names_that_come_after_a_v2_array_do_not_shard_it() -> None:
    """It stays unsharded, a warning says why, and a conversion by dimension does the rest."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=BY_NAME)
    options: Any = {"shape": (48, 4), "chunks": (1, 1), "dtype": "u1", "zarr_format": 2}
    with pytest.warns(UnshardedWarning, match="'v' stays unsharded: Zarr v2 names the dimensions"):
        z = zarr.create_array(store, name="v", **options)
    z.attrs["_ARRAY_DIMENSIONS"] = ["time", "y"]
    z[:] = 5
    assert store.shard_shape("v") is None
    shard_store(base, chunks_per_shard=BY_NAME)
    assert store.shard_shape("v") == (24, 4)
    np.testing.assert_array_equal(zarr.open_array(store, path="v")[:], 5)


def test_stored_arrays_keep_their_declaration() -> None:
    """Names that an array had before this store do not make shards of it."""
    base: dict[str, bytes] = {}
    create(ShardingStore(base, None), "v", ("time",), zarr_format=2)
    store = ShardingStore(base, chunks_per_shard=BY_NAME)
    zarr.open_array(store, path="v").attrs["more"] = 1
    assert store.shard_shape("v") is None


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_axes_of_an_ome_zarr_group(zarr_format: Any) -> None:
    """If the group says them before the array is created; also of 0.3, as texts."""
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    image: dict[str, Any] = {"multiscales": [{"axes": axes, "datasets": [{"path": "s/0"}]}]}
    store = ShardingStore({}, chunks_per_shard={"z": 2, "x": 3})
    attributes: Any = image if zarr_format == 2 else {"ome": image}
    zarr.open_group(store, path="image", attributes=attributes, zarr_format=zarr_format)
    options: Any = {"shape": (9, 9, 9), "chunks": (1, 1, 1), "dtype": "u1"}
    z = zarr.create_array(store, name="image/s/0", zarr_format=zarr_format, **options)
    if zarr_format == 2:
        z.attrs["any"] = "attribute"  # the names came before
    assert store.shard_shape("image/s/0") == (2, 1, 3)


@pytest.mark.filterwarnings("ignore:.*'v' stays unsharded")
@pytest.mark.parametrize("names", [7, "time", ["time"], [["time"], {}], {"time": 1}, [None, 2]])
def test_names_that_are_none(names: Any) -> None:
    """Attributes of any form: such an array has no names, and none is refused."""
    store = ShardingStore({}, chunks_per_shard=BY_NAME)
    mapping = ShardingMapping(store)
    for attributes in (names, {"_ARRAY_DIMENSIONS": names}, {"multiscales": names}):
        options: dict[str, Any] = {"zarr_format": 2, "dtype": "u1", "overwrite": True}
        z = zarr.create_array(store, name="v", shape=(4, 4), chunks=(1, 1), **options)
        document = json.loads(mapping["v/.zarray"])
        metadata = {"v/.zarray": document, "v/.zattrs": attributes}
        consolidated = {"zarr_consolidated_format": 1, "metadata": metadata}
        first = ShardingMapping({}, chunks_per_shard=BY_NAME)
        first[".zmetadata"] = mapping[".zmetadata"] = json.dumps(consolidated).encode()
        mapping["v/.zattrs"] = mapping[".zattrs"] = json.dumps(attributes).encode()
        assert store.shard_shape("v") is None
        z[:] = 1


@pytest.mark.filterwarnings("ignore:.*'v' stays unsharded")
@pytest.mark.parametrize("rule", [(24, 1), BY_NAME])
def test_consolidated_metadata_that_comes_first_says_the_same(rule: Any) -> None:
    """A copy in the order of keys declares an array of v2 in both places alike, or in neither."""
    base: dict[str, bytes] = {}
    group = zarr.open_group(base, mode="w", zarr_format=2)
    create(group.store, "v", ("time", "x"), zarr_format=2)[:2] = 3
    with warnings.catch_warnings(action="ignore"):
        zarr.consolidate_metadata(base, zarr_format=2)
    copy: dict[str, bytes] = {}
    mapping = ShardingMapping(copy, chunks_per_shard=rule)
    for key, value in sorted(objects_of(base).items()):
        mapping[key] = value
    stored = json.loads(copy["v/.zarray"])
    assert stored["chunks"] == ([1, 1] if rule == BY_NAME else [24, 1])
    assert json.loads(copy[".zmetadata"])["metadata"]["v/.zarray"] == stored
    assert mapping.shard_shape("v") == (None if rule == BY_NAME else (24, 1))
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(copy), path="v")[:2], 3)


# ------------------------------------------------------- names and shapes of nothing


def test_a_shape_for_no_array_is_said() -> None:
    """When an array is left out for it, or when the store is closed; once."""
    rule: Any
    for rule, text in [
        ({"*": {"tiem": 24}}, "has none of the dimensions"),
        ({"tiem": 24}, "none is 'tiem'"),
        ((2, 2), "has 3 dimensions"),
    ]:
        store = ShardingStore({}, chunks_per_shard=rule)
        with pytest.warns(UserWarning, match=f"'v' stays unsharded: it .*{text}"):
            create(store, "v", ("time", "y", "x"), 3)
        create(store, "w", ("time", "y", "x"), 3)
        store.close()
    for rule, text in [
        ({"*": {"tiem": 24, "y": 4}}, "'tiem'"),
        ({"tiem": 24, "y": 4}, "'tiem'"),
        ({"raw/*": 2}, r"'raw/\*'"),
        ((2, 2, 2, 2), r"'\(2, 2, 2, 2\)'"),
    ]:
        store = ShardingStore({}, chunks_per_shard=rule)
        create(store, "v", ("time", "y", "x"), 3)
        with pytest.warns(UserWarning, match=f"a rule for {text}, and no array"):
            store.close()


def test_shapes_that_are_used_are_not_warned_of(zarr_format: Any) -> None:
    """A dataset with coordinates, under each kind of rule; the suite takes warnings for errors."""
    rule: Any
    for rule in (BY_NAME, {"*": BY_NAME}, (24, 4, 1), {"v": (2, 2, 2), "*": "auto"}):
        store = ShardingStore({}, chunks_per_shard=rule)
        create(store, "time", ("time",), zarr_format=zarr_format)
        create(store, "x", ("x",), zarr_format=zarr_format)
        create(store, "bounds", ("y", "x"), zarr_format=zarr_format)
        create(store, "v", ("time", "y", "x"), zarr_format=zarr_format)
        store.close()
    ShardingStore({}, chunks_per_shard=BY_NAME).close()


# ------------------------------------------------------------------ clipped to the grid


@pytest.mark.parametrize(
    ("cps", "grid", "stored", "shown"),
    [
        ((64, 64, 64), (4, 4, 4), (64, 4, 4), (4, 4, 4)),
        ((500, 500), (100, 2000), (100, 500), (100, 500)),
        ((500, 500), (2, 20), (500, 20), (2, 20)),
        ((2**15, 2), (4, 4), (4, 2), (4, 2)),
        ((24, 4, 1), (1, 1, 9), (24, 4, 1), (1, 1, 1)),
        ((24, 4, 1), (0, 30, 9), (24, 4, 1), (24, 4, 1)),
        ((1, 8760), (3, 24), (1, 8760), (1, 24)),
    ],
)
def test_shards_are_clipped_to_the_grid(cps: Any, grid: Any, stored: Any, shown: Any) -> None:
    """Callers see no longer shard than the array. A stored index is large only for growth."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=cps)
    ndim = len(grid)
    zarr.create_array(store, name="v", shape=grid, chunks=(1,) * ndim, dtype="u1")
    assert store.shard_shape("v") == shown
    plain = json.loads(base["v/zarr.json"])["chunk_grid"]["configuration"]["chunk_shape"]
    assert tuple(plain) == stored


@pytest.mark.parametrize("n_first", [0, 1, 10])
@pytest.mark.parametrize("rule", [{"time": 24, "y": 64}, (24, 64), {"shard_nbytes": 24 * 4}])
def test_an_array_that_grows_fills_its_shards(n_first: int, rule: Any) -> None:
    """As xarray appends steps to a first one: 24 of them are a shard, not one or ten."""
    base: dict[str, bytes] = {}
    options = rule if "shard_nbytes" in rule else {"chunks_per_shard": rule}
    store = ShardingStore(base, **options)
    z = zarr.create_array(
        store,
        name="v",
        shape=(n_first, 4),
        chunks=(1, 4 if "shard_nbytes" in rule else 1),
        dtype="u1",
        dimension_names=("time", "y"),
    )
    z[:] = 1
    for _ in range(n_first, 60):
        z.append(np.full((1, 4), 1, "u1"))
    np.testing.assert_array_equal(z[:], 1)
    assert store.shard_shape("v") == (24, 4)
    assert len([key for key in base if key.startswith("v/c/")]) == math.ceil(60 / 24)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("budget", [4096, "4096", "4096 B", "4.096kB", "4 KiB", np.int64(4096)])
def test_a_budget_in_bytes(budget: Any) -> None:
    """No shard of several chunks has more, and most have at least half of it."""
    shapes: list[tuple[Any, Any]] = [((64, 64, 64), (4, 4, 4)), ((1000,), (10,))]
    shapes += [((7, 300, 5), (1, 30, 5)), ((48, 44, 48), (1, 11, 12))]
    for shape, chunks in shapes:
        store = ShardingStore({}, shard_nbytes=budget)
        zarr.create_array(store, name="v", shape=shape, chunks=chunks, dtype="u1")
        found = store.shard_shape("v") or ()
        assert 4096 // 2 <= math.prod(found) <= 4096 or math.prod(found) >= math.prod(shape)
        assert all(n % chunk == 0 for n, chunk in zip(found, chunks, strict=True))
    store = ShardingStore({}, shard_nbytes=budget)
    zarr.create_array(store, name="v", shape=(99, 99), chunks=(99, 99), dtype="u8")
    assert store.shard_shape("v") == (99, 99)  # one chunk has more


def test_a_budget_is_one_of_two() -> None:
    """It takes the place of chunks_per_shard, in every class."""
    for make in (ShardingStore, ShardingMapping, DraftHierarchyStore):
        base: dict[str, bytes] = {}
        assert "shard_nbytes=64000000" in repr(make(base, shard_nbytes="64 MB"))
        with pytest.raises(SpecError, match="give one"):
            make(base, shard_nbytes=9, chunks_per_shard=2)
    for wrong in ("64 megs", 0, -1, 2.5, "", "MB", [1]):
        with pytest.raises(SpecError, match="shard_nbytes"):
            ShardingStore({}, shard_nbytes=wrong)  # type: ignore[arg-type]
