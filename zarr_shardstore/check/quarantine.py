"""Quarantine of a repair: the originals of objects in the base store, and the way back.

::

    .zarr_shardstore_quarantine/ID/c/0/0.original    all bytes of the object before the repair
    .zarr_shardstore_quarantine/ID/c/0/0.repaired    digest of the object that the repair stores

Both are stored and read back before the repair changes the object. A repair that is killed leaves
each object as it was, or repaired with its original here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.inspect.open_base import BaseStoreHandle, StoreLike, open_base
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.files import QUARANTINE, is_side_file
from zarr_shardstore.metadata.documents import parse_json
from zarr_shardstore.shards.requests import (
    CloseListing,
    Get,
    KeyCursor,
    ListPage,
    MapEntry,
    PlainValue,
    Set,
    UpdateShard,
    ask,
)
from zarr_shardstore.shards.rewrite import rewrite_value

_ORIGINAL, _REPAIRED = ".original", ".repaired"
_KEYS_PER_PAGE = 1024


def put_aside(
    base: BaseStoreHandle, prefix: str, key: str, original: Bytes, repaired: Bytes | None
) -> None:
    """Store an original in a quarantine, and read it back."""
    doc = json.dumps({"sha256": _digest(repaired)}).encode()
    copies = {f"{prefix}{key}{_REPAIRED}": doc, f"{prefix}{key}{_ORIGINAL}": bytes(original)}
    base.perform([Set(name, value) for name, value in copies.items()])
    for name, value, stored in zip(copies, copies.values(), base.values(list(copies)), strict=True):
        if stored is None or stored != value:
            raise ShardConflictError(f"{name!r} did not come back as it was stored")


def exchange(base: BaseStoreHandle, key: str, old: Bytes | None, new: Bytes | None) -> None:
    """Replace an object if it still has the old bytes; ``None``: there is none.

    Local files are locked for it, object stores compare the ETag. Raises `ShardConflictError` if
    the object has changed; nothing is stored then.
    """

    def change(found: Bytes | None) -> Bytes | None:
        if found != old:
            raise ShardConflictError(f"{key!r} was changed since it was read: check again")
        return None if new is None else bytes(new)

    value = PlainValue(key)
    driver = Driver(base.backend, lambda _, groups: rewrite_value(value, groups))
    driver.run(ask([UpdateShard(value, (MapEntry(0, change),))]))


def restore_quarantine(store: StoreLike, quarantine: str, *, dry_run: bool = False) -> list[str]:
    """Put the originals of a repair back, byte for byte, and return their keys.

    Parameters
    ----------
    store
        The store that was repaired.
    quarantine
        The prefix that the report of the repair names. It stays.

    Raises
    ------
    SpecError
        If there is no such quarantine.
    ShardConflictError
        If an object was written since the repair. All others were put back; remove that object
        first if its new bytes may go.
    """
    base = open_base(store)
    base.check_writable()
    prefix = quarantine.strip("/") + "/"
    keys = sorted(
        key.removeprefix(prefix).removesuffix(_ORIGINAL)
        for key in _keys(base, prefix)
        if key.endswith(_ORIGINAL)
    )
    if not keys or not prefix.startswith(QUARANTINE):
        raise SpecError(f"there is no quarantine {quarantine!r} in {base.describe()}")
    changed = []
    for key in keys:  # a shard comes before its journal
        original, doc = base.values([f"{prefix}{key}{_ORIGINAL}", f"{prefix}{key}{_REPAIRED}"])
        assert original is not None
        repaired = None if doc is None else parse_json(doc)
        (raw,) = base.values([key])
        if raw == original:
            continue
        (found,) = base.perform([Get(key, None, True)])
        if found.value is not None and _digest(found.value) != (repaired or {}).get("sha256"):
            changed.append(key)
        elif dry_run:
            pass
        elif is_side_file(key):
            base.perform([Set(key, original)])
        else:
            exchange(base, key, found.value, original)
    if changed:
        raise ShardConflictError(f"written since the repair, and left as they are: {changed}")
    return keys


def _digest(value: Bytes | None) -> str | None:
    return None if value is None else hashlib.sha256(value).hexdigest()


def _keys(base: BaseStoreHandle, prefix: str) -> Iterator[str]:
    cursor = KeyCursor(prefix, shows_all=True)
    try:
        while True:
            (page,) = base.perform([ListPage(cursor, _KEYS_PER_PAGE)])
            yield from page
            if len(page) < _KEYS_PER_PAGE:
                return
    finally:
        base.perform([CloseListing(cursor)])
