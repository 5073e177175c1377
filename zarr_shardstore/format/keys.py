"""Grammar of store keys: texts that can be chunk keys, and the spelling of coordinates.

A chunk key is the directory of its array followed by a *suffix*. A suffix is a list of
``/``-separated *components*, each of which spells the coordinates of some dimensions::

    style     separator /             separator .        0-d
    draft     c96/18    c96|18        c96.18   c96.18    c  (zarr 2.18 writes c0)
    default   c/96/18   c|96|18       c.96.18  c.96.18   c
    v2        96/18     96|18         96.18    96.18     0

An array of the draft may have any other separator without digits and slashes: ``c96-18``.

Only the metadata of an array says whether a key *is* a chunk key. This module says what a key
could be.

Source: sharding storage transformer draft, "Key & value transformation"; Zarr v3 core,
"Chunk key encoding"; Zarr v2, "Storing a single array".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from zarr_shardstore.errors import SpecError

Style = Literal["draft", "default", "v2"]
Coords = tuple[int, ...]
KnownSide = int | tuple[int, int, int]
"""Along one dimension the length of all boxes; or the number, start and stop of one box."""

DRAFT_DATA_ROOT = "data/root/"
"""Every chunk key of the draft hierarchy starts with this."""

SHARD_MARK = ".__shard"
"""End of the key of a shard, for an array object that addresses shards of a store of chunks."""

# An empty, "." or ".." segment would give one stored object two names, or leave the store. So
# would a leading or trailing slash, and the empty key.
_BAD_SEGMENT = re.compile(r"(?:^|[/\\])\.{0,2}(?:[/\\]|\Z)|\x00")

# Names of our own files: the lock and the journal of a shard, a file that is not renamed yet.
# Listings hide them, and clean-up removes them.
_OURS = re.compile(r"(?:(?<=[^/])\.__(?:lock|journal|shard)|\.[0-9a-f]{32}\.partial)(?:/|$)")

# No sign, no leading zero, ASCII only; 19 digits hold every int64.
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_IS_NUMBER = re.compile(_NUMBER)
_IS_DOTTED = re.compile(rf"(?:c|{_NUMBER})(?:\.{_NUMBER})+")
_KNOWN = "[0-9]+(?::[0-9]+-[0-9]+)?"
_IS_MARKED = re.compile(rf"(.+)@((?:{_KNOWN}(?:,{_KNOWN})*)?)\.__shard", re.DOTALL)
_IS_DRAFT = re.compile(rf"c{_NUMBER}(?:\.{_NUMBER})*")
_HAS_DIGIT = re.compile("[0-9]")
_SLASH_OR_DOT = re.compile(r"[/.]")
SEPARATORS = {
    "draft": re.compile(r"/|[^0-9/\\\x00]+"),
    "default": _SLASH_OR_DOT,
    "v2": _SLASH_OR_DOT,
}
"""Texts that may separate coordinates, by the style of chunk keys."""


def check_key(key: str) -> None:
    """Raise `SpecError` for a key outside the store, a second name of an object, or our files."""
    if not isinstance(key, str):
        raise SpecError(f"a key is a str, got {type(key).__name__}: {key!r}")
    if _BAD_SEGMENT.search(key):
        raise SpecError(
            f"key {key!r} is refused: keys are relative, have no empty, '.' or '..' segment, "
            "and no NUL"
        )
    if key.endswith(SHARD_MARK):
        raise _refused_mark(key)
    if _OURS.search(key):
        raise SpecError(
            f"key {key!r} is refused: names that end with '.__lock', '.__journal', or 32 "
            "hexadecimal digits and '.partial', are those of files beside shards"
        )
    if not key.isascii():
        try:  # a file whose name is no UTF-8 also has a key
            key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise SpecError(f"key {key!r} is refused: it is no text that can be stored") from error


def _refused_mark(key: str) -> SpecError:
    return SpecError(
        f"key {key!r} is refused: it is that of a shard, by an array object that addresses "
        "shards and got another codec pipeline since; open the array again, by zarr.open_array"
    )


class MarkedKey(NamedTuple):
    """Key of a shard, and what the array object that addresses it knows of its box of chunks."""

    key: str
    known: tuple[KnownSide, ...]
    """One for each dimension."""

    @classmethod
    def parse(cls, text: str) -> MarkedKey:
        """Parse a text that ends with `SHARD_MARK`; raise `SpecError` if no array made it.

        >>> MarkedKey.parse("a/c/3/0@3:24-32,8.__shard")
        MarkedKey(key='a/c/3/0', known=((3, 24, 32), 8))
        """
        match = _IS_MARKED.fullmatch(text)
        if match is None:
            raise _refused_mark(text)
        return cls(match[1], _parse_known(match[2]))

    def __str__(self) -> str:
        sides = [
            str(side) if isinstance(side, int) else f"{side[0]}:{side[1]}-{side[2]}"
            for side in self.known
        ]
        return f"{self.key}@{','.join(sides)}{SHARD_MARK}"


@lru_cache(64)
def _parse_known(text: str) -> tuple[KnownSide, ...]:
    sides: list[KnownSide] = []
    for side in filter(None, text.split(",")):
        number, *bounds = map(int, re.split("[:-]", side))
        sides.append((number, bounds[0], bounds[1]) if bounds else number)
    return tuple(sides)


def check_prefix(prefix: str) -> str:
    """Check a prefix: empty, a key, or a key and ``/``. Return ``""`` for the draft's ``"/"``."""
    if not isinstance(prefix, str):
        raise SpecError(f"a prefix is a str, got {type(prefix).__name__}: {prefix!r}")
    if prefix in ("", "/"):
        return ""
    check_key(prefix.removesuffix("/"))
    return prefix


