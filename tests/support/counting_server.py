"""A small HTTP server of stored objects, on this machine: it counts what it is asked for.

Objects are the values of a mapping, or the files of a directory; they are at
``http://127.0.0.1:PORT/bucket/KEY``, as S3 has them and as any HTTP server would. It answers
ranges, conditions (``If-Match``, ``If-None-Match``), HEAD, PUT and S3's ListObjectsV2, and writes
down each request. What is put makes another mapping: the one that was given stays as it is.

Source: RFC 9110, sections 8.8 (ETag), 13 (conditions), 14 (ranges); Amazon S3 API, ListObjectsV2.

    python counting_server.py DIRECTORY PORT    # serves until its standard input ends
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"

_MAX_REQUESTS_KEPT = 100_000
_MAX_LISTED = 1000
_MAX_ROUND_S = 20  # clients wait for 30
_ports: set[int] = set()
"""Those of earlier servers: a store that meets an old address may remember what was there."""

_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
"""One date for whatever is stored: it tells nothing."""


class Asked(NamedTuple):
    """One request, as it was answered."""

    method: str
    key: str
    """With its query, if it asks for a list."""
    byte_range: str | None
    """What stands in the header, without ``bytes=``."""
    status: int


class Files(Mapping[str, bytes]):
    """The files below a directory; keys have slashes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def __getitem__(self, key: str) -> bytes:
        path = (self._directory / key).resolve()
        if not path.is_relative_to(self._directory) or not path.is_file():
            raise KeyError(key)
        return path.read_bytes()

    def __iter__(self) -> Iterator[str]:
        files = (path for path in self._directory.rglob("*") if path.is_file())
        return (path.relative_to(self._directory).as_posix() for path in files)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def date_of(self, key: str) -> str:
        """When a file was last changed, as HTTP spells it."""
        return formatdate((self._directory / key).stat().st_mtime, usegmt=True)


class CountingServer:
    """What a test sees of the server, while it runs.

    Parameters
    ----------
    objects
        What is served. A value may be replaced at any time.
    hold_s
        If not 0, replies are held until no request has come for so many seconds.
    """

    def __init__(self, objects: Mapping[str, bytes], hold_s: float = 0) -> None:
        self.objects = objects
        self.hold_s = hold_s
        self.rounds: deque[int] = deque()
        """Sizes of the next rounds: so many requests come before the first of them is replied to.

        If they do not come within `_MAX_ROUND_S`, all are replied to and the round stays here.
        """
        self.sends_etags = True
        self._asked: deque[Asked] = deque(maxlen=_MAX_REQUESTS_KEPT)
        self._lock = threading.Lock()
        self._round: threading.Barrier | None = None
        self._last_came = 0.0
        self.port = 0

    @property
    def endpoint(self) -> str:
        """Of S3, without the bucket."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Of the objects."""
        return f"{self.endpoint}/{BUCKET}"

    @property
    def asked(self) -> list[Asked]:
        """Requests since the last `forget`, in the order of their replies."""
        with self._lock:
            return list(self._asked)

    def forget(self) -> None:
        with self._lock:
            self._asked.clear()

    def note(self, asked: Asked) -> None:
        with self._lock:
            self._asked.append(asked)

    def hold(self) -> None:
        """Wait for the end of the round."""
        with self._lock:
            self._last_came = time.monotonic()
            if self._round is None and self.rounds:
                self._round = threading.Barrier(self.rounds[0], self._end_round)
            this = self._round
        if this is not None:
            with suppress(threading.BrokenBarrierError):
                this.wait(_MAX_ROUND_S)
        while (left := self._last_came + self.hold_s - time.monotonic()) > 0:
            time.sleep(left)

    def _end_round(self) -> None:
        with self._lock:
            self._round = None
            self.rounds.popleft()


