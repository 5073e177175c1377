"""Pages of base keys: what is asked for, and that each key comes once."""

from __future__ import annotations

import pytest

from tests.support.flows import Recorder
from tests.unit.test_pending import KEY, hold, shard_of, table
from zarr_shardstore.shards import shard_listing
from zarr_shardstore.shards.requests import CloseListing, ListPage
from zarr_shardstore.shards.shard_listing import KeyPages, list_keys
from zarr_shardstore.shards.updates import DeleteEntry, SetEntry

HELD = "a/c1/0"


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
    pages = all_pages(KeyPages(["a/", "b/"], table()), recorder)
    assert pages == [["a/1", "a/2"], ["a/3"], ["b/1", "b/2"], []]
    requests = [request for batch in recorder.batches for request in batch]
    asked = [(r.cursor.prefix, r.n_keys) for r in requests if isinstance(r, ListPage)]
    assert asked == [("a/", 2), ("a/", 2), ("b/", 2), ("b/", 2)]


def test_shards_that_are_only_held_come_last_and_once() -> None:
    """Those that are stored, too, come where they are stored; erasures alone make no shard."""
    pending = table()
    recorder = hold(pending, SetEntry(0, b"x"))
    hold(pending, SetEntry(0, b"y"), recorder=recorder, shard=shard_of((1, 0)))
    hold(pending, DeleteEntry(0), recorder=recorder, shard=shard_of((0, 1)))
    assert recorder.run(list_keys(["a/"], pending)) == [KEY, HELD]
    assert recorder.run(list_keys(["b/"], pending)) == []


@pytest.mark.parametrize("n_before", [0, 1, 2])
def test_a_shard_that_is_published_meanwhile_comes_once(n_before: int) -> None:
    """Before the listing comes by, or after it."""
    pending = table()
    recorder = hold(pending, SetEntry(0, b"y"), shard=shard_of((1, 0)))
    recorder.objects |= dict.fromkeys(["a/d", "a/e"], b"")
    pages = KeyPages(["a/"], pending)
    listed: list[str] = []
    for _ in range(n_before):
        listed += recorder.run(pages.next_page())
    pending.clear()
    recorder.objects[HELD] = b"published"
    for page in all_pages(pages, recorder):
        listed += page
    assert sorted(listed) == [KEY, HELD, "a/d", "a/e"]


def test_closing_names_what_is_open() -> None:
    """And asks for nothing if all was listed."""
    recorder = Recorder(dict.fromkeys(["a/1", "a/2", "a/3"], b""))
    pages = KeyPages(["a/"], table())
    recorder.run(pages.next_page())
    recorder.run(pages.close())
    (last,) = recorder.batches[-1]
    assert isinstance(last, CloseListing)
    pages = KeyPages(["b/"], table())
    recorder.run(pages.next_page())
    n_batches = len(recorder.batches)
    recorder.run(pages.close())
    assert len(recorder.batches) == n_batches
