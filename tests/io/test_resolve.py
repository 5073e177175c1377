"""Whatever stands for a base store: paths, URLs, file systems, mappers, obstore, mappings."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore, LocalStore, ObjectStore, StorePath

from tests.store.bases import OtherMapping
from zarr_shardstore import ShardingStore
from zarr_shardstore.io.local_backend import LocalBackend
from zarr_shardstore.io.mapping_backend import MappingBackend
from zarr_shardstore.io.obstore_backend import ObstoreBackend
from zarr_shardstore.io.resolve import backend_of, base_store_of
from zarr_shardstore.io.zarr_backend import ZarrBackend


def memory_url() -> str:
    return f"memory://resolve-{uuid.uuid4().hex}"


def obstore_memory() -> Any:
    return pytest.importorskip("obstore.store").MemoryStore()


FORMS: dict[str, tuple[Any, type, type]] = {
    "path": (lambda tmp: tmp, LocalStore, LocalBackend),
    "string": (str, LocalStore, LocalBackend),
    "file URL": (lambda tmp: f"file://{tmp}", LocalStore, LocalBackend),
    "memory URL": (lambda _: memory_url(), FsspecStore, ZarrBackend),
    "file system": (lambda _: fsspec.filesystem("memory"), FsspecStore, ZarrBackend),
    "memory mapper": (lambda _: fsspec.get_mapper(memory_url()), FsspecStore, ZarrBackend),
    "local mapper": (lambda tmp: fsspec.get_mapper(str(tmp)), LocalStore, LocalBackend),
    "obstore": (lambda _: obstore_memory(), ObjectStore, ObstoreBackend),
    "StorePath": (lambda tmp: StorePath(LocalStore(tmp)), LocalStore, LocalBackend),
    "dict": (lambda _: {}, dict, MappingBackend),
    "other mapping": (lambda _: OtherMapping(), OtherMapping, MappingBackend),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_base_store(tmp_path: Path, form: str) -> None:
    """It becomes the expected store, and an array on it is sharded and read back."""
    make, store_cls, backend_cls = FORMS[form]
    given = make(tmp_path)
    base = base_store_of(given)
    assert type(base) is store_cls
    assert type(backend_of(base)) is backend_cls
    store = ShardingStore(given, chunks_per_shard=2)
    path = f"a-{uuid.uuid4().hex}/z"  # a file system is shared by all that use it
    data = np.arange(36, dtype="i4").reshape(6, 6)
    z = zarr.create_array(store, name=path, shape=data.shape, chunks=(2, 2), dtype="i4")
    z[:] = data
    again = zarr.open_array(ShardingStore(given), path=path)
    np.testing.assert_array_equal(again[:], data)
    assert dict(again.attrs) == {}
    again.attrs["x"] = 1


def test_values_in_a_mapper_are_plain_bytes(tmp_path: Path) -> None:
    """An fsspec mapper and a plain dict hold the same keys and bytes."""
    mapper = fsspec.get_mapper(memory_url())
    plain: dict[str, bytes] = {}
    for base in (mapper, plain):
        z = zarr.create_array(ShardingStore(base, chunks_per_shard=2), shape=(4,), dtype="i4")
        z[:] = 5
    assert dict(mapper.items()) == plain
    assert all(type(v) is bytes for v in plain.values())


def test_storage_options_reach_fsspec() -> None:
    """For URLs that fsspec opens."""
    store = ShardingStore(memory_url(), storage_options={"skip_instance_cache": True})
    assert isinstance(store.base, FsspecStore)
