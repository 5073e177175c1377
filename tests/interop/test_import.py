"""Files of other formats that `import_store` has copied, read as their own readers read them."""

from __future__ import annotations

import base64
import ctypes
import json
import lzma
import os
import pickle
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import Blosc, Quantize, Zstd
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore, ZipStore

from tests.support.base_stores import Place, served
from tests.support.processes import s3_server
from tests.support.stops import InCaller
from zarr_shardstore import (
    ConversionReport,
    ShardConflictError,
    ShardingStore,
    ShardStoreError,
    SpecError,
    UnsupportedError,
    adopt,
    import_store,
)

h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")

SHAPE, CHUNKS = (50, 23), (7, 5)
VALUES = np.arange(50 * 23, dtype="i4").reshape(SHAPE) % 97
ALL: dict[str, Any] = {"chunks_per_shard": (3, 2)}


def imported(source: Any, **options: Any) -> tuple[Any, ConversionReport]:
    store = MemoryStore()
    report = import_store(source, store, **{**ALL, **options})
    return zarr.open_group(store, mode="r"), report


def left(report: ConversionReport) -> dict[str, str]:
    """The arrays that were left, and why."""
    found = {array.path: array.reason for array in report.arrays if array.is_left}
    assert report.n_left == len(found)
    return found


def chunk_bytes(group: zarr.Group, key: str) -> bytes | None:
    """The stored bytes of a chunk, without its shard."""
    found = sync(ShardingStore(group.store).get(key, default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def equal_to_h5py(group: zarr.Group, path: Path, *names: str) -> None:
    """Each dataset has the same values, type and shape."""
    with h5py.File(path) as file:
        items: dict[str, Any] = {}
        file.visititems(items.__setitem__)  # with h5py's lock, so it must not wait for threads
        for name, item in items.items():
            if isinstance(item, h5py.Dataset) and (not names or name in names):
                array: Any = group[name]
                expected = item.asstr()[()] if item.dtype.kind == "O" else item[()]
                np.testing.assert_array_equal(array[()], expected)
                assert item.dtype.kind == "O" or array.dtype.newbyteorder(
                    "="
                ) == item.dtype.newbyteorder("=")


# ------------------------------------------------------------------------- HDF5


@pytest.fixture
def hdf5(tmp_path: Path) -> Path:
    path = tmp_path / "in.h5"
    with h5py.File(path, "w", userblock_size=1024) as file:
        file.attrs["title"] = "ä"
        file.attrs["numbers"] = np.arange(3.0)
        file.attrs["not a number"] = np.nan
        options = {"chunks": CHUNKS, "data": VALUES}
        file.create_dataset("all filters", **options, compression=4, shuffle=True, fletcher32=True)
        file.create_dataset("group/raw", **options)
        file["group"].attrs["unit"] = "m"
        file["contiguous"] = VALUES.astype(">f8")
        file["texts"] = np.array([b"a", b"bcd"], "S4")
        file["flags"] = np.array([True, False])
        file["complex"] = np.array([1 + 2j], "c8")
        file["scalar"] = 3.5
        sparse = file.create_dataset("sparse", SHAPE, "f4", chunks=CHUNKS, fillvalue=np.nan)
        sparse[8:10, 6] = 1
        file.create_dataset("growing", (0, 3), "u1", chunks=(4, 2), maxshape=(None, 3))
        space = h5py.h5s.create_simple((1 << 16,))
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        small = h5py.h5s.create_simple((4,))
        made = h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I16BE, small, dcpl=compact)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(4, dtype=">i2"))
        h5py.h5d.create(file.id, b"never written", h5py.h5t.NATIVE_INT16, space)
    return path


def test_values_of_hdf5_are_those_of_h5py(hdf5: Path) -> None:
    group, report = imported(hdf5)
    equal_to_h5py(group, hdf5)
    assert group["all filters"].shards == (21, 10)
    assert all(array.action != "skipped" for array in report.arrays)


def test_shards_begin_where_it_is_said(hdf5: Path) -> None:
    """As for `reshard`: the lengths of the shards, or the places of their beginnings."""
    options: list[dict[str, Any]] = [{"shards_at": {0: [14, 49]}}, {"shards": {0: [14, 35, 7]}}]
    for how in options:
        base: dict[str, bytes] = {}
        import_store(hdf5, base, paths="group/raw", **how)
        assert {key for key in base if "/c/" in key} == {
            f"group/raw/c/{i}/{j}" for i in range(3) for j in range(5)
        }
        raw: Any = zarr.open_array(ShardingStore(base), path="group/raw")
        np.testing.assert_array_equal(raw[...], VALUES)


def test_bytes_of_chunks_are_those_of_the_file(hdf5: Path) -> None:
    """And missing chunks stay missing."""
    group, _ = imported(hdf5)
    with h5py.File(hdf5) as file:
        for name in ("all filters", "sparse"):
            dataset = file[name].id
            infos = [dataset.get_chunk_info(i) for i in range(dataset.get_num_chunks())]
            at = {
                info.chunk_offset: dataset.read_direct_chunk(info.chunk_offset)[1] for info in infos
            }
            for i, j in np.ndindex(8, 5):
                stored = chunk_bytes(group, f"{name}/c/{i}/{j}")
                assert stored == at.get((i * CHUNKS[0], j * CHUNKS[1]))
        assert len(at) == 1 or name != "sparse"


def test_attributes_and_groups_are_kept(hdf5: Path) -> None:
    with h5py.File(hdf5, "a") as file:
        file["group/raw"].attrs.update({"NAME": "cells", "CLASS": np.bytes_(b"IMAGE")})
        file["texts"].make_scale("of texts")
    group, _ = imported(hdf5)
    assert dict(group["group/raw"].attrs) == {"NAME": "cells", "CLASS": "IMAGE"}
    assert dict(group["texts"].attrs) == {}
    assert dict(group.attrs) == {"title": "ä", "numbers": [0, 1, 2], "not a number": "NaN"}
    assert dict(group["group"].attrs) == {"unit": "m"}


def test_tensorstore_reads_what_it_has_codecs_for(hdf5: Path, tmp_path: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    out = tmp_path / "out.zarr"
    report = import_store(hdf5, out, **ALL)
    by_path = {array.path: array.read_by for array in report.arrays}
    for name in ("group/raw", "contiguous", "sparse", "flags"):
        assert by_path[name] == "every v3 reader"
        spec = {"driver": "zarr3", "kvstore": f"file://{out}/{name}/"}
        with h5py.File(hdf5) as file:
            np.testing.assert_array_equal(ts.open(spec).result().read().result(), file[name][()])
    assert (
        by_path["all filters"].endswith(
            "knows numcodecs.shuffle, numcodecs.zlib, numcodecs.fletcher32 (zarr-python)"
        )
        or "(zarr-python)" in by_path["all filters"]
    )


def test_a_chunk_that_skips_a_filter_is_refused_by_name_or_encoded_again(tmp_path: Path) -> None:
    path = tmp_path / "masked.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("z", data=VALUES, chunks=CHUNKS, compression=1)
        plain = np.full(CHUNKS, 5, "i4")
        dataset.id.write_direct_chunk((7, 5), plain.tobytes(), filter_mask=1)
        file["fine"] = VALUES
    with pytest.raises(UnsupportedError, match=r"'z': .*filter mask.*--recode.*--path"):
        imported(path, paths="z")
    group, report = imported(path)
    assert list(group) == ["fine"]
    assert "filter mask" in left(report)["z"]
    assert any("--recode" in note for note in report.notes)
    group, report = imported(path, recode=True)
    equal_to_h5py(group, path)
    assert any("'z'" in note and "filter mask" in note for note in report.notes)
    with h5py.File(path) as file:
        untouched = file["z"].id.read_direct_chunk((0, 0))[1]
    assert chunk_bytes(group, "z/c/0/0") == untouched
    group, report = imported(path, paths="fine")
    assert list(group) == ["fine"]


def test_all_chunks_without_a_filter_are_copied_without_its_codec(tmp_path: Path) -> None:
    path = tmp_path / "masked.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            "z", (14, 5), "i4", chunks=CHUNKS, compression=1, shuffle=True
        )
        for start in (0, 7):
            dataset.id.write_direct_chunk((start, 0), np.full(CHUNKS, start, "i4").tobytes(), 3)
    group, report = imported(path)
    equal_to_h5py(group, path)
    assert report.read_by == "every v3 reader"


