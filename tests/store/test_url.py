"""File system ``shard`` of fsspec: what opens URLs opens chunks that are stored in shards."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore

from tests.support.entry_points import declared, register_shard
from tests.support.processes import s3_server
from zarr_shardstore import ShardedCodecPipeline, ShardingStore, SpecError

VALUES = np.arange(1, 65, dtype="u1").reshape(8, 8)


@pytest.fixture(autouse=True)
def registered() -> None:
    register_shard()


@pytest.fixture(params=["file", "memory", "path", "zip"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store with the sharded array ``a``: 64 chunks in 16 shards."""
    where = {"memory": f"memory://{tmp_path.name}", "path": str(tmp_path / "s")}
    base = where.get(request.param, f"file://{tmp_path}/s")
    root = f"{tmp_path}/s" if request.param in ("zip", "path", "file") else base
    store = ShardingStore(root, chunks_per_shard=(2, 2))
    options: Any = {"shape": (8, 8), "chunks": (1, 1), "dtype": "u1", "compressors": None}
    z = zarr.create_array(store, name="a", **options)
    z[:] = VALUES
    store.close()
    if request.param != "zip":
        return f"shard::{base}"
    shutil.make_archive(f"{tmp_path}/s", "zip", tmp_path / "s")
    return f"shard::zip::file://{tmp_path}/s.zip"


def test_reads(url: str) -> None:
    """By zarr, by a mapper, and as files."""
    z = zarr.open_array(url, path="a", mode="r")
    np.testing.assert_array_equal(z[:], VALUES)
    np.testing.assert_array_equal(z[3, 2:7], VALUES[3, 2:7])
    assert z.shards is None
    mapper = fsspec.get_mapper(url)
    assert mapper["a/c/3/4"] == VALUES[3, 4].tobytes()
    assert sum(key.startswith("a/c/") for key in mapper) == 64
    fs, root = fsspec.url_to_fs(url)
    assert root == ""
    assert sorted(fs.ls("a/c/2", detail=False)) == [f"a/c/2/{j}" for j in range(8)]
    assert fs.info("a/c/2/2") == {"name": "a/c/2/2", "size": 1, "type": "file"}
    assert fs.info("a/c")["type"] == fs.info("")["type"] == "directory"
    assert fs.glob("a/c/*/7") == [f"a/c/{i}/7" for i in range(8)]
    assert fs.find("a/c/1", detail=True)["a/c/1/0"]["size"] == 1
    assert fs.du("a/c") == 64
    assert not fs.exists("a/c/9/9")
    with pytest.raises(FileNotFoundError):
        fs.cat_file("a/c/9/9")
    with fs.open("a/zarr.json") as file:
        assert file.read() == mapper["a/zarr.json"]
        file.seek(5)
        assert file.read(7) == mapper["a/zarr.json"][5:12]


@pytest.mark.parametrize("start", [None, 0, 3, -4, 100])
@pytest.mark.parametrize("end", [None, 0, 2, 9, -1, 10_000])
def test_ranges(start: int | None, end: int | None, tmp_path: Path) -> None:
    """As those of a slice."""
    fs = fsspec.filesystem("shard", fo=str(tmp_path))
    fs.pipe_file("x", b"0123456789")
    assert fs.cat_file("x", start, end) == b"0123456789"[start:end]
    (one, other) = fs.cat_ranges(["x", "y"], [start, start], [end, end])
    assert one == b"0123456789"[start:end]
    assert isinstance(other, FileNotFoundError)


