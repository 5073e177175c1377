"""Shapes of shards in elements, and the places of chunks in stored objects."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.bases import ALL_BASES
from tests.support.kit import objects_of
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError, UnsupportedError

GRID = (5, 4)


@pytest.fixture(params=[2, 3])
def zarr_format(request: pytest.FixtureRequest) -> Any:
    return request.param


def filled(store: ShardingStore, **options: Any) -> list[str]:
    """Store an array without its first chunk; return the keys of its chunks."""
    z = zarr.create_array(store, name="z", shape=(10, 8), chunks=(2, 2), dtype="u2", **options)
    z[:] = np.arange(1, 81, dtype="u2").reshape(10, 8)
    z[:2, :2] = 0
    is_v2 = options.get("zarr_format") == 2
    return ["z/" + ("" if is_v2 else "c/") + z_key for z_key in _coords("." if is_v2 else "/")]


def _coords(separator: str) -> list[str]:
    return [f"{i}{separator}{j}" for i, j in np.ndindex(*GRID)]


@pytest.fixture(params=ALL_BASES)
def base(request: pytest.FixtureRequest) -> Any:
    return ALL_BASES[request.param]()


def test_a_location_leads_to_the_bytes_of_the_chunk(base: Any, zarr_format: Any) -> None:
    """Its offset and size cut the value out of the stored object; no chunk is read for it."""
    store = ShardingStore(base, chunks_per_shard=(2, 3))
    mapping, keys = ShardingMapping(store), filled(store, zarr_format=zarr_format)
    values = dict(mapping)
    objects = objects_of(store.base)
    asked = [*keys, "zarr.json", "nothing", keys[-1].replace("4", "40", 1), keys[3]]
    before = store.stats()
    places = mapping.locate(asked)
    nbytes = store.stats().nbytes_read - before.nbytes_read
    assert nbytes < 6 * (2 * 3 * 16 + 4) + 4 * 1024
    for key, place in zip(asked, places, strict=True):
        if place is None:
            assert key not in values
        else:
            shard, offset, size = place
            assert objects[shard][offset : offset + size] == values[key] or key == "zarr.json"
    assert [place is None for place in places[: len(keys)]] == [True] + [False] * 19
    assert places[-1] == places[3]
    assert store.shard_shape("z") == mapping.shard_shape("/z/") == (4, 6)


def test_a_location_takes_two_rounds() -> None:
    """The documents, and then the indexes with the sizes of all other keys."""
    base: dict[str, bytes] = {}
    keys = filled(ShardingStore(base, chunks_per_shard=(2, 3)))
    mapping = ShardingMapping(base)
    before = mapping.stats()
    mapping.locate([*keys, "z/zarr.json"])
    after = mapping.stats()
    assert after.rounds - before.rounds == 2
    before = after
    mapping.locate([*keys, "z/zarr.json"])
    assert mapping.stats().rounds - before.rounds == 1


def test_keys_that_pass_through_are_objects_of_their_own() -> None:
    """The whole object is the place of a key that names no chunk of a shard."""
    store = ShardingStore({}, None)
    z = zarr.create_array(store, name="z", shape=(4,), chunks=(2,), dtype="u1", compressors=None)
    z[:2] = 1
    mapping = ShardingMapping(store)
    assert mapping.locate(["z/c/0", "z/c/1"]) == [("z/c/0", 0, 2), None]
    assert store.shard_shape("z") is None
    with pytest.raises(SpecError, match="no array at 'y'"):
        store.shard_shape("y")
    with pytest.raises(SpecError, match="keys is a list"):
        mapping.locate("z/c/0")


def test_a_location_sees_what_a_batch_buffers() -> None:
    """The shards of the keys are stored first, and no other shard."""
    mapping = ShardingMapping({}, chunks_per_shard=4)
    first, other = (f"data/root/z/c{n}" for n in (1, 9))
    with mapping.batch():
        mapping[first] = mapping[other] = b"abc"
        assert mapping.locate([first]) == [("data/root/z/c0", 0, 3)]
        assert mapping.locate([]) == []


def test_a_location_is_that_after_the_last_write() -> None:
    """An index that another store has changed is not taken from a cache."""
    base: dict[str, bytes] = {}
    one, other = (ShardingMapping(base, chunks_per_shard=4) for _ in range(2))
    one["data/root/z/c1"] = b"abc"
    assert other.locate(["data/root/z/c1"])[0] == ("data/root/z/c0", 0, 3)
    one["data/root/z/c0"] = b"longer"
    shard, offset, size = other.locate(["data/root/z/c1"])[0] or ("", 0, 0)
    assert base[shard][offset : offset + size] == b"abc"


def test_changed_bytes_have_no_location() -> None:
    """A checksum above sharding is a part of the stored value; below it, there is no place."""
    base: dict[str, bytes] = {}
    above = ShardingMapping(base, chunks_per_shard=2, storage_transformers=["crc32c", "sharding"])
    below = ShardingMapping({}, chunks_per_shard=2, storage_transformers=["sharding", "crc32c"])
    grid = {"type": "regular", "chunk_shape": [1], "separator": "/"}
    document = json.dumps({"shape": [4], "chunk_grid": grid, "data_type": "<u1"}).encode()
    for mapping in (above, below):
        mapping["meta/root/z.array.json"] = document
        mapping["data/root/z/c1"] = b"abc"
    (place,) = above.locate(["data/root/z/c1"])
    assert place is not None
    assert place[2] == 3 + 4
    assert base[place[0]][place[1] :][:3] == b"abc"
    with pytest.raises(UnsupportedError, match="change the stored bytes"):
        below.locate(["data/root/z/c1"])
