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
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.tools.inspect.shard_map import (
    ShardMap,
    cut_into_panels,
    render_figure,
    render_html,
    render_text,
    shard_map,
)

LEGEND = re.compile(" full |One sign")


def made(fill: Any, *, cps: int = 2, path: str = "a", **options: Any) -> ShardMap:
    """A map with shards of `cps` chunks along each dimension, all of them in the array."""
    array = np.asarray(fill, dtype=np.float32)
    grid_shape = tuple(n * cps for n in array.shape)
    return ShardMap(path, cps > 1, array, grid_shape, (cps,) * array.ndim, **options)


def body(text: str) -> list[str]:
    """The lines of a picture without headline and legend."""
    return [line for line in text.splitlines()[2:] if line and not LEGEND.search(line)]


def make(base: Any, shape: Coords, cps: Any, **options: Any) -> zarr.Array[Any]:
    store = ShardingStore(base, chunks_per_shard=cps)
    return zarr.create_array(
        store, **{"shape": shape, "chunks": (1,) * len(shape), "dtype": "u1", **options}
    )


class Page(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


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
    assert not shards.fill.flags.writeable
    ((panel,), _) = cut_into_panels(shards, 2, 2, lambda *_: 1)
    assert panel.possible.tolist() == [[6, 4], [3, 2]]
    assert panel.stored.tolist() == [[1, 4], [0, 2]]


def test_a_map_of_an_array_without_shards_is_one_of_its_chunks() -> None:
    """Here of v2."""
    base: dict[str, bytes] = {}
    make(base, (3,), None, zarr_format=2)[1] = 1
    shards = shard_map(base)
    assert (shards.is_sharded, shards.fill.tolist()) == (False, [0, 1, 0])
    assert "3 chunks" in render_text(shards)


def test_a_shard_that_cannot_be_read_is_neither_full_nor_missing() -> None:
    """Its error is kept."""
    base: dict[str, bytes] = {}
    make(base, (4,), 2)[:] = 1
    base["c/0"] = bytes(200)
    shards = shard_map(base)
    assert np.isnan(shards.fill[0])
    assert shards.counts()["unreadable"] == 1
    assert "c/0" in shards.errors[0]
    assert body(render_text(shards)) == ["!■"]


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
    assert body(render_text(shards)) == (["■"] if shape == () else [])
    assert "<svg" in render_html(shards)


def test_text_has_one_sign_for_each_shard() -> None:
    """Rows and columns as the dimensions are; full, missing, three thirds, and unreadable."""
    shards = made([[0, 0.01, 0.4], [0.75, 1, np.nan]], cps=100)
    text = render_text(shards)
    assert body(text) == ["·░▒", "▓■!"]
    assert text.splitlines()[0] == "/a: 2 × 3 shards, 100 × 100 chunks each"
    assert text.splitlines()[-1] == ("■ full 1   ░▒▓ partial 3   · missing 1   ! unreadable 1")
    assert body(render_text(shards, is_ascii=True)) == [".-+", "*#!"]
    assert body(render_text(made([0, 1, 1]))) == ["·■■"]


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
    assert wide[1].split() == ["····", "■■■■", "····"]
    narrow = body(render_text(shards, width=14))
    assert narrow == [
        *("[0, :, :]", "····", "····"),
        *("[1, :, :]", "■■■■", "■■■■"),
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
    panels, factors = cut_into_panels(shards, height, width, lambda rows, _: height // rows)
    ((rows, columns),) = {panel.stored.shape for panel in panels}
    assert len(panels) * rows <= height
    assert columns <= width
    sizes = [-(-n // factor) for n, factor in zip(shape, factors, strict=True)]
    assert len(panels) * rows * columns == np.prod(sizes)
    assert sum(p.possible.sum() for p in panels) == np.prod(shards.grid_shape)
    assert sum(p.stored.sum() for p in panels) == n_stored.sum()


def test_a_page_says_how_many_shards_are_full_and_loads_nothing() -> None:
    """Its text is text; links lead nowhere outside the page."""
    page = Page(render_html(made([[0, 1], [0.5, np.nan]], errors=("shard 'a/c/1/1': bad",))))
    for text in ("full 1", "partial 1", "missing 1", "unreadable 1", "shard 'a/c/1/1': bad"):
        assert text in page.text
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for name, value in page.attributes:
        if name.endswith(("src", "href")):
            assert value is not None
            assert value.startswith(("#", "data:"))
    assert "url(" not in render_html(made([0])).replace("url(#", "")


def test_names_cannot_break_out_of_pictures() -> None:
    """Paths and errors are text, whatever signs they have."""
    path = "<script>alert(1)</script>&\"'\x1b[2J$x_{$"
    shards = made([0, 1], path=path, errors=("<b>bad</b>",))
    text = render_html(shards)
    page = Page(text)
    assert not {"script", "b"} & set(page.tags)
    assert "alert(1)</script>" not in text
    assert "/<script>alert(1)</script>&\"'" in page.text
    assert "$x_{$" in page.text
    assert "\x1b" not in render_text(shards)


def test_a_png_is_drawn_of_maps_of_any_dimension() -> None:
    """With a size; what it shows was looked at."""
    for shape in ((3,), (2, 3, 2, 2), (100, 2, 2)):
        png = render_figure(made(np.ones(shape)), "png")
        assert png.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", png[16:24])
        assert 400 < width < 4000
        assert 300 < height < 4000


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, instead of an ImportError."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SpecError, match=r"pip install 'zarr-shardstore\[examples\]'"):
        render_figure(made([1]), "png")


def test_borders_lie_between_shards() -> None:
    """So that full shards are not one area; none between chunks, nor where there are too many."""
    drawn = {
        name: "LineCollection" in render_figure(shards, "svg").decode()
        for name, shards in {
            "shards": made([[1, 1], [1, 1]]),
            "chunks": made([[1, 1], [1, 1]], cps=1),
            "many": made(np.ones((1, 200))),
        }.items()
    }
    assert drawn == {"shards": True, "chunks": False, "many": False}
    assert body(render_text(made([[1, 1]], cps=1))) == ["██"]
