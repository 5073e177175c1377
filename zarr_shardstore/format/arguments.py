"""Checks of arguments of users. Each `SpecError` names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from reprlib import repr as short
from typing import Any, get_args

from zarr_shardstore.errors import SpecError

_MAX_CHUNKS = 2**28
"""A result of 256 MiB. A larger region is a mistake, or comes from hostile metadata."""


def whole_number(name: str, value: object, minimum: int = 0) -> int:
    """Return `value`, which may be an integer of numpy, as an int."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise SpecError(f"{name} is a whole number of at least {minimum}, got {short(value)}")
    return number


def check_choice(name: str, given: object, choices: Any) -> None:
    """Raise `SpecError` unless a ``Literal`` has the value."""
    if given not in get_args(choices):
        names = " or ".join(map(repr, get_args(choices)))
        raise SpecError(f"{name} is {names}, got {short(given)}")


def items_of(name: str, given: object) -> list[Any]:
    """Return the items of an iterable that is no text."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise SpecError(f"{name} is a list, got {short(given)}")
    return list(given)


def array_path(path: object) -> str:
    """Return the path of an array or a group, without outer slashes."""
    if not isinstance(path, str):
        raise SpecError(f"path is a str, got {short(path)}")
    return path.strip("/")


def paths_of(paths: object) -> list[str]:
    """Return one path, or each of several, without outer slashes."""
    return list(map(array_path, [paths] if isinstance(paths, str) else items_of("paths", paths)))


def storage_options_of(options: object) -> dict[str, Any] | None:
    """Return options for fsspec; ``None`` if there are none."""
    if options is not None and not isinstance(options, Mapping):
        raise SpecError(f"storage_options is a mapping of options for fsspec, got {short(options)}")
    return dict(options) if options else None


def check_n_chunks(n_chunks: int) -> None:
    """Raise `SpecError` if a region has more chunks than a result may have bytes."""
    if n_chunks > _MAX_CHUNKS:
        raise SpecError(
            f"the region has {n_chunks} chunks, a call takes at most {_MAX_CHUNKS}: give a smaller "
            "region"
        )


def box_of(region: Any, grid_shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the chunks of a region, clipped to the grid as Python clips slices."""
    slices = () if region is None else tuple(items_of("region", region))
    if len(slices) > len(grid_shape) or not all(isinstance(s, slice) for s in slices):
        raise SpecError(
            f"region is a slice for each of {len(grid_shape)} dims, got {short(region)}"
        )
    slices += (slice(None),) * (len(grid_shape) - len(slices))
    box = []
    for part, n in zip(slices, grid_shape, strict=True):
        start, stop, step = part.indices(n)
        if step != 1:
            raise SpecError(f"a region has no steps, got {region!r}")
        box.append((start, max(start, stop)))
    check_n_chunks(math.prod(stop - start for start, stop in box))
    return tuple(box)