def test_writes(tmp_path: Path) -> None:
    """New arrays get the options in the URL; parts of chunks by many threads are all there."""
    url = f"shard://?chunks_per_shard=2,2&order=C::file://{tmp_path}/s"
    z = zarr.create_array(url, name="a", shape=(8, 8), chunks=(4, 4), dtype="u1")
    assert type(z._async_array.codec_pipeline) is ShardedCodecPipeline

    def put(at: tuple[int, ...]) -> None:
        z[at] = VALUES[at]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, np.ndindex(8, 8)))
    np.testing.assert_array_equal(z[:], VALUES)
    assert os.listdir(tmp_path / "s" / "a" / "c") == ["0"]
    other = zarr.create_array(
        url,
        name="b",
        shape=(8, 8),
        chunks=(1, 1),
        dtype="u1",
        storage_options={"strategy": "rewrite"},
    )
    other[:] = VALUES
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "s", path="b")[:], VALUES)
    fs = fsspec.filesystem("shard", fo=f"{tmp_path}/s")
    assert fs.sharding_store == pickle.loads(pickle.dumps(fs)).sharding_store
    with fs.open("notes/x.txt", "wb") as file:
        file.write(b"a" * 10)
        file.write(b"b")
    assert (tmp_path / "s/notes/x.txt").read_bytes() == b"aaaaaaaaaab"
    fs.cp("notes/x.txt", "notes/y.txt")
    fs.get("notes/y.txt", str(tmp_path / "y"))
    fs.put(str(tmp_path / "y"), "notes/z.txt")
    assert fs.cat("notes/z.txt") == b"aaaaaaaaaab"
    fs.mv("notes/z.txt", "notes/w.txt")
    assert fs.ls("notes", detail=False) == ["notes/w.txt", "notes/x.txt", "notes/y.txt"]
    with pytest.raises(FileExistsError):
        fs.pipe_file("notes/w.txt", b"", mode="create")
    array: Any = zarr.create_array({}, shape=(8,), chunks=(2,), dtype="u1")
    document = json.dumps(array.metadata.to_dict()).encode()
    fs = fsspec.filesystem("shard", fo=f"{tmp_path}/s", chunks_per_shard=2)
    fs.pipe_file("new/zarr.json", document, mode="create")  # the store writes it in its own words
    with pytest.raises(FileExistsError):
        fs.pipe_file("new/zarr.json", document, mode="create")
    fs.rm("notes/w.txt")
    with pytest.raises(FileNotFoundError):
        fs.rm_file("notes/w.txt")
    fs.rm("b", recursive=True)
    assert not (tmp_path / "s/b").exists()


def test_a_relative_path_is_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the call: fsspec caches a file system for each directory, and none twice."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        fs = fsspec.filesystem("shard", fo="v.zarr")
        fs.pipe("x", name.encode())
        assert (tmp_path / name / "v.zarr/x").read_bytes() == name.encode()
        assert fsspec.filesystem("shard", fo="v.zarr") is fs
    if os.name == "posix":  # the working directory may be gone
        shutil.rmtree(tmp_path / "b")
        assert fsspec.filesystem("shard", fo=f"{tmp_path}/a/v.zarr").cat("x") == b"a"


def test_mistakes(tmp_path: Path) -> None:
    """Each is refused in words that say what to do."""
    with pytest.raises(SpecError, match="the URL of a store behind two colons: shard::s3://"):
        fsspec.filesystem("shard")
    with pytest.raises(SpecError, match=r"no options \['chunk_per_shard'\]"):
        zarr.open(f"shard://?chunk_per_shard=2::file://{tmp_path}", mode="a")
    with pytest.raises(SpecError, match="below the name of its protocol, as in storage_options="):
        zarr.open(f"shard::file://{tmp_path}", storage_options={"anon": True}, mode="a")
    (tmp_path / "a.txt").write_bytes(b"a")
    with pytest.raises(SpecError, match="is a directory or a zip archive"):
        zarr.open(f"shard::file://{tmp_path}/a.txt")
    with pytest.raises(IsADirectoryError, match="append the path of a file"):
        fsspec.open(f"shard::file://{tmp_path}").open()


def test_arrays_below_a_path(tmp_path: Path) -> None:
    """A URL may end in a group or an array, with options; zarr lists what is below."""
    base = f"file://{tmp_path}/s"
    root = zarr.open_group(f"shard::{base}", mode="w")
    root.create_group("g")
    options: Any = {"shape": (8, 8), "chunks": (1, 1), "dtype": "u1"}
    url = f"shard://g/a?chunks_per_shard=(2,2)&order=C::{base}"
    z = zarr.create_array(url, **options)
    z[:] = VALUES
    z[3, :5] = 0
    assert type(z._async_array.codec_pipeline) is ShardedCodecPipeline
    assert len(list((tmp_path / "s/g/a/c").glob("[0-3]/[0-3]"))) == 16
    group: Any = zarr.open_group(f"shard://g::{base}", mode="r")
    found: Any = zarr.open_group(f"shard::{base}", mode="r")
    assert list(group.array_keys()) == list(found["g"].array_keys()) == ["a"]
    assert [path for path, _ in found.members(max_depth=None)] == ["g", "g/a"]
    for each in (group["a"], found["g/a"]):
        assert each[3].tolist() == [0] * 5 + [30, 31, 32]
    with fsspec.open(f"shard://g/a/c/0/1::{base}") as file:
        assert file.read() == fsspec.get_mapper(f"shard://g::{base}")["a/c/0/1"]


