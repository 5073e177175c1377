"""The draft hierarchy of 2022 (``meta/root``, ``data/root``) as a zarr Store."""
