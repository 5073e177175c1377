"""fsspec file system ``shard``: the chunks of a sharded store as files.

It is chained like ``zip::``, before the URL of the store::

    shard::s3://bucket/v.zarr                     the stored documents declare the sharding
    shard://?chunks_per_shard=4,4::file:///new    options for new arrays
    shard://?view=shards::file:///v.zarr          arrays with the shape of their shards
    shard://path/in/the/store::file:///v.zarr     a group, an array or a chunk

`ShardedCodecPipeline` takes its store, so zarr reads and writes an array at such a URL as in a
`ShardingStore`. `ShardAdapter` is the same for zarr's own URLs, ``s3://bucket/v.zarr|shard:``.

Source: fsspec, ``AsyncFileSystem`` and "URL chaining"; zarr-python, pull request 4192, "URL
pipelines".
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.core import has_magic
from fsspec.spec import AbstractBufferedFile
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from zarr_shardstore.access import (
    ShardingMapping,
    ShardingStore,
    chunk_keys,
    gather_bounded,
    metadata,
    resolve,
    zarrs_loop,
)
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.interop.urls.moves import moves_of, names_of

_OF_FSSPEC = {"asynchronous", "batch_size", "listings_expiry_time", "max_paths"}
_OF_FSSPEC |= {"skip_instance_cache", "use_listings_cache"}
_OF_STORE = signature(ShardingStore).parameters.keys() - {"store", "storage_options"}

_QUERY = re.compile(r"\?(?=\w+=)")
"""Begin of the options in a URL. Any other question mark is a wildcard of fsspec."""

_N_SIZES_AT_ONCE = 64

_REMOVED_AT_ONCE = 256


class _WorkingDirectory:
    """Attribute of a class: the working directory, if there is one."""

    def __get__(self, *_: object) -> str | None:
        with suppress(FileNotFoundError):
            return os.getcwd()
        return None


class ShardFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """The keys of a `ShardingStore` as files. A directory exists as long as a file below it.

    Parameters
    ----------
    fo
        Path or URL of the store. fsspec takes it from a chained URL, with the next two.
    target_protocol
        Protocol of the store, if `fo` is a path.
    target_options
        Options of obstore or fsspec for the store. In a chain they are below the name of its
        protocol: ``storage_options={"s3": {"anon": True}}``.
    **options
        Options of `ShardingStore`, and of fsspec. An unknown one raises `SpecError`.

    Notes
    -----
    Thread safety: as `ShardingStore`; may be used after a fork.

    Examples
    --------
    >>> import fsspec, zarr
    >>> url = "shard://?chunks_per_shard=2,2::memory://filesystem-example"
    >>> z = zarr.create_array(url, name="z", shape=(4, 4), chunks=(1, 1), dtype="u1")
    >>> z[:] = 7
    >>> fs, _ = fsspec.url_to_fs("shard::memory://filesystem-example")
    >>> fs.cat_file("z/c/3/3")  # doctest: +SKIP
    """

    protocol = "shard"
    root_marker = ""
    _directory = _WorkingDirectory()
    _extra_tokenize_attributes = ("_directory",)  # a cached instance may have a relative path

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{name: options.pop(name) for name in _OF_FSSPEC if name in options})
        self.sharding_store = _open(fo, target_protocol, target_options or {}, options)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """zarr's event loop, because a client works in one loop. After a fork there is another."""
        return zarrs_loop()

    # -------------------------------------------------------------------- paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = fsspec.utils.stringify_path(path)
        if text.startswith("shard://"):
            chain = text.removeprefix("shard://").partition("::")  # some callers pass all of it
            text = _QUERY.split(chain[0], maxsplit=1)[0]
        return text.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        _, *query = _QUERY.split(path, maxsplit=1)
        return _options_of("".join(query)) if path.startswith("shard://") else {}

    # -------------------------------------------------------------------- reads

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        (value,) = await self._cat_ranges([path], [start], [end], on_error="raise")
        assert isinstance(value, bytes)
        return value

    async def _cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,  # noqa: ARG002
        batch_size: int | None = None,  # noqa: ARG002
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Read ranges of files, in at most two rounds. The store merges ranges by its own gap."""
        keys, n = self._strip_protocol(list(paths)), len(paths)
        starts = list(starts) if isinstance(starts, Iterable) else [starts] * n
        ends = list(ends) if isinstance(ends, Iterable) else [ends] * n
        bounds = zip(keys, starts, ends, strict=True)
        ranges = [(key, await self._range(key, start, end)) for key, start, end in bounds]
        prototype = default_buffer_prototype()
        found = await self.sharding_store.get_partial_values(prototype, ranges)
        values: list[Any] = []
        for key, value in zip(keys, found, strict=True):
            if value is not None:
                values.append(value.to_bytes())
            elif on_error == "raise":
                raise FileNotFoundError(key)
            elif on_error != "omit":
                values.append(FileNotFoundError(key))
        return values

    async def _range(self, key: str, start: int | None, end: int | None) -> ByteRequest | None:
        if end is None:
            if start is None:
                return None
            return OffsetByteRequest(start) if start >= 0 else SuffixByteRequest(-start)
        first = start or 0
        if first < 0 or end < 0:
            try:
                nbytes = await self.sharding_store.getsize(key)
            except FileNotFoundError:
                return None  # nor is anything read
            first, end, _ = slice(first, end).indices(nbytes)
        return RangeByteRequest(first, max(first, end))

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        if not key:
            return _entry(key)
        with suppress(FileNotFoundError, SpecError):
            return _entry(key, await self.sharding_store.getsize(key))
        async for _name in self.sharding_store.list_dir(key):
            return _entry(key)
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        key = self._strip_protocol(path)
        names = sorted({name async for name in self.sharding_store.list_dir(key)})
        keys = [f"{key}/{name}".lstrip("/") for name in names]
        if key and not keys:
            keys = [(await self._info(path))["name"]]
        root = "/" if path.startswith("/") else ""  # zarr strips the path as it was given
        paths = [root + key for key in keys]
        return list(map(_entry, paths, await self._nbytes_of(keys))) if detail else paths

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any
    ) -> Any:
        if maxdepth is not None or withdirs:
            return await super()._find(path, maxdepth=maxdepth, withdirs=withdirs, **options)
        key, store = self._strip_protocol(path), self.sharding_store
        keys = sorted([each async for each in store.list_prefix(f"{key}/" if key else "")])
        if not keys and key and await store.exists(key):
            keys = [key]
        if not options.get("detail"):
            return keys
        sizes = zip(keys, await self._nbytes_of(keys), strict=True)
        return {key: _entry(key, size) for key, size in sizes if size is not None}

    async def _nbytes_of(self, keys: list[str]) -> list[int | None]:
        """Return the sizes of values, of chunks in one round; ``None`` for a missing key."""
        store, sizes = self.sharding_store, dict[str, int | None]()
        chunks = [key for key in keys if not metadata.is_document(key)]
        with suppress(UnsupportedError):  # some transformers change the stored bytes
            places = await asyncio.to_thread(ShardingMapping(store).locate, chunks)
            sizes = {k: place and place[2] for k, place in zip(chunks, places, strict=True)}

        async def ask(key: str) -> None:
            with suppress(FileNotFoundError, SpecError):
                sizes[key] = await store.getsize(key)

        left = [ask(key) for key in keys if key not in sizes]
        await gather_bounded(left, _N_SIZES_AT_ONCE)
        return [sizes.get(key) for key in keys]

    async def _du(
        self, path: str, total: bool = True, maxdepth: int | None = None, **_: Any
    ) -> Any:
        found = await self._find(path, maxdepth=maxdepth, detail=True)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    async def _get(self, rpath: Any, lpath: Any, *args: Any, **options: Any) -> Any:
        lpath = fsspec.utils.stringify_path(lpath)
        name = _name_at_the_root(rpath)
        if name and isinstance(lpath, str) and (lpath.endswith("/") or os.path.isdir(lpath)):
            lpath = f"{lpath}/{name}"
        return await super()._get(rpath, lpath, *args, **options)

    async def _get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        if await self._isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
        else:
            Path(lpath).write_bytes(await self._cat_file(rpath))

    # ------------------------------------------------------------------- writes

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        key, store, value = self._strip_protocol(path), self.sharding_store, bytes(value)
        if mode != "create":
            await store.set(key, value)
            return
        is_there = await store.exists(key)
        if not is_there:  # another writer may be faster
            await store.set_if_not_exists(key, value)
            found = await self._cat_file(key)
            # A document says in its own words how the array is sharded.
            parse = metadata.parse_json if metadata.is_document(key) else bytes
            is_there = found != value and parse(found) != parse(value)
        if is_there:
            raise FileExistsError(path)

    async def _put_file(
        self, lpath: str, rpath: str, mode: str = "overwrite", later: Any = None, **_: Any
    ) -> None:
        if not _is_later(lpath, rpath, later):
            await self._pipe_file(rpath, Path(lpath).read_bytes(), mode=mode)

    async def _cp_file(self, path1: str, path2: str, later: Any = None, **_: Any) -> None:
        if _is_later(path1, path2, later):
            return
        try:
            value = await self._cat_file(path1)
        except FileNotFoundError:
            if not await self._isdir(path1):
                raise
        else:
            await self._pipe_file(path2, value)

    # A call for many files stores documents first, because they declare the sharding of new arrays.

    async def _pipe(self, path: Any, value: Any = None, **options: Any) -> None:
        values = {path: value} if isinstance(path, str) else path
        for is_first in (True, False):
            keys = [k for k in values if metadata.is_document(self._strip_protocol(k)) is is_first]
            await super()._pipe({key: values[key] for key in keys}, **options)

    async def _put(
        self,
        lpath: Any,
        rpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        **options: Any,
    ) -> None:
        later = list[str](), list[str]()
        await super()._put(lpath, rpath, recursive, later=later, **options)
        await super()._put(*later, callback=callback, **options)

    async def _copy(self, path1: Any, path2: Any, recursive: bool = False, **options: Any) -> None:
        later = list[str](), list[str]()
        name = _name_at_the_root(path1)
        if name and isinstance(path2, str) and (path2[-1:] == "/" or await self._isdir(path2)):
            path2 = f"{path2.rstrip('/')}/{name}".lstrip("/")
        await super()._copy(path1, path2, recursive, later=later, **options)
        await super()._copy(*later, recursive, **options)

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **options: Any,
    ) -> None:
        """Move files and directories: all are copied, documents first, then all are removed.

        A pattern, or a list, moves into the directory `path2`. With a directory all that it has
        by then is removed.
        """
        moves = moves_of(self, path1, path2, maxdepth=maxdepth)
        moves.sort(key=lambda move: not metadata.is_document(self._strip_protocol(move[0])))
        for name, target in moves:
            self.copy(name, target, recursive=recursive, on_error="raise", **options)
        for name, _ in reversed(moves):
            self.rm(name, recursive=recursive)

    async def _rm_file(self, path: str, **_: Any) -> None:
        key = self._strip_protocol(path)
        is_shard = key.endswith(chunk_keys.SHARD_MARK)  # zarr resizes an array that has shards
        if not (is_shard or await self.sharding_store.exists(key)):
            raise FileNotFoundError(path)
        await self.sharding_store.delete(key)

    async def _rm(
        self, path: Any, recursive: bool = False, batch_size: int | None = None, **_: Any
    ) -> None:
        # Names, never patterns: stores of zarr remove keys by it, and "x[1]/c/0" is one.
        paths = path if isinstance(path, list) else [path]
        n = batch_size or _REMOVED_AT_ONCE
        for start in () if recursive else range(0, len(paths), n):
            await asyncio.gather(*map(self._rm_file, paths[start : start + n]))
        for each in paths if recursive else ():
            if (await self._info(each))["type"] == "file":
                await self._rm_file(each)
            else:
                await self.sharding_store.delete_dir(self._strip_protocol(each))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, or directories with all below; patterns stand for what they match now."""
        names = names_of(self, path, maxdepth=maxdepth)
        if recursive:  # a directory goes with the files that the pattern matches, too
            below = tuple([f"{name}/" for name in names])
            names = [name for name in names if not name.startswith(below)]
        sync(self.loop, self._rm, names, recursive=recursive)

    def _open(
        self, path: str, mode: str = "rb", block_size: Any = "default", **options: Any
    ) -> _ShardFile:
        if mode == "rb":
            info = self.info(path)
            if info["type"] == "directory":
                raise IsADirectoryError(f"{path!r} is a directory: append the path of a file")
            options["size"] = info["size"]
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        # Read first: a file that is dropped stores what it has by then.
        stored = self.cat_file(path) if mode == "ab" and self.exists(path) else None
        file = _ShardFile(self, path, mode, block_size, **options)
        if stored is not None:
            file.write(stored)
        return file


