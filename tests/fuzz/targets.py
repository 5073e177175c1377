"""Targets of the fuzzing: each takes bytes, and raises `WrongError` unless the package is right.

Right is: the bytes that the specification gives, or an error of the package. Expected bytes are
computed here, by whole numbers of Python and `struct`, from the specification alone.
"""

from __future__ import annotations

import json
import random
import re
import struct
import traceback
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import crc32c
import numpy as np
import zarr
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from tests.fuzz.http_replies import run_http, seeds_of_replies
from tests.fuzz.mutators import mutate_bytes, mutate_json
from tests.support.bases import OtherMapping
from tests.support.hierarchies import DRAFT, KINDS, V2, V3, ArrayOf, grid_coords
from tests.support.kit import forget
from tests.support.shard_bytes import MISSING, build_shard, index_nbytes
from zarr_shardstore import (
    CorruptShardError,
    ShardingMapping,
    ShardingStore,
    ShardStoreError,
    check_store,
    from_native,
    get_shard_info,
    repair_store,
    reshard,
    shard_store,
    to_native,
    unshard_store,
)
from zarr_shardstore.format.consolidated_index import (
    ConsolidatedIndex,
    ConsolidatedIndexWriter,
    IndexCopy,
)
from zarr_shardstore.format.journal import (
    Change,
    JournalHeader,
    Move,
    decode_journal,
    encode_record,
    find_repair,
)
from zarr_shardstore.format.shard import (
    BYTE_ORDERS,
    IndexDamageError,
    IndexFormat,
    ShardIndex,
    ShardingSpec,
    split_shard,
)
from zarr_shardstore.metadata.documents import Node, parse_array, parse_document
from zarr_shardstore.tools.check.presence import presence
from zarr_shardstore.tools.convert.api import compact_store
from zarr_shardstore.tools.inspect.shard_map import shard_map


class WrongError(AssertionError):
    """A wrong byte, or an error that is not of the package."""


