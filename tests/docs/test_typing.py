"""What type checkers say to users: mistakes are found, and what works is let through.

mypy runs once, in strict mode, on calls as users write them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

CALLS = """
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import zarr
from obstore.store import LocalStore as ObstoreLocal, MemoryStore as ObstoreMemory, S3Store

from zarr_shardstore import (
    DraftHierarchyStore, ShardingMapping, ShardingStore, get_shard_info, shard_store
)

typed: dict[str, bytes] = {}
numbers: dict[str, int] = {}


class FileSystem:  # as fsspec's, which has no types
    root_marker = ""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        raise NotImplementedError

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None: ...


class Mapper:
    def __init__(self, root: str, fs: FileSystem) -> None:
        self.root = root
        self.fs = fs


ShardingStore("a.zarr")
ShardingStore(Path("a.zarr"))
ShardingStore(ObstoreMemory())
ShardingStore(ObstoreLocal("/tmp"))
ShardingStore(S3Store("bucket"))
ShardingStore({})
ShardingStore(typed)
ShardingStore(zarr.storage.MemoryStore())
ShardingStore(zarr.storage.LocalStore("a"))
ShardingStore(ShardingMapping({}))
ShardingStore(fsspec.filesystem("memory"))
ShardingStore(fsspec.get_mapper("memory://a"))
ShardingStore(FileSystem())
ShardingStore(Mapper("a", FileSystem()))
ShardingStore("a", chunks_per_shard=8)
ShardingStore("a", (2, 2))
ShardingStore("a", np.array([2, 2]))
ShardingStore("a", {"raw/*": (2, 2), "labels": None})
ShardingStore("a", "auto")
ShardingStore("a", storage_transformers="sharding")
ShardingMapping(ShardingStore("a"))
DraftHierarchyStore(ShardingStore("a"))
get_shard_info(ShardingStore("a"))
ShardingMapping({}).get_partial_values([("k", (0, None)), ("k", None)])

ShardingStore(12345)  # error
ShardingStore(None)  # error
ShardingStore([])  # error
ShardingStore(b"a")  # error
ShardingStore(object())  # error
ShardingStore(numbers)  # error
ShardingMapping(12345)  # error
DraftHierarchyStore(12345)  # error
shard_store(12345)  # error
get_shard_info(12345)  # error
ShardingStore("a", chunks_per_shard=1.5)  # error
ShardingStore("a", chunks_per_shard="all")  # error
ShardingStore("a", strategy="append all")  # error
ShardingStore("a").erase_values(["k"])  # error
ShardingMapping({}).get_partial_values([("k", slice(0, 1))])  # error
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Lines of each file in which mypy, when it is strict, finds an error."""
    directory = tmp_path_factory.mktemp("typing")
    page = (ROOT / "docs" / "how-to" / "transformers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    (transformer,) = (block for block in blocks if "(ValueTransformer)" in block)
    sources = {"calls.py": CALLS, "transformer.py": transformer}
    for name, source in sources.items():
        (directory / name).write_text(source)
    config = directory / "mypy.ini"
    config.write_text(
        f"[mypy]\nstrict = true\nmypy_path = {ROOT}\n"
        "[mypy-fsspec.*]\nignore_missing_imports = true\n"
    )
    options = ["--config-file", str(config), "--cache-dir", str(directory / "cache")]
    report, problem, _ = api.run([*options, *(str(directory / name) for name in sources)])
    assert not problem
    found: dict[str, set[int]] = {name: set() for name in sources}
    for name, line in re.findall(r"(\w+\.py):(\d+): error", report):
        found.setdefault(name, set()).add(int(line))
    return found


@pytest.mark.thorough
def test_calls(findings: dict[str, set[int]]) -> None:
    """Each line that says so is an error, and no other one."""
    lines = CALLS.splitlines()
    expected = {i for i, line in enumerate(lines, 1) if line.endswith("# error")}
    assert {lines[i - 1] for i in findings["calls.py"] ^ expected} == set()


def test_the_transformer_in_the_readme(findings: dict[str, set[int]]) -> None:
    """It has no error in strict mode."""
    assert findings["transformer.py"] == set()
    assert findings.keys() == {"calls.py", "transformer.py"}
