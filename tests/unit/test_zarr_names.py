"""Names of zarr that are not public: one page has all of them, and each is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import zarr

from tests.support.layers import PACKAGE, sources

PAGE = PACKAGE.parent / "spec_notes/zarr_names.md"
TABLE: dict[str, str] = dict(
    re.findall(r"^\| `(zarr\.[\w.]+)` \| (\S+) \|", PAGE.read_text(), re.M)
)
"""Names, and the versions of zarr that have them."""

OF_OTHERS = {
    *("_replace", "_asdict", "_at_fork_reinit", "_current_frames", "_exit"),  # Python
    *("_strip_protocol", "_join", "_isfile", "_ls", "_info", "_cp_file", "_rm_file", "_makedirs"),
    "_supports_sync_io",  # of stores outside zarr
    "_objects",  # h5py
}
"""Names with an underscore that Python, fsspec and h5py have."""

LEFT = {"io/update_queue.py", "interop/urls/filesystem.py"}
"""Files outside `zarr_hooks` that import a name with an underscore."""


def is_private(name: str) -> bool:
    _, *parts = name.split(".")
    return parts[:1] == ["core"] or any(part.startswith("_") for part in parts)


def names_in(tree: ast.AST) -> Iterator[str]:
    """The private names of zarr that a module imports, or has as texts."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "zarr":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.Constant(value=str(text)) if re.fullmatch(r"zarr(\.\w+)+", text):
                yield text


def attributes_in(tree: ast.AST) -> Iterator[str]:
    """The attributes with an underscore that a module takes of other objects than its own."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[_, ast.Constant(name), *_]):
                yield str(name)


def defined_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.AnnAssign(target=ast.Name(name)):
                yield name


def is_there(name: str) -> bool:
    """Return whether the zarr that is installed has a name: a module, or an attribute of one."""
    found: Any = zarr
    path = "zarr"
    for part in name.split(".")[1:]:
        path += f".{part}"
        declared = (vars(cls).get("__annotations__", ()) for cls in getattr(found, "__mro__", ()))
        if hasattr(found, part):
            found = getattr(found, part)
        elif not any(part in names for names in declared):
            try:
                found = import_module(path)
            except ImportError:
                return False
    return True


def test_the_page_has_all_names() -> None:
    """Of imports and texts, and of attributes that neither we nor others have; and no more."""
    used = {name for tree in sources().values() for name in names_in(tree) if is_private(name)}
    ours = {name for tree in sources().values() for name in defined_in(tree)} | OF_OTHERS
    taken = {name for tree in sources().values() for name in attributes_in(tree)}
    private = {name for name in taken if re.match("_[a-z]", name)} - ours
    assert used <= TABLE.keys()
    assert private <= {name.rpartition(".")[2] for name in TABLE}
    unused = TABLE.keys() - used
    assert {name for name in unused if name.rpartition(".")[2] not in taken} == set()


@pytest.mark.parametrize("name", TABLE)
def test_zarr_has_each_name(name: str) -> None:
    """A zarr without it fails here, with the name."""
    version = ".".join(zarr.__version__.split(".")[:2])
    assert TABLE[name] in ("all", "3.1", "3.4")
    if TABLE[name] in ("all", version):
        assert is_there(name)


def test_a_name_that_is_gone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("zarr.core.sync.sync")
    assert not is_there("zarr.core.sync.sync")
    assert not is_there("zarr.core.sync.sync.more")
    assert not is_there("zarr.storage.MemoryStore._no_such_dict")


def test_names_with_an_underscore_are_imported_in_one_room() -> None:
    """Who looks for what zarr may change without a word, looks there."""
    found = {
        str(path.relative_to(PACKAGE))
        for path, tree in sources().items()
        for name in names_in(tree)
        if name.startswith("zarr.") and "._" in name
    }
    assert {path for path in found if not path.startswith("zarr_hooks/")} <= LEFT
