"""References, read by the programs that they are for: none of them knows of shards.

zarr-python 2.18.7 runs in an environment of its own (``ZARR_SHARDSTORE_ZARR218`` names its Python),
where it borrows the fsspec of this one: that is pure Python.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

from tests.support.processes import s3_server
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardingStore,
    SpecError,
    UnsupportedError,
    to_references,
)

OLD_PYTHON = os.environ.get("ZARR_SHARDSTORE_ZARR218")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'fastparquet' engine is deprecated"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3"),
    pytest.mark.filterwarnings("ignore:Your installed version of s3fs"),
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute"),
]

READ_BY_OLD_ZARR = """
import sys, fsspec, numpy as np, zarr
assert zarr.__version__ == "2.18.7"
mapper = fsspec.get_mapper("reference://", fo=sys.argv[1], remote_protocol="file")
root = zarr.open_group(mapper, mode="r")
found = {}
root.visititems(lambda path, node: found.__setitem__(path, node))
arrays = {p.replace("/", "|"): z[...] for p, z in found.items() if isinstance(z, zarr.Array)}
assert root.attrs.asdict() == {"made by": "test"}
np.savez(sys.argv[2], **arrays)
"""


def store_of(kind: str, path: Path) -> Any:
    """Return a store whose arrays go into shards, and the zarr format of its users."""
    options: dict[str, Any] = {"chunks_per_shard": (2, 3)}
    if kind == "index at start":
        options |= {"index_location": "start", "index_codecs": ["bytes"]}
    if kind == "transformer":
        options["declaration"] = "storage_transformers"
    store = ShardingStore(path, **options)
    return DraftHierarchyStore(store) if kind == "draft" else store


KINDS = ["v3", "v2", "draft", "native", "index at start", "transformer", "unsharded"]


def filled(kind: str, path: Path) -> dict[str, Any]:
    """Write arrays with edges, a missing chunk, a missing shard, and 0 dims; return values."""
    store: Any = str(path) if kind in ("native", "unsharded") else store_of(kind, path)
    zarr_format: Any = 2 if kind == "v2" else 3
    root = zarr.create_group(store, zarr_format=zarr_format, attributes={"made by": "test"})
    shards = {"shards": (4, 9)} if kind == "native" else {}
    values = {
        "g/image": np.arange(11 * 20, dtype="<i4").reshape(11, 20),
        "g/deep/float": np.linspace(0, 1, 11 * 20).reshape(11, 20).astype(">f8"),
        "scalar": np.array(7, dtype="u2"),
    }
    for name, data in values.items():
        options: Any = {"chunks": (2, 3), "fill_value": 5, **shards} if data.ndim else {}
        z = root.create_array(name, shape=data.shape, dtype=data.dtype, **options)
        if data.ndim:
            data[2:4, 3:6] = 5
            data[8:, 18:] = 5
        z[...] = data
    if isinstance(store, ShardingStore | DraftHierarchyStore):
        store.close()
    return values


def assert_equal(found: dict[str, Any], values: dict[str, Any]) -> None:
    assert set(found) == set(values)
    for path, data in values.items():
        np.testing.assert_array_equal(found[path], data)
        assert found[path].dtype.newbyteorder("<") == data.dtype.newbyteorder("<")


def arrays_in(group: Any) -> dict[str, Any]:
    members = group.members(max_depth=None)
    return {path: z[...] for path, z in members if isinstance(z, zarr.Array)}


def reference_store(fo: Any, protocol: str = "file", **options: Any) -> FsspecStore:
    """Return zarr 3's way to fsspec's ``reference://``."""
    remote = {"asynchronous": True, **options}
    made = {"fo": fo, "remote_protocol": protocol, "remote_options": remote, "asynchronous": True}
    return FsspecStore.from_url("reference://", storage_options=made)


