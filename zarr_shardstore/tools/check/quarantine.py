"""Quarantine of a repair: the originals of objects in the base store, and the way back.

::

    .zarr_shardstore_quarantine/ID/c/0/0.original    all bytes of the object before the repair
    .zarr_shardstore_quarantine/ID/c/0/0.repaired    digests of the original and of later states

Both are stored, synced on local files, and read back before the object is changed. Decision 33 has
what comes at a kill and beside writers. Where other hosts compare ETags, only objects that no
program stores twice are removed: temporary files, locks, journals, consolidated indexes. The lock
of a shard undoes a change that a killed writer has begun. The digest of that state is also noted:
it counts as the original.
"""

from __future__ import annotations

import hashlib
import json
from typing import TypeAlias

from zarr_shardstore.access import (
    BaseStoreHandle,
    StoreLike,
    consolidated_index,
    file_keys,
    metadata,
    open_base,
    requests,
    shard_format,
)
from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.tools.inspect.find import quoted

_ORIGINAL, _REPAIRED = ".original", ".repaired"

_Bytes: TypeAlias = shard_format.Bytes


def put_aside(
    base: BaseStoreHandle, prefix: str, key: str, original: _Bytes, *later: _Bytes | None
) -> None:
    """Store an original in a quarantine, and digests of it and of later states; read both back."""
    digests = [_digest(value) for value in later if value is not None]
    doc = json.dumps({"original": _digest(original), "sha256": digests}).encode()
    copies = {f"{prefix}{key}{_REPAIRED}": doc, f"{prefix}{key}{_ORIGINAL}": bytes(original)}
    base.perform([requests.Set(name, value) for name, value in copies.items()])
    for name, value, stored in zip(copies, copies.values(), base.values(list(copies)), strict=True):
        if stored is None or stored != value:
            raise ShardConflictError(f"{name!r} did not come back as it was stored")


def restore_quarantine(store: StoreLike, quarantine: str, *, dry_run: bool = False) -> list[str]:
    """Put the originals of a repair back, byte for byte, and return their keys.

    Parameters
    ----------
    store
        The store that was repaired.
    quarantine
        The prefix in the report of the repair, or its last part. It stays. Of several repairs
        restore the latest first.

    Raises
    ------
    SpecError
        If there is no such quarantine; the message names all, in their order.
    ShardConflictError
        If an object was written since the repair, or its original is damaged. All others were put
        back; the message names them. Remove the object first if its new bytes may go.
    """
    base = open_base(store).synced()
    base.check_writable()
    there = list(base.keys(f"{file_keys.QUARANTINE}/", shows_all=True))
    name = quarantine.strip("/").removeprefix(f"{file_keys.QUARANTINE}/")
    prefix = f"{file_keys.QUARANTINE}/{name}/"
    names = (k.removeprefix(prefix) for k in there if k.startswith(prefix) and "/" not in name)
    keys = sorted(k.removesuffix(_ORIGINAL) for k in names if k.endswith(_ORIGINAL))
    if not keys:
        others = sorted({"/".join(k.split("/")[:2]) for k in there if k.endswith(_ORIGINAL)})
        text = f"there is no quarantine {quarantine!r} in {base.describe()}; there are "
        raise SpecError(text + (", ".join(others) or "none"))
    shards = sorted({key.removesuffix(file_keys.JOURNAL_SUFFIX) for key in keys})
    left = {key: _restore(base, prefix, key, dry_run=dry_run) for key in shards}
    if any(left.values()):
        reasons = "; ".join(filter(None, left.values()))
        done = f"{'would be ' if dry_run else ''}restored: {quoted(k for k in left if not left[k])}"
        raise ShardConflictError(f"{reasons}: left as it is; {done}")
    return keys


def _restore(base: BaseStoreHandle, prefix: str, key: str, *, dry_run: bool) -> str:
    """Put an object back, with its journal; return the reason if it is left as it is."""
    names = [key, key + file_keys.JOURNAL_SUFFIX]
    at = [f"{prefix}{name}{end}" for end in (_ORIGINAL, _REPAIRED) for name in names]
    original, journal, doc, journal_doc = base.values(at)
    for value, about in ((original, doc), (journal, journal_doc)):
        noted = metadata.parse_json(about) or {}
        if value is not None and noted.get("original") != _digest(value):
            return f"the original of {key!r} in the quarantine is damaged"
    raw, raw_journal = base.values(names)
    if raw == original and journal in (None, raw_journal):
        return ""
    is_side_file = file_keys.is_side_file(key)
    if is_side_file or consolidated_index.is_consolidated_index_key(key):
        # A lock that is taken now must stay.
        kind = requests.SetIfNotExists if is_side_file else requests.Set
        if not dry_run:
            base.perform([kind(key, bytes(original or b""))])
        return ""
    (found,) = base.perform([requests.Get(key, None, True)])  # without a change that was cut off
    later = (metadata.parse_json(doc) or {}).get("sha256", ())
    is_known = found.value is None or _digest(found.value) in later
    if not is_known and raw != original:
        return f"{key!r} was written since the repair"
    if not dry_run:
        also = [] if journal is None else [requests.Set(names[1], bytes(journal))]
        try:
            base.swap(key, found.value, original, also)
        except ShardConflictError:
            return f"{key!r} is being written"
    return ""


def _digest(value: _Bytes) -> str:
    return hashlib.sha256(value).hexdigest()
