"""Checks of metadata documents: each alone, and against other documents with the same content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any, TypeAlias

from zarr_shardstore.access import BaseStoreHandle, declarations, metadata
from zarr_shardstore.tools.check.chunks import parsed_by_zarr
from zarr_shardstore.tools.check.findings import Finding, finding
from zarr_shardstore.tools.convert.other_keys import in_rounds
from zarr_shardstore.tools.inspect.find import DOCUMENTS, HIERARCHIES, StoreContents
from zarr_shardstore.tools.native import document_members
from zarr_shardstore.tools.native.translate import images_of, v3_of_v2

_SAME_IF_EMPTY = ("attributes", "storage_transformers", "dimension_names")
"""Members that mean the same if they are empty, null or missing."""

_OF_ENCODERS = {"acceleration", "blocksize", "check", "checksum", "clevel", "cname", "level"}
_OF_ENCODERS |= {"preset", "shuffle", "typesize"}
"""Options of compressors that a decoder reads from the chunk, or does not need."""

_Levels: TypeAlias = dict[metadata.Node, list[metadata.Node]]
"""Levels of OME images by the node of the group."""


def check_documents(
    base: BaseStoreHandle, contents: StoreContents, selected: Set[str] | None, levels: _Levels
) -> list[Finding]:
    """Check the documents of groups, copies of documents, and pairs of formats. Add the levels of
    each OME image."""
    found: list[Finding] = []
    stored = {metadata.document_key(node): array.doc for node, array in contents.arrays.items()}
    keys = {key for key in contents.other_keys if key.rpartition("/")[2] in DOCUMENTS}
    others: dict[str, Mapping[str, Any]] = {}
    for some in in_rounds(sorted(keys)):
        for key, value in zip(some, base.values(some, check=False), strict=True):
            if (read := metadata.parse_json(value)) is not None:
                others[key] = read
            elif value is not None:
                found.append(finding("document", key, "it holds no JSON object"))
    found += _pairs(contents)
    stored |= others
    for key, doc in others.items():
        path, _, name = key.rpartition("/")
        if metadata.all_members(doc):
            found += _copies(key, path, doc, stored)
        if name in ("zarr.json", ".zattrs"):
            found += _find_levels(key, path, doc, contents, levels)
    return [f for f in found if selected is None or f.array is None or f.array in selected]


def _copies(
    key: str, path: str, doc: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Compare the copies in consolidated metadata with the documents themselves."""
    start, is_v2 = f"{path}/".lstrip("/"), "zarr_consolidated_format" in doc
    copies = {
        start + (name if is_v2 else f"{name}/zarr.json"): copy
        for name, copy in metadata.all_members(doc).items()
    }
    names = (".zarray", ".zgroup", ".zattrs") if is_v2 else ("zarr.json",)
    there = {
        at for at in stored if at.startswith(start) and at.rpartition("/")[2] in names and at != key
    }
    for at in sorted(there | copies.keys()):
        if not stored.get(at) and not copies.get(at):
            continue  # attributes that are missing or empty
        if at not in copies:
            text = f"it has no copy of {at!r}"
        elif at not in there:
            text = f"it has a copy of {at!r}, which is not there"
        elif not is_same_document(copies[at], stored[at]):
            text = f"its copy of {at!r} is another document"
        else:
            continue
        node = metadata.node_of_document(at)
        array = node.path if node is not None else None
        text += ": consolidate the metadata again"
        yield finding("consolidated_metadata", key, text, array=array)


