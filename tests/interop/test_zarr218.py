"""The draft's only other implementation, zarr-python 2.18.7, reads ours and we read its.

It runs in an environment of its own: ``ZARR_SHARDSTORE_ZARR218`` names its Python. ``make
test`` makes that environment.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from zarr_shardstore import ShardingMapping

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "zarr218"
SCRIPT = HERE / "golden" / "make_golden.py"
OLD_PYTHON = os.environ.get("ZARR_SHARDSTORE_ZARR218")

# As in make_golden.py: shape, chunks, chunks_per_shard, separator, which chunks are stored
ARRAYS = {
    "a/cube": ((5, 3, 2), (1, 1, 1), (3, 1, 2), "/"),
    "a/edge": ((7, 4), (2, 3), (2, 2), "."),
    "line": ((9,), (2,), (3,), "/"),
    "holes": ((8, 8), (2, 2), (2, 2), "/"),
}
HOLES = {(0, 0), (3, 2)}


def data_of(shape: tuple[int, ...]) -> np.ndarray:
    return (np.arange(1, math.prod(shape) + 1, dtype="<i4") * 7).reshape(shape)


def expected_chunks() -> dict[str, bytes]:
    """Each stored chunk of the golden hierarchy, by the draft's rules: padded at the edge."""
    chunks = {"data/root/point/c0": data_of(()).tobytes()}
    for path, (shape, chunk_shape, _, separator) in ARRAYS.items():
        data = data_of(shape)
        grid = [range(-(-s // c)) for s, c in zip(shape, chunk_shape, strict=True)]
        for coords in product(*grid):
            if path == "holes" and coords not in HOLES:
                continue
            chunk = np.zeros(chunk_shape, "<i4")
            part = data[
                tuple(slice(i * c, (i + 1) * c) for i, c in zip(coords, chunk_shape, strict=True))
            ]
            chunk[tuple(map(slice, part.shape))] = part
            suffix = "c" + separator.join(map(str, coords))
            chunks[f"data/root/{path}/{suffix}"] = chunk.tobytes()
    return chunks


def test_its_shards_are_read() -> None:
    """Every chunk key of its hierarchy, and every byte; 0-d, edges, holes, both separators."""
    m = ShardingMapping(str(GOLDEN))
    assert {k: m[k] for k in m.list_prefix("data/root/")} == expected_chunks()


@pytest.mark.parametrize("path", ARRAYS)
def test_its_documents_show_no_sharding(path: str) -> None:
    """The view takes the declaration out, in 2.18's spelling too."""
    shown = ShardingMapping(str(GOLDEN))[f"meta/root/{path}.array.json"]
    assert b'"storage_transformers": []' in shown
    assert b"chunks_per_shard" not in shown


@pytest.mark.skipif(OLD_PYTHON is None, reason="ZARR_SHARDSTORE_ZARR218 names no Python")
@pytest.mark.parametrize("order", ["C", "F", "morton"])
def test_our_shards_are_read_there(tmp_path: Path, order: str) -> None:
    """Written chunk by chunk and in batches, in every order; all read with equal values."""
    shutil.copytree(GOLDEN / "meta", tmp_path / "meta")
    shutil.copy(GOLDEN / "zarr.json", tmp_path)
    m = ShardingMapping(str(tmp_path), order=order)
    chunks = expected_chunks()
    one_by_one = [k for k in chunks if "/a/" in k]
    for key in reversed(one_by_one):
        m[key] = chunks[key]
    m.update({k: v for k, v in chunks.items() if k not in one_by_one})
    m.flush()
    stored = {p.relative_to(tmp_path) for p in (tmp_path / "data").rglob("*") if p.is_file()}
    assert stored == {p.relative_to(GOLDEN) for p in (GOLDEN / "data").rglob("*") if p.is_file()}, (
        "the same shards, under the same keys"
    )
    assert OLD_PYTHON is not None
    done = subprocess.run(
        [OLD_PYTHON, str(SCRIPT), "--check", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 5
