"""Stores behind a web server, through fsspec: arrays are read, and nothing is listed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import ShardingStore, UnsupportedError, get_shard_info, shard_store

pytest.importorskip("aiohttp")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Where the directory of the test is served."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_arrays_are_read_and_nothing_is_listed(tmp_path: Path, url: str, zarr_format: Any) -> None:
    """Its pages for directories are for people: what needs a listing is refused in words."""
    store = ShardingStore(tmp_path / "a.zarr", chunks_per_shard=2)
    root = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    z: Any = root.create_array("g/z", shape=(6, 4), chunks=(2, 2), dtype="u2")
    z[:] = np.arange(24).reshape(6, 4)
    store.close()
    served = ShardingStore(f"{url}/a.zarr", read_only=True)
    read: Any = zarr.open_array(served, path="g/z", mode="r", zarr_format=zarr_format)
    np.testing.assert_array_equal(read[:], z[:])
    with pytest.raises(
        UnsupportedError, match="cannot list keys: Python opens arrays by their paths"
    ):
        get_shard_info(f"{url}/a.zarr")
    with pytest.raises(UnsupportedError, match="cannot list keys"):
        shard_store(f"{url}/a.zarr", tmp_path / "b.zarr", chunks_per_shard=2)
    assert not (tmp_path / "b.zarr").exists()
