"""Web server whose replies are cut, too long, of another range, or listings of anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import ObjectStore

from tests.support.counting_server import resolve
from tests.support.kit import forget
from zarr_shardstore import ShardingMapping, ShardingStore, get_shard_info, shard_store

FAULTS = [
    *("cut", "cut short", "longer", "whole", "status", "content-range", "other range"),
    *("no length", "chunked", "links", "etag", "empty"),
]
VALUES = np.arange(48, dtype="u2").reshape(6, 8)


@cache
def objects() -> dict[str, bytes]:
    """An array of 4 x 4 chunks in 2 x 2 shards. Chunks have checksums."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=2)
    zarr.create_group(store)
    z: Any = zarr.create_array(
        store, name="z", shape=(6, 8), chunks=(2, 2), dtype="u2", compressors=[Crc32cCodec()]
    )
    z[:] = VALUES
    return base


class Server:
    """Server in a thread. Each input has a folder of its own, so that no client remembers."""

    def __init__(self) -> None:
        self.number = 0
        self.faults: dict[int, tuple[str, Any]] = {}
        self.n_requests = 0
        outer = self

        class Handler(_Handler):
            server_state = outer

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away

        self.server = Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def begin(self, faults: dict[int, tuple[str, Any]]) -> str:
        self.number += 1
        self.faults, self.n_requests = faults, 0
        return f"http://127.0.0.1:{self.server.server_port}/{self.number}"


class _Handler(BaseHTTPRequestHandler):
    server_state: Server
    protocol_version = "HTTP/1.1"
    timeout = 20
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        state = self.server_state
        fault, argument = state.faults.get(state.n_requests, ("", None))
        state.n_requests += 1
        if fault in ("cut", "empty") and self.path.endswith("zarr.json"):
            fault = ""  # a document without a word about sharding is that of no shards
        key = self.path.partition("?")[0].strip("/").partition("/")[2]
        value, status, extra = objects().get(key), 200, {"ETag": f'"{key}"'}
        if value is None:
            value = self._listing(key, argument if fault == "links" else None)
            status = 200 if value else 404
        elif self.headers["Range"] and fault != "whole":
            bounds = resolve(self.headers["Range"].removeprefix("bytes="), len(value))
            if bounds is None:
                status, value = 416, b""
            else:
                start, stop = bounds
                if fault == "other range":
                    start = max(0, min(start + argument % 9 - 4, len(value) - 1))
                extra["Content-Range"] = f"bytes {start}-{stop - 1}/{len(value)}"
                status, value = 206, value[start:stop]
        self._reply(status, value, extra, fault, argument)

    def _listing(self, path: str, links: Any) -> bytes:
        prefix = f"{path}/" if path else ""
        below = [key[len(prefix) :] for key in objects() if key.startswith(prefix)]
        names = sorted({name.partition("/")[0] + "/" * ("/" in name) for name in below})
        if isinstance(links, list) and names:
            names += [link for link in links if isinstance(link, str)]
        lines = [f'<li><a href="{name}">{name}</a></li>' for name in names]
        return f"<html><ul>{''.join(lines)}</ul></html>".encode() if lines else b""

    def _reply(
        self, status: int, body: bytes, extra: dict[str, str], fault: str, argument: Any
    ) -> None:
        length: int | None = len(body)
        number = argument if type(argument) is int else 0
        match fault:
            case "cut":
                body = body[: number % (len(body) + 1)]
                length = len(body)
            case "cut short":
                body = body[: number % (len(body) + 1)]
            case "longer":
                body += bytes(number % 50)
                length = len(body)
            case "empty":
                body, length = b"", 0
            case "status":
                status = (500, 403, 204, 301, 416, 429, 503)[number % 7]
                body, length = b"", 0
            case "content-range":
                extra["Content-Range"] = ("bytes */*", "bytes 0-0/1", "", "x", "bytes 9-1/0")[
                    number % 5
                ]
            case "no length":
                length = None
            case "chunked":
                length = None
                extra["Transfer-Encoding"] = "chunked"
                size = (len(body), len(body) + 1, 2**40)[number % 3]
                body = f"{size:x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
            case "etag":
                extra["ETag"] = ("W/x", '"another"', "", "x" * 5000)[number % 4]
        self.send_response(status)
        self.send_header("Connection", "close")
        self.close_connection = True
        for name, text in extra.items():
            self.send_header(name, text)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@cache
def server() -> Server:
    return Server()


def run_http(data: bytes) -> None:
    """Read chunks, read by zarr, inspect and convert from behind the server."""
    try:
        doc = json.loads(data)
        client = int(doc["client"]) % 4
        faults = {int(at): (str(what), n) for at, what, n in doc["faults"]}
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return
    url = server().begin({at: (w, n) for at, (w, n) in faults.items() if w in FAULTS})
    forget()
    match client:
        case 0 | 1:
            read(_obstore(url) if client else url)
        case 2:
            with_errors(lambda: get_shard_info(url))
        case 3:
            target: dict[str, bytes] = {}
            if with_errors(lambda: shard_store(url, target, chunks_per_shard=2)) is not None:
                assert all(".." not in key and not key.startswith("/") for key in target), target
                z: Any = zarr.open_array(ShardingStore(target), path="z", mode="r")
                np.testing.assert_array_equal(z[:], VALUES)


def _obstore(url: str) -> Any:
    from obstore.store import HTTPStore

    options: Any = {"allow_http": True, "timeout": "5s"}
    retries: Any = {"max_retries": 0}
    return ObjectStore(HTTPStore(url, client_options=options, retry_config=retries), read_only=True)


def read(base: Any) -> None:
    """A chunk is right, or there is an error."""
    expected = ShardingMapping(objects())
    store = ShardingStore(base)
    for key in ("z/c/0/0", "z/c/1/1", "z/c/2/3", "z/c/0/0"):
        found = with_errors(lambda key=key: sync(store.get(key, default_buffer_prototype())))
        if found is not None and found.to_bytes() != expected[key]:
            # Bytes of the right number, from the wrong place: the checksum of the chunk tells.
            assert len(found) == len(expected[key]), (key, found.to_bytes())


def with_errors(run: Any) -> Any:
    """Return what it returns; ``None`` for an error of the package or of a client."""
    from tests.fuzz.targets import WrongError

    try:
        return run()
    except (AssertionError, WrongError, MemoryError, RecursionError, AttributeError, KeyError):
        raise
    except Exception:
        return None


def seeds_of_replies() -> Iterable[bytes]:
    for client in range(4):
        for fault in FAULTS:
            number: Any = ["../../x", "http://else/where", "?C=N;O=D", "é", "z/"]
            number = number if fault == "links" else 7
            faults = [[client, fault, number], [client + 2, fault, number]]
            yield json.dumps({"client": client, "faults": faults}).encode()
