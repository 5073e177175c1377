"""What was written is read back and compared before anything of the source is removed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.bases import OtherMapping
from tests.support.hierarchies import KINDS, ArrayOf, Coords, Kind, grid_coords
from tests.support.rounds import rounds
from zarr_shardstore import reshard, shard_store, unshard_store
from zarr_shardstore.errors import CorruptShardError, CorruptValueError

GRID = (3, 4)


def flip(value: bytes, rng: Random) -> bytes | None:
    n = rng.randrange(len(value) * 8)
    return value[: n // 8] + bytes([value[n // 8] ^ (1 << n % 8)]) + value[n // 8 + 1 :]


def cut(value: bytes, rng: Random) -> bytes | None:
    return value[: rng.randrange(len(value))]


def lose(value: bytes, rng: Random) -> bytes | None:
    return None


DAMAGES: list[Callable[[bytes, Random], bytes | None]] = [flip, cut, lose]


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
@given(
    name=st.sampled_from(["v2 .", "v3 /", "draft /"]),
    damage=st.sampled_from(DAMAGES),
    nth=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
)
def test_a_store_that_keeps_something_else(
    command: str,
    in_place: bool,
    name: str,
    damage: Callable[[bytes, Random], bytes | None],
    nth: int,
    seed: int,
) -> None:
    """An error, and the source is what it was; the same command on a sound store does it."""
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
    with pytest.raises((CorruptShardError, CorruptValueError), match="nothing was removed"):
        COMMANDS[command](*stores)
    assert bad.is_damaged
    assert source.items() <= stores[0].items()
    COMMANDS[command](*stores)
    assert {key: stores[-1][key] for key in stores[-1]} == expected.data
