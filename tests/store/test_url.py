"""File system ``shard`` of fsspec: what opens URLs opens chunks that are stored in shards."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr

from zarr_shardstore import ShardedCodecPipeline, ShardingStore, SpecError
from zarr_shardstore.doors.filesystem import ShardFileSystem

VALUES = np.arange(1, 65, dtype="u1").reshape(8, 8)


@pytest.fixture(autouse=True)
def registered() -> None:
    """As the entry point does."""
    fsspec.register_implementation("shard", ShardFileSystem, clobber=True)


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
    import shutil

    shutil.make_archive(f"{tmp_path}/s", "zip", tmp_path / "s")
    return f"shard::zip::file://{tmp_path}/s.zip"


def test_the_entry_point_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    name = f"{ShardFileSystem.__module__}:{ShardFileSystem.__name__}"
    assert f'[project.entry-points."fsspec.specs"]\nshard = "{name}"' in text


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
    (one, other) = fs.cat_ranges(["x", "y"], [start, 0], [end, 1])
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
    fs.rm("notes/w.txt")
    with pytest.raises(FileNotFoundError):
        fs.rm_file("notes/w.txt")
    fs.rm("b", recursive=True)
    assert not (tmp_path / "s/b").exists()


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="needs the URL of a store"):
        fsspec.filesystem("shard")
    with pytest.raises(TypeError, match="chunk_per_shard"):
        fsspec.filesystem("shard", fo=str(tmp_path), chunk_per_shard=2)


def test_xarray(url: str, tmp_path: Path) -> None:
    """A data set, by URL."""
    xr = pytest.importorskip("xarray")
    target = f"shard://?chunks_per_shard=2,2::file://{tmp_path}/x"
    data = xr.Dataset({"a": (("y", "x"), VALUES)}).chunk({"y": 2, "x": 2})
    data.to_zarr(target, zarr_format=3, consolidated=False)
    found = xr.open_zarr(f"shard::file://{tmp_path}/x", consolidated=False)
    xr.testing.assert_identical(found.load(), data.load())
    assert len(list((tmp_path / "x/a/c").rglob("*/[0-9]"))) == 4