def test_costs(tmp_path: Path) -> None:
    """Operations on an array take the requests that they take in a `ShardingStore`."""

    found = []
    for name in ("url", "store"):
        url = f"shard://?chunks_per_shard=2::memory://{tmp_path.name}/{name}"
        zarr.create_array(url, shape=(8, 8), chunks=(1, 1), dtype="u1")[:] = VALUES
        z: Any = zarr.open_array(url)
        store = z.store.fs.sharding_store
        if name == "store":
            store = pickle.loads(pickle.dumps(store))
            z = zarr.open_array(store)
        counts = [store.stats().requests]
        parts: list[Any] = [slice(None), (3, slice(2, 7)), (slice(1, 3), 5)]
        for part in parts:
            np.testing.assert_array_equal(z[part], VALUES[part])
            counts.append(store.stats().requests)
        for part in parts:
            z[part] = 9
            counts.append(store.stats().requests)
        found.append(np.diff(counts).tolist())
    assert found[0] == found[1]
    assert min(found[0]) > 0
    fs, _ = fsspec.url_to_fs(url)
    assert len(fs.ls("c/0")) == 8
    sizes = {name: info["size"] for name, info in fs.find("", detail=True).items()}
    assert sizes == {name: len(fs.cat_file(name)) for name in fs.find("")} == fs.du("", total=False)
    assert sum(sizes.values()) == fs.du("")
    before = fs.sharding_store.stats().requests
    for listed in (fs.ls, fs.du, partial(fs.find, detail=True)):
        listed("c/0")
    assert fs.sharding_store.stats().requests - before <= 3 * 2 * (1 + 4)  # 4 shards, 2 rounds


@pytest.mark.parametrize("shards", [None, (2, 2)])
def test_a_reader_cannot_write(shards: Any, tmp_path: Path) -> None:
    """What zarr has opened by ``mode="r"``."""
    url = f"shard://?chunks_per_shard=2::file://{tmp_path}"
    zarr.create_array(url, shape=(8,), chunks=(1,), dtype="u1", shards=shards and (4,))[:] = 1
    z: Any = zarr.open(url, mode="r")
    for part in (0, slice(1, 3), slice(None)):
        with pytest.raises(ValueError, match="read-only"):
            z[part] = 5
    np.testing.assert_array_equal(zarr.open_array(tmp_path)[:], np.ones(8))


def test_files(tmp_path: Path) -> None:
    """Files that are written as fsspec writes files: appended, new, in transactions; trees."""
    fs = fsspec.filesystem("shard", fo=str(tmp_path / "s"))
    for mode, text in (("wb", b"a"), ("ab", b"b"), ("ab", b"c")):
        with fs.open("x.txt", mode) as file:
            file.write(text)
    assert fs.cat_file("x.txt") == b"abc"
    # Some callers, such as pandas with fastparquet, pass the URL on.
    assert fs.cat_file(f"shard://x.txt::file://{tmp_path}/s") == b"abc"
    with mock.patch.object(fs, "cat_file", side_effect=OSError), pytest.raises(OSError):  # noqa: PT011
        fs.open("x.txt", "ab")
    gc.collect()
    assert fs.cat_file("x.txt") == b"abc", "a file that could not be opened stores nothing"
    with fs.open("y.txt", "xb") as file:
        file.write(b"y")
    with pytest.raises(FileExistsError):
        fs.open("y.txt", "xb")
    late = fs.open("late.txt", "xb")
    fs.pipe_file("late.txt", b"first")
    with pytest.raises(FileExistsError):
        late.close()
    assert fs.cat_file("late.txt") == b"first"
    late.closed = True
    assert fs.cat_file("y.txt") == b"y"
    with fs.transaction, fs.open("z.txt", "wb") as file:
        file.write(b"z" * 6_000_000)
        file.write(b"z")
    assert fs.info("z.txt")["size"] == 6_000_001
    fs.pipe_file("d/e/f", b"f")
    fs.start_transaction()
    with fs.open("z.txt", "wb") as file:
        file.write(b"new")
    fs.transaction.complete(commit=False)
    assert fs.info("z.txt")["size"] == 6_000_001
    fs.cp("d", "copy", recursive=True)
    fs.get("d", str(tmp_path / "d"), recursive=True)
    assert (tmp_path / "d/e/f").read_bytes() == fs.cat_file("copy/e/f") == b"f"


