"""HTTP server of a store: chunks, documents, and a page that draws slices. It writes nothing.

======================  ======================================================================
``GET /``               the page; with ``?array=PATH``, a slice of an array, a byte for a pixel
``GET``, ``HEAD /KEY``  a value of the store, or a range of it
``OPTIONS``             permits pages of every origin to read
other methods           405
======================  ======================================================================

The ETag of a value is a digest of its bytes: it stays when a neighbour in the shard is written, and
when the server starts again. A value of more than `MAX_NBYTES` has none, and is sent in pieces
of one version of its object: if that changes, the connection is cut.

Memory: `_AT_ONCE` times `MAX_NBYTES`. A client that takes nothing for `_STALL_S` is disconnected.

Source: RFC 9110, "Conditional Requests", "Range Requests"; ASGI, "HTTP".
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from zarr_shardstore.doors.page import draw_slice, render_page
from zarr_shardstore.doors.served_store import ServedStore
from zarr_shardstore.errors import ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.native.as_format import ZarrFormat
from zarr_shardstore.store.sharding_store import ShardingStore

MAX_NBYTES = 16 * 1024 * 1024
"""Largest value, or piece of one, that is in memory for a client."""

_AT_ONCE = 32
"""Values that are read or sent at a time."""

_DRAWN_AT_ONCE = 2
"""Pages and slices that are made at a time."""

_MAX_CONNECTIONS = 512
_STALL_S = 30

_SENT_NBYTES = 256 * 1024
"""Bytes that a connection gets at a time; it has at most so many in memory."""

_RANGE = re.compile(r"\s*([0-9]{0,4000})-([0-9]{0,4000})\s*")
_CONDITIONS = {"if-match", "if-none-match"}

_HEADERS = {
    "access-control-allow-origin": "*",
    "access-control-expose-headers": "Accept-Ranges, Content-Length, Content-Range, ETag, X-Slice",
    "cache-control": "no-cache",  # a cache may keep it, and asks whether its ETag still holds
    "x-content-type-options": "nosniff",
}
_PREFLIGHT = {
    "access-control-allow-methods": "GET, HEAD",
    "access-control-allow-headers": "*",
    "access-control-allow-private-network": "true",
    "access-control-max-age": "86400",
}


class Reply(NamedTuple):
    """Reply to a request. The body of a HEAD is not sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes | memoryview | AsyncIterator[memoryview] = b""


class ChunkServer:
    """ASGI application that serves a store, for one event loop."""

    def __init__(self, store: ShardingStore, zarr_format: ZarrFormat | None, title: str) -> None:
        self._served = ServedStore(store, zarr_format)
        self._title = title
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._drawing = asyncio.Semaphore(_DRAWN_AT_ONCE)

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Any,  # noqa: ARG002
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        async with self._drawing if scope["path"] == "/" else self._slots:
            status, special, body = await self._reply(scope)
            headers = {"content-type": "text/plain; charset=utf-8", **_HEADERS, **special}
            if isinstance(body, bytes | memoryview) and status not in (204, 304):
                headers.setdefault("content-length", str(len(body)))
            pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": pairs})
            if scope["method"] != "HEAD":
                async for part in _parts_of(body):
                    async with asyncio.timeout(_STALL_S):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})

    async def _reply(self, scope: Mapping[str, Any]) -> Reply:
        method, path = scope["method"], scope["path"]
        wanted = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        if method == "OPTIONS":
            return Reply(204, _PREFLIGHT)
        if method not in ("GET", "HEAD"):
            return _refusal(405, "only GET and HEAD: the store is not written", allow="GET, HEAD")
        try:
            if path == "/":
                return await self._page(scope["query_string"].decode("latin-1"))
            return await self._value(path[1:], wanted, is_head=method == "HEAD")
        except SpecError as error:
            return _refusal(404, str(error))
        except UnsupportedError as error:
            return _refusal(501, str(error))
        except ShardStoreError as error:
            return _refusal(500, str(error))
        except Exception as error:  # of the base store; its text may have paths and credentials
            return _refusal(500, f"the store could not be read: {type(error).__name__}")

    async def _page(self, query: str) -> Reply:
        asked = dict(parse_qsl(query))
        if "array" in asked:
            pixels, described = await asyncio.to_thread(draw_slice, self._served.store, asked)
            kind = {"content-type": "application/octet-stream", "x-slice": described}
            return Reply(200, kind, pixels)
        page, policy = await asyncio.to_thread(render_page, self._served.store, self._title)
        kind = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
        return Reply(200, kind, page)

    async def _value(self, key: str, wanted: Mapping[str, str], *, is_head: bool) -> Reply:
        found = await self._served.find(key)
        if found is None:
            return _missing(key)
        headers = {"accept-ranges": "bytes", "content-type": "application/json"}
        value: bytes | memoryview | None = None
        if isinstance(found, bytes):
            value = found
        else:
            headers["content-type"] = "application/octet-stream"
            if is_head and not _CONDITIONS & wanted.keys():
                size = await self._served.size(found)
                length = {"content-length": str(size)}
                return _missing(key) if size is None else Reply(200, {**headers, **length})
            value = await self._served.read(found, Range(0, MAX_NBYTES + 1))
            if value is None:
                return _missing(key)
            if len(value) > MAX_NBYTES:
                return await self._large_value(found, headers, wanted, is_head=is_head)
        hashed = asyncio.to_thread(_digest, value) if len(value) > _SENT_NBYTES else None
        headers["etag"] = await hashed if hashed else _digest(value)
        status, start, stop = select(wanted, len(value), headers["etag"], is_head=is_head)
        return _selected(status, (start, stop, len(value)), headers, memoryview(value)[start:stop])

    async def _large_value(
        self, key: str, headers: dict[str, str], wanted: Mapping[str, str], *, is_head: bool
    ) -> Reply:
        place = await self._served.locate(key)
        if place is None:
            return _missing(key)
        status, start, stop = select(wanted, place.nbytes, None, is_head=is_head)

        async def pieces() -> AsyncIterator[memoryview]:
            for first in range(start, stop, MAX_NBYTES):
                yield await self._served.read_piece(place, first, min(first + MAX_NBYTES, stop))

        return _selected(status, (start, stop, place.nbytes), headers, pieces())


