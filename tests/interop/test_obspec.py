"""`as_obspec`: the protocols of ``obspec``, and the tools that take them."""

from __future__ import annotations

import asyncio
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import obspec
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from obspec.exceptions import map_exception
from obstore.exceptions import GenericError
from obstore.store import MemoryStore
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import ObjectStore

from tests.support.bases import OtherMapping
from zarr_shardstore import CorruptShardError, ReadOnlyError, ShardingStore, UnsupportedError
from zarr_shardstore.errors import AlreadyExistsError

if TYPE_CHECKING:

    def is_all(store: ShardingStore) -> Sequence[object]:
        """A type checker compares the methods with each protocol."""
        chunks = store.as_obspec()
        reads: tuple[obspec.Get, obspec.GetRange, obspec.GetRanges, obspec.Head]
        reads = chunks, chunks, chunks, chunks
        reads_async: tuple[
            obspec.GetAsync, obspec.GetRangeAsync, obspec.GetRangesAsync, obspec.HeadAsync
        ]
        reads_async = chunks, chunks, chunks, chunks
        lists: tuple[
            obspec.List, obspec.ListAsync, obspec.ListWithDelimiter, obspec.ListWithDelimiterAsync
        ]
        lists = chunks, chunks, chunks, chunks
        writes: tuple[obspec.Put, obspec.PutAsync, obspec.Delete, obspec.DeleteAsync]
        writes = chunks, chunks, chunks, chunks
        return [reads, reads_async, lists, writes]


SHAPE = (6, 8)
VALUES = np.arange(48, dtype="i4").reshape(SHAPE)
BASES: dict[str, Callable[[Path], Any]] = {
    "mapping": lambda path: OtherMapping(),
    "local": lambda path: str(path / "v.zarr"),
    "zarr memory": lambda path: zarr.storage.MemoryStore(),
    "obstore": lambda path: MemoryStore(),
}


def filled(base: Any) -> ShardingStore:
    """A store with a sharded array, which lacks some chunks, a plain array, and other values."""
    store = ShardingStore(base, {"a/z": 2})
    zarr.create_group(store, path="a")
    for path in ("a/z", "plain"):
        z = zarr.create_array(
            store,
            name=path,
            shape=SHAPE,
            chunks=(2, 2),
            dtype="i4",
            compressors=None,
            fill_value=-1,
        )
        z[:4, :6] = VALUES[:4, :6]
    store.set_sync("b/notes.txt", b"0123456789")
    store.set_sync("ab", b"y")
    return store


def copied(store: Store) -> MemoryStore:
    """The same keys and values in a store of obstore."""

    async def items() -> list[tuple[str, bytes]]:
        prototype, found = default_buffer_prototype(), []
        async for key in store.list():
            value = await store.get(key, prototype)
            assert value is not None
            found.append((key, value.to_bytes()))
        return found

    copy = MemoryStore()
    for key, value in sync(items()):
        copy.put(key, value)
    return copy


@pytest.fixture(params=BASES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShardingStore]:
    store = filled(BASES[request.param](tmp_path))
    yield store
    store.close()


# ------------------------------------------------------------------ the protocols

