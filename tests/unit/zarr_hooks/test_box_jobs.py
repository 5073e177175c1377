"""Whole boxes of chunks store the same bytes, and read the same values, as chunk by chunk."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, TransposeCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from zarr_shardstore import CorruptShardError, ShardingStore
from zarr_shardstore.io import concurrency
from zarr_shardstore.zarr_hooks import box_jobs, pipeline
from zarr_shardstore.zarr_hooks.box import ArrayBox
from zarr_shardstore.zarr_hooks.box_jobs import BoxJob, SlabCodec

Values = npt.NDArray[Any]

DTYPES: dict[str, list[Any]] = {
    "u1": [0, 7],
    "<i4": [0, -1],
    ">u2": [0, 258],
    "<f8": [0.0, -0.0, float("nan"), 1.5],
    "<c8": [0, 1 + 2j],
    "?": [False, True],
    "S3": [b"", b"ab"],
    "<U2": ["", "é"],
    "T": ["", "é", "a long text " * 9],
    "<M8[s]": [np.datetime64("NaT", "s"), np.datetime64(5, "s")],
}
"""Values that the elements, and the fill value, take."""


@contextmanager
def chunk_by_chunk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrayBox, "of_batch", lambda *_: None)
        yield


@contextmanager
def counting_boxes() -> Iterator[list[str]]:
    """The boxes that are read and written."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "write"):
            run = getattr(BoxJob, name)

            def noted(self: Any, *args: Any, name: str = name, run: Any = run) -> Any:
                seen.append(name)
                return run(self, *args)

            patch.setattr(BoxJob, name, noted)
        yield seen


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `create_array`, chunks per shard, values, and a selection."""
    ndim = draw(st.integers(1, 3))
    side = st.integers(1, 7 if ndim < 3 else 4)
    chunks = [draw(st.integers(1, 3)) for _ in range(ndim)]
    shape = [draw(side) * c - draw(st.integers(0, c - 1)) for c in chunks]
    dtype = draw(st.sampled_from([*DTYPES]))
    elements = DTYPES[dtype]
    v2 = draw(st.booleans())
    options: dict[str, Any] = {
        "shape": shape,
        "chunks": chunks,
        "dtype": dtype,
        "fill_value": draw(st.sampled_from(elements)),
        "zarr_format": 2 if v2 else 3,
        "config": {"write_empty_chunks": draw(st.booleans())},
    }
    # zarr 3.1 encodes strings of chunks in Fortran order so that it reads them transposed.
    order = "C" if dtype == "T" else draw(st.sampled_from("CF"))
    if v2:
        options["order"] = order
        options["compressors"] = draw(st.sampled_from([None, "auto"]))
    else:
        options["config"]["order"] = order
        compressors = [None, ZstdCodec(level=1), ZstdCodec(level=3, checksum=True), BloscCodec()]
        options["compressors"] = draw(st.sampled_from(compressors))
        if draw(st.booleans()):
            options["filters"] = [TransposeCodec(order=draw(st.permutations(range(ndim))))]
        if dtype[0] in "<>" and dtype[1] in "iufc":
            options["serializer"] = BytesCodec(endian=draw(st.sampled_from(["little", "big"])))
    options["cps"] = [draw(st.integers(1, 4)) for _ in range(ndim)]
    options["by_argument"] = not v2 and draw(st.booleans())
    some = draw(st.lists(st.sampled_from(range(len(elements))), min_size=1))
    options["values"] = np.resize(np.array([elements[i] for i in some], dtype), shape)
    selection: list[Any] = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        stop = draw(st.integers(start + 1, n))
        selection.append(draw(st.sampled_from([slice(None), slice(start, stop), start])))
    options["selection"] = tuple(selection)
    return options


def written(options: dict[str, Any]) -> tuple[dict[str, bytes], Values, Values]:
    """What is stored after two writes, and what is read of it."""
    options = dict(options)
    names = "cps", "values", "selection", "by_argument"
    cps, values, selection, by_argument = (options.pop(name) for name in names)
    if by_argument:  # zarr's array then addresses shards
        options["shards"] = [n * side for n, side in zip(cps, options["chunks"], strict=True)]
        cps = None
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=cps)
    z = zarr.create_array(store, name="z", **options)
    z[...] = values
    z[selection] = np.flip(np.asarray(values[selection]))
    return dict(base), np.asarray(z[...]), np.asarray(z[selection])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The data type")
@given(arrays())
def test_the_same_bytes_and_values(options: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "MIN_CHUNKS", 1)
        patch.setattr(box_jobs, "_RUN_NBYTES", 16)
        base, whole, part = written(options)
    with chunk_by_chunk():
        expected = written(options)
    assert base == expected[0]
    assert_same(whole, expected[1])
    assert_same(part, expected[2])


def assert_same(values: Values, expected: Values) -> None:
    assert (values.shape, values.dtype) == (expected.shape, expected.dtype)
    if values.dtype.kind in "OT":
        assert values.tolist() == expected.tolist()
    else:
        assert values.tobytes() == expected.tobytes()  # NaN and -0.0


FRAME = zstandard.ZstdCompressor(level=1).compress(bytes(range(100)) * 2)

DAMAGED = {
    "no frame": b"nothing that is a frame",
    "nothing": b"",
    "cut": FRAME[:-1],
    "longer": FRAME + b"junk",
    "two": FRAME + FRAME,
    "of another size": zstandard.ZstdCompressor(level=1).compress(bytes(199)),
    "short": zstandard.ZstdCompressor(level=1).compress(b""),
    "no checksum": zstandard.ZstdCompressor(write_checksum=True).compress(bytes(200))[:-4],
    "flipped": FRAME[:20] + bytes([FRAME[20] ^ 255]) + FRAME[21:],
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("compressor", ["auto", None])
def test_damaged_chunks(damage: str, compressor: Any) -> None:
    """The error, or the values, are those of a read chunk by chunk."""
    store = ShardingStore({}, chunks_per_shard=(8, 8))
    options: Any = {"shape": (80, 80), "chunks": (10, 10), "dtype": "u2"}
    z = zarr.create_array(store, name="z", compressors=compressor, **options)
    z[...] = np.arange(6400).reshape(80, 80)
    sync(store.set("z/c/3/4", default_buffer_prototype().buffer.from_bytes(DAMAGED[damage])))

    def outcome() -> object:
        try:
            return np.asarray(z[...]).tolist()
        except Exception as error:
            return type(error), str(error)

    with counting_boxes() as seen:
        found = outcome()
    assert seen == ["read"]
    with chunk_by_chunk():
        assert found == outcome()


@pytest.mark.parametrize("dtype", ["i4", "f8", "S2", "?"])
def test_a_fill_value_that_is_open(dtype: str) -> None:
    """Zarr v2 may leave it open; chunks of default values are then omitted."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=4)
    options: Any = {"shape": (64,), "chunks": (4,), "zarr_format": 2, "fill_value": None}
    z = zarr.create_array(store, name="z", dtype=dtype, **options)
    z[...] = np.ones(64, dtype)
    n_documents = len([key for key in base if key.rpartition("/")[2].startswith(".")])
    assert len(base) > n_documents
    z[...] = np.zeros(64, dtype)
    assert len(base) == n_documents


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_of_arrays() -> None:
    """A matrix has a shape of its own."""
    store = ShardingStore({}, chunks_per_shard=4)
    z = zarr.create_array(store, name="z", shape=(8, 8), chunks=(2, 2), dtype="i4")
    values = np.arange(64, dtype="i4").reshape(8, 8)
    z[...] = np.asmatrix(values)
    assert np.array_equal(z[...], values)
    store.write_array("z", ..., np.asmatrix(values + 1))
    out = np.asmatrix(np.zeros((8, 8), "i4"))
    assert store.read_array("z", out=out) is out
    assert np.array_equal(out, values + 1)


