"""Metadata documents: their keys, the geometry that they state, marks, consolidated copies."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError, UnfinishedConversionError, UnsupportedError
from zarr_shardstore.format.consolidated_index import with_consolidated_index
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.metadata import documents
from zarr_shardstore.metadata.documents import (
    ADOPTED,
    Geometry,
    Hierarchy,
    Node,
    adopted_files,
    all_members,
    axes_of_ome,
    chunk_nbytes,
    dimension_names,
    document_key,
    dump_document,
    has_conversion_marker,
    has_empty_chunks,
    is_array_document,
    is_document,
    keys_of_dimension_names,
    members,
    node_of_document,
    parse_array,
    parse_document,
    parse_json,
    plain_geometry,
    with_conversion_marker,
    with_members,
)
from zarr_shardstore.tools.native.document_members import (
    attributes_of,
    check_members,
    complete_document,
    consolidated_v3,
    is_same_json,
)

Document = dict[str, Any]

GRID = {"name": "regular", "configuration": {"chunk_shape": [4, 6]}}
V3: Document = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [7, 5],
    "data_type": "int32",
    "chunk_grid": GRID,
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "fill_value": 0,
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "attributes": {},
}
V2: Document = {
    "zarr_format": 2,
    "shape": [7, 5],
    "chunks": [4, 6],
    "dtype": ">f8",
    "filters": None,
    "compressor": None,
}
DRAFT: Document = {
    "shape": [7, 5],
    "data_type": "<i2",
    "chunk_grid": {"type": "regular", "chunk_shape": [4, 6], "separator": "."},
}
DOCUMENTS: dict[Hierarchy, Document] = {"v3": V3, "v2": V2, "draft": DRAFT}


# ------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("node", "key", "prefix"),
    [
        (Node("draft", "foo/bar"), "meta/root/foo/bar.array.json", "data/root/foo/bar/"),
        (Node("draft", ""), "meta/root.array.json", "data/root/"),
        (Node("v3", "foo/bar"), "foo/bar/zarr.json", "foo/bar/"),
        (Node("v3", ""), "zarr.json", ""),
        (Node("v2", "foo/bar"), "foo/bar/.zarray", "foo/bar/"),
        (Node("v2", ""), ".zarray", ""),
    ],
)
def test_keys_of_an_array(node: Node, key: str, prefix: str) -> None:
    assert document_key(node) == key
    assert node_of_document(key) == node
    assert node.chunk_prefix == prefix


@pytest.mark.parametrize(
    "key",
    [
        "foo/.zgroup",
        "foo/xzarr.json",
        "meta/root/foo.group.json",
        "meta/rooted/foo.array.json",
        "meta/root/foo.array.jsonx",
        "data/root/foo.array.json",
    ],
)
def test_keys_of_no_document(key: str) -> None:
    assert node_of_document(key) is None


def test_only_v2_and_v3_share_chunk_keys() -> None:
    assert Node("v3", "a").other_format == Node("v2", "a")
    assert Node("v2", "a").other_format == Node("v3", "a")
    assert Node("draft", "a").other_format is None


# ------------------------------------------------------------------- JSON


def nested(n_levels: int) -> bytes:
    return b'{"a":' * n_levels + b"1" + b"}" * n_levels


def test_a_document_is_an_object_of_few_levels() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    assert parse_json(memoryview(b"{}")) == {}
    for data in (b"", b"[]", b"{", b'"{}"', b"\xff"):
        assert parse_json(data) is None
    assert parse_json(nested(200)) is not None
    assert parse_json(nested(201)) is None
    assert parse_json(b'{"a":' + b"[" * 199 + b"]" * 199 + b"}") is not None
    assert parse_json(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}") is None
    assert parse_json(b'{"a": "' + b"{[" * 999 + b'"}') is not None  # many brackets, two levels
    assert parse_json(b"[" * 10**5) is None
    wide = b'{"b": [' + b"[]," * 300 + b'[]], "a":' + b"[" * 199 + b"]" * 199 + b"}"
    assert parse_json(wide) is not None  # 200 levels
    assert parse_json(nested(201).decode().encode("utf-16")) is None


@given(
    st.recursive(
        st.one_of(st.text('[]{}"\\é', max_size=4), st.integers()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text('[]{}"\\', max_size=2), inner)
        ),
    ),
    st.integers(180, 215),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-16"]),
)
def test_levels_are_counted_whatever_strings_hold(
    value: Any, n: int, ascii_only: bool, encoding: str
) -> None:
    for _ in range(n):
        value = [value, "]"]
    doc = {"a": value, "b": [[]] * 200}
    level: list[Any] = [doc]
    n_levels = 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        n_levels += 1
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
    is_deep = n_levels > 200
    text = json.dumps(doc, ensure_ascii=ascii_only).encode(encoding)
    assert parse_json(text) == (None if is_deep else doc)


def test_a_large_document_of_few_levels_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "values_in", None)
    doc = {"metadata": {f"a[{i}]": {"shape": [1], "x": {"y": '\\"'}} for i in range(500)}}
    assert parse_json(json.dumps(doc).encode()) == doc


@pytest.mark.parametrize("word", ["sharding", "shardstore", "storage_transformers"])
def test_a_document_that_names_sharding_is_not_lost(word: str) -> None:
    node = Node("v3", "a")
    assert parse_document(node, b"{}") == {}
    assert parse_document(node, b"{") is None
    assert parse_document(node, json.dumps({"x": word}).encode()) == {"x": word}
    message = "the document 'a/zarr.json' of 'a' is no JSON object .* restore the document"
    with pytest.raises(SpecError, match=message):
        parse_document(node, memoryview(word.encode()))


def test_the_same_json_has_the_same_types_in_any_order() -> None:
    assert is_same_json({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    for one, other in ((1, 1.0), (1, True), ([], {}), ([1, 2], [2, 1])):
        assert not is_same_json(one, other)
    assert json.loads(dump_document(V3)) == V3
    assert dump_document({"a": [1]}) == b'{\n  "a": [\n    1\n  ]\n}'


def test_attributes_are_an_object() -> None:
    given = {"a": 1}
    assert attributes_of({"attributes": given}) == given
    assert attributes_of({"attributes": given}) is not given
    assert attributes_of({}) == attributes_of({"attributes": None}) == {}
    with pytest.raises(SpecError, match=re.escape("attributes are an object, got [1]")):
        attributes_of({"attributes": [1]})


def test_members_without_a_place_are_named() -> None:
    check_members({"a": 1}, {"a", "b"}, "v2")
    with pytest.raises(UnsupportedError, match=r"^v2 has no place for the members \['b', 'c'\]"):
        check_members({"c": 1, "a": 1, "b": 2}, {"a"}, "v2")


@pytest.mark.parametrize("error", [KeyError("shape"), TypeError("x"), AttributeError("get")])
def test_a_document_that_lacks_something_is_not_complete(error: Exception) -> None:
    with pytest.raises(SpecError, match="not complete") as caught, complete_document():
        raise error
    assert caught.value.__cause__ is error
    with pytest.raises(ValueError, match="other"), complete_document():
        raise ValueError("other")


# ------------------------------------------------------------------- geometry


def geometry(style: Any, separator: str) -> Geometry:
    return Geometry((7, 5), (4, 6), ChunkKeyEncoding(style, separator))


def v3(encoding: Any) -> Document:
    return {**V3, "chunk_key_encoding": encoding}


@pytest.mark.parametrize(
    ("hierarchy", "doc", "expected"),
    [
        ("v3", V3, geometry("default", "/")),
        ("v3", v3("default"), geometry("default", "/")),
        ("v3", v3("v2"), geometry("v2", ".")),
        ("v3", v3({"name": "v2"}), geometry("v2", ".")),
        (
            "v3",
            v3({"name": "v2", "configuration": {}, "must_understand": True}),
            geometry("v2", "."),
        ),
        (
            "draft",
            {**DRAFT, "chunk_grid": {**DRAFT["chunk_grid"], "separator": "-"}},
            geometry("draft", "-"),
        ),
        ("v3", v3({"name": "default", "configuration": None}), geometry("default", "/")),
        (
            "v3",
            v3({"name": "v2", "configuration": {"separator": "/"}}),
            geometry("v2", "/"),
        ),
        (
            "v3",
            v3({"name": "zarr_shardstore", "configuration": {"above": "v2"}}),
            geometry("v2", "."),
        ),
        ("v2", V2, geometry("v2", ".")),
        (
            "v2",
            {**V2, "shape": [True, 5], "chunks": [True, 6]},
            Geometry((1, 5), (1, 6), ChunkKeyEncoding("v2", ".")),
        ),
        ("v2", {**V2, "dimension_separator": "/"}, geometry("v2", "/")),
        ("v2", {**V2, "dimension_separator": None}, geometry("v2", ".")),
        ("draft", DRAFT, geometry("draft", ".")),
        (
            "draft",
            {**DRAFT, "chunk_grid": {"type": "regular", "chunk_shape": (4, 6)}},
            geometry("draft", "/"),
        ),
    ],
)
def test_geometry_of_each_hierarchy(
    hierarchy: Hierarchy, doc: Document, expected: Geometry
) -> None:
    assert plain_geometry(hierarchy, doc) == expected
    assert expected.has_same_chunks(expected)
    assert not expected.has_same_chunks(None)


@pytest.mark.parametrize(
    ("hierarchy", "change"),
    [
        *((hierarchy, {"shape": shape}) for hierarchy in get_args(Hierarchy)
          for shape in ([7], [7, -1], [7, 5.0], "75", None)),
        *(("v2", {"chunks": chunks}) for chunks in ([4], [4, 0], [4, "6"], "46", {4: 4, 6: 6})),
        ("v2", {"dimension_separator": "-"}),
        ("v3", {"chunk_grid": {"name": "rectilinear", "configuration": {"chunk_shape": [4, 6]}}}),
        ("v3", {"chunk_grid": {**GRID, "configuration": {"chunk_shape": [4, 6], "x": 1}}}),
        ("v3", {"chunk_grid": "regular"}),
        ("v3", {"chunk_key_encoding": "suffix"}),
        ("v3", {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "-"}}}),
        ("v3", {"chunk_key_encoding": {"name": "default", "configuration": {"x": 1}}}),
        ("v3", {"chunk_key_encoding": {"name": "default", "x": 1}}),
        ("v3", {"chunk_key_encoding": {}}),
        ("draft", {"chunk_grid": {"type": "other", "chunk_shape": [4, 6]}}),
        ("draft", {"chunk_grid": {"type": "separator", "chunk_shape": [4, 6]}}),
        ("draft", {"chunk_grid": {"type": "regular", "chunk_shape": [4, 6], "x": 1}}),
        ("draft", {"chunk_grid": {"type": "regular"}}),
    ],
)  # fmt: skip
def test_geometry_that_is_not_known(hierarchy: Hierarchy, change: Document) -> None:
    assert plain_geometry(hierarchy, {**DOCUMENTS[hierarchy], **change}) is None


def test_arrays_may_be_empty_but_not_their_chunks() -> None:
    found = plain_geometry("v2", {**V2, "shape": [0, 5]})
    assert found is not None
    assert found.shape == (0, 5)
    found = plain_geometry("v2", {**V2, "chunks": [1, 6]})
    assert found is not None
    assert found.chunk_shape == (1, 6)
    for doc in (V2, V3):
        assert not has_empty_chunks(doc)
    assert has_empty_chunks({**V2, "chunks": [0, 6]})
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 0]}}
    assert has_empty_chunks({**V3, "chunk_grid": grid})
    assert not has_empty_chunks({**V3, "chunk_grid": None})
    assert not has_empty_chunks({"zarr_format": 2})


def test_chunks_of_arrays_of_other_shapes_may_be_the_same() -> None:
    mine = geometry("v2", ".")
    assert mine.has_same_chunks(Geometry((9, 9), (4, 6), ChunkKeyEncoding("v2", ".")))
    assert not mine.has_same_chunks(Geometry((7, 5), (4, 5), ChunkKeyEncoding("v2", ".")))
    assert not mine.has_same_chunks(geometry("v2", "/"))


def test_the_size_of_a_chunk_follows_from_the_data_type() -> None:
    sizes = [chunk_nbytes(doc, (4, 6)) for doc in (V3, V2, DRAFT)]
    assert sizes == [4 * 24, 8 * 24, 2 * 24]
    assert chunk_nbytes({**V3, "data_type": "string"}, (4, 6)) is None
    assert chunk_nbytes({"zarr_format": 2}, (4, 6)) is None


# ------------------------------------------------------------------- parsed documents


def sharded_v3() -> Document:
    sharding = {
        "chunk_shape": [2, 3],
        "codecs": V3["codecs"],
        "index_codecs": V3["codecs"],
        "index_location": "start",
    }
    return {**V3, "codecs": [{"name": "sharding_indexed", "configuration": sharding}]}


def test_an_array_that_is_sharded_has_its_chunks_as_geometry() -> None:
    parsed = parse_array(Node("v3", "a"), with_consolidated_index(sharded_v3()))
    assert parsed is not None
    assert parsed.geometry == Geometry((7, 5), (2, 3), ChunkKeyEncoding("default", "/"))
    assert parsed.node == Node("v3", "a")
    assert [type(n) for n in parsed.geometry.chunk_shape] == [int, int]
    assert (parsed.declaration, parsed.has_consolidated_index) == ("codec", True)
    (transformer,) = parsed.transformers
    assert transformer.sharding is not None
    assert transformer.sharding.chunks_per_shard == (2, 2)
    plain = parse_array(Node("v3", "a"), with_consolidated_index(sharded_v3()), "passthrough")
    assert plain is not None
    assert (plain.geometry, plain.declaration) == (geometry("default", "/"), None)
    assert plain.node == Node("v3", "a")
    listed = {**V3, "storage_transformers": [{"name": "other"}]}
    other = parse_array(Node("v3", "a"), listed)
    assert other is not None
    assert (other.geometry, other.declaration) == (geometry("default", "/"), "storage_transformers")
    assert (plain.transformers, plain.has_consolidated_index) == ((), False)


def test_only_documents_of_arrays_are_parsed() -> None:
    group = {"zarr_format": 3, "node_type": "group"}
    assert parse_array(Node("v3", "a"), group) is None
    assert not is_array_document(Node("v3", "a"), group)
    assert is_array_document(Node("v2", "a"), {})
    assert is_array_document(Node("draft", "a"), {})
    other = parse_array(Node("v2", "a"), {**V2, **V3})  # a document of another hierarchy
    assert other is not None
    assert other.geometry is None
    unknown = {"name": "rectilinear", "configuration": {}}
    with pytest.raises(UnsupportedError, match="not known"):
        parse_array(Node("v3", "a"), {**sharded_v3(), "chunk_grid": unknown})
    marker = {"id": "zarr_shardstore", "storage_transformers": []}
    odd = {**V2, "filters": [marker], "dimension_separator": "-"}
    with pytest.raises(UnsupportedError, match="it is sharded, and its shape, its chunk grid"):
        parse_array(Node("v2", "a"), odd)


@pytest.mark.parametrize("hierarchy", get_args(Hierarchy))
def test_an_unfinished_conversion_is_refused_by_each_reader(hierarchy: Hierarchy) -> None:
    """The name of the marker is one that no reader knows, where each looks for names."""
    doc, name = DOCUMENTS[hierarchy], "zarr_shardstore.unfinished_conversion"
    text = "the array is being converted: run the same command again to finish it"
    marked = with_conversion_marker(doc)
    changes: dict[Hierarchy, Document] = {
        "v2": {"filters": [{"id": name, "message": text}]},
        "v3": {
            "codecs": [{"name": name, "configuration": {"message": text}}],
            "storage_transformers": [],
        },
        "draft": {
            "storage_transformers": [
                {
                    "name": name,
                    "configuration": {"message": text},
                    "extension": name,
                    "type": "unfinished",
                }
            ]
        },
    }
    change = changes[hierarchy]
    assert marked == {**doc, **change}
    assert has_conversion_marker(marked)
    assert not has_conversion_marker(doc)
    assert not has_conversion_marker({**doc, "attributes": {"name": name}})
    with pytest.raises(UnfinishedConversionError, match="the array 'a' is being converted"):
        parse_array(Node(hierarchy, "a"), marked)
    if hierarchy == "v2":
        kept = with_conversion_marker({**doc, "filters": [{"id": "delta"}]})["filters"]
        assert kept == [{"id": "delta"}, *change["filters"]]


# ------------------------------------------------------------------- names of dimensions


def test_names_of_dimensions_are_in_the_document_or_in_attributes() -> None:
    assert dimension_names({"dimension_names": ["t", None, 5]}) == ("t", None, None)
    xarray = {"_ARRAY_DIMENSIONS": ["y", "x"]}
    assert dimension_names(xarray) == ("y", "x")
    assert dimension_names({"attributes": xarray}) == ("y", "x")
    assert dimension_names({"dimension_names": ["z"], "attributes": xarray}) == ("z",)
    assert dimension_names({"dimension_names": None, "attributes": xarray}) == ("y", "x")
    others: list[Any] = [{}, [], None, {"attributes": []}, {"dimension_names": "tx"}]
    for doc in others:
        assert dimension_names(doc) == ()


def test_documents_that_may_name_dimensions() -> None:
    assert keys_of_dimension_names(Node("v3", "a/b")) == {"a/zarr.json": "b", "zarr.json": "a/b"}
    assert keys_of_dimension_names(Node("v2", "a/b")) == {
        "a/b/.zattrs": "",
        "a/.zattrs": "b",
        ".zattrs": "a/b",
    }
    assert list(keys_of_dimension_names(Node("v2", "a/b"))) == [
        "a/b/.zattrs",
        "a/.zattrs",
        ".zattrs",
    ]
    assert list(keys_of_dimension_names(Node("v2", "X"))) == ["X/.zattrs", ".zattrs"]
    assert keys_of_dimension_names(Node("v2", "")) == {".zattrs": ""}
    assert keys_of_dimension_names(Node("draft", "a")) == {}


def test_axes_of_an_image_are_those_of_the_array_at_its_path() -> None:
    images = [
        {"datasets": [{"path": "0"}], "axes": ["t"]},
        {"datasets": [{"path": "/1/"}, {"path": "2"}], "axes": [{"name": "y"}, {"type": "space"}]},
        {"datasets": [{"path": "/3/"}], "axes": [{"name": "y"}, "x"]},
        {"datasets": [{"path": "X"}], "axes": ["z"]},
    ]
    for doc in (
        {"multiscales": images},
        {"attributes": {"multiscales": images}},
        {"attributes": {"ome": {"multiscales": images}}},
    ):
        assert axes_of_ome(doc, "0") == ("t",)
        assert axes_of_ome(doc, "3") == ("y", "x")
        assert axes_of_ome(doc, "X") == ("z",)
        assert axes_of_ome(doc, "1") == ()  # an axis without a name
        assert axes_of_ome(doc, "4") == ()
    others: list[Document] = [{}, {"attributes": 5}, {"multiscales": 5}, {"multiscales": [{}]}]
    for odd in others:
        assert axes_of_ome(odd, "0") == ()


# ------------------------------------------------------------------- consolidated metadata

GROUP: Document = {"zarr_format": 3, "node_type": "group", "attributes": {}}


def test_consolidated_members_of_v2_are_named_by_key() -> None:
    copies = {".zgroup": {}, "c/.zarray": None, "a/.zarray": V2, "b/zarr.json": V3, ".zarray": V2}
    doc = {"zarr_consolidated_format": 1, "metadata": copies}
    assert members("", doc) == {
        "a/.zarray": (Node("v2", "a"), V2),
        ".zarray": (Node("v2", ""), V2),
    }
    assert members("g/h", doc)["a/.zarray"] == (Node("v2", "g/h/a"), V2)
    assert members("X", doc)["a/.zarray"] == (Node("v2", "X/a"), V2)
    assert all_members(doc) == copies
    changed = with_members(doc, {"a/.zarray": None, "d/.zarray": V2})
    left = {name: copies[name] for name in (".zgroup", "b/zarr.json", ".zarray")}
    assert changed == {**doc, "metadata": {**left, "d/.zarray": V2}}
    assert [*map(is_document, (".zmetadata", "a/b/.zmetadata", "a/.zmeta"))] == [True, True, False]


def test_consolidated_members_of_v3_are_named_by_path() -> None:
    inline = {"kind": "inline", "must_understand": False}
    below = {"g/a": V3, "g": GROUP, "x": None}
    doc = {**GROUP, "consolidated_metadata": {**inline, "metadata": below}}
    assert members("", doc) == {"g/a": (Node("v3", "g/a"), V3)}
    assert members("p", doc) == {"g/a": (Node("v3", "p/g/a"), V3)}
    assert members("p", {**doc, "consolidated_metadata": None}) == {}
    assert all_members({"consolidated_metadata": {"metadata": 5}}) == all_members({}) == {}
    changed = with_members(doc, {"g/a": None, "b": V3})
    expected = {**inline, "metadata": {"g": GROUP, "b": V3}}
    assert changed == {**GROUP, "consolidated_metadata": expected}
    empty = {**inline, "metadata": {}}
    made = consolidated_v3({"g/a": V3, "g": GROUP})
    assert made == {
        **inline,
        "metadata": {"g": {**GROUP, "consolidated_metadata": empty}, "g/a": V3},
    }
    assert list(made["metadata"]) == ["g", "g/a"]


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"attributes": {"unit": "m"}}, True),
        ({"shape": [80, 4]}, True),
        ({"fill_value": 1}, True),
        ({"data_type": "float32"}, False),
        ({"data_type": {"name": V3["data_type"]}}, True),
        ({"codecs": [{"name": "bytes"}]}, True),
        ({"codecs": ["bytes"]}, True),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}, False),
        ({"codecs": [*V3["codecs"], {"name": "crc32c"}]}, False),
        ({"chunk_grid": {"name": "unknown"}}, False),
    ],
)
def test_documents_of_the_same_chunks(change: Document, is_same: bool) -> None:
    """Their bytes mean the same, where both arrays reach, however a writer spells it."""
    mine, other = (parse_array(Node("v3", "a"), doc) for doc in (V3, {**V3, **change}))
    assert mine is not None
    assert other is not None
    assert mine.has_same_chunks(other) == other.has_same_chunks(mine) == is_same


def test_notes_of_adopted_files() -> None:
    files = [{"path": "a.h5"}]
    assert adopted_files({ADOPTED: {"files": files}}) == files
    for doc in ({}, {ADOPTED: None}, {ADOPTED: {"files": 5}}):
        assert adopted_files(doc) == []
