"""Maps of shards, and the pictures of them."""

from __future__ import annotations

import re
import struct
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore import ShardingStore, SpecError, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.inspect.pictures import render_html, render_png, render_text
from zarr_shardstore.inspect.shard_map import ShardMap, cut_into_panels, shard_map

LEGEND = re.compile(" full |One sign")

SLASH = ChunkKeyEncoding("default", "/")


def made(fill: Any, *, cps: int = 2, path: str = "a", **options: Any) -> ShardMap:
    """A map with shards of `cps` chunks along each dimension, all of them in the array."""
    array = np.asarray(fill, dtype=np.float32)
    grid_shape = tuple(n * cps for n in array.shape)
    return ShardMap(
        path, cps > 1, array, grid_shape, (cps,) * array.ndim, f"{path}/", SLASH, **options
    )


def body(text: str) -> list[str]:
    """The lines of a picture without headline and legend."""
    return [line for line in text.splitlines()[2:] if line and not LEGEND.search(line)]


def make(base: Any, shape: Coords, cps: Any, **options: Any) -> zarr.Array[Any]:
    store = ShardingStore(base, chunks_per_shard=cps)
    return zarr.create_array(
        store, **{"shape": shape, "chunks": (1,) * len(shape), "dtype": "u1", **options}
    )


