"""The memory of conversions does not grow with shards, chunks or arrays.

Measured in a process of its own, which says its peak when it has ended. Values are mostly holes
of files, so that arrays of 512 MB are made at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import crc32c
import pytest
import zarr
from zarr.storage import LocalStore

from tests.support.processes import child, s3_server
from tests.support.stops import empty_directories

MIB = 1 << 20
LIMIT = 300_000_000
"""Peak resident memory of a process that converts, in bytes, with all that Python imports."""

N_CHUNKS = 128
CHUNK_NBYTES = 4 * MIB
CHUNKS_PER_SHARD = 64
"""A shard of 256 MB: a process that holds one with its modules is above the limit."""


def create(root: Path, n_chunks: int, chunk_nbytes: int, **options: Any) -> None:
    """An array of holes; each chunk begins with its number."""
    zarr.create_array(
        LocalStore(root),
        name="z",
        shape=(n_chunks, chunk_nbytes),
        chunks=(1, chunk_nbytes),
        dtype="u1",
        compressors=None,
        **options,
    )
    (root / "z/c").mkdir()
    for i in range(n_chunks):
        (root / f"z/c/{i}").mkdir()
        with (root / f"z/c/{i}/0").open("wb") as file:
            file.write(i.to_bytes(8, "little"))
            file.truncate(chunk_nbytes)


def checksums(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): crc32c.crc32c(path.read_bytes())
        for path in root.rglob("*")
        if path.is_file() and path.name != "zarr.json"
    }


def convert(root: Path, command: str, **request: Any) -> int:
    """Convert in place in another process; its peak memory in bytes."""
    options = request.pop("options", {})
    request = {
        "base": {"kind": "local", "path": str(root)}, "command": command, "options": options
    } | request  # fmt: skip
    with child(request) as process:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, (out, err)
    word, peak = out.split()
    assert word == "done"
    assert int(peak) > 40 * MIB, "no process with numpy is so small"
    print(command, json.dumps(options), f"{int(peak) / 1e6:.0f} MB")
    return int(peak)


@pytest.mark.thorough
def test_shards_of_256_mb(tmp_path: Path) -> None:
    """512 MB to shards of 256 MB, to shards of 128 MB with the index at the start, and back."""
    create(tmp_path, N_CHUNKS, CHUNK_NBYTES)
    before = checksums(tmp_path)

    def run(command: str, **options: Any) -> None:
        peak = convert(tmp_path, command, n_threads=4, options=options)
        assert peak < LIMIT, f"{command} took {peak / 1e6:.0f} MB"

    run("shard", chunks_per_shard=[CHUNKS_PER_SHARD, 1])
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("z/c/*/0"))]
    index_nbytes = CHUNKS_PER_SHARD * 16 + 4
    assert sizes == [CHUNKS_PER_SHARD * CHUNK_NBYTES + index_nbytes] * 2
    run("reshard", chunks_per_shard=[CHUNKS_PER_SHARD // 2, 1], index_location="start")
    assert len(list(tmp_path.glob("z/c/*/0"))) == 4
    run("unshard")
    assert checksums(tmp_path) == before
    assert empty_directories(tmp_path) == []


@pytest.mark.thorough
def test_chunks_of_200_mb(tmp_path: Path) -> None:
    """A value is larger than what is held at a time."""
    create(tmp_path, 3, 200 * MIB)
    before = checksums(tmp_path)
    assert convert(tmp_path, "shard", n_threads=1, options={"chunks_per_shard": [2, 1]}) < LIMIT
    assert len(list(tmp_path.glob("z/c/*/0"))) == 2
    assert convert(tmp_path, "unshard", n_threads=1) < LIMIT
    assert checksums(tmp_path) == before


@pytest.mark.thorough
def test_on_s3(tmp_path: Path) -> None:
    """A shard of 256 MB goes to an object store in parts, and comes back in parts."""
    n = CHUNKS_PER_SHARD
    here, there = tmp_path / "here", tmp_path / "back"
    create(here, n, CHUNK_NBYTES)
    with s3_server() as where:
        where |= {"prefix": "a"}
        request = {"destination": where, "n_threads": 1}
        assert convert(here, "shard", options={"chunks_per_shard": [n, 1]}, **request) < LIMIT
        request = {"base": where, "destination": {"kind": "local", "path": str(there)}}
        assert convert(here, "unshard", n_threads=1, **request) < LIMIT
    assert checksums(there) == checksums(here)


def test_the_measure_sees_what_is_held(tmp_path: Path) -> None:
    """A process that holds 400 MB is seen to do so: the limit can be missed."""
    create(tmp_path, 2, 200 * MIB)
    assert convert(tmp_path, "hold", options={"path": "z"}) > LIMIT
