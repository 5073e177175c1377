"""Pages of base keys: what is asked for, and that each key comes once."""

from __future__ import annotations

import pytest

from tests.unit.flows import Recorder
from zarr_shardstore.shards import shard_listing
from zarr_shardstore.shards.requests import ListPage
from zarr_shardstore.shards.shard_listing import KeyPages


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_listing, "KEYS_PER_PAGE", 2)


def all_pages(pages: KeyPages, recorder: Recorder) -> list[list[str]]:
    listed: list[list[str]] = []
    while pages.has_more:
        listed.append(recorder.run(pages.next_page()))
    return listed


def test_one_page_a_request() -> None:
    """Directories one after the other; a page that is not full is the last of its directory."""
    recorder = Recorder(dict.fromkeys(["a/1", "a/2", "a/3", "b/1", "b/2", "c/1"], b""))
    pages = all_pages(KeyPages(["a/", "b/"]), recorder)
    assert pages == [["a/1", "a/2"], ["a/3"], ["b/1", "b/2"], []]
    requests = [request for batch in recorder.batches for request in batch]
    asked = [(r.cursor.prefix, r.n_keys) for r in requests if isinstance(r, ListPage)]
    assert asked == [("a/", 2), ("a/", 2), ("b/", 2), ("b/", 2)]


def test_closing_names_what_is_open() -> None:
    """And asks for nothing if all was listed."""
    recorder = Recorder(dict.fromkeys(["a/1", "a/2", "a/3"], b""))
    pages = KeyPages(["a/"])
    recorder.run(pages.next_page())
    recorder.run(pages.close())
    (last,) = recorder.batches[-1]
    assert isinstance(last, ListPage)
    assert (last.cursor.prefix, last.n_keys) == ("a/", 0)
    pages = KeyPages(["b/"])
    recorder.run(pages.next_page())
    n_batches = len(recorder.batches)
    recorder.run(pages.close())
    assert len(recorder.batches) == n_batches
