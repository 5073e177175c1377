"""Metadata documents, read whole: one that is cut off would count as none.

Then its shards would be taken for chunks, and be overwritten by chunks.
"""

from __future__ import annotations

import errno
from collections.abc import Hashable, Sequence

from zarr_shardstore.metadata.documents import parse_json
from zarr_shardstore.shards.requests import Flow, Found, Get, GetSize

_N_ATTEMPTS = 2


def read_documents(keys: Sequence[str], together: Hashable | None = None) -> Flow[list[Found]]:
    """Read documents; as `whole_documents`. `together` is that of `Get`."""
    founds: list[Found] = yield [Get(key, together=together) for key in keys]
    return (yield from whole_documents(keys, founds))


def whole_documents(keys: Sequence[str], founds: Sequence[Found]) -> Flow[list[Found]]:
    """Replies to reads of whole documents, without those that were too short.

    The beginning of a JSON object is none. So a document that cannot be parsed is asked for its
    size, and read again if there is more of it; what is stored may be anything.

    Raises
    ------
    OSError
        If it is again not all that is there.
    """
    whole = list(founds)
    for n_left in reversed(range(_N_ATTEMPTS)):
        doubtful = [i for i, found in enumerate(whole) if _may_be_cut_off(found)]
        if not doubtful:
            break
        sizes: list[int | None] = yield [GetSize(keys[i]) for i in doubtful]
        left = [
            i
            for i, size in zip(doubtful, sizes, strict=True)
            if size not in (None, _nbytes(whole[i]))
        ]
        if not left:
            break
        if not n_left:
            n_read = _nbytes(whole[left[0]])
            raise OSError(errno.EIO, f"reading all of it gave {n_read} bytes only", keys[left[0]])
        again: list[Found] = yield [Get(keys[i]) for i in left]
        for i, found in zip(left, again, strict=True):
            whole[i] = found
    return whole


def _nbytes(found: Found) -> int:
    return 0 if found.value is None else len(found.value)


def _may_be_cut_off(found: Found) -> bool:
    return (
        found.value is not None
        and found.size != len(found.value)
        and parse_json(found.value) is None
    )
