"""`shard_store(native=True)`: shards that every Zarr v3 reader reads, in one call from Zarr v2."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore, ZipStore

from tests.support.kit import system_calls
from tests.tools.test_native import wrap
from tests.tools.test_native_interrupted import StoppedError, Stopping
from zarr_shardstore import (
    ConversionReport,
    ShardConflictError,
    ShardingStore,
    SpecError,
    UnfinishedConversionError,
    UnsupportedError,
    from_native,
    get_shard_info,
    shard_store,
    to_native,
    unshard_store,
)

DATA = np.arange(1, 65, dtype="<u2").reshape(8, 8)
LEVELS = {"0": DATA, "s/1": DATA[::2, ::2]}

pytestmark = pytest.mark.filterwarnings("ignore:Both zarr.json")


def make(base: Any, **options: Any) -> Any:
    """An OME-Zarr 0.4 of two levels, one of them in a group, with consolidated metadata."""
    store = ShardingStore(base, None)
    root = zarr.open_group(store, mode="w", zarr_format=2)
    axes = [{"name": "y", "type": "space"}, {"name": "x", "type": "space"}]
    datasets = [{"path": path} for path in LEVELS]
    root.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    for path, data in LEVELS.items():
        separator = {"name": "v2", "separator": "/"}
        options = {"chunks": (2, 2), "dtype": "u2", "chunk_key_encoding": separator}
        root.create_array(path, shape=data.shape, **options)[:] = data
    zarr.consolidate_metadata(store, zarr_format=2)
    return base


def shard(base: Any, destination: Any = None, **options: Any) -> ConversionReport:
    return shard_store(base, destination, chunks_per_shard=2, native=True, **options)


def assert_native(base: Any, *, ome: bool = False) -> None:
    """Plain zarr reads shards of v3, consolidated or not, and nothing of v2 or of ours is left."""
    for is_consolidated in (False, True):
        root = zarr.open_group(wrap(base), mode="r", use_consolidated=is_consolidated)
        for path, data in LEVELS.items():
            z: Any = root[path]
            assert z.shards == (4, 4)
            np.testing.assert_array_equal(z[:], data)
            assert z.metadata.dimension_names == (("y", "x") if ome else None)
        assert ("ome" in root.attrs) == ome
    assert not [key for key in base if "/.z" in f"/{key}"], "of v2, or of a conversion"


@pytest.mark.parametrize("ome", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_dry_run_says_what_the_same_call_does(ome: bool, elsewhere: bool) -> None:
    """The readers, and a hint where OME metadata stays as it was; twice is no error."""
    base = make({})
    destination: Any = {} if elsewhere else None
    before = dict(base)
    planned = shard(base, destination, ome=ome, dry_run=True)
    assert base == before
    done = shard(base, destination, ome=ome)
    for report in (planned, done):
        assert report.read_by == "every v3 reader"
        assert [array.chunks_per_shard for array in report.arrays] == [(2, 2)] * 2
        assert any("--ome" in note for note in report.notes) != ome
    assert_native(destination if elsewhere else base, ome=ome)
    assert not elsewhere or base == before
    assert shard(base, destination, ome=ome).n_skipped == 2
    assert get_shard_info(base if destination is None else destination).read_by == "every v3 reader"


def test_stopped_anywhere_in_place_it_is_finished_by_the_same_call() -> None:
    """At every change of the store. Until its objects are exchanged each array is read."""
    start = make({})
    whole = Stopping(start)
    shard(whole)
    expected = dict(whole)
    for n in range(whole.n_done):
        base = Stopping(start)
        base.n_left = n
        with pytest.raises(StoppedError):
            shard(base)
        base.n_left = 10**6
        n_hidden = 0
        for path, data in LEVELS.items():
            try:
                z: Any = zarr.open_array(ShardingStore(dict(base)), path=path, mode="r")
            except UnfinishedConversionError:
                n_hidden += 1
            else:
                np.testing.assert_array_equal(z[...], data)
        assert n_hidden <= 1
        shard(base)
        assert {k: _parsed(v) for k, v in base.items()} == {
            k: _parsed(v) for k, v in expected.items()
        }


def test_stopped_anywhere_on_the_way_elsewhere() -> None:
    """The destination has never a document of v2; the source stays; the same call finishes it."""
    source = make({})
    before = dict(source)
    whole = Stopping({})
    shard(source, whole, ome=True)
    for n in range(whole.n_done):
        base = Stopping({})
        base.n_left = n
        with pytest.raises(StoppedError):
            shard(source, base, ome=True)
        assert not [key for key in base if ".z" in key.replace(".zarr_shardstore", "")]
        base.n_left = 10**6
        shard(source, base, ome=True)
        assert dict(base) == dict(whole)
    assert source == before
    assert_native(dict(whole), ome=True)


def _parsed(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def test_all_steps_have_one_lock(tmp_path: Path) -> None:
    """Another conversion is refused from the first change of a document to the last."""
    make(LocalStore(tmp_path))
    outcomes: list[str] = []

    def convert() -> None:
        try:
            unshard_store(tmp_path)
        except ShardConflictError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("converted")

    def wrap_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *args: Any) -> Any:
            if name == "replace" and not busy.locked() and "zarr_shardstore" not in str(args):
                with busy:
                    other = threading.Thread(target=convert)
                    other.start()
                    other.join()
            return call(path, *args)

        return called

    busy = threading.Lock()
    with system_calls(wrap_call):
        shard(tmp_path)
    assert len(outcomes) > 4
    assert [o for o in outcomes if "goes on already" not in o] == []
    assert [p.name for p in tmp_path.iterdir() if "shardstore" in p.name] == []
    assert zarr.open_array(tmp_path, path="0", mode="r").shards == (4, 4)


def test_after_a_killed_run_without_native() -> None:
    """What it has staged for v2 arrays is not left behind."""
    start = make({})
    base = Stopping(start)
    shard_store(base, chunks_per_shard=2)
    for n in range(base.n_done):
        base = Stopping(start)
        base.n_left = n
        with pytest.raises(StoppedError):
            shard_store(base, chunks_per_shard=2)
        base.n_left = 10**6
        shard(base)
        assert_native(dict(base))


def test_what_v3_cannot_express_changes_nothing() -> None:
    """Nor does what the conversion refuses."""
    base = make({})
    doc = json.loads(base["s/1/.zarray"])
    base["s/1/.zarray"] = json.dumps({**doc, "unknown": 1}).encode()
    before = dict(base)
    with pytest.raises((SpecError, UnsupportedError), match="'s/1'"):
        shard(base)
    base["s/1/.zarray"] = json.dumps(doc).encode()
    with pytest.raises(SpecError, match="chunks_per_shard"):
        shard_store(base, chunks_per_shard={"nothing": 2}, native=True)
    with pytest.raises(SpecError, match="declaration"):
        shard(base, declaration="storage_transformers")
    with pytest.raises(SpecError, match="goes with dry_run=True"):
        shard(base, estimate=True)
    with pytest.raises(SpecError, match="native=True"):
        shard_store(base, ome=True)
    base["s/1/.zarray"] = before["s/1/.zarray"]
    assert base == before


def test_metadata_that_changes_on_the_way_stops_it() -> None:
    """The destination gets no array of the old metadata."""
    source, destination = make({}), dict[str, bytes]()

    def change(_: Any) -> None:
        doc = json.loads(source["s/1/.zattrs"])
        source["s/1/.zattrs"] = json.dumps({**doc, "changed": 1}).encode()

    make_attributes = json.dumps({"old": 1}).encode()
    source["s/1/.zattrs"] = make_attributes
    with pytest.raises(ShardConflictError, match="run the same again"):
        shard(source, destination, progress=change)
    assert "s/1/zarr.json" not in destination


def test_some_arrays_into_a_zip(tmp_path: Path) -> None:
    """Paths may be any iterable; on demand, what they do not name is copied as it is."""
    source = make({})
    to_native(source)
    with ZipStore(tmp_path / "a.zip", mode="w") as destination:
        report = shard(source, destination, paths=(path for path in ["s"]), copy_rest=True)
    assert report.read_by == "every v3 reader"
    base = ZipStore(tmp_path / "a.zip", mode="r")
    root: Any = zarr.open_group(base, mode="r")
    for (path, data), shards in zip(LEVELS.items(), (None, (4, 4)), strict=True):
        assert root[path].shards == shards
        np.testing.assert_array_equal(root[path][:], data)
    base.close()
    with pytest.raises(UnsupportedError, match="convert it into another store"):
        shard(ZipStore(tmp_path / "a.zip", mode="r"))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("paths", ["0", "s", ["s/1"]])
def test_no_array_of_v3_is_left_in_a_group_of_v2(paths: Any, elsewhere: bool) -> None:
    """No reader would find it there. Elsewhere without the rest, its groups become v3 with it."""
    base, destination = make({}), dict[str, bytes]()
    before = dict(base)
    for dry_run in (True, False):
        options = {"destination": destination, "copy_rest": True} if elsewhere else {}
        with pytest.raises(SpecError, match=r"'(0|s/1)' would be Zarr v3 in a group that stays"):
            shard(base, paths=paths, dry_run=dry_run, **options)
    assert (base, destination) == (before, {})
    shard(base, destination, paths=paths)
    root = zarr.open_group(wrap(destination), mode="r")
    assert {path for path, _ in root.members(max_depth=None)} < {"0", "s", "s/1"}
    assert root.metadata.zarr_format == 3


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("paths", [["0", "s"], ["0", "s/1"], "*"])
def test_paths_of_all_arrays_take_their_groups_along(paths: Any, elsewhere: bool) -> None:
    base, destination = make({}), dict[str, bytes]()
    options = {"destination": destination, "copy_rest": True} if elsewhere else {}
    shard(base, paths=paths, ome=True, **options)
    assert_native(destination if elsewhere else base, ome=True)


def test_processes_convert_it_elsewhere(tmp_path: Path) -> None:
    """Workers find the source, whose documents of v3 are nowhere stored."""
    make(str(tmp_path / "a.zarr"))
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        shard(str(tmp_path / "a.zarr"), str(tmp_path / "b.zarr"), executor=executor)
    root = tmp_path / "b.zarr"
    files = [path for path in root.rglob("*") if path.is_file()]
    assert_native({path.relative_to(root).as_posix(): path.read_bytes() for path in files})


@pytest.mark.parametrize("of_xarray", [False, True])
def test_the_way_back_from_a_conversion_in_place(of_xarray: bool) -> None:
    """The report names it. `unshard` and `from_native` give OME-Zarr 0.4 with the same chunks, fill
    values and attributes, also the names of dimensions that xarray has written."""
    start = make({})
    if of_xarray:
        for path in LEVELS:
            start[f"{path}/.zattrs"] = b'{"_ARRAY_DIMENSIONS": ["y", "x"], "note": 1}'
            doc = json.loads(start[f"{path}/.zarray"])
            start[f"{path}/.zarray"] = json.dumps({**doc, "fill_value": None}).encode()
        zarr.consolidate_metadata(wrap(start), zarr_format=2)
    base = dict(start)
    report = shard(base, ome=True)
    (note,) = [note for note in report.notes if "the way back" in note]
    assert note.endswith("from_native (from-native) with zarr_format=2 and ome=True")
    unshard_store(base)
    from_native(base, zarr_format=2, ome=True)
    assert base.keys() ^ start.keys() <= {"0/.zattrs", "s/.zattrs", "s/1/.zattrs"}
    for path in LEVELS:
        key, attributes = f"{path}/.zarray", f"{path}/.zattrs"
        assert json.loads(base[key]) == json.loads(start[key])
        assert json.loads(base.get(attributes, "{}")) == json.loads(start.get(attributes, "{}"))
    assert {k: v for k, v in base.items() if ".z" not in k} == {
        k: v for k, v in start.items() if ".z" not in k
    }
    for is_consolidated in (False, True):
        root = zarr.open_group(
            wrap(base), mode="r", zarr_format=2, use_consolidated=is_consolidated
        )
        assert list(root.attrs) == ["multiscales"]
        (image,) = json.loads(start[".zattrs"])["multiscales"]
        assert root.attrs["multiscales"] == [image]
        for path, data in LEVELS.items():
            np.testing.assert_array_equal(root[path][:], data)  # type: ignore[index]


def test_ome_metadata_goes_back_only_to_v2() -> None:
    """Without `ome` a note says what stays; with Zarr v3 it is refused."""
    base = make({})
    shard(base, ome=True)
    with pytest.raises(SpecError, match="goes with zarr_format=2"):
        from_native(base, ome=True)
    (note,) = from_native(base, zarr_format=2, dry_run=True).notes
    assert "OME-Zarr 0.5 metadata stays in '/'" in note
    assert not from_native(base, zarr_format=2, ome=True, dry_run=True).notes
