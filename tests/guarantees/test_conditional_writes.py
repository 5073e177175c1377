"""Optimistic updates on obstore: nobody overwrites what he has not read."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError, NotSupportedError, PreconditionError
from obstore.store import MemoryStore
from zarr.storage import ObjectStore

from zarr_shardstore import ShardConflictError, ShardingMapping
from zarr_shardstore.format.ranges import Range, StartFrom, Suffix
from zarr_shardstore.io import driver
from zarr_shardstore.io.backends import obstore as obstore_backend
from zarr_shardstore.io.backends.obstore import ObstoreBackend
from zarr_shardstore.shards.requests import Found, Get

KEYS = [f"data/root/a/c{i}" for i in range(4)]
SHARD = "data/root/a/c0"

Put = Callable[..., Awaitable[object]]


def mapping(base: Any) -> ShardingMapping:
    return ShardingMapping(ObjectStore(base), chunks_per_shard=4)


def without_queue() -> Any:
    """Stores of this process as if they were of different ones."""
    return mock.patch.object(ObstoreBackend, "scope", lambda self, key: (id(self), key))


def instead_of_put(put: Callable[[Put, ObstoreBackend, Any, str, Any], Awaitable[object]]) -> Any:
    """Something else is done where an object is stored with a condition."""
    real = ObstoreBackend._put_with

    async def stand_in(self: ObstoreBackend, mode: Any, key: str, value: Any) -> object:
        return await put(real, self, mode, key, value)

    return mock.patch.object(ObstoreBackend, "_put_with", stand_in)


def others_first(
    ours: ShardingMapping, theirs: ShardingMapping, left: list[str], error: Exception | None = None
) -> Any:
    """Before a write of `ours` is sent the others set one of the keys that are left; with an error
    it is not sent then."""

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        if left and self is ours._engine.driver.backend:
            flow = theirs._engine.operations.set_many([(left.pop(), b"theirs")])
            await theirs._engine.driver.run_async(flow)
            if error is not None:
                raise error
        return await real(self, mode, key, value)

    return instead_of_put(put)


def quick_retries() -> Any:
    return mock.patch.object(obstore_backend, "_LONGEST_PAUSE_S", 0.001)


# --------------------------------------------------------------------- conflicts


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("n_times", [1, 3])
def test_another_writer_between_read_and_write(is_there: bool, n_times: int) -> None:
    """The update begins anew: what both wrote is there."""
    base = MemoryStore()
    ours, theirs = mapping(base), mapping(base)
    if is_there:
        ours[KEYS[0]] = b"old"
    left = list(range(n_times))

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        if left and self is ours._engine.driver.backend:
            n = left.pop()
            flow = theirs._engine.operations.set_many([(KEYS[1 + n % 2], f"theirs {n}".encode())])
            await theirs._engine.driver.run_async(flow)
        return await real(self, mode, key, value)

    with without_queue(), instead_of_put(put):
        ours[KEYS[3]] = b"ours"
    assert not left
    expected = {KEYS[1]: b"theirs 0", KEYS[3]: b"ours"}
    if n_times == 3:
        expected[KEYS[2]] = b"theirs 1"
    if is_there:
        expected[KEYS[0]] = b"old"
    assert dict(mapping(base)) == expected


def test_a_shard_that_is_emptied_while_another_writes() -> None:
    """It is not removed: it may be another one by then."""
    base = MemoryStore()
    ours, theirs = mapping(base), mapping(base)
    ours[KEYS[0]] = b"old"
    left = [KEYS[1]]
    with without_queue(), others_first(ours, theirs, left):
        del ours[KEYS[0]]
    assert not left
    assert dict(mapping(base)) == {KEYS[1]: b"theirs"}


def test_another_writer_while_a_batch_is_published() -> None:
    """Each attempt takes what the batch holds."""
    base = MemoryStore()
    ours, theirs = mapping(base), mapping(base)
    ours[KEYS[0]] = b"old"
    left = [KEYS[1], KEYS[2]]
    with without_queue(), others_first(ours, theirs, left):
        with ours.batch():
            ours[KEYS[3]] = b"ours"
            del ours[KEYS[0]]
        assert not left
    assert dict(mapping(base)) == {
        KEYS[1]: b"theirs",
        KEYS[2]: b"theirs",
        KEYS[3]: b"ours",
    }


def test_an_emptied_shard_holds_nothing() -> None:
    """An object stays, no key does; it is written to again."""
    base = MemoryStore()
    m = mapping(base)
    m[KEYS[0]] = b"old"
    del m[KEYS[0]]
    assert list(m) == []
    assert KEYS[0] not in m
    m[KEYS[1]] = b"new"
    assert dict(m) == {KEYS[1]: b"new"}


def test_who_always_comes_late_gets_an_error() -> None:
    """Nothing is stored then, and the next write works."""
    base = MemoryStore()
    m = mapping(base)
    m[KEYS[0]] = b"old"

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        await obstore.put_async(base, SHARD, stored)  # the same bytes, another version
        return await real(self, mode, key, value)

    stored = obstore.get(base, SHARD).bytes().to_bytes()
    with (
        mock.patch.object(driver, "MAX_CONFLICT_S", 0.05),
        instead_of_put(put),
        pytest.raises(ShardConflictError, match="not written"),
    ):
        m[KEYS[1]] = b"new"
    assert dict(m) == {KEYS[0]: b"old"}
    m[KEYS[1]] = b"new"
    assert m[KEYS[1]] == b"new"


def test_a_reply_that_was_lost() -> None:
    """The write took effect, its repetition by the client was refused: that is a success."""
    m = mapping(MemoryStore())
    puts = []

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        puts.append(mode)
        await real(self, mode, key, value)
        raise PreconditionError("the object is another one")

    for i, key in enumerate(KEYS):
        with instead_of_put(put):
            m[key] = str(i).encode()
    assert len(puts) == 4
    assert dict(m) == {key: str(i).encode() for i, key in enumerate(KEYS)}


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("n_failures", [1, 3])
def test_a_connection_that_is_lost(n_failures: int, is_stored: bool) -> None:
    """Before the write took effect, or after it: it is looked at what is there, and sent again."""
    m = mapping(MemoryStore())
    left = 0
    n_sent = 0

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        nonlocal left, n_sent
        n_sent += 1
        if not left:
            return await real(self, mode, key, value)
        left -= 1
        if is_stored:
            await real(self, mode, key, value)
        raise GenericError("connection reset by peer")

    m[KEYS[0]] = b"old"
    with instead_of_put(put), quick_retries():
        for key in KEYS:
            left, n_sent = n_failures, 0
            m[key] = key.encode()
            assert n_sent <= 2 + n_failures  # one of them may be the probe
    assert dict(m) == {key: key.encode() for key in KEYS}


def test_a_server_that_always_fails() -> None:
    """The caller gets its error after a few attempts, and nothing is changed."""
    m = mapping(MemoryStore())
    m[KEYS[0]] = b"old"
    sent = []

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        sent.append(key)
        raise GenericError("out of order")

    with instead_of_put(put), quick_retries(), pytest.raises(GenericError, match="out of order"):
        m[KEYS[1]] = b"new"
    assert 1 < len(sent) < 10
    assert dict(m) == {KEYS[0]: b"old"}


def test_a_connection_that_is_lost_while_another_writes() -> None:
    """What both wrote is there."""
    base = MemoryStore()
    ours, theirs = mapping(base), mapping(base)
    ours[KEYS[0]] = b"old"
    left = [KEYS[1]]
    lost = GenericError("connection reset by peer")
    with without_queue(), others_first(ours, theirs, left, lost), quick_retries():
        ours[KEYS[3]] = b"ours"
    assert not left
    assert dict(mapping(base)) == {KEYS[0]: b"old", KEYS[1]: b"theirs", KEYS[3]: b"ours"}


# ------------------------------------------------------------------------ stores


def test_a_store_that_ignores_conditions() -> None:
    """One warning; then it is written to without conditions."""

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        return await real(self, "overwrite", key, value)

    m = mapping(MemoryStore())
    with instead_of_put(put):
        m[KEYS[0]] = b"0"
        with pytest.warns(UserWarning, match="one writer"):
            m[KEYS[2]] = b"2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m[KEYS[1]] = b"1"
        del m[KEYS[0]]
        del m[KEYS[1]]
    assert dict(m) == {KEYS[2]: b"2"}


def test_a_store_without_etags() -> None:
    """Its shards are replaced without conditions, after a warning."""
    base = MemoryStore()
    ours = mapping(base)
    with mock.patch.object(obstore_backend, "_version_of", return_value=None):
        ours[KEYS[0]] = b"old"
        with pytest.warns(UserWarning, match="has no ETags.*one writer"):
            ours[KEYS[1]] = b"new"
        ours[KEYS[2]] = b"newer"  # warnings are errors here
        del ours[KEYS[0]]
        assert dict(ours) == {KEYS[1]: b"new", KEYS[2]: b"newer"}
    assert dict(mapping(base)) == {KEYS[1]: b"new", KEYS[2]: b"newer"}


def test_a_store_that_wants_etags_without_quotes() -> None:
    """Ceph compares what stands in the quotes."""

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        if isinstance(mode, dict):
            if '"' in mode["e_tag"]:
                raise PreconditionError("quotes")
            mode = {"e_tag": f'"{mode["e_tag"]}"'}
        return await real(self, mode, key, value)

    m = mapping(MemoryStore())
    with instead_of_put(put):
        for i, key in enumerate(KEYS):
            m[key] = str(i).encode()
    assert dict(m) == {key: str(i).encode() for i, key in enumerate(KEYS)}


def test_it_probes_once_and_stores_nothing_by_it() -> None:
    """The first update is followed by a write that must fail; new shards cost one request."""
    modes = []

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        modes.append(mode)
        return await real(self, mode, key, value)

    base = MemoryStore()
    m = mapping(base)
    with instead_of_put(put):
        for key in KEYS[:3]:
            m[key] = b"0"
    never = {"e_tag": '"' + "0" * 32 + '"'}
    assert modes == ["create", {"e_tag": '"0"'}, never, {"e_tag": '"1"'}]
    assert obstore.head(base, SHARD)["e_tag"] == '"2"'


# ------------------------------------------------------------------------- reads


@given(
    nbytes=st.integers(0, 6),
    byte_range=st.one_of(
        st.none(),
        st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda p: Range(min(p), max(p))),
        st.integers(0, 8).map(StartFrom),
        st.integers(0, 8).map(Suffix),
    ),
)
async def test_ranges(nbytes: int, byte_range: Any) -> None:
    """The bytes that a slice of the value gives, with the version and the size of the object."""
    base = MemoryStore()
    value = bytes(range(nbytes))
    obstore.put(base, "k", value)
    (found,) = await ObstoreBackend(ObjectStore(base)).perform_async([Get("k", byte_range)])
    match byte_range:
        case None:
            expected = value
        case Range(start, stop):
            expected = value[start:stop]
        case StartFrom(start):
            expected = value[start:]
        case Suffix(n):
            expected = value[-n:] if n else b""
    assert found.value == expected
    assert found.size in (None, nbytes)


async def test_a_missing_object() -> None:
    """It has no value and no version."""
    backend = ObstoreBackend(ObjectStore(MemoryStore()))
    assert await backend.perform_async([Get("k")]) == [Found(None, None)]


class Azure(ObstoreBackend):
    """It has no suffix ranges; between the size and the bytes another writer comes by."""

    replacements: list[bytes | None]

    async def _get_once(self, key: str, byte_range: Any) -> Found:
        if isinstance(byte_range, Suffix):
            raise NotSupportedError("suffix ranges")
        if self.replacements:
            value = self.replacements.pop(0)
            if value is None:
                obstore.delete(self.store.store, key)
            else:
                obstore.put(self.store.store, key, value)
        return await super()._get_once(key, byte_range)


@pytest.mark.parametrize(
    ("replacements", "expected"),
    [
        ([], b"-old"),
        ([b"shorter-one"], b"-one"),
        ([b"a much longer one than before-two"], b"-two"),
        ([b"1"], b"1"),
        ([b""], b""),
        ([None], None),
        ([b"shorter-one", b"longer than that-two", b"3-three"], b"hree"),
    ],
)
async def test_the_end_of_an_object_that_is_replaced(
    replacements: list[bytes | None], expected: bytes | None
) -> None:
    """It is that of one state of the object, with its version."""
    base = MemoryStore()
    obstore.put(base, "k", b"this is the-old")
    backend = Azure(ObjectStore(base))
    backend.replacements = replacements
    (found,) = await backend.perform_async([Get("k", Suffix(4))])
    assert found.value == expected
    if found.version is not None:
        assert found.version.etag == obstore.head(base, "k")["e_tag"]


async def test_the_end_of_what_is_not_there() -> None:
    """A missing object, also where suffix ranges are not supported."""
    backend = Azure(ObjectStore(MemoryStore()))
    backend.replacements = []
    assert await backend.perform_async([Get("k", Suffix(4))]) == [Found(None, None)]


def test_a_shard_replaced_between_index_and_entry_is_read_again() -> None:
    """Also if another process does it: the versions differ."""
    base, other = MemoryStore(), MemoryStore()
    m, n = mapping(base), mapping(other)
    for key in KEYS:
        m[key] = b"long " + key.encode()
        n[key] = key.encode()
    replacement = obstore.get(other, SHARD).bytes().to_bytes()
    real = ObstoreBackend._get_once
    n_gets = 0

    async def get(self: Any, key: str, byte_range: Any) -> Found:
        nonlocal n_gets
        n_gets += 1
        found = await real(self, key, byte_range)
        if n_gets == 1:
            obstore.put(base, SHARD, replacement)
        return found

    with mock.patch.object(ObstoreBackend, "_get_once", get):
        assert m[KEYS[2]] == KEYS[2].encode()
    assert n_gets > 2
