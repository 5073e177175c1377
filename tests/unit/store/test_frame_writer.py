"""Frames that wait for a flush."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.bases import OtherMapping
from zarr_shardstore import ShardingStore
from zarr_shardstore.store.growing.frame_writer import FrameBuffer
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
