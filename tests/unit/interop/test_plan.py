"""Plan of a loader: the copies of all units make the batches, and units have each chunk once."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.access import box_grids
from zarr_shardstore.interop.loader.copies import copy_parts
from zarr_shardstore.interop.loader.order import Draw
from zarr_shardstore.interop.loader.plan import Geometry, PlannedSamples, advice_of


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    ndim = draw(st.integers(0, 3))
    lengths = [draw(st.integers(1, 5)) for _ in range(ndim)]
    shape = tuple(n + draw(st.integers(0, 6)) for n in lengths)
    chunks = tuple(draw(st.integers(1, 4)) for _ in range(ndim))
    sides = [draw(st.integers(1, 3) | st.just((1, 2, 1))) for _ in range(ndim)]
    shards = draw(st.sampled_from([(1,) * ndim, tuple(sides)]))
    is_row = draw(st.booleans()) and ndim > 0
    axes = (0,) if is_row else (*range(ndim),)
    lengths = [1, *shape[1:]] if is_row else lengths
    grid, n_in_piece = box_grids.BoxGrid(shards), draw(st.integers(1, 3))
    return Geometry(
        shape, chunks, draw(st.sampled_from([4, 4096])), axes, (*lengths,), grid, n_in_piece
    )


@given(geometries(), st.integers(0, 20), st.integers(1, 9), st.booleans(), st.integers(1, 400))
def test_the_copies_of_units_make_the_batches(
    geometry: Geometry, n: int, group: int, has_turns: bool, unit_nbytes: int
) -> None:
    unit_nbytes *= geometry.itemsize
    rng = np.random.default_rng(n)
    pairs = [(geometry.shape[axis], geometry.lengths[axis]) for axis in geometry.axes]
    starts = np.array([[rng.integers(0, a - b + 1) for a, b in pairs] for _ in range(n)], np.int64)
    starts = starts.reshape(n, len(pairs))
    number = np.arange(n)
    turns = number // 4 if has_turns else np.zeros_like(number)
    samples = PlannedSamples(starts, number, number // group, number // 4, number % 4, turns)
    units = list(geometry.units(0, samples, unit_nbytes))

    values = np.arange(math.prod(geometry.shape)).reshape(geometry.shape)
    sides = zip(geometry.grid, geometry.chunk_shape, strict=True)
    padded = np.zeros([cells * side for cells, side in sides], int)
    padded[tuple(map(slice, geometry.shape))] = values
    batches = {i: np.full((4, *geometry.lengths), -1) for i in range(-(-n // 4))}
    seen = []
    for unit in units:
        assert unit.numbers == sorted(set(unit.parts.batches[[*unit.part_range]].tolist()))
        coords = [tuple(chunk) for _, chunks in unit.reads for chunk in chunks.tolist()]
        assert len(coords) == unit.n_chunks <= max(1, unit_nbytes // geometry.chunk_nbytes)
        seen += [(unit.group, at) for at in coords]
        for shard, chunks in unit.reads:
            for chunk in chunks.tolist():
                at = tuple(geometry.shards.number(dim, c) for dim, c in enumerate(chunk))
                assert at == shard
        boxes = [
            tuple(slice(c * n, (c + 1) * n) for c, n in zip(at, geometry.chunk_shape, strict=True))
            for at in coords
        ]
        size = geometry.n_in_piece
        pieces = [
            np.stack([padded[box] for box in boxes[i : i + size]])
            for i in range(0, len(boxes), size)
        ]
        copy_parts(geometry, iter(pieces), unit, batches)
    assert len({*seen}) == len(seen), "each chunk once in a group"
    for i, start in enumerate(starts):
        full = np.zeros(len(geometry.shape), int)
        full[list(geometry.axes)] = start
        box = tuple(map(slice, full, full + geometry.lengths))
        assert (batches[i // 4][i % 4] == values[box]).all()


def test_advice_has_numbers() -> None:
    pool = partial(Draw, False, 0)
    cut = Geometry(
        (1000, 256, 256), (100, 256, 256), 2, (0,), (1, 256, 256), box_grids.BoxGrid((1, 1, 1)), 1
    )
    (chunks, shards) = advice_of(cut, 100.0, pool(2**28), cut.shard_nbytes)
    assert "(1, 256, 256) in place of (100, 256, 256)" in chunks
    assert "shards of about 64 chunks" in shards
    good = Geometry(
        (1000, 256, 256), (8, 256, 256), 2, (0,), (1, 256, 256), box_grids.BoxGrid((16, 1, 1)), 1
    )
    assert advice_of(good, 1.0, pool(2**28), good.shard_nbytes) == []
    tiny = Geometry((10_000,), (10,), 8, (0,), (1,), box_grids.BoxGrid((4,)), 1)
    assert "chunks of (10000,)" in advice_of(tiny, 1.0, pool(2**14), tiny.shard_nbytes)[0]
    assert advice_of(tiny, 1.0, pool(2**28), tiny.shard_nbytes) == [], "the pool holds all of it"
    sparse = replace(good, shape=(9000,), chunk_shape=(900,), axes=(0,), lengths=(1,))
    sparse = replace(sparse, shards=box_grids.BoxGrid((4,)), indptr=np.arange(0, 9001, 30))
    assert 'shuffle="shards"' in advice_of(sparse, 9.0, pool(2**20), 7200)[0], "900 are few"
    large = replace(sparse, shape=(9_000_000,), chunk_shape=(900_000,))
    assert "chunks of (32768,) in place" in advice_of(large, 9.0, pool(2**28), 2**22)[0]
    assert len(advice_of(large, 9.0, pool(2**28), 2**22)) == 1, "the pool has 64 shards"
