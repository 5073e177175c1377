"""A served store: values, ranges, conditions and refusals over HTTP, for many kinds of clients."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.processes import s3_server
from tests.support.serving import MAX_SECONDS, Server, serving
from zarr_shardstore import ShardingStore

DATA = np.arange(1, 6 * 40 * 50 + 1, dtype="u2").reshape(6, 40, 50)
CHUNK = "/g/raw/c/1/0/2"
SECRET = b"not for clients"
OURS = ["g/raw/c/0/0/0.__lock", "g/raw/c/0/0/0.__journal", ".zarr_shardstore/0", ".hidden"]
OURS += [
    "g/raw/__shards.index",
    ".zarr_shardstore_quarantine/0",
    "g/.ssh",
    f"g/0.{'0' * 32}.partial",
]


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
    (top / "secret.txt").write_bytes(SECRET)
    for name in OURS:
        (top / "v.zarr" / name).parent.mkdir(exist_ok=True)
        (top / "v.zarr" / name).write_bytes(SECRET)
    (top / "v.zarr/link").symlink_to(top / "secret.txt")
    (top / "v.zarr/out").symlink_to(top)
    return top / "v.zarr"


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with serving(directory) as started:
        yield started


@pytest.fixture(scope="module")
def as_v2(directory: Path) -> Iterator[Server]:
    with serving(directory, "--as", "v2") as started:
        yield started


@pytest.fixture(scope="module")
def as_v3(directory: Path) -> Iterator[Server]:
    with serving(directory, "--as", "v3") as started:
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


def test_an_object_store_is_served_as_local_files_are(server: Server, directory: Path) -> None:
    """By the command, with its options: values, parts of them, and refusals."""
    obstore = pytest.importorskip("obstore")
    with s3_server() as where, ExitStack() as stack:
        options = {
            "endpoint": where["endpoint"],
            "access_key_id": "a",
            "secret_access_key": "b",
            "region": "us-east-1",
        }
        allow_http = {"allow_http": True}
        s3 = obstore.store.S3Store(where["bucket"], client_options=allow_http, **options)
        for file in directory.rglob("*"):
            if file.is_file() and file.name != "link":
                obstore.put(s3, f"v.zarr/{file.relative_to(directory)}", file.read_bytes())
        flags = [f"--source-option={key}={value}" for key, value in options.items()]
        remote = stack.enter_context(serving(f"s3://{where['bucket']}/v.zarr", *flags))
        ranges = ("bytes=2-4", "bytes=7-", "bytes=-3", "bytes=0-99999", "bytes=0-1,5-6")
        refused = ("bytes=99999-", "bytes=-0", "bytes=5-4", "bytes=")
        missing = ("/g/raw/c/9/9/9", "/none", "/g/none/c/0", "/../secret.txt", "/g", "//")
        for path in ("/zarr.json", "/old/raw/.zarray", CHUNK, "/old/raw/1.0.2", "/notes.txt"):
            for asked in ("", *ranges, *refused):
                for method in ("GET", "HEAD"):
                    own = server.ask(path, method, **({"range": asked} if asked else {}))
                    found = remote.ask(path, method, **({"range": asked} if asked else {}))
                    assert (found.status, found.body) == (own.status, own.body), (path, asked)
                    for name in ("content-length", "content-range", "content-type"):
                        assert found.headers.get(name) == own.headers.get(name), (path, asked)
                    assert (found.status == 416) is (method == "GET" and asked in refused)
            etag = remote.ask(path).headers["etag"]
            assert remote.ask(path, if_none_match=etag).status == 304
        for path in (*missing, *(f"/{key}" for key in OURS)):
            assert remote.ask(path).status == server.ask(path).status == 404, path
        assert remote.ask(CHUNK, "PUT").status == 405


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


def test_an_etag_holds_while_a_neighbour_is_written(server: Server, directory: Path) -> None:
    """And the reply is new as soon as the chunk is."""
    store = ShardingStore(directory, chunks_per_shard=4)
    z: Any = zarr.create_array(store, name="live", shape=(8,), chunks=(2,), dtype="u1")
    z[:4] = 1
    before = server.ask("/live/c/0")
    assert server.ask("/live/c/3").status == 404
    z[4:] = 2
    assert server.ask("/live/c/0", if_none_match=before.headers["etag"]).status == 304
    assert server.ask("/live/c/3").status == 200
    z[:2] = 3
    after = server.ask("/live/c/0", if_none_match=before.headers["etag"])
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


def test_damage_is_a_sentence(server: Server, directory: Path) -> None:
    """The chunks of other shards are served."""
    store = ShardingStore(directory, chunks_per_shard=2)
    z: Any = zarr.create_array(store, name="damaged", shape=(8,), chunks=(2,), dtype="u1")
    z[:] = 1
    shard = directory / "damaged/c/0"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert server.ask("/damaged/c/2").status == 200
    reply = server.ask("/damaged/c/0")
    assert reply.status == 500
    assert b"damaged/c/0" in reply.body
    assert str(directory).encode() not in reply.body


# ---------------------------------------------------------------- a whole store


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("shown_as", ["v2", "v3"])
@pytest.mark.parametrize("stored", ["g/raw", "old/raw"])
def test_arrays_of_both_formats_in_one(
    request: pytest.FixtureRequest, shown_as: str, stored: str
) -> None:
    """zarr reads all of the array through fsspec and through obstore, and the groups above it
    from their consolidated metadata."""
    pytest.importorskip("aiohttp")
    obstore = pytest.importorskip("obstore.store")
    server: Server = request.getfixturevalue(f"as_{shown_as}")
    client = obstore.HTTPStore(server.url, client_options={"allow_http": True})
    for store in (server.url, zarr.storage.ObjectStore(client, read_only=True)):
        z: Any = zarr.open_array(store, path=stored, mode="r")
        assert (f"v{z.metadata.zarr_format}", z.shards) == (shown_as, None)
        np.testing.assert_array_equal(z[1:, 3:, :33], DATA[1:, 3:, :33])
    root: Any = zarr.open_consolidated(server.url, zarr_format=int(shown_as[1]))
    assert {"g", "old"} <= set(root.group_keys())
    group = root[stored.split("/")[0]]
    assert group.attrs["unit"] == ("nm" if stored == "g/raw" else "mm")
    np.testing.assert_array_equal(group["raw"][0], DATA[0])
    hidden = "zarr.json" if shown_as == "v2" else ".zarray"
    assert server.ask(f"/{stored}/{hidden}").status == 404


def test_arrays_as_they_are_stored(server: Server, directory: Path) -> None:
    """With plain chunks: each v3 reader, and each of v2, knows their documents."""
    pytest.importorskip("aiohttp")
    for path, zarr_format in (("g/raw", 3), ("old/raw", 2)):
        z: Any = zarr.open_array(f"{server.url}/{path}", mode="r")
        assert (z.metadata.zarr_format, z.shards) == (zarr_format, None)
        np.testing.assert_array_equal(z[:], DATA)
        stored: Any = zarr.open_array(str(directory), path="g/raw", mode="r")
        assert stored.shards == (4, 32, 32)


def test_a_missing_chunk_is_the_fill_value(as_v2: Server) -> None:
    """Also for readers of v2 that take a null for any value."""
    assert as_v2.ask("/g/empty/0/0/0").status == 404
    for path, value in (("g/empty", 0), ("g/raw", 9)):
        assert json.loads(as_v2.ask(f"/{path}/.zarray").body)["fill_value"] == value
    assert json.loads(as_v2.ask("/g/raw/.zattrs").body)["_ARRAY_DIMENSIONS"] == ["z", "y", "x"]


def test_keys_of_the_other_format_are_none(as_v2: Server) -> None:
    """A client never meets one chunk under two keys."""
    assert as_v2.ask("/g/raw/1/0/2").status == 200
    for path in (CHUNK, "/g/raw/zarr.json", "/zarr.json", "/g/raw/1/0", "/g/raw/1/0/02"):
        assert as_v2.ask(path).status == 404


def test_what_v2_cannot_say_is_refused_by_name(as_v2: Server, directory: Path) -> None:
    """And left out of consolidated metadata, so that the rest is read."""
    options: dict[str, Any] = {"shape": (4, 4), "chunks": (2, 2), "dtype": "u1"}
    store = ShardingStore(directory, chunks_per_shard=2)
    zarr.create_array(store, name="new", dimension_names=["y", None], **options)
    reply = as_v2.ask("/new/.zarray")
    assert (reply.status, b"dimension names" in reply.body) == (501, True)
    metadata = json.loads(as_v2.ask("/.zmetadata").body)["metadata"]
    assert "g/raw/.zarray" in metadata
    assert "new/.zarray" not in metadata


def test_an_array_that_is_replaced(server: Server, directory: Path) -> None:
    """By another process, and a client that reads no document of it: soon its chunks are those of
    the new one."""
    options: dict[str, Any] = {"name": "other", "shape": (4, 4), "chunks": (1, 1), "dtype": "u1"}
    for chunks_per_shard in ((2, 4), (4, 2)):
        store = ShardingStore(directory, chunks_per_shard=chunks_per_shard)
        z: Any = zarr.create_array(store, compressors=None, overwrite=True, **options)
        z[:] = np.arange(1, 17, dtype="u1").reshape(4, 4)
        store.close()
        end = time.monotonic() + MAX_SECONDS
        while server.ask("/other/c/1/3").body != bytes([8]):
            assert time.monotonic() < end


# ------------------------------------------------------------- hostile requests

SEEDS = [
    "..",
    ".",
    "",
    "%2e%2e",
    "%252e%252e",
    "..%2f",
    "%5c..%5c",
    "..\\",
    "etc",
    "passwd",
    "c",
    "0",
]
SEEDS += [
    "%00",
    "g",
    "raw",
    "zarr.json",
    ".zarray",
    "C:",
    "secret.txt",
    "link",
    "~",
    "%c0%ae%c0%ae",
]
SEEDS += ["v.zarr", "-1", "00", "1e9", "99999999999999999999", "%ff", "a" * 3000, "out", ".hidden"]
SEEDS += [
    "__lock",
    "0.__lock",
    "0.__journal",
    ".zarr_shardstore",
    "%0d%0aX:y",
    "<script>",
    "{}",
    "*",
]
"""Parts of paths; a path of parts that are all known names may be one of the store."""


def hostile_requests(n: int) -> Iterator[bytes]:
    """Yield requests that no client of the store would make."""
    choose = random.Random(0)
    ranges = [
        "bytes=99999-",
        "bytes=-0",
        "bytes=9-1",
        "bytes=a-b",
        "bytes=-",
        f"bytes={'9' * 300}-",
    ]
    for i in range(n):
        if i % 4 == 0:
            path, more = (
                "/notes.txt",
                f"Range: {choose.choice(ranges)}{choose.choice(['', 'x', ',y'])}\r\n",
            )
        else:
            parts = choose.choices(SEEDS, k=choose.randint(1, 7))
            path, more = (
                "/" * choose.randint(1, 3)
                + "/".join([*parts, choose.choice(["..%2f", "x%00", "../secret.txt"])]),
                "",
            )
        if i % 7 == 0:
            path = f"http://127.0.0.1{path}" if path.startswith("/") else path
        yield f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode()


def test_10_000_hostile_requests(server: Server, directory: Path) -> None:
    """Each gets 4xx, and no byte from outside; the server serves on."""
    requests = list(hostile_requests(10_000))
    statuses: dict[int, int] = {}
    for first in range(0, len(requests), 100):
        batch = requests[first : first + 100]
        for request, reply in zip(batch, server.send(batch), strict=True):
            assert 400 <= reply.status < 500, (request, reply)
            assert SECRET not in reply.body
            statuses[reply.status] = statuses.get(reply.status, 0) + 1
    assert statuses.keys() == {404, 416}
    assert server.ask(CHUNK).status == 200


def test_files_of_ours_and_links_out_of_the_store(server: Server) -> None:
    for name in [*OURS, "link", "out/secret.txt"]:
        for method in ("GET", "HEAD"):
            assert server.ask(f"/{name}", method).status == 404, name


def test_links_to_shards_and_groups_are_followed(
    server: Server, directory: Path, tmp_path: Path
) -> None:
    """They are how a store takes files in without a copy."""
    for top in (directory / "adopted", tmp_path):
        store = ShardingStore(top, chunks_per_shard=2)
        z: Any = zarr.create_array(store, name="z", shape=(8,), chunks=(2,), dtype="u1")
        z[:] = 7
    shard = directory / "adopted/z/c/1"
    shard.unlink()
    shard.symlink_to(tmp_path / "z/c/1")
    (directory / "linked").symlink_to(tmp_path)
    for path in ("adopted/z/c/2", "adopted/z/zarr.json", "linked/z/c/2", "linked/z/zarr.json"):
        assert server.ask(f"/{path}").status == 200, path


# ------------------------------------------------------------------ many clients


def rss(server: Server) -> int:
    """Return the memory of the server in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc tells the memory")
