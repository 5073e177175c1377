"""Whatever declares sharding is understood or refused: raw objects never land beside shards.

Sources: sharding storage transformer draft, "Configuration"; its early draft; ZEP 2,
"Configuration"; Zarr v3 core, "Extension points".
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.draft import draft_array
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    ShardStoreError,
    SpecError,
    UnshardedWarning,
    UnsupportedError,
    get_shard_info,
    is_sharded,
    shard_store,
)

Document = dict[str, Any]

ENDIAN = {"endian": "little"}
BYTES: Document = {"name": "bytes", "configuration": ENDIAN}
URI = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
CPS = {"chunks_per_shard": [2, 2]}
TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}


def v3(codecs: Any, transformers: Any = None, **members: Any) -> Document:
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}
    doc = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [8, 8],
        "data_type": "uint8",
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "attributes": {},
        "codecs": codecs,
        **members,
    }
    return doc if transformers is None else {**doc, "storage_transformers": transformers}


def codec(**options: Any) -> Document:
    configuration = {
        "chunk_shape": [1, 1],
        "codecs": [BYTES],
        "index_codecs": [BYTES, {"name": "crc32c"}],
    }
    return {"name": "sharding_indexed", "configuration": {**configuration, **options}}


def with_index(*index_codecs: Any, **options: Any) -> Document:
    return v3([codec(index_codecs=list(index_codecs), **options)])


def listed(*transformers: Any, **members: Any) -> Document:
    return v3([BYTES], list(transformers), **members)


def v2(*filters: Any, **members: Any) -> Document:
    doc = {"zarr_format": 2, "shape": [8, 8], "chunks": [4, 4], "dtype": "|u1", "order": "C"}
    return {**doc, "compressor": None, "fill_value": 0, "filters": list(filters), **members}


def marker(*transformers: Any, **members: Any) -> Document:
    return {"id": "zarr_shardstore", "storage_transformers": list(transformers), **members}


def draft(separator: Any = "/", **members: Any) -> Document:
    doc: Document = json.loads(draft_array([8, 8], [2, 2], separator))
    return {**doc, "storage_transformers": [{"name": "sharding", "configuration": CPS}], **members}


def sharding(**configuration: Any) -> Document:
    return {"name": "sharding", "configuration": {**CPS, **configuration}}


RECTILINEAR = {"name": "rectilinear", "configuration": {"chunk_shapes": [[4, 4], [4, 4]]}}
ODD_KEYS = {"name": "default", "configuration": {"separator": "-"}}
CODEC_FORMS: dict[str, Document] = {
    "codec: after another": v3([TRANSPOSE, codec()]),
    "codec: before another": v3([codec(), GZIP]),
    "codec: inside another": v3([{"name": "outer", "configuration": {"codecs": [codec()]}}]),
    "codec: twice": v3([codec(), codec()]),
    "codec: a bare name": v3(["sharding_indexed"]),
    "codec: not in a list": v3(codec()),
    "codec: no configuration": v3([{"name": "sharding_indexed"}]),
    "codec: unknown option": v3([codec(order="morton")]),
    "codec: unknown member": v3([{**codec(), "version": 2}]),
    "codec: no codecs": v3([codec(codecs=None)]),
    "codec: chunks that do not fit": v3([codec(chunk_shape=[3, 1])]),
    "codec: chunks of other dims": v3([codec(chunk_shape=[1])]),
    "codec: chunks of size 0": v3([codec(chunk_shape=[0, 1])]),
    "index: not a list": v3([codec(index_codecs=5)]),
    "index: empty": with_index(),
    "index: compressed": with_index(BYTES, GZIP),
    "index: crc32c first": with_index({"name": "crc32c"}, BYTES),
    "index: no byte order": with_index("bytes", {"name": "crc32c"}),
    "index: bytes with more": with_index({**BYTES, "configuration": {**ENDIAN, "x": 1}}),
    "index: crc32c with more": with_index(BYTES, {"name": "crc32c", "configuration": {"x": 1}}),
    "index: in the middle": with_index(BYTES, index_location="middle"),
    "codec: another chunk grid": v3([codec()], chunk_grid=RECTILINEAR),
}
FORMS: dict[str, Document] = {
    **CODEC_FORMS,
    "codec: other chunk keys": v3([codec()], chunk_key_encoding=ODD_KEYS),
    "codec: chunk keys with more": v3(
        [codec()],
        chunk_key_encoding={"name": "default", "configuration": {"separator": "/", "x": 1}},
    ),
    "codec: a filter of v2": v3([BYTES], filters=[marker(sharding())]),
    "list: unknown name": listed({"name": "example.org/other"}),
    "list: unknown name that need not be read is not sharding": listed(
        {"name": "sharding", "must_understand": False}
    ),
    "list: an object": v3([BYTES], sharding()),
    "list: a text": v3([BYTES], "sharding"),
    "list: an item without a name": listed({"configuration": CPS}),
    "list: no configuration": listed("sharding"),
    "list: a configuration that is none": listed({"name": "sharding", "configuration": [2, 2]}),
    "list: unknown option": listed(sharding(order="morton")),
    "list: unknown member": listed({**sharding(), "version": 2}),
    "list: two names": listed({**sharding(), "extension": "https://example.org/other"}),
    "list: two shardings": listed(sharding(), sharding()),
    "list: another format": listed({"storage_transformer": URI, "configuration": {"format": "x"}}),
    "list: another type": listed({"extension": URI, "type": "x", "configuration": CPS}),
    "list: other dims": listed(sharding(chunks_per_shard=[2])),
    "list: half a chunk": listed(sharding(chunks_per_shard=[2, 0.5])),
    "list: no chunk": listed(sharding(chunks_per_shard=[2, 0])),
    "list: unknown index": listed(sharding(index_codecs=[BYTES, GZIP])),
    "list: unknown place of the index": listed(sharding(index_location="middle")),
    "list: another chunk grid": listed(sharding(), chunk_grid=RECTILINEAR),
    "list: other chunk keys": listed(sharding(), chunk_key_encoding=ODD_KEYS),
    "list: lost, the member is left": v3([BYTES], zarr_shardstore={"must_understand": True}),
    "list: lost, the chunk keys are left": v3([BYTES], chunk_key_encoding="zarr_shardstore"),
    "v2: a list": v2(storage_transformers=[sharding()]),
    "v2: two markers": v2(marker(sharding()), marker(sharding())),
    "v2: a marker in a marker": v2({"id": "outer", "filter": marker(sharding())}),
    "v2: a marker that is no list": v2(filters=marker(sharding())),
    "v2: as the compressor": v2(compressor=marker(sharding())),
    "v2: no transformers": v2({"id": "zarr_shardstore"}),
    "v2: unknown member": v2(marker(sharding(), version=2)),
    "v2: unknown option": v2(marker(sharding(order="morton"))),
    "v2: chunks that do not fit": v2(marker(sharding(chunks_per_shard=[3, 1]))),
    "v2: other separator": v2(marker(sharding()), dimension_separator="-"),
    "v2: of another format": v2(marker(sharding()), zarr_format=4),
    "v2: a codec": v2(codecs=[codec()]),
    "draft: no separator": draft(""),
    "draft: digits": draft("0"),
    "draft: digits and more": draft("x1"),
    "draft: slash and more": draft("/x"),
    "draft: backslash": draft("\\"),
    "draft: no text": draft(5),
    "draft: another chunk grid": draft(chunk_grid={"type": "other", "chunk_shape": [2, 2]}),
    "draft: unknown option": draft(storage_transformers=[sharding(order="C")]),
    "draft: a codec": draft(storage_transformers=[], codecs=[codec()]),
    "draft: an extension": draft(storage_transformers=[], extensions=[{"extension": URI}]),
}


def place_of(doc: Document) -> tuple[str, list[str]]:
    """Key of its document, and keys that its chunks may have."""
    if "node_type" in doc:
        return "a/zarr.json", ["a/c/0/1", "a/c/3/3", "a/c-0-1"]
    if "dtype" in doc:
        return "a/.zarray", ["a/0.1", "a/0/1", "a/0-1"]
    separator = doc["chunk_grid"].get("separator", "/")
    return "meta/root/a.array.json", [f"data/root/a/c0{separator}1", "data/root/a/c0/1"]


IMPOSSIBLE = {
    "codec: no codecs",
    "codec: chunks that do not fit",
    "codec: chunks of other dims",
    "codec: chunks of size 0",
    "index: not a list",
}
"""Forms that no program reads."""
LEFT_TO_ZARR = [
    *(form for form in CODEC_FORMS if form not in IMPOSSIBLE),
    "codec: other chunk keys",
    "codec: chunk keys with more",
]
"""Forms of the sharding codec that another program may read: its objects are those of zarr."""


@pytest.mark.parametrize("form", LEFT_TO_ZARR)
def test_what_another_program_may_read_passes(form: str) -> None:
    """Documents and objects are as the base store has them; the tools name the array and go on."""
    doc = FORMS[form]
    base = {"a/zarr.json": json.dumps(doc).encode(), "a/c/0/1": b"shard", "other/text": b"x"}
    m = ShardingMapping(base, chunks_per_shard=2)
    assert dict(m) == base
    assert m.get_partial_values([("a/c/0/1", (1, 2))]) == [b"ha"]
    (info,) = get_shard_info(base).arrays
    assert (info.n_errors, info.is_unknown, len(info.notes)) == (0, True, 1)
    before = dict(base)
    report = shard_store(base, chunks_per_shard=2)
    assert (base, report.n_left) == (before, 1)
    assert report.arrays[0].reason.startswith("it cannot be converted: ")
    changed = json.dumps({**doc, "attributes": {"x": 1}}).encode()
    m["a/zarr.json"] = changed
    m.update({"a/c/0/1": b"another shard", "a/c/3/3": b"new"})
    assert base == {
        **before,
        "a/zarr.json": changed,
        "a/c/0/1": b"another shard",
        "a/c/3/3": b"new",
    }
    m.erase("a/c/0/1")
    assert set(base) == set(m) == {"a/zarr.json", "a/c/3/3", "other/text"}
    m.erase_prefix("a/")
    assert list(base) == ["other/text"]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in LEFT_TO_ZARR])
def test_every_operation_refuses_what_is_not_understood(form: str) -> None:
    """Typed errors that name the array, and nothing is written or erased; others go on.

    The document is shown as it is stored. Objects of an unknown declaration are listed as they are
    stored; an impossible declaration raises its error when all else is listed.
    """
    doc = FORMS[form]
    document, chunks = place_of(doc)
    base = {document: json.dumps(doc).encode(), chunks[0]: b"shard", "other/text": b"x"}
    before = dict(base)
    m = ShardingMapping(base)
    chunks = [chunk for chunk in chunks if "-" not in chunk or "other" in form]
    operations: list[Callable[[str], Any]] = [
        m.get,
        lambda key: m.get_partial_values([(key, (0, 1))]),
        lambda key: m.set(key, b"raw"),
        lambda key: m.setdefault(key, b"raw"),
        lambda key: m.set_partial_values([(key, 0, b"raw")]),
        lambda key: m.update({key: b"raw", "other/text": b"y"}),
        m.erase,
        lambda key: m.erase_values([key]),
    ]
    for chunk in chunks:
        for operation in operations:
            with pytest.raises((SpecError, UnsupportedError), match="'a'"):
                operation(chunk)
    assert m[document] == base[document]
    assert base == before
    keys: list[str] = []
    with pytest.raises((SpecError, UnsupportedError)) as refused:
        m.get(chunks[0])
    if refused.type is UnsupportedError:
        keys += m
        assert keys == [*base]
    else:
        with pytest.raises(SpecError, match="'a'"):
            keys.extend(iter(m))
        assert keys == [document, "other/text"]
    (info,) = get_shard_info(base).arrays
    assert info.n_errors + info.is_unknown == 1
    assert shard_store(base, chunks_per_shard=2).n_left == 1
    assert base == before
    m["other/text"] = b"new"
    m.erase(document)
    m.erase_prefix(chunks[0].partition("a/")[0] + "a/")
    assert list(base) == ["other/text"]


@pytest.mark.parametrize("n_levels", [150, 250, 900, 950, 980, 2000, 100_000])
@pytest.mark.parametrize("place", ["attributes", "codecs"])
def test_a_document_that_is_nested_deeply(place: str, n_levels: int) -> None:
    """Such an array is read or refused; no raw object lands beside its shards."""
    bottom, before, after = "[]", "[", "]"
    if place == "codecs":
        bottom, n_levels = json.dumps([BYTES]), n_levels // 3
        before, _, after = json.dumps([codec(codecs="@")]).partition('"@"')
    text = json.dumps(v3([codec(codecs=[BYTES] if place == "attributes" else "@")], attributes="@"))
    nested = before * n_levels + bottom + after * n_levels
    if place == "attributes":
        text = text.replace('"@"', f'{{"x": {nested}}}')
    else:
        text = text.replace('"attributes": "@"', '"attributes": {}').replace('"@"', nested)
    base = {"a/zarr.json": text.encode()}
    m = ShardingMapping(base)
    for ask in (m.get, lambda key: m.set(key, b"x"), lambda key: list(iter(m))):
        with contextlib.suppress(ShardStoreError):
            ask("a/c/0/0")
        with contextlib.suppress(ShardStoreError):
            m.get("a/zarr.json")
    get_shard_info(base)
    assert base.get("a/c/0/0") != b"x"


def test_a_document_that_is_cut_off() -> None:
    """What is left of it names sharding: refused as well."""
    text = json.dumps(v3([codec()])).encode()
    for size in range(text.index(b"sharding") + 8, len(text)):
        base = {"a/zarr.json": text[:size]}
        with pytest.raises(SpecError, match="restore the document"):
            ShardingMapping(base)["a/c/0/0"] = b"x"
        assert list(base) == ["a/zarr.json"]


@pytest.mark.parametrize("form", CODEC_FORMS)
def test_native_forms_can_be_left_to_zarr(form: str) -> None:
    """As the message says: then keys of shards are the keys of the array's chunks."""
    base = {"a/zarr.json": json.dumps(CODEC_FORMS[form]).encode()}
    m = ShardingMapping(base, native="passthrough")
    m["a/c/0/1"] = b"a shard, as zarr wrote it"
    assert json.loads(m["a/zarr.json"]) == CODEC_FORMS[form]
    assert base["a/c/0/1"] == m["a/c/0/1"] == b"a shard, as zarr wrote it"


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_understood_is_not_written_either(form: str) -> None:
    """A document that a user writes: refused, before there is an array. What another program may
    read is stored as it is, with a warning that names the reason."""
    doc = FORMS[form]
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, chunks_per_shard={"a": (2, 2)})
    if form in LEFT_TO_ZARR:
        with pytest.warns(UnshardedWarning, match="'a' stays unsharded: .*(known|codec)") as caught:
            m[place_of(doc)[0]] = json.dumps(doc).encode()
        assert len(caught) == 1
        assert base == {"a/zarr.json": json.dumps(doc).encode()}
        return
    with pytest.raises((SpecError, UnsupportedError)):
        m[place_of(doc)[0]] = json.dumps(doc).encode()
    assert base == {}


