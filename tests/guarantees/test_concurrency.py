"""Threads and tasks of one process that share shards: nothing is lost, nothing is mixed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import random
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from tests.support.async_calls import set_partial_values
from tests.support.bases import BASES, fsspec_memory
from tests.support.kit import objects_of, wait_until_idle
from zarr_shardstore import ShardConflictError, ShardingMapping, ShardingStore, SpecError

PROTOTYPE = default_buffer_prototype()
COORDS = [(i, j) for i in range(8) for j in range(8)]


def key(i: int, j: int) -> str:
    return f"data/root/a/c{i}/{j}"


def value(i: int, j: int, n: int = 0) -> bytes:
    return f"{i},{j},{n};".encode() * (1 + (i + j + n) % 5)


def buffer(data: bytes) -> Buffer:
    return cpu.Buffer.from_bytes(data)


@pytest.fixture(params=list(BASES))
def base(request: pytest.FixtureRequest) -> Any:
    return BASES[request.param]()


@pytest.fixture(autouse=True)
def _no_queue_is_left() -> Iterable[None]:
    """Whatever happened, no shard stays held."""
    yield
    wait_until_idle()


def assert_all_there(base: Any, n: int = 0) -> None:
    m = ShardingMapping(base, chunks_per_shard=(4, 4))
    assert {k: m[k] for k in m} == {key(*c): value(*c, n) for c in COORDS}


def test_threads_lose_nothing(base: Any) -> None:
    """8 threads write the chunks of 4 shards in random order, through 8 stores."""
    for n in range(3):
        coords = random.Random(n).sample(COORDS, len(COORDS))

        def write(part: list[tuple[int, int]], n: int = n) -> None:
            m = ShardingMapping(base, chunks_per_shard=(4, 4))
            for c in part:
                m[key(*c)] = value(*c, n)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, [coords[i::8] for i in range(8)]))
        assert_all_there(base, n)


async def test_tasks_lose_nothing(base: Any) -> None:
    """64 tasks, one chunk each."""
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    await asyncio.gather(*(store.set(key(*c), buffer(value(*c))) for c in COORDS))
    assert_all_there(base)


def test_threads_and_tasks_together(base: Any) -> None:
    """Blocking and async writers of the same shards."""
    mapping = ShardingMapping(base, chunks_per_shard=(4, 4))
    store = ShardingStore(base, chunks_per_shard=(4, 4))

    async def write_async() -> None:
        for c in COORDS[::2]:
            await store.set(key(*c), buffer(value(*c)))

    def write_blocking() -> None:
        for c in COORDS[1::2]:
            mapping[key(*c)] = value(*c)

    thread = threading.Thread(target=write_blocking)
    thread.start()
    sync(write_async())
    thread.join(60)
    assert not thread.is_alive()
    assert_all_there(base)


def test_arrays_written_by_threads(base: Any) -> None:
    """zarr's own calls, each thread a band of chunks that cuts through all shards."""
    store = ShardingStore(base, chunks_per_shard=8)
    z = zarr.create_array(store, name="z", shape=(64, 16), chunks=(2, 2), dtype="i4")
    data = np.arange(64 * 16, dtype="i4").reshape(64, 16)

    def write(i: int) -> None:
        z[i : i + 2] = data[i : i + 2]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(0, 64, 2)))
    np.testing.assert_array_equal(z[:], data)


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("reader", ["blocking", "async"])
def test_readers_see_old_or_new_never_a_mix(base: Any, reader: str) -> None:
    """While a writer moves the entries of a shard about, each read is of one state."""
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    m = ShardingMapping(store)
    keys = [key(i, j) for i in range(4) for j in range(4)]
    legal: dict[str, set[bytes]] = {k: set() for k in keys}
    for k in keys:
        m[k] = k.encode()
        legal[k] = {f"{k}{'.' * n}".encode() for n in range(7)}
    stop = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        rng = random.Random(1)
        try:
            while not stop.is_set():
                k = rng.choice(keys)
                m[k] = f"{k}{'.' * rng.randrange(7)}".encode()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    rng = random.Random(2)
    try:
        for _ in range(200):
            wanted = rng.sample(keys, 3)
            if reader == "blocking":
                values = m.get_partial_values([(k, (0, None)) for k in wanted])
            else:
                found = sync(store.get_partial_values(PROTOTYPE, [(k, None) for k in wanted]))
                values = [None if f is None else f.to_bytes() for f in found]
            for k, v in zip(wanted, values, strict=True):
                assert v in legal[k]
    finally:
        stop.set()
        thread.join(60)
    assert errors == []


def _rewrite_for_a_while(path: str, stop: Any) -> None:
    m = ShardingMapping(path, chunks_per_shard=(4, 4))
    rng = random.Random(3)
    while not stop.is_set():
        c = rng.choice(COORDS[:4])
        m[key(*c)] = value(*c, rng.randrange(9))


