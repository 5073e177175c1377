"""Checks of the objects of one array: shard indexes, entries, and the decoded chunks.

A task checks a few objects; it is independent of all others, small and picklable. Of an index all
entries are checked at a time, by numpy. A shard in which something is found is checked again
until the same is found twice: a writer may have come between the requests.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import (
    BaseStoreHandle,
    LocalBackend,
    byte_ranges,
    chunk_keys,
    consolidated_index,
    declarations,
    fs,
    index_reads,
    layouts,
    metadata,
    requests,
    shard_format,
    stacks,
    stored_arrays,
    walks,
)
from zarr_shardstore.errors import CorruptValueError, ShardConflictError, UnsupportedError
from zarr_shardstore.tools.check.chunks import Problem, codec_names, decoder, problem_of_frame
from zarr_shardstore.tools.check.findings import Finding, Kind, Level, Severity, finding
from zarr_shardstore.tools.convert.task import StoredValues
from zarr_shardstore.tools.inspect.find import FoundArray, read_array
from zarr_shardstore.tools.native.draft_documents import array_of_draft

_MAX_ATTEMPTS = 16
"""To check a shard that writers replace again and again."""

_MAX_FINDINGS = 1000
"""Of each kind in one object; the others are counted."""

_LEFT_TO_ZARR = stored_arrays.ArrayReader("passthrough")

_Ids: TypeAlias = npt.NDArray[np.intp]


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


@dataclass(slots=True)
class CheckResult:
    """Result of one task, or of several."""

    findings: list[Finding] = field(default_factory=list)
    n_objects: int = 0
    n_chunks: int = 0
    n_bytes: int = 0
    n_omitted: int = 0
    task: str = ""
    """Name of the task, for the notes of a check."""

    def add(self, other: CheckResult) -> None:
        self.findings += other.findings
        for name in ("n_objects", "n_chunks", "n_bytes", "n_omitted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


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
    doc, is_left = found.doc, declarations.is_native_by_choice(found.doc)
    try:
        return read_array(replace(found, doc=declarations.without_mark(doc) if is_left else doc))
    except UnsupportedError:
        array = (
            _LEFT_TO_ZARR.read(found.node, doc) if declarations.has_sharding_codec(doc) else None
        )
        if array is None:
            raise
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
            view = (
                plain if how is None else declarations.strip(declarations.without_mark(plain), how)
            )
            view = array_of_draft(view) if node.hierarchy == "draft" else dict(view)
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
                spec = self.grid.layout.spec
                found = (
                    None
                    if value is None
                    else consolidated_index.ConsolidatedIndex.decode(value, spec)
                )
                self._copies.append(found)
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
            part = self._check_shard(base, shard, found, copies)
            earlier: list[Finding] = []
            for _ in range(_MAX_ATTEMPTS):
                if part.findings == earlier:
                    break
                earlier = part.findings
                (found,) = self.read_indexes(base, [shard], consistent=True)
                part = self._check_shard(base, shard, found, copies)
            result.add(part)

    def read_indexes(
        self, base: BaseStoreHandle, shards: Sequence[layouts.ShardRef], *, consistent: bool
    ) -> list[requests.Found | Exception]:
        """Read the stored indexes, past every cache, with the sizes of the shards."""
        below = self.grid.below
        gets = [index_reads.index_get(requests.GetIndex(shard, consistent)) for shard in shards]
        founds: list[Any] = ask_each(base, gets, below)
        unsized = [
            i for i, f in enumerate(founds) if isinstance(f, requests.Found) and f.size is None
        ]
        sizes = ask_each(base, [requests.GetSize(shards[i].key) for i in unsized], below)
        for i, size in zip(unsized, sizes, strict=True):
            founds[i] = size if isinstance(size, Exception) else founds[i]._replace(size=size)
        return founds

    def _check_shard(
        self,
        base: BaseStoreHandle,
        shard: layouts.ShardRef,
        found: requests.Found | Exception,
        copies: consolidated_index.ConsolidatedIndex | None,
    ) -> CheckResult:
        result = CheckResult()
        if isinstance(found, Exception):
            result.findings.append(self._unreadable(shard.key, found, shard=shard.coords))
            return result
        if found.value is None or found.size is None:
            return result  # it was erased concurrently
        spec, size = shard.layout.spec, found.size
        result.n_bytes = len(found.value)
        read = index_reads.found_index(requests.GetIndex(shard), found)
        index, new = read.decoded, partial(self._finding, shard)
        at = (0, spec.index_nbytes) if spec.index.location == "start" else None
        at = at or (max(0, size - spec.index_nbytes), size)
        damage = shard_format.IndexDamageError("") if read.damage is None else read.damage
        if size < spec.index_nbytes:
            text = f"the shard has {size} bytes, its index alone takes {spec.index_nbytes}"
            result.findings.append(new("torn_index", text, byte_range=(0, size)))
            return result
        if index is None:
            is_torn = len(found.value) < spec.index_nbytes
            kind: Kind = "torn_index" if is_torn else "index_checksum"
            result.findings.append(new(kind, damage.message, byte_range=at))
        else:
            sound = self._check_entries(shard, index, size, result)
            if not (len(index.present_ids()) or spec.index.checksum or size == spec.index_nbytes):
                text = f"no entry of {size} bytes: writers remove a shard without entries"
                result.findings.append(new("torn_index", text, byte_range=at))
            result.n_chunks = len(np.intersect1d(index.present_ids(), shard.entries_of()))
        if any(f.severity == "error" and f.kind != "entry_length" for f in result.findings):
            form = self._other_form(base, shard, size)
            if form is not None:
                text = f"the document declares the index as {_form_text(spec.index)}, the shard "
                text += f"has one as {_form_text(form)}"
                result.findings = [new("index_form", text)]
                return result
        if index is None:
            return result
        if copies is not None:
            copy = copies.find(shard.key[len(shard.layout.prefix) :])
            if copy is not None and (said := _stale(base, shard.key, copy, index, found)):
                result.findings.append(new("consolidated_index", said[0], severity=said[1]))
        if self.level != "index" and self.is_decodable:
            self._check_chunks(base, shard, index, sound, result)
        return result

    def _check_entries(
        self,
        shard: layouts.ShardRef,
        index: shard_format.ShardIndex,
        size: int,
        result: CheckResult,
    ) -> _Ids:
        """Add findings on the entries of an index; return the ids of those that may be read."""
        spec = shard.layout.spec
        present, bad = index.present_ids(), index.damaged_ids(size, spec)
        self._add(result, shard, index, "entry_out_of_bounds", bad, f"it leaves the {size} bytes")
        sound = np.setdiff1d(present, bad, assume_unique=True)
        starts, nbytes = index.fields[sound].astype(np.int64).T
        exact = self.exact_nbytes
        is_wrong = nbytes == 0 if self.codecs else np.zeros(len(sound), dtype=bool)
        text = "a compressed chunk has bytes"
        if exact is not None:
            is_wrong, text = nbytes != exact, f"each chunk takes {exact} bytes"
        self._add(result, shard, index, "entry_length", sound[is_wrong], text)
        is_some = nbytes > 0
        ids, starts, stops = sound[is_some], starts[is_some], (starts + nbytes)[is_some]
        order = np.argsort(starts, kind="stable")
        ids, starts, stops = ids[order], starts[order], stops[order]
        reached = np.maximum.accumulate(stops)
        over = 1 + np.flatnonzero(starts[1:] < reached[:-1])
        others = ids[np.searchsorted(reached, starts[over], side="right")]
        for entry, other in list(zip(ids[over], others, strict=True))[:_MAX_FINDINGS]:
            text = f"its bytes are also those of the chunk {list(coords_of_entry(shard, other))}"
            self._add(result, shard, index, "entry_overlap", np.array([entry]), text)
        result.n_omitted += max(0, len(over) - _MAX_FINDINGS)
        left: _Ids = sound[~is_wrong]
        return left

    def _add(
        self,
        result: CheckResult,
        shard: layouts.ShardRef,
        index: shard_format.ShardIndex,
        kind: Kind,
        ids: _Ids,
        text: str,
    ) -> None:
        for i in ids[:_MAX_FINDINGS].tolist():
            offset, nbytes = index.fields[i].tolist()
            message = f"the entry at {offset} of {nbytes} bytes: {text}"
            where = (offset, offset + nbytes)
            result.findings.append(self._finding(shard, kind, message, entry=i, byte_range=where))
        result.n_omitted += max(0, len(ids) - _MAX_FINDINGS)

    def _other_form(
        self, base: BaseStoreHandle, shard: layouts.ShardRef, size: int
    ) -> shard_format.IndexFormat | None:
        """Return the form in which the index of a shard is whole, other than the declared one."""
        for spec in specs_of_index(shard.layout.spec)[1:]:
            form = spec.index
            if size < spec.index_nbytes:
                continue
            n = spec.index_nbytes
            get = requests.Get(
                shard.key,
                byte_ranges.Range(0, n) if form.location == "start" else byte_ranges.Suffix(n),
                True,
            )
            (found,) = ask_each(base, [get], self.grid.below)
            if isinstance(found, Exception) or found.value is None:
                return None
            try:
                index = shard_format.ShardIndex.decode(found.value, spec)
            except shard_format.IndexDamageError:
                continue
            is_sound = len(index.present_ids()) and not len(index.damaged_ids(size, spec))
            if is_sound and (form.checksum or index.is_packed(size, spec)):
                return form
        return None

    def _check_chunks(
        self,
        base: BaseStoreHandle,
        shard: layouts.ShardRef,
        index: shard_format.ShardIndex,
        ids: _Ids,
        result: CheckResult,
    ) -> None:
        """Check the bytes of entries, a few MiB at a time."""
        starts, nbytes = index.fields[ids].astype(np.int64).T
        order = np.argsort(starts, kind="stable")
        ids, starts, nbytes = ids[order], starts[order], nbytes[order]
        try:
            for some, values in self._rounds(base, shard, ids, starts, starts + nbytes):
                keys = shard.chunk_keys(np.array(some, dtype=np.intp))
                for i, key, value in zip(some, keys, values, strict=True):
                    result.n_bytes += len(value)
                    problem = self.problem_of(key, value)
                    if problem is not None:
                        start = int(index.fields[i, 0])
                        where = (start, start + int(index.fields[i, 1]))
                        result.findings.append(
                            self._finding(shard, *problem, entry=i, byte_range=where)
                        )
        except Exception as error:
            result.findings.append(self._unreadable(shard.key, error, shard=shard.coords))

    def _rounds(
        self,
        base: BaseStoreHandle,
        shard: layouts.ShardRef,
        ids: _Ids,
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
    ) -> Iterator[tuple[Sequence[int], Sequence[memoryview]]]:
        if self.grid.below:  # a transformer reads the whole shard
            (found,) = base.run(stacks.handle(self.grid.below, [requests.Get(shard.key)]))
            if found.value is None or (len(stops) and len(found.value) < stops.max()):
                raise ShardConflictError(f"the shard {shard.key!r} was changed while it was read")
            places = zip(starts.tolist(), stops.tolist(), strict=True)
            yield ids.tolist(), [found.value[start:stop] for start, stop in places]
            return
        zeros = np.zeros(len(ids), dtype=np.int64)
        wanted = StoredValues(base, [shard.key], zeros, starts, stops, ids.astype(np.int64))
        pieces: list[memoryview] = []
        for part in wanted.rounds():
            if part.continues or part.has_more:  # one value that is larger than a round
                pieces += part.pieces
                if not part.has_more:
                    yield part.ids.tolist(), [memoryview(b"".join(pieces))]
                    pieces = []
            else:
                yield part.ids.tolist(), part.values()

    # ------------------------------------------------------------------ values

    def check_values(self, base: BaseStoreHandle, keys: Sequence[str], result: CheckResult) -> None:
        """Check objects that are no shards, each of which is a chunk."""
        stack = self.array.stack
        if stack:
            keys = [key for key, _ in base.run(stacks.keys_above(stack, keys))]
        result.n_chunks += len(keys)
        for key, found in zip(
            keys, ask_each(base, [requests.Get(k) for k in keys], stack), strict=True
        ):
            problem = self._problem_of_object(key, found, result)
            if problem is not None:  # it may have been stored in this moment
                (found,) = ask_each(base, [requests.Get(key, None, True)], stack)
                problem = self._problem_of_object(key, found, result)
            if problem is not None:
                chunk = self.grid.layout.coords_of(key)
                result.findings.append(
                    finding(problem[0], key, problem[1], array=self.path, chunk=chunk)
                )

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

    def _finding(
        self,
        shard: layouts.ShardRef,
        kind: Kind,
        message: str,
        *,
        entry: int | None = None,
        **more: Any,
    ) -> Finding:
        chunk = None if entry is None else coords_of_entry(shard, entry)
        names = {"array": self.path, "shard": shard.coords, "chunk": chunk}
        return finding(kind, shard.key, message, **names, **more)

    def _unreadable(self, key: str, error: Exception, **more: Any) -> Finding:
        if isinstance(error, CorruptValueError):
            return finding("chunk_checksum", key, error.message, array=self.path, **more)
        message = f"{type(error).__name__}: {error}"
        return finding("unreadable", key, message, array=self.path, **more)


def ask_each(
    base: BaseStoreHandle, batch: Sequence[requests.Request], stack: stacks.Stack
) -> list[Any]:
    """Ask for one round above a stack; if that fails, for each alone, with its error as reply."""
    if not batch:
        return []
    try:
        return base.run(stacks.handle(stack, batch))
    except Exception as error:
        if len(batch) == 1:
            return [error]
    return [reply for request in batch for reply in ask_each(base, [request], stack)]


def specs_of_index(spec: shard_format.ShardingSpec) -> list[shard_format.ShardingSpec]:
    """Return the specs of all forms of an index, the declared one first."""
    forms = product((True, False), ("end", "start"), ("little", "big"))
    others = [shard_format.IndexFormat(*form) for form in forms]  # type: ignore[arg-type]
    others.sort(key=lambda form: form != spec.index)
    return [shard_format.ShardingSpec(spec.chunks_per_shard, form) for form in others]


def coords_of_entry(shard: layouts.ShardRef, entry: int) -> chunk_keys.Coords:
    cps = shard.layout.spec.chunks_per_shard
    inside = np.unravel_index(entry, cps) if cps else ()
    return tuple(s * n + int(i) for s, n, i in zip(shard.coords, cps, inside, strict=True))


def _form_text(form: shard_format.IndexFormat) -> str:
    checksum = "with a checksum" if form.checksum else "without a checksum"
    return f"{form.endian} endian, at the {form.location}, {checksum}"


def _stale(
    base: BaseStoreHandle,
    key: str,
    copy: consolidated_index.IndexCopy,
    index: shard_format.ShardIndex,
    found: requests.Found,
) -> tuple[str, Severity] | None:
    """Return the difference of a shard and its copy in the consolidated index, if there is one.

    Readers take a copy only for a shard of its version: a copy of another one harms none.
    """
    is_same = copy.size == found.size and np.array_equal(copy.index.fields, index.fields)
    if is_version_of(base, key, copy, found) is not False:
        text = "the consolidated index has another index for this version of the shard"
        return None if is_same else (text, "error")
    return "the shard has changed since its index was consolidated: consolidate again", "warning"


def is_version_of(
    base: BaseStoreHandle, key: str, copy: consolidated_index.IndexCopy, found: requests.Found
) -> bool | None:
    """Return whether a shard has the recorded version; ``None`` if the store does not tell."""
    now: Any = getattr(found.version, "etag", None)
    if isinstance(copy.version, int):
        now = getattr(found.version, "modified_s", None)
        if isinstance(base.backend, LocalBackend) and (
            state := fs.state_of(base.backend.path_of(key))
        ):
            now = state[2] // 1_000_000_000
    recorded = copy.version.strip('"') if isinstance(copy.version, str) else copy.version
    if now is None:
        return None
    return bool((now.strip('"') if isinstance(now, str) else now) == recorded)
