"""A browser without a window, which opens pages and evaluates scripts in them.

Source: Chrome DevTools Protocol, "Page", "Runtime" and "Emulation".
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

MAX_SECONDS = 120
"""For its start, and for a script: a machine may be busy."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}


@dataclass
class Browser:
    """A running browser."""

    port: int

    def evaluate(self, url: str, *scripts: str) -> list[Any]:
        """Open a page on a phone; return what the promises of scripts give, one after another."""
        return asyncio.run(asyncio.wait_for(self._evaluate(url, scripts), MAX_SECONDS))

    async def _evaluate(self, url: str, scripts: tuple[str, ...]) -> list[Any]:
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{self.port}/json/new") as reply:
                address = (await reply.json(content_type=None))["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as page:

                async def call(method: str, parameters: Any, end: Any = 1) -> Any:
                    await page.send_json({"id": 1, "method": method, "params": parameters})
                    while True:
                        message = json.loads((await page.receive()).data)
                        if message.get("method", message.get("id")) == end:
                            return message.get("result")

                await call("Page.enable", {})
                await call("Emulation.setDeviceMetricsOverride", PHONE)
                await call("Page.navigate", {"url": url}, "Page.loadEventFired")
                results = []
                for script in scripts:
                    asked: dict[str, Any] = {"expression": f"(async () => {{ {script} }})()"}
                    asked |= {"awaitPromise": True, "returnByValue": True}
                    done = await call("Runtime.evaluate", asked)
                    assert "exceptionDetails" not in done, done["exceptionDetails"]
                    results.append(done["result"].get("value"))
                return results


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
