"""Processes that convert, and the S3 server that some of them work on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import zarr_shardstore
from tests.faults import convert_once

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
def s3_server() -> Iterator[dict[str, Any]]:
    """A server of S3 on this machine, and a bucket."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [sys.executable, "-c", "from moto.server import main; main()", "-H127.0.0.1", f"-p{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _create_bucket(f"{endpoint}/bucket")
            yield {"kind": "s3", "bucket": "bucket", "endpoint": endpoint}
        finally:
            process.kill()


def _create_bucket(url: str) -> None:
    limit = time.monotonic() + 60
    while True:
        try:
            request = urllib.request.Request(url, method="PUT")
            with urllib.request.urlopen(request, timeout=10):
                return
        except urllib.error.HTTPError:
            raise
        except OSError:  # not yet
            assert time.monotonic() < limit
            time.sleep(0.1)
