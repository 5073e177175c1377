"""What leans on zarr's inner parts: codec pipeline, arrays made with ``shards=``, codecs."""
