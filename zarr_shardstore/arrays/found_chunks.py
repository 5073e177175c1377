"""Objects under the chunk keys of a new array: its chunks, its shards, or those of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zarr_shardstore.format.shard import IndexDamageError, index_of_shard, is_empty_index
from zarr_shardstore.metadata.documents import Geometry, Node
from zarr_shardstore.metadata.transformer_list import SHARDING, TransformerSpec, sharding_spec
from zarr_shardstore.shards.requests import (
    Delete,
    Flow,
    Found,
    Get,
    GetSize,
    KeyCursor,
    ListDir,
    ListPage,
)

_N_LOOKS = 64
"""Most objects that are read to find a chunk."""


def find_chunk(
    node: Node, geometry: Geometry, keeps: Callable[[memoryview], bool]
) -> Flow[memoryview | None]:
    """Return an object under a chunk key of a new array, or ``None``.

    Shards without entries are removed, unless the caller `keeps` the first: object stores keep them
    of an array that was erased key by key. A reader of the new array would take them for chunks.
    The removal has no condition, so no writer may have chunks there yet. Cost: usually one listing.
    """
    prefix, encoding, ndim = node.chunk_prefix, geometry.encoding, len(geometry.shape)
    try:
        (names,) = yield [ListDir(prefix)]
        keys = [prefix + name for name in names]
        below = [f"{prefix}{n}/" for n in names if encoding.decode_start(f"{n}/", ndim)]
        if below:
            listings = yield [ListPage(KeyCursor(directory)) for directory in below]
            keys += [key for listing in listings for key in listing]
    except Exception:  # the base store does not list
        return None
    keys = [key for key in keys if encoding.decode(key[len(prefix) :], ndim) is not None]
    found = yield from _read_first(keys)
    if found is None or keeps(found) or not is_empty_index(found):
        return found
    sizes = yield [GetSize(key) for key in keys]
    same = [key for key, nbytes in zip(keys, sizes, strict=True) if nbytes == len(found)]
    values: list[Found] = yield [Get(key) for key in same]
    empty = {key for key, each in zip(same, values, strict=True) if each.value == found}
    yield [Delete(key) for key in empty]
    return (yield from _read_first([key for key in keys if key not in empty]))


def _read_first(keys: Sequence[str]) -> Flow[memoryview | None]:
    found: Found
    for key in keys[:_N_LOOKS]:  # the first may be a directory
        (found,) = yield [Get(key)]
        if found.value is not None:
            return found.value
    return None


def is_shard(value: memoryview, transformers: Sequence[TransformerSpec], ndim: int) -> bool:
    """Whether an object is a shard as declared: its index fits, by checksum or by its entries."""
    if transformers[-1].name != SHARDING:
        return False
    spec = sharding_spec(transformers[-1], ndim)
    try:
        index = index_of_shard(value, spec)
        index.check_entries(len(value), spec)
    except IndexDamageError:
        return False
    nbytes = sum(index.fields[index.present_ids(), 1].tolist())
    return bool(0 < nbytes <= len(value) - spec.index_nbytes)
