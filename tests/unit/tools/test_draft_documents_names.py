"""Names and values of the draft, v2 and v3 stand for the same: types, codecs, fills, keys."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.metadata.documents import Geometry
from zarr_shardstore.tools.native.codecs import codec_of_bytes, compressor_of_codec
from zarr_shardstore.tools.native.data_types import (
    endian_of,
    fill_value_of_v2,
    fill_value_of_v3,
    parse_draft,
    parse_numpy,
    parse_v3,
    v3_data_type,
)
from zarr_shardstore.tools.native.draft_documents import (
    array_key,
    chunk_places,
    group_key,
    node_of_meta_key,
    node_of_v3_key,
    v3_candidate,
    v3_chunk_key,
    v3_key,
)

Document = dict[str, Any]

NAMES = ["|b1", "|i1", "|u1"]
NAMES += [f"{o}{k}{n}" for o in "<>" for k in "iu" for n in (2, 4, 8)]
NAMES += [f"{o}{k}" for o in "<>" for k in ("f2", "f4", "f8", "c8", "c16", "U1", "U7")]
NAMES += [f"{o}{k}8[{u}]" for o in "<>" for k in "mM" for u in ("Y", "D", "h", "us", "as")]
NAMES += ["|S1", "|S300", "|V1", "|V16"]

COMPRESSORS = [
    None,
    *({"id": name, "level": 3} for name in ("gzip", "zlib", "bz2")),
    {"id": "lz4", "acceleration": 2},
    {"id": "lzma", "format": 1, "check": -1, "preset": None, "filters": [{"id": 3, "dist": 4}]},
    {"id": "zstd", "level": -3, "checksum": True},
    {"id": "blosc", "cname": "zstd", "clevel": 0, "shuffle": 0, "blocksize": 512},
    {"id": "blosc", "cname": "lz4", "clevel": 9, "shuffle": 2, "blocksize": 0},
]


def same(one: Any, other: Any) -> bool:
    """Whether both are the same JSON object; 1, 1.0 and true are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("name", NAMES)
def test_data_types_there_and_back(name: str) -> None:
    """numpy's name, through v3 and the byte order of its codec."""
    data_type = parse_numpy(name)
    assert data_type == np.dtype(name)
    assert data_type.str == name
    assert parse_v3(v3_data_type(data_type), endian_of(data_type)) == data_type


def test_other_spellings_of_data_types() -> None:
    """Extension objects, plain bytes as 2.18 spells them, and names as objects."""
    assert parse_draft({"extension": "…", "type": "<c8", "fallback": None}) == parse_numpy("<c8")
    assert parse_draft({"type": [["", "|V4"]]}) == parse_numpy("|V4") == parse_draft("r32")
    assert parse_draft("bool") == parse_numpy("|b1") == parse_v3({"name": "bool"}, None)
    assert parse_numpy("<M8[μs]") == parse_numpy("<M8[us]")
    assert parse_v3("r24", None) == parse_numpy("|V3")


@pytest.mark.parametrize(
    "data_type",
    ["|O", "<f16", "<c32", "<i3", "int32", "", 3, None, [["a", "<i4"]], {"type": [["a", "<i4"]]}],
)
def test_data_types_that_are_refused(data_type: Any) -> None:
    """The message names the type."""
    with pytest.raises(UnsupportedError, match="data type"):
        parse_draft(data_type)


@pytest.mark.parametrize(
    "data_type",
    [
        "string",
        "variable_length_bytes",
        "int3",
        "int12",
        "float128",
        {"name": "struct", "configuration": {"fields": []}},
        {"name": "fixed_length_utf32", "configuration": {"length_bytes": 3}},
        {"name": "raw_bytes", "configuration": {}},
        {"name": "numpy.datetime64", "configuration": {}},
        {"name": "numpy.datetime64", "configuration": {"unit": "fortnight"}},
        {"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": "x"}},
        5,
    ],
)
def test_v3_data_types_that_are_refused(data_type: Any) -> None:
    """Among them those of variable length, and structured ones."""
    with pytest.raises(UnsupportedError, match="data type"):
        parse_v3(data_type, "little")


@pytest.mark.parametrize("config", [c for c in COMPRESSORS if c])
@pytest.mark.parametrize("itemsize", [1, 4])
def test_compressors_there_and_back(config: Document, itemsize: int) -> None:
    """Every option."""
    assert compressor_of_codec(codec_of_bytes(config, itemsize)) == config


def test_options_that_are_left_out_are_numcodecs_own() -> None:
    """v3 has no defaults of its own for them; an automatic shuffle depends on the item size."""
    shuffles = [codec_of_bytes({"id": "blosc", "shuffle": -1}, n) for n in (1, 2)]
    assert [c["configuration"]["shuffle"] for c in shuffles] == ["bitshuffle", "shuffle"]
    assert codec_of_bytes({"id": "zstd"}, 4)["configuration"] == {
        "level": 0,
        "checksum": False,
    }
    assert compressor_of_codec("numcodecs.lz4") == {"id": "lz4", "acceleration": 1}
    assert compressor_of_codec({"name": "numcodecs.gzip"}) == {"id": "gzip", "level": 1}


