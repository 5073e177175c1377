"""Conversions of some paths to another store: what of the rest goes there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from tests.support.kit import CountingStore
from tests.tools.test_native import wrap
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardConflictError,
    ShardingStore,
    SpecError,
    shard_store,
)

DATA = np.arange(64, dtype="u2").reshape(8, 8)
PATHS = ("g/a", "g/b", "h/c")

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


def make(zarr_format: Any) -> dict[str, bytes]:
    """Three arrays in two groups with attributes and other keys, consolidated at the root."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, None)
    root = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    for path in PATHS:
        group = root.require_group(path[0])
        group.attrs["title"] = path[0]
        z = group.create_array(path[2], shape=(8, 8), chunks=(2, 2), dtype="u2", fill_value=0)
        z[:] = DATA
    zarr.consolidate_metadata(store, zarr_format=zarr_format)
    return base | {"notes.txt": b"top", "g/notes.txt": b"g", "g/a/notes.txt": b"a"}


def convert(base: Any, to: Any, path: Any, **options: Any) -> Any:
    return shard_store(base, to, chunks_per_shard=2, paths=path, native=True, **options)


def arrays_in(base: Any) -> dict[str, bool]:
    """The arrays that zarr finds from the root, and whether each is sharded."""
    members = zarr.open_group(wrap(base), mode="r").members(max_depth=None)
    return {path: z.shards is not None for path, z in members if isinstance(z, zarr.Array)}


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_only_the_path_goes_there(zarr_format: int) -> None:
    """With the documents of the groups above, which name no other array. A note names the rest."""
    base, to = make(zarr_format), dict[str, bytes]()
    report = convert(base, to, "g/a")
    assert arrays_in(to) == {"g/a": True}
    assert zarr.open_group(wrap(to), path="g", mode="r").attrs["title"] == "g"
    np.testing.assert_array_equal(zarr.open_array(wrap(to), path="g/a", mode="r")[:], DATA)
    assert {key for key in to if key.endswith("txt")} == {"g/a/notes.txt"}
    assert not [key for key in to if key.startswith("h/")]
    assert any("stay out of the destination: 'g/b', 'h/c'" in note for note in report.notes)
    assert [array.action for array in report.arrays] == ["sharded", "skipped", "skipped"]


@pytest.mark.parametrize("path", ["g", "g/a"])
def test_a_part_of_a_draft_hierarchy(path: str) -> None:
    """The groups on the way come along, and the other keys of what was chosen."""
    base, to = dict[str, bytes](), dict[str, bytes]()
    root = zarr.open_group(DraftHierarchyStore(ShardingStore(base, None)), mode="w")
    for name in ("g", "h"):
        root.create_group(name, attributes={"title": name})
        root.create_array(f"{name}/a", shape=(8, 8), chunks=(2, 2), dtype="u2")[:] = DATA
        base[f"data/root/{name}/notes.txt"] = b"notes"
    shard_store(base, to, chunks_per_shard=2, paths=path)
    there = zarr.open_group(DraftHierarchyStore(ShardingStore(to)), mode="r")
    assert there["g"].attrs["title"] == "g"
    names = {"meta/root.group.json", "meta/root/g.group.json", "meta/root/g/a.array.json"}
    assert {key for key in to if key.startswith("meta/")} == names
    assert ("data/root/g/notes.txt" in to) is (path == "g")
    assert not any("root/h" in key for key in to)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_one_path_after_another(zarr_format: int) -> None:
    """Into one destination, also if the user consolidates it in between; a group last."""
    base, to = make(zarr_format), dict[str, bytes]()
    convert(base, to, "g/a")
    zarr.consolidate_metadata(ShardingStore(to, None))
    convert(base, to, "g/b")
    zarr.consolidate_metadata(ShardingStore(to, None))
    convert(base, to, ["h"])
    zarr.consolidate_metadata(ShardingStore(to, None))
    assert arrays_in(to) == dict.fromkeys(PATHS, True)
    assert to["g/a/notes.txt"] == b"a"


