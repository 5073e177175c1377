"""Table of base stores of other packages: how each is made, and what is expected of it.

``python -m tests.support.base_stores`` writes the table into ``spec_notes/base_stores.md``.
"""

from __future__ import annotations

import base64
import dbm.dumb
import functools
import http.server
import io
import json
import shelve
import tarfile
import threading
import uuid
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from zarr.abc.store import Store
from zarr.core.buffer import cpu
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, WrapperStore, ZipStore

from zarr_shardstore.errors import ReadOnlyError, UnsupportedError

Objects = Mapping[str, bytes]

PAGE = Path(__file__).parents[2] / "spec_notes" / "base_stores.md"
MARKS = "<!-- made by tests/support/base_stores.py -->\n", "<!-- end -->\n"

COLUMNS = ("read", "list", "source", "write", "destination", "in place", "to_native")


@dataclass(frozen=True)
class Refused:
    """Outcome of an operation that a store cannot do."""

    error: type[Exception]
    why: str
    """A part of the message, as the page has it."""


LISTS_NOT = Refused(UnsupportedError, "cannot list keys")
NO_KEYS = Refused(UnsupportedError, "lists no keys")
READ_ONLY = Refused(ReadOnlyError, "open for reading only|in read-only mode")
A_CACHE = Refused(UnsupportedError, "a cache of fsspec")
AN_ARCHIVE = Refused(UnsupportedError, "an archive that fsspec reads")
REFERENCES = Refused(UnsupportedError, "references to bytes of other files")
NO_REMOVAL = Refused(UnsupportedError, "nothing can be removed or replaced")
NO_REPLACE = Refused(UnsupportedError, "cannot remove or replace")
NO_PUT = Refused(UnsupportedError, "cannot store or remove")
NO_NOTES = Refused(UnsupportedError, "documents of Zarr v3 and chunks only")
ONE_THREAD = Refused(UnsupportedError, "belongs to one thread")

Outcomes = Mapping[str, Refused]


def changes(refusal: Refused) -> Outcomes:
    return dict.fromkeys(COLUMNS[3:], refusal)


LISTS_AND_STORES_NOT: Outcomes = {
    **dict.fromkeys(("list", "source", *COLUMNS[4:]), LISTS_NOT),
    "write": NO_PUT,
}


@dataclass
class Place:
    """A directory for a test, and what is closed when it ends."""

    root: Path
    closing: ExitStack = field(default_factory=ExitStack)

    def new(self) -> Path:
        path = self.root / uuid.uuid4().hex
        path.mkdir()
        return path


@dataclass(frozen=True)
class Row:
    """A kind of base store."""

    make: Callable[[Place, Objects], Any]
    """Makes a store with these objects; without any it is new, to be written to."""
    packages: tuple[str, ...]
    refused: Outcomes = field(default_factory=dict)
    separator: str = "/"
    """Of the chunk keys."""


ROWS: dict[str, Row] = {}


def row(
    name: str, *packages: str, refused: Outcomes | None = None, separator: str = "/"
) -> Callable[[Callable[[Place, Objects], Any]], Callable[[Place, Objects], Any]]:
    def add(make: Callable[[Place, Objects], Any]) -> Callable[[Place, Objects], Any]:
        ROWS[name] = Row(make, packages, refused or {}, separator)
        return make

    return add


def put(base: Any, objects: Objects) -> Any:
    """Store objects, documents first: an icechunk session wants the array before its chunks."""
    for key in sorted(objects, key=lambda key: (not key.endswith("zarr.json"), key)):
        if isinstance(base, Store):
            sync(base.set(key, cpu.Buffer.from_bytes(objects[key])))
        else:
            base[key] = objects[key]
    return base


# -------------------------------------------------------- icechunk and VirtualiZarr


