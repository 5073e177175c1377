"""HTTP server of a store: chunks, documents, and a page of slices. The store is only read.

======================  ======================================================================
``GET /``               the page; with ``?array=PATH``, a slice of an array, a byte for a pixel
``GET``, ``HEAD /KEY``  a value of the store, or a range of it
``OPTIONS``             permits pages of every origin to read
other methods           405
======================  ======================================================================

The ETag of a value is a digest of its bytes: it survives a write of another chunk of the shard, and
a restart of the server. Each reply comes from one read of the store, so it mixes no two states.

Memory: `_AT_ONCE` values of up to `_LARGE_NBYTES`, and few larger ones; and `_SENT_NBYTES` for a
client that takes nothing.

Source: RFC 9110, "Conditional Requests", "Range Requests"; ASGI, "HTTP".
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from zarr_shardstore.access import ShardingStore, byte_ranges
from zarr_shardstore.errors import ShardConflictError, ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.interop.serve.page import draw_slice, render_page
from zarr_shardstore.interop.serve.served_store import ServedStore
from zarr_shardstore.tools.native.translate import ZarrFormat

_AT_ONCE = 16  # values being read or sent
_LARGE_NBYTES = 16 * 1024 * 1024
_LARGE_AT_ONCE = 2  # larger values being read or sent
_MAX_NBYTES = 512 * 1024 * 1024  # of a reply
_DRAWN_AT_ONCE = 2  # pages and slices being made
_MAX_CONNECTIONS = 512
_PATIENCE_S = 2  # after this pause of a client its value leaves the memory
_MOMENT_S = 0.01
_STALL_S = 30  # after this pause it is disconnected
_SENT_NBYTES = 256 * 1024  # the most that a connection gets at a time, and has in memory
_RANGE = re.compile(r"\s*([0-9]{0,4000})-([0-9]{0,4000})\s*")
_CONDITIONS = {"if-match", "if-none-match"}

_HEADERS = {
    "access-control-allow-origin": "*",
    "access-control-expose-headers": "Accept-Ranges, Content-Length, Content-Range, ETag, X-Slice",
    "cache-control": "no-cache",  # a cache keeps it, and revalidates its ETag
    "x-content-type-options": "nosniff",
}
_PREFLIGHT = {
    "access-control-allow-methods": "GET, HEAD",
    "access-control-allow-headers": "*",
    "access-control-allow-private-network": "true",
    "access-control-max-age": "86400",
}


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes | memoryview = b""


class ChunkServer:
    """ASGI application that serves a store, for one event loop."""

    def __init__(self, store: ShardingStore, zarr_format: ZarrFormat | None, title: str) -> None:
        self._served = ServedStore(store, zarr_format)
        self._title = title
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._drawing = asyncio.Semaphore(_DRAWN_AT_ONCE)

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Mapping[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        async with AsyncExitStack() as stack:
            status, special, body = await self._reply(scope, stack)
            headers = {"content-type": "text/plain; charset=utf-8", **_HEADERS, **special}
            if status not in (204, 304):
                headers.setdefault("content-length", str(len(body)))
            pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": pairs})
            for first in range(0, len(body) if scope["method"] != "HEAD" else 0, _SENT_NBYTES):
                part = bytes(body[first : first + _SENT_NBYTES])
                message = {"type": "http.response.body", "body": part, "more_body": True}
                sending = asyncio.ensure_future(send(message))
                if not (await asyncio.wait({sending}, timeout=_PATIENCE_S))[0]:
                    # Free the memory; if the client continues, the value is read again.
                    sent, body = await asyncio.to_thread(_digest, body), b""
                    await stack.aclose()
                    gone = asyncio.ensure_future(_disconnected(receive))
                    await asyncio.wait_for(sending, _STALL_S)
                    if (await asyncio.wait({gone}, timeout=_MOMENT_S))[0]:
                        return
                    gone.cancel()
                    body = (await self._reply(scope, stack)).body
                    if await asyncio.to_thread(_digest, body) != sent:
                        raise ShardConflictError(f"{scope['path']!r} was changed while it was sent")
                await sending
            await send({"type": "http.response.body"})

    async def _reply(self, scope: Mapping[str, Any], stack: AsyncExitStack) -> Reply:
        method, path = scope["method"], scope["path"]
        await stack.enter_async_context(self._drawing if path == "/" else self._slots)
        wanted = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        if method == "OPTIONS":
            return Reply(204, _PREFLIGHT)
        if method not in ("GET", "HEAD"):
            return _refusal(405, "only GET and HEAD: the store is not written", allow="GET, HEAD")
        try:
            if path == "/":
                return await self._page(scope["query_string"].decode("latin-1"))
            if method == "HEAD":
                wanted.pop("range", None)
            return await self._value(path[1:], wanted, stack, is_head=method == "HEAD")
        except FileNotFoundError:
            return _MISSING
        except SpecError as error:
            return _refusal(404, str(error))
        except UnsupportedError as error:
            return _refusal(501, str(error))
        except ShardStoreError as error:
            return _refusal(500, str(error))
        except Exception as error:  # its text may have paths and credentials of the base store
            return _refusal(500, f"the store could not be read: {type(error).__name__}")

    async def _page(self, query: str) -> Reply:
        asked = dict(parse_qsl(query, keep_blank_values=True))  # the root has an empty path
        if "array" in asked:
            pixels, described = await asyncio.to_thread(draw_slice, self._served.store, asked)
            kind = {"content-type": "application/octet-stream", "x-slice": described}
            return Reply(200, kind, pixels)
        page, policy = await asyncio.to_thread(render_page, self._served.store, self._title)
        kind = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
        return Reply(200, kind, page)

    async def _value(
        self, key: str, wanted: Mapping[str, str], stack: AsyncExitStack, *, is_head: bool
    ) -> Reply:
        found = await self._served.find(key)
        headers = {"accept-ranges": "bytes", "content-type": "application/json"}
        if found is None or isinstance(found, bytes):
            return await _selected(found, headers, wanted)
        headers["content-type"] = "application/octet-stream"
        if is_head and not _CONDITIONS & wanted.keys():
            size = await self._served.store.getsize(found)
            return Reply(200, {**headers, "content-length": str(size)})
        value = await self._served.read(found, byte_ranges.Range(0, _LARGE_NBYTES + 1))
        if value is None or len(value) <= _LARGE_NBYTES:
            return await _selected(value, headers, wanted)
        value = None  # while it waits
        await stack.enter_async_context(self._large)
        return await self._large_value(found, headers, wanted)

    async def _large_value(
        self, key: str, headers: dict[str, str], wanted: Mapping[str, str]
    ) -> Reply:
        """Read a range alone, so it has no ETag; with a condition read the whole value."""
        size = await self._served.store.getsize(key)
        status, start, stop = select(wanted, size, None)
        is_part = status == 206 and not _CONDITIONS & wanted.keys()
        if (stop - start if is_part else size) > _MAX_NBYTES:
            return _refusal(413, f"it has {size} bytes: ask for ranges of up to {_MAX_NBYTES}")
        value = await self._served.read(key, byte_ranges.Range(start, stop) if is_part else None)
        if not is_part:
            return await _selected(value, headers, wanted)
        if value is None or len(value) < stop - start:
            return _refusal(503, "the value has changed: ask again")
        return Reply(206, {**headers, "content-range": f"bytes {start}-{stop - 1}/{size}"}, value)


async def _selected(
    value: bytes | memoryview | None, headers: dict[str, str], wanted: Mapping[str, str]
) -> Reply:
    """Return the reply with a value, or its requested range."""
    if value is None:
        return _MISSING
    hashed = asyncio.to_thread(_digest, value) if len(value) > _SENT_NBYTES else None
    headers["etag"] = await hashed if hashed else _digest(value)
    status, start, stop = select(wanted, len(value), headers["etag"])
    match status:
        case 412:
            return _refusal(412, "the value is another one by now")
        case 416:
            text = f"it has {len(value)} bytes"
            return _refusal(416, text, **{"content-range": f"bytes */{len(value)}"})
        case 206:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{len(value)}"
    return Reply(status, headers, memoryview(value)[start:stop])


def _digest(value: bytes | memoryview) -> str:
    return f'"{blake2b(value, digest_size=16).hexdigest()}"'


def select(wanted: Mapping[str, str], nbytes: int, etag: str | None) -> tuple[int, int, int]:
    """Return status, start and stop for the headers of a request and a value with an ETag.

    >>> select({"range": "bytes=-3"}, 10, '"a"'), select({"range": "bytes=10-"}, 10, '"a"')
    ((206, 7, 10), (416, 0, 0))
    """
    if "if-match" in wanted and not _names(wanted["if-match"], etag):
        return 412, 0, 0
    if "if-none-match" in wanted and _names(wanted["if-none-match"].replace("W/", ""), etag):
        return 304, 0, 0
    unit, _, texts = wanted.get("range", "").partition("=")
    parts = [_RANGE.fullmatch(text) for text in texts.split(",")]
    is_whole = unit.strip().lower() != "bytes" or wanted.get("if-range", etag) != etag
    if is_whole or (len(parts) > 1 and all(parts)):  # all for several ranges, as permitted
        return 200, 0, nbytes
    first, last = parts[0].groups() if parts[0] and len(parts) == 1 else ("", "")
    start = int(first) if first else nbytes - min(int(last or 0), nbytes)
    stop = min(int(last) + 1, nbytes) if first and last else nbytes
    return (206, start, stop) if start < stop else (416, 0, 0)


def _names(tags: str, etag: str | None) -> bool:
    """Whether ``If-Match``, or ``If-None-Match``, names the ETag of a value."""
    return tags.strip() == "*" or etag in [tag.strip() for tag in tags.split(",")]


async def _disconnected(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal(status: int, text: str, **headers: str) -> Reply:
    return Reply(status, headers, f"{text}\n".encode())


_MISSING = _refusal(404, "there is no such key")


def serve_store(
    store: ShardingStore,
    *,
    zarr_format: ZarrFormat | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    title: str = "",
    on_start: Callable[[str], None],
) -> None:
    """Serve a store until the process is interrupted; `on_start` gets the URL."""
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
    # The system cuts a connection whose client takes nothing, even after the end of its reply.
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
