"""A writer that stops at any of its calls to the file system, as by a kill: every acknowledged
entry has its value, any other its old or its new one, and all of one call together."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import GzipCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, MemoryStore, WrapperStore

from tests.support.draft import draft_array
from tests.support.file_layer import (
    Call,
    Disk,
    FileLayer,
    RecordingLayer,
    Stop,
    Stopped,
    state_of,
    write_state,
)
from tests.support.kit import forget, system_calls, tuned
from tests.support.rounds import rounds
from tests.support.shard_bytes import Location, build_shard, places_in
from zarr_shardstore import ShardingMapping, ShardingStore

Model = dict[int, bytes]

N_CHUNKS, CPS, CHUNK_NBYTES = 9, 5, 500
"""The shard that is written is the second one: four of its five entries lie in the array."""

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}


# ------------------------------------------------------------------------------ forms


@dataclass(frozen=True)
class Form:
    """How the array is declared, and its index stored."""

    checksum: bool
    location: Location = "end"
    is_draft: bool = False

    def build(self, values: Mapping[int, bytes]) -> bytes:
        """A shard with these entries."""
        return build_shard(values, CPS, checksum=self.checksum, location=self.location)

    def places(self, shard: bytes) -> list[tuple[int, int]]:
        """Offset and size of the entries of a shard that are there."""
        found = places_in(shard, CPS, checksum=self.checksum, location=self.location)
        return [place for place in found if place is not None]

    def chunk_key(self, entry_id: int) -> str:
        return f"{'data/root/a/c' if self.is_draft else 'a/c/'}{CPS + entry_id}"

    @property
    def shard_key(self) -> str:
        return "data/root/a/c1" if self.is_draft else "a/c/1"

    def documents(self, codec: str) -> Mapping[str, bytes]:
        return _draft_documents() if self.is_draft else self.v3_documents(codec)

    def v3_documents(self, codec: str) -> Mapping[str, bytes]:
        return _documents(self.checksum, self.location, codec)

    @cache  # noqa: B019
    def read_natively(self, shard: bytes | None, codec: str) -> Any:
        """The array as zarr-python finds it, chunk by chunk."""
        to_buffer = default_buffer_prototype().buffer.from_bytes
        objects = {k: to_buffer(v) for k, v in self.v3_documents(codec).items()}
        if shard is not None:
            objects["a/c/1"] = to_buffer(shard)
        found: Any = zarr.open_array(MemoryStore(objects), path="a", mode="r")[:]
        return found.reshape(N_CHUNKS, CHUNK_NBYTES)


@cache
def _documents(checksum: bool, location: Location, codec: str) -> Mapping[str, bytes]:
    base: dict[str, bytes] = {}
    store = ShardingStore(
        base,
        chunks_per_shard=CPS,
        index_codecs=[LITTLE, CRC] if checksum else [LITTLE],
        index_location=location,
    )
    zarr.create_array(
        store,
        name="a",
        shape=(N_CHUNKS * CHUNK_NBYTES,),
        chunks=(CHUNK_NBYTES,),
        dtype="u1",
        fill_value=0,
        compressors=[GzipCodec(level=1)] if codec == "gzip" else None,
    )
    return base


@cache
def _draft_documents() -> Mapping[str, bytes]:
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, chunks_per_shard=CPS)
    m["meta/root/a.array.json"] = draft_array([N_CHUNKS], [1])
    return base


FORMS = {
    "checksum": Form(checksum=True),
    "start": Form(checksum=True, location="start"),
    "draft": Form(checksum=False, is_draft=True),
}


# -------------------------------------------------------------------------- workloads


@cache
def packed(seed: int, n: int) -> bytes:
    """A chunk of which `n` bytes cannot be compressed: it takes some 40 more."""
    chunk = random.Random(seed).randbytes(n) + bytes(CHUNK_NBYTES - n)
    return gzip.compress(chunk, 1, mtime=0)


@dataclass(frozen=True)
class Put:
    """Store entries by one call."""

    values: Model

    def run(self, m: ShardingMapping, form: Form) -> None:
        m.update({form.chunk_key(i): value for i, value in self.values.items()})

    def after(self, model: Model) -> Model:
        return model | self.values


@dataclass(frozen=True)
class Erase:
    """Erase entries by one call."""

    ids: Sequence[int]

    def run(self, m: ShardingMapping, form: Form) -> None:
        m.erase_values([form.chunk_key(i) for i in self.ids])

    def after(self, model: Model) -> Model:
        return {i: value for i, value in model.items() if i not in self.ids}


@dataclass(frozen=True)
class Patch:
    """Write pieces of entries by one call."""

    pieces: Sequence[tuple[int, int, bytes]]

    def run(self, m: ShardingMapping, form: Form) -> None:
        m.set_partial_values([(form.chunk_key(i), at, piece) for i, at, piece in self.pieces])

    def after(self, model: Model) -> Model:
        new = dict(model)
        for i, at, piece in self.pieces:
            value = new.get(i, b"")
            new[i] = value[:at] + piece + value[at + len(piece) :]
        return new


@dataclass(frozen=True)
class Flush:
    """Bring the shard to rest."""

    def run(self, m: ShardingMapping, form: Form) -> None:
        m.flush()

    def after(self, model: Model) -> Model:
        return model


@dataclass(frozen=True)
class Restart:
    """Another process goes on, after one that ended without flush."""

    def run(self, m: ShardingMapping, form: Form) -> None:
        forget()

    def after(self, model: Model) -> Model:
        return model


Step = Put | Erase | Patch | Flush | Restart


@dataclass(frozen=True)
class Workload:
    """What is done first, and the calls of which each is stopped at each of its calls.

    `shows`: what is done to which files when the index has a checksum and is at the end, so that
    the workload is what its name says.
    """

    before: Sequence[Step]
    stopped: Sequence[Step]
    shows: Sequence[str]
    codec: str = "gzip"


def put(**sizes: int) -> Put:
    """Entries ``e0``, ``e1``, … with values of these sizes, never the same ones."""
    values = {int(name[1:]): n for name, n in sizes.items()}
    return Put({i: packed(next(_seeds), n) for i, n in values.items()})


_seeds = itertools.count()
_IN_PLACE = ("write_at journal", "write_at shard")

THREE = put(e0=390, e1=120, e2=300)
"""About 900 bytes; the gap behind them takes 16 times the index, 1,344 (or 1,280)."""

WORKLOADS = {
    "new shard": Workload([], [put(e0=30, e2=200)], ["replace temporary", "write_at journal"]),
    "large new shard": Workload([], [put(e0=490, e1=480, e2=500)], ["replace temporary"]),
    "full new shard": Workload([], [put(e0=3, e1=99, e2=70, e3=9)], ["replace temporary"]),
    "gap": Workload([THREE], [put(e3=99)], _IN_PLACE),
    "gap after erasing": Workload([THREE, put(e1=90), Erase([1])], [put(e3=99)], _IN_PLACE),
    "several gaps": Workload([put(e2=9)], [put(e0=30), put(e1=50)], _IN_PLACE),
    "overwrite": Workload([THREE], [put(e1=100), put(e1=90)], _IN_PLACE),
    "erase one": Workload([THREE], [Erase([1])], _IN_PLACE),
    "erase all": Workload(
        [put(e0=5, e1=7)], [Erase([0, 1, 2])], ["unlink journal", "unlink shard"]
    ),
    "erase all, one by one": Workload(
        [put(e0=5, e1=7)], [Erase([1]), Erase([0])], ["unlink shard"]
    ),
    "group": Workload([THREE], [put(e0=20, e1=1, e2=40)], _IN_PLACE),
    "patch": Workload([THREE], [Patch([(0, 4, b"2026"), (2, 4, b"1234")])], _IN_PLACE),
    "growth": Workload(
        [THREE, put(e1=500), put(e2=490)],
        [put(e0=499), put(e1=60)],
        ["lengthen shard", "write_at shard"],
    ),
    "growth after erasing": Workload(
        [put(e0=490, e1=300, e2=490), put(e1=480), Erase([1])],
        [put(e1=450, e2=451), put(e1=7)],
        ["lengthen shard"],
    ),
    "compaction instead of growth": Workload(
        [put(e0=300), put(e0=450), put(e0=460)], [put(e0=500)], ["replace temporary"]
    ),
    "full": Workload([THREE], [put(e3=99)], ["truncate journal", "truncate shard"]),
    "full again": Workload(
        [THREE, put(e3=99), Erase([1])],
        [put(e1=3), Flush()],
        ["write_at journal", "truncate journal"],
    ),
    "flush": Workload([put(e0=99, e1=10)], [Flush()], ["truncate shard", "unlink journal"]),
    "flush and go on": Workload(
        [put(e0=99, e1=10), Flush()], [put(e1=20), put(e2=5)], ["lengthen shard", *_IN_PLACE]
    ),
    "flush with compaction": Workload(
        [put(e0=400, e1=10), put(e0=410), Erase([1])], [Flush()], ["replace temporary"]
    ),
    "another process": Workload(
        [put(e0=40, e1=10), put(e1=80), Restart()], [put(e2=60), Erase([0]), Flush()], _IN_PLACE
    ),
    "another process, growth": Workload(
        [THREE, put(e1=500), put(e2=490), Restart()], [put(e0=499), Flush()], ["lengthen shard"]
    ),
}


SOME = ("new shard", "full new shard", "overwrite", "erase all, one by one", "group", "patch")


def shard_like(form: Form, seed: int) -> bytes:
    """A chunk that is a shard with other values itself, and ends or begins in an index."""
    shard = form.build({0: b"wrong %d" % seed, 2: b"no"})
    pad = random.Random(seed).randbytes(CHUNK_NBYTES - len(shard))
    return shard + pad if form.location == "start" else pad + shard


@cache
def shard_like_workload(form: Form) -> Workload:
    """Chunks that look like shards come where the index was, and where the file ends."""
    v = [shard_like(form, i) for i in range(9)]
    return Workload(
        [Put({0: v[0], 1: v[1], 2: v[2]}), Put({0: v[3]}), Put({1: v[4]})],
        [Put({2: v[5]}), Put({0: v[6], 1: v[7]}), Erase([1]), Flush(), Put({3: v[8]})],
        [],
        codec="raw",
    )


# -------------------------------------------------------------------------- processes


@dataclass
class Held:
    """A reader that had read the index of a file, and goes on to its entries only later."""

    fd: int
    entries: list[tuple[int, bytes]]

    @classmethod
    def of(cls, root: Path, form: Form) -> Held | None:
        try:
            fd = os.open(root / form.shard_key, os.O_RDONLY)
        except FileNotFoundError:
            return None
        shard = os.pread(fd, os.fstat(fd).st_size, 0)
        places = form.places(shard)
        return cls(fd, [(offset, shard[offset : offset + nbytes]) for offset, nbytes in places])

    def check(self) -> None:
        for offset, value in self.entries:
            assert os.pread(self.fd, len(value), offset) == value, "a byte of an entry was changed"


@dataclass
class Run:
    """A workload in one directory, and what of it was acknowledged."""

    root: Path
    form: Form
    workload: Workload
    options: dict[str, Any]
    models: list[Model] = field(default_factory=lambda: [{}])
    """After each call that returned."""
    stopped_model: Model | None = None
    """After the call that did not."""
    held: list[Held] = field(default_factory=list)

    @property
    def allowed(self) -> list[Model]:
        last = self.models[-1]
        return [last] if self.stopped_model is None else [last, self.stopped_model]

    def open(self, **options: Any) -> ShardingMapping:
        return ShardingMapping(self.root, **self.options | options)

    def begin(self) -> ShardingMapping:
        write_documents(self.root, self.form, self.workload.codec)
        m = self.open()
        for step in self.workload.before:
            self.take(step, m)
        return m

    def take(self, step: Step, m: ShardingMapping) -> None:
        self.stopped_model = step.after(self.models[-1])
        step.run(m, self.form)
        self.models.append(self.stopped_model)
        self.stopped_model = None
        held = Held.of(self.root, self.form)
        if held is not None:
            self.held.append(held)

    def run_to(self, stop: Stop | None) -> list[Call]:
        """The calls of a run from its beginning to a stop, or to its end."""
        m = self.begin()
        with FileLayer(self.root, stop).installed() as layer:
            try:
                for step in self.workload.stopped:
                    self.take(step, m)
            except Stopped:
                assert stop is not None
            else:
                assert stop is None, "nobody noticed the stop"
        forget()
        return layer.calls

    def release(self) -> None:
        """Close the files of readers."""
        for held in self.held:
            os.close(held.fd)
        self.held.clear()

    def close(self) -> None:
        self.release()
        forget()
        shutil.rmtree(self.root)


def write_documents(root: Path, form: Form, codec: str) -> None:
    for key, value in form.documents(codec).items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(value)


@contextmanager
def numbered_owners() -> Iterator[None]:
    """Journals are the same in each run."""
    numbers = itertools.count(1)
    with mock.patch("secrets.randbits", side_effect=lambda _: next(numbers)):
        yield


# ----------------------------------------------------------------------------- checks


def local_fsspec(root: Path) -> FsspecStore:
    return FsspecStore(_file_system(), path=str(root))


@cache
def _file_system() -> AsyncFileSystemWrapper:
    return AsyncFileSystemWrapper(LocalFileSystem(auto_mkdir=True), asynchronous=True)


def read_all(m: ShardingMapping, form: Form) -> Model:
    """All entries, by one call; and their keys, which are listed."""
    keys = [form.chunk_key(i) for i in range(CPS - 1)]
    values = m.get_partial_values([(key, (0, None)) for key in keys])
    found = {i: value for i, value in enumerate(values) if value is not None}
    listed = set(m.list_prefix(os.path.dirname(form.shard_key)))
    documents = set(form.documents("gzip"))
    assert listed - documents == {form.chunk_key(i) for i in found}
    return found


def check_readers(
    root: Path, form: Form, allowed: Sequence[Model], strategy: Any, *, all_kinds: bool = True
) -> Model:
    """Whoever only reads sees all of a call, or nothing, and changes no file."""
    before = state_of(root)
    found = read_all(ShardingMapping(root, strategy=strategy), form)
    assert found in allowed
    assert read_all(ShardingMapping(LocalStore(root, read_only=True)), form) == found
    if all_kinds:
        assert read_all(ShardingMapping(local_fsspec(root)), form) == found
        assert read_all(ShardingMapping(WrapperStore(local_fsspec(root))), form) == found
    one_by_one = ShardingMapping(root)
    for i in range(CPS - 1):
        assert one_by_one.get(form.chunk_key(i)) == found.get(i)
    assert state_of(root) == before
    return found


def check_native(root: Path, form: Form, codec: str, expected: Model) -> None:
    """What zarr-python reads is what the values are."""
    shard = root / form.shard_key
    found = form.read_natively(shard.read_bytes() if shard.exists() else None, codec)
    chunks = np.zeros_like(found)
    for i, value in expected.items():
        data = gzip.decompress(value) if codec == "gzip" else value
        chunks[CPS + i] = np.frombuffer(data, "u1")
    np.testing.assert_array_equal(found, chunks)


NEW = packed(-1, 77)
NEW_RAW = random.Random(-1).randbytes(CHUNK_NBYTES)


def check_recovery(run: Run, found: Model, writer: ShardingMapping | None = None) -> None:
    """A writer goes on; after flush nothing is left, and zarr-python reads the same."""
    root, form, codec = run.root, run.form, run.workload.codec
    writer = writer or run.open()
    left = {key for key in state_of(root) if key.endswith(".partial")}
    new = Put({3: NEW if codec == "gzip" else NEW_RAW})
    expected = new.after(found)
    new.run(writer, form)
    assert read_all(run.open(), form) == expected
    writer.flush()
    assert read_all(run.open(), form) == expected
    check_native(root, form, codec, expected)
    documents = set(form.documents(codec))
    assert set(state_of(root)) == documents | {form.shard_key} | left
    for held in run.held:
        held.check()


def check_stops(
    tmp_path: Path, form: Form, workload: Workload, options: dict[str, Any], writer: Any = None
) -> int:
    """Stop at each call, and check what is left; return how many stops there were."""
    seen = set()
    n_stops = 0
    for run in stopped_runs(tmp_path, form, workload, options):
        if writer is WRITERS["wrapped fsspec"]:
            run.release()  # it writes into the file that is there
        n_stops += 1
        state = frozenset(state_of(run.root).items()), len(run.models)
        if state not in seen:
            seen.add(state)
            all_kinds = form is FORMS["checksum"] or workload in map(WORKLOADS.get, SOME)
            found = check_readers(
                run.root, form, run.allowed, options["strategy"], all_kinds=all_kinds
            )
            check_recovery(run, found, None if writer is None else writer(run.root))
    return n_stops


def stopped_runs(
    tmp_path: Path, form: Form, workload: Workload, options: dict[str, Any]
) -> Iterator[Run]:
    """Runs that stopped at each call of a workload, each in a directory of its own."""
    numbers = itertools.count()

    def new_run() -> Run:
        return Run(tmp_path / str(next(numbers)), form, workload, options)

    with numbered_owners():
        whole = new_run()
        calls = whole.run_to(None)
    whole.close()
    check_shows(calls, form, workload, options)
    for position, call in enumerate(calls):
        for stop in call.stops():
            run = new_run()
            with numbered_owners():
                assert run.run_to(Stop(position, stop.how)) == calls[: position + 1]
            yield run
            run.close()


def check_shows(
    calls: Sequence[Call], form: Form, workload: Workload, options: dict[str, Any]
) -> None:
    """The workload is what its name says."""
    if form is FORMS["checksum"] and options["strategy"] == "append":
        done = {f"{call.name} {call.file}" for call in calls}
        done |= {f"lengthen {call.file}" for call in calls if call.lengthens}
        assert done >= set(workload.shows)


# ------------------------------------------------------------------------------ tests


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory, if there is such a file system: thousands of files are made and removed."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    """Of these processes only one is alive."""
    with tuned(lock_wait_s=0.5):
        yield


APPEND = {"strategy": "append"}


@pytest.mark.thorough(of=14)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_stop(workload: str, form: str, tmp_path: Path) -> None:
    """Strategy ``append``."""
    n_stops = check_stops(tmp_path, FORMS[form], WORKLOADS[workload], APPEND)
    assert n_stops > 5 or workload.startswith("flush")


@pytest.mark.thorough(of=12)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workload", ["overwrite", "group", "growth", "erase one"])
def test_a_journal_does_nothing_to_a_file_of_another_program(
    workload: str, form: str, tmp_path: Path
) -> None:
    """The writer is killed at any call. Another program, which knows no journal, has read the shard
    as it was or as it would have been, and renames its own to the name: all of that is seen."""
    of_form = FORMS[form]
    for run in stopped_runs(tmp_path, of_form, WORKLOADS[workload], APPEND):
        shard = run.root / of_form.shard_key
        if not shard.exists():
            continue
        theirs: Model = {}
        for known in run.allowed:
            newer = known | {next(iter(known)): packed(-2, 55)}
            fewer = dict(list(known.items())[1:])
            for theirs in (known, newer, fewer):
                other = shard.with_name("other")
                other.write_bytes(of_form.build(theirs))
                other.replace(shard)
                assert read_all(ShardingMapping(run.root, strategy="append"), of_form) == theirs
        check_recovery(run, theirs)


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("form", FORMS)
def test_chunks_that_look_like_shards(form: str, tmp_path: Path) -> None:
    """Wherever the file is cut, no chunk is taken for the index."""
    workload = shard_like_workload(FORMS[form])
    assert check_stops(tmp_path, FORMS[form], workload, APPEND) > 50


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("workload", SOME)
def test_rewriting(workload: str, tmp_path: Path) -> None:
    """Strategy ``rewrite``: one rename is the whole change."""
    options = {"strategy": "rewrite"}
    assert check_stops(tmp_path, FORMS["checksum"], WORKLOADS[workload], options) > 5


@pytest.mark.thorough(of=6)
@pytest.mark.parametrize("workload", ["new shard", "overwrite", "growth", "erase all", "full"])
def test_synced(workload: str, tmp_path: Path) -> None:
    """With ``durability="power"`` there are more calls to stop at."""
    options = APPEND | {"durability": "power"}
    with not_synced():
        n_stops = check_stops(tmp_path, FORMS["checksum"], WORKLOADS[workload], options)
    assert n_stops > 15


WRITERS = {
    "rewrite": lambda root: ShardingMapping(root, strategy="rewrite"),
    "wrapped fsspec": lambda root: ShardingMapping(WrapperStore(local_fsspec(root))),
}


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("workload", ["group", "growth", "full"])
def test_another_kind_of_writer_goes_on(workload: str, writer: str, tmp_path: Path) -> None:
    """One that replaces files takes the change back, or finishes it, first."""
    form = FORMS["checksum"]
    assert check_stops(tmp_path, form, WORKLOADS[workload], APPEND, WRITERS[writer]) > 5


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize(
    ("workload", "form"),
    [("group", "checksum"), ("growth", "checksum"), ("growth", "draft"), ("full", "start")],
)
def test_recovery_stops_too(workload: str, form: str, tmp_path: Path) -> None:
    """The writer that comes next is stopped while it repairs, the one after it goes on."""
    form_, load = FORMS[form], WORKLOADS[workload]
    numbers = itertools.count()
    seen: set[Any] = set()

    def goes_on(first: Run, stop: Stop | None, files: dict[str, bytes]) -> list[Call]:
        root = tmp_path / f"again {next(numbers)}"
        write_state(root, files)
        found = read_all(ShardingMapping(root), form_)
        run = Run(root, form_, load, APPEND, models=[found])
        with FileLayer(root, stop).installed() as layer:
            try:
                m = run.open()
                run.take(Put({3: NEW}), m)
                run.take(Flush(), m)
            except Stopped:
                assert stop is not None
            else:
                assert stop is None
        forget()
        state = frozenset(state_of(root).items()), len(run.models)
        if stop is not None and state not in seen:
            seen.add(state)
            check_recovery(run, check_readers(root, form_, run.allowed, "append"))
        run.close()
        return layer.calls

    first_states = set()
    for first in stopped_runs(tmp_path, form_, load, APPEND):
        files = state_of(first.root)
        if frozenset(files.items()) in first_states:
            continue
        first_states.add(frozenset(files.items()))
        calls = goes_on(first, None, files)
        n_of_repair = next((i + 1 for i, call in enumerate(calls) if call.name == "sync"), 0)
        for position, call in enumerate(calls[:n_of_repair]):
            for stop in call.stops():
                if stop.how != "after":  # is that before the next one
                    goes_on(first, Stop(position, stop.how), files)
    assert len(seen) > 3


# --------------------------------------------------------------------- losses of power


@contextmanager
def not_synced() -> Iterator[None]:
    """Nothing here loses power, or only as the tests say."""
    with system_calls(lambda name, call: (lambda _: None) if name == "sync" else call):
        yield


@dataclass
class Recording:
    """All that a disk was told by a workload, and when each call was acknowledged."""

    layer: RecordingLayer
    models: list[Model]
    acknowledged: list[int]
    """Events that had been when `models` of the next number was acknowledged."""

    def losses(self) -> Iterator[tuple[int, Disk, list[Model]]]:
        """After each event: how many there were, the disk, and what may be found."""
        for n in range(len(self.layer.events) + 1):
            n_done = sum(at <= n for at in self.acknowledged)
            yield n, self.layer.disk_after(n), self.models[n_done : n_done + 2]


def record(root: Path, form: Form, workload: Workload, options: dict[str, Any]) -> Recording:
    root.mkdir()
    run = Run(root, form, workload, options)
    write_documents(root, form, workload.codec)
    layer = RecordingLayer(root)
    recording = Recording(layer, run.models, [])
    with numbered_owners(), layer.installed():
        m = run.open()
        for step in [*workload.before, *workload.stopped]:
            run.take(step, m)
            recording.acknowledged.append(len(layer.events))
    layer.close()
    run.close()
    return recording


def some_survivors(n: int) -> Iterator[Any]:
    """Of `n` things that the disk was told: none, all, each one alone, all but each one, and
    each one half."""
    whole = (0.0, 1.0)
    yield lambda i: None
    yield lambda i: whole
    for chosen in range(n):
        yield lambda i, chosen=chosen: whole if i == chosen else None
        yield lambda i, chosen=chosen: None if i == chosen else whole
        yield lambda i, chosen=chosen: (0.0, 0.5) if i == chosen else whole
        yield lambda i, chosen=chosen: (0.5, 1.0) if i == chosen else None


class PowerCheck:
    """Makes what a disk has after a loss of power, and checks it."""

    def __init__(
        self, tmp_path: Path, form: Form, workload: Workload, options: dict[str, Any]
    ) -> None:
        self._tmp_path, self._form, self._workload, self._options = (
            *(tmp_path, form, workload, options),
        )
        self._numbers = itertools.count()
        self.seen: set[Any] = set()

    def check(self, files: dict[str, bytes], allowed: list[Model]) -> None:
        state = frozenset(files.items()), len(allowed), frozenset(allowed[0].items())
        if state in self.seen:
            return
        self.seen.add(state)
        root = self._tmp_path / f"lost {next(self._numbers)}"
        write_state(root, files)
        run = Run(root, self._form, self._workload, self._options)
        check_recovery(run, check_readers(root, self._form, allowed, "append", all_kinds=False))
        run.close()


POWER = {"durability": "power"}
LOSING = [
    *((name, "checksum", "append") for name in WORKLOADS),
    *((name, "draft", "append") for name in ("overwrite", "growth", "flush and go on")),
    *((name, "start", "append") for name in ("new shard", "overwrite", "full")),
    *((name, "checksum", "rewrite") for name in ("new shard", "overwrite", "erase all")),
]


@pytest.mark.thorough(of=7)
@pytest.mark.parametrize(("workload", "form", "strategy"), LOSING)
def test_every_loss_of_power(workload: str, form: str, strategy: str, tmp_path: Path) -> None:
    """After each call: whatever was not synced is lost, or is there, or in part. What was
    acknowledged is there; of the call under way all or nothing."""
    options = POWER | {"strategy": strategy}
    recording = record(tmp_path / "whole", FORMS[form], WORKLOADS[workload], options)
    power = PowerCheck(tmp_path, FORMS[form], WORKLOADS[workload], options)
    with not_synced():
        for _, disk, allowed in recording.losses():
            for survives in some_survivors(len(disk.pending)):
                power.check(disk.after_loss(recording.layer.top, survives), allowed)
    assert len(power.seen) > 5


@pytest.mark.thorough(of=3)
@given(st.data())
@settings(max_examples=rounds(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("workload", ["group", "growth", "flush and go on", "another process"])
def test_any_loss_of_power(workload: str, tmp_path: Path, data: st.DataObject) -> None:
    """Any part of what was not synced survives."""
    options = POWER | APPEND
    form, load = FORMS["checksum"], WORKLOADS[workload]
    recording = _recorded(workload)
    n_events = data.draw(st.integers(0, len(recording.layer.events)))
    n_done = sum(at <= n_events for at in recording.acknowledged)
    disk = recording.layer.disk_after(n_events)
    shares = st.tuples(st.floats(0, 1), st.floats(0, 1))
    part = st.one_of(st.none(), st.just((0.0, 1.0)), shares)
    parts = data.draw(st.lists(part, min_size=len(disk.pending), max_size=len(disk.pending)))
    with not_synced(), tempfile.TemporaryDirectory(dir=tmp_path) as directory:
        PowerCheck(Path(directory), form, load, options).check(
            disk.after_loss(recording.layer.top, parts.__getitem__),
            recording.models[n_done : n_done + 2],
        )


@cache
def _recorded(workload: str) -> Recording:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "whole"
        return record(root, FORMS["checksum"], WORKLOADS[workload], POWER | APPEND)


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("workload", ["large new shard", "gap", "growth", "flush"])
def test_loss_of_power_after_a_kill(workload: str, tmp_path: Path) -> None:
    """A writer is killed, what it wrote is synced by nobody; another one goes on, and then the
    power fails. What the two acknowledged is there."""
    form, load, options = FORMS["checksum"], WORKLOADS[workload], POWER | APPEND
    power = PowerCheck(tmp_path, form, load, options)
    for position in itertools.count():
        root = tmp_path / f"killed {position}"
        run = Run(root, form, load, options)
        write_documents(root, form, load.codec)
        layer = RecordingLayer(root)
        with numbered_owners(), layer.installed():
            m = run.open()
            for step in load.before:
                run.take(step, m)
            layer.stop = Stop(len(layer.calls) + position, "before")
            try:
                for step in load.stopped[:1]:
                    run.take(step, m)
            except Stopped:
                forget()
            if not layer.is_dead:
                break
            n_events = len(layer.events)
            allowed = run.allowed
            layer.revive()
            found = read_all(run.open(), form)
            new = Put({3: NEW})
            new.run(run.open(), form)
            n_done = len(layer.events)
        layer.close()
        run.close()
        with not_synced():
            for n in range(n_events, n_done + 1):
                disk = layer.disk_after(n)
                models = [new.after(found)] if n == n_done else [*allowed, new.after(found)]
                for survives in some_survivors(len(disk.pending)):
                    power.check(disk.after_loss(layer.top, survives), models)
    layer.close()
    run.close()
    assert len(power.seen) > 30
