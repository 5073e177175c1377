"""Stacks of storage transformers through the stores: crc32c above and below sharding, others'."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import ObjectStore

from tests.support.bases import BASES, put
from tests.support.kit import objects_of
from zarr_shardstore import (
    CorruptShardError,
    CorruptValueError,
    DraftHierarchyStore,
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnsupportedError,
    check_store,
    register_storage_transformer,
)
from zarr_shardstore.transformers import (
    ArrayContext,
    Delete,
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    Modify,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
    apply_pieces,
    resolve_range,
)

DATA = np.arange(7 * 5, dtype="int32").reshape(7, 5)
STACKS: list[list[Any]] = [
    ["crc32c", "sharding"],
    ["sharding", "crc32c"],
    ["crc32c"],
    [{"name": "sharding", "configuration": {"chunks_per_shard": [2, 3]}}, "crc32c"],
]
FORMATS = ["v3", "v2", "draft"]


@pytest.fixture(params=BASES, ids=list(BASES))
def base(request: pytest.FixtureRequest) -> Any:
    return BASES[request.param]()


def make(base: Any, stack: Any, form: str, name: str = "z") -> Any:
    store: Any = ShardingStore(base, chunks_per_shard=(2, 2), storage_transformers=stack)
    if form == "draft":
        store = DraftHierarchyStore(store)
    zarr_format: Any = 2 if form == "v2" else 3
    z = zarr.create_array(
        store, name=name, shape=(7, 5), chunks=(2, 1), dtype="int32", zarr_format=zarr_format
    )
    z[:] = DATA
    return z


def reopen(base: Any, form: str, name: str = "z") -> Any:
    store: Any = ShardingStore(base)
    return zarr.open_array(DraftHierarchyStore(store) if form == "draft" else store, path=name)


def chunk_keys(objects: Any) -> list[str]:
    return [k for k in objects if not k.endswith((".json", ".zarray", ".zattrs", ".zgroup"))]


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_arrays_read_and_write_through_a_stack(base: Any, stack: Any, form: str) -> None:
    """Values, updates of parts, attributes, resizes; metadata alone tells the next store."""
    z = make(base, stack, form)
    expected = DATA.copy()
    z[1:4, 2:4] = expected[1:4, 2:4] = -1
    z.attrs["a"] = 1
    z.resize((9, 5))
    z[7:] = 5
    z = reopen(base, form)
    np.testing.assert_array_equal(z[:7], expected)
    np.testing.assert_array_equal(z[7:], 5)
    assert z.attrs["a"] == 1
    n_objects, n_chunks = len(chunk_keys(objects_of(base))), 5 * 5
    assert (n_objects < n_chunks) == (stack != ["crc32c"])


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_whole_shards_are_erased_and_written_again(stack: Any) -> None:
    """An object store replaces them by shards without entries."""
    base = ObjectStore(pytest.importorskip("obstore").store.MemoryStore())
    z = make(base, stack, "v3")
    for value in (0, 8, 0, 9):
        z[4:] = value
        for found in (z, reopen(base, "v3")):
            np.testing.assert_array_equal(found[:4], DATA[:4])
            np.testing.assert_array_equal(found[4:], value)
    assert check_store(base, level="decode").is_clean


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_every_operation_of_the_draft(base: Any, stack: Any) -> None:
    """Exact keys, values, ranges and sizes, as of a store that holds the chunks themselves."""
    make(base, stack, "v3")
    m = ShardingMapping(base)
    keys = {f"z/c/{i}/{j}" for i in range(4) for j in range(5)}
    assert set(chunk_keys(m.list_prefix("z/"))) == keys
    assert set(m.list_prefix("z/c/1/")) == {k for k in keys if k.startswith("z/c/1/")}
    assert set(m.list_dir("z/c/1/")[0]) == set(m.list_prefix("z/c/1/"))
    assert m.list_dir("z/")[1] == ["z/c/"]
    whole = m["z/c/1/1"]
    ranges: list[Any] = [(2, 3), (-4, None), (5, 99), (0, None)]
    assert m.get_partial_values([("z/c/1/1", r) for r in ranges] + [("z/c/9/9", (0, 1))]) == [
        *(whole[2:5], whole[-4:], whole[5:], whole, None)
    ]
    m.set_partial_values([("z/c/1/1", 2, b"XY"), ("z/c/2/2", 0, b"Z")])
    assert m["z/c/1/1"] == whole[:2] + b"XY" + whole[4:]
    assert m.setdefault("z/c/1/1", b"no")[2:4] == b"XY"
    store = ShardingStore(base)
    assert sync(store.getsize("z/c/1/1")) == len(whole)
    assert sync(store.getsize_prefix("z/c")) == sum(len(m[k]) for k in keys)
    m.erase_values(["z/c/1/1", "z/c/3/4"])
    assert "z/c/1/1" not in m
    m.erase_prefix("z/c/2/")
    left = {k for k in keys if not k.startswith("z/c/2/")} - {"z/c/1/1", "z/c/3/4"}
    assert set(chunk_keys(m)) == left
    m.erase_prefix("z/")
    assert list(m) == [] or all(not k.startswith("z/") for k in m)
    assert not chunk_keys(objects_of(base))


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_a_corrupted_chunk_is_found_and_blocks_no_other(stack: Any) -> None:
    """Whichever byte of whichever object is hit, no reader gets a wrong value."""
    base: dict[str, bytes] = {}
    make(base, stack, "v3")
    good = dict(base)
    for key in chunk_keys(good):
        for at in {0, len(good[key]) // 2, len(good[key]) - 1}:
            damaged = bytearray(good[key])
            damaged[at] ^= 0x10
            base[key] = bytes(damaged)
            z = reopen(base, "v3")
            errors = 0
            for i, j in np.ndindex(4, 5):
                region = (slice(2 * i, 2 * i + 2), slice(j, j + 1))
                try:
                    values = z[region]
                except (CorruptValueError, CorruptShardError):
                    errors += 1
                else:
                    np.testing.assert_array_equal(values, DATA[region])
            if stack[-1] == "crc32c":
                assert errors, "a checksum at the bottom covers each byte"
            elif at == 0:
                assert errors == 1
            base[key] = good[key]


def test_a_corrupted_chunk_above_sharding_can_be_replaced() -> None:
    """Whole. A part of it cannot: the rest would be made valid though it is damaged."""
    base: dict[str, bytes] = {}
    make(base, ["crc32c", "sharding"], "v3")
    shard = bytearray(base["z/c/0/0"])
    shard[0] ^= 1
    base["z/c/0/0"] = bytes(shard)
    m = ShardingMapping(base)
    with pytest.raises(CorruptValueError, match="z/c/0/0") as info:
        m["z/c/0/0"]
    assert pickle.loads(pickle.dumps(info.value)).key == "z/c/0/0"
    with pytest.raises(CorruptValueError):
        m.set_partial_values([("z/c/0/0", 0, b"x")])
    assert base["z/c/0/0"] == bytes(shard)
    m["z/c/0/0"] = b"new"
    assert m["z/c/0/0"] == b"new"


def test_each_array_has_its_own_stack(base: Any) -> None:
    """One request for chunks of three arrays, and of none."""
    make(base, ["crc32c", "sharding"], "v3", "a")
    make(base, ["sharding", "crc32c"], "v2", "b")
    make(base, None, "v3", "c")
    m = ShardingMapping(base)
    m["d/notes"] = b"hello"
    keys = ["a/c/1/1", "b/1.1", "c/c/1/1", "d/notes", "b/0.4"]
    values = m.get_partial_values([(k, (0, None)) for k in keys])
    assert values == [m[k] for k in keys]
    m.set_partial_values([(k, 0, b"!!") for k in keys])
    assert [m[k][:2] for k in keys] == [b"!!"] * 5


def test_the_stack_of_the_metadata_not_of_the_options(base: Any) -> None:
    """An array that is stored keeps its stack, whatever the store is told."""
    make(base, ["crc32c", "sharding"], "v3")
    store = ShardingStore(base, chunks_per_shard=4, storage_transformers=["sharding"])
    z = zarr.open_array(store, path="z")
    z.attrs["a"] = 1
    z[0, 0] = 9
    document = json.loads(objects_of(base)["z/zarr.json"])
    assert [t["name"] for t in document["storage_transformers"]] == ["crc32c", "sharding"]
    assert reopen(base, "v3")[0, 0] == 9


@pytest.mark.parametrize(
    ("stack", "error", "match"),
    [
        (["rot13"], UnsupportedError, "'rot13' is not known: install the package that provides it"),
        (["sharding", "sharding"], SpecError, "once"),
        (3, SpecError, "is a list"),
        ([3], SpecError, "a name and a configuration"),
        ([{"name": "crc32c", "configuration": {"level": 1}}], SpecError, "no configuration"),
    ],
)
def test_options_that_are_not_valid(stack: Any, error: type[Exception], match: str) -> None:
    """Refused by the constructor or by the first array, with nothing written."""
    base: dict[str, bytes] = {}
    with pytest.raises(error, match=match):
        make(base, stack, "v3")
    assert not [k for k in base if k.startswith("z/")]


def test_more_than_one_sharding_in_metadata() -> None:
    """Valid by the draft, and not safe here: said, not misread."""
    base: dict[str, bytes] = {}
    make(base, ["sharding"], "v3")
    document = json.loads(base["z/zarr.json"])
    document["storage_transformers"] *= 2
    base["z/zarr.json"] = json.dumps(document).encode()
    with pytest.raises(UnsupportedError, match="more than one sharding"):
        ShardingMapping(base)["z/c/0/0"]


def test_an_unknown_name_in_metadata_is_a_clear_error_and_blocks_nothing_else(base: Any) -> None:
    """The values of the array say which package is missing; its document and its keys are those of
    the base store. The rest is listed, read and written."""
    make(base, ["crc32c"], "v3", "good")
    make(base, ["crc32c"], "v3", "bad")
    document = json.loads(objects_of(base)["bad/zarr.json"])
    document["storage_transformers"] = [{"name": "https://example.org/encryption"}]
    put(base, "bad/zarr.json", json.dumps(document).encode())
    m = ShardingMapping(base)
    for operation in (
        lambda: m["bad/c/0/0"],
        lambda: m.set("bad/c/0/0", b"x"),
        lambda: m.erase("bad/c/0/0"),
    ):
        with pytest.raises(UnsupportedError, match=r"'https://example\.org/encryption' is not"):
            operation()
    assert json.loads(m["bad/zarr.json"]) == document
    assert {"bad/zarr.json", "bad/c/0/0"} <= {*objects_of(base)} & {*m}
    assert "bad/c/0/" in m.list_dir("bad/c/")[1]
    assert len([k for k in m if k.startswith("good/c/")]) == 20
    assert reopen(base, "v3", "good")[1, 1] == DATA[1, 1]
    # It can be replaced, and removed.
    make(base, ["crc32c", "sharding"], "v3", "other")
    store = ShardingStore(base, chunks_per_shard=2)
    z = zarr.create_array(store, name="bad", shape=(4,), chunks=(1,), dtype="i1", overwrite=True)
    z[:] = 3
    np.testing.assert_array_equal(reopen(base, "v3", "bad")[:], 3)


class Reversed:
    """A transformer of another package: it writes values backwards, and tells no sizes."""

    def __init__(self, configuration: Any, array: Any) -> None:
        assert configuration == {"twice": False}
        assert (array.path, array.grid_shape) == ("z", (4, 5))
        assert array.document["storage_transformers"] == []

    def perform(self, requests: Any) -> Any:
        below = [
            Set(r.key, bytes(r.value)[::-1]) if isinstance(r, Set) else Get(r.key) for r in requests
        ]
        replies = yield below
        return [
            reply._replace(value=memoryview(bytes(reply.value)[::-1]))
            if isinstance(r, Get) and reply.value is not None
            else reply
            for r, reply in zip(requests, replies, strict=True)
        ]

    def keys_above(self, keys: Any) -> Any:
        return [(key, None) for key in keys]
        yield


def test_a_registered_transformer() -> None:
    """The whole protocol: two methods, a factory, a name."""
    register_storage_transformer("tests.example/reversed", Reversed)
    register_storage_transformer("tests.example/reversed", Reversed)
    with pytest.raises(SpecError, match="there is a storage transformer"):
        register_storage_transformer("tests.example/reversed", lambda c, a: Reversed(c, a))
    base: dict[str, bytes] = {}
    item = {"name": "tests.example/reversed", "configuration": {"twice": False}}
    make(base, [item, "crc32c", "sharding"], "v3")
    np.testing.assert_array_equal(reopen(base, "v3")[:], DATA)
    stored = ShardingMapping(base, native="passthrough")
    assert stored["z/c/0/0"]


class ContentAddressed:
    """The hash of a value at its key, and the value itself at ``content/HASH``, once."""

    def __init__(self, configuration: Any, array: ArrayContext) -> None:
        assert not configuration

    def perform(self, requests: Sequence[Request]) -> Flow[list[Any]]:
        replies: list[Any] = []
        for request in requests:
            replies.append((yield from self._one(request)))  # noqa: PERF401
        return replies

    def _one(self, request: Request) -> Flow[Any]:
        match request:
            case Get(key) | GetSize(key):
                value = yield from self._value(key)
                if isinstance(request, GetSize):
                    return None if value is None else len(value)
                if value is None:
                    return Found(None, None)
                start, stop = resolve_range(request.byte_range, len(value))
                return Found(memoryview(value)[start:stop], None, len(value))
            case Set(key, value) | SetIfNotExists(key, value):
                digest = hashlib.sha256(value).hexdigest().encode()
                yield [Set(f"content/{digest.decode()}", bytes(value))]
                (reply,) = yield [type(request)(key, digest)]
                return reply
            case Modify(key, change):
                new = change((yield from self._value(key)))
                return (yield from self._one(Delete(key) if new is None else Set(key, new)))
            case SetPartial(key, pieces):
                old = yield from self._value(key)
                return (yield from self._one(Set(key, apply_pieces(key, old, pieces))))
            case Exists() | Delete():
                (reply,) = yield [request]
                return reply
        raise AssertionError(request)

    def _value(self, key: str) -> Flow[bytes | None]:
        (digest,) = yield [Get(key)]
        if digest.value is None:
            return None
        (found,) = yield [Get(f"content/{bytes(digest.value).decode()}")]
        return bytes(found.value)

    def keys_above(self, keys: Sequence[str]) -> Flow[list[tuple[str, int | None]]]:
        return [(key, None) for key in keys]
        yield


CAS = "tests.example/content-addressed"
register_storage_transformer(CAS, ContentAddressed)


@pytest.mark.thorough(of=7)
@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize(
    "stack",
    [
        [CAS, "sharding"],
        ["sharding", CAS],
        ["crc32c", CAS, "sharding"],
        [CAS, "sharding", "crc32c"],
    ],
    ids=str,
)
def test_content_addressing(base: Any, stack: list[str], is_batch: bool) -> None:
    """Above sharding and below it. The public names are enough to write such a transformer."""
    store = ShardingStore(base, chunks_per_shard=4, storage_transformers=stack)
    with store.batch() if is_batch else contextlib.nullcontext():
        z = zarr.create_array(
            store, name="z", shape=(16, 16), chunks=(2, 2), dtype="u1", compressors=None
        )
        z[:] = 1
        z[:4] = 2
        z[0, 0] = 3
    m = ShardingMapping(base)
    again = zarr.open_array(ShardingStore(base), path="z")
    expected = np.where(np.arange(16)[:, None] < 4, 2, 1) * np.ones((1, 16), int)
    expected[0, 0] = 3
    np.testing.assert_array_equal(again[:], expected)
    keys = [f"z/c/{i}/{j}" for i in range(8) for j in range(8)]
    assert sorted(key for key in m if key.startswith("z/c/")) == sorted(keys)
    assert m.get_partial_values([(keys[-1], (1, 2)), (keys[0], (0, 1))]) == [b"\1\1", b"\3"]
    objects = objects_of(base)
    assert len([key for key in objects if key.startswith("z/c/")]) == 4
    if stack[0] != "sharding":
        contents = {key for key in objects if key.startswith("content/")}
        assert len(contents) == 3, "of 64 chunks"
    m.erase_values(keys[:-1])
    assert [key for key in m if key.startswith("z/c/")] == keys[-1:]


ENTRY_POINT_PACKAGE = """
from zarr_shardstore.transformers import ValueTransformer

