"""Frames that wait for a flush."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zarr

from tests.support.bases import OtherMapping
from zarr_shardstore import ShardingStore, SpecError
from zarr_shardstore.store.growing.frame_writer import FrameBuffer, FrameWriter
from zarr_shardstore.store.growing.growing_array import GrowingArray


def test_an_interrupt_after_a_block_is_appended() -> None:
    """The next block gets the next numbers: they follow from the blocks, and from nothing else."""
    buffer, frames = FrameBuffer(5), np.zeros((3, 2), "u1")
    buffer._blocks.append((buffer.end, frames))  # all that `add` does
    buffer.add(frames + 1)
    assert [first for first, _ in buffer._blocks] == [5, 8]
    assert buffer.end == 11
    assert np.concatenate(buffer.frames_up_to(11))[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    buffer.drop_up_to(11)
    assert (buffer.end, buffer.n_durable, buffer.nbytes) == (11, 11, 0)


def test_an_error_anywhere_in_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for a thread that has ended. The frames are stored at the next attempt."""
    real, n_left = FrameBuffer.frames_up_to, 1

    def frames_up_to(self: FrameBuffer, stop: int) -> Any:
        nonlocal n_left
        n_left -= 1
        if n_left == 0:
            raise MemoryError
        return real(self, stop)

    monkeypatch.setattr(FrameBuffer, "frames_up_to", frames_up_to)
    store = ShardingStore({}, (2, 1))
    with store.append_frames("a", chunks=(1, 1), flush_s=60) as frames:
        frames.append(np.ones(1, "u1"))
        errors: list[MemoryError] = []

        def flush() -> None:
            try:
                frames.flush()
            except MemoryError as error:
                errors.append(error)

        thread = threading.Thread(target=flush, daemon=True)
        thread.start()
        thread.join(60)
        assert errors
        frames.append(np.ones(1, "u1"))
        frames.flush()
        assert frames.n_durable == 2


class Flaky(OtherMapping):
    """A base store that stores a document and loses the reply, or refuses it."""

    is_stored = is_refused = False

    def __setitem__(self, key: str, value: bytes) -> None:
        if self.is_refused and key.endswith("zarr.json"):
            raise OSError("refused")
        super().__setitem__(key, value)
        if self.is_stored and key.endswith("zarr.json"):
            raise OSError("the reply is lost")


def test_the_end_may_be_that_of_any_failed_attempt() -> None:
    """The writer knows its own array after two attempts, of which only the first was stored."""
    base, frames = Flaky(), np.arange(9, dtype="u2").reshape(9, 1)
    store = ShardingStore(base, (2, 1))
    array = GrowingArray(store, "a", {"chunks": (1, 1)})
    array.check_or_create(frames)
    array.append(frames[:3], 0)
    base.is_stored = True
    with pytest.raises(OSError, match="lost"):
        array.append(frames[3:5], 3)
    base.is_stored, base.is_refused = False, True
    with pytest.raises(OSError, match="refused"):
        array.append(frames[3:7], 3)
    base.is_refused = False
    array.append(frames[3:8], 3)
    array.close(8)
    z: Any = zarr.open_array(store, path="a", mode="r")
    np.testing.assert_array_equal(z[...], frames[:8])


class Full(OtherMapping):
    """A base store without room, as long as it `is_full`; a write waits there for `go_on`."""

    is_full = False

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.begun, self.n_refused = threading.Event(), threading.Event(), 0

    def __setitem__(self, key: str, value: bytes) -> None:
        if self.is_full:
            self.begun.set()
            assert self.go_on.wait(60)
            self.n_refused += 1
            raise OSError("no room")
        super().__setitem__(key, value)


def full_writer() -> tuple[Full, FrameWriter]:
    """A writer with one durable frame and seven others, whose flush has begun."""
    base = Full()
    frames = ShardingStore(base, (4, 1)).append_frames("a", flush_nbytes=8, flush_s=1e9)
    frames.append(np.ones(1, "u2"))
    frames.flush()
    base.is_full = True
    frames.extend(np.ones((8, 1), "u2"))
    assert base.begun.wait(60)
    return base, frames


def test_a_close_beside_a_thread_that_waits_for_room_raises() -> None:
    """Both are told that the last flush failed, and the flush is tried once more before."""
    base, frames = full_writer()
    found: list[str] = []

    def append() -> None:
        with pytest.raises(SpecError, match="is closed") as raised:
            frames.append(np.ones(1, "u2"))
        found.append(str(raised.value))

    waiting = threading.Thread(target=append, daemon=True)
    waiting.start()
    threading.Timer(0.1, base.go_on.set).start()
    with pytest.raises(OSError, match="no room") as raised:
        frames.close()
    assert raised.value.__notes__ == ["8 frames after the first 1 are lost"]
    assert base.n_refused == 2
    waiting.join(60)
    assert len(found) == 1


def test_a_close_after_an_interrupted_close_raises() -> None:
    base, frames = full_writer()
    with (
        mock.patch.object(threading.Thread, "join", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        frames.close()
    base.go_on.set()
    assert frames._thread is not None
    frames._thread.join(60)
    with pytest.raises(OSError, match="no room"):
        frames.close()
