"""Read flows against recorded requests: rounds, races between them, damaged shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.flows import Recorder
from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef
from zarr_shardstore.format.ranges import ByteRange, Range, Suffix
from zarr_shardstore.format.shard import (
    DRAFT_INDEX,
    ZEP2_INDEX,
    IndexDamageError,
    IndexFormat,
    ShardIndex,
    ShardingSpec,
    build_shard,
    index_of_shard,
)
from zarr_shardstore.shards.index_reads import read_indexes
from zarr_shardstore.shards.read import ReadOptions, read_entries
from zarr_shardstore.shards.requests import Found, FoundIndex, Get, GetIndex, GetSize

DRAFT_SPEC = ShardingSpec((2, 2), DRAFT_INDEX)
ZEP2_SPEC = ShardingSpec((2, 2), ZEP2_INDEX)

NO_GAPS = ReadOptions(max_gap_bytes=0, max_coalesced_bytes=1 << 20)


def make_layout(form: IndexFormat = DRAFT_INDEX) -> ArrayLayout:
    spec = ShardingSpec((2, 2), form)
    return ArrayLayout("a", "a/", ChunkKeyEncoding("draft", "/"), (4, 4), spec)


LAYOUT = make_layout()
SHARD_00 = build_shard({0: b"zero", 1: b"one", 3: b"three"}, DRAFT_SPEC, "C")
SHARD_11 = build_shard({2: b"two", 1: b""}, DRAFT_SPEC, "C")


def reads_of(*coords: tuple[int, int], layout: ArrayLayout = LAYOUT) -> list[ChunkRef]:
    return [layout.chunk(c) for c in coords]


FAR = ReadOptions(max_gap_bytes=0, max_coalesced_bytes=2 << 20, max_requests_at_once=64)

NEAR_GAPS = ReadOptions(max_gap_bytes=2)
FAR_GAPS = ReadOptions(max_gap_bytes=2, max_requests_at_once=64)
"""A gap of 32 bytes may be read along, but not for the sake of a request."""


def layout_far(chunk_nbytes: int | None, form: IndexFormat = ZEP2_INDEX) -> ArrayLayout:
    return replace(make_layout(form), chunk_nbytes=chunk_nbytes)


def contents(values: list[memoryview | None]) -> list[bytes | None]:
    return [None if v is None else bytes(v) for v in values]


def test_two_rounds_one_index_request_a_shard_and_coalesced_spans() -> None:
    """Five chunks of two shards: the exact requests, in two batches."""
    recorder = Recorder({"a/c0/0": SHARD_00, "a/c1/1": SHARD_11})
    reads = reads_of((0, 0), (3, 2), (0, 1), (1, 1), (0, 0))
    values = recorder.run(read_entries(reads, NO_GAPS))
    assert [v and bytes(v) for v in values] == [b"zero", b"two", b"one", b"three", b"zero"]
    assert recorder.batches == [
        [Get("a/c0/0", Suffix(64), consistent=True), Get("a/c1/1", Suffix(64), consistent=True)],
        [Get("a/c0/0", Range(0, 12)), Get("a/c1/1", Range(0, 3))],
    ]


def test_missing_and_empty_chunks_need_no_second_round() -> None:
    """A missing shard, a missing entry and an empty one are known from the index."""
    recorder = Recorder({"a/c1/1": SHARD_11})
    reads = reads_of((0, 0), (2, 2), (2, 3))
    values = recorder.run(read_entries(reads, NO_GAPS))
    assert [v if v is None else bytes(v) for v in values] == [None, None, b""]
    assert len(recorder.batches) == 1


def test_index_at_the_start_is_asked_from_the_start() -> None:
    """index_location start needs no suffix range."""
    layout = make_layout(IndexFormat(checksum=True, location="start"))
    shard = build_shard({3: b"x"}, ShardingSpec((2, 2), layout.spec.index))
    recorder = Recorder({"a/c0/0": shard})
    values = recorder.run(read_entries(reads_of((1, 1), layout=layout), NO_GAPS))
    assert contents(values) == [b"x"]
    assert recorder.batches[0] == [Get("a/c0/0", Range(0, 68))]


def test_ranges_do_not_reach_into_the_neighbour() -> None:
    """An over-long range ends with its entry."""
    recorder = Recorder({"a/c0/0": SHARD_00})
    ranges: list[ByteRange] = [Range(2, 99), Range(50, 60), Suffix(99), Suffix(1)]
    values = recorder.run(read_entries(reads_of(*[(0, 0)] * 4), NO_GAPS, ranges))
    assert contents(values) == [b"ro", b"", b"zero", b"o"]


def test_a_shard_replaced_between_the_rounds_is_asked_again() -> None:
    """The entries moved: without the check the reader would get another chunk's bytes."""
    objects = {"a/c0/0": SHARD_00}

    def replace(n_batches: int) -> None:
        if n_batches == 1:
            objects["a/c0/0"] = build_shard({0: b"ZERO", 1: b"ONE"}, DRAFT_SPEC, "F")

    recorder = Recorder(objects, between=replace)
    values = recorder.run(read_entries(reads_of((0, 1), (1, 1)), NO_GAPS))
    assert values == [b"ONE", None]
    assert len(recorder.batches) == 4


