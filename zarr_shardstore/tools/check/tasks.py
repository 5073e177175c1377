"""Tasks of a check, each of a few objects of one array: independent of all others, and picklable.

Another program may replace or convert an array during the check. Objects with findings are
therefore checked again if their document has changed since it was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from zarr_shardstore.access import BaseStoreHandle, metadata, stacks
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.tools.check.findings import CheckResult, Level, finding
from zarr_shardstore.tools.check.objects import MAX_ATTEMPTS, ArrayChecker
from zarr_shardstore.tools.inspect.find import arrays_at


def check_objects(checker: ArrayChecker, keys: Sequence[str]) -> CheckResult:
    """Check some objects of an array; those that are gone by now are left out."""
    name, node = checker.task_name(keys), checker.array.node
    for _ in range(MAX_ATTEMPTS):
        found = CheckResult(n_objects=len(keys), task=name)
        if checker.grid.is_sharded:
            checker.check_shards(keys, found)
        else:
            checker.check_values(keys, found)
        below = [type(transformer) for transformer in checker.grid.below]
        has_checksum = checker.has_checksum or stacks.Crc32cTransformer in below
        found.n_without_checksum = 0 if has_checksum else found.n_chunks
        if not found.findings:
            return found
        docs = [checker.doc]
        with suppress(Exception):  # what cannot be read has not changed
            docs = [array.doc for array in arrays_at(checker.base, node.path) if array.node == node]
        if docs == [checker.doc]:
            return found
        again = checker_of(checker.base, node, docs[0], checker.level) if docs else None
        if again is None:
            break
        checker = again
    text = "another program replaces or converts the array: check it again"
    found.findings = [finding("in_use", metadata.document_key(node), text, array=node.path)]
    return found


def checker_of(
    base: BaseStoreHandle, node: metadata.Node, doc: Mapping[str, Any], level: Level = "decode"
) -> ArrayChecker | None:
    """Return the checker of an array; ``None`` if its document cannot be used."""
    with suppress(ShardStoreError):
        return ArrayChecker(base, node, doc, level)
    return None


def renew_documents(
    base: BaseStoreHandle, docs: dict[metadata.Node, Mapping[str, Any]], key: str
) -> tuple[dict[str, Any], bool]:
    """Read the documents of the arrays to which an object may belong, and renew them in `docs`;
    return them as stored, by their keys, and whether one has changed."""
    near = {node: doc for node, doc in docs.items() if key.startswith(node.chunk_prefix)}
    names = [metadata.document_key(node) for node in near]
    values = base.values(names)
    for node, value in zip(near, values, strict=True):
        doc = metadata.parse_json(value)
        if doc is None or not metadata.is_array_document(node, doc):
            del docs[node]
        else:
            docs[node] = doc
    return dict(zip(names, values, strict=True)), any(docs.get(n) != near[n] for n in near)
