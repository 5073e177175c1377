"""Command ``references``: the form by the name of OUT, the report, and the status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zarr
from typer.testing import CliRunner

from zarr_shardstore import ShardingStore
from zarr_shardstore.cli.app import app

pytestmark = pytest.mark.filterwarnings("ignore:The 'fastparquet' engine is deprecated")


def run(*args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["references", *map(str, args)])
    return result.exit_code, result.output


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = ShardingStore(tmp_path / "v.zarr", chunks_per_shard=(2, 2))
    z: Any = zarr.create_array(store, name="g/z", shape=(5, 4), chunks=(1, 1), dtype="u1")
    z[:] = 1
    store.close()
    return tmp_path / "v.zarr"


def test_json(root: Path) -> None:
    """With a report for people."""
    out = root.parent / "refs.json"
    status, text = run(root, out, "--url", "s3://b/v.zarr", "--zarr-format", "3", "--group", "x")
    assert status == 0
    assert text == (
        f"x/g/z  20 chunks  6 objects\n{out}, zarr_format 3: bytes below s3://b/v.zarr\n"
    )
    assert json.loads(out.read_text())["refs"]["x/g/z/c/0/1"][0] == "s3://b/v.zarr/g/z/c/0/0"


def test_parquet(root: Path) -> None:
    """With a report for programs; what is there already is refused in a sentence."""
    pytest.importorskip("kerchunk")
    out = root.parent / "refs.parq"
    status, text = run(root, out, "--json", "--path", "g")
    report = json.loads(text)
    assert (status, report["to"], report["out"]) == (0, "kerchunk-parquet", str(out))
    assert report["arrays"] == [{"path": "g/z", "n_chunks": 20, "n_objects": 6, "note": ""}]
    status, text = run(root, out)
    assert status == 1
    assert "there is something at" in text


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
def test_stale(root: Path, name: str) -> None:
    """Status 1 if a shard has changed; its key is named."""
    if name.endswith(".parq"):
        pytest.importorskip("kerchunk")
    out = root.parent / name
    assert run(root, out)[0] == 0
    assert run(root, out, "--stale") == (0, "no shard has changed\n")
    (root / "g/z/c/1/1").unlink()
    assert run(root, out, "--stale") == (1, "changed: g/z/c/1/1\n")
    status, text = run(root, out, "--stale", "--json")
    assert (status, json.loads(text)) == (1, {"stale": ["g/z/c/1/1"]})


def test_what_is_refused_is_a_sentence(root: Path) -> None:
    status, text = run(root, root.parent / "refs.json", "--zarr-format", "4")
    assert (status, text.count("\n")) == (1, 1)
    assert "takes zarr_format 2 or 3, got 4" in text
