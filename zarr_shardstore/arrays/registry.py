"""Registry of storage transformers by name: those of this package and of others.

Another package adds a transformer by an entry point. The object takes the configuration (a
mapping) and the array (an `ArrayContext`) and returns a `StorageTransformer`::

    [project.entry-points."zarr_shardstore.storage_transformers"]
    "example.org/rot13" = "example_package:rot13"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from reprlib import repr as short
from typing import Any, TypeAlias

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.metadata.transformer_list import SHARDING, TransformerSpec
from zarr_shardstore.shards.sharding import sharding
from zarr_shardstore.shards.stack import (
    ArrayContext,
    ReadOnlyTransformer,
    Stack,
    StorageTransformer,
    crc32c,
)

TransformerFactory: TypeAlias = Callable[[Mapping[str, Any], ArrayContext], StorageTransformer]

ENTRY_POINTS = "zarr_shardstore.storage_transformers"

_factories: dict[str, TransformerFactory] = {SHARDING: sharding, "crc32c": crc32c}


def register_storage_transformer(name: str, factory: TransformerFactory) -> None:
    """Register a storage transformer in this process.

    Parameters
    ----------
    name
        Name in metadata; a URI, or a name with a domain, so that it is unique.
    factory
        Called with the configuration and the array, each time a document is parsed.

    Raises
    ------
    SpecError
        If the name is taken by another one, or it is no text, or the factory is not callable.
    """
    if not isinstance(name, str) or not callable(factory):
        raise SpecError(f"name is a str and factory is callable, got {short((name, factory))}")
    if _factories.setdefault(name, factory) is not factory:
        raise SpecError(f"there is a storage transformer {name!r} already")


def make_stack(specs: Sequence[TransformerSpec], array: ArrayContext) -> Stack:
    """Make the transformers that metadata names.

    Unknown transformers that need not be understood are passed over: values can be read, and
    none can be written. Any other unknown one raises `UnsupportedError`.
    """
    stack: list[StorageTransformer] = []
    passed_over: list[str] = []
    for spec in specs:
        try:
            factory = find_factory(spec.name)
        except UnsupportedError:
            if spec.must_understand:
                raise
            passed_over.append(spec.name)
        else:
            stack.append(factory(spec.configuration, array))
    if passed_over:
        stack.insert(0, ReadOnlyTransformer(array.path, tuple(passed_over)))
    return tuple(stack)


def find_factory(name: str) -> TransformerFactory:
    """Return the storage transformer of that name, or raise `UnsupportedError`."""
    if name in _factories:
        return _factories[name]
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in installed:
        known = ", ".join(map(repr, sorted({*_factories, *installed})))
        raise UnsupportedError(
            f"the storage transformer {name!r} is not known: install the package that provides "
            f"it (entry point {ENTRY_POINTS!r}), or register it; known are {known}"
        )
    return _factories.setdefault(name, installed[name].load())