class Xor(ValueTransformer):
    def __init__(self, number):
        self.number = number
    def encode(self, key, value):
        return bytes(b ^ self.number for b in value)
    decode = encode

def xor(configuration, array):
    return Xor(configuration["number"])
"""


def test_an_entry_point_of_another_package(tmp_path: Path) -> None:
    """Installed beside, found by its name in metadata, in a process that imports nothing else."""
    (tmp_path / "xor_package.py").write_text(ENTRY_POINT_PACKAGE)
    info = tmp_path / "xor_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xor-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[zarr_shardstore.storage_transformers]\nexample.org/xor = xor_package:xor\n"
    )
    script = """
import sys, zarr
from zarr_shardstore import ShardingStore
store = ShardingStore(sys.argv[1], chunks_per_shard=2, storage_transformers=[
    {"name": "example.org/xor", "configuration": {"number": 85}}, "sharding"])
z = zarr.create_array(store, name="z", shape=(6,), chunks=(1,), dtype="u1", compressors=None)
z[:] = range(6)
print(list(map(int, zarr.open_array(ShardingStore(sys.argv[1]), path="z")[:])))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")],
        env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "[0, 1, 2, 3, 4, 5]", done.stderr
    assert (tmp_path / "store" / "z" / "c" / "0").read_bytes()[:1] == bytes([1 ^ 85])
