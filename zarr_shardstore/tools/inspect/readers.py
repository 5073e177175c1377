"""Programs that read an array without this package, in the words of every report.

A phrase names the extensions that a reader needs beyond the specification of Zarr v3 or v2.
Source: spec_notes/readers.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zarr_shardstore.access import declarations, metadata, transformer_list
from zarr_shardstore.errors import ShardStoreError

ONLY_HERE = "only through this package"
_DRAFT = "this package and zarr-python 2.13 to 2.18"
_UNFINISHED = "no program until its conversion is finished"
_UNKNOWN = "not known: its metadata is not understood here"

_OURS = {transformer_list.SHARDING, "crc32c"}
_OF_V3 = re.compile(
    r"regular|default|v2|bytes|endian|crc32c|gzip|blosc|zstd|transpose|sharding_indexed"
    r"|bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)|r\d+"
)
_OF_V2 = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16|V\d+)|blosc|gzip|zlib|zstd")
"""Data types that v3 has, too, and compressors that each reader knows."""

_PROGRAMS = {
    "numcodecs.zlib": ("zarr-python", "zarrita.js"),
    "numcodecs.shuffle": ("zarr-python", "zarrs", "zarrita.js"),
    "numcodecs.fletcher32": ("zarr-python",),
    "numcodecs.bz2": ("zarr-python",),
    "numcodecs.lzma": ("zarr-python",),
}
"""Programs that read the codecs of imported files, as measured."""


def read_by(docs: Iterable[Mapping[str, Any]]) -> str:
    """Name the readers of an array by its stored documents, of one format or of two."""
    phrases = list(dict.fromkeys(map(_readers_of, docs)))
    return " and ".join([phrase for phrase in phrases if phrase != ONLY_HERE] or phrases)


def summarize(phrases: Iterable[str]) -> str:
    """Name the readers of a store, given a phrase for each array, and ``""`` for other nodes."""
    counts = Counter(filter(None, phrases))
    if len(counts) < 2:
        return "".join(counts)
    return "; ".join(f"{phrase} ({n} of {counts.total()})" for phrase, n in counts.items())


def _readers_of(doc: Mapping[str, Any]) -> str:
    if metadata.has_conversion_marker(doc):
        return _UNFINISHED
    if not doc:  # no JSON object
        return _UNKNOWN
    try:
        declared = declarations.find_declaration(doc, "passthrough")
    except ShardStoreError:
        return _UNKNOWN
    kind = declarations.format_of(doc)
    names = [] if declared is None else [spec.name for spec in declared.transformers]
    if kind == "draft" and names in ([], [transformer_list.SHARDING]):
        return _DRAFT
    if declared is not None:
        others = ", ".join(name for name in names if name not in _OURS)
        return f"{ONLY_HERE} with {others}" if others else ONLY_HERE
    members = list(_members_in(doc.get("codecs")))
    unusual = _unusual_of_v3(doc, members) if kind == "v3" else _unusual_of_v2(doc)
    phrase = f"every {kind} reader{_that_knows(unusual)}"
    return f"{phrase}, but not zarrita.js" if ("index_location", "start") in members else phrase


def _unusual_of_v3(doc: Mapping[str, Any], members: Sequence[tuple[str, Any]]) -> list[str]:
    extensions = ("data_type", "chunk_grid", "chunk_key_encoding")
    given = [transformer_list.name_of(doc.get(member)) for member in extensions]
    given += [value for name, value in members if name == "name"]
    unusual = [str(name) for name in given if not _OF_V3.fullmatch(str(name))]
    return unusual + declarations.not_understood(doc)


def _unusual_of_v2(doc: Mapping[str, Any]) -> list[str]:
    dtype, codecs = doc.get("dtype"), (doc.get("filters"), doc.get("compressor"))
    filters, compressors = ([v for k, v in _members_in(each) if k == "id"] for each in codecs)
    given = [dtype if isinstance(dtype, str) else "structured types", *compressors]
    unusual = [name for name in map(str, given) if not _OF_V2.fullmatch(name)]
    return [*unusual, *map(str, filters)]


def _that_knows(names: Sequence[str]) -> str:
    """Return the names that a reader has to know, and the programs that know all of them."""
    if not names:
        return ""
    phrase = f" that knows {', '.join(dict.fromkeys(names))}"
    if not all(name in _PROGRAMS for name in names):
        return phrase
    first, *rest = (_PROGRAMS[name] for name in names)
    in_all = (each for each in first if all(each in other for other in rest))
    return f"{phrase} ({', '.join(in_all)})"


def _members_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of all objects in a JSON value, at any depth."""
    for found in declarations.values_in(value):
        if isinstance(found, Mapping):
            yield from found.items()
