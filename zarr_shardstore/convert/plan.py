"""What is to be done with each array of a store: nothing listed, nothing written.

How large the stored chunks of an array are, from a look at some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from zarr_shardstore.arrays.policy import NewArrays, ShardingPolicy
from zarr_shardstore.convert.array_state import ArrayState, Form
from zarr_shardstore.convert.regions import ArrayLocation, block_shape
from zarr_shardstore.convert.report import Action
from zarr_shardstore.convert.task import ArrayTask
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.index import IndexFormat
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.format.sharding_spec import ShardingSpec
from zarr_shardstore.inspect.find import quoted, select_paths
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.metadata.auto_shards import choose_chunks_per_shard
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.shards.requests import GetSize

_ROUND = 128
_N_ROUNDS = 8
_ENOUGH = 64
"""Chunks that are asked for at once, how often, and how many must be there to stop."""

_MAX_INT64 = 2**63 - 1

_UNKNOWN_NBYTES = 1_000_000
"""Taken where no chunk was found and the data type tells no size."""


def chunks_per_shard_by_size(base: BaseStoreHandle, state: ArrayState) -> tuple[Coords, str]:
    """Choose chunks per shard from the sizes of stored chunks, and say why.

    Cost: up to 1,024 requests for sizes, spread over the grid; nothing is listed.
    """
    sizes: list[int] = []
    for keys in _some_keys(state):
        replies = base.perform([GetSize(key) for key in keys])
        sizes += [size for size in replies if size is not None]
        if len(sizes) >= _ENOUGH:
            break
    if sizes:
        return choose_chunks_per_shard(state.grid_shape, sum(sizes) / len(sizes))
    nominal = state.nominal_nbytes or _UNKNOWN_NBYTES
    cps, reason = choose_chunks_per_shard(state.grid_shape, nominal)
    return cps, f"no stored chunk was found, so as before compression: {reason}"


def _some_keys(state: ArrayState) -> Iterator[list[str]]:
    """Keys of chunks all over the grid, the same ones each time; all, if there are few."""
    geometry = state.geometry
    assert geometry is not None
    grid = state.grid_shape
    prefix, encode = state.node.chunk_prefix, geometry.encoding.encode
    n_chunks = int(np.prod([float(n) for n in grid]))
    rng = np.random.default_rng(0)
    if n_chunks <= _ROUND * _N_ROUNDS:
        coords = [tuple(c) for c in np.ndindex(*grid)]
        rng.shuffle(coords)
    else:
        columns = [rng.integers(0, min(n, _MAX_INT64), _ROUND * _N_ROUNDS).tolist() for n in grid]
        coords = list(zip(*columns, strict=True))
    for i in range(0, len(coords), _ROUND):
        yield [prefix + encode(tuple(map(int, c))) for c in coords[i : i + _ROUND]]


Choose: TypeAlias = "Callable[[BaseStoreHandle, ArrayState], tuple[Form, str]]"
"""The form that an array shall have, and why."""


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """What is to be done with one array.

    Parameters
    ----------
    form : Form
        What it shall have afterwards.
    action
        What that means, from what it has.
    reason : str
        Why.
    is_chosen : bool
        It is among those that shall be converted.
    """

    state: ArrayState
    form: Form
    action: Action
    reason: str
    is_chosen: bool = True

    @property
    def region_shape(self) -> Coords:
        """Values along each dimension that one task converts."""
        cps = self.form.chunks_per_shard or self.state.form.chunks_per_shard
        if self.action == "copied" or cps is None:
            return block_shape(self.source_grid_shape)
        return cps

    @property
    def source_grid_shape(self) -> Coords:
        """Of values; of objects, if they are copied as they are."""
        if self.action != "copied":
            return self.state.grid_shape
        return self._place(_NOWHERE, self.state.form).object_grid_shape

    def task(
        self,
        source: BaseStoreHandle,
        target: BaseStoreHandle,
        target_prefix: str,
        order: EntryOrder,
        *,
        may_be_there: bool,
    ) -> ArrayTask:
        """What its tasks have in common."""
        nominal = self.state.nominal_nbytes
        if self.action == "copied":
            # Objects are values: what is in them does not matter.
            here = self._place(source, self.state.form)
            plain = ArrayLocation(source, here.prefix, here.encoding, here.object_grid_shape, None)
            if nominal is not None and self.state.form.spec is not None:
                nominal *= self.state.form.spec.n_entries
            source_place = plain
            target_place = ArrayLocation(
                target, target_prefix, plain.encoding, plain.grid_shape, None
            )
        else:
            source_place = self._place(source, self.state.form)
            target_place = self._place(target, self.form, target_prefix)
        return ArrayTask(
            source_place, target_place, self.region_shape, order, nominal, may_be_there
        )

    def _place(self, base: BaseStoreHandle, form: Form, prefix: str | None = None) -> ArrayLocation:
        geometry = self.state.geometry
        assert geometry is not None
        own = self.state.node.chunk_prefix
        return ArrayLocation(
            base,
            own if prefix is None else prefix,
            geometry.encoding,
            self.state.grid_shape,
            form.spec,
        )


_NOWHERE: BaseStoreHandle = None  # type: ignore[assignment]


def plan_array(base: BaseStoreHandle, state: ArrayState, choose: Choose | None) -> ArrayPlan:
    """Decide what is done with an array; without `choose` it keeps its form."""
    if choose is None:
        return ArrayPlan(state, state.form, "skipped", "not among the paths", is_chosen=False)
    if state.obstacle:
        return ArrayPlan(state, state.form, "skipped", f"it cannot be converted: {state.obstacle}")
    form, reason = choose(base, state)
    if form == state.form:
        return ArrayPlan(state, form, "skipped", reason)
    if form.spec is None:
        return ArrayPlan(state, form, "unsharded", reason)
    action: Action = "sharded" if state.form.spec is None else "resharded"
    return ArrayPlan(state, form, action, reason)


def to_shards(new_arrays: NewArrays) -> Choose:
    """Shards as the options of a store for new arrays say, none larger than the grid."""
    policy = new_arrays.policy

    def choose(base: BaseStoreHandle, state: ArrayState) -> tuple[Form, str]:
        now = state.form
        grid = state.grid_shape
        ndim = len(grid)
        if ndim == 0:
            return now, "it has no dimensions, so one chunk"
        if policy.is_auto(state.path):
            if now.spec is not None:
                return now, "it has shards, and 'auto' leaves them as they are"
            if math.prod(grid) == 1:
                return now, "it has one chunk"
            cps, reason = chunks_per_shard_by_size(base, state)
            if math.prod(cps) == 1:
                return now, reason
            return _declared(new_arrays, state, cps, reason)
        asked = policy.for_array(state.path, ndim)
        if asked is None:
            return now, "chunks_per_shard does not name it"
        if _has(new_arrays, state, asked):
            return now, _HAS_THEM
        cps = clip_to_grid(asked, grid)
        clipped = "" if cps == asked else ", no more than its grid has"
        return _declared(new_arrays, state, cps, f"as chunks_per_shard says{clipped}")

    return choose


def clip_to_grid(cps: Coords, grid_shape: Coords) -> Coords:
    """No more entries in a shard than the array has chunks: the index would be full of missing
    ones. Where there are no chunks at all, they are still to come.

    >>> clip_to_grid((8, 8, 8), (20, 3, 0))
    (8, 3, 8)
    """
    return tuple(min(c, n) if n else c for c, n in zip(cps, grid_shape, strict=True))


_HAS_THEM = "it has these shards already"


def to_plain(_base: BaseStoreHandle, state: ArrayState) -> tuple[Form, str]:
    """Each chunk in an object of its own."""
    if state.form.spec is None:
        return state.form, "it has no shards"
    return Form(None), "as asked"


def matching(states: Sequence[ArrayState], paths: Iterable[str] | str | None) -> set[Node]:
    """Return the arrays that the argument `paths` names.

    Raises
    ------
    SpecError
        If a path names no array.
    UnsupportedError
        If one of them cannot be converted, and was named.
    """
    selected = select_paths({state.path for state in states}, paths)
    chosen = {state.node for state in states if state.path in selected}
    if paths is None:
        return chosen
    for state in states:
        if state.node in chosen and state.obstacle:
            raise UnsupportedError(
                f"the array {state.path!r} cannot be converted: {state.obstacle}; leave it out of "
                "paths"
            )
    return chosen


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


def _declared(
    new_arrays: NewArrays, state: ArrayState, cps: Coords, reason: str
) -> tuple[Form, str]:
    """Shards of `cps` chunks; if it has such already, with the index that they have."""
    if _has(new_arrays, state, cps):
        return state.form, _HAS_THEM
    return Form(ShardingSpec(cps, _index(new_arrays, state))), reason


def _has(new_arrays: NewArrays, state: ArrayState, cps: Coords) -> bool:
    """Whether an array has shards of `cps` chunks, with the index that is asked for."""
    now = state.form.spec
    return now is not None and now.chunks_per_shard == cps and new_arrays.index in (None, now.index)


def _index(new_arrays: NewArrays, state: ArrayState) -> IndexFormat:
    """That of the options; else what the array has, else what new ones get."""
    if new_arrays.index is not None:
        return new_arrays.index
    if state.form.spec is not None:
        return state.form.spec.index
    return new_arrays.default_index(state.node)