@pytest.mark.parametrize("kind", KINDS)
def test_zarr_2(kind: str, tmp_path: Path) -> None:
    """2.18.7, of every hierarchy; also what is missing has the fill value."""
    if OLD_PYTHON is None:
        pytest.skip("ZARR_SHARDSTORE_ZARR218 names no Python")
    values = filled(kind, tmp_path / "s.zarr")
    out = tmp_path / "refs.json"
    to_references(tmp_path / "s.zarr", zarr_format=2, out=out)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/fsspec").symlink_to(Path(fsspec.__file__).parent)
    command = [
        OLD_PYTHON,
        "-W",
        "ignore",
        "-c",
        READ_BY_OLD_ZARR,
        str(out),
        str(tmp_path / "a.npz"),
    ]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "a.npz")
    assert_equal({name.replace("|", "/"): found[name] for name in found}, values)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_zarr_3(kind: str, zarr_format: Any, tmp_path: Path) -> None:
    """Through fsspec, of JSON in both formats, and of Parquet."""
    values = filled(kind, tmp_path / "s.zarr")
    ways: list[Any] = [to_references(tmp_path / "s.zarr", zarr_format=zarr_format)]
    if zarr_format == 2:
        out = tmp_path / "refs.parq"
        ways.append(to_references(tmp_path / "s.zarr", to="kerchunk-parquet", out=out))
    for fo in ways:
        group = zarr.open_group(reference_store(fo), mode="r", zarr_format=zarr_format)
        assert group.attrs.asdict() == {"made by": "test"}
        assert_equal({path: group[path][...] for path in values}, values)  # type: ignore[index]


