"""Arrays of Zarr v2 that `to_native` is tested with, and the readers of v3.

A covering, not the whole product: each data type in both byte orders, each compressor, each
filter; the order, the separator and what is not varied alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numcodecs
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.dtype import VariableLengthBytes, VariableLengthUTF8

from zarr_shardstore import ShardingStore

Values = npt.NDArray[Any]

SHAPE, CHUNKS, CPS = (7, 5, 6), (2, 3, 1), (3, 1, 2)
SIZE = 7 * 5 * 6
RNG = np.random.default_rng(2022)

DTYPES = [
    *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    *("M8[ns]", "m8[10us]", "S5", "U3", "V3", "S300"),
]
COMPRESSORS: dict[str, Any] = {
    "none": None,
    "blosc": numcodecs.Blosc(shuffle=0),
    "blosc, bytes": numcodecs.Blosc(cname="zstd", shuffle=1),
    "blosc, bits": numcodecs.Blosc(cname="zlib", shuffle=2),
    "blosc, auto": numcodecs.Blosc(cname="lz4hc", shuffle=-1, clevel=1),
    "zlib": numcodecs.Zlib(level=2),
    "gzip": numcodecs.GZip(),
    "zstd": numcodecs.Zstd(level=2),
    "lz4": numcodecs.LZ4(),
    "bz2": numcodecs.BZ2(),
    "lzma": numcodecs.LZMA(),
}


@dataclass(frozen=True)
class Case:
    """A v2 array."""

    dtype: Any
    compressor: Any = None
    filters: tuple[Any, ...] = ()
    order: Literal["C", "F"] = "C"
    separator: Literal[".", "/"] = "."
    fill_value: Any = None

    def data(self) -> Values:
        """Values that differ from chunk to chunk, and that every filter below keeps."""
        if isinstance(self.dtype, VariableLengthUTF8):
            return np.array(["é" * (i % 5) + str(i) for i in range(SIZE)], "O").reshape(SHAPE)
        if isinstance(self.dtype, VariableLengthBytes):
            return np.array([b"\0" * (i % 5) + b"x" for i in range(SIZE)], "O").reshape(SHAPE)
        dtype = np.dtype(self.dtype)
        numbers = RNG.integers(0, 100, SHAPE)
        match dtype.kind:
            case "b":
                return (numbers > 50).astype(dtype)
            case "c":
                return (numbers / 8 + 1j * numbers[::-1]).astype(dtype)
            case "m" | "M":
                return (numbers * 10**12).astype(dtype)
            case "S" | "U":
                return numbers.astype("U5").astype(dtype)
            case "V":
                raw = RNG.integers(0, 255, SIZE * dtype.itemsize, "u1").tobytes()
                return np.frombuffer(raw, dtype).reshape(SHAPE)
        return (numbers / 8 if dtype.kind == "f" else numbers).astype(dtype)

    def create(self, store: Any, path: str = "g/a") -> Any:
        options: dict[str, Any] = {"fill_value": self.fill_value} if self.fill_value else {}
        if isinstance(self.dtype, str):  # others have filters of their own
            options["filters"] = list(self.filters) or None
        return zarr.create_array(
            store,
            name=path,
            shape=SHAPE,
            chunks=CHUNKS,
            dtype=self.dtype,
            zarr_format=2,
            order=self.order,
            compressors=self.compressor,
            chunk_key_encoding={"name": "v2", "separator": self.separator},
            **options,
        )

    def write(self, base: Path) -> Values:
        """Sharded, with chunks that are missing; the values as they are read before."""
        z = self.create(ShardingStore(base, chunks_per_shard=CPS))
        data = self.data()
        z[:5] = data[:5]
        z[5:, :2] = data[5:, :2]
        values: Values = z[...]
        return values


def filters_of(e: str) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Filters by name, with the data type of the array, in one byte order."""
    n = numcodecs
    scale = n.FixedScaleOffset(offset=1, scale=8, dtype=f"{e}f8", astype=f"{e}i4")
    delta = n.Delta(f"{e}i4")
    other = {"<": ">", ">": "<"}[e]
    found: dict[str, tuple[str, tuple[Any, ...]]] = {
        "delta": (f"{e}i4", (delta,)),
        "delta, smaller": (f"{e}i4", (n.Delta(f"{e}i4", astype=f"{e}i2"),)),
        "delta, one byte": (f"{e}i4", (n.Delta(f"{e}i4", astype="i1"),)),
        "fixedscaleoffset": (f"{e}f8", (scale,)),
        "fixedscaleoffset, delta": (f"{e}f8", (scale, delta)),
        "astype": (f"{e}i4", (n.AsType(f"{e}i2", f"{e}i4"),)),
        "astype, other order": (f"{e}i4", (n.AsType(f"{other}i2", f"{e}i4"),)),
        "packbits": ("|b1", (n.PackBits(),)),
        "shuffle": (f"{e}i4", (n.Shuffle(4),)),
        "crc32": (f"{e}i4", (n.CRC32(),)),
        "crc32c": (f"{e}i4", (n.CRC32C(),)),
        "crc32c at the start": (f"{e}i4", (n.CRC32C(location="start"),)),
        "adler32": (f"{e}i4", (n.Adler32(),)),
        "fletcher32": (f"{e}i4", (n.Fletcher32(),)),
        "jenkins_lookup3": (f"{e}i4", (n.JenkinsLookup3(),)),
        "delta, shuffle, crc32": (f"{e}i4", (delta, n.Shuffle(4), n.CRC32())),
        "zlib": (f"{e}i4", (n.Zlib(),)),
    }
    if e == "<":  # numcodecs' bitround takes no other, and quantize has no codec for another
        found["bitround"] = ("<f4", (n.BitRound(10),))
        found["quantize"] = ("<f4", (n.Quantize(3, "<f4"),))
    return found


