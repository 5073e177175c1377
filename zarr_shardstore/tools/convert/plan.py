"""Plan of a conversion: the shards that each array gets, and why.

A migration leaves documents of Zarr v2 and v3 at one path, with the same chunk keys. They are one
array with two documents, which change together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from zarr_shardstore import errors
from zarr_shardstore.access import (
    BaseStoreHandle,
    backends,
    box_grids,
    chunk_keys,
    declarations,
    metadata,
    policies,
    read_dimension_names,
    shard_format,
    store_options,
    stored_arrays,
    transformer_list,
)
from zarr_shardstore.tools.convert.regions import BLOCK, MAX_KEYS, block_shape, random_coords
from zarr_shardstore.tools.convert.report import Action
from zarr_shardstore.tools.inspect import find

_Stack: TypeAlias = tuple[transformer_list.TransformerSpec, ...]

NOT_CHOSEN = "not among the paths"

_ROUND = 128
_MAX_SAMPLED = 1024
_ENOUGH = 64
"""Chunks whose sizes are requested in one round, and at most; and stored chunks that suffice."""
_HAS_THESE = "it has these shards already"


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """An array as its stored documents describe it, and the decision about it."""

    node: metadata.Node
    """The v3 document, if there are two."""
    documents: dict[metadata.Node, Mapping[str, Any]]
    geometry: metadata.Geometry | None
    """Geometry of the values: chunks, as they are below all transformers but sharding."""
    spec: shard_format.ShardingSpec | None = None
    """Form of the shards; ``None``: plain chunks."""
    new_spec: shard_format.ShardingSpec | None = None
    obstacle: str = ""
    """Reason why the array cannot be converted, if so."""
    action: Action = "skipped"
    reason: str = NOT_CHOSEN
    is_chosen: bool = False
    """True if the conversion is for the array."""
    is_named: bool = False
    """True if `paths` names the array."""
    has_cut_chunks: bool = False
    """True if listed shards would end inside its chunks."""
    new_documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Documents after the conversion, by key."""

    @property
    def is_hidden(self) -> bool:
        """Whether a conversion in place was interrupted while it replaced objects."""
        return any(map(metadata.has_conversion_marker, self.documents.values()))

    @property
    def grid_shape(self) -> chunk_keys.Coords:
        """Number of values along each dimension."""
        assert self.geometry is not None
        return self.geometry.grid_shape

    @property
    def nominal_nbytes(self) -> int | None:
        """Bytes of a value before compression, if the data type has a size."""
        assert self.geometry is not None
        return metadata.chunk_nbytes(self.documents[self.node], self.geometry.chunk_shape)

    @property
    def regions(self) -> shard_format.ShardingSpec:
        """Cut of the grid into regions, each of which one task converts, as into shards."""
        if self.new_spec is not None and self.action != "copied":
            return self.new_spec
        if self.spec is None:
            shape = block_shape(self.grid_shape, BLOCK)
        elif self.spec.n_entries <= MAX_KEYS:
            return self.spec
        else:
            shape = block_shape(self.spec.chunks_per_shard, MAX_KEYS)
        return shard_format.ShardingSpec(shape, shard_format.ZEP2_INDEX)

    def copied(self) -> ArrayPlan:
        """Return the plan to copy the objects of the array as they are, each as one value."""
        geometry = self.geometry
        if geometry is not None and self.spec is not None:
            geometry = geometry.in_boxes(self.spec.boxes)
        # The consolidated index is not copied: it names versions of the objects in the source.
        documents = {
            metadata.document_key(node): metadata.without_notes(doc)
            for node, doc in self.documents.items()
        }
        return replace(self, geometry=geometry, spec=None, action="copied", new_documents=documents)


