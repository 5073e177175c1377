"""Checks of arguments of users. Each `SpecError` names the argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any

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