UNDERSTOOD: dict[str, Document] = {
    "codec": v3([codec()], chunk_grid=v3([])["chunk_grid"]),
    "index codec endian": with_index({"name": "endian", "configuration": ENDIAN}),
    "inner codec endian": v3([codec(codecs=[{"name": "endian", "configuration": ENDIAN}])]),
    "shards in shards": v3(
        [codec(codecs=[codec(codecs=[{"name": "endian", "configuration": ENDIAN}])])]
    ),
    "list": listed(sharding()),
    "list, codec endian": v3([{"name": "endian", "configuration": ENDIAN}], [sharding()]),
    "early draft": listed(
        {"storage_transformer": URI, "configuration": {**CPS, "format": "indexed"}}
    ),
    "early draft, http": listed(
        {"storage_transformer": URI.replace("https", "http"), "configuration": CPS}
    ),
    "zarr 2.18": listed({"extension": URI, "type": "indexed", "configuration": CPS}),
    "v2": v2(marker(sharding())),
    "draft": draft(),
    "draft, http": draft(
        storage_transformers=[{"storage_transformer": URI.replace("s:", ":"), "configuration": CPS}]
    ),
}


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
@pytest.mark.parametrize("form", UNDERSTOOD)
def test_what_is_understood_is_sharded_and_zarr_opens_the_view(form: str) -> None:
    """In every spelling, the example of ZEP 2 among them; attributes are updated through it."""
    doc = UNDERSTOOD[form]
    document, chunks = place_of(doc)
    base = {document: json.dumps(doc).encode()}
    assert is_sharded(base)
    store = ShardingStore(base)
    if "chunk_memory_layout" in doc:
        m = ShardingMapping(base)
        m[chunks[0]] = b"chunk"
        assert list(base) == [document, "data/root/a/c0/0"]
        assert ShardingMapping(base)[chunks[0]] == b"chunk"
        return
    z = zarr.open_array(store, path="a")
    z[0, 0] = 7
    z.attrs["changed"] = True
    again = zarr.open_array(ShardingStore(base), path="a")
    assert (again[0, 0], again[7, 7]) == (7, 0)
    assert len([key for key in base if key not in (document, "a/.zattrs")]) == 1
    assert is_sharded(base)
    if "zarr_format" in doc and "storage_transformers" in doc:
        changed = json.loads(base[document])
        assert changed["storage_transformers"] == doc["storage_transformers"]


