"""Read flows against recorded requests: rounds, races between them, damaged shards."""

from __future__ import annotations

import pytest

from tests.plan.flows import Recorder
from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.index import DRAFT_INDEX, ZEP2_INDEX, IndexFormat
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.shard import build_shard
from zarr_shardstore.format.spec import ShardingSpec
from zarr_shardstore.plan.indexes import read_indexes
from zarr_shardstore.plan.ranges import Range, Suffix
from zarr_shardstore.plan.read import EntryRead, ReadOptions, read_entries
from zarr_shardstore.plan.requests import Get

NO_GAPS = ReadOptions(max_gap_bytes=0, max_coalesced_bytes=1 << 20)


def make_layout(form: IndexFormat = DRAFT_INDEX) -> ArrayLayout:
    spec = ShardingSpec((2, 2), form)
    return ArrayLayout("a", "a/", ChunkKeyEncoding("draft", "/"), (4, 4), spec)


LAYOUT = make_layout()
SHARD_00 = build_shard({0: b"zero", 1: b"one", 3: b"three"}, (2, 2), DRAFT_INDEX, "C")
SHARD_11 = build_shard({2: b"two", 1: b""}, (2, 2), DRAFT_INDEX, "C")


def reads_of(*coords: tuple[int, int], layout: ArrayLayout = LAYOUT) -> list[EntryRead]:
    return [EntryRead(layout.chunk(c)) for c in coords]


def contents(values: list[memoryview | None]) -> list[bytes | None]:
    return [None if v is None else bytes(v) for v in values]


def test_two_rounds_one_index_request_a_shard_and_coalesced_spans() -> None:
    """Five chunks of two shards: the exact requests, in two batches."""
    recorder = Recorder({"a/c0/0": SHARD_00, "a/c1/1": SHARD_11})
    reads = reads_of((0, 0), (3, 2), (0, 1), (1, 1), (0, 0))
    values = recorder.run(read_entries(reads, NO_GAPS))
    assert [v and bytes(v) for v in values] == [b"zero", b"two", b"one", b"three", b"zero"]
    assert recorder.batches == [
        [Get("a/c0/0", Suffix(64), settled=True), Get("a/c1/1", Suffix(64), settled=True)],
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
    shard = build_shard({3: b"x"}, (2, 2), layout.spec.index)
    recorder = Recorder({"a/c0/0": shard})
    values = recorder.run(read_entries(reads_of((1, 1), layout=layout), NO_GAPS))
    assert contents(values) == [b"x"]
    assert recorder.batches[0] == [Get("a/c0/0", Range(0, 68))]


def test_ranges_do_not_reach_into_the_neighbour() -> None:
    """An over-long range ends with its entry."""
    recorder = Recorder({"a/c0/0": SHARD_00})
    chunk = LAYOUT.chunk((0, 0))
    reads = [EntryRead(chunk, r) for r in (Range(2, 99), Range(50, 60), Suffix(99), Suffix(1))]
    values = recorder.run(read_entries(reads, NO_GAPS))
    assert contents(values) == [b"ro", b"", b"zero", b"o"]


def test_a_shard_replaced_between_the_rounds_is_asked_again() -> None:
    """The entries moved: without the check the reader would get another chunk's bytes."""
    objects = {"a/c0/0": SHARD_00}

    def replace(n_batches: int) -> None:
        if n_batches == 1:
            objects["a/c0/0"] = build_shard({0: b"ZERO", 1: b"ONE"}, (2, 2), DRAFT_INDEX, "F")

    recorder = Recorder(objects, between=replace)
    values = recorder.run(read_entries(reads_of((0, 1), (1, 1)), NO_GAPS))
    assert values == [b"ONE", None]
    assert len(recorder.batches) == 4


def test_a_shard_that_is_replaced_all_the_time_is_read_whole() -> None:
    """The last attempt takes one request, which a writer cannot come between."""
    objects = {"a/c0/0": SHARD_00}

    def replace(n_batches: int) -> None:
        objects["a/c0/0"] = build_shard({0: b"%d" % n_batches}, (2, 2), DRAFT_INDEX)

    recorder = Recorder(objects, between=replace)
    values = recorder.run(read_entries(reads_of((0, 0)), NO_GAPS))
    assert contents(values) == [b"4"]
    assert recorder.batches[-1] == [Get("a/c0/0", settled=True)]


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
    shard = bytearray(build_shard({0: b"x"}, (2, 2), ZEP2_INDEX))
    shard[10] ^= 1
    recorder = Recorder({"a/c0/0": bytes(shard)})
    with pytest.raises(CorruptShardError, match="checksum"):
        recorder.run(read_entries(reads_of((0, 0), layout=layout), NO_GAPS))