PROTOCOLS = [
    cls
    for name, cls in vars(obspec).items()
    if getattr(cls, "_is_protocol", False)
    and name.removesuffix("Async") not in ("Copy", "GetResult", "Rename")
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_protocol_is_implemented(protocol: type) -> None:
    """With the same names, kinds and defaults of parameters, and async where the protocol is."""
    (name,) = [name for name, member in vars(protocol).items() if inspect.isfunction(member)][:1]
    expected, method = getattr(protocol, name), getattr(ShardingStore({}).as_obspec(), name)
    parameters = inspect.signature(method).parameters
    for each in list(inspect.signature(expected).parameters.values())[1:]:
        if name.startswith("put") and each.name not in parameters:
            assert parameters.keys() & {"_", "options"}  # its options of uploads have no effect
        else:
            assert parameters[each.name].kind == each.kind
            assert parameters[each.name].default == each.default
    assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(expected)
    assert method.__name__ == name
    assert len(inspect.getdoc(method) or "") > 20


def test_the_package_obspec_is_not_imported() -> None:
    code = """
import sys
from zarr_shardstore import ShardingStore

store = ShardingStore({}, 2)
assert not [name for name in sys.modules if "obspec" in name]
assert list(store.as_obspec().list()) == []
assert "obspec" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pickles_and_compares(tmp_path: Path) -> None:
    chunks = filled(str(tmp_path)).as_obspec()
    again = pickle.loads(pickle.dumps(chunks))
    assert again == chunks
    assert bytes(again.get("ab").buffer()) == b"y"


# --------------------------------------------------------------- as MemoryStore does

KEYS = ["a/z/c/0/0", "a/z/c/1/2", "a/z/zarr.json", "plain/c/0/0", "b/notes.txt", "ab"]
MISSING = ["a/z/c/2/3", "a/z/c/0", "a", "none/c/0/0"]
NUMBERS = st.integers(0, 20) | st.integers(0, 800)
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call of a method of ``obspec`` that reads, and its arguments."""
    key = draw(st.sampled_from([*KEYS, *MISSING]))
    many = draw(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5))
    starts, others = ([pair[i] for pair in many] for i in (0, 1))
    range_ = draw(
        st.tuples(NUMBERS, NUMBERS)
        | st.fixed_dictionaries({"offset": NUMBERS})
        | st.fixed_dictionaries({"suffix": NUMBERS})
    )
    end, name = draw(st.sampled_from(["end", "length"])), draw(st.sampled_from(["ends", "lengths"]))
    prefixes = [None, "", "a", "a/", "/a/", "a/z", "a/z/c", "a/z/c/0", "a/z/c/0/0", "pl", "none"]
    prefix = draw(st.sampled_from(prefixes))
    choices: list[Call] = [
        ("get", (key,), {}),
        ("get", (key,), {"options": {"range": range_}}),
        ("get_range", (key,), {"start": draw(NUMBERS), end: draw(NUMBERS)}),
        ("get_ranges", (key,), {"starts": starts, name: others}),
        ("head", (key,), {}),
        ("list", (prefix,), {"offset": draw(st.sampled_from([None, "a/z", "a/z/c/1/0"]))}),
        ("list_with_delimiter", (prefix,), {}),
    ]
    return draw(st.sampled_from(choices))


def known(meta: Any) -> tuple[str, int]:
    return meta["path"], meta["size"]


def plain(reply: Any) -> Any:
    """A reply without what stores may choose: order, pages, times, ETags."""
    match reply:
        case {"common_prefixes": prefixes, "objects": objects}:
            return sorted(prefixes), sorted(map(known, objects))
        case {"path": _}:
            return known(reply)
        case [list(), *_]:
            return sorted(known(meta) for page in reply for meta in page)
        case list() | tuple():
            return [bytes(item) for item in reply]
    if hasattr(reply, "meta"):
        return known(reply.meta), reply.range, bytes(reply.buffer()), dict(reply.attributes)
    return bytes(reply)


def outcome(store: Any, call: Call) -> Any:
    name, arguments, options = call
    try:
        reply = getattr(store, name)(*arguments, **options)
        return plain(list(map(list, reply)) if name == "list" else reply)
    except FileNotFoundError:
        return "missing"
    except (ValueError, GenericError):  # obstore has one before a request, the other after it
        return "not a range"


def outcome_async(store: Any, call: Call) -> Any:
    name, arguments, options = call

    async def run() -> Any:
        reply = getattr(store, f"{name}_async")(*arguments, **options)
        if name == "list":
            return [page async for page in reply]
        reply = await reply
        if name == "get":
            assert b"".join([part async for part in reply]) == await reply.buffer_async()
        return reply

    return outcome(SimpleNamespace(**{name: lambda *_, **__: asyncio.run(run())}), call)


def outcome_of_copy(copy: MemoryStore, call: Call) -> Any:
    """The outcome in obstore 0.12.1, which joins ranges before it looks at the end of a value.

    So for a joined range that begins there it returns no bytes, or it panics.
    """
    try:
        found = outcome(copy, call)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return "not a range"
    return "not a range" if isinstance(found, list) and b"" in found else found


ONE_OF_EACH = filled(OtherMapping())
COPY = copied(ONE_OF_EACH)


