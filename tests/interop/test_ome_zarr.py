"""OME-Zarr 0.4 (Zarr v2) and 0.5 (v3), by ome-zarr and ngff-zarr: unchanged, and in shards.

What takes a store: ome-zarr writes to a ``zarr.Group`` on any store, reads its
``OMEZarrMultiscale`` from one, and its ``Reader`` takes any store from version 0.21 on (before:
only paths). ngff-zarr writes to local paths only, and reads these or a mapping of bytes, which
`ShardingMapping` is.

The image is fMRI: a volume of nibabel's test data, at two times.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import ngff_zarr
import nibabel
import numpy as np
import pytest
import zarr
from nibabel.testing import data_path
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore

from tests.support.bases import BASES
from tests.support.kit import objects_of
from tests.support.pipeline_arrays import THEIRS
from zarr_shardstore import ShardingMapping, ShardingStore, shard_store, unshard_store

with warnings.catch_warnings():
    # ome-zarr 0.18 makes an instance of a class of its own that it deprecates.
    warnings.filterwarnings("ignore", "Call to deprecated class Scaler", DeprecationWarning)
    from ome_zarr import OMEZarrMultiscale
    from ome_zarr.format import FormatV04, FormatV05
    from ome_zarr.io import ZarrLocation, parse_url
    from ome_zarr.reader import Reader
    from ome_zarr.writer import write_image, write_labels

FORMATS = {"0.4": FormatV04(), "0.5": FormatV05()}
SCALE = {"t": 2.0, "c": 1.0, "z": 2.2, "y": 2.0, "x": 2.0}
CHUNKS = (1, 1, 4, 32, 32)
CHUNKS_PER_SHARD = (2, 1, 2, 2, 2)
SHARDS = (2, 1, 8, 64, 64)
METADATA = {"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"}
WINDOW = np.s_[1:, :, 3:10, 30:40, 60:]  # cuts through chunks and shards


def load_volume() -> np.ndarray:
    image = nibabel.loadsave.load(str(data_path / "example4d.nii.gz"))
    assert isinstance(image, nibabel.Nifti1Image)
    whole = np.asarray(image.dataobj).T[:, np.newaxis]
    return np.ascontiguousarray(whole[:, :, 8:20, 20:84, 24:104])


VOLUME = load_volume()
MASK = (VOLUME > 300).astype("uint8")


@pytest.fixture(params=FORMATS)
def version(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["dict", "local"])
def base(request: pytest.FixtureRequest) -> Any:
    return BASES[request.param]()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where images are kept that several tests copy."""
    return tmp_path_factory.mktemp("written")


def write_by_ome_zarr(store: Any, version: str, **options: Any) -> None:
    """An image of two levels and labels."""
    fmt = FORMATS[version]
    group = zarr.create_group(store, zarr_format=fmt.zarr_format)
    common: Any = {"fmt": fmt, "axes": "tczyx", "scale_factors": [2], "scale": SCALE}
    common |= {"scaler": None, "storage_options": {"chunks": CHUNKS, **options}}
    write_image(VOLUME, group, name="brain", **common)
    write_labels(MASK, group, name="mask", **common)


def write_by_ngff_zarr(path: Path, version: str, **options: Any) -> None:
    """To a local path: it takes no store."""
    image = ngff_zarr.to_ngff_image(VOLUME, dims="tczyx", scale=SCALE)
    chunks = dict(zip("tczyx", CHUNKS, strict=True))
    multiscales = ngff_zarr.to_multiscales(
        image, scale_factors=[2], chunks=chunks, method=ngff_zarr.Methods.DASK_BIN_SHRINK
    )
    ngff_zarr.to_ngff_zarr(str(path), multiscales, version=version, **options)


WRITERS = {
    "ome-zarr": lambda path, version: write_by_ome_zarr(LocalStore(path), version),
    "ngff-zarr": write_by_ngff_zarr,
}


def levels_by_ome_zarr(store: Any, path: str = "") -> list[np.ndarray]:
    group = zarr.open_group(store, path=path, mode="r")
    return [np.asarray(image.data) for image in OMEZarrMultiscale.from_ome_zarr(group).images]