def test_sources_at_the_root_keep_their_names(tmp_path: Path) -> None:
    """In a directory that exists, as on the local file system; none is moved into itself."""
    fs = fsspec.filesystem("shard", fo=str(tmp_path / "s"))
    for key in ("results/old", "raw/x", "labels/x", "note"):
        fs.pipe_file(key, key.encode())
    for out in (str(tmp_path), f"{tmp_path}/new/", tmp_path):
        for name in ("raw", "labels", "note"):
            fs.get(name, out, recursive=True)
        assert (Path(out) / "raw/x").read_bytes() == b"raw/x"
        assert (Path(out) / "labels/x").read_bytes() == b"labels/x"
        assert (Path(out) / "note").read_bytes() == b"note"
    fs.get("raw/", str(tmp_path), recursive=True)
    assert (tmp_path / "x").read_bytes() == b"raw/x"
    fs.cp("note", "results/")
    fs.mv("raw", "results", recursive=True)
    moves: list[tuple[Any, str]] = [
        ("labels", each) for each in ("labels/", "labels/inside", "shard://labels/x", "", "/")
    ]
    moves += [("", "labels"), ("results/raw", "results"), ("note", "/"), (["labels"], "labels/")]
    moves += [("*", "results/"), ("l*", "labels")]
    for source, target in moves:
        with pytest.raises(SpecError, match="cannot be moved into itself, and was not changed"):
            fs.mv(source, target, recursive=True)
    keys = ["labels/x", "note", "results/note", "results/old", "results/raw/x"]
    assert sorted(fs.find("")) == keys
    for pattern, target in (("results/[nor]*", "all/"), ("l*", "labels_old"), ("no*", "note_old")):
        fs.mv(pattern, target, recursive=True)
    moved = ["all/note", "all/old", "all/raw/x", "labels_old/labels/x", "note_old/note"]
    assert sorted(fs.find("")) == moved
    fs.mv(["all/old", "note_old"], "k", recursive=True)
    fs.mv(["all/raw"], ["raw"], recursive=True)
    assert sorted(fs.find("")) == [
        "all/note",
        "k/note_old/note",
        "k/old",
        "labels_old/labels/x",
        "raw/x",
    ]


def test_moves_that_would_lose_something_are_refused() -> None:
    """Names with brackets are names where they are removed, too."""
    fs = fsspec.filesystem("shard", fo="memory://losing-moves")
    for key in ("x[1]/a", "x1/a", "g/a", "h/a"):
        fs.pipe_file(key, key.encode())
    losing: list[tuple[Any, Any, dict[str, Any]]] = [
        ("g", "k", {"maxdepth": 1}),
        (["g/a", "h/a"], "k/", {}),
        ("x[1]", "y", {}),
        (["g/a", "h"], ["h/b", "k"], {}),
    ]
    for source, target, options in losing:
        with pytest.raises(SpecError):
            fs.mv(source, target, recursive=True, **options)
    assert sorted(fs.find("")) == ["g/a", "h/a", "x1/a", "x[1]/a"]
    fs.rm("x[1]", recursive=True)
    assert sorted(fs.find("")) == ["g/a", "h/a", "x1/a"]


def sum_of(z: Any) -> int:
    return int(z[:].sum())


def test_after_a_fork(tmp_path: Path) -> None:
    """The file system of the parent is used on, also where fsspec's own refuse."""
    fs = fsspec.filesystem("shard", fo=str(tmp_path), chunks_per_shard=2)
    z: Any = zarr.create_array(fs.get_mapper(""), shape=(8, 8), chunks=(1, 1), dtype="u1")
    z[:] = VALUES
    assert len(fs.ls("c/0")) == 8
    child = os.fork()
    if child == 0:
        is_right = len(fs.ls("c/1")) == 8 and int(z[:].sum()) == VALUES.sum()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes(start_method: str, tmp_path: Path) -> None:
    """An array that was opened by a URL pickles to processes, and parents may have read it."""
    url = f"shard://?chunks_per_shard=2::file://{tmp_path}/s"
    z = zarr.create_array(url, shape=(8, 8), chunks=(1, 1), dtype="u1")
    z[:] = VALUES
    assert sum_of(z) == VALUES.sum()
    fsspec.filesystem("shard", fo=f"{tmp_path}/s").find("")
    with multiprocessing.get_context(start_method).Pool(2) as pool:
        assert pool.map_async(sum_of, [z] * 4).get(60) == [VALUES.sum()] * 4


