"""The manifest of one array that is being converted: what is done, and what is to be done.

::

    .zarr_shardstore/DIGEST/manifest.json      this
    .zarr_shardstore/DIGEST/values/c/0/0       a shard that has not been moved to its place

====================  ==========================================  ===========================
state                 objects of the array                        who may go on
====================  ==========================================  ===========================
(no manifest)         old, or new                                 –
``staging``           old; the new ones are being made            who wants the same; others
                                                                  begin anew
``replacing``         the old ones are being removed; all new     everybody, and must, once
                      ones are staged and verified                readers are kept out
``moving``            no old ones; the new ones are being moved   everybody, and must
====================  ==========================================  ===========================

In the last two states the documents of the array are those of `unfinished`; a run that stopped
before it had written them is taken back to ``staging``. A conversion to
another store has the first state only, and no staged values: there is no document before it ends.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.documents import Hierarchy, Node, dump_document, parse_json
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.plan.requests import Delete, DeletePrefix, Get, ListDir, Set
from zarr_shardstore.tools.hierarchy import STAGING
from zarr_shardstore.tools.open_base import OpenBase

__all__ = ["Manifest", "directory_of", "read_manifests", "remove_leftovers"]

State = Literal["staging", "replacing", "moving"]

_VERSION = 1

_IS_DIGEST = re.compile("[0-9a-f]{16}")
"""What `directory_of` makes; whatever else is there is not ours."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a conversion of one array does.

    Parameters
    ----------
    hierarchy, path
        Place of the array.
    state
        How far it is.
    prefix : str
        What comes before the suffix in the keys of its values.
    style, separator, ndim
        How suffixes are spelled.
    documents : dict
        Its new documents by key.
    is_staged : bool
        Values are staged: old ones have the same keys.
    """

    hierarchy: Hierarchy
    path: str
    state: State
    prefix: str
    style: Literal["draft", "default", "v2"]
    separator: str
    ndim: int
    documents: Mapping[str, Mapping[str, Any]]
    is_staged: bool

    @property
    def directory(self) -> str:
        """Everything that is kept for this conversion."""
        return directory_of(Node(self.hierarchy, self.path))

    @property
    def values_prefix(self) -> str:
        """What comes before the suffix in the keys of staged values."""
        return f"{self.directory}values/"

    @property
    def encoding(self) -> ChunkKeyEncoding:
        """How suffixes are spelled."""
        return ChunkKeyEncoding(self.style, self.separator)

    def wants_the_same(self, other: Manifest) -> bool:
        """Whether values that were staged for the one are those of the other."""
        return replace(self, state="staging") == replace(other, state="staging")

    def write(self, base: OpenBase) -> None:
        """Store it."""
        base.perform([Set(self._key, dump_document({"version": _VERSION, **asdict(self)}))])

    def at_state(self, base: OpenBase, state: State) -> Manifest:
        """Store that the conversion has come to another state; return it."""
        manifest = replace(self, state=state)
        manifest.write(base)
        return manifest

    def remove(self, base: OpenBase) -> None:
        """The conversion is over: the manifest goes first, so that nobody repeats its end."""
        base.perform([Delete(self._key)])
        base.perform([DeletePrefix(self.directory)])

    @property
    def _key(self) -> str:
        return f"{self.directory}manifest.json"


def directory_of(node: Node) -> str:
    """Where what is kept for the conversion of an array lies."""
    digest = hashlib.sha256(f"{node.hierarchy}:{node.path}".encode()).hexdigest()[:16]
    return f"{STAGING}{digest}/"


def read_manifests(base: OpenBase) -> list[Manifest]:
    """Those of all conversions that were begun and not finished.

    Raises
    ------
    SpecError
        If one was written by another version of this package, or is damaged.
    """
    (names,) = base.perform([ListDir(STAGING)])
    names = [name for name in sorted(names) if _IS_DIGEST.fullmatch(name)]
    keys = [f"{STAGING}{name}/manifest.json" for name in names]
    found = base.perform([Get(key) for key in keys])
    manifests = []
    for key, reply in zip(keys, found, strict=True):
        if reply.value is not None:
            manifests.append(_parse(key, parse_json(reply.value)))
    return manifests


def remove_leftovers(base: OpenBase) -> None:
    """Remove what conversions have left behind that removed their manifest, and stopped then."""
    (names,) = base.perform([ListDir(STAGING)])
    names = [name for name in names if _IS_DIGEST.fullmatch(name)]
    found = base.perform([Get(f"{STAGING}{name}/manifest.json") for name in names])
    without = [n for n, reply in zip(names, found, strict=True) if reply.value is None]
    base.perform([DeletePrefix(f"{STAGING}{name}/") for name in without])


def _parse(key: str, doc: dict[str, Any] | None) -> Manifest:
    try:
        members = dict(doc or {})
        if members.pop("version") != _VERSION:
            raise ValueError(f"version {(doc or {}).get('version')!r}")
        return Manifest(**members)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"the manifest {key!r} of an unfinished conversion cannot be read ({error}); it was "
            "written by another version of zarr-shardstore: finish it with that one"
        ) from error
