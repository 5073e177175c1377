"""The codecs of a chunk, called without zarr's pipeline."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.codecs.numcodecs as numcodecs_of_zarr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numcodecs import Adler32, Blosc, Delta, FixedScaleOffset, Shuffle, Zlib
from numcodecs.abc import Codec
from numcodecs.compat import ensure_bytes
from numpy.testing import assert_array_equal
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, ZstdCodec
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.dtype import parse_dtype

from tests.support.pipeline_arrays import SHAPE, make_array, make_store
from tests.support.rounds import rounds
from zarr_shardstore.zarr_hooks.chunk_codec import ChunkCodec, _blocking_steps

PROTOTYPE = default_buffer_prototype()


def test_codecs_that_zarr_has_are_all_called_without_a_hop() -> None:
    """zarr 3.1 has codecs without blocking methods; they are called directly all the same."""
    for options in (
        {"zarr_format": 2, "compressors": Blosc(), "filters": [Delta("<i2")]},
        {"zarr_format": 2, "compressors": None},
        {"compressors": [ZstdCodec()]},
    ):
        z = make_array(make_store("v3", {}), **options)
        assert ChunkCodec.of(list(z.async_array.codec_pipeline)) is not None
        data = np.arange(77, dtype="i2").reshape(SHAPE)
        z[...] = data
        np.testing.assert_array_equal(z[...], data)


class TwoRows(Codec):  # type: ignore[misc]
    """Compressor that decodes into a matrix, as those of images do."""

    codec_id = "two_rows"

    def encode(self, buf: Any) -> bytes:
        return ensure_bytes(buf)  # type: ignore[no-any-return]

    def decode(self, buf: Any, _: Any = None) -> Any:
        values = np.frombuffer(buf, "u2")
        return values if values.size % 2 else values.reshape(2, -1, order="F")


DELTA, SCALE, SHUFFLE = Delta("i2"), FixedScaleOffset(1, 2, "i2", "f4"), Shuffle(2)
FILTERS = [None, (DELTA,), (SCALE,), (SHUFFLE,), (DELTA, SHUFFLE), (SCALE, SHUFFLE)]
COMPRESSORS = [None, Blosc(), Zlib(1), Adler32(), TwoRows()]
OF_V3: dict[str, tuple[str, dict[str, Any]]] = {
    "Delta": ("i2", {"dtype": "i2"}),
    "Quantize": ("f8", {"digits": 2, "dtype": "f8"}),
    "PackBits": ("?", {}),
    "LZ4": ("u1", {}),
    "CRC32": ("u1", {}),
}


def spec_of(shape: tuple[int, ...], dtype: Any, order: Any = "C") -> ArraySpec:
    config = ArrayConfig(order=order, write_empty_chunks=True)
    return ArraySpec(shape, parse_dtype(dtype, zarr_format=2), 0, config, PROTOTYPE)


def as_zarr_does(codec: Any, data: Any, spec: ArraySpec) -> tuple[Any, Any]:
    """What zarr's own methods encode, and decode again."""

    async def run() -> tuple[Any, Any]:
        (encoded,) = await codec.encode([(data, spec)])
        (decoded,) = await codec.decode([(encoded, spec)])
        return encoded, decoded

    return asyncio.run(run())


def values_of(data: Any) -> Any:
    return data.to_bytes() if isinstance(data, Buffer) else data.as_numpy_array()


def assert_as_zarr(codec: Any, data: Any, spec: ArraySpec) -> None:
    steps = _blocking_steps(codec)
    assert steps is not None
    encode, decode = steps
    encoded, decoded = as_zarr_does(codec, data, spec)
    ours = encode(data, spec)
    assert type(ours) is type(encoded)
    assert_array_equal(values_of(ours), values_of(encoded))
    again = decode(encoded, spec)
    assert type(again) is type(decoded)
    assert_array_equal(values_of(again), values_of(decoded))
    if not isinstance(again, Buffer):
        assert (again.shape, again.dtype) == (decoded.shape, decoded.dtype)


@settings(max_examples=rounds(1600))
@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    order=st.sampled_from("CF"),
    is_transposed=st.booleans(),
    filters=st.sampled_from(FILTERS),
    compressor=st.sampled_from(COMPRESSORS),
    seed=st.integers(0, 99),
)
def test_chunks_of_v2_are_those_of_zarr(
    shape: Any, order: Any, is_transposed: bool, filters: Any, compressor: Any, seed: int
) -> None:
    """Bytes and values, for numbers in any memory layout."""
    assume(not (filters and isinstance(compressor, TwoRows)))
    values = np.random.default_rng(seed).integers(-99, 99, shape).astype("i2")
    values = values.copy("F") if is_transposed else values
    codec = V2Codec(filters=filters, compressor=compressor)
    assert_as_zarr(codec, PROTOTYPE.nd_buffer.from_numpy_array(values), spec_of(shape, "i2", order))


