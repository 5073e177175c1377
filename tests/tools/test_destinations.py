"""Odd destinations and stores: a conversion works, or is refused in words and changes nothing."""

from __future__ import annotations

import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import obstore
import pytest
import zarr
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import LocalStore, LoggingStore, MemoryStore, ZipStore

from tests.support.bases import fsspec_memory
from tests.support.hierarchies import V2, V3, ArrayOf, Counting, grid_coords, meaning, view
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    SpecError,
    from_native,
    reshard,
    shard_store,
    to_native,
    unshard_store,
)
from zarr_shardstore.errors import ReadOnlyError, ShardStoreError, UnsupportedError

CONVERSIONS: dict[str, Callable[..., Any]] = {
    "shard": lambda source, to=None: shard_store(source, to, chunks_per_shard=(3, 2)),
    "unshard": lambda source, to=None: unshard_store(source, to),
    "reshard": lambda source, to=None: reshard(source, (4, 1), to),
}
IN_PLACE: dict[str, Callable[..., Any]] = {
    **CONVERSIONS,
    "to_native": to_native,
    "from_native": from_native,
    "compact of a mapping": lambda store: ShardingMapping(store).compact(),
    "consolidate": lambda store: ShardingMapping(store).consolidate_index(),
}

WORKS = None


class Unlisted(MemoryStore):
    supports_listing = False


def create(store: Any, conversion: str, *, value: int = 1, zarr_format: Any = 3) -> None:
    """An array in the form that the conversion takes; its last rows are not stored."""
    is_sharded = conversion != "shard"
    how: Any = {}
    if conversion == "to_native":
        how = {"declaration": "storage_transformers"}
    sharding = ShardingStore(store, chunks_per_shard=2 if is_sharded else None, **how)
    root = zarr.open_group(sharding, mode="a", zarr_format=zarr_format)
    z = root.create_array("a", shape=(8, 8), chunks=(2, 2), dtype="u1", fill_value=0)
    z[:6] = value
    sharding.close() if isinstance(store, Path) else None


EXPECTED = np.concatenate([np.ones((6, 8)), np.zeros((2, 8))])


def zip_at(path: Path, mode: Any, conversion: str) -> ZipStore:
    """A zip that holds an array."""
    store = ZipStore(str(path), mode="w")
    source: dict[str, bytes] = {}
    create(source, conversion)
    for key in sorted(source):
        value = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(source[key])
        zarr.core.sync.sync(store.set(key, value))
    store.close()
    return ZipStore(str(path), mode=mode)


def link(here: Path, to: Path) -> Path:
    (here / "link").symlink_to(to)
    return here / "link"


def file_at(path: Path) -> Path:
    path.write_text("x")
    return path


def other_values(here: Path, conversion: str) -> Path:
    """What the same conversion made of another source."""
    create(here / "other", conversion, value=9)
    CONVERSIONS[conversion](here / "other", here / "to")
    shutil.rmtree(here / "other")
    return here / "to"


def with_array(path: Path, **options: Any) -> Path:
    create(path, "reshard", **options)
    return path


DESTINATIONS: dict[str, tuple[Callable[[Path, str], Any], Any]] = {
    "a zip": (lambda here, _: ZipStore(str(here / "z.zip"), mode="w"), WORKS),
    "a zip, wrapped": (
        lambda here, _: LoggingStore(ZipStore(str(here / "z.zip"), mode="w")),
        WORKS,
    ),
    "a store that cannot list": (lambda *_: Unlisted(), UnsupportedError),
    "a new directory": (lambda here, _: here / "deep" / "down", WORKS),
    "a dict": (lambda *_: {}, WORKS),
    "memory": (lambda *_: MemoryStore(), WORKS),
    "fsspec": (lambda *_: fsspec_memory(), WORKS),
    "a zip with another array": (lambda here, c: zip_at(here / "z.zip", "a", c), SpecError),
    "a zip for reading": (lambda here, c: zip_at(here / "z.zip", "r", c), ReadOnlyError),
    "a store for reading": (lambda here, _: LocalStore(here / "to", read_only=True), ReadOnlyError),
    "a ShardingStore for reading": (
        lambda here, _: ShardingStore(here / "to", read_only=True),
        ReadOnlyError,
    ),
    "another array": (lambda here, _: with_array(here / "to"), SpecError),
    "the array with other values": (other_values, SpecError),
    "an array of v2": (lambda here, _: with_array(here / "to", zarr_format=2), SpecError),
    "inside the source": (lambda here, _: here / "source/below/it", SpecError),
    "inside, by fsspec": (lambda here, _: f"local://{here}/source/below", SpecError),
    "inside, by obstore": (lambda here, _: obstore.store.LocalStore(here / "source/a"), SpecError),
    "inside, a zip": (lambda here, _: ZipStore(str(here / "source/z.zip"), mode="w"), SpecError),
    "inside, by a link": (lambda here, _: link(here, here / "source") / "below", SpecError),
    "above the source": (lambda here, _: here, SpecError),
    "the source, by a link": (lambda here, _: link(here, here / "source"), SpecError),
    "the source, by a URL": (lambda here, _: f"file://{here}/source", SpecError),
    "the source, by fsspec": (lambda here, _: f"local://{here}/source", SpecError),
    "the source, by obstore": (
        lambda here, _: obstore.store.LocalStore(here / "source"),
        SpecError,
    ),
    "a file": (lambda here, _: LocalStore(file_at(here / "file")), SpecError),
    "below a file": (lambda here, _: file_at(here / "file") / "deep/down", SpecError),
}

