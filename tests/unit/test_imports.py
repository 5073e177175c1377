"""The floors, and what importing costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import zarr_shardstore


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["format.shard", "metadata.documents", "shards.rewrite"])
def test_the_pure_floors_need_no_zarr(package: str) -> None:
    """They can be used where zarr and an event loop are not wanted."""
    modules = modules_after(f"import zarr_shardstore.{package}")
    assert not {m for m in modules if m.split(".")[0] in ("zarr", "fsspec", "asyncio")}


def test_transformers_can_be_written_without_zarr() -> None:
    """The module with the names for it is as light as the pure floors."""
    modules = modules_after("import zarr_shardstore.transformers as t; assert t.__all__")
    assert not {m for m in modules if m.split(".")[0] in ("zarr", "fsspec", "asyncio")}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["fsck", "--help"], ["fsck"]])
def test_help_and_version_need_no_zarr(arguments: list[str]) -> None:
    """A command is imported when it is called, and not before its parameters are right."""
    statement = f"""
import contextlib, io, sys
sys.argv[1:] = {arguments}
from zarr_shardstore.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()"""
    modules = modules_after(statement)
    assert "zarr_shardstore.cli.app" in modules
    assert not {m for m in modules if m.split(".")[0] in ("zarr", "numpy", "fsspec", "asyncio")}


def test_an_import_brings_what_is_needed() -> None:
    """What only some calls need is imported by these calls."""
    before = modules_after("import zarr")
    brought = modules_after("import zarr; from zarr_shardstore import ShardingStore") - before
    rare = ("argparse", "crc32c", "difflib", "fsspec.implementations.dirfs", "obstore", "secrets")
    assert not brought & set(rare)
    rooms = {name.split(".")[1] for name in brought if name.startswith("zarr_shardstore.")}
    assert not rooms & {"access", "cli", "interop", "tools"}


def test_public_names() -> None:
    """All that is announced is there, and nothing else is guessed."""
    for name in zarr_shardstore.__all__:
        assert getattr(zarr_shardstore, name) is not None
    assert set(zarr_shardstore.__all__) == set(dir(zarr_shardstore))
    with pytest.raises(AttributeError, match="no attribute 'Shardingstore'"):
        _ = zarr_shardstore.Shardingstore


# ------------------------------------------------------------- tests of what users are promised

TESTS = Path(__file__).parents[1]
_KNOW = ("unit", "kit", "golden", "fuzz")
"""Folders of unit tests, of the kit, of scripts for other environments, of inputs for parsers."""

FILES = sorted(
    path for path in TESTS.rglob("*.py") if not {*path.parent.relative_to(TESTS).parts} & {*_KNOW}
)

PUBLIC = re.compile(
    r"zarr_shardstore(\.(transformers|errors)(\.\w+)?|\.storage_transformers|\.__\w+__"
    rf"|\.store\.pipeline\.ShardedCodecPipeline|\.({'|'.join(zarr_shardstore.__all__)}))?"
)
"""Modules that users import, the group of entry points, and the path that configurations have."""


def internals_in(source: str) -> set[str]:
    """The internals that a test imports, or names in a text: code, or a target of a patch."""
    names: set[str] = set()
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module="zarr_shardstore"):
                names |= {f"zarr_shardstore.{alias.name}" for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                names |= {f"{module}.{alias.name}" for alias in node.names}
            case ast.Attribute(value=ast.Name("zarr_shardstore"), attr=name):
                names.add(f"zarr_shardstore.{name}")
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names |= names_in(text)
    names = {name for name in names if re.match(r"zarr_shardstore\b", name)}
    return {name for name in names if not PUBLIC.fullmatch(name)}


def names_in(text: str) -> set[str]:
    """The dotted names in a text, or what it imports if it is code."""
    if "import" in text:
        with suppress(SyntaxError):
            return internals_in(text)
    return set(re.findall(r"zarr_shardstore(?:\.\w+)+", text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_only_unit_tests_know_internals(path: Path) -> None:
    """What users are promised is tested by public names and by `tests.support.kit`."""
    assert internals_in(path.read_text()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import zarr_shardstore.io.local.fs",
        "from zarr_shardstore import io",
        "from zarr_shardstore.io.local import fs",
        "from zarr_shardstore.zarr_hooks.pipeline import MISSING",
        "mock.patch('zarr_shardstore.io.local.fs.write_at')",
        "import_module('zarr_shardstore.io')",
        "CODE = 'from zarr_shardstore.io import driver'",
    ],
)
def test_internals_are_found(source: str) -> None:
    """However they are named."""
    assert internals_in(source)
