"""The list ``storage_transformers`` of an array: names and configurations, in three spellings.

The first transformer of the list is the nearest to the array, the last the nearest to the
store. Three spellings are read, and the first is written::

    {"name": NAME, "configuration": {…}}                      draft 1.0; NAME alone is enough
    {"storage_transformer": URI, "configuration": {…}}        early draft, with "format"
    {"extension": URI, "type": …, "configuration": {…}}       zarr-python 2.13 to 2.18

Other members of a sharding are refused, because they may move chunks. The index codec ``bytes``
is called ``endian`` in the example of ZEP 2.

Source: sharding storage transformer draft, "Configuration"; its earlier draft; zarr-python
2.18, ``zarr/meta.py`` and ``Array._load_metadata_nosync`` (the order of the list).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.box_grid import BoxGrid, parse_sides, spell_side
from zarr_shardstore.format.shard import DRAFT_INDEX, IndexFormat, ShardingSpec

SHARDING = "sharding"
_SHARDING_URI = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
SHARDING_URIS = (_SHARDING_URI, _SHARDING_URI.replace("https:", "http:"))

_NAME_MEMBERS = ("name", "storage_transformer", "extension")
CODEC_MEMBERS = {"name", "configuration", "must_understand"}


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """One storage transformer as metadata states it, in any spelling."""

    name: str
    configuration: Mapping[str, Any] = field(default_factory=dict)
    must_understand: bool = True
    """Readers that do not know the transformer refuse the values."""
    sharding: ShardingSpec | None = field(default=None, compare=False)
    """Parsed configuration of a sharding; ``None`` before the array is known."""


_SPELLINGS = {
    "endian": "bytes",
    "variable_length_bytes": "bytes",
    "structured": "struct",
    **{f"{order}{kind}1": f"|{kind}1" for order in "<>" for kind in "biu"},
}
"""Names of codecs and data types that writers spell in two ways."""


def name_of(extension: Any) -> Any:
    """Return the name of a codec or another extension, an object or a bare text."""
    name = extension.get("name") if isinstance(extension, Mapping) else extension
    return "bytes" if name == "endian" else name


def name_and_options(extension: Any) -> tuple[str, dict[str, Any]]:
    """Return name and configuration of a codec or another extension."""
    name = name_of(extension)
    configuration = extension.get("configuration") if isinstance(extension, Mapping) else None
    if isinstance(name, str) and isinstance(configuration, Mapping | None):
        return name, dict(configuration or {})
    raise SpecError(f"{extension!r} has no name, or a configuration that is no object")


def agree(mine: Any, theirs: Any) -> bool:
    """Whether two members of documents mean the same. Writers may leave out defaults, so only
    what both have counts. A field of a data type may be a pair."""
    match mine, theirs:
        case Mapping(), Mapping():
            return all(agree(mine[name], theirs[name]) for name in mine.keys() & theirs.keys())
        case Mapping(), str():
            return agree(mine.get("name"), theirs)
        case Mapping(), [name, data_type]:
            return agree(mine, {"name": name, "data_type": data_type})
        case ((str() | [_, _]), Mapping()):
            return agree(theirs, mine)
        case [_, *_], [_, *_]:
            return len(mine) == len(theirs) and all(map(agree, mine, theirs))
        case str(), str():
            return _SPELLINGS.get(mine, mine) == _SPELLINGS.get(theirs, theirs)
    return (mine or None) == (theirs or None)


def check_known_members(value: Mapping[str, Any], known: Set[str], what: str) -> None:
    """Raise `UnsupportedError` for unknown members."""
    unknown = sorted(value.keys() - known)
    if unknown:
        raise UnsupportedError(f"{what} has the members {unknown}, which are not known here")


def transformer_specs(transformers: Any, ndim: int | None = None) -> tuple[TransformerSpec, ...]:
    """Parse a list of storage transformers, also unknown ones, of an array of `ndim` dimensions."""
    if not isinstance(transformers, Sequence) or isinstance(transformers, str | bytes):
        raise SpecError(f"storage_transformers is a list, got {transformers!r}")
    return tuple(_transformer_spec(transformer, ndim) for transformer in transformers)


def _transformer_spec(transformer: Any, ndim: int | None) -> TransformerSpec:
    if isinstance(transformer, str):
        transformer = {"name": transformer}
    given = transformer if isinstance(transformer, Mapping) else {}
    names = [given[member] for member in _NAME_MEMBERS if member in given]
    configuration = given["configuration"] if given.get("configuration") is not None else {}
    must_understand = given.get("must_understand", True)
    is_sound = (
        names
        and all(isinstance(name, str) for name in names)
        and isinstance(configuration, Mapping)
        and isinstance(must_understand, bool)
    )
    if not is_sound:
        raise SpecError(
            f"a storage transformer is one with a name and a configuration, got {transformer!r}"
        )
    n_sharding = sum(name in (SHARDING, *SHARDING_URIS) for name in names)
    if not n_sharding:
        return TransformerSpec(names[0], dict(configuration), must_understand)
    if n_sharding < len(names):
        raise SpecError(f"a storage transformer has one name, got {names}")
    check_known_members(given, {*_NAME_MEMBERS, "type", *CODEC_MEMBERS}, "the sharding transformer")
    for layout in (given.get("type", "indexed"), configuration.get("format", "indexed")):
        if layout != "indexed":
            raise UnsupportedError(f"the sharding format {layout!r} is not known, only 'indexed'")
    options = {k: v for k, v in configuration.items() if k != "format"}
    sharding = None if ndim is None else parse_sharding(options, ndim)
    return TransformerSpec(SHARDING, options, sharding=sharding)


def spell_transformers(
    specs: Sequence[TransformerSpec], *, for_zarr_2: bool = False
) -> list[dict[str, Any]]:
    """Spell the list as the draft does, on request with what zarr-python 2.18 needs."""
    spelled: list[dict[str, Any]] = []
    for spec in specs:
        transformer: dict[str, Any] = {"name": spec.name}
        if spec.configuration:
            transformer["configuration"] = dict(spec.configuration)
        if not spec.must_understand:
            transformer["must_understand"] = False
        if for_zarr_2 and spec.name == SHARDING:
            transformer |= {"extension": _SHARDING_URI, "type": "indexed"}
            if transformer["configuration"].get("chunks_per_shard") == []:
                transformer["configuration"]["chunks_per_shard"] = [1]  # 2.18's 0-d
        spelled.append(transformer)
    return spelled


def sharding_transformer(spec: ShardingSpec) -> TransformerSpec:
    """Return the transformer that declares `spec`; the draft's form of the index is the default."""
    sides = [side if isinstance(side, int) else spell_side(side) for side in spec.boxes.sides]
    configuration: dict[str, Any] = {"chunks_per_shard": sides}
    if spec.index != DRAFT_INDEX:
        configuration["index_codecs"] = index_codecs(spec.index)
        configuration["index_location"] = spec.index.location
    return TransformerSpec(SHARDING, configuration, sharding=spec)


