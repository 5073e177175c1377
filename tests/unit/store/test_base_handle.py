"""Base stores that are handed to tools."""

from __future__ import annotations

from typing import Any

import pytest

from zarr_shardstore.store.base_handle import open_base

obstore = pytest.importorskip("obstore")


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [("x/y", "", "inside"), ("x/y", "x", "inside"), ("x", "xy", None), ("x", "x", "same")],
)
def test_prefixes_of_one_bucket(inner: str, outer: str, expected: str | None) -> None:
    """A store inside another one, on object stores: seen without a request."""

    def bucket(prefix: str) -> Any:
        return open_base(obstore.store.S3Store(bucket="b", prefix=prefix or None, region="r"))

    assert bucket(inner).overlap(bucket(outer)) == expected
    assert bucket(outer).overlap(bucket(inner)) == expected
    elsewhere = open_base(obstore.store.S3Store(bucket="c", region="r"))
    assert bucket(inner).overlap(elsewhere) is None
