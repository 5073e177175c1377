"""Boxes of chunks: what is one, and where its elements are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.codec_pipeline import BatchedCodecPipeline

from zarr_shardstore.format.box_grid import BoxGrid
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, chunk_grid_shape
from zarr_shardstore.format.shard import ZEP2_INDEX, ShardingSpec
from zarr_shardstore.zarr_hooks.box import ArrayBox, blocks_of, cut, n_chunks_of

SHAPE, CHUNKS, CPS = (20, 13, 9), (3, 4, 2), (2, 3, 4)


def layout() -> ArrayLayout:
    grid = chunk_grid_shape(SHAPE, CHUNKS)
    encoding = ChunkKeyEncoding("default", "/")
    return ArrayLayout("a", "a/", encoding, grid, ShardingSpec(CPS, ZEP2_INDEX))


def batch_of(selection: Any, chunks: Any = CHUNKS) -> tuple[list[Any], Any]:
    """The chunks that zarr lists for a selection, and zarr's array."""
    z = zarr.create_array({}, name="a", shape=SHAPE, chunks=chunks, dtype="u2")
    batches: list[list[Any]] = []

    class Pipeline(BatchedCodecPipeline):
        async def read(self, batch_info: Any, *_: Any, **__: Any) -> Any:
            batches.append([*batch_info])
            return [{"status": "present"} for _ in batches[0]]

    codecs: Any = z.async_array.codec_pipeline
    object.__setattr__(z.async_array, "codec_pipeline", Pipeline.from_codecs([*codecs]))
    result = z[selection]
    return (batches[0] if batches else []), result


@st.composite
def selections(draw: st.DrawFn) -> tuple[Any, ...]:
    parts: list[Any] = []
    for n in SHAPE:
        start = draw(st.integers(0, n - 1))
        stop = draw(st.integers(start + 1, n))
        step = draw(st.sampled_from([None, 1, 2]))
        parts.append(draw(st.sampled_from([start, slice(None), slice(start, stop, step)])))
    return tuple(parts)


@given(selections())
def test_boxes_are_what_zarr_lists(selection: tuple[Any, ...]) -> None:
    batch, result = batch_of(selection)
    found = ArrayBox.of_batch(batch, layout())
    steps = [part for part in selection if isinstance(part, slice) and part.step == 2]
    expected = ArrayBox.of_selection(selection, SHAPE, CHUNKS, layout())
    if not steps:
        assert expected is not None
        assert found == expected
        assert expected.shape == np.shape(result)
    elif found is not None:  # a step of one element of a chunk is no step
        assert found.shape == np.shape(result)


LENGTHS = [[5, 1, 9, 5], [13], [2, 7]]


@pytest.mark.skipif("rectilinear_chunks" not in zarr.config.get("array"), reason="zarr 3.1")
@given(selections())
def test_boxes_of_chunks_of_several_lengths(selection: tuple[Any, ...]) -> None:
    with zarr.config.set({"array.rectilinear_chunks": True}):
        batch, result = batch_of(selection, LENGTHS)
    grid = BoxGrid(tuple(map(tuple, LENGTHS)))
    here = replace(layout(), grid_shape=tuple(map(len, LENGTHS)))
    found = ArrayBox.of_batch(batch, here, grid)
    if not any(isinstance(part, slice) and part.step == 2 for part in selection):
        expected = ArrayBox.of_selection(selection, SHAPE, CHUNKS, layout())
        assert found is not None
        assert expected is not None
        assert (found.elements, found.int_axes) == (expected.elements, expected.int_axes)
    elif found is not None:
        assert found.shape == np.shape(result)
    others = BoxGrid(((5, 1, 9, 5), 13, (2, 6, 1)))
    assert ArrayBox.of_batch(batch, here, others) is None or batch[-1][0].path.endswith("/0")


@given(selections(), st.data())
def test_a_list_that_differs_is_no_box(selection: tuple[Any, ...], data: st.DataObject) -> None:
    batch, _ = batch_of(tuple(s for s in selection if not isinstance(s, slice) or s.step != 2))
    if ArrayBox.of_batch(batch, layout()) is None or len(batch) < 2:
        return
    i = data.draw(st.integers(0, len(batch) - 1))
    j = data.draw(st.integers(0, len(batch) - 1).filter(lambda j: j != i))
    swapped = list(batch)
    swapped[i], swapped[j] = batch[j], batch[i]
    assert ArrayBox.of_batch(swapped, layout()) is None
    assert ArrayBox.of_batch([*batch[:i], *batch[i + 1 :]], layout()) != ArrayBox.of_batch(
        batch, layout()
    )


@pytest.mark.parametrize(
    "selection",
    [
        (slice(None, None, -1),),
        (slice(5, 5),),
        (slice(None, None, 2),),
        (..., ...),
        (0, 0, 0, 0),
        (True,),
        ([1, 2],),
        (20,),
        (-21,),
        None,
        "x",
    ],
)
def test_other_selections(selection: Any) -> None:
    """zarr answers them, or raises its error."""
    assert ArrayBox.of_selection(selection, SHAPE, CHUNKS, layout()) is None


@given(selections())
def test_shards_cover_a_box_once(selection: tuple[Any, ...]) -> None:
    box = ArrayBox.of_selection(
        tuple(slice(s.start, s.stop) if isinstance(s, slice) else s for s in selection),
        SHAPE,
        CHUNKS,
        layout(),
    )
    assert box is not None
    values = np.zeros([stop - start for start, stop in box.elements], int)
    seen = box.no_chunks().astype(int)
    for part in box.shards():
        seen[box.slices_of(part.chunks)] += 1
        runs = list(cut(part.chunks, 3))
        in_runs = [at for chunks in runs for at in product(*[range(*side) for side in chunks])]
        assert in_runs == list(product(*[range(*side) for side in part.chunks]))
        assert len(in_runs) == n_chunks_of(part.chunks) == len(part.entry_ids())
        for chunks in runs:
            assert n_chunks_of(chunks) <= 3
            outside, inside, is_whole = box.place_of(chunks)
            values[outside] += 1
            lengths = [s.stop - s.start for s in inside]
            assert [s.stop - s.start for s in outside] == lengths
            size = [(hi - lo) * side for (lo, hi), side in zip(chunks, CHUNKS, strict=True)]
            assert is_whole == (lengths == size)
    assert (values == 1).all()
    assert (seen == 1).all()


@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_are_a_view(order: Any) -> None:
    values = np.zeros((6, 8, 10), "u2", order)[::1, ::-1, 2:]
    blocks = blocks_of(values, (3, 4, 2))
    blocks[1, 0, 3] = 7
    assert blocks.shape == (2, 2, 4, 3, 4, 2)
    assert (values[3:, :4, 6:] == 7).all()
    assert values.sum() == 7 * 3 * 4 * 2
