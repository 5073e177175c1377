"""One strange array never harms its neighbours: zarr does the same with a group through a store.

Strange are arrays whose chunk grid, chunk keys, codecs or extensions this package does not know,
and arrays that zarr shards in a form that has no flat chunks. Plain zarr is the reference.
"""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from tests.support.bases import s3_through_fsspec
from tests.support.convert_once import open_store
from tests.support.processes import s3_server
from zarr_shardstore import (
    ShardingStore,
    check_store,
    get_shard_info,
    shard_store,
    unshard_store,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(Consolidated metadata|nested|codec pipeline|efficien)"),
    pytest.mark.filterwarnings("ignore:.*stays unsharded"),
    pytest.mark.filterwarnings("ignore:through fsspec nothing keeps"),
    pytest.mark.filterwarnings("ignore:Your installed version of s3fs"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SHAPE = (8, 4)
VALUES = np.arange(32, dtype="i4").reshape(SHAPE)

Make = Callable[[zarr.Group], Any]

READABLE: dict[str, Make] = {
    "flat": lambda g: g.create_array("flat", shape=SHAPE, chunks=(2, 2), dtype="i4"),
    "native": lambda g: g.create_array(
        "native", shape=SHAPE, chunks=(1, 2), shards=(2, 4), dtype="i4"
    ),
    "under gzip": lambda g: g.create_array(
        "under gzip",
        shape=SHAPE,
        chunks=(2, 4),
        serializer=ShardingCodec(chunk_shape=(1, 2)),
        compressors=[GzipCodec()],
        dtype="i4",
    ),
    "transposed": lambda g: g.create_array(
        "transposed",
        shape=SHAPE,
        chunks=(2, 4),
        filters=[TransposeCodec(order=(1, 0))],
        serializer=ShardingCodec(chunk_shape=(2, 1)),
        compressors=None,
        dtype="i4",
    ),
    "index without checksum of its own": lambda g: g.create_array(
        "index without checksum of its own",
        shape=SHAPE,
        chunks=(2, 4),
        serializer=ShardingCodec(
            chunk_shape=(1, 2), index_codecs=[BytesCodec(), Crc32cCodec(), Crc32cCodec()]
        ),
        compressors=None,
        dtype="i4",
    ),
    "nested": lambda g: g.create_array(
        "nested",
        shape=SHAPE,
        chunks=(4, 4),
        serializer=ShardingCodec(chunk_shape=(2, 2), codecs=[ShardingCodec(chunk_shape=(1, 1))]),
        compressors=None,
        dtype="i4",
    ),
}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
SHARDING = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [1, 1],
        "codecs": [LITTLE],
        "index_codecs": [LITTLE, {"name": "crc32c"}],
    },
}
OURS = {"name": "sharding", "configuration": {"chunks_per_shard": [2, 2]}}


def document(**members: Any) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [8, 4],
        "data_type": "int32",
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [LITTLE],
        "attributes": {},
        **members,
    }


def grid(*sizes: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(sizes)}}


def sharding(**options: Any) -> dict[str, Any]:
    return {**SHARDING, "configuration": {**SHARDING["configuration"], **options}}  # type: ignore[dict-item]


def without(name: str) -> dict[str, Any]:
    options = {k: v for k, v in sharding()["configuration"].items() if k != name}
    return {**SHARDING, "configuration": options}


BY_TEXT: dict[str, dict[str, Any]] = {
    "unknown grid": document(chunk_grid={"name": "hexagonal", "configuration": {"side": 2}}),
    "unknown grid, sharded": document(chunk_grid={"name": "hexagonal"}, codecs=[SHARDING]),
    "unknown keys": document(chunk_key_encoding={"name": "hilbert"}),
    "unknown keys, sharded": document(chunk_key_encoding={"name": "hilbert"}, codecs=[SHARDING]),
    "unknown codec": document(codecs=[LITTLE, {"name": "quantum"}]),
    "unknown codec that need not be understood": document(
        codecs=[LITTLE, {"name": "quantum", "must_understand": False}]
    ),
    "unknown codec, sharded": document(codecs=[sharding(codecs=[{"name": "quantum"}])]),
    "unknown data type": document(data_type="int3"),
    "unknown data type, sharded": document(data_type="int3", codecs=[SHARDING]),
    "unknown member": document(extra={"must_understand": False}),
    "unknown member, sharded": document(extra={"must_understand": False}, codecs=[SHARDING]),
    "unknown member that must be understood": document(extra={"x": 1}),
    "unknown option of the sharding": document(codecs=[sharding(order="hilbert")]),
    "compressed index": document(codecs=[sharding(index_codecs=[LITTLE, {"name": "gzip"}])]),
    "default codecs": document(codecs=[without("codecs")]),
    "default index": document(codecs=[without("index_codecs")]),
    "true for 1": document(chunk_grid=grid(True, 2)),
    "true for 1, sharded": document(codecs=[sharding(chunk_shape=[True, 1])]),
    "chunks of size 0": document(shape=[0, 4], chunk_grid=grid(0, 2)),
    "chunks of size 0, sharded": document(shape=[0, 4], chunk_grid=grid(0, 2), codecs=[sharding()]),
    "chunks of size 0 on a long axis": document(chunk_grid=grid(0, 2)),
    "null": document(storage_transformers=None, attributes=None, dimension_names=None),
    "null, sharded": document(
        storage_transformers=None, attributes=None, dimension_names=None, codecs=[SHARDING]
    ),
    "another option of the grid": document(
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2, 2], "x": 1}}
    ),
    "chunks that do not divide the shard": document(codecs=[sharding(chunk_shape=[3, 1])]),
}


