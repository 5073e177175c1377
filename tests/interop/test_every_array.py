"""Every kind of array, made here and read by others, made by others and read here.

One table: declaration × separator × order × form of the index × geometry. Native readers read
the base store where its metadata is theirs; for the rest they read the chunks that the store
shows, each written out as an object of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import zarr
from zarr.codecs import TransposeCodec

from zarr_shardstore import DraftHierarchyStore, ShardingMapping, ShardingStore

ts = pytest.importorskip("tensorstore")
pytest.importorskip("zarrs")

RNG = np.random.default_rng(11)

GEOMETRIES = {
    # shape, chunks, chunks_per_shard
    "0-d": ((), (), ()),
    "1-d": ((23,), (4,), (3,)),
    "asymmetric": ((7, 5, 6), (2, 3, 1), (3, 1, 2)),
    "one row of shards": ((4, 9), (1, 2), (4, 2)),
    "5-d": ((3, 2, 4, 1, 5), (1, 2, 2, 1, 2), (2, 1, 1, 1, 3)),
}
INDEXES: dict[str, dict[str, Any]] = {
    "default index": {},
    "no checksum": {"index_codecs": ["bytes"]},
    "at the start": {"index_location": "start"},
    "start, no checksum, big endian": {
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "big"}}],
        "index_location": "start",
    },
}
NATIVE = ["v3 codec", "v3 transformers", "v3 v2-keys", "v2"]
"""Declarations of arrays whose plain form native readers write; for the draft see
test_draft_zarr218.py."""


@dataclass
class Case:
    """One row of the table."""

    declaration: str
    separator: str
    order: Literal["C", "F"]
    index: dict[str, Any]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    cps: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        options = {"chunks_per_shard": self.cps, **self.index}
        if self.declaration == "v3 transformers":
            options["declaration"] = "storage_transformers"
        return options

    def open(self, base: Any, **options: Any) -> Any:
        store = ShardingStore(base, **options)
        return DraftHierarchyStore(store) if self.declaration == "draft" else store

    def create(self, store: Any) -> zarr.Array[Any]:
        """An array in a group, that Zarr itself makes through a store."""
        format_2 = self.declaration == "v2"
        style = "v2" if format_2 or self.declaration == "v3 v2-keys" else "default"
        filters: Any = ()
        if not format_2 and self.order == "F" and self.shape:
            axes = tuple(reversed(range(len(self.shape))))
            filters = [TransposeCodec(order=axes)]
        return zarr.create_array(
            store,
            name="g/a",
            shape=self.shape,
            chunks=self.chunks,
            dtype=">i4" if format_2 else "int32",
            fill_value=7,
            zarr_format=2 if format_2 else 3,
            order=self.order if format_2 else None,
            filters=None if format_2 else filters,
            compressors=None,
            chunk_key_encoding={"name": style, "separator": self.separator},
        )

    def data(self) -> np.ndarray:
        return RNG.integers(0, 99, self.shape, dtype="int32")


def cases(declarations: list[str]) -> list[Any]:
    """Every second row of the table: each two properties meet, but not each three."""
    rows: list[Any] = []
    orders: tuple[Literal["C", "F"], ...] = ("C", "F")
    table = product("/.", orders, INDEXES, GEOMETRIES)
    places = product(range(2), range(2), range(len(INDEXES)), range(len(GEOMETRIES)))
    for (separator, order, index, geometry), place in zip(table, places, strict=True):
        for n, declaration in enumerate(declarations):
            if (sum(place) + n) % 2 == 0:
                case = Case(declaration, separator, order, INDEXES[index], *GEOMETRIES[geometry])
                label = f"{declaration}, {separator}, {order}, {index}, {geometry}"
                rows.append(pytest.param(case, id=label))
    return rows


def tensorstore_at(case: Case, path: Path) -> Any:
    driver = "zarr" if case.declaration == "v2" else "zarr3"
    return ts.open({"driver": driver, "kvstore": f"file://{path}/"}).result()


def is_native(case: Case) -> bool:
    return case.declaration in ("v3 codec", "v3 v2-keys")


def read_natively(case: Case, path: Path) -> list[np.ndarray]:
    """The values that each reader finds that can read such an array."""
    found = [np.asarray(tensorstore_at(case, path).read().result())]
    pipelines = ["zarr.core.codec_pipeline.BatchedCodecPipeline"]
    if hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
        pipelines.append("zarr.core.codec_pipeline.FusedCodecPipeline")
    if case.declaration != "v2":
        pipelines.append("zarrs.ZarrsCodecPipeline")
    for pipeline in pipelines:
        with zarr.config.set({"codec_pipeline.path": pipeline}):
            is_lost = case.shape == () and is_native(case) and zarr.__version__ < "3.2"
            if not is_lost:  # zarr 3.1 has an error for a native 0-d sharded array
                found.append(np.asarray(zarr.open_array(str(path), mode="r")[...]))
    return found


def is_chunk(key: str) -> bool:
    return not key.endswith((".json", ".zarray", ".zgroup", ".zattrs"))


def chunks_of(store: Mapping[str, bytes]) -> dict[str, bytes]:
    return {key: value for key, value in store.items() if is_chunk(key)}


def change(z: Any, data: np.ndarray) -> None:
    """Update a part that is no whole chunk, and make some chunks missing again."""
    if not data.shape:
        data[...] += 1
        z[...] = data
        return
    data[..., :1] += 100
    z[..., :1] = data[..., :1]
    last = data.shape[0] - 1
    data[last:] = 7
    z[last:] = 7


@pytest.mark.thorough(of=9)
@pytest.mark.parametrize("case", cases([*NATIVE, "draft"]))
def test_made_here_read_by_others(tmp_path: Path, case: Case) -> None:
    """Sharded here; read through a store without options, natively, and written out again."""
    base, plain = tmp_path / "base", tmp_path / "plain"
    data = case.data()
    z = case.create(case.open(base, **case.options))
    z[...] = data
    change(z, data)

    again = zarr.open_array(case.open(base), path="g/a")
    assert (again.shape, again.chunks, again.shards) == (case.shape, case.chunks, None)
    np.testing.assert_array_equal(again[...], data)
    if is_native(case):
        for values in read_natively(case, base / "g" / "a"):
            np.testing.assert_array_equal(values, data)

    # Each chunk that the store shows, as an object of its own, is what Zarr would have stored.
    if case.declaration != "draft":
        for key, value in ShardingMapping(base).items():
            (plain / key).parent.mkdir(parents=True, exist_ok=True)
            (plain / key).write_bytes(value)
        for values in read_natively(case, plain / "g" / "a"):
            np.testing.assert_array_equal(values, data)

    n_chunks = len(chunks_of(ShardingMapping(base)))
    ShardingMapping(base).flush()
    n_objects = len(chunks_of({p.as_posix(): b"" for p in base.rglob("*") if p.is_file()}))
    assert case.shape == () or n_objects < n_chunks


@pytest.mark.thorough(of=9)
@pytest.mark.parametrize("case", cases(NATIVE))
def test_made_by_others_read_here(tmp_path: Path, case: Case) -> None:
    """Plain chunks of tensorstore, set key by key through a store that shards them."""
    plain, base = tmp_path / "plain", tmp_path / "base"
    data = case.data()
    case.create(zarr.storage.LocalStore(plain))
    foreign = tensorstore_at(case, plain / "g" / "a")
    foreign.write(data).result()
    change(foreign, data)

    sharded = ShardingMapping(base, **case.options)
    stored = {
        p.relative_to(plain).as_posix(): p.read_bytes() for p in plain.rglob("*") if p.is_file()
    }
    for key in sorted(stored, key=is_chunk):  # metadata first
        sharded[key] = stored[key]
    assert chunks_of(sharded) == chunks_of(stored)
    z = zarr.open_array(case.open(base), path="g/a")
    np.testing.assert_array_equal(z[...], data)
    if is_native(case):
        tensorstore_at(case, base / "g" / "a").write(data + 1).result()
        np.testing.assert_array_equal(z[...], data + 1)