@pytest.mark.parametrize("dtype", [str, "U3", "S3", "M8[s]", "?", [("a", "i4"), ("b", "U2")]])
def test_other_types_of_v2_are_those_of_zarr(dtype: Any) -> None:
    """Texts of any length pass a filter; the others are bytes."""
    z: Any = zarr.create_array({}, shape=(2, 3), dtype=dtype, zarr_format=2, fill_value=None)
    z[0] = np.zeros(3, z.dtype) if dtype is not str else np.array(["a", "", "öß"], z.dtype)
    (codec,) = z.async_array.codec_pipeline
    spec = spec_of((2, 3), z.dtype)
    assert_as_zarr(codec, PROTOTYPE.nd_buffer.from_numpy_array(z[:]), spec)


def test_objects_without_a_filter_are_refused() -> None:
    """Their bytes would be those of pointers."""
    data = PROTOTYPE.nd_buffer.from_numpy_array(np.array(["a"], object))
    spec = spec_of((1,), np.dtypes.StringDType())
    dtype: Any = SimpleNamespace(to_native_dtype=lambda: np.dtype(object))
    spec = replace(spec, dtype=dtype)
    steps = _blocking_steps(V2Codec(filters=None, compressor=None))
    assert steps is not None
    with pytest.raises(RuntimeError, match="object"):
        steps[0](data, spec)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr")
@pytest.mark.parametrize("name", OF_V3)
def test_numcodecs_in_v3_are_those_of_zarr(name: str) -> None:
    dtype, options = OF_V3[name]
    codec = getattr(numcodecs_of_zarr, name)(**options)
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    data: Any = PROTOTYPE.nd_buffer.from_numpy_array(values)
    if isinstance(codec, BytesBytesCodec):
        data = PROTOTYPE.buffer.from_bytes(values.tobytes())
    assert_as_zarr(codec, data, spec_of(values.shape, dtype))


def test_a_codec_with_methods_of_its_own_is_awaited() -> None:
    """A subclass may do something else than zarr's class."""

    class Other(V2Codec):
        async def _decode_single(self, *_: Any) -> Any:
            raise NotImplementedError

        _decode_sync: Any = None

    assert ChunkCodec.of([Other(filters=None, compressor=None)]) is None


BLOSC_ARRAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "v3": lambda: {"compressors": [BloscCodec()]},
    "v3, numcodecs": lambda: {"compressors": [numcodecs_of_zarr.Blosc()]},
    "v2": lambda: {"zarr_format": 2, "compressors": Blosc(), "filters": [Delta("<i2")]},
}
TRUNCATED = """
import sys, numpy as np
from tests.unit.zarr_hooks.test_chunk_codec import BLOSC_ARRAYS, codec_and_spec

codec, spec = codec_and_spec(BLOSC_ARRAYS[sys.argv[1]]())
chunk = spec.prototype.nd_buffer.from_numpy_array(np.arange(10_000, dtype="i2"))
value = codec.encode(chunk, spec).to_bytes()
plain = codec.plain(spec)
decoders = [lambda v: codec.decode(spec.prototype.buffer.from_bytes(v), spec)]
if plain is not None:
    decoders.append(lambda v: plain.decode(v, spec.shape))
for decode in decoders:
    decode(value)
    for damaged in (value[:n] for n in (0, 8, 15, 16, 17, 100, len(value) - 1)):
        try:
            decode(damaged)
        except RuntimeError:
            continue
        raise AssertionError(len(damaged))
    large = value[:12] + (2**31 - 1).to_bytes(4, "little") + value[16:]
    try:
        decode(large)
    except RuntimeError:
        print("refused")
"""


def codec_and_spec(options: dict[str, Any]) -> tuple[ChunkCodec, ArraySpec]:
    """Return the codec of the chunks of an array, and their spec."""
    z: Any = zarr.create_array({}, shape=(10_000,), chunks=(10_000,), dtype="i2", **options)
    codec = ChunkCodec.of(list(z.async_array.codec_pipeline))
    assert codec is not None
    config = ArrayConfig(order="C", write_empty_chunks=True)
    dtype = parse_dtype("i2", zarr_format=z.metadata.zarr_format)
    return codec, ArraySpec((10_000,), dtype, np.int16(0), config, PROTOTYPE)


@pytest.mark.parametrize("name", BLOSC_ARRAYS)
def test_truncated_blosc_is_refused_before_it_crashes_the_process(name: str) -> None:
    """Blosc reads as many bytes as its header says (numcodecs issue 228)."""
    command = [sys.executable, "-c", TRUNCATED, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"refused"}