def test_a_shard_that_is_replaced_all_the_time_is_read_whole() -> None:
    """The last attempt takes one request, which a writer cannot come between."""
    objects = {"a/c0/0": SHARD_00}

    def replace(n_batches: int) -> None:
        objects["a/c0/0"] = build_shard({0: b"%d" % n_batches}, DRAFT_SPEC)

    recorder = Recorder(objects, between=replace)
    values = recorder.run(read_entries(reads_of((0, 0)), NO_GAPS))
    assert contents(values) == [b"4"]
    assert recorder.batches[-1] == [Get("a/c0/0", consistent=True)]


def test_a_shard_removed_between_the_rounds_is_missing() -> None:
    """Not an error: the reader sees the state after the removal."""
    objects = {"a/c0/0": SHARD_00}
    recorder = Recorder(objects, between=lambda _: objects.clear())
    assert recorder.run(read_entries(reads_of((0, 0)), NO_GAPS)) == [None]


def damaged(entry_id: int, offset: int, nbytes: int) -> bytes:
    """SHARD_00 with another entry in its index."""
    shard = bytearray(SHARD_00)
    at = len(shard) - 64 + 16 * entry_id
    shard[at : at + 16] = offset.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
    return bytes(shard)


@pytest.mark.parametrize("tells_size", [True, False])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(70, 20), (0, 10**6), (2**63, 2**63), (2**64 - 1, 1), (10, 4)]
)
def test_an_entry_outside_the_data_names_shard_chunk_and_bytes(
    tells_size: bool, offset: int, nbytes: int
) -> None:
    """Whether or not the base store tells the size; other chunks are still read."""
    recorder = Recorder({"a/c0/0": damaged(1, offset, nbytes)}, tells_size=tells_size)
    if (offset, nbytes) != (10, 4) or tells_size:  # (10, 4) reaches 2 bytes into the index
        with pytest.raises(CorruptShardError) as info:
            recorder.run(read_entries(reads_of((0, 1)), NO_GAPS))
        assert info.value.shard_key == "a/c0/0"
        assert info.value.chunk_key == "a/c0/1"
        assert info.value.byte_range == (offset, offset + nbytes)
    values = recorder.run(read_entries(reads_of((0, 0), (1, 1)), NO_GAPS))
    assert contents(values) == [b"zero", b"three"]


@pytest.mark.parametrize("n", [0, 1, 63])
def test_a_truncated_shard(n: int) -> None:
    """Shorter than its index."""
    recorder = Recorder({"a/c0/0": SHARD_00[:n]})
    with pytest.raises(CorruptShardError, match=f"takes 64 bytes, there are {n}"):
        recorder.run(read_entries(reads_of((0, 0)), NO_GAPS))
    with pytest.raises(CorruptShardError, match="a/c0/0"):
        recorder.run(read_indexes([LAYOUT.shard((0, 0))]))