STORES: dict[str, tuple[Callable[[Path, str], Any], Any]] = {
    "a link to the store": (lambda here, c: link(here, created(here / "to", c)), WORKS),
    "a zip": (lambda here, c: zip_at(here / "z.zip", "a", c), UnsupportedError),
    "a zip for reading": (
        lambda here, c: zip_at(here / "z.zip", "r", c),
        (UnsupportedError, ReadOnlyError),
    ),
    "a store for reading": (
        lambda here, c: LocalStore(created(here / "to", c), read_only=True),
        ReadOnlyError,
    ),
    "a ShardingStore for reading": (
        lambda here, c: ShardingStore(created(here / "to", c), read_only=True),
        ReadOnlyError,
    ),
}


def created(path: Path, conversion: str) -> Path:
    create(path, conversion)
    return path


def tree(here: Path) -> dict[str, bytes | None]:
    """All files and directories."""
    return {
        str(path.relative_to(here)): path.read_bytes() if path.is_file() else None
        for path in here.rglob("*")
    }


def values_in(store: Any) -> Any:
    store = store._store if isinstance(store, LoggingStore) else store
    if isinstance(store, ZipStore):
        store.close()
        store = ZipStore(str(store.path), mode="r")
    z: Any = zarr.open_array(ShardingStore(store), path="a", mode="r")
    return z[:]


@pytest.mark.thorough(of=7)
@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_each_conversion_to_each_destination(
    conversion: str, destination: str, tmp_path: Path
) -> None:
    """The source stays as it is; a refused destination too, down to the last empty directory."""
    create(tmp_path / "source", conversion)
    make, refused = DESTINATIONS[destination]
    to = make(tmp_path, conversion)
    before = tree(tmp_path)
    convert = CONVERSIONS[conversion]
    if refused is not WORKS:
        with pytest.raises(refused) as caught:
            convert(tmp_path / "source", to)
        assert isinstance(caught.value, ShardStoreError)
        assert tree(tmp_path) == before
        return
    assert convert(tmp_path / "source", to).n_chunks == 12
    np.testing.assert_array_equal(values_in(to), EXPECTED)
    after = tree(tmp_path)
    assert {key: after[key] for key in before if key != "z.zip"} == before


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("conversion", IN_PLACE)
def test_each_change_of_each_store(conversion: str, store: str, tmp_path: Path) -> None:
    """In place: it works through a link, and what cannot be changed is refused unchanged."""
    make, refused = STORES[store]
    base = make(tmp_path, conversion)
    before = tree(tmp_path)
    if refused is WORKS:
        IN_PLACE[conversion](base)
        np.testing.assert_array_equal(values_in(base), EXPECTED)
        return
    with pytest.raises(refused) as caught:
        IN_PLACE[conversion](base)
    assert isinstance(caught.value, ShardStoreError)
    assert tree(tmp_path) == before


def full(path: str = "a", *, grid: tuple[int, int] = (3, 2), kind: Any = V3) -> ArrayOf:
    chunks = {c: f"{path}{c}".encode() for c in grid_coords(grid)}
    return ArrayOf(kind, path, grid, (1, 1), (0, 0), chunks)


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("change", ["another value", "a new value", "an erased value", "damage"])
def test_a_changed_source_is_no_reason_to_keep_the_old_destination(
    conversion: str, change: str
) -> None:
    """Run again, a conversion compares all chunks, says where they differ, and writes nothing."""
    source = full("b").objects() | full().objects()
    source.pop("a/c/2/1")
    if conversion != "shard":
        shard_store(source, chunks_per_shard=2)
    target = Counting()
    convert = CONVERSIONS[conversion]
    convert(source, target)
    assert convert(source, target).n_skipped == 2
    seen = ShardingMapping(source)
    match change:
        case "another value":
            seen["a/c/1/1"] = seen["a/c/1/1"][:-1] + b"!"
        case "a new value":
            seen["a/c/2/1"] = b"new"
        case "an erased value":
            del seen["a/c/0/0"]
        case "damage":
            target.data["a/c/0/0"] = target.data["a/c/0/0"][:-5] + b"12345"
    before, target.writes = dict(target.data), []
    again = full("new").objects() | source
    with pytest.raises(SpecError, match=r"array at 'a/' already.*Nothing was written: remove"):
        convert(again, target)
    assert (target.data, target.writes) == (before, [])
    for key in [key for key in target.data if key.startswith("a/")]:
        del target.data[key]
    if change != "damage":
        convert(again, target)
        assert meaning(view(target)) == meaning(view(again))


