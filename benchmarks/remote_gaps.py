"""Reads of scattered chunks in one shard behind a network, with different gaps read along.

A gap costs bytes and saves requests; the defaults of the read flow come from this benchmark.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import zarr
from latency_proxy import latency_proxy
from measuring import Middle, fresh_directory, row, title
from servers import file_server, objects_of
from zarr.core.buffer import default_buffer_prototype

from zarr_shardstore import ShardingMapping, ShardingStore

N_CHUNKS = 4096
GAPS = (0, 256, 1024, 4096, 16_384)
"""`max_gap_bytes`; where it spares a round gaps may be 16 times as long."""

PROTOTYPE = default_buffer_prototype()


def show_gaps(
    nbytes: int, numbers: Sequence[int], latency_s: float, repeats: int, middle: Middle
) -> None:
    """Print times in latencies, requests and bytes for each gap."""
    with fresh_directory() as directory:
        store = ShardingStore(directory, chunks_per_shard=N_CHUNKS)
        # By its metadata a chunk is so large that no shard is read whole.
        shape, chunks = (N_CHUNKS << 22,), (1 << 22,)
        zarr.create_array(store, shape=shape, chunks=chunks, dtype="u1", compressors=None)
        values = ((f"c/{i}", 0, random.randbytes(nbytes)) for i in range(N_CHUNKS))
        ShardingMapping(store).set_partial_values(values)
        with file_server(directory) as server, latency_proxy(server.port, latency_s) as proxy:
            for n in numbers:
                text = f"{n} of {N_CHUNKS} chunks, {nbytes} bytes each, {server.name}"
                title(text, f"times {1e3 * latency_s:.0f} ms", "requests", "MB")
                seconds: dict[int, list[float]] = defaultdict(list)
                asked: dict[int, Any] = {}
                for _ in range(repeats):
                    for gap in random.sample(GAPS, len(GAPS)):
                        seconds[gap].append(asyncio.run(_read(proxy, gap, n)))
                        asked[gap] = proxy.asked()
                for gap in GAPS:
                    mb = f"{sum(a.nbytes for a in asked[gap]) / 1e6:.2f}"
                    time = middle(seconds[gap]) / latency_s
                    row(f"gaps of {gap} bytes", time, str(len(asked[gap])), mb)


async def _read(proxy: Any, gap: int, n: int) -> float:
    """Return the seconds of one read of some chunks with a cached index."""
    store = ShardingStore(objects_of(proxy.port), max_gap_bytes=gap)
    await store.get("c/0", PROTOTYPE)
    proxy.asked()
    keys = [(f"c/{i}", None) for i in random.sample(range(N_CHUNKS), n)]
    start = perf_counter()
    await store.get_partial_values(PROTOTYPE, keys)
    return perf_counter() - start
