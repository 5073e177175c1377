"""Servers of local files for benchmarks of reads: nginx, or the server of the tests.

``ZARR_SHARDSTORE_NGINX`` names nginx, if it is not in ``PATH``. Without it
``tests/support/counting_server.py`` serves the same files, far slower.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from obstore.store import S3Store
from zarr.storage import ObjectStore

BUCKET = "bucket"
_COUNTING_SERVER = Path(__file__).parents[1] / "tests" / "support" / "counting_server.py"
_MAX_START_S = 30
_numbers = count()

# Temporary files are made in its directory, not where the package was meant to be installed.
_CONFIG = """
daemon off;
master_process off;
pid {work}/nginx.pid;
error_log {work}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush off;
    keepalive_timeout 1h;
    keepalive_requests 10000000;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location /{bucket}/ {{ alias {directory}/; }}
    }}
}}
"""


class Server(NamedTuple):
    """A running server; files are at ``/bucket/KEY``."""

    name: str
    port: int


@contextmanager
def file_server(directory: Path) -> Iterator[Server]:
    """Serve the files below a directory by HTTP until the end of the block."""
    nginx = os.environ.get("ZARR_SHARDSTORE_NGINX") or shutil.which("nginx")
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="zarr-shardstore-nginx-") as work:
        if nginx:
            config = Path(work) / "nginx.conf"
            places = {"work": work, "port": port, "bucket": BUCKET, "directory": directory}
            config.write_text(_CONFIG.format(**places))
            log = f"{work}/error.log"
            command = [nginx, "-p", work, "-e", log, "-c", str(config)]
        else:
            command = [sys.executable, str(_COUNTING_SERVER), str(directory), str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:
                _wait_for(port, process)
                yield Server("nginx" if nginx else "the tests' server (no nginx here)", port)
            finally:
                process.terminate()


def objects_of(port: int) -> ObjectStore[Any]:
    """Open the served files as a store of zarr, on connections of its own.

    The store has a name of its own: stores that were made alike may share cached indexes.
    """
    s3: Any = S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{port}",
        skip_signature=True,
        client_options={"allow_http": True, "user_agent": f"client {next(_numbers)}"},
        virtual_hosted_style_request=False,
    )
    return ObjectStore(s3, read_only=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + _MAX_START_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{process.args!r} does not serve") from None
            time.sleep(0.05)
