"""Checks of the objects of one array: shards, or else chunks.

Indexes are read past every cache, because bit rot changes neither time nor ETag. All entries of an
index are checked together by numpy. A shard with findings is checked again until two checks find
the same: a writer may have come between the requests.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
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
from zarr_shardstore.tools.check import chunks
from zarr_shardstore.tools.check.findings import (
    MAX_FINDINGS,
    CheckResult,
    Finding,
    Kind,
    Level,
    finding,
)
from zarr_shardstore.tools.convert.task import StoredValues
from zarr_shardstore.tools.inspect.find import FoundArray, read_array
from zarr_shardstore.tools.native.draft_documents import array_of_draft

MAX_ATTEMPTS = 16
"""Checks of a shard, or of an array, that writers replace again and again."""

_MAX_UNPICKLED = 1024

_SHARDED_BY_ZARR = stored_arrays.ArrayReader("passthrough")

_Ids: TypeAlias = npt.NDArray[np.intp]
_Index: TypeAlias = shard_format.ShardIndex


def checked_array(found: FoundArray) -> stored_arrays.StoredArray:
    """Return the array of a document as `read_array`, also if zarr itself shards it. Shards in a
    form that is not known here are one value each."""
    doc = found.doc
    if declarations.mark_of(doc) == "passthrough":
        found = replace(found, doc=declarations.without_mark(doc))
    try:
        return read_array(found)
    except UnsupportedError:
        if not declarations.has_sharding_codec(doc):
            raise
        array = _SHARDED_BY_ZARR.read(found.node, doc)
        assert array is not None
        return array


_unpickled: dict[str, ArrayChecker] = {}
"""Checkers that tasks have brought to this process, by name."""


class ArrayChecker:
    """Checks of the objects of one array. It pickles; any thread may use it."""

    def __init__(
        self, base: BaseStoreHandle, node: metadata.Node, doc: Mapping[str, Any], level: Level
    ) -> None:
        self.base, self.level, self.doc = base, level, doc
        self._name = uuid.uuid4().hex
        array = checked_array(FoundArray(node, doc, None))
        geometry = array.document.geometry
        if geometry is None or array.grid_shape is None:
            raise UnsupportedError(f"{metadata.unknown_geometry(doc)}: no chunk is checked")
        self.path, self.array, self.grid = node.path, array, walks.ObjectGrid.of_array(array)
        n_above = len(array.stack) - len(self.grid.below) - self.grid.is_sharded
        transformers = array.stack[:n_above]
        self.above = [t for t in transformers if isinstance(t, stacks.ValueTransformer)]
        self.is_decodable = len(self.above) == len(transformers)
        """True if values of shards are decoded; otherwise only the index is checked."""
        self.geometry, self._chunks = geometry, geometry.chunks
        self._nbytes_of = cache(partial(metadata.chunk_nbytes, doc))
        """Size in bytes of a decoded chunk of a shape, if the data type has a fixed size."""
        self.nbytes = self._nbytes_of(geometry.chunk_shape) if geometry.sides is None else None
        """Size of each decoded chunk in bytes, if it is one number."""
        self.index_key = index_key_of(node, doc)
        self._lock = threading.Lock()
        self.unchecked = ""
        """Reason why chunks are not decoded."""
        self.has_checksum = any(type(t) is stacks.Crc32cTransformer for t in self.above)
        self.codecs: list[str] | None = None
        """Names of the codecs that change bytes, the nearest to the array first."""
        self._decoder_of: Callable[..., Callable[[Any], chunks.Problem]] | None = None
        """Decoder of chunks of a shape."""
        self.view: dict[str, Any] = {}
        """Document of plain chunks of Zarr v2 or v3, for zarr's codecs."""
        how, plain = array.document.declaration, metadata.without_notes(doc)
        try:
            if how is not None:
                plain = declarations.strip(declarations.without_mark(plain), how)
            view = array_of_draft(plain) if node.hierarchy == "draft" else dict(plain)
            self.view, self.codecs = view, chunks.codec_names(view)
            self.has_checksum |= chunks.has_checksum(view)
            if level == "decode":
                decoder_of = cache(partial(chunks.decoder, view))
                decoder_of(geometry.chunk_shape)  # raises if a codec is not installed
                self._decoder_of = decoder_of
        except Exception as error:  # a codec or data type that is not installed here
            self.unchecked = f"chunks are not decoded: {error}"
        if not self.is_decodable:
            self.unchecked = "a storage transformer maps values to others: entries are not decoded"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._name, self.base, self.array.node, self.doc, self.level)

    def task_name(self, keys: Sequence[str]) -> str:
        """Return a name that tasks of other objects, documents or levels do not have."""
        parts = [*self.array.node, json.dumps(self.doc), self.level, *keys]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]

    @cached_property
    def exact_nbytes(self) -> int | None:
        """Size of each stored value in bytes, if no codec compresses it."""
        names = self.codecs
        is_ours = all(type(transformer) is stacks.Crc32cTransformer for transformer in self.above)
        if names is None or self.nbytes is None or set(names) - {"crc32c"} or not is_ours:
            return None
        return self.nbytes + 4 * (len(names) + len(self.above))

    # ------------------------------------------------------------------ shards

    @cached_property
    def consolidated(self) -> consolidated_index.ConsolidatedIndex | None:
        """The consolidated index, if the document declares one that can be read."""
        if self.index_key is None or not self.grid.is_sharded:
            return None
        (value,) = self.base.values([self.index_key], check=False)
        decode = consolidated_index.ConsolidatedIndex.decode
        return None if value is None else decode(value, self.grid.layout.spec)

    def copy_of(self, shard: layouts.ShardRef) -> consolidated_index.IndexCopy | None:
        """Return the index of a shard in the consolidated index, if it has one."""
        with self._lock:  # one thread reads it
            copies = self.consolidated
        suffix = shard.key[len(shard.layout.prefix) :]
        return None if copies is None else copies.find(suffix, shard.spec.n_entries)

    def check_shards(self, keys: Sequence[str], result: CheckResult) -> None:
        """Check shards, and the copies of their indexes."""
        named = self.base.run(stacks.keys_above(self.grid.below, keys))
        shards = [s for key, _ in named if (s := self.grid.layout.shard_of_key(key)) is not None]
        founds = self.read_indexes(shards, consistent=False)
        for shard, found in zip(shards, founds, strict=True):
            earlier: list[Finding] = []
            for _ in range(MAX_ATTEMPTS):
                part = _ShardCheck(self, shard).run(found)
                if part.findings == earlier:
                    break
                earlier = part.findings
                (found,) = self.read_indexes([shard], consistent=True)
            result.add(part)

    def read_indexes(
        self, shards: Sequence[layouts.ShardRef], *, consistent: bool
    ) -> list[requests.Found | Exception]:
        """Read the bytes of indexes past every cache, with the sizes of the shards."""
        gets = [index_reads.index_get(requests.GetIndex(shard, consistent)) for shard in shards]
        founds: list[Any] = self.ask_each(gets)
        is_found = [isinstance(found, requests.Found) for found in founds]
        unsized = [i for i, found in enumerate(founds) if is_found[i] and found.size is None]
        sizes = self.ask_each([requests.GetSize(shards[i].key) for i in unsized])
        for i, size in zip(unsized, sizes, strict=True):
            founds[i] = size if isinstance(size, Exception) else founds[i]._replace(size=size)
        return founds

    def ask_each(self, batch: Sequence[requests.Request]) -> list[Any]:
        """Ask for objects in one round; if that fails, for each alone, with its error as reply."""
        if not batch:
            return []
        try:
            return self.base.run(stacks.ask_through(self.grid.below, batch))
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [reply for request in batch for reply in self.ask_each([request])]

    # ------------------------------------------------------------------ chunks

    def check_values(self, keys: Sequence[str], result: CheckResult) -> None:
        """Check plain chunks."""
        keys = [key for key, _ in self.base.run(stacks.keys_above(self.grid.below, keys))]
        result.n_chunks += len(keys)
        founds = self.ask_each([requests.Get(key) for key in keys])
        for key, found in zip(keys, founds, strict=True):
            problem = self._problem_of_object(key, found, result)
            if problem is not None:  # a writer may be storing it
                (found,) = self.ask_each([requests.Get(key, None, True)])
                problem = self._problem_of_object(key, found, result)
            if problem is not None:
                more = {"array": self.path, "chunk": self.grid.layout.coords_of(key)}
                result.findings.append(finding(problem[0], key, problem[1], **more))

    def _problem_of_object(self, key: str, found: Any, result: CheckResult) -> chunks.Problem:
        if isinstance(found, Exception):
            return _problem_of_error(found)
        if found.value is None:
            return None
        result.n_bytes += len(found.value)
        if found.size not in (None, len(found.value)):
            return "unreadable", f"it has {found.size} bytes, and {len(found.value)} came"
        exact = self.exact_nbytes
        if exact not in (None, len(found.value)):
            return "entry_length", f"it has {len(found.value)} bytes, each chunk takes {exact}"
        return self.problem_of(key, found.value)

    def problem_of(self, key: str, value: Any) -> chunks.Problem:
        """Return the damage of a stored value, if any."""
        try:
            for transformer in reversed(self.above):
                value = transformer.decode(key, value)
        except CorruptValueError as error:
            return "chunk_checksum", error.message
        except MemoryError:  # no damage
            raise
        except Exception as error:
            return "chunk_undecodable", f"{type(error).__name__}: {error}"
        if self.codecs is None:  # not known: any bytes may be a chunk
            return None
        coords = None if self._chunks.uneven is None else self.grid.layout.coords_of(key)
        shape = self._chunks.largest if coords is None else self._chunks.lengths(coords)
        problem = chunks.problem_of_frame(self.codecs, value, self._nbytes_of(shape))
        if problem is None and self._decoder_of is not None:
            problem = self._decoder_of(shape)(value)
        return problem


