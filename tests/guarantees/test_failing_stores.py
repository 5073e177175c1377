"""Base stores that fail at any of their calls.

Whoever wrote gets the error, what was acknowledged before is there, nothing stays locked, and the
same write works the next time. Some of the values look like the index of a shard.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, get_args
from unittest import mock

import numpy as np
import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

from tests.support import failing
from tests.support.async_calls import set_partial_values
from tests.support.bases import put as put_object
from tests.support.failing import BASES, Base, CallFaults, open_files
from tests.support.hierarchies import KINDS as HIERARCHIES
from tests.support.hierarchies import ArrayOf, grid_coords
from tests.support.kit import Kind, objects_of, tuned, wait_until_idle
from tests.support.rounds import rounds
from tests.support.side_files import LOCK_SUFFIX
from tests.support.stops import files_in
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnpublishedError,
    reshard,
    set_index_cache_nbytes,
    shard_store,
    unshard_store,
)
from zarr_shardstore.errors import CorruptShardError, CorruptValueError, ShardConflictError

Values: TypeAlias = Mapping[str, bytes | None]
Outcome: TypeAlias = "Sequence[bytes | None] | Exception | None"

KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "slow")
OPTIONS: dict[str, Any] = {"chunks_per_shard": (2, 2)}


def key(i: int, j: int) -> str:
    return f"data/root/a/c{i}/{j}"


def missing(n: int) -> bytes:
    """As an index of missing entries, if a shard is cut inside of it."""
    return b"\xff" * (64 + n)


def empty(n: int) -> bytes:
    """As an index of empty entries."""
    return b"\0" * (64 + n)


# -------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Op:
    """A call of a store, and what it makes of the values of its keys."""

    call: str
    values: Values = field(default_factory=dict)
    pieces: Sequence[tuple[str, int, bytes]] = ()
    parts: Sequence[Op] = ()

    def after(self, before: Values) -> dict[str, bytes | None]:
        """New values by their keys; a second time the same."""
        if self.call == "set if missing":
            return {k: v if before.get(k) is None else before[k] for k, v in self.values.items()}
        if self.call == "batch":
            return {k: v for part in self.parts for k, v in part.after(before).items()}
        new = dict(self.values)
        for k, start, piece in self.pieces:
            old = new.get(k, before.get(k)) or b""
            new[k] = old[:start] + piece + old[start + len(piece) :]
        return {} if self.call == "read" else new


def put(values: Values) -> Op:
    return Op("set", values)


def patch(*pieces: tuple[str, int, bytes]) -> Op:
    return Op("patch", pieces=pieces)


def erase(*keys: str) -> Op:
    return Op("erase", dict.fromkeys(keys))


def read(*keys: str) -> Op:
    return Op("read", dict.fromkeys(keys))


ALL = [key(i, j) for i in range(4) for j in range(4)]
FIRST, SECOND = [key(0, 0), key(0, 1), key(1, 0), key(1, 1)], [key(0, 2), key(0, 3), key(1, 2)]
THIRD = [key(2, 0), key(2, 1), key(3, 0), key(3, 1)]

WORK: list[list[Op]] = [
    [put({FIRST[0]: missing(1)})],
    [put({k: missing(i) if i % 2 else empty(i) for i, k in enumerate(FIRST[1:] + SECOND + THIRD)})],
    [read(*FIRST, *SECOND, key(3, 3))],
    [patch((FIRST[0], 3, b"abc"), (FIRST[1], 0, b"abc"), (SECOND[0], 60, b"a longer one"))],
    [  # side by side
        put({FIRST[1]: empty(20)}),
        put({FIRST[2]: missing(30)}),
        erase(FIRST[3], SECOND[1]),
        patch((SECOND[2], 5, b"abc")),
        read(FIRST[0], THIRD[0]),
        Op("set if missing", {key(3, 3): b"in a new shard"}),
    ],
    [erase(*THIRD, FIRST[0])],
    [put({k: missing(40 + i) for i, k in enumerate(FIRST)})],
    [
        Op(
            "batch",
            parts=[
                *(put({k: empty(50 + i)}) for i, k in enumerate(THIRD)),  # then published
                patch((FIRST[1], 7, b"abc")),
                Op("set if missing", {key(1, 3): empty(60)}),
                erase(FIRST[2], SECOND[0]),
            ],
        )
    ],
    [read(*ALL)],
]
"""Steps; the operations of one are performed side by side. One may be repeated."""


def perform(op: Op, store: ShardingStore | ShardingMapping) -> Outcome:
    """Blocking, by the methods of the mapping."""
    m = store if isinstance(store, ShardingMapping) else ShardingMapping(store)
    match op.call:
        case "set":
            m.update(op.values)
        case "set if missing":
            for k, v in op.values.items():
                m.setdefault(k, v or b"")
        case "patch":
            m.set_partial_values(op.pieces)
        case "erase":
            m.erase_values(op.values)
        case "batch":
            with m.batch():
                for part in op.parts:
                    perform(part, m)
        case "read":
            return m.get_partial_values([(k, (0, None)) for k in op.values])
    return None


async def perform_async(op: Op, store: ShardingStore) -> Outcome:
    """In an event loop, by the methods of the store."""
    match op.call:
        case "set":
            await store._set_or_erase(
                [(k, cpu.Buffer.from_bytes(v or b"")) for k, v in op.values.items()]
            )
        case "set if missing":
            for k, v in op.values.items():
                await store.set_if_not_exists(k, cpu.Buffer.from_bytes(v or b""))
        case "patch":
            await set_partial_values(store, op.pieces)
        case "erase":
            await store._set_or_erase([(key, None) for key in op.values])
        case "batch":
            async with store.batch():
                for part in op.parts:
                    await perform_async(part, store)
        case "read":
            wanted = [(k, None) for k in op.values]
            found = await store.get_partial_values(default_buffer_prototype(), wanted)
            return [None if value is None else value.to_bytes() for value in found]
    return None


def in_threads(ops: Sequence[Op], store: ShardingStore) -> list[Outcome]:
    def one(op: Op) -> Outcome:
        try:
            return perform(op, store)
        except Exception as error:
            return error

    if len(ops) == 1:
        return [one(ops[0])]
    with ThreadPoolExecutor(len(ops)) as threads:
        return list(threads.map(one, ops))


def in_tasks(ops: Sequence[Op], store: ShardingStore) -> list[Outcome]:
    async def all_of_them() -> Any:
        calls = [perform_async(op, store) for op in ops]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes: list[Outcome] = sync(all_of_them())
    return outcomes


CALLERS = {"blocking": in_threads, "async": in_tasks}
Caller: TypeAlias = Callable[[Sequence[Op], ShardingStore], list[Outcome]]


# ------------------------------------------------------------------------ checks


class Worker:
    """Performs operations on a store that fails, each until it works, and looks after each.

    It knows for every key which values may be stored: of a call that failed the old or the new.
    """

    def __init__(self, base: Base, caller: Caller, **options: Any) -> None:
        self.base = base
        self.caller = caller
        self.options = OPTIONS | options
        self.store = ShardingStore(base.failing, **self.options)
        self.allowed: dict[str, set[bytes | None]] = {}
        self.after_each: Callable[[], None] = lambda: None

    def work(self, steps: Sequence[Sequence[Op]]) -> None:
        for step in steps:
            left = list(step)
            n_attempts = 0
            while left:
                n_attempts += 1
                assert n_attempts < 20, "it never works"
                left = self._attempt(left)
        self.look(is_exact=True)

    def _attempt(self, ops: list[Op]) -> list[Op]:
        """Perform operations side by side; return those that failed."""
        faults = self.base.faults
        faults.forget()
        before = {k: set(values) for k, values in self.allowed.items()}
        with self.base.at_work():
            outcomes = self.caller(ops, self.store)
        wait_until_idle()
        self.after_each()
        failed: list[Op] = []
        for op, outcome in zip(ops, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._check_error(outcome)
                failed.append(op)
            elif op.call == "read":
                assert outcome is not None
                for k, value in zip(op.values, outcome, strict=True):
                    possible = set(before.get(k, {None}))
                    possible |= {new[k] for o in ops for new in _after(o, before) if k in new}
                    assert value in possible, (k, value)
            self._learn(op, outcome, before)
        assert failed or not faults.must_come_out, f"nobody was told that {faults.failed} failed"
        if failed or faults.failed:
            self.look()
        return failed

    def _check_error(self, error: Exception) -> None:
        faults = self.base.faults
        assert faults.failed, f"nothing failed, and yet: {error!r}"
        causes = error.exceptions if isinstance(error, UnpublishedError) else (error,)
        if faults.errors and not faults.is_replaced:
            assert all(map(faults.raised, causes)), causes

    def _learn(self, op: Op, outcome: Outcome, before: Mapping[str, set[bytes | None]]) -> None:
        unpublished: set[str] = set()
        is_batch = isinstance(outcome, UnpublishedError)
        if isinstance(outcome, UnpublishedError):
            unpublished = {k for keys in outcome.chunk_keys.values() for k in keys}
        news = _after(op, before)
        for k in {k for new in news for k in new}:
            new = {values[k] for values in news}
            is_done = k not in unpublished if is_batch else not isinstance(outcome, Exception)
            self.allowed[k] = new if is_done else new | before.get(k, {None})

    def look(self, *, is_exact: bool = False) -> None:
        """All that was acknowledged is there, for a store that was not there before."""
        found = dict(ShardingMapping(self.base.healthy, **self.options))
        for k, values in self.allowed.items():
            assert found.pop(k, None) in values, k
            assert not is_exact or len(values) == 1
        assert not found


def _after(op: Op, before: Mapping[str, set[bytes | None]]) -> list[dict[str, bytes | None]]:
    """What an operation may make of its keys, as far as one may not know their values before."""
    keys = {k for part in (op, *op.parts) for k in (*part.values, *(p[0] for p in part.pieces))}
    some = {k: before.get(k, {None}) for k in keys}
    n = max((len(values) for values in some.values()), default=1)
    choices = [{k: sorted(v, key=repr)[i % len(v)] for k, v in some.items()} for i in range(n)]
    return [op.after(choice) for choice in choices]


def sweep(run: Callable[[CallFaults], None], kind: Kind) -> None:
    """Let the first call fail, then the second of another run, until a run makes fewer calls."""
    for n in count():
        faults = CallFaults(kind, {n})
        try:
            run(faults)
        except BaseException as error:
            error.add_note(f"{kind} at call {n}: {faults.failed}")
            raise
        if faults.n_calls <= n:
            assert n > 5, "it hardly fails at all"
            return


# -------------------------------------------------------------- calls of a store

COMBINATIONS = [
    ("store", "async"),
    ("blocking store", "blocking"),
    ("mapping", "blocking"),
    ("mapping", "async"),
    ("fsspec", "async"),
    ("obstore", "blocking"),
]


@pytest.mark.thorough(of=9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "caller"), COMBINATIONS)
def test_one_call_fails(name: str, caller: str, kind: Kind) -> None:
    """Whichever it is: its error comes out, nothing acknowledged is lost, the next try works."""
    if (name, kind) == ("mapping", "short read"):
        pytest.skip("a mapping gives whole values: nothing but them says how long they are")
    sweep(lambda faults: Worker(BASES[name](faults), CALLERS[caller]).work(WORK), kind)


@pytest.mark.parametrize(("name", "caller"), COMBINATIONS)
def test_every_call_is_slow(name: str, caller: str) -> None:
    """Nothing comes in the wrong order."""
    side_by_side = [[put({k: missing(n)}) for k in ALL] + [read(*ALL)] for n in range(3)]
    faults = CallFaults("slow", range(1_000_000))
    Worker(BASES[name](faults), CALLERS[caller]).work(WORK + side_by_side)
    assert faults.n_calls > 30


KEYS = st.sampled_from(ALL[:6])
BYTES = st.sampled_from([missing(1), empty(1), empty(20), b"abc", b""])
PUTS = st.dictionaries(KEYS, BYTES, min_size=1, max_size=4).map(put)
OPS = st.one_of(
    PUTS,
    st.tuples(KEYS, st.just(0), BYTES).map(patch),
    st.lists(KEYS, min_size=1, max_size=4).map(lambda keys: erase(*keys)),
    st.lists(KEYS, min_size=1, max_size=4).map(lambda keys: read(*keys)),
    st.dictionaries(KEYS, BYTES, min_size=1).map(lambda values: Op("set if missing", values)),
    PUTS.map(lambda op: Op("batch", parts=[put({k: v}) for k, v in op.values.items()])),
)


@settings(max_examples=rounds(60))
@given(
    ops=st.lists(OPS, min_size=1, max_size=8),
    at=st.sets(st.integers(0, 40), max_size=12),
    kind=st.sampled_from(KINDS),
    where=st.sampled_from([w for w in COMBINATIONS if w[0] in ("store", "mapping")]),
)
@example(  # half of the first shard, read for the second chunk, is an index of empty entries
    ops=[Op("set if missing", {key(0, 0): empty(1), key(0, 1): missing(1)})],
    at={1},
    kind="short read",
    where=("store", "async"),
)
def test_many_calls_fail(ops: list[Op], at: set[int], kind: Kind, where: tuple[str, str]) -> None:
    """Whatever was done before, and however often it fails."""
    name, caller = where
    if (name, kind) != ("mapping", "short read"):
        Worker(BASES[name](CallFaults(kind, at)), CALLERS[caller]).work([[op] for op in ops])


# ----------------------------------------------------------- calls of the system

FILES: list[tuple[str, dict[str, Any]]] = [
    ("blocking", {"strategy": "rewrite", "durability": "power"}),
    ("blocking", {"strategy": "append", "durability": "power"}),
    ("async", {"locking": "lockfile"}),
]
WRITES = [
    [put({FIRST[0]: missing(1)})],
    [put({k: empty(i) for i, k in enumerate(FIRST)})],  # nothing is read
    [patch((FIRST[0], 3, b"abc")), put({FIRST[1]: missing(2)}), put({SECOND[0]: b"1"})],
    [Op("batch", parts=[put({FIRST[2]: missing(3)}), erase(SECOND[0])])],
    [read(*FIRST, *SECOND)],
]


@pytest.mark.thorough(of=9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("caller", "options"), FILES)
def test_one_system_call_fails(
    caller: str, options: dict[str, Any], kind: Kind, tmp_path: Path
) -> None:
    """A full disk, a broken one; and besides, no file is left open, and no half of one."""
    numbers = count()

    def run(faults: CallFaults) -> None:
        root = tmp_path / f"run-{next(numbers)}"
        worker = Worker(failing.files(root, faults), CALLERS[caller], **options)
        if options.get("strategy", "rewrite") == "rewrite":
            worker.after_each = lambda: check_files(root, faults)
        worker.work(WRITES)
        with faults.ignored():
            ShardingMapping(root).flush()
        check_files(root, faults)

    with (
        # Nothing is remembered: where a look at a remembered file fails, it is read once more.
        tuned(lock_wait_s=10.0, min_file_age_ns=10**18),
    ):
        sweep(run, kind)


def check_files(root: Path, faults: CallFaults) -> None:
    """What a failed write leaves behind: the file of a lock that nobody holds, if that failed."""
    set_index_cache_nbytes(0)  # with what is known of them, files are closed that are kept open
    set_index_cache_nbytes(64 << 20)
    assert open_files(root) == []
    left = [str(path) for path in root.rglob("*") if path.suffix == ".partial"]
    assert left == []
    if not faults.has_lock_failed:
        assert [key for key in files_in(root) if key.endswith(LOCK_SUFFIX)] == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_directory_that_cannot_be_listed_is_not_empty(code: int, tmp_path: Path) -> None:
    """Its error comes out: whoever lists may be about to remove what was not there."""
    m = ShardingMapping(tmp_path, **OPTIONS)
    m.update(dict.fromkeys(FIRST, b"1"))
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).rstrip("/").endswith("c0"):
            raise OSError(code, os.strerror(code))
        return real(path)

    for call in (
        m.list,
        lambda: m.list_dir("data/root/"),
        lambda: m.erase_prefix("data/root/a/c0"),
    ):
        with mock.patch.object(os, "scandir", scandir), pytest.raises(OSError) as raised:  # noqa: PT011
            call()
        assert raised.value.errno == code
    assert dict(m) == dict.fromkeys(FIRST, b"1")


# ----------------------------------------------------------------- arrays of zarr

SHARDED = "zarr_shardstore.store.pipeline.ShardedCodecPipeline"
ARRAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zarr's pipeline": ({"declaration": "codec"}, {}),
    "our pipeline": (
        {"declaration": "storage_transformers"},  # without a checksum
        {"codec_pipeline.path": SHARDED},
    ),
}
DATA = np.arange(1, 36, dtype="<i2").reshape(5, 7)


Change: TypeAlias = Callable[[Any], None]


def array_steps(store: ShardingStore, other: ShardingStore) -> Iterator[tuple[Change, Change]]:
    """What is done to an array that two stores share, and what it does to the values.

    The other store shards no new arrays: it must always read the document.
    """
    z: Any = None

    def create(_: Any) -> None:
        nonlocal z
        zarr.create_array(
            store,
            name="z",
            shape=DATA.shape,
            chunks=(2, 2),
            dtype=DATA.dtype,
            compressors=None,
            fill_value=0,
            overwrite=True,
        )

    def open_array(_: Any) -> None:
        nonlocal z
        z = zarr.open_array(other, path="z", mode="r+")

    def assign(where: Any, value: Any) -> tuple[Change, Change]:
        def change(a: Any) -> None:
            a[where] = value

        return (lambda _: change(z)), change

    def batch(_: Any) -> None:
        with other.batch():
            z[:2] = 0
            z[3] = -7

    def batched(a: Any) -> None:
        a[:2] = 0
        a[3] = -7

    yield create, lambda _: None
    yield open_array, lambda _: None
    yield assign(np.s_[:], DATA)
    yield assign(np.s_[1:4, 1:6], -1)  # 12 chunks of 4 shards, at the edges too
    yield (lambda _: z.attrs.put({"n": 1})), lambda _: None
    yield assign(np.s_[4, 6], -2)  # the last chunk, alone in its shard
    yield assign(np.s_[2:4, 2:4], 0)  # one chunk is erased
    yield batch, batched
    yield assign(np.s_[:], DATA)


@pytest.mark.thorough(of=6)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # zarr's, too
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, kind: Kind) -> None:
    """Values are the old or the new ones, in this view and natively, until the call works."""
    options, config = ARRAYS[name]

    def run(faults: CallFaults) -> None:
        base = failing.store(faults)
        store = ShardingStore(base.failing, **OPTIONS, **options)
        other = ShardingStore(base.failing)
        now = np.zeros_like(DATA)
        is_there = False
        for call, change in array_steps(store, other):
            new = now.copy()
            change(new)
            for n_left in reversed(range(5)):
                faults.forget()
                other.refresh()
                is_done = succeeds(partial(call, None), faults, is_last=not n_left)
                is_there |= is_done
                if is_there and faults.failed:
                    for found in stored_values(base.healthy, is_native="codec" in options.values()):
                        assert ((found == now) | (found == new)).all()
                if is_done:
                    break
            now = new
        for found in stored_values(base.healthy, is_native="codec" in options.values()):
            np.testing.assert_array_equal(found, now)

    with zarr.config.set(config):
        sweep(run, kind)
    gc.collect()  # zarr's coroutines are warned of here, not in a later test


def succeeds(call: Callable[[], None], faults: CallFaults, *, is_last: bool) -> bool:
    """Whether a call works; if not, what failed is why."""
    try:
        call()
    except Exception as error:
        if is_last or not faults.failed:
            raise
        causes = error.exceptions if isinstance(error, UnpublishedError) else (error,)
        for cause in causes if faults.errors else ():
            assert faults.raised(cause), repr(cause)
        return False
    else:
        assert not faults.must_come_out, f"nobody was told that {faults.failed} failed"
        return True
    finally:
        sync(no_task_is_left())  # zarr lets other chunks go on after the first error
        wait_until_idle()


async def no_task_is_left() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def stored_values(base: Any, *, is_native: bool) -> Iterator[Any]:
    stores = [ShardingStore(base), *([base] if is_native else [])]
    for store in stores:
        array: Any = zarr.open_array(store, path="z", mode="r")
        yield array[:]


# -------------------------------------------------------------------- conversions

CONVERSIONS: dict[str, Callable[..., Any]] = {
    "shard": partial(shard_store, chunks_per_shard=(2, 2)),
    "reshard": lambda base, *more, **options: reshard(base, (1, 3), *more, **options),
    "unshard": unshard_store,
}
ONE = ThreadPoolExecutor(1)  # so that the nth read is always the same


def array_of(kind: str, path: str) -> ArrayOf:
    coords = grid_coords((2, 3))
    chunks = {c: f"chunk {c} of {path}".encode() * (1 + c[1]) for c in coords if c != (1, 1)}
    return ArrayOf(HIERARCHIES[kind], path, (2, 3), (1, 1), (0, 0), chunks)


def objects_to(command: str) -> dict[str, bytes]:
    """Arrays of both formats, one of them in a group, and keys of no array."""
    objects = array_of("v2 .", "a").objects() | array_of("v3 /", "g/b").objects()
    objects |= {"g/zarr.json": b'{"zarr_format": 3, "node_type": "group"}', "notes": b"some notes"}
    if command != "shard":
        CONVERSIONS["shard"](objects)
    return objects


@pytest.mark.thorough(of=36)
@pytest.mark.parametrize("has_destination", [False, True])
@pytest.mark.parametrize("command", CONVERSIONS)
@pytest.mark.parametrize("name", [*BASES, "files"])
def test_a_conversion_never_takes_a_truncated_reply(
    name: str, command: str, has_destination: bool, tmp_path: Path
) -> None:
    """Whichever read is short: an error, and nothing is lost; or the reply had no effect."""
    objects = objects_to(command)
    expected = dict(objects)
    CONVERSIONS[command](expected)
    numbers = count()

    def run(faults: CallFaults) -> None:
        make = BASES.get(name) or partial(failing.files, tmp_path / f"run-{next(numbers)}")
        base = make(faults)
        with faults.ignored():
            for k, value in objects.items():
                put_object(base.healthy, k, value)
        target: dict[str, bytes] | None = {} if has_destination else None
        reached = base.healthy if target is None else target
        try:
            with base.at_work():
                CONVERSIONS[command](base.failing, target, executor=ONE)
        except (SpecError, CorruptShardError, CorruptValueError, ShardConflictError):
            assert faults.failed
            if target is not None:
                assert objects_of(base.healthy) == objects
            CONVERSIONS[command](base.healthy, target)
        assert objects_of(reached) == expected

    sweep(run, "short read")
