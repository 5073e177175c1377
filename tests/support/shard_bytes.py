"""Shards as bytes, made and read by the specification alone.

Source: ZEP 2, "Binary shard format"::

    shard   ├── entries ──┤ index: offset u64le, nbytes u64le of each entry [crc32c u32le] ┤
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import crc32c

Location: TypeAlias = Literal["start", "end"]
MISSING = 2**64 - 1


def index_nbytes(n: int, *, checksum: bool = True) -> int:
    """Size of the index of `n` entries."""
    return 16 * n + 4 * checksum


def index_of(places: Iterable[tuple[int, int]], *, checksum: bool = True) -> bytes:
    """The index with these offsets and sizes."""
    body = b"".join(struct.pack("<QQ", *place) for place in places)
    return body + (struct.pack("<I", crc32c.crc32c(body)) if checksum else b"")


def build_shard(
    values: Mapping[int, bytes], n: int, *, checksum: bool = True, location: Location = "end"
) -> bytes:
    """A shard of `n` entries, which follow each other in the order of their numbers."""
    places = [(MISSING, MISSING)] * n
    data = b""
    first = index_nbytes(n, checksum=checksum) if location == "start" else 0
    for entry in sorted(values):
        places[entry] = (first + len(data), len(values[entry]))
        data += values[entry]
    index = index_of(places, checksum=checksum)
    return index + data if location == "start" else data + index


def places_in(
    shard: bytes, n: int, *, checksum: bool = True, location: Location = "end"
) -> list[tuple[int, int] | None]:
    """Offset and size of each entry; ``None`` if it is missing. The checksum must fit."""
    nbytes = index_nbytes(n, checksum=checksum)
    index = shard[:nbytes] if location == "start" else shard[len(shard) - nbytes :]
    places = list(struct.iter_unpack("<QQ", index[: 16 * n]))
    assert index == index_of(places, checksum=checksum)
    return [None if place == (MISSING, MISSING) else (place[0], place[1]) for place in places]
