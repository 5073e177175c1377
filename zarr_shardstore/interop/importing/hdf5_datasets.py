"""A dataset of HDF5: its filters as configs of numcodecs, and the other files of its values.

Source: HDF5 file format 3.0, "Filter pipeline message"; HDF5 registered filters;
"Virtual Dataset", ``H5Pset_virtual_prefix``.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
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


def check_other_files(h5py: Any, dataset: Any, *, is_remote: bool) -> None:
    """Refuse values in files that HDF5 may not find: it has fill values for them."""
    if dataset.external:
        raise UnsupportedError("its values lie in external files")
    beside = os.path.dirname(dataset.file.filename)
    sources = dataset.virtual_sources() if dataset.is_virtual else ()
    for name, within in {(source.file_name, source.dset_name) for source in sources}:
        if name != "." and is_remote:
            raise UnsupportedError(f"its values lie in another file, {name!r}")
        found = os.path.join(beside, name.replace("%b", "0"))  # the first of a series
        if not os.path.exists(found) and os.path.isabs(name):
            found = os.path.join(beside, os.path.basename(found))
        try:
            with nullcontext(dataset.file) if name == "." else h5py.File(found, "r") as file:
                source = file[within.replace("%b", "0")]
                check_other_files(h5py, source, is_remote=is_remote)
        except (OSError, KeyError) as error:
            raise UnsupportedError(f"its values in {name!r} are not found: {error}") from error