def group_with(base: Any, *documents: str) -> None:
    """A group of all arrays that zarr can write, and of documents."""
    g = zarr.open_group(base, mode="w")
    for make in READABLE.values():
        make(g)[:] = VALUES
    for name in documents:
        put(base, f"{name}/zarr.json", json.dumps(BY_TEXT[name]).encode())


def put(base: Any, key: str, value: bytes) -> None:
    sync(base.set(key, zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(value)))


def keys_of(store: Any) -> list[str]:
    async def collected() -> list[str]:
        return [key async for key in store.list()]

    return sync(collected())


def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, or the type and the words of its error; and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as error:
            result = type(error), str(error).partition("'memory")[0]
    said = {str(each.message).partition("The stored chunk shape")[2] for each in caught}
    return result, said - {""}


def what_zarr_does(store: Any, name: str) -> dict[str, Any]:
    """Everything that zarr does with a group, and with one array in it."""

    def group() -> Any:
        return zarr.open_group(store, mode="r+")

    def read_and_write() -> Any:
        z = group()[name]
        before = z[...].tolist()
        z[...] = 7
        z[:1] = 8
        z.attrs["x"] = 1
        again = group()[name]
        return before, again[...].tolist(), again.shape, dict(again.attrs)

    def grow() -> Any:
        z = group()[name]
        z.resize((10, 4))
        z[8:] = 9
        return group()[name][...].tolist()

    calls: dict[str, Callable[[], Any]] = {
        "names": lambda: sorted(group().array_keys()),
        "tree": lambda: str(group().tree()),
        "read and write": read_and_write,
        "consolidate": lambda: zarr.consolidate_metadata(store) and None,
        "consolidated names": lambda: sorted(group().array_keys()),
        "consolidated": read_and_write,
        "grow": grow,
        "neighbours": lambda: [group()[each][1, 1] for each in ("flat", "native")],
        "delete": lambda: group().__delitem__(name),
        "left": lambda: sorted({k.partition("/")[0] for k in keys_of(store)}),
    }
    return {step: outcome(call) for step, call in calls.items()}


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("options", [{}, {"chunks_per_shard": 2}], ids=["no rule", "rule"])
@pytest.mark.parametrize("name", [*READABLE, *BY_TEXT])
def test_zarr_does_the_same_as_with_the_base_store(name: str, options: dict[str, Any]) -> None:
    bases = MemoryStore(), MemoryStore()
    documents = [name] if name in BY_TEXT else []
    for base in bases:
        group_with(base, *documents)
    expected = what_zarr_does(bases[0], name)
    found = what_zarr_does(ShardingStore(bases[1], **options), name)
    assert found == expected


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield where


SERVERS = ("obstore", "s3fs")


@pytest.fixture(
    params=[
        "memory",
        "local",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in SERVERS),
    ]
)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "v")
    where = {**request.getfixturevalue("s3"), "prefix": uuid.uuid4().hex}
    return open_store(where) if request.param == "obstore" else s3_through_fsspec(where)


def test_a_group_of_strange_arrays_on_each_kind_of_store(base: Any) -> None:
    """Made, listed, read, written, consolidated, reported, checked and converted through a store;
    plain zarr reads the values that are then there."""
    store = ShardingStore(base, chunks_per_shard=2)
    g = zarr.open_group(store, mode="w")
    for make in READABLE.values():
        make(g)[:] = VALUES
    assert sorted(zarr.open_group(store).array_keys()) == sorted(READABLE)
    zarr.consolidate_metadata(store)
    for each in (store, base, ShardingStore(base)):
        group: Any = zarr.open_group(each, mode="r")
        assert sorted(group.array_keys()) == sorted(READABLE)
        for name in READABLE:
            np.testing.assert_array_equal(group[name][:], VALUES)
    keys = set(keys_of(store))
    assert keys == set(keys_of(ShardingStore(base)))
    assert {f"flat/c/{i}/{j}" for i in range(4) for j in range(2)} <= keys
    # Documents that zarr does not read.
    put(base, "unknown grid/zarr.json", json.dumps(BY_TEXT["unknown grid"]).encode())
    put(base, "unknown codec/zarr.json", json.dumps(BY_TEXT["unknown codec"]).encode())
    assert keys | {"unknown grid/zarr.json", "unknown codec/zarr.json"} == set(
        keys_of(ShardingStore(base))
    )
    unknown = {*READABLE, "unknown grid"} - {"flat", "native", "nested"}
    info = get_shard_info(base)
    assert {array.path for array in info.arrays if array.is_unknown} == unknown
    assert (info.n_errors, info.n_unknown) == (0, len(unknown))
    report = check_store(base)
    assert {f.kind for f in report.findings if f.severity != "info"} == {"consolidated_metadata"}
    assert "unknown grid" in {f.array for f in report.findings if f.kind == "unchecked"}
    shown = {name: zarr.open_array(base, path=name, mode="r")[:] for name in READABLE}
    converted = unshard_store(base)
    converted = shard_store(base, chunks_per_shard=(2, 1))
    assert {array.path for array in converted.arrays if array.is_left} == unknown
    assert all(array.reason for array in converted.arrays if array.is_left)
    assert converted.n_left == len(unknown)
    for name in READABLE:
        np.testing.assert_array_equal(zarr.open_array(base, path=name, mode="r")[:], shown[name])
    assert zarr.open_array(base, path="flat").shards == (4, 2)