def _is_later(source: str, path: str, later: tuple[list[str], list[str]] | None) -> bool:
    """Put a file that is no document into the lists of the second round, if there are any."""
    if later is None or metadata.is_document(ShardFileSystem._strip_protocol(path)):
        return False
    later[0].append(source)
    later[1].append(path)
    return True


class _ShardFile(AbstractBufferedFile):  # type: ignore[misc]
    """One value, stored at its close or the end of its transaction."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final and self.autocommit:
            self.commit()
        return False  # the buffer keeps all written bytes

    def commit(self) -> None:
        mode = "create" if self.mode == "xb" else "overwrite"
        self.fs.pipe_file(self.path, self.buffer.getvalue(), mode=mode)


def _name_at_the_root(source: Any) -> str:
    """Return the name of a source in no directory, or ``""``. fsspec forgets it where it copies the
    source into a directory."""
    if not isinstance(source, str) or source.endswith("/") or has_magic(source):
        return ""
    name: str = ShardFileSystem._strip_protocol(source)
    return "" if "/" in name else name


def _open(
    fo: Any, protocol: str | None, target_options: dict[str, Any], options: dict[str, Any]
) -> ShardingStore:
    is_local = protocol in ("file", "local")
    if not fo and (protocol is None or is_local):
        raise SpecError(
            "the file system needs the URL of a store behind two colons: shard::s3://bucket/v.zarr"
        )
    if unknown := sorted(options.keys() - _OF_STORE):
        raise SpecError(
            f"shard has no options {unknown}: it has those of ShardingStore, such as "
            "chunks_per_shard. Those of the store behind it go below the name of its protocol, as "
            "in storage_options={'s3': {'anon': True}}"
        )
    if is_local:
        if str(fo).endswith(":"):  # fsspec has made "v:" of "shard::v"
            name = fo[-2:-1]
            raise SpecError(f"fsspec takes the path {name!r} for a protocol: write ./{name}")
        return ShardingStore(fo, **options)
    if protocol is None or protocol in resolve.EXTRAS:
        url = fo if protocol is None else f"{protocol}://{fo.removeprefix(f'{protocol}://')}"
        return ShardingStore(url, storage_options=target_options or None, **options)
    fs = fsspec.filesystem(protocol, **target_options)
    return ShardingStore(fsspec.FSMap(fo or fs.root_marker, fs), **options)


def _options_of(query: str) -> dict[str, Any]:
    return {name: _value_of(text) for name, text in parse_qsl(query)}


def _value_of(text: str) -> Any:
    """Parse an option in a URL: a literal of Python or JSON, or else a text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text, text)


