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
from zarr.codecs import BytesCodec, GzipCodec, TransposeCodec
from zarr.core.array import create_codec_pipeline
from zarr.registry import get_pipeline_class
from zarr.storage import LocalStore, LoggingStore, MemoryStore, StorePath

from tests.support.kit import CountingStore
from tests.support.pipeline_arrays import OURS, THEIRS, make_array
from zarr_shardstore import DraftHierarchyStore, ShardedCodecPipeline, ShardingStore

PACKAGE = str(Path.cwd() / "zarr_shardstore")

SHOW = """
import sys
sys.path.insert(0, {here!r})
import zarr
{before}
from zarr_shardstore import ShardingStore
{first}
{after}
z = zarr.create_array(ShardingStore({{}}, chunks_per_shard=2), shape=(4,), dtype="u1")
print(zarr.config.get("codec_pipeline.path"), type(pipeline_of(z)).__name__)
"""
PIPELINE_OF = """
def pipeline_of(z):
    return (z._async_array if hasattr(z, "_async_array") else z.async_array).codec_pipeline
"""
SET_THEIRS = f"zarr.config.set({{'codec_pipeline.path': {THEIRS!r}}})"
SAVED = "zarr.config.defaults[0]['codec_pipeline']['path']"
SET_SAVED = f"zarr.config.set({{'codec_pipeline.path': {SAVED}}})"
"""As a program does that puts the configuration back which it found."""
LOAD = f"import pickle; pickle.loads({pickle.dumps(ShardingStore({}))!r})"
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
        ({"before": SET_THEIRS}, THEIRS),
        ({"before": SET_THEIRS, "first": ""}, THEIRS),
        ({"after": SET_THEIRS}, THEIRS),
        ({"after": SET_SAVED}, THEIRS),
        ({"after": "zarr.config.reset()"}, OURS),
        ({"first": f"with {SET_THEIRS}: ShardingStore({{}})"}, OURS),
        ({"first": "with zarr.config.set({'array.order': 'F'}): ShardingStore({})"}, OURS),
        ({"after": f"with {SET_THEIRS}: ShardingStore({{}})"}, OURS),
        ({"first": LOAD}, OURS),
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
        here=str(Path.cwd()),
        before=how.get("before", ""),
        first=how.get("first", "ShardingStore({})"),
        after=how.get("after", ""),
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == [expected, expected.rpartition(".")[2]]


def run_alone(code: str) -> list[str]:
    """Run code in a process without a configuration; return what it prints."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ZARR_")}
    code = f"import sys\nsys.path.insert(0, {str(Path.cwd())!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_bytes_and_keys_are_imported_without_zarr() -> None:
    """Nor does the import of the package alone change what zarr does."""
    run_alone(
        """
__import__("zarr_shardstore." + "format.shard")
assert "zarr" not in sys.modules
"""
    )


STATE = """
import copy, zarr, zarr.registry
def state():
    registries = {name: dict(value) for name, value in vars(zarr.registry).items()
                  if isinstance(value, dict) and "registr" in name}
    return copy.deepcopy([zarr.config.config, zarr.config.defaults, sorted(registries),
        {name: {key: str(each) for key, each in value.items()}
         for name, value in registries.items()}])
before = state()
assert len(before[2]) >= 5, before[2]
"""


def test_an_import_has_no_effect() -> None:
    """Of any public name: zarr's configuration, defaults and registries stay as they are."""
    code = (
        STATE
        + """
import zarr_shardstore
from zarr_shardstore import ShardingStore, ShardedCodecPipeline
assert state() == before
for name in zarr_shardstore.__all__:
    getattr(zarr_shardstore, name)
assert state() == before
import importlib, pkgutil
for module in pkgutil.walk_packages(zarr_shardstore.__path__, zarr_shardstore.__name__ + "."):
    if "__main__" not in module.name and ".testing" not in module.name:
        importlib.import_module(module.name)
assert state() == before
ShardingStore({})
assert state() != before
zarr.config.reset()
assert [zarr.config.config, zarr.config.defaults] == before[:2]
"""
    )
    run_alone(code)


def test_a_user_who_goes_back_to_the_default_of_zarr_is_not_asked_again() -> None:
    """Each construction, copy and unpickling could ask; only ``reset`` starts anew."""
    code = f"""
import pickle, zarr
from zarr_shardstore import ShardingStore
def path():
    return zarr.config.get("codec_pipeline.path")
store = ShardingStore({{}})
assert path() == {OURS!r}
{SET_SAVED}
for make in (lambda: ShardingStore({{}}), lambda: pickle.loads(pickle.dumps(store)),
             lambda: store.with_read_only(True)):
    make()
    assert path() == {THEIRS!r}
for make in (lambda: ShardingStore({{}}), lambda: pickle.loads(pickle.dumps(store))):
    zarr.config.reset()
    assert path() == {THEIRS!r}
    make()
    assert path() == {OURS!r}
"""
    run_alone(code)


FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"


@pytest.mark.skipif(
    not hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"), reason="zarr has no other pipeline"
)
@pytest.mark.parametrize("is_default", [False, True])
def test_another_pipeline_of_zarr(is_default: bool) -> None:
    """If the user chose it, it stays; if it is zarr's default, arrays in other stores have it."""
    how = "update_defaults" if is_default else "set"
    code = f"""{PIPELINE_OF}
import zarr
from zarr_shardstore import ShardingStore
zarr.config.{how}({{"codec_pipeline": {{"path": {FUSED!r}, "batch_size": 1}}}})
ShardingStore({{}})
print(zarr.config.get("codec_pipeline.path"))
for store in ({{}}, ShardingStore({{}})):
    print(type(pipeline_of(zarr.create_array(store, shape=(4,), dtype="u1"))).__name__)
"""
    name = FUSED.rpartition(".")[2]
    ours = [OURS, name, OURS.rpartition(".")[2]]
    assert run_alone(code) == (ours if is_default else [FUSED, name, name])


def test_errors_are_those_of_zarr() -> None:
    """For codecs that make no chain, and for an array that zarr cannot read."""
    array_bytes = [BytesCodec(), BytesCodec()]
    chains: list[Any] = [[], [TransposeCodec(order=(0,))], array_bytes, [GzipCodec(), BytesCodec()]]
    for chain in chains:
        raised = []
        for path in (OURS, THEIRS):
            with zarr.config.set({"codec_pipeline.path": path}), pytest.raises(Exception) as error:  # noqa: PT011
                get_pipeline_class().from_codecs(chain)
            raised.append((error.type, str(error.value)))
        assert raised[0] == raised[1]


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
    allowed |= {"drop_copied_encoding", "refuse_shards", "_usual_path"}
    allowed |= {"_usual_path.<locals>.<listcomp>"}
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
