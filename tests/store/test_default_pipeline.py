"""The codec pipeline that arrays get without a word from the user, and with one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.array import create_codec_pipeline
from zarr.storage import LocalStore, LoggingStore, MemoryStore, StorePath

from tests.support.pipeline_arrays import OURS, THEIRS, make_array
from zarr_shardstore import DraftHierarchyStore, ShardedCodecPipeline, ShardingStore
from zarr_shardstore.testing import CountingStore

PACKAGE = str(Path.cwd() / "zarr_shardstore")

SHOW = """
import sys
sys.path.insert(0, {here!r})
import zarr
{before}
from zarr_shardstore import ShardingStore
{after}
z = zarr.create_array(ShardingStore({{}}, chunks_per_shard=2), shape=(4,), dtype="u1")
print(zarr.config.get("codec_pipeline.path"), type(pipeline_of(z)).__name__)
"""
PIPELINE_OF = """
def pipeline_of(z):
    return (z._async_array if hasattr(z, "_async_array") else z.async_array).codec_pipeline
"""
SET_THEIRS = f"zarr.config.set({{'codec_pipeline.path': {THEIRS!r}}})"
SET_OTHER = """
from zarr.core.codec_pipeline import BatchedCodecPipeline
class Other(BatchedCodecPipeline): pass
from zarr.registry import register_pipeline
register_pipeline(Other)
zarr.config.set({"codec_pipeline.path": "__main__.Other"})
"""


def pipeline_of(z: Any) -> Any:
    return (z._async_array if hasattr(z, "_async_array") else z.async_array).codec_pipeline


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, OURS),
        ({"env": THEIRS}, THEIRS),
        ({"yaml": THEIRS}, THEIRS),
        ({"before": SET_OTHER}, "__main__.Other"),
        ({"env": OURS, "before": SET_THEIRS}, THEIRS),
        ({"before": SET_THEIRS}, OURS),  # as the docs say: it cannot be told from the default
        ({"after": SET_THEIRS}, THEIRS),
        ({"after": "zarr.config.reset()"}, OURS),
        ({"env": THEIRS, "after": "zarr.config.refresh()"}, THEIRS),
    ],
    ids=str,
)
def test_what_the_user_has_chosen_wins(tmp_path: Path, how: dict[str, str], expected: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("ZARR_")}
    if "env" in how:
        env["ZARR_CODEC_PIPELINE__PATH"] = how["env"]
    if "yaml" in how:
        (tmp_path / "zarr.yaml").write_text(f"codec-pipeline:\n  path: {how['yaml']}\n")
        env["ZARR_CONFIG"] = str(tmp_path / "zarr.yaml")
    code = PIPELINE_OF + SHOW.format(
        here=str(Path.cwd()), before=how.get("before", ""), after=how.get("after", "")
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == [expected, expected.rpartition(".")[2]]


def test_bytes_and_keys_are_imported_without_zarr() -> None:
    """Nor does the import of the package alone change what zarr does."""
    code = f"""
import sys
sys.path.insert(0, {str(Path.cwd())!r})
__import__("zarr_shardstore." + "format.shard")
assert "zarr" not in sys.modules
import zarr
print(zarr.config.get("codec_pipeline.path"))
"""
    command = [sys.executable, "-c", code]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ZARR_")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == THEIRS


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"shards": (6, 6)}], ids=str)
@pytest.mark.parametrize("kind", ["memory", "local", "wrapper"])
def test_arrays_in_other_stores_get_the_pipeline_of_zarr(
    tmp_path: Path, options: dict[str, Any], kind: str
) -> None:
    """An equal object of the same class; no code of ours runs when they are read and written."""
    stores: dict[str, Any] = {
        "memory": MemoryStore,
        "local": lambda: LocalStore(tmp_path),
        "wrapper": lambda: LoggingStore(ShardingStore({}), log_level="ERROR"),
    }
    store = stores[kind]()
    z = make_array(store, **options)
    found = pipeline_of(z)
    with zarr.config.set({"codec_pipeline.path": THEIRS}):
        usual = create_codec_pipeline(z.metadata, store=store)
    assert (type(found), found) == (type(usual), usual)
    seen: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        create_codec_pipeline(z.metadata, store=store)
    finally:
        sys.setprofile(None)
    made_by = "ShardedCodecPipeline."
    allowed = {f"{made_by}from_array_metadata_and_store", f"{made_by}from_codecs", "usual_pipeline"}
    assert {name for name in seen if "_TakesWholeOperations" not in name} <= allowed


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_arrays_in_a_sharding_store_get_ours(zarr_format: Any) -> None:
    """From a store, a path in it, a group, a draft hierarchy, a pickle; each shard is one write."""
    base = CountingStore()
    store = ShardingStore(base, chunks_per_shard=(3, 2))
    made = [
        make_array(store, name="one", zarr_format=zarr_format),
        make_array(StorePath(store, "two"), name=None, zarr_format=zarr_format),
        make_array(zarr.group(StorePath(store, "g"), zarr_format=zarr_format).store_path),
        make_array(DraftHierarchyStore(ShardingStore({}, chunks_per_shard=2))),
        pickle.loads(pickle.dumps(make_array(ShardingStore({}, chunks_per_shard=2), name="p"))),
    ]
    assert {type(pipeline_of(z)) for z in made} == {ShardedCodecPipeline}
    base.forget()
    made[0][:] = np.ones(made[0].shape)
    assert len(base.writes) == 4
    again: Any = zarr.open_array(store, path="one")
    assert (again[:] == 1).all()