def sharding_spec(transformer: TransformerSpec, ndim: int) -> ShardingSpec:
    """Return the parsed configuration of a ``sharding`` transformer."""
    return transformer.sharding or parse_sharding(transformer.configuration, ndim)


def parse_sharding(configuration: Mapping[str, Any], ndim: int) -> ShardingSpec:
    """Parse the configuration of a ``sharding`` transformer of an array of `ndim` dimensions."""
    options = {"chunks_per_shard", "index_codecs", "index_location"}
    check_known_members(configuration, options, "the sharding transformer")
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
    index = index_format({"index_codecs": index_codecs(DRAFT_INDEX), **configuration})
    if not any(isinstance(side, list) for side in cps):
        return ShardingSpec(tuple(cps), index)
    sides = parse_sides(cps)
    if sides is None:
        raise SpecError(
            "chunks_per_shard has whole numbers of at least 1, or short lists of these, got "
            f"{short(cps)}"
        )
    boxes = BoxGrid(tuple(sides))
    return ShardingSpec(boxes.largest, index, boxes.uneven)


def index_codecs(form: IndexFormat) -> list[dict[str, Any]]:
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": form.endian}}]
    return [*codecs, {"name": "crc32c"}] if form.checksum else codecs


def index_format(configuration: Mapping[str, Any]) -> IndexFormat:
    """Parse ``index_codecs`` and ``index_location``."""
    location, codecs = configuration.get("index_location", "end"), configuration.get("index_codecs")
    if not isinstance(codecs, Sequence) or isinstance(codecs, str):
        raise SpecError(f"index_codecs is a list, got {codecs!r}")
    for codec in codecs:
        check_known_members(codec if isinstance(codec, Mapping) else {}, CODEC_MEMBERS, "a codec")
    names, options = zip(*map(name_and_options, codecs), strict=True) if codecs else ((), ({},))
    endian: Any = options[0].pop("endian", None)
    is_known = (
        names in (("bytes",), ("bytes", "crc32c"))
        and endian in ("little", "big")
        and not any(options)
        and location in ("start", "end")
    )
    if not is_known:
        raise UnsupportedError(
            f"the index of the shards, {list(codecs)!r} at the {location!r}, is not known"
        )
    return IndexFormat(checksum="crc32c" in names, location=location, endian=endian)
