"""Optimistic updates on obstore: nobody overwrites what he has not read."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import numpy as np
import obstore
import pytest
import zarr
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
)
from obstore.store import MemoryStore
from zarr.storage import ObjectStore

from tests.support.kit import forget, tuned
from tests.support.shard_bytes import build_shard, places_in
from zarr_shardstore import (
    CorruptShardError,
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    UnsupportedError,
)

KEYS = [f"data/root/a/c{i}" for i in range(4)]
SHARD = "data/root/a/c0"

Put = Callable[..., Awaitable[object]]


def mapping(base: Any) -> ShardingMapping:
    return ShardingMapping(ObjectStore(base), chunks_per_shard=4)


def instead_of_put(put: Callable[[Put, Any, Any, str, Any], Awaitable[object]]) -> Any:
    """Something else is done where an object is stored with a condition."""
    put_async = obstore.put_async

    async def stand_in(
        store: Any, key: str, value: Any, mode: Any = None, **options: Any
    ) -> object:
        if mode is None:
            return await put_async(store, key, value, **options)

        async def real(store: Any, mode: Any, key: str, value: Any) -> object:
            return await put_async(store, key, value, mode=mode, **options)

        return await put(real, store, mode, key, value)

    return mock.patch.object(obstore, "put_async", stand_in)


def set_elsewhere(base: MemoryStore, key: str, value: bytes) -> None:
    """Set a chunk as a process on another host does it."""
    values: dict[int, bytes] = {}
    with suppress(FileNotFoundError):
        shard = obstore.get(base, SHARD).bytes().to_bytes()
        places = places_in(shard, 4, checksum=False)
        values = {i: shard[p[0] : sum(p)] for i, p in enumerate(places) if p is not None}
    values[KEYS.index(key)] = value
    obstore.put(base, SHARD, build_shard(values, 4, checksum=False))


def others_first(base: MemoryStore, left: list[str], error: Exception | None = None) -> Any:
    """Before a write is sent the others set one of the keys that are left; with an error it is not
    sent then."""

    async def put(real: Put, store: Any, mode: Any, key: str, value: Any) -> object:
        if left:
            set_elsewhere(base, left.pop(), b"theirs")
            if error is not None:
                raise error
        return await real(store, mode, key, value)

    return instead_of_put(put)


def quick_retries() -> Any:
    return tuned(conflict_pause_s=0.001)


# --------------------------------------------------------------------- conflicts


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("n_times", [1, 3])
def test_another_writer_between_read_and_write(is_there: bool, n_times: int) -> None:
    """The update begins anew: what both wrote is there."""
    base = MemoryStore()
    ours = mapping(base)
    if is_there:
        ours[KEYS[0]] = b"old"
    left = list(range(n_times))

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        if left:
            n = left.pop()
            set_elsewhere(base, KEYS[1 + n % 2], f"theirs {n}".encode())
        return await real(self, mode, key, value)

    with instead_of_put(put):
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
    ours = mapping(base)
    ours[KEYS[0]] = b"old"
    left = [KEYS[1]]
    with others_first(base, left):
        del ours[KEYS[0]]
    assert not left
    assert dict(mapping(base)) == {KEYS[1]: b"theirs"}


def test_another_writer_while_a_batch_is_published() -> None:
    """Each attempt takes what the batch holds."""
    base = MemoryStore()
    ours = mapping(base)
    ours[KEYS[0]] = b"old"
    left = [KEYS[1], KEYS[2]]
    with others_first(base, left):
        with ours.batch():
            ours[KEYS[3]] = b"ours"
            del ours[KEYS[0]]
        assert not left
    assert dict(mapping(base)) == {
        KEYS[1]: b"theirs",
        KEYS[2]: b"theirs",
        KEYS[3]: b"ours",
    }


def with_an_array(size: int) -> tuple[MemoryStore, Any]:
    """A store of one shard of four chunks of ones, and the array."""
    base = MemoryStore()
    options: Any = {"chunks": (size // 4,), "dtype": "i4", "compressors": None}
    z: Any = zarr.create_array(ShardingStore(ObjectStore(base), 4), shape=(size,), **options)
    z[:] = 1
    return base, z


@pytest.mark.parametrize("n_before", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "theirs", "value"), [(65536, slice(16384, 49152), 3), (256, slice(0, 192), 0)]
)
def test_another_writer_before_a_part_of_a_chunk_is_read_for_a_batch(
    size: int, theirs: slice, value: int, n_before: int
) -> None:
    """The cached index of the former shard ends no attempt. If the shard became shorter, a range
    after its end is no sign of a store without versions."""
    (base, _), (other, z) = with_an_array(size), with_an_array(size)
    z[theirs] = value
    shard = obstore.get(other, "c/0").bytes().to_bytes()
    store = ShardingStore(ObjectStore(base))
    ours: Any = zarr.open_array(store)
    assert ours[0] == 1  # the index is cached
    real, n_gets = obstore.get_async, 0

    async def get(*args: Any, **options: Any) -> Any:
        nonlocal n_gets
        n_gets += args[1] == "c/0"
        if n_gets == n_before + 1:
            obstore.put(base, "c/0", shard)
        return await real(*args, **options)

    begin = size * 3 // 4  # of the last chunk
    with warnings.catch_warnings(), tuned(conflict_wait_s=2):
        warnings.simplefilter("error")
        with mock.patch.object(obstore, "get_async", get), store.batch():
            ours[begin : begin + 2] = 7
    assert n_gets > n_before
    assert [*ours[begin - 2 : begin + 3]] == [value, value, 7, 7, 1]
    assert [*ours[theirs.start : theirs.start + 2]] == [value, value]


def test_an_object_without_bytes_does_not_end_the_conditions() -> None:
    """S3 has no range of it."""
    base = MemoryStore()
    store = ShardingStore(ObjectStore(base), 4)
    z: Any = zarr.create_array(store, shape=(32,), chunks=(4,), dtype="i4")
    z[:] = 1
    obstore.put(base, "c/0", b"")
    real = obstore.get_async

    async def get(*args: Any, **options: Any) -> Any:
        if args[1] == "c/0" and "range" in (options.get("options") or {}):
            raise GenericError("416 Range Not Satisfiable")
        return await real(*args, **options)

    with warnings.catch_warnings(), mock.patch.object(obstore, "get_async", get):
        warnings.simplefilter("error")
        with pytest.raises(CorruptShardError):
            z[:4] = 0
        with pytest.raises(CorruptShardError):
            z[:4] = 3


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
        tuned(conflict_wait_s=0.05),
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
    ours = mapping(base)
    ours[KEYS[0]] = b"old"
    left = [KEYS[1]]
    lost = GenericError("connection reset by peer")
    with others_first(base, left, lost), quick_retries():
        ours[KEYS[3]] = b"ours"
    assert not left
    assert dict(mapping(base)) == {KEYS[0]: b"old", KEYS[1]: b"theirs", KEYS[3]: b"ours"}


@pytest.mark.parametrize("erases", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_write_of_a_whole_shard_that_arrives_again(
    is_known: bool, is_there: bool, erases: bool
) -> None:
    """It has a condition, so it changes no later shard: a client may have sent it twice."""
    base = MemoryStore()
    ours = mapping(base)
    if is_there:
        with ours.batch():
            ours.update(dict.fromkeys(KEYS, b"old"))
    if not is_known:
        forget()
    sent: list[tuple[Any, Any]] = []

    async def put(real: Put, store: Any, mode: Any, key: str, value: Any) -> object:
        sent.append((mode, value))
        return await real(store, mode, key, value)

    with instead_of_put(put), ours.batch():
        for key in KEYS:
            if erases:
                ours.erase_values([key])
            else:
                ours[key] = b"ours"
    assert dict(ours) == ({} if erases else dict.fromkeys(KEYS, b"ours"))
    assert bool(sent) == (is_there or not erases)
    mapping(base)[KEYS[1]] = b"later"
    for mode, value in sent:
        with pytest.raises((AlreadyExistsError, PreconditionError)):
            obstore.put(base, SHARD, value, mode=mode)
    assert mapping(base)[KEYS[1]] == b"later"


def test_whole_shards_cost_few_requests() -> None:
    """The first one of a new array is asked for; known ones are replaced at once."""
    base = MemoryStore()
    z = zarr.create_array(
        ShardingStore(ObjectStore(base), 4), shape=(400,), chunks=(1,), dtype="u1"
    )
    with mock.patch.object(obstore, "get_async", wraps=obstore.get_async) as asked:
        z[:4] = 1
        assert asked.call_count == 1
        z[4:] = 1
        z[:] = 2
        assert asked.call_count == 1
        forget()
        z[:200] = 3
        assert asked.call_count == 51
    assert (np.asarray(z[:]) == np.repeat([3, 2], 200)).all()


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


def with_meta(change: Callable[[Any], dict[str, Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a read of obstore whose replies have some other metadata."""
    get_async = obstore.get_async

    async def get(*args: Any, **options: Any) -> Any:
        reply = await get_async(*args, **options)
        read = mock.AsyncMock(return_value=await reply.bytes_async())
        meta = {**reply.meta, **change(reply.meta)}
        return mock.Mock(meta=meta, bytes_async=read, attributes=reply.attributes)

    return get


