"""``chunks_per_shard="auto"``: shards of 10 to 100 MB, wherever the array has as much."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from zarr_shardstore.arrays.policy import MAX_SHARD_NBYTES, choose_chunks_per_shard
from zarr_shardstore.format.layout import chunk_grid_shape

MIN_SHARD_NBYTES = 10_000_000
MAX_ENTRIES = 2**17

lengths = st.one_of(st.integers(1, 12), st.integers(1, 3000), st.integers(1, 2**40))
grids = st.lists(lengths, min_size=0, max_size=6).map(tuple)
sizes = st.one_of(st.integers(0, 300_000_000), st.floats(1, 1e8), st.integers(1, 5000))


@settings(max_examples=rounds(400))
@given(grid=grids, nbytes=sizes)
@example(grid=(6, 6, 6, 6, 6), nbytes=64_000_000 / 5**5)
@example(grid=(12, 12, 12, 12), nbytes=64_000_000 / 11**4)
@example(grid=(7,) * 6, nbytes=64_000_000 / 6**6)
@example(grid=(2**40,) * 6, nbytes=1)
@example(grid=(2, 7, 8, 9, 12, 12), nbytes=153)
def test_bounds(grid: tuple[int, ...], nbytes: float) -> None:
    """Within the grid, at most 100 MB and 2**17 entries, at least 10 MB if there is so much."""
    cps, reason = choose_chunks_per_shard(grid, nbytes)
    assert choose_chunks_per_shard(grid, nbytes) == (cps, reason), "the same each time"
    assert len(cps) == len(grid)
    assert all(1 <= c <= n for c, n in zip(cps, grid, strict=True))
    assert reason
    n_entries = math.prod(cps)
    assert n_entries <= MAX_ENTRIES
    nbytes = max(nbytes, 1)
    assert n_entries == 1 or n_entries * nbytes <= MAX_SHARD_NBYTES
    if n_entries < math.prod(grid) and MAX_ENTRIES * nbytes >= 2 * MIN_SHARD_NBYTES:
        assert n_entries * nbytes >= MIN_SHARD_NBYTES


@given(
    grid=st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple),
    nbytes=st.integers(1, 100_000_000),
)
def test_small_arrays_are_one_shard(grid: tuple[int, ...], nbytes: int) -> None:
    """All chunks, where they fit; so neither 10 MB nor a divisor is asked for."""
    if math.prod(grid) * nbytes <= MAX_SHARD_NBYTES:
        cps, reason = choose_chunks_per_shard(grid, nbytes)
        assert cps == grid
        assert "one shard" in reason


@given(n=st.integers(450, 10**6), nbytes=st.integers(600_000, 8_000_000))
def test_nothing_has_to_divide_anything(n: int, nbytes: int) -> None:
    """A prime number of chunks gets about the same shards as its neighbours, where there are more
    than four: one more chunk may make one more shard, and all of them shorter by a fifth."""
    (c,), _ = choose_chunks_per_shard((n,), nbytes)
    (next_c,), _ = choose_chunks_per_shard((n + 1,), nbytes)
    assert abs(c - next_c) <= max(2, c // 4)


@settings(max_examples=rounds(200))
@given(grid=grids, nbytes=sizes)
def test_shards_are_even(grid: tuple[int, ...], nbytes: float) -> None:
    """No dimension ends with a small rest that one chunk less a shard would have avoided."""
    cps, _ = choose_chunks_per_shard(grid, nbytes)
    if math.prod(cps) * max(nbytes, 1) >= 4 * MIN_SHARD_NBYTES:
        for n, c, n_shards in zip(grid, cps, chunk_grid_shape(grid, cps), strict=True):
            assert c == 1 or -(-n // (c - 1)) > n_shards


@pytest.mark.parametrize(
    ("grid", "nbytes", "expected"),
    [
        ((0,), 5, (1,)),
        ((0, 7), 1000, (1, 7)),
        ((), 5, ()),
        ((1, 1, 1), 10**12, (1, 1, 1)),
        ((10, 10), 99_000_000, (1, 1)),
        ((10, 10), 0, (10, 10)),
        ((1000, 1000), 1_000_000, (8, 8)),
        ((2**40,), 1, (2**17,)),
    ],
)
def test_examples(grid: tuple[int, ...], nbytes: float, expected: tuple[int, ...]) -> None:
    """Empty arrays, no dimensions, chunks that are large enough, chunks of nothing."""
    assert choose_chunks_per_shard(grid, nbytes)[0] == expected


def test_the_reason_names_sizes() -> None:
    """It says what was found, and what it makes."""
    _, reason = choose_chunks_per_shard((391, 282, 94), 100_000)
    assert reason == "stored chunks have about 100 kB: 10 × 8 × 8 of them make shards of 64 MB"
    _, reason = choose_chunks_per_shard((3, 3), 1000)
    assert reason == "stored chunks have about 1 kB, the whole array 9 kB: one shard"
    _, reason = choose_chunks_per_shard((3, 3), 5e7)
    assert "large enough for an object of its own" in reason
