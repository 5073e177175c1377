"""Page of a server: the arrays of a store, and their slices as pixels."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from zarr_shardstore.access import ShardingStore, open_base
from zarr_shardstore.errors import ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.interop.serve.served_store import is_public
from zarr_shardstore.tools.inspect.find import FoundArray, find_arrays, read_array
from zarr_shardstore.tools.inspect.shard_map import by

_MAX_ARRAYS = 1000
_MAX_SIDE = 512
_MAX_NBYTES = 32 * 1024 * 1024  # decoded size of all chunks of a slice


def render_page(store: ShardingStore, title: str) -> tuple[bytes, str]:
    """Return the page, which loads nothing from elsewhere, and its content security policy."""
    page = files("zarr_shardstore.interop.serve").joinpath("page.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    found = find_arrays(open_base(store))
    rows = [_row(array) for array in found[:_MAX_ARRAYS]]
    if len(found) > len(rows):
        rows.append(f"<tr><td>and {len(found) - len(rows):,} more</td></tr>")
    head, _, tail = page.partition("ROWS")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    page = head.replace("TITLE", escape(title)) + "\n".join(rows) + tail
    return page.encode("utf-8", "replace"), policy


def _row(found: FoundArray) -> str:
    doc, path = found.doc, escape(found.node.path)
    try:
        geometry = read_array(found).document.geometry
        sides = by(geometry.chunk_shape) if geometry else "?"
        dtype = doc.get("dtype", doc.get("data_type"))
        name = dtype if isinstance(dtype, str) else json.dumps(dtype)
        cells = [by(doc["shape"]), sides, name]
    except (ShardStoreError, LookupError, TypeError, ValueError) as error:
        return f'<tr><td>{path or "/"}</td><td colspan="3">{escape(str(error))}</td></tr>'
    shape = escape(json.dumps(doc["shape"]))
    button = f'<button data-path="{path}" data-shape="{shape}">{path or "/"}</button>'
    return "".join(["<tr>", *(f"<td>{c}</td>" for c in [button, *map(escape, cells)]), "</tr>"])


def draw_slice(store: ShardingStore, asked: Mapping[str, str]) -> tuple[bytes, str]:
    """Return a slice as a byte for each pixel, and its rows, columns, smallest and largest value.

    `asked` has the path ``array``, the coordinates ``at`` of the first element, and the ``axes`` of
    rows and columns. The default is the last two axes. A slice has at most 512 x 512 elements, and
    fewer if its chunks take more than 32 MiB decoded. It ends with the array.
    """
    path = asked["array"]
    try:
        if not is_public(f"{path}/zarr.json".lstrip("/")):
            raise FileNotFoundError("it is not served")
        z: Any = zarr.open_array(store, path=path, mode="r")
        chunks = z.chunks
    except (ValueError, FileNotFoundError) as error:
        raise SpecError(f"zarr opens no array at {path!r}: {error}") from error
    except NotImplementedError as error:
        raise UnsupportedError(f"{path!r} has chunks of several lengths: no picture") from error
    if z.dtype.kind not in "biufc":
        raise UnsupportedError(f"{path!r} has the data type {z.dtype}, which has no picture")
    at, axes = _numbers(asked, "at", [0] * z.ndim), _numbers(asked, "axes", [*range(z.ndim)][-2:])
    is_inside = len(at) == z.ndim and all(i < n for i, n in zip(at, z.shape, strict=True))
    n_axes = len({*axes} & {*range(z.ndim)})
    if not is_inside or n_axes != min(z.ndim, 2) or n_axes != len(axes):
        raise SpecError(f"there is no such slice of {by(z.shape)}")
    sides = [
        min(_MAX_SIDE, n - i) if axis in axes else 1
        for axis, (i, n) in enumerate(zip(at, z.shape, strict=True))
    ]
    while (nbytes := _chunk_nbytes(chunks, z.dtype, at, sides)) > _MAX_NBYTES and max(sides) > 1:
        sides[sides.index(max(sides))] //= 2
    if nbytes > _MAX_NBYTES:
        raise UnsupportedError(f"{path!r} has chunks of {nbytes >> 20} MiB: too much for a picture")
    values = z[tuple(slice(i, i + n) for i, n in zip(at, sides, strict=True))]
    others = [axis for axis in range(z.ndim) if axis not in axes]
    plane = values.transpose(*others, *axes).reshape([sides[axis] for axis in axes])
    return _pixels(np.atleast_2d(np.abs(plane) if plane.dtype.kind == "c" else plane))


def _numbers(asked: Mapping[str, str], name: str, default: list[int]) -> list[int]:
    texts = asked[name].split(",") if asked.get(name) else []
    if not all(re.fullmatch("[0-9]{1,18}", text) for text in texts):
        raise SpecError(f"{name!r} is a list of whole numbers with commas")
    return list(map(int, texts)) or default


def _chunk_nbytes(chunks: Any, dtype: Any, at: list[int], sides: list[int]) -> int:
    """Return the decoded size of the chunks that a box of an array touches."""
    spans = zip(at, sides, chunks, strict=True)
    n_chunks = math.prod((i + n - 1) // chunk - i // chunk + 1 for i, n, chunk in spans)
    nbytes: int = n_chunks * math.prod(chunks) * dtype.itemsize
    return nbytes


def _pixels(plane: npt.NDArray[Any]) -> tuple[bytes, str]:
    with np.errstate(all="ignore"):
        numbers = plane.astype("f8")
        finite = numbers[np.isfinite(numbers)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
        scaled = (numbers - low) * (255 / (high - low) if high > low else 0)
        pixels = np.nan_to_num(np.clip(scaled, 0, 255)).astype("u1")
    return pixels.tobytes(), f"{plane.shape[0]} {plane.shape[1]} {low:g} {high:g}"
