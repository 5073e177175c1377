"""`ShardedCodecPipeline`: arrays hold what is written, and what zarr's pipeline would store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from zarr.storage import LocalStore, MemoryStore

from tests.support.bases import temporary_directory
from tests.support.kit import tuned
from tests.support.pipeline_arrays import (
    CHUNKS,
    KINDS,
    OURS,
    SHAPE,
    THEIRS,
    chunk_keys,
    make_array,
    make_store,
)
from tests.support.rounds import rounds
from zarr_shardstore import ShardingMapping, ShardingStore


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    with zarr.config.set({"codec_pipeline.path": OURS}):
        yield


slices = st.tuples(
    *(
        st.one_of(
            st.integers(0, n - 1),
            st.builds(
                lambda a, b, step: slice(min(a, b), max(a, b) + 1, step),
                st.integers(0, n - 1),
                st.integers(0, n - 1),
                st.integers(1, 3),
            ),
            st.just(slice(None)),
        )
        for n in SHAPE
    )
)
lists = st.tuples(
    *(
        st.one_of(st.lists(st.integers(0, n - 1), min_size=1, unique=True), st.integers(0, n - 1))
        for n in SHAPE
    )
)
steps = st.lists(
    st.tuples(
        st.one_of(st.tuples(st.just("basic"), slices), st.tuples(st.just("orthogonal"), lists)),
        st.sampled_from(["values", "scalar", "fill", "read"]),
        st.integers(1, 99),
    ),
    max_size=7,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [1, 64 * 2**20], ids=["many units", "one unit"])
@settings(max_examples=rounds(25))
@given(
    steps=steps,
    fill=st.sampled_from([0, 5]),
    write_empty=st.booleans(),
    is_local=st.booleans(),
)
def test_any_sequence_of_reads_and_writes_equals_numpy(
    kind: str, nbytes: int, steps: list[Any], fill: int, write_empty: bool, is_local: bool
) -> None:
    base = LocalStore(temporary_directory()) if is_local else MemoryStore()
    with tuned(pipeline_write_nbytes=nbytes, pipeline_read_nbytes=nbytes):
        z = make_array(
            make_store(kind, base),
            kind,
            fill_value=fill,
            config={"write_empty_chunks": write_empty},
        )
        expected = np.full(SHAPE, fill, dtype=z.dtype)
        written = np.zeros(SHAPE, dtype=bool)
        for (how, selection), what, number in steps:
            index = selection if how == "basic" else outer(selection)
            at = z if how == "basic" else z.oindex
            if what == "read":
                assert_array_equal(at[selection], expected[index])
                continue
            part = expected[index]
            value: Any = {
                "values": np.arange(part.size, dtype=part.dtype).reshape(part.shape) + number,
                "scalar": number,
                "fill": fill,
            }[what]
            at[selection] = value
            expected[index] = value
            written[index] = True
        assert_array_equal(z[...], expected)
        assert len(chunk_keys(z)) == n_chunks(expected, written, fill, write_empty)
        again = zarr.open_array(z.store_path.store, path="a", mode="r")
        assert_array_equal(again[...], expected)


def outer(selection: tuple[Any, ...]) -> tuple[Any, ...]:
    """numpy's index for lists along each dimension; an int drops its own."""
    if all(isinstance(s, list) for s in selection):
        return np.ix_(*selection)
    return selection


def n_chunks(data: Any, written: Any, fill: int, write_empty: bool) -> int:
    """How many chunks there are, if each that was written is, or each that is not empty."""
    corners = itertools.product(*(range(0, n, c) for n, c in zip(SHAPE, CHUNKS, strict=True)))
    regions = [tuple(slice(a, a + c) for a, c in zip(at, CHUNKS, strict=True)) for at in corners]
    return sum(bool((written if write_empty else data != fill)[region].any()) for region in regions)


