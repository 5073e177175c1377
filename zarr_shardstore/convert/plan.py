"""Decides for each array of a store which shards it gets, and why. Nothing is listed or written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from zarr_shardstore.arrays.policy import NewArrays, ShardingPolicy
from zarr_shardstore.convert.array_state import ArrayState
from zarr_shardstore.convert.regions import ArrayLocation, block_shape, random_coords
from zarr_shardstore.convert.report import Action
from zarr_shardstore.convert.task import ArrayTask
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.index import ShardingSpec
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import chunk_grid_shape
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.inspect.find import quoted, select_paths
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.metadata.auto_shards import choose_chunks_per_shard
from zarr_shardstore.metadata.documents import Node

_ROUND = 128
_N_ROUNDS = 8
_ENOUGH = 64
"""Chunks whose sizes are requested in one round, most rounds, and stored chunks that suffice."""

_UNKNOWN_NBYTES = 1_000_000
"""Assumed size of a chunk, if none was found and the data type has no size."""


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """Decision about one array.

    Parameters
    ----------
    spec : ShardingSpec, optional
        The shards that it gets; ``None``: each value has a key of its own.
    is_chosen : bool
        It is among the arrays that the caller named.
    """

    state: ArrayState
    spec: ShardingSpec | None
    action: Action
    reason: str
    is_chosen: bool = True

    @property
    def source_grid_shape(self) -> Coords:
        """Number of values along each dimension. An object that is copied is one value."""
        grid, spec = self.state.grid_shape, self.state.spec
        if self.action != "copied" or spec is None:
            return grid
        return chunk_grid_shape(grid, spec.chunks_per_shard)

    @property
    def region_shape(self) -> Coords:
        """Number of values along each dimension that one task converts."""
        spec = self.spec or self.state.spec
        if self.action == "copied" or spec is None:
            return block_shape(self.source_grid_shape)
        return spec.chunks_per_shard

    @property
    def n_regions(self) -> int:
        """Number of tasks, if no region is left out."""
        if self.action == "skipped" or self.state.geometry is None:
            return 0
        return math.prod(chunk_grid_shape(self.source_grid_shape, self.region_shape))

    def task(
        self,
        source: BaseStoreHandle,
        target: BaseStoreHandle,
        target_prefix: str,
        order: EntryOrder,
        *,
        may_be_there: bool,
    ) -> ArrayTask:
        """Return the part that all tasks of the array share."""
        state, nominal = self.state, self.state.nominal_nbytes
        assert state.geometry is not None
        encoding, grid = state.geometry.encoding, self.source_grid_shape
        spec, new_spec = state.spec, self.spec
        if self.action == "copied":
            if nominal is not None and spec is not None:
                nominal *= spec.n_entries
            spec = new_spec = None
        return ArrayTask(
            ArrayLocation(source, state.node.chunk_prefix, encoding, grid, spec),
            ArrayLocation(target, target_prefix, encoding, grid, new_spec),
            self.region_shape,
            order,
            nominal,
            may_be_there,
        )


ChooseShards: TypeAlias = Callable[[BaseStoreHandle, ArrayState], tuple[ShardingSpec | None, str]]
"""Returns the shards that an array gets, and why."""


def plan_array(base: BaseStoreHandle, state: ArrayState, choose: ChooseShards | None) -> ArrayPlan:
    """Decide what is done with an array; without `choose` it stays as it is."""
    now = state.spec
    if choose is None:
        return ArrayPlan(state, now, "skipped", "not among the paths", is_chosen=False)
    if state.obstacle:
        return ArrayPlan(state, now, "skipped", f"it cannot be converted: {state.obstacle}")
    spec, reason = choose(base, state)
    if spec == now:
        return ArrayPlan(state, now, "skipped", reason)
    if spec is None:
        return ArrayPlan(state, None, "unsharded", reason)
    return ArrayPlan(state, spec, "sharded" if now is None else "resharded", reason)


def chosen_arrays(states: Sequence[ArrayState], paths: Iterable[str] | str | None) -> set[Node]:
    """Return the arrays that the argument `paths` names.

    Raises
    ------
    SpecError
        If a path names no array.
    UnsupportedError
        If an array that it names cannot be converted.
    """
    selected = select_paths({state.path for state in states}, paths)
    for state in states:
        if paths is not None and state.path in selected and state.obstacle:
            raise UnsupportedError(
                f"the array {state.path!r} cannot be converted: {state.obstacle}; leave it out of "
                "paths"
            )
    return {state.node for state in states if state.path in selected}


def check_rules(policy: ShardingPolicy, states: Sequence[ArrayState]) -> None:
    """Refuse a rule for arrays that are not there: its path was meant to be another one.

    Raises
    ------
    SpecError
        With the arrays that there are.
    """
    for name in policy.names_without_array([state.path for state in states]):
        raise SpecError(
            f"chunks_per_shard has a rule for {name!r}, and no array has such a path; there are "
            f"{quoted(state.path for state in states)}"
        )


# ------------------------------------------------------------ which shards


def to_plain(_base: BaseStoreHandle, state: ArrayState) -> tuple[None, str]:
    """Give each chunk an object of its own."""
    return None, "it has no shards" if state.spec is None else "as asked"


def to_shards(new_arrays: NewArrays) -> ChooseShards:
    """Give each array the shards that a new array would get, none larger than the grid."""
    policy = new_arrays.policy

    def choose(base: BaseStoreHandle, state: ArrayState) -> tuple[ShardingSpec | None, str]:
        now, grid = state.spec, state.grid_shape
        if not grid:
            return now, "it has no dimensions, so one chunk"
        if policy.is_auto(state.path):
            if now is not None:
                return now, "it has shards, and 'auto' leaves them as they are"
            if math.prod(grid) == 1:
                return now, "it has one chunk"
            cps, reason = chunks_per_shard_by_size(base, state)
            if math.prod(cps) == 1:
                return now, reason
        else:
            asked = policy.for_array(state.path, len(grid))
            if asked is None:
                return now, "chunks_per_shard does not name it"
            cps = asked if _has(new_arrays, state, asked) else clip_to_grid(asked, grid)
            clipped = "" if cps == asked else ", no more than its grid has"
            reason = f"as chunks_per_shard says{clipped}"
        if _has(new_arrays, state, cps):
            return now, "it has these shards already"
        index = new_arrays.index or (
            new_arrays.default_index(state.node) if now is None else now.index
        )
        return ShardingSpec(cps, index), reason

    return choose


def _has(new_arrays: NewArrays, state: ArrayState, cps: Coords) -> bool:
    """Return whether an array has shards of `cps` chunks, with the index that is asked for."""
    now = state.spec
    return now is not None and now.chunks_per_shard == cps and new_arrays.index in (None, now.index)


def clip_to_grid(cps: Coords, grid_shape: Coords) -> Coords:
    """Return a shard with no more entries than the array has chunks: all others would be missing.

    A dimension without chunks is not clipped: its chunks are still to come.

    >>> clip_to_grid((8, 8, 8), (20, 3, 0))
    (8, 3, 8)
    """
    return tuple(min(c, n) if n else c for c, n in zip(cps, grid_shape, strict=True))


def chunks_per_shard_by_size(base: BaseStoreHandle, state: ArrayState) -> tuple[Coords, str]:
    """Choose chunks per shard from the sizes of sampled chunks, and say why.

    Cost: up to 1,024 requests for sizes, spread over the grid; nothing is listed.
    """
    stored: list[int] = []
    for keys in _sampled_keys(state):
        stored += [size for size in base.sizes(keys) if size is not None]
        if len(stored) >= _ENOUGH:
            break
    if stored:
        return choose_chunks_per_shard(state.grid_shape, sum(stored) / len(stored))
    nominal = state.nominal_nbytes or _UNKNOWN_NBYTES
    cps, reason = choose_chunks_per_shard(state.grid_shape, nominal)
    return cps, f"no stored chunk was found, so as before compression: {reason}"


def _sampled_keys(state: ArrayState) -> Iterator[list[str]]:
    """Return keys of chunks from all over the grid, the same each time; all, if there are few."""
    assert state.geometry is not None
    prefix, encode = state.node.chunk_prefix, state.geometry.encoding.encode
    rng = np.random.default_rng(0)
    if math.prod(state.grid_shape) <= _ROUND * _N_ROUNDS:
        coords = list(np.ndindex(*state.grid_shape))
        rng.shuffle(coords)
    else:
        coords = random_coords(state.grid_shape, _ROUND * _N_ROUNDS, rng)
    for i in range(0, len(coords), _ROUND):
        yield [prefix + encode(tuple(map(int, c))) for c in coords[i : i + _ROUND]]
