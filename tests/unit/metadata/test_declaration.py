"""Declarations of sharding: found, stripped, applied again, each by hand."""

from __future__ import annotations

from typing import Any

import pytest

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.shard import DRAFT_INDEX, ZEP2_INDEX, IndexFormat, ShardingSpec
from zarr_shardstore.metadata import declaration
from zarr_shardstore.metadata.declaration import (
    Declared,
    apply,
    find_declaration,
    is_sharded_by_zarr,
    reapply,
    strip,
    without_mark,
)
from zarr_shardstore.metadata.transformer_list import (
    TransformerSpec,
    index_codecs,
    index_format,
    name_and_options,
    parse_sharding,
    sharding_spec,
    sharding_transformer,
    spell_transformers,
    transformer_specs,
)

Document = dict[str, Any]

LITTLE: Document = {"name": "bytes", "configuration": {"endian": "little"}}
CRC: Document = {"name": "crc32c"}
URI = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
SHARDING: Document = {"name": "sharding", "configuration": {"chunks_per_shard": [2, 3]}}
OTHER: Document = {"name": "other", "configuration": {"x": 1}, "must_understand": False}
DEFAULT: Document = {"name": "default", "configuration": {"separator": "/"}}


def grid(*chunk_shape: int) -> Document:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}}


def v3(**members: Any) -> Document:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [8, 12],
        "chunk_grid": grid(2, 2),
        "chunk_key_encoding": DEFAULT,
        "codecs": [LITTLE],
        "storage_transformers": [],
        **members,
    }


