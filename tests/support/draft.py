"""Draft hierarchies for tests, and short ways to ask a `DraftHierarchyStore`."""

from __future__ import annotations

import json
from typing import Any

from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

from zarr_shardstore import DraftHierarchyStore

PROTOTYPE = default_buffer_prototype()

_CORE = "https://purl.org/zarr/spec/protocol/core/3.0"

ENTRY_POINT = {
    "zarr_format": _CORE,
    "metadata_encoding": _CORE,
    "metadata_key_suffix": ".json",
    "extensions": [],
}
"""Document ``zarr.json`` of a hierarchy."""


def buffer(value: bytes) -> cpu.Buffer:
    return cpu.Buffer.from_bytes(value)


def put(store: DraftHierarchyStore, key: str, value: bytes) -> None:
    sync(store.set(key, buffer(value)))


def take(store: DraftHierarchyStore, key: str, byte_range: Any = None) -> bytes | None:
    value = sync(store.get(key, PROTOTYPE, byte_range))
    return None if value is None else value.to_bytes()


def listed(store: DraftHierarchyStore, prefix: str = "") -> list[str]:
    async def run() -> list[str]:
        return [key async for key in store.list_prefix(prefix)]

    keys = sync(run())
    assert len(keys) == len(set(keys)), "each key once"
    return sorted(keys)


def names(store: DraftHierarchyStore, prefix: str = "") -> list[str]:
    async def run() -> list[str]:
        return [name async for name in store.list_dir(prefix)]

    found = sync(run())
    assert len(found) == len(set(found)), "each name once"
    return sorted(found)


def draft_array(shape: list[int], chunks: list[int], separator: str = "/") -> bytes:
    doc = {
        "attributes": {},
        "chunk_grid": {"chunk_shape": chunks, "separator": separator, "type": "regular"},
        "chunk_memory_layout": "C",
        "data_type": "u1",
        "extensions": [],
        "fill_value": None,
        "shape": shape,
    }
    return json.dumps(doc).encode()


GROUP = b'{"attributes": {}}'


def mixed() -> tuple[dict[str, bytes], DraftHierarchyStore]:
    """Arrays of both separators and 0 dims, and keys that are no chunks between the chunks."""
    base = {
        "zarr.json": json.dumps(ENTRY_POINT).encode(),
        "meta/root/s.array.json": draft_array([4, 4], [1, 1]),
        "meta/root/g/dot.array.json": draft_array([4, 4], [1, 1], "."),
        "meta/root/p.array.json": draft_array([], []),
        "meta/root/q.array.json": draft_array([], [], "."),
        "data/root/s/c0/1": b"01",
        "data/root/s/c3/2": b"32",
        "data/root/s/c3/x": b"other",
        "data/root/s/c3.2": b"other",
        "data/root/s/c/note": b"other",
        "data/root/s/c/0/0": b"hidden: v3 would take it for a chunk",
        "data/root/s/zarr.json": b"hidden: v3 would take it for a document",
        "data/root/s/.zattrs": b"hidden: v3 has no such document",
        "data/root/s/7": b"other",
        "data/root/g/dot/c0.1": b"01",
        "data/root/g/dot/c1/2": b"other",
        "data/root/p/c0": b"as 2.18 writes",
        "data/root/p/c": b"shadowed",
        "data/root/q/c": b"as the draft says",
        "data/root/g/c0/0": b"other: g is a group",
        "data/root/c/0": b"other: the root is a group",
        "elsewhere/zarr.json": b"not of the hierarchy",
        "README": b"not of the hierarchy",
    }
    return base, DraftHierarchyStore(base)


SHOWN = {
    "s/c/0/1": b"01",
    "s/c/3/2": b"32",
    "s/c3/x": b"other",
    "s/c3.2": b"other",
    "s/c/note": b"other",
    "s/7": b"other",
    "g/dot/c.0.1": b"01",
    "g/dot/c1/2": b"other",
    "p/c": b"as 2.18 writes",
    "q/c": b"as the draft says",
    "g/c0/0": b"other: g is a group",
    "c/0": b"other: the root is a group",
}
DOCUMENTS = [
    "zarr.json",
    "s/zarr.json",
    "g/zarr.json",
    "g/dot/zarr.json",
    "p/zarr.json",
    "q/zarr.json",
]
