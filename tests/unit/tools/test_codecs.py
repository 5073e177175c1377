"""Codecs of chunks: each rule between v2 and v3 by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.metadata.documents import Geometry
from zarr_shardstore.metadata.marker_codec import MarkerCodec
from zarr_shardstore.tools.native.codecs import (
    Chain,
    bytes_endian,
    chain_of_codecs,
    codec_of_bytes,
    codecs_of_chain,
    compressor_of_codec,
    split_layout,
    v3_array,
)
from zarr_shardstore.tools.native.data_types import (
    draft_data_type,
    fill_value_of_v2,
    fill_value_of_v3,
    parse_draft,
    parse_numpy,
    parse_v3,
)

Config = dict[str, Any]

LITTLE: Config = {"name": "bytes", "configuration": {"endian": "little"}}
BIG: Config = {"name": "bytes", "configuration": {"endian": "big"}}
NO_ENDIAN: Config = {"name": "bytes"}
GZIP: Config = {"name": "gzip", "configuration": {"level": 5}}
GEOMETRY = Geometry((4, 6), (2, 3), ChunkKeyEncoding("v2", "."))


def of(name: str, **options: Any) -> Config:
    return {"name": f"numcodecs.{name}", "configuration": options}


def chain(data_type: str | None, *filters: Config, order: Any = "C", **options: Any) -> Chain:
    parsed = None if data_type is None else parse_numpy(data_type)
    return Chain(parsed, order, list(filters), **options)


# v2's configs, and v3's codecs, of two-dimensional arrays
CHAINS: list[tuple[Chain, str, list[Config]]] = [
    (chain("<i4"), "int32", [LITTLE]),
    (chain(">i4"), "int32", [BIG]),
    (chain("|u1"), "uint8", [NO_ENDIAN]),
    (chain("<i4", compressor={"id": "gzip", "level": 5}), "int32", [LITTLE, GZIP]),
    (
        chain("<i4", order="F"),
        "int32",
        [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE],
    ),
    (
        chain("<i4", {"id": "shuffle", "elementsize": 4}, {"id": "crc32c", "location": "end"}),
        "int32",
        [LITTLE, of("shuffle", elementsize=4), {"name": "crc32c"}],
    ),
    (
        chain("<i4", {"id": "crc32c", "location": "start"}),
        "int32",
        [LITTLE, of("crc32c", location="start")],
    ),
    (
        chain("|b1", {"id": "packbits"}, compressor={"id": "bz2", "level": 1}),
        "bool",
        [of("packbits"), NO_ENDIAN, of("bz2", level=1)],
    ),
    (
        chain("<f8", {"id": "quantize", "digits": 3, "dtype": "<f8", "astype": "<f8"}),
        "float64",
        [of("quantize", digits=3, dtype="<f8", astype="<f8"), LITTLE],
    ),
    (
        chain(">f4", {"id": "bitround", "keepbits": 3}),
        "float32",
        [of("bitround", keepbits=3), BIG],
    ),
    (
        chain("<f4", {"id": "astype", "decode_dtype": "<f4", "encode_dtype": ">i2"}),
        "float32",
        [of("astype", decode_dtype="<f4", encode_dtype=">i2"), BIG],
    ),
    (
        chain(None, {"id": "vlen-utf8"}, compressor={"id": "gzip", "level": 5}),
        "string",
        [{"name": "vlen-utf8"}, GZIP],
    ),
    (
        chain(None, {"id": "vlen-bytes"}, {"id": "fletcher32"}),
        "variable_length_bytes",
        [{"name": "vlen-bytes"}, of("fletcher32")],
    ),
]


@pytest.mark.parametrize(("v2", "data_type", "codecs"), CHAINS)
def test_codecs_there_and_back(v2: Chain, data_type: str, codecs: list[Config]) -> None:
    assert codecs_of_chain(v2, 2) == codecs
    assert chain_of_codecs(codecs, data_type, 2) == v2


def test_a_vector_has_no_order() -> None:
    assert codecs_of_chain(chain("<i4", order="F"), 1) == [LITTLE]


def test_an_array_of_texts_has_one_to_fill_it() -> None:
    texts = chain(None, {"id": "vlen-utf8"})
    for fill_value, expected in ((None, ""), (0, "0"), (-0.0, "-0.0"), ("x", "x")):
        doc = v3_array(GEOMETRY, texts, fill_value, {"a": 1})
        assert doc == {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [4, 6],
            "data_type": "string",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "fill_value": expected,
            "codecs": [{"name": "vlen-utf8"}],
            "attributes": {"a": 1},
            "storage_transformers": [],
        }
    with pytest.raises(SpecError, match="\\[5\\] is no fill value of data type 'string'"):
        v3_array(GEOMETRY, texts, [5], {})
    assert v3_array(GEOMETRY, chain(">i4"), None, {})["fill_value"] == 0


DELTA: Config = {"id": "delta", "dtype": "<i4"}


@pytest.mark.parametrize(
    ("v2", "error", "message"),
    [
        (chain("<i4", order="A"), UnsupportedError, "the memory layout 'A' is not known"),
        (
            chain("<i4", {"id": "crc32"}, DELTA),
            UnsupportedError,
            "the filter 'delta' works on values, and comes after one that makes bytes of them",
        ),
        (
            chain("<i8", DELTA),
            UnsupportedError,
            "the filter 'delta' takes '<i4' and is given '<i8'",
        ),
        (chain("<f8", {"id": "delta"}), UnsupportedError, "the data type None cannot"),
        (chain("<i4", {"id": "delta", "dtype": "x9"}), SpecError, "has no data type 'x9'"),
        (
            chain(">f8", {"id": "quantize", "digits": 3, "dtype": ">f8"}),
            UnsupportedError,
            "'quantize' has a v3 codec for",
        ),
        (
            chain("<f8", {"id": "quantize", "digits": 3, "dtype": "<f8", "astype": "<f4"}),
            UnsupportedError,
            "'quantize' has a v3 codec for",
        ),
        (chain("|u1", {"id": "packbits"}), UnsupportedError, "'packbits' takes bool"),
        (chain("<f4", {"id": "bitround"}), SpecError, r"'bitround' lacks \['keepbits'\]"),
        (chain("<f4", {"id": "crc32", "x": 1}), UnsupportedError, r"has unknown options \['x'\]"),
        (
            chain("<f4", {"id": "other"}),
            UnsupportedError,
            "filter 'other' has no v3 codec .* blosc",
        ),
        (chain("<f4", {}), UnsupportedError, "filter None has no v3 codec"),
    ],
)
def test_chains_that_v3_cannot_express(v2: Chain, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        codecs_of_chain(v2, 2)


@pytest.mark.parametrize(
    ("codecs", "data_type", "error", "message"),
    [
        ([], "int32", UnsupportedError, r"one codec that makes bytes of values.* got \[\]"),
        ([LITTLE, LITTLE], "int32", UnsupportedError, "one codec that makes bytes"),
        ([GZIP, LITTLE], "int32", UnsupportedError, "no codecs in the order"),
        ([{"name": "vlen-utf8"}], "variable_length_bytes", UnsupportedError, "for the data type"),
        (
            [NO_ENDIAN],
            "int32",
            UnsupportedError,
            r"v2 has no codecs \['bytes'\] in these byte orders",
        ),
        (
            [{"name": "bytes", "configuration": {"endian": "middle"}}],
            "int32",
            SpecError,
            "has no endian 'middle'",
        ),
        (
            [of("delta", dtype="<i8", astype="<i8"), LITTLE],
            "int32",
            UnsupportedError,
            "is given",
        ),
        ([LITTLE, {"name": "lz4"}], "int32", UnsupportedError, "the codec 'lz4' cannot be"),
        ([LITTLE, of("other")], "int32", UnsupportedError, "the codec 'numcodecs.other' cannot"),
    ],
)
def test_codecs_that_v2_cannot_express(
    codecs: list[Config], data_type: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        chain_of_codecs(codecs, data_type, 2)


def test_the_byte_order_of_values_is_that_which_fits_both_codecs() -> None:
    """``bytes`` tells the order of what comes out of the filters, not of the values."""
    swapped = [of("astype", decode_dtype="<i4", encode_dtype=">i2"), BIG]
    found = chain_of_codecs(swapped, "int32", 1)
    assert found.data_type == parse_numpy("<i4")


def test_the_layouts_that_codecs_begin_with() -> None:
    def transpose(order: Any) -> Config:
        return {"name": "transpose", "configuration": {"order": order}}

    for order in ("C", [0, 1, 2]):
        assert split_layout([transpose(order), LITTLE], 3) == ("C", [LITTLE])
    for order in ("F", [2, 1, 0]):
        assert split_layout([transpose(order), LITTLE], 3) == ("F", [LITTLE])
    assert split_layout([LITTLE], 3) == ("C", [LITTLE])
    assert split_layout([], 3) == ("C", [])
    with pytest.raises(UnsupportedError, match=r"not a transpose by \[1, 0, 2\]"):
        split_layout([transpose([1, 0, 2])], 3)
    assert [bytes_endian(codec) for codec in (LITTLE, BIG, NO_ENDIAN)] == ["little", "big", None]


BLOSC: Config = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}


@pytest.mark.parametrize(
    ("shuffle", "itemsize", "word"),
    [
        *((0, 4, "noshuffle"), (1, 4, "shuffle"), (2, 4, "bitshuffle")),
        *((-1, 4, "shuffle"), (-1, 1, "bitshuffle")),
    ],
)
def test_shuffles_of_blosc(shuffle: int, itemsize: int, word: str) -> None:
    """-1 is the best one for the size of the values."""
    codec = codec_of_bytes({**BLOSC, "shuffle": shuffle, "typesize": 9}, itemsize)
    expected = {**BLOSC, "typesize": itemsize, "shuffle": word}
    del expected["id"]
    assert codec == {"name": "blosc", "configuration": expected}
    if shuffle >= 0:
        assert compressor_of_codec(codec) == {**BLOSC, "shuffle": shuffle}
        assert compressor_of_codec(of("blosc", shuffle=shuffle)) == {**BLOSC, "shuffle": shuffle}


def test_other_shuffles_are_refused() -> None:
    for shuffle in (3, -2, "shuffle", None):
        with pytest.raises(SpecError, match="Blosc has no shuffle"):
            codec_of_bytes({**BLOSC, "shuffle": shuffle}, 4)
    for odd in ({"shuffle": 1}, {}):
        with pytest.raises(SpecError, match="the codec 'blosc' has no shuffle"):
            compressor_of_codec({"name": "blosc", "configuration": odd})


def test_options_of_compressors_are_complete_and_may_be_null() -> None:
    assert compressor_of_codec({"name": "zstd"}) == {"id": "zstd", "level": 0, "checksum": False}
    lzma = {"id": "lzma", "format": 1, "check": -1, "preset": None, "filters": None}
    assert compressor_of_codec(of("lzma")) == lzma
    assert compressor_of_codec(of("zstd", level=3))["level"] == 3
    # numcodecs writes null for options that are not used
    codec = codec_of_bytes({"id": "jenkins_lookup3", "initval": 1, "prefix": None}, 4)
    assert codec == of("jenkins_lookup3", initval=1)
    with pytest.raises(UnsupportedError, match=r"has unknown options \['prefix'\]"):
        codec_of_bytes({"id": "zlib", "prefix": None}, 4)
    assert list(codec_of_bytes({"id": "zstd", "checksum": True}, 4)["configuration"]) == [
        "level",
        "checksum",
    ]


# ------------------------------------------------------------------- data types


def test_times_have_units_and_scales() -> None:
    for name, kind in (("numpy.datetime64", "M"), ("numpy.timedelta64", "m")):
        for options, text in (
            ({"unit": "ns"}, f"<{kind}8[ns]"),
            ({"unit": "s", "scale_factor": 10}, f"<{kind}8[10s]"),
            ({"unit": "generic", "scale_factor": 1}, f"<{kind}8"),
        ):
            found = parse_v3({"name": name, "configuration": options}, "little")
            assert found == parse_numpy(text)
    for text in ("<M8[ns]", "<m8[s]"):
        assert fill_value_of_v3("NaT", parse_numpy(text)) == -(2**63)


def test_the_draft_spells_types_as_zarr_2_18_does() -> None:
    for text, spelled in (("|b1", "bool"), (">i4", ">i4"), ("|u1", "u1")):
        assert draft_data_type(parse_numpy(text)) == spelled
    for text, name in (("<M8[ns]", "datetime"), ("<m8[s]", "datetime"), ("<c8", "complex")):
        spelled_so = draft_data_type(parse_numpy(text))
        assert isinstance(spelled_so, dict)
        assert name in spelled_so.pop("extension")
        assert spelled_so == {"type": text, "fallback": None}
    for text in ("<m8[10s]", "<M8"):
        with pytest.raises(UnsupportedError, match="take a unit such as 'ns', in steps of 1"):
            draft_data_type(parse_numpy(text))


def test_texts_and_bytes_have_lengths() -> None:
    for name, nbytes, text in (
        ("fixed_length_utf32", 8, ">U2"),
        ("null_terminated_bytes", 8, "|S8"),
        ("raw_bytes", 8, "|V8"),
    ):
        doc = {"name": name, "configuration": {"length_bytes": nbytes}}
        assert parse_v3(doc, "big") == parse_numpy(text)
    assert parse_v3("r16", None) == parse_draft("r16") == parse_numpy("|V2")
    for odd in (
        {"name": "fixed_length_utf32", "configuration": {"length_bytes": 7}},
        {"name": "fixed_length_utf32", "configuration": {"length_bytes": 0}},
        {"name": "raw_bytes"},
        {"name": "numpy.datetime64", "configuration": {}},
        "r15",
        "r99999999999",
        5,
    ):
        with pytest.raises(UnsupportedError):
            parse_v3(odd, "little")
    with pytest.raises(SpecError, match="of data type 'int32' has no endian"):
        parse_v3("int32", None)


@pytest.mark.parametrize(
    ("value", "data_type", "expected"),
    [
        (True, "|b1", True),
        (1, "|b1", True),
        (0.0, "<i2", 0),
        (-32768, "<i2", -32768),
        (32767, "<i2", 32767),
        (1e300, "<f4", "Infinity"),
        (-1e300, "<f4", "-Infinity"),
        ("NaN", "<f8", "NaN"),
        (float("nan"), "<f8", "NaN"),
        ([1, "NaN"], "<c8", [1.0, "NaN"]),
        ("ab", "<U2", "ab"),
        ("YWI=", "|S4", "YWI="),
        ("YWIAAA==", "|S4", "YWI="),  # numpy's bytes end before their zeros
        ("YWI=", "|V2", "YWI="),
        (None, "|V2", "AAA="),
        (None, "<U2", ""),
        (None, "<c8", [0.0, 0.0]),
        (None, ">M8[s]", -(2**63)),
        ("NaT", "<m8[us]", -(2**63)),
        (None, "<M8", "NaT"),
    ],
)
def test_fill_values_of_v2(value: Any, data_type: str, expected: Any) -> None:
    found = fill_value_of_v2(value, parse_numpy(data_type))
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "data_type"),
    [
        (2, "|b1"),
        ("x", "|b1"),
        (32768, "<i2"),
        (-32769, "<i2"),
        (-1, "<u2"),
        (0.5, "<i2"),
        ("1", "<i2"),
        ("x", "<f4"),
        ([1], "<c8"),
        ([1, "x"], "<c8"),
        ("abc", "<U2"),
        (5, "<U2"),
        ("YWJjZGU=", "|S4"),
        ("YQ==", "|V2"),
        ("?", "|V2"),
    ],
)
def test_values_that_are_none_of_their_type(value: Any, data_type: str) -> None:
    with pytest.raises(SpecError, match="is no fill value of data type"):
        fill_value_of_v2(value, parse_numpy(data_type))


def test_fill_values_of_v3_that_spell_bits_and_bytes() -> None:
    assert fill_value_of_v3("0x3fc00000", parse_numpy("<f4")) == 1.5
    assert fill_value_of_v3(["0x3fc00000", 1], parse_numpy("<c8")) == [1.5, 1.0]
    assert fill_value_of_v3([97, 98], parse_numpy("|V2")) == "YWI="
    assert fill_value_of_v3("0x7fc00000", parse_numpy("<f4")) == "NaN"
    for bad in ("0x3fc0", "0xzz"):
        with pytest.raises(SpecError, match="does not spell 4 bytes"):
            fill_value_of_v3(bad, parse_numpy("<f4"))
    for bad_bytes in ([256, 0], ["a", "b"]):
        with pytest.raises(SpecError, match="is no fill value"):
            fill_value_of_v3(bad_bytes, parse_numpy("|V2"))


def test_the_marker_names_the_ways_to_read_an_array() -> None:
    with pytest.raises(SpecError, match=r"`ShardingStore`, or run `zarr-shardstore to-native`"):
        MarkerCodec.from_config({"id": "zarr_shardstore"})