def test_xarray_by_its_kerchunk_engine(tmp_path: Path) -> None:
    """Names of dimensions, also of scalars, and values of floats, none of them masked."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("kerchunk")
    data = np.arange(24, dtype="f4").reshape(4, 6) % 5
    variables = {"t": (("y", "x"), data), "depth": ((), 7.5), "n": ((), 3)}
    dataset = xarray.Dataset(variables, attrs={"title": "test"})
    encoding = {"t": {"chunks": (1, 2)}}
    store = ShardingStore(tmp_path / "s.zarr", chunks_per_shard=2)
    dataset.to_zarr(store, zarr_format=3, consolidated=False, encoding=encoding)
    store.close()
    to_references(tmp_path / "s.zarr", out=tmp_path / "refs.json")
    to_references(tmp_path / "s.zarr", to="kerchunk-parquet", out=tmp_path / "refs.parquet")
    for out in ("refs.json", "refs.parquet"):
        found = xarray.open_dataset(str(tmp_path / out), engine="kerchunk", chunks=None)
        xarray.testing.assert_identical(found.load(), dataset)
    v3 = reference_store(to_references(tmp_path / "s.zarr", zarr_format=3))
    found = xarray.open_zarr(v3, zarr_format=3, consolidated=False, chunks=None)
    xarray.testing.assert_identical(found.load(), dataset)


# ------------------------------------------------------------------------- icechunk


def repository(prefix: str, container: Any, credentials: Any) -> Any:
    icechunk = pytest.importorskip("icechunk")
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, container))
    return icechunk.Repository.create(
        icechunk.in_memory_storage(), config, authorize_virtual_chunk_access={prefix: credentials}
    )


def local_repository(path: Path) -> Any:
    icechunk = pytest.importorskip("icechunk")
    access = getattr(getattr(icechunk, "Credentials", None), "LocalFileSystemAccess", None)
    if int(icechunk.__version__.split(".")[0]) < 2:  # it takes none
        access = None
    prefix = f"file://{quote(str(path))}/"
    return repository(prefix, icechunk.local_filesystem_store(str(path)), access and access())


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_chunk_is_corrected_in_icechunk(kind: str, tmp_path: Path) -> None:
    """The others stay in the shards; each version reads as it was committed."""
    values = filled(kind, tmp_path / "s.zarr")
    repo = local_repository(tmp_path)
    session = repo.writable_session("main")
    store = session.store
    assert to_references(tmp_path / "s.zarr", to=store) is store
    before = session.commit("references")
    session = repo.writable_session("main")
    z: Any = zarr.open_array(session.store, path="g/image")
    z[2:4, :3] = -1
    after = session.commit("one chunk corrected")
    stored = {p: p.read_bytes() for p in (tmp_path / "s.zarr").rglob("*") if p.is_file()}
    found = arrays_in(zarr.open_group(repo.readonly_session(snapshot_id=before).store, mode="r"))
    assert_equal(found, values)
    values["g/image"][2:4, :3] = -1
    found = arrays_in(zarr.open_group(repo.readonly_session(snapshot_id=after).store, mode="r"))
    assert_equal(found, values)
    assert stored == {p: p.read_bytes() for p in (tmp_path / "s.zarr").rglob("*") if p.is_file()}


def test_icechunk_refuses_a_shard_that_changed(tmp_path: Path) -> None:
    """A second later, with the same size; chunks of other shards are read."""
    filled("v3", tmp_path / "s.zarr")
    session = local_repository(tmp_path).writable_session("main")
    to_references(tmp_path / "s.zarr", to=session.store)
    shard = tmp_path / "s.zarr/g/image/c/0/0"
    assert time.time_ns() // 10**9 > shard.stat().st_mtime_ns // 10**9, "a later second"
    shard.write_bytes(shard.read_bytes())
    z: Any = zarr.open_array(session.store, path="g/image", mode="r")
    with pytest.raises(Exception, match="checksum of the object"):
        z[:2, :3]
    assert z[10, 19] == 5


def test_icechunk_has_many_stores_in_one(tmp_path: Path) -> None:
    """Each in its group; an array that is there is not replaced."""
    values = [filled(kind, tmp_path / kind) for kind in ("v3", "v2")]
    session = local_repository(tmp_path).writable_session("main")
    zarr.create_group(session.store, path="runs", attributes={"kept": True})
    for kind in ("v3", "v2"):
        to_references(tmp_path / kind, to=session.store, group=f"runs/{kind}")
    root: Any = zarr.open_group(session.store, mode="r")
    assert root["runs"].attrs["kept"]
    for kind, expected in zip(("v3", "v2"), values, strict=True):
        assert_equal(arrays_in(root[f"runs/{kind}"]), expected)
    with pytest.raises(SpecError, match="has an array at 'runs/v2/g/deep/float'"):
        to_references(tmp_path / "v2", to=session.store, group="runs/v2")


def test_icechunk_without_a_container(tmp_path: Path) -> None:
    """The message says what to configure."""
    filled("v3", tmp_path / "s.zarr")
    session = local_repository(tmp_path / "elsewhere").writable_session("main")
    with pytest.raises(SpecError, match=r"no virtual chunk container for 'file://.*url_prefix"):
        to_references(tmp_path / "s.zarr", to=session.store)
    read_only = local_repository(tmp_path).readonly_session("main").store
    with pytest.raises(SpecError, match="writable icechunk session"):
        to_references(tmp_path / "s.zarr", to=read_only)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield where


def test_object_stores(s3: dict[str, Any], tmp_path: Path) -> None:
    """zarr 3 by fsspec, icechunk and virtualizarr; icechunk refuses a shard of another ETag."""
    keys = {"access_key_id": "a", "secret_access_key": "b"}
    options = {**keys, "endpoint": s3["endpoint"], "region": "us-east-1"}
    store = ShardingStore("s3://bucket/some dir/v.zarr", (2, 2), storage_options=options)
    z: Any = zarr.create_array(store, name="z", shape=(5, 7), chunks=(1, 2), dtype="u2")
    data = np.arange(35).reshape(5, 7)
    z[:] = data
    references = to_references(store)
    assert references["refs"]["z/0/0"][0] == "s3://bucket/some dir/v.zarr/z/c/0/0"
    assert all(etag for etag, *_ in references["zarr_shardstore"]["states"].values())
    if int(version("s3fs").split(".")[0]) >= 2025:  # an older one takes no aiobotocore
        client = {"endpoint_url": s3["endpoint"], "region_name": "us-east-1"}
        by_fsspec = reference_store(references, "s3", key="a", secret="b", client_kwargs=client)
        np.testing.assert_array_equal(zarr.open_array(by_fsspec, path="z", mode="r")[:], data)
    icechunk = pytest.importorskip("icechunk")
    manifests = to_references(store, to="virtualizarr")
    np.testing.assert_array_equal(zarr.open_group(manifests, mode="r")["z"][:], data)  # type: ignore[index]
    where = icechunk.s3_store(
        region="us-east-1",
        endpoint_url=s3["endpoint"],
        allow_http=True,
        s3_compatible=True,
        force_path_style=True,
    )
    access = icechunk.containers_credentials({"s3://bucket/": icechunk.s3_credentials(**keys)})
    repo = repository("s3://bucket/", where, access["s3://bucket/"])
    session = repo.writable_session("main")
    to_references(store, to=session.store)
    virtual: Any = zarr.open_array(session.store, path="z")
    np.testing.assert_array_equal(virtual[:], data)
    virtual[0, 0] = 99
    z[4, 6] = 0
    assert virtual[0, 0] == 99
    np.testing.assert_array_equal(virtual[1:3], data[1:3])
    with pytest.raises(Exception, match="checksum of the object"):
        virtual[4, 6]


# --------------------------------------------------------------------- virtualizarr


@pytest.mark.parametrize("kind", KINDS)
def test_virtualizarr(kind: str, tmp_path: Path) -> None:
    """Its ``ManifestStore`` reads every array; its virtual datasets are written to kerchunk."""
    pytest.importorskip("virtualizarr")
    values = filled(kind, tmp_path / "s.zarr")
    manifests = to_references(tmp_path / "s.zarr", to="virtualizarr")
    root: Any = zarr.open_group(manifests, mode="r")
    assert root.attrs.asdict() == {"made by": "test"}
    assert_equal({path: root[path][...] for path in values}, values)


def test_a_scalar_that_is_not_stored(tmp_path: Path) -> None:
    """It equals its fill value, as the `spatial_ref` of rioxarray."""
    pytest.importorskip("virtualizarr")
    store = ShardingStore(tmp_path / "s.zarr", 2)
    group = zarr.create_group(store)
    group.create_array("spatial_ref", shape=(), dtype="i8", fill_value=3)
    group.create_array("z", shape=(4,), chunks=(1,), dtype="i8")[:] = 5
    root: Any = zarr.open_group(to_references(store, to="virtualizarr"), mode="r")
    assert (root["spatial_ref"][()], root["z"][:].tolist()) == (3, [5] * 4)


def test_virtual_datasets(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    virtualizarr = pytest.importorskip("virtualizarr")
    data = np.arange(24, dtype="i4").reshape(4, 6)
    dataset = xarray.Dataset({"t": (("y", "x"), data)})
    store = ShardingStore(tmp_path / "s.zarr", chunks_per_shard=2)
    dataset.to_zarr(store, zarr_format=3, consolidated=False, encoding={"t": {"chunks": (1, 2)}})
    store.close()
    manifests = to_references(tmp_path / "s.zarr", to=virtualizarr)
    virtual = manifests.to_virtual_dataset(loadable_variables=[])
    assert len(virtual["t"].data.manifest) == 12
    both = xarray.concat([virtual, virtual], dim="y", coords="minimal", compat="override")
    found = both.vz.to_kerchunk(format="dict")["refs"]
    assert found["t/7.2"][1:] == found["t/3.2"][1:]


def test_an_array_at_the_root_goes_into_a_group(tmp_path: Path) -> None:
    """Where a form has no place for it."""
    store = ShardingStore(tmp_path / "s", 2)
    z: Any = zarr.create_array(store, shape=(4,), chunks=(1,), dtype="u1")
    z[:] = range(4)
    store.close()
    for to, out in (("virtualizarr", None), ("kerchunk-parquet", tmp_path / "o")):
        with pytest.raises(UnsupportedError, match="group="):
            to_references(tmp_path / "s", to=to, out=out)
    made: Any = zarr.open_group(
        to_references(tmp_path / "s", to="virtualizarr", group="z"), mode="r"
    )
    np.testing.assert_array_equal(made["z"][:], range(4))
    session = local_repository(tmp_path).writable_session("main")
    to_references(tmp_path / "s", to=session.store)
    np.testing.assert_array_equal(zarr.open_array(session.store, mode="r")[:], range(4))