@given(calls())
def test_replies_are_those_of_a_memory_store(call: Call) -> None:
    expected, chunks = outcome_of_copy(COPY, call), ONE_OF_EACH.as_obspec()
    if expected == "missing" and outcome(chunks, call) == "not a range":
        expected = "not a range"  # of a missing value: either is true
    assert outcome(chunks, call) == expected
    assert outcome_async(chunks, call) == expected


def test_replies_are_the_same_on_each_base_store(store: ShardingStore) -> None:
    chunks, copy = store.as_obspec(), copied(store)
    for key in [*KEYS, *MISSING]:
        reads: list[Call] = [
            ("get", (key,), {}),
            ("get", (key,), {"options": {"range": {"suffix": 3}}}),
            ("get_ranges", (key,), {"starts": [8, 0], "ends": [12, 900]}),
            ("head", (key,), {}),
        ]
        for call in reads:
            expected = outcome_of_copy(copy, call)
            assert outcome(chunks, call) == outcome_async(chunks, call) == expected
    for prefix in (None, "a", "a/z", "a/z/c", "a/z/c/1", "plain", "none"):
        lists: list[Call] = [
            ("list", (prefix,), {}),
            ("list", (prefix,), {"offset": "a/z/c/1/0"}),
            ("list_with_delimiter", (prefix,), {}),
        ]
        for call in lists:
            expected = outcome_of_copy(copy, call)
            assert outcome(chunks, call) == outcome_async(chunks, call) == expected


def test_a_directory_without_a_chunk_is_not_listed(store: ShardingStore) -> None:
    """Although a shard that could hold one exists."""
    chunks = store.as_obspec()
    chunks.delete([f"a/z/c/1/{i}" for i in range(4)])
    assert chunks.list_with_delimiter("a/z/c")["common_prefixes"] == ["a/z/c/0"]


def test_a_damaged_shard_is_reported_after_all_other_keys(tmp_path: Path) -> None:
    store = filled(str(tmp_path))
    store.close()
    (tmp_path / "a/z/c/0/0").write_bytes(b"damaged")
    chunks = ShardingStore(str(tmp_path)).as_obspec()
    found: list[str] = []

    def listed() -> None:
        for page in chunks.list("a/z"):
            found.extend(meta["path"] for meta in page)

    with pytest.raises(CorruptShardError):
        listed()
    blocking, found = found, []

    async def listed_async() -> None:
        async for page in chunks.list_async("a/z"):
            found.extend(meta["path"] for meta in page)

    with pytest.raises(CorruptShardError):
        asyncio.run(listed_async())
    assert sorted(blocking) == sorted(found)
    assert sorted(found) == ["a/z/c/0/2", "a/z/c/1/2", "a/z/zarr.json"]


def test_ranges_of_a_chunk_take_no_more_requests_than_partial_values() -> None:
    base = MemoryStore()
    filled(base)
    key, starts, ends = "a/z/c/0/0", [0, 4, 12], [4, 8, 16]
    wanted = [(key, RangeByteRequest(*pair)) for pair in zip(starts, ends, strict=True)]

    def counted(read: Callable[[ShardingStore], Any]) -> tuple[Any, int]:
        store = ShardingStore(base)
        reply = read(store)
        return [bytes(memoryview(each)) for each in reply], store.stats().requests

    def partial_values(store: ShardingStore) -> Any:
        found = sync(store.get_partial_values(default_buffer_prototype(), wanted))
        return [each.to_bytes() for each in found if each is not None]

    counted(partial_values)  # reads the metadata
    expected = counted(partial_values)
    assert len(expected[0]) == 3
    assert counted(lambda s: s.as_obspec().get_ranges(key, starts=starts, ends=ends)) == expected
    ranges = {"starts": starts, "ends": ends}
    assert counted(lambda s: sync(s.as_obspec().get_ranges_async(key, **ranges))) == expected


