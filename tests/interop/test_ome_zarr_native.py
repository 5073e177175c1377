"""`to_native(ome=True)`: OME-Zarr 0.4 in shards becomes 0.5, which the packages read alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ngff_zarr
import numpy as np
import pytest
import zarr
from ome_zarr.format import FormatV05
from ome_zarr.io import parse_url
from ome_zarr.reader import Reader
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore

from tests.interop.test_ome_zarr import (
    CHUNKS_PER_SHARD,
    MASK,
    METADATA,
    SHARDS,
    VOLUME,
    assert_all_equal,
    levels_by_ngff_zarr,
    levels_by_ome_zarr,
    paths_of_levels,
    write_by_ngff_zarr,
    write_by_ome_zarr,
)
from tests.support.kit import objects_of
from zarr_shardstore import ShardingMapping, ShardingStore, get_shard_info, shard_store, to_native


def by_ome_zarr(path: Path) -> None:
    write_by_ome_zarr(ShardingStore(path, chunks_per_shard=CHUNKS_PER_SHARD), "0.4")


def by_ngff_zarr(path: Path) -> None:
    """It writes to paths only: copied into the store key by key, documents first."""
    plain = path.with_name("plain")
    write_by_ngff_zarr(plain, "0.4")
    objects = objects_of(LocalStore(plain))
    store = ShardingStore(path, chunks_per_shard=CHUNKS_PER_SHARD)

    async def copy() -> None:
        for key in sorted(objects, key=lambda key: key.rsplit("/", 1)[-1] not in METADATA):
            await store.set(key, cpu.Buffer.from_bytes(objects[key]))

    sync(copy())


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("write", [by_ome_zarr, by_ngff_zarr])
def test_0_4_becomes_0_5(tmp_path: Path, write: Any) -> None:
    """Both packages read it from the path as 0.5, in shards, with equal values and names."""
    path = tmp_path / "image.ome.zarr"
    write(path)
    expected = levels_by_ome_zarr(ShardingStore(path))
    metadata = ngff_zarr.from_ngff_zarr(ShardingMapping(path)).metadata
    before = {
        key: value
        for key, value in objects_of(LocalStore(path)).items()
        if key.rsplit("/", 1)[-1] not in METADATA
    }
    to_native(path, ome=True)
    after = objects_of(LocalStore(path))
    assert before.items() <= after.items()
    assert {key.rsplit("/", 1)[-1] for key in after.keys() - before.keys()} == {"zarr.json"}

    location = parse_url(path)
    assert location is not None
    assert isinstance(location.fmt, FormatV05)
    image = next(iter(Reader(location)()))
    np.testing.assert_array_equal(image.data[0].compute(), VOLUME)
    assert_all_equal(levels_by_ome_zarr(LocalStore(path)), expected)
    assert_all_equal(levels_by_ngff_zarr(str(path)), expected)
    read = ngff_zarr.from_ngff_zarr(str(path), version="0.5", validate=True).metadata
    assert read.axes == metadata.axes
    assert read.datasets == metadata.datasets

    attributes: Any = zarr.open_group(str(path), mode="r").attrs.asdict()
    assert attributes["ome"]["version"] == "0.5"
    assert '"0.4"' not in json.dumps(attributes)
    assert "multiscales" not in attributes
    for level in paths_of_levels(LocalStore(path)):
        z: Any = zarr.open_array(str(path), path=level, mode="r")
        assert z.metadata.dimension_names == tuple("tczyx")
    z = zarr.open_array(str(path), path=paths_of_levels(LocalStore(path))[0], mode="r")
    assert z.shards == SHARDS
    assert to_native(path, ome=True).n_documents_written == 0


def plain_by_ome_zarr(path: Path) -> None:
    write_by_ome_zarr(LocalStore(path), "0.4")


def plain_by_ngff_zarr(path: Path) -> None:
    write_by_ngff_zarr(path, "0.4")


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("write", [plain_by_ome_zarr, plain_by_ngff_zarr])
def test_an_image_is_sharded_for_every_viewer(tmp_path: Path, write: Any, elsewhere: bool) -> None:
    """In one call from plain 0.4 to sharded 0.5, in place or not; others read it."""
    source = tmp_path / "image.ome.zarr"
    write(source)
    expected = levels_by_ome_zarr(LocalStore(source))
    path = tmp_path / "sharded.ome.zarr" if elsewhere else source
    destination = path if elsewhere else None
    report = shard_store(source, destination, chunks_per_shard=2, native=True, ome=True)
    assert report.read_by == get_shard_info(path).read_by == "every v3 reader"
    assert all("the way back" in note for note in report.notes)
    if elsewhere:
        assert_all_equal(levels_by_ome_zarr(LocalStore(source)), expected)

    assert_all_equal(levels_by_ome_zarr(LocalStore(path)), expected)
    assert_all_equal(levels_by_ngff_zarr(str(path)), expected)
    ngff_zarr.from_ngff_zarr(str(path), version="0.5", validate=True)
    ome_zarr_models = pytest.importorskip("ome_zarr_models")
    model = ome_zarr_models.open_ome_zarr(zarr.open_group(str(path), mode="r"))
    assert model.attributes.ome.version == "0.5"
    levels = paths_of_levels(LocalStore(path))
    first: Any = zarr.open_array(str(path), path=levels[0], mode="r")
    assert first.shards is not None
    ts = pytest.importorskip("tensorstore")
    kvstore = {"driver": "file", "path": str(path / levels[0])}
    opened = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    np.testing.assert_array_equal(opened.read().result(), VOLUME)


def test_labels(tmp_path: Path) -> None:
    """Of the group of labels, and of each label."""
    by_ome_zarr(tmp_path)
    to_native(tmp_path, ome=True)
    labels: Any = zarr.open_group(str(tmp_path), path="labels", mode="r")
    assert labels.attrs["ome"] == {"version": "0.5", "labels": ["mask"]}
    assert "image-label" in labels["mask"].attrs["ome"]
    assert labels["mask/s0"].metadata.dimension_names == tuple("tczyx")
    *_, mask = Reader(parse_url(tmp_path))()
    np.testing.assert_array_equal(mask.data[0].compute(), MASK)


def test_attributes_stay_if_not_asked(tmp_path: Path) -> None:
    """And may be changed by a call that asks."""
    by_ome_zarr(tmp_path)
    before: Any = zarr.open_group(ShardingStore(tmp_path), mode="r").attrs.asdict()
    to_native(tmp_path)
    group: Any = zarr.open_group(str(tmp_path), mode="r")
    assert group.attrs.asdict() == before
    assert group["s0"].metadata.dimension_names is None
    to_native(tmp_path, ome=True)
    assert_all_equal(levels_by_ngff_zarr(str(tmp_path)), levels_by_ome_zarr(LocalStore(tmp_path)))
    assert "ome" in zarr.open_group(str(tmp_path), mode="r").attrs