PIPELINES = [
    f"zarr.core.codec_pipeline.{name}"
    for name in ("BatchedCodecPipeline", "FusedCodecPipeline")
    if hasattr(zarr.core.codec_pipeline, name)
]


@pytest.mark.parametrize("shards", [None, (20, 20)], ids=["plain chunks", "shards of zarr"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_pipeline_of_zarr_that_a_user_chose(pipeline: str, shards: Any, tmp_path: Path) -> None:
    """It reads and writes regions that cut chunks. Only ours keeps the parts that several write: a
    warning says so, once, at the first write."""
    code = f"""
import sys, warnings
import numpy as np, zarr
zarr.config.set({{"codec_pipeline.path": {pipeline!r}}})
warnings.simplefilter("error")
url, rng, expected = sys.argv[1], np.random.default_rng(0), np.full((40, 30), 9, "i4")
options = dict(shape=(40, 30), chunks=(5, 10), shards={shards!r}, dtype="i4", fill_value=9)
z = zarr.create_array(url, name="z", **options)
assert (z[3:33, 7:] == expected[3:33, 7:]).all()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    z[:] = expected
    z[20:40, :20] = expected[20:40, :20] = 1
    for n in range(40):
        rows, columns = (slice(*sorted(rng.integers(0, m, 2))) for m in (41, 31))
        z[rows, columns] = expected[rows, columns] = rng.choice([n, 9])
assert (z[:] == expected).all()
zarr.config.set({{"codec_pipeline.path": "zarr_shardstore.store.pipeline.ShardedCodecPipeline"}})
assert (zarr.open_array(url, path="z")[:] == expected).all()
print(type(z.async_array.codec_pipeline).__name__)
print(*[each.message for each in caught if "codec pipeline" in str(each.message)])
"""
    url = f"shard://?chunks_per_shard=2,2::file://{tmp_path}/v.zarr"
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True)
    name, *warned = done.stdout.splitlines() or [done.stderr]
    assert name == pipeline.rpartition(".")[2], done.stderr
    assert len(warned) == 1
    assert warned[0].count("another codec pipeline writes a sharded array") == 1


async def test_in_an_event_loop(tmp_path: Path) -> None:
    url = f"shard://?chunks_per_shard=2::file://{tmp_path}"
    z = await zarr.api.asynchronous.create_array(
        url, shape=(8, 8), chunks=(1, 1), dtype="u1", compressors=None
    )
    await z.setitem(slice(None), VALUES)
    np.testing.assert_array_equal(await z.getitem(slice(None)), VALUES)
    fs, _ = fsspec.url_to_fs(url, asynchronous=True)
    values = await asyncio.gather(*(fs._cat_file(f"c/{i}/{i}") for i in range(8)))
    assert values == [bytes([v]) for v in np.diag(VALUES)]
    assert await fs._cat_ranges(["c/0/0", "c/0/1"], 0, 1) == [b"\1", b"\2"]


@dataclass(frozen=True)
class Resolution:
    """As zarr's proposal has it: a store, and the path in it that a URL means."""

    store: Any
    path: str = ""
    zarr_format: int | None = None


@dataclass(frozen=True)
class Context:
    """As zarr's proposal has it: the part of a URL before a segment, resolved by zarr."""

    preceding: tuple[Any, ...]
    mode: str | None
    storage_options: dict[str, Any] | None
    found: Resolution

    async def resolve_preceding(self, *, storage_options: Any) -> Resolution:
        assert storage_options == {"of": "the root"}
        return self.found


class ContextWithMode(Context):
    """With a mode that an adapter may choose, and a flag for reading."""

    @property
    def read_only(self) -> bool:
        return self.mode == "r"

    async def resolve_preceding(self, *, mode: Any = "a", storage_options: Any = ...) -> Resolution:
        assert (mode, storage_options) == ("a", {"of": "the root"})
        return self.found


class ContextWithoutOptions(Context):
    """The options of the root are no business of an adapter."""

    async def resolve_preceding(self) -> Resolution:  # type: ignore[override]
        return self.found


@pytest.mark.parametrize("make", [Context, ContextWithMode, ContextWithoutOptions])
@pytest.mark.parametrize("is_open", [False, True])
async def test_adapter_of_each_version_of_the_proposal(
    make: type[Context], tmp_path: Path, *, is_open: bool
) -> None:
    """The store before the segment may be open, or not yet; and read only."""
    (entry,) = declared("zarr.url_adapters").items()
    adapter = EntryPoint(name=entry[0], value=entry[1], group="zarr.url_adapters").load()
    segment = SimpleNamespace(scheme="shard", body="", query="chunks_per_shard=2,2")
    root = SimpleNamespace(scheme="memory", body="", query=None, raw="memory:")
    options: dict[str, Any] = {"of": "the root", "shard": {"order": "C"}}
    base = zarr.storage.ZipStore(tmp_path / "a.zip", mode="w")
    if is_open:
        await base._open()
    found = Resolution(base, "a", 3)
    opened = await adapter.open_pipeline_segment(segment, make((root,), "a", options, found))
    assert opened.store._is_open
    assert base._is_open
    assert not opened.store.read_only
    z = await zarr.api.asynchronous.create_array(
        opened.store, name=opened.path, shape=(4,), chunks=(4,), dtype="u1"
    )
    await z.setitem(slice(None), [1, 2, 3, 4])
    reader = await adapter.open_pipeline_segment(segment, make((root,), "r", options, found))
    assert reader.store.read_only
    z = await zarr.api.asynchronous.open_array(store=reader.store, path="a", mode="r")
    np.testing.assert_array_equal(await z.getitem(slice(None)), [1, 2, 3, 4])


async def test_adapter_of_zarrs_urls(tmp_path: Path) -> None:
    """For a zarr that has URL pipelines: ``file:///…|zip:…|shard:b?chunks_per_shard=2,2``."""
    (entry,) = declared("zarr.url_adapters").items()
    assert entry[0] == "shard"
    adapter = EntryPoint(name=entry[0], value=entry[1], group="zarr.url_adapters").load()
    segment = SimpleNamespace(scheme="shard", body="/b/", query="chunks_per_shard=2,2")
    root = SimpleNamespace(scheme="file", body=str(tmp_path), query=None, raw=f"file:{tmp_path}")
    options: dict[str, Any] = {"of": "the root", "shard": {"order": "C"}}
    found = Resolution(LocalStore(tmp_path), "a", 3)
    opened = await adapter.open_pipeline_segment(segment, Context((root,), "a", options, found))
    assert (opened.path, opened.zarr_format) == ("a/b", 3)
    z = await zarr.api.asynchronous.create_array(
        opened.store, name=opened.path, shape=(8, 8), chunks=(1, 1), dtype="u1"
    )
    await z.setitem(slice(None), VALUES)
    assert len(list((tmp_path / "a/b/c").glob("[0-3]/[0-3]"))) == 16
    reader = await adapter.open_pipeline_segment(segment, Context((root,), "r", options, found))
    assert reader.store.read_only
    wrong = SimpleNamespace(scheme="shard", body="", query="chunk_per_shard=2")
    with pytest.raises(SpecError, match="chunk_per_shard"):
        await adapter.open_pipeline_segment(wrong, Context((root,), "a", options, found))


@pytest.mark.skipif(
    find_spec("zarr.abc.url_pipeline") is None, reason="this zarr has no URL pipelines"
)
def test_urls_of_zarr(tmp_path: Path) -> None:
    options: Any = {"shape": (8, 8), "chunks": (1, 1), "dtype": "u1"}
    zarr.create_array(f"file://{tmp_path}|shard:a?chunks_per_shard=2", **options)[:] = VALUES
    z: Any = zarr.open_array(f"file://{tmp_path}|shard:a", mode="r")
    np.testing.assert_array_equal(z[:], VALUES)
    assert len(list((tmp_path / "a/c").glob("[0-3]/[0-3]"))) == 16


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield where


@pytest.mark.filterwarnings("ignore:Your installed version of s3fs")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:through fsspec nothing keeps")
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_s3(client: str, s3: dict[str, Any]) -> None:
    """Options of either client, below ``s3`` or as `target_options`."""
    pytest.importorskip("s3fs", minversion="2025.10" if client == "s3fs" else None)
    options: dict[str, Any] = {"key": "k", "secret": "s"}
    options["client_kwargs"] = {"endpoint_url": s3["endpoint"], "region_name": "us-east-1"}
    if client == "s3fs":
        options["config_kwargs"] = {"max_pool_connections": 20}  # obstore knows no such option
    storage_options = {"shard": {"chunks_per_shard": (4, 4)}, "s3": options}
    url = f"shard::s3://bucket/{client}.zarr"
    store: Any = {"store": url, "storage_options": storage_options}
    zarr.create_array(**store, name="a", shape=(8, 8), chunks=(1, 1), dtype="u1")[:] = VALUES
    z: Any = zarr.open_array(**store, path="a", mode="a")
    z.append(VALUES)
    np.testing.assert_array_equal(
        zarr.open_array(**store, path="a", mode="r")[4:12, 2], [*VALUES[4:, 2], *VALUES[:4, 2]]
    )
    fs = fsspec.filesystem("shard", fo=url.removeprefix("shard::"), target_options=options)
    kinds = {"obstore": "ObjectStore", "s3fs": "FsspecStore"}
    assert type(fs.sharding_store.base).__name__ == kinds[client]
    assert len(fs.glob("a/c/*/3")) == 16
    assert json.loads(fs.cat_file("a/zarr.json"))["shape"] == [16, 8]
    assert len(fs.sharding_store.read_encoded("a", [(15, 7)])[0]) > 1
    by_option = f"shard://a?fo=s3://bucket/{client}.zarr"  # here fsspec needs no client of S3
    z = zarr.open_array(by_option, storage_options={"target_options": options}, mode="r")
    np.testing.assert_array_equal(z[8:], VALUES)
    mapper = fsspec.get_mapper(url, **{"s3": options})
    assert sum("/c/" in key for key in mapper) == 128


@pytest.mark.filterwarnings("ignore:Your installed version of s3fs")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:through fsspec nothing keeps")
@pytest.mark.parametrize("view", ["chunks", "shards"])
def test_s3fs_keeps_its_listings(view: Any, s3: dict[str, Any]) -> None:
    """Shards that another process stores after a listing are read, and never replaced."""
    pytest.importorskip("s3fs", minversion="2025.10")
    options: dict[str, Any] = {"key": "k", "secret": "s"}
    options["client_kwargs"] = {"endpoint_url": s3["endpoint"], "region_name": "us-east-1"}
    url = f"s3://bucket/{view}-listed.zarr"
    base = FsspecStore.from_url(url, storage_options=options)
    store = ShardingStore(base, chunks_per_shard=4, view=view)
    z: Any = zarr.create_array(
        store, name="a", shape=(64,), chunks=(2,), dtype="u1", compressors=None
    )
    z[:8] = 1
    other: Any = zarr.open_array(ShardingStore(url, storage_options=options), path="a")
    for i, n_stored in ((1, 1), (2, 2)):
        assert z.nchunks_initialized == 4 * n_stored
        sync(base.fs._ls(f"bucket/{view}-listed.zarr/a/c"))  # by another part of the program
        other[8 * i : 8 * i + 8] = 7
        z[8 * i] = 5
    expected = [1] * 8 + ([5] + [7] * 7) * 2 + [0] * 40
    assert z[:].tolist() == other[:].tolist() == expected


def test_xarray(tmp_path: Path) -> None:
    """A data set, by URL; appended to, with chunks of dask, and in one piece."""
    xr = pytest.importorskip("xarray")
    url = f"shard::file://{tmp_path}/x"
    data = xr.Dataset({"a": (("y", "x"), VALUES)})
    options: Any = {"zarr_format": 3, "consolidated": False}
    target = f"shard://?chunks_per_shard={{'y':2,'x':2}}::file://{tmp_path}/x"
    data.chunk({"y": 2, "x": 2}).to_zarr(target, **options)
    data.chunk({"y": 2, "x": 2}).to_zarr(url, append_dim="y", **options)
    expected = xr.concat([data, data], "y")
    found = xr.open_zarr(url, consolidated=False)
    assert found.a.chunks == ((2,) * 8, (2,) * 4)
    xr.testing.assert_identical(found.load(), expected)
    found = xr.open_dataset(url, engine="zarr", consolidated=False)
    xr.testing.assert_identical(found.load(), expected)
    assert len(list((tmp_path / "x/a/c").glob("[0-3]/[0-1]"))) == 8


def test_a_path_of_one_letter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec makes a protocol of it, and no directory is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"write \./v"):
        fsspec.url_to_fs("shard::v")
    assert os.listdir(tmp_path) == []
    fsspec.url_to_fs("shard::./v")
