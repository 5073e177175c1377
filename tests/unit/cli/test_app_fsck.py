"""`zarr-shardstore fsck`: its status, its table, its JSON, and the census."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import zarr
from typer.testing import CliRunner

import zarr_shardstore
from tests.support.checked_stores import CPS, KINDS, VALUES
from zarr_shardstore import ShardConflictError, ShardingMapping, ShardingStore, unshard_store
from zarr_shardstore.cli.app import app


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fsck", *args])
    return result.exit_code, result.stdout


def test_status_and_output(tmp_path: Path) -> None:
    """0 clean, 1 findings, 2 could not check; as a table or as JSON."""
    for name in "01":
        array = zarr.create_array(
            ShardingStore(tmp_path, chunks_per_shard=CPS),
            name=name,
            shape=(8, 24),
            chunks=(2, 4),
            dtype="u2",
        )
        array[:] = VALUES
    ShardingMapping(tmp_path).flush()
    root = str(tmp_path)
    code, text = run(root)
    assert (code, text[:6]) == (0, "clean:")
    path = tmp_path / "0/c/1/1"
    path.write_bytes(path.read_bytes()[:-1])
    code, text = run(root, "--decode")
    assert code == 1
    assert text.startswith("error  index checksum  0/c/1/1")
    code, text = run(root, "--json")
    (found,) = json.loads(text)["findings"]
    assert code == 1
    assert (found["kind"], found["shard"], found["repairable"]) == ("index_checksum", [1, 1], True)
    assert run(root, "1")[0] == 0
    assert run(root, "2")[0] == 2
    (tmp_path / "none").mkdir()
    assert run(str(tmp_path / "none")) == (2, "")
    assert CliRunner().invoke(app, ["info", root]).exit_code == 1


@pytest.mark.parametrize("name", ["v3 raw", "draft raw", "unsharded v2", "v3 checksum below"])
def test_census(name: str, tmp_path: Path) -> None:
    """Stored and missing chunks, of a region in chunk coordinates, from indexes alone."""
    KINDS[name].make(tmp_path)
    root = str(tmp_path)
    code, text = run(root, "--missing")
    assert (code, text.splitlines()) == (0, [f"a  0,{j}  missing" for j in range(6)])
    code, text = run(root, "a", "--chunks", "--missing", "--region", "0:2,4:")
    assert text.splitlines() == [
        *("a  1,4  stored", "a  1,5  stored"),
        *("a  0,4  missing", "a  0,5  missing"),
    ]
    (array,) = json.loads(run(root, "--chunks", "--region", "3", "--json")[1])
    assert array["stored"] == [[3, j] for j in range(6)]
    assert run(root, "--missing", "--region", "0,0,0")[0] == 2


def test_repair_and_restore(tmp_path: Path) -> None:
    """A dry run unless ``--yes``; ``--restore`` takes the quarantine that the report names."""
    KINDS["v3 zstd"].make(tmp_path)
    ShardingMapping(tmp_path).flush()
    root, path = str(tmp_path), tmp_path / "a/c/1/1"
    damaged = path.read_bytes()[:-1] + b"?"
    path.write_bytes(damaged)
    code, text = run(root, "--repair")
    assert (code, text.splitlines()[-1]) == (1, "nothing was changed: --yes does it")
    assert path.read_bytes() == damaged
    code, text = run(root, "--repair", "--yes", "--json")
    assert code == 0
    assert run(root)[0] == 0
    restore = "--restore", json.loads(text)["quarantine"]
    assert run(root, *restore) == (0, "would be restored, with --yes: a/c/1/1\n")
    expected = {"restored": ["a/c/1/1"], "dry_run": True}
    assert json.loads(run(root, *restore, "--json")[1]) == expected
    assert path.read_bytes() != damaged
    assert run(root, *restore, "--yes") == (0, "restored: a/c/1/1\n")
    assert path.read_bytes() == damaged
    assert run(root, "--restore", "none") == (2, "")


def test_a_restoration_in_part_fails_and_names_what_it_restored(tmp_path: Path) -> None:
    """Status 2 says that nothing was done."""
    KINDS["v3 zstd"].make(tmp_path)
    ShardingMapping(tmp_path).flush()
    root, paths = str(tmp_path), [tmp_path / "a/c/1" / name for name in "10"]
    damaged = [path.read_bytes()[:-1] + b"?" for path in paths]
    for path, value in zip(paths, damaged, strict=True):
        path.write_bytes(value)
    restore = "--restore", json.loads(run(root, "--repair", "--yes", "--json")[1])["quarantine"]
    paths[0].write_bytes(b"new")
    for options, done in ([], "would be restored"), (["--yes"], "; restored"):
        result = CliRunner().invoke(app, ["fsck", root, *restore, *options])
        assert result.exit_code == 1
        assert "'a/c/1/1' was written since the repair: left as it is" in result.stderr
        assert f"{done}: 'a/c/1/0'" in result.stderr
    assert [path.read_bytes() for path in paths] == [b"new", damaged[1]]


def test_a_check_that_a_writer_disturbs_has_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1 would say that it has found damage."""

    def disturbed(*_: Any, **__: Any) -> None:
        raise ShardConflictError("a document was cut off on its way")

    monkeypatch.setattr(zarr_shardstore, "check_store", disturbed)
    assert run(str(tmp_path))[0] == 2