def test_an_unknown_transformer_that_need_not_be_understood() -> None:
    """It is passed over: values are read, and none is written or erased alone."""
    base = {"a/zarr.json": json.dumps(listed(sharding())).encode()}
    ShardingMapping(base)["a/c/0/1"] = b"chunk"
    base["b/c/0/0"], base["b/zarr.json"] = b"plain", b""

    def write(m: ShardingMapping, key: str) -> None:
        m[key] = b"new"

    def write_a_part(m: ShardingMapping, key: str) -> None:
        m.set_partial_values([(key, 0, b"n")])

    unknown = {"name": "example.org/other", "must_understand": False}
    for stack in ([unknown, sharding()], [sharding(), unknown]):
        base["a/zarr.json"] = json.dumps(listed(*stack)).encode()
        base["b/zarr.json"] = json.dumps(listed(unknown)).encode()
        before = dict(base)
        m = ShardingMapping(base)
        assert (m["a/c/0/1"], m["b/c/0/0"]) == (b"chunk", b"plain")
        assert set(m) == {"a/zarr.json", "b/zarr.json", "a/c/0/1", "b/c/0/0"}
        for key in ("a/c/0/1", "a/c/3/3", "b/c/0/0", "b/c/0/1"):
            for operation in (write, write_a_part, ShardingMapping.erase):
                with pytest.raises(UnsupportedError, match=r"read-only.*'example\.org/other'"):
                    operation(m, key)
        with m.batch(), pytest.raises(UnsupportedError, match="read-only"):
            m["a/c/0/1"] = b"new"
        with pytest.raises(UnsupportedError, match="read-only"):
            m.erase_prefix("a/c/0/")
        m.compact()
        shard_store(base, chunks_per_shard=4)
        assert base == before
    m.erase_prefix("a/")
    assert [key for key in base if key.startswith("a/")] == []


