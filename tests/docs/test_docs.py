"""The documents are true: what they name exists, and the README's code runs."""

from __future__ import annotations

import importlib.util
import pickle
import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import zarr_shardstore
from zarr_shardstore import Finding, errors

ROOT = Path(__file__).parents[2]
PAGES = [
    *map(ROOT.joinpath, ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "spec_notes").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tests_and_files_that_are_named_exist(page: Path) -> None:
    """Each ``tests/file.py::function``, each path of the package, each link."""
    text = page.read_text(encoding="utf-8")
    for file, function in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert re.search(rf"^\s*(async )?def {function}\(", (ROOT / file).read_text(), re.M), (
            f"{file} has no {function}"
        )
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        if not path.startswith(("tests/", "examples/", "benchmarks/")):
            assert (ROOT / "zarr_shardstore" / path).is_file(), path
    for path in re.findall(r"`((?:examples|benchmarks|spec_notes)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target


def test_ways_to_lose_data_name_findings_that_exist() -> None:
    """In the column that says how to see it."""
    page = (ROOT / "spec_notes" / "losing_data.md").read_text()
    cells = [line.split(" | ")[2] for line in page.splitlines() if line.count(" | ") == 3]
    named = {name for cell in cells for name in re.findall(r"`([a-z]+_[a-z_]+)`", cell)}
    assert {"torn_index", "chunk_checksum"} <= named
    assert named <= set(get_args(get_type_hints(Finding)["kind"]))


def test_the_code_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, as a reader would type it."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_readme_is_short() -> None:
    """Two screens; the rest is on pages."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_each_command_of_the_makefile_is_named() -> None:
    """Two in the README, all for contributors."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    readme, contributing, makefile = texts
    assert re.findall(r"^make (\w+) ", readme, re.M) == ["demo", "test"]
    for command in re.findall(r"^([a-z-]+):", makefile, re.M):
        assert f"`make {command}`" in contributing, command
    for command in re.findall(r"`make ([a-z-]+)`", contributing + readme):
        assert re.search(rf"^{command}:", makefile, re.M), command


def test_each_public_name_and_error_is_in_the_reference() -> None:
    """Of pages that are made from docstrings."""
    names = (ROOT / "docs" / "reference" / "api.md").read_text()
    errors = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for name in zarr_shardstore.__all__:
        if name.startswith("__"):
            continue
        is_error = name.endswith(("Error", "Warning"))
        assert f"| `{name}` |" in errors if is_error else f"::: zarr_shardstore.{name}\n" in names


def test_each_error_names_its_section() -> None:
    """By a link, in one note, which a traceback shows; also after pickling."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    link = f"{project['urls']['Documentation']}reference/errors.html"
    raised = [
        errors.SpecError("no"),
        errors.ReadOnlyError(),
        errors.UnsupportedError("no"),
        errors.AlreadyExistsError("there"),
        errors.CorruptShardError("no", shard_key="c/0"),
        errors.CorruptValueError("no", key="c/0"),
        errors.ShardConflictError("late"),
        errors.UnpublishedError("no", [OSError("full")], {"c/0": ["c/0/0"]}),
        errors.UnfinishedConversionError("run it again"),
    ]
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    concrete = {each for each in classes if issubclass(each, errors.ShardStoreError)}
    assert {type(error) for error in raised} == concrete - {errors.ShardStoreError}
    for error in raised:
        name = type(error).__name__
        assert f"\n## {name}\n" in page
        for each in (error, pickle.loads(pickle.dumps(error))):
            assert each.__notes__ == [f"Causes and remedies: {link}#{name.lower()}"]


def test_each_command_and_option_is_in_the_reference() -> None:
    """In the page that the site makes."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.command_line()
    for command in hooks.app.registered_commands:
        assert f"## `zarr-shardstore {command.name}`" in page
    assert "`--assume-order" in page


def test_what_is_promised_is_there() -> None:
    """Words for what is to come stand in the roadmap only."""
    for page in PAGES:
        found = re.findall(r"\b(planned|not yet|to be implemented)\b", page.read_text())
        assert not found or page.name == "roadmap.md", (page, found)


def test_clauses_cover_every_operation_of_the_draft() -> None:
    """No operation is left out of the table."""
    clauses = (ROOT / "spec_notes" / "clauses.md").read_text()
    for operation in (
        "get_partial_values",
        "set_partial_values",
        "erase_values",
        "erase_prefix",
        "list",
        "list_prefix",
        "list_dir",
    ):
        assert f"| `{operation}`" in clauses, operation
