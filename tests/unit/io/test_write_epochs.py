"""Versions of objects: equal if and only if no write came between."""

from __future__ import annotations

import asyncio
import threading

import pytest

from zarr_shardstore.io import write_epochs
from zarr_shardstore.io.write_epochs import announced, version_of


def test_two_looks_without_a_write_are_equal() -> None:
    """Also of an object that this process never wrote."""
    assert version_of("never") == version_of("never")
    with announced(["once"]):
        pass
    assert version_of("once") == version_of("once")


def test_a_write_changes_the_version() -> None:
    """Of that object, and of no other."""
    before = version_of("a"), version_of("b")
    with announced(["a"]):
        pass
    assert version_of("a") != before[0]
    assert version_of("b") == before[1]


def test_while_it_is_written_an_object_has_no_version() -> None:
    """Not even one that equals itself; and so until the last of several writers is done."""
    with announced(["a"]):
        with announced(["a"]):
            pass
        assert version_of("a") != version_of("a")
    assert version_of("a") == version_of("a")


def test_objects_that_share_a_bucket_cost_a_look_not_a_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is fixed: with one bucket each write changes the version of all objects."""
    monkeypatch.setattr(write_epochs, "_N_BUCKETS", 1)
    before = version_of("a")
    with announced(["b"]):
        assert version_of("a") != before
    assert version_of("a") != before


def test_a_write_whose_event_loop_was_closed_has_ended() -> None:
    """It cannot say so itself: its task never runs again. No reader waits for it."""
    loop = asyncio.new_event_loop()
    before = version_of("left")
    write = announced(["left"], loop)
    write.__enter__()
    assert version_of("left") != version_of("left")
    loop.close()
    after = version_of("left")
    assert after == version_of("left") != before
    write.__exit__(None, None, None)  # when its coroutine is collected
    assert version_of("left") == after


def test_many_writers() -> None:
    """The table is consistent afterwards."""

    def write() -> None:
        for i in range(300):
            with announced([i % 7, "x"]):
                pass

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not write_epochs._under_way
