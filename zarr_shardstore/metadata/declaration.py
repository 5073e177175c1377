"""Declaration of an array's storage transformers in its metadata: found, stripped, applied.

========================  ===================================================================
``codec``                 v3: ``codecs`` is one ``sharding_indexed``, the chunk grid is the
                          grid of shards. Every v3 reader reads it.
``storage_transformers``  v3 and draft: the list of transformers beside the grid and the codecs
                          of the chunks. Some v3 readers ignore the list, so a v3 document
                          that is written here also has a member that must be understood. Our
                          chunk key encoding holds the chunk key encoding of the array.
``filters``               v2: a marker in ``filters`` that holds the list; ``chunks`` is the
                          shape of the shards, if there are any.
========================  ===================================================================

A reader that does not know a declaration must refuse the array, because it would take shards for
chunks: spec_notes/readers.md. So `find_declaration` refuses each unknown form of sharding.

A chunk grid of v3 is ``regular`` with a shape, or ``rectilinear`` with lists of lengths. The
chunks of the codec begin at the start of each shard. If they do not divide it, its last one is
shorter.

A document is the parsed JSON object. The functions never change their argument.

Source: sharding storage transformer draft, "Configuration"; ZEP 2, "Configuration"; Zarr v2,
"Metadata" (filters); Zarr v3 core, "Extension points" (must_understand); zarr-extensions, chunk
grid ``rectilinear``; zarr-specs, pull request 370 (shorter chunks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.box_grid import MAX_EDGES, BoxGrid, Side, parse_sides, spell_side
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.shard import ShardingSpec
from zarr_shardstore.metadata import transformer_list
from zarr_shardstore.metadata.transformer_list import check_known_members, name_of

Declaration = Literal["codec", "storage_transformers", "filters"]
Native = Literal["flat", "passthrough"]
"""View of natively sharded arrays: by their inner chunks, or as they are stored."""

View = Literal["chunks", "shards"]
"""Grid by which sharded arrays are shown to zarr."""

Document: TypeAlias = dict[str, Any]

MARKER = "zarr_shardstore"
"""Id of the marker in v2 filters; name of the member and of the chunk key encoding in v3."""

_CODEC = "sharding_indexed"
_NAMES = {_CODEC, MARKER, f"numcodecs.{MARKER}", *transformer_list.SHARDING_URIS}
"""Names that declare sharding in codecs, filters or extensions."""

MEMBERS_OF_V3 = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs",
    "fill_value", "attributes", "dimension_names", "storage_transformers", MARKER,
}  # fmt: skip
"""Members of array documents that are known here."""
_SCANNED = ("storage_transformers", "codecs", "filters", "compressor", "extensions")
"""Members that may declare sharding, or have the marker of a conversion."""

_KNOWN = {
    ("v3", True): {"storage_transformers", "chunk_key_encoding", MARKER, "codecs"},
    ("v3", False): {"codecs"},
    ("v2", False): {"filters"},
    ("draft", True): {"storage_transformers"},
}
"""Members that may declare sharding, by format, and whether ``storage_transformers`` is one."""


class Declared(NamedTuple):
    """Storage transformers of an array document, nearest to the array first, and their form."""

    how: Declaration
    transformers: tuple[transformer_list.TransformerSpec, ...]
    chunks: BoxGrid | None = None
    """Cut of the array into chunks, if a codec declares the shards."""


def format_of(doc: Mapping[str, Any]) -> Literal["v3", "v2", "draft"]:
    """Return the hierarchy whose documents look like this one."""
    if doc.get("zarr_format") == 2:
        return "v2"
    return "v3" if "node_type" in doc else "draft"


def not_understood(doc: Mapping[str, Any]) -> list[str]:
    """Return the unknown members of a v3 array that a reader may not ignore."""
    given = {name: doc[name] for name in sorted(doc.keys() - MEMBERS_OF_V3)}
    options = {name: it if isinstance(it, Mapping) else {} for name, it in given.items()}
    return [name for name, it in options.items() if it.get("must_understand") is not False]


def scan(doc: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return all texts in each member that may declare sharding."""
    return {
        member: {value for value in values_in(doc[member]) if isinstance(value, str)}
        for member in _SCANNED
        if doc.get(member)
    }


