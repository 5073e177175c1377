"""`to_native` of what zarr-python 2.18.7 wrote, as it is and in shards."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore

from tests.interop.test_native_bridge import DOCUMENTS, assert_same, data_of
from tests.support.kit import objects_of
from tests.support.native_arrays import READERS
from zarr_shardstore import ShardingStore, from_native, to_native

SCRIPT = Path(__file__).parent / "golden" / "write_v2.py"
OLD_PYTHON = os.environ.get("ZARR_SHARDSTORE_ZARR218")
pytestmark = [
    pytest.mark.skipif(OLD_PYTHON is None, reason="ZARR_SHARDSTORE_ZARR218 names no Python"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3"),
    pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zarr218")
    command = [str(OLD_PYTHON), "-W", "ignore", str(SCRIPT), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(params=["as it is", "in shards"])
def base(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Path:
    if request.param == "as it is":
        return Path(shutil.copytree(written / "store", tmp_path / "base"))
    objects = objects_of(LocalStore(written / "store"))
    store = ShardingStore(tmp_path / "base", chunks_per_shard=(3, 2))

    async def copy() -> None:
        for key in sorted(objects, key=lambda key: key.rpartition("/")[2] not in DOCUMENTS):
            await store.set(key, cpu.Buffer.from_bytes(objects[key]))

    sync(copy())
    return tmp_path / "base"


def arrays_of(written: Path) -> dict[str, Any]:
    """By path, as zarr 2.18.7 read them."""
    arrays = {p.stem: np.load(p, allow_pickle=True) for p in written.glob("*.npy")}
    assert len(arrays) == 12
    arrays["texts"][arrays["texts"] == 0] = "0"  # 2.18.7 fills with the number, 3 with its text
    return arrays


def test_zarr_3_reads_it(written: Path, base: Path) -> None:
    """Equal values, directly and through consolidated metadata, with both pipelines."""
    before = data_of(base)
    report = to_native(base)
    assert data_of(base) == before
    assert report.n_documents_removed == 1 + 2 * 12 + 3
    consolidated: Any = zarr.open_consolidated(str(base), zarr_format=3)
    assert consolidated.attrs["made by"] == "2.18.7"
    for path, expected in arrays_of(written).items():
        assert_same(READERS["zarr"](base / "g" / path), expected)
        if hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
            assert_same(READERS["zarr fused"](base / "g" / path), expected)
        assert_same(consolidated[f"g/{path}"][...], expected)
        assert consolidated[f"g/{path}"].attrs["path"] == path


def test_there_and_back(written: Path, base: Path) -> None:
    """Again v2, and read through the store."""
    before = {k for k in objects_of(LocalStore(base)) if not k.endswith(".zattrs")}
    to_native(base)
    from_native(base, zarr_format=2)
    assert {k for k in objects_of(LocalStore(base)) if not k.endswith(".zattrs")} == before
    root: Any = zarr.open_group(ShardingStore(base), mode="r", zarr_format=2)
    for path, expected in arrays_of(written).items():
        assert_same(root[f"g/{path}"][...], expected)
