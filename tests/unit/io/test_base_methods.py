"""Backends: a method for each request, found by its type; remedies for the faults of clients."""

from __future__ import annotations

from typing import get_args

import pytest

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.io.backends.base import Backend, refuse
from zarr_shardstore.io.backends.fsspec_store import FsspecBackend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.io.backends.store_traits import remedy_of
from zarr_shardstore.io.backends.wrapped_files import WrappedFilesBackend, WrappedFsspecBackend
from zarr_shardstore.io.backends.zarr_store import ZarrBackend
from zarr_shardstore.shards import requests

OF_OTHERS = {requests.SetPartial, requests.Modify, requests.UpdateShard}
"""Transformers and the driver perform these."""

IN_PLACE = {requests.OpenShard, requests.ChangeShard, requests.SetWithGaps}

ALL = set(get_args(requests.Request)) - OF_OTHERS


def performed(cls: type[Backend]) -> set[type]:
    return {kind for kind, method in cls.replies.items() if method is not refuse}


@pytest.mark.parametrize(
    ("cls", "lacks"),
    [
        (LocalBackend, set()),
        (MappingBackend, IN_PLACE | {requests.RecordIndex}),
        (ZarrBackend, IN_PLACE | {requests.RecordIndex}),
        (FsspecBackend, IN_PLACE | {requests.RecordIndex}),
        (WrappedFilesBackend, IN_PLACE | {requests.RecordIndex}),
        (WrappedFsspecBackend, IN_PLACE | {requests.RecordIndex}),
    ],
)
def test_each_request_has_a_method(cls: type[Backend], lacks: set[type]) -> None:
    """A request without a method is refused by its name."""
    assert performed(cls) == ALL - lacks
    for kind in lacks | OF_OTHERS:
        with pytest.raises(TypeError, match=f"does not perform {kind.__name__}"):
            cls.replies[kind](None, tuple.__new__(kind))


def test_conditional_stores_record_indexes() -> None:
    obstore = pytest.importorskip("zarr_shardstore.io.backends.obstore")
    assert performed(obstore.ObstoreBackend) == ALL - IN_PLACE


class NotSupportedError(Exception):
    """As obstore's, by its name."""


class IcechunkError(Exception):
    """As icechunk's, by its name."""


class ResponseError(Exception):
    """As aiohttp's."""

    status = 405


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NotImplementedError("no"), "another way"),
        (NotSupportedError("no"), "another way"),
        (ResponseError("Method Not Allowed"), "another way"),
        (OSError("status: 501 Not Implemented"), "another way"),
        (IcechunkError("bad key prefix: a/b"), "missing"),
        (KeyError("node not found at /a"), "missing"),
        (UnsupportedError("501 Not Implemented, and it says so itself"), None),
        (IcechunkError("the disk is full"), None),
        (KeyError("a"), None),
        (OSError(405, "an error number"), None),
    ],
)
def test_the_remedy_for_an_error(error: Exception, remedy: str | None) -> None:
    assert remedy_of(error) == remedy