@pytest.mark.parametrize("codec", ["crc32c", "lz4", "numcodecs.delta", "numcodecs.shuffle"])
def test_codecs_that_are_refused(codec: str) -> None:
    """The message names those that are not."""
    with pytest.raises(UnsupportedError, match="take one of blosc, bz2"):
        compressor_of_codec(codec)


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        ("0x3e00", "<f2", 1.5),
        ("0x7fc00000", ">f4", "NaN"),
        ("0xff800000", "<f4", "-Infinity"),
        (["0x80000000", "NaN"], "<c8", [-0.0, "NaN"]),
        (0.1, "<f4", 0.10000000149011612),
        (1, "<f8", 1.0),
        ("NaT", "<M8[s]", -(2**63)),
        ([1, 2, 255], "|V3", "AQL/"),
        ("YQA=", "|S4", "YQ=="),
    ],
)
def test_v3_fill_values(value: Any, name: str, expected: Any) -> None:
    """Every spelling of v3 becomes the one of v2."""
    assert same(fill_value_of_v3(value, parse_numpy(name)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_null_is_what_zarr_reads(name: str) -> None:
    """The zero of the type; for times NaT."""
    value = fill_value_of_v2(None, parse_numpy(name))
    assert same(fill_value_of_v3(value, parse_numpy(name)), value)
    if parse_numpy(name).kind in "mM":
        assert value == -(2**63)
        return
    assert not value or value == [0.0, 0.0] or set(value.rstrip("=")) == {"A"}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (256, "|u1"),
        (-1, "<u2"),
        (1.5, "<i4"),
        ("1", "<i4"),
        (2, "|b1"),
        ("nan", "<f4"),
        ("0x7fc0", "<f4"),
        ([1.0], "<c8"),
        (1.0, "<c8"),
        ("abc", "<U2"),
        ("AAAA", "|V4"),
        ("?", "|S4"),
        ([256], "|V1"),
        (float("inf"), "<i8"),
        (None, "<i4"),
    ],
)
def test_fill_values_that_are_refused(value: Any, name: str) -> None:
    """What is no value of the type."""
    with pytest.raises(SpecError, match="fill value"):
        fill_value_of_v3(value, parse_numpy(name))


def test_a_nan_with_a_message_is_refused() -> None:
    """Its bits would be lost."""
    with pytest.raises(UnsupportedError, match="only a v3 document"):
        fill_value_of_v3("0x7fc00001", parse_numpy("<f4"))


coords = st.lists(st.integers(0, 10**6), max_size=4)


@given(coords, st.sampled_from("/."))
def test_chunk_keys_there_and_back(at: list[int], separator: Any) -> None:
    """A v3 suffix names one chunk of the draft; only the 0-d chunk has two places."""
    ndim, encoding = len(at), ChunkKeyEncoding("draft", separator)
    arrays = {"a/b": Geometry((9,) * ndim, (1,) * ndim, encoding)}
    suffix = separator.join(["c", *map(str, at)])
    places = chunk_places(arrays, ("a/b", suffix))
    assert places[0] == "data/root/a/b/c" + (separator.join(map(str, at)) if at else "0")
    keys = [v3_chunk_key(arrays, ("a/b", p.removeprefix("data/root/a/b/"))) for p in places]
    assert keys == [f"a/b/{suffix}"] * (1 if at else 2)
    assert v3_candidate(f"a/b/{suffix}") == ("a/b", suffix)
    for other in (len(at) + 1, max(len(at) - 1, 0)):
        if other != len(at):
            others = {"a/b": Geometry((9,) * other, (1,) * other, encoding)}
            assert chunk_places(others, ("a/b", suffix)) == ()


@given(st.lists(st.sampled_from(["a", "c", "0", "c0", "zarr.json", "x.array.json"]), max_size=4))
def test_document_keys_there_and_back(names: list[str]) -> None:
    """Whatever a node is named."""
    path = "/".join(names)
    assert node_of_v3_key(v3_key(path)) == path
    assert node_of_meta_key(array_key(path)) == path
    assert node_of_meta_key(group_key(path)) == path


@pytest.mark.parametrize(
    "key",
    ["zarr.json", "meta/root", "meta/root/a", "meta/root/.array.json", "meta/roota.array.json",
     "data/root/a.array.json", "meta/root/a/.group.json"],
)  # fmt: skip
def test_keys_of_no_document(key: str) -> None:
    """Not every key below ``meta`` is one."""
    assert node_of_meta_key(key) is None
