"""Conversions of sparse arrays: what is stored is walked, not the grid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.support.hierarchies import KINDS, V3, ArrayOf, Coords, Counting, meaning, view
from zarr_shardstore import SpecError, get_shard_info, reshard, shard_store, unshard_store

HUGE = (10**6, 10**6, 10**6)


def sparse(coords: list[Coords], grid: Coords, kind: Any = V3) -> ArrayOf:
    chunks = {c: str(c).encode() for c in coords}
    return ArrayOf(kind, "a", grid, (1,) * len(grid), (0,) * len(grid), chunks)


CORNERS: list[Coords] = [(0, 0, 0), (1, 1, 1), (500_000, 7, 123_456), (999_999, 999_999, 999_999)]


@pytest.mark.parametrize("has_destination", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_huge_grid_with_few_chunks(name: str, has_destination: bool) -> None:
    """Each conversion visits the regions of stored chunks alone, and asks for few keys."""
    array = sparse(CORNERS, HUGE, KINDS[name])
    base = Counting(array.objects())
    expected = meaning(dict(base.data))
    conversions: list[Callable[..., Any]] = [
        partial(shard_store, chunks_per_shard=8),
        partial(reshard, chunks_per_shard=(2, 20, 3)),
        unshard_store,
    ]
    for convert in conversions:
        base.reads.clear()
        target = Counting() if has_destination else base
        (report,) = convert(base, destination=target if has_destination else None).arrays
        assert report.n_chunks == 4
        assert 3 <= report.n_tasks < 200  # a shard of the source may lie in many regions
        assert len(base.reads) < 20_000
        base = target
        assert meaning(view(base)) == expected
        assert get_shard_info(base).n_chunks == 4


class Interrupted(Counting):
    """Stops where values take the place of others."""

    is_interrupted = True

    def __setitem__(self, key: str, value: bytes) -> None:
        if self.is_interrupted and key == "a/zarr.json":
            raise KeyboardInterrupt
        super().__setitem__(key, value)


def test_what_an_earlier_run_wrote_is_visited_too() -> None:
    """Chunks that are gone since are not in the shards that follow."""
    base = Interrupted(sparse([*CORNERS, (3, 4, 5)], HUGE).objects())
    with pytest.raises(KeyboardInterrupt):
        shard_store(base, chunks_per_shard=2)
    base.is_interrupted = False
    assert len([key for key in base.data if "/values/" in key]) == 4
    del base.data["a/c/3/4/5"]
    shard_store(base, chunks_per_shard=2)
    assert meaning(view(base)) == meaning(sparse(CORNERS, HUGE).objects())


def test_a_destination_with_more_than_the_source() -> None:
    """A chunk in a place that the source says nothing about is a difference."""
    source = sparse(CORNERS, HUGE).objects()
    target: dict[str, bytes] = {}
    shard_store(source, target, chunks_per_shard=2)
    more: dict[str, bytes] = {}
    shard_store(sparse([(9, 9, 9)], HUGE).objects(), more, chunks_per_shard=2)
    target |= more
    with pytest.raises(SpecError, match="coordinates 8 to 9, 8 to 9, 8 to 9"):
        shard_store(source, target, chunks_per_shard=2)
