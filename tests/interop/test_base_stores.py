"""Base stores of other packages: each operation works, or is refused in words and changes nothing.

The table is in `tests.support.base_stores`, and on the page ``spec_notes/base_stores.md``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync

from tests.support.base_stores import COLUMNS, MARKS, PAGE, ROWS, Objects, Place, table
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    from_native,
    get_shard_info,
    reshard,
    shard_store,
    to_native,
    unshard_store,
)
from zarr_shardstore.errors import ShardStoreError

pytestmark = [
    # fsspec and aiohttp close files and sockets when they are collected.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:through fsspec nothing keeps"),
    pytest.mark.filterwarnings("ignore:Duplicate name"),
    pytest.mark.filterwarnings("ignore:.*shards nothing"),
]

VALUES = np.zeros((16, 6), dtype="<i4")
VALUES[:6], VALUES[11, 3] = 1, 7

CONVERSIONS: dict[str, tuple[bool, Callable[..., Any]]] = {
    "shard": (False, lambda source, to=None: shard_store(source, to, chunks_per_shard=2)),
    "unshard": (True, unshard_store),
    "reshard": (True, lambda source, to=None: reshard(source, 3, to)),
}
"""Whether the source is sharded, and the conversion."""


def create(base: Any, *, is_sharded: bool, separator: str = "/") -> None:
    store = ShardingStore(base, chunks_per_shard=2 if is_sharded else None)
    root = zarr.open_group(store, mode="a", zarr_format=3)
    root.attrs["unit"] = "m"
    z = root.create_array(
        "g/a",
        shape=VALUES.shape,
        chunks=(2, 3),
        dtype="<i4",
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": separator},
    )
    z[:6] = 1
    z[11, 3] = 7


@functools.cache
def objects(*, is_sharded: bool, separator: str) -> Objects:
    made: dict[str, bytes] = {}
    create(made, is_sharded=is_sharded, separator=separator)
    return made


def values_in(base: Any) -> Any:
    z: Any = zarr.open_array(ShardingStore(base), path="g/a", mode="r")
    return z[:]


def listed(base: Any) -> list[set[str]]:
    """All keys, those of a prefix, and the names in directories."""
    store = ShardingStore(base)

    async def names(of: Any) -> set[str]:
        return {name async for name in of}

    found = [sync(names(store.list())), sync(names(store.list_prefix("g/a/c/")))]
    directories = ("", "g", "g/a", "g/a/c", "g/a/c/1", "nothing")
    return found + [sync(names(store.list_dir(directory))) for directory in directories]


class Trial:
    """One operation on stores of one row."""

    def __init__(self, name: str, place: Place) -> None:
        self.row = ROWS[name]
        self.place = place

    def objects(self, is_sharded: bool) -> Objects:
        return objects(is_sharded=is_sharded, separator=self.row.separator)

    def made(self, is_sharded: bool = True) -> Any:
        return self.row.make(self.place, self.objects(is_sharded))

    def read(self) -> None:
        for is_sharded in (False, True):
            base = self.made(is_sharded)
            np.testing.assert_array_equal(values_in(base), VALUES)
            group = zarr.open_group(ShardingStore(base), mode="r")
            assert group.attrs["unit"] == "m"
            part: Any = group["g/a"]
            np.testing.assert_array_equal(part[11:13, 2:5], VALUES[11:13, 2:5])
            mapping, sep = ShardingMapping(base), self.row.separator
            assert f"g/a/c{sep}0{sep}1" in mapping
            assert f"g/a/c{sep}7{sep}1" not in mapping

    def list(self) -> None:
        base = self.made()
        assert listed(base) == listed(dict(self.objects(True)))
        assert get_shard_info(base).n_chunks == 7
        members = dict(zarr.open_group(ShardingStore(base), mode="r").members(None))
        assert set(members) == {"g", "g/a"}

    def source(self) -> None:
        for is_sharded, convert in CONVERSIONS.values():
            found: dict[str, bytes] = {}
            expected: dict[str, bytes] = {}
            convert(self.made(is_sharded), found)
            convert(dict(self.objects(is_sharded)), expected)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                is_document = key.endswith(".json")
                # VirtualiZarr writes the documents of groups again, in its own words.
                assert is_document or found[key] == value
            assert json.loads(found["g/a/zarr.json"]) == json.loads(expected["g/a/zarr.json"])

    def write(self) -> None:
        if "write" in self.row.refused:
            base = self.made()
            mapping, sep = ShardingMapping(base), self.row.separator
            mapping[f"g/a/c{sep}0{sep}0"] = b"x"
        base = self.row.make(self.place, {})
        create(base, is_sharded=True, separator=self.row.separator)
        expected = VALUES.copy()
        store = ShardingStore(base)
        z: Any = zarr.open_array(store, path="g/a", mode="r+")
        z[4:9, 1:] = expected[4:9, 1:] = 5
        z[:2] = expected[:2] = 0
        with store.batch():
            z[14:] = expected[14:] = 3
        np.testing.assert_array_equal(values_in(base), expected)
        z[:] = 0
        np.testing.assert_array_equal(values_in(base), 0)

    def destination(self) -> None:
        for is_sharded, convert in CONVERSIONS.values():
            base = self.row.make(self.place, {})
            convert(dict(self.objects(is_sharded)), base)
            np.testing.assert_array_equal(values_in(base), VALUES)

    def in_place(self) -> None:
        for is_sharded, convert in CONVERSIONS.values():
            convert(self.kept(is_sharded))
            np.testing.assert_array_equal(values_in(self.base), VALUES)

    def to_native(self) -> None:
        from_native(self.kept(True))
        np.testing.assert_array_equal(values_in(self.base), VALUES)
        to_native(self.base)
        np.testing.assert_array_equal(values_in(self.base), VALUES)

    def kept(self, is_sharded: bool) -> Any:
        """Make a store that is compared with its values after a refusal."""
        self.base = self.made(is_sharded)
        return self.base


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with made.closing:
        yield made


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", ROWS)
def test_it_works_or_is_refused_in_words(name: str, column: str, place: Place) -> None:
    for package in ROWS[name].packages:
        pytest.importorskip(package)
    trial = Trial(name, place)
    run: Callable[[], None] = getattr(trial, column.replace(" ", "_"))
    refused = ROWS[name].refused.get(column)
    if refused is None:
        run()
        return
    with pytest.raises(refused.error, match=refused.why) as caught:
        run()
    assert isinstance(caught.value, ShardStoreError)
    if hasattr(trial, "base"):
        np.testing.assert_array_equal(values_in(trial.base), VALUES)


def test_the_page_has_this_table() -> None:
    """`python -m tests.support.base_stores` writes it; each package has its versions there."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(MARKS[0])[1].split(MARKS[1])[0] == table()
    for package in {name for row in ROWS.values() for name in row.packages}:
        assert package in {"dbm", "shelve", "builtins"} or f"{package} " in page.lower(), package
