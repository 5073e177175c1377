"""The codecs of a chunk, called without zarr's pipeline."""

from __future__ import annotations

import numpy as np
from zarr.codecs import ZstdCodec

from tests.support.pipeline_arrays import SHAPE, make_array, make_store
from zarr_shardstore.store.chunk_codec import ChunkCodec


def test_codecs_that_zarr_has_are_all_called_without_a_hop() -> None:
    """zarr 3.1 has codecs without blocking methods; they are called directly all the same."""
    from numcodecs import Blosc, Delta

    for options in (
        {"zarr_format": 2, "compressors": Blosc(), "filters": [Delta("<i2")]},
        {"zarr_format": 2, "compressors": None},
        {"compressors": [ZstdCodec()]},
    ):
        z = make_array(make_store("v3", {}), **options)
        assert ChunkCodec.of(list(z.async_array.codec_pipeline)) is not None
        data = np.arange(77, dtype="i2").reshape(SHAPE)
        z[...] = data
        np.testing.assert_array_equal(z[...], data)