class ChunkKeyEncoding(NamedTuple):
    """Spelling of chunk coordinates in the keys of one array."""

    style: Style
    separator: str

    def encode(self, coords: Coords) -> str:
        if not coords:
            return "0" if self.style == "v2" else "c"
        return self.marker + self.separator.join(map(str, coords))

    @property
    def marker(self) -> str:
        """Text before the first coordinate of a suffix."""
        if self.style == "default":
            return f"c{self.separator}"
        return "c" if self.style == "draft" else ""

    def decode(self, suffix: str, ndim: int) -> Coords | None:
        """Return the `ndim` coordinates that `suffix` spells, or ``None``."""
        if ndim == 0:
            # zarr-python 2.18 stores the only chunk of a 0-d draft array as "c0".
            is_spelled = suffix == self.encode(()) or (self.style == "draft" and suffix == "c0")
            return () if is_spelled else None
        marker = self.marker
        numbers = suffix[len(marker) :].split(self.separator)
        if not suffix.startswith(marker) or len(numbers) != ndim:
            return None
        return tuple(map(int, numbers)) if all(map(_IS_NUMBER.fullmatch, numbers)) else None

    def decode_start(self, text: str, ndim: int) -> tuple[Coords, str] | None:
        """Return the whole coordinates that the start of a suffix spells, and digits of the next
        one; ``None`` if no suffix of `ndim` coordinates starts so.

        >>> ChunkKeyEncoding("default", "/").decode_start("c/96/1", ndim=3)
        ((96,), '1')
        """
        marker = self.marker
        if len(text) < len(marker):
            return ((), "") if marker.startswith(text) else None
        if not text.startswith(marker):
            return None
        *whole, rest = text[len(marker) :].split(self.separator)
        digits = rest.rstrip(self.separator)
        if digits != rest:  # a separator of several characters has begun
            if not self.separator.startswith(rest[len(digits) :]):
                return None
            whole, digits = [*whole, digits], ""
        numbers = [*whole, digits] if digits else whole
        if len(whole) >= ndim or not all(map(_IS_NUMBER.fullmatch, numbers)):
            return None
        return tuple(map(int, whole)), digits

    def decode_leading(self, name: str, ndim: int) -> Coords | None:
        """Return the coordinates that a suffix, or a directory of suffixes, spells."""
        coords = self.decode(name, ndim)
        start = self.decode_start(f"{name}/", ndim) if coords is None else None
        return coords if start is None else start[0]


def odd_candidates(key: str) -> Iterator[tuple[str, str]]:
    """Split a key as ``(directory, rest)`` in every way, if its last segment has a digit. The
    key may be one that `draft_candidate` and `v3_candidates` do not know.

    >>> list(odd_candidates("data/root/foo/c96-18")), list(odd_candidates("foo/notes.txt"))
    ([('', 'foo/c96-18'), ('foo', 'c96-18')], [])
    """
    segments = key.removeprefix(DRAFT_DATA_ROOT).split("/")
    if _HAS_DIGIT.search(segments[-1]):
        for i in range(len(segments)):
            yield "/".join(segments[:i]), "/".join(segments[i:])


def v3_candidates(key: str) -> Iterator[tuple[str, str]]:
    """Split `key` as ``(array path, suffix)`` in every way that Zarr v3 allows, shallowest first.
    An array owns the keys below it, because it holds no other node.

    >>> list(v3_candidates("img/c/0/1"))
    [('img', 'c/0/1'), ('img/c', '0/1'), ('img/c/0', '1')]
    """
    segments = key.split("/")
    last = segments[-1]
    if last == "c" or _IS_DOTTED.fullmatch(last):
        yield "/".join(segments[:-1]), last
    if not _IS_NUMBER.fullmatch(last):
        return
    first_number = len(segments) - 1
    while first_number > 0 and _IS_NUMBER.fullmatch(segments[first_number - 1]):
        first_number -= 1
    if first_number > 0 and segments[first_number - 1] == "c":
        first_number -= 1
    for i in range(first_number, len(segments)):
        yield "/".join(segments[:i]), "/".join(segments[i:])


def draft_candidate(key: str) -> tuple[str, str] | None:
    """Split `key` as ``(array path, suffix)`` by the draft's grammar; ``None`` for other keys."""
    if not key.startswith(DRAFT_DATA_ROOT):
        return None
    segments = key[len(DRAFT_DATA_ROOT) :].split("/")
    first = len(segments) - 1
    while first > 0 and _IS_NUMBER.fullmatch(segments[first]):
        first -= 1
    marker = segments[first]
    alone = first == len(segments) - 1
    if (marker == "c" and alone) or (_IS_DRAFT.fullmatch(marker) and (alone or "." not in marker)):
        return "/".join(segments[:first]), "/".join(segments[first:])
    return None


_MAX_DEPTH = 64
_MAX_REPEATED = 4096
"""Most directories of one depth with two names that are twice in their path, or one three times."""


def check_no_loop(directories: Sequence[str]) -> None:
    """Raise `SpecError` for directories of one depth that a web server seems to list in each other:
    their paths are too deep, or too many paths have the same names."""
    parts = [path.split("/") for path in directories]
    n_repeated = sum(len(names) - len(set(names)) > 1 for names in parts)
    if n_repeated > _MAX_REPEATED or max(map(len, parts), default=0) > _MAX_DEPTH:
        raise SpecError(
            f"the directories go on below {directories[0]!r}: one is listed in itself; "
            "pass the paths of arrays"
        )
