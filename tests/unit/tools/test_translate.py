"""Native documents: golden ones written by hand, laws of translation, and what is refused."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.tools.native.codecs import Chain, chain_of_codecs, codecs_of_chain
from zarr_shardstore.tools.native.data_types import parse_numpy, v3_data_type
from zarr_shardstore.tools.native.translate import (
    dimension_names_of_levels,
    redeclare,
    to_attributes,
    to_dimension_names,
    to_ome_04,
    to_ome_05,
    v2_of_v3,
    v3_of_v2,
)

Document = dict[str, Any]

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
MARKER = {
    "id": "zarr_shardstore",
    "storage_transformers": [
        {
            "name": "sharding",
            "configuration": {
                "chunks_per_shard": [3, 1],
                "index_codecs": [LITTLE, {"name": "crc32c"}],
                "index_location": "start",
            },
        }
    ],
}
V2: Document = {
    "zarr_format": 2,
    "shape": [11, 7],
    "chunks": [6, 3],
    "dtype": ">i4",
    "compressor": {"id": "blosc", "cname": "zstd", "clevel": 3, "shuffle": 2, "blocksize": 0},
    "fill_value": 7,
    "order": "F",
    "filters": [
        {"id": "delta", "dtype": ">i4", "astype": ">i2"},
        {"id": "adler32"},
        MARKER,
    ],
    "dimension_separator": "/",
}
V3: Document = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [11, 7],
    "data_type": "int32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [6, 3]}},
    "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "/"}},
    "fill_value": 7,
    "codecs": [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [2, 3],
                "codecs": [
                    {"name": "transpose", "configuration": {"order": [1, 0]}},
                    # of the array's values in little-endian order, as v3 readers have them
                    {"name": "numcodecs.delta", "configuration": {"dtype": "<i4", "astype": ">i2"}},
                    BIG,
                    {"name": "numcodecs.adler32", "configuration": {"location": "start"}},
                    {
                        "name": "blosc",
                        "configuration": {
                            "typesize": 1,
                            "cname": "zstd",
                            "clevel": 3,
                            "shuffle": "bitshuffle",
                            "blocksize": 0,
                        },
                    },
                ],
                "index_codecs": [LITTLE, {"name": "crc32c"}],
                "index_location": "start",
            },
        }
    ],
    "attributes": {"unit": "mm"},
    "storage_transformers": [],
}
PLAIN_V3: Document = {
    **V3,
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip"}],
}


def test_a_v2_array_by_hand() -> None:
    """Every member; the codecs of the chunks are in the codec of the shards."""
    assert v3_of_v2(V2, {"unit": "mm"}) == V3


def test_blosc_takes_no_larger_values() -> None:
    """It takes values of more than 255 bytes for single bytes; tensorstore refuses the number."""
    for itemsize, typesize in ((255, 255), (256, 1)):
        chain = Chain(parse_numpy(f"|V{itemsize}"), "C", (), V2["compressor"])
        assert codecs_of_chain(chain, 1)[-1]["configuration"]["typesize"] == typesize


def test_back_by_hand() -> None:
    """The same, but for the byte order that the filter converts from."""
    doc, attributes = v2_of_v3(V3)
    filters = [
        {"id": "delta", "dtype": "<i4", "astype": ">i2"},
        {"id": "adler32", "location": "start"},
        MARKER,
    ]
    assert doc == {**V2, "dtype": "<i4", "filters": filters}
    assert attributes == {"unit": "mm"}


def test_storage_transformers_and_codec_are_inverse() -> None:
    """In both directions; plain documents and those of the other form are left as they are."""
    transformed = redeclare(V3, "storage_transformers")
    assert transformed["storage_transformers"] == MARKER["storage_transformers"]
    assert transformed["zarr_shardstore"] == {"must_understand": True}
    assert redeclare(transformed, "codec") == V3
    assert redeclare(transformed, "storage_transformers") == transformed
    assert redeclare(V3, "codec") == V3
    hows: tuple[Literal["codec", "storage_transformers"], ...] = ("codec", "storage_transformers")
    for how in hows:
        assert redeclare(PLAIN_V3, how) == PLAIN_V3


def test_groups() -> None:
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"a": 1}}
    assert v3_of_v2({"zarr_format": 2}, {"a": 1}) == group
    assert v2_of_v3(group) == ({"zarr_format": 2}, {"a": 1})
    with pytest.raises(UnsupportedError, match="mine"):
        v2_of_v3({**group, "mine": 1})


NUMPY = st.sampled_from(["|b1", "|i1", "<i4", ">i4", "<f8", ">c16", "<M8[ns]", "|S3", ">U2"])
COMPRESSORS = st.sampled_from(
    [
        None,
        {"id": "zstd", "level": 1, "checksum": False},
        {"id": "lz4", "acceleration": 1},
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    ]
)
OF_BYTES = st.sampled_from(
    [
        {"id": "shuffle", "elementsize": 4},
        {"id": "crc32", "location": "start"},
        {"id": "crc32c", "location": "end"},
        {"id": "zlib", "level": 2},
    ]
)


@given(NUMPY, st.integers(0, 4), st.sampled_from("CF"), st.lists(OF_BYTES), COMPRESSORS)
def test_a_chain_is_the_same_after_there_and_back(
    name: str, ndim: int, order: Any, filters: list[Document], compressor: Document | None
) -> None:
    """But for what says nothing: an order of one dimension, and who is last of the compressors."""
    chain = Chain(parse_numpy(name), order, filters, compressor)
    codecs = codecs_of_chain(chain, ndim)
    back = chain_of_codecs(codecs, v3_data_type(parse_numpy(name)), ndim)
    assert back.data_type == chain.data_type
    assert back.order == (order if ndim > 1 else "C")
    compressors = [] if compressor is None else [compressor]
    again = [] if back.compressor is None else [back.compressor]
    assert [*back.filters, *again] == [*filters, *compressors]
    assert codecs_of_chain(back, ndim) == codecs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_key_encoding": {"name": "default"}}, "conversion"),
        ({"chunk_key_encoding": {"name": "other"}}, "form that is not known"),
        ({"data_type": "int4"}, "data type"),
        ({"extra": {"must_understand": False}}, "extra"),
        ({"dimension_names": ["y", None]}, "dimension names"),
        ({"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}},
                     {"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE]},
         "cannot be translated"),
        ({"codecs": [{"name": "gzip"}]}, "makes bytes of values"),
        ({"codecs": [LITTLE, {"name": "numcodecs.delta", "configuration": {"dtype": "<i4"}}]},
         "in the order"),
        ({"codecs": [{"name": "numcodecs.delta", "configuration": {"dtype": "<i8"}}, LITTLE]},
         "'delta'"),
        ({"codecs": [{"name": "vlen-utf8"}]}, "for the data type"),
        ({"codecs": [V3["codecs"][0], {"name": "gzip"}]}, "sharding codec"),
        ({"attributes": {"_FillValue": 1}, "dimension_names": ["y", "x"]}, "_FillValue"),
    ],
)  # fmt: skip
def test_v3_arrays_that_v2_cannot_express(change: Document, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        v2_of_v3({**PLAIN_V3, **change})


@pytest.mark.parametrize("codecs", [[V3["codecs"][0], {"name": "gzip"}]])
def test_sharding_codecs_that_no_transformer_can_express(codecs: list[Any]) -> None:
    """Unless the document says that they are left to zarr."""
    doc = {**V3, "codecs": codecs}
    with pytest.raises(UnsupportedError, match="other codecs"):
        redeclare(doc, "storage_transformers")
    doc["zarr_shardstore"] = {"must_understand": False, "native": "passthrough"}
    assert redeclare(doc, "storage_transformers") == doc


def test_shards_of_shards_are_refused() -> None:
    transformed = {**V3, "storage_transformers": MARKER["storage_transformers"]}
    with pytest.raises(UnsupportedError, match="shards of shards"):
        redeclare(transformed, "codec")


@pytest.mark.parametrize("missing", ["shape", "chunks", "dtype", "fill_value"])
def test_incomplete_documents_are_refused(missing: str) -> None:
    doc = {k: v for k, v in V2.items() if k != missing}
    doc["filters"] = None
    with pytest.raises((SpecError, UnsupportedError)):
        v3_of_v2(doc, {})


class TestXarray:
    I4 = parse_numpy("<i4")

    def test_names_move(self) -> None:
        """And what is masked becomes an attribute; a fill value of null masks nothing."""
        names = {"_ARRAY_DIMENSIONS": ["y", "x"], "a": 1}
        assert to_dimension_names(names, 2, -9, self.I4) == ({"a": 1, "_FillValue": -9}, ["y", "x"])
        assert to_dimension_names(names, 2, None, self.I4) == ({"a": 1}, ["y", "x"])
        nan = to_dimension_names({"_ARRAY_DIMENSIONS": []}, 0, "NaN", parse_numpy("<f4"))
        assert nan == ({"_FillValue": "AAAAAAAA+H8="}, [])

    @pytest.mark.parametrize("names", ["yx", ["y"], ["y", 1], None])
    def test_other_attributes_of_that_name_stay(self, names: Any) -> None:
        attributes = {"_ARRAY_DIMENSIONS": names}
        assert to_dimension_names(attributes, 2, 0, self.I4) == (attributes, None)

    @pytest.mark.parametrize("dims", [["y", "x"], []])
    @pytest.mark.parametrize("fill_value", [None, 0, -9])
    def test_there_and_back(self, fill_value: Any, dims: list[str]) -> None:
        """An array without dimensions has an empty list of names, for which xarray looks."""
        before = {"a": 1, "_ARRAY_DIMENSIONS": dims}
        attributes, names = to_dimension_names(before, len(dims), fill_value, self.I4)
        stored = fill_value or 0
        assert to_attributes(attributes, names, stored, self.I4) == (before, fill_value)

    @pytest.mark.parametrize(
        ("data_type", "fill_value"), [("|S3", "YWI="), ("<U3", ""), ("<U3", "ab")]
    )
    def test_no_fill_value_of_texts_is_masked(self, data_type: str, fill_value: str) -> None:
        """xarray cannot decode it in v3, and it would open no variable of the dataset."""
        before, dtype = {"_ARRAY_DIMENSIONS": ["x"]}, parse_numpy(data_type)
        assert to_dimension_names(before, 1, fill_value, dtype) == ({}, ["x"])
        for attributes in ({}, {"_FillValue": fill_value}):
            assert to_attributes(attributes, ["x"], fill_value, dtype) == (before, fill_value)


class TestOme:
    def test_versions_of_all_parts_become_one(self) -> None:
        """Other attributes, and members that are called version elsewhere, stay."""
        before = {
            "multiscales": [{"version": "0.4", "metadata": {"version": "1"}, "axes": []}],
            "omero": {"version": "0.4", "channels": []},
            "_creator": {"version": "3"},
        }
        assert to_ome_05(before) == {
            "_creator": {"version": "3"},
            "ome": {
                "version": "0.5",
                "multiscales": [{"metadata": {"version": "1"}, "axes": []}],
                "omero": {"channels": []},
            },
        }

    def test_there_and_back(self) -> None:
        """Each part has its version again; `omero` has none, as its writers leave it out."""
        image = {"version": "0.4", "metadata": {"version": "1"}, "axes": []}
        before = {
            "multiscales": [image],
            "omero": {"channels": []},
            "image-label": {"version": "0.4"},
            "labels": ["a"],
        }
        assert to_ome_04(to_ome_05(before)) == before

    @pytest.mark.parametrize("name", ["plate", "well", "image-label"])
    def test_parts(self, name: str) -> None:
        assert to_ome_05({name: {"version": "0.4", "x": 1}})["ome"][name] == {"x": 1}

    def test_a_layout_of_bioformats2raw(self) -> None:
        layout = {"bioformats2raw.layout": 3}
        assert to_ome_05(layout) == {"ome": {"version": "0.5", **layout}}

    def test_it_is_done_once(self) -> None:
        after = to_ome_05({"labels": ["a"]})
        assert to_ome_05(after) == after

    @pytest.mark.parametrize("attributes", [{"plate": {"version": "0.3"}}, {"ome": {}, "well": {}}])
    def test_other_versions_are_refused(self, attributes: Document) -> None:
        with pytest.raises(UnsupportedError, match="version"):
            to_ome_05(attributes)

    def test_names_of_dimensions(self) -> None:
        multiscale = {"axes": [{"name": "y"}, {"name": "x"}], "datasets": [{"path": "0"}]}
        attributes = {"ome": {"multiscales": [multiscale]}}
        assert dimension_names_of_levels(attributes) == {"0": ["y", "x"]}
        with pytest.raises(UnsupportedError, match="axes"):
            dimension_names_of_levels({"ome": {"multiscales": [{"axes": ["y", "x"]}]}})


@pytest.mark.parametrize(
    ("dtype", "fill_value", "masked", "expected"),
    [
        ("<f4", -1.0, -9999.0, {"_FillValue": "AAAAAAAA8L8="}),
        ("<f4", None, -1.0, {"_FillValue": "AAAAAAAA8L8="}),
        ("<f4", None, float("nan"), {"_FillValue": "AAAAAAAA+H8="}),
        ("<f4", None, "AAAAAAAA8L8=", {"_FillValue": "AAAAAAAA8L8="}),
        ("<f4", None, [-1.0], {"_FillValue": [-1.0]}),
        ("<f4", None, 10**400, {"_FillValue": 10**400}),
        ("<i4", 0, -9999, {"_FillValue": 0}),
        ("<i4", None, -9999, {"_FillValue": -9999}),
        ("|S1", "", "x", {"missing_value": "x"}),
    ],
)
def test_a_fill_value_that_is_also_an_attribute(
    dtype: str, fill_value: Any, masked: Any, expected: dict[str, Any]
) -> None:
    """xarray takes the fill value of v2 first, and reads numbers of v3 in base64."""
    attributes = {"_ARRAY_DIMENSIONS": ["x"], "_FillValue": masked}
    data_type = parse_numpy(dtype, dtype)
    assert to_dimension_names(attributes, 1, fill_value, data_type) == (expected, ["x"])