@pytest.mark.parametrize("filters", [{"shuffle": True}, {"compression": 1}, {"fletcher32": True}])
def test_chunks_beyond_the_end_that_skip_all_filters(filters: Any, tmp_path: Path) -> None:
    """By an option of HDF5 that h5py lacks. Their filter mask is 0 all the same."""
    path, values = tmp_path / "cut.h5", np.arange(100, dtype="i4").reshape(10, 10) * 7919
    with h5py.File(path, "w", libver="latest") as file:
        made = file.create_dataset("like", (10, 10), "i4", chunks=(4, 4), **filters)
        plist, set_options = made.id.get_create_plist(), ctypes.CDLL(h5py.h5d.__file__)
        set_options.H5Pset_chunk_opts.argtypes = [ctypes.c_int64, ctypes.c_uint]
        assert set_options.H5Pset_chunk_opts(plist.id, 2) >= 0
        space, dtype = made.id.get_space(), made.id.get_type()
        whole = h5py.h5d.create(file.id, b"z", dtype, space, plist)
        whole.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        del file["like"]
    with pytest.raises(UnsupportedError, match=r"'z': .*filter mask.*--recode"):
        imported(path)
    with pytest.raises(UnsupportedError, match="filter mask"):
        adopt(path, tmp_path / "adopted")
    group, _ = imported(path, recode=True)
    np.testing.assert_array_equal(group["z"][:], values)


def test_a_short_variable_of_netcdf_whose_last_chunk_skips_all_filters(tmp_path: Path) -> None:
    """Its dimension is longer than it, so that no chunk is cut in the array."""
    path, values = tmp_path / "cut.nc", np.arange(6.0)
    with h5py.File(path, "w", libver="latest") as file:
        file.attrs["_NCProperties"] = "version=2"
        file.create_dataset("t", data=np.arange(8.0), chunks=(4,), maxshape=(None,)).make_scale()
        plist = file.create_dataset(
            "like", (6,), "f8", chunks=(4,), compression=1
        ).id.get_create_plist()
        set_options = ctypes.CDLL(h5py.h5d.__file__).H5Pset_chunk_opts
        set_options.argtypes = [ctypes.c_int64, ctypes.c_uint]
        assert set_options(plist.id, 2) >= 0
        space = h5py.h5s.create_simple((6,), (h5py.h5s.UNLIMITED,))
        h5py.h5d.create(file.id, b"z", h5py.h5t.NATIVE_DOUBLE, space, plist)
        file["z"][:] = values
        file["z"].dims[0].attach_scale(file["t"])
    group, _ = imported(path, recode=True, paths="z", chunks_per_shard=2)
    np.testing.assert_array_equal(group["z"][:], [*values, 0, 0])


def test_a_negative_level_of_zstd(tmp_path: Path) -> None:
    """The options of a filter are unsigned numbers of 32 bits."""
    path, values = tmp_path / "z.h5", np.arange(100, dtype="<i4").reshape(10, 10)
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((10, 10))
        plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (2**32 - 5,))
        made = h5py.h5d.create(
            file.id, b"z", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((10, 10)), plist
        )
        made.write_direct_chunk((0, 0), Zstd(-5).encode(values), 0)
    group, _ = imported(path)
    np.testing.assert_array_equal(group["z"][:], values)


def test_what_has_no_form_in_zarr_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        file["compound"] = np.zeros(3, [("a", "i4"), ("b", "f4")])
        file["text"] = ["a", "bc"]
        file.create_dataset("lzf", data=VALUES, chunks=CHUNKS, compression="lzf")
        file["empty"] = h5py.Empty("f4")
        padded = h5py.h5t.C_S1.copy()
        padded.set_size(4)
        padded.set_strpad(h5py.h5t.STR_SPACEPAD)
        made = h5py.h5d.create(file.id, b"padded", padded, h5py.h5s.create_simple((2,)))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([b"a", b"bc"], "S4"))
        layout = h5py.VirtualLayout((50,), "f8")
        layout[:] = h5py.VirtualSource(path.name, "lzf", SHAPE)[:, 0]
        file.create_virtual_dataset("virtual", layout)
        file["link"] = h5py.SoftLink("/lzf")
    with pytest.raises(UnsupportedError, match="nothing was written") as refused:
        imported(path)
    for name in ("compound", "text", "lzf", "empty", "padded", "virtual"):
        assert f"{name!r}: " in str(refused.value)
    again = ["text", "lzf", "padded", "virtual"]
    group, report = imported(path, recode=True)
    assert left(report).keys() == {"compound", "empty"}
    assert sorted(group) == sorted(again)
    with h5py.File(path) as file:
        assert list(group["text"][:]) == ["a", "bc"]
        for name in again[1:]:
            np.testing.assert_array_equal(group[name][:], file[name][:])
    assert any("link" in note for note in report.notes)


@pytest.mark.parametrize("fault", [None, "no file", "no dataset", "no file below", "remote"])
def test_values_in_other_files(fault: str | None, tmp_path: Path) -> None:
    """A virtual dataset is encoded again only if its sources are there: HDF5 has fill values for
    the others. External files are never read."""
    name = "gone" if fault == "no dataset" else "z"
    for below, above in (("0", "1"), ("1", "2")):
        layout = h5py.VirtualLayout(SHAPE, "i4")
        layout[:] = h5py.VirtualSource(f"{below}.h5", "z", SHAPE)
        with h5py.File(tmp_path / f"{above}.h5", "w") as file:
            file.create_virtual_dataset("z", layout, fillvalue=-1)
            layout = h5py.VirtualLayout(SHAPE, "i4")
            layout[:] = h5py.VirtualSource(".", "fine", SHAPE)
            file["fine"] = VALUES
            file.create_virtual_dataset("inside", layout, fillvalue=-1)
            raw = [(f"{tmp_path}/raw", 0, 8)]
            file.create_dataset("external", (2,), "i4", external=raw)[:] = 1
    if fault != "no file below":
        with h5py.File(tmp_path / "0.h5", "w") as file:
            file[name] = VALUES
    if fault == "no file":
        (tmp_path / "1.h5").unlink()
    source: Any = tmp_path / "2.h5"
    if fault == "remote":
        source = f"memory://{tmp_path.name}/2.h5"
        fsspec.filesystem("memory").pipe(source, (tmp_path / "2.h5").read_bytes())
    group, report = imported(source, recode=True)
    assert left(report).keys() == {"external"} | ({"z"} if fault else set())
    for name in set(group):
        np.testing.assert_array_equal(group[name][:], VALUES)


def make_faulty(path: Path) -> set[str]:
    """Variables that Zarr, h5py or a reader of names cannot have, and one that all have."""
    with h5py.File(path, "w") as file:
        file["fine"] = VALUES
        file["group/fine"] = VALUES
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(file.id, b"time", h5py.h5t.UNIX_D32LE, space)
        file["group/zarr.json"] = VALUES
        file[".."] = VALUES
        file["compound"] = np.zeros(3, [("a", "i4")])
        file["no text"] = np.array([b"\xff"], object)
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((3,))
        made.set_filter(32999, h5py.h5z.FLAG_OPTIONAL)
        unknown = h5py.h5d.create(file.id, b"unknown", h5py.h5t.NATIVE_INT8, space, made)
        unknown.write_direct_chunk((0,), b"abc")
    return {"time", "group/zarr.json", "..", "compound", "no text", "unknown"}


