"""Check of one shard: its index, the entries, and the bytes of its chunks.

Of an index all entries are checked at a time, by numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import (
    BaseStoreHandle,
    LocalBackend,
    byte_ranges,
    chunk_keys,
    consolidated_index,
    fs,
    index_reads,
    layouts,
    requests,
    shard_format,
    stacks,
)
from zarr_shardstore.errors import CorruptValueError, ShardConflictError
from zarr_shardstore.tools.check.findings import CheckResult, Kind, finding
from zarr_shardstore.tools.convert.task import StoredValues

if TYPE_CHECKING:
    from zarr_shardstore.tools.check.objects import ArrayChecker

_MAX_FINDINGS = 1000
"""Of each kind in one object; the others are counted."""

_Ids: TypeAlias = npt.NDArray[np.intp]


class ShardCheck:
    """Check of a shard, given its index as it was read; `result` has what was found."""

    def __init__(
        self, checker: ArrayChecker, base: BaseStoreHandle, shard: layouts.ShardRef
    ) -> None:
        self.checker, self.base, self.shard = checker, base, shard
        self.spec, self.below = shard.layout.spec, checker.grid.below
        self.result = CheckResult()

    def run(
        self, found: requests.Found | Exception, copies: consolidated_index.ConsolidatedIndex | None
    ) -> CheckResult:
        """Check the shard; one that is gone by now has no findings."""
        result, spec = self.result, self.spec
        if isinstance(found, Exception):
            self._add_unreadable(found)
            return result
        if found.value is None or found.size is None:
            return result
        size = found.size
        result.n_bytes = len(found.value)
        read = index_reads.found_index(requests.GetIndex(self.shard), found)
        index = read.decoded
        at = (max(0, size - spec.index_nbytes), size)
        at = (0, spec.index_nbytes) if spec.index.location == "start" else at
        if size < spec.index_nbytes:
            text = f"the shard has {size} bytes, its index alone takes {spec.index_nbytes}"
            self._add("torn_index", text, byte_range=(0, size))
            return result
        if index is None:
            is_torn = len(found.value) < spec.index_nbytes
            text = "" if read.damage is None else read.damage.message
            self._add("torn_index" if is_torn else "index_checksum", text, byte_range=at)
        else:
            sound = self._check_entries(index, size)
            if not (len(index.present_ids()) or spec.index.checksum or size == spec.index_nbytes):
                text = f"no entry of {size} bytes: writers remove a shard without entries"
                self._add("torn_index", text, byte_range=at)
            in_grid = self.shard.entries_of()
            result.n_chunks = len(np.intersect1d(index.present_ids(), in_grid, assume_unique=True))
        if any(f.severity == "error" and f.kind != "entry_length" for f in result.findings):
            form = self._other_form(size)
            if form is not None:
                text = f"the document declares the index as {_form_text(spec.index)}, the shard "
                text += f"has one as {_form_text(form)}"
                result.findings.clear()
                self._add("index_form", text)
                return result
        if index is None:
            return result
        if copies is not None:
            self._compare_copy(copies, index, found)
        if self.checker.level != "index" and self.checker.is_decodable:
            self._check_chunks(index, sound)
        return result

    def _add(self, kind: Kind, message: str, entry: int | None = None, **more: Any) -> None:
        chunk = None if entry is None else coords_of_entry(self.shard, entry)
        names = {"array": self.checker.path, "shard": self.shard.coords, "chunk": chunk}
        self.result.findings.append(finding(kind, self.shard.key, message, **names, **more))

    def _add_unreadable(self, error: Exception) -> None:
        if isinstance(error, CorruptValueError):
            self._add("chunk_checksum", error.message)
        else:
            self._add("unreadable", f"{type(error).__name__}: {error}")

    def _add_entries(
        self, index: shard_format.ShardIndex, kind: Kind, ids: _Ids, text: str
    ) -> None:
        for i in ids[:_MAX_FINDINGS].tolist():
            offset, nbytes = index.fields[i].tolist()
            message = f"the entry at {offset} of {nbytes} bytes: {text}"
            self._add(kind, message, i, byte_range=(offset, offset + nbytes))
        self.result.n_omitted += max(0, len(ids) - _MAX_FINDINGS)

    def _check_entries(self, index: shard_format.ShardIndex, size: int) -> _Ids:
        """Add findings on the entries of an index; return the ids of those that may be read."""
        present, bad = index.present_ids(), index.damaged_ids(size, self.spec)
        self._add_entries(index, "entry_out_of_bounds", bad, f"it leaves the {size} bytes")
        sound: _Ids = np.setdiff1d(present, bad, assume_unique=True)
        starts, nbytes = index.fields[sound].astype(np.int64).T
        exact = self.checker.exact_nbytes
        is_wrong = nbytes == 0 if self.checker.codecs else np.zeros(len(sound), dtype=bool)
        text = "a compressed chunk has bytes"
        if exact is not None:
            is_wrong, text = nbytes != exact, f"each chunk takes {exact} bytes"
        self._add_entries(index, "entry_length", sound[is_wrong], text)
        is_some = nbytes > 0
        ids, starts, stops = sound[is_some], starts[is_some], (starts + nbytes)[is_some]
        order = np.argsort(starts, kind="stable")
        ids, starts, stops = ids[order], starts[order], stops[order]
        reached = np.maximum.accumulate(stops)
        over = 1 + np.flatnonzero(starts[1:] < reached[:-1])
        others = ids[np.searchsorted(reached, starts[over], side="right")]
        for i, other in list(zip(over, others, strict=True))[:_MAX_FINDINGS]:
            chunk = list(coords_of_entry(self.shard, other))
            text = f"its bytes are also those of the chunk {chunk}"
            self._add_entries(index, "entry_overlap", ids[i : i + 1], text)
        self.result.n_omitted += max(0, len(over) - _MAX_FINDINGS)
        readable: _Ids = sound[~is_wrong]
        return readable

    def _other_form(self, size: int) -> shard_format.IndexFormat | None:
        """Return the form in which the index of a shard is whole, other than the declared one."""
        for spec in specs_of_index(self.spec)[1:]:
            form, n = spec.index, spec.index_nbytes
            if size < n:
                continue
            at = byte_ranges.Range(0, n) if form.location == "start" else byte_ranges.Suffix(n)
            try:
                get = requests.Get(self.shard.key, at, True)
                (found,) = self.base.run(stacks.ask_through(self.below, [get]))
            except Exception:  # of any client
                return None
            if found.value is None:
                return None
            try:
                index = shard_format.ShardIndex.decode(found.value, spec)
            except shard_format.IndexDamageError:
                continue
            is_sound = len(index.present_ids()) and not len(index.damaged_ids(size, spec))
            if is_sound and (form.checksum or index.is_packed(size, spec)):
                return form
        return None

    def _compare_copy(
        self,
        copies: consolidated_index.ConsolidatedIndex,
        index: shard_format.ShardIndex,
        found: requests.Found,
    ) -> None:
        """Compare with the consolidated index. Readers take a copy only for a shard of its version:
        a copy of another one harms none."""
        copy = copies.find(self.shard.key[len(self.shard.layout.prefix) :])
        if copy is None:
            return
        if is_version_of(self.base, self.shard.key, copy, found) is False:
            text = "the shard has changed since its index was consolidated: consolidate again"
            self._add("consolidated_index", text, severity="warning")
        elif copy.size != found.size or not np.array_equal(copy.index.fields, index.fields):
            text = "the consolidated index has another index for this version of the shard"
            self._add("consolidated_index", text, severity="error")

    def _check_chunks(self, index: shard_format.ShardIndex, ids: _Ids) -> None:
        """Check the bytes of entries, a few MiB at a time."""
        ids = ids[np.argsort(index.fields[ids, 0].astype(np.int64), kind="stable")]
        try:
            for some, values in self._rounds(index, ids):
                keys = self.shard.chunk_keys(np.array(some, dtype=np.intp))
                for i, key, value in zip(some, keys, values, strict=True):
                    self.result.n_bytes += len(value)
                    problem = self.checker.problem_of(key, value)
                    if problem is not None:
                        start, nbytes = index.fields[i].tolist()
                        self._add(*problem, i, byte_range=(start, start + nbytes))
        except Exception as error:
            self._add_unreadable(error)

    def _rounds(
        self, index: shard_format.ShardIndex, ids: _Ids
    ) -> Iterator[tuple[Sequence[int], Sequence[memoryview]]]:
        starts, nbytes = index.fields[ids].astype(np.int64).T
        stops = starts + nbytes
        key = self.shard.key
        if self.below:  # a transformer reads the whole shard
            (found,) = self.base.run(stacks.ask_through(self.below, [requests.Get(key)]))
            if found.value is None or (len(stops) and len(found.value) < stops.max()):
                raise ShardConflictError(f"the shard {key!r} was changed while it was read")
            places = zip(starts.tolist(), stops.tolist(), strict=True)
            yield ids.tolist(), [found.value[start:stop] for start, stop in places]
            return
        zeros = np.zeros(len(ids), dtype=np.int64)
        wanted = StoredValues(self.base, [key], zeros, starts, stops, ids.astype(np.int64))
        pieces: list[memoryview] = []
        for part in wanted.rounds():
            if part.continues or part.has_more:  # one value that is larger than a round
                pieces += part.pieces
                if not part.has_more:
                    yield part.ids.tolist(), [memoryview(b"".join(pieces))]
                    pieces = []
            else:
                yield part.ids.tolist(), part.values()


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