def test_a_wrong_checksum() -> None:
    """One flipped bit in the index of a shard with crc32c."""
    layout = make_layout(ZEP2_INDEX)
    shard = bytearray(build_shard({0: b"x"}, ZEP2_SPEC))
    shard[10] ^= 1
    recorder = Recorder({"a/c0/0": bytes(shard)})
    with pytest.raises(CorruptShardError, match="checksum"):
        recorder.run(read_entries(reads_of((0, 0), layout=layout), NO_GAPS))


# ------------------------------------------------------------------ whole shards

KIB = 1024
ALL_OF_00 = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("n_wanted", "chunk_nbytes", "is_whole"),
    [
        (4, 200 * KIB, True),
        (3, 200 * KIB, True),  # most of it
        (2, 256 * KIB, True),  # little is not wanted
        (2, 256 * KIB + 1, False),
        (1, 1, False),  # one is read by itself
        (4, 512 * KIB, True),
        (4, 512 * KIB + 1, False),  # more than one request may ask for
        (4, None, False),  # nobody knows
    ],
)
def test_what_is_read_whole(n_wanted: int, chunk_nbytes: int | None, is_whole: bool) -> None:
    """In one request, if most of the shard is wanted or the rest is little; near by, never."""
    layout = layout_far(chunk_nbytes)
    objects = {"a/c0/0": build_shard({0: b"zero", 3: b"three"}, ZEP2_SPEC)}
    reads = reads_of(*ALL_OF_00[:n_wanted], layout=layout)
    expected = [b"zero", None, None, b"three"][:n_wanted]
    recorder = Recorder(objects)
    assert contents(recorder.run(read_entries(reads, FAR))) == expected
    assert (recorder.batches == [[Get("a/c0/0")]]) == is_whole
    near = Recorder(objects)
    assert contents(near.run(read_entries(reads, NO_GAPS))) == expected
    assert len(near.batches) == 2


@pytest.mark.parametrize(("n_wanted", "is_whole"), [(3, False), (4, True)])
def test_one_chunk_of_sixteen_is_too_little(n_wanted: int, is_whole: bool) -> None:
    """Of small shards, too, a few of many chunks are read by themselves."""
    spec = ShardingSpec((64,), ZEP2_INDEX)
    encoding = ChunkKeyEncoding("draft", "/")
    layout = ArrayLayout("a", "a/", encoding, (64,), spec, chunk_nbytes=10)
    recorder = Recorder({"a/c0": build_shard({0: b"zero"}, ShardingSpec((64,), ZEP2_INDEX))})
    reads = [layout.chunk((i,)) for i in range(n_wanted)]
    assert contents(recorder.run(read_entries(reads, FAR)))[0] == b"zero"
    assert (recorder.batches == [[Get("a/c0")]]) == is_whole


def test_ranges_are_not_counted_as_wanted() -> None:
    """Of four chunks a few bytes each: two rounds."""
    layout = layout_far(200 * KIB)
    recorder = Recorder({"a/c0/0": build_shard({0: b"zero"}, ZEP2_SPEC)})
    reads = reads_of(*ALL_OF_00, layout=layout)
    assert contents(recorder.run(read_entries(reads, FAR, [Range(1, 3)] * 4))) == [
        b"er",
        None,
        None,
        None,
    ]
    assert len(recorder.batches) == 2


def test_what_is_not_wanted_of_many_shards_has_a_limit() -> None:
    """Two chunks of each of 16 shards: half of these are read whole, 4 MiB are not wanted."""
    layout = replace(layout_far(256 * KIB), grid_shape=(32, 2))
    shard = build_shard({0: b"zero"}, ZEP2_SPEC)
    recorder = Recorder({f"a/c{i}/0": shard for i in range(16)})
    reads = reads_of(*((2 * i, j) for i in range(16) for j in (0, 1)), layout=layout)
    assert contents(recorder.run(read_entries(reads, FAR))) == [b"zero", None] * 16
    n_whole = sum(isinstance(r, Get) and r.byte_range is None for r in recorder.batches[0])
    assert n_whole == 8


