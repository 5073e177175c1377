"""Versions of objects as obstore tells them, and those that a collection of indexes recorded."""

from __future__ import annotations

from typing import Any

from zarr_shardstore.format.consolidated_index import RecordedVersion


class ObjectVersion(str):
    """An ETag; two are equal if these are. It also tells what a `_FileVersion` compares."""

    __slots__ = ("modified_s", "size")

    size: int
    modified_s: int


class _FileVersion:
    """A file of some size that was last changed in some second, by whatever ETag it is served."""

    __slots__ = ("_of",)

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, size: int, modified_s: int) -> None:
        self._of = size, modified_s

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _FileVersion):
            return self._of == other._of
        return isinstance(other, ObjectVersion) and self._of == (other.size, other.modified_s)


def version_of_meta(meta: Any) -> ObjectVersion | None:
    """The version of an object that obstore has met; ``None`` if it tells none."""
    etag, modified = meta["e_tag"], meta["last_modified"]
    if etag is None:
        return None
    version = ObjectVersion(etag)
    version.size = meta["size"]
    version.modified_s = -1 if modified is None else int(modified.timestamp())
    return version


def version_recorded(version: RecordedVersion, size: int) -> object:
    """What equals the version of an object if that is the one that was recorded."""
    return _FileVersion(size, version) if isinstance(version, int) else version


def is_strong(version: object) -> bool:
    """A weak ETag says only that an object means the same, not that its bytes are."""
    return isinstance(version, str) and not version.startswith("W/")


def is_listed_as(known: object, listed: object) -> bool:
    """Whether an object is listed with a version that is known. Some stores list ETags without
    their quotes."""
    if not isinstance(listed, str) or not is_strong(listed):
        return False
    if isinstance(known, str):
        return known.strip('"') == listed.strip('"')
    return known == listed
