"""What `to_native` refuses, and that nothing is written then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import zarr

from tests.tools.test_native import make_v2, make_v3
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardingStore,
    SpecError,
    UnsupportedError,
    to_native,
)


def change_array(**members: Any) -> Callable[[], Any]:
    def make() -> Any:
        base = make_v2({})
        doc = json.loads(base["plain/.zarray"])
        base["plain/.zarray"] = json.dumps({**doc, **members}).encode()
        return base

    return make


def another_v3_document() -> Any:
    base = make_v2({})
    native = dict(base)
    to_native(native)
    doc = json.loads(native["plain/zarr.json"])
    return {**base, "plain/zarr.json": json.dumps({**doc, "shape": [8]}).encode()}


def draft() -> Any:
    base: Any = {}
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=2))
    zarr.create_array(store, name="plain", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    return base


def draft_without_entry_point() -> Any:
    base = draft()
    del base["zarr.json"]
    return base


def stack() -> Any:
    return make_v3({}, declaration=None, storage_transformers=["crc32c", "sharding"])


def stack_v2() -> Any:
    base: Any = {}
    store = ShardingStore(base, chunks_per_shard=2, storage_transformers=["crc32c", "sharding"])
    zarr.create_array(store, name="plain", shape=(4,), chunks=(1,), dtype="u1", zarr_format=2)
    return base


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "structured": (
        change_array(dtype=[["x", "<i4"]]), UnsupportedError, "'plain' .*data type"),
    "objects": (
        change_array(dtype="|O", filters=[{"id": "pickle"}]), UnsupportedError, "'plain' .*pickle"),
    "objects without filter": (change_array(dtype="|O"), UnsupportedError, "'plain' .*'|O'"),
    "unknown filter": (
        change_array(filters=[{"id": "categorize"}]), UnsupportedError, "'plain' .*categorize"),
    "unknown compressor": (
        change_array(compressor={"id": "snappy"}), UnsupportedError, "'plain' .*snappy"),
    "unknown option": (
        change_array(compressor={"id": "zlib", "dict": 1}), UnsupportedError, "'plain' .*dict"),
    "unknown option of null": (
        change_array(compressor={"id": "zlib", "dict": None}), UnsupportedError, "'plain' .*dict"),
    "option of null": (
        change_array(filters=[{"id": "shuffle", "elementsize": None}]),
        SpecError, "'plain' .*lacks .*elementsize"),
    "values after bytes": (
        change_array(filters=[{"id": "crc32"}, {"id": "delta", "dtype": "|u1"}]),
        UnsupportedError, "'plain' .*'delta' works on values"),
    "filter of another type": (
        change_array(filters=[{"id": "delta", "dtype": "<i8"}]), UnsupportedError, "'plain' .*i8"),
    "quantize in big-endian": (
        change_array(dtype=">f4", filters=[{"id": "quantize", "digits": 1, "dtype": ">f4"}]),
        UnsupportedError, "'plain' .*quantize"),
    "other members": (change_array(color="red"), UnsupportedError, "'plain' .*color"),
    "order": (change_array(order="Z"), UnsupportedError, "'plain' .*'Z'"),
    "fill value": (change_array(fill_value="x"), SpecError, "'plain' .*fill value"),
    "two documents": (another_v3_document, UnsupportedError, "'plain' .*different"),
    "draft": (draft, UnsupportedError, "draft hierarchy.*DraftHierarchyStore"),
    "draft without entry point": (
        draft_without_entry_point, UnsupportedError, "draft hierarchy.*DraftHierarchyStore"),
    "stack": (stack, UnsupportedError, "'img/a' .*crc32c"),
    "stack of v2": (stack_v2, UnsupportedError, "'plain' .*crc32c"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_before_anything_is_written(case: str) -> None:
    """The error names the array; the store is what it was."""
    make, error, match = REFUSED[case]
    base = make()
    before = dict(base)
    with pytest.raises(error, match=match):
        to_native(base)
    assert base == before