@dataclass(frozen=True)
class Target:
    """Function under test, inputs to begin with, and mutations that know their structure."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Callable[[bytes, random.Random], bytes]
    short: int
    """Mutations in a short run that is thorough."""
    has_threads: bool = False
    """Whether clients and servers have threads, each of which takes address space."""


def must(condition: object, *what: object) -> None:
    """Raise `WrongError` unless the condition holds."""
    if not condition:
        raise WrongError(*what)


# ---------------------------------------------------------------- indexes and shards

CPS = (3, 2)
N = 6
SPECS = [
    ShardingSpec(CPS, IndexFormat(checksum, location, endian))
    for checksum in (True, False)
    for location in ("end", "start")
    for endian in ("little", "big")
]
"""The first byte of an input chooses one."""


def chosen(data: bytes) -> tuple[ShardingSpec, bytes]:
    return SPECS[data[0] % len(SPECS)] if data else SPECS[0], data[1:]


def places_of(index: bytes, spec: ShardingSpec) -> list[tuple[int, int] | None] | None:
    """Offset and size of the entries, ``None`` if missing; ``None`` if the index is damaged."""
    body = index[: 16 * N]
    stored = crc32c.crc32c(body).to_bytes(4, "little") if spec.index.checksum else b""
    if len(index) != spec.index_nbytes or index[16 * N :] != stored:
        return None
    places = struct.iter_unpack(f"{BYTE_ORDERS[spec.index.endian]}QQ", body)
    return [None if place == (MISSING, MISSING) else (place[0], place[1]) for place in places]


def chunks_of(shard: bytes, spec: ShardingSpec) -> list[bytes | WrongError | None] | None:
    """Bytes of the entries; an error for one that leaves the data; ``None`` as `places_of`."""
    n = spec.index_nbytes
    at_start = spec.index.location == "start"
    places = places_of(shard[:n] if at_start else shard[max(0, len(shard) - n) :], spec)
    if places is None:
        return None
    start, stop = (n, len(shard)) if at_start else (0, len(shard) - n)
    found: list[bytes | WrongError | None] = []
    for place in places:
        if place is None:
            found.append(None)
        elif place[0] < start or sum(place) > stop:
            found.append(WrongError("outside"))
        else:
            found.append(shard[place[0] : sum(place)])
    return found


def run_index(data: bytes) -> None:
    """Decode, check and encode an index."""
    spec, index = chosen(data)
    expected = places_of(index, spec)
    try:
        decoded = ShardIndex.decode(index, spec)
    except IndexDamageError:
        must(expected is None, "a whole index was refused")
        return
    assert expected is not None, "a damaged index was decoded"
    must([decoded.entry(i) for i in range(N)] == expected)
    must(decoded.encode(spec.index) == index)
    for size in (0, len(index), len(index) + 40, 2**62):
        start, stop = spec.index_nbytes, size
        if spec.index.location == "end":
            start, stop = 0, size - spec.index_nbytes
        bad = [i for i, p in enumerate(expected) if p and (p[0] < start or sum(p) > stop)]
        must(decoded.damaged_ids(size, spec).tolist() == bad, size, bad)
        try:
            must(decoded.entries(range(N), size, spec) == expected and not bad)
        except IndexDamageError as error:
            must(error.entry_id == bad[0])


def run_shard(data: bytes) -> None:
    """Split a whole shard."""
    spec, shard = chosen(data)
    expected = chunks_of(shard, spec)
    try:
        found = split_shard(shard, spec)
    except IndexDamageError:
        must(expected is None or any(isinstance(chunk, WrongError) for chunk in expected))
        return
    assert expected is not None, "a damaged index was decoded"
    must([found.get(i) for i in range(N)] == list[object](expected))


def fix_index(new: bytearray, rng: random.Random) -> None:
    spec, shard = chosen(bytes(new))
    n = spec.index_nbytes
    if spec.index.checksum and len(shard) >= n:
        first = 1 if spec.index.location == "start" else 1 + len(shard) - n
        body = bytes(new[first : first + n - 4])
        new[first + n - 4 : first + n] = crc32c.crc32c(body).to_bytes(4, "little")


SHARD_VALUES = {0: b"first", 1: b"", 3: bytes(range(40)), 4: b"four"}


def seeds_of_shards() -> Iterable[bytes]:
    for number, spec in enumerate(SPECS):
        form = spec.index
        shard = build_shard(SHARD_VALUES, N, checksum=form.checksum, location=form.location)
        if form.endian == "little":
            yield bytes([number]) + shard


def seeds_of_indexes() -> Iterable[bytes]:
    for seed in seeds_of_shards():
        spec, shard = chosen(seed)
        n = spec.index_nbytes
        yield seed[:1] + (shard[:n] if spec.index.location == "start" else shard[-n:])


# ------------------------------------------------------------------ a shard in a store


@cache
def documents_of(number: int) -> dict[str, bytes]:
    """Documents of an array whose shards have the form of this number: by the codec, or draft."""
    form, base = SPECS[number].index, dict[str, bytes]()
    little = {"name": "bytes", "configuration": {"endian": form.endian}}
    store = ShardingStore(
        base,
        chunks_per_shard=CPS,
        index_codecs=[little, {"name": "crc32c"}] if form.checksum else [little],
        index_location=form.location,
    )
    zarr.create_array(
        store, name="z", shape=(12, 20), chunks=(4, 10), dtype="u1", compressors=None, fill_value=9
    )
    return base


def run_store(data: bytes) -> None:
    """Read, list and write a shard by every operation of a mapping."""
    number = data[0] % len(SPECS) if data else 0
    spec, shard = chosen(data)
    expected = chunks_of(shard, spec)
    keys = [f"z/c/{i}/{j}" for i in range(3) for j in range(2)]
    objects = {**documents_of(number), "z/c/0/0": shard}
    m = ShardingMapping(objects)
    n_damaged = 0
    for i, key in enumerate(keys):
        right = WrongError("index") if expected is None else expected[i]
        try:
            must(m.get(key) == right, key, right)
            part = m.get_partial_values([(key, (1, 3)), (key, (-2, None))])
            assert not isinstance(right, WrongError)
            must(part == [None] * 2 if right is None else part == [right[1:4], right[-2:]], part)
        except CorruptShardError:
            must(isinstance(right, WrongError), key, right)
            n_damaged += 1
    try:
        listed = sorted(m.list_prefix("z/c/"))
        assert expected is not None
        must(listed == [k for k, right in zip(keys, expected, strict=True) if right is not None])
    except CorruptShardError:
        must(expected is None, "the index is whole")
    before = objects["z/c/0/0"]
    try:
        m["z/c/2/1"] = b"new"
    except CorruptShardError:
        must(n_damaged and objects["z/c/0/0"] == before)
        return
    must(m["z/c/2/1"] == b"new")
    for key, right in zip(keys[:-1], expected or (), strict=False):
        must(isinstance(right, WrongError) or m.get(key) == right, "a neighbour has changed")


def run_readers(data: bytes) -> None:
    """Read a shard by zarr, tensorstore and this package: where all read, all read the same.

    Lawful differences: zarr and tensorstore read entries that overlap the index, and zarr cuts
    entries that leave the shard; here both are damage. A chunk of a wrong length is refused by
    each in a way of its own.
    """
    import tensorstore as ts

    number = data[0] % len(SPECS) if data else 0
    shard = data[1:]
    objects = {**documents_of(number), "z/c/0/0": shard}
    buffers: Any = {key: cpu.Buffer.from_bytes(value) for key, value in objects.items()}
    native = np.asarray([])
    context = ts.Context()
    kvstore = ts.KvStore.open({"driver": "memory", "path": "z/"}, context=context).result()
    for key in ("z/zarr.json", "z/c/0/0"):
        kvstore[key.removeprefix("z/")] = objects[key]
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": "z/"}}
    opened = ts.open(spec, context=context).result()
    ours: Any = zarr.open_array(ShardingStore(objects), path="z", mode="r")
    theirs: Any = zarr.open_array(MemoryStore(buffers), path="z", mode="r")
    for i, j in np.ndindex(3, 2):
        at = slice(4 * i, 4 * i + 4), slice(10 * j, 10 * j + 10)
        try:
            here = ours[at]
        except Exception as error:
            check_error(error)
            continue
        for read in (lambda at=at: theirs[at], lambda at=at: opened[at].read().result()):
            try:
                native = read()
            except Exception:
                continue
            must(np.array_equal(native, here), at, native, here)


# ----------------------------------------------------------------------------- journals


def run_journal(data: bytes) -> None:
    """Repair a shard by a journal: the journal's length in two bytes, the journal, the shard."""
    n = int.from_bytes(data[:2], "little")
    journal, shard = decode_journal(data[2 : 2 + n]), data[2 + n :]
    asked = 0

    def read(offset: int, nbytes: int) -> bytes:
        nonlocal asked
        asked += nbytes
        must(offset >= 0 and 0 <= nbytes <= len(shard), "more is asked for than there is")
        return shard[offset : offset + nbytes]

    repair = find_repair(journal, len(shard), read)
    if repair is None:
        return
    assert journal is not None
    header = journal.header
    fixed = bytearray(shard)
    for entry_id, *both in record.entries if isinstance(record := journal.record, Change) else ():
        at = header.index_start + 16 * entry_id
        triples = zip(shard[at : at + 16], *both, strict=False)
        is_written = any(o == at and len(piece) == 16 for o, piece in repair.writes)
        must(not is_written or all(b in (o, n) for b, o, n in triples), "not of this change")
    for offset, piece in repair.writes:
        must(header.index_start <= offset <= offset + len(piece) <= header.index_end, offset)
        fixed[offset : offset + len(piece)] = piece
    if repair.size is not None:
        must(header.index_end == repair.size <= len(shard))
        del fixed[repair.size :]
    index = fixed[header.index_start : header.index_end]
    body = index[: header.index_nbytes]
    crcs = (record.crc,) if isinstance(record, Move) else (record.old_crc, record.new_crc)  # type: ignore[union-attr]
    must(crc32c.crc32c(bytes(body)) in crcs)
    if header.has_checksum:
        must(bytes(index[len(body) :]) == crc32c.crc32c(bytes(body)).to_bytes(4, "little"))
    shard = bytes(fixed)
    must(find_repair(journal, len(shard), read) is None, "a repair is done once")


