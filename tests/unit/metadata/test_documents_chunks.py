"""What the bytes of chunks mean: documents of one array agree, those of others do not."""

from __future__ import annotations

from typing import Any

import pytest

from zarr_shardstore.metadata.documents import ArrayDocument, Node, parse_array

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 3}}
DOC: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [10],
    "data_type": "uint16",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [BYTES, ZSTD],
    "fill_value": 0,
}


def sharded(codecs: list[Any]) -> dict[str, Any]:
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    configuration = {"chunk_shape": [2], "codecs": codecs, "index_codecs": index}
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    codec = {"name": "sharding_indexed", "configuration": configuration}
    return {**DOC, "chunk_grid": grid, "codecs": [codec]}


def parsed(doc: dict[str, Any], hierarchy: Any = "v3") -> ArrayDocument:
    found = parse_array(Node(hierarchy, "a"), doc)
    assert found is not None
    return found


SAME: list[dict[str, Any]] = [
    {**DOC, "shape": [30], "attributes": {"a": 1}, "fill_value": 7},
    {**DOC, "codecs": ["bytes", ZSTD]},
    {**DOC, "codecs": [{"name": "bytes"}, {"name": "zstd"}]},
    {**DOC, "codecs": [BYTES, {"name": "zstd", "configuration": {"level": 3, "checksum": False}}]},
    {**DOC, "data_type": {"name": "uint16"}},
    {**DOC, "codecs": [{**BYTES, "name": "endian"}, ZSTD]},
    sharded([BYTES, ZSTD]),
]
OTHER: list[dict[str, Any]] = [
    {**DOC, "data_type": "int16"},
    {**DOC, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}}},
    {**DOC, "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, ZSTD]},
    {**DOC, "codecs": [BYTES]},
    {**DOC, "codecs": [BYTES, {"name": "gzip", "configuration": {"level": 3}}]},
    sharded([BYTES]),
]


@pytest.mark.parametrize("doc", SAME)
def test_what_writers_leave_out_changes_no_meaning(doc: dict[str, Any]) -> None:
    assert parsed(DOC).has_same_chunks(parsed(doc))
    assert parsed(doc).has_same_chunks(parsed(DOC))


@pytest.mark.parametrize("doc", OTHER)
def test_another_type_shape_or_codec_is_another_meaning(doc: dict[str, Any]) -> None:
    assert not parsed(DOC).has_same_chunks(parsed(doc))
    assert not parsed(doc).has_same_chunks(parsed(DOC))


def record(name: str, *fields: Any) -> dict[str, Any]:
    data_type = {"name": name, "configuration": {"fields": list(fields)}}
    return {**DOC, "data_type": data_type}


def test_types_of_records_have_two_spellings() -> None:
    pairs = parsed(record("structured", ["a", "int8"], ["b", {"name": "bytes"}]))
    a = {"name": "a", "data_type": {"name": "int8"}}
    b = {"name": "b", "data_type": "variable_length_bytes"}
    assert pairs.has_same_chunks(parsed(record("struct", a, b)))
    assert parsed(record("struct", a, b)).has_same_chunks(pairs)
    assert not pairs.has_same_chunks(parsed(record("struct", b, a)))
    assert not pairs.has_same_chunks(parsed(record("struct", a)))
    assert not pairs.has_same_chunks(parsed(record("struct", {**a, "data_type": "int16"}, b)))


def test_one_byte_has_no_order() -> None:
    doc: dict[str, Any] = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<u1"}
    assert parsed(doc, "v2").has_same_chunks(parsed({**doc, "dtype": "|u1"}, "v2"))
    assert not parsed(doc, "v2").has_same_chunks(parsed({**doc, "dtype": "|i1"}, "v2"))
    two = parsed({**doc, "dtype": "<u2"}, "v2")
    assert not two.has_same_chunks(parsed({**doc, "dtype": ">u2"}, "v2"))


def test_filters_that_are_null_are_none() -> None:
    doc: dict[str, Any] = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<u2"}
    doc |= {"filters": None, "compressor": None, "order": "C", "fill_value": 0}
    mine = parsed(doc, "v2")
    assert mine.has_same_chunks(parsed({**doc, "filters": []}, "v2"))
    assert not mine.has_same_chunks(parsed({**doc, "compressor": {"id": "zlib"}}, "v2"))
