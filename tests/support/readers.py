"""The arrays that other readers are tested with, and how each reader opens them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec
from zarr.core.codec_pipeline import BatchedCodecPipeline

from zarr_shardstore import DraftHierarchyStore, ShardingStore, from_native

HERE = Path(__file__).parent
OLD_PYTHON = os.environ.get("ZARR_SHARDSTORE_ZARR218")
OLD_SCRIPT = HERE.parent / "interop" / "golden" / "read_arrays.py"
NODE = shutil.which("node")
NODE_MODULES = os.environ.get("ZARR_SHARDSTORE_NODE_MODULES")

Values = npt.NDArray[Any]
Way = Literal["array", "group", "consolidated"]
Outcome = dict[str, Any]  # {"values": flat} or {"error": text}

PATH = "g/z"
CHUNKS, SHARDS = (2, 3), (4, 6)
DATA: Values = np.arange(1, 78, dtype="<i4").reshape(11, 7)  # never the fill value
LAYOUTS = list(product("CF", (False, True)))  # order, whether it is compressed

# [start, stop) for each dimension. There are 6 × 3 chunks in 3 × 2 shards: a reader that takes
# shards for chunks finds an object under the key of the first chunk, none under that of the last.
WHOLE = ((0, 11), (0, 7))
FIRST_CHUNK = ((0, 2), (0, 3))
LAST_CHUNK = ((10, 11), (6, 7))


# ------------------------------------------------------------------------- arrays


def create(store: Any, chunks: tuple[int, int], zarr_format: int = 3, **options: Any) -> Any:
    """Create the array in a group in a group, and give the store back."""
    zarr.create_group(store, zarr_format=zarr_format)  # type: ignore[arg-type]
    zarr.create_array(
        store,
        name=PATH,
        shape=DATA.shape,
        chunks=chunks,
        dtype=DATA.dtype,
        fill_value=0,
        zarr_format=zarr_format,  # type: ignore[arg-type]
        **options,
    )
    return store


def v3_options(order: str, is_compressed: bool) -> dict[str, Any]:
    return {
        "filters": [TransposeCodec(order=(1, 0))] if order == "F" else None,
        "compressors": GzipCodec() if is_compressed else None,
    }


def write_v3(base: Path, order: str, is_compressed: bool, **store_options: Any) -> Any:
    store = ShardingStore(base, **store_options)
    return create(store, CHUNKS, **v3_options(order, is_compressed))


def write_from_native(base: Path, order: str, is_compressed: bool) -> Any:
    """Declared by the codec first."""
    write_v3(base, order, is_compressed, chunks_per_shard=2)
    from_native(base)
    return ShardingStore(base)


def write_with_shards(base: Path, order: str, is_compressed: bool) -> Any:
    """Sharded by a pipeline of zarr's own."""
    path = f"{BatchedCodecPipeline.__module__}.{BatchedCodecPipeline.__name__}"
    with zarr.config.set({"codec_pipeline.path": path}):
        options = v3_options(order, is_compressed)
        store = create(ShardingStore(base), CHUNKS, shards=SHARDS, **options)
    document = json.loads((base / PATH / "zarr.json").read_bytes())
    assert document["zarr_shardstore"]["must_understand"] is False
    return store


def write_flat(
    base: Path,
    order: str,
    is_compressed: bool,
    *,
    location: Literal["start", "end"],
    has_checksum: bool,
) -> Any:
    """Created elsewhere; its chunks are written here."""
    inner: list[Any] = [TransposeCodec(order=(1, 0))] if order == "F" else []
    codec = ShardingCodec(
        chunk_shape=CHUNKS,
        codecs=[*inner, BytesCodec(), *([GzipCodec()] if is_compressed else [])],
        index_codecs=[BytesCodec(), *([Crc32cCodec()] if has_checksum else [])],
        index_location=location,
    )
    create(str(base), SHARDS, serializer=codec, filters=None, compressors=None)
    return ShardingStore(base)


def write_v2(
    base: Path, order: str, is_compressed: bool, *, separator: str, **store_options: Any
) -> Any:
    return create(
        ShardingStore(base, **store_options),
        CHUNKS,
        zarr_format=2,
        order=order,
        filters=None,
        compressors={"id": "gzip", "level": 1} if is_compressed else None,
        chunk_key_encoding={"name": "v2", "separator": separator},
    )


def write_draft(base: Path, order: str, is_compressed: bool) -> Any:
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=2))
    return create(store, CHUNKS, **v3_options(order, is_compressed))


