"""How an array's metadata declares what stands between it and the store: read, take out, put back.

========================  ===================================================================
``codec``                 v3: ``codecs`` is one ``sharding_indexed``, the chunk grid is the
                          grid of shards. Every v3 reader reads it.
``storage_transformers``  v3 and draft: the list of transformers; the chunk grid and the
                          codecs are those of the chunks. In v3 a member that must be
                          understood stands beside the list, which not every reader looks at.
``filters``               v2: a marker in ``filters`` that holds the list; ``chunks`` is the
                          shape of the shards, if there are any.
========================  ===================================================================

A reader that does not know a declaration must refuse the array: it would take shards for
chunks. spec_notes/readers.md says how each of them is made to.

A document is the parsed JSON object. The functions never change their argument.

Source: sharding storage transformer draft, "Configuration"; ZEP 2, "Configuration"; Zarr v2,
"Metadata" (filters); Zarr v3 core, "Extension points" (must_understand).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.index import IndexFormat
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.spec import ShardingSpec
from zarr_shardstore.format.transformer_specs import (
    SHARDING,
    TransformerSpec,
    index_codecs,
    index_format,
    name_of,
    sharding_spec,
    sharding_transformer,
    spell_for_draft,
    spell_transformers,
    transformer_specs,
)

__all__ = [
    "MARKER",
    "Declaration",
    "Declared",
    "Native",
    "chunks_per_shard",
    "declare",
    "declare_native",
    "find_declaration",
    "has_sharding_codec",
    "is_native_by_choice",
    "put_back",
    "sharding_shapes",
    "take_out",
]

Declaration = Literal["codec", "storage_transformers", "filters"]
Native = Literal["flat", "passthrough"]
"""How native sharded arrays appear: with their inner chunks as chunks, or as they are."""

Document: TypeAlias = dict[str, Any]

MARKER = "zarr_shardstore"
"""Id of the marker in the filters of a v2 array, and name of the member that v3 readers ignore."""

_CODEC = "sharding_indexed"


@dataclass(frozen=True, slots=True)
class Declared:
    """What an array document declares: how, and which transformers, nearest to the array first."""

    how: Declaration
    transformers: tuple[TransformerSpec, ...]


def find_declaration(doc: Mapping[str, Any], native: Native = "flat") -> Declared | None:
    """How an array document declares its transformers; ``None`` for plain chunks.

    A ``sharding_indexed`` that this format cannot express (another codec around it, other
    index codecs), or that the document or the caller says to leave alone, is no declaration:
    such an array passes through as it is.

    Raises
    ------
    SpecError
        If the declaration contradicts itself, or asks for an impossible shard.
    UnsupportedError
        If the sharding has a form that is not known.
    """
    if _is_v2(doc):
        if _marker_of(doc) is None:
            return None
        declared = Declared("filters", _checked(_transformers_of_marker(doc), _ndim(doc)))
        cps = chunks_per_shard(declared, _ndim(doc))
        if any(c % n for c, n in zip(doc["chunks"], cps, strict=True)):
            raise SpecError(f"shards of {doc['chunks']} cannot be cut into {list(cps)} chunks")
        return declared
    transformers = doc.get("storage_transformers")
    if transformers:
        specs = transformer_specs(transformers)
        return Declared("storage_transformers", _checked(specs, _ndim(doc)))
    if native == "passthrough" or is_native_by_choice(doc):
        return None
    spec = _spec_of_codec(doc)
    return None if spec is None else Declared("codec", (sharding_transformer(spec),))


def take_out(doc: Mapping[str, Any], how: Declaration) -> Document:
    """The document as the reader of plain chunks shall see it."""
    match how:
        case "filters":
            rest = [f for f in doc["filters"] if not _is_marker(f)]
            cps = chunks_per_shard(Declared(how, _transformers_of_marker(doc)), _ndim(doc))
            chunks = [c // n for c, n in zip(doc["chunks"], cps, strict=True)]
            return {**doc, "chunks": chunks, "filters": rest or None}
        case "storage_transformers":
            rest_of_doc = {name: value for name, value in doc.items() if name != MARKER}
            return {**rest_of_doc, "storage_transformers": []}
        case "codec":
            inner = doc["codecs"][0]["configuration"]
            grid = _with_chunk_shape(doc, list(inner["chunk_shape"]))
            return {**doc, "chunk_grid": grid, "codecs": inner["codecs"]}


def declare(doc: Mapping[str, Any], declared: Declared) -> Document:
    """The document as it is stored: `take_out` gives `doc` back."""
    match declared.how:
        case "filters":
            spelled = spell_transformers(declared.transformers)
            marker = {"id": MARKER, "storage_transformers": spelled}
            cps = chunks_per_shard(declared, _ndim(doc))
            chunks = [c * n for c, n in zip(doc["chunks"], cps, strict=True)]
            return {**doc, "chunks": chunks, "filters": [*(doc.get("filters") or ()), marker]}
        case "storage_transformers" if "node_type" not in doc:
            return {**doc, "storage_transformers": spell_for_draft(declared.transformers)}
        case "storage_transformers":
            spelled = spell_transformers(declared.transformers)
            return {**doc, "storage_transformers": spelled, MARKER: {"must_understand": True}}
        case "codec":
            (transformer,) = declared.transformers
            return _with_codec(doc, sharding_spec(transformer.configuration, _ndim(doc)))


def put_back(doc: Mapping[str, Any], stored: Mapping[str, Any], how: Declaration) -> Document:
    """`doc` with the declaration that the `stored` document of the same chunks has, as spelled."""
    match how:
        case "filters":
            rest = [f for f in doc.get("filters") or () if not _is_marker(f)]
            filters = [*rest, _marker_of(stored)]
            return {**doc, "chunks": stored["chunks"], "filters": filters}
        case "storage_transformers":
            kept = {
                name: stored[name] for name in ("storage_transformers", MARKER) if name in stored
            }
            return {**doc, **kept}
        case "codec":
            (codec,) = stored["codecs"]
            configuration = {**codec["configuration"], "codecs": doc["codecs"]}
            return {
                **doc,
                "chunk_grid": _with_chunk_shape(doc, list(_chunk_shape(stored))),
                "codecs": [{**codec, "configuration": configuration}],
            }


def chunks_per_shard(declared: Declared, ndim: int) -> Coords:
    """By how much the declaration multiplies the chunk shape in the document, in each dimension."""
    if declared.how != "storage_transformers":
        for spec in declared.transformers:
            if spec.name == SHARDING:
                return sharding_spec(spec.configuration, ndim).chunks_per_shard
    return (1,) * ndim


def declare_native(doc: Mapping[str, Any]) -> Document:
    """A document whose sharding codec is left to zarr, here and wherever it is opened."""
    return {**doc, MARKER: {"must_understand": False, "native": "passthrough"}}


def is_native_by_choice(doc: Mapping[str, Any]) -> bool:
    """Whether `declare_native` made the document."""
    mark = doc.get(MARKER)
    return isinstance(mark, Mapping) and mark.get("native") == "passthrough"


def sharding_shapes(doc: Mapping[str, Any]) -> list[Any]:
    """The chunk shapes of the sharding codecs of a v3 array, from the outermost inwards."""
    shapes = []
    codecs = doc.get("codecs")
    while codecs := [c for c in codecs or () if name_of(c) == _CODEC]:
        configuration = codecs[0].get("configuration") or {}
        shapes.append(configuration.get("chunk_shape"))
        codecs = configuration.get("codecs")
    return shapes


def has_sharding_codec(doc: Mapping[str, Any]) -> bool:
    """Whether the codecs of a v3 array document do sharding, in any form."""
    codecs = doc.get("codecs")
    return isinstance(codecs, list) and any(name_of(c) == _CODEC for c in codecs)


def _is_v2(doc: Mapping[str, Any]) -> bool:
    return doc.get("zarr_format") == 2


def _is_marker(codec: Any) -> bool:
    return isinstance(codec, Mapping) and codec.get("id") == MARKER


def _marker_of(doc: Mapping[str, Any]) -> Mapping[str, Any] | None:
    filters = doc.get("filters")
    found = [f for f in filters if _is_marker(f)] if isinstance(filters, list) else []
    if len(found) > 1:
        raise SpecError(f"filters has the marker {MARKER!r} {len(found)} times")
    return found[0] if found else None


def _transformers_of_marker(doc: Mapping[str, Any]) -> tuple[TransformerSpec, ...]:
    marker = _marker_of(doc)
    return () if marker is None else transformer_specs(marker.get("storage_transformers"))


def _checked(specs: tuple[TransformerSpec, ...], ndim: int) -> tuple[TransformerSpec, ...]:
    for spec in specs:
        if spec.name == SHARDING:
            sharding_spec(spec.configuration, ndim)
    return specs


def _chunk_shape(doc: Mapping[str, Any]) -> Coords:
    grid = doc["chunk_grid"]
    return tuple(grid.get("configuration", grid)["chunk_shape"])


def _with_chunk_shape(doc: Mapping[str, Any], chunk_shape: list[int]) -> Document:
    grid = doc["chunk_grid"]
    return {**grid, "configuration": {**grid["configuration"], "chunk_shape": chunk_shape}}


def _ndim(doc: Mapping[str, Any]) -> int:
    return len(doc["shape"])


def _with_codec(doc: Mapping[str, Any], spec: ShardingSpec) -> Document:
    chunk_shape = _chunk_shape(doc)
    shard_shape = [c * n for c, n in zip(chunk_shape, spec.chunks_per_shard, strict=True)]
    configuration = {
        "chunk_shape": list(chunk_shape),
        "codecs": doc["codecs"],
        "index_codecs": index_codecs(spec.index),
        "index_location": spec.index.location,
    }
    return {
        **doc,
        "chunk_grid": _with_chunk_shape(doc, shard_shape),
        "codecs": [{"name": _CODEC, "configuration": configuration}],
    }


def _spec_of_codec(doc: Mapping[str, Any]) -> ShardingSpec | None:
    codecs = doc.get("codecs")
    if not isinstance(codecs, list) or len(codecs) != 1 or name_of(codecs[0]) != _CODEC:
        return None
    index: IndexFormat | None
    try:
        configuration = codecs[0]["configuration"]
        chunk_shape = configuration["chunk_shape"]
        index = index_format(configuration)
        shard_shape = _chunk_shape(doc)
        list(configuration["codecs"])
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"the codec {codecs[0]!r} is not complete: {error!r}") from error
    if index is None or name_of(doc["chunk_grid"]) != "regular":
        return None
    if len(chunk_shape) != len(shard_shape) or len(chunk_shape) != _ndim(doc):
        raise SpecError(
            f"the array has {_ndim(doc)} dims, its shards {list(shard_shape)} and the chunks in "
            f"them {list(chunk_shape)} must have as many"
        )
    for outer, inner in zip(shard_shape, chunk_shape, strict=True):
        if not isinstance(inner, int) or not isinstance(outer, int) or inner < 1 or outer % inner:
            raise SpecError(
                f"shards of {list(shard_shape)} cannot be cut into chunks of {list(chunk_shape)}"
            )
    cps = tuple(outer // inner for outer, inner in zip(shard_shape, chunk_shape, strict=True))
    return ShardingSpec(cps, index)
