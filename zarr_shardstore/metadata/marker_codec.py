"""Codec of the v2 marker: an error that names the ways to read the array.

numcodecs finds it by an entry point: no import is needed. It is light, and imports no zarr.
"""

from __future__ import annotations

from typing import NoReturn

from numcodecs.abc import Codec

from zarr_shardstore.errors import SpecError


class MarkerCodec(Codec):  # type: ignore[misc]
    """Filter that no reader can make: each refuses the array when it is opened.

    Not when it is read: an array that is open can lose a shard to a write of fill values, for
    which zarr deletes objects and encodes nothing.
    """

    codec_id = "zarr_shardstore"
    """As `MARKER` of `zarr_shardstore.metadata.declaration`, whose imports this needs not."""

    @classmethod
    def from_config(cls, _config: object) -> NoReturn:
        raise SpecError(
            "the array is sharded by zarr_shardstore: open it through `ShardingStore`, or run "
            "`zarr-shardstore to-native` on its store, which then every Zarr v3 reader reads"
        )