def test_at_the_edge_only_chunks_of_the_array_count() -> None:
    """One column of a shard is all that lies in the array."""
    layout = replace(layout_far(200 * KIB), grid_shape=(2, 1))
    recorder = Recorder({"a/c0/0": build_shard({0: b"a", 2: b"b"}, ZEP2_SPEC)})
    reads = reads_of((0, 0), (1, 0), layout=layout)
    assert contents(recorder.run(read_entries(reads, FAR))) == [b"a", b"b"]
    assert recorder.batches == [[Get("a/c0/0")]]


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("tells_size", [True, False])
@pytest.mark.parametrize("nbytes", [1, 32, 64, 65, 100])
def test_a_whole_shard_of_which_half_comes(location: Any, tells_size: bool, nbytes: int) -> None:
    """It is asked for its index, which tells; also if half of it looks like an index."""
    form = IndexFormat(checksum=True, location=location)
    shard = build_shard({0: bytes(nbytes), 1: bytes(nbytes)}, ShardingSpec((2, 2), form))
    recorder = Recorder({"a/c0/0": shard}, tells_size=tells_size, cut={1})
    reads = reads_of(*ALL_OF_00, layout=layout_far(1, form))
    values = recorder.run(read_entries(reads, FAR))
    assert contents(values) == [bytes(nbytes), bytes(nbytes), None, None]
    assert recorder.batches[0] == [Get("a/c0/0")]


def test_without_a_checksum_no_shard_is_read_whole() -> None:
    """The beginning of one could pass for another."""
    layout = layout_far(1, DRAFT_INDEX)
    recorder = Recorder({"a/c0/0": SHARD_00})
    values = recorder.run(read_entries(reads_of(*ALL_OF_00, layout=layout), FAR))
    assert contents(values) == [b"zero", b"one", None, b"three"]
    assert len(recorder.batches) == 2


@pytest.mark.parametrize(("chunk_nbytes", "is_whole"), [(512 * KIB, True), (512 * KIB + 1, False)])
def test_what_a_smaller_array_has_left_behind_counts(chunk_nbytes: int, is_whole: bool) -> None:
    """One chunk is in the array; four may be in the shard."""
    layout = replace(layout_far(chunk_nbytes), grid_shape=(1, 1))
    recorder = Recorder({"a/c0/0": build_shard({0: b"a", 3: b"left"}, ZEP2_SPEC)})
    assert contents(recorder.run(read_entries(reads_of((0, 0), layout=layout), FAR))) == [b"a"]
    assert (recorder.batches == [[Get("a/c0/0")]]) == is_whole


@pytest.mark.parametrize(("nbytes", "n_spans"), [(64 * KIB - 10, 64), (64 * KIB - 9, 100)])
def test_longer_gaps_are_never_read_along(nbytes: int, n_spans: int) -> None:
    """Those of 64 KiB at most; together 4 MiB, 36 of them are no more."""
    spec = ShardingSpec((200,), ZEP2_INDEX)
    layout = ArrayLayout("a", "a/", ChunkKeyEncoding("draft", "/"), (200,), spec)
    entries = {i: bytes(10 if i % 2 == 0 else nbytes + 10) for i in range(200)}
    recorder = Recorder({"a/c0": build_shard(entries, ShardingSpec((200,), ZEP2_INDEX))})
    reads = [layout.chunk((i,)) for i in range(0, 200, 2)]
    options = ReadOptions(max_requests_at_once=64)
    assert contents(recorder.run(read_entries(reads, options))) == [bytes(10)] * 100
    assert len(recorder.batches[1]) == n_spans


@pytest.mark.parametrize(("options", "n_spans"), [(FAR, 256), (NEAR_GAPS, 256), (FAR_GAPS, 64)])
def test_gaps_are_read_along_to_spare_a_round(options: ReadOptions, n_spans: int) -> None:
    """Every fourth chunk of 1,024 is wanted, 30 bytes apart: as many spans as go at once; not if
    no gap is to be read along, and not near by."""
    spec = ShardingSpec((1024,), ZEP2_INDEX)
    layout = ArrayLayout("a", "a/", ChunkKeyEncoding("draft", "/"), (1024,), spec)
    entries = {i: b"%010d" % i for i in range(1024)}
    recorder = Recorder({"a/c0": build_shard(entries, ShardingSpec((1024,), ZEP2_INDEX))})
    wanted = range(0, 1024, 4)
    reads = [layout.chunk((i,)) for i in wanted]
    values = recorder.run(read_entries(reads, options))
    assert contents(values) == [entries[i] for i in wanted]
    _, spans = recorder.batches
    assert len(spans) == n_spans