def _unpickle(name: str, *args: Any) -> ArrayChecker:
    """Return the checker that an earlier task of the same check has brought, or a new one."""
    if name not in _unpickled:
        if len(_unpickled) >= _MAX_UNPICKLED:
            _unpickled.clear()
        _unpickled[name] = ArrayChecker(*args)
    return _unpickled[name]


class _ShardCheck:
    """One check of a shard, given the bytes of its index."""

    def __init__(self, checker: ArrayChecker, shard: layouts.ShardRef) -> None:
        self.checker, self.shard, self.spec = checker, shard, shard.spec
        self.result = CheckResult()

    def run(self, found: requests.Found | Exception) -> CheckResult:
        """Check the shard; one that is gone by now has no findings."""
        result, spec = self.result, self.spec
        if isinstance(found, Exception):
            self._add(*_problem_of_error(found))
            return result
        if found.value is None or found.size is None:
            return result
        size, n = found.size, spec.index_nbytes
        result.n_bytes = len(found.value)
        if size < n:
            text = f"the shard has {size} bytes, its index alone takes {n}"
            self._add("torn_index", text, byte_range=(0, size))
            return result
        at = (0, n) if spec.index.location == "start" else (size - n, size)
        read = index_reads.found_index(requests.GetIndex(self.shard), found)
        index = read.decoded
        if index is None:
            text = "" if read.damage is None else read.damage.message
            kind: Kind = "torn_index" if len(found.value) < n else "index_checksum"
            self._add(kind, text, byte_range=at)
        else:
            sound = self._check_entries(index, size)
            if not (len(index.present_ids()) or spec.index.checksum or size == n):
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
        self._compare_copy(index, found)
        if self.checker.level != "index" and self.checker.is_decodable:
            self._check_chunks(index, sound)
        return result

    def _add(self, kind: Kind, message: str, entry: int | None = None, **more: Any) -> None:
        chunk = None if entry is None else coords_of_entry(self.shard, entry)
        names = {"array": self.checker.path, "shard": self.shard.coords, "chunk": chunk}
        self.result.findings.append(finding(kind, self.shard.key, message, **names, **more))

    def _add_entries(self, index: _Index, kind: Kind, ids: _Ids, text: str) -> None:
        for i in ids[:MAX_FINDINGS].tolist():
            offset, nbytes = index.fields[i].tolist()
            message = f"the entry at {offset} of {nbytes} bytes: {text}"
            self._add(kind, message, i, byte_range=(offset, offset + nbytes))
        self.result.n_omitted += max(0, len(ids) - MAX_FINDINGS)

    def _check_entries(self, index: _Index, size: int) -> _Ids:
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
        for i, other in list(zip(over, others, strict=True))[:MAX_FINDINGS]:
            chunk = list(coords_of_entry(self.shard, other))
            text = f"its bytes are also those of the chunk {chunk}"
            self._add_entries(index, "entry_overlap", ids[i : i + 1], text)
        self.result.n_omitted += max(0, len(over) - MAX_FINDINGS)
        readable: _Ids = sound[~is_wrong]
        return readable

    def _other_form(self, size: int) -> shard_format.IndexFormat | None:
        """Return another form than the declared one in which the index is whole, if any."""
        for spec in specs_of_index(self.spec)[1:]:
            form, n = spec.index, spec.index_nbytes
            if size < n:
                continue
            at = byte_ranges.Range(0, n) if form.location == "start" else byte_ranges.Suffix(n)
            get = requests.Get(self.shard.key, at, True)
            (found,) = self.checker.ask_each([get])
            if isinstance(found, Exception) or found.value is None:
                return None
            try:
                index = shard_format.ShardIndex.decode(found.value, spec)
            except shard_format.IndexDamageError:
                continue
            if is_sound(index, spec, size) and (form.checksum or index.is_packed(size, spec)):
                return form
        return None

    def _compare_copy(self, index: _Index, found: requests.Found) -> None:
        """Compare with the consolidated index. Readers take a copy only for a shard of its version:
        a copy for another version is harmless."""
        copy = self.checker.copy_of(self.shard)
        if copy is None:
            return
        if is_version_of(self.checker.base, self.shard.key, copy, found) is False:
            text = "the shard has changed since its index was consolidated: consolidate again"
            self._add("consolidated_index", text, severity="warning")
        elif copy.size != found.size or not np.array_equal(copy.index.fields, index.fields):
            text = "the consolidated index has another index for this version of the shard"
            self._add("consolidated_index", text, severity="error")

    def _check_chunks(self, index: _Index, ids: _Ids) -> None:
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
            self._add(*_problem_of_error(error))

    def _rounds(
        self, index: _Index, ids: _Ids
    ) -> Iterator[tuple[Sequence[int], Sequence[memoryview]]]:
        starts, nbytes = index.fields[ids].astype(np.int64).T
        stops = starts + nbytes
        key, base, below = self.shard.key, self.checker.base, self.checker.grid.below
        if below:  # a transformer reads the whole shard
            (found,) = base.run(stacks.ask_through(below, [requests.Get(key)]))
            if found.value is None or (len(stops) and len(found.value) < stops.max()):
                raise ShardConflictError(f"the shard {key!r} was changed while it was read")
            places = zip(starts.tolist(), stops.tolist(), strict=True)
            yield ids.tolist(), [found.value[start:stop] for start, stop in places]
            return
        zeros = np.zeros(len(ids), dtype=np.int64)
        wanted = StoredValues(base, [key], zeros, starts, stops, ids.astype(np.int64))
        pieces: list[memoryview] = []
        for part in wanted.rounds():
            if part.continues or part.has_more:  # a value that is larger than a round
                pieces += part.pieces
                if not part.has_more:
                    yield part.ids.tolist(), [memoryview(b"".join(pieces))]
                    pieces = []
            else:
                yield part.ids.tolist(), part.values()


