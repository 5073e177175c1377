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
_OTHER = "another store: its repr, its type, its equality, or its methods"
_SKIPS = "another store: zarr 3.1.6 skips the test by the class of a store that deletes nothing"
_PIPELINE = "expects zarr's pipeline as the default; a sharding store makes its own the default"
_PATCHED = "patches the plain store, or codecs of zarr that take no part in a sharding store"
_OBJECTS = "looks into the base store for the objects of chunks, where shards are"
_STORED = "changes the document in the base store, where it declares shards"
_KEYS = "expects the keys of shards as zarr spells them: those of the array object are marked"
_ZIP = "a zip archive replaces no member, and warns when a shard is stored again"
_ZIP_TYPE = "another store: a ZipStore is known by its class, and its warnings are expected then"
_INNER = "the order, the size or the absence of inner chunks: the store writes the shards"
_EVEN = "a list of equal lengths, which the native codec of the shards states as one length"
_ONE_CHUNK = "shards of one chunk are chunks: a write of all that is in the shape drops the rest"
_NO_KEY = "deletes the key '', which names no object"

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
        # Parameters of 3.1.6 that are functions: their addresses are in the names of the tests.
        keyword="not test_docstring_consistent_parameters",
        in_sdist=True,
        dependency_group="remote-tests",
        options=("--hypothesis-seed=0",),
        imported=True,
        differences={
            # repr, type, equality, methods
            "TestInfo::test_info*": _OTHER,
            "test_make_store_path_*": _OTHER,
            "test_open_mutable_mapping*": _OTHER,
            "test_open_group_from_upath": _OTHER,
            "test_open_fsmap_*": _OTHER,
            "test_from_array_overwrite_equal_memory_stores": _OTHER,
            "test_rectilinear_feature_flag_names_stored_array": _OTHER,
            "test_different_open_mode": _OTHER,
            "TestLocalStore::test_move": _OTHER,
            "TestConsolidated::test_group_delitem_consolidated[zip]": _SKIPS,
            "test_group*[zip*": _ZIP_TYPE,
            "test_asyncgroup_update_attributes[zip*": _ZIP_TYPE,
            "test_members_name[zip*": _ZIP_TYPE,
            "test_open_consolidated_raises*[zip*": _ZIP_TYPE,
            "test_config_codec_pipeline_class": _PIPELINE,
            # counts
            "test_create_array_with_data_num_gets": _COUNTS,
            "test_accessed_chunks": _COUNTS,
            "test_logging_store_counter": _COUNTS,
            "test_sharding_multiple_chunks_partial_shard_read": _COUNTS,
            "test_sharding_duplicate_read_indexes": _COUNTS,
            "test_latency_store_engages_fused_sync_path": _COUNTS,
            "test_resize_shrinking_skips_full_grid": _COUNTS,
            "test_resize_bounds_pending_deletions": _COUNTS,
            # patches
            "test_sharding_partial_shard_read__*": _PATCHED,
            "test_load_partial_shard_*": _PATCHED,
            "test_orthogonal_set_total_slice": _PATCHED,
            "test_thread_pool_*_worker_exception_propagates": _PATCHED,
            "test_sync_io_capability_gates_fused_paths": _PATCHED,
            "test_bulk_decode_engagement_and_correctness": _PATCHED,
            "test_upsert_metadata_*": _PATCHED,
            "test_failed_metadata_save_keeps_stored_document": _PATCHED,
            # objects of the base store
            "test_remove_v2_metadata_option_*": _OBJECTS,
            "test_overwrite_option_*": _OBJECTS,
            "test_remove_metadata_*": _OBJECTS,
            "test_dry_run": _OBJECTS,
            "test_v2_encode_decode": _OBJECTS,
            "test_v2_non_contiguous": _OBJECTS,
            "test_blosc_evolve": _OBJECTS,
            "test_array_v3_nan_fill_value": _OBJECTS,
            "TestBatchedPipeline::test_scenario": _OBJECTS,
            "TestFusedPipeline::test_scenario": _OBJECTS,
            "test_resize_keeps_retained_chunk_bytes": _OBJECTS,
            "test_resize_sharded_keeps_cells_beyond_shape": _ONE_CHUNK,
            "test_resize_uniform_rectilinear_appends_edge": _OBJECTS,
            "test_create_array_stores_declared_rectilinear_chunks": _EVEN,
            # documents of the base store: chunks of size 0 in a document that declares shards
            "test_legacy_chunk_size_*": _STORED,
            "test_write_stores_repaired_metadata_first": _STORED,
            "test_stale_handle_write_*": _STORED,
            "test_recreate_hint_recipe": _STORED,
            "test_array_from_metadata_with_chunk_size_zero": _STORED,
            "test_group_write_stores_repaired_consolidated_member_as_stored": _STORED,
            "test_concurrent_deletions_leave_no_repaired_member": _STORED,
            "test_consolidated_repaired_member_*": _STORED,
            "test_empty_write_stores_no_metadata": _STORED,
            "test_invalid_edges_round_trip": _STORED,
            "test_edge_lists_in_regular_grid_round_trip": _STORED,
            "test_consolidate_edge_lists_in_regular_grid": _STORED,
            # others
            "test_iter_shard_keys": _KEYS,
            "test_chunks_initialized": _KEYS,
            "test_open_sharding": _KEYS,
            "test_from_array[*zip*": _ZIP,
            "test_sharding_partial_overwrite[*zip*": _ZIP,
            "TestZipStore::test_api_integration": _ZIP,
            "test_resize_needing_deletes_leaves_array_unchanged": _ZIP,
            "test_delete_empty_shards": _INNER,
            "test_encoded_subchunk_write_order": _INNER,
            "test_config_read_missing_chunks_sharded_inner": _INNER,
            "test_open_with_mode_a": _NO_KEY,
        },
    ),
}
