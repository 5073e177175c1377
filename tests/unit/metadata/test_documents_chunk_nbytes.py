"""The size of a chunk is a hint: no document is refused for it."""

from __future__ import annotations

from typing import Any

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.metadata.documents import chunk_nbytes, dump_document, parse_json

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
