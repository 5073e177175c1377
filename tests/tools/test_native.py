"""`to_native` and `from_native`: which documents are written and removed, in which order, and
what is refused before that."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore, MemoryStore

from tests.support.bases import BASES
from tests.support.kit import objects_of
from zarr_shardstore import (
    ReadOnlyError,
    ShardingMapping,
    ShardingStore,
    SpecError,
    from_native,
    to_native,
)

DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
V2 = [*DOCUMENTS[1:]]
DATA = {
    "img/a": np.arange(35, dtype=">i4").reshape(7, 5),
    "img/deep/b": np.arange(24, dtype="<f8").reshape(4, 6) / 8,
    "plain": np.arange(9, dtype="u1"),
}


def name_of(key: str) -> str:
    return key.rpartition("/")[2]


def documents_of(base: Any) -> dict[str, Any]:
    return {k: json.loads(v) for k, v in objects_of(base).items() if name_of(k) in DOCUMENTS}


def data_of(base: Any) -> dict[str, bytes]:
    return {k: v for k, v in objects_of(base).items() if name_of(k) not in DOCUMENTS}


def make_v2(base: Any) -> Any:
    """A consolidated v2 hierarchy with two sharded arrays and one that is not."""
    store = ShardingStore(base, chunks_per_shard={"img/*": (3, 2)})
    root = zarr.create_group(store, zarr_format=2, attributes={"title": "é"})
    root.create_group("img/deep", attributes={"depth": 2})
    for path, data in DATA.items():
        z = root.create_array(
            path,
            shape=data.shape,
            chunks=(2,) * data.ndim,
            dtype=data.dtype,
            order="F",
            attributes={"path": path, "_ARRAY_DIMENSIONS": ["y", "x"][: data.ndim]},
        )
        z[...] = data
    zarr.consolidate_metadata(store, zarr_format=2)
    return base


def make_v3(base: Any, **options: Any) -> Any:
    """A consolidated v3 hierarchy, declared by storage transformers."""
    options = {"declaration": "storage_transformers", **options}
    store = ShardingStore(base, chunks_per_shard={"img/*": (3, 2)}, **options)
    root = zarr.create_group(store, attributes={"title": "é"})
    root.create_group("img/deep", attributes={"depth": 2})
    for path, data in DATA.items():
        key: Any = {"name": "v2", "separator": "."}
        chunks = (2,) * data.ndim
        z = root.create_array(
            path, shape=data.shape, chunks=chunks, dtype=data.dtype.newbyteorder("<"),
            chunk_key_encoding=key, attributes={"path": path},
        )  # fmt: skip
        z[...] = data
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
        zarr.consolidate_metadata(store)
    return base


def wrap(base: Any) -> Any:
    """A store that zarr takes."""
    return MemoryStore({k: zarr.core.buffer.cpu.Buffer.from_bytes(v) for k, v in base.items()})


def assert_read(store: Any, zarr_format: int, *, is_consolidated: bool = False) -> None:
    """Every array, from the root group, has its values."""
    root: Any = zarr.open_group(
        store,
        mode="r",
        zarr_format=zarr_format,  # type: ignore[arg-type]
        use_consolidated=is_consolidated,
    )
    assert root.attrs["title"] == "é"
    for path, data in DATA.items():
        np.testing.assert_array_equal(root[path][...], data)
        assert root[path].attrs["path"] == path
    assert root["img/deep"].attrs.asdict() == {"depth": 2}


class TestToNative:
    @pytest.fixture(params=["dict", "local", "fsspec"])
    def base(self, request: pytest.FixtureRequest) -> Any:
        return BASES[request.param]()

    def test_a_consolidated_group_below_the_root(self) -> None:
        """Its copies are those of what lies below it, not of itself."""
        base: Any = make_v2({})
        zarr.consolidate_metadata(ShardingStore(base), path="img", zarr_format=2)
        to_native(base)
        copies = documents_of(base)["img/zarr.json"]["consolidated_metadata"]["metadata"]
        below = [path.removeprefix("img/") for path in DATA if path.startswith("img/")]
        assert sorted(copies) == sorted([*below, "deep"])

    def test_v2_is_v3_afterwards(self, base: Any) -> None:
        """Groups, arrays and consolidated metadata; no v2 document is left, no data touched."""
        make_v2(base)
        before = data_of(base)
        report = to_native(base)
        assert data_of(base) == before
        docs = documents_of(base)
        assert sorted(docs) == sorted(
            f"{path}/zarr.json".lstrip("/") for path in ("", "img", "img/deep", *DATA)
        )
        assert (report.n_documents_written, report.n_documents_removed) == (6, 6 + 6 + 1)
        native = base if not isinstance(base, dict) else wrap(base)
        for is_consolidated in (False, True):
            assert_read(native, 3, is_consolidated=is_consolidated)
        assert docs["img/a/zarr.json"]["dimension_names"] == ["y", "x"]
        assert docs["img/a/zarr.json"]["attributes"] == {"path": "img/a", "_FillValue": 0}
        assert zarr.open_array(native, path="img/a", mode="r").shards == (6, 4)
        assert zarr.open_array(native, path="plain", mode="r").shards is None

    def test_a_second_call_changes_nothing(self, base: Any) -> None:
        make_v2(base)
        to_native(base)
        before = objects_of(base)
        report = to_native(base)
        assert objects_of(base) == before
        assert {entry.action for entry in report.entries} == {"skipped"}
        assert report.n_documents_written == report.n_documents_removed == 0

    @pytest.mark.parametrize("location", ["start", "end"])
    @pytest.mark.parametrize("codecs", [["bytes"], ["bytes", "crc32c"]])
    def test_storage_transformers_become_the_codec(
        self, base: Any, location: Any, codecs: list[str]
    ) -> None:
        """With the same form of the index; also in consolidated metadata."""
        make_v3(base, index_location=location, index_codecs=codecs)
        before = data_of(base)
        report = to_native(base)
        assert data_of(base) == before
        docs = documents_of(base)
        (codec,) = docs["img/a/zarr.json"]["codecs"]
        assert codec["configuration"]["index_location"] == location
        assert [c["name"] for c in codec["configuration"]["index_codecs"]] == codecs
        assert "zarr_shardstore" not in json.dumps(docs)
        native = base if not isinstance(base, dict) else wrap(base)
        for is_consolidated in (False, True):
            assert_read(native, 3, is_consolidated=is_consolidated)
        assert [e.path for e in report.entries if e.action == "translated"] == [
            "", "img/a", "img/deep/b",
        ]  # fmt: skip

    def test_it_takes_a_store_that_wraps(self, base: Any) -> None:
        """And an array that is open through it goes on."""
        store = ShardingStore(make_v2(base))
        z: Any = zarr.open_array(store, path="img/a")
        assert z[6, 4] == DATA["img/a"][6, 4]
        to_native(store)
        again: Any = zarr.open_array(store, path="img/a", zarr_format=3)
        again[0, 0] = 77
        assert (z[0, 0], again[6, 4]) == (77, DATA["img/a"][6, 4])
        native: Any = zarr.open_array(
            base if not isinstance(base, dict) else wrap(base), path="img/a"
        )
        assert native[0, 0] == 77


def test_stores_that_are_open_notice() -> None:
    """A resize by the new document is seen where the old one was known."""
    base = make_v2({})
    store, other = ShardingStore(base), ShardingStore(base)
    for opened in (store, other):
        z: Any = zarr.open_array(opened, path="img/a", zarr_format=2)
        assert z[6, 4] == DATA["img/a"][6, 4]
    to_native(base)
    z = zarr.open_array(store, path="img/a", zarr_format=3)
    z.resize((40, 5))
    z[39, 4] = 5
    assert "img/a/6.1" in base
    assert "img/a/19.2" not in base
    assert zarr.open_array(other, path="img/a", zarr_format=3)[39, 4] == 5


def test_an_array_too_large_to_be_listed() -> None:
    """Its attributes are found too."""
    base: Any = {}
    n = (1 << 20) + 1
    store = ShardingStore(base)
    z = zarr.create_array(
        store, name="z", shape=(n,), chunks=(1,), dtype="u1", zarr_format=2, attributes={"a": 1}
    )
    z[7] = 7
    to_native(base)
    assert base.keys() - {"zarr.json"} == {"z/zarr.json", "z/7"}
    assert zarr.open_array(wrap(base), path="z", mode="r").attrs["a"] == 1


@pytest.mark.parametrize("make", [make_v2, make_v3])
def test_dry_run(make: Callable[[Any], Any]) -> None:
    """Reports the same and does nothing, also where nothing may be written."""
    base = make({})
    before = dict(base)
    report = to_native(base, dry_run=True)
    assert base == before
    assert str(report).startswith("would translate")
    assert report.as_dict()["dry_run"] is True
    done = to_native(base)
    assert done.entries == report.entries
    assert done.n_documents_written == report.n_documents_written > 0
    assert str(done).startswith("translated")


def test_read_only(tmp_path: Path) -> None:
    """Refused before anything is read."""
    make_v2(LocalStore(tmp_path))
    below = LocalStore(tmp_path, read_only=True)
    for store in (below, ShardingMapping(below), ShardingStore(tmp_path, read_only=True)):
        for function in (to_native, from_native):
            with pytest.raises(ReadOnlyError):
                function(store)
    assert to_native(LocalStore(tmp_path, read_only=True), dry_run=True).n_documents_written == 6


class TestPaths:
    """A part of a hierarchy."""

    def test_a_group_stands_for_all_below(self) -> None:
        base = make_v2({})
        report = to_native(base, paths=["img/deep"])
        assert [entry.path for entry in report.entries] == ["img/deep", "img/deep/b"]
        docs = documents_of(base)
        assert {k for k in docs if k.startswith("img/deep/") and name_of(k) in V2} == set()
        assert "img/a/.zarray" in docs
        copies = docs[".zmetadata"]["metadata"]
        assert "img/a/.zarray" in copies
        assert not [k for k in copies if k.startswith("img/deep/")]
        store = wrap(base)
        values: Any = zarr.open_group(store, path="img/deep", mode="r")["b"]
        np.testing.assert_array_equal(values[...], DATA["img/deep/b"])

    def test_patterns(self) -> None:
        base = make_v3({})
        report = to_native(base, paths=["*/a", "pl*"])
        assert [entry.path for entry in report.entries] == ["img/a", "plain"]
        docs = documents_of(base)
        assert docs["img/deep/b/zarr.json"]["storage_transformers"] != []
        copies = docs["zarr.json"]["consolidated_metadata"]["metadata"]
        assert copies["img/a"] == docs["img/a/zarr.json"]
        assert copies["img/deep/b"] == docs["img/deep/b/zarr.json"]

    def test_a_path_that_names_nothing(self) -> None:
        with pytest.raises(SpecError, match="'imgs'"):
            to_native(make_v2({}), paths=["imgs"])


# ------------------------------------------------------------------------ xarray


@pytest.mark.parametrize(("dtype", "value"), [("S3", b"ab"), ("U3", "ab"), (">U3", "ab")])
def test_xarray_opens_texts_with_a_fill_value(dtype: str, value: Any) -> None:
    """In v2, in v3 and in v2 again, with the fill value as it was."""
    base: dict[str, bytes] = {}
    group = zarr.open_group(ShardingStore(base, None), mode="w", zarr_format=2)
    attributes = {"_ARRAY_DIMENSIONS": ["x"]}
    options: Any = {"shape": (4,), "chunks": (2,), "attributes": attributes}
    group.create_array("name", dtype=dtype, **options)[:] = value
    before = json.loads(base["name/.zarray"])
    for change in (to_native, partial(from_native, zarr_format=2)):
        change(base)
        found = xr.open_zarr(wrap(base), consolidated=False).load()
        assert found.name.values.tolist() == [value] * 4
    assert json.loads(base["name/.zarray"])["fill_value"] == before["fill_value"] == ""


@pytest.mark.filterwarnings("ignore:The data type")
@pytest.mark.parametrize(
    ("dtype", "fill"), [("i4", 5), ("f4", -0.0), ("U3", ""), ("i4", 0), ("f4", np.nan)]
)
def test_arrays_whose_fill_value_xarray_masks_only_in_v2_are_named(dtype: str, fill: Any) -> None:
    """By their reason, so that each change of what xarray shows is said."""
    store = MemoryStore()
    group = zarr.open_group(store, mode="w", zarr_format=3)
    group.create_array(
        "a", shape=(2,), chunks=(2,), dtype=dtype, fill_value=fill, dimension_names=["x"],
        chunk_key_encoding={"name": "v2", "separator": "."},
    )  # fmt: skip
    before = xr.open_zarr(store, consolidated=False).load()
    (reason,) = [e.reason for e in from_native(store, zarr_format=2).entries if e.path == "a"]
    is_same = xr.open_zarr(store, consolidated=False).load().equals(before)
    assert is_same == ("xarray" not in reason)


def test_xarray_sees_the_same(tmp_path: Path) -> None:
    """Names of dimensions, coordinates, and which values are missing."""
    values = np.where(np.arange(35) % 3, np.arange(35.0), np.nan).reshape(7, 5)
    written = xr.Dataset(
        {"t": (("y", "x"), values), "n": (("x",), np.arange(5)), "depth": ((), 7.5), "i": ((), 3)},
        {"x": np.arange(5) * 10},
    )
    written["t"].encoding = {"_FillValue": -9.0, "chunks": (2, 2)}
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        written.to_zarr(store, zarr_format=2, consolidated=True)
        before = xr.open_zarr(store, consolidated=True).load()
        to_native(tmp_path)
        after = xr.open_zarr(str(tmp_path), consolidated=True).load()
        xr.testing.assert_identical(after, before)
        xr.testing.assert_equal(after, written)
        from_native(tmp_path, zarr_format=2)
        again = xr.open_zarr(ShardingStore(tmp_path), consolidated=True).load()
    xr.testing.assert_identical(again, before)
