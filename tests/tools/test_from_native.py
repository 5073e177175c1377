"""`from_native`: arrays of the sharding codec, declared by a transformer or by the v2 marker."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from tests.support.kit import objects_of
from tests.support.pipeline_arrays import THEIRS
from tests.tools.test_native import assert_read, data_of, documents_of, make_v2, make_v3, wrap
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnsupportedError,
    from_native,
    reshard,
    to_native,
)


def native(make: Callable[[Any], Any]) -> Any:
    base = make({})
    to_native(base)
    return base


@pytest.mark.parametrize("make", [make_v2, make_v3])
def test_declared_by_a_transformer(make: Callable[[Any], Any]) -> None:
    """Only what is sharded changes; other readers refuse it, the store reads it, also
    consolidated; `to_native` makes the same documents again."""
    base = native(make)
    before, values = documents_of(base), data_of(base)
    report = from_native(base)
    assert data_of(base) == values
    docs = documents_of(base)
    assert docs.keys() == before.keys()
    changed = {key for key in docs if docs[key] != before[key]}
    assert changed == {"zarr.json", "img/a/zarr.json", "img/deep/b/zarr.json"}
    assert report.n_documents_written == 3
    assert docs["img/a/zarr.json"]["storage_transformers"][0]["name"] == "sharding"
    with pytest.raises(Exception, match="zarr_shardstore"):
        zarr.open_array(wrap(base), path="img/a")
    for is_consolidated in (False, True):
        assert_read(ShardingStore(wrap(base)), 3, is_consolidated=is_consolidated)
    assert from_native(base).n_documents_written == 0
    to_native(base)
    assert documents_of(base) == before


@pytest.mark.parametrize("make", [make_v2, make_v3])
def test_made_v2(make: Callable[[Any], Any]) -> None:
    """All of it; the store reads it, also consolidated; `to_native` makes the same again."""
    base = native(make)
    before, values = documents_of(base), data_of(base)
    from_native(base, zarr_format=2)
    assert data_of(base) == values
    docs = documents_of(base)
    assert not [key for key in docs if key.endswith("zarr.json")]
    assert docs["img/a/.zarray"]["filters"][-1]["id"] == "zarr_shardstore"
    assert docs["img/a/.zarray"]["chunks"] == [6, 4]
    assert docs["plain/.zarray"]["filters"] is None
    for is_consolidated in (False, True):
        assert_read(ShardingStore(wrap(base)), 2, is_consolidated=is_consolidated)
    assert {e.action for e in from_native(base, zarr_format=2).entries} == {"skipped"}
    to_native(base)
    assert documents_of(base) == before


def test_a_v2_hierarchy_says_the_same_after_there_and_back() -> None:
    """Each document, but for the order of one dimension."""
    base = make_v2({})
    before = documents_of(base)
    to_native(base)
    from_native(base, zarr_format=2)
    docs = documents_of(base)
    before["plain/.zarray"]["order"] = "C"
    for key in before.keys() - {".zmetadata"}:
        assert docs.get(key, {}) == before[key], key
    assert before.keys() - docs.keys() == {"img/.zattrs"}, "attributes that are none"


def test_a_part_made_v2() -> None:
    """It is no longer in the consolidated metadata of the groups that stay v3."""
    base = native(make_v2)
    from_native(base, paths=["img/deep"], zarr_format=2)
    docs = documents_of(base)
    assert {"img/deep/.zgroup", "img/deep/b/.zarray"} <= docs.keys()
    copies = docs["zarr.json"]["consolidated_metadata"]["metadata"]
    assert sorted(copies) == ["img", "img/a", "plain"]
    from_native(base, paths="img", zarr_format=2)
    copies = documents_of(base)["zarr.json"]["consolidated_metadata"]["metadata"]
    assert sorted(copies) == ["plain"]


def other_keys() -> Any:
    base: Any = {}
    zarr.create_array(ShardingStore(base), name="plain", shape=(4,), chunks=(2,), dtype="u1")
    return base


def other_codecs() -> Any:
    """A codec around the shards."""
    base = native(make_v2)
    doc = json.loads(base["img/a/zarr.json"])
    doc["codecs"].append({"name": "gzip", "configuration": {"level": 1}})
    return {**base, "img/a/zarr.json": json.dumps(doc).encode()}


def changed_twin(**members: Any) -> Any:
    base = make_v2({})
    twin = dict(base)
    to_native(twin)
    doc = json.loads(twin["plain/zarr.json"])
    return {**base, "plain/zarr.json": json.dumps({**doc, **members}).encode()}


@pytest.mark.parametrize(
    ("make", "zarr_format", "message"),
    [
        (other_keys, 2, "'plain' .*'default'.*conversion"),
        (other_codecs, 2, "'img/a' .*sharding codec"),
        (other_codecs, 3, "'img/a' .*beside .*other codecs"),
        (partial(changed_twin, fill_value=3, attributes={}), 2, "'plain' .*different"),
        (partial(changed_twin, dimension_names=["z"]), 2, "'plain' .*different"),
    ],
)
def test_what_cannot_be_expressed_is_refused_before_anything_is_written(
    make: Callable[[], Any], zarr_format: Any, message: str
) -> None:
    base = make()
    before = dict(base)
    with pytest.raises(UnsupportedError, match=message):
        from_native(base, zarr_format=zarr_format)
    assert base == before


def test_arrays_left_to_zarr_are_left_alone() -> None:
    """Created with ``shards=`` through the store, by another pipeline."""
    base: Any = {}
    with zarr.config.set({"codec_pipeline.path": THEIRS}):
        zarr.create_array(
            ShardingStore(base), name="z", shape=(8,), chunks=(2,), shards=(4,), dtype="u1"
        )
    before = dict(base)
    (entry,) = [e for e in from_native(base).entries if e.path == "z"]
    assert entry.action == "skipped"
    assert to_native(base).n_documents_written == 0
    assert base == before


def test_formats() -> None:
    with pytest.raises(SpecError, match="zarr_format"):
        from_native({}, zarr_format=1)  # type: ignore[arg-type]


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_array_with_consolidated_indexes(tmp_path: Path, zarr_format: Any) -> None:
    """Whichever way it is translated, its document says that they are there."""
    root = str(tmp_path)
    with_shards = ShardingStore(root, chunks_per_shard=4)
    z = zarr.create_array(
        with_shards, name="a", shape=(64,), chunks=(4,), dtype="i4", zarr_format=2
    )
    z[:] = 1
    with_shards.close()
    ShardingMapping(root).consolidate_index("a")
    for translate in (to_native, partial(from_native, zarr_format=zarr_format), to_native):
        translate(root)
        np.testing.assert_array_equal(zarr.open_array(ShardingStore(root), path="a")[:], 1)
        (document,) = [p for p in (tmp_path / "a").iterdir() if p.name in (".zarray", "zarr.json")]
        assert "zarr_shardstore_index" in json.loads(document.read_bytes())


def test_shards_of_several_lengths_over_equal_chunks() -> None:
    """There and back; the chunks are the same in both documents."""
    base = MemoryStore()
    z = zarr.create_array(base, name="a", shape=(90,), chunks=(1,), dtype="i4")
    z[:] = np.arange(90)
    reshard(base, shards=[[31, 28, 31]])
    native = objects_of(base)
    from_native(base, zarr_format=3)
    assert "storage_transformers" in json.loads(objects_of(base)["a/zarr.json"])
    assert np.asarray(zarr.open_array(ShardingStore(base), path="a")[:]).tolist() == [*range(90)]
    to_native(base)
    assert objects_of(base) == native