def plan_store(
    base: BaseStoreHandle,
    sharding: store_options.ShardingOptions,
    paths: Iterable[str] | str | None,
    *,
    to_plain: bool,
    in_place: bool,
    copy_rest: bool,
) -> tuple[list[ArrayPlan], find.StoreContents]:
    """Decide about each array of a store, or refuse the conversion."""
    contents = base.run(find.find_contents())
    broken = [metadata.document_key(found.node) for found in contents.broken]
    if any(base.documents(broken)):
        raise errors.ShardConflictError(
            f"of the documents {find.quoted(broken)} one was cut off on its way: run the same again"
        )
    plans = _plans_of(contents.arrays.values())
    if not plans:
        raise errors.SpecError(f"no Zarr array in {base.describe()}: {find.NO_ARRAY_HINT}")
    for plan in plans:
        # A copy would have half of an array, which no run can finish.
        if not in_place and plan.is_hidden:
            raise errors.UnfinishedConversionError(
                f"a conversion in place of the array {plan.node.path!r} of the source was "
                "interrupted: run that again, without a destination, which finishes it; "
                "nothing is lost"
            )
    selected = find.select_paths({plan.node.path for plan in plans}, paths)
    dims = _dimensions_of(base, plans, sharding.policy)
    for i, plan in enumerate(plans):
        if plan.node.path in selected:
            if in_place and any(map(metadata.adopted_files, plan.documents.values())):
                raise errors.UnsupportedError(
                    f"the shards of {plan.node.path!r} are adopted files, which a conversion in "
                    "place would remove: name a destination, or undo the adoption"
                )
            if paths is not None and plan.obstacle and not plan.is_hidden:
                raise errors.UnsupportedError(
                    f"the array {plan.node.path!r} cannot be converted: {plan.obstacle}; "
                    "leave it out of paths"
                )
            plan = replace(plan, is_chosen=True, is_named=paths is not None)
            plan = _plan_array(base, plan, sharding, dims[plan.node.path], to_plain=to_plain)
        if not in_place:
            is_copied = plan.action == "skipped" and (plan.is_chosen or copy_rest)
            plan = plan.copied() if is_copied else plan
        elif plan.action != "skipped" and (
            link := base.backend.linked_directory(plan.node.chunk_prefix)
        ):
            # Listings do not follow links, and files cannot be renamed to another disk.
            raise errors.SpecError(
                f"objects of the array {plan.node.path!r} lie behind the link {link!r}: in "
                "place that cannot be converted; convert the directory that it leads to, or "
                "convert to another store"
            )
        plans[i] = plan
    _check_that_shards_fit(plans)
    return plans, contents


def _check_that_shards_fit(plans: Iterable[ArrayPlan]) -> None:
    """Refuse listed shards that would end inside the chunks of each array."""
    cut = [plan for plan in plans if plan.has_cut_chunks]
    others = [plan for plan in plans if not plan.has_cut_chunks]
    if cut and not any(plan.new_spec or plan.reason == _HAS_THESE for plan in others):
        raise errors.SpecError(f"shards fit no array; {cut[0].node.path!r}: {cut[0].reason}")


def _dimensions_of(
    base: BaseStoreHandle, plans: Iterable[ArrayPlan], policy: policies.ShardingPolicy
) -> dict[str, policies.Dimensions]:
    """Return the names of dimensions by path; refuse a policy that names unknown ones."""
    dims: dict[str, policies.Dimensions] = {}
    for plan in plans:
        names = base.run(read_dimension_names(plan.documents)) if policy.names_dimensions else ()
        ndim = len(plan.geometry.shape) if plan.geometry else 0
        dims[plan.node.path] = names if len(names) == ndim else (None,) * ndim
    for name in policy.names_without_array(dims):
        if name.startswith("("):
            raise errors.SpecError(
                f"chunks_per_shard has a number for each dimension, {name}, and the arrays have "
                f"{sorted({len(names) for names in dims.values()})} dimensions: take one number, "
                "or name dimensions and arrays"
            )
        raise errors.SpecError(
            f"chunks_per_shard, or shards, has a rule for {name!r}, and no array has such a path, "
            f"or such dimensions; there are {find.quoted(dims)}, with the dimensions "
            f"{sorted({dim for names in dims.values() for dim in names if dim})}"
        )
    return dims


def _plan_array(
    base: BaseStoreHandle,
    plan: ArrayPlan,
    sharding: store_options.ShardingOptions,
    dims: policies.Dimensions,
    *,
    to_plain: bool,
) -> ArrayPlan:
    """Decide about an array that the conversion is for."""
    if plan.is_hidden:
        why = "its conversion was interrupted: each conversion of the store finishes that one first"
        return replace(plan, reason=why)
    if plan.obstacle:
        return replace(plan, reason=f"it cannot be converted: {plan.obstacle}")
    if to_plain:
        spec, reason = None, "it has no shards" if plan.spec is None else "as asked"
    else:
        try:
            spec, reason = _choose_shards(base, plan, sharding.policy, dims)
        except policies.InsideChunkError as error:
            return replace(plan, reason=str(error), has_cut_chunks=True)
    if spec == plan.spec:
        return replace(plan, reason=reason)
    if spec and sharding.declaration == "codec" and plan.geometry and plan.geometry.sides:
        return replace(plan, reason="its chunks have several lengths, which the codec has not")
    action: Action = "sharded" if plan.spec is None else "resharded"
    action = "unsharded" if spec is None else action
    documents = {
        metadata.document_key(node): _declared_as(node, doc, spec, sharding)
        for node, doc in plan.documents.items()
    }
    return replace(plan, new_spec=spec, action=action, reason=reason, new_documents=documents)