def cases() -> dict[str, Case]:
    rows: dict[str, Case] = {}
    for i, (dtype, endian) in enumerate((d, e) for d in DTYPES for e in "<>"):
        compressor = COMPRESSORS["zstd" if i % 2 else "blosc, bytes"]
        order: Any = "CF"[(i // 2 + i) % 2]
        rows[f"{endian}{dtype}"] = Case(f"{endian}{dtype}", compressor, (), order, "./"[i % 2])  # type: ignore[arg-type]
    for i, (name, compressor) in enumerate(COMPRESSORS.items()):
        rows[name] = Case(("<i4", ">f8", "u1")[i % 3], compressor, (), "FC"[i % 2], "./"[i % 2])  # type: ignore[arg-type]
    rows_of_filters = [(e, *item) for e in "<>" for item in filters_of(e).items()]
    for i, (e, name, (dtype, filters)) in enumerate(rows_of_filters):
        compressor = COMPRESSORS[("zstd", "none")[i // 2 % 2]]
        rows[f"filter {name}, {e}"] = Case(dtype, compressor, filters, "CF"[i % 2])  # type: ignore[arg-type]
    rows["texts"] = Case(VariableLengthUTF8(), COMPRESSORS["zstd"], (), "F")
    rows["byte strings"] = Case(VariableLengthBytes(), None)
    rows["fill value"] = Case(">f4", COMPRESSORS["zstd"], (), "F", "/", np.nan)
    return rows


CASES = cases()

# ------------------------------------------------------------------------ readers

PIPELINES = "zarr.core.codec_pipeline"


def by_zarr(path: Path, pipeline: str, strict: bool = False) -> Values:
    with zarr.config.set({"codec_pipeline.path": pipeline, "codec_pipeline.strict": strict}):
        values: Values = zarr.open_array(str(path), mode="r", zarr_format=3)[...]  # type: ignore[assignment]
    return values


def by_tensorstore(path: Path) -> Values:
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/"}
    return np.asarray(ts.open(spec, read=True).result().read().result())


READERS: dict[str, Callable[[Path], Values]] = {
    "zarr": lambda path: by_zarr(path, f"{PIPELINES}.BatchedCodecPipeline"),
    "zarr fused": lambda path: by_zarr(path, f"{PIPELINES}.FusedCodecPipeline"),
    "zarrs": lambda path: by_zarr(path, "zarrs.ZarrsCodecPipeline"),
    "zarrs alone": lambda path: by_zarr(path, "zarrs.ZarrsCodecPipeline", strict=True),
    "tensorstore": by_tensorstore,
}
"""The pipeline of zarrs leaves what it does not know to zarr-python, unless it is alone."""

_TEXTS = {"string", "variable_length_bytes", "null_terminated_bytes", "fixed_length_utf32"}
_TIMES = {"numpy.datetime64", "numpy.timedelta64"}
_ZARRS = {"fixedscaleoffset", "shuffle", "zlib", "bz2"}
_ALL = {
    *("delta", "fixedscaleoffset", "quantize", "astype", "bitround", "packbits", "shuffle"),
    *("crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3", "zlib", "lz4", "bz2", "lzma"),
}
UNKNOWN: dict[str, set[str]] = {
    "zarr": set(),
    "zarr fused": set(),
    "zarrs": set(),
    "zarrs alone": {f"numcodecs.{c}" for c in _ALL - _ZARRS} | _TEXTS | _TIMES | {"raw_bytes"},
    "tensorstore": {f"numcodecs.{c}" for c in _ALL} | _TEXTS | _TIMES,
}
"""Codecs and data types that a reader does not know: it refuses arrays with these."""


def skip_what_is_not_here(reader: str) -> None:
    if reader == "zarr fused" and not hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
        pytest.skip("this zarr has no fused pipeline")
    if reader.startswith("zarrs"):
        pytest.importorskip("zarrs")