def test_64_clients_at_once(server: Server) -> None:
    """They get what one client gets, and the server does not grow."""
    grid = np.ndindex(3, 3, 4)
    expected = {path: server.ask(path) for path in (f"/g/raw/c/{z}/{y}/{x}" for z, y, x in grid)}
    paths = list(expected)

    def read(client: int) -> None:
        for path in random.Random(client).choices(paths, k=40):
            reply = server.ask(path)
            assert (reply.status, reply.body) == (200, expected[path].body)
            assert reply.headers["etag"] == expected[path].headers["etag"]

    with ThreadPoolExecutor(64) as clients:
        list(clients.map(read, range(64)))
        before = rss(server)
        list(clients.map(read, range(64, 128)))
    assert rss(server) <= before + 8


@pytest.fixture(scope="module")
def large(directory: Path) -> Any:
    """Chunks of 4 MiB and of 20 MiB, which no connection takes at once."""
    store = ShardingStore(directory, chunks_per_shard=2)
    for name, mib in (("a", 4), ("b", 20)):
        n: Any = 2 * mib << 20
        data = np.random.default_rng(mib).integers(1, 255, n, dtype="u1")
        options: dict[str, Any] = {"shape": n, "chunks": n // 2, "dtype": "u1"}
        zarr.create_array(store, name=f"large/{name}", compressors=None, **options)[:] = data
    return store


def test_large_values(large: Any, server: Server) -> None:
    """With an ETag, and ranges that are read without the rest."""
    data = large.get_sync("large/b/c/1").to_bytes()
    whole = server.ask("/large/b/c/1")
    assert whole.body == data
    etag = whole.headers["etag"]
    assert server.ask("/large/b/c/1", if_none_match=etag).status == 304
    for headers in ({}, {"if_range": etag}):
        reply = server.ask("/large/b/c/1", range="bytes=17000000-18999999", **headers)
        assert (reply.status, reply.body == data[17_000_000:19_000_000]) == (206, True)
        assert reply.headers["content-range"] == f"bytes 17000000-18999999/{20 << 20}"
        assert ("etag" in reply.headers) == ("if_range" in headers)
    assert server.ask("/large/b/c/1", range="bytes=99999999-").status == 416
    assert server.ask("/large/b/c/1", "HEAD").headers["content-length"] == str(20 << 20)


def test_clients_that_take_nothing(large: Any, server: Server) -> None:
    """Others are served, and their values are not kept. One that goes on gets the rest; if its
    chunk was written meanwhile, its connection is cut, and no byte of the new one is sent."""
    values = [large.get_sync(f"large/a/c/{i}").to_bytes() for i in (0, 1)]
    with ExitStack() as stack:
        before, hung = rss(server), []
        for i in range(40):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(MAX_SECONDS)
            connection.connect(server.address)
            connection.sendall(f"GET /large/a/c/{i % 2} HTTP/1.0\r\n\r\n".encode())
            hung.append(connection)
        assert server.ask("/g/raw/zarr.json").status == 200
        assert rss(server) < before + 40 * 4
        zarr.open_array(large, path="large/a")[: 4 << 20] = 255
        for i in (0, 1):
            received = b"".join(iter(partial(hung[i].recv, 1 << 20), b""))
            head, _, body = received.partition(b"\r\n\r\n")
            assert b"200 OK" in head
            assert values[i].startswith(body)
            assert (len(body) == len(values[i])) == (i == 1)


# --------------------------------------------------------------- page and command


def test_the_picture_of_an_array_at_the_root(tmp_path: Path) -> None:
    """Its path is empty."""
    store = ShardingStore(tmp_path / "v.zarr", chunks_per_shard=2)
    zarr.create_array(store, shape=(8, 8), chunks=(2, 2), dtype="u1")[:] = 3
    with serving(tmp_path / "v.zarr") as alone:
        assert alone.ask("/?array=&at=0,0&axes=0,1").headers["x-slice"] == "8 8 3 3"


def test_slices_are_bounded(server: Server, directory: Path) -> None:
    """Each is a byte for an element, from the darkest to the brightest; a wrong one is refused."""
    reply = server.ask("/?array=g/raw&at=3,8,10&axes=0,2")
    plane = DATA[3:, 8, 10:].astype("f8")
    scaled = (plane - plane.min()) / (plane.max() - plane.min()) * 255
    assert reply.headers["x-slice"] == f"3 40 {plane.min():g} {plane.max():g}"
    np.testing.assert_allclose(np.frombuffer(reply.body, "u1"), scaled.ravel(), atol=1)
    store = ShardingStore(directory, None)
    options: dict[str, Any] = {"dtype": "u1", "fill_value": 1}
    zarr.create_array(store, name="wide", shape=(9999, 9999), chunks=(9, 9), **options)
    zarr.create_array(store, name="deep", shape=(9999, 99, 99), chunks=(9999, 99, 9), **options)
    zarr.create_array(store, name="huge", shape=(9999, 9999), chunks=(9999, 9999), **options)
    assert len(server.ask("/?array=wide").body) == 512 * 512
    assert 1 <= len(server.ask("/?array=deep").body) < 99 * 99
    assert server.ask("/?array=huge").status == 501
    assert server.ask("/?array=g/text").status == 501
    for query in ("at=6,0,0", "at=0,0", "at=a,0,0", "axes=1,1", "axes=0,1,2", f"at={'9' * 99}"):
        assert server.ask(f"/?array=g/raw&{query}").status == 404
    for path in ("g", "nothing", "../v.zarr/g/raw", ".zarr_shardstore/z"):
        assert server.ask(f"/?array={path}").status == 404
    assert b"No array found" in server.ask("/?array=nothing").body


def test_the_page_lists_arrays(server: Server) -> None:
    """Names of arrays are text there, and no script but its own runs."""
    reply = server.ask("/")
    page = reply.body.decode()
    assert "<script>document" not in page
    assert "&lt;script&gt;document.title=&#x27;hacked&#x27;&lt;/script&gt;" in page
    for text in ("g/raw", "6 × 40 × 50", "2 × 16 × 16", "uint16", "&lt;u2"):
        assert text in page
    assert "script-src 'sha256-" in reply.headers["content-security-policy"]
    assert not re.search(r"(src|href)=|https?://", page)


def test_the_command_speaks_in_sentences(directory: Path, tmp_path: Path) -> None:
    with serving(directory) as server:
        program = [sys.executable, "-m", "zarr_shardstore", "serve"]
        wrong = {
            f"port {server.address[1]} of 127.0.0.1 cannot be taken (Address already in use)": [
                *(str(directory), f"--port={server.address[1]}"),
            ],
            "does not exist": [str(tmp_path / "nothing")],
        }
        for text, arguments in wrong.items():
            done = subprocess.run([*program, *arguments], capture_output=True, text=True)
            assert (done.returncode, text in done.stderr) == (1, True), done.stderr
            assert done.stderr.count("\n") == 1
        assert server.interrupt() == (0, "the server has ended\n")
