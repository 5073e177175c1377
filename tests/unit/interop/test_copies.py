"""Copies into batches: chunks of uncompressed files are read straight into them."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from zarr_shardstore import ShardingStore, ShardLoader
from zarr_shardstore.access import EntryReader
from zarr_shardstore.interop.loader.copies import Memory

SHUFFLES: list[Any] = [False, "shards", "full"]


@settings(max_examples=rounds(60))
@given(
    n=st.integers(1, 40),
    in_chunk=st.integers(1, 7),
    dtype=st.sampled_from(["f8", ">f8", "c16"]),
    shuffle=st.sampled_from(SHUFFLES),
    share=st.sampled_from([1.0, 0.8]),
    data=st.data(),
)
def test_rows_of_uncompressed_files_are_those_stored(
    n: int, in_chunk: int, dtype: str, shuffle: Any, share: float, data: st.DataObject
) -> None:
    """Their chunks are read straight into batches, but missing ones, and rows of two samples."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    repeats = st.lists(st.integers(0, n - 1), min_size=1, max_size=20)
    positions = data.draw(st.just([*range(n)]) | st.permutations(range(n)) | repeats)
    with tempfile.TemporaryDirectory() as path:
        store = ShardingStore(path, chunks_per_shard=(4, 1))
        z = uncompressed(store, (n, 1024), (in_chunk, 1024), dtype)
        for start in range(0, n, in_chunk):
            if rng.random() < share:
                rows = np.arange(start, min(n, start + in_chunk))
                z[start : start + in_chunk] = np.broadcast_to(rows[:, None], (len(rows), 1024))
        time.sleep(0.05)  # files that are younger are read again
        loader = ShardLoader(
            store, "x", batch_size=5, positions=positions, shuffle=shuffle, n_threads=2
        )
        values = z[...][positions].astype(z.dtype.newbyteorder("="))
        wanted = Counter(row.tobytes() for row in values)
        with poisoned_batches():
            for _ in range(3):
                assert Counter(row.tobytes() for batch in loader for row in batch) == wanted
        z[:] = 9  # by another store: the files are stale
        other = zarr.open_array(ShardingStore(path), path="x")
        other[n - 1] = 11
        seen = {row[0].item() for batch in loader for row in batch}
        assert seen <= {9, 11}
        assert (11 in seen) == (n - 1 in positions)


def uncompressed(store: Any, shape: Any, chunks: Any, dtype: str) -> Any:
    options: Any = {"shape": shape, "chunks": chunks, "dtype": dtype, "fill_value": 7}
    return zarr.create_array(store, name="x", compressors=None, **options)


@contextmanager
def poisoned_batches() -> Iterator[None]:
    """The memory of batches has other bytes before it is filled."""
    take = Memory.take

    def poisoned(self: Any, shape: Any, dtype: Any) -> Any:
        found = take(self, shape, dtype)
        found.view(np.uint8)[...] = 0xA5
        return found

    with patch.object(Memory, "take", poisoned):
        yield


@contextmanager
def read_into_replies() -> Iterator[list[bool]]:
    """Whether reads straight into batches were done."""
    read_into, replies = EntryReader.read_into, list[bool]()

    def noted(*args: Any) -> bool:
        replies.append(read_into(*args))
        return replies[-1]

    with patch.object(EntryReader, "read_into", noted):
        yield replies


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("positions", [[5, 5, 6, 7, 7, 5, 20], [5, 6, 7, 5], [1, 2, 3, 2, 3, 4]])
def test_samples_may_share_rows(positions: list[int], shuffle: Any, tmp_path: Path) -> None:
    """Also where chunks are read straight into batches."""
    store = ShardingStore(str(tmp_path), chunks_per_shard=(4, 1))
    z = uncompressed(store, (24, 1024), (8, 1024), "f8")
    z[:] = np.arange(24)[:, None]
    store.close()
    time.sleep(0.05)
    loader = ShardLoader(store, "x", batch_size=10, positions=positions, shuffle=shuffle)
    with poisoned_batches():
        for _ in range(3):
            (batch,) = loader
            assert sorted(batch[:, 0].tolist()) == sorted(positions)
            assert (batch == batch[:, :1]).all()


def test_chunks_of_as_many_rows_as_one_read_has_buffers(tmp_path: Path) -> None:
    store = ShardingStore(str(tmp_path), chunks_per_shard=(2, 1))
    z = uncompressed(store, (2048, 8192), (1024, 8192), "u1")
    z[:] = np.arange(2048)[:, None] % 251
    store.close()
    time.sleep(0.05)
    loader = ShardLoader(store, "x", batch_size=7, shuffle="shards", n_threads=2)
    with read_into_replies() as were_read:
        for _ in range(3):
            seen = Counter(int(row[0]) for batch in loader for row in batch)
            assert seen == Counter((np.arange(2048) % 251).tolist())
    assert any(were_read)


def test_an_entry_that_is_shorter_than_its_chunk_is_an_error(tmp_path: Path) -> None:
    """In each epoch, also where the file ends inside the chunk."""
    store = ShardingStore(str(tmp_path), chunks_per_shard=(4, 1), index_location="start")
    z = uncompressed(store, (4, 8192), (1, 8192), "u1")
    z[:] = 3
    store.close()
    (file,) = (tmp_path / "x" / "c").rglob("0/0")
    data = bytearray(file.read_bytes())
    index = np.frombuffer(data, "<u8", 8).reshape(4, 2).copy()
    last = index[:, 0].argmax()
    index[last, 1] = 4192
    data[:64] = index.tobytes()
    data[64:68] = crc32c.crc32c(data[:64]).to_bytes(4, "little")
    file.write_bytes(data[: int(index[last].sum())])
    time.sleep(0.05)
    loader = ShardLoader(ShardingStore(str(tmp_path)), "x", batch_size=2)
    for _ in range(3):
        with pytest.raises(ValueError, match="reshape"):
            list(loader)
