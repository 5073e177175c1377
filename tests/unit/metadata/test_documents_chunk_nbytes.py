"""The size of a chunk is a hint: no document is refused for it."""

from __future__ import annotations

from typing import Any

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.metadata.documents import chunk_nbytes, dump_document, parse_json
from zarr_shardstore.tools.native.data_types import draft_data_type, parse_numpy, v3_data_type

NUMBERS = ["|b1", "<i2", ">u8", "<f2", ">f8", "<c8", ">c16", "<M8[10ns]", ">m8", "<M8[us]"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(["numpy.datetime64", "fixed_length_utf32", "struct", "r8", "uint8"])
DATA_TYPES = (
    JSON
    | st.fixed_dictionaries({"name": NAMES | JSON, "configuration": JSON})
    | st.sampled_from(["uint" + "8" * 5000, "r" + "9" * 5000, "|S" + "9" * 5000])
)


def sizes(data_types: dict[str, Any]) -> list[int | None]:
    docs: list[dict[str, Any]] = [
        {"zarr_format": 3, "node_type": "array", "data_type": data_types["v3"]},
        {"zarr_format": 2, "dtype": data_types["v2"]},
        {"data_type": data_types["draft"]},
    ]
    return [chunk_nbytes(doc, (2, 3)) for doc in docs]


@pytest.mark.parametrize("text", [*NUMBERS, "|S5", "<U7", "|V3", "|V16"])
def test_known_data_types(text: str) -> None:
    """In each spelling, as large as numpy's."""
    data_type = parse_numpy(text)
    draft = text if data_type.kind in "mM" else draft_data_type(data_type)
    spelled = {"v3": v3_data_type(data_type), "v2": text, "draft": draft}
    assert sizes(spelled) == [6 * data_type.itemsize] * 3


@pytest.mark.parametrize("spelled", ["r24", {"type": [["", "|V3"]]}, {"name": "r24"}])
def test_plain_bytes(spelled: Any) -> None:
    """As v3 core and zarr-python 2.18 name them."""
    assert sizes({"v3": spelled, "v2": "|V3", "draft": spelled}) == [18] * 3


@pytest.mark.parametrize("name", ["string", "r3", "int4", "|O", "|S0", [["a", "<i4"]], "i4,i4"])
def test_data_types_of_no_fixed_size(name: Any) -> None:
    """Unknown ones, and structured ones."""
    assert sizes({"v3": name, "v2": name, "draft": name}) == [None] * 3


@given(data_type=DATA_TYPES, hierarchy=st.sampled_from(["v3", "v2", "draft"]))
def test_any_data_type_has_a_size_or_none(data_type: Any, hierarchy: str) -> None:
    """Of whatever form."""
    docs = {
        "v3": {"zarr_format": 3, "node_type": "array", "data_type": data_type},
        "v2": {"zarr_format": 2, "dtype": data_type},
        "draft": {"data_type": data_type},
    }
    nbytes = chunk_nbytes(docs[hierarchy], (2, 3))
    assert nbytes is None or nbytes >= 0


@pytest.mark.parametrize(
    "data_type",
    [
        {"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": "x"}},
        {"name": "fixed_length_utf32", "configuration": [1]},
        "uint" + "8" * 5000,
        [5],
    ],
)
def test_a_strange_data_type_stays_among_the_others(data_type: Any) -> None:
    """Its document is listed, read and erased like any other, its chunks, too."""
    base: dict[str, bytes] = {}
    zarr.create_array(
        ShardingStore(base, chunks_per_shard=2), name="a", shape=(4,), chunks=(1,), dtype="u1"
    )
    m = ShardingMapping(base)
    m["a/c/0"] = b"0"
    doc = parse_json(base["a/zarr.json"])
    assert doc is not None
    base["a/zarr.json"] = dump_document(doc | {"data_type": data_type})
    m = ShardingMapping(base)
    assert sorted(m) == ["a/c/0", "a/zarr.json", "zarr.json"]
    shown = parse_json(m["a/zarr.json"])
    assert shown is not None
    assert shown["data_type"] == data_type
    assert m["a/c/0"] == b"0"
    del m["a/zarr.json"]
    assert "a/zarr.json" not in base


@pytest.mark.parametrize("nbytes", [10**30, 2**31, 0, -1, "x", None])
def test_a_size_that_no_element_has_is_unknown(nbytes: Any) -> None:
    data_type = {"name": "null_terminated_bytes", "configuration": {"length_bytes": nbytes}}
    doc = {"zarr_format": 3, "node_type": "array", "data_type": data_type}
    assert chunk_nbytes(doc, (1,)) is None
