"""Whatever stands for a base store: paths, URLs, file systems, mappers, obstore, mappings."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore, LocalStore, ObjectStore, StorePath, WrapperStore, ZipStore

from tests.support.bases import OtherMapping, fsspec_local
from zarr_shardstore import ReadOnlyError, ShardingMapping, ShardingStore, SpecError, get_shard_info
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.io.backends.obstore import ObstoreBackend
from zarr_shardstore.io.backends.resolve import backend_of, base_store_of
from zarr_shardstore.io.backends.wrapped_files import WrappedFilesBackend
from zarr_shardstore.io.backends.zarr_store import ZarrBackend


def memory_url() -> str:
    return f"memory://resolve-{uuid.uuid4().hex}"


def obstore_local(path: Path) -> Any:
    return pytest.importorskip("obstore.store").LocalStore(str(path))


def obstore_memory() -> Any:
    return pytest.importorskip("obstore.store").MemoryStore()


def universal(protocol: str, path: str) -> Any:
    """What is asked of a path of universal_pathlib, which is not installed here."""
    return SimpleNamespace(fs=fsspec.filesystem(protocol), path=path)


FORMS: dict[str, tuple[Any, type, type]] = {
    "path": (lambda tmp: tmp, LocalStore, LocalBackend),
    "string": (str, LocalStore, LocalBackend),
    "file URL": (lambda tmp: f"file://{tmp}", LocalStore, LocalBackend),
    "fsspec on files": (fsspec_local, FsspecStore, LocalBackend),
    "obstore on files": (obstore_local, ObjectStore, LocalBackend),
    "wrapper of files": (
        lambda tmp: WrapperStore(LocalStore(tmp)),
        WrapperStore,
        WrappedFilesBackend,
    ),
    "wrapped fsspec": (
        lambda tmp: WrapperStore(fsspec_local(tmp)),
        WrapperStore,
        WrappedFilesBackend,
    ),
    "memory URL": (lambda _: memory_url(), FsspecStore, ZarrBackend),
    "file system": (lambda _: fsspec.filesystem("memory"), FsspecStore, ZarrBackend),
    "memory mapper": (lambda _: fsspec.get_mapper(memory_url()), FsspecStore, ZarrBackend),
    "local mapper": (lambda tmp: fsspec.get_mapper(str(tmp)), LocalStore, LocalBackend),
    "universal path": (lambda _: universal("memory", "/resolve-u"), FsspecStore, ZarrBackend),
    "local universal path": (lambda tmp: universal("file", str(tmp)), LocalStore, LocalBackend),
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


@pytest.mark.parametrize("as_given", [str, Path, lambda path: f"file://{path}"])
def test_the_path_of_a_zip_archive(tmp_path: Path, as_given: Any) -> None:
    """What is there is opened for reading, shards and others alike; what is not is not made."""
    path = tmp_path / "a.zip"
    with pytest.raises(SpecError, match=r"ZipStore\('.*a.zip', mode='w'\)"):
        ShardingStore(as_given(path), chunks_per_shard=2)
    assert not path.exists()
    data = np.arange(12, dtype="i4")
    with ZipStore(path, mode="w") as archive:
        store = ShardingStore(archive, chunks_per_shard={"a": 2})
        with store.batch():
            for name in "ab":
                zarr.create_array(store, name=name, data=data, chunks=(2,))
    store = ShardingStore(as_given(path))
    assert isinstance(store.base, ZipStore)
    for name in "ab":
        np.testing.assert_array_equal(zarr.open_array(store, path=name, mode="r")[:], data)
    assert len([key for key in ShardingMapping(store) if key.startswith("a/c/")]) == 6
    assert get_shard_info(as_given(path)).n_objects == 3 + 6
    with pytest.raises(ReadOnlyError):
        ShardingMapping(as_given(path))["a/c/0"] = b"x"


def test_the_path_of_a_file_or_of_a_directory_with_the_name_of_an_archive(tmp_path: Path) -> None:
    """A file is no directory: the error says so before anything is asked for."""
    file = tmp_path / "notes.txt"
    file.write_text("no archive")
    with pytest.raises(SpecError, match="is a file"):
        ShardingStore(file)
    directory = tmp_path / "b.zip"
    directory.mkdir()
    assert isinstance(ShardingStore(directory).base, LocalStore)
