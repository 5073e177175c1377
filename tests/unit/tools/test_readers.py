"""The phrases for the readers of an array, by its stored documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zarr

from zarr_shardstore import ShardingStore
from zarr_shardstore.metadata.declaration import MARKER
from zarr_shardstore.metadata.documents import with_conversion_marker
from zarr_shardstore.metadata.marker_codec import MarkerCodec
from zarr_shardstore.tools.inspect.readers import read_by, summarize


def document(zarr_format: Any = 3, chunks_per_shard: Any = None, **options: Any) -> dict[str, Any]:
    """The document of an array that a store with these options makes."""
    array = {k: options.pop(k) for k in ("shards", "dtype", "filters") if k in options}
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard, **options)
    array = {"dtype": "u1", **array}
    zarr.create_array(store, shape=(8,), chunks=(2,), zarr_format=zarr_format, **array)
    found: dict[str, Any] = json.loads(base["zarr.json" if zarr_format == 3 else ".zarray"])
    return found


SHARDING = {"name": "sharding", "configuration": {"chunks_per_shard": [2]}}
DRAFT = {"shape": [8], "storage_transformers": [SHARDING]}
FOREIGN = {"name": "example.org/x", "configuration": {}}
HERE = "only through this package"
V3 = document(chunks_per_shard=2)


@pytest.mark.parametrize(
    ("doc", "phrase"),
    [
        (V3, "every v3 reader"),
        (document(), "every v3 reader"),
        (document(native="passthrough", shards=(4,)), "every v3 reader"),
        (
            document(3, 2, index_location="start"),
            "every v3 reader, but not zarrita.js",
        ),
        (document(chunks_per_shard=2, dtype=str), "every v3 reader that knows string, vlen-utf8"),
        (document(chunks_per_shard=2, declaration="storage_transformers"), HERE),
        (document(chunks_per_shard=2, storage_transformers=["crc32c", "sharding"]), HERE),
        (document(storage_transformers=["crc32c"]), HERE),
        (document(2), "every v2 reader"),
        (document(2, 2), HERE),
        ({**document(2), "filters": [1, "x", {"id": "delta"}]}, "every v2 reader that knows delta"),
        ({**document(2), "compressor": {"id": "lzma"}}, "every v2 reader that knows lzma"),
        ({**document(2), "dtype": "<M8[ns]"}, "every v2 reader that knows <M8[ns]"),
        ({**document(2), "dtype": [["a", "<i4"]]}, "every v2 reader that knows structured types"),
        *(({**document(2), "dtype": name}, "every v2 reader") for name in ("|b1", ">c16", "|V3")),
        ({}, "not known: its metadata is not"),
        (
            DRAFT,
            "this package and zarr-python 2.13 to 2.18",
        ),
        ({**V3, "codecs": [], "storage_transformers": [FOREIGN]}, f"{HERE} with example.org/x"),
        ({**V3, "extensions": [SHARDING | {"name": MARKER}]}, "not known: its metadata is not"),
        (with_conversion_marker(V3), "no program until its conversion is finished"),
        (with_conversion_marker(document(2)), "no program until its conversion is finished"),
    ],
)
def test_the_readers_of_a_document(doc: dict[str, Any], phrase: str) -> None:
    """Each form in which an array can be stored."""
    assert read_by([doc]).startswith(phrase)
    assert "not known" in phrase or read_by([doc]) == phrase


def test_the_readers_of_two_documents() -> None:
    """Of an array with documents of both formats; one that only we read is no reason."""
    assert read_by([V3, document(2, 2)]) == "every v3 reader"
    assert read_by([document(), document(2)]) == "every v3 reader and every v2 reader"


def test_the_readers_of_a_store() -> None:
    """One phrase, or each with its number of arrays."""
    assert summarize([]) == ""
    assert summarize(["a", "", "a"]) == "a"
    assert summarize(["a", "b", "a"]) == "a (2 of 3); b (1 of 3)"


def test_the_codec_of_the_marker_has_its_name() -> None:
    """The name is written in both modules, so that the codec needs few imports."""
    assert MarkerCodec.codec_id == MARKER


def test_all_unknown_transformers_are_named() -> None:
    others = [
        {"name": "one"},
        {"name": "sharding", "configuration": {"chunks_per_shard": [2]}},
        {"name": "two"},
    ]
    for doc in ({"zarr_format": 3, "node_type": "array"}, {}):
        listed = {**doc, "shape": [4], "storage_transformers": others}
        assert read_by([listed]) == "only through this package with one, two"
