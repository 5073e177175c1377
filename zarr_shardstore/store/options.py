"""Options of a sharding store: names, defaults and validation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from types import EllipsisType
from typing import Any, Literal, TypeAlias

from zarr_shardstore.arrays import policy as policies
from zarr_shardstore.arrays.stored_array import find_factory
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import check_choice, items_of, whole_number
from zarr_shardstore.format.shard import ZEP2_INDEX, EntryOrder, IndexFormat
from zarr_shardstore.io.backends.base import BackendOptions, Durability
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.metadata import transformer_list
from zarr_shardstore.metadata.declaration import Native, View
from zarr_shardstore.metadata.transformer_list import SHARDING, TransformerSpec, transformer_specs
from zarr_shardstore.shards.append import MAX_DEAD_SHARE
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.stack import Strategy

Transformer: TypeAlias = str | Mapping[str, Any]
Transformers: TypeAlias = Transformer | Sequence[Transformer] | None
IndexCodecs: TypeAlias = Sequence[str | Mapping[str, Any]] | None
IndexLocation: TypeAlias = Literal["start", "end"] | None

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(kw_only=True)
class ShardingOptions:
    """Validated options of a sharding store: equal if stores with them do the same."""

    chunks_per_shard: policies.ChunksPerShard | EllipsisType = field(default=None, compare=False)
    shard_nbytes: int | str | None = field(default=None, compare=False)
    declaration: policies.V3Declaration | None = field(default=None, compare=False)
    storage_transformers: Transformers = field(default=None, compare=False)
    index_codecs: IndexCodecs = field(default=None, compare=False)
    index_location: IndexLocation = field(default=None, compare=False)
    native: Native = "flat"
    view: View = "chunks"
    order: EntryOrder = "morton"
    strategy: Strategy = "auto"
    locking: Locking = "os"
    durability: Durability = "process"
    max_dead_bytes: int | None = None
    max_dead_share: float = MAX_DEAD_SHARE
    max_gap_bytes: int | None = field(default=None, compare=False)
    max_coalesced_bytes: int | None = field(default=None, compare=False)
    static: bool = False
    policy: policies.ShardingPolicy = field(init=False)
    backend: BackendOptions = field(init=False)
    reading: ReadOptions = field(init=False)

    def __post_init__(self) -> None:
        check_choice("native", self.native, Native)
        check_choice("view", self.view, View)
        check_choice("strategy", self.strategy, Strategy)
        check_choice("order", self.order, EntryOrder)
        if self.view == "shards" and self.native == "passthrough":
            raise SpecError(
                "native='passthrough' shows native shards already, and leaves them to zarr: with "
                "view='shards' leave native away"
            )
        transformers = _parse_transformers(self.storage_transformers)
        can_be_codec = self.native == "flat" and transformers is None
        declaration = _parse_declaration(self.declaration, can_be_codec=can_be_codec)
        limits: dict[str, Any] = {}
        for name in ("max_dead_bytes", "max_gap_bytes", "max_coalesced_bytes"):
            if (limit := getattr(self, name)) is not None:
                limits[name] = whole_number(name, limit)
        vars(self).update(limits)
        limits.pop("max_dead_bytes", None)
        self.reading = ReadOptions(**limits)
        index = _parse_index(self.index_codecs, self.index_location)
        given = self.chunks_per_shard
        is_left_out = given is ... and self.native == "flat"
        self.chunks_per_shard = rules = policies.parse_rules(None if given is ... else given)
        if self.shard_nbytes is not None:
            if rules is not None:
                raise SpecError(
                    "chunks_per_shard and shard_nbytes both say how large a shard is: give one"
                )
            is_left_out = False
            self.shard_nbytes = rules = _parse_nbytes(self.shard_nbytes)
        self.policy = policies.ShardingPolicy(rules, declaration, transformers, index, is_left_out)
        self.backend = BackendOptions(
            self.locking, self.durability, self.static, self.max_dead_share
        )
        # In their parsed form: the caller may change what it passed, or pickle cannot save it.
        if transformers is not None:
            self.storage_transformers = transformer_list.spell_transformers(transformers)
        if index is not None:
            self.index_codecs = transformer_list.index_codecs(index)

    def with_view(self, view: View) -> ShardingOptions:
        other = copy(self)  # `replace` would parse what is parsed
        other.view = view
        return other

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> ShardingOptions:
        """Make options of those arguments of a call that are options."""
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.init})

    def describe(self) -> list[str]:
        """Return the arguments that differ from their defaults, as a repr writes arguments."""
        given = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.init}
        return [f"{name}={value!r}" for name, (value, usual) in given.items() if value != usual]


def _parse_nbytes(given: object) -> policies.ByteBudget:
    """Parse `shard_nbytes`: a whole number, or a text such as ``"64 MB"`` or ``"64MiB"``."""
    if isinstance(given, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", given.lower())
        if found is None or found[2] not in _UNITS:
            raise SpecError(f"shard_nbytes is a number of bytes, or as '64 MB', got {given!r}")
        given = int(float(found[1]) * _UNITS[found[2]])
    return policies.ByteBudget(whole_number("shard_nbytes", given, 1))


def _parse_declaration(given: Any, *, can_be_codec: bool) -> policies.V3Declaration:
    if given is not None:
        check_choice("declaration", given, policies.V3Declaration)
    if given == "codec" and not can_be_codec:
        raise SpecError(
            "arrays declared by the codec are native sharded arrays: with "
            "storage_transformers, or with native='passthrough', leave declaration away"
        )
    return given or ("codec" if can_be_codec else "storage_transformers")


def _parse_transformers(given: Transformers) -> tuple[TransformerSpec, ...] | None:
    if given is None:
        return None
    specs = transformer_specs([given] if isinstance(given, str | Mapping) else given)
    if [spec.name for spec in specs].count(SHARDING) > 1:
        raise SpecError(f"sharding comes once in a stack, got {given!r}")
    for spec in specs:
        find_factory(spec.name)
    return specs


def _parse_index(codecs: IndexCodecs, location: IndexLocation) -> IndexFormat | None:
    if codecs is None and location is None:
        return None
    if codecs is None:
        codecs = transformer_list.index_codecs(ZEP2_INDEX)
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    spelled = [little if codec == "bytes" else codec for codec in items_of("index_codecs", codecs)]
    return transformer_list.index_format(
        {"index_codecs": spelled, "index_location": location or "end"}
    )
