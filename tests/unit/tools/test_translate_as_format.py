"""Documents of one node in either format, without shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import ShardingStore, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.tools.native.translate import documents_in, encoding_in


def stored(zarr_format: Any, **options: Any) -> tuple[dict[str, bytes], Any]:
    """Return a base store with an array in shards, and its document as it is stored."""
    base: dict[str, Any] = {}
    options = {"chunks": (2, 3), "dtype": "u2", "shape": (4, 6), **options}
    store = ShardingStore(base, chunks_per_shard=2)
    z: Any = zarr.create_array(store, name="z", zarr_format=zarr_format, **options)
    z[:] = np.arange(24).reshape(4, 6)
    name = "zarr.json" if zarr_format == 3 else ".zarray"
    return base, json.loads(bytes(base[f"z/{name}"]))


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("asked", [2, 3])
def test_zarr_reads_the_chunks_by_them(tmp_path: Path, zarr_format: Any, asked: Any) -> None:
    """Plain zarr, of chunks that are copied under the keys of the other format."""
    base, doc = stored(zarr_format, fill_value=7)
    shown: dict[str, Any] = {}
    for name, document in documents_in(asked, doc, {"unit": "nm"}).items():
        shown[f"z/{name}"] = json.dumps(document).encode()
    store = ShardingStore(base)
    written = ChunkKeyEncoding("default", "/") if zarr_format == 3 else ChunkKeyEncoding("v2", ".")
    for coords in np.ndindex(2, 2):
        chunk = store.get_sync(f"z/{written.encode(coords)}")
        assert chunk is not None
        shown[f"z/{encoding_in(asked, written).encode(coords)}"] = chunk.to_bytes()
    for key, value in shown.items():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(value)
    read: Any = zarr.open_array(str(tmp_path), path="z", mode="r")
    assert read.metadata.zarr_format == asked
    assert (read.chunks, read.shards, read.fill_value) == ((2, 3), None, 7)
    np.testing.assert_array_equal(read[:], np.arange(24).reshape(4, 6))


def test_a_fill_value_of_zero_is_no_null() -> None:
    """zarr 2 takes a null for any value."""
    _, doc = stored(3, dimension_names=["y", "x"])
    shown = documents_in(2, doc, {})
    assert shown[".zarray"]["fill_value"] == 0
    assert shown[".zattrs"] == {"_ARRAY_DIMENSIONS": ["y", "x"]}


def test_no_mark_is_shown() -> None:
    """Neither of an array that is left to zarr, nor of a consolidated index."""
    _, doc = stored(3)
    inner = doc["codecs"][0]["configuration"]
    mark = {"must_understand": False, "native": "passthrough"}
    marked = {**doc, "zarr_shardstore": mark, "attributes": {}}
    assert documents_in(3, marked, {})["zarr.json"]["codecs"] == doc["codecs"]
    assert "zarr_shardstore" not in documents_in(3, marked, {})["zarr.json"]
    assert documents_in(3, doc, {})["zarr.json"]["codecs"] == inner["codecs"]


def test_what_a_format_cannot_say_is_refused() -> None:
    _, doc = stored(3, dtype="u2", compressors=zarr.codecs.BloscCodec())
    unknown = {**doc["codecs"][0]["configuration"], "codecs": [{"name": "mine"}]}
    with pytest.raises(UnsupportedError, match="mine"):
        documents_in(
            2, {**doc, "codecs": [{"name": "sharding_indexed", "configuration": unknown}]}, {}
        )


def test_groups_have_attributes() -> None:
    assert documents_in(3, {"zarr_format": 2}, {"a": 1})["zarr.json"]["attributes"] == {"a": 1}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"a": 1}}
    assert documents_in(2, group, {}) == {".zgroup": {"zarr_format": 2}, ".zattrs": {"a": 1}}
