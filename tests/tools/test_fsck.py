"""`check_store`, `fsck`: each kind of finding, stores that nearly have it, and clean ones."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
import zarr
from numcodecs import Zlib
from zarr.codecs import BytesCodec
from zarr.storage import LocalStore, ObjectStore

from tests.store.test_rectilinear import needs_grids
from tests.support.checked_stores import CPS, KINDS, VALUES
from tests.support.kit import CountingStore
from tests.support.shard_bytes import MISSING, build_shard, index_of, places_in
from zarr_shardstore import (
    CheckReport,
    DraftHierarchyStore,
    Finding,
    ShardingMapping,
    ShardingStore,
    SpecError,
    check_store,
    reshard,
    shard_store,
    to_native,
    unshard_store,
)

N = 6
"""Entries of a shard."""
SHARD = "a/c/1/1"


def kinds_of(report: CheckReport) -> list[str]:
    return [found.kind for found in report.findings]


def bytes_below(root: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


# ----------------------------------------------------------------- clean stores


@pytest.mark.parametrize("cps", [None, 2])
def test_directories_in_a_zip_are_no_objects(cps: int | None, tmp_path: Path) -> None:
    """As ``zip -r`` stores them."""
    with ShardingStore(tmp_path / "a", cps) as store:
        zarr.create_array(store, name="x", shape=(8, 8), chunks=(2, 2), dtype="u1")[:] = 1
    name = shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path / "a")
    assert check_store(name).is_clean
    assert set(ShardingMapping(name)) == set(ShardingMapping(tmp_path / "a"))


@pytest.mark.parametrize("name", KINDS)
def test_no_clean_store_is_accused(name: str, tmp_path: Path) -> None:
    """Fresh, while it is appended to, batched, compacted and sealed; nothing is written."""
    kind = KINDS[name]
    bases: list[Any] = [{}, tmp_path / "s"]
    for base in bases:
        kind.make(base)
        store = kind.open(base, **kind.options)
        array = zarr.open_array(store, path="a", mode="r+")
        array[0, 0] = 7  # a part of one chunk: an append leaves a journal on local files
        for is_sealed in (False, True):
            if is_sealed:
                ShardingMapping(base, **kind.options).compact()
            before = bytes_below(tmp_path)
            for level in ("index", "entries", "decode"):
                report = check_store(base, level=level)
                assert [f for f in report.findings if f.kind != "in_use"] == []
                assert report.is_clean
                if is_sealed:
                    assert report.findings == ()
            assert report.n_chunks == (19 if name != "left to zarr" else report.n_chunks)
            assert bytes_below(tmp_path) == before
    for path in (tmp_path / "s").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert check_store(LocalStore(tmp_path / "s", read_only=True), level="decode").is_clean


def test_conversions_leave_clean_stores(tmp_path: Path) -> None:
    """And so do consolidated metadata, consolidated indexes, and pairs of formats."""
    for zarr_format in (2, 3):
        path = tmp_path / f"{zarr_format}"
        group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
        for name in ("x", "y/z"):
            array = group.create_array(name, shape=(8, 24), chunks=(2, 4), dtype="u2")
            array[:] = VALUES
        group.attrs["much"] = {"more": [1, None, float("nan")]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(path)
        new = path.with_name(f"new{zarr_format}")
        steps: list[tuple[Any, ...]] = [
            (partial(shard_store, chunks_per_shard=2),),
            (reshard, 3),
            (lambda path: ShardingMapping(path).consolidate_index(""),),
            (to_native,),
            (unshard_store,),
            (partial(shard_store, chunks_per_shard=2), new),
        ]
        for tool, *arguments in steps:
            tool(path, *arguments)
            report = check_store(path, level="decode")
            assert report.findings == ()
            assert report.n_arrays == 2
        assert check_store(new, level="decode").findings == ()


GOLDEN = Path(__file__).parents[1] / "golden" / "v0.1"
REMAINS = {
    "half_converted": {"unfinished_conversion"},
    "stopped_change": {"journal"},
    "stopped_move": {"journal"},
    "stopped_rewrite": {"partial_file"},
    "consolidated_index-times": {"consolidated_index"},  # of files that were copied since
}
"""Of the golden stores, by the begin of their names."""


def test_golden_stores() -> None:
    """Each has the findings that its name says, and no others; every chunk decodes."""
    names = [path.name for path in GOLDEN.iterdir() if path.is_dir()]
    assert len(names) > 20
    for name in names:
        allowed = {"journal"} if name.endswith("append") else set[str]()
        wanted = next((REMAINS[start] for start in REMAINS if name.startswith(start)), allowed)
        report = check_store(GOLDEN / name, level="decode")
        kinds = set(kinds_of(report)) - {"partial_file"} if "half" in name else kinds_of(report)
        if "crc32c_below" not in name:  # such shards are rewritten
            assert set(kinds) == wanted, (name, report.findings)
        assert report.n_chunks in (0, 11)
    assert check_store(GOLDEN.parents[1] / "interop/golden/zarr218", level="decode").findings == ()


# ------------------------------------------------------------ shards and chunks


def places_of(data: bytes) -> list[tuple[int, int]]:
    return [place or (MISSING, MISSING) for place in places_in(data, N)]


def with_places(change: Callable[[list[tuple[int, int]], int], None]) -> Callable[[bytes], bytes]:
    """Another index with its right checksum."""

    def changed(data: bytes) -> bytes:
        places = places_of(data)
        change(places, len(data))
        return data[: -16 * N - 4] + index_of(places)

    return changed


def flip(at: int) -> Callable[[bytes], bytes]:
    def flipped(data: bytes) -> bytes:
        i = at % len(data)
        return data[:i] + bytes([data[i] ^ 16]) + data[i + 1 :]

    return flipped


def _set(places: list[tuple[int, int]], i: int, place: tuple[int, int]) -> None:
    places[i] = place


RAW = "v3 raw"
SHARDS: dict[str, tuple[str, str, Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    # what is found: the kind of store, the damage, and one that nearly is
    "torn_index": ("index", RAW, lambda d: d[:60], lambda d: d),
    "index_checksum": ("index", RAW, flip(-1), lambda d: d),
    "index_form": (
        "index",
        RAW,
        lambda d: build_shard(dict(enumerate([bytes(16)] * N)), N, location="start"),
        lambda d: build_shard(dict(enumerate([bytes(16)] * N)), N),
    ),
    "entry_out_of_bounds": (
        "index",
        RAW,
        with_places(lambda p, n: _set(p, 2, (n - 100 - 15, 16))),
        with_places(lambda p, n: _set(p, 5, (n - 100 - 16, 16))),
    ),
    "entry_overlap": (
        "index",
        RAW,
        with_places(lambda p, n: _set(p, 0, (p[3][0] + 1, 16))),
        with_places(lambda p, n: _set(p, 0, (MISSING, MISSING))),
    ),
    "entry_length": (
        "index",
        RAW,
        with_places(lambda p, n: _set(p, 0, (p[0][0], 15))),
        lambda d: d,
    ),
    "chunk_checksum": ("entries", "v3 crc32c", flip(3), lambda d: d),
    "chunk_undecodable": (
        "decode",
        "v3 zstd with checksum",
        flip(12),
        # dead bytes are nobody's
        lambda d: d[: -16 * N - 4] + b"dead" + d[-16 * N - 4 :],
    ),
    "chunk_size": (
        "decode",
        "v3 zstd",
        lambda d: build_shard({0: _zstd(bytes(15))}, N),
        lambda d: build_shard({0: _zstd(bytes(16))}, N),
    ),
}


def _zstd(data: bytes) -> bytes:
    """A frame whose header does not tell its size."""
    import zstandard

    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@pytest.mark.parametrize("found", SHARDS)
def test_damages_of_shards(found: str) -> None:
    level, name, damage, nearly = SHARDS[found]
    base: dict[str, bytes] = {}
    KINDS[name].make(base)
    whole = base[SHARD]
    base[SHARD] = nearly(whole)
    assert check_store(base, level=level).findings == ()  # type: ignore[arg-type]
    base[SHARD] = damage(whole)
    report = check_store(base, level=level)  # type: ignore[arg-type]
    assert set(kinds_of(report)) == {found}
    first = report.findings[0]
    assert isinstance(first, Finding)
    assert (first.key, first.array, first.shard) == (SHARD, "a", (1, 1))
    assert first.repairable
    assert not report.is_clean
    if found.startswith(("entry", "chunk")):
        assert first.chunk is not None
        assert [c // n for c, n in zip(first.chunk, CPS, strict=True)] == [1, 1]
        assert first.byte_range is not None


def test_a_blank_index_without_a_checksum() -> None:
    """It says that all chunks are missing, and there are bytes of chunks."""
    base: dict[str, bytes] = {}
    KINDS["draft gzip"].make(base)
    key = "data/root/a/c1/1"
    base[key] = base[key][: -16 * N] + b"\xff" * 16 * N
    assert kinds_of(check_store(base)) == ["torn_index"]


def test_an_object_that_is_no_shard(tmp_path: Path) -> None:
    KINDS["unsharded v3"].make(tmp_path)
    path = tmp_path / SHARD
    path.write_bytes(path.read_bytes()[:-1])
    assert check_store(tmp_path).is_clean, "its size is not asked for"
    (found,) = check_store(tmp_path, level="decode").findings
    assert (found.kind, found.key, found.chunk) == ("chunk_undecodable", SHARD, (1, 1))


# --------------------------------------------------------------------- the rest


def group_with(base: Any, **more: Any) -> Any:
    root = zarr.open_group(ShardingStore(base, chunks_per_shard=CPS), mode="w", **more)
    for name in ("0", "1"):
        root.create_array(name, shape=(8, 24), chunks=(2, 4), dtype="u2")[:] = VALUES
    return root


def image(base: Any, *paths: str) -> None:
    datasets = [{"path": path} for path in paths]
    group_with(base).attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": datasets}]}


def consolidated(base: dict[str, bytes]) -> None:
    group_with(base, zarr_format=2)
    del base["1/.zattrs"]  # other writers store no empty attributes
    zarr.consolidate_metadata(ShardingStore(base, chunks_per_shard=CPS))


def changed_document(base: dict[str, bytes], key: str, **members: Any) -> None:
    base[key] = json.dumps({**json.loads(base[key]), **members}).encode()


@pytest.mark.parametrize(("zarr_format", "member"), [(3, "data_type"), (3, "codecs"), (2, "dtype")])
def test_a_document_without_a_member_that_zarr_requires(zarr_format: Any, member: str) -> None:
    base: dict[str, bytes] = {}
    options: Any = {"shape": (4,), "chunks": (1,), "dtype": "u2", "zarr_format": zarr_format}
    zarr.create_array(ShardingStore(base, chunks_per_shard=2), **options)[:] = 1
    key = "zarr.json" if zarr_format == 3 else ".zarray"
    doc = json.loads(base[key])
    del doc[member]
    base[key] = json.dumps(doc).encode()
    found = check_store(base, level="index").findings
    assert [(each.kind, each.severity, each.key) for each in found] == [("document", "error", key)]
    assert member in found[0].message


def array_of_v2(base: dict[str, bytes]) -> None:
    options: Any = {"compressors": None, "zarr_format": 2}
    store = ShardingStore(base, None)
    zarr.create_array(store, name="p", shape=(9,), chunks=(3,), dtype="u2", **options)


def pair(base: dict[str, bytes], shape: int) -> None:
    array_of_v2(base)
    add_v3(base, shape)


def add_v3(base: dict[str, bytes], shape: int) -> None:
    base["p/zarr.json"] = json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [shape],
            "data_type": "uint16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [BytesCodec().to_dict()],
            "attributes": {},
        }
    ).encode()


def _lose(base: dict[str, bytes], prefix: str) -> None:
    for key in [key for key in base if key.startswith(prefix)]:
        del base[key]


STORES: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    # kind: severity, a store that nearly has it, and what is done to that
    "document": ("error", group_with, lambda b: b.update({"0/zarr.json": b'{"zarr_format": 3'})),
    "consolidated_metadata": (
        "warning",
        consolidated,
        lambda b: changed_document(b, "1/.zarray", shape=[8, 25]),
    ),
    "twin_documents": ("warning", lambda b: pair(b, 9), lambda b: add_v3(b, 12)),
    "empty_level": ("warning", lambda b: image(b, "0", "1"), lambda b: _lose(b, "1/c/")),
    "partial_file": (
        "warning",
        group_with,
        lambda b: b.update({f"0/c/0/.{'0' * 32}.partial": b""}),
    ),
    "lock_file": ("warning", group_with, lambda b: b.update({"0/c/0/0.__lock": b""})),
    "journal": ("warning", group_with, lambda b: b.update({"0/c/0/0.__journal": b"zsj"})),
    "unfinished_conversion": (
        "warning",
        group_with,
        lambda b: b.update(
            {
                ".zarr_shardstore/0123456789abcdef/values/c/0": b"",
                ".zarr_shardstore/0123456789abcdef/manifest.json": json.dumps(
                    {"state": "staging", "path": "0", "is_staged": True}
                ).encode(),
            }
        ),
    ),
    "outside_grid": ("warning", group_with, lambda b: b.update({"0/c/2/0": b""})),
    "foreign_object": ("warning", group_with, lambda b: b.update({"0/c/0/0.tmp": b""})),
    "unknown_key": ("info", group_with, lambda b: b.update({"notes.txt": b""})),
}


@pytest.mark.parametrize("found", STORES)
def test_documents_and_remains(found: str) -> None:
    severity, nearly, damage = STORES[found]
    base: dict[str, bytes] = {}
    nearly(base)
    assert check_store(base).findings == ()
    damage(base)
    report = check_store(base)
    assert [(f.kind, f.severity) for f in report.findings] == [(found, severity)]
    assert report.is_clean == (severity == "info")


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"order": "F"}, False),
        ({"fill_value": 7}, False),
        ({"compressor": None}, False),
        ({"dtype": ">i4"}, False),
        ({"filters": [{"id": "delta", "dtype": "<i4"}]}, False),
        ({"compressor": {"id": "zlib", "level": 9}, "fill_value": None, "filters": []}, True),
    ],
)
def test_documents_of_both_formats_give_the_same_values(change: Any, is_same: bool) -> None:
    """A warning says where they do not; another spelling, or level of a compressor, is none."""
    base: dict[str, bytes] = {}
    options: Any = {"dtype": "i4", "fill_value": 0, "compressors": Zlib(), "zarr_format": 2}
    zarr.create_array(ShardingStore(base, None), shape=(4, 4), chunks=(2, 2), **options)[:2] = 1
    document = json.loads(base[".zarray"])
    to_native(base)
    base[".zarray"] = json.dumps({**document, **change}).encode()
    assert kinds_of(check_store(base)) == ([] if is_same else ["twin_documents"])


def test_chunks_whose_codec_is_not_installed() -> None:
    """They are not decoded. The report says so, and accuses no chunk."""
    base: dict[str, bytes] = {}
    group_with(base)
    document = base["0/zarr.json"]
    base["0/zarr.json"] = document.replace(b'"zstd"', b'"not_installed"')
    assert base["0/zarr.json"] != document
    report = check_store(base, level="decode")
    assert [(f.kind, f.key, f.severity) for f in report.findings] == [
        ("unchecked", "0/zarr.json", "info")
    ]
    assert report.is_clean


@pytest.mark.parametrize(
    ("transformers", "n_without"),
    [(["sharding"], 8), (["crc32c"], 0), (["crc32c", "sharding"], 0), (["sharding", "crc32c"], 0)],
)
def test_the_checksum_of_a_transformer_counts(transformers: Any, n_without: int) -> None:
    """Above shards, below them, or of plain chunks: each changed byte is found."""
    base: dict[str, bytes] = {}
    cps = 2 if "sharding" in transformers else None
    store = ShardingStore(base, chunks_per_shard=cps, storage_transformers=transformers)
    zarr.create_array(store, shape=(8,), chunks=(1,), dtype="u1", compressors=None)[:] = 1
    report = check_store(base, level="entries")
    assert (report.n_without_checksum, report.n_chunks, report.findings) == (n_without, 8, ())


def test_chunks_whose_codecs_are_not_translated() -> None:
    """The filters of an array of the draft are not known here, so its chunks may have any size."""
    base: dict[str, Any] = {}
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=2))
    zarr.create_array(store, name="a", shape=(8,), chunks=(2,), dtype="u1")[:] = 1
    document = json.loads(bytes(base["meta/root/a.array.json"]))
    document["attributes"]["filters"] = [{"id": "delta", "dtype": "u1"}]
    base["meta/root/a.array.json"] = json.dumps(document).encode()
    assert kinds_of(check_store(base, level="entries")) == ["unchecked"]


def test_a_temporary_file_of_a_killed_conversion(tmp_path: Path) -> None:
    """It is found, though all else below its directory belongs to the conversion."""
    root = shutil.copytree(GOLDEN / "half_converted-unshard_draft-staging", tmp_path / "v")
    found = [(f.kind, f.severity, Path(f.key).suffix) for f in check_store(root).findings]
    assert sorted(found) == [
        ("partial_file", "warning", ".partial"),
        ("unfinished_conversion", "warning", ".json"),
    ]


def test_a_level_of_an_image_that_is_no_array() -> None:
    base: dict[str, bytes] = {}
    image(base, "0", "2")
    (found,) = check_store(base).findings
    assert (found.kind, found.severity, found.array) == ("empty_level", "error", "2")


def test_images_without_any_chunk_are_clean() -> None:
    base: dict[str, bytes] = {}
    image(base, "0", "1")
    _lose(base, "0/c/")
    _lose(base, "1/c/")
    assert check_store(base).findings == ()


def test_stale_consolidated_indexes(tmp_path: Path) -> None:
    """Of another version, which harms no reader; of this version, which would."""
    group_with(tmp_path)
    mapping = ShardingMapping(tmp_path)
    mapping.flush()
    mapping.consolidate_index("")
    assert check_store(tmp_path).findings == ()
    shard = tmp_path / "0/c/1/1"
    status = shard.stat()
    whole = shard.read_bytes()
    index = tmp_path / "1/__shards.index"
    index.write_bytes(index.read_bytes()[:-1])
    other = with_places(lambda p, n: p.__setitem__(slice(2), [p[1], (MISSING, MISSING)]))(whole)
    shard.write_bytes(other)
    os.utime(shard, ns=(0, 10**18))
    found = check_store(tmp_path).findings
    assert [(f.kind, f.severity) for f in found] == [("consolidated_index", "warning")] * 2
    os.utime(shard, ns=(0, status.st_mtime_ns))
    found = check_store(tmp_path, "0").findings
    assert [(f.kind, f.severity) for f in found] == [("consolidated_index", "error")]


class SickStore(CountingStore):
    """One object whose reads fail, so many times."""

    sick_key, n_failures = "", 0

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if key == self.sick_key and self.n_failures > 0:
            self.n_failures -= 1
            raise OSError(5, "Input/output error", key)
        return await super().get(key, *args, **kwargs)


@pytest.mark.parametrize("name", [RAW, "v3 zstd", "unsharded v3", "unsharded v2"])
def test_objects_that_cannot_be_read(name: str) -> None:
    """The error is told, the other objects are checked; a read that failed once is no finding."""
    base = SickStore()
    KINDS[name].make(base)
    levels: list[Any] = ["decode"] if "unsharded" in name else ["index", "decode"]
    for level in levels:
        base.sick_key, base.n_failures = "", 0
        n_objects = check_store(base, level=level).n_objects
        base.sick_key = {"unsharded v3": "a/c/1/1", "unsharded v2": "a/1.1"}.get(name, SHARD)
        base.n_failures = 1
        assert check_store(base, level=level).findings == ()
        base.n_failures = 10**6
        report = check_store(base, level=level)
        assert [(f.kind, f.severity, f.key) for f in report.findings] == [
            ("unreadable", "error", base.sick_key)
        ]
        assert "Input/output error" in report.findings[0].message
        assert not report.findings[0].repairable
        assert report.n_objects == n_objects


def test_a_lost_document() -> None:
    """Its chunks are named, also where no array is left."""
    base: dict[str, bytes] = {}
    KINDS[RAW].make(base)
    del base["a/zarr.json"]
    report = check_store(base)
    assert kinds_of(report) == ["foreign_object"] * 4
    assert "document may be lost" in report.findings[0].message


def test_arrays_behind_links(tmp_path: Path) -> None:
    group_with(tmp_path / "s")
    ShardingMapping(tmp_path / "s").flush()
    (tmp_path / "s/0").rename(tmp_path / "elsewhere")
    (tmp_path / "s/0").symlink_to(tmp_path / "elsewhere")
    report = check_store(tmp_path / "s")
    assert (report.n_objects, report.findings) == (8, ())


def test_arguments() -> None:
    base: dict[str, bytes] = {}
    group_with(base)
    with pytest.raises(SpecError, match="level is 'index'"):
        check_store(base, level="deep")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no array has the path"):
        check_store(base, "2")
    with pytest.raises(SpecError, match="there is no array"):
        check_store({"x": b""})
    base["1/c/0/0"] = b""
    assert check_store(base, "0").findings == ()
    assert kinds_of(check_store(base, ["1"])) == ["torn_index"]


@pytest.mark.parametrize("shards", [None, pytest.param([[8, 6, 2]], marks=needs_grids)])
def test_an_emptied_shard_outside_a_shrunk_array_is_no_damage(shards: Any) -> None:
    """Where removals have no condition it stays, with an index alone, of whatever length."""
    base = ObjectStore(obstore.store.MemoryStore())
    with zarr.config.set({"array.rectilinear_chunks": True}):
        z = zarr.create_array(
            ShardingStore(base, 4), name="a", shape=(16,), chunks=(1,), dtype="u1", shards=shards
        )
        z[:] = 1
        z.resize((4,))
    report = check_store(base)
    assert report.is_clean
    assert {(found.kind, found.severity) for found in report.findings} == {("outside_grid", "info")}
