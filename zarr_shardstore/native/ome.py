"""OME-Zarr metadata of version 0.4 (Zarr v2), moved to where version 0.5 (Zarr v3) has it.

=====================================  =====================================================
0.4, attributes of a group             0.5
=====================================  =====================================================
``multiscales``, ``omero``, ``plate``  the same in ``ome``, after one ``"version": "0.5"``
``well``, ``labels``, ``image-label``,
``bioformats2raw.layout``, ``series``
their ``version``                      (gone)
axes of the multiscales                also ``dimension_names`` of its arrays
other attributes                       unchanged
=====================================  =====================================================

Source: OME-NGFF 0.4 and 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarr_shardstore.errors import UnsupportedError

Attributes = dict[str, Any]

_MEMBERS = (
    "multiscales",
    "omero",
    "labels",
    "plate",
    "well",
    "image-label",
    "bioformats2raw.layout",
    "series",
)
_FROM, _TO = "0.4", "0.5"


def to_ome_05(attributes: Mapping[str, Any]) -> Attributes:
    """Return attributes of a group as OME-Zarr 0.5 has them; the same if they are none of 0.4.

    >>> to_ome_05({"labels": ["cells"], "mine": 1})
    {'mine': 1, 'ome': {'version': '0.5', 'labels': ['cells']}}
    """
    members = {name: attributes[name] for name in _MEMBERS if name in attributes}
    if not members:
        return dict(attributes)
    if "ome" in attributes:
        raise UnsupportedError(
            f"it has OME-Zarr attributes of two versions, 'ome' and {sorted(members)}: remove one"
        )
    moved = {name: _without_version(name, member) for name, member in members.items()}
    rest = {name: value for name, value in attributes.items() if name not in members}
    return {**rest, "ome": {"version": _TO, **moved}}


def dimension_names_of_levels(attributes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return dimension names by path of an array below the group, from attributes of 0.5."""
    ome = attributes.get("ome")
    multiscales = ome.get("multiscales") if isinstance(ome, Mapping) else None
    found: dict[str, list[str]] = {}
    for multiscale in multiscales if isinstance(multiscales, list) else ():
        try:
            names = [axis["name"] for axis in multiscale["axes"]]
            paths = [dataset["path"] for dataset in multiscale["datasets"]]
        except (KeyError, TypeError):
            raise UnsupportedError("its 'multiscales' lack axes or paths of datasets") from None
        found |= dict.fromkeys(paths, names)
    return found


def _without_version(name: str, member: Any) -> Any:
    if isinstance(member, list):
        return [_without_version(name, item) for item in member]
    if not isinstance(member, Mapping):
        return member
    version = member.get("version", _FROM)
    if version != _FROM:
        raise UnsupportedError(
            f"its {name!r} is of OME-Zarr version {version!r}, and only {_FROM} is made {_TO}"
        )
    return {key: value for key, value in member.items() if key != "version"}