STACK = ["crc32c", "sharding"]
WRITERS: dict[str, Callable[[Path, str, bool], Any]] = {
    "plain v3": write_v3,
    "plain v2": partial(write_v2, separator="."),
    "codec": partial(write_v3, chunks_per_shard=2),
    "codec, no crc32c": partial(write_flat, location="end", has_checksum=False),
    "codec, index at start": partial(write_flat, location="start", has_checksum=True),
    "codec, index at start, no crc32c": partial(write_flat, location="start", has_checksum=False),
    "codec, left to zarr": write_with_shards,
    "transformers": partial(write_v3, chunks_per_shard=2, declaration="storage_transformers"),
    "transformers, stack": partial(write_v3, chunks_per_shard=2, storage_transformers=STACK),
    "transformers, from_native": write_from_native,
    "marker": partial(write_v2, separator=".", chunks_per_shard=2),
    "marker, nested": partial(write_v2, separator="/", chunks_per_shard=2),
    "marker, stack": partial(
        write_v2, separator=".", chunks_per_shard=2, storage_transformers=STACK
    ),
    "draft": write_draft,
}
PLAIN = ["plain v3", "plain v2"]
CODEC = [name for name in WRITERS if name.startswith("codec")]
TRANSFORMERS = [name for name in WRITERS if name.startswith("transformers")]
MARKER = ["marker", "marker, nested", "marker, stack"]


@dataclass(frozen=True)
class Request:
    """What a reader shall read."""

    directory: str
    path: str
    way: Way
    is_draft: bool
    selection: tuple[tuple[int, int], ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(*s) for s in self.selection)


# ------------------------------------------------------------------------ readers


def read_by_zarr(request: Request, pipeline: str) -> Any:
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        z: Any
        if request.way == "array":
            z = zarr.open_array(request.directory, path=request.path, mode="r")
        elif request.way == "group":
            z = zarr.open_group(request.directory, mode="r", use_consolidated=False)[request.path]
        else:
            z = zarr.open_consolidated(request.directory, mode="r")[request.path]
        return z[request.slices]


def read_by_tensorstore(request: Request, driver: str) -> Any:
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": driver, "kvstore": f"file://{request.directory}/{request.path}/"}
    return ts.open(spec, read=True).result()[request.slices].read().result()


def read_by_zarrista(request: Request) -> Any:
    zarrista = pytest.importorskip("zarrista")
    store = zarrista.store.FilesystemStore(request.directory)
    array = zarrista.Array.open(store, f"/{request.path}")
    return array.retrieve_array_subset(request.slices).to_numpy()


def outcome_of(read: Callable[[Request], Any], request: Request) -> Outcome:
    try:
        return {"values": np.asarray(read(request)).ravel().tolist()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def read_in_process(*command: Any) -> Callable[[list[Request]], list[Outcome]]:
    def read(requests: list[Request]) -> list[Outcome]:
        done = subprocess.run(
            list(map(str, command)),
            input=json.dumps([asdict(request) for request in requests]),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        outcomes: list[Outcome] = json.loads(done.stdout)
        return outcomes

    return read


def read_here(read: Callable[[Request], Any]) -> Callable[[list[Request]], list[Outcome]]:
    return lambda requests: [outcome_of(read, request) for request in requests]


PIPELINES = "zarr.core.codec_pipeline"
READERS: dict[str, Callable[[list[Request]], list[Outcome]]] = {
    "zarr": read_here(partial(read_by_zarr, pipeline=f"{PIPELINES}.BatchedCodecPipeline")),
    "zarr fused": read_here(partial(read_by_zarr, pipeline=f"{PIPELINES}.FusedCodecPipeline")),
    "zarrs": read_here(partial(read_by_zarr, pipeline="zarrs.ZarrsCodecPipeline")),
    "zarrista": read_here(read_by_zarrista),
    "tensorstore zarr3": read_here(partial(read_by_tensorstore, driver="zarr3")),
    "tensorstore zarr": read_here(partial(read_by_tensorstore, driver="zarr")),
    "zarr 2.18": read_in_process(OLD_PYTHON, OLD_SCRIPT),
    "zarrita.js": read_in_process(NODE, HERE / "read_zarrita.mjs", NODE_MODULES),
}
ZARR = ["zarr", "zarr fused", "zarrs"]
WAYS: dict[str, tuple[Way, ...]] = {
    **dict.fromkeys(READERS, ("array",)),
    **dict.fromkeys([*ZARR, "zarr 2.18"], ("array", "group", "consolidated")),
    "zarrita.js": ("array", "consolidated"),
}


def skip_what_is_not_here(reader: str) -> None:
    if reader == "zarr fused" and not hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
        pytest.skip("this zarr has no fused pipeline")
    if reader == "zarr 2.18" and OLD_PYTHON is None:
        pytest.skip("ZARR_SHARDSTORE_ZARR218 names no Python")
    if reader == "zarrita.js" and (
        NODE is None or NODE_MODULES is None or not Path(NODE_MODULES, "zarrita").is_dir()
    ):
        pytest.skip("no node, or ZARR_SHARDSTORE_NODE_MODULES has no zarrita")
    if reader in ("zarrs", "zarrista"):
        pytest.importorskip(reader)
    if reader.startswith("tensorstore"):
        pytest.importorskip("tensorstore")