# ------------------------------------------------------------ which shards


def _choose_shards(
    base: BaseStoreHandle,
    plan: ArrayPlan,
    policy: policies.ShardingPolicy,
    dims: policies.Dimensions,
) -> tuple[shard_format.ShardingSpec | None, str]:
    """Choose the shards of an array, none larger than the grid, and say why."""
    now, grid = plan.spec, plan.grid_shape
    # Shards with another form of index are stored again.
    is_kept = now is not None and now.sides is None and policy.index in (None, now.index)
    kept = now.chunks_per_shard if now is not None and is_kept else None
    if not grid:
        return now, "it has no dimensions, so one chunk"
    rule = policy.rule_of(plan.node.path, dims)
    if isinstance(rule, policies.ShardLengths):
        return _listed_shards(plan, policy, rule, dims)
    if rule == "auto":
        if now is not None:
            return now, "it has shards, and 'auto' leaves them as they are"
        if math.prod(grid) == 1:
            return now, "it has one chunk"
        cps, reason = _chunks_per_shard_by_size(base, plan)
        if math.prod(cps) == 1:
            return now, reason
    elif isinstance(rule, policies.ByteBudget):
        nbytes = plan.nominal_nbytes or policies.UNKNOWN_NBYTES
        cps, reason = policies.choose_chunks_per_shard(grid, nbytes, rule, may_grow=False)
    else:
        asked = policy.chunks_per_shard_of(plan.node.path, len(grid), dims)
        if asked is None:
            reason = policy.reason_to_leave(plan.node.path, len(grid), dims)
            return now, reason or "chunks_per_shard does not name it"
        cps = asked
        if asked != kept:
            # Entries outside the grid would be missing. A dimension without chunks may grow.
            cps = tuple(min(c, n) if n else c for c, n in zip(asked, grid, strict=True))
        clipped = "" if cps == asked else ", no more than its grid has"
        reason = f"as chunks_per_shard says{clipped}"
    if cps == kept:
        return now, _HAS_THESE
    return shard_format.ShardingSpec(cps, _index_of(plan, policy)), reason


def _index_of(plan: ArrayPlan, policy: policies.ShardingPolicy) -> shard_format.IndexFormat:
    usual = policy.default_index(plan.node) if plan.spec is None else plan.spec.index
    return policy.index or usual


def _listed_shards(
    plan: ArrayPlan,
    policy: policies.ShardingPolicy,
    rule: policies.ShardLengths,
    dims: policies.Dimensions,
) -> tuple[shard_format.ShardingSpec | None, str]:
    """Return the shards of listed lengths."""
    assert plan.geometry is not None
    try:
        sides = rule.sides_of(plan.geometry, dims)
    except errors.SpecError as error:
        is_inside = isinstance(error, policies.InsideChunkError)
        if is_inside and rule.is_by_name and not plan.is_named:  # as coordinates of one chunk
            raise
        raise errors.SpecError(f"the array {plan.node.path!r}: {error}") from error
    if isinstance(sides, str):
        return plan.spec, sides
    boxes = box_grids.BoxGrid(tuple(sides))
    spec = shard_format.ShardingSpec(boxes.largest, _index_of(plan, policy), boxes.uneven)
    return spec, _HAS_THESE if spec == plan.spec else "as shards says"


def _chunks_per_shard_by_size(
    base: BaseStoreHandle, plan: ArrayPlan
) -> tuple[chunk_keys.Coords, str]:
    """Choose chunks per shard by the sizes of up to 1,024 sampled chunks, and say why."""
    assert plan.geometry is not None
    prefix, encode = plan.node.chunk_prefix, plan.geometry.encoding.encode
    if math.prod(plan.grid_shape) <= _MAX_SAMPLED:
        coords = list(np.ndindex(*plan.grid_shape))
        np.random.default_rng(0).shuffle(coords)  # the same chunks each time
    else:
        coords = random_coords(map(range, plan.grid_shape), _MAX_SAMPLED)
    stored: list[int] = []
    for i in range(0, len(coords), _ROUND):
        with suppress(backends.UnreadableSourceError):  # the conversion names it for the array
            sizes = base.sizes([prefix + encode(c) for c in coords[i : i + _ROUND]])
            stored += [size for size in sizes if size is not None]
        if len(stored) >= _ENOUGH:
            break
    if stored:
        return policies.choose_chunks_per_shard(plan.grid_shape, sum(stored) / len(stored))
    nbytes = plan.nominal_nbytes or policies.UNKNOWN_NBYTES
    cps, reason = policies.choose_chunks_per_shard(plan.grid_shape, nbytes)
    return cps, f"no stored chunk was found, so as before compression: {reason}"


