"""References: each gives the bytes of its chunk, or the array is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import obstore
import pytest
import zarr
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.reference import LazyReferenceMapper
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, ZipStore

from tests.support.hierarchies import BASES, KINDS, V3, ArrayOf, Coords, Kind
from tests.support.kit import objects_of
from tests.support.rounds import rounds
from tests.tools.test_round_trips import INDEXES, arrays, cps_for
from zarr_shardstore import (
    CorruptShardError,
    ShardConflictError,
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnsupportedError,
    shard_store,
    stale_references,
    to_references,
)

pytestmark = pytest.mark.filterwarnings("ignore:The 'fastparquet' engine is deprecated")

URL = "s3://bucket/v.zarr"


def bytes_of(reference: Any, objects: Any) -> bytes:
    """Return what a reader gets: of text, a whole object, or a range of one."""
    if isinstance(reference, str):
        return reference.encode()
    value: bytes = objects[reference[0].removeprefix(f"{URL}/")]
    if len(reference) == 1:
        return value
    _, offset, nbytes = reference
    assert 0 <= offset <= offset + nbytes <= len(value)
    return value[offset : offset + nbytes]


def key_in(zarr_format: int, kind: Kind, path: str, coords: Coords) -> str:
    """Return the key of a chunk in a format, spelled by hand."""
    numbers = kind.separator.join(map(str, coords))
    if zarr_format == 2 or kind.style == "v2":
        suffix = numbers or "0"
    else:
        suffix = f"c{kind.separator}{numbers}" if coords else "c"
    return f"{path}/{suffix}" if path else suffix


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=rounds(15))
@given(data=st.data())
def test_a_reference_gives_the_bytes_of_its_chunk(name: str, data: st.DataObject) -> None:
    """Of each hierarchy and form of an index; a missing chunk has none, an empty one is empty."""
    kind = KINDS[name]
    array: ArrayOf = data.draw(arrays(kind))
    base: Any = data.draw(st.sampled_from([BASES["dict"], BASES["local"], BASES["obstore"]]))()
    if data.draw(st.booleans()):
        cps = data.draw(cps_for(len(array.grid)))
        shard_store(
            array.objects(), base, chunks_per_shard=cps, **data.draw(st.sampled_from(INDEXES))
        )
    else:
        ShardingMapping(base, None).update(array.objects())
    before = objects_of(base)
    for zarr_format in (2, 3):
        references = to_references(base, zarr_format=zarr_format, url=URL)["refs"]
        documents = {key for key in references if key.rpartition("/")[2][:2] in (".z", "za")}
        found = {k: bytes_of(references[k], before) for k in references if k not in documents}
        expected = {key_in(zarr_format, kind, array.path, c): v for c, v in array.chunks.items()}
        assert found == expected
        doc = json.loads(references[f"{array.path}/{_name(zarr_format)}".lstrip("/")])
        assert tuple(doc["shape"]) == array.shape
        assert "sharding" not in json.dumps(doc)
    assert objects_of(base) == before


def _name(zarr_format: int) -> str:
    return ".zarray" if zarr_format == 2 else "zarr.json"


@pytest.fixture
def store(tmp_path: Path) -> ShardingStore:
    return ShardingStore(tmp_path / "v.zarr", chunks_per_shard=(2, 2))


def filled(store: Any, name: str = "g/z", **options: Any) -> Any:
    """Create an array of 24 chunks, one of them missing."""
    options = {"shape": (11, 7), "chunks": (2, 2), "dtype": "u2", "fill_value": 3, **options}
    z: Any = zarr.create_array(store, name=name, **options)
    values = np.arange(100, 177, dtype="u2").reshape(11, 7)
    values[4:6, 2:4] = options["fill_value"]
    z[:] = values
    return z


def test_files_are_what_is_returned(store: ShardingStore, tmp_path: Path) -> None:
    """JSON is replaced in one step. Parquet names the same bytes, and replaces nothing."""
    filled(store)
    references = to_references(store)
    out = tmp_path / "refs.json"
    out.write_text("older")
    assert to_references(store, out=out) == str(out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(references))
    parquet = tmp_path / "refs.parq"
    assert to_references(store, to="kerchunk-parquet", out=parquet) == str(parquet)
    lazy = fsspec.filesystem("reference", fo=str(parquet), remote_protocol="file")
    for key, reference in to_references(store)["refs"].items():
        if key.startswith("g/z/") and "/.z" not in key:
            assert (
                lazy.cat_file(key.replace("/", ".").replace("g.z.", "g/z/"))
                == (
                    Path(reference[0].removeprefix("file://")).read_bytes()[reference[1] :][
                        : reference[2]
                    ]
                )
            )
    with pytest.raises(FileNotFoundError):
        lazy.cat_file("g/z/2.1")
    with pytest.raises(SpecError, match="there is something at"):
        to_references(store, to="kerchunk-parquet", out=parquet)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["refs.json", "refs.parq", "v.zarr"]


def test_empty_chunks(tmp_path: Path) -> None:
    """kerchunk's forms have them; the others refuse them by name."""
    base = LocalStore(tmp_path / "s")
    array = ArrayOf(V3, "a", (3,), (1,), (0,), {(0,): b"", (1,): b"x"})
    shard_store(array.objects(), base, chunks_per_shard=2)
    out = to_references(base, to="kerchunk-parquet", out=tmp_path / "out")
    lazy = fsspec.filesystem("reference", fo=out, remote_protocol="file")
    assert [lazy.cat_file(f"a/{n}") for n in range(2)] == [b"", b"x"]
    with pytest.raises(FileNotFoundError):
        lazy.cat_file("a/2")
    with pytest.raises(UnsupportedError, match=r"'a/c.0' has no bytes"):
        to_references(base, to="virtualizarr")


