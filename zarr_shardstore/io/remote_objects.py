"""What clients of object stores can do and zarr's ``Store`` cannot say: streams, moves, bulk.

Each function has a way for obstore and for fsspec, and one for any other store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, ObjectStore

from zarr_shardstore.io.uploads import PART_NBYTES, StreamUpload, Upload

__all__ = ["delete_many", "move", "upload_to"]

_PARTS_AT_ONCE = 2
"""Parts of one upload under way: more hide no more latency behind one reader of chunks."""

_BULK = 1000
"""Keys in one request that deletes many (S3)."""


def upload_to(store: Store, key: str) -> Upload | None:
    """A stream to an object; ``None`` if the store takes whole objects only."""
    if type(store) is ObjectStore:
        import obstore

        writer: Any = obstore.open_writer(
            store.store, key, buffer_size=PART_NBYTES, max_concurrency=_PARTS_AT_ONCE
        )
        # It aborts when it leaves its block by an exception, and only then.
        return StreamUpload(writer, lambda: writer.__exit__(RuntimeError, RuntimeError(), None))
    if type(store) is FsspecStore:
        fs, path = _blocking_fs(store), f"{store.path}/{key}"
        with suppress(Exception):  # object stores have no directories
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        stream: Any = fs.open(path, "wb", block_size=PART_NBYTES)
        return StreamUpload(stream, getattr(stream, "discard", stream.close))
    return None


async def move(store: Store, key: str, to: str) -> None:
    """Give an object another key; no error if there is none."""
    try:
        if type(store) is ObjectStore:
            import obstore

            await obstore.rename_async(store.store, key, to)
        elif type(store) is FsspecStore:
            source, target = f"{store.path}/{key}", f"{store.path}/{to}"
            with suppress(NotImplementedError, AttributeError):
                await store.fs._makedirs(target.rpartition("/")[0], exist_ok=True)
            await store.fs._cp_file(source, target)
            await store.fs._rm_file(source)
        else:
            value = await store.get(key, default_buffer_prototype())
            if value is not None:
                await store.set(to, value)
                await store.delete(key)
    except FileNotFoundError:
        return


async def delete_many(store: Store, keys: Sequence[str], n_at_once: int) -> None:
    """Remove objects; no error where there is none."""
    if type(store) is ObjectStore:
        import obstore

        try:
            for i in range(0, len(keys), _BULK):
                await obstore.delete_async(store.store, list(keys[i : i + _BULK]))
            return
        except FileNotFoundError:
            pass  # on local files the first that is missing ends it: one by one, then
    slots = asyncio.Semaphore(n_at_once)

    async def delete(key: str) -> None:
        async with slots:
            await store.delete(key)

    async with asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(delete(key))


def _blocking_fs(store: FsspecStore) -> Any:
    """The file system of a store for use by a thread."""
    fs: Any = store.fs
    blocking = getattr(fs, "sync_fs", None)
    if blocking is not None:
        return blocking
    return type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": False})
