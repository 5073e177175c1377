"""The page about the architecture shows the package as it is."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import layers

ROOT = Path(__file__).parents[2]


def test_the_drawing_is_made_from_the_imports() -> None:
    """``python -m tests.support.layers`` draws it again."""
    assert layers.drawn() == layers.draw()


def test_the_tree_names_each_file_once() -> None:
    """The tree in the page has the modules of the package, and no others."""
    package = ROOT / "zarr_shardstore"
    files = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    files = {file for file in files if not file.endswith("__init__.py")}
    tree = re.search(r"```text\nzarr_shardstore/\n(.*?)```", layers.PAGE.read_text(), re.DOTALL)
    assert tree
    named: list[str] = []
    folders: list[str] = []
    for line in tree[1].splitlines():
        depth, entry = (len(line) - len(line.lstrip())) // 4, line.split("  ")
        name = line.strip().split()[0]
        del folders[depth - 1 :]
        if name.endswith("/"):
            folders.append(name)
            named += ["".join(folders) + f"{module}.py" for module in re.findall(r"\w+", entry[-1])]
        elif name.endswith(".py"):
            named.append("".join(folders) + name)
    assert sorted(named) == sorted(files)

