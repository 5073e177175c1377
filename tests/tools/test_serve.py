"""A served store: values, ranges, conditions and refusals over HTTP, for many kinds of clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.serving import Server, serving
from zarr_shardstore import ShardingStore

DATA = np.arange(1, 6 * 40 * 50 + 1, dtype="u2").reshape(6, 40, 50)
CHUNK = "/g/raw/c/1/0/2"
SECRET = b"outside of the store"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of shards of both formats, with our own files in it and others around it."""
    top = tmp_path_factory.mktemp("served")
    store = ShardingStore(top / "v.zarr", chunks_per_shard=2)
    root = zarr.create_group(store, attributes={"title": "all"})
    group = root.create_group("g", attributes={"unit": "nm"})
    options: dict[str, Any] = {"chunks": (2, 16, 16), "dtype": "u2", "shape": DATA.shape}
    group.create_array("raw", dimension_names=["z", "y", "x"], fill_value=9, **options)[:] = DATA
    group.create_array("empty", **options)
    group.create_array("text", shape=(3,), chunks=(2,), dtype=str)
    name = "<script>document.title='hacked'</script>"
    group.create_array(name, shape=(4,), chunks=(2,), dtype="f4")[:] = [0, 1, 2, np.nan]
    old = zarr.create_group(store, path="old", zarr_format=2, attributes={"unit": "mm"})
    old.create_array("raw", **options)[:] = DATA
    (top / "v.zarr/notes.txt").write_text("0123456789")
    return top / "v.zarr"


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with serving(directory) as started:
        yield started


@pytest.fixture(scope="module")
def as_v2(directory: Path) -> Iterator[Server]:
    with serving(directory, "--as", "v2") as started:
        yield started


# --------------------------------------------------------------- one value


def test_a_value_has_its_bytes_its_length_and_a_strong_etag(
    server: Server, directory: Path
) -> None:
    value = ShardingStore(directory).get_sync(CHUNK[1:])
    assert value is not None
    whole, head = server.ask(CHUNK), server.ask(CHUNK, "HEAD")
    assert (whole.status, whole.body) == (200, value.to_bytes())
    assert (head.status, head.body) == (200, b"")
    for reply in (whole, head):
        assert int(reply.headers["content-length"]) == len(value)
        assert reply.headers["accept-ranges"] == "bytes"
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "content-encoding" not in reply.headers
    assert re.fullmatch('"[0-9a-f]+"', whole.headers["etag"])
    assert server.ask(CHUNK, accept_encoding="gzip").body == whole.body


@pytest.mark.parametrize(
    ("asked", "status", "start", "stop"),
    [
        *(("bytes=2-4", 206, 2, 5), ("bytes=7-", 206, 7, 10), ("bytes=-3", 206, 7, 10)),
        *(("bytes=0-99999", 206, 0, 10), ("bytes=-99", 206, 0, 10), ("BYTES=9-9", 206, 9, 10)),
        *(("bytes=0-1,5-6", 200, 0, 10), ("items=0-1", 200, 0, 10)),
        *(("bytes=10-", 416, 0, 0), ("bytes=-0", 416, 0, 0), ("bytes=5-4", 416, 0, 0)),
        *(("bytes=", 416, 0, 0), ("bytes=-", 416, 0, 0), ("bytes=--2", 416, 0, 0)),
        *(("bytes=1e3-", 416, 0, 0), (f"bytes={'9' * 5000}-", 416, 0, 0)),
    ],
)
def test_ranges(server: Server, asked: str, status: int, start: int, stop: int) -> None:
    """One range is cut out; several give all of it; what is no range is refused."""
    reply = server.ask("/notes.txt", range=asked)
    assert reply.status == status
    if status == 416:
        assert reply.headers["content-range"] == "bytes */10"
        return
    assert reply.body == b"0123456789"[start:stop]
    shown = f"bytes {start}-{stop - 1}/10" if status == 206 else None
    assert reply.headers.get("content-range") == shown
    assert reply.headers["etag"] == server.ask("/notes.txt").headers["etag"]


def test_conditions(server: Server) -> None:
    etag = server.ask(CHUNK).headers["etag"]
    for names in (etag, f'"x", {etag}', f"W/{etag}", "*"):
        reply = server.ask(CHUNK, if_none_match=names)
        assert (reply.status, reply.body, reply.headers["etag"]) == (304, b"", etag)
        assert server.ask(CHUNK, "HEAD", if_none_match=names).status == 304
    assert server.ask(CHUNK, if_none_match='"x"').status == 200
    assert server.ask(CHUNK, if_match='"x"').status == 412
    assert server.ask(CHUNK, if_match=etag).status == 200
    assert server.ask(CHUNK, range="bytes=0-1", if_range=etag).status == 206
    for other in ('"x"', f"W/{etag}", "Thu, 01 Jan 2026 00:00:00 GMT"):
        assert server.ask(CHUNK, range="bytes=0-1", if_range=other).status == 200


def test_an_etag_holds_while_a_neighbour_is_written(tmp_path: Path) -> None:
    """And the reply is new as soon as the chunk is."""
    z: Any = zarr.create_array(
        ShardingStore(tmp_path, chunks_per_shard=4), name="z", shape=(8,), chunks=(2,), dtype="u1"
    )
    z[:4] = 1
    with serving(tmp_path) as server:
        before = server.ask("/z/c/0")
        assert server.ask("/z/c/3").status == 404
        z[4:] = 2
        assert server.ask("/z/c/0", if_none_match=before.headers["etag"]).status == 304
        assert server.ask("/z/c/3").status == 200
        z[:2] = 3
        after = server.ask("/z/c/0", if_none_match=before.headers["etag"])
    assert after.status == 200
    assert after.body != before.body


def test_only_reads(server: Server) -> None:
    for method in ("PUT", "POST", "DELETE", "PATCH", "TRACE", "BREW"):
        reply = server.ask(CHUNK, method)
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
    asked = {"origin": "https://a.example", "access_control_request_headers": "range"}
    reply = server.ask(CHUNK, "OPTIONS", access_control_request_method="GET", **asked)
    assert reply.status == 204
    assert "GET" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "*"


def test_damage_is_a_sentence(tmp_path: Path) -> None:
    """The chunks of other shards are served."""
    z: Any = zarr.create_array(
        ShardingStore(tmp_path, chunks_per_shard=2), name="z", shape=(8,), chunks=(2,), dtype="u1"
    )
    z[:] = 1
    shard = tmp_path / "z/c/0"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with serving(tmp_path) as server:
        assert server.ask("/z/c/2").status == 200
        reply = server.ask("/z/c/0")
        assert reply.status == 500
        assert b"z/c/0" in reply.body
        assert str(tmp_path).encode() not in reply.body
