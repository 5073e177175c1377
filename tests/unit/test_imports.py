"""The floors, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zarr_shardstore


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["format.shard", "metadata.documents", "shards.rewrite"])
def test_the_pure_floors_need_no_zarr(package: str) -> None:
    """They can be used where zarr and an event loop are not wanted."""
    modules = modules_after(f"import zarr_shardstore.{package}")
    assert not {m for m in modules if m.split(".")[0] in ("zarr", "fsspec", "asyncio")}


def test_transformers_can_be_written_without_zarr() -> None:
    """The module with the names for it is as light as the pure floors."""
    modules = modules_after("import zarr_shardstore.transformers as t; assert t.__all__")
    assert not {m for m in modules if m.split(".")[0] in ("zarr", "fsspec", "asyncio")}


def test_public_names() -> None:
    """All that is announced is there, and nothing else is guessed."""
    for name in zarr_shardstore.__all__:
        assert getattr(zarr_shardstore, name) is not None
    assert set(zarr_shardstore.__all__) == set(dir(zarr_shardstore))
    with pytest.raises(AttributeError, match="no attribute 'Shardingstore'"):
        _ = zarr_shardstore.Shardingstore
