"""`ShardedCodecPipeline` among what else zarr has: other stores, codecs, settings, entry points."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BytesCodec, ZstdCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.registry import fully_qualified_name, register_codec
from zarr.storage import LocalStore, LoggingStore, MemoryStore

from tests.support.kit import CountingStore
from tests.support.pipeline_arrays import KINDS, OURS, SHAPE, THEIRS, make_array, make_store
from zarr_shardstore import ShardingStore


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    with zarr.config.set({"codec_pipeline.path": OURS}):
        yield


def contents(store: MemoryStore) -> dict[str, bytes]:
    return {key: value.to_bytes() for key, value in store._store_dict.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_shards_hold_the_same_bytes_as_with_zarr(kind: str) -> None:
    found = []
    for path in (OURS, THEIRS):
        with zarr.config.set({"codec_pipeline.path": path}):
            base = MemoryStore()
            z = make_array(make_store(kind, base), kind, fill_value=5)
            z[...] = np.arange(77, dtype="i2").reshape(SHAPE)
            z[1:4, 2:] = 5
            found.append(contents(base))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["?", ">u2", "<i8", "f2", "c16"])
def test_every_data_type_is_stored_and_read_as_by_zarr(dtype: str) -> None:
    """From values in any byte order and memory layout, with chunks at the edge."""
    rng, shape = np.random.default_rng(0), SHAPE
    kind = np.dtype(dtype)
    data = np.frombuffer(rng.bytes(77 * kind.itemsize), kind).reshape(shape).copy()
    if kind.kind in "bfc":
        data = rng.integers(0, 3, shape).astype(kind)
    data[:4] = np.zeros((), kind)
    layouts = [data, np.asfortranarray(data), np.repeat(data, 2, axis=1)[:, ::2]]
    if kind.kind in "iufc":
        layouts.append(data.astype(kind.newbyteorder()))
    orders: Any = (("little", ZstdCodec(checksum=True)), ("big", None))
    for order, codec in orders:
        serializer = BytesCodec(endian=order)
        options: Any = {"dtype": dtype, "compressors": codec, "serializer": serializer}
        found = []
        for path, values in [(THEIRS, data), *((OURS, values) for values in layouts)]:
            with zarr.config.set({"codec_pipeline.path": path}):
                base = MemoryStore()
                z = make_array(make_store("v3", base), shape=shape, **options, fill_value=None)
                z[...] = values
                np.testing.assert_array_equal(z[...], data)
                found.append(contents(base))
            with zarr.config.set({"codec_pipeline.path": THEIRS}):
                again: Any = zarr.open_array(z.store_path.store, path="a")
                np.testing.assert_array_equal(again[...], data)
        assert all(each.keys() == found[0].keys() for each in found)
        if codec is None:  # zarr's libzstd is another one
            assert all(each == found[0] for each in found)


@pytest.mark.parametrize("dtype", ["i4", "M8[s]", "?", "f8"])
@pytest.mark.parametrize("sides", [(1,), (2,), (1, 1), (1, 4)])
def test_a_value_of_one_element_is_taken_where_zarr_takes_it(dtype: str, sides: Any) -> None:
    """As `z[0] = np.array([7])`, which a chunk of one element takes whole."""
    shape, chunks = (4,) * len(sides), sides
    results = []
    for base in (MemoryStore(), ShardingStore(MemoryStore(), 2)):
        z: Any = zarr.create_array(base, name="z", shape=shape, chunks=chunks, dtype=dtype)
        for selection in (0, (0,) * len(sides), slice(0, 1), ...):
            try:
                z[selection] = np.array([7]).astype(dtype)
            except (ValueError, IndexError):
                results.append("refused")
            else:
                results.append(z[...].tobytes())
    assert results[:4] == results[4:]


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"shards": (6, 6)}], ids=str)
def test_other_stores_hold_the_same_bytes_as_with_zarr(options: dict[str, Any]) -> None:
    data = np.arange(77, dtype="i2").reshape(SHAPE)
    found = []
    for path in (OURS, THEIRS):
        with zarr.config.set({"codec_pipeline.path": path}):
            base = MemoryStore()
            z = make_array(base, **options)
            z[...] = data
            z[1:4, 2:] = 0
            np.testing.assert_array_equal(z[1:, ::2], np.where(z[...] == 0, 0, data)[1:, ::2])
            found.append(contents(base))
    assert found[0] == found[1]


def test_native_shards_that_pass_through_are_written_as_zarr_writes_them() -> None:
    found = []
    for path in (OURS, THEIRS):
        with zarr.config.set({"codec_pipeline.path": path}):
            base = MemoryStore()
            z = make_array(ShardingStore(base, native="passthrough"), shards=(6, 6))
            z[...] = 3
            z[1:4, 2:] = 4
            assert (z[1:4, 2:] == 4).all()
            assert z[0, 0] == 3
            found.append(contents(base))
    assert found[0] == found[1]


def test_of_native_shards_that_pass_through_only_a_part_is_read() -> None:
    base = CountingStore()
    z = make_array(ShardingStore(base, native="passthrough"), shards=(6, 6))
    z[...] = 3
    base.forget()
    assert z[0, 0] == 3
    assert base.reads
    assert all(byte_range is not None for _, byte_range in base.reads)


def test_a_store_inside_a_wrapper_of_zarr_is_used_through_the_wrapper() -> None:
    base = MemoryStore()
    logged = LoggingStore(make_store("v3", base), log_level="ERROR")
    z = make_array(logged)
    z[...] = 1
    assert (z[...] == 1).all()
    assert logged.counter["set"] > 17


def test_a_codec_that_can_only_be_awaited_works() -> None:
    register_codec("test.only_async", OnlyAsync)
    z = make_array(make_store("v3", {}), compressors=[OnlyAsync()])
    data = np.arange(77, dtype="i2").reshape(SHAPE)
    z[...] = data
    z[1:4, 2:] = 0
    data[1:4, 2:] = 0
    np.testing.assert_array_equal(z[...], data)


@pytest.mark.parametrize("redefined", ["_encode_single", "_decode_single"])
def test_a_codec_runs_the_method_that_a_subclass_redefines(redefined: str) -> None:
    """The subclass inherits the blocking methods of zarr's codec, which do something else."""

    class Reversing(ZstdCodec):
        pass

    async def reverse(self: Any, data: Buffer, spec: ArraySpec) -> Buffer:
        done = await getattr(ZstdCodec, redefined)(self, data, spec)
        return spec.prototype.buffer.from_bytes(done.to_bytes()[::-1])

    setattr(Reversing, redefined, reverse)
    register_codec("zstd", Reversing)
    found = []
    for path in (OURS, THEIRS):
        settings = {"codec_pipeline.path": path, "codecs.zstd": fully_qualified_name(Reversing)}
        with zarr.config.set(settings):
            stored = MemoryStore()
            z = make_array(
                make_store("v3", stored), shape=(6,), chunks=(3,), compressors=[Reversing()]
            )
            z[...] = np.arange(6, dtype="i2")
            found.append(contents(stored) if redefined == "_encode_single" else z[...].tolist())
    assert found[0] == found[1]
    assert found[1] != list(range(6))


