"""`repair_store`: whole chunks stay, originals are put aside and come back byte for byte."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.storage import MemoryStore

from tests.support.checked_stores import KINDS, VALUES, Kind
from tests.support.kit import FailingStore, Faults
from tests.support.shard_bytes import places_in
from zarr_shardstore import (
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    SpecError,
    check_store,
    repair_store,
    restore_quarantine,
    unshard_store,
)

QUARANTINE = ".zarr_shardstore_quarantine"


def _flip(at: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at(len(data))] ^= 255
        return bytes(changed)

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "short": lambda data: data[:30],
    "chunk": _flip(lambda n: n // 2 - 60),
    "first": _flip(lambda n: 5),
    "end": _flip(lambda n: n - 9),
    "last": _flip(lambda n: n - 1),
    "longer": lambda data: data + b"more",
}


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and QUARANTINE not in p.parts
    }


NO_SHARDS = ("left to zarr", "v3 checksum alone")


@pytest.mark.thorough(of=9)
@pytest.mark.parametrize("name", [n for n in KINDS if "uns" not in n and n not in NO_SHARDS])
def test_whole_chunks_stay(name: str, tmp_path: Path) -> None:
    """Each chunk that reads right after the damage reads the same after the repair. No chunk gets
    other values than those before the damage, or fill values, where a checksum covers it."""
    kind = KINDS[name]
    kind.make(tmp_path)
    ShardingMapping(tmp_path, **kind.options).flush()
    before, files = kind.read(tmp_path), files_of(tmp_path)
    key = max(key for key in files if not key.endswith(("json", ".zarray", ".zattrs", ".zgroup")))
    for what, change in DAMAGES.items():
        path = tmp_path / key
        path.write_bytes(change(files[key]))
        damaged, seen = files_of(tmp_path), kind.read(tmp_path)
        report = check_store(tmp_path, level="decode")
        if report.is_clean:  # bytes that nothing covers
            path.write_bytes(files[key])
            continue
        repair_store(report)
        assert files_of(tmp_path) == damaged
        repaired = repair_store(report, dry_run=False)
        (action,) = repaired.actions
        if action.did == "left":  # nothing can be recovered: an error stays an error
            assert action.lost
            assert files_of(tmp_path) == damaged, (what, key)
            path.write_bytes(files[key])
            continue
        assert repaired.check is not None
        assert repaired.check.is_clean, (what, key, repaired)
        for old, then, now in zip(before, seen, kind.read(tmp_path), strict=True):
            assert now is not None
            if then == old:
                assert now == old, (what, key)
            if kind.has_checksum and kind.has_index_checksum and "below" not in name:
                assert now in (old, bytes(len(now))), (what, key)
        restore_quarantine(tmp_path, repaired.quarantine)
        assert files_of(tmp_path) == damaged, (what, key)
        path.write_bytes(files[key])
    assert not any(key.startswith(QUARANTINE) for key in ShardingMapping(tmp_path))


def test_a_wrong_index_checksum_costs_no_chunk(tmp_path: Path) -> None:
    """The index places whole chunks in the order of a writer; `drop` makes them missing."""
    kind = KINDS["v3 zstd"]
    kind.make(tmp_path)
    ShardingMapping(tmp_path).flush()
    before = kind.read(tmp_path)
    path = tmp_path / "a/c/1/1"
    path.write_bytes(DAMAGES["last"](path.read_bytes()))
    damaged = files_of(tmp_path)
    dropped = repair_store(check_store(tmp_path), keep="drop", dry_run=False)
    assert [action.did for action in dropped.actions] == ["removed"]
    restore_quarantine(tmp_path, dropped.quarantine)
    assert files_of(tmp_path) == damaged
    kept = repair_store(check_store(tmp_path), dry_run=False)
    assert [(action.did, action.n_kept) for action in kept.actions] == [("rewritten", 6)]
    assert kind.read(tmp_path) == before
    alone: Any = zarr.open_array(str(tmp_path), path="a")[:]  # without this package
    assert (alone[2:] == VALUES[2:]).all()


def test_bytes_written_since_stay(tmp_path: Path) -> None:
    """Neither a repair nor a restoration replaces what a writer has stored since."""
    kind = KINDS["v3 gzip, index first"]
    kind.make(tmp_path)
    path = tmp_path / "a/c/1/1"
    whole = path.read_bytes()
    path.write_bytes(DAMAGES["chunk"](whole))
    checked = check_store(tmp_path, level="decode")
    path.write_bytes(whole)
    assert [action.did for action in repair_store(checked, dry_run=False).actions] == ["left"]
    path.write_bytes(DAMAGES["chunk"](whole))
    report = repair_store(check_store(tmp_path, level="decode"), dry_run=False)
    array = zarr.open_array(kind.open(tmp_path), path="a", mode="r+")
    array[6, 20] = 7
    ShardingMapping(tmp_path).flush()
    now = files_of(tmp_path)
    with pytest.raises(ShardConflictError, match="a/c/1/1"):
        restore_quarantine(tmp_path, report.quarantine)
    assert files_of(tmp_path) == now
    path.unlink()
    original = tmp_path / report.quarantine / "a/c/1/1.original"
    original.write_bytes(original.read_bytes()[:-1])
    with pytest.raises(ShardConflictError, match="is damaged"):
        restore_quarantine(tmp_path, report.quarantine)
    assert not path.exists()


def test_a_quarantine_is_named_by_its_path_or_its_last_part(tmp_path: Path) -> None:
    """A part of one, all of them, and a way out are none: the error names each that there is."""
    kind = KINDS["v3 gzip, index first"]
    kind.make(tmp_path)
    path = tmp_path / "a/c/1/1"
    path.write_bytes(DAMAGES["chunk"](path.read_bytes()))
    damaged = files_of(tmp_path)
    report = repair_store(check_store(tmp_path, level="decode"), dry_run=False)
    top, name = report.quarantine.split("/")
    repaired = files_of(tmp_path)
    for wrong in ("a", "", ".", top, f"{name}/a", f"{top}/{name}/a", f"../{name}", f"{top}/.."):
        with pytest.raises(SpecError, match=f"there are {report.quarantine}"):
            restore_quarantine(tmp_path, wrong)
    assert files_of(tmp_path) == repaired
    for right in (name, f"{top}/{name}", f"{name}/"):
        assert restore_quarantine(tmp_path, right) == ["a/c/1/1"]
        assert path.read_bytes() == damaged["a/c/1/1"]


def test_objects_and_remains(tmp_path: Path) -> None:
    """A base store that compares nothing, and the files of killed writers."""
    base: dict[str, Any] = {}
    kind = KINDS["v3 zstd and crc32c"]
    kind.make(base)
    before = dict(base)
    base["a/c/1/1"] = DAMAGES["first"](base["a/c/1/1"])
    damaged = dict(base)
    report = repair_store(check_store(base, level="decode"), dry_run=False)
    assert report.check is not None
    assert report.check.is_clean
    restore_quarantine(base, report.quarantine)
    assert {k: v for k, v in base.items() if k in before} == damaged
    kind.make(tmp_path)
    ShardingMapping(tmp_path).flush()
    for name in (f"0.{'a' * 32}.partial", "0.__lock"):
        (tmp_path / "a/c/1" / name).write_bytes(b"")
    files = files_of(tmp_path)
    repaired = repair_store(check_store(tmp_path), dry_run=False)
    assert len(files_of(tmp_path)) == len(files) - 2
    restore_quarantine(tmp_path, repaired.quarantine)
    assert files_of(tmp_path) == files


def test_plain_chunks(tmp_path: Path) -> None:
    """A damaged one is only dropped if that is asked for; one that was written since stays."""
    kind = KINDS["unsharded v3"]
    kind.make(tmp_path)
    paths = [tmp_path / "a/c/1/1", tmp_path / "a/c/1/2"]
    whole = [path.read_bytes() for path in paths]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-3])
    report = check_store(tmp_path, level="decode")
    paths[0].write_bytes(whole[0])
    repaired = repair_store(report, dry_run=False)
    assert [action.did for action in repaired.actions] == ["left", "left"]
    repaired = repair_store(report, keep="drop", dry_run=False)
    assert [action.did for action in repaired.actions] == ["left", "removed"]
    assert [path.exists() for path in paths] == [True, False]
    assert restore_quarantine(tmp_path, repaired.quarantine) == ["a/c/1/2"]
    assert paths[1].read_bytes() == whole[1][:-3]


class WrittenBetween(dict[str, Any]):
    """A store in which a writer comes between a quarantine and the repair."""

    new = b""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key.startswith(QUARANTINE) and key.endswith(".original"):
            super().__setitem__("a/c/1/1", self.new)


def test_a_write_in_between_stays() -> None:
    """The repair replaces only the bytes that it has read."""
    base = WrittenBetween()
    KINDS["v3 zstd"].make(base)
    base.new = base["a/c/1/1"]
    base["a/c/1/1"] = DAMAGES["last"](base.new)
    report = repair_store(check_store(base), dry_run=False)
    assert [action.did for action in report.actions] == ["left"]
    assert base["a/c/1/1"] == base.new


@pytest.mark.parametrize("where", ["local", "dict", "memory"])
def test_a_quarantine_is_not_seen(where: str, tmp_path: Path) -> None:
    """Neither by listings and groups of zarr, nor by checks and conversions."""
    bases: dict[str, Any] = {"local": tmp_path / "s", "dict": {}, "memory": MemoryStore()}
    base, kind = bases[where], KINDS["v3 zstd"]
    zarr.create_group(ShardingStore(base))
    kind.make(base)
    ShardingMapping(base).flush()
    keys = sorted(ShardingMapping(base))
    unsharded = ShardingMapping(base, native="passthrough", chunks_per_shard=None)
    unsharded["a/c/1/1"] = unsharded["a/c/1/1"][:-1] + b"?"
    assert repair_store(check_store(base), dry_run=False).quarantine
    assert sorted(ShardingMapping(base)) == keys
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Consolidated metadata")
        warnings.filterwarnings("error", "Object at")
        group = zarr.open_group(ShardingStore(base), mode="r+")
        assert [name for name, _ in group.members()] == ["a"]
        zarr.consolidate_metadata(ShardingStore(base))
    assert check_store(base).findings == ()
    copy: dict[str, Any] = {}
    unshard_store(base, copy)
    assert {key.split("/")[0] for key in copy} == {"a", "zarr.json"}


# ------------------------------------------------------------------------ replicas

SHARDED, GZIP_V2 = KINDS["v3 gzip, index first"], {"zarr_format": 2, "compressors": {"id": "zlib"}}
REPLICAS: dict[str, Kind] = {
    "the same": SHARDED,
    "other shards": replace(SHARDED, options={"chunks_per_shard": (1, 6)}),
    "unsharded": replace(SHARDED, options={"chunks_per_shard": None}),
    "other codecs": KINDS["v3 blosc"],
    "a checksum above": KINDS["v3 checksum above"],
    "v2, order F": replace(KINDS["v2 zlib"], create={**GZIP_V2, "order": "F"}),
    "draft": KINDS["draft gzip"],
}


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize(
    "name", ["v3 gzip, index first", "v3 checksum above", "v2 raw", "draft gzip", "unsharded v3"]
)
def test_lost_chunks_come_from_a_replica(name: str, replica: str, tmp_path: Path) -> None:
    """However it is sharded and encoded. The other chunks stay, and the missing ones missing."""
    kind, source = KINDS[name], tmp_path / "replica"
    REPLICAS[replica].make(source)
    complete = zarr.open_array(REPLICAS[replica].open(source), path="a", mode="r+")
    complete[:2] = 7  # the damaged store has none of these
    ShardingMapping(source).flush()
    kind.make(tmp_path / "s")
    ShardingMapping(tmp_path / "s").flush()
    base: Any = tmp_path / "s"
    before, files = kind.read(base), files_of(base)
    key = max(key for key in files if not key.endswith(("json", ".zarray", ".zattrs", ".zgroup")))
    is_at_end = "first" in name or "unsharded" in name
    flip = _flip(lambda n: n - 5) if is_at_end else DAMAGES["chunk"]
    for change in (flip, lambda data: data[:30], lambda data: b""):
        (base / key).write_bytes(change(files[key]))
        report = check_store(base, level="decode")
        repaired = repair_store(report, source=source, dry_run=False)
        if report.is_clean:  # a byte that nothing covers
            assert name == "v2 raw"
            continue
        assert repaired.check is not None
        assert repaired.check.findings == (), repaired
        assert kind.read(base) == before
        (action,) = repaired.actions
        assert action.did == "rewritten"
        assert action.n_fetched > 0
        assert action.lost == ()
        restore_quarantine(base, repaired.quarantine)


def test_a_replica_comes_before_an_older_index(tmp_path: Path) -> None:
    """The older index names the chunks that were there before; some were replaced since."""
    options: Any = {"shape": (16, 8), "chunks": (1, 8), "dtype": "u2", "fill_value": 0}
    options |= {"compressors": [GzipCodec(), Crc32cCodec()]}
    store = ShardingStore(tmp_path / "s", chunks_per_shard=16)
    z: Any = zarr.create_array(store, **options)
    for i in range(10):
        z[i] = np.arange(8) * 7 + i
    store.close()
    store = ShardingStore(tmp_path / "s")
    z = zarr.open_array(store)
    z[2], z[5] = 900, 901
    store.close()
    shutil.copytree(tmp_path / "s", tmp_path / "replica")
    expected = zarr.open_array(tmp_path / "replica", mode="r")[...]
    shard = tmp_path / "s/c/0/0"
    shard.write_bytes(shard.read_bytes()[:-200])
    report = check_store(tmp_path / "s", level="decode")
    repaired = repair_store(report, source=tmp_path / "replica", dry_run=False)
    (action,) = repaired.actions
    assert "older index" in action.message
    assert np.array_equal(zarr.open_array(tmp_path / "s", mode="r")[...], expected)


def test_replicas_that_do_not_count(tmp_path: Path) -> None:
    """Another shape, chunk shape or data type, a damaged chunk: the chunk is lost, none is wrong.
    A replica that cannot be read now leaves the shard as it is."""
    kind = KINDS["v3 gzip, index first"]
    base, source = tmp_path / "s", tmp_path / "replica"
    kind.make(base)
    ShardingMapping(base).flush()
    path = base / "a/c/1/1"
    path.write_bytes(_flip(lambda n: n - 5)(path.read_bytes()))
    report = check_store(base, level="decode")
    for shape, chunks, dtype in (
        ((8, 20), (2, 4), "u2"),
        ((8, 24), (2, 6), "u2"),
        ((8, 24), (2, 4), "i2"),
    ):
        array = zarr.create_array(
            str(source), name="a", shape=shape, chunks=chunks, dtype=dtype, overwrite=True
        )
        array[:] = 1
        (action,) = repair_store(report, source=source).actions
        assert (action.n_fetched, len(action.lost)) == (0, 1)
    array = zarr.create_array(
        str(source), name="a", shape=(8, 24), chunks=(2, 4), dtype="u2", overwrite=True
    )
    array[:] = VALUES
    failing = FailingStore(zarr.storage.LocalStore(source), Faults(at=range(1000)))
    (action,) = repair_store(report, source=source).actions
    assert (action.n_fetched, action.lost) == (1, ())
    (action,) = repair_store(report, source=failing, dry_run=False).actions
    assert (action.did, action.lost) == ("left", ())
    for chunk in source.glob("a/c/*/*"):
        chunk.write_bytes(chunk.read_bytes()[:-1])
    (action,) = repair_store(report, source=source).actions
    assert (action.n_fetched, len(action.lost)) == (0, 1)


def test_a_replica_that_cannot_be_read_costs_no_shard_a_chunk(tmp_path: Path) -> None:
    """Each shard is left, also after the first one has met the error."""
    base, source = tmp_path / "s", tmp_path / "replica"
    for path in (base, source):
        KINDS["v3 gzip, index first"].make(path)
        ShardingMapping(path).flush()
    for path in (base / "a/c/0/0", base / "a/c/1/1"):
        path.write_bytes(_flip(lambda n: n - 5)(path.read_bytes()))
    report = check_store(base, level="decode")
    failing = FailingStore(zarr.storage.LocalStore(source), Faults(at=range(1000)))
    actions = repair_store(report, source=failing, dry_run=False).actions
    assert [action.did for action in actions] == ["left", "left"]


def _name(codec: object) -> str:
    return type(codec).__name__


@pytest.mark.parametrize("order", ["C", "F", "morton"])
@pytest.mark.parametrize("codec", [None, GzipCodec(), ZstdCodec(), BloscCodec()], ids=_name)
def test_a_cut_shard_that_was_full(order: Any, codec: Any) -> None:
    """Nothing in it tells its chunks; if the user tells their order, those before the cut stay."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=(4, 3), order=order)
    values = np.random.default_rng(0).integers(0, 1000, (14, 20)).astype("i4")
    options: dict[str, Any] = {"shape": (14, 20), "chunks": (2, 5), "compressors": codec}
    zarr.create_array(store, name="a", dtype="i4", **options)[:] = values
    for key in ("a/c/0/0", "a/c/1/1"):  # the second has 3 of 12 chunks
        places = sorted(place for place in places_in(base[key], 12) if place is not None)
        cut = {**base, key: base[key][: sum(places[len(places) // 2])]}
        damaged = dict(cut)
        (action,) = repair_store(check_store(cut, level="decode"), dry_run=False).actions
        assert (action.did, cut) == ("left", damaged)
        report = repair_store(check_store(cut, level="decode"), order=order, dry_run=False)
        (action,) = report.actions
        assert (action.did, action.n_kept) == ("rewritten", len(places) // 2 + 1)
        assert report.check is not None
        assert report.check.is_clean
        found: Any = zarr.open_array(ShardingStore(cut), path="a")[:]
        i, j = (8 * int(key[4]), 15 * int(key[6]))
        for at in np.ndindex(4, 3):
            box = (slice(i + 2 * at[0], i + 2 * at[0] + 2), slice(j + 5 * at[1], j + 5 * at[1] + 5))
            is_lost = (i // 2 + at[0], j // 5 + at[1]) in action.lost
            np.testing.assert_array_equal(found[box], 0 if is_lost else values[box])
        restore_quarantine(cut, report.quarantine)
        assert cut[key] == damaged[key]
    with pytest.raises(SpecError, match="order is"):
        repair_store(check_store(base), order="morton code")  # type: ignore[arg-type]


@pytest.mark.parametrize("has_replica", [False, True])
def test_a_wrong_checksum_below_the_shards_alone(has_replica: bool) -> None:
    """Any chunk may have the wrong byte: none gets a right checksum, unless a replica has it."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=4, storage_transformers=["sharding", "crc32c"])
    zarr.create_array(store, shape=(4,), chunks=(1,), dtype="u1", compressors=None)[:] = 1
    replica = dict(base) if has_replica else None
    base["c/0"] = bytes([65]) + base["c/0"][1:]
    damaged = dict(base)
    if replica is not None:
        del ShardingMapping(replica)["c/0"]
    report = check_store(base, level="decode")
    (action,) = repair_store(report, source=replica, dry_run=False).actions
    n_unproved = 1 if has_replica else 4
    assert (action.did, len(action.lost), base) == ("left", n_unproved, damaged)
    (action,) = repair_store(report, source=replica, keep="drop", dry_run=False).actions
    assert (action.n_kept, action.n_fetched, len(action.lost)) == (4 - n_unproved, 0, n_unproved)
    found: Any = zarr.open_array(ShardingStore(base), mode="r")[:]
    assert found.tolist() == [0, *[int(has_replica)] * 3]


@pytest.mark.parametrize("has_checksum", [False, True])
def test_a_wrong_checksum_below_the_shards_and_a_replica(
    tmp_path: Path, has_checksum: bool
) -> None:
    """A chunk that differs from the replica may be the damaged one. It gets no checksum."""
    options: dict[str, Any] = {"shape": (16,), "chunks": (2,), "dtype": "u2"}
    options |= {"compressors": [Crc32cCodec()] if has_checksum else None}
    for name in ("damaged", "replica"):
        transformers = ["sharding", "crc32c"]
        store = ShardingStore(tmp_path / name, 4, storage_transformers=transformers)
        zarr.create_array(store, **options)[:] = np.arange(1, 17)
        store.close()
    path = tmp_path / "damaged/c/0"
    data = bytearray(path.read_bytes())
    data[1] ^= 0x40  # in a chunk
    path.write_bytes(data)
    report = check_store(tmp_path / "damaged", level="decode")
    replica = tmp_path / "replica"
    (action,) = repair_store(report, source=replica, dry_run=False).actions
    if not has_checksum:
        assert action.did == "left"
        assert path.read_bytes() == data
        (action,) = repair_store(report, source=replica, keep="drop", dry_run=False).actions
    assert (action.did, action.n_kept, action.n_fetched) == ("rewritten", 3, 1)
    found: Any = zarr.open_array(ShardingStore(tmp_path / "damaged"), mode="r")
    assert (found[:] == np.arange(1, 17)).all()
    assert check_store(tmp_path / "damaged", level="decode").is_clean
