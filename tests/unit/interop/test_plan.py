"""Plan of a loader: parts cover each element of each sample once, units each chunk once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.access import box_grids
from zarr_shardstore.interop.loader.plan import Geometry, advice_of


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    ndim = draw(st.integers(0, 3))
    lengths = [draw(st.integers(1, 5)) for _ in range(ndim)]
    shape = tuple(n + draw(st.integers(0, 6)) for n in lengths)
    chunks = tuple(draw(st.integers(1, 4)) for _ in range(ndim))
    sides = [draw(st.integers(1, 3) | st.just((1, 2, 1))) for _ in range(ndim)]
    shards = draw(st.sampled_from([(1,) * ndim, tuple(sides)]))
    return Geometry(shape, chunks, 4, (*range(ndim),), (*lengths,), box_grids.BoxGrid(shards))


@given(geometries(), st.integers(0, 20), st.integers(1, 9), st.integers(1, 400))
def test_parts_and_units(geometry: Geometry, n: int, turn: int, unit_nbytes: int) -> None:
    rng = np.random.default_rng(n)
    pairs = list(zip(geometry.shape, geometry.lengths, strict=True))
    ndim = len(pairs)
    starts = np.array([[rng.integers(0, a - b + 1) for a, b in pairs] for _ in range(n)], np.int64)
    starts = starts.reshape(n, ndim)
    batches = np.arange(n) // 4
    parts = geometry.parts(0, starts, batches, np.arange(n) % 4, batches // turn)
    seen = np.zeros((n, *geometry.lengths), int)
    for i, (lo, hi) in enumerate(zip(parts.bounds, parts.bounds[1:], strict=False)):
        for row in range(lo, hi):
            sample = 4 * parts.batches[row] + parts.slots[row]
            corner = parts.chunks[i] * geometry.chunk_shape
            assert (starts[sample] - corner == parts.offsets[row]).all()
            first = np.maximum(corner, starts[sample]) - starts[sample]
            last = np.minimum(corner + geometry.chunk_shape, starts[sample] + geometry.lengths)
            box = tuple(map(slice, first, last - starts[sample]))
            seen[(sample, *box)] += 1
    assert (seen == 1).all()
    assert len({*map(tuple, parts.chunks.tolist())}) == len(parts.chunks)

    units = list(geometry.units(parts, unit_nbytes))
    covered = [chunk for unit in units for chunk in unit.chunks.tolist()]
    assert covered == parts.chunks.tolist()
    most = max(1, unit_nbytes // geometry.chunk_nbytes)
    for unit in units:
        assert len(unit.chunks) <= most
        for shard, chunks in unit.reads():
            for chunk in chunks.tolist():
                numbers = [geometry.shards.number(d, c) for d, c in enumerate(chunk)]
                assert tuple(numbers) == shard


def test_advice_has_numbers() -> None:
    cut = Geometry(
        (1000, 256, 256), (100, 256, 256), 2, (0,), (1, 256, 256), box_grids.BoxGrid((1, 1, 1))
    )
    (chunks, shards) = advice_of(cut, 100.0, 2**28, cut.shard_nbytes)
    assert "(1, 256, 256) in place of (100, 256, 256)" in chunks
    assert "shards of about 64 chunks" in shards
    good = Geometry(
        (1000, 256, 256), (8, 256, 256), 2, (0,), (1, 256, 256), box_grids.BoxGrid((16, 1, 1))
    )
    assert advice_of(good, 1.0, 2**28, good.shard_nbytes) == []
    tiny = Geometry((10_000,), (10,), 8, (0,), (1,), box_grids.BoxGrid((4,)))
    assert "chunks of (10000,)" in advice_of(tiny, 1.0, 2**14, tiny.shard_nbytes)[0]
    assert advice_of(tiny, 1.0, 2**28, tiny.shard_nbytes) == [], "the pool holds all of it"
