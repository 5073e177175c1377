"""Random HDF5 and NetCDF-4 files, what import and adoption make of them, and their own readers.

Run as ``python any_hdf5.py``: it imports everything once, then forks a process for each line that
it reads. So a library that crashes ends that process only, and the test sees the signal.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import zarr
from zarr.storage import MemoryStore

from tests.support.processes import fork_for_each_line
from zarr_shardstore import (
    ConversionReport,
    ShardingStore,
    SpecError,
    UnsupportedError,
    adopt,
    import_store,
    undo_adoption,
)

Recipe = dict[str, Any]

NUMBERS = ("|i1", "<u2", ">i4", "<i8", "<f2", ">f4", "<f8", "<c8", ">c16")
TIMES = ("<M8[ns]", ">M8[D]", "<m8[3s]")
COPIED = (*NUMBERS, *TIMES, "bool", "enum", "|S3", "|V5")
"""Types whose bytes are those of a data type of Zarr v3."""
CONVERTED = ("pad", "text", "ascii", "bits", "17 bits")
"""Those that HDF5 converts, or keeps elsewhere."""
LACKING = ("ints", "compound", "compound of texts", "array", "reference", "region", "time", "f16")
"""Those that v3 has not, or h5py has not."""
FILTERS = ("gzip", "shuffle", "fletcher32", "lzf", "scaleoffset", "nbit", "unknown")
UNKNOWN_FILTER = 32999
TEXTS = (*("", "a", "bcd") * 5, "ä" * 9, b"\xff")
ATTRIBUTES: dict[str, Any] = {
    "text": "ä",
    "bytes": b"\xff",
    "one": np.array([3]),
    "numbers": np.array([1.5, np.nan, np.inf]),
    "structure": np.zeros((), [("a", "i4")]),
    "time": np.array([1, 2], "M8[s]").astype(h5py.opaque_dtype(np.dtype("M8[s]"))),
    "CLASS": "DIMENSION_SCALE",
    "NAME": "This is a netCDF dimension but not a netCDF variable",
    "_Netcdf4Coordinates": "odd",
    "_Netcdf4Dimid": np.array([7, 8]),
    "DIMENSION_LIST": np.arange(3),
    "DIMENSION_LABELS": np.arange(3),
    "_FillValue": np.float32(7),
}

READ_BY_NETCDF = ("|i1", "<u2", ">i4", "<i8", ">f4", "<f8")
ATTRIBUTES_OF_NETCDF = ("text", "bytes", "one", "numbers", "_FillValue")
"""netCDF4 crashes on files of h5py with half floats, texts of fixed length that have a fill value,
scales of some dimensions only, and with its own attributes of another type: HDF5, or netCDF-C,
reads these as it would have written them. h5py's ``dims`` crashes on such, too, so the parser looks
at their types first."""


def a_recipe(rng: random.Random) -> Recipe:
    """Draw what a file has."""
    if rng.random() < 0.25:
        return _a_netcdf(rng)
    types = rng.choice(((*COPIED * 2, *CONVERTED, *LACKING), READ_BY_NETCDF))
    return {
        "format": "hdf5",
        "user_block": rng.choice((0, 0, 0, 512)),
        "libver": rng.choice(("earliest", "latest", "v108", "v110")),
        "strategy": rng.choice((None, None, "fsm", "page", "aggregate", "none")),
        "track_order": rng.random() < 0.2,
        "datasets": [_a_dataset(rng, i, types) for i in range(rng.randint(1, 4))],
        "links": rng.random() < 0.1,
        "seed": rng.randrange(1000),
    }


def _a_dataset(rng: random.Random, i: int, types: Sequence[str]) -> Recipe:
    shape = [rng.choice((0, 1, 2, 3, 5, 9)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    has_shape = rng.random() < 0.97
    known = sorted(ATTRIBUTES) if types != READ_BY_NETCDF else ATTRIBUTES_OF_NETCDF
    layout = rng.choice(("chunked", "chunked", "contiguous", "compact")) if shape else "contiguous"
    return {
        "name": rng.choice((f"z{i}", f"z{i}", f"g/z{i}", f"_nc4_non_coord_z{i - 1}", f"odd ä {i}")),
        "type": rng.choice(types),
        "shape": shape if has_shape else None,
        "layout": layout,
        "chunks": [rng.randint(1, 4) for _ in shape],
        "grows": rng.random() < 0.5,
        "filters": rng.sample(FILTERS[: rng.choice((3, 3, 3, 7))], rng.choice((0, 0, 1, 2))),
        "fill": rng.choice((None, None, "one", "odd")),
        "fill_time": rng.choice(("ALLOC", "IFSET", "NEVER")),
        "alloc_time": rng.choice(("DEFAULT", "EARLY", "LATE", "INCR")),
        "written": rng.choice(("none", "part", "all", "all")),
        "skips": rng.random() < 0.1,
        "dims": [rng.choice((None, None, "label", "scale")) for _ in shape * has_shape],
        "attributes": rng.sample(known, rng.choice((0, 0, 1, 2))),
    }


def _a_netcdf(rng: random.Random) -> Recipe:
    dims: dict[str, int | None] = {n: rng.choice((1, 3, 6)) for n in "abc"[: rng.randint(1, 3)]}
    dims["a"] = rng.choice((None, dims["a"]))
    variables: list[Recipe] = []
    for i in range(rng.randint(1, 4)):
        over = rng.sample(sorted(dims), rng.randint(0, len(dims)))
        # netCDF-C 4.10 mixes the rows of variables that end before a dimension that is not first.
        over.sort(key=lambda name: dims[name] is not None)
        variables.append(
            {
                "name": rng.choice((f"v{i}", *dims)),
                "group": rng.choice(("", "", "g")),
                "type": rng.choice(("i2", "u1", "f4", "f8", "i8", "S1", "str", "enum", "vlen")),
                "dims": over,
                "endian": rng.choice(("native", "big")),
                "zlib": rng.random() < 0.3,
                "fletcher32": rng.random() < 0.2,
                "fill": rng.choice((None, None, 7, False)),
                "rows": rng.randint(0, 4),
            }
        )
    return {"format": "netcdf", "dims": dims, "variables": variables, "seed": rng.randrange(1000)}


# --------------------------------------------------------------------------- files


def make(recipe: Recipe, path: Path) -> None:
    """Write the file of a recipe; what HDF5 itself refuses is left out of it."""
    if recipe["format"] == "netcdf":
        _make_netcdf(recipe, path)
        return
    rng = np.random.default_rng(recipe["seed"])
    options = {"libver": (recipe["libver"], "latest"), "track_order": recipe["track_order"]}
    if recipe["strategy"] and not recipe["user_block"]:
        options |= {"fs_strategy": recipe["strategy"], "fs_persist": True}
    with h5py.File(path, "w", userblock_size=recipe["user_block"], **options) as file:
        for each in recipe["datasets"]:
            with suppress(OSError, ValueError, RuntimeError):
                _add_dataset(file, each, rng)
        if recipe["links"]:
            file["soft"] = h5py.SoftLink("/z0")
            file["type"] = np.dtype("f8")
            file["around"] = file["/"]


def _h5_type(kind: str) -> Any:
    h5t = h5py.h5t
    match kind:
        case "bool":
            return h5t.py_create(np.dtype(bool), logical=True)
        case "enum":
            return h5t.py_create(h5py.enum_dtype({"a": 1, "b": 2}, "i2"), logical=True)
        case "pad":
            padded = h5t.C_S1.copy()
            padded.set_size(3)
            padded.set_strpad(h5t.STR_SPACEPAD)
            return padded
        case "text" | "ascii":
            encoding = "utf-8" if kind == "text" else "ascii"
            return h5t.py_create(h5py.string_dtype(encoding), logical=True)
        case "bits":
            return h5t.STD_B16LE
        case "17 bits":
            odd = h5t.STD_I32LE.copy()
            odd.set_precision(17)
            return odd
        case "ints":
            return h5t.py_create(h5py.vlen_dtype("i4"), logical=True)
        case "compound":
            return h5t.py_create(np.dtype([("a", "i4"), ("b", "f8", 2)]), logical=True)
        case "compound of texts":
            dtype = np.dtype([("a", h5py.string_dtype()), ("b", "i2")])
            return h5t.py_create(dtype, logical=True)
        case "array":
            return h5t.array_create(h5t.STD_I16LE, (2, 2))
        case "reference" | "region":
            of = h5py.ref_dtype if kind == "reference" else h5py.regionref_dtype
            return h5t.py_create(of, logical=True)
        case "time":
            return h5t.UNIX_D32LE
        case "f16":
            return h5t.py_create(np.dtype("longdouble"), logical=True)
        case _ if kind in TIMES:
            return h5t.py_create(h5py.opaque_dtype(np.dtype(kind)), logical=True)
    return h5t.py_create(np.dtype(kind), logical=True)


def _fill(kind: str, is_odd: bool) -> Any:
    dtype = np.dtype(kind) if kind in NUMBERS or kind[0] == "|" else None
    if kind in TIMES:
        value = np.array("NaT" if is_odd else 5, kind.lstrip("<>"))
        return value.astype(h5py.opaque_dtype(np.dtype(kind)))
    if dtype is not None and dtype.kind in "fc" and is_odd:
        return np.array(np.nan, dtype)
    if dtype is not None and dtype.kind in "iu" and is_odd:
        return np.array(np.iinfo(dtype).min or np.iinfo(dtype).max, dtype)
    if dtype is not None:
        return np.full((), 1, dtype) if dtype.kind in "iufc" else np.array(b"\xff\0a", dtype)
    match kind:
        case "text" | "ascii":
            return np.array(b"\xff" if is_odd else b"fill", h5py.string_dtype())
        case "bool":
            return np.array(True)
        case "enum":
            return np.array(9 if is_odd else 2, h5py.enum_dtype({"a": 1, "b": 2}, "i2"))
        case "compound":
            return np.ones((), [("a", "i4"), ("b", "f8", 2)])
        case "pad":
            return np.array(b"ab", "S3")
        case "bits":
            return np.array(1, "u2")
        case "17 bits":
            return np.array(1, "i4")
    return None


def _values(file: Any, kind: str, shape: tuple[int, ...], rng: Any) -> Any:
    n = int(np.prod(shape))
    match kind:
        case "text" | "ascii":
            known = TEXTS if kind == "text" else TEXTS[:3]
            texts = [known[i] for i in rng.integers(0, len(known), n)]
            return np.array(texts, object).reshape(shape)
        case "ints" | "compound of texts" | "region" | "time" | "f16":
            return None
        case "reference":
            found = np.empty(n, h5py.ref_dtype)
            found[:] = [file.ref] * n
            return found.reshape(shape)
        case "compound":
            return rng.integers(0, 9, shape).astype("i4").astype([("a", "i4"), ("b", "f8", 2)])
        case "array":
            return rng.integers(0, 9, (*shape, 2, 2)).astype("i2")
        case "bool":
            return rng.integers(0, 2, shape).astype(bool)
        case "enum" | "bits" | "17 bits":
            return rng.integers(1, 3, shape).astype({"bits": "u2", "enum": "i2"}.get(kind, "i4"))
        case "pad" | "|S3" | "|V5":
            return rng.integers(0, 99, shape).astype("S3").astype("S3" if kind == "pad" else kind)
    if kind in TIMES:
        return rng.integers(0, 99, shape).astype("i8").astype(kind)
    return rng.integers(0, 99, shape).astype(kind)


def _add_dataset(file: Any, each: Recipe, rng: Any) -> None:
    kind, name, h5d = each["type"], each["name"], h5py.h5d
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_fill_time(getattr(h5d, f"FILL_TIME_{each['fill_time']}"))
    if each["layout"] != "compact":
        made.set_alloc_time(getattr(h5d, f"ALLOC_TIME_{each['alloc_time']}"))
    if each["fill"] and (fill := _fill(kind, each["fill"] == "odd")) is not None:
        made.set_fill_value(fill)
    shape = None if each["shape"] is None else tuple(each["shape"])
    limits = None
    if shape and each["layout"] == "chunked":
        made.set_chunk(tuple(each["chunks"]))
        if each["grows"] or any(c > n for c, n in zip(each["chunks"], shape, strict=True)):
            limits = (h5py.h5s.UNLIMITED,) * len(shape)
        # First: HDF5 2.0 takes what an earlier filter made for values, and writes over the heap.
        for filter_name in sorted(each["filters"], key=lambda f: f not in ("nbit", "scaleoffset")):
            _add_filter(made, filter_name, kind)
    elif each["layout"] == "compact":
        made.set_layout(h5d.COMPACT)
    space = h5py.h5s.create(h5py.h5s.SCALAR if shape == () else h5py.h5s.NULL)
    if shape:
        space = h5py.h5s.create_simple(shape, limits)
    linked = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    linked.set_create_intermediate_group(True)
    h5d.create(file.id, name.encode(), _h5_type(kind), space, made, linked)
    dataset = file[name]
    for i, (what, n) in enumerate(zip(each["dims"], shape or (), strict=True)):
        if what == "label":
            dataset.dims[i].label = f"label {i}"
        elif what == "scale":
            scale = file.require_dataset(f"scale {n}", (n,), "f8")
            if not h5py.h5ds.is_scale(scale.id):
                scale.make_scale(f"scale {n}")
            dataset.dims[i].attach_scale(scale)
    for key in each["attributes"]:
        with suppress(OSError, ValueError, RuntimeError):
            dataset.attrs[key] = ATTRIBUTES[key]
    if shape is None:
        return
    values = None if 0 in shape else _values(file, kind, shape, rng)
    if each["skips"] and values is not None and kind in NUMBERS and dataset.chunks:
        chunk = rng.integers(0, 9, dataset.chunks).astype(kind)
        mask = (1 << made.get_nfilters()) - 1
        dataset.id.write_direct_chunk((0,) * len(shape), chunk.tobytes(), mask)
    elif each["written"] != "none" and values is not None:
        box = written_box(each)
        if kind in ("text", "ascii", "array", "reference"):
            dataset[box] = values[box]
        else:
            part = np.ascontiguousarray(values[box])
            whole = dataset.id.get_space()
            if shape:
                starts = tuple(b.start for b in box)
                whole.select_hyperslab(starts, part.shape)
            part_space = h5py.h5s.create_simple(part.shape) if shape else whole
            in_memory = dataset.id.get_type() if kind in TIMES else None
            dataset.id.write(part_space, whole, part, in_memory)


def written_box(each: Recipe) -> tuple[slice, ...]:
    """The box of a dataset that `make` writes."""
    part = each["written"] == "part"
    return tuple(slice(n // 3 if part else 0, n) for n in each["shape"])


def _add_filter(made: Any, name: str, kind: str) -> None:
    match name:
        case "gzip":
            made.set_deflate(4)
        case "shuffle":
            made.set_shuffle()
        case "fletcher32":
            made.set_fletcher32()
        case "lzf":
            made.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
        case "scaleoffset" if kind in NUMBERS and np.dtype(kind).kind in "iu":
            made.set_scaleoffset(h5py.h5z.SO_INT, 0)
        case "nbit":
            made.set_filter(h5py.h5z.FILTER_NBIT)
        case "unknown":
            made.set_filter(UNKNOWN_FILTER, h5py.h5z.FLAG_OPTIONAL, (1,))


def _make_netcdf(recipe: Recipe, path: Path) -> None:
    rng = np.random.default_rng(recipe["seed"])
    with netCDF4.Dataset(path, "w") as file:
        for name, size in recipe["dims"].items():
            file.createDimension(name, size or None)
        types: dict[str, Any] = {
            "enum": file.createEnumType("u1", "an_enum", {"a": 0, "b": 1}),
            "vlen": file.createVLType("i4", "a_vlen"),
            "str": str,
        }
        for each in recipe["variables"]:
            group = file.createGroup(each["group"]) if each["group"] else file
            if each["name"] in group.variables:
                continue
            kind, over = each["type"], each["dims"]
            options = {"endian": each["endian"]} if kind[0] in "iuf" and kind != "i1" else {}
            if kind not in ("str", "vlen") and over:
                options |= {"zlib": each["zlib"], "fletcher32": each["fletcher32"]}
            if kind[0] in "iuf":
                options["fill_value"] = each["fill"]
            v = group.createVariable(each["name"], types.get(kind, kind), over, **options)
            sizes = [recipe["dims"][name] or each["rows"] for name in over]
            if 0 in sizes or kind == "vlen":
                continue
            if kind == "str":
                v[tuple(slice(n) for n in sizes) or ...] = np.full(sizes, "ab", object)
            else:
                values = rng.integers(0, 2, sizes)
                v[tuple(slice(n) for n in sizes) or ...] = values.astype(
                    "S1" if kind == "S1" else kind if kind != "enum" else "u1"
                )


# --------------------------------------------------------------------------- readers


def h5py_reads(path: Path) -> Any:
    """All names, types, attributes and values, as h5py has them, or why it has not."""

    def of(item: Any) -> Any:
        attributes = {name: attempt(item.attrs.__getitem__, name) for name in sorted(item.attrs)}
        if isinstance(item, h5py.Dataset):
            value = attempt(item.__getitem__, ()) if is_specified(item) else None
            fill = attempt(lambda: item.fillvalue)
            return [attempt(lambda: item.dtype), item.shape, value, fill, attributes]
        if isinstance(item, h5py.Group):
            return {name: attempt(of, item.get(name)) for name in item if name != "around"}
        return type(item).__name__

    with h5py.File(path) as file:
        return of(file)


def netcdf_reads(path: Path) -> Any:
    has_values = all_specified(path)

    def of(group: Any) -> Any:
        variables = {}
        for name, v in group.variables.items():
            value = attempt(v.__getitem__, ...) if has_values else None
            attributes = {key: attempt(v.getncattr, key) for key in v.ncattrs()}
            variables[name] = [v.dtype, v.dimensions, value, attributes]
        return [variables, {name: of(inner) for name, inner in group.groups.items()}]

    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        return of(file)


def h5dump_reads(path: Path) -> Any:
    """Its status and output; it may know less than HDF5 2.0."""
    if shutil.which("h5dump") is None:
        return None
    done = subprocess.run(["h5dump", str(path)], capture_output=True, check=False)
    if done.returncode < 0:
        raise ChildProcessError(f"signal {-done.returncode}")
    return [done.returncode, done.stdout if all_specified(path) else None]


def is_specified(dataset: Any) -> bool:
    """Whether all values are written or fill values: not what memory happens to have."""
    made = dataset.id.get_create_plist()
    if made.get_fill_time() != h5py.h5d.FILL_TIME_NEVER or dataset.size in (None, 0):
        return True
    if dataset.chunks:
        grid = [-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)]
        return bool(dataset.id.get_num_chunks() == np.prod(grid))
    return bool(dataset.id.get_storage_size())


def all_specified(path: Path) -> bool:
    found: list[bool] = []
    with h5py.File(path) as file:

        def add(_: str, item: Any) -> None:
            found.append(not isinstance(item, h5py.Dataset) or is_specified(item))

        file.visititems(add)
    return all(found)


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        return type(error).__name__


READERS: dict[str, Callable[[Path], Any]] = {
    "h5py": h5py_reads,
    "netCDF4": netcdf_reads,
    "h5dump": h5dump_reads,
}


FAILED = "the reader ended with"


def can_read(reader: str, recipe: Recipe) -> bool:
    """Whether a reader can be asked: netCDF4 crashes on some files that nobody has adopted."""
    return reader != "netCDF4" or all(
        each["type"] in READ_BY_NETCDF
        and set(each["attributes"]) <= set(ATTRIBUTES_OF_NETCDF)
        and each["dims"].count("scale") in (0, len(each["dims"]))
        for each in recipe.get("datasets", ())
    )


def in_a_fork(reader: Callable[[Path], Any], path: Path) -> str:
    """Return a digest of what a reader finds, or the signal that ends it."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = re.sub("0x[0-9a-f]+|<HDF5 [^>]*>", "", _spelled(reader(path)))
            os.write(into, hashlib.sha256(text.encode(errors="replace")).hexdigest().encode())
        except Exception as error:
            os.write(into, f"{FAILED} {error!r}".encode())
        os._exit(0)
    os.close(into)
    with open(out, "rb") as reply:
        found = reply.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return found if status == 0 else f"{FAILED} {status}"