def fix_journal(new: bytearray, rng: random.Random) -> None:
    """Header and record have their checksums: those of the lengths of a whole record."""
    n = int.from_bytes(new[:2], "little")
    journal = new[2 : 2 + n]
    h = len(JournalHeader(True, N, 1, 0, 0, 0).encode())
    if len(journal) < h:
        return
    journal[h - 4 : h] = crc32c.crc32c(bytes(journal[: h - 4])).to_bytes(4, "little")
    if len(journal) > h + 4:
        crc = crc32c.crc32c(bytes(journal[h:-4]), crc32c.crc32c(bytes(journal[: h - 4])))
        journal[-4:] = crc.to_bytes(4, "little")
    new[2 : 2 + n] = journal


def seeds_of_journals() -> Iterable[bytes]:
    for checksum in (True, False):
        for at_start in (True, False):
            location: Any = "start" if at_start else "end"
            old = build_shard(SHARD_VALUES, N, checksum=checksum, location=location)
            size = index_nbytes(N, checksum=checksum)
            start = 0 if at_start else len(old) - size
            body = old[start : start + 16 * N]
            new = body[:32] + struct.pack("<QQ", 5, 9) + body[48:]
            header = JournalHeader(checksum, N, 7, start, len(old) - size, 3).encode()
            crcs = crc32c.crc32c(body), crc32c.crc32c(new)
            change = Change(*crcs, len(old), [(2, body[32:48], new[32:48])])
            move = Move(crcs[0], start + 200)
            for record, shard in (
                (change, old[:start] + new[:40] + old[start + 40 :]),
                (change, old[:start] + new + old[start + len(new) :]),
                (move, old + bytes(100)),
                (move, old + bytes(200 - size) + old[start:][: size - 9]),
            ):
                journal = header + encode_record(header, record)
                yield len(journal).to_bytes(2, "little") + journal + shard


