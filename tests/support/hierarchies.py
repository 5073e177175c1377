"""Stores for the tests of tools: documents written by hand, chunks that are any bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import obstore
from zarr.storage import ObjectStore

from tests.support.bases import ALL_BASES
from tests.support.draft import ENTRY_POINT
from tests.support.kit import objects_of
from zarr_shardstore import ShardingMapping

Coords = tuple[int, ...]
Chunks = dict[Coords, bytes]

BASES: dict[str, Callable[[], Any]] = {
    **ALL_BASES,
    "obstore": lambda: ObjectStore(obstore.store.MemoryStore()),
}


@dataclass(frozen=True)
class Kind:
    """A hierarchy and the spelling of its chunk keys."""

    hierarchy: str
    style: str
    separator: str
    order: str = "C"

    def key(self, path: str, coords: Coords) -> str:
        """Key of a chunk, spelled by hand."""
        numbers = self.separator.join(map(str, coords))
        if self.style == "draft":
            suffix = f"c{numbers}"
        elif self.style == "default":
            suffix = f"c{self.separator}{numbers}" if coords else "c"
        else:
            suffix = numbers or "0"
        root = "data/root/" if self.hierarchy == "draft" else ""
        return f"{root}{path}/{suffix}" if path else f"{root}{suffix}"

    def document_key(self, path: str) -> str:
        if self.hierarchy == "draft":
            return f"meta/root/{path}.array.json" if path else "meta/root.array.json"
        name = "zarr.json" if self.hierarchy == "v3" else ".zarray"
        return f"{path}/{name}" if path else name

    def document(self, shape: Coords, chunk_shape: Coords, dtype: str = "u1") -> dict[str, Any]:
        if self.hierarchy == "draft":
            return {
                "attributes": {},
                "chunk_grid": {
                    "chunk_shape": list(chunk_shape),
                    "separator": self.separator,
                    "type": "regular",
                },
                "chunk_memory_layout": self.order,
                "data_type": dtype,
                "extensions": [],
                "fill_value": None,
                "shape": list(shape),
            }
        if self.hierarchy == "v2":
            return {
                "zarr_format": 2,
                "shape": list(shape),
                "chunks": list(chunk_shape),
                "dtype": f"|{dtype}" if dtype == "u1" else f"<{dtype}",
                "compressor": None,
                "fill_value": 0,
                "order": self.order,
                "filters": None,
                "dimension_separator": self.separator,
            }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": {"u1": "uint8", "u2": "uint16", "f4": "float32"}[dtype],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
            "chunk_key_encoding": {
                "name": self.style,
                "configuration": {"separator": self.separator},
            },
            "fill_value": 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "attributes": {"kept": [1, "ü"]},
        }


V3 = Kind("v3", "default", "/")
V2 = Kind("v2", "v2", ".")
DRAFT = Kind("draft", "draft", "/")
KINDS = {
    "v3 /": V3,
    "v3 .": replace(V3, separator="."),
    "v3 v2-keys .": Kind("v3", "v2", "."),
    "v3 v2-keys /": Kind("v3", "v2", "/"),
    "v2 .": V2,
    "v2 / F": Kind("v2", "v2", "/", "F"),
    "draft /": DRAFT,
    "draft .": replace(DRAFT, separator="."),
}


@dataclass(frozen=True)
class ArrayOf:
    """An array as it stands in a store: chunks by coordinates, bytes that nobody can decode."""

    kind: Kind
    path: str
    grid: Coords
    chunk_shape: Coords
    edge: Coords
    chunks: Chunks = field(default_factory=dict)

    @property
    def shape(self) -> Coords:
        parts = zip(self.grid, self.chunk_shape, self.edge, strict=True)
        return tuple(max(0, n * size - cut) for n, size, cut in parts)

    @property
    def document(self) -> dict[str, Any]:
        return self.kind.document(self.shape, self.chunk_shape)

    def objects(self) -> dict[str, bytes]:
        """The store that holds this array alone, with what its hierarchy needs."""
        objects = {self.kind.document_key(self.path): json.dumps(self.document).encode()}
        match self.kind.hierarchy:
            case "draft":
                objects["zarr.json"] = json.dumps(ENTRY_POINT).encode()
            case "v2" if self.path:
                objects[".zgroup"] = b'{"zarr_format": 2}'
                metadata = {".zgroup": {"zarr_format": 2}, f"{self.path}/.zarray": self.document}
                consolidated = {"zarr_consolidated_format": 1, "metadata": metadata}
                objects[".zmetadata"] = json.dumps(consolidated).encode()
                objects[f"{self.path}/.zattrs"] = b'{"kept": true}'
        for coords, value in self.chunks.items():
            objects[self.kind.key(self.path, coords)] = value
        return objects

    def chunk_objects(self) -> dict[str, bytes]:
        return {self.kind.key(self.path, c): value for c, value in self.chunks.items()}

    def shard_keys(self, cps: Coords) -> set[str]:
        """Keys of the shards that have an entry, computed here."""
        shards = {tuple(c // n for c, n in zip(cs, cps, strict=True)) for cs in self.chunks}
        return {self.kind.key(self.path, coords) for coords in shards}


def grid_coords(grid: Coords) -> list[Coords]:
    return list(product(*map(range, grid)))


def view(base: Any) -> dict[str, bytes]:
    """Everything that is seen through the store."""
    return dict(ShardingMapping(base))


def is_document(key: str) -> bool:
    return key.endswith((".json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"))


def meaning(objects: Mapping[str, bytes]) -> dict[str, Any]:
    """Documents parsed, without what says nothing; all other values as they are."""
    return {
        key: _without_nothing(json.loads(value)) if is_document(key) else value
        for key, value in objects.items()
    }


def _without_nothing(doc: Any) -> Any:
    if not isinstance(doc, dict):
        return doc
    return {
        name: _without_nothing(value)
        for name, value in doc.items()
        if not (name == "storage_transformers" and value == [])
    }


def no_staging(base: Any) -> bool:
    return not [key for key in objects_of(base) if key.startswith(".zarr_shardstore")]


class Counting(MutableMapping[str, bytes]):
    """A mapping that notes what is asked of it. Listings are iterations: it cannot tell them."""

    def __init__(self, data: Mapping[str, bytes] = {}) -> None:
        self.data = dict(data)
        self.writes: list[str] = []
        self.reads: list[str] = []

    def __getitem__(self, key: str) -> bytes:
        self.reads.append(key)
        return self.data[key]

    def __setitem__(self, key: str, value: bytes) -> None:
        self.writes.append(key)
        self.data[key] = value

    def __delitem__(self, key: str) -> None:
        self.writes.append(key)
        del self.data[key]

    def pop(self, key: str, *default: Any) -> Any:
        self.writes.append(key)
        return self.data.pop(key, *default)

    def setdefault(self, key: str, default: bytes = b"") -> bytes:
        self.writes.append(key)
        return self.data.setdefault(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.data))

    def __len__(self) -> int:
        return len(self.data)