@contextmanager
def other_etags(change: Callable[[Any], str | None]) -> Iterator[None]:
    """Replies of a server or a proxy that sends none, or changes them."""
    get = with_meta(lambda meta: {"e_tag": change(meta["e_tag"])})
    put_async = obstore.put_async

    async def put(*args: Any, **options: Any) -> Any:
        reply = await put_async(*args, **options)
        return {**reply, "e_tag": change(reply["e_tag"])}

    with mock.patch.multiple(obstore, get_async=get, put_async=put):
        yield


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda etag: None, "has no ETags"), (lambda etag: f"W/{etag}", "has weak ETags only")],
    ids=["none", "weak"],
)
def test_a_store_without_etags(change: Callable[[str], str | None], why: str) -> None:
    """Its shards are replaced without conditions, after a warning."""
    base = MemoryStore()
    ours = mapping(base)
    with other_etags(change):
        ours[KEYS[0]] = b"old"
        with pytest.warns(UserWarning, match=f"{why}.*one writer"):
            ours[KEYS[1]] = b"new"
        ours[KEYS[2]] = b"newer"  # warnings are errors here
        del ours[KEYS[0]]
        assert dict(ours) == {KEYS[1]: b"new", KEYS[2]: b"newer"}
    assert dict(mapping(base)) == {KEYS[1]: b"new", KEYS[2]: b"newer"}


