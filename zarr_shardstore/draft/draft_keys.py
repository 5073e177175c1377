"""Keys of the draft hierarchy, translated to keys of Zarr v3 and back.

==========================  ==================================================
v3                          draft
==========================  ==================================================
``foo/zarr.json``           ``meta/root/foo.array.json`` or ``.group.json``
``zarr.json``               ``meta/root.array.json`` or ``.group.json``
``foo/c/0/1``               ``data/root/foo/c0/1``, if ``foo`` is an array of 2 dims and ``/``
``foo/c.0.1``               ``data/root/foo/c0.1``, if ``foo`` is an array of 2 dims and ``.``;
                            ``c0-1``, if its separator is ``-``, which v3 has not
``foo/c``                   ``data/root/foo/c0``, or ``c``, if ``foo`` is an array of 0 dims
``foo/.zarray`` and such    nothing
every other key             the key after ``data/root/``
==========================  ==================================================

Source: Zarr v3 draft of 2022, "Storage keys"; zarr-python 2.13 to 2.18, ``zarr/core.py``,
``_chunk_key``; Zarr v3 core, "Chunk key encoding".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zarr_shardstore.format.keys import (
    DRAFT_DATA_ROOT,
    ChunkKeyEncoding,
    draft_candidate,
    v3_candidates,
)
from zarr_shardstore.metadata.documents import Geometry, Node, document_key

DRAFT_META_ROOT = "meta/root/"
"""Prefix of the key of each document below the root."""

ENTRY_POINT_KEY = "zarr.json"

_V2_DOCUMENTS = (".zarray", ".zgroup", ".zattrs", ".zmetadata")
_ARRAY = ".array.json"
_GROUP = ".group.json"

_IS_ODD = re.compile(r"c[0-9].*[0-9]")


def array_key(path: str) -> str:
    """Return the key of the document of an array; the root's path is ``""``."""
    return document_key(Node("draft", path))


def group_key(path: str) -> str:
    """Return the key of the document of a group."""
    return array_key(path).removesuffix(_ARRAY) + _GROUP


def node_of_meta_key(key: str) -> str | None:
    """Return the path of the node whose document has this key; ``None`` for other keys.

    >>> node_of_meta_key("meta/root/a/b.group.json"), node_of_meta_key("meta/root.array.json")
    ('a/b', '')
    """
    place = key.removesuffix(_ARRAY if key.endswith(_ARRAY) else _GROUP)
    if place == key:
        return None
    if place == DRAFT_META_ROOT.rstrip("/"):
        return ""
    path = place.removeprefix(DRAFT_META_ROOT)
    return path if path not in ("", place) and not path.endswith("/") else None


def v3_key(path: str) -> str:
    """Return the key of the v3 document of a node."""
    return document_key(Node("v3", path))


def node_of_v3_key(key: str) -> str | None:
    """Return the path of the node whose v3 document has this key; ``None`` for other keys."""
    path, _, name = key.rpartition("/")
    return path if name == "zarr.json" else None


def is_v2_document(key: str) -> bool:
    """Return whether this is the key of a Zarr v2 document; a draft hierarchy has none."""
    return key.rpartition("/")[2] in _V2_DOCUMENTS


def directory_of(path: str) -> str:
    """Return the prefix of keys below a path: with a slash, or ``""`` for the root."""
    return f"{path}/" if path else ""


def parents_of(path: str) -> list[str]:
    """Return the paths of the groups around a node, the root last.

    >>> parents_of("a/b/c")
    ['a/b', 'a', '']
    """
    parents = []
    while path:
        path = path.rpartition("/")[0]
        parents.append(path)
    return parents


def v3_candidate(key: str) -> tuple[str, str] | None:
    """Split a v3 key as ``(array path, suffix)`` by the encoding ``default``.

    There is at most one way. Only the array's document says whether it is a chunk.

    >>> v3_candidate("a/c/c/0/1"), v3_candidate("a/c.0"), v3_candidate("a/0")
    (('a/c', 'c/0/1'), ('a', 'c.0'), None)
    """
    return next((c for c in v3_candidates(key) if c[1].startswith("c")), None)


def draft_candidate_of(key: str) -> tuple[str, str] | None:
    """Split a key without its ``data/root/`` as `draft_candidate`, with any separator."""
    usual = draft_candidate(DRAFT_DATA_ROOT + key)
    path, _, name = key.rpartition("/")
    return (path, name) if usual is None and _IS_ODD.fullmatch(name) else usual


def v3_separator(separator: str) -> str:
    """Return the separator in v3's keys of an array that has `separator` in the draft's."""
    return separator if separator in ("/", ".") else "."


def chunk_places(
    arrays: Mapping[str, Geometry], candidate: tuple[str, str] | None
) -> tuple[str, ...]:
    """Return the draft's keys of a chunk, the one for writing first; none of other v3 keys.

    `arrays` are known arrays of the draft by path. The chunk of a 0-d array is ``c`` in the draft
    and ``c0`` in zarr-python 2.18.

    >>> arrays = {"a": Geometry((9, 9), (1, 1), ChunkKeyEncoding("draft", "/"))}
    >>> chunk_places(arrays, ("a", "c/0/1")), chunk_places(arrays, ("a", "c.0.1"))
    (('data/root/a/c0/1',), ())
    """
    if candidate is None or candidate[0] not in arrays:
        return ()
    path, suffix = candidate
    geometry = arrays[path]
    encoding = ChunkKeyEncoding("default", v3_separator(geometry.encoding.separator))
    coords = encoding.decode(suffix, len(geometry.shape))
    if coords is None:
        return ()
    suffixes = [geometry.encoding.encode(coords)] if coords else ["c0", "c"]
    return tuple(DRAFT_DATA_ROOT + directory_of(path) + suffix for suffix in suffixes)


def v3_chunk_key(
    arrays: Mapping[str, Geometry], candidate: tuple[str, str] | None, *, leading: bool = False
) -> str | None:
    """Return the v3 key of a chunk; ``None`` if the draft's key is that of none.

    With `leading` only the leading components are given: ``a/c/3`` for ``("a", "c3")``.
    """
    if candidate is None or candidate[0] not in arrays:
        return None
    path, suffix = candidate
    spelling, ndim = arrays[path].encoding, len(arrays[path].shape)
    if leading:
        coords = spelling.decode_leading(suffix.split("/"), ndim)
    else:
        coords = spelling.decode(suffix, ndim)
    if coords is None:
        return None
    encoding = ChunkKeyEncoding("default", v3_separator(spelling.separator))
    return directory_of(path) + encoding.encode(coords)


def directory_to_draft(geometry: Geometry, suffix: str) -> str | None:
    """Return the directory of the chunks in a v3 directory ``c/3``; ``None`` if it has none."""
    marker, *numbers = suffix.split("/")
    if geometry.encoding.separator != "/" or marker != "c" or len(numbers) >= len(geometry.shape):
        return None
    return f"c{'/'.join(numbers)}/" if numbers else ""
