"""What a store knows of arrays: learned lazily and once, and never stale within the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from tests.support.bases import BASES, OtherMapping, put
from tests.support.kit import objects_of
from tests.support.pipeline_arrays import THEIRS
from zarr_shardstore import ShardingMapping, ShardingStore


@pytest.fixture(params=BASES, ids=list(BASES))
def base(request: pytest.FixtureRequest) -> Any:
    return BASES[request.param]()


def create(store: Any, name: str = "z", **options: Any) -> Any:
    options = {"shape": (8, 8), "chunks": (1, 1), "dtype": "int16", **options}
    return zarr.create_array(store, name=name, overwrite=True, **options)


class Recording(OtherMapping):
    """Remembers what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __getitem__(self, key: str) -> bytes:
        self.asked.append(key)
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        self.asked.append("list")
        return super().__iter__()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_each_document_is_read_once_and_nothing_is_listed(zarr_format: int) -> None:
    """100 arrays, 300 chunks: 100 documents, and for v2 the question whether v3 is there."""
    base = Recording()
    for n in range(100):
        options: dict[str, Any] = {"shape": (4,), "chunks": (1,), "zarr_format": zarr_format}
        create(ShardingStore(base, chunks_per_shard=2), f"g/a{n}", **options)[:] = 1
    base.asked.clear()
    m = ShardingMapping(base)
    spell = "c/{}" if zarr_format == 3 else "{}"
    keys = [f"g/a{n}/" + spell.format(i) for n in range(100) for i in (0, 1, 3)]
    m.get_partial_values([(k, (0, None)) for k in keys])
    for key in keys:
        m[key]
    documents = [k for k in base.asked if k.endswith(("zarr.json", ".zarray"))]
    assert len(documents) == len(set(documents)) == (100 if zarr_format == 3 else 200)
    assert not [k for k in base.asked if k == "list"]


def redeclare(store: Any) -> None:
    create(store, shape=(8, 8), chunks=(2, 2))[:] = 5


def delete(store: Any) -> None:
    sync(store.delete_dir("z"))


def delete_document(store: Any) -> None:
    sync(store.delete("z/zarr.json"))


def move(store: Any) -> None:
    """As a user would: copy every key in the order of the listing, then erase."""
    m = ShardingMapping(store)
    keys = m.list_prefix("z/")
    for key in sorted(keys, key=lambda k: not k.endswith("zarr.json")):
        m["moved" + key[1:]] = m[key]
    m.erase_prefix("z/")


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("change", [redeclare, delete, move], ids=lambda f: f.__name__)
@pytest.mark.parametrize("cps", [None, 2, 3, 4], ids=str)
def test_what_another_store_of_the_process_does_is_known_at_once(
    base: Any, change: Callable[[Any], None], cps: Any
) -> None:
    """Created with 2 chunks a shard, changed through a second store: the first one follows."""
    first = ShardingStore(base, chunks_per_shard=2)
    second = ShardingStore(base, chunks_per_shard=cps)
    create(first)[:] = 1
    m = ShardingMapping(first)
    assert m["z/c/0/0"]
    change(second)
    expected = ShardingMapping(base)
    assert sorted(m) == sorted(expected)
    assert {k: m[k] for k in m} == {k: expected[k] for k in expected}
    name = "moved" if change is move else "z"
    if change is not delete:
        z = zarr.open_array(first, path=name)
        z[0, 0] = 9
        values: Any = zarr.open_array(ShardingStore(base), path=name)[:]
        assert values[0, 0] == 9
        assert len(np.unique(values)) == 2


def test_an_array_that_was_not_there_when_it_was_asked_for(base: Any) -> None:
    """The answer "no array" is forgotten too, when another store makes one."""
    first, second = ShardingStore(base), ShardingStore(base, chunks_per_shard=4)
    m = ShardingMapping(first)
    assert "z/c/0/0" not in m
    create(second)[:] = 1
    assert len([k for k in m if k.startswith("z/c/")]) == 64
    m["z/c/0/0"] = b"new"
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="z")[1:], 1)


