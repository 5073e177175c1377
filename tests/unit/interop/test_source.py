"""A parsed source as a base store: requests of ranges, and chunks that are encoded again."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import zarr
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from zarr_shardstore.access import open_base, requests
from zarr_shardstore.interop.importing.source import (
    RECODED,
    ParsedSource,
    SourceBackend,
    SourceFiles,
    format_of,
)


class Slow(MemoryStore):
    """Counts the requests that are under way."""

    n = most = 0

    async def get(self, *args: Any, **options: Any) -> Any:
        self.n += 1
        self.most = max(self.most, self.n)
        await asyncio.sleep(0.01)
        self.n -= 1
        return await super().get(*args, **options)


def source(decoded: Any = None, **references: Any) -> SourceBackend:
    zarray = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "|u1", "order": "C"}
    documents = {".zarray": {**zarray, "fill_value": None, "compressor": None, "filters": None}}
    parsed = ParsedSource(documents, references, decoded, is_local=False)
    return SourceBackend(parsed, SourceFiles(), lambda: (source, ()))


def test_ranges_of_objects_are_read_at_once_by_at_most_64_requests() -> None:
    """Of all threads together."""
    backend = source()
    store = Slow({f"{i}": cpu.Buffer.from_bytes(bytes([i])) for i in range(100)})
    backend._files._stores["x://a"] = store
    with ThreadPoolExecutor(2) as threads:
        wanted = [(f"x://a/{i}", 0, 1) for i in range(100)]
        for found in threads.map(backend._files.read_all, [wanted, wanted]):
            assert [bytes(data) for data in found] == [bytes([i]) for i in range(100)]
    assert 32 < store.most <= 64


def test_no_format_is_looked_for_beyond_the_end() -> None:
    """Servers refuse such a range."""
    for data, kind in ((b"", None), (b"version https", None), (b"\x93NUMPY", "npy")):

        def read(start: int, stop: int, data: bytes = data) -> bytes:
            assert start < stop <= len(data)
            return data[start:stop]

        assert format_of(read, len(data)) == kind


def test_a_chunk_is_decoded_once() -> None:
    """Its size comes with its value."""
    asked: list[Any] = []

    class Values:
        def __getitem__(self, box: Any) -> Any:
            asked.append(box)
            return np.arange(4, dtype="u1")[box]

    @contextmanager
    def decoded() -> Iterator[Callable[[str], Any]]:
        yield lambda _: Values()

    backend = source(decoded, **{"0": RECODED, "1": RECODED})
    with mock.patch.object(zarr.config, "set", side_effect=AssertionError("it is the user's")):
        values = open_base(backend).values(["0", "1", "2"])
    assert values == [b"\x00\x01", b"\x02\x03", None]
    assert len(asked) == 2


def test_it_is_a_base_store_that_is_only_read() -> None:
    base = open_base(source(**{"0": b"ab", "1": ("x", 5, 7)}))
    assert base.names("") == [".zarray"]
    assert sorted(base.keys("")) == [".zarray", "0", "1"]
    assert base.sizes(["0", "1", "2"]) == [2, 7, None]
    assert base.perform([requests.Exists("0"), requests.Exists("2")]) == [True, False]
    assert base.is_read_only
    assert not base.supports_deletes
    assert not base.is_in_memory
    assert type(pickle.loads(pickle.dumps(base)).store) is SourceBackend