class Page(HTMLParser):
    """The tags, attributes and tooltips of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.titles: list[str] = []
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._in_title = tag == "title"
        if self._in_title:
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.titles[-1] += data


def test_a_map_says_how_full_each_shard_is_of_the_chunks_it_can_hold() -> None:
    """A shard at the edge is full with fewer chunks."""
    base: dict[str, bytes] = {}
    z = make(base, (3, 5), (2, 3))
    z[:, 3:] = 1
    z[0, 0] = 1
    shards = shard_map(base)
    assert shards.fill.dtype == np.float32
    np.testing.assert_array_equal(shards.fill, np.array([[1 / 6, 1], [0, 1]], dtype=np.float32))
    assert shards.counts() == {"full": 2, "partial": 1, "missing": 1, "unreadable": 0}
    assert shards.key_of((1, 1)) == "c/1/1"
    assert [shards.n_possible(c) for c in np.ndindex(2, 2)] == [6, 4, 3, 2]
    assert [shards.n_stored(c) for c in np.ndindex(2, 2)] == [1, 4, 0, 2]
    assert not shards.fill.flags.writeable
    tooltips = [title.split(": ")[1] for title in Page(render_html(shards)).titles[1:]]
    assert tooltips == ["1 of 6 chunks", "4 of 4 chunks", "0 of 3 chunks", "2 of 2 chunks"]


def test_a_map_of_an_array_without_shards_is_one_of_its_chunks() -> None:
    """Here of v2."""
    base: dict[str, bytes] = {}
    make(base, (3,), None, zarr_format=2)[1] = 1
    shards = shard_map(base)
    assert (shards.is_sharded, shards.fill.tolist()) == (False, [0, 1, 0])
    assert shards.key_of((1,)) == "1"
    assert "3 chunks" in render_text(shards)


def test_a_shard_that_cannot_be_read_is_neither_full_nor_missing() -> None:
    """Its error is kept."""
    base: dict[str, bytes] = {}
    make(base, (4,), 2)[:] = 1
    base["c/0"] = bytes(200)
    shards = shard_map(base)
    assert np.isnan(shards.fill[0])
    assert shards.counts()["unreadable"] == 1
    assert shards.n_stored((0,)) is None
    assert "c/0" in shards.errors[0]
    assert body(render_text(shards)) == ["!█"]


def test_maps_that_are_not_possible() -> None:
    """No array, a grid that is too large, and one that is not known."""
    base: dict[str, bytes] = {}
    with pytest.raises(SpecError, match="no array at 'x'"):
        shard_map(base, "x")
    make(base, (2**26 + 1,), None)
    with pytest.raises(UnsupportedError, match=r"67108865 chunks .* at most 67108864"):
        shard_map(base)
    make(base, (2**20, 2**20), 2, overwrite=True)
    with pytest.raises(UnsupportedError, match="shards"):
        shard_map(base)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_grids_with_one_shard_or_none(shape: Coords) -> None:
    """Each picture is drawn."""
    base: dict[str, bytes] = {}
    z = make(base, shape, shape or ()) if shape == () else make(base, shape, 2)
    if shape == ():
        z[()] = 1
    shards = shard_map(base)
    assert shards.counts()["full"] == (1 if shape == () else 0)
    assert body(render_text(shards)) == (["█"] if shape == () else [])
    assert render_html(shards).count("<rect") == (1 if shape == () else 0)
    assert render_png(shards).startswith(b"\x89PNG")


def test_text_has_one_sign_for_each_shard() -> None:
    """Rows and columns as the dimensions are; full, missing, three thirds, and unreadable."""
    shards = made([[0, 0.01, 0.4], [0.75, 1, np.nan]], cps=100)
    text = render_text(shards)
    assert body(text) == ["·░▒", "▓█!"]
    assert text.splitlines()[0] == "/a: 2 × 3 shards, 100 × 100 chunks each"
    assert text.splitlines()[-1] == ("█ full 1   ░▒▓ partial 3   · missing 1   ! unreadable 1")
    assert body(render_text(shards, is_ascii=True)) == [".-+", "*#!"]
    assert body(render_text(made([0, 1, 1]))) == ["·██"]


def test_a_sign_for_several_shards_is_full_only_if_all_are() -> None:
    """Sampling down keeps a hole, and a single shard, to be seen."""
    fill = np.ones((4, 40))
    fill[0, 0] = 0
    text = render_text(made(fill), width=20, height=4)
    assert body(text)[0][:2] == "▒█"
    assert text.splitlines()[-1] == "One sign stands for 1 × 2 shards."
    assert body(render_text(made(1 - fill), width=20, height=4))[0][:2] == "▒·"


def test_slices_over_the_leading_dimensions() -> None:
    """Side by side as the width allows, each with its place; then below each other."""
    fill = np.zeros((3, 2, 4))
    fill[1] = 1
    shards = made(fill)
    wide = body(render_text(shards))
    assert wide[0].split("  ") == ["[0, :, :]", "[1, :, :]", "[2, :, :]"]
    assert wide[1].split() == ["····", "████", "····"]
    narrow = body(render_text(shards, width=14))
    assert narrow == [
        *("[0, :, :]", "····", "····"),
        *("[1, :, :]", "████", "████"),
        *("[2, :, :]", "····", "····"),
    ]
    low = body(render_text(shards, width=14, height=8))
    assert low == ["[0:2, :, :]", "▒▒▒▒", "▒▒▒▒", "[2, :, :]", "····", "····"]


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
    width=st.integers(20, 100),
    height=st.integers(4, 40),
    data=st.data(),
)
def test_sampling_down_loses_and_doubles_no_chunk(
    shape: Coords, width: int, height: int, data: st.DataObject
) -> None:
    """Law: the places of all panels together hold and can hold what the shards do."""
    seed = data.draw(st.integers(0, 99))
    each = 3 ** len(shape)
    n_stored = np.random.default_rng(seed).integers(0, each + 1, shape)
    shards = made(n_stored / each, cps=3)
    panels = cut_into_panels(shards, lambda n, r, c: n * r <= height and c <= width)
    assert all(p.stored.shape == (panels.n_rows, panels.n_columns) for p in panels.panels)
    assert len(panels.panels) * panels.n_rows <= height
    assert panels.n_columns <= width
    assert sum(p.possible.sum() for p in panels.panels) == np.prod(shards.grid_shape)
    assert sum(p.stored.sum() for p in panels.panels) == n_stored.sum()
    covered = np.zeros(shape, dtype=int)
    for panel in panels.panels:
        for row, column in np.ndindex(panel.stored.shape):
            box = panels.box(panel, row, column)
            covered[tuple(slice(*part) for part in box)] += 1
            assert all(stop <= n for (_, stop), n in zip(box, shape, strict=True))
    assert (covered == 1).all()


def test_a_page_names_each_shard_and_what_it_holds() -> None:
    """In tooltips; nothing is loaded from elsewhere."""
    page = Page(render_html(made([[0, 1], [0.5, np.nan]])))
    assert page.titles[1:] == [
        "a/c/0/0 (shard [0, 0]): 0 of 4 chunks",
        "a/c/0/1 (shard [0, 1]): 4 of 4 chunks",
        "a/c/1/0 (shard [1, 0]): 2 of 4 chunks",
        "a/c/1/1 (shard [1, 1]): unknown of 4 chunks",
    ]
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert "url(" not in render_html(made([0]))


def test_a_page_of_many_shards_names_ranges_of_them() -> None:
    """At most 20,000 rectangles; the sums are right also at the edge."""
    fill = np.ones((201, 301))
    page = Page(render_html(made(fill)))
    assert page.tags.count("rect") <= 20_000
    numbers = [re.search(r": ([\d,]+) of ([\d,]+) chunks$", title) for title in page.titles[1:]]
    counts = [tuple(int(n.replace(",", "")) for n in m.groups()) for m in numbers if m]
    assert len(counts) == page.tags.count("rect")
    assert sum(stored for stored, _ in counts) == fill.size * 4
    assert page.titles[1].startswith("shards [0:")


def test_names_cannot_break_out_of_pictures() -> None:
    """Paths and errors are text, whatever signs they have."""
    path = "<script>alert(1)</script>&\"'\x1b[2J$x_{$"
    shards = made([0, 1], path=path, errors=("<b>bad</b>",))
    text = render_html(shards)
    page = Page(text)
    assert not {"script", "b"} & set(page.tags)
    assert "alert(1)</script>" not in text
    assert page.titles[1].startswith("<script>alert(1)</script>&\"'")
    assert "\x1b" not in render_text(shards)
    assert render_png(shards).startswith(b"\x89PNG")


def test_a_png_is_drawn_of_maps_of_any_dimension() -> None:
    """With a size; what it shows was looked at."""
    for shape in ((3,), (3, 4), (2, 3, 4), (2, 3, 2, 2), (100, 2, 2)):
        png = render_png(made(np.ones(shape)))
        assert png.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", png[16:24])
        assert 400 < width < 4000
        assert 300 < height < 4000


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, instead of an ImportError."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SpecError, match=r"pip install 'zarr-shardstore\[examples\]'"):
        render_png(made([1]))