# ----------------------------------------------------------------- consolidated indexes


def run_consolidated(data: bytes) -> None:
    """Decode a consolidated index and all its indexes."""
    spec, stored = chosen(data)
    decoded = ConsolidatedIndex.decode(stored, spec)
    if decoded is None:
        return
    must(decoded.nbytes >= 0, decoded.has_file_times)
    for suffix in list(decoded._blobs):
        found = decoded.find(suffix, spec.n_entries)
        if found is not None:
            must(found.index.fields.shape == (N, 2) and found.index.fields.dtype == np.uint64)
            must(found.size >= 0 and isinstance(found.version, str | int))
            found.index.damaged_ids(found.size, spec)


def mutate_consolidated(data: bytes, rng: random.Random) -> bytes:
    """Change the header below its compression, or any bytes; the checksum fits, mostly."""
    stored = data[1:]
    end = 16 + int.from_bytes(stored[12:16], "little")
    if rng.random() < 0.5:
        try:
            header = zlib.decompressobj().decompress(stored[16:end], 100_000)
        except zlib.error:
            header = b"{}"
        packed = zlib.compress(mutate_json(header, rng), 1)
        blobs = stored[end:]
        stored = stored[:12] + len(packed).to_bytes(4, "little") + packed + blobs
    else:
        stored = mutate_bytes(stored, rng)
    if rng.random() < 0.9:
        crc = crc32c.crc32c(stored[12:]).to_bytes(4, "little")
        stored = stored[:8] + crc + stored[12:]
    return data[:1] + stored