@dataclass(frozen=True)
class OnlyAsync(BytesBytesCodec):
    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: Any) -> OnlyAsync:
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return {"name": "test.only_async"}

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        await asyncio.sleep(0)
        return chunk_spec.prototype.buffer.from_bytes(chunk_bytes.to_bytes()[::-1])

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await self._encode_single(chunk_bytes, chunk_spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        return input_byte_length


# ---------------------------------------------------------------------- zarr's ways


def test_an_array_can_be_pickled(tmp_path: Path) -> None:
    z = make_array(make_store("v3", LocalStore(tmp_path)))
    z[...] = 1
    again = pickle.loads(pickle.dumps(z))
    again[0, 0] = 2
    assert z[0, 0] == 2


def test_missing_chunks_are_an_error_where_zarr_is_told_so() -> None:
    if "array.read_missing_chunks" not in zarr.config:
        pytest.skip("this zarr has no such setting")
    z = make_array(make_store("v3", {}), config={"read_missing_chunks": False})
    z[:6, :6] = 1
    assert (z[:6, :6] == 1).all()
    with pytest.raises(Exception, match="not found"):
        z[...]


def test_zarr_finds_it_by_its_entry_point(tmp_path: Path) -> None:
    """What pyproject.toml declares is enough: nothing of this package is imported before."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["zarr.codec_pipeline"]
    dist = tmp_path / "declared-1.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1\n")
    lines = "\n".join(f"{name} = {value}" for name, value in declared.items())
    (dist / "entry_points.txt").write_text(f"[zarr.codec_pipeline]\n{lines}\n")
    code = f"""
import sys
sys.path[:0] = {[str(tmp_path), str(Path.cwd())]!r}
import zarr
zarr.config.set({{"codec_pipeline.path": {OURS!r}}})
zarr.create_array({{}}, shape=(2,), dtype="u1")
print(zarr.registry.get_pipeline_class().__name__)
print(any("sharding_store" in name for name in sys.modules))
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["ShardedCodecPipeline", "False"]