def test_local_readers_of_another_process(tmp_path: Path) -> None:
    """A file is opened once for a read, so a rename between index and entry does no harm."""
    m = ShardingMapping(tmp_path, chunks_per_shard=(4, 4))
    for c in COORDS[:4]:
        m[key(*c)] = value(*c)
    legal = {key(*c): {value(*c, n) for n in range(9)} for c in COORDS[:4]}
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=_rewrite_for_a_while, args=(str(tmp_path), stop))
    writer.start()
    try:
        for _ in range(1500):
            for k in legal:
                assert m[k] in legal[k]
    finally:
        stop.set()
        writer.join(60)
    assert writer.exitcode == 0


async def test_set_if_not_exists_has_one_winner(base: Any) -> None:
    """Of many at once one value stays, and whoever comes later is without effect."""
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    writes = [store.set_if_not_exists(key(0, 0), buffer(b"%d" % n)) for n in range(20)]
    await asyncio.gather(*writes)
    winner = ShardingMapping(store)[key(0, 0)]
    assert winner in {b"%d" % n for n in range(20)}
    await store.set_if_not_exists(key(0, 0), buffer(b"late"))
    assert ShardingMapping(store)[key(0, 0)] == winner


class SlowStore(MemoryStore):
    """Waits in each request, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fail = False
        self.started = asyncio.Event()

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        self.started.set()
        await asyncio.sleep(0.01)
        if self.fail:
            raise OSError("no space left on device")
        await super().set(key, value, byte_range)


async def test_a_cancelled_writer_does_not_harm_the_others() -> None:
    """The leader is cancelled while it commits; whoever joined is still committed."""
    base = SlowStore()
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    leader = asyncio.create_task(store.set(key(0, 0), buffer(b"leader")))
    await base.started.wait()
    follower = asyncio.create_task(store.set(key(0, 1), buffer(b"follower")))
    await asyncio.sleep(0)
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    await follower
    assert ShardingMapping(store)[key(0, 1)] == b"follower"


async def test_a_leader_cancelled_before_it_starts() -> None:
    """Cancelled in the turn in which siblings join."""
    store = ShardingStore(SlowStore(), chunks_per_shard=(4, 4))
    tasks = [asyncio.create_task(store.set(key(0, j), buffer(b"x"))) for j in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(*tasks[1:])
    assert {k async for k in store.list()} >= {key(0, 1), key(0, 2)}


async def test_a_failing_base_store_fails_the_callers_and_holds_nothing() -> None:
    """Each caller gets the base store's own error; the next write works."""
    base = SlowStore()
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    await store.set(key(3, 3), buffer(b"kept"))
    base.fail = True
    writes = [store.set(key(0, j), buffer(b"x")) for j in range(4)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(o) for o in outcomes] == [OSError] * 4
    base.fail = False
    await store.set(key(0, 0), buffer(b"works"))
    assert {k async for k in store.list()} == {key(0, 0), key(3, 3)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loop_that_ends_while_it_commits_does_not_hold_the_shard() -> None:
    """Stopped without cancelling its tasks; the next writer, of another loop, takes over."""
    base = SlowStore()
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    loop = asyncio.new_event_loop()
    task = loop.create_task(store.set(key(0, 0), buffer(b"x")))
    loop.run_until_complete(base.started.wait())
    loop.close()
    assert not task.done()
    asyncio.run(asyncio.wait_for(store.set(key(0, 1), buffer(b"next")), 60))
    assert ShardingMapping(store)[key(0, 1)] == b"next"


def test_a_loop_that_ends_before_its_task_leads_keeps_nobody_waiting() -> None:
    """A writer of another loop has joined already when asyncio.run cancels the leader."""
    store = ShardingStore(SlowStore(), chunks_per_shard=(4, 4))
    outcome: list[str] = []

    def follow() -> None:
        write = store.set(key(0, 1), buffer(b"follower"))
        asyncio.run(asyncio.wait_for(write, 60))
        outcome.append("done")

    follower = threading.Thread(target=follow)

    async def lead() -> None:
        await store.exists(key(0, 0))  # the array is known
        task = asyncio.create_task(store.set(key(0, 0), buffer(b"leader")))
        await asyncio.sleep(0)
        follower.start()
        time.sleep(0.3)
        assert not task.done()

    asyncio.run(lead())
    follower.join(90)
    assert outcome == ["done"]


async def test_a_bad_update_does_not_fail_its_siblings(base: Any) -> None:
    """Committed together, judged one by one."""
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    outcomes = await asyncio.gather(
        store.set(key(0, 0), buffer(b"good")),
        set_partial_values(store, [(key(0, 1), 5, b"a gap")]),
        store.set(key(0, 2), buffer(b"good")),
        return_exceptions=True,
    )
    assert [type(o) for o in outcomes] == [type(None), SpecError, type(None)]
    assert sorted(ShardingMapping(store)) == [key(0, 0), key(0, 2)]


async def test_blocking_on_a_task_of_the_same_loop_is_an_error_not_a_deadlock() -> None:
    """The blocking write would wait for a task that can only run when it returns."""
    base = SlowStore()
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    task = asyncio.create_task(store.set(key(0, 0), buffer(b"x")))
    await base.started.wait()
    with pytest.raises(ShardConflictError, match="await the async operation"):
        store.set_sync(key(0, 1), buffer(b"y"))
    await task


@pytest.mark.parametrize("make_base", [dict, tempfile.mkdtemp, SlowStore, fsspec_memory])
@pytest.mark.parametrize("n_turns", [1, 2, 3])
def test_blocking_at_any_turn_of_an_async_write_ends(make_base: Any, n_turns: int) -> None:
    """It waits, joins or is refused; it never hangs."""

    async def write() -> None:
        store = ShardingStore(make_base(), chunks_per_shard=(4, 4))
        await store.set(key(3, 3), buffer(b"known array"))
        task = asyncio.create_task(store.set(key(0, 0), buffer(b"x")))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        with contextlib.suppress(ShardConflictError):
            store.set_sync(key(0, 1), buffer(b"y"))
        await task

    asyncio.run(asyncio.wait_for(write(), 60))


class Prefixed(WrapperStore[MemoryStore]):
    """Another part of the same store: it looks like the whole, and is not."""

    def __init__(self, store: MemoryStore, prefix: str) -> None:
        super().__init__(store)
        self._prefix = prefix

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await self._store.get(self._prefix + key, prototype, byte_range)

    async def set(self, key: str, value: Buffer) -> None:
        await self._store.set(self._prefix + key, value)

    async def exists(self, key: str) -> bool:
        return await self._store.exists(self._prefix + key)


async def test_stores_that_only_look_alike_write_to_their_own_base() -> None:
    """They exclude each other, and no more: each update is committed by its own store."""
    base = MemoryStore()
    stores = [ShardingStore(Prefixed(base, p), chunks_per_shard=(4, 4)) for p in ("a/", "b/")]
    scopes = {store._engine.driver.backend.scope("k") for store in stores}
    assert len(scopes) == 1
    await asyncio.gather(*(s.set(key(0, i), buffer(b"%d" % i)) for i, s in enumerate(stores)))
    for i, store in enumerate(stores):
        values = [await store.get(key(0, j), PROTOTYPE) for j in (0, 1)]
        expected = [b"0", None] if i == 0 else [None, b"1"]
        assert [v and v.to_bytes() for v in values] == expected


def test_a_leader_is_not_kept_by_those_who_come_later() -> None:
    """Its call returns when its own update is committed; a worker thread commits the rest."""
    first_begun, go_on, second_begun = threading.Event(), threading.Event(), threading.Event()
    finish = threading.Event()

    class Gated(dict[str, bytes]):
        n_writes = 0

        def __setitem__(self, k: str, v: bytes) -> None:
            self.n_writes += 1
            (first_begun if self.n_writes == 1 else second_begun).set()
            (go_on if self.n_writes == 1 else finish).wait(120)
            super().__setitem__(k, v)

    m = ShardingMapping(Gated(), chunks_per_shard=(4, 4))
    leader = threading.Thread(target=m.set, args=(key(0, 0), b"leader"))
    follower = threading.Thread(target=m.set, args=(key(0, 1), b"follower"))
    leader.start()
    assert first_begun.wait(60)
    follower.start()
    time.sleep(0.2)  # for the follower to wait
    go_on.set()
    assert second_begun.wait(60)
    leader.join(60)
    is_free = not leader.is_alive()
    finish.set()
    follower.join(60)
    leader.join(60)
    assert is_free
    assert sorted(m) == [key(0, 0), key(0, 1)]


async def test_blocking_beside_a_commit_in_a_worker_thread_waits(tmp_path: Path) -> None:
    """Local files are committed by a thread, which goes on while the event loop is blocked."""
    store = ShardingStore(tmp_path, chunks_per_shard=(4, 4))
    await store.set(key(3, 3), buffer(b"known array"))
    for n in range(20):
        task = asyncio.create_task(store.set(key(0, 0), buffer(b"%d" % n)))
        for _ in range(3):
            await asyncio.sleep(0)
        store.set_sync(key(0, 1), buffer(b"%d" % n))
        await task


def test_the_same_files_by_another_name(tmp_path: Path) -> None:
    """A symbolic link leads to the same locks."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    names = [tmp_path / "real", tmp_path / "link"]
    mappings = [ShardingMapping(name, chunks_per_shard=(4, 4)) for name in names]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: mappings[i % 2].set(key(*COORDS[i]), value(*COORDS[i])), range(64)))
    assert_all_there(LocalStore(tmp_path / "real"))


async def test_a_cancelled_caller_may_reuse_its_buffer() -> None:
    """The commit goes on with the bytes that it was given."""
    base = SlowStore()
    store = ShardingStore(base, chunks_per_shard=(4, 4))
    array = np.full(8, 65, dtype="u1")
    task = asyncio.create_task(store.set(key(0, 0), cpu.Buffer.from_array_like(array)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    array[:] = 66
    await base.started.wait()
    await asyncio.sleep(0.05)
    assert ShardingMapping(store)[key(0, 0)] == b"A" * 8


def test_concurrent_sets_on_a_dict_are_one_write() -> None:
    """The leader lets the siblings of its turn of the event loop join."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=(4, 4))

    async def write() -> None:
        await asyncio.gather(*(store.set(key(*c), buffer(b"x")) for c in COORDS))

    asyncio.run(write())
    assert sorted(base) == [key(i, j) for i in (0, 1) for j in (0, 1)]
    assert store.stats().requests == 1 + 4, "one for the document of the array, one for each shard"


def test_stores_pickle_and_share_shards(tmp_path: Path) -> None:
    """A copy writes to the same base, under the same locks."""
    store = ShardingStore(tmp_path, chunks_per_shard=(4, 4), order="F")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.read_only == store.read_only
    assert pickle.loads(pickle.dumps(store.with_read_only(True))).read_only
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(s.set_sync, key(*c), buffer(value(*c)))
            for c, s in zip(COORDS, [store, copy] * 32, strict=True)
        ]
        for job in jobs:
            job.result()
    assert_all_there(LocalStore(tmp_path))


