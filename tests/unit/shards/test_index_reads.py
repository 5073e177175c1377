"""Reads of indexes and of whole shards: what is asked, what is checked, and in what rounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.flows import Recorder
from zarr_shardstore.errors import CorruptShardError, CorruptValueError, ShardConflictError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.ranges import Range, Suffix
from zarr_shardstore.format.shard import (
    DRAFT_INDEX,
    ZEP2_INDEX,
    IndexDamageError,
    IndexFormat,
    ShardingSpec,
    build_shard,
)
from zarr_shardstore.shards.index_reads import (
    check_whole,
    corrupt,
    found_index,
    index_get,
    read_indexes,
    read_whole_shards,
    read_whole_value,
    rounds_of,
    try_read_indexes,
)
from zarr_shardstore.shards.requests import Found, FoundIndex, Get, GetIndex, GetSize

MIB = 1024 * 1024


def shard_of(form: IndexFormat = ZEP2_INDEX, coords: int = 0) -> ShardRef:
    encoding = ChunkKeyEncoding("v2", "/")
    return ArrayLayout("a", "a/", encoding, (8,), ShardingSpec((2,), form)).shard((coords,))


def data_of(form: IndexFormat = ZEP2_INDEX, **entries: bytes) -> bytes:
    return build_shard({int(i[1:]): v for i, v in entries.items()}, ShardingSpec((2,), form))


# ------------------------------------------------------------------- one index


def test_the_bytes_of_an_index_are_asked_for() -> None:
    """Without a checksum no half-written index passes: the reply waits for its writer."""
    start = IndexFormat(True, "start")
    assert GetIndex(shard_of()).key == "a/0"
    assert index_get(GetIndex(shard_of())) == Get("a/0", Suffix(36), False)
    assert index_get(GetIndex(shard_of(), consistent=True)) == Get("a/0", Suffix(36), True)
    assert index_get(GetIndex(shard_of(DRAFT_INDEX))) == Get("a/0", Suffix(32), True)
    assert index_get(GetIndex(shard_of(start))) == Get("a/0", Range(0, 36), False)
    assert index_get(GetIndex(shard_of(), with_data=True)) == Get("a/0", None, False)


@pytest.mark.parametrize("with_data", [False, True])
def test_a_reply_tells_version_and_size_also_of_what_is_damaged(with_data: bool) -> None:
    request = GetIndex(shard_of(), with_data=with_data)
    assert found_index(request, Found(None, "v", 5)) == FoundIndex(None, "v", 5)
    data = data_of(_0=b"abc")
    came = memoryview(data if with_data else data[3:])
    found = found_index(request, Found(came, "v", len(data)))
    assert found.decoded is not None
    assert found.decoded.entry(0) == (0, 3)
    value = came if with_data else None
    assert found == FoundIndex(found.decoded, "v", len(data), value=value)
    cut = memoryview(data[:-1] if with_data else data[3:-1])
    bad = found_index(request, Found(cut, "v", len(data)))
    assert isinstance(bad.damage, IndexDamageError)
    value = cut if with_data else None
    assert bad == FoundIndex(None, "v", len(data), bad.damage, value=value)
    if with_data:
        assert bad.damage.message == "the shard has 39 bytes, 38 came"


def test_a_cached_index_does_not_keep_the_shard() -> None:
    data = bytearray(data_of(_0=b"abc"))
    found = found_index(GetIndex(shard_of(), with_data=True), Found(memoryview(data), 0))
    assert found.decoded is not None
    data[:] = bytes(len(data))
    assert found.decoded.entry(0) == (0, 3)


def test_errors_name_the_shard_the_chunk_and_the_bytes() -> None:
    damage = IndexDamageError("bad", entry_id=1, byte_range=(3, 5))
    error = corrupt(shard_of(coords=1), damage)
    assert (error.shard_key, error.chunk_key, error.byte_range) == ("a/1", "a/3", (3, 5))
    assert str(error).endswith("bad")
    hinted = corrupt(shard_of(), IndexDamageError("bad"), "; do this")
    assert hinted.chunk_key is None
    assert str(hinted).endswith("bad; do this")


# ------------------------------------------------------------------- rounds


def test_indexes_are_read_once_more_where_they_are_damaged() -> None:
    """A writer may be changing them: the second round waits for it."""
    shards = [shard_of(coords=i) for i in range(3)]
    flow = try_read_indexes(shards, ["v0", "v1", "v2"], cache=False)
    assert next(flow) == [
        GetIndex(shards[i], False, version=f"v{i}", cache=False) for i in range(3)
    ]
    index = found_index(GetIndex(shards[0]), Found(memoryview(data_of()), 0)).decoded
    damage = IndexDamageError("bad")
    replies = [
        FoundIndex(None, 0, None, damage),
        FoundIndex(index, 0),
        FoundIndex(None, 0, None, damage),
    ]
    assert flow.send(replies) == [
        GetIndex(shards[i], True, version=f"v{i}", cache=False) for i in (0, 2)
    ]
    with pytest.raises(StopIteration) as done:
        flow.send([FoundIndex(index, 1), FoundIndex(None, 1, None, damage)])
    first, second, third = done.value.value
    assert first is second is index
    assert isinstance(third, CorruptShardError)
    assert third.shard_key == "a/2"


def test_indexes_are_cached_and_one_that_is_damaged_is_an_error() -> None:
    shard = shard_of()
    for flow in (read_indexes([shard]), try_read_indexes([shard])):
        assert next(flow) == [GetIndex(shard, False, version=None, cache=True)]
    asked = read_indexes([shard], cache=False)
    assert next(asked) == [GetIndex(shard, cache=False)]
    with pytest.raises(StopIteration) as done:
        next(read_indexes([]))
    assert done.value.value == []
    with pytest.raises(CorruptShardError):
        Recorder({"a/0": b"?" * 36}).run(read_indexes([shard]))


def test_a_walk_reads_64_shards_or_16_mib_in_a_round() -> None:
    def sizes(nbytes: list[int]) -> list[int]:
        return [len(part) for part in rounds_of(nbytes, lambda n: n)]

    assert sizes([1] * 130) == [64, 64, 2]
    assert sizes([0] * 100) == [100]  # of what takes no request
    assert sizes([1, *[0] * 100, *[1] * 63, 0, 1]) == [1 + 100 + 63, 2]
    assert sizes([8 * MIB, 8 * MIB, 1]) == [2, 1]
    assert sizes([8 * MIB, 8 * MIB + 1, 1]) == [1, 2]
    assert sizes([99 * MIB, 99 * MIB, 1, 1]) == [1, 1, 2]
    assert sizes([0, 0, 99 * MIB, 1]) == [3, 1]
    assert sizes([99 * MIB, 8 * MIB, 8 * MIB, 1]) == [1, 2, 1]
    assert sizes([]) == []
    assert list(rounds_of(iter("ab"), lambda _: 1)) == [["a", "b"]]


# ------------------------------------------------------------------- whole objects


def replies_to(flow: Any, *replies: Any) -> tuple[list[Any], Any]:
    """The batches of a flow that gets these replies, and its result."""
    batches = [next(flow)]
    try:
        for reply in replies:
            batches += [flow.send(reply)]
    except StopIteration as stop:
        return batches, stop.value
    raise AssertionError("it asks for more")


def found(data: bytes | None, size: int | None = None) -> Found:
    return Found(None if data is None else memoryview(data), 0, size)


@pytest.mark.parametrize(
    ("form", "data", "needs_size"),
    [
        (DRAFT_INDEX, data_of(DRAFT_INDEX, _0=b"abc"), False),
        (DRAFT_INDEX, data_of(DRAFT_INDEX, _0=b"abc", _1=b""), False),
        (DRAFT_INDEX, b"gap" + data_of(DRAFT_INDEX, _0=b"abc"), True),
        (DRAFT_INDEX, data_of(DRAFT_INDEX), True),  # all are missing
        (DRAFT_INDEX, bytes(32), True),  # or empty: zeros
        (DRAFT_INDEX, b"short", True),
        (DRAFT_INDEX, None, False),
        (ZEP2_INDEX, b"gap" + data_of(_0=b"abc"), False),
        (ZEP2_INDEX, b"short", False),
        (IndexFormat(False, "start"), data_of(IndexFormat(False, "start")), False),
    ],
)
def test_the_size_is_asked_for_where_bytes_may_be_missing(
    form: IndexFormat, data: bytes | None, needs_size: bool
) -> None:
    get = [Get("a/0", consistent=True)]
    size = len(data or b"")
    replies: list[Any] = [[found(data)], [size]][: 1 + needs_size]
    batches, (whole,) = replies_to(read_whole_shards([shard_of(form)]), *replies)
    assert batches == [get, [GetSize("a/0")]][: 1 + needs_size]
    assert whole == found(data, size if needs_size else None)
    if data is not None:  # the reply tells
        batches, _ = replies_to(read_whole_shards([shard_of(form)]), [found(data, size)])
        assert batches == [get]


def test_a_shard_that_comes_cut_off_twice_is_an_error() -> None:
    shards = [shard_of(coords=0), shard_of(coords=1)]
    whole, cut = data_of(_0=b"abc"), found(b"ab", 39)
    again = [Get("a/1", consistent=True)]
    batches, founds = replies_to(read_whole_shards(shards), [found(whole), cut], [found(whole, 39)])
    assert batches[1] == again
    assert founds == [found(whole), found(whole, 39)]
    with pytest.raises(
        CorruptShardError, match="it has 39 bytes, and reading all of it gave 2"
    ) as e:
        replies_to(read_whole_shards(shards), [found(whole), cut], [cut])
    assert e.value.shard_key == "a/1"


def test_a_value_that_comes_cut_off_twice_is_an_error() -> None:
    for good in (found(b"abc", 3), found(b"abc"), found(None)):
        batches, value = replies_to(read_whole_value("k"), [found(b"ab", 3)], [good])
        assert batches == [[Get("k", consistent=True)]] * 2
        assert value == good
    with pytest.raises(CorruptValueError, match="it has 3 bytes, and reading it gave 2"):
        replies_to(read_whole_value("k"), [found(b"ab", 3)], [found(b"ab", 3)])
    with pytest.raises(CorruptValueError, match="it has 3 bytes, and reading it gave 0"):
        replies_to(read_whole_value("k"), [found(b"ab", 3)], [found(b"", 3)])


@pytest.mark.parametrize(
    ("value", "nbytes", "message"),
    [
        (None, 3, "object 'k' is gone: "),
        (None, None, "object 'k' is gone: "),
        (b"ab", 3, "object 'k' gave 2 of 3 bytes: "),
        (b"ab", None, "object 'k' gave 2 of 0 bytes: "),
    ],
)
def test_what_did_not_come_whole_was_changed(
    value: bytes | None, nbytes: int | None, message: str
) -> None:
    view = None if value is None else memoryview(value)
    with pytest.raises(ShardConflictError, match=message):
        check_whole("k", view, nbytes)
    whole = memoryview(b"abc")
    assert check_whole("k", whole, 3) is whole