def test_reads_of_one_turn_are_joined() -> None:
    base = MemoryStore()
    filled(base)
    keys = [f"a/z/c/{i}/{j}" for i in range(2) for j in range(3)]

    def counted(read: Callable[[ShardingStore, str], Any]) -> int:
        store = ShardingStore(base)

        async def run() -> None:
            await asyncio.gather(*[read(store, key) for key in keys])

        sync(run())
        return store.stats().requests

    counted(lambda store, key: store.get(key))  # reads the metadata
    expected = counted(lambda store, key: store.get(key))
    assert counted(lambda store, key: store.as_obspec().get_async(key)) == expected < len(keys)
    from_0: Any = {"range": {"offset": 0}}  # as zarrista asks
    assert counted(lambda s, key: s.as_obspec().get_async(key, options=from_0)) == expected
    assert counted(lambda s, _: s.as_obspec().get_async("ab", options=from_0)) == len(keys)


def test_a_listing_takes_one_round_for_sizes_that_it_lacks() -> None:
    """Sizes of chunks are in the indexes; those of other values are asked for together."""
    base = MemoryStore()
    filled(base)
    store = ShardingStore(base)
    for prefix in ("a/z/c", "plain/c"):  # reads the metadata
        next(store.as_obspec().list(prefix))
    before = store.stats()
    assert sum(len(page) for page in store.as_obspec().list("a/z/c")) == 6
    chunks = store.stats()
    assert sum(len(page) for page in store.as_obspec().list("plain/c")) == 6
    plain = store.stats()
    assert plain.rounds - chunks.rounds <= chunks.rounds - before.rounds + 1


# ------------------------------------------------------------------------- writes


async def parts() -> Any:
    for part in (b"val", b"ue"):
        yield part


def file_of(path: Path) -> Path:
    path.write_bytes(b"value")
    return path


FILES: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda path: b"value",
    "bytearray": lambda path: bytearray(b"value"),
    "memoryview": lambda path: memoryview(b"-value")[1:],
    "array": lambda path: np.frombuffer(b"vvaalluuee", "u1")[::2],
    "file": lambda path: io.BytesIO(b"value"),
    "path": lambda path: file_of(path / "value"),
    "list": lambda path: [b"val", memoryview(b"ue")],
    "generator": lambda path: iter([b"val", b"ue"]),
    "async generator": lambda path: parts(),
}


@pytest.mark.parametrize("file", FILES)
def test_put_takes_what_obspec_allows(file: str, tmp_path: Path) -> None:
    chunks = filled({}).as_obspec()
    if file != "async generator":
        result = chunks.put("a/z/c/0/0", FILES[file](tmp_path), use_multipart=True)
        assert result == {"e_tag": None, "version": None}
        assert bytes(chunks.get("a/z/c/0/0").buffer()) == b"value"
    asyncio.run(chunks.put_async("a/z/c/2/3", FILES[file](tmp_path), max_concurrency=2))
    assert bytes(chunks.get("a/z/c/2/3").buffer()) == b"value"
    with pytest.raises(TypeError):
        chunks.put("a/z/c/0/0", "text")


def test_a_reply_can_be_put(store: ShardingStore) -> None:
    """obspec shows it: values go from one store to another."""
    chunks, other = store.as_obspec(), MemoryStore()
    other.put("x", chunks.get("a/z/c/0/0"))
    asyncio.run(chunks.put_async("a/z/c/2/2", other.get("x")))
    assert zarr.open_array(store, path="a/z", mode="r")[4, 4] == 0


def test_no_update_of_a_shard_is_lost(store: ShardingStore) -> None:
    chunks, other = store.as_obspec(), ShardingStore(store.base, {"a/z": 2}).as_obspec()
    keys = [f"a/z/c/{i}/{j}" for i in range(3) for j in range(4)]
    with ThreadPoolExecutor(6) as pool:
        done = [pool.submit((chunks, other)[i % 2].put, k, k.encode()) for i, k in enumerate(keys)]
        for each in done:
            each.result()
    assert [bytes(other.get(key).buffer()) for key in keys] == [key.encode() for key in keys]
    other.delete([*keys[1:], "a/z/c/none"] if isinstance(store.base, dict) else keys[1:])
    assert [meta["path"] for page in chunks.list("a/z/c") for meta in page] == keys[:1]