def icechunk_session(storage: Any, objects: Objects) -> tuple[Any, Any]:
    import icechunk

    repository = icechunk.Repository.create(storage)
    if objects:
        session = repository.writable_session("main")
        put(session.store, objects)
        session.commit("objects")
    return repository, repository.writable_session("main").store


SESSION = {"destination": NO_NOTES, "in place": NO_NOTES}


@row("icechunk, writable session in memory", "icechunk", refused=SESSION)
def _(_: Place, objects: Objects) -> Any:
    import icechunk

    return icechunk_session(icechunk.in_memory_storage(), objects)[1]


@row("icechunk, writable session on local files", "icechunk", refused=SESSION)
def _(place: Place, objects: Objects) -> Any:
    import icechunk

    return icechunk_session(icechunk.local_filesystem_storage(str(place.new())), objects)[1]


@row("icechunk, read-only session", "icechunk", refused={**changes(READ_ONLY), **SESSION})
def _(_: Place, objects: Objects) -> Any:
    import icechunk

    repository, _store = icechunk_session(icechunk.in_memory_storage(), objects)
    return repository.readonly_session("main").store


def manifest_store(place: Place, objects: Objects, separator: str) -> Any:
    """References to files that each have a chunk in the middle."""
    import obstore
    from obspec_utils.registry import ObjectStoreRegistry
    from virtualizarr.manifests import ChunkManifest, ManifestArray, ManifestGroup, ManifestStore

    directory = place.new()
    document = json.loads(objects.get("g/a/zarr.json") or DOCUMENT % separator.encode())
    prefix = f"g/a/c{separator}"
    entries: Any = {}
    for i, (key, value) in enumerate(objects.items()):
        if key.startswith(prefix):
            (directory / str(i)).write_bytes(b"before" + value + b"behind")
            name = key[len(prefix) :].replace("/", ".")
            path = f"file://{directory}/{i}"
            entries[name] = {"path": path, "offset": 6, "length": len(value)}
    chunks = document["chunk_grid"]["configuration"]["chunk_shape"]
    shape = tuple(-(-n // m) for n, m in zip(document["shape"], chunks, strict=True))
    array = ManifestArray(
        ArrayV3Metadata.from_dict(document), ChunkManifest(entries=entries, shape=shape)
    )
    root: Any = json.loads(objects.get("zarr.json") or b"{}")
    group = ManifestGroup(
        groups={"g": ManifestGroup(arrays={"a": array})}, attributes=root.get("attributes", {})
    )
    files = ObjectStoreRegistry({"file://": obstore.store.LocalStore()})
    return ManifestStore(group, registry=files)


DOCUMENT = b"""{"zarr_format": 3, "node_type": "array", "shape": [2], "data_type": "uint8",
"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}}, "fill_value": 0,
"chunk_key_encoding": {"name": "default", "configuration": {"separator": "%b"}},
"codecs": [{"name": "bytes"}], "attributes": {}}"""

MANIFEST = {**changes(READ_ONLY), "in place": NO_REMOVAL}


@row(
    "VirtualiZarr, `ManifestStore`",
    "virtualizarr",
    refused={**MANIFEST, "list": LISTS_NOT},
)
def _(place: Place, objects: Objects) -> Any:
    return manifest_store(place, objects, "/")


@row("VirtualiZarr, chunk keys with dots", "virtualizarr", refused=MANIFEST, separator=".")
def _(place: Place, objects: Objects) -> Any:
    return manifest_store(place, objects, ".")


# ----------------------------------------------------------------- zarr's own


def zip_store(place: Place, objects: Objects, mode: Any) -> ZipStore:
    path = place.new() / "a.zip"
    store = put(ZipStore(path, mode="w"), objects or {"README": b"a zip needs a member"})
    store.close()
    again = ZipStore(path, mode=mode)
    again._sync_open()
    place.closing.callback(again.close)
    return again


NO_CHANGES = {"in place": NO_REMOVAL, "to_native": NO_REMOVAL}


@row("`ZipStore`, written", "zarr", refused=NO_CHANGES)
def _(place: Place, objects: Objects) -> Any:
    return zip_store(place, objects, "a")


@row("`ZipStore`, read", "zarr", refused={**changes(READ_ONLY), "in place": NO_REMOVAL})
def _(place: Place, objects: Objects) -> Any:
    return zip_store(place, objects, "r")


@row("`MemoryStore`, read-only", "zarr", refused=changes(READ_ONLY))
def _(_: Place, objects: Objects) -> Any:
    return put(MemoryStore(), objects).with_read_only(True)


@row("`LoggingStore` on files", "zarr")
def _(place: Place, objects: Objects) -> Any:
    return LoggingStore(put(LocalStore(place.new()), objects), log_level="CRITICAL")


class Flipped(WrapperStore[Any]):
    """Stores other bytes than it is given, as one that encrypts; it has no methods that block."""

    @staticmethod
    def flip(value: Any) -> Any:
        return None if value is None else cpu.Buffer.from_bytes(value.to_bytes()[::-1])

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        value = self.flip(await self._store.get(key, prototype))
        if value is None or byte_range is None:
            return value
        return await MemoryStore({"a": value}).get("a", prototype, byte_range)

    async def set(self, key: str, value: Any) -> None:
        await self._store.set(key, self.flip(value))


@row("a `WrapperStore` that changes the bytes", "zarr")
def _(_: Place, objects: Objects) -> Any:
    return put(Flipped(MemoryStore()), objects)


class Lacking(WrapperStore[Any]):
    """A store that lacks some operations."""

    lacks: ClassVar[frozenset[str]] = frozenset()

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).lacks:

            def lacking(*args: object, **options: object) -> Any:
                raise NotImplementedError(f"no {name}")

            return lacking
        return super().__getattribute__(name)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        if "ranges" in self.lacks and byte_range is not None:
            raise NotImplementedError("no ranges")
        if "honesty" in self.lacks:
            byte_range = None
        value = await self._store.get(key, prototype, byte_range)
        is_odd = not key.endswith("zarr.json") and "/c/" not in key and "." not in key
        if "odd keys" in self.lacks and value is None and is_odd:
            raise TypeError(f"no key can be {key!r}")
        return value


def lacking(name: str, *lacks: str, refused: Outcomes | None = None, **members: Any) -> None:
    members["lacks"] = frozenset(lacks)
    kind = type("Lacking", (Lacking,), members)

    @row(f"a store {name}", "zarr", refused=refused)
    def _(_: Place, objects: Objects) -> Any:
        return kind(put(MemoryStore(), objects))


_ALL_LISTINGS = ("list", "list_prefix", "list_dir")
_REMOVALS = ("delete", "delete_dir", "clear")
lacking("without ranges", "ranges")
lacking("that ignores ranges", "honesty")
lacking("that lists directories only", "list", "list_prefix")
lacking("that lists prefixes only", "list_dir")
lacking(
    "that lists nothing",
    *_ALL_LISTINGS,
    refused=dict.fromkeys(("list", "source", *COLUMNS[4:]), LISTS_NOT),
)
lacking(
    "that lists nothing, and says so",
    *_ALL_LISTINGS,
    refused={**dict.fromkeys(("source", *COLUMNS[4:]), NO_KEYS), "list": LISTS_NOT},
    supports_listing=False,
)
lacking("that removes nothing", *_REMOVALS, refused={"in place": NO_REMOVAL})
lacking("that removes nothing, and says so", *_REMOVALS, refused=NO_CHANGES, supports_deletes=False)
lacking("without `exists`", "exists")
lacking("that raises for odd keys", "odd keys")


# --------------------------------------------------------------------- fsspec


def fsspec_store(fs: Any, path: str, objects: Objects) -> FsspecStore:
    if not fs.async_impl or type(fs) is DirFileSystem:
        fs = AsyncFileSystemWrapper(fs, asynchronous=True)
    store: FsspecStore = put(FsspecStore(fs, path=path), objects)
    return store


@row("fsspec, memory", "fsspec")
def _(_: Place, objects: Objects) -> Any:
    return put(FsspecStore.from_url(f"memory://{uuid.uuid4().hex}"), objects)


@row("fsspec, local", "fsspec")
def _(place: Place, objects: Objects) -> Any:
    put(LocalStore(directory := place.new()), objects)
    return fsspec_store(fsspec.filesystem("file"), str(directory), {})


@row("fsspec, `DirFileSystem` in memory", "fsspec")
def _(_: Place, objects: Objects) -> Any:
    fs = DirFileSystem(f"/{uuid.uuid4().hex}", MemoryFileSystem())
    fsspec_store(fs, "", objects)
    return fs


@row("fsspec, `DirFileSystem`, wrapped", "fsspec")
def _(_: Place, objects: Objects) -> Any:
    return fsspec_store(DirFileSystem(f"/{uuid.uuid4().hex}", MemoryFileSystem()), "", objects)


@row("fsspec, `DirFileSystem` on files", "fsspec")
def _(place: Place, objects: Objects) -> Any:
    files = fsspec.filesystem("file", auto_mkdir=True)
    return fsspec_store(DirFileSystem(str(place.new()), files), "below", objects)


def cached(protocol: str) -> None:
    @row(f"fsspec, `{protocol}::`", "fsspec", refused=changes(A_CACHE))
    def _(place: Place, objects: Objects) -> Any:
        put(LocalStore(directory := place.new()), objects)
        options = {"cache_storage": str(place.new()), "skip_instance_cache": True}
        fs = fsspec.filesystem(protocol, target_protocol="file", **options)
        return fsspec_store(fs, str(directory), {})


for _protocol in ("simplecache", "filecache", "blockcache"):
    cached(_protocol)


@row("fsspec, `ReferenceFileSystem`", "fsspec", refused=changes(REFERENCES))
def _(place: Place, objects: Objects) -> Any:
    """As kerchunk writes it: documents as text, small values as base64, others by their place."""
    directory = place.new()
    references: dict[str, Any] = {}
    for i, (key, value) in enumerate(objects.items()):
        if key.endswith(".json"):
            references[key] = value.decode()
        elif i % 2:
            references[key] = f"base64:{base64.b64encode(value).decode()}"
        else:
            (directory / str(i)).write_bytes(b"before" + value + b"behind")
            references[key] = [f"file://{directory}/{i}", 6, len(value)]
    what = {"version": 1, "refs": references or {"README": "empty"}}
    return fsspec.get_mapper("reference://", fo=what, remote_protocol="file")


@row("fsspec, `zip::`", "fsspec", refused=changes(AN_ARCHIVE))
def _(place: Place, objects: Objects) -> Any:
    path = place.new() / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for key, value in (objects or {"README": b"x"}).items():
            archive.writestr(key, value)
    return f"zip::file://{path}"


@row("fsspec, `tar::`", "fsspec", refused=changes(AN_ARCHIVE))
def _(place: Place, objects: Objects) -> Any:
    path = place.new() / "a.tar"
    with tarfile.open(path, "w") as archive:
        for key, value in (objects or {"README": b"x"}).items():
            member = tarfile.TarInfo(key)
            member.size = len(value)
            archive.addfile(member, io.BytesIO(value))
    return f"tar::file://{path}"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Python's own server: it ignores ranges, and has a page for each directory."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass


def served(place: Place, objects: Objects) -> str:
    put(LocalStore(directory := place.new()), objects or {"README": b"x"})
    handler = functools.partial(Quiet, directory=str(directory))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    place.closing.callback(thread.join)
    place.closing.callback(server.server_close)
    place.closing.callback(server.shutdown)
    server.daemon_threads = True
    server.block_on_close = False
    return f"http://127.0.0.1:{server.server_port}"


@row(
    "fsspec, `http://`, a server without ranges",
    "fsspec",
    "aiohttp",
    refused=LISTS_AND_STORES_NOT,
)
def _(place: Place, objects: Objects) -> Any:
    return served(place, objects)


# -------------------------------------------------------------------- obstore


@row("obstore, `MemoryStore`", "obstore")
def _(_: Place, objects: Objects) -> Any:
    import obstore
    from zarr.storage import ObjectStore

    put(ObjectStore(store := obstore.store.MemoryStore()), objects)
    return store


@row("obstore, `LocalStore`", "obstore")
def _(place: Place, objects: Objects) -> Any:
    import obstore

    put(LocalStore(directory := place.new()), objects)
    return obstore.store.LocalStore(directory)


@row(
    "obstore, `HTTPStore`, a server without ranges and WebDAV",
    "obstore",
    refused=LISTS_AND_STORES_NOT,
)
def _(place: Place, objects: Objects) -> Any:
    import obstore

    return obstore.store.HTTPStore.from_url(
        served(place, objects),
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


# ------------------------------------------------------------------- mappings


@row("zict, `File`", "zict")
def _(place: Place, objects: Objects) -> Any:
    import zict

    return put(zict.File(str(place.new())), objects)


@row("zict, `Buffer`", "zict")
def _(place: Place, objects: Objects) -> Any:
    import zict

    slow: Any = zict.File(str(place.new()))
    return put(zict.Buffer({}, slow, 1000, weight=lambda _, value: len(value)), objects)


@row(
    "zict, `Zip`",
    "zict",
    refused={"write": NO_REPLACE, "in place": NO_REMOVAL, "to_native": NO_REPLACE},
)
def _(place: Place, objects: Objects) -> Any:
    import zict

    mapping = zict.Zip(str(place.new() / "a.zip"))
    place.closing.callback(mapping.close)
    return put(mapping, objects)


@row("`dbm.dumb`", "dbm")
def _(place: Place, objects: Objects) -> Any:
    mapping = dbm.dumb.open(str(place.new() / "a"), "c")  # noqa: SIM115  closed with the place
    place.closing.callback(mapping.close)
    return put(mapping, objects)


@row("`shelve`, on `dbm.dumb`", "shelve")
def _(place: Place, objects: Objects) -> Any:
    values: Any = dbm.dumb.open(str(place.new() / "a"), "c")  # noqa: SIM115  closed with the place
    mapping: Any = shelve.Shelf(values)
    place.closing.callback(mapping.close)
    return put(mapping, objects)


class Copying(dict[str, Any]):
    """A dict that gives bytearrays."""

    def __getitem__(self, key: str) -> bytearray:
        return bytearray(super().__getitem__(key))


@row("a dict that gives bytearrays", "builtins")
def _(_: Place, objects: Objects) -> Any:
    return Copying(objects)


# ----------------------------------------------------------------------- page


def table() -> str:
    """Return the table of the page: reasons are numbered, stores that do all are listed below."""
    notes: dict[str, int] = {}

    def cell(refused: Refused | None) -> str:
        if refused is None:
            return "✓"
        return f"✗ {notes.setdefault(refused.why, len(notes) + 1)}"

    lines = [
        f"| base store | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    for name, its in ROWS.items():
        if not its.refused:
            continue
        cells = [cell(its.refused.get(column)) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons = [f"{n} “… {why.replace('|', ' …” or “… ')} …”" for why, n in notes.items()]
    reasons = [*(f"{reason} ·" for reason in reasons[:-1]), reasons[-1]]
    whole = ";\n".join(name for name, its in ROWS.items() if not its.refused)
    return "\n".join([*lines, "", *reasons, "", "Every operation works with:", f"{whole}.", ""])


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + after, encoding="utf-8")


if __name__ == "__main__":
    main()
