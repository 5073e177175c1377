"""Files of other formats are adopted: their own readers and those of Zarr v3 find the same values.

Readers: h5py, netCDF4, tifffile and numpy; zarr, tensorstore and zarrs, without this package.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import crc32c
import h5py
import netCDF4
import numcodecs
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore as ts
import tifffile
import zarr
from zarr.core.sync import sync

from tests.support.kit import lock_shard
from zarr_shardstore import (
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    ShardStoreError,
    SpecError,
    UnsupportedError,
    adopt,
    check_store,
    repair_store,
    reshard,
    undo_adoption,
)

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not")

Values = npt.NDArray[Any]
Link = Literal["hard", "symbolic", "move", "copy"]
LINKS: tuple[Link, ...] = ("hard", "symbolic", "move", "copy")

INTS: Values = np.arange(1, 60 * 70 + 1).reshape(60, 70).astype("i4")
ZARRS = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}


def read_h5(path: Path) -> Values:
    with h5py.File(path) as file:
        return np.asarray(file["x"][:])


def hdf5(values: Values, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file.attrs["made by"] = "a microscope"
            file.create_dataset("x", data=values, **options)

    return write


def hdf5_with_missing_chunks(path: Path) -> None:
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (60, 70), "i2", chunks=(16, 16), fillvalue=-7)
        x[:20, :20] = INTS[:20, :20]


def netcdf(path: Path) -> None:
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("y", 60)
        file.createDimension("lon", 70)
        x = file.createVariable("x", "f4", ("y", "lon"), zlib=True, chunksizes=(25, 30))
        x[:] = INTS
        x.units = "K"


def read_netcdf(path: Path) -> Values:
    with netCDF4.Dataset(path) as file:
        return np.asarray(file["x"][:].data)


def tiff(values: Values, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        tifffile.imwrite(path, values, photometric="minisblack", **options)

    return write


@dataclass
class Kind:
    suffix: str
    write: Callable[[Path], None]
    read: Callable[[Path], Values]
    codecs: list[str] = field(default_factory=list)
    """Beyond those of the specification, which tensorstore has not."""


STACK: Values = np.arange(3 * 50 * 70).reshape(3, 50, 70).astype("u2")
KINDS = {
    "HDF5": Kind(".h5", hdf5(INTS, chunks=(16, 16)), read_h5),
    "HDF5, big endian": Kind(".h5", hdf5(INTS.astype(">f8"), chunks=(16, 70)), read_h5),
    "HDF5, shuffle and gzip": Kind(
        ".h5",
        hdf5(STACK, chunks=(2, 16, 16), shuffle=True, compression="gzip"),
        read_h5,
        ["numcodecs.shuffle", "numcodecs.zlib"],
    ),
    "HDF5, fletcher32": Kind(
        ".h5", hdf5(INTS, chunks=(16, 16), fletcher32=True), read_h5, ["numcodecs.fletcher32"]
    ),
    "HDF5, missing chunks": Kind(".h5", hdf5_with_missing_chunks, read_h5),
    "HDF5, contiguous": Kind(".h5", hdf5(INTS), read_h5),
    "HDF5, bool": Kind(".h5", hdf5(INTS % 3 == 0, chunks=(16, 16)), read_h5),
    "HDF5, complex": Kind(".h5", hdf5(INTS + 1j * INTS, chunks=(16, 16)), read_h5),
    "NetCDF-4": Kind(".nc", netcdf, read_netcdf, ["numcodecs.zlib"]),
    "TIFF": Kind(".tif", tiff(INTS, tile=(32, 16)), tifffile.imread),
    "TIFF, big endian, deflate": Kind(
        ".tif",
        tiff(STACK, tile=(16, 32), compression="zlib", predictor=False, byteorder=">"),
        tifffile.imread,
        ["numcodecs.zlib"],
    ),
    "BigTIFF": Kind(".tif", tiff(STACK, tile=(16, 16), bigtiff=True), tifffile.imread),
    "TIFF in strips": Kind(".tif", tiff(INTS, rowsperstrip=10), tifffile.imread),
    "npy": Kind(".npy", lambda path: np.save(path, INTS), np.load),
    "npy, slabs": Kind(".npy", lambda path: np.save(path, np.tile(INTS, (4, 9))), np.load),
}


def readers_of(kind: Kind) -> list[str]:
    zarrs = [] if "numcodecs.fletcher32" in kind.codecs else ["zarrs"]
    return ["zarr", *zarrs, *([] if kind.codecs else ["tensorstore"])]


def read(reader: str, path: Path) -> Values:
    if reader == "tensorstore":
        spec = {"driver": "zarr3", "kvstore": f"file://{path}/"}
        return np.asarray(ts.open(spec).result().read().result())
    with zarr.config.set(ZARRS if reader == "zarrs" else {}):
        return np.asarray(zarr.open_array(path, mode="r")[:])


@pytest.mark.parametrize("name", KINDS)
def test_both_kinds_of_readers_agree(name: str, tmp_path: Path) -> None:
    """Before and after; and the way back gives each byte and the time back."""
    kind, path, dest = KINDS[name], tmp_path / f"a{KINDS[name].suffix}", tmp_path / "a.zarr"
    kind.write(path)
    values, original, time_ns = kind.read(path), path.read_bytes(), path.stat().st_mtime_ns
    report = adopt(path, dest)
    assert path.read_bytes()[: len(original)] == original
    assert path.stat().st_size == len(original) + report.added_nbytes
    assert path.samefile(dest / "c" / "0" / "/".join("0" * (values.ndim - 1)))
    assert np.array_equal(kind.read(path), values)
    for reader in readers_of(kind):
        found = read(reader, dest)
        assert found.dtype == values.dtype.newbyteorder("="), reader
        assert np.array_equal(found, values), reader
    assert np.array_equal(zarr.open_array(ShardingStore(dest), mode="r")[:], values)
    assert check_store(dest, level="decode").is_clean
    assert [codec for codec in kind.codecs if codec not in report.read_by] == []
    undo_adoption(dest)
    assert path.read_bytes() == original
    assert path.stat().st_mtime_ns == time_ns
    assert not dest.exists()


def test_names_and_attributes_come_along(tmp_path: Path) -> None:
    netcdf(tmp_path / "a.nc")
    adopt(tmp_path / "a.nc", tmp_path / "a.zarr", dataset="x")
    z: Any = zarr.open_array(tmp_path / "a.zarr", mode="r")
    assert z.metadata.dimension_names == ("y", "lon")
    assert dict(z.attrs) == {"units": "K"}


@pytest.mark.parametrize("n_channels", [1, 3])
def test_raw_files_of_webknossos(n_channels: int, tmp_path: Path) -> None:
    """Written and read by its own library, where that is installed."""
    wkw = pytest.importorskip("wkw", reason="not in the extra: it installs a package named tests")
    header = wkw.Header(np.uint16, num_channels=n_channels, block_len=4, file_len=4)
    values = np.arange(n_channels * 32 * 16 * 16).reshape(n_channels, 32, 16, 16).astype("u2")
    with wkw.Dataset.create(str(tmp_path / "data"), header) as dataset:
        dataset.write((0, 0, 0), values)
        paths = [tmp_path / f"data/z0/y0/x{i}.wkw" for i in range(2)]
        originals = [path.read_bytes() for path in paths]
        if n_channels == 1:  # the first dimension is x
            expected = values[0]
        else:
            paths, originals, expected = paths[:1], originals[:1], values[:, :16]
        adopt(paths, tmp_path / "a.zarr")
        for reader in ("zarr", "tensorstore"):
            assert np.array_equal(read(reader, tmp_path / "a.zarr"), expected), reader
        assert np.array_equal(dataset.read((0, 0, 0), (32, 16, 16)), values)
        undo_adoption(tmp_path / "a.zarr")
    assert [path.read_bytes() for path in paths] == originals


def wkw_by_hand(path: Path, kind: int = 1, voxel_nbytes: int = 2) -> None:
    """Of 2³ blocks of 4³ voxels; the value of a voxel is 100 x + 10 y + z."""
    x, y, z = np.indices((8, 8, 8))
    values = (100 * x + 10 * y + z).astype("<i2")
    blocks = [
        values[a : a + 4, b : b + 4, c : c + 4].tobytes(order="F")
        for c in (0, 4)
        for b in (0, 4)
        for a in (0, 4)
    ]
    head = b"WKW" + bytes([1, 0x12, kind, 8, voxel_nbytes]) + (16).to_bytes(8, "little")
    path.write_bytes(head + b"".join(blocks) * max(1, voxel_nbytes // 2))


def test_a_file_of_webknossos_by_hand(tmp_path: Path) -> None:
    wkw_by_hand(tmp_path / "x0.wkw")
    adopt(tmp_path / "x0.wkw", tmp_path / "a.zarr")
    for reader in ("zarr", "zarrs", "tensorstore"):
        found = read(reader, tmp_path / "a.zarr")
        assert (found.shape, found[7, 2, 5], found[1, 6, 0]) == ((8, 8, 8), 725, 160), reader


def test_files_of_webknossos_tile_along_x_only(tmp_path: Path) -> None:
    """Channels come before x: with several of them only one file is taken."""
    paths, dest = [tmp_path / f"x{i}.wkw" for i in range(2)], tmp_path / "a.zarr"
    for n_channels in (1, 2):
        for path in paths:
            wkw_by_hand(path, voxel_nbytes=2 * n_channels)
        if n_channels == 1:
            assert adopt(paths, dest, dry_run=True).shape == (16, 8, 8)
    assert adopt(paths[0], dest, dry_run=True).shape == (2, 8, 8, 8)
    with pytest.raises(SpecError, match="has channels before x"):
        adopt(paths, dest)


# ------------------------------------------------------------------------ mosaics


def mosaic(root: Path, n_last: int = 48) -> tuple[list[Path], Values]:
    """Three files, the last with fewer rows."""
    parts = [INTS[:48], INTS[:48] + 5, INTS[:n_last] + 9]
    paths = [root / f"{name}.h5" for name in "abc"]
    for path, part in zip(paths, parts, strict=True):
        hdf5(part, chunks=(16, 16))(path)
    return paths, np.concatenate(parts)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("n_last", [48, 20])
def test_files_tile_an_array(link: Link, n_last: int, tmp_path: Path) -> None:
    """In the order given; `copy` leaves the files alone, `move` leaves none behind."""
    paths, values = mosaic(tmp_path, n_last)
    originals = [path.read_bytes() for path in paths]
    dest = tmp_path / "m.zarr"
    adopt(paths, dest, link=link)
    for reader in ("zarr", "zarrs", "tensorstore"):
        assert np.array_equal(read(reader, dest), values), reader
    for i, path in enumerate(paths):
        assert np.array_equal(read_h5(dest / "c" / str(i) / "0"), values[48 * i :][:48])
        assert path.exists() is (link != "move")
        assert link != "copy" or path.read_bytes() == originals[i]
    undo_adoption(dest)
    assert [path.read_bytes() for path in paths] == originals


def test_rows_of_npy_files_tile_an_array(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.npy" for i in range(2)]
    for path in paths:
        np.save(path, np.tile(INTS, (4, 9)))
    report = adopt(paths, tmp_path / "m.zarr")
    assert report.shape == (480, 630)
    assert np.array_equal(read("tensorstore", tmp_path / "m.zarr"), np.tile(INTS, (8, 9)))


# ------------------------------------------------------------------------- writes


def write_all(z: Any) -> None:
    z[:] = 7


def write_part(z: Any) -> None:
    z[40:50, 3:60] = 8


def write_often(z: Any) -> None:
    for i in range(20):
        z[:48] = i + 1


def erase(z: Any) -> None:
    z[:] = 0


@pytest.mark.parametrize("write", [write_all, write_part, write_often, erase])
@pytest.mark.parametrize("link", LINKS)
def test_a_write_keeps_the_files(write: Callable[[Any], None], link: Link, tmp_path: Path) -> None:
    """Also if all chunks of a file are replaced or erased, and after `compact`. Through a link no
    byte of a file is changed: its shard becomes a copy."""
    paths, values = mosaic(tmp_path)
    originals = [path.read_bytes() for path in paths]
    dest = tmp_path / "m.zarr"
    adopt(paths, dest, link=link)
    adopted = [path.read_bytes() for path in paths if path.exists()]
    store = ShardingStore(dest, max_dead_share=0, max_dead_bytes=0)
    z = zarr.open_array(store, mode="r+")
    write(z)
    expected = values.copy()
    write(expected)
    ShardingStore(dest).compact_sync()
    for reader in ("zarr", "tensorstore"):
        assert np.array_equal(read(reader, dest), expected), reader
    for i in range(3):
        assert np.array_equal(read_h5(dest / "c" / str(i) / "0"), values[48 * i :][:48])
    assert [path.read_bytes() for path in paths if path.exists()] == adopted
    assert check_store(dest, level="decode").is_clean
    with pytest.raises(SpecError, match="were written since: 'c/"):
        undo_adoption(dest)
    assert np.array_equal(read("zarr", dest), expected)
    undo_adoption(dest, discard=True)
    assert [path.read_bytes() for path in paths] == originals


@pytest.mark.parametrize("link", LINKS)
def test_compaction_leaves_unchanged_files(link: Link, tmp_path: Path) -> None:
    """A link stays one, and the adoption can be undone."""
    paths, _ = mosaic(tmp_path)
    dest = tmp_path / "m.zarr"
    adopt(paths, dest, link=link)
    before = [path.lstat().st_ino for path in sorted(dest.rglob("0"))]
    ShardingStore(dest).compact_sync()
    assert [path.lstat().st_ino for path in sorted(dest.rglob("0"))] == before
    undo_adoption(dest)


def test_a_resize_keeps_the_note_and_grows_behind_the_files(tmp_path: Path) -> None:
    """New shards are as any other; those of files are still adopted."""
    paths, values = mosaic(tmp_path)
    adopt(paths, tmp_path / "m.zarr", link="move")
    z = zarr.open_array(ShardingStore(tmp_path / "m.zarr"), mode="r+")
    z.append(values[:48])
    z.attrs["note"] = "longer"
    z[:] = 3
    ShardingStore(tmp_path / "m.zarr").compact_sync()
    assert np.array_equal(read_h5(tmp_path / "m.zarr" / "c" / "2" / "0"), values[96:])
    assert (tmp_path / "m.zarr" / "c" / "3" / "0").stat().st_size < 20_000
    with pytest.raises(SpecError, match="'c/3/0'"):
        undo_adoption(tmp_path / "m.zarr")


def test_what_would_destroy_a_file_is_refused(tmp_path: Path) -> None:
    """A rewrite, a conversion in place, and a repair."""
    paths, _ = mosaic(tmp_path)
    dest = tmp_path / "m.zarr"
    adopt(paths, dest, link="move")
    before = {path: path.read_bytes() for path in dest.rglob("*") if path.is_file()}
    z = zarr.open_array(ShardingStore(dest, strategy="rewrite"), mode="r+")
    for write in (write_all, write_part):
        with pytest.raises(UnsupportedError, match="adopted file"):
            write(z)
    with pytest.raises(UnsupportedError, match="adopted files"):
        reshard(dest, 2)
    os.truncate(dest / "c" / "1" / "0", len(before[dest / "c" / "1" / "0"]) - 7)
    before[dest / "c" / "1" / "0"] = before[dest / "c" / "1" / "0"][:-7]
    (action,) = repair_store(check_store(dest), dry_run=False).actions
    assert (action.did, "undo the adoption" in action.message) == ("left", True)
    assert {path: path.read_bytes() for path in dest.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("prefix", ["", "m", "m/c"])
def test_an_array_of_files_is_not_removed_with_them(
    prefix: str, link: Link, tmp_path: Path
) -> None:
    """Nor is it overwritten, or the directory of its chunks erased, before the adoption is undone.
    Copies may go."""
    paths, _ = mosaic(tmp_path)
    adopt(paths, tmp_path / "s" / "m", link=link)
    store = ShardingStore(tmp_path / "s")
    before = sorted((tmp_path / "s").rglob("*"))
    removals: list[Callable[[], Any]] = [
        lambda: sync(store.delete_dir(prefix)),
        lambda: write_over(store, prefix[:1]),
    ]
    for remove in removals:
        with nullcontext() if link == "copy" else pytest.raises(UnsupportedError, match="undo the"):
            remove()
        assert link == "copy" or sorted((tmp_path / "s").rglob("*")) == before
    if link != "copy":
        undo_adoption(tmp_path / "s" / "m")
    assert all(path.exists() for path in paths)


def write_over(store: ShardingStore, path: str) -> None:
    zarr.create_array(store, name=path or None, shape=4, dtype="u1", overwrite=True)


def test_the_end_of_an_adoption_names_files_that_are_gone(tmp_path: Path) -> None:
    paths, _ = mosaic(tmp_path)
    adopt(paths, tmp_path / "m.zarr", link="move")
    (tmp_path / "m.zarr" / "c" / "1" / "0").unlink()
    with pytest.raises(ShardConflictError, match=f"{paths[1].name}' is gone"):
        undo_adoption(tmp_path / "m.zarr")
    assert [path.exists() for path in paths] == [True, False, True]


def test_a_conversion_into_another_store_is_free_of_the_files(tmp_path: Path) -> None:
    paths, values = mosaic(tmp_path)
    adopt(paths, tmp_path / "m.zarr")
    reshard(tmp_path / "m.zarr", 2, tmp_path / "other.zarr")
    document = json.loads((tmp_path / "other.zarr" / "zarr.json").read_text())
    assert not [name for name in document if "adopted" in name]
    write_all(zarr.open_array(ShardingStore(tmp_path / "other.zarr", strategy="rewrite")))
    assert np.array_equal(read("zarr", tmp_path / "m.zarr"), values)


@pytest.mark.parametrize(("share", "is_kept"), [(0.2, False), (0.5, False), (0.9, True), (1, True)])
def test_max_dead_share(share: float, is_kept: bool, tmp_path: Path) -> None:
    """Four of five bytes of a shard are dead when it is flushed."""
    store = ShardingStore(tmp_path, chunks_per_shard=10, max_dead_share=share)
    z = zarr.create_array(
        store, shape=(1000,), chunks=(100,), dtype="u1", compressors=None, fill_value=0
    )
    for i in range(5):
        z[:900] = i + 1
    store.flush_sync()
    assert ((tmp_path / "c" / "0").stat().st_size > 4000) is is_kept
    assert np.unique(z[:900]).tolist() == [5]


def test_max_dead_share_is_a_share(tmp_path: Path) -> None:
    for share in (-0.1, 1.5, "1", True):
        with pytest.raises(SpecError, match="max_dead_share"):
            ShardingStore(tmp_path, max_dead_share=share)  # type: ignore[arg-type]


# ---------------------------------------------------------------- foreign writers


def open_only(file: Any) -> None:
    pass


def add_attributes(file: Any) -> None:
    """Fewer bytes than the index has."""
    for i in range(3):
        file.attrs[f"attribute {i}"] = i


def add_dataset(file: Any) -> None:
    file["y"] = np.arange(5000)


@pytest.mark.parametrize(
    ("write", "is_left"), [(open_only, False), (add_attributes, True), (add_dataset, True)]
)
def test_a_writer_of_the_format_cuts_the_index_off(
    write: Callable[[Any], None], is_left: bool, tmp_path: Path
) -> None:
    """`fsck` finds it; what that program has written stays, and can be adopted again."""
    path, dest = tmp_path / "a.h5", tmp_path / "a.zarr"
    hdf5(INTS, chunks=(16, 16))(path)
    adopt(path, dest)
    with h5py.File(path, "r+") as file:
        write(file)
    written = path.read_bytes()
    (found,) = check_store(dest).findings
    assert (found.key, found.kind) == ("c/0/0", "index_checksum")
    if is_left:
        with pytest.raises(ShardConflictError, match="changed by another program"):
            undo_adoption(dest)
    else:
        undo_adoption(dest)
    assert path.read_bytes() == written
    adopt(path, dest, dataset="x")
    assert np.array_equal(read("tensorstore", dest), INTS)


def test_a_page_that_was_appended_to_a_tiff_stays(tmp_path: Path) -> None:
    path, dest = tmp_path / "a.tif", tmp_path / "a.zarr"
    tiff(INTS, tile=(16, 16))(path)
    adopt(path, dest)
    tifffile.imwrite(path, INTS, append=True)
    written = path.read_bytes()
    with pytest.raises(ShardConflictError, match="changed by another program"):
        undo_adoption(dest)
    assert path.read_bytes() == written
    assert np.array_equal(tifffile.imread(path, key=0), INTS)


@pytest.mark.parametrize("link", LINKS)
def test_the_last_copy_goes_back(link: Link, tmp_path: Path) -> None:
    """Where a file has lost its own name, the one in the array gets it."""
    path, dest = tmp_path / "a.h5", tmp_path / "a.zarr"
    hdf5(INTS)(path)
    original = path.read_bytes()
    adopt(path, dest, link=link)
    path.unlink(missing_ok=True)
    if link == "symbolic":
        with pytest.raises(ShardConflictError, match="is gone"):
            undo_adoption(dest)
        return
    undo_adoption(dest)
    assert path.read_bytes() == original


@pytest.mark.parametrize("link", ["hard", "move", "copy"])
def test_the_last_copy_goes_back_without_its_directory(link: Link, tmp_path: Path) -> None:
    """The directory is made again. What was written since is not discarded unasked."""
    path, dest = tmp_path / "raw" / "a.npy", tmp_path / "a.zarr"
    path.parent.mkdir()
    np.save(path, INTS)
    original = path.read_bytes()
    adopt(path, dest, link=link)
    shutil.rmtree(path.parent)
    with ShardingStore(dest) as store:
        write_part(zarr.open_array(store))
    with pytest.raises(SpecError, match="were written since: 'c/0/0'"):
        undo_adoption(dest)
    undo_adoption(dest, discard=True)
    assert path.read_bytes() == original


def other_file(path: Path) -> None:
    np.save(path, INTS + 1)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("take", [other_file, Path.mkdir, link_to_nothing])
@pytest.mark.parametrize("link", ["hard", "move", "copy"])
def test_the_last_copy_stays_if_its_name_is_taken(
    link: Link, take: Callable[[Path], None], tmp_path: Path
) -> None:
    """It is refused, and the array stays one, also with `discard`."""
    path, dest = tmp_path / "a.npy", tmp_path / "a.zarr"
    np.save(path, INTS)
    original = path.read_bytes()
    adopt(path, dest, link=link)
    path.unlink(missing_ok=True)
    take(path)
    for discard in (False, True):
        with pytest.raises(SpecError, match=r"a\.npy' is another file"):
            undo_adoption(dest, discard=discard)
    assert np.array_equal(read("zarr", dest), INTS)
    path.rename(tmp_path / "other")
    undo_adoption(dest)
    assert path.read_bytes() == original


@pytest.mark.parametrize("link", ["move", "copy"])
def test_a_killed_writer_has_written(link: Link, tmp_path: Path) -> None:
    """Its journal counts: the index may be a torn one."""
    path, dest = tmp_path / "a.npy", tmp_path / "a.zarr"
    np.save(path, INTS)
    original = path.read_bytes()
    adopt(path, dest, link=link)
    shard, journal = dest / "c" / "0" / "0", dest / "c" / "0" / "0.__journal"
    with ShardingStore(dest) as store:
        write_part(zarr.open_array(store))
        left = journal.read_bytes()
    journal.write_bytes(left)
    shard.write_bytes(shard.read_bytes()[:-4] + bytes(4))
    with pytest.raises(SpecError, match="were written since: 'c/0/0'"):
        undo_adoption(dest)
    undo_adoption(dest, discard=True)
    assert path.read_bytes() == original


def test_an_array_that_was_made_after_a_stopped_adoption_stays(tmp_path: Path) -> None:
    path, dest = tmp_path / "a.npy", tmp_path / "a.zarr"
    np.save(path, INTS)
    adopt(path, dest)
    (dest / "zarr.json").rename(dest / ".zarr.json.adopting")
    zarr.create_array(dest, data=INTS + 1, chunks=INTS.shape)
    for undo in (undo_adoption, lambda dest: adopt(path, dest)):
        with pytest.raises(SpecError, match="an array was made in"):
            undo(dest)
    assert np.array_equal(read("zarr", dest), INTS + 1)


# ----------------------------------------------------------------------- refusals


def lzf(path: Path) -> None:
    hdf5(INTS, chunks=(16, 16), compression="lzf")(path)


def filtered(code: int, values: tuple[int, ...], encode: Callable[[bytes], bytes]) -> Any:
    """Of an HDF5 file with a filter that h5py has by a plugin only: read by zarr alone."""

    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            made.set_chunk((30, 35))
            made.set_filter(code, h5py.h5z.FLAG_OPTIONAL, values)
            space, kind = h5py.h5s.create_simple(INTS.shape), h5py.h5t.NATIVE_INT32
            x = h5py.h5d.create(file.id, b"x", kind, space, made)
            for i in range(0, 60, 30):
                for j in range(0, 70, 35):
                    chunk = np.ascontiguousarray(INTS[i : i + 30, j : j + 35])
                    x.write_direct_chunk((i, j), encode(chunk.tobytes()))

    return write


@pytest.mark.parametrize(
    ("codec", "write"),
    [
        ("bz2", filtered(307, (9,), numcodecs.BZ2().encode)),
        ("zstd", filtered(32015, (3,), numcodecs.Zstd().encode)),
    ],
)
def test_filters_of_plugins(codec: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "a.h5")
    adopt(tmp_path / "a.h5", tmp_path / "a.zarr")
    for reader in ("zarr", *(["tensorstore"] if codec != "bz2" else [])):
        assert np.array_equal(read(reader, tmp_path / "a.zarr"), INTS), reader


def masked(path: Path) -> None:
    hdf5(INTS, chunks=(16, 16), compression="gzip")(path)
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((16, 0), INTS[16:32, :16].tobytes(), 1)


def structured(path: Path) -> None:
    hdf5(np.zeros(5, [("a", "i4"), ("b", "f4")]))(path)


def two_datasets(path: Path) -> None:
    hdf5(INTS)(path)
    with h5py.File(path, "r+") as file:
        file["group/y"] = INTS


def texts(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = ["a", "bc"]


def virtual(path: Path) -> None:
    hdf5(INTS)(path.with_name("source.h5"))
    layout = h5py.VirtualLayout((60, 70), "i4")
    layout[:] = h5py.VirtualSource(path.with_name("source.h5"), "x", (60, 70))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)


def user_block(path: Path) -> None:
    with h5py.File(path, "w", userblock_size=512) as file:
        file["x"] = INTS


REFUSED = [
    ("a.h5", lzf, "HDF5 filter 32000"),
    ("a.h5", masked, "filter mask 0x1"),
    ("a.h5", structured, "data type"),
    ("a.h5", texts, "texts of variable length"),
    ("a.h5", virtual, "virtual"),
    ("a.h5", user_block, "user block"),
    ("a.h5", two_datasets, "'group/y', 'x'"),
    ("a.h5", hdf5(np.array(3.0)), "no chunks"),
    ("a.h5", hdf5(np.zeros((0, 5))), "no chunks"),
    ("a.h5", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(200)), "cannot be opened"),
    ("a.tif", tiff(INTS, tile=(16, 16), compression="zlib", predictor=True), "imagecodecs_delta"),
    ("a.tif", tiff(INTS, rowsperstrip=11), "incomplete chunks"),
    ("a.npy", lambda path: np.save(path, np.asfortranarray(INTS)), "Fortran order"),
    ("a.npy", lambda path: np.save(path, np.array([None])), "npy"),
    ("a.wkw", lambda path: wkw_by_hand(path, kind=2), "compressed blocks"),
    ("a.wkw", lambda path: wkw_by_hand(path, voxel_nbytes=3), "voxels of 3 bytes"),
    ("a.wkw", lambda path: wkw_by_hand(path, voxel_nbytes=0), "voxels of 0 bytes"),
    ("a.wkw", lambda path: path.write_bytes(b"WKW\1\xf2\1\1\1" + bytes(8)), "16777216 blocks"),
    ("a.txt", lambda path: path.write_text("text"), "is none of"),
    ("a.h5", lambda path: None, "there is no file"),
    ("a.h5", lambda path: path.mkdir(), "there is no file"),
]


@pytest.mark.parametrize(
    ("name", "write", "says"), REFUSED, ids=[f"{name}, {says}" for name, _, says in REFUSED]
)
def test_refused_by_name(
    name: str, write: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    """In a sentence that names the file; nothing is written."""
    path = tmp_path / name
    write(path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ShardStoreError, match=says) as caught:
        adopt(path, tmp_path / "a.zarr")
    assert str(path) in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "a.zarr").exists()


def test_files_that_are_no_mosaic(tmp_path: Path) -> None:
    paths, _ = mosaic(tmp_path)
    first = paths[0]

    def refused(says: str, *others: Path, **options: Any) -> None:
        with pytest.raises(SpecError, match=says):
            adopt([first, *others], tmp_path / "m.zarr", **options)
        assert not (tmp_path / "m.zarr").exists()

    other = tmp_path / "other.h5"
    for values, options, says in (
        (INTS[:48].astype("i8"), {"chunks": (16, 16)}, "its data type is int64, not int32"),
        (INTS[:48], {"chunks": (16, 10)}, "its chunk shape is"),
        (INTS[:48, :50], {"chunks": (16, 16)}, "its shape without"),
        (INTS, {"chunks": (16, 16)}, "its shape is \\(60, 70\\)"),
        (INTS[:48], {"chunks": (16, 16), "compression": "gzip"}, "its list of codecs"),
        (INTS[:48], {"chunks": (16, 16), "fillvalue": 3}, "its fill value"),
        (STACK, {"chunks": (1, 16, 16)}, "its number of dimensions"),
    ):
        hdf5(values, **options)(other)
        refused(says, other)
    hdf5(INTS[:20], chunks=(16, 16))(other)
    refused("its shape is \\(48, 70\\)|its shape is \\(20, 70\\)", other, paths[1])
    refused("named twice", first)
    refused("link is", link="soft")
    hdf5(INTS, chunks=(16, 16))(other)
    hdf5(INTS, chunks=(16, 16))(paths[1])
    with pytest.raises(SpecError, match="begin within a chunk"):
        adopt([other, paths[1]], tmp_path / "m.zarr")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"units": "degC"}, "its attribute 'units' is degC, not K"),
        ({"calendar": "noleap"}, "its attribute 'calendar' is noleap, not None"),
        ({"scale_factor": 0.5}, "its attribute 'scale_factor' is 0.5, not 0.01"),
        ({"add_offset": None}, "its attribute 'add_offset' is None, not 1.0"),
        ({"missing_value": -1.0}, "its attribute 'missing_value' is -1.0, not None"),
        ({"dims": ("x", "y")}, r"its list of dimension names is \['x', 'y'\], not \['y', 'x'\]"),
        ({"history": "made twice"}, None),
    ],
)
def test_files_whose_values_mean_other_things(
    options: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    """One array has one unit, one scale, and so on. Its other attributes are of the first file."""
    paths = [tmp_path / "a.nc", tmp_path / "b.nc"]
    defaults = {"units": "K", "scale_factor": 0.01, "add_offset": 1.0, "history": "made"}
    for path, changed in zip(paths, ({}, options), strict=True):
        with netCDF4.Dataset(path, "w") as file:
            for name in "yx":
                file.createDimension(name, 4)
            attributes = {**defaults, **changed}
            dims = attributes.pop("dims", ("y", "x"))
            v = file.createVariable("v", "i2", dims, chunksizes=(2, 4))
            v.setncatts({k: value for k, value in attributes.items() if value is not None})
            v[:] = 7
    if says is None:
        adopt(paths, tmp_path / "m.zarr", dataset="v")
        assert zarr.open_array(tmp_path / "m.zarr").attrs["history"] == "made"
        return
    with pytest.raises(SpecError, match=f"b.nc' does not continue .*: {says}"):
        adopt(paths, tmp_path / "m.zarr", dataset="v")
    assert not (tmp_path / "m.zarr").exists()


def test_places_that_are_taken(tmp_path: Path) -> None:
    """A destination, and a file that is adopted already: also another dataset of it."""
    path = tmp_path / "a.h5"
    two_datasets(path)
    adopt(path, tmp_path / "x.zarr", dataset="x")
    adopted = path.read_bytes()
    for dest, dataset, says in (
        ("x.zarr", "x", "not empty"),
        ("other.zarr", "x", "adopted before"),
        ("other.zarr", "group/y", "adopted before"),
    ):
        with pytest.raises(SpecError, match=says):
            adopt(path, tmp_path / dest, dataset=dataset)
    with pytest.raises(SpecError, match="local disks"):
        adopt(path, "s3://bucket/a.zarr")
    assert path.read_bytes() == adopted
    with pytest.raises(SpecError, match="there is no adoption"):
        undo_adoption(tmp_path / "other.zarr")
    zarr.create_array(tmp_path / "own.zarr", shape=(4,), dtype="u1")
    with pytest.raises(SpecError, match="was not adopted"):
        undo_adoption(tmp_path / "own.zarr")
    assert (tmp_path / "own.zarr" / "zarr.json").exists()


def test_an_adoption_cuts_no_index_of_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two processes adopt a file: the one that comes late is refused, and takes its part back. And
    a file whose first index a program has cut off may be adopted again."""
    path, first, second = tmp_path / "a.h5", tmp_path / "first.zarr", tmp_path / "second.zarr"
    hdf5(INTS, chunks=(16, 16))(path)
    make_link = os.link

    def late_link(source: str, target: str) -> None:
        monkeypatch.undo()
        adopt(path, first)
        make_link(source, target)

    monkeypatch.setattr(os, "link", late_link)
    with pytest.raises(SpecError, match="was changed since it was read"):
        adopt(path, second)
    assert not second.exists()
    assert np.array_equal(read("zarr", first), INTS)
    h5py.File(path, "r+").close()
    adopt(path, second)
    with pytest.raises(ShardConflictError, match="changed by another program"):
        undo_adoption(first)
    assert np.array_equal(read("zarr", second), INTS)