def _spelled(found: Any) -> str:
    if isinstance(found, dict):
        return json.dumps({str(k): _spelled(v) for k, v in found.items()})
    if isinstance(found, list | tuple):
        return json.dumps([*map(_spelled, found)])
    if isinstance(found, np.ndarray) and not found.dtype.hasobject:
        return f"{found.dtype} {found.shape} {found.tobytes().hex()}"
    if isinstance(found, np.ndarray):
        return f"{found.shape} {_spelled(found.tolist())}"
    return repr(found)


# --------------------------------------------------------------------------- claims

LEFT = re.compile(
    "its texts of variable length|has none of Zarr v3|cannot be translated|HDF5 converts its values"
    "|it is empty|filter mask|for which v3 has no codec|it shuffles|its library says"
)
"""Reasons for which an import may leave a dataset."""
NOT_ADOPTED = re.compile(f"{LEFT.pattern}|no chunks|user block|of its own for its values")


def check(path: Path, root: Path, recipe: Recipe, recode: bool) -> None:
    """Import, adopt each dataset, read the adopted file, and take that back.

    Raises
    ------
    AssertionError
        With the name of the dataset.
    """
    make(recipe, path)
    original = path.read_bytes()
    asked = {name: reader for name, reader in READERS.items() if can_read(name, recipe)}
    before = {name: in_a_fork(reader, path) for name, reader in asked.items()}
    if recipe["format"] == "hdf5" and FAILED in before.get("netCDF4", ""):
        del asked["netCDF4"]  # it does not open all files of h5py, and may crash if it fails to
    assert [before[name] for name in asked if FAILED in before[name]] == []
    try:
        expected = values_of(path, recipe)
    except OSError:  # HDF5 has written what its own filters cannot read: there is no right value
        return
    check_import(path, expected, recode=recode)
    assert path.read_bytes() == original
    for i, (name, values) in enumerate(expected.items()):
        dest = root / f"adopted {i}"
        refusal = refusal_of(partial(adopt, path, dest, dataset=name))
        if refusal is not None:
            assert NOT_ADOPTED.search(refusal), (name, refusal)
            assert path.read_bytes() == original
            continue
        assert path.read_bytes()[: len(original)] == original
        check_equal(zarr.open_array(ShardingStore(dest), mode="r"), values, name)
        for reader_name, reader in asked.items():
            assert in_a_fork(reader, path) == before[reader_name], (name, reader_name)
        undo_adoption(dest)
        assert path.read_bytes() == original, name


