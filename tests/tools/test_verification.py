"""What was written is read back and compared before anything of the source is removed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from random import Random
from typing import Any

import crc32c
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.bases import OtherMapping
from tests.support.hierarchies import KINDS, ArrayOf, Coords, Kind, grid_coords
from tests.support.kit import tuned
from tests.support.rounds import rounds
from zarr_shardstore import reshard, shard_store, unshard_store
from zarr_shardstore.errors import CorruptShardError, CorruptValueError

GRID = (3, 4)
MISSING = (1 << 64) - 1


def flip(value: bytes, rng: Random) -> bytes | None:
    n = rng.randrange(len(value) * 8)
    return value[: n // 8] + bytes([value[n // 8] ^ (1 << n % 8)]) + value[n // 8 + 1 :]


def cut(value: bytes, rng: Random) -> bytes | None:
    return value[: rng.randrange(len(value))]


def lose(value: bytes, rng: Random) -> bytes | None:
    return None


def with_index(value: bytes, change: Callable[[np.ndarray[Any, Any]], bool]) -> bytes | None:
    """Change the index, if this is a shard of 6 or 2 entries, which fill it up."""
    for n, n_sum in product((6, 2), (4, 0)):
        start, stop = len(value) - 16 * n - n_sum, len(value) - n_sum
        if start <= 0:
            continue
        fields = np.frombuffer(bytearray(value[start:stop]), "<u8").reshape(n, 2)
        stored = fields[fields[:, 0] != MISSING]
        if stored[:, 1].sum() == start and change(fields):
            checksum = crc32c.crc32c(fields.data).to_bytes(4, "little")
            return value[:start] + fields.tobytes() + checksum[:n_sum]
    return None


def rename(value: bytes, rng: Random) -> bytes | None:
    """The entries are the same, in the same order, and one has the id of a missing neighbour."""

    def change(fields: np.ndarray[Any, Any]) -> bool:
        for i, j in pairwise(range(len(fields))):
            if (fields[i, 0] == MISSING) != (fields[j, 0] == MISSING):
                fields[[i, j]] = fields[[j, i]]
                return True
        return False

    return with_index(value, change) or flip(value, rng)


def move_bound(value: bytes, rng: Random) -> bytes | None:
    """One entry ends a byte later, and the next one begins there."""

    def change(fields: np.ndarray[Any, Any]) -> bool:
        for i, j in pairwise(range(len(fields))):
            if fields[i].sum() == fields[j, 0]:
                fields[i, 1] += 1
                fields[j] += np.array([1, -1]).astype("u8")
                return True
        return False

    return with_index(value, change) or flip(value, rng)


DAMAGES: list[Callable[[bytes, Random], bytes | None]] = [flip, cut, lose, rename, move_bound]


class BadStore(OtherMapping):
    """Keeps one value, of those whose keys begin in a way, as something else."""

    def __init__(self, prefix: str, nth: int, damage: Callable[[bytes], bytes | None]) -> None:
        super().__init__()
        self.prefix = prefix
        self.n_left = nth
        self.damage = damage
        self.is_damaged = False

    def __setitem__(self, key: str, value: bytes) -> None:
        if key.startswith(self.prefix) and not key.endswith(("json", ".zarray")):
            self.n_left -= 1
            if self.n_left == 0:
                damaged = self.damage(bytes(value))
                self.is_damaged = damaged != value
                if damaged is None:
                    return
                value = damaged
        super().__setitem__(key, value)


ONE = ThreadPoolExecutor(1)  # so that the nth write is always the same

COMMANDS: dict[str, Callable[..., Any]] = {
    "shard": lambda *stores: shard_store(*stores, chunks_per_shard=(2, 3), executor=ONE),
    "reshard": lambda base, *stores: reshard(base, (2, 1), *stores, executor=ONE),
    "unshard": lambda *stores: unshard_store(*stores, executor=ONE),
}


def array(kind: Kind) -> ArrayOf:
    chunks = {c: f"chunk {c}".encode() * 3 for c in grid_coords(GRID) if c != (1, 1)}
    shape: Coords = (1,) * len(GRID)
    return ArrayOf(kind, "a", GRID, shape, (0,) * len(GRID), chunks)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=rounds(25))
@example(name="v3 /", damage=rename, nth=2, nbytes=1 << 20, seed=0)
@example(name="v3 /", damage=move_bound, nth=1, nbytes=1 << 20, seed=0)
@example(name="v3 /", damage=flip, nth=1, nbytes=8, seed=0)
@given(
    name=st.sampled_from(["v2 .", "v3 /", "draft /"]),
    damage=st.sampled_from(DAMAGES),
    nth=st.integers(1, 4),
    nbytes=st.sampled_from([8, 1 << 20]),
    seed=st.integers(0, 1 << 32),
)
def test_a_store_that_keeps_something_else(
    command: str,
    in_place: bool,
    name: str,
    damage: Callable[[bytes, Random], bytes | None],
    nth: int,
    nbytes: int,
    seed: int,
) -> None:
    """An error, and the source is what it was; the same command on a sound store does it.

    Also of values that are larger than a round of `nbytes`, and come in pieces.
    """
    kind = KINDS[name]
    source = array(kind).objects()
    if command != "shard":
        base = OtherMapping()
        base.data |= source
        COMMANDS["shard"](base)
        source = dict(base.data)
    expected = OtherMapping()
    expected.data |= source
    COMMANDS[command](expected)

    rng = Random(seed)
    bad = BadStore(".zarr_shardstore/" if in_place else "", nth, lambda value: damage(value, rng))
    if in_place:
        bad.data |= source
        stores: tuple[Any, ...] = (bad,)
    else:
        stores = (dict(source), bad)
    with (
        pytest.raises((CorruptShardError, CorruptValueError), match="nothing was removed"),
        tuned(copy_nbytes=nbytes),
    ):
        COMMANDS[command](*stores)
    assert bad.is_damaged
    assert source.items() <= stores[0].items()
    COMMANDS[command](*stores)
    assert {key: stores[-1][key] for key in stores[-1]} == expected.data