def find_declaration(
    doc: Mapping[str, Any], native: Native = "flat", texts: Mapping[str, set[str]] | None = None
) -> Declared | None:
    """Find the transformers that an array document declares; ``None`` for plain chunks, and for a
    ``sharding_indexed`` that the document or `native` leaves to zarr. `texts` is its `scan`."""
    kind, members = format_of(doc), _declaring_members(doc, scan(doc) if texts is None else texts)
    by_list = kind != "v2" and "storage_transformers" in members
    for member in members:
        if member not in _KNOWN.get((kind, by_list), ()):
            raise UnsupportedError(
                f"{member!r} declares sharding, in a form that is not known here: the chunk keys "
                "may be those of shards"
            )
    if by_list:
        specs = transformer_list.transformer_specs(doc["storage_transformers"], _ndim(doc))
        return Declared("storage_transformers", specs)
    if kind == "v2" and members:
        return _declared_by_marker(doc)
    if not members or native == "passthrough" or MARKER in doc:
        return None
    spec, chunks = _spec_of_codec(doc)
    return Declared("codec", (transformer_list.sharding_transformer(spec),), chunks)


def _declaring_members(doc: Mapping[str, Any], texts: Mapping[str, set[str]]) -> list[str]:
    """Return the members that declare storage transformers, in any form."""
    by_list = doc.get("storage_transformers") not in (None, [])
    members = [
        member
        for member in _SCANNED
        if (by_list if member == "storage_transformers" else texts.get(member, set()) & _NAMES)
    ]
    if MARKER in doc and mark_of(doc) != "passthrough":
        members.append(MARKER)
    if name_of(doc.get("chunk_key_encoding")) == MARKER:
        members.append("chunk_key_encoding")
    return members


def is_sharded_by_zarr(doc: Mapping[str, Any]) -> bool:
    """Whether a ``sharding_indexed`` alone declares shards, which no reader takes for chunks."""
    texts = scan(doc)
    is_alone = _declaring_members(doc, texts) == ["codecs"]
    return format_of(doc) == "v3" and is_alone and texts["codecs"] & _NAMES == {_CODEC}


def split(doc: Mapping[str, Any]) -> tuple[Declared | None, Document]:
    """Return the declaration of an array, if it has one, and its document without it."""
    declared = find_declaration(doc)
    return declared, dict(doc) if declared is None else strip(doc, declared.how)


