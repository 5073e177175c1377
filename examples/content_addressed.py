"""A storage transformer above sharding that stores equal chunks once: by the digest of their bytes.

A shard then has digests instead of chunks, 32 bytes each. The bytes are objects of their own, under
keys that are no chunk keys: sharding passes such keys on.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import zarr

from zarr_shardstore import ShardingStore
from zarr_shardstore import transformers as t


class ContentAddressed(t.StorageTransformer):
    """Bytes are stored before the digest that names them: a reader finds what it reads of. Bytes
    that no digest names any more stay; a collector may remove them while nothing writes."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}by-digest/"

    def perform(self, requests: Sequence[t.Request]) -> t.Flow[list[Any]]:
        replies: list[Any] = []
        for request in requests:
            replies += [(yield from self._perform_one(request))]
        return replies

    def _perform_one(self, request: t.Request) -> t.Flow[Any]:
        match request:
            case t.Get(key, byte_range):
                digest = yield from self._digest(key)
                return (yield from self._read(digest, byte_range))
            case t.GetSize(key):
                digest = yield from self._digest(key)
                return None if digest is None else (yield [t.GetSize(self._key(digest))])[0]
            case t.Set(_, value) | t.SetIfNotExists(_, value):
                request = request._replace(value=(yield from self._store(value)))
            case t.SetPartial(key, pieces):
                return (yield from self._change(key, lambda old: t.apply_pieces(key, old, pieces)))
            case t.Modify(key, change):
                return (yield from self._change(key, change))
        return (yield [request])[0]  # also `Exists` and `Delete`, of the digest

    def _key(self, digest: bytes) -> str:
        return self._prefix + digest.hex()

    def _digest(self, key: str) -> t.Flow[bytes | None]:
        (found,) = yield [t.Get(key)]
        return None if found.value is None else bytes(found.value)

    def _read(self, digest: bytes | None, byte_range: Any = None) -> t.Flow[t.Found]:
        if digest is None:
            return t.Found(None, None)
        found: t.Found = (yield [t.Get(self._key(digest), byte_range)])[0]
        return found

    def _store(self, value: Any) -> t.Flow[bytes]:
        digest = sha256(value).digest()
        yield [t.SetIfNotExists(self._key(digest), value)]
        return digest

    def _change(self, key: str, change: Any) -> t.Flow[None]:
        """Compare and swap: again, if another writer has put another digest there."""
        is_done = False
        while not is_done:
            seen = yield from self._digest(key)
            new = change((yield from self._read(seen)).value)
            digest = None if new is None else (yield from self._store(new))

            def swap(stored: Any, seen: Any = seen, digest: Any = digest) -> Any:
                nonlocal is_done
                is_done = (None if stored is None else bytes(stored)) == seen
                return digest if is_done else stored

            yield [t.Modify(key, swap)]


if __name__ == "__main__":
    name = "https://example.org/content-addressed"
    t.register_storage_transformer(name, lambda _, array: ContentAddressed(array.prefix))
    base: dict[str, bytes] = {}
    store = ShardingStore(base, chunks_per_shard=(4, 4), storage_transformers=[name, "sharding"])
    z = zarr.create_array(store, name="labels", shape=(256, 256), chunks=(16, 16), dtype="u4")
    z[:] = 7  # a label image: most of its chunks are equal
    z[100:110, 50:90] = 8
    z[100:110, 50:90] = 7  # and again
    z[3, 3] = 9
    assert zarr.open_array(store, path="labels")[3, 3] == 9
    assert np.count_nonzero(z[:] != 7) == 1
    n_values = sum("/by-digest/" in key for key in base)
    shards = [key for key in base if "/c/" in key]
    print(f"{z.nchunks_initialized} chunks in {len(shards)} shards have {n_values} values")
