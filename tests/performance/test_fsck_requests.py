"""A check asks for each index once, and needs the memory of a few shards, whatever there is."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from zarr.abc.store import SuffixByteRequest
from zarr.storage import LocalStore

from tests.support.full_shards import fill
from tests.support.kit import CountingStore
from tests.support.shard_bytes import index_nbytes
from zarr_shardstore import check_store

CPS = 512


class SizedStore(CountingStore):
    """It tells sizes without a read, as object stores do."""

    async def getsize(self, key: str) -> int:
        return len(self._store_dict[key])


def test_requests() -> None:
    """Of each shard its index alone; at the other levels its entries in one piece."""
    base = SizedStore()
    fill(base, 100, 8)
    base.forget()
    report = check_store(base)
    assert (report.n_objects, report.n_chunks, report.findings) == (100, 800, ())
    of_shards = [(key, part) for key, part in base.reads if key.startswith("z/c/")]
    assert sorted({key for key, _ in of_shards}) == sorted(f"z/c/{i}" for i in range(100))
    assert len(of_shards) == 100
    assert {part for _, part in of_shards} == {SuffixByteRequest(index_nbytes(8))}
    assert len(base.reads) <= 110, "documents"
    base.forget()
    check_store(base, level="decode")
    assert sum(key.startswith("z/c/") for key, _ in base.reads) == 200
    assert base.writes == []


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["index", "decode"])
def test_memory(level: Any, tmp_path: Path) -> None:
    """Eight times the chunks take no more: indexes and chunks are forgotten after their task."""
    peaks = []
    for n, n_shards in enumerate((64, 64, 512)):  # the first imports what is needed
        base = tmp_path / str(n)
        fill(LocalStore(base), n_shards, CPS)
        tracemalloc.start()
        report = check_store(base, level=level)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (report.n_chunks, report.findings) == (n_shards * CPS, ())
    assert peaks[2] < 2 * peaks[1] + 200_000, peaks