def _entry(key: str, size: int | None = None) -> dict[str, Any]:
    """Return an entry of a listing: a directory, or with a size a file."""
    return {"name": key, "size": size or 0, "type": "directory" if size is None else "file"}


class ShardAdapter:
    """Segment ``shard:`` of a URL of zarr, with options and a path: ``|shard:a/b?order=C``.

    No release of zarr has these URLs yet. Options may also come by
    ``storage_options={"shard": {...}}``.
    """

    @classmethod
    async def open_pipeline_segment(cls, segment: Any, context: Any) -> Any:
        """Return zarr's `AdapterResolution`, with the store in a `ShardingStore`."""
        given, path = dict(context.storage_options or {}), segment.body.strip("/")
        options = {**_options_of(segment.query or ""), **given.pop("shard", {})}
        is_read = context.mode == "r" or getattr(context, "read_only", False)
        if is_read:
            options["read_only"] = True
        before = context.preceding
        if len(before) > 1 or (before and before[0].scheme not in resolve.EXTRAS):
            find = context.resolve_preceding
            # Some versions of the proposal have no options.
            takes_options = "storage_options" in signature(find).parameters
            found = await find(**({"storage_options": given or None} if takes_options else {}))
            store = _open(found.store, None, {}, options)
            path = "/".join(filter(None, (found.path.strip("/"), path)))
        else:
            if before:  # this client writes with conditions
                store = _open(before[0].raw, None, given, options)
            else:  # a URL of fsspec, which begins in the same way
                fs, path = fsspec.url_to_fs(segment.raw, **(context.storage_options or {}))
                store = fs.sharding_store.with_read_only(is_read)
            found = import_module("zarr.abc.url_pipeline").AdapterResolution(store)
        await store._ensure_open()
        return replace(found, store=store, path=path)
