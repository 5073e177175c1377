"""Listing of a draft hierarchy by its Zarr v3 keys.

Keys of documents come from ``meta/root/``, with the groups that they imply. Keys of chunks and
of other values come from ``data/root/``.

Source: sharding storage transformer draft, "API implementation", list, list_prefix, list_dir.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from zarr_shardstore.draft.draft_keys import (
    DRAFT_META_ROOT,
    directory_of,
    draft_candidate_of,
    node_of_meta_key,
    parents_of,
    v3_grid_candidate,
    v3_key,
)
from zarr_shardstore.draft.draft_nodes import DraftNodes
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT, check_prefix

_KEYS_PER_ROUND = 1000


async def list_prefix(nodes: DraftNodes, prefix: str) -> AsyncIterator[str]:
    """List the v3 keys that start with `prefix`; the path of an array means its directory."""
    prefix = check_prefix(prefix)
    if prefix and not prefix.endswith("/") and await nodes.spellings([prefix]):
        prefix += "/"
    directory = prefix[: prefix.rfind("/") + 1]
    async for key in _list_documents(nodes, directory):
        if key.startswith(prefix):
            yield key
    listed: set[str] = set()
    part: list[str] = []
    for base_prefix in await _data_prefixes(nodes, directory):
        async for base_key in nodes.store.list_prefix(base_prefix):
            part.append(base_key)
            if len(part) == _KEYS_PER_ROUND:
                for key in await _translated(nodes, part, prefix, listed):
                    yield key
                part.clear()
    for key in await _translated(nodes, part, prefix, listed):
        yield key


async def list_dir(nodes: DraftNodes, prefix: str) -> AsyncIterator[str]:
    """List the names of the v3 keys and directories directly in a directory."""
    prefix = check_prefix(prefix)
    directory = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    path = directory.removesuffix("/")
    (document,) = await nodes.read([path])
    names: dict[str, None] = {}
    if document is not None:
        names[v3_key("")] = None
    below = [name async for name in nodes.store.list_dir(DRAFT_META_ROOT + directory)]
    directories = await _directories_among(nodes, directory, below)
    for name in below:
        node = node_of_meta_key(f"{DRAFT_META_ROOT}{directory}{name}")
        if node is not None and name not in directories:
            names[node[0].removeprefix(directory)] = None
    for name in directories:
        # Local files keep empty directories after deletions.
        if name not in names and await nodes.has_nodes_below(directory + name):
            names[name] = None
    for base_directory in await _data_prefixes(nodes, directory):
        found = [n async for n in nodes.store.list_dir(base_directory)]
        for name in await _shown_names(nodes, base_directory, directory, found):
            names[name] = None
    for name in names:
        yield name


async def _directories_among(nodes: DraftNodes, directory: str, below: list[str]) -> list[str]:
    """Return the names in a directory below ``meta/root/`` that are directories.

    A node may be named as a document is, ``foo.array.json``. If it has a document of its own,
    the store is asked for a value under that name; if not, the name is the document of ``foo``.
    """
    all_below = set(below)
    directories = []
    for name in below:
        key = f"{DRAFT_META_ROOT}{directory}{name}"
        if node_of_meta_key(key) is not None:
            own = {f"{name}.array.json", f"{name}.group.json"}
            if not own & all_below or await nodes.has_value(key):
                continue
        directories.append(name)
    return directories


async def _list_documents(nodes: DraftNodes, directory: str) -> AsyncIterator[str]:
    """List the v3 keys of the documents in a directory, that of its own node first."""
    own = directory.removesuffix("/")
    (document,) = await nodes.read([own])
    seen = {own}
    if document is not None:
        yield v3_key(own)
    async for key in nodes.store.list_prefix(DRAFT_META_ROOT + directory):
        node = node_of_meta_key(key)
        if node is None:
            continue
        for path in (node[0], *parents_of(node[0])):
            if path in seen:
                break  # and so are its parents
            seen.add(path)
            yield v3_key(path)


async def _data_prefixes(nodes: DraftNodes, directory: str) -> list[str]:
    """Return the prefixes below which values are stored whose v3 keys are in a directory."""
    prefixes = [DRAFT_DATA_ROOT + directory]
    candidate = v3_grid_candidate(directory.removesuffix("/"))
    if candidate is not None:
        path, components = candidate
        for spelling in (await nodes.spellings([path])).values():
            in_array = spelling.directory_to_draft(components)
            if in_array is not None:
                prefixes.append(DRAFT_DATA_ROOT + directory_of(path) + in_array)
    return prefixes


async def _translated(
    nodes: DraftNodes, base_keys: list[str], prefix: str, listed: set[str]
) -> list[str]:
    """Return the v3 keys that start with `prefix`, each once: a 0-d chunk may have two places."""
    shown = []
    for key in await nodes.v3_keys(base_keys):
        if key is not None and key.startswith(prefix) and key not in listed:
            listed.add(key)
            shown.append(key)
    return shown


async def _shown_names(
    nodes: DraftNodes, base_directory: str, directory: str, names: list[str]
) -> list[str]:
    """Return the names in a v3 directory for those in a directory below ``data/root/``."""
    rests = [base_directory.removeprefix(DRAFT_DATA_ROOT) + name for name in names]
    as_draft = [draft_candidate_of(rest) for rest in rests]
    known = await nodes.spellings(c[0] for c in as_draft if c is not None)
    shown = []
    others = []
    for rest, draft in zip(rests, as_draft, strict=True):
        suffix = known[draft[0]].leading_to_v3(draft[1]) if draft and draft[0] in known else None
        if draft and suffix is not None:
            shown.append(directory_of(draft[0]) + suffix)
        else:
            others.append(DRAFT_DATA_ROOT + rest)
    for other, key in zip(others, await nodes.v3_keys(others), strict=True):
        if key is not None:
            shown.append(key)
        elif [name async for name in nodes.store.list_dir(other)]:
            # A key of this name has no v3 key, but this is a directory.
            shown.append(other.removeprefix(DRAFT_DATA_ROOT))
    inside = [key.removeprefix(directory) for key in shown if key.startswith(directory)]
    return [name.partition("/")[0] for name in inside]
