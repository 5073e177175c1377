"""Damage that a reader would notice, or that gives other values, is seen by `check_store`."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.checked_stores import CHUNK, CPS, KINDS, Kind
from tests.support.small_shards import SEED, a_seed
from zarr_shardstore import ShardingMapping, check_store

N_DAMAGES = 54
"""In each of the 19 stores: 1,026."""

N = CPS[0] * CPS[1]

Damage = Callable[[random.Random, bytes, bytes], bytes]
"""Changes an object; another object of the array is given, too."""


def flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(rng: random.Random, data: bytes, other: bytes) -> bytes:
    n = rng.randrange(len(data))
    return rng.choice((data[:n], data[n + 1 :], data[:-1], data[: len(data) // 4096 * 4096]))


def blank(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(data))
    n = min(rng.choice((1, 8, 16, 64, 4096)), len(data) - start)
    return data[:start] + rng.choice((b"\0", b"\xff")) * n + data[start + n :]


def duplicate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start, stop = sorted(rng.sample(range(len(data) + 1), 2))
    if rng.random() < 0.5:
        return data[:stop] + data[start:]
    to = rng.randrange(len(data) - (stop - start) + 1)
    return data[:to] + data[start:stop] + data[to + stop - start :]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    n = rng.randrange(1, min(len(data), len(other)))
    return rng.choice((data[:-n] + other[-n:], other[:n] + data[n:], data + other[:n]))


def swap(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Exchange 16 bytes of the index with other 16: entries, if there is an index."""
    n = 16 * N + 4
    if len(data) < n:
        return flip(rng, data, other)
    start = rng.choice((0, len(data) - n, len(data) - n + 4))
    i, j = rng.sample(range(N), 2)
    parts = [data[start + 16 * k : start + 16 * (k + 1)] for k in range(N)]
    parts[i], parts[j] = parts[j], parts[i]
    return data[:start] + b"".join(parts) + data[start + 16 * N :]


def number(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Another number in the place of one of an index."""
    at = rng.choice((0, max(0, len(data) - 16 * N - 4), max(0, len(data) - 16 * N)))
    at += 8 * rng.randrange(2 * N)
    new = struct.pack("<Q", rng.choice((0, 1, 15, len(data), 2**63, 2**64 - 1)))
    return data[:at] + new + data[at + 8 :]


DAMAGES: list[Damage] = [flip, flip, cut, blank, duplicate, splice, swap, number]


def values_of(kind: Kind, base: Any) -> Any:
    options = {k: v for k, v in kind.options.items() if k == "native"}
    try:
        return np.asarray(zarr.open_array(kind.open(base, **options), path="a", mode="r")[:])
    except Exception:
        return None


def chunks_of(values: Any) -> list[bytes]:
    (rows, columns), (i, j) = values.shape, CHUNK
    places = itertools.product(range(0, rows, i), range(0, columns, j))
    return [values[r : r + i, c : c + j].tobytes() for r, c in places]


def may_be_unseen(kind: Kind, damage: Damage, now: Any, expected: Any) -> bool:
    """A checksum covers the bytes of a chunk, and not its place. Chunks that are moved as a whole
    look right, unless the place is in an index that has a checksum."""
    is_of_bytes = damage in (splice, duplicate) or not kind.has_index_checksum
    is_moved = set(chunks_of(now)) <= set(chunks_of(expected))
    return not kind.has_checksum or (is_of_bytes and is_moved)


@dataclass(frozen=True)
class DamagedStore:
    """A store with one damaged object, and all objects as they were before."""

    base: Any
    whole: dict[str, bytes]
    key: str
    damage: Damage
    says: str
    """How to get this store again."""


def damaged_stores(name: str, root: Path, n_damages: int) -> Iterator[DamagedStore]:
    """Yield stores of a kind, every ninth as local files."""
    seed = a_seed()
    rng = random.Random(f"{seed} {name}")
    kind = KINDS[name]
    whole: dict[str, bytes] = {}
    kind.make(whole)
    ShardingMapping(whole, **kind.options).flush()
    keys = [key for key in whole if not key.endswith((".json", ".zarray", ".zattrs", ".zgroup"))]
    kept = []
    for n in range(n_damages):
        key, other = rng.sample(keys, 2)
        damage = rng.choice(DAMAGES)
        objects = dict(whole)
        objects[key] = damage(rng, whole[key], whole[other])
        if objects[key] in (whole[key], whole[other]):
            continue
        base: Any = objects
        kept.append(objects)  # no other dict gets its id
        if n % 9 == 0:
            base = root / str(n)
            for at, value in objects.items():
                (base / at).parent.mkdir(parents=True, exist_ok=True)
                (base / at).write_bytes(value)
        says = f"{SEED}={seed}: {name}, damage {n} ({damage.__name__}) of {key}"
        yield DamagedStore(base, whole, key, damage, says)


@pytest.mark.thorough(of=6)
@pytest.mark.parametrize("name", KINDS)
def test_no_damage_that_counts_is_unseen(name: str, tmp_path: Path) -> None:
    """Values that changed where each chunk has a checksum, and every read that raises."""
    kind = KINDS[name]
    expected: Any = None
    n_seen = 0
    for store in damaged_stores(name, tmp_path, N_DAMAGES):
        expected = values_of(kind, store.whole) if expected is None else expected
        now = values_of(kind, store.base)
        report = check_store(store.base, level="decode")
        n_seen += not report.is_clean
        if now is None:
            assert not report.is_clean, f"{store.says}: a read raises"
        elif report.is_clean and not np.array_equal(now, expected):
            assert may_be_unseen(kind, store.damage, now, expected), f"{store.says}: other values"
    assert n_seen >= N_DAMAGES // 4, "damage was done"


@pytest.mark.parametrize("name", ["v3 zstd", "v2 zlib", "draft gzip"])
def test_foreign_objects_are_seen(name: str) -> None:
    """Beside chunks, and in the place of chunks that there cannot be."""
    rng = random.Random(name)
    kind = KINDS[name]
    whole: dict[str, bytes] = {}
    kind.make(whole)
    chunks = [key for key in whole if not key.endswith((".json", ".zarray", ".zattrs", ".zgroup"))]
    for _ in range(20):
        base = dict(whole)
        key = rng.choice(chunks)
        beside = f"{key.rpartition('/')[0]}/.DS_Store"
        new = rng.choice((key + "~", key + ".tmp", beside, key[:-1] + "77"))
        base[new] = rng.choice((b"", whole[key]))
        assert not check_store(base).is_clean, new