def test_an_adoption_of_a_former_version_is_undone(tmp_path: Path) -> None:
    """Its marks have zeros for the id, and its note has none."""
    path, dest = tmp_path / "a.npy", tmp_path / "a.zarr"
    np.save(path, INTS)
    original = path.read_bytes()
    adopt(path, dest)
    document = json.loads((dest / "zarr.json").read_text())
    document["zarr_shardstore_adopted"].pop("id", None)
    (dest / "zarr.json").write_text(json.dumps(document))
    mark = bytearray(path.read_bytes()[len(original) :][:32])
    mark[12:16] = bytes(4)
    with path.open("r+b") as file:
        file.seek(len(original))
        file.write(mark + crc32c.crc32c(bytes(mark)).to_bytes(4, "little"))
    undo_adoption(dest)
    assert path.read_bytes() == original


def test_an_adoption_that_another_process_finishes_stays(tmp_path: Path) -> None:
    """The second one waits for the first, and takes nothing back."""
    paths, values = mosaic(tmp_path)
    dest = tmp_path / "m.zarr"
    adopt(paths, dest)
    staged = dest / ".zarr.json.adopting"
    (dest / "zarr.json").rename(staged)  # as if it were under way
    with ThreadPoolExecutor() as threads:
        with lock_shard(staged):
            second = threads.submit(adopt, paths, dest)
            with pytest.raises(TimeoutError):
                second.result(0.5)
            staged.rename(dest / "zarr.json")
        with pytest.raises(SpecError, match="not empty"):
            second.result()
    assert np.array_equal(read("zarr", dest), values)


