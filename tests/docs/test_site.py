"""Each page of the built site in Chromium, at the width of a desk and of a phone.

Links and anchors are checked while the site is built, which is strict.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser, Tab, browser, folder_over_http

ROOT = Path(__file__).parents[2]
WIDTHS = {"a desk": 1280, "a phone": 390}
DOMAINS = ("Log", "Network", "Runtime")
pytestmark = pytest.mark.thorough  # some 200 pages are drawn

TOO_WIDE = """
for (let i = 0; i < 40; i++) {
    const { scrollWidth, clientWidth } = document.documentElement;
    if (Math.max(scrollWidth, document.body.scrollWidth) <= clientWidth && innerWidth <= %d)
        return false;
    await new Promise((resolve) => setTimeout(resolve, 50));
}
return true;
"""
"""A drawer that moves takes a moment."""
SEARCH = """
document.querySelector("[data-md-toggle=search]").click();
const input = document.querySelector("[data-md-component=search-query]");
input.focus();
input.value = "%s";
for (;;) {
    input.dispatchEvent(new Event("keyup", { bubbles: true }));
    const found = [...document.querySelectorAll(".md-search-result__link")];
    if (found.length) return found.map((each) => each.href);
    await new Promise((resolve) => setTimeout(resolve, 50));
}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once."""
    for name in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def chromium(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


async def test_every_page_fits_and_asks_no_other_host(chromium: Browser, site: Path) -> None:
    """Nor does it fail to load anything, or report an error."""
    pages = [str(page.relative_to(site)) for page in sorted(site.rglob("*.html"))]
    faults = []
    with folder_over_http(site) as url:
        async with chromium.tab() as tab:
            for domain in DOMAINS:
                await tab.call(f"{domain}.enable")
            for page in pages:
                tab.events.clear()
                await tab.open(f"{url}/{page}")
                for name, width in WIDTHS.items():
                    await tab.resize(width=width, height=844, mobile=width < 500)
                    if await tab.evaluate(TOO_WIDE % width):
                        faults.append(f"{page} is too wide for {name}")
                faults += [f"{page}: {fault}" for fault in reported(tab, url)]
    assert len(pages) > 80
    assert not faults


def reported(tab: Tab, url: str) -> Iterator[str]:
    """Find requests to another host than that of `url`, and errors."""
    for event in tab.events:
        details: Any = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                asked = details["request"]["url"]
                if not asked.startswith((f"{url}/", "data:")):
                    yield f"asks {asked}"
            case "Log.entryAdded" if details["entry"]["level"] == "error":
                yield f"{details['entry']['text']} {details['entry'].get('url')}"
            case "Runtime.exceptionThrown":
                yield str(details["exceptionDetails"])
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "assert"):
                yield str(details["args"])


FOUND = {
    "camera": "tutorials/stream.html",
    "lost updates": "reference/errors.html",
    "too many files": "how-to/hpc.html",
    "inodes": "how-to/hpc.html",
}
"""Words of users, and a page that search has among the first."""


@pytest.mark.parametrize("words", FOUND)
@pytest.mark.parametrize("opened", ["as a file", "over HTTP"])
async def test_search_finds_a_page(chromium: Browser, site: Path, opened: str, words: str) -> None:
    """Without a network: browsers start no worker for a file, see ``docs/iframe-worker.js``."""
    with folder_over_http(site) as served:
        url = site.as_uri() if opened == "as a file" else served
        async with chromium.tab() as tab, asyncio.timeout(60):
            await tab.open(f"{url}/how-to/serve.html")
            found = await tab.evaluate(SEARCH % words)
    assert any(each.startswith(f"{url}/{FOUND[words]}") for each in found)
