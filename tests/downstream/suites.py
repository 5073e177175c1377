"""Table of the projects whose tests run with `ShardingStore`, and of what must differ there."""

from __future__ import annotations

from dataclasses import dataclass, field

_ZARR = (
    'zarr==3.1.6; python_version < "3.12"',
    'zarr==3.4.2; python_version >= "3.12"',
)

ENVIRONMENT = (
    *_ZARR,
    "pytest==9.2.0",
    "pytest-asyncio==1.5.0",
    "pytest-xdist==3.8.0",
    "obstore",
)
"""Packages of every suite, in one environment for those without a dependency group."""


@dataclass(frozen=True)
class Suite:
    """Tests of one project."""

    distribution: str
    requirements: tuple[str, ...]
    """The project in the version whose tests run, and what its tests import."""
    tests: tuple[str, ...]
    """Modules that are installed with the project, or files of its source distribution."""
    keyword: str = ""
    """Expression that selects tests, as for ``pytest -k``."""
    in_sdist: bool = False
    """Whether `tests` are files of the source distribution; its settings of pytest count then."""
    dependency_group: str = ""
    """Group of the source distribution with what its tests need, in an environment of its own."""
    options: tuple[str, ...] = ()
    """Further options of pytest."""
    imported: bool = False
    """Whether the tests also run with plain stores after an import of the package."""
    differences: dict[str, str] = field(default_factory=dict)
    """Reasons by ``function``, ``Class::function`` or either with parameters in brackets: tests
    that pass with plain stores and cannot with shards. ``*`` stands for any text."""


_COUNTS = "counts the calls of the base store, which a sharding store makes for itself, too"
_VIEW = "asks a reopened array for its shards: it shows its inner chunks; store.shard_shape tells"
_ONE_LOAD = "counts five loads of one object: the first is done before the second begins, in memory"
_FILES = "expects the files of chunks in the directory, where shards are"

SUITES = {
    "xarray": Suite(
        "xarray",
        ("xarray==2026.9.0", "dask[array,distributed]==2026.8.0", "cftime"),
        tuple(
            f"xarray.tests.{name}"
            for name in (
                "test_backends",
                "test_backends_api",
                "test_backends_datatree",
                "test_distributed",
            )
        ),
        keyword="zarr",
        differences={
            "TestInstrumentedZarrStore::test_append": _COUNTS,
            "TestInstrumentedZarrStore::test_region_write": _COUNTS,
            "test_write_empty": _FILES,
            "test_concurrent_load_multiple_objects": _ONE_LOAD,
            "test_shard_encoding[3]": _VIEW,
            "test_write_regular_shards_still_works": _VIEW,
        },
    ),
    "dask": Suite(
        "dask",
        ("dask[array,distributed]==2026.8.0",),
        ("dask.array.tests.test_array_core",),
        keyword="zarr",
        differences={"test_zarr_sharding_roundtrip": _VIEW},
    ),
    "anndata": Suite(
        "anndata",
        (
            'anndata[lazy]==0.12.19; python_version < "3.12"',
            'anndata[lazy]==0.13.4; python_version >= "3.12"',
            "awkward",
            "boltons",
            "filelock",
            "jsonschema",
            "joblib",
            "matplotlib",
            "openpyxl",
            "pandas<3.1",  # 3.1 gives read-only arrays to tests that write into them
            "pyarrow",
            "pytest-mock",
            "scikit-learn",
        ),
        (
            *(
                f"tests/test_{name}.py"
                for name in (
                    "backed_dense",
                    "backed_sparse",
                    "concatenate_disk",
                    "dask",
                    "io_backwards_compat",
                    "io_dispatched",
                    "io_elementwise",
                    "io_partial",
                    "io_utils",
                    "io_warnings",
                    "readwrite",
                    "structured_arrays",
                )
            ),
            "tests/lazy/test_read.py",
            "tests/lazy/test_write.py",
        ),
        # Of the 240 cases of test_anndatas, which take minutes, 24.
        keyword="not h5ad and not hdf5 and not h5py and not test_backed_indexing and not "
        "(test_anndatas and (outer or unique or only or first or same))",
        in_sdist=True,
        differences={
            "test_data_access": _COUNTS,
            "test_lazy_array_cache": _COUNTS,
            "test_access_count_subset": _COUNTS,
            "test_access_count_subset_column_compute": _COUNTS,
            "test_access_count_dtype": _COUNTS,
            "test_dask_distributed_write": _VIEW,
            "test_write_auto_sharded": _VIEW,
            "test_write_auto_sharded_size": _VIEW,
            "test_write_auto_sharded_size_sparse": _VIEW,
            "test_write_auto_sharded_does_not_override": _VIEW,
            "test_write_shards_by_default": _VIEW,
            "test_concatenate_zarr_stays_sharded_v3": _VIEW,
        },
    ),
    "zarr": Suite(
        "zarr",
        (*_ZARR, "zarr[cli,optional,remote]", "pytest==9.1.1", "hypothesis==6.168.3"),
        ("tests",),
        in_sdist=True,
        dependency_group="remote-tests",
        options=("--hypothesis-seed=0",),
        imported=True,
        differences={},
    ),
}
