"""Backend for any zarr ``Store`` that is not local files: memory, archives, wrappers, others.

A client may lack suffix ranges, all ranges, or one kind of listing, or raise for a range after the
end of an object. The backend tries, then takes another way, or says what is lacking: see
decisions/0028-base-stores.md.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import TypeVar

from zarr_shardstore.format.ranges import ByteRange, Range, Suffix, resolve_range
from zarr_shardstore.io.backends import store_traits
from zarr_shardstore.io.backends.store import Listed, StoreBackend, is_longer, part_of
from zarr_shardstore.io.backends.store_traits import remedy_of
from zarr_shardstore.io.local.files import is_hidden
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import Found

T = TypeVar("T")

_N_ATTEMPTS_OF_RANGE = 10  # attempts to read a range of an object that is replaced repeatedly


class ZarrBackend(StoreBackend):
    """Reads and writes through a zarr store, in another way where it lacks a method."""

    async def exists(self, request: requests.Exists) -> bool:
        if "exists" not in self.lacks:
            try:
                return await _unless_missing(super().exists(request), False)
            except NotImplementedError:
                self.lacks.add("exists")
        return await self._size(request.key) is not None

    async def delete(self, request: requests.Delete) -> None:
        try:
            await super().delete(request)
        except NotImplementedError:
            if request.placeholder is None:
                raise
            await self.set(requests.Set(request.key, request.placeholder()))

    async def delete_prefix(self, request: requests.DeletePrefix) -> None:
        by_key = await self._deletes_by_key(request.prefix)
        if not by_key and request.prefix:
            with suppress(NotImplementedError):
                await super().delete_prefix(request)
                return
        elif not by_key:
            await super().delete_prefix(request)
        # FsspecStore.clear stops at the first directory that it has removed already.
        for key in [key async for key, _ in self._listed(request.prefix)]:
            if not self._is_linked(key):
                await self.store.delete(key)

    async def _deletes_by_key(self, prefix: str) -> bool:  # noqa: ARG002
        return store_traits.deletes_only_by_key(self.store)

    def _is_linked(self, key: str) -> bool:  # noqa: ARG002
        """Whether a key is reached through a link below the root."""
        return False

    async def _get(self, key: str, byte_range: ByteRange | None) -> Found:
        """Read an object, or a range of it, whatever the client cannot do."""
        if byte_range is not None and "ranges" in self.lacks:
            return part_of(await self._get(key, None), byte_range)
        if isinstance(byte_range, Suffix) and "suffixes" in self.lacks:
            return await self._get_within(key, byte_range)
        try:
            found = await self._get_once(key, byte_range)
        except Exception as error:
            # No suffix ranges here (Azure), or an error for a range after the end (obstore).
            if byte_range is not None:
                if isinstance(byte_range, Suffix) and remedy_of(error) == "another way":
                    self.lacks.add("suffixes")
                return await self._get_within(key, byte_range)
            if remedy_of(error) == "missing" or (
                isinstance(error, LookupError) and await self._size(key) is None
            ):  # the latter is fsspec's, for a key that is not in an archive
                return Found(None, None)
            raise
        if is_longer(found, byte_range) and len(found.value or b"") == await self._size(key):
            return part_of(found, byte_range)  # web servers may send the whole object
        return found

    async def _get_within(self, key: str, byte_range: ByteRange) -> Found:
        """Read the size, then a range within it; again, if another writer has replaced the object
        by one of another size."""
        size_at_failure: int | None = None
        for n_left in reversed(range(_N_ATTEMPTS_OF_RANGE)):
            size = await self._size(key)
            if size is None:
                return Found(None, None)
            start, stop = resolve_range(byte_range, size)
            if start >= stop:
                return Found(memoryview(b""), None, size)
            try:
                found = await self._get_once(key, Range(start, stop))
            except Exception as error:
                if remedy_of(error) == "another way":
                    self.lacks.add("ranges")
                    return part_of(await self._get(key, None), byte_range)
                if not n_left or size == size_at_failure:  # no writer has replaced it: it fails
                    raise
                size_at_failure = size
                continue
            if found.size in (None, size) and found.value is not None:
                if len(found.value) == size:
                    found = part_of(found, Range(start, stop))
                if found.value is not None and len(found.value) == stop - start:
                    return found._replace(size=size)
        # The last reply is of an object of another size: its bytes may be of another range.
        return found if found.value is None else found._replace(value=memoryview(b""))

    async def _size(self, key: str) -> int | None:
        size = await _unless_missing(super()._size(key), None)
        # icechunk returns 0 for a missing chunk, and fsspec for a directory.
        return None if size == 0 and (await self._get_once(key, None)).value is None else size

    async def _names(self, prefix: str) -> list[str]:
        try:
            found = await super()._names(prefix)
            if prefix and not found and self._lacks_prefixes():
                # VirtualiZarr's has no names in a directory below one that it does not list.
                await self._names(prefix[: prefix.rstrip("/").rfind("/") + 1])
            return found
        except NotImplementedError:
            if self._lacks_prefixes():
                raise
        keys = [key async for key, _ in self._listed(prefix, walks=False) if not is_hidden(key)]
        return list(dict.fromkeys(key[len(prefix) :].split("/", 1)[0] for key in keys))

    def _lacks_prefixes(self) -> bool:
        """Whether the store lists directories only. It is asked for a listing, and for no key."""
        try:
            self.store.list_prefix("")
        except NotImplementedError:
            self.lacks.add("list_prefix")
        return "list_prefix" in self.lacks

    async def _walked(self, directory: str) -> AsyncGenerator[str, None]:
        """List keys by one listing for each name, which may be a key, a directory, or both."""
        for name in await self._names(directory):
            n_below = 0
            async for key in self._walked(f"{directory}{name}/"):
                n_below += 1
                yield key
            if not n_below or await self._is_key(directory + name):
                yield directory + name

    async def _is_key(self, path: str) -> bool:
        try:
            return await self._size(path) is not None
        except (ValueError, TypeError, NotImplementedError):  # no key can be called so
            return False

    async def _listed(self, prefix: str, *, walks: bool = True) -> Listed:
        directory: str | None = prefix
        while directory is not None and "list_prefix" not in self.lacks:
            try:
                async with aclosing(super()._listed(directory)) as listed:
                    async for key, version in listed:
                        if key.startswith(prefix):
                            yield key, version
                return
            except NotImplementedError:
                self.lacks.add("list_prefix")
            except Exception as error:
                if not directory or remedy_of(error) != "missing":
                    raise
            # icechunk lists groups and arrays only: the directory above also has these keys.
            directory = "/".join(directory.rstrip("/").split("/")[:-1])
        if not walks:
            raise NotImplementedError("it lists neither directories nor prefixes")
        async for key in self._walked(prefix[: prefix.rfind("/") + 1]):
            if key.startswith(prefix):
                yield key, None


async def _unless_missing(reply: Awaitable[T], default: T) -> T:
    try:
        return await reply
    except Exception as error:
        if remedy_of(error) != "missing":
            raise
        return default
