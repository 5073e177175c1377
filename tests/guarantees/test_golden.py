"""Files of each earlier version, finished or not, are read, healed and written by this one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from tests.golden.write import (
    CASES,
    CHANGED,
    FOLDER,
    MAX_NBYTES,
    PATH,
    Case,
    convert,
    folder_of,
    object_store,
    open_array,
    set_times,
    values,
    write_version,
)
from tests.support.counting_server import counting_server
from tests.support.file_layer import state_of
from tests.support.kit import forget
from tests.support.side_files import is_side_file
from zarr_shardstore import ShardingMapping, ShardingStore, UnfinishedConversionError

VERSIONS = sorted(path.name for path in FOLDER.iterdir() if path.name.startswith("v"))
FOLDERS = {
    f"{version}: {name}": (FOLDER / version / folder_of(name), case)
    for version in VERSIONS
    for name, case in CASES.items()
    if (FOLDER / version / folder_of(name)).is_dir()
}
NATIVE = [name for name, (_, case) in FOLDERS.items() if case.is_native]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
    pytest.mark.filterwarnings("ignore:.*[Ss]pecification"),
]


def copy_of(name: str, tmp_path: Path) -> tuple[Path, Case]:
    folder, case = FOLDERS[name]
    shutil.copytree(folder, tmp_path / "store")
    return tmp_path / "store", case


def check(found: Any, case: Case) -> int:
    """The values are those after one of the allowed changes; return their number."""
    for n_changes in case.allowed:
        if np.array_equal(found, values(n_changes, case.height)):
            return n_changes
    raise AssertionError(found)


def read_by_zarr(root: Path) -> Any:
    return zarr.open_array(LocalStore(root, read_only=True), path=PATH, mode="r")[:]


def read_by_tensorstore(root: Path) -> Any:
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root / PATH)}}
    return ts.open(spec).result().read().result()


OTHERS: dict[str, Callable[[Path], Any]] = {
    "zarr": read_by_zarr,
    "tensorstore": read_by_tensorstore,
}


def test_each_version_has_all_its_cases() -> None:
    """Each folder is that of a case, and a version's folder is never written again."""
    for version in VERSIONS:
        folders = {path.name for path in (FOLDER / version).iterdir()}
        assert folders <= {folder_of(name) for name in CASES}
        with pytest.raises(FileExistsError):
            write_version(FOLDER / version)
        nbytes = sum(f.stat().st_size for f in (FOLDER / version).rglob("*") if f.is_file())
        assert nbytes < MAX_NBYTES
    assert len(FOLDERS) >= 56
    assert len([name for name in FOLDERS if name.startswith("v0.1: ")]) == 56


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("name", FOLDERS)
def test_it_is_read(name: str) -> None:
    """Whole, chunk by chunk and as a group member; and nothing is written."""
    root, case = FOLDERS[name]
    before = state_of(root)
    base = LocalStore(root, read_only=True)
    forget(root)
    if case.is_refused:
        with pytest.raises(UnfinishedConversionError):
            open_array(base, case.hierarchy)
    else:
        z = open_array(base, case.hierarchy)
        expected = values(check(z[:], case), case.height)
        for at in np.ndindex(expected.shape):
            if at[0] % case.height == 0:
                assert z[at] == expected[at], at
    assert state_of(root) == before


@pytest.mark.parametrize("reader", OTHERS)
@pytest.mark.parametrize("name", NATIVE)
def test_others_read_it(name: str, reader: str) -> None:
    """As it is, with its gaps and dead bytes."""
    root, case = FOLDERS[name]
    check(OTHERS[reader](root), case)


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("heal", ["write", "compact"])
@pytest.mark.parametrize("name", FOLDERS)
def test_it_is_healed_and_written(name: str, heal: str, tmp_path: Path) -> None:
    """The same command finishes a conversion; the next write or a compaction leaves no journal."""
    root, case = copy_of(name, tmp_path)
    if case.conversion:
        convert(root, case.conversion)
        assert not (root / ".zarr_shardstore").exists()
    left = {key for key in state_of(root) if key.endswith(".partial")}
    z = open_array(root, case.hierarchy)
    expected = values(check(z[:], case), case.height).copy()
    if heal == "compact":
        z.store.close()
        ShardingMapping(root).compact()
    else:
        for rows, columns in CHANGED:
            at = slice(rows.start * case.height, rows.stop * case.height), columns
            z[at] = expected[at] = expected[at] + 7
        z[-1, -1] = expected[-1, -1] = -3  # a part of a chunk at the edge, in another shard
        z.store.close()
    forget(root)
    assert {key for key in state_of(root) if is_side_file(key)} == left
    np.testing.assert_array_equal(open_array(root, case.hierarchy)[:], expected)
    if case.is_native or "codec" in name:
        for read in OTHERS.values():
            np.testing.assert_array_equal(read(root), expected)


@pytest.mark.parametrize("name", [name for name in FOLDERS if "consolidated index" in name])
def test_a_consolidated_index_counts(name: str, tmp_path: Path) -> None:
    """A cold chunk is one request to its shard, and no index of a shard is read."""
    root, _ = copy_of(name, tmp_path)
    set_times(root)
    forget()
    with counting_server(root) as server:
        base: Any = object_store(server) if "etags" in name else http_store(server)
        z: Any = zarr.open_array(ShardingStore(base), path=PATH, mode="r")
        for at in np.ndindex(values().shape):
            server.forget()
            assert z[at] == values(2)[at], at
            assert len([asked for asked in server.asked if "/c/" in asked.key]) <= 1, server.asked
            if at == (0, 0):
                assert f"{PATH}/__shards.index" in [asked.key for asked in server.asked]


def http_store(server: Any) -> Any:
    from obstore.store import HTTPStore
    from zarr.storage import ObjectStore

    return ObjectStore(HTTPStore(server.url, client_options={"allow_http": True}), read_only=True)