@pytest.mark.parametrize("fill", [np.nan, -0.0, 0.0])
@pytest.mark.parametrize("value", [np.nan, -0.0, 0.0, 1.0])
def test_which_chunks_are_empty_is_what_zarr_says(fill: float, value: float) -> None:
    stored = []
    for path in (OURS, THEIRS):
        with zarr.config.set({"codec_pipeline.path": path}):
            z = make_array(ShardingStore({}, chunks_per_shard=2), dtype="f4", fill_value=fill)
            z[:4] = np.full((4, 7), value)
            z[5, 5] = value
            stored.append(chunk_keys(z))
    assert stored[0] == stored[1]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "<U3", "fill_value": "", "data": np.array(["a", "bcd", ""])},
        {"dtype": "f8", "fill_value": np.nan, "data": np.array([np.nan, 1, 2])},
        {"dtype": "M8[s]", "fill_value": 0, "data": np.array([1, 2, 0], "M8[s]")},
        {"dtype": "c8", "fill_value": 1j, "data": np.array([1, 1j, 0], "c8")},
        {"dtype": "?", "fill_value": True, "data": np.array([True, False, True])},
        {"dtype": str, "fill_value": "x", "data": np.array(["abc", "x", ""], object)},
    ],
    ids=lambda options: str(options["dtype"]),
)
@pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification")
def test_every_data_type_is_read_as_written(options: dict[str, Any]) -> None:
    data = options.pop("data")
    z = zarr.create_array(
        ShardingStore({}, chunks_per_shard=2), name="a", shape=(3,), chunks=(1,), **options
    )
    z[:] = data
    assert_array_equal(np.asarray(z[:]), data)
    z[1:] = data[:2]
    assert_array_equal(np.asarray(z[1:]), data[:2])


def test_a_zero_dimensional_array_is_read_as_written() -> None:
    z = zarr.create_array(ShardingStore({}, chunks_per_shard=2), name="a", shape=(), dtype="i4")
    z[...] = 7
    assert z[...] == 7


PLAIN_CODECS = [
    None,
    zarr.codecs.ZstdCodec(level=3),
    zarr.codecs.GzipCodec(),
    zarr.codecs.BloscCodec(cname="lz4", shuffle="shuffle"),
]


@pytest.mark.parametrize("codec", PLAIN_CODECS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("dtype", ["bool", "i1", ">u2", "<f4", "f8", "c8"])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_chunks_of_plain_numbers(dtype: str, codec: Any, endian: Any) -> None:
    """They take a way of their own; what is read is what zarr's codecs read."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 100, (7, 9)).astype(dtype)
    base: dict[str, bytes] = {}
    with zarr.config.set({"codec_pipeline.path": OURS}):
        z = zarr.create_array(
            ShardingStore(base, chunks_per_shard=2),
            name="z",
            shape=data.shape,
            chunks=(2, 3),
            dtype=dtype,
            serializer=zarr.codecs.BytesCodec(endian=endian),
            compressors=codec,
            fill_value=0,
        )
        z[:6] = data[:6]
        data[6] = 0
        ours: Any = zarr.open_array(ShardingStore(base), path="z")
        assert_array_equal(ours[:], data)
        assert_array_equal(ours[1:5:2, 3], data[1:5:2, 3])
        assert_array_equal(ours.oindex[[0, 5], [8, 1]], data[np.ix_([0, 5], [8, 1])])
        assert ours[:].dtype == ours.dtype
    assert_array_equal(zarr.open_array(ShardingStore(base), path="z")[:], data)


def test_a_chunk_of_another_size_is_an_error() -> None:
    """Bytes that are no whole chunk are not taken for one."""
    base: dict[str, bytes] = {}
    with zarr.config.set({"codec_pipeline.path": OURS}):
        store = ShardingStore(base, chunks_per_shard=2)
        z = zarr.create_array(
            store, name="z", shape=(4,), chunks=(2,), dtype="u2", compressors=None
        )
        z[:] = 1
        for value in (b"123", b"123456"):
            ShardingMapping(store)["z/c/1"] = value
            with pytest.raises(ValueError, match=r"size|shape"):
                z[:]
