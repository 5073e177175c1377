"""What is on disk is what native readers read and write: zarr-python, tensorstore, zarrs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec
from zarr.core.metadata import ArrayV3Metadata
from zarr.core.sync import sync
from zarr.metadata.migrate_v3 import migrate_v2_to_v3, remove_metadata

from zarr_shardstore import ShardingStore

ts = pytest.importorskip("tensorstore")
pytest.importorskip("zarrs")

RNG = np.random.default_rng(3)
READERS = ["zarr", "zarr fused", "zarrs", "tensorstore"]
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"
CASES = [
    # shape, chunks, chunks_per_shard, dtype
    ((23,), (4,), (3,), "int16"),
    ((11, 7), (2, 3), (2, 2), "float64"),
    ((5, 6, 7), (2, 2, 2), (3, 1, 2), "uint8"),
    ((3, 2, 4, 1, 5), (1, 2, 2, 1, 2), (2, 1, 1, 1, 3), "complex64"),
    ((), (), 2, "int32"),
]


def pipeline_of(name: str) -> Any:
    paths = {
        "zarr": "zarr.core.codec_pipeline.BatchedCodecPipeline",
        "zarr fused": FUSED,
        "zarrs": "zarrs.ZarrsCodecPipeline",
    }
    if name == "zarr fused" and not hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
        pytest.skip("this zarr has no fused pipeline")
    return zarr.config.set({"codec_pipeline.path": paths[name]})


def tensorstore_array(path: Path) -> Any:
    return ts.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result()


def read_natively(reader: str, path: Path) -> np.ndarray:
    if reader == "tensorstore":
        return np.asarray(tensorstore_array(path).read().result())
    with pipeline_of(reader):
        return np.asarray(zarr.open_array(str(path), mode="r")[...])


@pytest.mark.thorough(of=7)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("encoding", ["default/", "default.", "v2/", "v2."])
@pytest.mark.parametrize(("shape", "chunks", "cps", "dtype"), CASES)
def test_native_readers_read_our_shards(
    tmp_path: Path,
    reader: str,
    encoding: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    cps: Any,
    dtype: str,
) -> None:
    """Equal values, with chunks at the edge, chunks of fill value, and chunks updated later."""
    data = RNG.integers(0, 2, shape).astype(dtype) * 7
    store = ShardingStore(tmp_path, chunks_per_shard=cps)
    z = zarr.create_array(
        store,
        name="z",
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=0,
        chunk_key_encoding={"name": encoding[:-1], "separator": encoding[-1]},
    )
    z[...] = data
    if shape:
        data[..., :1] += 1
        z[..., :1] = data[..., :1]
        data[..., -2:] = 0
        z[..., -2:] = 0
    np.testing.assert_array_equal(read_natively(reader, tmp_path / "z"), data)


def index_codecs(checksum: bool) -> list[Any]:
    return [BytesCodec(), Crc32cCodec()] if checksum else [BytesCodec()]


@pytest.mark.parametrize("writer", READERS)
@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("checksum", [True, False])
def test_native_arrays_are_flat_chunks(
    tmp_path: Path, writer: str, location: Literal["start", "end"], checksum: bool
) -> None:
    """Whoever wrote it: read, updated chunk by chunk, and read natively again."""
    path = tmp_path / "z"
    data = RNG.integers(1, 99, (11, 7)).astype("int32")
    native = zarr.create_array(
        str(tmp_path),
        name="z",
        shape=data.shape,
        dtype=data.dtype,
        chunks=(4, 6),
        fill_value=0,
        serializer=ShardingCodec(
            chunk_shape=(2, 3), index_codecs=index_codecs(checksum), index_location=location
        ),
        compressors=None,
    )
    if writer == "tensorstore":
        tensorstore_array(path).write(data).result()
    else:
        with pipeline_of(writer):
            zarr.open_array(str(path), mode="r+")[...] = data
    assert native.shards == (4, 6)

    z = zarr.open_array(ShardingStore(tmp_path), path="z")
    assert (z.chunks, z.shards) == ((2, 3), None)
    np.testing.assert_array_equal(z[:], data)
    z[3:5, 2:4] = -1
    data[3:5, 2:4] = -1
    z.attrs["touched"] = True
    for reader in ("zarr", "tensorstore"):
        np.testing.assert_array_equal(read_natively(reader, path), data)
    document: Any = zarr.open_array(str(path), mode="r").metadata.to_dict()
    (codec,) = document["codecs"]
    assert codec["configuration"]["index_location"] == location


def codecs_of(z: zarr.Array[Any]) -> Any:
    assert isinstance(z.metadata, ArrayV3Metadata)
    return z.metadata.codecs


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize("native_view", ["flat", "passthrough"])
def test_what_cannot_be_expressed_is_left_to_zarr(native_view: Any, tmp_path: Path) -> None:
    """A codec around the sharding: the array is shown, read and written as it is."""
    data = RNG.integers(0, 99, (8, 8)).astype("int32")
    native = zarr.create_array(
        str(tmp_path),
        name="z",
        shape=data.shape,
        dtype=data.dtype,
        chunks=(4, 4),
        serializer=ShardingCodec(chunk_shape=(2, 2)),
        compressors=GzipCodec(),
    )
    native[:] = data
    store = ShardingStore(tmp_path, chunks_per_shard=2, native=native_view)
    z = zarr.open_array(store, path="z")
    np.testing.assert_array_equal(z[:], data)
    z[0, 0] = 5
    z.attrs["a"] = 1
    assert native[0, 0] == 5
    assert codecs_of(zarr.open_array(str(tmp_path / "z"), mode="r")) == codecs_of(native)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">i4"])
def test_zarrs_own_migration_hands_v2_shards_to_native_readers(
    tmp_path: Path, order: Any, dtype: str
) -> None:
    """Metadata alone is written anew, through the store; the shards are those of the codec."""
    store = ShardingStore(tmp_path, chunks_per_shard=(2, 3))
    data = RNG.integers(1, 99, (11, 7)).astype(dtype)
    z = zarr.create_array(
        store, name="z", shape=data.shape, chunks=(2, 2), dtype=dtype, order=order, zarr_format=2
    )
    z[:] = data
    shards = {p.name: p.read_bytes() for p in (tmp_path / "z").glob("*.*") if p.name[0] != "."}
    migrate_v2_to_v3(input_store=ShardingStore(tmp_path))
    sync(remove_metadata(ShardingStore(tmp_path), zarr_format=2))
    for reader in ("zarr", "zarrs", "tensorstore"):
        np.testing.assert_array_equal(read_natively(reader, tmp_path / "z"), data)
    assert {name: (tmp_path / "z" / name).read_bytes() for name in shards} == shards
    again = zarr.open_array(ShardingStore(tmp_path), path="z")
    assert (again.chunks, again.shards) == ((2, 2), None)
    np.testing.assert_array_equal(again[:], data)
