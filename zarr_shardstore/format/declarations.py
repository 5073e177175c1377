"""How an array's metadata declares that it is sharded: read, take out, put back.

========================  ===================================================================
``codec``                 v3: ``codecs`` is one ``sharding_indexed``, the chunk grid is the
                          grid of shards. Every v3 reader reads it.
``storage_transformers``  v3 and draft: the list holds one ``sharding``; the chunk grid and
                          the codecs are those of the chunks.
========================  ===================================================================

A document is the parsed JSON object. The functions never change their argument.

Source: sharding storage transformer draft, "Configuration"; its earlier draft; zarr-python
2.13 to 2.18, ``zarr/meta.py``; ZEP 2, "Configuration".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.index import DRAFT_INDEX, ZEP2_INDEX, IndexFormat
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.spec import ShardingSpec

__all__ = [
    "Declaration",
    "declare",
    "find_declaration",
    "has_sharding_codec",
    "index_of",
    "sharding_shapes",
    "take_out",
]

Declaration = Literal["codec", "storage_transformers"]
Document = dict[str, Any]

_URI = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
_CODEC = "sharding_indexed"


def find_declaration(doc: Mapping[str, Any]) -> tuple[Declaration, ShardingSpec] | None:
    """How an array document declares its sharding; ``None`` if it does not.

    A ``sharding_indexed`` that this format cannot express (another codec around it, other
    index codecs) is no declaration: such an array passes through as it is.

    Raises
    ------
    SpecError
        If the declaration contradicts itself, or asks for an impossible shard.
    UnsupportedError
        If the list of storage transformers has one that is not known.
    """
    transformers = doc.get("storage_transformers") or []
    if transformers:
        return "storage_transformers", _spec_of_transformers(transformers, _ndim(doc))
    spec = _spec_of_codec(doc)
    return None if spec is None else ("codec", spec)


def take_out(doc: Mapping[str, Any], declaration: Declaration) -> Document:
    """The document as the reader of plain chunks shall see it."""
    if declaration == "storage_transformers":
        return {**doc, "storage_transformers": []}
    (codec,) = doc["codecs"]
    inner = codec["configuration"]
    return {
        **doc,
        "chunk_grid": _with_chunk_shape(doc, list(inner["chunk_shape"])),
        "codecs": inner["codecs"],
    }


def declare(doc: Mapping[str, Any], declaration: Declaration, spec: ShardingSpec) -> Document:
    """The document as it is stored: `take_out` gives `doc` back."""
    cps = list(spec.chunks_per_shard)
    if declaration == "storage_transformers":
        transformer: Document = {"name": "sharding", "configuration": {"chunks_per_shard": cps}}
        if "node_type" not in doc:  # a draft document, which zarr-python 2.18 shall read too
            transformer |= {"extension": _URI, "type": "indexed"}
            transformer["configuration"] = {"chunks_per_shard": cps or [1]}
        return {**doc, "storage_transformers": [transformer]}
    chunk_shape = _chunk_shape(doc)
    shard_shape = [c * n for c, n in zip(chunk_shape, cps, strict=True)]
    index_codecs: list[Document] = [
        {"name": "bytes", "configuration": {"endian": spec.index.endian}}
    ]
    if spec.index.checksum:
        index_codecs.append({"name": "crc32c"})
    configuration = {
        "chunk_shape": list(chunk_shape),
        "codecs": doc["codecs"],
        "index_codecs": index_codecs,
        "index_location": spec.index.location,
    }
    return {
        **doc,
        "chunk_grid": _with_chunk_shape(doc, shard_shape),
        "codecs": [{"name": _CODEC, "configuration": configuration}],
    }


def index_of(declaration: Declaration) -> IndexFormat:
    """Index format of new arrays."""
    return ZEP2_INDEX if declaration == "codec" else DRAFT_INDEX


def sharding_shapes(doc: Mapping[str, Any]) -> list[Any]:
    """The chunk shapes of the sharding codecs of a v3 array, from the outermost inwards."""
    shapes = []
    codecs = doc.get("codecs")
    while codecs := [c for c in codecs or () if _name(c) == _CODEC]:
        configuration = codecs[0].get("configuration") or {}
        shapes.append(configuration.get("chunk_shape"))
        codecs = configuration.get("codecs")
    return shapes


def has_sharding_codec(doc: Mapping[str, Any]) -> bool:
    """Whether the codecs of a v3 array document do sharding, in any form."""
    codecs = doc.get("codecs")
    return isinstance(codecs, list) and any(_name(c) == _CODEC for c in codecs)


def _chunk_shape(doc: Mapping[str, Any]) -> Coords:
    grid = doc["chunk_grid"]
    return tuple(grid.get("configuration", grid)["chunk_shape"])


def _with_chunk_shape(doc: Mapping[str, Any], chunk_shape: list[int]) -> Document:
    grid = doc["chunk_grid"]
    return {**grid, "configuration": {**grid["configuration"], "chunk_shape": chunk_shape}}


def _ndim(doc: Mapping[str, Any]) -> int:
    return len(doc["shape"])


def _name(extension: Any) -> Any:
    """Name of a codec, which v3 spells as an object or as a bare string."""
    return extension.get("name") if isinstance(extension, Mapping) else extension


def _spec_of_transformers(transformers: Any, ndim: int) -> ShardingSpec:
    if not isinstance(transformers, list) or len(transformers) != 1:
        raise UnsupportedError(
            f"storage_transformers must be a list of one sharding transformer, got {transformers!r}"
        )
    (transformer,) = transformers
    known = isinstance(transformer, Mapping) and (
        transformer.get("name") == "sharding"
        or transformer.get("storage_transformer") == _URI
        or transformer.get("extension") == _URI
    )
    if not known:
        raise UnsupportedError(f"the storage transformer {transformer!r} is not known")
    configuration = transformer.get("configuration")
    if not isinstance(configuration, Mapping) or "chunks_per_shard" not in configuration:
        raise SpecError(f"the sharding transformer {transformer!r} has no chunks_per_shard")
    layout = transformer.get("type", configuration.get("format", "indexed"))
    if layout != "indexed":
        raise UnsupportedError(f"the sharding format {layout!r} is not known, only 'indexed'")
    cps = configuration["chunks_per_shard"]
    if not isinstance(cps, list):
        raise SpecError(f"chunks_per_shard is a list of whole numbers, got {cps!r}")
    if ndim == 0 and cps == [1]:
        cps = []  # zarr-python 2.18 writes [1] for a 0-d array
    if len(cps) != ndim:
        raise SpecError(f"chunks_per_shard {cps!r} has {len(cps)} numbers, the array {ndim} dims")
    return ShardingSpec(tuple(cps), DRAFT_INDEX)


def _spec_of_codec(doc: Mapping[str, Any]) -> ShardingSpec | None:
    codecs = doc.get("codecs")
    if not isinstance(codecs, list) or len(codecs) != 1 or _name(codecs[0]) != _CODEC:
        return None
    try:
        configuration = codecs[0]["configuration"]
        chunk_shape = configuration["chunk_shape"]
        index = _index_format(configuration)
        shard_shape = _chunk_shape(doc)
        list(configuration["codecs"])
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"the codec {codecs[0]!r} is not complete: {error!r}") from error
    if index is None or _name(doc["chunk_grid"]) != "regular":
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


def _index_format(configuration: Mapping[str, Any]) -> IndexFormat | None:
    """Index format of a ``sharding_indexed``; ``None`` if this format cannot express it."""
    location = configuration.get("index_location", "end")
    names = [_name(c) for c in configuration["index_codecs"]]
    if location not in ("start", "end") or names not in (["bytes"], ["bytes", "crc32c"]):
        return None
    bytes_codec = configuration["index_codecs"][0]
    bytes_options = bytes_codec.get("configuration") if isinstance(bytes_codec, Mapping) else None
    endian = (bytes_options or {}).get("endian")
    if endian not in ("little", "big"):
        return None
    return IndexFormat(checksum=len(names) == 2, location=location, endian=endian)
