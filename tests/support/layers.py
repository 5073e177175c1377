"""Drawing of the package in ``spec_notes/architecture.md``, and tree of its files, by the source.

``python -m tests.support.layers`` writes the drawing into its page, ``--tree`` prints the tree.
``docs/hooks.py`` makes a page of the tree.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zarr_shardstore"
NOTES = ROOT / "spec_notes"
PAGES = (NOTES / "architecture.md",)
PROSE = (NOTES / "architecture.md", NOTES / "journeys.md")

_BEGIN, _END = "<!-- made by tests/support/layers.py -->\n", "<!-- end -->"
_BLOCK = re.compile(f"{_BEGIN}(.*?){_END}", re.DOTALL)

_WIDTH = 25
"""Characters of the longest name with its indent. Fixed, so that one line changes for one file."""


def blocks() -> list[str]:
    """Return the drawing."""
    return [drawing(imports())]


def blocks_in_pages() -> list[str]:
    """Return the drawing that its page has."""
    return [block for page in PAGES for block in _BLOCK.findall(page.read_text())]


def write() -> None:
    """Write the drawing into its page."""
    for page, made in zip(PAGES, blocks(), strict=True):
        before, _, rest = page.read_text().partition(_BEGIN)
        page.write_text(before + _BEGIN + made + _END + rest.partition(_END)[2])


def prose() -> str:
    """Return the pages about the architecture without what is made from the source."""
    return "".join(_BLOCK.sub("", page.read_text()) for page in PROSE)


def imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports; a room is a folder or a file of the package."""
    import grimp  # the tests of the oldest versions do without

    graph = grimp.build_graph(PACKAGE.name)
    rooms = sorted(graph.find_children(PACKAGE.name))
    for room in rooms:
        if graph.find_children(room):
            graph.squash_module(room)
    return {
        room.rpartition(".")[2]: {
            used.rpartition(".")[2]
            for used in graph.find_modules_directly_imported_by(room)
            if used not in (PACKAGE.name, room)
        }
        for room in rooms
    }


def tree() -> str:
    """Return each folder and file with the first line of its docstring."""
    files = [path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    folders = [path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    lines = [(f"{PACKAGE.name}/", _summary(PACKAGE))]
    for path in [*sorted(files), *sorted(folders)]:
        lines += _entries(path, 1)
    return "\n".join(["```text", *(f"{name:{_WIDTH}}  {text}" for name, text in lines), "```", ""])


@cache
def sources() -> dict[Path, ast.Module]:
    """Return the syntax tree of each file of the package."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def drawing(uses: dict[str, set[str]]) -> str:
    """Return a Mermaid flowchart. An edge that other edges imply is left out."""
    lines = ["```mermaid", "flowchart TD"]
    for room in sorted(uses):
        path = PACKAGE / room
        text = _summary(path if path.is_dir() else path.with_suffix(".py"))
        head = re.split(r"[:,;.(]", text.replace('"', "'"))[0].strip()
        lines.append(f'    {room}["<b>{room}</b><br>{head}"]')
    for room, used in sorted(uses.items()):
        implied = {below for other in used for below in _below(uses, other)}
        lines += [f"    {room} --> {other}" for other in sorted(used - implied)]
    return "\n".join([*lines, "```", ""])


def _entries(path: Path, depth: int) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    if path.is_file():
        yield indent + path.name, _summary(path)
        return
    yield f"{indent}{path.name}/", _summary(path)
    files = [file for file in path.glob("*.py") if file.name != "__init__.py"]
    folders = [folder for folder in path.iterdir() if (folder / "__init__.py").is_file()]
    for entry in [*sorted(files), *sorted(folders)]:
        yield from _entries(entry, depth + 1)


def _summary(path: Path) -> str:
    """Return the first line of the docstring of a file or a folder."""
    file = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(sources()[file]) or ""
    return text.split("\n")[0].replace("`", "").removesuffix(".")


def _below(uses: dict[str, set[str]], room: str) -> set[str]:
    return uses[room].union(*(_below(uses, other) for other in uses[room]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--tree"]:
        print(tree())
    else:
        write()