def test_generations_are_the_condition_on_gcs() -> None:
    """Its client takes no ETag as a condition."""
    put_async = obstore.put_async

    def generation(etag: Any) -> str:
        return "1" + str(etag).strip('"')

    get = with_meta(lambda meta: {"version": generation(meta["e_tag"])})

    async def put(*args: Any, **options: Any) -> Any:
        mode = options.get("mode")
        if isinstance(mode, dict):
            if "version" not in mode:
                raise GenericError("Version required for conditional update")
            if mode["version"] == "0":
                raise PreconditionError("there is one")
            options["mode"] = {"e_tag": f'"{mode["version"][1:]}"'}
        reply = await put_async(*args, **options)
        return {**reply, "version": generation(reply["e_tag"])}

    base = MemoryStore()
    with mock.patch.multiple(obstore, get_async=get, put_async=put):
        for value in (b"0", b"1"):
            forget()
            ours = mapping(base)
            with ours.batch():
                ours.update(dict.fromkeys(KEYS, value))
            mapping(base)[KEYS[1]] = b"part"
    assert dict(mapping(base)) == {**dict.fromkeys(KEYS, b"1"), KEYS[1]: b"part"}


@pytest.mark.parametrize(
    "error",
    [NotImplementedError("conditional_put"), GenericError("status code: 501 Not Implemented")],
)
def test_a_server_that_knows_no_conditions_is_written_to_without(error: Exception) -> None:
    async def put(real: Put, store: Any, mode: Any, key: str, value: Any) -> object:
        raise error

    base = MemoryStore()
    ours = mapping(base)
    with (
        instead_of_put(put),
        pytest.warns(UserWarning, match="takes no conditions.*one writer"),
        ours.batch(),
    ):
        ours.update(dict.fromkeys(KEYS, b"0"))
    assert dict(mapping(base)) == dict.fromkeys(KEYS, b"0")


def test_a_slow_upload_does_not_end_the_conditions() -> None:
    """S3 replies 400 to it. The store still refuses what it has not read."""
    base = MemoryStore()
    ours = mapping(base)
    ours[KEYS[0]] = b"old"
    left = [1]

    async def put(real: Put, store: Any, mode: Any, key: str, value: Any) -> object:
        if left:
            left.pop()
            raise GenericError("status code: 400 Bad Request: RequestTimeout")
        return await real(store, mode, key, value)

    with instead_of_put(put), quick_retries():
        ours[KEYS[1]] = b"new"
    assert not left
    with others_first(base, [KEYS[2]]):
        ours[KEYS[3]] = b"last"
    expected = {KEYS[0]: b"old", KEYS[1]: b"new", KEYS[2]: b"theirs", KEYS[3]: b"last"}
    assert dict(mapping(base)) == expected


