"""Draft documents become v3 documents and come back as they were; the rest is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.codec_names import codec_of_compressor, compressor_of_codec
from zarr_shardstore.format.data_types import DataType, parse_draft, parse_numpy, parse_v3
from zarr_shardstore.format.draft_documents import (
    ENTRY_POINT,
    array_of_draft,
    array_to_draft,
    check_entry_point,
    group_of_draft,
    group_to_draft,
)
from zarr_shardstore.format.draft_keys import (
    ChunkSpelling,
    array_key,
    group_key,
    node_of_meta_key,
    node_of_v3_key,
    v3_candidate,
    v3_key,
)
from zarr_shardstore.format.fill_values import fill_value_of_v2, fill_value_of_v3

Document = dict[str, Any]

# As zarr-python 2.18.7 wrote it, by zarr.create(shape=(5, 4), chunks=(2, 3), dtype=">f4", ...).
DRAFT: Document = {
    "attributes": {"units": "m", "seen": [1, 1.0, True, None]},
    "chunk_grid": {"chunk_shape": [2, 3], "separator": ".", "type": "regular"},
    "chunk_memory_layout": "F",
    "compressor": {
        "codec": "https://purl.org/zarr/spec/codec/blosc/1.0",
        "configuration": {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": 1},
    },
    "data_type": ">f4",
    "dimension_separator": ".",
    "extensions": [],
    "fill_value": None,
    "shape": [5, 4],
}

# Written by hand from the v3 specification.
V3: Document = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [5, 4],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    "fill_value": 0.0,
    "codecs": [
        {"name": "transpose", "configuration": {"order": [1, 0]}},
        {"name": "bytes", "configuration": {"endian": "big"}},
        {
            "name": "blosc",
            "configuration": {
                "typesize": 4,
                "cname": "lz4",
                "clevel": 5,
                "shuffle": "shuffle",
                "blocksize": 0,
            },
        },
    ],
    "attributes": {"units": "m", "seen": [1, 1.0, True, None]},
    "storage_transformers": [],
}

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


@st.composite
def fill_values(draw: st.DrawFn, data_type: DataType) -> Any:
    """A fill value as zarr-python 2.18 writes it."""
    kind, nbytes = data_type.kind, data_type.itemsize
    if kind == "b":
        return draw(st.booleans())
    if kind in "iumM":
        bits = 8 * nbytes
        low, high = (0, 2**bits - 1) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return draw(st.integers(low, high))
    if kind in "fc":
        width: Any = 8 * (nbytes if kind == "f" else nbytes // 2)
        number = st.floats(width=width, allow_nan=False, allow_infinity=False)
        one = st.one_of(number, st.sampled_from(["NaN", "Infinity", "-Infinity"]))
        return draw(one) if kind == "f" else draw(st.lists(one, min_size=2, max_size=2))
    if kind == "U":
        return draw(st.text(st.characters(codec="utf-8"), max_size=nbytes // 4))
    size = nbytes if kind == "V" else draw(st.integers(0, nbytes))
    raw = draw(st.binary(min_size=size, max_size=size))
    return base64.b64encode(raw.rstrip(b"\0") if kind == "S" else raw).decode()


@st.composite
def v3_documents(draw: st.DrawFn) -> Document:
    """v3 array documents that the draft can express, in the one spelling that is shown."""
    name = draw(st.sampled_from(NAMES))
    data_type = parse_numpy(name)
    ndim = draw(st.integers(0, 4))
    numbers = st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim)
    codecs: list[Document] = []
    if ndim > 1 and draw(st.booleans()):
        codecs.append({"name": "transpose", "configuration": {"order": [*range(ndim)][::-1]}})
    endian = data_type.endian
    codecs.append(
        {"name": "bytes", "configuration": {"endian": endian}} if endian else {"name": "bytes"}
    )
    config = draw(st.sampled_from(COMPRESSORS))
    if config is not None:
        codecs.append(codec_of_compressor(config, data_type.itemsize))
    doc = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": draw(numbers),
        "data_type": data_type.v3,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": draw(numbers)}},
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": draw(st.sampled_from("/."))},
        },
        "fill_value": draw(fill_values(data_type)),
        "codecs": codecs,
        "attributes": draw(
            st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5)))
        ),
        "storage_transformers": [],
    }
    doc["attributes"].pop("filters", None)
    if draw(st.booleans()):
        label = st.one_of(st.none(), st.text(max_size=3))
        doc["dimension_names"] = draw(st.lists(label, min_size=ndim, max_size=ndim))
    return doc


def same(one: Any, other: Any) -> bool:
    """Whether both are the same JSON object; 1, 1.0 and true are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


# ------------------------------------------------------------------- round trips


def test_a_document_of_zarr218_as_v3() -> None:
    """Each member where v3 has it."""
    assert same(array_of_draft(DRAFT), V3)


@given(v3_documents())
def test_there_and_back(doc: Document) -> None:
    """v3 to draft to v3 gives the same document, through its bytes too."""
    assert same(array_of_draft(json.loads(json.dumps(array_to_draft(doc)))), doc)