SEPARATORS = ["-", "_", " ", "--", "x", "c", "ü", ".."]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_custom_separator_of_the_draft(separator: str) -> None:
    """The shard key honours it; every operation spells and finds the keys of its chunks."""
    base = {"meta/root/foo/baz.array.json": json.dumps(draft(separator)).encode()}
    prefix = "data/root/foo/baz/c"
    m = ShardingMapping(base)
    keys = [f"{prefix}{i}{separator}{j}" for i in range(4) for j in range(4)]
    values = {key: key.encode() for key in keys}
    m.update(values)
    shards = {f"{prefix}{i}{separator}{j}" for i in range(2) for j in range(2)}
    assert {key for key in base if key.startswith("data/")} == shards
    cold = ShardingMapping(base)
    assert {key: cold[key] for key in keys} == values
    assert cold.get_partial_values([(keys[5], (-3, 2))]) == [values[keys[5]][-3:-1]]
    assert sorted(cold.list_prefix("data/root/foo/")) == sorted(keys)
    assert sorted(cold.list_prefix(f"{prefix}1")) == sorted(keys[4:8])
    assert sorted(cold.list_dir("data/root/foo/baz/")[0]) == sorted(keys)
    with pytest.raises(SpecError, match="outside the array"):
        m[f"{prefix}4{separator}0"] = b"x"
    m["data/root/foo/baz/c1+1"] = b"no chunk key of this array"
    assert base["data/root/foo/baz/c1+1"] == b"no chunk key of this array"
    m.erase("data/root/foo/baz/c1+1")
    m.erase_prefix(f"{prefix}1{separator}")
    m.erase_values(keys[:4])
    assert sorted(m.list_prefix("data/")) == sorted(keys[8:])
    m.erase_values(keys)
    assert list(base) == ["meta/root/foo/baz.array.json"]


