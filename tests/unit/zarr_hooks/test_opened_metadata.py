"""zarr's metadata of an array beside the stored document: the same thing in other spellings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zarr
from zarr.storage import MemoryStore

from zarr_shardstore import ShardingStore
from zarr_shardstore.metadata.documents import Node, parse_array
from zarr_shardstore.zarr_hooks.opened_metadata import describes

DTYPES: list[Any] = ["u1", ">i4", "f8", "M8[s]", "U3", "str", [("a", "i2"), ("b", "f4")]]
SPELLINGS: list[tuple[int, Any, str, Any]] = [
    (2, "u1", "dtype", "uint8"),
    (2, "i4", "dtype", "int32"),
    (2, "u1", "filters", []),
    (3, "i4", "data_type", {"name": "int32"}),
    (3, "i4", "codecs", [{"name": "endian", "configuration": {"endian": "little"}}]),
    (3, "u1", "codecs", ["bytes"]),
    (
        3,
        [("a", "i2")],
        "data_type",
        {"name": "structured", "configuration": {"fields": [["a", "int16"]]}},
    ),
]
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
OTHERS: list[tuple[int, str, Any]] = [
    (2, "dtype", "<u4"),
    (2, "dtype", ">i4"),
    (2, "chunks", [4]),
    (2, "compressor", {"id": "zlib", "level": 1}),
    (3, "data_type", "float32"),
    (3, "codecs", [{"name": "bytes", "configuration": {"endian": "big"}}]),
    (3, "codecs", [BYTES, {"name": "gzip", "configuration": {"level": 1}}]),
    (3, "chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [4]}}),
]


def made(dtype: Any, zarr_format: Any, base: Any = None) -> tuple[Any, Any]:
    """Return the metadata of a new array, and its document as it is stored."""
    store: Any = MemoryStore()
    options: Any = {"shape": (8,), "chunks": (2,), "dtype": dtype, "compressors": None}
    z = zarr.create_array(base(store) if base else store, zarr_format=zarr_format, **options)
    key = ".zarray" if zarr_format == 2 else "zarr.json"
    return z.metadata, json.loads(store._store_dict[key].to_bytes())


def is_described(metadata: Any, document: Any) -> bool:
    hierarchy: Any = f"v{metadata.zarr_format}"
    found = parse_array(Node(hierarchy, ""), document)
    assert found is not None
    return describes(metadata, found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", ["chunks", "shards"])
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_is_described_by_its_metadata(zarr_format: int, dtype: Any, view: Any) -> None:
    assert is_described(*made(dtype, zarr_format, lambda base: ShardingStore(base, 2, view=view)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("zarr_format", "dtype", "member", "value"), SPELLINGS)
def test_another_spelling_is_the_same(
    zarr_format: int, dtype: Any, member: str, value: Any
) -> None:
    """Other writers, and other versions of zarr, spell members otherwise."""
    metadata, document = made(dtype, zarr_format)
    assert is_described(metadata, {**document, member: value})


@pytest.mark.parametrize(("zarr_format", "member", "value"), OTHERS)
def test_another_array_is_not(zarr_format: int, member: str, value: Any) -> None:
    """Of another data type, chunk shape or codec."""
    metadata, document = made("i4", zarr_format)
    assert is_described(metadata, document)
    assert not is_described(metadata, {**document, member: value})
