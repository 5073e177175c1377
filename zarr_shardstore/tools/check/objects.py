"""Checks of the objects of one array.

A task checks a few objects; it is independent of all others, small and picklable. A shard in which
something is found is checked again until the same is found twice: a writer may have come between
the requests.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from zarr_shardstore.access import (
    BaseStoreHandle,
    consolidated_index,
    declarations,
    index_reads,
    layouts,
    metadata,
    requests,
    stacks,
    stored_arrays,
    walks,
)
from zarr_shardstore.errors import CorruptValueError, UnsupportedError
from zarr_shardstore.tools.check.chunks import Problem, codec_names, decoder, problem_of_frame
from zarr_shardstore.tools.check.findings import CheckResult, Finding, Level, finding
from zarr_shardstore.tools.check.shards import ShardCheck
from zarr_shardstore.tools.inspect.find import FoundArray, read_array
from zarr_shardstore.tools.native.draft_documents import array_of_draft

_MAX_ATTEMPTS = 16
"""To check a shard that writers replace again and again."""

_LEFT_TO_ZARR = stored_arrays.ArrayReader("passthrough")


@dataclass(frozen=True, slots=True)
class ArrayCheck:
    """The part that all tasks of one array share."""

    base: BaseStoreHandle
    node: metadata.Node
    doc: str
    """The stored document as JSON."""
    level: Level
    run: str
    """Number of the run of a check: nothing is remembered from an earlier one."""
    index_key: str | None = None
    """Key of the consolidated index, if the document declares one."""

    def name(self, keys: Sequence[str]) -> str:
        """Return a name that tasks of other objects, documents or levels do not have."""
        parts = [self.node.hierarchy, self.node.path, self.doc, self.level, *keys]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]

    @property
    def checker(self) -> ArrayChecker:
        return checker_of(self.node, self.doc, self.level, self.run)


def check_objects(task: ArrayCheck, keys: Sequence[str]) -> CheckResult:
    """Check some objects of an array; those that are gone by now are left out."""
    checker = task.checker
    found = CheckResult(n_objects=len(keys), task=task.name(keys))
    if not checker.grid.is_sharded:
        checker.check_values(task.base, keys, found)
        return found
    checker.check_shards(task.base, keys, found, checker.copies(task.base, task.index_key))
    return found


def checked_array(found: FoundArray) -> stored_arrays.StoredArray:
    """Return the array of a document as `read_array`, also if its sharding is left to zarr. Shards
    that hold something else than chunks are one value each."""
    doc, is_left = found.doc, declarations.mark_of(found.doc) == "passthrough"
    try:
        return read_array(replace(found, doc=declarations.without_mark(doc) if is_left else doc))
    except UnsupportedError:
        if not declarations.has_sharding_codec(doc):
            raise
        array = _LEFT_TO_ZARR.read(found.node, doc)
        assert array is not None
        return array


@lru_cache(maxsize=1024)
def checker_of(node: metadata.Node, doc: str, level: Level, _: str) -> ArrayChecker:
    return ArrayChecker(node, json.loads(doc), level)


class ArrayChecker:
    """Checks of the objects of one array. Thread safety: any thread may use it."""

    def __init__(self, node: metadata.Node, doc: Mapping[str, Any], level: Level) -> None:
        self.level = level
        array = checked_array(FoundArray(node, doc, None))
        geometry = array.document.geometry
        if geometry is None or array.grid_shape is None:
            raise UnsupportedError("its chunk grid or its chunk keys are not known here")
        self.path, self.array, self.grid = node.path, array, walks.ObjectGrid.of_array(array)
        n_above = len(array.stack) - len(self.grid.below) - self.grid.is_sharded
        transformers = array.stack[:n_above]
        self.above = [t for t in transformers if isinstance(t, stacks.ValueTransformer)]
        self.is_decodable = len(self.above) == len(transformers)
        """Whether values of shards are decoded here; otherwise only the index is checked."""
        self.nbytes = metadata.chunk_nbytes(doc, geometry.chunk_shape)
        if not self.grid.is_sharded:
            self.above, self.is_decodable = [], True
        how = array.document.declaration
        plain = metadata.without_notes(doc)
        self._copies: list[consolidated_index.ConsolidatedIndex | None] = []
        self._lock = threading.Lock()
        self.unchecked = ""
        """Reason why chunks are not decoded."""
        self.codecs: list[str] | None = None
        """Names of the codecs that change bytes, the nearest to the array first."""
        self._decode: Callable[[Any], Problem] | None = None
        self.view: dict[str, Any] = {}
        """Document of plain chunks of Zarr v2 or v3, for zarr's codecs."""
        try:
            if how is not None:
                plain = declarations.strip(declarations.without_mark(plain), how)
            view = array_of_draft(plain) if node.hierarchy == "draft" else dict(plain)
            self.view, self.codecs = view, codec_names(view)
            if level == "decode":
                self._decode = decoder(view, geometry.chunk_shape)
        except Exception as error:  # a codec or data type that is not installed here
            self.unchecked = f"chunks are not decoded: {error}"
        if not self.is_decodable:
            self.unchecked = "a storage transformer maps values to others: entries are not decoded"

    @cached_property
    def exact_nbytes(self) -> int | None:
        """Size of each stored value, if nothing compresses it."""
        names = self.codecs
        is_ours = all(type(transformer) is stacks.Crc32cTransformer for transformer in self.above)
        if names is None or self.nbytes is None or set(names) - {"crc32c"} or not is_ours:
            return None
        return self.nbytes + 4 * (len(names) + len(self.above))

    # ------------------------------------------------------------------ shards

    def copies(
        self, base: BaseStoreHandle, key: str | None
    ) -> consolidated_index.ConsolidatedIndex | None:
        """Return the consolidated index of the array, if it has one that can be read."""
        if key is None or not self.grid.is_sharded:
            return None
        with self._lock:
            if not self._copies:
                (value,) = base.values([key], check=False)
                decode = consolidated_index.ConsolidatedIndex.decode
                copies = None if value is None else decode(value, self.grid.layout.spec)
                self._copies.append(copies)
        return self._copies[0]

    def check_shards(
        self,
        base: BaseStoreHandle,
        keys: Sequence[str],
        result: CheckResult,
        copies: consolidated_index.ConsolidatedIndex | None,
    ) -> None:
        named: list[tuple[str, int | None]] = [(key, None) for key in keys]
        if self.grid.below:
            named = base.run(stacks.keys_above(self.grid.below, keys))
        shards = [s for key, _ in named if (s := self.grid.layout.shard_of_key(key)) is not None]
        founds = self.read_indexes(base, shards, consistent=False)
        for shard, found in zip(shards, founds, strict=True):
            part = ShardCheck(self, base, shard).run(found, copies)
            earlier: list[Finding] = []
            for _ in range(_MAX_ATTEMPTS):
                if part.findings == earlier:
                    break
                earlier = part.findings
                (found,) = self.read_indexes(base, [shard], consistent=True)
                part = ShardCheck(self, base, shard).run(found, copies)
            result.add(part)

    def read_indexes(
        self, base: BaseStoreHandle, shards: Sequence[layouts.ShardRef], *, consistent: bool
    ) -> list[requests.Found | Exception]:
        """Read the stored indexes, past every cache, with the sizes of the shards."""
        below = self.grid.below
        gets = [index_reads.index_get(requests.GetIndex(shard, consistent)) for shard in shards]
        founds: list[Any] = ask_each(base, gets, below)
        is_found = [isinstance(found, requests.Found) for found in founds]
        unsized = [i for i, found in enumerate(founds) if is_found[i] and found.size is None]
        sizes = ask_each(base, [requests.GetSize(shards[i].key) for i in unsized], below)
        for i, size in zip(unsized, sizes, strict=True):
            founds[i] = size if isinstance(size, Exception) else founds[i]._replace(size=size)
        return founds

    def check_values(self, base: BaseStoreHandle, keys: Sequence[str], result: CheckResult) -> None:
        """Check objects that are no shards, each of which is a chunk."""
        stack = self.array.stack
        if stack:
            keys = [key for key, _ in base.run(stacks.keys_above(stack, keys))]
        result.n_chunks += len(keys)
        founds = ask_each(base, [requests.Get(key) for key in keys], stack)
        for key, found in zip(keys, founds, strict=True):
            problem = self._problem_of_object(key, found, result)
            if problem is not None:  # it may have been stored in this moment
                (found,) = ask_each(base, [requests.Get(key, None, True)], stack)
                problem = self._problem_of_object(key, found, result)
            if problem is not None:
                more = {"array": self.path, "chunk": self.grid.layout.coords_of(key)}
                result.findings.append(finding(problem[0], key, problem[1], **more))

    def _problem_of_object(self, key: str, found: Any, result: CheckResult) -> Problem:
        if isinstance(found, CorruptValueError):
            return "chunk_checksum", found.message
        if isinstance(found, Exception):
            return "unreadable", f"{type(found).__name__}: {found}"
        if found.value is None:
            return None
        result.n_bytes += len(found.value)
        if found.size not in (None, len(found.value)):
            return "unreadable", f"it has {found.size} bytes, and {len(found.value)} came"
        exact = self.exact_nbytes
        if exact not in (None, len(found.value)):
            return "entry_length", f"it has {len(found.value)} bytes, each chunk takes {exact}"
        return self.problem_of(key, found.value)

    def problem_of(self, key: str, value: Any) -> Problem:
        """Return the damage of a stored value; ``None`` if there is none."""
        try:
            for transformer in reversed(self.above):
                value = transformer.decode(key, value)
        except CorruptValueError as error:
            return "chunk_checksum", error.message
        except Exception as error:
            return "chunk_undecodable", f"{type(error).__name__}: {error}"
        problem = problem_of_frame(self.codecs or [], value, self.nbytes)
        if problem is None and self._decode is not None:
            problem = self._decode(value)
        return problem


def ask_each(
    base: BaseStoreHandle, batch: Sequence[requests.Request], stack: stacks.Stack
) -> list[Any]:
    """Ask for one round above a stack; if that fails, for each alone, with its error as reply."""
    if not batch:
        return []
    try:
        return base.run(stacks.ask_through(stack, batch))
    except Exception as error:
        if len(batch) == 1:
            return [error]
    return [reply for request in batch for reply in ask_each(base, [request], stack)]