def test_a_shard_is_read_whole_only_at_first() -> None:
    """Then it is asked for its index: that it came whole and damaged says that it is changing."""
    layout = layout_far(1)
    shard = build_shard({0: b"zero"}, ZEP2_SPEC)
    recorder = Recorder({"a/c0/0": shard}, cut={1})
    values = recorder.run(read_entries(reads_of(*ALL_OF_00, layout=layout), FAR))
    assert contents(values) == [b"zero", None, None, None]
    assert recorder.batches[:2] == [[Get("a/c0/0")], [Get("a/c0/0", Suffix(68), consistent=True)]]


# ------------------------------------------------------------------- cached indexes

INDEX = index_of_shard(SHARD_00, DRAFT_SPEC)
SHARD = LAYOUT.shard((0, 0))
AGAIN = [GetIndex(SHARD, consistent=True, revalidate=True)]


def cached(index: ShardIndex | None, version: object = "v") -> FoundIndex:
    return FoundIndex(index, version, was_requested=False, is_unverified=True)


def test_the_first_round_takes_any_index_that_is_cached() -> None:
    flow = read_entries(reads_of((0, 0)), NO_GAPS)
    assert next(flow) == [GetIndex(SHARD, consistent=False, revalidate=False)]
    assert flow.send([cached(INDEX)]) == [Get(SHARD.key, Range(0, 4))]
    with pytest.raises(StopIteration) as done:
        flow.send([Found(memoryview(b"zero"), "v")])
    assert contents(done.value.value) == [b"zero"]


@pytest.mark.parametrize(
    "reply", [Found(memoryview(b"zero"), "w"), Found(memoryview(b"zer"), "v"), Found(None, "v")]
)
def test_bytes_of_another_version_are_not_taken(reply: Found) -> None:
    flow = read_entries(reads_of((0, 0), (1, 1)), NO_GAPS)
    next(flow)
    flow.send([cached(INDEX)])
    assert flow.send([reply, Found(memoryview(b"three"), "v")]) == AGAIN


@pytest.mark.parametrize(
    ("before", "now", "is_read_again"),
    [
        (cached(INDEX), FoundIndex(INDEX, "v"), False),
        (cached(INDEX), FoundIndex(INDEX, "w"), True),
        (cached(INDEX), FoundIndex(None, "w"), True),
        (cached(None), FoundIndex(None, "w"), False),  # gone before and now
        (cached(None), FoundIndex(INDEX, "w"), True),
        (cached(None), FoundIndex(None, "w", None, IndexDamageError("bad")), True),
    ],
)
def test_a_missing_chunk_has_no_bytes_that_tell_a_version(
    before: FoundIndex, now: FoundIndex, is_read_again: bool
) -> None:
    """So an index that was cached is revalidated in the second round."""
    flow = read_entries(reads_of((1, 0)), NO_GAPS)  # entry 2 is missing
    next(flow)
    assert flow.send([before]) == [GetIndex(SHARD)]
    if is_read_again:
        assert flow.send([now]) == AGAIN
        return
    with pytest.raises(StopIteration) as done:
        flow.send([now])
    assert done.value.value == [None]


