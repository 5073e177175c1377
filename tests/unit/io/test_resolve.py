"""Whatever stands for a base store: paths, URLs, file systems, mappers, obstore, mappings."""

from __future__ import annotations

import os
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.storage import (
    FsspecStore,
    LocalStore,
    LoggingStore,
    MemoryStore,
    ObjectStore,
    StorePath,
    WrapperStore,
    ZipStore,
)

from tests.support.bases import OtherMapping, fsspec_local
from tests.support.kit import objects_of
from zarr_shardstore import ReadOnlyError, ShardingMapping, ShardingStore, SpecError, get_shard_info
from zarr_shardstore.io.backends.fsspec_store import FsspecBackend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.io.backends.obstore import ObstoreBackend
from zarr_shardstore.io.backends.resolve import backend_of, base_store_of, stores_above
from zarr_shardstore.io.backends.store_traits import scope_of_store
from zarr_shardstore.io.backends.wrapped_files import WrappedFilesBackend, WrappedFsspecBackend
from zarr_shardstore.store.base_handle import open_base


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
        WrappedFsspecBackend,
    ),
    "memory URL": (lambda _: memory_url(), FsspecStore, FsspecBackend),
    "file system": (lambda _: fsspec.filesystem("memory"), FsspecStore, FsspecBackend),
    "memory mapper": (lambda _: fsspec.get_mapper(memory_url()), FsspecStore, FsspecBackend),
    "local mapper": (lambda tmp: fsspec.get_mapper(str(tmp)), LocalStore, LocalBackend),
    "universal path": (lambda _: universal("memory", "/resolve-u"), FsspecStore, FsspecBackend),
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


# ---------------------------------------------------------------------- URLs of clouds


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither in the environment nor in files."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


KEYS = {"access_key_id": "k", "secret_access_key": "s"}

CLOUDS: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "nothing": ("s3://b/p", None, {"bucket": "b"}),
    "a scheme of Hadoop": ("s3a://b/p", None, {"bucket": "b"}),
    "obstore's names": ("s3://b/p", KEYS, {"bucket": "b", **KEYS}),
    "s3fs's names": (
        "s3://b/p",
        {"key": "k", "secret": "s", "token": None, "endpoint_url": "http://h", "anon": False},
        {"bucket": "b", **KEYS, "endpoint": "http://h", "skip_signature": "false"},
    ),
    "the variable's name": (
        "s3://b/p",
        {"AWS_ENDPOINT_URL": "http://h"},
        {"bucket": "b", "endpoint": "http://h"},
    ),
    "those of its client": (
        "s3://b/p",
        {"anon": True, "client_kwargs": {"region_name": "r", "endpoint_url": "https://h"}},
        {"bucket": "b", "region": "r", "endpoint": "https://h", "skip_signature": "true"},
    ),
    "gcs": ("gcs://b/p", {"token": "anon"}, {"bucket": "b", "skip_signature": "true"}),
    "gs": ("gs://b/p", {"skip_signature": True}, {"bucket": "b", "skip_signature": "true"}),
    "az": ("az://b/p", {"account_name": "a"}, {"container_name": "b", "account_name": "a"}),
    "abfs": (
        "abfss://b@a.dfs.core.windows.net/p",
        {"anon": True},
        {"container_name": "b", "account_name": "a", "skip_signature": "true"},
    ),
}