# ------------------------------------------------ arrays by their documents


def _plans_of(arrays: Iterable[find.FoundArray]) -> list[ArrayPlan]:
    """Return plans without a decision, in the order of their paths."""
    plans: dict[metadata.Node, ArrayPlan] = {}
    for found in arrays:
        plan = _plan_of(found)
        other = None if found.node.other_format is None else plans.get(found.node.other_format)
        if other is not None and (both := _with_both_documents(plan, other)) is not None:
            del plans[other.node]
            plan = both
        plans[plan.node] = plan
    return sorted(plans.values(), key=lambda plan: plan.node.path)


def _plan_of(found: find.FoundArray) -> ArrayPlan:
    node = found.node
    doc = _without_marks(found.doc)
    documents = {node: found.doc}
    if found.geometry is None:
        return ArrayPlan(node, documents, None, obstacle=metadata.unknown_geometry(doc))
    try:
        document = metadata.parse_array(node, doc)
        assert document is not None
        above, spec = _split(document.transformers)
        for transformer in above:
            stored_arrays.find_factory(transformer.name)
    except errors.ShardStoreError as error:
        return ArrayPlan(node, documents, found.geometry, obstacle=str(error))
    obstacle = ""
    if any(transformer.name == transformer_list.SHARDING for transformer in above):
        obstacle = "other storage transformers lie below its shards"
    elif spec is None and declarations.has_sharding_codec(doc) and document.declaration is None:
        obstacle = "its own sharding has a form that cannot be re-packed"
    return ArrayPlan(node, documents, document.geometry, spec, spec, obstacle)


def _split(specs: _Stack) -> tuple[_Stack, shard_format.ShardingSpec | None]:
    """Split parsed transformers into those above the values, and the sharding, if any."""
    sharding = specs[-1].sharding if specs else None
    return (specs if sharding is None else specs[:-1]), sharding


def _declared_as(
    node: metadata.Node,
    doc: Mapping[str, Any],
    spec: shard_format.ShardingSpec | None,
    sharding: store_options.ShardingOptions,
) -> dict[str, Any]:
    """Return a document with other shards, declared as the option says, else as it was before."""
    doc = _without_marks(doc)
    declared = declarations.find_declaration(doc)
    above, _ = _split(() if declared is None else declared.transformers)
    if declared is not None:
        doc = declarations.strip(doc, declared.how)
    transformers = above if spec is None else (*above, transformer_list.sharding_transformer(spec))
    geometry = metadata.plain_geometry(node.hierarchy, doc)
    new = sharding.policy.declare(node, transformers, geometry)
    is_even = geometry is None or geometry.sides is None
    keeps_form = declared is not None and (declared.how != "codec" or is_even)
    if new is not None and declared is not None and keeps_form and sharding.declaration is None:
        new = declarations.Declared(declared.how, transformers)
    return dict(doc) if new is None else declarations.apply(doc, new)


def _without_marks(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove the notes about the old shards, and the mark that leaves the sharding to zarr."""
    doc = metadata.without_notes(doc)
    is_marked = declarations.mark_of(doc) == "passthrough"
    return declarations.without_mark(doc) if is_marked else doc


def _with_both_documents(plan: ArrayPlan, other: ArrayPlan) -> ArrayPlan | None:
    """Return the plan of an array with two documents; ``None`` if they share no chunk key."""
    v3, v2 = (plan, other) if plan.node.hierarchy == "v3" else (other, plan)
    if v3.geometry is None or v2.geometry is None:
        return None
    encodings = v3.geometry.encoding, v2.geometry.encoding
    corners = [(0,) * len(geometry.shape) for geometry in (v3.geometry, v2.geometry)]
    if all(encodings[0].encode(corner) != encodings[1].encode(corner) for corner in corners):
        return None
    obstacle = v3.obstacle or v2.obstacle
    is_same = v3.geometry.has_same_chunks(v2.geometry) and v3.spec == v2.spec
    if not is_same or v3.grid_shape != v2.grid_shape:
        obstacle = obstacle or "its documents of Zarr v2 and v3 contradict each other"
    return replace(v3, documents=v3.documents | v2.documents, obstacle=obstacle)