@pytest.mark.parametrize("key", ["a/z/c/2/3", "plain/c/2/3", "new.txt"])
def test_one_of_many_creates(store: ShardingStore, key: str) -> None:
    chunks = store.as_obspec()

    def create(n: int) -> str:
        try:
            chunks.put(key, b"%d" % n, mode="create")
        except FileExistsError as error:
            return type(map_exception(error)).__name__
        return str(n)

    with ThreadPoolExecutor(6) as pool:
        created = set(pool.map(create, range(6))) - {"AlreadyExistsError"}
    assert len(created) == 1
    assert bytes(chunks.get(key).buffer()) == created.pop().encode()


def test_metadata_is_created_once(store: ShardingStore) -> None:
    chunks = store.as_obspec()
    before = bytes(chunks.get("a/z/zarr.json").buffer())
    with pytest.raises(AlreadyExistsError):
        chunks.put("a/z/zarr.json", b"{}", mode="create")
    assert bytes(chunks.get("a/z/zarr.json").buffer()) == before
    chunks.put("g/zarr.json", b'{"zarr_format": 3, "node_type": "group"}', mode="create")
    assert isinstance(zarr.open_group(store, path="g", mode="r"), zarr.Group)


def test_what_a_chunk_has_not_is_refused(store: ShardingStore) -> None:
    chunks, key = store.as_obspec(), "a/z/c/0/0"
    before = bytes(chunks.get(key).buffer())
    for options in (
        {"mode": {"e_tag": "1"}},
        {"attributes": {"Content-Type": "x"}},
        {"tags": {"a": "b"}},
    ):
        with pytest.raises(UnsupportedError, match=r"update replaces values"):
            chunks.put(key, b"new", **options)
    for name in ("if_match", "if_none_match", "if_modified_since", "version", "head"):
        with pytest.raises(NotImplementedError, match=f"cannot test {name}"):
            chunks.get(key, options={name: "1"})  # type: ignore[arg-type]
    assert bytes(chunks.get(key, options={"if_match": None}).buffer()) == before
    meta = chunks.head(key)
    assert meta["e_tag"] is meta["version"] is None
    assert meta["last_modified"].utcoffset() is not None


def test_a_read_only_store_refuses_writes(store: ShardingStore) -> None:
    chunks = store.with_read_only(True).as_obspec()
    for write in (
        lambda: chunks.put("a/z/c/0/0", b"x"),
        lambda: asyncio.run(chunks.put_async("new", b"x", mode="create")),
        lambda: chunks.delete("a/z/c/0/0"),
        lambda: asyncio.run(chunks.delete_async(["a/z/c/0/0"])),
    ):
        with pytest.raises(ReadOnlyError):
            write()
    assert chunks.head("a/z/c/0/0")["size"] == 16


# -------------------------------------------------------------------------- tools


@pytest.mark.parametrize("wrapper", ["CachingReadableStore", "TracingReadableStore"])
def test_obspec_utils_wrap_it(store: ShardingStore, wrapper: str) -> None:
    wrappers = pytest.importorskip("obspec_utils.wrappers")
    protocols = pytest.importorskip("obspec_utils.protocols")
    assert isinstance(store.as_obspec(), protocols.ReadableStore)
    options = [wrappers.RequestTrace()] if wrapper.startswith("Tracing") else []
    wrapped = getattr(wrappers, wrapper)(store.as_obspec(), *options)
    expected = bytes(store.as_obspec().get("a/z/c/0/0").buffer())
    for _ in range(2):
        assert bytes(wrapped.get("a/z/c/0/0").buffer()) == expected
        assert (
            bytes(asyncio.run(wrapped.get_range_async("a/z/c/0/0", start=1, end=5)))
            == expected[1:5]
        )


def test_obspec_utils_read_a_value_as_a_file(store: ShardingStore) -> None:
    readers = pytest.importorskip("obspec_utils.readers")
    for reader in (readers.BufferedStoreReader, readers.EagerStoreReader, readers.BlockStoreReader):
        file = reader(store.as_obspec(), "b/notes.txt")
        file.seek(2)
        assert file.read(3) == b"234"


READ_AND_WRITTEN = np.where((np.indices(SHAPE)[0] < 4) & (np.indices(SHAPE)[1] < 6), VALUES, -1)
ONLY_ITS_OWN = pytest.mark.xfail(
    strict=True,
    raises=TypeError,
    reason="zarrista 0.1.0 opens stores of its own, of obstore and of icechunk only: its pull "
    "request 105 reads from objects with the methods of obspec",
)


