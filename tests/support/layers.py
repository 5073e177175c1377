"""Drawing of the package's rooms and of the imports between them, for ``architecture.md``.

``python -m tests.support.layers`` writes the drawing into the page.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import grimp

PACKAGE = "zarr_shardstore"
PAGE = Path(__file__).parents[2] / "spec_notes" / "architecture.md"

_BLOCK = re.compile(r"(?<=<!-- made by tests/support/layers.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports; a room is a folder or a file of the package."""
    graph = grimp.build_graph(PACKAGE)
    rooms = sorted(graph.find_children(PACKAGE))
    for room in rooms:
        if graph.find_children(room):
            graph.squash_module(room)
    return {
        room.rpartition(".")[2]: {
            used.rpartition(".")[2]
            for used in graph.find_modules_directly_imported_by(room)
            if used not in (PACKAGE, room)
        }
        for room in rooms
    }


def draw() -> str:
    """Return a Mermaid flowchart. An edge that other edges imply is left out."""
    uses = imports()
    lines = ["```mermaid", "flowchart TD"]
    for room in sorted(uses):
        lines.append(f'    {room}["<b>{room}</b><br>{_summary(room)}"]')
    for room, used in sorted(uses.items()):
        implied = set().union(*(_below(uses, other) for other in used)) if used else set()
        lines += [f"    {room} --> {other}" for other in sorted(used - implied)]
    return "\n".join([*lines, "```", ""])


def drawn() -> str:
    """Return the drawing in the page."""
    match = _BLOCK.search(PAGE.read_text())
    assert match, f"{PAGE} has no place for the drawing"
    return match[0]


def _below(uses: dict[str, set[str]], room: str) -> set[str]:
    return uses[room].union(*(_below(uses, other) for other in uses[room]))


def _summary(room: str) -> str:
    """Return the first line of the docstring of a room, up to a colon."""
    path = import_module(PACKAGE).__path__[0]
    file = Path(path, room, "__init__.py")
    source = (file if file.is_file() else Path(path, f"{room}.py")).read_text()
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    return re.split(r"[:.]", first.replace("`", "").replace('"', "'"))[0]


if __name__ == "__main__":
    PAGE.write_text(_BLOCK.sub(lambda _: draw(), PAGE.read_text()))