def test_on_demand_the_rest_is_copied_in_few_rounds() -> None:
    """All other keys of a depth share rounds of requests, and the rest is as it was."""
    base, to = make(3), dict[str, bytes]()
    report = convert(base, to, "g/a", copy_rest=True)
    assert arrays_in(to) == {"g/a": True, "g/b": False, "h/c": False}
    assert {key for key in to if key.endswith("txt")} == {key for key in base if key[-1] == "t"}
    assert [array.action for array in report.arrays] == ["sharded", "copied", "copied"]
    assert "g/a" in zarr.open_consolidated(wrap(to))
    convert(base, to, "g/a", copy_rest=True)  # once more is no error


def test_a_part_may_become_the_whole() -> None:
    """The same destination later takes the rest, with consolidated metadata."""
    base, to = make(3), dict[str, bytes]()
    convert(base, to, "g/a")
    convert(base, to, "g/a", copy_rest=True)
    assert set(arrays_in(to)) == set(PATHS)
    assert "h/c" in zarr.open_consolidated(wrap(to))


def test_in_place_there_is_no_rest_to_copy() -> None:
    base = make(3)
    before = dict(base)
    with pytest.raises(SpecError, match="go with a destination"):
        convert(base, None, "g/a", copy_rest=True)
    assert base == before


class Busy(CountingStore):
    """A store that notices how many writes are under way together."""

    n_now = n_most = 0

    async def set(self, key: str, value: Any, *args: Any, **options: Any) -> None:
        import asyncio

        self.n_now += 1
        self.n_most = max(self.n_most, self.n_now)
        await asyncio.sleep(0.001)
        await super().set(key, value, *args, **options)
        self.n_now -= 1


def test_many_other_keys_are_copied_together() -> None:
    """A plate has thousands of groups: not one request after another."""
    base: dict[str, bytes] = {}
    z = zarr.create_array(ShardingStore(base, None), name="z", shape=(2,), chunks=(1,), dtype="u1")
    z[:] = 1
    wells = {f"well/{i}/notes.txt": bytes([i]) for i in range(200)}
    large = {"well/0/large.bin": bytes(200_000)}
    base |= wells | large
    to = Busy()
    shard_store(base, to, chunks_per_shard=2)
    assert to.n_most >= 8
    stored = {key: bytes(value.to_bytes()) for key, value in to._store_dict.items()}
    assert {key: stored[key] for key in wells | large} == wells | large
    assert isinstance(to, MemoryStore)


class Losing(MemoryStore):
    """A store whose key ``note`` another program removes after some requests of it."""

    n_left = 10**9

    async def get(self, key: str, *args: Any, **options: Any) -> Any:
        self._count(key)
        return await super().get(key, *args, **options)

    async def getsize(self, key: str) -> int:
        self._count(key)
        if key not in self._store_dict:
            raise FileNotFoundError(key)
        return len(self._store_dict[key])

    async def exists(self, key: str) -> bool:
        self._count(key)
        return await super().exists(key)

    def _count(self, key: str) -> None:
        if key == "note":
            self.n_left -= 1
            if self.n_left < 0:
                self._store_dict.pop(key, None)


@pytest.mark.parametrize("nbytes", [5, 200_000])
def test_a_key_that_another_program_removes_is_no_empty_copy(nbytes: int) -> None:
    note, results = bytes(range(5)) * (nbytes // 5), set()
    for n in range(8):
        base = Losing({"note": cpu.Buffer.from_bytes(note)})
        z = zarr.create_array(
            ShardingStore(base, None), name="z", shape=(2,), chunks=(1,), dtype="u1"
        )
        z[:] = 1
        base.n_left = n
        to: dict[str, bytes] = {}
        with suppress(ShardConflictError):
            shard_store(base, to, chunks_per_shard=2)
        results.add(to.get("note"))
    assert results == {None, note}