@pytest.mark.parametrize("recode", [False, True])
def test_a_fault_of_one_variable_leaves_that_one(recode: bool, tmp_path: Path) -> None:
    """It is named with the reason, also if it shows only while values are decoded; nothing of it
    is in the destination, and the others are imported."""
    path, out = tmp_path / "in.h5", tmp_path / "out.zarr"
    faulty = make_faulty(path)
    report = import_store(path, out, recode=recode, **ALL)
    assert left(report).keys() == faulty
    assert "UnicodeDecodeError" in left(report)["no text"] or not recode
    assert not any("encoded again: 'no text'" in note for note in report.notes)
    equal_to_h5py(zarr.open_group(out, mode="r"), path, "fine", "group/fine")
    files = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert {name.partition("/c/")[0] for name in files} == {
        *("zarr.json", "group/zarr.json", "fine/zarr.json", "group/fine/zarr.json"),
        *("fine", "group/fine"),
    }


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_chunk_that_cannot_be_decoded_leaves_its_array(dry_run: bool, tmp_path: Path) -> None:
    """Also if it is among those whose sizes decide about the shards."""
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        for name in ("bad", "fine"):
            file.create_dataset(name, data=VALUES * 0, chunks=CHUNKS, compression="lzf")
        at = file["bad"].id.get_chunk_info(0)
    with open(path, "r+b") as raw:
        raw.seek(at.byte_offset)
        raw.write(b"\xff" * at.size)
    report = import_store(path, tmp_path / "out.zarr", recode=True, dry_run=dry_run)
    if not dry_run:
        assert left(report).keys() == {"bad"}
        equal_to_h5py(zarr.open_group(tmp_path / "out.zarr", mode="r"), path, "fine")


@pytest.mark.parametrize("paths", [None, "good"])
def test_a_damaged_header_leaves_its_dataset(paths: str | None, tmp_path: Path) -> None:
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        file["good/line\nbreak"] = file["good/other"] = VALUES
        file.create_dataset("good/line\nbreaks", data=VALUES, chunks=CHUNKS)
        file["bad"] = VALUES
        header = h5py.h5o.get_info(file["bad"].id).addr
    data = bytearray(path.read_bytes())
    data[header] ^= 255
    path.write_bytes(data)
    group, report = imported(path, paths=paths)
    assert list(left(report)) == ([] if paths else ["bad"])
    for name in ("line\nbreak", "line\nbreaks", "other"):
        np.testing.assert_array_equal(group["good"][name][:], VALUES)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b'{"a": 5}'),
        ("a.json", b'{"version":1,"refs":{"x/.zarray":3}}'),
        ("a.json", b'{"refs": {"x'),
        ("a.tif", b"II*\0\x08\0\0\0\x10\0\0\x01\x04\0\x01\0\0\0\x18\0"),
        ("a.h5", b"\x89HDF\r\n\x1a\n\2\0"),
    ],
)
def test_a_file_that_its_library_cannot_read_is_named(
    name: str, data: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ShardStoreError, match=r"cannot be read as .*: copy it again.*its library"):
        import_store(tmp_path / name, {})
    if not name.endswith("json"):
        with pytest.raises(ShardStoreError, match=r"its library says|cannot be opened"):
            adopt(tmp_path / name, tmp_path / "out")


def test_an_import_of_no_array_names_each_fault(tmp_path: Path) -> None:
    """Those that show only while values are decoded, and those of the file's header."""
    path, store = tmp_path / "in.h5", MemoryStore()
    with h5py.File(path, "w") as file:
        file["compound"] = np.zeros(3, [("a", "i4")])
        file["group/no text"] = np.array([b"\xff"], object)
    with pytest.raises(UnsupportedError, match="only its groups were: 'compound'") as refused:
        import_store(path, store, recode=True, chunks_per_shard=2)
    assert "'group/no text': its library says Unicode" in str(refused.value)
    assert store._store_dict.keys() == {"zarr.json", "group/zarr.json"}


@pytest.mark.parametrize("source", [{"version": 1, "refs": {}}, "groups.h5"])
def test_a_source_without_arrays_is_named(source: Any, tmp_path: Path) -> None:
    if isinstance(source, str):
        source = tmp_path / source
        with h5py.File(source, "w") as file:
            file.create_group("g")
    with pytest.raises(SpecError, match=r"the source, read as .*, has no array"):
        import_store(source, tmp_path / "z.zarr", chunks_per_shard=2)
    assert not (tmp_path / "z.zarr").exists()


def test_the_command_says_that_something_was_left(tmp_path: Path) -> None:
    """In its table, and by status 3; 0 if nothing was."""
    path = tmp_path / "in.h5"
    make_faulty(path)
    command = [sys.executable, "-m", "zarr_shardstore", "import", str(path)]
    done = subprocess.run([*command, str(tmp_path / "a.zarr")], capture_output=True, text=True)
    assert done.returncode == 3
    assert re.search(r"^compound +v3 +left .*has none of Zarr v3", done.stdout, re.MULTILINE)
    fine = [*command, str(tmp_path / "b.zarr"), "--path", "fine", "--json"]
    done = subprocess.run(fine, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)["n_left"]) == (0, 0)