def test_other_values_fall_back() -> None:
    """What is no box of whole values is written chunk by chunk."""
    store = ShardingStore({}, chunks_per_shard=(4, 4))
    z = zarr.create_array(store, name="z", shape=(32, 32), chunks=(4, 4), dtype="u1")
    values = np.arange(32 * 32, dtype="u1").reshape(32, 32)
    with counting_boxes() as seen:
        z[...] = values
        assert seen == ["write"]
        z[::2, :] = values[::2, :]
        z.oindex[np.array([0, 5, 9]), slice(None)] = values[[0, 5, 9], :]
        z.vindex[[0, 5, 9], [1, 2, 3]]
        z[0:8:3]
        assert seen == ["write"]
        with store.batch():
            z[...]
            assert seen == ["write"]
            z[...] = values
        assert seen == ["write"] * 2
    assert np.array_equal(z[...], values)


def test_shards_in_part() -> None:
    """Shards with chunks in part are written chunk by chunk, all others as boxes."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    z = zarr.create_array(store, name="z", shape=(62, 62), chunks=(4, 4), dtype="u2")
    expected = np.ones((62, 62), "u2")
    z[...] = expected  # no fill value: what is around a part must stay
    expected[3:61, 5:] = z[3:61, 5:] = np.arange(58 * 57, dtype="u2").reshape(58, 57) + 1
    assert np.array_equal(z[...], expected)
    expected[...] = z[...] = 9  # one value, at the edge also
    assert np.array_equal(z[...], expected)
    expected[20, 4:40] = z[20, 4:40] = 5
    assert np.array_equal(z[20, :], expected[20, :])
    assert np.array_equal(z[...], expected)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("hop", [0, 2**18])
def test_local_files(tmp_path: Path, n: int, hop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few shards are read and written by units, many each in one thread, small ones in one hop."""
    monkeypatch.setattr(box_jobs, "_HOP_NBYTES", hop)
    monkeypatch.setattr(box_jobs, "_RUN_NBYTES", 128)
    monkeypatch.setattr(box_jobs, "WRITE_NBYTES", 1024)
    monkeypatch.setattr(box_jobs, "_LOCAL_READ_NBYTES", 1024)
    store = ShardingStore(tmp_path, chunks_per_shard=(4, 4))
    z = zarr.create_array(store, name="z", shape=(16 * n, 30), chunks=(4, 4), dtype="u2")
    values = np.arange(16 * n * 30, dtype="u2").reshape(16 * n, 30)
    z[...] = values
    time.sleep(0.05)  # files that are younger are read again
    for _ in range(2):
        assert np.array_equal(z[...], values)
    (tmp_path / "z" / "c" / "0" / "1").write_bytes(b"damage")
    with pytest.raises(CorruptShardError):
        z[...]


