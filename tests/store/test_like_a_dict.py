"""Law: a sharded store behaves like a dict, whatever is asked of it, in whatever order.

Random sequences of all operations over random geometries, keys with and without metadata,
empty values, pieces, base stores of each kind; blocking and async.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, ObjectStore, WrapperStore

from tests.support.async_calls import erase_prefix, set_partial_values
from tests.support.bases import ALL_BASES, fsspec_local, temporary_directory
from tests.support.kit import forget, objects_of
from tests.support.rounds import rounds
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError

N_OPERATIONS = 12


@dataclass
class Case:
    """An array, how it is declared, and keys in and beside it."""

    cps: tuple[int, ...]
    grid: tuple[int, ...]
    style: str
    separator: str
    has_metadata: bool
    keys: list[str] = field(default_factory=list)
    foreign_keys: list[str] = field(default_factory=list)

    @property
    def root(self) -> str:
        return "data/root/g/foo/" if self.style == "draft" else "g/foo/"

    def document(self) -> tuple[str, bytes]:
        if self.style == "draft":
            grid = {"type": "regular", "chunk_shape": [2] * len(self.grid)}
            doc: dict[str, Any] = {
                "shape": [2 * n for n in self.grid],
                "chunk_grid": {**grid, "separator": self.separator},
            }
            return "meta/root/g/foo.array.json", json.dumps(doc).encode()
        doc = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [2 * n for n in self.grid],
            "data_type": "uint8",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [2] * len(self.grid)},
            },
            "chunk_key_encoding": {
                "name": self.style,
                "configuration": {"separator": self.separator},
            },
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
        }
        return "g/foo/zarr.json", json.dumps(doc).encode()


@st.composite
def cases(draw: st.DrawFn, *, min_cps: int = 1, max_ndim: int = 3) -> Case:
    ndim = draw(st.integers(1, max_ndim))
    cps = tuple(draw(st.lists(st.integers(min_cps, 3), min_size=ndim, max_size=ndim)))
    grid = tuple(draw(st.lists(st.integers(1, 5), min_size=ndim, max_size=ndim)))
    has_metadata = draw(st.booleans())
    style = draw(st.sampled_from(["draft", "default", "v2"] if has_metadata else ["draft"]))
    case = Case(cps, grid, style, draw(st.sampled_from(["/", "."])), has_metadata)
    separator = case.separator
    first = {"draft": "c", "default": f"c{separator}", "v2": ""}[style]
    coords = [
        tuple(draw(st.integers(0, n - 1)) for n in grid) for _ in range(draw(st.integers(1, 10)))
    ]
    case.keys = [case.root + first + separator.join(map(str, c)) for c in dict.fromkeys(coords)]
    case.foreign_keys = ["g/other", f"{case.root}notes.txt", "x/c9x/0", "c.json"]
    return case


values = st.binary(max_size=6)


@st.composite
def operations(draw: st.DrawFn, case: Case) -> tuple[Any, ...]:
    key = st.sampled_from(case.keys * 3 + case.foreign_keys)
    name = draw(
        st.sampled_from(
            [
                "set",
                "set",
                "get",
                "range",
                "partial",
                "partial",
                "many",
                "erase",
                "erase_values",
                "erase_prefix",
                "list",
                "list_prefix",
                "list_dir",
                "exists",
                "size",
                "if_missing",
                "flush",
                "compact",
            ]
        )
    )
    match name:
        case "set" | "if_missing":
            return name, draw(key), draw(values)
        case "get" | "erase" | "exists" | "size":
            return name, draw(key)
        case "range":
            kind = draw(st.sampled_from(["range", "offset", "suffix"]))
            # fsspec takes a suffix of 0 bytes for the whole value; keys that pass through show it
            first = st.integers(1 if kind == "suffix" else 0, 8)
            ranges = st.tuples(key, st.just(kind), first, st.integers(0, 8))
            return name, draw(st.lists(ranges, min_size=1, max_size=5))
        case "partial":
            return name, draw(
                st.lists(st.tuples(key, st.integers(-2, 8), values), min_size=1, max_size=4)
            )
        case "many":
            return name, draw(st.dictionaries(key, values, min_size=1))
        case "erase_values":
            return name, draw(st.lists(key, min_size=1))
        case _:
            text = draw(st.sampled_from([*case.keys, *case.foreign_keys]))
            cut = draw(st.integers(0, len(text)))
            prefix = text[:cut]
            if draw(st.booleans()):  # prefixes that end with a segment are the usual ones
                prefix = prefix[: prefix.rfind("/") + 1]
            return name, prefix


def model_pieces(
    model: dict[str, bytes], triples: list[tuple[str, int, bytes]]
) -> dict[str, bytes] | None:
    """What set_partial_values makes of the model; ``None`` if it must refuse."""
    by_key: dict[str, list[tuple[int, bytes]]] = {}
    for key, start, value in triples:
        by_key.setdefault(key, []).append((start, value))
    new = dict(model)
    for key, pieces in by_key.items():
        pieces.sort(key=lambda p: (p[0], len(p[1])))
        if pieces[0][0] < 0 and len(pieces) > 1:
            return None
        if any(a + len(v) > b for (a, v), (b, _) in pairwise(pieces)):
            return None
        buffer = bytearray(new.get(key, b""))
        for start, value in pieces:
            if start > len(buffer) or -start > len(buffer):
                return None
            buffer[start : start + len(value) if start >= 0 else len(buffer)] = value
        new[key] = bytes(buffer)
    return new


def cut(value: bytes | None, kind: str, a: int, b: int) -> bytes | None:
    if value is None:
        return None
    return {
        "range": value[a : a + b],
        "offset": value[a:],
        "suffix": value[max(0, len(value) - a) :],
    }[kind]


STRATEGIES: dict[str, list[Literal["auto", "append", "rewrite"]]] = {
    name: ["auto", "append", "rewrite"] if name == "local" else ["auto", "rewrite"]
    for name in ALL_BASES
}


def obstore_local(path: Path) -> ObjectStore[Any]:
    from obstore.store import LocalStore as Files

    return ObjectStore(Files(path, mkdir=True))


KINDS_ON_FILES: dict[str, Callable[[Path], Any]] = {
    "LocalStore": LocalStore,
    "wrapped": lambda path: WrapperStore(LocalStore(path)),
    "fsspec": fsspec_local,
    "obstore": obstore_local,
}


class Blocking:
    """The operations on a `ShardingMapping`."""

    def __init__(self, store: ShardingStore) -> None:
        self.m = ShardingMapping(store)

    def get(self, key: str) -> bytes | None:
        return self.m.get(key)

    def ranges(self, ranges: list[tuple[str, str, int, int]]) -> list[bytes | None]:
        forms: dict[str, Callable[[int, int], tuple[int, int | None]]] = {
            "range": lambda a, b: (a, b),
            "offset": lambda a, _: (a, None),
            "suffix": lambda a, _: (-a, None),
        }
        return self.m.get_partial_values([(k, forms[kind](a, b)) for k, kind, a, b in ranges])

    def set(self, key: str, value: bytes) -> None:
        self.m.set(key, value)

    def if_missing(self, key: str, value: bytes) -> None:
        self.m.setdefault(key, value)

    def many(self, items: dict[str, bytes]) -> None:
        self.m.update(items)

    def partial(self, triples: list[tuple[str, int, bytes]]) -> None:
        self.m.set_partial_values(triples)

    def erase(self, key: str) -> None:
        self.m.erase(key)

    def flush(self) -> None:
        self.m.flush()

    def compact(self, prefix: str) -> None:
        self.m.compact(prefix)

    def erase_values(self, keys: list[str]) -> None:
        self.m.erase_values(keys)

    def erase_prefix(self, prefix: str) -> None:
        self.m.erase_prefix(prefix)

    def exists(self, key: str) -> bool:
        return key in self.m

    def size(self, key: str) -> int | None:
        return len(self.m[key]) if key in self.m else None

    def list_prefix(self, prefix: str) -> list[str]:
        return self.m.list_prefix(prefix)

    def list(self) -> Any:
        return list(self.m)

    def list_dir(self, prefix: str) -> Any:
        keys, prefixes = self.m.list_dir(prefix)
        return keys, prefixes


class Async:
    """The operations on a `ShardingStore`, each run in an event loop of its own."""

    def __init__(self, store: ShardingStore) -> None:
        self.s = store

    def _run(self, coro: Any) -> Any:
        return asyncio.run(coro)

    def get(self, key: str) -> bytes | None:
        value = self._run(self.s.get(key, default_buffer_prototype()))
        return None if value is None else bytes(value.to_bytes())

    def ranges(self, ranges: list[tuple[str, str, int, int]]) -> list[bytes | None]:
        forms: dict[str, Callable[[int, int], ByteRequest]] = {
            "range": lambda a, b: RangeByteRequest(a, a + b),
            "offset": lambda a, _: OffsetByteRequest(a),
            "suffix": lambda a, _: SuffixByteRequest(a),
        }
        wanted = [(key, forms[kind](a, b)) for key, kind, a, b in ranges]
        found = self._run(self.s.get_partial_values(default_buffer_prototype(), wanted))
        return [None if v is None else v.to_bytes() for v in found]

    def set(self, key: str, value: bytes) -> None:
        self._run(self.s.set(key, cpu.Buffer.from_bytes(value)))

    def if_missing(self, key: str, value: bytes) -> None:
        self._run(self.s.set_if_not_exists(key, cpu.Buffer.from_bytes(value)))

    def many(self, items: dict[str, bytes]) -> None:
        async def gather() -> None:
            await asyncio.gather(*(self.s.set(k, v) for k, v in items.items()))

        self._run(gather())

    def partial(self, triples: list[tuple[str, int, bytes]]) -> None:
        self._run(set_partial_values(self.s, triples))

    def erase(self, key: str) -> None:
        self._run(self.s.delete(key))

    def flush(self) -> None:
        self._run(self.s.flush())

    def compact(self, prefix: str) -> None:
        self._run(self.s.compact(prefix))

    def erase_values(self, keys: list[str]) -> None:
        self._run(self.s._set_or_erase([(key, None) for key in keys]))

    def erase_prefix(self, prefix: str) -> None:
        self._run(erase_prefix(self.s, prefix))

    def exists(self, key: str) -> bool:
        return bool(self._run(self.s.exists(key)))

    def size(self, key: str) -> int | None:
        try:
            return int(self._run(self.s.getsize(key)))
        except FileNotFoundError:
            return None

    def list_prefix(self, prefix: str) -> list[str]:
        async def collect() -> list[str]:
            return [key async for key in self.s.list_prefix(prefix)]

        return list(self._run(collect()))

    def list(self) -> Any:
        return self.list_prefix("")

    def list_dir(self, prefix: str) -> Any:
        async def collect() -> list[str]:
            return [name async for name in self.s.list_dir(prefix)]

        return self._run(collect())


def check(driver: Any, model: dict[str, bytes], operation: tuple[Any, ...], case: Case) -> None:
    """Do one operation on both, and compare what they say."""
    match operation:
        case ("set", key, value):
            driver.set(key, value)
            model[key] = value
        case ("if_missing", key, value):
            driver.if_missing(key, value)
            model.setdefault(key, value)
        case ("get", key):
            assert driver.get(key) == model.get(key)
        case ("exists", key):
            assert driver.exists(key) == (key in model)
        case ("size", key):
            assert driver.size(key) == (len(model[key]) if key in model else None)
        case ("range", ranges):
            expected = [cut(model.get(key), kind, a, b) for key, kind, a, b in ranges]
            assert driver.ranges(ranges) == expected
        case ("partial", triples):
            new = model_pieces(model, triples)
            if new is not None:
                driver.partial(triples)
                model.update(new)
            elif len({key for key, _, _ in triples}) == 1:  # else other shards may be written
                with pytest.raises(SpecError):
                    driver.partial(triples)
        case ("many", items):
            driver.many(items)
            model.update(items)
        case ("erase", key):
            driver.erase(key)
            model.pop(key, None)
        case ("erase_values", keys):
            driver.erase_values(keys)
            for key in keys:
                model.pop(key, None)
        case ("erase_prefix", prefix):
            driver.erase_prefix(prefix)
            for key in [k for k in model if k.startswith(prefix)]:
                del model[key]
        case ("flush", _):
            driver.flush()
        case ("compact", prefix):
            driver.compact(prefix)
        case ("list", _):
            assert sorted(driver.list()) == sorted(model)
        case ("list_prefix", prefix):
            expected_keys = sorted(k for k in model if k.startswith(prefix))
            assert sorted(driver.list_prefix(prefix)) == expected_keys
        case ("list_dir", prefix):
            directory = prefix[: prefix.rfind("/") + 1]
            check_list_dir(driver.list_dir(directory), model, directory, case)


def check_list_dir(listed: Any, model: dict[str, bytes], directory: str, case: Case) -> None:
    """Keys are exact; prefixes may be more inside a grid, where a shard could hold them."""
    tails = [k[len(directory) :] for k in model if k.startswith(directory)]
    names = {t.split("/", 1)[0] for t in tails}
    keys = {t for t in tails if "/" not in t}
    in_grid = directory.startswith(case.root)
    if isinstance(listed, tuple):
        got_keys = {k.removeprefix(directory) for k in listed[0]}
        got_prefixes = {p.removeprefix(directory).removesuffix("/") for p in listed[1]}
        assert got_keys == keys
        assert len(listed[0]) + len(listed[1]) == len(got_keys) + len(got_prefixes)
        listed_names = got_keys | got_prefixes
    else:
        listed_names = set(listed)
        assert len(listed) == len(listed_names), "no name twice"
    # A local directory stays when its last file is gone: as it does without sharding.
    assert listed_names >= names
    if not in_grid:
        once = [*case.keys, *case.foreign_keys, case.document()[0]]
        for name in listed_names - names:
            assert any(k.startswith(f"{directory}{name}/") for k in once)


@pytest.mark.parametrize("driver_cls", [Blocking, Async])
@pytest.mark.parametrize("base_name", list(ALL_BASES))
@settings(max_examples=rounds(30))
@given(data=st.data())
def test_like_a_dict(driver_cls: type, base_name: str, data: st.DataObject) -> None:
    """Every reply is that of a dict, and each shard holds more than one chunk at the end.

    Stores that write with different strategies take turns."""
    case = data.draw(cases())
    base = ALL_BASES[base_name]()
    strategies = data.draw(st.lists(st.sampled_from(STRATEGIES[base_name]), min_size=1, max_size=3))
    drivers = [
        driver_cls(ShardingStore(base, chunks_per_shard=case.cps, strategy=strategy))
        for strategy in strategies
    ]
    driver = drivers[0]
    model: dict[str, bytes] = {}
    if case.has_metadata:
        key, document = case.document()
        driver.set(key, document)
        shown = driver.get(key)
        assert shown is not None
        assert json.loads(shown)["shape"] == json.loads(document)["shape"]
        model[key] = shown
    for _ in range(data.draw(st.integers(1, N_OPERATIONS))):
        operation = data.draw(operations(case))
        if operation[0] == "erase_prefix" and any(
            "json" in k and k.startswith(operation[1]) for k in model
        ):
            continue  # without its metadata the array is no array; the end is tested below
        check(data.draw(st.sampled_from(drivers)), model, operation, case)
    assert sorted(driver.list()) == sorted(model)
    for key in model:
        assert driver.get(key) == model[key]
    # A second store knows nothing but what is stored.
    fresh = driver_cls(ShardingStore(base, chunks_per_shard=case.cps))
    assert {k: fresh.get(k) for k in fresh.list()} == model
    n_chunks = sum(key in case.keys for key in model)
    n_shards = sum(k.startswith(case.root) for k in objects_of(base)) - sum(
        k.startswith(case.root) for k in model if k not in case.keys
    )
    n_possible = math.prod(-(-g // c) for g, c in zip(case.grid, case.cps, strict=True))
    assert n_shards <= min(n_chunks, n_possible)
    fresh.erase_prefix("")
    assert objects_of(base) == {}
    assert fresh.list() == []


@settings(max_examples=rounds(150))
@given(data=st.data())
def test_the_same_files_through_stores_of_any_kind(data: st.DataObject) -> None:
    """Local files that several kinds of store, strategies, orders and clients change in turn:
    what one keeps open or remembers of a shard is of no use after another."""
    pytest.importorskip("obstore")
    case = data.draw(cases(min_cps=2, max_ndim=2))
    path = temporary_directory()

    def open_driver() -> Any:
        kind = data.draw(st.sampled_from(sorted(KINDS_ON_FILES)))
        strategies = STRATEGIES["local" if kind == "LocalStore" else "fsspec local"]
        store = ShardingStore(
            KINDS_ON_FILES[kind](path),
            chunks_per_shard=case.cps,
            strategy=data.draw(st.sampled_from(strategies)),
            order=data.draw(st.sampled_from(["C", "F", "morton"])),
        )
        return data.draw(st.sampled_from([Blocking, Async]))(store)

    drivers = [open_driver() for _ in range(data.draw(st.integers(2, 4)))]
    model: dict[str, bytes] = {}
    if case.has_metadata:
        document_key, document = case.document()
        drivers[0].set(document_key, document)
        model[document_key] = drivers[0].get(document_key)
    keys, sizes = st.sampled_from(case.keys), st.integers(0, 9) | st.sampled_from([200, 5000])
    changes = st.tuples(st.sampled_from(drivers), keys, sizes | st.none())
    for number, (driver, key, nbytes) in enumerate(data.draw(st.lists(changes, max_size=25))):
        if nbytes is None:
            check(
                driver,
                model,
                data.draw(st.sampled_from([("erase", key), ("flush", ""), ("compact", "")])),
                case,
            )
        else:
            check(driver, model, ("set", key, bytes([number]) * nbytes), case)
        reader = data.draw(st.sampled_from(drivers))
        assert {k: reader.get(k) for k in case.keys} == {k: model.get(k) for k in case.keys}
    fresh = open_driver()
    assert {k: fresh.get(k) for k in fresh.list()} == model
    fresh.erase_prefix("")
    assert objects_of(LocalStore(path)) == {}
    forget(path)  # of many examples they would be sealed, some time


def test_a_listing_that_fails_is_not_begun_again() -> None:
    """Its error is raised as it is."""
    n_listings = 0

    class Failing(dict[str, bytes]):
        def __iter__(self) -> Any:
            nonlocal n_listings
            n_listings += 1
            raise ConnectionError(str(n_listings))

    async def keys() -> list[str]:
        return [key async for key in ShardingStore(Failing(a=b"1"), None).list()]

    with pytest.raises(ConnectionError, match=r"^1$"):
        sync(keys())
    assert n_listings == 1
