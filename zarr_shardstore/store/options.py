"""Options of a sharding store: names, defaults and validation, for every public class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from zarr_shardstore.arrays.policy import ChunksPerShard, ShardingPolicy, V3Declaration
from zarr_shardstore.arrays.registry import find_factory
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import items_of, whole_number
from zarr_shardstore.format.shard import ZEP2_INDEX, EntryOrder, IndexFormat, check_order
from zarr_shardstore.io.backends.base import Durability, FileOptions
from zarr_shardstore.io.local.locks import Locking
from zarr_shardstore.metadata.declaration import Native
from zarr_shardstore.metadata.transformer_list import (
    SHARDING,
    TransformerSpec,
    index_format,
    spell_transformers,
    transformer_specs,
)
from zarr_shardstore.metadata.transformer_list import index_codecs as spell_index_codecs
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.sharding import Strategy

Transformer: TypeAlias = str | Mapping[str, Any]
Transformers: TypeAlias = Transformer | Sequence[Transformer] | None
IndexCodecs: TypeAlias = Sequence[str | Mapping[str, Any]] | None
IndexLocation: TypeAlias = Literal["start", "end"] | None


class OptionArguments(TypedDict, total=False):
    """Keyword arguments of `ShardingStore` that are options; it documents them."""

    declaration: V3Declaration | None
    storage_transformers: Transformers
    index_codecs: IndexCodecs
    index_location: IndexLocation
    native: Native
    order: EntryOrder
    strategy: Strategy
    locking: Locking
    durability: Durability
    max_dead_bytes: int | None
    max_gap_bytes: int | None
    max_coalesced_bytes: int | None
    static: bool


@dataclass(init=False)
class ShardingOptions:
    """Validated options of a sharding store.

    Options are equal if stores with them do the same, however the arguments are spelled.
    """

    policy: ShardingPolicy
    native: Native
    order: EntryOrder
    strategy: Strategy
    files: FileOptions
    reading: ReadOptions
    max_dead_bytes: int | None
    static: bool

    def __init__(
        self,
        *,
        chunks_per_shard: ChunksPerShard = None,
        declaration: V3Declaration | None = None,
        storage_transformers: Transformers = None,
        index_codecs: IndexCodecs = None,
        index_location: IndexLocation = None,
        native: Native = "flat",
        order: EntryOrder = "morton",
        strategy: Strategy = "auto",
        locking: Locking = "os",
        durability: Durability = "process",
        max_dead_bytes: int | None = None,
        max_gap_bytes: int | None = None,
        max_coalesced_bytes: int | None = None,
        static: bool = False,
    ) -> None:
        if native not in get_args(Native):
            raise SpecError(f"native is 'flat' or 'passthrough', got {native!r}")
        if declaration not in (None, *get_args(V3Declaration)):
            raise SpecError(
                f"declaration is 'codec' or 'storage_transformers', got {declaration!r}"
            )
        transformers = _parse_transformers(storage_transformers)
        can_be_codec = native == "flat" and transformers is None
        if declaration == "codec" and not can_be_codec:
            raise SpecError(
                "arrays declared by the codec are native sharded arrays: with "
                "storage_transformers, or with native='passthrough', leave declaration away"
            )
        if declaration is None:
            declaration = "codec" if can_be_codec else "storage_transformers"
        check_order(order)
        if strategy not in get_args(Strategy):
            names = ", ".join(map(repr, get_args(Strategy)))
            raise SpecError(f"strategy is one of {names}, got {strategy!r}")
        limits = {"max_gap_bytes": max_gap_bytes, "max_coalesced_bytes": max_coalesced_bytes}
        given: dict[str, Any] = {
            name: whole_number(name, n) for name, n in limits.items() if n is not None
        }
        if max_dead_bytes is not None:
            max_dead_bytes = whole_number("max_dead_bytes", max_dead_bytes)
        index = _parse_index(index_codecs, index_location)
        self.policy = ShardingPolicy(chunks_per_shard, declaration, transformers, index)
        self.native, self.order, self.strategy = native, order, strategy
        self.files = FileOptions(locking, durability)
        self.reading = ReadOptions(**given)
        self.max_dead_bytes = max_dead_bytes
        self.static = static

    def describe(self) -> list[str]:
        """Return the arguments that differ from their defaults, as a repr writes them."""
        new, default = self.policy, ShardingOptions()
        given: dict[str, Any] = {}
        if new.rules is not None:
            given["chunks_per_shard"] = new.rules
        if new.transformers is not None:
            given["storage_transformers"] = spell_transformers(new.transformers)
        elif new.declaration != "codec":
            given["declaration"] = new.declaration
        if new.index is not None:
            given["index_codecs"] = spell_index_codecs(new.index)
            given["index_location"] = new.index.location
        for mine, its, names in (
            (self, default, ("native", "order", "strategy", "max_dead_bytes")),
            (self.files, default.files, ("locking", "durability")),
            (self, default, ("static",)),
            (self.reading, default.reading, ("max_gap_bytes", "max_coalesced_bytes")),
        ):
            values = {name: getattr(mine, name) for name in names}
            given |= {name: v for name, v in values.items() if v != getattr(its, name)}
        return [f"{name}={value!r}" for name, value in given.items()]


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
        codecs = spell_index_codecs(ZEP2_INDEX)
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    spelled = [little if codec == "bytes" else codec for codec in items_of("index_codecs", codecs)]
    return index_format({"index_codecs": spelled, "index_location": location or "end"})