def seeds_of_consolidated() -> Iterable[bytes]:
    for number in (0, 5):
        spec, shard = SPECS[number], build_shard(SHARD_VALUES, N)
        index = ShardIndex.decode(shard[-index_nbytes(N) :], SPECS[0])
        writer = ConsolidatedIndexWriter(spec)
        writer.add("0/0", IndexCopy(index, '"an etag"', len(shard)))
        writer.add("0/1", IndexCopy(index, 1_700_000_000, 2**40))
        yield bytes([number]) + writer.encode(1_700_000_001)


# ---------------------------------------------------------------- documents and stores


def objects_of_text(data: bytes) -> dict[str, bytes]:
    """Return a store from JSON: documents as they are, other values as text in latin-1."""
    try:
        members = json.loads(data)
    except (ValueError, RecursionError):
        members = {"zarr.json": "no JSON"}
    objects: dict[str, bytes] = {}
    for key, value in members.items() if isinstance(members, dict) else ():
        if isinstance(value, str):
            objects[key] = value.encode("latin-1", "replace")
        else:
            objects[key] = json.dumps(value).encode()
    return objects


def text_of_objects(objects: dict[str, bytes]) -> bytes:
    members: dict[str, Any] = {}
    for key, value in objects.items():
        is_document = key.endswith((".json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"))
        members[key] = json.loads(value) if is_document else value.decode("latin-1")
    return json.dumps(members).encode()


def check_error(error: BaseException) -> None:
    """An error is of the package, or of zarr, which parses the documents that it is shown."""
    if isinstance(error, ShardStoreError):
        return
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            check_error(each)
        return
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    packages = [p for f in frames for p in ("/zarr/", "/zarr_shardstore/", "/fuzz/") if p in f]
    too_much = isinstance(error, MemoryError | RecursionError)
    # Codecs fail through the pipeline of this package as they do through zarr's own.
    is_theirs = packages and (packages[-1] == "/zarr/" or frames[-1].endswith("chunk_codec.py"))
    must(is_theirs and not too_much, repr(error), frames[-3:])


def calls(run: Callable[..., Any], *args: Any, of_zarr: bool = False) -> Any:
    """Return what a call returns; an error must be of the package."""
    try:
        return run(*args)
    except ShardStoreError:
        return None
    except Exception as error:
        if not of_zarr:
            raise
        check_error(error)
        return None


def run_document(data: bytes) -> None:
    """Parse the documents of a store, without a store."""
    for key, value in objects_of_text(data).items():
        name = key.rpartition("/")[2]
        hierarchy: Any = {".zarray": "v2", "zarr.json": "v3"}.get(name, "draft")
        if not name.endswith((".zarray", ".json")):
            continue
        node = Node(hierarchy, "z")
        doc = calls(parse_document, node, value)
        if doc is not None:
            for native in ("flat", "passthrough"):
                calls(parse_array, node, doc, native)


def is_huge(data: bytes) -> bool:
    """Whether there is a number of which a write may lawfully believe that an index is so long."""
    return re.search(rb"\d{5}", data) is not None


