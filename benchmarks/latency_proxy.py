"""A proxy that simulates a network: it delays and records HTTP requests.

It runs in a process of its own, on 127.0.0.1. It keeps connections open, one to the server for each
of the client. A new connection costs nothing more. A long reply takes as long as its bytes on a
connection of 50 MB/s to an object store. A request is passed on immediately, and its reply is
delayed: the work of the proxy and of the server is part of the latency.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

BYTES_PER_S = 50e6

_CLOCK_TICK_S = 0.001
"""Event loops sleep for whole milliseconds, and one more."""


class Asked(NamedTuple):
    """A request: its path with the query, and the size of the body of its reply."""

    method: str
    path: str
    byte_range: str
    status: int
    nbytes: int


class Proxy:
    def __init__(self, process: Any) -> None:
        self.process = process
        self.port = int(process.stdout.readline())

    def asked(self) -> list[Asked]:
        """Return the requests since the last call, in the order of their replies."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [Asked(*fields) for fields in json.loads(self.process.stdout.readline())]


@contextmanager
def latency_proxy(upstream_port: int, latency_s: float = 0.03) -> Iterator[Proxy]:
    """Run a proxy in front of the server at that port until the end of the block."""
    command = [sys.executable, __file__, str(upstream_port), str(latency_s)]
    pipe: Any = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        yield Proxy(process)  # it ends when its input does


class _TimedReader(asyncio.StreamReader):
    """Reader with the time of its last bytes, taken before other connections have their turn."""

    arrived = 0.0

    def feed_data(self, data: Any) -> None:
        self.arrived = asyncio.get_running_loop().time()
        super().feed_data(data)


async def _read_head(reader: asyncio.StreamReader) -> tuple[bytes, list[str], dict[str, str]]:
    """Return the head of a message, the words of its first line, and its fields."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    fields = (line.split(":", 1) for line in lines)
    return head, first.split(" "), {name.lower(): value.strip() for name, value in fields}


async def _read_body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    if "transfer-encoding" in fields:
        raise NotImplementedError("the proxy passes on bodies whose length is known")
    return await reader.readexactly(int(fields.get("content-length", 0)))


async def _run(upstream_port: int, latency_s: float) -> None:
    log: list[Asked] = []
    loop = asyncio.get_running_loop()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        assert isinstance(client, _TimedReader)
        server, to_server = await asyncio.open_connection("127.0.0.1", upstream_port)
        try:
            while True:
                head, (method, path, _), fields = await _read_head(client)
                end = client.arrived + latency_s
                to_server.write(head + await _read_body(client, fields))
                head, (_, status, *_), reply = await _read_head(server)
                if method == "HEAD" or status in ("204", "304"):
                    reply["content-length"] = "0"
                nbytes = int(reply.get("content-length", 0))
                log.append(Asked(method, path, fields.get("range", ""), int(status), nbytes))
                body = await _read_body(server, reply)
                end += len(body) / BYTES_PER_S
                await asyncio.sleep(end - loop.time() - _CLOCK_TICK_S)
                while loop.time() < end:
                    await asyncio.sleep(0)
                to_client.write(head + body)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # one of them has left, or all is over
        finally:
            to_client.close()
            to_server.close()

    def connection() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(_TimedReader(), serve)

    proxy = await loop.create_server(connection, "127.0.0.1", 0)
    print(proxy.sockets[0].getsockname()[1], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(log), flush=True)
        log.clear()
    os._exit(0)  # hundreds of connections that are being opened would complain


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1]), float(sys.argv[2])))