@pytest.mark.parametrize("mode", ["r+", "a"])
def test_a_file_that_is_being_written_is_refused(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    hdf5(INTS, chunks=(16, 16))(path)
    original = path.read_bytes()
    with h5py.File(path, mode), pytest.raises(ShardStoreError, match=r"open|lock"):
        adopt(path, tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr" / "zarr.json").exists()
    assert path.read_bytes() == original


@pytest.mark.parametrize("link", LINKS)
def test_a_file_that_is_replaced_during_the_adoption_is_refused(
    link: Link, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After its chunks were found, and before it is brought into the array."""
    path, dest = tmp_path / "a.npy", tmp_path / "a.zarr"
    np.save(path, INTS)
    replace = os.replace

    def late_replace(source: str, target: str) -> None:  # of the journal
        monkeypatch.undo()
        replace(source, target)
        np.save(tmp_path / "new.npy", STACK)
        (tmp_path / "new.npy").replace(path)

    monkeypatch.setattr(os, "replace", late_replace)
    with pytest.raises(SpecError, match="was changed since it was read"):
        adopt(path, dest, link=link)
    assert np.array_equal(np.load(path), STACK)
    assert not dest.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    hdf5(INTS)(path)
    path.chmod(0o444)
    with pytest.raises(SpecError, match="cannot be written"):
        adopt(path, tmp_path / "a.zarr")
    adopt(path, tmp_path / "a.zarr", link="copy")


def test_a_copy_of_a_file_that_cannot_be_written_is_a_shard(tmp_path: Path) -> None:
    """An index is appended to it, and later chunks."""
    path = tmp_path / "a.h5"
    hdf5(INTS)(path)
    path.chmod(0o444)
    adopt(path, tmp_path / "a.zarr", link="copy")
    (shard,) = (p for p in (tmp_path / "a.zarr" / "c").rglob("*") if p.is_file())
    assert [each.stat().st_mode & 0o777 for each in (path, shard)] == [0o444, 0o644]


def test_an_undone_adoption_leaves_nothing_of_a_repair(tmp_path: Path) -> None:
    path, store = tmp_path / "a.h5", tmp_path / "a.zarr"
    hdf5(INTS)(path)
    adopt(path, store, link="copy")
    leftover = store / "c" / f"0.{0:032x}.partial"
    leftover.touch()
    os.utime(leftover, (1, 1))
    assert repair_store(check_store(store), dry_run=False).actions
    with pytest.raises(SpecError, match="quarantine"):
        undo_adoption(store)
    undo_adoption(store, discard=True)
    assert not store.exists()


def test_an_undone_adoption_leaves_no_consolidated_index(tmp_path: Path) -> None:
    path, store = tmp_path / "a.h5", tmp_path / "a.zarr"
    hdf5(INTS)(path)
    adopt(path, store)
    ShardingMapping(store).consolidate_index()
    undo_adoption(store)
    assert not store.exists()


@pytest.mark.parametrize(
    ("link", "options"),
    [
        ("hard", {}),
        ("hard", {"copy_function": os.link}),
        ("symbolic", {"symlinks": True}),
    ],
)
def test_a_moved_destination_takes_its_files_back(
    link: Link, options: dict[str, Any], tmp_path: Path
) -> None:
    """A copy of it, also one of links, takes nothing from the first one."""
    paths, values = mosaic(tmp_path)
    originals = [path.read_bytes() for path in paths]
    adopt(paths, tmp_path / "m.zarr", link=link)
    shutil.copytree(tmp_path / "m.zarr", tmp_path / "copy.zarr", **options)
    with pytest.raises(SpecError, match=r"is a copy of '.*m.zarr'"):
        undo_adoption(tmp_path / "copy.zarr", discard=True)
    assert np.array_equal(read("zarr", tmp_path / "m.zarr"), values)
    (tmp_path / "m.zarr").rename(tmp_path / "moved.zarr")
    undo_adoption(tmp_path / "moved.zarr")
    assert [path.read_bytes() for path in paths] == originals


def test_a_moved_destination_names_the_files_that_it_has_no_more(tmp_path: Path) -> None:
    """They keep their index: the destination may be a copy of one that was moved too."""
    path = tmp_path / "a.npy"
    np.save(path, INTS)
    nbytes = path.stat().st_size
    adopt(path, tmp_path / "m.zarr")
    (tmp_path / "m.zarr").rename(tmp_path / "moved.zarr")
    with ShardingStore(tmp_path / "moved.zarr") as store:
        write_part(zarr.open_array(store))
    says = f"a.npy' may have its index after {nbytes} bytes"
    with pytest.raises(ShardConflictError, match=says):
        undo_adoption(tmp_path / "moved.zarr", discard=True)
    assert not (tmp_path / "moved.zarr").exists()