def run_hierarchy(data: bytes) -> None:
    """Do to a store all that a user of a mapping and of zarr does."""
    objects = objects_of_text(data)
    m = ShardingMapping(dict(objects))
    for key in list(objects):
        calls(m.get, key)
    for key in ("z/c/0/0", "z/c/1/1", "z/0.1", "g/z/c/0/0", "data/root/z/c0/1", "c/0/0", "0.0"):
        calls(m.get, key)
        calls(m.get_partial_values, [(key, (0, 2))])
    listed = calls(lambda: sorted(m))
    for directory in ("z/", "z/c/", "data/root/z/"):
        calls(m.list_dir, directory)
    calls(lambda: m.list_prefix("z/c/1"))
    for path in ("z", "g/z"):
        calls(m.chunks_initialized, path)
    if not is_huge(data):
        for key in ("z/c/0/0", "z/0.1", "data/root/z/c0/1"):
            calls(m.__setitem__, key, b"new")
            calls(m.pop, key, None)
        for key in list(objects):
            if key.endswith(("zarr.json", ".zarray", ".zmetadata")):
                calls(m.__setitem__, key, objects[key])
        calls(m.compact)
    must(listed is None or len(listed) == len(set(listed)), "a key is listed twice")
    run_by_zarr(objects)


def run_by_zarr(objects: dict[str, bytes]) -> None:
    """What zarr reads without this package it reads through it, or is refused."""
    with_us: Any = calls(
        lambda: zarr.open_array(ShardingStore(dict(objects)), path="z", mode="r"), of_zarr=True
    )
    if with_us is None or np.prod([1, *with_us.shape], dtype=object) > 10_000:
        return
    if np.prod([1, *with_us.chunks], dtype=object) > 10_000:
        return
    here = calls(lambda: with_us[...], of_zarr=True)
    buffers: Any = {key: cpu.Buffer.from_bytes(value) for key, value in objects.items()}
    try:
        alone: Any = zarr.open_array(MemoryStore(buffers), path="z", mode="r")
        if np.prod([1, *alone.chunks], dtype=object) > 10_000:
            return
        there = alone[...]
    except Exception:
        return
    if here is not None and alone.shape == with_us.shape:
        must(np.array_equal(here, there), here, there)


def run_tools(data: bytes) -> None:
    """Do to a store all that the tools for whole stores do."""
    objects = objects_of_text(data)
    mapping = ShardingMapping(dict(objects))
    runs: list[Callable[[], Any]] = [
        lambda: get_shard_info(dict(objects)),
        lambda: repair_store(check_store(dict(objects))),
        lambda: [list(islice(each.chunks(stored=False), 9)) for each in presence(dict(objects))],
        lambda: shard_map(dict(objects), "z").counts(),
        lambda: mapping.chunks_initialized("z"),
        lambda: mapping.consolidate_index(),
        lambda: compact_store(dict(objects), dry_run=True),
        lambda: to_native(dict(objects)),
        lambda: from_native(dict(objects)),
    ]
    for destination in (dict[str, bytes], lambda: None):
        conversions: list[Callable[[Any, Any], Any]] = [
            lambda source, to: shard_store(source, to, chunks_per_shard=2),
            lambda source, to: shard_store(source, to, native=True),
            lambda source, to: reshard(source, 3, to),
            unshard_store,
        ]
        for convert in conversions:
            in_place = OtherMapping()
            in_place.data = dict(objects)
            runs.append(partial(convert, in_place, destination()))
    for run in runs:
        calls(run)
    forget()


def seeds_of_stores() -> Iterable[bytes]:
    yield from hostile_seeds()
    for kind in (V3, V2, DRAFT, KINDS["v3 v2-keys ."], KINDS["draft ."]):
        chunks = {at: bytes([at[0], 7]) for at in grid_coords((2, 2))}
        array = ArrayOf(kind, "z", (2, 2), (1, 2), (0, 1), chunks)
        yield text_of_objects(array.objects())
        of_kind: list[dict[str, Any]] = [{}, {"declaration": "storage_transformers"}]
        for options in of_kind:
            if options and kind.hierarchy != "v3":
                continue
            objects = array.objects()
            shard_store(objects, chunks_per_shard=2, **options)
            yield text_of_objects(objects)
    objects = {}
    store = ShardingStore(objects, chunks_per_shard=(2, 1))
    zarr.create_group(store)
    z: Any = zarr.create_array(store, name="z", shape=(5, 4), chunks=(1, 2), dtype="u1")
    z[:] = 3
    zarr.create_group(store, path="g")
    sync_consolidated(store)
    yield text_of_objects(objects)
    stack: Any = {"storage_transformers": ["crc32c", "sharding", "crc32c"]}
    formats: Any = (2, 3)
    for zarr_format in formats:
        objects = {}
        store = ShardingStore(objects, chunks_per_shard=2, **stack)
        z = zarr.create_array(
            store,
            name="z",
            shape=(5, 4),
            chunks=(2, 1),
            dtype="u1",
            zarr_format=zarr_format,
            compressors=None,
        )
        z[:] = 3
        yield text_of_objects(objects)


