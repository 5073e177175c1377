"""Versions of remote objects: ETags, or the size and the time of a file that a server shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zarr_shardstore.format.consolidated_index import RecordedVersion


@dataclass(frozen=True, slots=True, eq=False)
class ObjectVersion:
    """Version of an object. Two are equal if their ETags are.

    A consolidated index of local files records no ETags. Such a version equals every version
    with its size and its time, with whatever ETag a server shows the file.
    """

    etag: str | None
    size: int | None = None
    modified_s: int | None = None
    """Second of the last change, since 1970."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectVersion):
            return NotImplemented
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        return (self.size, self.modified_s) == (other.size, other.modified_s)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_strong(self) -> bool:
        """Whether equal bytes follow from equal versions: a weak ETag promises equal meaning."""
        return self.etag is not None and not self.etag.startswith("W/")

    def is_listed_as(self, listed: object) -> bool:
        """Whether a listing shows this version; some servers list ETags without quotes."""
        if not isinstance(listed, ObjectVersion) or listed.etag is None or not listed.is_strong:
            return False
        if self.etag is None:
            return self == listed
        return self.etag.strip('"') == listed.etag.strip('"')


def version_of_meta(meta: Any) -> ObjectVersion | None:
    """Return the version in obstore's description of an object; ``None`` without an ETag."""
    etag, modified = meta["e_tag"], meta["last_modified"]
    if etag is None:
        return None
    return ObjectVersion(
        etag, meta["size"], None if modified is None else int(modified.timestamp())
    )


def version_recorded(version: RecordedVersion, size: int) -> ObjectVersion:
    """Return the version that a consolidated index recorded for a shard of `size` bytes."""
    if isinstance(version, int):
        return ObjectVersion(None, size, version)
    return ObjectVersion(version, size)
