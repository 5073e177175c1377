"""`salvage`: each chunk that it returns is proved to be that of its entry."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.storage import MemoryStore

from tests.support.small_shards import SEED
from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import (
    MISSING,
    EntryOrder,
    ShardIndex,
    ShardingSpec,
    build_shard,
    split_shard,
)
from zarr_shardstore.store.base_handle import open_base
from zarr_shardstore.tools.check.objects import ArrayChecker
from zarr_shardstore.tools.check.salvage.damaged_shard import Salvage
from zarr_shardstore.tools.check.salvage.salvage import salvage
from zarr_shardstore.tools.inspect.find import find_contents

V2 = {"zarr_format": 2}
CODECS: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "raw v2": {**V2, "compressors": None},
    "crc32c": {"compressors": [Crc32cCodec()]},
    "zstd": {"compressors": ZstdCodec()},
    "zstd, crc32c": {"compressors": [ZstdCodec(checksum=True), Crc32cCodec()]},
    "gzip": {"compressors": GzipCodec()},
    "blosc": {"compressors": BloscCodec()},
    "lz4": {**V2, "compressors": {"id": "lz4"}},
    "zlib": {**V2, "compressors": {"id": "zlib"}},
    "bz2": {**V2, "compressors": {"id": "bz2"}},
}
CHUNK = 32
"""Values of two bytes in a chunk."""

PLACES: list[dict[str, Any]] = [{}, {}, {"index_location": "start"}]

N_DAMAGES = 60
"""Of shards of each codec."""


class Maker:
    """Shards of one array, with distinct chunks."""

    def __init__(self, codec: str, cps: tuple[int, ...], **options: Any) -> None:
        base: dict[str, Any] = {}
        grid = [2 * n - n // 3 for n in cps]  # the last shards hang over the edge
        shape, chunks = [*grid[:-1], grid[-1] * CHUNK], (*[1] * (len(cps) - 1), CHUNK)
        store = ShardingStore(base, chunks_per_shard=cps, **options)
        zarr.create_array(store, shape=shape, chunks=chunks, dtype="u2", **CODECS[codec])
        handle = open_base(base)
        ((node, found),) = handle.run(find_contents()).arrays.items()
        self.checker = ArrayChecker(handle, node, found.doc, "decode")
        self.plain = MemoryStore()
        self.array = zarr.create_array(
            self.plain, shape=(CHUNK,), chunks=(CHUNK,), dtype="u2", **CODECS[codec]
        )
        self.versions: dict[bytes, int] = {}
        """Entry of each chunk that was ever stored."""

    @property
    def spec(self) -> ShardingSpec:
        return self.checker.grid.layout.spec

    def shard(self, *coords: int) -> ShardRef:
        return self.checker.grid.layout.shard(coords)

    def chunk(self, rng: random.Random, entry_id: int) -> bytes:
        while True:
            values = np.frombuffer(rng.randbytes(2 * CHUNK), "u2").copy()
            values[rng.choice((1, 8, CHUNK)) :] = rng.randrange(1, 9)
            self.array[:] = values
            (key,) = [key for key in self.plain._store_dict if key in ("0", "c/0")]
            value: bytes = self.plain._store_dict[key].to_bytes()
            if self.versions.setdefault(value, entry_id) == entry_id:
                return value

    def packed(self, rng: random.Random, ids: Any, order: EntryOrder = "C") -> bytes:
        return build_shard({i: self.chunk(rng, i) for i in ids}, self.spec, order)

    def appended(self, rng: random.Random, ids: list[int]) -> bytes:
        """A shard with older chunks, and older indexes in front of those that came later."""
        spec = self.spec
        fields = np.full((spec.n_entries, 2), MISSING, np.uint64)
        start = spec.index_nbytes if spec.index.location == "start" else 0
        data, index = bytearray(start), b""
        for _ in range(rng.randrange(1, 4)):
            for i in rng.choices(ids, k=rng.randrange(1, 2 * len(ids) + 1)):
                value = self.chunk(rng, i)
                fields[i] = len(data), len(value)
                data += value
            index = ShardIndex(fields).encode(spec.index)
            data += b"" if start else bytes(rng.choice((0, 7, 300))) + index
        return index + bytes(data[start:]) if start else bytes(data)

    def salvage(self, shard: ShardRef, data: bytes) -> Salvage:
        return salvage(self.checker, shard, memoryview(data), guesses=True)


# ----------------------------------------------------------------------- random damages


def damaged(rng: random.Random, data: bytes, spec: ShardingSpec) -> bytes:
    """Change, cut or move bytes of the index, or cut the file anywhere."""
    n, size = len(data), spec.index_nbytes
    low = 0 if spec.index.location == "start" else n - size
    at, other = (low + rng.randrange(size) for _ in range(2))
    new = bytearray(data)
    match rng.randrange(12):
        case 0:
            new[at] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(rng.randrange(2, 6)):
                new[low + rng.randrange(size)] ^= rng.randrange(1, 256)
        case 2:
            stop = min(at + rng.choice((8, 16, 64)), low + size)
            new[at:stop] = rng.choice((b"\0", b"\xff")) * (stop - at)
        case 3:
            return data[: rng.randrange(n)]
        case 4:
            return data[: n - rng.randrange(1, min(size + 8, n))]
        case 5:  # entries are exchanged
            at, other = (low + (x - low) // 16 * 16 for x in (at, other))
            new[at : at + 16], new[other : other + 16] = (
                data[other : other + 16],
                data[at : at + 16],
            )
        case 6:  # bytes are taken out of the index
            del new[at : at + rng.choice((1, 16, 32))]
        case 7:  # bytes are put in
            more = rng.choice((b"\xff" * 16, bytes(16), data[low : low + 16], rng.randbytes(9)))
            new[at:at] = more
        case 8:  # an entry is copied over another, and the checksum is gone
            at, other = (low + rng.randrange(size - 4) // 16 * 16 for _ in range(2))
            new[other : other + 16] = data[at : at + 16]
            new[low + size - 4 : low + size] = b"none"
        case 9:  # offsets are gone, and the checksum
            for _ in range(3):
                other = low + rng.randrange(size - 4) // 16 * 16
                new[other : other + 8] = bytes(8)
            new[low + size - 4 : low + size] = b"none"
        case 10:  # a half-written index
            new[low:at] = rng.randbytes(at - low)
        case _:
            new += rng.choice((bytes(16), b"more", rng.randbytes(50)))
    return bytes(new)


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("codec", CODECS)
def test_no_chunk_gets_another_key(codec: str) -> None:
    """Each chunk that comes back was once stored under its key, and is the last one unless the
    text names an older index. What is not back is listed."""
    seed = int(os.environ.get(SEED, "1"))
    rng = random.Random(f"{seed} {codec}")
    n_kept = n_stored = 0
    for n in range(N_DAMAGES):
        if n % 6 == 0:
            cps = rng.choice([(9,), (4, 3), (2, 3, 2)])
            options = {} if V2.items() <= CODECS[codec].items() else rng.choice(PLACES)
            maker = Maker(codec, cps, **options)
            shard = maker.shard(*(rng.randrange(2) for _ in cps))
            ids = shard.entries_of().tolist()
        some = sorted(rng.sample(ids, rng.randrange(1, len(ids) + 1)))
        if n % 2:
            data = maker.appended(rng, some)
        else:
            data = maker.packed(rng, some, rng.choice(("C", "F", "morton")))
        last = maker.salvage(shard, data).entries
        assert last == split_shard(data, maker.spec)
        bad = damaged(rng, data, maker.spec)
        found, says = maker.salvage(shard, bad), f"{SEED}={seed}: {codec}, damage {n}"
        n_kept, n_stored = n_kept + len(found.entries), n_stored + len(last)
        for i, value in found.entries.items():
            assert maker.versions.get(bytes(value)) == i, (says, i, found.text)
            is_cut = data.startswith(bad)  # perhaps behind an older index
            assert value == last.get(i) or "older" in found.text or is_cut, (says, i, found.text)
        assert last.keys() - found.entries.keys() <= set(found.lost), (says, found.text)
    assert n_kept > n_stored // 3


# ------------------------------------------------------------------------- known damages


@pytest.mark.parametrize("codec", CODECS)
def test_a_checksum_puts_an_index_right(codec: str) -> None:
    """A flipped bit, exchanged entries, and a blanked part, in a shard whose chunks fill it."""
    rng = random.Random(codec)
    maker = Maker(codec, (4, 3))
    shard, n = maker.shard(0, 0), maker.spec.index_nbytes
    for order in ("C", "F", "morton"):
        whole = maker.packed(rng, range(12), order)
        entries = split_shard(whole, maker.spec)
        for at in (0, 3, 12 * 16 - 9, n - 1):
            flipped = bytearray(whole)
            flipped[at - n] ^= 4
            exchanged = whole[:-n] + whole[16 - n : 32 - n] + whole[-n : 16 - n] + whole[32 - n :]
            blanked = whole[:-n] + bytes(5 * 16 + 3) + whole[83 - n :]
            for data in (bytes(flipped), exchanged, blanked):
                found = maker.salvage(shard, data)
                assert found.entries == entries
                assert not found.lost
                assert "put right by its checksum" in found.text


@pytest.mark.parametrize("location", ["end", "start"])
@pytest.mark.parametrize("codec", ["crc32c", "zstd, crc32c", "gzip"])
def test_bytes_put_in_or_taken_out(codec: str, location: str) -> None:
    """Chunks in front of them and behind them stay, if the index is right, and each entry has a
    chunk. Where one is missing it may have been erased, and its bytes may lie at the end."""
    rng = random.Random(codec)
    maker = Maker(codec, (4, 3), index_location=location)
    n, shard = maker.spec.index_nbytes, maker.shard(0, 0)
    for _ in range(8):
        n_chunks = rng.choice((7, 12))
        whole = maker.packed(rng, rng.sample(range(12), n_chunks), "morton")
        entries = split_shard(whole, maker.spec)
        first = n if maker.spec.index.location == "start" else 0
        at, n_gone = first + rng.randrange(len(whole) - n - 20), rng.randrange(1, 20)
        gone = whole[:at] + whole[at + n_gone :]
        more = whole[:at] + whole[at - min(n_gone, at - first) : at] + b"?" + whole[at:]
        for data in (gone, more):
            found = maker.salvage(shard, data)
            assert found.entries.items() <= entries.items()
            assert len(found.lost) <= 1 + (data is gone) or n_chunks < 12
            assert sorted([*found.entries, *found.lost]) == sorted(entries)


@pytest.mark.parametrize("n_more", [4, -20])
@pytest.mark.parametrize("codec", ["crc32c", "zstd, crc32c"])
def test_an_erased_chunk_at_the_end_is_no_other_one(codec: str, n_more: int) -> None:
    """Bytes were put into the last chunk, or taken out of it: the one after it has its length."""
    maker = Maker(codec, (4,))
    data, index = laid_out(maker, [1, 2, 3], 0)
    fields = ShardIndex.decode(index, maker.spec).fields.copy()
    at, nbytes = fields[2].tolist()
    fields[3] = MISSING
    moved = data[: at + 10] + bytes(max(0, n_more)) + data[at + 10 + max(0, -n_more) :]
    found = maker.salvage(maker.shard(0), moved + ShardIndex(fields).encode(maker.spec.index))
    assert found.entries == {1: data[:nbytes]}
    assert found.lost == [2]


def laid_out(maker: Maker, ids: list[int], n_gap: int) -> tuple[bytes, bytes]:
    """The data of a shard whose chunks have one length, in this order, and its index."""
    rng, nbytes, values = random.Random(str(ids)), 0, []
    for i in ids:
        value = b""
        while not value or (nbytes and len(value) != nbytes):
            value = maker.chunk(rng, i)
        nbytes = len(value)
        values.append(value)
    start = maker.spec.index_nbytes if maker.spec.index.location == "start" else 0
    fields = np.full((maker.spec.n_entries, 2), MISSING, np.uint64)
    for n, i in enumerate(ids):
        fields[i] = start + n * nbytes, nbytes
    return b"".join(values) + bytes(n_gap), ShardIndex(fields).encode(maker.spec.index)


@pytest.mark.parametrize("n_gap", [8, 16, 24, 300])
@pytest.mark.parametrize("ids", [[1], [1, 0, 2]], ids=str)
@pytest.mark.parametrize("codec", ["crc32c", "zstd, crc32c"])
def test_a_cut_index_names_no_other_chunk(codec: str, ids: list[int], n_gap: int) -> None:
    """Wherever it is cut: the zeros before it may be those of its first entry, and of none."""
    maker = Maker(codec, (4,))
    data, index = laid_out(maker, ids, n_gap)
    entries = split_shard(data + index, maker.spec)
    for n_left in range(len(index)):
        found = maker.salvage(maker.shard(0), data + index[:n_left])
        assert found.entries.items() <= entries.items(), n_left


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("ids", [[1, 0, 2], [0, 2, 3]], ids=str)
@pytest.mark.parametrize("codec", ["crc32c", "zstd, crc32c"])
def test_bytes_of_an_index_put_in_or_taken_out(codec: str, ids: list[int], location: str) -> None:
    """As many as a chunk or a number has: the chunks move, or the entries do."""
    maker = Maker(codec, (4,), index_location=location)
    data, index = laid_out(maker, ids, 0)
    parts = [index, data] if location == "start" else [data, index]
    entries, nbytes = split_shard(b"".join(parts), maker.spec), len(data) // len(ids)
    for n in (8, nbytes, -8, -nbytes):
        for at in range(0, len(index), 4):
            changed = index[:at] + b"Z" * max(0, n) + index[at + max(0, -n) :]
            parts[location == "end"] = changed
            found = maker.salvage(maker.shard(0), b"".join(parts))
            assert found.entries.items() <= entries.items(), (n, at)


@pytest.mark.parametrize("codec", ["crc32c", "zlib"])
def test_frames_behind_other_bytes(codec: str) -> None:
    """Where no frame shows its begin, some are not found: the size of one proves no offset."""
    rng, maker = random.Random(codec), Maker(codec, (9,))
    older, value = maker.chunk(rng, 3), b""
    while len(value) != len(older):
        value = maker.chunk(rng, 5)
    newer = maker.chunk(rng, 3)
    data = older + b"an older index" + value + newer
    fields = np.full((9, 2), MISSING, np.uint64)
    fields[5] = 0, len(value)  # the offset is gone
    fields[3] = len(data) - len(newer), len(newer)
    index = ShardIndex(fields).encode(maker.spec.index)
    found = maker.salvage(maker.shard(0), data + index[:-4] + b"none")
    assert 5 not in found.entries


@pytest.mark.parametrize("codec", CODECS)
def test_a_cut_index_names_its_first_entries(codec: str) -> None:
    """Not those that it has lost: their frames may be in any order. A single one may be read at a
    wrong place."""
    maker = Maker(codec, (9,))
    whole = maker.packed(random.Random(codec), range(9))
    entries = split_shard(whole, maker.spec)
    for n_left in (8, 5, 2):
        found = maker.salvage(maker.shard(0), whole[: (n_left - 9) * 16 - 4 + 5])
        if codec != "lz4":  # the end of its last frame is not known
            assert found.entries == dict(list(entries.items())[:n_left])
        assert found.lost == sorted(set(range(9)) - found.entries.keys())
    found = maker.salvage(maker.shard(0), whole[: -maker.spec.index_nbytes])
    assert (found.entries, found.lost) == ({}, list(range(9)))
    assert "no valid index" in found.text
    assert found.n_unnamed == 9


def test_the_older_index_of_a_writer(tmp_path: Path) -> None:
    """It has moved the index behind new chunks, and the file was cut: older values are back."""
    store = ShardingStore(tmp_path, chunks_per_shard=(64,))
    array = zarr.create_array(store, shape=(64 * 4096,), chunks=(4096,), dtype="u2")
    path, rng = tmp_path / "c/0", np.random.default_rng(0)
    array[: 8 * 4096] = np.repeat(np.arange(1, 9, dtype="u2"), 4096)
    n_bytes, n = path.stat().st_size, 8
    while path.stat().st_size == n_bytes:
        array[n * 4096 : (n + 1) * 4096] = rng.integers(0, 2**16, 4096).astype("u2")
        n += 1
    array[:4096] = 77
    files = path.read_bytes()
    ShardingMapping(tmp_path).flush()
    base = open_base(str(tmp_path))
    ((node, found),) = base.run(find_contents()).arrays.items()
    checker = ArrayChecker(base, node, found.doc, "decode")
    shard = checker.grid.layout.shard((0,))
    now = split_shard(files, shard.layout.spec)
    for n_cut in (1, 70, 2000, len(files) - n_bytes):
        result = salvage(checker, shard, memoryview(files)[:-n_cut], guesses=True)
        for i in range(1, n - 1):  # all but the chunk that came last, and a value of the first
            assert result.entries[i] == now[i]
        assert "older" in result.text or n_cut > 2000
        assert "an older index names" in result.text or n_cut != 2000
        value = numcodecs.Zstd().decode(result.entries[0])
        assert np.frombuffer(value, "u2")[0] in ((77,) if n_cut == 1 else (1, 77))
        if "no valid index" in result.text:
            assert result.lost == [i for i in range(64) if i not in result.entries]
    assert not salvage(checker, shard, memoryview(files)[:-70], guesses=False).entries
