"""Processes that convert, write or repair, and the S3 server that some of them work on."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import zarr_shardstore
from tests.support import convert_once
from zarr_shardstore import ShardStoreError

MAX_SECONDS = 120
"""For one child; what takes longer hangs."""


@contextmanager
def child(request: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that converts, and has just begun."""
    root = str(Path(zarr_shardstore.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, convert_once.__file__, json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            yield process
        finally:
            process.kill()


@contextmanager
def forks_of(script: str) -> Iterator[Callable[[dict[str, Any]], int]]:
    """A process that has imported everything, forks for each request, and replies with a number."""
    root = str(Path(zarr_shardstore.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:

        def ask(request: dict[str, Any]) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        try:
            yield ask
        finally:
            process.kill()


def fork_for_each_line(run: Callable[[Any], None]) -> None:
    """The other side of `forks_of`: 0 for an end, 1 for a bug, 2 for an interrupt, 3 for a
    refusal, negative for a signal."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                run(json.loads(line))
            except KeyboardInterrupt:
                sys.settrace(None)
                os._exit(2)
            except ShardStoreError:
                os._exit(3)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """A server of S3 on this machine, and a bucket."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    main = str(Path(__file__).with_name("atomic_moto.py"))
    with _reserved_port() as port, _server([sys.executable, main, "-H127.0.0.1", f"-p{port}"]):
        endpoint = f"http://127.0.0.1:{port}"
        _put(f"{endpoint}/bucket", dict)
        yield {"kind": "s3", "bucket": "bucket", "endpoint": endpoint}


@contextmanager
def azure_server() -> Iterator[dict[str, Any]]:
    """A server of Azure's blobs on this machine, and a container."""
    pytest.importorskip("obstore")
    main = os.environ.get("ZARR_SHARDSTORE_AZURITE", "")
    if not os.path.exists(main):
        pytest.skip("ZARR_SHARDSTORE_AZURITE does not name the main.js of Azurite's blob service")
    where = {"kind": "azure", "container": "chunks", "account": "shards"}
    where["key"] = base64.b64encode(b"not secret").decode()
    options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    accounts = f"{where['account']}:{where['key']}"
    with (
        _reserved_port() as port,
        _server(
            ["node", main, "--blobHost=127.0.0.1", f"--blobPort={port}", *options],
            AZURITE_ACCOUNTS=accounts,
        ),
    ):
        where["endpoint"] = f"http://127.0.0.1:{port}/{where['account']}"
        _put(f"{where['endpoint']}/{where['container']}?restype=container", lambda: _signed(where))
        yield where


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port for a server that takes seconds to start.

    A socket keeps the port, so the system gives it to no other program. A server may listen there,
    because both sockets have SO_REUSEADDR and this one does not listen.
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


@contextmanager
def _server(command: list[str], **env: str) -> Iterator[None]:
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **env},
    ) as process:
        try:
            yield
        finally:
            process.kill()


def _put(url: str, make_headers: Callable[[], dict[str, str]]) -> None:
    """Make a bucket, as soon as the server is there."""
    limit = time.monotonic() + 300
    while True:
        try:
            request = urllib.request.Request(url, method="PUT", headers=make_headers())
            with urllib.request.urlopen(request, timeout=10):
                return
        except urllib.error.HTTPError:
            raise
        except OSError:  # not yet
            assert time.monotonic() < limit
            time.sleep(0.1)


def _signed(where: dict[str, str]) -> dict[str, str]:
    """Headers of the request for a container: obstore makes none.

    Source: Azure, "Authorize with Shared Key".
    """
    date = email.utils.formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    # The account twice: Azurite has it in the path, too.
    resource = f"/{where['account']}/{where['account']}/{where['container']}"
    text = "\n".join(["PUT", *[""] * 11, *lines, resource, "restype:container"])
    digest = hmac.new(base64.b64decode(where["key"]), text.encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    return headers | {"Authorization": f"SharedKey {where['account']}:{signature}"}