def test_a_custom_separator_in_tools_and_through_the_draft_store(tmp_path: Any) -> None:
    """Conversions there and back; zarr-python reads, writes and resizes the array."""
    from tests.support.draft import ENTRY_POINT
    from zarr_shardstore import DraftHierarchyStore, reshard, unshard_store

    base = {
        "zarr.json": json.dumps(ENTRY_POINT).encode(),
        "meta/root/z.array.json": json.dumps(draft("-")).encode(),
    }
    z = zarr.open_array(DraftHierarchyStore(ShardingStore(base)), path="z")
    z[:] = 3
    shards = {key for key in base if key.startswith("data/")}
    assert shards == {f"data/root/z/c{i}-{j}" for i in range(2) for j in range(2)}
    z.resize((10, 8))
    z[8:] = 4
    assert json.loads(base["meta/root/z.array.json"])["chunk_grid"]["separator"] == "-"
    plain: dict[str, bytes] = {}
    unshard_store(base, plain)
    assert len([key for key in plain if key.startswith("data/root/z/c")]) == 20
    shard_store(plain, chunks_per_shard=(5, 4))
    reshard(plain, chunks_per_shard=(5, 2))
    (info,) = get_shard_info(plain).arrays
    assert (info.n_chunks, info.n_objects) == (20, 2)
    again = zarr.open_array(DraftHierarchyStore(ShardingStore(plain)), path="z")
    np.testing.assert_array_equal(again[:8], 3)
    np.testing.assert_array_equal(again[8:], 4)
    assert again.nchunks_initialized == 20
