"""Unfinished conversions: the state of each, and the command that finishes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from zarr_shardstore.access import (
    STAGING,
    BaseStoreHandle,
    LocalBackend,
    locks,
    metadata,
    shard_format,
    transformer_list,
)
from zarr_shardstore.errors import ShardConflictError, ShardStoreError, UnsupportedError

_STATES = {
    "staging": "the array is as it was before, and a part of the new objects is staged",
    "replacing": "the new objects are staged, and a part of the old ones may be deleted",
    "removing": "the new objects are staged, and a part of the old ones is deleted",
    "moving": "the old objects are deleted, and a part of the new ones is staged",
}


@dataclass(frozen=True, slots=True)
class UnfinishedConversion:
    """Content of the manifest of a conversion. The end of a conversion removes its manifest."""

    key: str
    """Key of the manifest."""
    path: str
    state: str
    prefix: str | None
    """Prefix of the keys that a conversion to this store writes; ``None`` if it is in place."""
    is_running: bool
    text: str
    """The state, and the command that finishes the conversion."""

    @property
    def is_of_stored_array(self) -> bool:
        """True if the conversion is in place, so that the state is one of a stored array."""
        return bool(self.state) and self.prefix is None


def unfinished_conversions(base: BaseStoreHandle) -> Iterator[UnfinishedConversion]:
    """Yield the unfinished conversions of a store; one without a readable manifest has no path and
    no state."""
    manifests = [f"{STAGING}{n}/manifest.json" for n in sorted(base.names(STAGING)) if n != "lock"]
    is_running = bool(manifests) and is_locked(base, f"{STAGING}lock")
    for key, value in zip(manifests, base.values(manifests, check=False), strict=True):
        doc = (None if value is None else metadata.parse_json(value)) or {}
        path, state = str(doc.get("path", "")), str(doc.get("state", ""))
        prefix = None if doc.get("is_staged") or not doc else str(doc.get("prefix"))
        if not doc:
            text = "remains of a conversion: any conversion in place removes them"
        elif is_running:
            text = f"the array {path or '/'!r} is being converted"
        else:
            text = f"a conversion of {path or '/'!r} was interrupted (state {state!r})"
            is_known = doc.get("hierarchy") in get_args(metadata.Hierarchy) and state in _STATES
            if prefix is None and is_known:
                text += f": {_STATES[state]}, and nothing is lost; this finishes it: "
                text += shlex.join(_command(base, doc))
            elif prefix is None:
                text += ": run it again"
            else:
                text += ": run the command again that converts another store into this one"
        yield UnfinishedConversion(key, path, state, prefix, is_running, text)


def _command(base: BaseStoreHandle, manifest: Mapping[str, Any]) -> list[str]:
    """Return the words of the command that converts an array as its manifest says."""
    node = metadata.Node(manifest["hierarchy"], str(manifest["path"]))
    words = ["unshard"]
    with suppress(ShardStoreError, KeyError, TypeError, AttributeError):  # another version wrote it
        array = metadata.parse_array(node, manifest["documents"][metadata.document_key(node)])
        if array is not None and array.transformers and array.geometry is not None:
            last, ndim = array.transformers[-1], len(array.geometry.shape)
            if last.name == transformer_list.SHARDING:
                spec = transformer_list.sharding_spec(last, ndim)
                words = ["shard", "--chunks-per-shard", ",".join(map(str, spec.chunks_per_shard))]
                if spec.sides is not None:
                    words = ["shard", *_shards_at(array.geometry, spec)]
                elif node.hierarchy == "v3" and array.declaration == "storage_transformers":
                    words += ["--declaration", "storage_transformers"]
                if spec.index.location == "start":
                    words += ["--index-location", "start"]
    where = (base.url or base.describe()).removeprefix("file://")
    paths = ["--path", node.path] if node.path else []
    return ["zarr-shardstore", words[0], where, *words[1:], *paths, "--yes"]


def _shards_at(geometry: metadata.Geometry, spec: shard_format.ShardingSpec) -> list[str]:
    """Return the words that name where shards begin."""
    words, chunks = [], geometry.chunks
    counts = spec.boxes.shape(geometry.grid_shape)
    for dim, (n, side) in enumerate(zip(counts, spec.boxes.sides, strict=True)):
        n_listed = len(side) if isinstance(side, tuple) else 1  # also shards to come
        ends = [spec.boxes.bounds(dim, i)[1] for i in range(max(n, n_listed))]
        places = [chunks.bounds(dim, end)[0] for end in ends]
        words += ["--shards-at", f"{dim}={','.join(map(str, places))}"]
    return words


def is_locked(base: BaseStoreHandle, key: str) -> bool:
    """Return whether a process has the lock with that key, without making a file."""
    if not isinstance(base.backend, LocalBackend):
        return False
    lock = locks.KeptLock(base.backend.path_of(key), is_shared=True)
    try:
        lock.acquire(0, "it is locked")
    except ShardConflictError:
        return True
    except UnsupportedError:
        return base.options.locking == "lockfile"
    except OSError:
        return False
    finally:
        lock.close()
    return False