@pytest.mark.parametrize("n", [1, 8, 64])
def test_a_cancelled_write_stores_no_later_values(
    tmp_path: Path, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that is cancelled may use its array again."""
    monkeypatch.setattr(concurrency, "_INLINE_NBYTES", 0)  # `slow` waits for the event loop
    store = ShardingStore(tmp_path, chunks_per_shard=(4, 4))
    z = zarr.create_array(store, name="z", shape=(64, 64 * n), chunks=(16, 16), dtype="u2")
    values = np.ones(z.shape, "u2")
    begun, may_go, left = threading.Event(), threading.Event(), []
    encode = SlabCodec.encode

    def slow(self: SlabCodec, slab: Values) -> Any:
        begun.set()
        may_go.wait(60)
        left.append(1)
        return encode(self, slab)

    monkeypatch.setattr(SlabCodec, "encode", slow)

    async def cancel() -> None:
        write = asyncio.create_task(z.async_array.setitem(..., values))
        assert await asyncio.to_thread(begun.wait, 60)
        write.cancel()
        asyncio.get_running_loop().call_later(0.1, may_go.set)
        with pytest.raises(asyncio.CancelledError):
            await write
        values[...] = 2

    sync(cancel())
    stored = np.asarray(z[...])
    assert set(np.unique(stored)) <= {0, 1}
    z[...] = 3
    time.sleep(0.2)
    assert (np.asarray(z[...]) == 3).all()
    assert len(left) <= 64 * n
