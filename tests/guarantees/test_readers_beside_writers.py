"""Processes read chunks while others append, overwrite, erase and compact: no wrong byte.

``ZARR_SHARDSTORE_SECONDS`` is for how long.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import zarr

from tests.support import read_and_write
from tests.support.any_size import encode
from tests.support.read_and_write import (
    ARRAYS,
    CHUNKS_PER_SHARD,
    MAX_START_S,
    V3_ARRAYS,
    Board,
    element_of,
    is_erased,
)
from tests.support.rounds import N_ROUNDS
from tests.support.side_files import is_side_file
from zarr_shardstore import ShardingMapping

SECONDS = float(os.environ.get("ZARR_SHARDSTORE_SECONDS", 4 if N_ROUNDS else 1))
STRATEGIES: tuple[Literal["append", "rewrite"], ...] = ("append", "append", "rewrite")
BASES = ("local", "wrapped", "fsspec", *(["obstore"] if find_spec("obstore") else []))
N_WRITERS = len(STRATEGIES)
N_PROCESSES = N_WRITERS + 2 + len(BASES)


def test_readers_beside_writers(tmp_path: Path) -> None:
    """What a reader finds was stored when it began, or is newer, and never older than what it
    found before; no call fails. In the end everything is there, and zarr reads it by itself."""
    root = tmp_path / "root"
    read_and_write.create(root)
    path = tmp_path / "board"
    board = Board.create(path)
    where = str(root), str(path)
    context = multiprocessing.get_context("spawn")
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(N_PROCESSES, mp_context=context) as processes:
        submit = processes.submit
        futures = [
            submit(read_and_write.write, *where, strategy, SECONDS, rank, N_WRITERS, N_PROCESSES)
            for rank, strategy in enumerate(STRATEGIES)
        ]
        futures += [
            submit(read_and_write.read_mapping, *where, SECONDS, 3, N_PROCESSES),
            submit(read_and_write.read_arrays, *where, SECONDS, 4, N_PROCESSES),
            *(
                submit(read_and_write.read_store, *where, kind, SECONDS, 5 + i, N_PROCESSES)
                for i, kind in enumerate(BASES)
            ),
        ]
        for future in as_completed(futures, timeout=MAX_START_S + 10 * SECONDS):
            counts += future.result()
    print({name: counts[name] for name in sorted(counts)})
    check_all(root, board)


def check_all(root: Path, board: Board) -> None:
    """Everything is stored that should be, and nothing else."""
    versions = board.stored.tolist()
    assert versions == board.begun.tolist()
    expected = {
        array.key_of(chunk): encode(element_of(chunk, versions[chunk]))
        for array in ARRAYS
        for chunk in array.chunks
        if not is_erased(versions[chunk])
    }
    m = ShardingMapping(root, chunks_per_shard=CHUNKS_PER_SHARD, read_only=True)
    assert {key: m[key] for key in m if not key.endswith("zarr.json")} == expected
    assert not [path for path in root.rglob("*") if is_side_file(path.name)]
    for array in V3_ARRAYS:
        found: Any = zarr.open_array(root, path=array.path, mode="r")[:]
        for chunk, element in zip(array.chunks, found, strict=True):
            version = versions[chunk]
            assert element == (b"" if is_erased(version) else element_of(chunk, version))
