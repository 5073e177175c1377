"""The pages about the architecture show the package as it is."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

from tests.support import layers
from tests.support.layers import PACKAGE


def test_the_drawing_is_made_from_the_source() -> None:
    """A room, its first line or an import has changed: the page is made again."""
    assert layers.blocks_in_pages() == layers.blocks(), "run: python -m tests.support.layers"


def test_the_tree_has_each_file() -> None:
    """With the first line of its docstring, for the site."""
    lines = [line.split(maxsplit=1) for line in layers.tree().splitlines()[1:-1]]
    assert all(len(line) == 2 for line in lines), [line for line in lines if len(line) < 2]
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(name for name, _ in lines if name.endswith(".py")) == sorted(names)


def test_each_file_that_the_page_names_exists() -> None:
    """A name without a folder is that of one file only."""
    files = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
    folders = [f"{path.relative_to(PACKAGE)}/" for path in PACKAGE.rglob("*") if path.is_dir()]
    for name in re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`", layers.prose()):
        found = [path for path in files + folders if f"/{path}".endswith(f"/{name}")]
        assert name in found or len(found) == 1, (name, found)


def test_each_name_in_the_page_exists() -> None:
    """`Name` anywhere in the package, and `Owner.name` in that class or module."""
    defined = names_in_package()
    for text in re.findall(r"`([A-Za-z]\w*(?:\.\w+)?)`", layers.prose()):
        owner, _, name = text.rpartition(".")
        assert text.endswith(".py") or name in defined[owner], text


ROOMS = {
    "core": 22_599,
    "core/format": 1_775,
    "core/metadata": 1_240,
    "core/shards": 2_450,
    "core/arrays": 1_970,
    "core/operations": 2_451,
    "core/io": 6_347,
    "core/zarr_hooks": 1_990,
    "core/store": 3_849,  # 86 lines read entries for the loader
    "tools": 9_618,  # 190 lines estimate what a conversion costs, 100 convert a part of a store
    "cli": 1_384,  # 100 lines: first screen, exit codes, tables of groups, estimates as text
    "interop": 6_752,  # 1,830 lines are the loader
}
"""Lines that each room may have. The core is what is neither `tools`, `cli` nor `interop`."""


def test_each_room_can_be_read() -> None:
    """A limit is moved by a decision only: who adds, lets go."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room, n = path.relative_to(PACKAGE).parts[0], path.read_text().count("\n")
        if room not in ("tools", "cli", "interop"):
            lines["core"] += n
            room = f"core/{room}"
        lines[room] += n
    assert {room: lines[room] for room, limit in ROOMS.items() if lines[room] > limit} == {}


LARGE = {
    "DraftHierarchyStore": "zarr's interface of a store, each method with its keys translated",
    "LocalBackend": "a method for each request, and the capabilities of a backend",
    "ZarrBackend": "as LocalBackend",
    "ShardingMapping": "the operations of the draft and those of a mapping, by their names",
    "_read_spans": "round 2 of every read; one function more costs each cold read a call",
}
"""What is larger than the limits, and why: at most five."""


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_files_classes_and_functions_are_small() -> None:
    found = set()
    for path, tree in layers.sources().items():
        assert path.read_text().count("\n") <= 500, path
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name, body=body):
                    n_methods = sum(
                        isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in body
                    )
                    if n_methods > 25:
                        found.add(name)
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                    if _n_lines(node) > 60 or _n_branches(node) > 15:
                        found.add(name)
    assert found == LARGE.keys()
    assert len(LARGE) <= 5


def _n_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines after the docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def _n_branches(node: ast.AST) -> int:
    """Branches and loops, also of comprehensions, but none of inner functions."""
    n = 0
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            n += isinstance(each, (*_BRANCHES, ast.comprehension)) + _n_branches(each)
    return n


def test_the_gate_is_narrow() -> None:
    names = [
        name
        for node in layers.sources()[PACKAGE / "access.py"].body
        if isinstance(node, ast.Assign | ast.AugAssign)
        for name in ast.literal_eval(node.value)
    ]
    assert names == list(dict.fromkeys(names))
    assert 0 < len(names) <= 40


def test_few_files_are_in_one_folder() -> None:
    assert max(Counter(path.parent for path in PACKAGE.rglob("*.py")).values()) <= 12


OF_THE_WHOLE = {"call_counts", "imports", "kit", "simulated_bugs", "words", "zarr_names"}
"""Unit tests that are of no room."""


def test_unit_tests_mirror_the_package() -> None:
    """``tests/unit/ROOM/test_MODULE.py``, with a subject after the name of the module if there are
    several."""
    folder = PACKAGE.parent / "tests/unit"
    for path in folder.rglob("test_*.py"):
        room, name = path.parent.relative_to(folder).as_posix(), path.stem.removeprefix("test_")
        if room == ".":
            assert name in OF_THE_WHOLE
        else:
            modules = [file.stem for file in (PACKAGE / room).rglob("*.py")]
            assert any(f"{name}_".startswith(f"{module}_") for module in modules), path


def test_missing_names_are_found() -> None:
    """Names of the package are no others."""
    defined = names_in_package()
    assert "ShardIndex" in defined[""]
    assert "decode" in defined["ShardIndex"]
    assert "ShardIndex" in defined["shard"]
    assert "ShardIndexes" not in defined[""]
    assert "decode" not in defined["ShardingStore"]


@cache
def names_in_package() -> dict[str, set[str]]:
    """Return the names in each class and module; those in any of them by the empty text.

    Values of options and strategies, such as ``"append"``, count as names.
    """
    names: defaultdict[str, set[str]] = defaultdict(set)
    for path, module in layers.sources().items():
        names[path.parent.name if path.name == "__init__.py" else path.stem] |= names_in(module)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                names[node.name] |= names_in(node)
    names[""] = set().union(*names.values(), {path.stem for path in PACKAGE.rglob("*")})
    return names


def names_in(tree: ast.AST) -> set[str]:
    """Return what is defined below a node: classes, functions, variables, parameters."""
    return {name for node in ast.walk(tree) for name in _defined_by(node)}


def _defined_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            yield name
        case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.Constant(value=str(text)):
            yield text
