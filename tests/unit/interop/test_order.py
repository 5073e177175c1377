"""Order of samples: shares of ranks, batches, groups, draws."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError
from zarr_shardstore.interop.loader.order import Draw, Samples, Share, Shuffle, cut

SMALL = st.integers(0, 40)


@given(SMALL, st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_shares_cover_all_samples_once(n: int, size: int, world_size: int, drops: bool) -> None:
    shares = [Share.of(n, size, rank, world_size, drops=drops) for rank in range(world_size)]
    assert len({share.n_batches for share in shares}) == 1
    assert [a.stop for a in shares[:-1]] == [b.start for b in shares[1:]]
    assert shares[0].start == 0
    assert shares[-1].stop == (n // (size * world_size) * size * world_size if drops else n)
    for share in shares:
        ends = share.bounds.tolist()
        sizes = np.diff(ends).tolist()
        assert ends[0] == 0
        assert len(sizes) == share.n_batches
        assert sum(sizes) == share.stop - share.start
        assert all(0 <= each <= size for each in sizes)
        n_empty = max(0, len(sizes) - (share.stop - share.start))
        assert sizes.count(0) == n_empty


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60), st.integers(1, 20))
def test_groups_end_between_shards_if_they_fit(places: list[tuple[int, int]], length: int) -> None:
    places = sorted(places)
    cells = np.array([cell for cell, _ in places], np.int64)
    pieces = np.array([4 * cell + piece for cell, piece in places], np.int64)
    assert cut(cells, pieces, np.ones_like(cells), 2**70) == [len(places)][: len(places)]
    ends = cut(cells, pieces, np.ones_like(cells), length)
    assert ends == sorted(set(ends))
    assert (ends[-1:] or [0]) == [len(places)]
    sizes = np.diff(ends, prepend=0)
    assert (sizes <= length).all()
    for end in ends[:-1]:
        if np.bincount(cells).max() <= length:
            assert cells[end - 1] != cells[end]


@given(st.integers(1, 50), st.sampled_from(["shards", "full"]), st.integers(1, 20), SMALL)
def test_a_draw_is_a_permutation(n: int, shuffle: Shuffle, length: int, seed: int) -> None:
    draw, share = Draw(shuffle, seed, length), Share.of(n, 4, 0, 1, drops=False)
    cells, pieces = np.arange(n) // 8, np.arange(n) // 2
    numbers, ends = draw.order(share, 3, cells, pieces, np.ones(n, np.int64))
    assert sorted(numbers.tolist()) == [*range(n)]
    half = Draw(shuffle, seed, 2 * length)
    again, same = half.order(share, 3, cells, pieces, np.full(n, 2))
    assert same == ends
    assert again.tolist() == numbers.tolist()
    if shuffle == "shards" and length >= 8:
        starts = [0, *ends]
        groups = [set(cells[numbers[a:b]]) for a, b in pairwise(starts)]
        assert sum(map(len, groups)) == len(set(cells))


def test_ranks_share_one_draw() -> None:
    n, draw = 37, Draw("shards", 5, 10)
    cells = np.arange(n) // 6
    numbers: list[int] = []
    for rank in range(3):
        share = Share.of(n, 4, rank, 3, drops=False)
        numbers += draw.order(share, 1, cells, cells, np.ones(n, np.int64))[0].tolist()
    assert sorted(numbers) == [*range(n)]


def test_places_of_samples() -> None:
    shifted = Samples.of([10, 4], [4, 4], [3, 1], shifts=True)
    assert shifted.starts(np.arange(shifted.n)).tolist() == [[0, 0], [3, 0], [6, 0]]
    assert Samples.of([11], [4], [3]).n == 3
    assert Samples.of([11], [4], [3], shifts=True).starts(np.array([3])).tolist() == [[7]]
    assert Samples.of([3], [4], [1], shifts=True).n == 0
    assert Samples.of([], [], []).n == 1
    with pytest.raises(SpecError, match="leaves the array"):
        Samples.of([10], [4], [1], positions=[7])
    with pytest.raises(SpecError, match="at least 1"):
        Samples.of([10], [0], [1])