def is_same_document(one: Any, other: Any) -> bool:
    """Return whether two documents mean the same, in any spelling."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return document_members.is_same_json(one, other)
    one, other = _plain(one), _plain(other)
    if document_members.is_same_json(one, other):
        return True
    try:
        return bool(_spelled_by_zarr(one) == _spelled_by_zarr(other))
    except Exception:  # an extension that is not installed here
        return False


def _plain(doc: Mapping[str, Any]) -> dict[str, Any]:
    doc = metadata.without_notes(doc)
    ignored = "consolidated_metadata"  # a copy of a group has none, or an empty one
    return {k: v for k, v in doc.items() if k != ignored and (k not in _SAME_IF_EMPTY or v)}


def _spelled_by_zarr(doc: Mapping[str, Any]) -> tuple[str, str]:
    """Return the declaration of an array, and the rest of its document."""
    found, view = declarations.split(doc)
    spelled = parsed_by_zarr({"attributes": {}, **view}).to_dict()
    return repr(found), json.dumps(spelled, sort_keys=True, default=str)


def _pairs(contents: StoreContents) -> Iterator[Finding]:
    """Compare the documents of both formats at one path: readers of each see one of them."""
    for node, array in contents.arrays.items():
        v3 = node.other_format if node.hierarchy == "v2" else None
        other = None if v3 is None else contents.arrays.get(v3)
        if v3 is None or other is None or array.geometry is None or other.geometry is None:
            continue
        key = metadata.document_key(v3)
        shape, other_shape = list(array.geometry.shape), list(other.geometry.shape)
        if shape != other_shape:
            text = f"the shape is {shape}, in {key!r} it is {other_shape}"
        elif not array.geometry.has_same_chunks(other.geometry):
            text = f"its chunks, or their keys, are not those of {key!r}"
        else:
            text = _difference(array.doc, other.doc, key)
        if text:
            yield finding("twin_documents", metadata.document_key(node), text, array=node.path)


def _difference(v2: Mapping[str, Any], v3: Mapping[str, Any], key: str) -> str:
    """Return how the values of chunks would differ, if they would."""
    try:
        declared, views = zip(*map(declarations.split, (v2, v3)), strict=True)
        specs = [None if each is None else each.transformers for each in declared]
        if specs[0] != specs[1]:
            return f"its storage transformers are not those of {key!r}"
        dtypes = [parsed_by_zarr(view).dtype.to_native_dtype().newbyteorder("=") for view in views]
        if dtypes[0] != dtypes[1]:
            return f"the data type is {dtypes[0]}, in {key!r} it is {dtypes[1]}"
        same = [parsed_by_zarr(doc).to_dict() for doc in (v3_of_v2(views[0], {}), views[1])]
    except Exception:  # what is not installed here, or only one of the formats has
        return ""
    if len({repr(doc["fill_value"]) for doc in same}) > 1:
        return f"its fill value is not that of {key!r}"
    codecs, others = ([_decoder_of(codec) for codec in doc["codecs"]] for doc in same)
    return "" if codecs == others else f"its codecs or byte order are not those of {key!r}"


def _decoder_of(codec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name of a codec, and the options that decoders need."""
    options = codec.get("configuration", {})
    return {"name": codec["name"], **{k: options[k] for k in options.keys() - _OF_ENCODERS}}


def _find_levels(
    key: str, path: str, doc: Mapping[str, Any], contents: StoreContents, levels: _Levels
) -> Iterator[Finding]:
    """Add the arrays of the levels of an OME image."""
    for image in images_of(doc if key.endswith(".zattrs") else doc.get("attributes")):
        datasets = image.get("datasets") if isinstance(image, Mapping) else None
        for dataset in datasets if isinstance(datasets, list) else []:
            name = dataset.get("path") if isinstance(dataset, Mapping) else None
            if not isinstance(name, str):
                continue
            at = f"{path}/{name.strip('/')}".strip("/")
            nodes = (metadata.Node(hierarchy, at) for hierarchy in HIERARCHIES)
            node = next((node for node in nodes if node in contents.arrays), None)
            if node is not None:
                levels.setdefault(metadata.Node("v3", path), []).append(node)
            else:
                text = f"the image names the level {name!r}, and there is no array {at!r}"
                yield finding("empty_level", key, text, array=at, severity="error")
