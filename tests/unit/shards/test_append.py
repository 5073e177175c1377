"""The append strategy against a model of a shard file and its journal, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.flows import Recorder, delete_entry, map_entry, patch_entry, set_entry
from zarr_shardstore.errors import CorruptShardError, SpecError
from zarr_shardstore.format.journal import decode_journal, find_repair
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.format.shard import (
    DRAFT_INDEX,
    ZEP2_INDEX,
    IndexDamageError,
    IndexFormat,
    ShardingSpec,
    build_shard,
    index_of_shard,
    split_shard,
)
from zarr_shardstore.shards.append import append_to_shard, seal_shard
from zarr_shardstore.shards.requests import (
    ChangeShard,
    Delete,
    EntryUpdate,
    Flow,
    Found,
    Get,
    Modify,
    OpenShard,
    Set,
    SetIfNotExists,
    SetPartial,
    SetWithGaps,
)
from zarr_shardstore.shards.shard_writer import (
    Barrier,
    FileStep,
    ShardWriter,
    Truncate,
    WriteAt,
    start_of_index,
)

MIB = 1024 * 1024
Files = tuple[bytes, bytes]
"""A shard file and its journal."""


def shard_of(n: int = 8, form: IndexFormat = ZEP2_INDEX, grid: int | None = None) -> ShardRef:
    return shard_in((n if grid is None else grid,), (n,), form)


def shard_in(
    grid: tuple[int, ...] | None, cps: tuple[int, ...], form: IndexFormat = ZEP2_INDEX
) -> ShardRef:
    spec = ShardingSpec(cps, form)
    layout = ArrayLayout("a", "a/", ChunkKeyEncoding("default", "/"), grid, spec)
    return layout.shard((0,) * len(cps))


def taken(files: Files, step: FileStep, first: float = 0, last: float = 1) -> Files:
    """The files after a step, or after a part of its bytes."""
    shard, journal = map(bytearray, files)
    named = {"shard": shard, "journal": journal}
    match step:
        case WriteAt(name, offset, pieces):
            data, file = b"".join(pieces), named[name]
            start, stop = int(len(data) * first), int(len(data) * last)
            data, offset = data[start:stop], offset + start
            file.extend(bytes(max(0, offset - len(file))))
            file[offset : offset + len(data)] = data
        case Truncate(name, nbytes):
            file = named[name]
            file.extend(bytes(max(0, nbytes - len(file))))
            del file[nbytes:]
    return bytes(shard), bytes(journal)


def stopped(files: Files, steps: Sequence[FileStep]) -> Iterator[Files]:
    """The files after a kill in or after any step; and after a loss of power, which keeps any of
    the steps since the last barrier."""
    kept = files
    since: list[FileStep] = []
    for step in (*steps, Barrier()):
        if isinstance(step, Barrier):
            for n in range(len(since) + 1):
                for some in itertools.combinations(since, n):
                    found = kept
                    for each in some:
                        found = taken(found, each)
                    yield found
            for each in since:
                yield taken(kept, each, last=0.5)
                yield taken(kept, each, first=0.5)
                kept = taken(kept, each)
                yield kept
            since = []
        else:
            since.append(step)


def repaired(files: Files) -> bytes:
    data = bytearray(files[0])
    repair = find_repair(
        decode_journal(files[1]), len(data), lambda at, n: bytes(data[at : at + n])
    )
    if repair is not None:
        for offset, new in repair.writes:
            data[offset : offset + len(new)] = new
        if repair.size is not None:
            del data[repair.size :]
    return bytes(data)


class ShardFiles:
    """Performs flows on one shard file, as the backend for local files does."""

    def __init__(self, shard: ShardRef, data: bytes | None = None) -> None:
        self.shard = shard
        self.files: Files | None = None if data is None else (data, b"")
        self.writer: ShardWriter | None = None
        self.owner = 1
        self.stops: list[Files] = []
        self.requests: list[Any] = []

    def entries(self) -> dict[int, bytes]:
        if self.files is None:
            return {}
        found = split_shard(self.files[0], self.shard.layout.spec)
        return {i: bytes(value) for i, value in found.items()}

    def opened(self, data_end: int | None = None) -> ShardWriter:
        """A writer of the file as it is, that knows nothing else."""
        assert self.files is not None
        data, journal = self.files
        nbytes = self.shard.layout.spec.index_nbytes
        at_start = self.shard.layout.spec.index.location == "start"
        start = 0 if at_start else max(0, len(data) - nbytes)
        if data_end is None and (found := decode_journal(journal)) is not None:
            data_end = found.data_end_at(start)
        index = data[start : start + nbytes]
        return ShardWriter(self.shard, index, len(data), data_end, self.owner)

    def perform(self, request: Any) -> Any:
        self.requests.append(request)
        match request:
            case OpenShard(shard, data_end):
                if self.files is None:
                    return None
                if self.writer is None:
                    self.writer = self.opened(data_end)
                assert self.writer.is_valid
                assert self.writer.belongs_to(shard)
                return self.writer
            case ChangeShard(key, steps, closes):
                assert key == self.shard.key
                assert self.files is not None
                assert self.writer is not None
                assert not steps or not self.writer.is_valid  # until they are taken
                self.stops += stopped(self.files, steps)
                for step in steps:
                    self.files = taken(self.files, step)
                self.writer.is_valid = True
                if closes:
                    self.writer, self.files = None, (self.files[0], b"")
            case SetWithGaps(key, parts):
                assert key == self.shard.key
                data = b""
                for offset, pieces in parts:
                    data = data.ljust(offset, b"\0") + b"".join(pieces)
                self.writer, self.files = None, (data, b"")
            case Get(opened=True):
                assert self.files is not None
                return Recorder({request.key: self.files[0]}).run(ask_one(request))
            case _:
                recorder = Recorder({} if self.files is None else {self.shard.key: self.files[0]})
                reply = recorder.run(ask_one(request))
                if isinstance(request, Set | Delete):
                    left = recorder.objects.get(self.shard.key)
                    self.writer, self.files = None, None if left is None else (left, b"")
                return reply
        return None

    def run(self, flow: Flow[Any]) -> Any:
        self.stops, self.requests = [], []
        try:
            batch = next(flow)
            while True:
                batch = flow.send([self.perform(request) for request in batch])
        except StopIteration as stop:
            return stop.value

    def commit(self, *groups: Sequence[EntryUpdate], order: Any = "C", **options: Any) -> Any:
        return self.run(append_to_shard(self.shard, groups, order=order, **options))

    def kinds(self) -> list[type]:
        return [type(request) for request in self.requests]


def ask_one(request: Any) -> Flow[Any]:
    (reply,) = yield [request]
    return reply


def state_of(writer: ShardWriter) -> tuple[Any, ...]:
    return (
        writer.index().fields.tolist(),
        writer.size,
        writer.index_start,
        writer.crc,
        writer.n_present,
        writer.live_nbytes,
        writer.data_end,
        writer.damaged,
    )


FORMS = [
    form
    for checksum in (True, False)
    for form in (IndexFormat(checksum), IndexFormat(checksum, "start", "big"))
]

values = st.integers(0, 40).map(lambda n: bytes([n]) * n)
entry_ids = st.integers(0, 5)
updates = st.one_of(
    st.builds(set_entry, entry_ids, values, only_if_missing=st.booleans()),
    st.builds(delete_entry, entry_ids),
    st.builds(patch_entry, entry_ids, st.tuples(st.tuples(st.integers(0, 3), values))),
    st.builds(
        map_entry, entry_ids, st.just(lambda old: None if old is None else bytes(old) + b"+")
    ),
)


def applied(entries: dict[int, bytes], group: Sequence[EntryUpdate]) -> dict[int, bytes] | None:
    """The values after a group; ``None`` if a piece begins behind the end of its value."""
    new: dict[int, bytes | None] = {**entries}
    for i, update in group:
        old = new.get(i)
        match update:
            case Delete():
                new[i] = None
            case Set(_, value):
                new[i] = bytes(value)
            case SetIfNotExists(_, value):
                new[i] = bytes(value) if old is None else old
            case SetPartial(_, ((start, value),)):
                if start > len(old or b""):
                    return None
                new[i] = (old or b"")[:start] + bytes(value) + (old or b"")[start + len(value) :]
            case Modify():
                new[i] = None if old is None else old + b"+"
    return {i: value for i, value in new.items() if value is not None}


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=25)
@given(
    st.lists(
        st.lists(st.lists(updates, min_size=1, max_size=2), min_size=1, max_size=2),
        min_size=4,
        max_size=8,
    ),
    st.data(),
)
def test_any_updates_stopped_anywhere(
    form: IndexFormat, commits: list[list[list[EntryUpdate]]], data: st.DataObject
) -> None:
    """Law: each group counts whole or not at all; a stop at any step, and the repair, leave the
    values before or after; and an index that was read once stays true while the file lives."""
    model = ShardFiles(shard_of(6, form, data.draw(st.integers(4, 6), label="grid")))
    entries: dict[int, bytes] = {}
    seen: list[tuple[Any, dict[int, bytes]]] = []
    for groups in commits:
        before, expected = entries, []
        for group in groups:
            after = applied(entries, group)
            expected.append(after is None)
            entries = entries if after is None else after
        limit = data.draw(st.sampled_from([None, None, 0, 100]))
        outcomes = model.commit(*groups, max_dead_nbytes=limit)
        assert [isinstance(outcome, SpecError) for outcome in outcomes] == expected
        assert model.entries() == entries
        for files in model.stops:
            left = split_shard(repaired(files), model.shard.layout.spec)
            assert {i: bytes(v) for i, v in left.items()} in (before, entries)
        if {Set, SetWithGaps, Delete} & set(model.kinds()):
            seen = []
        if model.files is not None:
            for index, then in seen:
                for i, value in then.items():
                    offset, nbytes = index.entry(i)
                    assert model.files[0][offset : offset + nbytes] == value
            seen.append((index_of_shard(model.files[0], model.shard.layout.spec), dict(entries)))
        if model.writer is not None:
            assert state_of(model.writer) == state_of(model.opened())
            if data.draw(st.booleans(), label="another writer"):
                model.writer, model.owner = None, model.owner + 1
    model.run(seal_shard(model.shard, order="C"))
    assert model.entries() == entries
    if model.files is not None:
        assert model.files[1] == b""
        assert model.opened().gap_nbytes < model.shard.layout.spec.index_nbytes


# ------------------------------------------------------------------- requests and steps

VALUE = b"12345678"
ADDED: list[EntryUpdate] = [set_entry(1, VALUE)]


def begun(form: IndexFormat = ZEP2_INDEX, n: int = 8, **options: Any) -> ShardFiles:
    """A shard of which entry 0 was written."""
    model = ShardFiles(shard_of(n, form, **options))
    model.commit([set_entry(0, VALUE)])
    return model


def test_the_first_write_makes_a_gap_and_a_journal_that_tells_where_it_begins() -> None:
    model = begun()
    assert model.kinds() == [OpenShard, SetWithGaps, OpenShard, ChangeShard]
    assert model.requests[2] == OpenShard(model.shard, len(VALUE))
    assert model.files is not None
    found = decode_journal(model.files[1])
    assert found is not None
    assert (found.header.data_end, found.record) == (len(VALUE), None)
    # Sixteen times the index; more would be needed for entries of more than some 256 bytes.
    assert found.header.index_start == len(VALUE) + 16 * model.shard.layout.spec.index_nbytes
    large = ShardFiles(shard_of())
    large.commit([set_entry(0, bytes(MIB))])
    assert large.files is not None
    # A quarter more than the seven missing entries would take; the index does not cross a page.
    assert 0 <= len(large.files[0]) - (MIB + 7 * MIB * 1.25 + 132) < 4096
    large.files = None
    large.commit([set_entry(0, bytes(MIB)), set_entry(1, bytes(3 * MIB))])
    assert large.files is not None
    assert 0 <= len(large.files[0]) - (4 * MIB + 6 * 2 * MIB * 1.25 + 132) < 4096


def test_a_shard_of_an_index_at_the_start_needs_no_gap() -> None:
    model = begun(IndexFormat(True, "start"))
    assert model.kinds() == [OpenShard, SetWithGaps]
    assert model.files == (build_shard({0: VALUE}, model.shard.layout.spec), b"")


def test_a_write_puts_the_journal_before_the_index_and_the_entry() -> None:
    """Barriers separate what must be on the disk first; the last step ends the change."""
    model = begun()
    model.commit(ADDED)
    assert model.kinds() == [OpenShard, ChangeShard]
    steps = model.requests[1].steps
    index_start = 8 + 16 * 132
    places = [(s.file, s.offset) if isinstance(s, WriteAt) else s for s in steps]
    assert places == [
        ("journal", 40),
        ("shard", 8),
        Barrier(),
        ("shard", index_start + 16),  # its entry, and all up to the checksum: one write in a page
        Barrier(),
        ("journal", 24),
    ]
    assert [len(b"".join(s.pieces)) for s in steps if isinstance(s, WriteAt)] == [
        20 + 36 + 4,
        8,
        7 * 16 + 4,
        16,
    ]


def test_a_write_of_another_process_begins_the_journal() -> None:
    model = begun()
    model.writer, model.owner = None, 7
    model.commit(ADDED)
    first, second, *_ = model.requests[1].steps
    assert (first.file, first.offset, second) == ("journal", 0, Barrier())
    assert model.files is not None
    found = decode_journal(model.files[1])
    assert found is not None
    assert (found.header.owner, found.header.data_end) == (7, 16)
    assert (found.header.number, found.header.has_checksum) == (1, True)


def test_the_number_of_a_state_starts_again_after_the_largest() -> None:
    model = begun()
    assert model.writer is not None
    model.writer._number = 2**32 - 1
    model.writer._head = b""
    model.commit(ADDED)
    assert model.files is not None
    found = decode_journal(model.files[1])
    assert found is not None
    assert found.header.number == 0


def test_a_write_beyond_the_gap_moves_the_index_first() -> None:
    model = begun()
    model.commit([set_entry(1, bytes(4000)), set_entry(2, bytes(1000))])
    assert model.kinds() == [OpenShard, ChangeShard]
    files = [s.file if isinstance(s, WriteAt) else "|" for s in model.requests[1].steps]
    # record of the move, copy of the index; then as any change, with a new journal
    moved = ["journal", "|", "shard", "|"]
    assert files == [*moved, "journal", "|", "journal", "shard", "|", "shard", "|", "journal"]
    assert model.writer is not None
    writer = model.writer
    old_end = 8 + 16 * 132 + 132
    assert (writer.entry(1), writer.entry(2)) == ((old_end, 4000), (old_end + 4000, 1000))
    # Seven entries were missing; room for as many more, and a quarter of that.
    assert writer.index_start == old_end + 5000 + 7 * 2500 * 1.25
    assert writer.dead_nbytes == 17 * 132


@pytest.mark.parametrize("form", [ZEP2_INDEX, DRAFT_INDEX, IndexFormat(True, "start")], ids=str)
def test_the_last_entry_seals(form: IndexFormat) -> None:
    model = begun(form, 3)
    model.commit(ADDED)
    model.commit([set_entry(2, VALUE)])
    assert model.kinds() == [OpenShard, ChangeShard, ChangeShard]
    assert model.requests[2].closes
    expected = build_shard({0: VALUE, 1: VALUE, 2: VALUE}, model.shard.layout.spec)
    assert model.files == (expected, b"")


def test_a_full_shard_is_not_sealed_by_a_write_that_fills_nothing() -> None:
    model = begun(n=3)
    model.commit(ADDED)
    model.commit([set_entry(2, VALUE)])
    model.commit([set_entry(2, b"1")])
    assert model.kinds() == [OpenShard, ChangeShard]


def test_a_sealed_shard_at_the_edge_stays_open_until_no_entry_is_missing() -> None:
    """Its array may grow slice by slice: entries behind the edge of now will follow."""
    model = begun(n=8, grid=2)
    model.commit(ADDED)
    assert model.kinds()[-1] is ChangeShard
    assert model.writer is None  # sealed
    model.shard = shard_of(grid=3)
    model.commit([set_entry(2, VALUE)])
    assert model.kinds() == [OpenShard, ChangeShard]
    model.shard = shard_of(grid=5)
    model.commit([set_entry(3, VALUE)])
    model.commit([set_entry(4, VALUE)])
    assert model.kinds() == [OpenShard, ChangeShard]
    assert model.writer is not None
    assert model.writer.n_full == 8
    model.shard = shard_of()
    model.commit([set_entry(i, VALUE) for i in (5, 6)])
    assert model.writer is not None
    model.commit([set_entry(7, VALUE)])
    assert model.writer is None


def test_an_array_that_shrinks_is_not_growing() -> None:
    writer = begun().writer
    assert writer is not None
    assert writer.belongs_to(shard_of(grid=4))
    assert (writer.n_full, writer.growing) == (4, frozenset())
    assert writer.belongs_to(shard_of(grid=5))
    assert (writer.n_full, writer.growing) == (8, frozenset({0}))
    assert writer.belongs_to(shard_in(None, (8,)))
    assert writer.belongs_to(shard_of(grid=5))  # it is not known whether it grew
    for other in (shard_of(9), shard_of(form=DRAFT_INDEX), shard_of().layout.shard((1,))):
        assert not writer.belongs_to(other)
    assert writer.shard.layout.grid_shape == (5,)
    flat = ShardFiles(shard_in((1, 1, 1), (2, 2, 2)))
    flat.commit([set_entry(1, VALUE)])
    opened = flat.opened()
    for grid in ((2, 1, 1), (2, 2, 1)):
        assert opened.belongs_to(shard_in(grid, (2, 2, 2)))
    assert (opened.n_full, opened.growing) == (4, frozenset({0, 1}))


def test_deleting_the_last_entry_removes_the_shard() -> None:
    model = begun()
    model.commit([delete_entry(1)])
    assert model.kinds() == [OpenShard]
    model.commit([delete_entry(0), delete_entry(1)])
    assert model.kinds() == [OpenShard, Delete]
    model.commit([delete_entry(0)])
    assert model.kinds() == [OpenShard]
    assert model.files is None


def test_only_values_that_count_are_read_in_one_request_each() -> None:
    model = begun()
    model.commit(ADDED, [set_entry(2, b"")], [set_entry(4, b"4")], [set_entry(5, b"five")])
    keep: Callable[[Any], Any] = lambda old: old  # noqa: E731
    patch = patch_entry(3, ((0, b"z"),))
    known: list[EntryUpdate] = [set_entry(0, b"x"), map_entry(1, keep), map_entry(5, keep)]
    model.commit(known, [map_entry(2, keep), patch])
    assert model.requests[1:3] == [
        Get("a/c/0", Range(8, 16), opened=True),
        Get("a/c/0", Range(17, 21), opened=True),
    ]
    assert model.kinds() == [OpenShard, Get, Get, ChangeShard]
    expected = {0: b"x", 1: VALUE, 2: b"", 3: b"z", 4: b"4", 5: b"five"}
    assert model.entries() == expected


def test_a_group_that_fails_leaves_no_trace() -> None:
    model = begun()
    bad: list[EntryUpdate] = [set_entry(2, b"no"), patch_entry(3, ((9, b"far"),))]
    outcomes = model.commit(bad, ADDED, [patch_entry(2, ((0, b"z"),))])
    assert [type(outcome) for outcome in outcomes] == [SpecError, type(None), type(None)]
    assert model.entries() == {0: VALUE, 1: VALUE, 2: b"z"}


# ------------------------------------------------------------------- dead bytes


def test_a_shard_with_too_many_dead_bytes_is_stored_again() -> None:
    """The limit itself is allowed."""
    for limit, is_rewritten in ((7, True), (8, False)):
        model = begun()
        model.commit([set_entry(0, b"new")], max_dead_nbytes=limit)
        assert (SetWithGaps in model.kinds()) is is_rewritten
        assert model.entries() == {0: b"new"}


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_shard_that_is_stored_again_has_its_entries_in_order(order: Any) -> None:
    model = ShardFiles(shard_in((2, 2), (2, 2)))
    spec = model.shard.layout.spec
    model.commit([set_entry(2, b"2")], order=order)
    model.commit([set_entry(1, b"1")], order=order)
    model.commit([set_entry(2, b"two")], order=order, max_dead_nbytes=0)
    assert model.files is not None
    data = build_shard({1: b"1", 2: b"two"}, spec, order)[:4]
    assert model.files[0][:4] == data
    model.commit([set_entry(0, b"0")], order=order)
    model.run(seal_shard(model.shard, order=order))
    assert model.files[0][:5] == data + b"0"  # as it is
    model.commit([set_entry(0, b"zero")], order=order)
    model.run(seal_shard(model.shard, order=order, max_dead_share=0))
    assert model.files[0] == build_shard({0: b"zero", 1: b"1", 2: b"two"}, spec, order)
    model.commit([set_entry(2, bytes(900))], order=order)
    model.commit([set_entry(2, b"two")], order=order)
    model.commit([set_entry(3, b"3")], order=order)  # full, and mostly dead
    full = {0: b"zero", 1: b"1", 2: b"two", 3: b"3"}
    assert model.entries() == full
    model.commit([set_entry(0, b"0")], order=order, max_dead_nbytes=0)
    assert model.files == (build_shard({**full, 0: b"0"}, spec, order), b"")  # without a gap


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_full_shard_that_is_mostly_dead_is_stored_again_by_its_seal(order: Any) -> None:
    model = ShardFiles(shard_in((2, 2), (2, 2)))
    for i in (2, 1, 0):
        model.commit([set_entry(i, bytes(400))], order=order)
        model.commit([set_entry(i, b"x%d" % i)], order=order)
    model.commit([set_entry(3, b"x3")], order=order)
    spec = model.shard.layout.spec
    expected = build_shard({i: b"x%d" % i for i in range(4)}, spec, order)
    assert model.files == (expected, b"")


def test_a_gap_that_is_smaller_than_the_index_is_dead() -> None:
    """It cannot be removed: the copy of the index would lie over the index. A larger one can."""
    for n_left, is_stored_again in ((0, False), (1, True), (131, True), (132, False)):
        model = begun()
        model.commit([set_entry(1, bytes(16 * 132 - n_left))])
        assert model.writer is not None
        assert model.writer.gap_nbytes == n_left
        model.run(seal_shard(model.shard, order="C", max_dead_share=0))
        assert (SetWithGaps in model.kinds()) is is_stored_again
        entries = {0: VALUE, 1: bytes(16 * 132 - n_left)}
        assert model.files == (build_shard(entries, model.shard.layout.spec), b"")
    model = begun()
    model.commit([set_entry(0, bytes(16 * 132 - 100))])
    model.commit([set_entry(0, b"")], max_dead_nbytes=None)
    model.run(seal_shard(model.shard, order="C", max_dead_share=1))
    assert SetWithGaps not in model.kinds()  # all may be dead


def test_dead_bytes_are_those_that_no_entry_uses() -> None:
    model = begun()
    model.commit(ADDED)
    model.commit([set_entry(1, b"x"), set_entry(2, b"")])
    writer = model.writer
    assert writer is not None
    assert (writer.data_nbytes, writer.live_nbytes, writer.dead_nbytes) == (17, 9, 8)
    assert writer.gap_nbytes == 16 * 132 - 9
    assert writer.dead_with({}) == 8
    assert writer.dead_with({0: b"y", 1: None, 5: None}) == 8 + 8 + 1
    assert writer.dead_with({3: bytes(16 * 132 - 9)}) == 8
    assert writer.dead_with({3: bytes(16 * 132 - 8)}) == 8 + 132  # the index moves
    at_start = begun(IndexFormat(True, "start")).writer
    assert at_start is None
    opened = begun(IndexFormat(True, "start")).opened()
    assert (opened.data_nbytes, opened.dead_nbytes, opened.gap_nbytes) == (8, 0, 0)
    assert opened.fits(10**9)


@pytest.mark.parametrize(
    ("n_dead", "share", "is_compacted"),
    [
        (4 * 132, 0.5, False),  # a few indexes are nothing
        (4 * 132 + 1, 0.5, True),
        (4 * 132 + 1, 0.99, False),
        (1, 0, True),  # all that is dead
        (0, 0, False),
    ],
)
def test_a_seal_drops_dead_bytes_if_they_are_many(
    n_dead: int, share: float, is_compacted: bool
) -> None:
    model = ShardFiles(shard_of())
    model.commit([set_entry(0, VALUE), set_entry(1, bytes(n_dead))])
    model.commit([delete_entry(1)])
    model.run(seal_shard(model.shard, order="C", max_dead_share=share))
    assert (SetWithGaps in model.kinds()) is is_compacted
    assert model.files is not None
    spec = model.shard.layout.spec
    assert len(model.files[0]) == len(VALUE) + 132 + (0 if is_compacted else n_dead)
    assert (model.files[0] == build_shard({0: VALUE}, spec)) is (is_compacted or not n_dead)
    assert model.entries() == {0: VALUE}


def test_a_shard_that_must_grow_is_compacted_if_it_is_mostly_dead() -> None:
    model = begun()
    model.commit([set_entry(1, bytes(1500))])
    model.commit([set_entry(1, b"x")])
    model.commit([set_entry(2, bytes(1000))])
    assert model.kinds() == [OpenShard, Get, SetWithGaps, OpenShard, ChangeShard]
    assert model.writer is not None
    assert model.writer.dead_nbytes == 0
    assert model.entries() == {0: VALUE, 1: b"x", 2: bytes(1000)}


# ------------------------------------------------------------------- damage


def damaged() -> ShardFiles:
    """A shard whose entry 1 leaves the data."""
    spec = shard_of().layout.spec
    data = bytearray(build_shard({0: VALUE, 1: VALUE, 2: VALUE}, spec))
    index = index_of_shard(bytes(data), spec).without(())
    index.fields[1] = 10**9, 5
    data[-spec.index_nbytes :] = index.encode(spec.index)
    return ShardFiles(shard_of(), bytes(data))


def test_a_damaged_entry_is_replaced_or_nothing_is_written() -> None:
    model = damaged()
    before = model.files
    for updates in (
        [set_entry(3, b"x")],
        [delete_entry(0)],
        [patch_entry(1, ((0, b"x"),))],
    ):
        with pytest.raises(CorruptShardError, match="; nothing was written") as caught:
            model.commit(updates)
        assert caught.value.chunk_key == "a/c/1"
        assert model.files == before
    with pytest.raises(CorruptShardError, match="erase or overwrite this chunk first"):
        model.run(seal_shard(model.shard, order="C"))
    assert model.requests[-1] == ChangeShard(model.shard.key, (), closes=True)
    assert model.files == before
    writer = model.opened()
    assert (writer.damaged, writer.n_present) == ({1}, 3)
    assert writer.live_nbytes == 8 + 8 + 5
    assert writer.data_end == writer.index_start
    model.commit([set_entry(1, b"y")])
    assert model.entries() == {0: VALUE, 1: b"y", 2: VALUE}
    assert model.writer is not None
    assert not model.writer.damaged


def test_a_damaged_index_is_left_alone() -> None:
    model = damaged()
    assert model.files is not None
    model.files = model.files[0][:-1] + b"?", b""
    flow = append_to_shard(model.shard, [ADDED], order="C")
    (request,) = next(flow)
    assert request == OpenShard(model.shard)
    with pytest.raises(IndexDamageError) as damage:
        model.opened()
    with pytest.raises(CorruptShardError, match=r"checksum.*; nothing was written"):
        flow.throw(damage.value)


def test_a_reply_that_is_cut_off_is_no_value() -> None:
    model = begun()
    for reply in (Found(None, 0), Found(memoryview(VALUE[:-1]), 0)):
        flow = append_to_shard(model.shard, [[patch_entry(0, ((0, b"x"),))]], order="C")
        next(flow)
        (request,) = flow.send([model.opened()])
        assert isinstance(request, Get)
        with pytest.raises(CorruptShardError, match="ends before; nothing was written") as caught:
            flow.send([reply])
        assert caught.value.byte_range == (0, 8)


# ------------------------------------------------------------------- the writer


@pytest.mark.parametrize(
    ("changed", "checksum", "expected"),
    [
        ([0], False, [(0, 16)]),
        ([0, 40], False, [(0, 656)]),  # all in one page
        ([0, 33], True, [(0, 544), (65536, 65540)]),
        ([256, 511], False, [(4096, 8192)]),
        ([255, 511], False, [(4080, 4096), (8176, 8192)]),
        ([255, 288], False, [(4080, 4624)]),  # a hole of 512 bytes
        ([255, 289], False, [(4080, 4096), (4624, 4640)]),
        ([4095], True, [(65520, 65540)]),
        ([257, 511], False, [(4112, 8192)]),
        ([257, 512], False, [(4112, 4128), (8192, 8208)]),
    ],
)
def test_only_what_changes_of_a_large_index_is_written(
    changed: list[int], checksum: bool, expected: list[tuple[int, int]]
) -> None:
    """Up to 512 unchanged bytes cost no other write, nor do those in a page."""
    spec = ShardingSpec((4096,), IndexFormat(checksum, "start"))
    layout = ArrayLayout("a", "a/", ChunkKeyEncoding("v2", "/"), (4096,), spec)
    data = build_shard({}, spec)
    writer = ShardWriter(layout.shard((0,)), data, len(data), None, 1)
    steps = writer.change(dict.fromkeys(changed, b""))
    written = [s for s in steps if isinstance(s, WriteAt) and s.file == "shard"][1:]
    places = [(s.offset, s.offset + len(b"".join(s.pieces))) for s in written]
    assert places == expected


def test_an_entry_that_reaches_into_the_next_page_is_not_in_this_one() -> None:
    """One byte of it is, where the index begins at an odd offset."""
    shard = shard_of(4096, DRAFT_INDEX)
    data = build_shard({0: b"x"}, shard.layout.spec)
    writer = ShardWriter(shard, data[1:], len(data), None, 1)
    steps = writer.change(dict.fromkeys([100, 255]))
    places = [s.offset for s in steps if isinstance(s, WriteAt) and s.file == "shard"]
    assert places == [1 + 1600, 1 + 4080]


def test_a_seal_ends_the_journal_before_it_moves_the_index() -> None:
    """A record for another place of the index could undo the change."""
    model = begun()
    writer = model.writer
    assert writer is not None
    index = build_shard({0: VALUE}, model.shard.layout.spec)[8:]
    assert writer.trimmed() == [
        Truncate("journal", 0),
        Barrier(),
        WriteAt("shard", 8, [index]),
        Barrier(),
        Truncate("shard", 8 + 132),
        Barrier(),
    ]
    assert writer.trimmed() == [Truncate("journal", 0), Barrier()]
    first = writer.change({1: VALUE})[0]  # the journal begins anew
    assert isinstance(first, WriteAt)
    assert (first.file, first.offset) == ("journal", 0)


def test_an_index_gets_a_gap_for_what_is_expected_and_lies_in_few_pages() -> None:
    assert start_of_index(100, 64, 0, 0) == 100 + 16 * 64
    assert start_of_index(100, 64, 2000, 0) == 100 + 2500
    assert start_of_index(0, 64, 4 * 64 * MIB, 0) == 64 * MIB
    assert start_of_index(0, 64, 4 * 64 * MIB, 65 * MIB) == 65 * MIB
    assert start_of_index(4096 - 64 - 1024, 64, 0, 0) == 4096 - 64
    assert start_of_index(4096 - 63 - 1024, 64, 0, 0) == 4096  # it would cross a page
    assert start_of_index(1, 8192, 0, 0) == 33 * 4096


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("n", [8, 4096, 4097])
def test_a_writer_knows_its_index(form: IndexFormat, n: int) -> None:
    """Of a large index the checksum is compared, where there is one."""
    model = begun(form, n)
    writer = model.writer or model.opened()
    assert model.files is not None
    data = bytearray(model.files[0])
    asked: list[int] = []

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        assert fd == 3
        asked.append(nbytes)
        return bytes(data[offset : offset + nbytes])

    assert writer.has_index_of(3, pread)
    assert asked == [4 if form.checksum and n == 4097 else len(writer.body) + 4 * form.checksum]
    data[writer.index_start + len(writer.body) - (0 if form.checksum else 1)] ^= 1
    assert not writer.has_index_of(3, pread)
    data = bytearray(8)
    assert not writer.has_index_of(3, pread)


def test_entries_that_a_journal_forgot_are_data_all_the_same() -> None:
    """Bytes that an entry uses are not in the gap, whatever the journal says."""
    data = build_shard({0: VALUE, 1: VALUE}, shard_of().layout.spec)
    index, size = data[-132:], len(data)
    for told, data_end in ((0, 16), (None, 16), (17, 16)):
        assert ShardWriter(shard_of(), index, size, told, 1).data_end == data_end
    longer = ShardWriter(shard_of(), index, size + 10, 20, 1)
    assert (longer.data_end, longer.gap_nbytes, longer.was_sealed) == (20, 6, False)
    assert ShardWriter(shard_of(), index, size, None, 1).was_sealed
    empty = build_shard({}, shard_of().layout.spec)
    assert ShardWriter(shard_of(), empty, 10 + len(empty), 0, 1).data_end == 0


def test_several_values_of_one_entry_are_one_append() -> None:
    model = begun()
    model.commit(*[[set_entry(0, b"%d" % i)] for i in range(9)])
    assert model.kinds() == [OpenShard, ChangeShard]
    assert model.entries() == {0: b"8"}


@pytest.mark.parametrize(("order", "data"), [("C", b"0123"), ("F", b"0213")])
def test_new_values_of_all_entries_are_one_set(order: Any, data: bytes) -> None:
    model = ShardFiles(shard_in((2, 2), (2, 2)))
    outcomes = model.commit(*[[set_entry(i, b"%d" % i)] for i in range(4)], order=order)
    assert outcomes == [None] * 4
    assert model.kinds() == [Set]
    assert model.files is not None
    assert model.files[0][:4] == data


def test_values_before_and_after_an_update_of_the_same_commit() -> None:
    """What was read, and what a group before it wrote, is what the next group sees."""
    model = begun()
    patch = patch_entry(0, ((0, b"X"),))
    model.commit(ADDED, [patch], [patch_entry(1, ((1, b"Y"),))], [patch_entry(0, ((1, b"Z"),))])
    assert model.entries() == {0: b"XZ345678", 1: b"1Y345678"}


def test_a_value_is_not_lost_with_a_failed_group_that_would_have_replaced_it() -> None:
    """The first group would replace both values, so neither was read for it."""
    model = begun()
    model.commit(ADDED)
    far = patch_entry(3, ((9, b"far"),))
    failed: list[EntryUpdate] = [set_entry(0, b"no"), delete_entry(1), far]
    keep = map_entry(1, lambda old: bytes(old or b"missing") + b"!")
    outcomes = model.commit(failed, [patch_entry(0, ((0, b"X"),))], [far], [keep])
    assert [type(outcome) for outcome in outcomes] == [SpecError, type(None)] * 2
    assert model.entries() == {0: b"X2345678", 1: VALUE + b"!"}
