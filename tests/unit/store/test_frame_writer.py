"""Frames that wait for a flush."""

from __future__ import annotations

import numpy as np

from zarr_shardstore.store.growing.frame_writer import FrameBuffer


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