def refusal_of(call: Callable[[], Any]) -> str | None:
    """Return the reason of a refusal, if it is one."""
    try:
        call()
    except (UnsupportedError, SpecError) as error:
        return str(error)
    return None


def check_import(path: Path, expected: Mapping[str, Any], *, recode: bool) -> None:
    """What is not left by its name has its values; nothing else is missing."""
    store = MemoryStore()
    reports: list[ConversionReport] = []
    options: dict[str, Any] = {"recode": recode, "chunks_per_shard": 2}
    refusal = refusal_of(lambda: reports.append(import_store(path, store, **options)))
    if refusal is not None:
        found_late = refusal.startswith("no array of")  # while values were decoded
        start = "these arrays cannot be imported" if expected else "the source, read as"
        assert refusal.startswith(start) or (expected and found_late), refusal
        assert not expected or LEFT.search(refusal), refusal
        documents = [json.loads(value.to_bytes()) for value in store._store_dict.values()]
        assert [doc["node_type"] for doc in documents] == ["group"] * len(documents)
        assert found_late or not documents
        return
    (report,) = reports
    group = zarr.open_group(ShardingStore(store), mode="r")
    left = {array.path: array.reason for array in report.arrays if array.is_left}
    assert [why for why in left.values() if not LEFT.search(why)] == []
    assert report.n_left == len(left)
    for name, values in expected.items():
        if name not in left:
            check_equal(group[name], values, name)


