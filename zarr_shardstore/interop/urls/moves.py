"""Names that patterns stand for, and moves that lose nothing, in a file system of fsspec.

fsspec expands a pattern before the copy and again before the removal: so it would also remove the
copies, and what came meanwhile. A name that exists is a name, also with brackets.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from fsspec.core import has_magic

from zarr_shardstore.errors import SpecError


def names_of(fs: Any, path: str | list[str], *, maxdepth: int | None) -> list[str]:
    """Return the names that paths or patterns stand for now."""
    if maxdepth is not None:
        raise SpecError("maxdepth would remove more than it names: name each file")
    paths = path if isinstance(path, list) else [path]
    return [n for each in paths for n in (fs.expand_path(each) if _matches(fs, each) else [each])]


def _matches(fs: Any, path: str) -> bool:
    return has_magic(path) and not fs.exists(path)


def moves_of(
    fs: Any, path1: str | list[str], path2: str | list[str], *, maxdepth: int | None
) -> list[tuple[str, str]]:
    """Return the names to move, and where each is copied to; refuse all if one would be lost."""
    sources = path1 if isinstance(path1, list) else [path1]
    targets = path2 if isinstance(path2, list) else [path2] * len(sources)
    moves: dict[str, tuple[str, str]] = {}
    for source, target in zip(sources, targets, strict=True):
        if source == target:
            continue
        if _matches(fs, source) or (isinstance(path1, list) and not isinstance(path2, list)):
            target = f"{target.rstrip('/')}/"
        for name in names_of(fs, source, maxdepth=maxdepth):
            end = _end_of(fs, name, target)
            if end in moves:
                raise SpecError(f"{name!r} and {moves[end][0]!r} would both become {end!r}")
            moves[end] = name, target
    removed = {fs._strip_protocol(name) for name, _ in moves.values()}
    for end, (name, _) in moves.items():
        if not removed.isdisjoint(accumulate(end.split("/"), "{}/{}".format)):
            raise SpecError(f"{name!r} would become {end!r}, which is moved itself")
    return list(moves.values())


def _end_of(fs: Any, path: str, path2: str) -> str:
    """Return the path that a source gets; refuse a move into itself."""
    source, target = fs._strip_protocol(path), fs._strip_protocol(path2)
    if has_magic(source):
        raise SpecError(f"{path!r} has signs of a pattern in its name: copy it by its keys")
    if not path.endswith("/") and (path2.endswith("/") or fs.isdir(path2)):
        target = f"{target}/{source.rpartition('/')[2]}".lstrip("/")
    if not source or f"{target}/".startswith(f"{source}/"):
        raise SpecError(f"{path!r} cannot be moved into itself, and was not changed")
    return str(target)
