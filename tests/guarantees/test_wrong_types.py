"""A metadata document may hold a value of any type in any place: errors are typed, and its own.

Each value in the documents of one array is replaced by values of every other type, one at a time.
What is asked of the array then works, or raises an error of this package. The other array is read
and written as before, and a listing gives all other keys before it raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype

from tests.support.draft import draft_array
from tests.support.rounds import rounds
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardingMapping,
    ShardingStore,
    ShardStoreError,
    from_native,
    get_shard_info,
    is_sharded,
    shard_store,
    to_native,
)

VALUES: list[Any] = [None, True, 5, -1, 1.5, "x", "sharding", [], [5], ["x"], {}, {"a": 5}]
GONE = object()

Base = dict[str, bytes]
Steps = tuple[str | int, ...]


def flat(zarr_format: int = 3, **options: Any) -> Base:
    """Arrays ``a`` and ``b`` of Zarr v3 or v2 in a consolidated group."""
    base: Base = {}
    store = ShardingStore(base, chunks_per_shard=2, **options)
    group = zarr.create_group(store, zarr_format=zarr_format)  # type: ignore[arg-type]
    for name in "ab":
        group.create_array(name, shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    if zarr_format == 2:
        zarr.consolidate_metadata(store, zarr_format=2)
    key = "a/zarr.json" if zarr_format == 3 else "a/.zarray"
    doc = json.loads(base[key])
    base[key] = json.dumps(doc | {"zarr_shardstore_index": {"must_understand": False}}).encode()
    return base


def left_to_zarr() -> Base:
    base = flat()
    raw = ShardingStore(base)
    z = zarr.create_array(
        raw, name="a", shape=(4,), chunks=(1,), shards=(2,), dtype="u1", overwrite=True
    )
    z[:] = 1
    return base


def draft() -> Base:
    base: Base = {}
    sharding = [{"name": "sharding", "configuration": {"chunks_per_shard": [2]}}]
    for name in "ab":
        doc = {**json.loads(draft_array([4], [1])), "storage_transformers": sharding}
        base[f"meta/root/{name}.array.json"] = json.dumps(doc).encode()
        m = ShardingMapping(base)
        m.update({f"data/root/{name}/c{i}": b"\1" for i in range(4)})
    return base


HIERARCHIES: dict[str, tuple[Callable[[], Base], str]] = {
    "codec": (flat, "a/c/0"),
    "index at the start": (partial(flat, index_location="start"), "a/c/0"),
    "transformers": (partial(flat, declaration="storage_transformers"), "a/c/0"),
    "stack": (partial(flat, storage_transformers=["crc32c", "sharding"]), "a/c/0"),
    "left to zarr": (left_to_zarr, "a/c/0"),
    "v2": (partial(flat, 2), "a/0"),
    "draft": (draft, "data/root/a/c0"),
}


def places(value: Any, steps: Steps = ()) -> Iterator[Steps]:
    """Where there is a value in a JSON value."""
    yield steps
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for step, member in items:
        yield from places(member, (*steps, step))


def replaced(doc: Any, steps: Steps, new: Any) -> Any:
    """A document with another value in one place; without it, if that is ``GONE``."""
    if not steps:
        return {} if new is GONE else new
    doc = copy.deepcopy(doc)
    place = doc
    for step in steps[:-1]:
        place = place[step]
    if new is GONE:
        del place[steps[-1]]
    else:
        place[steps[-1]] = new
    return doc


def attempt(ask: Callable[[], Any]) -> None:
    with contextlib.suppress(ShardStoreError):
        ask()


def is_document(key: str) -> bool:
    """Whether a key is that of the document of a v3 node, or of an array."""
    return key.endswith((".array.json", "zarr.json", ".zarray"))


def listed(store: ShardingStore) -> set[str]:
    """The keys of a listing until it ends, or raises an error of this package."""
    keys: set[str] = set()

    async def run() -> None:
        async for key in store.list():
            keys.add(key)

    attempt(lambda: asyncio.run(run()))
    return keys


def check(good: Base, base: Base, chunk: str) -> None:
    """Ask for whatever there is, of a hierarchy whose array ``a`` has a bad document."""
    other = chunk.replace("a/c", "b/c") if "a/c" in chunk else chunk.replace("a/", "b/")
    is_of_a = re.compile(r"(data/root/|^)a/")
    kept = {key for key in ShardingMapping(good) if not is_of_a.search(key)}
    assert kept | {key for key in base if is_document(key)} <= listed(ShardingStore(base))
    m = ShardingMapping(base)
    asks: list[Callable[[], Any]] = [
        *(partial(m.get, key) for key in (*base, chunk)),
        lambda: chunk in m,
        lambda: m.list_dir(chunk.rpartition("/")[0] + "/"),
        lambda: m.chunks_initialized("a"),
        lambda: m.compact("a"),
        lambda: is_sharded(base),
        lambda: get_shard_info(base),
        lambda: to_native(base, dry_run=True),
        lambda: from_native(base, dry_run=True),
        lambda: from_native(base, zarr_format=2, dry_run=True),
        lambda: shard_store(base, chunks_per_shard=4, dry_run=True),
        lambda: m.set(chunk, b"x"),
        lambda: m.erase(chunk),
        *(partial(m.set, key, ShardingMapping(good)[key]) for key in base if is_document(key)),
    ]
    for ask in asks:
        attempt(ask)
    if chunk.startswith("data/root/"):
        below = DraftHierarchyStore(ShardingStore(base))
        attempt(lambda: asyncio.run(below.get("a/zarr.json", default_buffer_prototype())))
    assert m[other] == ShardingMapping(good)[other]
    m[other] = b"new"
    assert m[other] == b"new"


@cache
def documents(kind: str) -> tuple[Base, list[tuple[str, Steps]]]:
    """A hierarchy, and each place in the documents that are not those of ``b``."""
    good = HIERARCHIES[kind][0]()
    keys = [
        key
        for key in good
        if (is_document(key) or key.endswith((".zmetadata", ".zattrs")))
        and not key.startswith(("b/", "meta/root/b"))
    ]
    return good, [(key, steps) for key in keys for steps in places(json.loads(good[key]))]


@pytest.mark.parametrize("kind", HIERARCHIES)
@settings(max_examples=rounds(1600))
@given(data=st.data())
def test_a_value_of_another_type(kind: str, data: st.DataObject) -> None:
    """Wherever it is; also if it is missing."""
    good, all_places = documents(kind)
    key, steps = data.draw(st.sampled_from(all_places))
    new = data.draw(st.sampled_from([*VALUES, GONE]))
    changed = replaced(json.loads(good[key]), steps, new)
    check(good, {**good, key: json.dumps(changed).encode()}, HIERARCHIES[kind][1])


@pytest.mark.parametrize("filters", [True, "delta", {}, 7])
def test_filters_that_are_no_list(filters: Any) -> None:
    """Of a new array, too, to which a filter is added as its declaration."""
    good, _ = documents("v2")
    doc = json.loads(good["a/.zarray"]) | {"filters": filters}
    check(good, {**good, "a/.zarray": json.dumps(doc).encode()}, HIERARCHIES["v2"][1])