def test_chunks_that_only_a_replica_has(tmp_path: Path) -> None:
    """A shard that is gone is no damage. The replica may have no shards."""
    root, source, flat = (str(tmp_path / name) for name in ("s", "replica", "flat"))
    z: Any = zarr.create_array(
        ShardingStore(root, 2), name="a", shape=(8,), chunks=(1,), dtype="u1"
    )
    z[:6] = 1
    shutil.copytree(root, source)
    unshard_store(source, flat)
    (tmp_path / "s/a/c/1").unlink()
    for replica in (source, flat):
        code, text = run(root, "--missing", "--source", replica)
        assert (code, text.splitlines()) == (0, ["a  2  missing", "a  3  missing"])
    assert run(root, "--missing")[1].splitlines()[-1] == "a  7  missing"
    assert run(root, "--repair", "--source", source)[0] == 0
    other = zarr.create_array(str(tmp_path / "other"), name="a", shape=(9,), dtype="u1")
    other[:] = 1
    assert run(root, "--missing", "--source", str(tmp_path / "other")) == (2, "")


def test_a_replica(tmp_path: Path) -> None:
    """``--source`` names a store that has the lost chunks; one that is not there is refused."""
    kind, root, source = KINDS["v3 zstd"], str(tmp_path / "s"), str(tmp_path / "replica")
    for name in ("s", "replica"):
        kind.make(tmp_path / name)
        ShardingMapping(tmp_path / name).flush()
    (tmp_path / "s/a/c/1/1").write_bytes(b"")
    assert run(root, "--repair", "--yes", "--source", source + "?")[0] == 2
    assert run(root, "--repair", "--yes")[0] == 1
    code, text = run(root, "--repair", "--yes", "--source", source)
    assert (code, "6 chunks of the source" in text) == (0, True)
    assert kind.read(tmp_path / "s") == kind.read(tmp_path / "replica")


@pytest.mark.parametrize(
    ("given", "others"),
    [
        (["--yes"], "--repair or --restore"),
        (["--keep", "drop"], "--repair"),
        (["--assume-order", "C", "--missing"], "--repair"),
        (["--region", "0"], "--chunks or --missing"),
    ],
)
def test_options_that_would_do_nothing(given: list[str], others: str, tmp_path: Path) -> None:
    """They are refused: ``fsck --yes`` would look like a repair."""
    KINDS["v3 raw"].make(tmp_path)
    result = CliRunner().invoke(app, ["fsck", str(tmp_path), *given])
    assert result.exit_code == 2
    assert f"{given[0]} has a meaning only with {others}" in str(result.stderr)


@pytest.mark.parametrize("content", [b"one line", b"{}\n", b"\x93NUMPY", b"two\nlines\n"])
def test_notes_do_not_replace_another_file(content: bytes, tmp_path: Path) -> None:
    KINDS["v3 raw"].make(tmp_path / "a.zarr")
    notes = tmp_path / "notes"
    notes.write_bytes(content)
    assert run(str(tmp_path / "a.zarr"), "--resume", str(notes))[0] == 2
    assert notes.read_bytes() == content


def test_an_empty_argument_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of a shell that is not set gives one."""
    KINDS["v3 raw"].make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("")[0] == 2
    assert run(".")[0] == 0