V2: Document = {
    "zarr_format": 2,
    "shape": [8, 12],
    "chunks": [2, 2],
    "filters": [{"id": "delta"}],
    "compressor": None,
}
DRAFT: Document = {"shape": [8, 12], "chunk_grid": {}, "storage_transformers": []}
SPELLED_218 = {**SHARDING, "extension": URI, "type": "indexed"}
CODEC: Document = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [2, 2],
        "codecs": [LITTLE],
        "index_codecs": [LITTLE, CRC],
        "index_location": "end",
    },
}
SPEC = ShardingSpec((2, 3), DRAFT_INDEX)
FORMS: dict[str, tuple[Document, Declared, Document]] = {
    "codec": (
        v3(),
        Declared("codec", (sharding_transformer(ShardingSpec((2, 3), ZEP2_INDEX)),)),
        v3(codecs=[CODEC], chunk_grid=grid(4, 6)),
    ),
    "list": (
        v3(),
        Declared("storage_transformers", transformer_specs([OTHER, SHARDING], 2)),
        v3(
            storage_transformers=[OTHER, SHARDING],
            chunk_key_encoding={"name": "zarr_shardstore", "configuration": {"above": DEFAULT}},
            zarr_shardstore={"must_understand": True},
        ),
    ),
    "draft": (
        DRAFT,
        Declared("storage_transformers", transformer_specs([OTHER, SHARDING], 2)),
        {**DRAFT, "storage_transformers": [OTHER, SPELLED_218]},
    ),
    "v2": (
        V2,
        Declared("filters", transformer_specs([OTHER, SHARDING], 2)),
        {
            **V2,
            "chunks": [4, 6],
            "filters": [
                {"id": "delta"},
                {"id": "zarr_shardstore", "storage_transformers": [OTHER, SHARDING]},
            ],
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_applied_is_found_and_stripped(form: str) -> None:
    doc, declared, stored = FORMS[form]
    assert apply(doc, declared) == stored
    found = find_declaration(stored)
    assert found is not None
    assert found[:2] == declared[:2]
    assert [spec.sharding for spec in found.transformers] == [
        spec.sharding for spec in declared.transformers
    ]
    assert strip(stored, declared.how) == doc
    assert find_declaration(doc) is None


@pytest.mark.parametrize("form", FORMS)
def test_a_document_that_a_user_changed_keeps_its_declaration(form: str) -> None:
    doc, declared, stored = FORMS[form]
    changed = {**doc, "shape": [16, 12]}
    expected: Document = {**stored, "shape": [16, 12]}
    if form == "v2":
        changed["filters"] = [{"id": "astype"}]
        expected["filters"] = [{"id": "astype"}, stored["filters"][1]]
        assert reapply(stored, stored, "filters") == stored
    if form == "codec":
        changed["codecs"] = [LITTLE, CRC]
        inner = {**CODEC["configuration"], "codecs": [LITTLE, CRC]}
        expected["codecs"] = [{**CODEC, "configuration": inner}]
    assert reapply(changed, stored, declared.how) == expected


def test_filters_may_be_missing_or_null() -> None:
    _, declared, stored = FORMS["v2"]
    marker = stored["filters"][1]
    docs: list[Document] = [{**V2, "filters": None}, {k: V2[k] for k in V2 if k != "filters"}]
    for doc in docs:
        assert apply(doc, declared)["filters"] == [marker]
        assert strip(apply(doc, declared), "filters")["filters"] is None
        assert reapply(doc, stored, "filters")["filters"] == [marker]
    with pytest.raises(SpecError, match="filters is a list or null, got 'delta'"):
        apply({**V2, "filters": "delta"}, declared)
    with pytest.raises(SpecError, match="codecs is a list, got 5"):
        apply(v3(codecs=5), FORMS["codec"][1])


def test_transformers_without_sharding_keep_the_chunks() -> None:
    declared = Declared("filters", transformer_specs([OTHER]))
    stored = apply(V2, declared)
    assert stored["chunks"] == [2, 2]
    assert find_declaration(stored) == declared
    assert strip(stored, "filters") == V2
    assert declaration.chunks_per_shard(declared, 2) == (1, 1)
    listed = FORMS["list"][1]
    assert declaration.chunks_per_shard(listed, 2) == (1, 1)  # the document has the chunks
    assert declaration.chunks_per_shard(FORMS["v2"][1], 2) == (2, 3)


def test_a_declaration_that_an_option_gives_is_parsed_when_it_is_applied() -> None:
    """The option does not know the dimensions of the array."""
    unparsed = transformer_specs([SHARDING])
    stored = apply(v3(), Declared("codec", unparsed))
    assert stored["chunk_grid"] == grid(4, 6)
    assert apply(V2, Declared("filters", unparsed))["chunks"] == [4, 6]
    assert declaration.chunks_per_shard(Declared("codec", unparsed), 2) == (2, 3)


def test_arrays_may_be_empty_and_chunks_of_one_element() -> None:
    inner = {**CODEC["configuration"], "chunk_shape": [1, 2]}
    doc = v3(shape=[0, 1], codecs=[{**CODEC, "configuration": inner}])
    found = find_declaration(doc)
    assert found is not None
    assert declaration.chunks_per_shard(found, 2) == (2, 1)


def test_other_spellings_are_renamed_for_readers() -> None:
    """``endian`` of ZEP 2's example is ``bytes``, also in shards of shards."""
    endian = {"name": "endian", "configuration": {"endian": "little"}}
    inner = {**CODEC, "configuration": {**CODEC["configuration"], "codecs": [endian, "endian"]}}
    outer = {**CODEC, "configuration": {**CODEC["configuration"], "codecs": [inner]}}
    found = strip(v3(codecs=[outer], chunk_grid=grid(4, 6)), "codec")
    renamed = {**CODEC, "configuration": {**CODEC["configuration"], "codecs": [LITTLE, "bytes"]}}
    assert found == v3(codecs=[renamed])
    _, declared, stored = FORMS["list"]
    assert strip({**stored, "codecs": [endian]}, declared.how) == v3()


def test_sharding_that_is_left_to_zarr_is_no_declaration() -> None:
    stored = FORMS["codec"][2]
    assert find_declaration(stored, "passthrough") is None
    native, flat = declaration.marked(stored, "passthrough"), declaration.marked(stored, "flat")
    assert native["zarr_shardstore"] == {"must_understand": False, "native": "passthrough"}
    assert flat["zarr_shardstore"] == {"must_understand": False, "native": "flat"}
    assert find_declaration(native) is None
    assert declaration.mark_of(native) == "passthrough"
    assert declaration.mark_of(native) != "flat"
    assert declaration.mark_of(flat) == "flat"
    odd: list[Document] = [{"zarr_shardstore": "passthrough"}, {"zarr_shardstore": {}}]
    for doc in (flat, stored, *odd):
        assert declaration.mark_of(doc) != "passthrough"
    assert declaration.without_mark(native) == declaration.without_mark(flat) == stored


@pytest.mark.parametrize("form", ["codec", "list"])
def test_what_is_shown_by_shards_is_for_our_pipeline_alone(form: str) -> None:
    """Under its mark it is the form of the codec, with the keys of the chunks."""
    doc, declared, _ = FORMS[form]
    declared = declared._replace(transformers=tuple(transformer_specs([SHARDING], 2)))
    shown = declaration.shown_by_shards(doc, declared)
    assert declaration.mark_of(shown) == "flat"
    assert shown["chunk_key_encoding"]["name"] == "zarr_shardstore"
    assert without_mark(shown) == apply(doc, declared._replace(how="codec"))
    assert strip(without_mark(shown), "codec") == doc
    with pytest.raises(UnsupportedError, match="not known here"):
        find_declaration({**shown, "zarr_shardstore": {}})


def test_sharding_codecs_at_any_depth_are_seen() -> None:
    inner = {"name": "sharding_indexed", "configuration": {"chunk_shape": [1]}}
    outer = {"name": "sharding_indexed", "configuration": {"chunk_shape": [4], "codecs": [inner]}}
    assert declaration.sharding_shapes({"codecs": [LITTLE, outer]}) == [[4], [1]]
    assert declaration.has_sharding_codec({"codecs": [LITTLE, outer]})
    assert declaration.has_sharding_codec({"codecs": "sharding_indexed"})
    assert not declaration.has_sharding_codec({"codecs": [LITTLE], "attributes": outer})
    odd = {**inner, "configuration": 1}
    assert declaration.sharding_shapes({"codecs": ["sharding_indexed", odd]}) == []
    values = list(declaration.values_in({"a": [1, {"b": 2}]}))
    assert sorted(map(str, values)) == [
        "1",
        "2",
        "[1, {'b': 2}]",
        "{'a': [1, {'b': 2}]}",
        "{'b': 2}",
    ]


def test_each_hierarchy_is_told_by_its_members() -> None:
    kinds = [declaration.format_of(doc) for doc in (v3(), V2, DRAFT, {})]
    assert kinds == ["v3", "v2", "draft", "draft"]
    assert declaration.chunk_key_encoding(v3()) == DEFAULT
    assert declaration.chunk_key_encoding(FORMS["list"][2]) == DEFAULT
    assert declaration.chunk_key_encoding({"chunk_key_encoding": "v2"}) == "v2"
    for members in ({}, {"configuration": None}, {"configuration": {"below": DEFAULT}}):
        encoding = {"name": "zarr_shardstore", **members}
        with pytest.raises(SpecError, match="'above'"):
            declaration.chunk_key_encoding({"chunk_key_encoding": encoding})


@pytest.mark.parametrize(
    ("doc", "error", "message"),
    [
        (v3(compressor={"id": "zarr_shardstore"}), UnsupportedError, "^'compressor' declares"),
        (v3(filters=["numcodecs.zarr_shardstore"]), UnsupportedError, "^'filters' declares"),
        (v3(extensions=[URI]), UnsupportedError, "^'extensions' declares"),
        (v3(zarr_shardstore={}), UnsupportedError, "^'zarr_shardstore' declares"),
        (
            v3(chunk_key_encoding={"name": "zarr_shardstore"}),
            UnsupportedError,
            "^'chunk_key_encoding' declares",
        ),
        ({**V2, "storage_transformers": [SHARDING]}, UnsupportedError, "'storage_transformers'"),
        ({**DRAFT, "codecs": [CODEC]}, UnsupportedError, "'codecs' declares"),
        (v3(codecs=[LITTLE, CODEC]), UnsupportedError, "beside or inside other codecs"),
        (v3(codecs=[{**CODEC, "x": 1}]), UnsupportedError, "'sharding_indexed' has the members"),
        (v3(codecs=[CODEC], shape=[8]), SpecError, "the array has 1 dims"),
        (v3(codecs=[CODEC], shape=[8, -1]), SpecError, "'shape' is a list of whole numbers, got"),
        (v3(codecs=[CODEC], shape=[8, 5.0]), SpecError, "'shape' is a list of whole numbers, got"),
        (v3(codecs=[CODEC], chunk_grid=grid(4, 1)), SpecError, "shards of 1 cannot be cut into"),
        (v3(codecs=[CODEC], chunk_grid=grid(4)), SpecError, "must have as many"),
        (v3(codecs=[CODEC], chunk_grid={"name": "x"}), UnsupportedError, "chunk grid 'x'"),
        ({**FORMS["v2"][2], "chunks": [4, 5]}, SpecError, r"shards of \[4, 5\] cannot be cut"),
        ({**FORMS["v2"][2], "shape": [8]}, SpecError, "cannot be cut"),
        (
            {**V2, "filters": [{"id": "zarr_shardstore"}] * 2},
            SpecError,
            "filters is a list that has the marker 'zarr_shardstore' once, got",
        ),
        (
            v3(codecs=[{**CODEC, "configuration": {**CODEC["configuration"], "codecs": None}}]),
            SpecError,
            "the codec 'sharding_indexed' needs a list of codecs, got",
        ),
        (
            v3(codecs=[{"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 1]}}]),
            UnsupportedError,
            r"leaves \['codecs', 'index_codecs'\] to the reader",
        ),
        (v3(codecs=[CODEC], chunk_grid=grid(0, 6)), UnsupportedError, "have no chunks"),
    ],
)
def test_forms_that_are_refused(doc: Document, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_declaration(doc)


# ------------------------------------------------------------------- the list


def test_spellings_of_the_sharding_transformer() -> None:
    configuration = {"chunks_per_shard": [2, 3]}
    early = {"storage_transformer": URI, "configuration": {**configuration, "format": "indexed"}}
    http = {"storage_transformer": URI.replace("https", "http"), "configuration": configuration}
    for given in (SHARDING, early, http, SPELLED_218):
        (spec,) = transformer_specs([given], 2)
        assert (spec.name, spec.configuration, spec.must_understand) == (
            "sharding",
            configuration,
            True,
        )
        assert sharding_spec(spec, 2) == spec.sharding == SPEC
    (unparsed,) = transformer_specs([SHARDING])
    assert unparsed.sharding is None
    assert sharding_spec(unparsed, 2) == SPEC
    assert transformer_specs(("x", {"name": "y", "configuration": None})) == (
        TransformerSpec("x"),
        TransformerSpec("y"),
    )
    assert spell_transformers(transformer_specs(["x", OTHER])) == [{"name": "x"}, OTHER]


def test_an_array_without_dimensions_is_spelled_for_zarr_2_18() -> None:
    spec = ShardingSpec((), DRAFT_INDEX)
    transformer = sharding_transformer(spec)
    assert spell_transformers([transformer]) == [
        {"name": "sharding", "configuration": {"chunks_per_shard": []}}
    ]
    (spelled,) = spell_transformers([transformer], for_zarr_2=True)
    assert spelled["configuration"] == {"chunks_per_shard": [1]}
    assert transformer.configuration == {"chunks_per_shard": []}
    assert parse_sharding(spelled["configuration"], 0) == spec
    with pytest.raises(SpecError, match="has 1 numbers, the array 0 dims"):
        parse_sharding({"chunks_per_shard": [2]}, 0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("sharding", SpecError, "storage_transformers is a list, got 'sharding'"),
        ({}, SpecError, "storage_transformers is a list, got {}"),
        ([5], SpecError, "one with a name and a configuration, got 5"),
        ([{}], SpecError, "one with a name"),
        ([{"name": 5}], SpecError, "one with a name"),
        ([{"name": "x", "configuration": 5}], SpecError, "one with a name"),
        ([{"name": "x", "must_understand": 1}], SpecError, "one with a name"),
        ([{**SHARDING, "extension": "x"}], SpecError, r"one name, got \['sharding', 'x'\]"),
        ([{**SHARDING, "x": 1}], UnsupportedError, r"the sharding transformer has the members"),
        ([{**SHARDING, "type": "x"}], UnsupportedError, "sharding format 'x'"),
        (
            [{"name": "sharding", "configuration": {"format": "x"}}],
            UnsupportedError,
            "sharding format 'x'",
        ),
        (["sharding"], SpecError, "needs chunks_per_shard, a list of whole numbers, got {}"),
        (
            [{"name": "sharding", "configuration": {"chunks_per_shard": "23"}}],
            SpecError,
            "needs chunks_per_shard",
        ),
        (
            [{"name": "sharding", "configuration": {"chunks_per_shard": [2]}}],
            SpecError,
            r"chunks_per_shard \[2\] has 1 numbers, the array 2 dims",
        ),
        (
            [{"name": "sharding", "configuration": {"chunks_per_shard": [2, 3], "x": 1}}],
            UnsupportedError,
            "the sharding transformer has the members",
        ),
    ],
)
def test_lists_that_are_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        transformer_specs(given, 2)


def test_forms_of_the_index() -> None:
    big: Document = {"name": "bytes", "configuration": {"endian": "big"}}
    for form, codecs in (
        (DRAFT_INDEX, [LITTLE]),
        (ZEP2_INDEX, [LITTLE, CRC]),
        (IndexFormat(True, "start", "big"), [big, CRC]),
    ):
        assert index_codecs(form) == codecs
        stated = {"index_codecs": codecs, "index_location": form.location}
        assert index_format(stated) == form
        spec = ShardingSpec((2,), form)
        transformer = sharding_transformer(spec)
        members = {} if form == DRAFT_INDEX else stated
        assert transformer.configuration == {"chunks_per_shard": [2], **members}
        assert parse_sharding(transformer.configuration, 1) == spec
    checked = {"chunks_per_shard": [2], "index_codecs": [LITTLE, CRC]}
    assert parse_sharding(checked, 1).index == ZEP2_INDEX
    assert parse_sharding({"chunks_per_shard": [2], "index_location": "start"}, 1).index == (
        IndexFormat(False, "start")
    )
    assert index_format({"index_codecs": (LITTLE,)}) == DRAFT_INDEX


@pytest.mark.parametrize(
    ("codecs", "location", "error"),
    [
        ("bytes", "end", SpecError),
        (None, "end", SpecError),
        ([5], "end", SpecError),
        ([{**LITTLE, "x": 1}], "end", UnsupportedError),
        ([], "end", UnsupportedError),
        (["bytes"], "end", UnsupportedError),
        ([CRC, LITTLE], "end", UnsupportedError),
        ([LITTLE, LITTLE], "end", UnsupportedError),
        ([{"name": "bytes", "configuration": {"endian": "middle"}}], "end", UnsupportedError),
        ([{"name": "bytes", "configuration": {"endian": "big", "x": 1}}], "end", UnsupportedError),
        ([LITTLE, {**CRC, "configuration": {"x": 1}}], "end", UnsupportedError),
        ([LITTLE], "middle", UnsupportedError),
    ],
)
def test_forms_of_the_index_that_are_refused(
    codecs: Any, location: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        index_format({"index_codecs": codecs, "index_location": location})


def test_names_and_options_are_never_shared() -> None:
    given = {"name": "x", "configuration": {"a": 1}}
    name, options = name_and_options(given)
    assert (name, options) == ("x", {"a": 1})
    assert options is not given["configuration"]
    assert name_and_options("endian") == ("bytes", {})
    assert name_and_options({"name": "x", "configuration": None}) == ("x", {})
    for odd in (5, {}, {"name": "x", "configuration": [1]}):
        with pytest.raises(SpecError, match="has no name, or a configuration that is no object"):
            name_and_options(odd)


def test_a_codec_alone_is_sharding_by_zarr() -> None:
    codec = {"name": "sharding_indexed", "configuration": {}}
    doc = {"zarr_format": 3, "node_type": "array", "shape": [4], "codecs": [codec]}
    assert is_sharded_by_zarr(doc)
    assert not is_sharded_by_zarr({**doc, "codecs": [{"name": "bytes"}]})
    assert not is_sharded_by_zarr({**doc, "storage_transformers": [{"name": "sharding"}]})
    assert without_mark(doc) is doc
