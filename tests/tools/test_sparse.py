"""Conversions of sparse arrays: what is stored is walked, not the grid."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.hierarchies import KINDS, V3, ArrayOf, Coords, Counting, meaning, view
from zarr_shardstore import (
    CorruptShardError,
    ShardingMapping,
    SpecError,
    get_shard_info,
    reshard,
    shard_store,
    unshard_store,
)

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


@pytest.mark.parametrize("grid", [2**17, 2**40, 2**63])
def test_a_huge_shard_with_few_chunks(grid: int) -> None:
    """Conversions of it, and to it, visit what it has, by few requests."""
    array = sparse([(0,), (1,), (2**17 - 1,), (grid - 1,)], (grid,))
    base = Counting(array.objects())
    conversions: list[Callable[..., Any]] = [
        partial(shard_store, chunks_per_shard=2**17),
        partial(reshard, chunks_per_shard=2),
        partial(reshard, chunks_per_shard=2**17),
        unshard_store,
    ]
    n_tasks = []
    for convert in conversions:
        target = Counting()
        n_tasks += [array.n_tasks for array in convert(base, destination=target).arrays]
        assert len(base.reads) + len(target.reads) < 500
        base = Counting(target.data)
    assert meaning(dict(base.data)) == meaning(array.objects())
    is_one = grid == 2**17
    assert n_tasks == ([1, 2, 1, 2] if is_one else [2, 3, 2, 3])


@pytest.mark.parametrize("grid", [2**24, 2**62])
@pytest.mark.parametrize("convert", [partial(reshard, chunks_per_shard=2), unshard_store])
def test_a_shard_that_is_less_than_it_declares(convert: Callable[..., Any], grid: int) -> None:
    """Its conversion is refused before there is memory for the chunks that it should have."""
    array = sparse([(0,)], (grid,))
    objects = array.objects()
    shard_store(objects, chunks_per_shard=1)
    text = json.dumps(json.loads(objects["a/zarr.json"]))
    inner, outer = '"chunk_shape": [1]}', f'"chunk_shape": [{2**24}]}}'
    assert text.count(inner) == 1
    objects["a/zarr.json"] = text.replace(inner, outer).encode()
    tracemalloc.start(1)
    try:
        with pytest.raises(CorruptShardError, match="268435460"):
            convert(objects, destination={})
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_links_to_parts_of_a_huge_grid(tmp_path: Path) -> None:
    """A listing does not follow them, and nothing else tells which places to visit."""
    store = tmp_path / "store"
    for key, value in sparse(CORNERS, HUGE).objects().items():
        (store / key).parent.mkdir(parents=True, exist_ok=True)
        (store / key).write_bytes(value)
    os.rename(store / "a/c/1", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", store / "a/c/1")
    target: dict[str, bytes] = {}
    with pytest.raises(SpecError, match=r"lie behind the link '.*/a/c/1'"):
        shard_store(str(store), target, chunks_per_shard=8)
    assert not [key for key in target if "/c/" in key]
    assert ShardingMapping(str(store))["a/c/1/1/1"] == b"(1, 1, 1)"


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
    assert len([key for key in base.data if "/values-" in key]) == 4
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
