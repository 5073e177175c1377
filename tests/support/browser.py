"""A browser without a window, which opens pages and evaluates scripts in them.

Source: Chrome DevTools Protocol, "Page", "Runtime", "Network", "Log" and "Emulation".
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest

MAX_SECONDS = 120
"""For its start, and for a script: a machine may be busy."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}


@dataclass
class Tab:
    """One page of a browser."""

    connection: aiohttp.ClientWebSocketResponse
    events: list[dict[str, Any]] = field(default_factory=list)
    """What the browser reported, in order: ``{"method": …, "params": …}``."""
    _n_calls: int = 0

    async def call(self, method: str, parameters: Any = None, event: str | None = None) -> Any:
        """Call a method; return its result, after an event if one is named."""
        self._n_calls += 1
        call = {"id": self._n_calls, "method": method, "params": parameters or {}}
        await self.connection.send_json(call)
        result, awaited = None, {self._n_calls, event} - {None}
        while awaited:
            message = json.loads((await self.connection.receive()).data)
            awaited.discard(message.get("method", message.get("id")))
            if "method" in message:
                self.events.append(message)
            elif message["id"] == self._n_calls:
                result = message.get("result")
        return result

    async def resize(self, **metrics: Any) -> None:
        """Be a screen of a width and a height."""
        metrics = {"deviceScaleFactor": 1, "mobile": False} | metrics
        await self.call("Emulation.setDeviceMetricsOverride", metrics)

    async def open(self, url: str) -> None:
        """Open a page, and wait until all of it is loaded."""
        await self.call("Page.navigate", {"url": url}, "Page.loadEventFired")

    async def evaluate(self, script: str) -> Any:
        """Return what the promise of a script gives."""
        asked: dict[str, Any] = {"expression": f"(async () => {{ {script} }})()"}
        asked |= {"awaitPromise": True, "returnByValue": True}
        done = await self.call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")


@dataclass
class Browser:
    """A running browser."""

    port: int

    def evaluate(self, url: str, *scripts: str) -> list[Any]:
        """Open a page on a phone; return what the promises of scripts give, one after another."""

        async def evaluate() -> list[Any]:
            async with self.tab() as tab:
                await tab.resize(**PHONE)
                await tab.open(url)
                return [await tab.evaluate(script) for script in scripts]

        return asyncio.run(asyncio.wait_for(evaluate(), MAX_SECONDS))

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """Open an empty page."""
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{self.port}/json/new") as reply:
                address = (await reply.json(content_type=None))["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as connection:
                tab = Tab(connection)
                await tab.call("Page.enable")
                yield tab


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def folder_over_http(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; give the URL, without a slash behind it."""
    handler = partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile in a folder; skip where there is none in ``PATH``."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no chromium, and no google-chrome, in PATH")
    settings = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    settings += ["--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    command = [program, *settings, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield Browser(_port_of(folder / "DevToolsActivePort", process))
        finally:
            process.kill()


def _port_of(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + MAX_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    pytest.fail(f"{process.args!r} does not start")