@ONLY_ITS_OWN
@pytest.mark.parametrize("way", ["Array", "AsyncArray"])
def test_zarrista_reads_an_array(way: str, tmp_path: Path) -> None:
    """The pull request wraps an object in ``ObspecStore``, or takes it as it is."""
    zarrista = pytest.importorskip("zarrista")
    wrap = getattr(zarrista.store, "ObspecStore", lambda chunks: chunks)
    chunks = wrap(filled(str(tmp_path)).as_obspec())
    if way == "Array":
        found = zarrista.Array.open(chunks, "/a/z").retrieve_array_subset(...)
    else:

        async def read() -> Any:
            array = await zarrista.AsyncArray.open(chunks, "/a/z")
            return await array.retrieve_array_subset(...)

        found = asyncio.run(read())
    np.testing.assert_array_equal(found.to_numpy(), READ_AND_WRITTEN)


def test_what_zarrista_will_ask_is_answered(store: ShardingStore) -> None:
    """Its pull request reads documents and chunks by an offset of 0, and parts by `get_ranges`.

    It takes a missing value from `FileNotFoundError`, and buffers from their protocol.
    """
    chunks = store.as_obspec()
    document = chunks.get("a/z/zarr.json", options={"range": {"offset": 0}}).buffer()
    assert b'"node_type"' in bytes(document)
    (part,) = chunks.get_ranges("a/z/c/0/0", starts=[4], ends=[8])
    view = memoryview(part)
    assert view.format == "B"
    assert view.c_contiguous
    assert np.frombuffer(view, "i4").tolist() == [1]
    with pytest.raises(FileNotFoundError):
        chunks.get("a/z/c/2/3", options={"range": {"offset": 0}})


@pytest.mark.xfail(
    strict=True,
    raises=TypeError,
    reason="ObjectStore of zarr takes classes of the module obstore only, up to 3.4.2: "
    "zarr-python's pull request 3698 takes objects with the async methods of obspec",
)
def test_object_store_of_zarr_takes_it() -> None:
    store = ObjectStore(filled({}).as_obspec())  # type: ignore[type-var]
    np.testing.assert_array_equal(zarr.open_array(store, path="a/z", mode="r")[:], READ_AND_WRITTEN)


def methodcaller_on(name: str) -> Callable[..., Any]:
    """A function like obstore's: the store comes first."""
    return lambda store, *arguments, **options: getattr(store, name)(*arguments, **options)


def test_object_store_of_zarr_could_use_it(
    store: ShardingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zarr's code runs on our methods, in place of the functions of obstore, and past its check."""
    chunks = store.as_obspec()
    methods = ["get", "get_range", "get_ranges", "head", "put", "delete", "list_with_delimiter"]

    class Listing:
        def __init__(self, prefix: str | None) -> None:
            self._pages = chunks.list_async(prefix)

        def __aiter__(self) -> Any:
            return self._pages

        async def collect_async(self) -> Any:
            return [meta async for page in self._pages for meta in page]

    client = SimpleNamespace(
        **{f"{n}_async": methodcaller_on(f"{n}_async") for n in methods},
        list=lambda _, prefix=None: Listing(prefix),
        exceptions=SimpleNamespace(
            AlreadyExistsError=AlreadyExistsError, NotSupportedError=UnsupportedError
        ),
    )
    monkeypatch.setitem(sys.modules, "obstore", client)
    over: Any = ObjectStore.__new__(ObjectStore)
    Store.__init__(over, read_only=False)
    over.store = chunks
    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}):
        z = zarr.open_array(over, path="a/z")
        np.testing.assert_array_equal(z[:], READ_AND_WRITTEN)
        z[:] = VALUES
        z.resize((6, 4))
        group = zarr.open_group(over, path="a")
        assert sorted(group) == ["z"]
        group.create_array("new", shape=(4,), chunks=(2,), dtype="u1")[:] = 7
        del group["new"]
    monkeypatch.undo()
    np.testing.assert_array_equal(zarr.open_array(store, path="a/z", mode="r")[:], VALUES[:, :4])
    assert sorted(zarr.open_group(store, path="a", mode="r")) == ["z"]
    assert store.shard_shape("a/z") == (4, 4)
