"""Base stores that are handed to tools."""

from __future__ import annotations

from typing import Any

import pytest

from zarr_shardstore.store.base_handle import open_base

obstore = pytest.importorskip("obstore")


@pytest.mark.parametrize(
    ("inner", "outer", "overlaps"),
    [("x/y", "", True), ("x/y", "x", True), ("x", "xy", False), ("x", "x", True)],
)
def test_prefixes_of_one_bucket(inner: str, outer: str, overlaps: bool) -> None:
    """A store inside another one, on object stores: seen without a request."""

    def bucket(prefix: str) -> Any:
        return open_base(obstore.store.S3Store(bucket="b", prefix=prefix or None, region="r"))

    assert bucket(inner).overlaps(bucket(outer)) == overlaps
    assert bucket(outer).overlaps(bucket(inner)) == overlaps
    elsewhere = open_base(obstore.store.S3Store(bucket="c", region="r"))
    assert not bucket(inner).overlaps(elsewhere)
