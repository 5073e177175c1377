"""Import of files of other formats: HDF5, NetCDF-4, TIFF, Zarr."""