def check_equal(array: Any, values: tuple[Any, Any], name: str) -> None:
    dtype, expected = values
    if expected is not None:
        assert array.shape == np.shape(expected), name
        np.testing.assert_array_equal(array[()], expected, err_msg=name)
    if dtype is not None:
        assert array.dtype.newbyteorder("=") == dtype.newbyteorder("="), name


def values_of(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Types and values by name, as the file's own library has them; ``None``: not specified."""
    found: dict[str, Any] = {}
    if recipe["format"] == "netcdf":
        with netCDF4.Dataset(path) as file:
            file.set_auto_maskandscale(False)
            for prefix, group in (("", file), *((f"{n}/", g) for n, g in file.groups.items())):
                for name, v in group.variables.items():
                    has_fill = isinstance(v.dtype, type) or v.get_fill_value() is not None
                    found[prefix + name] = None, v[...] if has_fill else None
        return found
    with h5py.File(path) as file:
        items: dict[str, Any] = {}
        file.visititems(items.__setitem__)
        for name, item in items.items():
            if not isinstance(item, h5py.Dataset):
                continue
            dtype = attempt(lambda item=item: item.dtype)
            if isinstance(dtype, str) or item.shape is None:
                found[name] = None, None
            elif dtype.kind == "O":
                is_text = h5py.check_string_dtype(dtype) is not None
                found[name] = None, attempt(item.asstr().__getitem__, ()) if is_text else None
            else:
                found[name] = dtype, item[()] if is_specified(item) else None
    return found


def run(request: dict[str, Any]) -> None:
    """Check files one after another, of the same name."""
    warnings.simplefilter("ignore")
    root = Path(request["root"])
    for recipe in request["recipes"]:
        check(root / "any.h5", root, recipe, request["recode"])


if __name__ == "__main__":
    fork_for_each_line(run)