@pytest.mark.parametrize("dtype", ["<M8[ns]", ">M8[D]", "<m8[3s]"])
@pytest.mark.parametrize("fill", [None, 5, "NaT"])
def test_times_have_the_fill_value_of_h5py(dtype: str, fill: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.h5"
    opaque = h5py.opaque_dtype(np.dtype(dtype))
    given = {} if fill is None else {"fillvalue": np.array(fill, dtype).astype(opaque)}
    with h5py.File(path, "w") as file:
        times = file.create_dataset("t", (9,), opaque, chunks=(2,), **given)
        times[2:5] = np.array([1, 2, 3], dtype).astype(opaque)
    group, _ = imported(path, chunks_per_shard=2)
    equal_to_h5py(group, path)


def test_attributes_of_dimensions_in_another_form(tmp_path: Path) -> None:
    """h5py's own functions end the process on some of them; the values are there all the same."""
    names = ["DIMENSION_LIST", "DIMENSION_LABELS", "_Netcdf4Coordinates"]
    values = [np.arange(2), "text", np.array([b"a", b"b"])]
    for i, name in enumerate(names):
        for j, value in enumerate(values):
            with h5py.File(tmp_path / f"{i}{j}.h5", "w") as file:
                file["z"] = VALUES
                file["z"].attrs[name] = value
    paths = sorted(map(str, tmp_path.glob("*.h5")))
    code = (
        "import sys\nfrom zarr_shardstore import import_store\n"
        "for path in sys.argv[1:]:\n    print(path, flush=True)\n"
        "    import_store(path, f'{path}.zarr')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, paths), done.stderr
    for path in paths:
        equal_to_h5py(zarr.open_group(f"{path}.zarr", mode="r"), Path(path))


def test_text_that_is_no_utf_8_is_left_out_of_documents(tmp_path: Path) -> None:
    """Other readers refuse a document with half of a surrogate; each attribute is named."""
    path, store = tmp_path / "in.h5", MemoryStore()
    with h5py.File(path, "w") as file:
        file["z"], file[b"\xb0"] = VALUES, VALUES[:, 0]
        file[b"\xb0"].make_scale()
        file["z"].dims[0].attach_scale(file[b"\xb0"])
        file["z"].dims[1].label = "y"
        labels = np.array([b"\xb0", b"y"], h5py.string_dtype())
        file.create_dataset("labels", data=VALUES).attrs["DIMENSION_LABELS"] = labels
        text = np.array(b"\xb0C", h5py.string_dtype())
        file["z"].attrs["unit"], file["z"].attrs["units"] = text, text[None]
        file["z"].attrs[b"\xb0"] = file["z"].attrs["fine"] = "ä"
    notes = " ".join(import_store(path, store, paths=["z", "labels"]).notes)
    assert document(store, "z")["attributes"] == {"fine": "ä"}
    assert all(f"attribute {name!r}" in notes for name in ("unit", "units", b"\xb0"))
    for name in ("z", "labels"):
        assert document(store, name)["dimension_names"] == [None, "y"]


def test_a_scale_that_was_removed_leaves_the_others_their_names(tmp_path: Path) -> None:
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        for name, size in (("z", SHAPE), ("y", SHAPE[0]), ("x", SHAPE[1])):
            file[name] = np.zeros(size)
        for name, dim in zip("yx", file["z"].dims, strict=True):
            file[name].make_scale(name)
            dim.attach_scale(file[name])
        del file["x"]
    assert imported(path, paths="z")[0]["z"].metadata.dimension_names == ("y", None)


@pytest.mark.parametrize(
    ("nbytes", "start"), [(1 << 17, b""), (1 << 16, b"{"), (512, b"PK\3\4"), (8192, b"II*\0")]
)
def test_a_user_block_of_any_size_and_text(nbytes: int, start: bytes, tmp_path: Path) -> None:
    """Also one that begins as another format, if a look at the head shows where it ends."""
    path = tmp_path / "x"
    with h5py.File(path, "w", userblock_size=nbytes) as file:
        file["z"] = VALUES
    with open(path, "r+b") as raw:
        raw.write(start)
    equal_to_h5py(imported(path)[0], path)


def test_a_shuffle_after_another_filter_is_not_copied(tmp_path: Path) -> None:
    """Its bytes are no whole number of values, which the codec of Zarr needs."""
    path = tmp_path / "in.h5"
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk(CHUNKS)
    made.set_deflate(1)
    made.set_shuffle()
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple(SHAPE)
        h5py.h5d.create(file.id, b"z", h5py.h5t.NATIVE_INT32, space, made)
        file["z"][:] = VALUES
    with pytest.raises(UnsupportedError, match="shuffles bytes that another filter"):
        imported(path)
    equal_to_h5py(imported(path, recode=True)[0], path)


@pytest.mark.parametrize("after", [b"\0", b"x"])
def test_texts_that_end_at_a_zero(after: bytes, tmp_path: Path) -> None:
    """HDF5 leaves out what lies after it; C writes such texts."""
    path = tmp_path / "in.h5"
    texts = [b"ab\0".ljust(6, after), b"cdefg\0", b"\0".ljust(6, after), b"abcdef"]
    with h5py.File(path, "w") as file:
        stored = h5py.h5t.C_S1.copy()
        stored.set_size(6)
        space = h5py.h5s.create_simple((4,))
        dataset = h5py.h5d.create(file.id, b"names", stored, space)
        raw = np.frombuffer(b"".join(texts), "V6").copy()
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=stored)
        file["fine"] = VALUES
    if after == b"x":
        assert list(left(imported(path, chunks_per_shard=2)[1])) == ["names"]
        with h5py.File(path, "a") as file:
            del file["fine"]
        with pytest.raises(UnsupportedError, match="HDF5 converts its values"):
            adopt(path, tmp_path / "adopted.zarr", link="copy")
    equal_to_h5py(imported(path, recode=after == b"x", chunks_per_shard=2)[0], path)


def test_changes_of_this_process_that_are_not_in_the_file_yet(tmp_path: Path) -> None:
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(4)
    with h5py.File(path, "r+") as file:
        file["x"][:] = [1, 2, 3, 4]
        group, _ = imported(path, chunks_per_shard=2)
        assert group["x"][:].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("recode", [False, True])
def test_a_chain_of_filters_on_which_hdf5_crashes_is_left(recode: bool, tmp_path: Path) -> None:
    """HDF5 2.0 writes over its heap where scale-offset follows another filter."""
    path = tmp_path / "in.h5"
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((4,))
    made.set_deflate(1)
    made.set_scaleoffset(h5py.h5z.SO_INT, 0)
    with h5py.File(path, "w") as file:
        file["fine"] = VALUES
        space = h5py.h5s.create_simple((4,))
        h5py.h5d.create(file.id, b"z", h5py.h5t.NATIVE_INT64, space, made)
    group, report = imported(path, recode=recode)
    assert (list(group), list(left(report))) == (["fine"], ["z"])


DTYPES = st.sampled_from(["i1", "u2", "<i4", ">i4", "f2", ">f8", "c16", "?", "S3", "enum", "pad"])
ATTRIBUTES: dict[str, Any] = {
    "NAME": "cells",
    "text": "ä",
    "bytes": b"\xff",
    "texts": np.array([b"a", b"bc"]),
    "one": np.array([3]),
    "numbers": np.array([1.5, np.nan, np.inf]),
    "structure": np.zeros((), [("a", "i4")]),
    "_FillValue": np.float32(7),
}


def stored_type(dtype: str) -> Any:
    """The type of HDF5, also ones that h5py makes by hand only."""
    if dtype == "enum":
        return h5py.h5t.py_create(h5py.enum_dtype({"a": 1, "b": 2}, "i2"), logical=True)
    if dtype == "pad":
        padded = h5py.h5t.C_S1.copy()
        padded.set_size(3)
        padded.set_strpad(h5py.h5t.STR_SPACEPAD)
        return padded
    return h5py.h5t.py_create(np.dtype(dtype), logical=True)


def make_any_dataset(data: st.DataObject, path: Path) -> None:
    """Of any shape, type, chunks, filters, fill value, attributes and names, partly written."""
    shape: tuple[int, ...] = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    name = data.draw(DTYPES, label="dtype")
    kind = stored_type(name)
    dtype = np.dtype({"enum": "i2", "pad": "S3"}.get(name, name))
    made, limits = h5py.h5p.create(h5py.h5p.DATASET_CREATE), None
    made.set_fill_time(h5py.h5d.FILL_TIME_ALLOC)
    if data.draw(st.booleans(), label="has a fill value") and name not in ("enum", "pad"):
        made.set_fill_value(np.ones((), dtype))
    mask = 0
    if len(shape) > 0 and data.draw(st.booleans(), label="chunked"):
        axes = st.sampled_from(range(-1, len(shape) if 0 not in shape else 0))
        axis = data.draw(axes, label="unlimited")  # -1: all, so chunks may be larger than the array
        free = [axis in (-1, i) for i in range(len(shape))]
        limits = tuple([h5py.h5s.UNLIMITED if f else n for f, n in zip(free, shape, strict=True)])
        most = [4 if f else min(4, n) for f, n in zip(free, shape, strict=True)]
        made.set_chunk(tuple(data.draw(st.integers(1, n), label="chunk") for n in most))
        if data.draw(st.booleans(), label="shuffle"):
            made.set_shuffle()
        if data.draw(st.booleans(), label="gzip"):
            made.set_deflate(data.draw(st.sampled_from([0, 9])))
        if data.draw(st.booleans(), label="fletcher32") and dtype.kind != "S":
            made.set_fletcher32()
        if data.draw(st.integers(0, 5), label="skips") == 0:
            mask = (1 << made.get_nfilters()) - 1
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    block = data.draw(st.sampled_from([0, 0, 0, 512]))
    libver = data.draw(st.sampled_from([None, "latest"]))
    with h5py.File(path, "w", userblock_size=block, libver=libver) as file:
        group, space = file.create_group("a"), h5py.h5s.create_simple(shape, limits)
        h5py.h5d.create(group.id, b"z", kind, space if shape else h5py.h5s.create(0), made)
        dataset = file["a/z"]
        if mask and 0 not in shape:
            chunk = rng.integers(0, 2, dataset.chunks).astype(dtype)
            dataset.id.write_direct_chunk((0,) * len(shape), chunk.tobytes(), mask)
        elif data.draw(st.booleans(), label="written"):
            box = tuple(slice(data.draw(st.integers(0, n)), n) for n in shape)
            values = rng.integers(1, 3, shape).astype(dtype)
            dataset[box or ()] = values[box or ()]
        for key in data.draw(st.lists(st.sampled_from(sorted(ATTRIBUTES)), unique=True)):
            dataset.attrs[key] = ATTRIBUTES[key]
        for i, n in enumerate(shape):
            match data.draw(st.integers(0, 3), label="dimension"):
                case 1:
                    dataset.dims[i].label = f"label {i}"
                case 2:
                    file[f"scale {i}"] = np.arange(n)
                    file[f"scale {i}"].make_scale(f"scale {i}")
                    dataset.dims[i].attach_scale(file[f"scale {i}"])
                    dataset.dims[i].label = "another"


def unless_refused(call: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """Return the result, or ``None`` and why it is refused."""
    try:
        return call(*arguments, **options), ""
    except UnsupportedError as refused:
        return None, str(refused)


def document(store: Any, path: str = "") -> dict[str, Any]:
    """Of an array as it is shown, without the note of an adoption."""
    found: Any = sync(
        ShardingStore(store).get(f"{path}/zarr.json".lstrip("/"), default_buffer_prototype())
    )
    doc = json.loads(found.to_bytes())
    return {key: value for key, value in doc.items() if "adopted" not in key}


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_dataset_is_imported_and_adopted_alike(data: st.DataObject, tmp_path: Path) -> None:
    """With equal documents and values, unless one of them refuses it and says why."""
    path, dest = tmp_path / "any.h5", tmp_path / "adopted"
    shutil.rmtree(dest, ignore_errors=True)
    make_any_dataset(data, path)
    found, no_import = unless_refused(imported, path, chunks_per_shard=2, paths="a/z")
    assert re.fullmatch(".*(HDF5 converts its values|wrong places).*|", no_import)
    if found is not None:
        equal_to_h5py(found[0], path, "a/z")
    adopted, no_adoption = unless_refused(adopt, path, dest, dataset="a/z")
    assert re.fullmatch(
        ".*(HDF5 converts|no chunks|user block|filter mask|wrong places).*|", no_adoption
    )
    assert found or not adopted
    if adopted:
        assert document(dest) == document(found[0].store, "a/z")
        np.testing.assert_array_equal(zarr.open_array(dest)[()], found[0]["a/z"][()])


# ------------------------------------------------------------------- NetCDF-4


@pytest.mark.filterwarnings("ignore")
def test_xarray_reads_netcdf_and_its_import_alike(tmp_path: Path) -> None:
    """Dimensions, coordinates, CF attributes, masks, scales and groups."""
    netcdf, xr = pytest.importorskip("netCDF4"), pytest.importorskip("xarray")
    path = tmp_path / "in.nc"
    with netcdf.Dataset(path, "w") as file:
        file.title = "CF"
        for name, size in (("time", None), ("lat", 6), ("bnds", 2)):
            file.createDimension(name, size)
        time = file.createVariable("time", "f8", ("time",))
        time.units = "days since 2000-01-01"
        time[:] = range(5)
        file.createVariable("lat", "f4", ("lat",))[:] = np.linspace(-1, 1, 6)
        packed = {"zlib": True, "shuffle": True, "chunksizes": (2, 4), "fill_value": -99}
        t = file.createVariable("t", "i2", ("time", "lat"), **packed)
        t.setncatts({"scale_factor": 0.5, "add_offset": 1.0, "units": "K", "valid_range": [0, 9]})
        t[:] = np.ma.masked_equal(np.arange(30).reshape(5, 6), 7)
        zeros = file.createVariable("zeros", "f4", ("time", "lat"), chunksizes=(5, 3))
        zeros[:] = 0
        file.createVariable("partly", "f8", ("time", "bnds"))[1:3] = 1
        file.createVariable("depth", "f4", (), fill_value=-1)[...] = 7
        inner = file.createGroup("inner")
        inner.createVariable("v", "u1", ("lat",), fill_value=255)[:] = 3
    out = tmp_path / "out.zarr"
    import_store(path, out)
    for group in (None, "inner"):
        expected = xr.open_dataset(path, engine="netcdf4", group=group).load()
        found = xr.open_zarr(out, group=group, consolidated=False).load()
        xr.testing.assert_identical(found, expected)
    for name in ("t", "partly", "inner/v"):
        adopt(path, tmp_path / name, dataset=name, link="copy")
        assert document(tmp_path / name) == document(out, name)


def test_xarray_opens_imported_texts_that_have_a_fill_value(tmp_path: Path) -> None:
    """Texts of variable length are masked as in the file."""
    netcdf, xr = pytest.importorskip("netCDF4"), pytest.importorskip("xarray")
    path, values = tmp_path / "in.nc", np.array(["a", "?"], object)
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("x", 2)
        file.createVariable("station", str, ("x",), fill_value="?")[:] = values
        file.createVariable("flag", "S1", ("x",), fill_value=b"?")[:] = values.astype("S1")
    import_store(path, tmp_path / "out.zarr", recode=True)
    expected = xr.open_dataset(path, engine="netcdf4").load()
    found = xr.open_zarr(tmp_path / "out.zarr", consolidated=False).load()
    xr.testing.assert_equal(found.station, expected.station)
    assert found.flag.values.tolist() == [b"a", b"?"]
    assert found.flag.encoding["missing_value"] == "?"


def test_dimensions_of_netcdf(tmp_path: Path) -> None:
    """Also of coordinates with several, of which others are longer, and of variables beside a bare
    dimension: names and shapes are those of netCDF4."""
    netcdf = pytest.importorskip("netCDF4")
    path, out = tmp_path / "in.nc", tmp_path / "out.zarr"
    with netcdf.Dataset(path, "w") as file:
        inner = file.createGroup("inner")
        for name, size in (("t", None), ("u", None), ("n", 4)):
            file.createDimension(name, size)
        for group, name, dimensions, n_rows in (
            *((file, "t", ("t", "n"), 5), (file, "x", ("t", "n"), 2), (file, "y", ("u",), 6)),
            *((inner, "u", ("u", "n"), 1), (inner, "z", ("u",), 3), (inner, "t", ("n", "n"), 4)),
        ):
            group.createVariable(name, "i4", dimensions)[:n_rows] = n_rows
    import_store(path, out)
    with netcdf.Dataset(path) as file:
        file.set_auto_mask(False)
        for name in ("t", "x", "y", "inner/u", "inner/z", "inner/t"):
            found: Any = zarr.open_array(out, path=name, mode="r")
            assert found.metadata.dimension_names == file[name].dimensions, name
            np.testing.assert_array_equal(found[:], file[name][:], err_msg=name)
            adopt(path, tmp_path / name, dataset=name, link="copy")
            assert document(tmp_path / name) == document(out, name)


def test_a_variable_with_the_name_of_another_dimension(tmp_path: Path) -> None:
    """HDF5 has the dimension under this name, and the variable under another: both name it."""
    netcdf = pytest.importorskip("netCDF4")
    path, out = tmp_path / "in.nc", tmp_path / "out.zarr"
    with netcdf.Dataset(path, "w") as file:
        for name, size in (("scalar", 1), ("rows", 3), ("y", 4), ("x", 5)):
            file.createDimension(name, size)
        file.createVariable("scalar", "i4", ())[...] = 7
        file.createVariable("rows", "i4", ("y", "x"))[:] = np.arange(20).reshape(4, 5)
    report = import_store(path, out)
    notes = "".join(report.notes)
    with netcdf.Dataset(path) as file:
        for name in ("scalar", "rows"):
            found: Any = zarr.open_array(out, path=name, mode="r")
            np.testing.assert_array_equal(found[...], file[name][...], strict=True)
            assert f"{name} is the variable that HDF5 has as _nc4_non_coord_{name}" in notes
    for dataset in ("rows", "_nc4_non_coord_rows"):
        adopt(path, tmp_path / dataset, dataset=dataset, link="copy")
        assert document(tmp_path / dataset) == document(out, "rows")


def test_names_of_plain_hdf5_stay(tmp_path: Path) -> None:
    """Also those that netCDF would give to a dimension's variable."""
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["_nc4_non_coord_x"] = VALUES, VALUES + 1
    equal_to_h5py(imported(path)[0], path)


# ------------------------------------------------------------------------- TIFF


def test_tiles_of_a_pyramid_are_copied(tmp_path: Path) -> None:
    """Tiles at the edge, levels, and the byte order that others write."""
    tifffile = pytest.importorskip("tifffile")
    path = tmp_path / "pyramid.tif"
    image = np.arange(100 * 130, dtype=">u2").reshape(100, 130)
    options = {"tile": (16, 32), "compression": "deflate"}
    with tifffile.TiffWriter(path, byteorder=">") as writer:
        writer.write(image, subifds=1, **options)
        writer.write(image[::2, ::2], subfiletype=1, **options)
    group, report = imported(path)
    for i, array in enumerate(report.arrays):
        np.testing.assert_array_equal(group[str(i)][:], tifffile.imread(path, level=i))
        assert array.read_by.endswith("knows numcodecs.zlib (zarr-python, zarrita.js)")
    assert group["0"].metadata.dimension_names == ("Y", "X")
    assert "_FillValue" not in group["0"].attrs  # xarray would take zeros for missing
    with tifffile.TiffFile(path) as tif:
        page = tif.pages[0]
        raw = path.read_bytes()[page.dataoffsets[6] :][: page.databytecounts[6]]
    assert chunk_bytes(group, "0/1.1") == raw
    adopt(path, tmp_path / "adopted", link="copy")
    adopted, own = document(tmp_path / "adopted"), document(group.store, "0")
    assert {**adopted, "chunk_key_encoding": own["chunk_key_encoding"]} == own


@pytest.mark.parametrize("compression", ["zlib", None])
@pytest.mark.parametrize(("dtype", "nodata"), [("i2", "-9999"), ("f4", "nan"), ("u1", "-9999")])
def test_missing_tiles_have_the_nodata_value_of_gdal(
    dtype: str, nodata: str, compression: str | None, tmp_path: Path
) -> None:
    """If it is one of the type. They are stored nowhere: `fill_value` is what tifffile returns."""
    tifffile = pytest.importorskip("tifffile")
    path = tmp_path / "sparse.tif"
    tiles = (None if i in (1, 2) else np.full((16, 16), i + 1, dtype) for i in range(4))
    options = {"shape": (32, 32), "dtype": dtype, "tile": (16, 16), "metadata": None}
    tags = [(42113, "s", 0, nodata, True)]
    tifffile.imwrite(path, tiles, compression=compression, extratags=tags, **options)
    expected = tifffile.imread(path)
    import_store(path, tmp_path / "imported", **ALL)
    adopt(path, tmp_path / "adopted", link="copy")
    for name in ("imported", "adopted"):
        z: Any = zarr.open_array(tmp_path / name, mode="r")
        np.testing.assert_array_equal(z[:], expected)


@pytest.mark.parametrize("predictor", [False, True])
def test_series_of_a_tiff_that_are_left_out_are_named(predictor: bool, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    path = tmp_path / "two.tif"
    with tifffile.TiffWriter(path) as writer:
        for shape in ((64, 64), (32, 48), (16, 16)):
            values = np.ones(shape, "u2")
            writer.write(values, tile=(16, 16), compression="zlib", predictor=predictor)
    report = import_store(path, tmp_path / "two.zarr", recode=predictor, **ALL)
    says = "only series 0 was imported, not these: 1 of shape (32, 48), 2 of shape (16, 16)"
    assert says in report.notes
    path.unlink()
    tifffile.imwrite(path, np.ones((64, 64), "u2"), tile=(16, 16))
    assert import_store(path, tmp_path / "one.zarr", **ALL).notes == ()


@pytest.mark.parametrize(
    "options",
    [
        {"tile": (16, 32), "compression": "deflate", "predictor": True},
        {"rowsperstrip": 30, "compression": "deflate"},
    ],
    ids=["predictor", "short last strip"],
)
def test_a_tiff_that_cannot_be_copied_is_refused_or_encoded_again(
    options: dict[str, Any], tmp_path: Path
) -> None:
    tifffile = pytest.importorskip("tifffile")
    path, out = tmp_path / "in.tif", tmp_path / "out.zarr"
    image = np.arange(100 * 130, dtype="u2").reshape(100, 130)
    tifffile.imwrite(path, image, **options)
    with pytest.raises(UnsupportedError, match=r"imagecodecs_delta|incomplete chunks"):
        import_store(path, out)
    assert not out.exists()
    report = import_store(path, out, recode=True, **ALL)
    np.testing.assert_array_equal(zarr.open_array(out)[:], image)
    assert report.read_by == "every v3 reader"


# ------------------------------------------------------------ references, stores


def references_of(path: Path) -> dict[str, Any]:
    kerchunk = pytest.importorskip("kerchunk.hdf")
    found: dict[str, Any] = kerchunk.SingleHdf5ToZarr(str(path), inline_threshold=100).translate()
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("g/z", data=VALUES, chunks=CHUNKS, compression=1, shuffle=True)
        file["tiny"] = np.arange(5)
    return path


@pytest.mark.parametrize("way", ["dict", "json", "parquet"])
@pytest.mark.filterwarnings("ignore")
def test_references_of_kerchunk(way: str, small: Path, tmp_path: Path) -> None:
    source: Any = references_of(small)
    if way == "json":
        text = json.dumps(source)
        source = tmp_path / "refs.json"
        source.write_text(text)
    elif way == "parquet":
        pytest.importorskip("fastparquet")
        from kerchunk.df import refs_to_dataframe

        target = str(tmp_path / "refs.parq")
        refs_to_dataframe(source, target, record_size=10)
        source = target
    group, _ = imported(source)
    equal_to_h5py(group, small)
    assert group["g/z"].shards == (21, 10)


@pytest.mark.parametrize(("way", "separator"), [("dict", "."), ("dict", "/"), ("parquet", ".")])
@pytest.mark.filterwarnings("ignore")
def test_references_whose_chunks_are_encoded_again(
    way: str, separator: Any, tmp_path: Path
) -> None:
    """Each chunk is decoded by the filters of the references, wherever its key has slashes."""
    values: dict[str, Any] = {}
    z: Any = zarr.create_array(
        values,
        name="x",
        data=VALUES.astype(">f8"),
        chunks=CHUNKS,
        zarr_format=2,
        filters=[Quantize(3, ">f8")],
        compressors=Blosc(),
        chunk_key_encoding={"name": "v2", "separator": separator},
    )
    refs: dict[str, Any] = {".zgroup": '{"zarr_format":2}'}
    for i, (key, value) in enumerate(values.items()):
        (tmp_path / f"{i}").write_bytes(value.to_bytes())
        is_document = key.rpartition("/")[2].startswith(".z")
        found = [f"{tmp_path}/{i}", 0, len(value.to_bytes())]
        refs[key] = value.to_bytes().decode() if is_document else found
    source: Any = {"version": 1, "refs": refs}
    if way == "parquet":
        pytest.importorskip("fastparquet")
        from kerchunk.df import refs_to_dataframe

        refs_to_dataframe(source, str(tmp_path / "refs.parq"))
        source = str(tmp_path / "refs.parq")
    group, _ = imported(source, recode=True)
    np.testing.assert_array_equal(group["x"][:], z[:])


@pytest.mark.filterwarnings("ignore")
def test_a_parquet_file_that_was_cut_off_is_no_missing_chunks(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastparquet")
    from kerchunk.df import refs_to_dataframe

    refs_to_dataframe(references_of(small), str(tmp_path / "refs.parq"), record_size=1000)
    (part,) = (tmp_path / "refs.parq/g/z").glob("*.parq")
    whole = part.read_bytes()
    for n in (len(whole) - 1, len(whole) // 2, 5):
        part.write_bytes(whole[:n])
        with pytest.raises(SpecError, match=r"Parquet file with 'g/z/0\.0' is damaged"):
            import_store(str(tmp_path / "refs.parq"), tmp_path / "i.zarr")


@pytest.mark.filterwarnings("ignore")
def test_a_cut_parquet_file_of_one_chunk(tmp_path: Path) -> None:
    """Its key ends as the key of a scalar."""
    pytest.importorskip("fastparquet")
    from kerchunk.df import refs_to_dataframe

    with h5py.File(tmp_path / "one.h5", "w") as file:
        file.create_dataset("a", data=np.arange(4), chunks=(4,))
    refs_to_dataframe(references_of(tmp_path / "one.h5"), str(tmp_path / "refs.parq"))
    (part,) = (tmp_path / "refs.parq/a").glob("*.parq")
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(SpecError, match="Parquet file with 'a/0' is damaged"):
        import_store(str(tmp_path / "refs.parq"), tmp_path / "i.zarr")


@pytest.mark.parametrize("compressor", [None, {"id": "lzma"}])
def test_a_scalar_as_virtualizarr_writes_it(compressor: Any) -> None:
    """The key of its chunk ends in no name."""
    doc: dict[str, Any] = {
        "zarr_format": 2,
        "shape": [],
        "chunks": [],
        "dtype": "<i8",
        "order": "C",
    }
    doc |= {"fill_value": 0, "compressor": compressor, "filters": None}
    refs = {".zgroup": '{"zarr_format":2}', "crs/.zarray": json.dumps(doc)}
    value = (7).to_bytes(8, "little")
    value = lzma.compress(value) if compressor else value
    refs["crs/"] = "base64:" + base64.b64encode(value).decode()
    target = MemoryStore()
    import_store({"version": 1, "refs": refs}, target, recode=bool(compressor))
    assert zarr.open_array(target, path="crs")[()] == 7


def test_a_reference_that_is_no_chunk_is_refused() -> None:
    """Its array would have fill values there."""
    doc = {"zarr_format": 2, "shape": [2, 2], "chunks": [1, 2], "dtype": "|u1", "order": "C"}
    doc |= {"fill_value": 0, "compressor": None, "filters": None}
    refs = {".zgroup": '{"zarr_format":2}', "g/x/.zarray": json.dumps(doc), "g/x/0.0": "ab"}
    import_store({"version": 1, "refs": {**refs, "g/notes": "of no array"}}, MemoryStore())
    for key in ("g/x/1/0", "g/x/1", "g/x/1.0.0", "g/x"):
        wrong = {"version": 1, "refs": {**refs, "g/y/.zarray": json.dumps(doc), key: "cd"}}
        with pytest.raises(SpecError, match=f"{key}' is no chunk of its array.* 'g/x/0.0'"):
            import_store(wrong, MemoryStore())
        import_store(wrong, MemoryStore(), paths=["g/y"])
    array = zarr.create_array({}, shape=(2, 2), chunks=(1, 2), dtype="u1", compressors=None)
    refs = {"x/zarr.json": json.dumps(array.metadata.to_dict()), "x/c.0.0": "ab"}
    with pytest.raises(SpecError, match=r"c.0.0' is no chunk of its array.* 'x/c/0/0'"):
        import_store({"version": 1, "refs": refs}, MemoryStore())


def test_references_that_are_generated_are_refused() -> None:
    """fsspec would leave them out."""
    gen = [{"key": "r/{{i}}", "url": "a.bin", "dimensions": {"i": {"stop": 4}}}]
    with pytest.raises(UnsupportedError, match="'gen'"):
        import_store({"version": 1, "refs": {".zgroup": '{"zarr_format":2}'}, "gen": gen}, {})


@pytest.mark.filterwarnings("ignore")
def test_a_virtual_dataset_and_an_icechunk_repository(small: Path, tmp_path: Path) -> None:
    """Of VirtualiZarr; with the chunks in the file, in icechunk too."""
    vz = pytest.importorskip("virtualizarr")
    icechunk = pytest.importorskip("icechunk")
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore

    registry = ObjectStoreRegistry({"file://": LocalStore()})
    dataset = vz.open_virtual_dataset(
        f"file://{small}", registry=registry, parser=vz.parsers.HDFParser(group="g")
    )
    group, _ = imported(dataset)
    np.testing.assert_array_equal(group["z"][:], VALUES)

    config = icechunk.RepositoryConfig.default()
    prefix = f"file://{tmp_path}/"
    container = icechunk.VirtualChunkContainer(
        prefix, icechunk.local_filesystem_store(str(tmp_path))
    )
    config.set_virtual_chunk_container(container)
    repository = tmp_path / "repository"
    storage = icechunk.local_filesystem_storage(str(repository))
    repo = icechunk.Repository.create(
        storage, config, authorize_virtual_chunk_access={prefix: None}
    )
    repo.save_config()
    session = repo.writable_session("main")
    dataset.vz.to_icechunk(session.store)
    native = zarr.create_array(session.store, name="native", shape=(9,), chunks=(2,), dtype="i4")
    native[:] = np.arange(9)
    session.commit("virtual chunks and others")
    group, _ = imported(repository, chunks_per_shard=2)
    np.testing.assert_array_equal(group["z"][:], VALUES)
    np.testing.assert_array_equal(group["native"][:], np.arange(9))


def test_a_zip_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    with ZipStore(path, mode="w") as store:
        zarr.create_array(store, name="z", data=VALUES, chunks=CHUNKS, zarr_format=2)
    group, _ = imported(path)
    np.testing.assert_array_equal(group["z"][:], VALUES)


def test_a_codec_of_references_that_v3_lacks_is_named(small: Path) -> None:
    references = references_of(small)
    key = "g/z/.zarray"
    doc = json.loads(references["refs"][key])
    references["refs"][key] = json.dumps({**doc, "compressor": {"id": "szip"}})
    group, report = imported(references, chunks_per_shard=2)
    assert "szip" in left(report)["g/z"]
    np.testing.assert_array_equal(group["tiny"][:], np.arange(5))
    with pytest.raises(UnsupportedError, match=r"'g/z': .*szip"):
        imported(references, paths="g")


# --------------------------------------------------------------- of any import


def test_a_store_behind_fsspec_is_no_file() -> None:
    """Its client may say that a prefix is an object without bytes."""
    url = f"memory://store-{uuid.uuid4().hex}"
    zarr.create_array(f"{url}/v.zarr", name="a", shape=(8,), chunks=(2,), dtype="u1")[:] = 5
    group, _ = imported(f"{url}/v.zarr", chunks_per_shard=2)
    assert (group["a"][:] == 5).all()


def test_an_import_that_was_stopped_continues(hdf5: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    stops: Iterator[int] = iter(range(6))

    def stop(_: Any) -> None:
        if next(stops) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_store(hdf5, out, progress=stop, **ALL)
    report = import_store(hdf5, out, **ALL)
    assert any(array.n_resumed or array.action == "skipped" for array in report.arrays)
    equal_to_h5py(zarr.open_group(out, mode="r"), hdf5)


def test_a_file_that_is_changed_meanwhile_is_refused(hdf5: Path, tmp_path: Path) -> None:
    def change(_: Any) -> None:
        os.utime(hdf5, ns=(1, 1))

    with pytest.raises(ShardConflictError, match="was changed while it was imported"):
        import_store(hdf5, tmp_path / "out.zarr", progress=change, **ALL)


@pytest.mark.parametrize("kind", ["hdf5", "tiff", "kerchunk"])
def test_a_file_that_is_changed_while_its_chunks_are_encoded_again(
    kind: str, tmp_path: Path
) -> None:
    """The library of the format reads it: the result would be of two versions."""
    path = tmp_path / "source"
    if kind == "tiff":
        tifffile = pytest.importorskip("tifffile")
        tifffile.imwrite(path, np.arange(64 * 64).reshape(64, 64).astype("u2"), rowsperstrip=7)
        source: Any = path
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            file.create_dataset("a", data=np.arange(64), chunks=(1,), compression="lzf")
        source = path
    else:
        path.write_bytes(b"".join(base64.b64encode(bytes([i] * 24)) for i in range(64)))
        doc = {"zarr_format": 2, "shape": [64 * 24], "chunks": [24], "dtype": "|u1", "order": "C"}
        doc |= {"fill_value": 0, "compressor": None, "filters": [{"id": "base64"}]}
        refs = {f"a/{i}": [str(path), 32 * i, 32] for i in range(64)}
        head = {".zgroup": '{"zarr_format":2}', "a/.zarray": json.dumps(doc)}
        source = {"version": 1, "refs": {**head, **refs}}

    def change(_: Any) -> None:
        os.utime(path, ns=(1, 1))

    options: Any = {"recode": True, "chunks_per_shard": (1, 1) if kind == "tiff" else 1}
    with pytest.raises(ShardConflictError, match="was changed while it was imported"):
        import_store(source, tmp_path / "out.zarr", progress=change, **options)


class Pickling(InCaller):
    """Sends each task as to another process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return super().submit(*pickle.loads(pickle.dumps((fn, *args))), **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_a_source_that_was_made_again_between_two_imports(tmp_path: Path) -> None:
    """A worker that lives on keeps no places of chunks. Of many chunks some are missing."""
    pytest.importorskip("fastparquet")
    from kerchunk.df import refs_to_dataframe

    (tmp_path / "raw").write_bytes(bytes(range(128)))
    doc = {"zarr_format": 2, "shape": [64], "chunks": [4], "dtype": "|u1", "order": "C"}
    doc |= {"fill_value": 0, "compressor": None, "filters": None}
    source = tmp_path / "refs.parq"
    for first in (0, 64):
        refs: dict[str, Any] = {f"x/{i}": [f"{tmp_path}/raw", first + 4 * i, 4] for i in range(16)}
        del refs["x/5"]
        head = {".zgroup": '{"zarr_format":2}', "x/.zarray": json.dumps(doc)}
        shutil.rmtree(source, ignore_errors=True)
        refs_to_dataframe({"version": 1, "refs": {**head, **refs}}, str(source))
        import_store(source, out := tmp_path / f"{first}", executor=Pickling(), chunks_per_shard=4)
        expected = np.arange(first, first + 64)
        expected[20:24] = 0
        np.testing.assert_array_equal(zarr.open_array(out, path="x", mode="r")[:], expected)


def test_processes_read_the_file_themselves(hdf5: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        import_store(hdf5, tmp_path / "out.zarr", executor=executor, **ALL)
    equal_to_h5py(zarr.open_group(tmp_path / "out.zarr", mode="r"), hdf5)


def test_a_file_and_its_import_on_s3(hdf5: Path) -> None:
    obstore = pytest.importorskip("obstore")
    with s3_server() as where:
        bucket, endpoint = where["bucket"], where["endpoint"]
        options = {"key": "a", "secret": "b", "endpoint_url": endpoint, "region_name": "us-east-1"}
        clients = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
        s3 = obstore.store.S3Store(
            bucket,
            endpoint=endpoint,
            region="us-east-1",
            **clients,
            client_options={"allow_http": True},
        )
        obstore.put(s3, "in/a.h5", hdf5.read_bytes())
        source, out = f"s3://{bucket}/in/a.h5", f"s3://{bucket}/out.zarr"
        both: dict[str, Any] = {"source_options": options, "destination_options": options}
        import_store(source, out, **both, **ALL)
        made = zarr.open_group(zarr.storage.ObjectStore(s3), path="out.zarr", mode="r")
        equal_to_h5py(made, hdf5)
        equal_to_h5py(imported(out, source_options=options)[0], hdf5)  # a directory of Zarr
        with pytest.raises(SpecError, match="there is nothing in"):
            import_store(f"{source}5", MemoryStore(), source_options=options)
        obstore.put(s3, "a.zip", b"PK\3\4")
        with pytest.raises(SpecError, match=f"take 'zip::s3://{bucket}/a.zip'"):
            import_store(f"s3://{bucket}/a.zip", MemoryStore(), source_options=options)


def test_a_file_on_a_server_that_ignores_byte_ranges(hdf5: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    place = Place(tmp_path)
    with place.closing:
        zarray = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "|u1", "fill_value": 0}
        zarray |= {"compressor": None, "filters": None, "order": "C"}
        refs = {".zgroup": '{"zarr_format": 2}', "x/.zarray": json.dumps(zarray), "x/0": "\7\7"}
        references = json.dumps({"version": 1, "refs": refs}).encode()
        url = served(place, {"a.h5": hdf5.read_bytes(), "refs.json": references})
        with pytest.raises(UnsupportedError, match="ignores byte ranges: copy"):
            import_store(f"{url}/a.h5", tmp_path / "out.zarr", **ALL)
        assert imported(f"{url}/refs.json", chunks_per_shard=1)[0]["x"][:].tolist() == [7, 7]


_GARBAGE_IN_THE_THREAD_THAT_ANSWERS = """
import sys
import fsspec, h5py
from fsspec.implementations.memory import MemoryFileSystem
from zarr_shardstore import import_store

fsspec.filesystem("memory").pipe("/d/in.h5", open(sys.argv[1], "rb").read())
kept = [[h5py.File(f"{i}.h5", "w", driver="core", backing_store=False)] for i in range(200)]
answer = MemoryFileSystem.cat_file

def cat_file(self, *args, **options):
    if kept:
        cycle = kept.pop()
        cycle.append(cycle)
        del cycle
    found = answer(self, *args, **options)
    [[] for _ in range(100_000)]  # so that the collector runs
    return found

MemoryFileSystem.cat_file = cat_file
print(import_store("memory://d/in.h5", "out.zarr", chunks_per_shard=2).n_chunks, len(kept) < 200)
"""


def test_the_thread_that_answers_hdf5_never_waits_for_it(small: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _GARBAGE_IN_THE_THREAD_THAT_ANSWERS, str(small)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[1:] == ["True"], done.stderr


def test_the_source_is_only_read(hdf5: Path) -> None:
    before = hdf5.read_bytes(), os.stat(hdf5).st_mtime_ns
    hdf5.chmod(0o400)
    imported(hdf5)
    assert (hdf5.read_bytes(), os.stat(hdf5).st_mtime_ns) == before


@pytest.mark.parametrize("recode", [False, True])
def test_a_name_that_zarr_spells_in_another_way_is_left(recode: bool, tmp_path: Path) -> None:
    r"""zarr takes ``m\s`` for ``m/s``, which another variable may be."""
    path, store = tmp_path / "x.h5", MemoryStore()
    with h5py.File(path, "w") as file:
        options: dict[str, Any] = {"chunks": (3,), "scaleoffset": 0 if recode else None}
        file.create_dataset("m\\s", data=np.arange(9, dtype="i4"), **options)
        file.create_dataset("m/s", data=np.arange(9, dtype="i2")[::-1], **options)
        file["fine"] = VALUES
    assert left(import_store(path, store, recode=recode)).keys() == {"m\\s"}
    group: Any = zarr.open_group(store, mode="r")
    np.testing.assert_array_equal(group["m/s"][:], np.arange(9)[::-1])
    np.testing.assert_array_equal(group["fine"][:], VALUES)


def test_a_remote_file_that_is_gone_is_named() -> None:
    array = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|u1", "fill_value": 0}
    array |= {"compressor": None, "filters": None, "order": "C"}
    refs = {"a/.zarray": json.dumps(array), "a/0": ["memory://no-such-directory/file", 0, 1]}
    with pytest.raises(ShardConflictError, match="is gone"):
        import_store({"version": 1, "refs": refs}, MemoryStore())


@pytest.mark.parametrize("maxshape", [(6, None), (6, None, 4), (6, 4, None)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_chunks_whose_places_hdf5_reports_wrongly(
    maxshape: tuple[int | None, ...], is_whole: bool, tmp_path: Path
) -> None:
    """HDF5 2.0, of extensible arrays: the values are right, or it is refused; recoded they are."""
    shape = tuple(n or 6 for n in maxshape)
    values = np.arange(np.prod(shape)).reshape(shape)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        dataset = file.create_dataset("z", shape, "i4", chunks=(2,) * len(shape), maxshape=maxshape)
        dataset[...] = values if is_whole else 0
        dataset[:, :2] = values[:, :2]
        expected = dataset[...]
    found, refused = unless_refused(imported, path, chunks_per_shard=2)
    assert found is not None or "wrong places" in refused
    if found is not None:
        np.testing.assert_array_equal(found[0]["z"][...], expected)
    np.testing.assert_array_equal(
        imported(path, recode=True, chunks_per_shard=2)[0]["z"][...], expected
    )


def test_a_directory_of_files_is_no_store(tmp_path: Path) -> None:
    """The error names the page on many files; with a document of Zarr it is a store."""
    (tmp_path / "2024-01.nc").write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(SpecError, match=r"directory of files as .2024-01\.nc.*netcdf"):
        import_store(str(tmp_path), {})
    z = zarr.create_array(str(tmp_path), shape=(4,), chunks=(1,), dtype="u1")
    z[:] = 1
    assert import_store(str(tmp_path), MemoryStore(), chunks_per_shard=2).n_chunks == 4