def test_another_process_is_seen_after_refresh(tmp_path: Path) -> None:
    """And a resize of another process without it."""
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    create(store)[:] = 1
    script = """
import sys, zarr
from zarr_shardstore import ShardingStore
store = ShardingStore(sys.argv[1], chunks_per_shard=4)
if sys.argv[2] == "resize":
    z = zarr.open_array(store, path="z")
    z.resize((12, 8))
    z[8:] = 2
else:
    options = dict(shape=(8, 8), chunks=(1, 1), dtype="int16", overwrite=True)
    zarr.create_array(store, name="z", **options)[:] = 3
"""

    def run(what: str) -> None:
        command = [sys.executable, "-c", script, str(tmp_path), what]
        env = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
        subprocess.run(command, check=True, timeout=120, env=env)

    run("resize")
    m = ShardingMapping(store)
    assert m["z/c/11/7"]
    run("redeclare")
    store.refresh()
    z = zarr.open_array(store, path="z")
    np.testing.assert_array_equal(z[:], 3)
    z[0, 0] = 4
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(tmp_path), path="z")[0, 1:], 3)


# ------------------------------------------------------------------ bad documents and shards


def test_one_bad_shard_does_not_block_the_listing_of_the_store(base: Any) -> None:
    """All other keys come first, then the error, which counts the rest."""
    store = ShardingStore(base, chunks_per_shard=2)
    create(store, "a")[:] = 1
    create(store, "b")[:] = 1
    for key in ("a/c/0/0", "a/c/1/1"):
        put(base, key, b"torn")
    m = ShardingMapping(store)
    seen: list[str] = []
    keys = iter(m)
    with pytest.raises(Exception, match="shard 'a/c/0/0'") as info:
        seen += keys
    assert info.value.__notes__[1:] == ["and 1 more shards or keys could not be listed"]
    assert len([k for k in seen if "/c/" in k]) == 64 + 56
    m.erase_prefix("a/")
    assert len(m.list()) == 65 + ("zarr.json" in m)


@pytest.mark.parametrize("document", [b"not json", b'{"zarr_format": 3, "node_type": "array"}'])
def test_a_bad_document_can_be_replaced(base: Any, document: bytes) -> None:
    """It is no array to keep anything of."""
    put(base, "z/zarr.json", document)
    store = ShardingStore(base, chunks_per_shard=2)
    create(store)[:] = 1
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="z")[:], 1)


# ----------------------------------------------------------------------- spelling and copies


SPELLINGS: list[list[Any]] = [
    [{"name": "sharding", "configuration": {"chunks_per_shard": [2, 2]}}],
    [
        {
            "storage_transformer": "https://purl.org/zarr/spec/storage_transformers/sharding/1.0",
            "configuration": {"format": "indexed", "chunks_per_shard": [2, 2]},
        }
    ],
    [
        {
            "extension": "https://purl.org/zarr/spec/storage_transformers/sharding/1.0",
            "type": "indexed",
            "configuration": {"chunks_per_shard": [2, 2]},
        }
    ],
    [{"name": "sharding", "configuration": {"chunks_per_shard": [2, 2]}, "must_understand": True}],
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: "/".join(s[0]))
def test_an_update_keeps_the_stored_spelling(base: Any, spelling: list[Any]) -> None:
    """Of the list, which the next reader may know in this spelling only."""
    create(ShardingStore(base))
    document = json.loads(objects_of(base)["z/zarr.json"])
    document["storage_transformers"] = spelling
    put(base, "z/zarr.json", json.dumps(document).encode())
    z = zarr.open_array(ShardingStore(base, chunks_per_shard=4), path="z")
    z[:] = 1
    z.attrs["a"] = 1
    z.resize((9, 9))
    stored = json.loads(objects_of(base)["z/zarr.json"])
    assert stored["storage_transformers"] == spelling
    assert stored["shape"] == [9, 9]


