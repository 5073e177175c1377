"""Stores behind a web server that lists its directories, as a source and as what it cannot be."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import ShardingStore, SpecError, check_store, get_shard_info, shard_store

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


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_its_arrays_are_found_and_converted(tmp_path: Path, url: str, zarr_format: Any) -> None:
    """Its listings have a slash behind each directory."""
    store = ShardingStore(tmp_path / "a.zarr", None)
    root = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    separator: Any = {"name": "v2", "separator": "/"}
    z: Any = root.create_array(
        "g/z", shape=(6, 4), chunks=(2, 2), dtype="u2", chunk_key_encoding=separator
    )
    z[:] = np.arange(24).reshape(6, 4)
    (tmp_path / "a.zarr/g/notes.txt").write_text("look")
    (array,) = get_shard_info(f"{url}/a.zarr").arrays
    assert (array.path, array.n_chunks) == ("g/z", 6)
    report = shard_store(f"{url}/a.zarr", tmp_path / "b.zarr", chunks_per_shard=3, native=True)
    assert report.n_chunks == 6
    assert (tmp_path / "b.zarr/g/notes.txt").read_text() == "look"
    read: Any = zarr.open_array(str(tmp_path / "b.zarr"), path="g/z", mode="r")
    np.testing.assert_array_equal(read[:], z[:])


def test_what_has_no_array_says_what_to_pass(tmp_path: Path, url: str) -> None:
    """A mistyped address, or a server that lists nothing."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"there is nothing in|a web server must list"):
        shard_store(f"{url}/empty", tmp_path / "b.zarr")


def test_listings_that_lead_to_themselves(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links that sort a listing, as Apache has them, or to the root, are no names; a
    directory that is listed in itself is refused in the end, also beside the chunks of an array."""
    z: Any = zarr.create_array(tmp_path / "a.zarr", name="g/z", shape=(4,), chunks=(2,), dtype="u2")
    z[:] = 7
    links, has_loop = ["?C=N;O=D", "../", "./", "/"], False

    def send_head(self: Quiet) -> Any:
        path = self.translate_path(self.path)
        is_loop = path.rstrip("/").endswith("/loop")
        if not is_loop and not Path(path).is_dir():
            return SimpleHTTPRequestHandler.send_head(self)
        names = [
            f"{x.name}/" if x.is_dir() else x.name for x in Path(path).glob("*") if not is_loop
        ]
        names += ["loop/"] if is_loop or (has_loop and path.rstrip("/").endswith("/c")) else links
        body = "".join(f'<a href="{x}">{x}</a>' for x in names).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)

    monkeypatch.setattr(Quiet, "send_head", send_head)
    report = shard_store(f"{url}/a.zarr", tmp_path / "b.zarr", chunks_per_shard=2)
    assert (report.n_chunks, [array.path for array in report.arrays]) == (2, ["g/z"])
    assert {path.name for path in (tmp_path / "b.zarr").iterdir()} == {"zarr.json", "g"}
    with pytest.raises(SpecError, match="listed in itself"):
        get_shard_info(f"{url}/a.zarr/loop")
    found = check_store(f"{url}/a.zarr")
    assert (found.n_chunks, found.findings) == (2, ())
    has_loop = True
    with pytest.raises(SpecError, match="listed in itself"):
        check_store(f"{url}/a.zarr")
