"""``python -m zarr_shardstore``: the command line."""

from zarr_shardstore.cli import main

if __name__ == "__main__":  # worker processes import this module again
    main()
