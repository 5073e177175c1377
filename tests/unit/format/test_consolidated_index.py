"""Collections of indexes: the byte layout, and that whatever is wrong with one is not believed."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.consolidated_index import (
    ConsolidatedIndex,
    ConsolidatedIndexWriter,
    IndexCopy,
    _inflated,
    declares_consolidated_index,
    is_consolidated_index_key,
    with_consolidated_index,
)
from zarr_shardstore.format.shard import (
    DRAFT_INDEX,
    MISSING,
    ZEP2_INDEX,
    IndexFormat,
    ShardIndex,
    ShardingSpec,
)
from zarr_shardstore.metadata.documents import without_notes

SPEC = ShardingSpec((2, 1), ZEP2_INDEX)
FIELDS = [(258, 5), (MISSING, MISSING)]


def index_of(fields: Any) -> ShardIndex:
    return ShardIndex(np.array(fields, np.uint64).reshape(-1, 2))


def encode(shards: dict[str, IndexCopy], spec: ShardingSpec = SPEC, written_s: int = 1) -> bytes:
    writer = ConsolidatedIndexWriter(spec)
    for suffix, found in shards.items():
        writer.add(suffix, found)
    return writer.encode(written_s)


ONE = encode({"c/0/1": IndexCopy(index_of(FIELDS), '"abc"', 263)})


def by_hand(header: dict[str, Any], *blobs: bytes, magic: bytes = b"ZSHIDX\x00\x01") -> bytes:
    """The layout, as the module describes it."""
    packed = zlib.compress(json.dumps(header).encode())
    rest = len(packed).to_bytes(4, "little") + packed + b"".join(blobs)
    return magic + crc32c.crc32c(rest).to_bytes(4, "little") + rest


BLOB = zlib.compress(
    bytes([2, 255, 1, 255, *[0, 255] * 6])  # offsets 258 and missing, byte by byte
    + bytes([5, 255, *[0, 255] * 7])
)
HEADER = {
    "chunks_per_shard": [2, 1],
    "index": {"checksum": True, "location": "end", "endian": "little"},
    "written": 77,
    "keys": ["c/0/1"],
    "versions": ['"abc"'],
    "sizes": [263],
    "nbytes": [len(BLOB)],
}


def decode(data: bytes, spec: ShardingSpec = SPEC) -> ConsolidatedIndex | None:
    return ConsolidatedIndex.decode(data, spec)


def test_the_layout() -> None:
    """Bytes by hand, from the description."""
    collection = decode(by_hand(HEADER, BLOB))
    assert collection is not None
    assert collection.written_s == 77
    assert not collection.has_file_times
    found = collection.find("c/0/1", SPEC.n_entries)
    assert found is not None
    assert found.index.fields.tolist() == [list(pair) for pair in FIELDS]
    assert found.index.fields.dtype == np.uint64
    assert (found.version, found.size) == ('"abc"', 263)
    assert collection.find("c/0/2", SPEC.n_entries) is None
    assert decode(ONE) is not None


specs = st.builds(
    ShardingSpec,
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.builds(
        IndexFormat, st.booleans(), st.sampled_from(["start", "end"]), st.sampled_from(["little"])
    ),
)


@given(specs, st.data())
def test_round_trip(spec: ShardingSpec, data: st.DataObject) -> None:
    """What was added is found, and nothing else."""
    number = st.one_of(st.integers(0, 2**64 - 1), st.just(MISSING))
    fields = st.lists(number, min_size=2 * spec.n_entries, max_size=2 * spec.n_entries)
    collected = st.builds(
        IndexCopy,
        fields.map(index_of),
        st.one_of(st.text(), st.integers(0, 2**40)),
        st.integers(0, 2**60),
    )
    shards = data.draw(st.dictionaries(st.text(), collected, max_size=4))
    collection = decode(encode(shards, spec), spec)
    assert collection is not None
    assert len(collection) == len(shards)
    for suffix, expected in shards.items():
        found = collection.find(suffix, spec.n_entries)
        assert found is not None
        assert (found.version, found.size) == (expected.version, expected.size)
        assert (found.index.fields == expected.index.fields).all()
    assert collection.find("not there" * 3, spec.n_entries) is None
    assert collection.has_file_times == any(isinstance(s.version, int) for s in shards.values())


@given(st.integers(0, len(ONE) - 1), st.integers(1, 255))
def test_a_changed_byte_makes_it_none(position: int, flip: int) -> None:
    """Of the magic, the checksum, or what that is of."""
    damaged = bytearray(ONE)
    damaged[position] ^= flip
    assert decode(bytes(damaged)) is None


@given(st.integers(0, len(ONE) - 1))
def test_what_is_cut_off_is_none(n: int) -> None:
    """At any byte; nor is more than all of it."""
    assert decode(ONE[:n]) is None
    assert decode(ONE + b"\0") is None


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, chunks_per_shard=(1, 2)),
        replace(SPEC, chunks_per_shard=(2,)),
        replace(SPEC, index=DRAFT_INDEX),
        replace(SPEC, index=IndexFormat(True, "start")),
        replace(SPEC, index=IndexFormat(True, "end", "big")),
    ],
)
def test_of_shards_of_another_form_it_says_nothing(other: ShardingSpec) -> None:
    """Other chunks, or another form of the index."""
    assert decode(ONE) is not None
    assert decode(ONE, other) is None


@pytest.mark.parametrize(
    "change",
    [
        {"keys": None},
        {"keys": [1]},
        {"keys": []},
        {"versions": [None]},
        {"versions": [1.5]},
        {"sizes": [-1]},
        {"sizes": [2**63]},
        {"sizes": ["1"]},
        {"nbytes": [len(BLOB) - 1]},
        {"nbytes": [2**70]},
        {"nbytes": [-1]},
        {"written": "now"},
        {"index": None},
        {"chunks_per_shard": [2, 1, 1]},
    ],
)
def test_a_header_that_is_not_one(change: dict[str, Any]) -> None:
    """With a right checksum: by another writer, or to do harm."""
    assert decode(by_hand({**HEADER, **change}, BLOB)) is None
    for name in change:
        rest = {key: value for key, value in HEADER.items() if key != name}
        assert decode(by_hand(rest, BLOB)) is None


@pytest.mark.parametrize(
    "blob",
    [
        b"not zlib",
        zlib.compress(bytes(31)),
        zlib.compress(bytes(33)),
        zlib.compress(bytes(2**22)),  # to fill the memory
        BLOB[:-6],
    ],
)
def test_a_blob_that_is_none(blob: bytes) -> None:
    """There is nothing about its shard; the others are as they are."""
    columns = {name: HEADER[name] * 2 for name in ("versions", "sizes")}  # type: ignore[operator]
    more = {"keys": ["bad", "good"], "nbytes": [len(blob), len(BLOB)]}
    collection = decode(by_hand({**HEADER, **columns, **more}, blob, BLOB))
    assert collection is not None
    assert collection.find("bad", SPEC.n_entries) is None
    assert collection.find("good", SPEC.n_entries) is not None


def test_another_version_of_the_layout_is_not_read() -> None:
    assert decode(by_hand(HEADER, BLOB, magic=b"ZSHIDX\x00\x02")) is None
    assert decode(b"") is None


def test_what_is_dropped_is_not_found_again() -> None:
    collection = decode(ONE)
    assert collection is not None
    collection.drop("c/0/1")
    collection.drop("c/0/1")
    assert collection.find("c/0/1", SPEC.n_entries) is None


def test_a_document_says_that_there_is_one() -> None:
    """By a member that others ignore."""
    doc = {"zarr_format": 3}
    marked = with_consolidated_index(doc)
    assert not declares_consolidated_index(doc)
    assert declares_consolidated_index(marked)
    assert marked == {"zarr_format": 3, "zarr_shardstore_index": {"must_understand": False}}
    assert without_notes(marked) == doc
    assert without_notes(doc) is doc
    assert not declares_consolidated_index({"zarr_shardstore_index": None})


def test_names_of_collections() -> None:
    assert is_consolidated_index_key("__shards.index")
    assert is_consolidated_index_key("a/b/__shards.index")
    assert not is_consolidated_index_key("a/my__shards.index")
    assert not is_consolidated_index_key("a/__shards.index/b")


def test_its_memory_is_counted_and_bounded() -> None:
    """Of bytes that decompress to more than a header or a blob may have, one more is made."""
    writer = ConsolidatedIndexWriter(SPEC)
    assert len(writer) == 0
    writer.add("c/0/1", IndexCopy(index_of(FIELDS), 7, 2**63 - 1))
    assert len(writer) == 1
    data = writer.encode(5)
    collection = decode(data)
    assert collection is not None
    assert (len(collection), collection.nbytes) == (1, len(data) + 400)
    assert (collection.was_used, collection.has_file_times) == (False, True)
    found = collection.find("c/0/1", SPEC.n_entries)
    assert found is not None
    assert (found.version, found.size) == (7, 2**63 - 1)
    packed = memoryview(zlib.compress(bytes(1000)))
    assert [len(_inflated(packed, n)) for n in (9, 999, 1000, 2000)] == [10, 1000, 1000, 1000]