@pytest.mark.parametrize("is_v2_first", [False, True])
def test_two_formats_never_meet_in_one_place(is_v2_first: bool) -> None:
    """Neither documents of arrays nor of groups; elsewhere in the store both may be."""
    group3 = {"zarr.json": b'{"zarr_format": 3, "node_type": "group"}'}
    group2 = {".zgroup": b'{"zarr_format": 2}'}
    stores = [full().objects(), full(kind=V2).objects() | group2]
    there, source = reversed(stores) if is_v2_first else stores
    target = Counting(there)
    with pytest.raises(SpecError, match="two arrays or groups in one place"):
        shard_store(source, target, chunks_per_shard=2)
    groups = (group2, group3) if is_v2_first else (group3, group2)
    target = Counting(groups[0])
    with pytest.raises(SpecError, match="two arrays or groups in one place"):
        shard_store(groups[1] | full("b").objects(), target, chunks_per_shard=2)
    assert target.writes == []


def test_a_zip_is_written_once_and_only_by_this_process(tmp_path: Path) -> None:
    """A second run finds all there, and adds no second copy of a key; processes are refused."""
    from concurrent.futures import ProcessPoolExecutor

    create(tmp_path / "source", "shard")
    for mode in ("w", "a"):
        store = ZipStore(str(tmp_path / "z.zip"), mode=mode)
        report = shard_store(tmp_path / "source", store, chunks_per_shard=2)
        assert report.n_skipped == (mode == "a")
        store.close()
    names = zipfile.ZipFile(tmp_path / "z.zip").namelist()
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith(".zarr_shardstore")]
    size = os.path.getsize(tmp_path / "z.zip")
    with ProcessPoolExecutor(1) as processes:
        store = ZipStore(str(tmp_path / "z.zip"), mode="a")
        with pytest.raises(SpecError, match="take threads"):
            shard_store(tmp_path / "source", store, executor=processes)
    assert os.path.getsize(tmp_path / "z.zip") == size
    source: Store = ZipStore(str(tmp_path / "z.zip"), mode="r")
    unshard_store(source, tmp_path / "plain")
    np.testing.assert_array_equal(values_in(tmp_path / "plain"), EXPECTED)


class NoChunks(MemoryStore):
    """Takes documents, and refuses chunks."""

    async def set(self, key: str, value: Any, *arguments: Any) -> None:
        if "/c/" in key:
            raise NotImplementedError("no chunks")
        await super().set(key, value, *arguments)

    def set_sync(self, key: str, value: Any) -> None:
        sync(self.set(key, value))


def test_a_destination_that_refuses_chunks_is_an_error() -> None:
    """Of the destination, not of an array that is left."""
    source, target = MemoryStore(), NoChunks()
    zarr.create_array(source, name="z", shape=(8,), chunks=(1,), dtype="u1")[:] = 1
    with pytest.raises(UnsupportedError, match="no chunks"):
        shard_store(source, target, chunks_per_shard=2)
    assert not [key for key in target._store_dict if key.endswith("z/zarr.json")]


@pytest.mark.parametrize("convert", ["shard", "reshard", "unshard"])
def test_an_array_of_v2_is_visible_with_its_attributes(convert: str) -> None:
    """At each moment of a conversion to another store."""

    class Noting(dict[str, bytes]):
        keys_set: ClassVar[list[str]] = []

        def __setitem__(self, key: str, value: bytes) -> None:
            self.keys_set.append(key)
            super().__setitem__(key, value)

    base, to = dict[str, bytes](), Noting()
    z = zarr.create_array(
        ShardingStore(base, None if convert == "shard" else 2),
        name="g/a",
        shape=(8,),
        chunks=(1,),
        dtype="u1",
        zarr_format=2,
        attributes={"_ARRAY_DIMENSIONS": ["x"]},
    )
    z[:] = 1
    calls: dict[str, Any] = {
        "shard": lambda: shard_store(base, to, chunks_per_shard=4),
        "reshard": lambda: reshard(base, 4, to),
        "unshard": lambda: unshard_store(base, to),
    }
    calls[convert]()
    order = [to.keys_set.index(f"g/{name}") for name in ("a/.zattrs", "a/.zarray", ".zgroup")]
    assert order == sorted(order)


def test_large_values_of_no_array_are_compared_in_pieces(tmp_path: Path) -> None:
    """A second run compares what is there; a movie beside the arrays may not fit into memory."""
    source, target, movie = tmp_path / "source", tmp_path / "target", "movie.bin"
    zarr.create_array(source, name="a", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    nbytes = 96 << 20
    (source / movie).touch()
    os.truncate(source / movie, nbytes)  # a hole, which takes no room
    shard_store(source, target, chunks_per_shard=2)
    tracemalloc.start()
    try:
        shard_store(source, target, chunks_per_shard=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes // 2
    with (target / movie).open("r+b") as file:
        file.seek(nbytes // 2)
        file.write(b"!")
    with pytest.raises(SpecError, match="another 'movie"):
        shard_store(source, target, chunks_per_shard=2)
