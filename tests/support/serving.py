"""The command ``serve`` in a process of its own, and clients of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import BinaryIO

import pytest

import zarr_shardstore

MAX_SECONDS = 60
"""For one reply, or the end of the server; what takes longer hangs."""


@dataclass
class Reply:
    """Reply of a server; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Server:
    """A store that is served."""

    process: subprocess.Popen[str]
    url: str
    """Without a slash at the end."""

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def ask(self, path: str, method: str = "GET", **headers: str) -> Reply:
        """Ask in a connection of its own; an underscore in the name of a header is a hyphen."""
        connection = HTTPConnection(*self.address, timeout=MAX_SECONDS)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, named, response.read())
        finally:
            connection.close()

    def send(self, requests: list[bytes]) -> list[Reply]:
        """Send requests as they are, one behind the other, through one connection."""
        with socket.create_connection(self.address, timeout=MAX_SECONDS) as connection:
            connection.sendall(b"".join(requests))
            with connection.makefile("rb") as file:
                return [_next_reply(file) for _ in requests]

    def interrupt(self) -> tuple[int, str]:
        """Do as Ctrl-C does; return status and stderr."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=MAX_SECONDS)
        return self.process.returncode, errors


def _next_reply(file: BinaryIO) -> Reply:
    status = int(file.readline().split()[1])
    lines = iter(lambda: file.readline().decode("latin-1").strip(), "")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Reply(status, headers, file.read(int(headers.get("content-length", 0))))


@contextmanager
def serving(store: Path | str, *options: str) -> Iterator[Server]:
    """Serve a store at a free port."""
    pytest.importorskip("uvicorn")
    root = str(Path(zarr_shardstore.__file__).parents[1])
    command = [sys.executable, "-m", "zarr_shardstore", "serve", str(store), "--port=0", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+:\d+", line)
            assert found is not None, line + process.stderr.read()
            yield Server(process, found[0])
        finally:
            process.kill()