def test_an_update_keeps_the_stored_codec(base: Any) -> None:
    """Members that the codec spells out, or leaves out, stay as the other writer left them."""
    create(ShardingStore(base, chunks_per_shard=2))
    document = json.loads(objects_of(base)["z/zarr.json"])
    del document["codecs"][0]["configuration"]["index_location"]
    document["codecs"][0]["must_understand"] = True
    put(base, "z/zarr.json", json.dumps(document).encode())
    zarr.open_array(ShardingStore(base), path="z").attrs["a"] = 1
    stored = json.loads(objects_of(base)["z/zarr.json"])
    assert stored["codecs"][0]["must_understand"] is True
    assert "index_location" not in stored["codecs"][0]["configuration"]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_copy_in_the_order_of_the_keys_loses_nothing(base: Any, zarr_format: int) -> None:
    """Chunks that come before their metadata are objects of their own, and stay so."""
    source = MemoryStore()
    create(source, zarr_format=zarr_format)[:] = 1
    target = ShardingMapping(base, chunks_per_shard=2)
    objects = objects_of(source)
    order = sorted(objects, key=lambda k: k in ("z/zarr.json", "z/.zarray"))
    for key in order[:-1]:
        target[key] = objects[key]
    with pytest.warns(UserWarning, match="stays unsharded; .* write its metadata before"):
        target[order[-1]] = objects[order[-1]]
    assert dict(target) == objects
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="z")[:], 1)


@pytest.mark.parametrize(
    "kind", [(3, "default", "."), (3, "v2", "/"), (3, "v2", "."), (2, "v2", "/")]
)
@pytest.mark.parametrize("ndim", [1, 2])
def test_groups_that_are_named_as_chunks_are_no_chunks(
    base: Any, kind: tuple[int, str, str], ndim: int
) -> None:
    """A root array beside groups 0, 1 and c: it is sharded without a warning."""
    zarr_format, style, separator = kind
    put(base, "0/1x/notes", b"")
    put(base, "1/zarr.json", b"{}")
    put(base, "c/0x/notes", b"")
    z = zarr.create_array(
        ShardingStore(base, chunks_per_shard=2),
        shape=(4,) * ndim,
        chunks=(1,) * ndim,
        dtype="i1",
        zarr_format=zarr_format,  # type: ignore[arg-type]
        chunk_key_encoding={"name": style, "separator": separator},
    )
    if isinstance(base, LocalStore | FsspecStore) and ndim == 1 and style == "v2":
        return  # its shards would have the names of those directories
    z[...] = 1
    assert len(ShardingMapping(base).list()) > len(objects_of(base))


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("option", [{"z": 2}, {"z": (2, 2)}])
@pytest.mark.parametrize("style", ["default", "v2"])
def test_chunks_of_a_named_array_before_its_metadata(base: Any, option: Any, style: str) -> None:
    """The option alone makes shards of them; the metadata that follows describes these."""
    source = MemoryStore()
    encoding: Any = {"name": style, "separator": "/"}
    create(source, chunk_key_encoding=encoding)[:] = 1
    target = ShardingMapping(base, chunks_per_shard=option)
    objects = objects_of(source)
    for key in sorted(objects, key=lambda k: k.endswith("json")):
        target[key] = objects[key]
    assert dict(target) == objects
    assert len([k for k in objects_of(base) if "json" not in k]) == 16
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="z")[:], 1)


# ------------------------------------------------------------------------- both Zarr formats


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("sharded", [True, False])
def test_metadata_of_the_other_format_describes_the_same_shards(
    base: Any, old: int, new: int, sharded: bool
) -> None:
    """As zarr's own migration does it: a second document beside the first, then one of them."""
    encoding: Any = {"name": "v2", "separator": "."}
    first = ShardingStore(base, chunks_per_shard=2 if sharded else None)
    options = {"chunk_key_encoding": encoding, "compressors": None}
    create(first, zarr_format=old, **options)[:] = 1
    n_objects = len(objects_of(base))
    store = ShardingStore(base, chunks_per_shard=None if sharded else 4)
    template = MemoryStore()
    create(template, zarr_format=new, **options)
    m = ShardingMapping(store)
    for key, value in objects_of(template).items():
        if key.startswith("z/"):
            m[key] = value
    assert len(objects_of(base)) <= n_objects + 2
    documents = {3: "z/zarr.json", 2: "z/.zarray"}
    for gone in (None, documents[old]):
        if gone is not None:
            del m[gone]
        z: Any = zarr.open_array(ShardingStore(base), path="z", zarr_format=new)  # type: ignore[arg-type]
        np.testing.assert_array_equal(z[:], 1)
        z[0, 0] = 1