@pytest.mark.parametrize("name", CLOUDS)
def test_urls_of_clouds_go_through_obstore(name: str, no_credentials: Path) -> None:
    """With options in both spellings; ``repr`` shows the client."""
    url, options, expected = CLOUDS[name]
    store: Any = base_store_of(url, options)
    assert type(store) is ObjectStore
    assert store.store.config == expected
    assert store.store.prefix == "p"
    assert "object_store://" in repr(ShardingStore(url, None, storage_options=options))
    is_plain_http = str(expected.get("endpoint")).startswith("http://")
    assert bool(store.store.client_options) == is_plain_http


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_may_be_plain_http(
    variable: str, no_credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for s3fs and boto3; an endpoint among the options comes first."""
    monkeypatch.setenv(variable, "http://h")
    store: Any = base_store_of("s3://b/p")
    assert list(store.store.client_options) == ["allow_http"]
    store = base_store_of("s3://b/p", {"endpoint": "https://h"})
    assert not store.store.client_options


def test_a_path_in_a_url_is_taken_as_it_is_spelled(no_credentials: Path) -> None:
    """As fsspec takes it: no query, no fragment, no percent sign is special."""
    store: Any = base_store_of("s3://B_1/a%20b/\u00e4 ?x=1#y")
    assert (store.store.config["bucket"], store.store.prefix) == ("B_1", "a%20b/\u00e4 ?x=1#y")


def test_keys_of_a_profile(no_credentials: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3fs finds them; the environment and the caller come first."""
    (no_credentials / "AWS_SHARED_CREDENTIALS_FILE").write_text(
        "[lab]\naws_access_key_id = k\naws_secret_access_key = s\n"
    )
    (no_credentials / "AWS_CONFIG_FILE").write_text("[profile lab]\nregion = r\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")

    def config(options: Any = None) -> Any:
        store: Any = base_store_of("s3://b", options)
        return store.store.config

    assert config() == {"bucket": "b", **KEYS, "region": "r"}
    assert config({"anon": True}) == {"bucket": "b", "skip_signature": "true"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    assert "region" not in config()


class OpenedError(Exception):
    """fsspec was asked for a store."""


def test_options_that_only_fsspec_has(
    no_credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lead to fsspec; with obstore's beside them there is an error, and nothing is ignored."""

    def from_url(url: str, storage_options: Any) -> Any:
        raise OpenedError(url, storage_options)

    monkeypatch.setattr(FsspecStore, "from_url", from_url)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("s3://b/p", {"use_listings_cache": False, "key": "k"}),
        ("s3://b/p", {"client_kwargs": {"verify": False}}),
        ("gs://b/p", {"token": "x.json"}),
        ("az://b/p", {"connection_string": "x"}),
        ("simplecache::s3://b/p", {"s3": {"anon": True}}),
        ("memory://p", {}),
    ]
    for url, options in cases:
        with pytest.raises(OpenedError) as said:
            base_store_of(url, options)
        assert said.value.args == (url, options)
    both = {"use_ssl": False, "skip_signature": True}
    expected = pytest.raises(SpecError, match=r"of \['skip_signature'\] fsspec knows nothing")
    with warnings.catch_warnings(action="ignore"), expected:  # fsspec warns of an old s3fs
        base_store_of("s3://b/p", both)
    with pytest.raises(SpecError, match="Account must be specified"):
        base_store_of("az://b/p")


def test_a_client_that_is_missing(no_credentials: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra that installs it."""
    for name in ("obstore", "obstore.store", "obstore.exceptions", "gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, name, None)
    for url, extra in [("gs://b", "gcs"), ("az://b", "azure")]:
        with pytest.raises(ImportError, match=rf"pip install \"zarr-shardstore\[{extra}\]\""):
            ShardingStore(url)


# ------------------------------------------------------------- paths inside of stores

WHOLE: dict[str, Callable[[Path], Any]] = {
    "local": LocalStore,
    "fsspec": lambda _: FsspecStore.from_url(memory_url()),
    "fsspec on local files": fsspec_local,
    "obstore on local files": lambda tmp: ObjectStore(obstore_local(tmp)),
}


@pytest.mark.parametrize("form", ["group", "path"])
@pytest.mark.parametrize("kind", WHOLE)
def test_a_part_of_a_store(tmp_path: Path, kind: str, form: str) -> None:
    """The shards are where those of the whole store are, and so are their locks and indexes."""
    whole = WHOLE[kind](tmp_path)
    group = zarr.open_group(whole, path="g/h")
    part: Any = group if form == "group" else StorePath(whole, "g/h")
    store = ShardingStore(part, chunks_per_shard=2)
    z = zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="i4")
    z[:] = 1
    of_whole = zarr.open_array(ShardingStore(whole), path="g/h/z")
    of_whole[1] = 2
    np.testing.assert_array_equal(z[:], [1, 2, 1, 1, 1, 1, 1, 1])
    shards = [key for key in objects_of(whole) if key.startswith("g/h/z/c/")]
    assert len(shards) == 4
    assert open_base(part).overlap(open_base(whole)) == "inside"
    assert [array.path for array in get_shard_info(part).arrays] == ["z"]
    read_only = ShardingStore(StorePath(whole.with_read_only(True), "g/h"))
    assert read_only.read_only
    over = zarr.open_group(ShardingStore(whole), path="g/h", mode="r")
    assert [array.path for array in get_shard_info(over).arrays] == ["z"]
    with pytest.raises(SpecError, match="ShardingStore"):
        ShardingStore(zarr.open_group(ShardingStore(whole)))


def test_a_part_of_a_bucket() -> None:
    """A prefix, with all options of the client."""
    obstore = pytest.importorskip("obstore")
    options = {"skip_signature": True, "region": "r", "client_options": {"timeout": "9s"}}
    for prefix, expected in [(None, "g/h"), ("p", "p/g/h")]:
        client = obstore.store.S3Store("b", prefix=prefix, **options)
        whole = ObjectStore(client, read_only=True)
        part: Any = base_store_of(StorePath(whole, "g/h"))
        assert (part.read_only, part.store.prefix) == (True, expected)
        assert part.store.config == client.config
        assert part.store.client_options == client.client_options
        assert open_base(part).overlap(open_base(whole)) == "inside"


def test_a_part_of_a_root(tmp_path: Path) -> None:
    """It is below the root, and not below the working directory."""
    path = tmp_path.as_posix().strip("/")
    part: Any = base_store_of(StorePath(LocalStore("/"), path))
    assert part.root == tmp_path
    assert [below for _, below in stores_above(part)][-1] == path
    fs = AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=True)
    of_client: Any = base_store_of(StorePath(FsspecStore(fs, path="/"), "x/y"))
    assert of_client.path == "/x/y"
    above: list[Any] = [store for store, _ in stores_above(of_client)]
    assert [store.path for store in above] == ["/x", "/"]


def test_stores_without_parts(tmp_path: Path) -> None:
    """They are refused in words, and wrapped as a whole."""
    archive = ZipStore(tmp_path / "a.zip", mode="w")
    for store in (archive, MemoryStore(), LoggingStore(MemoryStore())):
        assert base_store_of(StorePath(store)) is store
        with pytest.raises(SpecError, match="no part can be wrapped, here 'g'"):
            ShardingStore(StorePath(store, "g"))


def test_options_of_the_client_are_taken_beside_those_of_the_store(no_credentials: Path) -> None:
    """As the command line gives them; obstore panics at them there."""
    options = {"endpoint": "http://h", "allow_http": "true", "timeout": "9s"}
    store: Any = base_store_of("s3://b/p", options)
    assert store.store.client_options == {"allow_http": "true", "timeout": "9s"}


def test_a_url_with_one_slash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a directory; one of this name that is there is opened."""
    monkeypatch.chdir(tmp_path)
    for url in ("s3:/bucket/x", "file:/tmp/x", "R2:/x", Path("s3://bucket/x")):
        with pytest.raises(SpecError, match="one slash"):
            base_store_of(url)
    Path("s3:/there").mkdir(parents=True)
    assert isinstance(base_store_of("s3:/there"), LocalStore)
    assert isinstance(base_store_of("c:/x"), LocalStore)


@pytest.mark.parametrize("kind", ["fsspec", "obstore"])
def test_directories_above_a_store(kind: str) -> None:
    """Each up to the bucket, with the client and the options of the store."""
    expected = [("a/b/", "c"), ("a/", "b/c"), ("", "a/b/c")]
    if kind == "fsspec":
        store: Any = base_store_of("memory://a/b/c")
    else:
        client = pytest.importorskip("obstore.store").S3Store
        store = ObjectStore(client("bucket", prefix="a/b/c", region="x", skip_signature=True))
    above = [(*scope_of_store(each), path) for each, path in stores_above(store)]
    place = scope_of_store(store)[0]
    assert above == [(place, prefix, path) for prefix, path in expected]