def _write_in_child(store: ShardingStore, part: list[tuple[int, int]]) -> None:
    m = ShardingMapping(store)
    for c in part[::2]:
        m[key(*c)] = value(*c)
    for c in part[1::2]:
        sync(store.set(key(*c), buffer(value(*c))))


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_stores_work_in_child_processes(tmp_path: Path, method: str) -> None:
    """After fork and spawn; each process has shards of its own."""
    store = ShardingStore(tmp_path, chunks_per_shard=(4, 4))
    sync(store.set(key(0, 0), buffer(b"")))  # threads and locks exist before the fork
    context: Any = multiprocessing.get_context(method)  # typeshed's BaseContext has no Process
    parts = [
        [c for c in COORDS if (c[0] // 4, c[1] // 4) == (i, j)] for i in (0, 1) for j in (0, 1)
    ]
    children = [context.Process(target=_write_in_child, args=(store, part)) for part in parts]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
    assert [child.exitcode for child in children] == [0] * 4
    assert_all_there(LocalStore(tmp_path))


def test_setdefault_beside_erasures_returns_a_value() -> None:
    """Also if the value is erased after it was stored, and before it is read."""
    m = ShardingMapping({}, chunks_per_shard=(4, 4))
    stop = threading.Event()

    def erase() -> None:
        while not stop.is_set():
            m.erase(key(0, 0))

    thread = threading.Thread(target=erase)
    thread.start()
    try:
        assert {m.setdefault(key(0, 0), b"x") for _ in range(300)} == {b"x"}
    finally:
        stop.set()
        thread.join(60)


def test_a_shard_is_never_left_half_written(tmp_path: Path) -> None:
    """Files are replaced, not written in place: no temporary file stays, each is whole."""
    m = ShardingMapping(tmp_path, chunks_per_shard=(4, 4))
    for n in range(5):
        m.update({key(*c): value(*c, n) for c in COORDS})
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert (
        files
        == {key(i, j) for i in (0, 1) for j in (0, 1)}
        == set(objects_of(LocalStore(tmp_path)))
    )


def test_an_event_loop_that_ends_well_harms_nobody() -> None:
    """Who led, and waits no longer, leaves the updates of others to them."""
    base = BASES["fsspec"]()
    store = ShardingStore(base, chunks_per_shard=8)
    m = ShardingMapping(store)
    value = default_buffer_prototype().buffer.from_bytes(b"0")
    is_done = threading.Event()

    def write_in_short_loops() -> None:
        while not is_done.is_set():
            asyncio.run(store.set("data/root/a/c0", value))

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(write_in_short_loops)
        try:
            for i in range(200):
                m["data/root/a/c1"] = bytes([i])
        finally:
            is_done.set()
        future.result(timeout=60)
    assert dict(m) == {"data/root/a/c0": b"0", "data/root/a/c1": bytes([199])}