# ---------------------------------------------------------------------------- native arrays


def test_native_passthrough_shows_native_arrays_as_they_are(base: Any) -> None:
    """Read, written, updated by zarr's own codec; new arrays are declared by the transformer."""
    raw = ShardingStore(base, native="passthrough")
    native = create(raw, "native", chunks=(2, 2), shards=(4, 4))
    native[:] = 1
    before = {k: v for k, v in objects_of(base).items() if k.startswith("native/c")}
    store = ShardingStore(base, chunks_per_shard=2, native="passthrough")
    z = zarr.open_array(store, path="native")
    assert (z.chunks, z.shards) == ((2, 2), (4, 4))
    m = ShardingMapping(store)
    assert {k: m[k] for k in m if k.startswith("native/c")} == before
    z[0, 0] = 2
    z.attrs["a"] = 1
    again = zarr.open_array(ShardingStore(base, native="passthrough"), path="native")
    assert (again[0, 0], again.shards, again.attrs["a"]) == (2, (4, 4), 1)
    mine = create(store, "mine")
    mine[:] = 3
    document = json.loads(objects_of(base)["mine/zarr.json"])
    assert document["storage_transformers"][0]["name"] == "sharding"
    other = create(store, "other", chunks=(2, 2), shards=(4, 4))
    other[:] = 4
    assert zarr.open_array(store, path="other").shards == (4, 4)


def test_native_flat_is_the_default(base: Any) -> None:
    """The inner chunks are the chunks."""
    raw = ShardingStore(base, native="passthrough")
    create(raw, chunks=(2, 2), shards=(4, 4))[:] = 1
    z = zarr.open_array(ShardingStore(base), path="z")
    assert (z.chunks, z.shards) == ((2, 2), None)
    z[0, 0] = 2
    native = zarr.open_array(ShardingStore(base, native="passthrough"), path="z")
    assert (native[0, 0], native.shards) == (2, (4, 4))


@pytest.mark.parametrize("cps", [None, 2])
def test_shards_of_another_pipeline_are_left_to_it(base: Any, cps: Any) -> None:
    """``shards=`` is taken at its word; whoever opens the array leaves its sharding to zarr."""
    with zarr.config.set({"codec_pipeline.path": THEIRS}):
        z = create(ShardingStore(base, chunks_per_shard=cps), chunks=(2, 2), shards=(4, 4))
    z[:] = 1
    z.attrs["a"] = 1
    z.resize((9, 9))
    for store in (ShardingStore(base), ShardingStore(base, chunks_per_shard=2)):
        again = zarr.open_array(store, path="z")
        assert (again.chunks, again.shards) == ((2, 2), (4, 4))
        again[0, 0] = 7
        again.attrs["b"] = 2
    assert (z[0, 0], z[7, 7], z[8, 8]) == (7, 1, 0)
    assert "zarr_shardstore" in json.loads(objects_of(base)["z/zarr.json"])


def test_an_unsharded_array_may_be_made_by_a_store_that_cannot_list(tmp_path: Path) -> None:
    """Whether chunks are there already cannot be asked then."""

    class NoListing(LocalStore):
        supports_listing = False

        def list_prefix(self, prefix: str) -> Any:
            raise NotImplementedError

        def list_dir(self, prefix: str) -> Any:
            raise NotImplementedError

    store = ShardingStore(NoListing(tmp_path), chunks_per_shard=2)
    z = zarr.create_array(store, name="z", shape=(4,), chunks=(1,), dtype="i1")
    z[:] = 1
    assert zarr.open_array(str(tmp_path / "z"), mode="r").shards == (2,)
