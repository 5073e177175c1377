"""Filters of HDF5 as configs of numcodecs.

Source: HDF5 file format 3.0, "Filter pipeline message"; HDF5 registered filters.
"""

from __future__ import annotations

from typing import Any

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.tools.native.codecs import Config

_BLOSC_NAMES = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")


def configs_of(plist: Any, itemsize: int) -> list[Config]:
    """Return the configs of the filters of a dataset, or refuse one by name."""
    found = [_config_of(plist.get_filter(i), itemsize) for i in range(plist.get_nfilters())]
    if any(config["id"] == "shuffle" for config in found[1:]):
        raise UnsupportedError("it shuffles bytes that another filter has made")
    return found


def _config_of(found: tuple[int, int, tuple[int, ...], bytes], itemsize: int) -> Config:
    """Return the numcodecs config of an HDF5 filter (code, flags, values, description)."""
    code, _, values, text = found
    match code:
        case 1:
            return {"id": "zlib", "level": values[0]}
        case 2:
            return {"id": "shuffle", "elementsize": values[0] if values else itemsize}
        case 3:
            return {"id": "fletcher32"}
        case 307:
            return {"id": "bz2", "level": values[0] if values else 9}
        case 32015:
            level = values[0] if values else 0
            return {"id": "zstd", "level": level - ((level >> 31) << 32)}  # an int32
        case 32001 if len(values) >= 7 and values[6] < len(_BLOSC_NAMES):
            cname = _BLOSC_NAMES[values[6]]
            return {"id": "blosc", "cname": cname, "clevel": values[4], "shuffle": values[5]}
    name = text.decode(errors="replace")
    raise UnsupportedError(f"it has the HDF5 filter {code} ({name}), for which v3 has no codec")