def test_shards_are_judged_one_by_one() -> None:
    """A damaged index, a missing chunk, a changed shard and a good one in the same rounds."""
    other = LAYOUT.shard((1, 1))
    shards = [other, *(LAYOUT.shard(c) for c in ((0, 0), (0, 1), (1, 0)))]
    flow = read_entries(reads_of((2, 2), (0, 0), (0, 2), (3, 0)), NO_GAPS)
    assert next(flow) == [GetIndex(s, consistent=False, revalidate=False) for s in shards]
    bad = FoundIndex(None, "v", None, IndexDamageError("bad"))
    out_of_bounds = FoundIndex(index_of_shard(damaged(0, 900, 9), DRAFT_SPEC), "v", 76)
    two = index_of_shard(SHARD_11, DRAFT_SPEC)  # entry 0 is missing
    batch = flow.send([out_of_bounds, bad, cached(two), FoundIndex(None, "v")])
    assert batch == [GetIndex(shards[2])]
    assert flow.send([FoundIndex(two, "v")]) == [
        GetIndex(s, consistent=True, revalidate=True) for s in (other, SHARD)
    ]
    assert flow.send([FoundIndex(two, "v"), FoundIndex(INDEX, "v")]) == [
        Get(SHARD.key, Range(0, 4))
    ]
    with pytest.raises(StopIteration) as done:
        flow.send([Found(memoryview(b"zero"), "v")])
    assert contents(done.value.value) == [None, b"zero", None, None]


def test_a_round_that_fails_is_blamed_on_an_entry_that_leaves_its_shard() -> None:
    """It may ask for a range that a base store refuses. Other failures are those of the store."""
    index = index_of_shard(damaged(1, 900, 9), DRAFT_SPEC)
    for sizes, blamed in (([76, 76], True), ([None, 999], False), ([None, 76], True)):
        flow = read_entries(reads_of((0, 0), (0, 1)), NO_GAPS)
        next(flow)
        assert len(flow.send([FoundIndex(index, "v")])) == 2
        assert flow.throw(OSError("refused")) == [GetSize(SHARD.key)] * 2
        with pytest.raises((CorruptShardError, OSError)) as caught:
            flow.send(sizes)
        assert isinstance(caught.value, CorruptShardError) is blamed
        if isinstance(caught.value, CorruptShardError):
            assert caught.value.chunk_key == "a/c0/1"


def test_many_shards_are_read_so_many_at_once() -> None:
    limits = iter([1, 2, 9])
    options = replace(NO_GAPS, max_shards_at_once=lambda: next(limits))
    corners = [(0, 0), (0, 2), (2, 0), (2, 2)]
    recorder = Recorder({})
    assert recorder.run(read_entries(reads_of(*corners), options)) == [None] * 4
    assert [len(batch) for batch in recorder.batches] == [1, 2, 1]


def test_a_shard_that_was_replaced_takes_no_other_along() -> None:
    """Its reply came first; that of the next shard counts all the same."""
    flow = read_entries(reads_of((0, 0), (3, 2)), NO_GAPS)
    next(flow)
    two = FoundIndex(index_of_shard(SHARD_11, DRAFT_SPEC), "v")
    assert len(flow.send([FoundIndex(INDEX, "v"), two])) == 2
    assert flow.send([Found(memoryview(b"zero"), "w"), Found(memoryview(b"two"), "v")]) == AGAIN
    flow.send([FoundIndex(INDEX, "w")])
    with pytest.raises(StopIteration) as done:
        flow.send([Found(memoryview(b"ZERO"), "w")])
    assert contents(done.value.value) == [b"ZERO", b"two"]


def test_whether_a_shard_is_read_whole_is_decided_for_each() -> None:
    """By its own array; bytes of a shard that is not read whole are not unwanted."""
    near = make_layout()  # without a checksum
    options = ReadOptions(max_requests_at_once=64)
    far = replace(layout_far(9), prefix="b/")
    chunks = [*reads_of(*ALL_OF_00, layout=near), far.chunk((0, 0)), far.chunk((0, 1))]
    batch: Any = next(read_entries(chunks, options))
    assert [(r.shard.key, r.with_data) for r in batch] == [("a/c0/0", False), ("b/c0/0", True)]
    spec = ShardingSpec((16,), ZEP2_INDEX)
    layout = ArrayLayout("a", "a/", ChunkKeyEncoding("v2", "/"), (20,), spec, None, 256 * KIB)
    chunks = [layout.chunk((i,)) for i in (0, 16, 17)]  # of four chunks at the edge, two
    batch = next(read_entries(chunks, options))
    assert [r.with_data for r in batch] == [False, True]
