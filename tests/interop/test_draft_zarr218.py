"""Draft arrays go between zarr-python 3, through `DraftHierarchyStore`, and zarr-python 2.18.7.

A table of arrays is written on one side and read on the other, in one process each.
``ZARR_SHARDSTORE_ZARR218`` names the Python that has zarr 2.18.7; ``make test`` makes it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.codecs import BytesCodec, TransposeCodec

from zarr_shardstore import DraftHierarchyStore, ShardingStore

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "zarr218"
SCRIPT = HERE / "golden" / "draft_table.py"
OLD_PYTHON = os.environ.get("ZARR_SHARDSTORE_ZARR218")

needs_zarr218 = pytest.mark.skipif(
    OLD_PYTHON is None, reason="ZARR_SHARDSTORE_ZARR218 names no Python"
)
# Data types and codecs that zarr-python 3 calls unstable are what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*[Ss]pecification"),
    pytest.mark.filterwarnings("ignore:.*Zarr V3 specification"),
]

Values = npt.NDArray[Any]
Case = dict[str, Any]

# numpy's name: a fill value
DTYPES: dict[str, Any] = {
    "|b1": True,
    "|i1": -3,
    "|u1": 255,
    "<i2": -300,
    ">i4": 70_000,
    "<i8": -(2**63),
    ">u2": 65_535,
    "<u4": 7,
    ">u8": 2**64 - 1,
    "<f2": -0.1,
    ">f4": float("nan"),
    "<f4": 0.1,
    "<f8": float("-inf"),
    ">f8": 1e300,
    "<c8": complex(1, float("nan")),
    ">c16": complex(float("inf"), -0.5),
    "<M8[ns]": np.datetime64(5, "ns"),
    ">M8[D]": np.datetime64("NaT", "D"),
    ">m8[us]": np.timedelta64(7, "us"),
    "|S5": b"a\xff",
    "<U3": "bä",
    ">U2": "",
    "|V4": np.void(b"ab\0d"),
}

# numcodecs' configuration, and the codec of zarr-python 3
COMPRESSORS: list[tuple[Case | None, Case | None]] = [
    (None, None),
    ({"id": "gzip", "level": 2}, {"name": "gzip", "configuration": {"level": 2}}),
    (
        {"id": "blosc", "cname": "zstd", "clevel": 3, "shuffle": 1, "blocksize": 0},
        {
            "name": "blosc",
            "configuration": {
                "cname": "zstd",
                "clevel": 3,
                "shuffle": "shuffle",
                "blocksize": 0,
                "typesize": None,
            },
        },
    ),
    (
        {"id": "zstd", "level": 4, "checksum": True},
        {"name": "zstd", "configuration": {"level": 4, "checksum": True}},
    ),
    ({"id": "zlib", "level": 9}, {"name": "numcodecs.zlib", "configuration": {"level": 9}}),
    ({"id": "bz2", "level": 2}, {"name": "numcodecs.bz2", "configuration": {"level": 2}}),
    (
        {"id": "lz4", "acceleration": 3},
        {"name": "numcodecs.lz4", "configuration": {"acceleration": 3}},
    ),
    (
        {"id": "lzma", "format": 1, "check": -1, "preset": 2, "filters": None},
        {"name": "numcodecs.lzma", "configuration": {"preset": 2}},
    ),
    (
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 2, "blocksize": 256},
        {
            "name": "blosc",
            "configuration": {
                "cname": "lz4",
                "clevel": 5,
                "shuffle": "bitshuffle",
                "blocksize": 256,
                "typesize": None,
            },
        },
    ),
]

SHAPES = {
    0: ((), (), ()),
    1: ((7,), (2,), (3,)),
    2: ((5, 4), (2, 3), (2, 1)),
    3: ((5, 3, 2), (2, 1, 2), (1, 2, 3)),
}


def table() -> list[Case]:
    """Every data type in 0 to 3 dims, sharded and not; the rest goes round in step."""
    cases: list[Case] = []
    for name in DTYPES:
        for ndim, (shape, chunks, cps) in SHAPES.items():
            for is_sharded in (True, False):
                i = len(cases)
                cases.append(
                    {
                        "path": f"g{i % 5}/h/a{i}" if i % 3 else f"a{i}",
                        "dtype": name,
                        "shape": shape,
                        "chunks": chunks,
                        "chunks_per_shard": cps if is_sharded else None,
                        "separator": "/."[i % 7 % 2],
                        "order": "CF"[i % 5 % 2],
                        "compressor": COMPRESSORS[i % len(COMPRESSORS)][0] if ndim else None,
                        "codec": COMPRESSORS[i % len(COMPRESSORS)][1] if ndim else None,
                        # Without a fill value, the rest of a chunk is whatever was in memory.
                        "n_written": 3 if i % 4 != 3 else 4,
                        "has_fill": i % 4 != 3,
                    }
                )
    return cases


def values_of(case: Case, seed: int = 1) -> Values:
    """Values of every bit pattern; of texts, such as are valid."""
    dtype = np.dtype(case["dtype"])
    rng = np.random.default_rng(seed + len(case["path"]))
    shape = case["shape"]
    if dtype.kind == "U":
        return np.array(rng.choice(["", "a", "äb", "ß"], shape), dtype)
    if dtype.kind == "b":
        return np.array(rng.integers(0, 2, shape), dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype="u1")
    values: Values = np.ascontiguousarray(raw).view(dtype).reshape(shape)
    return values


def fill_of(case: Case) -> Any:
    """The fill value, with its type; zero where none was given."""
    dtype = np.dtype(case["dtype"])
    return np.array(DTYPES[case["dtype"]], dtype) if case["has_fill"] else np.zeros((), dtype)


def shown_fill_of(case: Case) -> Any:
    """What is read here where zarr 2.18.7 wrote nothing: a fill value ``null`` is NaT for times."""
    dtype = np.dtype(case["dtype"])
    is_nat = dtype.kind in "mM" and not case["has_fill"]
    return np.array("NaT", dtype) if is_nat else fill_of(case)


def expected_of(case: Case, values: Values, fill: Any) -> Values:
    """What is read where only the leading part of `values` was written."""
    if not values.ndim:
        return values
    whole = np.full(values.shape, fill, values.dtype)
    whole[: case["n_written"]] = values[: case["n_written"]]
    return whole


def assert_same(read: Values, expected: Values, case: Case) -> None:
    """The same bits, whatever the byte order; a NaN is a NaN."""
    assert read.shape == expected.shape, case
    np.testing.assert_array_equal(read.astype(expected.dtype), expected, err_msg=str(case))


def write_table(folder: Path, cases: list[Case]) -> None:
    """What the script needs."""
    for name in ("values", "fills"):
        (folder / name).mkdir(parents=True)
    (folder / "table.json").write_text(json.dumps(cases))
    for i, case in enumerate(cases):
        np.save(folder / "values" / f"{i}.npy", values_of(case))
        np.save(folder / "fills" / f"{i}.npy", fill_of(case))


def run_zarr218(command: str, directory: Path, folder: Path) -> None:
    """Run the script in the environment of zarr 2.18.7."""
    assert OLD_PYTHON is not None
    done = subprocess.run(
        [OLD_PYTHON, str(SCRIPT), command, str(directory), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def objects_of(directory: Path) -> dict[str, bytes]:
    """The files of a directory, by key."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def write_objects(objects: dict[str, bytes], directory: Path) -> None:
    """Objects by key as files of a directory."""
    for key, value in objects.items():
        path = directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)