def test_chunks_outside_the_array_have_no_references(tmp_path: Path) -> None:
    """As after another program has made its document smaller."""
    z = filled(ShardingStore(tmp_path, (2, 2)))
    document = tmp_path / "g/z/zarr.json"
    doc = json.loads(document.read_text())
    assert doc["shape"] == list(z.shape)
    document.write_text(json.dumps({**doc, "shape": [5, 7]}))
    found = [key for key in to_references(tmp_path)["refs"] if "/.z" not in key and "g/z/" in key]
    assert sorted(found) == sorted(
        f"g/z/{y}/{x}" for y in range(3) for x in range(4) if (y, x) != (2, 1)
    )


def test_a_failure_leaves_the_older_file(
    store: ShardingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing beside it."""
    filled(store)
    out = tmp_path / "refs.json"
    out.write_text("older")
    store.close()
    shard = tmp_path / "v.zarr/g/z/c/0/0"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptShardError, match="g/z/c/0/0"):
        to_references(store, out=out)
    assert out.read_text() == "older"
    shard.unlink()
    monkeypatch.setattr(LocalFileSystem, "mv", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_references(store, out=out)
    assert out.read_text() == "older"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["refs.json", "v.zarr"]


def test_a_damaged_entry_is_refused(tmp_path: Path) -> None:
    """A reader of its reference would get less than the chunk, and no error."""
    store = ShardingStore(tmp_path, chunks_per_shard=(2, 2), index_codecs=["bytes"])
    filled(store, compressors=None)
    store.close()
    shard = tmp_path / "g/z/c/0/0"
    content = bytearray(shard.read_bytes())
    content[-64:-56] = (1000).to_bytes(8, "little")
    shard.write_bytes(content)
    with pytest.raises(CorruptShardError, match="leaves the data"):
        to_references(tmp_path)


WRITER = """
import os, sys, zarr
from zarr_shardstore import ShardingStore
z = zarr.open_array(ShardingStore(sys.argv[1]), path="g/z")
z[:2, :2] = 9
z[:2, 2:4] = 9
os._exit(0)
"""


def test_a_shard_that_is_appended_to_is_refused(tmp_path: Path) -> None:
    """By another process, until it is compacted. A shard of this process is sealed."""
    store = ShardingStore(tmp_path, chunks_per_shard=(8, 8))
    z = filled(store)
    assert to_references(store)["refs"]["g/z/0/0"]
    assert not list(tmp_path.rglob("*__journal"))
    before = z[:]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=True, env=env)
    assert list(tmp_path.rglob("*__journal"))
    with pytest.raises(ShardConflictError, match=r"'g/z/c/0/0' is being appended to.*compact"):
        to_references(tmp_path)
    sync(store.compact())
    references = to_references(tmp_path)
    assert not list(tmp_path.rglob("*__journal"))
    assert stale_references(tmp_path, references) == []
    before[:2, :4] = 9
    np.testing.assert_array_equal(z[:], before)


def test_a_batch_has_no_places(store: ShardingStore) -> None:
    z = filled(store)
    with store.batch():
        z[0, 0] = 1
        with pytest.raises(SpecError, match="end it"):
            to_references(store)


@pytest.mark.parametrize("name", ["dict", "local", "fsspec", "obstore"])
@pytest.mark.parametrize("way", ["dict", "json", "parquet"])
def test_stale_references_are_named(name: str, way: str, tmp_path: Path) -> None:
    """A shard that was written or removed since then, and no other."""
    store = ShardingStore(BASES[name](), chunks_per_shard=(2, 2))
    z = filled(store)
    options: dict[str, Any] = {} if way == "dict" else {"out": tmp_path / "out"}
    if way == "parquet":
        options["to"] = "kerchunk-parquet"
    references = to_references(store, url=URL, **options)
    assert stale_references(store, references) == []
    z[0, 0] = 1000 if name in ("local", "obstore") else 3
    z[:2, :2] = 3
    z[4:8, 4:] = 3
    assert stale_references(store, references) == ["g/z/c/0/0", "g/z/c/1/1"]


def test_a_single_shard_of_the_same_size_is_stale_too() -> None:
    store = ShardingStore(BASES["obstore"](), chunks_per_shard=4)
    z = zarr.create_array(store, name="x", shape=(4,), chunks=(1,), dtype="u1", compressors=None)
    z[:] = 1
    references = to_references(store, url=URL)
    z[:] = 2
    assert stale_references(store, references) == ["x/c/0"]


def test_names_in_urls_of_web_servers_are_quoted() -> None:
    """A client would take the % in a name for its own."""
    store = ShardingStore({}, chunks_per_shard=4)
    zarr.create_array(store, name="a%20b", shape=(1,), chunks=(1,), dtype="u1")[:] = 1
    for url, name in (("http://h", "a%2520b"), ("s3://h", "a%20b")):
        refs = to_references(store, url=url)["refs"]
        assert refs["a%20b/0"][0] == f"{url}/{name}/c/0"


@pytest.mark.filterwarnings("ignore")
def test_missing_chunks_of_large_shards_in_parquet(tmp_path: Path) -> None:
    pytest.importorskip("fastparquet")
    store = ShardingStore({}, chunks_per_shard=32)
    z = zarr.create_array(store, name="x", shape=(64,), chunks=(1,), dtype="u1")
    z[:7], z[8:] = 1, 1
    out = to_references(store, to="kerchunk-parquet", out=tmp_path / "out", url=URL)
    found = LazyReferenceMapper(str(out), fs=LocalFileSystem())
    assert found["x/6"][0] == f"{URL}/x/c/0"
    with pytest.raises(KeyError):
        found["x/7"]


def test_what_was_not_made_here_tells_no_states(store: ShardingStore, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no JSON")
    for references in ({"version": 1, "refs": {}}, tmp_path / "notes.txt"):
        with pytest.raises(SpecError, match="tells no states"):
            stale_references(store, references)


def test_selection_and_groups(store: ShardingStore) -> None:
    """Groups above what is selected are there, also those that nothing describes."""
    group = zarr.create_group(store, attributes={"root": 1})
    group.create_group("g", attributes={"unit": "nm"})
    filled(store, "g/z")
    filled(store, "h/i/z")
    found = to_references(store, "h/*", zarr_format=3, group="/runs/7")["refs"]
    shown = {key: json.loads(found[key]).get("attributes") for key in found if "json" in key}
    groups = ["zarr.json", "runs/zarr.json", "runs/7/zarr.json", "runs/7/h/zarr.json"]
    assert list(shown) == [
        *sorted(groups, key=len),
        "runs/7/h/i/zarr.json",
        "runs/7/h/i/z/zarr.json",
    ]
    assert shown["runs/7/zarr.json"] == {"root": 1}
    assert "runs/7/h/i/z/c/0/0" in found
    everything = to_references(store)["refs"]
    assert json.loads(everything["g/.zattrs"]) == {"unit": "nm"}
    with pytest.raises(SpecError, match="no array has the path 'nothing'"):
        to_references(store, "nothing")


def test_ome_groups_follow_the_format(tmp_path: Path) -> None:
    """Attributes are those of the version that readers of the format look for."""
    axes = [{"name": name, "type": "space"} for name in "yx"]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": []}]}
    group = zarr.create_group(
        ShardingStore(tmp_path, 2), attributes={"ome": {"version": "0.5", "multiscales": [image]}}
    )
    group.create_array("0", shape=(4, 4), chunks=(1, 1), dtype="u1", dimension_names=("y", "x"))
    old = to_references(tmp_path, zarr_format=2)["refs"]
    assert json.loads(old[".zattrs"]) == {"multiscales": [{**image, "version": "0.4"}]}
    assert json.loads(old["0/.zattrs"]) == {"_ARRAY_DIMENSIONS": ["y", "x"]}
    (tmp_path / "old").mkdir()
    for key in (".zgroup", ".zattrs", "0/.zarray", "0/.zattrs"):
        (tmp_path / "old" / key).parent.mkdir(exist_ok=True)
        (tmp_path / "old" / key).write_text(old[key])
    new = to_references(tmp_path / "old", zarr_format=3)["refs"]
    assert json.loads(new["zarr.json"])["attributes"] == {
        "ome": {"version": "0.5", "multiscales": [image]}
    }


@pytest.mark.parametrize("missing", [True, False])
def test_fill_values_of_zero(tmp_path: Path, missing: bool) -> None:
    """xarray masks the fill value of v2; but a null in it is garbage to zarr 2.18."""
    z: Any = zarr.create_array(
        ShardingStore(tmp_path, 2), shape=(4,), chunks=(1,), dtype="f4", dimension_names=["x"]
    )
    z[int(missing) :] = 1
    reports: list[Any] = []
    references = to_references(tmp_path, zarr_format=2, on_report=reports.append)["refs"]
    assert json.loads(references[".zarray"])["fill_value"] == (0 if missing else None)
    assert ("xarray masks" in reports[0]["arrays"][0]["note"]) is missing


def test_a_null_of_v2_means_zero(tmp_path: Path) -> None:
    """To every reader; zarr 2.18 would read what happens to be in memory."""
    base = LocalStore(tmp_path)
    z: Any = zarr.create_array(
        base, shape=(4,), chunks=(1,), dtype="f4", fill_value=None, zarr_format=2
    )
    z[1:] = 1
    assert json.loads((tmp_path / ".zarray").read_text())["fill_value"] is None
    assert json.loads(to_references(base)["refs"][".zarray"])["fill_value"] == 0


def test_what_has_no_references_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is written then; without that array the others have theirs."""
    store = ShardingStore(
        tmp_path, 2, declaration="storage_transformers", storage_transformers=["crc32c", "sharding"]
    )
    filled(store, "a")
    filled(ShardingStore(tmp_path, 2), "b")
    with pytest.raises(UnsupportedError, match=r"'a' takes no references.*'crc32c'.*copy it"):
        to_references(tmp_path, out=tmp_path / "refs.json")
    assert not (tmp_path / "refs.json").exists()
    assert "b/0/0" in to_references(tmp_path, ["b"])["refs"]
    inner = zarr.codecs.ShardingCodec(chunk_shape=(1, 2))
    filled(LocalStore(tmp_path), "c", shards=(4, 4), serializer=inner, compressors=None)
    with pytest.raises(UnsupportedError, match="'c' takes no references"):
        to_references(tmp_path, ["c"], zarr_format=2)
    filled(ShardingStore(tmp_path, 2), "d", filters=zarr.codecs.TransposeCodec(order=(1, 0)))
    assert json.loads(to_references(tmp_path, ["d"])["refs"]["d/.zarray"])["order"] == "F"


def test_an_array_that_is_left_to_zarr_has_flat_chunks(tmp_path: Path) -> None:
    """Its mark says who writes its shards, not how they are stored."""
    z = filled(LocalStore(tmp_path), shards=(4, 4))
    document = tmp_path / "g/z/zarr.json"
    mark = {"zarr_shardstore": {"must_understand": False, "native": "passthrough"}}
    document.write_text(json.dumps({**json.loads(document.read_text()), **mark}))
    assert zarr.open_array(ShardingStore(tmp_path), path="g/z").shards == z.shards
    found = to_references(tmp_path, zarr_format=3)["refs"]
    assert {"g/z/c/0/0", "g/z/c/5/3"} < set(found)
    assert "zarr_shardstore" not in json.loads(found["g/z/zarr.json"])


def test_urls_of_stores(tmp_path: Path) -> None:
    """Of what other programs reach; for all else the caller has to say it."""

    def url_of(base: Any) -> str:
        found: str = to_references(base)["zarr_shardstore"]["url"]
        return found

    filled(ShardingStore(tmp_path / "a b#"))
    here = f"file://{tmp_path}/a b#"
    local = fsspec.filesystem("file", auto_mkdir=True)
    bases: list[Any] = [
        str(tmp_path / "a b#"),
        LocalStore(tmp_path / "a b#"),
        ShardingStore(tmp_path / "a b#"),
        fsspec.FSMap(str(tmp_path / "a b#"), local),
        ObjectStore(obstore.store.LocalStore(tmp_path / "a b#")),
    ]
    for base in bases:
        assert url_of(base) == here
    assert url_of(zarr.open_group(tmp_path / "a b#", path="g")) == f"{here}/g"
    in_memory: list[Any] = [{}, MemoryStore(), ObjectStore(obstore.store.MemoryStore())]
    for base in [
        *in_memory,
        FsspecStore.from_url("memory://x"),
        ZipStore(tmp_path / "z", mode="w"),
    ]:
        with pytest.raises(SpecError, match="pass url="):
            to_references(base)


def test_arguments_are_checked(store: ShardingStore) -> None:
    filled(store)
    for options, message in (
        ({"to": "parquet"}, "to= is 'kerchunk-json'"),
        ({"to": "kerchunk-parquet"}, "out= is needed"),
        ({"to": "virtualizarr", "out": "x"}, "out= is needed"),
        ({"zarr_format": 4}, "takes zarr_format 2 or 3, got 4"),
        ({"to": "virtualizarr", "zarr_format": 2}, "takes zarr_format 3"),
        ({"group": "../x"}, "refused"),
    ):
        with pytest.raises(SpecError, match=message):
            to_references(store, **options)


def test_kind_of_the_default() -> None:
    """v2, which most readers of kerchunk's references know."""
    base: dict[str, bytes] = {}
    ShardingMapping(base, None).update(ArrayOf(V3, "a", (2,), (1,), (0,), {(1,): b"x"}).objects())
    assert to_references(base, url=URL)["refs"]["a/1"] == [f"{URL}/a/c/1"]