def test_a_missing_shard_may_be_forbidden() -> None:
    """S3 says so to those who may not list."""
    get_async = obstore.get_async

    async def get(*args: Any, **options: Any) -> Any:
        try:
            return await get_async(*args, **options)
        except FileNotFoundError as error:
            raise PermissionDeniedError(str(error)) from None

    base = MemoryStore()
    ours = mapping(base)
    with mock.patch.object(obstore, "get_async", get), ours.batch():
        ours.update(dict.fromkeys(KEYS, b"0"))
    assert dict(mapping(base)) == dict.fromkeys(KEYS, b"0")


def test_erased_arrays_leave_no_known_versions() -> None:
    """An array that is made anew costs one look and its writes."""
    store = ShardingStore(ObjectStore(MemoryStore()), 4)
    for _ in range(2):
        z = zarr.create_array(
            store, name="a", shape=(400,), chunks=(1,), dtype="u1", overwrite=True
        )
        z[:4] = 1
        with mock.patch.object(obstore, "put_async", wraps=obstore.put_async) as puts:
            z[4:] = 1
        assert puts.call_count == 99


def test_a_proxy_that_changes_etags_is_named() -> None:
    """As Apache does when it compresses replies: no write is taken."""
    base = MemoryStore()
    mapping(base)[KEYS[0]] = b"old"
    with (
        other_etags(lambda etag: etag[:-1] + '-gzip"'),
        tuned(conflict_pause_s=0.001, refused_s=0.05),
        pytest.raises(UnsupportedError, match=r"-gzip.*Connect to the server directly"),
    ):
        mapping(base)[KEYS[1]] = b"new"
    assert dict(mapping(base)) == {KEYS[0]: b"old"}


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


def test_a_refusal_for_nothing_spoils_no_later_write() -> None:
    """A server may refuse (409) while another write is under way; it still wants quotes."""
    refusals = [1]

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        if isinstance(mode, dict) and ('"' not in mode["e_tag"] or (refusals and refusals.pop())):
            raise PreconditionError("a conflicting write is under way")
        return await real(self, mode, key, value)

    m = mapping(MemoryStore())
    with quick_retries(), instead_of_put(put):
        for i, key in enumerate(KEYS):
            m[key] = str(i).encode()
    assert not refusals
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


def test_a_probe_whose_reply_is_lost_is_repeated() -> None:
    """Of a server that ignores conditions: the process would never know, and warn of nothing."""
    lost = [1]

    async def put(real: Put, self: Any, mode: Any, key: str, value: Any) -> object:
        reply = await real(self, "overwrite" if isinstance(mode, dict) else mode, key, value)
        if isinstance(mode, dict) and "0000" in mode["e_tag"] and lost:
            lost.pop()
            raise GenericError("reset")
        return reply

    m = mapping(MemoryStore())
    with instead_of_put(put):
        m[KEYS[0]] = m[KEYS[1]] = b"0"
        with pytest.warns(UserWarning, match="ignores the conditions"):
            m[KEYS[2]] = b"0"
    assert dict(m) == dict.fromkeys(KEYS[:3], b"0")


# ------------------------------------------------------------------------- reads


def test_a_shard_replaced_between_index_and_entry_is_read_again() -> None:
    """Also if another process does it: the versions differ."""
    base, other = MemoryStore(), MemoryStore()
    m, n = mapping(base), mapping(other)
    for key in KEYS:
        m[key] = b"long " + key.encode()
        n[key] = key.encode()
    replacement = obstore.get(other, SHARD).bytes().to_bytes()
    real = obstore.get_async
    n_gets = 0

    async def get(*args: Any, **options: Any) -> Any:
        nonlocal n_gets
        n_gets += 1
        found = await real(*args, **options)
        if n_gets == 1:
            obstore.put(base, SHARD, replacement)
        return found

    with mock.patch.object(obstore, "get_async", get):
        assert m[KEYS[2]] == KEYS[2].encode()
    assert n_gets > 2
