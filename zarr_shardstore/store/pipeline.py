"""The place of `ShardedCodecPipeline` that zarr's configuration names."""

from zarr_shardstore.zarr_hooks.pipeline import ShardedCodecPipeline as ShardedCodecPipeline