def strip(doc: Mapping[str, Any], how: Declaration) -> Document:
    """Return the document for readers of plain chunks, without its declaration."""
    match how:
        case "filters":
            rest = [f for f in doc["filters"] if not _is_marker(f)]
            cps = chunks_per_shard(_declared_by_marker(doc), _ndim(doc))
            chunks = [c // n for c, n in zip(doc["chunks"], cps, strict=True)]
            return {**doc, "chunks": chunks, "filters": rest or None}
        case "storage_transformers":
            shown = {name: value for name, value in doc.items() if name != MARKER}
            if "codecs" in doc:
                shown["codecs"] = _with_common_names(doc["codecs"])
            if "chunk_key_encoding" in doc:
                shown["chunk_key_encoding"] = chunk_key_encoding(doc)
            return {**shown, "storage_transformers": []}
        case "codec":
            shown = with_grid(doc, _spec_of_codec(doc)[1].sides)
            codecs = doc["codecs"][0]["configuration"]["codecs"]
            return {**shown, "codecs": _with_common_names(codecs)}


def apply(doc: Mapping[str, Any], declared: Declared) -> Document:
    """Return the document with a declaration, as it is stored: `strip` gives `doc` back."""
    match declared.how:
        case "filters":
            spelled = transformer_list.spell_transformers(declared.transformers)
            marker = {"id": MARKER, "storage_transformers": spelled}
            filters = doc.get("filters") or []
            if not isinstance(filters, list):
                raise SpecError(f"filters is a list or null, got {filters!r}")
            cps = chunks_per_shard(declared, _ndim(doc))
            chunks = [c * n for c, n in zip(doc["chunks"], cps, strict=True)]
            return {**doc, "chunks": chunks, "filters": [*filters, marker]}
        case "storage_transformers":
            is_draft, specs = "node_type" not in doc, declared.transformers
            spelled = transformer_list.spell_transformers(specs, for_zarr_2=is_draft)
            if is_draft:
                return {**doc, "storage_transformers": spelled}
            encoding = {"name": MARKER, "configuration": {"above": doc["chunk_key_encoding"]}}
            shown = {**doc, "chunk_key_encoding": encoding, "storage_transformers": spelled}
            return {**shown, MARKER: {"must_understand": True}}
        case "codec":
            if not isinstance(doc.get("codecs"), list):
                raise SpecError(f"codecs is a list, got {doc.get('codecs')!r}")
            (transformer,) = declared.transformers
            spec = transformer_list.sharding_spec(transformer, _ndim(doc))
            cut = BoxGrid(tuple(sides_of_grid(doc) or ()))
            if cut.uneven:
                raise UnsupportedError(
                    "its chunks have several shapes, and those in the shards of native readers "
                    "have one shape"
                )
            chunk_shape = cut.largest
            shards: list[Side] = [
                c * n if isinstance(n, int) else tuple([c * each for each in n])
                for c, n in zip(chunk_shape, spec.boxes.sides, strict=True)
            ]
            configuration = {
                "chunk_shape": list(chunk_shape),
                "codecs": doc["codecs"],
                "index_codecs": transformer_list.index_codecs(spec.index),
                "index_location": spec.index.location,
            }
            codec = {"name": _CODEC, "configuration": configuration}
            return {**with_grid(doc, _covering(shards, doc["shape"])), "codecs": [codec]}


def reapply(doc: Mapping[str, Any], stored: Mapping[str, Any], how: Declaration) -> Document:
    """Return `doc` with the declaration of the `stored` document, which has the same chunks."""
    match how:
        case "filters":
            rest = [f for f in doc.get("filters") or () if not _is_marker(f)]
            filters = [*rest, _marker_of(stored)]
            return {**doc, "chunks": stored["chunks"], "filters": filters}
        case "storage_transformers":
            names = ("storage_transformers", "chunk_key_encoding", MARKER)
            return {**doc, **{name: stored[name] for name in names if name in stored}}
        case "codec":
            (codec,) = stored["codecs"]
            configuration = {**codec["configuration"], "codecs": doc["codecs"]}
            codec = {**codec, "configuration": configuration}
            grid = stored["chunk_grid"]
            if grid["name"] == "rectilinear":
                sides = _covering(sides_of_grid(stored) or (), doc["shape"])
                grid = with_grid(stored, sides)["chunk_grid"]
            return {**doc, "chunk_grid": grid, "codecs": [codec]}


def chunks_per_shard(declared: Declared, ndim: int) -> Coords:
    """Return the factors by which the declaration multiplies the chunk shape in the document."""
    if declared.how != "storage_transformers":
        for spec in declared.transformers:
            if spec.name == transformer_list.SHARDING:
                return transformer_list.sharding_spec(spec, ndim).chunks_per_shard
    return (1,) * ndim


def chunk_key_encoding(doc: Mapping[str, Any]) -> Any:
    """Return the chunk key encoding of a v3 array before the declaration added ours."""
    encoding = doc["chunk_key_encoding"]
    if name_of(encoding) != MARKER:
        return encoding
    match encoding:
        case {"configuration": {"above": above}}:
            return above
    raise SpecError(f"the chunk key encoding {MARKER!r} needs 'above', got {encoding!r}")


def marked(doc: Mapping[str, Any], native: Native) -> Document:
    """Mark a document for every store: zarr shards the array itself (``"passthrough"``), or zarr
    addresses shards of an array that is shown by chunks (``"flat"``, never stored)."""
    return {**doc, MARKER: {"must_understand": False, "native": native}}


def shown_by_shards(doc: Mapping[str, Any], declared: Declared) -> Document:
    """Return a document of plain chunks as arrays that address shards show it. Our chunk key
    encoding makes every reader refuse it that is not `ShardedCodecPipeline` on the store."""
    encoding = {"name": MARKER, "configuration": {"above": doc["chunk_key_encoding"]}}
    shown = apply(doc, Declared("codec", declared.transformers))
    return marked({**shown, "chunk_key_encoding": encoding}, "flat")


def mark_of(doc: Mapping[str, Any]) -> Any:
    """Return the mark of a document, or ``None``."""
    mark = doc.get(MARKER)
    return mark.get("native") if isinstance(mark, Mapping) else None


def without_mark(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document without its mark; the same object if it has none."""
    if MARKER not in doc:
        return doc
    rest = {name: doc[name] for name in doc if name != MARKER}
    if mark_of(doc) == "flat":
        rest["chunk_key_encoding"] = chunk_key_encoding(doc)
    return rest


def sharding_shapes(doc: Mapping[str, Any]) -> list[Any]:
    """Return the chunk shapes of the sharding codecs of a v3 array, the outermost first."""
    found = [value for value in values_in(doc.get("codecs")) if isinstance(value, Mapping)]
    options = [codec.get("configuration") for codec in found if name_of(codec) == _CODEC]
    return [given.get("chunk_shape") for given in options if isinstance(given, Mapping)]


def has_sharding_codec(doc: Mapping[str, Any]) -> bool:
    """Whether the codecs of a v3 array document do sharding, in any form."""
    return any(value == _CODEC for value in values_in(doc.get("codecs")))


def values_in(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it, however deep."""
    left = [value]
    while left:
        value = left.pop()
        yield value
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value


def _is_marker(codec: Any) -> bool:
    return isinstance(codec, Mapping) and codec.get("id") == MARKER


def _declared_by_marker(doc: Mapping[str, Any]) -> Declared:
    marker, chunks = _marker_of(doc), _shape_at(doc, "chunks")
    check_known_members(marker, {"id", "storage_transformers"}, f"the filter {MARKER!r}")
    specs = transformer_list.transformer_specs(marker.get("storage_transformers"), len(chunks))
    declared = Declared("filters", specs)
    cps = chunks_per_shard(declared, len(chunks))
    if len(chunks) != _ndim(doc) or any(c % n for c, n in zip(chunks, cps, strict=True)):
        raise SpecError(f"shards of {list(chunks)} cannot be cut into {list(cps)} chunks")
    return declared


def _marker_of(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    filters = doc.get("filters")
    found: list[Document] = list(filter(_is_marker, filters)) if isinstance(filters, list) else []
    if len(found) != 1:
        raise SpecError(f"filters is a list that has the marker {MARKER!r} once, got {filters!r}")
    return found[0]


def _ndim(doc: Mapping[str, Any]) -> int:
    return len(_shape_at(doc, "shape"))


def _shape_at(members: Mapping[str, Any], name: str) -> Coords:
    """Return a member that must be a list of whole numbers, or raise `SpecError`."""
    shape = members.get(name)
    if not isinstance(shape, list | tuple) or any(not isinstance(n, int) or n < 0 for n in shape):
        raise SpecError(f"{name!r} is a list of whole numbers, got {shape!r}")
    return tuple(map(int, shape))  # zarr reads true as 1


def _with_common_names(codecs: Any) -> Any:
    """Name codecs as readers do, also in shards: ``endian`` of ZEP 2's example is ``bytes``."""
    if isinstance(codecs, list):
        return [_with_common_names(name_of(c) if isinstance(c, str) else c) for c in codecs]
    if not isinstance(codecs, Mapping):
        return codecs
    renamed = {name: _with_common_names(member) for name, member in codecs.items()}
    return {**renamed, "name": name_of(codecs)} if "name" in codecs else renamed


def _spec_of_codec(doc: Mapping[str, Any]) -> tuple[ShardingSpec, BoxGrid]:
    """Parse the sharding of a v3 document whose codecs mention it, and the cut into chunks."""
    codecs = doc["codecs"]
    codec = codecs[0] if isinstance(codecs, list) and len(codecs) == 1 else None
    if not isinstance(codec, Mapping) or codec.get("name") != _CODEC:
        raise UnsupportedError(
            "the sharding codec stands beside or inside other codecs, so shards hold something "
            "else than chunks: it is left to zarr"
        )
    check_known_members(codec, transformer_list.CODEC_MEMBERS, f"the codec {_CODEC!r}")
    _, configuration = transformer_list.name_and_options(codec)
    if missing := sorted({"codecs", "index_codecs"} - configuration.keys()):
        raise UnsupportedError(f"the codec {_CODEC!r} leaves {missing} to the reader")
    if not isinstance(configuration["codecs"], list):
        raise SpecError(f"the codec {_CODEC!r} needs a list of codecs, got {codec!r}")
    members = {"chunk_shape", "codecs", "index_codecs", "index_location"}
    check_known_members(configuration, members, f"the codec {_CODEC!r}")
    index = transformer_list.index_format(configuration)
    chunk_shape = _shape_at(configuration, "chunk_shape")
    grid, options = transformer_list.name_and_options(doc.get("chunk_grid"))
    if grid == "regular":
        _shape_at(options, "chunk_shape")
    shape, shards = _shape_at(doc, "shape"), sides_of_grid(doc)
    if shards is None:
        raise UnsupportedError(
            f"the chunk grid {grid!r} of a sharded array, or its form, is not known"
        )
    if not len(chunk_shape) == len(shards) == len(shape):
        raise SpecError(
            f"the array has {len(shape)} dims, its shards {list(shards)} and the chunks in "
            f"them {list(chunk_shape)} must have as many"
        )
    if 0 in shards:  # as old versions of zarr wrote for an axis of length 0
        raise UnsupportedError(f"shards of {list(shards)} have no chunks")
    if 0 in chunk_shape:
        raise SpecError(f"shards of {list(shards)} cannot be cut into chunks of {chunk_shape}")
    shards_in_chunks, chunks = cut_shards(shards, chunk_shape, shape)
    uneven = shards_in_chunks.uneven
    return ShardingSpec(shards_in_chunks.largest, index, uneven), chunks


# ------------------------------------------------------------- chunk grids of Zarr v3


def sides_of_grid(doc: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the lengths along each dimension in a chunk grid; ``None`` if it is not known here."""
    match doc.get("chunk_grid"), doc.get("shape"):
        case {"name": "regular", "configuration": {"chunk_shape": [*lengths], **rest}}, _:
            return None if rest else lengths
        case {
            "name": "rectilinear",
            "configuration": {"kind": "inline", "chunk_shapes": [*given], **rest},
        }, [*shape] if not rest and len(given) == len(shape):
            sides = parse_sides(given)
            if sides is None or not all(isinstance(n, int) for n in shape):
                return None
            pairs = zip(sides, shape, strict=True)
            return sides if all(isinstance(s, int) or sum(s) >= n for s, n in pairs) else None
    return None


def with_grid(doc: Mapping[str, Any], sides: Sequence[Side]) -> dict[str, Any]:
    """Return a document whose chunk grid has these lengths along each dimension."""
    spelled = [spell_side(side) for side in sides]
    if any(isinstance(side, tuple) for side in sides):
        options: dict[str, Any] = {"kind": "inline", "chunk_shapes": spelled}
        return {**doc, "chunk_grid": {"name": "rectilinear", "configuration": options}}
    grid = doc["chunk_grid"] if doc["chunk_grid"]["name"] == "regular" else {"name": "regular"}
    return {**doc, "chunk_grid": {**grid, "configuration": {"chunk_shape": spelled}}}


def _covering(sides: Sequence[Side], shape: Sequence[int]) -> list[Side]:
    """Return lengths that reach the end of an array. What is added has the largest length."""
    longer: list[Side] = []
    n_left = MAX_EDGES
    for side, n in zip(sides, shape, strict=True):
        if isinstance(side, tuple):
            n_more = max(0, -((sum(side) - n) // max(side)))
            n_left -= n_more + len(side)
            if n_left < 0:
                raise UnsupportedError(f"lists of more than {MAX_EDGES} lengths of shards")
            side = (*side, *[max(side)] * n_more)
        longer.append(side)
    return longer


def cut_shards(
    shards: Sequence[Side], chunk_shape: Coords, shape: Coords
) -> tuple[BoxGrid, BoxGrid]:
    """Return the cut of the grid of chunks into shards, and of the array into chunks."""
    entries: list[Side] = []
    chunks: list[Side] = []
    n_left = MAX_EDGES
    for side, c, n in zip(shards, chunk_shape, shape, strict=True):
        lengths, n_repeats = (
            ((side,), max(1, -(-n // side))) if isinstance(side, int) else (side, 1)
        )
        if c > max(lengths):
            raise SpecError(f"shards of {spell_side(side)} cannot be cut into chunks of {c}")
        counts = tuple([-(-length // c) for length in lengths])
        entries.append(counts[0] if isinstance(side, int) else counts)
        if all(length % c == 0 for length in lengths):
            chunks.append(c)
            continue
        n_shards = n_repeats * len(lengths)
        n_left -= n_shards * max(counts)
        if n_left < 0:
            raise UnsupportedError(f"{n_shards} shards are cut into too many chunks of {c}")
        each = [[c] * (length // c) + [length % c] * (length % c > 0) for length in lengths]
        each *= n_repeats
        chunks.append(tuple(chain.from_iterable(each)))
    return BoxGrid(tuple(entries)), BoxGrid(tuple(chunks))


def with_length(doc: Mapping[str, Any], axis: int, length: int) -> dict[str, Any]:
    """Return the document of an array, by its chunks, with another length along an axis. A list of
    lengths that is too short gets a chunk of the rest, as in zarr."""
    shape = doc["shape"]
    new = {**doc, "shape": [*shape[:axis], length, *shape[axis + 1 :]]}
    if format_of(doc) != "v3" or name_of(doc["chunk_grid"]) != "rectilinear":
        return new
    sides = list(sides_of_grid(doc) or ())
    side = sides[axis]
    if isinstance(side, tuple) and sum(side) < length:
        sides[axis] = (*side, length - sum(side))
    return with_grid(new, sides)
