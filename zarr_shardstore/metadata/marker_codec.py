"""Codec of the v2 marker: an error that names the ways to read the array.

numcodecs finds the codec by an entry point. The module is light, and imports no zarr.
"""

from __future__ import annotations

from typing import NoReturn

from numcodecs.abc import Codec

from zarr_shardstore.errors import SpecError


class MarkerCodec(Codec):  # type: ignore[misc]
    """Filter that no reader can make: each refuses the array when it is opened. A refusal at the
    first read would be too late, because writing fill values deletes shards without encoding."""

    codec_id = "zarr_shardstore"
    """`MARKER` of `zarr_shardstore.metadata.declaration`, without its imports."""

    @classmethod
    def from_config(cls, _config: object) -> NoReturn:
        raise SpecError(
            "the array is sharded by zarr_shardstore: open it through `ShardingStore`, or run "
            "`zarr-shardstore to-native` on its store, which then every Zarr v3 reader reads"
        )
