"""How large the stored chunks of an array are, from a look at some of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zarr_shardstore.format.auto import choose_chunks_per_shard
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.plan.requests import GetSize
from zarr_shardstore.tools.array_state import ArrayState
from zarr_shardstore.tools.open_base import OpenBase

__all__ = ["chunks_per_shard_by_size"]

_ROUND = 128
_N_ROUNDS = 8
_ENOUGH = 64
"""Chunks that are asked for at once, how often, and how many must be there to stop."""

_MAX_INT64 = 2**63 - 1

_UNKNOWN_NBYTES = 1_000_000
"""Taken where no chunk was found and the data type tells no size."""


def chunks_per_shard_by_size(base: OpenBase, state: ArrayState) -> tuple[Coords, str]:
    """Choose chunks per shard from the sizes of stored chunks, and say why.

    Cost: up to 1,024 requests for sizes, spread over the grid; nothing is listed.
    """
    sizes: list[int] = []
    for keys in _some_keys(state):
        replies = base.perform([GetSize(key) for key in keys])
        sizes += [size for size in replies if size is not None]
        if len(sizes) >= _ENOUGH:
            break
    if sizes:
        return choose_chunks_per_shard(state.grid_shape, sum(sizes) / len(sizes))
    nominal = state.nominal_nbytes or _UNKNOWN_NBYTES
    cps, reason = choose_chunks_per_shard(state.grid_shape, nominal)
    return cps, f"no stored chunk was found, so as before compression: {reason}"


def _some_keys(state: ArrayState) -> Iterator[list[str]]:
    """Keys of chunks all over the grid, the same ones each time; all, if there are few."""
    geometry = state.geometry
    assert geometry is not None
    grid = state.grid_shape
    prefix, encode = state.node.chunk_prefix, geometry.encoding.encode
    n_chunks = int(np.prod([float(n) for n in grid]))
    rng = np.random.default_rng(0)
    if n_chunks <= _ROUND * _N_ROUNDS:
        coords = [tuple(c) for c in np.ndindex(*grid)]
        rng.shuffle(coords)
    else:
        columns = [rng.integers(0, min(n, _MAX_INT64), _ROUND * _N_ROUNDS).tolist() for n in grid]
        coords = list(zip(*columns, strict=True))
    for i in range(0, len(coords), _ROUND):
        yield [prefix + encode(tuple(map(int, c))) for c in coords[i : i + _ROUND]]
