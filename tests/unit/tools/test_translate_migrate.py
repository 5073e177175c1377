"""Documents of v2 become what zarr-python's own converter makes of them, where it converts them.

`spec_notes/decisions/0025-translation-by-zarr.md` has the documents that it refuses, and those
that it converts into documents of other values.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import zarr
from zarr.metadata.migrate_v3 import migrate_v2_to_v3

from tests.unit.tools.test_draft_documents_names import COMPRESSORS, NAMES
from zarr_shardstore.tools.native.translate import v3_of_v2

Document = dict[str, Any]

ARRAY: Document = {
    "zarr_format": 2,
    "shape": [11, 7],
    "chunks": [6, 3],
    "dtype": "<i4",
    "compressor": None,
    "fill_value": 7,
    "order": "C",
    "filters": None,
    "dimension_separator": ".",
}
FILL_VALUES: dict[str, list[Any]] = {
    "b": [True, False],
    "i": [0, -1, 7, 7.0],
    "u": [0, 1],
    "f": [0, 1, 0.1, -0.0, "NaN", "Infinity", "-Infinity"],
    "c": [[0, 1.5], ["NaN", 0.1]],
    "m": [0, -(2**63)],
    "M": [7],
    "S": ["", "YQ=="],
    "U": ["", "a"],
}
FILTERS: list[Document] = [
    {"id": "delta", "dtype": "<i4"},
    {"id": "delta", "dtype": "<i4", "astype": "<i2"},
    {"id": "fixedscaleoffset", "offset": 1, "scale": 2, "dtype": "<i4"},
    {"id": "astype", "decode_dtype": "<i4", "encode_dtype": "<f4"},
    {"id": "bitround", "keepbits": 3},
]


def documents() -> list[Document]:
    """Documents that zarr-python converts."""
    cases: list[Document] = []
    for name in NAMES:
        values = FILL_VALUES.get(name[1], [])
        cases += [{"dtype": name, "fill_value": value} for value in values]
        if values:
            value = values[0]
            compressors = [None] if name == "|S300" else COMPRESSORS  # of 255 bytes at most
            cases += [{"dtype": name, "fill_value": value, "compressor": c} for c in compressors]
    cases += [{"filters": [config]} for config in FILTERS]
    cases += [{"order": "F"}, {"dimension_separator": "/"}, {"order": "F", "dtype": ">f8"}]
    return [{**ARRAY, **case} for case in cases]


def essence(doc: Document) -> str:
    """The members that say how chunks are found and decoded; 1, 1.0 and true are not the same."""
    names = ("shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs")
    return json.dumps({name: doc[name] for name in names}, sort_keys=True)


@pytest.mark.filterwarnings("ignore")  # of data types and codecs that v3 does not specify
def test_the_documents_are_those_of_zarr() -> None:
    """By its public function, of all documents in one store."""
    cases = documents()
    store = zarr.storage.MemoryStore()
    values: Any = store._store_dict
    buffer = zarr.core.buffer.cpu.Buffer.from_bytes
    values[".zgroup"] = buffer(b'{"zarr_format": 2}')
    for i, doc in enumerate(cases):
        values[f"{i}/.zarray"] = buffer(json.dumps(doc).encode())
    migrate_v2_to_v3(input_store=store)
    for i, doc in enumerate(cases):
        converted = json.loads(values[f"{i}/zarr.json"].to_bytes())
        ours = json.loads(json.dumps(v3_of_v2(doc, {})))
        assert essence(ours) == essence(converted), doc