def select(
    wanted: Mapping[str, str], nbytes: int, etag: str | None, *, is_head: bool = False
) -> tuple[int, int, int]:
    """Return status, start and stop for the headers of a request, of a value with an ETag.

    >>> select({"range": "bytes=-3"}, 10, '"a"'), select({"range": "bytes=10-"}, 10, '"a"')
    ((206, 7, 10), (416, 0, 0))
    """
    if "if-match" in wanted and not _names(wanted["if-match"], etag):
        return 412, 0, 0
    if "if-none-match" in wanted and _names(wanted["if-none-match"].replace("W/", ""), etag):
        return 304, 0, 0
    unit, _, texts = wanted.get("range", "").partition("=")
    parts = [_RANGE.fullmatch(text) for text in texts.split(",")]
    is_whole = unit.strip().lower() != "bytes" or wanted.get("if-range", etag) != etag or is_head
    if is_whole or (len(parts) > 1 and all(parts)):  # several ranges: all of it, as is permitted
        return 200, 0, nbytes
    first, last = parts[0].groups() if parts[0] and len(parts) == 1 else ("", "")
    start = int(first) if first else nbytes - min(int(last or 0), nbytes)
    stop = min(int(last) + 1, nbytes) if first and last else nbytes
    return (206, start, stop) if start < stop else (416, 0, 0)


def _digest(value: bytes | memoryview) -> str:
    return f'"{blake2b(value, digest_size=16).hexdigest()}"'


def _names(tags: str, etag: str | None) -> bool:
    """Return whether ``If-Match``, or ``If-None-Match``, names the ETag of a value."""
    return tags.strip() == "*" or etag in [tag.strip() for tag in tags.split(",")]


def _selected(
    status: int, extent: tuple[int, int, int], headers: dict[str, str], body: Any
) -> Reply:
    start, stop, nbytes = extent
    match status:
        case 304:
            return Reply(304, headers)
        case 412:
            return _refusal(412, "the value is another one by now")
        case 416:
            return _refusal(416, f"it has {nbytes} bytes", **{"content-range": f"bytes */{nbytes}"})
        case 206:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{nbytes}"
    return Reply(status, {**headers, "content-length": str(stop - start)}, body)


def _refusal(status: int, text: str, **headers: str) -> Reply:
    return Reply(status, headers, f"{text}\n".encode())


def _missing(key: str) -> Reply:
    return _refusal(404, f"there is no {key[:100]!r}")


async def _parts_of(body: bytes | memoryview | AsyncIterator[memoryview]) -> AsyncIterator[bytes]:
    if isinstance(body, bytes | memoryview):
        for first in range(0, len(body), _SENT_NBYTES):
            yield bytes(body[first : first + _SENT_NBYTES])
        return
    async for piece in body:
        async for part in _parts_of(piece):
            yield part


def serve_store(
    store: ShardingStore,
    *,
    zarr_format: ZarrFormat | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    title: str = "",
    on_start: Callable[[str], None],
) -> None:
    """Serve a store until the process is interrupted; `on_start` gets the URL.

    Raises
    ------
    SpecError
        If the port cannot be taken, or uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise SpecError("uvicorn serves: pip install 'zarr-shardstore[serve]'") from error
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        hint = "choose another by --port, or --port 0 for any that is free"
        raise SpecError(f"port {port} of {host} cannot be taken ({reason}): {hint}") from error
    # The system cuts a connection whose client takes nothing, also after its reply has ended.
    with suppress(AttributeError, OSError):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALL_S * 1000)
    config = uvicorn.Config(
        ChunkServer(store, zarr_format, title),
        http="h11",
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    with listener:
        name = f"[{host}]" if is_ipv6 else host
        on_start(f"http://{name}:{listener.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[listener])
