"""The documents are true: what they name exists, and the README's code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from zarr_shardstore import Finding

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "spec_notes").rglob("*.md"))]


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


def test_what_the_readme_defines_passes_mypy_strict(tmp_path: Path) -> None:
    """Classes and functions that a reader copies into a program of his own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    programs = [block for block in blocks if re.search(r"^(class|def) ", block, re.M)]
    assert programs
    for i, block in enumerate(programs):
        program = tmp_path / f"readme_{i}.py"
        program.write_text(f"from zarr_shardstore import ShardingStore\n{block}", encoding="utf-8")
        command = [sys.executable, "-m", "mypy", "--strict", str(program)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_names_each_command_and_the_makefile_has_it() -> None:
    """The two commands of the front door, and the others."""
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in re.findall(r"^([a-z]+):", makefile, re.M):
        assert f"make {command}" in readme, command
    for command in re.findall(r"`make (\w+)`", readme):
        assert re.search(rf"^{command}:", makefile, re.M), command


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
