"""zarr-python 3 works on a draft hierarchy as on Zarr v3: arrays, groups, attributes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, TransposeCodec
from zarr.core.sync import sync

from tests.support.bases import BASES
from tests.support.draft import (
    ENTRY_POINT,
    GROUP,
    draft_array,
    listed,
    names,
    put,
    take,
)
from tests.support.kit import objects_of
from zarr_shardstore import DraftHierarchyStore, ShardingStore

PIPELINES = ["zarr.core.codec_pipeline.BatchedCodecPipeline"]
if hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
    PIPELINES.append("zarr.core.codec_pipeline.FusedCodecPipeline")


@pytest.fixture(params=PIPELINES, ids=lambda p: p.rsplit(".", 1)[1])
def pipeline(request: pytest.FixtureRequest) -> Any:
    """Each codec pipeline that this zarr has."""
    with zarr.config.set({"codec_pipeline.path": request.param}):
        yield request.param


@pytest.fixture(params=list(BASES))
def base(request: pytest.FixtureRequest) -> Any:
    """Each kind of base store, empty."""
    return BASES[request.param]()


@pytest.mark.parametrize("cps", [None, 2])
def test_a_hierarchy_through_zarr(base: Any, cps: int | None, pipeline: str) -> None:
    """Groups, attributes, arrays, resize, append, members, deletion; on each base store."""
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=cps))
    group = zarr.open_group(store, mode="w", attributes={"made": "here"})
    z = group.create_array(
        "a/b",
        shape=(5, 4),
        chunks=(2, 1),
        dtype=">i4",
        serializer=BytesCodec(endian="big"),
        filters=[TransposeCodec(order=(1, 0))],
        compressors=BloscCodec(cname="lz4", shuffle="shuffle"),
        attributes={"units": "m"},
        dimension_names=["y", None],
    )
    data = np.arange(20, dtype="i4").reshape(5, 4) + 1
    z[:] = data
    point = group.create_array("point", shape=(), dtype="f8", fill_value=np.nan)
    assert np.isnan(float(np.asarray(point[()])))
    point[...] = 1.5
    z.append(np.full((1, 4), 7, "i4"))
    z.attrs["more"] = [1]

    again = zarr.open_group(DraftHierarchyStore(base), mode="r+")
    z = again["a/b"]  # type: ignore[assignment]
    assert dict(again.attrs) == {"made": "here"}
    assert dict(z.attrs) == {"units": "m", "more": [1]}
    assert z.metadata.dimension_names == ("y", None)  # type: ignore[union-attr]
    np.testing.assert_array_equal(z[:], np.concatenate([data, np.full((1, 4), 7)]))
    z.resize((3, 4))
    np.testing.assert_array_equal(z[:], data[:3])
    assert z.nchunks_initialized == 8
    assert z.nbytes_stored() > 0
    assert {name for name, _ in again.members(max_depth=None)} == {"a", "a/b", "point"}
    stored = objects_of(base)
    shards = {"data/root/a/b/c0/0", "data/root/a/b/c0/1"}
    assert {k for k in stored if k.startswith("data/root/a/b/c0")} == (
        shards if cps else {f"data/root/a/b/c0/{i}" for i in range(4)}
    )
    assert json.loads(stored["zarr.json"]) == ENTRY_POINT
    del again["a"]
    assert set(objects_of(base)) == {
        "zarr.json",
        "meta/root.group.json",
        "meta/root/point.array.json",
        "data/root/point/c0",
    }
    zarr.open_group(store, mode="w")
    assert set(objects_of(base)) == {"zarr.json", "meta/root.group.json"}


def test_an_array_is_replaced_by_another(base: Any) -> None:
    """Nothing of the old one is left, whichever separator, dims and kind it had."""
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=2))
    zarr.open_group(store, mode="w")
    for separator, shape in (("/", (4, 4)), (".", (6,)), ("/", ()), (".", (3, 2, 1)), ("/", (4,))):
        z = zarr.create_array(
            store,
            name="z",
            shape=shape,
            chunks=(1,) * len(shape),
            dtype="u2",
            chunk_key_encoding={"name": "default", "separator": separator},
            overwrite=True,
        )
        data = np.arange(1, z.size + 1, dtype="u2").reshape(shape)
        z[...] = data
        np.testing.assert_array_equal(zarr.open_array(store, path="z", mode="r")[...], data)
        assert sum(key.startswith("z/c") for key in listed(store)) == z.size
    zarr.create_group(store, path="z", overwrite=True)
    assert listed(store) == ["z/zarr.json", "zarr.json"]
    stored = set(objects_of(base))
    assert stored == {"zarr.json", "meta/root.group.json", "meta/root/z.group.json"}


def test_a_root_array(base: Any) -> None:
    """Its document is ``meta/root.array.json``, its chunks are directly below ``data/root``."""
    store = DraftHierarchyStore(base)
    z = zarr.create_array(store, shape=(3, 2), chunks=(1, 1), dtype="i1")
    z[:] = 1
    chunks = [f"c/{i}/{j}" for i in range(3) for j in range(2)]
    assert listed(store) == [*chunks, "zarr.json"]
    assert names(store) == ["c", "zarr.json"]
    assert names(store, "c") == ["0", "1", "2"]
    assert set(objects_of(base)) == {
        "zarr.json",
        "meta/root.array.json",
        *(f"data/root/c{i}/{j}" for i in range(3) for j in range(2)),
    }
    assert zarr.open_array(DraftHierarchyStore(base), mode="r").nchunks_initialized == 6


def test_names_that_look_like_chunks(base: Any) -> None:
    """Groups and arrays named ``c``, ``0``, ``c0``: the documents tell them from chunks."""
    store = DraftHierarchyStore(base)
    group = zarr.open_group(store, mode="w")
    paths = ["c", "c0/0", "0", "foo/c", "foo/c0", "foo/0/1", "bar.array.json/x", "zarr"]
    for i, path in enumerate(paths):
        z = group.create_array(path, shape=(2, 2), chunks=(1, 1), dtype="i2")
        z[:] = i + 1
    for fresh in (store, DraftHierarchyStore(base)):
        again = zarr.open_group(fresh, mode="r")
        found = {path for path, z in again.members(max_depth=None) if isinstance(z, zarr.Array)}
        assert found == set(paths)
        for i, path in enumerate(paths):
            assert (np.asarray(again[path][:]) == i + 1).all()  # type: ignore[index]
            assert listed(fresh, f"{path}/c/") == [
                f"{path}/c/{x}" for x in ("0/0", "0/1", "1/0", "1/1")
            ]


def test_what_v3_has_no_place_for_survives() -> None:
    """Through attribute updates and resizes of arrays and groups, ``null`` included."""
    extension = [{"extension": "https://example.org/e", "must_understand": False}]
    array = json.loads(draft_array([4], [2])) | {"extensions": extension, "unknown": 1}
    base = {
        "meta/root/a.array.json": json.dumps(array).encode(),
        "meta/root.group.json": json.dumps({"attributes": {}, "extensions": extension}).encode(),
        "zarr.json": json.dumps(ENTRY_POINT).encode(),
    }
    group = zarr.open_group(DraftHierarchyStore(base), mode="r+")
    group.attrs["x"] = 1
    z = group["a"]
    assert isinstance(z, zarr.Array)
    z.attrs["y"] = 2
    z.resize((6,))
    assert json.loads(base["meta/root.group.json"]) == {
        "attributes": {"x": 1},
        "extensions": extension,
    }
    assert json.loads(base["meta/root/a.array.json"]) == {
        **array,
        "attributes": {"y": 2},
        "shape": [6],
    }


def test_a_sharded_array_stays_sharded() -> None:
    """A reader without ``chunks_per_shard`` updates what another one created with it."""
    base: dict[str, bytes] = {}
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=(2, 3)))
    zarr.create_array(store, name="z", shape=(4, 6), chunks=(1, 1), dtype="u1")
    z = zarr.open_array(DraftHierarchyStore(base), path="z")
    z.resize((8, 6))
    z.attrs["a"] = 1
    z[:] = 5
    (declared,) = json.loads(base["meta/root/z.array.json"])["storage_transformers"]
    assert declared["configuration"] == {"chunks_per_shard": [2, 3]}
    assert sum(key.startswith("data/root/z/") for key in base) == 8


def test_implicit_groups() -> None:
    """A directory with a document below is a group, everywhere; other keys make none."""
    base = {
        "meta/root/a/b/c.group.json": GROUP,
        "meta/root/d/readme.txt": b"",
        "data/root/e/x": b"1",
    }
    store = DraftHierarchyStore(base)
    keys = ["a/b/c/zarr.json", "a/b/zarr.json", "a/zarr.json", "e/x", "zarr.json"]
    assert listed(store) == keys
    assert listed(store, "a/") == keys[:3]
    assert names(store) == ["a", "e", "zarr.json"]
    assert names(store, "a") == names(store, "a/") == ["b", "zarr.json"]
    for key in keys:
        assert sync(store.exists(key)), key
    assert json.loads(take(store, "a/zarr.json") or b"") == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {},
    }
    assert not sync(store.exists("d/zarr.json"))
    assert not sync(store.exists("e/zarr.json"))
    del base["data/root/e/x"]
    group = zarr.open_group(store, mode="r+")
    assert [name for name, _ in group.members(max_depth=None)] == ["a", "a/b", "a/b/c"]
    group["a"].attrs["now"] = "explicit"
    assert json.loads(base["meta/root/a.group.json"]) == {"attributes": {"now": "explicit"}}


def test_an_entry_point_alone_is_an_empty_group() -> None:
    """As for zarr 2.18.7; without it there is nothing."""
    base = {"zarr.json": json.dumps(ENTRY_POINT).encode()}
    assert listed(DraftHierarchyStore(base)) == ["zarr.json"]
    assert list(zarr.open_group(DraftHierarchyStore(base), mode="r")) == []
    assert listed(DraftHierarchyStore({})) == []
    with pytest.raises(FileNotFoundError):
        zarr.open_group(DraftHierarchyStore({}), mode="r")


def test_parents_of_a_new_array_get_documents() -> None:
    """zarr 2.18.7 opens a group for reading only if it has one."""
    base: dict[str, bytes] = {}
    zarr.create_array(DraftHierarchyStore(base), name="a/b/c", shape=(2,), dtype="u1")
    assert {k for k in base if k.endswith(".group.json")} == {
        "meta/root.group.json",
        "meta/root/a.group.json",
        "meta/root/a/b.group.json",
    }


def test_a_deleted_directory_is_no_group(tmp_path: Any) -> None:
    """Local files keep empty directories; they are not shown."""
    store = DraftHierarchyStore(tmp_path)
    zarr.open_group(store, mode="w").create_group("a/b/c")
    for key in ("a/b/c/zarr.json", "a/b/zarr.json", "a/zarr.json"):
        sync(store.delete(key))
    assert (tmp_path / "meta" / "root").is_dir()
    (tmp_path / "meta" / "root" / "a" / "b").mkdir(parents=True, exist_ok=True)
    assert names(store) == ["zarr.json"]
    assert not sync(store.exists("a/zarr.json"))


def test_the_other_document_of_a_node_is_removed() -> None:
    """Array where a group was, and the reverse; deleting removes both."""
    base = {"meta/root/a.array.json": draft_array([2], [1]), "meta/root/a.group.json": GROUP}
    store = DraftHierarchyStore(base)
    shown = json.loads(take(store, "a/zarr.json") or b"")
    assert shown["node_type"] == "array", "as in zarr 2.18.7, the array is found first"
    put(store, "a/zarr.json", json.dumps(shown).encode())
    assert "meta/root/a.group.json" not in base
    put(store, "a/zarr.json", b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    assert set(base) == {"meta/root/a.group.json", "zarr.json"}
    base["meta/root/a.array.json"] = draft_array([2], [1])
    sync(store.delete("a/zarr.json"))
    assert set(base) == {"zarr.json"}
    sync(store.delete("zarr.json"))
    assert not base


def test_what_another_store_of_the_process_declares_is_known_at_once() -> None:
    """Another separator, other shards; a store that had met the array spells the new keys."""
    base: dict[str, bytes] = {}
    first = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=2))
    second = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=3))
    for store, separator in ((first, "/"), (second, ".")):
        encoding: Any = {"name": "default", "separator": separator}
        z = zarr.create_array(
            store,
            name="z",
            shape=(6, 6),
            chunks=(1, 1),
            dtype="i4",
            overwrite=True,
            chunk_key_encoding=encoding,
        )
        z[:] = 1
    zarr.open_array(first, path="z")[0, 0] = 2
    again = zarr.open_array(DraftHierarchyStore(ShardingStore(base)), path="z")
    assert (again[0, 0], again[5, 5]) == (2, 1)
    assert sync(first.exists("z/c.5.5"))
    assert not sync(first.exists("z/c/5/5"))
    assert len([key for key in base if key.startswith("data/root/z/")]) == 4