@given(v3_documents())
def test_what_nobody_changed_stays_as_it_is_stored(doc: Document) -> None:
    """The spelling of the writer, and members that v3 has no place for."""
    stored = {
        **array_to_draft(doc),
        "extensions": [{"extension": "x", "must_understand": False}],
        "storage_transformers": [],
        "unknown": {"a": [1, 2.0]},
    }
    assert same(array_to_draft(array_of_draft(stored), stored), stored)


def test_an_update_changes_only_what_it_changes() -> None:
    """Attributes and shape are new; ``null`` and dimension_separator stay."""
    shown = {**array_of_draft(DRAFT), "shape": [9, 4], "attributes": {"seen": [1, 1, True, None]}}
    expected = {**DRAFT, "shape": [9, 4], "attributes": {"seen": [1, 1, True, None]}}
    assert same(array_to_draft(shown, DRAFT), expected)


def test_a_new_fill_value_replaces_null() -> None:
    """Also minus zero, which Python holds for equal to zero."""
    for value in (1.5, -0.0, "NaN"):
        shown = {**array_of_draft(DRAFT), "fill_value": value}
        assert same(array_to_draft(shown, DRAFT)["fill_value"], value)


@pytest.mark.parametrize(
    "change",
    [
        {"data_type": "int32", "fill_value": 0},
        {"codecs": V3["codecs"][1:]},
        {"codecs": V3["codecs"][:2]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}},
        {"chunk_key_encoding": "default"},
    ],
)
def test_another_array_inherits_nothing(change: Document) -> None:
    """Members of the array that was there before are not those of its successor."""
    new = {**V3, **change}
    stored = {**DRAFT, "extensions": [{"extension": "x"}], "unknown": 1}
    assert same(array_to_draft(new, stored), array_to_draft(new))


def test_a_stored_document_that_nobody_can_read_is_replaced() -> None:
    """It cannot be shown, so nothing of it is kept."""
    assert same(array_to_draft(V3, {"shape": 3}), array_to_draft(V3))