@contextmanager
def counting_server(
    objects: Mapping[str, bytes] | Path, *, hold_s: float = 0, port: int = 0
) -> Iterator[CountingServer]:
    """A server on 127.0.0.1, in threads of this process, for as long as the block runs."""
    state = CountingServer(Files(objects) if isinstance(objects, Path) else objects, hold_s)

    class Handler(_Handler):
        server_state = state

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # connections that wait to be accepted
        daemon_threads = True
        block_on_close = False  # clients keep their connections

    with ExitStack() as stack:
        server = stack.enter_context(Server(("127.0.0.1", port), Handler))
        while not port and server.server_port in _ports:
            server = stack.enter_context(Server(("127.0.0.1", port), Handler))
        state.port = server.server_port
        _ports.add(state.port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


def resolve(byte_range: str, nbytes: int) -> tuple[int, int] | None:
    """Half-open bounds of a range of so many bytes; ``None`` if it has no byte of them.

    >>> resolve("2-3", 10), resolve("8-20", 10), resolve("7-", 10), resolve("-3", 10)
    ((2, 4), (8, 10), (7, 10), (7, 10))
    >>> resolve("-20", 10), resolve("10-", 10), resolve("-0", 10)
    ((0, 10), None, None)
    """
    first, last = byte_range.split("-")
    if first:
        start, stop = int(first), min(int(last) + 1 if last else nbytes, nbytes)
    else:
        start, stop = max(nbytes - int(last), 0), nbytes
    return (start, stop) if start < stop else None


class _Handler(BaseHTTPRequestHandler):
    """Requests of one connection."""

    server_state: CountingServer
    protocol_version = "HTTP/1.1"  # connections are kept
    timeout = 60  # of a connection that is silent
    wbufsize = -1  # head and body in one piece
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        state = self.server_state
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        value = self.rfile.read(int(self.headers["Content-Length"]))
        old = _etag(state.objects.get(key, b"no object"))
        if not _matches(self.headers["If-Match"], old, if_there_is_none=True):
            self._reply(key, 412, b"<Error><Code>PreconditionFailed</Code></Error>", old)
            return
        state.objects = {**state.objects, key: value}
        self._reply(key, 200, b"", _etag(value))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        state = self.server_state
        state.hold()
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix("/").removeprefix(BUCKET).removeprefix("/")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if not key and "list-type" in query:
            self._reply(f"?{url.query}", 200, _listing(state.objects, query))
            return
        try:
            value = state.objects[key]
        except KeyError:
            self._reply(key, 404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        etag = _etag(value)
        if not _matches(self.headers["If-Match"], etag, if_there_is_none=True):
            self._reply(key, 412, b"<Error><Code>PreconditionFailed</Code></Error>", etag)
        elif _matches(self.headers["If-None-Match"], etag, if_there_is_none=False):
            self._reply(key, 304, b"", etag)
        else:
            self._reply_part(key, value, etag)

    def _reply_part(self, key: str, value: bytes, etag: str) -> None:
        wanted = self._byte_range()
        if wanted is None:
            self._reply(key, 200, value, etag)
            return
        bounds = resolve(wanted, len(value))
        if bounds is None:
            error = b"<Error><Code>InvalidRange</Code></Error>"
            self._reply(key, 416, error, etag, f"bytes */{len(value)}")
            return
        start, stop = bounds
        content_range = f"bytes {start}-{stop - 1}/{len(value)}"
        self._reply(key, 206, value[start:stop], etag, content_range)

    def _byte_range(self) -> str | None:
        """Without its unit; what is not one valid range is ignored, as the standard says."""
        header = re.fullmatch(r"bytes=(\d+-\d*|-\d+)", self.headers["Range"] or "")
        return None if header is None else header[1]

    def _reply(
        self, key: str, status: int, body: bytes, etag: str = "", content_range: str = ""
    ) -> None:
        self.server_state.note(Asked(self.command, key, self._byte_range(), status))
        self.send_response(status)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        objects = self.server_state.objects
        date = objects.date_of(key) if isinstance(objects, Files) and key in objects else _DATE
        self.send_header("Last-Modified", date)
        if status in (200, 206):
            self.send_header("Accept-Ranges", "bytes")
        if etag and self.server_state.sends_etags:
            self.send_header("ETag", etag)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(value: bytes) -> str:
    return f'"{hashlib.md5(value, usedforsecurity=False).hexdigest()}"'


def _matches(header: str | None, etag: str, *, if_there_is_none: bool) -> bool:
    if header is None:
        return if_there_is_none
    return header.strip() == "*" or etag in [tag.strip() for tag in header.split(",")]


def _listing(objects: Mapping[str, bytes], query: Mapping[str, str]) -> bytes:
    """A page of keys; what is behind a delimiter is one common prefix."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token", query.get("start-after", ""))
    n_max = min(int(query.get("max-keys", _MAX_LISTED)), _MAX_LISTED)
    names: dict[str, bool] = {}  # and whether it is a common prefix
    for key in sorted(key for key in list(objects) if key.startswith(prefix)):
        head, found, _ = key[len(prefix) :].partition(delimiter or "\0")
        names[prefix + head + found if delimiter else key] = bool(delimiter and found)
    left = [name for name in names if name > after]
    lines = [f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"]
    for name in left[:n_max]:
        if names[name]:
            lines.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            continue
        value = objects[name]
        lines.append(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(value)}</Size>"
            f"<ETag>{escape(_etag(value))}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
    is_cut = len(left) > n_max
    if is_cut and n_max:
        token = escape(left[n_max - 1])
        lines.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
    lines.append(f"<KeyCount>{len(left[:n_max])}</KeyCount>")
    lines.append(f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>")
    xml = "".join(lines)
    return f'<?xml version="1.0"?><ListBucketResult>{xml}</ListBucketResult>'.encode()


if __name__ == "__main__":
    with counting_server(Path(sys.argv[1]), port=int(sys.argv[2])):
        sys.stdin.read()
