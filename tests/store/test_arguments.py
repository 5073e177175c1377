"""Whatever is passed to a public name: it works, or the error says which argument is wrong.

An error is one of this package, or a ``TypeError`` in words; never what Python says somewhere deep
inside.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync

import zarr_shardstore
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError, set_index_cache_nbytes
from zarr_shardstore.errors import ShardStoreError

WRONG: list[Any] = [
    *(12345, -1, 1.5, True, None, "nonsense", b"raw", object(), slice(0, 1), range(0)),
    *([], [3], ["x"], [None], (1, 2, 3), {}, {"k": 1}, np.array([1.5])),
    *([("k",)], [("k", None)], [("k", 1, 2, 3)], [(1, (0, 1))], [("k", ("a", "b"))]),
    *([("k", 0, 5)], [("k", "0", b"x")], [("k", 1.5, b"x")], lambda *_: 0),
]

RIGHT: dict[str, Any] = {
    "key": "a/c/0",
    "value": b"x",
    "key_start_values": [("a/c/0", 0, b"x")],
    "key_ranges": [("a/c/0", (0, 1))],
    "keys": ["a/c/0"],
    "prefix": "a",
    "path": "a",
    "name": "example.org/right",
    "factory": dict,
    "max_nbytes": 64 << 20,
    "chunks_per_shard": 2,
}

OF_A_STORE = [
    *("batch", "chunks_initialized", "compact", "compact_sync", "consolidate_index"),
    *("consolidate_index_sync", "delete", "delete_dir", "delete_sync", "exists", "get", "get_sync"),
    *("getsize", "getsize_prefix", "list_dir", "list_prefix", "set", "set_if_not_exists"),
    *("set_sync", "shard_shape", "with_read_only", "get_partial_values"),
]


def base() -> dict[str, bytes]:
    stored: dict[str, bytes] = {}
    z = zarr.create_array(
        ShardingStore(stored, 2), name="a", shape=(8,), chunks=(1,), dtype="u1", compressors=None
    )
    z[:4] = 1
    return stored


def public_callables() -> dict[str, Callable[[], Callable[..., Any]]]:
    """Functions that give what is called, by name."""
    names = [*("DraftHierarchyStore", "ShardingMapping", "ShardingStore", "from_native")]
    names += ["get_shard_info", "is_sharded", "register_storage_transformer", "reshard"]
    names += ["set_index_cache_nbytes", "shard_store", "to_native", "unshard_store"]
    found: dict[str, Callable[[], Callable[..., Any]]] = {
        name: lambda name=name: getattr(zarr_shardstore, name)  # type: ignore[misc]
        for name in names
    }
    of_a_mapping = {name for name in dir(ShardingMapping) if not name.startswith("_")}
    of_a_mapping -= {"pop", "popitem", "get", "keys", "values", "items", "base"}
    methods = {ShardingStore: OF_A_STORE, ShardingMapping: sorted(of_a_mapping)}
    for cls, its_methods in methods.items():
        for name in [*its_methods]:
            found[f"{cls.__name__}.{name}"] = lambda cls=cls, name=name: getattr(  # type: ignore[misc]
                cls(base(), 2), name
            )
    return found


async def drain(listing: Any) -> None:
    async for _ in listing:
        pass


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    first = [
        arguments.pop(p.name)
        for p in signature.parameters.values()
        if p.kind is p.POSITIONAL_ONLY and p.name in arguments
    ]
    result = function(*first, **arguments)
    if inspect.isawaitable(result):
        sync(result)  # type: ignore[arg-type]
    elif hasattr(result, "__aiter__"):
        sync(drain(result))


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A name that is no path yet becomes one here."""
    monkeypatch.chdir(tmp_path)
    yield
    set_index_cache_nbytes(64 << 20)


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("name", public_callables())
def test_each_argument_of_each_public_name(name: str) -> None:
    """One of them wrong, the others right."""
    make = public_callables()[name]
    parameters = [
        p
        for p in inspect.signature(make()).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    unclear: list[tuple[str, Any, str]] = []
    for parameter in parameters:
        for wrong in WRONG:
            arguments = {p.name: RIGHT.get(p.name) for p in parameters if p.default is p.empty}
            arguments |= {p: base() for p in arguments.keys() & {"store", "source"}}
            arguments[parameter.name] = wrong
            try:
                call(make(), arguments)
            except (ShardStoreError, KeyError, FileNotFoundError):
                pass
            except TypeError as error:
                said = rf"\b{parameter.name}\b|a base store is|`value` must"
                if not re.search(said, str(error)):
                    unclear.append((parameter.name, wrong, str(error)))
    assert not unclear


@pytest.mark.parametrize(
    "given", [np.array([2, 2]), [2, 2], (np.int64(2), np.uint8(2)), range(2, 4)]
)
def test_chunks_per_shard_in_any_form(given: Any) -> None:
    """Integers and arrays of numpy too, by position or by name."""
    expected = tuple(int(n) for n in given)
    for option in (given, {"z": given}):
        stored: dict[str, bytes] = {}
        store = ShardingStore(stored, option)
        z = zarr.create_array(store, name="z", shape=(6, 6), chunks=(1, 1), dtype="u1")
        z[:] = 1
        assert len([k for k in stored if "/c/" in k]) == np.prod([-(-6 // n) for n in expected])


@pytest.mark.parametrize("given", [2.0, np.array([1.5, 2]), "2", (2, None), True])
@pytest.mark.parametrize("is_of_a_path", [False, True])
def test_chunks_per_shard_that_is_none(given: Any, is_of_a_path: bool) -> None:
    """The error says what it may be; so for a path, and for a dimension of a path."""
    with pytest.raises(SpecError, match="chunks_per_shard"):
        ShardingStore({}, {"z": given} if is_of_a_path else given)
    with pytest.raises(SpecError, match="chunks_per_shard"):
        ShardingStore({}, {"*": {"time": given}})


def test_one_storage_transformer_needs_no_list() -> None:
    """By name, or as metadata writes it."""
    sharding = {"name": "sharding", "configuration": {"chunks_per_shard": [2]}}
    given: list[tuple[str | dict[str, Any], int | None]] = [("sharding", 2), (sharding, None)]
    for one, chunks_per_shard in given:
        alone: dict[str, bytes] = {}
        in_a_list: dict[str, bytes] = {}
        for stored, transformers in ((alone, one), (in_a_list, [one])):
            store = ShardingStore(stored, chunks_per_shard, storage_transformers=transformers)
            z = zarr.create_array(store, name="z", shape=(4,), chunks=(1,), dtype="u1")
            z[:] = 1
        assert alone == in_a_list
        assert sum("/c/" in key for key in alone) == 2


def test_ranges_of_the_draft() -> None:
    """``None`` is a whole value; a slice is refused, and the error says how it is written."""
    m = ShardingMapping(base(), 2)
    m["a/c/0"] = b"0123456789"
    ranges: list[Any] = [None, (2, 3), (7, None), (-2, 1), (np.int64(1), np.int32(1)), [0, 2]]
    expected = [b"0123456789", b"234", b"789", b"8", b"1", b"01"]
    assert m.get_partial_values([("a/c/0", r) for r in ranges]) == expected
    for wrong in (slice(2, 5), 3, "23", (1,), (1, 2, 3), (1, -1), (0.5, 1), ("0", 1)):
        with pytest.raises(SpecError, match="range"):
            m.get_partial_values([("a/c/0", wrong)])  # type: ignore[list-item]


def test_one_key_is_no_list_of_keys() -> None:
    """Its letters are keys, too: ``"ab"`` would erase ``"a"`` and ``"b"``."""
    m = ShardingMapping({"a": b"1", "b": b"2"})
    with pytest.raises(SpecError, match="keys is a list, got 'ab'"):
        m.erase_values("ab")
    assert len(m) == 2


def test_values_of_a_mapping_that_are_no_bytes() -> None:
    """The error names the key."""
    m = ShardingMapping({"k": 1})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match="'k' is a int"):
        m["k"]
