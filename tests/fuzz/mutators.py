"""Mutations of stored bytes and of documents that know the structure of what they change."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

NUMBERS = [0, 1, 2, 3, 15, 16, 2**16, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
NUMBERS += [2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [
    *(*NUMBERS, -1, -(2**63), 2**64, 10**30, 0.5, 1e308, float("nan"), float("inf")),
    *(None, True, False, "", "a", "0", "/", ".", "..", "c/0", "ü\0", "end", "start", "x" * 2000),
    *([], {}, [[]], [{}], [0], [1, 1], [2**31, 2**31], [2**24], {"name": "sharding"}),
    *("sharding", "sharding_indexed", "crc32c", "zarr_shardstore", {"name": "crc32c"}, [[[[{}]]]]),
]

Fix = Callable[[bytearray, random.Random], None]
"""Make checksums fit again, so that what lies behind them is reached."""


def mutate_bytes(data: bytes, rng: random.Random, fix: Fix | None = None) -> bytes:
    """Return other bytes: flipped, cut, swapped, repeated, or with other numbers in them."""
    new = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(new)) if new else 0
        to = min(len(new), at + rng.choice((1, 4, 8, 16, 64)))
        match rng.randrange(10):
            case 0 if new:
                new[at] ^= 1 << rng.randrange(8)
            case 1 if new:
                new[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 2:
                del new[at:to]
            case 3:
                del new[at:]
            case 4:
                new[at:at] = new[at:to]
            case 5:
                new[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
            case 6:
                other = rng.randrange(len(new) + 1)
                new[at:to], new[other : other + to - at] = new[other : other + to - at], new[at:to]
            case _:
                size = rng.choice((4, 8, 8, 8))
                from_end = at - len(new)  # an index is at the end, perhaps with a checksum
                at = max(0, at - rng.choice((0, at % size, from_end % size, (from_end + 4) % size)))
                old = int.from_bytes(new[at : at + size], "little")
                near = (old - 1, old + 1, len(new), len(new) - 1, len(new) + 1, old + 16)
                number = rng.choice((*NUMBERS, *near)) % 256**size
                order: Any = rng.choice(("little", "little", "little", "big"))
                new[at : at + size] = number.to_bytes(size, order)
    if fix is not None and rng.random() < 0.7:
        fix(new, rng)
    return bytes(new)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Return another JSON value: with members removed, renamed, swapped, repeated or replaced."""
    try:
        doc = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(doc)
        if not places:
            break
        holder, name = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del holder[name]
            case 1 if isinstance(holder, dict):
                other = rng.choice([n for h, n in places if isinstance(h, dict)])
                holder[other] = holder.pop(name)
            case 2 if isinstance(holder, list):
                holder.insert(name, copy.deepcopy(holder[name]))
            case 3:
                holder_2, name_2 = rng.choice(places)
                holder[name] = copy.deepcopy(holder_2[name_2])
            case 4 if type(holder[name]) is int:
                holder[name] += rng.choice((-1, 1, holder[name], -2 * holder[name]))
            case 5 if isinstance(holder[name], str):
                text = bytearray(holder[name].encode("latin-1", "replace"))
                holder[name] = mutate_bytes(bytes(text), rng).decode("latin-1")
            case 6:
                holder[name] = [copy.deepcopy(holder[name])]
            case _:
                holder[name] = copy.deepcopy(rng.choice(VALUES))
    try:
        return json.dumps(doc).encode()
    except (ValueError, RecursionError):  # a value that was put into itself
        return data


def _places(doc: Any) -> list[tuple[Any, Any]]:
    """Return each member of the value, however deep, as its holder and its name or number."""
    found: list[tuple[Any, Any]] = []
    left = [doc]
    while left and len(found) < 3000:
        holder = left.pop()
        names: Any = ()
        if isinstance(holder, dict):
            names = list(holder)
        elif isinstance(holder, list):
            names = range(len(holder))
        found += [(holder, name) for name in names]
        left += [holder[name] for name in names]
    return found