def levels_by_ngff_zarr(mapping_or_path: Any) -> list[np.ndarray]:
    multiscales = ngff_zarr.from_ngff_zarr(mapping_or_path)
    return [np.asarray(image.data) for image in multiscales.images]


def assert_all_equal(levels: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(levels) == len(expected)
    for level, wanted in zip(levels, expected, strict=True):
        np.testing.assert_array_equal(level, wanted)


def paths_of_levels(store: Any) -> list[str]:
    attributes: Any = zarr.open_group(store, mode="r").attrs.asdict()
    (multiscales,) = attributes.get("ome", attributes)["multiscales"]
    return [dataset["path"] for dataset in multiscales["datasets"]]


def n_written(values: np.ndarray, block: tuple[int, ...]) -> int:
    """How many blocks hold anything; zarr writes no chunk of nothing but the fill value."""
    origins = {tuple(point) for point in (np.argwhere(values) // block).tolist()}
    return len(origins)


def n_values(objects: dict[str, bytes], level: str) -> int:
    keys = [key for key in objects if key.startswith(f"{level}/")]
    return sum(key.rsplit("/", 1)[-1] not in METADATA for key in keys)


def update(store: Any, level: str, values: np.ndarray) -> None:
    z = zarr.open_array(store, path=level, mode="r+")
    z[WINDOW] = values[WINDOW] = values[WINDOW] // 2  # nothing stays nothing


@pytest.mark.thorough(of=2)
def test_shards_by_axes(base: Any, version: str) -> None:
    """0.5 names them with the array. ome-zarr writes those of 0.4 after the chunks: a warning, and
    a conversion, which finds them, does the rest."""
    store = ShardingStore(base, chunks_per_shard={"t": 2, "z": 2, "y": 2, "x": 2})
    if version == "0.5":
        write_by_ome_zarr(store, version)
        assert store.shard_shape("s0") == SHARDS
    else:
        with pytest.warns(UserWarning, match="Zarr v2 names the dimensions"):
            write_by_ome_zarr(store, version)
        assert store.shard_shape("s0") is None
        shard_store(base, chunks_per_shard={"t": 2, "z": 2, "y": 2, "x": 2})
        assert ShardingStore(base).shard_shape("s0") == SHARDS
    np.testing.assert_array_equal(levels_by_ome_zarr(ShardingStore(base))[0], VOLUME)


class TestUnchanged:
    """What the packages wrote without sharding: the store is as if it were not there."""

    @pytest.fixture(params=WRITERS)
    def path(
        self, request: pytest.FixtureRequest, written: Path, tmp_path: Path, version: str
    ) -> Path:
        source = written / f"{request.param}-{version}"
        if not source.exists():
            WRITERS[request.param](source, version)
        return Path(shutil.copytree(source, tmp_path / "image.ome.zarr"))

    @pytest.fixture(params=[None, 2], ids=["no sharding", "sharding of new arrays"])
    def store(self, request: pytest.FixtureRequest, path: Path) -> ShardingStore:
        return ShardingStore(path, chunks_per_shard=request.param)

    def test_same_keys_and_bytes(self, path: Path, store: ShardingStore) -> None:
        assert objects_of(store) == objects_of(LocalStore(path))

    @pytest.mark.thorough(of=2)
    def test_the_packages_read_it(self, path: Path, store: ShardingStore) -> None:
        """Values and metadata, through the store and beside it."""
        expected = levels_by_ome_zarr(LocalStore(path))
        np.testing.assert_array_equal(expected[0], VOLUME)
        assert_all_equal(levels_by_ome_zarr(store), expected)
        mapping = ShardingMapping(path)
        assert_all_equal(levels_by_ngff_zarr(mapping), expected)
        assert ngff_zarr.from_ngff_zarr(mapping).metadata == (
            ngff_zarr.from_ngff_zarr(str(path)).metadata
        )

    @pytest.mark.thorough(of=3)
    def test_the_packages_read_updates(self, path: Path, store: ShardingStore) -> None:
        """Written through the store, read beside it; only the chunks of the window changed."""
        before = objects_of(LocalStore(path))
        expected = levels_by_ome_zarr(LocalStore(path))
        level = paths_of_levels(store)[0]
        update(store, level, expected[0])
        assert_all_equal(levels_by_ome_zarr(LocalStore(path)), expected)
        assert_all_equal(levels_by_ngff_zarr(str(path)), expected)
        after = objects_of(LocalStore(path))
        assert after.keys() == before.keys()
        changed = {key for key in after if after[key] != before[key]}
        assert 1 < len(changed) <= 1 * 1 * 3 * 2 * 2
        assert all(key.startswith(f"{level}/") for key in changed)


class TestInShards:
    """Written by ome-zarr through the store."""

    @pytest.fixture
    def store(self, base: Any, version: str) -> ShardingStore:
        store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
        write_by_ome_zarr(store, version)
        return store

    @pytest.mark.thorough(of=4)
    def test_fewer_objects_below_and_the_same_above(
        self, base: Any, store: ShardingStore, version: str
    ) -> None:
        """Above: each key and byte, metadata too, that ome-zarr writes without sharding."""
        plain, other = BASES["memory"](), BASES["memory"]()
        with zarr.config.set({"codec_pipeline.path": THEIRS}):  # the same zstd library
            write_by_ome_zarr(plain, version)
            write_by_ome_zarr(ShardingStore(other, CHUNKS_PER_SHARD), version)
        assert objects_of(ShardingStore(other)) == objects_of(plain)
        assert objects_of(store).keys() == objects_of(plain).keys()
        for path in ("", "labels/mask"):
            for level, values in enumerate(levels_by_ome_zarr(store, path)):
                array = f"{path}/s{level}".strip("/")
                assert n_values(objects_of(store), array) == n_written(values, CHUNKS) > 4
                assert n_values(objects_of(base), array) == n_written(values, SHARDS) <= 4

    def test_the_packages_read_it(self, base: Any, store: ShardingStore) -> None:
        (image, smaller), (mask, _) = (
            levels_by_ome_zarr(store),
            levels_by_ome_zarr(store, "labels/mask"),
        )
        np.testing.assert_array_equal(image, VOLUME)
        np.testing.assert_array_equal(mask, MASK)
        assert smaller.shape == (2, 1, 12, 32, 40)
        assert_all_equal(levels_by_ngff_zarr(ShardingMapping(base)), [image, smaller])

    def test_the_reader_of_ome_zarr(self, store: ShardingStore, version: str) -> None:
        """It walks the hierarchy and loads lazily, chunk by chunk, with dask."""
        try:
            location = ZarrLocation(store, fmt=FORMATS[version])
        except TypeError:
            pytest.skip("this ome-zarr reads from paths only")
        image, _, mask = Reader(location)()
        assert image.metadata["name"] == "brain"
        assert image.data[0].chunksize == CHUNKS
        np.testing.assert_array_equal(image.data[0].compute(), VOLUME)
        np.testing.assert_array_equal(mask.data[0].compute(), MASK)

    @pytest.mark.thorough(of=3)
    def test_updates(self, base: Any, store: ShardingStore) -> None:
        """Seen by the packages, and stored in the same shards."""
        expected = levels_by_ome_zarr(store)
        update(ShardingStore(base), "s0", expected[0])
        assert_all_equal(levels_by_ome_zarr(store), expected)
        assert_all_equal(levels_by_ngff_zarr(ShardingMapping(base)), expected)
        assert n_values(objects_of(base), "s0") == n_written(expected[0], SHARDS)


@pytest.mark.thorough(of=4)
def test_an_image_is_sharded_in_place(base: Any, version: str) -> None:
    """Read by both packages through the store as before, and beside it when it is unsharded."""
    write_by_ome_zarr(ShardingStore(base), version)
    before = dict(ShardingMapping(base))
    report = shard_store(base, chunks_per_shard=CHUNKS_PER_SHARD)
    assert [array.action for array in report.arrays] == ["sharded"] * 4
    assert n_values(objects_of(base), "s0") == n_written(VOLUME, SHARDS)
    assert report.n_chunks > 2 * report.n_objects
    levels = levels_by_ome_zarr(ShardingStore(base))
    np.testing.assert_array_equal(levels[0], VOLUME)
    np.testing.assert_array_equal(levels_by_ome_zarr(ShardingStore(base), "labels/mask")[0], MASK)
    assert_all_equal(levels_by_ngff_zarr(ShardingMapping(base)), levels)
    unshard_store(base)
    after = objects_of(base)
    assert after.keys() == before.keys()
    assert all(after[key] == before[key] for key in after if key.split("/")[-1] not in METADATA)
    assert_all_equal(levels_by_ome_zarr(ShardingStore(base)), levels)


def test_the_packages_alone_refuse_shards_of_v2(tmp_path: Path) -> None:
    """OME-Zarr 0.4 knows no sharding: an error, and not shards read as chunks."""
    write_by_ome_zarr(ShardingStore(tmp_path, chunks_per_shard=CHUNKS_PER_SHARD), "0.4")
    with pytest.raises(ValueError, match="open it through `ShardingStore`"):
        levels_by_ome_zarr(LocalStore(tmp_path))
    with pytest.raises(Exception, match="zarr_shardstore"):  # of zarrs, which has no type for it
        levels_by_ngff_zarr(str(tmp_path))


class TestNativeSharding:
    """OME-Zarr 0.5: sharding is part of its Zarr, so readers need no wrapper."""

    def read_natively(self, path: Path) -> None:
        """By both packages, from the path alone."""
        location = parse_url(path)
        assert location is not None
        image = next(iter(Reader(location)()))
        np.testing.assert_array_equal(image.data[0].compute(), VOLUME)
        levels = [np.asarray(level.compute()) for level in image.data]
        assert_all_equal(levels_by_ngff_zarr(str(path)), levels)
        z = zarr.open_array(LocalStore(path), path="s0", mode="r")
        assert z.shards == SHARDS

    def test_what_ome_zarr_wrote_through_the_store(self, tmp_path: Path) -> None:
        write_by_ome_zarr(ShardingStore(tmp_path, chunks_per_shard=CHUNKS_PER_SHARD), "0.5")
        self.read_natively(tmp_path)

    def test_what_was_copied_into_the_store(self, tmp_path: Path) -> None:
        """Key by key, documents first: no chunk is decoded, and all are packed."""
        write_by_ome_zarr(LocalStore(tmp_path / "plain"), "0.5")
        objects = objects_of(LocalStore(tmp_path / "plain"))
        store = ShardingStore(tmp_path / "sharded", chunks_per_shard=CHUNKS_PER_SHARD)

        async def copy() -> None:
            for key in sorted(objects, key=lambda key: not key.endswith("zarr.json")):
                await store.set(key, cpu.Buffer.from_bytes(objects[key]))

        sync(copy())
        assert objects_of(store) == objects
        self.read_natively(tmp_path / "sharded")

    @pytest.mark.parametrize("writer", WRITERS)
    def test_what_the_packages_sharded(self, tmp_path: Path, writer: str) -> None:
        """Seen as flat chunks, updated chunk by chunk, and read natively by both again."""
        if writer == "ome-zarr":
            write_by_ome_zarr(LocalStore(tmp_path), "0.5", shards=SHARDS)
        else:
            per_shard = dict(zip("tczyx", CHUNKS_PER_SHARD, strict=True))
            write_by_ngff_zarr(tmp_path, "0.5", chunks_per_shard=per_shard)
        store = ShardingStore(tmp_path)
        level = paths_of_levels(store)[0]
        z = zarr.open_array(store, path=level, mode="r")
        assert (z.chunks, z.shards) == (CHUNKS, None)
        expected = levels_by_ome_zarr(store)
        np.testing.assert_array_equal(expected[0], VOLUME)
        before = n_values(objects_of(LocalStore(tmp_path)), level)
        update(store, level, expected[0])
        assert_all_equal(levels_by_ome_zarr(LocalStore(tmp_path)), expected)
        assert_all_equal(levels_by_ngff_zarr(str(tmp_path)), expected)
        assert_all_equal(levels_by_ngff_zarr(ShardingMapping(tmp_path)), expected)
        assert n_values(objects_of(LocalStore(tmp_path)), level) == before
