"""The codec pipeline, arrays made with ``shards=`` and codecs of chunks, by zarr's inner parts."""
