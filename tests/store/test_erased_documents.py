"""Documents that are erased, put back or made anew while the chunks of their arrays are there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
from zarr.codecs import Crc32cCodec
from zarr.storage import ObjectStore

from zarr_shardstore import ShardingMapping, ShardingStore, ShardStoreError

CHECKED = {"storage_transformers": ["crc32c", "sharding"]}
BELOW = {"storage_transformers": ["sharding", "crc32c"]}
pytestmark = pytest.mark.filterwarnings("ignore:.*stays unsharded")


def new(kind: str, path: Path) -> Any:
    if kind == "obstore":
        return ObjectStore(obstore.store.MemoryStore())
    return {} if kind == "dict" else path


def create(store: Any, **options: Any) -> Any:
    options = {"shape": (8, 8), "chunks": (1, 1), "dtype": "i4", "compressors": None, **options}
    return zarr.create_array(store, name="a", **options)


@pytest.mark.parametrize("kind", ["dict", "local", "obstore"])
@pytest.mark.parametrize("options", [{}, CHECKED, BELOW])
@pytest.mark.parametrize("is_in_batch", [False, True])
def test_an_array_that_is_erased_key_by_key_is_gone(
    kind: str, options: Any, is_in_batch: bool, tmp_path: Path
) -> None:
    """Its document first, as `fs.rm` of some programs does: a new array has fill values."""
    store = ShardingStore(new(kind, tmp_path), chunks_per_shard=(2, 2), **options)
    create(store)[:] = 7
    mapping = ShardingMapping(store)
    keys = sorted([key for key in mapping if key.startswith("a/")], reverse=True)
    assert keys[0] == "a/zarr.json"
    with store.batch() if is_in_batch else contextlib.nullcontext():
        for key in keys:
            del mapping[key]
    if kind != "obstore":  # which keeps shards without entries
        assert not [key for key in mapping if key.startswith("a/")]
    assert not create(store)[:].any()


@pytest.mark.parametrize("kind", ["dict", "local", "obstore"])
@pytest.mark.parametrize(
    "options",
    [
        {"chunks_per_shard": (2, 2)},
        {"chunks_per_shard": (2, 2), **CHECKED},
        {"chunks_per_shard": (2, 2), **BELOW},
        {"chunks_per_shard": {"a": (2, 2)}},
        {"chunks_per_shard": "auto"},
    ],
)
def test_a_document_that_is_put_back(kind: str, options: Any, tmp_path: Path) -> None:
    """The array has all chunks, but the one that was erased meanwhile."""
    store = ShardingStore(new(kind, tmp_path), **options)
    z = create(store)
    z[:] = 7
    z.append(np.full((8, 8), 7))  # "auto" may choose other shards now
    mapping = ShardingMapping(store)
    document = mapping.pop("a/zarr.json")
    del mapping["a/c/0/1"]
    mapping["a/zarr.json"] = document
    for each in (store, ShardingStore(store.base)):
        found: Any = zarr.open_array(each, path="a", mode="r")[:]
        assert found[0, 1] == 0
        assert np.count_nonzero(found != 7) == 1


@pytest.mark.parametrize("others", [None, False, {"b": 2}, (4, 4), {"a": (4, 4)}])
def test_a_document_is_put_back_through_any_store(others: Any, tmp_path: Path) -> None:
    """Its option is for new arrays; False: it has the default."""
    z = create(ShardingStore(tmp_path, chunks_per_shard=(2, 2)))
    z[:] = 7
    options = {} if others is False else {"chunks_per_shard": others}
    mapping = ShardingMapping(tmp_path, **options)
    mapping["a/zarr.json"] = mapping.pop("a/zarr.json")
    found: Any = zarr.open_array(ShardingStore(tmp_path), path="a", mode="r")[:]
    assert (found == 7).all()


@pytest.mark.parametrize("chunks_per_shard", [(2, 2), {"a": (2, 2)}])
@pytest.mark.parametrize("options", [{}, BELOW])
@pytest.mark.parametrize("is_in_batch", [False, True])
def test_what_is_written_without_the_document_is_read(
    chunks_per_shard: Any, options: Any, is_in_batch: bool, tmp_path: Path
) -> None:
    """Where a rule names the array, chunks go into its shards, and are there when it comes back."""
    mapping = ShardingMapping(tmp_path, chunks_per_shard=chunks_per_shard, **options)
    store = ShardingStore(mapping)
    create(store)[:] = 7
    value = np.int32(8).tobytes()
    with store.batch() if is_in_batch else contextlib.nullcontext():
        document = mapping.pop("a/zarr.json")
        assert mapping["a/c/0/1"]
        mapping["a/c/0/1"] = value
        assert mapping["a/c/0/1"] == value
    assert mapping["a/c/0/1"] == value
    if isinstance(chunks_per_shard, dict):
        mapping["a/zarr.json"] = document
        found: Any = zarr.open_array(ShardingStore(tmp_path), path="a", mode="r")[:]
        assert found[0, 1] == 8
        assert np.count_nonzero(found == 7) == 63


@pytest.mark.parametrize("kind", ["dict", "local", "obstore"])
def test_an_array_is_erased_and_copied_again_in_the_order_of_keys(
    kind: str, tmp_path: Path
) -> None:
    """Its chunks come before its document, for a rule of its path makes shards of them."""
    source: dict[str, Any] = {}
    create(ShardingStore(source, chunks_per_shard=None))[:] = 7
    mapping = ShardingMapping(new(kind, tmp_path), chunks_per_shard={"a": (2, 2)})
    store = ShardingStore(mapping)
    create(store)[:] = 8
    for key in sorted(key for key in mapping if key.startswith("a/")):
        del mapping[key]
    for key in sorted(source):
        mapping[key] = source[key]
    for each in (store, ShardingStore(store.base)):
        found: Any = zarr.open_array(each, path="a", mode="r")[:]
        assert (found == 7).all()


@pytest.mark.parametrize("is_put_back", [False, True])
def test_chunks_like_empty_shards_stay(is_put_back: bool, tmp_path: Path) -> None:
    """A chunk of ones with a checksum has the bytes of an index without entries."""
    source = tmp_path if is_put_back else tmp_path / "source"
    z = create(source, shape=(32,), chunks=(8,), dtype="u2", compressors=Crc32cCodec())
    z[:] = np.arange(32)
    z[:8] = z[24:] = 65535
    mapping = ShardingMapping(tmp_path, chunks_per_shard=(2,))
    if is_put_back:
        mapping["a/zarr.json"] = mapping.pop("a/zarr.json")
    else:
        plain = ShardingMapping(source, chunks_per_shard=None)
        for key in sorted(plain):
            mapping[key] = plain[key]
    np.testing.assert_array_equal(zarr.open_array(tmp_path, path="a", mode="r")[:], z[:])


@pytest.mark.parametrize("prefix", ["a/", "a"])
def test_a_whole_array_is_erased_beyond_its_edge(prefix: str, tmp_path: Path) -> None:
    mapping = ShardingMapping(tmp_path, chunks_per_shard=(4, 4))
    store = ShardingStore(mapping)
    create(store)[:] = 7
    document = json.loads(mapping["a/zarr.json"])
    mapping["a/zarr.json"] = json.dumps({**document, "shape": [2, 8]}).encode()
    mapping.erase_prefix(prefix)
    assert not create(store)[:].any()


@pytest.mark.parametrize("data", [b"{", None])
def test_one_bad_document_hides_no_other_array(data: bytes | None, tmp_path: Path) -> None:
    """Also of a store that has listed them before."""
    mapping = ShardingMapping(tmp_path, chunks_per_shard=(2, 2))
    store = ShardingStore(mapping)
    for name in "abc":
        options: Any = {"shape": (8, 8), "chunks": (1, 1), "dtype": "i4"}
        zarr.create_array(store, name=name, **options)[:] = 7
    assert len(list(mapping)) == 3 * 65 + 1
    path = tmp_path / "a/zarr.json"
    text = path.read_bytes() if data is None else data
    path.unlink()
    path.write_bytes(text.replace(b'"shape": [\n', b'"chunks": [\n') if data is None else text)
    found: list[str] = []
    with contextlib.suppress(ShardStoreError):
        found.extend(iter(mapping))
    assert len([key for key in found if key[0] in "bc"]) == 2 * 65