def index_key_of(node: metadata.Node, doc: Mapping[str, Any]) -> str | None:
    """Return the key of the consolidated index that a document declares, if any."""
    if not consolidated_index.declares_consolidated_index(doc):
        return None
    return node.chunk_prefix + consolidated_index.CONSOLIDATED_INDEX_NAME


def is_sound(index: _Index, spec: shard_format.ShardingSpec, size: int) -> bool:
    """Whether an index has entries, and all of them lie in the data of the shard."""
    return len(index.present_ids()) > 0 and not len(index.damaged_ids(size, spec))


def specs_of_index(spec: shard_format.ShardingSpec) -> list[shard_format.ShardingSpec]:
    """Return the specs of all forms of an index, the declared one first."""
    given = product((True, False), ("end", "start"), ("little", "big"))
    forms = [shard_format.IndexFormat(*form) for form in given]  # type: ignore[arg-type]
    forms.sort(key=lambda form: form != spec.index)
    return [shard_format.ShardingSpec(spec.chunks_per_shard, form) for form in forms]


def coords_of_entry(shard: layouts.ShardRef, entry: int) -> chunk_keys.Coords:
    coords = shard.layout.coords_of(shard.chunk_key(entry))
    assert coords is not None
    return coords


def _form_text(form: shard_format.IndexFormat) -> str:
    checksum = "with a checksum" if form.checksum else "without a checksum"
    return f"{form.endian} endian, at the {form.location}, {checksum}"


def is_version_of(
    base: BaseStoreHandle, key: str, copy: consolidated_index.IndexCopy, found: requests.Found
) -> bool | None:
    """Return whether a shard has the recorded version; ``None`` if the store has no versions."""
    if isinstance(copy.version, str):
        etag: str | None = getattr(found.version, "etag", None)
        return None if etag is None else etag.strip('"') == copy.version.strip('"')
    modified_s: int | None = getattr(found.version, "modified_s", None)
    backend = base.backend
    if isinstance(backend, LocalBackend) and (state := fs.state_of(backend.path_of(key))):
        modified_s = state[2] // 1_000_000_000
    return None if modified_s is None else modified_s == copy.version


def _problem_of_error(error: Exception) -> tuple[Kind, str]:
    if isinstance(error, CorruptValueError):
        return "chunk_checksum", error.message
    return "unreadable", f"{type(error).__name__}: {error}"