@given(st.dictionaries(st.text(max_size=5), st.integers()))
def test_groups_there_and_back(attributes: Document) -> None:
    """Attributes are all that a group has; other members stay where they are stored."""
    stored = {"attributes": attributes, "extensions": []}
    shown = group_of_draft(stored)
    assert shown == {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    assert group_to_draft(shown) == {"attributes": attributes}
    assert group_to_draft({**shown, "consolidated_metadata": None}, stored) == stored


# -------------------------------------------------------------- names and values


@pytest.mark.parametrize("name", NAMES)
def test_data_types_there_and_back(name: str) -> None:
    """numpy's name, through v3 and the byte order of its codec."""
    data_type = parse_numpy(name)
    assert data_type.numpy_name == name == np.dtype(name).str
    assert data_type.itemsize == np.dtype(name).itemsize
    assert parse_v3(data_type.v3, data_type.endian) == data_type


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
        "float128",
        {"name": "struct", "configuration": {"fields": []}},
        {"name": "fixed_length_utf32", "configuration": {"length_bytes": 3}},
        {"name": "raw_bytes", "configuration": {}},
        {"name": "numpy.datetime64", "configuration": {}},
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
    assert compressor_of_codec(codec_of_compressor(config, itemsize)) == config


def test_options_that_are_left_out_are_numcodecs_own() -> None:
    """v3 has no defaults of its own for them; an automatic shuffle depends on the item size."""
    shuffles = [codec_of_compressor({"id": "blosc", "shuffle": -1}, n) for n in (1, 2)]
    assert [c["configuration"]["shuffle"] for c in shuffles] == ["bitshuffle", "shuffle"]
    assert codec_of_compressor({"id": "zstd"}, 4)["configuration"] == {
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
def test_null_is_the_zero_of_the_type(name: str) -> None:
    """Which numpy's zeros are, too."""
    value = fill_value_of_v2(None, parse_numpy(name))
    assert same(fill_value_of_v3(value, parse_numpy(name)), value)
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


# ---------------------------------------------------------------------- refusals

TRANSPOSED = {"name": "transpose", "configuration": {"order": [2, 0, 1]}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codecs": [{"name": "sharding_indexed", "configuration": {}}]}, "chunks_per_shard"),
        ({"storage_transformers": [{"name": "sharding"}]}, "chunks_per_shard"),
        ({"codecs": [BYTES, "crc32c"]}, "take one of"),
        ({"codecs": [BYTES, "zstd", "gzip"]}, "one compressor"),
        ({"codecs": [{"name": "numcodecs.delta"}, BYTES]}, "one compressor"),
        ({"codecs": ["vlen-utf8"]}, "one compressor"),
        ({"codecs": []}, "one compressor"),
        ({"shape": [1] * 3, "codecs": [TRANSPOSED, BYTES]}, "layouts C and F"),
        ({"chunk_grid": {"name": "rectilinear"}}, "regular chunk grids only"),
        ({"chunk_key_encoding": {"name": "v2"}}, "take 'default'"),
        ({"zarr_format": 2}, "zarr_format 3"),
        ({"attributes": {"filters": [{"id": "delta"}]}}, "another name"),
        ({"data_type": {"name": "numpy.datetime64",
                        "configuration": {"unit": "us", "scale_factor": 10}}, "fill_value": 0},
         "steps of 1"),
        ({"extra": {"must_understand": False}}, "no place for the members"),
    ],
)  # fmt: skip
def test_v3_arrays_that_are_refused(change: Document, message: str) -> None:
    """What the draft cannot express; the message says what to do."""
    with pytest.raises(UnsupportedError, match=message):
        array_to_draft({**V3, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storage_transformers": [{"extension": "x"}]}, "storage transformers"),
        ({"extensions": [{"extension": "x", "must_understand": True}]}, "extension"),
        ({"attributes": {"filters": [{"id": "delta", "dtype": "<i4"}]}}, "zarr-python 2"),
        ({"compressor": {"codec": "https://purl.org/zarr/spec/codec/new/1.0"}}, "compressor"),
        ({"compressor": {"codec": "https://example.org/gzip/1.0"}}, "compressor"),
        ({"chunk_grid": {"type": "irregular", "chunk_shape": [1, 1]}}, "chunk grid"),
        ({"chunk_memory_layout": "A"}, "memory layout"),
        ({"data_type": {"extension": "x", "type": [["a", "<i4"], ["b", "<f8"]]}}, "data type"),
    ],
)
def test_draft_arrays_that_are_refused(change: Document, message: str) -> None:
    """What v3 could show only wrongly."""
    with pytest.raises(UnsupportedError, match=message):
        array_of_draft({**DRAFT, **change})


@pytest.mark.parametrize("missing", ["shape", "chunk_grid", "data_type"])
def test_incomplete_documents_are_refused(missing: str) -> None:
    """In both directions, as fault of the document."""
    with pytest.raises(SpecError, match="not complete"):
        array_of_draft({k: v for k, v in DRAFT.items() if k != missing})
    with pytest.raises(SpecError, match="not complete"):
        array_to_draft({k: v for k, v in V3.items() if k != missing})


def test_groups_that_are_refused() -> None:
    """Consolidated metadata has no place."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    with pytest.raises(UnsupportedError, match="consolidated"):
        group_to_draft({**group, "consolidated_metadata": {"metadata": {}}})


def test_entry_points() -> None:
    """That of the draft is taken; a v3 group, another suffix and a strange extension are not."""
    check_entry_point(ENTRY_POINT)
    with pytest.raises(SpecError, match="Zarr v3 hierarchy"):
        check_entry_point({"zarr_format": 3, "node_type": "group"})
    with pytest.raises(SpecError, match="no entry point"):
        check_entry_point(None)
    with pytest.raises(UnsupportedError, match="suffix"):
        check_entry_point({**ENTRY_POINT, "metadata_key_suffix": ".cbor"})
    with pytest.raises(UnsupportedError, match="extension"):
        check_entry_point({**ENTRY_POINT, "extensions": [{"must_understand": True}]})


# -------------------------------------------------------------------------- keys

coords = st.lists(st.integers(0, 10**6), max_size=4)


@given(coords, st.sampled_from("/."))
def test_chunk_keys_there_and_back(at: list[int], separator: Any) -> None:
    """A v3 suffix names one chunk of the draft; only the 0-d chunk has two places."""
    spelling = ChunkSpelling(len(at), separator)
    suffix = separator.join(["c", *map(str, at)])
    places = spelling.to_draft(suffix)
    assert places[0] == "c" + (separator.join(map(str, at)) if at else "0")
    assert [spelling.to_v3(place) for place in places] == [suffix] * (1 if at else 2)
    assert v3_candidate(f"a/b/{suffix}") == ("a/b", suffix)
    for other in (len(at) + 1, max(len(at) - 1, 0)):
        if other != len(at):
            assert ChunkSpelling(other, separator).to_draft(suffix) == ()


@given(st.lists(st.sampled_from(["a", "c", "0", "c0", "zarr.json", "x.array.json"]), max_size=4))
def test_document_keys_there_and_back(names: list[str]) -> None:
    """Whatever a node is named."""
    path = "/".join(names)
    assert node_of_v3_key(v3_key(path)) == path
    assert node_of_meta_key(array_key(path)) == (path, "array")
    assert node_of_meta_key(group_key(path)) == (path, "group")


@pytest.mark.parametrize(
    "key",
    ["zarr.json", "meta/root", "meta/root/a", "meta/root/.array.json", "meta/roota.array.json",
     "data/root/a.array.json", "meta/root/a/.group.json"],
)  # fmt: skip
def test_keys_of_no_document(key: str) -> None:
    """Not every key below ``meta`` is one."""
    assert node_of_meta_key(key) is None