def create(store: DraftHierarchyStore, case: Case) -> zarr.Array[Any]:
    """Create the array of a case by zarr-python 3, and write its leading part."""
    dtype = np.dtype(case["dtype"])
    ndim = len(case["shape"])
    endian: Literal["big", "little"] = "big" if dtype.str[0] == ">" else "little"
    order = tuple(range(ndim))[::-1]
    z = zarr.create_array(
        store,
        name=case["path"],
        shape=case["shape"],
        chunks=case["chunks"],
        dtype=dtype,
        fill_value=fill_of(case)[()],
        filters=[TransposeCodec(order=order)] if case["order"] == "F" and ndim else None,
        serializer=BytesCodec(endian=endian),
        compressors=case["codec"],
        chunk_key_encoding={"name": "default", "separator": case["separator"]},
        attributes={"path": case["path"]},
    )
    values = values_of(case)
    if ndim:
        z[: case["n_written"]] = values[: case["n_written"]]
    else:
        z[...] = values
    return z


@pytest.fixture(scope="module")
def written_here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    """The table written by zarr-python 3, into local files and, every second one, a dict."""
    folder = tmp_path_factory.mktemp("here")
    cases = table()
    bases: list[Any] = [folder / "base", {}]
    for i, case in enumerate(cases):
        base = bases[i // 2 % 2]
        create(
            DraftHierarchyStore(ShardingStore(base, chunks_per_shard=case["chunks_per_shard"])),
            case,
        )
    write_objects(bases[1], folder / "base")
    return folder, cases


@needs_zarr218
def test_zarr218_reads_what_is_written_here(written_here: tuple[Path, list[Case]]) -> None:
    """Every data type, layout, separator, compressor, sharded or not: equal values."""
    folder, cases = written_here
    write_table(folder, cases)
    run_zarr218("read", folder / "base", folder)
    seen = json.loads((folder / "read.json").read_text())
    for i, case in enumerate(cases):
        expected = expected_of(case, values_of(case), fill_of(case))
        assert_same(np.load(folder / "read" / f"{i}.npy"), expected, case)
        assert seen[i]["dtype"] == np.dtype(case["dtype"]).str
        assert seen[i]["order"] == (case["order"] if len(case["shape"]) > 1 else "C")
        assert seen[i]["separator"] == case["separator"]
        assert seen[i]["attributes"] == {"path": case["path"]}
        compressor = seen[i]["compressor"]
        if case["compressor"] and case["compressor"]["id"] == "zstd":
            compressor["checksum"] = True  # numcodecs of that time does not tell it
        assert compressor == case["compressor"]
        cps = case["chunks_per_shard"]
        assert seen[i]["chunks_per_shard"] == ([] if cps is None else [list(cps or (1,))])


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("is_dict", [False, True])
@needs_zarr218
def test_what_zarr218_wrote_is_read_and_updated_here(tmp_path: Path, is_dict: bool) -> None:
    """Values, attributes and documents; after an update zarr 2.18.7 reads the new ones."""
    cases = [case for i, case in enumerate(table()) if i % 2 == is_dict]
    write_table(tmp_path, cases)
    run_zarr218("write", tmp_path / "base", tmp_path)
    before = objects_of(tmp_path / "base")
    base: Any = before.copy() if is_dict else tmp_path / "base"
    store = DraftHierarchyStore(base)
    group = zarr.open_group(store, mode="r+")
    assert dict(group.attrs) == {"made": "by 2.18"}
    expected = []
    for i, case in enumerate(cases):
        z = group[case["path"]]
        assert isinstance(z, zarr.Array)
        values = values_of(case)
        assert_same(np.asarray(z[...]), expected_of(case, values, shown_fill_of(case)), case)
        assert dict(z.attrs) == {"number": i}
        assert z.chunks == tuple(case["chunks"])
        assert z.metadata.chunk_key_encoding.separator == case["separator"]  # type: ignore[union-attr]
        z.attrs["seen"] = "ä"
        new = values_of(case, seed=99)
        if values.ndim:
            z.resize((8, *values.shape[1:]))
            whole, n = np.full(z.shape, shown_fill_of(case), values.dtype), case["n_written"]
            whole[:n], whole[4:6] = values[:n], new[2:4]
            z[4:6] = new[2:4]
            expected.append(whole)
        else:
            z[...] = new
            expected.append(new)
    if is_dict:
        shutil.rmtree(tmp_path / "base")
        write_objects(base, tmp_path / "base")
    run_zarr218("read", tmp_path / "base", tmp_path)
    seen = json.loads((tmp_path / "read.json").read_text())
    for i, case in enumerate(cases):
        # Without a fill value, what was never written is whatever zarr 2.18.7 finds in memory.
        defined = slice(6) if case["shape"] and not case["has_fill"] else ...
        read = np.load(tmp_path / "read" / f"{i}.npy")
        assert_same(read[defined], expected[i][defined], case)
        assert seen[i]["attributes"] == {"number": i, "seen": "ä"}
        assert seen[i]["compressor"] == (
            case["compressor"] and {**case["compressor"], **seen[i]["compressor"]}
        )
        key = f"meta/root/{case['path']}.array.json"
        old = json.loads(before[key])
        new_doc = json.loads((tmp_path / "base" / key).read_bytes())
        if case["shape"]:
            old["shape"] = [8, *case["shape"][1:]]
        changed = {name for name in {*old, *new_doc} if old.get(name) != new_doc.get(name)}
        assert changed <= {"attributes", "storage_transformers"}, "the rest is as it was stored"


def test_the_golden_hierarchy_is_shown() -> None:
    """What 2.18.7 once wrote, without needing it: implicit groups, 0-d, edges, both separators."""
    group = zarr.open_group(DraftHierarchyStore(str(GOLDEN)), mode="r")
    shapes = {
        path: z.shape for path, z in group.members(max_depth=None) if isinstance(z, zarr.Array)
    }
    assert shapes == {
        "a/cube": (5, 3, 2),
        "a/edge": (7, 4),
        "holes": (8, 8),
        "line": (9,),
        "point": (),
    }
    for path, shape in shapes.items():
        z = group[path]
        assert isinstance(z, zarr.Array)
        data = (np.arange(1, z.size + 1, dtype="<i4") * 7).reshape(shape)
        if path == "holes":
            whole, data = data, np.zeros(shape, "<i4")
            data[0:2, 0:2], data[6:8, 4:6] = whole[0:2, 0:2], whole[6:8, 4:6]
        np.testing.assert_array_equal(z[...], data)
