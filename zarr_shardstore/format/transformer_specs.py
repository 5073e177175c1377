"""The list ``storage_transformers`` of an array: names and configurations, in three spellings.

The first transformer of the list is the nearest to the array, the last the nearest to the
store. Spellings that are read; the first is written::

    {"name": NAME, "configuration": {…}}                      draft 1.0; NAME alone is enough
    {"storage_transformer": URI, "configuration": {…}}        early draft, with "format"
    {"extension": URI, "type": …, "configuration": {…}}       zarr-python 2.13 to 2.18

Source: sharding storage transformer draft, "Configuration"; its earlier draft; zarr-python
2.18, ``zarr/meta.py`` and ``Array._load_metadata_nosync`` (the order of the list).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.index import DRAFT_INDEX, IndexFormat
from zarr_shardstore.format.spec import ShardingSpec

__all__ = [
    "SHARDING",
    "TransformerSpec",
    "index_codecs",
    "index_format",
    "name_of",
    "sharding_spec",
    "sharding_transformer",
    "spell_for_draft",
    "spell_transformers",
    "transformer_specs",
]

SHARDING = "sharding"
_SHARDING_URI = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """One storage transformer as metadata states it, whatever the spelling."""

    name: str
    configuration: Mapping[str, Any] = field(default_factory=dict)


def name_of(extension: Any) -> Any:
    """Name of a codec or another extension, which v3 spells as an object or a bare string."""
    return extension.get("name") if isinstance(extension, Mapping) else extension


def transformer_specs(transformers: Any) -> tuple[TransformerSpec, ...]:
    """Read a list of storage transformers; whether a name is known is not looked at.

    Raises
    ------
    SpecError
        If it is no list, or an item has no name, or a configuration that is no object.
    UnsupportedError
        If a sharding has another format than ``"indexed"``.
    """
    if not isinstance(transformers, Sequence) or isinstance(transformers, str | bytes):
        raise SpecError(f"storage_transformers is a list, got {transformers!r}")
    return tuple(map(_transformer_spec, transformers))


def _transformer_spec(transformer: Any) -> TransformerSpec:
    if isinstance(transformer, str):
        return TransformerSpec(transformer)
    given = transformer if isinstance(transformer, Mapping) else {}
    name = given.get("name", given.get("storage_transformer", given.get("extension")))
    configuration = given.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, Mapping):
        raise SpecError(
            f"a storage transformer is an object with a name and a configuration, "
            f"got {transformer!r}"
        )
    if name not in (SHARDING, _SHARDING_URI):
        return TransformerSpec(name, dict(configuration))
    layout = given.get("type", configuration.get("format", "indexed"))
    if layout != "indexed":
        raise UnsupportedError(f"the sharding format {layout!r} is not known, only 'indexed'")
    return TransformerSpec(SHARDING, {k: v for k, v in configuration.items() if k != "format"})


def spell_transformers(specs: Sequence[TransformerSpec]) -> list[dict[str, Any]]:
    """The list as it is written: the draft's spelling."""
    return [
        {"name": s.name, **({"configuration": dict(s.configuration)} if s.configuration else {})}
        for s in specs
    ]


def spell_for_draft(specs: Sequence[TransformerSpec]) -> list[dict[str, Any]]:
    """The list in a document of the draft hierarchy: what zarr-python 2.18 asks for is added."""
    spelled = spell_transformers(specs)
    for transformer in spelled:
        if transformer["name"] == SHARDING:
            transformer |= {"extension": _SHARDING_URI, "type": "indexed"}
            if transformer["configuration"].get("chunks_per_shard") == []:
                transformer["configuration"]["chunks_per_shard"] = [1]  # 2.18's 0-d
    return spelled


def sharding_transformer(spec: ShardingSpec) -> TransformerSpec:
    """The transformer that declares `spec`; the draft's own index form needs no mention."""
    configuration: dict[str, Any] = {"chunks_per_shard": list(spec.chunks_per_shard)}
    if spec.index != DRAFT_INDEX:
        configuration["index_codecs"] = index_codecs(spec.index)
        configuration["index_location"] = spec.index.location
    return TransformerSpec(SHARDING, configuration)


def sharding_spec(configuration: Mapping[str, Any], ndim: int) -> ShardingSpec:
    """What the configuration of a ``sharding`` transformer says about an array of `ndim`.

    Raises
    ------
    SpecError
        If chunks_per_shard is missing or not one number for each dimension.
    UnsupportedError
        If it has index codecs that are not known.
    """
    cps = configuration.get("chunks_per_shard")
    if not isinstance(cps, Sequence) or isinstance(cps, str):
        raise SpecError(
            f"the sharding transformer needs chunks_per_shard, a list of whole numbers, "
            f"got {dict(configuration)!r}"
        )
    if ndim == 0 and list(cps) == [1]:
        cps = []  # zarr-python 2.18 writes [1] for a 0-d array
    if len(cps) != ndim:
        raise SpecError(
            f"chunks_per_shard {list(cps)!r} has {len(cps)} numbers, the array {ndim} dims"
        )
    index: IndexFormat | None = DRAFT_INDEX
    if "index_codecs" in configuration or "index_location" in configuration:
        index = index_format({"index_codecs": index_codecs(DRAFT_INDEX), **configuration})
    if index is None:
        raise UnsupportedError(
            f"the index of the shards, {configuration.get('index_codecs')!r} at the "
            f"{configuration.get('index_location', 'end')!r}, is not known"
        )
    return ShardingSpec(tuple(cps), index)


def index_codecs(form: IndexFormat) -> list[dict[str, Any]]:
    """The ``index_codecs`` of an index."""
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": form.endian}}]
    return [*codecs, {"name": "crc32c"}] if form.checksum else codecs


def index_format(configuration: Mapping[str, Any]) -> IndexFormat | None:
    """The index that ``index_codecs`` and ``index_location`` describe; ``None`` if not known.

    Raises
    ------
    KeyError, TypeError
        If there are no index codecs.
    """
    location = configuration.get("index_location", "end")
    names = [name_of(c) for c in configuration["index_codecs"]]
    if location not in ("start", "end") or names not in (["bytes"], ["bytes", "crc32c"]):
        return None
    bytes_codec = configuration["index_codecs"][0]
    bytes_options = bytes_codec.get("configuration") if isinstance(bytes_codec, Mapping) else None
    endian = (bytes_options or {}).get("endian")
    if endian not in ("little", "big"):
        return None
    return IndexFormat(checksum=len(names) == 2, location=location, endian=endian)
