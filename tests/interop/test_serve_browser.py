"""A served store in Chromium: read by zarrita.js in a page of another origin, and its own page.

``ZARR_SHARDSTORE_NODE_MODULES`` names the folder that has zarrita.js; ``make test`` makes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.browser import Browser, browser, folder_over_http
from tests.support.readers import NODE_MODULES
from tests.support.serving import serving
from zarr_shardstore import ShardingStore

DATA = np.arange(1, 6 * 40 * 50 + 1, dtype="u2").reshape(6, 40, 50)
NAME = "<script>document.title='hacked'</script>"

READ = """
const zarr = await import("zarrita");
const store = await zarr.withConsolidatedMetadata(new zarr.FetchStore("{url}"));
const root = await zarr.open(store, {{ kind: "group" }});
const array = await zarr.open(root.resolve("g/raw"), {{ kind: "array" }});
const {{ data, shape }} = await zarr.get(array, [zarr.slice(1, 5), null, zarr.slice(30, 50)]);
const missing = await zarr.get(await zarr.open(root.resolve("g/empty"), {{ kind: "array" }}));
const {{ chunks, attrs }} = array;
const reply = await fetch("{url}{chunk}", {{ headers: {{ Range: "bytes=-4" }} }});
const range = reply.headers.get("Content-Range");
return {{ chunks, attrs, shape, data: [...data], missing: [...new Set(missing.data)], range }};
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = ShardingStore(tmp_path / "v.zarr", chunks_per_shard=2)
    group = zarr.create_group(store).create_group("g")
    options: dict[str, Any] = {"chunks": (2, 16, 16), "dtype": "u2", "shape": DATA.shape}
    group.create_array("raw", dimension_names=["z", "y", "x"], **options)[:] = DATA
    group.create_array("empty", fill_value=3, **options)
    zarr.create_array(store, name=NAME, shape=(4,), chunks=(2,), dtype="f4")[:] = 1
    return tmp_path / "v.zarr"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """An origin of its own, with zarrita.js."""
    if NODE_MODULES is None or not Path(NODE_MODULES, "zarrita").is_dir():
        pytest.skip("ZARR_SHARDSTORE_NODE_MODULES has no zarrita")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/modules").symlink_to(NODE_MODULES)

    imports = json.dumps({"imports": import_map()})
    page = f'<!DOCTYPE html><script type="importmap">{imports}</script>'
    (tmp_path / "site/index.html").write_text(page)
    with folder_over_http(tmp_path / "site") as url:
        yield url


def import_map() -> dict[str, str]:
    """Return the addresses of the modules that zarrita.js imports, by name."""
    found = {}
    for name in ("zarrita", "@zarrita/storage", "numcodecs"):
        package = json.loads(Path(str(NODE_MODULES), name, "package.json").read_text())
        for entry, targets in package["exports"].items():
            found[name + entry[1:]] = f"/modules/{name}/{targets['import'][2:]}"
    return found


@pytest.mark.parametrize("shown_as", ["v2", "v3"])
def test_zarrita_reads_shards_as_plain_chunks(
    chromium: Browser, directory: Path, site: str, shown_as: str
) -> None:
    """Ranges, too; the page that reads is of another origin."""
    chunk = "/g/raw/1/0/2" if shown_as == "v2" else "/g/raw/c/1/0/2"
    with serving(directory, "--as", shown_as) as server:
        script = READ.format(url=server.url, chunk=chunk)
        (read,) = chromium.evaluate(f"{site}/index.html", script)
        nbytes = len(server.ask(chunk).body)
    assert (read["chunks"], read["shape"]) == ([2, 16, 16], [4, 40, 20])
    assert read["data"] == DATA[1:5, :, 30:].ravel().tolist()
    assert read["missing"] == [3]
    assert read["range"] == f"bytes {nbytes - 4}-{nbytes - 1}/{nbytes}"
    assert read["attrs"] == ({"_ARRAY_DIMENSIONS": ["z", "y", "x"]} if shown_as == "v2" else {})


def test_the_page_draws_slices(chromium: Browser, directory: Path) -> None:
    """On a phone, with a name of an array that is markup, and by its controls."""
    drawn = """
        const status = document.querySelector("[role=status]");
        const canvas = document.querySelector("canvas");
        while (!status.textContent || status.textContent === window.before)
            await new Promise((resolve) => setTimeout(resolve, 20));
        window.before = status.textContent;
        const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        return [height, width, status.textContent, [...data].filter((_, i) => i % 4 === 0)];
    """
    buttons = "const buttons = [...document.querySelectorAll('button')];"
    with serving(directory) as server:
        shown, raw, moved, other, wide = chromium.evaluate(
            server.url,
            buttons + "return [document.title, ...buttons.map((each) => each.textContent)];",
            buttons + "buttons.find((each) => each.textContent === 'g/raw').click();" + drawn,
            "const input = document.querySelectorAll('[type=range]')[0]; input.value = 4;"
            "input.dispatchEvent(new Event('input'));" + drawn,
            "document.querySelectorAll('[type=checkbox]')[0].click();" + drawn,
            "return document.documentElement.scrollWidth - window.innerWidth;",
        )
    assert shown == ["v.zarr", NAME, "g/empty", "g/raw"]
    for (height, width, text, pixels), plane in (
        (raw, DATA[0]),
        (moved, DATA[4]),
        (other, DATA[4:, 0, :]),
    ):
        assert (height, width) == plane.shape
        scaled = (plane - float(plane.min())) * 255 / float(plane.max() - plane.min())
        np.testing.assert_allclose(pixels, scaled.ravel(), atol=1)
        assert f"{plane.min()} (black) to {plane.max()} (white)" in text
    assert wide <= 0, "the page is wider than a phone"
