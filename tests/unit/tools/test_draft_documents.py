"""Draft documents become v3 documents and come back as they were; the rest is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tools.test_draft_documents_names import COMPRESSORS, NAMES, same
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.native.codecs import codec_of_bytes
from zarr_shardstore.tools.native.data_types import DataType, endian_of, parse_numpy, v3_data_type
from zarr_shardstore.tools.native.draft_documents import (
    ENTRY_POINT,
    array_of_draft,
    array_to_draft,
    check_entry_point,
    group_of_draft,
    group_to_draft,
)

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
    endian = endian_of(data_type)
    codecs.append(
        {"name": "bytes", "configuration": {"endian": endian}} if endian else {"name": "bytes"}
    )
    config = draw(st.sampled_from(COMPRESSORS))
    if config is not None:
        codecs.append(codec_of_bytes(config, data_type.itemsize))
    doc = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": draw(numbers),
        "data_type": v3_data_type(data_type),
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
