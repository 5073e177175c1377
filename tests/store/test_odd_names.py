"""Only metadata says which key is a chunk key: names that look like chunk keys mean what they say.

Each hierarchy is written through zarr with and without sharding; both show the same values,
and the same keys. Source: the design of the catalog, ``zarr_shardstore.arrays.catalog``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from tests.support.bases import BASES, put
from tests.support.kit import objects_of
from zarr_shardstore import DraftHierarchyStore, ShardingMapping, ShardingStore, UnsupportedError

# Arrays by path with their number of dimensions. No array lies inside another one.
HIERARCHIES: dict[str, dict[str, int]] = {
    "a group c": {"c/a": 2, "c/b": 1},
    "an array c": {"c": 2, "d": 2},
    "an array 0": {"0": 2, "1": 1, "10": 0},
    "an array c in a group": {"foo/c": 2, "foo/d": 1},
    "an array 0 in a group": {"foo/0": 2, "foo/1": 2},
    "an array 0.0": {"0.0": 2, "foo/0.0": 1, "foo/1.2.3": 2},
    "arrays in a group that is named as a chunk": {"foo/c/0/0": 2, "foo/c/1": 1, "foo/c/0/1": 2},
    "numbers all the way down": {"0/0/0/0": 2, "0/0/0/1": 1, "0/1": 2},
    "c all the way down": {"c/c/c": 2, "c/c/d": 1, "c/0": 1},
    "a c that is named as a dotted chunk": {"c.0.0": 2, "foo/c.0": 1, "foo/c0": 2},
    "a name that starts another": {"lat": 1, "lat_bounds": 2, "latc": 1, "lat0": 1},
    "signs and zeros": {"00": 1, "-1": 2, "+1": 1, "c/01": 1, "1e3": 1, "٣": 1},
}
KINDS = [(3, "default", "/"), (3, "default", "."), (3, "v2", "/"), (3, "v2", "."), (2, "v2", "/")]
KINDS.append((2, "v2", "."))


def fill(store: Any, arrays: dict[str, int], kind: tuple[int, str, str]) -> None:
    zarr_format, style, separator = kind
    for n, (path, ndim) in enumerate(arrays.items()):
        z = zarr.create_array(
            store,
            name=path,
            shape=(5, 3)[:ndim],
            chunks=(1, 2)[:ndim],
            dtype="int16",
            zarr_format=zarr_format,  # type: ignore[arg-type]
            chunk_key_encoding={"name": style, "separator": separator},
        )
        z[...] = np.arange(1, 16).reshape(5, 3)[(slice(None),) * ndim + (0,) * (2 - ndim)] + 100 * n
        z.attrs["n"] = n


def values_of(store: Any, arrays: dict[str, int]) -> dict[str, Any]:
    return {path: zarr.open_array(store, path=path)[...].tolist() for path in arrays}  # type: ignore[union-attr]


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", HIERARCHIES)
def test_the_same_as_without_sharding(name: str, kind: tuple[int, str, str]) -> None:
    """Every value, every key, every member; also after one array is gone."""
    arrays = HIERARCHIES[name]
    plain, base = MemoryStore(), MemoryStore()
    fill(plain, arrays, kind)
    fill(ShardingStore(base, chunks_per_shard=2), arrays, kind)
    store = ShardingStore(base)
    assert values_of(store, arrays) == values_of(plain, arrays)
    assert sorted(ShardingMapping(store)) == sorted(objects_of(plain))
    members = dict(zarr.open_group(store).members(max_depth=None))
    assert set(members) == set(dict(zarr.open_group(plain).members(max_depth=None)))
    first, *rest = arrays
    for each in (store, plain):
        sync(each.delete_dir(first))
    assert sorted(ShardingMapping(store)) == sorted(objects_of(plain))
    assert values_of(ShardingStore(base), rest) == values_of(plain, rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in HIERARCHIES if n != "signs and zeros"])
@pytest.mark.parametrize("separator", ["/", "."])
def test_the_same_in_the_draft_hierarchy(name: str, separator: str) -> None:
    """``c0`` is a chunk of an array, or a name; ``data/root`` holds both."""
    arrays = {p: n for p, n in HIERARCHIES[name].items() if not p.endswith(("c.0", "c.0.0", "c0"))}
    kind = (3, "default", separator)
    plain = MemoryStore()
    fill(plain, arrays, kind)
    base: dict[str, bytes] = {}
    fill(DraftHierarchyStore(ShardingStore(base, chunks_per_shard=2)), arrays, kind)
    store = DraftHierarchyStore(ShardingStore(base))
    assert values_of(store, arrays) == values_of(plain, arrays)
    assert sorted(sync(_listed(store))) == sorted(objects_of(plain))


async def _listed(store: Any) -> list[str]:
    return [key async for key in store.list()]


@pytest.fixture(params=BASES, ids=list(BASES))
def base(request: pytest.FixtureRequest) -> Any:
    return BASES[request.param]()


LOOKALIKES = [
    *("c/0/0", "0.0", "0/0", "c0/0", "c.0.0", "data/root/c0", "data/c/0/0", "data/root/notes"),
    *("group/c/0/0", "group/0.0", "group/c", "group/0", "meta/root/c0", "a/c/0/0/notes"),
    *("a/c/notes", "a/notes", "a/c/0/0x", "v/0.0.notes", "v/.zattrs", "v/notes/0.0"),
]


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("key", LOOKALIKES)
def test_keys_that_only_look_like_chunk_keys(base: Any, key: str) -> None:
    """They pass through: stored under their own name, listed, erased."""
    store = ShardingStore(base, chunks_per_shard={"a": 2, "v": 2})
    zarr.create_group(store, path="group")
    zarr.create_array(store, name="a", shape=(4, 4), chunks=(1, 1), dtype="i1")[:] = 1
    zarr.create_array(store, name="v", shape=(4, 4), chunks=(1, 1), dtype="i1", zarr_format=2)
    m = ShardingMapping(store)
    before = set(m)
    if not (
        key.startswith("a/c/0/0/") and base.__class__.__name__ in ("LocalStore", "FsspecStore")
    ):
        m[key] = b"some bytes"  # below a file there can be no other on a file system
        assert m[key] == b"some bytes"
        assert objects_of(base)[key] == b"some bytes"
        assert set(m) == before | {key}
        assert m.get_partial_values([(key, (5, None))]) == [b"bytes"]
        del m[key]
    assert set(m) == before - ({key} & {"v/.zattrs"})
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="a")[:], 1)


def test_a_document_at_a_chunk_key_is_a_document(base: Any) -> None:
    """An array cannot hold another node, but a stray file inside it must not hurt it."""
    store = ShardingStore(base, chunks_per_shard=2)
    z = zarr.create_array(store, name="a", shape=(4, 4), chunks=(1, 1), dtype="i1")
    z[:] = 3
    put(base, "a/c/zarr.json", json.dumps({"zarr_format": 3, "node_type": "group"}).encode())
    again = ShardingStore(base)
    np.testing.assert_array_equal(zarr.open_array(again, path="a")[:], 3)
    assert "a/c/zarr.json" in ShardingMapping(again)


def test_both_formats_at_one_path_with_other_keys(base: Any) -> None:
    """v3 spells c/0/0, v2 spells 0.0: each array has its own chunks."""
    store = ShardingStore(base, chunks_per_shard=2)
    for zarr_format, value in ((3, 3), (2, 2)):
        zarr.create_array(
            store,
            name="z",
            shape=(4, 4),
            chunks=(1, 1),
            dtype="i1",
            zarr_format=zarr_format,  # type: ignore[arg-type]
        )[:] = value
    again = ShardingStore(base)
    for zarr_format in (3, 2):
        z = zarr.open_array(again, path="z", zarr_format=zarr_format)  # type: ignore[arg-type]
        np.testing.assert_array_equal(z[:], zarr_format)
    keys = ShardingMapping(again).list_prefix("z/")
    assert len([k for k in keys if k.startswith("z/c/")]) == 16
    assert (
        len([k for k in keys if "." in k and "z/" in k and ".z" not in k and "json" not in k]) == 16
    )


@pytest.mark.parametrize("name", ["data/root/c0", "data/root/foo/c12", "data/root/c1/0"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_name_below_data_root_that_the_draft_takes_for_a_chunk(
    base: Any, name: str, zarr_format: int
) -> None:
    """Refused where the option shards draft arrays without metadata; right where it does not."""
    options: dict[str, Any] = {"zarr_format": zarr_format}
    options |= {"shape": (4,), "chunks": (1,), "chunk_key_encoding": {"name": "v2"}}
    with pytest.raises(UnsupportedError, match="give it another name"):
        zarr.create_array(ShardingStore(base, chunks_per_shard=2), name=name, dtype="i1", **options)
    store = ShardingStore(base, chunks_per_shard={name: 2})
    zarr.create_array(store, name=name, dtype="i1", **options)[:] = 5
    for again in (store, ShardingStore(base)):
        np.testing.assert_array_equal(zarr.open_array(again, path=name)[:], 5)


@pytest.mark.parametrize(
    "url", ["memory://signs-of-patterns", "shard://?chunks_per_shard=2::file://"]
)
def test_signs_of_patterns_are_names(url: str, tmp_path: Path) -> None:
    """fsspec removes what a name with brackets matches, unless it is asked for one object."""
    where: Any = f"{url}{tmp_path}/s" if url.startswith("shard") else ShardingStore(url, 2)
    group = zarr.open_group(where, mode="a")
    names = {"x[1]": "x1", "y*": "y2", "z?": "z3"}
    for name in [*names, *names.values()]:
        group.create_array(name, shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    for name, other in names.items():
        z, kept = (cast(Any, group[each]) for each in (name, other))
        z[2:] = 0  # erases chunks
        z[2:] = 0  # that are missing
        z.resize((3,))
        assert kept[:].tolist() == [1] * 4
        assert z[:].tolist() == [1, 1, 0]
        group.create_array(name, shape=(2,), chunks=(1,), dtype="u1", overwrite=True)
        assert kept[:].tolist() == [1] * 4
        del group[name]
    assert sorted(group.keys()) == sorted(names.values())
    assert all(cast(Any, group[each])[:].tolist() == [1] * 4 for each in names.values())
