"""Reads of object stores by the backend: ranges, missing objects, and replaced ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError, NotSupportedError
from obstore.store import HTTPStore, MemoryStore
from zarr.storage import ObjectStore

from zarr_shardstore.format.ranges import Range, StartFrom, Suffix
from zarr_shardstore.io.backends.obstore import ObstoreBackend
from zarr_shardstore.io.write_epochs import UNSTABLE
from zarr_shardstore.shards.requests import Found, Get


@given(
    nbytes=st.integers(0, 6),
    byte_range=st.one_of(
        st.none(),
        st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda p: Range(min(p), max(p))),
        st.integers(0, 8).map(StartFrom),
        st.integers(0, 8).map(Suffix),
    ),
)
async def test_ranges(nbytes: int, byte_range: Any) -> None:
    """The bytes that a slice of the value gives, with the version and the size of the object."""
    base = MemoryStore()
    value = bytes(range(nbytes))
    obstore.put(base, "k", value)
    (found,) = await ObstoreBackend(ObjectStore(base)).perform_async([Get("k", byte_range)])
    match byte_range:
        case None:
            expected = value
        case Range(start, stop):
            expected = value[start:stop]
        case StartFrom(start):
            expected = value[start:]
        case Suffix(n):
            expected = value[-n:] if n else b""
    assert found.value == expected
    assert found.size in (None, nbytes)


async def test_a_missing_object() -> None:
    """It has no value and no version."""
    backend = ObstoreBackend(ObjectStore(MemoryStore()))
    assert await backend.perform_async([Get("k")]) == [Found(None, None)]


class Azure(ObstoreBackend):
    """It has no suffix ranges; between the size and the bytes another writer comes by."""

    replacements: list[bytes | None]

    async def _get_once(self, key: str, byte_range: Any, unless_etag: str | None = None) -> Found:
        if isinstance(byte_range, Suffix):
            raise NotSupportedError("suffix ranges")
        if self.replacements:
            value = self.replacements.pop(0)
            if value is None:
                obstore.delete(self.store.store, key)
            else:
                obstore.put(self.store.store, key, value)
        return await super()._get_once(key, byte_range, unless_etag)


@pytest.mark.parametrize(
    ("replacements", "expected"),
    [
        ([], b"-old"),
        ([b"shorter-one"], b"-one"),
        ([b"a much longer one than before-two"], b"-two"),
        ([b"1"], b"1"),
        ([b""], b""),
        ([None], None),
        ([b"shorter-one", b"longer than that-two", b"3-three"], b"hree"),
    ],
)
async def test_the_end_of_an_object_that_is_replaced(
    replacements: list[bytes | None], expected: bytes | None
) -> None:
    """It is that of one state of the object, with its version."""
    base = MemoryStore()
    obstore.put(base, "k", b"this is the-old")
    backend = Azure(ObjectStore(base))
    backend.replacements = replacements
    (found,) = await backend.perform_async([Get("k", Suffix(4))])
    assert found.value == expected
    if found.version is not None:
        assert found.version.etag == obstore.head(base, "k")["e_tag"]


async def test_the_end_of_what_is_not_there() -> None:
    """A missing object, also where suffix ranges are not supported."""
    backend = Azure(ObjectStore(MemoryStore()))
    backend.replacements = []
    assert await backend.perform_async([Get("k", Suffix(4))]) == [Found(None, None)]


class Reply:
    """obstore's reply: bytes of an object that was stored just now."""

    def __init__(self, value: bytes) -> None:
        self.value, self.attributes = value, dict[str, str]()
        self.meta = {
            "path": "a", "size": 100, "e_tag": '"1-64"', "version": None,
            "last_modified": datetime.now(UTC),
        }  # fmt: skip

    async def bytes_async(self) -> bytes:
        return self.value


@pytest.mark.parametrize("byte_range", [Suffix(10), Range(200, 210)])
async def test_a_young_object_of_a_web_server_is_of_no_lasting_version(
    byte_range: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server refuses suffixes, and another request is made for the end. Its ETag may be
    of the second in which the object was replaced."""

    async def get(_: Any, __: str, *, options: Any) -> Reply:
        wanted = options.get("range")
        if isinstance(wanted, dict) or (wanted and wanted[0] >= 100):
            raise GenericError("416 Range Not Satisfiable")
        return Reply(b"" if options.get("head") else bytes(10))

    async def head(*_: Any) -> Any:
        return Reply(b"").meta

    monkeypatch.setattr(obstore, "get_async", get)
    monkeypatch.setattr(obstore, "head_async", head)
    backend = ObstoreBackend(ObjectStore(HTTPStore("http://127.0.0.1:1"), read_only=True))
    found = await backend.get(Get("a", byte_range))
    assert len(found.value or b"") == (10 if isinstance(byte_range, Suffix) else 0)
    assert found.version is UNSTABLE