def hostile_seeds() -> Iterable[bytes]:
    """Small documents of huge arrays, with an object where a shard is: no number is believed."""
    for kind in (V3, V2, DRAFT):
        for n, shape in ((2**24, [2**62]), (2**22, [2**40, 2**40]), (2**62, [2**62])):
            doc = ArrayOf(kind, "z", (2, 2), (1, 2), (0, 1)).document
            ndim = len(shape)
            cps = [n, *[1] * (ndim - 1)]
            sharding = [{"name": "sharding", "configuration": {"chunks_per_shard": cps}}]
            doc["shape"] = shape
            match kind.hierarchy:
                case "v2":
                    doc["chunks"] = cps
                    doc["filters"] = [{"id": "zarr_shardstore", "storage_transformers": sharding}]
                case "draft":
                    doc["chunk_grid"]["chunk_shape"] = [1] * ndim
                    doc["storage_transformers"] = sharding
                case "v3":
                    doc["chunk_grid"]["configuration"]["chunk_shape"] = cps
                    inner = {
                        "chunk_shape": [1] * ndim,
                        "codecs": doc["codecs"],
                        "index_codecs": doc["codecs"],
                    }
                    doc["codecs"] = [{"name": "sharding_indexed", "configuration": inner}]
            array = ArrayOf(kind, "z", (1,) * ndim, (1,) * ndim, (0,) * ndim, {(0,) * ndim: b"x"})
            objects = {**array.objects(), kind.document_key("z"): json.dumps(doc).encode()}
            yield text_of_objects(objects)


def sync_consolidated(store: ShardingStore) -> None:
    """Consolidate the metadata of the root, without zarr's warning."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(store)


def mutate_store(data: bytes, rng: random.Random) -> bytes:
    return mutate_bytes(data, rng) if rng.random() < 0.05 else mutate_json(data, rng)


def mutate_shard(data: bytes, rng: random.Random) -> bytes:
    new = data[:1] + mutate_bytes(data[1:], rng)
    if rng.random() < 0.02:
        new = rng.randbytes(1) + new[1:]
    fixed = bytearray(new)
    if rng.random() < 0.7:
        fix_index(fixed, rng)
    return bytes(fixed)


def mutate_journal(data: bytes, rng: random.Random) -> bytes:
    return mutate_bytes(data, rng, fix_journal)


TARGETS = {
    "index": Target(run_index, seeds_of_indexes, mutate_shard, 3000),
    "shard": Target(run_shard, seeds_of_shards, mutate_shard, 3000),
    "journal": Target(run_journal, seeds_of_journals, mutate_journal, 3000),
    "consolidated": Target(run_consolidated, seeds_of_consolidated, mutate_consolidated, 2000),
    "document": Target(run_document, seeds_of_stores, mutate_store, 2000),
    "store": Target(run_store, seeds_of_shards, mutate_shard, 300),
    "hierarchy": Target(run_hierarchy, seeds_of_stores, mutate_store, 60),
    "tools": Target(run_tools, seeds_of_stores, mutate_store, 40),
    "http": Target(run_http, seeds_of_replies, mutate_store, 30, has_threads=True),
    "readers": Target(run_readers, seeds_of_shards, mutate_shard, 60),
}
